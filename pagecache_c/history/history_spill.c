/* history_spill.c - keeps the history within its budgets: what spills, what moves, what is dropped.
 *
 * Order. Memory that is full spills, the oldest segment first. Where there is no room on disk:
 *   1. what is not retained goes, the oldest segment first. What is retained of that segment moves
 *      into another one before, the survivors;
 *   2. only then the oldest segment of retained records goes.
 * For the sake of memory the disk is freed up to 1, then memory up to 1, then either up to 2. So
 * nothing that is retained goes while something else could. Except where the file system is full
 * before the budget is, or memory: then nothing can be moved.
 *
 * Thread: the one that appends. It marks a segment busy and copies it without the lock, while
 * readers and forget go on; then its store, or the record, is exchanged. Who reads an old block
 * holds the store that it was in, which nobody punches or writes over.
 *
 * Bounds: the budgets, but for one segment: what moves is there twice until its source has gone.
 */
#include "history/history_parts.h"
#include "common/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

enum kind { IN_MEMORY = 0, ON_DISK = 1, ANYWHERE = 2 };
/* Segments of which less than one part in so many can go are moved last: each byte that is won costs
 * at most so many that are copied. */
#define WORTH_MOVING 8u

/* The lock is held in all of these; where it is let go on the way, a word says so. */

void pc__history_seal_current(struct pc__history *history)
{
    if (history->current)
        pc__segment_charge(history, history->current, pc__segment_used_bytes(history->current));
    history->current = NULL;
}

/* Nothing is added to it any more. */
static void seal(struct pc__history *history, const struct pc__history_segment *segment)
{
    if (segment == history->current)
        pc__history_seal_current(history);
    for (int i = 0; i < 2; i++)
        if (segment == history->survivors[i])
            history->survivors[i] = NULL;
}

static bool is_of(const struct pc__history_segment *segment, enum kind kind)
{
    return !segment->is_busy && (kind == ANYWHERE || segment->store->is_disk == (kind == ON_DISK));
}

static struct pc__history_segment *oldest_of(const struct pc__history *history, enum kind kind)
{
    struct pc__history_segment *segment = history->oldest;
    while (segment && !is_of(segment, kind))
        segment = segment->next;
    return segment;
}

/* What would be won by dropping all that is not retained. */
static uint64_t unneeded_bytes(const struct pc__history_segment *segment)
{
    const uint64_t used = pc__segment_used_bytes(segment);
    return segment->n_retained == 0
               ? used
               : used - pc__round_to_blocks(sizeof(struct pc__segment_head) +
                                            segment->retained_bytes);
}

/* The oldest of which at least one part in so_many is not needed. */
static struct pc__history_segment *oldest_worth(const struct pc__history *history, enum kind kind,
                                                uint64_t so_many)
{
    struct pc__history_segment *segment = history->oldest;
    while (segment && (!is_of(segment, kind) || unneeded_bytes(segment) == 0 ||
                       unneeded_bytes(segment) < pc__segment_used_bytes(segment) / so_many))
        segment = segment->next;
    return segment;
}

/* ---------------------------------------------------------------- dropping */

/* Lets go of the lock. */
static void log_line(struct pc__history *history, const char *text)
{
    pthread_mutex_unlock(&history->lock);
    history->options.log(history->options.arg, text);
    pthread_mutex_lock(&history->lock);
}

void pc__history_log_dropping(struct pc__history *history, const char *what, const char *why)
{
    char text[700];

    if (history->has_logged_dropping || !history->options.log)
        return;
    history->has_logged_dropping = true;
    snprintf(text, sizeof text, "%s: %s", what, why);
    log_line(history, text);
}

void pc__history_log_retained(struct pc__history *history, uint64_t region, uint64_t version,
                              const char *why)
{
    struct pc__history_floor *floor = pc__index_floor_of(&history->index, region);
    char text[300];

    if (!floor || floor->has_logged || !history->options.log)
        return;
    floor->has_logged = true;
    snprintf(text, sizeof text,
             "variable %llu: versions %llu to %llu, which live collections may need, are kept no "
             "longer, and more may follow: %s",
             (unsigned long long)region, (unsigned long long)floor->version,
             (unsigned long long)version, why);
    log_line(history, text);
}

/* Drops one record, and older ones of its region. Lets go of the lock. */
static void drop(struct pc__history *history, uint64_t region, uint64_t version, const char *why)
{
    const uint64_t n_before = history->index.n_retained_dropped;
    history->n_expired += pc__index_drop(&history->index, region, version);
    if (history->index.n_retained_dropped > n_before)
        pc__history_log_retained(history, region, version, why);
}

/* Drops the records of a segment, and older ones of the same regions. Lets go of the lock. */
static void expire(struct pc__history *history, struct pc__history_segment *segment,
                   const char *why)
{
    seal(history, segment);
    segment->is_busy = true;
    while (segment->records)
        drop(history, segment->records->region, segment->records->version, why);
    segment->is_busy = false;
    pc__history_release_dead(history);
}

