/* fork_allocator.c - malloc and free that are never under way in another thread while this one forks.
 *
 * glibc takes its allocator's locks at fork. The sanitizers of gcc 12 and clang 14 do not take theirs:
 * a child of a fork that came while another thread was in malloc has a lock that nobody gives back,
 * and hangs at an allocation of its own. The tests fork beside threads all the time.
 *
 * A sanitizer's malloc is a weak name for __interceptor_malloc, so a program may have its own. Ours
 * counts who is inside. A fork lets nobody in any more, and waits until all are out.
 * What a sanitizer allocates for itself when a thread begins or ends is not counted.
 *
 * Nothing here may be seen by TSan: a lock that it knew would order all that threads do between two
 * allocations, and hide their races. So: no pthread lock, and no instrumentation.
 */
#if defined(__has_feature) /* not clang's TSan: it is not ready yet at a program's first malloc */
#if __has_feature(address_sanitizer)
#define UNDER_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define UNDER_SANITIZER 1
#endif

#ifndef UNDER_SANITIZER

typedef int glibc_holds_its_own; /* C wants something in a file */

#else

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UNSEEN __attribute__((no_sanitize("thread"), no_sanitize("address"), noinline))
#define OURS __attribute__((visibility("default"), no_sanitize("thread"), no_sanitize("address")))

static int n_inside;        /* threads in the sanitizer's allocator */
static int forking;         /* 1: nobody else goes in */
static __thread int depth;  /* of this thread: a signal handler may allocate, too */

UNSEEN static void give_way(void)
{
    (void)syscall(SYS_sched_yield); /* syscall() is no interceptor's */
}

UNSEEN static void enter(void)
{
    if (depth++ > 0)
        return;
    for (;;) { /* this store, then that load; before_fork the other way round: one sees the other */
        __atomic_add_fetch(&n_inside, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&forking, __ATOMIC_SEQ_CST))
            return;
        __atomic_sub_fetch(&n_inside, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&forking, __ATOMIC_SEQ_CST))
            give_way();
    }
}

UNSEEN static void leave(void)
{
    if (--depth == 0)
        __atomic_sub_fetch(&n_inside, 1, __ATOMIC_SEQ_CST);
}

UNSEEN static void before_fork(void)
{
    int nobody = 0;
    while (!__atomic_compare_exchange_n(&forking, &nobody, 1, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
        nobody = 0;
        give_way();
    }
    /* Who forks within an allocation (from a signal handler) is inside itself. */
    while (__atomic_load_n(&n_inside, __ATOMIC_SEQ_CST) > (depth > 0))
        give_way();
    depth++; /* what this thread allocates until after_fork does not wait for itself */
}

UNSEEN static void after_fork(void)
{
    depth--;
    __atomic_store_n(&forking, 0, __ATOMIC_SEQ_CST);
}

/* The first to be registered: the last before the fork, and the first after it. */
__attribute__((constructor(101))) static void hold_at_fork(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
}

/* What the sanitizer has for each, and our name in front of it. */
#define IN_TURN(result, name, parameters, arguments)                                             \
    result __interceptor_##name parameters;                                                      \
    OURS result name parameters;                                                                 \
    OURS result name parameters                                                                  \
    {                                                                                            \
        enter();                                                                                 \
        result got = __interceptor_##name arguments;                                             \
        leave();                                                                                 \
        return got;                                                                              \
    }

IN_TURN(void *, malloc, (size_t n_bytes), (n_bytes))
IN_TURN(void *, calloc, (size_t n, size_t each_bytes), (n, each_bytes))
IN_TURN(void *, realloc, (void *old, size_t n_bytes), (old, n_bytes))
IN_TURN(void *, reallocarray, (void *old, size_t n, size_t each_bytes), (old, n, each_bytes))
IN_TURN(void *, memalign, (size_t alignment, size_t n_bytes), (alignment, n_bytes))
IN_TURN(void *, aligned_alloc, (size_t alignment, size_t n_bytes), (alignment, n_bytes))
IN_TURN(int, posix_memalign, (void **out, size_t alignment, size_t n_bytes),
        (out, alignment, n_bytes))
IN_TURN(char *, strdup, (const char *text), (text))
IN_TURN(char *, strndup, (const char *text, size_t n_bytes), (text, n_bytes))

void __interceptor_free(void *block);
OURS void free(void *block);
OURS void free(void *block)
{
    enter();
    __interceptor_free(block);
    leave();
}

#endif
