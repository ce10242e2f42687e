/* fetch.c - asking other servers for blocks, many requests in flight, and taking the answers.
 *
 * Entered only by the loop that owns the peer. Answers come in any order; urgent and bulk fetches have
 * a connection each, so a stopped thread does not wait behind a scan. A block that it needs and that is
 * queued as bulk moves over (pc__fetch_hurry). A connection that breaks, lies or makes no progress for
 * fetch_timeout is closed; what it still owed goes to the front of the queue and Python is asked for a
 * new one. A fetch is given up at give_up_ns: its blocks leave in_flight and whoever waits is told.
 *
 * Bytes from the network are copied once into rx and once into the generation (fill.c). They are
 * never received into mapped memory: a reader would see half a block.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define LOW_WATER_BYTES (256u << 10)
#define READS_PER_EVENT 8 /* then the other descriptors get their turn */

/* ------------------------------------------------------------------ lanes */

struct pc__peer *pc__peer_of(struct pc__loop *loop, uint64_t server_id)
{
    pc__each(link, &loop->peers)
    {
        struct pc__peer *peer = pc__of(link, struct pc__peer, link);
        if (peer->server_id == server_id)
            return peer;
    }
    struct pc__peer *peer = calloc(1, sizeof *peer);
    if (!peer)
        return NULL;
    peer->loop = loop;
    peer->server_id = server_id;
    pc__link_init(&peer->unsure);
    for (int i = 0; i < PC__LANES_PER_LOOP; i++) {
        peer->lanes[i].fd = -1;
        peer->lanes[i].layer_requests = PC__LAYER_REQUESTS;
        pc__link_init(&peer->lanes[i].queued);
        pc__link_init(&peer->lanes[i].sent);
    }
    pc__link_push(&loop->peers, &peer->link);
    return peer;
}

/* From here on it is the turn of whatever waits: it is given up if no connection comes. */
static void ask_for_peer(struct pc__peer *peer, struct pc__lane *lane)
{
    struct pc_engine *engine = peer->loop->engine;
    uint64_t give_up_ns = pc__now_ns() + engine->fault_timeout_ns;
    pc__each(link, &lane->queued)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        if (!fetch->give_up_ns)
            fetch->give_up_ns = give_up_ns;
    }
    if (!lane->asked) /* a question that is lost is asked again with the next fetch */
        lane->asked = pc__engine_event(engine, PC_EVENT_NEED_PEER, 0, 0, peer->server_id, "%s", "");
}

/* What was to come from here by way of a redirect need not: its home has it. */
static void turn_back(struct pc__peer *peer, struct pc__lane *lane)
{
    if (peer->loop->stopping)
        return;
    pc__each(link, &lane->queued)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        if (!fetch->home_id)
            continue;
        pc__link_remove(link);
        pc__redirect_failed(peer->loop, fetch);
    }
}

static void lane_close(struct pc__peer *peer, struct pc__lane *lane, const char *why)
{
    struct pc_engine *engine = peer->loop->engine;
    if (lane->fd < 0)
        return;
    pc__watch_remove(peer->loop, lane->watch);
    lane->watch = NULL;
    close(lane->fd);
    lane->fd = -1;
    pc__count_sub(&engine->count.peer_connections, 1);
    lane->tx_bytes = 0;
    lane->rx_begin = lane->rx_end = 0;
    lane->rows_due = 0;
    lane->in_rows = false;
    lane->in_reply = false;
    while (!pc__link_empty(&lane->sent)) { /* newest first, each to the front: order is kept */
        struct pc__fetch *fetch = pc__of(lane->sent.prev, struct pc__fetch, link);
        pc__link_remove(&fetch->link);
        pc__count_sub(&engine->count.fetches_in_flight, 1);
        pc__count_add(&engine->count.fetch_retries, 1);
        fetch->on_wire = false;
        if (fetch->error || fetch->is_filled)
            pc__fetch_drop(engine, fetch);
        else
            pc__link_push(lane->queued.next, &fetch->link);
    }
    lane->n_sent = 0;
    turn_back(peer, lane);
    if (!pc__link_empty(&lane->queued)) {
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_NO_PEER, 0, peer->server_id,
                         "connection to server %016llx closed (%s); asking again",
                         (unsigned long long)peer->server_id, why);
        ask_for_peer(peer, lane);
    } else { /* a server that went may never come again */
        free(lane->rx);
        free(lane->tx);
        lane->rx = lane->tx = NULL;
        lane->tx_capacity = 0;
    }
}

