/* test_rebuild.c - a region whose home is lost gets another one: from what peers hold, over both traps.
 * The tests do what the registry does; who waits for a block meanwhile goes on. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"

#include <dirent.h>
#include <sys/stat.h>

#define N_BLOCKS 512u
enum { HOME, PEER, READER, N_SERVERS };

static const struct pc_run all = {0, N_BLOCKS};
static const struct pc_run changed[] = {{3, 1}, {100, 50}, {400, 7}};
static const struct pc_run halves[] = {{0, 256}, {256, 256}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

/* HOME is lost; PEER has all of version 1. */
struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info;
    struct pc_mapping m; /* of READER, at version 1: nothing of it is there */
};

static void prefetch(pc_client *client, const struct pc_mapping *m, struct pc_run run)
{
    OK(pc_client_prefetch(client, m->id, &run, 1, 1, WAIT));
}

static struct world world_of(int trap)
{
    struct world w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "rebuild")};
    w.servers = w.c->servers;
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.servers[i], trap);
    w.info = build(w.c, &w.servers[HOME], w.clients[HOME], 1, (uint64_t)N_BLOCKS << 12, 0);
    CHECK(commit(w.c, &w.servers[PEER], w.clients[PEER], &w.info, 0, changed, N(changed)) == 1);
    struct pc_mapping m = map_at(w.clients[PEER], &w.info, 1, 0);
    prefetch(w.clients[PEER], &m, all);
    check_version(w.c, &m, &w.info, 1);
    OK(pc_client_unmap(w.clients[PEER], m.id));
    w.m = map_at(w.clients[READER], &w.info, 1, 0);
    return w;
}

static void lose_home(struct world *w)
{
    pc_client_close(w->clients[HOME]);
    w->clients[HOME] = NULL;
    w->servers[HOME].lost = true;
    server_stop(w->c, HOME);
}

static void world_end(struct world *w)
{
    clients_close(w->clients, N_SERVERS);
    OK(pc_ended_unmap(w->m.address)); /* it was in use until then: a guard stays at its addresses */
    for (int i = 0; i < N_SERVERS; i++)
        if (w->servers[i].engine)
            SOON(stats_of(&w->servers[i]).layers == 0);
    cluster_end(w->c, &w->counts);
}

static struct pc_region_info at_version(struct pc_region_info info, uint64_t version)
{
    info.version = version;
    return info;
}

/* From two layers of PEER's. */
static void prepare(struct world *w, struct server *home)
{
    int fd;
    const struct pc_region_info info = at_version(w->info, 1);
    struct server *peer = &w->servers[PEER];
    OK(pc_engine_rebuild_begin(home->engine, &info, NULL, 0, &fd));
    for (uint64_t i = 0; i < N(halves); i++) {
        const uint64_t id = 0x7000 + i;
        if (home == peer && i == 0) {
            OK(pc_engine_rebuild_copy(home->engine, info.region, fd, 1, &halves[i], 1));
            continue;
        }
        int64_t bytes =
            pc_engine_stage_cached(peer->engine, info.region, 1, id, &halves[i], 1);
        OK(bytes);
        if (home != peer) {
            OK(pc_engine_pull(home->engine, info.region, id, peer->id, (uint64_t)bytes));
            OK(wait_pulled(w->c, id));
        }
        OK(pc_engine_rebuild_take(home->engine, info.region, fd, id));
        OK(pc_engine_drop_staged(peer->engine, info.region, id));
    }
    CHECK(!region_of(home, info.region).is_home);
    OK(pc_engine_rebuild_seal(home->engine, info.region, fd));
    close(fd);
    CHECK(!region_of(home, info.region).is_home);
}

/* As the registry's journal has it from now on. */
static void write_down(struct world *w, const struct server *home)
{
    pthread_mutex_lock(&w->c->lock);
    w->c->regions[0].home = home->id;
    pthread_mutex_unlock(&w->c->lock);
}

static void activate(struct world *w, struct server *home)
{
    write_down(w, home);
    OK(pc_engine_set_homes(home->engine, w->info.region, &home->id, 1));
    CHECK(region_of(home, w->info.region).is_home);
}

static void *read_it(void *arg)
{
    struct world *w = arg;
    check_version(w->c, &w->m, &w->info, 1);
    return NULL;
}

static void check_expired(struct world *w)
{
    struct pc_mapping m;
    int rc = try_map(w->clients[READER], &w->info, 0, 0, &m);
    if (!rc) {
        rc = pc_client_prefetch(w->clients[READER], m.id, &changed[0], 1, 1, WAIT);
        OK(pc_client_unmap(w->clients[READER], m.id));
    }
    CHECK(rc == PC_ERR_EXPIRED);
}

