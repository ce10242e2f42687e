/* test_keeping.c - what is not with the keeper is not called safe: seals, layers, pulls and labels where
 * the keeper takes nothing for long, or can never be sent something. */
#define SLOW_NS 1000000000ull
#define now_ns keeping_now_ns
#define run keeping_run
#define tell keeping_tell
#include "engine/store/keeping.c"
#undef now_ns
#undef run
#undef tell

#include "tests/support/commit.h"
#include "tests/support/keepers.h"

#include "engine/engine.h"

#include <signal.h>
#include <sys/syscall.h>

static const struct pc_run some[] = {{3, 1}, {10, 20}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])
#define MOST_SEALS 2000

/* ------------------------------------------------------------- sends that fail */

static _Atomic int send_errno;    /* of packets to the keeper that carry a descriptor; 0: they pass */
static _Atomic int sends_failed, sends_to_fail; /* of them; then they pass again */

ssize_t sendmsg(int fd, const struct msghdr *packet, int flags)
{
    const bool is_put = packet->msg_controllen && packet->msg_iovlen == 1 &&
                        packet->msg_iov->iov_len == 16 + sizeof(struct pc__kept);
    if (is_put && send_errno && sends_failed < sends_to_fail) {
        sends_failed++;
        errno = send_errno;
        return -1;
    }
    return syscall(SYS_sendmsg, fd, packet, flags);
}

static void fail_sends(int error, int n)
{
    sends_failed = 0;
    sends_to_fail = n;
    send_errno = error;
}

/* ---------------------------------------------------------------------- tools */

static void stop_process(pid_t pid)
{
    int status;
    CHECK(!kill(pid, SIGSTOP));
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
}

/* A region of one block, whose first word is its id. */
static int try_put(struct cluster *c, struct server *server, pc_client *client, uint64_t id)
{
    const struct pc_region_info info = {.region = id,
                                        .base_address = PC_WINDOW_BEGIN + (id << 28),
                                        .length_bytes = PC_BLOCK_BYTES};
    int fd = -1;
    OK(pc_client_create(client, id, PC_WINDOW_BEGIN + (id << 28), PC_BLOCK_BYTES, 5 * SECOND, &fd));
    OK(pc_copy_in(fd, 0, &id, sizeof id, 1));
    close(fd);
    int rc = pc_client_seal(client, id, 20 * SECOND);
    if (!rc)
        publish(c, info, server->id);
    return rc;
}

static void check_put(pc_client *client, uint64_t id)
{
    struct pc_region_info info = {.region = id,
                                  .base_address = PC_WINDOW_BEGIN + (id << 28),
                                  .length_bytes = PC_BLOCK_BYTES};
    struct pc_mapping m;
    OK(try_map(client, &info, 0, 0, &m));
    CHECK(at(&m, 0) == id);
    OK(pc_client_unmap(client, m.id));
}

/* Puts until the stopped keeper's socket is full. Returns how many were answered. */
static uint64_t fill(struct cluster *c, struct server *server, pc_client *client)
{
    uint64_t n = 0;
    while (n < MOST_SEALS && !pc__keeper_is_behind(server->engine)) {
        int rc = try_put(c, server, client, n + 1);
        if (rc) {
            CHECK(rc == PC_ERR_TIMEOUT && strstr(pc_last_message(), "the keeper of this node"));
            break;
        }
        n++;
    }
    CHECK(n > 0 && n < MOST_SEALS);
    return n;
}

/* The server dies as by kill -9, as far as the keeper can see: what is in its own queue is lost. */
static void die(struct cluster *c, int i, int to_keeper)
{
    CHECK(!shutdown(to_keeper, SHUT_WR));
    server_stop(c, i);
}

/* ---------------------------------------------------------------------- tests */

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

/* A keeper that takes nothing is ended, and until another has it nothing is called safe: every answered
 * seal is there when the server dies then. */
