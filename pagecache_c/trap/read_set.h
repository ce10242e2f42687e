/* read_set.h - which blocks of a range are in this process's page table. */
#ifndef PC_READ_SET_H
#define PC_READ_SET_H

#include "pagecache.h"

#include <stdbool.h>

enum pc__scan {
    PC__SCAN_MAPPED, /* there is an entry: of a shared mapping, what was touched */
    PC__SCAN_COPIED  /* there is an entry, and it is not the file's: what a private one wrote */
};

/* Merged runs in blocks from address, in order. Returns their number, which may exceed capacity
 * (the first of them are stored), or a negative pc_err. */
int64_t pc__read_set(enum pc__scan what, uint64_t address, uint64_t length_bytes,
                     struct pc_run *runs, size_t capacity);

/* The two ways, for tests: PAGEMAP_SCAN (Linux 6.7; sets *is_known to false elsewhere), and
 * reading the entries, which takes time in proportion to the length. */
int64_t pc__read_set_scan(enum pc__scan what, int pagemap, uint64_t address, uint64_t length_bytes,
                          struct pc_run *runs, size_t capacity, bool *is_known);
int64_t pc__read_set_entries(enum pc__scan what, int pagemap, uint64_t address,
                             uint64_t length_bytes, struct pc_run *runs, size_t capacity);

#endif
