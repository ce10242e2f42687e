/* ring.c - the group: see ring.h. */
#include "ring/ring.h"

#include "kernels/reduce.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* So long a wait asks again and again before it sleeps: an answer of a partner that has a core is
 * there sooner than a thread that sleeps wakes up. */
#define SPIN_NS 50000u
/* So often, after a quarter of the timeout, a wait asks whom the one waited for waits for itself. */
#define TELLS 32u

uint64_t pc__ring_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ------------------------------------------------------------ sockets */

int pc__ring_failed(struct pc_ring *ring, int err, uint32_t rank, bool is_silent)
{
    pthread_mutex_lock(&ring->lock);
    if (ring->fault.err == PC_OK)
        ring->fault = (struct pc_ring_fault){.err = err, .member = rank, .is_silent = is_silent};
    pthread_mutex_unlock(&ring->lock);
    return err;
}

/* A member that closes may have said before whom it lost itself. */
static int ended(struct pc_ring *ring, uint32_t position)
{
    int broken = atomic_load(&ring->broken);
    if (broken) /* its connections were shut down here */
        return pc__fail(broken, broken == PC_ERR_CLOSED ? "the ring was shut down"
                                                        : "another lane of the ring has failed");
    uint32_t rank = ring->ranks[position];
    bool is_silent = false;
    if (!pc__ring_told(ring, position, &rank, &is_silent))
        rank = ring->ranks[position];
    pc__ring_failed(ring, PC_ERR_MEMBER, rank, is_silent);
    return pc__fail(PC_ERR_MEMBER, "the connection to member %u ended", rank);
}

int64_t pc__ring_send_parts(struct pc_ring *ring, int fd, struct iovec *parts, size_t n_parts,
                            uint32_t member)
{
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = n_parts};
    ssize_t n;
    do
        n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n >= 0)
        return n;
    if (errno == EFAULT)
        return pc__fail_errno("the array's memory is not there for the kernel");
    return errno == EAGAIN ? 0 : ended(ring, member);
}

int64_t pc__ring_send(struct pc_ring *ring, int fd, const void *from, uint64_t n_bytes,
                      uint32_t member)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)from, .iov_len = n_bytes};
    return pc__ring_send_parts(ring, fd, &part, 1, member);
}

int64_t pc__ring_receive(struct pc_ring *ring, int fd, void *into, uint64_t n_bytes,
                         uint32_t member)
{
    ssize_t n;
    do
        n = recv(fd, into, n_bytes, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n > 0)
        return n;
    if (n < 0 && errno == EFAULT)
        return pc__fail_errno("the array's memory is not there for the kernel");
    return n < 0 && errno == EAGAIN ? 0 : ended(ring, member);
}

/* What a poll has found of one descriptor (a partner's), or of two neighbours'. */
static int looked(struct pc_ring *ring, const struct pc__ring_wait *wait,
                  const struct pollfd *polled, nfds_t n)
{
    /* What came in before an end is still there: who waits for it reads, and then meets the end. */
    short end = POLLERR | POLLHUP | POLLNVAL | POLLRDHUP;
    if (n == 1 && wait->wants_in)
        end = POLLNVAL;
    if (polled[0].revents & end)
        return ended(ring, wait->out_member);
    if (n == 2 && polled[1].revents & POLLNVAL)
        return ended(ring, wait->in_member);
    return PC_OK;
}

static int nothing_came(struct pc_ring *ring, uint32_t position)
{
    uint32_t rank = pc__ring_waits(ring, position);
    pc__ring_failed(ring, PC_ERR_MEMBER, rank, true);
    return pc__fail(PC_ERR_MEMBER, "member %u said nothing until the deadline", rank);
}

