/* history_world.h - for tests of the history: regions whose every block of every version is known,
 * and a keeper of descriptors.
 *
 * What commit w of region R writes follows from (R, w) alone; a block's content from (R, block,
 * last commit that wrote it). So any process can say what (R, v, block) must be.
 */
#ifndef PC_TESTS_HISTORY_WORLD_H
#define PC_TESTS_HISTORY_WORLD_H

#include "common/error.h"
#include "history/history.h"
#include "os/file_id.h"
#include "tests/support/check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BLOCK ((size_t)PC_BLOCK_BYTES)
#define N_BLOCKS 64u
#define MAX_RUNS 8u
#define KIB 1024ull
#define MIB (1024ull * 1024)

static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* What commit `version` (1, 2, ..) of the region writes: a bit for each of the 64 blocks. Some
 * write nothing, some everything. */
static inline uint64_t written_by(uint64_t region, uint64_t version)
{
    const uint64_t seed = mix(region * 1000003 + version);
    if (seed % 29 == 0)
        return 0;
    if (seed % 31 == 0)
        return UINT64_MAX;
    return mix(seed) & mix(seed + 1) & mix(seed + 2); /* an eighth of them */
}

static inline size_t runs_of(uint64_t bits, struct pc_run runs[N_BLOCKS])
{
    size_t n = 0;
    for (uint64_t b = 0; b < N_BLOCKS; b++) {
        if (!(bits >> b & 1))
            continue;
        if (n > 0 && runs[n - 1].first_block + runs[n - 1].n_blocks == b)
            runs[n - 1].n_blocks++;
        else
            runs[n++] = (struct pc_run){.first_block = b, .n_blocks = 1};
    }
    return n;
}

/* The last commit up to version that wrote the block; 0: none. */
static inline uint64_t last_writer(uint64_t region, uint64_t version, uint64_t block)
{
    while (version > 0 && !(written_by(region, version) >> block & 1))
        version--;
    return version;
}

static inline void fill_block(uint64_t region, uint64_t block, uint64_t writer, uint8_t *out)
{
    const uint64_t stamp = mix(mix(region) + mix(block * 7 + 1) + writer);
    for (size_t i = 0; i < BLOCK / 8; i++) {
        const uint64_t word = stamp + i;
        memcpy(out + 8 * i, &word, sizeof word);
    }
}

static inline bool is_block(uint64_t region, uint64_t block, uint64_t writer, const uint8_t *bytes)
{
    uint8_t want[PC_BLOCK_BYTES];
    fill_block(region, block, writer, want);
    return memcmp(want, bytes, BLOCK) == 0;
}

/* The callback of append for homes that are nothing but a version. */
struct pure_home {
    uint64_t region, version;
};
static inline int read_pure(void *arg, uint64_t block, uint64_t n, uint8_t *out)
{
    const struct pure_home *home = arg;
    for (uint64_t i = 0; i < n; i++)
        fill_block(home->region, block + i,
                   last_writer(home->region, home->version, block + i), out + i * BLOCK);
    return PC_OK;
}

/* Appends the record that commit version + 1 makes. */
static inline int append_pure(struct pc__history *history, uint64_t region, uint64_t version)
{
    struct pc_run runs[N_BLOCKS];
    struct pure_home home = {.region = region, .version = version};
    const size_t n = runs_of(written_by(region, version + 1), runs);
    return pc__history_append(history, region, version, runs, n, read_pure, &home);
}

/* Reads (region, version, block) against a base of version before, and checks what comes. Returns
 * what read did. The base itself is taken to be right. */
static inline int check_read(struct pc__history *history, uint64_t region, uint64_t version,
                             uint64_t before, uint64_t block)
{
    uint8_t bytes[PC_BLOCK_BYTES];
    const int rc = pc__history_read(history, region, version, before, block, bytes);
    const uint64_t writer = last_writer(region, version, block);
    if (rc == 1)
        CHECK(is_block(region, block, writer, bytes), "region %lu version %lu of %lu block %lu",
              region, version, before, block);
    else if (rc == 0)
        CHECK(last_writer(region, before, block) == writer,
              "region %lu version %lu of %lu block %lu: the base has a newer one", region, version,
              before, block);
    else
        CHECK(rc == PC_ERR_EXPIRED, "%d: %s", rc, pc_last_message());
    return rc;
}

/* Some blocks at once: the same as one by one. */
static inline void check_read_many(struct pc__history *history, uint64_t region, uint64_t version,
                                   uint64_t before)
{
    static uint8_t bytes[N_BLOCKS + 16][PC_BLOCK_BYTES];
    const uint64_t first = mix(version) % N_BLOCKS;
    const uint64_t n = 1 + mix(version + 1) % (N_BLOCKS + 16 - first);
    uint64_t found[2] = {0x5555, 0x5555};
    int64_t n_found = 0;
    memset(bytes, 0xaa, sizeof bytes);
    const int64_t rc = pc__history_read_many(history, region, version, before, first, n, bytes[0],
                                             found);
    for (uint64_t i = 0; i < n; i++) {
        uint8_t one[PC_BLOCK_BYTES];
        memset(one, 0xaa, sizeof one);
        const int has = pc__history_read(history, region, version, before, first + i, one);
        CHECK((has == 1) == (found[i / 64] >> (i % 64) & 1), "block %lu", first + i);
        CHECK(memcmp(one, bytes[i], BLOCK) == 0, "region %lu version %lu block %lu", region,
              version, first + i);
        n_found += has == 1;
    }
    CHECK(rc == n_found, "%ld, not %ld", rc, n_found);
}

