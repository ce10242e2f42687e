/* region.c - a region's way through this server: sealed, taken back after a restart, freed, ended.
 *
 * Any thread may enter; contents of a region: region.lock. The table: core/regions.c.
 */
#include "engine/cache/cache.h"
#include "engine/checks/checks.h"
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FEW_HOLES 16u /* one to so many blocks of data */

bool pc__region_info_valid(const struct pc_region_info *info)
{
    return info->region != 0 && info->length_bytes != 0 &&
           info->length_bytes % PC_BLOCK_BYTES == 0 && info->base_address % PC_BLOCK_BYTES == 0 &&
           info->base_address >= PC_WINDOW_BEGIN && info->base_address < PC_WINDOW_END &&
           info->length_bytes <= PC_WINDOW_END - info->base_address;
}

/* ---------------------------------------------------------------- the base */

/* Under region.lock: whether all may map the base with its holes. They are bounded for all bases
 * together; but a few of them cost no more than its data does, and do not count. Nor do those of a file on
 * disk: the kernel takes back what reading them allocates. */
static bool take_holes(struct pc_engine *engine, struct pc__region *region)
{
    const struct pc__store *base = &region->home->base;
    const uint64_t holes = region->n_blocks - base->data.n_set, most = pc__cache_most_holes(engine);
    if (base->on_disk || most == UINT64_MAX || holes <= base->data.n_set / FEW_HOLES)
        return true;
    const uint64_t before = atomic_fetch_add(&engine->open_holes, holes);
    if (holes > most || before > most - holes) {
        pc__count_sub(&engine->open_holes, holes);
        return false;
    }
    region->open_holes = holes;
    return true;
}

/* Under region.lock. False: nobody maps the base. */
static bool base_opens(struct pc_engine *engine, struct pc__region *region)
{
    if (region->home->n_segments || region->home->lost || region->home->is_unchecked)
        return false;
    if (region->is_mapped) /* since a server before this one. What was read of holes is data now */
        pc__count_add(&engine->open_holes, region->open_holes);
    else if (!take_holes(engine, region))
        region->base_is_builders = region->built_in_place;
    else
        return true;
    return region->is_mapped || region->base_is_builders;
}

/* The base of the home is a generation too, unless its bytes lie in somebody else's memory, blocks of
 * it are lost or in a file (a hole of those is not a block of zeros), or were not looked at yet, or the homes here have so many holes that
 * reading them would fill this node: then processes of this node fill an ordinary generation from
 * there, within the budget. Who built in it maps it already, with all its holes, and alone then; who
 * had it from a server before this one may have it. Under region.lock. */
int pc__region_home_generation(struct pc_engine *engine, struct pc__region *region)
{
    const struct pc__store *base = &region->home->base;
    if (!base_opens(engine, region))
        return PC_OK;
    struct pc__generation *generation = pc__generation_new(region->n_blocks, true);
    if (!generation)
        return pc__fail(PC_ERR_NO_MEMORY, "a generation of variable %llu",
                        (unsigned long long)region->id);
    generation->memfd = base->memfd;
    generation->inode = base->inode;
    generation->on_disk = base->on_disk;
    generation->version = base->version;
    pc__link_push(&region->generations, &generation->link);
    region->is_mapped = true;
    return PC_OK;
}

/* Under region.lock: the base of a region that cannot be sealed is no generation after all. */
static void unmake_home_generation(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__generation *generation = pc__home_base_generation(region);
    if (generation)
        pc__generation_drop(engine, region, generation);
    pc__count_sub(&engine->open_holes, region->open_holes);
    region->open_holes = 0;
    region->is_mapped = region->built_in_place = region->base_is_builders = false;
}

