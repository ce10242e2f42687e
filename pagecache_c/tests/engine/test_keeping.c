/* test_keeping.c - what is not with the keeper is not called safe: seals, layers, pulls and labels where
 * the keeper takes nothing for long, or can never be sent something. */
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

/* A thread that is on its way to the keeper, and late: another goes first, if it can. */
static _Thread_local bool is_late;
static _Atomic bool has_come, others_went;

static int lock_late(pthread_mutex_t *lock)
{
    has_come |= is_late;
    for (int ms = 0; is_late && !others_went && ms < 300; ms++)
        usleep(1000);
    return pthread_mutex_lock(lock);
}

#define SLOW_NS 1000000000ull
#define pthread_mutex_lock lock_late
#define now_ns keeping_now_ns
#define run keeping_run
#define tell keeping_tell
#include "engine/keeper/keeping.c"
#undef pthread_mutex_lock
#undef now_ns
#undef run
#undef tell

#include "tests/support/commit.h"
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"

#include "engine/core/core.h"
#include "engine/store/store.h"

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

/* A region of one block, whose first word is its id. */
static int try_put(struct cluster *c, struct server *server, pc_client *client, uint64_t id)
{
    const struct pc_region_info info = {.region = id,
                                        .base_address = PC_WINDOW_BEGIN + (id << 28),
                                        .length_bytes = PC_BLOCK_BYTES};
    int fd = -1;
    OK(pc_client_create(client, id, PC_WINDOW_BEGIN + (id << 28), PC_BLOCK_BYTES, MEDIUM, 30 * SECOND, &fd));
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
    CHECK(stop_process(k.pid));
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
    CHECK(stop_process(k.pid));
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

/* The keeper takes what it is given: that the kernel has nothing left for a packet is not its fault,
 * however long it lasts. Who waits is told so in time. */
static void test_a_shortage_ends_no_keeper(int trap)
{
    static const int shortages[] = {ENOMEM, ENOBUFS, ETOOMANYREFS};
    struct keeper k = keeper_start("shortage");
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "shortage", to_keeper);
    pc_client *client = attach(server, trap);
    for (uint64_t i = 0; i < N(shortages); i++) {
        fail_sends(shortages[i], 1000000);
        int rc = try_put(c, server, client, 10 * i + 1);
        CHECK(rc == PC_ERR_TIMEOUT);
        CHECK(strstr(pc_last_message(), "short of memory or of descriptors"));
        usleep(2 * SLOW_NS / 1000);
        CHECK(waitpid(k.pid, NULL, WNOHANG) == 0 && server->keepers_lost == 0);
        fail_sends(0, 0);
        OK(try_put(c, server, client, 10 * i + 2));
        check_put(client, 10 * i + 2);
    }
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* Of the messages that wait to be sent: those that say what one before them says. */
static int n_said_twice(struct pc__keeping *keeping)
{
    int n = 0;
    pthread_mutex_lock(&keeping->lock);
    pc__each(link, &keeping->queue)
    {
        const struct message *message = pc__of(link, struct message, link);
        bool is_said = false;
        for (struct pc__link *at = keeping->queue.next; at != link; at = at->next) {
            const struct message *earlier = pc__of(at, struct message, link);
            is_said |= earlier->said == SAY_PUT && message->said == SAY_PUT &&
                       memcmp(&earlier->what, &message->what, sizeof message->what) == 0;
        }
        n += is_said;
    }
    pthread_mutex_unlock(&keeping->lock);
    return n;
}

/* Each try of the worker, and each try to stage, keeps the same thing. As long as a message that says so
 * waits, another one says nothing new, and the queue would grow while the shortage lasts. */
static void test_tries_add_no_messages(int trap)
{
    struct keeper k = keeper_start("tries");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "tries", to_keeper);
    pc_client *client = attach(server, trap);
    struct pc_region_info applied = build(c, server, client, 1, MIB, 0);
    struct pc_region_info own = build(c, server, client, 2, MIB, 0);
    struct transaction t, staged;
    OK(try_begin(c, server, client, &applied, 0, &t));
    write_runs(&t, some, N(some));
    OK(try_stage(&t));
    leave_base(server, client, 1, &t.m);
    OK(try_begin(c, server, client, &own, 0, &staged));
    write_runs(&staged, some, N(some));
    int before = server->log_events;
    fail_sends(ENOBUFS, 1000000);
    CHECK(decide(&t) == 1);
    OK(pc_engine_publish(server->engine, 1, 1, t.id));
    for (int i = 0; i < 3; i++) {
        int rc = try_stage(&staged);
        CHECK(rc == PC_ERR_TIMEOUT);
    }
    SOON(server->log_events > before + 3); /* so often the worker could not */
    int twice = n_said_twice(server->engine->keeping);
    if (twice)
        fprintf(stderr, "%d messages say what one before them says\n", twice);
    CHECK(!twice);
    fail_sends(0, 0);
    OK(try_stage(&staged));
    SOON(stats_of(server).commits_applied == 1);
    CHECK(decide(&staged) == 1);
    tell(&staged);
    OK(pc_client_unmap(client, staged.m.id));
    die(c, 0, to_keeper);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 0, "tries", to_keeper);
    check_at(c, client, &applied, 1);
    check_at(c, client, &own, 1);
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

