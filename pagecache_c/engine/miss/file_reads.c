/* file_reads.c - blocks that are in the file of a region (PC_MEDIUM_FILE): which ranges are to be read,
 * and what comes of them. Python reads: it knows local files and S3.
 *
 * A miss at version 0 comes here at once, and one at a later version when the home has said that no commit
 * has written the block. The blocks are in flight, as those that another server is asked for. They stay
 * that until the range is filled, has failed, or is given up: not in the time that a touch waits, from when
 * somebody waits for it or it is its turn, or has got on. In flight keeps the generation at the
 * version that the range was asked for, so a range that was given up is not filled any more: the one that
 * fills it is at it (busy), or finds no range.
 *
 * Threads: loops ask; Python's threads take, fill and end. Owns engine.files, under files.lock, which is a
 * leaf: blocks are inserted without it.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FEW_IN_FLIGHT 4u /* what such a read takes says what one alone does */

struct pc__file_trips {
    struct pc__trips trips;
};

struct read {
    struct pc__link link;          /* of urgent, bulk or taken */
    uint64_t id;                   /* 0: not taken */
    struct pc__region *region;     /* +1 ref, as its generation */
    struct pc__generation *generation;
    struct pc_run run;             /* still to come */
    uint64_t give_up_ns;           /* 0: of bulk that is not taken */
    uint64_t taken_ns;
    uint64_t n_asked;              /* blocks, when it was taken */
    bool urgent, alone, busy;
};

static struct read *of_link(struct pc__link *link)
{
    return pc__of(link, struct read, link);
}

void pc__files_open(struct pc_engine *engine)
{
    struct pc__files *files = &engine->files;
    pthread_mutex_init(&files->lock, NULL);
    pc__link_init(&files->urgent);
    pc__link_init(&files->bulk);
    pc__link_init(&files->taken);
}

static void drop(struct pc_engine *engine, struct read *read)
{
    pc__generation_put(engine, read->generation);
    pc__region_put(engine, read->region);
    free(read);
}

static void drop_all(struct pc_engine *engine, struct pc__link *reads)
{
    while (!pc__link_empty(reads)) {
        struct read *read = of_link(reads->next);
        pc__link_remove(&read->link);
        drop(engine, read);
    }
}

void pc__files_close(struct pc_engine *engine)
{
    struct pc__files *files = &engine->files;
    drop_all(engine, &files->urgent);
    drop_all(engine, &files->bulk);
    drop_all(engine, &files->taken);
    pthread_mutex_destroy(&files->lock);
}

/* ------------------------------------------------------------------- asking */

static void wake_up(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)loop, (void)mail; /* it looks at its deadlines again */
}

static bool is_idle(const struct pc__files *files)
{
    return pc__link_empty((struct pc__link *)(uintptr_t)&files->urgent) &&
           pc__link_empty((struct pc__link *)(uintptr_t)&files->bulk) &&
           pc__link_empty((struct pc__link *)(uintptr_t)&files->taken);
}

void pc__file_ask(struct pc_engine *engine, struct pc__region *region,
                  struct pc__generation *generation, struct pc_run run, bool urgent)
{
    struct pc__files *files = &engine->files;
    struct read *read = malloc(sizeof *read);
    if (!read) {
        pc__fill_failed(engine, region, generation, run.first_block, run.n_blocks, engine->server_id,
                        PC_ERR_NO_MEMORY);
        return;
    }
    *read = (struct read){.region = region,
                          .generation = pc__generation_take(generation),
                          .run = run,
                          .give_up_ns = urgent ? pc__now_ns() + engine->fault_timeout_ns : 0,
                          .urgent = urgent};
    pc__ref_take(&region->refs);
    pthread_mutex_lock(&files->lock);
    const bool was_idle = is_idle(files);
    pc__link_push(urgent ? &files->urgent : &files->bulk, &read->link);
    pthread_mutex_unlock(&files->lock);
    if (was_idle) { /* loop 0 looks after what is not read in time */
        const struct pc__mail mail = {.run = wake_up};
        (void)pc__loop_post(&engine->loops[0], &mail);
    }
    /* One for each: who takes ranges has as many threads as there are ranges to take. */
    pc__engine_event(engine, PC_EVENT_NEED_FILE, 0, region->id, 0, "%s", "");
}

void pc__file_ask_fetch(struct pc_engine *engine, struct pc__fetch *fetch)
{
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++)
        if (fetch->runs[i].n_blocks)
            pc__file_ask(engine, fetch->region, fetch->generation, fetch->runs[i], fetch->urgent);
    pc__fetch_drop(engine, fetch);
}

