/* move.c - a home that lives moves to another server, while readers read and writers commit.
 *
 * The taker prepares a store, as for a rebuild (rebuild.c). The giver stages what its home has at a
 * version that it knows; the taker pulls that and writes it. Meanwhile commits go on at the giver, so
 * the blocks that they changed follow, as often as one likes. Then the registry holds commits back, the
 * last of them follow, and the taker seals the store at the version that they make. Records of the home's
 * history move likewise, as layers: what version n had in the blocks that commit n + 1 replaced.
 * The registry writes down that the taker is the home, and says so, to the taker first:
 *
 *   taker   what was prepared is the home (pc__rebuild_become_home);
 *   giver   its home leaves (pc__move_leave). From that moment requests of other servers get the answer
 *           that a server gives that does not know the region, and ask the registry (miss/rehome.c).
 *
 * What stays at the giver, and for how long:
 *   - the base, where processes of its node map it: as a generation (was_base) that never changes again
 *     and is given to nobody new but who has built it. New generations take from it what is the same
 *     there. It goes with its last lease, and its leases outlive a restart as those of others do: the
 *     keeper has it under another label;
 *   - everything else, as region.former, until nobody looks at it: replies on their way hold it by
 *     its epochs, as they do with a home (home.c), and may still read the history. The worker, and no
 *     other thread, frees it. Until then no other home of the region is prepared here.
 *
 * Who dies, and when:
 *   - the taker, before the seal: what it had goes, the move begins again. What the history took of it is
 *     forgotten with the restart. After the seal the keeper has all of it: it is prepared, or the home;
 *   - the giver, before it has heard that it is not the home any more: its next server adopts a home, and
 *     leaves it when it hears so, or with the region's definition (definitions.c). Until then it answers
 *     for the versions that it has, and these are right for ever;
 *   - the giver, while its home leaves: the keeper hears of the base first. So the next server has all of
 *     the home, or none of its base, and then it answers nobody and leaves the rest when it hears so.
 *
 * Which of two homes is the later one: messages to a server can overtake each other. So the registry
 * numbers a region's homes in turn (the term), and what was said of an earlier one is not heard. The
 * keeper has the number too, also of a home that stays the home in a later term (pc__move_stays). What
 * is prepared for a term is no home in an earlier one. Without numbers (0) the last one said is believed.
 *
 * Locks: leaving needs publish_lock, so that no commit is published meanwhile, and region.lock.
 *
 * The steps:
 *   1. taker: pc_engine_rebuild_begin. PC_ERR_TIMEOUT: it was the home itself a moment ago; ask again.
 *      (What pc_engine_retain has said there ends when a home leaves.)
 *   2. giver: pc_engine_home_blocks of the newest version v; pc_engine_stage_home of some of them at v;
 *      taker: pc_engine_pull, pc_engine_rebuild_take; giver: pc_engine_drop_staged. And so on.
 *   3. the same with the blocks that commits have changed in (v, w], at w; as often as one likes.
 *   4. commits are held back, after all that are decided were published at the giver; 3. once more, at
 *      their version. Blocks that are not staged again must be the same in all of these versions.
 *   5. records of the history, from the oldest that is to stay readable on, in order and without a gap up
 *      to the version before that one: pc_engine_stage_record, pull, pc_engine_rebuild_take_record. The
 *      most of them can move while commits go on. None need move: older versions expire then.
 *   6. taker: pc_engine_rebuild_seal_at that version. From here on it outlives the taker's process; until
 *      here the death of that costs the attempt: take and seal say PC_ERR_NO_REGION.
 *   7. the registry writes down that the taker is the home. Then pc_engine_set_homes_of: at the taker,
 *      where PC_ERR_HOME_LOST says that the giver must stay the home, and PC_ERR_NO_REGION that nobody has
 *      used it there: the definition makes it the home then. Next at the giver; and only after that do
 *      commits go on. A giver that is restarted meanwhile has not heard it. A home in memory of others
 *      (pc_engine_create_shared) needs that until pc_region_stats.leaves_home is 0.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ------------------------------------------------------------ what is here */

/* Some blocks of a version that are alike, held. */
struct piece {
    struct pc__home *home;
    unsigned held;
    struct pc__home_part part;
};

