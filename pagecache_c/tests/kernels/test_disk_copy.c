/* test_disk_copy.c - blocks copied to a file on disk: what is in the file afterwards, the sums, and what a disk
 * may refuse. Each test has a process of its own: a call that fails once fails for good. */
#include "kernels/disk_copy.h"

#include "kernels/crc32c.h"
#include "os/disk_file.h"
#include "tests/support/fail_call.h"
#include "tests/support/harness.h"

#include <sys/mman.h>

#define MOST_BLOCKS 3000u
#define DIRECT_FROM 1024u   /* as in disk_copy.c */
#define CHUNK_BYTES ((uint64_t)512 << 12)
#define NO_SUM 0xeeeeeeeeu

static uint64_t state = 88172645463325252ull;

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static int disk_file(void)
{
    int fd = pc__disk_file_open(DISK_DIRECTORY);
    OK(fd);
    return fd;
}

/* Bytes that no two blocks have in common, a block more than may be copied. */
static const uint8_t *source(void)
{
    static uint8_t *bytes;
    const uint64_t n_bytes = (uint64_t)(MOST_BLOCKS + 1) << 12;
    if (!bytes) {
        bytes = malloc(n_bytes);
        CHECK(bytes);
        for (uint64_t i = 0; i < n_bytes; i += sizeof state) {
            (void)draw(2);
            memcpy(bytes + i, &state, sizeof state);
        }
    }
    return bytes;
}

static uint8_t *read_all(int fd, uint64_t n_bytes, uint64_t offset)
{
    uint8_t *bytes = malloc(n_bytes + 1);
    CHECK(bytes);
    OK(pc__file_read(fd, bytes, n_bytes, offset));
    return bytes;
}

/* The sums are of these blocks, and there is no sum behind them. */
static void check_sums(const uint32_t *sums, const uint8_t *blocks, uint64_t n_blocks)
{
    uint32_t *expected = malloc((n_blocks + 1) * sizeof *expected);
    CHECK(expected);
    pc_crc32c_blocks(blocks, n_blocks, expected);
    for (uint64_t i = 0; i < n_blocks; i++)
        CHECK(sums[i] == (expected[i] ^ 0x98f94189u));
    CHECK(sums[n_blocks] == NO_SUM);
    free(expected);
}

static uint32_t *no_sums(uint64_t n_blocks)
{
    uint32_t *sums = malloc((n_blocks + 1) * sizeof *sums);
    CHECK(sums);
    for (uint64_t i = 0; i <= n_blocks; i++)
        sums[i] = NO_SUM;
    return sums;
}

/* Copies them into a file that has other bytes, and looks at all of it. */
static void check_copy_to(int fd, uint64_t offset, const struct pc__blocks_at *pieces, size_t n_pieces)
{
    uint64_t n_blocks = 0, at = offset;
    for (size_t i = 0; i < n_pieces; i++)
        n_blocks += pieces[i].n_blocks;
    const uint64_t n_bytes = n_blocks << 12, all_bytes = offset + n_bytes + 100;
    uint8_t *image = malloc(all_bytes);
    uint32_t *sums = no_sums(n_blocks);
    CHECK(image);
    memset(image, 0x5a, all_bytes);
    OK(pc__disk_file_write(fd, image, all_bytes, 0));
    for (size_t i = 0; i < n_pieces; i++) {
        memcpy(image + at, pieces[i].at, pieces[i].n_blocks << 12);
        at += pieces[i].n_blocks << 12;
    }
    const int spare = dup(fd);
    close(spare);
    OK(pc__disk_copy(fd, offset, pieces, n_pieces, sums));
    const int spare_now = dup(fd); /* the lowest that is free */
    close(spare_now);
    CHECK(spare_now == spare);
    uint8_t *got = read_all(fd, all_bytes, 0);
    CHECK(!memcmp(got, image, all_bytes));
    CHECK(lseek(fd, 0, SEEK_END) == (off_t)all_bytes);
    check_sums(sums, image + offset, n_blocks);
    OK(ftruncate(fd, 0));
    free(got);
    free(sums);
    free(image);
}

/* One piece that begins `shift` bytes into the source. */
static void check_copy(int fd, uint64_t offset, uint64_t n_blocks, uint64_t shift)
{
    const struct pc__blocks_at piece = {source() + shift, n_blocks};
    check_copy_to(fd, offset, &piece, 1);
}

/* Around a chunk, and around where it goes past the page cache. */
static const uint64_t sizes[] = {0, 1, 2, 511, 512, 513, 1023, 1024, 1025, 1536, 2049, MOST_BLOCKS};
#define N_SIZES (sizeof sizes / sizeof sizes[0])

