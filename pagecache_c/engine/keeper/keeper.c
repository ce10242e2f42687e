/* keeper.c - a process that holds the page server's memfds, so that its crash loses no block.
 *
 * Owns: in the keeper, a table of (record, descriptor), oldest first (kept_table.h); in the page
 * server, nothing but the descriptor that pc_keeper_connect returned.
 * Threads: the keeper has one. pc__keeper_put and _drop may be called by any thread (a packet is
 * one sendmsg); one pc__keeper_list at a time per connection. Locks: none.
 *
 * Protocol: SOCK_SEQPACKET on a Unix socket (local_socket.h), struct message a packet, native layout.
 * PUT (with one descriptor), DROP and QUIT have no answer. LIST says the sequence number of the
 * last record that the caller has; the answer is up to LIST_BATCH RECORDs (one descriptor each)
 * and an END that says whether there is more. So the keeper has no state per list, never has many
 * descriptors in flight, and never waits for a reader.
 *
 * Invariants:
 *   - each record's descriptor is open, no two with the same inode, sequence strictly increasing;
 *   - a packet that breaks a rule closes its connection and changes nothing else;
 *   - what cannot be kept (no descriptors, no memory) closes the connection too: the page server
 *     finds out at its next call instead of believing that its blocks are safe;
 *   - a page server's connection that the keeper itself ends makes it a part (END_PART) until it is
 *     told that it has all: what was put behind the refused record is not heard, labels neither.
 *
 * Kernel facts:
 *   - Packets of a peer that died stay readable. If it left answers unread, the first recvmsg
 *     says ECONNRESET and the packets come after: ECONNRESET is not the end, 0 bytes are.
 *   - The new server's LIST must see what the dead one put: all connections are drained between
 *     receiving a LIST and answering it.
 *   - Descriptors in flight are limited per user (ETOOMANYREFS): wait, do not fail.
 *   - A receiver out of descriptors gets the packet with MSG_CTRUNC and without them.
 *   - A pidfd is readable once the process ended, zombie or not; kill(pid, 0) finds a zombie
 *     alive, so the fallback relies on its parent to reap it (or on the orphan timeout).
 *
 * Does not: map, read or write a memfd, log, or fork; the caller of pc_keeper_run is the process.
 */
#include "engine/keeper/keeper.h"
#include "common/error.h"
#include "engine/keeper/kept_table.h"
#include "os/file_id.h"
#include "os/local_socket.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x5045454bu
#define LIST_BATCH 64
#define MAX_CONNECTIONS 8
#define MAX_PACKETS_A_PASS 4096     /* more than a socket buffer holds */
#define SPARE_DESCRIPTORS 32        /* listener, pidfd, connections, one in each packet */
#define PACKET_DESCRIPTORS 4        /* room to see (and close) more than the one allowed */
#define SEND_TIMEOUT_NS 5000000000ull
#define CONNECT_RETRY_NS 5000000ull
#define IN_FLIGHT_RETRY_NS 1000000ull
#define PID_POLL_NS 1000000000ull
#define ACCEPT_PAUSE_NS 100000000ull
#define LEAVE_NS 3000000000ull
#define LEAVE_POLL_MS 20

enum op {
    OP_PUT = 1, OP_DROP = 2, OP_LIST = 3, OP_QUIT = 4, OP_RECORD = 5, OP_END = 6, OP_WHOLE = 7
};
enum end_flags { END_MORE = 1, END_PART = 2 };

struct message {
    uint32_t magic;
    uint16_t op;
    uint16_t more;      /* END: enum end_flags: records follow the last one sent; it is not whole */
    uint64_t sequence;  /* LIST: records after this one; RECORD: of this one */
    struct pc__kept what;
};
static_assert(sizeof(struct message) == 16 + sizeof(struct pc__kept), "no padding");

