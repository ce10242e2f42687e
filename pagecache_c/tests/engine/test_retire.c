/* test_retire.c - a region is freed: its page server refuses new leases at once, and so do those that
 * asked it for blocks, before the registry has told anybody. Server 0 is the home. */
#include "engine/core/core.h"
#include "tests/support/fake_peer.h"
#include "tests/support/pair.h"

#define N_BLOCKS 64u
#define LONG (20 * SECOND)

/* From now on the registry says that it is freed; nobody has been told. */
static void unpublish(struct pair *w, uint64_t region)
{
    pthread_mutex_lock(&w->c->lock);
    for (int i = 0; i < w->c->n_regions; i++)
        if (w->c->regions[i].info.region == region)
            w->c->regions[i].home = 0;
    pthread_mutex_unlock(&w->c->lock);
}

static bool is_refused(pc_client *client, const struct pc_region_info *info)
{
    struct pc_mapping m;
    int rc = try_map(client, info, 0, 0, &m);
    CHECK(!rc || rc == PC_ERR_NO_REGION);
    if (!rc)
        OK(pc_client_unmap(client, m.id));
    return rc != PC_OK;
}

/* Who reads it goes on, who comes is refused, and what rests is no way in. */
static void test_here(int trap)
{
    struct pair w = pair_of_three("here", trap, N_BLOCKS << 12);
    pc_client *other = attach(w.s0, trap);
    CHECK(pc_client_server_id(w.home) == w.s0->id && pc_client_server_id(w.far) == w.s1->id);
    struct pc_mapping held = map_at(other, &w.info, 0, 0), rests = map_at(w.home, &w.info, 0, 0);
    OK(pc_client_unmap_later(w.home, rests.id));
    unpublish(&w, 1);
    OK(pc_client_retire(w.home, 1, 0, NULL, 0, LONG));
    CHECK(is_refused(w.home, &w.info));
    check_version(w.c, &held, &w.info, 0);
    OK(pc_client_retire(other, 1, 0, NULL, 0, LONG)); /* twice is once */
    SOON(stats_of(w.s0).mappings == 1);
    CHECK(w.s0->idle_events == 0);
    OK(pc_client_unmap(other, held.id));
    SOON(w.s0->idle_events == 1);
    CHECK(region_of(w.s0, 1).is_home); /* the registry says when it goes */
    OK(pc_client_retire(w.far, 1, 0, NULL, 0, LONG)); /* which has never heard of it */
    CHECK(is_refused(w.far, &w.info));
    pc_client_close(other);
    pair_stop(&w);
}

/* Without a moment in which what rests could be had again. */
static void test_rests(int trap)
{
    struct pair w = pair_of_three("rests", trap, N_BLOCKS << 12);
    for (uint64_t id = 2; id < 102; id++) {
        struct pc_region_info info = build(w.c, w.s0, w.home, id, 1 << 12, 0);
        struct pc_mapping m = map_at(w.home, &info, 0, 0);
        OK(pc_client_unmap_later(w.home, m.id));
        unpublish(&w, id);
        OK(pc_client_retire(w.home, id, 0, NULL, 0, LONG));
        CHECK(is_refused(w.home, &info));
    }
    pair_stop(&w);
}

/* Nobody else has heard of it: its memory is given back at once, but not under a reader. */
static void test_alone(int trap)
{
    struct pair w = pair_of_three("alone", trap, N_BLOCKS << 12);
    struct pc_region_info read = build(w.c, w.s0, w.home, 2, N_BLOCKS << 12, 0);
    struct pc_mapping held = map_at(w.home, &read, 0, 0);
    unpublish(&w, 1);
    unpublish(&w, 2);
    OK(pc_client_retire(w.home, 1, 1, NULL, 0, LONG));
    CHECK(!region_of(w.s0, 1).region && stats_of(w.s0).regions == 1);
    SOON(w.s0->idle_events == 1);
    OK(pc_client_retire(w.home, 2, 1, NULL, 0, LONG));
    pc_client *other = attach(w.s0, trap);
    CHECK(is_refused(w.far, &read) && is_refused(other, &read));
    pc_client_close(other);
    check_version(w.c, &held, &read, 0);
    CHECK(region_of(w.s0, 2).is_home);
    OK(pc_client_unmap(w.home, held.id));
    SOON(w.s0->idle_events == 2);
    pair_stop(&w);
}

/* Who asked the home for blocks refuses it too when the call returns. */
static void test_elsewhere(int trap)
{
    struct pair w = pair_of_three("far", trap, N_BLOCKS << 12);
    struct pc_mapping held = map_at(w.far, &w.info, 0, 0);
    check_version(w.c, &held, &w.info, 0);
    unpublish(&w, 1);
    CHECK(!is_refused(w.other, &w.info));
    OK(pc_client_retire(w.home, 1, 0, &w.s1->id, 1, LONG));
    CHECK(is_refused(w.other, &w.info) && is_refused(w.home, &w.info));
    check_version(w.c, &held, &w.info, 0);
    OK(pc_client_unmap(w.far, held.id));
    SOON(w.s1->idle_events == 1);
    CHECK(!stats_of(w.s0).bad_messages && !stats_of(w.s1).bad_messages);
    pair_stop(&w);
}

