/* repair_sets.c - which regions, at which versions, make a region's blocks of a version again: what Python
 * said. Any thread may enter. Lock: region.lock.
 *
 * It is asked once at a time for each version. What was said stays until a member does not answer as
 * such, or other versions need the room.
 */
#include "engine/repair/repair.h"

#include <stdlib.h>
#include <string.h>

#define SETS 4u

struct set {
    uint64_t version, used; /* used: 0: free */
    bool is_asked, is_said;
    uint64_t ask_at_ns;     /* not before */
    bool is_mirror;
    uint32_t n;
    struct pc_repair_member *members;
};
struct pc__repair_sets {
    bool was_said, is_mirrored; /* of any version */
    uint64_t clock;
    struct set of[SETS];
};

void pc__repair_sets_free(struct pc__repair_sets *sets)
{
    for (size_t i = 0; sets && i < SETS; i++)
        free(sets->of[i].members);
    free(sets);
}

/* That of the version, or the one that was not used for longest. NULL: no memory. */
static struct set *set_of(struct pc__region *region, uint64_t version)
{
    struct pc__repair_sets *sets = region->repair_sets;
    if (!sets)
        sets = region->repair_sets = calloc(1, sizeof *sets);
    if (!sets)
        return NULL;
    struct set *oldest = &sets->of[0];
    sets->clock++;
    for (size_t i = 0; i < SETS; i++) {
        struct set *set = &sets->of[i];
        if (set->used && set->version == version) {
            set->used = sets->clock;
            return set;
        }
        oldest = set->used < oldest->used ? set : oldest;
    }
    free(oldest->members);
    *oldest = (struct set){.version = version, .used = sets->clock};
    return oldest;
}

/* Under region.lock. */
static void ask(struct pc_engine *engine, const struct pc__region *region, struct set *set)
{
    const uint64_t now_ns = pc__now_ns();
    const struct pc_event event = {
        .kind = PC_EVENT_NEED_REPAIR, .region = region->id, .version = set->version};
    if (set->is_asked || now_ns < set->ask_at_ns)
        return;
    set->ask_at_ns = now_ns + PC__REPAIR_PAUSE_NS;
    set->is_asked = pc__engine_request(engine, &event);
}

enum pc__members_known pc__members_of(struct pc_engine *engine, struct pc__region *region,
                                      uint64_t version, struct pc__members *out)
{
    enum pc__members_known known = PC__MEMBERS_NONE;
    pthread_mutex_lock(&region->lock);
    struct set *set = set_of(region, version);
    if (set && set->is_said && set->n) {
        known = PC__MEMBERS_KNOWN;
        out->is_mirror = set->is_mirror;
        out->n = set->n;
        memcpy(out->of, set->members, set->n * sizeof out->of[0]);
    } else if (set) {
        ask(engine, region, set);
        known = set->is_asked ? PC__MEMBERS_ASKED : PC__MEMBERS_NONE;
    }
    pthread_mutex_unlock(&region->lock);
    return known;
}

bool pc__is_mirrored(struct pc_engine *engine, struct pc__region *region, uint64_t version)
{
    pthread_mutex_lock(&region->lock);
    const bool was_said = region->repair_sets && region->repair_sets->was_said;
    struct set *set = was_said ? NULL : set_of(region, version);
    if (set)
        ask(engine, region, set);
    const bool is_mirrored = was_said && region->repair_sets->is_mirrored;
    pthread_mutex_unlock(&region->lock);
    return is_mirrored;
}

void pc__members_failed(struct pc__region *region, uint64_t version)
{
    pthread_mutex_lock(&region->lock);
    for (size_t i = 0; region->repair_sets && i < SETS; i++) {
        struct set *set = &region->repair_sets->of[i];
        if (set->used && set->version == version)
            set->is_said = false; /* asked again, but not sooner than a pause after the last time */
    }
    pthread_mutex_unlock(&region->lock);
}

PC_API int pc_engine_set_repair(pc_engine *engine, uint64_t id, uint64_t version,
                                const struct pc_repair_member *members, size_t n_members,
                                int is_mirror)
{
    bool fits = n_members <= PC__REPAIR_MEMBERS;
    for (size_t i = 0; fits && i < n_members; i++)
        fits = members[i].region && members[i].region != id && members[i].server_id;
    if (!fits)
        return pc__fail(PC_ERR_RANGE, "%zu members of the group of variable %llu", n_members,
                        (unsigned long long)id);
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    struct pc_repair_member *copy = malloc((n_members + 1) * sizeof *copy);
    pthread_mutex_lock(&region->lock);
    struct set *set = set_of(region, version);
    const int rc = copy && set ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "members of a group");
    if (set)
        set->is_asked = false;
    if (!rc) {
        memcpy(copy, members, n_members * sizeof *copy);
        free(set->members);
        set->members = copy;
        set->n = (uint32_t)n_members;
        set->is_said = true;
        set->is_mirror = is_mirror;
        set->ask_at_ns = pc__now_ns() + PC__REPAIR_PAUSE_NS;
        region->repair_sets->was_said |= n_members > 0;
        region->repair_sets->is_mirrored |= n_members && is_mirror;
        copy = NULL;
    }
    pthread_mutex_unlock(&region->lock);
    free(copy);
    for (int i = 0; i < engine->n_loops; i++) {
        const struct pc__mail mail = {.run = pc__repair_said, .a = id, .b = version};
        (void)pc__loop_post(&engine->loops[i], &mail); /* else it looks after a pause */
    }
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_region_has_repair(pc_engine *engine, uint64_t id, int has_repair)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_ERR_NO_REGION;
    region->has_repair = has_repair != 0;
    pc__region_put(engine, region);
    return PC_OK;
}
