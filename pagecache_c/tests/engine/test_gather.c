/* test_gather.c - rows by number: against what each version has, over both traps; and what comes as
 * rows, what as blocks. Two servers in one process; server 0 is the home. */
#include "common/wire.h"
#include "tests/support/engine_main.h"
#include "tests/support/length.h"
#include "tests/support/pair.h"

#include <sys/eventfd.h>
#include <sys/mman.h>

static const struct pc_run some[] = {{3, 1}, {10, 20}, {100, 1}, {200, 56}};
static const struct pc_run others[] = {{0, 2}, {15, 1}, {99, 3}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

static uint64_t random_state = 88172645463325252ull;
static uint64_t random_below(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

static uint64_t rows_in(const struct pc_region_info *info, const struct pc_rows *rows)
{
    return (info->length_bytes - rows->offset_bytes - rows->row_bytes) / rows->stride_bytes + 1;
}

/* What the version has, from the registry: all of it. */
static uint8_t *contents_of(struct cluster *c, const struct pc_region_info *info, uint64_t version)
{
    uint64_t n = info->length_bytes >> 12;
    uint64_t *owners = registry_owners(c->registry, info->region, version, n);
    uint64_t *all = malloc(info->length_bytes);
    for (uint64_t b = 0; b < n; b++)
        for (uint64_t w = 0; w < 512; w++) {
            uint64_t offset = (b << 12) + w * 8;
            all[offset / 8] = owners[b] ? written(info->region, owners[b], offset)
                                        : pattern(info->region, offset);
        }
    free(owners);
    return (uint8_t *)all;
}

static void check_rows(const uint8_t *all, const struct pc_rows *rows, const uint64_t *ids,
                       uint64_t n, const uint8_t *out)
{
    for (uint64_t i = 0; i < n; i++)
        if (memcmp(out + i * rows->row_bytes, all + rows->offset_bytes + ids[i] * rows->stride_bytes,
                   rows->row_bytes)) {
            fprintf(stderr, "row %llu, id %llu, of %llu bytes\n", (unsigned long long)i,
                    (unsigned long long)ids[i], (unsigned long long)rows->row_bytes);
            FAIL("wrong bytes");
        }
}

/* Random ids, some of them repeated. */
static void gather_random(pc_client *client, const struct pc_mapping *m,
                          const struct pc_region_info *info, const uint8_t *all,
                          const struct pc_rows *rows, uint64_t n)
{
    uint64_t *ids = malloc(n * sizeof *ids), most = rows_in(info, rows);
    uint8_t *out = malloc(n * rows->row_bytes);
    for (uint64_t i = 0; i < n; i++)
        ids[i] = i && random_below(4) == 0 ? ids[random_below(i)] : random_below(most);
    OK(pc_client_gather(client, m->id, rows, ids, n, out, WAIT));
    check_rows(all, rows, ids, n, out);
    free(ids);
    free(out);
}

/* Rows of all sizes, that cross blocks, with room between them, at the home and far from it. */
static void test_shapes(int trap)
{
    struct pair p = pair_start("shapes", trap, 4 * MIB);
    uint8_t *all = contents_of(p.c, &p.info, 0);
    static const struct pc_rows shapes[] = {
        {0, 1, 1}, {3, 8, 8}, {0, 256, 256}, {5, 100, 33}, {4000, 300, 256}, {0, 4097, 4095},
        {1, 4096, 4095}, {0, 4096, 4096}, {7, 5003, 5000}, {0, 10000, 2500}, {64, 16, 48},
        {100, 1, 4095}, {8, 70000, 65536}};
    for (size_t i = 0; i < N(shapes); i++) {
        struct pc_mapping far = map_at(p.far, &p.info, 0, 0), home = map_at(p.home, &p.info, 0, 0);
        struct pc_mapping own = map_at(p.far, &p.info, 0, PC_MAP_PRIVATE);
        for (uint64_t n = 1; n < 3000; n = n * 7 + 3) {
            gather_random(p.far, &far, &p.info, all, &shapes[i], n);
            gather_random(p.home, &home, &p.info, all, &shapes[i], n);
        }
        gather_random(p.far, &own, &p.info, all, &shapes[i], 100);
        OK(pc_client_unmap(p.far, far.id));
        OK(pc_client_unmap(p.far, own.id));
        OK(pc_client_unmap(p.home, home.id));
    }
    CHECK(stats_of(p.s0).rows_served > 0 && stats_of(p.s1).rows_fetched == stats_of(p.s0).rows_served);
    free(all);
    pair_stop(&p);
}

/* At old versions and new ones, of layers that wait, of the history; beside older leases. */
static void test_versions(int trap)
{
    struct pair p = pair_start("versions", trap, MIB);
    static const struct pc_rows small = {40, 56, 48}, crossing = {0, 500, 700};
    struct pc_mapping h0 = map_at(p.home, &p.info, 0, 0), f0 = map_at(p.far, &p.info, 0, 0);
    for (uint64_t v = 0; v < 4; v++)
        CHECK(commit(p.c, v % 2 ? p.s0 : p.s1, v % 2 ? p.home : p.far, &p.info, v,
                     v % 2 ? others : some, v % 2 ? N(others) : N(some)) == v + 1);
    for (int lease = 0; lease < 2; lease++) { /* with the base leased at 0; then all in the history */
        for (uint64_t v = 0; v <= 4; v++) {
            uint8_t *all = contents_of(p.c, &p.info, v);
            struct pc_mapping far = map_at(p.far, &p.info, v, 0);
            struct pc_mapping home = map_at(p.home, &p.info, v, 0);
            gather_random(p.far, &far, &p.info, all, &small, 300);
            gather_random(p.far, &far, &p.info, all, &crossing, 300);
            gather_random(p.home, &home, &p.info, all, &small, 300);
            OK(pc_client_unmap(p.far, far.id));
            OK(pc_client_unmap(p.home, home.id));
            free(all);
        }
        if (lease)
            break;
        OK(pc_client_unmap(p.home, h0.id));
        OK(pc_client_unmap(p.far, f0.id));
        SOON(stats_of(p.s0).commits_applied == 4 && stats_of(p.s0).layers == 0);
    }
    CHECK(stats_of(p.s0).rows_served > 0);
    pair_stop(&p);
}

/* A private mapping shows what its process wrote to it. */
static void test_private(int trap)
{
    struct pair p = pair_start("private", trap, MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, PC_MAP_PRIVATE);
    block_at(&m, 7)[3] = 42;
    const struct pc_rows rows = {0, 8, 8};
    const uint64_t ids[] = {7 * 512 + 3, 7 * 512 + 4, 9 * 512, 7 * 512 + 3};
    uint64_t out[4];
    OK(pc_client_gather(p.far, m.id, &rows, ids, 4, out, WAIT));
    CHECK(out[0] == 42 && out[3] == 42 && out[1] == pattern(1, 7 * 4096 + 32) &&
          out[2] == pattern(1, 9 * 4096));
    pair_stop(&p);
}

/* Ids out of range: nothing is asked of anybody, and nothing written. */
static void test_range(int trap)
{
    struct pair p = pair_start("range", trap, MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    struct pc_engine_stats before = stats_of(p.s1);
    uint8_t out[2 * 256], untouched[2 * 256];
    memset(out, 0xab, sizeof out);
    memset(untouched, 0xab, sizeof untouched);
    static const struct {
        struct pc_rows rows;
        uint64_t ids[2];
    } wrong[] = {{{0, 256, 256}, {0, 4096}},          {{0, 256, 256}, {UINT64_MAX, 0}},
                 {{1, 256, 256}, {1, 4095}},          {{0, 0, 0}, {0, 0}},
                 {{0, MIB, MIB + 1}, {0, 0}},         {{MIB, 8, 8}, {0, 0}},
                 {{UINT64_MAX, 8, 8}, {0, 0}},        {{0, 1ull << 63, 8}, {2, 0}},
                 {{0, 8, UINT64_MAX}, {0, 0}},        {{MIB - 7, 0, 8}, {0, 0}}};
    for (size_t i = 0; i < N(wrong); i++)
        CHECK(pc_client_gather(p.far, m.id, &wrong[i].rows, wrong[i].ids, 2, out, WAIT) ==
              PC_ERR_RANGE);
    struct pc_mapping whole = map_at(p.home, &p.info, 0, 0); /* nobody else would look */
    for (size_t i = 0; i < N(wrong); i++)
        CHECK(pc_client_gather(p.home, whole.id, &wrong[i].rows, wrong[i].ids, 2, out, WAIT) ==
              PC_ERR_RANGE);
    CHECK(pc_client_gather(p.far, 77, &wrong[0].rows, wrong[0].ids, 2, out, WAIT) ==
          PC_ERR_NO_REGION);
    OK(pc_client_gather(p.far, m.id, &wrong[0].rows, wrong[0].ids, 0, out, WAIT)); /* of none */
    struct pc_engine_stats after = stats_of(p.s1);
    CHECK(before.bytes_received == after.bytes_received && before.bytes_sent == after.bytes_sent &&
          before.fetch_requests == after.fetch_requests);
    CHECK(!memcmp(out, untouched, sizeof out));
    /* The last that there is; and one and the same row for every id. */
    const struct pc_rows last = {0, 256, 256}, same = {MIB - 8, 0, 8};
    const uint64_t ids[] = {4095, 0}, any[] = {UINT64_MAX, 7};
    OK(pc_client_gather(p.far, m.id, &last, ids, 2, out, WAIT));
    CHECK(!memcmp(out + 248, &(uint64_t){pattern(1, MIB - 8)}, 8));
    OK(pc_client_gather(p.far, m.id, &same, any, 2, out, WAIT));
    CHECK(!memcmp(out, out + 8, 8) && !memcmp(out, &(uint64_t){pattern(1, MIB - 8)}, 8));
    pair_stop(&p);
}

/* What moves: rows where they are fewer bytes than their blocks, once for an id that is repeated;
 * blocks where they are not, or where rows of before and now come to a block; nothing of what is here. */
static void test_what_moves(int trap)
{
    struct pair p = pair_start("moves", trap, MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    uint8_t *all = contents_of(p.c, &p.info, 0), out[64 * 256];
    const struct pc_rows rows = {0, 256, 256};
    const uint64_t few[] = {3 * 16 + 1, 5 * 16, 3 * 16 + 1, 3 * 16 + 2, 5 * 16};
    OK(pc_client_gather(p.far, m.id, &rows, few, 5, out, WAIT));
    check_rows(all, &rows, few, 5, out);
    CHECK(stats_of(p.s1).rows_fetched == 3 && stats_of(p.s1).blocks_fetched == 0);
    CHECK(stats_of(p.s1).fetch_requests == 1 && region_of(p.s1, 1).present_blocks == 0);
    /* All rows of block 9, and one of block 10. */
    uint64_t many[17];
    for (uint64_t i = 0; i < 17; i++)
        many[i] = 9 * 16 + i;
    OK(pc_client_gather(p.far, m.id, &rows, many, 17, out, WAIT));
    check_rows(all, &rows, many, 17, out);
    CHECK(stats_of(p.s1).rows_fetched == 4 && stats_of(p.s1).blocks_fetched == 1);
    /* Block 9 is here: nothing moves. */
    uint64_t received = stats_of(p.s1).bytes_received;
    OK(pc_client_gather(p.far, m.id, &rows, many, 16, out, WAIT));
    check_rows(all, &rows, many, 16, out);
    CHECK(stats_of(p.s1).bytes_received == received);
    /* Half of a block, and then as much again: it is fetched, and then it is here. */
    for (uint64_t i = 0; i < 8; i++)
        many[i] = 20 * 16 + 2 * i;
    OK(pc_client_gather(p.far, m.id, &rows, many, 8, out, WAIT));
    CHECK(stats_of(p.s1).rows_fetched == 4 + 8 && stats_of(p.s1).blocks_fetched == 1);
    OK(pc_client_gather(p.far, m.id, &rows, many, 8, out, WAIT));
    check_rows(all, &rows, many, 8, out);
    CHECK(stats_of(p.s1).rows_fetched == 4 + 8 && stats_of(p.s1).blocks_fetched == 2);
    OK(pc_client_gather(p.far, m.id, &rows, many, 8, out, WAIT));
    CHECK(stats_of(p.s1).rows_fetched == 4 + 8 && stats_of(p.s1).blocks_fetched == 2);
    /* One row again and again: in the end the block is here. */
    for (int i = 0; i < 16; i++) {
        CHECK(stats_of(p.s1).blocks_fetched == 2);
        OK(pc_client_gather(p.far, m.id, &rows, (const uint64_t[]){30 * 16}, 1, out, WAIT));
    }
    CHECK(stats_of(p.s1).blocks_fetched == 3);
    CHECK(at(&m, 30 * 4096) == pattern(1, 30 * 4096) && stats_of(p.s1).blocks_fetched == 3);
    CHECK(stats_of(p.s0).rows_served == stats_of(p.s1).rows_fetched);
    free(all);
    pair_stop(&p);
}

/* With a cache that holds next to nothing, blocks go while they are copied; what a process wrote to
 * a private mapping stays its own when the block that it is a copy of is gone. */
static void test_evicted(int trap)
{
    told.cache_bytes = 1 * MIB;
    struct pair p = pair_start("evicted", trap, 16 * MIB);
    uint8_t *all = contents_of(p.c, &p.info, 0);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    struct pc_mapping own = map_at(p.far, &p.info, 0, PC_MAP_PRIVATE);
    block_at(&own, 7)[3] = 42;
    const int rounds = (int)rounds_of(3, 5);
    for (int i = 0; i < rounds; i++) {
        gather_random(p.far, &m, &p.info, all, &(struct pc_rows){0, 2048, 2000}, 3000);
        gather_random(p.far, &m, &p.info, all, &(struct pc_rows){0, 5000, 5000}, 1000);
    }
    CHECK(stats_of(p.s1).evicted_blocks > 0 && stats_of(p.s1).rows_fetched > 0);
    uint64_t word = 0;
    OK(pc_client_gather(p.far, own.id, &(struct pc_rows){0, 8, 8},
                        (const uint64_t[]){7 * 512 + 3}, 1, &word, WAIT));
    CHECK(word == 42);
    free(all);
    pair_stop(&p);
}

/* A million and more, in several sorts and many parts. */
static void test_million(int trap)
{
    struct pair p = pair_start("million", trap, 64 * MIB);
    const struct pc_rows rows = {24, 64, 40};
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    uint64_t n = (hunts_races() ? 1 << 17 : 1 << 20) + 12345, most = rows_in(&p.info, &rows);
    uint64_t *ids = malloc(n * sizeof *ids), *out = malloc(n * rows.row_bytes);
    for (uint64_t i = 0; i < n; i++)
        ids[i] = random_below(i % 2 ? most : 1000);
    OK(pc_client_gather(p.far, m.id, &rows, ids, n, out, 80 * SECOND));
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t w = 0; w < 5; w++)
            CHECK(out[i * 5 + w] == pattern(1, 24 + ids[i] * 64 + w * 8));
    CHECK(stats_of(p.s1).rows_fetched < n / 2 + 8000); /* repeated ones come once a sort */
    free(ids);
    free(out);
    pair_stop(&p);
}

/* ------------------------------------------------------------- what goes wrong */

static void test_breaking_connections(int trap)
{
    struct pair p = pair_start("breaking", trap, 16 * MIB);
    p.s0->flaky = true;
    uint8_t *all = contents_of(p.c, &p.info, 0);
    const struct pc_rows rows = {0, 100, 100};
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    for (int i = 0; i < 4; i++)
        gather_random(p.far, &m, &p.info, all, &rows, 20000);
    CHECK(stats_of(p.s1).fetch_retries > 0 && stats_of(p.s1).bad_messages == 0);
    CHECK(stats_of(p.s1).rows_fetched > 0);
    free(all);
    pair_stop(&p);
}

static void test_home_lost(int trap)
{
    struct pair p = pair_start("lost", trap, 16 * MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    const struct pc_rows rows = {0, 100, 100};
    p.s0->lost = true;
    uint64_t ids[2000];
    static uint8_t out[2000 * 100];
    for (uint64_t i = 0; i < 2000; i++)
        ids[i] = i * 80;
    char text[64];
    snprintf(text, sizeof text, "server 0x%llx is lost", (unsigned long long)p.s0->id);
    CHECK(pc_client_gather(p.far, m.id, &rows, ids, 2000, out, WAIT) == PC_ERR_HOME_LOST);
    CHECK(strstr(pc_last_message(), text));
    const struct pc_run run = {.first_block = 9, .n_blocks = 3};
    CHECK(pc_client_prefetch(p.far, m.id, &run, 1, 1, WAIT) == PC_ERR_HOME_LOST);
    CHECK(strstr(pc_last_message(), text));
    p.s0->lost = false; /* and nothing is lost of the client; another question may still be answered */
    SOON(pc_client_gather(p.far, m.id, &rows, ids, 2000, out, WAIT) == PC_OK);
    uint8_t *all = contents_of(p.c, &p.info, 0);
    check_rows(all, &rows, ids, 2000, out);
    free(all);
    SOON(stats_of(p.s1).fetches_in_flight == 0);
    pair_stop(&p);
}

/* The region goes from its home, and a version that there is not is not waited for. */
static void test_region_gone(int trap)
{
    struct pair p = pair_start("gone", trap, MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    const struct pc_rows rows = {0, 100, 100};
    uint8_t out[100];
    OK(pc_engine_retire(p.s0->engine, 1, 1));
    CHECK(pc_client_gather(p.far, m.id, &rows, (const uint64_t[]){5}, 1, out, WAIT) ==
          PC_ERR_HOME_LOST);
    CHECK(p.s1->homes_asked == 1); /* who has asked the home, and has heard that it has nothing */
    char text[64]; /* it lives: nobody says that it is gone */
    snprintf(text, sizeof text, "server 0x%llx does not have them", (unsigned long long)p.s0->id);
    CHECK(strstr(pc_last_message(), text));
    pair_stop(&p);
}

/* Processes that die while they gather leave nothing. */
static void test_dead_workers(int trap)
{
    struct pair p = pair_start("dead", trap, 64 * MIB);
    int fds = open_descriptors();
    uint64_t memory = memfd_bytes();
    const int most = (int)rounds_of(30, 60);
    for (int i = 0; i < most; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (!child) {
            pc_client *far = attach(p.s1, trap);
            struct pc_mapping m = map_at(far, &p.info, 0, 0);
            const struct pc_rows rows = {0, 256, i % 2 ? 2048 : 200};
            static uint64_t ids[50000];
            uint8_t *out = malloc(50000 * 2048);
            for (;;) {
                for (uint64_t k = 0; k < 50000; k++)
                    ids[k] = random_below(rows_in(&p.info, &rows));
                OK(pc_client_gather(far, m.id, &rows, ids, 50000, out, WAIT));
            }
        }
        usleep(5000u * (unsigned)(i % 9)); /* so that it dies in different places */
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    SOON(stats_of(p.s1).clients == 1 && stats_of(p.s1).mappings == 0);
    SOON(stats_of(p.s1).fetches_in_flight == 0);
    SOON(open_descriptors() <= fds + 16); /* connections between the servers */
    SOON(memfd_bytes() <= memory + 80 * MIB); /* the generation that they read */
    pair_stop(&p);
}

/* Threads of one process, and of its whole node, on the same blocks. */
struct gatherer {
    struct pair *p;
    const uint8_t *all;
    const struct pc_mapping *m;
    uint64_t seed;
};

static void *gather_some(void *arg)
{
    struct gatherer *g = arg;
    const struct pc_rows rows = {0, 300, 280};
    uint64_t ids[3000], most = rows_in(&g->p->info, &rows), x = g->seed;
    uint8_t *out = malloc(3000 * 280);
    for (int round = 0; round < 20; round++) {
        for (uint64_t i = 0; i < 3000; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ids[i] = x % most;
        }
        OK(pc_client_gather(g->p->far, g->m->id, &rows, ids, 3000, out, WAIT));
        check_rows(g->all, &rows, ids, 3000, out);
    }
    free(out);
    return NULL;
}

static void test_threads(int trap)
{
    struct pair p = pair_start("threads", trap, 8 * MIB);
    uint8_t *all = contents_of(p.c, &p.info, 0);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    struct gatherer g[4];
    pthread_t threads[4];
    for (uint64_t i = 0; i < 4; i++) {
        g[i] = (struct gatherer){&p, all, &m, 7 + i};
        CHECK(!pthread_create(&threads[i], NULL, gather_some, &g[i]));
    }
    for (uint64_t b = 0; b < 2048; b += 3) /* and one that faults */
        CHECK(at(&m, b * 4096) == pattern(1, b * 4096));
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    free(all);
    pair_stop(&p);
}

/* ------------------------------------------------------------------- liars */

static int raw_control(const struct server *server)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(server->name);
    memcpy(address.sun_path + 1, server->name, n);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(!connect(fd, (struct sockaddr *)&address,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)));
    struct timeval limit = {.tv_sec = 8};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}

static void say(int to, uint16_t type, const void *body, size_t bytes, const int *fds, int n_fds)
{
    const struct pc__ctl_header header = {
        .body_bytes = (uint32_t)bytes, .type = type, .request_id = 1};
    struct iovec parts[2] = {{(void *)(uintptr_t)&header, sizeof header},
                             {(void *)(uintptr_t)body, bytes}};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (n_fds) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
        struct cmsghdr *at = CMSG_FIRSTHDR(&message);
        at->cmsg_level = SOL_SOCKET;
        at->cmsg_type = SCM_RIGHTS;
        at->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
        memcpy(CMSG_DATA(at), fds, (size_t)n_fds * sizeof(int));
    }
    CHECK(sendmsg(to, &message, MSG_NOSIGNAL) > 0);
}

static int status_of_reply(int from)
{
    uint8_t packet[512];
    ssize_t got = recv(from, packet, sizeof packet, 0);
    struct pc__ctl_message message;
    CHECK(got > 0 && !pc__ctl_parse(packet, (size_t)got, &message));
    CHECK(message.header.type == PC__CTL_REPLY);
    return message.header.status;
}

static int open_raw(const struct server *server, const struct pc_region_info *info)
{
    int fd = raw_control(server);
    struct pc__ctl_hello hello = {.wire_version = PC__WIRE_VERSION, .trap = PC_TRAP_SIGSEGV,
                                  .library_version = "test"};
    int fds[2] = {memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING),
                  eventfd(0, EFD_CLOEXEC)};
    struct pc__control_page *page;
    CHECK(!ftruncate(fds[0], sizeof *page));
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    CHECK(page != MAP_FAILED);
    page->magic = PC__CONTROL_MAGIC;
    munmap(page, sizeof *page);
    say(fd, PC__CTL_HELLO, &hello, sizeof hello, fds, 2);
    CHECK(status_of_reply(fd) == 0);
    const struct pc__ctl_open open = {.mapping_id = 5, .region = info->region,
                                      .address = info->base_address,
                                      .length_bytes = info->length_bytes};
    say(fd, PC__CTL_OPEN, &open, sizeof open, NULL, 0);
    CHECK(status_of_reply(fd) == 0);
    close(fds[0]);
    close(fds[1]);
    return fd;
}

static int sealed_memfd(uint64_t bytes, int seals, const uint64_t *ids, size_t n)
{
    int fd = memfd_create("gather", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)bytes));
    CHECK(pwrite(fd, ids, n * sizeof *ids, 0) == (ssize_t)(n * sizeof *ids));
    CHECK(!seals || !fcntl(fd, F_ADD_SEALS, seals));
    return fd;
}

