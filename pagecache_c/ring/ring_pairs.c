/* ring_pairs.c - what small arrays take: recursive doubling (Thakur, Rabenseifner, Gropp 2005).
 *
 * In round k a member exchanges with the one whose number differs in bit k all that it has so far,
 * so that after log2(members) rounds everyone has everything. Members beyond a power of two give
 * what they have to a neighbour first, and get the result from it last.
 *
 * Each message says what its sender was asked for. So nobody adds what does not fit, and everyone
 * hears of it: who sees two that differ passes both on, in place of a sum. Large arrays go through
 * the same without their data, before they move.
 *
 * The sum of two is computed with the lower position's side first, at both: the same bits.
 */
#include "ring/ring.h"

#include "kernels/reduce.h"

#include <string.h>

struct exchange {
    struct pc_ring *ring;
    struct pc__ring_message say;
    int dtype;                 /* that is computed with */
    uint8_t *data;
    uint8_t *theirs;
    uint64_t n_bytes;
    uint64_t timeout_ns;
    bool has_data;             /* of a broadcast: it has come */
};

static uint32_t power_below(uint32_t n)
{
    uint32_t power = 1;
    while (power * 2 <= n)
        power *= 2;
    return power;
}

/* Members 0, 2, ... 2 * extra - 2 give to their right neighbour; the others have new numbers. */
static uint32_t member_of(uint32_t number, uint32_t extra)
{
    return number < extra ? 2 * number + 1 : number + extra;
}

/* Once, in ascending order. Their new number. */
static int add_partner(uint32_t *partners, int n, uint32_t position)
{
    int at = n;
    for (int i = 0; i < n; i++)
        if (partners[i] == position)
            return n;
    for (; at > 0 && partners[at - 1] > position; at--)
        partners[at] = partners[at - 1];
    partners[at] = position;
    return n + 1;
}

PC_API int pc_ring_partners(uint32_t position, uint32_t n_members, uint32_t *out)
{
    if (n_members == 0 || n_members > PC__RING_MAX_MEMBERS || position >= n_members)
        return pc__fail(PC_ERR_RANGE, "member %u of %u", position, n_members);
    uint32_t power = power_below(n_members), extra = n_members - power;
    int n = 0;
    if (n_members > 1) { /* the neighbours, for notices */
        n = add_partner(out, n, (position + 1) % n_members);
        n = add_partner(out, n, (position + n_members - 1) % n_members);
    }
    if (position < 2 * extra && position % 2 == 0)
        return n;
    uint32_t number = position < 2 * extra ? position / 2 : position - extra;
    for (uint32_t bit = 1; bit < power; bit *= 2)
        n = add_partner(out, n, member_of(number ^ bit, extra));
    return n;
}

/* What to make of a head that has come in whole. */
static int take_head(struct pc_ring *ring, struct pc__ring_pair *pair)
{
    const struct pc__ring_message *head = &pair->head;
    uint32_t rank = ring->ranks[pair->position];
    if (!pc__ring_is_message(ring, head)) {
        pc__ring_failed(ring, PC_ERR_PROTOCOL, rank, false);
        return pc__fail(PC_ERR_PROTOCOL, "member %u sent nonsense", rank);
    }
    pair->payload_left = head->payload_bytes;
    if (head->what == PC__RING_WAITS) {
        pair->waits_for = head->mine.member + 1;
        pair->n_head = 0;
        return PC_OK;
    }
    if (head->what == PC__RING_ASKS || head->what == PC__RING_DIFFERS) {
        pair->waits_for = 0;
        return PC_OK;
    }
    pair->n_head = 0;
    if (head->mine.member != pc__ring_rank(ring))
        rank = head->mine.member;
    pc__ring_failed(ring, PC_ERR_MEMBER, rank, head->what == PC__RING_SILENT);
    return pc__fail(PC_ERR_MEMBER, "a partner has lost member %u", rank);
}

/* Some of a partner's message: head, then payload, which goes to ex->theirs. Bytes of it that are
 * no notice's; 0 where it would wait. */
static int64_t hear(struct exchange *ex, struct pc__ring_pair *pair, bool *is_whole)
{
    struct pc_ring *ring = ex->ring;
    uint64_t head_bytes = sizeof pair->head;
    if (pair->n_head < head_bytes) {
        int64_t n = pc__ring_receive(ring, pair->fd, (uint8_t *)&pair->head + pair->n_head,
                                     head_bytes - pair->n_head, pair->position);
        if (n <= 0)
            return n;
        pair->n_head += (uint64_t)n;
        if (pair->n_head < head_bytes)
            return 0;
        int rc = take_head(ring, pair);
        *is_whole = !rc && pair->n_head && pair->payload_left == 0;
        return rc ? rc : pair->n_head ? n : 0;
    }
    uint8_t *into = ex->theirs + (pair->head.payload_bytes - pair->payload_left);
    int64_t n = pc__ring_receive(ring, pair->fd, into, pair->payload_left, pair->position);
    if (n > 0)
        pair->payload_left -= (uint64_t)n;
    *is_whole = pair->payload_left == 0;
    return n;
}

