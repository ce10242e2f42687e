/* test_repair.c - blocks that other members of a group make again, or mirrors have: where the home is
 * lost, or late, or has lost them; and which of several servers is asked. Over both traps; the tests answer what
 * the registry would. */
#include "engine/checks/checks.h"
#include "engine/repair/repair.h"
#include "tests/support/engine_main.h"
#include "tests/support/leaks.h"

#define N_BLOCKS 256u
#define SHORT_BLOCKS 100u /* of region 2, where it is shorter */
enum { HOME, OTHER, THIRD, READER, N_SERVERS };
enum { XOR, MIRROR };

/* Region 1 is homed at HOME. XOR: region 2 at OTHER, and region 3, at THIRD, is the XOR of both. MIRROR:
 * region 3, at THIRD, has the bytes of region 1. READER knows that of region 1. */
struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers, *reader;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info, other;
    struct pc_mapping m;
};

static bool is_on_disk; /* what is made from now on */

static uint64_t xor_pattern(uint64_t offset, uint64_t other_bytes)
{
    return pattern(1, offset) ^ (offset < other_bytes ? pattern(2, offset) : 0);
}

/* Filled from data_from on; of region 3 with what the others make it. */
static struct pc_region_info make(struct world *w, int at, uint64_t id, uint64_t bytes,
                                  uint64_t data_from, int kind)
{
    const struct pc_region_info info = {.region = id, .base_address = PC_WINDOW_BEGIN + (id << 28),
                                        .length_bytes = bytes, .has_repair = id == 1};
    int fd = -1;
    uint64_t *words = malloc(bytes - data_from);
    for (uint64_t i = data_from; i < bytes; i += 8)
        words[(i - data_from) / 8] = id < 3           ? pattern(id, i)
                                     : kind == MIRROR ? pattern(1, i)
                                                      : xor_pattern(i, w->other.length_bytes);
    OK(pc_client_create(w->clients[at], id, info.base_address, bytes, is_on_disk ? PC_MEDIUM_DISK : MEDIUM, WAIT,
                        &fd));
    OK(pc_copy_in(fd, data_from, words, bytes - data_from, 1));
    close(fd);
    free(words);
    OK(pc_client_seal(w->clients[at], id, WAIT));
    publish(w->c, info, w->servers[at].id);
    return info;
}

static void say(struct world *w, size_t n, int kind)
{
    const struct known_repair repair = {
        .region = 1, .n = n, .is_mirror = kind == MIRROR,
        .members = {{3, 0, w->servers[THIRD].id}, {2, 0, w->servers[OTHER].id}}};
    pthread_mutex_lock(&w->c->lock);
    w->c->repairs[0] = repair;
    pthread_mutex_unlock(&w->c->lock);
}

static struct world world_from(int trap, int kind, uint64_t other_blocks, uint64_t data_from,
                               bool is_relayed)
{
    struct world w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "repair")};
    w.servers = w.c->servers;
    w.reader = &w.servers[READER];
    w.reader->hold_home = true;
    for (int i = 0; i < N_SERVERS; i++) {
        w.servers[i].is_relayed = is_relayed;
        w.clients[i] = attach(&w.servers[i], trap);
    }
    w.info = make(&w, HOME, 1, (uint64_t)N_BLOCKS << 12, data_from, kind);
    w.other = make(&w, OTHER, 2, other_blocks << 12, data_from, kind);
    (void)make(&w, THIRD, 3, (uint64_t)N_BLOCKS << 12, data_from, kind);
    say(&w, kind == MIRROR ? 1 : 2, kind);
    w.m = map_at(w.clients[READER], &w.info, 0, 0);
    return w;
}

static struct world world_of(int trap, int kind, uint64_t other_blocks)
{
    return world_from(trap, kind, other_blocks, 0, false);
}

static void lose(struct world *w, int i)
{
    pc_client_close(w->clients[i]);
    w->clients[i] = NULL;
    w->servers[i].lost = true;
    server_stop(w->c, i);
}

static void world_end(struct world *w)
{
    OK(pc_client_unmap(w->clients[READER], w->m.id));
    clients_close(w->clients, N_SERVERS);
    for (int i = 0; i < N_SERVERS; i++)
        CHECK(!w->servers[i].engine || stats_of(&w->servers[i]).bad_messages == 0);
    cluster_end(w->c, &w->counts);
}

