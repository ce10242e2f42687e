/* history.c - the history's life, its reads, and segments that are done with. See history.h.
 *
 * Owns: the segments (a list, older to newer), the index, the copy of the directory's name.
 * Lock: history.lock, held for look-ups and list work. Blocks are copied without it: a reader takes
 * a reference to the segment's store, so that a store that is spilled or dropped meanwhile lives
 * until the last reader put it.
 */
#include "history/history_parts.h"
#include "common/error.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SEGMENT_BYTES (8ull << 20)
#define MIN_MEMORY_BYTES (16ull * PC_BLOCK_BYTES)

/* Large budgets have larger segments: with MAX_SEGMENTS of them none is wasted. A quarter of the
 * memory at most, so that dropping one does not drop everything. */
static uint64_t choose_segment_bytes(uint64_t memory_bytes, uint64_t disk_bytes)
{
    uint64_t bytes = memory_bytes / (PC__HISTORY_MAX_SEGMENTS / 2) +
                     disk_bytes / (PC__HISTORY_MAX_SEGMENTS / 2);
    if (bytes < SEGMENT_BYTES)
        bytes = SEGMENT_BYTES;
    if (bytes > memory_bytes / 4)
        bytes = memory_bytes / 4;
    return bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}

int pc__history_open(const struct pc__history_options *options, struct pc__history **out)
{
    struct pc__history *history = calloc(1, sizeof *history);

    *out = NULL;
    if (!history)
        return pc__fail(PC_ERR_NO_MEMORY, "the history");
    history->options = *options;
    history->options.directory = NULL;
    if (options->directory && options->disk_bytes > 0) {
        history->options.directory = strdup(options->directory);
        if (!history->options.directory) {
            free(history);
            return pc__fail(PC_ERR_NO_MEMORY, "the history");
        }
    }
    if (!history->options.directory)
        history->options.disk_bytes = 0;
    if (history->options.memory_bytes < MIN_MEMORY_BYTES)
        history->options.memory_bytes = MIN_MEMORY_BYTES;
    if (history->options.max_records == 0)
        history->options.max_records = PC__HISTORY_MAX_RECORDS;
    history->segment_bytes =
        choose_segment_bytes(history->options.memory_bytes, history->options.disk_bytes);
    history->max_segment_records = history->options.max_records / 16 + 1;
    history->next_sequence = 1;
    pthread_mutex_init(&history->lock, NULL);
    *out = history;
    return PC_OK;
}

static void free_segment(struct pc__history_segment *segment)
{
    pc__store_put(segment->store);
    free(segment);
}

void pc__history_close(struct pc__history *history)
{
    if (!history)
        return;
    pc__index_free(&history->index);
    while (history->oldest) {
        struct pc__history_segment *segment = history->oldest;
        history->oldest = segment->next;
        free_segment(segment);
    }
    for (size_t i = 0; i < history->n_adopted; i++)
        free_segment(history->adopted[i]);
    free(history->adopted);
    free((char *)(uintptr_t)history->options.directory);
    pthread_mutex_destroy(&history->lock);
    free(history);
}

/* --------------------------------------------------------------- segments */

void pc__history_keep(const struct pc__history *history, const struct pc__segment_store *store)
{
    if (history->options.keep)
        history->options.keep(history->options.arg, store->fd, store->inode,
                              store->capacity_bytes, store->is_disk);
}

void pc__history_unkeep(const struct pc__history *history, uint64_t inode)
{
    if (history->options.drop)
        history->options.drop(history->options.arg, inode);
}

struct pc__history_segment *pc__segment_new(struct pc__segment_store *store)
{
    struct pc__history_segment *segment = calloc(1, sizeof *segment);
    if (!segment) {
        (void)pc__fail(PC_ERR_NO_MEMORY, "a history segment");
        pc__store_put(store);
        return NULL;
    }
    segment->store = store;
    segment->head_end = sizeof(struct pc__segment_head);
    segment->data_begin = store->capacity_bytes;
    return segment;
}

void pc__segment_charge(struct pc__history *history, struct pc__history_segment *segment,
                        uint64_t charged_bytes)
{
    uint64_t *total = segment->store->is_disk ? &history->disk_bytes : &history->memory_bytes;
    *total += charged_bytes - segment->charged_bytes;
    segment->charged_bytes = charged_bytes;
}

void pc__segment_add(struct pc__history *history, struct pc__history_segment *segment,
                     uint64_t charged_bytes)
{
    segment->next = NULL;
    segment->prev = history->newest;
    *(history->newest ? &history->newest->next : &history->oldest) = segment;
    history->newest = segment;
    history->n_segments++;
    pc__segment_charge(history, segment, charged_bytes);
}

void pc__segment_add_before(struct pc__history *history, struct pc__history_segment *segment,
                            struct pc__history_segment *other, uint64_t charged_bytes)
{
    segment->next = other;
    segment->prev = other->prev;
    *(other->prev ? &other->prev->next : &history->oldest) = segment;
    other->prev = segment;
    history->n_segments++;
    pc__segment_charge(history, segment, charged_bytes);
}

