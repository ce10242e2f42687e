/* layer.c - commits on their way: staged by a process of this node or pulled from another server,
 * published once the registry gave them a version, dropped where it refused.
 *
 * Owns the staged layers (engine.lock). A published one at its home belongs to that (region.lock).
 * The keeper holds every layer, with its version once it has one: a server that dies loses none.
 *
 * A layer whose writer is gone, or silent for stage_timeout (less after a restart), is asked about
 * (NEED_OUTCOME) until there is an answer. One layer's file: core/layer_file.c.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ASK_AGAIN_NS 10000000000ull
/* What a server finds at its keeper after a restart: the writer's last word may have been lost with
 * the old process, so nobody may ever say it again. A writer that is still at work commits, or
 * stages the next layer, within this time, or else begins anew under another id. */
#define ASK_ADOPTED_NS 10000000000ull

/* ----------------------------------------------------------------- staging */

/* Under engine.lock. */
static struct pc__layer *find(struct pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pc__each(link, &engine->staged)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->commit_id == commit_id && layer->region == region)
            return layer;
    }
    return NULL;
}

int pc__layer_keep(struct pc_engine *engine, const struct pc__layer *layer)
{
    const struct pc__kept kept = {.region = layer->region,
                                  .version = layer->version,
                                  .length_bytes = layer->bytes,
                                  .kind = PC__KEPT_LAYER,
                                  .sealed = 1,
                                  .inode = layer->inode,
                                  .on_disk = layer->on_disk,
                                  .commit_id = layer->commit_id};
    return pc__keep(engine, &kept, layer->memfd);
}

/* Under engine.lock. Staged again after a lost reply: the first one stays, under the new owner. */
static bool stays(struct pc_engine *engine, const struct pc__layer *layer)
{
    struct pc__layer *old = find(engine, layer->region, layer->commit_id);
    if (!old)
        return false;
    old->owner = layer->owner ? layer->owner : old->owner;
    if (!old->version)
        old->ask_at_ns = pc__now_ns() + engine->stage_timeout_ns;
    if (old->inode != layer->inode || old->on_disk != layer->on_disk)
        pc__unkeep(engine, layer->inode);
    return true;
}

static int add_staged(struct pc_engine *engine, struct pc__layer *layer, uint64_t silent_ns)
{
    layer->ask_at_ns = pc__now_ns() + silent_ns;
    pthread_mutex_lock(&engine->lock);
    bool first = pc__link_empty(&engine->staged);
    bool again = stays(engine, layer);
    if (!again)
        pc__link_push(&engine->staged, &layer->link);
    pthread_mutex_unlock(&engine->lock);
    if (again) {
        pc__layer_put(layer);
        return PC_OK;
    }
    uint64_t one = 1; /* loop 0 may sleep without a deadline */
    if (first && engine->loops[0].mail_event >= 0)
        (void)!write(engine->loops[0].mail_event, &one, sizeof one);
    pc__count_add(&engine->count.layers, 1);
    pc__count_add(&engine->count.layer_bytes, layer->bytes);
    pc__count_add(&engine->count.commits_staged, 1);
    return PC_OK;
}

int pc__layer_keep_again(struct pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pthread_mutex_lock(&engine->publish_lock);
    pthread_mutex_lock(&engine->lock);
    const struct pc__layer *layer = find(engine, region, commit_id);
    pthread_mutex_unlock(&engine->lock);
    int rc = layer ? pc__layer_keep(engine, layer) : PC_OK;
    pthread_mutex_unlock(&engine->publish_lock);
    return rc;
}

