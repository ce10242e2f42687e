/* ring_lanes.c - what large arrays take: a stream around the ring (Patarasuk, Yuan 2009; Sparker's
 * parallel directed ring, 4.1).
 *
 * An array has a segment for each member. What a member sends is, one segment after the other, what
 * it received before: of a segment that is being reduced the sum so far and its own share, and of
 * one that is done just that. So there are no steps to wait for: as soon as some numbers have come
 * in and are added, they may go out. What comes in to be added goes through a buffer that fits a
 * core's cache; what is done goes to its place.
 *
 * Segments are counted by the position of the member whose they are.
 *
 * In item k, counted over both phases, a member sends segment (position - 1 - k) and receives segment
 * (position - 2 - k): after members - 1 items it has its own segment's sum, and sends that next.
 */
#include "ring/ring.h"

#include "kernels/reduce.h"

#include <string.h>

/* What a lane sends and receives, as bytes of the array. */
struct stream {
    struct pc__ring_lane *lane;
    const struct pc__ring_job *job;
    pc__reduce_fn *reduce;
    uint64_t element_bytes;
    uint32_t n_segments;
    uint32_t n_reduced;        /* items that are added to when they come in; then they are placed */
    uint32_t first_segment;    /* of what is sent */
    uint32_t n_sent_items;
    uint32_t n_received_items;
    uint32_t lead;             /* items that may be sent before anything came in */
    uint32_t sending;          /* item */
    uint32_t receiving;
    uint64_t sent;             /* bytes of the item */
    uint64_t received;         /* and done with */
    uint64_t in_scratch;       /* bytes of an element that has not come in whole */
    uint64_t deadline_ns;
};

struct part {
    uint64_t offset;
    uint64_t n_bytes;
};

static uint64_t cut(uint64_t n, uint32_t index, uint32_t of)
{
    /* n * index may be too much for 64 bits. */
    return n / of * index + n % of * index / of;
}

/* This lane's part of a segment. */
static struct part part_of(const struct stream *st, uint32_t segment)
{
    uint64_t n = st->job->n_elements;
    if (st->n_segments > 1)
        segment = st->lane->ring->ranks[segment]; /* whose it is */
    uint64_t low = cut(n, segment, st->n_segments), high = cut(n, segment + 1, st->n_segments);
    uint32_t lane = st->lane->index, n_lanes = st->lane->ring->n_lanes;
    uint64_t from = low + cut(high - low, lane, n_lanes);
    uint64_t to = low + cut(high - low, lane + 1, n_lanes);
    return (struct part){from * st->element_bytes, (to - from) * st->element_bytes};
}

/* The segment of the k-th item that is sent; that which is received is the next one's. */
static uint32_t segment_of(const struct stream *st, uint32_t item)
{
    uint32_t back = item % st->n_segments;
    return (st->first_segment + st->n_segments - back) % st->n_segments;
}

static uint32_t segment_received(const struct stream *st, uint32_t item)
{
    return segment_of(st, item + st->lead);
}

/* How many bytes of the item that is being sent may go. */
static uint64_t may_send(const struct stream *st, uint64_t n_bytes)
{
    if (st->sending < st->lead || st->sending - st->lead < st->receiving)
        return n_bytes;
    return st->sending - st->lead == st->receiving ? st->received : 0;
}

static int64_t send_some(struct stream *st)
{
    struct pc_ring *ring = st->lane->ring;
    int64_t moved = 0;
    while (st->sending < st->n_sent_items) {
        struct part part = part_of(st, segment_of(st, st->sending));
        uint64_t limit = may_send(st, part.n_bytes);
        if (st->sent == part.n_bytes) {
            st->sending++;
            st->sent = 0;
            continue;
        }
        if (limit <= st->sent)
            break;
        /* The first item is what the caller gave; all others were made here. */
        const uint8_t *base = st->sending == 0 && st->job->in ? st->job->in : st->job->out;
        uint64_t most = limit - st->sent;
        if (most > PC__RING_SCRATCH_BYTES)
            most = PC__RING_SCRATCH_BYTES;
        int64_t n = pc__ring_send(ring, st->lane->next_fd, base + part.offset + st->sent, most,
                                  (ring->position + 1) % ring->n_members);
        if (n < 0)
            return n;
        if (n == 0)
            break;
        st->sent += (uint64_t)n;
        moved += n;
        if (moved >= 4 * PC__RING_SCRATCH_BYTES)
            break; /* what comes in must not wait */
    }
    return moved;
}

