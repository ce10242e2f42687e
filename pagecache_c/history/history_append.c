/* history_append.c - appends to the history; history_spill.c makes the room for it.
 *
 * Thread: one at a time is in append or skip; it alone changes history.current, and what a segment
 * holds.
 *
 * Invariants:
 *   - there is room in its budget before a segment is made; the current one is charged in full,
 *     others with what they use;
 *   - what the keeper holds is whole: a memory segment up to its last finished record, a file from
 *     the moment it is handed over. The memfd goes only after its copy was handed over.
 */
#include "history/history_parts.h"
#include "common/error.h"

#include <stdlib.h>

/* -------------------------------------------------------------- appending */

bool pc__history_noted(struct pc__history *history, uint64_t region, uint64_t version)
{
    pthread_mutex_lock(&history->lock);
    const struct pc__history_region *found = pc__index_get(&history->index, region);
    const bool known = found && version <= pc__index_newest(found);
    pthread_mutex_unlock(&history->lock);
    return known;
}

/* The lock is held. Will the record be retained? */
static bool is_to_stay(const struct pc__history *history, const struct pc__record *record)
{
    const struct pc__history_floor *floor = pc__index_floor_of(&history->index, record->region);
    return floor && record->version >= floor->version;
}

/* A new current segment that has room for the record. */
static int begin_segment(struct pc__history *history, const struct pc__record *record)
{
    const uint64_t alone = pc__record_bytes_alone(record);
    const uint64_t capacity = alone > history->segment_bytes ? alone : history->segment_bytes;

    pthread_mutex_lock(&history->lock);
    pc__history_seal_current(history);
    pc__history_release_dead(history);
    /* One ordinary segment there must be. For a large record nothing goes that matters more. */
    const bool retained_too = alone <= history->segment_bytes || is_to_stay(history, record);
    const bool has_room = pc__history_make_memory_room(history, capacity, retained_too);
    pthread_mutex_unlock(&history->lock);
    if (!has_room)
        return pc__fail(PC_ERR_NO_SPACE, "%llu bytes are more than there is beside what live "
                        "collections may need", (unsigned long long)alone);
    struct pc__segment_store *store = pc__store_memory(capacity, history->next_sequence);
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
    const uint64_t region = record->region, version = record->version;
    uint64_t n_dropped;

    pthread_mutex_lock(&history->lock);
    const uint64_t n_before = history->index.n_retained_dropped;
    segment->head_end += pc__record_head_bytes(record->n_runs);
    segment->data_begin = record->data_offset;
    const int rc = pc__index_push(&history->index, segment, record, &n_dropped);
    if (rc == PC_OK) {
        history->n_expired += n_dropped;
        history->n_skipped += record->is_skipped;
    }
    if (segment == history->current && segment->n_records >= history->max_segment_records)
        pc__history_seal_current(history);
    if (history->index.n_retained_dropped > n_before)
        pc__history_log_retained(history, region, version,
                                 "what the next commit replaced could not be kept");
    if (n_dropped > 0)
        pc__history_release_dead(history);
    pthread_mutex_unlock(&history->lock);
    return rc;
}

/* Takes the record if it succeeds. */
static int append_to_memory(struct pc__history *history, struct pc__record *record,
                            struct pc__old_blocks *old)
{
    if (!history->current || !pc__segment_fits(history->current, record)) {
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
    const uint64_t n_bytes = pc__record_bytes_alone(record);
    const uint64_t head_end = sizeof(struct pc__segment_head) +
                              pc__record_head_bytes(record->n_runs);
    int rc = PC_OK;

    record->data_offset = n_bytes - record->n_blocks * PC_BLOCK_BYTES;
    pthread_mutex_lock(&history->lock);
    pc__history_seal_current(history);
    pc__history_release_dead(history);
    const bool retained_too = is_to_stay(history, record);
    if (!pc__history_make_disk_room(history, n_bytes, retained_too)) {
        pthread_mutex_unlock(&history->lock);
        return pc__fail(PC_ERR_NO_SPACE, "%llu bytes are more than the budgets for them",
                        (unsigned long long)n_bytes);
    }
    struct pc__segment_store *store;
    do {
        pthread_mutex_unlock(&history->lock);
        store = pc__store_disk(history->options.directory, n_bytes, history->next_sequence,
                               head_end, record->data_offset, &rc);
        pthread_mutex_lock(&history->lock);
    } while (!store && rc == PC_ERR_NO_MEMORY &&
             pc__history_give_back_disk(history, n_bytes, retained_too));
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
    pc__history_make_count_room(history);
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
                                  "a note in the history of variable %llu: try again later",
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
    const bool is_for_disk = pc__record_bytes_alone(record) > history->options.memory_bytes;
    rc = is_for_disk ? append_to_disk(history, record, &old)
                     : append_to_memory(history, record, &old);
    if (rc == PC_OK)
        return PC_OK;
    free(record);
    if (old.is_failed)
        return rc;
    pthread_mutex_lock(&history->lock);
    pc__history_log_dropping(history, "what a commit replaced cannot be kept, older versions expire",
                 pc_last_message());
    pthread_mutex_unlock(&history->lock);
    return append_skip(history, region, version);
}
