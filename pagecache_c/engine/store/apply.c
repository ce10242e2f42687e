/* apply.c - the worker: a thread that brings published layers into their homes.
 *
 * One layer of version v + 1, where v is applied (a delta is made whole first: parity.c):
 *   1. the blocks that it replaces go to the history, as the record of v; from then on whoever
 *      resolves v finds them there, and v + 1 in the layer: nobody new looks at what will change;
 *   2. the epoch turns, and whoever may still look at the store leaves (replies on their way). The
 *      worker does not wait for long, and does other things meanwhile: the epoch's number is noted;
 *   3. the blocks are punched and written: into the base, if no process has that mapped, else into
 *      the overlay. Punched, because a socket may still hold the page itself (sendfile);
 *   4. the keeper hears the new version, then v + 1 is applied and the layer goes.
 * A server that dies after 1 does 3 again from the layer, which the keeper has: the record of v
 * says that 1 is done. A base that is being changed is marked so at the keeper before the first
 * punch: a new server gives no lease on it until it is whole again.
 *
 * When the base is not leased any more, the overlay is folded into it. While that goes on the
 * overlay still has each of its blocks, so nobody looks at what changes. Not in the middle of 3: with
 * half of a layer the overlay is of no version, and so would be the base.
 *
 * A home may move away at any moment (move.c): the worker finds that out with the next hold of
 * region.lock, and goes no further. What it has begun to write into a base it writes to the end: those
 * who follow the base read on. It alone frees a home that has moved, so one that it is at work on is
 * there. With region.home == home the keeper may be told of it; else the giver has told it otherwise.
 *
 * Locks: the worker takes region.lock for arithmetic, never over copying.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RETRY_NS 1000000000ull /* of a region that failed */
#define LAYERS_A_TURN 16 /* then other regions, and who waits for this one, get theirs */
#define PATIENCE_NS 20000000ull /* with readers; then other regions get their turn */

/* ------------------------------------------------------------------- queue */

/* Under region.lock: it failed. Who queues it before its time does not hurry it: else each open would
 * be a try. */
static void queue_later(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__worker *worker = &engine->worker;
    if (region->queued)
        return;
    pthread_mutex_lock(&worker->lock);
    region->retry_at_ns = pc__now_ns() + RETRY_NS;
    pc__link_push(&worker->later, &region->later); /* all wait equally long: by their times */
    pc__ref_take(&region->refs);
    region->queued = true;
    pthread_mutex_unlock(&worker->lock);
}

/* Under worker.lock: queues those whose time has come. When the next one's comes, or UINT64_MAX. */
static uint64_t queue_due(struct pc__worker *worker)
{
    const uint64_t now = pc__now_ns();
    while (!pc__link_empty(&worker->later)) {
        struct pc__region *region = pc__of(worker->later.next, struct pc__region, later);
        if (region->retry_at_ns > now)
            return region->retry_at_ns;
        pc__link_remove(&region->later);
        if (pc__worker_push(worker, region))
            continue;
        region->retry_at_ns = now + RETRY_NS; /* no memory: as if it had failed */
        pc__link_push(&worker->later, &region->later);
    }
    return UINT64_MAX;
}

static struct timespec timespec_of(uint64_t at_ns)
{
    return (struct timespec){.tv_sec = (time_t)(at_ns / 1000000000u),
                             .tv_nsec = (long)(at_ns % 1000000000u)};
}

/* Until a reader left, or for so long: their number is looked at again after either. */
static bool nap(struct pc__worker *worker, uint64_t n_ns)
{
    const struct timespec until = timespec_of(pc__now_ns() + n_ns);
    pthread_mutex_lock(&worker->lock);
    if (!worker->stopping && !worker->kicked)
        pthread_cond_timedwait(&worker->wake, &worker->lock, &until);
    worker->kicked = false;
    bool stopping = worker->stopping;
    pthread_mutex_unlock(&worker->lock);
    return !stopping;
}

/* Under region.lock, which it drops and takes: waits a little for readers of this epoch and of those
 * before it. 1: they are gone; PC__BUSY: not yet; negative: the engine stops.
 * Connections that stall are closed after fetch_timeout, and with them their replies. */
