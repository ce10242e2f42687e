/* test_replication.c - blocks that come from a server which is not their home, over both traps: what a
 * reader gets when those servers are well, and when they stall, lie, lag, or go. */
#include "tests/support/engine_main.h"
#include "tests/support/fake_peer.h"
#include "tests/support/leaks.h"

#include "engine/core/core.h"
#include "engine/serve/serve.h"

#define N_BLOCKS 512u /* of the region that is read */
enum { HOT = 1, COLD = 2 };
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

static const struct pc_run all = {0, N_BLOCKS};
static const struct pc_run changed_first[] = {{3, 1}, {10, 20}, {100, 1}, {200, 56}};
static const struct pc_run changed_then[] = {{15, 1}, {300, 30}};

/* Server 0 is the home of HOT, and of COLD, of which the hog asks for too much. */
struct world {
    int trap;
    struct process_counts counts; /* at first */
    struct cluster *c;
    struct server *servers;
    pc_client *home;
    struct pc_region_info hot, cold;
    struct hog hog;
};

static struct world world_of(int n_servers, int trap)
{
    struct world w = {.trap = trap, .counts = process_counts()};
    w.c = cluster_new(n_servers);
    w.servers = w.c->servers;
    told.fetch_timeout_ns = 60 * SECOND; /* of the home: it bears with the hog */
    server_start(w.c, 0, "replication", -1);
    told.fetch_timeout_ns = SECOND / 2;
    for (int i = 1; i < n_servers; i++)
        server_start(w.c, i, "replication", -1);
    for (int i = 0; i < n_servers; i++) /* what comes from whom: test_hedge.c has the late ones */
        w.servers[i].engine->hedge_least_ns = 60 * SECOND;
    w.home = attach(&w.servers[0], trap);
    w.hot = build(w.c, &w.servers[0], w.home, HOT, (uint64_t)N_BLOCKS << 12, 0);
    w.cold = build(w.c, &w.servers[0], w.home, COLD, (uint64_t)HOG_BLOCKS << 12, 0);
    return w;
}

static struct world busy_world(int n_servers, int trap)
{
    struct world w = world_of(n_servers, trap);
    w.hog = hog_start(&w.servers[0], &w.cold);
    return w;
}

static void world_end(struct world *w)
{
    if (w->hog.home)
        hog_stop(&w->hog);
    pc_client_close(w->home);
    for (int i = 0; i < w->c->n; i++) {
        if (!w->servers[i].engine)
            continue;
        SOON(stats_of(&w->servers[i]).mappings == 0 && stats_of(&w->servers[i]).clients == 0);
        CHECK(stats_of(&w->servers[i]).faults_waiting == 0);
    }
    cluster_end(w->c, &w->counts);
}

static void prefetch(pc_client *client, const struct pc_mapping *m, struct pc_run run)
{
    OK(pc_client_prefetch(client, m->id, &run, 1, 1, WAIT));
}

/* All of a version, the first part of it by touching it; then it is checked. */
static void read_version(struct world *w, pc_client *client, uint64_t version)
{
    struct pc_mapping m = map_at(client, &w->hot, version, PC_MAP_PRIVATE);
    for (uint64_t b = 0; b < 32; b++)
        (void)*block_at(&m, b);
    prefetch(client, &m, all);
    check_version(w->c, &m, &w->hot, version);
    OK(pc_client_unmap(client, m.id));
}

/* ------------------------------------------------------------ well behaved */

struct reader {
    struct world *w;
    pc_client *client;
};

static void *read_it(void *arg)
{
    struct reader *r = arg;
    read_version(r->w, r->client, 0);
    return NULL;
}