/* Every block of every version from the floor on is right; the one below the floor has expired. */
static inline void check_region(struct pc__history *history, uint64_t region, uint64_t before)
{
    const uint64_t floor = pc__history_floor(history, region, before);
    CHECK(floor <= before, "%lu > %lu", floor, before);
    for (uint64_t v = floor; v <= before; v++) {
        for (uint64_t b = 0; b < N_BLOCKS; b++) {
            const int rc = check_read(history, region, v, before, b);
            CHECK(rc >= 0, "region %lu version %lu of %lu, floor %lu", region, v, before, floor);
        }
        check_read_many(history, region, v, before);
    }
    if (floor > 0)
        CHECK(check_read(history, region, floor - 1, before, 0) == PC_ERR_EXPIRED,
              "region %lu version %lu is below the floor", region, floor - 1);
}

/* ------------------------------------------------------------ the keeper */

#define MAX_KEPT 1100
struct kept_segment {
    int fd;
    uint64_t inode, bytes;
    bool is_disk;
};
struct kept_segments {
    size_t n, n_said;
    uint64_t n_kept_ever, n_disk_ever;
    struct kept_segment all[MAX_KEPT];
};

/* Takes fd. */
static inline void add_kept(struct kept_segments *kept, int fd, uint64_t inode, uint64_t bytes,
                            bool is_disk)
{
    struct stat st;
    REQUIRE(kept->n < MAX_KEPT && fd >= 0);
    CHECK(fstat(fd, &st) == 0 && pc__file_id(&st) == inode && (uint64_t)st.st_size == bytes &&
          (st.st_nlink == 0 || !is_disk), "a segment that is what it says");
    kept->all[kept->n++] =
        (struct kept_segment){.fd = fd, .inode = inode, .bytes = bytes, .is_disk = is_disk};
    kept->n_kept_ever++;
    kept->n_disk_ever += is_disk;
}

static inline void keep_segment(void *arg, int fd, uint64_t inode, uint64_t bytes, bool is_disk)
{
    add_kept(arg, fcntl(fd, F_DUPFD_CLOEXEC, 0), inode, bytes, is_disk);
}

static inline void drop_segment(void *arg, uint64_t inode)
{
    struct kept_segments *kept = arg;
    for (size_t i = 0; i < kept->n; i++)
        if (kept->all[i].inode == inode) {
            close(kept->all[i].fd);
            memmove(&kept->all[i], &kept->all[i + 1], (--kept->n - i) * sizeof kept->all[0]);
            return;
        }
    CHECK(false, "file %#lx was dropped and not kept", inode);
}

static inline void hear(void *arg, const char *text)
{
    struct kept_segments *kept = arg;
    CHECK(strlen(text) > 10 && !strchr(text, '\n'), "one line: %s", text);
    if (kept->n_said++ == 0)
        printf("said: %s\n", text);
}

static inline void drop_all_kept(struct kept_segments *kept)
{
    while (kept->n > 0)
        close(kept->all[--kept->n].fd);
}

static inline struct pc__history_options options_for(struct kept_segments *kept,
                                                     uint64_t memory_bytes, uint64_t disk_bytes,
                                                     const char *directory)
{
    return (struct pc__history_options){.memory_bytes = memory_bytes, .disk_bytes = disk_bytes,
                                        .directory = directory, .arg = kept, .keep = keep_segment,
                                        .drop = drop_segment, .log = hear};
}

static inline struct pc__history *open_history(const struct pc__history_options *options)
{
    struct pc__history *history;
    REQUIRE(pc__history_open(options, &history) == PC_OK);
    return history;
}

/* A history over what is kept, handed over in an order that shuffle chooses. */
static inline struct pc__history *reopen_history(const struct pc__history_options *options,
                                                 struct kept_segments *kept, uint64_t shuffle)
{
    struct pc__history *history = open_history(options);
    const size_t n = kept->n;
    for (size_t i = 0; i < n; i++) {
        const size_t at = (i * 7 + shuffle % n) % n; /* all of them if 7 does not divide n */
        const size_t which = n % 7 == 0 ? n - 1 - i : at;
        const int rc = pc__history_adopt(history, fcntl(kept->all[which].fd, F_DUPFD_CLOEXEC, 0));
        CHECK(rc == PC_OK, "%d: %s", rc, pc_last_message());
    }
    CHECK(pc__history_adopted(history) == PC_OK, "%s", pc_last_message());
    return history;
}

static inline size_t count_descriptors(void)
{
    size_t n = 0;
    for (int fd = 0; fd < 4096; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static inline uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* Runs it in a child; the exit status must be 0 (the child's own checks). */
static inline void in_child(void (*run)(void))
{
    fflush(NULL);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        n_check_failures = 0;
        run();
        fflush(NULL);
        _exit(test_result());
    }
    int status;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x", status);
}

static inline struct pc__history_stats stats_of(struct pc__history *history)
{
    struct pc__history_stats stats;
    pc__history_stats(history, &stats);
    return stats;
}

#endif
