/* history_append.c - appends to the history, and keeps it within its budgets.
 *
 * Thread: one at a time is in append or skip; it alone changes history.current, and what a segment
 * holds. It spills, too: the segment is marked busy and copied without the lock, while readers and
 * forget go on; then its store is exchanged.
 *
 * Invariants:
 *   - there is room in its budget before a segment is made; the current one is charged in full,
 *     others with what they use;
 *   - what the keeper holds is whole: a memory segment up to its last finished record, a file from
 *     the moment it is handed over. The memfd goes only after its copy was handed over.
 */
#include "history_parts.h"
#include "error.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/statvfs.h>

/* ---------------------------------------------------------------- budgets */

/* The lock is held in all of these; where it is let go on the way, the name or a word says so. */

static void seal_current(struct pc__history *history)
{
    if (history->current)
        pc__segment_charge(history, history->current, pc__segment_used_bytes(history->current));
    history->current = NULL;
}

static struct pc__history_segment *oldest_of(const struct pc__history *history, bool is_disk)
{
    struct pc__history_segment *segment = history->oldest;
    while (segment && (segment->store->is_disk != is_disk || segment->is_busy))
        segment = segment->next;
    return segment;
}

/* Drops the records of a segment, and older ones of the same regions. Lets go of the lock. */
static void expire(struct pc__history *history, struct pc__history_segment *segment)
{
    if (segment == history->current)
        seal_current(history);
    while (segment->records)
        history->n_expired += pc__index_drop(&history->index, segment->records->region,
                                             segment->records->version);
    pc__history_release_dead(history);
}

/* Lets go of the lock. Once; what goes on from there is in the statistics. */
static void say_dropping(struct pc__history *history, const char *what, const char *why)
{
    char text[700];

    if (history->has_said_dropping || !history->options.say)
        return;
    history->has_said_dropping = true;
    snprintf(text, sizeof text, "%s: %s", what, why);
    pthread_mutex_unlock(&history->lock);
    history->options.say(history->options.arg, text);
    pthread_mutex_lock(&history->lock);
}

/* Lets go of the lock. False: so much does not fit. */
static bool make_disk_room(struct pc__history *history, uint64_t n_bytes)
{
    if (n_bytes > history->options.disk_bytes)
        return false;
    while (history->disk_bytes + n_bytes > history->options.disk_bytes) {
        struct pc__history_segment *oldest = oldest_of(history, true);
        if (!oldest)
            return false;
        expire(history, oldest);
    }
    return true;
}

/* The file system is full before the budget is: others need it, too. What is on disk is older than
 * what is to go there, and useless once that is dropped; so it goes first. Lets go of the lock.
 * False: there is none, or even all of it would not make room for n_bytes. */
static bool give_back_disk(struct pc__history *history, uint64_t n_bytes)
{
    struct pc__history_segment *oldest = oldest_of(history, true);
    struct statvfs fs;
    if (!oldest)
        return false;
    if (statvfs(history->options.directory, &fs) == 0 &&
        history->disk_bytes + (uint64_t)fs.f_bavail * fs.f_frsize < n_bytes)
        return false;
    say_dropping(history, "the disk is full, the oldest versions expire", pc_last_message());
    expire(history, oldest);
    return true;
}

/* Moves a sealed memory segment to disk, or drops it. Lets go of the lock. */
static void spill(struct pc__history *history, struct pc__history_segment *segment)
{
    struct pc__store *old = segment->store, *file = NULL;
    int rc = PC_OK;

    segment->is_busy = true;
    const bool has_room = make_disk_room(history, segment->charged_bytes);
    while (has_room && !file && segment->n_records > 0) { /* making room may have left it none */
        pthread_mutex_unlock(&history->lock);
        file = pc__store_spill(old, history->options.directory, segment->head_end,
                               segment->data_begin, &rc);
        if (file)
            pc__history_keep(history, file);
        pthread_mutex_lock(&history->lock);
        if (!file && (rc != PC_ERR_NO_MEMORY || !give_back_disk(history, segment->charged_bytes)))
            break;
    }
    if (!file) {
        if (segment->n_records > 0)
            say_dropping(history, "the memory for old versions is used up, the oldest expire",
                         has_room                     ? pc_last_message()
                         : history->options.directory ? "they are larger than the budget on disk"
                                                      : "there is no directory for them");
        segment->is_busy = false;
        expire(history, segment);
        return;
    }
    segment->is_busy = false;
    const uint64_t n_bytes = segment->charged_bytes;
    pc__segment_charge(history, segment, 0);
    segment->store = file;
    pc__segment_charge(history, segment, n_bytes);
    pthread_mutex_unlock(&history->lock);
    pc__history_unkeep(history, old->inode, false);
    pc__store_put(old);
    pthread_mutex_lock(&history->lock);
    pc__history_release_dead(history); /* it may have been forgotten meanwhile */
}

