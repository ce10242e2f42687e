/* test_version_crash.c - versions through restarts: of the home's server and of a far one, with a
 * keeper, in order and by SIGKILL at any moment. */
#include "tests/support/commit.h"
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/length.h"

#include "client/client.h"
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static const struct pc_run some[] = {{3, 1}, {10, 20}, {100, 1}, {200, 56}};
static const struct pc_run one[] = {{15, 1}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

static bool hides; /* a sleeper: from others of its user */

/* A process that maps a version, stops itself, and when it goes on checks what it maps. */
static pid_t sleeper(struct cluster *c, struct server *server, const struct pc_region_info *info,
                     uint64_t version, int trap)
{
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        close_range(3, ~0u, 0); /* the servers' own */
        pc_client *client = attach(server, trap);
        struct pc_mapping m = map_at(client, info, version, 0);
        check_version(c, &m, info, version);
        CHECK(!hides || !prctl(PR_SET_DUMPABLE, 0));
        raise(SIGSTOP);
        check_version(c, &m, info, version);
        usleep(300000);
        check_version(c, &m, info, version);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    return child;
}

static void wake_and_reap(pid_t child)
{
    int status;
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* After a restart, a version that somebody has mapped and did not attach to again yet stays: it is
 * not moved, and not dropped. node 0: at the home; 1: far. */
static void slow_to_attach(int trap, int node)
{
    struct keeper k = keeper_start("slow");
    told.settle_ns = 3 * SECOND;
    struct cluster *c = cluster_new(2);
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "slow", node == 0 ? to_keeper : -1);
    server_start(c, 1, "slow", node == 1 ? to_keeper : -1);
    pc_client *home = attach(&c->servers[0], trap), *near = attach(&c->servers[node], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, MIB, 0);
    pid_t v0 = sleeper(c, &c->servers[node], &info, 0, trap);
    CHECK(commit(c, &c->servers[0], home, &info, 0, some, N(some)) == 1);
    pid_t v1 = sleeper(c, &c->servers[node], &info, 1, trap);
    server_stop(c, node);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, node, "slow", to_keeper);
    CHECK(commit(c, &c->servers[0], home, &info, 1, one, 1) == 2);
    for (int i = 0; i < 3; i++)
        for (uint64_t v = 0; v < 3; v++)
            check_at(c, near, &info, v);
    wake_and_reap(v0);
    wake_and_reap(v1);
    sleep(3);
    check_at(c, near, &info, 2);
    SOON(region_of(&c->servers[node], 1).generations == 1); /* and in the end they are gone */
    pc_client_close(near);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}
static void test_slow_to_attach_home(int trap)
{
    slow_to_attach(trap, 0);
}
static void test_slow_to_attach_far(int trap)
{
    slow_to_attach(trap, 1);
}

/* One loop of a server that stops ends before another: meanwhile the other's clients go on. */
struct restless {
    pc_client *client;
    const struct pc_region_info *info;
    pthread_t thread;
    _Atomic bool stop;
};
#define RESTLESS 6

static void *open_and_close(void *arg)
{
    struct restless *r = arg;
    for (uint64_t v = 1; !r->stop; v = v % 4 + 1) {
        struct pc_mapping m = map_at(r->client, r->info, v, PC_MAP_PRIVATE);
        OK(pc_client_prefetch(r->client, m.id, some, N(some), true, WAIT));
        OK(pc_client_unmap(r->client, m.id));
    }
    return NULL;
}

