/* control.c - the processes of this node: hello, what they say, and their end.
 *
 * Entered by the loop that owns the client. When a client's socket closes, for whatever reason,
 * its waiters, jobs and unsealed regions go, then its descriptors. Its leases go when its process has
 * no memory any more, or says so (leases.c): nothing of a dead process stays. Never blocks: a client that does not read its replies is cut off.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/miss/miss.h"
#include "engine/serve/serve.h"
#include "engine/store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define PACKETS_PER_EVENT 32
#define HELLO_TIMEOUT_NS 5000000000ull
#define ACCEPT_PAUSE_NS 100000000ull

/* ---------------------------------------------------------- hello and end */

static void close_session(struct pc__session *session)
{
    struct pc__loop *loop = session->loop;
    if (session->closed)
        return;
    session->closed = true;
    struct pc__lessee *lessee = session->lessee;
    /* Of an engine that stops, nothing that was leased changes any more. */
    const bool stages = lessee ? lessee->stages : session->stages;
    const bool goes_on = (session->n_mappings || stages) && lessee && !session->left &&
                         !loop->stopping && pc__lessee_lives(lessee);
    if (loop->stopping)
        pc__count_add(&loop->engine->count.leases_at_stop, session->n_mappings);
    while (session->n_mappings)
        pc__session_drop_mapping(session, &session->mappings[session->n_mappings - 1], goes_on);
    pc__session_gathers_end(session);
    pc__session_abandon_all(session);
    if (stages && !goes_on)
        pc__layers_orphan(loop->engine, pc__layer_owner(session));
    if (lessee)
        pc__lessee_leave(loop->engine, lessee, goes_on);
    pc__watch_remove(loop, session->watch);
    pc__watch_remove(loop, session->trap_watch);
    close(session->fd);
    if (session->uffd >= 0)
        close(session->uffd);
    if (session->slots_event >= 0)
        close(session->slots_event);
    pc__windows_owner_put(session->window_owner);
    pc__count_sub(&loop->engine->count.clients, 1);
    pc__link_remove(&session->link);
    free(session->mappings);
    free(session->given_up);
    free(session);
}

