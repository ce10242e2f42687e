/* test_versions.c - versions: commits, leases on any of them, at the home and far from it, over both
 * traps. Two servers in one process; server 0 is the home. Crashes are in test_version_crash.c. */
#include "tests/support/engine_main.h"
#include "tests/support/length.h"
#include "tests/support/pair.h"

static const struct pc_run some[] = {{3, 1}, {10, 20}, {100, 1}, {200, 56}};
static const struct pc_run others[] = {{0, 2}, {15, 1}, {99, 3}};
static const struct pc_run one[] = {{15, 1}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

static uint64_t commit_home(struct pair *p, uint64_t base, const struct pc_run *runs, size_t n)
{
    return commit(p->c, p->s0, p->home, &p->info, base, runs, n);
}

static uint64_t commit_far(struct pair *p, uint64_t base, const struct pc_run *runs, size_t n)
{
    return commit(p->c, p->s1, p->far, &p->info, base, runs, n);
}

/* Old versions stay as they are for those who have them and for those who come. */
static void test_update(int trap)
{
    struct pair p = pair_start("update", trap, MIB);
    struct pc_mapping h0 = map_at(p.home, &p.info, 0, 0), f0 = map_at(p.far, &p.info, 0, 0);
    check_version(p.c, &f0, &p.info, 0);
    CHECK(commit_home(&p, 0, some, N(some)) == 1);
    check_version(p.c, &h0, &p.info, 0);
    check_version(p.c, &f0, &p.info, 0);
    struct pc_mapping h1 = map_at(p.home, &p.info, 1, 0), f1 = map_at(p.far, &p.info, 1, 0);
    check_version(p.c, &h1, &p.info, 1);
    check_version(p.c, &f1, &p.info, 1);
    CHECK(commit_home(&p, 1, others, N(others)) == 2);
    CHECK(commit_home(&p, 2, one, 1) == 3);
    check_at(p.c, p.home, &p.info, 3);
    check_at(p.c, p.far, &p.info, 2);
    check_version(p.c, &h0, &p.info, 0);
    check_version(p.c, &f0, &p.info, 0);
    check_version(p.c, &h1, &p.info, 1);
    check_version(p.c, &f1, &p.info, 1);
    OK(pc_client_unmap(p.home, h0.id));
    OK(pc_client_unmap(p.far, f0.id));
    OK(pc_client_unmap(p.home, h1.id));
    OK(pc_client_unmap(p.far, f1.id));
    SOON(stats_of(p.s0).commits_applied == 3 && stats_of(p.s0).layers == 0);
    for (uint64_t v = 4; v-- > 0;) { /* new leases, at versions that are past */
        check_at(p.c, p.far, &p.info, v);
        check_at(p.c, p.home, &p.info, v);
    }
    SOON(region_of(p.s0, 1).generations == 1 && region_of(p.s1, 1).generations <= 1);
    /* The base is at the newest again, and read without a trap. */
    uint64_t faults = stats_of(p.s0).faults;
    check_at(p.c, p.home, &p.info, 3);
    CHECK(stats_of(p.s0).faults == faults);
    pair_stop(&p);
}

/* What did not change is not fetched again: beside an older lease, nor in place. */
static void test_only_what_changed_travels(int trap)
{
    struct pair p = pair_start("travels", trap, 2 * MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    check_version(p.c, &m, &p.info, 0);
    CHECK(stats_of(p.s1).blocks_fetched == 512);
    OK(pc_client_unmap(p.far, m.id));
    CHECK(commit_home(&p, 0, some, N(some)) == 1);
    check_at(p.c, p.far, &p.info, 1); /* in place */
    CHECK(stats_of(p.s1).advances == 1 && stats_of(p.s1).forks == 0);
    CHECK(stats_of(p.s1).blocks_fetched == 512 + 78);
    struct pc_mapping f1 = map_at(p.far, &p.info, 1, 0);
    CHECK(commit_home(&p, 1, others, N(others)) == 2);
    struct pc_mapping f2 = map_at(p.far, &p.info, 2, 0); /* beside it */
    check_version(p.c, &f2, &p.info, 2);
    check_version(p.c, &f1, &p.info, 1);
    CHECK(stats_of(p.s1).forks == 1 && stats_of(p.s1).advances == 1);
    CHECK(stats_of(p.s1).blocks_fetched == 512 + 78 + 6);
    CHECK(region_of(p.s1, 1).generations == 2);
    /* Back to one that is past, while both are leased: what is the same is taken from there. */
    struct pc_mapping f0 = map_at(p.far, &p.info, 0, 0);
    check_version(p.c, &f0, &p.info, 0);
    uint64_t fetched = stats_of(p.s1).blocks_fetched - (512 + 78 + 6);
    CHECK(fetched >= 78 && fetched <= 78 + 6);
    CHECK(region_of(p.s1, 1).generations == 3);
    OK(pc_client_unmap(p.far, f0.id));
    OK(pc_client_unmap(p.far, f1.id));
    OK(pc_client_unmap(p.far, f2.id));
    SOON(region_of(p.s1, 1).generations == 1);
    pair_stop(&p);
}

/* Where the registry does not know any more what changed, nothing is kept, and all is right. */
static void test_changes_unknown(int trap)
{
    struct pair p = pair_start("unknown", trap, MIB);
    check_at(p.c, p.far, &p.info, 0);
    CHECK(commit_home(&p, 0, some, N(some)) == 1);
    CHECK(commit_home(&p, 1, others, N(others)) == 2);
    p.c->registry->changes_from = 1;
    check_at(p.c, p.far, &p.info, 2);
    CHECK(stats_of(p.s1).blocks_fetched == 512 && stats_of(p.s1).advances == 0);
    SOON(region_of(p.s1, 1).generations == 1);
    pair_stop(&p);
}

/* A process far from the home commits: the layer is fetched by the home. */
static void test_far_writer(int trap)
{
    struct pair p = pair_start("writer", trap, MIB);
    struct pc_mapping h0 = map_at(p.home, &p.info, 0, 0);
    for (uint64_t v = 0; v < 6; v++) {
        CHECK(commit_far(&p, v, v % 2 ? some : others, v % 2 ? N(some) : N(others)) == v + 1);
        check_at(p.c, p.far, &p.info, v + 1);
        check_at(p.c, p.home, &p.info, v + 1);
        check_version(p.c, &h0, &p.info, 0);
    }
    SOON(stats_of(p.s1).layers == 0 && stats_of(p.s0).layers == 0);
    CHECK(stats_of(p.s0).commits_published == 6);
    /* A large one, over several requests. */
    const struct pc_run all = {0, MIB >> 12};
    CHECK(commit_far(&p, 6, &all, 1) == 7);
    check_at(p.c, p.home, &p.info, 7);
    check_at(p.c, p.far, &p.info, 7);
    pair_stop(&p);
}

/* The same commit staged and pulled again changes nothing; one that is refused leaves nothing. */
static void test_again_and_refused(int trap)
{
    struct pair p = pair_start("again", trap, MIB);
    struct transaction t;
    OK(try_begin(p.c, p.s1, p.far, &p.info, 0, &t));
    write_runs(&t, some, N(some));
    for (int i = 0; i < 3; i++) {
        OK(try_stage(&t));
        OK(try_pull(&t));
    }
    CHECK(stats_of(p.s1).layers == 1 && stats_of(p.s0).layers == 1);
    CHECK(decide(&t) == 1);
    for (int i = 0; i < 3; i++)
        tell(&t);
    OK(pc_client_unmap(p.far, t.m.id));
    SOON(stats_of(p.s1).layers == 0 && stats_of(p.s0).layers == 0);
    CHECK(stats_of(p.s0).commits_published == 1);
    check_at(p.c, p.far, &p.info, 1);
    /* Another began at 0 too, and wrote a block of that. */
    struct transaction loser;
    OK(try_begin(p.c, p.s1, p.far, &p.info, 0, &loser));
    write_runs(&loser, one, 1);
    OK(try_stage(&loser));
    OK(try_pull(&loser));
    CHECK(decide(&loser) == 0);
    tell(&loser);
    SOON(stats_of(p.s1).layers == 0 && stats_of(p.s0).layers == 0);
    OK(pc_client_unmap(p.far, loser.m.id));
    check_at(p.c, p.home, &p.info, 1);
    check_at(p.c, p.far, &p.info, 1);
    CHECK(stats_of(p.s0).commits_dropped == 1);
    /* A pull of what nobody staged, or that is longer than it is. */
    OK(pc_engine_pull(p.s0->engine, 1, 77, p.s1->id, 3 * 4096));
    CHECK(wait_pulled(p.c, 77) == PC_ERR_HOME_LOST);
    CHECK(stats_of(p.s0).layers == 0);
    /* A home may be asked about a layer that a process of its own node has staged there. */
    struct transaction own;
    OK(try_begin(p.c, p.s0, p.home, &p.info, 1, &own));
    write_runs(&own, one, 1);
    OK(try_stage(&own));
    CHECK(pc_engine_has_layer(p.s0->engine, 1, own.id) == 1 &&
          pc_engine_has_layer(p.s0->engine, 1, 78) == 0 &&
          pc_engine_has_layer(p.s0->engine, 2, own.id) == 0);
    OK(pc_engine_pull(p.s0->engine, 1, own.id, p.s0->id, 2 * 4096));
    CHECK(wait_pulled(p.c, own.id) == PC_OK);
    OK(pc_engine_drop_staged(p.s0->engine, 1, own.id));
    OK(pc_engine_pull(p.s0->engine, 1, own.id, p.s0->id, 2 * 4096));
    CHECK(wait_pulled(p.c, own.id) == PC_ERR_HOME_LOST);
    OK(pc_client_unmap(p.home, own.m.id));
    pair_stop(&p);
}

static struct transaction staged_home(struct pair *p, uint64_t base, const struct pc_run *runs,
                                      size_t n)
{
    struct transaction t;
    OK(try_begin(p->c, p->s0, p->home, &p->info, base, &t));
    write_runs(&t, runs, n);
    OK(try_stage(&t));
    return t;
}

/* Versions that the home hears of in another order are there once the gap is closed. */
static void test_out_of_order(int trap)
{
    struct pair p = pair_start("order", trap, MIB);
    struct transaction a = staged_home(&p, 0, some, N(some)), b = staged_home(&p, 0, others, 1),
                       c = staged_home(&p, 0, &(struct pc_run){50, 5}, 1);
    CHECK(decide(&a) == 1 && decide(&b) == 2 && decide(&c) == 3);
    CHECK(pc_engine_publish(p.s0->engine, 1, 3, c.id) == PC_ERR_NO_VERSION);
    CHECK(pc_engine_publish(p.s0->engine, 1, 2, b.id) == PC_ERR_NO_VERSION);
    CHECK(stats_of(p.s0).layers == 3);
    check_at(p.c, p.home, &p.info, 0);
    OK(pc_engine_publish(p.s0->engine, 1, 1, a.id));
    OK(pc_engine_publish(p.s0->engine, 1, 2, b.id));
    OK(pc_engine_publish(p.s0->engine, 1, 1, a.id));
    for (uint64_t v = 0; v <= 3; v++) {
        check_at(p.c, p.home, &p.info, v);
        check_at(p.c, p.far, &p.info, v);
    }
    OK(pc_client_unmap(p.home, a.m.id));
    OK(pc_client_unmap(p.home, b.m.id));
    OK(pc_client_unmap(p.home, c.m.id));
    SOON(stats_of(p.s0).layers == 0);
    pair_stop(&p);
}

struct opener {
    pc_client *client;
    const struct pc_region_info *info;
    uint64_t version;
    struct pc_run run;
    struct pc_mapping m;
    int rc;
    _Atomic bool done;
};

/* Opens, and has a block fetched. */
static void *open_it(void *arg)
{
    struct opener *o = arg;
    o->rc = try_map(o->client, o->info, o->version, 0, &o->m);
    if (!o->rc)
        o->rc = pc_client_prefetch(o->client, o->m.id, &o->run, 1, 1, WAIT);
    o->done = true;
    return NULL;
}

/* The registry knows of versions that the home has not heard of: it asks before it answers. */
static void test_home_asks(int trap)
{
    struct pair p = pair_start("asks", trap, MIB);
    p.s0->quiet = true;
    for (uint64_t v = 0; v < 3; v++) {
        struct transaction t = staged_home(&p, v, v % 2 ? others : some, v % 2 ? 3 : 4);
        CHECK(decide(&t) == v + 1); /* and its writer says nothing */
        check_at(p.c, v % 2 ? p.home : p.far, &p.info, v + 1);
        check_at(p.c, v % 2 ? p.far : p.home, &p.info, v + 1);
        OK(pc_client_unmap(p.home, t.m.id));
    }
    CHECK(p.s0->published_asked == 3);
    struct pc_mapping m;
    CHECK(try_map(p.home, &p.info, 4, 0, &m) == PC_ERR_NO_VERSION);
    check_at(p.c, p.home, &p.info, 3);
    pair_stop(&p);
}

/* A version that comes into being while the home's question is on its way: who asks for it then is
 * not answered with what the registry said before. */
static void test_asked_too_early(int far)
{
    int trap = PC_TRAP_UFFD;
    struct pair p = pair_start("early", trap, MIB);
    p.s0->quiet = true;
    struct transaction a = staged_home(&p, 0, some, N(some));
    struct server *node = far ? p.s1 : p.s0;
    pc_client *first = attach(node, trap), *second = attach(node, trap); /* of different loops */
    p.s0->hold_published = true;
    struct opener o1 = {.client = first, .info = &p.info, .version = 1, .run = {15, 1}},
                  o2 = {.client = second, .info = &p.info, .version = 1, .run = {100, 1}};
    pthread_t t1, t2;
    CHECK(!pthread_create(&t1, NULL, open_it, &o1)); /* there is no such version yet */
    SOON(p.s0->published_asked == 1);
    CHECK(decide(&a) == 1);
    CHECK(!pthread_create(&t2, NULL, open_it, &o2));
    usleep(200000); /* so that it comes while the question is out */
    CHECK(!o1.done && !o2.done);
    p.s0->hold_published = false;
    pthread_join(t1, NULL);
    pthread_join(t2, NULL);
    CHECK(o1.rc == PC_ERR_NO_VERSION || o1.rc == PC_OK); /* it asked before there was one */
    OK(o2.rc);
    check_version(p.c, &o2.m, &p.info, 1);
    pc_client_close(first);
    pc_client_close(second);
    pair_stop(&p);
}

/* What is kept no longer is said to be so, at the home when it is opened; far when it is fetched. */
static void test_expired(int trap)
{
    told.history_bytes = 1; /* the least there is: 64 KiB */
    struct pair p = pair_start("expired", trap, MIB);
    struct pc_mapping h0 = map_at(p.home, &p.info, 0, 0), f0 = map_at(p.far, &p.info, 0, 0);
    const struct pc_run large = {0, 40};
    for (uint64_t v = 0; v < 10; v++)
        CHECK(commit_home(&p, v, &large, 1) == v + 1);
    SOON(stats_of(p.s0).commits_applied == 10);
    CHECK(stats_of(p.s0).history_expired > 0 && stats_of(p.s0).history_bytes <= 64 << 10);
    check_version(p.c, &h0, &p.info, 0); /* who has it has it */
    struct pc_mapping m;
    CHECK(try_map(p.home, &p.info, 3, 0, &m) == PC_ERR_EXPIRED);
    check_at(p.c, p.home, &p.info, 10);
    check_at(p.c, p.far, &p.info, 10);
    const struct pc_run touched = {0, 8};
    CHECK(pc_client_prefetch(p.far, f0.id, &touched, 1, 1, WAIT) == PC_ERR_EXPIRED);
    /* Another process, though some blocks are here: it is told, before it can touch the others. */
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        pc_client *client = attach(p.s1, trap);
        int rc = try_map(client, &p.info, 0, 0, &m);
        _exit(rc == PC_ERR_EXPIRED ? 0 : 1);
    }
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    /* Who touches it ends, with a message. */
    fflush(NULL);
    child = fork();
    if (!child) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        pc_client *client = attach(p.s1, trap);
        struct pc_mapping gone = map_at(client, &p.info, 3, 0);
        (void)*block_at(&gone, 5);
        _exit(0);
    }
    waitpid(child, &status, 0);
    CHECK(!(WIFEXITED(status) && WEXITSTATUS(status) == 0));
    check_at(p.c, p.home, &p.info, 10);
    check_at(p.c, p.far, &p.info, 10);
    OK(pc_client_unmap(p.home, h0.id));
    check_at(p.c, p.home, &p.info, 10);
    CHECK(region_of(p.s0, 1).oldest_version > 3);
    pair_stop(&p);
}

