/* test_history.c - what the history keeps, drops and says, within its budgets; restarts in between.
 */
#include "tests/support/fail_call.h"
#include "tests/support/history_world.h"

#include <dirent.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>

static char directory[64]; /* below build/ */
static struct kept_segments kept;

static size_t count_names(const char *path)
{
    DIR *dir = opendir(path);
    REQUIRE(dir != NULL);
    size_t n = 0;
    for (const struct dirent *entry; (entry = readdir(dir));)
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

/* ------------------------------------------------------------ semantics */

static int refuse_after_one(void *arg, uint64_t block, uint64_t n, uint8_t *out)
{
    int *n_calls = arg;
    memset(out, 0xee, n * BLOCK);
    (void)block;
    return ++*n_calls > 1 ? -4242 : 0;
}

static void test_floors(void)
{
    struct pc__history_options options = options_for(&kept, MIB, 0, NULL);
    struct pc__history *history = open_history(&options);
    uint64_t block;
    uint8_t bytes[PC_BLOCK_BYTES];

    CHECK(pc__history_floor(history, 1, 0) == 0, "of nothing");
    CHECK(pc__history_floor(history, 1, 5) == 5, "no record: nothing older than the base");
    CHECK(pc__history_read(history, 1, 5, 5, 0, bytes) == 0, "the base's own version");
    CHECK(pc__history_read(history, 1, 4, 5, 0, bytes) == PC_ERR_EXPIRED, "no record 4");
    CHECK(pc__history_next(history, 1, 4, 5, 0, 9, &block) == PC_ERR_EXPIRED, "no record 4");

    for (uint64_t v = 0; v < 6; v++)
        CHECK(append_pure(history, 1, v) == PC_OK, "%s", pc_last_message());
    CHECK(pc__history_has(history, 1, 0) && pc__history_has(history, 1, 5) &&
          !pc__history_has(history, 1, 6), "0 to 5");
    check_region(history, 1, 6);
    CHECK(pc__history_floor(history, 1, 6) == 0, "all of them");
    CHECK(pc__history_floor(history, 1, 7) == 7, "record 6 is not there");
    CHECK(pc__history_read(history, 1, 2, 7, 0, bytes) == PC_ERR_EXPIRED, "record 6 is not there");
    CHECK(append_pure(history, 1, 3) == PC_OK && stats_of(history).records == 6, "it is there");

    CHECK(pc__history_skip(history, 1, 6) == PC_OK, "%s", pc_last_message());
    CHECK(!pc__history_has(history, 1, 6) && !pc__history_has(history, 1, 5), "useless now");
    CHECK(pc__history_floor(history, 1, 7) == 7, "only the base");
    CHECK(append_pure(history, 1, 6) == PC_OK && !pc__history_has(history, 1, 6),
          "the base may be half of version 7: a skip stays one");
    CHECK(append_pure(history, 1, 7) == PC_OK, "%s", pc_last_message());
    CHECK(pc__history_floor(history, 1, 8) == 7, "from the skip on");
    check_region(history, 1, 8);
    CHECK(append_pure(history, 1, 20) == PC_OK, "%s", pc_last_message());
    CHECK(pc__history_floor(history, 1, 21) == 20, "a gap is the same as a skip");
    CHECK(pc__history_floor(history, 1, 9) == 9, "nothing below the gap");
    CHECK(stats_of(history).skipped == 1 && stats_of(history).expired == 8,
          "records 0 to 5, the skip, 7: %lu", stats_of(history).expired);

    /* Restarted, it is as it was. */
    pc__history_close(history);
    history = reopen_history(&options, &kept, 1);
    CHECK(pc__history_floor(history, 1, 21) == 20 && stats_of(history).records == 1, "%lu",
          stats_of(history).records);
    check_region(history, 1, 21);
    uint64_t regions[2];
    CHECK(pc__history_regions(history, regions, 2) == 1 && regions[0] == 1, "region 1");
    CHECK(pc__history_skip(history, 1, 21) == PC_OK, "%s", pc_last_message());
    pc__history_close(history);
    history = reopen_history(&options, &kept, 2);
    CHECK(append_pure(history, 1, 21) == PC_OK && pc__history_floor(history, 1, 22) == 22,
          "a skip outlives the process");

    /* Bad runs, and a read that fails: nothing of them is there. */
    const struct pc_run overlap[2] = {{3, 4}, {6, 1}}, empty[1] = {{3, 0}},
                        far[1] = {{1, 1ull << 60}};
    struct pure_home home = {.region = 2};
    CHECK(pc__history_append(history, 2, 0, overlap, 2, read_pure, &home) == PC_ERR_RANGE, "order");
    CHECK(pc__history_append(history, 2, 0, empty, 1, read_pure, &home) == PC_ERR_RANGE, "empty");
    CHECK(pc__history_append(history, 2, 0, far, 1, read_pure, &home) == PC_ERR_RANGE, "far");
    const struct pc_run two[2] = {{3, 1}, {5, 9}};
    int n_calls = 0;
    CHECK(pc__history_append(history, 2, 0, two, 2, refuse_after_one, &n_calls) == -4242, "read's");
    CHECK(!pc__history_has(history, 2, 0), "it failed");
    uint8_t left[PC_BLOCK_BYTES];
    REQUIRE(pread(kept.all[kept.n - 1].fd, left, BLOCK, 0) == (ssize_t)BLOCK);
    size_t n_zeros = 0; /* behind the head of the segment and the skip: the runs are wiped */
    for (size_t i = 32 + 48; i < BLOCK; i++)
        n_zeros += left[i] == 0;
    CHECK(n_zeros == BLOCK - 32 - 48, "%zu bytes of the failed record are left",
          BLOCK - 80 - n_zeros);
    for (uint64_t v = 0; v < 4; v++)
        CHECK(append_pure(history, 2, v) == PC_OK, "%s", pc_last_message());
    check_region(history, 2, 4);
    pc__history_close(history);
    history = reopen_history(&options, &kept, 3);
    CHECK(pc__history_floor(history, 2, 4) == 0, "%lu", pc__history_floor(history, 2, 4));
    check_region(history, 2, 4);

    pc__history_forget(history, 1);
    pc__history_forget(history, 2);
    pc__history_forget(history, 3);
    CHECK(stats_of(history).records == 0 && stats_of(history).segments == 0 && kept.n == 0 &&
          stats_of(history).memory_bytes == 0, "dead segments go at once: %zu", kept.n);
    pc__history_close(history);
}

static void test_next(void)
{
    struct pc__history_options options = options_for(&kept, 16 * MIB, 0, NULL);
    struct pc__history *history = open_history(&options);
    enum { N = 40 };
    for (uint64_t v = 0; v < N; v++)
        CHECK(append_pure(history, 9, v) == PC_OK, "%s", pc_last_message());
    for (uint64_t seed = 0; seed < 20000; seed++) {
        const uint64_t before = mix(seed) % (N + 1), version = mix(seed + 1) % (before + 1);
        const uint64_t limit = mix(seed + 2) % (N_BLOCKS + 10), from = mix(seed + 3) % (limit + 1);
        uint64_t written = 0, want = from, got = 777;
        for (uint64_t n = version; n < before; n++)
            written |= written_by(9, n + 1);
        while (want < limit && (want >= 64 || !(written >> want & 1)))
            want++;
        const int rc = pc__history_next(history, 9, version, before, from, limit, &got);
        CHECK(rc == PC_OK && got == want, "[%lu, %lu) from %lu limit %lu: %lu, not %lu", version,
              before, from, limit, got, want);
    }
    pc__history_close(history);
    drop_all_kept(&kept);
}

/* -------------------------------------------------------------- the model */

#define N_REGIONS 5u
struct model_case {
    const char *name;
    uint64_t memory_bytes, disk_bytes;
    bool has_directory;
    uint64_t max_records;
    uint64_t n_commits;
};

/* Regions that were freed may be back after a restart. */
static void forget_unknown(struct pc__history *history, const uint64_t ids[N_REGIONS])
{
    uint64_t regions[100];
    const size_t n = pc__history_regions(history, regions, 100);
    REQUIRE(n <= 100);
    for (size_t i = 0; i < n; i++) {
        bool is_known = false;
        for (size_t r = 0; r < N_REGIONS; r++)
            is_known |= regions[i] == ids[r];
        if (!is_known)
            pc__history_forget(history, regions[i]);
    }
    CHECK(pc__history_regions(history, regions, 100) <= N_REGIONS, "the others were forgotten");
}

/* Random commits, skips, frees and restarts. What is readable is right, the budgets hold, and what
 * is kept is worth the budgets. */
static void test_model(const struct model_case *is)
{
    struct pc__history_options options = options_for(
        &kept, is->memory_bytes, is->disk_bytes, is->has_directory ? directory : NULL);
    options.max_records = is->max_records;
    const uint64_t disk_bytes = is->has_directory ? is->disk_bytes : 0;
    struct pc__history *history = open_history(&options);
    uint64_t ids[N_REGIONS], applied[N_REGIONS] = {0}, next_id = 100, n_commits = 0;
    uint64_t n_expired = 0, n_skips = 0;
    kept.n_said = kept.n_disk_ever = 0;
    for (size_t i = 0; i < N_REGIONS; i++)
        ids[i] = next_id++;

    for (uint64_t seed = 0; n_commits < is->n_commits; seed++) {
        const uint64_t dice = mix(seed + is->memory_bytes) % 1000;
        const size_t i = mix(seed * 3) % N_REGIONS;
        if (dice < 4) {
            n_expired += stats_of(history).expired;
            pc__history_close(history);
            history = reopen_history(&options, &kept, mix(seed));
            forget_unknown(history, ids);
        } else if (dice < 6) {
            pc__history_forget(history, ids[i]);
            ids[i] = next_id++;
            applied[i] = 0;
        } else if (dice < 10) {
            CHECK(pc__history_skip(history, ids[i], applied[i]) == PC_OK, "%s", pc_last_message());
            applied[i]++;
            n_skips++;
            CHECK(pc__history_floor(history, ids[i], applied[i]) == applied[i], "skipped");
        } else {
            const int rc = append_pure(history, ids[i], applied[i]);
            CHECK(rc == PC_OK, "%d: %s", rc, pc_last_message());
            n_commits++;
            CHECK(pc__history_has(history, ids[i], applied[i]), "%s: region %lu version %lu",
                  is->name, ids[i], applied[i]);
            applied[i]++;
        }
        const struct pc__history_stats stats = stats_of(history);
        CHECK(stats.memory_bytes <= is->memory_bytes && stats.disk_bytes <= disk_bytes,
              "%s: %lu in memory, %lu on disk", is->name, stats.memory_bytes, stats.disk_bytes);
        CHECK(stats.segments == kept.n, "%lu segments, %zu kept", stats.segments, kept.n);
        CHECK(is->max_records == 0 || stats.records <= is->max_records, "%lu", stats.records);
        for (uint64_t b = 0; b < 4; b++) {
            const uint64_t floor = pc__history_floor(history, ids[i], applied[i]);
            const uint64_t back = mix(seed + b) % (applied[i] - floor + 2);
            if (back <= applied[i])
                check_read(history, ids[i], applied[i] - back, applied[i],
                           mix(seed + b) % N_BLOCKS);
        }
        if (seed % 500 == 0)
            for (size_t r = 0; r < N_REGIONS; r++)
                check_region(history, ids[r], applied[r]);
    }
    uint64_t n_readable = 0;
    for (size_t r = 0; r < N_REGIONS; r++) {
        check_region(history, ids[r], applied[r]);
        for (uint64_t v = pc__history_floor(history, ids[r], applied[r]); v < applied[r]; v++)
            n_readable += (uint64_t)__builtin_popcountll(written_by(ids[r], v + 1));
    }
    const struct pc__history_stats stats = stats_of(history);
    printf("%s: %lu commits, %lu records left, %lu expired, %lu KiB in memory, %lu KiB on disk, "
           "%lu segments\n", is->name, n_commits, stats.records, n_expired + stats.expired,
           stats.memory_bytes >> 10, stats.disk_bytes >> 10, stats.segments);
    if (is->max_records == 0) {
        CHECK(n_expired + stats.expired > 100, "%s: the budgets were not met", is->name);
        CHECK(n_readable * BLOCK * 3 > is->memory_bytes + disk_bytes,
              "%s: %lu readable blocks are too few for the budgets", is->name, n_readable);
    }
    CHECK((kept.n_disk_ever > 0) == (disk_bytes > 0), "%lu files", kept.n_disk_ever);
    if (disk_bytes > 0)
        CHECK(kept.n_said == 0 && stats.disk_bytes > disk_bytes / 2, "%zu said", kept.n_said);
    CHECK(count_names(directory) == 0, "files without names");
    pc__history_close(history);
    drop_all_kept(&kept);
}

/* ---------------------------------------------------------------- too large */

static void test_large_records(void)
{
    const size_t n_before = count_descriptors();
    struct pc__history_options options = options_for(&kept, MIB, 8 * MIB, directory);
    struct pc__history *history = open_history(&options);
    const struct pc_run most[1] = {{0, 250}}, larger[2] = {{0, 100}, {200, 400}},
                        too_large[1] = {{0, 2100}};
    struct pure_home home = {.region = 1};
    uint8_t bytes[PC_BLOCK_BYTES];
    kept.n_said = 0;

    CHECK(append_pure(history, 2, 0) == PC_OK, "%s", pc_last_message());
    CHECK(pc__history_append(history, 1, 0, most, 1, read_pure, &home) == PC_OK, "memory");
    CHECK(stats_of(history).disk_bytes < 100 * KIB && stats_of(history).memory_bytes > 900 * KIB,
          "a memfd of its own");
    CHECK(pc__history_append(history, 1, 1, larger, 2, read_pure, &home) == PC_OK, "disk");
    CHECK(pc__history_append(history, 1, 2, NULL, 0, read_pure, &home) == PC_OK, "empty");
    CHECK(stats_of(history).disk_bytes > 500 * BLOCK, "straight to a file");
    for (int round = 0; round < 2; round++) {
        CHECK(pc__history_floor(history, 1, 3) == 0 && pc__history_floor(history, 2, 1) == 0,
              "all");
        for (uint64_t b = 0; b < 700; b++) {
            const int rc = pc__history_read(history, 1, 1, 3, b, bytes);
            const bool has = b < 100 || (b >= 200 && b < 600);
            CHECK(rc == has, "block %lu: %d", b, rc);
            if (has)
                CHECK(is_block(1, b, last_writer(1, 0, b), bytes), "block %lu", b);
        }
        pc__history_close(history);
        history = reopen_history(&options, &kept, 1);
    }
    CHECK(kept.n_said == 0, "%zu", kept.n_said);
    int n_calls = 0;
    const uint64_t n_kept = kept.n;
    CHECK(pc__history_append(history, 1, 3, larger, 2, refuse_after_one, &n_calls) == -4242,
          "read");
    CHECK(kept.n == n_kept && !pc__history_has(history, 1, 3) && pc__history_has(history, 1, 2),
          "a read that failed changes nothing");
    CHECK(pc__history_append(history, 1, 3, too_large, 1, read_pure, &home) == PC_OK, "skipped");
    CHECK(stats_of(history).skipped == 1 && kept.n_said == 1, "said once");
    CHECK(pc__history_floor(history, 1, 4) == 4 && pc__history_floor(history, 2, 1) == 0,
          "of that region only");
    CHECK(pc__history_append(history, 1, 4, too_large, 1, read_pure, &home) == PC_OK, "skipped");
    CHECK(kept.n_said == 1, "once");
    pc__history_close(history);
    drop_all_kept(&kept);
    CHECK(count_descriptors() == n_before, "%zu descriptors, %zu before", count_descriptors(),
          n_before);
}

/* ------------------------------------------------------------- full disks */

/* 200 commits with a disk that takes nothing (or little) more: the newest are there. */
static void commit_on_full_disk(struct pc__history *history, uint64_t region, uint64_t from)
{
    for (uint64_t v = from; v < from + 200; v++) {
        CHECK(append_pure(history, region, v) == PC_OK, "%s", pc_last_message());
        CHECK(pc__history_has(history, region, v), "version %lu", v);
    }
    check_region(history, region, from + 200);
    CHECK(kept.n_said == 1, "said %zu times", kept.n_said);
    CHECK(stats_of(history).expired > 0, "the oldest went");
    CHECK(stats_of(history).segments == kept.n, "%zu", kept.n);
}

static void full_by_pwrite(void)
{
    struct pc__history_options options = options_for(&kept, 384 * KIB, 64 * MIB, directory);
    struct pc__history *history = open_history(&options);
    for (uint64_t v = 0; v < 100; v++)
        CHECK(append_pure(history, 1, v) == PC_OK, "%s", pc_last_message());
    const uint64_t disk_bytes = stats_of(history).disk_bytes;
    CHECK(disk_bytes > 0 && pc__history_floor(history, 1, 100) == 0, "spilled");
    fail_call(SYS_pwrite64, 2, UINT32_MAX, 0, ENOSPC);
    commit_on_full_disk(history, 1, 100);
    pc__history_close(history);
}

static void full_tmpfs(void)
{
    if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER) != 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", directory, "tmpfs", 0, "size=768k") != 0) {
        printf("no tmpfs can be mounted here (%s): that part was not run\n", strerror(errno));
        return;
    }
    struct pc__history_options options = options_for(&kept, 384 * KIB, 64 * MIB, directory);
    struct pc__history *history = open_history(&options);
    for (uint64_t v = 0; kept.n_said == 0 && v < 1000; v++)
        CHECK(append_pure(history, 1, v) == PC_OK, "%s", pc_last_message());
    const struct pc__history_stats stats = stats_of(history);
    CHECK(kept.n_said == 1 && stats.disk_bytes > 256 * KIB && stats.disk_bytes <= 768 * KIB,
          "filled: %lu", stats.disk_bytes);
    commit_on_full_disk(history, 2, 0);

    /* Records that are too large for memory: one that the disk can take, one that it cannot. */
    const struct pc_run larger[1] = {{0, 120}}, largest[1] = {{0, 300}};
    struct pure_home home = {.region = 3};
    CHECK(pc__history_append(history, 3, 0, larger, 1, read_pure, &home) == PC_OK, "kept");
    CHECK(pc__history_append(history, 4, 0, largest, 1, read_pure, &home) == PC_OK, "skipped");
    CHECK(pc__history_has(history, 3, 0), "in the place of older ones");
    CHECK(pc__history_floor(history, 4, 1) == 1 && stats_of(history).skipped == 1, "skipped");
    check_region(history, 2, 200);
    pc__history_forget(history, 3);
    pc__history_forget(history, 4);

    /* Room again: it is used. */
    pc__history_forget(history, 1);
    pc__history_forget(history, 2);
    CHECK(stats_of(history).disk_bytes == 0, "%lu", stats_of(history).disk_bytes);
    for (uint64_t v = 200; v < 300; v++)
        CHECK(append_pure(history, 2, v) == PC_OK, "%s", pc_last_message());
    CHECK(stats_of(history).disk_bytes > 256 * KIB && kept.n_said == 1, "%zu", kept.n_said);
    pc__history_close(history);
}

