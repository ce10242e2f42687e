/* test_leases.c - a process whose connection is lost, and that lives on, sees what it saw: its leases
 * stay until it has them again, or has no memory of them any more. Server 0 is the home. */
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "os/process.h"
#include "tests/support/commit.h"
#include "tests/support/connections.h"

#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define N_BLOCKS 64u
#define FOR_EVER (100 * SECOND)

extern uint64_t pc__idle_ns; /* client.h, which has another struct pc__session_map than engine.h */

static uint64_t leases(struct server *s)
{
    return stats_of(s).mappings;
}

/* ------------------------------------------------------------------- world */

struct world {
    struct cluster *c;
    struct server *home, *far;
    pc_client *writer;             /* at the home */
    pc_client *reader, *other;     /* at the node of the test */
    struct server *node;
    uint64_t reader_id;            /* of its connection */
    struct pc_region_info info;
    int trap;
};

static struct world world_start(const char *tag, int trap, int node)
{
    struct world w = {.c = cluster_start(2, tag), .trap = trap};
    w.home = &w.c->servers[0];
    w.far = &w.c->servers[1];
    w.node = &w.c->servers[node];
    w.writer = attach(w.home, trap);
    w.other = attach(w.node, trap);
    w.reader = attach(w.node, trap);
    w.reader_id = newest(w.node);
    w.info = build(w.c, w.home, w.writer, 1, N_BLOCKS << 12, 0);
    return w;
}

/* No lease is left, whatever happened to connections. */
static void world_stop(struct world *w)
{
    pc_client_close(w->reader);
    pc_client_close(w->other);
    pc_client_close(w->writer);
    SOON(leases(w->home) == 0 && leases(w->far) == 0);
    cluster_stop(w->c);
}

static const struct pc_run changed = {5, 2};

static void next_version(struct world *w, uint64_t base)
{
    CHECK(commit(w->c, w->home, w->writer, &w->info, base, &changed, 1) == base + 1);
}

/* Somebody of the node opens the newest version: what nobody leases moves there. */
static void others_go_on(struct world *w, uint64_t version)
{
    check_at(w->c, w->other, &w->info, version);
}

/* ------------------------------------------------------------------- tests */