static void be_late(struct world *w, int i, unsigned ms)
{
    *w->servers[i].late_us = ms * 1000;
}

static struct pc_engine_stats stats(const struct world *w)
{
    return stats_of(w->reader);
}

static int prefetch(struct world *w, uint64_t first, uint64_t n)
{
    const struct pc_run run = {first, n};
    return pc_client_prefetch(w->clients[READER], w->m.id, &run, 1, 1, WAIT);
}

static void check_touch(const struct world *w, uint64_t block)
{
    CHECK(at(&w->m, (block << 12) + 16) == pattern(1, (block << 12) + 16));
}

/* A touch, or a prefetch, on a thread of its own. */
struct question {
    struct world *w;
    uint64_t block, n_blocks; /* n_blocks 0: it is touched */
    int rc;
    pthread_t thread;
    _Atomic bool done;
};

static void *put_question(void *arg)
{
    struct question *q = arg;
    if (q->n_blocks)
        q->rc = prefetch(q->w, q->block, q->n_blocks);
    else
        check_touch(q->w, q->block);
    q->done = true;
    return NULL;
}

static void ask(struct question *q, struct world *w, uint64_t block, uint64_t n_blocks)
{
    *q = (struct question){.w = w, .block = block, .n_blocks = n_blocks};
    CHECK(!pthread_create(&q->thread, NULL, put_question, q));
}

static void join(struct question *q)
{
    SOON(q->done);
    pthread_join(q->thread, NULL);
    OK(q->rc);
}

/* ------------------------------------------------------------- the home is lost */

static void check_degraded(struct world *w)
{
    lose(w, HOME);
    check_touch(w, 77);
    check_touch(w, 255);
    OK(prefetch(w, 0, N_BLOCKS));
    CHECK(stats(w).degraded_blocks == N_BLOCKS);
    check_version(w->c, &w->m, &w->info, 0);
    CHECK(stats(w).faults_failed == 0 && stats(w).fetch_failed == 0);
    CHECK(w->reader->repairs_asked == 1);
}

static void test_others_make_it_again(int trap)
{
    struct world w = world_of(trap, XOR, N_BLOCKS);
    check_degraded(&w);
    world_end(&w);
}

static void test_a_member_is_shorter(int trap)
{
    struct world w = world_of(trap, XOR, SHORT_BLOCKS);
    check_degraded(&w);
    world_end(&w);
}

static void test_a_mirror_has_it(int trap)
{
    struct world w = world_of(trap, MIRROR, 1);
    lose(&w, HOME);
    check_touch(&w, 77);
    OK(prefetch(&w, 0, N_BLOCKS));
    CHECK(stats(&w).degraded_blocks + stats(&w).mirror_blocks == N_BLOCKS);
    check_version(w.c, &w.m, &w.info, 0);
    world_end(&w);
}

/* What members have now is of no use: it is their versions that the registry names. */
static void test_members_at_their_versions(int trap)
{
    static const struct pc_run some[] = {{3, 1}, {100, 50}};
    struct world w = world_of(trap, XOR, N_BLOCKS);
    CHECK(commit(w.c, &w.servers[OTHER], w.clients[OTHER], &w.other, 0, some, 2) == 1);
    check_degraded(&w);
    world_end(&w);
}

/* Members that are homed on the reader's own node. */
static void test_a_member_is_here(int trap)
{
    struct world w = world_of(trap, XOR, SHORT_BLOCKS);
    struct pc_region_info here = w.other;
    const struct pc_segment all = {0, here.length_bytes, 0};
    uint64_t *words = malloc(here.length_bytes);
    fill_pattern(words, 2, 0, here.length_bytes);
    struct pc_segment bytes = all;
    bytes.address = (uint64_t)(uintptr_t)words;
    here.region = 4;
    here.base_address = PC_WINDOW_BEGIN + (4ull << 28);
    int fd = -1;
    OK(pc_engine_create_shared(w.reader->engine, &here, &bytes, 1, &fd));
    close(fd);
    OK(pc_engine_seal(w.reader->engine, 4));
    pthread_mutex_lock(&w.c->lock);
    w.c->repairs[0].members[1] = (struct pc_repair_member){4, 0, w.reader->id};
    pthread_mutex_unlock(&w.c->lock);
    check_degraded(&w);
    world_end(&w);
    free(words);
}

