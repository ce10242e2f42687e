/* read_set.h - which blocks of a range are in this process's page table. */
#ifndef PC_READ_SET_H
#define PC_READ_SET_H

#include "pagecache.h"

#include <stdbool.h>

/* Merged runs in blocks from address, in order. Returns their number, which may exceed capacity
 * (the first of them are stored), or a negative pc_err. */
int64_t pc__read_set(uint64_t address, uint64_t length_bytes, struct pc_run *runs,
                     size_t capacity);

/* The two ways, for tests: PAGEMAP_SCAN (Linux 6.7; sets *is_known to false elsewhere), and
 * reading the entries, which takes time in proportion to the length. */
int64_t pc__read_set_scan(int pagemap, uint64_t address, uint64_t length_bytes,
                          struct pc_run *runs, size_t capacity, bool *is_known);
int64_t pc__read_set_entries(int pagemap, uint64_t address, uint64_t length_bytes,
                             struct pc_run *runs, size_t capacity);

#endif
