/* slice.c - slices come and go: as bytes, with what has run on them and what has come for them. */
#include "match/match.h"

#include <stdlib.h>

/* ------------------------------------------------------------- the bytes */

struct reader {
    const char *at;
    uint64_t left; /* bytes */
    bool is_short;
};

static uint64_t read_one(struct reader *from)
{
    uint64_t value = 0;
    if (from->left < sizeof value) {
        from->is_short = true;
        return 0;
    }
    memcpy(&value, from->at, sizeof value);
    from->at += sizeof value;
    from->left -= sizeof value;
    return value;
}

/* So many numbers, further on. */
static struct reader skip(struct reader *from, uint64_t n)
{
    struct reader here = *from;
    if (n > from->left / sizeof(uint64_t)) {
        from->is_short = true;
        return here;
    }
    from->at += n * sizeof(uint64_t);
    from->left -= n * sizeof(uint64_t);
    return here;
}

static int bad_state(void)
{
    return pc__fail(PC_ERR_RANGE, "the bytes of a slice are not what they must be");
}

static int read_partitions(pc_matcher *m, const struct pc__match_slice *slice, uint64_t n,
                           struct reader *from)
{
    const struct pc__match_group *group = pc__match_group(m, slice->group);
    if (n != group->n_datasets)
        return bad_state();
    for (uint32_t i = 0; i < n; i++) {
        uint64_t dataset = read_one(from);
        struct pc__match_partition read = {.writer = read_one(from)};
        read.started = read_one(from);
        read.finished = read_one(from);
        read.writing = read_one(from);
        if (from->is_short || dataset >= m->shared->n_datasets ||
            pc__match_dataset(m, dataset)->group != slice->group ||
            pc__match_dataset(m, dataset)->place != i || read.writing || read.started != read.finished)
            return bad_state();
        *pc__match_partition(m, slice->first_partition + i) = read;
    }
    return PC_OK;
}

struct inbox_read {
    uint64_t number, n_senders, n_messages;
    struct reader senders, lengths;
};

static struct inbox_read read_inbox(struct reader *from)
{
    struct inbox_read inbox = {.number = read_one(from)};
    inbox.n_senders = read_one(from);
    inbox.n_messages = read_one(from);
    inbox.senders = skip(from, inbox.n_senders);
    inbox.lengths = skip(from, inbox.n_messages > UINT64_MAX / 2 ? UINT64_MAX : 2 * inbox.n_messages);
    return inbox;
}

/* Senders, and messages by sender, ascend. *offset: where the messages' bytes begin, and end. */
static int deliver_inbox(pc_matcher *m, struct pc__match_slice *slice, struct inbox_read *inbox,
                         const char *data, uint64_t data_bytes, uint64_t *offset)
{
    struct pc_match_sent *sent = calloc(inbox->n_messages + 1u, sizeof *sent);
    if (!sent)
        return pc__fail(PC_ERR_NO_MEMORY, "the messages of a slice");
    int rc = PC_OK;
    for (uint64_t i = 0; i < inbox->n_messages && !rc; i++) {
        sent[i].to = read_one(&inbox->lengths); /* here: the sender */
        sent[i].n_bytes = read_one(&inbox->lengths);
        sent[i].offset = *offset;
        if (sent[i].n_bytes > data_bytes - *offset || (i && sent[i].to < sent[i - 1].to))
            rc = bad_state();
        else
            *offset += sent[i].n_bytes;
    }
    uint64_t at = 0;
    for (uint64_t i = 0; i < inbox->n_senders && !rc; i++) {
        struct pc__match_copies from = {.sent = sent, .n_sent = inbox->n_messages, .data = data};
        uint64_t sender = read_one(&inbox->senders), first = at;
        while (at < inbox->n_messages && sent[at].to == sender)
            at++;
        rc = pc__match_deliver(m, slice, inbox->number, sender, &from, first, at - first);
    }
    if (!rc && at != inbox->n_messages)
        rc = bad_state();
    free(sent);
    return rc;
}

static int read_state(pc_matcher *m, struct pc__match_slice *slice, const void *state, uint64_t n_bytes)
{
    struct reader from = {.at = state, .left = n_bytes};
    uint64_t n_partitions = read_one(&from), n_inboxes = read_one(&from);
    int rc = from.is_short ? bad_state() : read_partitions(m, slice, n_partitions, &from);
    if (rc)
        return rc;
    struct reader inboxes = from;
    for (uint64_t i = 0; i < n_inboxes && !from.is_short; i++)
        (void)read_inbox(&from);
    if (from.is_short)
        return bad_state();
    uint64_t offset = 0;
    for (uint64_t i = 0; i < n_inboxes && !rc; i++) {
        struct inbox_read inbox = read_inbox(&inboxes);
        rc = deliver_inbox(m, slice, &inbox, from.at, from.left, &offset);
    }
    return !rc && offset != from.left ? bad_state() : rc;
}

static uint64_t length_of(const pc_matcher *m, const struct pc__match_slice *slice)
{
    uint64_t n = 2u + 5u * (uint64_t)pc__match_group(m, slice->group)->n_datasets, n_bytes = 0;
    for (uint64_t at = slice->inboxes; at;) {
        const struct pc__match_inbox *inbox = pc__match_at(m, at);
        n += 3u + inbox->n_closed + 2u * inbox->mails.n;
        n_bytes += inbox->mails.n_bytes;
        at = inbox->next;
    }
    return n * sizeof(uint64_t) + n_bytes;
}

