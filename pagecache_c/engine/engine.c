/* engine.c - the engine as Python sees it: start, stop, events, definitions, statistics.
 *
 * Entered by Python's threads; what belongs to a loop is posted to it. Locks: see engine.h.
 */
#include "engine/engine.h"
#include "engine/store/retained.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#define LISTEN_BACKLOG 512
#define KEEPER_TIMEOUT_NS 10000000000ull
#define STAGE_TIMEOUT_NS 300000000000ull

/* ------------------------------------------------------------------ events */

static bool grow_events(struct pc_engine *engine)
{
    size_t capacity = engine->events_capacity * 2;
    struct pc_event *grown = calloc(capacity, sizeof *grown);
    if (!grown)
        return false;
    for (size_t i = 0; i < engine->n_events; i++)
        grown[i] = engine->events[(engine->events_begin + i) % engine->events_capacity];
    free(engine->events);
    engine->events = grown;
    engine->events_begin = 0;
    engine->events_capacity = capacity;
    return true;
}

static bool put_event(struct pc_engine *engine, const struct pc_event *event)
{
    pthread_mutex_lock(&engine->event_lock);
    /* Lines for people are dropped when Python is behind. Questions never are: there is at most
     * one for each region, lane and layer, and the ring grows to hold them. */
    bool room = event->kind == PC_EVENT_LOG ? engine->n_events < PC__LOG_EVENTS
                                            : engine->n_events < engine->events_capacity ||
                                                  grow_events(engine);
    if (room) {
        engine->events[(engine->events_begin + engine->n_events) % engine->events_capacity] =
            *event;
        engine->n_events++;
    }
    pthread_mutex_unlock(&engine->event_lock);
    uint64_t one = 1;
    (void)!write(engine->event_fd, &one, sizeof one);
    return room;
}

bool pc__engine_event(struct pc_engine *engine, int kind, int error, uint64_t region,
                      uint64_t server_id, const char *format, ...)
{
    struct pc_event event = {.kind = kind, .error = error, .region = region,
                             .server_id = server_id};
    va_list args;
    va_start(args, format);
    vsnprintf(event.text, sizeof event.text, format, args);
    va_end(args);
    return put_event(engine, &event);
}

bool pc__engine_ask(struct pc_engine *engine, const struct pc_event *event)
{
    return put_event(engine, event);
}

PC_API int pc_engine_event_fd(pc_engine *engine)
{
    return engine->event_fd;
}

PC_API int pc_engine_next_event(pc_engine *engine, struct pc_event *out)
{
    int found = 0;
    pthread_mutex_lock(&engine->event_lock);
    if (engine->n_events) {
        *out = engine->events[engine->events_begin];
        engine->events_begin = (engine->events_begin + 1) % engine->events_capacity;
        engine->n_events--;
        found = 1;
    } else {
        uint64_t count; /* under the lock: an event posted after this makes it readable again */
        (void)!read(engine->event_fd, &count, sizeof count);
    }
    pthread_mutex_unlock(&engine->event_lock);
    return found;
}

/* ----------------------------------------------------------------- history */

static void keep_history(void *arg, int fd, uint64_t inode, uint64_t bytes, bool is_disk)
{
    const struct pc__kept kept = {.length_bytes = bytes,
                                  .kind = PC__KEPT_HISTORY,
                                  .sealed = 1,
                                  .inode = inode,
                                  .on_disk = is_disk};
    (void)pc__keep(arg, &kept, fd); /* old versions: a restart would not have them */
}

static void drop_history(void *arg, uint64_t inode, bool is_disk)
{
    pc__unkeep(arg, inode, is_disk);
}

static void say_history(void *arg, const char *text)
{
    pc__engine_event(arg, PC_EVENT_LOG, PC_ERR_NO_SPACE, 0, 0, "%s", text);
}

static int open_history(struct pc_engine *engine, const struct pc_engine_options *options)
{
    const struct pc__history_options history = {.memory_bytes = options->history_bytes,
                                                .disk_bytes = options->history_disk_bytes,
                                                .directory = options->history_directory,
                                                .arg = engine,
                                                .keep = keep_history,
                                                .drop = drop_history,
                                                .say = say_history};
    return pc__history_open(&history, &engine->history);
}