static int readers_leave(struct pc_engine *engine, struct pc__region *region,
                         struct pc__home *home, uint64_t epoch)
{
    uint64_t until = pc__now_ns() + PATIENCE_NS, now;
    while (!pc__home_left(home, epoch)) {
        now = pc__now_ns();
        home->held_up |= now >= until;
        if (home->held_up)
            return PC__BUSY;
        pthread_mutex_unlock(&region->lock);
        bool goes_on = nap(&engine->worker, until - now);
        pthread_mutex_lock(&region->lock);
        if (!goes_on)
            return PC_ERR_CLOSED;
    }
    home->held_up = false;
    return 1;
}

/* What was replaced goes once nobody looks at it any more. 1, PC__BUSY or negative, as above. */
static int let_go(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    pthread_mutex_lock(&region->lock);
    if (!home->leaving && home->folded.memfd < 0) {
        pthread_mutex_unlock(&region->lock);
        return 1;
    }
    int rc = readers_leave(engine, region, home, home->leaving_in);
    struct pc__layer *layer = home->leaving;
    struct pc__store folded = home->folded;
    if (rc == 1) {
        home->leaving = NULL;
        home->folded = (struct pc__store){.memfd = -1};
    }
    pthread_mutex_unlock(&region->lock);
    if (rc != 1)
        return rc;
    if (layer)
        pc__layer_end(engine, layer);
    pc__store_close(engine, &folded, region->length_bytes);
    return 1;
}

/* ------------------------------------------------------------------- steps */

static int write_all(int fd, const uint8_t *bytes, uint64_t n_bytes, uint64_t offset)
{
    while (n_bytes) {
        ssize_t wrote = pwrite(fd, bytes, n_bytes, (off_t)offset);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return pc__fail_disk("writing to a home");
        bytes += wrote;
        offset += (uint64_t)wrote;
        n_bytes -= (uint64_t)wrote;
    }
    return PC_OK;
}

/* Of a file on disk no reply sends the pages themselves. */
static int replace(const struct pc__store *store, uint64_t first, uint64_t n, const uint8_t *bytes,
                   bool single)
{
    const int memfd = store->memfd;
    uint64_t offset = first << PC_BLOCK_SHIFT, length = n << PC_BLOCK_SHIFT;
    if (store->on_disk)
        return write_all(memfd, bytes, length, offset);
    while (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                     (off_t)length))
        if (errno != EINTR)
            return pc__fail_errno("punching a home");
    int rc = single ? pc__huge_pages_prevent(memfd, offset, length) : PC_OK;
    return rc ? rc : write_all(memfd, bytes, length, offset);
}

struct old_blocks {
    struct pc_engine *engine;
    struct pc__region *region;
    const struct pc__home *home;
};

/* For the history: what the applied version has there. Only this thread changes it. */
static int read_old(void *arg, uint64_t block, uint64_t n, uint8_t *out)
{
    struct old_blocks *old = arg;
    struct pc__region *region = old->region;
    const struct pc__home *home = old->home;
    while (n) {
        pthread_mutex_lock(&region->lock);
        struct pc__home_part part =
            pc__home_resolve(old->engine, region, home, home->applied, block, n);
        int rc = part.kind == PC__HOME_LOST && pc__home_damaged(home, block, 1) == block ? PC_ERR_HOME_LOST : PC_OK;
        pthread_mutex_unlock(&region->lock);
        if (rc)
            return rc;
        if (part.kind == PC__HOME_ZEROS || part.kind == PC__HOME_LOST || part.kind == PC__HOME_FILE)
            /* which nobody is given */
            memset(out, 0, part.n_blocks << PC_BLOCK_SHIFT);
        else if (part.kind == PC__HOME_MEMORY)
            memcpy(out, part.bytes, part.n_blocks << PC_BLOCK_SHIFT);
        else
            rc = pc__home_compose(old->engine, region, home, home->applied, part.kind, block, out);
        if (rc)
            return rc;
        out += part.n_blocks << PC_BLOCK_SHIFT;
        block += part.n_blocks;
        n -= part.n_blocks;
    }
    return PC_OK;
}

