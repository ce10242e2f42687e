/* client.c - open, close, and the watch thread. See client.h for the parts, threads and locks.
 *
 * A page server that dies closes its socket; one that hangs (stopped, deadlocked) says nothing. So
 * while something is mapped that can have absent blocks, the watch thread pings a server that it
 * has not heard of for a while, and takes the connection for lost when nothing at all comes back.
 *
 * The watch thread has every signal blocked, never runs the caller's code, and is all that a
 * worker process gets from us. It receives on the socket; whoever calls sends.
 */
#include "client/client.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ------------------------------------------------------------ watch thread */

#define PING_MOST_NS 10000000000ull   /* between what was heard and the ping */
#define PING_LEAST_NS 50000000ull
#define SILENCE_LEAST_NS 1000000000ull /* a busy machine takes this long to answer */
#define GRACE_NS 1000000000ull        /* for a last try to re-attach after a silence */

static void let_go(pc_client *client, const struct pc__ctl_message *message)
{
    struct pc__ctl_let_go body;
    memcpy(&body, message->body, sizeof body);
    if (!body.region)
        return;
    pc__idle_end_all(client, body.region);
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next)
        if (mapping->region == body.region)
            mapping->loss = (uint32_t)body.loss;
}

/* 0: nothing more to receive; negative: the connection is of no use. */
static int receive_all(pc_client *client)
{
    struct pc__packet *packet = client->packet;
    for (;;) {
        int rc = pc__conn_receive(client->socket, packet);
        if (rc != 1)
            return rc;
        client->heard_ns = pc__clock_ns();
        client->pinged_ns = 0;
        switch (packet->message.header.type) {
        case PC__CTL_REPLY:
            pthread_mutex_lock(&client->lock);
            pc__call_reply(client, packet);
            pthread_mutex_unlock(&client->lock);
            break;
        case PC__CTL_LET_GO:
            pthread_mutex_lock(&client->lock);
            let_go(client, &packet->message);
            pthread_mutex_unlock(&client->lock);
            break;
        case PC__CTL_ENDED:
            pc__fds_close(packet->fds, &packet->n_fds);
            return pc__call_ended(client);
        case PC__CTL_FAIL:
            pc__conn_failed(client, client->socket, &packet->message);
        default:
            pc__fds_close(packet->fds, &packet->n_fds);
            return pc__fail(PC_ERR_PROTOCOL, "the page server sent a message of type %u",
                            packet->message.header.type);
        }
    }
}

/* What waits at an absent block would wait for ever if the server hangs. */
static bool needs_server(const pc_client *client)
{
    for (const struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next)
        if (mapping->state == PC__MAPPING_LIVE && mapping->trapped.needs_trap)
            return true;
    return false;
}

static uint64_t silence_ns(const pc_client *client)
{
    return client->reattach_timeout_ns > SILENCE_LEAST_NS ? client->reattach_timeout_ns
                                                          : SILENCE_LEAST_NS;
}

/* Under lock. Pings when it is time to; returns how long poll() may wait for an answer, or until
 * it is time. Without a mapping that is for ever: OPEN's reply comes after its mapping is known. */
static int attend(pc_client *client)
{
    uint64_t now = pc__clock_ns(), pause_ns = client->reattach_timeout_ns / 3;
    pause_ns = pause_ns < PING_LEAST_NS ? PING_LEAST_NS : pause_ns;
    pause_ns = pause_ns > PING_MOST_NS ? PING_MOST_NS : pause_ns;
    if (client->state != PC__CONN_UP || !client->mappings) {
        client->pinged_ns = 0;
        return -1;
    }
    if (!client->pinged_ns && now - client->heard_ns >= pause_ns) {
        client->heard_ns = now;
        if (needs_server(client)) {
            /* No room is no answer either; a dead connection poll() tells of. */
            (void)pc__conn_send(client->socket, PC__CTL_PING, PC__REQUEST_ALONE, NULL, 0, NULL, 0,
                                NULL, 0);
            client->pinged_ns = now;
        }
    }
    uint64_t passed_ns = now - (client->pinged_ns ? client->pinged_ns : client->heard_ns);
    uint64_t limit_ns = client->pinged_ns ? silence_ns(client) : pause_ns;
    uint64_t left_ns = passed_ns < limit_ns ? limit_ns - passed_ns : 0;
    return left_ns / 1000000u >= INT_MAX ? INT_MAX : (int)(left_ns / 1000000u) + 1;
}

/* Nothing was received since the ping, and everything that had come is received. */
static bool is_silent(const pc_client *client, uint64_t now)
{
    return client->pinged_ns && now - client->pinged_ns >= silence_ns(client);
}