/* Adds what has come in of an item; what is left of an element stays in the buffer. */
static void add_in(struct stream *st, const struct part *part, uint64_t n_here)
{
    uint64_t whole = n_here / st->element_bytes * st->element_bytes;
    uint64_t at = part->offset + st->received;
    size_t n = whole / st->element_bytes;
    uint8_t *scratch = st->lane->scratch, *out = st->job->out + at;
    st->reduce(out, scratch, st->job->in + at, n);
    if (st->job->op == PC_OP_MEAN && st->receiving + 1 == st->n_reduced)
        pc__reduce_divide((int)st->job->dtype, out, n, st->lane->ring->n_members);
    st->in_scratch = n_here - whole;
    memmove(scratch, scratch + whole, st->in_scratch);
    st->received += whole;
}

static int64_t receive_some(struct stream *st)
{
    struct pc_ring *ring = st->lane->ring;
    uint32_t previous = (ring->position + ring->n_members - 1) % ring->n_members;
    int64_t moved = 0;
    while (st->receiving < st->n_received_items) {
        struct part part = part_of(st, segment_received(st, st->receiving));
        if (st->received == part.n_bytes) {
            st->receiving++;
            st->received = 0;
            continue;
        }
        bool adds = st->receiving < st->n_reduced;
        uint64_t left = part.n_bytes - st->received - st->in_scratch;
        uint64_t room = PC__RING_SCRATCH_BYTES - st->in_scratch;
        uint64_t most = left < room ? left : room;
        uint8_t *into = adds ? st->lane->scratch + st->in_scratch
                             : st->job->out + part.offset + st->received;
        int64_t n = pc__ring_receive(ring, st->lane->previous_fd, into, most, previous);
        if (n < 0)
            return n;
        if (n == 0)
            break;
        if (adds)
            add_in(st, &part, st->in_scratch + (uint64_t)n);
        else
            st->received += (uint64_t)n;
        moved += n;
        if (moved >= 4 * PC__RING_SCRATCH_BYTES)
            break;
    }
    return moved;
}

static int flow(struct stream *st)
{
    struct pc_ring *ring = st->lane->ring;
    uint64_t timeout_ns = st->job->timeout_ns;
    st->deadline_ns = pc__ring_now_ns() + timeout_ns;
    for (;;) {
        int64_t received = receive_some(st);
        if (received < 0)
            return (int)received;
        int64_t sent = send_some(st);
        if (sent < 0)
            return (int)sent;
        if (st->sending == st->n_sent_items && st->receiving == st->n_received_items)
            return PC_OK;
        if (sent + received > 0) {
            st->deadline_ns = pc__ring_now_ns() + timeout_ns;
            continue;
        }
        bool has_more = st->sending < st->n_sent_items &&
                        may_send(st, part_of(st, segment_of(st, st->sending)).n_bytes) > st->sent;
        struct pc__ring_wait wait = {
            .out_fd = st->sending < st->n_sent_items ? st->lane->next_fd : -1,
            .in_fd = st->receiving < st->n_received_items ? st->lane->previous_fd : -1,
            .wants_out = has_more,
            .wants_in = st->receiving < st->n_received_items,
            .out_member = (ring->position + 1) % ring->n_members,
            .in_member = (ring->position + ring->n_members - 1) % ring->n_members};
        int rc = pc__ring_wait(ring, &wait, st->deadline_ns);
        if (rc)
            return rc;
    }
}

int pc__ring_lane_run(struct pc__ring_lane *lane, const struct pc__ring_job *job)
{
    struct pc_ring *ring = lane->ring;
    uint32_t n = ring->n_members, steps = n - 1;
    struct stream st = {.lane = lane,
                        .job = job,
                        .reduce = pc__reducer((int)job->dtype, (int)job->op),
                        .element_bytes = pc__dtype_bytes((int)job->dtype),
                        .n_segments = n,
                        .first_segment = (ring->position + n - 1) % n,
                        .lead = 1};
    switch (job->kind) {
    case PC_RING_ALLREDUCE:
        st.n_reduced = steps;
        st.n_sent_items = st.n_received_items = 2 * steps;
        break;
    case PC_RING_REDUCE_SCATTER:
        st.n_reduced = st.n_sent_items = st.n_received_items = steps;
        break;
    case PC_RING_ALL_GATHER:
        st.first_segment = ring->position;
        st.n_sent_items = st.n_received_items = steps;
        break;
    default: /* a broadcast: one segment, passed on by all but the last */
        st.n_segments = 1;
        st.first_segment = 0;
        st.lead = pc__ring_rank(ring) == job->root;
        st.n_received_items = !st.lead;
        st.n_sent_items = ring->ranks[(ring->position + 1) % n] != job->root;
        break;
    }
    return flow(&st);
}
