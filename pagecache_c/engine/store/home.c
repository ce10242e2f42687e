/* home.c - the authoritative blocks of a region, and where those of any of its versions are.
 *
 *   base      a memfd at version B, or a file on disk. Processes of this node map it as it is, without a trap.
 *   overlay   the blocks that changed in (B, applied], while somebody leases B, or while the base
 *             lies in somebody else's memory. Nobody maps it.
 *   pending   layers of (applied, latest]: published, not applied yet. Of a delta the block is what the
 *             version before has, XORed with it.
 *   history   what versions below `applied` had in the blocks that later ones replaced.
 *
 * A block of version v is in the newest pending layer <= v that has it; else, for a v that is past,
 * in the first record of the history from v on that has it; else in the overlay; else in the base;
 * else it is zeros. Of a home that was rebuilt, blocks may be lost up to a version, and of one that is in a
 * file, be there (lost.c): whether they are is asked after the pending layers.
 *
 * Who resolves blocks gets pointers into these, and holds them by an epoch (pc__home_hold) until it
 * is done. The worker (apply.c), which alone changes stores, first makes new resolutions look
 * elsewhere, notes the epoch in which it did, and waits until nobody of that one or of one before it
 * is left. So a reply that waits in a queue shows the version that it was asked for, and never a
 * block in the middle. A wait that is broken off and the next one do not mix: each has its number.
 */
#include "engine/checks/checks.h"
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "kernels/xor.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ------------------------------------------------------------------ stores */