static int take_control_page(struct pc__session *session, uint64_t number, int page_fd, int event_fd)
{
    struct stat st;
    if (fstat(page_fd, &st) || st.st_size != (off_t)sizeof *session->page)
        return pc__fail(PC_ERR_PROTOCOL, "a control page of the wrong size");
    /* A client that could shrink it could kill us with SIGBUS. The server before us has sealed it
     * already, where the client comes from there; sealed seals cannot be added to. */
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    int has = fcntl(page_fd, F_GET_SEALS);
    if (has < 0 || ((has & seals) != seals && fcntl(page_fd, F_ADD_SEALS, seals)))
        return pc__fail_errno("sealing the size of a control page");
    void *page = mmap(NULL, sizeof *session->page, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    if (page == MAP_FAILED)
        return pc__fail_errno("mmap of a control page");
    session->window_owner = pc__windows_owner(page, number, pc__process_of_peer(session->fd));
    if (!session->window_owner) {
        munmap(page, sizeof *session->page);
        return pc__fail(PC_ERR_NO_MEMORY, "a control page");
    }
    session->page = page;
    session->slots_event = event_fd;
    if (session->page->magic != PC__CONTROL_MAGIC)
        return pc__fail(PC_ERR_PROTOCOL, "a control page without its magic");
    if (!atomic_load(&session->page->head)) /* else it has used more, perhaps, under the last server */
        atomic_store(&session->page->limit, session->loop->engine->window_limit);
    int flags = fcntl(event_fd, F_GETFL);
    if (flags < 0 || fcntl(event_fd, F_SETFL, flags | O_NONBLOCK))
        return pc__fail_errno("F_SETFL on an eventfd");
    session->trap_watch =
        pc__watch_add(session->loop, PC__WATCH_SLOTS, event_fd, 0, session, EPOLLIN);
    return session->trap_watch ? PC_OK : PC_ERR_SYSTEM;
}

/* Takes the descriptors it uses out of fds[] (sets them to -1). Negative: close the client. */
static int on_hello(struct pc__session *session, const struct pc__ctl_message *message, int *fds,
                    int n_fds)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__ctl_hello hello, mine = {.wire_version = PC__WIRE_VERSION,
                                        .sender_id = engine->server_id};
    memcpy(&hello, message->body, sizeof hello);
    memcpy(mine.library_version, engine->library_version, sizeof mine.library_version);
    int rc = PC_OK;
    if (hello.wire_version != PC__WIRE_VERSION ||
        strncmp(hello.library_version, mine.library_version, sizeof mine.library_version) != 0) {
        hello.library_version[sizeof hello.library_version - 1] = '\0';
        rc = pc__fail(PC_ERR_VERSION_MISMATCH, "it is of version %s (wire %u), this page server of %s "
                      "(wire %u)", hello.library_version, (unsigned)hello.wire_version,
                      mine.library_version, (unsigned)mine.wire_version);
    } else if ((hello.trap == PC_TRAP_UFFD_FULL || hello.trap == PC_TRAP_UFFD_USER) && n_fds == 1) {
        session->uffd = fds[0];
        fds[0] = -1;
        int flags = fcntl(session->uffd, F_GETFL);
        session->trap_watch =
            flags < 0 || fcntl(session->uffd, F_SETFL, flags | O_NONBLOCK)
                ? NULL
                : pc__watch_add(session->loop, PC__WATCH_UFFD, session->uffd, 0, session, EPOLLIN);
        rc = session->trap_watch ? PC_OK : PC_ERR_PROTOCOL;
    } else if (hello.trap == PC_TRAP_SIGSEGV && n_fds == 2) {
        rc = take_control_page(session, hello.sender_id, fds[0], fds[1]);
        if (session->slots_event >= 0)
            fds[1] = -1;
    } else {
        rc = pc__fail(PC_ERR_PROTOCOL, "a hello without its descriptors");
    }
    if (!rc && hello.sender_id) {
        session->lessee = pc__lessee_join(engine, hello.sender_id, session->fd);
        rc = session->lessee ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a client");
        if (session->lessee) {
            pc__turn_take(session, &session->lessee->turn);
            session->waits = &session->lessee->waits;
        }
    }
    session->trap = (int)hello.trap;
    session->said_hello = !rc;
    pc__session_send(session, PC__CTL_REPLY, message->header.request_id, rc, &mine, sizeof mine, -1);
    return rc;
}

/* Python passes it on. Lost where there is no memory for it: the task dies without a cause then. */
static void take_last_words(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__ctl_last_words words;
    memcpy(&words, message->body, sizeof words);
    struct pc_event event = {.kind = PC_EVENT_TASK_ENDED,
                             .error = words.error,
                             .region = words.region,
                             .version = words.version,
                             .block = words.block};
    for (size_t i = 0; i < sizeof words.task; i++)
        snprintf(event.text + 2 * i, 3, "%02x", words.task[i]);
    bool is_taken = pc__engine_request(session->loop->engine, &event);
    pc__session_reply(session, message, is_taken ? PC_OK : PC_ERR_NO_MEMORY);
}

