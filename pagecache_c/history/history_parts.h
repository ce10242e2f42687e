/* history_parts.h - the history, as its own files see it.
 *
 *   history.c         open and close, reads, and the segments that are done with
 *   history_append.c  append and skip
 *   history_spill.c    the budgets: spilling, moving what is retained, dropping
 *   history_adopt.c   segments of the process before this one
 *   history_index.c   which records there are
 *   history_segments.c     how they lie in a segment
 */
#ifndef PC_HISTORY_PARTS_H
#define PC_HISTORY_PARTS_H

#include "history/history.h"
#include "history/history_index.h"

#include <pthread.h>

#define PC__HISTORY_MAX_SEGMENTS 1024u /* descriptors: here, and in the keeper */

struct pc__history {
    pthread_mutex_t lock;          /* everything below up to the line */
    struct pc__history_index index;
    struct pc__history_segment *oldest, *newest;
    size_t n_segments;
    struct pc__history_segment *current; /* the one appended to, in memory; NULL: none */
    struct pc__history_segment *survivors[2]; /* where retained records move to: in memory, on disk */
    uint64_t memory_bytes, disk_bytes;   /* charged */
    uint64_t n_expired, n_skipped;
    /* ------ set by open, and by the thread that appends */
    struct pc__history_options options;  /* directory is our copy, NULL without disk_bytes */
    uint64_t segment_bytes, max_segment_records;
    uint64_t next_sequence;
    bool has_logged_dropping;
    struct pc__history_segment **adopted;
    size_t n_adopted, adopted_capacity;
};

static inline uint64_t pc__segment_used_bytes(const struct pc__history_segment *segment)
{
    return pc__round_to_blocks(segment->head_end) + segment->store->capacity_bytes -
           segment->data_begin;
}

static inline bool pc__segment_fits(const struct pc__history_segment *segment,
                                    const struct pc__record *record)
{
    const uint64_t room = segment->data_begin - segment->head_end;
    return pc__record_head_bytes(record->n_runs) + record->n_blocks * PC_BLOCK_BYTES <= room;
}

/* What a segment with nothing but the record takes. */
static inline uint64_t pc__record_bytes_alone(const struct pc__record *record)
{
    return pc__round_to_blocks(sizeof(struct pc__segment_head) +
                               pc__record_head_bytes(record->n_runs)) +
           record->n_blocks * PC_BLOCK_BYTES;
}

/* What pc__history_audit adds to the index's equations:
 *   n_segments = segments from oldest to newest, and the sum of their n_records = index.n_records
 *   of each: n_records = the length of its list; n_retained, retained_bytes = those of it that are retained
 *   memory_bytes + disk_bytes = the sum of charged_bytes */

/* An empty segment around store, which it takes; NULL without memory (the store is put). */
struct pc__history_segment *pc__segment_new(struct pc__segment_store *store);
/* The lock is held. The segment becomes the newest, charged with so many bytes. */
void pc__segment_add(struct pc__history *history, struct pc__history_segment *segment,
                     uint64_t charged_bytes);
/* The same, but just older than another one. */
void pc__segment_add_before(struct pc__history *history, struct pc__history_segment *segment,
                            struct pc__history_segment *other, uint64_t charged_bytes);
/* The lock is held. Changes what it is charged with. */
void pc__segment_charge(struct pc__history *history, struct pc__history_segment *segment,
                        uint64_t charged_bytes);
/* The lock is held, and is let go on the way: segments without records leave, but for the current
 * one, the survivors and those that are busy. */
void pc__history_release_dead(struct pc__history *history);
void pc__history_keep(const struct pc__history *history, const struct pc__segment_store *store);
void pc__history_unkeep(const struct pc__history *history, uint64_t inode);

/* history_spill.c. The lock is held in all of these, and is let go on the way but in seal_current.
 * By the thread that appends, only. */
void pc__history_seal_current(struct pc__history *history);
/* False: so much does not fit, or (without retained_too) not beside what is retained. */
bool pc__history_make_memory_room(struct pc__history *history, uint64_t n_bytes,
                                  bool retained_too);
bool pc__history_make_disk_room(struct pc__history *history, uint64_t n_bytes, bool retained_too);
/* The file system is full before the budget is: others need it, too. What is on disk is older than
 * what is to go there, and useless once that is dropped; so it goes first. False: there is none that
 * may go, or even all of it would not make room for n_bytes. */
bool pc__history_give_back_disk(struct pc__history *history, uint64_t n_bytes, bool retained_too);
/* Room for one more record and one more segment. */
void pc__history_make_count_room(struct pc__history *history);
/* Once; what goes on from there is in the statistics. */
void pc__history_log_dropping(struct pc__history *history, const char *what, const char *why);
/* Once for each floor: retained records of the region, up to this version, were dropped. */
void pc__history_log_retained(struct pc__history *history, uint64_t region, uint64_t version,
                              const char *why);

#endif
