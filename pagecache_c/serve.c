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
#include <fcntl.h>
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
#define RX_BYTES (sizeof(struct pc__data_header) + sizeof(struct pc__data_rows) + \
                  PC__DATA_MAX_ROWS * sizeof(uint64_t))
static_assert(PC__DATA_MAX_RUNS < PC__DATA_MAX_ROWS, "the longest request is one for rows");
#define HEAD_BYTES (sizeof(struct pc__data_header) + PC__DATA_MAX_BLOCKS / 8)

struct piece {
    const uint8_t *bytes; /* NULL: sendfile from memfd */
    uint64_t offset, length;
    int memfd;
};

struct reply {
    struct reply *next;
    struct pc__region *region; /* or NULL */
    bool holds;                /* the region's home, in the epoch `held` */
    unsigned held;
    struct pc__layer *layer;   /* or NULL */
    uint8_t *composed;         /* blocks put together from several sources, or NULL */
    struct pc__loop *loop;     /* that rows was taken of */
    uint8_t *rows;             /* or NULL */
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
    uint64_t parked_region;    /* its first request waits for a version of it; 0: none does */
    uint64_t parked_until_ns;
    uint64_t question;         /* the first of the region whose answer is news to it */
    bool caught_up;            /* that was answered: the home knows what versions there are */
    int parked_error;
    size_t rx_bytes;
    uint8_t rx[RX_BYTES];
};

static void free_reply(struct pc_engine *engine, struct reply *reply)
{
    if (reply->holds)
        pc__home_release(engine, reply->region, reply->held);
    if (reply->region)
        pc__region_put(engine, reply->region);
    pc__layer_put(reply->layer);
    free(reply->composed);
    if (reply->rows)
        pc__rows_give_buffer(reply->loop, reply->rows);
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

static int add_piece(struct reply *reply, const uint8_t *bytes, int memfd, uint64_t offset,
                     uint64_t length)
{
    if (reply->n_pieces == reply->capacity) {
        size_t capacity = reply->capacity ? reply->capacity * 4 : 4;
        struct piece *grown = realloc(reply->pieces, capacity * sizeof *grown);
        if (!grown)
            return PC_ERR_NO_MEMORY;
        reply->pieces = grown;
        reply->capacity = capacity;
    }
    bool file = memfd >= 0 && length >= SENDFILE_FROM_BYTES;
    reply->pieces[reply->n_pieces++] = (struct piece){
        .bytes = file ? NULL : bytes, .offset = offset, .length = length, .memfd = memfd};
    return PC_OK;
}

/* What has to be put together, once the lock is dropped. */
struct composed {
    size_t n;
    struct {
        uint64_t block;
        enum pc__home_kind kind;
    } blocks[PC__DATA_MAX_BLOCKS];
};

static int add_composed(struct reply *reply, struct composed *composed, enum pc__home_kind kind,
                        uint64_t block)
{
    if (!reply->composed) /* never moved afterwards: pieces point into it */
        reply->composed = malloc((size_t)PC__DATA_MAX_BLOCKS * PC_BLOCK_BYTES);
    if (!reply->composed)
        return PC_ERR_NO_MEMORY;
    composed->blocks[composed->n].block = block;
    composed->blocks[composed->n].kind = kind;
    return add_piece(reply, reply->composed + (composed->n++ << PC_BLOCK_SHIFT), -1, 0,
                     PC_BLOCK_BYTES);
}

struct parts {
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64]; /* a bit for each block of zeros */
    bool any_hole;
    uint64_t n_sent;
    struct composed composed;
};

/* The blocks of the runs as pieces. Under region.lock. */
static int add_blocks(struct pc_engine *engine, struct reply *reply, uint64_t version,
                      const struct pc_run *runs, int n_runs, struct parts *parts)
{
    uint64_t position = 0;
    for (int i = 0; i < n_runs; i++) {
        uint64_t block = runs[i].first_block, past = block + runs[i].n_blocks;
        while (block < past) {
            struct pc__home_part part =
                pc__home_resolve(engine, reply->region, version, block, past - block);
            int rc = PC_OK;
            switch (part.kind) {
            case PC__HOME_ZEROS:
                for (uint64_t k = position; k < position + part.n_blocks; k++)
                    parts->holes[k / 64] |= 1ull << (k % 64);
                parts->any_hole = true;
                break;
            case PC__HOME_MEMORY:
                rc = add_piece(reply, part.bytes, part.memfd, part.offset,
                               part.n_blocks << PC_BLOCK_SHIFT);
                break;
            case PC__HOME_MIXED:
            case PC__HOME_HISTORY:
                rc = add_composed(reply, &parts->composed, part.kind, block);
                break;
            }
            if (rc)
                return rc;
            if (part.kind != PC__HOME_ZEROS)
                parts->n_sent += part.n_blocks;
            position += part.n_blocks;
            block += part.n_blocks;
        }
    }
    return PC_OK;
}

