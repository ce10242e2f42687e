/* ring_ends.c - how a ring is made, how it ends, and what a child of fork is left.
 *
 * A child of fork has none of the lanes' threads, and must keep none of the connections: as long as
 * it held one, nobody would see the parent die. All rings of the process are on a list for that,
 * under rings_lock, which is taken before a fork, with every ring's lock: the child gets rings that
 * nobody is in the middle of. It closes their descriptors at once; calls there are PC_ERR_FORKED.
 */
#include "ring/ring.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static pthread_mutex_t rings_lock = PTHREAD_MUTEX_INITIALIZER; /* rings, their next_ring */
static struct pc_ring *rings;
static pthread_once_t registered = PTHREAD_ONCE_INIT;

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void close_fds(struct pc_ring *ring)
{
    for (uint32_t i = 0; i < ring->n_lanes; i++) {
        close_fd(&ring->lanes[i].next_fd);
        close_fd(&ring->lanes[i].previous_fd);
    }
    for (uint32_t i = 0; i < ring->n_pairs; i++)
        close_fd(&ring->pairs[i].fd);
}

/* ------------------------------------------------------------ fork */

static void before_fork(void)
{
    pthread_mutex_lock(&rings_lock);
    for (struct pc_ring *ring = rings; ring; ring = ring->next_ring)
        pthread_mutex_lock(&ring->lock);
}

static void after_fork_in_parent(void)
{
    for (struct pc_ring *ring = rings; ring; ring = ring->next_ring)
        pthread_mutex_unlock(&ring->lock);
    pthread_mutex_unlock(&rings_lock);
}

static void after_fork_in_child(void)
{
    for (struct pc_ring *ring = rings; ring; ring = ring->next_ring) {
        atomic_store(&ring->broken, PC_ERR_FORKED);
        atomic_store(&ring->is_in_call, false); /* the call is in a thread that is not here */
        close_fds(ring);
        for (uint32_t i = 0; i < ring->n_lanes; i++)
            ring->lanes[i].has_thread = false;
        pthread_cond_init(&ring->wanted, NULL); /* the parent's waiters are not here */
        pthread_cond_init(&ring->done, NULL);
        pthread_mutex_unlock(&ring->lock);
    }
    pthread_mutex_unlock(&rings_lock);
}