static void no_directory_there(void)
{
    struct pc__history_options options =
        options_for(&kept, 384 * KIB, 64 * MIB, "/proc/no such directory");
    struct pc__history *history = open_history(&options);
    commit_on_full_disk(history, 1, 0);
    pc__history_close(history);
}

/* A file system that does not know files without names. */
static void without_tmpfile(void)
{
    fail_call(SYS_openat, 2, O_TMPFILE & ~O_DIRECTORY, 1, EOPNOTSUPP);
    CHECK(open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) < 0 && errno == EOPNOTSUPP,
          "denied");
    const struct model_case is = {.name = "files that are unlinked", .memory_bytes = 384 * KIB,
                                  .disk_bytes = 2 * MIB, .has_directory = true, .n_commits = 600};
    test_model(&is);
}

/* No memory for blocks, but for a note; then for nothing. */
static void no_memory(void)
{
    struct pc__history_options options = options_for(&kept, MIB, 0, NULL);
    struct pc__history *history = open_history(&options);
    const struct pc_run three[1] = {{0, 3}};
    struct pure_home home = {.region = 1};
    for (uint64_t region = 1; region < 3; region++)
        for (uint64_t v = 0; v < 5; v++)
            CHECK(append_pure(history, region, v) == PC_OK, "%s", pc_last_message());
    fail_call(SYS_fallocate, 3, UINT32_MAX, 4097, ENOMEM);
    CHECK(pc__history_append(history, 1, 5, three, 1, read_pure, &home) == PC_OK, "skipped");
    CHECK(pc__history_floor(history, 1, 6) == 6 && stats_of(history).skipped == 1, "skipped");
    fail_call(SYS_fallocate, 3, UINT32_MAX, 1, ENOMEM);
    CHECK(pc__history_append(history, 2, 5, three, 1, read_pure, &home) == PC_ERR_NO_MEMORY &&
          pc__history_skip(history, 2, 5) == PC_ERR_NO_MEMORY, "not even a note");
    CHECK(pc__history_floor(history, 2, 5) == 0, "nothing has changed");
    check_region(history, 2, 5);
    CHECK(kept.n_said == 1, "%zu", kept.n_said);
    pc__history_close(history);
    history = reopen_history(&options, &kept, 0);
    CHECK(pc__history_floor(history, 1, 6) == 6, "the note is found again");
    check_region(history, 2, 5);
    pc__history_close(history);
}

