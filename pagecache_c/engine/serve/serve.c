/* serve.c - the connections on which other servers ask us: requests in, replies out.
 *
 * Entered only by the loop that owns the connection. What a reply says is decided when there is room
 * to send it, not when the request came: a home that is busy then knows who has the blocks by now
 * (directory.c). So little is queued on a connection; the rest of its requests wait in its socket.
 */
#include "engine/core/core.h"
#include "engine/serve/serve.h"
#include "engine/store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define QUEUED_REPLIES 64u             /* then the other side's requests wait in its socket, */
#define QUEUED_BYTES (128u << 10)      /* as they do from here on, */
#define UNSENT_BYTES (64u << 10)       /* and that the kernel may hold beyond what is on its way */
#define ASIDE_NS 1500000000ull         /* less than PC__REDIRECT_PATIENCE_NS of who asks */
#define LOOK_ASIDE_NS 1000000ull
#define ASIDE_MOST 256u                /* then no more requests are taken */
#define BYTES_PER_EVENT (4u << 20)     /* then the other descriptors get their turn */
#define GATHER 128
#define MEMBER_BLOCKS (1ull << 40) /* that a packed run can name: of a group, others may be longer */
#define HEAD_BYTES (sizeof(struct pc__data_header) + sizeof(struct pc__data_asker))
#define RX_BYTES (HEAD_BYTES + PC__DATA_MAX_ROWS * sizeof(uint64_t))
static_assert(PC__DATA_MAX_RUNS < PC__DATA_MAX_ROWS &&
                  sizeof(struct pc__data_rows) <= sizeof(struct pc__data_asker),
              "the longest request is one for rows");

struct aside {
    struct pc__link link;
    uint64_t until_ns;         /* then it is answered with what is there */
    struct pc__warm *warm;     /* it waits for the disk; or NULL */
    struct pc__request request; /* last: as much of it as it has runs */
};

struct served {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t server_id;
    uint16_t number;           /* as a holder of blocks */
    int fd;
    struct pc__watch *watch;
    uint32_t watching;
    uint64_t progress_ns;
    struct pc__reply *first, *last;
    unsigned n_replies;
    uint64_t queued_bytes;     /* of the replies */
    uint64_t parked_region;    /* its first request waits for a version of it; 0: none does */
    uint64_t parked_until_ns;
    uint64_t question;         /* the first of the region whose answer is news to it */
    struct pc__link aside;     /* struct aside: requests for what is on its way here */
    unsigned n_aside;
    uint64_t again_ns;         /* when to look at them; 0: there are none */
    bool caught_up;            /* that was answered: the home knows what versions there are */
    int parked_error;
    size_t rx_bytes;
    uint8_t rx[RX_BYTES];
};

static void close_served(struct served *served, const char *why)
{
    struct pc_engine *engine = served->loop->engine;
    if (why)
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_PROTOCOL, 0, served->server_id,
                         "closed the connection of server %016llx: %s",
                         (unsigned long long)served->server_id, why);
    pc__watch_remove(served->loop, served->watch);
    close(served->fd);
    atomic_fetch_sub(&engine->serving_bytes, served->queued_bytes);
    while (!pc__link_empty(&served->aside)) {
        struct aside *aside = pc__of(served->aside.next, struct aside, link);
        pc__link_remove(&aside->link);
        pc__warm_put(aside->warm);
        free(aside);
    }
    while (served->first) {
        struct pc__reply *next = served->first->next;
        pc__reply_free(engine, served->first);
        served->first = next;
    }
    pc__link_remove(&served->link);
    pc__count_sub(&engine->count.served_connections, 1);
    free(served);
}

/* An answer without blocks does not wait behind those that have some: who is sent elsewhere is to go
 * there now. Answers name their requests. */
static void queue_reply(struct served *served, struct pc__reply *reply)
{
    for (size_t i = 0; i < reply->n_pieces; i++)
        reply->n_bytes += reply->pieces[i].length;
    if (!served->first) {
        served->progress_ns = pc__now_ns();
        served->first = served->last = reply;
    } else if (reply->n_pieces == 1 && served->first->next) {
        reply->next = served->first->next;
        served->first->next = reply;
    } else {
        served->last->next = reply;
        served->last = reply;
    }
    served->n_replies++;
    served->queued_bytes += reply->n_bytes;
    atomic_fetch_add(&served->loop->engine->serving_bytes, reply->n_bytes);
}