static void test_any_size(int argument)
{
    const uint64_t shifts[] = {0, 1, 8, 2049, 4095};
    const int fd = disk_file();
    (void)argument;
    for (size_t i = 0; i < N_SIZES; i++)
        for (uint64_t offset = 0; offset <= 3 << 12; offset += 3 << 12)
            check_copy(fd, offset, sizes[i], shifts[(i + (offset != 0)) % 5]);
    close(fd);
}

/* In any order of the source, at any address; some are none. */
static void test_any_pieces(int argument)
{
    enum { MANY = 700 };
    static struct pc__blocks_at pieces[MANY];
    const int fd = disk_file();
    (void)argument;
    for (int round = 0; round < 12; round++) {
        const uint64_t longest = (const uint64_t[]){1, 5, 300, 1500}[round % 4];
        size_t n = 0;
        for (uint64_t left = MOST_BLOCKS; n < MANY && left; n++) {
            uint64_t some = draw(longest + 1);
            some = some < left ? some : left;
            left -= some;
            const uint64_t last_byte = (uint64_t)(MOST_BLOCKS + 1 - some) << 12;
            pieces[n] = (struct pc__blocks_at){source() + draw(last_byte), some};
        }
        check_copy_to(fd, (uint64_t)round << 12, pieces, n);
    }
    check_copy_to(fd, 1 << 12, pieces, 0);
    close(fd);
}

static void test_the_call(int argument)
{
    const int fd = disk_file();
    uint32_t *sums = no_sums(DIRECT_FROM);
    struct stat st;
    (void)argument;
    const uint64_t too_far[] = {1, 4095, 4097, (uint64_t)INT64_MAX + 1, UINT64_MAX - 4095};
    for (size_t i = 0; i < sizeof too_far / sizeof too_far[0]; i++)
        CHECK(pc_copy_to_disk(fd, too_far[i], source(), 1, sums) == PC_ERR_RANGE);
    CHECK(pc_copy_to_disk(fd, 4096, source(), (uint64_t)INT64_MAX >> 12, sums) == PC_ERR_RANGE);
    CHECK(pc_copy_to_disk(fd, 0, source(), UINT64_MAX, sums) == PC_ERR_RANGE);
    OK(pc_copy_to_disk(fd, 4096, source(), 0, sums));
    CHECK(!fstat(fd, &st) && !st.st_size && sums[0] == NO_SUM);
    OK(pc_copy_to_disk(fd, 4096, source() + 3, DIRECT_FROM, sums));
    check_sums(sums, source() + 3, DIRECT_FROM);
    uint8_t *got = read_all(fd, DIRECT_FROM << 12, 4096);
    CHECK(!memcmp(got, source() + 3, DIRECT_FROM << 12));
    free(got);
    free(sums);
    close(fd);
}

/* ------------------------------------------------------- what a disk refuses */

/* A write of any file but this one says error: of the same file, opened once more. */
static void fail_other_writes(int fd, uint32_t error)
{
    fail_call(SYS_pwrite64, 0, UINT32_MAX, (uint32_t)fd + 1, error);
}

/* Much of it goes past the page cache, and what is less does not. */
static void test_much_is_direct(int argument)
{
    const int fd = disk_file();
    char path[64];
    (void)argument;
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int direct = open(path, O_WRONLY | O_DIRECT | O_CLOEXEC);
    if (direct < 0)
        exit(77);
    close(direct);
    uint32_t *sums = no_sums(DIRECT_FROM);
    fail_other_writes(fd, EIO);
    check_copy(fd, 0, DIRECT_FROM - 1, 1);
    CHECK(pc_copy_to_disk(fd, 0, source(), DIRECT_FROM, sums) < 0);
    free(sums);
    close(fd);
}

static void test_no_direct_file(int argument)
{
    const int fd = disk_file();
    (void)argument;
    fail_call(SYS_openat, 2, O_DIRECT, 1, EINVAL);
    for (size_t i = 0; i < N_SIZES; i++)
        check_copy(fd, 4096, sizes[i], 5);
    close(fd);
}

static void test_no_direct_write(int argument)
{
    const int fd = disk_file();
    (void)argument;
    fail_other_writes(fd, EINVAL);
    for (size_t i = 0; i < N_SIZES; i++)
        check_copy(fd, 4096, sizes[i], 5);
    close(fd);
}

