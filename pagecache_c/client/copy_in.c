/* copy_in.c - bytes of this process into a memfd, with several threads. See client.h.
 *
 * The source is a list of pieces, the destination one range of the file. Chunks of the destination
 * are dealt out; the pieces under each are found once, before.
 *
 * The caller is one of the threads; the others live for the length of the call, with all signals
 * but SIGSEGV blocked. They share a counter of chunks and the first error. No locks.
 *
 * Facts, and what follows: pwrite takes the file's lock for as long as it copies, so a second
 * thread gains nothing (1 GiB into a new memfd on 2 cores: 0.33 s with one thread and with two).
 * UFFDIO_COPY fills holes without that lock (0.23 s with two). So large copies go through a
 * mapping of their own with a uffd of their own, which traps nobody: no thread ever reads there.
 * What it will not take (blocks that are there already, ends that are not whole blocks, kernels or
 * sandboxes without userfaultfd) goes by pwrite.
 */
#include "client/client.h"

#include "common/atomics.h"
#include "common/error.h"
#include "os/huge_pages.h"
#include "os/userfaultfd.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define CHUNK_BYTES (1u << 20)
#define PARALLEL_FROM_BYTES (16u << 20)
#define THREADS_DEFAULT 4
#define THREADS_MAX 64
#define VECTOR 256u         /* pieces with one pwritev(): a chunk of single blocks */
static_assert((uint64_t)VECTOR * PC_BLOCK_BYTES >= CHUNK_BYTES, "a chunk's pieces fit");
#define BOUNCE_BYTES 65536u /* on the stack */
/* Up to here it is cheaper to make single pages than to look at what would make huge ones: a handful of
 * system calls, and some thirty. */
#define SINGLE_UP_TO_BYTES 65536u

/* At least a block long, or the only one. */
struct piece {
    uint64_t address, n_bytes;
};

/* Where a chunk begins. */
struct place {
    size_t piece;
    uint64_t skip_bytes; /* of that piece */
};

struct copy {
    int fd;
    uint64_t offset_bytes;
    const struct piece *pieces;
    const struct place *chunks;
    uint64_t n_bytes, n_chunks;
    bool may_touch;           /* the source is memory that this process may read */
    /* Looked at before each pwrite, for it can change in the middle: single pages are made first, then.
     * NULL: of what they are made does not matter. */
    const struct pc__huge_pages_files *setting;
    bool always_single;       /* or nobody can look, or need not */
    int uffd;                 /* -1: pwrite only */
    uint64_t map;             /* where the uffd's mapping has offset_bytes; a whole block */
    _Atomic uint64_t next_chunk;
    _Atomic int failed_errno; /* of the first failure; 0: none */
};

/* A part of the source, and how far into the destination it belongs. */
struct part {
    uint64_t at, address, n_bytes;
};

/* Fills holes with whole blocks. Returns how many bytes it did; what is left is pwrite's. */
static uint64_t fill_holes(const struct copy *copy, struct part part)
{
    const uint64_t whole = part.n_bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    uint64_t done = 0;
    while (copy->uffd >= 0 && part.at % PC_BLOCK_BYTES == 0 && done < whole) {
        struct uffdio_copy one = {.dst = copy->map + part.at + done,
                                  .src = part.address + done,
                                  .len = whole - done,
                                  .mode = UFFDIO_COPY_MODE_DONTWAKE};
        if (ioctl(copy->uffd, UFFDIO_COPY, &one) == 0)
            return whole;
        if (one.copy <= 0) /* EEXIST, ENOMEM, EFAULT: pwrite can do it, or says why not */
            return done;
        done += (uint64_t)one.copy;
    }
    return done;
}

static void open_map(struct copy *copy)
{
    struct uffdio_api api = {.api = UFFD_API};
    copy->uffd = -1;
    if (copy->n_bytes < PARALLEL_FROM_BYTES || copy->offset_bytes % PC_BLOCK_BYTES)
        return;
    int uffd = pc__userfaultfd_any(false);
    if (uffd < 0)
        return;
    uint64_t length = copy->n_bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    void *map = ioctl(uffd, UFFDIO_API, &api)
                    ? MAP_FAILED
                    : mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                           copy->fd, (off_t)copy->offset_bytes);
    struct uffdio_register range = {.range = {.start = (uint64_t)(uintptr_t)map, .len = length},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (map != MAP_FAILED)
        pc__huge_pages_refuse(map, length);
    if (map != MAP_FAILED && ioctl(uffd, UFFDIO_REGISTER, &range)) {
        munmap(map, length);
        map = MAP_FAILED;
    }
    if (map == MAP_FAILED) {
        close(uffd);
        return;
    }
    copy->uffd = uffd;
    copy->map = (uint64_t)(uintptr_t)map;
}