/* A process that lies about its memfd or its ids is told so, and the server lives. */
static void test_lying_client(int trap)
{
    struct pair p = pair_start("liar", trap, MIB);
    const int both = F_SEAL_SHRINK | F_SEAL_GROW;
    const uint64_t ids[] = {1, 5, 9}, mixed[] = {5, 1, 9}, far_off[] = {1, 5, 1ull << 60};
    const struct pc__ctl_gather right = {.mapping_id = 5, .rows = {0, 100, 100},
                                         .memfd_bytes = 64 << 10, .n_ids = 3};
    struct pc__ctl_gather wrong[6];
    for (size_t i = 0; i < N(wrong); i++)
        wrong[i] = right;
    wrong[0].mapping_id = 6;
    wrong[1].rows.offset_bytes = MIB;
    wrong[2].rows.stride_bytes = 1ull << 62;
    wrong[3].at_bytes = 60 << 10; /* the area does not fit behind it */
    wrong[4].memfd_bytes = 60 << 10;
    wrong[5].rows.row_bytes = 4000, wrong[5].n_ids = 1000;
    static const int refused[] = {PC_ERR_NO_REGION, PC_ERR_RANGE, PC_ERR_RANGE, PC_ERR_PROTOCOL,
                                  PC_ERR_PROTOCOL, PC_ERR_PROTOCOL};
    int fd = open_raw(p.s1, &p.info);
    for (size_t i = 0; i < N(wrong); i++) {
        int memfd = sealed_memfd(64 << 10, both, ids, 3);
        say(fd, PC__CTL_GATHER, &wrong[i], sizeof right, &memfd, 1);
        CHECK(status_of_reply(fd) == refused[i]);
        close(memfd);
    }
    int shrinks = sealed_memfd(64 << 10, 0, ids, 3), grows = sealed_memfd(64 << 10, F_SEAL_SHRINK, ids, 3),
        no_memfd = eventfd(0, EFD_CLOEXEC), unordered = sealed_memfd(64 << 10, both, mixed, 3),
        outside = sealed_memfd(64 << 10, both, far_off, 3),
        read_only = sealed_memfd(64 << 10, both | F_SEAL_WRITE, ids, 3),
        good = sealed_memfd(64 << 10, both, ids, 3);
    const struct {
        int fd, status;
    } each[] = {{shrinks, PC_ERR_PROTOCOL}, {grows, PC_ERR_PROTOCOL}, {no_memfd, PC_ERR_PROTOCOL},
                {unordered, PC_ERR_PROTOCOL}, {outside, PC_ERR_RANGE}, {read_only, PC_ERR_SYSTEM},
                {good, PC_OK}};
    for (size_t i = 0; i < N(each); i++) {
        say(fd, PC__CTL_GATHER, &right, sizeof right, &each[i].fd, 1);
        CHECK(status_of_reply(fd) == each[i].status);
    }
    say(fd, PC__CTL_GATHER, &right, sizeof right, NULL, 0);
    CHECK(status_of_reply(fd) == PC_ERR_PROTOCOL);
    const int two[] = {good, grows};
    say(fd, PC__CTL_GATHER, &right, sizeof right, two, 2);
    CHECK(status_of_reply(fd) == PC_ERR_PROTOCOL);
    /* Its rows are there. */
    uint8_t row[100];
    CHECK(pread(good, row, 100, (off_t)pc__gather_rows_at(3) + 100) == 100);
    uint8_t *all = contents_of(p.c, &p.info, 0);
    CHECK(!memcmp(row, all + 500, 100));
    free(all);
    /* It unmaps the region with rows on the way. */
    const struct pc__ctl_open open = {.mapping_id = 5, .length_bytes = 4096};
    say(fd, PC__CTL_GATHER, &right, sizeof right, &good, 1);
    say(fd, PC__CTL_CLOSE, &open, sizeof open, NULL, 0);
    (void)status_of_reply(fd);
    close(fd);
    for (size_t i = 0; i < N(each); i++)
        close(each[i].fd);
    SOON(stats_of(p.s1).clients == 1);
    pair_stop(&p);
}

