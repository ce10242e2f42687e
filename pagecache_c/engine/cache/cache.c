/* cache.c - the budget of a node's cached blocks: what is accounted, and what evicts.
 *
 * Accounted are the blocks that are present in generations that are no home. An entry is an aligned
 * chunk of 16 blocks (64 KiB) of one generation with a bit for each that is present; policy.h says
 * which goes first. Its blocks are punched out of the generation's file, under region.lock: every
 * process that maps it loses them at once, and the next touch is a fault like the first.
 *
 * Evictions are made by a thread of their own, from the high water mark (1/128 below the budget) down to
 * the low one (1/64 below it); and by a thread that is about to insert what would exceed the budget, as much
 * as it inserts (pc__cache_room). Neither waits for a fetch. Where nothing can go, an insert goes on all the same: a
 * fetch never waits for an eviction.
 *
 * What stays: what a SIGSEGV process has unprotected (windows.c); the blocks at which the last few
 * stopped threads were woken, so that each gets on however small the budget is; what a restarted
 * server took back, until its processes have had the time to attach again. What goes before all else:
 * blocks of generations without a lease for a while.
 *
 * Memory: 96 bytes an entry, so 1.5 MiB for each cached GiB of whole chunks and 24 MiB at worst (no
 * two blocks in one chunk); beside it, of each GiB of the budget, 0.5 MiB of table and 2 MiB of
 * fingerprints of what was evicted.
 *
 * Lifetimes: entries of a generation end before it does (pc__cache_forget), and it before its region.
 * So a thread that finds an entry under the lock may look at both, and takes references if there are any
 * left to take.
 */
#include "engine/cache/cache.h"
#include "engine/cache/policy.h"
#include "engine/core/core.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LEAST_BYTES (1ull << 20)
#define IDLE_NS 1000000000ull       /* unleased for so long: first to go */
#define NAP_NS 50000000ull          /* of the evictor, where nothing can go */
#define PASSED_OVER_MOST 64u        /* by one that inserts, before it goes on all the same */
#define FORGET_AT_ONCE 256u
#define PERIOD_NS 3000000000ull     /* over which thrashing is judged, */
#define PERIOD_BLOCKS 256u          /* if so much came in */
#define TELL_NS 10000000000ull      /* between two events */

struct entry {
    struct pc__policy_entry policy; /* first: of_policy */
    struct entry *hash_next;
    struct entry *aside;            /* while one is chosen */
    struct pc__link siblings;       /* of its generation */
    struct pc__generation *generation;
    uint64_t chunk;
    uint16_t present;               /* bit i: block i of the chunk */
    uint16_t awaited;               /* threads were stopped at these, and may not have run yet */
    bool fresh;                     /* not used since the fault that fetched it */
};
static_assert(sizeof(struct entry) <= 96, "as said above");

struct awaited {
    const struct pc__generation *generation; /* compared, never looked into */
    uint64_t block;
};

struct pc__cache {
    struct pc_engine *engine;
    pthread_mutex_t lock;           /* everything below but the atomics; a leaf */
    pthread_mutex_t window_lock;    /* one eviction at a time beside SIGSEGV windows */
    pthread_cond_t wake;
    pthread_t thread;
    bool started, asleep;
    _Atomic bool stopping;
    uint64_t budget, high, low;     /* blocks */
    _Atomic uint64_t used, reserved; /* used: changes under the lock; reserved: about to be inserted */
    struct pc__policy policy;
    struct pc__ghost evicted;       /* blocks, by region and chunk */
    struct entry **buckets;
    uint64_t n_buckets, n_entries;
    struct pc__link idle;           /* generations without a lease, the first that lost it first */
    struct awaited *awaited;        /* ring */
    uint64_t n_awaited, at_awaited;
    _Atomic uint64_t period_ends_ns;
    uint64_t came, came_back;       /* in this period */
    uint64_t told_ns;
};