/* Others want newer versions again and again while a process that maps an old one is stopped: what
 * it is told meanwhile it need not know, so that does not cost it its connection. */
static void test_stopped_reader(int trap)
{
    struct pair p = pair_start("stopped", trap, MIB);
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        close_range(3, ~0u, 0); /* the servers' own */
        pc_client *client = attach(p.s1, trap);
        struct pc_mapping m = map_at(client, &p.info, 0, 0);
        CHECK(at(&m, 0) == pattern(1, 0)); /* and not all of it: it needs its server */
        raise(SIGSTOP);
        check_version(p.c, &m, &p.info, 0);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    for (uint64_t v = 0; v < 600; v++) {
        CHECK(commit_home(&p, v, some, 1) == v + 1);
        struct pc_mapping m = map_at(p.far, &p.info, v + 1, 0);
        OK(pc_client_unmap(p.far, m.id));
    }
    kill(child, SIGCONT);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pair_stop(&p);
}

/* Of a writer that ends after it staged, before and after the registry decided, nothing stays. */
static void test_writer_dies(int trap)
{
    struct pair p = pair_start("dies", trap, MIB);
    for (int decided = 0; decided < 2; decided++)
        for (int far = 0; far < 2; far++) {
            struct server *node = far ? p.s1 : p.s0;
            uint64_t latest = registry_latest(p.c->registry, 1);
            pid_t child = fork();
            if (!child) {
                pc_client *client = attach(node, trap);
                struct transaction t;
                OK(try_begin(p.c, node, client, &p.info, latest, &t));
                write_runs(&t, some, N(some));
                OK(try_stage(&t));
                if (decided)
                    CHECK(registry_commit(p.c->registry, t.id, 1, latest, some, N(some)));
                _exit(0);
            }
            int asked = node->outcomes_asked, status;
            waitpid(child, &status, 0);
            CHECK(status == 0);
            SOON(node->outcomes_asked == asked + 1);
            SOON(stats_of(node).layers == 0);
            if (decided && far) { /* it was never at its home: a registry does not do that */
                registry_lock(p.c->registry);
                p.c->registry->n_commits--;
                registry_unlock(p.c->registry);
            }
            check_at(p.c, p.home, &p.info, registry_latest(p.c->registry, 1));
            check_at(p.c, p.far, &p.info, registry_latest(p.c->registry, 1));
        }
    CHECK(registry_latest(p.c->registry, 1) == 1);
    pair_stop(&p);
}

