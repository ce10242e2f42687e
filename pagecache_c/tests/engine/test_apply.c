/* test_apply.c - the worker of a home beside those who read there: what it replaces and folds, and
 * when; and what a slow keeper or a failure of one region delays. Two servers in one process; server 0
 * is the home. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/pair.h"

#include "engine/core/core.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>

static uint64_t commit_far(struct pair *p, uint64_t base, const struct pc_run *runs, size_t n)
{
    return commit(p->c, p->s1, p->far, &p->info, base, runs, n);
}

/* ------------------------------------------------------------ a slow reader */

/* A server that has asked for blocks and does not read the answer yet. */
static int ask_for(struct pair *p, uint64_t server_id, uint32_t version, uint64_t first, uint16_t n)
{
    int data[2], small = 65536;
    tcp_pair(data);
    setsockopt(data[0], SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    uint64_t served = stats_of(p->s0).blocks_served;
    OK(pc_engine_serve(p->s0->engine, server_id, data[1]));
    struct {
        struct pc__data_header header;
        struct pc__data_asker asker;
        uint64_t run;
    } get = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .region = 1, .n_runs = 1,
                        .n_blocks = n, .request_id = 7, .version = version},
             .run = pc__run_pack(first, n)};
    CHECK(send(data[0], &get, sizeof get, 0) == (ssize_t)sizeof get);
    struct pollfd answer = {.fd = data[0], .events = POLLIN};
    CHECK(poll(&answer, 1, 30000) == 1); /* it is put together, and then the socket is full */
    SOON(stats_of(p->s0).blocks_served >= served + n); /* more where the writer's node asks, too */
    return data[0];
}

/* Reads the answer, which must be of that version. */
static void read_answer(struct pair *p, int fd, uint64_t version, uint64_t first, uint64_t n)
{
    uint64_t n_blocks = p->info.length_bytes >> 12;
    uint64_t *owners = registry_owners(p->c->registry, 1, version, n_blocks);
    struct pc__data_header header;
    uint64_t words[512], wrong = 0;
    CHECK(recv(fd, &header, sizeof header, MSG_WAITALL) == (ssize_t)sizeof header);
    CHECK(header.status == 0 && !header.flags);
    for (uint64_t b = first; b < first + n; b++) {
        CHECK(recv(fd, words, sizeof words, MSG_WAITALL) == (ssize_t)sizeof words);
        wrong += wrong_word(words, 1, owners[b], b, pattern) != 512;
    }
    if (wrong)
        fprintf(stderr, "version %llu: %llu of %llu blocks are wrong\n",
                (unsigned long long)version, (unsigned long long)wrong, (unsigned long long)n);
    CHECK(!wrong);
    free(owners);
    close(fd);
}

/* Memory that is freed is somebody else's soon. */
static void use_memory(void)
{
    static char junk[MIB];
    memset(junk, 0xee, sizeof junk);
    for (int i = 0; i < 4; i++) {
        int fd = memfd_create("other", MFD_CLOEXEC);
        CHECK(fd >= 0);
        for (int k = 0; k < 16; k++)
            CHECK(pwrite(fd, junk, sizeof junk, (off_t)k << 20) == (ssize_t)sizeof junk);
        close(fd);
    }
}

static bool home_is(struct server *server, bool (*is)(const struct pc__home *))
{
    struct pc__region *region = pc__region_get(server->engine, 1);
    pthread_mutex_lock(&region->lock);
    bool answer = is(region->home);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return answer;
}

static bool is_held_up(const struct pc__home *home)
{
    return home->held_up;
}

static bool is_folded(const struct pc__home *home)
{
    return home->overlay.memfd < 0 && !home->base_changes && home->base.version == home->applied;
}

/* The worker waits for A, to apply a layer. B comes after that, and reads of the overlay; then the
 * overlay is to be folded. It goes when B has read it, and not with A. */
