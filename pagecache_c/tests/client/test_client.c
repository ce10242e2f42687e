/* test_client.c - the client's contract, over each trap: what a program sees of mapped regions
 * while the server is well. test_client_failure.c has what it sees when it is not. */
#include "tests/support/client_world.h"
#include "tests/support/length.h"

#include "trap/read_set.h"

#include <dirent.h>
#include <setjmp.h>

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

/* Of this thread: a busy machine takes none of it. */
static uint64_t cpu_ns(void)
{
    struct timespec now;
    REQUIRE(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

static void test_reads(struct world *world)
{
    pc_client *client = world_client(world);
    int kind = pc_client_trap(client);
    CHECK(kind == world->trap || world->trap == PC_TRAP_UFFD, "trap %d", kind);
    size_t before = n_open_descriptors();
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(mapping.address == BASE && mapping.length_bytes == LENGTH, "%#lx", mapping.address);
    CHECK(n_open_descriptors() == before, "a mapping keeps a descriptor");
    uint64_t at = 1;
    for (uint64_t i = 0; i < BLOCKS; i++) {
        at = (at * 1103515245 + 12345) % BLOCKS; /* some order */
        CHECK(block_is_right(&mapping, PAGED, at), "block %lu", at);
    }
    for (uint64_t i = 0; i < BLOCKS; i++)
        CHECK(block_is_right(&mapping, PAGED, i), "block %lu", i);
    CHECK(world->fake->faults >= 1, "no fault came");
    /* Spans and neighbours: the whole pages around, not one block at a time. */
    CHECK(world->fake->faults <= (int)(BLOCKS / 16), "%d faults", world->fake->faults);
    OK(pc_client_unmap(client, mapping.id));
    EVENTUALLY(world->fake->live_mappings == 0);
    FAILS(pc_client_unmap(client, mapping.id), PC_ERR_NO_REGION, "no mapping");
    OK(pc_client_close(client));
}

static void test_node_hits(struct world *world)
{
    for (uint64_t block = 0; block < BLOCKS; block++)
        fake_fill(&world->fake->regions[0], block);
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block_is_right(&mapping, PAGED, block), "block %lu", block);
    CHECK(world->fake->faults == 0, "%d faults on present blocks", world->fake->faults);
    OK(pc_client_close(client));
}

struct reader {
    pthread_t thread;
    const struct pc_mapping *mapping;
    uint64_t seed, n, wrong;
};

static void *read_some(void *arg)
{
    struct reader *reader = arg;
    uint64_t at = reader->seed;
    for (uint64_t i = 0; i < reader->n; i++) {
        at = (at * 6364136223846793005ull + 1442695040888963407ull);
        reader->wrong += !block_is_right(reader->mapping, PAGED, (at >> 33) % BLOCKS);
    }
    return NULL;
}

static void read_with(const struct pc_mapping *mapping, size_t n_threads, uint64_t n_each,
                      bool same)
{
    static struct reader readers[128];
    for (size_t i = 0; i < n_threads; i++) {
        readers[i] = (struct reader){.mapping = mapping, .seed = same ? 1 : i, .n = n_each};
        REQUIRE(pthread_create(&readers[i].thread, NULL, read_some, &readers[i]) == 0);
    }
    for (size_t i = 0; i < n_threads; i++) {
        pthread_join(readers[i].thread, NULL);
        CHECK(readers[i].wrong == 0, "thread %zu read %lu wrong blocks", i, readers[i].wrong);
    }
}

static void test_threads(struct world *world)
{
    world->fake->regions[0].page_blocks = 1;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    read_with(&mapping, 8, 300, false);
    OK(pc_client_unmap(client, mapping.id));
    mapping = world_map(world, client, PAGED, PC_MAP_EXACT_READS);
    read_with(&mapping, 8, 300, true);
    read_with(&mapping, 100, 20, false); /* more than there are slots */
    OK(pc_client_close(client));
}

static void test_nothing_absent(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, WHOLE, 0);
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block % 2 ? load(mapping.address + block * 4096) == 0
                        : block_is_right(&mapping, WHOLE, block), "block %lu", block);
    const struct pc_run all = {0, BLOCKS};
    OK(pc_client_prefetch(client, mapping.id, &all, 1, 1, 30 * SECOND));
    CHECK(world->fake->faults == 0 && world->fake->prefetches == 0, "the server was asked");
    OK(pc_client_close(client));
}