static int stage(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes, int fd,
                 uint64_t owner, bool or_in_memory)
{
    struct pc__layer *layer;
    const bool on_disk = pc__layer_is_in_file(fd, bytes);
    int rc = pc__layer_open(fd, bytes, region, commit_id, on_disk, &layer);
    if (rc)
        return rc;
    if (layer->flags & PC__LAYER_MADE_WHOLE) {
        pc__layer_put(layer);
        return pc__fail(PC_ERR_PROTOCOL, "a layer that only its home makes");
    }
    layer->owner = owner;
    pthread_mutex_lock(&engine->lock);
    bool again = stays(engine, layer);
    pthread_mutex_unlock(&engine->lock);
    if (again) {
        pc__layer_put(layer);
        return pc__layer_keep_again(engine, region, commit_id);
    }
    rc = pc__layer_spill(engine, &layer);
    if (rc && !(or_in_memory && rc == PC_ERR_NO_SPACE)) {
        pc__layer_put(layer);
        return rc;
    }
    rc = pc__layer_keep(engine, layer); /* before anybody can publish it */
    if (rc) {
        pc__unkeep(engine, layer->inode);
        pc__layer_put(layer);
        return rc;
    }
    return add_staged(engine, layer, engine->stage_timeout_ns);
}

int pc__layer_stage(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes,
                    int fd, uint64_t owner)
{
    return stage(engine, region, commit_id, bytes, fd, owner, false);
}

int pc__layer_stage_made(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes,
                         int fd)
{
    return stage(engine, region, commit_id, bytes, fd, 0, true);
}

/* Made whole, and the server died before the delta was gone. Where that comes second, it does not stay. */
static void drop_delta(struct pc_engine *engine, const struct pc__layer *whole)
{
    pthread_mutex_lock(&engine->lock);
    struct pc__layer *delta = find(engine, whole->region, whole->commit_id);
    if (delta)
        pc__link_remove(&delta->link);
    pthread_mutex_unlock(&engine->lock);
    if (delta)
        pc__layer_end(engine, delta);
}

int pc__layer_adopt(struct pc_engine *engine, const struct pc__kept *kept, int fd)
{
    struct pc__layer *layer;
    int rc = pc__layer_open(fd, kept->length_bytes, kept->region, kept->commit_id,
                            kept->on_disk != 0, &layer);
    if (rc && kept->version) { /* committed: the keeper has it for a server that can read it */
        pc__engine_event(engine, PC_EVENT_LOG, rc, kept->region, 0,
                         "the changes of version %llu of variable %llu cannot be read: %s",
                         (unsigned long long)kept->version, (unsigned long long)kept->region,
                         pc_last_message());
        return PC_OK;
    }
    if (rc) { /* it was never answered for, so it is nobody's */
        pc__unkeep(engine, kept->inode);
        return PC_OK;
    }
    layer->version = kept->version;
    layer->undurable = engine->durable && layer->flags & PC__LAYER_MADE_WHOLE; /* for all that is known */
    if (layer->flags & PC__LAYER_MADE_WHOLE)
        drop_delta(engine, layer);
    return add_staged(engine, layer,
                      engine->stage_timeout_ns < ASK_ADOPTED_NS ? engine->stage_timeout_ns
                                                                : ASK_ADOPTED_NS);
}

static struct pc__layer *take_out(struct pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pthread_mutex_lock(&engine->lock);
    struct pc__layer *layer = find(engine, region, commit_id);
    if (layer)
        pc__link_remove(&layer->link);
    pthread_mutex_unlock(&engine->lock);
    return layer;
}

void pc__layer_drop_staged(struct pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pthread_mutex_lock(&engine->publish_lock);
    struct pc__layer *layer = take_out(engine, region, commit_id);
    if (layer) {
        pc__count_add(&engine->count.commits_dropped, 1);
        pc__layer_end(engine, layer);
    }
    pthread_mutex_unlock(&engine->publish_lock);
}

static void drop_those(struct pc_engine *engine, uint64_t region,
                       bool (*is_one)(const struct pc__layer *layer))
{
    struct pc__link gone;
    pc__link_init(&gone);
    pthread_mutex_lock(&engine->publish_lock);
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->staged)
    {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->region != region || !is_one(layer))
            continue;
        pc__link_remove(link);
        pc__link_push(&gone, link);
    }
    pthread_mutex_unlock(&engine->lock);
    pc__each(at, &gone)
    {
        pc__count_add(&engine->count.commits_dropped, 1);
        pc__layer_end(engine, pc__of(at, struct pc__layer, link));
    }
    pthread_mutex_unlock(&engine->publish_lock);
}

