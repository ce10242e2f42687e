/* test_history_crash.c - the history's process dies at any moment, and its threads run together.
 *
 * A home here is a few blocks in memory that outlive the process, changed in place as the engine
 * does it: append the old blocks, write the new ones, raise the version. Whatever the moment of
 * death, the next process must find each version whole in the history and the home, or expired.
 */
#include "tests/support/history_world.h"
#include "tests/support/length.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#if defined(__SANITIZE_THREAD__)
#define IS_SLOW 1
#else
#define IS_SLOW 0
#endif

#define N_REGIONS 3u
struct homes {
    _Atomic uint64_t applied[N_REGIONS];
    _Atomic uint64_t n_commits;
    _Atomic uint64_t promised; /* the oldest version of region 1 that is retained */
    _Atomic uint64_t n_broken; /* records of it that expired all the same */
    uint8_t base[N_REGIONS][N_BLOCKS][PC_BLOCK_BYTES];
};
static struct homes *homes;
static struct kept_segments kept;
static char directory[64];

/* ------------------------------------------------------------- the process */

struct notice {
    uint64_t inode, bytes;
    uint32_t is_disk, is_kept;
};
struct server {
    int socket;
    uint64_t n_events, die_at; /* 0: does not die by itself */
};

static void event(struct server *server)
{
    if (++server->n_events == server->die_at)
        raise(SIGKILL);
}

static void send_notice(struct server *server, const struct notice *notice, int fd)
{
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)notice, .iov_len = sizeof *notice};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        packet.msg_control = control.bytes;
        packet.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&packet);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    event(server);
    REQUIRE(sendmsg(server->socket, &packet, MSG_NOSIGNAL) == (ssize_t)sizeof *notice);
    event(server);
}

static void tell_keep(void *arg, int fd, uint64_t inode, uint64_t bytes, bool is_disk)
{
    const struct notice notice = {.inode = inode, .bytes = bytes, .is_disk = is_disk, .is_kept = 1};
    send_notice(arg, &notice, fd);
}

static void tell_drop(void *arg, uint64_t inode)
{
    const struct notice notice = {.inode = inode};
    send_notice(arg, &notice, -1);
}

struct home_read {
    struct server *server;
    uint64_t region;
};

static int read_home(void *arg, uint64_t block, uint64_t n, uint8_t *out)
{
    const struct home_read *from = arg;
    event(from->server);
    memcpy(out, homes->base[from->region][block], n * BLOCK);
    event(from->server);
    return PC_OK;
}

static struct pc__history_options crash_options(void)
{
    return (struct pc__history_options){.memory_bytes = 512 * KIB, .disk_bytes = MIB,
                                        .directory = directory};
}

static void serve(struct server *server, uint64_t seed)
{
    struct pc__history_options options = crash_options();
    options.arg = server;
    options.keep = tell_keep;
    options.drop = tell_drop;
    struct pc__history *history = reopen_history(&options, &kept, seed);
    for (;; seed++) {
        const uint64_t region = mix(seed) % N_REGIONS, applied = homes->applied[region];
        if (homes->applied[1] % 8 == 0) /* what is retained takes less than half of the budgets */
            homes->promised = homes->applied[1];
        CHECK(pc__history_retain(history, 1, homes->promised) == PC_OK, "%s", pc_last_message());
        struct pc_run runs[N_BLOCKS];
        struct home_read from = {.server = server, .region = region};
        const uint64_t bits = written_by(region, applied + 1);
        const size_t n = runs_of(bits, runs);
        /* An append skips too, now and then: where the budgets are full of what is retained. */
        const int rc = region == 0 && applied % 16 == 7
                           ? pc__history_skip(history, region, applied)
                           : pc__history_append(history, region, applied, runs, n, read_home, &from);
        CHECK(rc == PC_OK, "%d: %s", rc, pc_last_message());
        for (uint64_t b = 0; b < N_BLOCKS; b++)
            if (bits >> b & 1) {
                fill_block(region, b, applied + 1, homes->base[region][b]);
                event(server);
            }
        homes->applied[region] = applied + 1;
        homes->n_commits++;
        struct pc__history_stats stats;
        pc__history_stats(history, &stats);
        homes->n_broken += stats.retained_expired;
        if (n_check_failures > 0)
            _exit(1);
    }
}

/* Takes one notice; false at the end. */
static bool hear_notice(int socket)
{
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct notice notice;
    struct iovec part = {.iov_base = &notice, .iov_len = sizeof notice};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    const ssize_t got = recvmsg(socket, &packet, MSG_CMSG_CLOEXEC);
    if (got <= 0)
        return false;
    REQUIRE(got == (ssize_t)sizeof notice);
    if (!notice.is_kept) {
        drop_segment(&kept, notice.inode);
        return true;
    }
    const struct cmsghdr *rights = CMSG_FIRSTHDR(&packet);
    int fd;
    REQUIRE(rights != NULL);
    memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    add_kept(&kept, fd, notice.inode, notice.bytes, notice.is_disk);
    return true;
}