/* Under region.lock. */
static int home_has(const struct pc__region *region, uint64_t version)
{
    const bool here = region->home && region->home->base.memfd >= 0 &&
                      region->state != PC__REGION_CREATING;
    if (!here)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu is not homed here",
                        (unsigned long long)region->id);
    if (version > region->home->latest)
        return pc__fail(PC_ERR_NO_VERSION, "version %llu of variable %llu is not here yet",
                        (unsigned long long)version, (unsigned long long)region->id);
    return PC_OK;
}

/* Under region.lock. */
static int resolve(struct pc_engine *engine, const struct pc__region *region, uint64_t version,
                   uint64_t block, uint64_t n, struct pc__home_part *part)
{
    int rc = home_has(region, version);
    if (rc)
        return rc;
    *part = pc__home_resolve(engine, region, region->home, version, block, n);
    rc = pc__home_knows(engine, region, version);
    return rc ? pc__fail(rc, "version %llu of variable %llu is not kept here any more",
                         (unsigned long long)version, (unsigned long long)region->id)
              : PC_OK;
}

static int take_piece(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                      uint64_t block, uint64_t n, struct piece *piece)
{
    pthread_mutex_lock(&region->lock);
    int rc = resolve(engine, region, version, block, n, &piece->part);
    const bool in_file = piece->part.kind == PC__HOME_FILE; /* of a record: the taker could not tell it apart */
    if (!rc && (in_file || piece->part.kind == PC__HOME_LOST))
        rc = pc__fail(PC_ERR_HOME_LOST, "block %llu of variable %llu is %s", (unsigned long long)block,
                      (unsigned long long)region->id, in_file ? "in its file, and not here" : "lost");
    if (!rc) {
        piece->home = region->home;
        piece->held = pc__home_hold(region->home);
    }
    pthread_mutex_unlock(&region->lock);
    return rc;
}

struct of_home {
    struct pc_engine *engine;
    struct pc__region *region;
    uint64_t version;
};

/* Its holes stay holes of the file: they are read as zeros. */
static int write_piece(const struct of_home *of, const struct piece *piece, uint64_t block, int fd,
                       uint64_t offset)
{
    uint8_t composed[PC_BLOCK_BYTES];
    if (piece->part.kind == PC__HOME_ZEROS)
        return PC_OK;
    if (piece->part.kind == PC__HOME_MEMORY)
        return pc__rebuild_write(fd, piece->part.bytes, piece->part.n_blocks << PC_BLOCK_SHIFT, offset);
    int rc = pc__home_compose(of->engine, of->region, piece->home, of->version, piece->part.kind,
                              block, composed);
    return rc ? rc : pc__rebuild_write(fd, composed, sizeof composed, offset);
}

static int write_runs(void *arg, const struct pc_run *runs, size_t n_runs, int fd, uint64_t offset)
{
    const struct of_home *of = arg;
    int rc = PC_OK;
    for (size_t i = 0; i < n_runs && !rc; i++) {
        uint64_t at = runs[i].first_block, end = at + runs[i].n_blocks, n;
        for (; at < end && !rc; at += n, offset += n << PC_BLOCK_SHIFT) {
            struct piece piece;
            n = end - at < PC__BOUNCE_BLOCKS ? end - at : PC__BOUNCE_BLOCKS; /* the worker waits for us */
            rc = take_piece(of->engine, of->region, of->version, at, n, &piece);
            if (rc)
                break;
            n = piece.part.n_blocks;
            rc = write_piece(of, &piece, at, fd, offset);
            pc__home_release(of->engine, of->region, piece.home, piece.held);
        }
    }
    return rc;
}

PC_API int64_t pc_engine_stage_home(pc_engine *engine, uint64_t id, uint64_t version,
                                    uint64_t commit_id, const struct pc_run *runs, size_t n_runs)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    struct of_home of = {engine, region, version};
    int64_t rc =
        pc__rebuild_stage(engine, region, version, commit_id, runs, n_runs, write_runs, &of);
    pc__region_put(engine, region);
    return rc;
}

#define LOOK_AT_ONCE_BLOCKS 4096u /* under one hold of the lock */