/* Published, and still here for want of those before: a home's that has moved away. */
static bool is_published(const struct pc__layer *layer)
{
    return layer->version != 0;
}

static bool is_any(const struct pc__layer *layer)
{
    (void)layer;
    return true;
}

void pc__layers_drop_published(struct pc_engine *engine, uint64_t region)
{
    drop_those(engine, region, is_published);
}

void pc__layers_forget(struct pc_engine *engine, uint64_t region)
{
    pc__retained_forget(engine, region);
    drop_those(engine, region, is_any);
}

struct pc__layer *pc__layer_get(struct pc_engine *engine, uint64_t layer_id)
{
    struct pc__layer *found = NULL;
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->staged)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (pc__layer_id(layer->region, layer->commit_id) != layer_id)
            continue;
        found = layer;
        pc__ref_take(&layer->refs);
        break;
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

/* -------------------------------------------------------------- publishing */

/* The staged layer of the region that is its next version, taken out. */
static struct pc__layer *take_next(struct pc_engine *engine, uint64_t region, uint64_t version)
{
    struct pc__layer *found = NULL;
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->staged)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->region != region || layer->version == 0 || layer->version > version)
            continue;
        found = layer;
        pc__link_remove(&layer->link);
        break;
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

static bool lies_in(const struct pc__layer *layer, uint64_t n_blocks)
{
    if (!layer->n_runs)
        return true;
    const struct pc_run *last = &layer->runs[layer->n_runs - 1];
    return last->first_block + last->n_blocks <= n_blocks;
}

/* Moves what is next, and what follows it, to the home. */
static void take_published(struct pc_engine *engine, struct pc__region *region)
{
    struct pc__home *home = region->home;
    struct pc__layer *layer;
    uint64_t next;
    for (;;) {
        pthread_mutex_lock(&region->lock);
        next = home->latest + 1;
        pthread_mutex_unlock(&region->lock);
        layer = take_next(engine, region->id, next);
        if (!layer)
            return;
        pthread_mutex_lock(&region->lock);
        bool fits = layer->version == home->latest + 1;
        fits = fits && lies_in(layer, region->n_blocks);
        if (fits) {
            pc__link_push(&home->pending, &layer->link);
            home->latest = layer->version;
            for (uint32_t i = 0; i < layer->n_runs; i++)
                engine->observers.blocks_changed(region, (uint32_t)layer->version,
                                                 layer->runs[i].first_block,
                                                 layer->runs[i].n_blocks);
            region->version = layer->version > region->version ? layer->version : region->version;
            pc__worker_queue(engine, region);
        }
        pthread_mutex_unlock(&region->lock);
        if (fits) {
            pc__count_add(&engine->count.commits_published, 1);
            continue;
        }
        if (layer->version == next)
            pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_RANGE, region->id, 0,
                             "version %llu of variable %llu has blocks outside of it",
                             (unsigned long long)next, (unsigned long long)region->id);
        pc__layer_end(engine, layer); /* else it was applied already, before a restart */
    }
}

/* Under engine.lock; the loss of a question is made good by the next round. */
static void ask(struct pc_engine *engine, struct pc__layer *layer, uint64_t now_ns)
{
    const struct pc_event event = {.kind = PC_EVENT_NEED_OUTCOME,
                                   .region = layer->region,
                                   .commit_id = layer->commit_id};
    layer->ask_at_ns = now_ns + ASK_AGAIN_NS;
    (void)pc__engine_request(engine, &event);
}

/* Python finds out whether this is the layer's home. False: there is no such layer. */
static bool ask_about(struct pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pthread_mutex_lock(&engine->lock);
    struct pc__layer *layer = find(engine, region, commit_id);
    if (layer && !layer->version)
        ask(engine, layer, pc__now_ns());
    pthread_mutex_unlock(&engine->lock);
    return layer != NULL;
}