/* Sends what may be sent: queued fetches become requests, request bytes go to the socket. */
static void lane_pump(struct pc__peer *peer, struct pc__lane *lane)
{
    struct pc_engine *engine = peer->loop->engine;
    if (lane->fd < 0) {
        if (!pc__link_empty(&lane->queued))
            ask_for_peer(peer, lane);
        return;
    }
    while (!pc__link_empty(&lane->queued) && lane->n_sent < pc__most_sent(peer, lane)) {
        struct pc__fetch *fetch = pc__of(lane->queued.next, struct pc__fetch, link);
        pc__link_remove(&fetch->link);
        int rc = pc__request_put(peer->loop, lane, fetch);
        if (rc) {
            pc__fetch_fail(engine, fetch, rc);
            pc__fetch_drop(engine, fetch);
            continue;
        }
        uint64_t now = pc__now_ns();
        if (!fetch->give_up_ns)
            fetch->give_up_ns = now + engine->fault_timeout_ns;
        fetch->sent_ns = now;
        fetch->on_wire = true;
        pc__hedge_sent(peer, lane, fetch, now);
        fetch->was_alone = !lane->n_sent && (lane == &peer->lanes[1] || !peer->lanes[1].n_sent);
        if (!lane->n_sent++)
            lane->progress_ns = now;
        pc__link_push(&lane->sent, &fetch->link);
        pc__count_add(&engine->count.fetch_requests, 1);
        pc__count_add(&engine->count.fetches_in_flight, 1);
    }
    if (lane->tx_bytes) {
        ssize_t sent = send(lane->fd, lane->tx, lane->tx_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        /* A broken connection is closed by lane_read, to which epoll sends us: here, somebody may be
         * in the middle of what it answered. */
        if (sent > 0) {
            pc__count_add(&engine->count.bytes_sent, sent);
            lane->tx_bytes -= (size_t)sent;
            memmove(lane->tx, lane->tx + sent, lane->tx_bytes);
        }
    }
    const bool waits = lane->tx_bytes > 0;
    if (lane->waits_for_room != waits)
        pc__watch_change(peer->loop, lane->watch, EPOLLIN | (waits ? (uint32_t)EPOLLOUT : 0u));
    lane->waits_for_room = waits;
}

void pc__batch_submit(struct pc__loop *loop, struct pc__batch *batch)
{
    struct pc_engine *engine = loop->engine;
    struct pc__lane *touched = NULL;
    struct pc__peer *peer = NULL;
    while (!pc__link_empty(&batch->fetches)) {
        struct pc__fetch *fetch = pc__of(batch->fetches.next, struct pc__fetch, link);
        pc__link_remove(&fetch->link);
        if (fetch->server_id == PC__FROM_FILE) {
            pc__file_ask_fetch(engine, fetch);
            continue;
        }
        if (fetch->server_id == engine->server_id || fetch->server_id == 0) {
            pc__fetch_fill_here(loop, fetch);
            continue;
        }
        if (fetch->server_id == PC__FROM_DISK) {
            pc__fetch_from_disk(loop, fetch);
            continue;
        }
        if (fetch->region->has_repair && engine->observers.fetch_asked(loop, fetch))
            continue; /* another server is asked */
        struct pc__peer *next = pc__peer_of(loop, fetch->server_id);
        if (!next) {
            pc__fetch_fail(engine, fetch, PC_ERR_NO_MEMORY);
            pc__fetch_drop(engine, fetch);
            continue;
        }
        if (peer && peer != next)
            lane_pump(peer, touched);
        peer = next;
        touched = &peer->lanes[fetch->urgent ? 0 : 1];
        pc__link_push(&touched->queued, &fetch->link);
    }
    if (peer)
        lane_pump(peer, touched);
}

void pc__fetch_queue(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc__peer *peer = pc__peer_of(loop, fetch->server_id);
    if (!peer) {
        pc__fetch_fail(loop->engine, fetch, PC_ERR_NO_MEMORY);
        pc__fetch_drop(loop->engine, fetch);
        return;
    }
    struct pc__lane *lane = &peer->lanes[fetch->urgent ? 0 : 1];
    pc__link_push(&lane->queued, &fetch->link);
    lane_pump(peer, lane);
}

bool pc__fetch_covers(const struct pc__fetch *fetch, uint64_t block)
{
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++)
        if (block >= fetch->runs[i].first_block &&
            block - fetch->runs[i].first_block < fetch->runs[i].n_blocks)
            return true;
    return false;
}

