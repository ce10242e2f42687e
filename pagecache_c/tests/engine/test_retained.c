/* test_retained.c - the layers of a writer's node, of commits on a region whose home is another server:
 * they stay until that has acknowledged them, and within a bound afterwards. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"

#include "engine/core/core.h"
#include "engine/store/store.h"

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
    cluster_end(w->c, &w->counts);
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
    SOON(retains(&w, 1, LARGE_BYTES)); /* the commit is answered before its layer is kept */
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

/* ------------------------------------------------------------ many at once */

static void retain_one(pc_engine *engine, uint64_t region, uint64_t version)
{
    struct pc__layer *layer = calloc(1, sizeof *layer);
    CHECK(layer);
    *layer = (struct pc__layer){.memfd = -1, .region = region, .bytes = PC_BLOCK_BYTES, .refs = 1};
    pc__count_add(&engine->count.layers, 1);
    pc__count_add(&engine->count.layer_bytes, layer->bytes);
    pc__retained_add(engine, layer, version);
}

static double cpu_s(void)
{
    struct timespec now;
    CHECK(!clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now));
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

#ifdef __SANITIZE_THREAD__
#define MOST_S 5.0 /* of this thread, where a step takes ten times as long */
#else
#define MOST_S 0.5
#endif

/* engine.lock is held meanwhile: faults wait. */
static void test_many_regions_take_no_long(int trap)
{
    enum { FEWER = 3000, MANY = 30000 };
    (void)trap;
    struct pc_engine_options options = told;
    options.socket_name = "clamor-test-many-retained";
    options.library_version = "test";
    options.server_id = 0x1000;
    options.keeper_fd = -1;
    options.n_loops = 1;
    pc_engine *engine;
    OK(pc_engine_start(&options, &engine));
    for (uint64_t i = 1; i <= FEWER; i++)
        retain_one(engine, i, 1);
    retain_one(engine, 1, 2);
    double began_s = cpu_s();
    for (uint64_t i = 1; i <= FEWER; i++)
        OK(pc_engine_settled(engine, i, 2));
    double took_s = cpu_s() - began_s;
    CHECK(took_s < MOST_S);
    uint64_t version; /* of what has a newer one, the older one goes first */
    CHECK(pc__retained_versions(engine, 1, &version, 1) == 1 && version == 2);
    for (uint64_t i = 1; i <= MANY; i++)
        retain_one(engine, FEWER + i, 1);
    pthread_mutex_lock(&engine->lock);
    engine->ask_settled_at_ns = 0;
    began_s = cpu_s();
    pc__retained_request(engine, pc__now_ns());
    took_s = cpu_s() - began_s;
    pthread_mutex_unlock(&engine->lock);
    CHECK(took_s < MOST_S);
    OK(pc_engine_stop(engine));
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(an_answered_commit_is_at_its_writers),
        TEST(the_bound_is_of_what_is_acknowledged),
        TEST(what_is_freed_goes_unacknowledged),
        TEST(a_restart_forgets_no_layer),
    };
    static const struct engine_test once[] = {
        TEST(many_regions_take_no_long),
    };
    int failed = 0;
    const char *only = argc > 1 ? argv[1] : NULL;
    failed += run_over_traps(tests, sizeof tests / sizeof tests[0], only);
    failed += run_with(0, once, sizeof once / sizeof once[0], only);
    return failed != 0;
}
