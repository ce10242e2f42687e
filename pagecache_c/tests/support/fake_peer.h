/* fake_peer.h - page servers that are none: a peer that behaves as a test tells it to, and an asker
 * that keeps a home busy. Both speak the data protocol of wire.h on plain sockets. */
#ifndef PC_TEST_FAKE_PEER_H
#define PC_TEST_FAKE_PEER_H

#include "tests/support/commit.h"

#include "engine/core/engine.h"

#include <netinet/tcp.h>

/* What a fake peer does when it is asked for blocks that it is said to have. */
enum peer_acts {
    PEER_SERVES,    /* gives them, of its version */
    PEER_HAS_HALF,  /* every second of them: it has evicted the others */
    PEER_HAS_NONE,
    PEER_REFUSES,   /* it knows nothing of the region */
    PEER_STALLS,    /* in the middle of a block */
    PEER_CLOSES,    /* in the middle of a block */
    PEER_ADDS_ONE,  /* says that it sends one block more than it was asked for */
    PEER_DROPS_ONE, /* one less */
    PEER_IS_BEHIND, /* of the version before those that it was asked for */
    PEER_IS_AHEAD,  /* of the version after them */
    PEER_IS_OTHER,  /* of another region */
    PEER_REDIRECTS, /* as a home would: all of it is elsewhere, at the asker's own */
    PEER_BABBLES,   /* bytes that are no answer */
    PEER_HOARDS,    /* takes requests and says nothing */
    PEER_SKIPS,     /* answers all but those for block 0 */
    PEER_ACTS
};

#define PEER_CONNECTIONS 64
#define PEER_MOST_BLOCKS 4096
#define PEER_REQUEST_BYTES                                         \
    (sizeof(struct pc__data_header) + sizeof(struct pc__data_asker) + \
     PC__DATA_MAX_RUNS * sizeof(uint64_t))

struct fake_peer {
    struct cluster *cluster;
    int index; /* among the cluster's servers: no engine is started there */
    uint64_t id;
    struct pc_region_info info;
    uint64_t version; /* of what it gives */
    int listener;
    int stop[2];
    pthread_t thread;
    _Atomic int acts;
    _Atomic unsigned late_us; /* each answer */
    _Atomic unsigned requests, blocks;  /* that it was asked for */
    _Atomic bool asked[PEER_MOST_BLOCKS]; /* each block: whether it was */
    _Atomic uint32_t from_version, to_version; /* of the last request */
    int fds[PEER_CONNECTIONS];
    size_t n_fds;
};

struct peer_request {
    struct pc__data_header header;
    struct pc__data_asker asker;
    uint64_t packed[PC__DATA_MAX_RUNS];
};