/* What a client of the first loop maps outlives a server that is stopped and started. */
static void test_stopped_loop_by_loop(int trap)
{
    struct keeper k = keeper_start("loops");
    told.settle_ns = 20 * SECOND;
    struct cluster *c = cluster_new(2);
    struct server *far = &c->servers[1];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "loops", -1);
    server_start(c, 1, "loops", to_keeper);
    pc_client *home = attach(&c->servers[0], trap);
    pc_client *first = attach(far, trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, MIB, 0);
    for (uint64_t v = 0; v < 4; v++)
        CHECK(commit(c, &c->servers[0], home, &info, v, some, N(some)) == v + 1);
    struct restless restless[RESTLESS];
    for (int i = 0; i < RESTLESS; i++) {
        restless[i] = (struct restless){.client = attach(far, trap), .info = &info};
        CHECK(!pthread_create(&restless[i].thread, NULL, open_and_close, &restless[i]));
    }
    const int rounds = (int)rounds_of(50, 120);
    for (int round = 0; round < rounds; round++) {
        struct pc_mapping m = map_at(first, &info, (uint64_t)round % 5, PC_MAP_PRIVATE);
        (void)at(&m, 0);
        server_stop(c, 1);
        close(to_keeper);
        to_keeper = keeper_connect(&k);
        server_start(c, 1, "loops", to_keeper);
        check_version(c, &m, &info, (uint64_t)round % 5);
        OK(pc_client_unmap(first, m.id));
    }
    for (int i = 0; i < RESTLESS; i++) {
        restless[i].stop = true;
        pthread_join(restless[i].thread, NULL);
        pc_client_close(restless[i].client);
    }
    pc_client_close(first);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* The base itself is of that version: nothing lies in an overlay, for those who lease an older one. */
static bool base_is_at(const struct server *server, uint64_t version)
{
    struct pc__region *region = pc__region_get(server->engine, 1);
    pthread_mutex_lock(&region->lock);
    const struct pc__home *home = region->home;
    bool is = home->base.version == version && !home->base_changes && home->overlay.memfd < 0;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return is;
}

static bool was_killed(pid_t child)
{
    siginfo_t ended = {0};
    return !waitid(P_PID, (id_t)child, &ended, WEXITED | WNOHANG | WNOWAIT) &&
           ended.si_code == CLD_KILLED && ended.si_status == SIGKILL;
}

/* Who is stopped for longer than it has to attach again never reads what was moved: it has ended
 * before anything moves. Others that map it have attached again, and go on. node 0: at the home; 1: far. */
static void too_slow_to_attach(int trap, int node)
{
    struct keeper k = keeper_start("late");
    told.settle_ns = 2 * SECOND;
    struct cluster *c = cluster_new(2);
    struct server *server = &c->servers[node];
    int to_keeper = keeper_connect(&k), status;
    server_start(c, 0, "late", node == 0 ? to_keeper : -1);
    server_start(c, 1, "late", node == 1 ? to_keeper : -1);
    pc_client *home = attach(&c->servers[0], trap), *near = attach(server, trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, MIB, 0);
    pid_t stopped = sleeper(c, server, &info, 0, trap);
    server_stop(c, node);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, node, "late", to_keeper);
    CHECK(commit(c, &c->servers[0], home, &info, 0, some, N(some)) == 1);
    CHECK(commit(c, &c->servers[0], home, &info, 1, one, 1) == 2);
    check_at(c, near, &info, 0); /* as long as it may map it */
    SOON(!server->engine->settle_until_ns);
    CHECK(was_killed(stopped));
    if (node == 0)
        SOON(base_is_at(server, 2));
    check_at(c, near, &info, 2);
    kill(stopped, SIGCONT);
    CHECK(waitpid(stopped, &status, 0) == stopped);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    pc_client_close(near);
    pc_client_close(home);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}
static void test_too_slow_to_attach_home(int trap)
{
    too_slow_to_attach(trap, 0);
}
static void test_too_slow_to_attach_far(int trap)
{
    too_slow_to_attach(trap, 1);
}

/* Of the calling thread, and those that it starts. */
static void may_look_at_others(bool may)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct set[2];
    CHECK(!syscall(SYS_capget, &header, set));
    set[0].effective = set[0].permitted;
    set[1].effective = set[1].permitted;
    if (!may) {
        set[0].effective &= ~(1u << CAP_SYS_PTRACE | 1u << CAP_SYS_ADMIN);
        set[1].effective &= ~CAP_TO_MASK(CAP_PERFMON);
    }
    CHECK(!syscall(SYS_capset, &header, set));
}

