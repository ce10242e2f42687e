/* test_fetch_budget.c - what faults fetch stays within its budget, for readers of every kind, against a
 * plain model: arrays of what is present, on its way, and was touched.
 */
#include "tests/support/check.h"

#include "engine/miss/miss.h"

#include <string.h>

#define REGION_BLOCKS 32768u /* 128 MiB */
#define SPARE 24u
#define MOST_SPARE 4096u
#define REPLY_TOUCHES 24u    /* after so many touches what is on its way is here */

struct model {
    struct pc__readahead pages;
    struct pc__streams streams;
    struct pc__blockset present, in_flight, none;
    bool is_touched[REGION_BLOCKS]; /* since it was fetched */
    uint64_t touched, fetched, faults, steps, arrives_at, last_end;
    uint64_t random;
    bool is_slow; /* what is fetched ahead takes a while */
};

static struct model *model_new(uint64_t seed, bool is_slow)
{
    struct model *m = calloc(1, sizeof *m);
    REQUIRE(m && !pc__readahead_init(&m->pages, REGION_BLOCKS));
    REQUIRE(!pc__blockset_init(&m->present, REGION_BLOCKS));
    REQUIRE(!pc__blockset_init(&m->in_flight, REGION_BLOCKS));
    REQUIRE(!pc__blockset_init(&m->none, REGION_BLOCKS));
    m->random = seed * 0x9e3779b97f4a7c15ull + 1;
    m->is_slow = is_slow;
    return m;
}

static void model_free(struct model *m)
{
    pc__readahead_free(&m->pages);
    pc__blockset_free(&m->present);
    pc__blockset_free(&m->in_flight);
    pc__blockset_free(&m->none);
    free(m);
}

static uint64_t draw(struct model *m, uint64_t n)
{
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return (m->random >> 11) % n;
}

static void arrive(struct model *m)
{
    for (uint64_t at = 0; (at = pc__blockset_next(&m->in_flight, at, REGION_BLOCKS)) < REGION_BLOCKS;) {
        const uint64_t end = pc__blockset_next_absent(&m->in_flight, at, REGION_BLOCKS);
        REQUIRE(pc__blockset_add(&m->present, at, end - at) >= 0);
        at = end;
    }
    (void)pc__blockset_remove(&m->in_flight, 0, REGION_BLOCKS);
}

static void fetch(struct model *m, struct pc__blockset *into, uint64_t block)
{
    if (pc__blockset_has(&m->present, block) || pc__blockset_has(&m->in_flight, block))
        return;
    REQUIRE(pc__blockset_add(into, block, 1) == 1);
    m->is_touched[block] = false;
    m->fetched++;
}

static bool is_left_out(const struct pc__choice *choice, uint64_t block)
{
    for (unsigned i = 0; i < choice->n_left_out; i++)
        if (choice->left_out[i] == block)
            return true;
    return false;
}

static void fault(struct model *m, uint64_t block, bool in_flight)
{
    const struct pc__choice_sets sets = {&m->present, &m->in_flight, &m->none};
    const struct pc__choice choice =
        pc__choose(&m->pages, &m->streams, &sets, block, in_flight, 2048);
    const struct pc_run *run = &choice.run;
    m->faults++;
    if (run->n_blocks)
        m->last_end = run->first_block + run->n_blocks;
    if (!in_flight)
        fetch(m, &m->present, block);
    for (uint64_t at = run->first_block; at < run->first_block + run->n_blocks; at++)
        if (!is_left_out(&choice, at))
            fetch(m, m->is_slow ? &m->in_flight : &m->present, at);
    if (in_flight)
        arrive(m); /* the thread waits for it */
}

static void touch(struct model *m, uint64_t block)
{
    if (m->steps++ >= m->arrives_at) {
        arrive(m);
        m->arrives_at = m->steps + REPLY_TOUCHES;
    }
    if (!pc__blockset_has(&m->present, block))
        fault(m, block, pc__blockset_has(&m->in_flight, block));
    m->touched += !m->is_touched[block];
    m->is_touched[block] = true;
}

/* All of it is evicted. */
static void forget(struct model *m)
{
    arrive(m);
    (void)pc__blockset_remove(&m->present, 0, REGION_BLOCKS);
}