/* ---------------------------------------------------------------- many */

static void test_many(void)
{
    struct pc__history_options options = options_for(&kept, 64 * MIB, 128 * MIB, directory);
    struct pc__history *history = open_history(&options);
    enum { N = 100000 };
    const uint64_t began = clock_ns();
    struct pure_home home = {.region = 0};
    for (uint64_t i = 0; i < N; i++) {
        const struct pc_run one[1] = {{i % 1000, 1}};
        const uint64_t region = 1 + i % 3;
        home = (struct pure_home){.region = region, .version = 0};
        CHECK(pc__history_append(history, region, i / 3, one, 1, read_pure, &home) == PC_OK, "%s",
              pc_last_message());
        const struct pc__history_stats stats = stats_of(history);
        if (stats.memory_bytes > 64 * MIB || stats.disk_bytes > 128 * MIB ||
            stats.records > 65536 || stats.segments > 1024) {
            CHECK(false, "outside of the budgets after %lu", i);
            break;
        }
    }
    const uint64_t took_ns = clock_ns() - began;
    const struct pc__history_stats stats = stats_of(history);
    printf("%d appends of one block: %lu ns each; %lu records, %lu segments, %lu MiB, "
           "%lu MiB on disk\n", N, took_ns / N, stats.records, stats.segments,
           stats.memory_bytes >> 20, stats.disk_bytes >> 20);
    CHECK(stats.records > 40000, "192 MiB hold 49,000 blocks: %lu", stats.records);
    /* The oldest readable version is the slowest: every record is looked at. */
    const uint64_t applied = (N - 1) / 3 + 1;
    const uint64_t floor = pc__history_floor(history, 1, applied);
    uint8_t bytes[PC_BLOCK_BYTES];
    const uint64_t read_began = clock_ns();
    for (uint64_t b = 0; b < 1000; b++)
        CHECK(pc__history_read(history, 1, floor, applied, 5000 + b, bytes) == 0, "none has it");
    printf("a read past %lu records: %lu ns\n", applied - floor, (clock_ns() - read_began) / 1000);
    static uint8_t many[1000][PC_BLOCK_BYTES];
    uint64_t found[16];
    const uint64_t many_began = clock_ns();
    CHECK(pc__history_read_many(history, 1, floor, applied, 0, 1000, many[0], found) == 1000,
          "every block was written again and again");
    printf("1000 blocks at once: %lu ns each\n", (clock_ns() - many_began) / 1000);
    for (uint64_t b = 0; b < 1000; b++) /* read_pure was told version 0 each time */
        CHECK(is_block(1, b, 0, many[b]), "block %lu", b);
    CHECK(pc__history_read_many(history, 1, floor - 1, applied, 0, 1, many[0], found) ==
          PC_ERR_EXPIRED, "below the floor");
    pc__history_close(history);
    drop_all_kept(&kept);
}

