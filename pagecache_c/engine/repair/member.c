/* member.c - blocks of a member of a group that is homed on this very node.
 *
 * Of the loop that wants them. What is resolved under region.lock is used without it, held as blocks of a
 * reply are (pc__home_hold).
 */
#include "engine/repair/repair.h"
#include "engine/store/store.h"

/* The first blocks of the run that lie in one place; *n: how many. */
static int read_some(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                     struct pc_run run, struct pc__sink *sink, uint64_t *n)
{
    uint8_t composed[PC_BLOCK_BYTES];
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->home;
    if (!home || home->base.memfd < 0 || region->state == PC__REGION_CREATING) {
        pthread_mutex_unlock(&region->lock);
        return PC_ERR_NO_REGION;
    }
    if (version > home->latest) { /* it hears of it in a moment */
        pthread_mutex_unlock(&region->lock);
        return PC_ERR_NO_VERSION;
    }
    const struct pc__home_part found =
        pc__home_resolve(engine, region, home, version, run.first_block, run.n_blocks);
    int rc = pc__home_knows(engine, region, version);
    const unsigned held = pc__home_hold(home);
    pthread_mutex_unlock(&region->lock);
    *n = found.n_blocks;
    if (!rc && (found.kind == PC__HOME_LOST || found.kind == PC__HOME_FILE))
        rc = PC_ERR_HOME_LOST;
    if (!rc && (found.kind == PC__HOME_ZEROS || found.kind == PC__HOME_MEMORY)) {
        sink->took(sink, *n, found.kind == PC__HOME_ZEROS ? NULL : found.bytes);
    } else if (!rc) {
        *n = 1;
        rc = pc__home_compose(engine, region, home, version, found.kind, run.first_block, composed);
        if (!rc)
            sink->took(sink, 1, composed);
    }
    pc__home_release(engine, region, home, held);
    return rc;
}

int pc__member_read(struct pc_engine *engine, const struct pc_repair_member *member, struct pc_run run,
                    struct pc__sink *sink)
{
    struct pc__region *region = pc__region_get(engine, member->region);
    const uint64_t end = region ? pc__region_blocks(region) : 0;
    int rc = end ? PC_OK : PC_ERR_NO_REGION;
    while (!rc && run.n_blocks) {
        uint64_t n = run.n_blocks;
        if (run.first_block >= end) { /* it is shorter than what is made again */
            sink->took(sink, n, NULL);
        } else {
            const uint64_t here = end - run.first_block;
            const struct pc_run inside = {run.first_block, n < here ? n : here};
            rc = read_some(engine, region, member->version, inside, sink, &n);
        }
        run.first_block += n;
        run.n_blocks -= n;
    }
    if (region)
        pc__region_put(engine, region);
    return rc;
}