/* What must hold at each moment: exactly, of what the budget counts; nearly, of what was touched. */
static void check(const struct model *m, const char *name)
{
    const struct pc__budget *budget = &m->pages.budget;
    CHECK(budget->fetched == m->fetched, "%s: %llu were fetched, and it counts %llu", name,
          (unsigned long long)m->fetched, (unsigned long long)budget->fetched);
    CHECK(budget->room >= 0, "%s: overdrawn by %lld", name, (long long)budget->room);
    CHECK(4 * budget->fetched <= 4 * SPARE + 7 * budget->touched, "%s: %llu blocks for %llu", name,
          (unsigned long long)budget->fetched, (unsigned long long)budget->touched);
    /* 7/4, and what the draw of the blocks that are left out may add. */
    CHECK(m->fetched <= SPARE + MOST_SPARE / 4 + m->touched * 9 / 4, "%s: %llu blocks for %llu touched",
          name, (unsigned long long)m->fetched, (unsigned long long)m->touched);
}

/* ----------------------------------------------------------------- readers */

typedef void reader(struct model *m, unsigned percent);

static void scan(struct model *m, unsigned percent)
{
    for (uint64_t block = 0; block < REGION_BLOCKS * percent / 100; block++) {
        touch(m, block);
        check(m, "scan");
    }
}

static void uniform(struct model *m, unsigned percent)
{
    for (uint64_t i = 0; i < REGION_BLOCKS * percent / 100; i++) {
        touch(m, draw(m, REGION_BLOCKS));
        check(m, "uniform");
    }
}

static void sorted(struct model *m, unsigned percent)
{
    for (uint64_t block = 0; block < REGION_BLOCKS; block++)
        if (draw(m, 100) < percent) {
            touch(m, block);
            check(m, "sorted");
        }
}

static void strided(struct model *m, unsigned percent)
{
    for (uint64_t block = 0; block < REGION_BLOCKS; block += 100 / percent) {
        touch(m, block);
        check(m, "strided");
    }
}

/* Runs of 32, each from its begin. */
static void clusters(struct model *m, unsigned percent)
{
    for (uint64_t i = 0; i < REGION_BLOCKS / 32 * percent / 100; i++) {
        const uint64_t first = draw(m, REGION_BLOCKS / 32) * 32;
        for (uint64_t block = first; block < first + 32; block++) {
            touch(m, block);
            check(m, "clusters");
        }
    }
}

/* Goes on at the very end of each window, and reads nothing of it. */
static void skips_what_comes(struct model *m, unsigned percent)
{
    uint64_t block = 0;
    for (uint64_t i = 0; i < REGION_BLOCKS * percent / 100 && block < REGION_BLOCKS; i++) {
        touch(m, block);
        check(m, "skips");
        block = m->last_end > block ? m->last_end : block + 1;
    }
}

/* A scan as long as it takes to be trusted, then single blocks, again and again. */
static void betrays(struct model *m, unsigned percent)
{
    for (unsigned round = 0; round < 6; round++) {
        const uint64_t first = draw(m, REGION_BLOCKS - 4096);
        forget(m);
        for (uint64_t block = first; block < first + 4096; block++) {
            touch(m, block);
            check(m, "betrays");
        }
        sorted(m, percent);
        uniform(m, percent);
    }
}

static void test_bound(const char *name, reader *read, unsigned percent)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct model *m = model_new(seed, seed % 2);
        read(m, percent);
        if (getenv("VERBOSE_BUDGET"))
            printf("%s %u%%: %llu touched, %llu estimated, %llu fetched, %llu faults\n", name, percent,
                   (unsigned long long)m->touched, (unsigned long long)m->pages.budget.touched,
                   (unsigned long long)m->fetched, (unsigned long long)m->faults);
        model_free(m);
    }
}

/* ---------------------------------------------------------------- estimate */

/* Of a run of which a share is touched: what is counted is that share, on the average, and every block
 * has the same chance to be left out. */
