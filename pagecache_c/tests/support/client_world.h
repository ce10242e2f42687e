/* client_world.h - what the client's tests share: a fake server and a spare, processes that are
 * expected to die, and reads of mapped words that no sanitizer looks at. */
#ifndef PC_TESTS_CLIENT_WORLD_H
#define PC_TESTS_CLIENT_WORLD_H

#include "tests/support/check.h"
#include "tests/support/fake_server.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define MS ((uint64_t)1000000)
#define SECOND (1000 * MS)
#define BASE ((uint64_t)PC_WINDOW_BEGIN)
#define BIG_BASE (BASE + ((uint64_t)1 << 32))
#define ANY ((uint64_t)5)       /* a version */
#define LENGTH ((uint64_t)8 << 20)
#define BLOCKS (LENGTH >> PC_BLOCK_SHIFT)
/* 1 TiB, or what fits a build whose window is smaller (see SAN_FLAGS_tsan in the Makefile). */
#define WINDOW_BYTES ((uint64_t)PC_WINDOW_END - (uint64_t)PC_WINDOW_BEGIN)
#define BIG_LENGTH (WINDOW_BYTES > (uint64_t)2 << 40 ? (uint64_t)1 << 40 : (uint64_t)1 << 38)
#define BIG_MIDDLE (BIG_LENGTH >> 13) /* a block */
enum { PAGED = 1, WHOLE = 2, BIG = 3, MADE = 4 };
#define MADE_BASE (BASE + ((uint64_t)2 << 30))
#define NEWER (ANY + 1)         /* another version of PAGED, */
#define NEWER_CONTENT 21        /* with this pattern */

#if defined(__clang__)
#define RAW __attribute__((noinline, no_sanitize("thread", "address")))
#else
#define RAW __attribute__((noinline, no_sanitize_thread, no_sanitize_address))
#endif

struct world {
    struct fake *fake;
    pid_t server, spare;
    int ready[2], go[2];
    int trap;
    uint64_t reattach_ns;
};

static RAW uint64_t load(uint64_t address)
{
    return *(volatile uint64_t *)(uintptr_t)address;
}
static RAW void store(uint64_t address, uint64_t value)
{
    *(volatile uint64_t *)(uintptr_t)address = value;
}

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

/* Waits, with a deadline, for something that another process or thread does. */
#define EVENTUALLY(condition)                                                                     \
    do {                                                                                          \
        uint64_t until_ = now_ns() + 10 * SECOND;                                                 \
        while (!(condition) && now_ns() < until_)                                                 \
            usleep(1000);                                                                         \
        CHECK((condition), "after 10 s");                                                         \
    } while (0)