/* A layer that was pulled, and of which nothing is heard any more. */
static void test_silence(int trap)
{
    told.stage_timeout_ns = SECOND;
    struct pair p = pair_start("silence", trap, MIB);
    struct transaction t;
    OK(try_begin(p.c, p.s1, p.far, &p.info, 0, &t));
    write_runs(&t, some, N(some));
    OK(try_stage(&t));
    OK(try_pull(&t));
    usleep(300000);
    CHECK(stats_of(p.s0).layers == 1 && p.s0->outcomes_asked == 0);
    SOON(stats_of(p.s0).layers == 0 && stats_of(p.s1).layers == 0);
    CHECK(decide(&t) == 0); /* the question made sure of that */
    pair_stop(&p);
}

/* A reply that waits in a queue shows the version that was asked for, however many come after. */
static void test_slow_reader_of_a_socket(int trap)
{
    told.fetch_timeout_ns = 60 * SECOND; /* it reads slowly, and slower on a busy machine */
    struct pair p = pair_start("slow", trap, 16 * MIB);
    const struct pc_run half = {0, 2048}, all = {0, 4096};
    CHECK(commit_home(&p, 0, &half, 1) == 1);
    int data[2];
    tcp_pair(data);
    int small = 65536;
    setsockopt(data[0], SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    OK(pc_engine_serve(p.s0->engine, 0x9999, data[1]));
    for (uint32_t i = 0; i < 8; i++) {
        struct {
            struct pc__data_header header;
            struct pc__data_asker asker;
            uint64_t run;
        } get = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .region = 1,
                            .n_runs = 1, .n_blocks = 512, .request_id = i, .version = 1},
                 .run = pc__run_pack(i * 512, 512)};
        CHECK(send(data[0], &get, sizeof get, 0) == (ssize_t)sizeof get);
    }
    SOON(stats_of(p.s0).blocks_served == 512); /* the others wait in the socket */
    /* New versions, each of which replaces all that is asked for. */
    uint64_t *owners = registry_owners(p.c->registry, 1, 1, 4096);
    for (uint64_t v = 1; v < 4; v++)
        CHECK(commit_far(&p, v, v % 2 ? &all : &half, 1) == v + 1);
    usleep(500000);
    static uint64_t block[512];
    unsigned seen = 0;
    for (int n = 0; n < 8; n++) {
        struct pc__data_header header;
        CHECK(recv(data[0], &header, sizeof header, MSG_WAITALL) == (ssize_t)sizeof header);
        const uint32_t i = header.request_id; /* what comes from a disk comes in any order */
        CHECK(header.status == 0 && i < 8 && !(seen >> i & 1) && !header.flags);
        seen |= 1u << i;
        for (uint64_t b = i * 512; b < (i + 1) * 512; b++) {
            CHECK(recv(data[0], block, sizeof block, MSG_WAITALL) == (ssize_t)sizeof block);
            CHECK(wrong_word(block, 1, owners[b], b, pattern) == 512);
            if (b % 64 == 0)
                usleep(2000);
        }
    }
    free(owners);
    close(data[0]);
    SOON(stats_of(p.s0).commits_applied == 4);
    check_at(p.c, p.home, &p.info, 4);
    pair_stop(&p);
}