/* Where the kernel does not show what a process maps, it has as much time again, and the log says so. */
static void test_hidden_while_stopped(int trap)
{
    struct keeper k = keeper_start("hidden");
    told.settle_ns = SECOND;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k), status;
    server_start(c, 0, "hidden", to_keeper);
    pc_client *client = attach(server, trap);
    struct pc_region_info info = build(c, server, client, 1, MIB, 0);
    hides = true;
    pid_t stopped = sleeper(c, server, &info, 0, trap);
    server_stop(c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    may_look_at_others(false);
    const uint64_t began_ns = pc__now_ns();
    server_start(c, 0, "hidden", to_keeper);
    may_look_at_others(true);
    CHECK(commit(c, server, client, &info, 0, some, N(some)) == 1);
    while (server->engine->settle_until_ns) {
        CHECK(waitpid(stopped, &status, WNOHANG) == 0);
        usleep(10000);
    }
    const uint64_t took_ns = pc__now_ns() - began_ns;
    CHECK(took_ns >= 2 * SECOND && took_ns < 30 * SECOND);
    SOON(server->log_events > 0);
    SOON(base_is_at(server, 1));
    kill(stopped, SIGKILL);
    CHECK(waitpid(stopped, &status, 0) == stopped);
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

static void cut_off_here(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    pc__each(link, &loop->sessions)
        shutdown(pc__of(link, struct pc__session, link)->fd, SHUT_RDWR);
}

static void cut_off_all(struct pc_engine *engine)
{
    const struct pc__mail mail = {.run = cut_off_here};
    for (int i = 0; i < engine->n_loops; i++)
        OK(pc__loop_post(&engine->loops[i], &mail));
}

static bool somebody_waits(struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    bool waits = !pc__link_empty(&region->pending);
    pthread_mutex_unlock(&region->lock);
    return waits;
}

static bool worker_is_held_up(struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    bool held_up = region->home->base_changes && region->home->held_up;
    pthread_mutex_unlock(&region->lock);
    return held_up;
}

/* A private mapping that the home's base may change under, to the version that it has written
 * itself: it is found again also while that goes on, and then holds that version. */
static void test_follower_attaches(int trap)
{
    struct cluster *c = cluster_start(1, "follower");
    struct server *server = &c->servers[0];
    pc_client *client = attach(server, trap);
    struct pc_region_info info = build(c, server, client, 1, MIB, 0);
    struct transaction t;
    OK(try_begin(c, server, client, &info, 0, &t));
    write_runs(&t, one, 1);
    OK(try_stage(&t));
    CHECK(decide(&t) == 1);
    struct pc__region *region = pc__region_get(server->engine, 1);
    pthread_mutex_lock(&region->lock); /* a reply that does not get on */
    unsigned held = pc__home_hold(region->home);
    pthread_mutex_unlock(&region->lock);
    tell(&t);
    SOON(worker_is_held_up(region));
    cut_off_all(server->engine);
    SOON(somebody_waits(region)); /* its ATTACH */
    pc__home_release(server->engine, region, region->home, held);
    SOON(stats_of(server).reattached == 1);
    CHECK(commit(c, server, client, &info, 1, some, N(some)) == 2);
    usleep(300000);
    check_version(c, &t.m, &info, 1);
    OK(pc_client_unmap(client, t.m.id));
    SOON(stats_of(server).commits_applied == 2 && region_of(server, 1).generations == 1);
    check_at(c, client, &info, 2);
    pc__region_put(server->engine, region);
    pc_client_close(client);
    cluster_stop(c);
}

/* What keeps the loops of a server from reading, and has them say something meanwhile. */
static _Atomic int n_held, n_said;
static _Atomic bool may_say, may_go_on;

static void hold_here(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    const struct pc__ctl_let_go other = {.region = 99};
    n_held++;
    while (!may_say)
        usleep(1000);
    pc__each(link, &loop->sessions)
        pc__session_send(pc__of(link, struct pc__session, link), PC__CTL_LET_GO, 0, 0, &other,
                         sizeof other, -1);
    n_said++;
    while (!may_go_on)
        usleep(1000);
}

/* A client that closes with words of its server unread: what it said last is heard all the same,
 * though the first that the server hears of it is that its words were lost. */
static void test_left_with_words_unread(int trap)
{
    struct cluster *c = cluster_start(1, "unread");
    struct server *server = &c->servers[0];
    pc_client *home = attach(server, trap), *client = attach(server, trap);
    struct pc_region_info info = build(c, server, home, 1, MIB, 0);
    struct pc_mapping m = map_at(client, &info, 0, 0);
    CHECK(at(&m, 0) == pattern(1, 0) && stats_of(server).mappings == 1);
    const struct pc__mail mail = {.run = hold_here};
    n_held = n_said = 0;
    for (int i = 0; i < server->engine->n_loops; i++)
        OK(pc__loop_post(&server->engine->loops[i], &mail));
    SOON(n_held == server->engine->n_loops);
    int same = dup(client->socket); /* or it would be closed too early */
    CHECK(same >= 0);
    pc_client_close(client);
    may_say = true;
    SOON(n_said == server->engine->n_loops);
    close(same);
    may_go_on = true;
    SOON(stats_of(server).clients == 1);
    SOON(stats_of(server).mappings == 0);
    pc_client_close(home);
    cluster_stop(c);
}

/* A version whose predecessor never came waits no longer than its region lives. */
static void test_gap_of_a_freed_region(int trap)
{
    struct cluster *c = cluster_start(1, "gap");
    struct server *server = &c->servers[0];
    pc_client *client = attach(server, trap);
    struct pc_region_info info = build(c, server, client, 1, MIB, 0);
    struct transaction first, second;
    OK(try_begin(c, server, client, &info, 0, &first));
    OK(try_begin(c, server, client, &info, 0, &second));
    write_runs(&first, one, 1);
    write_runs(&second, &some[0], 1);
    OK(try_stage(&second));
    CHECK(decide(&first) == 1 && decide(&second) == 2);
    CHECK(pc_engine_publish(server->engine, 1, 2, second.id) == PC_ERR_NO_VERSION);
    CHECK(stats_of(server).layers == 1);
    pc_client_close(client);
    OK(pc_engine_retire(server->engine, 1, 0));
    OK(pc_engine_retire(server->engine, 1, 1));
    SOON(stats_of(server).layers == 0);
    CHECK(stats_of(server).layer_bytes == 0);
    cluster_stop(c);
}

/* A region of somebody else's memory: the next server is given that again, and has the rest. */
#define FAILS_WITH(call, error) CHECK((call) == (error))
static void test_shared(int trap)
{
    struct keeper k = keeper_start("shared");
    told.settle_ns = 300 * 1000000ull;
    struct cluster *c = cluster_new(1);
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "shared", to_keeper);
    struct pc_region_info info = {.region = 1, .base_address = PC_WINDOW_BEGIN + (1ull << 28),
                                  .length_bytes = MIB};
    uint64_t *memory = malloc(MIB), version = 0;
    fill_pattern(memory, 1, 0, MIB);
    const struct pc_segment segment = {0, MIB, (uint64_t)(uintptr_t)memory};
    publish(c, info, c->servers[0].id);
    for (int round = 0; round < 4; round++) {
        int fd;
        OK(pc_engine_create_shared(c->servers[0].engine, &info, &segment, 1, &fd));
        close(fd);
        FAILS_WITH(pc_engine_create_shared(c->servers[0].engine, &info, &segment, 1, &fd),
                   PC_ERR_EXISTS);
        OK(pc_engine_seal(c->servers[0].engine, 1));
        pc_client *client = attach(&c->servers[0], trap);
        for (uint64_t v = 0; v <= version; v++)
            check_at(c, client, &info, v);
        const struct pc_run *runs = round % 2 ? one : some;
        version = commit(c, &c->servers[0], client, &info, version, runs, round % 2 ? 1 : N(some));
        CHECK(version == (uint64_t)round + 1);
        for (uint64_t v = 0; v <= version; v++)
            check_at(c, client, &info, v);
        struct transaction t; /* and one that the server hears of only before its end */
        OK(try_begin(c, &c->servers[0], client, &info, version, &t));
        write_runs(&t, one, 1);
        OK(try_stage(&t));
        server_stop(c, 0);
        pc_client_close(client); /* or it asks for the region before that is given again */
        close(to_keeper);
        to_keeper = keeper_connect(&k);
        server_start(c, 0, "shared", to_keeper);
        FAILS_WITH(pc_engine_publish(c->servers[0].engine, 1, version + 1, 4711), PC_ERR_HOME_LOST);
        OK(pc_engine_drop_staged(c->servers[0].engine, 1, t.id));
    }
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
    free(memory);
}