/* Some have no O_DIRECT there. */
static void test_a_file_in_memory(int argument)
{
    const int fd = memfd_create("copy", MFD_CLOEXEC);
    (void)argument;
    OK(fd);
    for (size_t i = 0; i < N_SIZES; i++)
        check_copy(fd, 4096, sizes[i], 5);
    close(fd);
}

/* From the second chunk on. */
static void check_refused(uint32_t error, bool is_full)
{
    const int fd = disk_file();
    uint32_t *sums = no_sums(MOST_BLOCKS);
    fail_call(SYS_pwrite64, 3, UINT32_MAX, (uint32_t)CHUNK_BYTES, error);
    OK(pc_copy_to_disk(fd, 0, source(), CHUNK_BYTES >> 12, sums));
    for (size_t i = 0; i < N_SIZES; i++) {
        const int spare = dup(fd);
        close(spare);
        const int rc = pc_copy_to_disk(fd, 0, source(), sizes[i], sums);
        CHECK(sizes[i] <= CHUNK_BYTES >> 12 ? rc == PC_OK : rc < 0 && (rc == PC_ERR_NO_SPACE) == is_full);
        const int spare_now = dup(fd);
        close(spare_now);
        CHECK(spare_now == spare);
    }
    free(sums);
    close(fd);
}

static void test_a_full_disk(int argument)
{
    (void)argument;
    check_refused(ENOSPC, true);
}

static void test_a_broken_disk(int argument)
{
    (void)argument;
    check_refused(EIO, false);
}

/* A file that may not be so long: what is cut off by that is neither whole blocks nor all. */
static void test_a_file_that_may_not_be_so_long(int argument)
{
    const int fd = disk_file();
    uint32_t *sums = no_sums(MOST_BLOCKS);
    const struct rlimit limit = {CHUNK_BYTES + 5000, CHUNK_BYTES + 5000};
    (void)argument;
    signal(SIGXFSZ, SIG_IGN);
    OK(setrlimit(RLIMIT_FSIZE, &limit));
    check_copy(fd, 0, CHUNK_BYTES >> 12, 7);
    CHECK(pc_copy_to_disk(fd, 0, source(), 600, sums) == PC_ERR_NO_SPACE);
    CHECK(pc_copy_to_disk(fd, 0, source(), MOST_BLOCKS, sums) == PC_ERR_NO_SPACE);
    free(sums);
    close(fd);
}

/* ------------------------------------------------------------------- changes */

/* By another process, as TSan knows none of its writes: here they are meant. */
static void test_changed_meanwhile(int argument)
{
    enum { N = 2048 };
    const int fd = disk_file();
    volatile uint64_t *words =
        mmap(NULL, (size_t)N << 12, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint32_t *sums = no_sums(N);
    unsigned n_torn = 0;
    (void)argument;
    CHECK(words != MAP_FAILED);
    const pid_t self = getpid(), child = fork();
    if (!child)
        for (uint64_t i = 1; getppid() == self; i++)
            for (uint64_t block = 0; block < N; block++)
                words[block * 512 + i % 512] = i;
    CHECK(child > 0);
    while (!words[N * 512 - 511]) /* it is at it */
        usleep(100);
    for (int round = 0; round < 20; round++) {
        const uint64_t n_blocks = round % 2 ? N : 600;
        OK(pc_copy_to_disk(fd, 0, (const void *)(uintptr_t)words, n_blocks, sums));
        uint8_t *got = read_all(fd, n_blocks << 12, 0);
        const uint32_t behind = sums[n_blocks];
        sums[n_blocks] = NO_SUM;
        check_sums(sums, got, n_blocks);
        sums[n_blocks] = behind;
        n_torn += memcmp(got, got + ((n_blocks - 1) << 12), 4096) != 0;
        free(got);
    }
    CHECK(n_torn);
    OK(kill(child, SIGKILL));
    CHECK(waitpid(child, NULL, 0) == child);
    free(sums);
    munmap((void *)(uintptr_t)words, (size_t)N << 12);
    close(fd);
}

int main(void)
{
    static const struct {
        const char *name;
        void (*run)(int argument);
    } tests[] = {
#define TEST(name) {#name, test_##name}
        TEST(any_size),         TEST(any_pieces),       TEST(the_call),
        TEST(much_is_direct),   TEST(no_direct_file),   TEST(no_direct_write),
        TEST(a_file_in_memory), TEST(a_full_disk),      TEST(a_broken_disk),
        TEST(changed_meanwhile), TEST(a_file_that_may_not_be_so_long)};
    int failed = 0;
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
        failed += run_test(tests[i].name, tests[i].run, 0, 120);
    return failed != 0;
}