/* Some of a message, after what has gone of it. Head and payload go together: a packet for each
 * would wake the partner twice. */
static int64_t speak(struct exchange *ex, struct pc__ring_pair *pair,
                     const struct pc__ring_message *say, uint64_t sent)
{
    uint64_t head_bytes = sizeof *say, all_bytes = head_bytes + say->payload_bytes;
    uint64_t of_head = sent < head_bytes ? sent : head_bytes, of_payload = sent - of_head;
    struct iovec parts[2] = {
        {.iov_base = (uint8_t *)(uintptr_t)say + of_head, .iov_len = head_bytes - of_head},
        {.iov_base = ex->data + of_payload, .iov_len = say->payload_bytes - of_payload}};
    int64_t n = pc__ring_send_parts(ex->ring, pair->fd, parts, 2, pair->position);
    if (n > 0)
        pair->is_mid_out = sent + (uint64_t)n < all_bytes;
    return n;
}

/* One message out (where say), one in (where heard). Both at once: a payload may be more than the
 * sockets hold. */
static int trade(struct exchange *ex, uint32_t position, const struct pc__ring_message *say,
                 struct pc__ring_message *heard)
{
    struct pc_ring *ring = ex->ring;
    struct pc__ring_pair *pair = pc__ring_pair_of(ring, position);
    uint64_t sent = 0, to_send = say ? sizeof *say + say->payload_bytes : 0;
    uint64_t deadline_ns = pc__ring_now_ns() + ex->timeout_ns;
    bool is_whole = !heard;
    while (sent < to_send || !is_whole) {
        int64_t gone = sent < to_send ? speak(ex, pair, say, sent) : 0;
        if (gone < 0)
            return (int)gone;
        sent += (uint64_t)gone;
        int64_t come = is_whole ? 0 : hear(ex, pair, &is_whole);
        if (come < 0)
            return (int)come;
        if (gone + come > 0) {
            deadline_ns = pc__ring_now_ns() + ex->timeout_ns;
            continue;
        }
        struct pc__ring_wait wait = {.out_fd = pair->fd,
                                     .in_fd = pair->fd,
                                     .wants_out = sent < to_send,
                                     .wants_in = !is_whole,
                                     .out_member = position,
                                     .in_member = position};
        int rc = pc__ring_wait(ring, &wait, deadline_ns);
        if (rc)
            return rc;
    }
    if (heard) {
        *heard = pair->head;
        pair->n_head = 0;
    }
    return PC_OK;
}

static bool same_call(const struct pc__ring_message *a, const struct pc__ring_message *b)
{
    const struct pc_ring_call *x = &a->mine.call, *y = &b->mine.call;
    return a->n_calls == b->n_calls && x->kind == y->kind && x->dtype == y->dtype &&
           x->op == y->op && x->root == y->root && x->n_dims == y->n_dims &&
           memcmp(x->dims, y->dims, sizeof x->dims) == 0;
}

/* Takes in what a partner had; is_lower: it has the lower position. */
static int take_in(struct exchange *ex, const struct pc__ring_message *heard, bool is_lower)
{
    const struct pc_ring_call *call = &ex->say.mine.call;
    if (ex->say.what == PC__RING_DIFFERS)
        return PC_OK;
    if (heard->what == PC__RING_DIFFERS) {
        ex->say.what = PC__RING_DIFFERS;
        ex->say.mine = heard->mine;
        ex->say.other = heard->other;
        return PC_OK;
    }
    if (!same_call(&ex->say, heard)) {
        ex->say.what = PC__RING_DIFFERS;
        ex->say.other = heard->mine;
        return PC_OK;
    }
    if (ex->n_bytes == 0)
        return PC_OK;
    if (call->kind == PC_RING_BROADCAST) {
        if (!ex->has_data && heard->payload_bytes == ex->n_bytes) {
            memcpy(ex->data, ex->theirs, ex->n_bytes);
            ex->has_data = true;
        }
        return PC_OK;
    }
    if (heard->payload_bytes != ex->n_bytes)
        return pc__fail(PC_ERR_PROTOCOL, "a partner's array has %llu bytes, and ours %llu",
                        (unsigned long long)heard->payload_bytes,
                        (unsigned long long)ex->n_bytes);
    bool bytes = call->kind == PC_RING_ALL_GATHER;
    int dtype = bytes ? PC_BYTES : ex->dtype;
    pc__reduce_fn *reduce = pc__reducer(dtype, bytes ? PC_OP_OR : (int)call->op);
    size_t n = ex->n_bytes / pc__dtype_bytes(dtype);
    if (is_lower)
        reduce(ex->data, ex->theirs, ex->data, n);
    else
        reduce(ex->data, ex->data, ex->theirs, n);
    return PC_OK;
}