/* A home that answers, but not what was asked; and at last one that does. */
static void test_lying_home(int trap)
{
    told.fetch_timeout_ns = SECOND / 2; /* for the one that says too little */
    told.fault_timeout_ns = 20 * SECOND;
    struct pair p = pair_start("lies", trap, MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    p.s0->lost = true; /* only our liar answers for it */
    enum { SHORT, STATUS, COUNT, SIZE, VERSION, REGION, ID, TYPE, FLAGS, LONG, N_LIES };
    for (int lie = 0; lie < N_LIES; lie++) {
        int fds[4][2];
        for (int lane = 0; lane < pc_engine_peer_lanes(p.s1->engine) && lane < 4; lane++) {
            tcp_pair(fds[lane]);
            OK(pc_engine_add_peer(p.s1->engine, p.s0->id, lane, fds[lane][0]));
        }
        struct {
            struct pc__data_header header;
            struct pc__data_rows rows;
            uint8_t bytes[3 * 100 + 50];
        } answer = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_ROWS, .region = 1},
                    .rows = {.row_bytes = 100, .n_rows = 3}};
        size_t bytes = sizeof answer.header + sizeof answer.rows + 300;
        bytes = lie == SHORT ? bytes - 1 : lie == LONG ? bytes + 50 : bytes;
        answer.header.status = lie == STATUS ? 1 : 0;
        answer.rows.n_rows += lie == COUNT;
        answer.rows.row_bytes -= lie == SIZE;
        answer.header.version = lie == VERSION;
        answer.header.region += lie == REGION;
        answer.header.type = lie == TYPE ? PC__DATA_BLOCKS : PC__DATA_ROWS;
        answer.header.n_blocks = lie == TYPE;
        answer.header.flags = lie == FLAGS;
        fflush(NULL);
        pid_t child = fork();
        if (!child) {
            struct pollfd polls[4];
            for (int i = 0; i < 4; i++)
                polls[i] = (struct pollfd){fds[i][1], POLLIN, 0};
            if (poll(polls, 4, 5000) <= 0)
                _exit(1);
            int fd = fds[3][1];
            for (int i = 3; i >= 0; i--)
                fd = polls[i].revents ? fds[i][1] : fd;
            struct pc__data_header asked;
            if (recv(fd, &asked, sizeof asked, MSG_WAITALL) != (ssize_t)sizeof asked ||
                asked.type != PC__DATA_GET_ROWS)
                _exit(2);
            answer.header.request_id = asked.request_id + (lie == ID);
            for (int i = 0; i < 4; i++)
                close(fds[i][0]); /* the engine's, as this process has them */
            (void)!send(fd, &answer, bytes, MSG_NOSIGNAL);
            char rest;
            while (recv(fd, &rest, 1, 0) > 0) /* until it is closed */
                continue;
            _exit(0);
        }
        for (int i = 0; i < 4; i++)
            close(fds[i][1]);
        const struct pc_rows rows = {0, 100, 100};
        uint8_t out[300];
        int rc = pc_client_gather(p.far, m.id, &rows, (const uint64_t[]){1, 5, 9}, 3, out,
                                  10 * SECOND);
        if (lie == LONG) /* the rows were all there; what comes after them is nonsense */
            CHECK(rc == PC_OK || rc == PC_ERR_HOME_LOST);
        else
            CHECK(rc == PC_ERR_HOME_LOST);
        int status;
        waitpid(child, &status, 0);
        CHECK(status == 0);
        SOON(stats_of(p.s1).peer_connections == 0); /* else their end may be that of the next ones */
    }
    CHECK(stats_of(p.s1).bad_messages >= N_LIES - 2);
    p.s0->lost = false;
    uint8_t *all = contents_of(p.c, &p.info, 0);
    gather_random(p.far, &m, &p.info, all, &(struct pc_rows){0, 100, 100}, 500);
    free(all);
    pair_stop(&p);
}

