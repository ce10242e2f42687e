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
 * A reader looks up a slot, reads it without a lock, and looks again: `sequence` says whether the slot had
 * something else meanwhile. A disk that fails is not used any more, and nobody notices but by speed: homes have
 * all of it.
 *
 * Locks: disk_cache.lock, a leaf. put and removed are called under region.lock, so nothing of the generation
 * changes meanwhile.
 */
#include "common/disk_file.h"
#include "engine/cache/cache.h"
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
#define NO_SLOT UINT32_MAX

struct slot {
    struct pc__link siblings;                /* of its generation */
    const struct pc__generation *generation; /* compared, never looked into; NULL: none */
    uint64_t chunk;
    uint64_t sequence;                       /* it is another with each content */
    uint32_t hash_next;
    uint16_t blocks;                         /* bit i: it has block i of the chunk, */
    uint16_t coming;                         /* or block i is being written */
    bool is_written;                         /* at this moment: it stays where it is */
};
static_assert(sizeof(struct slot) <= 80, "as said above");

struct write {
    struct pc__link link;
    uint32_t slot;
    uint16_t blocks;
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
    struct slot *slots;
    uint32_t n_slots, n_buckets, next;
    uint32_t *buckets;
    uint64_t n_blocks;         /* that slots have */
    struct write *writes;      /* WRITES_MOST */
    struct pc__link idle, written; /* of writes: that nobody uses; to be written, the oldest first */
    struct pc__link reads[2];  /* struct pc__disk_job: bulk, urgent */
    uint64_t n_written;
    bool is_full;              /* the disk, when it was looked at last */
    struct pc__disk_times times;
};

/* ------------------------------------------------------------------- slots */

static uint32_t *bucket_of(struct pc__disk_cache *disk, const struct pc__generation *generation,
                           uint64_t chunk)
{
    const uint64_t key = ((uint64_t)(uintptr_t)generation >> 4) * 0x9e3779b97f4a7c15ull ^
                         chunk * 0xff51afd7ed558ccdull;
    return &disk->buckets[(key ^ key >> 32) & (disk->n_buckets - 1)];
}

static uint32_t find(struct pc__disk_cache *disk, const struct pc__generation *generation, uint64_t chunk)
{
    uint32_t at = *bucket_of(disk, generation, chunk);
    while (at != NO_SLOT && (disk->slots[at].generation != generation || disk->slots[at].chunk != chunk))
        at = disk->slots[at].hash_next;
    return at;
}

/* Locked: what it has is nobody's. */
static void drop(struct pc__disk_cache *disk, uint32_t index)
{
    struct slot *slot = &disk->slots[index];
    if (!slot->generation)
        return;
    uint32_t *at = bucket_of(disk, slot->generation, slot->chunk);
    while (*at != index)
        at = &disk->slots[*at].hash_next;
    *at = slot->hash_next;
    pc__link_remove(&slot->siblings);
    disk->n_blocks -= (uint64_t)__builtin_popcount(slot->blocks);
    slot->generation = NULL;
    slot->blocks = slot->coming = 0;
    slot->sequence++;
}

/* Locked: the next of the ring that is not being written. There are more slots than writes. */
static uint32_t take_next(struct pc__disk_cache *disk)
{
    uint32_t index;
    do {
        index = disk->next;
        disk->next = (disk->next + 1) % disk->n_slots;
    } while (disk->slots[index].is_written);
    drop(disk, index);
    return index;
}

static uint16_t bits_of(uint64_t chunk, uint64_t first, uint64_t past)
{
    const uint64_t begin = chunk * PC__CHUNK_BLOCKS;
    const uint64_t low = first > begin ? first - begin : 0;
    const uint64_t high = past - begin < PC__CHUNK_BLOCKS ? past - begin : PC__CHUNK_BLOCKS;
    return (uint16_t)(((1u << high) - 1) & ~((1u << low) - 1));
}

/* How many bits from that one on are as it is. */
static unsigned alike(uint16_t bits, unsigned from)
{
    const bool is_set = bits >> from & 1u;
    unsigned n = 1;
    while (from + n < PC__CHUNK_BLOCKS && (bits >> (from + n) & 1u) == is_set)
        n++;
    return n;
}

/* ---------------------------------------------------------------- eviction */