/* ------------------------------------------------------------- a kill storm */

struct storm {
    struct cluster *c; /* of the process that asks: its server 0, the home, is in another one */
    struct pc_region_info info;
    struct keeper keeper;
    int trap;
    pc_client *home, *far;
    _Atomic bool is_over;
    bool may_expire;
    struct shared {
        _Atomic pid_t pid; /* of the home; 0: none runs */
        _Atomic bool stop;
        _Atomic unsigned rounds;
    } *shared;
};

struct acceptor {
    int listener;
    struct server *server;
    uint64_t from;
};

static void *accept_all(void *arg)
{
    struct acceptor *a = arg;
    int fd;
    while ((fd = accept4(a->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0)
        OK(pc_engine_serve(a->server->engine, a->from, fd));
    return NULL;
}

static void accept_for(struct cluster *c, int i, uint64_t from, struct acceptor *a, pthread_t *id)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    *a = (struct acceptor){.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
                           .server = &c->servers[i], .from = from};
    CHECK(!bind(a->listener, (struct sockaddr *)&address, bytes) && !listen(a->listener, 64) &&
          !getsockname(a->listener, (struct sockaddr *)&address, &bytes));
    CHECK(!pthread_create(id, NULL, accept_all, a));
    c->registry->ports[i] = address.sin_port;
}

/* The home's process: until it is killed. */
static void be_home(struct storm *s)
{
    struct cluster *c = cluster_new(1);
    registry_free(c->registry);
    c->registry = s->c->registry;
    publish(c, s->info, 0x1000);
    int to_keeper = keeper_connect(&s->keeper);
    server_start(c, 0, "storm", to_keeper);
    struct acceptor acceptor;
    pthread_t thread;
    accept_for(c, 0, 0x1001, &acceptor, &thread);
    s->shared->rounds++;
    s->shared->pid = getpid();
    for (;;) {
        for (size_t i = 0; i < MAX_PULLS; i++) {
            struct pull_request *at = &c->registry->pulls[i];
            if (at->state != 1)
                continue;
            at->error = pc_engine_pull(c->servers[0].engine, at->region, at->commit_id, at->from,
                                       at->layer_bytes);
            if (!at->error)
                at->error = wait_pulled(c, at->commit_id);
            at->state = 2;
        }
        usleep(300);
    }
}

static pid_t nursery(struct storm *s)
{
    fflush(NULL);
    named_after = getpid();
    pid_t child = fork();
    if (child)
        return child;
    while (!s->shared->stop) {
        pid_t home = fork();
        if (!home) {
            alarm(100);
            be_home(s);
        }
        int status;
        waitpid(home, &status, 0);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
            fprintf(stderr, "the home ended by itself: %x\n", (unsigned)status);
            _exit(1);
        }
    }
    _exit(0);
}

