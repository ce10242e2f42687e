/* pull.c - a home fetches the layer of a commit from the server of its writer, as blocks of a file.
 *
 * The layer's file is a region of its own that is in no table, whose home is that server: so its blocks
 * come as all others do. When all are here the layer is staged, and Python is told once the keeper has
 * heard of it.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <fcntl.h>
#include <stdlib.h>

#define URGENT_LAYER_BLOCKS 256u /* a commit waits for a layer that is so small */

/* A layer is in no hurry, and may be large. What is asked for waits on the way, in buffers that the answers
 * to others pass too: of a link of 1 Gbit/s, 8 MiB are 67 ms. So just as many requests are on the wire
 * as keep it busy: more where answers come at once, fewer where they take long. */
uint32_t pc__layer_requests(uint32_t most, uint32_t n_sent, uint64_t took_ns)
{
    if (took_ns > PC__LAYER_TRIP_NS)
        return most > PC__LAYER_REQUESTS_LEAST ? most - 1 : most;
    /* With fewer on the wire nobody knows how long more of them take. */
    return n_sent >= most && most < PC__BULK_REQUESTS ? most + 1 : most;
}

/* An answer of a layer has come whole. */
void pc__layer_came(struct pc__lane *lane, uint64_t took_ns)
{
    lane->layer_requests = pc__layer_requests(lane->layer_requests, lane->n_sent, took_ns);
}

/* How many may be on the wire when the first that is queued is sent. */
uint32_t pc__most_sent(const struct pc__peer *peer, const struct pc__lane *lane)
{
    const struct pc__fetch *next = pc__of(lane->queued.next, struct pc__fetch, link);
    if (lane == &peer->lanes[0])
        return PC__URGENT_REQUESTS;
    return next->generation->is_layer && !next->sink ? lane->layer_requests : PC__BULK_REQUESTS;
}

struct pc__pull {
    struct pc_engine *engine;
    struct pc__region *region;         /* a region of its own: the file's blocks */
    struct pc__generation *generation;
    uint64_t of_region, commit_id, bytes;
};

static void say_pulled(struct pc_engine *engine, uint64_t region, uint64_t commit_id, int error)
{
    const struct pc_event event = {
        .kind = PC_EVENT_PULLED, .error = error, .region = region, .commit_id = commit_id};
    (void)pc__engine_request(engine, &event);
}

/* The commit may be decided once the keeper has heard of the layer. */
struct kept_pull {
    struct pc_engine *engine;
    uint64_t region, commit_id;
};

static void pull_heard(void *arg, int rc, bool cancelled)
{
    struct kept_pull *kept = arg;
    if (!cancelled)
        say_pulled(kept->engine, kept->region, kept->commit_id, rc);
    free(kept);
}

/* The layer is here: it is said when the keeper has heard of it. */
static void say_pulled_when_kept(struct pc_engine *engine, uint64_t region, uint64_t commit_id)
{
    struct kept_pull *kept = malloc(sizeof *kept);
    if (!kept) {
        say_pulled(engine, region, commit_id, PC_ERR_NO_MEMORY);
        return;
    }
    *kept = (struct kept_pull){engine, region, commit_id};
    const int waits = pc__keep_when(engine, pull_heard, kept);
    if (waits != 1)
        pull_heard(kept, waits, false);
}

static void end_pull(struct pc__pull *pull, int error)
{
    struct pc_engine *engine = pull->engine;
    if (!error) {
        int fd = fcntl(pull->generation->memfd, F_DUPFD_CLOEXEC, 0);
        error = fd < 0 ? pc__fail_errno("dup of a layer")
                       : pc__layer_stage(engine, pull->of_region, pull->commit_id, pull->bytes, fd,
                                         0);
    }
    if (error)
        say_pulled(engine, pull->of_region, pull->commit_id, error);
    else
        say_pulled_when_kept(engine, pull->of_region, pull->commit_id);
    pc__generation_put(engine, pull->generation);
    pc__region_put(engine, pull->region);
    free(pull);
}

static void pull_ended(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)loop;
    end_pull(mail->pointer, mail->error);
}

/* Its job is done or has failed. Locks are held, so the rest is left to a loop. */
static void all_came(struct pc__job *job, int error, uint64_t server_id, const char *text)
{
    (void)server_id;
    (void)text;
    struct pc__pull *pull = job->arg;
    const struct pc__mail mail = {.run = pull_ended, .pointer = pull, .error = error};
    if (pc__loop_post(&pull->engine->loops[0], &mail)) /* no memory: whoever asked gives up */
        pc__engine_event(pull->engine, PC_EVENT_LOG, PC_ERR_NO_MEMORY, pull->of_region, 0,
                         "a layer that arrived is lost for want of memory");
}

