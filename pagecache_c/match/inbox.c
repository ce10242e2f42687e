/* inbox.c - messages to tasks that have not begun, and who has sent all that it sends.
 *
 * A closing comes for a stage whose number need not be known yet, and for a slice that may still be on its
 * way. What comes twice counts once. A message is copied once into the heap for all receivers in one call.
 */
#include "match/match.h"

/* ------------------------------------------------------------- messages */

static void drop_payload(pc_matcher *m, uint64_t at)
{
    struct pc__match_payload *payload = pc__match_at(m, at);
    if (!--payload->n_references)
        pc__heap_give(m, at);
}

void pc__match_drop_mails(pc_matcher *m, struct pc__match_mails *mails)
{
    while (mails->first) {
        uint64_t at = mails->first;
        const struct pc__match_mail *mail = pc__match_at(m, at);
        mails->first = mail->next;
        drop_payload(m, mail->payload);
        pc__heap_give(m, at);
    }
    *mails = (struct pc__match_mails){0};
}

/* One more reference to it; 0: the heap is full. */
static uint64_t payload_of(pc_matcher *m, struct pc__match_copies *from,
                           const struct pc_match_sent *sent)
{
    uint64_t n_kept = sizeof from->recent / sizeof from->recent[0];
    for (uint64_t i = 0; i < n_kept && i < from->n_recent; i++) {
        if (from->recent[i].offset == sent->offset && from->recent[i].n_bytes == sent->n_bytes) {
            ((struct pc__match_payload *)pc__match_at(m, from->recent[i].payload))->n_references++;
            return from->recent[i].payload;
        }
    }
    if (sent->n_bytes > m->shared->heap.n_bytes)
        return 0;
    uint64_t at = pc__heap_take(m, sizeof(struct pc__match_payload) + sent->n_bytes);
    if (!at)
        return 0;
    struct pc__match_payload *payload = pc__match_at(m, at);
    *payload = (struct pc__match_payload){1, sent->n_bytes};
    if (sent->n_bytes)
        memcpy(payload + 1, from->data + sent->offset, sent->n_bytes);
    uint64_t i = from->n_recent++ % n_kept;
    from->recent[i].offset = sent->offset;
    from->recent[i].n_bytes = sent->n_bytes;
    from->recent[i].payload = at;
    return at;
}

/* After a failure nothing of this call is left, and `from` may not be used any more. */
int pc__match_copy(pc_matcher *m, struct pc__match_copies *from, uint64_t first, uint64_t n,
                   uint64_t sender, struct pc__match_mails *out)
{
    *out = (struct pc__match_mails){0};
    for (uint64_t i = first; i < first + n; i++) {
        uint64_t at = pc__heap_take(m, sizeof(struct pc__match_mail));
        uint64_t payload = at ? payload_of(m, from, &from->sent[i]) : 0;
        if (!payload) {
            if (at)
                pc__heap_give(m, at);
            pc__match_drop_mails(m, out);
            return pc__match_full(m);
        }
        *(struct pc__match_mail *)pc__match_at(m, at) =
            (struct pc__match_mail){.payload = payload, .sender = sender};
        if (out->last)
            ((struct pc__match_mail *)pc__match_at(m, out->last))->next = at;
        else
            out->first = at;
        out->last = at;
        out->n++;
        out->n_bytes += from->sent[i].n_bytes;
    }
    return PC_OK;
}

static void append(pc_matcher *m, struct pc__match_mails *to, const struct pc__match_mails *more)
{
    if (!more->first)
        return;
    if (to->last)
        ((struct pc__match_mail *)pc__match_at(m, to->last))->next = more->first;
    else
        to->first = more->first;
    to->last = more->last;
    to->n += more->n;
    to->n_bytes += more->n_bytes;
}

/* -------------------------------------------------------------- inboxes */

struct pc__match_inbox *pc__match_inbox(const pc_matcher *m, const struct pc__match_slice *slice,
                                        uint64_t number)
{
    for (uint64_t at = slice->inboxes; at;) {
        struct pc__match_inbox *inbox = pc__match_at(m, at);
        if (inbox->number == number)
            return inbox;
        at = inbox->next;
    }
    return NULL;
}

static void drop(pc_matcher *m, uint64_t *link)
{
    uint64_t at = *link;
    struct pc__match_inbox *inbox = pc__match_at(m, at);
    *link = inbox->next;
    pc__match_drop_mails(m, &inbox->mails);
    pc__heap_give(m, at);
}

void pc__match_drop_inbox(pc_matcher *m, struct pc__match_slice *slice, uint64_t number)
{
    for (uint64_t *link = &slice->inboxes; *link;) {
        struct pc__match_inbox *inbox = pc__match_at(m, *link);
        if (inbox->number == number) {
            drop(m, link);
            return;
        }
        link = &inbox->next;
    }
}

