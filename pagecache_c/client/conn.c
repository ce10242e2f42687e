/* conn.c - one connection to a page server: packets, connect, hello. See client.h.
 *
 * Threads: whoever owns the descriptor. Locks: none. Every wait has a deadline.
 */
#include "client/client.h"

#include "common/signal_log.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define CONNECT_STEP_MIN_NS 20000000ull
#define CONNECT_STEP_MAX_NS 500000000ull
#define LAST_WORDS_NS 500000000ull

void pc__fds_close(int *fds, int *n_fds)
{
    for (int i = 0; i < *n_fds; i++)
        close(fds[i]);
    *n_fds = 0;
}

static void take_fds(struct msghdr *header, struct pc__packet *packet)
{
    for (struct cmsghdr *at = CMSG_FIRSTHDR(header); at; at = CMSG_NXTHDR(header, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
            if (packet->n_fds < PC__CTL_MAX_FDS)
                packet->fds[packet->n_fds++] = fd;
            else
                close(fd);
        }
    }
}

int pc__conn_receive(int fd, struct pc__packet *packet)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(PC__CTL_MAX_FDS * sizeof(int))];
    } control;
    struct iovec into = {packet->bytes, sizeof packet->bytes};
    struct msghdr header = {.msg_iov = &into, .msg_iovlen = 1, .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    packet->n_fds = 0;
    /* A server that closed with our words unread is a reset at first: what it said comes after that. */
    ssize_t got;
    do {
        got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == ECONNRESET);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    if (got <= 0)
        return pc__fail(PC_ERR_NO_SERVER, "the page server closed the connection");
    take_fds(&header, packet);
    packet->fds_lost = header.msg_flags & MSG_CTRUNC;
    int rc = header.msg_flags & MSG_TRUNC
                 ? PC_ERR_PROTOCOL
                 : pc__ctl_parse(packet->bytes, (size_t)got, &packet->message);
    if (rc) {
        pc__fds_close(packet->fds, &packet->n_fds);
        return pc__fail(PC_ERR_PROTOCOL, "the page server sent a malformed packet of %zd bytes",
                        got);
    }
    return 1;
}

