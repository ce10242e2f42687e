/* test_keeper_client.c - a page server whose keeper is slow, ends, or was given only a part; and an
 * OPEN that was given up while its server was busy. */
#include "tests/support/commit.h"
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"

#include "engine/core/core.h"

#include <signal.h>

#define SLOW_REGIONS 320 /* more than a socket's buffer has messages */
static const struct pc_run some[] = {{3, 1}, {10, 20}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

static struct keeper part_start(const char *tag)
{
    struct keeper k;
    snprintf(k.name, sizeof k.name, "clamor-test-part-%s-%d", tag, (int)getpid());
    pid_t watched = getpid();
    k.pid = fork();
    if (!k.pid) {
        close_range(3, ~0u, 0); /* the servers' own */
        _exit(pc_keeper_run_part(k.name, watched, 100 * SECOND) ? 1 : 0);
    }
    return k;
}

/* What does not need it goes on; what does is answered when it goes on. */
static void test_slow_keeper(int trap)
{
    struct keeper k = keeper_start("slow");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(2);
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "slow", -1);
    server_start(c, 1, "slow", to_keeper);
    pc_client *home = attach(&c->servers[0], trap), *near = attach(&c->servers[1], trap);
    struct pc_region_info *infos = calloc(SLOW_REGIONS, sizeof *infos);
    for (int i = 0; i < SLOW_REGIONS; i++)
        infos[i] = build(c, &c->servers[0], home, (uint64_t)i + 1, 16 * PC_BLOCK_BYTES, 0);
    CHECK(stop_process(k.pid));
    uint64_t began_ns = now_ns();
    for (int i = 0; i < SLOW_REGIONS; i++) /* a generation of each is kept */
        check_at(c, near, &infos[i], 0);
    for (int i = 0; i < SLOW_REGIONS; i++)
        check_at(c, near, &infos[i], 0);
    CHECK(now_ns() - began_ns < 100 * SECOND); /* once 5 s for each that found no room */
    CHECK(!kill(k.pid, SIGCONT));
    SOON(!pc__keeper_is_behind(c->servers[1].engine));
    server_stop(c, 1);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 1, "slow", to_keeper);
    CHECK(stats_of(&c->servers[1]).generations >= SLOW_REGIONS); /* they came through the keeper */
    for (int i = 0; i < SLOW_REGIONS; i++)
        check_at(c, near, &infos[i], 0);
    pc_client_close(near);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
    free(infos);
}

/* Commits at a home whose keeper is stopped: read at once, applied later, all there after a restart. */
static void test_commits_with_a_slow_keeper(int trap)
{
    struct keeper k = keeper_start("commits");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "commits", to_keeper);
    pc_client *home = attach(&c->servers[0], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, MIB, 0);
    CHECK(commit(c, &c->servers[0], home, &info, 0, some, N(some)) == 1);
    for (uint64_t v = 1; v < 30; v++) {
        if (v == 10)
            CHECK(stop_process(k.pid));
        if (v == 20)
            CHECK(!kill(k.pid, SIGCONT));
        CHECK(commit(c, &c->servers[0], home, &info, v, some, N(some)) == v + 1);
        check_at(c, home, &info, v + 1);
    }
    server_stop(c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 0, "commits", to_keeper);
    for (uint64_t v = 0; v <= 30; v++)
        check_at(c, home, &info, v);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

struct later {
    pthread_t thread;
    pc_engine *engine;
    int to_keeper;
    _Atomic bool is_done;
};

static void *renew_later(void *arg)
{
    struct later *later = arg;
    usleep(300000);
    later->is_done = true;
    OK(pc_engine_renew_keeper(later->engine, later->to_keeper));
    return NULL;
}

/* Another one is given all there is, in the middle of commits. */
static void test_keeper_ends(int trap)
{
    struct keeper k = keeper_start("ends");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "ends", to_keeper);
    pc_client *home = attach(server, trap);
    struct pc_region_info info = build(c, server, home, 1, MIB, 0);
    struct pc_region_info other = build(c, server, home, 2, MIB, 0);
    for (uint64_t v = 0; v < 20; v++) {
        if (v == 7) {
            CHECK(end_process(k.pid));
            close(to_keeper);
            SOON(server->keepers_lost == 1); /* without anything to say to it */
            k = part_start("ends");
            to_keeper = keeper_connect(&k);
            struct later later = {.engine = server->engine, .to_keeper = to_keeper};
            CHECK(!pthread_create(&later.thread, NULL, renew_later, &later));
            CHECK(commit(c, server, home, &info, v, some, N(some)) == v + 1);
            CHECK(later.is_done); /* it was not answered before */
            pthread_join(later.thread, NULL);
            continue;
        }
        CHECK(commit(c, server, home, &info, v, some, N(some)) == v + 1);
    }
    SOON(!pc__keeper_is_behind(server->engine));
    server_stop(c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 0, "ends", to_keeper);
    for (uint64_t v = 0; v <= 20; v++)
        check_at(c, home, &info, v);
    check_at(c, home, &other, 0);
    CHECK(server->keepers_lost == 1);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* What a writer's node retains of its commits goes to another keeper too, and comes back from there. */