/* Everybody reads everything at once: what one has the others get from there. */
static void test_hot_blocks_come_from_peers(int trap)
{
    enum { READERS = 6 };
    struct world w = busy_world(READERS + 2, trap);
    pc_client *first = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(first, &w.hot, 0, 0);
    prefetch(first, &m, all);
    check_version(w.c, &m, &w.hot, 0);
    CHECK(stats_of(&w.servers[1]).peer_blocks_fetched == 0); /* nobody had them */
    pthread_t threads[READERS];
    struct reader readers[READERS];
    for (int i = 0; i < READERS; i++) {
        readers[i] = (struct reader){&w, attach(&w.servers[i + 2], trap)};
        CHECK(!pthread_create(&threads[i], NULL, read_it, &readers[i]));
    }
    uint64_t fetched = 0, served = 0, misses = 0;
    for (int i = 0; i < READERS; i++) {
        pthread_join(threads[i], NULL);
        struct pc_engine_stats s = stats_of(&w.servers[i + 2]);
        CHECK(s.blocks_fetched == N_BLOCKS); /* each once */
        CHECK(s.peer_blocks_fetched > 0);
        CHECK(s.bad_messages == 0 && s.fetch_failed == 0);
        fetched += s.peer_blocks_fetched;
        misses += s.redirect_misses;
        pc_client_close(readers[i].client);
    }
    for (int i = 0; i < READERS + 2; i++)
        served += stats_of(&w.servers[i]).peer_blocks_served;
    CHECK(served >= fetched);
    CHECK(fetched > READERS * N_BLOCKS / 2); /* the home is busy all the time */
    CHECK(stats_of(&w.servers[0]).redirected_blocks >= fetched);
    CHECK(stats_of(&w.servers[0]).peer_blocks_served == 0);
    CHECK(misses < fetched);
    OK(pc_client_unmap(first, m.id));
    pc_client_close(first);
    world_end(&w);
}

/* What came from a peer can be had from who got it there. */
static void test_a_chain_of_peers(int trap)
{
    struct world w = busy_world(4, trap);
    for (int i = 1; i < 4; i++) {
        pc_client *client = attach(&w.servers[i], trap);
        struct pc_mapping m = map_at(client, &w.hot, 0, PC_MAP_PRIVATE);
        prefetch(client, &m, all);
        check_version(w.c, &m, &w.hot, 0);
        OK(pc_client_unmap(client, m.id));
        pc_client_close(client);
        struct pc_engine_stats s = stats_of(&w.servers[i]);
        CHECK(i == 1 ? s.peer_blocks_fetched == 0
              : i == 2 ? s.peer_blocks_fetched == N_BLOCKS
                       : s.peer_blocks_fetched > 0);
        if (i == 2) { /* now the other one is gone: what comes from a peer comes from this one */
            w.servers[1].lost = true;
            server_stop(w.c, 1);
        }
    }
    CHECK(stats_of(&w.servers[2]).peer_blocks_served ==
          stats_of(&w.servers[3]).peer_blocks_fetched);
    world_end(&w);
}

/* --------------------------------------------------------- badly behaved */

struct expected {
    const char *name;
    bool some_come, is_nonsense, breaks;
};
static const struct expected expectations[PEER_ACTS] = {
    [PEER_SERVES] = {"serves", .some_come = true},
    [PEER_HAS_HALF] = {"has half", .some_come = true},
    [PEER_HAS_NONE] = {"has none", .some_come = false},
    [PEER_REFUSES] = {"refuses", .some_come = false},
    [PEER_STALLS] = {"stalls", .some_come = true, .breaks = true},
    [PEER_CLOSES] = {"closes", .some_come = true, .breaks = true},
    [PEER_ADDS_ONE] = {"adds one", .is_nonsense = true, .breaks = true},
    [PEER_DROPS_ONE] = {"drops one", .is_nonsense = true, .breaks = true},
    [PEER_IS_BEHIND] = {"is behind", .is_nonsense = true, .breaks = true},
    [PEER_IS_AHEAD] = {"is ahead", .is_nonsense = true, .breaks = true},
    [PEER_IS_OTHER] = {"is other", .is_nonsense = true, .breaks = true},
    [PEER_REDIRECTS] = {"redirects", .is_nonsense = true, .breaks = true},
    [PEER_BABBLES] = {"babbles", .is_nonsense = true, .breaks = true},
    [PEER_HOARDS] = {"hoards", .breaks = true},
    [PEER_SKIPS] = {"skips", .some_come = true, .breaks = true},
};