void pc__match_drop_late(pc_matcher *m, struct pc__match_slice *slice)
{
    for (uint64_t *link = &slice->inboxes; *link;) {
        struct pc__match_inbox *inbox = pc__match_at(m, *link);
        bool runs = false; /* its task reads it */
        for (uint32_t i = 0; i < slice->n_running; i++)
            runs |= slice->running[i] == inbox->number;
        if (!runs && pc__match_is_late(m, slice, inbox->number))
            drop(m, link);
        else
            link = &inbox->next;
    }
}

static struct pc__match_inbox *inbox_for(pc_matcher *m, struct pc__match_slice *slice, uint64_t number)
{
    struct pc__match_inbox *inbox = pc__match_inbox(m, slice, number);
    if (inbox)
        return inbox;
    const struct pc__match_instance *instance = pc__match_instance(m, number);
    uint64_t n_senders = instance ? instance->senders : m->shared->most_senders;
    uint64_t n_words = (n_senders + 63u) / 64u;
    uint64_t at = pc__heap_take(m, sizeof *inbox + n_words * sizeof inbox->closed[0]);
    if (!at)
        return NULL;
    inbox = pc__match_at(m, at);
    memset(inbox, 0, sizeof *inbox + n_words * sizeof inbox->closed[0]);
    inbox->number = number;
    inbox->n_words = n_words;
    inbox->next = slice->inboxes;
    slice->inboxes = at;
    return inbox;
}

int pc__match_deliver(pc_matcher *m, struct pc__match_slice *slice, uint64_t number, uint64_t sender,
                      struct pc__match_copies *from, uint64_t first, uint64_t n)
{
    if (pc__match_is_late(m, slice, number))
        return PC_OK;
    const struct pc__match_instance *instance = pc__match_instance(m, number);
    if (sender >= (instance ? instance->senders : m->shared->most_senders))
        return pc__fail(PC_ERR_RANGE, "a closing of sender %llu to stage number %llu",
                        (unsigned long long)sender, (unsigned long long)number);
    struct pc__match_inbox *inbox = inbox_for(m, slice, number);
    if (!inbox)
        return pc__match_full(m);
    uint64_t bit = 1ull << sender % 64u, *word = &inbox->closed[sender / 64u];
    if (*word & bit)
        return PC_OK;
    struct pc__match_mails mails;
    int rc = pc__match_copy(m, from, first, n, sender, &mails);
    if (rc)
        return rc;
    append(m, &inbox->mails, &mails);
    *word |= bit;
    inbox->n_closed++;
    if (slice->is_here && instance && inbox->n_closed == instance->senders)
        pc__match_slice_now(m, slice);
    return PC_OK;
}

static struct pc__match_mail *mail_at(const pc_matcher *m, uint64_t at)
{
    return pc__match_at(m, at);
}

/* The first n of a list, by sender, and in the order in which each has sent; returns the rest. */
static uint64_t sort(const pc_matcher *m, uint64_t *first, uint64_t n)
{
    if (n == 1) {
        uint64_t rest = mail_at(m, *first)->next;
        mail_at(m, *first)->next = 0;
        return rest;
    }
    uint64_t one = *first, other = sort(m, &one, n / 2), rest = sort(m, &other, n - n / 2);
    for (uint64_t *link = first;;) {
        bool takes_other = other && (!one || mail_at(m, other)->sender < mail_at(m, one)->sender);
        uint64_t *from = takes_other ? &other : &one;
        *link = *from;
        if (!*from)
            return rest;
        *from = mail_at(m, *from)->next;
        link = &mail_at(m, *link)->next;
    }
}

void pc__match_sort(const pc_matcher *m, struct pc__match_mails *mails)
{
    bool is_sorted = true;
    for (uint64_t at = mails->first; at && mail_at(m, at)->next; at = mail_at(m, at)->next)
        is_sorted &= mail_at(m, at)->sender <= mail_at(m, mail_at(m, at)->next)->sender;
    if (is_sorted)
        return;
    (void)sort(m, &mails->first, mails->n);
    for (mails->last = mails->first; mail_at(m, mails->last)->next;)
        mails->last = mail_at(m, mails->last)->next;
}

int64_t pc__match_list_messages(const pc_matcher *m, const struct pc__match_slice *slice,
                                uint64_t number, struct pc_match_message *out, uint64_t capacity)
{
    struct pc__match_inbox *inbox = pc__match_inbox(m, slice, number);
    if (!inbox || inbox->mails.n > capacity)
        return inbox ? (int64_t)inbox->mails.n : 0;
    pc__match_sort(m, &inbox->mails);
    uint64_t n = 0;
    for (uint64_t at = inbox->mails.first; at; at = mail_at(m, at)->next) {
        const struct pc__match_payload *payload = pc__match_at(m, mail_at(m, at)->payload);
        out[n++] = (struct pc_match_message){payload + 1, payload->n_bytes, mail_at(m, at)->sender};
    }
    return (int64_t)n;
}