#define OK(call)                                                                                  \
    do {                                                                                          \
        int64_t rc_ = (call);                                                                     \
        if (rc_ < 0) {                                                                            \
            fprintf(stderr, "%s:%d: %s: %s: %s\n", __FILE__, __LINE__, #call,                     \
                    pc_strerror((int)rc_), pc_last_message());                                    \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

#define FAILS(call, code, text)                                                                   \
    do {                                                                                          \
        int64_t rc_ = (call);                                                                     \
        CHECK(rc_ == (code), "%s gave %d", #call, (int)rc_);                                      \
        CHECK(strstr(pc_last_message(), (text)), "the message is: %s", pc_last_message());        \
    } while (0)

static inline void world_region(struct world *world, size_t i, uint64_t id, uint64_t base,
                                uint64_t length, bool needs_trap, uint32_t page_blocks)
{
    int fd = memfd_create("region", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)length) == 0);
    world->fake->regions[i] = (struct fake_region){.id = id, .version = ANY, .base = base,
                                                   .length = length, .memfd = fd,
                                                   .needs_trap = needs_trap,
                                                   .page_blocks = page_blocks};
}

static inline void world_make(struct world *world, int trap)
{
    static int n_worlds;
    memset(world, 0, sizeof *world);
    world->trap = trap;
    world->reattach_ns = 10 * SECOND;
    world->fake = mmap(NULL, sizeof *world->fake, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(world->fake != MAP_FAILED);
    snprintf(world->fake->name, sizeof world->fake->name, "clamor-fake-%d-%d", getpid(),
             n_worlds++);
    world_region(world, 0, PAGED, BASE, LENGTH, true, 16);
    world_region(world, 1, WHOLE, BASE + ((uint64_t)1 << 30), LENGTH, false, 1);
    world_region(world, 2, BIG, BIG_BASE, BIG_LENGTH, true, 1);
    world_region(world, 3, MADE, MADE_BASE, LENGTH, false, 1);
    world->fake->regions[3].is_made = true;
    world_region(world, 4, PAGED, BASE, LENGTH, true, 16);
    world->fake->regions[4].version = NEWER;
    world->fake->regions[4].content = NEWER_CONTENT;
    world->fake->layer_memfd = memfd_create("layer", MFD_CLOEXEC);
    for (uint64_t block = 0; block < BLOCKS; block += 2)
        fake_fill(&world->fake->regions[1], block);
    REQUIRE(pipe(world->ready) == 0 && pipe(world->go) == 0);
    pid_t self = getpid(), *pids[2] = {&world->server, &world->spare};
    for (int i = 0; i < 2; i++) {
        *pids[i] = fork();
        REQUIRE(*pids[i] >= 0);
        if (*pids[i] == 0) {
            alarm(0);
            fake_serve(world->fake, world->ready[1], i ? world->go[0] : -1, self);
        }
    }
    char byte;
    REQUIRE(read(world->ready[0], &byte, 1) == 1);
}

static inline void world_kill_server(struct world *world)
{
    kill(world->server, SIGKILL);
    waitpid(world->server, NULL, 0);
    world->fake->live_mappings = 0; /* leases die with their server */
}

static inline void world_start_spare(struct world *world)
{
    char byte = 0;
    REQUIRE(write(world->go[1], &byte, 1) == 1);
    REQUIRE(read(world->ready[0], &byte, 1) == 1);
}

static inline struct pc_client_options world_options(const struct world *world)
{
    return (struct pc_client_options){.socket_name = world->fake->name,
                                      .library_version = "1.2.3", .trap = world->trap,
                                      .connect_timeout_ns = 5 * SECOND,
                                      .reattach_timeout_ns = world->reattach_ns};
}

static inline pc_client *world_client(const struct world *world)
{
    struct pc_client_options options = world_options(world);
    pc_client *client;
    OK(pc_client_open(&options, &client));
    return client;
}

static inline int try_map(const struct world *world, pc_client *client, uint64_t id,
                          uint32_t flags, uint64_t timeout_ns, struct pc_mapping *out)
{
    const struct fake_region *region = &world->fake->regions[id - 1];
    return pc_client_map(client, id, ANY, region->base, region->length, flags, timeout_ns, out);
}

static inline struct pc_mapping world_map_newer(const struct world *world, pc_client *client,
                                                uint32_t flags)
{
    struct pc_mapping mapping;
    const struct fake_region *region = &world->fake->regions[4];
    OK(pc_client_map(client, PAGED, NEWER, region->base, region->length, flags, 30 * SECOND,
                     &mapping));
    return mapping;
}

static inline struct pc_mapping world_map(const struct world *world, pc_client *client,
                                          uint64_t id, uint32_t flags)
{
    struct pc_mapping mapping;
    OK(try_map(world, client, id, flags, 30 * SECOND, &mapping));
    return mapping;
}

/* True: the first, a middle and the last word of the block are what they should be. */
static inline bool block_is_right(const struct pc_mapping *mapping, uint64_t region,
                                  uint64_t block)
{
    const uint64_t words[] = {0, 200, 511};
    for (size_t i = 0; i < 3; i++) {
        uint64_t word = block * 512 + words[i];
        if (load(mapping->address + word * 8) != pattern(region, word))
            return false;
    }
    return true;
}

/* Runs the function in a child, which must end with the status and have said the text. */
static inline void expect_end(struct world *world, void (*victim)(struct world *), int status,
                              const char *text)
{
    int said[2];
    char heard[4096];
    size_t n = 0;
    REQUIRE(pipe(said) == 0);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        dup2(said[1], STDERR_FILENO);
        close(said[0]);
        close(said[1]);
        alarm(20);
        victim(world);
        exit(test_result());
    }
    close(said[1]);
    ssize_t got;
    while (n < sizeof heard - 1 && (got = read(said[0], heard + n, sizeof heard - 1 - n)) > 0)
        n += (size_t)got;
    heard[n] = '\0';
    close(said[0]);
    int how;
    waitpid(pid, &how, 0);
    bool as_expected = status < 0 ? WIFSIGNALED(how) && WTERMSIG(how) == -status
                                  : WIFEXITED(how) && WEXITSTATUS(how) == status;
    CHECK(as_expected, "it ended with wait status %#x and said: %s", (unsigned)how, heard);
    CHECK(strstr(heard, text), "it said: %s", heard);
}

#endif