/* Versions from the loss on are there, older ones are not. */
static void check_goes_on(struct world *w)
{
    check_expired(w);
    struct server *writer = &w->servers[READER];
    CHECK(commit(w->c, writer, w->clients[READER], &w->info, 1, &changed[1], 1) == 2);
    CHECK(commit(w->c, &w->servers[PEER], w->clients[PEER], &w->info, 2, changed, 2) == 3);
    for (int i = PEER; i < N_SERVERS; i++)
        for (uint64_t version = 3; version > 0; version--)
            check_at(w->c, w->clients[i], &w->info, version);
    check_expired(w);
}

static void check_who_waits(int trap, int new_home)
{
    struct world w = world_of(trap);
    struct server *home = &w.servers[new_home], *reader = &w.servers[READER];
    pthread_t thread;
    lose_home(&w);
    reader->hold_home = true;
    CHECK(!pthread_create(&thread, NULL, read_it, &w));
    SOON(reader->homes_asked == 1);
    prepare(&w, home);
    CHECK(stats_of(reader).faults_waiting == 1);
    const uint64_t waited_ns = stats_of(reader).fault_wait_ns; /* it waits still, and that counts */
    usleep(20000);
    CHECK(waited_ns > 0 && stats_of(reader).fault_wait_ns >= waited_ns + 20 * 1000000ull);
    activate(&w, home);
    OK(pc_engine_set_homes(reader->engine, w.info.region, &home->id, 1));
    reader->hold_home = false;
    pthread_join(thread, NULL);
    CHECK(stats_of(reader).faults_failed == 0);
    struct pc_process_waits waits[8];
    CHECK(pc_engine_process_waits(reader->engine, waits, 8) == 1);
    CHECK(waits[0].pid == (uint64_t)getpid() && waits[0].faults >= 1);
    CHECK(waits[0].fault_wait_ns >= waited_ns + 20 * 1000000ull);
    check_goes_on(&w);
    CHECK(region_of(home, w.info.region).is_home);
    world_end(&w);
}

static void test_who_waits_turns_to_a_peer(int trap)
{
    check_who_waits(trap, PEER);
}

static void test_who_waits_is_at_the_new_home(int trap)
{
    check_who_waits(trap, READER);
}

struct rows_reader {
    struct world *w;
    uint64_t out[64];
    int rc;
};

static void *gather_rows(void *arg)
{
    struct rows_reader *r = arg;
    const struct pc_rows rows = {.offset_bytes = 8, .stride_bytes = 8 * PC_BLOCK_BYTES,
                                 .row_bytes = 8};
    uint64_t ids[64];
    for (uint64_t i = 0; i < 64; i++)
        ids[i] = i;
    r->rc = pc_client_gather(r->w->clients[READER], r->w->m.id, &rows, ids, 64, r->out, WAIT);
    return NULL;
}

/* Rows wait as blocks do. */
static void check_rows(int trap, int new_home)
{
    struct world w = world_of(trap);
    struct rows_reader r = {.w = &w};
    pthread_t thread;
    lose_home(&w);
    w.servers[READER].hold_home = true;
    CHECK(!pthread_create(&thread, NULL, gather_rows, &r));
    SOON(w.servers[READER].homes_asked == 1);
    prepare(&w, &w.servers[new_home]);
    activate(&w, &w.servers[new_home]);
    OK(pc_engine_set_homes(w.servers[READER].engine, w.info.region, &w.servers[new_home].id, 1));
    w.servers[READER].hold_home = false;
    pthread_join(thread, NULL);
    OK(r.rc);
    check_version(w.c, &w.m, &w.info, 1);
    for (uint64_t i = 0; i < 64; i++)
        CHECK(r.out[i] == block_at(&w.m, i * 8)[1]);
    world_end(&w);
}

static void test_rows_turn_to_a_peer(int trap)
{
    check_rows(trap, PEER);
}

static void test_rows_are_at_the_new_home(int trap)
{
    check_rows(trap, READER);
}

/* Who waits hears that there will be none; a region of which nothing is left is asked for in vain. */
/* What another process of the reader's node gets that opens version 1. */
static int opened_by_another(struct world *w, int trap)
{
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        pc_client *client = attach(&w->servers[READER], trap);
        struct pc_mapping m;
        _exit(-try_map(client, &w->info, 1, 0, &m));
    }
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    return -WEXITSTATUS(status);
}

