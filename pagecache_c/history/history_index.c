/* history_index.c - see history_index.h. */
#include "history/history_index.h"
#include "common/error.h"

#include <stdlib.h>
#include <string.h>

static struct pc__history_region **place_of(const struct pc__history_index *index, uint64_t region)
{
    const uint64_t mixed = region * 0x9e3779b97f4a7c15ull;
    struct pc__history_region *const *at = &index->buckets[mixed >> 52]; /* 12 bits: 4096 */
    while (*at && (*at)->id != region)
        at = &(*at)->hash_next;
    return (struct pc__history_region **)(uintptr_t)at;
}
static_assert(PC__HISTORY_BUCKETS == 1u << (64 - 52), "what place_of takes of the hash");

struct pc__history_region *pc__index_get(const struct pc__history_index *index, uint64_t region)
{
    return *place_of(index, region);
}

static void remove_region(struct pc__history_index *index, struct pc__history_region **place)
{
    struct pc__history_region *region = *place;
    *place = region->hash_next;
    index->n_regions--;
    free(region->records);
    free(region);
}

/* Counts a record that is retained from now on, or no longer (sign -1). */
static void count_retained(struct pc__history_index *index, const struct pc__record *record,
                           uint64_t sign)
{
    index->retained_blocks += sign * record->n_blocks;
    record->segment->n_retained += sign;
    record->segment->retained_bytes +=
        sign * (pc__record_head_bytes(record->n_runs) + record->n_blocks * PC_BLOCK_BYTES);
}
#define ONE_LESS UINT64_MAX

static void set_retained(struct pc__history_index *index, struct pc__record *record,
                         bool is_retained)
{
    if (record->is_retained == is_retained)
        return;
    record->is_retained = is_retained;
    count_retained(index, record, is_retained ? 1 : ONE_LESS);
}

static void link_record(struct pc__history_index *index, struct pc__history_segment *segment,
                        struct pc__record *record)
{
    const struct pc__history_floor *floor = pc__index_floor_of(index, record->region);

    record->segment = segment;
    record->is_retained = false;
    set_retained(index, record, floor && record->version >= floor->version && !record->is_skipped);
    if (segment->records) {
        record->segment_next = segment->records;
        record->segment_prev = segment->records->segment_prev;
        record->segment_prev->segment_next = record;
        record->segment_next->segment_prev = record;
    } else {
        segment->records = record->segment_next = record->segment_prev = record;
    }
    segment->n_records++;
}

static void unlink_record(struct pc__history_index *index, struct pc__record *record)
{
    struct pc__history_segment *segment = record->segment;
    set_retained(index, record, false);
    record->segment_next->segment_prev = record->segment_prev;
    record->segment_prev->segment_next = record->segment_next;
    if (segment->records == record)
        segment->records = record->segment_next == record ? NULL : record->segment_next;
    segment->n_records--;
}

static void free_record(struct pc__history_index *index, struct pc__record *record)
{
    index->n_retained_dropped += record->is_retained;
    unlink_record(index, record);
    index->n_records--;
    free(record);
}

/* The region stays, also without records. */
static uint64_t drop_until(struct pc__history_index *index, struct pc__history_region *region,
                           uint64_t version)
{
    uint64_t n_dropped = 0;
    while (region->n > 0 && region->records[region->begin]->version <= version) {
        free_record(index, region->records[region->begin++]);
        region->n--;
        n_dropped++;
    }
    return n_dropped;
}

uint64_t pc__index_drop(struct pc__history_index *index, uint64_t region, uint64_t version)
{
    struct pc__history_region **place = place_of(index, region);
    if (!*place)
        return 0;
    const uint64_t n_dropped = drop_until(index, *place, version);
    if ((*place)->n == 0)
        remove_region(index, place);
    return n_dropped;
}

/* Room for one more behind the last. */
static int make_room(struct pc__history_region *region)
{
    if (region->begin + region->n < region->capacity)
        return PC_OK;
    if (region->n <= region->capacity / 2 && region->begin > 0) {
        memmove(region->records, region->records + region->begin,
                region->n * sizeof *region->records);
        region->begin = 0;
        return PC_OK;
    }
    const size_t capacity = region->capacity ? 2 * region->capacity : 4;
    struct pc__record **grown = realloc(region->records, capacity * sizeof(struct pc__record *));
    if (!grown)
        return pc__fail(PC_ERR_NO_MEMORY, "the history's index");
    region->records = grown;
    region->capacity = capacity;
    return PC_OK;
}

int pc__index_push(struct pc__history_index *index, struct pc__history_segment *segment,
                   struct pc__record *record, uint64_t *n_dropped)
{
    struct pc__history_region **place = place_of(index, record->region);
    const bool is_new = !*place;

    *n_dropped = 0;
    if (is_new) {
        *place = calloc(1, sizeof **place);
        if (!*place)
            return pc__fail(PC_ERR_NO_MEMORY, "the history's index");
        (*place)->id = record->region;
        index->n_regions++;
    }
    struct pc__history_region *region = *place;
    const int rc = make_room(region);
    if (rc != PC_OK) {
        if (is_new)
            remove_region(index, place);
        return rc;
    }
    if (region->n > 0 && (record->is_skipped || pc__index_newest(region) + 1 != record->version))
        *n_dropped = drop_until(index, region, UINT64_MAX);
    region->records[region->begin + region->n++] = record;
    index->n_records++;
    link_record(index, segment, record);
    return PC_OK;
}

