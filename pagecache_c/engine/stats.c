/* stats.c - what the engine tells of itself. Any thread may enter; takes engine.lock and then, one at
 * a time, the locks of its regions.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/loop.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <string.h>

/* Calls each with every region, region.lock held. */
static void each_region(struct pc_engine *engine, void (*each)(void *, struct pc__region *),
                        void *arg)
{
    pthread_mutex_lock(&engine->lock);
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++)
        for (struct pc__region *r = engine->regions[b]; r; r = r->hash_next) {
            pthread_mutex_lock(&r->lock);
            each(arg, r);
            pthread_mutex_unlock(&r->lock);
        }
    pthread_mutex_unlock(&engine->lock);
}

static uint64_t home_bytes(const struct pc__home *home)
{
    return (home->base.data.n_set + home->overlay.data.n_set + pc__home_read_holes(home))
           << PC_BLOCK_SHIFT;
}

/* What those that wait now have waited, in force of region.lock. */
static uint64_t waits_ns(const struct pc__generation *generation, uint64_t now_ns)
{
    uint64_t sum_ns = 0;
    pc__each(link, &generation->waiters)
    {
        const uint64_t since_ns = pc__of(link, struct pc__waiter, link)->since_ns;
        sum_ns += since_ns < now_ns ? now_ns - since_ns : 0;
    }
    return sum_ns;
}

struct sums {
    struct pc_engine_stats *out;
    uint64_t now_ns;
};

static void add_sizes(void *arg, struct pc__region *region)
{
    const struct sums *sums = arg;
    struct pc_engine_stats *out = sums->out;
    out->regions++;
    if (region->home)
        *(region->home->base.on_disk ? &out->disk_bytes : &out->home_bytes) += home_bytes(region->home);
    pc__each(link, &region->generations)
    {
        const struct pc__generation *g = pc__of(link, struct pc__generation, link);
        out->generations++;
        out->fault_wait_ns += waits_ns(g, sums->now_ns);
        *(g->on_disk    ? &out->disk_bytes
          : g->was_base ? &out->home_bytes
                        : &out->cached_bytes) += g->present.n_set << PC_BLOCK_SHIFT;
    }
}

