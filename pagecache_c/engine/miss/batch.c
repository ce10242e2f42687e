/* batch.c - which blocks are to come from where, and those that come from this very node.
 *
 * A batch takes absent blocks that nobody is fetching, marks them in flight, and sorts them into
 * fetches by server; fetch.c sends those. A fetch whose blocks are here already (this node is their
 * home, or a version beside this one has them) is filled at once. _add is called under region.lock;
 * everything else without.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void pc__batch_init(struct pc__batch *batch, bool urgent, bool prefetch)
{
    pc__link_init(&batch->fetches);
    batch->urgent = urgent;
    batch->prefetch = prefetch;
}

static struct pc__fetch *last_of(struct pc__batch *batch)
{
    return pc__link_empty(&batch->fetches) ? NULL
                                           : pc__of(batch->fetches.prev, struct pc__fetch, link);
}

/* A source that blocks are on their way from does not move. */
static struct pc__generation *source_for(struct pc__generation *fork, uint64_t server_id)
{
    if (server_id)
        return NULL;
    fork->source->forks++;
    return pc__generation_take(fork->source);
}

/* A fetch of the batch that can take one more run for this server, at the end of the list. */
static struct pc__fetch *room_in(struct pc__batch *batch, struct pc__region *region,
                                 struct pc__generation *generation, uint64_t server_id)
{
    struct pc__fetch *fetch = last_of(batch);
    if (fetch && (fetch->server_id != server_id || fetch->generation != generation ||
                  fetch->n_runs == PC__DATA_MAX_RUNS || fetch->n_blocks == PC__REQUEST_BLOCKS))
        fetch = NULL;
    if (fetch && fetch->n_runs < fetch->capacity_runs)
        return fetch;
    uint32_t capacity = fetch ? fetch->capacity_runs * 4 : 1;
    capacity = capacity < PC__DATA_MAX_RUNS ? capacity : PC__DATA_MAX_RUNS;
    if (fetch)
        pc__link_remove(&fetch->link);
    struct pc__fetch *grown =
        realloc(fetch, sizeof *grown + capacity * sizeof grown->runs[0]);
    if (!grown) {
        if (fetch)
            pc__link_push(&batch->fetches, &fetch->link);
        return NULL;
    }
    if (!fetch) {
        *grown = (struct pc__fetch){.region = region,
                                    .generation = pc__generation_take(generation),
                                    .source = source_for(generation, server_id),
                                    .server_id = server_id,
                                    .urgent = batch->urgent,
                                    .prefetch = batch->prefetch};
        pc__ref_take(&region->refs);
    }
    grown->capacity_runs = capacity;
    pc__link_push(&batch->fetches, &grown->link);
    return grown;
}

/* Where the blocks from `first` on come from, and up to where they come from there. A block that a
 * fork's source has, and that did not change since, is copied on this node. Then this node's disk is asked,
 * where that is faster, and then others. */
static uint64_t source_of(const struct pc__region *region, const struct pc__generation *generation,
                          uint64_t first, uint64_t *end)
{
    const struct pc__generation *source = generation->source;
    if (source && pc__blockset_has(&source->present, first) &&
        !pc__blockset_has(&generation->changed, first)) {
        *end = pc__blockset_next_absent(&source->present, first, *end);
        *end = pc__blockset_next(&generation->changed, first, *end);
        return 0;
    }
    if (source && region->in_file && !source->version && !pc__blockset_has(&generation->changed, first)) {
        /* It is what version 0 has there. */
        *end = pc__blockset_next(&source->present, first, *end);
        *end = pc__blockset_next(&generation->changed, first, *end);
        return PC__FROM_FILE;
    }
    if (source) {
        uint64_t at = first;
        while ((at = pc__blockset_next(&source->present, at, *end)) < *end &&
               pc__blockset_has(&generation->changed, at))
            at++;
        *end = at < *end ? at : *end;
    }
    const uint64_t origin =
        region->in_file && !generation->version ? PC__FROM_FILE : pc__home_of(region, first);
    if (!generation->disk_cache || (region->home && !region->in_file)) /* the home's memory is nearer */
        return origin;
    uint64_t n = *end - first < PC__REQUEST_BLOCKS ? *end - first : PC__REQUEST_BLOCKS;
    const bool is_on_disk = pc__disk_cache_has(generation, first, &n);
    *end = first + n;
    return is_on_disk && pc__disk_is_faster(pc__disk_cache_times(generation->disk_cache), n,
                                            pc__disk_cache_reads(generation->disk_cache))
               ? PC__FROM_DISK
               : origin;
}

