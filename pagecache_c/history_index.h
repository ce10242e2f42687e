/* history_index.h - which records of which regions are there, and in which segments. Not locked:
 * the history's mutex covers it.
 *
 * Invariants, for each region in the index:
 *   - its records have consecutive versions, at least one record;
 *   - only the oldest may be one that keeps nothing (a skip): it makes those before it useless.
 */
#ifndef PC_HISTORY_INDEX_H
#define PC_HISTORY_INDEX_H

#include "history_log.h"

#include <stddef.h>

#define PC__HISTORY_BUCKETS 4096u

/* A part of the log. */
struct pc__history_segment {
    struct pc__history_segment *next, *prev; /* older to newer */
    struct pc__store *store;
    uint64_t charged_bytes;       /* of the budget of its kind */
    uint64_t head_end;            /* the heads of records end here */
    uint64_t data_begin;          /* their blocks begin here */
    struct pc__record *records;   /* those in the index; a circular list, NULL if none */
    size_t n_records;             /* in that list */
    bool is_busy;                 /* somebody without the lock works on it: not to be freed */
};

struct pc__history_region {
    struct pc__history_region *hash_next;
    uint64_t id;
    struct pc__record **records;  /* [begin, begin + n) of capacity, ascending */
    size_t begin, n, capacity;
};

struct pc__history_index {
    struct pc__history_region *buckets[PC__HISTORY_BUCKETS];
    size_t n_regions;
    uint64_t n_records;
};

struct pc__history_region *pc__index_get(const struct pc__history_index *index, uint64_t region);
/* Adds the newest record of its region, to segment's list too. Drops what it makes useless: records
 * before a gap, or before a skip; *n_dropped is their number. The index owns the record, unless it
 * fails (PC_ERR_NO_MEMORY): then nothing has changed. */
int pc__index_push(struct pc__history_index *index, struct pc__history_segment *segment,
                   struct pc__record *record, uint64_t *n_dropped);
/* Drops the region's records up to this version. Returns their number. */
uint64_t pc__index_drop(struct pc__history_index *index, uint64_t region, uint64_t version);
/* The version of the newest record. */
uint64_t pc__index_newest(const struct pc__history_region *region);
/* The oldest version that can be read against a base of version before. region may be NULL. */
uint64_t pc__index_floor(const struct pc__history_region *region, uint64_t before);
/* The record of that version; one must be there. The next ones follow it. */
struct pc__record *const *pc__index_at(const struct pc__history_region *region, uint64_t version);
void pc__index_free(struct pc__history_index *index);

#endif
