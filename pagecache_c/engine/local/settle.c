/* settle.c - the end of the time that processes have to attach again after a restart.
 *
 * Until then bases and generations that were adopted do not move, for anybody may map them. After it
 * a process that has not come back would read memory that moves under it: it was stopped (SIGSTOP, a
 * debugger), or got no time, and does not know yet that its server is another one. So first all of this
 * machine's processes are looked at: who still maps what was adopted, and is not connected, is ended
 * (SIGKILL: a stopped process does nothing else). Who is connected attaches as ever. Only then
 * settle_until_ns becomes 0.
 *
 * What is looked for is noted once, when all is adopted (noted). Client maps are not inherited by fork
 * (MADV_DONTFORK), so nobody who began later can have one but from this server. What a process has built
 * itself came along with forks, and outlives its client as private copies (build.c): private maps of such
 * regions are left alone.
 *
 * Threads: loop 0 starts one of its own, once; pc_engine_stop joins it. It reads /proc under no lock.
 */
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/store/store.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define END_NS 5000000000ull   /* for a killed process to be gone */
#define STEP_MS 20             /* how soon a stop of the engine is seen */
#define AGAIN_NS 1000000000ull /* between two looks, where some could not be seen */

struct pc__noted {
    uint64_t device, inode, region, version;
    bool built_in_place, on_disk;
};

static int note(struct pc__settling *settling, int memfd, const struct pc__region *region,
                uint64_t version, bool built_in_place, bool on_disk)
{
    struct stat st;
    if (fstat(memfd, &st))
        return pc__fail_errno("fstat of a memfd of variable %llu", (unsigned long long)region->id);
    if (settling->n_noted == settling->capacity) {
        const size_t capacity = settling->capacity ? settling->capacity * 2 : 64;
        struct pc__noted *grown = realloc(settling->noted, capacity * sizeof *grown);
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "what processes may map");
        settling->noted = grown;
        settling->capacity = capacity;
    }
    settling->noted[settling->n_noted++] = (struct pc__noted){.device = st.st_dev,
                                                              .inode = st.st_ino,
                                                              .region = region->id,
                                                              .version = version,
                                                              .built_in_place = built_in_place,
                                                              .on_disk = on_disk};
    settling->of_disk |= on_disk;
    return PC_OK;
}

static int by_inode(const void *a, const void *b)
{
    const struct pc__noted *x = a, *y = b;
    return x->inode < y->inode ? -1 : x->inode > y->inode;
}

/* No other thread runs yet. */
int pc__settle_begin(struct pc_engine *engine, uint64_t settle_ns)
{
    struct pc__settling *settling = &engine->settling;
    int rc = PC_OK;
    for (size_t b = 0; b < PC__REGION_BUCKETS; b++)
        for (const struct pc__region *r = engine->regions[b]; r && !rc; r = r->hash_next) {
            if (r->home && r->home->base.memfd >= 0)
                rc = note(settling, r->home->base.memfd, r, r->home->base.version,
                          r->built_in_place, r->home->base.on_disk);
            pc__each(link, (struct pc__link *)(uintptr_t)&r->generations)
            {
                const struct pc__generation *g = pc__of(link, struct pc__generation, link);
                if (g->adopted && !rc)
                    rc = note(settling, g->memfd, r, g->version,
                              r->built_in_place || g->built_in_place, g->on_disk);
            }
        }
    if (settling->n_noted)
        qsort(settling->noted, settling->n_noted, sizeof *settling->noted, by_inode);
    settling->settle_ns = settle_ns;
    settling->began_ns = pc__now_ns();
    settling->began_ticks = pc__process_ticks_now();
    if (engine->n_regions && !engine->cold)
        engine->settle_until_ns = settling->began_ns + settle_ns;
    return rc;
}

/* File systems of disks may say another device in /proc than in fstat (btrfs, overlayfs): of theirs the number
 * has to do, and that the map lies where only variables do. */
static bool is_of(const struct pc__process_map *map, const struct pc__noted *noted)
{
    if (map->is_private && noted->built_in_place)
        return false;
    return noted->on_disk ? map->begin >= PC_WINDOW_BEGIN && map->end <= PC_WINDOW_END
                          : noted->device == map->device;
}

static const struct pc__noted *mapped_by(const struct pc__settling *settling,
                                         const struct pc__process_map *map)
{
    size_t low = 0, high = settling->n_noted;
    while (low < high) { /* the first of that inode, or behind it */
        size_t mid = low + (high - low) / 2;
        if (settling->noted[mid].inode < map->inode)
            low = mid + 1;
        else
            high = mid;
    }
    for (; low < settling->n_noted && settling->noted[low].inode == map->inode; low++)
        if (is_of(map, &settling->noted[low]))
            return &settling->noted[low];
    return NULL;
}

/* *unseen: the kernel does not show what the process maps, and it may be this. */
static const struct pc__noted *maps_noted(const struct pc__settling *settling,
                                          const struct pc__process *process, bool *unseen)
{
    struct pc__process_map *maps;
    size_t n;
    const struct pc__noted *found = NULL;
    *unseen = false;
    if (!pc__process_maps(process, &maps, &n)) {
        *unseen = pc__process_may_be_client(process, settling->of_disk);
        return NULL;
    }
    for (size_t i = 0; i < n && !found; i++)
        found = mapped_by(settling, &maps[i]);
    free(maps);
    return found;
}