static int ready(pc_client *client, const struct pc_mapping *m, const struct pc_region_info *info)
{
    const struct pc_run all = {0, info->length_bytes >> 12};
    return pc_client_prefetch(client, m->id, &all, 1, 1, 2 * WAIT);
}

struct storm_thread {
    struct storm *s;
    bool far;
    unsigned seed;
    _Atomic uint64_t done, expired;
};

static void *storm_read(void *arg)
{
    struct storm_thread *w = arg;
    struct storm *s = w->s;
    pc_client *client = w->far ? s->far : s->home;
    while (!s->is_over) {
        uint64_t latest = registry_latest(s->c->registry, 1);
        uint64_t back = (uint64_t)rand_r(&w->seed) % 8;
        uint64_t v = latest > back ? latest - back : 0;
        struct pc_mapping m;
        int rc = try_map(client, &s->info, v, 0, &m);
        if (rc == PC_ERR_CLASH)
            continue; /* the other client of this process is at the address */
        if (rc == PC_ERR_EXPIRED && s->may_expire) {
            w->expired++;
            continue;
        }
        OK(rc);
        rc = ready(client, &m, &s->info);
        if (rc == PC_ERR_EXPIRED && s->may_expire) {
            w->expired++;
        } else {
            OK(rc);
            check_version(s->c, &m, &s->info, v);
            if (rand_r(&w->seed) % 8 == 0) {
                usleep(300000);
                check_version(s->c, &m, &s->info, v);
            }
            w->done++;
        }
        OK(pc_client_unmap(client, m.id));
        if (rand_r(&w->seed) % 4 == 0)
            usleep((unsigned)rand_r(&w->seed) % 400000);
    }
    return NULL;
}