static void test_fold_while_turning(int trap)
{
    told.fetch_timeout_ns = 60 * SECOND;
    struct pair p = pair_with_holes("turning", trap, 16 * MIB, 0);
    const struct pc_run half = {0, 3000}, other = {3500, 4};
    struct pc_mapping old = map_at(p.home, &p.info, 0, 0);
    CHECK(commit_far(&p, 0, &half, 1) == 1); /* to the overlay, for old is of the base */
    SOON(stats_of(p.s0).commits_applied == 1);
    int a = ask_for(&p, 0x9991, 1, 0, 1024);
    CHECK(commit_far(&p, 1, &other, 1) == 2);
    SOON(home_is(p.s0, is_held_up));
    int b = ask_for(&p, 0x9992, 1, 1500, 1024);
    OK(pc_client_unmap(p.home, old.id));
    usleep(200000); /* the worker is at it, perhaps */
    read_answer(&p, a, 1, 0, 1024);
    usleep(300000);
    use_memory();
    read_answer(&p, b, 1, 1500, 1024);
    SOON(stats_of(p.s0).commits_applied == 2);
    SOON(home_is(p.s0, is_folded));
    check_at(p.c, p.home, &p.info, 2);
    check_at(p.c, p.far, &p.info, 1);
    pair_stop(&p);
}

/* As many slow readers as there are versions, each of which came in another epoch. */
static void test_many_slow_readers(int trap)
{
    enum { READERS = 12 };
    told.fetch_timeout_ns = 60 * SECOND;
    struct pair p = pair_with_holes("readers", trap, 16 * MIB, 0);
    const struct pc_run parts[] = {{0, 1500}, {700, 1500}, {2048, 1024}};
    int fds[READERS];
    struct pc_mapping old = map_at(p.home, &p.info, 0, 0);
    for (uint64_t v = 0; v < READERS; v++) {
        CHECK(commit_far(&p, v, &parts[v % 3], 1) == v + 1);
        fds[v] = ask_for(&p, 0x9990 + v, (uint32_t)v + 1, 1024 * (v % 3), 1024);
        if (v == READERS / 2)
            OK(pc_client_unmap(p.home, old.id));
        usleep(50000);
    }
    for (uint64_t i = 0; i < READERS; i++) {
        uint64_t v = i * 5 % READERS; /* in no order */
        read_answer(&p, fds[v], v + 1, 1024 * (v % 3), 1024);
        usleep(20000);
    }
    SOON_IN(stats_of(p.s0).commits_applied == READERS && home_is(p.s0, is_folded), 20);
    check_at(p.c, p.home, &p.info, READERS);
    pair_stop(&p);
}

/* ------------------------------------------------------------- half a layer */

static void may_write_up_to(rlim_t bytes)
{
    struct rlimit limit;
    CHECK(!getrlimit(RLIMIT_FSIZE, &limit));
    limit.rlim_cur = bytes;
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
}

static void check_word(struct pair *p, const struct pc_mapping *m, uint64_t version, uint64_t block)
{
    uint64_t *owners = registry_owners(p->c->registry, 1, version, p->info.length_bytes >> 12);
    check_block(p->c, m, &p->info, version, owners[block], block);
    free(owners);
}

/* A layer that cannot be written to its end: the overlay, which has half of it, is no version. */
static void test_torn_overlay(int trap)
{
    enum { LOW = 14900, HIGH = 16000 };
    told.fetch_timeout_ns = 60 * SECOND;
    signal(SIGXFSZ, SIG_IGN);
    struct pair p = pair_with_holes("torn", trap, 64 * MIB, 56 * MIB);
    const struct pc_run ends[] = {{LOW, 1}, {HIGH, 1}}, wide = {15000, 900};
    struct pc_mapping old = map_at(p.home, &p.info, 0, 0);
    CHECK(commit_far(&p, 0, &wide, 1) == 1);
    CHECK(commit_far(&p, 1, ends, 2) == 2);
    SOON(stats_of(p.s0).commits_applied == 2);
    check_word(&p, &old, 0, HIGH);
    int log = p.s0->log_events;
    may_write_up_to(60 * MIB); /* block 15360 */
    CHECK(commit_far(&p, 2, ends, 2) == 3);
    SOON(p.s0->log_events > log); /* the worker could not */
    int a = ask_for(&p, 0x9991, 2, 15000, 900);
    OK(pc_client_unmap(p.home, old.id));
    SOON_IN(p.s0->log_events > log + 2, 10); /* nor again, with nobody at the base */
    may_write_up_to(RLIM_INFINITY);
    SOON(home_is(p.s0, is_held_up)); /* by A, whatever it is that it waits to let go */
    for (uint64_t v = 0; v < 4; v++) {
        struct pc_mapping m = map_at(p.home, &p.info, v, 0);
        check_word(&p, &m, v, LOW);
        check_word(&p, &m, v, 15001);
        check_word(&p, &m, v, HIGH);
        OK(pc_client_unmap(p.home, m.id));
    }
    read_answer(&p, a, 2, 15000, 900);
    SOON_IN(stats_of(p.s0).commits_applied == 3 && home_is(p.s0, is_folded), 10);
    struct pc_mapping m = map_at(p.home, &p.info, 3, 0);
    check_word(&p, &m, 3, LOW);
    check_word(&p, &m, 3, HIGH);
    OK(pc_client_unmap(p.home, m.id));
    pair_stop(&p);
}