static void test_seals_wait_for_a_slow_keeper(int trap)
{
    struct keeper k = keeper_start("seals");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "seals", to_keeper);
    pc_client *client = attach(server, trap);
    stop_process(k.pid);
    uint64_t n = fill(c, server, client);
    for (uint64_t id = 501; id <= 503; id++) {
        int rc = try_put(c, server, client, id);
        CHECK(rc == PC_ERR_TIMEOUT);
        CHECK(strstr(pc_last_message(), "the keeper of this node is gone, and no other has come, for"));
    }
    SOON(server->keepers_lost == 1);
    int status;
    CHECK(waitpid(k.pid, &status, 0) == k.pid && WIFSIGNALED(status)); /* it is two otherwise */
    close(to_keeper);
    k = part_start("seals");
    to_keeper = keeper_connect(&k);
    OK(pc_engine_renew_keeper(server->engine, to_keeper));
    OK(try_put(c, server, client, 601)); /* when the new one has all that was before */
    die(c, 0, to_keeper);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 0, "seals", to_keeper);
    for (uint64_t id = 1; id <= n; id++)
        check_put(client, id);
    check_put(client, 601);
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* A layer that is staged again, or pulled again, is answered when the keeper has it, and not before. */
static void test_layers_wait_for_a_slow_keeper(int trap)
{
    struct keeper k = keeper_start("layers");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(2);
    struct server *home_server = &c->servers[1];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "layers", -1);
    server_start(c, 1, "layers", to_keeper);
    pc_client *near = attach(&c->servers[0], trap), *home = attach(home_server, trap);
    struct pc_region_info far = build(c, home_server, home, 501, MIB, 0);
    struct pc_region_info own = build(c, home_server, home, 502, MIB, 0);
    stop_process(k.pid);
    struct transaction pulled, staged;
    OK(try_begin(c, &c->servers[0], near, &far, 0, &pulled));
    write_runs(&pulled, some, N(some));
    OK(try_stage(&pulled));
    OK(try_begin(c, home_server, home, &own, 0, &staged));
    write_runs(&staged, some, N(some));
    (void)fill(c, home_server, home);
    for (int i = 0; i < 2; i++) {
        int rc = try_pull(&pulled);
        CHECK(rc == PC_ERR_TIMEOUT);
        rc = try_stage(&staged);
        CHECK(rc == PC_ERR_TIMEOUT && strstr(pc_last_message(), "the keeper of this node"));
    }
    CHECK(waitpid(k.pid, NULL, 0) == k.pid);
    close(to_keeper);
    k = part_start("layers");
    to_keeper = keeper_connect(&k);
    OK(pc_engine_renew_keeper(home_server->engine, to_keeper));
    OK(try_pull(&pulled));
    OK(try_stage(&staged));
    CHECK(decide(&pulled) == 1 && decide(&staged) == 1);
    tell(&pulled);
    tell(&staged);
    OK(pc_client_unmap(near, pulled.m.id));
    OK(pc_client_unmap(home, staged.m.id));
    check_at(c, near, &far, 1);
    check_at(c, home, &own, 1);
    pc_client_close(near);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* No memory for a packet passes. */
static void test_want_of_memory_is_waited_out(int trap)
{
    struct keeper k = keeper_start("memory");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "memory", to_keeper);
    pc_client *client = attach(server, trap);
    fail_sends(ENOMEM, 20);
    for (uint64_t id = 1; id <= 10; id++)
        OK(try_put(c, server, client, id));
    CHECK(sends_failed == 20);
    die(c, 0, to_keeper);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 0, "memory", to_keeper);
    for (uint64_t id = 1; id <= 10; id++)
        check_put(client, id);
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* What can never be sent is said to who waits for it, and to the log: at once, and out of the queue. */
static void test_what_cannot_be_sent_is_not_safe(int trap)
{
    struct keeper k = keeper_start("refused");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "refused", to_keeper);
    pc_client *client = attach(server, trap);
    struct pc_region_info info = build(c, server, client, 501, MIB, 0);
    int before = server->log_events;
    fail_sends(EPERM, 1000000);
    int rc = try_put(c, server, client, 502);
    CHECK(rc == PC_ERR_SYSTEM);
    struct transaction t;
    fail_sends(0, 0);
    OK(try_begin(c, server, client, &info, 0, &t));
    write_runs(&t, some, N(some));
    fail_sends(EPERM, 1000000);
    rc = try_stage(&t);
    CHECK(rc == PC_ERR_SYSTEM);
    SOON(server->log_events > before);
    fail_sends(0, 0);
    OK(try_stage(&t));
    CHECK(decide(&t) == 1);
    tell(&t);
    OK(pc_client_unmap(client, t.m.id));
    check_at(c, client, &info, 1);
    OK(try_put(c, server, client, 503));
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

static void *refuse_later(void *arg)
{
    (void)arg;
    usleep(200000);
    send_errno = EPERM;
    return NULL;
}

static void test_what_cannot_be_sent_later_is_not_safe(int trap)
{
    struct keeper k = keeper_start("later");
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "later", to_keeper);
    pc_client *client = attach(server, trap);
    int before = server->log_events;
    pthread_t refuses;
    fail_sends(EAGAIN, 1000000); /* it waits in the queue */
    CHECK(!pthread_create(&refuses, NULL, refuse_later, NULL));
    int rc = try_put(c, server, client, 1);
    pthread_join(refuses, NULL);
    CHECK(rc == PC_ERR_SYSTEM && strstr(pc_last_message(), "the keeper of this node"));
    SOON(server->log_events > before);
    fail_sends(0, 0);
    OK(try_put(c, server, client, 2));
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
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
        RUN(seals_wait_for_a_slow_keeper, 90);
        RUN(layers_wait_for_a_slow_keeper, 90);
        RUN(want_of_memory_is_waited_out, 60);
        RUN(what_cannot_be_sent_is_not_safe, 60);
        RUN(what_cannot_be_sent_later_is_not_safe, 60);
    }
    return failed != 0;
}
