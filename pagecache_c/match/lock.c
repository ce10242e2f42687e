/* lock.c - the matcher's mutex, and waits for what it covers.
 *
 * A process that dies with the mutex may have left anything behind: the next one to take it says so to all.
 * A process that is stopped with it is waited for, at most LOCK_NS. Sleepers look at the mutex every
 * SLEEP_NS, so that a wake that a dead process owed them costs no more than that.
 */
#include "match/match.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ull
#define LOCK_NS (20 * SECOND_NS)
#define SLEEP_NS SECOND_NS
#define SPINS 64 /* a batch is held for microseconds, and a sleep costs as many */

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

static struct timespec timespec_of(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / SECOND_NS), .tv_nsec = (long)(ns % SECOND_NS)};
}

uint64_t pc__match_deadline(uint64_t timeout_ns)
{
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

static void wake(_Atomic uint32_t *word, uint64_t n)
{
    syscall(SYS_futex, word, FUTEX_WAKE, n > INT_MAX ? INT_MAX : (int)n, NULL, NULL, 0);
}

void pc__match_wake_all(pc_matcher *m)
{
    atomic_fetch_add(&m->shared->ready_word, 1u);
    atomic_fetch_add(&m->shared->out_word, 1u);
    wake(&m->shared->ready_word, INT_MAX);
    wake(&m->shared->out_word, INT_MAX);
}

int pc__match_lock(pc_matcher *m)
{
    struct pc__match_shared *s = m->shared;
    int error = pthread_mutex_trylock(&s->lock);
    for (int i = 0; error == EBUSY && i < SPINS; i++) {
        pause_cpu();
        error = pthread_mutex_trylock(&s->lock);
    }
    if (error == EBUSY) {
        struct timespec until = timespec_of(now_ns(CLOCK_REALTIME) + LOCK_NS);
        error = pthread_mutex_timedlock(&s->lock, &until);
    }
    if (error == EOWNERDEAD) {
        atomic_store(&s->is_broken, 1u);
        (void)pthread_mutex_consistent(&s->lock); /* so that all that come see it */
        error = 0;
    }
    if (error == ETIMEDOUT)
        return pc__fail(PC_ERR_TIMEOUT, "a process has been in the matcher for %llu s",
                        LOCK_NS / SECOND_NS);
    if (error) {
        errno = error;
        return pc__fail(PC_ERR_SYSTEM, "the matcher's mutex");
    }
    if (s->is_discarded && !error) {
        pthread_mutex_unlock(&s->lock);
        return pc__fail(PC_ERR_CLOSED, "the matcher's program has ended");
    }
    if (!atomic_load_explicit(&s->is_broken, memory_order_relaxed))
        return PC_OK;
    pthread_mutex_unlock(&s->lock);
    pc__match_wake_all(m);
    return pc__fail(PC_ERR_MEMBER, "a process died while it changed the matcher of this node");
}

void pc__match_unlock(pc_matcher *m)
{
    struct pc__match_shared *s = m->shared;
    uint64_t n_ready = 0;
    bool has_out = false;
    if (s->has_ready_news) {
        s->has_ready_news = 0;
        if (atomic_load_explicit(&s->ready_waiters, memory_order_relaxed)) {
            n_ready = s->ready_end - s->ready_first;
            atomic_fetch_add(&s->ready_word, 1u);
        }
    }
    if (s->has_out_news) {
        s->has_out_news = 0;
        has_out = atomic_load_explicit(&s->out_waiters, memory_order_relaxed) != 0;
        if (has_out)
            atomic_fetch_add(&s->out_word, 1u);
    }
    pthread_mutex_unlock(&s->lock);
    if (n_ready)
        wake(&s->ready_word, n_ready);
    if (has_out)
        wake(&s->out_word, 1);
}

int pc__match_sleep(pc_matcher *m, _Atomic uint32_t *word, _Atomic uint32_t *waiters,
                    uint64_t deadline_ns)
{
    uint64_t now = now_ns(CLOCK_MONOTONIC);
    if (now >= deadline_ns)
        return PC_ERR_TIMEOUT;
    uint64_t for_ns = deadline_ns - now < SLEEP_NS ? deadline_ns - now : SLEEP_NS;
    struct timespec span = timespec_of(for_ns);
    /* Before the lock is given up: whoever changes the word after that knows of us. */
    uint32_t seen = atomic_load(word);
    atomic_fetch_add(waiters, 1u);
    pc__match_unlock(m);
    (void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &span, NULL, 0);
    atomic_fetch_sub(waiters, 1u);
    return PC_OK;
}