static bool takes_requests(const struct served *served)
{
    return served->n_replies < QUEUED_REPLIES && served->queued_bytes < QUEUED_BYTES &&
           served->n_aside < ASIDE_MOST && !served->parked_region;
}

/* The request waits, and with it the connection, until the region's home has caught up. False:
 * there is nothing to wait for any more. */
static bool park(struct served *served, struct pc__region *region)
{
    struct pc_engine *engine = served->loop->engine;
    if (served->caught_up)
        return false;
    pthread_mutex_lock(&region->lock);
    if (!region->home) { /* it has just moved away: nothing is to come here */
        pthread_mutex_unlock(&region->lock);
        served->parked_error = PC_ERR_NO_REGION;
        return false;
    }
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
    if (ask && !pc__engine_request(engine, &event))
        (void)pc_engine_caught_up(engine, region->id, PC_ERR_NO_MEMORY);
    return true;
}

/* 0: nothing is known of it here. */
static uint64_t blocks_of(const struct pc__reply *reply)
{
    if (reply->layer)
        return reply->layer->bytes >> PC_BLOCK_SHIFT;
    return reply->region ? pc__region_blocks(reply->region) : 0;
}

/* What a parser says, which keeps no message. */
static int judged(int rc)
{
    return rc < 0 ? pc__fail(rc, "a request that makes no sense") : rc;
}

static int take_runs(const struct served *served, struct pc__request *request, uint64_t n_blocks)
{
    if (request->header.flags & PC__DATA_MEMBER)
        n_blocks = MEMBER_BLOCKS;
    int n = pc__data_parse_runs(&request->header, served->rx + HEAD_BYTES,
                                request->header.n_runs * sizeof(uint64_t), n_blocks, request->runs,
                                PC__DATA_MAX_RUNS);
    request->n_runs = n < 0 ? 0 : n;
    return n < 0 ? judged(n) : PC_OK;
}

/* What is asked for is on its way to this node's cache: it is looked at again every millisecond, which
 * is little beside what a home has to send that sent the asker here. Or a disk has it (warm), which says when
 * it is there. Others go before it. */
static int set_aside(struct served *served, const struct pc__request *request, struct pc__warm *warm)
{
    size_t bytes = offsetof(struct aside, request.runs) +
                   (size_t)request->n_runs * sizeof request->runs[0];
    struct aside *aside = malloc(bytes);
    if (!aside) {
        pc__warm_put(warm);
        return pc__fail(PC_ERR_NO_MEMORY, "a request");
    }
    aside->warm = warm;
    memcpy(&aside->request, request, bytes - offsetof(struct aside, request));
    uint64_t now_ns = pc__now_ns();
    aside->until_ns = now_ns + ASIDE_NS;
    pc__link_push(&served->aside, &aside->link);
    served->n_aside++;
    served->again_ns = now_ns + LOOK_ASIDE_NS;
    return PC_OK;
}