static void *storm_write(void *arg)
{
    struct storm_thread *w = arg;
    struct storm *s = w->s;
    uint64_t n_blocks = s->info.length_bytes >> 12;
    pc_client *client = w->far ? s->far : s->home;
    while (!s->is_over) {
        struct pc_run runs[MAX_COMMIT_RUNS];
        size_t n = 0;
        uint64_t from = (uint64_t)rand_r(&w->seed) % 64, longest = rand_r(&w->seed) % 2 ? 60 : 4;
        while (n < MAX_COMMIT_RUNS && from + 64 < n_blocks) {
            runs[n++] = (struct pc_run){from, 1 + (uint64_t)rand_r(&w->seed) % longest};
            from += 64 + (uint64_t)rand_r(&w->seed) % (n_blocks / 8);
        }
        struct transaction t;
        uint64_t base = registry_latest(s->c->registry, 1);
        int rc = try_begin(s->c, &s->c->servers[w->far], client, &s->info, base, &t);
        if (rc == PC_ERR_CLASH || (rc == PC_ERR_EXPIRED && s->may_expire))
            continue;
        OK(rc);
        for (size_t i = 0; i < n && !rc; i++)
            rc = pc_client_prefetch(client, t.m.id, &runs[i], 1, 1, 2 * WAIT);
        if (!rc) {
            write_runs(&t, runs, n);
            OK(try_stage(&t));
            rc = try_pull(&t);
            w->done += decide(&t) != 0;
            if (rc) /* it took so long that somebody asked what became of it */
                CHECK(rc == PC_ERR_HOME_LOST && !t.version);
            if (rand_r(&w->seed) % 2) /* else whoever asks for it makes the home ask */
                tell(&t);
            else
                w->seed++;
        } else if (rc != PC_ERR_EXPIRED || !s->may_expire) {
            OK(rc);
        }
        OK(pc_client_unmap(client, t.m.id));
        if (rand_r(&w->seed) % 3 == 0)
            usleep((unsigned)rand_r(&w->seed) % 30000);
    }
    return NULL;
}

static void kill_home(struct storm *s)
{
    uint64_t until = now_ns() + 20 * SECOND;
    while (!s->shared->pid) {
        CHECK(now_ns() < until);
        usleep(500);
    }
    pid_t pid = s->shared->pid;
    s->shared->pid = 0;
    kill(pid, SIGKILL);
}