int pc__batch_add(struct pc__batch *batch, struct pc__region *region,
                  struct pc__generation *generation, uint64_t first, uint64_t n)
{
    uint64_t limit = first + n;
    while (first < limit) {
        first = pc__blockset_next_absent(&generation->present, first, limit);
        first = pc__blockset_next_absent(&generation->in_flight, first, limit);
        if (first >= limit)
            break;
        if (pc__blockset_has(&generation->present, first))
            continue;
        uint64_t end = (first / PC_EXTENT_BLOCKS + 1) * PC_EXTENT_BLOCKS;
        end = end < limit ? end : limit;
        end = pc__blockset_next(&generation->present, first, end);
        end = pc__blockset_next(&generation->in_flight, first, end);
        uint64_t server_id = source_of(region, generation, first, &end);
        if (pc__blockset_add(&generation->in_flight, first, end - first) < 0) {
            pc__blockset_remove(&generation->in_flight, first, end - first);
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        }
        struct pc__fetch *fetch = room_in(batch, region, generation, server_id);
        uint64_t take = end - first;
        uint64_t room = fetch ? PC__REQUEST_BLOCKS - fetch->n_blocks : 0;
        take = take < room ? take : room;
        pc__blockset_remove(&generation->in_flight, first + take, end - first - take);
        if (!fetch)
            return pc__fail(PC_ERR_NO_MEMORY, "a fetch");
        fetch->runs[fetch->n_runs++] = (struct pc_run){.first_block = first, .n_blocks = take};
        fetch->n_blocks += (uint32_t)take;
        first += take;
    }
    return PC_OK;
}

void pc__fetch_fail(struct pc_engine *engine, struct pc__fetch *fetch, int error)
{
    if (fetch->sink)
        fetch->error = error;
    if (fetch->sink || fetch->is_filled || pc__hedge_yields(fetch))
        return;
    if (fetch->gather)
        pc__gather_failed(engine, fetch, error);
    if (error == PC_ERR_CLOSED && !fetch->generation->is_layer)
        return; /* this server stops: who waits, on other loops too, asks the next one */
    if (error == PC_ERR_EXPIRED && fetch->region) {
        /* What is here of it would be opened, and the first touch of the rest end the process. */
        pthread_mutex_lock(&fetch->region->lock);
        fetch->generation->gone = error;
        pthread_mutex_unlock(&fetch->region->lock);
    }
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++)
        if (fetch->runs[i].n_blocks)
            pc__fill_failed(engine, fetch->region, fetch->generation, fetch->runs[i].first_block,
                            fetch->runs[i].n_blocks, fetch->server_id, error);
}

void pc__fetch_advance(struct pc__fetch *fetch, uint64_t n)
{
    struct pc_run *run = &fetch->runs[fetch->at_run];
    run->first_block += n;
    run->n_blocks -= n;
    fetch->n_blocks -= (uint32_t)n;
    if (!run->n_blocks)
        fetch->at_run++;
}

/* Inserts the first blocks of what is still to come, from memory that was just written (see fill.c).
 * Several parts, so that nobody is kept waiting for all of a long run. */
static int fill_part(struct pc__loop *loop, struct pc__fetch *fetch, uint64_t n, int status)
{
    if (!status)
        status = pc__fill_insert(loop->engine, fetch->region, fetch->generation,
                                 fetch->runs[fetch->at_run].first_block, n, loop->bounce, false);
    if (!status)
        pc__fetch_advance(fetch, n);
    return status;
}

/* Blocks of the run that the source had when the fetch was made, and that were evicted since, are
 * asked for anew, elsewhere. Under region.lock. */
int pc__fetch_ask_elsewhere(struct pc__fetch *fetch, struct pc__batch *again, uint64_t n)
{
    struct pc__generation *generation = fetch->generation;
    uint64_t first = fetch->runs[fetch->at_run].first_block;
    pc__blockset_remove(&generation->in_flight, first, n);
    int rc = pc__batch_add(again, fetch->region, generation, first, n);
    pc__fetch_advance(fetch, n);
    return rc;
}

/* From the version beside it, on this node, where it did not change. Read under region.lock, so that
 * what is read is not punched meanwhile: a chunk at a time, which is soon done. */
static int fill_from_source(struct pc__loop *loop, struct pc__fetch *fetch, struct pc__batch *again)
{
    const struct pc__blockset *present = &fetch->source->present;
    const struct pc_run *run = &fetch->runs[fetch->at_run];
    uint64_t first = run->first_block;
    pthread_mutex_lock(&fetch->region->lock);
    if (!pc__blockset_has(present, first)) {
        uint64_t past = pc__blockset_next(present, first, first + run->n_blocks);
        int rc = pc__fetch_ask_elsewhere(fetch, again, past - first);
        pthread_mutex_unlock(&fetch->region->lock);
        if (rc)
            pc__fill_failed(loop->engine, fetch->region, fetch->generation, first, past - first, 0,
                            rc);
        return PC_OK;
    }
    uint64_t n = run->n_blocks < PC__CHUNK_BLOCKS ? run->n_blocks : PC__CHUNK_BLOCKS;
    n = pc__blockset_next_absent(present, first, first + n) - first;
    uint64_t left = n << PC_BLOCK_SHIFT, offset = first << PC_BLOCK_SHIFT;
    uint8_t *at = loop->bounce;
    int rc = PC_OK;
    while (left && !rc) {
        ssize_t got = pread(fetch->source->memfd, at, left, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            rc = pc__fail_errno("reading a generation");
        } else {
            at += got;
            offset += (uint64_t)got;
            left -= (uint64_t)got;
        }
    }
    pthread_mutex_unlock(&fetch->region->lock);
    return fill_part(loop, fetch, n, rc);
}