/* ---------------------------------------------------------------- both ends */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t deadline_after(uint64_t timeout_ns)
{
    const uint64_t now = now_ns();
    return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

static void pause_ns(uint64_t n_ns)
{
    const struct timespec time = {.tv_sec = (time_t)(n_ns / 1000000000u),
                                  .tv_nsec = (long)(n_ns % 1000000000u)};
    nanosleep(&time, NULL);
}

static void close_quietly(int fd)
{
    const int saved = errno;
    if (fd >= 0)
        close(fd);
    errno = saved;
}

/* One packet, without waiting. 0, or -1 with errno. */
static int send_packet(int socket_fd, const struct message *message, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {.iov_base = (void *)(uintptr_t)message, .iov_len = sizeof *message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};

    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        packet.msg_control = control.bytes;
        packet.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&packet);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    ssize_t n_sent;
    do {
        n_sent = sendmsg(socket_fd, &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n_sent < 0 && errno == EINTR);
    return n_sent < 0 ? -1 : 0;
}

enum received { RECEIVED, RECEIVED_NOTHING, RECEIVED_END, RECEIVED_NONSENSE };

/* One packet, without waiting; *fd is its descriptor or -1. RECEIVED promises the size, the
 * magic and at most one descriptor, no more. */
static enum received receive_packet(int socket_fd, struct message *message, int *fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(PACKET_DESCRIPTORS * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    ssize_t n_received;

    *fd = -1;
    do {
        n_received = recvmsg(socket_fd, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n_received < 0 && (errno == EINTR || errno == ECONNRESET));
    if (n_received < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? RECEIVED_NOTHING : RECEIVED_END;

    size_t n_fds = 0;
    for (struct cmsghdr *part_of = CMSG_FIRSTHDR(&packet); part_of != NULL;
         part_of = CMSG_NXTHDR(&packet, part_of)) {
        if (part_of->cmsg_level != SOL_SOCKET || part_of->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t n_here = (part_of->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n_here; i++, n_fds++) {
            int each;
            memcpy(&each, CMSG_DATA(part_of) + i * sizeof each, sizeof each);
            if (n_fds == 0)
                *fd = each;
            else
                close(each);
        }
    }
    const bool is_sound = n_received == (ssize_t)sizeof *message && message->magic == MAGIC &&
                          (packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 && n_fds <= 1;
    if (!is_sound) {
        close_quietly(*fd);
        *fd = -1;
        return n_received == 0 ? RECEIVED_END : RECEIVED_NONSENSE;
    }
    return RECEIVED;
}

static bool is_same_user(int socket_fd)
{
    struct ucred peer;
    socklen_t n_bytes = sizeof peer;
    return getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes) == 0 &&
           n_bytes == sizeof peer && peer.uid == geteuid();
}

/* ------------------------------------------------------- the page server's end */

static int connect_to(const char *listen_name, uint64_t timeout_ns, bool absent_at_once, int *fd)
{
    const uint64_t deadline = deadline_after(timeout_ns);
    struct sockaddr_un address;
    socklen_t n_bytes;

    *fd = -1;
    int rc = pc__local_address(listen_name, &address, &n_bytes);
    if (rc != PC_OK)
        return rc;
    const int socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_fd < 0)
        return pc__fail_errno("socket for keeper '%s'", listen_name);

    while (connect(socket_fd, (const struct sockaddr *)&address, n_bytes) != 0) {
        /* Not there (yet); or it is, and its queue is full: it is stopped, or has no time. */
        const bool is_absent = errno == ECONNREFUSED || errno == ENOENT || errno == ENOTDIR;
        if (!is_absent && errno != EAGAIN && errno != EINTR) {
            rc = pc__fail_errno("connect to keeper '%s'", listen_name);
            goto out;
        }
        if (now_ns() >= deadline || (is_absent && absent_at_once)) {
            rc = is_absent ? pc__fail(PC_ERR_NO_SERVER, "no keeper listens on '%s'", listen_name)
                           : pc__fail(PC_ERR_TIMEOUT, "the keeper on '%s' takes no connection",
                                      listen_name);
            goto out;
        }
        pause_ns(CONNECT_RETRY_NS);
    }
    if (!is_same_user(socket_fd)) {
        rc = pc__fail(PC_ERR_DENIED, "the keeper on '%s' belongs to another user", listen_name);
        goto out;
    }
    *fd = socket_fd;
    return PC_OK;
out:
    close_quietly(socket_fd);
    return rc;
}

PC_API int pc_keeper_connect(const char *listen_name, uint64_t timeout_ns, int *fd)
{
    return connect_to(listen_name, timeout_ns, false, fd);
}

PC_API int pc_keeper_find(const char *listen_name, uint64_t timeout_ns, int *fd)
{
    return connect_to(listen_name, timeout_ns, true, fd);
}

/* Sends one packet, if there is room. */
static int try_to_tell(int keeper_fd, const struct message *message, int fd)
{
    if (send_packet(keeper_fd, message, fd) == 0)
        return PC_OK;
    const int why = errno;
    if (why == EPIPE || why == ECONNRESET || why == ENOTCONN)
        return pc__fail(PC_ERR_CLOSED, "the keeper closed the connection");
    if (why != EAGAIN && why != EWOULDBLOCK && why != ETOOMANYREFS && why != ENOBUFS &&
        why != ENOMEM)
        return pc__fail_errno("send to the keeper");
    return pc__fail(PC_ERR_TIMEOUT, "the keeper takes no messages");
}

/* Sends one packet, waiting for room until the deadline. */
static int tell_keeper(int keeper_fd, const struct message *message, int fd, uint64_t deadline)
{
    int rc;
    while ((rc = try_to_tell(keeper_fd, message, fd)) != PC_OK) {
        const int why = errno;
        const uint64_t now = now_ns();
        if (rc != PC_ERR_TIMEOUT || now >= deadline)
            return rc;
        if (why == ETOOMANYREFS || why == ENOBUFS || why == ENOMEM) {
            pause_ns(IN_FLIGHT_RETRY_NS);
        } else {
            struct pollfd room = {.fd = keeper_fd, .events = POLLOUT};
            const uint64_t left_ms = (deadline - now) / 1000000u + 1;
            (void)poll(&room, 1, left_ms > 1000 ? 1000 : (int)left_ms);
        }
    }
    return PC_OK;
}

PC_API int pc_keeper_quit(int fd)
{
    const struct message message = {.magic = MAGIC, .op = OP_QUIT};
    return tell_keeper(fd, &message, -1, deadline_after(SEND_TIMEOUT_NS));
}

int pc__keeper_put(int keeper_fd, const struct pc__kept *what, int memfd)
{
    const struct message message = {.magic = MAGIC, .op = OP_PUT, .what = *what};
    return tell_keeper(keeper_fd, &message, memfd, deadline_after(SEND_TIMEOUT_NS));
}

int pc__keeper_drop(int keeper_fd, uint64_t inode)
{
    const struct message message = {.magic = MAGIC, .op = OP_DROP, .what = {.inode = inode}};
    return tell_keeper(keeper_fd, &message, -1, deadline_after(SEND_TIMEOUT_NS));
}

int pc__keeper_try_put(int keeper_fd, const struct pc__kept *what, int memfd)
{
    const struct message message = {.magic = MAGIC, .op = OP_PUT, .what = *what};
    return try_to_tell(keeper_fd, &message, memfd);
}

int pc__keeper_try_drop(int keeper_fd, uint64_t inode)
{
    const struct message message = {.magic = MAGIC, .op = OP_DROP, .what = {.inode = inode}};
    return try_to_tell(keeper_fd, &message, -1);
}

int pc__keeper_try_whole(int keeper_fd)
{
    const struct message message = {.magic = MAGIC, .op = OP_WHOLE};
    return try_to_tell(keeper_fd, &message, -1);
}

/* Receives one packet, waiting until the deadline. */
static int hear_keeper(int keeper_fd, struct message *message, int *fd, uint64_t deadline)
{
    for (;;) {
        switch (receive_packet(keeper_fd, message, fd)) {
        case RECEIVED:
            return PC_OK;
        case RECEIVED_END:
            return pc__fail(PC_ERR_CLOSED, "the keeper closed the connection");
        case RECEIVED_NONSENSE:
            /* Out of descriptors looks like this too; a list that is short must not pass. */
            return pc__fail(PC_ERR_PROTOCOL, "the keeper's record is malformed, or this process "
                            "has no descriptors left to receive it");
        case RECEIVED_NOTHING:
            break;
        }
        const uint64_t now = now_ns();
        if (now >= deadline)
            return pc__fail(PC_ERR_TIMEOUT, "the keeper does not answer");
        struct pollfd answer = {.fd = keeper_fd, .events = POLLIN};
        const uint64_t left_ms = (deadline - now) / 1000000u + 1;
        (void)poll(&answer, 1, left_ms > 1000 ? 1000 : (int)left_ms);
    }
}

int pc__keeper_list(int keeper_fd, int (*each)(void *arg, const struct pc__kept *what, int fd),
                    void *arg, uint64_t timeout_ns)
{
    uint64_t last_sequence = 0, stuck_since_ns = 0;
    bool more = true;
    int answer = 0;

    while (more && answer == 0) {
        const struct message request = {.magic = MAGIC, .op = OP_LIST, .sequence = last_sequence};
        const uint64_t asked_after = last_sequence;
        struct message message;
        int rc = tell_keeper(keeper_fd, &request, -1, deadline_after(timeout_ns));
        int fd;

        /* Each step has its own deadline: what each() does with a record takes as long as it is large. */
        while (rc == PC_OK && (rc = hear_keeper(keeper_fd, &message, &fd,
                                                deadline_after(timeout_ns))) == PC_OK) {
            if (message.op == OP_RECORD && fd >= 0 && message.sequence > last_sequence) {
                last_sequence = message.sequence;
                if (answer == 0)
                    answer = each(arg, &message.what, fd);
                else
                    close(fd); /* the rest of a batch that was stopped */
            } else if (message.op == OP_END && fd < 0) {
                break;
            } else {
                close_quietly(fd);
                rc = pc__fail(PC_ERR_PROTOCOL, "the keeper's answer is out of order");
            }
        }
        if (rc != PC_OK)
            return answer != 0 ? answer : rc;
        more = (message.more & END_MORE) != 0;
        if (!more && answer == 0 && message.more & END_PART)
            return pc__fail(PC_ERR_HOME_LOST, "the keeper has only a part of what there was");
        if (more && last_sequence == asked_after) { /* it could not send even one */
            if (stuck_since_ns == 0)
                stuck_since_ns = now_ns();
            else if (now_ns() - stuck_since_ns >= timeout_ns)
                return pc__fail(PC_ERR_TIMEOUT, "the keeper cannot send what it holds");
            pause_ns(IN_FLIGHT_RETRY_NS);
        } else {
            stuck_since_ns = 0;
        }
    }
    return answer;
}

/* -------------------------------------------------------------- the keeper's end */

struct connection {
    int fd;
    bool wants_list;
    bool serves; /* a page server's: it was answered a list, or has put something */
    uint64_t list_after;
    struct pc__kept_record *listed; /* the last that it was sent, or one before that; or NULL */
};

struct keeper {
    const char *name;
    struct pc__local_file file; /* of the name */
    uint64_t look_at_ns;        /* when it is looked after */
    int listener_fd;
    int pid_fd;                 /* -1: look with kill(2) */
    int watched_pid;
    bool must_quit;
    bool is_part;               /* of what its page server has, and it was not told the rest yet */
    int max_fd;                 /* the kernel gives the lowest free one: beyond it, few are left */
    struct pc__kept_table kept;
    size_t n_connections;
    struct connection connections[MAX_CONNECTIONS]; /* oldest first */
    uint64_t alone_since_ns;    /* while n_connections == 0 */
    uint64_t no_accept_before_ns;
};

/* Takes fd, also on failure. */
static bool keep(struct keeper *keeper, const struct pc__kept *what, int fd)
{
    struct stat status;

    if (fd < 0)
        return false;
    if (what->kind == 0 || what->kind >= PC__KEPT_LAST || what->sealed > 1 ||
        fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) ||
        pc__file_id(&status) != what->inode)
        goto refuse;

    struct pc__kept_record *old = pc__kept_find(&keeper->kept, what->inode);
    if (old != NULL) {
        close(fd);
        old->what = *what;
        return true;
    }
    if (fd > keeper->max_fd || pc__kept_add(&keeper->kept, what, fd) == NULL)
        goto refuse;
    return true;
refuse:
    close(fd);
    return false;
}

static void drop(struct keeper *keeper, uint64_t inode)
{
    struct pc__kept_record *gone = pc__kept_find(&keeper->kept, inode);

    if (gone == NULL)
        return;
    struct pc__link *before = gone->link.prev;
    for (size_t i = 0; i < keeper->n_connections; i++)
        if (keeper->connections[i].listed == gone)
            keeper->connections[i].listed = before == &keeper->kept.records
                                                ? NULL
                                                : pc__of(before, struct pc__kept_record, link);
    close(gone->fd);
    pc__kept_remove(&keeper->kept, gone);
}

/* False: the connection broke a rule, or asks for what cannot be done. */
static bool handle(struct keeper *keeper, struct connection *connection,
                   const struct message *message, int fd)
{
    if (message->op == OP_PUT) {
        const bool is_kept = keep(keeper, &message->what, fd);
        connection->serves |= is_kept;
        return is_kept;
    }
    if (fd >= 0) {
        close(fd);
        return false;
    }
    switch (message->op) {
    case OP_DROP:
        drop(keeper, message->what.inode);
        return true;
    case OP_LIST:
        if (connection->wants_list)
            return false; /* one list at a time */
        connection->wants_list = true;
        connection->list_after = message->sequence;
        return true;
    case OP_WHOLE:
        keeper->is_part = false;
        return true;
    case OP_QUIT:
        keeper->must_quit = true;
        return true;
    default:
        return false;
    }
}

/* Reads what has arrived. False: the connection is at its end, or is to be ended: then what it says from
 * here on is not heard, and what is kept, or how it is labelled, may not be what its page server has. */
static bool drain(struct keeper *keeper, struct connection *connection)
{
    for (int i = 0; i < MAX_PACKETS_A_PASS; i++) {
        struct message message;
        int fd;
        switch (receive_packet(connection->fd, &message, &fd)) {
        case RECEIVED:
            if (handle(keeper, connection, &message, fd))
                break;
            keeper->is_part |= connection->serves;
            return false;
        case RECEIVED_NOTHING:
            return true;
        case RECEIVED_NONSENSE:
            keeper->is_part |= connection->serves;
            return false;
        case RECEIVED_END:
            return false;
        }
    }
    return true;
}

static void close_connection(struct keeper *keeper, size_t i)
{
    close(keeper->connections[i].fd);
    keeper->n_connections--;
    memmove(&keeper->connections[i], &keeper->connections[i + 1],
            (keeper->n_connections - i) * sizeof keeper->connections[0]);
    if (keeper->n_connections == 0)
        keeper->alone_since_ns = now_ns();
}

/* Oldest connection first, so that a dead server's last words come before its successor's. */
static void drain_all(struct keeper *keeper)
{
    for (size_t i = 0; i < keeper->n_connections;)
        if (drain(keeper, &keeper->connections[i]))
            i++;
        else
            close_connection(keeper, i);
}

/* One batch, from where the one before it ended: all of them together walk over each record once. False:
 * the connection takes no answers. */
static bool answer_list(struct keeper *keeper, struct connection *connection)
{
    struct pc__link *const records = &keeper->kept.records;
    struct pc__link *link = records->next;
    bool has_more = false;
    size_t n_sent = 0;

    connection->wants_list = false;
    if (connection->listed != NULL && connection->listed->sequence <= connection->list_after)
        link = connection->listed->link.next;
    for (; link != records; link = link->next) {
        struct pc__kept_record *kept = pc__of(link, struct pc__kept_record, link);
        const struct message record = {.magic = MAGIC, .op = OP_RECORD,
                                       .sequence = kept->sequence, .what = kept->what};
        keeper->kept.n_compared++;
        if (kept->sequence <= connection->list_after)
            continue;
        has_more = n_sent == LIST_BATCH;
        if (!has_more && send_packet(connection->fd, &record, kept->fd) != 0) {
            if (errno != ETOOMANYREFS)
                return false;
            has_more = true;
        }
        if (has_more)
            break;
        connection->listed = kept;
        n_sent++;
    }
    const struct message end = {.magic = MAGIC, .op = OP_END,
                                .more = (uint16_t)((has_more ? END_MORE : 0) |
                                                   (keeper->is_part ? END_PART : 0))};
    if (send_packet(connection->fd, &end, -1) != 0)
        return false;
    connection->serves = true;
    return true;
}

static void answer_lists(struct keeper *keeper)
{
    bool is_wanted = false;
    for (size_t i = 0; i < keeper->n_connections; i++)
        is_wanted |= keeper->connections[i].wants_list;
    if (!is_wanted)
        return;
    drain_all(keeper);
    for (size_t i = 0; i < keeper->n_connections;)
        if (!keeper->connections[i].wants_list ||
            answer_list(keeper, &keeper->connections[i])) {
            i++;
        } else {
            /* It has ended, or takes no answers. What it said meanwhile, if anything, was the last. */
            if (drain(keeper, &keeper->connections[i]))
                keeper->is_part |= keeper->connections[i].serves;
            close_connection(keeper, i);
        }
}

static void accept_all(struct keeper *keeper)
{
    for (;;) {
        const int fd = accept4(keeper->listener_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) /* ENFILE: do not spin on it */
                keeper->no_accept_before_ns = now_ns() + ACCEPT_PAUSE_NS;
            return;
        }
        if (keeper->n_connections == MAX_CONNECTIONS)
            drain_all(keeper); /* some may have ended already, before they were accepted */
        if (keeper->n_connections == MAX_CONNECTIONS || !is_same_user(fd)) {
            close(fd);
            continue;
        }
        keeper->connections[keeper->n_connections++] = (struct connection){.fd = fd};
    }
}

/* Raises the limit as far as it goes. Returns the highest descriptor that may be kept: those
 * above are for connections, so that a full keeper can still be asked for what it holds. */
static int raise_descriptor_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 1023 - SPARE_DESCRIPTORS;
    if (limit.rlim_cur != limit.rlim_max) {
        const struct rlimit raised = {.rlim_cur = limit.rlim_max, .rlim_max = limit.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &raised) == 0)
            limit = raised;
    }
    const rlim_t n_usable = limit.rlim_cur > INT_MAX ? INT_MAX : limit.rlim_cur;
    return (int)n_usable - 1 - SPARE_DESCRIPTORS;
}

