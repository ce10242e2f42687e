/* test_holes.c - a home's blocks that nobody wrote: processes of its node read them from the base as it
 * is, and the kernel allocates each. What that can take of a node is bounded for all homes together. */
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "tests/support/commit.h"

#define BUDGET (4 * MIB)
#define HOLES (BUDGET / 4) /* of one region; half of the budget may be such */
#define DATA MIB
#define REGIONS 8u

struct world {
    struct cluster *c;
    struct server *s;
    pc_client *client, *builder; /* the builder's is another one where regions are built in place */
    int trap, to_keeper;
    pid_t keeper;
    char keeper_name[64];
};

static struct world world_start(int trap)
{
    struct world w = {.trap = trap};
    snprintf(w.keeper_name, sizeof w.keeper_name, "clamor-test-holes-keeper-%d", (int)getpid());
    pid_t watched = getpid();
    w.keeper = fork();
    if (!w.keeper)
        _exit(pc_keeper_run(w.keeper_name, watched, 60 * SECOND) ? 1 : 0);
    told.cache_bytes = BUDGET;
    told.settle_ns = SECOND / 2;
    w.c = cluster_new(1);
    w.s = &w.c->servers[0];
    OK(pc_keeper_connect(w.keeper_name, 30 * SECOND, &w.to_keeper));
    server_start(w.c, 0, "holes", w.to_keeper);
    w.client = attach(w.s, trap);
    w.builder = attach(w.s, trap);
    return w;
}

static void restart(struct world *w)
{
    server_stop(w->c, 0);
    close(w->to_keeper);
    OK(pc_keeper_connect(w->keeper_name, 30 * SECOND, &w->to_keeper));
    server_start(w->c, 0, "holes", w->to_keeper);
}

static void world_stop(struct world *w)
{
    int status;
    pc_client_close(w->builder);
    pc_client_close(w->client);
    cluster_stop(w->c);
    OK(pc_keeper_quit(w->to_keeper));
    waitpid(w->keeper, &status, 0);
    CHECK(status == 0);
    close(w->to_keeper);
}

static struct pc_region_info sparse(struct world *w, uint64_t id, uint64_t holes)
{
    return build(w->c, w->s, w->client, id, holes + DATA, holes);
}

static struct pc_region_info sparse_in_place(struct world *w, uint64_t id, uint64_t holes,
                                             struct pc_mapping *m)
{
    const struct pc_region_info info = {.region = id,
                                        .base_address = PC_WINDOW_BEGIN + (id << 28),
                                        .length_bytes = holes + DATA};
    OK(pc_client_build(w->builder, id, info.base_address, info.length_bytes, MEDIUM, WAIT, m));
    fill_pattern((uint64_t *)(uintptr_t)(m->address + holes), id, holes, DATA);
    OK(pc_client_build_seal(w->builder, m->id, WAIT));
    publish(w->c, info, w->s->id);
    return info;
}

/* Reads all of it, and whether that took no fault. */
static bool is_read_as_it_is(struct world *w, const struct pc_region_info *info, struct pc_mapping *m)
{
    uint64_t faults = stats_of(w->s).faults;
    *m = map_at(w->client, info, 0, 0);
    for (uint64_t o = 0; o < info->length_bytes; o += 512)
        CHECK(at(m, o) == (o < info->length_bytes - DATA ? 0 : pattern(info->region, o)));
    return stats_of(w->s).faults == faults;
}

/* Whether processes map the base itself. */
static bool is_open(struct world *w, uint64_t id)
{
    struct pc__region *region = pc__region_get(w->s->engine, id);
    CHECK(region);
    pthread_mutex_lock(&region->lock);
    bool found = pc__home_base_generation(region) != NULL;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(w->s->engine, region);
    return found;
}

static uint64_t base_version_of(struct world *w, uint64_t id)
{
    struct pc__region *region = pc__region_get(w->s->engine, id);
    CHECK(region);
    pthread_mutex_lock(&region->lock);
    const uint64_t version = region->home->base.version;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(w->s->engine, region);
    return version;
}