static void test_what_is_left_out(uint64_t n_blocks, unsigned percent, unsigned one_in)
{
    enum { MOST = 2048, ROUNDS = 40000, TOUCHED = 10 };
    static struct pc__budget budget;
    static uint64_t times[MOST];
    struct pc__blockset none;
    uint64_t counted = 0, n_left = 0, most = 0, least = UINT64_MAX;
    REQUIRE(!pc__blockset_init(&none, REGION_BLOCKS));
    pc__budget_init(&budget);
    memset(times, 0, sizeof times);
    struct pc__blockset all;
    REQUIRE(!pc__blockset_init(&all, REGION_BLOCKS));
    REQUIRE(pc__blockset_add(&all, 0, REGION_BLOCKS) >= 0);
    const struct pc__choice_sets sets = {&none, &none, &none}, later = {&all, &none, &none};
    for (unsigned round = 0; round < ROUNDS; round++) {
        struct pc__choice choice = {.run = {.first_block = 640, .n_blocks = n_blocks}};
        const uint64_t before = budget.touched;
        pc__budget_ask(&budget, &sets, 640 + TOUCHED, one_in, &choice);
        for (unsigned i = 0; i < choice.n_left_out; i++) {
            const uint64_t at = choice.left_out[i] - 640;
            REQUIRE(at < n_blocks && at != TOUCHED);
            times[at]++;
            n_left++;
            if (at * 100 >= n_blocks * percent)
                continue;
            pc__budget_touched(&budget, 1);
            const bool is_known = pc__budget_take_mark(&budget, &later, at + 640);
            /* Of several, two may share a slot. */
            CHECK(is_known || choice.n_left_out > 1, "it is not known to be left out");
        }
        CHECK(!pc__budget_take_mark(&budget, &later, 640 + TOUCHED), "a block that was not left out");
        counted += budget.touched - before;
    }
    const double share = (double)(n_blocks * percent) / 100 - (n_blocks * percent > 100 * TOUCHED);
    const double mean = (double)counted / ROUNDS;
    CHECK(mean > share * 0.95 && mean < share * 1.05, "%llu blocks, %u%%, one in %u: %f of %f",
          (unsigned long long)n_blocks, percent, one_in, mean, share);
    for (uint64_t at = 0; at < n_blocks; at++) {
        most = at != TOUCHED && times[at] > most ? times[at] : most;
        least = at != TOUCHED && times[at] < least ? times[at] : least;
    }
    if (n_left > n_blocks * 100)
        CHECK(most < 2 * least, "some are left out %llu times, others %llu",
              (unsigned long long)most, (unsigned long long)least);
    pc__blockset_free(&none);
    pc__blockset_free(&all);
    pc__budget_free(&budget);
}

/* What came with it was evicted: the block is fetched anew, and says nothing of the rest. */
static void test_what_was_evicted(void)
{
    static struct pc__budget budget;
    struct pc__blockset none;
    struct pc__choice choice = {.run = {.first_block = 0, .n_blocks = 64}};
    REQUIRE(!pc__blockset_init(&none, 64));
    const struct pc__choice_sets sets = {&none, &none, &none};
    pc__budget_init(&budget);
    pc__budget_ask(&budget, &sets, 9, 1, &choice);
    REQUIRE(choice.n_left_out == 1);
    CHECK(!pc__budget_take_mark(&budget, &sets, choice.left_out[0]), "it counts");
    CHECK(budget.touched == 0, "%llu are touched", (unsigned long long)budget.touched);
    pc__blockset_free(&none);
    pc__budget_free(&budget);
}

/* What is here, or on its way, is neither counted nor left out. */
static void test_what_is_here(void)
{
    static struct pc__budget budget;
    struct pc__blockset present, in_flight;
    REQUIRE(!pc__blockset_init(&present, 64) && !pc__blockset_init(&in_flight, 64));
    REQUIRE(pc__blockset_add(&present, 0, 8) == 8 && pc__blockset_add(&in_flight, 8, 4) == 4);
    const struct pc__choice_sets sets = {&present, &in_flight, &present};
    pc__budget_init(&budget);
    for (unsigned i = 0; i < 200; i++) {
        struct pc__choice choice = {.run = {.first_block = 0, .n_blocks = 16}};
        const uint64_t before = budget.fetched;
        pc__budget_ask(&budget, &sets, 12, 1, &choice);
        CHECK(choice.n_left_out == 1 && choice.left_out[0] > 12 && choice.left_out[0] < 16,
              "block %llu", (unsigned long long)choice.left_out[0]);
        CHECK(budget.fetched - before == 2, "%llu", (unsigned long long)(budget.fetched - before));
    }
    pc__blockset_free(&present);
    pc__blockset_free(&in_flight);
    pc__budget_free(&budget);
}

