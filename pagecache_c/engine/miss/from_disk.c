/* from_disk.c - blocks that were evicted and come back from this node's disk (cache/disk_cache.c).
 *
 * The disk is asked where it is faster than who else has the blocks, as measured: how long the last requests of
 * that size have taken, from both. Now and then the other one is asked, so that what is known stays true.
 *
 * A thread of the disk reads and inserts. The blocks are in flight, so their generation stays at its version.
 * What the disk does not have any more is asked for anew, by the loop that had asked for it. So is what a disk that
 * hangs does not bring in time: the fetch is whoever's has claimed it. The thread claims it to look at it and to
 * insert, and not while it reads.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <sched.h>
#include <stdlib.h>

#define OTHER_EVERY 64u /* requests of a size: the slower one is asked */
#define AGE 8u          /* a sample counts as one of so many */
static_assert((int)PC__SIZE_CLASSES == PC__RTT_CLASSES, "the same classes");

enum claim { FREE, CLAIMED, LEAVING, GONE };

struct from_disk {
    struct pc__disk_job job;
    struct pc__loop *loop;
    struct pc__fetch *fetch; /* another's once it is GONE */
    _Atomic int claim;
};

static void add_sample(_Atomic uint64_t *mean_ns, uint64_t ns)
{
    const uint64_t mean = pc__count_get(mean_ns); /* a sample that another thread adds may be lost */
    atomic_store_explicit(mean_ns, mean ? mean - mean / AGE + ns / AGE : ns, memory_order_relaxed);
}

bool pc__disk_is_faster(struct pc__disk_times *times, uint64_t n_blocks, uint64_t n_waiting)
{
    const unsigned class = pc__rtt_class(n_blocks), chunk_class = pc__rtt_class(PC__CHUNK_BLOCKS);
    const uint64_t n_reads = (n_blocks + PC__CHUNK_BLOCKS - 1) / PC__CHUNK_BLOCKS;
    const uint64_t chunk_ns = pc__count_get(&times->disk_ns[chunk_class]);
    const uint64_t read_ns = n_reads > 1 ? chunk_ns : pc__count_get(&times->disk_ns[class]);
    const uint64_t peer_ns = pc__count_get(&times->peer_ns[class]);
    const uint64_t disk_ns = n_reads * read_ns + n_waiting * chunk_ns / PC__DISK_THREADS;
    const bool is_faster = !read_ns || !peer_ns || disk_ns <= peer_ns;
    const uint64_t n = atomic_fetch_add_explicit(&times->n_chosen[class], 1, memory_order_relaxed) + 1;
    return n % OTHER_EVERY ? is_faster : !is_faster;
}

void pc__peer_took(struct pc_engine *engine, uint64_t n_blocks, uint64_t ns)
{
    if (engine->disk_cache)
        add_sample(&pc__disk_cache_times(engine->disk_cache)->peer_ns[pc__rtt_class(n_blocks)], ns);
}

/* On its loop: what did not come. */
static void ask_again(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc__batch again;
    pc__batch_init(&again, fetch->urgent, fetch->prefetch);
    while (fetch->n_blocks) {
        const struct pc_run run = fetch->runs[fetch->at_run];
        pthread_mutex_lock(&fetch->region->lock);
        const int rc = pc__fetch_ask_elsewhere(fetch, &again, run.n_blocks);
        pthread_mutex_unlock(&fetch->region->lock);
        if (rc)
            pc__fill_failed(loop->engine, fetch->region, fetch->generation, run.first_block, run.n_blocks,
                            loop->engine->server_id, rc);
    }
    pc__fetch_drop(loop->engine, fetch);
    pc__batch_submit(loop, &again);
}

static void ask_again_here(struct pc__loop *loop, struct pc__mail *mail)
{
    ask_again(loop, mail->pointer);
}

/* By the thread. False: it is gone. Who is about to leave it may have to give it back, for want of memory. */
static bool claim(struct from_disk *from)
{
    int found = FREE;
    while (!atomic_compare_exchange_strong(&from->claim, &found, CLAIMED)) {
        if (found == GONE)
            return false;
        found = FREE;
        (void)sched_yield();
    }
    return true;
}