/* The registry has said that nobody has it: who opens it is told, before it can touch it. */
static void test_nobody_opens_what_is_lost(int trap)
{
    struct world w = world_of(trap);
    const struct pc_run some = {10, 5};
    prefetch(w.clients[READER], &w.m, some);
    CHECK(opened_by_another(&w, trap) == PC_OK);
    lose_home(&w);
    OK(pc_engine_region_lost(w.servers[READER].engine, w.info.region, PC_ERR_HOME_LOST));
    CHECK(opened_by_another(&w, trap) == PC_ERR_HOME_LOST);
    CHECK(pc_engine_region_lost(w.servers[READER].engine, 77, PC_ERR_HOME_LOST) ==
          PC_ERR_NO_REGION);
    /* It has another one after all. */
    OK(pc_engine_set_homes(w.servers[READER].engine, w.info.region, &w.servers[PEER].id, 1));
    CHECK(opened_by_another(&w, trap) == PC_OK);
    world_end(&w);
}

static void test_no_new_home(int trap)
{
    struct world w = world_of(trap);
    lose_home(&w);
    CHECK(pc_client_prefetch(w.clients[READER], w.m.id, &all, 1, 1, WAIT) == PC_ERR_HOME_LOST);
    SOON(w.servers[READER].homes_asked >= 1);
    /* What is not prepared cannot be the home. */
    CHECK(pc_engine_set_homes(w.servers[PEER].engine, w.info.region, &w.servers[PEER].id, 1) ==
          PC_ERR_HOME_LOST);
    CHECK(pc_engine_cached_versions(w.servers[PEER].engine, 77, NULL, 0) == 0);
    CHECK(pc_engine_cached_blocks(w.servers[PEER].engine, 77, 0, NULL, 0) == 0);
    world_end(&w);
}

/* A home that lives and cannot be reached is waited for, and is not lost. */
static void test_not_reached_for_a_while(int trap)
{
    struct world w = world_of(trap);
    pthread_t thread;
    w.servers[HOME].unreached = true;
    CHECK(!pthread_create(&thread, NULL, read_it, &w));
    SOON(w.servers[HOME].searched >= 3);
    CHECK(stats_of(&w.servers[READER]).faults_waiting == 1);
    w.servers[HOME].unreached = false;
    pthread_join(thread, NULL);
    CHECK(stats_of(&w.servers[READER]).faults_failed == 0 && w.servers[READER].homes_asked == 0);
    world_end(&w);
}

/* Who waits until its deadline hears who is not reached, for how long, and why. */
static void test_never_reached(int trap)
{
    struct world w = world_of(trap);
    char text[64];
    w.servers[HOME].unreached = true;
    CHECK(pc_client_prefetch(w.clients[READER], w.m.id, &all, 1, 1, WAIT) == PC_ERR_TIMEOUT);
    snprintf(text, sizeof text, "server 0x%llx is not reached for ",
             (unsigned long long)w.servers[HOME].id);
    CHECK(strstr(pc_last_message(), text) && strstr(pc_last_message(), " s: connect: it is stopped"));
    const struct pc_rows rows = {.stride_bytes = PC_BLOCK_BYTES, .row_bytes = 64};
    const uint64_t ids[] = {1, 5, 9};
    uint8_t out[3 * 64];
    CHECK(pc_client_gather(w.clients[READER], w.m.id, &rows, ids, 3, out, WAIT) == PC_ERR_TIMEOUT);
    CHECK(strstr(pc_last_message(), text) && strstr(pc_last_message(), " s: connect: it is stopped"));
    CHECK(w.servers[READER].homes_asked == 0);
    w.servers[HOME].unreached = false;
    check_version(w.c, &w.m, &w.info, 1); /* nothing of it stays */
    world_end(&w);
}