/* What a process maps stays as it is while it looks for its server. */
static void test_reads_on(int trap, int node)
{
    struct world w = world_start("on", trap, node);
    struct pc_mapping m = map_at(w.reader, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    uint64_t held = leases(w.node);
    shut_door(w.node);
    lose(w.node, w.reader_id);
    for (uint64_t v = 0; v < 3; v++) {
        next_version(&w, v);
        others_go_on(&w, v + 1);
        check_version(w.c, &m, &w.info, 0);
    }
    SOON(leases(w.node) == held);
    open_door(w.node);
    SOON(stats_of(w.node).reattached == 1);
    check_version(w.c, &m, &w.info, 0);
    next_version(&w, 3);
    others_go_on(&w, 4);
    check_version(w.c, &m, &w.info, 0);
    SOON(leases(w.node) == held);
    OK(pc_client_unmap(w.reader, m.id));
    SOON(leases(w.node) == held - 1);
    SOON(stats_of(w.home).commits_applied == 4);
    world_stop(&w);
}

static void test_at_home(int trap)
{
    test_reads_on(trap, 0);
}

static void test_elsewhere(int trap)
{
    test_reads_on(trap, 1);
}

/* What it unmaps meanwhile is nobody's when it has attached the rest. */
static void test_unmapped_meanwhile(int trap)
{
    struct world w = world_start("unmapped", trap, 1);
    struct pc_region_info second = build(w.c, w.home, w.writer, 2, N_BLOCKS << 12, 0);
    struct pc_mapping m = map_at(w.reader, &w.info, 0, 0), n = map_at(w.reader, &second, 0, 0);
    check_version(w.c, &n, &second, 0);
    shut_door(w.node);
    lose(w.node, w.reader_id);
    SOON(stats_of(w.node).clients == 1);
    OK(pc_client_unmap(w.reader, n.id));
    open_door(w.node);
    SOON(stats_of(w.node).reattached == 1);
    SOON(leases(w.node) == 1);
    check_version(w.c, &m, &w.info, 0);
    /* So it keeps no memory from moving on. */
    CHECK(commit(w.c, w.home, w.writer, &second, 0, &changed, 1) == 1);
    check_at(w.c, w.other, &second, 1);
    CHECK(stats_of(w.node).advances == 1 && stats_of(w.node).forks == 0);
    world_stop(&w);
}

/* So with what rests, which ends when the connection does. */
static void test_rests(int trap)
{
    pc__idle_ns = FOR_EVER;
    struct world w = world_start("rests", trap, 1);
    struct pc_mapping m = map_at(w.reader, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    OK(pc_client_unmap_later(w.reader, m.id));
    lose(w.node, w.reader_id);
    SOON(leases(w.node) == 0);
    m = map_at(w.reader, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    OK(pc_client_unmap_later(w.reader, m.id)); /* and with what rests when its client closes */
    world_stop(&w);
}

/* Client after client is closed cleanly, in a process that lives on. */
static void test_clean_close(int trap)
{
    pc__idle_ns = FOR_EVER;
    struct world w = world_start("clean", trap, 1);
    for (int i = 0; i < 20; i++) {
        pc_client *client = attach(w.node, trap);
        struct pc_mapping m = map_at(client, &w.info, 0, 0), p;
        check_version(w.c, &m, &w.info, 0);
        p = map_at(client, &w.info, 0, PC_MAP_PRIVATE);
        (void)p;
        if (i % 2)
            OK(pc_client_unmap_later(client, m.id));
        pc_client_close(client);
        SOON_IN(leases(w.node) == 0, 5);
    }
    world_stop(&w);
}

/* It is lost, does not come back, and closes. */
static void test_closed_while_lost(int trap)
{
    struct world w = world_start("lost", trap, 1);
    pc_client *client = attach(w.node, trap);
    uint64_t id = newest(w.node);
    struct pc_mapping m = map_at(client, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    shut_door(w.node);
    lose(w.node, id);
    SOON(stats_of(w.node).clients == 2);
    CHECK(leases(w.node) == 1);
    pc_client_close(client);
    SOON_IN(leases(w.node) == 0, 10);
    open_door(w.node);
    world_stop(&w);
}

struct looker {
    pthread_t thread;
    pc_client *client;
    struct pc_region_info info;
};

static void *look_often(void *arg)
{
    struct looker *it = arg;
    for (int i = 0; i < 1500; i++) {
        struct pc_mapping m = map_at(it->client, &it->info, 0, 0);
        CHECK(wrong_word((const uint64_t *)(uintptr_t)m.address, 1, 0, 0, pattern) == 512);
        OK(pc_client_unmap(it->client, m.id));
    }
    return NULL;
}

/* Two clients of one process want one region's address, again and again: the second one has another. */
static void test_two_of_one_process(int trap)
{
    struct world w = world_start("two", trap, 0);
    struct looker lookers[2] = {{.client = w.reader, .info = w.info}, {.client = w.other, .info = w.info}};
    for (size_t i = 0; i < 2; i++)
        CHECK(!pthread_create(&lookers[i].thread, NULL, look_often, &lookers[i]));
    for (size_t i = 0; i < 2; i++)
        CHECK(!pthread_join(lookers[i].thread, NULL));
    world_stop(&w);
}

static void end_connection_and_sleep(struct pc__loop *loop, struct pc__mail *mail)
{
    pc__each(link, &loop->sessions)
    {
        struct pc__session *client = pc__of(link, struct pc__session, link);
        if (client->id == mail->a)
            (void)shutdown(client->fd, SHUT_RDWR);
    }
    told_loops++;
    usleep((useconds_t)mail->b);
}

/* It is lost, and closes before the server looks at it: then nothing of it is mapped any more. The
 * longer of the two is longer than a client waits for an answer. */
static void test_closed_before_a_look(int trap)
{
    static const useconds_t busy_us[] = {200000, 1300000};
    struct world w = world_start("look", trap, 1);
    for (size_t i = 0; i < 2; i++) {
        pc_client *client = attach(w.node, trap);
        uint64_t id = newest(w.node);
        struct pc_mapping m = map_at(client, &w.info, 0, 0);
        check_version(w.c, &m, &w.info, 0);
        CHECK(leases(w.node) == 1);
        int before = told_loops;
        for (int l = 0; l < w.node->engine->n_loops; l++) {
            const struct pc__mail mail = {.run = end_connection_and_sleep, .a = id, .b = busy_us[i]};
            OK(pc__loop_post(&w.node->engine->loops[l], &mail));
        }
        SOON(told_loops == before + w.node->engine->n_loops);
        pc_client_close(client);
        SOON_IN(leases(w.node) == 0, 5);
    }
    world_stop(&w);
}

/* A process that was stopped: in the middle of it the connection is lost, and it is killed. */
static void test_killed(int trap)
{
    struct world w = world_start("killed", trap, 0);
    int ready[2];
    CHECK(!pipe(ready));
    pid_t child = fork();
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pc_client *client = attach(w.node, trap);
        struct pc_mapping m = map_at(client, &w.info, 0, 0);
        check_version(w.c, &m, &w.info, 0);
        CHECK(write(ready[1], &m.address, sizeof m.address) == sizeof m.address);
        for (;;)
            pause();
    }
    uint64_t address;
    CHECK(read(ready[0], &address, sizeof address) == sizeof address);
    uint64_t id = newest(w.node);
    CHECK(!kill(child, SIGSTOP));
    int status;
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    lose(w.node, id);
    next_version(&w, 0);
    others_go_on(&w, 1);
    usleep(200000);
    static uint64_t words[512];
    struct iovec mine = {words, sizeof words},
                 its = {(void *)(uintptr_t)(address + (5 << 12)), sizeof words};
    CHECK(process_vm_readv(child, &mine, 1, &its, 1, 0) == (ssize_t)sizeof words);
    if (wrong_word(words, 1, 0, 5, pattern) != 512)
        FAIL("version 0 is read as another one");
    SOON(leases(w.node) == 1); /* others' ends may be on their way */
    usleep(100000);
    CHECK(leases(w.node) == 1);
    CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
    SOON_IN(leases(w.node) == 0, 5);
    SOON(stats_of(w.node).commits_applied == 1);
    world_stop(&w);
}

/* Another program in the same process has none of its memory. */
static void test_exec(int trap)
{
    struct world w = world_start("exec", trap, 0);
    int ready[2];
    char byte;
    CHECK(!pipe(ready));
    pid_t child = fork();
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pc_client *client = attach(w.node, trap);
        struct pc_mapping m = map_at(client, &w.info, 0, 0);
        check_version(w.c, &m, &w.info, 0);
        CHECK(write(ready[1], "x", 1) == 1);
        execlp("sleep", "sleep", "60", (char *)NULL);
        _exit(1);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    SOON_IN(leases(w.node) == 0, 10);
    int status;
    CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
    world_stop(&w);
}

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

static _Atomic bool peers_are_foreign, no_descriptors;

int getsockopt(int fd, int level, int option, void *restrict value, socklen_t *restrict n_bytes)
{
    if (option == SO_PEERPIDFD && no_descriptors) {
        errno = EMFILE;
        return -1;
    }
    int rc = (int)syscall(SYS_getsockopt, fd, level, option, value, n_bytes);
    if (!rc && option == SO_PEERCRED && peers_are_foreign)
        ((struct ucred *)value)->pid = 0;
    return rc;
}

/* Whose first connection came when there was no descriptor for a handle: the next one has it. */
static void test_late_handle(int trap)
{
    (void)trap;
    int pair[2], handle = -1;
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    if ((handle = pc__process_handle_of_peer(pair[0])) < 0)
        _exit(77); /* Linux 6.5 */
    close(handle);
    struct pc_engine *engine = calloc(1, sizeof *engine);
    CHECK(engine);
    pc__leases_open(engine);
    peers_are_foreign = no_descriptors = true;
    struct pc__lessee *lessee = pc__lessee_join(engine, 7, pair[0]);
    CHECK(lessee && lessee->handle == -1);
    no_descriptors = false;
    CHECK(pc__lessee_join(engine, 7, pair[0]) == lessee);
    int got = lessee->handle;
    CHECK(got >= 0 && pc__lessee_lives(lessee));
    CHECK(pc__lessee_join(engine, 7, pair[0]) == lessee && lessee->handle == got);
    for (int i = 0; i < 3; i++)
        pc__lessee_leave(engine, lessee, false);
    CHECK(fcntl(got, F_GETFD) < 0); /* closed with it */
    CHECK(pc__link_empty(&engine->leases.lessees));
    peers_are_foreign = false;
    pc__leases_close(engine);
    free(engine);
    close(pair[0]);
    close(pair[1]);
}

/* Processes that have no pid here: the server is in a namespace of processes of its own. */
static void test_foreign(int trap)
{
    struct { struct pc_region_info info; char name[sizeof ((struct server *)0)->name]; } told_them;
    int where[2][2], ready[2], kill_first[2], killed[2];
    char byte;
    int pair[2], handle = -1;
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    if (geteuid() != 0 || (handle = pc__process_handle_of_peer(pair[0])) < 0)
        _exit(77); /* only root makes such a namespace, and Linux 6.5 such handles */
    CHECK(!pc__process_handle_ended(handle) && !pc__process_handle_ended(-1));
    close(handle);
    CHECK(!pipe(where[0]) && !pipe(where[1]) && !pipe(ready) && !pipe(kill_first) && !pipe(killed));
    pid_t readers[2];
    for (int i = 0; i < 2; i++) {
        if ((readers[i] = fork()))
            continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(kill_first[1]); /* of the server alone: who waits for it sees its end */
        CHECK(read(where[i][0], &told_them, sizeof told_them) == sizeof told_them);
        struct server there = {0};
        memcpy(there.name, told_them.name, sizeof there.name);
        pc_client *client = attach(&there, trap);
        struct pc_mapping m = map_at(client, &told_them.info, 0, 0);
        CHECK(wrong_word((const uint64_t *)(uintptr_t)m.address, 1, 0, 0, pattern) == 512);
        CHECK(write(ready[1], "x", 1) == 1);
        for (;;)
            pause();
    }
    named_after = getpid(); /* there it is process 1, as that of every run of this test */
    CHECK(!unshare(CLONE_NEWPID));
    pid_t serving = fork();
    if (!serving) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        struct world w = world_start("foreign", trap, 1);
        memset(&told_them, 0, sizeof told_them);
        told_them.info = w.info;
        memcpy(told_them.name, w.node->name, sizeof told_them.name);
        for (int i = 0; i < 2; i++) {
            CHECK(write(where[i][1], &told_them, sizeof told_them) == sizeof told_them);
            CHECK(read(ready[0], &byte, 1) == 1);
        }
        CHECK(leases(w.node) == 2);
        shut_door(w.node);
        lose(w.node, newest(w.node));
        lose(w.node, newest(w.node) - 1);
        SOON(stats_of(w.node).clients == 2);
        usleep(300000);
        CHECK(leases(w.node) == 2); /* they live */
        CHECK(write(kill_first[1], "x", 1) == 1 && read(killed[0], &byte, 1) == 1);
        SOON_IN(leases(w.node) == 1, 5);
        usleep(300000);
        CHECK(leases(w.node) == 1); /* the other one does */
        CHECK(write(kill_first[1], "x", 1) == 1 && read(killed[0], &byte, 1) == 1);
        SOON_IN(leases(w.node) == 0, 5);
        open_door(w.node);
        world_stop(&w);
        /* LeakSanitizer cannot look from within such a namespace: /proc is of the outer one. */
        (void)syscall(SYS_exit_group, 0);
    }
    close(kill_first[1]);
    for (int i = 0; i < 2 && read(kill_first[0], &byte, 1) == 1; i++) {
        CHECK(!kill(readers[i], SIGKILL) && waitpid(readers[i], NULL, 0) == readers[i]);
        CHECK(write(killed[1], "x", 1) == 1);
    }
    int status;
    CHECK(waitpid(serving, &status, 0) == serving);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    (void)syscall(SYS_exit_group, 0); /* likewise: its children would be of that namespace */
}

/* The writer's connection is lost at each of its steps. What it sees, and what becomes of it, is as if
 * it had not been: where a step could not be made, it is made again. */
static void test_commit_steps(int trap, int node)
{
    struct world w = world_start("steps", trap, node);
    struct pc_mapping m = map_at(w.other, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    uint64_t version = 0;
    for (int step = 0; step < 6; step++) {
        struct transaction t;
        OK(try_begin(w.c, w.node, w.reader, &w.info, version, &t));
        if (step == 0)
            lose(w.node, 0);
        write_runs(&t, &changed, 1);
        if (step == 1)
            lose(w.node, 0);
        OK(try_stage(&t));
        if (step == 2)
            lose(w.node, 0);
        OK(try_pull(&t));
        (void)decide(&t);
        CHECK(t.version == version + 1);
        if (step == 3)
            lose(w.node, 0);
        tell(&t);
        if (step == 4)
            lose(w.node, 0);
        check_version(w.c, &t.m, &w.info, version + 1); /* its own blocks, and those of its base */
        check_version(w.c, &m, &w.info, 0);
        version++;
        others_go_on(&w, version);
        check_version(w.c, &t.m, &w.info, version);
        OK(pc_client_unmap(w.reader, t.m.id));
        if (step == 5)
            lose(w.node, 0);
        check_at(w.c, w.reader, &w.info, version);
    }
    world_stop(&w);
}

static void test_commit_at_home(int trap)
{
    test_commit_steps(trap, 0);
}

static void test_commit_elsewhere(int trap)
{
    test_commit_steps(trap, 1);
}

/* Lost again and again, also while it attaches: it has its leases at every moment. */
static void test_during_attach(int trap)
{
    struct world w = world_start("attach", trap, 0);
    struct pc_mapping held[3];
    for (uint64_t v = 0; v < 3; v++) {
        held[v] = map_at(w.reader, &w.info, v, 0);
        next_version(&w, v);
    }
    for (uint64_t i = 0; i < 60; i++) {
        lose(w.node, newest(w.node));
        usleep((useconds_t)(i * 37 % 900));
        if (i % 10 == 0)
            next_version(&w, 3 + i / 10);
        for (uint64_t v = 0; v < 3; v++)
            check_version(w.c, &held[v], &w.info, v);
    }
    SOON(leases(w.node) == 3);
    world_stop(&w);
}

/* It waits for a version that its server has not heard of yet, and is lost meanwhile. */
static void *open_version(void *arg)
{
    struct world *w = arg;
    check_at(w->c, w->reader, &w->info, 1);
    return NULL;
}

static void test_version_on_its_way(int trap)
{
    struct world w = world_start("way", trap, 0);
    struct pc_mapping m = map_at(w.reader, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    w.home->hold_published = true;
    w.home->quiet = true;
    pc_client *far = attach(w.far, trap); /* its commit is not told to the home */
    CHECK(commit(w.c, w.far, far, &w.info, 0, &changed, 1) == 1);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, open_version, &w));
    SOON(w.home->published_asked > 0);
    for (int i = 0; i < 5; i++) {
        lose(w.node, newest(w.node));
        usleep(3000);
        check_version(w.c, &m, &w.info, 0);
    }
    w.home->hold_published = false;
    pthread_join(thread, NULL);
    check_version(w.c, &m, &w.info, 0);
    OK(pc_client_unmap(w.reader, m.id));
    SOON(leases(w.node) == 0);
    pc_client_close(far);
    world_stop(&w);
}

/* A client that says no more than it must. */
static void say(int fd, uint16_t type, uint32_t request_id, const void *body, size_t body_bytes,
                const int *gives)
{
    struct pc__ctl_header header = {.body_bytes = (uint32_t)body_bytes, .type = type,
                                    .request_id = request_id};
    struct iovec from[2] = {{&header, sizeof header}, {(void *)(uintptr_t)body, body_bytes}};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = from, .msg_iovlen = 2};
    if (gives) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), gives, sizeof(int));
    }
    CHECK(sendmsg(fd, &message, 0) > 0);
    struct {
        struct pc__ctl_header header;
        char body[256];
    } reply;
    if (request_id) {
        CHECK(recv(fd, &reply, sizeof reply, 0) >= (ssize_t)sizeof reply.header);
        CHECK(reply.header.type == PC__CTL_REPLY && reply.header.status == 0);
    }
}