/* publish_lock is held. *waited_for: somebody may wait for the version. */
static int publish(struct pc_engine *engine, struct pc__region *region, uint64_t id,
                   uint64_t commit_id, uint64_t version, bool *waited_for)
{
    bool is_home = false, is_new = false, is_undecided = true, is_ahead = false;
    uint64_t latest = 0, used_blocks = 0;
    if (region) {
        pthread_mutex_lock(&region->lock);
        is_home = region->home && region->state != PC__REGION_CREATING;
        /* After a restart: this may be its home, which is made again in a moment (segments). */
        is_undecided = !is_home && (region->state == PC__REGION_UNKNOWN ||
                                    region->state == PC__REGION_CREATING);
        /* This is to be its home, as the registry may have it in its journal already: what comes after
         * the version that was prepared has to be there then. It is nobody else's to keep. */
        is_ahead = !is_home && region->prepared && region->prepared_sealed &&
                   version > region->prepared->base.version;
        used_blocks = region->state == PC__REGION_READY ? region->n_blocks : 0;
        latest = is_home ? region->home->latest : 0;
        is_new = version > latest;
        pthread_mutex_unlock(&region->lock);
    }
    int rc = PC_OK;
    if (is_ahead) {
        (void)ask_about(engine, id, commit_id);
        rc = pc__fail(PC_ERR_NO_REGION, "variable %llu is prepared here, and not homed here yet",
                      (unsigned long long)id);
    } else if (is_undecided) {
        rc = ask_about(engine, id, commit_id)
                 ? pc__fail(PC_ERR_NO_REGION, "variable %llu is not known here (yet)",
                            (unsigned long long)id)
                 : PC_OK;
    } else if (!is_home || !is_new) { /* its home pulled it, or it is known */
        struct pc__layer *layer = take_out(engine, id, commit_id);
        const bool is_content = layer && !(layer->flags & PC__LAYER_DELTA);
        if (is_content && !is_home && lies_in(layer, used_blocks))
            pc__retained_add(engine, layer, version); /* the home may be lost before anybody reads it */
        else if (layer)
            pc__layer_end(engine, layer);
    } else {
        pthread_mutex_lock(&engine->lock);
        struct pc__layer *layer = find(engine, id, commit_id);
        if (layer) {
            layer->version = version;
            layer->ask_at_ns = UINT64_MAX;
            pc__ref_take(&layer->refs);
        }
        pthread_mutex_unlock(&engine->lock);
        if (layer) {
            (void)pc__layer_keep(engine, layer); /* says the version; else the next server asks for it */
            pc__layer_put(layer);
            take_published(engine, region);
            pthread_mutex_lock(&region->lock);
            rc = region->home->latest < version ? PC_ERR_NO_VERSION : PC_OK;
            *waited_for = region->parked || !pc__link_empty(&region->pending);
            pthread_mutex_unlock(&region->lock);
        } else {
            rc = pc__fail(PC_ERR_HOME_LOST, "version %llu of variable %llu was never staged here",
                          (unsigned long long)version, (unsigned long long)id);
        }
    }
    return rc;
}

int pc__layer_publish(struct pc_engine *engine, uint64_t id, uint64_t commit_id, uint64_t version)
{
    struct pc__region *region = pc__region_get(engine, id);
    bool waited_for = false, is_mapped = false;
    pthread_mutex_lock(&engine->publish_lock);
    int rc = publish(engine, region, id, commit_id, version, &waited_for);
    pthread_mutex_unlock(&engine->publish_lock);
    if (region && !rc) {
        pthread_mutex_lock(&region->lock);
        is_mapped = region->mappings != 0;
        PC__AUDIT(pc__region_audit(region));
        pthread_mutex_unlock(&region->lock);
    }
    if (is_mapped) /* else what rests keeps the version from becoming the base */
        pc__sessions_let_go(engine, id);
    if (waited_for)
        pc__region_release(engine, region, PC_OK, 0, false);
    if (region)
        pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_publish(pc_engine *engine, uint64_t region, uint64_t version,
                             uint64_t commit_id)
{
    return pc__layer_publish(engine, region, commit_id, version);
}

PC_API int pc_engine_drop_staged(pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pc__layer_drop_staged(engine, region, commit_id);
    return PC_OK;
}

PC_API int pc_engine_caught_up(pc_engine *engine, uint64_t id, int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_ERR_NO_REGION;
    pthread_mutex_lock(&region->lock);
    region->asked_published = false;
    uint64_t from = region->home ? region->home->latest + 1 : 0;
    pthread_mutex_unlock(&region->lock);
    pc__region_release(engine, region, error, from, true);
    pc__region_put(engine, region);
    return PC_OK;
}

/* ------------------------------------------------- whose writer says nothing */

void pc__layers_orphan(struct pc_engine *engine, uint64_t owner)
{
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->staged)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->owner == owner && !layer->version)
            ask(engine, layer, pc__now_ns());
    }
    pthread_mutex_unlock(&engine->lock);
}