/* Where there is no descriptor for a connection to it, this server's limit is named at once. */
static void test_no_descriptor_to_reach_it(int trap)
{
    struct world w = world_of(trap);
    const struct pc_rows rows = {.stride_bytes = PC_BLOCK_BYTES, .row_bytes = 64};
    const uint64_t ids[] = {1, 5, 9};
    uint8_t out[3 * 64];
    char text[160];
    snprintf(text, sizeof text,
             "server 0x%llx is not reached: the page server of this node has no descriptor for a "
             "connection to it: all that its limit (RLIMIT_NOFILE, ",
             (unsigned long long)w.servers[HOME].id);
    w.servers[HOME].unreached = w.servers[HOME].undialled = true;
    CHECK(pc_client_prefetch(w.clients[READER], w.m.id, &all, 1, 1, WAIT) == PC_ERR_DESCRIPTORS);
    CHECK(strstr(pc_last_message(), text));
    CHECK(pc_client_gather(w.clients[READER], w.m.id, &rows, ids, 3, out, WAIT) ==
          PC_ERR_DESCRIPTORS);
    CHECK(strstr(pc_last_message(), text));
    w.servers[HOME].unreached = false;
    check_version(w.c, &w.m, &w.info, 1); /* nothing of it stays */
    world_end(&w);
}

/* It was taken for lost, and the registry says that it is the home all the same. */
static void test_the_old_home_lives(int trap)
{
    struct world w = world_of(trap);
    struct server *reader = &w.servers[READER];
    pthread_t thread;
    w.servers[HOME].lost = reader->hold_home = true;
    CHECK(!pthread_create(&thread, NULL, read_it, &w));
    SOON(reader->homes_asked == 1);
    w.servers[HOME].lost = false;
    OK(pc_engine_set_homes(reader->engine, w.info.region, &w.servers[HOME].id, 1));
    reader->hold_home = false;
    pthread_join(thread, NULL);
    CHECK(stats_of(reader).faults_failed == 0);
    world_end(&w);
}

/* Only blocks that are here, of the version that they are labelled with. */
static void test_what_is_not_there_is_not_given(int trap)
{
    struct world w = world_of(trap);
    pc_engine *peer = w.servers[PEER].engine, *reader = w.servers[READER].engine;
    const uint64_t id = w.info.region;
    const struct pc_run some = {10, 5}, twice[] = {{10, 5}, {12, 1}}, outside = {N_BLOCKS - 1, 2};
    uint64_t versions[4];
    struct pc_run runs[4];
    CHECK(pc_engine_cached_versions(peer, id, versions, 4) == 1 && versions[0] == 1);
    CHECK(pc_engine_cached_blocks(peer, id, 1, runs, 4) == 1 && runs[0].n_blocks == N_BLOCKS);
    CHECK(pc_engine_cached_blocks(peer, id, 0, runs, 4) == 0);
    prefetch(w.clients[READER], &w.m, some);
    CHECK(pc_engine_cached_blocks(reader, id, 1, runs, 4) >= 1 && runs[0].first_block <= 10);
    CHECK(pc_engine_stage_cached(reader, id, 1, 5, &all, 1) == PC_ERR_NO_GENERATION);
    CHECK(pc_engine_stage_cached(reader, id, 0, 5, &some, 1) == PC_ERR_NO_GENERATION);
    CHECK(pc_engine_stage_cached(peer, id, 1, 5, twice, 2) == PC_ERR_RANGE);
    CHECK(pc_engine_stage_cached(peer, id, 1, 5, &outside, 1) == PC_ERR_RANGE);
    CHECK(pc_engine_stage_cached(peer, id, 1, 5, NULL, 0) == PC_ERR_RANGE);
    CHECK(pc_engine_rebuild_copy(peer, id, -1, 1, &outside, 1) == PC_ERR_RANGE);
    CHECK(pc_engine_rebuild_copy(reader, id, -1, 1, &all, 1) != PC_OK);
    CHECK(pc_engine_rebuild_copy(peer, id, -1, 0, &all, 1) == PC_ERR_NO_GENERATION);
    CHECK(pc_engine_rebuild_copy(peer, 77, -1, 0, &all, 1) == PC_ERR_NO_GENERATION);
    CHECK(stats_of(&w.servers[PEER]).layers == 0 && stats_of(&w.servers[READER]).layers == 0);
    world_end(&w);
}

/* An attempt that was given up goes on for a while: it neither fills nor ends the one after it. */
static void test_an_attempt_after_another(int trap)
{
    struct world w = world_of(trap);
    pc_engine *peer = w.servers[PEER].engine;
    const struct pc_region_info info = at_version(w.info, 1);
    int first, second;
    lose_home(&w);
    OK(pc_engine_rebuild_begin(peer, &info, NULL, 0, &first));
    OK(pc_engine_rebuild_begin(peer, &info, NULL, 0, &second));
    OK(pc_engine_stage_cached(peer, info.region, 1, 9, &all, 1));
    CHECK(pc_engine_rebuild_take(peer, info.region, first, 9) == PC_ERR_NO_REGION);
    CHECK(pc_engine_rebuild_seal(peer, info.region, first) == PC_ERR_NO_REGION);
    CHECK(pc_engine_set_homes(peer, info.region, &w.servers[PEER].id, 1) == PC_ERR_HOME_LOST);
    OK(pc_engine_rebuild_take(peer, info.region, second, 9));
    OK(pc_engine_rebuild_seal(peer, info.region, second));
    CHECK(pc_engine_rebuild_seal(peer, info.region, second) == PC_ERR_NO_REGION);
    close(first);
    close(second);
    activate(&w, &w.servers[PEER]);
    check_version(w.c, &w.m, &w.info, 1);
    world_end(&w);
}

