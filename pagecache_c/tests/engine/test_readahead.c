/* test_readahead.c - how much a fault fetches: always a sound run, and near the best fixed page for
 * readers of several kinds. No engine: a reader here is a list of touches, a node a set of blocks.
 */
#include "tests/support/check.h"

#include "engine/miss/miss.h"

#include <string.h>

#define REGION_BLOCKS 65536u /* 256 MiB */
#define ROUND_TRIP PC__TRIP_BLOCKS

struct node {
    struct pc__readahead pages;
    struct pc__streams streams;
    struct pc__blockset present, touched, none; /* none is on its way, none has changed */
    uint64_t trips, blocks;
};

static struct node *node_new(void)
{
    struct node *node = calloc(1, sizeof *node);
    REQUIRE(node && !pc__readahead_init(&node->pages, REGION_BLOCKS));
    REQUIRE(!pc__blockset_init(&node->present, REGION_BLOCKS));
    REQUIRE(!pc__blockset_init(&node->touched, REGION_BLOCKS));
    REQUIRE(!pc__blockset_init(&node->none, REGION_BLOCKS));
    return node;
}

static void node_free(struct node *node)
{
    pc__readahead_free(&node->pages);
    pc__blockset_free(&node->present);
    pc__blockset_free(&node->touched);
    pc__blockset_free(&node->none);
    free(node);
}

static void check_run(const struct node *node, struct pc_run run)
{
    CHECK(run.n_blocks <= 2048, "%llu blocks", (unsigned long long)run.n_blocks);
    CHECK(run.first_block + run.n_blocks <= REGION_BLOCKS, "past the end");
    CHECK(node->pages.level < PC__PAGE_LEVELS, "level %u", node->pages.level);
}

static void check_choice(const struct node *node, const struct pc__choice *choice, uint64_t block)
{
    check_run(node, choice->run);
    for (unsigned i = 0; i < choice->n_left_out; i++) {
        const uint64_t left = choice->left_out[i];
        CHECK(left != block, "the touched block is left out");
        CHECK(left - choice->run.first_block < choice->run.n_blocks, "left out of no run");
        CHECK(!pc__blockset_has(&node->present, left), "what is here is left out");
        CHECK(!i || choice->left_out[i - 1] < left, "not in order");
    }
}

/* shift = 0: by use. */
static void touch(struct node *node, unsigned shift, uint64_t block)
{
    REQUIRE(pc__blockset_add(&node->touched, block, 1) >= 0);
    if (pc__blockset_has(&node->present, block))
        return;
    const struct pc__choice_sets sets = {&node->present, &node->none, &node->none};
    const struct pc__choice choice =
        shift ? pc__choose_fixed(REGION_BLOCKS, shift, block, false, 2048)
              : pc__choose(&node->pages, &node->streams, &sets, block, false, 2048);
    check_choice(node, &choice, block);
    node->trips++;
    node->blocks += (uint64_t)pc__blockset_add(&node->present, block, 1);
    node->blocks += (uint64_t)pc__blockset_add(&node->present, choice.run.first_block,
                                               choice.run.n_blocks);
    for (unsigned i = 0; i < choice.n_left_out; i++)
        node->blocks -= (uint64_t)pc__blockset_remove(&node->present, choice.left_out[i], 1);
}

static uint64_t cost(const struct node *node)
{
    return node->trips * ROUND_TRIP + node->blocks;
}

/* ---------------------------------------------------------------- readers */

typedef uint64_t reader(uint64_t step, uint64_t *random);
#define THE_END UINT64_MAX

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

static uint64_t scan(uint64_t step, uint64_t *random)
{
    (void)random;
    return step < REGION_BLOCKS ? step : THE_END;
}

/* 2% of the blocks. */
static uint64_t uniform(uint64_t step, uint64_t *random)
{
    return step < REGION_BLOCKS / 50 ? next_random(random) % REGION_BLOCKS : THE_END;
}

/* All blocks, in an order without an order. */
static uint64_t shuffled(uint64_t step, uint64_t *random)
{
    (void)random;
    return step < REGION_BLOCKS ? step * 40503u % REGION_BLOCKS : THE_END;
}

