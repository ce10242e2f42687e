/* copy_in.c - pc_copy_in: bytes of this process into a memfd, with several threads.
 *
 * The caller is one of the threads; the others live for the length of the call, with all signals
 * blocked. They share a counter of chunks and the first error. No locks.
 */
#include "atomics.h"
#include "error.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <unistd.h>

#define CHUNK_BYTES (1u << 20)
#define THREADS_DEFAULT 4
#define THREADS_MAX 64

struct copy {
    int fd;
    uint64_t offset_bytes;
    const char *source;
    uint64_t n_bytes, n_chunks;
    _Atomic uint64_t next_chunk;
    _Atomic int failed_errno; /* of the first failure; 0: none */
};

static void *copy_chunks(void *arg)
{
    struct copy *copy = arg;
    for (;;) {
        uint64_t chunk = atomic_fetch_add(&copy->next_chunk, 1u);
        if (chunk >= copy->n_chunks || atomic_load(&copy->failed_errno))
            return NULL;
        uint64_t at = chunk * CHUNK_BYTES;
        uint64_t end = copy->n_bytes - at < CHUNK_BYTES ? copy->n_bytes : at + CHUNK_BYTES;
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
    errno = atomic_load(&copy.failed_errno);
    if (errno == 0)
        return PC_OK;
    if (errno == EFAULT)
        return pc__fail(PC_ERR_SYSTEM, "pwrite from memory that is not resident or not mapped "
                                       "(prefetch it first)");
    return pc__fail_errno("pwrite of %llu bytes at %llu into a home", (unsigned long long)n_bytes,
                          (unsigned long long)offset_bytes);
}
