/* test_client_stage.c - the client's contract, over each trap: what a private mapping wrote, and
 * handing it to the page server, also when that fails. */
#include "tests/support/client_main.h"

#include "client/client.h"
#include "trap/read_set.c" /* is_wanted() */

#include <dirent.h>
#include <sys/resource.h>

#define COMMIT ((uint64_t)0x123456789abcdef)

static size_t n_open_descriptors(void)
{
    size_t n = 0;
    DIR *fds = opendir("/proc/self/fd");
    while (fds && readdir(fds))
        n++;
    if (fds)
        closedir(fds);
    return n;
}

/* ---------------------------------------------------------------- dirty blocks */

static void check_dirty(pc_client *client, const struct pc_mapping *mapping,
                        const struct pc_run *expected, int64_t n)
{
    static struct pc_run runs[BLOCKS], entries[BLOCKS];
    CHECK(pc_client_dirty(client, mapping->id, runs, BLOCKS) == n, "%ld runs, not %ld",
          (long)pc_client_dirty(client, mapping->id, runs, BLOCKS), (long)n);
    CHECK(n == 0 || memcmp(runs, expected, (size_t)n * sizeof runs[0]) == 0, "in other places");
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    CHECK(pc__read_set_entries(PC__SCAN_COPIED, pagemap, mapping->address, mapping->length_bytes,
                               entries, BLOCKS) == n, "the way for old kernels has another number");
    CHECK(memcmp(entries, runs, (size_t)n * sizeof runs[0]) == 0, "the two ways differ");
    close(pagemap);
}

static void test_dirty(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    struct pc_mapping two = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    struct pc_mapping shared = world_map(world, client, PAGED, 0);
    struct pc_run runs[4];
    check_dirty(client, &one, NULL, 0);
    for (uint64_t block = 0; block < BLOCKS; block += 2)
        CHECK(block_is_right(&one, PAGED, block) && block_is_right(&shared, PAGED, block), "reads");
    check_dirty(client, &one, NULL, 0); /* reads are none */
    store(one.address + 40 * 4096, 7);                      /* resident, read before */
    store(one.address + 41 * 4096 + 8, 7);                  /* resident on the node, not read */
    store(one.address + (BLOCKS - 1) * 4096 + 4088, 7);     /* the last word */
    store(one.address, load(one.address));                  /* the same value is a write too */
    const struct pc_run expected[] = {{0, 1}, {40, 2}, {BLOCKS - 1, 1}};
    check_dirty(client, &one, expected, 3);
    check_dirty(client, &two, NULL, 0);
    CHECK(pc_client_dirty(client, one.id, runs, 1) == 3 && runs[0].first_block == 0, "no room");
    CHECK(pc_client_dirty(client, one.id, NULL, 0) == 3, "no room at all");
    FAILS(pc_client_dirty(client, shared.id, runs, 4), PC_ERR_RANGE, "private");
    FAILS(pc_client_dirty(client, 999, runs, 4), PC_ERR_NO_REGION, "999");
    store(two.address + 300 * 4096, 1); /* absent until now */
    const struct pc_run other = {300, 1};
    check_dirty(client, &two, &other, 1);
    struct pc_mapping whole = world_map(world, client, WHOLE, PC_MAP_PRIVATE);
    CHECK(load(whole.address + 4096) == 0, "a hole");
    check_dirty(client, &whole, NULL, 0);
    store(whole.address + 3 * 4096, 1); /* a hole, written */
    const struct pc_run third = {3, 1};
    check_dirty(client, &whole, &third, 1);
    OK(pc_client_close(client));
}

