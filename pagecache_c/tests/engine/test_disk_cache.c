/* test_disk_cache.c - what was evicted comes back from this node's disk: over both traps the right bytes, of the
 * right version, and from others where the disk is slower, full, or fails. Server 0 is the home. */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/miss/miss.h"
#include "tests/support/engine_main.h"
#include "tests/support/fail_call.h"
#include "tests/support/length.h"
#include "tests/support/pair.h"

#define BUDGET (2 * MIB)
#define BYTES (6 * BUDGET)
#define DISK (16 * MIB)
#define FOR_EVER (UINT64_MAX / 16)

static struct pair start(const char *tag, int trap)
{
    told.cache_bytes = BUDGET;
    told.cache_disk_bytes = DISK;
    return pair_start(tag, trap, BYTES);
}

/* How fast the other side is, as this node believes. */
static void believe(const struct pair *p, uint64_t peer_ns, uint64_t disk_ns)
{
    struct pc__disk_times *times = pc__disk_cache_times(p->s1->engine->disk_cache);
    for (unsigned i = 0; i < PC__SIZE_CLASSES; i++) {
        times->peer_ns[i] = peer_ns;
        times->disk_ns[i] = disk_ns;
    }
}

static void check_all(const struct pair *p, const struct pc_mapping *m, uint64_t peer_ns, uint64_t disk_ns)
{
    for (uint64_t at_byte = 0; at_byte < p->info.length_bytes; at_byte += 512) {
        if (at_byte % BUDGET == 0)
            believe(p, peer_ns, disk_ns);
        if (at(m, at_byte) != pattern(1, at_byte))
            FAIL("not the bytes that were put");
    }
}

/* Reads all, as often as it takes: what the disk is too slow for is not kept. */
static void fill_disk(const struct pair *p, const struct pc_mapping *m)
{
    for (int i = 0; i < 100 && stats_of(p->s1).disk_cached_bytes < BYTES - 2 * BUDGET; i++)
        check_all(p, m, FOR_EVER, 1);
    CHECK(stats_of(p->s1).disk_cached_bytes >= BYTES - 2 * BUDGET);
}

static void audit(const struct pair *p)
{
    const char *broken = pc__disk_cache_audit(p->s1->engine->disk_cache);
    if (broken)
        FAIL(broken);
}

static bool is_idle(const struct pair *p)
{
    struct pc__disk_jobs *jobs = &p->s1->engine->disk_jobs;
    pthread_mutex_lock(&jobs->lock);
    const bool idle = jobs->n_idle == jobs->n_threads;
    pthread_mutex_unlock(&jobs->lock);
    return idle;
}

static void test_it_comes_back(int trap)
{
    struct pair p = start("again", trap);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    fill_disk(&p, &m);
    audit(&p);
    const struct pc_engine_stats before = stats_of(p.s1);
    check_all(&p, &m, FOR_EVER, 1);
    const struct pc_engine_stats stats = stats_of(p.s1);
    CHECK(stats.disk_cache_reads - before.disk_cache_reads > (BYTES >> 12) / 2);
    CHECK(stats.blocks_fetched - before.blocks_fetched < (BYTES >> 12) / 2);
    audit(&p);
    pair_stop(&p);
}

/* What is there already is not written once more. */
static void test_it_is_written_once(int trap)
{
    struct pair p = start("once", trap);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    fill_disk(&p, &m);
    const uint64_t evicted = stats_of(p.s1).evicted_blocks;
    for (int i = 0; i < 6; i++)
        check_all(&p, &m, FOR_EVER, 1);
    CHECK(stats_of(p.s1).disk_cache_writes <= BYTES >> 12);
    CHECK(stats_of(p.s1).evicted_blocks - evicted > 4 * (BYTES >> 12));
    pair_stop(&p);
}

static void test_a_slower_disk_is_left_alone(int trap)
{
    struct pair p = start("slow", trap);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    for (int i = 0; i < 3; i++)
        check_all(&p, &m, 1, FOR_EVER);
    const struct pc_engine_stats stats = stats_of(p.s1);
    CHECK(stats.disk_cached_bytes > 0);
    CHECK(stats.disk_cache_reads < (BYTES >> 12) / 4); /* now and then it is tried */
    pair_stop(&p);
}