/* Records of regions that were freed while the last server died. */
static void forget_strangers(struct pc_engine *engine)
{
    size_t n = pc__history_regions(engine->history, NULL, 0);
    uint64_t *ids = n ? calloc(n, sizeof *ids) : NULL;
    if (!ids)
        return; /* they age out */
    n = pc__history_regions(engine->history, ids, n);
    for (size_t i = 0; i < n; i++) {
        struct pc__region *region = pc__region_get(engine, ids[i]);
        if (!region || !region->home)
            pc__history_forget(engine->history, ids[i]);
        if (region)
            pc__region_put(engine, region);
    }
    free(ids);
}

/* Takes back what the last server of this node held. */
static void keeper_lost(void *arg)
{
    pc__engine_event(arg, PC_EVENT_KEEPER_LOST, PC_ERR_CLOSED, 0, 0, "%s", "");
}

PC_API int pc_engine_renew_keeper(pc_engine *engine, int keeper_fd)
{
    if (!engine->keeping)
        return pc__fail(PC_ERR_RANGE, "a server that was started without a keeper");
    return pc__keeping_renew(engine->keeping, keeper_fd);
}

static int adopt(struct pc_engine *engine, int keeper_fd, uint64_t settle_ns)
{
    if (keeper_fd < 0)
        return PC_OK;
    int rc = pc__keeping_open(keeper_fd, keeper_lost, pc__keep_refused, engine, &engine->keeping);
    if (!rc)
        rc = pc__keeper_list(keeper_fd, pc__region_adopt, engine, KEEPER_TIMEOUT_NS);
    if (!rc)
        rc = pc__history_adopted(engine->history);
    if (rc)
        return rc;
    pc__regions_adopted(engine);
    forget_strangers(engine);
    return pc__settle_begin(engine, settle_ns);
}

/* ------------------------------------------------------------- start, stop */

bool pc__engine_makes_huge_pages(struct pc_engine *engine)
{
    char why[PC__HUGE_PAGES_WHY_BYTES];
    if (!pc__huge_pages(why))
        return false;
    if (!atomic_exchange(&engine->huge_pages, true))
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_HUGE_PAGES, 0, 0,
                         "%s in /sys/kernel/mm/transparent_hugepage: this server copies what it "
                         "sends, and makes single pages before it writes, which takes longer. Set "
                         "it to never or advise", why);
    return true;
}

/* Inserts go by UFFDIO_COPY, through maps of our own that nobody reads: it makes single pages,
 * and shows none before it is whole. Where the kernel has no userfaultfd they go by pwrite, which
 * is as good only while shared memory is not made of huge pages: one block would bring 511 of
 * zeros along. */
static int open_uffd(struct pc_engine *engine, bool refused)
{
    struct uffdio_api api = {.api = UFFD_API};
    int fd = refused ? -1 : (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
        close(fd);
        fd = -1;
    }
    engine->uffd = fd;
    char why[PC__HUGE_PAGES_WHY_BYTES];
    if (fd >= 0)
        return PC_OK;
    int rc = pc__huge_pages_open(&engine->setting, PC__HUGE_PAGES_DIRECTORY);
    if (rc || !pc__huge_pages(why))
        return rc;
    return pc__fail(PC_ERR_HUGE_PAGES, "%s in /sys/kernel/mm/transparent_hugepage: set it to never or "
                                       "advise, or allow userfaultfd", why);
}

static int choose_loops(int asked)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int n = asked > 0 ? asked : (int)(cores / 4);
    return n < 1 ? 1 : n > PC__MAX_LOOPS ? PC__MAX_LOOPS : n;
}

