/* ring.h - what the files of a ring share.
 *
 *   ring.c         the group: threads, calls, faults
 *   ring_ends.c    how it is made, how it ends, and what a child of fork is left
 *   ring_pairs.c   small arrays, and what is to be done: recursive doubling between partners
 *   ring_notices.c what partners tell each other besides: who is lost, who is waited for
 *   ring_lanes.c   large arrays: a stream around the ring, on each of its lanes
 *
 * Inside, members are positions in the ring; ranks, by which callers know them and their segments,
 * are looked up where a call comes in, an array is cut, or a fault is noted.
 *
 * A ring belongs to one process, and one call runs in it at a time. Sockets do not block: whoever
 * waits does it in poll(), with a deadline that moves on with every byte.
 *
 * Locks: rings_lock (ring_ends.c: all rings of the process) -> ring->lock; pair_lock -> ring->lock.
 */
#ifndef PC_RING_H
#define PC_RING_H

#include "common/error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/uio.h>

#define PC__RING_MAX_MEMBERS 65536u
#define PC__RING_MAX_LANES 16u
#define PC__RING_MAX_SMALL (1u << 20)
#define PC__RING_SCRATCH_BYTES (256u << 10)

#define PC__RING_MAGIC 0x52676e69u
#define PC__RING_MESSAGE_BYTES 512

/* What partners send each other. */
enum pc__ring_what {
    PC__RING_ASKS = 0,         /* what mine.member was asked for; its payload, if any, follows */
    PC__RING_DIFFERS = 1,      /* mine and other do not ask for the same */
    PC__RING_LOST = 2,         /* mine.member is lost; nothing follows any more */
    PC__RING_SILENT = 3,       /* as LOST: it was waited for until the deadline */
    PC__RING_WAITS = 4         /* mine.member has been waited for for a while */
};

struct pc__ring_said {
    uint32_t member;           /* rank */
    uint32_t reserved;
    struct pc_ring_call call;
};

/* On the wire, in the byte order of the machine: all members are of one kind, and magic says so. */
struct pc__ring_message {
    uint32_t magic;
    uint32_t what;             /* enum pc__ring_what */
    uint64_t n_calls;          /* before this one */
    uint64_t payload_bytes;    /* 0, or all of the array */
    struct pc__ring_said mine;
    struct pc__ring_said other;
};

/* A connection to a partner, both ways. The caller's thread trades calls on it; notices may be
 * looked for by any lane, when nobody trades: under pair_lock. */
struct pc__ring_pair {
    uint32_t position;
    int fd;
    bool is_mid_out;           /* a part of a message has gone: no other may begin */
    uint64_t n_head;           /* bytes of head that came in */
    uint64_t payload_left;     /* that belong to it and have not come in */
    uint32_t waits_for;        /* rank + 1 of whom it has waited for in this call; 0: nobody */
    struct pc__ring_message head;
};

/* What all lanes do in one call. */
struct pc__ring_job {
    uint32_t kind;
    uint32_t op;
    uint32_t dtype;            /* that is computed with */
    uint32_t root;
    const uint8_t *in;
    uint8_t *out;
    uint64_t n_elements;
    uint64_t timeout_ns;
};

/* A connection to each neighbour; every lane takes a part of every segment. */
struct pc__ring_lane {
    struct pc_ring *ring;
    uint32_t index;
    int next_fd;
    int previous_fd;
    int rc;
    uint8_t *scratch;          /* PC__RING_SCRATCH_BYTES; only lane 0 works on the caller's thread */
    pthread_t thread;
    bool has_thread;
};

