/* parity.c - layers that are made of others: a delta is made whole, and blocks come back from a group.
 *
 * A commit's layer of a parity is a delta: its writer knows what it has changed in the pieces of a group,
 * and not what the parity is. So two commits to different pieces do not wait for each other, and their
 * deltas may come in any order. At the home a delta that is pending is read by XOR with the version before
 * (home.c). Before it is applied the worker makes it whole: a layer of the same commit whose blocks are the
 * version's content, as any other layer has them. Only that one is applied.
 *
 * Who dies, and when:
 *   - before the keeper has the whole one: the delta is there, and nothing has changed of the version before;
 *   - after that: the whole one is there, and what is applied may be applied again from it. The delta may be
 *     there too; it does not stay beside the whole one (layer.c).
 * So the worker goes no further before the keeper has said that it has the whole one: a base or overlay of
 * which a part has changed is no version to XOR a delta with, and the history may have no room for the old.
 *
 * In a session whose homes outlive it (pc_engine_options.durable) it goes no further either before the whole
 * layer is in a synced file (NEED_DURABLE): after a cut of power the base may have any part of it.
 *
 * What is lost stays lost: XORed with a block that nobody has, a delta says nothing. The whole layer lacks
 * those blocks; they come back when the region is rebuilt, or by a layer that is no delta.
 *
 * Locks: as apply.c. Threads: the worker makes layers whole; pc_engine_stage_xor runs in any.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "kernels/xor.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------- a file of blocks */

/* Writes a layer's head and runs into a new file. Its blocks are the caller's. Returns the file. */
static int make_file(const struct pc__layer_head *head, const struct pc_run *runs)
{
    uint64_t inode;
    int fd = pc__memfd_make(head->data_offset + (head->n_blocks << PC_BLOCK_SHIFT), &inode);
    if (fd < 0)
        return fd;
    int rc = pc__rebuild_write(fd, head, sizeof *head, 0);
    if (!rc)
        rc = pc__rebuild_write(fd, runs, head->n_runs * sizeof *runs, sizeof *head);
    if (!rc)
        return fd;
    close(fd);
    return rc;
}

/* ------------------------------------------------------------- deltas */

struct whole {
    struct pc_engine *engine;
    struct pc__region *region;
    const struct pc__home *home;
    const struct pc__layer *delta;
    struct pc_run *runs;           /* of the delta, without those that are lost */
    uint32_t n_runs;
    uint64_t n_blocks;
    uint8_t *blocks;               /* PC__BOUNCE_BLOCKS */
};

/* Under region.lock: how many blocks there are from there on, n at most; 0: *lost are lost. */
static uint64_t not_lost(const struct pc__home *home, uint64_t block, uint64_t n, uint64_t *lost)
{
    const uint64_t damaged = pc__home_damaged(home, block, n) - block;
    *lost = damaged ? damaged : 1;
    if (!home->lost || !damaged)
        return damaged;
    return pc__lost_at(home->lost, home->applied, block, lost, NULL) ? 0 : *lost;
}

/* Under region.lock. runs: room for every block to be one, or NULL: they are counted. */
static void find_runs(struct whole *whole)
{
    const struct pc__layer *delta = whole->delta;
    whole->n_runs = 0;
    whole->n_blocks = 0;
    for (uint32_t i = 0; i < delta->n_runs; i++) {
        uint64_t at = delta->runs[i].first_block, end = at + delta->runs[i].n_blocks, lost;
        for (; at < end; at += lost) {
            const uint64_t n = not_lost(whole->home, at, end - at, &lost);
            if (!n)
                continue;
            if (whole->runs)
                whole->runs[whole->n_runs] = (struct pc_run){at, n};
            whole->n_runs++;
            whole->n_blocks += n;
        }
    }
}

static int take_runs(struct whole *whole)
{
    pthread_mutex_lock(&whole->region->lock); /* all the time: a reader may find a block damaged */
    find_runs(whole);
    whole->runs = calloc(whole->n_runs + 1u, sizeof *whole->runs);
    if (whole->runs)
        find_runs(whole);
    pthread_mutex_unlock(&whole->region->lock);
    return whole->runs ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a layer's runs");
}

