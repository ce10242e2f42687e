/* test_stage_parity.c - parity through whole servers: a writer's delta of several pieces, on a node that
 * is none of their homes, and a piece that comes back from the others of its group. */
#include "tests/support/deltas.h"
#include "tests/support/engine_main.h"
#include "tests/support/pair.h"

#define N(array) (sizeof(array) / sizeof(array)[0])
#define ONE_BLOCKS 2048u
#define TWO_BLOCKS 1000u
enum { ONE = 1, TWO, PARITY };

/* Two pieces, the second one shorter, and their parity: all homed at server 0. */
struct group {
    struct pair p;
    struct pc_region_info two, parity;
};

/* As pattern(), of the parity. */
static uint64_t parity_word(uint64_t offset)
{
    return pattern(ONE, offset) ^ (offset < (uint64_t)TWO_BLOCKS << 12 ? pattern(TWO, offset) : 0);
}

static struct group group_start(const char *tag, int trap)
{
    struct group g = {.p = pair_with_holes(tag, trap, (uint64_t)ONE_BLOCKS << 12, 0)};
    g.two = build(g.p.c, g.p.s0, g.p.home, TWO, (uint64_t)TWO_BLOCKS << 12, 0);
    g.parity = (struct pc_region_info){.region = PARITY,
                                       .base_address = PC_WINDOW_BEGIN + (PARITY << 28),
                                       .length_bytes = g.p.info.length_bytes};
    const uint64_t bytes = g.parity.length_bytes;
    uint64_t *data = malloc(bytes);
    for (uint64_t at = 0; at < bytes; at += 8)
        data[at / 8] = parity_word(at);
    int fd;
    OK(pc_client_create(g.p.home, PARITY, g.parity.base_address, bytes, MEDIUM, WAIT, &fd));
    OK(pc_copy_in(fd, 0, data, bytes, 1));
    OK(pc_client_seal(g.p.home, PARITY, WAIT));
    publish(g.p.c, g.parity, g.p.s0->id);
    close(fd);
    free(data);
    return g;
}

/* What the writer puts into its private mappings. */
static uint64_t new_word(uint64_t region, uint64_t offset)
{
    return written(region, 0xabc, offset);
}

static void write_blocks(const struct pc_mapping *m, uint64_t region, const struct pc_run *runs,
                         size_t n_runs)
{
    for (size_t i = 0; i < n_runs; i++)
        for (uint64_t k = 0; k < runs[i].n_blocks; k++)
            for (size_t w = 0; w < 512; w++)
                block_at(m, runs[i].first_block + k)[w] =
                    new_word(region, ((runs[i].first_block + k) << 12) + w * 8);
}

static bool has(const struct pc_run *runs, size_t n_runs, uint64_t block)
{
    for (size_t i = 0; i < n_runs; i++)
        if (block >= runs[i].first_block && block - runs[i].first_block < runs[i].n_blocks)
            return true;
    return false;
}

static const struct pc_run of_one[] = {{0, 3}, {100, 1500}, {2047, 1}};
static const struct pc_run of_two[] = {{2, 2}, {50, 60}, {999, 1}};
static const struct pc_run of_both[] = {{0, 4}, {50, 1550}, {2047, 1}};

static void check_delta(const struct pc__layer *layer)
{
    CHECK(layer->flags == PC__LAYER_DELTA && layer->n_runs == N(of_both));
    CHECK(!memcmp(layer->runs, of_both, sizeof of_both));
    for (uint32_t i = 0; i < layer->n_runs; i++)
        for (uint64_t k = 0; k < layer->runs[i].n_blocks; k++) {
            const uint64_t block = layer->runs[i].first_block + k;
            uint64_t words[512];
            OK(pc__layer_read(layer, layer->positions[i] + k, 1, (uint8_t *)words));
            const bool one = has(of_one, N(of_one), block), two = has(of_two, N(of_two), block);
            for (size_t w = 0; w < 512; w++) {
                const uint64_t at = (block << 12) + w * 8;
                CHECK(words[w] == ((one ? pattern(ONE, at) ^ new_word(ONE, at) : 0) ^
                                   (two ? pattern(TWO, at) ^ new_word(TWO, at) : 0)));
            }
        }
}