/* Runs a server until it is killed, hearing what it says. */
static void run_and_kill(uint64_t seed)
{
    int sockets[2];
    const bool dies_itself = seed % 2 == 0;
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(sockets[0]);
        struct server server = {.socket = sockets[1],
                                .die_at = dies_itself ? 1 + mix(seed) % 1500 : 0};
        serve(&server, mix(seed));
        _exit(1);
    }
    close(sockets[1]);
    const uint64_t kill_at_ns = clock_ns() + (dies_itself ? 20000000000ull
                                                          : mix(seed) % 15000000 *
                                                                (1 + 3 * IS_SLOW));
    struct pollfd poll_fd = {.fd = sockets[0], .events = POLLIN};
    for (;;) {
        const uint64_t now = clock_ns();
        const int left_ms = now < kill_at_ns ? (int)((kill_at_ns - now) / 1000000) : 0;
        if (now >= kill_at_ns || (poll(&poll_fd, 1, left_ms) == 1 && !hear_notice(sockets[0])))
            break;
    }
    kill(pid, SIGKILL);
    while (hear_notice(sockets[0]))
        continue;
    int status;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it ended with %x by itself", status);
    close(sockets[0]);
}

struct found {
    uint64_t readable, unfinished, twice;
};

/* Every version from the floor on is whole, in the history and the home together. */
static void check_after_death(uint64_t seed, struct found *found)
{
    struct pc__history_options options = crash_options();
    options.arg = &kept;
    options.keep = keep_segment;
    options.drop = drop_segment;
    const size_t n_kept = kept.n;
    struct pc__history *history = reopen_history(&options, &kept, seed);
    struct pc__history_stats stats;
    pc__history_stats(history, &stats);
    CHECK(stats.segments == kept.n, "%lu, %zu kept", stats.segments, kept.n);
    found->twice += kept.n < n_kept;
    for (uint64_t region = 0; region < N_REGIONS; region++) {
        const uint64_t applied = homes->applied[region];
        const bool is_begun = pc__history_noted(history, region, applied); /* with its blocks, or skipped */
        const uint64_t before = is_begun ? applied + 1 : applied;
        const uint64_t floor = pc__history_floor(history, region, before);
        found->unfinished += is_begun;
        found->readable += before - floor;
        CHECK(!pc__history_has(history, region, applied + 1), "from the future");
        CHECK(region != 1 || homes->n_broken > 0 || floor <= homes->promised,
              "seed %lu: version %lu was retained, %lu is the oldest", seed, homes->promised,
              floor);
        for (uint64_t v = floor; v <= applied; v++)
            for (uint64_t b = 0; b < N_BLOCKS; b++) {
                uint8_t bytes[PC_BLOCK_BYTES];
                const int rc = pc__history_read(history, region, v, before, b, bytes);
                CHECK(rc == 0 || rc == 1, "%d: %s", rc, pc_last_message());
                CHECK(is_block(region, b, last_writer(region, v, b),
                               rc == 1 ? bytes : homes->base[region][b]),
                      "seed %lu region %lu version %lu of %lu block %lu: %s", seed, region, v,
                      before, b, rc == 1 ? "from the history" : "from the home");
                if (n_check_failures > 20)
                    exit(1);
            }
    }
    pc__history_close(history);
}