static void register_once(void)
{
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void add_to_process(struct pc_ring *ring)
{
    pthread_once(&registered, register_once);
    pthread_mutex_lock(&rings_lock);
    ring->next_ring = rings;
    rings = ring;
    pthread_mutex_unlock(&rings_lock);
}

/* With its descriptors: a child that is forked now has none of them. */
static void take_from_process(struct pc_ring *ring)
{
    pthread_mutex_lock(&rings_lock);
    struct pc_ring **at = &rings;
    while (*at != ring)
        at = &(*at)->next_ring;
    *at = ring->next_ring;
    close_fds(ring);
    pthread_mutex_unlock(&rings_lock);
}

/* ------------------------------------------------------------ end */

PC_API int pc_ring_shut(pc_ring *ring)
{
    atomic_store(&ring->broken, PC_ERR_CLOSED);
    pc__ring_shut_all(ring);
    return PC_OK;
}

static void free_ring(struct pc_ring *ring)
{
    for (uint32_t i = 0; ring->lanes && i < ring->n_lanes; i++)
        free(ring->lanes[i].scratch);
    free(ring->lanes);
    free(ring->ranks);
    free(ring->scratch);
    free(ring);
}

PC_API int pc_ring_close(pc_ring *ring)
{
    pc_ring_shut(ring);
    pthread_mutex_lock(&ring->lock);
    ring->is_ending = true;
    pthread_cond_broadcast(&ring->wanted);
    pthread_mutex_unlock(&ring->lock);
    for (uint32_t i = 0; i < ring->n_lanes; i++)
        if (ring->lanes[i].has_thread)
            pthread_join(ring->lanes[i].thread, NULL);
    take_from_process(ring);
    pthread_cond_destroy(&ring->wanted);
    pthread_cond_destroy(&ring->done);
    pthread_mutex_destroy(&ring->pair_lock);
    pthread_mutex_destroy(&ring->lock);
    free_ring(ring);
    return PC_OK;
}

/* ------------------------------------------------------------ begin */

static void prepare(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails where it is no TCP */
}

static void take_fds(struct pc_ring *ring, const struct pc_ring_options *options)
{
    bool alone = ring->n_members == 1;
    for (uint32_t i = 0; i < ring->n_lanes; i++) {
        struct pc__ring_lane *lane = &ring->lanes[i];
        *lane = (struct pc__ring_lane){.ring = ring,
                                       .index = i,
                                       .next_fd = alone ? -1 : options->next_fds[i],
                                       .previous_fd = alone ? -1 : options->previous_fds[i]};
        prepare(lane->next_fd);
        prepare(lane->previous_fd);
    }
    for (uint32_t i = 0; i < ring->n_pairs; i++) {
        ring->pairs[i].fd = options->partner_fds[i];
        prepare(ring->pairs[i].fd);
    }
}

static int start_lanes(struct pc_ring *ring)
{
    for (uint32_t i = 0; i < ring->n_lanes; i++) {
        struct pc__ring_lane *lane = &ring->lanes[i];
        lane->scratch = malloc(PC__RING_SCRATCH_BYTES);
        if (!lane->scratch)
            return pc__fail(PC_ERR_NO_MEMORY, "a lane's buffer");
        if (i == 0)
            continue;
        int err = pthread_create(&lane->thread, NULL, pc__ring_lane_main, lane);
        if (err) {
            errno = err;
            return pc__fail_errno("pthread_create");
        }
        lane->has_thread = true;
    }
    return PC_OK;
}

static void close_given(const struct pc_ring_options *options)
{
    for (uint32_t i = 0; i < options->n_lanes; i++) {
        if (options->next_fds)
            close(options->next_fds[i]);
        if (options->previous_fds)
            close(options->previous_fds[i]);
    }
    for (uint32_t i = 0; options->partner_fds && i < options->n_partner_fds; i++)
        close(options->partner_fds[i]);
}

static bool are_ranks(const uint32_t *ranks, uint32_t n)
{
    bool *seen = calloc(n, sizeof *seen), all = seen != NULL;
    for (uint32_t i = 0; all && i < n; i++) {
        all = ranks[i] < n && !seen[ranks[i]];
        if (all)
            seen[ranks[i]] = true;
    }
    free(seen);
    return all;
}

static int check_options(const struct pc_ring_options *options, uint32_t *partners)
{
    int n_partners = pc_ring_partners(options->position, options->n_members, partners);
    if (n_partners < 0)
        return n_partners;
    bool alone = options->n_members == 1;
    if (options->n_lanes == 0 || options->n_lanes > PC__RING_MAX_LANES ||
        options->small_bytes > PC__RING_MAX_SMALL)
        return pc__fail(PC_ERR_RANGE, "%u lanes, small up to %llu bytes", options->n_lanes,
                        (unsigned long long)options->small_bytes);
    if (options->n_partner_fds != (uint32_t)n_partners ||
        alone != !options->next_fds || alone != !options->previous_fds)
        return pc__fail(PC_ERR_RANGE, "%u connections to %d partners, or none to neighbours",
                        options->n_partner_fds, n_partners);
    if (!are_ranks(options->ranks, options->n_members))
        return pc__fail(PC_ERR_RANGE, "ranks are not 0 to %u, each once", options->n_members - 1);
    return PC_OK;
}

static struct pc_ring *new_ring(const struct pc_ring_options *options, const uint32_t *partners)
{
    struct pc_ring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return NULL;
    ring->position = options->position;
    ring->n_members = options->n_members;
    ring->n_lanes = options->n_lanes;
    ring->n_pairs = options->n_partner_fds;
    ring->small_bytes = options->small_bytes;
    for (uint32_t i = 0; i < ring->n_pairs; i++)
        ring->pairs[i].position = partners[i];
    ring->lanes = calloc(options->n_lanes, sizeof *ring->lanes);
    ring->ranks = calloc(options->n_members, sizeof *ring->ranks);
    ring->scratch = malloc(2 * options->small_bytes + 1);
    if (!ring->lanes || !ring->ranks || !ring->scratch) {
        free_ring(ring);
        return NULL;
    }
    memcpy(ring->ranks, options->ranks, options->n_members * sizeof *ring->ranks);
    pthread_mutex_init(&ring->lock, NULL);
    pthread_mutex_init(&ring->pair_lock, NULL);
    pthread_cond_init(&ring->wanted, NULL);
    pthread_cond_init(&ring->done, NULL);
    return ring;
}

PC_API int pc_ring_open(const struct pc_ring_options *options, pc_ring **out)
{
    *out = NULL;
    uint32_t partners[PC_RING_PARTNERS];
    struct pc_ring *ring = NULL;
    int rc = check_options(options, partners);
    if (!rc && !(ring = new_ring(options, partners)))
        rc = pc__fail(PC_ERR_NO_MEMORY, "a ring");
    if (rc) {
        close_given(options);
        return rc;
    }
    take_fds(ring, options);
    add_to_process(ring);
    rc = start_lanes(ring);
    if (rc) {
        pc_ring_close(ring);
        return rc;
    }
    *out = ring;
    return PC_OK;
}