/* Holes of members travel as such, and a block of zeros stays a hole. */
static void test_holes(int trap)
{
    struct world w = world_from(trap, XOR, N_BLOCKS, 128u << 12, false);
    lose(&w, HOME);
    OK(prefetch(&w, 0, 128));
    CHECK(stats(&w).degraded_blocks == 128 && stats(&w).zero_blocks == 128);
    CHECK(stats(&w).bytes_received < 64u << 10);
    for (uint64_t b = 0; b < 128; b++)
        CHECK(*block_at(&w.m, b) == 0);
    check_touch(&w, 200);
    world_end(&w);
}

/* The home lives, and does not know the region. */
static void test_a_home_that_knows_nothing(int trap)
{
    struct world w = world_of(trap, XOR, N_BLOCKS);
    OK(pc_engine_retire(w.servers[HOME].engine, 1, 1));
    OK(prefetch(&w, 0, N_BLOCKS));
    CHECK(stats(&w).degraded_blocks == N_BLOCKS);
    check_version(w.c, &w.m, &w.info, 0);
    world_end(&w);
}

/* That server is the home from now on. */
static void name_home(struct world *w, int i, uint64_t *memory)
{
    const struct pc_segment all = {0, w->info.length_bytes, (uint64_t)(uintptr_t)memory};
    int fd = -1;
    fill_pattern(memory, 1, 0, w->info.length_bytes);
    OK(pc_engine_create_shared(w->servers[i].engine, &w->info, &all, 1, &fd));
    close(fd);
    OK(pc_engine_seal(w->servers[i].engine, 1));
    OK(pc_engine_set_homes(w->reader->engine, 1, &w->servers[i].id, 1));
}

/* Then it is as if there were none: who waits gets it from the next home. */
static void test_a_member_is_lost_too(int trap)
{
    for (uint64_t n_blocks = 0; n_blocks <= N_BLOCKS; n_blocks += N_BLOCKS) {
        struct world w = world_of(trap, XOR, N_BLOCKS);
        uint64_t *memory = malloc(w.info.length_bytes);
        struct question q;
        lose(&w, HOME);
        lose(&w, OTHER);
        ask(&q, &w, 0, n_blocks);
        SOON(w.reader->repairs_asked >= 2); /* it may be others by now */
        CHECK(!q.done);
        name_home(&w, THIRD, memory);
        join(&q);
        check_version(w.c, &w.m, &w.info, 0);
        CHECK(stats(&w).degraded_blocks == 0 && stats(&w).faults_failed == 0);
        world_end(&w);
        free(memory);
    }
}

/* The answer is no: it is asked again after a pause, and not before. */
static void test_nobody_is_known_at_first(int trap)
{
    struct world w = world_of(trap, XOR, N_BLOCKS);
    struct question q;
    say(&w, 0, XOR);
    lose(&w, HOME);
    ask(&q, &w, 9, 0);
    SOON(w.reader->repairs_asked >= 1);
    usleep(1200000);
    CHECK(!q.done && w.reader->repairs_asked >= 2 && w.reader->repairs_asked <= 4);
    say(&w, 2, XOR);
    join(&q);
    check_version(w.c, &w.m, &w.info, 0);
    CHECK(stats(&w).degraded_blocks == N_BLOCKS);
    world_end(&w);
}

/* A region of which nothing of that kind was said: nobody asks. */
static void test_others_ask_for_nothing(int trap)
{
    struct world w = world_of(trap, XOR, N_BLOCKS);
    OK(pc_engine_region_has_repair(w.reader->engine, 1, 0));
    struct question q;
    lose(&w, HOME);
    ask(&q, &w, 9, 1);
    SOON(w.reader->homes_asked > 0);
    usleep(100000);
    CHECK(!q.done && w.reader->repairs_asked == 0);
    OK(pc_engine_home_lost(w.reader->engine, 1, w.servers[HOME].id, PC_ERR_HOME_LOST));
    SOON(q.done);
    pthread_join(q.thread, NULL);
    CHECK(q.rc == PC_ERR_HOME_LOST);
    world_end(&w);
}