/* False: not within the time, or the engine stops. */
static bool wait_ended(const struct pc__settling *settling, int pidfd)
{
    struct pollfd polled = {.fd = pidfd, .events = POLLIN};
    const uint64_t until_ns = pc__now_ns() + END_NS;
    while (!settling->stopping && pc__now_ns() < until_ns)
        if (poll(&polled, 1, STEP_MS) > 0)
            return true;
    return false;
}

static void say_ended(struct pc_engine *engine, const struct pc__process *process,
                      const struct pc__noted *noted)
{
    pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_TIMEOUT, noted->region, engine->server_id,
                     "process %d, which maps version %llu of variable %llu, is ended: it was stopped, "
                     "or had no time, for %.1f s while this page server was restarted; its memory would move "
                     "under it. Ray retries its task",
                     (int)process->pid, (unsigned long long)noted->version,
                     (unsigned long long)noted->region,
                     (double)(pc__now_ns() - engine->settling.began_ns) / 1e9);
}

static void log_left(struct pc_engine *engine, const struct pc__process *process, const char *what,
                     int error)
{
    struct pc__settling *settling = &engine->settling;
    if (settling->logged_left)
        return;
    settling->logged_left = true;
    pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_DENIED, 0, engine->server_id,
                     "process %d %s (%s), is not connected, and may map memory of before this restart: "
                     "that moves in %.1f s. End it, or let page servers read /proc/PID/maps",
                     (int)process->pid, what, strerror(error), (double)settling->settle_ns / 1e9);
}

/* True: it is dealt with, or nothing is to be done. */
static bool end_one(struct pc_engine *engine, const struct pc__process *process)
{
    bool unseen;
    const struct pc__noted *noted = maps_noted(&engine->settling, process, &unseen);
    if (unseen)
        log_left(engine, process, "does not show what it maps", EACCES);
    if (!noted)
        return !unseen;
    const int pidfd = (int)syscall(SYS_pidfd_open, process->pid, 0);
    if (pidfd < 0) {
        if (errno == ESRCH)
            return true;
        log_left(engine, process, "cannot be held", errno);
        return false;
    }
    /* Its number may be another's by now; from here on it is not. And it may have come back. */
    bool done = true;
    if (pc__process_has_memory(process) && !pc__leases_know(engine, process->pid) &&
        (noted = maps_noted(&engine->settling, process, &unseen))) {
        say_ended(engine, process, noted);
        done = !syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0) || errno == ESRCH;
        if (!done)
            log_left(engine, process, "cannot be ended", errno);
        else if (!(done = wait_ended(&engine->settling, pidfd)))
            log_left(engine, process, "does not end after SIGKILL", ETIMEDOUT);
    }
    close(pidfd);
    return done;
}

/* False: some that may map what was adopted are still there. */
static bool end_all(struct pc_engine *engine)
{
    DIR *all = opendir("/proc");
    if (!all) {
        const struct pc__process none = {0};
        log_left(engine, &none, "is not shown by /proc", errno);
        return false;
    }
    bool done = true;
    for (struct dirent *entry; !engine->settling.stopping && (entry = readdir(all));) {
        struct pc__process process;
        const long pid = strtol(entry->d_name, NULL, 10);
        if (pid <= 0 || pid == getpid() || pc__leases_know(engine, (pid_t)pid) ||
            !pc__process_of((pid_t)pid, geteuid(), &process) ||
            (engine->settling.began_ticks && process.start_ticks > engine->settling.began_ticks))
            continue;
        done = end_one(engine, &process) && done;
    }
    closedir(all);
    return done;
}

static void *run(void *arg)
{
    struct pc_engine *engine = arg;
    struct pc__settling *settling = &engine->settling;
    const uint64_t give_up_ns = pc__now_ns() + settling->settle_ns;
    while (!end_all(engine) && pc__now_ns() < give_up_ns) {
        const uint64_t again_ns = pc__now_ns() + AGAIN_NS;
        while (!settling->stopping && pc__now_ns() < again_ns && pc__now_ns() < give_up_ns)
            (void)poll(NULL, 0, STEP_MS);
        if (settling->stopping)
            break;
    }
    if (!settling->stopping)
        pc__regions_settled(engine);
    return NULL;
}

uint64_t pc__settle_deadline(struct pc__loop *loop)
{
    const struct pc__settling *settling = &loop->engine->settling;
    const uint64_t at = loop->index == 0 && !settling->started ? loop->engine->settle_until_ns : 0;
    return !at ? UINT64_MAX : at > settling->try_again_ns ? at : settling->try_again_ns;
}

void pc__settle_tick(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc__settling *settling = &loop->engine->settling;
    if (now_ns < pc__settle_deadline(loop))
        return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const int error = pthread_create(&settling->thread, NULL, run, loop->engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    settling->started = !error;
    if (error) {
        settling->try_again_ns = now_ns + AGAIN_NS;
        pc__engine_event(loop->engine, PC_EVENT_LOG, PC_ERR_SYSTEM, 0, loop->engine->server_id,
                         "no thread to look for processes that have not attached again (%s): memory "
                         "of the page server before this one stays as it is; tried again each second",
                         strerror(error));
    }
}

/* No loop runs any more, or has begun. */
void pc__settle_stop(struct pc_engine *engine)
{
    struct pc__settling *settling = &engine->settling;
    if (settling->started)
        pthread_join(settling->thread, NULL);
    settling->started = false;
    free(settling->noted);
    settling->noted = NULL;
}
