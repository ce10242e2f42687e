/* regions.c - the regions that this server knows: the table, references, and what waits for one.
 *
 * Any thread may enter. Table: engine.lock; contents of a region: region.lock. A region lives as long
 * as its table entry or a reference does, so a freed region's memory goes when its last mapping, fetch
 * and queued reply are gone.
 */
#include "engine/core/core.h"

#include <assert.h>
#include <malloc.h>
#include <stdlib.h>

/* ------------------------------------------------------------------- table */

static struct pc__region **bucket_of(struct pc_engine *engine, uint64_t id)
{
    return &engine->regions[(id * 0x9e3779b97f4a7c15ull) >> 52];
}
static_assert(PC__REGION_BUCKETS == 1u << 12, "bucket_of takes 12 bits");

static struct pc__region *find_locked(struct pc_engine *engine, uint64_t id)
{
    struct pc__region *region = *bucket_of(engine, id);
    while (region && region->id != id)
        region = region->hash_next;
    return region;
}

struct pc__region *pc__region_alone(uint64_t id, uint64_t n_blocks)
{
    struct pc__region *region = calloc(1, sizeof *region);
    if (!region)
        return NULL;
    region->id = id;
    region->n_blocks = n_blocks;
    region->length_bytes = n_blocks << PC_BLOCK_SHIFT;
    region->state = PC__REGION_UNKNOWN;
    pthread_mutex_init(&region->lock, NULL);
    pc__link_init(&region->pending);
    pc__link_init(&region->generations);
    pc__link_init(&region->later);
    atomic_init(&region->refs, 1u);
    return region;
}

bool pc__region_sized(struct pc__region *region, uint64_t base_address, uint64_t length_bytes)
{
    if (region->n_blocks) /* not written again: they are read without the lock */
        return region->base_address == base_address && region->length_bytes == length_bytes;
    region->base_address = base_address;
    region->length_bytes = length_bytes;
    region->n_blocks = length_bytes >> PC_BLOCK_SHIFT;
    return true;
}

uint64_t pc__region_blocks(struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    uint64_t n_blocks = region->n_blocks;
    pthread_mutex_unlock(&region->lock);
    return n_blocks;
}

struct pc__region *pc__region_get(struct pc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->lock);
    struct pc__region *region = find_locked(engine, id);
    if (region)
        pc__ref_take(&region->refs);
    pthread_mutex_unlock(&engine->lock);
    return region;
}

struct pc__region *pc__region_get_or_add(struct pc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->lock);
    struct pc__region *region = find_locked(engine, id);
    if (!region) {
        region = pc__region_alone(id, 0);
        if (region) {
            region->hash_next = *bucket_of(engine, id);
            *bucket_of(engine, id) = region;
            engine->n_regions++;
        }
    }
    if (region)
        pc__ref_take(&region->refs);
    pthread_mutex_unlock(&engine->lock);
    return region;
}

/* What small records leave free lies between others, and malloc gives back only what lies at the
 * heap's end. Not each time: it walks over all that is free. */
#define TRIM_EVERY 256u

static void trim_sometimes(void)
{
    static _Atomic uint64_t freed; /* of all engines: they share the heap */
    pc__count_add(&freed, 1);
    if (pc__count_get(&freed) % TRIM_EVERY == 0)
        (void)malloc_trim(0);
}

void pc__region_was_read(struct pc__region *region)
{
    pc__count_add(&region->reads, 1);
    atomic_store_explicit(&region->read_ns, pc__now_ns(), memory_order_relaxed);
}

void pc__region_put(struct pc_engine *engine, struct pc__region *region)
{
    if (!pc__ref_drop(&region->refs))
        return;
    PC__AUDIT(pc__region_audit(region)); /* no other thread has it */
    engine->observers.region_ended(engine, region);
    free(region->changes.runs);
    free(region->homes);
    pthread_mutex_destroy(&region->lock);
    free(region);
    trim_sometimes();
}

void pc__region_forget(struct pc_engine *engine, struct pc__region *region)
{
    bool found = false;
    pthread_mutex_lock(&engine->lock);
    for (struct pc__region **at = bucket_of(engine, region->id); *at; at = &(*at)->hash_next)
        if (*at == region) {
            *at = region->hash_next;
            engine->n_regions--;
            found = true;
            break;
        }
    if (found) {
        pthread_mutex_lock(&region->lock);
        region->forgotten = true;
        pthread_mutex_unlock(&region->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    if (found)
        pc__region_put(engine, region);
}

/* --------------------------------------------------------------- waiters */

/* Sends all that waits for the region back to its loops. */
void pc__region_release(struct pc_engine *engine, struct pc__region *region, int error,
                        uint64_t from, bool caught_up)
{
    struct pc__link waiting;
    pc__link_init(&waiting);
    pthread_mutex_lock(&region->lock);
    pc__each(link, &region->pending)
    {
        pc__link_remove(link);
        pc__link_push(&waiting, link);
        struct pc__pending *pending = pc__of(link, struct pc__pending, link);
        pending->asked_published |= caught_up && pending->question <= region->published_questions;
    }
    uint64_t answered = caught_up ? region->published_questions : 0;
    bool parked = region->parked > 0;
    region->parked = 0;
    pthread_mutex_unlock(&region->lock);
    pc__each(held, &waiting)
    {
        struct pc__pending *pending = pc__of(held, struct pc__pending, link);
        const struct pc__mail mail = {.run = pending->again,
                                      .pointer = pending,
                                      .error = pending->open.version >= from ? error : 0};
        if (pc__loop_post(pending->loop, &mail))
            free(pending); /* the client's own deadline tells it */
    }
    for (int i = 0; parked && i < engine->n_loops; i++) {
        const struct pc__mail mail = {
            .run = engine->observers.version_came, .a = region->id, .b = answered, .error = error};
        (void)pc__loop_post(&engine->loops[i], &mail); /* a request gives up by its own deadline */
    }
}

/* ------------------------------------------------------- for the worker */

bool pc__worker_push(struct pc__worker *worker, struct pc__region *region)
{
    if (worker->n == worker->capacity) {
        size_t capacity = worker->capacity ? worker->capacity * 2 : 64;
        struct pc__region **grown = calloc(capacity, sizeof(struct pc__region *));
        if (!grown)
            return false;
        for (size_t i = 0; i < worker->n; i++)
            grown[i] = worker->queue[(worker->begin + i) % worker->capacity];
        free(worker->queue);
        worker->queue = grown;
        worker->begin = 0;
        worker->capacity = capacity;
    }
    worker->queue[(worker->begin + worker->n++) % worker->capacity] = region;
    return true;
}

void pc__worker_queue(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__worker *worker = &engine->worker;
    if (region->queued)
        return;
    pthread_mutex_lock(&worker->lock);
    if (pc__worker_push(worker, region)) { /* else the next commit or lease queues it */
        pc__ref_take(&region->refs);
        region->queued = true;
    }
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
}

void pc__worker_hurry(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__worker *worker = &engine->worker;
    pthread_mutex_lock(&worker->lock);
    const bool waits = !pc__link_empty(&region->later);
    if (waits && pc__worker_push(worker, region)) /* else in its time */
        pc__link_remove(&region->later);
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
    if (!waits)
        pc__worker_queue(engine, region);
}