/* The connection is gone: nobody sends on it any more, and nothing sent will be answered. */
static bool lose(pc_client *client, uint64_t since_ns)
{
    pthread_mutex_lock(&client->lock);
    bool is_closing = client->state == PC__CONN_CLOSED;
    if (!is_closing) {
        pc__client_goes(client, PC__CLIENT_LOSE);
        close(client->socket);
        client->socket = -1;
        client->trap.ops->lost(&client->trap, since_ns);
        pc__call_drop_all(client);
        pc__idle_end_all(client, 0); /* what is mapped next is asked for: the session may be over */
    }
    pthread_mutex_unlock(&client->lock);
    return !is_closing;
}

static void *watch(void *arg)
{
    pc_client *client = arg;
    client->heard_ns = pc__clock_ns();
    client->pinged_ns = 0;
    for (;;) {
        pthread_mutex_lock(&client->lock);
        bool is_closing = client->state == PC__CONN_CLOSED;
        pc__outbox_flush(client);
        struct pollfd fds[2] = {
            {.fd = client->socket, .events = client->outbox ? POLLIN | POLLOUT : POLLIN},
            {.fd = client->nudge_fd, .events = POLLIN}};
        int wait_ms = is_closing ? 0 : attend(client), look_ms = pc__idle_look(client);
        if (look_ms >= 0 && (wait_ms < 0 || look_ms < wait_ms))
            wait_ms = look_ms;
        pthread_mutex_unlock(&client->lock);
        if (is_closing)
            break;
        if (poll(fds, 2, wait_ms) < 0)
            continue; /* EINTR; the descriptors are ours and sound */
        if (fds[1].revents) {
            uint64_t count;
            (void)!read(client->nudge_fd, &count, sizeof count); /* only its coming matters */
        }
        bool is_lost = fds[0].revents & (POLLIN | POLLHUP | POLLERR) && receive_all(client) < 0;
        uint64_t since_ns = pc__clock_ns();
        if (!is_lost && is_silent(client, since_ns)) {
            is_lost = true;
            uint64_t waited_ns = client->reattach_timeout_ns;
            since_ns -= waited_ns > GRACE_NS ? waited_ns - GRACE_NS : 0;
        }
        if (is_lost && (!lose(client, since_ns) || pc__reattach(client, since_ns)))
            break;
        if (is_lost) {
            client->heard_ns = pc__clock_ns();
            client->pinged_ns = 0;
        }
    }
    return NULL;
}

int pc__watch_start(pc_client *client)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&client->watch, NULL, watch, client);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        errno = error;
        return pc__fail_errno("the watch thread");
    }
    client->has_watch = true;
    return PC_OK;
}

/* -------------------------------------------------------------------- open */

static int copy_text(char *to, size_t capacity, const char *from, const char *what)
{
    size_t length = from ? strlen(from) : 0;
    if (length == 0 || length >= capacity)
        return pc__fail(PC_ERR_RANGE, "a %s of %zu bytes", what, length);
    memcpy(to, from, length + 1);
    return PC_OK;
}

static int init(pc_client *client, const struct pc_client_options *options)
{
    client->socket = client->nudge_fd = -1;
    client->state = PC__CONN_LOST;
    client->wanted_trap = options->trap;
    client->reattach_timeout_ns = options->reattach_timeout_ns;
    client->outbox_end = &client->outbox;
    pc__conn_number(client);
    pthread_mutex_init(&client->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&client->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int rc = copy_text(client->socket_name, sizeof client->socket_name, options->socket_name,
                       "socket name");
    if (!rc)
        rc = copy_text(client->library_version, sizeof client->library_version,
                       options->library_version, "version");
    if (rc)
        return rc;
    client->packet = malloc(sizeof *client->packet);
    if (!client->packet)
        return pc__fail(PC_ERR_NO_MEMORY, "a client");
    client->nudge_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return client->nudge_fd < 0 ? pc__fail_errno("eventfd") : PC_OK;
}

static void free_client(pc_client *client)
{
    if (client->trap.ops)
        client->trap.ops->close(&client->trap, false);
    if (client->socket >= 0)
        close(client->socket);
    if (client->nudge_fd >= 0)
        close(client->nudge_fd);
    pthread_cond_destroy(&client->changed);
    pthread_mutex_destroy(&client->lock);
    free(client->packet);
    free(client);
}

PC_API int pc_client_open(const struct pc_client_options *options, pc_client **out)
{
    *out = NULL;
    pc_client *client = calloc(1, sizeof *client);
    if (!client)
        return pc__fail(PC_ERR_NO_MEMORY, "a client");
    int rc = init(client, options);
    client->take_signals = pc__sessions_install;
    if (!rc)
        rc = pc__trap_open(client->wanted_trap, client->reattach_timeout_ns, &client->trap);
    const struct pc__patience patience = {.client = client,
                                          .deadline_ns = pc__deadline(options->connect_timeout_ns)};
    if (!rc)
        rc = pc__conn_hello(&patience, &client->socket);
    /* In every mode: the handler also names addresses that this process does not have. */
    if (!rc && client->take_signals())
        rc = pc__fail(PC_ERR_NO_TRAP, "this process's SIGSEGV handler cannot be replaced");
    if (!rc) {
        pc__client_goes(client, PC__CLIENT_CONNECT);
        client->epoch = 1;
        pc__sessions_add(client);
        rc = pc__watch_start(client);
        if (rc)
            pc__sessions_remove(client);
    }
    if (rc)
        free_client(client);
    else
        *out = client;
    return rc;
}

PC_API int pc_client_has_ended(pc_client *client)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int ended = client->is_ended;
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return ended;
}