void pc__history_release_dead(struct pc__history *history)
{
    struct pc__history_segment *dead = NULL, *next;

    for (struct pc__history_segment *segment = history->oldest; segment; segment = next) {
        next = segment->next;
        if (segment->n_records > 0 || segment->is_busy || segment == history->current ||
            segment == history->survivors[segment->store->is_disk])
            continue;
        *(segment->prev ? &segment->prev->next : &history->oldest) = segment->next;
        *(segment->next ? &segment->next->prev : &history->newest) = segment->prev;
        history->n_segments--;
        pc__segment_charge(history, segment, 0);
        segment->next = dead;
        dead = segment;
    }
    if (!dead)
        return;
    pthread_mutex_unlock(&history->lock);
    for (; dead; dead = next) {
        next = dead->next;
        pc__history_unkeep(history, dead->store->inode);
        free_segment(dead);
    }
    pthread_mutex_lock(&history->lock);
}

void pc__history_forget(struct pc__history *history, uint64_t region)
{
    (void)pc__history_retain(history, region, UINT64_MAX);
    pc__history_drop(history, region);
}

void pc__history_drop(struct pc__history *history, uint64_t region)
{
    pthread_mutex_lock(&history->lock);
    if (pc__index_drop(&history->index, region, UINT64_MAX) > 0)
        pc__history_release_dead(history);
    pthread_mutex_unlock(&history->lock);
}

int pc__history_retain(struct pc__history *history, uint64_t region, uint64_t version)
{
    pthread_mutex_lock(&history->lock);
    const int rc = pc__index_retain(&history->index, region, version);
    pthread_mutex_unlock(&history->lock);
    return rc;
}

/* ------------------------------------------------------------------ reads */

bool pc__history_has(struct pc__history *history, uint64_t region, uint64_t version)
{
    pthread_mutex_lock(&history->lock);
    const struct pc__history_region *found = pc__index_get(&history->index, region);
    const bool has = found && version <= pc__index_newest(found) &&
                     version >= pc__index_floor(found, pc__index_newest(found) + 1);
    pthread_mutex_unlock(&history->lock);
    return has;
}

/* The lock is held. The records [version, before) of the region, one after the other; *n is 0 if
 * version >= before. */
static int find_records(const struct pc__history *history, uint64_t region, uint64_t version,
                        uint64_t before, struct pc__record *const **records, uint64_t *n)
{
    *n = 0;
    if (version >= before)
        return PC_OK;
    const struct pc__history_region *found = pc__index_get(&history->index, region);
    const uint64_t floor = pc__index_floor(found, before);
    if (version < floor)
        return pc__fail(PC_ERR_EXPIRED,
                        "variable %llu version %llu: the oldest that is kept is %llu",
                        (unsigned long long)region, (unsigned long long)version,
                        (unsigned long long)floor);
    *records = pc__index_at(found, version);
    *n = before - version;
    return PC_OK;
}

int64_t pc__history_runs(struct pc__history *history, uint64_t region, uint64_t version,
                         struct pc_run *runs, size_t capacity)
{
    struct pc__record *const *records = NULL;
    uint64_t n = 0;

    pthread_mutex_lock(&history->lock);
    const struct pc__history_region *found = pc__index_get(&history->index, region);
    int64_t rc = PC_ERR_EXPIRED;
    if (found && version <= pc__index_newest(found))
        rc = find_records(history, region, version, version + 1, &records, &n);
    if (rc == PC_OK) {
        const struct pc__record *record = records[0];
        for (size_t i = 0; i < record->n_runs && i < capacity; i++)
            runs[i] = (struct pc_run){.first_block = record->runs[i].first_block,
                                      .n_blocks = record->runs[i].n_blocks};
        rc = (int64_t)record->n_runs;
    }
    pthread_mutex_unlock(&history->lock);
    return rc;
}

uint64_t pc__history_floor(struct pc__history *history, uint64_t region, uint64_t before)
{
    pthread_mutex_lock(&history->lock);
    const uint64_t floor = pc__index_floor(pc__index_get(&history->index, region), before);
    pthread_mutex_unlock(&history->lock);
    return floor;
}

int pc__history_next(struct pc__history *history, uint64_t region, uint64_t version,
                     uint64_t before, uint64_t from, uint64_t limit, uint64_t *block)
{
    struct pc__record *const *records = NULL;
    uint64_t n;

    *block = limit;
    pthread_mutex_lock(&history->lock);
    const int rc = find_records(history, region, version, before, &records, &n);
    for (uint64_t i = 0; i < n && *block > from; i++) {
        const uint64_t next = pc__record_next(records[i], from);
        if (next < *block)
            *block = next;
    }
    pthread_mutex_unlock(&history->lock);
    return rc;
}