/* Room that was not used adds up to two windows, no more. */
static void test_room_is_bounded(void)
{
    static struct pc__budget budget;
    pc__budget_init(&budget);
    CHECK(pc__budget_room(&budget) == SPARE, "%llu", (unsigned long long)pc__budget_room(&budget));
    pc__budget_touched(&budget, 1u << 20);
    CHECK(pc__budget_room(&budget) == MOST_SPARE, "%llu",
          (unsigned long long)pc__budget_room(&budget));
    pc__budget_fetched(&budget, MOST_SPARE + 10);
    CHECK(pc__budget_room(&budget) == 0, "%llu", (unsigned long long)pc__budget_room(&budget));
    pc__budget_free(&budget);
}

/* 16 MiB in vain, and half as much again as was touched. */
static void test_what_is_told(void)
{
    static struct pc__budget budget;
    pc__budget_init(&budget);
    pc__budget_fetched(&budget, 4095);
    CHECK(!pc__budget_wastes(&budget), "little");
    pc__budget_fetched(&budget, 1);
    CHECK(pc__budget_wastes(&budget), "4,096 blocks in vain");
    pc__budget_touched(&budget, 8192);
    pc__budget_fetched(&budget, 8191);
    CHECK(!pc__budget_wastes(&budget), "a third of it in vain, but for one block");
    pc__budget_fetched(&budget, 1);
    CHECK(pc__budget_wastes(&budget), "a third of it in vain");
    pc__budget_free(&budget);
}

/* A small variable comes with its first fault. */
static void test_small_variable(void)
{
    struct model *m = model_new(1, false);
    for (uint64_t block = 0; block < 16; block++)
        touch(m, block);
    CHECK(m->faults == 1, "%llu faults", (unsigned long long)m->faults);
    model_free(m);
}

/* How many requests for a layer are on the wire at most, in the end and of the last 100, where each answer
 * takes the link so long; idle: all requests are not more than these. */
static uint32_t most_of_link(uint64_t answer_ns, uint32_t idle)
{
    uint32_t most = PC__LAYER_REQUESTS, highest = 0;
    for (int i = 0; i < 1000; i++) {
        const uint32_t n_sent = most < idle ? most : idle;
        most = pc__layer_requests(most, n_sent, n_sent * answer_ns);
        highest = i >= 900 && most > highest ? most : highest;
    }
    return highest;
}

/* Others wait behind it for little more than PC__LAYER_TRIP_NS, and the link is never idle. */
static void test_layers_on_the_wire(void)
{
    const uint64_t gbit_ns = 2097152; /* of PC__REQUEST_BLOCKS */
    CHECK(most_of_link(gbit_ns, UINT32_MAX) == PC__LAYER_TRIP_NS / gbit_ns + 1, "1 Gbit/s: %u",
          most_of_link(gbit_ns, UINT32_MAX));
    CHECK(most_of_link(gbit_ns * 10, UINT32_MAX) == PC__LAYER_REQUESTS_LEAST, "100 Mbit/s");
    CHECK(most_of_link(gbit_ns / 10, UINT32_MAX) == PC__BULK_REQUESTS, "10 Gbit/s");
    CHECK(most_of_link(gbit_ns / 10, 3) == PC__LAYER_REQUESTS, "it grows though it is not used");
}

int main(void)
{
    test_layers_on_the_wire();
    test_bound("scan", scan, 100);
    for (unsigned percent = 1; percent <= 50; percent = percent * 2 + 1) {
        test_bound("uniform", uniform, percent);
        test_bound("sorted", sorted, percent);
        test_bound("strided", strided, percent);
        test_bound("clusters", clusters, percent);
        test_bound("betrays", betrays, percent);
    }
    test_bound("skips", skips_what_comes, 5);
    for (unsigned one_in = 1; one_in <= 8; one_in *= 8) {
        test_what_is_left_out(64, 100, one_in);
        test_what_is_left_out(64, 50, one_in);
        test_what_is_left_out(64, 15, one_in);
        test_what_is_left_out(2048, 30, one_in);
    }
    test_what_was_evicted();
    test_what_is_here();
    test_room_is_bounded();
    test_what_is_told();
    test_small_variable();
    return test_result();
}
