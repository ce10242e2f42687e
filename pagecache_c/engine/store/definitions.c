/* definitions.c - what Python says of a region: what it is and where its homes are, that it is not to be
 * had, that it is sealed or freed, and what changed between two of its versions.
 *
 * Any thread may enter: Python's, or a loop where a question could not be put. Locks: region.lock.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>

static void definition_came(struct pc_engine *engine, struct pc__region *region, int error)
{
    pthread_mutex_lock(&region->lock);
    region->asked_region = false;
    pthread_mutex_unlock(&region->lock);
    pc__region_release(engine, region, error, 0, false);
}

PC_API int pc_engine_define_region(pc_engine *engine, const struct pc_region_info *info,
                                   const uint64_t *homes, size_t n_homes)
{
    if (!pc__region_info_valid(info) ||
        n_homes != (info->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES)
        return pc__fail(PC_ERR_RANGE, "variable %llu: %zu homes for %llu bytes",
                        (unsigned long long)info->region, n_homes,
                        (unsigned long long)info->length_bytes);
    uint64_t *copy = calloc(n_homes, sizeof *copy);
    struct pc__region *region = copy ? pc__region_get_or_add(engine, info->region) : NULL;
    if (!region) {
        free(copy);
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    }
    memcpy(copy, homes, n_homes * sizeof *copy);
    int rc = PC_OK;
    bool is_home = false, left = false;
    for (size_t i = 0; i < n_homes; i++)
        is_home |= homes[i] == engine->server_id;
    pthread_mutex_lock(&engine->publish_lock);
    pthread_mutex_lock(&region->lock);
    if (region->state == PC__REGION_READY) {
        rc = PC_OK; /* sealed here while the question was on its way */
    } else if (region->state != PC__REGION_UNKNOWN) {
        rc = PC_ERR_NO_REGION; /* freed meanwhile, or not sealed yet */
    } else if (is_home && !region->home && region->prepared) {
        rc = pc__rebuild_become_home(engine, region, info->term);
    } else if (is_home && (!region->home || region->home->base.memfd < 0)) {
        rc = pc__fail(PC_ERR_HOME_LOST,
                      "variable %llu is homed here, and the keeper did not have it",
                      (unsigned long long)info->region);
    } else if (region->n_blocks && (region->length_bytes != info->length_bytes ||
                                    region->base_address != info->base_address)) {
        rc = pc__fail(PC_ERR_PROTOCOL, "variable %llu differs from what the keeper held",
                      (unsigned long long)info->region);
    }
    /* It has moved away, and the server before this one had not heard of it. */
    left = !rc && region->state == PC__REGION_UNKNOWN && !is_home && region->home;
    if (left && info->term < region->term)
        rc = pc__fail(PC_ERR_TIMEOUT, "variable %llu has moved here since: ask again",
                      (unsigned long long)info->region);
    left = left && !rc;
    if (left)
        pc__move_leave(engine, region);
    if (!rc && region->state == PC__REGION_UNKNOWN) {
        if (is_home && info->term > region->term)
            pc__move_stays(engine, region, info->term);
        region->term = info->term > region->term ? info->term : region->term;
        region->version = info->version > region->version ? info->version : region->version;
        (void)pc__region_sized(region, info->base_address, info->length_bytes);
        region->homes = copy;
        copy = NULL;
        pc__region_goes(region, PC__REGION_DEFINE);
    }
    if (!rc) {
        region->loss = info->loss;
        region->has_repair = info->has_repair != 0;
        region->in_file |= info->medium == PC_MEDIUM_FILE;
    }
    pthread_mutex_unlock(&region->lock);
    pthread_mutex_unlock(&engine->publish_lock);
    if (left)
        pc__move_left(engine, region);
    free(copy);
    if (rc != PC_ERR_HOME_LOST) /* that is for the registry to say: Python asks, and tells who waits */
        definition_came(engine, region, rc);
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_refuse_region(pc_engine *engine, uint64_t id, int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_ERR_NO_REGION;
    if (!error)
        error = PC_ERR_NO_REGION;
    pthread_mutex_lock(&region->lock);
    /* Home blocks may be the only copy, and leased elsewhere: they go when they are retired. And
     * a registry that did not answer is no reason to drop anything: the next one asks again. */
    bool empty = pc__link_empty(&region->generations) && !region->prepared;
    bool useless = region->state == PC__REGION_UNKNOWN && !region->home &&
                   (empty || error == PC_ERR_NO_REGION);
    pthread_mutex_unlock(&region->lock);
    if (useless)
        pc__region_forget(engine, region);
    definition_came(engine, region, error); /* after it is forgotten: nobody can come to wait any more */
    pc__region_put(engine, region);
    return PC_OK;
}

