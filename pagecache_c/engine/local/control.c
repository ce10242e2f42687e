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

static void close_client(struct pc__session *client)
{
    struct pc__loop *loop = client->loop;
    if (client->closed)
        return;
    client->closed = true;
    struct pc__lessee *lessee = client->lessee;
    /* Of an engine that stops, nothing that was leased changes any more. */
    const bool stages = lessee ? lessee->stages : client->stages;
    const bool goes_on = (client->n_mappings || stages) && lessee && !client->left &&
                         !loop->stopping && pc__lessee_lives(lessee);
    while (client->n_mappings)
        pc__session_drop_mapping(client, &client->mappings[client->n_mappings - 1], goes_on);
    pc__session_gathers_end(client);
    pc__session_abandon_all(client);
    if (stages && !goes_on)
        pc__layers_orphan(loop->engine, pc__layer_owner(client));
    if (lessee)
        pc__lessee_leave(loop->engine, lessee, goes_on);
    pc__watch_remove(loop, client->watch);
    pc__watch_remove(loop, client->trap_watch);
    close(client->fd);
    if (client->uffd >= 0)
        close(client->uffd);
    if (client->slots_event >= 0)
        close(client->slots_event);
    pc__windows_owner_put(client->window_owner);
    pc__count_sub(&loop->engine->count.clients, 1);
    pc__link_remove(&client->link);
    free(client->mappings);
    free(client->given_up);
    free(client);
}

static int take_control_page(struct pc__session *client, uint64_t number, int page_fd, int event_fd)
{
    struct stat st;
    if (fstat(page_fd, &st) || st.st_size != (off_t)sizeof *client->page)
        return pc__fail(PC_ERR_PROTOCOL, "a control page of the wrong size");
    /* A client that could shrink it could kill us with SIGBUS. The server before us has sealed it
     * already, where the client comes from there; sealed seals cannot be added to. */
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    int has = fcntl(page_fd, F_GET_SEALS);
    if (has < 0 || ((has & seals) != seals && fcntl(page_fd, F_ADD_SEALS, seals)))
        return pc__fail_errno("sealing the size of a control page");
    void *page = mmap(NULL, sizeof *client->page, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    if (page == MAP_FAILED)
        return pc__fail_errno("mmap of a control page");
    client->window_owner = pc__windows_owner(page, number, pc__process_of_peer(client->fd));
    if (!client->window_owner) {
        munmap(page, sizeof *client->page);
        return pc__fail(PC_ERR_NO_MEMORY, "a control page");
    }
    client->page = page;
    client->slots_event = event_fd;
    if (client->page->magic != PC__CONTROL_MAGIC)
        return pc__fail(PC_ERR_PROTOCOL, "a control page without its magic");
    if (!atomic_load(&client->page->head)) /* else it has used more, perhaps, under the last server */
        atomic_store(&client->page->limit, client->loop->engine->window_limit);
    int flags = fcntl(event_fd, F_GETFL);
    if (flags < 0 || fcntl(event_fd, F_SETFL, flags | O_NONBLOCK))
        return pc__fail_errno("F_SETFL on an eventfd");
    client->trap_watch =
        pc__watch_add(client->loop, PC__WATCH_SLOTS, event_fd, 0, client, EPOLLIN);
    return client->trap_watch ? PC_OK : PC_ERR_SYSTEM;
}

/* Takes the descriptors it uses out of fds[] (sets them to -1). Negative: close the client. */
static int on_hello(struct pc__session *client, const struct pc__ctl_message *message, int *fds,
                    int n_fds)
{
    struct pc_engine *engine = client->loop->engine;
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
        client->uffd = fds[0];
        fds[0] = -1;
        int flags = fcntl(client->uffd, F_GETFL);
        client->trap_watch =
            flags < 0 || fcntl(client->uffd, F_SETFL, flags | O_NONBLOCK)
                ? NULL
                : pc__watch_add(client->loop, PC__WATCH_UFFD, client->uffd, 0, client, EPOLLIN);
        rc = client->trap_watch ? PC_OK : PC_ERR_PROTOCOL;
    } else if (hello.trap == PC_TRAP_SIGSEGV && n_fds == 2) {
        rc = take_control_page(client, hello.sender_id, fds[0], fds[1]);
        if (client->slots_event >= 0)
            fds[1] = -1;
    } else {
        rc = pc__fail(PC_ERR_PROTOCOL, "a hello without its descriptors");
    }
    if (!rc && hello.sender_id) {
        client->lessee = pc__lessee_join(engine, hello.sender_id, client->fd);
        rc = client->lessee ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a client");
        if (client->lessee)
            pc__turn_take(client, &client->lessee->turn);
    }
    client->trap = (int)hello.trap;
    client->said_hello = !rc;
    pc__session_send(client, PC__CTL_REPLY, message->header.request_id, rc, &mine, sizeof mine, -1);
    return rc;
}