/* ------------------------------------------------------- the end of a session */

struct looker {
    struct pair *p;
    struct pc_mapping m;
    _Atomic bool stop;
    _Atomic uint64_t rounds;
};

static void *look(void *arg)
{
    struct looker *l = arg;
    while (!l->stop) {
        for (uint64_t b = 0; b < 256; b++)
            check_block(l->p->c, &l->m, &l->p->info, 0, 0, b);
        l->rounds++;
    }
    return NULL;
}

/* The server ends while a process reads the base, with an overlay over it and layers to apply: what
 * is mapped stays as it is. */
static void test_end_while_read(int trap)
{
    told.fetch_timeout_ns = 60 * SECOND;
    struct pair p = pair_with_holes("end", trap, MIB, 0);
    const struct pc_run all = {0, 256};
    struct looker l = {.p = &p, .m = map_at(p.home, &p.info, 0, 0)};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, look, &l));
    for (uint64_t v = 0; v < 40; v++) /* the worker has not applied them all */
        CHECK(commit_far(&p, v, &all, 1) == v + 1);
    SOON(stats_of(p.s0).commits_applied > 0);
    server_stop(p.c, 0);
    uint64_t rounds = l.rounds;
    SOON_IN(l.rounds > rounds + 2, 20);
    l.stop = true;
    pthread_join(thread, NULL);
    pc_client_close(p.home);
    pc_client_close(p.far);
    cluster_stop(p.c);
}

/* ------------------------------------------------------ others are not delayed */

static uint64_t applied_of(struct server *server, uint64_t id)
{
    struct pc__region *region = pc__region_get(server->engine, id);
    pthread_mutex_lock(&region->lock);
    uint64_t applied = region->home->applied;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return applied;
}

/* A layer for the base of region 1 waits until the keeper has heard that the base changes. Layers of
 * other regions, which go to overlays, wait for nothing: they are applied while it takes nothing. */
static void test_slow_keeper_delays_what_needs_it(int trap)
{
    enum { REGIONS = 4 };
    const struct pc_run run = {3, 20};
    struct keeper k = keeper_start("slow");
    told.settle_ns = SECOND / 10;
    struct cluster *c = cluster_new(1);
    struct server *server = &c->servers[0];
    int to_keeper = keeper_connect(&k);
    server_start(c, 0, "slow", to_keeper);
    pc_client *client = attach(server, trap);
    struct pc_region_info infos[REGIONS];
    struct pc_mapping leased[REGIONS];
    struct transaction t[REGIONS];
    for (uint64_t i = 0; i < REGIONS; i++) {
        infos[i] = build(c, server, client, i + 1, MIB, 0);
        if (i)
            leased[i] = map_at(client, &infos[i], 0, 0);
        OK(try_begin(c, server, client, &infos[i], 0, &t[i]));
        write_runs(&t[i], &run, 1);
        OK(try_stage(&t[i]));
    }
    leave_base(server, client, 1, &t[0].m);
    CHECK(stop_process(k.pid));
    uint64_t filling = fill_socket(server);
    for (int i = 0; i < REGIONS; i++) {
        CHECK(decide(&t[i]) == 1);
        OK(pc_engine_publish(server->engine, (uint64_t)i + 1, 1, t[i].id));
    }
    for (uint64_t i = 1; i < REGIONS; i++)
        SOON_IN(applied_of(server, i + 1) == 1, 10);
    CHECK(applied_of(server, 1) == 0);
    struct pc_mapping m = map_at(client, &infos[0], 1, 0); /* nor is it waited for: it is a fork */
    check_version(c, &m, &infos[0], 1);
    OK(pc_client_unmap(client, m.id));
    CHECK(applied_of(server, 1) == 0 && server->keepers_lost == 0);
    CHECK(!kill(k.pid, SIGCONT));
    SOON(applied_of(server, 1) == 1);
    pc__unkeep(server->engine, filling);
    for (int i = 1; i < REGIONS; i++) {
        OK(pc_client_unmap(client, leased[i].id));
        OK(pc_client_unmap(client, t[i].m.id));
    }
    for (int i = 0; i < REGIONS; i++)
        check_at(c, client, &infos[i], 1);
    server_stop(c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&k);
    server_start(c, 0, "slow", to_keeper); /* the keeper has it all, and none is being changed */
    for (int i = 0; i < REGIONS; i++)
        check_at(c, client, &infos[i], 1);
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&k);
}

