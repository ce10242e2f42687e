/* test_hashmap.c - the hash table against a plain list, and against lengths that lie. */
#include "tests/support/harness.h"

#include <string.h>
#include <sys/mman.h>

#define MAX_KEYS 64u
#define MAX_WIDTH 24u

/* Exactly as long as it must be: the sanitizer sees the first byte outside. */
struct world {
    struct pc_hash_table table;
    size_t record_bytes;
};

static struct world world_new(uint64_t n_slots, uint32_t kind, uint32_t key_bytes,
                              uint64_t value_bytes)
{
    size_t record_bytes = 1 + key_bytes + (size_t)value_bytes;
    uint64_t n_bytes = n_slots * record_bytes;
    void *slots = calloc(n_bytes, 1);
    CHECK(slots);
    return (struct world){.table = {.slots = slots,
                                    .slots_bytes = n_bytes,
                                    .n_slots = n_slots,
                                    .value_bytes = value_bytes,
                                    .key_kind = kind,
                                    .key_bytes = key_bytes},
                          .record_bytes = record_bytes};
}

static struct pc_hash_batch batch_of(const struct world *w, const void *keys, void *values,
                                     uint64_t n)
{
    return (struct pc_hash_batch){.keys = keys,
                                  .keys_bytes = n * w->table.key_bytes,
                                  .values = values,
                                  .values_bytes = values ? n * w->table.value_bytes : 0,
                                  .n_keys = n};
}

/* Random sets, erases and lookups of few keys in a small table: long probes, many wraps. */
static void test_random(int seed_number)
{
    const uint32_t widths[] = {8, 8, 3, 8, 17, MAX_WIDTH};
    const uint64_t value_widths[] = {8, 1, 4, 24, 100, 5000};
    unsigned seed = (unsigned)seed_number;
    unsigned shape = seed % 6;
    uint32_t width = widths[shape];
    size_t value_bytes = (size_t)value_widths[shape];
    struct world w = world_new(64, width == 8 ? PC_HASH_INT64 : PC_HASH_BYTES, width, value_bytes);
    uint8_t keys[MAX_KEYS][MAX_WIDTH];
    bool held[MAX_KEYS] = {false};
    uint8_t *values = calloc(MAX_KEYS, value_bytes);
    uint8_t *out = malloc(MAX_KEYS * value_bytes);
    CHECK(values && out);
    for (unsigned i = 0; i < MAX_KEYS; i++) {
        for (unsigned j = 0; j < MAX_WIDTH; j++)
            keys[i][j] = (uint8_t)rand_r(&seed);
        keys[i][0] = (uint8_t)i; /* all differ */
    }
    uint64_t n_held = 0;
    for (int step = 0; step < 4000; step++) {
        unsigned i = (unsigned)rand_r(&seed) % MAX_KEYS;
        uint8_t *key = malloc(width);
        CHECK(key);
        memcpy(key, keys[i], width);
        struct pc_hash_batch batch = batch_of(&w, key, values + i * value_bytes, 1);
        if (rand_r(&seed) % 2) {
            memset(values + i * value_bytes, rand_r(&seed), value_bytes);
            int64_t added = pc_hash_set(&w.table, &batch, 32 - n_held);
            if (!held[i] && n_held == 32) {
                CHECK(added == PC_ERR_NO_SPACE);
            } else {
                CHECK(added == !held[i]);
                n_held += !held[i];
                held[i] = true;
            }
        } else {
            CHECK(pc_hash_erase(&w.table, &batch) == held[i]);
            n_held -= held[i];
            held[i] = false;
        }
        free(key);
    }
    uint8_t *all = malloc((size_t)MAX_KEYS * width);
    uint8_t found[MAX_KEYS];
    CHECK(all);
    for (unsigned i = 0; i < MAX_KEYS; i++)
        memcpy(all + (size_t)i * width, keys[i], width);
    memset(out, 0xee, MAX_KEYS * value_bytes);
    struct pc_hash_batch batch = batch_of(&w, all, out, MAX_KEYS);
    CHECK(pc_hash_get(&w.table, &batch, found, sizeof found) == (int64_t)n_held);
    uint64_t n_tags = 0;
    for (unsigned i = 0; i < 64; i++)
        n_tags += ((uint8_t *)w.table.slots)[i * w.record_bytes] != 0;
    CHECK(n_tags == n_held);
    for (unsigned i = 0; i < MAX_KEYS; i++) {
        CHECK(found[i] == held[i]);
        if (held[i])
            CHECK(memcmp(out + i * value_bytes, values + i * value_bytes, value_bytes) == 0);
        else
            CHECK(out[i * value_bytes] == 0xee);
    }
    /* Without the last key there is nothing left, not even in the slots. */
    (void)pc_hash_erase(&w.table, &batch);
    for (uint64_t i = 0; i < w.table.slots_bytes; i++)
        CHECK(((uint8_t *)w.table.slots)[i] == 0);
    free(all);
    free(values);
    free(out);
    free(w.table.slots);
}

