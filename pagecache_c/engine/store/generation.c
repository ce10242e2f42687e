/* generation.c - the memfds that processes of this node map: one for each version in use.
 *
 * A lease on a version gets the generation that holds exactly it. If there is none, one that nobody
 * leases is moved there in place (what changed in between is punched out), or a new one is made
 * beside it, a fork, which takes what did not change from its source and the rest from the home.
 *
 * Everything here is under region.lock. What keeps a label true:
 *   - a generation moves only while it has no lease, nothing in flight, and no fork that takes from
 *     it; punches come first, then the keeper hears the new version, then leases begin. A server
 *     that dies in between leaves fewer blocks under the old label, all of them right;
 *   - blocks are inserted under the version that they were asked for: who asked holds a reference,
 *     and in_flight keeps the label where it is.
 *
 * Relies on: FALLOC_FL_PUNCH_HOLE drops the block from every map of the file before it returns.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

static struct pc__generation *of_link(struct pc__link *link)
{
    return pc__of(link, struct pc__generation, link);
}

/* The map that inserts go through; see fill.c. */
int pc__generation_map(const struct pc_engine *engine, struct pc__generation *generation)
{
    uint64_t length = generation->present.n_blocks << PC_BLOCK_SHIFT;
    if (engine->uffd < 0)
        return PC_OK;
    void *map = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                     generation->memfd, 0);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of a generation of %llu bytes", (unsigned long long)length);
    generation->map = map;
    pc__huge_pages_refuse(map, length);
    (void)madvise(map, length, MADV_DONTDUMP);
    (void)madvise(map, length, MADV_DONTFORK);
    struct uffdio_register range = {.range = {.start = (uint64_t)(uintptr_t)map, .len = length},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    return ioctl(engine->uffd, UFFDIO_REGISTER, &range)
               ? pc__fail_errno("UFFDIO_REGISTER of a generation")
               : PC_OK;
}

bool pc__generation_leased(const struct pc__generation *generation, uint64_t to_version)
{
    uint64_t followers = to_version == generation->version + 1 ? generation->followers : 0;
    return generation->mappings > followers;
}

/* Who followed is an ordinary lease there. */
void pc__generation_is_at(struct pc__generation *generation, uint64_t version)
{
    if (generation->version != version)
        generation->followers = 0;
    generation->version = version;
}

struct pc__generation *pc__generation_by_inode(struct pc__region *region, uint64_t inode)
{
    pc__each(link, &region->generations) if (of_link(link)->inode == inode) return of_link(link);
    return NULL;
}

static void leave_source(struct pc_engine *engine, struct pc__generation *fork)
{
    if (!fork->source)
        return;
    fork->source->forks--;
    pc__generation_put(engine, fork->source);
    fork->source = NULL;
    pc__blockset_free(&fork->changed);
    memset(&fork->changed, 0, sizeof fork->changed);
}

void pc__generation_drop(struct pc_engine *engine, struct pc__region *region,
                         struct pc__generation *generation)
{
    pc__each(link, &region->generations) if (of_link(link)->source == generation)
        leave_source(engine, of_link(link));
    leave_source(engine, generation);
    pc__link_remove(&generation->link);
    pc__generation_put(engine, generation);
}

/* ------------------------------------------------------------------ making */

static int make(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                struct pc__generation **out)
{
    struct pc__generation *generation = pc__generation_new(region->n_blocks, false);
    if (!generation)
        return pc__fail(PC_ERR_NO_MEMORY, "a generation");
    generation->version = version;
    int rc = pc__descriptors_spare();
    if (!rc)
        rc = pc__memfd_make(region->length_bytes, &generation->inode);
    if (rc >= 0) {
        generation->memfd = rc;
        rc = pc__generation_map(engine, generation);
    }
    if (rc < 0) {
        pc__generation_put(engine, generation);
        return rc;
    }
    pc__link_push(&region->generations, &generation->link);
    const struct pc__kept kept =
        pc__kept_of(region, PC__KEPT_CACHE, generation->inode, generation->version);
    (void)pc__keep(engine, &kept, generation->memfd); /* a restart would fetch it again */
    *out = generation;
    return PC_OK;
}