static int connect_as(struct server *s, uint64_t number)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path + 1, s->name, strlen(s->name));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), trap = eventfd(0, EFD_NONBLOCK);
    CHECK(!connect(fd, (struct sockaddr *)&address,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(s->name))));
    struct pc__ctl_hello hello = {.wire_version = PC__WIRE_VERSION, .trap = PC_TRAP_UFFD_USER,
                                  .sender_id = number, .library_version = "test"};
    say(fd, PC__CTL_HELLO, 1, &hello, sizeof hello, &trap);
    close(trap);
    return fd;
}

static void lease(const struct world *w, int fd, uint64_t id)
{
    const struct pc__ctl_open open = {.mapping_id = id, .region = 1, .length_bytes = N_BLOCKS << 12,
                                      .address = w->info.base_address + (id << 20)};
    say(fd, PC__CTL_OPEN, 2, &open, sizeof open, NULL);
}

/* What was leased and is not mapped yet may be mapped in a moment: it stays until the process says what
 * it has, on whichever connection that comes first. One without a number never says it. */
static void test_said(int trap)
{
    struct world w = world_start("said", trap, 1);
    const uint64_t number = 1ull << 63 | 5;
    for (int i = 0; i < 2; i++) {
        const uint16_t word = i ? PC__CTL_LEFT : PC__CTL_ATTACHED;
        int first = connect_as(w.node, number);
        lease(&w, first, 1);
        close(first);
        usleep(200000);
        CHECK(leases(w.node) == 1);
        int another = connect_as(w.node, number + 1);
        say(another, word, 0, NULL, 0, NULL); /* of another client */
        int second = connect_as(w.node, number);
        lease(&w, second, 2);
        usleep(50000);
        CHECK(leases(w.node) == 2);
        say(second, word, 0, NULL, 0, NULL);
        SOON_IN(leases(w.node) == 1, 5);
        /* The newer connection is first. */
        int third = connect_as(w.node, number);
        say(third, word, 0, NULL, 0, NULL);
        say(third, PC__CTL_PING, 3, NULL, 0, NULL);
        close(second);
        SOON_IN(leases(w.node) == 0, 5);
        lease(&w, third, 3);
        close(third);
        close(another);
        usleep(50000);
        CHECK(leases(w.node) == (word == PC__CTL_ATTACHED ? 1 : 0));
        second = connect_as(w.node, number);
        say(second, PC__CTL_LEFT, 0, NULL, 0, NULL);
        SOON_IN(leases(w.node) == 0, 5);
        close(second);
    }
    int nameless = connect_as(w.node, 0);
    lease(&w, nameless, 1);
    close(nameless);
    SOON_IN(leases(w.node) == 0, 5);
    world_stop(&w);
}