static void check_counters(int acts, const struct pc_engine_stats *s)
{
    const struct expected *e = &expectations[acts];
    bool fits = (s->peer_blocks_fetched > 0) == e->some_come &&
                (s->bad_messages > 0) == e->is_nonsense && (s->fetch_retries > 0) == e->breaks &&
                (s->redirect_misses > 0) == (acts != PEER_SERVES) && s->fetch_failed == 0 &&
                s->faults_failed == 0 && s->blocks_fetched == N_BLOCKS;
    if (fits)
        return;
    fprintf(stderr, "a peer that %s: %llu came from it, %llu bad, %llu retries, %llu misses, "
            "%llu failed, %llu faults failed, %llu came\n", e->name,
            (unsigned long long)s->peer_blocks_fetched, (unsigned long long)s->bad_messages,
            (unsigned long long)s->fetch_retries, (unsigned long long)s->redirect_misses,
            (unsigned long long)s->fetch_failed, (unsigned long long)s->faults_failed,
            (unsigned long long)s->blocks_fetched);
    FAIL("not what happened");
}

static void bad_peer(int trap, int acts)
{
    struct world w = busy_world(2, trap);
    struct fake_peer *peer = fake_peer_start(w.c, 2, &w.hot, acts);
    fake_peer_holds(peer, &w.servers[0], 0, 0, N_BLOCKS);
    pc_client *reader = attach(&w.servers[1], trap);
    read_version(&w, reader, 0);
    CHECK(peer->requests > 0);
    CHECK(peer->from_version == 0 && peer->to_version == 0);
    struct pc_engine_stats s = stats_of(&w.servers[1]);
    check_counters(acts, &s);
    pc_client_close(reader);
    fake_peer_free(peer);
    world_end(&w);
}

static void test_bad_peers(int trap)
{
    for (int acts = 0; acts < PEER_ACTS; acts++)
        bad_peer(trap, acts);
}

struct waiting {
    pc_client *client;
    struct pc_mapping *m;
    _Atomic bool over;
};

static void *wait_for_block_0(void *arg)
{
    struct waiting *waiting = arg;
    prefetch(waiting->client, waiting->m, (struct pc_run){0, 1});
    waiting->over = true;
    return NULL;
}

/* What it skips is not waited for as long as it answers other questions: that could be for ever. */
static void test_skipped_for_others(int trap)
{
    struct world w = busy_world(2, trap);
    struct fake_peer *peer = fake_peer_start(w.c, 2, &w.hot, PEER_SKIPS);
    fake_peer_holds(peer, &w.servers[0], 0, 0, N_BLOCKS);
    pc_client *reader = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(reader, &w.hot, 0, 0);
    struct waiting waiting = {.client = reader, .m = &m};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, wait_for_block_0, &waiting));
    SOON(peer->asked[0]);
    uint64_t block = 1;
    for (; block < N_BLOCKS && !waiting.over; block++) {
        prefetch(reader, &m, (struct pc_run){block, 1});
        usleep(20000); /* so that they last twenty times as long as a connection may be silent */
    }
    CHECK(waiting.over && block < N_BLOCKS);
    pthread_join(thread, NULL);
    struct pc_engine_stats s = stats_of(&w.servers[1]);
    CHECK(s.bad_messages == 1 && s.redirect_misses >= 1 && s.fetch_failed == 0);
    peer->acts = PEER_SERVES;
    prefetch(reader, &m, all);
    check_version(w.c, &m, &w.hot, 0);
    OK(pc_client_unmap(reader, m.id));
    pc_client_close(reader);
    fake_peer_free(peer);
    world_end(&w);
}

/* Who did not have a block is not asked for it again, by anybody. */
static void test_a_miss_is_remembered(int trap)
{
    struct world w = busy_world(3, trap);
    struct fake_peer *peer = fake_peer_start(w.c, 3, &w.hot, PEER_HAS_NONE);
    fake_peer_holds(peer, &w.servers[0], 0, 0, N_BLOCKS);
    pc_client *readers[2] = {attach(&w.servers[1], trap), attach(&w.servers[2], trap)};
    read_version(&w, readers[0], 0);
    CHECK(stats_of(&w.servers[1]).redirect_misses == N_BLOCKS && peer->blocks == N_BLOCKS);
    read_version(&w, readers[1], 0);
    CHECK(peer->blocks == N_BLOCKS);
    pc_client_close(readers[0]);
    pc_client_close(readers[1]);
    fake_peer_free(peer);
    world_end(&w);
}