struct pc_ring {
    uint32_t position;
    uint32_t n_members;
    uint32_t *ranks;           /* by position */
    uint32_t n_lanes;
    uint32_t n_pairs;
    uint64_t small_bytes;
    struct pc__ring_pair pairs[PC_RING_PARTNERS];
    pthread_mutex_t pair_lock; /* pairs, outside of trades */
    uint32_t waits_for;        /* rank + 1 that partners were told of in this call */
    struct pc_ring *next_ring; /* of the process */
    struct pc__ring_lane *lanes;
    uint8_t *scratch;          /* two small arrays, for ring_pairs.c */
    uint64_t n_calls;
    atomic_bool is_in_call;
    atomic_int broken;         /* 0, or why no call can be made any more */
    pthread_mutex_t lock;      /* job_number, n_busy, is_ending; fault; failed_* */
    pthread_cond_t wanted;
    pthread_cond_t done;
    struct pc__ring_job job;
    uint64_t job_number;
    uint32_t n_busy;
    bool is_ending;
    struct pc_ring_fault fault;
    int failed_rc;             /* of the lane that failed first in a job */
    char failed_message[PC__RING_MESSAGE_BYTES];
};

static inline uint32_t pc__ring_rank(const struct pc_ring *ring)
{
    return ring->ranks[ring->position];
}

uint64_t pc__ring_now_ns(void);
/* Waits until a descriptor is ready for what it is asked for (0: only whether it ended), or until the
 * deadline. PC_ERR_MEMBER says which of the two is at fault: *member is set. */
struct pc__ring_wait {
    int out_fd;                /* -1: none */
    int in_fd;
    bool wants_out;
    bool wants_in;
    uint32_t out_member;
    uint32_t in_member;
};
int pc__ring_wait(struct pc_ring *ring, const struct pc__ring_wait *wait, uint64_t deadline_ns);
/* Sends or receives what can be, at once: bytes, 0 where it would wait, or PC_ERR_MEMBER. */
int64_t pc__ring_send(struct pc_ring *ring, int fd, const void *from, uint64_t n_bytes,
                      uint32_t member);
int64_t pc__ring_send_parts(struct pc_ring *ring, int fd, struct iovec *parts, size_t n_parts,
                            uint32_t member);
int64_t pc__ring_receive(struct pc_ring *ring, int fd, void *into, uint64_t n_bytes,
                         uint32_t member);
/* Notes the first fault of a call. Returns err. */
int pc__ring_failed(struct pc_ring *ring, int err, uint32_t rank, bool is_silent);
/* Shuts all connections down: calls in other threads, and the neighbours', end. */
void pc__ring_shut_all(struct pc_ring *ring);

/* All members say what they ask for; where it is small it is done with that. PC_ERR_MISMATCH leaves
 * everything as it was. data: of n_bytes, reduced in place as dtype (a broadcast's: the root's, at
 * all). */
int pc__ring_agree(struct pc_ring *ring, const struct pc_ring_call *call, int dtype, void *data,
                   uint64_t n_bytes, uint64_t timeout_ns);
/* One lane's share of the ring's job. */
int pc__ring_lane_run(struct pc__ring_lane *lane, const struct pc__ring_job *job);
void *pc__ring_lane_main(void *arg);

/* ------------------------------------------------------------ notices */

struct pc__ring_pair *pc__ring_pair_of(struct pc_ring *ring, uint32_t position);
/* Whether a head that came in whole makes sense. */
bool pc__ring_is_message(const struct pc_ring *ring, const struct pc__ring_message *head);
/* After a connection to a position has ended: whom that one has said to be lost. Waits for what is
 * still under way, at most until its connection has ended too. False: it has said nothing. */
bool pc__ring_told(struct pc_ring *ring, uint32_t position, uint32_t *rank, bool *is_silent);
/* Tells all partners who is lost; once, before the connections are shut down. */
void pc__ring_tell_lost(struct pc_ring *ring, uint32_t rank, bool is_silent);
/* A wait for a position is long: asks whom that one waits for, and tells the partners. Rank of the
 * last one in that chain, as far as it is known. */
uint32_t pc__ring_waits(struct pc_ring *ring, uint32_t position);

#endif