/* Adds those of [first, past) that are not zeros. Under region.lock. */
static int add_data(const struct of_home *of, struct pc__blockset *data, uint64_t first, uint64_t past)
{
    struct pc__home_part part;
    for (uint64_t at = first; at < past; at += part.n_blocks) {
        int rc = resolve(of->engine, of->region, of->version, at, past - at, &part);
        if (rc)
            return rc;
        const bool is_damaged =
            part.kind == PC__HOME_LOST && pc__home_damaged(of->region->home, at, 1) == at;
        if (part.kind == PC__HOME_ZEROS || part.kind == PC__HOME_FILE ||
            (part.kind == PC__HOME_LOST && !is_damaged)) /* the other end would take it for zeros */
            continue;
        if (pc__blockset_add(data, at, part.n_blocks) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
    }
    return PC_OK;
}

PC_API int64_t pc_engine_home_blocks(pc_engine *engine, uint64_t id, uint64_t version,
                                     struct pc_run *runs, size_t capacity)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    const uint64_t n_blocks = pc__region_blocks(region);
    const struct of_home of = {engine, region, version};
    struct pc__blockset data = {0};
    int64_t rc = n_blocks ? pc__blockset_init(&data, n_blocks)
                          : pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    for (uint64_t at = 0, n; at < n_blocks && !rc; at += n) {
        n = n_blocks - at < LOOK_AT_ONCE_BLOCKS ? n_blocks - at : LOOK_AT_ONCE_BLOCKS;
        pthread_mutex_lock(&region->lock);
        rc = add_data(&of, &data, at, at + n);
        pthread_mutex_unlock(&region->lock);
    }
    if (!rc)
        rc = pc__rebuild_runs_of(&data, runs, capacity);
    pc__blockset_free(&data);
    pc__region_put(engine, region);
    return rc;
}

/* Of a commit that is not applied yet: what the record of the version before it will have. 0: there is
 * none. Under region.lock. */
static int64_t pending_runs(const struct pc__home *home, uint64_t version, struct pc_run **runs)
{
    pc__each(link, (struct pc__link *)(uintptr_t)&home->pending)
    {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->version != version + 1)
            continue;
        *runs = malloc(layer->n_runs * sizeof **runs);
        if (!*runs)
            return pc__fail(PC_ERR_NO_MEMORY, "a record's runs");
        memcpy(*runs, layer->runs, layer->n_runs * sizeof **runs);
        return layer->n_runs;
    }
    return 0;
}

static int64_t recorded_runs(struct pc_engine *engine, uint64_t id, uint64_t version,
                             struct pc_run **runs)
{
    int64_t n = pc__history_runs(engine->history, id, version, NULL, 0);
    if (n <= 0)
        return n;
    *runs = malloc((size_t)n * sizeof **runs);
    if (!*runs)
        return pc__fail(PC_ERR_NO_MEMORY, "a record's runs");
    int64_t again = pc__history_runs(engine->history, id, version, *runs, (size_t)n);
    return again < 0 ? again : n; /* a record never changes, but may go */
}

PC_API int64_t pc_engine_stage_record(pc_engine *engine, uint64_t id, uint64_t version,
                                      uint64_t commit_id)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    struct pc_run *runs = NULL;
    pthread_mutex_lock(&region->lock);
    int64_t n = home_has(region, version + 1);
    const bool pends = !n && version >= region->home->history_from;
    if (pends)
        n = pending_runs(region->home, version, &runs);
    pthread_mutex_unlock(&region->lock);
    if (!n)
        n = recorded_runs(engine, id, version, &runs);
    if (!n)
        n = pc__fail(PC_ERR_EXPIRED, "a record of no blocks");
    struct of_home of = {engine, region, version};
    if (n > 0)
        n = pc__rebuild_stage(engine, region, version, commit_id, runs, (size_t)n, write_runs, &of);
    free(runs);
    pc__region_put(engine, region);
    return n;
}

/* ------------------------------------------------------------------ the taker */

/* Also where nothing of the version before is to be had, that is noted, as it is where a commit keeps
 * nothing: after a restart there may be records of a home that was here long ago, of which this server
 * knew nothing any more. Those were right, but for blocks that were lost then. */