PC_API int pc_engine_start(const struct pc_engine_options *options, pc_engine **out)
{
    *out = NULL;
    uint64_t page = options->page_bytes;
    if (!options->server_id)
        return pc__fail(PC_ERR_RANGE, "a server id of 0");
    if (options->replication < PC_REPLICATION_P2C || options->replication > PC_REPLICATION_OFF)
        return pc__fail(PC_ERR_RANGE, "replication %d", options->replication);
    if (page && (page < PC_BLOCK_BYTES || page & (page - 1) ||
                 page > (uint64_t)PC__DATA_MAX_BLOCKS * PC_BLOCK_BYTES))
        return pc__fail(PC_ERR_RANGE,
                        "a page of %llu bytes; it must be a power of two from 4 KiB to 8 MiB",
                        (unsigned long long)page);
    struct pc_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return pc__fail(PC_ERR_NO_MEMORY, "an engine");
    int rc;
    pthread_mutex_init(&engine->publish_lock, NULL);
    pc__retiring_open(engine);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_mutex_init(&engine->event_lock, NULL);
    pthread_mutex_init(&engine->worker.lock, NULL);
    pthread_mutex_init(&engine->holders.lock, NULL);
    atomic_init(&engine->holders.random, options->server_id);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->worker.wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pc__leases_open(engine);
    pc__link_init(&engine->staged);
    pc__link_init(&engine->retained);
    engine->ask_settled_at_ns = UINT64_MAX;
    engine->retained_most_bytes = PC__RETAINED_BYTES;
    if (options->cache_bytes && options->cache_bytes / 4 < PC__RETAINED_BYTES)
        engine->retained_most_bytes = options->cache_bytes / 4;
    engine->stage_timeout_ns = options->stage_timeout_ns ? options->stage_timeout_ns
                                                         : STAGE_TIMEOUT_NS;
    engine->server_id = options->server_id;
    snprintf(engine->socket_name, sizeof engine->socket_name, "%s", options->socket_name);
    snprintf(engine->library_version, sizeof engine->library_version, "%s",
             options->library_version);
    engine->fetch_timeout_ns = options->fetch_timeout_ns;
    engine->fault_timeout_ns = options->fault_timeout_ns;
    engine->page_shift = page ? (unsigned)__builtin_ctzll(page) : 0;
    engine->replication = options->replication;
    engine->listen_fd = engine->uffd = -1;
    engine->n_loops = choose_loops(options->n_loops);
    for (int i = 0; i < engine->n_loops; i++)
        engine->loops[i].epoll = engine->loops[i].mail_event = -1;
    engine->events_capacity = 2 * PC__LOG_EVENTS;
    engine->events = calloc(engine->events_capacity, sizeof *engine->events);
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!engine->events || engine->event_fd < 0) {
        rc = pc__fail_errno("the event queue");
        goto fail;
    }
    rc = open_uffd(engine, options->no_userfaultfd);
    if (!rc)
        (void)pc__engine_makes_huge_pages(engine);
    if (!rc)
        rc = pc__cache_open(engine, options->cache_bytes, options->cache_policy);
    if (rc)
        goto fail;
    rc = open_history(engine, options);
    for (size_t i = 0; !rc && i < options->n_floors; i++)
        rc = pc_engine_retain(engine, options->floors[i].region, options->floors[i].version);
    if (!rc)
        rc = adopt(engine, options->keeper_fd, options->settle_ns);
    if (rc)
        goto fail;
    rc = pc__local_listen(options->socket_name, LISTEN_BACKLOG, &engine->listen_fd);
    if (rc)
        goto fail;
    for (int i = 0; i < engine->n_loops; i++)
        if ((rc = pc__loop_start(engine, &engine->loops[i], i)))
            goto fail;
    /* Added from this thread: epoll sets are thread-safe, and loop 0 only reads the watch. */
    engine->loops[0].listen_watch =
        pc__watch_add(&engine->loops[0], PC__WATCH_LISTEN, engine->listen_fd, 0, NULL, EPOLLIN);
    if (!engine->loops[0].listen_watch) {
        rc = PC_ERR_SYSTEM;
        goto fail;
    }
    rc = pc__worker_start(engine);
    if (!rc)
        rc = pc__cache_start(engine);
    if (rc)
        goto fail;
    *out = engine;
    return PC_OK;
fail:
    (void)pc_engine_stop(engine);
    return rc;
}

PC_API int pc_engine_end(pc_engine *engine)
{
    pc__sessions_ended(engine);
    return PC_OK;
}