static void test_prefetch(struct world *world)
{
    enum { N = 5000, STEP = 100 };
    static struct pc_run runs[N];
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, BIG, 0);
    for (uint64_t i = 0; i < N; i++)
        runs[i] = (struct pc_run){i * STEP, 1 + i % 2};
    OK(pc_client_prefetch(client, mapping.id, runs, N, 1, 20 * 30 * SECOND));
    CHECK(world->fake->prefetches == 3 && world->fake->prefetched_runs == N, "%d messages, %d runs",
          world->fake->prefetches, world->fake->prefetched_runs);
    for (uint64_t i = 0; i < N; i++)
        CHECK(block_is_right(&mapping, BIG, i * STEP + i % 2), "run %lu", i);
    CHECK(world->fake->faults == 0, "%d faults after a prefetch", world->fake->faults);
    const struct pc_run more = {BIG_MIDDLE, 4};
    OK(pc_client_prefetch(client, mapping.id, &more, 1, 0, 30 * SECOND));
    CHECK(block_is_right(&mapping, BIG, more.first_block), "after a prefetch without wait");
    OK(pc_client_prefetch(client, mapping.id, NULL, 0, 1, 30 * SECOND));
    const struct pc_run bad[] = {{0, 0}, {BIG_LENGTH >> 12, 1}, {1, BIG_LENGTH >> 12}, {5, UINT64_MAX}};
    for (size_t i = 0; i < 4; i++)
        FAILS(pc_client_prefetch(client, mapping.id, &bad[i], 1, 1, 10 * SECOND), PC_ERR_RANGE, "run 0");
    FAILS(pc_client_prefetch(client, 999, &more, 1, 1, 10 * SECOND), PC_ERR_NO_REGION, "999");
    OK(pc_client_close(client));
}

static bool has_block(const struct pc_run *runs, int64_t n, uint64_t block)
{
    for (int64_t i = 0; i < n; i++)
        if (block >= runs[i].first_block && block - runs[i].first_block < runs[i].n_blocks)
            return true;
    return false;
}

static void test_read_sets(struct world *world)
{
    enum { STEP = 37, MOST = BLOCKS };
    static struct pc_run runs[MOST], again[MOST];
    pc_client *client = world_client(world);
    for (int exact = 0; exact < 2; exact++) {
        struct pc_mapping mapping = world_map(world, client, PAGED,
                                              exact ? PC_MAP_EXACT_READS : 0);
        const struct pc_run all = {0, BLOCKS};
        OK(pc_client_prefetch(client, mapping.id, &all, 1, 1, 30 * SECOND));
        for (uint64_t block = 0; block < BLOCKS; block++)
            CHECK(block_is_right(&mapping, PAGED, block), "block %lu", block);
        for (int round = 0; round < 2; round++) {
            OK(pc_client_reads_begin(client, mapping.id));
            CHECK(pc_client_reads_end(client, mapping.id, runs, MOST) == 0, "not empty at first");
            uint64_t n_touched = 0;
            for (uint64_t block = 5; block < BLOCKS; block += STEP, n_touched++)
                CHECK(block_is_right(&mapping, PAGED, block), "block %lu", block);
            int64_t n = pc_client_reads_end(client, mapping.id, runs, MOST);
            OK(n);
            uint64_t n_blocks = 0, at = 5;
            for (int64_t i = 0; i < n; i++) {
                n_blocks += runs[i].n_blocks;
                while (at < BLOCKS && at >= runs[i].first_block &&
                       at < runs[i].first_block + runs[i].n_blocks)
                    at += STEP;
            }
            CHECK(at >= BLOCKS, "block %lu was touched and is not in the set", at);
            CHECK(!exact || n_blocks == n_touched, "%lu blocks, %lu touched", n_blocks, n_touched);
            CHECK(n_blocks >= n_touched, "%lu blocks, %lu touched", n_blocks, n_touched);
            /* Too little room; and the way for old kernels. */
            CHECK(pc_client_reads_end(client, mapping.id, again, 1) == n, "another number");
            CHECK(n == 0 || memcmp(&again[0], &runs[0], sizeof runs[0]) == 0, "another first run");
            int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
            CHECK(pc__read_set_entries(PC__SCAN_MAPPED, pagemap, mapping.address, LENGTH, again,
                                       MOST) == n,
                  "entries and scan differ");
            CHECK(memcmp(again, runs, (size_t)n * sizeof runs[0]) == 0, "in their runs");
            close(pagemap);
            OK(pc_client_report_reads(client, mapping.id, runs, (size_t)n));
        }
        OK(pc_client_unmap(client, mapping.id));
    }
    EVENTUALLY(world->fake->reports == 4);
    struct pc_mapping big = world_map(world, client, BIG, PC_MAP_EXACT_READS);
    OK(pc_client_reads_begin(client, big.id));
    CHECK(block_is_right(&big, BIG, BIG_MIDDLE), "the middle");
    uint64_t begun = cpu_ns();
    CHECK(pc_client_reads_end(client, big.id, runs, MOST) == 1 &&
          runs[0].first_block == BIG_MIDDLE && runs[0].n_blocks == 1, "%lu", runs[0].first_block);
    CHECK(cpu_ns() - begun < SECOND, "scanning it took %lu ms", (cpu_ns() - begun) / MS);
    int64_t n;
    struct pc_mapping private = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    /* A private one's entries are its data, and stay: what was touched since it was mapped. */
    CHECK(block_is_right(&private, PAGED, 100), "block 100");
    OK(pc_client_reads_begin(client, private.id));
    CHECK(block_is_right(&private, PAGED, 300), "block 300");
    store(private.address + 500 * 4096, 7);
    n = pc_client_reads_end(client, private.id, runs, MOST);
    CHECK(has_block(runs, n, 100) && has_block(runs, n, 300) && has_block(runs, n, 500),
          "a block is missing");
    CHECK(load(private.address + 500 * 4096) == 7, "what was written is gone");
    OK(pc_client_close(client));
}