int pc__conn_send(int fd, uint16_t type, uint32_t request_id, const void *body, size_t body_bytes,
                  const void *tail, size_t tail_bytes, const int *fds, int n_fds)
{
    struct pc__ctl_header packet = {.body_bytes = (uint32_t)(body_bytes + tail_bytes),
                                    .type = type, .request_id = request_id};
    struct iovec from[3] = {{&packet, sizeof packet},
                            {(void *)(uintptr_t)body, body_bytes},
                            {(void *)(uintptr_t)tail, tail_bytes}};
    struct msghdr header = {.msg_iov = from, .msg_iovlen = 3};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(PC__CTL_MAX_FDS * sizeof(int))];
    } control;
    if (n_fds) {
        size_t n_bytes = (size_t)n_fds * sizeof(int);
        memset(&control, 0, sizeof control);
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(n_bytes);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(n_bytes);
        memcpy(CMSG_DATA(rights), fds, n_bytes);
    }
    for (;;) {
        if (sendmsg(fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
            return 1;
        switch (errno) {
        case EINTR:
            continue;
        case EAGAIN: /* the server reads slowly */
        case ENOBUFS:
            return 0;
        case EPIPE: /* the server is gone */
        case ECONNRESET:
        case ENOTCONN:
            return pc__fail(PC_ERR_NO_SERVER, "the page server closed the connection");
        case ETOOMANYREFS: /* more descriptors in flight than RLIMIT_NOFILE */
            return pc__fail(PC_ERR_DESCRIPTORS, "descriptors in flight");
        default:
            return pc__fail_errno("sendmsg to the page server");
        }
    }
}

static bool is_closing(pc_client *client)
{
    pthread_mutex_lock(&client->lock);
    bool closing = client->state == PC__CONN_CLOSED;
    pthread_mutex_unlock(&client->lock);
    return closing;
}

int pc__patient_wait(const struct pc__patience *patience, int fd, short events)
{
    pc_client *client = patience->client;
    struct pc__trap *trap = &client->trap;
    for (;;) {
        if (is_closing(client))
            return pc__fail(PC_ERR_CLOSED, "the client was closed");
        uint64_t now = pc__clock_ns();
        if (now >= patience->deadline_ns)
            return pc__fail(PC_ERR_TIMEOUT, "the page server at %s does not answer",
                            client->socket_name);
        uint64_t left_ns = patience->deadline_ns - now;
        struct timespec left = {.tv_sec = (time_t)(left_ns / 1000000000u),
                                .tv_nsec = (long)(left_ns % 1000000000u)};
        struct pollfd fds[3] = {
            {.fd = fd, .events = events},
            {.fd = client->nudge_fd, .events = POLLIN},
            {.fd = patience->stuck ? trap->ops->stuck_fd(trap) : -1, .events = POLLIN}};
        if (ppoll(fds, 3, &left, NULL) < 0) {
            if (errno == EINTR)
                continue;
            return pc__fail_errno("poll");
        }
        if (fds[1].revents) {
            uint64_t count;
            (void)!read(client->nudge_fd, &count, sizeof count); /* only its coming matters */
        }
        if (fds[2].revents)
            patience->stuck(client);
        if (fds[0].revents)
            return 1;
    }
}

int pc__conn_connect(const char *name, int *out)
{
    struct sockaddr_un address;
    socklen_t bytes;
    int rc = pc__local_address(name, &address, &bytes);
    if (rc)
        return rc;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return pc__fail_errno("socket");
    if (connect(fd, (struct sockaddr *)&address, bytes)) {
        if (pc__local_nobody(errno) || errno == EAGAIN /* its backlog is full */ || errno == EINTR)
            rc = pc__fail(PC_ERR_NO_SERVER, "no page server listens at %s: %s", name,
                          strerror(errno));
        else
            rc = pc__fail_errno("connect to %s", name);
        goto out;
    }
    struct ucred peer;
    socklen_t peer_bytes = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes)) {
        rc = pc__fail_errno("SO_PEERCRED");
        goto out;
    }
    if (peer.uid != geteuid()) {
        rc = pc__fail(PC_ERR_DENIED, "%s is served by user %u, and this process is user %u", name,
                      (unsigned)peer.uid, (unsigned)geteuid());
        goto out;
    }
    *out = fd;
    return PC_OK;
out:
    close(fd);
    return rc;
}

/* Who runs the task again learns from it why this process ends. It ends all the same: without an
 * answer that the page server has it, LAST_WORDS_NS later. What else comes is of no use any more. */
static void say_last_words(pc_client *client, int fd, const struct pc__ctl_fail *fail)
{
    struct pc__ctl_last_words words = {.region = fail->region, .version = fail->version,
                                       .block = fail->block, .error = fail->error};
    pthread_mutex_lock(&client->lock);
    memcpy(words.task, client->task, sizeof words.task);
    pthread_mutex_unlock(&client->lock);
    if (!pc__is_task(words.task))
        return;
    const struct pc__patience patience = {.client = client,
                                          .deadline_ns = pc__deadline(LAST_WORDS_NS)};
    struct pc__packet *packet = client->packet;
    const uint32_t request_id = PC__REQUEST_ALONE;
    int rc;
    while ((rc = pc__conn_send(fd, PC__CTL_LAST_WORDS, request_id, &words, sizeof words, NULL, 0,
                               NULL, 0)) == 0)
        if (pc__patient_wait(&patience, fd, POLLOUT) < 0)
            return;
    bool is_answered = rc < 0;
    while (!is_answered) {
        while ((rc = pc__conn_receive(fd, packet)) == 0)
            if (pc__patient_wait(&patience, fd, POLLIN) < 0)
                return;
        if (rc < 0)
            return;
        is_answered = packet->message.header.type == PC__CTL_REPLY &&
                      packet->message.header.request_id == request_id;
        pc__fds_close(packet->fds, &packet->n_fds);
    }
}