static void close_map(const struct copy *copy)
{
    if (copy->uffd < 0)
        return;
    munmap((void *)(uintptr_t)copy->map, copy->n_bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES);
    close(copy->uffd);
}

static void fail(struct copy *copy, int why)
{
    int none = 0;
    atomic_compare_exchange_strong(&copy->failed_errno, &none, why);
}

/* What a system call may not read, this thread may: the trap opens it. */
static ssize_t write_touched(const struct copy *copy, struct part part)
{
    char bounce[BOUNCE_BYTES];
    size_t n_bytes = part.n_bytes < sizeof bounce ? (size_t)part.n_bytes : sizeof bounce;
    memcpy(bounce, (const void *)(uintptr_t)part.address, n_bytes);
    return pwrite(copy->fd, bounce, n_bytes, (off_t)(copy->offset_bytes + part.at));
}

static struct iovec vector_of(struct part part)
{
    return (struct iovec){(void *)(uintptr_t)part.address, (size_t)part.n_bytes};
}

/* Parts that follow one another in the file. False: it failed. */
static bool write_parts(struct copy *copy, struct part *parts, size_t n)
{
    struct iovec from[VECTOR];
    const bool single =
        n && (copy->always_single || (copy->setting && pc__huge_pages_now(copy->setting)));
    if (single &&
        pc__huge_pages_prevent(copy->fd, copy->offset_bytes + parts[0].at,
                               parts[n - 1].at + parts[n - 1].n_bytes - parts[0].at)) {
        fail(copy, errno ? errno : ENOMEM);
        return false;
    }
    for (size_t first = 0; first < n;) {
        for (size_t i = first; i < n; i++)
            from[i - first] = vector_of(parts[i]);
        ssize_t did = pwritev(copy->fd, from, (int)(n - first),
                              (off_t)(copy->offset_bytes + parts[first].at));
        if (did < 0 && errno == EFAULT && copy->may_touch)
            did = write_touched(copy, parts[first]);
        if (did < 0 && errno == EINTR)
            continue;
        if (did <= 0) {
            fail(copy, did < 0 ? errno : EIO);
            return false;
        }
        for (uint64_t left = (uint64_t)did; left && first < n;) {
            uint64_t taken = left < parts[first].n_bytes ? left : parts[first].n_bytes;
            parts[first].at += taken;
            parts[first].address += taken;
            parts[first].n_bytes -= taken;
            left -= taken;
            first += parts[first].n_bytes == 0;
        }
    }
    return true;
}

static bool copy_chunk(struct copy *copy, uint64_t chunk)
{
    struct part parts[VECTOR];
    size_t n = 0, piece = copy->chunks[chunk].piece;
    uint64_t skip = copy->chunks[chunk].skip_bytes, at = chunk * CHUNK_BYTES;
    const uint64_t end = copy->n_bytes - at < CHUNK_BYTES ? copy->n_bytes : at + CHUNK_BYTES;
    while (at < end) {
        uint64_t n_bytes = copy->pieces[piece].n_bytes - skip;
        struct part part = {.at = at, .address = copy->pieces[piece].address + skip,
                            .n_bytes = n_bytes < end - at ? n_bytes : end - at};
        at += part.n_bytes;
        piece++;
        skip = 0;
        uint64_t filled = fill_holes(copy, part);
        if (n && filled) { /* what is left so far, and what is left now, are not in a row */
            if (!write_parts(copy, parts, n))
                return false;
            n = 0;
        }
        if (filled < part.n_bytes)
            parts[n++] = (struct part){.at = part.at + filled, .address = part.address + filled,
                                       .n_bytes = part.n_bytes - filled};
    }
    return n == 0 || write_parts(copy, parts, n);
}

static void *copy_chunks(void *arg)
{
    struct copy *copy = arg;
    for (;;) {
        uint64_t chunk = atomic_fetch_add(&copy->next_chunk, 1u);
        if (chunk >= copy->n_chunks || atomic_load(&copy->failed_errno) ||
            !copy_chunk(copy, chunk))
            return NULL;
    }
}

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return 1;
    return CPU_COUNT(&set);
}

/* Which pieces lie under which chunk. chunks[0] is all zeros. */
static void place_chunks(const struct piece *pieces, struct place *chunks, uint64_t n_chunks)
{
    struct place at = {0};
    for (uint64_t chunk = 1; chunk < n_chunks; chunk++) {
        uint64_t left = CHUNK_BYTES;
        while (left >= pieces[at.piece].n_bytes - at.skip_bytes) {
            left -= pieces[at.piece].n_bytes - at.skip_bytes;
            at = (struct place){.piece = at.piece + 1};
        }
        at.skip_bytes += left;
        chunks[chunk] = at;
    }
}