/* It is freed while it is rebuilt, or the attempt comes to nothing: no memory stays. */
static void test_freed_meanwhile(int trap)
{
    struct world w = world_of(trap);
    struct server *peer = &w.servers[PEER];
    const struct pc_region_info info = at_version(w.info, 1);
    int fd;
    lose_home(&w);
    prepare(&w, peer);
    OK(pc_engine_rebuild_begin(peer->engine, &info, NULL, 0, &fd)); /* anew */
    OK(pc_engine_retire(peer->engine, info.region, 0));
    SOON(peer->idle_events == 1);
    CHECK(pc_engine_rebuild_seal(peer->engine, info.region, fd) == PC_ERR_NO_REGION);
    CHECK(pc_engine_rebuild_take(peer->engine, info.region, fd, 5) == PC_ERR_NO_REGION);
    close(fd);
    CHECK(region_of(peer, info.region).region == 0);
    world_end(&w);
}

/* Descriptors of this process for the file that fd is of, but for fd. */
static int others_of(int fd)
{
    struct stat mine, other;
    DIR *all_of_them = opendir("/proc/self/fd");
    int n = -1;
    OK(fstat(fd, &mine));
    for (const struct dirent *at; (at = readdir(all_of_them));) {
        if (!fstatat(dirfd(all_of_them), at->d_name, &other, 0)) /* engines close what fstat reads */
            n += other.st_ino == mine.st_ino && other.st_dev == mine.st_dev;
    }
    closedir(all_of_them);
    return n;
}

/* A region that nobody has used on PEER's node: all that there is of it is what is prepared. */
static struct pc_region_info unused_region(const struct world *w)
{
    struct pc_region_info info = at_version(w->info, 1);
    info.region = 99;
    return info;
}

/* What was prepared goes when it is not wanted; what another attempt has prepared stays. */
static void test_what_is_not_wanted_goes(int trap)
{
    struct world w = world_of(trap);
    pc_engine *peer = w.servers[PEER].engine;
    const struct pc_region_info infos[] = {unused_region(&w), at_version(w.info, 1)};
    lose_home(&w);
    for (size_t i = 0; i < N(infos); i++) {
        const struct pc_region_info *info = &infos[i];
        int first, second;
        OK(pc_engine_rebuild_begin(peer, info, NULL, 0, &first));
        OK(pc_engine_rebuild_seal(peer, info->region, first));
        CHECK(others_of(first) == 1);
        int rc = pc_engine_set_homes(peer, info->region, &w.servers[READER].id, 1);
        CHECK(rc == (i == 0 ? PC_ERR_NO_REGION : PC_OK));
        CHECK(others_of(first) == 0);
        OK(pc_engine_rebuild_begin(peer, info, NULL, 0, &second));
        OK(pc_engine_rebuild_drop(peer, info->region, first)); /* of the attempt before */
        CHECK(others_of(second) == 1);
        OK(pc_engine_rebuild_drop(peer, info->region, second));
        CHECK(others_of(second) == 0);
        CHECK(pc_engine_rebuild_seal(peer, info->region, second) == PC_ERR_NO_REGION);
        close(first);
        OK(pc_engine_rebuild_begin(peer, info, NULL, 0, &first));
        OK(pc_engine_rebuild_seal(peer, info->region, first));
        OK(pc_engine_rebuild_drop(peer, info->region, -1));
        CHECK(others_of(first) == 0);
        OK(pc_engine_rebuild_drop(peer, info->region, -1)); /* as often as one likes */
        close(first);
        close(second);
    }
    OK(pc_engine_rebuild_drop(peer, 77, -1));
    prepare(&w, &w.servers[PEER]);
    activate(&w, &w.servers[PEER]);
    OK(pc_engine_rebuild_drop(peer, w.info.region, -1)); /* not a home */
    OK(pc_engine_set_homes(w.servers[READER].engine, w.info.region, &w.servers[PEER].id, 1));
    check_version(w.c, &w.m, &w.info, 1);
    world_end(&w);
}