/* Opens at the home do not wait for a far server that does not read. */
static void test_stalled_peer_holds_nobody_up(int trap)
{
    told.fetch_timeout_ns = 60 * SECOND;
    struct pair p = pair_start("stalled", trap, 16 * MIB);
    const struct pc_run all = {0, 4096};
    int data[2];
    tcp_pair(data);
    OK(pc_engine_serve(p.s0->engine, 0x9999, data[1]));
    for (uint32_t i = 0; i < 8; i++) {
        struct {
            struct pc__data_header header;
            struct pc__data_asker asker;
            uint64_t run;
        } get = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .region = 1,
                            .n_runs = 1, .n_blocks = 2048, .request_id = i},
                 .run = pc__run_pack((i % 2) * 2048, 2048)};
        CHECK(send(data[0], &get, sizeof get, 0) == (ssize_t)sizeof get);
    }
    SOON(stats_of(p.s0).blocks_served == 2048); /* the others wait in the socket */
    CHECK(commit_home(&p, 0, &all, 1) == 1);
    uint64_t began = now_ns();
    check_at(p.c, p.home, &p.info, 1);
    CHECK(now_ns() - began < told.fetch_timeout_ns); /* that is when it would be given up */
    close(data[0]);
    pair_stop(&p);
}

/* Those of retained layers aside: their number is bounded, and one each. */
static uint64_t descriptors_but_retained(struct pair *p)
{
    const uint64_t retained =
        stats_of(p->s0).retained_layers + stats_of(p->s1).retained_layers;
    return (uint64_t)open_descriptors() - retained;
}

