/* test_chaos.c - everything at once, and every word that is read is checked.
 *
 * Five servers. The home of variable 1 is in a process of its own, which is killed again and again; the
 * home of variable 2 stays; the other three only hold blocks, and are stopped and started. All have
 * small budgets, each another policy with each start. A sixth one is a fake: a peer that stalls, lies,
 * or has nothing. Connections break. Readers (by faults, prefetches and gathers) and writers go on all
 * the time, over both traps; processes die while they read. In the end nothing is left.
 *
 *   test_chaos [seed [seconds]]    also CHAOS_SEED, CHAOS_SECONDS
 */
#include "tests/support/fake_peer.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"

#include <signal.h>
#include <sys/prctl.h>

enum { KILLED_HOME, STEADY_HOME, FIRST_PEER, N_SERVERS = 5, FAKE = N_SERVERS };
enum { VARIABLES = 2, BLOCKS = 1024, READERS = 5, WRITERS = 3 };
#define BUDGET (2 * MIB) /* half of a variable */

struct chaos {
    struct cluster *c; /* server KILLED_HOME of it has no engine here */
    struct pc_region_info info[VARIABLES];
    struct keeper keepers[N_SERVERS];
    int to_keeper[N_SERVERS];
    uint64_t until_ns;
    unsigned seed;
    struct shared { /* with the other processes */
        _Atomic pid_t home; /* 0: none runs */
        _Atomic bool built, no_more_deaths, stop;
        _Atomic unsigned homes, deaths;
    } *shared;
};

static unsigned below(unsigned *seed, unsigned n)
{
    return (unsigned)rand_r(seed) % n;
}

static void told_for(unsigned *seed)
{
    told.cache_bytes = BUDGET;
    told.cache_policy = (int)below(seed, PC_POLICY_RANDOM + 1);
}

/* ------------------------------------------------------------ connections */

/* Where others connect to a server that is in this process, running or not. */
struct door {
    struct cluster *c;
    struct server *server;
    int listener;
    pthread_t thread;
    unsigned seed;
};

/* Puts somebody in the middle who breaks the connection after a while. */
static int flimsy(int fd)
{
    struct relay *middle = malloc(sizeof *middle);
    int more[2];
    tcp_pair(more);
    *middle = (struct relay){.fds = {fd, more[0]}, .left = FLAKY_BYTES};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, relay_run, middle));
    pthread_detach(thread);
    return more[1];
}