static int copy_blocks(const struct pc__generation *generation, uint64_t chunk, uint16_t blocks,
                       uint8_t *out)
{
    int rc = PC_OK;
    for (unsigned i = 0, n; i < PC__CHUNK_BLOCKS && !rc; i += n) {
        n = alike(blocks, i);
        if (blocks >> i & 1u)
            rc = pc__file_read(generation->memfd, out + ((size_t)i << PC_BLOCK_SHIFT),
                               (uint64_t)n << PC_BLOCK_SHIFT,
                               (chunk * PC__CHUNK_BLOCKS + i) << PC_BLOCK_SHIFT);
    }
    return rc;
}

/* Locked. A new slot for the chunk, in the place of another. */
static uint32_t take_slot(struct pc__disk_cache *disk, struct pc__generation *generation, uint64_t chunk)
{
    const uint32_t index = take_next(disk);
    struct slot *slot = &disk->slots[index];
    uint32_t *bucket = bucket_of(disk, generation, chunk);
    *slot = (struct slot){.generation = generation,
                          .chunk = chunk,
                          .sequence = slot->sequence + 1,
                          .hash_next = *bucket};
    *bucket = index;
    pc__link_push(&generation->on_disk_too, &slot->siblings);
    return index;
}

/* Locked. Of those blocks, the ones that the disk has not got; NULL: there are none, or too much is being
 * written. */
static struct write *begin_write(struct pc__disk_cache *disk, struct pc__generation *generation,
                                 uint64_t chunk, uint16_t blocks)
{
    uint32_t index = find(disk, generation, chunk);
    if (index != NO_SLOT)
        blocks &= (uint16_t)~disk->slots[index].blocks;
    if (!blocks || (index != NO_SLOT && disk->slots[index].is_written) || pc__link_empty(&disk->idle) ||
        disk->is_full)
        return NULL;
    struct write *write = pc__of(disk->idle.next, struct write, link);
    pc__link_remove(&write->link);
    index = index != NO_SLOT ? index : take_slot(disk, generation, chunk);
    disk->slots[index].coming = blocks;
    disk->slots[index].is_written = true;
    write->slot = index;
    write->blocks = blocks;
    return write;
}

/* Locked. Its blocks are there, but for those that have changed meanwhile. */
static void end_write(struct pc__disk_cache *disk, struct write *write, bool is_there)
{
    struct slot *slot = &disk->slots[write->slot];
    const unsigned n = (unsigned)__builtin_popcount(is_there ? slot->coming : 0u);
    slot->blocks |= is_there ? slot->coming : 0;
    slot->coming = 0;
    slot->is_written = false;
    disk->n_blocks += n;
    pc__count_add(&disk->engine->count.disk_cache_writes, n);
    if (slot->generation && !slot->blocks)
        drop(disk, write->slot);
    pc__link_push(&disk->idle, &write->link);
}

void pc__disk_cache_put(struct pc__disk_cache *disk, struct pc__generation *generation, uint64_t chunk,
                        uint32_t blocks)
{
    if (!disk || disk->is_off || !blocks)
        return;
    pthread_mutex_lock(&disk->lock);
    struct write *write = begin_write(disk, generation, chunk, (uint16_t)blocks);
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
    for (uint64_t chunk = first / PC__CHUNK_BLOCKS;
         chunk * PC__CHUNK_BLOCKS < first + n && !pc__link_empty(&generation->on_disk_too); chunk++) {
        const uint32_t index = find(disk, generation, chunk);
        if (index == NO_SLOT)
            continue;
        struct slot *slot = &disk->slots[index];
        const uint16_t changed = bits_of(chunk, first, first + n);
        disk->n_blocks -= (uint64_t)__builtin_popcount(slot->blocks & changed);
        slot->blocks &= (uint16_t)~changed;
        slot->coming &= (uint16_t)~changed;
        if (!slot->blocks && !slot->coming)
            drop(disk, index);
    }
    pthread_mutex_unlock(&disk->lock);
}

void pc__disk_cache_forget(struct pc__generation *generation)
{
    struct pc__disk_cache *disk = generation->disk_cache;
    bool more = disk != NULL;
    while (more) {
        pthread_mutex_lock(&disk->lock);
        for (unsigned i = 0; i < FORGET_AT_ONCE && !pc__link_empty(&generation->on_disk_too); i++)
            drop(disk, (uint32_t)(pc__of(generation->on_disk_too.next, struct slot, siblings) - disk->slots));
        more = !pc__link_empty(&generation->on_disk_too);
        pthread_mutex_unlock(&disk->lock);
    }
}