/* The store is whole, at that version. 1: it is the keeper's; 0: the home has moved away, and what there
 * is of it is not a home's; negative. */
static int keep_store(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                      enum pc__kept_kind kind, const struct pc__store *store, uint64_t version)
{
    int rc = 0;
    pthread_mutex_lock(&region->lock);
    if (region->home == home) {
        const struct pc__kept kept = pc__kept_of_store(region, kind, store, version);
        rc = pc__keep(engine, &kept, store->memfd);
        rc = rc ? rc : 1;
    } else if (kind == PC__KEPT_HOME) {
        pc__move_base_is_whole(engine, region, home, version);
    }
    pthread_mutex_unlock(&region->lock);
    return rc;
}

/* 1: there is one now; 0: the home has moved away; negative. */
static int make_overlay(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    struct pc__store overlay = {.memfd = -1};
    uint64_t inode;
    const bool on_disk = home->base.on_disk;
    const uint64_t notes_bytes = on_disk ? pc__overlay_notes_bytes(region->length_bytes) : 0;
    int fd = pc__store_file_make(engine, region->length_bytes + notes_bytes, on_disk, true, &inode);
    if (fd < 0)
        return fd;
    int rc = pc__store_open(&overlay, fd, inode, region->length_bytes, home->applied, on_disk);
    if (rc) {
        pc__store_close(engine, &overlay, region->length_bytes);
        return rc;
    }
    rc = keep_store(engine, region, home, PC__KEPT_OVERLAY, &overlay, overlay.version);
    if (rc != 1) { /* without it a new server would have none of what is written there */
        pc__store_close(engine, &overlay, region->length_bytes);
        return rc;
    }
    pthread_mutex_lock(&region->lock);
    home->overlay = overlay;
    pthread_mutex_unlock(&region->lock);
    return 1;
}

struct change {
    struct pc_engine *engine;
    struct pc__region *region; /* +1 ref */
    struct pc__home *home;     /* which stays until it has heard */
};

/* In the keeper's thread. */
static void change_heard(void *arg, int rc, bool cancelled)
{
    struct change *change = arg;
    struct pc__region *region = change->region;
    pthread_mutex_lock(&region->lock);
    change->home->change_said = false;
    change->home->change_heard = !rc;
    change->home->change_rc = rc;
    if (!cancelled)
        pc__worker_queue(change->engine, region);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(change->engine, region);
    free(change);
}

/* Under region.lock. PC_OK: heard; PC__BUSY: change_heard is called. */
static int say_change(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    struct pc__kept kept = pc__kept_of_store(region, PC__KEPT_HOME, &home->base, home->base.version);
    struct change *change = malloc(sizeof *change);
    if (!change)
        return pc__fail(PC_ERR_NO_MEMORY, "a message to the keeper");
    *change = (struct change){engine, region, home};
    kept.reserved[0] = true;
    int rc = pc__keep(engine, &kept, home->base.memfd);
    if (!rc)
        rc = pc__keep_when(engine, change_heard, change);
    home->change_said = rc == 1; /* it waits for our lock */
    home->change_heard = rc == PC_OK;
    if (rc == 1)
        pc__ref_take(&region->refs); /* which change_heard drops */
    else
        free(change);
    return rc == 1 ? PC__BUSY : rc;
}

/* That the base is being changed is heard before it is: else the next server would take it for whole.
 * 1: it may change now; 0: the home has moved away; PC__BUSY: not heard yet; negative. A slow keeper holds up this region alone: who
 * opens it meanwhile takes a fork. */
static int may_change_base(struct pc_engine *engine, struct pc__region *region,
                           struct pc__home *home)
{
    if (home->n_segments)
        return 1;
    pthread_mutex_lock(&region->lock);
    const bool stays = region->home == home;
    int rc = stays ? home->change_rc : PC_OK;
    home->change_rc = PC_OK;
    const bool failed = rc != PC_OK;
    if (stays && !failed && home->change_said)
        rc = PC__BUSY;
    else if (stays && !failed && !home->change_heard)
        rc = say_change(engine, region, home);
    pthread_mutex_unlock(&region->lock);
    if (!stays)
        return 0;
    if (failed) {
        char text[PC__KEEPING_TEXT_BYTES];
        pc__keep_error_text(engine, rc, text, sizeof text);
        return pc__fail(rc, "%s", text);
    }
    return rc ? rc : 1;
}