static void ask_for_each(pc_client *client, const struct pc_mapping *m, unsigned n, unsigned step)
{
    for (unsigned i = 0; i < n; i++) {
        const struct pc_run run = {(uint64_t)i * step, 1};
        OK(pc_client_prefetch(client, m->id, &run, 1, 0, WAIT));
    }
}

/* It goes with 1,000 requests under way to it. */
static void test_gone_with_1000_requests(int trap)
{
    enum { REQUESTS = 1000 };
    struct world w = busy_world(2, trap);
    struct pc_region_info info = build(w.c, &w.servers[0], w.home, 3, 2 * REQUESTS << 12, 0);
    struct fake_peer *peer = fake_peer_start(w.c, 2, &info, PEER_HOARDS);
    fake_peer_holds(peer, &w.servers[0], 0, 0, 2 * REQUESTS);
    told.fetch_timeout_ns = 60 * SECOND;
    server_stop(w.c, 1);
    server_start(w.c, 1, "patient", -1);
    w.servers[1].engine->hedge_least_ns = 60 * SECOND;
    pc_client *reader = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(reader, &info, 0, 0);
    ask_for_each(reader, &m, REQUESTS, 2);
    SOON(stats_of(&w.servers[0]).redirected_blocks == REQUESTS);
    SOON(peer->requests > 0);
    fake_peer_vanish(peer);
    for (unsigned i = 0; i < REQUESTS; i++)
        check_block(w.c, &m, &info, 0, 0, 2 * i);
    struct pc_engine_stats s = stats_of(&w.servers[1]);
    CHECK(s.redirect_misses == REQUESTS && s.fetch_retries > 0);
    CHECK(s.peer_blocks_fetched == 0 && s.fetch_failed == 0 && s.faults_failed == 0);
    check_version(w.c, &m, &info, 0);
    OK(pc_client_unmap(reader, m.id));
    pc_client_close(reader);
    fake_peer_free(peer);
    world_end(&w);
}

/* Peers that answer, and peers that do not, all at once: the home alone is left. */
static void test_all_peers_gone(int trap)
{
    enum { FAKES = 4, PEERS = 3 };
    struct world w = busy_world(2 + PEERS, trap);
    struct fake_peer *fakes[FAKES];
    for (int i = 0; i < FAKES; i++) {
        fakes[i] = fake_peer_start(w.c, w.c->n + i, &w.hot, i ? PEER_HOARDS : PEER_SERVES);
        fake_peer_holds(fakes[i], &w.servers[0], 0, N_BLOCKS / 8 * (uint64_t)i, N_BLOCKS / 8);
    }
    for (int i = 0; i < PEERS; i++) {
        pc_client *client = attach(&w.servers[2 + i], trap);
        struct pc_mapping m = map_at(client, &w.hot, 0, PC_MAP_PRIVATE);
        prefetch(client, &m, (struct pc_run){N_BLOCKS / 2, N_BLOCKS / 2});
        OK(pc_client_unmap(client, m.id));
        pc_client_close(client);
    }
    pc_client *reader = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(reader, &w.hot, 0, 0);
    ask_for_each(reader, &m, N_BLOCKS, 1);
    for (int i = 0; i < FAKES; i++)
        SOON(fakes[i]->requests > 0);
    for (int i = 0; i < PEERS; i++)
        w.servers[2 + i].lost = true;
    for (int i = 0; i < FAKES; i++)
        fake_peer_vanish(fakes[i]);
    for (int i = 0; i < PEERS; i++)
        server_stop(w.c, 2 + i);
    check_version(w.c, &m, &w.hot, 0);
    struct pc_engine_stats s = stats_of(&w.servers[1]);
    CHECK(s.redirect_misses > 0 && s.blocks_fetched == N_BLOCKS && s.fetch_failed == 0);
    OK(pc_client_unmap(reader, m.id));
    pc_client_close(reader);
    for (int i = 0; i < FAKES; i++)
        fake_peer_free(fakes[i]);
    world_end(&w);
}