int pc__history_read(struct pc__history *history, uint64_t region, uint64_t version,
                     uint64_t before, uint64_t block, uint8_t *out)
{
    struct pc__record *const *records = NULL;
    struct pc__segment_store *store = NULL;
    uint64_t n, offset = 0;

    pthread_mutex_lock(&history->lock);
    const int rc = find_records(history, region, version, before, &records, &n);
    for (uint64_t i = 0; i < n && !store; i++)
        if (pc__record_find(records[i], block, &offset)) {
            store = records[i]->segment->store;
            pc__store_take(store);
        }
    pthread_mutex_unlock(&history->lock);
    if (!store)
        return rc;
    const int read = pc__store_read(store, offset, out, PC_BLOCK_BYTES);
    pc__store_put(store);
    return read == PC_OK ? 1 : read;
}

int64_t pc__history_read_many(struct pc__history *history, uint64_t region, uint64_t version,
                              uint64_t before, uint64_t first, uint64_t n, uint8_t *out,
                              uint64_t *found)
{
    struct place {
        struct pc__segment_store *store;
        uint64_t offset;
    } *places = calloc(n, sizeof *places);
    struct pc__record *const *records = NULL;
    uint64_t n_records, n_found = 0;

    if (!places)
        return pc__fail(PC_ERR_NO_MEMORY, "a read of %llu old blocks", (unsigned long long)n);
    memset(found, 0, (n + 63) / 64 * sizeof *found);
    pthread_mutex_lock(&history->lock);
    int rc = find_records(history, region, version, before, &records, &n_records);
    for (uint64_t i = 0; i < n_records && n_found < n; i++)
        for (uint64_t block = pc__record_next(records[i], first); block < first + n;
             block = pc__record_next(records[i], block + 1)) {
            struct place *place = &places[block - first];
            if (place->store || !pc__record_find(records[i], block, &place->offset))
                continue; /* an older record has it */
            place->store = records[i]->segment->store;
            pc__store_take(place->store);
            n_found++;
        }
    pthread_mutex_unlock(&history->lock);
    for (uint64_t i = 0; i < n && n_found > 0; i++) {
        if (!places[i].store)
            continue;
        if (rc == PC_OK)
            rc = pc__store_read(places[i].store, places[i].offset, out + i * PC_BLOCK_BYTES,
                                PC_BLOCK_BYTES);
        found[i / 64] |= 1ull << (i % 64);
        pc__store_put(places[i].store);
    }
    free(places);
    return rc == PC_OK ? (int64_t)n_found : rc;
}

size_t pc__history_regions(struct pc__history *history, uint64_t *regions, size_t capacity)
{
    size_t n = 0;
    pthread_mutex_lock(&history->lock);
    for (size_t i = 0; i < PC__HISTORY_BUCKETS; i++)
        for (const struct pc__history_region *region = history->index.buckets[i]; region;
             region = region->hash_next, n++)
            if (n < capacity)
                regions[n] = region->id;
    pthread_mutex_unlock(&history->lock);
    return n;
}

void pc__history_stats(struct pc__history *history, struct pc__history_stats *out)
{
    pthread_mutex_lock(&history->lock);
    *out = (struct pc__history_stats){.records = history->index.n_records,
                                      .segments = history->n_segments,
                                      .memory_bytes = history->memory_bytes,
                                      .disk_bytes = history->disk_bytes,
                                      .expired = history->n_expired,
                                      .skipped = history->n_skipped,
                                      .retained_bytes =
                                          history->index.retained_blocks * PC_BLOCK_BYTES,
                                      .retained_expired = history->index.n_retained_dropped};
    pthread_mutex_unlock(&history->lock);
}

/* ------------------------------------------------------------------ audit */

static const char *audit_segment(const struct pc__history_segment *segment)
{
    size_t n = 0, n_retained = 0;
    uint64_t bytes = 0;
    const struct pc__record *record = segment->records;
    for (; record && (n == 0 || record != segment->records); record = record->segment_next) {
        n++;
        if (record->segment != segment)
            return "a record is in the list of its own segment";
        if (!record->is_retained)
            continue;
        n_retained++;
        bytes += pc__record_head_bytes(record->n_runs) + record->n_blocks * PC_BLOCK_BYTES;
    }
    if (n != segment->n_records)
        return "a segment counts its records";
    return n_retained == segment->n_retained && bytes == segment->retained_bytes
               ? NULL
               : "a segment counts its retained records";
}

static const char *audit_locked(const struct pc__history *history)
{
    size_t n = 0;
    uint64_t n_records = 0, charged_bytes = 0;
    const char *broken = pc__index_audit(&history->index);
    for (const struct pc__history_segment *at = history->oldest; at && !broken; at = at->next) {
        n++;
        n_records += at->n_records;
        charged_bytes += at->charged_bytes;
        broken = audit_segment(at);
    }
    if (broken)
        return broken;
    if (n != history->n_segments || n_records != history->index.n_records)
        return "each record is in one of the segments";
    return charged_bytes == history->memory_bytes + history->disk_bytes
               ? NULL
               : "what segments are charged with is what the budgets have given";
}

const char *pc__history_audit(struct pc__history *history)
{
    pthread_mutex_lock(&history->lock);
    const char *broken = audit_locked(history);
    pthread_mutex_unlock(&history->lock);
    return broken;
}