int pc__ring_wait(struct pc_ring *ring, const struct pc__ring_wait *wait, uint64_t deadline_ns)
{
    struct pollfd polled[2] = {
        {.fd = wait->out_fd, .events = wait->wants_out ? POLLOUT : 0},
        {.fd = wait->in_fd, .events = wait->wants_in ? POLLIN : 0}};
    nfds_t n = 2;
    if (wait->out_fd == wait->in_fd) { /* a partner: both ways at once */
        polled[0].events |= polled[1].events;
        n = 1;
    } else {
        polled[0].events |= POLLRDHUP; /* a neighbour sends nothing back, but that it is gone */
    }
    uint32_t position = wait->wants_in ? wait->in_member : wait->out_member;
    uint64_t begun_ns = pc__ring_now_ns();
    uint64_t all_ns = deadline_ns > begun_ns ? deadline_ns - begun_ns : 0;
    uint64_t tell_ns = begun_ns + all_ns / 4;
    for (;;) {
        uint64_t now_ns = pc__ring_now_ns();
        bool sleeps = now_ns - begun_ns >= SPIN_NS, is_over = now_ns >= deadline_ns;
        uint64_t until_ns = tell_ns < deadline_ns ? tell_ns : deadline_ns;
        uint64_t left_ms = until_ns > now_ns ? (until_ns - now_ns) / 1000000u + 1 : 0;
        int rc = poll(polled, n, !sleeps || is_over ? 0 : left_ms > 60000 ? 60000 : (int)left_ms);
        if (rc < 0 && errno != EINTR)
            return pc__fail_errno("poll");
        if (rc > 0)
            return looked(ring, wait, polled, n);
        if (rc == 0 && is_over) /* asked after the deadline: what was there by then counts */
            return nothing_came(ring, position);
        if (!sleeps) {
            sched_yield(); /* who shares this core may be the one that is waited for */
        } else if (now_ns >= tell_ns) {
            pc__ring_waits(ring, position);
            tell_ns = now_ns + all_ns / TELLS + 1000000u;
        }
    }
}

void pc__ring_shut_all(struct pc_ring *ring)
{
    for (uint32_t i = 0; i < ring->n_lanes; i++) {
        shutdown(ring->lanes[i].next_fd, SHUT_RDWR);
        shutdown(ring->lanes[i].previous_fd, SHUT_RDWR);
    }
    for (uint32_t i = 0; i < ring->n_pairs; i++)
        shutdown(ring->pairs[i].fd, SHUT_RDWR);
}

/* No call can be made any more; the neighbours hear of it by the end of their connections. */
static void break_with(struct pc_ring *ring, int err)
{
    int whole = PC_OK;
    if (!atomic_compare_exchange_strong(&ring->broken, &whole, err))
        return; /* by another lane, or by pc_ring_shut */
    pthread_mutex_lock(&ring->lock);
    struct pc_ring_fault fault = ring->fault;
    pthread_mutex_unlock(&ring->lock);
    if (err == PC_ERR_MEMBER && fault.err == PC_ERR_MEMBER)
        pc__ring_tell_lost(ring, fault.member, fault.is_silent);
    pc__ring_shut_all(ring);
}

/* ------------------------------------------------------------ lanes */

static void lane_does(struct pc__ring_lane *lane, const struct pc__ring_job *job)
{
    struct pc_ring *ring = lane->ring;
    lane->rc = pc__ring_lane_run(lane, job);
    if (!lane->rc)
        return;
    pthread_mutex_lock(&ring->lock);
    if (!ring->failed_rc) { /* what the others run into then is only that */
        ring->failed_rc = lane->rc;
        snprintf(ring->failed_message, sizeof ring->failed_message, "%s", pc_last_message());
    }
    pthread_mutex_unlock(&ring->lock);
    break_with(ring, lane->rc); /* the other lanes would wait for what never comes */
}