PC_API int pc_engine_get_stats(pc_engine *engine, struct pc_engine_stats *out)
{
    memset(out, 0, sizeof *out);
    struct sums sums = {.out = out, .now_ns = pc__now_ns()};
    each_region(engine, add_sizes, &sums);
    struct pc__counters *c = &engine->count;
    if (engine->cache)
        out->cached_bytes = pc__cache_bytes(engine);
    out->mappings = pc__count_get(&c->mappings);
    out->clients = pc__count_get(&c->clients);
    out->served_connections = pc__count_get(&c->served_connections);
    out->peer_connections = pc__count_get(&c->peer_connections);
    out->faults = pc__count_get(&c->faults);
    out->faults_failed = pc__count_get(&c->faults_failed);
    out->faults_waiting = pc__count_get(&c->faults_waiting);
    out->fault_wait_ns += pc__count_get(&c->fault_wait_ns);
    out->fetch_requests = pc__count_get(&c->fetch_requests);
    out->fetch_retries = pc__count_get(&c->fetch_retries);
    out->fetch_failed = pc__count_get(&c->fetch_failed);
    out->fetches_in_flight = pc__count_get(&c->fetches_in_flight);
    out->blocks_fetched = pc__count_get(&c->blocks_fetched);
    out->bytes_received = pc__count_get(&c->bytes_received);
    out->bytes_sent = pc__count_get(&c->bytes_sent);
    out->blocks_served = pc__count_get(&c->blocks_served);
    out->zero_blocks = pc__count_get(&c->zero_blocks);
    out->local_blocks = pc__count_get(&c->local_blocks);
    out->prefetch_requests = pc__count_get(&c->prefetch_requests);
    out->prefetched_blocks = pc__count_get(&c->prefetched_blocks);
    out->bad_messages = pc__count_get(&c->bad_messages);
    out->reattached = pc__count_get(&c->reattached);
    out->advances = pc__count_get(&c->advances);
    out->forks = pc__count_get(&c->forks);
    out->layers = pc__count_get(&c->layers);
    out->layer_bytes = pc__count_get(&c->layer_bytes);
    out->retained_layers = pc__count_get(&c->retained_layers);
    out->retained_bytes = pc__count_get(&c->retained_bytes);
    out->commits_staged = pc__count_get(&c->commits_staged);
    out->commits_published = pc__count_get(&c->commits_published);
    out->commits_applied = pc__count_get(&c->commits_applied);
    out->commits_dropped = pc__count_get(&c->commits_dropped);
    struct pc__history_stats history;
    pc__history_stats(engine->history, &history);
    out->history_records = history.records;
    out->history_bytes = history.memory_bytes;
    out->history_disk_bytes = history.disk_bytes;
    out->history_expired = history.expired + history.skipped;
    out->history_retained_bytes = history.retained_bytes;
    out->history_retained_expired = history.retained_expired;
    out->redirected_blocks = pc__count_get(&c->redirected_blocks);
    out->redirect_misses = pc__count_get(&c->redirect_misses);
    out->peer_blocks_served = pc__count_get(&c->peer_blocks_served);
    out->peer_blocks_fetched = pc__count_get(&c->peer_blocks_fetched);
    out->evicted_blocks = pc__count_get(&c->evicted_blocks);
    out->refetched_blocks = pc__count_get(&c->refetched_blocks);
    out->rows_served = pc__count_get(&c->rows_served);
    out->rows_fetched = pc__count_get(&c->rows_fetched);
    out->damaged_blocks = pc__count_get(&c->damaged_blocks);
    out->degraded_blocks = pc__count_get(&c->degraded_blocks);
    out->mirror_blocks = pc__count_get(&c->mirror_blocks);
    out->hedges = pc__count_get(&c->hedges);
    out->hedges_won = pc__count_get(&c->hedges_won);
    out->opens = pc__count_get(&c->opens);
    out->disk_cached_bytes = pc__disk_cache_bytes(engine->disk_cache);
    out->disk_cache_reads = pc__count_get(&c->disk_cache_reads);
    out->disk_cache_writes = pc__count_get(&c->disk_cache_writes);
    out->file_reads = pc__count_get(&c->file_reads);
    out->file_blocks = pc__count_get(&c->file_blocks);
    return PC_OK;
}

static void add_home(void *arg, struct pc__region *region)
{
    int64_t *n = arg;
    *n += region->home || region->former || region->prepared;
}

PC_API int64_t pc_engine_in_use(pc_engine *engine, int but_homes)
{
    int64_t n = (int64_t)(pc__count_get(&engine->count.mappings) +
                          pc__count_get(&engine->count.leases_at_stop));
    const uint64_t settles = engine->settle_until_ns; /* UINT64_MAX: at the engine's end */
    n += settles && settles != UINT64_MAX; /* processes may come back, and have leases */
    if (!but_homes)
        each_region(engine, add_home, &n);
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->staged)
        n += !but_homes || pc__of(link, struct pc__layer, link)->owner;
    pthread_mutex_unlock(&engine->lock);
    return n;
}

struct region_list {
    struct pc_engine *engine;
    struct pc_region_stats *out;
    size_t capacity, n;
    uint64_t now_ns;
};

