/* from_disk.c - blocks that were evicted and come back from this node's disk (cache/disk_cache.c).
 *
 * The disk is asked where it is faster than who else has the blocks, as measured: how long the last requests of
 * that size have taken, from both. Now and then the other one is asked, so that what is known stays true.
 *
 * A thread of the disk reads and inserts. The blocks are in flight, so their generation stays at its version.
 * What the disk does not have any more is asked for anew, by the loop that had asked for it.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <stdlib.h>

#define OTHER_EVERY 64u /* requests: the slower one is asked */
#define AGE 8u          /* a sample counts as one of so many */
static_assert((int)PC__SIZE_CLASSES == PC__RTT_CLASSES, "the same classes");

struct from_disk {
    struct pc__disk_job job;
    struct pc__loop *loop;
    struct pc__fetch *fetch;
    uint32_t n_blocks;
};

static void add_sample(_Atomic uint64_t *mean_ns, uint64_t ns)
{
    const uint64_t mean = pc__count_get(mean_ns); /* a sample that another thread adds may be lost */
    atomic_store_explicit(mean_ns, mean ? mean - mean / AGE + ns / AGE : ns, memory_order_relaxed);
}

bool pc__disk_is_faster(struct pc__disk_times *times, uint64_t n_blocks)
{
    const unsigned class = pc__rtt_class(n_blocks);
    const uint64_t disk_ns = pc__count_get(&times->disk_ns[class]);
    const uint64_t peer_ns = pc__count_get(&times->peer_ns[class]);
    const bool is_faster = !disk_ns || !peer_ns || disk_ns <= peer_ns;
    const uint64_t n = atomic_fetch_add_explicit(&times->n_chosen, 1, memory_order_relaxed) + 1;
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

static void end(struct from_disk *from, int rc)
{
    struct pc__loop *loop = from->loop;
    struct pc__fetch *fetch = from->fetch;
    const struct pc__mail mail = {.run = ask_again_here, .pointer = fetch};
    const uint64_t took_ns = pc__now_ns() - from->job.since_ns;
    if (!rc && !fetch->n_blocks)
        add_sample(&pc__disk_cache_times(loop->engine->disk_cache)->disk_ns[pc__rtt_class(from->n_blocks)],
                   took_ns);
    free(from);
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

/* In a thread of the disk. */
static void bring(struct pc__disk_job *job, uint8_t *some)
{
    struct from_disk *from = pc__of(job, struct from_disk, job);
    struct pc_engine *engine = from->loop->engine;
    struct pc__fetch *fetch = from->fetch;
    int rc = PC_OK;
    while (some && fetch->n_blocks && !rc) {
        const struct pc_run *run = &fetch->runs[fetch->at_run];
        const uint64_t n = pc__disk_cache_get(fetch->generation, run->first_block, run->n_blocks, some);
        if (!n)
            break;
        rc = pc__fill_insert(engine, fetch->region, fetch->generation, run->first_block, n, some, false);
        if (rc)
            break;
        pc__count_add(&engine->count.disk_cache_reads, n);
        pc__fetch_advance(fetch, n);
    }
    end(from, rc);
}

void pc__fetch_from_disk(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct from_disk *from = malloc(sizeof *from);
    if (from) {
        *from = (struct from_disk){
            .job.run = bring, .loop = loop, .fetch = fetch, .n_blocks = fetch->n_blocks};
        if (pc__disk_cache_read(loop->engine->disk_cache, &from->job, fetch->urgent))
            return;
        free(from);
    }
    pc__disk_cache_leave(loop->engine->disk_cache); /* else it would be asked again, now */
    ask_again(loop, fetch);
}