static void storm(int trap, uint64_t history_bytes, uint64_t seconds, unsigned seed)
{
    struct storm s = {.trap = trap, .keeper = keeper_start("storm"), .may_expire = history_bytes < MIB};
    told.history_bytes = history_bytes;
    told.settle_ns = 3 * SECOND; /* attaching again takes a while where all are busy */
    told.stage_timeout_ns = 3 * SECOND;
    told.fault_timeout_ns = 30 * SECOND; /* likewise: the home is killed over and over */
    s.shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    s.c = cluster_new(2);
    s.info = (struct pc_region_info){.region = 1, .base_address = PC_WINDOW_BEGIN + (1ull << 28),
                                     .length_bytes = 6 * MIB};
    pid_t nurse = nursery(&s);
    while (!s.shared->pid)
        usleep(1000);
    s.c->servers[0].id = 0x1000;
    snprintf(s.c->servers[0].name, sizeof s.c->servers[0].name, "clamor-test-%d-storm-0",
             (int)getpid());
    server_start(s.c, 1, "storm", -1);
    struct acceptor acceptor;
    pthread_t accepts;
    accept_for(s.c, 1, 0x1000, &acceptor, &accepts);
    s.home = attach(&s.c->servers[0], trap);
    s.far = attach(&s.c->servers[1], trap);
    (void)build(s.c, &s.c->servers[0], s.home, 1, s.info.length_bytes, 0);
    const uint64_t until_ns = now_ns() + seconds * SECOND;
    struct storm_thread threads[6];
    uint64_t reads = 0, commits = 0, expired = 0;
    pthread_t ids[6];
    for (unsigned i = 0; i < 6; i++) {
        threads[i] = (struct storm_thread){.s = &s, .far = i % 2, .seed = seed * 31 + i};
        CHECK(!pthread_create(&ids[i], NULL, i < 3 ? storm_read : storm_write, &threads[i]));
    }
    while (now_ns() < until_ns) {
        unsigned roll = (unsigned)rand_r(&seed);
        usleep(roll % 5 == 0 ? 700000 + roll / 7 % 300000 : 5000 + roll / 7 % 120000);
        kill_home(&s);
    }
    /* A busy machine has time to do something, while nothing is killed any more. */
    while ((commits <= 10 || reads <= 10) && now_ns() < until_ns + 60 * SECOND) {
        usleep(10000);
        reads = threads[0].done + threads[1].done + threads[2].done;
        commits = threads[3].done + threads[4].done + threads[5].done;
    }
    s.is_over = true;
    reads = commits = 0;
    for (unsigned i = 0; i < 6; i++) {
        pthread_join(ids[i], NULL);
        *(i < 3 ? &reads : &commits) += threads[i].done;
        expired += threads[i].expired;
    }
    printf("storm: %u rounds, %llu commits, %llu whole reads, %llu expired\n",
           (unsigned)s.shared->rounds, (unsigned long long)commits, (unsigned long long)reads,
           (unsigned long long)expired);
    CHECK(commits > 10 && reads > 10);
    CHECK(commits == registry_latest(s.c->registry, 1));
    check_at(s.c, s.home, &s.info, commits);
    check_at(s.c, s.far, &s.info, commits);
    usleep(600000);
    check_at(s.c, s.home, &s.info, commits);
    pc_client_close(s.home);
    pc_client_close(s.far);
    s.shared->stop = true;
    kill_home(&s);
    int status;
    waitpid(nurse, &status, 0);
    CHECK(status == 0);
    shutdown(acceptor.listener, SHUT_RDWR);
    pthread_join(accepts, NULL);
    close(acceptor.listener);
    cluster_stop(s.c);
    keeper_stop(&s.keeper);
}
static unsigned storm_seed = 1;
static uint64_t storm_seconds;
static void test_storm(int trap)
{
    storm(trap, 256 * MIB, storm_seconds, storm_seed);
}
static void test_storm_little_history(int trap)
{
    storm(trap, 1, storm_seconds, storm_seed);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(slow_to_attach_home),
        TEST(slow_to_attach_far),
        TEST_IN(stopped_loop_by_loop, 200),
        TEST(too_slow_to_attach_home),
        TEST(too_slow_to_attach_far),
        TEST(hidden_while_stopped),
        TEST(follower_attaches),
        TEST(left_with_words_unread),
        TEST(gap_of_a_freed_region),
        TEST(shared),
        TEST(storm),
        TEST(storm_little_history),
    };
    int failed = 0;
    if (argc > 2)
        storm_seed = (unsigned)atoi(argv[2]);
    storm_seconds = argc > 3 ? (uint64_t)atoi(argv[3]) : rounds_of(5, 8);
    failed += run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
    return failed != 0;
}