static struct entry *of_policy(struct pc__policy_entry *entry)
{
    return (struct entry *)(void *)entry;
}

static struct entry *of_sibling(struct pc__link *link)
{
    return pc__of(link, struct entry, siblings);
}

static uint64_t mix(uint64_t x) /* SplitMix64's output function */
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static struct entry **bucket_of(const struct pc__cache *cache,
                                const struct pc__generation *generation, uint64_t chunk)
{
    return &cache->buckets[mix(mix((uint64_t)(uintptr_t)generation) ^ chunk) &
                           (cache->n_buckets - 1)];
}

static struct entry *find(const struct pc__cache *cache, const struct pc__generation *generation,
                          uint64_t chunk)
{
    struct entry *entry = *bucket_of(cache, generation, chunk);
    while (entry && (entry->generation != generation || entry->chunk != chunk))
        entry = entry->hash_next;
    return entry;
}

/* The blocks of [first, first + n) that lie in the chunk. */
static uint32_t mask_of(uint64_t chunk, uint64_t first, uint64_t n)
{
    uint64_t begin = chunk * PC__CHUNK_BLOCKS;
    uint64_t low = first > begin ? first - begin : 0;
    uint64_t high = first + n - begin < PC__CHUNK_BLOCKS ? first + n - begin : PC__CHUNK_BLOCKS;
    return ((1u << high) - 1) & ~((1u << low) - 1);
}

/* ----------------------------------------------------------------- entries */

static struct entry *add_entry(struct pc__cache *cache, struct pc__generation *generation,
                               uint64_t chunk)
{
    struct entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    entry->generation = generation;
    entry->chunk = chunk;
    entry->fresh = true;
    entry->policy.key = mix(mix(generation->cached_for->id) ^ chunk);
    if (!pc__policy_inserted(&cache->policy, &entry->policy)) {
        free(entry);
        return NULL;
    }
    struct entry **bucket = bucket_of(cache, generation, chunk);
    entry->hash_next = *bucket;
    *bucket = entry;
    pc__link_push(&generation->cached, &entry->siblings);
    cache->n_entries++;
    return entry;
}

static void free_entry(struct pc__cache *cache, struct entry *entry)
{
    struct entry **at = bucket_of(cache, entry->generation, entry->chunk);
    while (*at != entry)
        at = &(*at)->hash_next;
    *at = entry->hash_next;
    pc__policy_removed(&cache->policy, &entry->policy);
    pc__link_remove(&entry->siblings);
    cache->n_entries--;
    free(entry);
}

/* These blocks of the entry are no more; it may be freed. */
static void take_blocks(struct pc__cache *cache, struct entry *entry, uint32_t mask)
{
    uint32_t gone = entry->present & mask;
    pc__count_sub(&cache->used, __builtin_popcount(gone));
    entry->present &= (uint16_t)~gone;
    entry->awaited &= (uint16_t)~gone;
    if (!entry->present)
        free_entry(cache, entry);
}

static void add_blocks(struct pc__cache *cache, struct pc__generation *generation, uint64_t chunk,
                       uint32_t mask)
{
    struct entry *entry = find(cache, generation, chunk);
    if (!entry)
        entry = add_entry(cache, generation, chunk);
    if (!entry)
        return; /* for want of memory: it goes with its generation */
    uint32_t fresh = mask & ~(uint32_t)entry->present;
    unsigned n = (unsigned)__builtin_popcount(fresh);
    entry->present |= (uint16_t)fresh;
    pc__count_add(&cache->used, n);
    uint32_t back = pc__ghost_take(&cache->evicted, entry->policy.key, fresh,
                                   (uint32_t)cache->budget);
    unsigned n_back = (unsigned)__builtin_popcount(back);
    cache->came += n;
    cache->came_back += n_back;
    pc__count_add(&cache->engine->count.refetched_blocks, n_back);
}