static void set_payload(struct exchange *ex)
{
    ex->say.payload_bytes = ex->has_data && ex->say.what == PC__RING_ASKS ? ex->n_bytes : 0;
}

/* Gives what it has to a member, and gets what that has. */
static int round_with(struct exchange *ex, uint32_t member)
{
    struct pc__ring_message heard;
    set_payload(ex);
    const struct pc__ring_message say = ex->say;
    int rc = trade(ex, member, &say, &heard);
    return rc ? rc : take_in(ex, &heard, member < ex->ring->position);
}

/* One of those beyond the power of two: gives, and gets the result. */
static int beyond(struct exchange *ex)
{
    uint32_t neighbour = ex->ring->position + 1;
    struct pc__ring_message heard;
    set_payload(ex);
    const struct pc__ring_message say = ex->say;
    int rc = trade(ex, neighbour, &say, NULL);
    if (!rc)
        rc = trade(ex, neighbour, NULL, &heard);
    if (rc)
        return rc;
    if (heard.what == PC__RING_DIFFERS) {
        ex->say = heard;
        return PC_OK;
    }
    if (!same_call(&ex->say, &heard) || (heard.payload_bytes != ex->n_bytes))
        return pc__fail(PC_ERR_PROTOCOL, "member %u gave back another array",
                        ex->ring->ranks[neighbour]);
    memcpy(ex->data, ex->theirs, ex->n_bytes);
    ex->has_data = true;
    return PC_OK;
}

static int rounds(struct exchange *ex)
{
    struct pc_ring *ring = ex->ring;
    uint32_t power = power_below(ring->n_members), extra = ring->n_members - power;
    uint32_t position = ring->position;
    if (position < 2 * extra && position % 2 == 0)
        return beyond(ex);
    if (position < 2 * extra) {
        struct pc__ring_message heard;
        int rc = trade(ex, position - 1, NULL, &heard);
        if (!rc)
            rc = take_in(ex, &heard, true);
        if (rc)
            return rc;
    }
    uint32_t number = position < 2 * extra ? position / 2 : position - extra;
    for (uint32_t bit = 1; bit < power; bit *= 2) {
        int rc = round_with(ex, member_of(number ^ bit, extra));
        if (rc)
            return rc;
    }
    if (position < 2 * extra) {
        set_payload(ex);
        const struct pc__ring_message say = ex->say;
        return trade(ex, position - 1, &say, NULL);
    }
    return PC_OK;
}

int pc__ring_agree(struct pc_ring *ring, const struct pc_ring_call *call, int dtype, void *data,
                   uint64_t n_bytes, uint64_t timeout_ns)
{
    struct exchange ex = {
        .ring = ring,
        .say = {.magic = PC__RING_MAGIC,
                .n_calls = ring->n_calls,
                .mine = {.member = pc__ring_rank(ring), .call = *call}},
        .dtype = dtype,
        .data = data,
        .theirs = ring->scratch + ring->small_bytes,
        .n_bytes = n_bytes,
        .timeout_ns = timeout_ns,
        .has_data = call->kind != PC_RING_BROADCAST || call->root == pc__ring_rank(ring),
    };
    int rc = rounds(&ex);
    if (rc)
        return rc;
    ring->n_calls++;
    if (ex.say.what == PC__RING_ASKS && n_bytes > 0 && !ex.has_data)
        return pc__fail(PC_ERR_PROTOCOL, "nobody has sent the root's array");
    if (ex.say.what == PC__RING_ASKS)
        return PC_OK;
    pthread_mutex_lock(&ring->lock);
    ring->fault = (struct pc_ring_fault){.err = PC_ERR_MISMATCH,
                                         .member = ex.say.mine.member,
                                         .other = ex.say.other.member,
                                         .call = ex.say.mine.call,
                                         .other_call = ex.say.other.call};
    pthread_mutex_unlock(&ring->lock);
    return pc__fail(PC_ERR_MISMATCH, "members %u and %u do not ask for the same",
                    ex.say.mine.member, ex.say.other.member);
}