/* ---------------------------------------------------------------- versions */

static bool lies_in(uint64_t block, const struct pc_run *runs, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (block - runs[i].first_block < runs[i].n_blocks)
            return true;
    return false;
}

/* What a commit changed is not asked of who has it as it was. */
static void test_old_holders(int trap)
{
    struct world w = busy_world(2, trap);
    struct fake_peer *old = fake_peer_start(w.c, 2, &w.hot, PEER_SERVES);
    struct fake_peer *new = fake_peer_start(w.c, 3, &w.hot, PEER_SERVES);
    pc_client *reader = attach(&w.servers[1], trap);
    fake_peer_holds(old, &w.servers[0], 0, 0, N_BLOCKS);
    CHECK(commit(w.c, &w.servers[0], w.home, &w.hot, 0, changed_first, N(changed_first)) == 1);
    for (size_t i = 0; i < N(changed_first); i++)
        fake_peer_holds(new, &w.servers[0], 1, changed_first[i].first_block,
                        changed_first[i].n_blocks);
    CHECK(commit(w.c, &w.servers[0], w.home, &w.hot, 1, changed_then, N(changed_then)) == 2);
    read_version(&w, reader, 1);
    for (uint64_t b = 0; b < N_BLOCKS; b++) {
        bool first = lies_in(b, changed_first, N(changed_first));
        bool then = lies_in(b, changed_then, N(changed_then));
        CHECK(old->asked[b] == (!first && !then));
        CHECK(new->asked[b] == (first && !then));
    }
    CHECK(old->from_version == 0 && old->to_version == 2);
    CHECK(new->from_version == 1 && new->to_version == 2);
    CHECK(stats_of(&w.servers[1]).redirect_misses == 0);
    for (uint64_t v = 3; v-- > 0;)
        read_version(&w, reader, v);
    pc_client_close(reader);
    fake_peer_free(old);
    fake_peer_free(new);
    world_end(&w);
}

/* Peers that have moved on, and peers that stay behind, for readers of each version. */
static void test_peers_at_other_versions(int trap)
{
    struct world w = busy_world(5, trap);
    pc_client *clients[5];
    struct pc_mapping held[5];
    for (int i = 1; i < 5; i++)
        clients[i] = attach(&w.servers[i], trap);
    for (int i = 1; i < 3; i++) { /* 1 stays at version 0 */
        held[i] = map_at(clients[i], &w.hot, 0, PC_MAP_PRIVATE);
        prefetch(clients[i], &held[i], all);
    }
    CHECK(commit(w.c, &w.servers[0], w.home, &w.hot, 0, changed_first, N(changed_first)) == 1);
    OK(pc_client_unmap(clients[2], held[2].id)); /* and 2 goes on to version 1, in place */
    held[2] = map_at(clients[2], &w.hot, 1, PC_MAP_PRIVATE);
    prefetch(clients[2], &held[2], (struct pc_run){0, 220});
    for (uint64_t v = 0; v < 2; v++)
        for (int i = 3; i < 5; i++)
            read_version(&w, clients[i], i == 3 ? v : 1 - v);
    CHECK(commit(w.c, &w.servers[0], w.home, &w.hot, 1, changed_then, N(changed_then)) == 2);
    for (uint64_t v = 0; v < 3; v++)
        for (int i = 3; i < 5; i++)
            read_version(&w, clients[i], i == 3 ? v : 2 - v);
    uint64_t from_peers = 0;
    for (int i = 1; i < 5; i++) {
        from_peers += stats_of(&w.servers[i]).peer_blocks_fetched;
        CHECK(stats_of(&w.servers[i]).bad_messages == 0);
        if (i < 3) {
            check_version(w.c, &held[i], &w.hot, (uint64_t)i - 1);
            OK(pc_client_unmap(clients[i], held[i].id));
        }
        pc_client_close(clients[i]);
    }
    CHECK(from_peers > N_BLOCKS);
    world_end(&w);
}

/* ----------------------------------------------------- what an engine answers */