static inline bool send_all(int fd, const void *bytes, size_t n)
{
    const char *at = bytes;
    while (n) {
        ssize_t sent = send(fd, at, n, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        at += sent;
        n -= (size_t)sent;
    }
    return true;
}

static inline bool recv_all(int fd, void *bytes, size_t n)
{
    return !n || recv(fd, bytes, n, MSG_WAITALL) == (ssize_t)n;
}

static inline void limit_waits(int fd)
{
    const struct timeval limit = {.tv_sec = 10};
    CHECK(!setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) &&
          !setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
}

/* ----------------------------------------------------------------- answers */

static inline void note_request(struct fake_peer *peer, const struct peer_request *request)
{
    for (unsigned i = 0; i < request->header.n_runs; i++) {
        struct pc_run run = pc__run_unpack(request->packed[i]);
        for (uint64_t b = run.first_block; b < run.first_block + run.n_blocks; b++)
            peer->asked[b] = true;
    }
    peer->from_version = request->asker.from_version;
    peer->to_version = request->asker.to_version;
    peer->blocks += request->header.n_blocks;
    peer->requests++; /* last: who sees it sees the others */
}

/* The bytes of the request's blocks; skip: without every second. Returns their number. */
static inline uint64_t put_blocks(struct fake_peer *peer, const struct peer_request *request,
                                  bool skip, uint64_t *out)
{
    uint64_t region = peer->info.region, n = 0, position = 0;
    uint64_t *owners = registry_owners(peer->cluster->registry, region, peer->version,
                                       peer->info.length_bytes >> 12);
    for (unsigned i = 0; i < request->header.n_runs; i++) {
        struct pc_run run = pc__run_unpack(request->packed[i]);
        for (uint64_t b = run.first_block; b < run.first_block + run.n_blocks; b++, position++) {
            if (skip && position % 2)
                continue;
            for (uint64_t w = 0; w < 512; w++) {
                uint64_t offset = (b << 12) + w * 8;
                out[n * 512 + w] = owners[b] ? written(region, owners[b], offset)
                                             : pattern(region, offset);
            }
            n++;
        }
    }
    free(owners);
    return n;
}

static inline bool answer_elsewhere(struct fake_peer *peer, int fd,
                                    const struct peer_request *request,
                                    struct pc__data_header *header, bool half)
{
    uint64_t bits[PC__DATA_MAX_BLOCKS / 64] = {0};
    size_t n = request->header.n_blocks, bytes = (n + 63) / 64 * 8;
    for (size_t i = 0; i < n; i++)
        if (!half || i % 2)
            bits[i / 64] |= 1ull << (i % 64);
    header->flags |= PC__DATA_ELSEWHERE;
    uint64_t *blocks = malloc(n << 12);
    uint64_t n_sent = half ? put_blocks(peer, request, true, blocks) : 0;
    bool sent = send_all(fd, header, sizeof *header) && send_all(fd, bits, bytes) &&
                send_all(fd, blocks, n_sent << 12);
    free(blocks);
    return sent;
}

static inline bool answer_as_home(int fd, const struct peer_request *request,
                                  struct pc__data_header *header)
{
    header->flags = PC__DATA_ELSEWHERE;
    uint64_t bits[PC__DATA_MAX_BLOCKS / 64] = {0};
    size_t n = request->header.n_blocks;
    for (size_t i = 0; i < n; i++)
        bits[i / 64] |= 1ull << (i % 64);
    bool sent = send_all(fd, header, sizeof *header) && send_all(fd, bits, (n + 63) / 64 * 8);
    const struct pc__data_elsewhere there = {.server_id = 0x1001};
    for (size_t i = 0; i < n && sent; i++)
        sent = send_all(fd, &there, sizeof there);
    return sent;
}

static inline bool answer_blocks(struct fake_peer *peer, int fd, const struct peer_request *request,
                                 const struct pc__data_header *header)
{
    int acts = peer->acts;
    size_t bytes = (size_t)request->header.n_blocks << 12;
    uint64_t *blocks = malloc(bytes);
    (void)put_blocks(peer, request, false, blocks);
    if (acts == PEER_STALLS || acts == PEER_CLOSES)
        bytes -= 2000;
    bool sent = send_all(fd, header, sizeof *header) && send_all(fd, blocks, bytes);
    free(blocks);
    char more[256];
    while (sent && acts == PEER_STALLS && recv(fd, more, sizeof more, 0) > 0)
        continue; /* until the other side has had enough of it */
    return sent && acts != PEER_STALLS && acts != PEER_CLOSES;
}

/* False: the connection is to be closed. */
static inline bool peer_answers(struct fake_peer *peer, int fd, const struct peer_request *request)
{
    static const char junk[3000] = "what?";
    struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                     .type = PC__DATA_BLOCKS,
                                     .flags = PC__DATA_CACHED,
                                     .request_id = request->header.request_id,
                                     .region = request->header.region,
                                     .version = (uint32_t)peer->version,
                                     .n_blocks = request->header.n_blocks};
    int acts = peer->acts;
    usleep(peer->late_us);
    switch (acts) {
    case PEER_HOARDS:
        return true;
    case PEER_SKIPS:
        if (!pc__run_unpack(request->packed[0]).first_block)
            return true;
        break;
    case PEER_BABBLES:
        return send_all(fd, junk, sizeof junk);
    case PEER_REFUSES:
        header.status = PC_ERR_NO_GENERATION;
        return send_all(fd, &header, sizeof header);
    case PEER_HAS_NONE:
    case PEER_HAS_HALF:
        return answer_elsewhere(peer, fd, request, &header, peer->acts == PEER_HAS_HALF);
    case PEER_REDIRECTS:
        return answer_as_home(fd, request, &header);
    case PEER_ADDS_ONE:
        header.n_blocks++;
        break;
    case PEER_DROPS_ONE:
        header.n_blocks--;
        break;
    case PEER_IS_BEHIND:
        header.version = request->asker.from_version - 1;
        break;
    case PEER_IS_AHEAD:
        header.version = request->asker.to_version + 1;
        break;
    case PEER_IS_OTHER:
        header.region++;
        break;
    default:
        break;
    }
    return answer_blocks(peer, fd, request, &header);
}