static void wake_evictor(struct pc__cache *cache) /* locked */
{
    if (cache->asleep)
        pthread_cond_signal(&cache->wake);
    cache->asleep = false;
}

void pc__cache_added(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *generation, uint64_t first, uint64_t n)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    pthread_mutex_lock(&cache->lock);
    generation->cached_for = region;
    for (uint64_t chunk = first / PC__CHUNK_BLOCKS; chunk * PC__CHUNK_BLOCKS < first + n; chunk++)
        add_blocks(cache, generation, chunk, mask_of(chunk, first, n));
    if (pc__count_get(&cache->used) > cache->high)
        wake_evictor(cache);
    pthread_mutex_unlock(&cache->lock);
}

void pc__cache_removed(struct pc_engine *engine, struct pc__generation *generation, uint64_t first,
                       uint64_t n)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    pthread_mutex_lock(&cache->lock);
    for (uint64_t chunk = first / PC__CHUNK_BLOCKS; chunk * PC__CHUNK_BLOCKS < first + n; chunk++) {
        struct entry *entry = find(cache, generation, chunk);
        if (entry)
            take_blocks(cache, entry, mask_of(chunk, first, n));
    }
    pthread_mutex_unlock(&cache->lock);
}

void pc__cache_awaited(struct pc_engine *engine, struct pc__generation *generation, uint64_t block)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    pthread_mutex_lock(&cache->lock);
    struct awaited *at = &cache->awaited[cache->at_awaited++ % cache->n_awaited];
    struct entry *entry = at->generation
                              ? find(cache, at->generation, at->block / PC__CHUNK_BLOCKS)
                              : NULL;
    if (entry)
        entry->awaited &= (uint16_t)~(1u << at->block % PC__CHUNK_BLOCKS);
    *at = (struct awaited){.generation = generation, .block = block};
    entry = find(cache, generation, block / PC__CHUNK_BLOCKS);
    if (entry)
        entry->awaited |= (uint16_t)(1u << block % PC__CHUNK_BLOCKS);
    pthread_mutex_unlock(&cache->lock);
}

void pc__cache_touched(struct pc_engine *engine, struct pc__generation *generation,
                       const struct pc_run *runs, size_t n_runs)
{
    struct pc__cache *cache = engine->cache;
    if (!cache || generation->complete)
        return;
    uint64_t next = 0; /* each chunk once, though several runs lie in it */
    pthread_mutex_lock(&cache->lock);
    for (size_t i = 0; i < n_runs; i++) {
        uint64_t chunk = runs[i].first_block / PC__CHUNK_BLOCKS;
        uint64_t past = runs[i].first_block + runs[i].n_blocks;
        for (chunk = chunk > next ? chunk : next; chunk * PC__CHUNK_BLOCKS < past; chunk++) {
            struct entry *entry = find(cache, generation, chunk);
            next = chunk + 1;
            if (!entry)
                continue;
            pc__policy_used(&cache->policy, &entry->policy, !entry->fresh);
            entry->fresh = false;
        }
    }
    pthread_mutex_unlock(&cache->lock);
}

void pc__cache_leased(struct pc_engine *engine, struct pc__generation *generation)
{
    struct pc__cache *cache = engine->cache;
    if (!cache || generation->complete)
        return;
    pthread_mutex_lock(&cache->lock);
    bool is_idle = !pc__link_empty(&generation->idle);
    if (generation->mappings && is_idle) {
        pc__link_remove(&generation->idle);
    } else if (!generation->mappings && !is_idle) {
        generation->idle_since_ns = pc__now_ns();
        pc__link_push(&cache->idle, &generation->idle);
    }
    pthread_mutex_unlock(&cache->lock);
}

