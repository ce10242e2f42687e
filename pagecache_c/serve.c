/* serve.c - answering other servers: which of the blocks are zeros, and the bytes of the rest.
 *
 * Entered only by the loop that owns the connection. A reply holds a reference to its region, so
 * freeing a region never pulls memory from under a queued reply. Small pieces leave with the
 * header in one gather; runs of 32 KiB and more leave by sendfile, without a copy.
 *
 * Relies on: sendfile queues the memfd's own pages, so a block is never overwritten in place
 * (punch, then insert).
 */
#include "engine.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define SENDFILE_FROM_BYTES (32u << 10)
#define QUEUED_REPLIES 64u             /* then the other side's requests wait in its socket */
#define BYTES_PER_EVENT (4u << 20)     /* then the other descriptors get their turn */
#define GATHER 128
#define RX_BYTES (sizeof(struct pc__data_header) + PC__DATA_MAX_RUNS * sizeof(uint64_t))
#define HEAD_BYTES (sizeof(struct pc__data_header) + PC__DATA_MAX_BLOCKS / 8)

struct piece {
    const uint8_t *bytes; /* NULL: sendfile from the home's memfd */
    uint64_t offset, length;
};

struct reply {
    struct reply *next;
    struct pc__region *region; /* or NULL */
    uint8_t *composed;         /* blocks put together from several sources, or NULL */
    size_t n_pieces, at_piece, capacity;
    struct piece *pieces;      /* [0] is the head */
    uint8_t head[HEAD_BYTES];
};

struct served {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t server_id;
    int fd;
    struct pc__watch *watch;
    uint32_t watching;
    uint64_t progress_ns;
    struct reply *first, *last;
    unsigned n_replies;
    size_t rx_bytes;
    uint8_t rx[RX_BYTES];
};

static void free_reply(struct pc_engine *engine, struct reply *reply)
{
    if (reply->region)
        pc__region_put(engine, reply->region);
    free(reply->composed);
    free(reply->pieces);
    free(reply);
}

static void close_served(struct served *served, const char *why)
{
    struct pc_engine *engine = served->loop->engine;
    if (why)
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_PROTOCOL, 0, served->server_id,
                         "closed the connection of server %016llx: %s",
                         (unsigned long long)served->server_id, why);
    pc__watch_remove(served->loop, served->watch);
    close(served->fd);
    while (served->first) {
        struct reply *next = served->first->next;
        free_reply(engine, served->first);
        served->first = next;
    }
    pc__link_remove(&served->link);
    pc__count_sub(&engine->count.served_connections, 1);
    free(served);
}

static int add_piece(struct reply *reply, const uint8_t *bytes, uint64_t offset, uint64_t length)
{
    if (reply->n_pieces == reply->capacity) {
        size_t capacity = reply->capacity ? reply->capacity * 4 : 4;
        struct piece *grown = realloc(reply->pieces, capacity * sizeof *grown);
        if (!grown)
            return PC_ERR_NO_MEMORY;
        reply->pieces = grown;
        reply->capacity = capacity;
    }
    reply->pieces[reply->n_pieces++] =
        (struct piece){.bytes = bytes, .offset = offset, .length = length};
    return PC_OK;
}

/* The blocks of the runs as pieces; holes[] gets a bit for each block of zeros. */
static int add_blocks(struct reply *reply, const struct pc__home *home, const struct pc_run *runs,
                      int n_runs, uint64_t *holes, bool *any_hole, uint64_t *n_sent)
{
    uint64_t position = 0, n_composed = 0;
    for (int i = 0; i < n_runs; i++) {
        uint64_t block = runs[i].first_block, past = block + runs[i].n_blocks;
        while (block < past) {
            struct pc__home_part part = pc__home_describe(home, block, past - block);
            int rc = PC_OK;
            switch (part.kind) {
            case PC__HOME_ZEROS:
                for (uint64_t k = position; k < position + part.n_blocks; k++)
                    holes[k / 64] |= 1ull << (k % 64);
                *any_hole = true;
                break;
            case PC__HOME_MEMORY: {
                uint64_t length = part.n_blocks << PC_BLOCK_SHIFT;
                bool file = part.in_memfd && length >= SENDFILE_FROM_BYTES;
                rc = add_piece(reply, file ? NULL : part.bytes, block << PC_BLOCK_SHIFT, length);
                break;
            }
            case PC__HOME_MIXED:
                if (!reply->composed) /* never moved afterwards: pieces point into it */
                    reply->composed = malloc((size_t)PC__DATA_MAX_BLOCKS * PC_BLOCK_BYTES);
                if (!reply->composed)
                    return PC_ERR_NO_MEMORY;
                pc__home_compose(home, block, reply->composed + (n_composed << PC_BLOCK_SHIFT));
                rc = add_piece(reply, reply->composed + (n_composed++ << PC_BLOCK_SHIFT), 0,
                               PC_BLOCK_BYTES);
                break;
            }
            if (rc)
                return rc;
            if (part.kind != PC__HOME_ZEROS)
                *n_sent += part.n_blocks;
            position += part.n_blocks;
            block += part.n_blocks;
        }
    }
    return PC_OK;
}