/* More than the trap's window, and than one scan takes; and what the kernel moved away. */
static void test_dirty_many(struct world *world)
{
    enum { N = PC__WINDOW_RUNS + 500 };
    static struct pc_run runs[N + 1];
    pc_client *client = world_client(world);
    struct pc_mapping big = world_map(world, client, BIG, PC_MAP_PRIVATE);
    for (uint64_t i = 0; i < N; i++)
        store(big.address + i * 3 * 4096, i);
    int64_t n = pc_client_dirty(client, big.id, runs, N + 1);
    CHECK(n == N, "%ld", (long)n);
    for (uint64_t i = 0; i < N; i++)
        CHECK(runs[i].first_block == i * 3 && runs[i].n_blocks == 1, "run %lu", i);
    /* Where there is swap this writes them out, and they are dirty all the same. */
    (void)madvise((void *)(uintptr_t)big.address, (size_t)N * 3 * 4096, MADV_PAGEOUT);
    CHECK(pc_client_dirty(client, big.id, runs, N + 1) == N, "after page-out");
    for (uint64_t i = 0; i < N; i += 100)
        CHECK(load(big.address + i * 3 * 4096) == i, "block %lu", i * 3);
    OK(pc_client_close(client));
}

/* Bits 63, 62 and 61 of an entry of pagemap: present, swapped, the file's. */
static void test_entry_bits(struct world *world)
{
    (void)world;
    const uint64_t present = 1ull << 63, swapped = 1ull << 62, file = 1ull << 61, rest = 0xfffull;
    CHECK(is_wanted(PC__SCAN_COPIED, present | rest), "a copy");
    CHECK(is_wanted(PC__SCAN_COPIED, swapped), "a copy that is swapped out");
    CHECK(!is_wanted(PC__SCAN_COPIED, present | file), "the file's");
    CHECK(!is_wanted(PC__SCAN_COPIED, swapped | file), "the file's, being moved");
    CHECK(!is_wanted(PC__SCAN_COPIED, rest | file) && !is_wanted(PC__SCAN_COPIED, 0), "nothing");
    CHECK(is_wanted(PC__SCAN_MAPPED, present | file) && is_wanted(PC__SCAN_MAPPED, swapped) &&
          !is_wanted(PC__SCAN_MAPPED, file), "a shared mapping's");
}

/* --------------------------------------------------------------------- layers */

static void check_layer(const struct world *world, const struct pc_mapping *mapping,
                        const struct pc_run *runs, size_t n_runs)
{
    const struct fake *fake = world->fake;
    const struct pc__layer_head *head = mmap(NULL, fake->layer_bytes, PROT_READ, MAP_SHARED,
                                             fake->layer_memfd, 0);
    REQUIRE(head != MAP_FAILED);
    CHECK(fake->layer_parsed == PC_OK, "the layer is malformed");
    CHECK(head->region == PAGED || head->region == BIG, "region %lu", head->region);
    CHECK(head->commit_id == COMMIT && head->base_version == ANY && head->n_runs == n_runs, "head");
    CHECK(fake->layer_commit == COMMIT && fake->layer_region == head->region, "message");
    CHECK(memcmp(head + 1, runs, n_runs * sizeof runs[0]) == 0, "runs");
    const char *data = (const char *)head + head->data_offset;
    uint64_t n_wrong = 0;
    for (size_t i = 0; i < n_runs; i++)
        for (uint64_t k = 0; k < runs[i].n_blocks; k++, data += 4096)
            for (uint64_t word = 0; word < 512; word += 73) {
                uint64_t value;
                memcpy(&value, data + word * 8, 8);
                n_wrong += value !=
                           load(mapping->address + (runs[i].first_block + k) * 4096 + word * 8);
            }
    CHECK(n_wrong == 0, "%lu words differ", n_wrong);
    for (const char *at = (const char *)(head + 1) + n_runs * sizeof runs[0];
         at < (const char *)head + head->data_offset; at++)
        CHECK(*at == 0, "not zeros up to the data");
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
    CHECK((fake->layer_seals & seals) == seals, "seals %#x", fake->layer_seals);
    munmap((void *)(uintptr_t)head, fake->layer_bytes);
}