void pc__cache_forget(struct pc_engine *engine, struct pc__generation *generation)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    bool more = true;
    while (more) {
        pthread_mutex_lock(&cache->lock);
        for (unsigned i = 0; i < FORGET_AT_ONCE && !pc__link_empty(&generation->cached); i++) {
            struct entry *entry = of_sibling(generation->cached.next);
            take_blocks(cache, entry, UINT32_MAX);
        }
        more = !pc__link_empty(&generation->cached);
        if (!more)
            pc__link_remove(&generation->idle);
        pthread_mutex_unlock(&cache->lock);
    }
}

/* ---------------------------------------------------------------- eviction */

struct victim {
    struct pc__region *region;         /* +1 ref */
    struct pc__generation *generation; /* +1 ref */
    uint64_t chunk;
};

static bool take_if_alive(_Atomic uint32_t *refs)
{
    uint32_t n = atomic_load(refs);
    while (n && !atomic_compare_exchange_weak(refs, &n, n + 1))
        ;
    return n != 0;
}

static bool settles(const struct pc_engine *engine, const struct pc__generation *generation)
{
    return generation->adopted && engine->settle_until_ns;
}

/* One of a generation without a lease for a while; locked. */
static struct entry *idle_entry(struct pc__cache *cache)
{
    uint64_t now = pc__now_ns();
    pc__each(link, &cache->idle)
    {
        struct pc__generation *generation = pc__of(link, struct pc__generation, idle);
        if (now - generation->idle_since_ns < IDLE_NS)
            return NULL;
        if (settles(cache->engine, generation))
            continue;
        pc__each(each, &generation->cached)
        {
            struct entry *entry = of_sibling(each);
            if (!entry->policy.queue)
                continue; /* another thread is at it */
            pc__policy_take(&cache->policy, &entry->policy);
            return entry;
        }
    }
    return NULL;
}

/* One of the policy's that is not awaited as a whole; locked. There are at most n_awaited of those. */
static struct entry *policy_entry(struct pc__cache *cache)
{
    struct entry *entry, *aside = NULL, **end = &aside;
    while ((entry = of_policy(pc__policy_victim(&cache->policy))) &&
           !(entry->present & ~(uint32_t)entry->awaited)) {
        entry->aside = NULL;
        *end = entry;
        end = &entry->aside;
    }
    for (; aside; aside = aside->aside) /* no memory: it goes with its generation */
        (void)pc__policy_restore(&cache->policy, &aside->policy);
    return entry;
}

/* Takes a victim out of the policy, with references. False: there is none. */
static bool choose(struct pc__cache *cache, struct victim *victim)
{
    struct entry *entry;
    pthread_mutex_lock(&cache->lock);
    for (;;) {
        entry = idle_entry(cache);
        if (!entry)
            entry = policy_entry(cache);
        if (!entry)
            break;
        victim->generation = entry->generation;
        victim->region = entry->generation->cached_for;
        victim->chunk = entry->chunk;
        if (!take_if_alive(&victim->region->refs))
            continue; /* it is going, and its entries with it */
        if (take_if_alive(&victim->generation->refs))
            break;
        /* Not the last reference: the thread that frees the generation still has one. */
        (void)atomic_fetch_sub(&victim->region->refs, 1u);
    }
    pthread_mutex_unlock(&cache->lock);
    return entry != NULL;
}

/* Under region.lock: which blocks of the chunk may go, also those that the file may have and no
 * record shows. */
static uint32_t evictable(struct pc__cache *cache, const struct victim *victim)
{
    const struct pc__generation *g = victim->generation;
    uint64_t first = victim->chunk * PC__CHUNK_BLOCKS;
    if (settles(cache->engine, g))
        return 0;
    pthread_mutex_lock(&cache->lock);
    struct entry *entry = find(cache, g, victim->chunk);
    uint32_t present = entry ? entry->present : 0;
    uint32_t awaited = entry && g->mappings ? entry->awaited : 0;
    pthread_mutex_unlock(&cache->lock);
    uint32_t strays = 0;
    for (uint64_t i = 0; g->has_strays && i < PC__CHUNK_BLOCKS && first + i < g->present.n_blocks;
         i++)
        if (!pc__blockset_has(&g->present, first + i) && !pc__blockset_has(&g->in_flight, first + i))
            strays |= 1u << i;
    return (present | strays) & ~awaited;
}