/* Many at once, while blocks of others are on the same connections. */
struct freeing {
    struct pair *w;
    pc_client *client;
    uint64_t first;
};

enum { FREED = 100, THREADS = 3, BUSY = 1000 };

static void *free_some(void *arg)
{
    struct freeing *some = arg;
    for (uint64_t i = 0; i < FREED; i++)
        OK(pc_client_retire(some->client, some->first + i, 0, &some->w->s1->id, 1, LONG));
    return NULL;
}

static void test_many(int trap)
{
    struct pair w = pair_of_three("many", trap, N_BLOCKS << 12);
    struct pc_region_info info[THREADS * FREED];
    struct freeing some[THREADS];
    pthread_t threads[THREADS];
    struct pc_region_info busy = build(w.c, w.s0, w.home, BUSY, 16 * MIB, 0);
    for (uint64_t i = 0; i < THREADS * FREED; i++) {
        info[i] = build(w.c, w.s0, w.home, 2 + i, 1 << 12, 0);
        check_at(w.c, w.far, &info[i], 0);
    }
    for (uint64_t i = 0; i < THREADS * FREED; i++)
        unpublish(&w, 2 + i);
    struct pc_mapping held = map_at(w.far, &busy, 0, 0);
    for (unsigned i = 0; i < THREADS; i++) {
        some[i] = (struct freeing){&w, i == 0 ? w.home : attach(w.s0, trap), 2 + i * FREED};
        CHECK(!pthread_create(&threads[i], NULL, free_some, &some[i]));
    }
    check_version(w.c, &held, &busy, 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (uint64_t i = 0; i < THREADS * FREED; i++)
        CHECK(is_refused(w.far, &info[i]));
    SOON(w.s1->idle_events == THREADS * FREED);
    CHECK(!stats_of(w.s0).bad_messages && !stats_of(w.s1).bad_messages);
    OK(pc_client_unmap(w.far, held.id));
    for (unsigned i = 1; i < THREADS; i++)
        pc_client_close(some[i].client);
    pair_stop(&w);
}

/* What cannot be promised is said, and here it is refused all the same. */
static void test_not_promised(int trap)
{
    struct pair w = pair_of_three("not", trap, N_BLOCKS << 12);
    const uint64_t nobody = 0x4711, both[] = {w.s1->id, nobody};
    struct pc_region_info second = build(w.c, w.s0, w.home, 2, N_BLOCKS << 12, 0);
    check_at(w.c, w.far, &w.info, 0);
    check_at(w.c, w.far, &second, 0);
    unpublish(&w, 1);
    unpublish(&w, 2);
    CHECK(pc_client_retire(w.home, 1, 0, &nobody, 1, LONG) == PC_ERR_NO_PEER);
    CHECK(pc_client_retire(w.home, 1, 0, both, 2, LONG) == PC_ERR_NO_PEER);
    CHECK(is_refused(w.home, &w.info));
    /* One that does not answer. */
    int fd = ask_as(w.s0, 0x999), begun = stats_of(w.s0).served_connections > 0;
    const uint64_t silent = 0x999;
    send_get(fd, 2, 0, PC__DATA_HOME, (struct pc_run){0, 1});
    take_blocks_of(fd, 1);
    CHECK(begun && pc_client_retire(w.home, 2, 0, &silent, 1, SECOND / 5) == PC_ERR_TIMEOUT);
    struct pc__data_header header;
    CHECK(recv_all(fd, &header, sizeof header) && header.type == PC__DATA_RETIRE &&
          header.region == 2);
    /* One that refuses; of two, the other has answered. */
    CHECK(pc_client_retire(w.home, 2, 0, &silent, 1, SECOND / 5) == PC_ERR_TIMEOUT);
    CHECK(recv_all(fd, &header, sizeof header));
    header.type = PC__DATA_RETIRED;
    CHECK(send_all(fd, &header, sizeof header)); /* too late: nobody waits for it */
    CHECK(!stats_of(w.s0).bad_messages);
    close(fd);
    CHECK(pc_client_retire(w.home, 0, 0, NULL, 0, LONG) == PC_ERR_RANGE);
    CHECK(pc_client_retire(w.home, 2, 1, &silent, 1, LONG) == PC_ERR_RANGE);
    pair_stop(&w);
}

/* It is said why not, and that is passed on. */
static void *refuse(void *arg)
{
    int fd = *(int *)arg;
    struct pc__data_header header;
    CHECK(recv_all(fd, &header, sizeof header) && header.type == PC__DATA_RETIRE);
    header.type = PC__DATA_RETIRED;
    header.status = PC_ERR_TIMEOUT;
    CHECK(send_all(fd, &header, sizeof header));
    return NULL;
}

static void test_refused(int trap)
{
    struct pair w = pair_of_three("refused", trap, N_BLOCKS << 12);
    const uint64_t them[] = {w.s1->id, 0x999};
    check_at(w.c, w.far, &w.info, 0);
    int fd = ask_as(w.s0, 0x999);
    SOON(stats_of(w.s0).served_connections > 1);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, refuse, &fd));
    unpublish(&w, 1);
    CHECK(pc_client_retire(w.home, 1, 0, them, 2, LONG) == PC_ERR_TIMEOUT);
    pthread_join(thread, NULL);
    close(fd);
    pair_stop(&w);
}

