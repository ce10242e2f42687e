/* hashmap.c - the hash table of clamor.HashMap: lookups and changes over memory that the caller
 * owns, a global variable's or a private array's alike.
 *
 * Layout: one array of a power of two of packed records, tag (1 byte) | key | value. A key and its
 * value lie side by side because what a cold lookup costs is the blocks that it touches: nearly
 * always one here, and at least two where keys, tags or values have arrays of their own. A tag is 0
 * in an empty slot, so that empty blocks are blocks of zeros, and 7 bits of the hash elsewhere.
 *
 * Linear probing, at most half of the slots taken. Erasing moves the records behind into the gap
 * (Knuth's algorithm R): there are no tombstones, and what a lookup costs depends on what the map
 * holds, not on its past.
 *
 * Writers run in transactions that conflict by the block. So that two that touch one record always
 * meet in a block, whatever vacates or fills a slot writes all of its bytes. Only a changed value
 * is written where it differs, and nowhere else.
 *
 * Any thread may enter; there is no state here. Nobody may write the table during a call.
 */
#include "common/error.h"

#include <stdbool.h>
#include <string.h>

#define TAG_BYTES 1u
#define WORD_BYTES 8u
#define MAX_KEY_BYTES 65536u
#define MAX_VALUE_BYTES (1ull << 40)
#define CACHE_LINE_BYTES 64u
/* Records under way at once. A core has 10 to 16 line fill buffers, and page walks on top. */
#define AHEAD 32u

_Static_assert((AHEAD & (AHEAD - 1)) == 0, "a ring");

/* A table whose lengths fit each other. */
struct table {
    uint8_t *slots;
    uint64_t mask;
    size_t record_bytes, key_bytes, value_bytes;
};

/* Lengths come from memory that others wrote: everything is checked before it is used. */
static int open_table(const struct pc_hash_table *in, struct table *out)
{
    uint64_t n_bytes;
    if (!in || !in->slots || in->n_slots < 2 || (in->n_slots & (in->n_slots - 1)) != 0)
        return pc__fail(PC_ERR_RANGE, "a hash table needs a power of two of slots, not %llu",
                        in ? (unsigned long long)in->n_slots : 0ull);
    if (in->key_bytes == 0 || in->key_bytes > MAX_KEY_BYTES || in->value_bytes == 0 ||
        in->value_bytes > MAX_VALUE_BYTES)
        return pc__fail(PC_ERR_RANGE, "a hash table has keys of %u bytes, values of %llu",
                        in->key_bytes, (unsigned long long)in->value_bytes);
    if (in->key_kind != PC_HASH_BYTES &&
        !(in->key_kind == PC_HASH_INT64 && in->key_bytes == sizeof(int64_t)))
        return pc__fail(PC_ERR_RANGE, "a hash table has keys of kind %u, of %u bytes",
                        in->key_kind, in->key_bytes);
    uint64_t record_bytes = TAG_BYTES + in->key_bytes + in->value_bytes;
    if (__builtin_mul_overflow(in->n_slots, record_bytes, &n_bytes) || n_bytes != in->slots_bytes)
        return pc__fail(PC_ERR_RANGE, "%llu slots of %llu bytes are not %llu bytes",
                        (unsigned long long)in->n_slots, (unsigned long long)record_bytes,
                        (unsigned long long)in->slots_bytes);
    *out = (struct table){.slots = in->slots,
                          .mask = in->n_slots - 1,
                          .record_bytes = (size_t)record_bytes,
                          .key_bytes = in->key_bytes,
                          .value_bytes = (size_t)in->value_bytes};
    return PC_OK;
}

static int check_array(const void *array, uint64_t n_bytes, uint64_t n_items, size_t item_bytes,
                       const char *what)
{
    uint64_t expected;
    if (__builtin_mul_overflow(n_items, item_bytes, &expected) || expected != n_bytes ||
        (n_bytes && !array))
        return pc__fail(PC_ERR_RANGE, "%llu %s of %zu bytes are not %llu bytes",
                        (unsigned long long)n_items, what, item_bytes, (unsigned long long)n_bytes);
    return PC_OK;
}

static int check_batch(const struct table *table, const struct pc_hash_batch *batch, bool values)
{
    if (!batch)
        return pc__fail(PC_ERR_RANGE, "no keys");
    int err = check_array(batch->keys, batch->keys_bytes, batch->n_keys, table->key_bytes, "keys");
    if (!err && values)
        err = check_array(batch->values, batch->values_bytes, batch->n_keys, table->value_bytes,
                          "values");
    return err;
}

/* ------------------------------------------------------------------ hash */

