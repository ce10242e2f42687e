/* call.c - requests and their replies, and the messages without one that wait for room. See client.h.
 *
 * Threads: any may call; the watch thread hands replies over. Lock: client.lock, never held
 * while waiting (the condition variable drops it). Every wait ends at its deadline, when the
 * client is closed, or in a child of fork at once.
 */
#include "client/client.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROOM_STEP_NS 2000000ull /* how often a full socket is tried again */

bool pc__changed_wait(pc_client *client, uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                             .tv_nsec = (long)(deadline_ns % 1000000000u)};
    return pthread_cond_timedwait(&client->changed, &client->lock, &until) == 0;
}

int pc__call_refused(const pc_client *client)
{
    if (client->state == PC__CONN_CLOSED)
        return pc__fail(PC_ERR_CLOSED, "the client was closed");
    if (client->state == PC__CONN_FORKED)
        return pc__fail(PC_ERR_FORKED, "this process is a child of fork and has not attached");
    if (client->is_ended)
        return pc__fail(PC_ERR_ENDED, "the page server of this node has said so");
    return PC_OK;
}

/* Under lock. Waits for a connection, then for room; registers the call. */
static int start_locked(pc_client *client, uint16_t type, const void *body, size_t body_bytes,
                        const void *tail, size_t tail_bytes, uint64_t deadline_ns,
                        struct pc__call *call)
{
    for (;;) {
        int rc = pc__call_refused(client);
        if (rc)
            return rc;
        if (client->state == PC__CONN_UP) {
            if (++client->next_request_id == PC__REQUEST_ALONE)
                client->next_request_id = 1;
            pc__outbox_flush(client); /* an OPEN does not overtake the CLOSE of what was there */
            rc = client->outbox ? 0
                                : pc__conn_send(client->socket, type, client->next_request_id,
                                                body, body_bytes, tail, tail_bytes, call->gives,
                                                call->gives ? 1 : 0);
            if (rc == 1) {
                call->request_id = client->next_request_id;
                call->epoch = client->epoch;
                call->next = client->calls;
                client->calls = call;
                return PC_OK;
            }
            if (rc < 0 && rc != PC_ERR_NO_SERVER)
                return rc;
        }
        uint64_t now = pc__clock_ns();
        if (now >= deadline_ns) {
            if (client->state == PC__CONN_UP)
                return pc__fail(PC_ERR_TIMEOUT, "the page server does not read its socket");
            return pc__fail(PC_ERR_NO_SERVER, "the page server at %s is gone: %s",
                            client->socket_name,
                            client->outage[0] ? client->outage : "looking for a new one");
        }
        /* Up but full, or dead and the watch thread will notice: soon again. */
        uint64_t until = deadline_ns;
        if (client->state == PC__CONN_UP && deadline_ns - now > ROOM_STEP_NS)
            until = now + ROOM_STEP_NS;
        pc__changed_wait(client, until);
    }
}

int pc__call_start(pc_client *client, uint16_t type, const void *body, size_t body_bytes,
                   const void *tail, size_t tail_bytes, uint64_t deadline_ns,
                   struct pc__call *call)
{
    *call = (struct pc__call){.opens = call->opens, .gives = call->gives};
    pthread_mutex_lock(&client->lock);
    int rc = start_locked(client, type, body, body_bytes, tail, tail_bytes, deadline_ns, call);
    pthread_mutex_unlock(&client->lock);
    return rc;
}

/* The requester goes. Its reply will find nobody; a lease that it asked for ends right after it began,
 * before anything else that this client asks for: it may ask for the same addresses. */
static void give_up(pc_client *client, struct pc__call *call)
{
    struct pc__call **at = &client->calls;
    while (*at && *at != call)
        at = &(*at)->next;
    if (!*at)
        return;
    *at = call->next;
    const struct pc__ctl_open close = {.mapping_id = call->opens};
    if (call->opens) /* lost for want of memory: the lease ends with this process */
        (void)pc__outbox_send(client, PC__CTL_CLOSE, &close, sizeof close);
}

int pc__call_finish(pc_client *client, struct pc__call *call, uint64_t deadline_ns)
{
    int rc = PC_OK;
    pthread_mutex_lock(&client->lock);
    while (!call->is_done && !rc) {
        rc = pc__call_refused(client);
        if (!rc && pc__clock_ns() >= deadline_ns)
            rc = pc__fail(PC_ERR_TIMEOUT, "the page server did not answer in time");
        if (!rc)
            pc__changed_wait(client, deadline_ns);
    }
    if (!call->is_done)
        give_up(client, call);
    else
        rc = PC_OK;
    const bool has_ended = client->is_ended;
    pthread_mutex_unlock(&client->lock);
    if (rc)
        return rc;
    if (call->is_dropped && has_ended)
        return pc__fail(PC_ERR_ENDED, "the page server of this node ended before it answered");
    if (call->is_dropped)
        return pc__fail(PC_ERR_NO_SERVER, "the page server died before it answered");
    if (call->status < 0) {
        pc__fds_close(call->fds, &call->n_fds);
        call->body[call->body_bytes < sizeof call->body ? call->body_bytes : sizeof call->body - 1] = 0;
        return pc__fail(call->status, "the page server says: %s",
                        call->body[0] ? (const char *)call->body : pc_strerror(call->status));
    }
    return PC_OK;
}