/* The base is whole again, at that version. 1, 0 or negative, as keep_store. */
static int keep_base(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                     uint64_t version)
{
    if (home->n_segments)
        return 1;
    pthread_mutex_lock(&region->lock);
    home->change_heard = false; /* also where it cannot be said: then the change is said anew */
    pthread_mutex_unlock(&region->lock);
    return keep_store(engine, region, home, PC__KEPT_HOME, &home->base, version);
}

/* n blocks that the file has at offset. some: PC__BOUNCE_BLOCKS. */
static int replace_from_disk(const struct pc__store *store, uint64_t first, uint64_t n, int fd,
                             uint64_t offset, uint8_t *some)
{
    int rc = PC_OK;
    for (uint64_t done = 0, k; done < n && !rc; done += k) {
        k = n - done < PC__BOUNCE_BLOCKS ? n - done : PC__BOUNCE_BLOCKS;
        rc = pc__disk_file_read(fd, some, k << PC_BLOCK_SHIFT, offset + (done << PC_BLOCK_SHIFT));
        if (!rc)
            rc = replace(store, first + done, k, some, false);
    }
    return rc;
}

static uint8_t *bounce(void)
{
    uint8_t *some = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    if (!some)
        (void)pc__fail(PC_ERR_NO_MEMORY, "a copy of blocks");
    return some;
}

static int write_layer(struct pc_engine *engine, const struct pc__layer *layer,
                       const struct pc__store *store)
{
    uint8_t *some = layer->on_disk ? bounce() : NULL;
    if (layer->on_disk && !some)
        return PC_ERR_NO_MEMORY;
    int rc = PC_OK;
    bool single = pc__engine_makes_huge_pages(engine);
    for (uint32_t i = 0; i < layer->n_runs && !rc; i++) {
        const uint64_t at = layer->positions[i];
        const struct pc_run *run = &layer->runs[i];
        rc = some ? replace_from_disk(store, run->first_block, run->n_blocks, layer->memfd,
                                      layer->data_offset + (at << PC_BLOCK_SHIFT), some)
                  : replace(store, run->first_block, run->n_blocks, pc__layer_at(layer, at), single);
    }
    free(some);
    (void)pc__engine_makes_huge_pages(engine);
    return rc;
}