/* Drops the records of a segment that are not retained, and older ones of their regions, which are
 * not either. */
static void drop_unneeded(struct pc__history *history, struct pc__history_segment *segment)
{
    for (size_t left = segment->n_records; left > 0 && segment->records; left--) {
        struct pc__record *record = segment->records;
        if (record->is_retained)
            segment->records = record->segment_next; /* the list is a ring */
        else
            history->n_expired +=
                pc__index_drop(&history->index, record->region, record->version);
    }
}

/* ------------------------------------------------------------------ moving */

/* Where the blocks of a record that moves come from; they are asked for in order. */
struct mover {
    const struct pc__segment_store *store;
    uint64_t next_offset;
};

static int read_moved(void *arg, uint64_t block, uint64_t n, uint8_t *out)
{
    struct mover *mover = arg;
    (void)block;
    const int rc = pc__store_read(mover->store, mover->next_offset, out, n * PC_BLOCK_BYTES);
    mover->next_offset += n * PC_BLOCK_BYTES;
    return rc;
}

/* Survivors of the kind of source that have room for the record; NULL on failure. Lets go of the
 * lock. They come before source in the list: what is in them is older than what follows it. */
static struct pc__history_segment *open_survivors(struct pc__history *history,
                                                  struct pc__history_segment *source,
                                                  const struct pc__record *record)
{
    const bool is_disk = source->store->is_disk;
    struct pc__history_segment *segment = history->survivors[is_disk];
    const uint64_t alone = pc__record_bytes_alone(record);
    const uint64_t capacity = alone > history->segment_bytes ? alone : history->segment_bytes;
    int rc;

    if (segment && pc__segment_fits(segment, record))
        return segment;
    history->survivors[is_disk] = NULL;
    pthread_mutex_unlock(&history->lock);
    struct pc__segment_store *store =
        is_disk ? pc__store_disk(history->options.directory, capacity, source->store->sequence,
                                 sizeof(struct pc__segment_head), capacity, &rc)
                : pc__store_memory(capacity, source->store->sequence);
    segment = store ? pc__segment_new(store) : NULL;
    if (segment)
        pc__history_keep(history, store);
    pthread_mutex_lock(&history->lock);
    if (!segment)
        return NULL;
    history->survivors[is_disk] = segment;
    pc__segment_add_before(history, segment, source, pc__segment_used_bytes(segment));
    return segment;
}

/* Moves the first record of source, which is busy. Lets go of the lock. */
static bool move_first(struct pc__history *history, struct pc__history_segment *source)
{
    const struct pc__record *first = source->records;
    const size_t n_bytes = sizeof *first + first->n_runs * sizeof first->runs[0];
    struct mover mover = {.store = source->store, .next_offset = first->data_offset};
    struct pc__old_blocks old = {.read = read_moved, .arg = &mover};
    struct pc__record *copy = malloc(n_bytes);

    if (!copy)
        return false;
    memcpy(copy, first, n_bytes); /* forget may free the first while the lock is not held */
    struct pc__history_segment *target = open_survivors(history, source, copy);
    if (!target) {
        free(copy);
        return false;
    }
    copy->data_offset = target->data_begin - copy->n_blocks * PC_BLOCK_BYTES;
    pthread_mutex_unlock(&history->lock);
    const int rc = target->store->is_disk
                       ? pc__record_write_disk(target->store, target->head_end, copy, &old)
                       : pc__record_write(target->store, target->head_end, copy, &old);
    pthread_mutex_lock(&history->lock);
    if (rc != PC_OK) { /* what is of it there ends the segment for who adopts it */
        seal(history, target);
        free(copy);
        return false;
    }
    target->head_end += pc__record_head_bytes(copy->n_runs);
    target->data_begin = copy->data_offset;
    pc__segment_charge(history, target, pc__segment_used_bytes(target));
    if (!pc__index_replace(&history->index, source, target, copy))
        free(copy); /* it was forgotten meanwhile */
    if (target->n_records >= history->max_segment_records)
        seal(history, target);
    return true;
}

/* Moves what is retained out of the segment; the rest, and the segment, go. False: some of it could
 * not be moved, and is where it was. Lets go of the lock. */
static bool rescue(struct pc__history *history, struct pc__history_segment *segment)
{
    bool moved = true;

    seal(history, segment);
    segment->is_busy = true;
    drop_unneeded(history, segment);
    while (moved && segment->records)
        moved = move_first(history, segment);
    segment->is_busy = false;
    pc__history_release_dead(history);
    return moved;
}

/* ----------------------------------------------------------------- budgets */

/* Frees something of this kind, in the order of the file's head; with retained_too: of whatever there
 * is. Lets go of the lock. False: there is nothing that may go. */