/* A layer that cannot be written is tried again every second. Others are applied meanwhile. */
static void test_failing_region_delays_no_other(int trap)
{
    enum { COMMITS = 20 };
    signal(SIGXFSZ, SIG_IGN);
    struct pair p = pair_with_holes("fails", trap, 64 * MIB, 60 * MIB);
    const struct pc_run high = {16000, 1}, low = {0, 4};
    struct pc_region_info other = build(p.c, p.s0, p.home, 2, MIB, 0);
    struct pc_mapping far = map_at(p.far, &p.info, 0, 0); /* before no file can be so long */
    may_write_up_to(56 * MIB);
    CHECK(commit_far(&p, 0, &high, 1) == 1);
    SOON(p.s0->log_events > 0);
    uint64_t began_ns = now_ns();
    for (uint64_t v = 0; v < COMMITS; v++) {
        CHECK(commit(p.c, p.s1, p.far, &other, v, &low, 1) == v + 1);
        SOON(applied_of(p.s0, 2) == v + 1);
    }
    CHECK(now_ns() - began_ns < COMMITS * SECOND / 2);
    CHECK(applied_of(p.s0, 1) == 0);
    int log = p.s0->log_events;
    SOON_IN(p.s0->log_events > log + 1, 10); /* it is still tried */
    may_write_up_to(RLIM_INFINITY);
    SOON(applied_of(p.s0, 1) == 1);
    struct pc_mapping m = map_at(p.home, &p.info, 1, 0);
    check_word(&p, &m, 1, 16000);
    OK(pc_client_unmap(p.home, m.id));
    OK(pc_client_unmap(p.far, far.id));
    pair_stop(&p);
}

/* Freed with a layer that cannot be written: nobody wants that any more, and nothing of it stays. */
static void test_failing_region_is_freed(int trap)
{
    signal(SIGXFSZ, SIG_IGN);
    struct pair p = pair_with_holes("freed", trap, 64 * MIB, 60 * MIB);
    const struct pc_run high = {16000, 1};
    struct pc_mapping far = map_at(p.far, &p.info, 0, 0); /* before no file can be so long */
    may_write_up_to(56 * MIB);
    CHECK(commit_far(&p, 0, &high, 1) == 1);
    SOON(p.s0->log_events > 0);
    CHECK(applied_of(p.s0, 1) == 0);
    OK(pc_client_unmap(p.far, far.id));
    struct pc__region *region = pc__region_get(p.s0->engine, 1);
    OK(pc_engine_retire(p.s1->engine, 1, 1));
    OK(pc_engine_retire(p.s0->engine, 1, 1));
    SOON_IN(region->refs == 1, 10); /* ours */
    CHECK(region->forgotten && stats_of(p.s0).commits_applied == 0);
    pc__region_put(p.s0->engine, region);
    may_write_up_to(RLIM_INFINITY);
    pair_stop(&p);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(fold_while_turning),
        TEST(many_slow_readers),
        TEST(torn_overlay),
        TEST(end_while_read),
        TEST(slow_keeper_delays_what_needs_it),
        TEST(failing_region_delays_no_other),
        TEST(failing_region_is_freed),
    };
    return run_with(PC_TRAP_SIGSEGV, tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) !=
           0;
}