static void punch(struct pc__generation *generation, uint64_t chunk, uint32_t mask)
{
    for (uint32_t left = mask; left;) {
        unsigned at = (unsigned)__builtin_ctz(left);
        unsigned n = (unsigned)__builtin_ctz(~(left >> at));
        uint64_t first = chunk * PC__CHUNK_BLOCKS + at;
        if (pc__memfd_punch(generation->memfd, first, n))
            generation->has_strays = true; /* and it is fetched again */
        pc__blockset_remove(&generation->present, first, n);
        left &= ~(((1u << n) - 1) << at);
    }
}

/* Of those, the blocks that are there: what the file may have besides (strays) is not known to be right. Where
 * the home is here, its memory is nearer than the disk. */
static void keep_on_disk(struct pc__cache *cache, const struct victim *victim, uint32_t mask)
{
    if (!cache->engine->disk_cache || (victim->region->home && !victim->region->in_file))
        return;
    for (uint32_t left = mask; left; left &= left - 1) {
        const unsigned at = (unsigned)__builtin_ctz(left);
        if (!pc__blockset_has(&victim->generation->present, victim->chunk * PC__CHUNK_BLOCKS + at))
            mask &= ~(1u << at);
    }
    pc__disk_cache_put(cache->engine->disk_cache, victim->generation, victim->chunk, mask);
}

/* Under region.lock. Returns how many blocks went. */
static unsigned evict(struct pc__cache *cache, const struct victim *victim)
{
    struct pc__generation *generation = victim->generation;
    uint32_t mask = evictable(cache, victim);
    if (mask && !pc__link_empty(&generation->windows)) {
        pthread_mutex_lock(&cache->window_lock);
        mask &= ~pc__windows_hold(generation, victim->chunk);
        keep_on_disk(cache, victim, mask);
        punch(generation, victim->chunk, mask);
        pc__windows_release(generation);
        pthread_mutex_unlock(&cache->window_lock);
    } else {
        keep_on_disk(cache, victim, mask);
        punch(generation, victim->chunk, mask);
    }
    pc__recorders_note(generation, victim->chunk, mask);
    pthread_mutex_lock(&cache->lock);
    struct entry *entry = find(cache, generation, victim->chunk);
    unsigned n = 0;
    if (entry) {
        uint32_t gone = entry->present & mask;
        if (entry->policy.queue) /* it went, and came again, before we had the region's lock */
            pc__policy_take(&cache->policy, &entry->policy);
        n = (unsigned)__builtin_popcount(gone);
        if (n)
            pc__ghost_put(&cache->evicted, entry->policy.key, gone, n);
        if (entry->present != gone && !pc__policy_back(&cache->policy, &entry->policy))
            gone = entry->present; /* no memory to choose it again: it stays, and is not counted */
        take_blocks(cache, entry, gone);
    }
    if (!n && !pc__link_empty(&generation->idle)) { /* others first, or nothing would ever go */
        generation->idle_since_ns = pc__now_ns();
        pc__link_remove(&generation->idle);
        pc__link_push(&cache->idle, &generation->idle);
    }
    pthread_mutex_unlock(&cache->lock);
    pc__count_add(&cache->engine->count.evicted_blocks, n);
    return n;
}

/* A victim that is left where it was. */
static void leave(struct pc__cache *cache, const struct victim *victim)
{
    pthread_mutex_lock(&cache->lock);
    struct entry *entry = find(cache, victim->generation, victim->chunk);
    if (entry && !entry->policy.queue && !pc__policy_back(&cache->policy, &entry->policy))
        take_blocks(cache, entry, entry->present); /* as in evict() */
    pthread_mutex_unlock(&cache->lock);
}

