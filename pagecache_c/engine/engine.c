/* engine.c - the engine as Python sees it: start, stop, events, definitions, statistics.
 *
 * Entered by Python's threads; what belongs to a loop is posted to it. Locks: see engine.h.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/loop.h"
#include "engine/miss/miss.h"
#include "engine/repair/repair.h"
#include "engine/serve/serve.h"
#include "engine/store/store.h"
#include "os/userfaultfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#define KEEPER_TIMEOUT_NS 10000000000ull
#define STAGE_TIMEOUT_NS 300000000000ull

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

static void drop_history(void *arg, uint64_t inode)
{
    pc__unkeep(arg, inode);
}

static void log_history(void *arg, const char *text)
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
                                                .log = log_history};
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
        if (!region || !(region->home || region->prepared))
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

/* --------------------------------------------------------------- observers */

static void region_ended(struct pc_engine *engine, struct pc__region *region)
{
    pc__region_end(engine, region);
    pc__repair_sets_free(region->repair_sets);
    if (region->pages)
        pc__readahead_free(region->pages);
    free(region->pages);
    free(region->file_trips);
}

static void generation_ended(struct pc_engine *engine, struct pc__generation *generation)
{
    pc__cache_forget(engine, generation);
    pc__disk_cache_forget(generation);
    pc__windows_end(generation);
    pc__rents_free(generation->rents);
}

static void home_ended(struct pc__home *home)
{
    pc__directory_free(home->directory);
}

static const struct pc__observers observers = {.region_ended = region_ended,
                                               .home_ended = home_ended,
                                               .generation_ended = generation_ended,
                                               .blocks_changed = pc__directory_changed,
                                               .version_came = pc__served_unpark,
                                               .homes_changed = pc__homes_changed,
                                               .fetch_asked = pc__repair_asked,
                                               .block_hurried = pc__repair_hurried,
                                               .fetch_stranded = pc__repair_stranded,
                                               .fetch_lost = pc__repair_lost,
                                               .fetch_ended = pc__repair_fetch_ended,
                                               .home_retires = pc__retire_take};

/* ------------------------------------------------------------- start, stop */

/* Inserts go by UFFDIO_COPY, through maps of our own that nobody reads: it makes single pages,
 * and shows none before it is whole. Where the kernel has no userfaultfd they go by pwrite, which
 * is as good only while shared memory is not made of huge pages: one block would bring 511 of
 * zeros along. */
static int open_uffd(struct pc_engine *engine, bool refused)
{
    struct uffdio_api api = {.api = UFFD_API};
    int fd = refused ? -1 : pc__userfaultfd_any(false);
    if (fd >= 0 && ioctl(fd, UFFDIO_API, &api)) {
        close(fd);
        fd = -1;
    }
    engine->uffd = fd;
    char why[PC__HUGE_PAGES_WHY_BYTES];
    int rc = pc__huge_pages_open(&engine->setting, PC__HUGE_PAGES_DIRECTORY);
    if (fd >= 0)
        return PC_OK; /* then they are opened for each look */
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
    engine->observers = observers;
    pthread_mutex_init(&engine->publish_lock, NULL);
    pc__retiring_open(engine);
    pc__disk_jobs_open(&engine->disk_jobs);
    pc__files_open(engine);
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
    pthread_cond_init(&engine->worker.ran, NULL);
    pc__link_init(&engine->worker.later);
    pc__link_init(&engine->worker.errands);
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
    engine->disk_directory = options->disk_directory ? strdup(options->disk_directory) : NULL;
    engine->sums_directory = options->sums_directory ? strdup(options->sums_directory) : NULL;
    engine->durable = options->durable != 0;
    engine->cold = options->cold != 0;
    engine->fetch_timeout_ns = options->fetch_timeout_ns;
    engine->hedge_least_ns = PC__HEDGE_LEAST_NS;
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
    if (!rc)
        rc = pc__disk_cache_open(engine, options->cache_disk_bytes, &engine->disk_cache);
    if (rc)
        goto fail;
    rc = open_history(engine, options);
    for (size_t i = 0; !rc && i < options->n_floors; i++)
        rc = pc_engine_retain(engine, options->floors[i].region, options->floors[i].version);
    if (!rc)
        rc = adopt(engine, options->keeper_fd, options->settle_ns);
    if (rc)
        goto fail;
    rc = pc__local_listen(options->socket_name, PC__LISTEN_BACKLOG, &engine->listen_fd);
    if (rc)
        goto fail;
    pc__local_note_file(options->socket_name, &engine->listen_file);
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
    rc = pc__listening_start(engine);
    if (!rc)
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

PC_API int64_t pc_engine_leave(pc_engine *engine)
{
    /* Leases that end from here on are the next server's to take over, and one loop ends before
     * another: as after a restart, nothing that was leased may go or change. */
    engine->settle_until_ns = UINT64_MAX;
    engine->settling.stopping = true;
    if (engine->keeping)
        pc__keeping_stop(engine->keeping);
    pc__worker_stop(engine);
    if (engine->disk_cache)
        pc__disk_cache_leave(engine->disk_cache, PC_OK);
    pc__disk_jobs_stop(&engine->disk_jobs); /* what they do not bring, the loops are told */
    for (int i = 0; i < engine->n_loops; i++) /* all, before any goes: they write to each other */
        pc__loop_join(&engine->loops[i]);
    const int64_t in_use = pc_engine_in_use(engine, 0);
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
    pc__files_close(engine);
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
    pc__disk_cache_close(engine->disk_cache);
    pc__disk_jobs_close(&engine->disk_jobs);
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
    free(engine->disk_directory);
    free(engine->sums_directory);
    free(engine);
    return in_use;
}

PC_API int pc_engine_stop(pc_engine *engine)
{
    (void)pc_engine_leave(engine);
    return PC_OK;
}

/* ----------------------------------------------------------------- regions */

PC_API int pc_engine_retain(pc_engine *engine, uint64_t region, uint64_t version)
{
    return pc__history_retain(engine->history, region, version);
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