/* Many commits leave nothing behind: with an older lease at home and far, and without. */
static void flat(int trap, bool leased)
{
    told.history_bytes = 4 << 20;
    struct pair p = pair_start("flat", trap, MIB);
    struct pc_mapping old[2] = {{0}, {0}};
    uint64_t fds = 0, bytes = 0, generations = 0;
    uint64_t v = 0, until = now_ns() + 40 * SECOND;
    const uint64_t most = rounds_of(1000, 2000);
    for (uint64_t i = 0; i < most && (i < 900 || now_ns() < until); i++) {
        const struct pc_run runs[] = {{i % 100, 1}, {128 + i % 64, 2}};
        v = i % 4 == 3 ? commit_far(&p, v, runs, 2) : commit_home(&p, v, runs, 2);
        CHECK(v == i + 1);
        if (i % 20 == 0) {
            struct pc_mapping m[2] = {map_at(p.home, &p.info, v, 0), map_at(p.far, &p.info, v, 0)};
            uint64_t *owners = registry_owners(p.c->registry, 1, v, 256);
            for (uint64_t b = 0; b < 256; b += 1 + i % 7) {
                check_block(p.c, &m[0], &p.info, v, owners[b], b);
                check_block(p.c, &m[1], &p.info, v, owners[b], b);
            }
            free(owners);
            OK(pc_client_unmap(p.home, m[0].id));
            OK(pc_client_unmap(p.far, m[1].id));
        }
        if (leased && i == 10) {
            old[0] = map_at(p.home, &p.info, v, 0);
            old[1] = map_at(p.far, &p.info, v, 0);
        }
        if (i % 100 != 99)
            continue;
        SOON(stats_of(p.s0).layers == 0 && stats_of(p.s1).layers == 0);
        SOON(region_of(p.s0, 1).generations + region_of(p.s1, 1).generations <=
             (leased ? 5u : 2u));
        if (i == 799) {
            fds = descriptors_but_retained(&p);
            bytes = memfd_bytes();
            generations = region_of(p.s0, 1).generations + region_of(p.s1, 1).generations;
        }
        if (i < 800)
            continue;
        SOON(descriptors_but_retained(&p) <= fds + 2);
        SOON(memfd_bytes() <= bytes + 3 * MIB);
        CHECK(region_of(p.s0, 1).generations + region_of(p.s1, 1).generations <= generations + 1);
    }
    if (leased) {
        check_version(p.c, &old[0], &p.info, 11);
        OK(pc_client_unmap(p.home, old[0].id));
        OK(pc_client_unmap(p.far, old[1].id));
    }
    check_at(p.c, p.home, &p.info, v);
    check_at(p.c, p.far, &p.info, v);
    SOON(region_of(p.s0, 1).generations == 1 && region_of(p.s1, 1).generations <= 1);
    pair_stop(&p);
}
static void test_flat(int trap)
{
    flat(trap, false);
}
static void test_flat_with_old_leases(int trap)
{
    flat(trap, true);
}

