/* region.c - the regions that this server knows: their homes, generations and descriptors.
 *
 * Owns the region table and every memfd. Any thread may enter. Table: engine.lock; contents of a
 * region: region.lock. A region lives as long as its table entry or a reference does, so a freed
 * region's memory goes when its last mapping, fetch and queued reply are gone.
 *
 * Relies on: SEEK_DATA of a memfd shows only blocks whose write is complete (a folio is marked
 * up to date after the copy), so what a restarted server adopts from the keeper is whole.
 */
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
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
        region = calloc(1, sizeof *region);
        if (region) {
            region->id = id;
            region->state = PC__REGION_UNKNOWN;
            pthread_mutex_init(&region->lock, NULL);
            pc__link_init(&region->pending);
            atomic_init(&region->refs, 1u);
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

static void tell_keeper(struct pc_engine *engine, const struct pc__region *region, uint64_t inode,
                        int fd, uint32_t kind, bool sealed)
{
    if (engine->keeper_fd < 0)
        return;
    struct pc__kept kept = {.region = region->id,
                            .version = region->version,
                            .base_address = region->base_address,
                            .length_bytes = region->length_bytes,
                            .kind = kind,
                            .sealed = sealed,
                            .inode = inode};
    pthread_mutex_lock(&engine->keeper_lock);
    int rc = pc__keeper_put(engine->keeper_fd, &kept, fd);
    pthread_mutex_unlock(&engine->keeper_lock);
    if (rc)
        pc__engine_event(engine, PC_EVENT_LOG, rc, region->id, 0,
                         "the keeper did not take region %llu: a crash of this server would lose it",
                         (unsigned long long)region->id);
}

static void drop_from_keeper(struct pc_engine *engine, uint64_t inode)
{
    if (engine->keeper_fd < 0)
        return;
    pthread_mutex_lock(&engine->keeper_lock);
    int rc = pc__keeper_drop(engine->keeper_fd, inode);
    pthread_mutex_unlock(&engine->keeper_lock);
    if (rc)
        pc__engine_event(engine, PC_EVENT_LOG, rc, 0, 0, "the keeper did not drop a freed region");
}

static void free_generation(struct pc_engine *engine, struct pc__generation *generation)
{
    if (!generation)
        return;
    if (generation->map)
        munmap(generation->map, generation->present.n_blocks << PC_BLOCK_SHIFT);
    if (!generation->complete) {
        drop_from_keeper(engine, generation->inode);
        close(generation->memfd);
    }
    pc__blockset_free(&generation->present);
    pc__blockset_free(&generation->in_flight);
    pc__blockset_free(&generation->fetched);
    pc__blockset_free(&generation->touched);
    free(generation);
}

static void free_home(struct pc_engine *engine, struct pc__home *home, uint64_t length_bytes)
{
    if (!home)
        return;
    drop_from_keeper(engine, home->inode);
    if (home->map)
        munmap((void *)(uintptr_t)home->map, length_bytes);
    if (home->memfd >= 0)
        close(home->memfd);
    pc__blockset_free(&home->data);
    free(home->segments);
    free(home);
}

/* When the engine stops, the keeper keeps what it holds: the caller says keeper_fd = -1 first. */
void pc__region_put(struct pc_engine *engine, struct pc__region *region)
{
    if (!pc__ref_drop(&region->refs))
        return;
    free_generation(engine, region->generation);
    free_home(engine, region->home, region->length_bytes);
    free(region->homes);
    pthread_mutex_destroy(&region->lock);
    free(region);
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

static int make_memfd(uint64_t length_bytes, uint64_t *inode)
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

static struct pc__generation *new_generation(uint64_t n_blocks, bool complete)
{
    struct pc__generation *generation = calloc(1, sizeof *generation);
    if (!generation)
        return NULL;
    generation->memfd = -1;
    generation->complete = complete;
    pc__link_init(&generation->waiters);
    pc__link_init(&generation->jobs);
    if (pc__blockset_init(&generation->present, n_blocks) ||
        pc__blockset_init(&generation->in_flight, n_blocks) ||
        pc__blockset_init(&generation->fetched, n_blocks) ||
        pc__blockset_init(&generation->touched, n_blocks)) {
        pc__blockset_free(&generation->present);
        pc__blockset_free(&generation->in_flight);
        pc__blockset_free(&generation->fetched);
        pc__blockset_free(&generation->touched);
        free(generation);
        return NULL;
    }
    return generation;
}

/* The map that inserts go through; see fill.c. */
static int map_generation(const struct pc_engine *engine, struct pc__generation *generation)
{
    uint64_t length = generation->present.n_blocks << PC_BLOCK_SHIFT;
    if (engine->uffd < 0)
        return PC_OK;
    void *map = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                     generation->memfd, 0);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of a generation of %llu bytes", (unsigned long long)length);
    generation->map = map;
    (void)madvise(map, length, MADV_DONTDUMP);
    (void)madvise(map, length, MADV_DONTFORK);
    struct uffdio_register range = {.range = {.start = (uint64_t)(uintptr_t)map, .len = length},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    return ioctl(engine->uffd, UFFDIO_REGISTER, &range)
               ? pc__fail_errno("UFFDIO_REGISTER of a generation")
               : PC_OK;
}

static int map_home(struct pc__home *home, uint64_t length_bytes)
{
    void *map = mmap(NULL, length_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, home->memfd, 0);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of a home of %llu bytes", (unsigned long long)length_bytes);
    (void)madvise(map, length_bytes, MADV_DONTDUMP);
    home->map = map;
    return PC_OK;
}

int pc__region_make_home(struct pc_engine *engine, struct pc__region *region,
                         const struct pc_segment *segments, size_t n_segments, int *fd)
{
    struct pc__home *home = calloc(1, sizeof *home);
    if (!home)
        return pc__fail(PC_ERR_NO_MEMORY, "a home record");
    int rc = PC_OK;
    home->memfd = make_memfd(region->length_bytes, &home->inode);
    if (home->memfd < 0) {
        rc = home->memfd;
        goto out;
    }
    rc = pc__blockset_init(&home->data, region->n_blocks);
    if (rc)
        goto out;
    if (n_segments) {
        home->segments = calloc(n_segments, sizeof *segments);
        if (!home->segments) {
            rc = PC_ERR_NO_MEMORY;
            goto out;
        }
        uint64_t end = 0;
        for (size_t i = 0; i < n_segments; i++) {
            const struct pc_segment *s = &segments[i];
            if (s->offset_bytes < end || s->offset_bytes > region->length_bytes ||
                s->length_bytes > region->length_bytes - s->offset_bytes) {
                rc = pc__fail(PC_ERR_RANGE, "segment %zu does not lie in the region, or not after "
                                            "the one before it", i);
                goto out;
            }
            end = s->offset_bytes + s->length_bytes;
            home->segments[home->n_segments++] = *s;
        }
    }
    rc = map_home(home, region->length_bytes);
    if (rc)
        goto out;
    *fd = fcntl(home->memfd, F_DUPFD_CLOEXEC, 0);
    if (*fd < 0) {
        rc = pc__fail_errno("dup of a home memfd");
        goto out;
    }
    if (!n_segments) /* the keeper cannot hold segments: holes in their place would read as zeros */
        tell_keeper(engine, region, home->inode, home->memfd, PC__KEPT_HOME, false);
    pthread_mutex_lock(&region->lock);
    region->home = home;
    pthread_mutex_unlock(&region->lock);
    return PC_OK;
out:
    free_home(engine, home, region->length_bytes);
    return rc;
}

static int note_data(struct pc__blockset *data, int memfd, uint64_t length_bytes)
{
    off_t at = 0;
    while ((uint64_t)at < length_bytes) {
        off_t begin = lseek(memfd, at, SEEK_DATA);
        if (begin < 0)
            return errno == ENXIO ? PC_OK : pc__fail_errno("SEEK_DATA on a memfd");
        off_t end = lseek(memfd, begin, SEEK_HOLE);
        if (end < 0)
            return pc__fail_errno("SEEK_HOLE on a memfd");
        uint64_t first = (uint64_t)begin >> PC_BLOCK_SHIFT;
        uint64_t past = ((uint64_t)end + PC_BLOCK_BYTES - 1) >> PC_BLOCK_SHIFT;
        if (pc__blockset_add(data, first, past - first) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        at = end;
    }
    return PC_OK;
}

/* The home is the generation too, unless its bytes lie in somebody else's memory: then processes
 * of this node fill an ordinary generation from there. */
static int generation_of_home(struct pc__region *region)
{
    if (region->home->n_segments)
        return PC_OK;
    struct pc__generation *generation = new_generation(region->n_blocks, true);
    if (!generation)
        return pc__fail(PC_ERR_NO_MEMORY, "a generation of region %llu",
                        (unsigned long long)region->id);
    generation->memfd = region->home->memfd;
    generation->inode = region->home->inode;
    region->generation = generation;
    return PC_OK;
}

int pc__region_seal(struct pc_engine *engine, struct pc__region *region)
{
    size_t n_homes = (region->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
    uint64_t *homes = calloc(n_homes, sizeof *homes);
    if (!homes)
        return pc__fail(PC_ERR_NO_MEMORY, "homes of region %llu", (unsigned long long)region->id);
    for (size_t i = 0; i < n_homes; i++)
        homes[i] = engine->server_id;
    pthread_mutex_lock(&region->lock);
    int rc = PC_ERR_NO_REGION;
    if (region->state == PC__REGION_CREATING && region->home) {
        rc = note_data(&region->home->data, region->home->memfd, region->length_bytes);
        if (!rc)
            rc = generation_of_home(region);
        if (!rc) {
            region->homes = homes;
            homes = NULL;
            region->state = PC__REGION_READY;
            region->creator = 0;
        }
    }
    pthread_mutex_unlock(&region->lock);
    free(homes);
    if (!rc && !region->home->n_segments)
        tell_keeper(engine, region, region->home->inode, region->home->memfd, PC__KEPT_HOME, true);
    return rc;
}

/* region.lock is held: a generation is made once, at the first lease. */
int pc__region_need_generation(struct pc_engine *engine, struct pc__region *region)
{
    if (region->generation)
        return PC_OK;
    struct pc__generation *generation = new_generation(region->n_blocks, false);
    if (!generation)
        return pc__fail(PC_ERR_NO_MEMORY, "a generation");
    generation->memfd = make_memfd(region->length_bytes, &generation->inode);
    if (generation->memfd < 0) {
        int rc = generation->memfd;
        generation->complete = true; /* nothing to close or to tell the keeper */
        free_generation(engine, generation);
        return rc;
    }
    int mapped = map_generation(engine, generation);
    if (mapped) {
        free_generation(engine, generation);
        return mapped;
    }
    region->generation = generation;
    tell_keeper(engine, region, generation->inode, generation->memfd, PC__KEPT_CACHE, true);
    return PC_OK;
}

/* Takes back one memfd after a restart; owns fd. What was not sealed had no user yet. */
int pc__region_adopt(void *arg, const struct pc__kept *kept, int fd)
{
    struct pc_engine *engine = arg;
    const struct pc_region_info info = {.region = kept->region,
                                        .version = kept->version,
                                        .base_address = kept->base_address,
                                        .length_bytes = kept->length_bytes};
    struct stat st;
    if (!pc__region_info_valid(&info) || fstat(fd, &st) ||
        (uint64_t)st.st_size != kept->length_bytes) {
        close(fd);
        return pc__fail(PC_ERR_PROTOCOL, "the keeper's record of region %llu does not fit its memfd",
                        (unsigned long long)kept->region);
    }
    if (kept->kind == PC__KEPT_HOME && !kept->sealed) {
        drop_from_keeper(engine, kept->inode);
        close(fd);
        return PC_OK;
    }
    struct pc__region *region = pc__region_get_or_add(engine, kept->region);
    if (!region) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    }
    region->version = kept->version;
    region->base_address = kept->base_address;
    region->length_bytes = kept->length_bytes;
    region->n_blocks = kept->length_bytes >> PC_BLOCK_SHIFT;
    int rc;
    if (kept->kind == PC__KEPT_HOME) {
        struct pc__home *home = calloc(1, sizeof *home);
        rc = home ? pc__blockset_init(&home->data, region->n_blocks) : PC_ERR_NO_MEMORY;
        if (!rc) {
            home->memfd = fd;
            home->inode = (uint64_t)st.st_ino;
            region->home = home;
            rc = map_home(home, region->length_bytes);
        }
        if (!rc)
            rc = note_data(&home->data, fd, region->length_bytes);
        if (!rc)
            rc = generation_of_home(region);
    } else {
        struct pc__generation *generation = new_generation(region->n_blocks, false);
        rc = generation ? PC_OK : PC_ERR_NO_MEMORY;
        if (generation) {
            generation->memfd = fd;
            generation->inode = (uint64_t)st.st_ino;
            region->generation = generation;
            rc = map_generation(engine, generation);
            if (!rc)
                rc = note_data(&generation->present, fd, region->length_bytes);
        }
    }
    pc__region_put(engine, region);
    return rc;
}

/* A mapping of the region is gone, or it was retired: says so once when nothing is left. After a
 * restart, clients first get the time to attach again what they hold. */
void pc__region_lease_dropped(struct pc_engine *engine, struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    bool idle = region->state == PC__REGION_RETIRED && region->mappings == 0 &&
                !region->idle_told && pc__now_ns() >= engine->settle_until_ns;
    bool forget = idle && !region->home;
    region->idle_told |= idle;
    pthread_mutex_unlock(&region->lock);
    if (forget) /* first: who hears that it is idle finds nothing of it */
        pc__region_forget(engine, region);
    if (idle)
        pc__engine_event(engine, PC_EVENT_REGION_IDLE, 0, region->id, engine->server_id, "%s", "");
}

uint64_t pc__regions_deadline(struct pc__loop *loop)
{
    uint64_t at = loop->index == 0 ? loop->engine->settle_until_ns : 0;
    return at ? at : UINT64_MAX;
}

void pc__regions_check(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc_engine *engine = loop->engine;
    if (loop->index != 0 || !engine->settle_until_ns || now_ns < engine->settle_until_ns)
        return;
    engine->settle_until_ns = 0;
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

/* The first segment that ends after offset, or n_segments. */
static size_t segment_after(const struct pc__home *home, uint64_t offset)
{
    size_t low = 0, high = home->n_segments;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (home->segments[mid].offset_bytes + home->segments[mid].length_bytes > offset)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

struct pc__home_part pc__home_describe(const struct pc__home *home, uint64_t block, uint64_t n)
{
    uint64_t offset = block << PC_BLOCK_SHIFT;
    size_t i = segment_after(home, offset);
    if (i < home->n_segments) {
        const struct pc_segment *s = &home->segments[i];
        uint64_t end = s->offset_bytes + s->length_bytes;
        if (s->offset_bytes < offset + PC_BLOCK_BYTES) { /* this segment is in this block */
            if (s->offset_bytes <= offset && end >= offset + PC_BLOCK_BYTES) {
                uint64_t whole = (end - offset) >> PC_BLOCK_SHIFT;
                return (struct pc__home_part){
                    .kind = PC__HOME_MEMORY,
                    .n_blocks = whole < n ? whole : n,
                    .bytes = (const uint8_t *)(uintptr_t)s->address + (offset - s->offset_bytes)};
            }
            return (struct pc__home_part){.kind = PC__HOME_MIXED, .n_blocks = 1};
        }
        uint64_t until = (s->offset_bytes >> PC_BLOCK_SHIFT) - block;
        n = until < n ? until : n;
    }
    uint64_t limit = block + n;
    if (pc__blockset_has(&home->data, block))
        return (struct pc__home_part){
            .kind = PC__HOME_MEMORY,
            .n_blocks = pc__blockset_next_absent(&home->data, block, limit) - block,
            .bytes = home->map + offset,
            .in_memfd = true};
    return (struct pc__home_part){.kind = PC__HOME_ZEROS,
                                  .n_blocks = pc__blockset_next(&home->data, block, limit) - block};
}

void pc__home_compose(const struct pc__home *home, uint64_t block, uint8_t *out)
{
    uint64_t begin = block << PC_BLOCK_SHIFT, end = begin + PC_BLOCK_BYTES;
    if (pc__blockset_has(&home->data, block))
        memcpy(out, home->map + begin, PC_BLOCK_BYTES);
    else
        memset(out, 0, PC_BLOCK_BYTES);
    for (size_t i = segment_after(home, begin);
         i < home->n_segments && home->segments[i].offset_bytes < end; i++) {
        const struct pc_segment *s = &home->segments[i];
        uint64_t from = s->offset_bytes > begin ? s->offset_bytes : begin;
        uint64_t to = s->offset_bytes + s->length_bytes < end ? s->offset_bytes + s->length_bytes
                                                              : end;
        memcpy(out + (from - begin),
               (const uint8_t *)(uintptr_t)s->address + (from - s->offset_bytes), to - from);
    }
}
