/* history_adopt.c - the history of the process that was here before. See history.h.
 *
 * A segment is kept twice if that process died between handing over the copy on disk and letting
 * go of the memfd: both are whole. What the file has is not taken from the memfd, which so has no
 * records and goes. A record is there twice if that process died while it moved what is retained:
 * one of them is taken, and either is right.
 */
#include "history/history_parts.h"
#include "common/error.h"

#include <fcntl.h>
#include <stdlib.h>

int pc__history_adopt(struct pc__history *history, int fd)
{
    uint64_t inode;
    int rc;
    struct pc__segment_store *store = pc__store_adopt(fd, &inode, &rc);
    if (!store) {
        if (rc == PC_ERR_PROTOCOL)
            pc__history_unkeep(history, inode);
        return rc;
    }
    if (history->n_adopted == history->adopted_capacity) {
        const size_t capacity = history->adopted_capacity ? 2 * history->adopted_capacity : 16;
        struct pc__history_segment **grown =
            realloc(history->adopted, capacity * sizeof(struct pc__history_segment *));
        if (!grown) {
            pc__store_put(store);
            return pc__fail(PC_ERR_NO_MEMORY, "segments of the history");
        }
        history->adopted = grown;
        history->adopted_capacity = capacity;
    }
    struct pc__history_segment *segment = pc__segment_new(store);
    if (!segment)
        return PC_ERR_NO_MEMORY;
    history->adopted[history->n_adopted++] = segment;
    return PC_OK;
}

/* Older first; of two with one number the one on disk. */
static int compare(const void *left, const void *right)
{
    const struct pc__segment_store *a = (*(struct pc__history_segment *const *)left)->store;
    const struct pc__segment_store *b = (*(struct pc__history_segment *const *)right)->store;
    if (a->sequence != b->sequence)
        return a->sequence < b->sequence ? -1 : 1;
    return (int)b->is_disk - (int)a->is_disk;
}

/* All records that were found, and where. */
struct found {
    struct pc__record *record;
    struct pc__history_segment *segment;
};
struct found_records {
    struct found *all;
    size_t n, capacity;
};

static int add_found(struct found_records *found, struct pc__record *record,
                     struct pc__history_segment *segment)
{
    if (found->n == found->capacity) {
        const size_t capacity = found->capacity ? 2 * found->capacity : 256;
        struct found *grown = realloc(found->all, capacity * sizeof(struct found));
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "records of the history");
        found->all = grown;
        found->capacity = capacity;
    }
    found->all[found->n++] = (struct found){.record = record, .segment = segment};
    return PC_OK;
}

/* Finds the segment's whole records. */
static int load(struct pc__history_segment *segment, struct found_records *found)
{
    int rc;
    for (;;) {
        struct pc__record *record = pc__record_load(segment->store, segment->head_end,
                                                    segment->data_begin, &rc);
        if (!record)
            break;
        segment->head_end += pc__record_head_bytes(record->n_runs);
        segment->data_begin = record->data_offset;
        rc = add_found(found, record, segment);
        if (rc != PC_OK) {
            free(record);
            break;
        }
    }
    /* A file that cannot be read leaves a gap: older versions have expired. */
    return rc == PC_ERR_NO_MEMORY ? rc : PC_OK;
}

/* By region and version, for records move between segments; of two that are the same the one on
 * disk. One that keeps nothing goes before one that does: that is of a home that was here before
 * (store/move.c), and what it keeps may not be all that its version had. */
static int compare_records(const void *left, const void *right)
{
    const struct found *a = left, *b = right;
    if (a->record->region != b->record->region)
        return a->record->region < b->record->region ? -1 : 1;
    if (a->record->version != b->record->version)
        return a->record->version < b->record->version ? -1 : 1;
    if (a->record->is_skipped != b->record->is_skipped)
        return a->record->is_skipped ? -1 : 1;
    return (int)b->segment->store->is_disk - (int)a->segment->store->is_disk;
}

/* The index takes the records. The lock is held. */
static int push_all(struct pc__history *history, struct found_records *found)
{
    int rc = PC_OK;

    if (found->n > 0)
        qsort(found->all, found->n, sizeof(struct found), compare_records);
    for (size_t i = 0; i < found->n; i++) {
        struct pc__record *record = found->all[i].record;
        const struct pc__history_region *region = pc__index_get(&history->index, record->region);
        uint64_t n_dropped;
        if (rc == PC_OK && !(region && record->version <= pc__index_newest(region))) {
            rc = pc__index_push(&history->index, found->all[i].segment, record, &n_dropped);
            if (rc == PC_OK)
                continue;
        }
        free(record); /* twice there: the segment is, or the record was moving, or it was appended
                         twice because the index had no memory for the first: the same blocks */
    }
    free(found->all);
    return rc;
}

/* What a record that was not finished may have taken. If it cannot be given back, it stays until
 * the segment goes. */
static void punch_unfinished(const struct pc__history_segment *segment)
{
    const uint64_t begin = pc__round_to_blocks(segment->head_end);
    if (begin < segment->data_begin)
        (void)fallocate(segment->store->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        (off_t)begin, (off_t)(segment->data_begin - begin));
}

int pc__history_adopted(struct pc__history *history)
{
    struct found_records found = {0};
    int rc = PC_OK;

    if (history->n_adopted > 0)
        qsort(history->adopted, history->n_adopted, sizeof(struct pc__history_segment *), compare);
    pthread_mutex_lock(&history->lock);
    for (size_t i = 0; i < history->n_adopted; i++) {
        struct pc__history_segment *segment = history->adopted[i];
        const struct pc__segment_store *store = segment->store;
        history->next_sequence = store->sequence + 1;
        if (rc == PC_OK)
            rc = load(segment, &found);
        if (rc == PC_OK)
            punch_unfinished(segment);
        pc__segment_add(history, segment, pc__segment_used_bytes(segment));
    }
    history->n_adopted = 0;
    const int pushed = push_all(history, &found);
    if (rc == PC_OK)
        rc = pushed;
    if (rc == PC_OK) /* else there are segments that nobody looked into */
        pc__history_release_dead(history);
    pthread_mutex_unlock(&history->lock);
    free(history->adopted);
    history->adopted = NULL;
    history->adopted_capacity = 0;
    return rc;
}
