/* region_state.c - how the state of a region changes, and what holds of a region while its lock is free.
 * Pure.
 *
 *                 UNKNOWN    CREATING   READY     RETIRED
 *   CREATE        CREATING                                   a process, or this server, fills it
 *   GIVE_UP                  UNKNOWN              RETIRED    its home could not be made
 *   DEFINE        READY                                      Python looked it up
 *   SEAL                     READY                           it is filled
 *   RETIRE        RETIRED    RETIRED    RETIRED   RETIRED    it is freed
 *
 * What is not there cannot happen: the caller has looked at the state, under the same hold of the lock.
 */
#include "engine/core/core.h"

#include <assert.h>

#define NEVER (-1)

static const int next_state[PC__REGION_RETIRE + 1][PC__REGION_RETIRED + 1] = {
    [PC__REGION_CREATE] = {PC__REGION_CREATING, NEVER, NEVER, NEVER},
    [PC__REGION_GIVE_UP] = {NEVER, PC__REGION_UNKNOWN, NEVER, PC__REGION_RETIRED},
    [PC__REGION_DEFINE] = {PC__REGION_READY, NEVER, NEVER, NEVER},
    [PC__REGION_SEAL] = {NEVER, PC__REGION_READY, NEVER, NEVER},
    [PC__REGION_RETIRE] = {PC__REGION_RETIRED, PC__REGION_RETIRED, PC__REGION_RETIRED,
                           PC__REGION_RETIRED},
};

bool pc__region_may(const struct pc__region *region, enum pc__region_step step)
{
    return next_state[step][region->state] != NEVER;
}

void pc__region_goes(struct pc__region *region, enum pc__region_step step)
{
    assert(pc__region_may(region, step));
    if (pc__region_may(region, step))
        region->state = (enum pc__region_state)next_state[step][region->state];
    PC__AUDIT(pc__region_audit(region));
}

/* ------------------------------------------------------------- what holds */

static const char *check_home(const struct pc__home *home)
{
    uint64_t version = home->applied;
    if (home->base.version > home->applied || home->applied > home->latest)
        return "base.version <= applied <= latest";
    if (home->history_from != home->applied && home->history_from != home->applied + 1)
        return "the history begins at what is applied, or one later";
    pc__each(link, &home->pending)
    {
        if (pc__of(link, struct pc__layer, link)->version != ++version)
            return "a layer waits for each version of (applied, latest], in order";
    }
    return version == home->latest ? NULL : "a layer waits for the latest version";
}

const char *pc__region_audit(const struct pc__region *region)
{
    uint64_t mappings = 0;
    if (region->length_bytes != region->n_blocks << PC_BLOCK_SHIFT)
        return "as many bytes as blocks";
    if (region->state == PC__REGION_READY && (!region->homes || !region->n_blocks))
        return "a region that is ready has blocks, and they have homes";
    if (region->state == PC__REGION_READY && region->creator)
        return "a region that is ready has no creator";
    pc__each(link, &region->generations)
    {
        const struct pc__generation *generation = pc__of(link, struct pc__generation, link);
        if (generation->followers > generation->mappings)
            return "each follower of a generation is one of its mappings";
        if (generation->present.n_blocks != region->n_blocks)
            return "a generation has the region's blocks";
        mappings += generation->mappings;
    }
    if (mappings != region->mappings)
        return "each mapping is of one generation";
    if (region->former && (region->home || region->prepared))
        return "another home begins when nobody looks at the former one any more";
    return region->home ? check_home(region->home) : NULL;
}
