/* order.c - which stages are known: the program's steps, taken one after the other, as sequence.py does.
 *
 * Those that are known are a window, a ring by their numbers: from the oldest that a slice anywhere may
 * need, up to the next decision that has not come. Those of one group are linked.
 */
#include "match/match.h"

/* ------------------------------------------------------------- sequence */

static void add_next(pc_matcher *m, uint32_t stage_number, bool decides)
{
    struct pc__match_shared *s = m->shared;
    const struct pc_match_stage *stage = pc__match_stage(m, stage_number);
    uint64_t number = ++s->n_known;
    struct pc__match_instance *instance = pc__match_instance(m, number);
    struct pc__match_need *needs = pc__match_needs(m, number);
    *instance = (struct pc__match_instance){.number = number, .stage = stage_number};
    for (uint32_t i = 0; i < stage->n_accesses; i++) {
        const struct pc_match_access *access = pc__match_access(m, stage->first_access + i);
        struct pc__match_dataset *dataset = pc__match_dataset(m, access->dataset);
        needs[i] = (struct pc__match_need){dataset->last_writer, dataset->readers_since};
        if (access->is_write) {
            dataset->last_writer = number;
            dataset->readers_since = 0;
        } else {
            dataset->readers_since++;
        }
    }
    if (s->last_stage >= 0) {
        const struct pc_match_stage *before = pc__match_stage(m, (uint64_t)s->last_stage);
        instance->senders = before->sends ? before->n_tasks : 0;
        if (before->sends) /* it may begin now: its next stage is known */
            pc__match_group(m, before->group)->is_touched = 1;
    }
    s->last_stage = stage_number;
    s->waits = decides;
    struct pc__match_group *group = pc__match_group(m, stage->group);
    if (group->tail)
        pc__match_instance(m, group->tail)->next = number;
    else
        group->head = number;
    group->tail = number;
    group->is_touched = 1;
}

/* The answer of a stage that is known now may have come before. */
static void find_early(pc_matcher *m, struct pc__match_instance *instance)
{
    uint64_t *link = &m->shared->early;
    while (*link) {
        uint64_t at = *link;
        struct pc__match_answer *answer = pc__match_at(m, at);
        if (answer->number <= instance->number) {
            if (answer->number == instance->number)
                instance->answer = 1u + (uint32_t)answer->value;
            *link = answer->next;
            pc__heap_give(m, at);
        } else {
            link = &answer->next;
        }
    }
}

/* Whether there is one more. */
static bool take_steps(pc_matcher *m)
{
    struct pc__match_shared *s = m->shared;
    int64_t *counters = pc__match_at(m, s->counters_at);
    /* A program that the builder has made comes to a stage before that; others are given up. */
    uint64_t most = 4u * (uint64_t)s->n_steps;
    while (s->step >= 0 && !s->waits && most--) {
        const struct pc_match_step *step = pc__match_step(m, (uint64_t)s->step);
        switch (step->op) {
        case PC_MATCH_CLEAR:
            counters[step->arg] = 0;
            s->step = step->then;
            break;
        case PC_MATCH_REPEAT:
            s->step = ++counters[step->arg] <= step->limit ? step->then : step->other;
            break;
        default:
            add_next(m, (uint32_t)step->arg, step->op == PC_MATCH_DECIDE);
            if (!s->waits)
                s->step = step->then;
            return true;
        }
    }
    return false;
}

void pc__match_extend(pc_matcher *m)
{
    struct pc__match_shared *s = m->shared;
    bool has_new = false;
    for (;;) {
        if (s->waits) {
            const struct pc__match_instance *last = pc__match_instance(m, s->n_known);
            if (!last || !last->answer)
                break;
            const struct pc_match_step *step = pc__match_step(m, (uint64_t)s->step);
            s->step = last->answer == 2u ? step->then : step->other;
            s->waits = 0;
        }
        if (s->n_known - s->oldest + 1u >= s->window || !take_steps(m))
            break;
        has_new = true;
        if (s->early)
            find_early(m, pc__match_instance(m, s->n_known));
    }
    if (!has_new)
        return;
    for (uint32_t g = 0; g < s->n_groups; g++) {
        struct pc__match_group *group = pc__match_group(m, g);
        if (!group->is_touched)
            continue;
        group->is_touched = 0;
        for (uint32_t i = 0; i < group->n_slices; i++) {
            struct pc__match_slice *slice = pc__match_slice(m, group->first_slice + i);
            if (slice->is_here)
                pc__match_slice_now(m, slice);
        }
    }
}