static void ask_cached(int fd, uint32_t from, uint32_t to, struct pc_run run,
                       struct pc__data_header *header)
{
    struct {
        struct pc__data_header header;
        struct pc__data_asker asker;
        uint64_t packed;
    } get = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .flags = PC__DATA_CACHED,
                        .request_id = 7, .region = HOT, .version = from, .n_runs = 1,
                        .n_blocks = (uint16_t)run.n_blocks},
             .asker = {.from_version = from, .to_version = to},
             .packed = pc__run_pack(run.first_block, run.n_blocks)};
    CHECK(send_all(fd, &get, sizeof get) && recv_all(fd, header, sizeof *header));
    CHECK(header->type == PC__DATA_BLOCKS && header->request_id == 7 && header->region == HOT &&
          (header->flags & PC__DATA_CACHED));
}

/* A peer gives what it has, at its version, and only to who takes that one. */
static void test_what_a_peer_gives(int trap)
{
    struct world w = world_of(2, trap);
    pc_client *client = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(client, &w.hot, 0, PC_MAP_PRIVATE);
    prefetch(client, &m, (struct pc_run){8, 8});
    int fd = ask_as(&w.servers[1], 0x1007);
    struct pc__data_header header;
    const struct pc_run run = {4, 8};
    static const uint32_t others[][2] = {{1, 1}, {1, 9}, {0x80000000u, 0xffffffffu}};
    for (size_t i = 0; i < N(others); i++) {
        ask_cached(fd, others[i][0], others[i][1], run, &header);
        CHECK(header.status < 0);
    }
    static const uint32_t fits[][2] = {{0, 0}, {0, 5}, {0xffffffffu, 1}};
    for (size_t i = 0; i < N(fits); i++) {
        uint64_t bits, words[512];
        ask_cached(fd, fits[i][0], fits[i][1], run, &header);
        CHECK(header.status == 0 && header.version == 0 && header.n_blocks == 8);
        CHECK(header.flags == (PC__DATA_CACHED | PC__DATA_ELSEWHERE));
        CHECK(recv_all(fd, &bits, sizeof bits) && bits == 0x0f);
        for (uint64_t b = 8; b < 12; b++) {
            CHECK(recv_all(fd, words, sizeof words));
            CHECK(wrong_word(words, HOT, 0, b, pattern) == 512);
        }
    }
    CHECK(stats_of(&w.servers[1]).peer_blocks_served == 4 * N(fits));
    close(fd);
    /* A home has its blocks as a home, not as a cache. */
    fd = ask_as(&w.servers[0], 0x1007);
    ask_cached(fd, 0, 0, run, &header);
    CHECK(header.status < 0);
    close(fd);
    OK(pc_client_unmap(client, m.id));
    pc_client_close(client);
    world_end(&w);
}

/* ------------------------------------------------------------------ choices */

static void test_replication_is_off(int trap)
{
    told.replication = PC_REPLICATION_OFF;
    struct world w = busy_world(3, trap);
    struct fake_peer *peer = fake_peer_start(w.c, 3, &w.hot, PEER_SERVES);
    fake_peer_holds(peer, &w.servers[0], 0, 0, N_BLOCKS);
    for (int i = 1; i < 3; i++) {
        pc_client *reader = attach(&w.servers[i], trap);
        read_version(&w, reader, 0);
        CHECK(stats_of(&w.servers[i]).peer_blocks_fetched == 0);
        pc_client_close(reader);
    }
    CHECK(peer->requests == 0 && stats_of(&w.servers[0]).redirected_blocks == 0);
    fake_peer_free(peer);
    world_end(&w);
}

/* Half of the choices between a home, idle or not, and one holder. */
static void test_replication_is_random(int trap)
{
    told.replication = PC_REPLICATION_RANDOM;
    struct world w = world_of(2, trap);
    struct fake_peer *peer = fake_peer_start(w.c, 2, &w.hot, PEER_SERVES);
    fake_peer_holds(peer, &w.servers[0], 0, 0, N_BLOCKS);
    pc_client *reader = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(reader, &w.hot, 0, 0);
    ask_for_each(reader, &m, N_BLOCKS, 1);
    check_version(w.c, &m, &w.hot, 0);
    uint64_t there = stats_of(&w.servers[1]).peer_blocks_fetched;
    CHECK(there == peer->blocks);
    CHECK(there > N_BLOCKS / 2 - 100 && there < N_BLOCKS / 2 + 100); /* 8.8 standard deviations */
    OK(pc_client_unmap(reader, m.id));
    pc_client_close(reader);
    fake_peer_free(peer);
    world_end(&w);
}