static bool has_ended(int pid)
{
    return kill(pid, 0) != 0 && errno == ESRCH;
}

/* Milliseconds until something must be looked at that no descriptor tells. */
static int poll_timeout_ms(const struct keeper *keeper, uint64_t now, uint64_t orphan_timeout_ns)
{
    uint64_t wait_ns = keeper->look_at_ns > now ? keeper->look_at_ns - now : 0;

    if (keeper->pid_fd < 0 && wait_ns > PID_POLL_NS)
        wait_ns = PID_POLL_NS;
    if (keeper->n_connections == 0) {
        const uint64_t alone_ns = now - keeper->alone_since_ns;
        const uint64_t left_ns = alone_ns < orphan_timeout_ns ? orphan_timeout_ns - alone_ns : 0;
        if (left_ns < wait_ns)
            wait_ns = left_ns;
    }
    if (keeper->no_accept_before_ns > now && keeper->no_accept_before_ns - now < wait_ns)
        wait_ns = keeper->no_accept_before_ns - now;
    return (int)((wait_ns + 999999u) / 1000000u);
}

/* The next page server finds it by its name only. */
static void look_after_name(struct keeper *keeper, uint64_t now)
{
    int fd;
    if (now < keeper->look_at_ns)
        return;
    keeper->look_at_ns = now + PC__LOCAL_LOOK_NS;
    if (pc__local_look(keeper->name, 2 * MAX_CONNECTIONS, &keeper->file, &fd) != PC_OK || fd < 0)
        return; /* where it cannot, it looks again; it has no log */
    accept_all(keeper); /* who came before the name went */
    answer_lists(keeper); /* as below: where it has read one for want of room */
    close(keeper->listener_fd);
    keeper->listener_fd = fd;
}