void pc__fetch_hurry(struct pc__loop *loop, struct pc__region *region,
                     const struct pc__generation *generation, uint64_t block)
{
    struct pc__peer *peer = pc__peer_of(loop, pc__home_of(region, block));
    if (region->has_repair)
        loop->engine->observers.block_hurried(loop, generation, block);
    pc__from_disk_hurry(loop->engine, generation, block);
    if (region->in_file)
        pc__file_hurry(loop->engine, generation, block);
    if (!peer)
        return; /* it comes in its turn */
    pc__each(link, &peer->lanes[1].queued)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        if (fetch->generation != generation || !pc__fetch_covers(fetch, block))
            continue;
        pc__link_remove(link);
        fetch->urgent = true;
        pc__link_push(peer->lanes[0].queued.next, link);
        lane_pump(peer, &peer->lanes[0]);
        return;
    }
    pc__each(link, &peer->unsure)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        fetch->urgent |= fetch->generation == generation && pc__fetch_covers(fetch, block);
    }
}

/* -------------------------------------------------------------- answers */

static uint64_t bytes_in(const struct pc__lane *lane)
{
    return lane->rx_end - lane->rx_begin;
}

static bool is_hole(const struct pc__lane *lane, uint64_t position)
{
    return lane->holes[position / 64] >> (position % 64) & 1u;
}

/* Blocks from the reply's position on that are alike, at most n. */
static uint64_t alike(const struct pc__lane *lane, uint64_t n)
{
    uint64_t k = 1;
    while (k < n &&
           is_hole(lane, lane->reply_position + k) == is_hole(lane, lane->reply_position))
        k++;
    return k;
}

/* Which of an answer's n blocks: n bits, and no more. */
static int take_bitmap(struct pc__lane *lane, size_t *offset, uint32_t n, uint64_t *bits)
{
    size_t words = (n + 63u) / 64u;
    memcpy(bits, lane->rx + lane->rx_begin + *offset, words * sizeof(uint64_t));
    *offset += words * sizeof(uint64_t);
    if (n % 64 && bits[words - 1] >> (n % 64))
        return pc__fail(PC_ERR_PROTOCOL, "a bitmap of more than %u blocks", n);
    return PC_OK;
}

/* Removes the positions of `elsewhere` from the holes. */
static void close_up(struct pc__lane *lane, uint32_t n)
{
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64] = {0};
    uint32_t to = 0;
    for (uint32_t k = 0; k < n; k++) {
        if (lane->elsewhere[k / 64] >> (k % 64) & 1u)
            continue;
        if (is_hole(lane, k))
            holes[to / 64] |= 1ull << (to % 64);
        to++;
    }
    memcpy(lane->holes, holes, sizeof holes);
}