/* An idle home answers itself. */
static void test_an_idle_home_answers(int trap)
{
    struct world w = world_of(2, trap);
    struct fake_peer *peer = fake_peer_start(w.c, 2, &w.hot, PEER_SERVES);
    fake_peer_holds(peer, &w.servers[0], 0, 0, N_BLOCKS);
    pc_client *reader = attach(&w.servers[1], trap);
    struct pc_mapping m = map_at(reader, &w.hot, 0, 0);
    for (uint64_t b = 0; b < N_BLOCKS; b += 2) {
        prefetch(reader, &m, (struct pc_run){b, 1});
        SOON(atomic_load(&w.servers[0].engine->serving_bytes) == 0);
    }
    CHECK(peer->requests == 0);
    check_version(w.c, &m, &w.hot, 0);
    OK(pc_client_unmap(reader, m.id));
    pc_client_close(reader);
    fake_peer_free(peer);
    world_end(&w);
}

/* SplitMix64's sequence. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

#define UNBUSY ((64u << 10) - 1) /* bytes that a home may have to send and not be busy */
#define DRAWS 60000u
#define MOST_HOLDERS 7

/* How far the choices among n holders, and the home if it is one of them, are from uniform:
 * chi-square. */
static double unevenness(int replication, bool home, uint64_t home_bytes, size_t n, uint64_t seed)
{
    const uint64_t alike[MOST_HOLDERS] = {[0 ... MOST_HOLDERS - 1] = 1 << 20};
    unsigned counts[MOST_HOLDERS + 1] = {0};
    for (unsigned i = 0; i < DRAWS; i++) {
        int chosen = pc_select_peer(replication, home_bytes, alike, n, next_random(&seed));
        CHECK(chosen >= -1 && chosen < (int)n);
        counts[chosen + 1]++;
    }
    double sum = 0, mean = (double)DRAWS / (double)(n + home);
    for (size_t i = !home; i <= n; i++)
        sum += ((double)counts[i] - mean) * ((double)counts[i] - mean) / mean;
    return sum;
}

static void test_the_choice(int trap)
{
    (void)trap;
    enum { P2C = PC_REPLICATION_P2C, RANDOM = PC_REPLICATION_RANDOM, OFF = PC_REPLICATION_OFF };
    const uint64_t busy = 1 << 20, none[1] = {0}, loads[] = {5 << 20, 3 << 20, 1 << 20, 4 << 20};
    uint64_t seed = 4711;
    unsigned counts[5] = {0};
    for (int i = 0; i < 2000; i++) {
        uint64_t random = next_random(&seed);
        CHECK(pc_select_peer(OFF, UINT64_MAX, none, 1, random) == -1);
        CHECK(pc_select_peer(P2C, 0, none, 1, random) == -1); /* idle */
        for (int r = P2C; r <= OFF; r++)
            CHECK(pc_select_peer(r, busy, NULL, 0, random) == -1);
        CHECK(pc_select_peer(P2C, busy, none, 1, random) == 0); /* the holder has less */
        CHECK(pc_select_peer(P2C, busy, &loads[0], 1, random) == 0); /* and where it has more */
        CHECK(pc_select_peer(P2C, UNBUSY, loads, 4, random) == -1);
        counts[pc_select_peer(P2C, busy, loads, 4, random) + 1]++;
    }
    /* Of four, two at random: the one with least to send wins whenever it is taken (3 of 6), the
     * next one unless the first is too (2 of 6), ...; the one with most never, nor a busy home. */
    static const int order[4] = {3, 2, 4, 1};
    for (int place = 0; place < 4; place++) {
        double expected = 2000.0 * (3 - place) / 6;
        double off = counts[order[place]] - expected;
        CHECK(off < 115 && off > -115); /* five standard deviations of at most 23 */
    }
    CHECK(counts[order[3]] == 0 && counts[0] == 0);
    static const uint64_t extremes[] = {0, UINT64_MAX, UINT32_MAX, 0xffffffff00000000ull};
    for (size_t i = 0; i < N(extremes); i++)
        for (size_t n = 1; n <= 4; n++)
            for (int r = P2C; r <= RANDOM; r++) {
                int chosen = pc_select_peer(r, UINT64_MAX, loads, n, extremes[i]);
                CHECK(chosen >= -1 && chosen < (int)n);
            }
    /* 0.999999 quantiles of chi-square with 1 to 7 degrees of freedom. */
    static const double most[] = {0, 23.9, 27.6, 30.7, 33.4, 35.9, 38.3, 40.5};
    for (uint64_t s = 1; s <= 5; s++)
        for (size_t n = 1; n <= MOST_HOLDERS; n++) {
            CHECK(unevenness(RANDOM, true, 0, n, s) < most[n]);
            CHECK(unevenness(P2C, false, busy, n, s) <= (n > 1 ? most[n - 1] : 0)); /* all have as much */
        }
}