/* A version's blocks, and no older ones, though the disk has those. */
static void test_versions(int trap)
{
    struct pair p = start("versions", trap);
    const struct pc_run some[] = {{0, 40}, {300, 500}, {1500, 1}}, others[] = {{20, 30}, {2000, 100}};
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    check_all(&p, &m, FOR_EVER, 1);
    check_all(&p, &m, FOR_EVER, 1);
    OK(pc_client_unmap(p.far, m.id)); /* so that what is cached moves on */
    CHECK(commit(p.c, p.s0, p.home, &p.info, 0, some, 3) == 1);
    believe(&p, FOR_EVER, 1);
    check_at(p.c, p.far, &p.info, 1);
    m = map_at(p.far, &p.info, 1, 0); /* version 2 is a fork of it */
    CHECK(commit(p.c, p.s0, p.home, &p.info, 1, others, 2) == 2);
    believe(&p, FOR_EVER, 1);
    check_at(p.c, p.far, &p.info, 2);
    check_at(p.c, p.far, &p.info, 1);
    check_at(p.c, p.far, &p.info, 0);
    check_version(p.c, &m, &p.info, 1);
    CHECK(stats_of(p.s1).advances > 0 && stats_of(p.s1).forks > 0);
    CHECK(stats_of(p.s1).disk_cache_reads > 0);
    audit(&p);
    pair_stop(&p);
}