int pc__region_seal(struct pc_engine *engine, struct pc__region *region, bool built_in_place)
{
    size_t n_homes = (region->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
    uint64_t *homes = calloc(n_homes, sizeof *homes);
    if (!homes)
        return pc__fail(PC_ERR_NO_MEMORY, "homes of variable %llu", (unsigned long long)region->id);
    for (size_t i = 0; i < n_homes; i++)
        homes[i] = engine->server_id;
    (void)pc__engine_makes_huge_pages(engine); /* its writer may have met them */
    pthread_mutex_lock(&region->lock);
    int rc = PC_ERR_NO_REGION;
    if (region->state == PC__REGION_CREATING && region->home) {
        struct pc__store *base = &region->home->base;
        rc = pc__memfd_blocks(&base->data, base->memfd, region->length_bytes);
        region->built_in_place = built_in_place;
        if (!rc)
            rc = pc__region_home_generation(engine, region);
        if (!rc && !region->home->n_segments) {
            const struct pc__kept kept = pc__kept_of_store(region, PC__KEPT_HOME, base, 0);
            rc = pc__keep(engine, &kept, base->memfd);
        }
        if (rc) {
            unmake_home_generation(engine, region);
        } else {
            region->homes = homes;
            homes = NULL;
            region->creator = 0;
            pc__region_goes(region, PC__REGION_SEAL);
            if (!pc__link_empty(&region->home->pending) || /* of a server before this one */
                region->n_blocks >= PC__WARM_LEAST_BLOCKS)
                pc__worker_queue(engine, region);
        }
    }
    pthread_mutex_unlock(&region->lock);
    free(homes);
    return rc;
}

/* -------------------------------------------------------------- a restart */

/* The disk cannot say what of the store is there: nobody reads any of the region. This server's other
 * variables are not to end for that. */
static int give_up(struct pc_engine *engine, struct pc__region *region, struct pc__store *store)
{
    pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_SYSTEM, region->id, 0,
                     "version %llu of variable %llu cannot be read from disk: %s",
                     (unsigned long long)store->version, (unsigned long long)region->id, pc_last_message());
    region->lost = PC_ERR_HOME_LOST;
    store->is_broken = true;
    if (!pc__disk_file_has_name(store->memfd) && ftruncate(store->memfd, 0))
        return pc__fail_errno("cutting a file that cannot be read");
    return pc__blockset_add(&store->data, 0, store->data.n_blocks) < 0
               ? pc__fail(PC_ERR_NO_MEMORY, "a block set")
               : PC_OK;
}

static int read_store(struct pc__store *store, const struct pc__kept *kept)
{
    struct stat st;
    if (fstat(store->memfd, &st))
        return pc__fail_errno("fstat of a home");
    if (kept->on_disk && !st.st_size)
        return pc__fail(PC_ERR_SYSTEM, "the disk has refused some of what was written to it");
    return kept->kind == PC__KEPT_OVERLAY && kept->on_disk
               ? pc__overlay_read_notes(store)
               : pc__memfd_blocks(&store->data, store->memfd, kept->length_bytes);
}

static int adopt_store(struct pc_engine *engine, struct pc__store *store, struct pc__region *region,
                       const struct pc__kept *kept, int fd)
{
    if (store->memfd >= 0) {
        close(fd);
        return pc__fail(PC_ERR_PROTOCOL, "the keeper holds two stores of variable %llu",
                        (unsigned long long)region->id);
    }
    int rc = pc__store_open(store, fd, kept->inode, region->length_bytes, kept->version, kept->on_disk);
    if (rc)
        return rc;
    rc = read_store(store, kept);
    return rc && kept->on_disk ? give_up(engine, region, store) : rc;
}

static int adopt_generation(struct pc_engine *engine, struct pc__region *region,
                            const struct pc__kept *kept, int fd)
{
    struct pc__generation *generation = pc__generation_new(region->n_blocks, false);
    if (!generation) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a generation");
    }
    generation->memfd = fd;
    generation->inode = kept->inode;
    generation->version = kept->version;
    generation->adopted = true;
    pc__link_push(&region->generations, &generation->link);
    int rc = pc__generation_map(engine, generation);
    if (!rc)
        rc = pc__memfd_blocks(&generation->present, fd, region->length_bytes);
    uint64_t at = 0, end;
    for (; !rc && (at = pc__blockset_next(&generation->present, at, region->n_blocks)) <
                      region->n_blocks; at = end) {
        end = pc__blockset_next_absent(&generation->present, at, region->n_blocks);
        pc__cache_added(engine, region, generation, at, end - at);
    }
    pc__cache_leased(engine, generation);
    return rc;
}