int pc__store_open(struct pc__store *store, int fd, uint64_t inode, uint64_t length_bytes,
                   uint64_t version, bool on_disk)
{
    store->memfd = fd;
    store->inode = inode;
    store->version = version;
    store->on_disk = on_disk;
    int rc = pc__blockset_init(&store->data, length_bytes >> PC_BLOCK_SHIFT);
    if (rc || on_disk)
        return rc;
    void *map = mmap(NULL, length_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of a home of %llu bytes", (unsigned long long)length_bytes);
    pc__huge_pages_refuse(map, length_bytes);
    (void)madvise(map, length_bytes, MADV_DONTDUMP);
    (void)madvise(map, length_bytes, MADV_DONTFORK); /* a child would look like one who reads it */
    store->map = map;
    return PC_OK;
}

void pc__store_close(struct pc_engine *engine, struct pc__store *store, uint64_t length_bytes)
{
    if (store->memfd < 0)
        return;
    pc__unkeep(engine, store->inode);
    if (store->map)
        munmap((void *)(uintptr_t)store->map, length_bytes);
    close(store->memfd);
    pc__blockset_free(&store->data);
    *store = (struct pc__store){.memfd = -1};
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#define WARM_AT_ONCE_BLOCKS 4096u /* some 0.7 ms */

/* Holes stay what they are: reading one would allocate its block. */
bool pc__home_warm(struct pc__home *home)
{
    const struct pc__blockset *data = &home->base.data;
    if (home->base.on_disk)
        return false;
    uint64_t at = home->warm_blocks, limit = at + WARM_AT_ONCE_BLOCKS;
    limit = limit < data->n_blocks ? limit : data->n_blocks;
    home->warm_blocks = limit;
    while ((at = pc__blockset_next(data, at, limit)) < limit) {
        uint64_t end = pc__blockset_next_absent(data, at, limit);
        void *begin = (void *)(uintptr_t)(home->base.map + (at << PC_BLOCK_SHIFT));
        if (madvise(begin, (end - at) << PC_BLOCK_SHIFT, MADV_POPULATE_READ)) {
            home->warm_blocks = data->n_blocks; /* a kernel that does not know how: it is a favour */
            return false;
        }
        at = end;
    }
    return limit < data->n_blocks;
}

uint64_t pc__home_read_holes(const struct pc__home *home)
{
    struct stat st;
    if (home->base.memfd < 0 || home->base.on_disk || fstat(home->base.memfd, &st))
        return 0; /* reading a hole of a file allocates nothing */
    uint64_t allocated = (uint64_t)st.st_blocks / (PC_BLOCK_BYTES / 512);
    return allocated > home->base.data.n_set ? allocated - home->base.data.n_set : 0;
}

int pc__home_punch_holes(struct pc__home *home)
{
    const struct pc__blockset *data = &home->base.data;
    uint64_t at = 0;
    if (!pc__home_read_holes(home))
        return PC_OK;
    while ((at = pc__blockset_next_absent(data, at, data->n_blocks)) < data->n_blocks) {
        uint64_t end = pc__blockset_next(data, at, data->n_blocks);
        int rc = pc__memfd_punch(home->base.memfd, at, end - at);
        if (rc)
            return rc;
        at = end;
    }
    return PC_OK;
}

struct pc__home *pc__home_new(void)
{
    struct pc__home *home = calloc(1, sizeof *home);
    if (home) {
        home->base.memfd = home->overlay.memfd = home->folded.memfd = -1;
        pc__link_init(&home->pending);
    }
    return home;
}

/* The file is a generation's now: only our map of it goes. */
static void leave_base(struct pc_engine *engine, struct pc__home *home, uint64_t length_bytes)
{
    if (home->base.map)
        munmap((void *)(uintptr_t)home->base.map, length_bytes);
    pc__blockset_free(&home->base.data);
    home->base = (struct pc__store){.memfd = -1};
    pc__generation_put(engine, home->base_left_to);
    home->base_left_to = NULL;
}

void pc__home_free(struct pc_engine *engine, struct pc__home *home, uint64_t length_bytes)
{
    if (!home)
        return;
    if (home->base_left_to)
        leave_base(engine, home, length_bytes);
    pc__store_close(engine, &home->base, length_bytes);
    pc__store_close(engine, &home->overlay, length_bytes);
    pc__store_close(engine, &home->folded, length_bytes);
    if (home->leaving)
        pc__layer_end(engine, home->leaving);
    while (!pc__link_empty(&home->pending)) {
        struct pc__layer *layer = pc__of(home->pending.next, struct pc__layer, link);
        pc__link_remove(&layer->link);
        pc__layer_end(engine, layer);
    }
    engine->observers.home_ended(home);
    pc__lost_close(home->lost);
    pc__unchecked_close(home->unchecked);
    free(home->segments);
    free(home);
}

static int take_segments(struct pc__home *home, const struct pc__region *region,
                         const struct pc_segment *segments, size_t n_segments)
{
    home->segments = calloc(n_segments, sizeof *segments);
    if (!home->segments)
        return pc__fail(PC_ERR_NO_MEMORY, "segments");
    uint64_t end = 0;
    for (size_t i = 0; i < n_segments; i++) {
        const struct pc_segment *s = &segments[i];
        if (s->offset_bytes < end || s->offset_bytes > region->length_bytes ||
            s->length_bytes > region->length_bytes - s->offset_bytes)
            return pc__fail(PC_ERR_RANGE, "segment %zu does not lie in the region, or not after "
                                          "the one before it", i);
        end = s->offset_bytes + s->length_bytes;
        home->segments[home->n_segments++] = *s;
    }
    return PC_OK;
}

int pc__home_make(struct pc_engine *engine, struct pc__region *region, enum pc_medium medium,
                  const struct pc_segment *segments, size_t n_segments, int *fd)
{
    struct pc__home *home = pc__home_new();
    const bool in_file = medium == PC_MEDIUM_FILE;
    const bool on_disk = medium == PC_MEDIUM_DISK || (engine->durable && !n_segments);
    if (!home)
        return pc__fail(PC_ERR_NO_MEMORY, "a home record");
    const uint64_t notes_bytes = in_file ? pc__lost_notes_bytes(region->length_bytes) : 0;
    uint64_t inode;
    int rc = pc__descriptors_spare();
    if (!rc)
        rc = pc__store_file_make(engine, region->length_bytes + notes_bytes, on_disk, in_file, &inode);
    if (rc >= 0)
        rc = pc__store_open(&home->base, rc, inode, region->length_bytes, 0, on_disk);
    if (!rc && in_file)
        rc = pc__lost_open(&home->base, region->length_bytes, true, NULL, 0, &home->lost);
    if (!rc && n_segments)
        rc = take_segments(home, region, segments, n_segments);
    if (!rc) {
        *fd = fcntl(home->base.memfd, F_DUPFD_CLOEXEC, 0);
        if (*fd < 0)
            rc = pc__fail_errno("dup of a home memfd");
    }
    if (rc) {
        pc__home_free(engine, home, region->length_bytes);
        return rc;
    }
    if (!n_segments) { /* the keeper cannot hold segments: holes in their place would read as zeros */
        struct pc__kept kept = pc__kept_of_store(region, PC__KEPT_HOME, &home->base, 0);
        kept.sealed = 0;
        (void)pc__keep(engine, &kept, home->base.memfd); /* the seal does it again */
    }
    pthread_mutex_lock(&region->lock);
    struct pc__home *adopted = region->home; /* of segments: what changed since is here already */
    if (adopted) {
        adopted->base = home->base;
        adopted->segments = home->segments;
        adopted->n_segments = home->n_segments;
    } else {
        region->home = home;
    }
    pthread_mutex_unlock(&region->lock);
    if (adopted)
        free(home);
    return PC_OK;
}

/* ------------------------------------------------------------------ leases */

struct pc__generation *pc__home_base_generation(const struct pc__region *region)
{
    pc__each(link, (struct pc__link *)(uintptr_t)&region->generations)
    {
        struct pc__generation *g = pc__of(link, struct pc__generation, link);
        if (g->complete && !g->was_base)
            return g;
    }
    return NULL;
}

/* After a restart, bases whose leases have not been attached again yet count as leased; but not
 * one that was being changed, which nobody can have leased. */
bool pc__home_base_leased(const struct pc_engine *engine, const struct pc__region *region,
                          uint64_t to_version)
{
    const struct pc__generation *g = pc__home_base_generation(region);
    return !g || pc__generation_leased(g, to_version) || (engine->settle_until_ns && !region->home->base_changes);
}

unsigned pc__home_hold(struct pc__home *home)
{
    unsigned held = (unsigned)(home->epoch % 2);
    home->readers[held]++;
    return held;
}

bool pc__home_is_read(const struct pc__home *home)
{
    return home->readers[0] || home->readers[1];
}

bool pc__home_left(struct pc__home *home, uint64_t epoch)
{
    if (home->epoch == epoch && !home->readers[(epoch + 1) % 2])
        home->epoch++;
    return home->epoch > epoch + 1 || (home->epoch == epoch + 1 && !home->readers[epoch % 2]);
}

void pc__home_release(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                      unsigned held)
{
    pthread_mutex_lock(&region->lock);
    bool last = --home->readers[held] == 0 && held != home->epoch % 2;
    if ((last && home->held_up) || (home == region->former && !pc__home_is_read(home)))
        pc__worker_queue(engine, region); /* from here on home may be gone */
    pthread_mutex_unlock(&region->lock);
    if (!last)
        return;
    pthread_mutex_lock(&engine->worker.lock);
    engine->worker.kicked = true;
    pthread_cond_signal(&engine->worker.wake);
    pthread_mutex_unlock(&engine->worker.lock);
}

bool pc__home_is_held_up(const struct pc__home *home)
{
    return home->held_up || home->change_said || home->waits_for_store;
}

bool pc__home_is_behind(const struct pc__home *home)
{
    uint64_t bytes = 0;
    pc__each(link, (struct pc__link *)(uintptr_t)&home->pending)
        bytes += pc__of(link, struct pc__layer, link)->bytes;
    return bytes > PC__PENDING_MOST_BYTES;
}

/* --------------------------------------------------------------- resolving */

uint64_t pc__home_damaged(const struct pc__home *home, uint64_t block, uint64_t n)
{
    const struct pc__blockset *damaged = home->is_unchecked ? &home->unchecked->damaged : NULL;
    uint64_t at = damaged ? pc__blockset_next(damaged, block, block + n) : block + n;
    while (at < block + n && home->overlay.memfd >= 0 && pc__blockset_has(&home->overlay.data, at))
        at = pc__blockset_next(damaged, at + 1, block + n);
    return at;
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

/* Of a block that a store has, and those after it that it has too. */
static struct pc__home_part of_store(const struct pc__store *store, uint64_t block, uint64_t limit)
{
    const uint64_t offset = block << PC_BLOCK_SHIFT;
    if (store->on_disk)
        return (struct pc__home_part){.kind = PC__HOME_DISK, .n_blocks = 1, .memfd = -1};
    return (struct pc__home_part){
        .kind = PC__HOME_MEMORY,
        .n_blocks = pc__blockset_next_absent(&store->data, block, limit) - block,
        .bytes = store->map + offset,
        .memfd = store->memfd,
        .offset = offset};
}

/* Of the base alone. */
static struct pc__home_part of_base(const struct pc__home *home, uint64_t block, uint64_t n)
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
                    .bytes = (const uint8_t *)(uintptr_t)s->address + (offset - s->offset_bytes),
                    .memfd = -1};
            }
            return (struct pc__home_part){.kind = PC__HOME_MIXED, .n_blocks = 1};
        }
        uint64_t until = (s->offset_bytes >> PC_BLOCK_SHIFT) - block;
        n = until < n ? until : n;
    }
    uint64_t limit = block + n;
    if (home->is_unchecked && pc__blockset_has(&home->unchecked->damaged, block))
        return (struct pc__home_part){.kind = PC__HOME_LOST, .n_blocks = 1, .memfd = -1};
    if (pc__blockset_has(&home->base.data, block))
        return of_store(&home->base, block, limit);
    return (struct pc__home_part){.kind = PC__HOME_ZEROS,
                                  .n_blocks = pc__blockset_next(&home->base.data, block, limit) - block};
}