/* A region is freed: it is told idle when its last reader goes, lost or not. */
static void test_freed(int trap)
{
    struct world w = world_start("freed", trap, 1);
    struct pc_mapping m = map_at(w.reader, &w.info, 0, 0);
    check_version(w.c, &m, &w.info, 0);
    shut_door(w.node);
    lose(w.node, w.reader_id);
    SOON(stats_of(w.node).clients == 1);
    OK(pc_engine_retire(w.node->engine, 1, 0));
    usleep(100000);
    CHECK(w.node->idle_events == 0);
    check_version(w.c, &m, &w.info, 0);
    open_door(w.node);
    SOON(stats_of(w.node).reattached == 1);
    check_version(w.c, &m, &w.info, 0);
    OK(pc_client_unmap(w.reader, m.id));
    SOON(w.node->idle_events == 1);
    world_stop(&w);
}

/* ------------------------------------------------------------------ random */

#define CLIENTS 4
#define HELD 12

struct held {
    struct pc_mapping m;
    int client;
    uint64_t version;
};

static uint64_t drawn;
static uint64_t draw(uint64_t n)
{
    drawn = drawn * 6364136223846793005ull + 1442695040888963407ull;
    return (drawn >> 33) % n;
}

/* Against the model, which is the registry: whatever is mapped shows its version, at each step. */
static void run_random(int trap, uint64_t seed)
{
    struct cluster *c = cluster_start(2, "random");
    struct server *home = &c->servers[0];
    pc_client *writer = attach(home, trap), *clients[CLIENTS];
    struct server *of[CLIENTS];
    for (int i = 0; i < CLIENTS; i++)
        clients[i] = attach(of[i] = &c->servers[i % 2], trap);
    struct pc_region_info info = build(c, home, writer, 1, N_BLOCKS << 12, 0);
    struct held held[HELD];
    size_t n = 0;
    uint64_t version = 0;
    drawn = seed;
    for (int step = 0; step < 250; step++) {
        int i = (int)draw(CLIENTS);
        size_t k = n ? draw(n) : 0;
        switch (draw(8)) {
        case 0: case 1: {
            if (n == HELD)
                break;
            uint64_t v = version - (version ? draw(version < 3 ? version + 1 : 3) : 0);
            held[n] = (struct held){.client = i, .version = v};
            held[n].m = map_at(clients[i], &info, v, 0);
            n++;
            break;
        }
        case 2:
            if (!n)
                break;
            OK(draw(2) ? pc_client_unmap(clients[held[k].client], held[k].m.id)
                       : pc_client_unmap_later(clients[held[k].client], held[k].m.id));
            held[k] = held[--n];
            break;
        case 3: case 4: {
            const struct pc_run run = {draw(N_BLOCKS - 4), 1 + draw(4)};
            pc_client *client = draw(2) ? writer : clients[i];
            struct server *node = client == writer ? home : of[i];
            CHECK(commit(c, node, client, &info, version, &run, 1) == version + 1);
            version++;
            break;
        }
        case 5:
            lose(&c->servers[draw(2)], 0);
            break;
        case 6:
            lose(of[i], 1 + draw(newest(of[i])));
            break;
        default:
            usleep((useconds_t)draw(3000));
        }
        for (size_t j = 0; j < n; j++) {
            size_t block = draw(N_BLOCKS - 8);
            uint64_t *owners = registry_owners(c->registry, 1, held[j].version, N_BLOCKS);
            for (size_t b = block; b < block + 8; b++)
                check_block(c, &held[j].m, &info, held[j].version, owners[b], b);
            free(owners);
        }
    }
    for (size_t j = 0; j < n; j++) {
        check_version(c, &held[j].m, &info, held[j].version);
        OK(pc_client_unmap(clients[held[j].client], held[j].m.id));
    }
    for (int i = 0; i < CLIENTS; i++)
        pc_client_close(clients[i]);
    pc_client_close(writer);
    SOON(leases(home) == 0 && leases(&c->servers[1]) == 0);
    cluster_stop(c);
}