/* Under files.lock. */
static struct read *with_block(const struct pc__link *reads, const struct pc__generation *generation,
                               uint64_t block)
{
    pc__each(link, (struct pc__link *)(uintptr_t)reads)
    {
        struct read *read = of_link(link);
        if (read->generation == generation && block >= read->run.first_block &&
            block - read->run.first_block < read->run.n_blocks)
            return read;
    }
    return NULL;
}

void pc__file_hurry(struct pc_engine *engine, const struct pc__generation *generation, uint64_t block)
{
    struct pc__files *files = &engine->files;
    const uint64_t give_up_ns = pc__now_ns() + engine->fault_timeout_ns;
    pthread_mutex_lock(&files->lock);
    struct read *read = with_block(&files->bulk, generation, block);
    if (read) {
        pc__link_remove(&read->link);
        read->urgent = true;
        read->give_up_ns = give_up_ns;
        pc__link_push(&files->urgent, &read->link);
    } else if ((read = with_block(&files->taken, generation, block))) {
        read->give_up_ns = give_up_ns; /* who touches it now has all of that time */
    }
    pthread_mutex_unlock(&files->lock);
}

/* ------------------------------------------------------------------- taking */

/* What follows it in the queue, and in the file, is read with it. Under files.lock. */
static void join(struct pc_engine *engine, struct read *read, struct pc__link *queue)
{
    while (!pc__link_empty(queue)) {
        struct read *next = of_link(queue->next);
        const uint64_t n = read->run.n_blocks + next->run.n_blocks;
        if (next->generation != read->generation || n > PC_FILE_READ_BLOCKS / 8 ||
            next->run.first_block != read->run.first_block + read->run.n_blocks)
            return;
        pc__link_remove(&next->link);
        read->run.n_blocks = n;
        drop(engine, next); /* not the last reference: read has them too */
    }
}

PC_API int pc_engine_file_next(pc_engine *engine, int only_urgent, struct pc_file_read *out)
{
    struct pc__files *files = &engine->files;
    pthread_mutex_lock(&files->lock);
    struct pc__link *queue =
        pc__link_empty(&files->urgent) && !only_urgent ? &files->bulk : &files->urgent;
    if (pc__link_empty(queue)) {
        pthread_mutex_unlock(&files->lock);
        return 0;
    }
    struct read *read = of_link(queue->next);
    pc__link_remove(&read->link);
    join(engine, read, queue);
    read->id = ++files->last_id;
    read->taken_ns = pc__now_ns();
    if (!read->urgent)
        read->give_up_ns = read->taken_ns + engine->fault_timeout_ns;
    read->n_asked = read->run.n_blocks;
    read->alone = files->n_taken++ < FEW_IN_FLIGHT;
    pc__link_push(&files->taken, &read->link);
    *out = (struct pc_file_read){.id = read->id,
                                 .region = read->region->id,
                                 .first_block = read->run.first_block,
                                 .n_blocks = read->run.n_blocks,
                                 .urgent = read->urgent};
    pthread_mutex_unlock(&files->lock);
    pc__count_add(&engine->count.file_reads, 1);
    return 1;
}

/* Under files.lock. NULL: it was given up. */
static struct read *find(struct pc__files *files, uint64_t id)
{
    pc__each(link, &files->taken) if (of_link(link)->id == id) return of_link(link);
    return NULL;
}