/* Two calls of one process whose read sets overlap in time: neither misses what it touched. */
static void test_overlapping_read_sets(struct world *world)
{
    static struct pc_run runs[BLOCKS];
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, PC_MAP_EXACT_READS);
    struct pc_mapping two = world_map(world, client, PAGED, PC_MAP_EXACT_READS);
    CHECK(one.id == two.id, "not shared");
    OK(pc_client_reads_begin(client, one.id));
    CHECK(block_is_right(&one, PAGED, 100), "block 100");
    OK(pc_client_reads_begin(client, two.id));
    CHECK(block_is_right(&two, PAGED, 1000), "block 1000");
    int64_t n = pc_client_reads_end(client, one.id, runs, BLOCKS);
    CHECK(has_block(runs, n, 100), "the first one's block is gone");
    OK(pc_client_reads_begin(client, one.id)); /* the second still runs */
    CHECK(pc_client_reads_end(client, two.id, runs, 1) > 1, "more room was needed");
    n = pc_client_reads_end(client, two.id, runs, BLOCKS);
    CHECK(has_block(runs, n, 1000), "the second one's block is gone");
    OK(pc_client_reads_end(client, one.id, NULL, 0));
    /* All have ended, one of them without a look: the next one starts with nothing. */
    OK(pc_client_reads_begin(client, one.id));
    CHECK(pc_client_reads_end(client, one.id, runs, BLOCKS) == 0, "not empty");
    OK(pc_client_close(client));
}

static void test_private(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping shared = world_map(world, client, PAGED, 0);
    struct pc_mapping one = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    struct pc_mapping two = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    CHECK(one.id != two.id && one.address != two.address && one.address != BASE &&
              two.address != BASE, "shared");
    store(one.address + 40 * 4096, 7); /* an absent block, written first */
    CHECK(load(one.address + 40 * 4096) == 7, "what was written");
    CHECK(load(one.address + 40 * 4096 + 8) == pattern(PAGED, 40 * 512 + 1), "beside it");
    CHECK(block_is_right(&two, PAGED, 40) && block_is_right(&shared, PAGED, 40), "another's write");
    CHECK(block_is_right(&one, PAGED, 900), "read first");
    store(one.address + 900 * 4096, 9);
    CHECK(load(one.address + 900 * 4096) == 9, "then written");
    store(two.address + 900 * 4096, 11);
    CHECK(load(one.address + 900 * 4096) == 9 && block_is_right(&shared, PAGED, 900), "apart");
    uint64_t word;
    REQUIRE(pread(world->fake->regions[0].memfd, &word, 8, 900 * 4096) == 8);
    CHECK(word == pattern(PAGED, 900 * 512), "a private write reached the generation");
    struct pc_mapping whole = world_map(world, client, WHOLE, PC_MAP_PRIVATE);
    store(whole.address + 8, 3);
    CHECK(load(whole.address + 8) == 3 && load(whole.address) == pattern(WHOLE, 0), "whole");
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block == 40 || block == 900 || block_is_right(&one, PAGED, block), "block %lu", block);
    OK(pc_client_unmap(client, one.id));
    CHECK(load(two.address + 900 * 4096) == 11, "unmapping one hurt two");
    OK(pc_client_close(client));
}