/* ---------------------------------------------------------------- calls */

int pc__match_check_sent(const struct pc_match_sent *sent, uint64_t n, const void *data,
                         uint64_t data_bytes, uint64_t n_receivers)
{
    for (uint64_t i = 0; i < n; i++) {
        if (sent[i].offset > data_bytes || sent[i].n_bytes > data_bytes - sent[i].offset ||
            (sent[i].n_bytes && !data))
            return pc__fail(PC_ERR_RANGE, "message %llu lies outside of the bytes of the call",
                            (unsigned long long)i);
        if (n_receivers && sent[i].to >= n_receivers)
            return pc__fail(PC_ERR_RANGE, "a message to task %llu, and the next stage has %llu tasks",
                            (unsigned long long)sent[i].to, (unsigned long long)n_receivers);
        if (n_receivers && i && sent[i].to < sent[i - 1].to)
            return pc__fail(PC_ERR_RANGE, "messages are not in the order of their receivers");
    }
    return PC_OK;
}

PC_API int pc_match_close(pc_matcher *m, uint64_t number, uint32_t group, uint32_t index,
                          uint32_t sender, const struct pc_match_sent *sent, uint64_t n_sent,
                          const void *data, uint64_t data_bytes)
{
    int rc = pc__match_check_sent(sent, n_sent, data, data_bytes, 0);
    if (rc)
        return rc;
    rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_copies from = {.sent = sent, .n_sent = n_sent, .data = data};
    struct pc__match_slice *slice = pc__match_find(m, group, index);
    rc = slice ? pc__match_deliver(m, slice, number, sender, &from, 0, n_sent) : PC_ERR_RANGE;
    pc__match_unlock(m);
    return rc;
}

int64_t pc__match_send_all(pc_matcher *m, const struct pc_match_ready *task,
                           const struct pc_match_sent *sent, uint64_t n_sent, const void *data,
                           uint32_t *away)
{
    struct pc__match_copies from = {.sent = sent, .n_sent = n_sent, .data = data};
    const struct pc__match_instance *next = pc__match_instance(m, task->number + 1u);
    if (!next)
        return pc__fail(PC_ERR_RANGE, "nobody knows the stage after number %llu",
                        (unsigned long long)task->number);
    const struct pc_match_stage *stage = pc__match_stage(m, next->stage);
    if (n_sent && sent[n_sent - 1].to >= stage->n_tasks)
        return pc__fail(PC_ERR_RANGE, "a message to task %llu, and the next stage has %u tasks",
                        (unsigned long long)sent[n_sent - 1].to, stage->n_tasks);
    int64_t n_away = 0;
    uint64_t at = 0;
    for (uint32_t index = 0; index < stage->n_tasks; index++) {
        uint64_t first = at;
        while (at < n_sent && sent[at].to == index)
            at++;
        struct pc__match_slice *slice =
            pc__match_slice(m, pc__match_group(m, stage->group)->first_slice + index);
        int rc = PC_OK;
        if (slice->is_here) {
            rc = pc__match_deliver(m, slice, next->number, task->index, &from, first, at - first);
        } else if (away) {
            away[n_away++] = index;
        } else {
            struct pc__match_post post = {.kind = PC_MATCH_CLOSING, .number = next->number,
                                          .group = stage->group, .index = index,
                                          .sender = task->index};
            rc = pc__match_copy(m, &from, first, at - first, task->index, &post.mails);
            if (!rc)
                rc = pc__match_post(m, &post);
            n_away++;
        }
        if (rc)
            return rc;
    }
    return n_away;
}

PC_API int64_t pc_match_close_all(pc_matcher *m, const struct pc_match_ready *task,
                                  const struct pc_match_sent *sent, uint64_t n_sent,
                                  const void *data, uint64_t data_bytes, uint32_t *away)
{
    int rc = pc__match_check_sent(sent, n_sent, data, data_bytes, UINT32_MAX);
    if (rc)
        return rc;
    rc = pc__match_lock(m);
    if (rc)
        return rc;
    int64_t n = pc__match_running(m, task) ? pc__match_send_all(m, task, sent, n_sent, data, away)
                                           : PC_ERR_RANGE;
    pc__match_unlock(m);
    return n;
}

PC_API int64_t pc_match_messages(pc_matcher *m, const struct pc_match_ready *task,
                                 struct pc_match_message *out, uint64_t capacity)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_slice *slice = pc__match_running(m, task);
    int64_t n = slice ? pc__match_list_messages(m, slice, task->number, out, capacity) : PC_ERR_RANGE;
    pc__match_unlock(m);
    return n;
}

PC_API int64_t pc_match_next_stage(pc_matcher *m, uint64_t number)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_instance *next = pc__match_instance(m, number + 1u);
    int64_t stage = (int64_t)(next ? next->stage : m->shared->n_stages);
    pc__match_unlock(m);
    return stage;
}
