/* disk_slots.c - see disk_slots.h. */
#include "engine/cache/disk_slots.h"

#include <stdlib.h>
#include <string.h>

#define FEW_CHUNKS 1024u /* are looked up one by one */

struct pc__disk_slot {
    struct pc__link siblings;                /* of its generation */
    const struct pc__generation *generation; /* NULL: it has nothing */
    uint64_t chunk;
    uint64_t sequence;
    uint32_t hash_next;
    uint16_t blocks;                         /* bit i: it has block i of the chunk, */
    uint16_t coming;                         /* or block i is being written */
    bool is_written;                         /* at this moment: it stays where it is */
};
static_assert(sizeof(struct pc__disk_slot) <= 80, "as disk_cache.c says");

static unsigned count(uint32_t bits)
{
    return (unsigned)__builtin_popcount(bits);
}

static uint32_t *bucket_of(const struct pc__disk_slots *slots, const struct pc__generation *generation,
                           uint64_t chunk)
{
    const uint64_t key = ((uint64_t)(uintptr_t)generation >> 4) * 0x9e3779b97f4a7c15ull ^
                         chunk * 0xff51afd7ed558ccdull;
    return &slots->buckets[(key ^ key >> 32) & (slots->n_buckets - 1)];
}

int pc__disk_slots_open(struct pc__disk_slots *slots, uint32_t n_slots)
{
    slots->n_slots = n_slots;
    for (slots->n_buckets = 1; slots->n_buckets < n_slots;)
        slots->n_buckets *= 2;
    slots->slots = calloc(n_slots, sizeof *slots->slots);
    slots->buckets = malloc(slots->n_buckets * sizeof *slots->buckets);
    if (!slots->slots || !slots->buckets)
        return pc__fail(PC_ERR_NO_MEMORY, "the index of a cache on disk");
    memset(slots->buckets, 0xff, slots->n_buckets * sizeof *slots->buckets); /* PC__NO_SLOT */
    return PC_OK;
}

void pc__disk_slots_close(struct pc__disk_slots *slots)
{
    free(slots->slots);
    free(slots->buckets);
}

uint32_t pc__disk_slots_find(const struct pc__disk_slots *slots, const struct pc__generation *generation,
                             uint64_t chunk)
{
    uint32_t at = *bucket_of(slots, generation, chunk);
    while (at != PC__NO_SLOT &&
           (slots->slots[at].generation != generation || slots->slots[at].chunk != chunk))
        at = slots->slots[at].hash_next;
    return at;
}

/* What it has is nobody's. */
static void drop(struct pc__disk_slots *slots, uint32_t index)
{
    struct pc__disk_slot *slot = &slots->slots[index];
    if (!slot->generation)
        return;
    uint32_t *at = bucket_of(slots, slot->generation, slot->chunk);
    while (*at != index)
        at = &slots->slots[*at].hash_next;
    *at = slot->hash_next;
    pc__link_remove(&slot->siblings);
    slots->n_blocks -= count(slot->blocks);
    slot->generation = NULL;
    slot->blocks = slot->coming = 0;
    slot->sequence++;
}

/* For the chunk, in the place of what has been there longest, and is not being written. */
static uint32_t take_next(struct pc__disk_slots *slots, struct pc__generation *generation, uint64_t chunk)
{
    uint32_t index;
    do {
        index = slots->next;
        slots->next = (slots->next + 1) % slots->n_slots;
    } while (slots->slots[index].is_written);
    drop(slots, index);
    struct pc__disk_slot *slot = &slots->slots[index];
    uint32_t *bucket = bucket_of(slots, generation, chunk);
    *slot = (struct pc__disk_slot){.generation = generation,
                                   .chunk = chunk,
                                   .sequence = slot->sequence + 1,
                                   .hash_next = *bucket};
    *bucket = index;
    pc__link_push(&generation->on_disk_too, &slot->siblings);
    return index;
}

uint32_t pc__disk_slots_begin(struct pc__disk_slots *slots, struct pc__generation *generation, uint64_t chunk,
                              uint32_t *blocks)
{
    uint32_t index = pc__disk_slots_find(slots, generation, chunk);
    if (index != PC__NO_SLOT)
        *blocks &= ~(uint32_t)slots->slots[index].blocks;
    if (!*blocks || (index != PC__NO_SLOT && slots->slots[index].is_written))
        return PC__NO_SLOT;
    if (index == PC__NO_SLOT)
        index = take_next(slots, generation, chunk);
    slots->slots[index].coming = (uint16_t)*blocks;
    slots->slots[index].is_written = true;
    return index;
}