static int begin_at(struct pc_engine *engine, uint64_t region, uint64_t version)
{
    const bool begins = version && !pc__history_noted(engine->history, region, version - 1);
    return begins ? pc__history_skip(engine->history, region, version - 1) : PC_OK;
}

struct record {
    struct pc_engine *engine;
    struct pc__region *region;
    int fd;
    uint64_t version;              /* without a layer: the history ends before it */
    struct pc__layer *layer;
};

static int read_record(void *arg, uint64_t block, uint64_t n, uint8_t *out)
{
    const struct pc__layer *layer = arg;
    for (uint64_t k = 0; n; n -= k, block += k, out += k << PC_BLOCK_SHIFT) {
        const uint64_t at = pc__layer_find(layer, block, &k);
        if (at == UINT64_MAX)
            return PC_ERR_PROTOCOL;
        k = k < n ? k : n;
        const int rc = pc__layer_read(layer, at, k, out);
        if (rc)
            return rc;
    }
    return PC_OK;
}

static int check_filled(const struct record *record)
{
    pthread_mutex_lock(&record->region->lock);
    int rc = pc__rebuild_is_filled_by(record->region, record->fd);
    pthread_mutex_unlock(&record->region->lock);
    return rc;
}

/* By the worker, which alone appends: nothing else of the history changes meanwhile. */
static int append_record(void *arg)
{
    const struct record *record = arg;
    struct pc__layer *layer = record->layer;
    const uint64_t version = layer ? layer->head->base_version : record->version;
    int rc = check_filled(record);
    if (!rc)
        rc = begin_at(record->engine, record->region->id, version);
    if (rc || !layer)
        return rc;
    return pc__history_append(record->engine->history, layer->region, version, layer->runs,
                              layer->n_runs, read_record, layer);
}

int pc__move_end_history(struct pc_engine *engine, struct pc__region *region, int fd, uint64_t version)
{
    struct record end = {engine, region, fd, version, NULL};
    int rc = pc__worker_do(engine, append_record, &end);
    return rc ? pc__fail(rc, "the history of variable %llu", (unsigned long long)region->id) : PC_OK;
}

PC_API int pc_engine_rebuild_take_record(pc_engine *engine, uint64_t id, int fd, uint64_t commit_id)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "variable %llu", (unsigned long long)id);
    struct record record = {engine, region, fd, 0, pc__layer_get(engine, pc__layer_id(id, commit_id))};
    int rc = check_filled(&record);
    if (!rc && !record.layer)
        rc = pc__fail(PC_ERR_NO_VERSION, "nothing is staged for variable %llu",
                      (unsigned long long)id);
    if (!rc && record.layer->flags)
        rc = pc__fail(PC_ERR_PROTOCOL, "a delta of variable %llu has no content",
                      (unsigned long long)id);
    const struct pc_run *last = !rc ? &record.layer->runs[record.layer->n_runs - 1] : NULL;
    if (!rc && last->first_block + last->n_blocks > region->n_blocks)
        rc = pc__fail(PC_ERR_RANGE, "blocks outside of the region");
    if (!rc && (rc = pc__worker_do(engine, append_record, &record)))
        rc = pc__fail(rc, "a record of the history of variable %llu", (unsigned long long)id);
    pc__layer_put(record.layer);
    if (!rc)
        pc__layer_drop_staged(engine, id, commit_id);
    pc__region_put(engine, region);
    return rc;
}

/* ------------------------------------------------------------------ the giver */

/* Under region.lock: who maps the base keeps it. What its blocks are is noted for forks; without memory
 * for that they take nothing from it. */
static void leave_base(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                       struct pc__generation *generation)
{
    const struct pc__blockset *data = &home->base.data;
    uint64_t at = 0, end;
    for (; (at = pc__blockset_next(data, at, data->n_blocks)) < data->n_blocks; at = end) {
        end = pc__blockset_next_absent(data, at, data->n_blocks);
        (void)pc__blockset_add(&generation->present, at, end - at);
    }
    generation->was_base = true;
    generation->is_torn = home->base_changes;
    generation->built_in_place = region->built_in_place;
    generation->open_holes = region->open_holes;
    home->base_left_to = pc__generation_take(generation);
    const struct pc__kept kept = pc__kept_of_left(region, generation);
    (void)pc__keep(engine, &kept, generation->memfd);
}

