/* test_hedge.c - peers that are late: how long one is waited for, what comes then, and from whom. */
#include "tests/support/engine_main.h"
#include "tests/support/fake_peer.h"
#include "tests/support/leaks.h"

#include "engine/core/core.h"
#include "engine/miss/miss.h"

#define N_BLOCKS 512u
#define MS 1000000ull
enum { HOT = 1, COLD = 2 };

/* ---------------------------------------------------------------- how long */

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* RFC 6298, 2.2 and 2.3, in floating point. */
static double plain_timeout_ns(const uint64_t *samples, size_t n)
{
    double srtt = (double)samples[0], rttvar = srtt / 2;
    for (size_t i = 1; i < n; i++) {
        const double sample = (double)samples[i];
        rttvar = 0.75 * rttvar + 0.25 * (srtt > sample ? srtt - sample : sample - srtt);
        srtt = 0.875 * srtt + 0.125 * sample;
    }
    return srtt + (4 * rttvar > 1e6 ? 4 * rttvar : 1e6);
}

static void test_the_estimate(int trap)
{
    (void)trap;
    uint64_t seed = 11, samples[200];
    for (int round = 0; round < 500; round++) {
        struct pc__rtt rtt = {0};
        const size_t n = 1 + next_random(&seed) % 200;
        const uint64_t least = 1000 + next_random(&seed) % (50 * MS), more = next_random(&seed) % (200 * MS);
        for (size_t i = 0; i < n; i++) {
            samples[i] = least + (more ? next_random(&seed) % more : 0);
            pc__rtt_add(&rtt, samples[i]);
        }
        const double want = plain_timeout_ns(samples, n);
        const double got = (double)pc__rtt_timeout_ns(&rtt, 0);
        /* Each step rounds down by less than 3 ns, of which an eighth goes each time. */
        CHECK(got > want - 200 && got < want + 200);
    }
}

static void test_its_bounds(int trap)
{
    (void)trap;
    struct pc__rtt rtt = {0};
    const uint64_t least = PC__HEDGE_LEAST_NS;
    CHECK(pc__rtt_timeout_ns(&rtt, least) == PC__HEDGE_FIRST_NS);
    pc__rtt_add(&rtt, 0); /* a clock that has not moved is a sample too */
    CHECK(rtt.srtt_ns && pc__rtt_timeout_ns(&rtt, least) == least);
    CHECK(pc__rtt_timeout_ns(&rtt, 0) < 2 * MS); /* and the timer's own grain */
    CHECK(pc__rtt_timeout_ns(&rtt, 60000 * MS) == PC__REDIRECT_PATIENCE_NS);
    for (unsigned i = 1; i <= 5; i++) {
        pc__rtt_double(&rtt);
        CHECK(pc__rtt_timeout_ns(&rtt, least) == least << i);
    }
    for (int i = 0; i < 1000; i++)
        pc__rtt_double(&rtt);
    CHECK(pc__rtt_timeout_ns(&rtt, least) == PC__REDIRECT_PATIENCE_NS);
    pc__rtt_add(&rtt, 100000); /* a sample ends the doubling */
    CHECK(pc__rtt_timeout_ns(&rtt, least) == least);
    for (int i = 0; i < 100; i++)
        pc__rtt_add(&rtt, 400 * MS);
    const uint64_t slow_ns = pc__rtt_timeout_ns(&rtt, least);
    CHECK(slow_ns > 400 * MS && slow_ns < 410 * MS);
    pc__rtt_add(&rtt, 3600000 * MS); /* it was suspended: no more than ever */
    CHECK(pc__rtt_timeout_ns(&rtt, least) == PC__REDIRECT_PATIENCE_NS);
    static const unsigned classes[][2] = {{0, 0}, {1, 0}, {2, 1}, {4, 1}, {5, 2}, {16, 2}, {17, 3}, {64, 3}};
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++)
        CHECK(pc__rtt_class(classes[i][0]) == classes[i][1]);
}

/* Two servers as a loop knows them, without connections; what is asked of them is in `sent`. */
struct pair {
    struct pc__loop loop;
    struct pc__peer peers[2];
};
static struct pc_engine engine_of_pair;

static void pair_init(struct pair *pair)
{
    memset(pair, 0, sizeof *pair);
    pair->loop.engine = &engine_of_pair;
    pc__link_init(&pair->loop.peers);
    for (int i = 0; i < 2; i++) {
        pair->peers[i] = (struct pc__peer){.loop = &pair->loop, .server_id = 1 + (uint64_t)i};
        pc__link_push(&pair->loop.peers, &pair->peers[i].link);
        for (int k = 0; k < PC__LANES_PER_LOOP; k++)
            pc__link_init(&pair->peers[i].lanes[k].sent);
    }
}