/* Python passes it on. Lost where there is no memory for it: the task dies without a cause then. */
static void take_last_words(struct pc__session *client, const struct pc__ctl_message *message)
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
    bool is_taken = pc__engine_ask(client->loop->engine, &event);
    pc__session_reply(client, message, is_taken ? PC_OK : PC_ERR_NO_MEMORY);
}

static int handle(struct pc__session *client, const struct pc__ctl_message *message, int *fds,
                  int n_fds)
{
    bool may_bring = message->header.type == PC__CTL_STAGE ||
                     message->header.type == PC__CTL_GATHER;
    if (message->header.type != PC__CTL_HELLO && (!client->said_hello || (n_fds && !may_bring)))
        return pc__fail(PC_ERR_PROTOCOL, "a message before hello, or with descriptors");
    switch (message->header.type) {
    case PC__CTL_HELLO:
        if (client->said_hello)
            return pc__fail(PC_ERR_PROTOCOL, "a second hello");
        return on_hello(client, message, fds, n_fds);
    case PC__CTL_CREATE:
        pc__session_create(client, message);
        return PC_OK;
    case PC__CTL_SEAL:
        pc__session_seal(client, message);
        return PC_OK;
    case PC__CTL_ABANDON:
        pc__session_abandon(client, message);
        return PC_OK;
    case PC__CTL_OPEN:
        pc__session_open(client, message, false);
        return PC_OK;
    case PC__CTL_ATTACH:
        pc__session_open(client, message, true);
        return PC_OK;
    case PC__CTL_CLOSE:
        return pc__session_close_mapping(client, message);
    case PC__CTL_PREFETCH:
        pc__session_prefetch(client, message);
        return PC_OK;
    case PC__CTL_READS:
        pc__session_reads(client, message);
        return PC_OK;
    case PC__CTL_EVICTED:
        pc__session_evicted(client, message);
        return PC_OK;
    case PC__CTL_STAGE:
        pc__session_stage(client, message, fds, n_fds);
        return PC_OK;
    case PC__CTL_RESOLVE:
        pc__session_resolve(client, message);
        return PC_OK;
    case PC__CTL_GATHER:
        pc__session_gather(client, message, n_fds, fds);
        return PC_OK;
    case PC__CTL_RETIRE:
        pc__session_retire(client, message);
        return PC_OK;
    case PC__CTL_LAST_WORDS:
        take_last_words(client, message);
        return PC_OK;
    case PC__CTL_PING:
        pc__session_reply(client, message, PC_OK);
        return PC_OK;
    case PC__CTL_LEFT:
    case PC__CTL_ATTACHED:
        client->left = message->header.type == PC__CTL_LEFT;
        if (client->lessee)
            pc__lessee_attached(client->loop->engine, client->lessee, client->id);
        if (message->header.request_id)
            pc__session_reply(client, message, PC_OK);
        return PC_OK;
    default:
        return pc__fail(PC_ERR_PROTOCOL, "a message that only servers send");
    }
}