/* Where memory is inserted by pwrite it must have been written a moment ago (fill.c). */
static int insert(struct pc_engine *engine, const struct read *read, uint64_t first, uint64_t n,
                  const uint8_t *bytes)
{
    if (engine->uffd >= 0)
        return pc__fill_insert(engine, read->region, read->generation, first, n, bytes, true);
    uint8_t *copy = malloc(PC__BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    int rc = copy ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a copy of blocks");
    for (uint64_t done = 0, some; done < n && !rc; done += some) {
        some = n - done < PC__BOUNCE_BLOCKS ? n - done : PC__BOUNCE_BLOCKS;
        memcpy(copy, bytes + (done << PC_BLOCK_SHIFT), some << PC_BLOCK_SHIFT);
        rc = pc__fill_insert(engine, read->region, read->generation, first + done, some, copy, true);
    }
    free(copy);
    return rc;
}

PC_API int pc_engine_file_fill(pc_engine *engine, uint64_t id, const void *bytes, uint64_t n_bytes)
{
    struct pc__files *files = &engine->files;
    const uint64_t n = n_bytes >> PC_BLOCK_SHIFT;
    if (n_bytes % PC_BLOCK_BYTES)
        return pc__fail(PC_ERR_RANGE, "%llu bytes are no blocks", (unsigned long long)n_bytes);
    pthread_mutex_lock(&files->lock);
    struct read *read = find(files, id);
    int rc = PC_OK;
    if (!read || read->busy)
        rc = pc__fail(PC_ERR_NO_REGION, "range %llu of a file was given up", (unsigned long long)id);
    else if (n > read->run.n_blocks)
        rc = pc__fail(PC_ERR_RANGE, "%llu blocks of a file, and %llu were asked for",
                      (unsigned long long)n, (unsigned long long)read->run.n_blocks);
    else
        read->busy = true;
    pthread_mutex_unlock(&files->lock);
    if (rc)
        return rc;
    pc__count_add(&engine->count.file_blocks, n); /* before the fill, which answers who then asks for it */
    rc = insert(engine, read, read->run.first_block, n, bytes);
    pthread_mutex_lock(&files->lock);
    read->busy = false;
    if (n)
        read->give_up_ns = pc__now_ns() + engine->fault_timeout_ns; /* it gets on */
    if (!rc) {
        read->run.first_block += n;
        read->run.n_blocks -= n;
    }
    pthread_mutex_unlock(&files->lock);
    return rc;
}

/* What a round trip to the file costs, in blocks moved: how much faults fetch depends on it. */
static void add_trip(struct pc__region *region, const struct read *read)
{
    const uint64_t took_ns = pc__now_ns() - read->taken_ns;
    pthread_mutex_lock(&region->lock);
    if (!region->file_trips)
        region->file_trips = calloc(1, sizeof *region->file_trips);
    if (region->file_trips)
        pc__trips_add(&region->file_trips->trips, read->n_asked, took_ns);
    pthread_mutex_unlock(&region->lock);
}

unsigned pc__file_trip_blocks(const struct pc__region *region)
{
    return region->file_trips ? region->file_trips->trips.known_blocks : 0;
}

static void fail_rest(struct pc_engine *engine, const struct read *read, int error)
{
    if (read->run.n_blocks)
        pc__fill_failed(engine, read->region, read->generation, read->run.first_block,
                        read->run.n_blocks, engine->server_id, error);
}

PC_API int pc_engine_file_end(pc_engine *engine, uint64_t id, int error, const char *text)
{
    struct pc__files *files = &engine->files;
    pthread_mutex_lock(&files->lock);
    struct read *read = find(files, id);
    if (!read || read->busy) {
        pthread_mutex_unlock(&files->lock);
        return pc__fail(PC_ERR_NO_REGION, "range %llu of a file was given up", (unsigned long long)id);
    }
    pc__link_remove(&read->link);
    files->n_taken--;
    pthread_mutex_unlock(&files->lock);
    if (error && *text)
        pc__file_note_cause(engine, read->region->id, text);
    if (!read->run.n_blocks && read->alone)
        add_trip(read->region, read);
    fail_rest(engine, read, error ? error : PC_ERR_FILE);
    drop(engine, read);
    return PC_OK;
}

/* ---------------------------------------------------------------- deadlines */

static uint64_t earliest_of(const struct pc__link *reads, uint64_t earliest)
{
    pc__each(link, (struct pc__link *)(uintptr_t)reads)
    {
        const struct read *read = of_link(link);
        if (!read->busy && read->give_up_ns < earliest)
            earliest = read->give_up_ns;
    }
    return earliest;
}

uint64_t pc__files_deadline(struct pc__loop *loop)
{
    struct pc__files *files = &loop->engine->files;
    if (loop->index)
        return UINT64_MAX;
    pthread_mutex_lock(&files->lock);
    uint64_t earliest = earliest_of(&files->urgent, UINT64_MAX);
    earliest = earliest_of(&files->taken, earliest);
    pthread_mutex_unlock(&files->lock);
    return earliest;
}

/* Under files.lock. */
static void move_late(struct pc__files *files, struct pc__link *from, struct pc__link *to, uint64_t now_ns)
{
    pc__each(link, from)
    {
        struct read *read = of_link(link);
        if (read->busy || read->give_up_ns > now_ns)
            continue;
        files->n_taken -= read->id != 0;
        pc__link_remove(link);
        pc__link_push(to, link);
    }
}

void pc__files_tick(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc__files *files = &loop->engine->files;
    struct pc__link late;
    if (loop->index)
        return;
    pc__link_init(&late);
    pthread_mutex_lock(&files->lock);
    move_late(files, &files->urgent, &late, now_ns);
    move_late(files, &files->taken, &late, now_ns);
    pthread_mutex_unlock(&files->lock);
    pc__each(link, &late) fail_rest(loop->engine, of_link(link), PC_ERR_TIMEOUT);
    drop_all(loop->engine, &late);
}
