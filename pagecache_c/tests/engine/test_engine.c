/* test_engine.c - engines and clients together, over both traps. */
#include "tests/support/commit.h"
#include "tests/support/harness.h"
#include "tests/support/length.h"

#include "engine/miss/miss.h"

#include <fcntl.h>
#include <sys/mman.h>

#define MIB ((uint64_t)1 << 20)

/* Large copies fill holes past the file's lock; blocks that are there, and ends, go another way. */
static void test_copy_in(int threads)
{
    const uint64_t n = 40 * MIB + 1000;
    uint8_t *source = malloc(n), *back = malloc(n + 8192);
    fill_pattern((uint64_t *)(void *)source, 9, 0, n);
    static const uint64_t offsets[] = {0, 4096, 777};
    for (size_t i = 0; i < 3; i++) {
        int fd = memfd_create("copy", MFD_CLOEXEC);
        CHECK(!ftruncate(fd, (off_t)(n + 8192)));
        CHECK(pwrite(fd, "there", 5, 5 * (off_t)MIB + 50) == 5);
        OK(pc_copy_in(fd, offsets[i], source, n, threads));
        CHECK(pread(fd, back, n + 8192, 0) == (ssize_t)(n + 8192));
        CHECK(!memcmp(back + offsets[i], source, n));
        for (uint64_t o = 0; o < n + 8192; o++)
            CHECK((o >= offsets[i] && o < offsets[i] + n) || back[o] == 0);
        close(fd);
    }
    free(source);
    free(back);
}

static struct pc_mapping map(pc_client *client, const struct pc_region_info *info, uint32_t flags)
{
    struct pc_mapping m;
    OK(pc_client_map(client, info->region, info->version, info->base_address, info->length_bytes,
                     flags, 30 * SECOND, &m));
    return m;
}

static void check_all(const struct pc_mapping *m, const struct pc_region_info *info,
                      uint64_t data_from)
{
    for (uint64_t o = 0; o < info->length_bytes; o += 8)
        if (at(m, o) != (o >= data_from ? pattern(info->region, o) : 0)) {
            fprintf(stderr, "wrong at offset %llu\n", (unsigned long long)o);
            FAIL("not the bytes that were put");
        }
}

static void test_whole_region(int trap)
{
    struct cluster *c = cluster_start(2, "whole");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 24 * MIB + 4096, 3 * MIB);
    struct pc_mapping m = map(far, &info, 0);
    check_all(&m, &info, 3 * MIB);
    struct pc_engine_stats stats = stats_of(&c->servers[1]);
    CHECK(stats.blocks_fetched == (21 * MIB + 4096) / 4096); /* each block crossed once */
    CHECK(stats.zero_blocks == 3 * MIB / 4096);
    for (uint64_t until = now_ns() + 5 * SECOND; stats.fetches_in_flight;) {
        CHECK(now_ns() < until); /* the last fetch is struck off after its blocks are shown */
        stats = stats_of(&c->servers[1]);
    }
    CHECK(stats.faults_waiting == 0);
    CHECK(stats.bytes_received < 21 * MIB + 4096 + 200000);
    OK(pc_client_unmap(far, m.id));
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

static void test_home_reads_without_faults(int trap)
{
    struct cluster *c = cluster_start(1, "home");
    pc_client *home = attach(&c->servers[0], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 2 * MIB, MIB);
    struct pc_mapping m = map(home, &info, 0);
    check_all(&m, &info, MIB);
    CHECK(stats_of(&c->servers[0]).faults == 0);
    pc_client_close(home);
    cluster_stop(c);
}