static void keep_until_the_end(struct keeper *keeper, uint64_t orphan_timeout_ns)
{
    while (!keeper->must_quit) {
        look_after_name(keeper, now_ns());
        const uint64_t now = now_ns(); /* after it: the last connection may have ended there */
        if (keeper->must_quit)
            return;
        if (keeper->n_connections == 0 && now - keeper->alone_since_ns >= orphan_timeout_ns)
            return;
        if (keeper->pid_fd < 0 && has_ended(keeper->watched_pid))
            return;

        struct pollfd watched[2 + MAX_CONNECTIONS];
        watched[0] = (struct pollfd){.fd = keeper->pid_fd, .events = POLLIN};
        watched[1] = (struct pollfd){
            .fd = keeper->no_accept_before_ns > now ? -1 : keeper->listener_fd, .events = POLLIN};
        for (size_t i = 0; i < keeper->n_connections; i++)
            watched[2 + i] =
                (struct pollfd){.fd = keeper->connections[i].fd, .events = POLLIN};
        const int n_ready = poll(watched, 2 + (nfds_t)keeper->n_connections,
                                 poll_timeout_ms(keeper, now, orphan_timeout_ns));
        if (n_ready <= 0)
            continue; /* timeout or signal: the conditions above decide */
        if (watched[0].revents != 0)
            return;
        drain_all(keeper);
        answer_lists(keeper);
        if (watched[1].revents != 0) {
            accept_all(keeper);
            answer_lists(keeper); /* where it has read one for want of room */
        }
    }
}

