/* rebuild.c - a region whose home is lost gets another one.
 *
 * What there is of it: every server's generations hold blocks of versions that they are labelled
 * with, and so do the layers of its own commits that it retains. The registry knows which of those are the same in the newest version, and says who is to be
 * the new home. Each other server stages the blocks that it is to give as a layer (_stage_cached);
 * the new home pulls those, writes them, and what it has itself, into a new store (pc_engine_rebuild_begin,
 * _take, _copy, _seal), and becomes
 * the home when it hears that the registry has written it down (a definition, or _set_homes). Until
 * then the store is `prepared`: nobody is served from it, and after a crash of this server it is
 * again just that.
 *
 * A home that lives moves in much the same way: move.c, which says what a term is.
 *
 * Fetches that wait for a home: miss/rehome.c. Locks: region.lock for what is prepared and for the homes.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ------------------------------------------------------------ what is here */

/* Also of a base that its home has left: it is no generation's that others fill. */
static bool has_cached(const struct pc__generation *generation)
{
    return !generation->complete || (generation->was_base && !generation->is_torn);
}

static struct pc__generation *generation_at(struct pc__region *region, uint64_t version)
{
    pc__each(link, &region->generations)
    {
        struct pc__generation *g = pc__of(link, struct pc__generation, link);
        if (has_cached(g) && g->version == version)
            return g;
    }
    return NULL;
}

/* What is here of one version; with references. */
struct held {
    struct pc__generation *generation; /* or NULL */
    struct pc__layer *layer;           /* what its commit wrote, or NULL */
};

/* Error, where it is neither. */
static int hold(struct pc_engine *engine, struct pc__region *region, uint64_t id, uint64_t version,
                struct held *held)
{
    *held = (struct held){0};
    if (region) {
        held->layer = pc__retained_at(engine, id, version);
        pthread_mutex_lock(&region->lock);
        held->generation = generation_at(region, version);
        if (held->generation)
            pc__ref_take(&held->generation->refs);
        pthread_mutex_unlock(&region->lock);
    }
    return held->generation || held->layer
               ? PC_OK
               : pc__fail(PC_ERR_NO_GENERATION, "version %llu of variable %llu",
                          (unsigned long long)version, (unsigned long long)id);
}

static void let_go(struct pc_engine *engine, struct held *held)
{
    pc__generation_put(engine, held->generation);
    pc__layer_put(held->layer);
}

PC_API int64_t pc_engine_cached_versions(pc_engine *engine, uint64_t id, uint64_t *versions,
                                         size_t capacity)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return 0;
    size_t n = pc__retained_versions(engine, id, versions, capacity), n_retained = n;
    n_retained = n_retained < capacity ? n_retained : capacity;
    pthread_mutex_lock(&region->lock);
    pc__each(link, &region->generations)
    {
        const struct pc__generation *g = pc__of(link, struct pc__generation, link);
        bool is_new = has_cached(g) && g->present.n_set;
        for (size_t i = 0; is_new && i < n_retained; i++)
            is_new = versions[i] != g->version;
        if (!is_new)
            continue;
        if (n < capacity)
            versions[n] = g->version;
        n++;
    }
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return (int64_t)n;
}

