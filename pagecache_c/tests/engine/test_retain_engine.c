/* test_retain_engine.c - pc_engine_retain on whole engines: what is read at the home and far from it,
 * and a server that comes back.
 */
#include "tests/support/commit.h"
#include "tests/support/keepers.h"

static const struct pc_run few[] = {{3, 1}, {10, 1}};
static const struct pc_run heavy[] = {{0, 10}};

struct world {
    struct cluster *c;
    struct server *s0;
    pc_client *home, *far;
    struct pc_region_info a, b; /* few blocks of a change; b is busy */
    uint64_t a_version, b_version;
};

static void commit_a(struct world *w, int n)
{
    for (int i = 0; i < n; i++, w->a_version++)
        CHECK(commit(w->c, w->s0, w->home, &w->a, w->a_version, few, 2) == w->a_version + 1);
}

static void commit_b(struct world *w, int n)
{
    for (int i = 0; i < n; i++, w->b_version++)
        CHECK(commit(w->c, w->s0, w->home, &w->b, w->b_version, heavy, 1) == w->b_version + 1);
}

/* Until all that was committed is in the base, and the old blocks in the history. */
static void settle(struct world *w)
{
    SOON(stats_of(w->s0).layers == 0 && region_of(w->s0, 1).generations == 1 &&
         region_of(w->s0, 2).generations == 1);
}

/* Version 2 of a is readable everywhere, version 0 of b nowhere. */
static void check_kept(struct world *w)
{
    struct pc_mapping m;
    settle(w);
    for (uint64_t v = 2; v <= w->a_version; v++) {
        check_at(w->c, w->home, &w->a, v);
        check_at(w->c, w->far, &w->a, v);
    }
    CHECK(try_map(w->home, &w->b, 0, 0, &m) == PC_ERR_EXPIRED);
    const struct pc_engine_stats stats = stats_of(w->s0);
    CHECK(stats.history_bytes <= 64 << 10 && stats.history_expired > 0);
    CHECK(stats.history_retained_bytes == 2 * 4096 * (w->a_version - 2));
    CHECK(stats.history_retained_expired == 0);
}

static void test_retain(int trap)
{
    struct keeper keeper = keeper_start("retain");
    int to_keeper = keeper_connect(&keeper);
    told.history_bytes = 1; /* the least there is: 64 KiB */
    struct world w = {.c = cluster_new(2)};
    server_start(w.c, 0, "retain", to_keeper);
    server_start(w.c, 1, "retain", -1);
    w.s0 = &w.c->servers[0];
    OK(pc_engine_retain(w.s0->engine, 1, 2)); /* before the region is known */
    w.home = attach(w.s0, trap);
    w.far = attach(&w.c->servers[1], trap);
    w.a = build(w.c, w.s0, w.home, 1, MIB, 0);
    w.b = build(w.c, w.s0, w.home, 2, MIB, 0);
    commit_a(&w, 5);
    commit_b(&w, 20);
    check_kept(&w);

    /* The server comes back. It is told again, and the blocks are there still. */
    server_stop(w.c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&keeper);
    server_start(w.c, 0, "retain", to_keeper);
    OK(pc_engine_retain(w.s0->engine, 1, 2));
    commit_b(&w, 20);
    check_kept(&w);

    /* It comes back, and is told before it takes back anything: nobody need say it again. */
    const struct pc_floor floor_of_a = {.region = 1, .version = 2};
    told.floors = &floor_of_a;
    told.n_floors = 1;
    server_stop(w.c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&keeper);
    server_start(w.c, 0, "retain", to_keeper);
    CHECK(stats_of(w.s0).history_retained_bytes == 2 * 4096 * (w.a_version - 2));
    commit_b(&w, 20);
    check_kept(&w);
    told.floors = NULL;
    told.n_floors = 0;

    /* A higher floor, then none: what it held goes with the next pressure. */
    struct pc_mapping m;
    OK(pc_engine_retain(w.s0->engine, 1, 4));
    CHECK(stats_of(w.s0).history_retained_bytes == 2 * 4096);
    commit_b(&w, 20);
    settle(&w);
    CHECK(try_map(w.home, &w.a, 3, 0, &m) == PC_ERR_EXPIRED);
    check_at(w.c, w.home, &w.a, 4);
    check_at(w.c, w.far, &w.a, 4);
    OK(pc_engine_retain(w.s0->engine, 1, UINT64_MAX));
    CHECK(stats_of(w.s0).history_retained_bytes == 0);
    commit_b(&w, 20);
    settle(&w);
    CHECK(try_map(w.home, &w.a, 4, 0, &m) == PC_ERR_EXPIRED);
    check_at(w.c, w.far, &w.a, w.a_version);
    CHECK(stats_of(w.s0).history_retained_expired == 0);

    /* All of it is retained, and more than there is room for: some goes, and the log says so. */
    const int n_log_events = w.s0->log_events;
    OK(pc_engine_retain(w.s0->engine, 2, w.b_version));
    const uint64_t floor = w.b_version;
    commit_b(&w, 20);
    settle(&w);
    CHECK(try_map(w.home, &w.b, floor, 0, &m) == PC_ERR_EXPIRED);
    CHECK(stats_of(w.s0).history_retained_expired > 0);
    CHECK(stats_of(w.s0).history_bytes <= 64 << 10);
    SOON(w.s0->log_events == n_log_events + 1);
    check_at(w.c, w.far, &w.b, w.b_version);
    pc_client_close(w.far);
    pc_client_close(w.home);
    cluster_stop(w.c);
    close(to_keeper);
    keeper_stop(&keeper);
}

int main(void)
{
    int failed = 0;
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    for (size_t i = 0; i < 2; i++)
        failed += run_test("retain", test_retain, traps[i], 60);
    return failed != 0;
}