/* What the applied version has there, XORed into blocks. Only this thread changes stores. *n: of how many. */
static int add_old(const struct whole *whole, uint64_t block, uint64_t *n, uint8_t *blocks)
{
    const struct pc__home *home = whole->home;
    uint8_t old[PC_BLOCK_BYTES];
    int rc = PC_OK;
    pthread_mutex_lock(&whole->region->lock);
    const uint64_t version = home->applied;
    const struct pc__home_part part =
        pc__home_resolve(whole->engine, whole->region, home, version, block, *n);
    if (version < home->history_from &&
        version < pc__history_floor(whole->engine->history, whole->region->id, home->history_from))
        rc = PC_ERR_EXPIRED;
    pthread_mutex_unlock(&whole->region->lock);
    *n = part.n_blocks;
    if (rc || part.kind == PC__HOME_ZEROS)
        return rc;
    if (part.kind == PC__HOME_MEMORY) {
        pc__xor(blocks, blocks, part.bytes, part.n_blocks << PC_BLOCK_SHIFT);
        return PC_OK;
    }
    rc = part.kind == PC__HOME_LOST
             ? PC_ERR_HOME_LOST
             : pc__home_compose(whole->engine, whole->region, home, version, part.kind, block, old);
    if (!rc)
        pc__xor(blocks, blocks, old, sizeof old);
    return rc;
}

/* Of n blocks, PC__BOUNCE_BLOCKS at most, that lie in one run of the delta. */
static int write_some(const struct whole *whole, int fd, uint64_t block, uint64_t n, uint64_t offset)
{
    const struct pc__layer *delta = whole->delta;
    uint64_t follow, done = 0, k;
    const uint64_t at = pc__layer_find(delta, block, &follow);
    int rc = pc__layer_read(delta, at, n, whole->blocks);
    for (; done < n && !rc; done += k) {
        k = n - done;
        rc = add_old(whole, block + done, &k, whole->blocks + (done << PC_BLOCK_SHIFT));
    }
    return rc ? rc : pc__rebuild_write(fd, whole->blocks, n << PC_BLOCK_SHIFT, offset);
}

static int write_whole(const struct whole *whole, int fd, uint64_t offset)
{
    int rc = PC_OK;
    for (uint32_t i = 0; i < whole->n_runs && !rc; i++) {
        uint64_t at = whole->runs[i].first_block, end = at + whole->runs[i].n_blocks, n;
        for (; at < end && !rc; at += n, offset += n << PC_BLOCK_SHIFT) {
            n = end - at < PC__BOUNCE_BLOCKS ? end - at : PC__BOUNCE_BLOCKS;
            rc = write_some(whole, fd, at, n, offset);
        }
    }
    return rc;
}

static int open_whole(struct whole *whole, struct pc__layer **out)
{
    const struct pc__layer *delta = whole->delta;
    struct pc__layer_head head = *delta->head;
    head.flags = PC__LAYER_MADE_WHOLE;
    head.n_runs = whole->n_runs;
    head.n_blocks = whole->n_blocks;
    head.data_offset = pc__layer_data_offset(head.n_runs);
    const int fd = make_file(&head, whole->runs);
    if (fd < 0)
        return fd;
    const int rc = write_whole(whole, fd, head.data_offset);
    if (rc) {
        close(fd);
        return pc__fail(rc, "version %llu of variable %llu, which a parity is made of",
                        (unsigned long long)delta->version - 1, (unsigned long long)delta->region);
    }
    return pc__layer_open(fd, head.data_offset + (head.n_blocks << PC_BLOCK_SHIFT), delta->region,
                          delta->commit_id, false, out);
}

/* The layer that is to take the delta's place; the keeper is given it first. */
static int make_whole(struct pc_engine *engine, struct pc__region *region,
                      const struct pc__home *home, const struct pc__layer *delta,
                      struct pc__layer **out)
{
    struct whole whole = {.engine = engine, .region = region, .home = home, .delta = delta};
    int rc = take_runs(&whole);
    if (!rc && !(whole.blocks = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES)))
        rc = pc__fail(PC_ERR_NO_MEMORY, "blocks of a layer");
    if (!rc)
        rc = open_whole(&whole, out);
    free(whole.blocks);
    free(whole.runs);
    if (rc)
        return rc;
    (*out)->version = delta->version;
    (*out)->unheard = true;
    (*out)->undurable = engine->durable;
    rc = pc__layer_keep(engine, *out);
    if (rc) {
        pc__unkeep(engine, (*out)->inode);
        pc__layer_put(*out);
    }
    return rc;
}

