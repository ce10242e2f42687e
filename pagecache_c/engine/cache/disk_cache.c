/* disk_cache.c - what a node evicts goes to a file of its own first, and a fault may have it back from there.
 *
 * The file is a ring of slots, each of one chunk (64 KiB) of one generation. What is evicted is written to the
 * next slot, in the place of what has been there longest. So the disk writes one after the other. A chunk that
 * a slot has already is not written again: it never changes. Slots of a generation end with it, and blocks of
 * one that moves to another version end where they changed. After a restart there is nothing: the file has no
 * name, and the index is memory (80 bytes a slot, so 1.3 MiB for each GiB of the file).
 *
 * An eviction copies the chunk and goes on. It never waits for the disk: where too much is on its way there, what
 * is evicted is not kept. Threads write and read (core/disk_jobs.c), past the page cache (O_DIRECT), which would
 * take the memory that an eviction was to free. Where the file system has none of that, what was written is
 * dropped from the page cache.
 *
 * A reader looks up a slot (disk_slots.c), reads it without a lock, and looks again: its sequence says whether it
 * had something else meanwhile. A disk that fails is not used any more, and nobody notices but by speed: homes have
 * all of it.
 *
 * Locks: disk_cache.lock, a leaf. put and removed are called under region.lock, so nothing of the generation
 * changes meanwhile.
 */
#include "engine/cache/cache.h"
#include "engine/cache/disk_slots.h"
#include "engine/core/core.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define WRITES_MOST 64u         /* on their way: 4 MiB */
#define FREE_PERCENT_LEAST 5u   /* of the disk: Ray stops at so much, too */
#define LOOK_EVERY 64u          /* writes, at how much is free, */
#define LOOK_AGAIN_NS 1000000000ull /* and where that is too little */
#define FORGET_AT_ONCE 256u
#define LEAST_BYTES (2ull * WRITES_MOST * PC__CHUNK_BYTES)
#define MOST_BYTES ((unsigned long long)(UINT32_MAX / 2) * PC__CHUNK_BYTES)

struct write {
    struct pc__disk_job job;
    struct pc__link link;      /* of those that nobody uses */
    struct pc__disk_cache *disk;
    uint32_t slot;
    uint32_t blocks;
    uint8_t *bytes; /* PC__CHUNK_BYTES, each block in its place */
};

struct pc__disk_cache {
    struct pc_engine *engine;
    int fd;
    bool is_direct;
    _Atomic bool is_off;       /* stopped, or the disk fails */
    pthread_mutex_t lock;      /* all that follows */
    struct pc__disk_slots slots;
    struct write *writes;      /* WRITES_MOST */
    struct pc__link idle;      /* of writes: those that nobody uses */
    uint64_t n_written;
    uint64_t full_until_ns;    /* the disk is full: then it is looked at again; 0: it is not */
    struct pc__disk_times times;
};

void pc__disk_cache_leave(struct pc__disk_cache *disk, int error)
{
    if (!atomic_exchange(&disk->is_off, true) && error)
        pc__engine_event(disk->engine, PC_EVENT_LOG, error, 0, disk->engine->server_id,
                         "the cache on disk is not used any more: %s", pc_last_message());
}

uint64_t pc__disk_cache_reads(const struct pc__disk_cache *disk)
{
    return pc__count_get(&disk->engine->disk_jobs.n_reads);
}

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
    if (pc__link_empty(&disk->idle) || disk->full_until_ns > pc__now_ns())
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
    if (!rc && pc__disk_job_run(disk->engine, &write->job, PC__DISK_WRITE))
        return;
    pthread_mutex_lock(&disk->lock);
    end_write(disk, write, false);
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

/* Locked: of blocks that it has not got, some. */
static unsigned absent_from(const struct pc__disk_cache *disk, const struct pc__generation *generation,
                            uint64_t block)
{
    const uint64_t chunk = block / PC__CHUNK_BLOCKS;
    const bool is_known = pc__disk_slots_find(&disk->slots, generation, chunk) != PC__NO_SLOT;
    return is_known ? 1u : (unsigned)(PC__CHUNK_BLOCKS - block % PC__CHUNK_BLOCKS);
}

bool pc__disk_cache_has(const struct pc__generation *generation, uint64_t first, uint64_t *n)
{
    struct pc__disk_cache *disk = generation->disk_cache;
    const uint64_t limit = first + *n;
    uint64_t at = first, k = 0;
    bool has = false;
    if (!disk || disk->is_off || pc__disk_jobs_stuck(disk->engine))
        return false;
    pthread_mutex_lock(&disk->lock);
    if (!pc__link_empty(&generation->on_disk_too)) {
        has = filled_from(disk, generation, first) > 0;
        do { /* from one to the next that is of the other kind */
            k = filled_from(disk, generation, at);
            if ((k > 0) == has)
                at += k ? k : absent_from(disk, generation, at);
        } while ((k > 0) == has && at < limit);
        *n = (at < limit ? at : limit) - first;
    }
    pthread_mutex_unlock(&disk->lock);
    return has;
}

