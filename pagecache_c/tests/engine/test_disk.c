/* test_disk.c - homes on disk: what is theirs alone. That they are homes as any others: the suites of homes
 * run with TEST_MEDIUM=disk. */
#include "engine/core/core.h"
#include "tests/support/deltas.h"
#include "tests/support/engine_main.h"
#include "tests/support/fail_call.h"
#include "tests/support/keepers.h"
#include "tests/support/pair.h"

#include <sys/uio.h>

#define BYTES ((uint64_t)256 << 12)
#define LARGE_BYTES ((uint64_t)2048 << 12)
#define BASE_OF(id) (PC_WINDOW_BEGIN + ((uint64_t)(id) << 28))

static int create(pc_client *client, uint64_t id, uint64_t bytes, int *fd)
{
    return pc_client_create(client, id, BASE_OF(id), bytes, PC_MEDIUM_DISK, WAIT, fd);
}

/* A variable on disk, at server 0. */
static struct pc_region_info on_disk(const struct pair *p, uint64_t id)
{
    const struct pc_region_info info = {
        .region = id, .base_address = BASE_OF(id), .length_bytes = BYTES, .medium = PC_MEDIUM_DISK};
    uint64_t *words = malloc(BYTES);
    int fd = -1;
    fill_pattern(words, id, 0, BYTES);
    OK(create(p->home, id, BYTES, &fd));
    OK(pc_copy_in(fd, 0, words, BYTES, 1));
    close(fd);
    free(words);
    OK(pc_client_seal(p->home, id, WAIT));
    publish(p->c, info, p->s0->id);
    return info;
}

static void test_it_is_no_memory(int trap)
{
    struct pair p = pair_start("disk", trap, BYTES);
    const uint64_t home_bytes = stats_of(p.s0).home_bytes;
    const struct pc_region_info info = on_disk(&p, 2);
    CHECK(stats_of(p.s0).home_bytes == home_bytes);
    CHECK(stats_of(p.s0).disk_bytes >= BYTES);
    struct pc_mapping here = map_at(p.home, &info, 0, 0), there = map_at(p.far, &info, 0, 0);
    for (uint64_t at_byte = 0; at_byte < BYTES; at_byte += PC_BLOCK_BYTES)
        CHECK(at(&here, at_byte) == pattern(2, at_byte) && at(&there, at_byte) == pattern(2, at_byte));
    pair_stop(&p);
}

/* The layers of home 2 that are not applied yet. */
static unsigned pending(struct server *server, bool on_disk)
{
    struct pc__region *region = pc__region_get(server->engine, 2);
    unsigned n = 0;
    pthread_mutex_lock(&region->lock);
    pc__each(link, &region->home->pending)
        n += pc__of(link, struct pc__layer, link)->on_disk == on_disk;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return n;
}

