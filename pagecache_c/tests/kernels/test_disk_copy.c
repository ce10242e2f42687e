/* test_disk_copy.c - blocks to a file on disk: any pieces, any length, past the page cache and through it; what
 * the disk refuses; and a source that changes meanwhile. */
#include "kernels/crc32c.h"
#include "kernels/disk_copy.h"
#include "tests/support/check.h"
#include "tests/support/fail_call.h"
#include "tests/support/length.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK PC_BLOCK_BYTES
#define MOST_BLOCKS 2600u

static int file_on(const char *directory)
{
    int fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    REQUIRE(fd >= 0);
    return fd;
}

static uint8_t *random_bytes(uint64_t n)
{
    uint8_t *bytes = malloc(n);
    REQUIRE(bytes);
    uint64_t x = 88172645463325252u;
    for (uint64_t i = 0; i < n; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        bytes[i] = (uint8_t)x;
    }
    return bytes;
}

/* What is in the file from `offset` on is the image, and the sums are of it. */
static bool is_there(int fd, uint64_t offset, const uint8_t *image, uint64_t n_blocks, const uint32_t *sums)
{
    uint8_t *got = malloc(n_blocks * BLOCK + 1);
    uint32_t *right = malloc(n_blocks * sizeof *right + 1);
    REQUIRE(got && right);
    bool fits = pread(fd, got, n_blocks * BLOCK, (off_t)offset) == (ssize_t)(n_blocks * BLOCK) &&
                (!image || memcmp(got, image, n_blocks * BLOCK) == 0);
    pc_crc32c_blocks(got, n_blocks, right);
    for (uint64_t i = 0; i < n_blocks && fits; i++)
        fits = (right[i] ^ PC__CRC32C_ZERO_BLOCK) == sums[i];
    free(right);
    free(got);
    return fits;
}

/* Pieces of 1, 2, 3, ... blocks, in the wrong order and off alignment in memory. */
static void any_pieces(const char *directory)
{
    static const uint64_t lengths[] = {0, 1, 2, 511, 512, 513, 1023, 1024, 1025, 1536, MOST_BLOCKS};
    uint8_t *source = random_bytes((MOST_BLOCKS + 1) * BLOCK), *image = malloc(MOST_BLOCKS * BLOCK);
    static struct pc__blocks_at pieces[MOST_BLOCKS];
    static uint32_t sums[MOST_BLOCKS + 1];
    REQUIRE(image);
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
        for (uint64_t most = 1; most <= MOST_BLOCKS; most *= 51) {
            size_t n = 0;
            for (uint64_t done = 0; done < lengths[k]; n++) {
                const uint64_t left = lengths[k] - done, wanted = n % most + 1, some = left < wanted ? left : wanted;
                const uint8_t *at = source + (lengths[k] - done - some) * BLOCK + 7 * (n % 3);
                pieces[n] = (struct pc__blocks_at){at, some};
                memcpy(image + done * BLOCK, at, some * BLOCK);
                done += some;
            }
            const int fd = file_on(directory);
            sums[lengths[k]] = 0xeeeeeeeeu;
            CHECK(pc__disk_copy(fd, 3 * BLOCK, pieces, n, sums) == PC_OK, "%s", pc_last_message());
            CHECK(is_there(fd, 3 * BLOCK, image, lengths[k], sums), "%llu blocks in %zu pieces",
                  (unsigned long long)lengths[k], n);
            CHECK(sums[lengths[k]] == 0xeeeeeeeeu, "one past %llu blocks", (unsigned long long)lengths[k]);
            CHECK(lseek(fd, 0, SEEK_END) == (off_t)(lengths[k] ? (3 + lengths[k]) * BLOCK : 0), "its length");
            close(fd);
        }
    }
    free(image);
    free(source);
}