/* As many regions as one likes, each with few enough holes by itself. */
static void test_many_homes(int trap)
{
    struct world w = world_start(trap);
    struct pc_region_info infos[REGIONS];
    struct pc_mapping m[REGIONS];
    for (uint64_t i = 0; i < REGIONS; i++)
        infos[i] = sparse(&w, 1 + i, HOLES);
    const uint64_t at_first = stats_of(w.s).home_bytes;
    CHECK(at_first == REGIONS * DATA);
    for (unsigned i = 0; i < REGIONS; i++)
        CHECK(is_read_as_it_is(&w, &infos[i], &m[i]) == (i < 2));
    CHECK(stats_of(w.s).home_bytes == at_first + BUDGET / 2);
    CHECK(stats_of(w.s).evicted_blocks > 0 || trap == PC_TRAP_SIGSEGV);
    /* A hole here and there counts as its data does. */
    struct pc_region_info dense = sparse(&w, 100, DATA / 16);
    struct pc_mapping of_dense;
    CHECK(is_read_as_it_is(&w, &dense, &of_dense));
    /* A server that starts again maps the same ones as they are. */
    restart(&w);
    SOON(stats_of(w.s).reattached == REGIONS + 1);
    SOON(!w.s->engine->settle_until_ns);
    for (unsigned i = 0; i < REGIONS; i++)
        OK(pc_client_unmap(w.client, m[i].id));
    OK(pc_client_unmap(w.client, of_dense.id));
    SOON(stats_of(w.s).mappings == 0);
    for (unsigned i = REGIONS; i-- > 0;) {
        CHECK(is_open(&w, 1 + i) == (i < 2));
        (void)is_read_as_it_is(&w, &infos[i], &m[i]);
        OK(pc_client_unmap(w.client, m[i].id));
    }
    world_stop(&w);
}

/* Who builds in place has the base from the beginning, with all its holes; others do not. */
static void test_many_built(int trap)
{
    struct world w = world_start(trap);
    struct pc_region_info infos[REGIONS];
    struct pc_mapping m[REGIONS], built[REGIONS];
    for (uint64_t i = 0; i < REGIONS; i++)
        infos[i] = sparse_in_place(&w, 1 + i, HOLES, &built[i]);
    const uint64_t at_first = stats_of(w.s).home_bytes;
    CHECK(at_first == REGIONS * DATA);
    for (unsigned i = 0; i < REGIONS; i++)
        CHECK(is_read_as_it_is(&w, &infos[i], &m[i]) == (i < 2));
    CHECK(stats_of(w.s).home_bytes == at_first + BUDGET / 2);
    for (unsigned i = 0; i < REGIONS; i++)
        CHECK(at(&built[i], HOLES) == pattern(1 + i, HOLES));
    /* The next server knows which ones are the builder's alone. Each has its memory back. */
    restart(&w);
    SOON(stats_of(w.s).reattached == 2 * REGIONS);
    SOON(!w.s->engine->settle_until_ns);
    for (unsigned i = 0; i < REGIONS; i++)
        OK(pc_client_unmap(w.client, m[i].id));
    SOON(stats_of(w.s).mappings == REGIONS);
    for (unsigned i = 0; i < REGIONS; i++)
        CHECK(is_read_as_it_is(&w, &infos[i], &m[i]) == (i < 2));
    CHECK(stats_of(w.s).home_bytes == at_first + BUDGET / 2);
    /* A commit reaches the base when the builder has let go of it, and who reads on sees it. */
    for (unsigned i = 0; i < REGIONS; i++) {
        OK(pc_client_unmap(w.builder, built[i].id));
        OK(pc_client_unmap(w.client, m[i].id));
    }
    SOON(stats_of(w.s).mappings == 0);
    for (unsigned i = 0; i < REGIONS; i++) {
        const struct pc_run run = {.first_block = 3, .n_blocks = 1};
        CHECK(commit(w.c, w.s, w.client, &infos[i], 0, &run, 1) == 1);
        m[i] = map_at(w.client, &infos[i], 1, 0);
        CHECK(at(&m[i], 3 << 12) != 0 && at(&m[i], 4 << 12) == 0);
        CHECK(at(&m[i], HOLES) == pattern(1 + i, HOLES));
        SOON(base_version_of(&w, 1 + i) == 1);
    }
    world_stop(&w);
}

/* What a region took goes to the next when it is freed. */
static void test_given_back(int trap)
{
    struct world w = world_start(trap);
    struct pc_mapping m;
    for (uint64_t i = 1; i <= REGIONS; i++) {
        struct pc_region_info info = sparse(&w, i, 2 * HOLES);
        CHECK(is_read_as_it_is(&w, &info, &m));
        OK(pc_client_unmap(w.client, m.id));
        SOON(stats_of(w.s).mappings == 0);
        OK(pc_engine_retire(w.s->engine, i, 1));
        SOON(stats_of(w.s).regions == 0 && stats_of(w.s).home_bytes == 0);
        SOON(!atomic_load(&w.s->engine->open_holes)); /* the worker lets it go */
    }
    world_stop(&w);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(int);
    } tests[] = {{"many_homes", test_many_homes}, {"many_built", test_many_built}, {"given_back", test_given_back}};
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    const char *only = argc > 1 ? argv[1] : "";
    int failed = 0;
    for (size_t t = 0; t < 2; t++)
        for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
            if (strstr(tests[i].name, only))
                failed += run_test(tests[i].name, tests[i].run, traps[t], 120);
    return failed != 0;
}
