/* disk_cache.c - what a node evicts goes to a file of its own first, and a fault may have it back from there.
 *
 * The file is a ring of slots, each of one chunk (64 KiB) of one generation. What is evicted is written to the
 * next slot, in the place of what has been there longest. So the disk writes one after the other. A chunk that
 * a slot has already is not written again: it never changes. Slots of a generation end with it, and blocks of
 * one that moves to another version end where they changed. After a restart there is nothing: the file has no
 * name, and the index is memory (80 bytes a slot, so 1.3 MiB for each GiB of the file).
 *
 * An eviction copies the chunk and goes on. It never waits for the disk: where too much is on its way there, what
 * is evicted is not kept. Threads of this file write and read, several at once, past the page cache (O_DIRECT),
 * which would take the memory that an eviction was to free. Where the file system has none of that, what was
 * written is dropped from the page cache.
 *
 * A reader looks up a slot (disk_slots.c), reads it without a lock, and looks again: its sequence says whether it
 * had something else meanwhile. A disk that fails is not used any more, and nobody notices but by speed: homes have
 * all of it.
 *
 * Locks: disk_cache.lock, a leaf. put and removed are called under region.lock, so nothing of the generation
 * changes meanwhile.
 */
#include "common/disk_file.h"
#include "engine/cache/cache.h"
#include "engine/cache/disk_slots.h"
#include "engine/core/core.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#define THREADS 4u              /* reads on their way: disks are faster with several */
#define WRITES_MOST 64u         /* on their way: 4 MiB */
#define FREE_PERCENT_LEAST 5u   /* of the disk: Ray stops at so much, too */
#define LOOK_EVERY 64u          /* writes, at how much is free */
#define FORGET_AT_ONCE 256u
#define STUCK_NS 1000000000ull  /* the oldest read waits so long: nobody else is sent there */

struct write {
    struct pc__link link;
    uint32_t slot;
    uint32_t blocks;
    uint8_t *bytes; /* PC__CHUNK_BYTES, each block in its place */
};

struct pc__disk_cache {
    struct pc_engine *engine;
    int fd;
    bool is_direct;
    _Atomic bool is_off;       /* stopped, or the disk fails */
    bool stopping;
    pthread_mutex_t lock;      /* all that follows */
    pthread_cond_t wake;
    pthread_t threads[THREADS];
    unsigned n_threads;
    struct pc__disk_slots slots;
    struct write *writes;      /* WRITES_MOST */
    struct pc__link idle, written; /* of writes: that nobody uses; to be written, the oldest first */
    struct pc__link reads[2];  /* struct pc__disk_job: bulk, urgent */
    uint64_t n_written;
    bool is_full;              /* the disk, when it was looked at last */
    struct pc__disk_times times;
};

/* ---------------------------------------------------------------- eviction */

static int copy_blocks(const struct pc__generation *generation, uint64_t chunk, uint32_t blocks,
                       uint8_t *out)
{
    int rc = PC_OK;
    for (unsigned i = 0, n; i < PC__CHUNK_BLOCKS && !rc; i += n) {
        n = pc__disk_slots_alike(blocks, i);
        if (blocks >> i & 1u)
            rc = pc__file_read(generation->memfd, out + ((size_t)i << PC_BLOCK_SHIFT),
                               (uint64_t)n << PC_BLOCK_SHIFT,
                               (chunk * PC__CHUNK_BLOCKS + i) << PC_BLOCK_SHIFT);
    }
    return rc;
}

/* Locked. Of those blocks, the ones that the disk has not got; NULL: there are none, or too much is being
 * written. */
static struct write *begin_write(struct pc__disk_cache *disk, struct pc__generation *generation,
                                 uint64_t chunk, uint32_t blocks)
{
    if (pc__link_empty(&disk->idle) || disk->is_full)
        return NULL;
    struct write *write = pc__of(disk->idle.next, struct write, link);
    write->slot = pc__disk_slots_begin(&disk->slots, generation, chunk, &blocks);
    if (write->slot == PC__NO_SLOT)
        return NULL;
    write->blocks = blocks;
    pc__link_remove(&write->link);
    return write;
}

/* Locked. */
static void end_write(struct pc__disk_cache *disk, struct write *write, bool is_written)
{
    const unsigned n = pc__disk_slots_end(&disk->slots, write->slot, is_written);
    pc__count_add(&disk->engine->count.disk_cache_writes, n);
    pc__link_push(&disk->idle, &write->link);
}