static void queue_reply(struct served *served, struct reply *reply)
{
    if (!served->first)
        served->progress_ns = pc__now_ns();
    if (served->last && served->first)
        served->last->next = reply;
    else
        served->first = reply;
    served->last = reply;
    served->n_replies++;
}

/* Answers one request whose header and runs have wholly arrived. */
static int answer(struct served *served, const struct pc__data_header *request)
{
    struct pc_engine *engine = served->loop->engine;
    struct pc_run runs[PC__DATA_MAX_RUNS];
    struct reply *reply = calloc(1, sizeof *reply);
    if (!reply)
        return pc__fail(PC_ERR_NO_MEMORY, "a reply");
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64] = {0}, n_sent = 0;
    bool any_hole = false;
    int status = PC_ERR_NO_REGION;
    int rc = add_piece(reply, reply->head, 0, 0);
    if (rc)
        goto fail;
    struct pc__region *region = pc__region_get(engine, request->region);
    reply->region = region;
    bool ready = false;
    if (region) { /* home and its bytes are fixed from the seal on, which this lock is behind */
        pthread_mutex_lock(&region->lock);
        ready = region->home && region->state != PC__REGION_CREATING &&
                (uint32_t)region->version == request->version;
        pthread_mutex_unlock(&region->lock);
    }
    if (ready) {
        int n_runs = pc__data_parse_runs(request, served->rx + sizeof *request,
                                         request->n_runs * sizeof(uint64_t), region->n_blocks,
                                         runs, PC__DATA_MAX_RUNS);
        if (n_runs < 0) {
            rc = n_runs;
            goto fail;
        }
        rc = add_blocks(reply, region->home, runs, n_runs, holes, &any_hole, &n_sent);
        if (rc)
            goto fail;
        status = PC_OK;
    }
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                           .type = PC__DATA_BLOCKS,
                                           .flags = any_hole ? PC__DATA_HOLES : 0,
                                           .request_id = request->request_id,
                                           .status = status,
                                           .region = request->region,
                                           .version = request->version,
                                           .n_blocks = request->n_blocks};
    size_t hole_bytes = any_hole ? (request->n_blocks + 63u) / 64u * sizeof(uint64_t) : 0;
    memcpy(reply->head, &header, sizeof header);
    memcpy(reply->head + sizeof header, holes, hole_bytes);
    reply->pieces[0].length = sizeof header + hole_bytes;
    pc__count_add(&engine->count.blocks_served, n_sent);
    queue_reply(served, reply);
    return PC_OK;
fail:
    free_reply(engine, reply);
    return rc;
}

/* Sends some of the first reply. Bytes sent, 0 when the socket is full, negative on an error. */
static ssize_t send_some(struct reply *reply, int fd)
{
    struct piece *piece = &reply->pieces[reply->at_piece];
    if (!piece->bytes) {
        off_t offset = (off_t)piece->offset;
        ssize_t sent = sendfile(fd, reply->region->home->memfd, &offset, piece->length);
        return sent < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : sent ? sent : -1;
    }
    struct iovec gather[GATHER];
    size_t n = 0, i = reply->at_piece;
    for (; i < reply->n_pieces && n < GATHER && reply->pieces[i].bytes; i++, n++)
        gather[n] = (struct iovec){.iov_base = (void *)(uintptr_t)reply->pieces[i].bytes,
                                   .iov_len = reply->pieces[i].length};
    const struct msghdr message = {.msg_iov = gather, .msg_iovlen = n};
    ssize_t sent = sendmsg(fd, &message,
                           MSG_NOSIGNAL | MSG_DONTWAIT | (i < reply->n_pieces ? MSG_MORE : 0));
    return sent < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : sent;
}

static bool advance(struct reply *reply, uint64_t sent)
{
    while (sent) {
        struct piece *piece = &reply->pieces[reply->at_piece];
        uint64_t step = sent < piece->length ? sent : piece->length;
        if (piece->bytes)
            piece->bytes += step;
        piece->offset += step;
        piece->length -= step;
        sent -= step;
        if (!piece->length)
            reply->at_piece++;
    }
    return reply->at_piece == reply->n_pieces;
}