static int handle(struct pc__session *session, const struct pc__ctl_message *message, int *fds,
                  int n_fds)
{
    bool may_bring = message->header.type == PC__CTL_STAGE ||
                     message->header.type == PC__CTL_GATHER;
    if (message->header.type != PC__CTL_HELLO && (!session->said_hello || (n_fds && !may_bring)))
        return pc__fail(PC_ERR_PROTOCOL, "a message before hello, or with descriptors");
    switch (message->header.type) {
    case PC__CTL_HELLO:
        if (session->said_hello)
            return pc__fail(PC_ERR_PROTOCOL, "a second hello");
        return on_hello(session, message, fds, n_fds);
    case PC__CTL_CREATE:
        pc__session_create(session, message);
        return PC_OK;
    case PC__CTL_SEAL:
        pc__session_seal(session, message);
        return PC_OK;
    case PC__CTL_ABANDON:
        pc__session_abandon(session, message);
        return PC_OK;
    case PC__CTL_OPEN:
        pc__session_open(session, message, false);
        return PC_OK;
    case PC__CTL_ATTACH:
        pc__session_open(session, message, true);
        return PC_OK;
    case PC__CTL_CLOSE:
        return pc__session_close_mapping(session, message);
    case PC__CTL_PREFETCH:
        pc__session_prefetch(session, message);
        return PC_OK;
    case PC__CTL_READS:
        pc__session_reads(session, message);
        return PC_OK;
    case PC__CTL_EVICTED:
        pc__session_evicted(session, message);
        return PC_OK;
    case PC__CTL_STAGE:
        pc__session_stage(session, message, fds, n_fds);
        return PC_OK;
    case PC__CTL_LAYER_FILE:
        pc__session_layer_file(session, message);
        return PC_OK;
    case PC__CTL_RESOLVE:
        pc__session_resolve(session, message);
        return PC_OK;
    case PC__CTL_GATHER:
        pc__session_gather(session, message, n_fds, fds);
        return PC_OK;
    case PC__CTL_RETIRE:
        pc__session_retire(session, message);
        return PC_OK;
    case PC__CTL_LAST_WORDS:
        take_last_words(session, message);
        return PC_OK;
    case PC__CTL_PING:
        pc__session_reply(session, message, PC_OK);
        return PC_OK;
    case PC__CTL_LEFT:
    case PC__CTL_ATTACHED:
        session->left = message->header.type == PC__CTL_LEFT;
        if (session->lessee)
            pc__lessee_attached(session->loop->engine, session->lessee, session->id);
        if (message->header.request_id)
            pc__session_reply(session, message, PC_OK);
        return PC_OK;
    default:
        return pc__fail(PC_ERR_PROTOCOL, "a message that only servers send");
    }
}