static bool free_some(struct pc__history *history, enum kind kind, bool retained_too)
{
    static const char why[] = "the budgets for old versions hold nothing else";
    struct pc__history_segment *segment = oldest_worth(history, kind, WORTH_MOVING);

    if (!segment)
        segment = oldest_worth(history, kind, UINT64_MAX);
    if (segment && segment->n_retained > 0) {
        if (rescue(history, segment))
            return true;
        segment = oldest_worth(history, kind, 1); /* nothing can be moved now */
    }
    if (!segment && retained_too)
        segment = oldest_of(history, kind);
    if (segment)
        expire(history, segment, why);
    return segment != NULL;
}

bool pc__history_make_disk_room(struct pc__history *history, uint64_t n_bytes, bool retained_too)
{
    if (n_bytes > history->options.disk_bytes)
        return false;
    while (history->disk_bytes + n_bytes > history->options.disk_bytes)
        if (!free_some(history, ON_DISK, retained_too))
            return false;
    return true;
}

bool pc__history_give_back_disk(struct pc__history *history, uint64_t n_bytes, bool retained_too)
{
    struct pc__history_segment *oldest = oldest_worth(history, ON_DISK, 1); /* all of it */
    struct statvfs fs;

    if (!oldest && retained_too)
        oldest = oldest_of(history, ON_DISK);
    if (!oldest)
        return false;
    if (statvfs(history->options.directory, &fs) == 0 &&
        history->disk_bytes + (uint64_t)fs.f_bavail * fs.f_frsize < n_bytes)
        return false;
    pc__history_log_dropping(history, "the disk is full, the oldest versions expire",
                             pc_last_message());
    expire(history, oldest, "the disk is full");
    return true;
}

/* The segment's store is on disk from now on. Lets go of the lock. */
static void exchange_store(struct pc__history *history, struct pc__history_segment *segment,
                           struct pc__segment_store *file)
{
    struct pc__segment_store *old = segment->store;
    const uint64_t n_bytes = segment->charged_bytes;

    pc__segment_charge(history, segment, 0);
    segment->store = file;
    pc__segment_charge(history, segment, n_bytes);
    pthread_mutex_unlock(&history->lock);
    pc__history_unkeep(history, old->inode);
    pc__store_put(old);
    pthread_mutex_lock(&history->lock);
}

/* Moves a memory segment to disk. Lets go of the lock. False, and *why: it is where it was. */
static bool spill(struct pc__history *history, struct pc__history_segment *segment,
                  bool retained_too, const char **why)
{
    struct pc__segment_store *file = NULL;
    int rc = PC_OK;

    seal(history, segment);
    segment->is_busy = true;
    const bool has_room =
        pc__history_make_disk_room(history, segment->charged_bytes, retained_too);
    while (has_room && !file && segment->n_records > 0) { /* making room may have left it none */
        pthread_mutex_unlock(&history->lock);
        file = pc__store_spill(segment->store, history->options.directory, segment->head_end,
                               segment->data_begin, &rc);
        if (file)
            pc__history_keep(history, file);
        pthread_mutex_lock(&history->lock);
        if (!file && (rc != PC_ERR_NO_MEMORY ||
                      !pc__history_give_back_disk(history, segment->charged_bytes, retained_too)))
            break;
    }
    segment->is_busy = false;
    if (file)
        exchange_store(history, segment, file);
    const bool is_done = file || segment->n_records == 0;
    *why = has_room                      ? pc_last_message()
           : !history->options.directory ? "there is no directory for them"
           : segment->charged_bytes > history->options.disk_bytes
               ? "they are larger than the budget on disk"
               : "what live collections may need fills the budget on disk";
    pc__history_release_dead(history); /* it may have been forgotten meanwhile */
    return is_done;
}

bool pc__history_make_memory_room(struct pc__history *history, uint64_t n_bytes,
                                  bool retained_too)
{
    const char *why;

    while (history->memory_bytes + n_bytes > history->options.memory_bytes) {
        struct pc__history_segment *oldest = oldest_of(history, IN_MEMORY);
        if (!oldest)
            return true; /* n_bytes is no more than the budget: nothing else is charged */
        if (spill(history, oldest, false, &why))
            continue;
        pc__history_log_dropping(
            history, "the memory for old versions is used up, the oldest expire", why);
        if (free_some(history, IN_MEMORY, false))
            continue;
        if (!retained_too)
            return false;
        oldest = oldest_of(history, IN_MEMORY);
        if (oldest && !spill(history, oldest, true, &why))
            expire(history, oldest, why);
    }
    return true;
}

void pc__history_make_count_room(struct pc__history *history)
{
    while (history->oldest && history->n_segments >= PC__HISTORY_MAX_SEGMENTS)
        (void)free_some(history, ANYWHERE, true);
    while (history->oldest && history->index.n_records >= history->options.max_records) {
        struct pc__history_segment *segment = history->oldest;
        while (segment && segment->n_retained == segment->n_records)
            segment = segment->next;
        if (segment) {
            drop_unneeded(history, segment);
            pc__history_release_dead(history);
        } else {
            expire(history, history->oldest, "there are too many records of old blocks");
        }
    }
}