/* Whole groups of 256 KiB here and there, each in no order. */
static uint64_t groups(uint64_t step, uint64_t *random)
{
    static uint64_t group;
    if (step % 64 == 0)
        group = next_random(random) % (REGION_BLOCKS / 64);
    return step < REGION_BLOCKS / 4 ? group * 64 + step % 64 * 27 % 64 : THE_END;
}

/* Searches of a binary tree in depth-first order, 3 blocks a leaf: the path from the root (its first
 * node, then a child that follows, or lies half the rest away), then the leaf, and one beside it. */
static uint64_t tree(uint64_t step, uint64_t *random)
{
    static uint64_t low, size;
    if (step % 18 == 0) {
        low = 0;
        size = REGION_BLOCKS;
    }
    if (step >= 18 * 300)
        return THE_END;
    if (step % 18 == 17)
        return (low + 3) % REGION_BLOCKS;
    uint64_t here = low;
    if (size > 3) {
        size /= 2;
        low += next_random(random) % 2 ? size : 1;
        low = low + size <= REGION_BLOCKS ? low : REGION_BLOCKS - size;
    } else {
        here = low + step % 3;
    }
    return here < REGION_BLOCKS ? here : REGION_BLOCKS - 1;
}

static uint64_t run(struct node *node, unsigned shift, reader *next, uint64_t seed)
{
    uint64_t random = seed * 0x9e3779b97f4a7c15ull + 1, block;
    for (uint64_t step = 0; (block = next(step, &random)) != THE_END; step++)
        touch(node, shift, block);
    return cost(node);
}

static uint64_t best_fixed(reader *next, uint64_t seed, unsigned *best_shift)
{
    uint64_t best = UINT64_MAX;
    for (unsigned shift = 12; shift <= 23; shift++) {
        struct node *node = node_new();
        uint64_t it = run(node, shift, next, seed);
        if (it < best) {
            best = it;
            *best_shift = shift;
        }
        node_free(node);
    }
    return best;
}

/* At most `most` percent of what the best fixed page costs. */
static void test_near_best(const char *name, reader *next, unsigned most)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        unsigned shift = 0;
        struct node *node = node_new();
        uint64_t best = best_fixed(next, seed, &shift), own = run(node, 0, next, seed);
        CHECK(own * 100 <= best * most, "%s: %llu%% of a page of 2^%u; level %u", name,
              (unsigned long long)(own * 100 / best), shift, node->pages.level);
        if (getenv("VERBOSE_PAGES"))
            printf("%s: %llu%% of a page of 2^%u; level %u, %llu trips, %llu blocks\n", name,
                   (unsigned long long)(own * 100 / best), shift, node->pages.level,
                   (unsigned long long)node->trips, (unsigned long long)node->blocks);
        node_free(node);
    }
}

/* --------------------------------------------------------- what is learned */

/* Single blocks here and there, of a part of the region. */
static void scatter(struct node *node, uint64_t first, uint64_t n, uint64_t n_touches, uint64_t seed)
{
    uint64_t random = seed * 0x9e3779b97f4a7c15ull + 1;
    for (uint64_t i = 0; i < n_touches; i++)
        touch(node, 0, first + next_random(&random) % n);
}

static void test_pattern_changes(void)
{
    struct node *node = node_new();
    run(node, 0, groups, 1);
    unsigned large = node->pages.level;
    CHECK(large >= 4, "whole groups are fetched by pages of level %u", large);
    /* What follows falls on blocks that nobody had: the groups lie in a copy of the region. */
    (void)pc__blockset_remove(&node->present, 0, REGION_BLOCKS);
    scatter(node, 0, REGION_BLOCKS, 1500, 2);
    CHECK(node->pages.level <= 1, "level %u after scattered touches", node->pages.level);
    (void)pc__blockset_remove(&node->present, 0, REGION_BLOCKS);
    run(node, 0, groups, 3);
    (void)pc__blockset_remove(&node->present, 0, REGION_BLOCKS);
    run(node, 0, groups, 4);
    CHECK(node->pages.level >= 3, "level %u after whole groups again", node->pages.level);
    node_free(node);
}