/* The disk is late. */
static bool leave(struct pc__disk_job *job)
{
    struct from_disk *from = pc__of(job, struct from_disk, job);
    const struct pc__mail mail = {.run = ask_again_here, .pointer = from->fetch};
    int expected = FREE;
    if (!atomic_compare_exchange_strong(&from->claim, &expected, LEAVING))
        return false;
    const bool is_left = !pc__loop_post(from->loop, &mail);
    if (is_left)
        pc__count_sub(&from->loop->engine->count.fetches_in_flight, 1);
    atomic_store(&from->claim, is_left ? GONE : FREE);
    return is_left;
}

/* Claimed: of the fetch, which is done, or asked for again where some of it is left. */
static void end(struct pc__loop *loop, struct pc__fetch *fetch, int rc)
{
    const struct pc__mail mail = {.run = ask_again_here, .pointer = fetch};
    pc__count_sub(&loop->engine->count.fetches_in_flight, 1);
    if (!rc && fetch->n_blocks)
        rc = pc__loop_post(loop, &mail);
    else if (!rc)
        pc__fetch_drop(loop->engine, fetch);
    if (!rc)
        return;
    fetch->server_id = loop->engine->server_id;
    pc__fetch_fail(loop->engine, fetch, rc);
    pc__fetch_drop(loop->engine, fetch);
}

/* Claimed: the next blocks. They are read unclaimed. Returns how many came; 0: the disk has not got them, or (not
 * claimed then) the fetch is another's now. *rc: they could not be inserted. */
static uint64_t bring_some(struct from_disk *from, uint8_t *some, int *rc)
{
    struct pc_engine *engine = from->loop->engine;
    struct pc__fetch *fetch = from->fetch;
    const struct pc__generation *generation = fetch->generation; /* compared */
    const struct pc_run run = fetch->runs[fetch->at_run];
    struct pc__disk_times *times = pc__disk_cache_times(engine->disk_cache);
    const uint64_t began_ns = pc__now_ns();
    atomic_store(&from->claim, FREE);
    const uint64_t n = pc__disk_cache_get(engine->disk_cache, generation, run.first_block, run.n_blocks, some);
    if (n)
        add_sample(&times->disk_ns[pc__rtt_class(n)], pc__now_ns() - began_ns);
    if (!claim(from))
        return 0;
    if (n)
        *rc = pc__fill_insert(engine, fetch->region, fetch->generation, run.first_block, n, some, false);
    if (!n || *rc)
        return 0;
    pc__count_add(&engine->count.disk_cache_reads, n);
    pc__fetch_advance(fetch, n);
    return n;
}

/* In a thread of the disk. */
static void bring(struct pc__disk_job *job, uint8_t *some)
{
    struct from_disk *from = pc__of(job, struct from_disk, job);
    struct pc__loop *loop = from->loop;
    int rc = PC_OK;
    bool is_ours = claim(from);
    while (is_ours && some && from->fetch->n_blocks && bring_some(from, some, &rc))
        ;
    is_ours = is_ours && atomic_load(&from->claim) == CLAIMED;
    struct pc__fetch *fetch = from->fetch;
    pc__disk_job_ends(loop->engine, job);
    free(from);
    if (is_ours)
        end(loop, fetch, rc);
}

struct touched {
    const struct pc__generation *generation;
    uint64_t block;
};

/* Of a job that waits, under the lock of all jobs: nobody looks at its fetch, unless it is gone. */
static bool brings(const struct pc__disk_job *job, void *arg)
{
    const struct from_disk *from = pc__of((struct pc__disk_job *)(uintptr_t)job, struct from_disk, job);
    const struct touched *touched = arg;
    return job->run == bring && atomic_load(&from->claim) == FREE &&
           from->fetch->generation == touched->generation && pc__fetch_covers(from->fetch, touched->block);
}

void pc__from_disk_hurry(struct pc_engine *engine, const struct pc__generation *generation, uint64_t block)
{
    struct touched touched = {generation, block};
    pc__disk_job_hurry(engine, brings, &touched);
}

void pc__fetch_from_disk(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc_engine *engine = loop->engine;
    struct from_disk *from = malloc(sizeof *from);
    if (from) {
        *from = (struct from_disk){.job = {.run = bring, .late = leave}, .loop = loop, .fetch = fetch};
        pc__count_add(&engine->count.fetches_in_flight, 1);
        if (pc__disk_job_run(engine, &from->job, fetch->urgent ? PC__DISK_URGENT : PC__DISK_READ))
            return;
        pc__count_sub(&engine->count.fetches_in_flight, 1);
        free(from);
    }
    pc__disk_cache_leave(engine->disk_cache, PC_ERR_NO_MEMORY); /* else it would be asked again, now */
    ask_again(loop, fetch);
}
