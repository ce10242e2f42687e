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
 * The bound is of layers (each is a mapping, and a descriptor here and at the keeper) and of bytes. Those
 * go first after which the region has a newer one here; then the oldest. A layer that alone is more than
 * the bound is not kept.
 *
 * Owns engine.retained, under engine.lock.
 */
#include "engine.h"
#include "retained.h"

#include <sys/resource.h>

#define MOST_LAYERS 256u
#define DESCRIPTORS_SHARE 4u /* of the limit, where that is less */

static uint64_t most_layers(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur / DESCRIPTORS_SHARE > MOST_LAYERS)
        return MOST_LAYERS;
    return limit.rlim_cur / DESCRIPTORS_SHARE;
}

/* Under engine.lock: the oldest that a newer one of its region follows, else the oldest. Not the last,
 * which has just come. */
static struct pc__layer *next_to_go(struct pc_engine *engine)
{
    pc__each(link, &engine->retained)
    {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        for (struct pc__link *after = link->next; after != &engine->retained; after = after->next)
            if (pc__of(after, struct pc__layer, link)->region == layer->region)
                return pc__of(link, struct pc__layer, link);
    }
    return pc__of(engine->retained.next, struct pc__layer, link);
}

/* Under engine.lock. */
static void take_out(struct pc_engine *engine, struct pc__layer *layer, struct pc__link *gone)
{
    pc__link_remove(&layer->link);
    pc__link_push(gone, &layer->link);
    pc__count_sub(&engine->count.retained_layers, 1);
    pc__count_sub(&engine->count.retained_bytes, layer->bytes);
}

static void end_all(struct pc_engine *engine, struct pc__link *gone)
{
    pc__each(link, gone)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        pc__link_remove(link);
        pc__unkeep(engine, layer->inode, false);
        pc__layer_put(layer);
    }
}

void pc__retained_add(struct pc_engine *engine, struct pc__layer *layer, uint64_t version)
{
    const uint64_t most_bytes = engine->retained_most_bytes, most = most_layers();
    struct pc__link gone;
    pc__count_sub(&engine->count.layers, 1);
    pc__count_sub(&engine->count.layer_bytes, layer->bytes);
    pc__link_init(&gone);
    pthread_mutex_lock(&engine->lock);
    layer->version = version;
    pc__link_push(&engine->retained, &layer->link);
    pc__count_add(&engine->count.retained_layers, 1);
    pc__count_add(&engine->count.retained_bytes, layer->bytes);
    if (layer->bytes > most_bytes)
        take_out(engine, layer, &gone);
    while (pc__count_get(&engine->count.retained_layers) > most ||
           pc__count_get(&engine->count.retained_bytes) > most_bytes)
        take_out(engine, next_to_go(engine), &gone);
    pthread_mutex_unlock(&engine->lock);
    end_all(engine, &gone);
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