PC_API int pc_engine_stop(pc_engine *engine)
{
    /* Leases that end from here on are the next server's to take over, and one loop ends before
     * another: as after a restart, nothing that was leased may go or change. */
    engine->settle_until_ns = UINT64_MAX;
    engine->settling.stopping = true;
    if (engine->keeping)
        pc__keeping_stop(engine->keeping);
    pc__worker_stop(engine);
    for (int i = 0; i < engine->n_loops; i++) /* all, before any goes: they write to each other */
        pc__loop_join(&engine->loops[i]);
    pc__settle_stop(engine);
    for (int i = 0; i < engine->n_loops; i++)
        if (engine->loops[i].epoll >= 0)
            pc__loop_stop(&engine->loops[i]);
    pc__cache_stop(engine);
    if (engine->listen_fd >= 0)
        pc__local_close(engine->socket_name, engine->listen_fd);
    if (engine->keeping) /* before anything goes: what the keeper holds is for the next server */
        pc__keeping_close(engine->keeping);
    engine->keeping = NULL;
    pc__leases_close(engine);
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++)
        while (engine->regions[b]) {
            struct pc__region *region = engine->regions[b];
            pc__each(link, &region->pending)
            {
                pc__link_remove(link);
                free(pc__of(link, struct pc__pending, link));
            }
            engine->regions[b] = region->hash_next;
            pc__region_put(engine, region);
        }
    pc__each(link, &engine->staged)
    {
        pc__link_remove(link);
        pc__layer_put(pc__of(link, struct pc__layer, link));
    }
    pc__retained_close(engine);
    pc__worker_free(engine);
    pc__cache_close(engine);
    if (engine->history)
        pc__history_close(engine->history);
    if (engine->uffd >= 0)
        close(engine->uffd);
    pc__huge_pages_close(&engine->setting);
    if (engine->event_fd >= 0)
        close(engine->event_fd);
    free(engine->events);
    free(engine->holders.servers);
    pthread_mutex_destroy(&engine->holders.lock);
    pthread_cond_destroy(&engine->worker.wake);
    pthread_mutex_destroy(&engine->worker.lock);
    pthread_mutex_destroy(&engine->event_lock);
    pthread_mutex_destroy(&engine->lock);
    pthread_mutex_destroy(&engine->publish_lock);
    pc__retiring_close(engine);
    free(engine);
    return PC_OK;
}

/* ----------------------------------------------------------------- regions */

static void definition_came(struct pc_engine *engine, struct pc__region *region, int error)
{
    pthread_mutex_lock(&region->lock);
    region->asked_region = false;
    pthread_mutex_unlock(&region->lock);
    pc__region_release(engine, region, error, 0, false);
}