/* A registry that does not answer is no reason to forget it: its journal may have this home. */
static void test_a_registry_that_is_silent_loses_nothing(int trap)
{
    struct world w = world_of(trap);
    struct server *peer = &w.servers[PEER];
    const struct pc_region_info info = unused_region(&w);
    static const int silent[] = {PC_ERR_TIMEOUT, PC_ERR_HOME_LOST};
    int fd;
    OK(pc_engine_rebuild_begin(peer->engine, &info, NULL, 0, &fd));
    OK(pc_engine_rebuild_seal(peer->engine, info.region, fd));
    for (size_t i = 0; i < N(silent); i++)
        OK(pc_engine_refuse_region(peer->engine, info.region, silent[i]));
    CHECK(others_of(fd) == 1);
    OK(pc_engine_define_region(peer->engine, &info, &peer->id, 1));
    CHECK(region_of(peer, info.region).is_home);
    OK(pc_engine_retire(peer->engine, info.region, 1));
    CHECK(others_of(fd) == 0);
    close(fd);
    OK(pc_engine_rebuild_begin(peer->engine, &info, NULL, 0, &fd));
    OK(pc_engine_refuse_region(peer->engine, info.region, PC_ERR_NO_REGION)); /* it was freed */
    CHECK(others_of(fd) == 0);
    close(fd);
    world_end(&w);
}

/* A commit of that server after version 1, whose home is lost then. */
static struct transaction staged_before_the_loss(struct world *w, int from)
{
    static const struct pc_run written[] = {{3, 1}, {120, 60}};
    struct transaction t;
    OK(try_begin(w->c, &w->servers[from], w->clients[from], &w->info, 1, &t));
    write_runs(&t, written, N(written));
    OK(try_stage(&t));
    lose_home(w);
    return t;
}

static void decide_and_tell(struct transaction *t)
{
    OK(try_pull(t));
    CHECK(decide(t) == 2);
    tell(t);
    OK(pc_client_unmap(t->client, t->m.id));
}

/* The registry decides a commit when its journal has the new home, which is told a moment later: by its
 * own process, by the registry, or by both. */
static void check_decided_before(int trap, int from)
{
    struct world w = world_of(trap);
    struct server *home = &w.servers[PEER], *reader = &w.servers[READER];
    const uint64_t id = w.info.region;
    struct transaction t = staged_before_the_loss(&w, from);
    prepare(&w, home);
    write_down(&w, home);
    decide_and_tell(&t);
    CHECK(pc_engine_publish(home->engine, id, 2, t.id) == PC_ERR_NO_REGION); /* else it is never told again */
    activate(&w, home);
    OK(pc_engine_publish(home->engine, id, 2, t.id));
    OK(pc_engine_set_homes(reader->engine, id, &home->id, 1));
    check_at(w.c, w.clients[PEER], &w.info, 2);
    check_at(w.c, w.clients[READER], &w.info, 2);
    CHECK(commit(w.c, reader, w.clients[READER], &w.info, 2, &changed[1], 1) == 3);
    check_at(w.c, w.clients[READER], &w.info, 3);
    world_end(&w);
}

static void test_decided_on_its_node_before_it_is_the_home(int trap)
{
    check_decided_before(trap, PEER);
}

static void test_decided_elsewhere_before_it_is_the_home(int trap)
{
    check_decided_before(trap, READER);
}

/* Another one got the home: what waited for it goes. */
static void test_decided_where_no_home_comes(int trap)
{
    struct world w = world_of(trap);
    struct server *peer = &w.servers[PEER], *reader = &w.servers[READER];
    struct transaction t = staged_before_the_loss(&w, PEER);
    prepare(&w, peer);
    prepare(&w, reader);
    write_down(&w, reader);
    decide_and_tell(&t);
    activate(&w, reader);
    OK(pc_engine_publish(reader->engine, w.info.region, 2, t.id));
    OK(pc_engine_set_homes(peer->engine, w.info.region, &reader->id, 1));
    OK(pc_engine_publish(peer->engine, w.info.region, 2, t.id)); /* the registry's answer, when it asks */
    check_at(w.c, w.clients[PEER], &w.info, 2);
    check_at(w.c, w.clients[READER], &w.info, 2);
    world_end(&w);
}