/* Answers a GET. PC__WAIT: not yet. */
static int answer(struct served *served, struct pc__request *request)
{
    struct pc_engine *engine = served->loop->engine;
    struct pc__reply *reply = pc__reply_new();
    if (!reply)
        return pc__fail(PC_ERR_NO_MEMORY, "a reply");
    if (request->header.flags & PC__DATA_LAYER)
        reply->layer = pc__layer_get(engine, request->header.region);
    else
        reply->region = pc__region_get(engine, request->header.region);
    const uint64_t n_blocks = blocks_of(reply);
    int rc, status = PC_ERR_NO_REGION;
    if (reply->layer || n_blocks) {
        rc = take_runs(served, request, n_blocks);
        if (rc)
            goto fail;
        status = pc__reply_fill(served->loop, reply, request);
    }
    if (status == PC__WAIT && request->header.flags & PC__DATA_CACHED) {
        rc = set_aside(served, request, NULL);
        goto fail;
    }
    if (status == PC__COLD) {
        struct pc__warm *warm = pc__warm_begin(served->loop, reply->region, request);
        if (warm) {
            rc = set_aside(served, request, warm);
            goto fail;
        }
        pc__reply_free(engine, reply); /* which has a part of the answer */
        request->waited = true;
        return answer(served, request);
    }
    if (status == PC__WAIT && park(served, reply->region)) {
        rc = PC__WAIT;
        goto fail;
    }
    if (status == PC__WAIT)
        status = served->parked_error ? served->parked_error : PC_ERR_NO_VERSION;
    served->caught_up = false;
    served->parked_error = 0;
    rc = status ? pc__reply_refuse(reply, &request->header, status) : PC_OK;
    if (rc)
        goto fail;
    queue_reply(served, reply);
    return PC_OK;
fail:
    pc__reply_free(engine, reply);
    return rc;
}

/* Answers what of it can be answered now. False: it is to be looked at again. */
static bool answer_aside(struct served *served, struct aside *aside)
{
    struct pc_engine *engine = served->loop->engine;
    if (aside->warm && !pc__warm_is_done(aside->warm))
        return false; /* a disk that hangs: who asks gives up, and the connection ends */
    struct pc__reply *reply = pc__reply_new();
    if (!reply)
        return false; /* the asker turns to the home before it waits for ever */
    aside->request.waited = aside->warm || pc__now_ns() >= aside->until_ns;
    reply->region = pc__region_get(engine, aside->request.header.region);
    int status = reply->region ? pc__reply_fill(served->loop, reply, &aside->request)
                               : PC_ERR_NO_REGION;
    if (status == PC__WAIT ||
        (status && pc__reply_refuse(reply, &aside->request.header, status))) {
        pc__reply_free(engine, reply);
        return false;
    }
    queue_reply(served, reply);
    return true;
}

static void look_aside(struct served *served)
{
    served->again_ns = 0;
    pc__each(link, &served->aside)
    {
        struct aside *aside = pc__of(link, struct aside, link);
        if (served->queued_bytes >= QUEUED_BYTES || !answer_aside(served, aside)) {
            served->again_ns = pc__now_ns() + LOOK_ASIDE_NS;
            continue;
        }
        pc__link_remove(link);
        served->n_aside--;
        pc__warm_put(aside->warm);
        free(aside);
    }
}

void pc__served_look_aside(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    pc__each(link, &loop->served)
    {
        struct served *served = pc__of(link, struct served, link);
        if (!served->n_aside)
            continue;
        look_aside(served);
        pc__served_event(loop, served, 0);
    }
}

/* Who asks was sent elsewhere for these blocks, and got them. */
static int take_held(struct served *served, struct pc__request *request)
{
    struct pc_engine *engine = served->loop->engine;
    struct pc__region *region = pc__region_get(engine, request->header.region);
    int rc = PC_OK;
    pc__holder_relieved(engine, request->asker.server_id,
                        (uint64_t)request->header.n_blocks << PC_BLOCK_SHIFT);
    if (!region)
        return PC_OK; /* freed meanwhile */
    const uint64_t n_blocks = pc__region_blocks(region);
    if (n_blocks)
        rc = take_runs(served, request, n_blocks);
    pthread_mutex_lock(&region->lock);
    for (int i = 0; i < request->n_runs && region->home && !rc; i++)
        pc__directory_add(engine, region, served->number, request->header.version,
                          request->runs[i].first_block, request->runs[i].n_blocks, false);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return rc;
}