static void begin_pull(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__pull *pull = mail->pointer;
    struct pc__region *region = pull->region;
    struct pc__generation *generation = pull->generation;
    struct pc__job *job = loop->stopping ? NULL : malloc(sizeof *job + sizeof job->runs[0]);
    if (!job) {
        end_pull(pull, loop->stopping ? PC_ERR_CLOSED : PC_ERR_NO_MEMORY);
        return;
    }
    *job = (struct pc__job){.done = all_came, .arg = pull, .remaining_blocks = region->n_blocks, .n_runs = 1};
    job->runs[0] = (struct pc_run){.n_blocks = region->n_blocks};
    struct pc__batch batch;
    pc__batch_init(&batch, region->n_blocks <= URGENT_LAYER_BLOCKS, true);
    pthread_mutex_lock(&region->lock);
    int rc = pc__batch_add(&batch, region, generation, 0, region->n_blocks);
    if (!rc)
        pc__link_push(&generation->jobs, &job->link);
    pthread_mutex_unlock(&region->lock);
    pc__batch_submit(loop, &batch);
    if (rc) {
        free(job);
        end_pull(pull, rc);
    }
}

static int prepare(struct pc__pull *pull, uint64_t server_id)
{
    uint64_t n_blocks = pull->bytes >> PC_BLOCK_SHIFT;
    size_t n_homes = (pull->bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
    pull->region = pc__region_alone(pc__layer_id(pull->of_region, pull->commit_id), n_blocks);
    pull->generation = pc__generation_new(n_blocks, false);
    uint64_t *homes = calloc(n_homes, sizeof *homes);
    if (!pull->region || !pull->generation || !homes) {
        free(homes);
        return pc__fail(PC_ERR_NO_MEMORY, "a layer");
    }
    for (size_t i = 0; i < n_homes; i++)
        homes[i] = server_id;
    pull->region->homes = homes;
    pull->generation->is_layer = true;
    int fd = pc__descriptors_spare();
    if (!fd)
        fd = pc__memfd_make(pull->bytes, &pull->generation->inode);
    if (fd < 0)
        return fd;
    pull->generation->memfd = fd;
    return pc__generation_map(pull->engine, pull->generation);
}

PC_API int pc_engine_pull(pc_engine *engine, uint64_t region, uint64_t commit_id,
                          uint64_t server_id, uint64_t layer_bytes)
{
    if (!region || !commit_id || !server_id ||
        layer_bytes < 2 * PC_BLOCK_BYTES || layer_bytes % PC_BLOCK_BYTES ||
        layer_bytes > PC_WINDOW_END - PC_WINDOW_BEGIN)
        return pc__fail(PC_ERR_RANGE, "a layer of %llu bytes", (unsigned long long)layer_bytes);
    if (pc_engine_has_layer(engine, region, commit_id)) { /* asked again, or whether it is here still */
        int kept = pc__layer_keep_again(engine, region, commit_id);
        if (!kept)
            say_pulled_when_kept(engine, region, commit_id);
        return kept;
    }
    if (server_id == engine->server_id) {
        say_pulled(engine, region, commit_id, PC_ERR_HOME_LOST);
        return PC_OK;
    }
    struct pc__region *home = pc__region_get(engine, region);
    bool behind = false;
    if (home) {
        pthread_mutex_lock(&home->lock);
        behind = home->home && pc__home_is_behind(home->home);
        pthread_mutex_unlock(&home->lock);
        pc__region_put(engine, home);
    }
    if (behind)
        return pc__fail(PC_ERR_TIMEOUT, "the home of variable %llu has commits to apply first",
                        (unsigned long long)region);
    struct pc__pull *pull = calloc(1, sizeof *pull);
    if (!pull)
        return pc__fail(PC_ERR_NO_MEMORY, "a layer");
    *pull = (struct pc__pull){
        .engine = engine, .of_region = region, .commit_id = commit_id, .bytes = layer_bytes};
    int rc = prepare(pull, server_id);
    const struct pc__mail mail = {.run = begin_pull, .pointer = pull};
    if (!rc)
        rc = pc__loop_post(&engine->loops[0], &mail);
    if (rc) {
        pc__generation_put(engine, pull->generation);
        if (pull->region)
            pc__region_put(engine, pull->region);
        free(pull);
    }
    return rc;
}
