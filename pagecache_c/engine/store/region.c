/* region.c - the regions that this server knows: the table, what the keeper holds of them, their end.
 *
 * Owns the region table. Any thread may enter. Table: engine.lock; contents of a
 * region: region.lock. A region lives as long as its table entry or a reference does, so a freed
 * region's memory goes when its last mapping, fetch and queued reply are gone.
 *
 * Relies on: SEEK_DATA of a memfd shows only blocks whose write is complete (a folio is marked
 * up to date after the copy), so what a restarted server adopts from the keeper is whole.
 */
#include "engine/engine.h"
#include "engine/store/lost.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

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
    atomic_init(&region->refs, 1u);
    return region;
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
#define HOLES_AT 8 /* in what the keeper keeps for us */
#define FEW_HOLES 16u /* one to so many blocks of data */

static void trim_sometimes(void)
{
    static _Atomic uint64_t freed; /* of all engines: they share the heap */
    pc__count_add(&freed, 1);
    if (pc__count_get(&freed) % TRIM_EVERY == 0)
        (void)malloc_trim(0);
}

/* When the engine stops, the keeper keeps what it holds: the caller ends engine->keeping first. */
void pc__region_put(struct pc_engine *engine, struct pc__region *region)
{
    if (!pc__ref_drop(&region->refs))
        return;
    pc__each(link, &region->generations)
        pc__generation_drop(engine, region, pc__of(link, struct pc__generation, link));
    if (region->home && region->forgotten)
        pc__history_forget(engine->history, region->id);
    pc__count_sub(&engine->open_holes, region->open_holes);
    pc__home_free(engine, region->home, region->length_bytes);
    pc__home_free(engine, region->prepared, region->length_bytes);
    free(region->changes.runs);
    free(region->homes);
    if (region->pages)
        pc__readahead_free(region->pages);
    free(region->pages);
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

bool pc__region_info_valid(const struct pc_region_info *info)
{
    return info->region != 0 && info->length_bytes != 0 &&
           info->length_bytes % PC_BLOCK_BYTES == 0 && info->base_address % PC_BLOCK_BYTES == 0 &&
           info->base_address >= PC_WINDOW_BEGIN && info->base_address < PC_WINDOW_END &&
           info->length_bytes <= PC_WINDOW_END - info->base_address;
}

/* ------------------------------------------------------------------ memfds */

#define CONNECTIONS_SHARE 8u /* of the limit, one part is kept back */

/* The kernel gives the lowest number that is free: where that is above the rest, so many are open. */
int pc__descriptors_spare(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return PC_OK;
    int next = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
    if (next < 0)
        next = open("/dev/null", O_RDONLY | O_CLOEXEC); /* nobody's input is open */
    if (next < 0)
        return pc__fail_errno("RLIMIT_NOFILE of the page server is %llu",
                              (unsigned long long)limit.rlim_cur);
    close(next);
    return (rlim_t)next < limit.rlim_cur - limit.rlim_cur / CONNECTIONS_SHARE
               ? PC_OK
               : pc__fail(PC_ERR_DESCRIPTORS,
                          "RLIMIT_NOFILE of the page server is %llu, and it keeps the last eighth "
                          "for connections", (unsigned long long)limit.rlim_cur);
}

int pc__memfd_make(uint64_t length_bytes, uint64_t *inode)
{
    int fd = memfd_create("clamor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return pc__fail_errno("memfd_create");
    struct stat st;
    /* Clients hold it read-write: one that shrank it would kill us with SIGBUS. */
    if (ftruncate(fd, (off_t)length_bytes) || fstat(fd, &st) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
        int rc = pc__fail_errno("ftruncate of a memfd to %llu bytes",
                                (unsigned long long)length_bytes);
        close(fd);
        return rc;
    }
    *inode = st.st_ino;
    return fd;
}

int pc__memfd_blocks(struct pc__blockset *data, int memfd, uint64_t length_bytes)
{
    off_t at = 0;
    while ((uint64_t)at < length_bytes) {
        off_t begin = lseek(memfd, at, SEEK_DATA);
        if (begin < 0)
            return errno == ENXIO ? PC_OK : pc__fail_errno("SEEK_DATA on a memfd");
        off_t end = lseek(memfd, begin, SEEK_HOLE);
        if (end < 0)
            return pc__fail_errno("SEEK_HOLE on a memfd");
        if ((uint64_t)begin >= length_bytes) /* notes behind the blocks (lost.h) */
            return PC_OK;
        end = (uint64_t)end < length_bytes ? end : (off_t)length_bytes;
        uint64_t first = (uint64_t)begin >> PC_BLOCK_SHIFT;
        uint64_t past = ((uint64_t)end + PC_BLOCK_BYTES - 1) >> PC_BLOCK_SHIFT;
        if (pc__blockset_add(data, first, past - first) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        at = end;
    }
    return PC_OK;
}

/* ------------------------------------------------------------- the keeper */

struct pc__kept pc__kept_of(const struct pc__region *region, enum pc__kept_kind kind,
                            uint64_t inode, uint64_t version)
{
    struct pc__kept kept = {.region = region->id,
                            .version = version,
                            .base_address = region->base_address,
                            .length_bytes = region->length_bytes,
                            .kind = kind,
                            .sealed = 1,
                            .inode = inode,
                            .reserved = {[2] = region->built_in_place, [3] = region->is_mapped}};
    memcpy(kept.reserved + HOLES_AT, &region->open_holes, sizeof region->open_holes);
    return kept;
}

void pc__keep_refused(void *engine, int rc, const struct pc__kept *what)
{
    pc__engine_event(engine, PC_EVENT_LOG, rc, what->region, 0,
                     "the keeper was not given a part of region %llu: a crash of this server would lose it: %s",
                     (unsigned long long)what->region, pc_strerror(rc));
}

int pc__keep(struct pc_engine *engine, const struct pc__kept *what, int fd)
{
    int rc = engine->keeping ? pc__keeping_put(engine->keeping, what, fd) : PC_OK;
    if (rc)
        pc__keep_refused(engine, rc, what);
    return rc;
}

void pc__unkeep(struct pc_engine *engine, uint64_t inode, bool on_disk)
{
    if (engine->keeping)
        pc__keeping_drop(engine->keeping, inode, on_disk);
}

bool pc__keep_now(struct pc_engine *engine, const struct pc__kept *what)
{
    return !engine->keeping || pc__keeping_put_now(engine->keeping, what);
}

bool pc__keeper_is_behind(struct pc_engine *engine)
{
    return engine->keeping && pc__keeping_is_behind(engine->keeping);
}

int pc__keep_wait(struct pc_engine *engine)
{
    return engine->keeping ? pc__keeping_wait(engine->keeping) : PC_OK;
}

void pc__keep_say(struct pc_engine *engine, int rc, char *text, size_t text_bytes)
{
    pc__keeping_say(engine->keeping, rc, text, text_bytes);
}

int pc__keep_when(struct pc_engine *engine, pc__keeper_heard *heard, void *arg)
{
    return engine->keeping ? pc__keeping_when(engine->keeping, heard, arg) : PC_OK;
}

/* Under region.lock: whether the base may be mapped with its holes. They are bounded for all bases
 * together; but a few of them cost no more than its data does, and do not count. */
static bool take_holes(struct pc_engine *engine, struct pc__region *region)
{
    const struct pc__store *base = &region->home->base;
    const uint64_t holes = region->n_blocks - base->data.n_set, most = pc__cache_most_holes(engine);
    if (region->is_mapped) { /* since a server before this one. What was read of them is data now */
        pc__count_add(&engine->open_holes, region->open_holes);
        return true;
    }
    if (region->built_in_place || most == UINT64_MAX || holes <= base->data.n_set / FEW_HOLES)
        return true;
    const uint64_t before = atomic_fetch_add(&engine->open_holes, holes);
    if (holes > most || before > most - holes) {
        pc__count_sub(&engine->open_holes, holes);
        return false;
    }
    region->open_holes = holes;
    return true;
}

/* The base of the home is a generation too, unless its bytes lie in somebody else's memory, blocks of
 * it are lost (a hole of those is not a block of zeros), or the homes here have so many holes that
 * reading them would fill this node: then processes of this node fill an ordinary generation from
 * there, within the budget. Who built in it maps it already, with all its holes; so may those who had
 * it from a server before this one. Under region.lock. */
int pc__region_home_generation(struct pc_engine *engine, struct pc__region *region)
{
    const struct pc__store *base = &region->home->base;
    if (region->home->n_segments || region->home->lost || !take_holes(engine, region))
        return PC_OK;
    struct pc__generation *generation = pc__generation_new(region->n_blocks, true);
    if (!generation)
        return pc__fail(PC_ERR_NO_MEMORY, "a generation of region %llu",
                        (unsigned long long)region->id);
    generation->memfd = base->memfd;
    generation->inode = base->inode;
    generation->version = base->version;
    pc__link_push(&region->generations, &generation->link);
    region->is_mapped = true;
    return PC_OK;
}

int pc__region_seal(struct pc_engine *engine, struct pc__region *region, bool built_in_place)
{
    size_t n_homes = (region->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
    uint64_t *homes = calloc(n_homes, sizeof *homes);
    if (!homes)
        return pc__fail(PC_ERR_NO_MEMORY, "homes of region %llu", (unsigned long long)region->id);
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
        if (!rc) {
            region->homes = homes;
            homes = NULL;
            region->state = PC__REGION_READY;
            region->creator = 0;
            if (!pc__link_empty(&region->home->pending) || /* of a server before this one */
                region->n_blocks >= PC__WARM_LEAST_BLOCKS)
                pc__worker_queue(engine, region);
        }
    }
    pthread_mutex_unlock(&region->lock);
    free(homes);
    if (!rc && !region->home->n_segments) {
        const struct pc__kept kept =
            pc__kept_of(region, PC__KEPT_HOME, region->home->base.inode, 0);
        rc = pc__keep(engine, &kept, region->home->base.memfd);
    }
    return rc;
}

/* -------------------------------------------------------------- a restart */

static int adopt_store(struct pc__store *store, struct pc__region *region,
                       const struct pc__kept *kept, int fd)
{
    if (store->memfd >= 0) {
        close(fd);
        return pc__fail(PC_ERR_PROTOCOL, "the keeper holds two stores of region %llu",
                        (unsigned long long)region->id);
    }
    int rc = pc__store_open(store, fd, kept->inode, region->length_bytes, kept->version);
    return rc ? rc : pc__memfd_blocks(&store->data, fd, region->length_bytes);
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

int pc__region_adopt_notes(struct pc__home *home, const struct pc__kept *kept)
{
    struct stat st;
    if (fstat(home->base.memfd, &st))
        return pc__fail_errno("fstat of a home memfd");
    if (!has_notes(kept, &st))
        return PC_OK;
    home->lost = pc__lost_open(home->base.memfd, kept->length_bytes, NULL, 0);
    return home->lost ? PC_OK : PC_ERR_NO_MEMORY;
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
    if (!pc__region_info_valid(&info) || fstat(fd, &st) ||
        ((uint64_t)st.st_size != kept->length_bytes && !has_notes(kept, &st))) {
        close(fd);
        return pc__fail(PC_ERR_PROTOCOL, "the keeper's record of region %llu does not fit its memfd",
                        (unsigned long long)kept->region);
    }
    if (kept->kind == PC__KEPT_HOME && !kept->sealed) {
        pc__unkeep(engine, kept->inode, false);
        close(fd);
        return PC_OK;
    }
    struct pc__region *region = pc__region_get_or_add(engine, kept->region);
    if (!region) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    }
    region->version = kept->version > region->version ? kept->version : region->version;
    region->base_address = kept->base_address;
    region->length_bytes = kept->length_bytes;
    region->n_blocks = kept->length_bytes >> PC_BLOCK_SHIFT;
    int rc;
    if (kept->kind == PC__KEPT_CACHE) {
        rc = adopt_generation(engine, region, kept, fd);
    } else if (kept->kind == PC__KEPT_HOME && kept->reserved[1]) {
        rc = pc__rebuild_adopt(engine, region, kept, fd);
    } else if (!region->home && !(region->home = pc__home_new())) {
        close(fd);
        rc = pc__fail(PC_ERR_NO_MEMORY, "a home record");
    } else if (kept->kind == PC__KEPT_OVERLAY) {
        rc = adopt_store(&region->home->overlay, region, kept, fd);
    } else {
        rc = adopt_store(&region->home->base, region, kept, fd);
        if (!rc)
            rc = pc__region_adopt_notes(region->home, kept);
        region->home->base_changes = kept->reserved[0] != 0;
        region->built_in_place = kept->reserved[2] != 0;
        region->is_mapped = kept->reserved[3] != 0;
        memcpy(&region->open_holes, kept->reserved + HOLES_AT, sizeof region->open_holes);
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

/* Sends everybody who waits for the region back to their loops. */
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
        const struct pc__mail mail = {.run = pc__session_retry_open,
                                      .pointer = pending,
                                      .error = pending->open.version >= from ? error : 0};
        if (pc__loop_post(pending->loop, &mail))
            free(pending); /* the client's own deadline tells it */
    }
    for (int i = 0; parked && i < engine->n_loops; i++) {
        const struct pc__mail mail = {
            .run = pc__served_unpark, .a = region->id, .b = answered, .error = error};
        (void)pc__loop_post(&engine->loops[i], &mail); /* who asks gives up by its own deadline */
    }
}

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
            if (r->home)
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