PC_API int pc_client_is_connected(pc_client *client)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int connected = client->state == PC__CONN_UP;
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return connected;
}

PC_API int pc_client_task(pc_client *client, const uint8_t *task)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    memcpy(client->task, task, sizeof client->task);
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return PC_OK;
}

PC_API uint64_t pc_client_server_id(pc_client *client)
{
    pc__enter(client);
    uint64_t server_id = atomic_load(&client->server_id);
    pc__leave(client);
    return server_id;
}

PC_API int pc_client_trap(pc_client *client)
{
    pc__enter(client);
    int kind = client->trap.kind;
    pc__leave(client);
    return kind;
}

PC_API int pc_client_trap_reason(pc_client *client, char *text, size_t text_bytes)
{
    pc__enter(client);
    snprintf(text, text_bytes, "%s", client->trap.reason);
    pc__leave(client);
    return PC_OK;
}

/* ------------------------------------------------------------------- close */

PC_API int pc_client_shut(pc_client *client)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&client->lock);
    pc__client_goes(client, PC__CLIENT_CLOSE);
    pthread_cond_broadcast(&client->changed);
    (void)!write(client->nudge_fd, &one, sizeof one);
    pthread_mutex_unlock(&client->lock);
    return PC_OK;
}

#define LEAVE_NS 1000000000ull

/* LEFT, and its answer. Not told: the server has cut the connection, and what it had not read is lost. */
static bool is_told(pc_client *client, int fd, uint64_t deadline_ns)
{
    struct pc__packet *packet = client->packet;
    const struct pc__ctl_header *header = &packet->message.header;
    const uint32_t request_id = PC__REQUEST_ALONE - 1; /* neither that of a PING nor of HELLO */
    bool is_said = false;
    for (uint64_t now; (now = pc__clock_ns()) < deadline_ns;) {
        int rc = is_said ? pc__conn_receive(fd, packet)
                         : pc__conn_send(fd, PC__CTL_LEFT, request_id, NULL, 0, NULL, 0, NULL, 0);
        if (rc < 0)
            return false;
        if (rc && is_said) {
            pc__fds_close(packet->fds, &packet->n_fds);
            if (header->type == PC__CTL_REPLY && header->request_id == request_id)
                return true;
        }
        is_said |= rc > 0;
        struct pollfd ready = {.fd = fd, .events = is_said ? POLLIN : POLLOUT};
        if (!rc)
            (void)poll(&ready, 1, (int)((deadline_ns - now) / 1000000u) + 1);
    }
    return is_said; /* it is slow, and will read it */
}

/* Nothing is mapped any more. Where the connection is lost, this is said on another one: a server that
 * looks only after all was unmapped would keep the leases for as long as this process lives. */
static void leave(pc_client *client)
{
    const uint64_t deadline_ns = pc__deadline(LEAVE_NS);
    if (client->socket >= 0 && is_told(client, client->socket, deadline_ns))
        return;
    int fd;
    if (!client->has_watch || client->is_ended || pc__conn_connect(client->socket_name, &fd))
        return; /* it never had a lease in this process, or no server has one of it */
    if (pc__conn_greet(client, fd) == PC_OK) /* read before LEFT, however late */
        (void)is_told(client, fd, deadline_ns);
    close(fd);
}

PC_API int pc_client_close(pc_client *client)
{
    pc__sessions_remove(client);
    (void)pc_client_shut(client);
    /* Whoever waits in a call sees the state and leaves. */
    pthread_mutex_lock(&client->lock);
    while (pc__count_get(&client->n_inside))
        pthread_cond_wait(&client->changed, &client->lock);
    pthread_mutex_unlock(&client->lock);
    if (client->has_watch)
        pthread_join(client->watch, NULL);
    pthread_mutex_lock(&client->lock);
    pc__call_drop_all(client);
    pc__outbox_clear(client);
    bool is_read = false; /* by libraries, of what the page server keeps for them */
    while (client->mappings) {
        is_read |= client->mappings->is_kept && client->mappings->is_leased;
        pc__ended_keep(client, client->mappings);
        pc__mapping_take_down(client, client->mappings);
    }
    pthread_mutex_unlock(&client->lock);
    if (!is_read)
        leave(client);
    free_client(client);
    return PC_OK;
}