PC_API int pc_engine_define_region(pc_engine *engine, const struct pc_region_info *info,
                                   const uint64_t *homes, size_t n_homes)
{
    if (!pc__region_info_valid(info) ||
        n_homes != (info->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES)
        return pc__fail(PC_ERR_RANGE, "region %llu: %zu homes for %llu bytes",
                        (unsigned long long)info->region, n_homes,
                        (unsigned long long)info->length_bytes);
    uint64_t *copy = calloc(n_homes, sizeof *copy);
    struct pc__region *region = copy ? pc__region_get_or_add(engine, info->region) : NULL;
    if (!region) {
        free(copy);
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    }
    memcpy(copy, homes, n_homes * sizeof *copy);
    int rc = PC_OK;
    bool is_home = false;
    for (size_t i = 0; i < n_homes; i++)
        is_home |= homes[i] == engine->server_id;
    pthread_mutex_lock(&region->lock);
    if (region->state == PC__REGION_READY) {
        rc = PC_OK; /* sealed here while the question was on its way */
    } else if (region->state != PC__REGION_UNKNOWN) {
        rc = PC_ERR_NO_REGION; /* freed meanwhile, or not sealed yet */
    } else if (is_home && !region->home && region->prepared) {
        rc = pc__rebuild_become_home(engine, region);
    } else if (is_home && (!region->home || region->home->base.memfd < 0)) {
        rc = pc__fail(PC_ERR_HOME_LOST, "region %llu is homed here, and the keeper did not have it",
                      (unsigned long long)info->region);
    } else if (region->n_blocks && (region->length_bytes != info->length_bytes ||
                                    region->base_address != info->base_address)) {
        rc = pc__fail(PC_ERR_PROTOCOL, "region %llu differs from what the keeper held",
                      (unsigned long long)info->region);
    }
    if (!rc && region->state == PC__REGION_UNKNOWN) {
        region->version = info->version > region->version ? info->version : region->version;
        if (!region->n_blocks) { /* else the keeper said the same, and the worker reads it unlocked */
            region->base_address = info->base_address;
            region->length_bytes = info->length_bytes;
            region->n_blocks = info->length_bytes >> PC_BLOCK_SHIFT;
        }
        region->homes = copy;
        copy = NULL;
        region->state = PC__REGION_READY;
    }
    if (!rc)
        region->loss = info->loss;
    pthread_mutex_unlock(&region->lock);
    free(copy);
    definition_came(engine, region, rc);
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_refuse_region(pc_engine *engine, uint64_t id, int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_ERR_NO_REGION;
    if (!error)
        error = PC_ERR_NO_REGION;
    pthread_mutex_lock(&region->lock);
    /* Home blocks may be the only copy, and leased elsewhere: they go when they are retired. And
     * a registry that did not answer is no reason to drop anything: the next one asks again. */
    bool empty = pc__link_empty(&region->generations) && !region->prepared;
    bool useless = region->state == PC__REGION_UNKNOWN && !region->home &&
                   (empty || error == PC_ERR_NO_REGION);
    pthread_mutex_unlock(&region->lock);
    if (useless)
        pc__region_forget(engine, region);
    definition_came(engine, region, error); /* after it is forgotten: nobody can come to wait any more */
    pc__region_put(engine, region);
    return PC_OK;
}

PC_API int pc_engine_create_shared(pc_engine *engine, const struct pc_region_info *info,
                                   const struct pc_segment *segments, size_t n_segments, int *fd)
{
    *fd = -1;
    if (!pc__region_info_valid(info))
        return pc__fail(PC_ERR_RANGE, "region %llu: base or length", (unsigned long long)info->region);
    struct pc__region *region = pc__region_get_or_add(engine, info->region);
    if (!region)
        return pc__fail(PC_ERR_NO_MEMORY, "a region record");
    pthread_mutex_lock(&region->lock);
    /* Of one that was changed, the keeper of a server before this one held the changes. */
    bool again = region->home && region->home->base.memfd < 0 &&
                 region->length_bytes == info->length_bytes && n_segments;
    bool fresh = region->state == PC__REGION_UNKNOWN && (!region->home || again);
    if (fresh) {
        region->state = PC__REGION_CREATING;
        region->version = info->version > region->version ? info->version : region->version;
        region->base_address = info->base_address;
        region->length_bytes = info->length_bytes;
        region->n_blocks = info->length_bytes >> PC_BLOCK_SHIFT;
    }
    pthread_mutex_unlock(&region->lock);
    int rc = fresh ? pc__home_make(engine, region, segments, n_segments, fd)
                   : pc__fail(PC_ERR_EXISTS, "region %llu", (unsigned long long)info->region);
    if (fresh && rc && again) { /* the changes stay, for another try */
        pthread_mutex_lock(&region->lock);
        region->state = PC__REGION_UNKNOWN;
        pthread_mutex_unlock(&region->lock);
    } else if (fresh && rc) {
        pc__region_forget(engine, region);
    }
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_seal(pc_engine *engine, uint64_t id)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return pc__fail(PC_ERR_NO_REGION, "region %llu", (unsigned long long)id);
    int rc = pc__region_seal(engine, region, false);
    if (!rc)
        pc__region_release(engine, region, PC_OK, 0, false);
    pc__region_put(engine, region);
    return rc;
}

PC_API int pc_engine_retire(pc_engine *engine, uint64_t id, int force)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (force)
        pc__layers_forget(engine, id);
    if (!region) {
        pc__retained_forget(engine, id);
        return PC_ERR_NO_REGION;
    }
    pthread_mutex_lock(&region->lock);
    region->state = PC__REGION_RETIRED;
    pthread_mutex_unlock(&region->lock);
    pc__retained_forget(engine, id);
    pc__sessions_let_go(engine, id);
    pc__region_release(engine, region, PC_ERR_NO_REGION, 0, false);
    if (force)
        pc__region_forget(engine, region);
    else
        pc__region_lease_dropped(engine, region);
    pc__region_put(engine, region);
    return PC_OK;
}

PC_API int pc_engine_retain(pc_engine *engine, uint64_t region, uint64_t version)
{
    return pc__history_retain(engine->history, region, version);
}

PC_API int pc_engine_set_changes(pc_engine *engine, uint64_t id, uint64_t from_version,
                                 uint64_t to_version, const struct pc_run *runs, size_t n_runs,
                                 int error)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_ERR_NO_REGION;
    struct pc__changes changes = {.from = from_version, .to = to_version, .error = error};
    for (size_t i = 0; i < n_runs && !changes.error; i++)
        if (!runs[i].n_blocks || runs[i].first_block >= region->n_blocks ||
            runs[i].n_blocks > region->n_blocks - runs[i].first_block)
            changes.error = pc__fail(PC_ERR_RANGE, "changes outside of region %llu",
                                     (unsigned long long)id);
    if (!changes.error && n_runs) {
        changes.runs = calloc(n_runs, sizeof *runs);
        if (changes.runs) {
            memcpy(changes.runs, runs, n_runs * sizeof *runs);
            changes.n_runs = n_runs;
        } else {
            changes.error = pc__fail(PC_ERR_NO_MEMORY, "changes of a region");
        }
    }
    /* EXPIRED is an answer: nothing is kept. NO_VERSION too, to those who asked for it. */
    bool failed = changes.error && changes.error != PC_ERR_EXPIRED;
    pthread_mutex_lock(&region->lock);
    region->asked_changes = false;
    struct pc_run *old = region->changes.runs;
    region->changes = failed ? (struct pc__changes){0} : changes;
    pthread_mutex_unlock(&region->lock);
    free(old);
    pc__region_release(engine, region, failed ? changes.error : PC_OK,
                       changes.error == PC_ERR_NO_VERSION ? to_version : 0, false);
    pc__region_put(engine, region);
    return changes.error == PC_ERR_RANGE ? changes.error : PC_OK;
}

