/* history_index.h - which records of which regions are there, and in which segments. Not locked:
 * the history's mutex covers it.
 *
 * Invariants, for each region in the index:
 *   - its records have consecutive versions, at least one record;
 *   - only the oldest may be one that keeps nothing (a skip): it makes those before it useless;
 *   - those from the region's floor on are retained, and no others. So dropping what is not retained
 *     drops the oldest, and leaves what is retained readable.
 * As equations, which pc__index_audit looks at:
 *   n_regions = regions in the buckets, each in its own; n_records = the sum of n over these
 *   records[begin + i].version = records[begin].version + i, and .region = the region's, for 0 <= i < n, n > 0
 *   is_skipped  =>  i = 0;  is_retained  <=>  there is a floor, version >= that, and not is_skipped
 *   retained_blocks = the sum of n_blocks over the retained; floors are ascending by region, one for each
 */
#ifndef PC_HISTORY_INDEX_H
#define PC_HISTORY_INDEX_H

#include "history/history_segments.h"

#include <stddef.h>

#define PC__HISTORY_BUCKETS 4096u

/* A part of the log. */
struct pc__history_segment {
    struct pc__history_segment *next, *prev; /* older to newer */
    struct pc__segment_store *store;
    uint64_t charged_bytes;       /* of the budget of its kind */
    uint64_t head_end;            /* the heads of records end here */
    uint64_t data_begin;          /* their blocks begin here */
    struct pc__record *records;   /* those in the index; a circular list, NULL if none */
    size_t n_records;             /* in that list */
    size_t n_retained;            /* of them */
    uint64_t retained_bytes;      /* heads and blocks of those */
    bool is_busy;                 /* somebody without the lock works on it: not to be freed */
};

struct pc__history_region {
    struct pc__history_region *hash_next;
    uint64_t id;
    struct pc__record **records;  /* [begin, begin + n) of capacity, ascending */
    size_t begin, n, capacity;
};

/* The oldest version of a region that must stay; the region need not have records. */
struct pc__history_floor {
    uint64_t region, version;
    bool has_logged;                /* that some of it went all the same */
};

struct pc__history_index {
    struct pc__history_region *buckets[PC__HISTORY_BUCKETS];
    size_t n_regions;
    uint64_t n_records;
    uint64_t retained_blocks;             /* of all records that are retained */
    uint64_t n_retained_dropped;          /* ever, while they were */
    struct pc__history_floor *floors;     /* by region, ascending */
    size_t n_floors, floors_capacity;
};

struct pc__history_region *pc__index_get(const struct pc__history_index *index, uint64_t region);
/* Adds the newest record of its region, to segment's list too. Drops what it makes useless: records
 * before a gap, or before a skip; *n_dropped is their number. The index owns the record, unless it
 * fails (PC_ERR_NO_MEMORY): then nothing has changed. */
int pc__index_push(struct pc__history_index *index, struct pc__history_segment *segment,
                   struct pc__record *record, uint64_t *n_dropped);
/* Drops the region's records up to this version. Returns their number. */
uint64_t pc__index_drop(struct pc__history_index *index, uint64_t region, uint64_t version);
/* Puts record, of segment `to`, in the place of the one of its region and version in segment `from`,
 * which is freed. False if that is not there any more: nothing has changed. */
bool pc__index_replace(struct pc__history_index *index, const struct pc__history_segment *from,
                       struct pc__history_segment *to, struct pc__record *record);
/* Records from version on are retained; UINT64_MAX: none are. PC_ERR_NO_MEMORY: as it was. */
int pc__index_retain(struct pc__history_index *index, uint64_t region, uint64_t version);
/* NULL: it has none. Valid until the next pc__index_retain. */
struct pc__history_floor *pc__index_floor_of(const struct pc__history_index *index,
                                             uint64_t region);
/* The version of the newest record. */
uint64_t pc__index_newest(const struct pc__history_region *region);
/* The oldest version that can be read against a base of version before. region may be NULL. */
uint64_t pc__index_floor(const struct pc__history_region *region, uint64_t before);
/* The record of that version; one must be there. The next ones follow it. */
struct pc__record *const *pc__index_at(const struct pc__history_region *region, uint64_t version);
const char *pc__index_audit(const struct pc__history_index *index);
void pc__index_free(struct pc__history_index *index);

#endif