void pc__disk_cache_put(struct pc__disk_cache *disk, struct pc__generation *generation, uint64_t chunk,
                        uint32_t blocks)
{
    if (!disk || disk->is_off || !blocks)
        return;
    pthread_mutex_lock(&disk->lock);
    struct write *write = begin_write(disk, generation, chunk, blocks);
    pthread_mutex_unlock(&disk->lock);
    if (!write)
        return;
    generation->disk_cache = disk;
    const int rc = copy_blocks(generation, chunk, write->blocks, write->bytes);
    pthread_mutex_lock(&disk->lock);
    if (rc) {
        end_write(disk, write, false);
    } else {
        pc__link_push(&disk->written, &write->link);
        pthread_cond_signal(&disk->wake);
    }
    pthread_mutex_unlock(&disk->lock);
}

void pc__disk_cache_removed(struct pc__generation *generation, uint64_t first, uint64_t n)
{
    struct pc__disk_cache *disk = generation->disk_cache;
    if (!disk)
        return;
    pthread_mutex_lock(&disk->lock);
    pc__disk_slots_remove(&disk->slots, generation, first, n);
    pthread_mutex_unlock(&disk->lock);
}

void pc__disk_cache_forget(struct pc__generation *generation)
{
    struct pc__disk_cache *disk = generation->disk_cache;
    bool more = disk != NULL;
    while (more) {
        pthread_mutex_lock(&disk->lock);
        more = pc__disk_slots_forget(&disk->slots, generation, FORGET_AT_ONCE);
        pthread_mutex_unlock(&disk->lock);
    }
}

/* ----------------------------------------------------------------- reading */

/* Locked. */
static unsigned filled_from(const struct pc__disk_cache *disk, const struct pc__generation *generation,
                            uint64_t block)
{
    const uint32_t index = pc__disk_slots_find(&disk->slots, generation, block / PC__CHUNK_BLOCKS);
    return pc__disk_slots_from(&disk->slots, index, block);
}

/* Locked: the next one, or NULL. */
static struct pc__disk_job *next_read(const struct pc__disk_cache *disk)
{
    const struct pc__link *reads = &disk->reads[!pc__link_empty(&disk->reads[1])];
    return pc__link_empty(reads) ? NULL : pc__of(reads->next, struct pc__disk_job, link);
}

/* Locked: it has waited too long. */
static bool is_stuck(const struct pc__disk_cache *disk)
{
    const struct pc__disk_job *next = next_read(disk);
    return next && pc__now_ns() - next->since_ns > STUCK_NS;
}

bool pc__disk_cache_has(const struct pc__generation *generation, uint64_t first, uint64_t *n)
{
    struct pc__disk_cache *disk = generation->disk_cache;
    const uint64_t limit = first + *n;
    uint64_t at = first, k = 0;
    bool has = false;
    if (!disk || disk->is_off)
        return false;
    pthread_mutex_lock(&disk->lock);
    if (!pc__link_empty(&generation->on_disk_too) && !is_stuck(disk)) {
        has = filled_from(disk, generation, first) > 0;
        do { /* from one to the next that is of the other kind */
            k = filled_from(disk, generation, at);
            if ((k > 0) == has)
                at += k ? k : 1;
        } while ((k > 0) == has && at < limit);
        *n = (at < limit ? at : limit) - first;
    }
    pthread_mutex_unlock(&disk->lock);
    return has;
}

uint64_t pc__disk_cache_get(const struct pc__generation *generation, uint64_t first, uint64_t n, uint8_t *out)
{
    struct pc__disk_cache *disk = generation->disk_cache;
    pthread_mutex_lock(&disk->lock);
    const uint32_t index = pc__disk_slots_find(&disk->slots, generation, first / PC__CHUNK_BLOCKS);
    uint64_t k = disk->is_off ? 0 : pc__disk_slots_from(&disk->slots, index, first);
    const uint64_t sequence = k ? pc__disk_slots_sequence(&disk->slots, index) : 0;
    pthread_mutex_unlock(&disk->lock);
    if (!k)
        return 0;
    k = k < n ? k : n;
    const uint64_t offset = (uint64_t)index * PC__CHUNK_BYTES +
                            (first % PC__CHUNK_BLOCKS << PC_BLOCK_SHIFT);
    const int rc = pc__disk_file_read(disk->fd, out, k << PC_BLOCK_SHIFT, offset);
    if (!disk->is_direct)
        (void)posix_fadvise(disk->fd, (off_t)offset, (off_t)(k << PC_BLOCK_SHIFT), POSIX_FADV_DONTNEED);
    pthread_mutex_lock(&disk->lock);
    const bool is_same = pc__disk_slots_sequence(&disk->slots, index) == sequence;
    pthread_mutex_unlock(&disk->lock);
    if (rc && !atomic_exchange(&disk->is_off, true))
        pc__engine_event(disk->engine, PC_EVENT_LOG, rc, 0, disk->engine->server_id,
                         "the disk of the cache fails, and is not used any more: %s", pc_last_message());
    return rc || !is_same ? 0 : k;
}

void pc__disk_cache_leave(struct pc__disk_cache *disk)
{
    disk->is_off = true;
}

