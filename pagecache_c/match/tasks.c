/* tasks.c - tasks are taken and finished, many under one lock. */
#include "match/match.h"

uint64_t pc__match_take_ready(pc_matcher *m, struct pc_match_ready *out, uint64_t most)
{
    struct pc__match_shared *s = m->shared;
    uint64_t n_ready = s->ready_end - s->ready_first, n = 0;
    if (s->n_takers > 1u && most > (n_ready + s->n_takers - 1u) / s->n_takers)
        most = (n_ready + s->n_takers - 1u) / s->n_takers; /* the others get theirs */
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

PC_API int pc_match_set_takers(pc_matcher *m, uint32_t n)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    m->shared->n_takers = n;
    pc__match_unlock(m);
    return PC_OK;
}

PC_API int pc_match_finish(pc_matcher *m, const struct pc_match_ready *tasks, const uint64_t *took_ns,
                           uint64_t n)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    for (uint64_t i = 0; i < n && !rc; i++)
        rc = pc__match_ended(m, &tasks[i], took_ns ? took_ns[i] : 0);
    pc__match_unlock(m);
    return rc;
}

PC_API int pc_match_end(pc_matcher *m, const struct pc_match_ready *tasks, const uint64_t *took_ns,
                        uint64_t n, const struct pc_match_sent *sent, const uint64_t *first_sent,
                        const void *data, uint64_t data_bytes, uint64_t *n_done)
{
    *n_done = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t first = first_sent[i], n_sent = first_sent[i + 1] - first;
        int rc = pc__match_check_sent(sent + first, n_sent, data, data_bytes, UINT32_MAX);
        if (rc)
            return rc;
    }
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    for (; *n_done < n && !rc; *n_done += !rc) {
        const struct pc_match_ready *task = &tasks[*n_done];
        uint64_t first = first_sent[*n_done], n_sent = first_sent[*n_done + 1u] - first;
        if (!pc__match_running(m, task)) {
            rc = PC_ERR_RANGE;
        } else if (pc__match_stage(m, pc__match_instance(m, task->number)->stage)->sends) {
            int64_t away = pc__match_send_all(m, task, sent + first, n_sent, data, NULL);
            rc = away < 0 ? (int)away : PC_OK;
        } else if (n_sent) {
            rc = pc__fail(PC_ERR_RANGE, "task %llu of stage number %llu sends, and its stage does not",
                          (unsigned long long)task->index, (unsigned long long)task->number);
        }
        if (!rc)
            rc = pc__match_ended(m, task, took_ns[*n_done]);
    }
    pc__match_unlock(m);
    return rc;
}

PC_API int64_t pc_match_tallies(pc_matcher *m, uint64_t *out, uint64_t capacity)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_shared *s = m->shared;
    uint64_t n = 0;
    for (uint64_t i = 0; i < s->n_slices; i++) {
        const struct pc__match_slice *slice = pc__match_slice(m, i);
        if (!slice->n_ran)
            continue;
        if (n < capacity)
            memcpy(out + 4 * n, (uint64_t[]){slice->group, slice->index, slice->n_ran, slice->busy_ns},
                   4 * sizeof *out);
        n++;
    }
    pc__match_unlock(m);
    return (int64_t)n;
}