/* ------------------------------------------------------------- decisions */

int pc__match_answered(pc_matcher *m, uint64_t number, bool value)
{
    struct pc__match_shared *s = m->shared;
    if (number < s->oldest)
        return PC_OK;
    struct pc__match_instance *instance = pc__match_instance(m, number);
    if (instance) {
        instance->answer = value ? 2u : 1u;
        pc__match_extend(m);
        return PC_OK;
    }
    for (uint64_t at = s->early; at;) {
        struct pc__match_answer *answer = pc__match_at(m, at);
        if (answer->number == number) {
            answer->value = value;
            return PC_OK;
        }
        at = answer->next;
    }
    uint64_t at = pc__heap_take(m, sizeof(struct pc__match_answer));
    if (!at)
        return pc__match_full(m);
    *(struct pc__match_answer *)pc__match_at(m, at) =
        (struct pc__match_answer){.next = s->early, .number = number, .value = value};
    s->early = at;
    return PC_OK;
}

PC_API int pc_match_decide(pc_matcher *m, uint64_t number, uint32_t value, uint32_t to_outbox)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    if (to_outbox) {
        struct pc__match_post post = {
            .kind = PC_MATCH_ANSWER, .number = number, .value = value != 0};
        rc = pc__match_post(m, &post);
    }
    if (!rc)
        rc = pc__match_answered(m, number, value != 0);
    pc__match_unlock(m);
    return rc;
}

PC_API int64_t pc_match_decisions(pc_matcher *m, uint64_t *out, uint64_t capacity)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_shared *s = m->shared;
    uint64_t n = 0;
    for (uint64_t number = s->oldest; number <= s->n_known; number++) {
        const struct pc__match_instance *instance = pc__match_instance(m, number);
        if (!instance->answer)
            continue;
        if (n < capacity) {
            out[2 * n] = number;
            out[2 * n + 1] = instance->answer - 1u;
        }
        n++;
    }
    for (uint64_t at = s->early; at; n++) {
        const struct pc__match_answer *answer = pc__match_at(m, at);
        if (n < capacity) {
            out[2 * n] = answer->number;
            out[2 * n + 1] = answer->value;
        }
        at = answer->next;
    }
    pc__match_unlock(m);
    return (int64_t)n;
}

/* ------------------------------------------------------- forget and stop */

static void forget_oldest(pc_matcher *m)
{
    struct pc__match_shared *s = m->shared;
    const struct pc__match_instance *instance = pc__match_instance(m, s->oldest);
    struct pc__match_group *group = pc__match_group(m, pc__match_stage(m, instance->stage)->group);
    group->head = instance->next;
    if (!group->head)
        group->tail = 0;
    s->oldest++;
}

PC_API int pc_match_forget(pc_matcher *m, uint64_t before)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_shared *s = m->shared;
    uint64_t first = s->oldest, at;
    do { /* a window that moves makes room for more that may be forgotten */
        at = s->oldest;
        while (s->oldest < before && s->oldest <= s->n_known &&
               !(s->oldest == s->n_known && s->waits && !pc__match_instance(m, s->oldest)->answer))
            forget_oldest(m);
        pc__match_extend(m);
    } while (s->oldest > at);
    if (s->oldest > first)
        for (uint64_t i = 0; i < s->n_slices; i++)
            pc__match_drop_late(m, pc__match_slice(m, i));
    pc__match_unlock(m);
    return PC_OK;
}

PC_API int pc_match_stop_after(pc_matcher *m, uint64_t number)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    m->shared->limit = number;
    pc__match_take_back(m, NULL);
    for (uint64_t i = 0; i < m->shared->n_slices; i++)
        if (pc__match_slice(m, i)->is_here)
            pc__match_slice_now(m, pc__match_slice(m, i));
    pc__match_unlock(m);
    return PC_OK;
}

/* -------------------------------------------------------------- progress */