/* A server that asks for rows that there are not is cut off; one that asks rightly is answered. */
static void test_lying_asker(int trap)
{
    struct pair p = pair_start("asker", trap, MIB);
    for (int lie = 0; lie < 4; lie++) {
        struct {
            struct pc__data_header header;
            struct pc__data_rows rows;
            uint64_t offsets[2];
        } get = {.header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET_ROWS, .region = 1,
                            .request_id = 9},
                 .rows = {.row_bytes = 64, .n_rows = 2},
                 .offsets = {MIB - 64, 4090}};
        if (lie == 1)
            get.offsets[0]++;
        else if (lie == 2)
            get.offsets[1] = UINT64_MAX;
        else if (lie == 3)
            get.rows.row_bytes = 4096;
        int data[2];
        tcp_pair(data);
        OK(pc_engine_serve(p.s0->engine, 0x9999, data[1]));
        struct timeval limit = {.tv_sec = 8};
        setsockopt(data[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        CHECK(send(data[0], &get, sizeof get, 0) == (ssize_t)sizeof get);
        struct {
            struct pc__data_header header;
            struct pc__data_rows rows;
            uint64_t words[16];
        } answer;
        ssize_t got = recv(data[0], &answer, sizeof answer, MSG_WAITALL);
        if (lie) {
            CHECK(got == 0 || (got < 0 && errno == ECONNRESET));
        } else {
            CHECK(got == (ssize_t)sizeof answer && answer.header.type == PC__DATA_ROWS);
            CHECK(answer.header.request_id == 9 && !answer.header.status);
            CHECK(!memcmp(&answer.rows, &get.rows, sizeof get.rows));
            CHECK(answer.words[0] == pattern(1, MIB - 64) && answer.words[7] == pattern(1, MIB - 8));
        }
        close(data[0]);
    }
    CHECK(stats_of(p.s0).rows_served == 2);
    pair_stop(&p);
}

/* The page server goes in the middle of a gather, and comes back. */
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
    struct pair p = {.c = c, .s0 = &c->servers[0], .s1 = &c->servers[1]};
    p.home = attach(p.s0, trap);
    p.far = attach(p.s1, trap);
    p.info = build(c, p.s0, p.home, 1, 8 * MIB, 0);
    uint8_t *all = contents_of(c, &p.info, 0);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    struct gatherer g = {&p, all, &m, 77};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, gather_some, &g));
    SOON(stats_of(p.s1).rows_fetched > 3000);
    server_stop(c, 1);
    close(to_keeper);
    OK(pc_keeper_connect(name, 30 * SECOND, &to_keeper));
    server_start(c, 1, "restart", to_keeper);
    pthread_join(thread, NULL);
    CHECK(stats_of(p.s1).reattached == 1);
    free(all);
    pair_stop(&p);
    OK(pc_keeper_quit(to_keeper));
    int status;
    waitpid(keeper, &status, 0);
    CHECK(status == 0);
    close(to_keeper);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(shapes),
        TEST(versions),
        TEST(private),
        TEST(range),
        TEST(what_moves),
        TEST(evicted),
        TEST(million),
        TEST(breaking_connections),
        TEST(home_lost),
        TEST(region_gone),
        TEST(dead_workers),
        TEST(threads),
        TEST(lying_client),
        TEST(lying_home),
        TEST(lying_asker),
        TEST(restart),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