static void *keep_door(void *arg)
{
    struct door *door = arg;
    int fd;
    while ((fd = accept4(door->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        uint64_t from;
        limit_waits(fd);
        if (!recv_all(fd, &from, sizeof from)) {
            close(fd);
            continue;
        }
        if (below(&door->seed, 8) == 0)
            fd = flimsy(fd);
        pthread_mutex_lock(&door->c->serving);
        if (door->server->engine)
            OK(pc_engine_serve(door->server->engine, from, fd));
        else
            close(fd);
        pthread_mutex_unlock(&door->c->serving);
    }
    return NULL;
}

static void open_door(struct door *door, struct cluster *c, int i, unsigned seed)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    *door = (struct door){.c = c, .server = &c->servers[i], .seed = seed,
                          .listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    CHECK(!bind(door->listener, (struct sockaddr *)&address, bytes) &&
          !listen(door->listener, 64) &&
          !getsockname(door->listener, (struct sockaddr *)&address, &bytes));
    CHECK(!pthread_create(&door->thread, NULL, keep_door, door));
    c->registry->ports[i] = address.sin_port;
}

static void close_door(struct door *door)
{
    shutdown(door->listener, SHUT_RDWR);
    pthread_join(door->thread, NULL);
    close(door->listener);
}

/* ----------------------------------------------------------- other processes */

/* A child that does not outlive who forked it, however that ends. */
static pid_t fork_bound(void)
{
    pid_t parent = getpid();
    fflush(NULL);
    pid_t child = fork();
    if (!child && (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent))
        _exit(1);
    return child;
}

/* The home's process: until it is killed. */
static void be_home(struct chaos *s)
{
    struct cluster *c = cluster_new(1);
    registry_free(c->registry);
    c->registry = s->c->registry;
    for (int i = 0; i < VARIABLES; i++)
        publish(c, s->info[i], 0x1000 + (uint64_t)i);
    told_for(&s->seed);
    int to_keeper = keeper_connect(&s->keepers[KILLED_HOME]);
    server_start(c, 0, "chaos", to_keeper);
    struct door door;
    open_door(&door, c, 0, s->seed);
    s->shared->homes++;
    s->shared->home = getpid();
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
        usleep(300); /* another process has no other way to tell us */
    }
}

static pid_t keep_a_home(struct chaos *s)
{
    pid_t child = fork_bound();
    if (child)
        return child;
    while (!s->shared->stop) {
        s->seed++;
        pid_t home = fork_bound();
        if (!home) {
            alarm(200);
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

static uint64_t a_version(struct chaos *s, int variable, unsigned *seed)
{
    uint64_t latest = registry_latest(s->c->registry, s->info[variable].region);
    uint64_t back = below(seed, 6);
    return latest > back ? latest - back : 0;
}

/* A process that reads, until it is killed in the middle of it. */
static void be_mortal(struct chaos *s, unsigned seed)
{
    struct server *server = &s->c->servers[FIRST_PEER + below(&seed, N_SERVERS - FIRST_PEER)];
    int trap = below(&seed, 2) ? PC_TRAP_UFFD : PC_TRAP_SIGSEGV;
    alarm(60);
    pc_client *client = attach(server, trap);
    for (;;) {
        int variable = (int)below(&seed, VARIABLES);
        const struct pc_region_info *info = &s->info[variable];
        uint64_t version = a_version(s, variable, &seed);
        struct pc_mapping m = map_at(client, info, version, 0);
        uint64_t *owners = registry_owners(s->c->registry, info->region, version, BLOCKS);
        for (int i = 0; i < 50; i++) {
            uint64_t block = below(&seed, BLOCKS);
            check_block(s->c, &m, info, version, owners[block], block);
        }
        free(owners);
        OK(pc_client_unmap(client, m.id));
    }
}

/* As above: begun before there are servers, whose descriptors it would hold. */
static pid_t keep_killing(struct chaos *s)
{
    pid_t child = fork_bound();
    if (child)
        return child;
    unsigned seed = s->seed * 7 + 5;
    SOON_IN(s->shared->built, 60);
    while (!s->shared->no_more_deaths) {
        pid_t mortal = fork_bound();
        if (!mortal)
            be_mortal(s, seed);
        usleep(50000 + below(&seed, 400000)); /* so that it dies in different places */
        kill(mortal, SIGKILL);
        int status;
        waitpid(mortal, &status, 0);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
            fprintf(stderr, "a reader ended by itself: %x\n", (unsigned)status);
            _exit(1);
        }
        s->shared->deaths++;
    }
    _exit(0);
}

static void end_of(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* ------------------------------------------------------- readers and writers */

struct actor {
    struct chaos *s;
    pthread_t thread;
    pc_client *client;
    struct server *node;
    unsigned seed;
    uint64_t done, blocks, rows, given_up;
};

static void read_by_touch(struct actor *a, const struct pc_mapping *m,
                          const struct pc_region_info *info, uint64_t version,
                          const uint64_t *owners)
{
    unsigned n = 1 + below(&a->seed, 200), first = below(&a->seed, BLOCKS);
    bool in_order = below(&a->seed, 2);
    for (unsigned i = 0; i < n; i++) {
        uint64_t block = in_order ? (first + i) % BLOCKS : below(&a->seed, BLOCKS);
        check_block(a->s->c, m, info, version, owners[block], block);
    }
    a->blocks += n;
}

static void read_by_prefetch(struct actor *a, const struct pc_mapping *m,
                             const struct pc_region_info *info, uint64_t version,
                             const uint64_t *owners)
{
    struct pc_run runs[40];
    size_t n = 0;
    for (uint64_t at = below(&a->seed, 60); at < BLOCKS && n < 40; n++) {
        uint64_t left = BLOCKS - at, take = 1 + below(&a->seed, 40);
        runs[n] = (struct pc_run){at, take < left ? take : left};
        at += take + 1 + below(&a->seed, 60);
    }
    OK(pc_client_prefetch(a->client, m->id, runs, n, below(&a->seed, 4) != 0, 2 * WAIT));
    for (size_t i = 0; i < n; i++)
        for (uint64_t b = runs[i].first_block; b < runs[i].first_block + runs[i].n_blocks; b++) {
            check_block(a->s->c, m, info, version, owners[b], b);
            a->blocks++;
        }
}

static void read_by_gather(struct actor *a, const struct pc_mapping *m,
                           const struct pc_region_info *info, uint64_t version,
                           const uint64_t *owners)
{
    (void)version;
    struct pc_rows rows = {.offset_bytes = 8 * below(&a->seed, 600),
                           .row_bytes = 8 + 8 * below(&a->seed, below(&a->seed, 4) ? 40 : 1000)};
    rows.stride_bytes = rows.row_bytes + 8 * below(&a->seed, 100);
    uint64_t most = (info->length_bytes - rows.offset_bytes - rows.row_bytes) / rows.stride_bytes;
    uint64_t n_ids = 1 + below(&a->seed, 3000), words = rows.row_bytes / 8;
    uint64_t *ids = malloc(n_ids * 8), *out = malloc(n_ids * rows.row_bytes);
    for (uint64_t i = 0; i < n_ids; i++)
        ids[i] = below(&a->seed, (unsigned)most + 1);
    OK(pc_client_gather(a->client, m->id, &rows, ids, n_ids, out, 2 * WAIT));
    for (uint64_t i = 0; i < n_ids * words; i++) {
        uint64_t offset = rows.offset_bytes + ids[i / words] * rows.stride_bytes + i % words * 8;
        uint64_t owner = owners[offset >> 12];
        CHECK(out[i] == (owner ? written(info->region, owner, offset)
                               : pattern(info->region, offset)));
    }
    free(ids);
    free(out);
    a->rows += n_ids;
}

static void *act_reader(void *arg)
{
    static void (*const ways[])(struct actor *, const struct pc_mapping *,
                                const struct pc_region_info *, uint64_t, const uint64_t *) = {
        read_by_touch, read_by_prefetch, read_by_gather};
    struct actor *a = arg;
    struct chaos *s = a->s;
    while (now_ns() < s->until_ns) {
        int variable = (int)below(&a->seed, VARIABLES);
        const struct pc_region_info *info = &s->info[variable];
        uint64_t version = a_version(s, variable, &a->seed);
        struct pc_mapping m = map_at(a->client, info, version, PC_MAP_PRIVATE);
        uint64_t *owners = registry_owners(s->c->registry, info->region, version, BLOCKS);
        for (unsigned i = 1 + below(&a->seed, 4); i-- > 0;)
            ways[below(&a->seed, 3)](a, &m, info, version, owners);
        free(owners);
        OK(pc_client_unmap(a->client, m.id));
        a->done++;
    }
    return NULL;
}

/* What is read before it is written may be evicted meanwhile: it is private once it is written. */
static void *act_writer(void *arg)
{
    struct actor *a = arg;
    struct chaos *s = a->s;
    while (now_ns() < s->until_ns) {
        int variable = (int)below(&a->seed, VARIABLES);
        const struct pc_region_info *info = &s->info[variable];
        struct pc_run runs[MAX_COMMIT_RUNS];
        size_t n = 0;
        unsigned longest = below(&a->seed, 2) ? 40 : 3;
        for (uint64_t at = below(&a->seed, 64); n < MAX_COMMIT_RUNS && at + 64 < BLOCKS;
             at += 64 + below(&a->seed, 200))
            runs[n++] = (struct pc_run){at, 1 + below(&a->seed, longest)};
        struct transaction t;
        OK(try_begin(s->c, a->node, a->client, info,
                     registry_latest(s->c->registry, info->region), &t));
        write_runs(&t, runs, n);
        OK(try_stage(&t));
        int rc = try_pull(&t);
        if (!rc) {
            a->done += decide(&t) != 0;
        } else { /* the writer's own node went meanwhile, or the home, for long */
            CHECK(rc == PC_ERR_HOME_LOST || rc == PC_ERR_TIMEOUT || rc == PC_ERR_NO_PEER);
            CHECK(registry_outcome(s->c->registry, t.id, info->region) == 0);
            a->given_up++;
        }
        tell(&t);
        OK(pc_client_unmap(a->client, t.m.id));
        usleep(below(&a->seed, 40000)); /* or the log is longer than a test can look through */
    }
    return NULL;
}

static void start_actor(struct chaos *s, struct actor *a, unsigned i, void *(*act)(void *))
{
    int server = (int)(i % N_SERVERS);
    *a = (struct actor){.s = s, .node = &s->c->servers[server], .seed = s->seed * 31 + i,
                        .client = attach(&s->c->servers[server],
                                         i / 2 % 2 ? PC_TRAP_SIGSEGV : PC_TRAP_UFFD)};
    CHECK(!pthread_create(&a->thread, NULL, act, a));
}

/* ------------------------------------------------------------ what goes wrong */

static void kill_home(struct chaos *s)
{
    SOON_IN(s->shared->home != 0, 20);
    pid_t pid = s->shared->home;
    s->shared->home = 0;
    kill(pid, SIGKILL);
}

static void restart(struct chaos *s, int i)
{
    server_stop(s->c, i);
    close(s->to_keeper[i]);
    s->to_keeper[i] = keeper_connect(&s->keepers[i]);
    told_for(&s->seed);
    server_start(s->c, i, "chaos", s->to_keeper[i]);
}

/* Another one in its place, that the steady home believes to have blocks of some version. */
static struct fake_peer *another_fake(struct chaos *s, struct fake_peer *old)
{
    if (old)
        fake_peer_free(old);
    struct fake_peer *peer = fake_peer_start(s->c, FAKE, &s->info[1], (int)below(&s->seed, PEER_ACTS));
    fake_peer_holds(peer, &s->c->servers[STEADY_HOME], a_version(s, 1, &s->seed),
                    64 * below(&s->seed, BLOCKS / 64 - 4), 256);
    return peer;
}

static void make_trouble(struct chaos *s)
{
    struct fake_peer *fake = another_fake(s, NULL);
    while (now_ns() < s->until_ns) {
        usleep(20000 + below(&s->seed, 150000)); /* until the next thing goes wrong */
        switch (below(&s->seed, 4)) {
        case 0:
            kill_home(s);
            break;
        case 1:
            restart(s, FIRST_PEER + (int)below(&s->seed, N_SERVERS - FIRST_PEER));
            break;
        case 2:
            fake = another_fake(s, fake);
            break;
        default:
            fake->acts = (int)below(&s->seed, PEER_ACTS);
            break;
        }
    }
    fake_peer_free(fake);
}

/* ---------------------------------------------------------------- the whole */

static void chaos_start(struct chaos *s)
{
    told.fetch_timeout_ns = SECOND;
    told.fault_timeout_ns = 20 * SECOND;
    told.settle_ns = 3 * SECOND; /* attaching again takes a while where all are busy */
    told.stage_timeout_ns = 5 * SECOND;
    reattach_ns = 20 * SECOND; /* a home starts again when it gets time */
    s->shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s->shared != MAP_FAILED);
    s->c = cluster_new(N_SERVERS);
    s->c->registry->introduced = true;
    named_after = getpid();
    for (int i = 0; i < VARIABLES; i++)
        s->info[i] = (struct pc_region_info){
            .region = 1 + (uint64_t)i, .base_address = PC_WINDOW_BEGIN + ((uint64_t)(i + 1) << 28),
            .length_bytes = (uint64_t)BLOCKS << 12};
    for (int i = 0; i < N_SERVERS; i++) {
        s->keepers[i] = keeper_start((char[]){'a' + (char)i, 0});
        s->c->servers[i].id = 0x1000 + (uint64_t)i;
        snprintf(s->c->servers[i].name, sizeof s->c->servers[i].name, "clamor-test-%d-chaos-%d",
                 (int)getpid(), i);
    }
}

static void build_variables(struct chaos *s)
{
    for (int i = 0; i < VARIABLES; i++) {
        pc_client *client = attach(&s->c->servers[i], PC_TRAP_UFFD);
        struct pc_region_info info = build(s->c, &s->c->servers[i], client, s->info[i].region,
                                           s->info[i].length_bytes, 0);
        const struct pc_region_info *expected = &s->info[i]; /* padding is not compared */
        CHECK(info.region == expected->region && info.version == expected->version &&
              info.base_address == expected->base_address && info.loss == expected->loss &&
              info.length_bytes == expected->length_bytes);
        pc_client_close(client);
    }
}

/* Every node's readers see the newest of each variable; the leases end with that. */
static void check_the_end(struct chaos *s)
{
    for (int i = 0; i < N_SERVERS; i++) {
        pc_client *client = attach(&s->c->servers[i], i % 2 ? PC_TRAP_SIGSEGV : PC_TRAP_UFFD);
        for (int v = 0; v < VARIABLES; v++)
            check_at(s->c, client, &s->info[v],
                     registry_latest(s->c->registry, s->info[v].region));
        pc_client_close(client);
    }
}

static bool is_empty(struct server *server)
{
    struct pc_engine_stats s = stats_of(server);
    return !(s.regions | s.generations | s.mappings | s.clients | s.cached_bytes | s.home_bytes |
             s.layers | s.layer_bytes | s.fetches_in_flight | s.faults_waiting |
             s.history_records);
}

/* The variables are freed: nothing of them is left at any server. */
static void free_variables(struct chaos *s)
{
    for (int i = STEADY_HOME; i < N_SERVERS; i++) {
        struct server *server = &s->c->servers[i];
        SOON_IN(stats_of(server).mappings == 0 && stats_of(server).clients == 0, 10);
        for (int v = 0; v < VARIABLES; v++) {
            uint64_t region = s->info[v].region;
            if (!pc_engine_retire(server->engine, region, 0))
                (void)pc_engine_retire(server->engine, region, 1);
        }
        SOON_IN(is_empty(server), 10);
    }
}

static void chaos_end(struct chaos *s, pid_t homes, struct door *doors)
{
    s->shared->stop = true;
    kill_home(s);
    end_of(homes);
    for (int i = STEADY_HOME; i < N_SERVERS; i++)
        close_door(&doors[i]);
    for (int i = STEADY_HOME; i < N_SERVERS; i++)
        server_stop(s->c, i);
    for (int i = 0; i < N_SERVERS; i++) {
        if (i != KILLED_HOME)
            close(s->to_keeper[i]);
        keeper_stop(&s->keepers[i]);
    }
    munmap(s->shared, 4096);
    cluster_stop(s->c);
}

static unsigned chaos_seed = 1;
static uint64_t chaos_seconds = 6;

static void chaos(int replication)
{
    const struct process_counts before = process_counts();
    struct chaos s = {.seed = chaos_seed};
    struct door doors[N_SERVERS];
    told.replication = replication;
    chaos_start(&s);
    pid_t homes = keep_a_home(&s), mortals = keep_killing(&s);
    SOON_IN(s.shared->home != 0, 20);
    for (int i = STEADY_HOME; i < N_SERVERS; i++) {
        s.to_keeper[i] = keeper_connect(&s.keepers[i]);
        told_for(&s.seed);
        server_start(s.c, i, "chaos", s.to_keeper[i]);
        open_door(&doors[i], s.c, i, s.seed);
    }
    build_variables(&s);
    s.shared->built = true;
    s.until_ns = now_ns() + chaos_seconds * SECOND;
    struct actor actors[READERS + WRITERS];
    for (unsigned i = 0; i < READERS + WRITERS; i++)
        start_actor(&s, &actors[i], i, i < READERS ? act_reader : act_writer);
    make_trouble(&s);
    uint64_t reads = 0, blocks = 0, rows = 0, commits = 0, given_up = 0, committed = 0;
    for (unsigned i = 0; i < READERS + WRITERS; i++) {
        pthread_join(actors[i].thread, NULL);
        *(i < READERS ? &reads : &commits) += actors[i].done;
        blocks += actors[i].blocks;
        rows += actors[i].rows;
        given_up += actors[i].given_up;
        pc_client_close(actors[i].client);
    }
    for (int v = 0; v < VARIABLES; v++)
        committed += registry_latest(s.c->registry, s.info[v].region);
    printf("seed %u: %llu leases, %llu blocks, %llu rows, %llu commits and %llu given up, %u homes, "
           "%u deaths\n", chaos_seed, (unsigned long long)reads, (unsigned long long)blocks,
           (unsigned long long)rows, (unsigned long long)commits, (unsigned long long)given_up,
           (unsigned)s.shared->homes, (unsigned)s.shared->deaths);
    CHECK(commits == committed);
    CHECK(reads > 5 && blocks > 100 && rows > 100 && commits > 1);
    s.shared->no_more_deaths = true;
    end_of(mortals);
    check_the_end(&s);
    free_variables(&s);
    chaos_end(&s, homes, doors);
    check_process_counts(&before);
}

static void test_chaos(int replication)
{
    chaos(replication);
}

int main(int argc, char **argv)
{
    const char *seed = argc > 1 ? argv[1] : getenv("CHAOS_SEED");
    const char *seconds = argc > 2 ? argv[2] : getenv("CHAOS_SECONDS");
    chaos_seed = seed ? (unsigned)atoi(seed) : (unsigned)(now_ns() >> 10 & 0xffffff);
    if (seconds)
        chaos_seconds = (uint64_t)atoi(seconds);
    printf("seed %u, %llu seconds each\n", chaos_seed, (unsigned long long)chaos_seconds);
    unsigned limit = (unsigned)chaos_seconds + 100;
    int failed = run_test("chaos", test_chaos, PC_REPLICATION_P2C, limit);
    failed += run_test("chaos", test_chaos, PC_REPLICATION_RANDOM, limit);
    return failed != 0;
}