/* A home's memfd that says which of its blocks are lost. */
static bool has_notes(const struct pc__kept *kept, const struct stat *st)
{
    return kept->kind == PC__KEPT_HOME &&
           (uint64_t)st->st_size == kept->length_bytes + pc__lost_notes_bytes(kept->length_bytes);
}

static bool is_as_long_as_it_says(const struct pc__kept *kept, const struct stat *st)
{
    const bool is_noted = kept->kind == PC__KEPT_OVERLAY && kept->on_disk;
    const uint64_t notes_bytes = is_noted ? pc__overlay_notes_bytes(kept->length_bytes) : 0;
    const bool is_given_up = kept->on_disk && !st->st_size;
    return (uint64_t)st->st_size == kept->length_bytes + notes_bytes || has_notes(kept, st) || is_given_up;
}

int pc__region_adopt_notes(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                           const struct pc__kept *kept)
{
    struct stat st;
    if (fstat(home->base.memfd, &st))
        return pc__fail_errno("fstat of a home memfd");
    if (!has_notes(kept, &st))
        return PC_OK;
    const int rc = pc__lost_open(&home->base, kept->length_bytes, kept->reserved[7] != 0, NULL, 0, &home->lost);
    return rc && home->base.on_disk ? give_up(engine, region, &home->base) : rc;
}

/* Of a base that comes from an earlier session, where it was not looked at in full. */
int pc__region_adopt_unchecked(struct pc_engine *engine, struct pc__home *home, const struct pc__kept *kept)
{
    if (!kept->reserved[PC__KEPT_UNCHECKED_AT] || !engine->sums_directory)
        return PC_OK;
    const int rc = pc__unchecked_open(engine, kept, &home->base.data, &home->unchecked);
    home->is_unchecked = !rc;
    return rc;
}

#define LOOKS_A_TURN 8u /* 2 MiB */

/* Under region.lock: it is as any other from now on. */
static int become_checked(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__home *home = region->home;
    home->is_unchecked = false;
    const int rc = pc__region_home_generation(engine, region);
    struct pc__generation *generation = pc__home_base_generation(region);
    if (rc) {
        home->is_unchecked = true; /* the worker tries again */
        return rc;
    }
    if (generation) { /* before what processes have mapped meanwhile: the next ones get this */
        pc__link_remove(&generation->link);
        pc__link_push(region->generations.next, &generation->link);
    }
    const struct pc__kept kept = pc__kept_of_store(region, PC__KEPT_HOME, &home->base, home->base.version);
    return pc__keep(engine, &kept, home->base.memfd);
}

int pc__region_look(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    if (!home->is_unchecked || (!home->unchecked->sums && home->unchecked->damaged.n_set))
        return 0;
    uint8_t *some = malloc(PC__CHECK_BLOCKS << PC_BLOCK_SHIFT);
    if (!some)
        return pc__fail(PC_ERR_NO_MEMORY, "a copy of blocks");
    bool more = true;
    for (unsigned n = 0; more && n < LOOKS_A_TURN; n++)
        more = pc__unchecked_look(engine, region, home, some);
    free(some);
    int rc = PC_OK;
    pthread_mutex_lock(&region->lock);
    const bool stays = region->home == home;
    if (stays && !more) {
        pc__unchecked_over(home->unchecked);
        rc = home->unchecked->damaged.n_set ? PC_OK : become_checked(engine, region);
    }
    pthread_mutex_unlock(&region->lock);
    return rc ? rc : stays; /* once more where all is looked at: now the base may change */
}