/* The reader's server stops at any moment of a repair: who waits is gone, and nothing stays. */
static void stop_after(int trap, int kind, useconds_t us)
{
    struct world w = world_from(trap, kind, N_BLOCKS, 0, true);
    int status;
    be_late(&w, kind == XOR ? OTHER : THIRD, 3);
    if (kind == XOR) {
        lose(&w, HOME);
    } else { /* half of it waits for the mirror alone */
        OK(prefetch(&w, 0, 1));
        SOON(w.reader->repairs_asked == 1);
        be_late(&w, HOME, 3);
    }
    fflush(NULL);
    const uint64_t requests = stats(&w).fetch_requests;
    const pid_t child = fork();
    if (!child) {
        munmap((void *)(uintptr_t)w.m.address, w.m.length_bytes); /* the guard of the parent's map */
        w.clients[READER] = attach(w.reader, trap);
        w.m = map_at(w.clients[READER], &w.info, 0, 0);
        (void)prefetch(&w, 1, N_BLOCKS - 1);
        _exit(0);
    }
    SOON(stats(&w).fetch_requests > requests);
    usleep(us);
    CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
    OK(pc_client_unmap(w.clients[READER], w.m.id));
    clients_close(w.clients, N_SERVERS);
    server_stop(w.c, READER);
    be_late(&w, OTHER, 0);
    cluster_stop(w.c);
    check_process_counts(&w.counts);
}

static void test_it_stops_meanwhile(int trap)
{
    for (useconds_t us = 0; us < 12000; us += 1500) {
        stop_after(trap, XOR, us);
        stop_after(trap, MIRROR, us);
    }
}

/* ------------------------------------------------------------- the home has lost blocks */

/* As if they did not have their checksums. Before a client of that server maps the region. */
static void damage(struct world *w, int i, uint64_t id, const struct pc_run *runs, size_t n_runs)
{
    pc_engine *engine = w->servers[i].engine;
    struct pc__region *region = pc__region_get(engine, id);
    struct pc__unchecked *unchecked = calloc(1, sizeof *unchecked);
    OK(pc__blockset_init(&unchecked->verified, N_BLOCKS));
    OK(pc__blockset_init(&unchecked->damaged, N_BLOCKS));
    for (size_t k = 0; k < n_runs; k++)
        CHECK(pc__blockset_add(&unchecked->damaged, runs[k].first_block, runs[k].n_blocks) >= 0);
    pthread_mutex_lock(&region->lock);
    struct pc__generation *base = pc__home_base_generation(region);
    if (base)
        pc__generation_drop(engine, region, base);
    CHECK(!region->home->unchecked);
    region->home->unchecked = unchecked;
    region->home->is_unchecked = true;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
}

/* The reader is a client of the home's own server from here on. */
static void read_at_home(struct world *w)
{
    struct known_repair *repair = &w->c->repairs[0];
    OK(pc_client_unmap(w->clients[READER], w->m.id));
    pc_client *far = w->clients[READER];
    w->clients[READER] = w->clients[HOME];
    w->clients[HOME] = far;
    w->reader = &w->servers[HOME];
    OK(pc_engine_region_has_repair(w->reader->engine, repair->region, 1));
    w->m = map_at(w->clients[READER], &w->info, 0, 0);
}

static struct world world_of_damage(int trap, int kind, bool at_home, const struct pc_run *runs, size_t n_runs)
{
    is_on_disk = true; /* as homes of earlier sessions are */
    struct world w = world_from(trap, kind, SHORT_BLOCKS, 0, true);
    is_on_disk = false;
    damage(&w, HOME, 1, runs, n_runs);
    if (at_home)
        read_at_home(&w);
    return w;
}

/* Of any node, and also where the home's whole file is no more what it was. */
static void test_a_home_that_has_lost_blocks(int trap)
{
    static const struct pc_run some[] = {{5, 1}, {7, 3}, {64, 64}, {200, 1}}, all = {0, N_BLOCKS};
    for (int i = 0; i < 8; i++) {
        const bool at_home = i & 1, is_all = i & 4;
        const int kind = i & 2 ? MIRROR : XOR;
        struct world w = world_of_damage(trap, kind, at_home, is_all ? &all : some, is_all ? 1 : 4);
        const uint64_t n = is_all ? N_BLOCKS : 69;
        check_touch(&w, 5);
        check_touch(&w, 77);
        OK(prefetch(&w, 0, N_BLOCKS));
        const uint64_t repaired = stats(&w).degraded_blocks;
        CHECK(at_home || kind == MIRROR ? repaired <= n : repaired >= n); /* others are hedges, or of a mirror */
        CHECK(!at_home || repaired == n);
        check_version(w.c, &w.m, &w.info, 0);
        CHECK(stats(&w).fetch_failed == 0 && stats(&w).faults_failed == 0);
        world_end(&w);
    }
}