static void test_random(int trap)
{
    pc__idle_ns = SECOND / 50;
    for (uint64_t seed = 1; seed <= 6; seed++)
        run_random(trap, seed);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(int);
    } tests[] = {{"at_home", test_at_home},
                 {"elsewhere", test_elsewhere},
                 {"unmapped_meanwhile", test_unmapped_meanwhile},
                 {"rests", test_rests},
                 {"clean_close", test_clean_close},
                 {"closed_while_lost", test_closed_while_lost},
                 {"closed_before_a_look", test_closed_before_a_look},
                 {"two_of_one_process", test_two_of_one_process},
                 {"killed", test_killed},
                 {"exec", test_exec},
                 {"foreign", test_foreign},
                 {"late_handle", test_late_handle},
                 {"commit_at_home", test_commit_at_home},
                 {"commit_elsewhere", test_commit_elsewhere},
                 {"during_attach", test_during_attach},
                 {"version_on_its_way", test_version_on_its_way},
                 {"said", test_said},
                 {"freed", test_freed},
                 {"random", test_random}};
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    const char *only = argc > 1 ? argv[1] : "";
    int failed = 0;
    for (size_t t = 0; t < 2; t++)
        for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
            if (strstr(tests[i].name, only))
                failed += run_test(tests[i].name, tests[i].run, traps[t], 120);
    return failed != 0;
}
