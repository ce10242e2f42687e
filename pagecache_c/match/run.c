/* run.c - tasks whose stages have kernels run without Python: take, call, send, finish, all in C. */
#include "match/match.h"

#include <stdlib.h>

#define MOST_BATCH 1024u
#define MOST_MESSAGE (1ull << 44)
#define AT_ONCE_NS 1000000000ull /* then the caller sees its signals */

struct outgoing { /* what the tasks of a batch send; kernels are called without the lock */
    struct pc_match_sent *sent;
    uint64_t n_sent, sent_room;
    char *data;
    uint64_t n_data, data_room;
};
struct batch {
    struct pc_match_ready *tasks;
    struct pc_match_task *views;
    pc_match_kernel *kernels; /* of each task; NULL: Python's */
    uint64_t *first_message; /* of each task, in messages */
    uint64_t *first_sent;
    int *codes;
    uint64_t *took_ns;
    uint64_t n;
    struct pc_match_message *messages;
    uint64_t n_messages, messages_room;
    struct outgoing out;
    int error; /* of a send of the task that runs */
};

static int grow(void **at, uint64_t *room, uint64_t needed, size_t each)
{
    if (needed <= *room)
        return PC_OK;
    uint64_t wanted = needed + needed / 2 + 64u;
    void *grown = realloc(*at, wanted * each);
    if (!grown)
        return pc__fail(PC_ERR_NO_MEMORY, "the messages of a kernel, %llu bytes",
                        (unsigned long long)(wanted * each));
    *at = grown;
    *room = wanted;
    return PC_OK;
}

/* ------------------------------------------------------------- for kernels */

static int put(struct pc_match_task *task, uint32_t first, uint32_t end, const void *data,
               uint64_t n_bytes)
{
    struct batch *batch = task->internal;
    struct outgoing *out = &batch->out;
    int rc = PC_OK;
    if (n_bytes > MOST_MESSAGE)
        rc = pc__fail(PC_ERR_RANGE, "a kernel sends %llu bytes", (unsigned long long)n_bytes);
    else if (first >= end || end > task->n_next)
        rc = pc__fail(PC_ERR_RANGE, "a kernel sends to task %u, and the next stage has %u", first,
                      task->n_next);
    if (!rc)
        rc = grow((void **)&out->sent, &out->sent_room, out->n_sent + (end - first), sizeof *out->sent);
    /* Where nothing is sent there is an offset of its own still: equal ones are one message. */
    if (!rc)
        rc = grow((void **)&out->data, &out->data_room, out->n_data + n_bytes + 1u, 1);
    if (rc) {
        batch->error = rc;
        return rc;
    }
    if (n_bytes)
        memcpy(out->data + out->n_data, data, n_bytes);
    for (uint32_t to = first; to < end; to++)
        out->sent[out->n_sent++] = (struct pc_match_sent){to, out->n_data, n_bytes};
    out->n_data += n_bytes;
    return PC_OK;
}

PC_API int pc_match_send(struct pc_match_task *task, uint32_t index, const void *data, uint64_t n_bytes)
{
    return put(task, index, index + 1u, data, n_bytes);
}

PC_API int pc_match_broadcast(struct pc_match_task *task, const void *data, uint64_t n_bytes)
{
    return put(task, 0, task->n_next, data, n_bytes);
}

/* -------------------------------------------------------------- one batch */