/* They are asked again for a while, and then who waits hears of it; what lies around it comes. */
static void test_others_have_lost_it_too(int trap)
{
    static const struct pc_run some = {5, 3}, six = {6, 1};
    for (int at_home = 0; at_home < 2; at_home++) {
        struct world w = world_of_damage(trap, at_home ? XOR : MIRROR, at_home, &some, 1);
        const uint64_t began_ns = now_ns();
        damage(&w, THIRD, 3, &six, 1);
        CHECK(prefetch(&w, 0, 64) == PC_ERR_HOME_LOST);
        CHECK(now_ns() - began_ns < 5 * SECOND); /* before its deadline */
        for (uint64_t b = 0; b < 64; b++)
            if (b != 6)
                check_touch(&w, b);
        CHECK(stats(&w).fetch_failed == 1);
        world_end(&w);
    }
}

/* The registry knows of none, now or for good. */
static void test_nobody_is_known_who_has_it(int trap)
{
    static const struct pc_run some = {5, 1};
    struct world w = world_of_damage(trap, XOR, true, &some, 1);
    struct question q;
    const uint64_t began_ns = now_ns();
    say(&w, 0, XOR);
    CHECK(prefetch(&w, 0, 16) == PC_ERR_HOME_LOST);
    CHECK(w.reader->repairs_asked > 1 && now_ns() - began_ns < 5 * SECOND); /* before its deadline */
    ask(&q, &w, 5, 1);
    usleep(700000);
    CHECK(!q.done);
    say(&w, 2, XOR);
    join(&q);
    check_version(w.c, &w.m, &w.info, 0);
    world_end(&w);
}

/* A member does not answer: who waits does so until its own deadline, and no longer. */
static void test_a_member_is_late_for_a_lost_block(int trap)
{
    static const struct pc_run some = {5, 1};
    const uint64_t usual_ns = told.fault_timeout_ns;
    told.fault_timeout_ns = 2 * SECOND;
    struct world w = world_of_damage(trap, XOR, true, &some, 1);
    told.fault_timeout_ns = usual_ns;
    be_late(&w, OTHER, 2600);
    const uint64_t began_ns = now_ns();
    CHECK(prefetch(&w, 0, 16) == PC_ERR_HOME_LOST);
    CHECK(now_ns() - began_ns > 2 * SECOND - 1 && now_ns() - began_ns < 5 * SECOND / 2);
    be_late(&w, OTHER, 0);
    OK(prefetch(&w, 0, 16));
    check_version(w.c, &w.m, &w.info, 0);
    world_end(&w);
}

/* The server stops while others are asked. */
static void test_it_stops_with_a_lost_block(int trap)
{
    static const struct pc_run some = {0, 16};
    for (int at_home = 0; at_home < 2; at_home++) {
        struct world w = world_of_damage(trap, XOR, at_home, &some, 1);
        be_late(&w, OTHER, 500);
        CHECK(pc_client_prefetch(w.clients[READER], w.m.id, &some, 1, 1, SECOND / 10) == PC_ERR_TIMEOUT);
        CHECK(w.reader->repairs_asked == 1 && stats(&w).fetch_failed == 0);
        OK(pc_client_unmap(w.clients[READER], w.m.id));
        clients_close(w.clients, N_SERVERS);
        server_stop(w.c, at_home ? HOME : READER);
        be_late(&w, OTHER, 0);
        cluster_stop(w.c);
        check_process_counts(&w.counts);
    }
}

/* ------------------------------------------------------------------- hedges */