/* Under region.lock: nobody maps it, or can. */
static void drop_base(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                      struct pc__generation *generation)
{
    if (generation)
        pc__generation_drop(engine, region, generation);
    if (home->base.memfd >= 0)
        pc__unkeep(engine, home->base.inode);
    pc__count_sub(&engine->open_holes, region->open_holes);
}

/* Under region.lock: the keeper forgets what of the home goes when nobody looks at it any more. */
static void unkeep_rest(struct pc_engine *engine, const struct pc__home *home)
{
    const struct pc__store *stores[] = {&home->overlay, &home->folded};
    for (size_t i = 0; i < 2; i++)
        if (stores[i]->memfd >= 0)
            pc__unkeep(engine, stores[i]->inode);
    if (home->leaving)
        pc__unkeep(engine, home->leaving->inode);
    pc__each(link, (struct pc__link *)(uintptr_t)&home->pending)
    {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        pc__unkeep(engine, layer->inode);
    }
}

void pc__move_leave(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__home *home = region->home;
    struct pc__generation *base = pc__home_base_generation(region);
    region->home = NULL;
    region->former = home;
    if (base && (base->mappings || engine->settle_until_ns))
        leave_base(engine, region, home, base);
    else
        drop_base(engine, region, home, base);
    unkeep_rest(engine, home);
    region->open_holes = 0;
    region->is_mapped = region->built_in_place = region->base_is_builders = false;
    pc__worker_queue(engine, region);
}

void pc__move_stays(struct pc_engine *engine, struct pc__region *region, uint64_t term)
{
    const struct pc__home *home = region->home;
    region->term = term;
    if (home->base.memfd < 0 || home->n_segments || home->base_changes)
        return; /* the worker says it with what it has made of the base */
    const struct pc__kept kept =
        pc__kept_of_store(region, PC__KEPT_HOME, &home->base, home->base.version);
    (void)pc__keep(engine, &kept, home->base.memfd);
}

void pc__move_left(struct pc_engine *engine, struct pc__region *region)
{
    pc__layers_drop_published(engine, region->id);
    pc__sessions_let_go(engine, region->id); /* what rests keeps the base */
    pc__region_release(engine, region, PC_OK, 0, false);
}

void pc__move_base_is_whole(struct pc_engine *engine, struct pc__region *region,
                            struct pc__home *home, uint64_t version)
{
    struct pc__generation *generation = home->base_left_to;
    if (!generation)
        return;
    generation->is_torn = false;
    pc__generation_is_at(generation, version);
    if (pc__link_empty(&generation->link)) /* its last lease is gone */
        return;
    const struct pc__kept kept = pc__kept_of_left(region, generation);
    (void)pc__keep(engine, &kept, generation->memfd);
}

void pc__move_end_former(struct pc_engine *engine, struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    struct pc__home *home = region->former;
    const bool over = home && !pc__home_is_read(home) && !home->change_said;
    pthread_mutex_unlock(&region->lock);
    if (!over)
        return;
    pc__history_forget(engine->history, region->id); /* while no other home can begin */
    pthread_mutex_lock(&region->lock);
    region->former = NULL;
    pthread_mutex_unlock(&region->lock);
    pc__home_free(engine, home, region->length_bytes);
}

int pc__move_adopt_base(struct pc_engine *engine, struct pc__region *region,
                        const struct pc__kept *kept, int fd)
{
    struct pc__generation *generation = pc__generation_new(region->n_blocks, true);
    if (!generation) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a generation");
    }
    generation->memfd = fd;
    generation->inode = kept->inode;
    generation->on_disk = kept->on_disk;
    generation->version = kept->version;
    generation->was_base = generation->adopted = true;
    generation->built_in_place = kept->reserved[2] != 0;
    generation->is_torn = kept->reserved[6] != 0;
    memcpy(&generation->open_holes, kept->reserved + PC__KEPT_HOLES_AT, sizeof generation->open_holes);
    pc__count_add(&engine->open_holes, generation->open_holes);
    pc__link_push(&region->generations, &generation->link);
    return pc__memfd_blocks(&generation->present, fd, region->length_bytes);
}
