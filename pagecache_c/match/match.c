/* match.c - what a slice may begin now, and what becomes of what has begun. See matcher.py, the model. */
#include "match/match.h"

/* ---------------------------------------------------------------- finding */

struct pc__match_slice *pc__match_find(pc_matcher *m, uint64_t group, uint64_t index)
{
    if (group < m->shared->n_groups && index < pc__match_group(m, group)->n_slices)
        return pc__match_slice(m, pc__match_group(m, group)->first_slice + index);
    (void)pc__fail(PC_ERR_RANGE, "the program has no slice %llu of group %llu",
                   (unsigned long long)index, (unsigned long long)group);
    return NULL;
}

struct pc__match_slice *pc__match_find_here(pc_matcher *m, uint64_t group, uint64_t index)
{
    struct pc__match_slice *slice = pc__match_find(m, group, index);
    if (!slice || slice->is_here)
        return slice;
    (void)pc__fail(PC_ERR_RANGE, "slice %llu of group %llu is not here", (unsigned long long)index,
                   (unsigned long long)group);
    return NULL;
}

static uint32_t running_at(const struct pc__match_slice *slice, uint64_t number)
{
    uint32_t i = 0;
    while (i < slice->n_running && slice->running[i] != number)
        i++;
    return i;
}

struct pc__match_slice *pc__match_running(pc_matcher *m, const struct pc_match_ready *task)
{
    const struct pc__match_instance *instance = pc__match_instance(m, task->number);
    if (instance) {
        const struct pc_match_stage *stage = pc__match_stage(m, instance->stage);
        struct pc__match_slice *slice = NULL;
        if (task->index < stage->n_tasks)
            slice = pc__match_slice(m, pc__match_group(m, stage->group)->first_slice + task->index);
        if (slice && slice->is_here && running_at(slice, task->number) < slice->n_running)
            return slice;
    }
    (void)pc__fail(PC_ERR_RANGE, "task %llu of stage number %llu does not run here",
                   (unsigned long long)task->index, (unsigned long long)task->number);
    return NULL;
}

static struct pc__match_partition *accessed(const pc_matcher *m, const struct pc__match_slice *slice,
                                            const struct pc_match_access *access)
{
    return pc__match_partition(m, slice->first_partition + pc__match_dataset(m, access->dataset)->place);
}

/* ------------------------------------------------------------- conditions */

bool pc__match_has_begun(const pc_matcher *m, const struct pc__match_slice *slice,
                         const struct pc__match_instance *instance)
{
    const struct pc_match_stage *stage = pc__match_stage(m, instance->stage);
    const struct pc__match_need *need = pc__match_needs(m, instance->number);
    for (uint32_t i = 0; i < stage->n_accesses; i++, need++) {
        const struct pc_match_access *access = pc__match_access(m, stage->first_access + i);
        const struct pc__match_partition *partition = accessed(m, slice, access);
        bool is_past;
        if (access->is_write)
            is_past = partition->writer >= instance->number || partition->writing >= instance->number;
        else if (partition->writer != need->writer)
            is_past = partition->writer > need->writer;
        else
            is_past = partition->started > need->readers;
        if (is_past)
            return true;
    }
    return false;
}

static bool may_begin(const pc_matcher *m, const struct pc__match_slice *slice,
                      const struct pc__match_instance *instance)
{
    const struct pc_match_stage *stage = pc__match_stage(m, instance->stage);
    const struct pc__match_need *need = pc__match_needs(m, instance->number);
    for (uint32_t i = 0; i < stage->n_accesses; i++, need++) {
        const struct pc_match_access *access = pc__match_access(m, stage->first_access + i);
        const struct pc__match_partition *partition = accessed(m, slice, access);
        if (partition->writing || partition->writer != need->writer ||
            partition->started != need->readers)
            return false;
        if (access->is_write && partition->finished != need->readers)
            return false;
    }
    if (stage->sends && !pc__match_instance(m, instance->number + 1u))
        return false; /* the window ends here: nobody knows to whom it sends */
    if (!instance->senders)
        return true;
    const struct pc__match_inbox *inbox = pc__match_inbox(m, slice, instance->number);
    return inbox && inbox->n_closed == instance->senders;
}

bool pc__match_is_late(const pc_matcher *m, const struct pc__match_slice *slice, uint64_t number)
{
    const struct pc__match_instance *instance = pc__match_instance(m, number);
    if (!instance)
        return number < m->shared->oldest;
    return slice->is_here && pc__match_has_begun(m, slice, instance);
}

/* --------------------------------------------------------------- matching */