static void test_stage(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    size_t before = n_open_descriptors();
    struct pc_run runs[8];
    store(mapping.address + 7 * 4096 + 16, 70);
    int64_t n = pc_client_dirty(client, mapping.id, runs, 8);
    uint64_t server_id = 0;
    OK(pc_client_stage(client, mapping.id, COMMIT, runs, (size_t)n, 0, 30 * SECOND, &server_id));
    CHECK(server_id == 0x77, "it is at %#lx", server_id);
    CHECK(world->fake->stages == 1 && world->fake->layer_bytes == 2 * 4096, "%lu bytes",
          world->fake->layer_bytes);
    check_layer(world, &mapping, runs, 1);
    for (uint64_t i = 0; i < 5; i++)
        store(mapping.address + (20 + 3 * i) * 4096, i);
    n = pc_client_dirty(client, mapping.id, runs, 8);
    CHECK(n == 6, "%ld", (long)n);
    for (int threads = 0; threads < 3; threads++) { /* the same commit again is no error */
        OK(pc_client_stage(client, mapping.id, COMMIT, runs, (size_t)n, threads, 30 * SECOND, NULL));
        check_layer(world, &mapping, runs, (size_t)n);
    }
    store(mapping.address + 7 * 4096 + 16, 71); /* it stays as it is, and writable */
    CHECK(n_open_descriptors() == before, "%zu descriptors more", n_open_descriptors() - before);
    /* Blocks that were not written, absent and present ones, may be among them. */
    const struct pc_run more[] = {{0, 2}, {1000, 300}, {BLOCKS - 1, 1}};
    OK(pc_client_stage(client, mapping.id, COMMIT, more, 3, 2, 30 * SECOND, NULL));
    check_layer(world, &mapping, more, 3);
    OK(pc_client_close(client));
}

static void test_stage_all(struct world *world)
{
    enum { MOST = 2600 };
    static struct pc_run runs[MOST];
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, BIG, PC_MAP_PRIVATE);
    const struct pc_run all = {0, 9000};
    OK(pc_client_prefetch(client, mapping.id, &all, 1, 1, 20 * 30 * SECOND));
    /* Runs of 1 to 5 blocks, more in sum than goes with one thread, with the heads' end in a block
     * of its own; then one large run. */
    uint64_t at = 0;
    for (uint64_t i = 0; i < MOST; i++, at += runs[i - 1].n_blocks + 1) {
        runs[i] = (struct pc_run){at, 1 + i % 5 / 2};
        for (uint64_t k = 0; k < runs[i].n_blocks; k++)
            store(mapping.address + (at + k) * 4096 + 8 * (i % 512), i + k);
    }
    CHECK(pc_client_dirty(client, mapping.id, runs, MOST) == MOST, "runs");
    for (int threads = 0; threads <= 4; threads += 2) {
        OK(pc_client_stage(client, mapping.id, COMMIT, runs, MOST, threads, 30 * SECOND, NULL));
        check_layer(world, &mapping, runs, MOST);
    }
    for (uint64_t block = 0; block < 9000; block++)
        store(mapping.address + block * 4096, block);
    OK(pc_client_stage(client, mapping.id, COMMIT, &all, 1, 2, 30 * SECOND, NULL));
    check_layer(world, &mapping, &all, 1);
    OK(pc_client_close(client));
}