/* Under the lock: what kernels are told. */
static int look_up(pc_matcher *m, struct batch *batch)
{
    batch->n_messages = 0;
    for (uint64_t i = 0; i < batch->n; i++) {
        const struct pc_match_ready *task = &batch->tasks[i];
        const struct pc_match_stage *stage = pc__match_stage(m, task->stage);
        const struct pc__match_slice *slice =
            pc__match_slice(m, pc__match_group(m, stage->group)->first_slice + task->index);
        const struct pc__match_instance *next =
            stage->sends ? pc__match_instance(m, task->number + 1u) : NULL;
        batch->first_message[i] = batch->n_messages;
        batch->kernels[i] = m->kernels[task->stage];
        uint64_t n = 0;
        if (slice->inboxes && batch->kernels[i]) {
            n = (uint64_t)pc__match_list_messages(m, slice, task->number, NULL, 0);
            int rc = grow((void **)&batch->messages, &batch->messages_room, batch->n_messages + n,
                          sizeof *batch->messages);
            if (rc)
                return rc;
            if (n)
                (void)pc__match_list_messages(m, slice, task->number,
                                              batch->messages + batch->n_messages, n);
            batch->n_messages += n;
        }
        batch->views[i] = (struct pc_match_task){
            .number = task->number, .stage = (uint32_t)task->stage, .index = (uint32_t)task->index,
            .n_tasks = stage->n_tasks, .n_messages = n,
            .n_next = next ? pc__match_stage(m, next->stage)->n_tasks : 0,
            .send = pc_match_send, .broadcast = pc_match_broadcast, .internal = batch};
    }
    return PC_OK;
}

static int call_kernel(pc_matcher *m, struct batch *batch, uint64_t i, void **partitions, size_t *n_bytes)
{
    struct pc_match_task *view = &batch->views[i];
    const struct pc_match_stage *stage = pc__match_stage(m, view->stage);
    uint64_t first = pc__match_slice(m, pc__match_group(m, stage->group)->first_slice + view->index)
                         ->first_partition;
    for (uint32_t k = 0; k < stage->n_accesses; k++) {
        uint32_t dataset = pc__match_access(m, stage->first_access + k)->dataset;
        uint64_t at = first + pc__match_dataset(m, dataset)->place;
        const struct pc__match_memory *memory = pc__match_memory(m, at);
        bool is_shared = !m->partitions[at] && memory->at;
        partitions[k] =
            is_shared ? pc__match_at(m, memory->at + memory->data_offset) : m->partitions[at];
        n_bytes[k] = is_shared ? memory->data_bytes : m->partition_bytes[at];
    }
    view->messages = batch->messages + batch->first_message[i];
    batch->error = PC_OK;
    int code = batch->kernels[i](view, partitions, n_bytes);
    return batch->error ? batch->error : code;
}

/* By receiver, and for each in the order of sending. */
static void sort_sent(struct pc_match_sent *sent, uint64_t n, struct pc_match_sent *room)
{
    bool is_sorted = true;
    for (uint64_t i = 1; i < n; i++)
        is_sorted &= sent[i].to >= sent[i - 1].to;
    if (is_sorted)
        return;
    uint64_t half = n / 2, a = 0, b = half;
    sort_sent(sent, half, room);
    sort_sent(sent + half, n - half, room);
    for (uint64_t i = 0; i < n; i++)
        room[i] = b == n || (a < half && sent[a].to <= sent[b].to) ? sent[a++] : sent[b++];
    memcpy(sent, room, n * sizeof *sent);
}

/* Under the lock: what a kernel's task has done is told. */
static int tell(pc_matcher *m, struct batch *batch, uint64_t i)
{
    const struct pc_match_ready *task = &batch->tasks[i];
    const struct pc_match_stage *stage = pc__match_stage(m, task->stage);
    uint64_t first = batch->first_sent[i], n = batch->first_sent[i + 1] - first;
    if (stage->sends) {
        int64_t away = pc__match_send_all(m, task, batch->out.sent + first, n, batch->out.data, NULL);
        if (away < 0)
            return (int)away;
    }
    if (stage->decides) {
        bool value = batch->codes[i] != 0;
        struct pc__match_post post = {.kind = PC_MATCH_ANSWER, .number = task->number, .value = value};
        int rc = pc__match_post(m, &post);
        if (!rc)
            rc = pc__match_answered(m, task->number, value);
        if (rc)
            return rc;
    }
    return pc__match_ended(m, task, batch->took_ns[i]);
}