static void report(struct node *node, bool exact)
{
    uint64_t at = 0;
    while ((at = pc__blockset_next(&node->touched, at, REGION_BLOCKS)) < REGION_BLOCKS) {
        uint64_t end = pc__blockset_next_absent(&node->touched, at, REGION_BLOCKS);
        struct pc_run run = {at, end - at};
        if (!exact) /* what fault-around shows */
            run = (struct pc_run){at / 16 * 16, (end + 15) / 16 * 16 - at / 16 * 16};
        pc__readahead_read(&node->pages, run, exact);
        at = end;
    }
}

/* Pages of level 7, of each of which a single block is used. */
static struct node *little_used(void)
{
    struct node *node = node_new();
    node->pages.level = 7;
    node->pages.first_faults = 5;
    for (uint64_t page = 0; page < 50; page++) {
        pc__budget_touched(&node->pages.budget, 4096); /* there is room for all of them */
        touch(node, 0, page * 512 + 200);
    }
    CHECK(node->pages.level == 7, "faults alone: level %u", node->pages.level);
    return node;
}

static void test_read_sets(void)
{
    struct node *node = little_used();
    report(node, true);
    CHECK(node->pages.level == 0, "an exact read set: level %u", node->pages.level);
    node_free(node);
    node = little_used();
    report(node, false);
    CHECK(node->pages.level == 4, "a coarse read set: level %u", node->pages.level);
    report(node, false);
    CHECK(node->pages.level == 4, "a coarse read set, again: level %u", node->pages.level);
    node_free(node);
    /* All of each page is used. */
    for (int exact = 0; exact < 2; exact++) {
        node = little_used();
        REQUIRE(pc__blockset_add(&node->touched, 0, REGION_BLOCKS) >= 0);
        report(node, exact);
        CHECK(node->pages.level == 7, "well used pages: level %u", node->pages.level);
        node_free(node);
    }
}

/* Another mapping begins where the region is. */
static void test_mappings_share(void)
{
    struct node *node = node_new();
    run(node, 0, scan, 1);
    uint64_t trips = node->trips;
    node->streams = (struct pc__streams){0};
    (void)pc__blockset_remove(&node->present, 0, REGION_BLOCKS);
    run(node, 0, scan, 1);
    CHECK(node->trips - trips < trips, "%llu round trips, then %llu", (unsigned long long)trips,
          (unsigned long long)(node->trips - trips));
    struct pc_run jump;
    touch(node, 0, 0);
    (void)pc__blockset_remove(&node->present, 0, REGION_BLOCKS);
    node->streams = (struct pc__streams){0};
    touch(node, 0, 0);
    REQUIRE(pc__readahead_sequential(&node->pages, &node->streams,
                                 pc__blockset_next_absent(&node->present, 0, REGION_BLOCKS), false,
                                 &jump));
    CHECK(jump.n_blocks >= 256, "the second fault of a scan fetches %llu blocks",
          (unsigned long long)jump.n_blocks);
    node_free(node);
}

static void test_scan_at_once(void)
{
    struct node *node = node_new();
    uint64_t block = 0;
    for (; block < REGION_BLOCKS && node->streams.of[0].window < 256; block++)
        touch(node, 0, block);
    CHECK(node->trips <= 10, "1 MiB after %llu round trips", (unsigned long long)node->trips);
    node_free(node);
}

/* Anything, in any order, blocks on their way among it. */
static void test_any(uint64_t seed)
{
    struct node *node = node_new();
    uint64_t random = seed * 0x9e3779b97f4a7c15ull + 1, block = 0;
    for (int step = 0; step < 20000; step++) {
        const uint64_t dice = next_random(&random) % 16;
        block = dice < 8 ? block + 1 : dice < 12 ? block + dice : next_random(&random);
        block %= REGION_BLOCKS;
        struct pc_run run = {0};
        bool in_flight = next_random(&random) % 4 == 0;
        bool taken = pc__readahead_sequential(&node->pages, &node->streams, block, in_flight, &run);
        CHECK(taken || !in_flight, "what is on its way would be asked for again");
        if (!taken) {
            run = pc__readahead_scattered(&node->pages, &node->streams, block);
            CHECK((run.n_blocks & (run.n_blocks - 1)) == 0, "no power of two");
            CHECK(run.first_block % run.n_blocks == 0, "not aligned");
        }
        check_run(node, run);
        CHECK(in_flight || block - run.first_block < run.n_blocks, "without its block");
        if (dice == 15)
            pc__readahead_read(&node->pages, (struct pc_run){block, 1 + (REGION_BLOCKS - block) / 9},
                           step % 2);
        CHECK(node->pages.window_blocks >= 1 && node->pages.window_blocks <= 2048, "window");
    }
    node_free(node);
}