static void copy_with(struct copy *copy, int n_threads)
{
    pthread_t threads[THREADS_MAX];
    int n_started = 0;
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV); /* the source may lie behind the trap */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (n_started < n_threads - 1 &&
           pthread_create(&threads[n_started], NULL, copy_chunks, copy) == 0)
        n_started++; /* fewer threads are slower, no failure */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    copy_chunks(copy);
    for (int i = 0; i < n_started; i++)
        pthread_join(threads[i], NULL);
}

/* The pieces are not empty and sum to n_bytes. */
static int copy_pieces(struct copy *copy, int n_threads)
{
    struct place one = {0}, *chunks = &one;
    copy->n_chunks = copy->n_bytes / CHUNK_BYTES + (copy->n_bytes % CHUNK_BYTES != 0);
    if (n_threads == 0)
        n_threads = cores() < THREADS_DEFAULT ? cores() : THREADS_DEFAULT;
    if (n_threads > THREADS_MAX)
        n_threads = THREADS_MAX;
    if ((uint64_t)n_threads > copy->n_chunks)
        n_threads = (int)copy->n_chunks;
    if (copy->n_chunks > 1 && !(chunks = calloc(copy->n_chunks, sizeof *chunks)))
        return pc__fail(PC_ERR_NO_MEMORY, "a copy of %llu bytes", (unsigned long long)copy->n_bytes);
    place_chunks(copy->pieces, chunks, copy->n_chunks);
    copy->chunks = chunks;
    open_map(copy);
    copy_with(copy, n_threads);
    close_map(copy);
    if (chunks != &one)
        free(chunks);
    errno = atomic_load(&copy->failed_errno);
    if (errno == 0)
        return PC_OK;
    if (errno == EFAULT)
        return pc__fail(PC_ERR_SYSTEM, "pwrite from memory that is not resident or not mapped "
                                       "(prefetch it first)");
    return pc__fail_errno("pwrite of %llu bytes at %llu into shared memory",
                          (unsigned long long)copy->n_bytes,
                          (unsigned long long)copy->offset_bytes);
}

int pc__copy_runs(int fd, uint64_t offset_bytes, uint64_t base, const struct pc_run *runs,
                  size_t n_runs, int n_threads)
{
    struct copy copy = {.fd = fd, .offset_bytes = offset_bytes, .may_touch = true};
    struct piece few[16], *pieces = few;
    if (n_runs > sizeof few / sizeof few[0] && !(pieces = calloc(n_runs, sizeof *pieces)))
        return pc__fail(PC_ERR_NO_MEMORY, "a copy of %zu runs", n_runs);
    for (size_t i = 0; i < n_runs; i++) {
        pieces[i] = (struct piece){base + (runs[i].first_block << PC_BLOCK_SHIFT),
                                   runs[i].n_blocks << PC_BLOCK_SHIFT};
        copy.n_bytes += pieces[i].n_bytes;
    }
    copy.pieces = pieces;
    if (n_threads == 0 && copy.n_bytes < PARALLEL_FROM_BYTES)
        n_threads = 1;
    int rc = copy_pieces(&copy, n_threads);
    if (pieces != few)
        free(pieces);
    return rc;
}

PC_API int pc_copy_in(int fd, uint64_t offset_bytes, const void *source, uint64_t n_bytes,
                      int n_threads)
{
    const struct piece piece = {(uint64_t)(uintptr_t)source, n_bytes};
    struct copy copy = {.fd = fd, .offset_bytes = offset_bytes, .pieces = &piece,
                        .n_bytes = n_bytes};
    struct pc__huge_pages_files setting;
    if (n_threads < 0 || offset_bytes > INT64_MAX || n_bytes > (uint64_t)INT64_MAX - offset_bytes)
        return pc__fail(PC_ERR_RANGE, "%llu bytes at %llu with %d threads",
                        (unsigned long long)n_bytes, (unsigned long long)offset_bytes, n_threads);
    if (n_bytes <= SINGLE_UP_TO_BYTES) {
        copy.always_single = true;
        return copy_pieces(&copy, n_threads);
    }
    copy.always_single = pc__huge_pages_open(&setting, PC__HUGE_PAGES_DIRECTORY) != PC_OK;
    copy.setting = &setting;
    int rc = copy_pieces(&copy, n_threads);
    pc__huge_pages_close(&setting);
    return rc;
}
