/* tasks.c - tasks are taken and finished, many under one lock. */
#include "match/match.h"

uint64_t pc__match_take_ready(pc_matcher *m, struct pc_match_ready *out, uint64_t most)
{
    struct pc__match_shared *s = m->shared;
    uint64_t n = 0;
    for (; n < most && s->ready_first < s->ready_end; n++)
        out[n] = *pc__match_ready(m, s->ready_first++);
    return n;
}

int pc__match_lock_ready(pc_matcher *m, uint64_t timeout_ns)
{
    struct pc__match_shared *s = m->shared;
    uint64_t deadline_ns = 0;
    for (;;) {
        int rc = pc__match_lock(m);
        if (rc)
            return rc;
        if (atomic_load(&s->is_stopped) || atomic_load(&m->is_shut)) {
            pc__match_unlock(m);
            return pc__fail(PC_ERR_CLOSED, "the matcher was stopped");
        }
        if (s->ready_first < s->ready_end)
            return PC_OK;
        if (!deadline_ns)
            deadline_ns = pc__match_deadline(timeout_ns);
        rc = pc__match_sleep(m, &s->ready_word, &s->ready_waiters, deadline_ns);
        if (rc) {
            pc__match_unlock(m);
            return rc;
        }
    }
}

PC_API int64_t pc_match_take(pc_matcher *m, struct pc_match_ready *out, uint64_t most,
                             uint64_t timeout_ns)
{
    int rc = pc__match_lock_ready(m, timeout_ns);
    if (rc)
        return rc == PC_ERR_TIMEOUT ? 0 : rc;
    uint64_t n = pc__match_take_ready(m, out, most);
    pc__match_unlock(m);
    return (int64_t)n;
}

PC_API int pc_match_finish(pc_matcher *m, const struct pc_match_ready *tasks, uint64_t n)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    for (uint64_t i = 0; i < n && !rc; i++)
        rc = pc__match_ended(m, &tasks[i]);
    pc__match_unlock(m);
    return rc;
}