/* Karn's rule: of a request that was sent twice nobody knows which one was answered. */
static void test_what_is_sent_twice_is_no_sample(int trap)
{
    (void)trap;
    static struct pair pair;
    pair_init(&pair);
    struct pc__peer *peer = &pair.peers[0];
    for (int times = 1; times <= 3; times++) {
        struct pc__fetch fetch = {.n_blocks = 4, .server_id = 1};
        peer->rtt[1] = (struct pc__rtt){0};
        for (int i = 0; i < times; i++)
            pc__hedge_sent(peer, &peer->lanes[0], &fetch, pc__now_ns());
        fetch.sent_ns = pc__now_ns() - 5 * MS;
        fetch.n_blocks = 0; /* they have come: the size is that of the request */
        pc__hedge_came(peer, &fetch);
        CHECK((peer->rtt[1].srtt_ns >= 5 * MS) == (times == 1));
        CHECK(!peer->rtt[0].srtt_ns && !fetch.hedge_ns); /* a home has no second source */
    }
    const struct pc__fetch made = {.n_blocks = 4, .server_id = 1}; /* of what a redirect has left */
    peer->rtt[1] = (struct pc__rtt){0};
    pc__hedge_came(peer, &made);
    CHECK(!peer->rtt[1].srtt_ns);
}

/* has_all: the other one is not wanted any more; else the one that answered is not. */
static void test_which_of_the_two_goes_on(int trap)
{
    (void)trap;
    static struct pair pair;
    for (int has_all = 0; has_all < 2; has_all++) {
        struct pc__fetch late = {.server_id = 1, .home_id = 2}, other = {.server_id = 2};
        pair_init(&pair);
        pc__link_push(&pair.peers[0].lanes[1].sent, &late.link);
        pc__link_push(&pair.peers[1].lanes[0].sent, &other.link);
        late.twin = &other;
        other.twin = &late;
        pc__hedge_answered(&pair.loop, &late, has_all);
        const struct pc__fetch *left = has_all ? &late : &other, *gone = has_all ? &other : &late;
        CHECK(!left->unwanted && !left->error && !left->twin);
        CHECK(gone->unwanted && gone->error && !gone->twin);
        CHECK(pc__hedge_yields(has_all ? &other : &late)); /* nobody is told that it fails */
        CHECK(!pc__hedge_yields(has_all ? &late : &other)); /* who waits for this one is */
        pc__hedge_answered(&pair.loop, has_all ? &late : &other, false); /* it has no twin */
        CHECK(!left->unwanted && !left->error);
    }
}

/* ------------------------------------------------------------------- from whom */

/* Server 0 is the home, and busy; 1 reads; 2 is no engine, and has all of it. */
struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *home, *reader;
    pc_client *builder, *client;
    struct pc_region_info hot, cold;
    struct hog hog;
    struct fake_peer *peer;
    struct pc_mapping m;
};

static struct world world_of(int trap, int acts)
{
    struct world w = {.counts = process_counts(), .c = cluster_new(2)};
    told.fetch_timeout_ns = 60 * SECOND; /* nobody closes a connection because it is silent */
    server_start(w.c, 0, "hedge", -1);
    server_start(w.c, 1, "hedge", -1);
    w.home = &w.c->servers[0];
    w.reader = &w.c->servers[1];
    w.builder = attach(w.home, trap);
    w.hot = build(w.c, w.home, w.builder, HOT, (uint64_t)N_BLOCKS << 12, 0);
    w.cold = build(w.c, w.home, w.builder, COLD, (uint64_t)HOG_BLOCKS << 12, 0);
    w.hog = hog_start(w.home, &w.cold);
    w.peer = fake_peer_start(w.c, 2, &w.hot, acts);
    fake_peer_holds(w.peer, w.home, 0, 0, N_BLOCKS);
    w.client = attach(w.reader, trap);
    w.m = map_at(w.client, &w.hot, 0, 0);
    return w;
}

static void read_blocks(const struct world *w, uint64_t first, uint64_t n)
{
    const struct pc_run run = {first, n};
    OK(pc_client_prefetch(w->client, w->m.id, &run, 1, 1, WAIT));
}

static uint64_t hedges(const struct world *w)
{
    return atomic_load(&w->reader->engine->count.hedges);
}

/* Whatever came from whom: each block once, and right; nobody was told of a failure. */
static void world_end(struct world *w)
{
    check_version(w->c, &w->m, &w->hot, 0);
    const struct pc_engine_stats s = stats_of(w->reader);
    CHECK(s.blocks_fetched == N_BLOCKS);
    CHECK(s.bad_messages == 0 && s.fetch_failed == 0 && s.faults_failed == 0);
    OK(pc_client_unmap(w->client, w->m.id));
    pc_client_close(w->client);
    hog_stop(&w->hog);
    pc_client_close(w->builder);
    fake_peer_free(w->peer);
    SOON(stats_of(w->reader).mappings == 0 && stats_of(w->reader).faults_waiting == 0);
    cluster_end(w->c, &w->counts);
}