/* As answer(), for rows. */
static int answer_rows(struct served *served, const struct pc__data_header *request)
{
    struct pc_engine *engine = served->loop->engine;
    struct pc__data_rows rows;
    uint64_t offsets[PC__DATA_MAX_ROWS];
    struct pc__reply *reply = pc__reply_new();
    int status = PC_ERR_NO_REGION, rc;
    rc = judged(pc__data_parse_rows(served->rx + sizeof *request, &rows));
    if (!reply || rc || !(reply->composed = pc__rows_take_buffer(served->loop))) {
        rc = rc ? rc : pc__fail(PC_ERR_NO_MEMORY, "a reply");
        goto fail;
    }
    reply->row_loop = served->loop;
    reply->region = pc__region_get(engine, request->region);
    const uint64_t n_blocks = blocks_of(reply);
    if (n_blocks) {
        rc = judged(pc__data_parse_offsets(&rows, served->rx + sizeof *request + sizeof rows,
                                           rows.n_rows * sizeof offsets[0],
                                           n_blocks << PC_BLOCK_SHIFT, offsets,
                                           PC__DATA_MAX_ROWS));
        if (rc < 0)
            goto fail;
        status = pc__rows_copy(engine, reply->region, request->version, &rows, offsets,
                               reply->composed);
    }
    if (status == PC__WAIT && park(served, reply->region)) {
        rc = PC__WAIT;
        goto fail;
    }
    if (status == PC__WAIT)
        status = served->parked_error ? served->parked_error : PC_ERR_NO_VERSION;
    served->caught_up = false;
    served->parked_error = 0;
    rc = pc__reply_rows(reply, request, &rows, status);
    if (rc)
        goto fail;
    queue_reply(served, reply);
    return PC_OK;
fail:
    if (reply)
        pc__reply_free(engine, reply);
    return rc;
}

static int handle(struct served *served, const struct pc__data_header *header)
{
    if (header->type == PC__DATA_GET_ROWS)
        return answer_rows(served, header);
    if (header->type == PC__DATA_RETIRED) {
        pc__retired(served->loop->engine, served->server_id, header->request_id, header->status);
        return PC_OK;
    }
    struct pc__request request; /* its runs are filled in when it is known what they lie in */
    request.header = *header;
    request.number = request.header.flags & PC__DATA_MEMBER ? 0 : served->number;
    request.n_runs = 0;
    request.waited = false;
    memcpy(&request.asker, served->rx + sizeof *header, sizeof request.asker);
    pc__holder_reports(served->loop->engine, served->number, request.asker.load_bytes);
    return header->type == PC__DATA_HELD ? take_held(served, &request) : answer(served, &request);
}

/* False: for want of memory it cannot be said. */
static bool say_retire(struct served *served, uint64_t region, uint32_t id)
{
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC, .type = PC__DATA_RETIRE,
                                           .request_id = id, .region = region};
    struct pc__reply *reply = pc__reply_new();
    if (!reply)
        return false;
    if (pc__reply_head(reply, &header)) {
        pc__reply_free(served->loop->engine, reply);
        return false;
    }
    queue_reply(served, reply);
    return true;
}

