/* retained.c - what a writer's node keeps of its own commits: the layers that it has staged, once the
 * home, another server, has them.
 *
 * A home may be lost before anybody has read what the last commits changed: then these are the only
 * copies, and no source makes them. So a layer stays, under the version that it is, for a rebuild to
 * take blocks from (rebuild.c), until newer ones need its room. Nothing is read from it otherwise.
 *
 * The file stays open: a keeper that takes the place of one that died is given it (keeping.c), and only
 * so it outlives this server.
 *
 * A layer that the homes have not acknowledged as published is kept in any case: a home may be lost
 * just after it has said that it has the layer, and then an answered commit is here alone. What it is
 * acknowledged up to is asked (NEED_SETTLED) where all that is here would be beyond the bound, and
 * again every second. So what is beyond the bound are the commits of the last second or two, or those
 * of a home that does not answer: and such a home fetches no layer, without which there is no commit.
 *
 * The bound is of acknowledged layers (each is a mapping, and a descriptor here and at the keeper) and of
 * their bytes. Those go first after which the region has a newer one here; then the oldest. A layer that
 * alone is more than the bound is not kept.
 *
 * Owns engine.retained, under engine.lock.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#define ASK_FIRST_NS 300000000ull /* the registry tells the homes every 100 ms */
#define ASK_AGAIN_NS 1000000000ull
#define MOST_LAYERS 256u
#define DESCRIPTORS_SHARE 4u /* of the limit, where that is less */

static uint64_t most_layers(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur / DESCRIPTORS_SHARE > MOST_LAYERS)
        return MOST_LAYERS;
    return limit.rlim_cur / DESCRIPTORS_SHARE;
}

/* Regions that a walk over the layers has met: one walk is enough then, however many there are. */
struct met {
    uint64_t *ids;                 /* hashed; 0: free */
    size_t mask;
};

/* Under engine.lock, for as many as there are layers. False: no memory. */
static bool met_open(struct met *met, const struct pc_engine *engine)
{
    size_t capacity = 64;
    while (capacity < 2 * pc__count_get(&engine->count.retained_layers))
        capacity *= 2;
    met->mask = capacity - 1;
    met->ids = calloc(capacity, sizeof *met->ids);
    return met->ids != NULL;
}

/* Whether it is met for the first time. */
static bool is_new(struct met *met, uint64_t region)
{
    size_t at = (region * 0x9e3779b97f4a7c15ull >> 32) & met->mask;
    while (met->ids[at] && met->ids[at] != region)
        at = (at + 1) & met->mask;
    const bool is = !met->ids[at];
    met->ids[at] = region;
    return is;
}

/* Under engine.lock. */
static void take_out(struct pc_engine *engine, struct pc__layer *layer, struct pc__link *gone)
{
    pc__link_remove(&layer->link);
    pc__link_push(gone, &layer->link);
    pc__count_sub(&engine->count.retained_layers, 1);
    pc__count_sub(&engine->count.retained_bytes, layer->bytes);
    if (layer->settled) {
        engine->settled_layers--;
        engine->settled_bytes -= layer->bytes;
    }
}

/* Under engine.lock: whether something would have to go if all of it were settled. */
static bool is_beyond(struct pc_engine *engine)
{
    return pc__count_get(&engine->count.retained_layers) > most_layers() ||
           pc__count_get(&engine->count.retained_bytes) > engine->retained_most_bytes;
}

/* Under engine.lock: notes which have a newer one of their region here. For want of memory none has: they
 * go by their age alone. */
static void find_followed(struct pc_engine *engine)
{
    struct met met;
    const bool looks = met_open(&met, engine);
    for (struct pc__link *at = engine->retained.prev; at != &engine->retained; at = at->prev) {
        struct pc__layer *layer = pc__of(at, struct pc__layer, link);
        layer->followed = looks && !is_new(&met, layer->region);
    }
    free(met.ids);
}