/* Lets go of the lock. */
static void make_memory_room(struct pc__history *history, uint64_t n_bytes)
{
    while (history->memory_bytes + n_bytes > history->options.memory_bytes) {
        struct pc__history_segment *oldest = oldest_of(history, false);
        if (!oldest)
            return; /* n_bytes is no more than the budget: nothing else is charged */
        if (oldest == history->current)
            seal_current(history);
        spill(history, oldest);
    }
}

/* Room for one more record and one more segment. Lets go of the lock. */
static void make_count_room(struct pc__history *history)
{
    while (history->oldest && (history->index.n_records >= history->options.max_records ||
                               history->n_segments >= PC__HISTORY_MAX_SEGMENTS))
        expire(history, history->oldest);
}

/* -------------------------------------------------------------- appending */

bool pc__history_noted(struct pc__history *history, uint64_t region, uint64_t version)
{
    pthread_mutex_lock(&history->lock);
    const struct pc__history_region *found = pc__index_get(&history->index, region);
    const bool known = found && version <= pc__index_newest(found);
    pthread_mutex_unlock(&history->lock);
    return known;
}

static uint64_t bytes_alone(const struct pc__record *record)
{
    return pc__round_to_blocks(sizeof(struct pc__segment_head) +
                               pc__record_head_bytes(record->n_runs)) +
           record->n_blocks * PC_BLOCK_BYTES;
}

static bool fits(const struct pc__history_segment *segment, const struct pc__record *record)
{
    const uint64_t room = segment->data_begin - segment->head_end;
    return pc__record_head_bytes(record->n_runs) + record->n_blocks * PC_BLOCK_BYTES <= room;
}

/* A new current segment that has room for the record. */
static int begin_segment(struct pc__history *history, const struct pc__record *record)
{
    const uint64_t alone = bytes_alone(record);
    const uint64_t capacity = alone > history->segment_bytes ? alone : history->segment_bytes;

    pthread_mutex_lock(&history->lock);
    seal_current(history);
    pc__history_release_dead(history);
    make_memory_room(history, capacity);
    pthread_mutex_unlock(&history->lock);
    struct pc__store *store = pc__store_memory(capacity, history->next_sequence);
    struct pc__history_segment *segment = store ? pc__segment_new(store) : NULL;
    if (!segment)
        return PC_ERR_NO_MEMORY;
    history->next_sequence++;
    pc__history_keep(history, store);
    pthread_mutex_lock(&history->lock);
    history->current = segment;
    pc__segment_add(history, segment, capacity);
    pthread_mutex_unlock(&history->lock);
    return PC_OK;
}

/* The record is whole in the segment: everybody may see it. Takes it if it succeeds. */
static int index_record(struct pc__history *history, struct pc__history_segment *segment,
                        struct pc__record *record)
{
    uint64_t n_dropped;

    pthread_mutex_lock(&history->lock);
    segment->head_end += pc__record_head_bytes(record->n_runs);
    segment->data_begin = record->data_offset;
    const int rc = pc__index_push(&history->index, segment, record, &n_dropped);
    if (rc == PC_OK) {
        history->n_expired += n_dropped;
        history->n_skipped += record->is_skipped;
    }
    if (segment == history->current && segment->n_records >= history->max_segment_records)
        seal_current(history);
    if (n_dropped > 0)
        pc__history_release_dead(history);
    pthread_mutex_unlock(&history->lock);
    return rc;
}

/* Takes the record if it succeeds. */
static int append_to_memory(struct pc__history *history, struct pc__record *record,
                            struct pc__old_blocks *old)
{
    if (!history->current || !fits(history->current, record)) {
        const int begun = begin_segment(history, record);
        if (begun != PC_OK)
            return begun;
    }
    struct pc__history_segment *segment = history->current;
    record->data_offset = segment->data_begin - record->n_blocks * PC_BLOCK_BYTES;
    const int rc = pc__record_write(segment->store, segment->head_end, record, old);
    return rc == PC_OK ? index_record(history, segment, record) : rc;
}