void pc__served_retire(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc_engine *engine = loop->engine;
    const uint32_t id = (uint32_t)mail->b;
    pc__each(link, &loop->served)
    {
        struct served *served = pc__of(link, struct served, link);
        const uint64_t server_id = served->server_id;
        if (!pc__retire_tells(engine, id, server_id))
            continue;
        if (say_retire(served, mail->a, id))
            pc__served_event(loop, served, 0);
        else
            pc__retired(engine, server_id, id, PC_ERR_NO_MEMORY);
    }
    pc__retire_looked(engine, id);
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
static ssize_t send_some(struct pc__reply *reply, int fd)
{
    struct pc__piece *piece = &reply->pieces[reply->at_piece];
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

static bool advance(struct pc__reply *reply, uint64_t sent)
{
    while (sent) {
        struct pc__piece *piece = &reply->pieces[reply->at_piece];
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
        served->queued_bytes -= (uint64_t)sent;
        atomic_fetch_sub(&engine->serving_bytes, (uint64_t)sent);
        budget -= (uint64_t)sent < budget ? (uint64_t)sent : budget;
        if (advance(served->first, (uint64_t)sent)) {
            struct pc__reply *done = served->first;
            served->first = done->next;
            served->n_replies--;
            pc__reply_free(engine, done);
        }
    }
    uint32_t want = (served->first ? (uint32_t)EPOLLOUT : 0u) |
                    (takes_requests(served) ? (uint32_t)EPOLLIN : 0u);
    if (want != served->watching) {
        served->watching = want;
        pc__watch_change(served->loop, served->watch, want);
    }
    return true;
}

/* Bytes of the first request, 0 where more of it must come to know; negative: it makes no sense. */
static int64_t request_bytes(const struct served *served, struct pc__data_header *header)
{
    struct pc__data_rows rows;
    if (served->rx_bytes < sizeof *header)
        return 0;
    int rc = judged(pc__data_parse_header(served->rx, header));
    if (rc)
        return rc;
    switch (header->type) {
    case PC__DATA_GET:
    case PC__DATA_HELD:
        return (int64_t)(HEAD_BYTES + header->n_runs * sizeof(uint64_t));
    case PC__DATA_GET_ROWS:
        if (served->rx_bytes < sizeof *header + sizeof rows)
            return 0;
        rc = judged(pc__data_parse_rows(served->rx + sizeof *header, &rows));
        return rc ? rc : (int64_t)(sizeof *header + sizeof rows + rows.n_rows * sizeof(uint64_t));
    case PC__DATA_RETIRED:
        return (int64_t)sizeof *header;
    default:
        return pc__fail(PC_ERR_PROTOCOL, "an answer where a request was due");
    }
}

static bool has_request(const struct served *served)
{
    struct pc__data_header header;
    int64_t bytes = request_bytes(served, &header);
    return bytes < 0 || (bytes && served->rx_bytes >= (size_t)bytes);
}

/* Takes the requests that have wholly arrived. Negative: they make no sense. */
static int take_requests(struct served *served)
{
    while (takes_requests(served)) {
        struct pc__data_header header;
        int64_t bytes = request_bytes(served, &header);
        if (bytes < 0)
            return (int)bytes;
        if (!bytes || served->rx_bytes < (size_t)bytes)
            return PC_OK;
        int rc = handle(served, &header);
        if (rc)
            return rc == PC__WAIT ? PC_OK : rc;
        served->rx_bytes -= (size_t)bytes;
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
        if (take_requests(served)) {
            pc__count_add(&loop->engine->count.bad_messages, 1);
            close_served(served, pc_last_message());
            return;
        }
        if (!write_replies(served))
            return;
        if (served->first || !takes_requests(served) || !has_request(served))
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
    pc__link_init(&served->aside);
    served->loop = loop;
    served->server_id = mail->a;
    served->number = pc__holder_number(loop->engine, mail->a);
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
    int unsent = UNSENT_BYTES;
    (void)setsockopt(served->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
    pc__link_push(&loop->served, &served->link);
    pc__count_add(&loop->engine->count.served_connections, 1);
}

static uint64_t stalls_at(const struct served *served)
{
    bool waits = served->first || (served->rx_bytes && !served->n_aside);
    if (served->parked_region)
        return served->parked_until_ns;
    return waits ? served->progress_ns + served->loop->engine->fetch_timeout_ns : UINT64_MAX;
}

uint64_t pc__served_deadline(struct pc__loop *loop)
{
    uint64_t earliest = UINT64_MAX;
    pc__each(link, &loop->served)
    {
        const struct served *served = pc__of(link, struct served, link);
        uint64_t at = stalls_at(served), again = served->again_ns;
        at = again && again < at ? again : at;
        earliest = at < earliest ? at : earliest;
    }
    return earliest;
}

void pc__served_tick(struct pc__loop *loop, uint64_t now_ns)
{
    pc__each(link, &loop->served)
    {
        struct served *served = pc__of(link, struct served, link);
        if (stalls_at(served) <= now_ns) {
            pc__count_add(&loop->engine->count.bad_messages, 1);
            close_served(served, "it stalled");
        } else if (served->again_ns && served->again_ns <= now_ns) {
            look_aside(served);
            pc__served_event(loop, served, 0);
        }
    }
}

void pc__served_close_all(struct pc__loop *loop)
{
    while (!pc__link_empty(&loop->served))
        close_served(pc__of(loop->served.next, struct served, link), NULL);
    pc__rows_free_buffers(loop);
    free(loop->parts);
    loop->parts = NULL;
}