unsigned pc__disk_slots_end(struct pc__disk_slots *slots, uint32_t index, bool is_written)
{
    struct pc__disk_slot *slot = &slots->slots[index];
    const uint16_t came = is_written ? slot->coming : 0;
    slot->blocks |= came;
    slot->coming = 0;
    slot->is_written = false;
    slots->n_blocks += count(came);
    if (!slot->blocks)
        drop(slots, index);
    return count(came);
}

static uint16_t bits_of(uint64_t chunk, uint64_t first, uint64_t past)
{
    const uint64_t begin = chunk * PC__CHUNK_BLOCKS;
    const uint64_t low = first > begin ? first - begin : 0;
    const uint64_t high = past - begin < PC__CHUNK_BLOCKS ? past - begin : PC__CHUNK_BLOCKS;
    return (uint16_t)(((1u << high) - 1) & ~((1u << low) - 1));
}

static void remove_bits(struct pc__disk_slots *slots, uint32_t index, uint16_t changed)
{
    struct pc__disk_slot *slot = &slots->slots[index];
    slots->n_blocks -= count(slot->blocks & (uint32_t)changed);
    slot->blocks &= (uint16_t)~changed;
    slot->coming &= (uint16_t)~changed;
    if (!slot->blocks && !slot->coming)
        drop(slots, index);
}

void pc__disk_slots_remove(struct pc__disk_slots *slots, struct pc__generation *generation, uint64_t first,
                           uint64_t n)
{
    const uint64_t chunk = first / PC__CHUNK_BLOCKS, past = (first + n - 1) / PC__CHUNK_BLOCKS + 1;
    struct pc__link *all = &generation->on_disk_too;
    for (uint64_t at = chunk; past - chunk <= FEW_CHUNKS && at < past; at++) {
        const uint32_t index = pc__disk_slots_find(slots, generation, at);
        if (index != PC__NO_SLOT)
            remove_bits(slots, index, bits_of(at, first, first + n));
    }
    if (past - chunk <= FEW_CHUNKS)
        return;
    pc__each(link, all) /* there may be fewer of those */
    {
        const struct pc__disk_slot *slot = pc__of(link, struct pc__disk_slot, siblings);
        if (slot->chunk >= chunk && slot->chunk < past)
            remove_bits(slots, (uint32_t)(slot - slots->slots), bits_of(slot->chunk, first, first + n));
    }
}

bool pc__disk_slots_forget(struct pc__disk_slots *slots, struct pc__generation *generation, unsigned most)
{
    struct pc__link *all = &generation->on_disk_too;
    for (unsigned i = 0; i < most && !pc__link_empty(all); i++)
        drop(slots, (uint32_t)(pc__of(all->next, struct pc__disk_slot, siblings) - slots->slots));
    return !pc__link_empty(all);
}

unsigned pc__disk_slots_alike(uint32_t bits, unsigned from)
{
    unsigned n = 1;
    while (from + n < PC__CHUNK_BLOCKS && ((bits >> from ^ bits >> (from + n)) & 1u) == 0)
        n++;
    return n;
}

unsigned pc__disk_slots_from(const struct pc__disk_slots *slots, uint32_t index, uint64_t block)
{
    const uint32_t blocks = index == PC__NO_SLOT ? 0 : slots->slots[index].blocks;
    const unsigned at = (unsigned)(block % PC__CHUNK_BLOCKS);
    return blocks >> at & 1u ? pc__disk_slots_alike(blocks, at) : 0;
}

uint64_t pc__disk_slots_sequence(const struct pc__disk_slots *slots, uint32_t index)
{
    return slots->slots[index].sequence;
}

const char *pc__disk_slots_audit(const struct pc__disk_slots *slots)
{
    uint64_t n_blocks = 0;
    for (uint32_t i = 0; i < slots->n_slots; i++) {
        const struct pc__disk_slot *slot = &slots->slots[i];
        n_blocks += count(slot->blocks);
        if ((slot->generation != NULL) != (slot->blocks || slot->coming))
            return "a slot of the cache's disk has blocks of a generation, or nothing";
        if (slot->blocks & slot->coming || (slot->coming && !slot->is_written))
            return "blocks that come to the cache's disk are being written";
        if (slot->generation && pc__disk_slots_find(slots, slot->generation, slot->chunk) != i)
            return "each slot of the cache's disk is found";
    }
    return n_blocks == slots->n_blocks ? NULL : "each block on the cache's disk is counted";
}