bool pc__disk_cache_read(struct pc__disk_cache *disk, struct pc__disk_job *job, bool urgent)
{
    job->since_ns = pc__now_ns();
    pthread_mutex_lock(&disk->lock);
    const bool is_taken = !disk->stopping;
    if (is_taken) {
        pc__link_push(&disk->reads[urgent], &job->link);
        pthread_cond_signal(&disk->wake);
    }
    pthread_mutex_unlock(&disk->lock);
    return is_taken;
}

struct pc__disk_times *pc__disk_cache_times(struct pc__disk_cache *disk)
{
    return &disk->times;
}

/* ----------------------------------------------------------------- threads */

static int write_all(const struct pc__disk_cache *disk, const uint8_t *bytes, uint64_t n_bytes, uint64_t offset)
{
    for (uint64_t done = 0; done < n_bytes;) {
        const ssize_t n = pwrite(disk->fd, bytes + done, n_bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return pc__fail_disk("writing to the disk of the cache");
        done += (uint64_t)n;
    }
    if (!disk->is_direct) {
        (void)sync_file_range(disk->fd, (off64_t)offset, (off64_t)n_bytes,
                              SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
        (void)posix_fadvise(disk->fd, (off_t)offset, (off_t)n_bytes, POSIX_FADV_DONTNEED);
    }
    return PC_OK;
}

static int write_blocks(const struct pc__disk_cache *disk, const struct write *write)
{
    int rc = PC_OK;
    for (unsigned i = 0, n; i < PC__CHUNK_BLOCKS && !rc; i += n) {
        n = pc__disk_slots_alike(write->blocks, i);
        if (write->blocks >> i & 1u)
            rc = write_all(disk, write->bytes + ((size_t)i << PC_BLOCK_SHIFT), (uint64_t)n << PC_BLOCK_SHIFT,
                           (uint64_t)write->slot * PC__CHUNK_BYTES + ((uint64_t)i << PC_BLOCK_SHIFT));
    }
    return rc;
}

/* What is left of a disk belongs to others. */
static bool is_full(int fd)
{
    struct statfs of;
    return fstatfs(fd, &of) || of.f_bavail < of.f_blocks / 100 * FREE_PERCENT_LEAST;
}

/* Locked; not while it writes. */
static void write_next(struct pc__disk_cache *disk)
{
    struct write *write = pc__of(disk->written.next, struct write, link);
    const bool looks = disk->n_written++ % LOOK_EVERY == 0;
    pc__link_remove(&write->link);
    pthread_mutex_unlock(&disk->lock);
    const bool full = looks && is_full(disk->fd);
    const int rc = disk->is_off || full ? PC_ERR_NO_SPACE : write_blocks(disk, write);
    if (rc && rc != PC_ERR_NO_SPACE && !atomic_exchange(&disk->is_off, true))
        pc__engine_event(disk->engine, PC_EVENT_LOG, rc, 0, disk->engine->server_id,
                         "the disk of the cache fails, and is not used any more: %s", pc_last_message());
    pthread_mutex_lock(&disk->lock);
    if (looks)
        disk->is_full = full;
    end_write(disk, write, !rc);
}

static void *run(void *arg)
{
    struct pc__disk_cache *disk = arg;
    uint8_t *some = aligned_alloc(PC_BLOCK_BYTES, PC__CHUNK_BYTES);
    pthread_mutex_lock(&disk->lock);
    for (struct pc__disk_job *job; (job = next_read(disk)) || !disk->stopping;) {
        if (job) { /* somebody waits for it */
            uint8_t *into = disk->stopping ? NULL : some;
            pc__link_remove(&job->link);
            pthread_mutex_unlock(&disk->lock);
            job->run(job, into);
            pthread_mutex_lock(&disk->lock);
        } else if (!pc__link_empty(&disk->written)) {
            write_next(disk);
        } else {
            pthread_cond_wait(&disk->wake, &disk->lock);
        }
    }
    pthread_mutex_unlock(&disk->lock);
    free(some);
    return NULL;
}

/* ------------------------------------------------------------- start, stop */

static int open_file(struct pc__disk_cache *disk, const char *directory, uint64_t bytes)
{
    struct statfs of;
    if (!directory)
        return pc__fail(PC_ERR_RANGE, "a cache on disk needs a directory");
    disk->fd = pc__disk_file_open(directory);
    if (disk->fd < 0 || ftruncate(disk->fd, (off_t)bytes) || fstatfs(disk->fd, &of))
        return pc__fail_disk("a file of %llu bytes in %s", (unsigned long long)bytes, directory);
    if (of.f_type == TMPFS_MAGIC || of.f_type == RAMFS_MAGIC)
        return pc__fail(PC_ERR_NO_SPACE, "%s is in memory, and no disk", directory);
    const int flags = fcntl(disk->fd, F_GETFL);
    disk->is_direct = flags >= 0 && !fcntl(disk->fd, F_SETFL, flags | O_DIRECT);
    return PC_OK;
}

/* Some file systems say that they can, and cannot. */
static void try_direct(struct pc__disk_cache *disk)
{
    const struct write *any = pc__of(disk->idle.next, struct write, link);
    const int flags = fcntl(disk->fd, F_GETFL);
    if (!disk->is_direct || pread(disk->fd, any->bytes, PC_BLOCK_BYTES, 0) == PC_BLOCK_BYTES)
        return;
    disk->is_direct = false;
    (void)fcntl(disk->fd, F_SETFL, flags & ~O_DIRECT);
}

int pc__disk_cache_open(struct pc_engine *engine, uint64_t bytes, struct pc__disk_cache **out)
{
    const uint64_t n_slots = bytes / PC__CHUNK_BYTES;
    if (!bytes)
        return PC_OK;
    if (n_slots < 2 * WRITES_MOST || n_slots > UINT32_MAX / 2)
        return pc__fail(PC_ERR_RANGE, "cache_disk_bytes of %llu; at least %llu", (unsigned long long)bytes,
                        2ull * WRITES_MOST * PC__CHUNK_BYTES);
    struct pc__disk_cache *disk = calloc(1, sizeof *disk);
    if (!disk)
        return pc__fail(PC_ERR_NO_MEMORY, "a cache on disk");
    *out = disk;
    disk->engine = engine;
    disk->fd = -1;
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->wake, NULL);
    pc__link_init(&disk->idle);
    pc__link_init(&disk->written);
    pc__link_init(&disk->reads[0]);
    pc__link_init(&disk->reads[1]);
    int rc = pc__disk_slots_open(&disk->slots, (uint32_t)n_slots);
    if (rc)
        return rc;
    disk->writes = calloc(WRITES_MOST, sizeof *disk->writes);
    if (!disk->writes)
        return pc__fail(PC_ERR_NO_MEMORY, "copies for a cache on disk");
    for (unsigned i = 0; i < WRITES_MOST; i++) {
        disk->writes[i].bytes = aligned_alloc(PC_BLOCK_BYTES, PC__CHUNK_BYTES);
        if (!disk->writes[i].bytes)
            return pc__fail(PC_ERR_NO_MEMORY, "copies for a cache on disk");
        memset(disk->writes[i].bytes, 0, PC__CHUNK_BYTES);
        pc__link_push(&disk->idle, &disk->writes[i].link);
    }
    rc = open_file(disk, engine->disk_directory, n_slots * PC__CHUNK_BYTES);
    if (!rc)
        try_direct(disk);
    return rc;
}

int pc__disk_cache_start(struct pc__disk_cache *disk)
{
    sigset_t all, before; /* signals belong to Python's main thread */
    int rc = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (disk && disk->n_threads < THREADS && !rc) {
        rc = pthread_create(&disk->threads[disk->n_threads], NULL, run, disk);
        if (!rc)
            (void)pthread_setname_np(disk->threads[disk->n_threads++], "clamor-disk");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = rc;
    return rc ? pc__fail_errno("pthread_create") : PC_OK;
}

void pc__disk_cache_stop(struct pc__disk_cache *disk)
{
    if (!disk)
        return;
    disk->is_off = true;
    pthread_mutex_lock(&disk->lock);
    disk->stopping = true;
    pthread_cond_broadcast(&disk->wake);
    pthread_mutex_unlock(&disk->lock);
    while (disk->n_threads)
        pthread_join(disk->threads[--disk->n_threads], NULL);
}

void pc__disk_cache_close(struct pc__disk_cache *disk)
{
    if (!disk)
        return;
    for (unsigned i = 0; disk->writes && i < WRITES_MOST; i++)
        free(disk->writes[i].bytes);
    free(disk->writes);
    pc__disk_slots_close(&disk->slots);
    if (disk->fd >= 0)
        close(disk->fd);
    pthread_cond_destroy(&disk->wake);
    pthread_mutex_destroy(&disk->lock);
    free(disk);
}

uint64_t pc__disk_cache_bytes(struct pc__disk_cache *disk)
{
    if (!disk)
        return 0;
    pthread_mutex_lock(&disk->lock);
    const uint64_t n_blocks = disk->slots.n_blocks;
    pthread_mutex_unlock(&disk->lock);
    return n_blocks << PC_BLOCK_SHIFT;
}

/* ------------------------------------------------------------------- audit */

const char *pc__disk_cache_audit(struct pc__disk_cache *disk)
{
    if (!disk)
        return NULL;
    pthread_mutex_lock(&disk->lock);
    const char *broken = pc__disk_slots_audit(&disk->slots);
    pthread_mutex_unlock(&disk->lock);
    return broken;
}