/* Regions outlive builds: a key's place never changes. */
static void test_places_are_fixed(int unused)
{
    (void)unused;
    struct world w = world_new(1u << 20, PC_HASH_INT64, 8, 1);
    const int64_t keys[] = {0, 1, -1, INT64_MIN, INT64_MAX, 1234567890123};
    /* SplitMix64 from Python: hex(mix(key)), low 20 bits. */
    const uint64_t slots[] = {0xdcdaf, 0x25cc1, 0x52c20, 0x9f3db, 0x39ea7, 0xd08d8};
    uint64_t offsets[6];
    struct pc_hash_batch batch = batch_of(&w, keys, NULL, 6);
    OK(pc_hash_starts(&w.table, &batch, offsets, sizeof offsets));
    for (int i = 0; i < 6; i++)
        CHECK(offsets[i] == slots[i] * 10);
    free(w.table.slots);

    w = world_new(1u << 20, PC_HASH_BYTES, 11, 1);
    const char text[11] = "hello world"; /* no NUL at its end */
    batch = batch_of(&w, text, NULL, 1);
    OK(pc_hash_starts(&w.table, &batch, offsets, sizeof offsets[0]));
    CHECK(offsets[0] == 0x5c8a2 * 13ull);
    free(w.table.slots);
}

static void test_the_last_of_equal_keys_stays(int unused)
{
    (void)unused;
    struct world w = world_new(8, PC_HASH_INT64, 8, 2);
    int64_t keys[] = {5, 6, 5};
    uint16_t values[] = {1, 2, 3}, out[3];
    uint8_t found[3];
    struct pc_hash_batch batch = batch_of(&w, keys, values, 3);
    CHECK(pc_hash_set(&w.table, &batch, 4) == 2);
    batch.values = out;
    CHECK(pc_hash_get(&w.table, &batch, found, sizeof found) == 3);
    CHECK(out[0] == 3 && out[1] == 2 && out[2] == 3);
    CHECK(pc_hash_erase(&w.table, &batch) == 2);
    free(w.table.slots);
}

/* A table that others wrote: whatever is in it, nothing hangs and nothing is touched outside. */
static void test_corrupt_tables(int unused)
{
    (void)unused;
    struct world w = world_new(16, PC_HASH_INT64, 8, 8);
    int64_t key = 77;
    uint64_t value = 1, offset;
    uint8_t found;
    struct pc_hash_batch batch = batch_of(&w, &key, &value, 1);
    memset(w.table.slots, 0x55, w.table.slots_bytes);
    CHECK(pc_hash_get(&w.table, &batch, &found, 1) == PC_ERR_PROTOCOL);
    CHECK(pc_hash_set(&w.table, &batch, 8) == PC_ERR_PROTOCOL);
    CHECK(pc_hash_erase(&w.table, &batch) == PC_ERR_PROTOCOL);
    /* The key is there, and no slot is empty behind it. */
    OK(pc_hash_starts(&w.table, &batch, &offset, sizeof offset));
    memset(w.table.slots, 0, w.table.slots_bytes);
    CHECK(pc_hash_set(&w.table, &batch, 8) == 1);
    for (uint64_t i = 0; i < 16; i++)
        ((uint8_t *)w.table.slots)[i * w.record_bytes] |= 1;
    CHECK(pc_hash_get(&w.table, &batch, &found, 1) == 1);
    CHECK(pc_hash_erase(&w.table, &batch) == PC_ERR_PROTOCOL);
    free(w.table.slots);
}