/* Takes back one memfd after a restart; owns fd. What was not sealed had no user yet. */
int pc__region_adopt(void *arg, const struct pc__kept *kept, int fd)
{
    struct pc_engine *engine = arg;
    int noted = engine->keeping ? pc__keeping_adopt(engine->keeping, kept, fd) : PC_OK;
    if (noted) {
        close(fd);
        return noted;
    }
    if (kept->kind == PC__KEPT_LAYER)
        return pc__layer_adopt(engine, kept, fd);
    if (kept->kind == PC__KEPT_HISTORY) {
        (void)pc__history_adopt(engine->history, fd); /* what is none of its own it drops */
        return PC_OK;
    }
    const struct pc_region_info info = {.region = kept->region,
                                        .version = kept->version,
                                        .base_address = kept->base_address,
                                        .length_bytes = kept->length_bytes};
    struct stat st;
    if (!pc__region_info_valid(&info) || fstat(fd, &st) || !is_as_long_as_it_says(kept, &st)) {
        close(fd);
        return pc__fail(PC_ERR_PROTOCOL,
                        "the keeper's record of variable %llu does not fit its memfd",
                        (unsigned long long)kept->region);
    }
    if (kept->kind == PC__KEPT_HOME && !kept->sealed) {
        pc__unkeep(engine, kept->inode);
        close(fd);
        return PC_OK;
    }
    struct pc__region *region = pc__region_get_or_add(engine, kept->region);
    if (!region) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    }
    region->version = kept->version > region->version ? kept->version : region->version;
    region->in_file |= kept->reserved[7] != 0;
    int rc;
    if (!pc__region_sized(region, kept->base_address, kept->length_bytes)) {
        close(fd);
        rc = pc__fail(PC_ERR_PROTOCOL, "the keeper holds variable %llu in two lengths",
                      (unsigned long long)kept->region);
    } else if (kept->kind == PC__KEPT_CACHE && kept->reserved[5]) {
        rc = pc__move_adopt_base(engine, region, kept, fd);
    } else if (kept->kind == PC__KEPT_CACHE) {
        rc = adopt_generation(engine, region, kept, fd);
    } else if (kept->kind == PC__KEPT_HOME && kept->reserved[1]) {
        rc = pc__rebuild_adopt(engine, region, kept, fd);
    } else if (!region->home && !(region->home = pc__home_new())) {
        close(fd);
        rc = pc__fail(PC_ERR_NO_MEMORY, "a home record");
    } else if (kept->kind == PC__KEPT_OVERLAY) {
        rc = adopt_store(engine, &region->home->overlay, region, kept, fd);
    } else {
        rc = adopt_store(engine, &region->home->base, region, kept, fd);
        if (!rc)
            rc = pc__region_adopt_notes(engine, region, region->home, kept);
        region->home->base_changes = kept->reserved[0] != 0;
        region->built_in_place = kept->reserved[2] != 0;
        region->is_mapped = kept->reserved[3] != 0;
        region->base_is_builders = kept->reserved[4] != 0;
        memcpy(&region->open_holes, kept->reserved + PC__KEPT_HOLES_AT, sizeof region->open_holes);
        memcpy(&region->term, kept->reserved + PC__KEPT_TERM_AT, sizeof region->term);
        if (!rc)
            rc = pc__region_adopt_unchecked(engine, region->home, kept);
        if (!rc && region->is_mapped)
            rc = pc__region_home_generation(engine, region);
    }
    pc__region_put(engine, region);
    return rc;
}

static void home_adopted(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__home *home = region->home;
    home->applied = home->overlay.memfd >= 0 ? home->overlay.version : home->base.version;
    home->latest = home->applied;
    home->history_from = home->applied;
    /* It died between the record of what a layer replaces, which may be one that keeps nothing, and
     * the end of replacing it: what the store has there may be half of the next version. */
    if (pc__history_noted(engine->history, region->id, home->applied)) {
        home->history_from++;
        home->overlay_is_torn = home->overlay.memfd >= 0;
    }
    region->version = home->applied > region->version ? home->applied : region->version;
}