/* ----------------------------------------------------------------- reading */

/* Locked: its blocks from that one on. */
static unsigned filled_from(const struct pc__disk_cache *disk, uint32_t index, uint64_t block)
{
    const struct slot *slot = index == NO_SLOT ? NULL : &disk->slots[index];
    const unsigned at = (unsigned)(block % PC__CHUNK_BLOCKS);
    return slot && slot->blocks >> at & 1u ? alike(slot->blocks, at) : 0;
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
        has = filled_from(disk, find(disk, generation, first / PC__CHUNK_BLOCKS), first) > 0;
        do { /* from one to the next that is of the other kind */
            k = filled_from(disk, find(disk, generation, at / PC__CHUNK_BLOCKS), at);
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
    const uint32_t index = disk->is_off ? NO_SLOT : find(disk, generation, first / PC__CHUNK_BLOCKS);
    uint64_t k = filled_from(disk, index, first);
    const uint64_t sequence = k ? disk->slots[index].sequence : 0;
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
    const bool is_same = disk->slots[index].sequence == sequence;
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
        n = alike(write->blocks, i);
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
    disk->n_slots = (uint32_t)n_slots;
    for (disk->n_buckets = 1; disk->n_buckets < disk->n_slots;)
        disk->n_buckets *= 2;
    pthread_mutex_init(&disk->lock, NULL);
    pthread_cond_init(&disk->wake, NULL);
    pc__link_init(&disk->idle);
    pc__link_init(&disk->written);
    pc__link_init(&disk->reads[0]);
    pc__link_init(&disk->reads[1]);
    disk->slots = calloc(disk->n_slots, sizeof *disk->slots);
    disk->buckets = malloc(disk->n_buckets * sizeof *disk->buckets);
    disk->writes = calloc(WRITES_MOST, sizeof *disk->writes);
    if (!disk->slots || !disk->buckets || !disk->writes)
        return pc__fail(PC_ERR_NO_MEMORY, "the index of a cache on disk");
    memset(disk->buckets, 0xff, disk->n_buckets * sizeof *disk->buckets); /* NO_SLOT */
    for (unsigned i = 0; i < WRITES_MOST; i++) {
        disk->writes[i].bytes = aligned_alloc(PC_BLOCK_BYTES, PC__CHUNK_BYTES);
        if (!disk->writes[i].bytes)
            return pc__fail(PC_ERR_NO_MEMORY, "copies for a cache on disk");
        memset(disk->writes[i].bytes, 0, PC__CHUNK_BYTES);
        pc__link_push(&disk->idle, &disk->writes[i].link);
    }
    const int rc = open_file(disk, engine->disk_directory, n_slots * PC__CHUNK_BYTES);
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
    free(disk->buckets);
    free(disk->slots);
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
    const uint64_t n_blocks = disk->n_blocks;
    pthread_mutex_unlock(&disk->lock);
    return n_blocks << PC_BLOCK_SHIFT;
}

/* ------------------------------------------------------------------- audit */

const char *pc__disk_cache_audit(struct pc__disk_cache *disk)
{
    uint64_t n_blocks = 0, n_found = 0, n_taken = 0;
    const char *broken = NULL;
    if (!disk)
        return NULL;
    pthread_mutex_lock(&disk->lock);
    for (uint32_t i = 0; i < disk->n_slots; i++) {
        const struct slot *slot = &disk->slots[i];
        n_taken += slot->generation != NULL;
        n_found += slot->generation && find(disk, slot->generation, slot->chunk) == i;
        n_blocks += (uint64_t)__builtin_popcount(slot->blocks);
        if ((slot->generation != NULL) != ((slot->blocks | slot->coming) != 0) ||
            slot->blocks & slot->coming || (slot->coming && !slot->is_written))
            broken = "a slot of the cache's disk has blocks of a generation, or nothing";
    }
    if (!broken && n_found != n_taken)
        broken = "each slot of the cache's disk is found";
    if (!broken && n_blocks != disk->n_blocks)
        broken = "each block on the cache's disk is counted";
    pthread_mutex_unlock(&disk->lock);
    return broken;
}
