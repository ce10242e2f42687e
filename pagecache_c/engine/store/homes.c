/* homes.c - what Python says of a region's homes: who they are, that one is lost, or that all of the region is;
 * and the files of those that are here.
 *
 * Locks: region.lock for the homes. All loops are told, for each has fetches that wait.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------ their files */

/* A description of its own: a dup would share with us that a refused write was said already. */
static int open_again(int fd)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int again = open(path, O_RDWR | O_CLOEXEC);
    return again < 0 ? pc__fail_errno("opening the file of a home once more") : again;
}

/* Under region.lock. */
static int file_of_home(const struct pc__region *region, struct pc_home_file *out)
{
    const bool made = region->home && region->state != PC__REGION_CREATING;
    const bool prepared = region->prepared && region->prepared_sealed;
    const struct pc__home *home = made ? region->home : prepared ? region->prepared : NULL;
    const unsigned long long id = region->id;
    if (!home || home->base.memfd < 0)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu is not homed here", id);
    if (!home->base.on_disk)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu is in memory here, and in no file", id);
    if (home->base.is_broken)
        return pc__fail(PC_ERR_SYSTEM, "the disk has refused a part of variable %llu", id);
    const int fd = open_again(home->base.memfd);
    *out = (struct pc_home_file){.version = home->base.version,
                                 .term = region->home ? region->term : region->prepared_term,
                                 .base_address = region->base_address,
                                 .length_bytes = region->length_bytes,
                                 .in_file = region->in_file,
                                 .fd = fd};
    return fd < 0 ? fd : PC_OK;
}

PC_API int pc_engine_home_file(pc_engine *engine, uint64_t id, struct pc_home_file *out)
{
    struct pc__region *region = pc__region_get(engine, id);
    *out = (struct pc_home_file){.fd = -1};
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    pthread_mutex_lock(&region->lock);
    const int rc = file_of_home(region, out);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return rc;
}

/* ------------------------------------------------------------- who they are */

static int tell_loops(struct pc_engine *engine, uint64_t region, uint64_t server_id, int error)
{
    const struct pc__mail mail = {
        .run = engine->observers.homes_changed, .a = region, .b = server_id, .error = error};
    int rc = PC_OK;
    for (int i = 0; i < engine->n_loops; i++) {
        int posted = pc__loop_post(&engine->loops[i], &mail);
        rc = rc ? rc : posted;
    }
    return rc;
}

PC_API int pc_engine_set_homes(pc_engine *engine, uint64_t id, const uint64_t *homes,
                               size_t n_homes)
{
    return pc_engine_set_homes_of(engine, id, 0, homes, n_homes);
}

/* Under region.lock: whether what is said was overtaken by what was said since. */
static bool is_old(const struct pc__region *region, uint64_t term)
{
    return term < region->term;
}

/* Under region.lock: this server is not among the homes of that term. What was prepared for a later one
 * stays. Without terms nobody knows that there is a later one. */
static struct pc__home *take_unwanted(struct pc__region *region, uint64_t term)
{
    struct pc__home *unwanted = term >= region->prepared_term ? region->prepared : NULL;
    if (unwanted)
        region->prepared = NULL;
    return unwanted;
}

/* Under publish_lock and region.lock. *left: it was the home. */
static int take_homes(struct pc_engine *engine, struct pc__region *region, uint64_t term,
                      const uint64_t *homes, size_t n_homes, bool here, bool *left)
{
    /* Also where it was not defined since a restart. */
    const bool leaves = !here && region->home && (region->state == PC__REGION_READY ||
                                                  region->state == PC__REGION_UNKNOWN);
    if (region->state != PC__REGION_READY && !leaves)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu is not used here",
                        (unsigned long long)region->id);
    if (n_homes != (region->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES)
        return pc__fail(PC_ERR_RANGE, "variable %llu: %zu homes", (unsigned long long)region->id,
                        n_homes);
    if (leaves && term && term == region->term)
        return pc__fail(PC_ERR_EXISTS, "variable %llu has its home here in term %llu",
                        (unsigned long long)region->id, (unsigned long long)term);
    if (leaves) {
        region->term = term;
        pc__move_leave(engine, region);
        *left = true;
    }
    if (region->state != PC__REGION_READY)
        return PC_OK; /* whose homes they are comes with the definition */
    int rc = here && !region->home ? pc__rebuild_become_home(engine, region, term) : PC_OK;
    if (rc)
        return rc;
    region->lost = PC_OK;
    if (here && term > region->term)
        pc__move_stays(engine, region, term);
    region->term = term;
    for (size_t i = 0; i < n_homes; i++)
        __atomic_store_n(&region->homes[i], homes[i], __ATOMIC_RELAXED);
    return PC_OK;
}

PC_API int pc_engine_set_homes_of(pc_engine *engine, uint64_t id, uint64_t term,
                                  const uint64_t *homes, size_t n_homes)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    struct pc__home *unwanted = NULL;
    bool here = false, left = false;
    for (size_t i = 0; i < n_homes; i++)
        here |= homes[i] == engine->server_id;
    pthread_mutex_lock(&engine->publish_lock);
    pthread_mutex_lock(&region->lock);
    region->asked_home = false;
    int rc = PC_OK;
    const bool old = is_old(region, term);
    if (!old && !here) /* also where nobody has used the region: it is told so just once */
        unwanted = take_unwanted(region, term);
    if (!old)
        rc = take_homes(engine, region, term, homes, n_homes, here, &left);
    pthread_mutex_unlock(&region->lock);
    pthread_mutex_unlock(&engine->publish_lock);
    pc__rebuild_end(engine, region, unwanted);
    if (left)
        pc__move_left(engine, region);
    if (!rc && here && !old)
        pc__retained_forget(engine, id); /* the base has it */
    if (!rc)
        rc = tell_loops(engine, id, 0, PC_OK);
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_region_lacks(pc_engine *engine, uint64_t id, uint32_t loss)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    pthread_mutex_lock(&region->lock);
    region->loss = loss;
    pthread_mutex_unlock(&region->lock);
    pc__sessions_let_go(engine, id); /* says so to who has it mapped */
    pc__region_put(engine, region);
    return PC_OK;
}

PC_API int pc_engine_region_lost(pc_engine *engine, uint64_t id, int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    pthread_mutex_lock(&region->lock);
    region->lost = error < 0 ? error : PC_ERR_HOME_LOST;
    pthread_mutex_unlock(&region->lock);
    pc__sessions_let_go(engine, id); /* an idle mapping is opened without a word to us */
    pc__region_put(engine, region);
    return PC_OK;
}

PC_API int pc_engine_home_lost(pc_engine *engine, uint64_t id, uint64_t server_id, int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    pthread_mutex_lock(&region->lock);
    region->asked_home = false;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return tell_loops(engine, id, server_id, error < 0 ? error : PC_ERR_HOME_LOST);
}