/* Under region.lock. */
static void take_place(struct pc__layer *old, struct pc__layer *new)
{
    new->link = (struct pc__link){.next = old->link.next, .prev = old->link.prev};
    new->link.next->prev = new->link.prev->next = &new->link;
    pc__link_init(&old->link);
}

/* Under region.lock. */
static struct pc__layer *next_of(const struct pc__region *region, struct pc__home *home)
{
    const bool none = region->home != home || pc__link_empty(&home->pending);
    return none ? NULL : pc__of(home->pending.next, struct pc__layer, link);
}

/* 1: done; 0: the home has moved away; negative. */
static int replace_delta(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                         struct pc__layer *delta)
{
    struct pc__layer *layer;
    int rc = make_whole(engine, region, home, delta, &layer);
    if (rc)
        return rc;
    pc__count_add(&engine->count.layers, 1);
    pc__count_add(&engine->count.layer_bytes, layer->bytes);
    pthread_mutex_lock(&region->lock);
    const bool stays = region->home == home;
    if (stays)
        take_place(delta, layer);
    pthread_mutex_unlock(&region->lock);
    pc__layer_end(engine, stays ? delta : layer);
    return stays;
}

struct wait {
    struct pc_engine *engine;
    struct pc__region *region;     /* +1 ref */
    struct pc__home *home;         /* which stays until it has heard (change_said) */
};

/* In the keeper's thread. */
static void whole_heard(void *arg, int rc, bool cancelled)
{
    struct wait *wait = arg;
    struct pc__region *region = wait->region;
    struct pc__home *home = wait->home;
    pthread_mutex_lock(&region->lock);
    home->change_said = false;
    home->change_rc = rc;
    struct pc__layer *layer = next_of(region, home); /* the same: the worker waits for this */
    if (layer && !rc)
        layer->unheard = false;
    if (!cancelled)
        pc__worker_queue(wait->engine, region);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(wait->engine, region);
    free(wait);
}

/* Under region.lock. PC_OK: heard; PC__BUSY: whole_heard is called; negative. */
static int wait_for_keeper(struct pc_engine *engine, struct pc__region *region,
                           struct pc__home *home, struct pc__layer *layer)
{
    struct wait *wait = malloc(sizeof *wait);
    if (!wait)
        return pc__fail(PC_ERR_NO_MEMORY, "a message to the keeper");
    *wait = (struct wait){engine, region, home};
    const int rc = pc__keep_when(engine, whole_heard, wait);
    home->change_said = rc == 1; /* it waits for our lock */
    layer->unheard = rc != PC_OK;
    if (rc == 1)
        pc__ref_take(&region->refs); /* which whole_heard drops */
    else
        free(wait);
    return rc == 1 ? PC__BUSY : rc;
}

#define ASK_DURABLE_NS 5000000000ull
#define TRY_DURABLE_NS 1000000000ull /* after an error; and so often the worker looks (apply.c) */

/* 1: it may be applied; 0: the home has moved away; PC__BUSY: whoever keeps it beyond the session is asked. */
static int wait_for_store(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    pthread_mutex_lock(&region->lock);
    struct pc__layer *layer = next_of(region, home);
    const bool waits = layer && layer->undurable;
    home->waits_for_store = waits;
    const uint64_t now = pc__now_ns();
    if (waits && now >= layer->ask_durable_at_ns) {
        const struct pc_event event = {.kind = PC_EVENT_NEED_DURABLE,
                                       .region = region->id,
                                       .commit_id = layer->commit_id,
                                       .version = layer->version};
        if (pc__engine_request(engine, &event))
            layer->ask_durable_at_ns = now + ASK_DURABLE_NS;
    }
    pthread_mutex_unlock(&region->lock);
    return !layer ? 0 : waits ? PC__BUSY : 1;
}