/* The home's answer comes when the blocks are here already, and maybe changed: it is thrown away. */
static void test_a_hedge_wins(int trap)
{
    static const struct pc_run some[] = {{3, 1}, {100, 50}};
    struct world w = world_from(trap, XOR, N_BLOCKS, 0, true);
    OK(prefetch(&w, 0, 1)); /* there are connections, and the first hedge is still to come */
    be_late(&w, HOME, 1500);
    const uint64_t began_ns = now_ns();
    check_touch(&w, 128);
    CHECK(now_ns() - began_ns < SECOND);
    CHECK(stats(&w).hedges == 1 && stats(&w).hedges_won == 1 && stats(&w).degraded_blocks > 0);
    CHECK(stats(&w).fetches_in_flight == 1); /* and its generation may go on to the next version */
    CHECK(commit(w.c, &w.servers[HOME], w.clients[HOME], &w.info, 0, some, 2) == 1);
    OK(pc_client_unmap(w.clients[READER], w.m.id));
    w.m = map_at(w.clients[READER], &w.info, 1, 0);
    SOON(stats(&w).fetches_in_flight == 0);
    be_late(&w, HOME, 0);
    check_version(w.c, &w.m, &w.info, 1);
    CHECK(stats(&w).fetch_failed == 0);
    world_end(&w);
}

/* It was asked for as bulk: from the touch on it is as if the thread had asked itself. */
static void test_a_touch_of_what_is_on_its_way(int trap)
{
    struct world w = world_from(trap, XOR, N_BLOCKS, 0, true);
    struct question ahead;
    OK(prefetch(&w, 0, 1));
    const uint64_t requests = stats(&w).fetch_requests;
    be_late(&w, HOME, 2500); /* a prefetch has more patience */
    ask(&ahead, &w, 64, 64);
    SOON(stats(&w).fetch_requests > requests);
    check_touch(&w, 100);
    CHECK(stats(&w).hedges == 1 && stats(&w).hedges_won == 1);
    CHECK(stats(&w).degraded_blocks == 64);
    join(&ahead);
    SOON(stats(&w).fetches_in_flight == 0);
    be_late(&w, HOME, 0);
    check_version(w.c, &w.m, &w.info, 0);
    world_end(&w);
}

/* The connection stays, and nothing comes: the others are asked for all of it, though hedges are few. */
static void test_a_silent_home(int trap)
{
    const uint64_t usual_ns = told.fetch_timeout_ns;
    told.fetch_timeout_ns = 60 * SECOND; /* nobody closes it */
    struct world w = world_from(trap, XOR, N_BLOCKS, 0, true);
    OK(prefetch(&w, 0, 1));
    be_late(&w, HOME, 9000);
    OK(prefetch(&w, 64, N_BLOCKS - 64));
    CHECK(stats(&w).degraded_blocks >= N_BLOCKS - 64 && stats(&w).hedges_won >= 3);
    for (uint64_t b = 1; b < 64; b += 2)
        check_touch(&w, b);
    CHECK(stats(&w).fetch_failed == 0 && stats(&w).faults_failed == 0 && stats(&w).fetch_retries == 0);
    be_late(&w, HOME, 0);
    world_end(&w);
    told.fetch_timeout_ns = usual_ns;
}

/* The home is faster after all: what the others send is thrown away. */
static void test_a_hedge_loses(int trap)
{
    struct world w = world_from(trap, XOR, N_BLOCKS, 0, true);
    be_late(&w, HOME, 400);
    be_late(&w, OTHER, 1200);
    check_touch(&w, 128);
    CHECK(stats(&w).hedges == 1 && stats(&w).hedges_won == 0);
    SOON(stats(&w).fetches_in_flight == 0);
    CHECK(stats(&w).degraded_blocks == 0);
    be_late(&w, HOME, 0);
    be_late(&w, OTHER, 0);
    check_version(w.c, &w.m, &w.info, 0);
    CHECK(stats(&w).degraded_blocks == 0 || stats(&w).hedges > 1); /* another, on a busy machine */
    world_end(&w);
}

/* The first late answer is hedged. The next is not: that is one of ten requests at most, of a home that
 * answers. */
static void test_hedges_are_few(int trap)
{
    struct world w = world_from(trap, XOR, N_BLOCKS, 0, true);
    OK(prefetch(&w, 0, 1));
    be_late(&w, HOME, 300); /* each of two requests: the home is not silent for PC__HEDGE_SILENT_NS */
    check_touch(&w, 64);
    CHECK(stats(&w).hedges == 1 && stats(&w).hedges_won == 1);
    const uint64_t began_ns = now_ns();
    check_touch(&w, 192);
    CHECK(now_ns() - began_ns > SECOND / 4); /* and by then it would have been */
    CHECK(stats(&w).hedges == 1);
    be_late(&w, HOME, 0);
    check_version(w.c, &w.m, &w.info, 0);
    world_end(&w);
}