static void stage_and_check(struct group *g, uint64_t id, const struct pc_mapping *one,
                            const struct pc_mapping *two)
{
    const struct pc_parity_member members[] = {{one->id, of_one, N(of_one), 0, 0, 0},
                                               {two->id, of_two, N(of_two), 0, 0, 0}};
    struct pc_run runs[8];
    uint64_t server_id, layer_bytes;
    const uint64_t mappings = stats_of(g->p.s1).mappings;
    CHECK(pc_client_stage_parity(g->p.far, PARITY, id, 1, members, 2, 0, WAIT, runs, 8, &server_id,
                                 &layer_bytes) == N(of_both));
    CHECK(!memcmp(runs, of_both, sizeof of_both) && server_id == g->p.s1->id);
    struct pc__layer *layer = pc__layer_get(g->p.s1->engine, pc__layer_id(PARITY, id));
    CHECK(layer && layer->bytes == layer_bytes);
    check_delta(layer);
    pc__layer_put(layer);
    SOON(stats_of(g->p.s1).mappings == mappings); /* of what the blocks were there is none any more */
}

/* The memory of the node is smaller than what was written: most of what the blocks were is evicted when
 * the delta is made, and comes again. */
static void test_delta_of_evicted_blocks(int trap)
{
    told.cache_bytes = 2 * MIB;
    struct group g = group_start("evicted", trap);
    struct pc_mapping one = map_at(g.p.far, &g.p.info, 0, PC_MAP_PRIVATE);
    struct pc_mapping two = map_at(g.p.far, &g.two, 0, PC_MAP_PRIVATE);
    write_blocks(&one, ONE, of_one, N(of_one));
    write_blocks(&two, TWO, of_two, N(of_two));
    SOON(stats_of(g.p.s1).evicted_blocks > 500);
    stage_and_check(&g, 5, &one, &two);
    OK(pc_client_resolve(g.p.far, 0, 5, PARITY, 0));
    SOON(stats_of(g.p.s1).layers == 0);
    pair_stop(&g.p);
}

/* Nor did the writer ever have what a block was that it has blanked. */
static void test_delta_of_blank_blocks(int trap)
{
    struct group g = group_start("blank", trap);
    struct pc_mapping one = map_at(g.p.far, &g.p.info, 0, PC_MAP_PRIVATE);
    struct pc_mapping two = map_at(g.p.far, &g.two, 0, PC_MAP_PRIVATE);
    OK(pc_client_blank(g.p.far, one.id, of_one, N(of_one)));
    OK(pc_client_blank(g.p.far, two.id, of_two, N(of_two)));
    write_blocks(&one, ONE, of_one, N(of_one));
    write_blocks(&two, TWO, of_two, N(of_two));
    const uint64_t fetched = stats_of(g.p.s1).blocks_fetched;
    stage_and_check(&g, 5, &one, &two);
    CHECK(stats_of(g.p.s1).blocks_fetched >= fetched + 1504 + 63);
    stage_and_check(&g, 6, &one, &two); /* again, under another id: the mappings are as they were */
    OK(pc_client_resolve(g.p.far, 0, 5, PARITY, 0));
    OK(pc_client_resolve(g.p.far, 0, 6, PARITY, 0));
    SOON(stats_of(g.p.s1).layers == 0);
    pair_stop(&g.p);
}

/* Without a home there is nothing to be told of what the blocks were: it fails, and leaves nothing. */
static void test_delta_without_a_home(int trap)
{
    told.fault_timeout_ns = SECOND;
    struct group g = group_start("nohome", trap);
    struct pc_mapping one = map_at(g.p.far, &g.p.info, 0, PC_MAP_PRIVATE);
    OK(pc_client_blank(g.p.far, one.id, of_one, 1));
    const struct pc_parity_member member = {one.id, of_one, 1, 0, 0, 0};
    const uint64_t mappings = stats_of(g.p.s1).mappings;
    pthread_mutex_lock(&g.p.c->lock);
    g.p.c->n_regions = 0; /* the registry says that nobody is its home */
    pthread_mutex_unlock(&g.p.c->lock);
    pc_client_close(g.p.home);
    g.p.s0->lost = true;
    server_stop(g.p.c, 0);
    const int64_t rc = pc_client_stage_parity(g.p.far, PARITY, 5, 1, &member, 1, 0, 10 * SECOND, NULL,
                                              0, NULL, NULL);
    if (rc != PC_ERR_HOME_LOST)
        fprintf(stderr, "%lld: %s\n", (long long)rc, pc_last_message());
    CHECK(rc == PC_ERR_HOME_LOST);
    CHECK(!pc_engine_has_layer(g.p.s1->engine, PARITY, 5));
    SOON(stats_of(g.p.s1).mappings == mappings);
    pc_client_close(g.p.far);
    cluster_stop(g.p.c);
}

/* ------------------------------------------------------------ a piece comes back */