/* All that a commit changes lies on disk until it is applied; what is little is not worth a file. */
static void test_large_layers_are_no_memory(int trap)
{
    const struct pc_run large[] = {{3, 80}, {200, 20}}, small = {90, 1};
    struct pair p = pair_start("disk-layer", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct pc_mapping old = map_at(p.home, &info, 0, 0);
    struct standstill still;
    hold_worker(&still, p.s0);
    CHECK(commit(p.c, p.s0, p.home, &info, 0, large, 2) == 1);
    CHECK(commit(p.c, p.s1, p.far, &info, 1, large, 1) == 2);
    CHECK(commit(p.c, p.s1, p.far, &info, 2, &small, 1) == 3);
    CHECK(pending(p.s0, true) == 2 && pending(p.s0, false) == 1);
    for (uint64_t version = 0; version <= 3; version++) {
        check_at(p.c, p.far, &info, version);
        check_at(p.c, p.home, &info, version);
    }
    release_worker(&still);
    SOON(stats_of(p.s0).commits_applied == 3);
    for (uint64_t version = 0; version <= 3; version++)
        check_at(p.c, p.far, &info, version);
    OK(pc_client_unmap(p.home, old.id));
    SOON(stats_of(p.s0).layers == 0);
    pair_stop(&p);
}

/* A region of 8 MiB, on disk or in memory, at server 0. */
static struct pc_region_info large_region(const struct pair *p, uint64_t id, int medium)
{
    const struct pc_region_info info = {.region = id, .base_address = BASE_OF(id),
                                        .length_bytes = LARGE_BYTES, .medium = (uint8_t)medium};
    int fd = -1;
    OK(pc_client_create(p->home, id, info.base_address, LARGE_BYTES, medium, WAIT, &fd));
    uint64_t *words = malloc(LARGE_BYTES);
    fill_pattern(words, id, 0, LARGE_BYTES);
    OK(pc_copy_in(fd, 0, words, LARGE_BYTES, 1));
    free(words);
    close(fd);
    OK(pc_client_seal(p->home, id, WAIT));
    publish(p->c, info, p->s0->id);
    return info;
}

static uint64_t home_latest(struct server *server, uint64_t id)
{
    struct pc__region *region = pc__region_get(server->engine, id);
    pthread_mutex_lock(&region->lock);
    const uint64_t latest = region->home->latest;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return latest;
}

/* Whether the layer of a home's newest version, whose worker stands still, is on disk; then it has the checksums
 * of the blocks behind them. */
static bool newest_layer(struct server *server, uint64_t id, uint64_t version, bool *has_sums)
{
    SOON(home_latest(server, id) == version); /* its writer says so, and does not wait */
    struct pc__region *region = pc__region_get(server->engine, id);
    pthread_mutex_lock(&region->lock);
    const struct pc__layer *layer = pc__of(region->home->pending.prev, struct pc__layer, link);
    const bool on_disk = layer->on_disk;
    uint8_t *blocks = malloc(layer->n_blocks << 12);
    uint32_t *sums = malloc(layer->n_blocks * 4), *found = malloc(layer->n_blocks * 4);
    OK(pc__layer_read(layer, 0, layer->n_blocks, blocks));
    pc_crc32c_blocks(blocks, layer->n_blocks, sums);
    *has_sums = on_disk && pread(layer->memfd, found, layer->n_blocks * 4, (off_t)layer->bytes) ==
                               (ssize_t)(layer->n_blocks * 4);
    for (uint64_t i = 0; *has_sums && i < layer->n_blocks; i++)
        *has_sums = found[i] == (sums[i] ^ 0x98f94189u);
    free(found);
    free(sums);
    free(blocks);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return on_disk;
}

/* Its writer puts it there, where its home is on this node's disk. What comes from elsewhere is copied. */
static void test_files_of_large_layers(int trap)
{
    const struct pc_run large[] = {{3, 1000}, {1100, 1}, {1200, 400}}, small[] = {{0, 80}};
    struct pair p = pair_start("disk-file", trap, BYTES);
    const struct pc_region_info disk = large_region(&p, 2, PC_MEDIUM_DISK),
                                memory = large_region(&p, 3, PC_MEDIUM_MEMORY);
    struct pc_mapping old = map_at(p.home, &disk, 0, 0), of_memory = map_at(p.home, &memory, 0, 0);
    struct standstill still;
    bool has_sums;
    hold_worker(&still, p.s0);
    const uint64_t before = memfd_bytes();
    CHECK(commit(p.c, p.s0, p.home, &disk, 0, large, 3) == 1);
    CHECK(newest_layer(p.s0, 2, 1, &has_sums) && has_sums);
    CHECK(memfd_bytes() == before);
    CHECK(commit(p.c, p.s0, p.home, &disk, 1, small, 1) == 2);
    CHECK(newest_layer(p.s0, 2, 2, &has_sums) && has_sums);
    CHECK(commit(p.c, p.s1, p.far, &disk, 2, large, 3) == 3);
    CHECK(newest_layer(p.s0, 2, 3, &has_sums) && has_sums);
    CHECK(commit(p.c, p.s0, p.home, &memory, 0, large, 3) == 1);
    CHECK(!newest_layer(p.s0, 3, 1, &has_sums) && !has_sums);
    release_worker(&still);
    SOON(stats_of(p.s0).commits_applied == 4);
    for (uint64_t version = 0; version <= 3; version++)
        check_at(p.c, p.far, &disk, version);
    check_at(p.c, p.home, &memory, 1);
    OK(pc_client_unmap(p.home, old.id));
    OK(pc_client_unmap(p.home, of_memory.id));
    SOON(stats_of(p.s0).layers == 0);
    pair_stop(&p);
}

/* A file that is none of the server's own, or too short, is no layer. */
static void test_a_file_that_is_no_layer(int trap)
{
    struct pair p = pair_start("disk-no-layer", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    const uint64_t bytes = 2 << 12;
    const struct pc__layer_head head = {.magic = PC__LAYER_MAGIC, .region = 2, .commit_id = 77, .n_blocks = 1,
                                        .data_offset = 4096, .n_runs = 1};
    const struct pc_run run = {5, 1};
    for (int k = 0; k < 3; k++) {
        const int fd = k == 0 ? open("/dev/shm", O_TMPFILE | O_RDWR, 0600)
                     : k == 1 ? open(DISK_DIRECTORY, O_TMPFILE | O_RDWR, 0600)
                              : open("/dev/zero", O_RDONLY);
        CHECK(fd >= 0);
        if (k < 2) {
            CHECK(pwrite(fd, &head, sizeof head, 0) == sizeof head);
            CHECK(pwrite(fd, &run, sizeof run, sizeof head) == sizeof run);
            OK(ftruncate(fd, (off_t)(k == 0 ? bytes + 4 : bytes - 1)));
        }
        CHECK(pc__layer_stage(p.s0->engine, 2, 77, bytes, fd, 0) < 0);
    }
    CHECK(stats_of(p.s0).layers == 0);
    check_at(p.c, p.far, &info, 0);
    pair_stop(&p);
}

/* What it says of itself, and not what its file system says. */
static void test_zeros_around_an_overlay_are_none_of_it(int trap)
{
    const struct pc_run some = {10, 2};
    const uint8_t zeros[8 << 12] = {0};
    told.settle_ns = SECOND; /* so long it knows who reads the base */
    struct keeper keeper = keeper_start("disk-notes");
    struct cluster *c = cluster_new(1);
    int to_keeper = keeper_connect(&keeper);
    server_start(c, 0, "disk-notes", to_keeper);
    struct server *server = &c->servers[0];
    pc_client *client = attach(server, trap);
    const struct pair alone = {.c = c, .s0 = server, .home = client};
    const struct pc_region_info info = on_disk(&alone, 2);
    struct pc_mapping old = map_at(client, &info, 0, 0); /* the base stays as it is */
    CHECK(commit(c, server, client, &info, 0, &some, 1) == 1);
    SOON(stats_of(server).commits_applied == 1);
    struct pc__region *region = pc__region_get(server->engine, 2);
    CHECK(region->home->overlay.on_disk);
    CHECK(pwrite(region->home->overlay.memfd, zeros, sizeof zeros, 12 << 12) == sizeof zeros);
    pc__region_put(server->engine, region);
    server_stop(c, 0);
    close(to_keeper);
    to_keeper = keeper_connect(&keeper);
    server_start(c, 0, "disk-notes", to_keeper);
    check_at(c, client, &info, 1);
    OK(pc_client_unmap(client, old.id));
    check_at(c, client, &info, 1);
    pc_client_close(client);
    cluster_stop(c);
    close(to_keeper);
    keeper_stop(&keeper);
}

static void test_without_a_directory(int trap)
{
    no_disk_directory = true;
    struct pair p = pair_start("disk-none", trap, BYTES);
    int fd = -1;
    CHECK(create(p.home, 2, BYTES, &fd) == PC_ERR_NO_SPACE && fd == -1);
    pair_stop(&p);
}

/* All of its room is taken when it is made: who writes to it later would end by SIGBUS. */
static void test_a_full_disk(int trap)
{
    fail_call(SYS_fallocate, 3, UINT32_MAX, (uint32_t)BYTES + 1, ENOSPC);
    struct pair p = pair_start("disk-full", trap, BYTES);
    int fd = -1;
    CHECK(create(p.home, 2, 2 * BYTES, &fd) == PC_ERR_NO_SPACE && fd == -1);
    const struct pc_region_info other = {.region = 3, .base_address = BASE_OF(3),
                                         .length_bytes = 2 * BYTES, .medium = PC_MEDIUM_DISK};
    CHECK(pc_engine_rebuild_begin(p.s1->engine, &other, NULL, 0, &fd) == PC_ERR_NO_SPACE && fd == -1);
    const struct pc_region_info info = on_disk(&p, 2); /* the next one, which fits */
    struct pc_mapping m = map_at(p.far, &info, 0, 0);
    CHECK(at(&m, 8) == pattern(2, 8));
    pair_stop(&p);
}

/* A commit that the disk has no room for is refused, and the next one is not. */
static void test_a_disk_that_is_too_full_for_a_layer(int trap)
{
    const struct pc_run all = {0, BYTES >> 12}, some = {0, 100};
    fail_call(SYS_fallocate, 3, UINT32_MAX, (uint32_t)BYTES + 1, ENOSPC);
    struct pair p = pair_start("disk-layer-full", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct transaction t;
    OK(try_begin(p.c, p.s0, p.home, &info, 0, &t));
    write_runs(&t, &all, 1);
    CHECK(try_stage(&t) == PC_ERR_NO_SPACE);
    OK(pc_client_unmap(p.home, t.m.id));
    check_at(p.c, p.far, &info, 0);
    CHECK(commit(p.c, p.s0, p.home, &info, 0, &some, 1) == 1);
    check_at(p.c, p.far, &info, 1);
    pair_stop(&p);
}

/* The kernel takes what is mapped: then all of it counts. Neighbours show. */
static void test_a_read_set_misses_nothing(int trap)
{
    struct pair p = pair_start("disk-reads", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct pc_mapping m = map_at(p.home, &info, 0, PC_MAP_EXACT_READS);
    struct pc_run runs[BYTES >> 12], taken[1];
    CHECK(pc_client_evicted(p.home, m.id, taken, 1, WAIT) == 1); /* it was not watched */
    CHECK(taken[0].first_block == 0 && taken[0].n_blocks == BYTES >> 12);
    OK(pc_client_reads_exact(p.home, m.id));
    OK(pc_client_evicted_begin(p.home, m.id, WAIT));
    OK(pc_client_reads_begin(p.home, m.id));
    CHECK(at(&m, 5 << 12) == pattern(2, 5 << 12));
    int64_t n = pc_client_reads_end(p.home, m.id, runs, BYTES >> 12);
    bool has = false;
    for (int64_t i = 0; i < n; i++)
        has |= runs[i].first_block <= 5 && runs[i].first_block + runs[i].n_blocks > 5;
    n = pc_client_evicted(p.home, m.id, taken, 1, WAIT);
    CHECK(n == 1 ? taken[0].n_blocks == BYTES >> 12 : n == 0 && has);
    OK(pc_client_evicted_end(p.home, m.id));
    OK(pc_client_evicted_end(p.home, m.id)); /* one too many harms nobody */
    CHECK(pc_client_evicted(p.home, m.id, taken, 1, WAIT) == 1);
    pair_stop(&p);
}

/* Who reads it gets an error, and the server lives. */
static void test_a_broken_disk(int trap)
{
    const struct pc_run all = {0, 16};
    fail_call(SYS_pread64, 2, UINT32_MAX, PC_BLOCK_BYTES, EIO);
    fail_call(SYS_preadv2, 5, UINT32_MAX, RWF_NOWAIT, EIO);
    struct pair p = pair_start("disk-eio", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct pc_mapping broken = map_at(p.far, &info, 0, 0), sound = map_at(p.far, &p.info, 0, 0);
    CHECK(pc_client_prefetch(p.far, broken.id, &all, 1, 1, WAIT) < 0);
    CHECK(at(&sound, 3 << 12) == pattern(1, 3 << 12));
    pair_stop(&p);
}

/* Blocks that are not in memory are read in a thread of the disk, and not in a loop. */
static void test_cold_blocks(int trap)
{
    struct pair p = pair_start("disk-cold", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct pc__region *region = pc__region_get(p.s0->engine, 2);
    const int fd = region->home->base.memfd;
    struct pc_mapping m = map_at(p.far, &info, 0, 0);
    for (uint64_t at_byte = 0; at_byte < BYTES; at_byte += BYTES / 16) {
        OK(fsync(fd));
        OK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
        CHECK(at(&m, at_byte) == pattern(2, at_byte));
    }
    struct pc__disk_jobs *jobs = &p.s0->engine->disk_jobs;
    pthread_mutex_lock(&jobs->lock);
    CHECK(jobs->n_threads > 0);
    pthread_mutex_unlock(&jobs->lock);
    pc__region_put(p.s0->engine, region);
    pair_stop(&p);
}

/* What the disk refused after it was written is nobody's: not read as what was there before. */
static void test_a_disk_that_refuses_later(int trap)
{
    const struct pc_run all = {0, 16};
    fail_call(SYS_sync_file_range, 3, UINT32_MAX, SYNC_FILE_RANGE_WAIT_BEFORE, EIO);
    struct pair p = pair_start("disk-late", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct pc_mapping broken = map_at(p.far, &info, 0, 0), sound = map_at(p.far, &p.info, 0, 0);
    CHECK(pc_client_prefetch(p.far, broken.id, &all, 1, 1, WAIT) < 0);
    struct pc__region *region = pc__region_get(p.s0->engine, 2);
    struct stat st;
    OK(fstat(region->home->base.memfd, &st));
    CHECK(st.st_size == 0); /* also for who maps it, and for the next server */
    pc__region_put(p.s0->engine, region);
    CHECK(at(&sound, 3 << 12) == pattern(1, 3 << 12));
    pair_stop(&p);
}

/* A server that finds a file that it cannot read has its other variables all the same. */
static void test_a_restart_over_a_broken_disk(int trap)
{
    const struct pc_run some = {10, 2};
    struct keeper keeper = keeper_start("disk-restart");
    struct cluster *c = cluster_new(1);
    for (int of_overlay = 0; of_overlay < 2; of_overlay++) {
        int to_keeper = keeper_connect(&keeper);
        server_start(c, 0, "disk-restart", to_keeper);
        struct server *server = &c->servers[0];
        pc_client *client = attach(server, trap);
        const struct pair alone = {.c = c, .s0 = server, .home = client};
        const uint64_t bad = 2 + 2u * (unsigned)of_overlay;
        const struct pc_region_info info = on_disk(&alone, bad), other = on_disk(&alone, bad + 1);
        const struct pc_mapping old = map_at(client, &info, 0, 0); /* so that the change goes to an overlay */
        CHECK(commit(c, server, client, &info, 0, &some, 1) == 1);
        SOON(stats_of(server).commits_applied == 1);
        struct pc__region *region = pc__region_get(server->engine, bad);
        const struct pc__home *home = region->home;
        OK(ftruncate(of_overlay ? home->overlay.memfd : home->base.memfd, 0));
        pc__region_put(server->engine, region);
        server_stop(c, 0);
        (void)pc_client_unmap(client, old.id);
        pc_client_close(client);
        close(to_keeper);
        to_keeper = keeper_connect(&keeper);
        server_start(c, 0, "disk-restart", to_keeper);
        client = attach(server, trap);
        struct pc_mapping m;
        CHECK(try_map(client, &info, 1, 0, &m) == PC_ERR_HOME_LOST);
        check_at(c, client, &other, 0);
        pc_client_close(client);
        server_stop(c, 0);
        close(to_keeper);
    }
    cluster_stop(c);
    keeper_stop(&keeper);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {TEST(it_is_no_memory),
                                               TEST(large_layers_are_no_memory),
                                               TEST(files_of_large_layers),
                                               TEST(a_file_that_is_no_layer),
                                               TEST(zeros_around_an_overlay_are_none_of_it),
                                               TEST(without_a_directory),
                                               TEST(a_full_disk),
                                               TEST(a_disk_that_is_too_full_for_a_layer),
                                               TEST(a_read_set_misses_nothing),
                                               TEST(a_broken_disk),
                                               TEST(cold_blocks),
                                               TEST(a_disk_that_refuses_later),
                                               TEST(a_restart_over_a_broken_disk)};
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