enum outcome { NO_VICTIM, PASSED_OVER, EVICTED };

/* Without locks. Waits for the lock of this region alone, or of any (NULL): an insert into one region does
 * not wait for what is done with another, which takes long at times. */
static enum outcome evict_one(struct pc__cache *cache, const struct pc__region *region)
{
    struct victim victim;
    unsigned n = 0;
    if (!choose(cache, &victim))
        return NO_VICTIM;
    bool waits = !region || region == victim.region;
    if (waits)
        pthread_mutex_lock(&victim.region->lock);
    if (waits || !pthread_mutex_trylock(&victim.region->lock)) {
        n = evict(cache, &victim);
        PC__AUDIT_SOMETIMES(pc__cache_audit_generation(cache->engine, victim.generation));
        pthread_mutex_unlock(&victim.region->lock);
        PC__AUDIT_SOMETIMES(pc__cache_audit(cache->engine));
        PC__AUDIT_SOMETIMES(pc__disk_cache_audit(cache->engine->disk_cache));
    } else {
        leave(cache, &victim);
    }
    pc__generation_put(cache->engine, victim.generation);
    pc__region_put(cache->engine, victim.region);
    return n ? EVICTED : PASSED_OVER;
}

static uint64_t taken(const struct pc__cache *cache)
{
    return pc__count_get(&cache->used) + pc__count_get(&cache->reserved);
}

static void nap(struct pc__cache *cache) /* locked */
{
    uint64_t until = pc__now_ns() + NAP_NS;
    const struct timespec at = {.tv_sec = (time_t)(until / 1000000000u),
                                .tv_nsec = (long)(until % 1000000000u)};
    while (!cache->stopping && !pthread_cond_timedwait(&cache->wake, &cache->lock, &at))
        ;
}

static void *run_evictor(void *arg)
{
    struct pc__cache *cache = arg;
    pthread_mutex_lock(&cache->lock);
    while (!cache->stopping) {
        if (pc__count_get(&cache->used) <= cache->high) {
            cache->asleep = true;
            pthread_cond_wait(&cache->wake, &cache->lock);
            continue;
        }
        uint64_t passed_over = 0, most = cache->n_entries;
        enum outcome outcome = EVICTED;
        pthread_mutex_unlock(&cache->lock);
        while (!cache->stopping && pc__count_get(&cache->used) > cache->low &&
               outcome != NO_VICTIM && passed_over <= most) {
            outcome = evict_one(cache, NULL);
            passed_over += outcome == PASSED_OVER;
        }
        pthread_mutex_lock(&cache->lock);
        if (pc__count_get(&cache->used) > cache->low)
            nap(cache); /* windows hold the rest */
    }
    pthread_mutex_unlock(&cache->lock);
    return NULL;
}

uint64_t pc__cache_most_holes(const struct pc_engine *engine)
{
    return engine->cache ? engine->cache->budget / 2 : UINT64_MAX;
}

uint64_t pc__cache_most_blocks(const struct pc_engine *engine)
{
    return engine->cache ? engine->cache->budget / 8 : UINT64_MAX;
}

void pc__cache_room(struct pc_engine *engine, const struct pc__region *region, uint64_t n)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    pc__count_add(&cache->reserved, n);
    unsigned passed_over = 0;
    while (taken(cache) > cache->budget && passed_over < PASSED_OVER_MOST) {
        enum outcome outcome = evict_one(cache, region);
        if (outcome == NO_VICTIM)
            return;
        passed_over += outcome == PASSED_OVER;
    }
}

/* ---------------------------------------------------------------- thrashing */