static struct pc__match_instance *after(const pc_matcher *m, const struct pc__match_slice *slice)
{
    const struct pc__match_instance *passed = pc__match_instance(m, slice->passed);
    return pc__match_instance(m, passed ? passed->next : pc__match_group(m, slice->group)->head);
}

struct pc__match_instance *pc__match_first(pc_matcher *m, struct pc__match_slice *slice)
{
    struct pc__match_instance *first = after(m, slice);
    while (first && pc__match_has_begun(m, slice, first)) {
        slice->passed = first->number;
        first = pc__match_instance(m, first->next);
    }
    return first;
}

static void begin(pc_matcher *m, struct pc__match_slice *slice,
                  const struct pc__match_instance *instance)
{
    const struct pc_match_stage *stage = pc__match_stage(m, instance->stage);
    struct pc__match_shared *s = m->shared;
    slice->running[slice->n_running++] = instance->number;
    for (uint32_t i = 0; i < stage->n_accesses; i++) {
        const struct pc_match_access *access = pc__match_access(m, stage->first_access + i);
        struct pc__match_partition *partition = accessed(m, slice, access);
        if (access->is_write)
            partition->writing = instance->number;
        else
            partition->started++;
    }
    *pc__match_ready(m, s->ready_end) =
        (struct pc_match_ready){instance->number, instance->stage, slice->index};
    s->ready_end++;
    s->has_ready_news = 1;
}

void pc__match_slice_now(pc_matcher *m, struct pc__match_slice *slice)
{
    const struct pc__match_instance *instance = pc__match_first(m, slice);
    if (slice->is_held)
        return;
    for (uint32_t i = 0; i < PC__MATCH_AHEAD && instance; i++) {
        if (instance->number > m->shared->limit || slice->n_running == PC__MATCH_AHEAD)
            return;
        if (may_begin(m, slice, instance))
            begin(m, slice, instance);
        instance = pc__match_instance(m, instance->next);
    }
}

static void not_running(struct pc__match_slice *slice, uint32_t i)
{
    slice->running[i] = slice->running[--slice->n_running];
}

/* It has not run. Of the readers of a partition those that began last are all that can be ready. */
static void undo(pc_matcher *m, struct pc__match_slice *slice, const struct pc_match_ready *task)
{
    const struct pc_match_stage *stage = pc__match_stage(m, task->stage);
    not_running(slice, running_at(slice, task->number));
    for (uint32_t i = 0; i < stage->n_accesses; i++) {
        const struct pc_match_access *access = pc__match_access(m, stage->first_access + i);
        struct pc__match_partition *partition = accessed(m, slice, access);
        if (access->is_write)
            partition->writing = 0;
        else
            partition->started--;
    }
    slice->passed = 0;
}

void pc__match_take_back(pc_matcher *m, const struct pc__match_slice *of)
{
    struct pc__match_shared *s = m->shared;
    uint64_t kept = s->ready_first;
    for (uint64_t place = s->ready_first; place < s->ready_end; place++) {
        const struct pc_match_ready *task = pc__match_ready(m, place);
        const struct pc_match_stage *stage = pc__match_stage(m, task->stage);
        struct pc__match_slice *slice =
            pc__match_slice(m, pc__match_group(m, stage->group)->first_slice + task->index);
        if (of ? slice == of : task->number > s->limit)
            undo(m, slice, task);
        else
            *pc__match_ready(m, kept++) = *task;
    }
    s->ready_end = kept;
}

int pc__match_ended(pc_matcher *m, const struct pc_match_ready *task, uint64_t took_ns)
{
    struct pc__match_slice *slice = pc__match_running(m, task);
    if (!slice)
        return PC_ERR_RANGE;
    const struct pc__match_instance *instance = pc__match_instance(m, task->number);
    const struct pc_match_stage *stage = pc__match_stage(m, instance->stage);
    not_running(slice, running_at(slice, task->number));
    slice->n_ran++;
    slice->busy_ns += took_ns;
    for (uint32_t i = 0; i < stage->n_accesses; i++) {
        const struct pc_match_access *access = pc__match_access(m, stage->first_access + i);
        struct pc__match_partition *partition = accessed(m, slice, access);
        if (access->is_write)
            *partition = (struct pc__match_partition){.writer = task->number};
        else
            partition->finished++;
    }
    if (slice->inboxes)
        pc__match_drop_inbox(m, slice, task->number);
    pc__match_slice_now(m, slice);
    if (slice->n_running)
        return PC_OK;
    if (slice->is_held || (!pc__match_first(m, slice) && pc__match_is_complete(m))) {
        m->shared->n_rests++;
        m->shared->has_out_news = 1;
    }
    return PC_OK;
}