/* Status for the reply; PC__WAIT: the home has not heard of the version yet. */
static int add_version(struct pc_engine *engine, struct reply *reply, uint64_t version,
                       const struct pc_run *runs, int n_runs, struct parts *parts)
{
    struct pc__region *region = reply->region;
    pthread_mutex_lock(&region->lock);
    bool here = region->home && region->home->base.memfd >= 0 &&
                region->state != PC__REGION_CREATING;
    int rc = PC_ERR_NO_REGION;
    if (here && version > region->home->latest)
        rc = PC__WAIT;
    else if (here)
        rc = add_blocks(engine, reply, version, runs, n_runs, parts);
    if (!rc)
        rc = pc__home_knows(engine, region, version);
    if (!rc) {
        reply->held = pc__home_hold(region->home);
        reply->holds = true;
    }
    pthread_mutex_unlock(&region->lock);
    for (size_t i = 0; i < parts->composed.n && !rc; i++)
        rc = pc__home_compose(engine, region, version, parts->composed.blocks[i].kind,
                              parts->composed.blocks[i].block,
                              reply->composed + (i << PC_BLOCK_SHIFT));
    return rc;
}

static int add_layer(struct reply *reply, const struct pc_run *runs, int n_runs,
                     struct parts *parts)
{
    const struct pc__layer *layer = reply->layer;
    int rc = PC_OK;
    for (int i = 0; i < n_runs && !rc; i++) {
        uint64_t offset = runs[i].first_block << PC_BLOCK_SHIFT;
        rc = add_piece(reply, layer->map + offset, layer->memfd, offset,
                       runs[i].n_blocks << PC_BLOCK_SHIFT);
        parts->n_sent += runs[i].n_blocks;
    }
    return rc;
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

/* The request waits, and with it the connection, until the region's home has caught up. False:
 * there is nothing to wait for any more. */
static bool park(struct served *served, struct pc__region *region)
{
    struct pc_engine *engine = served->loop->engine;
    if (served->caught_up)
        return false;
    pthread_mutex_lock(&region->lock);
    bool ask = !region->asked_published;
    region->asked_published = true;
    served->question = region->published_questions + 1;
    region->published_questions += ask;
    region->parked++;
    const struct pc_event event = {.kind = PC_EVENT_NEED_PUBLISHED,
                                   .region = region->id,
                                   .from_version = region->home->latest};
    pthread_mutex_unlock(&region->lock);
    served->parked_region = region->id;
    served->parked_until_ns = pc__now_ns() + engine->fetch_timeout_ns;
    if (ask && !pc__engine_ask(engine, &event))
        (void)pc_engine_caught_up(engine, region->id, PC_ERR_NO_MEMORY);
    return true;
}

static void write_head(struct reply *reply, const struct pc__data_header *request, int status,
                       const struct parts *parts)
{
    bool any_hole = !status && parts->any_hole;
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
    memcpy(reply->head + sizeof header, parts->holes, hole_bytes);
    reply->pieces[0].length = sizeof header + hole_bytes;
    if (status)
        reply->n_pieces = 1;
}

static uint64_t blocks_of(const struct reply *reply)
{
    return reply->layer ? reply->layer->bytes >> PC_BLOCK_SHIFT : reply->region->n_blocks;
}

/* Answers one request whose header and runs have wholly arrived. PC__WAIT: not yet. */
static int answer(struct served *served, const struct pc__data_header *request)
{
    struct pc_engine *engine = served->loop->engine;
    struct pc_run runs[PC__DATA_MAX_RUNS];
    struct reply *reply = calloc(1, sizeof *reply);
    struct parts *parts = calloc(1, sizeof *parts);
    int status = PC_ERR_NO_REGION, n_runs = 0;
    int rc = reply && parts ? add_piece(reply, reply->head, -1, 0, 0)
                            : pc__fail(PC_ERR_NO_MEMORY, "a reply");
    if (rc)
        goto fail;
    if (request->flags & PC__DATA_LAYER)
        reply->layer = pc__layer_get(engine, request->region);
    else
        reply->region = pc__region_get(engine, request->region);
    if (reply->layer || reply->region) {
        n_runs = pc__data_parse_runs(request, served->rx + sizeof *request,
                                     request->n_runs * sizeof(uint64_t), blocks_of(reply), runs,
                                     PC__DATA_MAX_RUNS);
        bool undefined = reply->region && !reply->region->n_blocks;
        if (n_runs < 0 && !undefined) {
            rc = n_runs;
            goto fail;
        }
        if (!undefined)
            status = reply->layer ? add_layer(reply, runs, n_runs, parts)
                                  : add_version(engine, reply, request->version, runs, n_runs,
                                                parts);
        if (status == PC__WAIT && park(served, reply->region)) {
            rc = PC__WAIT;
            goto fail;
        }
        if (status == PC__WAIT)
            status = served->parked_error ? served->parked_error : PC_ERR_NO_VERSION;
    }
    served->caught_up = false;
    served->parked_error = 0;
    write_head(reply, request, status, parts);
    if (!status)
        pc__count_add(&engine->count.blocks_served, parts->n_sent);
    free(parts);
    queue_reply(served, reply);
    return PC_OK;
fail:
    if (reply)
        free_reply(engine, reply);
    free(parts);
    return rc;
}

/* The answer's head is the header and, with rows, what they are. */
static int write_rows(struct served *served, struct reply *reply,
                      const struct pc__data_header *request, const struct pc__data_rows *rows,
                      int status)
{
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                           .type = PC__DATA_ROWS,
                                           .request_id = request->request_id,
                                           .status = status,
                                           .region = request->region,
                                           .version = request->version};
    memcpy(reply->head, &header, sizeof header);
    memcpy(reply->head + sizeof header, rows, sizeof *rows);
    int rc = add_piece(reply, reply->head, -1, 0, sizeof header + (status ? 0 : sizeof *rows));
    if (!rc && !status)
        rc = add_piece(reply, reply->rows, -1, 0, rows->n_rows * rows->row_bytes);
    if (!rc)
        queue_reply(served, reply);
    return rc;
}