/* One packet. 1: handled; 0: none there; negative: the client is to be closed. */
static int receive(struct pc__session *session)
{
    uint8_t packet[PC__CTL_MAX_BYTES];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(PC__CTL_MAX_FDS * sizeof(int))];
    } control;
    struct iovec into = {packet, sizeof packet};
    struct msghdr header = {.msg_iov = &into,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    /* A client that closed with our words unread is a reset at first: what it said comes after that. */
    ssize_t got;
    do {
        got = recvmsg(session->fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == ECONNRESET);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    int fds[PC__CTL_MAX_FDS] = {-1, -1}, n_fds = 0;
    for (struct cmsghdr *at = got > 0 ? CMSG_FIRSTHDR(&header) : NULL; at;
         at = CMSG_NXTHDR(&header, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
            if (n_fds < PC__CTL_MAX_FDS)
                fds[n_fds++] = fd;
            else
                close(fd);
        }
    }
    int rc;
    struct pc__ctl_message message;
    pc__forget_message(); /* what is said of this packet is of this packet */
    if (got <= 0)
        rc = PC_ERR_CLOSED;
    else if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        rc = pc__fail(PC_ERR_PROTOCOL, "a packet over the limit");
    else if (!(rc = pc__ctl_parse(packet, (size_t)got, &message)))
        rc = handle(session, &message, fds, n_fds);
    for (int i = 0; i < n_fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return rc ? rc : 1;
}

/* 0: the kernel does not say. */
static pid_t pid_of(int fd)
{
    struct ucred who = {0};
    socklen_t bytes = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) ? 0 : who.pid;
}

void pc__session_event(struct pc__loop *loop, struct pc__session *session, uint32_t events)
{
    (void)events;
    for (int i = 0; i < PACKETS_PER_EVENT; i++) {
        int rc = receive(session);
        if (rc == 0)
            return;
        if (rc < 0) {
            if (rc != PC_ERR_CLOSED) {
                const char *cause = pc_last_message();
                pc__count_add(&loop->engine->count.bad_messages, 1);
                pc__engine_event(loop->engine, PC_EVENT_LOG, rc, 0, 0,
                                 "closed a local connection of process %d: %s%s%s",
                                 (int)pid_of(session->fd), pc_strerror(rc), *cause ? ": " : "", cause);
            }
            close_session(session);
            return;
        }
    }
}

static void add_session(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__session *session = loop->stopping ? NULL : calloc(1, sizeof *session);
    if (session) {
        *session = (struct pc__session){.loop = loop,
                                      .id = mail->a,
                                      .fd = mail->fd,
                                      .uffd = -1,
                                      .slots_event = -1,
                                      .hello_by_ns = pc__now_ns() + HELLO_TIMEOUT_NS};
        pc__link_init(&session->gathers);
        pc__link_init(&session->areas);
        session->watch = pc__watch_add(loop, PC__WATCH_CLIENT, mail->fd, 0, session, EPOLLIN);
    }
    if (!session || !session->watch) {
        free(session);
        close(mail->fd);
        return;
    }
    pc__link_push(&loop->sessions, &session->link);
    pc__count_add(&loop->engine->count.clients, 1);
}

/* Who asks stays in the backlog, which epoll would report again and again: look away meanwhile. */
static void pause_accepting(struct pc__loop *loop, int error)
{
    pc__watch_change(loop, loop->listen_watch, 0);
    loop->accept_again_ns = pc__now_ns() + ACCEPT_PAUSE_NS;
    if (!loop->accept_fails)
        pc__engine_event(loop->engine, PC_EVENT_LOG, PC_ERR_DESCRIPTORS, 0, 0,
                         "cannot accept local connections for now: %s", strerror(error));
    loop->accept_fails = true;
}

bool pc__session_accept(struct pc__loop *loop, int listen_fd)
{
    struct pc_engine *engine = loop->engine;
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            pause_accepting(loop, errno);
        return false;
    }
    loop->accept_fails = false;
    struct ucred who;
    socklen_t bytes = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) || who.uid != geteuid()) {
        pc__count_add(&engine->count.bad_messages, 1);
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_DENIED, 0, 0,
                         "refused a local connection of user %u", (unsigned)who.uid);
        close(fd);
        return true;
    }
    pthread_mutex_lock(&engine->lock);
    struct pc__mail mail = {.run = add_session, .a = ++engine->next_session_id, .fd = fd};
    struct pc__loop *to = &engine->loops[engine->next_loop++ % (unsigned)engine->n_loops];
    pthread_mutex_unlock(&engine->lock);
    if (to == loop)
        add_session(loop, &mail);
    else if (pc__loop_post(to, &mail))
        close(fd);
    return true;
}

uint64_t pc__sessions_deadline(struct pc__loop *loop)
{
    uint64_t earliest = loop->accept_again_ns ? loop->accept_again_ns : UINT64_MAX;
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        if (!session->said_hello && session->hello_by_ns < earliest)
            earliest = session->hello_by_ns;
        if (session->stray_by_ns && session->stray_by_ns < earliest)
            earliest = session->stray_by_ns;
        if (session->areas_by_ns && session->areas_by_ns < earliest)
            earliest = session->areas_by_ns;
    }
    return earliest;
}

void pc__sessions_tick(struct pc__loop *loop, uint64_t now_ns)
{
    if (loop->accept_again_ns && loop->accept_again_ns <= now_ns) {
        loop->accept_again_ns = 0;
        pc__watch_change(loop, loop->listen_watch, EPOLLIN);
    }
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        pc__fault_check_stray(session, now_ns);
        pc__session_check_areas(session, now_ns);
        if (session->said_hello || session->hello_by_ns > now_ns)
            continue;
        pc__count_add(&loop->engine->count.bad_messages, 1);
        pc__engine_event(loop->engine, PC_EVENT_LOG, PC_ERR_TIMEOUT, 0, 0,
                         "closed a local connection that never said hello");
        close_session(session);
    }
}

void pc__sessions_close(struct pc__loop *loop)
{
    while (!pc__link_empty(&loop->sessions))
        close_session(pc__of(loop->sessions.next, struct pc__session, link));
}