/* ------------------------------------------------------------------- peers */

PC_API int pc_engine_peer_lanes(pc_engine *engine)
{
    return engine->n_loops * PC__LANES_PER_LOOP;
}

PC_API int pc_engine_add_peer(pc_engine *engine, uint64_t server_id, int lane, int fd)
{
    if (lane < 0 || lane >= pc_engine_peer_lanes(engine) || !server_id) {
        close(fd);
        return pc__fail(PC_ERR_RANGE, "lane %d", lane);
    }
    const struct pc__mail mail = {
        .run = pc__peer_connected, .a = server_id, .fd = fd, .lane = lane % PC__LANES_PER_LOOP};
    int rc = pc__loop_post(&engine->loops[lane / PC__LANES_PER_LOOP], &mail);
    if (rc)
        close(fd);
    return rc;
}

PC_API int pc_engine_peer_lost(pc_engine *engine, uint64_t server_id, int error)
{
    const struct pc__mail mail = {.run = pc__peer_is_lost,
                                  .a = server_id,
                                  .error = error < 0 ? error : PC_ERR_HOME_LOST};
    if (mail.error == PC_ERR_HOME_LOST && server_id) /* before anybody is failed by it */
        pc__unreached_lost(engine, server_id);
    int rc = PC_OK;
    for (int i = 0; i < engine->n_loops && !rc; i++)
        rc = pc__loop_post(&engine->loops[i], &mail);
    return rc;
}

PC_API int pc_engine_serve(pc_engine *engine, uint64_t server_id, int fd)
{
    pthread_mutex_lock(&engine->lock);
    struct pc__loop *loop = &engine->loops[engine->next_loop++ % (unsigned)engine->n_loops];
    pthread_mutex_unlock(&engine->lock);
    const struct pc__mail mail = {.run = pc__served_add, .a = server_id, .fd = fd};
    int rc = pc__loop_post(loop, &mail);
    if (rc)
        close(fd);
    return rc;
}