/* As answer(), for rows. */
static int answer_rows(struct served *served, const struct pc__data_header *request,
                       const struct pc__data_rows *rows)
{
    struct pc_engine *engine = served->loop->engine;
    uint64_t offsets[PC__DATA_MAX_ROWS];
    struct reply *reply = calloc(1, sizeof *reply);
    int status = PC_ERR_NO_REGION, rc = PC_OK;
    if (!reply || !(reply->rows = pc__rows_take_buffer(served->loop)))
        rc = pc__fail(PC_ERR_NO_MEMORY, "a reply");
    else
        reply->loop = served->loop;
    if (!rc)
        reply->region = pc__region_get(engine, request->region);
    if (!rc && reply->region && reply->region->length_bytes) {
        int n = pc__data_parse_offsets(rows, served->rx + sizeof *request + sizeof *rows,
                                       rows->n_rows * sizeof offsets[0],
                                       reply->region->length_bytes, offsets, PC__DATA_MAX_ROWS);
        status = n < 0 ? n : pc__rows_copy(engine, reply->region, request->version, rows, offsets,
                                           reply->rows);
        if (n < 0 || (status == PC__WAIT && park(served, reply->region)))
            rc = status;
        if (status == PC__WAIT)
            status = served->parked_error ? served->parked_error : PC_ERR_NO_VERSION;
    }
    if (!rc) {
        served->caught_up = false;
        served->parked_error = 0;
        rc = write_rows(served, reply, request, rows, status);
    }
    if (rc && reply)
        free_reply(engine, reply);
    return rc;
}

void pc__served_unpark(struct pc__loop *loop, struct pc__mail *mail)
{
    pc__each(link, &loop->served)
    {
        struct served *served = pc__of(link, struct served, link);
        if (served->parked_region != mail->a)
            continue;
        served->parked_region = 0;
        served->caught_up = mail->b >= served->question;
        served->parked_error = mail->error;
        served->progress_ns = pc__now_ns();
        pc__served_event(loop, served, 0);
    }
}

/* Sends some of the first reply. Bytes sent, 0 when the socket is full, negative on an error. */
static ssize_t send_some(struct reply *reply, int fd)
{
    struct piece *piece = &reply->pieces[reply->at_piece];
    if (!piece->bytes) {
        off_t offset = (off_t)piece->offset;
        ssize_t sent = sendfile(fd, piece->memfd, &offset, piece->length);
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
                    (served->n_replies < QUEUED_REPLIES && !served->parked_region
                         ? (uint32_t)EPOLLIN
                         : 0u);
    if (want != served->watching) {
        served->watching = want;
        pc__watch_change(served->loop, served->watch, want);
    }
    return true;
}

/* Takes the requests that have wholly arrived. Negative: they make no sense. */
static int take_requests(struct served *served)
{
    while (served->n_replies < QUEUED_REPLIES && !served->parked_region) {
        struct pc__data_header header;
        if (served->rx_bytes < sizeof header)
            return PC_OK;
        int rc = pc__data_parse_header(served->rx, &header);
        if (!rc && header.type != PC__DATA_GET && header.type != PC__DATA_GET_ROWS)
            rc = pc__fail(PC_ERR_PROTOCOL, "an answer where a request was due");
        if (rc)
            return rc;
        struct pc__data_rows rows = {0};
        size_t bytes = sizeof header + header.n_runs * sizeof(uint64_t);
        if (header.type == PC__DATA_GET_ROWS) {
            if (served->rx_bytes < sizeof header + sizeof rows)
                return PC_OK;
            rc = pc__data_parse_rows(served->rx + sizeof header, &rows);
            if (rc)
                return rc;
            bytes = sizeof header + sizeof rows + rows.n_rows * sizeof(uint64_t);
        }
        if (served->rx_bytes < bytes)
            return PC_OK;
        rc = rows.n_rows ? answer_rows(served, &header, &rows) : answer(served, &header);
        if (rc)
            return rc == PC__WAIT ? PC_OK : rc;
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
    int flags = fcntl(mail->fd, F_GETFL); /* sendfile has no flag of its own for not waiting */
    if (!served || loop->stopping || flags < 0 || fcntl(mail->fd, F_SETFL, flags | O_NONBLOCK)) {
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
    if (served->parked_region)
        return served->parked_until_ns;
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
    pc__rows_free_buffers(loop);
}
