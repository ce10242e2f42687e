/* test_wire_layer.c - the head of a layer's file, and every way to break it. */
#include "common/wire.h"
#include "tests/support/check.h"
#include "tests/support/guarded.h"

#include <stdbool.h>

#define REGION 0x0102030405060708ull
#define COMMIT 0x1122334455667788ull

#define LAYER_RUNS 3u
#define LAYER_BLOCKS 9u
#define LAYER_REGION_BLOCKS 0x2000u

struct layer {
    struct pc__layer_head head;
    struct pc_run runs[LAYER_RUNS];
};

static struct layer sound_layer(void)
{
    return (struct layer){.head = {.magic = PC__LAYER_MAGIC, .region = REGION, .commit_id = COMMIT,
                                   .base_version = 0, .n_blocks = LAYER_BLOCKS,
                                   .data_offset = PC_BLOCK_BYTES, .n_runs = LAYER_RUNS},
                          .runs = {{0, 2}, {2, 3}, {0x1000, 4}}};
}

/* The same at both ends of the arena; aligned there, for sizes that are. */
static int parse_layer(const struct layer *layer, size_t n_bytes, uint64_t layer_bytes,
                       uint64_t region_blocks)
{
    int rc[N_PLACES];
    for (enum place place = AT_BEGIN; place < N_PLACES; place++) {
        const unsigned char *bytes = guarded(place, layer, n_bytes);
        struct pc__layer_head head = {.magic = 1};
        const struct pc_run *runs = NULL;
        rc[place] = pc__layer_parse(bytes, n_bytes, layer_bytes, region_blocks, &head, &runs);
        if (rc[place] == PC_OK)
            CHECK(memcmp(&head, &layer->head, sizeof head) == 0 &&
                  (const void *)runs == bytes + sizeof head, "what is handed out");
        else
            CHECK(head.magic == 1 && !runs, "a failure hands something out");
    }
    CHECK(rc[AT_BEGIN] == rc[AT_END], "%d, %d", rc[AT_BEGIN], rc[AT_END]);
    return rc[AT_END];
}

static const uint64_t sound_layer_bytes = PC_BLOCK_BYTES * (1 + LAYER_BLOCKS);

static void test_layer(void)
{
    struct layer layer = sound_layer();
    static_assert(sizeof layer == 56 + 3 * 16, "as it lies in the file");
    CHECK(parse_layer(&layer, sizeof layer, sound_layer_bytes, 0) == PC_OK, "sound");
    CHECK(parse_layer(&layer, sizeof layer, sound_layer_bytes, 0x1004) == PC_OK, "just inside");
    CHECK(parse_layer(&layer, sizeof layer, sound_layer_bytes, 0x1003) == PC_ERR_PROTOCOL,
          "one block outside");
    layer.head.base_version = UINT64_MAX;
    CHECK(parse_layer(&layer, sizeof layer, sound_layer_bytes, 0) == PC_OK, "any base version");
    for (size_t n = 0; n < sizeof layer; n += 8)
        CHECK(parse_layer(&layer, n, sound_layer_bytes, 0) == PC_ERR_PROTOCOL, "cut to %zu", n);
    struct pc__layer_head head;
    const struct pc_run *runs;
    unsigned char *odd = arena.begin + 4;
    memcpy(odd, &layer, sizeof layer);
    CHECK(pc__layer_parse(odd, sizeof layer, sound_layer_bytes, 0, &head, &runs) ==
              PC_ERR_PROTOCOL, "bytes that are not aligned");
    for (int64_t off = -2 * 4096; off <= 2 * 4096; off += 512)
        CHECK(off == 0 || parse_layer(&layer, sizeof layer, sound_layer_bytes + (uint64_t)off,
                                      0) == PC_ERR_PROTOCOL, "a file longer by %d", (int)off);
    const uint64_t wraps[] = {0, 1, 4095, UINT64_MAX, UINT64_MAX - 4095};
    for (size_t i = 0; i < sizeof wraps / sizeof wraps[0]; i++)
        CHECK(parse_layer(&layer, sizeof layer, wraps[i], 0) == PC_ERR_PROTOCOL, "file of %llx",
              (unsigned long long)wraps[i]);
}