static inline bool peer_is_asked(struct fake_peer *peer, int fd)
{
    struct peer_request request;
    if (!recv_all(fd, &request.header, sizeof request.header))
        return false;
    CHECK(request.header.magic == PC__DATA_MAGIC && request.header.n_runs <= PC__DATA_MAX_RUNS);
    if (!recv_all(fd, &request.asker, sizeof request.asker) ||
        !recv_all(fd, request.packed, request.header.n_runs * sizeof(uint64_t)))
        return false;
    CHECK(request.header.type == PC__DATA_GET && request.header.flags == PC__DATA_CACHED &&
          request.header.region == peer->info.region);
    note_request(peer, &request);
    return peer_answers(peer, fd, &request);
}

/* -------------------------------------------------------------- its thread */

static inline void *play_peer(void *arg)
{
    struct fake_peer *peer = arg;
    for (;;) {
        struct pollfd polls[PEER_CONNECTIONS + 2] = {{peer->stop[0], POLLIN, 0},
                                                     {peer->listener, POLLIN, 0}};
        for (size_t i = 0; i < peer->n_fds; i++)
            polls[i + 2] = (struct pollfd){peer->fds[i], POLLIN, 0};
        size_t n = peer->n_fds;
        poll(polls, n + 2, -1);
        if (polls[0].revents)
            break;
        for (size_t i = n; i-- > 0;)
            if (polls[i + 2].revents && !peer_is_asked(peer, peer->fds[i])) {
                close(peer->fds[i]);
                peer->fds[i] = peer->fds[--peer->n_fds];
            }
        if (polls[1].revents) {
            CHECK(peer->n_fds < PEER_CONNECTIONS);
            int fd = accept4(peer->listener, NULL, NULL, SOCK_CLOEXEC);
            CHECK(fd >= 0);
            limit_waits(fd);
            const int one = 1; /* header and blocks are sent apart: 40 ms, else */
            CHECK(!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
            uint64_t from;
            if (peer->cluster->registry->introduced && !recv_all(fd, &from, sizeof from))
                close(fd);
            else
                peer->fds[peer->n_fds++] = fd;
        }
    }
    while (peer->n_fds)
        close(peer->fds[--peer->n_fds]);
    close(peer->listener);
    return NULL;
}

/* Index: of the cluster's servers, of those where no engine is. */
static inline struct fake_peer *fake_peer_start(struct cluster *c, int index,
                                                const struct pc_region_info *info, int acts)
{
    struct fake_peer *peer = calloc(1, sizeof *peer);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    CHECK(index >= c->n && index < MAX_SERVERS && info->length_bytes >> 12 <= PEER_MOST_BLOCKS);
    *peer = (struct fake_peer){.cluster = c, .index = index, .id = 0x1000u + (uint64_t)index,
                               .info = *info, .acts = acts};
    peer->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(!bind(peer->listener, (struct sockaddr *)&address, bytes) &&
          !listen(peer->listener, 64) &&
          !getsockname(peer->listener, (struct sockaddr *)&address, &bytes));
    CHECK(!pipe2(peer->stop, O_CLOEXEC));
    CHECK(!pthread_create(&peer->thread, NULL, play_peer, peer));
    c->registry->ports[index] = address.sin_port;
    return peer;
}

/* It is gone, with all its connections, and nobody can connect to it. */
static inline void fake_peer_vanish(struct fake_peer *peer)
{
    if (!peer->cluster->registry->ports[peer->index])
        return;
    peer->cluster->registry->ports[peer->index] = 0;
    CHECK(write(peer->stop[1], "x", 1) == 1);
    pthread_join(peer->thread, NULL);
    close(peer->stop[0]);
    close(peer->stop[1]);
}

static inline void fake_peer_free(struct fake_peer *peer)
{
    fake_peer_vanish(peer);
    free(peer);
}

/* -------------------------------------------------------- asking as a peer */

/* A connection on which a home is asked by somebody with this id. */
static inline int ask_as(struct server *home, uint64_t id)
{
    int fds[2];
    tcp_pair(fds);
    OK(pc_engine_serve(home->engine, id, fds[1]));
    limit_waits(fds[0]);
    return fds[0];
}

static inline void send_get(int fd, uint64_t region, uint64_t version, uint16_t flags,
                            const struct pc_run run)
{
    struct {
        struct pc__data_header header;
        struct pc__data_asker asker;
        uint64_t packed;
    } get = {.header = {.magic = PC__DATA_MAGIC,
                        .type = PC__DATA_GET,
                        .flags = flags,
                        .request_id = 1,
                        .region = region,
                        .version = (uint32_t)version,
                        .n_runs = 1,
                        .n_blocks = (uint16_t)run.n_blocks},
             .packed = pc__run_pack(run.first_block, run.n_blocks)};
    CHECK(send_all(fd, &get, sizeof get));
}

/* Of blocks that were filled, from a home that sends nobody elsewhere for them. */
static inline void take_blocks_of(int fd, uint64_t n_blocks)
{
    struct pc__data_header header;
    char block[4096];
    CHECK(recv_all(fd, &header, sizeof header) && header.type == PC__DATA_BLOCKS &&
          !header.status && !header.flags && header.n_blocks == n_blocks);
    for (uint64_t i = 0; i < n_blocks; i++)
        CHECK(recv_all(fd, block, sizeof block));
}

/* Makes the home believe that the peer has the blocks, by fetching them: it is told to answer. */
static inline void fake_peer_holds(struct fake_peer *peer, struct server *home, uint64_t version,
                                   uint64_t first, uint64_t n)
{
    int fd = ask_as(home, peer->id);
    peer->version = version;
    for (uint64_t at = first; at < first + n; at += 256) {
        uint64_t some = first + n - at < 256 ? first + n - at : 256;
        send_get(fd, peer->info.region, version, PC__DATA_HOME, (struct pc_run){at, some});
        take_blocks_of(fd, some);
    }
    /* A reply is noted before the next one is sent. */
    send_get(fd, peer->info.region, version, PC__DATA_HOME, (struct pc_run){first, 1});
    take_blocks_of(fd, 1);
    close(fd);
}

/* ------------------------------------------------------------ a busy home */

#define HOG_BLOCKS 2048u /* of its region, at least: 8 MiB */
#define HOG_FDS 2

/* Somebody who asks for much and reads nothing: what the home has to send stays above 8 MiB, as long
 * as the home does not take it for stalled (its fetch_timeout). */
struct hog {
    struct server *home;
    int fds[HOG_FDS];
};

static inline struct hog hog_start(struct server *home, const struct pc_region_info *info)
{
    struct hog hog = {.home = home};
    for (int i = 0; i < HOG_FDS; i++) {
        hog.fds[i] = ask_as(home, 0x9999);
        const int bytes = 64 << 10; /* or the kernel may take megabytes that nobody reads */
        CHECK(!setsockopt(hog.fds[i], SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes));
        send_get(hog.fds[i], info->region, 0, PC__DATA_HOME, (struct pc_run){0, HOG_BLOCKS});
    }
    SOON_IN(atomic_load(&home->engine->serving_bytes) > 8 * MIB, 20);
    return hog;
}

static inline void hog_stop(struct hog *hog)
{
    for (int i = 0; i < HOG_FDS; i++)
        close(hog->fds[i]);
    SOON(atomic_load(&hog->home->engine->serving_bytes) < 256 << 10);
}

#endif