/* Of n choices for an asker, how many are this server's. */
static int choices(struct pc_engine *engine, struct pc__region *region, uint64_t server_id, int n)
{
    uint16_t asker = pc__holder_number(engine, 13);
    int its = 0;
    pthread_mutex_lock(&region->lock);
    for (int i = 0; i < n; i++) {
        struct pc__elsewhere to =
            pc__directory_choose(engine, region, asker, 0, 7, 1, (uint64_t)UNBUSY * 4);
        CHECK(to.n_blocks == 1);
        its += to.server_id == server_id;
    }
    pthread_mutex_unlock(&region->lock);
    return its;
}

/* Who waits for a block from another is sent to only where who has it has 1 MiB more to send. */
static void test_who_waits_is_a_second_choice(int trap)
{
    enum { HAS = 11, WAITS = 12, MIB_BLOCKS = 256 };
    struct world w = world_of(1, trap);
    struct pc_engine *engine = w.servers[0].engine;
    struct pc__region *region = pc__region_get(engine, w.hot.region);
    uint16_t has = pc__holder_number(engine, HAS), waits = pc__holder_number(engine, WAITS);
    pthread_mutex_lock(&region->lock);
    pc__directory_add(engine, region, has, 0, 7, 1, false);
    pc__directory_add(engine, region, waits, 0, 7, 1, true);
    pthread_mutex_unlock(&region->lock);
    CHECK(choices(engine, region, HAS, MIB_BLOCKS) == MIB_BLOCKS);
    int more = choices(engine, region, WAITS, 100); /* in turn from here on */
    CHECK(more >= 49 && more <= 51);
    pthread_mutex_lock(&region->lock);
    pc__directory_add(engine, region, has, 0, 7, 1, true); /* has it all the same */
    pc__directory_add(engine, region, waits, 0, 7, 1, false); /* it came */
    pthread_mutex_unlock(&region->lock);
    CHECK(choices(engine, region, WAITS, MIB_BLOCKS - 4) == MIB_BLOCKS - 4); /* it has less to send */
    more = choices(engine, region, HAS, 100);
    CHECK(more >= 45 && more <= 51);
    pc__region_put(engine, region);
    world_end(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(hot_blocks_come_from_peers),
        TEST(a_chain_of_peers),
        TEST(bad_peers),
        TEST(skipped_for_others),
        TEST(a_miss_is_remembered),
        TEST(gone_with_1000_requests),
        TEST(all_peers_gone),
        TEST(old_holders),
        TEST(peers_at_other_versions),
        TEST(what_a_peer_gives),
        TEST(replication_is_off),
        TEST(replication_is_random),
        TEST(an_idle_home_answers),
    };
    static const struct engine_test once[] = {
        TEST(the_choice),
        TEST(who_waits_is_a_second_choice),
    };
    int failed = 0;
    const char *only = argc > 1 ? argv[1] : NULL;
    failed += run_over_traps(tests, sizeof tests / sizeof tests[0], only);
    failed += run_with(PC_TRAP_SIGSEGV, once, sizeof once / sizeof once[0], only);
    return failed != 0;
}