static bool is_done(pc_matcher *m, struct pc__match_slice *slice)
{
    return !slice->n_running && !pc__match_first(m, slice);
}

/* From the slice on that had not ended last time: so a program's last tasks do not each look at all. */
bool pc__match_is_complete(pc_matcher *m)
{
    struct pc__match_shared *s = m->shared;
    if (s->step >= 0 || s->waits)
        return false;
    for (uint64_t i = 0; i < s->n_slices; i++) {
        uint64_t at = (s->unfinished + i) % s->n_slices;
        struct pc__match_slice *slice = pc__match_slice(m, at);
        if (slice->is_here && !is_done(m, slice)) {
            s->unfinished = at;
            return false;
        }
    }
    return true;
}

static uint64_t floor_of(pc_matcher *m, struct pc__match_slice *slice)
{
    const struct pc__match_instance *first = pc__match_first(m, slice);
    uint64_t floor = first ? first->number : m->shared->n_known + 1u;
    for (uint32_t i = 0; i < slice->n_running; i++)
        floor = slice->running[i] < floor ? slice->running[i] : floor;
    return floor;
}

/* Nothing that has begun is further behind the first that has not than was looked at. */
static uint64_t furthest_of(pc_matcher *m, struct pc__match_slice *slice)
{
    const struct pc__match_instance *instance = pc__match_first(m, slice);
    uint64_t furthest = slice->passed;
    for (uint32_t i = 0; i < pc__match_group(m, slice->group)->n_datasets; i++) {
        const struct pc__match_partition *partition = pc__match_partition(m, slice->first_partition + i);
        uint64_t begun = partition->writer > partition->writing ? partition->writer : partition->writing;
        furthest = begun > furthest ? begun : furthest;
    }
    for (uint32_t i = 0; instance && i < 2u * PC__MATCH_AHEAD; i++) {
        if (instance->number > furthest && pc__match_has_begun(m, slice, instance))
            furthest = instance->number;
        instance = instance->next ? pc__match_instance(m, instance->next) : NULL;
    }
    return furthest;
}

/* Whether a slice needs no more messages for a stage: they are part of a checkpoint before it. */
static bool has_messages(pc_matcher *m, const struct pc__match_slice *slice,
                         const struct pc__match_instance *after)
{
    if (!after || !after->senders || pc__match_stage(m, after->stage)->group != slice->group)
        return true;
    if (pc__match_has_begun(m, slice, after))
        return true;
    const struct pc__match_inbox *inbox = pc__match_inbox(m, slice, after->number);
    return inbox && inbox->n_closed == after->senders;
}

static bool sends(const pc_matcher *m, uint64_t number)
{
    const struct pc__match_instance *instance = pc__match_instance(m, number);
    return instance && pc__match_stage(m, instance->stage)->sends;
}

PC_API int pc_match_is_complete(pc_matcher *m)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    rc = pc__match_is_complete(m);
    pc__match_unlock(m);
    return rc;
}

PC_API int pc_match_progress_of(pc_matcher *m, uint64_t number, struct pc_match_progress *out)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_shared *s = m->shared;
    const struct pc__match_instance *after = pc__match_instance(m, number + 1u);
    *out = (struct pc_match_progress){.floor = s->n_known + 1u,
                                      .furthest = s->oldest - 1u, /* those have run everywhere */
                                      .n_known = s->n_known,
                                      .n_ready = s->ready_end - s->ready_first,
                                      .heap_used_bytes = s->heap.used_bytes,
                                      .is_complete = pc__match_is_complete(m),
                                      .has_reached = number <= s->n_known &&
                                                     (after || !sends(m, number))};
    for (uint64_t i = 0; i < s->n_slices; i++) {
        struct pc__match_slice *slice = pc__match_slice(m, i);
        if (!slice->is_here)
            continue;
        uint64_t floor = floor_of(m, slice), furthest = furthest_of(m, slice);
        out->floor = floor < out->floor ? floor : out->floor;
        out->furthest = furthest > out->furthest ? furthest : out->furthest;
        out->has_reached &= !slice->n_running && floor > number && has_messages(m, slice, after);
    }
    pc__match_unlock(m);
    return PC_OK;
}
