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
/* The same files, held open: for who asks before each write. Looking takes some ten preads, a tenth of
 * the time, and sees what they say at that moment. */
#define PC__HUGE_PAGES_FILES 32
struct pc__huge_pages_files {
    int fds[PC__HUGE_PAGES_FILES], n;
};
/* PC_OK, or why they cannot be held: then none is. close: also of none. */
int pc__huge_pages_open(struct pc__huge_pages_files *files, const char *directory);
void pc__huge_pages_close(struct pc__huge_pages_files *files);
/* One that cannot be read counts as one that makes huge pages. */
bool pc__huge_pages_now(const struct pc__huge_pages_files *files);
#define PC__HUGE_PAGES_DIRECTORY "/sys/kernel/mm/transparent_hugepage"
/* No touch of this map makes a huge page, and the kernel makes none of what lies under it later.
 * Before the first touch. */
void pc__huge_pages_refuse(void *map, uint64_t length_bytes);
/* Makes single pages of zeros of what is absent in the blocks under [offset, offset + n_bytes): a
 * write then finds them. For memory that nobody reads yet. */
int pc__huge_pages_prevent(int memfd, uint64_t offset_bytes, uint64_t n_bytes);

#endif