/* It takes requests and says nothing: its home gives what it was to give, and the connection stays. */
static void test_a_silent_peer_is_not_waited_for(int trap)
{
    struct world w = world_of(trap, PEER_SERVES);
    for (uint64_t b = 0; b < 64; b++)
        read_blocks(&w, b, 1); /* so it is known how quick it is */
    CHECK(stats_of(w.reader).peer_blocks_fetched > 0);
    w.peer->acts = PEER_HOARDS;
    const uint64_t before = hedges(&w), began_ns = now_ns();
    read_blocks(&w, 64, 1);
    const uint64_t took_ns = now_ns() - began_ns;
    CHECK(hedges(&w) == before + 1);
    CHECK(took_ns < PC__REDIRECT_PATIENCE_NS);
    /* It is avoided meanwhile: its home is asked at once, whatever the home says. */
    const unsigned asked = w.peer->requests;
    const uint64_t again_ns = now_ns();
    for (uint64_t b = 65; b < 128; b++)
        read_blocks(&w, b, 1);
    if (now_ns() - again_ns < PC__REDIRECT_PATIENCE_NS / 2) /* on a busy machine it is tried again */
        CHECK(w.peer->requests == asked && hedges(&w) == before + 1);
    CHECK(stats_of(w.reader).fetch_retries == 0); /* no connection was closed */
    world_end(&w);
}

/* Its answer comes when the home's is there: nobody waits for it, and it is trusted again. */
static void test_a_late_answer_is_thrown_away(int trap)
{
    struct world w = world_of(trap, PEER_SERVES);
    for (uint64_t b = 0; b < 32; b++)
        read_blocks(&w, b, 1);
    w.peer->late_us = 1500000;
    const uint64_t before = hedges(&w);
    const struct pc_engine_stats then = stats_of(w.reader);
    read_blocks(&w, 32, 4);
    CHECK(hedges(&w) > before);
    CHECK(stats_of(w.reader).peer_blocks_fetched == then.peer_blocks_fetched);
    w.peer->late_us = 0;
    const unsigned asked = w.peer->requests;
    SOON(stats_of(w.reader).fetches_in_flight == 0); /* the late one has come, and is gone */
    for (uint64_t b = 36; b < 100; b++)
        read_blocks(&w, b, 1);
    CHECK(w.peer->requests > asked);
    CHECK(stats_of(w.reader).peer_blocks_fetched > then.peer_blocks_fetched);
    CHECK(stats_of(w.reader).fetch_retries == 0);
    world_end(&w);
}

/* Both answer at about the same time, again and again, and the peer may have only half. */
static void race(int trap, int acts)
{
    struct world w = world_of(trap, PEER_SERVES);
    w.reader->engine->hedge_least_ns = 1;
    uint64_t seed = 5;
    for (uint64_t b = 0; b < 32; b++)
        read_blocks(&w, b, 1);
    w.peer->acts = acts;
    for (uint64_t b = 32; b < N_BLOCKS;) {
        const uint64_t n = 1 + next_random(&seed) % 8, end = b + n < N_BLOCKS ? b + n : N_BLOCKS;
        w.peer->late_us = next_random(&seed) % 16 ? 0 : (unsigned)(next_random(&seed) % 100000);
        read_blocks(&w, b, end - b);
        b = end;
        SOON(stats_of(w.reader).fetches_in_flight == 0); /* it has answered: it is not avoided */
    }
    CHECK(hedges(&w) > 0);
    world_end(&w);
}

static void test_the_first_answer_is_used(int trap)
{
    race(trap, PEER_SERVES);
}

static void test_half_an_answer_is_none(int trap)
{
    race(trap, PEER_HAS_HALF);
    race(trap, PEER_HAS_NONE);
    race(trap, PEER_REFUSES);
}

/* It goes while its home is asked too. */
static void test_the_late_peer_goes(int trap)
{
    struct world w = world_of(trap, PEER_HOARDS);
    w.reader->engine->hedge_least_ns = 1;
    for (uint64_t b = 0; b < 8; b++)
        read_blocks(&w, b, 1);
    CHECK(hedges(&w) > 0);
    fake_peer_vanish(w.peer);
    read_blocks(&w, 0, N_BLOCKS);
    SOON(stats_of(w.reader).fetches_in_flight == 0);
    world_end(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(a_silent_peer_is_not_waited_for),
        TEST(a_late_answer_is_thrown_away),
        TEST(the_first_answer_is_used),
        TEST(half_an_answer_is_none),
        TEST(the_late_peer_goes),
    };
    static const struct engine_test once[] = {
        TEST(the_estimate),
        TEST(its_bounds),
        TEST(what_is_sent_twice_is_no_sample),
        TEST(which_of_the_two_goes_on),
    };
    int failed = 0;
    const char *only = argc > 1 ? argv[1] : NULL;
    failed += run_over_traps(tests, sizeof tests / sizeof tests[0], only);
    failed += run_with(PC_TRAP_SIGSEGV, once, sizeof once / sizeof once[0], only);
    return failed != 0;
}