static bool has_version(const struct server *s, uint64_t region, uint64_t version)
{
    uint64_t versions[8];
    int64_t n = pc_engine_cached_versions(s->engine, region, versions, 8);
    for (int64_t i = 0; i < n && i < 8; i++)
        if (versions[i] == version)
            return true;
    return false;
}

/* What a commit changed nobody has read when the home is lost: its writer's node has it. */
static void check_unread(int trap, int new_home)
{
    struct world w = world_of(trap);
    struct server *home = &w.servers[new_home], *writer = &w.servers[READER];
    static const struct pc_run written[] = {{3, 1}, {120, 60}}, same[] = {{0, 3}, {4, 116}, {180, 332}};
    struct pc_run runs[4];
    const uint64_t id = w.info.region;
    CHECK(commit(w.c, writer, w.clients[READER], &w.info, 1, written, 2) == 2);
    SOON(has_version(writer, id, 2));
    CHECK(stats_of(writer).retained_layers == 1 && stats_of(writer).layers == 0);
    CHECK(pc_engine_cached_blocks(writer->engine, id, 2, runs, 4) == 2);
    CHECK(!memcmp(runs, written, sizeof written));
    CHECK(pc_engine_stage_cached(writer->engine, id, 2, 5, &all, 1) == PC_ERR_NO_GENERATION);
    lose_home(&w);
    const struct pc_region_info info = at_version(w.info, 2);
    static const struct { int server; uint64_t version; const struct pc_run *runs; size_t n; } from[] = {
        {PEER, 1, same, N(same)}, {READER, 2, written, N(written)}};
    int fd;
    OK(pc_engine_rebuild_begin(home->engine, &info, NULL, 0, &fd));
    for (uint64_t i = 0; i < N(from); i++) {
        struct server *giver = &w.servers[from[i].server];
        if (giver == home) {
            OK(pc_engine_rebuild_copy(home->engine, id, fd, from[i].version, from[i].runs, from[i].n));
            continue;
        }
        int64_t bytes = pc_engine_stage_cached(giver->engine, id, from[i].version, 0x7000 + i,
                                               from[i].runs, from[i].n);
        OK(bytes);
        OK(pc_engine_pull(home->engine, id, 0x7000 + i, giver->id, (uint64_t)bytes));
        OK(wait_pulled(w.c, 0x7000 + i));
        OK(pc_engine_rebuild_take(home->engine, id, fd, 0x7000 + i));
        OK(pc_engine_drop_staged(giver->engine, id, 0x7000 + i));
    }
    OK(pc_engine_rebuild_seal(home->engine, id, fd));
    close(fd);
    activate(&w, home);
    for (int i = PEER; i < N_SERVERS; i++) {
        OK(pc_engine_set_homes(w.servers[i].engine, id, &home->id, 1));
        check_at(w.c, w.clients[i], &w.info, 2);
    }
    CHECK(stats_of(home).retained_layers == 0);
    for (int i = PEER; i < N_SERVERS; i++) { /* it is freed: nothing is kept */
        OK(pc_engine_retire(w.servers[i].engine, id, 0));
        CHECK(stats_of(&w.servers[i]).retained_layers == 0 && stats_of(&w.servers[i]).retained_bytes == 0);
    }
    world_end(&w);
}

static void test_what_nobody_has_read_is_at_its_writers(int trap)
{
    check_unread(trap, PEER);
    check_unread(trap, READER);
}

/* A writer that goes on keeps its newest, within a bound of layers. */
static void test_what_is_retained_is_bounded(int trap)
{
    struct world w = world_of(trap);
    static const struct pc_run one = {7, 1};
    struct server *writer = &w.servers[READER];
    struct pc_run run;
    for (uint64_t version = 1; version < 300; version++)
        CHECK(commit(w.c, &w.servers[READER], w.clients[READER], &w.info, version, &one, 1) ==
              version + 1);
    SOON(pc_engine_cached_blocks(writer->engine, w.info.region, 300, &run, 1) == 1);
    SOON(stats_of(writer).retained_layers == 256); /* once its home has acknowledged the others */
    CHECK(stats_of(writer).retained_bytes == 256 * 2 * PC_BLOCK_BYTES);
    world_end(&w);
}