static void test_counts(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, 0);
    struct pc_mapping two = world_map(world, client, PAGED, 0), other;
    CHECK(one.id == two.id && world->fake->opens == 1, "%d opens", world->fake->opens);
    FAILS(pc_client_map(client, PAGED, ANY, BASE, LENGTH / 2, 0, 10 * SECOND, &other), PC_ERR_EXISTS,
          "bytes were asked for");
    OK(try_map(world, client, PAGED, PC_MAP_EXACT_READS, 30 * SECOND, &other));
    CHECK(other.id == one.id && world->fake->opens == 1, "coarse serves exact: a superset");
    OK(pc_client_unmap(client, other.id));
    OK(pc_client_unmap(client, one.id));
    CHECK(block_is_right(&two, PAGED, 3) && world->fake->closes == 0, "closed too early");
    OK(pc_client_unmap(client, two.id));
    EVENTUALLY(world->fake->closes == 1);
    one = world_map(world, client, PAGED, PC_MAP_EXACT_READS);
    two = world_map(world, client, PAGED, 0); /* exact serves it */
    CHECK(one.id == two.id && block_is_right(&two, PAGED, 1000), "exact serves coarse");
    FAILS(pc_client_map(client, 77, ANY, BASE + (8ull << 30), LENGTH, 0, 10 * SECOND, &other),
          PC_ERR_NO_REGION, "variable");
    FAILS(pc_client_map(client, PAGED, ANY, 0x1000, LENGTH, 0, 10 * SECOND, &other), PC_ERR_RANGE, "");
    FAILS(pc_client_map(client, PAGED, ANY, BASE, LENGTH + 1, 0, 10 * SECOND, &other), PC_ERR_RANGE, "");
    FAILS(pc_client_map(client, PAGED, ANY, BASE, 0, 0, 10 * SECOND, &other), PC_ERR_RANGE, "");
    FAILS(pc_client_map(client, PAGED, ANY, BASE, LENGTH, 64, 10 * SECOND, &other), PC_ERR_RANGE, "");
    OK(pc_client_close(client));
    EVENTUALLY(world->fake->live_mappings == 0);
}

static void test_clash(struct world *world)
{
    void *at = (void *)(uintptr_t)(BASE + 4096);
    void *there = mmap(at, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    REQUIRE(there == at);
    char theirs[64], ours[64];
    snprintf(theirs, sizeof theirs, "%lx-%lx", BASE + 4096, BASE + 4096 + 8192);
    snprintf(ours, sizeof ours, "%#lx-%#lx", BASE, BASE + LENGTH);
    pc_client *client = world_client(world);
    struct pc_mapping mapping;
    FAILS(try_map(world, client, PAGED, 0, 10 * SECOND, &mapping), PC_ERR_CLASH, theirs);
    CHECK(strstr(pc_last_message(), ours), "%s", pc_last_message());
    EVENTUALLY(world->fake->live_mappings == 0);
    munmap(there, 8192);
    mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 1), "after the clash");
    OK(pc_client_close(client));
}

static void test_many(struct world *world)
{
    enum { MOST = 2000 };
    static struct pc_mapping mappings[MOST];
    const size_t n = rounds_of(500, MOST);
    pc_client *client = world_client(world);
    size_t before = n_open_descriptors();
    for (size_t i = 0; i < n; i++) {
        mappings[i] = world_map(world, client, PAGED, PC_MAP_PRIVATE);
        store(mappings[i].address + i % BLOCKS * 4096, i);
    }
    CHECK(n_open_descriptors() == before, "%zu descriptors more", n_open_descriptors() - before);
    for (size_t i = 0; i < n; i += 2)
        OK(pc_client_unmap(client, mappings[i].id));
    for (size_t i = 1; i < n; i += 2) {
        CHECK(load(mappings[i].address + i % BLOCKS * 4096) == i, "mapping %zu", i);
        CHECK(block_is_right(&mappings[i], PAGED, (i + 1) % BLOCKS), "mapping %zu", i);
    }
    EVENTUALLY(world->fake->live_mappings == (int)n / 2);
    OK(pc_client_close(client));
    EVENTUALLY(world->fake->live_mappings == 0);
}