/* Its raylet has ended, so its page server is about to: who leaves last removes the files of both
 * their sockets. */
static void let_servers_leave(struct keeper *keeper)
{
    const uint64_t deadline = deadline_after(LEAVE_NS);
    while (keeper->n_connections > 0 && !keeper->must_quit && now_ns() < deadline) {
        (void)poll(NULL, 0, LEAVE_POLL_MS);
        drain_all(keeper);
    }
}

static int run(const char *listen_name, int watched_pid, uint64_t orphan_timeout_ns, bool is_part)
{
    struct keeper keeper = {
        .name = listen_name, .listener_fd = -1, .pid_fd = -1, .watched_pid = watched_pid,
        .is_part = is_part};

    if (watched_pid <= 0)
        return pc__fail(PC_ERR_RANGE, "the keeper cannot watch process %d", watched_pid);
    int rc = pc__local_listen(listen_name, 2 * MAX_CONNECTIONS, &keeper.listener_fd);
    if (rc != PC_OK)
        return rc;

    pc__local_note_file(listen_name, &keeper.file);
    pc__kept_init(&keeper.kept);
    keeper.max_fd = raise_descriptor_limit();
    keeper.alone_since_ns = now_ns();
#ifdef SYS_pidfd_open
    keeper.pid_fd = (int)syscall(SYS_pidfd_open, watched_pid, 0);
#endif
    if (keeper.pid_fd >= 0 || !has_ended(watched_pid))
        keep_until_the_end(&keeper, orphan_timeout_ns);
    let_servers_leave(&keeper);

    while (keeper.n_connections > 0)
        close_connection(&keeper, keeper.n_connections - 1);
    pc__each(link, &keeper.kept.records)
        close(pc__of(link, struct pc__kept_record, link)->fd);
    pc__kept_free(&keeper.kept);
    close_quietly(keeper.pid_fd);
    pc__local_close(listen_name, keeper.listener_fd);
    return PC_OK;
}

PC_API int pc_keeper_run(const char *listen_name, int watched_pid, uint64_t orphan_timeout_ns)
{
    return run(listen_name, watched_pid, orphan_timeout_ns, false);
}

PC_API int pc_keeper_run_part(const char *listen_name, int watched_pid, uint64_t orphan_timeout_ns)
{
    return run(listen_name, watched_pid, orphan_timeout_ns, true);
}