static void judge(struct pc__cache *cache, uint64_t now)
{
    pthread_mutex_lock(&cache->lock);
    uint64_t came = cache->came, back = cache->came_back;
    bool over = now >= cache->period_ends_ns;
    bool tell = over && came >= PERIOD_BLOCKS && back * 2 > came &&
                (!cache->told_ns || now - cache->told_ns >= TELL_NS);
    if (over) {
        cache->came = cache->came_back = 0;
        cache->period_ends_ns = now + PERIOD_NS;
    }
    if (tell)
        cache->told_ns = now;
    pthread_mutex_unlock(&cache->lock);
    if (tell)
        pc__engine_event(cache->engine, PC_EVENT_THRASHING, 0, 0, cache->engine->server_id,
                         "of %llu MiB that came in %llu s, %llu were evicted just before: cache_bytes "
                         "is %llu MiB, %llu are in use",
                         (unsigned long long)came >> 8, PERIOD_NS / 1000000000u,
                         (unsigned long long)back >> 8, (unsigned long long)cache->budget >> 8,
                         (unsigned long long)pc__count_get(&cache->used) >> 8);
}

void pc__cache_balance(struct pc_engine *engine, uint64_t n)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    pc__count_sub(&cache->reserved, n);
    uint64_t now = pc__now_ns();
    if (now >= cache->period_ends_ns)
        judge(cache, now);
}

/* ------------------------------------------------------------------- audits */

/* Locked. Adds up what is in one bucket. */
static const char *audit_bucket(const struct pc__cache *cache, uint64_t b, uint64_t *n_entries,
                                uint64_t *n_blocks)
{
    for (const struct entry *entry = cache->buckets[b]; entry; entry = entry->hash_next) {
        ++*n_entries;
        *n_blocks += (uint64_t)__builtin_popcount(entry->present);
        if (!entry->present)
            return "a cached chunk has blocks";
        if (entry->awaited & ~(uint32_t)entry->present)
            return "a cached block that is awaited is there";
        if (find(cache, entry->generation, entry->chunk) != entry)
            return "a cached chunk is found, and is there once";
        if (entry->siblings.next == &entry->siblings)
            return "a cached chunk is in its generation's list";
    }
    return NULL;
}

static const char *audit_locked(const struct pc__cache *cache)
{
    uint64_t n_entries = 0, n_blocks = 0, since_ns = 0;
    for (uint64_t b = 0; b < cache->n_buckets; b++) {
        const char *broken = audit_bucket(cache, b, &n_entries, &n_blocks);
        if (broken)
            return broken;
    }
    pc__each(link, (struct pc__link *)(uintptr_t)&cache->idle)
    {
        const struct pc__generation *generation = pc__of(link, struct pc__generation, idle);
        if (generation->idle_since_ns < since_ns)
            return "generations without a lease are in the order in which they lost the last one";
        since_ns = generation->idle_since_ns;
    }
    if (n_entries != cache->n_entries)
        return "each cached chunk is counted";
    return n_blocks == pc__count_get(&cache->used) ? NULL : "each cached block is counted";
}

const char *pc__cache_audit(const struct pc_engine *engine)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return NULL;
    pthread_mutex_lock(&cache->lock);
    const char *broken = audit_locked(cache);
    pthread_mutex_unlock(&cache->lock);
    return broken;
}

const char *pc__cache_audit_generation(const struct pc_engine *engine,
                                       struct pc__generation *generation)
{
    struct pc__cache *cache = engine->cache;
    const char *broken = NULL;
    if (!cache || generation->complete)
        return NULL;
    pthread_mutex_lock(&cache->lock);
    pc__each(link, &generation->cached)
    {
        const struct entry *entry = of_sibling(link);
        if (entry->generation != generation)
            broken = "a cached chunk is in the list of its own generation";
        for (uint32_t left = entry->present; left; left &= left - 1)
            if (!pc__blockset_has(&generation->present, entry->chunk * PC__CHUNK_BLOCKS +
                                                            (unsigned)__builtin_ctz(left)))
                broken = "a block that is counted as cached is present";
    }
    pthread_mutex_unlock(&cache->lock);
    return broken;
}

/* ------------------------------------------------------------- start, stop */