/* A region whose bytes lie in the caller's memory takes commits in an overlay. */
static void test_shared(int trap)
{
    struct pair p = {.c = cluster_start(2, "shared")};
    p.s0 = &p.c->servers[0];
    p.s1 = &p.c->servers[1];
    p.home = attach(p.s0, trap);
    p.far = attach(p.s1, trap);
    p.info = (struct pc_region_info){.region = 1, .base_address = PC_WINDOW_BEGIN + (1ull << 28),
                                     .length_bytes = MIB};
    uint64_t *memory = malloc(MIB);
    fill_pattern(memory, 1, 0, MIB);
    /* Parts of blocks too: [1000, 500000) is in memory, the rest in the file. */
    const struct pc_segment segment = {1000, 499000, (uint64_t)(uintptr_t)memory + 1000};
    int fd;
    OK(pc_engine_create_shared(p.s0->engine, &p.info, &segment, 1, &fd));
    OK(pc_copy_in(fd, 0, memory, 1000, 1));
    OK(pc_copy_in(fd, 500000, (uint8_t *)memory + 500000, MIB - 500000, 1));
    close(fd);
    OK(pc_engine_seal(p.s0->engine, 1));
    publish(p.c, p.info, p.s0->id);
    check_at(p.c, p.home, &p.info, 0);
    const struct pc_run edges[] = {{0, 2}, {100, 30}, {255, 1}};
    CHECK(commit_home(&p, 0, edges, N(edges)) == 1);
    CHECK(commit_far(&p, 1, some, N(some)) == 2);
    CHECK(commit_home(&p, 2, one, 1) == 3);
    SOON(stats_of(p.s0).commits_applied == 3);
    for (uint64_t v = 0; v <= 3; v++) {
        check_at(p.c, p.home, &p.info, v);
        check_at(p.c, p.far, &p.info, v);
    }
    pair_stop(&p);
    free(memory);
}