/* Under engine.lock. */
static void make_room(struct pc_engine *engine, struct pc__link *gone)
{
    const uint64_t most = most_layers(), most_bytes = engine->retained_most_bytes;
    pc__each(link, &engine->retained)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->settled && layer->bytes > most_bytes)
            take_out(engine, layer, gone);
    }
    if (engine->settled_layers <= most && engine->settled_bytes <= most_bytes)
        return;
    find_followed(engine); /* and those that go leave that as it is: they are the older ones */
    for (int any = 0; any < 2; any++)
        pc__each(at, &engine->retained)
        {
            struct pc__layer *layer = pc__of(at, struct pc__layer, link);
            if (engine->settled_layers <= most && engine->settled_bytes <= most_bytes)
                return;
            if (layer->settled && (layer->followed || any))
                take_out(engine, layer, gone);
        }
}

static void end_all(struct pc_engine *engine, struct pc__link *gone)
{
    pc__each(link, gone)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        pc__link_remove(link);
        pc__unkeep(engine, layer->inode);
        pc__layer_put(layer);
    }
}

void pc__retained_add(struct pc_engine *engine, struct pc__layer *layer, uint64_t version)
{
    const uint64_t one = 1;
    pc__count_sub(&engine->count.layers, 1);
    pc__count_sub(&engine->count.layer_bytes, layer->bytes);
    pthread_mutex_lock(&engine->lock);
    layer->version = version;
    pc__link_push(&engine->retained, &layer->link);
    pc__count_add(&engine->count.retained_layers, 1);
    pc__count_add(&engine->count.retained_bytes, layer->bytes);
    const bool begins = engine->ask_settled_at_ns == UINT64_MAX && is_beyond(engine);
    if (begins)
        engine->ask_settled_at_ns = pc__now_ns() + ASK_FIRST_NS;
    pthread_mutex_unlock(&engine->lock);
    if (begins && engine->loops[0].mail_event >= 0) /* loop 0 may sleep without a deadline */
        (void)!write(engine->loops[0].mail_event, &one, sizeof one);
}

void pc__retained_request(struct pc_engine *engine, uint64_t now_ns)
{
    if (now_ns < engine->ask_settled_at_ns)
        return;
    engine->ask_settled_at_ns = UINT64_MAX;
    if (!is_beyond(engine))
        return;
    struct met asked;
    if (!met_open(&asked, engine)) {
        engine->ask_settled_at_ns = now_ns + ASK_AGAIN_NS;
        return;
    }
    pc__each(link, &engine->retained)
    {
        const struct pc__layer *layer = pc__of(link, const struct pc__layer, link);
        if (layer->settled)
            continue;
        engine->ask_settled_at_ns = now_ns + ASK_AGAIN_NS;
        const struct pc_event event = {.kind = PC_EVENT_NEED_SETTLED, .region = layer->region};
        if (is_new(&asked, layer->region))
            (void)pc__engine_request(engine, &event); /* one that is lost is made good by the next round */
    }
    free(asked.ids);
}

PC_API int pc_engine_settled(pc_engine *engine, uint64_t region, uint64_t version)
{
    struct pc__link gone;
    pc__link_init(&gone);
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->retained)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->region != region || layer->version > version || layer->settled)
            continue;
        layer->settled = true;
        engine->settled_layers++;
        engine->settled_bytes += layer->bytes;
    }
    make_room(engine, &gone);
    pthread_mutex_unlock(&engine->lock);
    end_all(engine, &gone);
    return PC_OK;
}

void pc__retained_forget(struct pc_engine *engine, uint64_t region)
{
    struct pc__link gone;
    pc__link_init(&gone);
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->retained)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->region == region)
            take_out(engine, layer, &gone);
    }
    pthread_mutex_unlock(&engine->lock);
    end_all(engine, &gone);
}

struct pc__layer *pc__retained_at(struct pc_engine *engine, uint64_t region, uint64_t version)
{
    struct pc__layer *found = NULL;
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->retained)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->region != region || layer->version != version)
            continue;
        found = layer;
        pc__ref_take(&layer->refs);
        break;
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

size_t pc__retained_versions(struct pc_engine *engine, uint64_t region, uint64_t *versions,
                             size_t capacity)
{
    size_t n = 0;
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->retained)
    {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->region != region)
            continue;
        if (n < capacity)
            versions[n] = layer->version;
        n++;
    }
    pthread_mutex_unlock(&engine->lock);
    return n;
}

void pc__retained_close(struct pc_engine *engine)
{
    pc__each(link, &engine->retained)
    {
        pc__link_remove(link);
        pc__layer_put(pc__of(link, struct pc__layer, link));
    }
}