void *pc__ring_lane_main(void *arg)
{
    struct pc__ring_lane *lane = arg;
    struct pc_ring *ring = lane->ring;
    uint64_t seen = 0;
    pthread_mutex_lock(&ring->lock);
    for (;;) {
        while (ring->job_number == seen && !ring->is_ending)
            pthread_cond_wait(&ring->wanted, &ring->lock);
        if (ring->is_ending)
            break;
        seen = ring->job_number;
        struct pc__ring_job job = ring->job;
        pthread_mutex_unlock(&ring->lock);
        lane_does(lane, &job);
        pthread_mutex_lock(&ring->lock);
        if (--ring->n_busy == 0)
            pthread_cond_signal(&ring->done);
    }
    pthread_mutex_unlock(&ring->lock);
    return NULL;
}

/* All lanes, this thread's among them. */
static int stream_around(struct pc_ring *ring, const struct pc__ring_job *job)
{
    pthread_mutex_lock(&ring->lock);
    ring->job = *job;
    ring->job_number++;
    ring->n_busy = ring->n_lanes - 1;
    ring->failed_rc = PC_OK;
    pthread_cond_broadcast(&ring->wanted);
    pthread_mutex_unlock(&ring->lock);
    lane_does(&ring->lanes[0], job);
    pthread_mutex_lock(&ring->lock);
    while (ring->n_busy > 0)
        pthread_cond_wait(&ring->done, &ring->lock);
    int rc = ring->failed_rc;
    pthread_mutex_unlock(&ring->lock);
    if (rc) /* messages are each thread's own: the caller gets that of the lane */
        pc__fail(PC_OK, "%s", ring->failed_message);
    return rc;
}

/* ------------------------------------------------------------ calls */

static int check_call(const struct pc_ring *ring, const struct pc_ring_call *call,
                      uint64_t n_elements)
{
    bool reduces = call->kind == PC_RING_ALLREDUCE || call->kind == PC_RING_REDUCE_SCATTER;
    uint64_t element_bytes = pc__dtype_bytes((int)call->dtype);
    if (call->kind >= PC_RING_LAST || call->n_dims > PC_RING_DIMS || element_bytes == 0 ||
        n_elements > UINT64_MAX / 2 / element_bytes)
        return pc__fail(PC_ERR_RANGE, "no such call: kind %u, dtype %u, %u dimensions",
                        call->kind, call->dtype, call->n_dims);
    if (reduces && !pc__reducer((int)call->dtype, (int)call->op))
        return pc__fail(PC_ERR_RANGE, "no such operation %u of dtype %u", call->op, call->dtype);
    if (call->kind == PC_RING_BROADCAST && call->root >= ring->n_members)
        return pc__fail(PC_ERR_RANGE, "member %u of %u", call->root, ring->n_members);
    if (call->kind == PC_RING_ALL_GATHER && n_elements % ring->n_members)
        return pc__fail(PC_ERR_RANGE, "%llu elements of %u members",
                        (unsigned long long)n_elements, ring->n_members);
    return PC_OK;
}

static uint64_t own_offset(const struct pc_ring *ring, uint64_t n_bytes)
{
    return n_bytes / ring->n_members * pc__ring_rank(ring);
}

static int small(struct pc_ring *ring, const struct pc_ring_call *call, int dtype, const void *in,
                 void *out, uint64_t n_bytes, uint64_t timeout_ns)
{
    bool is_root = call->kind == PC_RING_BROADCAST && call->root == pc__ring_rank(ring);
    uint8_t *data = ring->scratch;
    if (call->kind == PC_RING_ALL_GATHER) {
        uint64_t offset = own_offset(ring, n_bytes), own = n_bytes / ring->n_members;
        memset(data, 0, n_bytes);
        memcpy(data + offset, (uint8_t *)out + offset, own);
    } else if (call->kind != PC_RING_BROADCAST || is_root) {
        memcpy(data, in, n_bytes);
    }
    int rc = pc__ring_agree(ring, call, dtype, data, n_bytes, timeout_ns);
    if (rc || is_root)
        return rc;
    if (call->op == PC_OP_MEAN &&
        (call->kind == PC_RING_ALLREDUCE || call->kind == PC_RING_REDUCE_SCATTER))
        pc__reduce_divide(dtype, data, n_bytes / pc__dtype_bytes(dtype), ring->n_members);
    memcpy(out, data, n_bytes);
    return PC_OK;
}