static int read_all(const struct pc__disk_cache *disk, uint8_t *out, uint64_t n_bytes, uint64_t offset)
{
    for (uint64_t done = 0; done < n_bytes;) {
        const struct iovec into = {.iov_base = out + done, .iov_len = n_bytes - done};
        const ssize_t n = preadv(disk->fd, &into, 1, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return pc__fail_disk("reading %llu bytes of the cache on disk", (unsigned long long)n_bytes);
        done += (uint64_t)n;
    }
    if (!disk->is_direct)
        (void)posix_fadvise(disk->fd, (off_t)offset, (off_t)n_bytes, POSIX_FADV_DONTNEED);
    return PC_OK;
}

uint64_t pc__disk_cache_get(struct pc__disk_cache *disk, const struct pc__generation *generation,
                            uint64_t first, uint64_t n, uint8_t *out)
{
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
    const int rc = read_all(disk, out, k << PC_BLOCK_SHIFT, offset);
    pthread_mutex_lock(&disk->lock);
    const bool is_same = !disk->is_off && pc__disk_slots_sequence(&disk->slots, index) == sequence;
    pthread_mutex_unlock(&disk->lock);
    if (rc)
        pc__disk_cache_leave(disk, rc);
    return rc || !is_same ? 0 : k;
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
    if (!disk->is_direct) { /* what the disk refuses later is said once, and here */
        if (sync_file_range(disk->fd, (off64_t)offset, (off64_t)n_bytes,
                            SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER))
            return pc__fail_disk("writing back to the disk of the cache");
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

/* In a thread of the disk. */
static void run_write(struct pc__disk_job *job, uint8_t *some)
{
    struct write *write = pc__of(job, struct write, job);
    struct pc__disk_cache *disk = write->disk;
    pthread_mutex_lock(&disk->lock);
    const bool looks = disk->n_written++ % LOOK_EVERY == 0 || disk->full_until_ns;
    pthread_mutex_unlock(&disk->lock);
    const bool full = looks && is_full(disk->fd);
    const int rc = !some || disk->is_off || full ? PC_ERR_NO_SPACE : write_blocks(disk, write);
    if (rc && rc != PC_ERR_NO_SPACE)
        pc__disk_cache_leave(disk, rc);
    pthread_mutex_lock(&disk->lock);
    if (looks)
        disk->full_until_ns = full ? pc__now_ns() + LOOK_AGAIN_NS : 0;
    end_write(disk, write, !rc);
    pthread_mutex_unlock(&disk->lock);
}

/* ------------------------------------------------------------- start, stop */

static int open_file(const char *directory, uint64_t bytes, int *out)
{
    struct statfs of;
    if (!directory)
        return pc__fail(PC_ERR_RANGE, "a cache on disk needs a directory");
    if (bytes < LEAST_BYTES || bytes > MOST_BYTES)
        return pc__fail(PC_ERR_RANGE, "a cache on disk of %llu bytes: it has %llu at least, and %llu at most",
                        (unsigned long long)bytes, LEAST_BYTES, MOST_BYTES);
    const int fd = *out = pc__disk_file_open(directory);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) || fstatfs(fd, &of))
        return pc__fail_disk("a file of %llu bytes in %s", (unsigned long long)bytes, directory);
    if (of.f_type == TMPFS_MAGIC || of.f_type == RAMFS_MAGIC)
        return pc__fail(PC_ERR_NO_SPACE, "%s is in memory, and no disk", directory);
    return PC_OK;
}

PC_API int pc_disk_cache_check(const char *directory, uint64_t bytes)
{
    int fd = -1;
    const int rc = open_file(directory, bytes, &fd);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* Some file systems say that they can, and cannot. Nobody has written anything yet. */
static bool can_be_direct(int fd, const uint8_t *some)
{
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT))
        return false;
    if (pwrite(fd, some, PC_BLOCK_BYTES, 0) == PC_BLOCK_BYTES)
        return true;
    (void)fcntl(fd, F_SETFL, flags);
    return false;
}

int pc__disk_cache_open(struct pc_engine *engine, uint64_t bytes, struct pc__disk_cache **out)
{
    if (!bytes)
        return PC_OK;
    struct pc__disk_cache *disk = calloc(1, sizeof *disk);
    if (!disk)
        return pc__fail(PC_ERR_NO_MEMORY, "a cache on disk");
    *out = disk;
    disk->engine = engine;
    disk->fd = -1;
    pthread_mutex_init(&disk->lock, NULL);
    pc__link_init(&disk->idle);
    int rc = open_file(engine->disk_directory, bytes, &disk->fd);
    if (!rc)
        rc = pc__disk_slots_open(&disk->slots, (uint32_t)(bytes / PC__CHUNK_BYTES));
    if (rc)
        return rc;
    disk->writes = calloc(WRITES_MOST, sizeof *disk->writes);
    if (!disk->writes)
        return pc__fail(PC_ERR_NO_MEMORY, "copies for a cache on disk");
    for (unsigned i = 0; i < WRITES_MOST; i++) {
        disk->writes[i].disk = disk;
        disk->writes[i].job.run = run_write;
        disk->writes[i].bytes = aligned_alloc(PC_BLOCK_BYTES, PC__CHUNK_BYTES);
        if (!disk->writes[i].bytes)
            return pc__fail(PC_ERR_NO_MEMORY, "copies for a cache on disk");
        memset(disk->writes[i].bytes, 0, PC__CHUNK_BYTES);
        pc__link_push(&disk->idle, &disk->writes[i].link);
    }
    disk->is_direct = can_be_direct(disk->fd, disk->writes[0].bytes);
    return PC_OK;
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
