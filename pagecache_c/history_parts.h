/* history_parts.h - the history, as its own files see it.
 *
 *   history.c         open and close, reads, and the segments that are done with
 *   history_append.c  append and skip; the budgets: spilling and dropping
 *   history_adopt.c   segments of the process before this one
 *   history_index.c   which records there are
 *   history_log.c     how they lie in a segment
 */
#ifndef PC_HISTORY_PARTS_H
#define PC_HISTORY_PARTS_H

#include "history.h"
#include "history_index.h"

#include <pthread.h>

#define PC__HISTORY_MAX_SEGMENTS 1024u /* descriptors: here, and in the keeper */

struct pc__history {
    pthread_mutex_t lock;          /* everything below up to the line */
    struct pc__history_index index;
    struct pc__history_segment *oldest, *newest;
    size_t n_segments;
    struct pc__history_segment *current; /* the one appended to, in memory; NULL: none */
    uint64_t memory_bytes, disk_bytes;   /* charged */
    uint64_t n_expired, n_skipped;
    /* ------ set by open, and by the thread that appends */
    struct pc__history_options options;  /* directory is our copy, NULL without disk_bytes */
    uint64_t segment_bytes, max_segment_records;
    uint64_t next_sequence;
    bool has_said_dropping;
    struct pc__history_segment **adopted;
    size_t n_adopted, adopted_capacity;
};

static inline uint64_t pc__segment_used_bytes(const struct pc__history_segment *segment)
{
    return pc__round_to_blocks(segment->head_end) + segment->store->capacity_bytes -
           segment->data_begin;
}

/* An empty segment around store, which it takes; NULL without memory (the store is put). */
struct pc__history_segment *pc__segment_new(struct pc__store *store);
/* The lock is held. The segment becomes the newest, charged with so many bytes. */
void pc__segment_add(struct pc__history *history, struct pc__history_segment *segment,
                     uint64_t charged_bytes);
/* The lock is held. Changes what it is charged with. */
void pc__segment_charge(struct pc__history *history, struct pc__history_segment *segment,
                        uint64_t charged_bytes);
/* The lock is held, and is let go on the way: segments without records leave, but for the current
 * one and those that are busy. */
void pc__history_release_dead(struct pc__history *history);
void pc__history_keep(const struct pc__history *history, const struct pc__store *store);
void pc__history_unkeep(const struct pc__history *history, uint64_t inode, bool is_disk);

#endif