/* This node is the home of the blocks, but processes map a generation of its own. What it has lost goes to *lost.
 * PC_ERR_NO_REGION: it is not the home any more. */
static int fill_from_home(struct pc__loop *loop, struct pc__fetch *fetch, struct pc__fetch **lost)
{
    struct pc_engine *engine = loop->engine;
    struct pc__region *region = fetch->region;
    const struct pc_run *run = &fetch->runs[fetch->at_run];
    uint64_t version = fetch->generation->version;
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->home;
    if (!home) {
        pthread_mutex_unlock(&region->lock);
        return PC_ERR_NO_REGION;
    }
    struct pc__home_part part =
        pc__home_resolve(engine, region, home, version, run->first_block, run->n_blocks);
    int rc = pc__home_knows(engine, region, version);
    unsigned held = pc__home_hold(home);
    pthread_mutex_unlock(&region->lock);
    if (!rc && part.kind == PC__HOME_ZEROS) {
        rc = pc__fill_zeros(engine, region, fetch->generation, run->first_block, part.n_blocks);
        if (!rc)
            pc__fetch_advance(fetch, part.n_blocks);
    } else if (!rc && part.kind == PC__HOME_LOST) { /* what is around it comes all the same */
        rc = pc__fetch_set_aside(fetch, part.n_blocks, lost);
    } else if (!rc && part.kind == PC__HOME_FILE) {
        const struct pc_run in_file = {run->first_block, part.n_blocks};
        pc__file_ask(engine, region, fetch->generation, in_file, fetch->urgent);
        pc__fetch_advance(fetch, part.n_blocks);
    } else if (!rc && part.kind == PC__HOME_MEMORY) {
        uint64_t n = part.n_blocks < PC__BOUNCE_BLOCKS ? part.n_blocks : PC__BOUNCE_BLOCKS;
        memcpy(loop->bounce, part.bytes, n << PC_BLOCK_SHIFT);
        rc = fill_part(loop, fetch, n, PC_OK);
    } else if (!rc) {
        rc = pc__home_compose(engine, region, home, version, part.kind, run->first_block, loop->bounce);
        if (rc == PC_ERR_HOME_LOST) /* it is damaged, as was found just now */
            rc = pc__fetch_set_aside(fetch, 1, lost);
        else
            rc = fill_part(loop, fetch, 1, rc);
    }
    pc__home_release(engine, region, home, held);
    return rc;
}

/* False: this node is not the home of what is left of it. */
static bool is_here(const struct pc__fetch *fetch)
{
    struct pc__region *region = fetch->region;
    pthread_mutex_lock(&region->lock);
    const bool here = fetch->source || region->home;
    pthread_mutex_unlock(&region->lock);
    return here;
}

/* As with another that is named as the home, and is none. False: no memory. */
static bool ask_who_is_home(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc__peer *self = pc__peer_of(loop, loop->engine->server_id);
    if (self)
        pc__rehome_unknown(self, fetch);
    return self != NULL;
}

void pc__fetch_fill_here(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc_engine *engine = loop->engine;
    int rc = PC_OK;
    pc__hedge_answered(loop, fetch, true);
    if (!is_here(fetch)) {
        if (ask_who_is_home(loop, fetch))
            return;
        rc = PC_ERR_NO_MEMORY;
    }
    if (!loop->bounce && !(loop->bounce = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES)))
        rc = PC_ERR_NO_MEMORY;
    struct pc__fetch *lost = NULL;
    struct pc__batch again;
    pc__batch_init(&again, fetch->urgent, fetch->prefetch);
    if (!rc && fetch->gather)
        rc = pc__gather_here(engine, fetch);
    while (!rc && fetch->n_blocks)
        rc = fetch->source ? fill_from_source(loop, fetch, &again) : fill_from_home(loop, fetch, &lost);
    if (lost)
        pc__fetch_lost(loop, lost);
    if (rc == PC_ERR_NO_REGION && !is_here(fetch)) { /* the home has moved away meanwhile */
        if (ask_who_is_home(loop, fetch))
            return; /* nothing is asked again: it has no source */
        rc = PC_ERR_NO_MEMORY;
    }
    if (rc)
        pc__fetch_fail(engine, fetch, rc);
    pc__fetch_drop(engine, fetch);
    pc__batch_submit(loop, &again);
}
