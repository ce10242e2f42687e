/* disk_copy.c - see disk_copy.h.
 *
 * Chunks of the file are dealt out to some threads, the caller among them. Each gathers the blocks of a chunk
 * in a buffer of its own, sums them there, and writes it. The threads live for the length of the call, with
 * all signals but SIGSEGV and SIGBUS blocked: the source may lie behind the trap.
 *
 * O_DIRECT belongs to an open file, and others may have this one: so the file is opened once more. Some file
 * systems refuse that, or each write of it (EINVAL): there the page cache takes it.
 */
#include "kernels/disk_copy.h"

#include "common/atomics.h"
#include "common/error.h"
#include "kernels/crc32c.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK_BLOCKS 512u          /* 2 MiB */
#define DIRECT_FROM_BLOCKS 1024u   /* less of it is in the page cache sooner than on the disk */
#define THREADS 4u                 /* a disk that gets one request after the other waits for each */

struct copy {
    int fd, direct_fd;             /* direct_fd: -1: there is none */
    uint64_t offset, n_blocks;
    const struct pc__blocks_at *pieces;
    const uint64_t *firsts;        /* of each piece: how many blocks are before it; and one behind the last */
    size_t n_pieces;
    uint32_t *sums;
    _Atomic uint64_t next;
    _Atomic bool no_direct;
    _Atomic int failed_errno;
};

static void fail(struct copy *copy, int why)
{
    int none = 0;
    atomic_compare_exchange_strong(&copy->failed_errno, &none, why);
}

/* The piece that has the block. */
static size_t piece_of(const struct copy *copy, uint64_t block)
{
    size_t low = 0, high = copy->n_pieces;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (copy->firsts[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void gather(const struct copy *copy, uint64_t first, uint64_t n, uint8_t *out)
{
    size_t piece = piece_of(copy, first);
    for (uint64_t done = 0; done < n; piece++) {
        const uint64_t skip = first + done - copy->firsts[piece];
        const uint64_t left = copy->pieces[piece].n_blocks - skip, some = left < n - done ? left : n - done;
        memcpy(out + (done << PC_BLOCK_SHIFT),
               (const uint8_t *)copy->pieces[piece].at + (skip << PC_BLOCK_SHIFT), some << PC_BLOCK_SHIFT);
        done += some;
    }
}

/* False: with O_DIRECT it cannot be. */
static bool write_with(struct copy *copy, int fd, const uint8_t *bytes, uint64_t n_bytes, uint64_t offset)
{
    while (n_bytes) {
        const ssize_t n = pwrite(fd, bytes, n_bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EINVAL && fd == copy->direct_fd)
            return false;
        if (n <= 0) {
            fail(copy, n < 0 ? errno : EIO);
            return true;
        }
        bytes += n;
        offset += (uint64_t)n;
        n_bytes -= (uint64_t)n;
        if (n % PC_BLOCK_BYTES && fd == copy->direct_fd) /* what follows is not aligned */
            return write_with(copy, copy->fd, bytes, n_bytes, offset);
    }
    return true;
}

static void *copy_chunks(void *arg)
{
    struct copy *copy = arg;
    const uint64_t most = copy->n_blocks < CHUNK_BLOCKS ? copy->n_blocks : CHUNK_BLOCKS;
    uint8_t *buffer = mmap(NULL, most << PC_BLOCK_SHIFT, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (buffer == MAP_FAILED) {
        fail(copy, errno);
        return NULL;
    }
    while (!atomic_load(&copy->failed_errno)) {
        const uint64_t first = atomic_fetch_add(&copy->next, most);
        if (first >= copy->n_blocks)
            break;
        const uint64_t n = copy->n_blocks - first < most ? copy->n_blocks - first : most;
        gather(copy, first, n, buffer);
        pc_crc32c_blocks(buffer, n, copy->sums + first);
        for (uint64_t i = first; i < first + n; i++)
            copy->sums[i] ^= PC__CRC32C_ZERO_BLOCK;
        const uint64_t n_bytes = n << PC_BLOCK_SHIFT, at = copy->offset + (first << PC_BLOCK_SHIFT);
        if (copy->direct_fd >= 0 && !atomic_load(&copy->no_direct) &&
            write_with(copy, copy->direct_fd, buffer, n_bytes, at))
            continue;
        atomic_store(&copy->no_direct, true);
        (void)write_with(copy, copy->fd, buffer, n_bytes, at);
    }
    munmap(buffer, most << PC_BLOCK_SHIFT);
    return NULL;
}

static int open_direct(int fd)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_WRONLY | O_DIRECT | O_CLOEXEC);
}

static void copy_with_threads(struct copy *copy)
{
    pthread_t threads[THREADS - 1];
    unsigned n_started = 0;
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (n_started < THREADS - 1 && (n_started + 1) * (uint64_t)CHUNK_BLOCKS < copy->n_blocks &&
           pthread_create(&threads[n_started], NULL, copy_chunks, copy) == 0)
        n_started++; /* fewer threads are slower, no failure */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)copy_chunks(copy);
    for (unsigned i = 0; i < n_started; i++)
        pthread_join(threads[i], NULL);
}

static int copy_blocks(int fd, uint64_t offset, const struct pc__blocks_at *pieces, size_t n_pieces,
                       uint32_t *sums, bool past_cache)
{
    struct copy copy = {
        .fd = fd, .direct_fd = -1, .offset = offset, .pieces = pieces, .n_pieces = n_pieces, .sums = sums};
    uint64_t *firsts = calloc(n_pieces + 1, sizeof *firsts);
    if (!firsts)
        return pc__fail(PC_ERR_NO_MEMORY, "a copy of %zu pieces", n_pieces);
    for (size_t i = 0; i < n_pieces; i++)
        firsts[i + 1] = firsts[i] + pieces[i].n_blocks;
    copy.firsts = firsts;
    copy.n_blocks = firsts[n_pieces];
    if (past_cache && copy.n_blocks >= DIRECT_FROM_BLOCKS)
        copy.direct_fd = open_direct(fd);
    if (copy.n_blocks)
        copy_with_threads(&copy);
    if (copy.direct_fd >= 0)
        close(copy.direct_fd);
    free(firsts);
    errno = atomic_load(&copy.failed_errno);
    return errno ? pc__fail_disk("writing %" PRIu64 " blocks to a file on disk", copy.n_blocks) : PC_OK;
}

int pc__disk_copy(int fd, uint64_t offset, const struct pc__blocks_at *pieces, size_t n_pieces, uint32_t *sums)
{
    return copy_blocks(fd, offset, pieces, n_pieces, sums, true);
}

int pc__disk_copy_cached(int fd, uint64_t offset, const struct pc__blocks_at *pieces, size_t n_pieces,
                         uint32_t *sums)
{
    return copy_blocks(fd, offset, pieces, n_pieces, sums, false);
}

PC_API int pc_copy_to_disk(int fd, uint64_t offset_bytes, const void *source, uint64_t n_blocks, uint32_t *sums)
{
    const struct pc__blocks_at piece = {source, n_blocks};
    if (offset_bytes % PC_BLOCK_BYTES || offset_bytes > INT64_MAX ||
        n_blocks > ((uint64_t)INT64_MAX - offset_bytes) >> PC_BLOCK_SHIFT)
        return pc__fail(PC_ERR_RANGE, "%" PRIu64 " blocks at byte %" PRIu64 " of a file", n_blocks, offset_bytes);
    return pc__disk_copy(fd, offset_bytes, &piece, 1, sums);
}