/* More scattered blocks than the SIGSEGV trap keeps open: the oldest go and come back. */
static void test_window_turns_over(struct world *world)
{
    enum { N = PC__WINDOW_RUNS + 1500, STEP = 3 };
    pc_client *client = world_client(world);
    /* What comes to lie where a mapping was must not be protected by what the window named. */
    struct pc_mapping private = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    for (uint64_t block = 0; block < BLOCKS; block += 100)
        CHECK(block_is_right(&private, PAGED, block), "block %lu", block);
    OK(pc_client_unmap(client, private.id));
    int faults_before = world->fake->faults;
    void *foreign = mmap((void *)(uintptr_t)private.address, LENGTH, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    REQUIRE(foreign == (void *)(uintptr_t)private.address);
    struct pc_mapping mapping = world_map(world, client, BIG, PC_MAP_EXACT_READS);
    for (int round = 0; round < 2; round++)
        for (uint64_t i = 0; i < N; i++)
            CHECK(block_is_right(&mapping, BIG, i * STEP), "round %d, block %lu", round, i * STEP);
    CHECK(world->fake->faults - faults_before == N, "%d faults that the server saw",
          world->fake->faults - faults_before);
    for (uint64_t block = 0; block < BLOCKS; block++)
        store(private.address + block * 4096, block);
    size_t n_lines = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    for (int c; maps && (c = fgetc(maps)) != EOF;)
        n_lines += c == '\n';
    CHECK(n_lines < 2 * PC__WINDOW_RUNS + 500, "%zu mappings", n_lines);
    if (maps)
        fclose(maps);
    OK(pc_client_unmap(client, mapping.id));
    mapping = world_map(world, client, BIG, 0);
    for (uint64_t i = 0; i < 64; i++)
        CHECK(block_is_right(&mapping, BIG, i * STEP), "mapped anew, block %lu", i * STEP);
    OK(pc_client_close(client));
}

static void *map_and_unmap(void *arg)
{
    struct {
        struct world *world;
        pc_client *client;
    } *both = arg;
    for (uint64_t i = 0; i < 150; i++) {
        struct pc_mapping mapping = world_map(both->world, both->client, PAGED,
                                              i % 3 == 0 ? PC_MAP_PRIVATE : 0);
        CHECK(block_is_right(&mapping, PAGED, i * 13 % BLOCKS), "block %lu", i * 13 % BLOCKS);
        OK(pc_client_unmap(both->client, mapping.id));
    }
    return NULL;
}

static void test_map_from_threads(struct world *world)
{
    struct {
        struct world *world;
        pc_client *client;
    } both = {world, world_client(world)};
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, map_and_unmap, &both) == 0);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    EVENTUALLY(world->fake->live_mappings == 0);
    OK(pc_client_close(both.client));
}

static void test_system_calls(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    int fd = memfd_create("sink", MFD_CLOEXEC);
    ssize_t n = syscall(SYS_write, fd, mapping.address + 50 * 4096, 4096);
    if (pc_client_trap(client) == PC_TRAP_UFFD_FULL) {
        CHECK(n == 4096, "%zd", n);
    } else {
        CHECK(n == -1 && errno == EFAULT, "%zd, errno %d", n, errno);
        const struct pc_run run = {50, 1};
        OK(pc_client_prefetch(client, mapping.id, &run, 1, 1, 30 * SECOND));
        n = syscall(SYS_write, fd, mapping.address + 50 * 4096, 4096);
        CHECK(n == 4096, "after a prefetch: %zd", n);
    }
    close(fd);
    OK(pc_client_close(client));
}