/* Nobody knows yet what became of the home: each thread that waits is helped, and no server is burdened
 * twice. */
static void test_a_home_that_is_not_reached(int trap)
{
    struct world w = world_of(trap, XOR, N_BLOCKS);
    w.servers[HOME].unreached = true;
    for (uint64_t b = 0; b < N_BLOCKS; b += 50) {
        const uint64_t began_ns = now_ns();
        check_touch(&w, b);
        CHECK(now_ns() - began_ns < 3 * SECOND);
    }
    CHECK(stats(&w).hedges == 0 && stats(&w).degraded_blocks > 0);
    w.servers[HOME].unreached = false;
    check_version(w.c, &w.m, &w.info, 0);
    CHECK(stats(&w).faults_failed == 0);
    world_end(&w);
}

/* Each of the servers is late in turn, under readers, and at last the home is lost. */
static void test_home_and_members_change_places(int trap)
{
    struct world w = world_from(trap, XOR, SHORT_BLOCKS, 0, true);
    struct question q[8];
    for (unsigned i = 0; i < 8; i++)
        ask(&q[i], &w, (i * 37) % N_BLOCKS, i % 2 ? 0 : 20);
    for (int i = 0; i < 3; i++) {
        be_late(&w, i, 60);
        usleep(50000);
        be_late(&w, i, 0);
    }
    lose(&w, HOME);
    for (unsigned i = 0; i < 8; i++)
        join(&q[i]);
    OK(prefetch(&w, 0, N_BLOCKS));
    check_version(w.c, &w.m, &w.info, 0);
    CHECK(stats(&w).faults_failed == 0);
    world_end(&w);
}

/* ------------------------------------------------------------------ mirrors */

static void test_mirrors_share_the_reads(int trap)
{
    struct world w = world_of(trap, MIRROR, 1);
    check_touch(&w, 0); /* asks */
    SOON(w.reader->repairs_asked == 1);
    usleep(50000);
    for (uint64_t b = 64; b < N_BLOCKS; b += 2) {
        struct pc_run runs[] = {{b, 1}};
        OK(pc_client_prefetch(w.clients[READER], w.m.id, runs, 1, 1, WAIT));
    }
    OK(prefetch(&w, 0, N_BLOCKS));
    check_version(w.c, &w.m, &w.info, 0);
    const uint64_t mirror = stats(&w).mirror_blocks;
    CHECK(stats_of(&w.servers[THIRD]).blocks_served == mirror);
    CHECK(mirror > N_BLOCKS / 5 && mirror < N_BLOCKS * 4 / 5);
    CHECK(stats(&w).degraded_blocks == 0 && stats(&w).blocks_fetched == N_BLOCKS);
    world_end(&w);
}

/* A mirror that is lost, and one that does not answer: the home is asked. */
static void test_a_mirror_fails(int trap)
{
    struct world w = world_from(trap, MIRROR, 1, 0, true);
    check_touch(&w, 0);
    SOON(w.reader->repairs_asked == 1);
    usleep(50000);
    be_late(&w, THIRD, 1000);
    for (uint64_t b = 40; b < 60; b++)
        check_touch(&w, b * 4);
    CHECK(stats(&w).hedges_won <= stats(&w).hedges);
    lose(&w, THIRD);
    OK(prefetch(&w, 0, N_BLOCKS));
    check_version(w.c, &w.m, &w.info, 0);
    CHECK(stats(&w).fetch_failed == 0 && stats(&w).faults_failed == 0);
    world_end(&w);
}

/* --------------------------------------------------------------- pure functions */