struct opening {
    struct pair *w;
    bool refused;
};

static void *open_it(void *arg)
{
    struct opening *opening = arg;
    opening->refused = is_refused(opening->w->far, &opening->w->info);
    return NULL;
}

/* Whether server 1 waits to hear what the region is. */
static bool looks_up(struct pair *w)
{
    struct pc__region *region = pc__region_get(w->s1->engine, w->info.region);
    if (!region)
        return false;
    pthread_mutex_lock(&region->lock);
    bool asked = region->asked_region;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(w->s1->engine, region);
    return asked;
}

/* What is not sealed is its maker's; what is being looked up may be answered with what was. */
static void test_not_ready(int trap)
{
    struct pair w = pair_of_three("ready", trap, N_BLOCKS << 12);
    int made = -1;
    OK(pc_client_create(w.home, 7, PC_WINDOW_BEGIN + (7ull << 28), 1 << 12, MEDIUM, LONG, &made));
    close(made);
    pc_client *other = attach(w.s0, trap);
    CHECK(pc_client_retire(other, 7, 0, NULL, 0, LONG) == PC_ERR_NO_REGION);
    OK(pc_client_seal(w.home, 7, LONG));
    struct opening opening = {.w = &w};
    pthread_t thread;
    pthread_mutex_lock(&w.c->lock); /* the answer waits for it */
    CHECK(!pthread_create(&thread, NULL, open_it, &opening));
    SOON(looks_up(&w));
    pc_client *third = attach(w.s1, trap);
    CHECK(pc_client_retire(third, 1, 0, NULL, 0, LONG) == PC_ERR_TIMEOUT);
    pthread_mutex_unlock(&w.c->lock);
    pthread_join(thread, NULL);
    CHECK(!opening.refused);
    unpublish(&w, 1);
    OK(pc_client_retire(third, 1, 0, NULL, 0, LONG));
    CHECK(is_refused(w.far, &w.info));
    pc_client_close(third);
    pc_client_close(other);
    pair_stop(&w);
}

/* A server that is not the home says that a region is freed: it is not believed. */
static void test_not_the_home(int trap)
{
    struct pair w = pair_of_three("stranger", trap, N_BLOCKS << 12);
    check_at(w.c, w.far, &w.info, 0);
    int fds[2];
    tcp_pair(fds);
    limit_waits(fds[1]);
    OK(pc_engine_add_peer(w.s1->engine, 0x999, 0, fds[0]));
    struct pc__data_header header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_RETIRE,
                                     .request_id = 5, .region = 1};
    CHECK(send_all(fds[1], &header, sizeof header) && recv_all(fds[1], &header, sizeof header));
    CHECK(header.type == PC__DATA_RETIRED && header.status == PC_ERR_DENIED &&
          header.request_id == 5 && header.region == 1);
    CHECK(!is_refused(w.far, &w.info));
    /* Of one that is not known there is nothing to believe. */
    header = (struct pc__data_header){.magic = PC__DATA_MAGIC, .type = PC__DATA_RETIRE,
                                      .request_id = 6, .region = 77};
    CHECK(send_all(fds[1], &header, sizeof header) && recv_all(fds[1], &header, sizeof header));
    CHECK(header.type == PC__DATA_RETIRED && !header.status);
    CHECK(!stats_of(w.s1).bad_messages);
    /* And who is asked for blocks does not take it at all. */
    int asks = ask_as(w.s1, 0x999);
    header = (struct pc__data_header){.magic = PC__DATA_MAGIC, .type = PC__DATA_RETIRE, .region = 1};
    CHECK(send_all(asks, &header, sizeof header) && recv(asks, &header, 1, 0) <= 0);
    SOON(stats_of(w.s1).bad_messages == 1);
    CHECK(!is_refused(w.far, &w.info));
    close(asks);
    close(fds[1]);
    pair_stop(&w);
}

int main(void)
{
    int failed = 0;
    const int traps[] = {PC_TRAP_AUTO, PC_TRAP_SIGSEGV};
    for (int i = 0; i < 2; i++) {
        failed |= run_test("here", test_here, traps[i], 120);
        failed |= run_test("elsewhere", test_elsewhere, traps[i], 120);
    }
    failed |= run_test("rests", test_rests, PC_TRAP_AUTO, 120);
    failed |= run_test("alone", test_alone, PC_TRAP_AUTO, 120);
    failed |= run_test("many", test_many, PC_TRAP_AUTO, 200);
    failed |= run_test("not_promised", test_not_promised, PC_TRAP_AUTO, 120);
    failed |= run_test("refused", test_refused, PC_TRAP_AUTO, 120);
    failed |= run_test("not_ready", test_not_ready, PC_TRAP_AUTO, 120);
    failed |= run_test("not_the_home", test_not_the_home, PC_TRAP_AUTO, 120);
    return failed;
}