/* The bitmaps of an answer; what is elsewhere is asked for there. As take_header. */
static int take_bitmaps(struct pc__peer *peer, struct pc__lane *lane, struct pc__fetch **fetch,
                        const struct pc__data_header *header)
{
    uint32_t n = header->n_blocks, n_elsewhere = 0;
    size_t bitmap = (n + 63u) / 64u * sizeof(uint64_t), offset = sizeof *header;
    bool holes = header->flags & PC__DATA_HOLES, elsewhere = header->flags & PC__DATA_ELSEWHERE;
    int rc = PC_OK;
    if (bytes_in(lane) < offset + (holes ? bitmap : 0) + (elsewhere ? bitmap : 0))
        return 0;
    memset(lane->holes, 0, sizeof lane->holes);
    memset(lane->elsewhere, 0, sizeof lane->elsewhere);
    if (holes)
        rc = take_bitmap(lane, &offset, n, lane->holes);
    if (!rc && elsewhere)
        rc = take_bitmap(lane, &offset, n, lane->elsewhere);
    for (size_t i = 0; i < PC__DATA_MAX_BLOCKS / 64 && !rc; i++) {
        if (lane->holes[i] & lane->elsewhere[i])
            rc = pc__fail(PC_ERR_PROTOCOL, "blocks that are zeros, and elsewhere");
        n_elsewhere += (uint32_t)__builtin_popcountll(lane->elsewhere[i]);
    }
    if (rc)
        return rc;
    size_t sources = (*fetch)->home_id ? 0 : n_elsewhere * sizeof(struct pc__data_elsewhere);
    if (bytes_in(lane) < offset + sources)
        return 0;
    pc__hedge_answered(peer->loop, *fetch, !n_elsewhere);
    if (n_elsewhere && (*fetch)->sink) /* of a member: lost there */
        (*fetch)->error = PC_ERR_HOME_LOST;
    else if (n_elsewhere && !(*fetch)->is_filled && !(*fetch)->unwanted)
        rc = pc__redirect(peer->loop, fetch, lane->elsewhere, lane->rx + lane->rx_begin + offset,
                          n - n_elsewhere);
    if (rc)
        return rc;
    if (n_elsewhere)
        close_up(lane, n);
    lane->rx_begin += offset + sources;
    lane->reply_blocks = n - n_elsewhere;
    return 1;
}

/* 1: a header was taken; 0: more bytes are needed; negative: the peer makes no sense. */
static int take_header(struct pc__peer *peer, struct pc__lane *lane, struct pc__fetch **fetch)
{
    struct pc__data_header header;
    if (bytes_in(lane) < sizeof header)
        return 0;
    int rc = pc__data_parse_header(lane->rx + lane->rx_begin, &header);
    if (!rc)
        rc = pc__answer_fits(&header, *fetch);
    if (rc)
        return rc;
    if (header.status < 0) {
        lane->rx_begin += sizeof header;
        (*fetch)->error = header.status;
        lane->reply_blocks = 0;
    } else {
        rc = take_bitmaps(peer, lane, fetch, &header);
        if (rc <= 0)
            return rc;
    }
    lane->reply_position = 0;
    lane->in_reply = true;
    return 1;
}

/* Blocks of the reply from this position on that are not zeros, and so are sent. */
static uint64_t sent_from(const struct pc__lane *lane, uint32_t position)
{
    uint64_t blocks = 0;
    for (uint32_t i = position; i < lane->reply_blocks; i++)
        blocks += !is_hole(lane, i);
    return blocks;
}