static void pull_part(struct group *g, uint64_t region, uint64_t id, const struct pc_run *runs, size_t n)
{
    const int64_t bytes = pc_engine_stage_home(g->p.s0->engine, region, 0, id, runs, n);
    OK(bytes);
    OK(pc_engine_pull(g->p.s1->engine, region, id, g->p.s0->id, (uint64_t)bytes));
    OK(wait_pulled(g->p.c, id));
    OK(pc_engine_drop_staged(g->p.s0->engine, region, id));
}

/* The home of ONE is lost; server 1 makes it again of TWO, which is shorter, and the parity. */
static void test_piece_comes_back(int trap)
{
    struct group g = group_start("back", trap);
    struct pc_region_info info = g.p.info;
    const struct pc_run all = {0, ONE_BLOCKS}, shorter = {0, TWO_BLOCKS};
    int fd;
    OK(pc_engine_rebuild_begin(g.p.s1->engine, &info, NULL, 0, &fd));
    pull_part(&g, PARITY, 31, &all, 1);
    pull_part(&g, TWO, 32, &shorter, 1);
    const struct pc_layer_part parts[] = {{PARITY, 31}, {TWO, 32}};
    const int64_t bytes = pc_engine_stage_xor(g.p.s1->engine, ONE, 0, 33, parts, N(parts));
    CHECK(bytes == (1 + ONE_BLOCKS) << 12);
    CHECK(!pc_engine_has_layer(g.p.s1->engine, PARITY, 31));
    CHECK(!pc_engine_has_layer(g.p.s1->engine, TWO, 32));
    OK(pc_engine_rebuild_take(g.p.s1->engine, ONE, fd, 33));
    OK(pc_engine_rebuild_seal(g.p.s1->engine, ONE, fd));
    close(fd);
    SOON(stats_of(g.p.s1).layers == 0);
    pthread_mutex_lock(&g.p.c->lock);
    g.p.c->regions[0].home = g.p.s1->id;
    pthread_mutex_unlock(&g.p.c->lock);
    OK(pc_engine_define_region(g.p.s1->engine, &info, &g.p.s1->id, 1));
    CHECK(region_of(g.p.s1, ONE).is_home);
    check_at(g.p.c, g.p.far, &info, 0);
    pair_stop(&g.p);
}

/* A mirror is one part; of parts of the same blocks each block is in the sum as often as it is there. */
static void test_sums(int trap)
{
    struct group g = group_start("sums", trap);
    const struct pc_run low[] = {{0, 10}, {20, 5}}, high[] = {{5, 17}, {999, 1}};
    const struct pc_run either[] = {{0, 25}, {999, 1}};
    for (unsigned mask = 1; mask < 8; mask++) {
        struct pc_layer_part parts[3];
        size_t n = 0;
        const struct pc_run *runs[] = {low, high, low};
        for (unsigned i = 0; i < 3; i++)
            if (mask >> i & 1) {
                const uint64_t region = i == 2 ? PARITY : TWO;
                OK(pc_engine_stage_home(g.p.s0->engine, region, 0, 40 + i, runs[i], 2));
                parts[n++] = (struct pc_layer_part){region, 40 + i};
            }
        OK(pc_engine_stage_xor(g.p.s0->engine, ONE, 0, 50, parts, n));
        struct pc__layer *layer = pc__layer_get(g.p.s0->engine, pc__layer_id(ONE, 50));
        CHECK(layer && !layer->flags);
        for (uint64_t b = 0; b < TWO_BLOCKS; b++) {
            uint64_t follow, word = 0, words[512];
            const uint64_t at = pc__layer_find(layer, b, &follow);
            bool is = false;
            for (unsigned i = 0; i < 3; i++)
                if (mask >> i & 1 && has(runs[i], 2, b)) {
                    word ^= i == 2 ? parity_word((b << 12) + 8) : pattern(TWO, (b << 12) + 8);
                    is = true;
                }
            CHECK((at != UINT64_MAX) == is);
            if (is)
                OK(pc__layer_read(layer, at, 1, (uint8_t *)words));
            CHECK(!is || words[1] == word);
        }
        CHECK((mask & 3) != 3 || (layer->n_runs == 2 && !memcmp(layer->runs, either, sizeof either)));
        pc__layer_put(layer);
        OK(pc_engine_drop_staged(g.p.s0->engine, ONE, 50));
    }
    SOON(stats_of(g.p.s0).layers == 0);
    pair_stop(&g.p);
}

static const struct engine_test tests[] = {
    TEST(delta_of_evicted_blocks),
    TEST(delta_of_blank_blocks),
    TEST(delta_without_a_home),
    TEST(piece_comes_back),
    TEST(sums),
};

int main(int argc, char **argv)
{
    const int failed = run_over_traps(tests, N(tests), argc > 1 ? argv[1] : NULL);
    return failed != 0;
}