static int add_layer(struct pc__blockset *blocks, const struct pc__layer *layer)
{
    for (uint32_t i = 0; layer && i < layer->n_runs; i++)
        if (pc__blockset_add(blocks, layer->runs[i].first_block, layer->runs[i].n_blocks) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
    return PC_OK;
}

static int add_set(struct pc__blockset *blocks, const struct pc__blockset *from)
{
    uint64_t at = 0, limit = from->n_blocks;
    while ((at = pc__blockset_next(from, at, limit)) < limit) {
        uint64_t end = pc__blockset_next_absent(from, at, limit);
        if (pc__blockset_add(blocks, at, end - at) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        at = end;
    }
    return PC_OK;
}

int64_t pc__rebuild_runs_of(const struct pc__blockset *blocks, struct pc_run *runs, size_t capacity)
{
    uint64_t at = 0, limit = blocks->n_blocks;
    size_t n = 0;
    while ((at = pc__blockset_next(blocks, at, limit)) < limit) {
        uint64_t end = pc__blockset_next_absent(blocks, at, limit);
        if (n < capacity)
            runs[n] = (struct pc_run){.first_block = at, .n_blocks = end - at};
        n++;
        at = end;
    }
    return (int64_t)n;
}

PC_API int64_t pc_engine_cached_blocks(pc_engine *engine, uint64_t id, uint64_t version,
                                       struct pc_run *runs, size_t capacity)
{
    struct pc__region *region = pc__region_get(engine, id);
    struct pc__blockset blocks = {0};
    struct held held;
    int64_t n = 0;
    if (!hold(engine, region, id, version, &held)) {
        n = pc__blockset_init(&blocks, region->n_blocks);
        if (!n)
            n = add_layer(&blocks, held.layer);
        if (!n && held.generation) {
            pthread_mutex_lock(&region->lock);
            if (held.generation->version == version)
                n = add_set(&blocks, &held.generation->present);
            pthread_mutex_unlock(&region->lock);
        }
        if (!n)
            n = pc__rebuild_runs_of(&blocks, runs, capacity);
        pc__blockset_free(&blocks);
    }
    let_go(engine, &held);
    if (region)
        pc__region_put(engine, region);
    return n;
}

/* single: of a home, where the machine makes huge pages (huge_pages.h). */
static int write_all(int fd, const void *bytes, uint64_t n_bytes, uint64_t offset, bool single)
{
    const uint8_t *at = bytes;
    int rc = single ? pc__huge_pages_prevent(fd, offset, n_bytes) : PC_OK;
    if (rc)
        return rc;
    while (n_bytes) {
        ssize_t wrote = pwrite(fd, at, n_bytes, (off_t)offset);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return pc__fail_errno("writing %llu bytes of a region that is rebuilt",
                                  (unsigned long long)n_bytes);
        at += wrote;
        offset += (uint64_t)wrote;
        n_bytes -= (uint64_t)wrote;
    }
    return PC_OK;
}

int pc__rebuild_write(int fd, const void *bytes, uint64_t n_bytes, uint64_t offset)
{
    return write_all(fd, bytes, n_bytes, offset, false);
}

static int read_all(int fd, uint8_t *out, uint64_t n_bytes, uint64_t offset)
{
    while (n_bytes) {
        ssize_t got = pread(fd, out, n_bytes, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return pc__fail_errno("reading a generation");
        out += got;
        offset += (uint64_t)got;
        n_bytes -= (uint64_t)got;
    }
    return PC_OK;
}

/* Read under region.lock: nothing of a generation is evicted, nor does it move, meanwhile. */
static int copy_some(struct pc__region *region, const struct held *held, uint64_t version,
                     uint64_t first, uint64_t n, uint8_t *out)
{
    const struct pc__generation *generation = held->generation;
    const struct pc__layer *layer = held->layer;
    int rc = PC_OK;
    pthread_mutex_lock(&region->lock);
    for (uint64_t at = first, end = first + n, k = 0; at < end && !rc;
         at += k, out += k << PC_BLOCK_SHIFT) {
        uint64_t of_layer = layer ? pc__layer_find(layer, at, &k) : UINT64_MAX;
        if (of_layer != UINT64_MAX) {
            k = k < end - at ? k : end - at;
            rc = pc__layer_read(layer, of_layer, k, out);
            continue;
        }
        k = generation && generation->version == version
                ? pc__blockset_next_absent(&generation->present, at, end) - at
                : 0;
        rc = k ? read_all(generation->memfd, out, k << PC_BLOCK_SHIFT, at << PC_BLOCK_SHIFT)
               : pc__fail(PC_ERR_NO_GENERATION,
                          "blocks of version %llu of variable %llu are not here any more",
                          (unsigned long long)version, (unsigned long long)region->id);
    }
    pthread_mutex_unlock(&region->lock);
    return rc;
}

#define IN_PLACE UINT64_MAX

/* Into the file, one after the other from offset on; or IN_PLACE, each where it lies in the region. */
static int copy_runs(struct pc__region *region, const struct held *held, uint64_t version,
                     const struct pc_run *runs, size_t n_runs, int fd, uint64_t offset)
{
    char why[PC__HUGE_PAGES_WHY_BYTES];
    const bool in_place = offset == IN_PLACE, single = in_place && pc__huge_pages(why);
    uint8_t *some = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    int rc = some ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a copy of blocks");
    for (size_t i = 0; i < n_runs && !rc; i++) {
        uint64_t at = runs[i].first_block, end = at + runs[i].n_blocks, n;
        offset = in_place ? at << PC_BLOCK_SHIFT : offset;
        for (; at < end && !rc; at += n, offset += n << PC_BLOCK_SHIFT) {
            n = end - at < PC__BOUNCE_BLOCKS ? end - at : PC__BOUNCE_BLOCKS;
            rc = copy_some(region, held, version, at, n, some);
            if (!rc)
                rc = write_all(fd, some, n << PC_BLOCK_SHIFT, offset, single);
        }
    }
    free(some);
    return rc;
}

int64_t pc__rebuild_check_runs(const struct pc_run *runs, size_t n_runs, uint64_t n_blocks)
{
    uint64_t end = 0, n = 0;
    for (size_t i = 0; i < n_runs; i++) {
        if (!runs[i].n_blocks || runs[i].first_block < end || runs[i].first_block >= n_blocks ||
            runs[i].n_blocks > n_blocks - runs[i].first_block)
            return pc__fail(PC_ERR_RANGE, "run %zu does not lie in the region, or not after the "
                                          "one before it", i);
        end = runs[i].first_block + runs[i].n_blocks;
        n += runs[i].n_blocks;
    }
    return n ? (int64_t)n : pc__fail(PC_ERR_RANGE, "a layer of no blocks");
}

int64_t pc__rebuild_stage(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                          uint64_t commit_id, const struct pc_run *runs, size_t n_runs,
                          pc__blocks_write *write, void *arg)
{
    int64_t n = pc__rebuild_check_runs(runs, n_runs, region->n_blocks);
    if (n < 0)
        return n;
    const struct pc__layer_head head = {.magic = PC__LAYER_MAGIC,
                                        .region = region->id,
                                        .commit_id = commit_id,
                                        .base_version = version,
                                        .n_blocks = (uint64_t)n,
                                        .data_offset = pc__layer_data_offset(n_runs),
                                        .n_runs = (uint32_t)n_runs};
    uint64_t bytes = head.data_offset + (head.n_blocks << PC_BLOCK_SHIFT), inode;
    int fd = pc__memfd_make(bytes, &inode);
    if (fd < 0)
        return fd;
    int rc = write_all(fd, &head, sizeof head, 0, false);
    if (!rc)
        rc = write_all(fd, runs, n_runs * sizeof *runs, sizeof head, false);
    if (!rc)
        rc = write(arg, runs, n_runs, fd, head.data_offset);
    if (rc)
        close(fd);
    else
        rc = pc__layer_stage_made(engine, region->id, commit_id, bytes, fd);
    return rc ? rc : (int64_t)bytes;
}

struct cached {
    struct pc__region *region;
    const struct held *held;
    uint64_t version;
};

static int write_cached(void *arg, const struct pc_run *runs, size_t n_runs, int fd, uint64_t offset)
{
    const struct cached *cached = arg;
    return copy_runs(cached->region, cached->held, cached->version, runs, n_runs, fd, offset);
}

PC_API int64_t pc_engine_stage_cached(pc_engine *engine, uint64_t id, uint64_t version,
                                      uint64_t commit_id, const struct pc_run *runs,
                                      size_t n_runs)
{
    struct pc__region *region = pc__region_get(engine, id);
    struct held held;
    int64_t rc = hold(engine, region, id, version, &held);
    struct cached cached = {region, &held, version};
    if (!rc)
        rc = pc__rebuild_stage(engine, region, version, commit_id, runs, n_runs, write_cached,
                               &cached);
    let_go(engine, &held);
    if (region)
        pc__region_put(engine, region);
    return rc;
}

/* ------------------------------------------------------------ the new home */

static int keep_prepared(struct pc_engine *engine, const struct pc__region *region, bool sealed,
                          bool prepared)
{
    const struct pc__store *base = &region->prepared->base;
    struct pc__kept kept = pc__kept_of_store(region, PC__KEPT_HOME, base, base->version);
    kept.sealed = sealed;
    kept.reserved[1] = prepared;
    kept.reserved[PC__KEPT_UNCHECKED_AT] = region->prepared->is_unchecked;
    memcpy(kept.reserved + PC__KEPT_TERM_AT, &region->prepared_term, sizeof region->prepared_term);
    return pc__keep(engine, &kept, base->memfd);
}

static int new_home(struct pc_engine *engine, const struct pc_region_info *info,
                    const struct pc_run *lost, size_t n_lost, struct pc__home **out)
{
    struct pc__home *home = pc__home_new();
    const bool in_file = info->medium == PC_MEDIUM_FILE, has_notes = n_lost || in_file;
    uint64_t inode, notes_bytes = has_notes ? pc__lost_notes_bytes(info->length_bytes) : 0;
    const bool on_disk = info->medium == PC_MEDIUM_DISK || engine->durable;
    if (!home)
        return pc__fail(PC_ERR_NO_MEMORY, "a home record");
    int fd = pc__store_file_make(engine, info->length_bytes + notes_bytes, on_disk, in_file, &inode);
    int rc = fd < 0 ? fd
                    : pc__store_open(&home->base, fd, inode, info->length_bytes, info->version, on_disk);
    if (!rc && has_notes)
        rc = pc__lost_open(&home->base, info->length_bytes, in_file, lost, n_lost, &home->lost);
    if (rc) {
        pc__home_free(engine, home, info->length_bytes);
        return rc;
    }
    home->applied = home->latest = home->history_from = info->version;
    *out = home;
    return PC_OK;
}

/* Under region.lock. */
static int may_prepare(const struct pc__region *region, const struct pc_region_info *info)
{
    if (region->forgotten || region->state == PC__REGION_RETIRED)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu was freed",
                        (unsigned long long)info->region);
    if (region->home || region->state == PC__REGION_CREATING)
        return pc__fail(PC_ERR_EXISTS, "variable %llu is homed here",
                        (unsigned long long)info->region);
    if (region->former)
        return pc__fail(PC_ERR_TIMEOUT, "the former home of variable %llu is still read here: ask again",
                        (unsigned long long)info->region);
    if (region->n_blocks && (region->length_bytes != info->length_bytes ||
                             region->base_address != info->base_address))
        return pc__fail(PC_ERR_PROTOCOL, "variable %llu differs from what is known here",
                        (unsigned long long)info->region);
    return PC_OK;
}

void pc__rebuild_end(struct pc_engine *engine, struct pc__region *region, struct pc__home *prepared)
{
    if (!prepared)
        return;
    pthread_mutex_lock(&region->lock);
    const bool is_home = region->home || region->former;
    pthread_mutex_unlock(&region->lock);
    if (!is_home) /* what still comes of it goes with the next attempt, or with the region */
        pc__history_drop(engine->history, region->id);
    pc__home_free(engine, prepared, region->length_bytes);
}

PC_API int pc_engine_rebuild_begin(pc_engine *engine, const struct pc_region_info *info,
                                   const struct pc_run *lost, size_t n_lost, int *fd)
{
    *fd = -1;
    if (!pc__region_info_valid(info))
        return pc__fail(PC_ERR_RANGE, "variable %llu: base or length",
                        (unsigned long long)info->region);
    if (n_lost && pc__rebuild_check_runs(lost, n_lost, info->length_bytes >> PC_BLOCK_SHIFT) < 0)
        return PC_ERR_RANGE;
    struct pc__home *home = NULL;
    int rc = new_home(engine, info, lost, n_lost, &home);
    struct pc__home *old = home;
    struct pc__region *region = rc ? NULL : pc__region_get_or_add(engine, info->region);
    if (!rc && !region)
        rc = pc__fail(PC_ERR_NO_MEMORY, "a region record");
    if (!rc && (*fd = fcntl(home->base.memfd, F_DUPFD_CLOEXEC, 0)) < 0)
        rc = pc__fail_errno("dup of a home memfd");
    if (!rc) {
        pthread_mutex_lock(&region->lock);
        rc = may_prepare(region, info);
        if (!rc) {
            (void)pc__region_sized(region, info->base_address, info->length_bytes);
            old = region->prepared; /* of an attempt that came to nothing */
            region->in_file |= info->medium == PC_MEDIUM_FILE;
            region->prepared = home;
            region->prepared_sealed = false;
            region->prepared_term = info->term;
            (void)keep_prepared(engine, region, false, true); /* the seal does it again */
        }
        else if (region->former)
            pc__worker_queue(engine, region); /* should it not have been, for want of memory */
        pthread_mutex_unlock(&region->lock);
    }
    if (!rc) /* also what a home before had: versions that came since would be missing between */
        pc__history_drop(engine->history, info->region);
    pc__home_free(engine, old, info->length_bytes);
    if (rc && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
    if (region)
        pc__region_put(engine, region);
    return rc;
}

/* Owns fd. */
static int home_of_file(struct pc_engine *engine, const struct pc_region_info *info, int fd,
                        struct pc__home **out)
{
    struct pc__home *home = pc__home_new();
    const bool in_file = info->medium == PC_MEDIUM_FILE;
    const uint64_t notes_bytes = in_file ? pc__lost_notes_bytes(info->length_bytes) : 0;
    struct stat st;
    if (!home) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a home record");
    }
    int rc = fstat(fd, &st) ? pc__fail_errno("fstat of a home's file") : PC_OK;
    if (rc)
        close(fd);
    else
        rc = pc__store_open(&home->base, fd, pc__file_id(&st), info->length_bytes, info->version, true);
    if (!rc && (uint64_t)st.st_size < info->length_bytes + notes_bytes)
        rc = pc__fail(PC_ERR_PROTOCOL, "a file of %llu bytes for a home of %llu",
                      (unsigned long long)st.st_size,
                      (unsigned long long)(info->length_bytes + notes_bytes));
    if (!rc)
        rc = pc__memfd_blocks(&home->base.data, fd, info->length_bytes);
    if (!rc && in_file)
        rc = pc__lost_open(&home->base, info->length_bytes, true, NULL, 0, &home->lost);
    const struct pc__kept kept = {.region = info->region,
                                  .version = info->version,
                                  .base_address = info->base_address,
                                  .length_bytes = info->length_bytes,
                                  .reserved = {[PC__KEPT_UNCHECKED_AT] = 1}};
    if (!rc)
        rc = pc__region_adopt_unchecked(engine, home, &kept);
    home->applied = home->latest = home->history_from = info->version;
    *out = home;
    return rc;
}

/* Under region.lock: by a call before this one. */
static bool is_prepared_as(const struct pc__region *region, const struct pc_region_info *info, int fd)
{
    const struct pc__home *home = region->prepared;
    struct stat st;
    return home && region->prepared_sealed && region->prepared_term == info->term && !fstat(fd, &st) &&
           home->base.version == info->version && home->base.inode == pc__file_id(&st);
}

PC_API int pc_engine_rebuild_from_file(pc_engine *engine, const struct pc_region_info *info, int fd)
{
    if (!pc__region_info_valid(info))
        return pc__fail(PC_ERR_RANGE, "variable %llu: base or length",
                        (unsigned long long)info->region);
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return pc__fail_errno("dup of a home's file");
    struct pc__home *home = NULL, *old = NULL;
    struct pc__region *region = pc__region_get_or_add(engine, info->region);
    if (!region) {
        close(own);
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    }
    pthread_mutex_lock(&region->lock);
    int rc = may_prepare(region, info);
    const bool is_there = !rc && is_prepared_as(region, info, own);
    if (!rc && !is_there) {
        old = region->prepared;
        region->prepared = NULL;
    }
    pthread_mutex_unlock(&region->lock);
    if (rc || is_there) {
        close(own);
        pc__region_put(engine, region);
        return rc ? rc : pc__keep_wait(engine);
    }
    if (old) /* first: the keeper knows it by its file, which may be this one */
        pc__home_free(engine, old, info->length_bytes);
    pc__history_drop(engine->history, info->region);
    rc = home_of_file(engine, info, own, &home);
    if (!rc) {
        pthread_mutex_lock(&region->lock);
        rc = region->prepared ? pc__fail(PC_ERR_TIMEOUT, "variable %llu is being rebuilt here: ask again",
                                         (unsigned long long)info->region)
                              : may_prepare(region, info);
        if (!rc) {
            (void)pc__region_sized(region, info->base_address, info->length_bytes);
            region->in_file |= info->medium == PC_MEDIUM_FILE;
            region->prepared = home;
            region->prepared_term = info->term;
            rc = keep_prepared(engine, region, true, true);
            region->prepared_sealed = !rc;
            home = NULL;
        }
        pthread_mutex_unlock(&region->lock);
    }
    if (home) {
        home->base.inode = 0; /* what the keeper has of this file is another's */
        pc__home_free(engine, home, info->length_bytes);
    }
    pc__region_put(engine, region);
    return rc ? rc : pc__keep_wait(engine);
}

int pc__rebuild_is_filled_by(const struct pc__region *region, int fd)
{
    struct stat st;
    if (fstat(fd, &st))
        return pc__fail_errno("fstat of a home memfd");
    if (!region->prepared || region->prepared_sealed || region->prepared->base.inode != pc__file_id(&st))
        return pc__fail(PC_ERR_NO_REGION, "variable %llu is not being rebuilt by this attempt",
                        (unsigned long long)region->id);
    return PC_OK;
}

/* One run of the layer, which is on disk. */
static int copy_run(const struct pc__layer *layer, uint32_t i, int fd, bool single)
{
    const struct pc_run *run = &layer->runs[i];
    uint8_t *some = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    int rc = some ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a copy of blocks");
    for (uint64_t done = 0, n; done < run->n_blocks && !rc; done += n) {
        n = run->n_blocks - done < PC__BOUNCE_BLOCKS ? run->n_blocks - done : PC__BOUNCE_BLOCKS;
        rc = pc__layer_read(layer, layer->positions[i] + done, n, some);
        if (!rc)
            rc = write_all(fd, some, n << PC_BLOCK_SHIFT, (run->first_block + done) << PC_BLOCK_SHIFT,
                           single);
    }
    free(some);
    return rc;
}

static int write_layer(const struct pc__layer *layer, uint64_t n_blocks, int fd)
{
    char why[PC__HUGE_PAGES_WHY_BYTES];
    const bool single = pc__huge_pages(why);
    int rc = PC_OK;
    for (uint32_t i = 0; i < layer->n_runs && !rc; i++) {
        const struct pc_run *run = &layer->runs[i];
        if (run->first_block >= n_blocks || run->n_blocks > n_blocks - run->first_block)
            return pc__fail(PC_ERR_RANGE, "blocks outside of the region");
        rc = layer->on_disk ? copy_run(layer, i, fd, single)
                            : write_all(fd, pc__layer_at(layer, layer->positions[i]),
                                        run->n_blocks << PC_BLOCK_SHIFT,
                                        run->first_block << PC_BLOCK_SHIFT, single);
    }
    return rc;
}

/* Blocks that were lost when it was begun, and that a commit has written since. Which of the versions up
 * to the layer's did is not known here: older ones are refused. In a region that is in a file, it is every
 * block that commits have written. The versions that its history goes back to have them: a record of blocks
 * that were still in the file is not moved, and ends it (pc_engine_stage_record). So they are noted as of
 * the first version that a commit can make. */
static int note_found(struct pc__region *region, int fd, const struct pc_run *runs, size_t n_runs,
                      uint64_t version)
{
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->prepared;
    int rc = pc__rebuild_is_filled_by(region, fd);
    if (!rc && home->lost)
        rc = pc__lost_found(home->lost, runs, n_runs, home->lost->in_file ? 1 : version);
    pthread_mutex_unlock(&region->lock);
    return rc;
}

PC_API int pc_engine_rebuild_take(pc_engine *engine, uint64_t id, int fd, uint64_t commit_id)
{
    struct pc__region *region = pc__region_get(engine, id);
    struct pc__layer *layer = pc__layer_get(engine, pc__layer_id(id, commit_id));
    int rc = PC_ERR_NO_REGION;
    if (region) {
        pthread_mutex_lock(&region->lock);
        rc = pc__rebuild_is_filled_by(region, fd);
        pthread_mutex_unlock(&region->lock);
    }
    if (!rc && !layer)
        rc = pc__fail(PC_ERR_NO_VERSION, "nothing is staged for variable %llu",
                      (unsigned long long)id);
    if (!rc && layer->flags)
        rc = pc__fail(PC_ERR_PROTOCOL, "a delta of variable %llu has no content",
                      (unsigned long long)id);
    if (!rc) /* should another attempt begin meanwhile, fd is not of that, and the seal is refused */
        rc = write_layer(layer, region->n_blocks, fd);
    if (!rc)
        rc = note_found(region, fd, layer->runs, layer->n_runs, layer->head->base_version);
    pc__layer_put(layer);
    if (!rc)
        pc__layer_drop_staged(engine, id, commit_id);
    if (region)
        pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_rebuild_copy(pc_engine *engine, uint64_t id, int fd, uint64_t version,
                                  const struct pc_run *runs, size_t n_runs)
{
    struct pc__region *region = pc__region_get(engine, id);
    struct held held;
    int64_t rc = hold(engine, region, id, version, &held);
    if (!rc)
        rc = pc__rebuild_check_runs(runs, n_runs, region->n_blocks);
    if (rc > 0)
        rc = copy_runs(region, &held, version, runs, n_runs, fd, IN_PLACE);
    if (rc >= 0 && n_runs)
        rc = note_found(region, fd, runs, n_runs, version);
    let_go(engine, &held);
    if (region)
        pc__region_put(engine, region);
    return (int)rc;
}

/* Under region.lock. Commits have gone on since it was begun. */
static int set_version(struct pc_engine *engine, struct pc__region *region, uint64_t version)
{
    struct pc__home *home = region->prepared;
    if (version < home->base.version)
        return pc__fail(PC_ERR_RANGE, "variable %llu is prepared at version %llu, and not before",
                        (unsigned long long)region->id, (unsigned long long)home->base.version);
    /* After a restart such a record would say that this version was being replaced. */
    if (pc__history_noted(engine->history, region->id, version))
        return pc__fail(PC_ERR_RANGE, "the history of variable %llu goes beyond version %llu",
                        (unsigned long long)region->id, (unsigned long long)version);
    home->base.version = home->applied = home->latest = home->history_from = version;
    return PC_OK;
}

/* version: NULL, the one that it was begun with. */
static int seal(struct pc_engine *engine, uint64_t id, int fd, const uint64_t *version)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    (void)pc__engine_makes_huge_pages(engine); /* its writer may have met them */
    uint64_t at = 0;
    pthread_mutex_lock(&region->lock);
    int rc = pc__rebuild_is_filled_by(region, fd);
    if (!rc && version)
        rc = set_version(engine, region, *version);
    if (!rc)
        at = region->prepared->base.version;
    pthread_mutex_unlock(&region->lock);
    if (!rc)
        rc = pc__move_end_history(engine, region, fd, at);
    pthread_mutex_lock(&region->lock);
    if (!rc)
        rc = pc__rebuild_is_filled_by(region, fd);
    if (!rc) {
        struct pc__store *base = &region->prepared->base;
        rc = pc__memfd_blocks(&base->data, base->memfd, region->length_bytes);
        if (!rc) {
            rc = keep_prepared(engine, region, true, true);
            region->prepared_sealed = !rc;
        }
    }
    pthread_mutex_unlock(&region->lock);
    if (!rc)
        rc = pc__keep_wait(engine); /* the journal says next that it is here */
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_rebuild_seal(pc_engine *engine, uint64_t id, int fd)
{
    return seal(engine, id, fd, NULL);
}

PC_API int pc_engine_rebuild_seal_at(pc_engine *engine, uint64_t id, int fd, uint64_t version)
{
    return seal(engine, id, fd, &version);
}

PC_API int pc_engine_wait_for_keeper(pc_engine *engine)
{
    return pc__keep_wait(engine);
}

PC_API int pc_engine_rebuild_drop(pc_engine *engine, uint64_t id, int fd)
{
    struct stat st = {0};
    if (fd >= 0 && fstat(fd, &st))
        return pc__fail_errno("fstat of a home memfd");
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_OK;
    struct pc__home *dropped = NULL;
    pthread_mutex_lock(&region->lock);
    if (region->prepared && (fd < 0 || region->prepared->base.inode == pc__file_id(&st))) {
        dropped = region->prepared;
        region->prepared = NULL;
    }
    pthread_mutex_unlock(&region->lock);
    pc__rebuild_end(engine, region, dropped);
    pc__region_put(engine, region);
    return PC_OK;
}

int pc__rebuild_adopt(struct pc_engine *engine, struct pc__region *region,
                      const struct pc__kept *kept, int fd)
{
    struct pc__home *home = region->prepared ? NULL : pc__home_new();
    if (!home) {
        pc__unkeep(engine, kept->inode);
        close(fd);
        return PC_OK; /* it is made again where it is wanted */
    }
    int rc = pc__store_open(&home->base, fd, kept->inode, region->length_bytes, kept->version,
                            kept->on_disk);
    if (!rc)
        rc = pc__memfd_blocks(&home->base.data, fd, region->length_bytes);
    if (!rc)
        rc = pc__region_adopt_notes(engine, region, home, kept);
    if (!rc)
        rc = pc__region_adopt_unchecked(engine, home, kept);
    if (rc && kept->on_disk) { /* which cannot read it: as above */
        pc__home_free(engine, home, region->length_bytes);
        return PC_OK;
    }
    home->applied = home->latest = home->history_from = kept->version;
    region->prepared = home;
    region->prepared_sealed = !rc;
    memcpy(&region->prepared_term, kept->reserved + PC__KEPT_TERM_AT, sizeof region->prepared_term);
    return rc;
}

/* The keeper first: a server that dies in between is the home when it comes back, as the registry has
 * it in its journal. */
int pc__rebuild_become_home(struct pc_engine *engine, struct pc__region *region, uint64_t term)
{
    if (!region->prepared || !region->prepared_sealed)
        return pc__fail(PC_ERR_HOME_LOST, "variable %llu is homed here, and is not here",
                        (unsigned long long)region->id);
    if (term && term < region->prepared_term) /* it was the home then; who is it now is not said here */
        return pc__fail(PC_ERR_TIMEOUT, "variable %llu is prepared here for a later term: ask again",
                        (unsigned long long)region->id);
    region->home = region->prepared;
    int rc = pc__region_home_generation(engine, region);
    region->home = NULL;
    if (rc)
        return rc;
    region->term = region->prepared_term = term;
    (void)keep_prepared(engine, region, true, false); /* else the registry tells the next server */
    region->home = region->prepared;
    region->prepared = NULL;
    uint64_t version = region->home->base.version;
    region->version = version > region->version ? version : region->version;
    if (region->n_blocks >= PC__WARM_LEAST_BLOCKS || region->home->is_unchecked)
        pc__worker_queue(engine, region);
    return PC_OK;
}