#define PC__BEHIND 2 /* the keeper is: nobody may be told of a new label before it */

static int advance(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t version)
{
    const struct pc__changes *changes = &region->changes;
    for (size_t i = 0; i < changes->n_runs; i++) {
        uint64_t at = changes->runs[i].first_block, past = at + changes->runs[i].n_blocks;
        int done = generation->has_strays ? pc__memfd_punch(generation->memfd, at, past - at) : PC_OK;
        if (done)
            return done;
        pc__disk_cache_removed(generation, at, past - at);
        while ((at = pc__blockset_next(&generation->present, at, past)) < past) {
            uint64_t end = pc__blockset_next_absent(&generation->present, at, past);
            int rc = pc__memfd_punch(generation->memfd, at, end - at);
            if (rc)
                return rc;
            pc__blockset_remove(&generation->present, at, end - at);
            pc__blockset_remove(&generation->fetched, at, end - at);
            pc__cache_removed(engine, generation, at, end - at);
            (void)pc__blockset_add(&generation->changed_away, at, end - at); /* a hint */
            at = end;
        }
    }
    const struct pc__kept kept = pc__kept_of(region, PC__KEPT_CACHE, generation->inode, version);
    if (!pc__keep_now(engine, &kept)) /* it stays at its old label, with fewer blocks */
        return PC__BEHIND;
    pc__generation_is_at(generation, version);
    generation->gone = PC_OK;
    pc__count_add(&engine->count.advances, 1);
    return PC_OK;
}

static int fork_from(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *source, uint64_t version, struct pc__generation **out)
{
    const size_t n_changed = source->version == version ? 0 : region->changes.n_runs;
    struct pc__blockset changed;
    int rc = pc__blockset_init(&changed, region->n_blocks);
    if (rc)
        return rc;
    for (size_t i = 0; i < n_changed && !rc; i++)
        rc = pc__blockset_add(&changed, region->changes.runs[i].first_block,
                              region->changes.runs[i].n_blocks) < 0
                 ? PC_ERR_NO_MEMORY
                 : PC_OK;
    if (!rc)
        rc = make(engine, region, version, out);
    if (rc) {
        pc__blockset_free(&changed);
        return rc;
    }
    (*out)->changed = changed;
    (*out)->source = pc__generation_take(source);
    source->forks++;
    pc__count_add(&engine->count.forks, 1);
    return PC_OK;
}

/* ---------------------------------------------------------------- choosing */

/* The generation to begin from: the fullest of those that may move, else the fullest of all. None
 * moves while clients may still map, unattached, what a server before this one gave them. */
static struct pc__generation *best(struct pc_engine *engine, struct pc__region *region,
                                   uint64_t version, bool *moves)
{
    struct pc__generation *found = NULL;
    bool settled = !engine->settle_until_ns, is_behind = pc__keeper_is_behind(engine);
    *moves = false;
    pc__each(link, &region->generations)
    {
        struct pc__generation *g = of_link(link);
        if (g->complete && (!g->was_base || g->is_torn))
            continue;
        bool can = settled && !is_behind && !g->was_base && !pc__generation_leased(g, version) && !g->forks &&
                   !g->in_flight.n_set && g->version < version && !pc__windows_orphaned(g);
        if (found && (can < *moves || (can == *moves && g->present.n_set <= found->present.n_set)))
            continue;
        found = g;
        *moves = can;
    }
    return found;
}