bool pc__delta_waits(const struct pc__region *region)
{
    return region->home && region->home->waits_for_store;
}

PC_API int pc_engine_layer_durable(pc_engine *engine, uint64_t id, uint64_t commit_id, int rc)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_OK; /* freed meanwhile */
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->home;
    struct pc__layer *layer = home ? next_of(region, home) : NULL;
    if (layer && layer->commit_id == commit_id && layer->undurable) {
        layer->undurable = home->waits_for_store = rc != PC_OK;
        layer->ask_durable_at_ns = pc__now_ns() + TRY_DURABLE_NS;
        if (!rc)
            pc__worker_hurry(engine, region);
    }
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return PC_OK;
}

int pc__delta_make_whole(struct pc_engine *engine, struct pc__region *region, struct pc__home *home)
{
    pthread_mutex_lock(&region->lock);
    struct pc__layer *layer = next_of(region, home);
    const bool said = home->change_said;
    int failed = layer && layer->unheard ? home->change_rc : PC_OK;
    if (failed)
        home->change_rc = PC_OK;
    pthread_mutex_unlock(&region->lock);
    if (failed) {
        char text[PC__KEEPING_TEXT_BYTES];
        pc__keep_error_text(engine, failed, text, sizeof text);
        return pc__fail(failed, "%s", text);
    }
    const bool is_delta = layer && layer->flags & PC__LAYER_DELTA;
    if (!layer || (!is_delta && !layer->unheard))
        return !layer || !layer->undurable ? 1 : wait_for_store(engine, region, home);
    if (said) /* whoever said something to the keeper must be the only one: its answer ends the wait */
        return PC__BUSY;
    int rc = is_delta ? replace_delta(engine, region, home, layer) : 1;
    if (rc != 1)
        return rc;
    pthread_mutex_lock(&region->lock);
    layer = next_of(region, home);
    if (layer)
        rc = wait_for_keeper(engine, region, home, layer);
    pthread_mutex_unlock(&region->lock);
    return !layer ? 0 : rc ? rc : wait_for_store(engine, region, home);
}

/* ------------------------------------------------------------- a group's blocks */

struct sum {
    const struct pc__layer **parts;
    size_t n_parts;
    uint8_t *blocks, *of_part;     /* PC__BOUNCE_BLOCKS each */
};

/* XORs what the layer has of these blocks into the sum's. */
static int add_part(const struct sum *sum, const struct pc__layer *layer, uint64_t first, uint64_t n)
{
    uint64_t end = first + n, at = pc__layer_next(layer, first, end), k = 0;
    int rc = PC_OK;
    for (; at < end && !rc; at = pc__layer_next(layer, at + k, end)) {
        const uint64_t position = pc__layer_find(layer, at, &k);
        k = k < end - at ? k : end - at;
        uint8_t *to = sum->blocks + ((at - first) << PC_BLOCK_SHIFT);
        rc = pc__layer_read(layer, position, k, sum->of_part);
        if (!rc)
            pc__xor(to, to, sum->of_part, k << PC_BLOCK_SHIFT);
    }
    return rc;
}

static int write_sum(void *arg, const struct pc_run *runs, size_t n_runs, int fd, uint64_t offset)
{
    const struct sum *sum = arg;
    int rc = PC_OK;
    for (size_t i = 0; i < n_runs && !rc; i++) {
        uint64_t at = runs[i].first_block, end = at + runs[i].n_blocks, n;
        for (; at < end && !rc; at += n, offset += n << PC_BLOCK_SHIFT) {
            n = end - at < PC__BOUNCE_BLOCKS ? end - at : PC__BOUNCE_BLOCKS;
            memset(sum->blocks, 0, n << PC_BLOCK_SHIFT);
            for (size_t j = 0; j < sum->n_parts && !rc; j++)
                rc = add_part(sum, sum->parts[j], at, n);
            if (!rc)
                rc = pc__rebuild_write(fd, sum->blocks, n << PC_BLOCK_SHIFT, offset);
        }
    }
    return rc;
}