static void test_lengths_that_do_not_fit(int unused)
{
    (void)unused;
    struct world w = world_new(16, PC_HASH_INT64, 8, 8);
    int64_t key = 77;
    uint64_t value = 1;
    uint8_t found;
    const struct pc_hash_batch good = batch_of(&w, &key, &value, 1);
#define REFUSED(table, batch, n_found) \
    CHECK(pc_hash_get(table, batch, &found, n_found) == PC_ERR_RANGE)
    CHECK(pc_hash_get(&w.table, &good, &found, 1) == 0);
    REFUSED(NULL, &good, 1);
    REFUSED(&w.table, NULL, 1);
    REFUSED(&w.table, &good, 2);
    for (int i = 0; i < 10; i++) {
        struct pc_hash_table table = w.table;
        switch (i) {
        case 0: table.slots = NULL; break;
        case 1: table.n_slots = 15; break;
        case 2: table.n_slots = 0; break;
        case 3: table.n_slots = 32; break;
        case 4: table.n_slots = 1ull << 63; break;
        case 5: table.slots_bytes--; break;
        case 6: table.key_kind = 3; break;
        case 7: table.key_bytes = 7; break;
        case 8: table.value_bytes = 0; break;
        default: table.value_bytes = UINT64_MAX - 8; break;
        }
        REFUSED(&table, &good, 1);
        CHECK(pc_hash_set(&table, &good, 1) == PC_ERR_RANGE);
        CHECK(pc_hash_erase(&table, &good) == PC_ERR_RANGE);
        CHECK(pc_hash_starts(&table, &good, &value, sizeof value) == PC_ERR_RANGE);
    }
    for (int i = 0; i < 4; i++) {
        struct pc_hash_batch batch = good;
        switch (i) {
        case 0: batch.keys = NULL; break;
        case 1: batch.keys_bytes = 7; break;
        case 2: batch.values_bytes = 9; break;
        default: batch.n_keys = 1ull << 61; batch.keys_bytes = 0; break;
        }
        REFUSED(&w.table, &batch, batch.n_keys);
        CHECK(pc_hash_set(&w.table, &batch, 1) == PC_ERR_RANGE);
    }
    struct pc_hash_batch none = batch_of(&w, NULL, NULL, 0);
    CHECK(pc_hash_get(&w.table, &none, NULL, 0) == 0);
    CHECK(pc_hash_set(&w.table, &none, 0) == 0);
    free(w.table.slots);
}

/* What is written twice with the same bytes is not written: the page is read-only here. */
static void test_equal_values_are_not_written(int unused)
{
    (void)unused;
    uint64_t n_bytes = 16 * (1 + 8 + 8);
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    struct world w = {.table = {page, n_bytes, 16, 8, PC_HASH_INT64, 8}, .record_bytes = 17};
    int64_t keys[] = {1, 2, 3};
    uint64_t values[] = {10, 20, 30};
    struct pc_hash_batch batch = batch_of(&w, keys, values, 3);
    CHECK(pc_hash_set(&w.table, &batch, 8) == 3);
    CHECK(mprotect(page, 4096, PROT_READ) == 0);
    CHECK(pc_hash_set(&w.table, &batch, 8) == 0);
    munmap(page, 4096);
}

/* Of a value of many blocks only those that differ are written: the others are read-only here. */
static void test_only_changed_blocks_are_written(int unused)
{
    (void)unused;
    const size_t value_bytes = 16 * 4096;
    size_t n_bytes = 2 * (9 + value_bytes), mapped = (n_bytes + 4095) & ~(size_t)4095;
    uint8_t *slots = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(slots != MAP_FAILED);
    struct world w = {.table = {slots, n_bytes, 2, value_bytes, PC_HASH_INT64, 8},
                      .record_bytes = 9 + value_bytes};
    uint8_t *value = calloc(1, value_bytes), *out = malloc(value_bytes), found;
    int64_t key = 4;
    uint64_t offset;
    CHECK(value && out);
    struct pc_hash_batch batch = batch_of(&w, &key, value, 1);
    OK(pc_hash_starts(&w.table, &batch, &offset, sizeof offset));
    CHECK(pc_hash_set(&w.table, &batch, 1) == 1);
    size_t changed = 7 * 4096;
    value[changed] = 1;
    size_t block = (offset + 9 + changed) & ~(size_t)4095;
    CHECK(mprotect(slots, mapped, PROT_READ) == 0);
    CHECK(mprotect(slots + block, 4096, PROT_READ | PROT_WRITE) == 0);
    CHECK(pc_hash_set(&w.table, &batch, 0) == 0);
    batch.values = out;
    CHECK(pc_hash_get(&w.table, &batch, &found, 1) == 1);
    CHECK(memcmp(value, out, value_bytes) == 0);
    munmap(slots, mapped);
    free(value);
    free(out);
}

int main(void)
{
    int failed = 0;
    for (int seed = 1; seed <= 24; seed++)
        failed += run_test("random", test_random, seed, 60);
    failed += run_test("places_are_fixed", test_places_are_fixed, 0, 60);
    failed += run_test("the_last_of_equal_keys_stays", test_the_last_of_equal_keys_stays, 0, 60);
    failed += run_test("corrupt_tables", test_corrupt_tables, 0, 60);
    failed += run_test("lengths_that_do_not_fit", test_lengths_that_do_not_fit, 0, 60);
    failed += run_test("equal_values_are_not_written", test_equal_values_are_not_written, 0, 60);
    failed += run_test("only_changed_blocks", test_only_changed_blocks_are_written, 0, 60);
    return failed != 0;
}
