/* huge_pages.h - shared memory that the kernel makes of more than single pages. See huge_pages.c. */
#ifndef PC_HUGE_PAGES_H
#define PC_HUGE_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PC__HUGE_PAGES_WHY_BYTES 160

/* Whether writes to shared memory make huge pages, as the files of `directory` say now; why: the
 * first file that says so, with its setting. Some ten small reads. */
bool pc__huge_pages_in(const char *directory, char why[PC__HUGE_PAGES_WHY_BYTES]);
/* The same of this machine. */
bool pc__huge_pages(char why[PC__HUGE_PAGES_WHY_BYTES]);
/* No touch of this map makes a huge page, and the kernel makes none of what lies under it later.
 * Before the first touch. */
void pc__huge_pages_refuse(void *map, uint64_t length_bytes);
/* Makes single pages of zeros of what is absent in the blocks under [offset, offset + n_bytes): a
 * write then finds them. For memory that nobody reads yet. */
int pc__huge_pages_prevent(int memfd, uint64_t offset_bytes, uint64_t n_bytes);

#endif
