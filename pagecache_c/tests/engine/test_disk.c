/* test_disk.c - homes on disk: what is theirs alone. That they are homes as any others: the suites of homes
 * run with TEST_MEDIUM=disk. */
#include "client/calls.h"
#include "engine/core/core.h"
#include "kernels/crc32c.h"
#include "os/disk_file.h"
#include "tests/support/deltas.h"
#include "tests/support/engine_main.h"
#include "tests/support/fail_call.h"
#include "tests/support/keepers.h"
#include "tests/support/pair.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/uio.h>

#define BYTES ((uint64_t)256 << 12)
#define LARGE_BYTES ((uint64_t)2048 << 12)
#define BASE_OF(id) (PC_WINDOW_BEGIN + ((uint64_t)(id) << 28))

static int create(pc_client *client, uint64_t id, uint64_t bytes, int *fd)
{
    return pc_client_create(client, id, BASE_OF(id), bytes, PC_MEDIUM_DISK, WAIT, fd);
}

/* A variable on disk, at server 0. */
static struct pc_region_info on_disk_of(const struct pair *p, uint64_t id, uint64_t bytes)
{
    const struct pc_region_info info = {
        .region = id, .base_address = BASE_OF(id), .length_bytes = bytes, .medium = PC_MEDIUM_DISK};
    uint64_t *words = malloc(bytes);
    int fd = -1;
    fill_pattern(words, id, 0, bytes);
    OK(create(p->home, id, bytes, &fd));
    OK(pc_copy_in(fd, 0, words, bytes, 1));
    close(fd);
    free(words);
    OK(pc_client_seal(p->home, id, WAIT));
    publish(p->c, info, p->s0->id);
    return info;
}

static struct pc_region_info on_disk(const struct pair *p, uint64_t id)
{
    return on_disk_of(p, id, BYTES);
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

/* The blocks of a layer, and behind them their sums, if it is on disk. */
static void check_layer(const struct pc__layer *layer, const struct transaction *t)
{
    const uint64_t sums_bytes = layer->n_blocks * sizeof(uint32_t);
    uint64_t words[512], at_byte = layer->data_offset;
    uint32_t *sums = malloc(sums_bytes), sum, *next = sums;
    struct stat st;
    CHECK(sums && layer->bytes == layer_bytes(t) && !fstat(layer->memfd, &st));
    CHECK(layer->on_disk ? (uint64_t)st.st_size >= layer->bytes + sums_bytes
                         : (uint64_t)st.st_size == layer->bytes);
    if (layer->on_disk)
        OK(pc__file_read(layer->memfd, sums, sums_bytes, layer->bytes));
    for (size_t i = 0; i < t->n_runs; i++)
        for (uint64_t k = 0; k < t->runs[i].n_blocks; k++, at_byte += sizeof words) {
            const uint64_t block = t->runs[i].first_block + k;
            OK(pc__file_read(layer->memfd, words, sizeof words, at_byte));
            CHECK(wrong_word(words, t->info.region, t->id, block, pattern) == 512);
            pc_crc32c_blocks(words, 1, &sum);
            CHECK(!layer->on_disk || *next++ == (sum ^ PC__CRC32C_ZERO_BLOCK));
        }
    CHECK(at_byte == layer->bytes);
    free(sums);
}

static void check_staged(struct server *server, const struct transaction *t, bool on_disk)
{
    struct pc__layer *layer = pc__layer_get(server->engine, pc__layer_id(t->info.region, t->id));
    CHECK(layer && layer->on_disk == on_disk && pc__is_memfd(layer->memfd) != on_disk);
    check_layer(layer, t);
    pc__layer_put(layer);
}

static struct transaction written_to(const struct pair *p, const struct pc_region_info *info, uint64_t base,
                                     const struct pc_run *runs, size_t n_runs)
{
    struct transaction t;
    OK(try_begin(p->c, p->s0, p->home, info, base, &t));
    write_runs(&t, runs, n_runs);
    return t;
}

struct stage_call {
    struct transaction *t;
    int rc;
};

static void *stage_run(void *arg)
{
    struct stage_call *call = arg;
    fail_call(SYS_memfd_create, 1, UINT32_MAX, 0, EMFILE);
    call->rc = try_stage(call->t);
    return NULL;
}

/* In a thread that can make no memfd; the server can. */
static int try_stage_in_no_memfd(struct transaction *t)
{
    struct stage_call call = {.t = t};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, stage_run, &call) && !pthread_join(thread, NULL));
    return call.rc;
}