bool pc__index_replace(struct pc__history_index *index, const struct pc__history_segment *from,
                       struct pc__history_segment *to, struct pc__record *record)
{
    struct pc__history_region *region = pc__index_get(index, record->region);

    if (!region || record->version < region->records[region->begin]->version ||
        record->version > pc__index_newest(region))
        return false;
    struct pc__record **at = (struct pc__record **)(uintptr_t)pc__index_at(region, record->version);
    if ((*at)->segment != from)
        return false;
    unlink_record(index, *at);
    free(*at);
    *at = record;
    link_record(index, to, record);
    return true;
}

/* ---------------------------------------------------------------- floors */

/* Where the region's is, or would be. */
static size_t floor_place(const struct pc__history_index *index, uint64_t region)
{
    size_t low = 0, high = index->n_floors;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (index->floors[middle].region < region)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct pc__history_floor *pc__index_floor_of(const struct pc__history_index *index,
                                             uint64_t region)
{
    const size_t at = floor_place(index, region);
    return at < index->n_floors && index->floors[at].region == region ? &index->floors[at] : NULL;
}

static int insert_floor(struct pc__history_index *index, uint64_t region, uint64_t version)
{
    const size_t at = floor_place(index, region);

    if (index->n_floors == index->floors_capacity) {
        const size_t capacity = index->floors_capacity ? 2 * index->floors_capacity : 16;
        struct pc__history_floor *grown =
            realloc(index->floors, capacity * sizeof(struct pc__history_floor));
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "what must stay of the history");
        index->floors = grown;
        index->floors_capacity = capacity;
    }
    memmove(&index->floors[at + 1], &index->floors[at],
            (index->n_floors - at) * sizeof(struct pc__history_floor));
    index->floors[at] = (struct pc__history_floor){.region = region, .version = version};
    index->n_floors++;
    return PC_OK;
}

int pc__index_retain(struct pc__history_index *index, uint64_t region, uint64_t version)
{
    struct pc__history_floor *floor = pc__index_floor_of(index, region);

    if (floor && version == UINT64_MAX) {
        index->n_floors--;
        memmove(floor, floor + 1,
                (size_t)(&index->floors[index->n_floors] - floor) * sizeof *floor);
    } else if (floor) {
        *floor = (struct pc__history_floor){.region = region, .version = version};
    } else if (version != UINT64_MAX) {
        const int rc = insert_floor(index, region, version);
        if (rc != PC_OK)
            return rc;
    }
    struct pc__history_region *found = pc__index_get(index, region);
    for (size_t i = 0; found && i < found->n; i++) {
        struct pc__record *record = found->records[found->begin + i];
        set_retained(index, record, record->version >= version && !record->is_skipped);
    }
    return PC_OK;
}

uint64_t pc__index_newest(const struct pc__history_region *region)
{
    return region->records[region->begin + region->n - 1]->version;
}

uint64_t pc__index_floor(const struct pc__history_region *region, uint64_t before)
{
    if (!region || before == 0 || pc__index_newest(region) < before - 1)
        return before;
    const struct pc__record *oldest = region->records[region->begin];
    const uint64_t version = oldest->is_skipped ? oldest->version + 1 : oldest->version;
    return version < before ? version : before;
}

struct pc__record *const *pc__index_at(const struct pc__history_region *region, uint64_t version)
{
    return &region->records[region->begin + (version - region->records[region->begin]->version)];
}

static const char *audit_record(const struct pc__history_index *index,
                                const struct pc__history_region *region, size_t i)
{
    const struct pc__record *record = region->records[region->begin + i];
    const struct pc__history_floor *floor = pc__index_floor_of(index, region->id);
    const bool stays = floor && record->version >= floor->version && !record->is_skipped;
    if (record->region != region->id)
        return "a record is of the region that has it";
    if (record->version != region->records[region->begin]->version + i)
        return "a region's records have consecutive versions";
    if (record->is_skipped && i > 0)
        return "only the oldest record keeps nothing";
    return record->is_retained == stays ? NULL : "the records from the floor on are retained";
}

const char *pc__index_audit(const struct pc__history_index *index)
{
    uint64_t n_records = 0, retained_blocks = 0;
    size_t n_regions = 0;
    for (size_t i = 1; i < index->n_floors; i++)
        if (index->floors[i].region <= index->floors[i - 1].region)
            return "floors are ascending by region";
    for (size_t b = 0; b < PC__HISTORY_BUCKETS; b++)
        for (const struct pc__history_region *at = index->buckets[b]; at; at = at->hash_next) {
            n_regions++;
            n_records += at->n;
            if (pc__index_get(index, at->id) != at)
                return "a region is found, and is there once";
            if (!at->n)
                return "a region in the index has records";
            for (size_t i = 0; i < at->n; i++) {
                const char *broken = audit_record(index, at, i);
                if (broken)
                    return broken;
                const struct pc__record *record = at->records[at->begin + i];
                retained_blocks += record->is_retained ? record->n_blocks : 0;
            }
        }
    if (n_regions != index->n_regions || n_records != index->n_records)
        return "each region and each record is counted";
    return retained_blocks == index->retained_blocks ? NULL : "each retained block is counted";
}

void pc__index_free(struct pc__history_index *index)
{
    for (size_t i = 0; i < PC__HISTORY_BUCKETS; i++)
        while (index->buckets[i])
            (void)pc__index_drop(index, index->buckets[i]->id, UINT64_MAX);
    free(index->floors);
}
