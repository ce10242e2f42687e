/* warm.c - blocks of a home on disk that another server asks for, and that are not in the kernel's page cache.
 *
 * A loop does not wait for a disk. The request is set aside (serve.c), a thread of the disk reads its blocks, and
 * by that they are in the page cache. Then the loop puts the answer together as any other. What went wrong it
 * finds then.
 */
#include "engine/core/core.h"
#include "engine/serve/serve.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>

#define AT_ONCE_BLOCKS (PC__DISK_JOB_BYTES / PC_BLOCK_BYTES)

struct pc__warm {
    struct pc__disk_job job;
    _Atomic uint32_t refs;     /* the job, who waits for it */
    _Atomic bool is_done;
    struct pc__loop *loop;
    struct pc__region *region; /* +1 ref */
    uint64_t version;
    int n_runs;
    struct pc_run runs[];
};

void pc__warm_put(struct pc__warm *warm)
{
    if (!warm || !pc__ref_drop(&warm->refs))
        return;
    pc__region_put(warm->loop->engine, warm->region);
    free(warm);
}

bool pc__warm_is_done(const struct pc__warm *warm)
{
    return atomic_load(&warm->is_done);
}

/* How many of the n blocks from that one on a read of the disk brings; 0: another kind, and *n of it. */
static uint64_t on_disk_from(const struct pc__warm *warm, const struct pc__home *home, uint64_t block,
                             uint64_t *n)
{
    uint64_t found = 0;
    while (found < *n) {
        const struct pc__home_part part =
            pc__home_resolve(warm->loop->engine, warm->region, home, warm->version, block + found, *n - found);
        if (part.kind != PC__HOME_DISK) {
            *n = part.n_blocks;
            break;
        }
        found++;
    }
    return found;
}

/* Some of [block, past); returns how many it is done with. */
static uint64_t read_some(const struct pc__warm *warm, uint64_t block, uint64_t past, uint8_t *some)
{
    struct pc__region *region = warm->region;
    uint64_t n = past - block < AT_ONCE_BLOCKS ? past - block : AT_ONCE_BLOCKS;
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->home;
    if (!home || home->base.memfd < 0) {
        pthread_mutex_unlock(&region->lock);
        return past - block;
    }
    const uint64_t on_disk = on_disk_from(warm, home, block, &n);
    const unsigned held = pc__home_hold(home);
    pthread_mutex_unlock(&region->lock);
    if (on_disk) /* what fails, fails again where it is asked for */
        (void)pc__home_read_disk(warm->loop->engine, region, home, warm->version, block, on_disk, some, true);
    pc__home_release(warm->loop->engine, region, home, held);
    return on_disk ? on_disk : n;
}

/* In a thread of the disk. */
static void run(struct pc__disk_job *job, uint8_t *some)
{
    struct pc__warm *warm = pc__of(job, struct pc__warm, job);
    const struct pc__mail mail = {.run = pc__served_look_aside};
    for (int i = 0; some && i < warm->n_runs; i++) {
        const uint64_t past = warm->runs[i].first_block + warm->runs[i].n_blocks;
        for (uint64_t at = warm->runs[i].first_block; at < past;)
            at += read_some(warm, at, past, some);
    }
    atomic_store(&warm->is_done, true);
    (void)pc__loop_post(warm->loop, &mail); /* else it is looked at with the next tick */
    pc__warm_put(warm);
}

struct pc__warm *pc__warm_begin(struct pc__loop *loop, struct pc__region *region,
                                const struct pc__request *request)
{
    const size_t n_bytes = (size_t)request->n_runs * sizeof request->runs[0];
    struct pc__warm *warm = malloc(sizeof *warm + n_bytes);
    if (!warm)
        return NULL;
    *warm = (struct pc__warm){.job.run = run,
                              .loop = loop,
                              .region = region,
                              .version = request->header.version,
                              .n_runs = request->n_runs};
    atomic_init(&warm->refs, 2u);
    memcpy(warm->runs, request->runs, n_bytes);
    pc__ref_take(&region->refs);
    if (pc__disk_job_run(loop->engine, &warm->job, PC__DISK_URGENT))
        return warm;
    pc__region_put(loop->engine, region);
    free(warm);
    return NULL;
}
