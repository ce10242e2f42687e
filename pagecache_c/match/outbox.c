/* outbox.c - what a node's worker tells others: closings for slices that are not here, and answers. */
#include "match/match.h"

int pc__match_post(pc_matcher *m, const struct pc__match_post *post)
{
    struct pc__match_shared *s = m->shared;
    uint64_t at = pc__heap_take(m, sizeof *post);
    if (!at) {
        struct pc__match_mails mails = post->mails;
        pc__match_drop_mails(m, &mails);
        return pc__match_full(m);
    }
    *(struct pc__match_post *)pc__match_at(m, at) = *post;
    if (s->out_last)
        ((struct pc__match_post *)pc__match_at(m, s->out_last))->next = at;
    else
        s->out_first = at;
    s->out_last = at;
    s->has_out_news = 1;
    return PC_OK;
}

PC_API int pc_match_wait_outgoing(pc_matcher *m, uint64_t timeout_ns)
{
    struct pc__match_shared *s = m->shared;
    uint64_t deadline_ns = pc__match_deadline(timeout_ns);
    for (;;) {
        int rc = pc__match_lock(m);
        if (rc)
            return rc;
        if (s->out_first || s->n_rests) {
            s->n_rests = 0;
            pc__match_unlock(m);
            return 1;
        }
        if (atomic_load(&s->is_stopped) || atomic_load(&m->is_shut)) {
            pc__match_unlock(m);
            return pc__fail(PC_ERR_CLOSED, "the matcher was stopped");
        }
        rc = pc__match_sleep(m, &s->out_word, &s->out_waiters, deadline_ns);
        if (rc) {
            pc__match_unlock(m);
            return 0;
        }
    }
}

static uint64_t bytes_of(const struct pc__match_post *post)
{
    return sizeof(struct pc_match_outgoing) + post->mails.n * sizeof(uint64_t) +
           ((post->mails.n_bytes + 7u) & ~(uint64_t)7u);
}

static void write_post(const pc_matcher *m, const struct pc__match_post *post, char *out)
{
    struct pc_match_outgoing head = {.kind = post->kind, .number = post->number,
                                     .group = post->group, .index = post->index,
                                     .sender = post->sender, .value = post->value,
                                     .n_messages = post->mails.n, .n_bytes = post->mails.n_bytes};
    char *lengths = out + sizeof head, *data = lengths + post->mails.n * sizeof(uint64_t);
    memcpy(out, &head, sizeof head);
    for (uint64_t at = post->mails.first; at;) {
        const struct pc__match_mail *mail = pc__match_at(m, at);
        const struct pc__match_payload *payload = pc__match_at(m, mail->payload);
        memcpy(lengths, &payload->n_bytes, sizeof payload->n_bytes);
        lengths += sizeof payload->n_bytes;
        memcpy(data, payload + 1, payload->n_bytes);
        data += payload->n_bytes;
        at = mail->next;
    }
    memset(data, 0, -post->mails.n_bytes & 7u);
}

PC_API int64_t pc_match_take_outgoing(pc_matcher *m, void *out, uint64_t capacity,
                                      uint64_t *next_bytes)
{
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_shared *s = m->shared;
    uint64_t n = 0;
    *next_bytes = 0;
    while (s->out_first) {
        uint64_t at = s->out_first;
        struct pc__match_post *post = pc__match_at(m, at);
        uint64_t n_bytes = bytes_of(post);
        if (n_bytes > capacity - n) {
            *next_bytes = n_bytes;
            break;
        }
        write_post(m, post, (char *)out + n);
        n += n_bytes;
        s->out_first = post->next;
        if (!s->out_first)
            s->out_last = 0;
        pc__match_drop_mails(m, &post->mails);
        pc__heap_give(m, at);
    }
    pc__match_unlock(m);
    return (int64_t)n;
}