/* Deals with the blocks that have wholly arrived. 1: the reply is complete. */
static int take_blocks(struct pc_engine *engine, struct pc__lane *lane, struct pc__fetch *fetch)
{
    while (lane->reply_position < lane->reply_blocks) {
        bool hole = is_hole(lane, lane->reply_position);
        const struct pc_run *run = &fetch->runs[fetch->at_run];
        uint64_t n = hole ? run->n_blocks : bytes_in(lane) >> PC_BLOCK_SHIFT;
        n = n < run->n_blocks ? n : run->n_blocks;
        if (!n)
            return 0;
        n = alike(lane, n);
        int rc = fetch->is_filled ? PC_ERR_EXISTS : fetch->error;
        if (!rc && fetch->sink)
            fetch->sink->took(fetch->sink, n, hole ? NULL : lane->rx + lane->rx_begin);
        if (!rc && fetch->prefetch) /* before the fill, which answers who then asks for counters */
            pc__count_add(&engine->count.prefetched_blocks, n);
        if (!rc && fetch->home_id && !hole)
            pc__count_add(&engine->count.peer_blocks_fetched, n);
        if (!rc && fetch->sink)
            rc = PC_OK;
        else if (!rc && hole)
            rc = pc__fill_zeros(engine, fetch->region, fetch->generation, run->first_block, n);
        else if (!rc)
            rc = pc__fill_insert(engine, fetch->region, fetch->generation, run->first_block, n,
                                 lane->rx + lane->rx_begin, true);
        if (rc && !fetch->error && !fetch->is_filled) {
            pc__fetch_fail(engine, fetch, rc);
            fetch->error = rc;
        }
        if (!hole)
            lane->rx_begin += n << PC_BLOCK_SHIFT;
        lane->reply_position += (uint32_t)n;
        pc__fetch_advance(fetch, n);
    }
    return 1;
}

/* All of what a peer was asked for has come: the home that sent us there may send others to us. */
static void tell_home(struct pc__loop *loop, const struct pc__fetch *fetch)
{
    struct pc__peer *home = pc__peer_of(loop, fetch->home_id);
    struct pc__lane *lane = home ? &home->lanes[home->lanes[1].fd >= 0 ? 1 : 0] : NULL;
    if (!lane || lane->fd < 0 || pc__lane_room(lane, PC__HELD_BYTES))
        return; /* it forgets what it waits to hear of after a while */
    lane->tx_bytes += pc__redirect_held(loop->engine, fetch, lane->tx + lane->tx_bytes);
    lane_pump(home, lane);
}

/* The answer to the first of sent is complete. */
static void end_answer(struct pc__peer *peer, struct pc__lane *lane, struct pc__fetch *fetch)
{
    struct pc_engine *engine = peer->loop->engine;
    lane->in_reply = lane->in_rows = false;
    pc__link_remove(&fetch->link);
    lane->n_sent--;
    pc__count_sub(&engine->count.fetches_in_flight, 1);
    if (fetch->home_id && !fetch->error && fetch->n_runs)
        tell_home(peer->loop, fetch);
    pc__fetch_drop(engine, fetch);
}

/* Answers come in any order: what one is to becomes the first of sent. As take_header. Something else
 * may come between them: then `sent` is as it was, and *is_notice. */
static int find_asked(struct pc__peer *peer, struct pc__lane *lane, bool *is_notice)
{
    struct pc__data_header header;
    if (bytes_in(lane) < sizeof header)
        return 0;
    int rc = pc__data_parse_header(lane->rx + lane->rx_begin, &header);
    *is_notice = !rc && header.type == PC__DATA_RETIRE;
    if (*is_notice)
        rc = pc__lane_room(lane, sizeof header);
    if (rc)
        return rc;
    if (*is_notice) {
        lane->rx_begin += sizeof header;
        lane->tx_bytes += peer->loop->engine->observers.home_retires(peer, &header,
                                                                  lane->tx + lane->tx_bytes);
        return 1;
    }
    pc__each(link, &lane->sent)
    {
        if (pc__of(link, struct pc__fetch, link)->request_id != header.request_id)
            continue;
        pc__link_remove(link);
        pc__link_push(lane->sent.next, link);
        return 1;
    }
    return pc__fail(PC_ERR_PROTOCOL, "an answer that nobody asked for");
}

/* What answers one question after the other and skips one owes it for ever: blocks are sent in the order
 * in which they were put together, and that takes less than PC__REDIRECT_PATIENCE_NS longer for one
 * than for another. */
