/* directory.c - at a home: which other servers have which blocks, and how much each has to send.
 *
 * A server is remembered as a holder of a block from when the home queues the block for it, or sends it
 * to another for it, until a commit changes the block, somebody finds that it has it no longer (HOME),
 * or another takes its place: up to PC__HOLDERS a block, and then a random one of them goes, so that
 * what is left is a sample of all. So a page that everybody asks for at once leaves the home once: who
 * asks while it is on its way to another is sent there, and waits for it there. While it comes from
 * another (COMING, until it says HELD) it is chosen only where those that are first have much to send:
 * who waits for somebody who waits gets it late, but a few blocks that only one server has would keep
 * its link busy long after the others are done (bench/hot_pages: of 86 MB in all, one of 7 hosts sent
 * up to 20). Nobody waits in a circle: whom one is sent to was sent for the block before, and who asks a
 * second time is answered by the home. What is remembered is a hint: who is sent there checks
 * the version of what it gets, and comes back where there is nothing.
 *
 * A block is the same in every version from `since` on, up to the home's newest: a holder's memory at
 * any of these will do. Extents of which nobody is a holder have no record: when one is made its
 * blocks count as changed at the newest version.
 *
 * The records of a home are under its region.lock. The servers' loads are under holders_lock, a leaf.
 * 16 bytes for each block of an extent (of 64 MiB, or what there is of it) that others have blocks of.
 */
#include "engine/core/core.h"
#include "engine/serve/serve.h"

#include <stdlib.h>
#include <string.h>

#define COMING 0x8000u           /* of a holder: what it was sent to another for is on its way to it */
#define COMING_BYTES (1u << 20)  /* as so much more to send it counts beside those that have the block */

struct block {
    uint16_t holders[PC__HOLDERS]; /* numbers of servers; 0: none */
    uint32_t since;                /* low half of the version that changed it last */
};

struct pc__directory {
    size_t n_extents;
    struct block *extents[];
};

/* ----------------------------------------------------------------- servers */

uint16_t pc__holder_number(struct pc_engine *engine, uint64_t server_id)
{
    struct pc__holders *all = &engine->holders;
    size_t i = 0;
    pthread_mutex_lock(&all->lock);
    while (i < all->n && all->servers[i].id != server_id)
        i++;
    if (i == all->n && all->n == all->capacity && all->n < COMING - 1) {
        size_t capacity = all->capacity ? all->capacity * 2 : 16;
        struct pc__holder *grown = realloc(all->servers, capacity * sizeof *grown);
        if (grown) {
            all->servers = grown;
            all->capacity = capacity;
        }
    }
    if (i == all->n && i < all->capacity && i < COMING - 1)
        all->servers[all->n++] = (struct pc__holder){.id = server_id};
    bool found = i < all->n;
    pthread_mutex_unlock(&all->lock);
    return found ? (uint16_t)(i + 1) : 0;
}

void pc__holder_reports(struct pc_engine *engine, uint16_t number, uint64_t load_bytes)
{
    if (!number)
        return;
    pthread_mutex_lock(&engine->holders.lock);
    engine->holders.servers[number - 1].reported_bytes = load_bytes;
    engine->holders.servers[number - 1].reported_ns = pc__now_ns();
    pthread_mutex_unlock(&engine->holders.lock);
}

void pc__holder_relieved(struct pc_engine *engine, uint64_t server_id, uint64_t n_bytes)
{
    uint16_t number = pc__holder_number(engine, server_id);
    if (!number)
        return;
    pthread_mutex_lock(&engine->holders.lock);
    struct pc__holder *holder = &engine->holders.servers[number - 1];
    holder->sent_to_bytes -= n_bytes < holder->sent_to_bytes ? n_bytes : holder->sent_to_bytes;
    pthread_mutex_unlock(&engine->holders.lock);
}

/* What it has to send, as far as is known here. Under holders_lock. An asker that dies never says
 * that it got what it was sent there for: after a while what is not heard of counts no more. */
static uint64_t load_of(struct pc__holder *holder, uint64_t now_ns)
{
    if (holder->sent_to_bytes && now_ns - holder->sent_to_ns > PC__HOLDER_MEMORY_NS)
        holder->sent_to_bytes = 0;
    if (holder->reported_bytes && now_ns - holder->reported_ns > PC__HOLDER_MEMORY_NS)
        holder->reported_bytes = 0; /* it has asked for nothing since: it has sent it by now */
    return holder->sent_to_bytes > holder->reported_bytes ? holder->sent_to_bytes
                                                          : holder->reported_bytes;
}

/* SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t random_bits(struct pc_engine *engine)
{
    uint64_t z = atomic_fetch_add(&engine->holders.random, 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* ------------------------------------------------------------------ blocks */

static struct block *block_of(const struct pc__region *region, uint64_t block)
{
    const struct pc__directory *directory = region->home->directory;
    struct block *extent = directory ? directory->extents[block / PC_EXTENT_BLOCKS] : NULL;
    return extent ? &extent[block % PC_EXTENT_BLOCKS] : NULL;
}

