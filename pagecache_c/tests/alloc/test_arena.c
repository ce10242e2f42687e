/* test_arena.c - the arena against a plain list of blocks; what it touches; its end. */
#include "tests/support/check.h"
#include "tests/support/length.h"

#include "alloc/arena.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define OK(call) CHECK((call) == 0, "%s", pc_last_message())
#define MIB ((uint64_t)1 << 20)

struct ground {
    int fd;
    char *base;
    uint64_t length;
    pc_arena *arena;
};

static struct ground make_ground(uint64_t length)
{
    struct ground ground = {.fd = memfd_create("arena", MFD_CLOEXEC), .length = length};
    REQUIRE(ground.fd >= 0 && ftruncate(ground.fd, (off_t)length) == 0);
    ground.base = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, ground.fd, 0);
    REQUIRE(ground.base != MAP_FAILED);
    REQUIRE(pc_arena_open((uint64_t)(uintptr_t)ground.base, length, &ground.arena) == 0);
    return ground;
}

static void drop_ground(struct ground *ground)
{
    OK(pc_arena_drop(ground->arena));
    munmap(ground->base, ground->length);
    close(ground->fd);
}

static uint64_t allocated_bytes(const struct ground *ground)
{
    struct stat st;
    REQUIRE(fstat(ground->fd, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}

/* ------------------------------------------------------------------- model */

struct block {
    unsigned char *at;
    size_t n_bytes;
    unsigned char fill;
};

static void fill(struct block *block, unsigned char value)
{
    block->fill = value;
    memset(block->at, value, block->n_bytes);
}

static bool is_all(const unsigned char *at, size_t n_bytes, unsigned char value)
{
    return n_bytes == 0 || (at[0] == value && memcmp(at, at + 1, n_bytes - 1) == 0);
}

static size_t some_size(unsigned *seed)
{
    switch (rand_r(seed) % 8) {
    case 0: return (size_t)(rand_r(seed) % 300000);
    case 1: return (size_t)(rand_r(seed) % 9000);
    case 2: return 0;
    default: return (size_t)(rand_r(seed) % 700);
    }
}

static void check_place(const struct ground *ground, const struct block *block, size_t alignment)
{
    char *at = (char *)block->at;
    CHECK(at >= ground->base && at + block->n_bytes <= ground->base + ground->length,
          "%p of %zu bytes is outside", (void *)at, block->n_bytes);
    CHECK((uintptr_t)at % alignment == 0, "%p is not on a %zu byte boundary", (void *)at, alignment);
    if (block->n_bytes >= 4096)
        CHECK((uintptr_t)at % 4096 == 0, "%zu bytes at %p", block->n_bytes, (void *)at);
    CHECK(pc_usable_size(ground->arena, at) >= block->n_bytes, "of %zu bytes", block->n_bytes);
    CHECK((uint64_t)(at - ground->base) + block->n_bytes <= pc_arena_used_bytes(ground->arena),
          "above the top");
}

/* Every block holds its own byte until it is freed: two that overlap could not. */
static void test_model(unsigned seed)
{
    enum { N = 400 };
    static struct block blocks[N];
    memset(blocks, 0, sizeof blocks);
    struct ground ground = make_ground(24 * MIB);
    unsigned n_full = 0;
    for (int step = 0; step < 15000; step++) {
        struct block *block = &blocks[rand_r(&seed) % N];
        size_t n_bytes = some_size(&seed), alignment = 16;
        unsigned char value = (unsigned char)(1 + rand_r(&seed) % 255);
        if (block->at)
            CHECK(is_all(block->at, block->n_bytes, block->fill), "a block of %zu bytes was overwritten",
                  block->n_bytes);
        if (block->at && rand_r(&seed) % 3 == 0) {
            unsigned char *at = pc_realloc(ground.arena, block->at, n_bytes);
            if (!at) {
                n_full++;
                CHECK(errno == ENOMEM, "errno %d", errno);
                continue;
            }
            size_t kept = n_bytes < block->n_bytes ? n_bytes : block->n_bytes;
            CHECK(is_all(at, kept, block->fill), "realloc lost bytes");
            *block = (struct block){at, n_bytes, 0};
        } else if (block->at) {
            pc_free(ground.arena, block->at);
            block->at = NULL;
            continue;
        } else if (rand_r(&seed) % 2) {
            block->at = pc_calloc(ground.arena, 1, n_bytes);
            CHECK(!block->at || is_all(block->at, n_bytes, 0), "calloc of %zu bytes is not zero", n_bytes);
        } else if (rand_r(&seed) % 2) {
            alignment = (size_t)1 << rand_r(&seed) % 16;
            block->at = pc_aligned_alloc(ground.arena, alignment, n_bytes);
        } else {
            block->at = pc_malloc(ground.arena, n_bytes);
        }
        if (!block->at) {
            n_full++;
            CHECK(errno == ENOMEM, "errno %d", errno);
            continue;
        }
        block->n_bytes = n_bytes;
        check_place(&ground, block, alignment);
        fill(block, value);
    }
    CHECK(n_full < 1500, "%u of 15000 found no room", n_full);
    for (int i = 0; i < N; i++)
        pc_free(ground.arena, blocks[i].at);
    /* All neighbours merged again: all but what empty slabs keep is one block. */
    void *most = pc_malloc(ground.arena, 16 * MIB);
    CHECK(most, "freed blocks did not merge");
    drop_ground(&ground);
}

/* ----------------------------------------------------------------- touching */

static void test_touches_only_what_it_gives(void)
{
    struct ground ground = make_ground(1024 * MIB);
    char *large = pc_calloc(ground.arena, 512, MIB);
    REQUIRE(large);
    CHECK(allocated_bytes(&ground) == 0, "calloc of fresh pages touched %llu bytes",
          (unsigned long long)allocated_bytes(&ground));
    large[100 * MIB] = 1;
    CHECK(allocated_bytes(&ground) == 4096, "one byte");
    char *next = pc_malloc(ground.arena, 5000);
    CHECK(next == large + 512 * MIB, "it does not grow upwards");
    CHECK(pc_arena_used_bytes(ground.arena) == 512 * MIB + 8192, "high-water mark");

    memset(large, 7, 4 * MIB);
    pc_free(ground.arena, large);
    CHECK(allocated_bytes(&ground) == 0, "a freed large block keeps its memory");
    large = pc_calloc(ground.arena, 512, MIB);
    CHECK(large == ground.base && allocated_bytes(&ground) == 0, "punched pages are zeros again");

    /* Growing where it lies: no second copy. */
    char *grown = pc_malloc(ground.arena, MIB);
    for (size_t n = 2; n <= 64; n *= 2) {
        char *at = pc_realloc(ground.arena, grown, n * MIB);
        CHECK(at == grown, "the topmost block moved");
    }
    drop_ground(&ground);
}

static void test_what_was_freed_goes_at_close(void)
{
    struct ground ground = make_ground(16 * MIB);
    char *kept = pc_malloc(ground.arena, 8192), *gone = pc_malloc(ground.arena, 8192);
    char *last = pc_malloc(ground.arena, 4096);
    REQUIRE(kept && gone && last);
    memset(kept, 1, 8192);
    memset(gone, 2, 8192);
    memset(last, 3, 4096);
    pc_free(ground.arena, gone);
    CHECK(allocated_bytes(&ground) == 20480, "small runs are not punched one by one");
    OK(pc_arena_close(ground.arena));
    CHECK(allocated_bytes(&ground) == 12288, "freed blocks are part of what was built");
    CHECK(kept[8191] == 1 && last[0] == 3, "what is in use is gone");
    drop_ground(&ground);
}

static void test_full(void)
{
    struct ground ground = make_ground(MIB);
    errno = 0;
    CHECK(!pc_malloc(ground.arena, MIB + 1) && errno == ENOMEM, "more than there is");
    CHECK(!pc_malloc(ground.arena, SIZE_MAX) && !pc_calloc(ground.arena, SIZE_MAX / 2, 3), "overflow");
    CHECK(!pc_aligned_alloc(ground.arena, 48, 10) && errno == EINVAL, "48 is no power of two");
    CHECK(!pc_aligned_alloc(ground.arena, (size_t)1 << 40, 10) && errno == ENOMEM, "alignment");
    char *all = pc_malloc(ground.arena, MIB);
    REQUIRE(all);
    memset(all, 1, MIB);
    errno = 0;
    CHECK(!pc_malloc(ground.arena, 1) && errno == ENOMEM, "full");
    CHECK(!pc_realloc(ground.arena, all, MIB + 1) && all[MIB - 1] == 1, "a realloc that fails");
    CHECK(pc_realloc(ground.arena, all, 4096) == all, "shrinking");
    CHECK(pc_malloc(ground.arena, MIB - 8192), "what was cut off");
    drop_ground(&ground);

    /* What empty slabs keep is given when nothing else is left. */
    ground = make_ground(MIB);
    for (size_t n = 16; n <= 2048; n *= 2)
        pc_free(ground.arena, pc_malloc(ground.arena, n));
    CHECK(pc_malloc(ground.arena, MIB), "empty slabs are in the way");
    drop_ground(&ground);
}

/* -------------------------------------------------------------------- ends */

static void test_after_close(void)
{
    struct ground ground = make_ground(MIB);
    pc_arena *was = pc_arena_enter(ground.arena);
    CHECK(was == NULL, "a current arena from nowhere");
    unsigned char *a = pc_current_malloc(100), *b = pc_current_malloc(9000);
    CHECK(pc_arena_find(a) == ground.arena && pc_arena_find(b + 8999) == ground.arena, "found");
    CHECK(!pc_arena_find(&ground), "the stack is no arena");
    memset(a, 5, 100);
    memset(b, 6, 9000);
    OK(pc_arena_close(ground.arena));
    OK(mprotect(ground.base, ground.length, PROT_READ));
    CHECK(pc_arena_find(a) == ground.arena, "the range of a closed arena stays known");
    errno = 0;
    CHECK(!pc_malloc(ground.arena, 1) && errno == ENOMEM, "closed");
    pc_free(ground.arena, a);
    unsigned char *outside = pc_current_malloc(10), *moved = pc_current_realloc(b, 20000);
    CHECK(outside && !pc_arena_find(outside), "new blocks come from the process");
    CHECK(moved && !pc_arena_find(moved) && is_all(moved, 9000, 6), "moved out");
    pc_current_free(outside);
    pc_current_free(moved);
    pc_current_free(a); /* again: nothing happens */
    pc_current_free(b);
    CHECK(pc_arena_enter(NULL) == ground.arena, "previous");
    drop_ground(&ground);
}

/* Blocks of the global window are nobody else's, also when nothing is known of them. */
static void test_late_frees_in_the_window(void)
{
    char *at = mmap((void *)(uintptr_t)(PC_WINDOW_BEGIN + (64ull << 30)), MIB, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    REQUIRE(at != MAP_FAILED);
    pc_arena *arena, *second;
    OK(pc_arena_open((uint64_t)(uintptr_t)at, MIB, &arena));
    CHECK(pc_arena_open((uint64_t)(uintptr_t)at + 4096, 4096, &second) == PC_ERR_EXISTS, "overlap");
    CHECK(pc_arena_open((uint64_t)(uintptr_t)at + 5, 8192, &second) == PC_ERR_RANGE, "unaligned");
    void *block = pc_malloc(arena, 100);
    OK(pc_arena_close(arena));
    OK(pc_arena_drop(arena));
    munmap(at, MIB);
    pc_current_free(block);
    CHECK(!pc_arena_find(block), "dropped");
    errno = 0;
    CHECK(!pc_current_realloc(block, 10) && errno == ENOMEM, "nothing left to copy");
    free(pc_current_malloc(10));
}

static void test_fork(void)
{
    struct ground ground = make_ground(MIB);
    void *block = pc_malloc(ground.arena, 100);
    (void)pc_arena_enter(ground.arena);
    pid_t child = fork();
    if (child == 0) {
        void *mine = pc_current_malloc(10);
        pc_current_free(block);
        _exit(mine && !pc_arena_find(mine) && !pc_malloc(ground.arena, 1) ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0, "the child: status %x", (unsigned)status);
    CHECK(pc_arena_find(pc_current_malloc(10)), "the parent goes on");
    (void)pc_arena_enter(NULL);
    drop_ground(&ground);
}


static void test_bad_frees(void)
{
    pid_t child = fork();
    if (child == 0) {
        (void)close(STDERR_FILENO);
        struct ground ground = make_ground(MIB);
        char *block = pc_malloc(ground.arena, 100);
        pc_free(ground.arena, block);
        pc_free(ground.arena, block);
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) != 0, "freed twice, and went on");
    struct ground ground = make_ground(MIB);
    drop_ground(&ground);
}

/* ----------------------------------------------------------------- threads */

static struct ground shared;

static void *hammer(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    struct block blocks[40];
    memset(blocks, 0, sizeof blocks);
    pc_arena *was = pc_arena_enter(seed % 2 ? shared.arena : NULL);
    for (int step = 0; step < 5000; step++) {
        struct block *block = &blocks[rand_r(&seed) % 40];
        if (block->at) {
            if (!is_all(block->at, block->n_bytes, block->fill))
                return argument;
            pc_current_free(block->at);
            block->at = NULL;
        } else {
            block->n_bytes = 1 + some_size(&seed) % 20000;
            block->at = pc_current_malloc(block->n_bytes);
            if (!block->at || (pc_arena_find(block->at) != NULL) != ((uintptr_t)argument % 2 != 0))
                return argument;
            fill(block, (unsigned char)seed);
        }
    }
    for (int i = 0; i < 40; i++)
        pc_current_free(blocks[i].at);
    (void)pc_arena_enter(was);
    return NULL;
}

static void test_threads(void)
{
    shared = make_ground(64 * MIB);
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, hammer, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) {
        void *bad = NULL;
        pthread_join(threads[i], &bad);
        CHECK(!bad, "thread %d", i);
    }
    drop_ground(&shared);
}

int main(void)
{
    for (unsigned seed = 1; seed <= 4 && !hunts_races(); seed++)
        test_model(seed);
    test_touches_only_what_it_gives();
    test_what_was_freed_goes_at_close();
    test_full();
    test_after_close();
    test_late_frees_in_the_window();
    test_fork();
    test_bad_frees();
    test_threads();
    return test_result();
}