uint64_t pc__layers_deadline(struct pc__loop *loop)
{
    struct pc_engine *engine = loop->engine;
    uint64_t earliest = UINT64_MAX;
    if (loop->index != 0)
        return earliest;
    pthread_mutex_lock(&engine->lock);
    earliest = engine->ask_settled_at_ns;
    pc__each(link, &engine->staged)
    {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        earliest = layer->ask_at_ns < earliest ? layer->ask_at_ns : earliest;
    }
    pthread_mutex_unlock(&engine->lock);
    return earliest;
}

void pc__layers_tick(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc_engine *engine = loop->engine;
    if (loop->index != 0)
        return;
    pthread_mutex_lock(&engine->lock);
    pc__each(link, &engine->staged)
    {
        struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->ask_at_ns <= now_ns)
            ask(engine, layer, now_ns);
    }
    pc__retained_request(engine, now_ns);
    pthread_mutex_unlock(&engine->lock);
}

/* ----------------------------------------------------------------- pulling */

PC_API int pc_engine_has_layer(pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    pthread_mutex_lock(&engine->lock);
    const bool here = find(engine, region, commit_id) != NULL;
    pthread_mutex_unlock(&engine->lock);
    return here;
}

/* ------------------------------------------------------------------- files */

/* publish_lock is held: a layer that leaves the staged ones for its home is at one of the two. Returns the file,
 * or an error. */
static int open_layer(const struct pc__layer *layer, uint64_t *bytes)
{
    const int fd = fcntl(layer->memfd, F_DUPFD_CLOEXEC, 0);
    *bytes = layer->bytes;
    return fd < 0 ? pc__fail_errno("dup of a layer's file") : fd;
}

static int open_staged(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t *bytes)
{
    pthread_mutex_lock(&engine->lock);
    const struct pc__layer *layer = find(engine, region, commit_id);
    const int fd = layer ? open_layer(layer, bytes) : PC_ERR_NO_VERSION;
    pthread_mutex_unlock(&engine->lock);
    return fd;
}

static int open_pending(struct pc_engine *engine, uint64_t id, uint64_t commit_id, uint64_t *bytes)
{
    struct pc__region *region = pc__region_get(engine, id);
    int fd = PC_ERR_NO_VERSION;
    if (!region)
        return fd;
    pthread_mutex_lock(&region->lock);
    struct pc__link *pending = region->home ? &region->home->pending : NULL;
    for (struct pc__link *link = pending ? pending->next : NULL; link != pending; link = link->next) {
        const struct pc__layer *layer = pc__of(link, struct pc__layer, link);
        if (layer->commit_id == commit_id)
            fd = open_layer(layer, bytes);
    }
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return fd;
}

PC_API int pc_engine_layer_file(pc_engine *engine, uint64_t region, uint64_t commit_id, int *fd,
                                uint64_t *bytes)
{
    pthread_mutex_lock(&engine->publish_lock);
    *fd = open_staged(engine, region, commit_id, bytes);
    if (*fd == PC_ERR_NO_VERSION)
        *fd = open_pending(engine, region, commit_id, bytes);
    pthread_mutex_unlock(&engine->publish_lock);
    const int rc = *fd;
    if (rc >= 0)
        return PC_OK;
    *fd = -1;
    return rc != PC_ERR_NO_VERSION ? rc
                                   : pc__fail(rc, "no layer of variable %llu is here under %#llx",
                                              (unsigned long long)region, (unsigned long long)commit_id);
}