/* The commit goes on from where it is staged. */
static void end_commit(struct transaction *t)
{
    OK(try_pull(t));
    CHECK(decide(t) == t->base + 1);
    tell(t);
    OK(pc_client_unmap(t->client, t->m.id));
}

static const struct pc_run much[] = {{3, 700}, {900, 400}, {1500, 1}, {2047, 1}};

/* A large layer is written to its file by the process that has it, and is never in memory. */
static void test_a_large_commit_is_in_no_memfd(int trap)
{
    const struct pc_run least = {10, 1024}, less = {10, 1023};
    struct pair p = pair_start("disk-large", trap, BYTES);
    const struct pc_region_info info = on_disk_of(&p, 2, LARGE_BYTES);
    struct transaction t = written_to(&p, &info, 0, much, 4);
    const uint64_t memory = memfd_bytes();
    OK(try_stage_in_no_memfd(&t));
    CHECK(memfd_bytes() == memory);
    check_staged(p.s0, &t, true);
    OK(try_stage_in_no_memfd(&t)); /* as after a lost reply */
    CHECK(stats_of(p.s0).layers == 1);
    check_staged(p.s0, &t, true);
    end_commit(&t);
    SOON(stats_of(p.s0).commits_applied == 1 && stats_of(p.s0).layers == 0);
    check_at(p.c, p.home, &info, 1);
    check_at(p.c, p.far, &info, 1);
    t = written_to(&p, &info, 1, &less, 1);
    CHECK(try_stage_in_no_memfd(&t) < 0);
    OK(pc_client_unmap(p.home, t.m.id));
    t = written_to(&p, &info, 1, &least, 1);
    OK(try_stage_in_no_memfd(&t));
    end_commit(&t);
    check_at(p.c, p.far, &info, 2);
    pair_stop(&p);
}

/* The server writes what is less to disk; what is little stays in memory. */
static void test_smaller_layers_are_written_by_the_server(int trap)
{
    const struct pc_run some[] = {{3, 80}, {200, 20}}, least = {5, 63}, little = {5, 62}, most = {0, 1023};
    const struct {
        const struct pc_run *runs;
        size_t n_runs;
        bool on_disk;
    } each[] = {{some, 2, true}, {&least, 1, true}, {&little, 1, false}, {&most, 1, true}};
    struct pair p = pair_start("disk-less", trap, BYTES);
    const struct pc_region_info info = on_disk_of(&p, 2, LARGE_BYTES);
    for (uint64_t version = 0; version < 4; version++) {
        struct transaction t = written_to(&p, &info, version, each[version].runs, each[version].n_runs);
        const uint64_t memory = memfd_bytes();
        OK(try_stage(&t));
        SOON((memfd_bytes() == memory) == each[version].on_disk);
        check_staged(p.s0, &t, each[version].on_disk);
        end_commit(&t);
        check_at(p.c, p.far, &info, version + 1);
    }
    pair_stop(&p);
}

