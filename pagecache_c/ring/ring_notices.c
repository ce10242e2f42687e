/* ring_notices.c - what partners tell each other besides what they are asked for.
 *
 * A member that loses another says which, to all its partners, before it closes its connections:
 * whoever sees a connection end looks first whether its other side has said so. So the rank of the
 * member that was lost first goes around, and not that of whoever only noticed. Neighbours in the
 * ring are partners, if only for that: what streams around it has no room for other words.
 *
 * A member that waits long for another says so too, with the last one in that chain that it knows.
 * So those who wait for one that only waits itself blame the one that does nothing.
 *
 * Notices are sent where no message is in the middle of going out, and without waiting: where there
 * is no room for one, the end of the connection has to do.
 */
#include "ring/ring.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#define TOLD_NS 1000000000u    /* between the end of one connection and that of another */

struct pc__ring_pair *pc__ring_pair_of(struct pc_ring *ring, uint32_t position)
{
    for (uint32_t i = 0; i < ring->n_pairs; i++)
        if (ring->pairs[i].position == position)
            return &ring->pairs[i];
    return NULL;
}

bool pc__ring_is_message(const struct pc_ring *ring, const struct pc__ring_message *head)
{
    return head->magic == PC__RING_MAGIC && head->what <= PC__RING_WAITS &&
           head->payload_bytes <= ring->small_bytes && head->mine.member < ring->n_members &&
           head->other.member < ring->n_members;
}

static void tell(struct pc__ring_pair *pair, const struct pc__ring_message *notice)
{
    if (pair->is_mid_out)
        return;
    ssize_t n = send(pair->fd, notice, sizeof *notice, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0 && (size_t)n < sizeof *notice)
        pair->is_mid_out = true; /* nothing may follow it, and nothing can */
}

/* ------------------------------------------------------------ who is lost */

/* The next notice of a loss among what has come in, or is under way. What else comes is dropped:
 * the ring is broken. */
static bool next_lost(struct pc_ring *ring, struct pc__ring_pair *pair, uint64_t until_ns)
{
    uint8_t dropped[4096];
    for (;;) {
        bool in_head = pair->n_head < sizeof pair->head;
        void *into = in_head ? (uint8_t *)&pair->head + pair->n_head : dropped;
        size_t most = in_head                               ? sizeof pair->head - pair->n_head
                      : pair->payload_left < sizeof dropped ? (size_t)pair->payload_left
                                                            : sizeof dropped;
        ssize_t n = most ? recv(pair->fd, into, most, MSG_DONTWAIT) : 0;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            uint64_t now_ns = pc__ring_now_ns();
            struct pollfd polled = {.fd = pair->fd, .events = POLLIN};
            if (now_ns >= until_ns)
                return false;
            (void)poll(&polled, 1, (int)((until_ns - now_ns) / 1000000u) + 1);
            continue;
        }
        if (n < 0 || (n == 0 && most > 0))
            return false;
        if (in_head) {
            pair->n_head += (uint64_t)n;
            if (pair->n_head < sizeof pair->head)
                continue;
            if (!pc__ring_is_message(ring, &pair->head))
                return false;
            pair->payload_left = pair->head.payload_bytes;
        } else {
            pair->payload_left -= (uint64_t)n;
        }
        if (pair->payload_left > 0)
            continue;
        pair->n_head = 0;
        if (pair->head.what == PC__RING_LOST || pair->head.what == PC__RING_SILENT)
            return true;
    }
}

bool pc__ring_told(struct pc_ring *ring, uint32_t position, uint32_t *rank, bool *is_silent)
{
    struct pc__ring_pair *pair = pc__ring_pair_of(ring, position);
    if (!pair)
        return false;
    pthread_mutex_lock(&ring->pair_lock);
    bool found = next_lost(ring, pair, pc__ring_now_ns() + TOLD_NS);
    if (found) {
        *rank = pair->head.mine.member;
        *is_silent = pair->head.what == PC__RING_SILENT;
    }
    pthread_mutex_unlock(&ring->pair_lock);
    /* Whoever takes this member for lost has closed, and is told of nobody else. */
    return found && *rank != pc__ring_rank(ring);
}

void pc__ring_tell_lost(struct pc_ring *ring, uint32_t rank, bool is_silent)
{
    struct pc__ring_message notice = {.magic = PC__RING_MAGIC,
                                      .what = is_silent ? PC__RING_SILENT : PC__RING_LOST,
                                      .n_calls = ring->n_calls,
                                      .mine = {.member = rank}};
    pthread_mutex_lock(&ring->pair_lock);
    for (uint32_t i = 0; i < ring->n_pairs; i++)
        tell(&ring->pairs[i], &notice);
    pthread_mutex_unlock(&ring->pair_lock);
}

/* ------------------------------------------------------------ who is waited for */

/* Takes in what a partner has said of its waiting, and nothing else: what it asks for, and whom it
 * lost, is for later. */
static void hear_waits(struct pc_ring *ring, struct pc__ring_pair *pair)
{
    struct pc__ring_message notice;
    while (pair->n_head == 0 &&
           recv(pair->fd, &notice, sizeof notice, MSG_DONTWAIT | MSG_PEEK) == sizeof notice &&
           pc__ring_is_message(ring, &notice) && notice.what == PC__RING_WAITS) {
        if (recv(pair->fd, &notice, sizeof notice, MSG_DONTWAIT) != sizeof notice)
            return;
        if (notice.n_calls + 1 >= ring->n_calls) /* of this call, begun or agreed on */
            pair->waits_for = notice.mine.member + 1;
    }
}

uint32_t pc__ring_waits(struct pc_ring *ring, uint32_t position)
{
    struct pc__ring_pair *pair = pc__ring_pair_of(ring, position);
    uint32_t rank = ring->ranks[position];
    if (!pair || atomic_load(&ring->broken))
        return rank;
    pthread_mutex_lock(&ring->pair_lock);
    for (uint32_t i = 0; i < ring->n_pairs; i++)
        hear_waits(ring, &ring->pairs[i]);
    if (pair->waits_for && pair->waits_for - 1 != pc__ring_rank(ring))
        rank = pair->waits_for - 1;
    struct pc__ring_message notice = {.magic = PC__RING_MAGIC,
                                      .what = PC__RING_WAITS,
                                      .n_calls = ring->n_calls,
                                      .mine = {.member = rank}};
    if (ring->waits_for != rank + 1)
        for (uint32_t i = 0; i < ring->n_pairs; i++)
            tell(&ring->pairs[i], &notice);
    ring->waits_for = rank + 1;
    pthread_mutex_unlock(&ring->pair_lock);
    return rank;
}