/* The server that is to be the home is started again, before and after it is that. */
static void test_restarts(int trap)
{
    struct keeper keeper = keeper_start("rebuild");
    struct world w = world_of(trap);
    struct server *home = &w.servers[PEER];
    int to_keeper = keeper_connect(&keeper);
    w.counts.descriptors++; /* that */
    pc_client_close(w.clients[PEER]);
    server_stop(w.c, PEER); /* which had none */
    told.settle_ns = 2 * SECOND;
    server_start(w.c, PEER, "rebuild", to_keeper);
    w.clients[PEER] = attach(home, trap);
    struct pc_mapping m = map_at(w.clients[PEER], &w.info, 1, 0);
    prefetch(w.clients[PEER], &m, all);
    lose_home(&w);
    prepare(&w, home);
    for (int turn = 0; turn < 3; turn++) {
        server_stop(w.c, PEER);
        close(to_keeper);
        to_keeper = keeper_connect(&keeper);
        server_start(w.c, PEER, "rebuild", to_keeper);
        SOON(stats_of(home).reattached == 1); /* who maps the generation beside it */
        CHECK(region_of(home, w.info.region).is_home == (turn > 0));
        if (turn == 0) { /* a definition makes it the home, as the journal has it */
            write_down(&w, home);
            const struct pc_region_info info = at_version(w.info, 1);
            OK(pc_engine_define_region(home->engine, &info, &home->id, 1));
            OK(pc_engine_set_homes(home->engine, info.region, &home->id, 1));
        }
        check_version(w.c, &m, &w.info, 1);
        CHECK(region_of(home, w.info.region).is_home);
    }
    check_version(w.c, &w.m, &w.info, 1);
    OK(pc_client_unmap(w.clients[PEER], m.id));
    check_goes_on(&w);
    OK(pc_engine_retire(home->engine, w.info.region, 1));
    world_end(&w);
    keeper_stop(&keeper);
    close(to_keeper);
}

static void restart_peer(struct world *w, const struct keeper *keeper, int *to_keeper)
{
    server_stop(w->c, PEER);
    close(*to_keeper);
    *to_keeper = keeper_connect(keeper);
    server_start(w->c, PEER, "rebuild", *to_keeper);
}

/* Nobody on its node uses the region: what it is to the region it knows from the keeper alone. */
static void test_restarts_without_clients(int trap)
{
    struct keeper keeper = keeper_start("rebuild");
    struct world w = world_of(trap);
    struct server *home = &w.servers[PEER];
    const struct pc_region_info info = at_version(w.info, 1);
    int to_keeper = keeper_connect(&keeper);
    w.counts.descriptors++;
    pc_client_close(w.clients[PEER]);
    server_stop(w.c, PEER); /* which had none */
    server_start(w.c, PEER, "rebuild", to_keeper);
    w.clients[PEER] = attach(home, trap);
    struct pc_mapping m = map_at(w.clients[PEER], &w.info, 1, 0);
    prefetch(w.clients[PEER], &m, all);
    lose_home(&w);
    prepare(&w, home);
    pc_client_close(w.clients[PEER]);
    restart_peer(&w, &keeper, &to_keeper);
    CHECK(!region_of(home, info.region).is_home);
    write_down(&w, home);
    OK(pc_engine_define_region(home->engine, &info, &home->id, 1));
    CHECK(region_of(home, info.region).is_home);
    restart_peer(&w, &keeper, &to_keeper);
    CHECK(region_of(home, info.region).is_home); /* also before it is defined again */
    OK(pc_engine_set_homes(w.servers[READER].engine, info.region, &home->id, 1));
    check_version(w.c, &w.m, &w.info, 1);
    w.clients[PEER] = attach(home, trap);
    check_goes_on(&w);
    OK(pc_engine_retire(home->engine, w.info.region, 1));
    world_end(&w);
    keeper_stop(&keeper);
    close(to_keeper);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(who_waits_turns_to_a_peer),
        TEST(who_waits_is_at_the_new_home),
        TEST(rows_turn_to_a_peer),
        TEST(rows_are_at_the_new_home),
        TEST(no_new_home),
        TEST(not_reached_for_a_while),
        TEST(never_reached),
        TEST(no_descriptor_to_reach_it),
        TEST(the_old_home_lives),
        TEST(nobody_opens_what_is_lost),
        TEST(what_is_not_there_is_not_given),
        TEST(an_attempt_after_another),
        TEST(freed_meanwhile),
        TEST(what_is_not_wanted_goes),
        TEST(a_registry_that_is_silent_loses_nothing),
        TEST(decided_on_its_node_before_it_is_the_home),
        TEST(decided_elsewhere_before_it_is_the_home),
        TEST(decided_where_no_home_comes),
        TEST(what_nobody_has_read_is_at_its_writers),
        TEST(what_is_retained_is_bounded),
        TEST(restarts),
        TEST(restarts_without_clients),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