/* One packet. 1: handled; 0: none there; negative: the client is to be closed. */
static int receive(struct pc__session *client)
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
        got = recvmsg(client->fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
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
        rc = handle(client, &message, fds, n_fds);
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

void pc__session_event(struct pc__loop *loop, struct pc__session *client, uint32_t events)
{
    (void)events;
    for (int i = 0; i < PACKETS_PER_EVENT; i++) {
        int rc = receive(client);
        if (rc == 0)
            return;
        if (rc < 0) {
            if (rc != PC_ERR_CLOSED) {
                const char *cause = pc_last_message();
                pc__count_add(&loop->engine->count.bad_messages, 1);
                pc__engine_event(loop->engine, PC_EVENT_LOG, rc, 0, 0,
                                 "closed a local connection of process %d: %s%s%s",
                                 (int)pid_of(client->fd), pc_strerror(rc), *cause ? ": " : "", cause);
            }
            close_client(client);
            return;
        }
    }
}

static void add_client(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__session *client = loop->stopping ? NULL : calloc(1, sizeof *client);
    if (client) {
        *client = (struct pc__session){.loop = loop,
                                      .id = mail->a,
                                      .fd = mail->fd,
                                      .uffd = -1,
                                      .slots_event = -1,
                                      .hello_by_ns = pc__now_ns() + HELLO_TIMEOUT_NS};
        pc__link_init(&client->gathers);
        pc__link_init(&client->areas);
        client->watch = pc__watch_add(loop, PC__WATCH_CLIENT, mail->fd, 0, client, EPOLLIN);
    }
    if (!client || !client->watch) {
        free(client);
        close(mail->fd);
        return;
    }
    pc__link_push(&loop->clients, &client->link);
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
    struct pc__mail mail = {.run = add_client, .a = ++engine->next_client_id, .fd = fd};
    struct pc__loop *to = &engine->loops[engine->next_loop++ % (unsigned)engine->n_loops];
    pthread_mutex_unlock(&engine->lock);
    if (to == loop)
        add_client(loop, &mail);
    else if (pc__loop_post(to, &mail))
        close(fd);
    return true;
}

uint64_t pc__sessions_deadline(struct pc__loop *loop)
{
    uint64_t earliest = loop->accept_again_ns ? loop->accept_again_ns : UINT64_MAX;
    pc__each(link, &loop->clients)
    {
        struct pc__session *client = pc__of(link, struct pc__session, link);
        if (!client->said_hello && client->hello_by_ns < earliest)
            earliest = client->hello_by_ns;
        if (client->stray_by_ns && client->stray_by_ns < earliest)
            earliest = client->stray_by_ns;
        if (client->areas_by_ns && client->areas_by_ns < earliest)
            earliest = client->areas_by_ns;
    }
    return earliest;
}

void pc__sessions_tick(struct pc__loop *loop, uint64_t now_ns)
{
    if (loop->accept_again_ns && loop->accept_again_ns <= now_ns) {
        loop->accept_again_ns = 0;
        pc__watch_change(loop, loop->listen_watch, EPOLLIN);
    }
    pc__each(link, &loop->clients)
    {
        struct pc__session *client = pc__of(link, struct pc__session, link);
        pc__fault_check_stray(client, now_ns);
        pc__session_check_areas(client, now_ns);
        if (client->said_hello || client->hello_by_ns > now_ns)
            continue;
        pc__count_add(&loop->engine->count.bad_messages, 1);
        pc__engine_event(loop->engine, PC_EVENT_LOG, PC_ERR_TIMEOUT, 0, 0,
                         "closed a local connection that never said hello");
        close_client(client);
    }
}

void pc__sessions_close(struct pc__loop *loop)
{
    while (!pc__link_empty(&loop->clients))
        close_client(pc__of(loop->clients.next, struct pc__session, link));
}