static int check_skipped(const struct pc__loop *loop, const struct pc__lane *lane, uint64_t sent_ns)
{
    const struct pc__fetch *oldest = pc__of(lane->sent.next, struct pc__fetch, link);
    if (pc__link_empty(&lane->sent) || oldest->sent_ns >= sent_ns ||
        sent_ns - oldest->sent_ns < pc__patience_ns(loop, lane))
        return PC_OK;
    return pc__fail(PC_ERR_PROTOCOL, "no answer to one question, but to those after it");
}

/* An answer without blocks that is not the last word: others are asked, the registry before them. */
static bool asks_on(struct pc__peer *peer, struct pc__lane *lane, struct pc__fetch *fetch)
{
    const bool unknown = fetch->error == PC_ERR_NO_REGION && !fetch->generation->is_layer;
    if (!fetch->error || fetch->is_filled || fetch->unwanted || (!fetch->home_id && !unknown))
        return false;
    lane->in_reply = false;
    lane->n_sent--;
    pc__link_remove(&fetch->link);
    fetch->on_wire = false;
    pc__count_sub(&peer->loop->engine->count.fetches_in_flight, 1);
    fetch->error = 0;
    if (fetch->home_id)
        pc__redirect_failed(peer->loop, fetch);
    else
        pc__rehome_unknown(peer, fetch);
    return true;
}

static int take_answers(struct pc__peer *peer, struct pc__lane *lane)
{
    struct pc_engine *engine = peer->loop->engine;
    while (bytes_in(lane) || lane->in_reply || lane->in_rows) {
        if (!lane->in_reply && !lane->in_rows) {
            bool is_notice = false;
            int rc = find_asked(peer, lane, &is_notice);
            if (rc <= 0)
                return rc;
            if (is_notice)
                continue;
        }
        struct pc__fetch *fetch = pc__of(lane->sent.next, struct pc__fetch, link);
        if (fetch->gather || !lane->in_reply) { /* of rows: the whole of it */
            int rc = fetch->gather ? pc__gather_take(engine, lane, fetch)
                                   : take_header(peer, lane, &fetch);
            if (rc <= 0)
                return rc;
            if (asks_on(peer, lane, fetch))
                continue;
            if (fetch->error) /* NO_REGION: of a layer, which nobody has but who staged it */
                pc__fetch_fail(engine, fetch,
                               fetch->error == PC_ERR_NO_REGION ? PC_ERR_HOME_LOST : fetch->error);
        }
        if (!lane->in_rows && !take_blocks(engine, lane, fetch))
            return 0;
        const uint64_t came = lane->in_rows ? 0 : sent_from(lane, 0);
        const bool has_bytes = lane->in_rows || came; /* others may go before */
        const uint64_t sent_ns = fetch->sent_ns;
        if (fetch->generation->is_layer && !fetch->sink && lane == &peer->lanes[1])
            pc__layer_came(lane, pc__now_ns() - sent_ns);
        if (came && fetch->was_alone && !fetch->error)
            pc__trips_add(&peer->trips, came, pc__now_ns() - sent_ns);
        pc__hedge_came(peer, fetch);
        end_answer(peer, lane, fetch);
        int rc = has_bytes ? check_skipped(peer->loop, lane, sent_ns) : PC_OK;
        if (rc)
            return rc;
    }
    return 0;
}

/* In the middle of a long reply, sleep until a good piece of it is there: each waking of a thread
 * costs as much as copying 100 KiB. Never more than is sure to come. */