int main(void)
{
    snprintf(directory, sizeof directory, "build/history-%d", (int)getpid());
    REQUIRE(mkdir(directory, 0700) == 0);
    const size_t n_before = count_descriptors();
    test_floors();
    test_next();
    const struct model_case cases[] = {
        {.name = "memory", .memory_bytes = 512 * KIB, .n_commits = 3000},
        {.name = "memory, no directory", .memory_bytes = MIB, .disk_bytes = MIB, .n_commits = 2000},
        {.name = "memory and disk", .memory_bytes = 300 * KIB, .disk_bytes = 1200 * KIB,
         .has_directory = true, .n_commits = 3000},
        {.name = "little memory, much disk", .memory_bytes = 384 * KIB, .disk_bytes = 8 * MIB,
         .has_directory = true, .n_commits = 3000},
        {.name = "few records", .memory_bytes = 64 * MIB, .max_records = 40, .n_commits = 1500},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        test_model(&cases[i]);
    test_large_records();
    kept.n_said = 0;
    fflush(NULL);
    in_child(full_by_pwrite);
    in_child(full_tmpfs);
    in_child(no_directory_there);
    in_child(without_tmpfile);
    in_child(no_memory);
    test_many();
    CHECK(count_descriptors() == n_before, "%zu descriptors, %zu before", count_descriptors(),
          n_before);
    CHECK(count_names(directory) == 0, "nothing is left in %s", directory);
    CHECK(rmdir(directory) == 0, "%s", strerror(errno));
    return test_result();
}
