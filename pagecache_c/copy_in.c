/* copy_in.c - pc_copy_in: bytes of this process into a memfd, with several threads.
 *
 * The caller is one of the threads; the others live for the length of the call, with all signals
 * blocked. They share a counter of chunks and the first error. No locks.
 *
 * Facts, and what follows: pwrite takes the file's lock for as long as it copies, so a second
 * thread gains nothing (1 GiB into a new memfd on 2 cores: 0.33 s with one thread and with two).
 * UFFDIO_COPY fills holes without that lock (0.23 s with two). So large copies go through a
 * mapping of their own with a uffd of their own, which traps nobody: no thread ever reads there.
 * What it will not take (blocks that are there already, ends that are not whole blocks, kernels or
 * sandboxes without userfaultfd) goes by pwrite.
 */
#include "atomics.h"
#include "error.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

#define CHUNK_BYTES (1u << 20)
#define PARALLEL_FROM_BYTES (16u << 20)
#define THREADS_DEFAULT 4
#define THREADS_MAX 64

struct copy {
    int fd;
    uint64_t offset_bytes;
    const char *source;
    uint64_t n_bytes, n_chunks;
    int uffd;                 /* -1: pwrite only */
    uint64_t map;             /* where the uffd's mapping has offset_bytes; a whole block */
    _Atomic uint64_t next_chunk;
    _Atomic int failed_errno; /* of the first failure; 0: none */
};

/* Fills holes of [at, end) with whole blocks. Returns where it stopped; what is left is pwrite's. */
static uint64_t fill_holes(const struct copy *copy, uint64_t at, uint64_t end)
{
    end = at + (end - at) / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    while (copy->uffd >= 0 && at < end) {
        struct uffdio_copy one = {.dst = copy->map + at,
                                  .src = (uint64_t)(uintptr_t)copy->source + at,
                                  .len = end - at,
                                  .mode = UFFDIO_COPY_MODE_DONTWAKE};
        if (ioctl(copy->uffd, UFFDIO_COPY, &one) == 0)
            return end;
        if (one.copy <= 0) /* EEXIST, ENOMEM, EFAULT: pwrite can do it, or says why not */
            return at;
        at += (uint64_t)one.copy;
    }
    return at;
}

static void open_map(struct copy *copy)
{
    struct uffdio_api api = {.api = UFFD_API};
    copy->uffd = -1;
    if (copy->n_bytes < PARALLEL_FROM_BYTES || copy->offset_bytes % PC_BLOCK_BYTES)
        return;
    int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    if (uffd < 0)
        return;
    uint64_t length = copy->n_bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    void *map = ioctl(uffd, UFFDIO_API, &api)
                    ? MAP_FAILED
                    : mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                           copy->fd, (off_t)copy->offset_bytes);
    struct uffdio_register range = {.range = {.start = (uint64_t)(uintptr_t)map, .len = length},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
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

static void *copy_chunks(void *arg)
{
    struct copy *copy = arg;
    for (;;) {
        uint64_t chunk = atomic_fetch_add(&copy->next_chunk, 1u);
        if (chunk >= copy->n_chunks || atomic_load(&copy->failed_errno))
            return NULL;
        uint64_t at = chunk * CHUNK_BYTES;
        uint64_t end = copy->n_bytes - at < CHUNK_BYTES ? copy->n_bytes : at + CHUNK_BYTES;
        at = fill_holes(copy, at, end);
        while (at < end) {
            ssize_t n = pwrite(copy->fd, copy->source + at, end - at,
                               (off_t)(copy->offset_bytes + at));
            if (n < 0 && errno == EINTR)
                continue;
            if (n <= 0) {
                int none = 0, why = n < 0 ? errno : EIO;
                atomic_compare_exchange_strong(&copy->failed_errno, &none, why);
                return NULL;
            }
            at += (uint64_t)n;
        }
    }
}

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return 1;
    return CPU_COUNT(&set);
}

PC_API int pc_copy_in(int fd, uint64_t offset_bytes, const void *source, uint64_t n_bytes,
                      int n_threads)
{
    struct copy copy = {.fd = fd, .offset_bytes = offset_bytes, .source = source,
                        .n_bytes = n_bytes,
                        .n_chunks = n_bytes / CHUNK_BYTES + (n_bytes % CHUNK_BYTES != 0)};
    if (n_threads < 0 || offset_bytes > INT64_MAX || n_bytes > (uint64_t)INT64_MAX - offset_bytes)
        return pc__fail(PC_ERR_RANGE, "%llu bytes at %llu with %d threads",
                        (unsigned long long)n_bytes, (unsigned long long)offset_bytes, n_threads);
    if (n_threads == 0)
        n_threads = cores() < THREADS_DEFAULT ? cores() : THREADS_DEFAULT;
    if (n_threads > THREADS_MAX)
        n_threads = THREADS_MAX;
    if ((uint64_t)n_threads > copy.n_chunks)
        n_threads = (int)copy.n_chunks;
    open_map(&copy);
    pthread_t threads[THREADS_MAX];
    int n_started = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (n_started < n_threads - 1 &&
           pthread_create(&threads[n_started], NULL, copy_chunks, &copy) == 0)
        n_started++; /* fewer threads are slower, no failure */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    copy_chunks(&copy);
    for (int i = 0; i < n_started; i++)
        pthread_join(threads[i], NULL);
    close_map(&copy);
    errno = atomic_load(&copy.failed_errno);
    if (errno == 0)
        return PC_OK;
    if (errno == EFAULT)
        return pc__fail(PC_ERR_SYSTEM, "pwrite from memory that is not resident or not mapped "
                                       "(prefetch it first)");
    return pc__fail_errno("pwrite of %llu bytes at %llu into a home", (unsigned long long)n_bytes,
                          (unsigned long long)offset_bytes);
}