/* ------------------------------------------------- what a round trip costs */

/* n fetches of 1 to `most` blocks, each with up to 50% of noise, every 50th very late. */
static void measure(struct pc__trips *trips, unsigned n, unsigned most, double trip_ns, double block_ns)
{
    uint64_t random = 7;
    for (unsigned i = 0; i < n; i++) {
        const uint64_t blocks = 1 + next_random(&random) % most;
        double ns = trip_ns + block_ns * (double)blocks;
        ns *= 1.0 + (double)(next_random(&random) % 1000) / 2000.0;
        pc__trips_add(trips, blocks, (uint64_t)(i % 50 == 49 ? 100 * ns : ns));
    }
}

static void test_trips_are_measured(void)
{
    struct pc__trips trips = {0};
    CHECK(trips.known_blocks == 0, "nothing measured: %u", trips.known_blocks);
    measure(&trips, 15, 64, 1e6, 35e3);
    CHECK(trips.known_blocks == 0, "too few: %u", trips.known_blocks);
    measure(&trips, 200, 64, 1e6, 35e3);
    CHECK(trips.known_blocks >= 14 && trips.known_blocks <= 57, "1 ms, 35 us: %u blocks",
          trips.known_blocks);
    measure(&trips, 400, 64, 3e4, 2.7e3); /* it was moved next door */
    CHECK(trips.known_blocks >= 5 && trips.known_blocks <= 22, "30 us, 2.7 us: %u blocks",
          trips.known_blocks);
    measure(&trips, 400, 64, 5e7, 5e3);
    CHECK(trips.known_blocks == 256, "50 ms, 5 us: %u blocks", trips.known_blocks);
    trips = (struct pc__trips){0};
    measure(&trips, 400, 1, 1e6, 35e3); /* single blocks say nothing of what one more costs */
    CHECK(trips.known_blocks == 0, "all alike: %u", trips.known_blocks);
    trips = (struct pc__trips){0};
    pc__trips_add(&trips, 1, 10000000000ull); /* it waited for a restart */
    measure(&trips, 200, 64, 1e6, 35e3);
    CHECK(trips.known_blocks >= 14 && trips.known_blocks <= 57, "after a late one: %u blocks",
          trips.known_blocks);
    const unsigned known_blocks = trips.known_blocks;
    measure(&trips, 1000, 1, 1e6, 35e3);
    CHECK(trips.known_blocks >= 14 && trips.known_blocks <= 57, "%u blocks, then %u", known_blocks,
          trips.known_blocks);
}

/* Every 8th block of groups of 64. */
static uint64_t thin_groups(uint64_t step, uint64_t *random)
{
    static uint64_t group;
    if (step % 8 == 0)
        group = next_random(random) % (REGION_BLOCKS / 64);
    return step < REGION_BLOCKS / 16 ? group * 64 + step % 8 * 3 % 8 * 8 : THE_END;
}

/* What is seldom worth its waste on a near node is worth it on a far one. */
static void test_far_homes(void)
{
    struct node *near = node_new(), *far = node_new();
    pc__readahead_set_trip(&far->pages, 100);
    run(near, 0, thin_groups, 1);
    run(far, 0, thin_groups, 1);
    CHECK(near->pages.level < 2, "near: level %u", near->pages.level);
    CHECK(far->pages.level > 4, "far: level %u", far->pages.level);
    CHECK(far->trips < near->trips, "%llu trips near, %llu far", (unsigned long long)near->trips,
          (unsigned long long)far->trips);
    pc__readahead_set_trip(&far->pages, 90);
    CHECK(far->pages.trip_blocks == 100, "noise: %u", far->pages.trip_blocks);
    pc__readahead_set_trip(&far->pages, 60);
    CHECK(far->pages.trip_blocks == 60, "a change: %u", far->pages.trip_blocks);
    node_free(near);
    node_free(far);
}