static struct block *block_made(struct pc__region *region, uint64_t block)
{
    struct pc__home *home = region->home;
    size_t extent = (size_t)(block / PC_EXTENT_BLOCKS);
    if (!home->directory) {
        size_t n = (size_t)((region->n_blocks + PC_EXTENT_BLOCKS - 1) / PC_EXTENT_BLOCKS);
        home->directory = calloc(1, sizeof *home->directory + n * sizeof home->directory->extents[0]);
        if (!home->directory)
            return NULL;
        home->directory->n_extents = n;
    }
    if (!home->directory->extents[extent]) {
        uint64_t n = pc__extent_blocks(region->n_blocks, extent);
        struct block *blocks = calloc(n, sizeof *blocks);
        for (size_t i = 0; blocks && i < n; i++)
            blocks[i].since = (uint32_t)home->latest;
        home->directory->extents[extent] = blocks;
    }
    return block_of(region, block);
}

void pc__directory_free(struct pc__directory *directory)
{
    for (size_t i = 0; directory && i < directory->n_extents; i++)
        free(directory->extents[i]);
    free(directory);
}

static uint16_t number_of(uint16_t holder)
{
    return holder & (uint16_t)~COMING;
}

static int index_of(const struct block *entry, uint16_t number)
{
    for (int i = 0; i < PC__HOLDERS; i++)
        if (number_of(entry->holders[i]) == number)
            return i;
    return -1;
}

/* Versions are compared by their low halves, in which no two that are in use are 2^31 apart. */
static bool is_before(uint32_t version, uint32_t other)
{
    return (int32_t)(version - other) < 0;
}

static void remember(struct pc_engine *engine, struct block *entry, uint16_t number, bool coming)
{
    int at = index_of(entry, number);
    if (at >= 0 && coming)
        return;
    if (at < 0)
        at = index_of(entry, 0);
    if (at < 0)
        at = (int)(random_bits(engine) % PC__HOLDERS);
    entry->holders[at] = number | (coming ? (uint16_t)COMING : 0);
}

void pc__directory_add(struct pc_engine *engine, struct pc__region *region, uint16_t number,
                       uint32_t version, uint64_t first, uint64_t n, bool coming)
{
    if (!number || engine->replication == PC_REPLICATION_OFF)
        return;
    if (coming && engine->replication != PC_REPLICATION_P2C)
        return; /* at random all are alike: chains of who waits for whom would be long */
    for (uint64_t block = first; block < first + n; block++) {
        struct block *entry = block_made(region, block);
        if (!entry)
            return; /* no memory: nobody is sent elsewhere for it */
        if (!is_before(version, entry->since))
            remember(engine, entry, number, coming);
    }
}

void pc__directory_remove(struct pc__region *region, uint16_t number, uint64_t first, uint64_t n)
{
    for (uint64_t block = first; number && block < first + n; block++) {
        struct block *entry = block_of(region, block);
        int at = entry ? index_of(entry, number) : -1;
        if (at >= 0)
            entry->holders[at] = 0;
    }
}

void pc__directory_changed(struct pc__region *region, uint32_t version, uint64_t first, uint64_t n)
{
    for (uint64_t block = first; block < first + n; block++) {
        struct block *entry = block_of(region, block);
        if (entry)
            *entry = (struct block){.since = version};
    }
}

/* ------------------------------------------------------------------ choice */

/* Blocks after the first that the same holder has, and that the asker may have from it. */
static uint64_t extend(const struct pc__region *region, uint16_t holder, uint16_t asker,
                       uint32_t version, uint32_t *since, uint64_t block, uint64_t n)
{
    uint64_t k = 1;
    for (; k < n; k++) {
        const struct block *entry = block_of(region, block + k);
        if (!entry || is_before(version, entry->since) || index_of(entry, holder) < 0 ||
            index_of(entry, asker) >= 0)
            break;
        if (is_before(*since, entry->since))
            *since = entry->since;
    }
    return k;
}

struct pc__elsewhere pc__directory_choose(struct pc_engine *engine, struct pc__region *region,
                                          uint16_t asker, uint32_t version, uint64_t block,
                                          uint64_t n, uint64_t home_bytes)
{
    struct pc__elsewhere out = {.n_blocks = n < PC__CHOICE_BLOCKS ? n : PC__CHOICE_BLOCKS};
    const struct block *entry = block_of(region, block);
    /* Who was sent it already has lost it since: a detour could lead in a circle. */
    if (!entry || !asker || is_before(version, entry->since) || index_of(entry, asker) >= 0)
        return out;
    uint16_t numbers[PC__HOLDERS];
    uint64_t loads[PC__HOLDERS], now_ns = pc__now_ns();
    size_t n_holders = 0;
    struct pc__holders *all = &engine->holders;
    pthread_mutex_lock(&all->lock);
    for (int i = 0; i < PC__HOLDERS; i++)
        if (entry->holders[i]) {
            numbers[n_holders] = number_of(entry->holders[i]);
            loads[n_holders] = load_of(&all->servers[numbers[n_holders] - 1], now_ns);
            loads[n_holders++] += entry->holders[i] & COMING ? COMING_BYTES : 0;
        }
    int chosen = pc_select_peer(engine->replication, home_bytes, loads, n_holders,
                                  random_bits(engine));
    if (chosen >= 0) {
        uint32_t since = entry->since;
        struct pc__holder *holder = &all->servers[numbers[chosen] - 1];
        out.n_blocks = extend(region, numbers[chosen], asker, version, &since, block, out.n_blocks);
        out.server_id = holder->id;
        out.from_version = since;
        out.to_version = (uint32_t)region->home->latest;
        holder->sent_to_bytes += out.n_blocks << PC_BLOCK_SHIFT;
        holder->sent_to_ns = now_ns;
    }
    pthread_mutex_unlock(&all->lock);
    return out;
}