/* A record that is larger than all memory there is for it, in a file of its own. Takes the record
 * if it succeeds. */
static int append_to_disk(struct pc__history *history, struct pc__record *record,
                          struct pc__old_blocks *old)
{
    const uint64_t n_bytes = bytes_alone(record);
    const uint64_t head_end = sizeof(struct pc__segment_head) +
                              pc__record_head_bytes(record->n_runs);
    int rc = PC_OK;

    record->data_offset = n_bytes - record->n_blocks * PC_BLOCK_BYTES;
    pthread_mutex_lock(&history->lock);
    seal_current(history);
    pc__history_release_dead(history);
    if (!make_disk_room(history, n_bytes)) {
        pthread_mutex_unlock(&history->lock);
        return pc__fail(PC_ERR_NO_SPACE, "%llu bytes are more than the budgets for them",
                        (unsigned long long)n_bytes);
    }
    struct pc__store *store;
    do {
        pthread_mutex_unlock(&history->lock);
        store = pc__store_disk(history->options.directory, n_bytes, history->next_sequence,
                               head_end, record->data_offset, &rc);
        pthread_mutex_lock(&history->lock);
    } while (!store && rc == PC_ERR_NO_MEMORY && give_back_disk(history, n_bytes));
    pthread_mutex_unlock(&history->lock);
    if (!store)
        return rc;
    rc = pc__record_write_disk(store, sizeof(struct pc__segment_head), record, old);
    if (rc != PC_OK) {
        pc__store_put(store);
        return rc;
    }
    struct pc__history_segment *segment = pc__segment_new(store);
    if (!segment)
        return PC_ERR_NO_MEMORY;
    history->next_sequence++;
    pc__history_keep(history, store); /* whole, and nobody has touched the base yet */
    pthread_mutex_lock(&history->lock);
    segment->is_busy = true; /* it has no record yet */
    pc__segment_add(history, segment, n_bytes);
    pthread_mutex_unlock(&history->lock);
    const int indexed = index_record(history, segment, record);
    pthread_mutex_lock(&history->lock);
    segment->is_busy = false;
    pc__history_release_dead(history);
    pthread_mutex_unlock(&history->lock);
    return indexed;
}

static void make_room_to_append(struct pc__history *history)
{
    pthread_mutex_lock(&history->lock);
    make_count_room(history);
    pthread_mutex_unlock(&history->lock);
}

static int append_skip(struct pc__history *history, uint64_t region, uint64_t version)
{
    struct pc__old_blocks none = {0};
    int rc;
    struct pc__record *record = pc__record_new(region, version, NULL, 0, &rc);

    if (!record)
        return rc;
    record->is_skipped = true;
    rc = append_to_memory(history, record, &none);
    if (rc != PC_OK)
        free(record);
    return rc == PC_OK ? PC_OK
                       : pc__fail(PC_ERR_NO_MEMORY,
                                  "a note in the history of region %llu: try again later",
                                  (unsigned long long)region);
}

int pc__history_skip(struct pc__history *history, uint64_t region, uint64_t version)
{
    if (pc__history_noted(history, region, version))
        return PC_OK;
    make_room_to_append(history);
    return append_skip(history, region, version);
}

int pc__history_append(struct pc__history *history, uint64_t region, uint64_t version,
                       const struct pc_run *runs, size_t n_runs,
                       int (*read)(void *arg, uint64_t block, uint64_t n, uint8_t *out), void *arg)
{
    struct pc__old_blocks old = {.read = read, .arg = arg};
    int rc;

    if (pc__history_noted(history, region, version))
        return PC_OK;
    struct pc__record *record = pc__record_new(region, version, runs, n_runs, &rc);
    if (!record)
        return rc;
    make_room_to_append(history);
    const bool is_for_disk = bytes_alone(record) > history->options.memory_bytes;
    rc = is_for_disk ? append_to_disk(history, record, &old)
                     : append_to_memory(history, record, &old);
    if (rc == PC_OK)
        return PC_OK;
    free(record);
    if (old.is_failed)
        return rc;
    pthread_mutex_lock(&history->lock);
    say_dropping(history, "what a commit replaced cannot be kept, older versions expire",
                 pc_last_message());
    pthread_mutex_unlock(&history->lock);
    return append_skip(history, region, version);
}