_Noreturn void pc__conn_failed(pc_client *client, int fd, const struct pc__ctl_message *message)
{
    struct pc__ctl_fail fail;
    memcpy(&fail, message->body, sizeof fail);
    fail.cause[sizeof fail.cause - 1] = '\0';
    say_last_words(client, fd, &fail);
    struct pc__siglog line = {.used = 0};
    pc__siglog_text(&line, "clamor: ");
    pc__siglog_block(&line, fail.region, fail.version, fail.block);
    pc__siglog_text(&line, " cannot be read from server ");
    pc__siglog_hex(&line, fail.server_id);
    pc__siglog_text(&line, ": ");
    pc__siglog_text(&line, pc_strerror(fail.error));
    if (fail.cause[0] && strcmp(fail.cause, pc_strerror(fail.error))) {
        pc__siglog_text(&line, ": ");
        pc__siglog_text(&line, fail.cause);
    }
    pc__siglog_text(&line, "; this process ends");
    pc__siglog_and_exit(&line);
}

void pc__call_take(struct pc__call *call, struct pc__packet *packet)
{
    call->status = packet->message.header.status;
    call->body_bytes = packet->message.body_bytes < sizeof call->body
                           ? packet->message.body_bytes
                           : sizeof call->body;
    memcpy(call->body, packet->message.body, call->body_bytes);
    call->n_fds = packet->n_fds;
    memcpy(call->fds, packet->fds, sizeof call->fds);
    call->fds_lost = packet->fds_lost;
    packet->n_fds = 0;
}

int pc__conn_exchange(const struct pc__patience *patience, int fd, uint16_t type,
                      const void *body, size_t body_bytes, const int *fds, int n_fds,
                      struct pc__call *call)
{
    struct pc__packet *packet = patience->client->packet;
    const uint32_t request_id = PC__REQUEST_ALONE;
    memset(call, 0, sizeof *call);
    int rc;
    while ((rc = pc__conn_send(fd, type, request_id, body, body_bytes, NULL, 0, fds, n_fds)) == 0)
        if ((rc = pc__patient_wait(patience, fd, POLLOUT)) < 0)
            return rc;
    if (rc < 0)
        return rc;
    for (;;) {
        while ((rc = pc__conn_receive(fd, packet)) == 0)
            if ((rc = pc__patient_wait(patience, fd, POLLIN)) < 0)
                return rc;
        if (rc < 0)
            return rc;
        uint16_t got = packet->message.header.type;
        if (got == PC__CTL_FAIL)
            pc__conn_failed(patience->client, fd, &packet->message);
        if (got == PC__CTL_REPLY && packet->message.header.request_id == request_id)
            break;
        pc__fds_close(packet->fds, &packet->n_fds);
        if (got == PC__CTL_ENDED)
            return pc__call_ended(patience->client);
        if (got != PC__CTL_REPLY && got != PC__CTL_LET_GO) /* nothing rests here yet */
            return pc__fail(PC_ERR_PROTOCOL, "the page server sent a message of type %u", got);
    }
    pc__call_take(call, packet);
    return PC_OK;
}

int pc__conn_tell(const struct pc__patience *patience, int fd, uint16_t type)
{
    for (;;) {
        int rc = pc__conn_send(fd, type, 0, NULL, 0, NULL, 0, NULL, 0);
        if (rc)
            return rc < 0 ? rc : PC_OK;
        rc = pc__patient_wait(patience, fd, POLLOUT);
        if (rc != 1)
            return rc;
    }
}

