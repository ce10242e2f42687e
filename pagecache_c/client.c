/* client.c - open, close, and the watch thread. See client.h for the parts, threads and locks.
 *
 * The watch thread has every signal blocked, never runs the caller's code, and is all that a
 * worker process gets from us. It receives on the socket; whoever calls sends.
 */
#include "client.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ------------------------------------------------------------ watch thread */

/* 0: nothing more to receive; negative: the connection is of no use. */
static int receive_all(pc_client *client)
{
    struct pc__packet *packet = client->packet;
    for (;;) {
        int rc = pc__conn_receive(client->socket, packet);
        if (rc != 1)
            return rc;
        switch (packet->message.header.type) {
        case PC__CTL_REPLY:
            pthread_mutex_lock(&client->lock);
            pc__call_reply(client, packet);
            pthread_mutex_unlock(&client->lock);
            break;
        case PC__CTL_FAIL:
            pc__conn_failed(&packet->message);
        default:
            pc__fds_close(packet->fds, &packet->n_fds);
            return pc__fail(PC_ERR_PROTOCOL, "the page server sent a message of type %u",
                            packet->message.header.type);
        }
    }
}

/* The connection is gone: nobody sends on it any more, and nothing sent will be answered. */
static bool lose(pc_client *client)
{
    pthread_mutex_lock(&client->lock);
    bool is_closing = client->state == PC__CONN_CLOSED;
    if (!is_closing) {
        client->state = PC__CONN_LOST;
        close(client->socket);
        client->socket = -1;
        client->trap.ops->lost(&client->trap, pc__clock_ns());
        pc__call_drop_all(client);
    }
    pthread_mutex_unlock(&client->lock);
    return !is_closing;
}

static void *watch(void *arg)
{
    pc_client *client = arg;
    for (;;) {
        pthread_mutex_lock(&client->lock);
        bool is_closing = client->state == PC__CONN_CLOSED;
        pc__outbox_flush(client);
        struct pollfd fds[2] = {
            {.fd = client->socket, .events = client->outbox ? POLLIN | POLLOUT : POLLIN},
            {.fd = client->nudge_fd, .events = POLLIN}};
        pthread_mutex_unlock(&client->lock);
        if (is_closing)
            break;
        if (poll(fds, 2, -1) < 0)
            continue; /* EINTR; the descriptors are ours and sound */
        if (fds[1].revents) {
            uint64_t count;
            (void)!read(client->nudge_fd, &count, sizeof count); /* only its coming matters */
        }
        if (fds[0].revents & (POLLIN | POLLHUP | POLLERR) && receive_all(client) < 0 &&
            (!lose(client) || pc__reattach(client)))
            break;
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
    pthread_mutex_init(&client->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&client->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int rc = copy_text(client->socket_name, sizeof client->socket_name - 1, options->socket_name,
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
    if (!rc)
        rc = pc__trap_open(client->wanted_trap, client->reattach_timeout_ns, &client->trap);
    const struct pc__patience patience = {.client = client,
                                          .deadline_ns = pc__deadline(options->connect_timeout_ns)};
    if (!rc)
        rc = pc__conn_hello(&patience, &client->socket);
    /* In every mode: the handler also names addresses that this process does not have. */
    if (!rc && pc__sig_install())
        rc = pc__fail(PC_ERR_NO_TRAP, "this process's SIGSEGV handler cannot be replaced");
    if (!rc) {
        client->state = PC__CONN_UP;
        client->epoch = 1;
        pc__clients_add(client);
        rc = pc__watch_start(client);
        if (rc)
            pc__clients_remove(client);
    }
    if (rc)
        free_client(client);
    else
        *out = client;
    return rc;
}

PC_API int pc_client_trap(pc_client *client)
{
    return client->trap.kind;
}

/* ------------------------------------------------------------------- close */

PC_API int pc_client_close(pc_client *client)
{
    const uint64_t one = 1;
    pc__clients_remove(client);
    pthread_mutex_lock(&client->lock);
    client->state = PC__CONN_CLOSED;
    pthread_cond_broadcast(&client->changed);
    (void)!write(client->nudge_fd, &one, sizeof one);
    /* Whoever waits in a call sees the state and leaves. */
    while (client->n_inside)
        pthread_cond_wait(&client->changed, &client->lock);
    pthread_mutex_unlock(&client->lock);
    if (client->has_watch)
        pthread_join(client->watch, NULL);
    pthread_mutex_lock(&client->lock);
    pc__call_drop_all(client);
    pc__outbox_clear(client);
    while (client->mappings)
        pc__mapping_take_down(client, client->mappings);
    pthread_mutex_unlock(&client->lock);
    free_client(client);
    return PC_OK;
}