static void test_when_and_how_often(int trap)
{
    (void)trap;
    struct pc__rtt near = {0};
    CHECK(pc__hedge_after_ns(&near, 0) == PC__HEDGE_UNKNOWN_NS);
    pc__rtt_add(&near, 50000);
    CHECK(pc__hedge_after_ns(&near, 0) == PC__HEDGE_FLOOR_NS);
    CHECK(pc__hedge_after_ns(&near, 1) == 2 * PC__HEDGE_FLOOR_NS);
    CHECK(pc__hedge_after_ns(&near, 99) == PC__HEDGE_FLOOR_NS << PC__HEDGE_MOST_DOUBLED);
    struct pc__rtt far = {0};
    pc__rtt_add(&far, 30000000);
    CHECK(pc__hedge_after_ns(&far, 0) == 90000000); /* SRTT + 4 RTTVAR of one sample: three times it */

    struct pc__hedge_budget budget = {0};
    unsigned taken = 0;
    for (unsigned i = 0; i < 10000; i++) {
        pc__hedge_request(&budget);
        taken += pc__hedge_take(&budget);
    }
    CHECK(taken == 1000);
    for (unsigned i = 0; i < 10000; i++)
        pc__hedge_request(&budget);
    for (taken = 0; pc__hedge_take(&budget); taken++)
        continue;
    CHECK(taken == PC__HEDGE_MOST_SAVED);
}

static void test_the_less_busy_of_two(int trap)
{
    (void)trap;
    const uint64_t busy[] = {100, 0}, alike[] = {7, 7, 7}, one_is[] = {0, 0, 9};
    unsigned chosen[3] = {0}, last[3] = {0};
    uint64_t random = 1;
    for (unsigned i = 0; i < 30000; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        const uint64_t bits = random ^ random >> 29;
        CHECK(pc__choose_mirror(busy, 2, bits) == 1 && pc__choose_mirror(busy, 1, bits) == 0);
        chosen[pc__choose_mirror(alike, 3, bits)]++;
        last[pc__choose_mirror(one_is, 3, bits)]++;
    }
    for (int i = 0; i < 3; i++)
        CHECK(chosen[i] > 9000 && chosen[i] < 11000);
    CHECK(last[2] == 0); /* two of three are never both busy */
}

static void test_nonsense_is_refused(int trap)
{
    struct world w = world_of(trap, XOR, N_BLOCKS);
    pc_engine *engine = w.reader->engine;
    struct pc_repair_member many[PC__REPAIR_MEMBERS + 1];
    for (size_t i = 0; i <= PC__REPAIR_MEMBERS; i++)
        many[i] = (struct pc_repair_member){i + 10, 0, 0x1000};
    CHECK(pc_engine_set_repair(engine, 1, 0, many, PC__REPAIR_MEMBERS + 1, 0) == PC_ERR_RANGE);
    OK(pc_engine_set_repair(engine, 1, 0, many, PC__REPAIR_MEMBERS, 0));
    many[0].region = 1;
    CHECK(pc_engine_set_repair(engine, 1, 0, many, 1, 0) == PC_ERR_RANGE); /* itself */
    many[0] = (struct pc_repair_member){2, 0, 0};
    CHECK(pc_engine_set_repair(engine, 1, 0, many, 1, 0) == PC_ERR_RANGE);
    CHECK(pc_engine_set_repair(engine, 99, 0, NULL, 0, 0) == PC_ERR_NO_REGION);
    CHECK(pc_engine_region_has_repair(engine, 99, 1) == PC_ERR_NO_REGION);
    world_end(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(others_make_it_again),
        TEST(a_member_is_shorter),
        TEST(a_mirror_has_it),
        TEST(members_at_their_versions),
        TEST(a_member_is_here),
        TEST(holes),
        TEST(a_home_that_knows_nothing),
        TEST(a_member_is_lost_too),
        TEST(nobody_is_known_at_first),
        TEST(others_ask_for_nothing),
        TEST(it_stops_meanwhile),
        TEST(a_home_that_has_lost_blocks),
        TEST(others_have_lost_it_too),
        TEST(nobody_is_known_who_has_it),
        TEST(a_member_is_late_for_a_lost_block),
        TEST(it_stops_with_a_lost_block),
        TEST(a_hedge_wins),
        TEST(a_touch_of_what_is_on_its_way),
        TEST(a_silent_home),
        TEST(a_hedge_loses),
        TEST(hedges_are_few),
        TEST(a_home_that_is_not_reached),
        TEST(home_and_members_change_places),
        TEST(mirrors_share_the_reads),
        TEST(a_mirror_fails),
        TEST(when_and_how_often),
        TEST(the_less_busy_of_two),
        TEST(nonsense_is_refused),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