static int run_batch(pc_matcher *m, struct batch *batch, void **partitions, size_t *n_bytes,
                     struct pc_match_ready *out, struct pc_match_ran *ran)
{
    uint64_t n_run = 0, began_ns = pc__match_deadline(0);
    batch->out.n_sent = batch->out.n_data = 0;
    for (uint64_t i = 0; i < batch->n; i++) {
        batch->first_sent[i] = batch->out.n_sent;
        batch->codes[i] = 0;
        bool is_over = atomic_load(&m->shared->is_stopped) || atomic_load(&m->is_shut);
        if (!batch->kernels[i] || ran->failed_code || is_over)
            continue;
        int code = call_kernel(m, batch, i, partitions, n_bytes);
        uint64_t ended_ns = pc__match_deadline(0);
        batch->took_ns[i] = ended_ns - began_ns;
        began_ns = ended_ns;
        if (code < 0) {
            ran->failed = batch->tasks[i];
            ran->failed_code = code;
        }
        batch->codes[i] = code;
        n_run = i + 1;
    }
    batch->first_sent[batch->n] = batch->out.n_sent;
    struct pc_match_sent *room = NULL;
    uint64_t n_room = 0;
    for (uint64_t i = 0; i < n_run; i++) {
        uint64_t first = batch->first_sent[i], n = batch->first_sent[i + 1] - first;
        int rc = n > 1 ? grow((void **)&room, &n_room, n, sizeof *room) : PC_OK;
        if (rc) {
            free(room);
            return rc;
        }
        sort_sent(batch->out.sent + first, n, room);
    }
    free(room);
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    for (uint64_t i = 0; i < batch->n && !rc; i++) {
        if (!batch->kernels[i]) {
            out[ran->n_tasks++] = batch->tasks[i];
        } else if (i < n_run && batch->codes[i] >= 0) {
            rc = tell(m, batch, i);
            ran->n_ran += !rc;
        }
    }
    pc__match_unlock(m);
    return rc;
}

/* ----------------------------------------------------------------- a call */

static void free_batch(struct batch *batch)
{
    free(batch->tasks);
    free(batch->views);
    free(batch->kernels);
    free(batch->first_message);
    free(batch->first_sent);
    free(batch->codes);
    free(batch->took_ns);
    free(batch->messages);
    free(batch->out.sent);
    free(batch->out.data);
}

PC_API int pc_match_run(pc_matcher *m, uint64_t most, uint64_t timeout_ns, struct pc_match_ready *out,
                        struct pc_match_ran *ran)
{
    if (most > MOST_BATCH)
        most = MOST_BATCH;
    struct batch batch = {.tasks = calloc(most, sizeof *batch.tasks),
                          .views = calloc(most, sizeof *batch.views),
                          .kernels = calloc(most, sizeof *batch.kernels),
                          .first_message = calloc(most, sizeof *batch.first_message),
                          .first_sent = calloc(most + 1u, sizeof *batch.first_sent),
                          .codes = calloc(most, sizeof *batch.codes),
                          .took_ns = calloc(most, sizeof *batch.took_ns)};
    void **partitions = calloc(m->shared->most_accesses, sizeof *partitions);
    size_t *n_bytes = calloc(m->shared->most_accesses, sizeof *n_bytes);
    int rc = PC_OK;
    *ran = (struct pc_match_ran){0};
    if (!most)
        rc = pc__fail(PC_ERR_RANGE, "0 tasks at a time");
    else if (!batch.tasks || !batch.views || !batch.kernels || !batch.first_message ||
             !batch.first_sent || !batch.codes || !batch.took_ns || !partitions || !n_bytes)
        rc = pc__fail(PC_ERR_NO_MEMORY, "a batch of %llu tasks", (unsigned long long)most);
    const uint64_t until_ns = pc__match_deadline(AT_ONCE_NS);
    while (!rc && !ran->n_tasks && !ran->failed_code && pc__match_deadline(0) < until_ns) {
        rc = pc__match_lock_ready(m, timeout_ns);
        if (rc)
            break;
        batch.n = pc__match_take_ready(m, batch.tasks, most);
        rc = look_up(m, &batch);
        pc__match_unlock(m);
        if (!rc)
            rc = run_batch(m, &batch, partitions, n_bytes, out, ran);
    }
    free_batch(&batch);
    free(partitions);
    free(n_bytes);
    return rc == PC_ERR_TIMEOUT ? PC_OK : rc;
}