/* Where the home is in memory, or elsewhere, there is no file for a layer; the home's own copy is one. */
static void test_large_layers_of_other_homes(int trap)
{
    struct pair p = pair_start("disk-other", trap, LARGE_BYTES);
    const struct pc_region_info info = on_disk_of(&p, 2, LARGE_BYTES);
    struct transaction t = written_to(&p, &p.info, 0, much, 4);
    OK(try_stage(&t));
    check_staged(p.s0, &t, false);
    end_commit(&t);
    check_at(p.c, p.far, &p.info, 1);
    OK(try_begin(p.c, p.s1, p.far, &info, 0, &t));
    write_runs(&t, much, 4);
    OK(try_stage(&t));
    check_staged(p.s1, &t, false);
    OK(try_pull(&t));
    check_staged(p.s0, &t, true);
    end_commit(&t);
    check_at(p.c, p.far, &info, 1);
    check_at(p.c, p.home, &info, 1);
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

/* Nothing is left of a layer that could not be written; then one can be. */
static void check_refused(struct pair *p, const struct pc_region_info *info, const struct pc_run *runs,
                          size_t n_runs, int (*stage)(struct transaction *t), int error)
{
    const struct pc_run one = {7, 1};
    struct transaction t = written_to(p, info, 0, runs, n_runs);
    (void)stage(&t); /* what it needs once is there */
    const int descriptors = open_descriptors();
    CHECK(stage(&t) == error);
    SOON(open_descriptors() == descriptors);
    CHECK(!pc_engine_has_layer(p->s0->engine, 2, t.id));
    CHECK(stats_of(p->s0).layers == 0 && stats_of(p->s0).commits_staged == 0);
    OK(pc_client_unmap(p->home, t.m.id));
    CHECK(commit(p->c, p->s0, p->home, info, 0, &one, 1) == 1);
    check_at(p->c, p->far, info, 1);
    pair_stop(p);
}

static void test_a_disk_that_has_no_room_for_a_large_layer(int trap)
{
    /* The files of layers alone are no whole blocks. */
    fail_call(SYS_fallocate, 3, PC_BLOCK_BYTES - 1, 1, ENOSPC);
    struct pair p = pair_start("disk-large-full", trap, BYTES);
    const struct pc_region_info info = on_disk_of(&p, 2, LARGE_BYTES);
    check_refused(&p, &info, much, 4, try_stage_in_no_memfd, PC_ERR_NO_SPACE);
}

static void test_a_disk_that_breaks_under_a_large_layer(int trap)
{
    struct pair p = pair_start("disk-large-eio", trap, BYTES);
    const struct pc_region_info info = on_disk_of(&p, 2, LARGE_BYTES);
    fail_call(SYS_pwrite64, 2, UINT32_MAX, 16 * PC_BLOCK_BYTES, EIO); /* of blocks */
    check_refused(&p, &info, much, 4, try_stage_in_no_memfd, PC_ERR_SYSTEM);
}

static void test_a_disk_that_breaks_under_a_layer(int trap)
{
    const struct pc_run halves[] = {{3, 50}, {100, 50}};
    fail_call(SYS_pwrite64, 2, 4 * PC_BLOCK_BYTES, 1, EIO); /* 100 blocks at once; not 50, nor a power of two */
    struct pair p = pair_start("disk-layer-eio", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    check_refused(&p, &info, halves, 2, try_stage, PC_ERR_SYSTEM);
}

/* A file of a layer of 100 blocks with some bytes behind it. */
static int handed(const char *directory, uint64_t commit_id, uint64_t n_behind)
{
    const struct pc_run run = {0, 100};
    uint64_t bytes;
    uint8_t *content = calloc(1, 4 * MIB);
    const int from = layer_file(2, commit_id, 0, &run, 1, &bytes), fd = pc__disk_file_open(directory);
    OK(fd);
    OK(pc__file_read(from, content, bytes, 0));
    OK(pc__disk_file_write(fd, content, bytes + n_behind, 0));
    free(content);
    close(from);
    return fd;
}

/* For this thread alone. False: it may not. */
static bool mount_ramfs(const char *at)
{
    return !unshare(CLONE_NEWNS) && !mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) &&
           !mount("none", at, "ramfs", 0, NULL);
}

/* A process may hand over what it likes: it gets an error. */
static void test_files_that_are_no_layers(int trap)
{
    const struct pc_run run = {0, 100};
    struct pair p = pair_start("disk-files", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    const struct pc__layer_head head = {.magic = PC__LAYER_MAGIC, .region = 2, .commit_id = 77,
                                        .data_offset = 4096, .n_blocks = 100, .n_runs = 1};
    const uint64_t bytes = 101 << 12, zero = 0, room = 101 * sizeof(uint32_t); /* as the server makes it */
    int pipes[2], fds[10], n = 0;
    OK(pipe2(pipes, O_CLOEXEC));
    fds[n++] = pipes[0];
    fds[n++] = open(DISK_DIRECTORY, O_RDONLY | O_CLOEXEC | O_DIRECTORY);
    fds[n++] = open("/dev/zero", O_RDWR | O_CLOEXEC);
    fds[n++] = handed(DISK_DIRECTORY, 77, 0);  /* no sums */
    fds[n++] = handed(DISK_DIRECTORY, 77, 100 * sizeof(uint32_t) - 1);
    fds[n++] = handed(DISK_DIRECTORY, 78, room); /* of another commit */
    fds[n++] = handed(DISK_DIRECTORY, 77, room); /* cut in its blocks, and in its head */
    OK(ftruncate(fds[n - 1], 50 << 12));
    fds[n++] = handed(DISK_DIRECTORY, 77, room);
    OK(ftruncate(fds[n - 1], 10));
    fds[n++] = handed(DISK_DIRECTORY, 77, room); /* no head */
    OK(pc__disk_file_write(fds[n - 1], &zero, sizeof zero, 0));
    const int descriptors = open_descriptors();
    for (int i = 0; i < n; i++) {
        const int rc = pc__layer_hand_over(p.home, fds[i], &head, now_ns() + WAIT, NULL);
        if (rc >= 0)
            fprintf(stderr, "file %d is taken\n", i);
        CHECK(rc < 0 && !pc_engine_has_layer(p.s0->engine, 2, 77));
    }
    for (int is_ramfs = 0; is_ramfs < 2; is_ramfs++) { /* in memory, and not sealed; ramfs has no seals at all */
        if (is_ramfs && !mount_ramfs("/dev/shm"))
            continue;
        const int elsewhere = handed("/dev/shm", 77, room);
        CHECK(pc__is_memfd(elsewhere) == !is_ramfs);
        CHECK(pc__layer_stage(p.s0->engine, 2, 77, bytes, elsewhere, 0) < 0);
    }
    SOON(open_descriptors() == descriptors && stats_of(p.s0).layers == 0);
    for (int i = 0; i < n; i++)
        close(fds[i]);
    close(pipes[1]);
    const int sound = handed(DISK_DIRECTORY, 77, room);
    OK(pc__layer_hand_over(p.home, sound, &head, now_ns() + WAIT, NULL));
    CHECK(pc_engine_has_layer(p.s0->engine, 2, 77));
    OK(pc_engine_drop_staged(p.s0->engine, 2, 77));
    close(sound);
    CHECK(commit(p.c, p.s0, p.home, &info, 0, &run, 1) == 1);
    check_at(p.c, p.far, &info, 1);
    pair_stop(&p);
}

/* Its writer has the file, too: what it does to it later it does to this commit alone. */
static void test_a_layer_that_is_cut_later(int trap)
{
    struct pair p = pair_start("disk-cut", trap, BYTES);
    const struct pc_region_info info = on_disk_of(&p, 2, LARGE_BYTES), other = on_disk(&p, 3);
    struct transaction t = written_to(&p, &info, 0, much, 4);
    struct pc_mapping m;
    OK(try_stage(&t));
    struct pc__layer *layer = pc__layer_get(p.s0->engine, pc__layer_id(2, t.id));
    CHECK(layer && layer->on_disk);
    OK(ftruncate(layer->memfd, 0));
    pc__layer_put(layer);
    end_commit(&t);
    OK(try_map(p.far, &info, 1, 0, &m));
    CHECK(pc_client_prefetch(p.far, m.id, &much[0], 1, 1, WAIT) == PC_ERR_PROTOCOL);
    CHECK(pc_client_prefetch(p.far, m.id, &much[0], 1, 1, WAIT) == PC_ERR_PROTOCOL);
    OK(pc_client_unmap(p.far, m.id));
    check_at(p.c, p.far, &other, 0);
    check_at(p.c, p.far, &p.info, 0);
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

/* Blocks that are not in memory are read in a thread of the disk, and not in a loop. The kernel itself
 * cannot be asked: it begins to read what it drops, and a fast disk may be done before it looks. */
static void test_cold_blocks(int trap)
{
    fail_call(SYS_preadv2, 5, RWF_NOWAIT, 1, EAGAIN);
    struct pair p = pair_start("disk-cold", trap, BYTES);
    const struct pc_region_info info = on_disk(&p, 2);
    struct pc__disk_jobs *jobs = &p.s0->engine->disk_jobs;
    struct pc_mapping m = map_at(p.far, &info, 0, 0);
    for (uint64_t at_byte = 0; at_byte < BYTES; at_byte += BYTES / 16)
        CHECK(at(&m, at_byte) == pattern(2, at_byte));
    pthread_mutex_lock(&jobs->lock);
    CHECK(jobs->n_threads > 0);
    pthread_mutex_unlock(&jobs->lock);
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
                                               TEST(a_large_commit_is_in_no_memfd),
                                               TEST(smaller_layers_are_written_by_the_server),
                                               TEST(large_layers_of_other_homes),
                                               TEST(zeros_around_an_overlay_are_none_of_it),
                                               TEST(without_a_directory),
                                               TEST(a_full_disk),
                                               TEST(a_disk_that_is_too_full_for_a_layer),
                                               TEST(a_disk_that_has_no_room_for_a_large_layer),
                                               TEST(a_disk_that_breaks_under_a_large_layer),
                                               TEST(a_disk_that_breaks_under_a_layer),
                                               TEST(files_that_are_no_layers),
                                               TEST(a_layer_that_is_cut_later),
                                               TEST(a_read_set_misses_nothing),
                                               TEST(a_broken_disk),
                                               TEST(cold_blocks),
                                               TEST(a_disk_that_refuses_later),
                                               TEST(a_restart_over_a_broken_disk)};
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