static int take_parts(struct pc_engine *engine, const struct pc_layer_part *ids, struct sum *sum)
{
    for (size_t i = 0; i < sum->n_parts; i++) {
        struct pc__layer *layer =
            pc__layer_get(engine, pc__layer_id(ids[i].region, ids[i].commit_id));
        sum->parts[i] = layer;
        if (!layer)
            return pc__fail(PC_ERR_NO_VERSION, "nothing is staged for variable %llu under %#llx",
                            (unsigned long long)ids[i].region, (unsigned long long)ids[i].commit_id);
        if (layer->flags)
            return pc__fail(PC_ERR_PROTOCOL, "a delta of variable %llu has no content",
                            (unsigned long long)ids[i].region);
    }
    return PC_OK;
}

/* Every block that a part has. */
static int add_blocks(const struct sum *sum, struct pc__blockset *blocks)
{
    for (size_t i = 0; i < sum->n_parts; i++) {
        const struct pc__layer *layer = sum->parts[i];
        const struct pc_run *last = &layer->runs[layer->n_runs - 1];
        if (last->first_block + last->n_blocks > blocks->n_blocks)
            return pc__fail(PC_ERR_RANGE, "a part of variable %llu has blocks outside of the region",
                            (unsigned long long)layer->region);
        for (uint32_t j = 0; j < layer->n_runs; j++)
            if (pc__blockset_add(blocks, layer->runs[j].first_block, layer->runs[j].n_blocks) < 0)
                return pc__fail(PC_ERR_NO_MEMORY, "a block set");
    }
    return PC_OK;
}

static int64_t stage_sum(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                         uint64_t commit_id, struct sum *sum)
{
    struct pc__blockset blocks = {0};
    int64_t rc = pc__blockset_init(&blocks, pc__region_blocks(region));
    if (!rc)
        rc = add_blocks(sum, &blocks);
    const int64_t n_runs = rc ? 0 : pc__rebuild_runs_of(&blocks, NULL, 0);
    struct pc_run *runs = n_runs ? calloc((size_t)n_runs, sizeof *runs) : NULL;
    sum->blocks = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    sum->of_part = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    if (!rc && (!runs || !sum->blocks || !sum->of_part))
        rc = pc__fail(PC_ERR_NO_MEMORY, "blocks of a layer");
    if (!rc) {
        (void)pc__rebuild_runs_of(&blocks, runs, (size_t)n_runs);
        rc = pc__rebuild_stage(engine, region, version, commit_id, runs, (size_t)n_runs, write_sum, sum);
    }
    free(sum->blocks);
    free(sum->of_part);
    free(runs);
    pc__blockset_free(&blocks);
    return rc;
}

PC_API int64_t pc_engine_stage_xor(pc_engine *engine, uint64_t id, uint64_t version,
                                   uint64_t commit_id, const struct pc_layer_part *parts,
                                   size_t n_parts)
{
    for (size_t i = 0; i < n_parts; i++)
        if (parts[i].region == id && parts[i].commit_id == commit_id)
            return pc__fail(PC_ERR_RANGE, "part %zu is the layer that is to be made", i);
    if (!n_parts || !commit_id)
        return pc__fail(PC_ERR_RANGE, "a layer of %zu parts, under %#llx", n_parts,
                        (unsigned long long)commit_id);
    struct pc__region *region = pc__region_get(engine, id);
    if (!region || !pc__region_blocks(region)) {
        if (region)
            pc__region_put(engine, region);
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    }
    struct sum sum = {.parts = calloc(n_parts, sizeof *sum.parts), .n_parts = n_parts};
    int64_t rc = sum.parts ? take_parts(engine, parts, &sum) : PC_ERR_NO_MEMORY;
    if (!rc)
        rc = stage_sum(engine, region, version, commit_id, &sum);
    for (size_t i = 0; sum.parts && i < n_parts; i++) {
        pc__layer_put((struct pc__layer *)(uintptr_t)sum.parts[i]);
        if (rc >= 0)
            pc__layer_drop_staged(engine, parts[i].region, parts[i].commit_id);
    }
    free(sum.parts);
    pc__region_put(engine, region);
    return rc;
}