static void test_small_regions(void)
{
    for (uint64_t n = 1; n < 40; n += 3) {
        struct pc__readahead pages;
        struct pc__streams streams = {0};
        struct pc_run run;
        REQUIRE(!pc__readahead_init(&pages, n));
        for (uint64_t block = 0; block < n; block++) {
            if (!pc__readahead_sequential(&pages, &streams, block, false, &run))
                run = pc__readahead_scattered(&pages, &streams, block);
            CHECK(run.first_block <= block && block < run.first_block + run.n_blocks &&
                  run.first_block + run.n_blocks <= n, "block %llu of %llu",
                  (unsigned long long)block, (unsigned long long)n);
            run = pc__readahead_fixed(n, 23, block, false);
            CHECK(run.first_block == 0 && run.n_blocks == n, "a page larger than the region");
        }
        pc__readahead_free(&pages);
    }
    CHECK(pc__readahead_fixed(REGION_BLOCKS, 12, 7, true).n_blocks == 0, "in flight");
}

/* What the scan of one piece has asked for in the next one. */
static void carry(struct node *from, struct node *to)
{
    struct pc__carried carried;
    if (!pc__readahead_carry(&from->pages, &from->streams, &carried))
        return;
    const struct pc__choice_sets sets = {&to->present, &to->none, &to->none};
    const struct pc__choice choice =
        pc__choose_carried(&to->pages, &to->streams, &sets, &carried, 2048);
    check_choice(to, &choice, UINT64_MAX);
    CHECK(choice.run.first_block == 0 && choice.run.n_blocks, "not from the beginning on");
    to->blocks += (uint64_t)pc__blockset_add(&to->present, 0, choice.run.n_blocks);
    for (unsigned i = 0; i < choice.n_left_out; i++)
        to->blocks -= (uint64_t)pc__blockset_remove(&to->present, choice.left_out[i], 1);
}

/* Trips in the second of two pieces that are read in order, the first one from `from` on. */
static uint64_t scan_pieces(bool carries, uint64_t from)
{
    struct node *pieces[] = {node_new(), node_new()};
    for (uint64_t step = from; step < 2 * REGION_BLOCKS; step++) {
        touch(pieces[step / REGION_BLOCKS], 0, step % REGION_BLOCKS);
        if (carries && step < REGION_BLOCKS)
            carry(pieces[0], pieces[1]);
        const struct pc__budget *first = &pieces[0]->pages.budget, *second = &pieces[1]->pages.budget;
        const uint64_t fetched = first->fetched + second->fetched;
        const uint64_t touched = first->touched + second->touched;
        CHECK(fetched <= 48 + touched * 7 / 4, "%llu blocks for %llu, by estimate",
              (unsigned long long)fetched, (unsigned long long)touched);
        if (step == REGION_BLOCKS - 1)
            CHECK(!carries == !pieces[1]->blocks && pieces[1]->blocks <= 512,
                  "%llu blocks of a piece that nobody may read",
                  (unsigned long long)pieces[1]->blocks);
    }
    const uint64_t trips = pieces[1]->trips;
    CHECK(pieces[1]->blocks == REGION_BLOCKS, "not all of it, or some twice");
    node_free(pieces[0]);
    node_free(pieces[1]);
    return trips;
}

static void test_pieces(void)
{
    for (uint64_t from = 0; from < REGION_BLOCKS; from += REGION_BLOCKS - 3000) {
        const uint64_t with = scan_pieces(true, from), without = scan_pieces(false, from);
        CHECK(with + 5 <= without, "%llu trips, and %llu without", (unsigned long long)with,
              (unsigned long long)without);
    }
}

int main(void)
{
    test_near_best("scan", scan, 120);
    test_near_best("uniform", uniform, 120);
    test_near_best("tree", tree, 135);
    test_near_best("groups", groups, 120);
    /* Nobody can know early that all will be read. With the bound of fetch_budget.c at each moment,
     * no policy needs less than 530. */
    test_near_best("shuffled", shuffled, 800);
    test_pattern_changes();
    test_read_sets();
    test_mappings_share();
    test_scan_at_once();
    for (uint64_t seed = 1; seed <= 10; seed++)
        test_any(seed);
    test_small_regions();
    test_pieces();
    test_trips_are_measured();
    test_far_homes();
    return test_result();
}