/* Some blocks of the file are there already, so that one chunk goes by both ways. */
static void test_copy_by_both_ways(struct world *world)
{
    enum { N = 5000 };
    (void)world;
    static struct pc_run runs[N];
    const uint64_t junk[512] = {1, 2, 3};
    char *source = mmap(NULL, (size_t)N * 2 * 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = memfd_create("both", MFD_CLOEXEC);
    REQUIRE(source != MAP_FAILED && ftruncate(fd, ((off_t)N + 1) * 4096) == 0);
    for (uint64_t i = 0; i < N; i++) {
        runs[i] = (struct pc_run){2 * i, 1};
        memcpy(source + 2 * i * 4096 + 40, &i, sizeof i);
        if (i % 7 < 2 || i % 300 == 299)
            REQUIRE(pwrite(fd, junk, 4096, (off_t)(i + 1) * 4096) == 4096);
    }
    for (int threads = 1; threads <= 3; threads += 2) {
        OK(pc__copy_runs(fd, 4096, (uint64_t)(uintptr_t)source, runs, N, threads));
        for (uint64_t i = 0; i < N; i++) {
            uint64_t words[6];
            REQUIRE(pread(fd, words, sizeof words, (off_t)(i + 1) * 4096) == sizeof words);
            CHECK(words[5] == i && words[0] == 0, "block %lu has %lu", i, words[5]);
        }
    }
    munmap(source, (size_t)N * 2 * 4096);
    close(fd);
}

static void test_stage_refusals(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping private = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    struct pc_mapping shared = world_map(world, client, PAGED, 0);
    store(private.address, 1);
    const struct pc_run sound = {0, 1};
    const struct pc_run bad[][2] = {{{0, 0}, {4, 1}}, {{0, 2}, {1, 1}}, {{4, 1}, {0, 1}},
                                    {{0, 1}, {BLOCKS, 1}}, {{0, 1}, {5, BLOCKS}},
                                    {{0, 1}, {5, UINT64_MAX}}, {{4, 1}, {4, 1}}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        FAILS(pc_client_stage(client, private.id, COMMIT, bad[i], 2, 0, 10 * SECOND, NULL), PC_ERR_RANGE,
              "run ");
    FAILS(pc_client_stage(client, private.id, COMMIT, NULL, 0, 0, 10 * SECOND, NULL), PC_ERR_RANGE,
          "0 runs");
    FAILS(pc_client_stage(client, private.id, 0, &sound, 1, 0, 10 * SECOND, NULL), PC_ERR_RANGE,
          "commit 0");
    FAILS(pc_client_stage(client, private.id, COMMIT, &sound, 1, -1, 10 * SECOND, NULL), PC_ERR_RANGE,
          "-1");
    FAILS(pc_client_stage(client, shared.id, COMMIT, &sound, 1, 0, 10 * SECOND, NULL), PC_ERR_RANGE,
          "private");
    FAILS(pc_client_stage(client, 999, COMMIT, &sound, 1, 0, 10 * SECOND, NULL), PC_ERR_NO_REGION,
          "999");
    FAILS(pc_client_resolve(client, 0, 0, PAGED, 1), PC_ERR_RANGE, "commit 0");
    FAILS(pc_client_resolve(client, 0, COMMIT, 0, 1), PC_ERR_RANGE, "variable 0");
    CHECK(world->fake->stages == 0, "the server was asked");
    size_t before = n_open_descriptors();
    world->fake->refuse_stage = PC_ERR_NO_MEMORY;
    FAILS(pc_client_stage(client, private.id, COMMIT, &sound, 1, 0, 10 * SECOND, NULL), PC_ERR_NO_MEMORY,
          "");
    world->fake->refuse_stage = 0;
    world->fake->stall_stage = 1;
    FAILS(pc_client_stage(client, private.id, COMMIT, &sound, 1, 0, 50 * MS, NULL), PC_ERR_TIMEOUT,
          "");
    world->fake->stall_stage = 0;
    CHECK(n_open_descriptors() == before, "a failure keeps a layer");
    OK(pc_client_stage(client, private.id, COMMIT, &sound, 1, 0, 30 * SECOND, NULL));
    check_layer(world, &private, &sound, 1);
    OK(pc_client_close(client));
}

/* No descriptor, no file beyond two blocks, no space: an error, and nothing is left. */
static void test_no_memory(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    store(mapping.address, 1);
    const struct pc_run runs[] = {{0, 1}, {3, 1}};
    size_t before = n_open_descriptors();
    struct rlimit was, none;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &was) == 0);
    int lowest = dup(STDIN_FILENO); /* the next that anybody gets */
    close(lowest);
    none = (struct rlimit){(rlim_t)lowest, was.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    FAILS(pc_client_stage(client, mapping.id, COMMIT, runs, 1, 0, 10 * SECOND, NULL), PC_ERR_DESCRIPTORS,
          "layer");
    REQUIRE(setrlimit(RLIMIT_NOFILE, &was) == 0);
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(getrlimit(RLIMIT_FSIZE, &was) == 0);
    none = (struct rlimit){2 * 4096, was.rlim_max};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &none) == 0);
    CHECK(pc_client_stage(client, mapping.id, COMMIT, runs, 2, 0, SECOND, NULL) < 0, "it fits");
    OK(pc_client_stage(client, mapping.id, COMMIT, runs, 1, 0, 30 * SECOND, NULL));
    REQUIRE(setrlimit(RLIMIT_FSIZE, &was) == 0);
    OK(pc_client_stage(client, mapping.id, COMMIT, runs, 2, 0, 30 * SECOND, NULL));
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    FAILS(pc__copy_runs(full, 4096, mapping.address, runs, 2, 1), PC_ERR_NO_MEMORY, "No space");
    close(full);
    CHECK(n_open_descriptors() == before, "a failure keeps a layer");
    check_layer(world, &mapping, runs, 2);
    OK(pc_client_close(client));
}