uint64_t pc__cache_bytes(const struct pc_engine *engine)
{
    return engine->cache ? pc__count_get(&engine->cache->used) << PC_BLOCK_SHIFT : 0;
}

static uint64_t power_of_two(uint64_t least)
{
    uint64_t n = 1024;
    while (n < least)
        n *= 2;
    return n;
}

static int check_budget(uint64_t cache_bytes)
{
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (cache_bytes < LEAST_BYTES)
        return pc__fail(PC_ERR_RANGE, "cache_bytes of %llu; at least %llu",
                        (unsigned long long)cache_bytes, LEAST_BYTES);
    if (cache_bytes > memory)
        return pc__fail(PC_ERR_RANGE, "cache_bytes of %llu; this machine has %llu bytes of memory",
                        (unsigned long long)cache_bytes, (unsigned long long)memory);
    return PC_OK;
}

int pc__cache_open(struct pc_engine *engine, uint64_t cache_bytes, int policy)
{
    if (!cache_bytes)
        return PC_OK;
    int rc = check_budget(cache_bytes);
    if (rc)
        return rc;
    struct pc__cache *cache = calloc(1, sizeof *cache);
    if (!cache)
        return pc__fail(PC_ERR_NO_MEMORY, "a cache");
    uint64_t budget = cache_bytes >> PC_BLOCK_SHIFT, most_awaited = 1024;
    cache->engine = engine;
    cache->budget = budget;
    /* Close to the budget: what is read again and again, and fits, is to stay. What is kept free
     * only spares inserts an eviction of their own. */
    cache->high = budget - budget / 128;
    cache->low = budget - budget / 64;
    cache->n_awaited = budget / 8 < most_awaited ? budget / 8 : most_awaited;
    cache->n_buckets = power_of_two(budget / 4);
    pthread_mutex_init(&cache->lock, NULL);
    pthread_mutex_init(&cache->window_lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&cache->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pc__link_init(&cache->idle);
    cache->buckets = calloc(cache->n_buckets, sizeof *cache->buckets);
    cache->awaited = calloc(cache->n_awaited, sizeof *cache->awaited);
    engine->cache = cache;
    engine->window_limit = pc__windows_limit(cache_bytes);
    if (!cache->buckets || !cache->awaited)
        return pc__fail(PC_ERR_NO_MEMORY, "a cache");
    cache->period_ends_ns = pc__now_ns() + PERIOD_NS;
    rc = pc__policy_open(&cache->policy, policy);
    return rc ? rc : pc__ghost_open(&cache->evicted, budget / 2);
}

int pc__cache_start(struct pc_engine *engine)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return PC_OK;
    sigset_t all, before; /* signals belong to Python's main thread */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int rc = pthread_create(&cache->thread, NULL, run_evictor, cache);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        errno = rc;
        return pc__fail_errno("pthread_create");
    }
    (void)pthread_setname_np(cache->thread, "clamor-evictor");
    cache->started = true;
    return PC_OK;
}

void pc__cache_stop(struct pc_engine *engine)
{
    struct pc__cache *cache = engine->cache;
    if (!cache || !cache->started)
        return;
    pthread_mutex_lock(&cache->lock);
    cache->stopping = true;
    pthread_cond_signal(&cache->wake);
    pthread_mutex_unlock(&cache->lock);
    pthread_join(cache->thread, NULL);
    cache->started = false;
}

void pc__cache_close(struct pc_engine *engine)
{
    struct pc__cache *cache = engine->cache;
    if (!cache)
        return;
    pc__policy_close(&cache->policy);
    pc__ghost_close(&cache->evicted);
    free(cache->buckets);
    free(cache->awaited);
    pthread_cond_destroy(&cache->wake);
    pthread_mutex_destroy(&cache->window_lock);
    pthread_mutex_destroy(&cache->lock);
    free(cache);
    engine->cache = NULL;
}