static void set_low_water(struct pc__lane *lane)
{
    uint64_t due = lane->rows_due ? lane->rows_due : 1;
    if (lane->in_reply)
        due = (sent_from(lane, lane->reply_position) << PC_BLOCK_SHIFT) - bytes_in(lane);
    int bytes = due < LOW_WATER_BYTES ? 1 : (int)LOW_WATER_BYTES;
    if (bytes == lane->low_water)
        return;
    lane->low_water = bytes;
    (void)setsockopt(lane->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

static void lane_read(struct pc__peer *peer, struct pc__lane *lane)
{
    for (int i = 0; i < READS_PER_EVENT; i++) {
        if (lane->rx_begin) { /* what is left is less than a block, or a header */
            memmove(lane->rx, lane->rx + lane->rx_begin, bytes_in(lane));
            lane->rx_end -= lane->rx_begin;
            lane->rx_begin = 0;
        }
        size_t room = PC__RX_BYTES - lane->rx_end;
        uint8_t *into = lane->rx + lane->rx_end;
        const bool rows = lane->rows_due && !bytes_in(lane); /* straight to where they go */
        if (rows) {
            room = lane->rows_due;
            into = pc__gather_into(lane, pc__of(lane->sent.next, struct pc__fetch, link));
        }
        ssize_t got = recv(lane->fd, into, room, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (got <= 0) {
            lane_close(peer, lane, got ? strerror(errno) : "the other side closed it");
            return;
        }
        pc__count_add(&peer->loop->engine->count.bytes_received, got);
        if (rows)
            lane->rows_due -= (uint32_t)got;
        else
            lane->rx_end += (size_t)got;
        lane->progress_ns = pc__now_ns();
        peer->avoid_until_ns = 0;
        if (take_answers(peer, lane) < 0) {
            pc__count_add(&peer->loop->engine->count.bad_messages, 1);
            lane_close(peer, lane, pc_last_message());
            return;
        }
        if ((size_t)got < room)
            break;
    }
    set_low_water(lane);
    lane_pump(peer, lane); /* answers made room for requests */
}

void pc__lane_event(struct pc__loop *loop, struct pc__peer *peer, int lane_index, uint32_t events)
{
    (void)loop;
    struct pc__lane *lane = &peer->lanes[lane_index];
    if (lane->fd >= 0 && (events & EPOLLOUT))
        lane_pump(peer, lane);
    if (lane->fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        lane_read(peer, lane);
}

/* ------------------------------------------------- what Python and time say */

void pc__peer_connected(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__peer *peer = pc__peer_of(loop, mail->a);
    struct pc__lane *lane = peer ? &peer->lanes[mail->lane] : NULL;
    if (!lane || lane->fd >= 0 || loop->stopping) {
        close(mail->fd); /* a lane that works is not replaced */
        return;
    }
    lane->asked = false;
    if (!lane->rx)
        lane->rx = malloc(PC__RX_BYTES);
    lane->watch = lane->rx ? pc__watch_add(loop, PC__WATCH_LANE, mail->fd, mail->lane, peer,
                                           EPOLLIN)
                           : NULL;
    if (!lane->watch) {
        close(mail->fd);
        return;
    }
    lane->fd = mail->fd;
    lane->rx_begin = lane->rx_end = 0;
    lane->in_reply = lane->waits_for_room = false;
    lane->low_water = 1;
    int one = 1;
    (void)setsockopt(lane->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pc__count_add(&loop->engine->count.peer_connections, 1);
    pc__unreached_forget(loop->engine, peer->server_id);
    lane_pump(peer, lane);
}

static void fail_one(struct pc__loop *loop, struct pc__fetch *fetch, int error)
{
    pc__link_remove(&fetch->link);
    if (fetch->home_id && error != PC_ERR_CLOSED) {
        pc__redirect_failed(loop, fetch);
        return;
    }
    pc__fetch_fail(loop->engine, fetch, error);
    pc__fetch_drop(loop->engine, fetch);
}

static void fail_all(struct pc__loop *loop, struct pc__link *fetches, int error)
{
    while (!pc__link_empty(fetches))
        fail_one(loop, pc__of(fetches->next, struct pc__fetch, link), error);
}

static void fail_queued(struct pc__loop *loop, struct pc__lane *lane, int error,
                        uint64_t not_after_ns)
{
    pc__each(link, &lane->queued)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        if (!fetch->give_up_ns || fetch->give_up_ns > not_after_ns)
            continue;
        fail_one(loop, fetch, error);
    }
}

void pc__peer_is_lost(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__peer *peer = pc__peer_of(loop, mail->a);
    for (int i = 0; peer && i < PC__LANES_PER_LOOP; i++) {
        struct pc__lane *lane = &peer->lanes[i];
        if (lane->fd >= 0)
            continue;
        lane->asked = false;
        if (mail->error == PC_ERR_TIMEOUT) /* it lives: each waits until its own deadline */
            continue;
        if (mail->error != PC_ERR_HOME_LOST) {
            fail_queued(loop, lane, mail->error, UINT64_MAX);
            continue;
        }
        struct pc__link failed;
        pc__link_init(&failed);
        pc__rehome_await(loop, peer, lane, &failed);
        fail_all(loop, &failed, mail->error);
    }
    if (peer && mail->error == PC_ERR_TIMEOUT)
        pc__peer_ask_again(peer);
    else if (mail->error != PC_ERR_HOME_LOST)
        pc__unreached_forget(loop->engine, mail->a);
}

void pc__peer_ask_again(struct pc__peer *peer)
{
    for (int i = 0; i < PC__LANES_PER_LOOP; i++)
        if (peer->lanes[i].fd < 0 && !pc__link_empty(&peer->lanes[i].queued))
            ask_for_peer(peer, &peer->lanes[i]);
}

uint64_t pc__peers_deadline(struct pc__loop *loop)
{
    uint64_t earliest = UINT64_MAX;
    pc__each(link, &loop->peers)
    {
        struct pc__peer *peer = pc__of(link, struct pc__peer, link);
        uint64_t again_ns = pc__rehome_deadline(peer);
        earliest = again_ns < earliest ? again_ns : earliest;
        for (int i = 0; i < PC__LANES_PER_LOOP; i++) {
            const struct pc__lane *lane = &peer->lanes[i];
            uint64_t at = UINT64_MAX;
            if (lane->n_sent)
                at = lane->progress_ns + pc__patience_ns(loop, lane);
            else if (!pc__link_empty(&lane->queued)) /* none is 0: there is no connection */
                at = pc__of(lane->queued.next, struct pc__fetch, link)->give_up_ns;
            at = lane->hedge_ns && lane->hedge_ns < at ? lane->hedge_ns : at;
            earliest = at < earliest ? at : earliest;
        }
    }
    return earliest;
}

void pc__peers_tick(struct pc__loop *loop, uint64_t now_ns)
{
    pc__each(link, &loop->peers)
    {
        struct pc__peer *peer = pc__of(link, struct pc__peer, link);
        for (int i = 0; i < PC__LANES_PER_LOOP; i++) {
            struct pc__lane *lane = &peer->lanes[i];
            if (lane->n_sent && lane->progress_ns + pc__patience_ns(loop, lane) <= now_ns)
                lane_close(peer, lane, "no answer in time");
            pc__hedge_tick(peer, lane, now_ns);
            if (lane->fd < 0 && !pc__link_empty(&lane->queued))
                fail_queued(loop, lane, PC_ERR_TIMEOUT, now_ns);
        }
        pc__rehome_tick(peer, now_ns);
    }
}

void pc__peers_close(struct pc__loop *loop)
{
    while (!pc__link_empty(&loop->peers)) {
        struct pc__peer *peer = pc__of(loop->peers.next, struct pc__peer, link);
        for (int i = 0; i < PC__LANES_PER_LOOP; i++) {
            struct pc__lane *lane = &peer->lanes[i];
            lane->asked = true; /* nobody is to connect again */
            lane_close(peer, lane, "the server stops");
            fail_queued(loop, lane, PC_ERR_CLOSED, UINT64_MAX);
            free(lane->tx);
            free(lane->rx);
        }
        pc__rehome_close(peer);
        pc__link_remove(&peer->link);
        free(peer);
    }
    free(loop->bounce);
    free(loop->plan);
}