/* No two clients of a node have the same: 63 random bits, and never 0. */
void pc__conn_number(pc_client *client)
{
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != (ssize_t)sizeof number)
        number = (pc__clock_ns() * 0x9e3779b97f4a7c15u) ^ (uint64_t)getpid() << 32 ^
                 (uint64_t)(uintptr_t)client; /* before the kernel has gathered any */
    client->number = number | 1ull << 63;
}

static struct pc__ctl_hello hello_of(pc_client *client, int *fds, int *n_fds)
{
    struct pc__ctl_hello mine = {.wire_version = PC__WIRE_VERSION,
                                 .sender_id = client->number,
                                 .trap = (uint32_t)client->trap.kind};
    memcpy(mine.library_version, client->library_version, sizeof mine.library_version);
    *n_fds = client->trap.ops->hello_fds(&client->trap, fds);
    return mine;
}

int pc__conn_greet(pc_client *client, int fd)
{
    int fds[PC__CTL_MAX_FDS], n_fds;
    const struct pc__ctl_hello mine = hello_of(client, fds, &n_fds);
    return pc__conn_send(fd, PC__CTL_HELLO, PC__REQUEST_ALONE, &mine, sizeof mine, NULL, 0, fds,
                         n_fds) == 1
               ? PC_OK
               : PC_ERR_NO_SERVER;
}

static int say_hello(const struct pc__patience *patience, int fd)
{
    pc_client *client = patience->client;
    int fds[PC__CTL_MAX_FDS], n_fds;
    struct pc__ctl_hello mine = hello_of(client, fds, &n_fds), theirs;
    struct pc__call call;
    int rc = pc__conn_exchange(patience, fd, PC__CTL_HELLO, &mine, sizeof mine, fds, n_fds, &call);
    if (rc)
        return rc;
    pc__fds_close(call.fds, &call.n_fds);
    if (call.body_bytes < sizeof theirs)
        return pc__fail(call.status < 0 ? call.status : PC_ERR_PROTOCOL,
                        "the page server refused the connection: %s", pc_strerror(call.status));
    memcpy(&theirs, call.body, sizeof theirs);
    theirs.library_version[sizeof theirs.library_version - 1] = '\0';
    if (call.status == PC_ERR_VERSION_MISMATCH || theirs.wire_version != PC__WIRE_VERSION ||
        strcmp(theirs.library_version, mine.library_version) != 0)
        return pc__fail(PC_ERR_VERSION_MISMATCH,
                        "the page server runs version %s (wire %u), this process %s (wire %u)",
                        theirs.library_version, theirs.wire_version, mine.library_version,
                        PC__WIRE_VERSION);
    if (call.status < 0)
        return pc__fail(call.status, "the page server refused the connection: %s",
                        pc_strerror(call.status));
    atomic_store(&client->server_id, theirs.sender_id);
    return PC_OK;
}

int pc__conn_hello(const struct pc__patience *patience, int *out)
{
    uint64_t step_ns = CONNECT_STEP_MIN_NS;
    for (;;) {
        int fd = -1;
        int rc = pc__conn_connect(patience->client->socket_name, &fd);
        if (rc == PC_OK) {
            rc = say_hello(patience, fd);
            if (rc == PC_OK) {
                *out = fd;
                return PC_OK;
            }
            close(fd);
        }
        if (rc != PC_ERR_NO_SERVER)
            return rc;
        uint64_t now = pc__clock_ns();
        struct pc__patience pause = *patience;
        if (now >= patience->deadline_ns)
            return rc;
        if (patience->deadline_ns - now > step_ns)
            pause.deadline_ns = now + step_ns;
        int waited = pc__patient_wait(&pause, -1, 0);
        if (waited != PC_ERR_TIMEOUT)
            return waited;
        step_ns = step_ns * 2 > CONNECT_STEP_MAX_NS ? CONNECT_STEP_MAX_NS : step_ns * 2;
        if (pause.deadline_ns == patience->deadline_ns)
            return pc__fail(PC_ERR_NO_SERVER, "no page server answers at %s",
                            patience->client->socket_name);
    }
}