static void test_killed(void)
{
    const size_t n_before = count_descriptors();
    struct found found = {0};
    const uint64_t n_rounds = IS_SLOW ? 60 : 200;
    homes = mmap(NULL, sizeof *homes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(homes != MAP_FAILED);
    for (uint64_t r = 0; r < N_REGIONS; r++)
        for (uint64_t b = 0; b < N_BLOCKS; b++)
            fill_block(r, b, 0, homes->base[r][b]);
    for (uint64_t seed = 0; seed < n_rounds; seed++) {
        run_and_kill(seed);
        check_after_death(seed, &found);
    }
    printf("%lu deaths over %lu commits: %lu versions read back, %lu commits under way, "
           "%lu times a segment was kept twice or empty\n", n_rounds, homes->n_commits,
           found.readable, found.unfinished, found.twice);
    CHECK(homes->n_commits > n_rounds, "%lu", homes->n_commits);
    CHECK(found.readable > 5 * n_rounds, "old versions outlive the process: %lu", found.readable);
    CHECK(found.unfinished > 0, "no death between record and version");
    CHECK(homes->n_broken == 0, "the budgets hold what is retained: %lu", homes->n_broken);
    CHECK(kept.n_disk_ever > 0, "nothing was spilled");
    drop_all_kept(&kept);
    munmap(homes, sizeof *homes);
    CHECK(count_descriptors() == n_before, "%zu descriptors, %zu before", count_descriptors(),
          n_before);
}

/* --------------------------------------------------------------- nonsense */

static void count_drop(void *arg, uint64_t inode)
{
    (void)inode;
    ++*(size_t *)arg;
}

static int memfd_of(const void *bytes, size_t n_bytes)
{
    const int fd = memfd_create("nonsense", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && write(fd, bytes, n_bytes) == (ssize_t)n_bytes);
    return fd;
}

static void test_nonsense(void)
{
    const size_t n_before = count_descriptors();
    struct pc__history_options options = options_for(&kept, 16 * MIB, 0, NULL);
    struct pc__history *history = open_history(&options);
    for (uint64_t v = 0; v < 100; v++)
        CHECK(append_pure(history, 1 + v % 2, v / 2) == PC_OK, "%s", pc_last_message());
    REQUIRE(kept.n == 1);
    const size_t n_bytes = kept.all[0].bytes;
    uint8_t *good = malloc(n_bytes), *bad = malloc(n_bytes);
    REQUIRE(good && bad && pread(kept.all[0].fd, good, n_bytes, 0) == (ssize_t)n_bytes);
    pc__history_close(history);

    size_t n_dropped = 0;
    const struct pc__history_options deaf = {.memory_bytes = 16 * MIB, .arg = &n_dropped,
                                             .drop = count_drop};
    history = open_history(&deaf);
    int pipes[2];
    REQUIRE(pipe2(pipes, O_CLOEXEC) == 0);
    memset(bad, 0x5a, n_bytes);
    CHECK(pc__history_adopt(history, pipes[0]) == PC_ERR_PROTOCOL, "a pipe");
    CHECK(pc__history_adopt(history, memfd_of(bad, 0)) == PC_ERR_PROTOCOL, "empty");
    CHECK(pc__history_adopt(history, memfd_of(bad, 8192)) == PC_ERR_PROTOCOL, "no head");
    CHECK(pc__history_adopt(history, memfd_of(good, 8192)) == PC_ERR_PROTOCOL, "cut off");
    CHECK(n_dropped == 4, "%zu", n_dropped);
    CHECK(pc__history_adopt(history, memfd_of(good, n_bytes)) == PC_OK, "%s", pc_last_message());
    CHECK(pc__history_adopted(history) == PC_OK, "%s", pc_last_message());
    check_region(history, 1, 50);
    check_region(history, 2, 50);
    CHECK(pc__history_floor(history, 1, 50) == 0, "the good one is there");
    pc__history_close(history);
    close(pipes[1]);

    /* Heads with bits turned over: it says what it likes, and stays in its bytes. */
    uint64_t n_lost = 0;
    for (uint64_t seed = 0; seed < 300; seed++) {
        uint8_t block[PC_BLOCK_BYTES];
        memcpy(bad, good, n_bytes);
        for (uint64_t i = 0; i <= seed % 3; i++)
            bad[mix(seed * 5 + i) % 4096] ^= (uint8_t)(1u << mix(seed * 7 + i) % 8);
        history = open_history(&deaf);
        if (pc__history_adopt(history, memfd_of(bad, n_bytes)) == PC_OK) {
            CHECK(pc__history_adopted(history) == PC_OK, "%s", pc_last_message());
            for (uint64_t v = pc__history_floor(history, 1, 50); v < 50; v++)
                for (uint64_t b = 0; b < N_BLOCKS; b++)
                    (void)pc__history_read(history, 1, v, 50, b, block);
        }
        n_lost += pc__history_floor(history, 1, 50) > 0 || pc__history_floor(history, 2, 50) > 0;
        pc__history_close(history);
    }
    CHECK(n_lost > 100, "turned bits were seen %lu times", n_lost);
    free(good);
    free(bad);
    drop_all_kept(&kept);
    CHECK(count_descriptors() == n_before, "%zu descriptors, %zu before", count_descriptors(),
          n_before);
}

/* ---------------------------------------------------------------- threads */

static struct pc__history *shared;
static _Atomic uint64_t shared_applied[N_REGIONS];
static _Atomic bool is_over;
static _Atomic uint64_t n_hits, n_expired_reads;

static void *read_all_the_time(void *arg)
{
    const uint64_t me = (uint64_t)(uintptr_t)arg;
    for (uint64_t seed = me << 32; !atomic_load(&is_over); seed++) {
        const uint64_t region = mix(seed) % N_REGIONS;
        const uint64_t before = atomic_load(&shared_applied[region]);
        const uint64_t floor = pc__history_floor(shared, region, before);
        const uint64_t version = floor + mix(seed + 1) % (before - floor + 1);
        uint64_t block = mix(seed + 2) % N_BLOCKS;
        const int rc = seed % 2 == 0 ? PC_OK
                                     : pc__history_next(shared, region, version, before, block,
                                                        N_BLOCKS, &block);
        if (rc != PC_OK || block == N_BLOCKS)
            continue;
        uint8_t bytes[PC_BLOCK_BYTES];
        const int got = pc__history_read(shared, region, version, before, block, bytes);
        const uint64_t writer = last_writer(region, version, block);
        /* No CHECK off the main thread: its counter is not atomic. */
        REQUIRE(got == 1 || got == 0 || got == PC_ERR_EXPIRED);
        REQUIRE(got != 1 || is_block(region, block, writer, bytes));
        REQUIRE(got != 0 || last_writer(region, before, block) == writer);
        uint8_t many[8][PC_BLOCK_BYTES];
        uint64_t found = 0;
        int64_t n = 0;
        if (seed % 8 == 0)
            n = pc__history_read_many(shared, region, version, before, block, 8, many[0], &found);
        REQUIRE(n >= 0 || n == PC_ERR_EXPIRED);
        for (uint64_t i = 0; n > 0 && i < 8; i++)
            REQUIRE(!(found >> i & 1) ||
                    is_block(region, block + i, last_writer(region, version, block + i), many[i]));
        n_hits += got == 1;
        n_expired_reads += got < 0;
    }
    return NULL;
}

static void *forget_now_and_then(void *arg)
{
    (void)arg;
    while (!atomic_load(&is_over)) {
        const struct timespec pause = {.tv_nsec = 3000000};
        struct pc__history_stats stats;
        nanosleep(&pause, NULL);
        pc__history_forget(shared, N_REGIONS - 1); /* the others live on */
        pc__history_stats(shared, &stats);
        REQUIRE(stats.memory_bytes <= 400 * KIB && stats.disk_bytes <= MIB);
    }
    return NULL;
}

/* The keeper of this test is the callbacks' own: forget calls them from its thread. */
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static void keep_locked(void *arg, int fd, uint64_t inode, uint64_t bytes, bool is_disk)
{
    pthread_mutex_lock(&kept_lock);
    keep_segment(arg, fd, inode, bytes, is_disk);
    pthread_mutex_unlock(&kept_lock);
}
static void drop_locked(void *arg, uint64_t inode)
{
    pthread_mutex_lock(&kept_lock);
    drop_segment(arg, inode);
    pthread_mutex_unlock(&kept_lock);
}

static void test_threads(void)
{
    struct pc__history_options options = options_for(&kept, 400 * KIB, MIB, directory);
    options.keep = keep_locked;
    options.drop = drop_locked;
    pthread_t threads[4];
    kept.n_disk_ever = 0;
    shared = open_history(&options);
    for (uint64_t i = 0; i < 3; i++)
        REQUIRE(pthread_create(&threads[i], NULL, read_all_the_time, (void *)(uintptr_t)i) == 0);
    REQUIRE(pthread_create(&threads[3], NULL, forget_now_and_then, NULL) == 0);
    const uint64_t end_ns = clock_ns() + 120000000000ull;
    const uint64_t most = hunts_races() ? 1000 : 4000;
    uint64_t n_commits = 0;
    while (clock_ns() < end_ns && (n_commits < most || n_hits < 2000)) {
        const uint64_t region = n_commits++ % N_REGIONS;
        const uint64_t applied = atomic_load(&shared_applied[region]);
        CHECK(append_pure(shared, region, applied) == PC_OK, "%s", pc_last_message());
        atomic_store(&shared_applied[region], applied + 1);
    }
    atomic_store(&is_over, true);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf("%lu commits, %lu blocks read, %lu had just expired, %lu spilled\n", n_commits, n_hits,
           n_expired_reads, kept.n_disk_ever);
    CHECK(n_commits >= most && n_hits >= 2000 && kept.n_disk_ever > 50, "too few to say anything");
    for (uint64_t r = 0; r < N_REGIONS; r++)
        check_region(shared, r, atomic_load(&shared_applied[r]));
    for (uint64_t r = 0; r < N_REGIONS; r++)
        pc__history_forget(shared, r);
    CHECK(kept.n <= 1, "the one that is appended to, if any: %zu", kept.n);
    pc__history_close(shared);
    drop_all_kept(&kept);
}

int main(void)
{
    snprintf(directory, sizeof directory, "build/history-%d", (int)getpid());
    REQUIRE(mkdir(directory, 0700) == 0);
    if (!hunts_races()) { /* one thread each */
        test_nonsense();
        test_killed();
    }
    test_threads();
    CHECK(rmdir(directory) == 0, "%s", strerror(errno));
    return test_result();
}