static void compose_base(const struct pc__home *home, uint64_t block, uint8_t *out)
{
    uint64_t begin = block << PC_BLOCK_SHIFT, end = begin + PC_BLOCK_BYTES;
    if (pc__blockset_has(&home->base.data, block))
        memcpy(out, home->base.map + begin, PC_BLOCK_BYTES);
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

/* True: a layer of (applied, version] has the block. Else *limit becomes the first block of one. */
static bool of_pending(const struct pc__home *home, uint64_t version, uint64_t block,
                       uint64_t *limit, struct pc__home_part *out)
{
    for (struct pc__link *link = home->pending.prev; link != &home->pending; link = link->prev) {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        uint64_t n, at;
        if (layer->version > version)
            continue;
        at = pc__layer_find(layer, block, &n);
        if (at != UINT64_MAX && layer->flags & PC__LAYER_DELTA) {
            *out = (struct pc__home_part){.kind = PC__HOME_DELTA, .n_blocks = 1, .memfd = -1};
            return true;
        }
        if (at != UINT64_MAX && layer->on_disk) {
            *out = (struct pc__home_part){.kind = PC__HOME_DISK, .n_blocks = 1, .memfd = -1};
            return true;
        }
        if (at != UINT64_MAX) {
            *out = (struct pc__home_part){
                .kind = PC__HOME_MEMORY,
                .n_blocks = n < *limit - block ? n : *limit - block,
                .bytes = pc__layer_at(layer, at),
                .memfd = layer->memfd,
                .offset = layer->data_offset + (at << PC_BLOCK_SHIFT)};
            return true;
        }
        *limit = pc__layer_next(layer, block, *limit);
    }
    return false;
}

/* The newest layer of (applied, version] that has the block and comes before `before` (NULL: the end), and
 * where its data has it; or NULL. */
static const struct pc__layer *pending_before(const struct pc__home *home,
                                              const struct pc__layer *before, uint64_t version,
                                              uint64_t block, uint64_t *position)
{
    const struct pc__link *link = before ? before->link.prev : home->pending.prev;
    for (; link != &home->pending; link = link->prev) {
        const struct pc__layer *layer = pc__of((struct pc__link *)(uintptr_t)link, struct pc__layer, link);
        uint64_t n, at = layer->version > version ? UINT64_MAX : pc__layer_find(layer, block, &n);
        if (at == UINT64_MAX)
            continue;
        *position = at;
        return layer;
    }
    return NULL;
}

/* Whether deltas are all that there is of the block since it was lost: they do not heal it. */
static bool delta_of_lost(const struct pc__home *home, uint64_t version, uint64_t block)
{
    const struct pc__layer *layer = NULL;
    uint64_t n = 1, position;
    if (!home->lost && !home->is_unchecked)
        return false;
    while ((layer = pending_before(home, layer, version, block, &position)))
        if (!(layer->flags & PC__LAYER_DELTA))
            return false;
    return pc__home_damaged(home, block, 1) == block ||
           (home->lost && pc__lost_at(home->lost, home->applied, block, &n, NULL));
}

struct pc__home_part pc__home_resolve(struct pc_engine *engine, const struct pc__region *region,
                                      const struct pc__home *home, uint64_t version,
                                      uint64_t block, uint64_t n)
{
    struct pc__home_part part;
    uint64_t limit = block + n;
    if (version > home->applied && of_pending(home, version, block, &limit, &part)) {
        if (part.kind == PC__HOME_DELTA && delta_of_lost(home, version, block))
            part.kind = PC__HOME_LOST;
        return part;
    }
    if (home->lost) { /* before the history: for versions before the first it has nothing that was ours */
        enum pc__home_kind kind;
        n = limit - block;
        if (pc__lost_at(home->lost, version, block, &n, &kind))
            return (struct pc__home_part){.kind = kind, .n_blocks = n, .memfd = -1};
        limit = block + n;
    }
    if (version < home->history_from) {
        uint64_t next = limit;
        /* One that is expired by now: pc__home_knows says so. */
        (void)pc__history_next(engine->history, region->id, version, home->history_from, block,
                               limit, &next);
        if (next == block)
            return (struct pc__home_part){.kind = PC__HOME_HISTORY, .n_blocks = 1, .memfd = -1};
        limit = next;
    }
    if (home->overlay.memfd >= 0) {
        if (pc__blockset_has(&home->overlay.data, block))
            return of_store(&home->overlay, block, limit);
        limit = pc__blockset_next(&home->overlay.data, block, limit);
    }
    return of_base(home, block, limit - block);
}

/* A record that is dropped raises the floor in the same moment: whoever missed it sees that here. */
static int knows(const struct pc_engine *engine, const struct pc__region *region,
                 const struct pc__home *home, uint64_t version)
{
    if (version > home->latest)
        return PC_ERR_NO_VERSION;
    if (version < home->history_from &&
        version < pc__history_floor(engine->history, region->id, home->history_from))
        return PC_ERR_EXPIRED;
    return PC_OK;
}

int pc__home_knows(const struct pc_engine *engine, const struct pc__region *region,
                   uint64_t version)
{
    return knows(engine, region, region->home, version);
}

/* What the layers from there on are to be XORed with, and those. A delta goes when the worker has made it
 * whole: so it is looked at under region.lock. Since it was resolved it may have been applied, even. */
static int compose_delta(struct pc_engine *engine, struct pc__region *region,
                         const struct pc__home *home, uint64_t version, uint64_t block, uint8_t *out)
{
    const struct pc__layer *layer = NULL;
    uint64_t position;
    uint8_t below[PC_BLOCK_BYTES];
    struct pc__home_part part = {.kind = PC__HOME_ZEROS};
    bool whole = false;
    int rc = PC_OK;
    memset(out, 0, PC_BLOCK_BYTES);
    pthread_mutex_lock(&region->lock);
    while (!rc && !whole && (layer = pending_before(home, layer, version, block, &position))) {
        rc = pc__layer_read(layer, position, 1, below); /* of a parity on disk, which few read */
        pc__xor(out, out, below, PC_BLOCK_BYTES);
        whole = !(layer->flags & PC__LAYER_DELTA);
    }
    version = version < home->applied ? version : home->applied;
    if (!rc && !whole) {
        part = pc__home_resolve(engine, region, home, version, block, 1);
        rc = knows(engine, region, home, version);
    }
    if (!rc && part.kind == PC__HOME_MEMORY)
        pc__xor(out, out, part.bytes, PC_BLOCK_BYTES);
    pthread_mutex_unlock(&region->lock);
    if (rc || part.kind == PC__HOME_MEMORY || part.kind == PC__HOME_ZEROS)
        return rc;
    rc = part.kind == PC__HOME_LOST
             ? PC_ERR_HOME_LOST
             : pc__home_compose(engine, region, home, version, part.kind, block, below);
    if (!rc)
        pc__xor(out, out, below, PC_BLOCK_BYTES);
    return rc;
}

/* Under region.lock: which file has the block of a home on disk, at *offset, and up to *n blocks from there
 * on. A layer or a store: what was in a layer may have been applied, and what was in the overlay folded into
 * the base, since it was resolved: it is the same there, and stays while it is held. So do the files. */
static int file_of(const struct pc__home *home, uint64_t version, uint64_t block, uint64_t *n,
                   uint64_t *offset, bool *of_base_alone)
{
    *of_base_alone = false;
    uint64_t limit = block + *n, k, at;
    for (const struct pc__link *link = home->pending.prev; link != &home->pending; link = link->prev) {
        const struct pc__layer *layer = pc__of((struct pc__link *)(uintptr_t)link, struct pc__layer, link);
        if (layer->version > version)
            continue;
        at = pc__layer_find(layer, block, &k);
        if (at != UINT64_MAX) {
            *n = k < limit - block ? k : limit - block;
            *offset = layer->data_offset + (at << PC_BLOCK_SHIFT);
            return layer->memfd;
        }
        limit = pc__layer_next(layer, block, limit);
    }
    const struct pc__blockset *changed = home->overlay.memfd >= 0 ? &home->overlay.data : NULL;
    const bool is_changed = changed && pc__blockset_has(changed, block);
    if (changed)
        limit = is_changed ? pc__blockset_next_absent(changed, block, limit)
                           : pc__blockset_next(changed, block, limit);
    *n = limit - block;
    *offset = block << PC_BLOCK_SHIFT;
    *of_base_alone = !is_changed;
    const struct pc__store *store = is_changed ? &home->overlay : &home->base;
    return store->is_broken ? -1 : store->memfd;
}

int pc__store_check(struct pc__region *region, struct pc__store *store)
{
    if (!store->on_disk)
        return PC_OK;
    pthread_mutex_lock(&region->lock);
    int rc = PC_OK;
    if (store->is_broken && !pc__disk_file_has_name(store->memfd) && ftruncate(store->memfd, 0)) /* again: a write may have been on its way */
        rc = pc__fail_errno("cutting a file that the disk has refused to write");
    else if (store->is_broken)
        rc = pc__fail(PC_ERR_SYSTEM, "the disk has refused some of what was written to it");
    pthread_mutex_unlock(&region->lock);
    if (rc || !(rc = pc__disk_file_check(store->memfd)))
        return rc;
    pthread_mutex_lock(&region->lock);
    store->is_broken = true;
    pthread_mutex_unlock(&region->lock);
    return rc;
}

/* The disk has refused a part of it. */
static void note_broken(struct pc__region *region, struct pc__home *home, int fd)
{
    pthread_mutex_lock(&region->lock);
    home->base.is_broken |= fd == home->base.memfd;
    home->overlay.is_broken |= fd == home->overlay.memfd;
    pthread_mutex_unlock(&region->lock);
}

static int read_file(struct pc__region *region, const struct pc__home *home, int fd, uint64_t n_bytes,
                     uint64_t offset, uint8_t *out, bool waits)
{
    if (fd < 0)
        return waits ? pc__fail(PC_ERR_SYSTEM, "the disk has refused some of what was written to it") : PC__COLD;
    if (!waits && !pc__disk_file_try(fd, out, n_bytes, offset))
        return PC__COLD;
    int rc = waits ? pc__file_read(fd, out, n_bytes, offset) : PC_OK;
    const int refused = pc__disk_file_check(fd); /* it is said once */
    if (refused || (rc && pc__disk_file_is_cut(fd)))
        note_broken(region, (struct pc__home *)(uintptr_t)home, fd);
    return refused ? refused : rc;
}

int pc__home_read_disk(struct pc_engine *engine, struct pc__region *region, const struct pc__home *home,
                       uint64_t version, uint64_t block, uint64_t n, uint8_t *out, bool waits)
{
    int rc = PC_OK;
    for (uint64_t k; n && !rc; n -= k, block += k, out += k << PC_BLOCK_SHIFT) {
        uint32_t sums[PC__CHECK_BLOCKS];
        uint64_t offset;
        bool of_base_alone;
        k = n;
        pthread_mutex_lock(&region->lock);
        const int fd = file_of(home, version, block, &k, &offset, &of_base_alone);
        const int looks = of_base_alone && fd >= 0 ? pc__unchecked_expect(home->unchecked, block, &k, sums) : 0;
        pthread_mutex_unlock(&region->lock);
        if (looks < 0)
            return looks;
        rc = read_file(region, home, fd, k << PC_BLOCK_SHIFT, offset, out, waits);
        if (looks && rc != PC__COLD)
            rc = pc__unchecked_judge(engine, region, home->unchecked, fd, block, k, sums, out, rc, waits);
        if (looks && rc == 1)
            rc = PC__COLD;
    }
    return rc;
}

int pc__home_compose(struct pc_engine *engine, struct pc__region *region,
                     const struct pc__home *home, uint64_t version, enum pc__home_kind kind,
                     uint64_t block, uint8_t *out)
{
    if (kind == PC__HOME_DISK)
        return pc__home_read_disk(engine, region, home, version, block, 1, out, true);
    if (kind == PC__HOME_MIXED) {
        compose_base(home, block, out);
        return PC_OK;
    }
    if (kind == PC__HOME_DELTA)
        return compose_delta(engine, region, home, version, block, out);
    pthread_mutex_lock(&region->lock);
    uint64_t before = home->history_from;
    pthread_mutex_unlock(&region->lock);
    int rc = pc__history_read(engine->history, region->id, version, before, block, out);
    if (rc == 0) /* it was there when it was resolved: it was dropped meanwhile */
        rc = PC_ERR_EXPIRED;
    return rc < 0 ? rc : PC_OK;
}