static void test_death_in_stage(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    store(mapping.address + 5 * 4096, 55);
    const struct pc_run run = {5, 1};
    world->fake->die_at_stage = 1;
    pid_t pid = fork();
    if (pid == 0) { /* no use of the client in there */
        alarm(20);
        EVENTUALLY(world->fake->die_at_stage == 0);
        usleep(50 * 1000);
        world_start_spare(world);
        _exit(0);
    }
    /* The node has joined again: who answers has the layer, not who was there before. */
    uint64_t server_id = 0;
    world->fake->staged_at = 0x78;
    OK(pc_client_stage(client, mapping.id, COMMIT, &run, 1, 0, 30 * SECOND, &server_id));
    CHECK(server_id == 0x78, "it is at %#lx", server_id);
    CHECK(world->fake->stages == 2, "%d", world->fake->stages);
    check_layer(world, &mapping, &run, 1);
    CHECK(load(mapping.address + 5 * 4096) == 55, "the private copy");
    waitpid(pid, NULL, 0);
    OK(pc_client_close(client));
}

static void test_no_server_to_stage(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    store(mapping.address + 5 * 4096, 55);
    const struct pc_run run = {5, 1};
    world_kill_server(world);
    uint64_t begun = now_ns();
    FAILS(pc_client_stage(client, mapping.id, COMMIT, &run, 1, 0, 200 * MS, NULL), PC_ERR_NO_SERVER,
          "gone");
    CHECK(now_ns() - begun < 5 * SECOND, "%lu ms", (now_ns() - begun) / MS);
    OK(pc_client_resolve(client, 0, COMMIT, PAGED, 0)); /* does not wait; it may get lost */
    world_start_spare(world);
    OK(pc_client_stage(client, mapping.id, COMMIT, &run, 1, 0, 30 * SECOND, NULL));
    check_layer(world, &mapping, &run, 1);
    OK(pc_client_close(client));
}

static void *stage_slowly(void *arg)
{
    pc_client *client = arg;
    static const struct pc_run run = {5, 1};
    return (void *)(intptr_t)pc_client_stage(client, 1, COMMIT, &run, 1, 0, 30 * SECOND, NULL);
}

static void test_close_while_staging(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    pthread_t thread;
    void *rc;
    REQUIRE(mapping.id == 1);
    world->fake->stall_stage = 1;
    REQUIRE(pthread_create(&thread, NULL, stage_slowly, client) == 0);
    EVENTUALLY(world->fake->stages == 1);
    OK(pc_client_unmap(client, mapping.id)); /* its user stays until it is done */
    OK(pc_client_close(client));
    pthread_join(thread, &rc);
    CHECK((intptr_t)rc == PC_ERR_CLOSED, "%ld", (long)(intptr_t)rc);
}

/* ---------------------------------------------------------------- resolution */

