/* test_move_storm.c - a home moves round and round while readers of all servers check what they read by its
 * version, and writers of all of them commit. Over both traps. */
#include "tests/support/engine_main.h"
#include "tests/support/leaks.h"
#include "tests/support/moves.h"

#define N_SERVERS 3
#define N_BLOCKS 64u
#define DEPTH 24u    /* versions that move along */
#define READERS 2u   /* of each server */
#define N(array) (sizeof(array) / sizeof(array)[0])


struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers;
    struct pc_region_info info;
};
struct storm {
    struct world w;
    pthread_rwlock_t commits; /* held back: written */
    _Atomic bool over;
    _Atomic uint64_t n_read, n_expired, n_commits, n_moves;
};
struct stormer {
    struct storm *s;
    int node;
    pc_client *client;
    unsigned seed;
};

static unsigned some_number(unsigned *seed, unsigned below)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % below;
}

/* Rows of the version, which need no mapped block. */
static int gather_some(struct stormer *me, const struct pc_mapping *m, uint64_t version)
{
    const struct pc_rows rows = {.stride_bytes = PC_BLOCK_BYTES, .row_bytes = 8};
    uint64_t ids[16], out[16];
    struct world *w = &me->s->w;
    for (size_t i = 0; i < N(ids); i++)
        ids[i] = some_number(&me->seed, N_BLOCKS);
    int rc = pc_client_gather(me->client, m->id, &rows, ids, N(ids), out, WAIT);
    uint64_t *owners = registry_owners(w->c->registry, 1, version, N_BLOCKS);
    for (size_t i = 0; i < N(ids) && !rc; i++)
        CHECK(out[i] == (owners[ids[i]] ? written(1, owners[ids[i]], ids[i] << 12)
                                        : pattern(1, ids[i] << 12)));
    free(owners);
    return rc;
}

/* By faults, all at once, or by rows. Versions that faults are for are young: none expires on the way. */
static void *storm_reads(void *arg)
{
    struct stormer *me = arg;
    struct world *w = &me->s->w;
    const struct pc_run whole = {0, N_BLOCKS};
    while (!me->s->over) {
        uint64_t latest = registry_latest(w->c->registry, 1);
        unsigned how = some_number(&me->seed, 3);
        uint64_t back = some_number(&me->seed, how ? 8 : 2);
        uint64_t version = back < latest ? latest - back : latest;
        struct pc_mapping m;
        int rc = try_map(me->client, &w->info, version, 0, &m);
        if (!rc) {
            if (how == 1)
                rc = pc_client_prefetch(me->client, m.id, &whole, 1, 1, WAIT);
            if (how == 2)
                rc = gather_some(me, &m, version);
            else if (!rc)
                check_version(w->c, &m, &w->info, version);
            OK(pc_client_unmap(me->client, m.id));
        }
        CHECK(rc == PC_OK || rc == PC_ERR_EXPIRED);
        me->s->n_read += !rc;
        me->s->n_expired += rc != 0;
    }
    return NULL;
}

static void *storm_writes(void *arg)
{
    struct stormer *me = arg;
    struct world *w = &me->s->w;
    while (!me->s->over) {
        struct transaction t;
        uint64_t base = registry_latest(w->c->registry, 1);
        struct pc_run run = {some_number(&me->seed, N_BLOCKS - 8), 1 + some_number(&me->seed, 8)};
        int rc = try_begin(w->c, &w->servers[me->node], me->client, &w->info, base, &t);
        if (rc == PC_ERR_EXPIRED)
            continue;
        OK(rc);
        rc = pc_client_prefetch(me->client, t.m.id, &run, 1, 1, WAIT); /* a write reads the rest first */
        if (!rc) {
            write_runs(&t, &run, 1);
            OK(try_stage(&t));
            pthread_rwlock_rdlock(&me->s->commits);
            OK(try_pull(&t));
            me->s->n_commits += decide(&t) != 0;
            tell(&t);
            pthread_rwlock_unlock(&me->s->commits);
        }
        CHECK(rc == PC_OK || rc == PC_ERR_EXPIRED);
        OK(pc_client_unmap(me->client, t.m.id));
        usleep(2000 + some_number(&me->seed, 4000));
    }
    return NULL;
}

static void storm_move(struct storm *s, int from, int to)
{
    struct world *w = &s->w;
    struct move m = move_begin(w->c, &w->servers[from], &w->servers[to], w->info);
    move_bulk(&m);
    for (int i = 0; i < 3; i++)
        (void)move_delta(&m);
    pthread_rwlock_wrlock(&s->commits);
    (void)move_delta(&m);
    uint64_t oldest = region_of(m.from, 1).oldest_version;
    if (m.version > DEPTH && oldest < m.version - DEPTH)
        oldest = m.version - DEPTH;
    move_records(&m, oldest, m.version);
    move_seal(&m);
    move_switch(&m);
    pthread_rwlock_unlock(&s->commits);
    s->n_moves++;
}

static void test_storm(int trap)
{
    static const uint64_t storm_ns = 4 * SECOND;
    struct storm s = {.w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "move-storm")}};
    struct stormer them[N_SERVERS * (READERS + 1)];
    pthread_t threads[N(them)];
    size_t n = 0;
    pthread_rwlockattr_t fair;
    pthread_rwlockattr_init(&fair);
    pthread_rwlockattr_setkind_np(&fair, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&s.commits, &fair);
    pthread_rwlockattr_destroy(&fair);
    s.w.servers = s.w.c->servers;
    pc_client *builder = attach(&s.w.servers[0], trap);
    s.w.info = build(s.w.c, &s.w.servers[0], builder, 1, (uint64_t)N_BLOCKS << 12, 0);
    for (int node = 0; node < N_SERVERS; node++)
        for (unsigned i = 0; i <= READERS; i++, n++) {
            them[n] = (struct stormer){&s, node, attach(&s.w.servers[node], trap), (unsigned)n * 7919};
            CHECK(!pthread_create(&threads[n], NULL, i ? storm_reads : storm_writes, &them[n]));
        }
    const uint64_t until = now_ns() + storm_ns;
    for (int turn = 0; now_ns() < until || turn < 6; turn++)
        storm_move(&s, turn % N_SERVERS, (turn + 1) % N_SERVERS);
    s.over = true;
    for (size_t i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    if (getenv("SAY_STORM"))
        fprintf(stderr, "%llu moves, %llu commits, %llu reads, %llu expired\n",
                (unsigned long long)s.n_moves, (unsigned long long)s.n_commits,
                (unsigned long long)s.n_read, (unsigned long long)s.n_expired);
    CHECK(s.n_commits > 10 && s.n_read > 10 && s.n_expired < s.n_read);
    for (size_t i = 0; i < n; i++) {
        check_at(s.w.c, them[i].client, &s.w.info, registry_latest(s.w.c->registry, 1));
        pc_client_close(them[i].client);
    }
    pc_client_close(builder);
    pthread_rwlock_destroy(&s.commits);
    for (int i = 0; i < N_SERVERS; i++)
        SOON(stats_of(&s.w.servers[i]).layers == 0);
    cluster_end(s.w.c, &s.w.counts);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {TEST(storm)};
    return run_over_traps(tests, N(tests), argc > 1 ? argv[1] : NULL) != 0;
}
