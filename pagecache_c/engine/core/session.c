/* session.c - a client as the rooms below local/ see it: what is sent to it, and which of its mappings an
 * address belongs to. Entered by the loop that owns the client; advice (let go, ended), by any thread.
 */
#include "engine/core/core.h"

#include <linux/sockios.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define ADVICE_UNREAD_BYTES (16 << 10) /* some twenty messages; a socket holds about 200 KiB */

/* ---------------------------------------------------------------- sending */

void pc__session_send(struct pc__session *session, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd)
{
    struct pc__ctl_header header = {.body_bytes = (uint32_t)body_bytes,
                                    .type = (uint16_t)type,
                                    .request_id = request_id,
                                    .status = status};
    struct iovec gather[2] = {{&header, sizeof header}, {(void *)(uintptr_t)body, body_bytes}};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = gather, .msg_iovlen = body_bytes ? 2 : 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *at = CMSG_FIRSTHDR(&message);
        at->cmsg_level = SOL_SOCKET;
        at->cmsg_type = SCM_RIGHTS;
        at->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(at), &fd, sizeof fd);
    }
    /* A full socket: the client's watch thread does not read, so it is as good as dead. The loop
     * that owns it sees the end of file. */
    if (sendmsg(session->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        shutdown(session->fd, SHUT_RDWR);
}

void pc__session_answer(struct pc__session *session, uint32_t request_id, int status)
{
    char why[sizeof((struct pc__ctl_fail *)0)->cause] = "";
    if (status == PC_ERR_NO_MEMORY || status == PC_ERR_DESCRIPTORS)
        snprintf(why, sizeof why, "%s", pc_last_message());
    pc__session_send(session, PC__CTL_REPLY, request_id, status, why, *why ? strlen(why) + 1 : 0, -1);
}

void pc__session_reply(struct pc__session *session, const struct pc__ctl_message *message, int status)
{
    pc__session_answer(session, message->header.request_id, status);
}

/* ------------------------------------------------------------------ turns */

void pc__turn_take(struct pc__session *session, struct pc__turn *turn)
{
    session->turn = turn;
    pthread_mutex_lock(&turn->lock);
    if (turn->session_id < session->id)
        turn->session_id = session->id;
    pthread_mutex_unlock(&turn->lock);
}

bool pc__turn_hold(const struct pc__session *session)
{
    if (!session->turn)
        return true;
    pthread_mutex_lock(&session->turn->lock);
    if (session->turn->session_id == session->id)
        return true;
    pthread_mutex_unlock(&session->turn->lock);
    return false;
}

void pc__turn_release(const struct pc__session *session)
{
    if (session->turn)
        pthread_mutex_unlock(&session->turn->lock);
}

/* --------------------------------------------------------------- mappings */

size_t pc__session_mapping_after(const struct pc__session *session, uint64_t address)
{
    size_t low = 0, high = session->n_mappings;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const struct pc__session_map *m = &session->mappings[mid];
        if (m->address + m->length_bytes > address)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

struct pc__session_map *pc__session_mapping_at(struct pc__session *session, uint64_t address)
{
    size_t i = pc__session_mapping_after(session, address);
    return i < session->n_mappings && session->mappings[i].address <= address ? &session->mappings[i]
                                                                            : NULL;
}

struct pc__session_map *pc__session_mapping(struct pc__session *session, uint64_t id)
{
    for (size_t i = 0; i < session->n_mappings; i++)
        if (session->mappings[i].id == id)
            return &session->mappings[i];
    return NULL;
}

/* ----------------------------------------------------------------- advice */

/* Whether the client reads what it is told. One that is stopped, or gets no time, would have its
 * socket filled, and be given up, by advice that it can do without. */
static bool listens(const struct pc__session *session)
{
    int unread_bytes = 0;
    return !ioctl(session->fd, SIOCOUTQ, &unread_bytes) && unread_bytes < ADVICE_UNREAD_BYTES;
}

static void let_go(struct pc__loop *loop, struct pc__mail *mail)
{
    const struct pc__ctl_let_go body = {.region = mail->a, .loss = mail->b};
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        bool maps = false;
        for (size_t i = 0; i < session->n_mappings && !maps; i++)
            maps = session->mappings[i].region->id == mail->a && !session->mappings[i].is_private;
        /* With SIGSEGV nothing rests. */
        bool matters = session->trap != PC_TRAP_SIGSEGV || body.loss;
        if (maps && !session->closed && matters && listens(session))
            pc__session_send(session, PC__CTL_LET_GO, 0, PC_OK, &body, sizeof body, -1);
    }
}

static void ended(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        if (!session->closed)
            pc__session_send(session, PC__CTL_ENDED, 0, PC_OK, NULL, 0, -1);
    }
}

void pc__sessions_ended(struct pc_engine *engine)
{
    for (int i = 0; i < engine->n_loops; i++) {
        const struct pc__mail mail = {.run = ended};
        /* For want of memory: they ask the registry when no server answers. */
        (void)pc__loop_post(&engine->loops[i], &mail);
    }
}

void pc__sessions_let_go(struct pc_engine *engine, uint64_t id)
{
    struct pc__region *region = pc__region_get(engine, id);
    uint32_t loss = 0;
    if (region) {
        pthread_mutex_lock(&region->lock);
        loss = region->loss;
        pthread_mutex_unlock(&region->lock);
        pc__region_put(engine, region);
    }
    for (int i = 0; i < engine->n_loops; i++) {
        const struct pc__mail mail = {.run = let_go, .a = id, .b = loss};
        /* For want of memory: they close it by themselves in a moment. */
        (void)pc__loop_post(&engine->loops[i], &mail);
    }
}