/* ------------------------------------------------------------------ stress */

struct worker {
    struct pair *p;
    struct server *node;
    int trap;
    unsigned seed;
    uint64_t until_ns;
    uint64_t done, refused;
};

/* Until its time is over, and on a busy machine until it has done something. */
static bool goes_on(const struct worker *w)
{
    const uint64_t now = now_ns();
    return now < w->until_ns || (w->done < 6 && now < w->until_ns + 60 * SECOND);
}

static void *read_randomly(void *arg)
{
    struct worker *w = arg;
    pc_client *client = attach(w->node, w->trap);
    struct pc_mapping held[3];
    uint64_t at[3];
    size_t n_held = 0;
    while (goes_on(w)) {
        uint64_t latest = registry_latest(w->p->c->registry, 1);
        uint64_t back = (uint64_t)rand_r(&w->seed) % (rand_r(&w->seed) % 4 ? 3 : 40);
        uint64_t v = latest > back ? latest - back : 0;
        if (n_held == 3) {
            size_t i = (size_t)rand_r(&w->seed) % 3;
            check_version(w->p->c, &held[i], &w->p->info, at[i]);
            OK(pc_client_unmap(client, held[i].id));
            held[i] = held[--n_held];
            at[i] = at[n_held];
        }
        int rc = try_map(client, &w->p->info, v, 0, &held[n_held]);
        if (rc == PC_ERR_EXPIRED || rc == PC_ERR_CLASH) /* another client here is at the address */
            continue;
        OK(rc);
        at[n_held] = v;
        uint64_t *owners = registry_owners(w->p->c->registry, 1, v, w->p->info.length_bytes >> 12);
        for (int i = 0; i < 40; i++) {
            uint64_t b = (uint64_t)rand_r(&w->seed) % (w->p->info.length_bytes >> 12);
            check_block(w->p->c, &held[n_held], &w->p->info, v, owners[b], b);
        }
        free(owners);
        n_held++;
        w->done++;
    }
    pc_client_close(client);
    return NULL;
}