static void test_make_home(struct world *world)
{
    enum { N = (5 << 20) + 123 };
    pc_client *client = world_client(world);
    char *source = malloc(N), *back = malloc(N);
    int fd;
    for (size_t i = 0; i < N; i++)
        source[i] = (char)(i * 31 >> 3);
    FAILS(pc_client_create(client, 99, BASE, LENGTH, PC_MEDIUM_MEMORY, SECOND, &fd), PC_ERR_NO_REGION, "");
    OK(pc_client_create(client, MADE, BASE + (2ull << 30), LENGTH, PC_MEDIUM_MEMORY, 30 * SECOND, &fd));
    for (int threads = 0; threads < 4; threads++) {
        memset(back, 0, N);
        OK(pc_copy_in(fd, 777, source, N, threads));
        CHECK(pread(fd, back, N, 777) == N && memcmp(back, source, N) == 0, "%d", threads);
    }
    OK(pc_copy_in(fd, 0, source, 0, 4));
    OK(pc_client_seal(client, MADE, 30 * SECOND));
    CHECK(world->fake->made_state == FAKE_SEALED, "not sealed");
    OK(pc_client_abandon(client, MADE, 30 * SECOND));
    close(fd);
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    FAILS(pc_copy_in(full, 0, source, N, 2), PC_ERR_NO_MEMORY, "No space");
    close(full);
    FAILS(pc_copy_in(-1, 0, source, N, 2), PC_ERR_SYSTEM, "Bad file");
    free(source);
    free(back);
    OK(pc_client_close(client));
}

/* --------------------------------------------------- faults that are not ours */

static sigjmp_buf jump;
static volatile sig_atomic_t n_caught;

static void catch(int signal_number, siginfo_t *info, void *context)
{
    (void)signal_number;
    (void)info;
    (void)context;
    n_caught++;
    siglongjmp(jump, 1);
}

static void install_catch(void)
{
    struct sigaction action = {.sa_sigaction = catch, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
}

/* Under no sanitizer: nothing between the fault and the jump may hold its locks. */
static RAW bool faults(uint64_t address)
{
    if (sigsetjmp(jump, 1) == 0) {
        store(address, 1);
        return false;
    }
    return true;
}

static void test_foreign_faults(struct world *world)
{
    void *foreign = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    install_catch();
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    for (int i = 0; i < 200; i++)
        CHECK(faults((uint64_t)(uintptr_t)foreign), "a foreign fault went astray");
    for (int i = 0; i < 20; i++)
        CHECK(faults(mapping.address + 4096 * 300), "a write to an absent block");
    CHECK(block_is_right(&mapping, PAGED, 7), "block 7");
    CHECK(faults(mapping.address + 4096 * 7), "a write to a present block");
    CHECK(n_caught == 221, "%d", n_caught);
    CHECK(block_is_right(&mapping, PAGED, 7) && block_is_right(&mapping, PAGED, 300), "after them");
    OK(pc_client_unmap(client, mapping.id));
    /* Somebody else installs a handler; ours is put back over it, and theirs hears of the rest. */
    install_catch();
    mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 500), "with another's handler installed");
    CHECK(faults((uint64_t)(uintptr_t)foreign) && n_caught == 222, "%d", n_caught);
    OK(pc_client_close(client));
}

static void write_to_read_only(struct world *world)
{
    signal(SIGSEGV, SIG_DFL);
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    store(mapping.address, 1);
}

static void touch_what_is_not_there(struct world *world)
{
    pc_client *client = world_client(world);
    CHECK(client, "a client");
    load(PC_WINDOW_END - 4096);
}

static void touch_what_was_unmapped(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    OK(pc_client_unmap(client, mapping.id));
    load(mapping.address + 4096 * 9);
}

static void test_ends(struct world *world)
{
    expect_end(world, write_to_read_only, -SIGSEGV, "");
    expect_end(world, touch_what_is_not_there, 70, "not mapped in this process");
    expect_end(world, touch_what_was_unmapped, 70, "variable 1 version 5 block 9");
}

/* --------------------------------------------------------------------- main */

static void test_errors(struct world *world)
{
    (void)world;
    for (int err = PC_ERR_LAST - 2; err < 4; err++)
        CHECK(pc_strerror(err) && pc_strerror(err)[0], "%d", err);
    CHECK(strcmp(pc_strerror(PC_ERR_CLASH), pc_strerror(PC_ERR_RANGE)) != 0, "the same text");
    CHECK(pc_last_message() != NULL, "NULL");
}

#include "tests/support/client_main.h"

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(reads), TEST(node_hits), TEST(threads), TEST(nothing_absent), TEST(prefetch),
        TEST(read_sets), TEST(overlapping_read_sets), TEST(private), TEST(counts), TEST(clash), TEST(many),
        TEST(window_turns_over), TEST(map_from_threads), TEST(system_calls), TEST(make_home),
        TEST(foreign_faults), TEST(ends), TEST(errors),
    };
    return run_tests(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
}