static void list_region(void *arg, struct pc__region *region)
{
    struct region_list *list = arg;
    if (list->n++ >= list->capacity)
        return;
    struct pc_region_stats *out = &list->out[list->n - 1];
    *out = (struct pc_region_stats){.region = region->id,
                                    .version = region->version,
                                    .length_bytes = region->length_bytes,
                                    .is_home = region->home != NULL,
                                    .leaves_home = region->former != NULL,
                                    .mappings = region->mappings,
                                    .faults = region->faults,
                                    .fault_wait_ns = region->fault_wait_ns};
    /* Of several generations: of the fullest. */
    pc__each(link, &region->generations)
    {
        const struct pc__generation *g = pc__of(link, struct pc__generation, link);
        out->generations++;
        out->fault_wait_ns += waits_ns(g, list->now_ns);
        if (g->present.n_set < out->present_blocks)
            continue;
        out->present_blocks = g->present.n_set;
        out->fetched_blocks = g->fetched.n_set;
        out->touched_blocks = g->touched.n_set;
    }
    if (region->pages) {
        out->fault_fetched_blocks = region->pages->budget.fetched;
        out->fault_touched_blocks = region->pages->budget.touched;
        out->fault_trip_blocks = region->pages->trip_blocks;
    }
    const uint64_t read_ns = pc__count_get(&region->read_ns);
    out->reads = pc__count_get(&region->reads);
    out->idle_ns = read_ns && read_ns < list->now_ns ? list->now_ns - read_ns : 0;
    if (region->home) {
        *(region->home->base.on_disk ? &out->disk_bytes : &out->home_bytes) = home_bytes(region->home);
        out->present_blocks = region->n_blocks;
        out->oldest_version =
            pc__history_floor(list->engine->history, region->id, region->home->history_from);
    }
}

PC_API int64_t pc_engine_region_stats(pc_engine *engine, struct pc_region_stats *out,
                                      size_t capacity)
{
    struct region_list list = {.engine = engine, .out = out, .capacity = capacity,
                               .now_ns = pc__now_ns()};
    each_region(engine, list_region, &list);
    return (int64_t)list.n;
}

PC_API int64_t pc_engine_process_waits(pc_engine *engine, struct pc_process_waits *out,
                                       size_t capacity)
{
    return (int64_t)pc__leases_waits(engine, out, capacity);
}

PC_API int pc_engine_histogram(pc_engine *engine, uint64_t id, int which, uint32_t *buckets,
                               size_t n_buckets)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    memset(buckets, 0, n_buckets * sizeof *buckets);
    pthread_mutex_lock(&region->lock);
    const struct pc__generation *g = NULL; /* the fullest */
    pc__each(link, &region->generations)
    {
        const struct pc__generation *each = pc__of(link, struct pc__generation, link);
        if (!g || each->present.n_set > g->present.n_set)
            g = each;
    }
    const struct pc__blockset *set = !g                             ? NULL
                                     : which == PC_BLOCKS_PRESENT ? &g->present
                                     : which == PC_BLOCKS_FETCHED ? &g->fetched
                                                                  : &g->touched;
    for (size_t i = 0; set && i < n_buckets; i++) {
        uint64_t first = (uint64_t)((__uint128_t)region->n_blocks * i / n_buckets);
        uint64_t past = (uint64_t)((__uint128_t)region->n_blocks * (i + 1) / n_buckets);
        if (past > first)
            buckets[i] = (uint32_t)pc__blockset_count(set, first, past - first);
    }
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return PC_OK;
}

/* ------------------------------------------------------------------- audit */

struct audit {
    struct pc_engine *engine;
    const char *broken;
};

static void audit_region(void *arg, struct pc__region *region)
{
    struct audit *audit = arg;
    const char *broken = pc__region_audit(region);
    pc__each(link, &region->generations)
    {
        struct pc__generation *generation = pc__of(link, struct pc__generation, link);
        if (!broken)
            broken = pc__cache_audit_generation(audit->engine, generation);
    }
    if (!audit->broken)
        audit->broken = broken;
}

const char *pc__engine_audit(struct pc_engine *engine)
{
    struct audit audit = {engine, NULL};
    each_region(engine, audit_region, &audit);
    if (!audit.broken)
        audit.broken = pc__cache_audit(engine);
    if (!audit.broken)
        audit.broken = pc__history_audit(engine->history);
    return audit.broken ? audit.broken : pc__leases_audit(engine);
}