/* ------------------------------------------------------- labels of what is gone */

static void stage_layer(struct server *server, uint64_t commit_id)
{
    const struct pc_run run = {0, 1};
    const struct pc__layer_head head = {.magic = PC__LAYER_MAGIC, .region = 1, .commit_id = commit_id,
                                        .n_blocks = 1, .data_offset = pc__layer_data_offset(1),
                                        .n_runs = 1};
    const uint64_t bytes = head.data_offset + PC_BLOCK_BYTES;
    uint64_t inode;
    int fd = pc__memfd_make(bytes, &inode);
    OK(fd);
    CHECK(pwrite(fd, &head, sizeof head, 0) == (ssize_t)sizeof head);
    CHECK(pwrite(fd, &run, sizeof run, sizeof head) == (ssize_t)sizeof run);
    OK(pc__layer_stage(server->engine, 1, commit_id, bytes, fd, 0));
}

static void *ask_again(void *arg)
{
    struct server *server = arg;
    is_late = true;
    OK(pc_engine_pull(server->engine, 1, 7, server->id, 2 * PC_BLOCK_BYTES));
    return NULL;
}

/* A layer is asked for again while it is dropped: the keeper's record of it goes with it. */
static void test_no_record_of_a_dropped_layer_stays(int trap)
{
    (void)trap;
    struct keeper k = keeper_start("dropped");
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "dropped", to_keeper);
    stage_layer(server, 7);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, ask_again, server));
    SOON(has_come);
    OK(pc_engine_drop_staged(server->engine, 1, 7));
    others_went = true;
    pthread_join(thread, NULL);
    CHECK(!pc_engine_has_layer(server->engine, 1, 7));
    CHECK(pc__link_empty(&server->engine->keeping->table.records));
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* ------------------------------------------------------------ seals that fail */

#define HOLES_BYTES MIB

/* A region of holes that its client has made, and cannot seal. */
static void fail_to_seal(struct server *server, pc_client *client, uint64_t id)
{
    int fd;
    OK(pc_client_create(client, id, PC_WINDOW_BEGIN + (id << 28), HOLES_BYTES, MEDIUM, 30 * SECOND, &fd));
    close(fd);
    fail_sends(EPERM, 1000000);
    int rc = pc_client_seal(client, id, 5 * SECOND);
    CHECK(rc == PC_ERR_SYSTEM);
    fail_sends(0, 0);
    CHECK(server->engine->open_holes == 0);
}

/* It is as it was: its client seals it again, abandons it, or ends, and nothing stays counted. */
static void test_a_failed_seal_leaves_nothing(int trap)
{
    struct keeper k = keeper_start("seal");
    told.cache_bytes = 8 * HOLES_BYTES;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "seal", to_keeper);
    pc_client *client = attach(server, trap), *ends = attach(server, trap);
    fail_to_seal(server, client, 1);
    OK(pc_client_seal(client, 1, 30 * SECOND));
    CHECK(server->engine->open_holes == HOLES_BYTES / PC_BLOCK_BYTES);
    OK(pc_engine_retire(server->engine, 1, 1));
    SOON(stats_of(server).regions == 0 && server->engine->open_holes == 0);
    fail_to_seal(server, client, 2);
    OK(pc_client_abandon(client, 2, 30 * SECOND));
    CHECK(stats_of(server).regions == 0);
    fail_to_seal(server, ends, 3);
    pc_client_close(ends);
    SOON(stats_of(server).regions == 0);
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
    static const struct engine_test tests[] = {
        TEST(seals_wait_for_a_slow_keeper),
        TEST(layers_wait_for_a_slow_keeper),
        TEST(want_of_memory_is_waited_out),
        TEST(a_shortage_ends_no_keeper),
        TEST(tries_add_no_messages),
        TEST(what_cannot_be_sent_is_not_safe),
        TEST(what_cannot_be_sent_later_is_not_safe),
        TEST(a_failed_seal_leaves_nothing),
        TEST(no_record_of_a_dropped_layer_stays),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