/* In a process of its own: what fails there stays so. */
static void with_failing(uint32_t least_bytes, uint32_t error, int expected)
{
    const pid_t child = fork();
    if (child == 0) {
        uint8_t *source = random_bytes(MOST_BLOCKS * BLOCK);
        uint32_t *sums = malloc(MOST_BLOCKS * sizeof *sums);
        const int fd = file_on(DISK_DIRECTORY);
        REQUIRE(sums);
        fail_call(SYS_pwrite64, 2, UINT32_MAX, least_bytes, error);
        const int rc = pc_copy_to_disk(fd, 0, source, MOST_BLOCKS, sums);
        CHECK(rc == expected, "%d: %s", rc, pc_last_message());
        CHECK(rc || is_there(fd, 0, source, MOST_BLOCKS, sums), "what is there");
        free(sums);
        free(source);
        exit(test_result());
    }
    int status = -1;
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(status == 0, "error %u of a write", error);
}

/* No file with O_DIRECT can be opened. */
static void without_direct(void)
{
    const pid_t child = fork();
    if (child == 0) {
        uint8_t *source = random_bytes(MOST_BLOCKS * BLOCK);
        uint32_t *sums = malloc(MOST_BLOCKS * sizeof *sums);
        const int fd = file_on(DISK_DIRECTORY);
        REQUIRE(sums);
        fail_call(SYS_openat, 2, O_DIRECT, O_DIRECT, EINVAL);
        CHECK(pc_copy_to_disk(fd, BLOCK, source, MOST_BLOCKS, sums) == PC_OK, "%s", pc_last_message());
        CHECK(is_there(fd, BLOCK, source, MOST_BLOCKS, sums), "what is there");
        free(sums);
        free(source);
        exit(test_result());
    }
    int status = -1;
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(status == 0, "a file system without O_DIRECT");
}

#ifndef __SANITIZE_THREAD__ /* the race is the caller's */
static _Atomic bool is_over;

static void *change(void *arg)
{
    volatile _Atomic uint64_t *words = arg;
    for (uint64_t i = 0; !atomic_load(&is_over); i++)
        atomic_fetch_add_explicit(&words[i * 97 % (MOST_BLOCKS * BLOCK / 8)], 1, memory_order_relaxed);
    return NULL;
}

/* A writer that does not wait for its commit: whatever was written, the sums are of that. */
static void a_source_that_changes(void)
{
    uint8_t *source = random_bytes(MOST_BLOCKS * BLOCK);
    uint32_t *sums = malloc(MOST_BLOCKS * sizeof *sums);
    pthread_t thread;
    REQUIRE(sums && pthread_create(&thread, NULL, change, source) == 0);
    for (int round = 0; round < 20; round++) {
        const int fd = file_on(DISK_DIRECTORY);
        CHECK(pc_copy_to_disk(fd, 0, source, MOST_BLOCKS, sums) == PC_OK, "%s", pc_last_message());
        CHECK(is_there(fd, 0, NULL, MOST_BLOCKS, sums), "round %d", round);
        close(fd);
    }
    atomic_store(&is_over, true);
    pthread_join(thread, NULL);
    free(sums);
    free(source);
}
#endif

static void what_is_refused(void)
{
    uint32_t sum;
    uint8_t block[BLOCK] = {0};
    CHECK(pc_copy_to_disk(-1, 1, block, 1, &sum) == PC_ERR_RANGE, "off a block");
    CHECK(pc_copy_to_disk(-1, 0, block, UINT64_MAX >> PC_BLOCK_SHIFT, &sum) == PC_ERR_RANGE, "too long");
    CHECK(pc_copy_to_disk(-1, 1ull << 63, block, 1, &sum) == PC_ERR_RANGE, "too far");
    CHECK(pc_copy_to_disk(-1, 0, block, 1, &sum) == PC_ERR_SYSTEM, "no file");
}

int main(void)
{
    any_pieces(DISK_DIRECTORY);
    any_pieces("/dev/shm"); /* which may have no O_DIRECT */
    with_failing(1, ENOSPC, PC_ERR_NO_SPACE);
    with_failing(1, EIO, PC_ERR_SYSTEM);
    with_failing(1, EINVAL, PC_ERR_SYSTEM); /* through the page cache, too */
    without_direct();
#ifndef __SANITIZE_THREAD__
    a_source_that_changes();
#endif
    what_is_refused();
    return test_result();
}