static int large(struct pc_ring *ring, const struct pc_ring_call *call, int dtype, const void *in,
                 void *out, uint64_t n_elements, uint64_t timeout_ns)
{
    int rc = pc__ring_agree(ring, call, dtype, ring->scratch, 0, timeout_ns);
    if (rc)
        return rc;
    bool has_in = call->kind == PC_RING_BROADCAST ? call->root == pc__ring_rank(ring)
                                                  : call->kind != PC_RING_ALL_GATHER;
    struct pc__ring_job job = {.kind = call->kind,
                               .op = call->op,
                               .dtype = (uint32_t)dtype,
                               .root = call->root,
                               .in = has_in ? in : NULL,
                               .out = out,
                               .n_elements = n_elements,
                               .timeout_ns = timeout_ns};
    return stream_around(ring, &job);
}

static int alone(const struct pc_ring_call *call, const void *in, void *out, uint64_t n_bytes)
{
    bool reduces = call->kind == PC_RING_ALLREDUCE || call->kind == PC_RING_REDUCE_SCATTER;
    if (reduces && n_bytes && in != out)
        memcpy(out, in, n_bytes); /* a mean of one is that one */
    return PC_OK;
}

/* One call at a time, and none after a failure. */
static int enter(struct pc_ring *ring)
{
    if (atomic_exchange(&ring->is_in_call, true))
        return pc__fail(PC_ERR_EXISTS, "another call runs in this ring");
    int broken = atomic_load(&ring->broken);
    if (!broken) {
        pthread_mutex_lock(&ring->lock);
        memset(&ring->fault, 0, sizeof ring->fault);
        pthread_mutex_unlock(&ring->lock);
        ring->waits_for = 0;
        for (uint32_t i = 0; i < ring->n_pairs; i++)
            ring->pairs[i].waits_for = 0;
        return PC_OK;
    }
    atomic_store(&ring->is_in_call, false);
    return pc__fail(broken, broken == PC_ERR_FORKED ? "the ring is the parent process's"
                                                    : "the ring is broken since an earlier call");
}

static int leave(struct pc_ring *ring, int rc)
{
    if (rc && rc != PC_ERR_MISMATCH)
        break_with(ring, rc);
    int broken = atomic_load(&ring->broken);
    if (rc && broken == PC_ERR_CLOSED)
        rc = pc__fail(PC_ERR_CLOSED, "the ring was shut down");
    atomic_store(&ring->is_in_call, false);
    return rc;
}

static int one_call(struct pc_ring *ring, const struct pc_ring_call *call, int dtype,
                    const void *in, void *out, uint64_t n_elements, uint64_t timeout_ns)
{
    uint64_t n_bytes = n_elements * pc__dtype_bytes(dtype);
    if (call->kind == PC_RING_BARRIER)
        n_bytes = 0;
    if (ring->n_members == 1)
        return alone(call, in, out, n_bytes);
    if (n_bytes == 0)
        return pc__ring_agree(ring, call, dtype, ring->scratch, 0, timeout_ns);
    if (n_bytes <= ring->small_bytes)
        return small(ring, call, dtype, in, out, n_bytes, timeout_ns);
    return large(ring, call, dtype, in, out, n_elements, timeout_ns);
}

/* NumPy adds up the halves of a mean as floats: their sum may be more than a half can say. */
static int mean_of_halves(struct pc_ring *ring, const struct pc_ring_call *call, const void *in,
                          void *out, uint64_t n_elements, uint64_t timeout_ns)
{
    float *wide = malloc(n_elements * sizeof *wide + 1);
    if (!wide)
        return pc__fail(PC_ERR_NO_MEMORY, "%llu halves as floats", (unsigned long long)n_elements);
    pc__reduce_widen(wide, in, n_elements);
    int rc = one_call(ring, call, PC_F32, wide, wide, n_elements, timeout_ns);
    if (!rc)
        pc__reduce_narrow(out, wide, n_elements);
    free(wide);
    return rc;
}