static void *write_randomly(void *arg)
{
    struct worker *w = arg;
    struct pair *p = w->p;
    uint64_t n_blocks = p->info.length_bytes >> 12;
    pc_client *client = attach(w->node, w->trap);
    while (goes_on(w)) {
        struct pc_run runs[8];
        size_t n = 0;
        uint64_t from = (uint64_t)rand_r(&w->seed) % 20;
        while (n < 8 && from + 12 < n_blocks) {
            runs[n++] = (struct pc_run){from, 1 + (uint64_t)rand_r(&w->seed) % 10};
            from += 12 + (uint64_t)rand_r(&w->seed) % (n_blocks / 4);
        }
        struct transaction t;
        int rc = try_begin(p->c, w->node, client, &p->info, registry_latest(p->c->registry, 1),
                           &t);
        if (rc == PC_ERR_CLASH)
            continue;
        OK(rc);
        write_runs(&t, runs, n);
        OK(try_stage(&t));
        OK(try_pull(&t));
        if (decide(&t))
            w->done++;
        else
            w->refused++;
        if (t.version && rand_r(&w->seed) % 4 == 0)
            usleep((unsigned)rand_r(&w->seed) % 2000); /* so that others hear of later ones first */
        tell(&t);
        OK(pc_client_unmap(client, t.m.id));
        if (rand_r(&w->seed) % 8 == 0)
            usleep(5000);
    }
    pc_client_close(client);
    return NULL;
}

static void test_stress(int trap)
{
    told.history_bytes = 256 << 20;
    struct pair p = pair_start("stress", trap, MIB);
    int threads = threads_now(), fds = open_descriptors();
    struct worker workers[8];
    pthread_t ids[8];
    for (unsigned i = 0; i < 8; i++) {
        workers[i] = (struct worker){.p = &p, .node = i % 2 ? p.s1 : p.s0, .trap = trap,
                                     .seed = i * 7919 + (unsigned)getpid(),
                                     .until_ns = now_ns() + rounds_of(3, 5) * SECOND};
        CHECK(!pthread_create(&ids[i], NULL, i < 4 ? write_randomly : read_randomly, &workers[i]));
    }
    uint64_t written_ = 0, read_ = 0;
    for (unsigned i = 0; i < 8; i++) {
        pthread_join(ids[i], NULL);
        if (i < 4)
            written_ += workers[i].done;
        else
            read_ += workers[i].done;
    }
    printf("stress: %llu commits, %llu leases\n", (unsigned long long)written_,
           (unsigned long long)read_);
    CHECK(written_ > 20 && read_ > 20);
    uint64_t latest = registry_latest(p.c->registry, 1);
    SOON(stats_of(p.s0).commits_applied == latest);
    check_at(p.c, p.home, &p.info, latest);
    check_at(p.c, p.far, &p.info, latest);
    SOON(stats_of(p.s0).mappings == 0 && stats_of(p.s1).mappings == 0);
    SOON(stats_of(p.s0).layers == 0 && stats_of(p.s1).layers == 0);
    SOON(region_of(p.s0, 1).generations == 1 && region_of(p.s1, 1).generations <= 1);
    SOON(threads_now() == threads);
    SOON(descriptors_but_retained(&p) <= (uint64_t)fds + 64); /* history, connections of servers */
    OK(pc_engine_retire(p.s0->engine, 1, 1));
    OK(pc_engine_retire(p.s1->engine, 1, 1));
    SOON(stats_of(p.s0).history_records == 0);
    SOON(memfd_bytes() < 9 * MIB); /* one segment of the history, that is written to */
    pair_stop(&p);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(update),
        TEST(only_what_changed_travels),
        TEST(changes_unknown),
        TEST(far_writer),
        TEST(again_and_refused),
        TEST(out_of_order),
        TEST(home_asks),
        TEST(expired),
        TEST(stopped_reader),
        TEST(writer_dies),
        TEST(silence),
        TEST_IN(slow_reader_of_a_socket, 200),
        TEST_IN(stalled_peer_holds_nobody_up, 200),
        TEST_IN(flat, 300),
        TEST_IN(flat_with_old_leases, 300),
        TEST(shared),
        TEST_IN(stress, 200),
    };
    int failed = 0;
    for (int far = 0; far < 2; far++)
        if (argc < 2 || !strcmp(argv[1], "asked_too_early"))
            failed += run_test("asked_too_early", test_asked_too_early, far, 60);
    failed += run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
    return failed != 0;
}