void pc__call_cancel(pc_client *client, struct pc__call *call)
{
    pthread_mutex_lock(&client->lock);
    give_up(client, call); /* does nothing to one that is answered */
    pthread_mutex_unlock(&client->lock);
    pc__fds_close(call->fds, &call->n_fds);
}

int pc__call(pc_client *client, uint16_t type, const void *body, size_t body_bytes, bool resend,
             uint64_t deadline_ns, struct pc__call *call)
{
    for (;;) {
        int rc = pc__call_start(client, type, body, body_bytes, NULL, 0, deadline_ns, call);
        if (!rc)
            rc = pc__call_finish(client, call, deadline_ns);
        if (!(rc == PC_ERR_NO_SERVER && call->is_dropped && resend))
            return rc;
    }
}

void pc__call_reply(pc_client *client, struct pc__packet *packet)
{
    for (struct pc__call **at = &client->calls; *at; at = &(*at)->next) {
        struct pc__call *call = *at;
        if (call->request_id != packet->message.header.request_id)
            continue;
        *at = call->next;
        pc__call_take(call, packet);
        call->is_done = true;
        pthread_cond_broadcast(&client->changed);
        return;
    }
    pc__fds_close(packet->fds, &packet->n_fds); /* its requester gave up */
}

void pc__call_drop_all(pc_client *client)
{
    while (client->calls) {
        struct pc__call *call = client->calls;
        client->calls = call->next;
        call->is_done = call->is_dropped = true;
    }
    pthread_cond_broadcast(&client->changed);
}

static int send_outgoing(pc_client *client, uint16_t type, const void *body, size_t body_bytes)
{
    /* An ABANDON is replied to; nobody waits for that. */
    uint32_t request_id = type == PC__CTL_ABANDON ? PC__REQUEST_ALONE : 0;
    return pc__conn_send(client->socket, type, request_id, body, body_bytes, NULL, 0, NULL, 0);
}

int pc__outbox_send(pc_client *client, uint16_t type, const void *body, size_t body_bytes)
{
    assert(body_bytes <= PC__OUTGOING_BYTES);
    pc__outbox_flush(client);
    if (client->state == PC__CONN_UP && !client->outbox &&
        send_outgoing(client, type, body, body_bytes) != 0)
        return PC_OK; /* sent, or the server is gone and so is what this is about */
    if ((client->state != PC__CONN_UP && client->state != PC__CONN_LOST) || client->is_ended)
        return PC_OK;
    struct pc__outgoing *outgoing = malloc(sizeof *outgoing);
    if (!outgoing)
        return pc__fail(PC_ERR_NO_MEMORY, "a message to the page server");
    outgoing->next = NULL;
    outgoing->type = type;
    outgoing->body_bytes = body_bytes;
    memcpy(outgoing->body, body, body_bytes);
    *client->outbox_end = outgoing;
    client->outbox_end = &outgoing->next;
    const uint64_t one = 1;
    (void)!write(client->nudge_fd, &one, sizeof one); /* full: it is nudged already */
    return PC_OK;
}

static void pop(pc_client *client)
{
    struct pc__outgoing *first = client->outbox;
    client->outbox = first->next;
    if (!client->outbox)
        client->outbox_end = &client->outbox;
    free(first);
}

void pc__outbox_flush(pc_client *client)
{
    while (client->outbox && client->state == PC__CONN_UP &&
           send_outgoing(client, client->outbox->type, client->outbox->body,
                         client->outbox->body_bytes) != 0)
        pop(client);
}

void pc__outbox_clear(pc_client *client)
{
    while (client->outbox)
        pop(client);
}

int pc__call_ended(pc_client *client)
{
    pthread_mutex_lock(&client->lock);
    client->is_ended = true;
    if (client->trap.sig)
        atomic_store(&client->trap.sig->ended, true);
    pc__outbox_clear(client);
    pc__call_drop_all(client); /* wakes who waits for a mapping, too */
    pthread_mutex_unlock(&client->lock);
    return pc__fail(PC_ERR_ENDED, "the page server has said that the session ended");
}