static void test_another_keeper_has_what_is_retained(int trap)
{
    struct keeper k = keeper_start("retains");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(2);
    struct server *writer = &c->servers[1];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "retains", -1);
    server_start(c, 1, "retains", to_keeper);
    pc_client *home = attach(&c->servers[0], trap), *near = attach(writer, trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, MIB, 0);
    struct transaction t;
    OK(try_begin(c, writer, near, &info, 0, &t));
    write_runs(&t, some, N(some));
    OK(try_stage(&t));
    OK(try_pull(&t));
    CHECK(decide(&t) == 1);
    tell(&t);
    OK(pc_client_unmap(near, t.m.id));
    SOON(stats_of(writer).retained_layers == 1);
    CHECK(end_process(k.pid));
    close(to_keeper);
    SOON(writer->keepers_lost == 1);
    k = part_start("retains");
    to_keeper = keeper_connect(&k);
    OK(pc_engine_renew_keeper(writer->engine, to_keeper));
    SOON(!pc__keeper_is_behind(writer->engine));
    server_stop(c, 1);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 1, "retains", to_keeper);
    CHECK(stats_of(writer).layers == 1);
    check_at(c, near, &info, 1); /* the region is used here: now it can be told what the layer is */
    OK(pc_engine_publish(writer->engine, info.region, 1, t.id));
    CHECK(stats_of(writer).retained_layers == 1 && stats_of(writer).layers == 0);
    pc_client_close(near);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* Its server died before it had given it everything. */
static void test_a_part_is_not_taken_for_all(int trap)
{
    (void)trap;
    struct keeper k = part_start("part");
    int to_keeper = keeper_connect(&k);
    struct pc_engine_options options = told;
    options.socket_name = k.name + 1; /* any other */
    options.library_version = "test";
    options.server_id = 0x1000;
    options.keeper_fd = to_keeper;
    pc_engine *engine = NULL;
    CHECK(pc_engine_start(&options, &engine) == PC_ERR_HOME_LOST && !engine);
    close(to_keeper);
    keeper_stop(&k);
}

static _Atomic int asleep;
static _Atomic uint64_t n_over; /* rounds */

static void sleep_here(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)loop;
    asleep++;
    SOON_IN(n_over > mail->a, 30);
}

static void *wake_later(void *arg)
{
    usleep(100000); /* until the second OPEN is in the socket too */
    n_over++;
    return arg;
}

/* The next OPEN, of the same addresses, does not meet it. */
static void test_an_open_is_given_up(int trap)
{
    struct cluster *c = cluster_start(1, "given-up");
    struct server *server = &c->servers[0];
    pc_client *client = attach(server, trap);
    struct pc_region_info info = build(c, server, client, 1, MIB, 0);
    for (int round = 0; round < 20; round++) {
        struct pc_mapping m;
        pthread_t waker;
        asleep = 0;
        for (int i = 0; i < server->engine->n_loops; i++) {
            const struct pc__mail mail = {.run = sleep_here, .a = (uint64_t)round};
            OK(pc__loop_post(&server->engine->loops[i], &mail));
        }
        SOON(asleep == server->engine->n_loops);
        CHECK(pc_client_map(client, 1, 0, info.base_address, info.length_bytes, 0, SECOND / 50,
                            &m) == PC_ERR_TIMEOUT);
        CHECK(!pthread_create(&waker, NULL, wake_later, NULL));
        OK(pc_client_map(client, 1, 0, info.base_address, info.length_bytes, 0, WAIT, &m));
        check_version(c, &m, &info, 0);
        OK(pc_client_unmap(client, m.id));
        pthread_join(waker, NULL);
    }
    SOON(region_of(server, 1).mappings == 0);
    pc_client_close(client);
    cluster_stop(c);
}

/* The same while the server itself waits for somebody's answer. */
static void test_an_open_that_waits_is_given_up(int trap)
{
    struct cluster *c = cluster_start(1, "waits");
    struct server *server = &c->servers[0];
    pc_client *client = attach(server, trap);
    struct pc_region_info info = build(c, server, client, 1, MIB, 0);
    struct pc_mapping m;
    server->hold_published = true;
    CHECK(pc_client_map(client, 1, 1, info.base_address, info.length_bytes, 0, SECOND / 20, &m) ==
          PC_ERR_TIMEOUT);
    server->hold_published = false;
    CHECK(commit(c, server, client, &info, 0, some, N(some)) == 1);
    for (int i = 0; i < 10; i++)
        check_at(c, client, &info, 1);
    SOON(region_of(server, 1).mappings == 0);
    pc_client_close(client);
    cluster_stop(c);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(slow_keeper),
        TEST(commits_with_a_slow_keeper),
        TEST(keeper_ends),
        TEST(another_keeper_has_what_is_retained),
        TEST(a_part_is_not_taken_for_all),
        TEST(an_open_is_given_up),
        TEST(an_open_that_waits_is_given_up),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