#define AT(field) offsetof(struct layer, field)
static const struct {
    const char *what;
    size_t offset, n_bytes;
    uint64_t value;
    int expected;
} layer_breakages[] = {
    {"magic", AT(head.magic), 8, PC__LAYER_MAGIC + 1, PC_ERR_PROTOCOL},
    {"region 0", AT(head.region), 8, 0, PC_ERR_PROTOCOL},
    {"commit 0", AT(head.commit_id), 8, 0, PC_ERR_PROTOCOL},
    {"no blocks", AT(head.n_blocks), 8, 0, PC_ERR_PROTOCOL},
    {"one block fewer", AT(head.n_blocks), 8, LAYER_BLOCKS - 1, PC_ERR_PROTOCOL},
    {"blocks whose bytes wrap", AT(head.n_blocks), 8, LAYER_BLOCKS + (1ull << 52), PC_ERR_PROTOCOL},
    {"data at 0", AT(head.data_offset), 8, 0, PC_ERR_PROTOCOL},
    {"data one block on", AT(head.data_offset), 8, 2 * PC_BLOCK_BYTES, PC_ERR_PROTOCOL},
    {"data beyond all", AT(head.data_offset), 8, UINT64_MAX - 4095, PC_ERR_PROTOCOL},
    {"no runs", AT(head.n_runs), 4, 0, PC_ERR_PROTOCOL},
    {"one run fewer", AT(head.n_runs), 4, LAYER_RUNS - 1, PC_ERR_PROTOCOL},
    {"one run more", AT(head.n_runs), 4, LAYER_RUNS + 1, PC_ERR_PROTOCOL},
    {"4 G runs", AT(head.n_runs), 4, UINT32_MAX, PC_ERR_PROTOCOL},
    {"a delta", AT(head.flags), 4, PC__LAYER_DELTA, PC_OK},
    {"made whole", AT(head.flags), 4, PC__LAYER_MADE_WHOLE, PC_OK},
    {"both", AT(head.flags), 4, PC__LAYER_DELTA | PC__LAYER_MADE_WHOLE, PC_ERR_PROTOCOL},
    {"a flag that is none", AT(head.flags), 4, 4, PC_ERR_PROTOCOL},
    {"all flags", AT(head.flags), 4, UINT32_MAX, PC_ERR_PROTOCOL},
    {"an empty run", AT(runs[1].n_blocks), 8, 0, PC_ERR_PROTOCOL},
    {"runs that overlap", AT(runs[1].first_block), 8, 1, PC_ERR_PROTOCOL},
    {"runs apart", AT(runs[1].first_block), 8, 3, PC_OK},
    {"runs out of order", AT(runs[0].first_block), 8, 0x1800, PC_ERR_PROTOCOL},
    {"a run up to the next", AT(runs[1].first_block), 8, 0x1000 - 3, PC_OK},
    {"a run into the next", AT(runs[1].first_block), 8, 0x1000 - 2, PC_ERR_PROTOCOL},
    {"a run up to the end", AT(runs[2].first_block), 8, LAYER_REGION_BLOCKS - 4, PC_OK},
    {"a run across the end", AT(runs[2].first_block), 8, LAYER_REGION_BLOCKS - 3, PC_ERR_PROTOCOL},
    {"a run that wraps", AT(runs[2].first_block), 8, UINT64_MAX - 1, PC_ERR_PROTOCOL},
    {"a run whose end wraps to 0", AT(runs[2].first_block), 8, UINT64_MAX - 3, PC_ERR_PROTOCOL},
    {"a longer run than blocks", AT(runs[2].n_blocks), 8, 5, PC_ERR_PROTOCOL},
    {"a run of everything", AT(runs[2].n_blocks), 8, UINT64_MAX, PC_ERR_PROTOCOL},
};
#undef AT

static void test_layer_breakages(void)
{
    for (size_t i = 0; i < sizeof layer_breakages / sizeof layer_breakages[0]; i++) {
        struct layer layer = sound_layer();
        memcpy((char *)&layer + layer_breakages[i].offset, &layer_breakages[i].value,
               layer_breakages[i].n_bytes);
        int rc = parse_layer(&layer, sizeof layer, sound_layer_bytes, LAYER_REGION_BLOCKS);
        CHECK(rc == layer_breakages[i].expected, "%s: %d", layer_breakages[i].what, rc);
    }
    /* Sums that wrap, in a region of unknown size: the runs themselves are refused. */
    struct layer layer = sound_layer();
    layer.runs[1].n_blocks = UINT64_MAX - 10;
    CHECK(parse_layer(&layer, sizeof layer, sound_layer_bytes, 0) == PC_ERR_PROTOCOL, "a sum");
    /* A run count whose size in 32 bits would be small. */
    layer = sound_layer();
    layer.head.n_runs = 0x10000003u;
    layer.head.data_offset = pc__layer_data_offset(layer.head.n_runs);
    CHECK(parse_layer(&layer, sizeof layer, layer.head.data_offset + LAYER_BLOCKS * 4096ull, 0) ==
              PC_ERR_PROTOCOL, "runs that are not there");
}

/* Of a delta of lost blocks nothing is left. */
static void test_empty_layer(void)
{
    struct layer layer = sound_layer();
    layer.head.n_runs = 0;
    layer.head.n_blocks = 0;
    layer.head.flags = PC__LAYER_MADE_WHOLE;
    CHECK(parse_layer(&layer, sizeof layer.head, PC_BLOCK_BYTES, 0) == PC_OK, "made whole");
    CHECK(parse_layer(&layer, sizeof layer.head, 2 * PC_BLOCK_BYTES, 0) == PC_ERR_PROTOCOL,
          "with a block");
    layer.head.n_blocks = 1;
    CHECK(parse_layer(&layer, sizeof layer.head, 2 * PC_BLOCK_BYTES, 0) == PC_ERR_PROTOCOL,
          "with a block in no run");
    layer.head.n_blocks = 0;
    layer.head.flags = PC__LAYER_DELTA;
    CHECK(parse_layer(&layer, sizeof layer.head, PC_BLOCK_BYTES, 0) == PC_ERR_PROTOCOL, "a delta");
    layer.head.flags = 0;
    CHECK(parse_layer(&layer, sizeof layer.head, PC_BLOCK_BYTES, 0) == PC_ERR_PROTOCOL, "content");
}

int main(void)
{
    make_arena();
    test_layer();
    test_empty_layer();
    test_layer_breakages();
    return test_result();
}