static int note_layer(struct pc__blockset *data, const struct pc__layer *layer)
{
    for (uint32_t i = 0; i < layer->n_runs; i++)
        if (pc__blockset_add(data, layer->runs[i].first_block, layer->runs[i].n_blocks) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
    return PC_OK;
}

/* The version that the base is at from now on. Under region.lock. */
static void base_is_at(struct pc__region *region, struct pc__home *home, uint64_t version)
{
    struct pc__generation *g = pc__home_base_generation(region);
    home->base.version = version;
    home->base_changes = false;
    if (g)
        pc__generation_is_at(g, version);
}

static int keep_old(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                    const struct pc__layer *layer)
{
    struct old_blocks old = {engine, region, home};
    uint64_t version = layer->version - 1;
    if (home->history_from > version)
        return PC_OK; /* done, maybe before this server died: the base may be half changed since */
    const int rc = pc__history_append(engine->history, region->id, version, layer->runs, layer->n_runs,
                                      read_old, &old);
    return rc != PC_ERR_HOME_LOST /* a damaged block: nobody has that version any more, nor those before it */
               ? rc
               : pc__history_skip(engine->history, region->id, version);
}

/* Under region.lock. */
static struct pc__layer *next_layer(const struct pc__region *region, struct pc__home *home)
{
    const bool none = region->home != home || pc__link_empty(&home->pending);
    return none ? NULL : pc__of(home->pending.next, struct pc__layer, link);
}

/* Applies the next layer. 1: done; 0: there is none, or the home has moved away; PC__BUSY; negative: to be
 * tried again. */
static int apply_next(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    int rc = pc__delta_make_whole(engine, region, home);
    if (rc != 1)
        return rc;
    pthread_mutex_lock(&region->lock);
    struct pc__layer *layer = next_layer(region, home);
    bool to_base = layer && home->overlay.memfd < 0 && !pc__home_base_leased(engine, region, layer->version);
    if (to_base)
        home->base_changes = true; /* no lease on it from here on */
    rc = layer && home->lost /* before the history has what it replaces, and knows no better */
             ? pc__lost_written(home->lost, layer, layer->version)
             : PC_OK;
    pthread_mutex_unlock(&region->lock);
    if (!layer || rc)
        return rc;
    rc = keep_old(engine, region, home, layer);
    if (rc)
        return rc;
    pthread_mutex_lock(&region->lock);
    if (home->history_from != layer->version) { /* else when it was tried before, or by the last server */
        home->history_from = layer->version;
        home->replaced_in = home->epoch;
    }
    rc = readers_leave(engine, region, home, home->replaced_in);
    home->overlay_is_torn |= rc == 1 && !to_base;
    pthread_mutex_unlock(&region->lock);
    if (rc != 1)
        return rc;
    if (to_base)
        rc = may_change_base(engine, region, home);
    else if (home->overlay.memfd < 0)
        rc = make_overlay(engine, region, home);
    if (rc != 1)
        return rc;
    struct pc__store *store = to_base ? &home->base : &home->overlay;
    rc = pc__store_check(region, store);
    if (!rc)
        rc = write_layer(engine, layer, store);
    if (!rc && !to_base && store->on_disk)
        rc = pc__overlay_note(store, layer);
    if (!rc)
        rc = pc__store_check(region, store);
    if (rc)
        return rc;
    rc = to_base ? keep_base(engine, region, home, layer->version)
                 : keep_store(engine, region, home, PC__KEPT_OVERLAY, store, layer->version);
    if (rc != 1) /* the keeper has the old label still: the layer must not go */
        return rc;
    pthread_mutex_lock(&region->lock);
    if (region->home != home) {
        pthread_mutex_unlock(&region->lock);
        return 0;
    }
    rc = note_layer(&store->data, layer);
    if (rc) { /* nobody can be told that the blocks are there: as if nothing was written */
        pthread_mutex_unlock(&region->lock);
        return rc;
    }
    home->applied = store->version = layer->version;
    home->overlay_is_torn = false;
    if (to_base)
        base_is_at(region, home, layer->version);
    pc__link_remove(&layer->link);
    home->leaving = layer;
    home->leaving_in = home->epoch;
    PC__AUDIT(pc__region_audit(region));
    pthread_mutex_unlock(&region->lock);
    PC__AUDIT(pc__history_audit(engine->history));
    pc__count_add(&engine->count.commits_applied, 1);
    return let_go(engine, region, home);
}

static int write_overlay(struct pc_engine *engine, const struct pc__home *home)
{
    const struct pc__store *from = &home->overlay;
    uint8_t *some = from->on_disk ? bounce() : NULL;
    if (from->on_disk && !some)
        return PC_ERR_NO_MEMORY;
    bool single = pc__engine_makes_huge_pages(engine);
    int rc = PC_OK;
    uint64_t at = 0;
    while (!rc && (at = pc__blockset_next(&from->data, at, from->data.n_blocks)) < from->data.n_blocks) {
        uint64_t end = pc__blockset_next_absent(&from->data, at, from->data.n_blocks);
        rc = some ? replace_from_disk(&home->base, at, end - at, from->memfd, at << PC_BLOCK_SHIFT, some)
                  : replace(&home->base, at, end - at, from->map + (at << PC_BLOCK_SHIFT), single);
        at = end;
    }
    free(some);
    (void)pc__engine_makes_huge_pages(engine);
    return rc;
}

static int note_overlay(struct pc__home *home)
{
    const struct pc__blockset *from = &home->overlay.data;
    uint64_t at = 0;
    while ((at = pc__blockset_next(from, at, from->n_blocks)) < from->n_blocks) {
        uint64_t end = pc__blockset_next_absent(from, at, from->n_blocks);
        if (pc__blockset_add(&home->base.data, at, end - at) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        at = end;
    }
    return PC_OK;
}

/* 1: done, or nothing to do; 0: the home has moved away; PC__BUSY; negative: to be tried again. */
static int fold(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    pthread_mutex_lock(&region->lock);
    bool can = region->home == home && home->overlay.memfd >= 0 && !home->overlay_is_torn &&
               !pc__home_base_leased(engine, region, home->applied);
    if (can)
        home->base_changes = true;
    pthread_mutex_unlock(&region->lock);
    if (!can)
        return 1;
    int rc = may_change_base(engine, region, home);
    if (rc != 1)
        return rc;
    rc = pc__store_check(region, &home->base);
    if (!rc)
        rc = write_overlay(engine, home);
    if (!rc)
        rc = pc__store_check(region, &home->base);
    if (rc)
        return rc;
    rc = keep_base(engine, region, home, home->applied);
    if (rc != 1) /* as above: nor the overlay */
        return rc;
    pthread_mutex_lock(&region->lock);
    if (region->home != home) {
        pthread_mutex_unlock(&region->lock);
        return 0;
    }
    rc = note_overlay(home);
    if (rc) {
        pthread_mutex_unlock(&region->lock);
        return rc;
    }
    home->folded = home->overlay; /* a server that dies before it goes folds it again */
    home->overlay = (struct pc__store){.memfd = -1};
    home->leaving_in = home->epoch;
    base_is_at(region, home, home->applied);
    pthread_mutex_unlock(&region->lock);
    return let_go(engine, region, home);
}

/* Who waits for this version, or for room, need not wait for the next. */
static void release_waiting(struct pc_engine *engine, struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    bool waited_for = !pc__link_empty(&region->pending);
    pthread_mutex_unlock(&region->lock);
    if (waited_for)
        pc__region_release(engine, region, PC_OK, 0, false);
}

/* Nobody maps the base: what was allocated by reading its holes goes. Under the lock to the end: a
 * process that began to read meanwhile would miss these blocks in its read set. 1, or negative. */
static int give_back_holes(struct pc_engine *engine, struct pc__region *region,
                           struct pc__home *home)
{
    pthread_mutex_lock(&region->lock);
    const struct pc__generation *g = pc__home_base_generation(region);
    bool is_read = region->home != home || !g || g->mappings || engine->settle_until_ns;
    int rc = is_read ? PC_OK : pc__home_punch_holes(home);
    pthread_mutex_unlock(&region->lock);
    return rc ? rc : 1;
}

/* 1: there is more to do; negative: to be tried again. */
static int serve_region(struct pc_engine *engine, struct pc__region *region)
{
    pc__move_end_former(engine, region);
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->home;
    const bool here = home && home->base.memfd >= 0;
    pthread_mutex_unlock(&region->lock);
    if (!here)
        return PC_OK;
    int rc = let_go(engine, region, home);
    if (rc == 1)
        rc = fold(engine, region, home); /* before anything goes under it, also one that was broken off */
    for (int n = 0; rc == 1 && n < LAYERS_A_TURN; n++) {
        rc = apply_next(engine, region, home);
        if (rc == 1)
            release_waiting(engine, region);
    }
    bool more = rc == 1;
    if (!rc)
        rc = fold(engine, region, home);
    if (rc == 1 && !more)
        rc = give_back_holes(engine, region, home);
    if (rc == 1 && !more && region->n_blocks >= PC__WARM_LEAST_BLOCKS)
        more = pc__home_warm(home);
    if (rc == 1 && !more) {
        rc = pc__region_look(engine, region, home);
        more = rc == 1;
    }
    return rc < 0 ? rc : more;
}

/* ------------------------------------------------------------------ thread */

struct pc__errand {
    struct pc__link link;
    int (*run)(void *arg);
    void *arg;
    int rc;
    bool done;
};

int pc__worker_do(struct pc_engine *engine, int (*run)(void *arg), void *arg)
{
    struct pc__worker *worker = &engine->worker;
    struct pc__errand errand = {.run = run, .arg = arg};
    pthread_mutex_lock(&worker->lock);
    const bool runs = worker->started && !worker->stopping;
    if (runs) {
        pc__link_push(&worker->errands, &errand.link);
        pthread_cond_signal(&worker->wake);
    }
    while (runs && !errand.done)
        pthread_cond_wait(&worker->ran, &worker->lock);
    pthread_mutex_unlock(&worker->lock);
    return runs ? errand.rc : PC_ERR_CLOSED;
}

/* Under worker.lock, which it drops for each of them. */
static void run_errands(struct pc__worker *worker)
{
    while (!pc__link_empty(&worker->errands)) {
        struct pc__errand *errand = pc__of(worker->errands.next, struct pc__errand, link);
        pc__link_remove(&errand->link);
        errand->rc = PC_ERR_CLOSED;
        if (!worker->stopping) {
            pthread_mutex_unlock(&worker->lock);
            const int rc = errand->run(errand->arg);
            pthread_mutex_lock(&worker->lock);
            errand->rc = rc;
        }
        errand->done = true; /* its owner takes it away */
        pthread_cond_broadcast(&worker->ran);
    }
}

static struct pc__region *next_region(struct pc__worker *worker)
{
    struct pc__region *region = NULL;
    uint64_t due;
    pthread_mutex_lock(&worker->lock);
    while (run_errands(worker), (due = queue_due(worker)), !worker->n && !worker->stopping) {
        const struct timespec until = timespec_of(due);
        if (due == UINT64_MAX)
            pthread_cond_wait(&worker->wake, &worker->lock);
        else
            pthread_cond_timedwait(&worker->wake, &worker->lock, &until);
    }
    if (!worker->stopping) {
        region = worker->queue[worker->begin];
        worker->begin = (worker->begin + 1) % worker->capacity;
        worker->n--;
    }
    pthread_mutex_unlock(&worker->lock);
    return region;
}

static void *run(void *arg)
{
    struct pc_engine *engine = arg;
    struct pc__worker *worker = &engine->worker;
    struct pc__region *region;
    while ((region = next_region(worker))) {
        pthread_mutex_lock(&region->lock);
        region->queued = false;
        pthread_mutex_unlock(&region->lock);
        int rc = serve_region(engine, region);
        pthread_mutex_lock(&region->lock);
        /* Of a region that is freed nobody wants what it lacks: it goes, and a try would hold it. */
        const bool tries_again = rc < 0 && rc != PC_ERR_CLOSED && !region->forgotten;
        if (tries_again || (rc >= 0 && !region->forgotten && pc__delta_waits(region)))
            queue_later(engine, region);
        else if (rc == 1)
            pc__worker_queue(engine, region);
        const int why = region->lost ? region->lost : rc; /* that a part is lost says more than what failed */
        pthread_mutex_unlock(&region->lock);
        if (tries_again)
            pc__engine_event(engine, PC_EVENT_LOG, rc, region->id, 0,
                             "variable %llu: a commit cannot be applied yet: %s",
                             (unsigned long long)region->id, pc_last_message());
        if (rc < 0)
            pc__region_release(engine, region, why, 0, false);
        else
            release_waiting(engine, region);
        pc__region_put(engine, region);
    }
    return NULL;
}

int pc__worker_start(struct pc_engine *engine)
{
    int error = pthread_create(&engine->worker.thread, NULL, run, engine);
    if (error)
        return pc__fail(PC_ERR_SYSTEM, "pthread_create: %s", strerror(error));
    engine->worker.started = true;
    return PC_OK;
}

void pc__worker_stop(struct pc_engine *engine)
{
    struct pc__worker *worker = &engine->worker;
    pthread_mutex_lock(&worker->lock);
    worker->stopping = true;
    pthread_cond_broadcast(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
    if (worker->started)
        pthread_join(worker->thread, NULL);
    worker->started = false;
}

/* What was still to be done: the keeper has it for the next server. */
void pc__worker_free(struct pc_engine *engine)
{
    struct pc__worker *worker = &engine->worker;
    for (; worker->n; worker->n--) {
        pc__region_put(engine, worker->queue[worker->begin]);
        worker->begin = (worker->begin + 1) % worker->capacity;
    }
    pc__each(link, &worker->later)
    {
        pc__link_remove(link);
        pc__region_put(engine, pc__of(link, struct pc__region, later));
    }
    free(worker->queue);
    worker->queue = NULL;
    worker->capacity = worker->begin = 0;
}