static void test_resolve(struct world *world)
{
    enum { N = 5000 };
    pc_client *client = world_client(world);
    OK(pc_client_resolve(client, 0, COMMIT, PAGED, 7));
    EVENTUALLY(world->fake->resolves == 1);
    CHECK(world->fake->resolved_commit == COMMIT && world->fake->resolved_region == PAGED &&
          world->fake->resolved_version == 7, "%lu", world->fake->resolved_version);
    /* A server that does not read: nobody waits, nothing is lost, and the order stays. */
    kill(world->server, SIGSTOP);
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    for (uint64_t i = 1; i <= N; i++)
        OK(pc_client_resolve(client, 0, COMMIT + i, BIG, i));
    getrusage(RUSAGE_THREAD, &after);
    CHECK(after.ru_nvcsw - before.ru_nvcsw < N / 2, "it slept %ld times",
          after.ru_nvcsw - before.ru_nvcsw);
    CHECK(world->fake->resolves == 1, "it reads, and is stopped");
    kill(world->server, SIGCONT);
    EVENTUALLY(world->fake->resolves == 1 + N);
    CHECK(world->fake->resolved_version == N && world->fake->resolved_region == BIG, "the last");
    OK(pc_client_resolve(client, 0, COMMIT, PAGED, 0));
    EVENTUALLY(world->fake->resolves == 2 + N);
    CHECK(world->fake->resolved_version == 0, "refused");
    OK(pc_client_shut(client));
    FAILS(pc_client_resolve(client, 0, COMMIT, PAGED, 1), PC_ERR_CLOSED, "closed");
    OK(pc_client_close(client));
}

/* ---------------------------------------------------------------------- fork */

static struct {
    pc_client *client;
    struct pc_mapping mapping;
} parent;

static void child_commits(struct world *world)
{
    const struct pc_run run = {5, 1};
    struct pc_run runs[4];
    int stages = world->fake->stages;
    for (int attached = 0; attached < 2; attached++) {
        FAILS(pc_client_stage(parent.client, parent.mapping.id, COMMIT, &run, 1, 0, 10 * SECOND, NULL),
              PC_ERR_FORKED, "fork");
        FAILS(pc_client_dirty(parent.client, parent.mapping.id, runs, 4), PC_ERR_FORKED, "fork");
        if (!attached) {
            FAILS(pc_client_resolve(parent.client, 0, COMMIT, PAGED, 1), PC_ERR_FORKED, "fork");
            OK(pc_client_after_fork(parent.client));
        }
    }
    CHECK(world->fake->stages == stages, "the server was asked");
    struct pc_mapping own = world_map(world, parent.client, PAGED, PC_MAP_PRIVATE);
    store(own.address + 5 * 4096, 66);
    CHECK(pc_client_dirty(parent.client, own.id, runs, 4) == 1, "its own");
    OK(pc_client_stage(parent.client, own.id, COMMIT, runs, 1, 0, 30 * SECOND, NULL));
    check_layer(world, &own, runs, 1);
    OK(pc_client_close(parent.client));
}

static void test_fork(struct world *world)
{
#if defined(__SANITIZE_THREAD__)
    printf("skip fork: not under TSan\n");
    return; /* it does not know children of processes with threads */
#endif
    parent.client = world_client(world);
    parent.mapping = world_map(world, parent.client, PAGED, PC_MAP_PRIVATE);
    store(parent.mapping.address + 5 * 4096, 55);
    expect_end(world, child_commits, 0, "");
    const struct pc_run run = {5, 1};
    OK(pc_client_stage(parent.client, parent.mapping.id, COMMIT, &run, 1, 0, 30 * SECOND, NULL));
    check_layer(world, &parent.mapping, &run, 1);
    OK(pc_client_close(parent.client));
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(dirty), TEST(dirty_many), TEST(entry_bits), TEST(stage), TEST(stage_all),
        TEST(copy_by_both_ways),
        TEST(stage_refusals), TEST(no_memory), TEST(death_in_stage), TEST(no_server_to_stage),
        TEST(close_while_staging), TEST(resolve), TEST(fork),
    };
    return run_tests(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
}