static void write_state(pc_matcher *m, const struct pc__match_slice *slice, uint64_t *out)
{
    const struct pc__match_group *group = pc__match_group(m, slice->group);
    uint64_t *n_inboxes = out + 1;
    *out = group->n_datasets;
    *n_inboxes = 0;
    out += 2;
    for (uint64_t d = 0; d < m->shared->n_datasets; d++) {
        const struct pc__match_dataset *dataset = pc__match_dataset(m, d);
        if (dataset->group != slice->group)
            continue;
        const struct pc__match_partition *partition =
            pc__match_partition(m, slice->first_partition + dataset->place);
        *out++ = d;
        *out++ = partition->writer;
        *out++ = partition->started;
        *out++ = partition->finished;
        *out++ = partition->writing;
    }
    for (uint64_t at = slice->inboxes; at;) {
        struct pc__match_inbox *inbox = pc__match_at(m, at);
        pc__match_sort(m, &inbox->mails);
        ++*n_inboxes;
        *out++ = inbox->number;
        *out++ = inbox->n_closed;
        *out++ = inbox->mails.n;
        for (uint64_t i = 0; i < 64u * inbox->n_words; i++)
            if (inbox->closed[i / 64u] >> i % 64u & 1u)
                *out++ = i;
        for (uint64_t mail_at = inbox->mails.first; mail_at;) {
            const struct pc__match_mail *mail = pc__match_at(m, mail_at);
            *out++ = mail->sender;
            *out++ = ((struct pc__match_payload *)pc__match_at(m, mail->payload))->n_bytes;
            mail_at = mail->next;
        }
        at = inbox->next;
    }
    char *data = (char *)out;
    for (uint64_t at = slice->inboxes; at;) {
        const struct pc__match_inbox *inbox = pc__match_at(m, at);
        for (uint64_t mail_at = inbox->mails.first; mail_at;) {
            const struct pc__match_mail *mail = pc__match_at(m, mail_at);
            const struct pc__match_payload *payload = pc__match_at(m, mail->payload);
            memcpy(data, payload + 1, payload->n_bytes);
            data += payload->n_bytes;
            mail_at = mail->next;
        }
        at = inbox->next;
    }
}

/* ---------------------------------------------------------------- calls */

PC_API int pc_match_add(pc_matcher *m, uint32_t group, uint32_t index, const void *state,
                        uint64_t n_bytes)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_slice *slice = pc__match_find(m, group, index);
    if (!slice)
        rc = PC_ERR_RANGE;
    else if (slice->is_here)
        rc = pc__fail(PC_ERR_EXISTS, "slice %u of group %u is here", index, group);
    else
        rc = read_state(m, slice, state, n_bytes);
    if (!rc) {
        slice->is_here = 1;
        slice->is_held = 0;
        slice->passed = 0;
        pc__match_drop_late(m, slice);
        pc__match_slice_now(m, slice);
    }
    pc__match_unlock(m);
    return rc;
}

PC_API int pc_match_hold(pc_matcher *m, uint32_t group, uint32_t index)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_slice *slice = pc__match_find_here(m, group, index);
    if (slice) {
        slice->is_held = 1;
        pc__match_take_back(m, slice);
        rc = !slice->n_running;
    } else {
        rc = PC_ERR_RANGE;
    }
    pc__match_unlock(m);
    return rc;
}

PC_API int pc_match_release(pc_matcher *m, uint32_t group, uint32_t index)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_slice *slice = pc__match_find_here(m, group, index);
    if (slice) {
        slice->is_held = 0;
        pc__match_slice_now(m, slice);
    }
    pc__match_unlock(m);
    return slice ? PC_OK : PC_ERR_RANGE;
}

static int64_t remove_slice(pc_matcher *m, uint32_t group, uint32_t index, void *out, uint64_t capacity)
{
    struct pc__match_slice *slice = pc__match_find_here(m, group, index);
    if (!slice)
        return PC_ERR_RANGE;
    if (!slice->is_held || slice->n_running)
        return pc__fail(PC_ERR_RANGE, "slice %u of group %u is %s", index, group,
                        slice->is_held ? "in use" : "not held");
    uint64_t n_bytes = length_of(m, slice);
    if (n_bytes <= capacity) {
        write_state(m, slice, out);
        while (slice->inboxes)
            pc__match_drop_inbox(
                m, slice, ((struct pc__match_inbox *)pc__match_at(m, slice->inboxes))->number);
        slice->is_here = 0;
        slice->is_held = 0;
    }
    return (int64_t)n_bytes;
}

PC_API int64_t pc_match_remove(pc_matcher *m, uint32_t group, uint32_t index, void *out,
                               uint64_t capacity)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    int64_t n = remove_slice(m, group, index, out, capacity);
    pc__match_unlock(m);
    return n;
}

PC_API int64_t pc_match_slices(pc_matcher *m, uint32_t *out, uint64_t capacity)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    uint64_t n = 0;
    for (uint64_t i = 0; i < m->shared->n_slices; i++) {
        const struct pc__match_slice *slice = pc__match_slice(m, i);
        if (!slice->is_here)
            continue;
        if (n < capacity) {
            out[2 * n] = slice->group;
            out[2 * n + 1] = slice->index;
        }
        n++;
    }
    pc__match_unlock(m);
    return (int64_t)n;
}
