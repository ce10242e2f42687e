/* test_retained.c - the layers of a writer's node, of commits on a region whose home is another server:
 * they stay until that has acknowledged them, and within a bound afterwards. */
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"

#define N_BLOCKS 128u
enum { HOME, WRITER, N_SERVERS };

static const struct pc_run whole = {0, N_BLOCKS}, one = {7, 1};
#define LARGE_BYTES ((N_BLOCKS + 1) * PC_BLOCK_BYTES) /* more than is retained beside the home's copy */
#define SMALL_BYTES (2 * PC_BLOCK_BYTES)
#define MOST_BYTES (256u << 10)
#define MOST_SMALL (MOST_BYTES / SMALL_BYTES)

/* Servers that retain MOST_BYTES. */
struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *home, *writer;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info;
};

static struct world world_of(int trap)
{
    told.cache_bytes = 4 * MOST_BYTES;
    struct world w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "retained")};
    w.home = &w.c->servers[HOME];
    w.writer = &w.c->servers[WRITER];
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.c->servers[i], trap);
    w.info = build(w.c, w.home, w.clients[HOME], 1, (uint64_t)N_BLOCKS << 12, 0);
    return w;
}

static void world_end(struct world *w)
{
    for (int i = 0; i < N_SERVERS; i++) {
        if (!w->c->servers[i].engine)
            continue;
        pc_client_close(w->clients[i]);
        SOON(stats_of(&w->c->servers[i]).layers == 0);
    }
    cluster_stop(w->c);
    check_process_counts(&w->counts);
}

/* Its writer's server has heard of the commit. */
static void write_run(struct world *w, uint64_t base, struct pc_run run)
{
    CHECK(commit(w->c, w->writer, w->clients[WRITER], &w->info, base, &run, 1) == base + 1);
    SOON(stats_of(w->writer).layers == 0);
}

static bool retains(struct world *w, uint64_t layers, uint64_t bytes)
{
    const struct pc_engine_stats stats = stats_of(w->writer);
    return stats.retained_layers == layers && stats.retained_bytes == bytes;
}

/* It is asked whether the homes have acknowledged, twice, and hears that they have not. */
static void is_told_no(struct world *w)
{
    const int asked = w->writer->settled_asked;
    SOON(w->writer->settled_asked >= asked + 2);
}

/* The home is lost before it has acknowledged what it had fetched. */
static void test_an_answered_commit_is_at_its_writers(int trap)
{
    struct world w = world_of(trap);
    struct pc_run run;
    w.writer->hold_settled = true;
    write_run(&w, 0, whole);
    CHECK(retains(&w, 1, LARGE_BYTES));
    is_told_no(&w);
    CHECK(retains(&w, 1, LARGE_BYTES));
    pc_client_close(w.clients[HOME]);
    w.home->lost = true;
    server_stop(w.c, HOME);
    CHECK(pc_engine_cached_blocks(w.writer->engine, 1, 1, &run, 1) == 1 && run.n_blocks == N_BLOCKS);
    struct pc_region_info info = w.info;
    int fd;
    info.version = 1;
    OK(pc_engine_rebuild_begin(w.writer->engine, &info, NULL, 0, &fd));
    OK(pc_engine_rebuild_copy(w.writer->engine, 1, fd, 1, &whole, 1));
    OK(pc_engine_rebuild_seal(w.writer->engine, 1, fd));
    close(fd);
    OK(pc_engine_set_homes(w.writer->engine, 1, &w.writer->id, 1));
    CHECK(retains(&w, 0, 0)); /* the base has it */
    check_at(w.c, w.clients[WRITER], &w.info, 1);
    world_end(&w);
}

/* What the homes have goes as far as it is beyond the bound, and what they have not counts for nothing. */
static void test_the_bound_is_of_what_is_acknowledged(int trap)
{
    struct world w = world_of(trap);
    write_run(&w, 0, one);
    CHECK(w.writer->settled_asked == 0); /* within the bound nobody needs to know */
    write_run(&w, 1, whole);
    SOON(retains(&w, 1, SMALL_BYTES));
    w.writer->hold_settled = true;
    uint64_t version = 2;
    for (; version < MOST_SMALL + 10; version++)
        write_run(&w, version, one);
    is_told_no(&w);
    CHECK(retains(&w, version - 1, (version - 1) * SMALL_BYTES));
    w.writer->hold_settled = false;
    SOON(retains(&w, MOST_SMALL, MOST_BYTES));
    struct pc_run run; /* the newest of them */
    CHECK(pc_engine_cached_blocks(w.writer->engine, 1, version, &run, 1) == 1);
    CHECK(pc_engine_cached_blocks(w.writer->engine, 1, 1, &run, 1) == 0);
    world_end(&w);
}

/* Nobody needs to know any more. */
static void test_what_is_freed_goes_unacknowledged(int trap)
{
    struct world w = world_of(trap);
    w.writer->hold_settled = true;
    write_run(&w, 0, whole);
    CHECK(retains(&w, 1, LARGE_BYTES));
    OK(pc_engine_retire(w.writer->engine, 1, 0));
    CHECK(retains(&w, 0, 0));
    const int asked = w.writer->settled_asked;
    usleep(1500000);
    CHECK(w.writer->settled_asked <= asked + 1);
    world_end(&w);
}

/* A server that is started again has heard of no acknowledgement. */
static void test_a_restart_forgets_no_layer(int trap)
{
    struct keeper keeper = keeper_start("retained");
    struct world w = world_of(trap);
    int to_keeper = keeper_connect(&keeper);
    w.counts.descriptors++; /* that */
    pc_client_close(w.clients[WRITER]);
    server_stop(w.c, WRITER); /* which had none */
    server_start(w.c, WRITER, "retained", to_keeper);
    w.clients[WRITER] = attach(w.writer, trap);
    w.writer->hold_settled = true;
    write_run(&w, 0, whole);
    server_stop(w.c, WRITER);
    close(to_keeper);
    to_keeper = keeper_connect(&keeper);
    server_start(w.c, WRITER, "retained", to_keeper);
    check_at(w.c, w.clients[WRITER], &w.info, 1);
    SOON(retains(&w, 1, LARGE_BYTES));
    is_told_no(&w);
    CHECK(retains(&w, 1, LARGE_BYTES));
    w.writer->hold_settled = false;
    SOON(retains(&w, 0, 0));
    world_end(&w);
    keeper_stop(&keeper);
    close(to_keeper);
}

int main(int argc, char **argv)
{
    int failed = 0;
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
#define RUN(test, seconds)                                                                       \
    if (argc < 2 || !strcmp(argv[1], #test))                                                     \
    failed += run_test(#test, test_##test, trap, seconds)
    for (size_t i = 0; i < 2; i++) {
        int trap = traps[i];
        RUN(an_answered_commit_is_at_its_writers, 60);
        RUN(the_bound_is_of_what_is_acknowledged, 60);
        RUN(what_is_freed_goes_unacknowledged, 60);
        RUN(a_restart_forgets_no_layer, 90);
    }
    return failed != 0;
}