static void test_scattered_reads(int trap)
{
    struct cluster *c = cluster_start(2, "scatter");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 64 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    unsigned seed = 7;
    for (int i = 0; i < 500; i++) {
        uint64_t block = (uint64_t)rand_r(&seed) % (64 * MIB / 4096);
        CHECK(at(&m, block * 4096 + 8) == pattern(1, block * 4096 + 8));
    }
    /* Scattered touches shrink the page: not many times what was touched has crossed. */
    CHECK(stats_of(&c->servers[1]).blocks_fetched < 500 * 3);
    /* All of it by faults: each of these blocks is asked for once, and touched or not. */
    struct pc_region_stats region = region_of(&c->servers[1], 1);
    CHECK(region.fault_fetched_blocks == region.present_blocks);
    CHECK(region.fault_touched_blocks >= 400 && region.fault_touched_blocks <= 550);
    CHECK(4 * region.fault_fetched_blocks <= 4 * 24 + 7 * region.fault_touched_blocks);
    CHECK(region.reads == 1 && region.home_bytes == 0); /* it was opened once */
    CHECK(stats_of(&c->servers[1]).opens == 1);
    region = region_of(&c->servers[0], 1);
    CHECK(region.reads >= 100 && region.idle_ns > 0 && region.idle_ns < 600 * SECOND);
    CHECK((MEDIUM == PC_MEDIUM_DISK ? region.disk_bytes : region.home_bytes) == 64 * MIB);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

/* Two pieces, at adjacent addresses: who reads the first one to its end will read the second. */
static void test_a_scan_goes_on_in_the_next_piece(int trap)
{
    struct cluster *c = cluster_start(2, "pieces");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info[2];
    struct pc_mapping m[2];
    uint64_t *data = malloc(8 * MIB);
    for (uint64_t i = 0; i < 2; i++) {
        info[i] = (struct pc_region_info){.region = 7 + i, .length_bytes = 8 * MIB,
                                          .base_address = PC_WINDOW_BEGIN + i * 8 * MIB};
        int fd = -1;
        OK(pc_client_create(home, info[i].region, info[i].base_address, 8 * MIB, MEDIUM, WAIT, &fd));
        fill_pattern(data, info[i].region, 0, 8 * MIB);
        OK(pc_copy_in(fd, 0, data, 8 * MIB, 1));
        close(fd);
        OK(pc_client_seal(home, info[i].region, WAIT));
        publish(c, info[i], c->servers[0].id);
        m[i] = map(far, &info[i], 0);
    }
    free(data);
    check_all(&m[0], &info[0], 0);
    SOON(region_of(&c->servers[1], 8).present_blocks > 0);
    CHECK(region_of(&c->servers[1], 8).present_blocks <= 512);
    check_all(&m[1], &info[1], 0); /* how often it waits depends on how fast the disk and the reader are */
    for (int i = 0; i < 2; i++)
        OK(pc_client_unmap(far, m[i].id));
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

static void test_prefetch(int trap)
{
    struct cluster *c = cluster_start(2, "prefetch");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 64 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    enum { N = 3000 };
    struct pc_run runs[N];
    bool asked[64 * MIB / 4096] = {0};
    unsigned seed = 3;
    uint64_t distinct = 0;
    for (int i = 0; i < N; i++) {
        runs[i] = (struct pc_run){(uint64_t)rand_r(&seed) % (64 * MIB / 4096), 1};
        distinct += !asked[runs[i].first_block];
        asked[runs[i].first_block] = true;
    }
    OK(pc_client_prefetch(far, m.id, runs, N, 1, 30 * SECOND));
    struct pc_engine_stats stats = stats_of(&c->servers[1]);
    CHECK(stats.blocks_fetched == distinct && stats.prefetched_blocks == distinct);
    CHECK(stats.bytes_received < distinct * 4096 * 11 / 10);
    /* Full requests, all under way at once, but for the last of each message to the page server. */
    CHECK(stats.fetch_requests <= distinct / PC__REQUEST_BLOCKS + N / PC__CTL_MAX_RUNS + 1);
    for (int i = 0; i < N; i++)
        CHECK(at(&m, runs[i].first_block * 4096) == pattern(1, runs[i].first_block * 4096));
    CHECK(stats_of(&c->servers[1]).faults == 0);
    struct pc_run outside = {64 * MIB / 4096, 1};
    CHECK(pc_client_prefetch(far, m.id, &outside, 1, 1, SECOND) == PC_ERR_RANGE);
    struct pc_run all = {0, 64 * MIB / 4096};
    OK(pc_client_prefetch(far, m.id, &all, 1, 1, 20 * 30 * SECOND));
    CHECK(stats_of(&c->servers[1]).blocks_fetched == 64 * MIB / 4096);
    check_all(&m, &info, 0);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

/* What a round trip costs is measured, and faults are told. */
static void test_far_home(int trap)
{
    struct cluster *c = cluster_start(2, "far");
    c->servers[0].is_far = true;
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 64 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    CHECK(region_of(&c->servers[1], 1).fault_trip_blocks == 0);
    CHECK(at(&m, 8) == pattern(1, 8));
    CHECK(region_of(&c->servers[1], 1).fault_trip_blocks == PC__TRIP_BLOCKS);
    for (uint64_t i = 1; i < 60; i++) {
        const struct pc_run run = {i * 128, i % 2 ? 1 : 64};
        OK(pc_client_prefetch(far, m.id, &run, 1, 1, 30 * SECOND));
    }
    CHECK(at(&m, 60 * MIB) == pattern(1, 60 * MIB));
    CHECK(region_of(&c->servers[1], 1).fault_trip_blocks > 2 * PC__TRIP_BLOCKS);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

struct reader {
    const struct pc_mapping *m;
    unsigned seed;
    uint64_t blocks;
};
static void *read_some(void *arg)
{
    struct reader *r = arg;
    for (int i = 0; i < 2000; i++) {
        uint64_t offset = (uint64_t)rand_r(&r->seed) % r->blocks * 4096 + 16;
        CHECK(at(r->m, offset) == pattern(1, offset));
    }
    return NULL;
}

static void test_threads(int trap)
{
    struct cluster *c = cluster_start(2, "threads");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 16 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    pthread_t threads[6];
    struct reader readers[6];
    for (unsigned i = 0; i < 6; i++) {
        readers[i] = (struct reader){&m, i / 2, info.length_bytes / 4096}; /* two on each path */
        CHECK(!pthread_create(&threads[i], NULL, read_some, &readers[i]));
    }
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    CHECK(stats_of(&c->servers[1]).blocks_fetched <= 16 * MIB / 4096); /* none twice */
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

static void test_breaking_connections(int trap)
{
    struct cluster *c = cluster_start(2, "flaky");
    c->servers[0].flaky = true;
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 8 * MIB, MIB);
    struct pc_mapping m = map(far, &info, 0);
    check_all(&m, &info, MIB);
    CHECK(stats_of(&c->servers[1]).fetch_retries > 0);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

static void test_home_lost(int trap)
{
    struct cluster *c = cluster_start(2, "lost");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 8 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    struct pc_run first = {0, 4}, second = {100, 4};
    OK(pc_client_prefetch(far, m.id, &first, 1, 1, 30 * SECOND));
    pc_client_close(home);
    c->servers[0].lost = true;
    server_stop(c, 0);
    CHECK(at(&m, 4096) == pattern(1, 4096)); /* what is here stays */
    CHECK(pc_client_prefetch(far, m.id, &second, 1, 1, 5 * SECOND) == PC_ERR_HOME_LOST);
    fflush(NULL);
    pid_t child = fork(); /* a fault on it ends the process, with a message */
    if (!child) {
        alarm(20);
        int devnull = open("/dev/null", O_WRONLY);
        dup2(devnull, 2);
        munmap((void *)(uintptr_t)m.address, m.length_bytes); /* the guard of the parent's map */
        pc_client *again = attach(&c->servers[1], trap);
        struct pc_mapping n = map(again, &info, 0);
        (void)at(&n, 200 * 4096);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 70);
    pc_client_close(far);
    cluster_stop(c);
}

static void test_shared_segments(int trap)
{
    struct cluster *c = cluster_start(2, "shared");
    uint64_t length = 4 * MIB;
    uint64_t *foreign = malloc(2 * MIB);
    struct pc_region_info info = {.region = 1, .base_address = PC_WINDOW_BEGIN,
                                  .length_bytes = length};
    fill_pattern(foreign, 1, MIB + 512, 2 * MIB); /* starts in the middle of a block */
    struct pc_segment segment = {MIB + 512, 2 * MIB - 1024, (uint64_t)(uintptr_t)foreign};
    int fd = -1;
    OK(pc_engine_create_shared(c->servers[0].engine, &info, &segment, 1, &fd));
    uint64_t head[1024];
    fill_pattern(head, 1, 0, sizeof head);
    OK(pc_copy_in(fd, 0, head, sizeof head, 1));
    close(fd);
    OK(pc_engine_seal(c->servers[0].engine, 1));
    publish(c, info, c->servers[0].id);
    for (int i = 0; i < 2; i++) { /* far, and at the home itself */
        pc_client *client = attach(&c->servers[1 - i], trap);
        struct pc_mapping m = map(client, &info, 0);
        for (uint64_t o = 0; o < length; o += 8) {
            bool there = o < sizeof head || (o >= segment.offset_bytes &&
                                             o < segment.offset_bytes + segment.length_bytes);
            CHECK(at(&m, o) == (there ? pattern(1, o) : 0));
        }
        pc_client_close(client);
    }
    cluster_stop(c);
    free(foreign);
}

static void wait_for(_Atomic int *counter, int value)
{
    uint64_t until = now_ns() + 5 * SECOND;
    while (*counter < value) {
        CHECK(now_ns() < until);
        usleep(1000); /* polling a counter that another thread raises */
    }
}

static void test_retire(int trap)
{
    struct cluster *c = cluster_start(2, "retire");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    CHECK(at(&m, 0) == pattern(1, 0));
    OK(pc_engine_retire(c->servers[1].engine, 1, 0));
    OK(pc_engine_retire(c->servers[0].engine, 1, 0));
    c->n_regions = 0;
    CHECK(at(&m, MIB - 8) == pattern(1, MIB - 8)); /* a lease outlives the free */
    struct pc_mapping other;
    CHECK(pc_client_map(home, 1, 0, info.base_address, MIB, PC_MAP_PRIVATE, SECOND, &other) ==
          PC_ERR_NO_REGION);
    CHECK(c->servers[1].idle_events == 0);
    OK(pc_client_unmap(far, m.id));
    wait_for(&c->servers[1].idle_events, 1);
    OK(pc_engine_retire(c->servers[0].engine, 1, 1));
    CHECK(stats_of(&c->servers[0]).regions == 0 && stats_of(&c->servers[1]).regions == 0);
    CHECK(pc_client_map(far, 1, 0, info.base_address, MIB, 0, SECOND, &other) ==
          PC_ERR_NO_REGION);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

static void test_many_regions(int trap)
{
    struct cluster *c = cluster_start(2, "many");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    enum { N = 1000 };
    static struct pc_mapping maps[N];
    struct pc_region_info info[N];
    for (uint64_t i = 0; i < N; i++) {
        info[i] = build(c, &c->servers[0], home, i + 1, 16 * 4096, 0);
        maps[i] = map(far, &info[i], 0);
    }
    for (uint64_t i = 0; i < N; i++)
        CHECK(at(&maps[i], 8 * (i % 8192)) == pattern(i + 1, 8 * (i % 8192)));
    for (uint64_t i = 0; i < N; i++)
        OK(pc_client_unmap(far, maps[i].id));
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

/* Dead workers leave nothing: processes that die while they fault. */
static void test_dead_workers(int trap)
{
    struct cluster *c = cluster_start(2, "dead");
    pc_client *home = attach(&c->servers[0], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 64 * MIB, 0);
    const int most = (int)rounds_of(80, 200);
    for (int i = 0; i < most; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (!child) {
            pc_client *far = attach(&c->servers[1], trap);
            struct pc_mapping m = map(far, &info, 0);
            for (uint64_t b = (uint64_t)i;; b = (b * 31 + 7) % (64 * MIB / 4096))
                (void)at(&m, b * 4096);
        }
        usleep(1000u * (unsigned)(i % 7)); /* so that it dies in different places */
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    uint64_t until = now_ns() + 10 * SECOND;
    struct pc_engine_stats stats;
    do {
        CHECK(now_ns() < until);
        usleep(1000); /* the server learns of the deaths in its own time */
        stats = stats_of(&c->servers[1]);
    } while (stats.clients || stats.mappings || stats.faults_waiting);
    pc_client_close(home);
    cluster_stop(c);
}

static int raw_control(const struct server *server)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(server->name);
    memcpy(address.sun_path + 1, server->name, n);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(!connect(fd, (struct sockaddr *)&address,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)));
    return fd;
}

static void expect_closed(int fd)
{
    struct timeval limit = {.tv_sec = 8};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    char buffer[4096];
    ssize_t got;
    while ((got = recv(fd, buffer, sizeof buffer, 0)) > 0)
        continue;
    CHECK(got == 0 || errno == ECONNRESET);
    close(fd);
}

static void test_garbage(int trap)
{
    struct cluster *c = cluster_start(2, "garbage");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 4 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    unsigned seed = 11;
    uint8_t junk[65536];
    for (int i = 0; i < 40; i++) {
        for (size_t k = 0; k < sizeof junk; k++)
            junk[k] = (uint8_t)rand_r(&seed);
        int control = raw_control(&c->servers[1]);
        (void)!send(control, junk, 1 + (size_t)rand_r(&seed) % 4000, MSG_NOSIGNAL);
        expect_closed(control);
        int data[2];
        tcp_pair(data);
        OK(pc_engine_serve(c->servers[0].engine, 0x9999, data[1]));
        (void)!send(data[0], junk, sizeof(struct pc__data_header) + (size_t)i, MSG_NOSIGNAL);
        expect_closed(data[0]);
    }
    /* A request that lies: its runs do not lie in the region. */
    struct {
        struct pc__data_header header;
        struct pc__data_asker asker;
        uint64_t run;
    } lie = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .region = 1, .n_runs = 1,
                        .n_blocks = 8},
             .run = 0};
    lie.run = pc__run_pack(4 * MIB / 4096 - 4, 8);
    int data[2];
    tcp_pair(data);
    OK(pc_engine_serve(c->servers[0].engine, 0x9999, data[1]));
    CHECK(send(data[0], &lie, sizeof lie, 0) == (ssize_t)sizeof lie);
    expect_closed(data[0]);
    /* One that stalls in the middle of a request is cut off after fetch_timeout. */
    tcp_pair(data);
    OK(pc_engine_serve(c->servers[0].engine, 0x9999, data[1]));
    CHECK(send(data[0], &lie, 20, 0) == 20);
    expect_closed(data[0]);
    CHECK(stats_of(&c->servers[0]).bad_messages >= 41);
    CHECK(stats_of(&c->servers[1]).bad_messages >= 40);
    check_all(&m, &info, 0); /* nobody else noticed */
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

/* A peer that answers, but not what was asked. */
static void test_lying_peer(int trap)
{
    (void)trap;
    struct cluster *c = cluster_start(2, "liar");
    c->servers[0].lost = true; /* only our liar answers for it */
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 4 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    for (int lie = 0; lie < 5; lie++) {
        int fds[2][2];
        for (int lane = 0; lane < 2; lane++)
            for (int loop = 0; loop < 2; loop++) {
                tcp_pair(fds[loop]);
                OK(pc_engine_add_peer(c->servers[1].engine, c->servers[0].id, loop * 2 + lane,
                                      fds[loop][0]));
                if (lane == 0)
                    close(fds[loop][1]);
            }
        struct pc_run run = {(uint64_t)lie * 8, 8};
        struct pc__data_header answer = {.magic = PC__DATA_MAGIC, .type = PC__DATA_BLOCKS,
                                         .region = 1, .n_blocks = 8};
        if (lie == 0)
            answer.n_blocks = 9;
        else if (lie == 1)
            answer.version = 5;
        else if (lie == 2)
            answer.region = 2;
        else if (lie == 3)
            answer.magic = 7;
        pid_t child = fork();
        if (!child) {
            struct pollfd polls[2] = {{fds[0][1], POLLIN, 0}, {fds[1][1], POLLIN, 0}};
            if (poll(polls, 2, 5000) <= 0)
                _exit(1);
            int fd = polls[0].revents ? fds[0][1] : fds[1][1];
            struct pc__data_header asked;
            if (recv(fd, &asked, sizeof asked, MSG_WAITALL) != (ssize_t)sizeof asked)
                _exit(1);
            answer.request_id = asked.request_id + (lie == 4);
            char blocks[8 * 4096] = {1};
            (void)!send(fd, &answer, sizeof answer, MSG_NOSIGNAL);
            (void)!send(fd, blocks, sizeof blocks, MSG_NOSIGNAL);
            _exit(0);
        }
        for (int loop = 0; loop < 2; loop++)
            close(fds[loop][1]);
        CHECK(pc_client_prefetch(far, m.id, &run, 1, 1, 10 * SECOND) == PC_ERR_HOME_LOST);
        int status;
        waitpid(child, &status, 0);
        CHECK(status == 0);
        /* Else their end may be that of the next ones. */
        SOON(stats_of(&c->servers[1]).peer_connections == 0);
    }
    CHECK(stats_of(&c->servers[1]).blocks_fetched == 0);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

/* The other way of inserting, where the kernel refuses userfaultfd. */
static void test_whole_by_pwrite(int trap)
{
    no_userfaultfd = 1;
    test_whole_region(trap);
}
static void test_shared_by_pwrite(int trap)
{
    no_userfaultfd = 1;
    test_shared_segments(trap);
}

/* Prefetched blocks of zeros can be handed to system calls, as any others. */
static void test_zeros_to_system_calls(int trap)
{
    struct cluster *c = cluster_start(2, "zeros");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 2 * MIB, MIB);
    struct pc_mapping m = map(far, &info, 0);
    struct pc_run run = {0, 256};
    OK(pc_client_prefetch(far, m.id, &run, 1, 1, 30 * SECOND));
    int fd = memfd_create("sink", MFD_CLOEXEC);
    CHECK(write(fd, (void *)(uintptr_t)m.address, MIB) == (ssize_t)MIB);
    CHECK(stats_of(&c->servers[1]).faults == 0);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

/* A thread that is stopped at a block deep in a prefetch that nobody waits for is not last. */
static void test_hurry(int trap)
{
    struct cluster *c = cluster_start(2, "hurry");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, (hunts_races() ? 64 : 256) * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    struct pc_run all = {0, info.length_bytes / 4096};
    OK(pc_client_prefetch(far, m.id, &all, 1, 0, 30 * SECOND));
    CHECK(at(&m, info.length_bytes - 4096) == pattern(1, info.length_bytes - 4096));
    OK(pc_client_prefetch(far, m.id, &all, 1, 1, 20 * 30 * SECOND));
    check_all(&m, &info, 0);
    CHECK(stats_of(&c->servers[1]).blocks_fetched == info.length_bytes / 4096);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

static void *read_all(void *arg)
{
    struct reader *r = arg;
    for (uint64_t b = 0; b < r->blocks; b++)
        CHECK(at(r->m, b * 4096 + 8) == pattern(1, b * 4096 + 8));
    return NULL;
}

/* The server goes and comes back; a thread stops at a block meanwhile. It goes on, what the node
 * had is not fetched again, and nobody is ended for it when fault_timeout is over. */
static void test_restart(int trap)
{
    char name[64];
    snprintf(name, sizeof name, "clamor-test-keeper-%d", (int)getpid());
    pid_t watched = getpid(), keeper = fork();
    if (!keeper)
        _exit(pc_keeper_run(name, watched, 60 * SECOND) ? 1 : 0);
    struct cluster *c = cluster_new(2);
    int to_keeper = -1;
    OK(pc_keeper_connect(name, 30 * SECOND, &to_keeper));
    server_start(c, 0, "restart", -1);
    server_start(c, 1, "restart", to_keeper);
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 8 * MIB, 0);
    struct pc_mapping m = map(far, &info, 0);
    struct pc_run half = {0, info.length_bytes / 4096 / 2};
    OK(pc_client_prefetch(far, m.id, &half, 1, 1, 30 * SECOND));
    server_stop(c, 1);
    close(to_keeper);
    struct reader reader = {&m, 1, info.length_bytes / 4096};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, read_all, &reader));
    usleep(200000); /* so that it stands at a block before the server is back */
    OK(pc_keeper_connect(name, 30 * SECOND, &to_keeper));
    server_start(c, 1, "restart", to_keeper);
    pthread_join(thread, NULL);
    struct pc_engine_stats stats = stats_of(&c->servers[1]);
    CHECK(stats.reattached == 1 && stats.blocks_fetched == half.n_blocks);
    OK(pc_client_unmap(far, m.id));
    usleep(6500000); /* past the fault_timeout of these servers */
    m = map(far, &info, 0);
    check_all(&m, &info, 0);
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
    OK(pc_keeper_quit(to_keeper));
    int status;
    waitpid(keeper, &status, 0);
    CHECK(status == 0);
    close(to_keeper);
}

/* The session ends: clients hear it before the server is gone. */
static void test_end(int trap)
{
    struct cluster *c = cluster_start(1, "end");
    pc_client *clients[8];
    for (int i = 0; i < 8; i++)
        clients[i] = attach(&c->servers[0], trap);
    struct pc_region_info info = build(c, &c->servers[0], clients[0], 1, MIB, 0);
    struct pc_mapping m = map(clients[1], &info, 0), again;
    OK(pc_engine_end(c->servers[0].engine));
    cluster_stop(c);
    for (int i = 0; i < 8; i++) {
        for (int k = 0; k < 500 && !pc_client_has_ended(clients[i]); k++)
            usleep(10000);
        CHECK(pc_client_map(clients[i], 1, 0, info.base_address, MIB, 0,
                            10 * SECOND, &again) == PC_ERR_ENDED);
    }
    check_all(&m, &info, 0);
    for (int i = 0; i < 8; i++)
        pc_client_close(clients[i]);
    OK(pc_ended_unmap(m.address));
}

int main(void)
{
    int failed = 0;
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    failed += run_test("copy_in", test_copy_in, 1, 60);
    failed += run_test("copy_in", test_copy_in, 2, 60);
    for (size_t i = 0; i < 2; i++) {
        int trap = traps[i];
        failed += run_test("whole_region", test_whole_region, trap, 60);
        failed += run_test("home_reads_without_faults", test_home_reads_without_faults, trap, 60);
        failed += run_test("scattered_reads", test_scattered_reads, trap, 60);
        failed += run_test("far_home", test_far_home, trap, 60);
        failed += run_test("a_scan_goes_on_in_the_next_piece", test_a_scan_goes_on_in_the_next_piece, trap, 60);
        failed += run_test("prefetch", test_prefetch, trap, 60);
        failed += run_test("threads", test_threads, trap, 60);
        failed += run_test("breaking_connections", test_breaking_connections, trap, 60);
        failed += run_test("home_lost", test_home_lost, trap, 60);
        failed += run_test("shared_segments", test_shared_segments, trap, 60);
        failed += run_test("retire", test_retire, trap, 60);
        failed += run_test("many_regions", test_many_regions, trap, 100);
        failed += run_test("dead_workers", test_dead_workers, trap, 100);
        failed += run_test("garbage", test_garbage, trap, 100);
        failed += run_test("lying_peer", test_lying_peer, trap, 60);
        failed += run_test("whole_by_pwrite", test_whole_by_pwrite, trap, 60);
        failed += run_test("shared_by_pwrite", test_shared_by_pwrite, trap, 60);
        failed += run_test("zeros_to_system_calls", test_zeros_to_system_calls, trap, 60);
        failed += run_test("hurry", test_hurry, trap, 60);
        failed += run_test("restart", test_restart, trap, 60);
        failed += run_test("end", test_end, trap, 60);
    }
    return failed != 0;
}