/* The file is full after a while: what was there first makes room. */
static void test_a_ring(int trap)
{
    told.cache_bytes = BUDGET;
    told.cache_disk_bytes = 8 * MIB;
    struct pair p = pair_start("ring", trap, 3 * 8 * MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    for (int i = 0; i < 2; i++) {
        check_all(&p, &m, FOR_EVER, 1);
        CHECK(stats_of(p.s1).disk_cached_bytes <= 8 * MIB);
        audit(&p);
    }
    CHECK(stats_of(p.s1).disk_cache_writes > 8 * MIB >> 12);
    pair_stop(&p);
}

/* Whole chunks find no room; what is smaller does. */
static void test_a_full_disk(int trap)
{
    fail_call(SYS_pwrite64, 2, UINT32_MAX, PC__CHUNK_BYTES, ENOSPC);
    struct pair p = start("full", trap);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    check_all(&p, &m, FOR_EVER, 1);
    check_all(&p, &m, FOR_EVER, 1);
    CHECK(stats_of(p.s1).evicted_blocks > BYTES >> 12);
    audit(&p);
    pair_stop(&p);
}

/* What does not come from it comes from the home, and it is asked no more. */
static void test_a_broken_disk(int trap)
{
    fail_call(SYS_preadv, 2, UINT32_MAX, 1, EIO);
    struct pair p = start("broken", trap);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    for (int i = 0; i < 100 && !p.s1->engine->count.disk_cache_writes; i++)
        check_all(&p, &m, FOR_EVER, 1);
    check_all(&p, &m, FOR_EVER, 1);
    CHECK(stats_of(p.s1).disk_cache_writes > 0 && stats_of(p.s1).disk_cache_reads == 0);
    SOON(is_idle(&p));
    const uint64_t writes = stats_of(p.s1).disk_cache_writes;
    check_all(&p, &m, FOR_EVER, 1);
    CHECK(stats_of(p.s1).disk_cache_writes == writes);
    pair_stop(&p);
}

/* A disk that hangs, as far as others can see: its threads do nothing else. */
struct hang {
    struct pc__disk_job jobs[PC__DISK_THREADS];
    _Atomic unsigned n_in;
    _Atomic bool is_over;
} hang;

static void hang_on(struct pc__disk_job *job, uint8_t *some)
{
    (void)job;
    (void)some;
    hang.n_in++;
    while (!hang.is_over)
        usleep(1000);
}

/* Who waits for it gets the blocks elsewhere, and nobody else is sent there. */
static void test_a_disk_that_hangs(int trap)
{
    told.fetch_timeout_ns = SECOND;
    struct pair p = start("hang", trap);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    fill_disk(&p, &m);
    for (unsigned i = 0; i < PC__DISK_THREADS; i++) {
        hang.jobs[i].run = hang_on;
        CHECK(pc__disk_job_run(p.s1->engine, &hang.jobs[i], PC__DISK_URGENT));
    }
    SOON(hang.n_in == PC__DISK_THREADS);
    const uint64_t reads = stats_of(p.s1).disk_cache_reads;
    check_all(&p, &m, FOR_EVER, 1);
    check_all(&p, &m, FOR_EVER, 1);
    CHECK(stats_of(p.s1).disk_cache_reads == reads);
    hang.is_over = true;
    SOON(p.s1->engine->disk_jobs.n_reads == 0);
    check_all(&p, &m, FOR_EVER, 1);
    CHECK(stats_of(p.s1).disk_cache_reads > reads); /* it is asked again */
    audit(&p);
    pair_stop(&p);
}

static unsigned chosen_of_64(struct pc__disk_times *times, uint64_t n_blocks, uint64_t n_waiting)
{
    unsigned n = 0;
    for (unsigned i = 0; i < 64; i++)
        n += pc__disk_is_faster(times, n_blocks, n_waiting);
    return n;
}

static void test_the_choice(int trap)
{
    (void)trap;
    struct pc__disk_times times = {0};
    CHECK(chosen_of_64(&times, 1, 0) == 63); /* nothing is known */
    times.disk_ns[0] = 100;
    CHECK(chosen_of_64(&times, 1, 0) == 63);
    times.peer_ns[0] = 99;
    CHECK(chosen_of_64(&times, 1, 0) == 1);
    times.peer_ns[0] = 100;
    CHECK(chosen_of_64(&times, 1, 0) == 63);
    times.disk_ns[2] = 400; /* a chunk */
    times.peer_ns[3] = 1600;
    CHECK(chosen_of_64(&times, 64, 0) == 63); /* of four chunks */
    CHECK(chosen_of_64(&times, 65, 0) == 1);
    CHECK(chosen_of_64(&times, 64, PC__DISK_THREADS) == 1); /* behind others */
}

static void test_what_makes_no_sense(int trap)
{
    (void)trap;
    pc_engine *engine = NULL;
    struct pc_engine_options options = told;
    char directory[] = "/tmp/clamor-test-XXXXXX";
    CHECK(mkdtemp(directory));
    options.socket_name = "disk-cache-none";
    options.library_version = "test";
    options.server_id = 1;
    options.keeper_fd = -1;
    options.cache_bytes = BUDGET;
    options.cache_disk_bytes = DISK;
    options.disk_directory = NULL;
    CHECK(pc_engine_start(&options, &engine) == PC_ERR_RANGE);
    options.disk_directory = "/proc/none";
    CHECK(pc_engine_start(&options, &engine) < 0);
    options.disk_directory = directory;
    options.cache_disk_bytes = MIB;
    CHECK(pc_engine_start(&options, &engine) == PC_ERR_RANGE);
    CHECK(strstr(pc_last_message(), "at least"));
    CHECK(pc_disk_cache_check(directory, MIB) == PC_ERR_RANGE);
    CHECK(pc_disk_cache_check(directory, UINT64_MAX) == PC_ERR_RANGE);
    CHECK(pc_disk_cache_check("/proc/none", DISK) < 0);
    CHECK(pc_disk_cache_check("/dev/shm", DISK) == PC_ERR_NO_SPACE);
    OK(pc_disk_cache_check(directory, DISK));
    OK(rmdir(directory));
}

struct reader {
    struct pair *p;
    pthread_t thread;
    unsigned seed;
    _Atomic bool *stop;
};

static void *read_at_random(void *arg)
{
    struct reader *reader = arg;
    struct pc_mapping m = map_at(reader->p->far, &reader->p->info, 0, 0);
    while (!*reader->stop) {
        const uint64_t at_byte = (uint64_t)rand_r(&reader->seed) % (BYTES >> 12) << 12;
        if (at(&m, at_byte) != pattern(1, at_byte))
            FAIL("not the bytes that were put");
    }
    return NULL;
}

/* Threads that read version 0, and commits beside it whose versions are read too, while its server audits. */
static void test_at_random(int trap)
{
    struct pair p = start("random", trap);
    struct reader readers[3];
    _Atomic bool stop = false;
    unsigned seed = 5;
    for (unsigned i = 0; i < 3; i++) {
        readers[i] = (struct reader){.p = &p, .seed = i + 1, .stop = &stop};
        CHECK(!pthread_create(&readers[i].thread, NULL, read_at_random, &readers[i]));
    }
    const unsigned n = rounds_of(8, 60);
    for (unsigned version = 0; version < n; version++) {
        const struct pc_run run = {(uint64_t)rand_r(&seed) % 3000, 1 + (uint64_t)rand_r(&seed) % 60};
        believe(&p, FOR_EVER, 1);
        CHECK(commit(p.c, p.s0, p.home, &p.info, version, &run, 1) == version + 1);
        check_at(p.c, p.far, &p.info, version + 1);
        audit(&p);
    }
    stop = true;
    for (unsigned i = 0; i < 3; i++)
        pthread_join(readers[i].thread, NULL);
    CHECK(stats_of(p.s1).disk_cache_reads > 0);
    pair_stop(&p);
}

/* Its threads have reads to do when the server ends. */
static void test_stop_in_the_middle(int trap)
{
    for (unsigned i = 0; i < rounds_of(4, 20); i++) {
        struct pair p = start("stop", trap);
        struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
        check_all(&p, &m, FOR_EVER, 1);
        const struct pc_run all = {0, BYTES >> 12};
        believe(&p, FOR_EVER, 1);
        (void)pc_client_prefetch(p.far, m.id, &all, 1, 1, 1000000 * i); /* it is not waited for */
        pc_client_close(p.far);
        pc_client_close(p.home);
        cluster_stop(p.c);
    }
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {TEST(it_comes_back),
                                               TEST(it_is_written_once),
                                               TEST(a_slower_disk_is_left_alone),
                                               TEST(versions),
                                               TEST(a_ring),
                                               TEST(a_full_disk),
                                               TEST(a_broken_disk),
                                               TEST(a_disk_that_hangs),
                                               TEST(the_choice),
                                               TEST(what_makes_no_sense),
                                               TEST(at_random),
                                               TEST(stop_in_the_middle)};
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