PC_API int pc_ring_run(pc_ring *ring, const struct pc_ring_call *call, const void *in, void *out,
                       uint64_t n_elements, uint64_t timeout_ns)
{
    int rc = check_call(ring, call, n_elements);
    if (rc)
        return rc;
    rc = enter(ring);
    if (rc)
        return rc;
    bool reduces = call->kind == PC_RING_ALLREDUCE || call->kind == PC_RING_REDUCE_SCATTER;
    if (reduces && call->op == PC_OP_MEAN && call->dtype == PC_F16 && ring->n_members > 1)
        rc = mean_of_halves(ring, call, in, out, n_elements, timeout_ns);
    else
        rc = one_call(ring, call, (int)call->dtype, in, out, n_elements, timeout_ns);
    return leave(ring, rc);
}

/* Sends to the next member and receives from the one before, on lane 0. */
static int both_ways(struct pc_ring *ring, const void *out, uint64_t out_bytes, void *in,
                     uint64_t in_bytes, uint64_t timeout_ns)
{
    struct pc__ring_lane *lane = &ring->lanes[0];
    uint32_t next = (ring->position + 1) % ring->n_members;
    uint32_t previous = (ring->position + ring->n_members - 1) % ring->n_members;
    uint64_t sent = 0, received = 0, deadline_ns = pc__ring_now_ns() + timeout_ns;
    while (sent < out_bytes || received < in_bytes) {
        int64_t gone = 0, come = 0;
        if (sent < out_bytes)
            gone = pc__ring_send(ring, lane->next_fd, (const uint8_t *)out + sent,
                                 out_bytes - sent, next);
        if (gone < 0)
            return (int)gone;
        if (received < in_bytes)
            come = pc__ring_receive(ring, lane->previous_fd, (uint8_t *)in + received,
                                    in_bytes - received, previous);
        if (come < 0)
            return (int)come;
        sent += (uint64_t)gone;
        received += (uint64_t)come;
        if (gone + come > 0) {
            deadline_ns = pc__ring_now_ns() + timeout_ns;
            continue;
        }
        /* The next one may be done and gone while what it need not hear of still comes in. */
        struct pc__ring_wait wait = {.out_fd = sent < out_bytes ? lane->next_fd : -1,
                                     .in_fd = received < in_bytes ? lane->previous_fd : -1,
                                     .wants_out = sent < out_bytes,
                                     .wants_in = received < in_bytes,
                                     .out_member = next,
                                     .in_member = previous};
        int rc = pc__ring_wait(ring, &wait, deadline_ns);
        if (rc)
            return rc;
    }
    return PC_OK;
}

PC_API int pc_ring_swap(pc_ring *ring, const void *out, uint64_t out_bytes, void *in,
                        uint64_t in_bytes, uint64_t timeout_ns)
{
    int rc = enter(ring);
    if (rc)
        return rc;
    if (ring->n_members > 1)
        rc = both_ways(ring, out, out_bytes, in, in_bytes, timeout_ns);
    return leave(ring, rc);
}

PC_API int pc_ring_swap_sizes(pc_ring *ring, uint64_t out_bytes, uint64_t *in_bytes,
                              uint64_t timeout_ns)
{
    *in_bytes = out_bytes;
    return pc_ring_swap(ring, &out_bytes, sizeof out_bytes,
                        ring->n_members > 1 ? (void *)in_bytes : NULL, sizeof *in_bytes,
                        timeout_ns);
}

PC_API int pc_ring_fault(pc_ring *ring, struct pc_ring_fault *out)
{
    pthread_mutex_lock(&ring->lock);
    *out = ring->fault;
    pthread_mutex_unlock(&ring->lock);
    return PC_OK;
}