static int from_nothing_or(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                           struct pc__generation **out, struct pc__ask *ask)
{
    bool moves;
    struct pc__generation *g = best(engine, region, version, &moves);
    if (!g)
        return make(engine, region, version, out);
    if (g->version == version) { /* a base that its home has left: all of it is the same */
        *out = g;
        return fork_from(engine, region, g, version, out);
    }
    uint64_t from = g->version < version ? g->version : version;
    uint64_t to = g->version < version ? version : g->version;
    const struct pc__changes *known = &region->changes;
    if (known->from != from || known->to != to) {
        *ask = (struct pc__ask){
            .kind = PC_EVENT_NEED_CHANGES, .from_version = from, .version = to};
        return PC__WAIT;
    }
    if (known->error == PC_ERR_EXPIRED) { /* nobody knows what is the same: nothing is kept */
        if (moves)
            pc__generation_drop(engine, region, g);
        return make(engine, region, version, out);
    }
    if (known->error)
        return known->error;
    *out = g;
    if (!moves)
        return fork_from(engine, region, g, version, out);
    leave_source(engine, g); /* what it did not take yet is its home's to give */
    int rc = advance(engine, region, g, version);
    return rc == PC__BEHIND ? fork_from(engine, region, g, version, out) : rc;
}

static uint64_t base_goes_to(const struct pc__home *home)
{
    return home->overlay.memfd >= 0 ? home->applied : home->base.version + 1;
}

int pc__generation_for(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                       bool caught_up, struct pc__generation **out, struct pc__ask *ask)
{
    struct pc__home *home = region->home;
    *ask = (struct pc__ask){.kind = PC_EVENT_NONE};
    pc__each(link, &region->generations)
    {
        struct pc__generation *g = of_link(link);
        if (g->version != version || g->was_base ||
            (g->complete && (home->base_changes || region->base_is_builders)))
            continue;
        if (g->gone)
            return g->gone;
        *out = g;
        return PC_OK;
    }
    if (home && version > home->latest) {
        *ask = (struct pc__ask){
            .kind = PC_EVENT_NEED_PUBLISHED, .from_version = home->latest, .version = version};
        return caught_up ? PC_ERR_NO_VERSION : PC__WAIT;
    }
    /* The worker will have the base there in a moment, unless somebody reads an older one, or a
     * reply to another server that does not get on looks at it. Or the overlay has half of a layer
     * that the keeper did not have: then the old blocks are in the history. */
    bool is_stuck = home && home->overlay_is_torn && pc__link_empty(&home->pending);
    if (home && version >= home->applied && !region->base_is_builders &&
        !pc__home_is_held_up(home) && !is_stuck && !pc__keeper_is_behind(engine) &&
        !pc__home_base_leased(engine, region, base_goes_to(home)) &&
        (home->base_changes || version > home->applied || home->overlay.memfd >= 0)) {
        if (home->base_changes && home->overlay.memfd < 0 && pc__link_empty(&home->pending)) {
            /* Half changed, and the other half is not here: the registry knows of its commit. */
            *ask = (struct pc__ask){
                .kind = PC_EVENT_NEED_PUBLISHED, .from_version = home->latest, .version = version};
            return caught_up ? PC_ERR_TIMEOUT : PC__WAIT;
        }
        pc__worker_queue(engine, region);
        return PC__WAIT;
    }
    if (home && version < home->history_from && !(region->in_file && !version) &&
        version < pc__history_floor(engine->history, region->id, home->history_from))
        return PC_ERR_EXPIRED;
    return from_nothing_or(engine, region, version, out, ask);
}

/* Of those that nobody leases at most one is kept: the fullest, for the next version to begin from.
 * None at a home whose base everybody can have. After a restart none is dropped before those who
 * map it had the time to say so. */
void pc__generations_trim(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__generation *kept = NULL;
    if (engine->settle_until_ns) /* they may be mapped: pc__regions_settled comes again */
        return;
    bool none = region->home && !region->base_is_builders && pc__home_base_generation(region) &&
                !pc__home_base_leased(engine, region, base_goes_to(region->home));
    pc__each(link, &region->generations)
    {
        struct pc__generation *g = of_link(link);
        if ((g->complete && !g->was_base) || g->mappings)
            continue;
        struct pc__generation *loser = g;
        if (!none && !g->was_base && (!kept || g->present.n_set > kept->present.n_set)) {
            loser = kept;
            kept = g;
        }
        if (loser)
            pc__generation_drop(engine, region, loser);
    }
}