/* What the keeper held is all here. */
void pc__regions_adopted(struct pc_engine *engine)
{
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++)
        for (struct pc__region *r = engine->regions[b]; r; r = r->hash_next)
            if (r->home && (r->home->base.memfd >= 0 || r->home->overlay.memfd >= 0))
                home_adopted(engine, r);
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++)
        for (struct pc__region *r = engine->regions[b]; r; r = r->hash_next)
            if (r->home && r->home->is_unchecked)
                pc__worker_queue(engine, r); /* which has not begun */
    /* Published layers go to their homes, in order; one publish takes all that follow it. */
    for (;;) {
        struct pc__layer *next = NULL;
        pc__each(link, &engine->staged)
        {
            struct pc__layer *layer = pc__of(link, struct pc__layer, link);
            struct pc__region *region = layer->version ? pc__region_get(engine, layer->region) : NULL;
            bool fits = region && region->home && layer->version <= region->home->latest + 1;
            if (region)
                pc__region_put(engine, region);
            if (fits) {
                next = layer;
                break;
            }
        }
        if (!next || pc__layer_publish(engine, next->region, next->commit_id, next->version))
            return;
    }
}

/* ------------------------------------------------------------ who waits */

/* A mapping of the region is gone, or it was retired: says so once when nothing is left. After a
 * restart, clients first get the time to attach again what they hold. */
void pc__region_lease_dropped(struct pc_engine *engine, struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    bool idle = region->state == PC__REGION_RETIRED && region->mappings == 0 &&
                !region->idle_told && !engine->settle_until_ns;
    bool forget = idle && !region->home;
    region->idle_told |= idle;
    pthread_mutex_unlock(&region->lock);
    if (forget) /* first: who hears that it is idle finds nothing of it */
        pc__region_forget(engine, region);
    if (idle)
        pc__engine_event(engine, PC_EVENT_REGION_IDLE, 0, region->id, engine->server_id, "%s", "");
}

/* Bases that were taken for leased until now may change, generations may go. */
static void settle_regions(struct pc_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++)
        for (struct pc__region *r = engine->regions[b]; r; r = r->hash_next) {
            pthread_mutex_lock(&r->lock);
            pc__generations_trim(engine, r);
            if (r->home || r->former)
                pc__worker_queue(engine, r);
            pthread_mutex_unlock(&r->lock);
        }
    pthread_mutex_unlock(&engine->lock);
}

void pc__regions_settled(struct pc_engine *engine)
{
    uint64_t until_ns = engine->settle_until_ns;
    if (until_ns == UINT64_MAX || !atomic_compare_exchange_strong(&engine->settle_until_ns, &until_ns, 0))
        return; /* the engine stops */
    settle_regions(engine);
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++) {
        struct pc__region *held[64];
        size_t n;
        do { /* those that are told are gone from the bucket, or told already, the next time */
            n = 0;
            pthread_mutex_lock(&engine->lock);
            for (struct pc__region *r = engine->regions[b]; r && n < 64; r = r->hash_next) {
                pthread_mutex_lock(&r->lock);
                if (r->state == PC__REGION_RETIRED && r->mappings == 0 && !r->idle_told) {
                    pc__ref_take(&r->refs);
                    held[n++] = r;
                }
                pthread_mutex_unlock(&r->lock);
            }
            pthread_mutex_unlock(&engine->lock);
            for (size_t i = 0; i < n; i++) {
                pc__region_lease_dropped(engine, held[i]);
                pc__region_put(engine, held[i]);
            }
        } while (n == 64);
    }
}

void pc__region_end(struct pc_engine *engine, struct pc__region *region)
{
    pc__each(link, &region->generations)
        pc__generation_drop(engine, region, pc__of(link, struct pc__generation, link));
    if ((region->home || region->former || region->prepared) && region->forgotten)
        pc__history_forget(engine->history, region->id);
    pc__count_sub(&engine->open_holes, region->open_holes);
    pc__home_free(engine, region->home, region->length_bytes);
    pc__home_free(engine, region->prepared, region->length_bytes);
    pc__home_free(engine, region->former, region->length_bytes);
}