/* False: the connection is gone. */
static bool write_replies(struct served *served)
{
    struct pc_engine *engine = served->loop->engine;
    uint64_t budget = BYTES_PER_EVENT;
    while (served->first && budget) {
        ssize_t sent = send_some(served->first, served->fd);
        if (sent < 0) {
            close_served(served, strerror(errno));
            return false;
        }
        if (!sent)
            break;
        served->progress_ns = pc__now_ns();
        pc__count_add(&engine->count.bytes_sent, sent);
        budget -= (uint64_t)sent < budget ? (uint64_t)sent : budget;
        if (advance(served->first, (uint64_t)sent)) {
            struct reply *done = served->first;
            served->first = done->next;
            served->n_replies--;
            free_reply(engine, done);
        }
    }
    uint32_t want = (served->first ? (uint32_t)EPOLLOUT : 0u) |
                    (served->n_replies < QUEUED_REPLIES ? (uint32_t)EPOLLIN : 0u);
    if (want != served->watching) {
        served->watching = want;
        pc__watch_change(served->loop, served->watch, want);
    }
    return true;
}

/* Takes the requests that have wholly arrived. Negative: they make no sense. */
static int take_requests(struct served *served)
{
    while (served->n_replies < QUEUED_REPLIES) {
        struct pc__data_header header;
        if (served->rx_bytes < sizeof header)
            return PC_OK;
        int rc = pc__data_parse_header(served->rx, &header);
        if (!rc && header.type != PC__DATA_GET)
            rc = pc__fail(PC_ERR_PROTOCOL, "an answer where a request was due");
        if (rc)
            return rc;
        size_t bytes = sizeof header + header.n_runs * sizeof(uint64_t);
        if (served->rx_bytes < bytes)
            return PC_OK;
        rc = answer(served, &header);
        if (rc)
            return rc;
        served->rx_bytes -= bytes;
        memmove(served->rx, served->rx + bytes, served->rx_bytes);
    }
    return PC_OK;
}

static bool read_requests(struct served *served)
{
    struct pc_engine *engine = served->loop->engine;
    ssize_t got = recv(served->fd, served->rx + served->rx_bytes, RX_BYTES - served->rx_bytes,
                       MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return true;
    if (got <= 0) {
        close_served(served, got ? strerror(errno) : NULL);
        return false;
    }
    pc__count_add(&engine->count.bytes_received, got);
    served->progress_ns = pc__now_ns();
    served->rx_bytes += (size_t)got;
    return true;
}

void pc__served_event(struct pc__loop *loop, void *owner, uint32_t events)
{
    struct served *served = owner;
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && served->rx_bytes < RX_BYTES &&
        !read_requests(served))
        return;
    for (;;) { /* room in the queue may free requests that are here already */
        unsigned before = served->n_replies;
        if (take_requests(served)) {
            pc__count_add(&loop->engine->count.bad_messages, 1);
            close_served(served, pc_last_message());
            return;
        }
        if (!write_replies(served))
            return;
        if (served->n_replies || !before)
            return;
    }
}

void pc__served_add(struct pc__loop *loop, struct pc__mail *mail)
{
    struct served *served = calloc(1, sizeof *served);
    if (!served || loop->stopping) {
        free(served);
        close(mail->fd);
        return;
    }
    served->loop = loop;
    served->server_id = mail->a;
    served->fd = mail->fd;
    served->watching = EPOLLIN;
    served->watch = pc__watch_add(loop, PC__WATCH_SERVED, mail->fd, 0, served, EPOLLIN);
    if (!served->watch) {
        close(mail->fd);
        free(served);
        return;
    }
    int one = 1;
    (void)setsockopt(served->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pc__link_push(&loop->served, &served->link);
    pc__count_add(&loop->engine->count.served_connections, 1);
}

static uint64_t stalls_at(const struct served *served)
{
    bool waits = served->first || (served->rx_bytes && served->n_replies < QUEUED_REPLIES);
    return waits ? served->progress_ns + served->loop->engine->fetch_timeout_ns : UINT64_MAX;
}

uint64_t pc__served_deadline(struct pc__loop *loop)
{
    uint64_t earliest = UINT64_MAX;
    pc__each(link, &loop->served)
    {
        uint64_t at = stalls_at(pc__of(link, struct served, link));
        earliest = at < earliest ? at : earliest;
    }
    return earliest;
}

void pc__served_check(struct pc__loop *loop, uint64_t now_ns)
{
    pc__each(link, &loop->served)
    {
        struct served *served = pc__of(link, struct served, link);
        if (stalls_at(served) <= now_ns) {
            pc__count_add(&loop->engine->count.bad_messages, 1);
            close_served(served, "it stalled");
        }
    }
}

void pc__served_close_all(struct pc__loop *loop)
{
    while (!pc__link_empty(&loop->served))
        close_served(pc__of(loop->served.next, struct served, link), NULL);
}
