/* tsan_mmap.h - force-included (-include) when the client is built with -fsanitize=thread.
 *
 * TSan's own mmap refuses fixed addresses outside what it calls application memory, and the global
 * window lies there. The kernel has no objection, so the calls go round the interceptor. */
#ifndef PC_TESTS_TSAN_MMAP_H
#define PC_TESTS_TSAN_MMAP_H

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void *pc__raw_mmap(void *at, size_t length, int prot, int flags, int fd, long offset)
{
    return (void *)syscall(SYS_mmap, at, length, prot, flags, fd, offset);
}
static inline int pc__raw_munmap(void *at, size_t length)
{
    return (int)syscall(SYS_munmap, at, length);
}
#define mmap pc__raw_mmap
#define munmap pc__raw_munmap

#endif