PC_API int pc_engine_create_shared(pc_engine *engine, const struct pc_region_info *info,
                                   const struct pc_segment *segments, size_t n_segments, int *fd)
{
    *fd = -1;
    if (!pc__region_info_valid(info))
        return pc__fail(PC_ERR_RANGE, "variable %llu: base or length",
                        (unsigned long long)info->region);
    struct pc__region *region = pc__region_get_or_add(engine, info->region);
    if (!region)
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    pthread_mutex_lock(&region->lock);
    /* Of one that was changed, the keeper of a server before this one held the changes. */
    bool again = region->home && region->home->base.memfd < 0 &&
                 region->length_bytes == info->length_bytes && n_segments;
    bool fresh = pc__region_may(region, PC__REGION_CREATE) && (!region->home || again) &&
                 pc__region_sized(region, info->base_address, info->length_bytes);
    if (fresh) {
        region->version = info->version > region->version ? info->version : region->version;
        pc__region_goes(region, PC__REGION_CREATE);
    }
    pthread_mutex_unlock(&region->lock);
    int rc = fresh ? pc__home_make(engine, region, PC_MEDIUM_MEMORY, segments, n_segments, fd)
                   : pc__fail(PC_ERR_EXISTS, "variable %llu", (unsigned long long)info->region);
    if (fresh && rc && again) { /* the changes stay, for another try */
        pthread_mutex_lock(&region->lock);
        pc__region_goes(region, PC__REGION_GIVE_UP); /* freed meanwhile, it stays so */
        pthread_mutex_unlock(&region->lock);
    } else if (fresh && rc) {
        pc__region_forget(engine, region);
    }
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_seal(pc_engine *engine, uint64_t id)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    int rc = pc__region_seal(engine, region, false);
    if (!rc)
        pc__region_release(engine, region, PC_OK, 0, false);
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_retire(pc_engine *engine, uint64_t id, int force)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (force)
        pc__layers_forget(engine, id);
    if (!region) {
        pc__retained_forget(engine, id);
        return PC_ERR_NO_REGION;
    }
    pthread_mutex_lock(&region->lock);
    pc__region_goes(region, PC__REGION_RETIRE);
    pthread_mutex_unlock(&region->lock);
    pc__retained_forget(engine, id);
    pc__sessions_let_go(engine, id);
    pc__region_release(engine, region, PC_ERR_NO_REGION, 0, false);
    if (force)
        pc__region_forget(engine, region);
    else
        pc__region_lease_dropped(engine, region);
    pc__region_put(engine, region);
    return PC_OK;
}

PC_API int pc_engine_set_changes(pc_engine *engine, uint64_t id, uint64_t from_version,
                                 uint64_t to_version, const struct pc_run *runs, size_t n_runs,
                                 int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_ERR_NO_REGION;
    struct pc__changes changes = {.from = from_version, .to = to_version, .error = error};
    for (size_t i = 0; i < n_runs && !changes.error; i++)
        if (!runs[i].n_blocks || runs[i].first_block >= region->n_blocks ||
            runs[i].n_blocks > region->n_blocks - runs[i].first_block)
            changes.error = pc__fail(PC_ERR_RANGE, "changes outside of variable %llu",
                                     (unsigned long long)id);
    if (!changes.error && n_runs) {
        changes.runs = calloc(n_runs, sizeof *runs);
        if (changes.runs) {
            memcpy(changes.runs, runs, n_runs * sizeof *runs);
            changes.n_runs = n_runs;
        } else {
            changes.error = pc__fail(PC_ERR_NO_MEMORY, "changes of a region");
        }
    }
    /* EXPIRED is an answer: nothing is kept. NO_VERSION too, to those who asked for it. */
    bool failed = changes.error && changes.error != PC_ERR_EXPIRED;
    pthread_mutex_lock(&region->lock);
    region->asked_changes = false;
    struct pc_run *old = region->changes.runs;
    region->changes = failed ? (struct pc__changes){0} : changes;
    pthread_mutex_unlock(&region->lock);
    free(old);
    pc__region_release(engine, region, failed ? changes.error : PC_OK,
                       changes.error == PC_ERR_NO_VERSION ? to_version : 0, false);
    pc__region_put(engine, region);
    return changes.error == PC_ERR_RANGE ? changes.error : PC_OK;
}