/* The output function of SplitMix64 (Steele, Lea, Flood 2014). */
static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* Little-endian on every machine; the last word of a key may be a part of one. */
static inline uint64_t load_word(const uint8_t *from, size_t n_bytes)
{
    uint64_t word = 0;
    memcpy(&word, from, n_bytes);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* Keys of 8 bytes: mix(key). Longer ones are folded word by word, the last padded with zeros. */
static inline __attribute__((always_inline)) uint64_t hash_of(const uint8_t *key, size_t key_bytes)
{
    uint64_t hash = 0;
    for (size_t at = 0; at < key_bytes; at += WORD_BYTES) {
        size_t left = key_bytes - at;
        hash = mix(hash ^ load_word(key + at, left < WORD_BYTES ? left : WORD_BYTES));
    }
    return hash;
}

static inline uint8_t tag_of(uint64_t hash)
{
    return (uint8_t)(hash >> 56 | 1u);
}

/* ------------------------------------------------------------------ records */

static inline uint8_t *record_at(const struct table *table, uint64_t slot)
{
    return table->slots + slot * table->record_bytes;
}

static inline uint8_t *value_in(const struct table *table, uint8_t *record)
{
    return record + TAG_BYTES + table->key_bytes;
}

static inline void copy_value(uint8_t *to, const uint8_t *from, size_t n_bytes)
{
    if (n_bytes == sizeof(uint64_t)) /* the usual ones, without a call */
        memcpy(to, from, sizeof(uint64_t));
    else if (n_bytes == sizeof(uint32_t))
        memcpy(to, from, sizeof(uint32_t));
    else
        memcpy(to, from, n_bytes);
}

/* Writes only the blocks that change: of a transaction every written block travels. */
static void change_value(uint8_t *to, const uint8_t *from, size_t n_bytes)
{
    while (n_bytes) {
        size_t in_block = PC_BLOCK_BYTES - ((uintptr_t)to & (PC_BLOCK_BYTES - 1));
        size_t step = in_block < n_bytes ? in_block : n_bytes;
        if (memcmp(to, from, step) != 0)
            memcpy(to, from, step);
        to += step;
        from += step;
        n_bytes -= step;
    }
}

static inline void prefetch_record(const struct table *table, uint64_t hash)
{
    const uint8_t *record = record_at(table, hash & table->mask);
    size_t last = table->record_bytes - 1; /* the record may begin at the end of a cache line */
    __builtin_prefetch(record);
    __builtin_prefetch(record + (last < CACHE_LINE_BYTES ? last : CACHE_LINE_BYTES));
}

enum probe { PROBE_FOUND, PROBE_EMPTY, PROBE_NO_END };

/* Looks from where the hash says to the first empty slot. *record: the key's, or the empty one. */
static inline __attribute__((always_inline)) enum probe
probe(const struct table *table, const uint8_t *key, size_t key_bytes, uint64_t hash,
      uint8_t **record)
{
    uint8_t tag = tag_of(hash);
    uint64_t slot = hash & table->mask;
    for (uint64_t steps = 0; steps <= table->mask; steps++) {
        uint8_t *at = record_at(table, slot);
        if (at[0] == 0 || (at[0] == tag && memcmp(at + TAG_BYTES, key, key_bytes) == 0)) {
            *record = at;
            return at[0] == 0 ? PROBE_EMPTY : PROBE_FOUND;
        }
        slot = (slot + 1) & table->mask;
    }
    return PROBE_NO_END;
}

static int no_empty_slot(void)
{
    return pc__fail(PC_ERR_PROTOCOL, "every slot of the hash table is taken");
}

/* ------------------------------------------------------------------ lookups */

/* A new record's fetch begins with each one that is looked at: the memory is never idle. */
struct ring {
    uint64_t hashes[AHEAD];
};

static inline __attribute__((always_inline)) void
start_key(const struct table *table, struct ring *ring, const uint8_t *keys, size_t key_bytes,
          uint64_t i)
{
    uint64_t hash = hash_of(keys + i * key_bytes, key_bytes);
    ring->hashes[i % AHEAD] = hash;
    prefetch_record(table, hash);
}

static inline __attribute__((always_inline)) void
start_first(const struct table *table, struct ring *ring, const uint8_t *keys, size_t key_bytes,
            uint64_t n_keys)
{
    for (uint64_t i = 0; i < n_keys && i < AHEAD; i++)
        start_key(table, ring, keys, key_bytes, i);
}

/* key_bytes is a constant where it is inlined for integers. */
static inline __attribute__((always_inline)) int64_t
get_all(const struct table *table, const struct pc_hash_batch *batch, size_t key_bytes,
        uint8_t *found)
{
    const uint8_t *keys = batch->keys;
    uint8_t *values = batch->values;
    uint64_t n_keys = batch->n_keys;
    int64_t n_found = 0;
    struct ring ring;
    start_first(table, &ring, keys, key_bytes, n_keys);
    for (uint64_t i = 0; i < n_keys; i++) {
        uint64_t hash = ring.hashes[i % AHEAD];
        if (i + AHEAD < n_keys)
            start_key(table, &ring, keys, key_bytes, i + AHEAD);
        uint8_t *record;
        enum probe end = probe(table, keys + i * key_bytes, key_bytes, hash, &record);
        if (end == PROBE_NO_END)
            return no_empty_slot();
        found[i] = end == PROBE_FOUND;
        if (end == PROBE_FOUND) {
            n_found++;
            if (values)
                copy_value(values + i * table->value_bytes, value_in(table, record),
                           table->value_bytes);
        }
    }
    return n_found;
}

PC_API int64_t pc_hash_get(const struct pc_hash_table *in, const struct pc_hash_batch *batch,
                           uint8_t *found, uint64_t found_bytes)
{
    struct table table;
    int err = open_table(in, &table);
    if (!err)
        err = check_batch(&table, batch, batch && batch->values);
    if (!err)
        err = check_array(found, found_bytes, batch->n_keys, 1, "flags");
    if (err)
        return err;
    if (table.key_bytes == sizeof(int64_t))
        return get_all(&table, batch, sizeof(int64_t), found);
    return get_all(&table, batch, table.key_bytes, found);
}

PC_API int pc_hash_starts(const struct pc_hash_table *in, const struct pc_hash_batch *batch,
                          uint64_t *offsets, uint64_t offsets_bytes)
{
    struct table table;
    int err = open_table(in, &table);
    if (!err)
        err = check_batch(&table, batch, false);
    if (!err)
        err = check_array(offsets, offsets_bytes, batch->n_keys, sizeof *offsets, "offsets");
    if (err)
        return err;
    const uint8_t *keys = batch->keys;
    for (uint64_t i = 0; i < batch->n_keys; i++)
        offsets[i] = (hash_of(keys + i * table.key_bytes, table.key_bytes) & table.mask) *
                     table.record_bytes;
    return PC_OK;
}

/* ------------------------------------------------------------------ changes */

static inline __attribute__((always_inline)) int64_t
set_all(const struct table *table, const struct pc_hash_batch *batch, size_t key_bytes,
        uint64_t room)
{
    const uint8_t *keys = batch->keys, *values = batch->values;
    uint64_t n_keys = batch->n_keys, n_inserted = 0;
    struct ring ring;
    start_first(table, &ring, keys, key_bytes, n_keys);
    for (uint64_t i = 0; i < n_keys; i++) {
        uint64_t hash = ring.hashes[i % AHEAD];
        if (i + AHEAD < n_keys)
            start_key(table, &ring, keys, key_bytes, i + AHEAD);
        const uint8_t *key = keys + i * key_bytes;
        const uint8_t *value = values + i * table->value_bytes;
        uint8_t *record;
        switch (probe(table, key, key_bytes, hash, &record)) {
        case PROBE_FOUND:
            change_value(value_in(table, record), value, table->value_bytes);
            break;
        case PROBE_EMPTY:
            if (n_inserted == room)
                return pc__fail(PC_ERR_NO_SPACE, "the hash table has room for %llu keys more",
                                (unsigned long long)room);
            record[0] = tag_of(hash);
            memcpy(record + TAG_BYTES, key, key_bytes);
            copy_value(value_in(table, record), value, table->value_bytes);
            n_inserted++;
            break;
        case PROBE_NO_END:
            return no_empty_slot();
        }
    }
    return (int64_t)n_inserted;
}

PC_API int64_t pc_hash_set(const struct pc_hash_table *in, const struct pc_hash_batch *batch,
                           uint64_t room)
{
    struct table table;
    int err = open_table(in, &table);
    if (!err)
        err = check_batch(&table, batch, true);
    if (err)
        return err;
    if (table.key_bytes == sizeof(int64_t))
        return set_all(&table, batch, sizeof(int64_t), room);
    return set_all(&table, batch, table.key_bytes, room);
}

/* Empties a slot and moves what lies behind it up, so that no probe meets a gap. */
static int erase_record(const struct table *table, uint8_t *record)
{
    uint64_t gap = (uint64_t)(record - table->slots) / table->record_bytes;
    uint64_t slot = gap;
    for (uint64_t steps = 0; steps < table->mask; steps++) {
        slot = (slot + 1) & table->mask;
        uint8_t *at = record_at(table, slot);
        if (at[0] == 0) {
            memset(record_at(table, gap), 0, table->record_bytes);
            return PC_OK;
        }
        uint64_t home = hash_of(at + TAG_BYTES, table->key_bytes) & table->mask;
        /* It may lie anywhere from its home on; the gap is nearer to that than where it is. */
        if (((slot - home) & table->mask) >= ((slot - gap) & table->mask)) {
            memcpy(record_at(table, gap), at, table->record_bytes);
            gap = slot;
        }
    }
    return no_empty_slot();
}

PC_API int64_t pc_hash_erase(const struct pc_hash_table *in, const struct pc_hash_batch *batch)
{
    struct table table;
    int err = open_table(in, &table);
    if (!err)
        err = check_batch(&table, batch, false);
    if (err)
        return err;
    const uint8_t *keys = batch->keys;
    int64_t n_erased = 0;
    for (uint64_t i = 0; i < batch->n_keys; i++) {
        const uint8_t *key = keys + i * table.key_bytes;
        uint8_t *record;
        switch (probe(&table, key, table.key_bytes, hash_of(key, table.key_bytes), &record)) {
        case PROBE_FOUND:
            err = erase_record(&table, record);
            if (err)
                return err;
            n_erased++;
            break;
        case PROBE_EMPTY:
            break;
        case PROBE_NO_END:
            return no_empty_slot();
        }
    }
    return n_erased;
}
