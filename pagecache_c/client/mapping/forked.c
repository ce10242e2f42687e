/* forked.c - in a child of fork. See client.h.
 *
 * A child has none of the parent's threads, and must use none of its descriptors: while the child
 * held the socket the server would not see the parent die. Ranges of the parent are not inherited
 * (MADV_DONTFORK), for without a trap their holes would read as zeros.
 *
 * fork() itself: every lock is taken before it, in the order of client.h, so the tables that the
 * child gets are consistent. In the child at once: descriptors closed, ranges marked as guards, a
 * guard laid where private copies were (their addresses are anybody's). Then, when the program
 * asks: pc_client_after_fork maps anew what can be had.
 */
#include "client/client.h"

#include <inttypes.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t clients_lock = PTHREAD_MUTEX_INITIALIZER; /* clients, their next */
static pc_client *clients;
static pthread_once_t registered = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    pthread_mutex_lock(&clients_lock);
    for (pc_client *client = clients; client; client = client->next)
        pthread_mutex_lock(&client->lock);
    pc__ended_before_fork();
    pc__range_before_fork();
}

static void after_fork_in_parent(void)
{
    pc__range_after_fork(false);
    pc__ended_after_fork();
    for (pc_client *client = clients; client; client = client->next)
        pthread_mutex_unlock(&client->lock);
    pthread_mutex_unlock(&clients_lock);
}

/* A guard: no access, so that the signal handler is asked, which knows why. is_ours: what is
 * mapped there now is this mapping; else nothing should be, and if something is it stays. */
static void guard(struct pc__mapping *mapping, int why, bool is_ours)
{
    void *at = (void *)(uintptr_t)mapping->trapped.address;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE |
                (is_ours ? MAP_FIXED : MAP_FIXED_NOREPLACE);
    pc__mapping_goes(mapping, PC__MAPPING_GUARD);
    mapping->error = why;
    mapping->is_leased = false;
    if (!mapping->trapped.address)
        return;
    if (mmap(at, mapping->trapped.length_bytes, PROT_NONE, flags, -1, 0) == at) {
        pc__range_set(mapping->trapped.address, PC__RANGE_GUARD, why);
    } else {
        pc__range_set(mapping->trapped.address, PC__RANGE_GONE, why);
        mapping->trapped.address = 0;
    }
}

/* What was built here came along with the fork, private; but the lease is the parent's. It is nobody's
 * to use until we have one of our own; `error` says whether it needs one. */
static void hold(struct pc__mapping *mapping)
{
    mapping->error = mapping->is_leased ? PC_ERR_FORKED : PC_OK;
    if (mapping->error)
        pc__mapping_goes(mapping, PC__MAPPING_GUARD);
    mapping->is_leased = false;
}

/* Everything that needs a server becomes a guard; then the descriptors go. in_new_child: nothing
 * of the mappings was inherited, but for what was built here. */
static void detach(pc_client *client, bool in_new_child)
{
    struct pc__mapping *next;
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = next) {
        next = mapping->next;
        if (mapping->is_built && in_new_child && mapping->state == PC__MAPPING_LIVE)
            hold(mapping);
        else if (mapping->state == PC__MAPPING_LIVE ? !mapping->is_built || mapping->is_leased
                                                    : mapping->is_built && mapping->error &&
                                                          !in_new_child)
            guard(mapping, PC_ERR_FORKED, !in_new_child);
    }
    if (client->socket >= 0)
        close(client->socket);
    if (client->nudge_fd >= 0)
        close(client->nudge_fd);
    client->socket = client->nudge_fd = -1;
    if (client->trap.ops)
        client->trap.ops->close(&client->trap, true);
}

static void leave_parent(pc_client *client)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&client->changed, &monotonic); /* the parent's waiters are not here */
    pthread_condattr_destroy(&monotonic);
    client->has_watch = false;
    pc__publish(&client->n_inside, 0); /* nobody else is here; carries nothing */
    client->calls = NULL; /* on stacks of threads that are not here */
    pc__outbox_clear(client);
    memset(client->task, 0, sizeof client->task); /* the parent's: it goes on */
    detach(client, true);
    if (client->state != PC__CONN_CLOSED)
        pc__client_goes(client, PC__CLIENT_FORK);
    struct pc__mapping *next;
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = next) {
        next = mapping->next;
        mapping->is_dropping = mapping->is_sealing = false;
        if (mapping->is_building)
            pc__build_close_fd(mapping);
        /* Its thread is not here, or nobody uses it. */
        if (mapping->state == PC__MAPPING_OPENING || !mapping->users) {
            mapping->is_leased = false;
            pc__mapping_take_down(client, mapping);
        }
    }
}

static void after_fork_in_child(void)
{
    pc__range_after_fork(true);
    pc__ended_after_fork();
    for (pc_client *client = clients; client; client = client->next) {
        leave_parent(client);
        pthread_mutex_unlock(&client->lock);
    }
    pthread_mutex_unlock(&clients_lock);
}

static void register_once(void)
{
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

void pc__sessions_add(pc_client *client)
{
    pthread_once(&registered, register_once);
    pthread_mutex_lock(&clients_lock);
    client->next = clients;
    clients = client;
    pthread_mutex_unlock(&clients_lock);
}

void pc__sessions_remove(pc_client *client)
{
    pthread_mutex_lock(&clients_lock);
    for (pc_client **at = &clients; *at; at = &(*at)->next)
        if (*at == client) {
            *at = client->next;
            break;
        }
    pthread_mutex_unlock(&clients_lock);
}

int pc__sessions_install(void)
{
    pthread_mutex_lock(&clients_lock);
    int rc = pc__sig_install();
    pthread_mutex_unlock(&clients_lock);
    return rc;
}

/* ------------------------------------------------------------ attach anew */

static int open_again(const struct pc__patience *patience, int fd, struct pc__mapping *mapping)
{
    struct pc__ctl_open open;
    struct pc__call call;
    pc__mapping_describe(mapping, &open);
    int rc = pc__conn_exchange(patience, fd, PC__CTL_OPEN, &open, sizeof open, NULL, 0,
                               &call);
    if (rc)
        return rc;
    mapping->is_leased = call.status == PC_OK;
    if (call.status == PC_OK && call.n_fds == 1 && call.body_bytes >= sizeof(struct pc__ctl_opened)) {
        pc__mapping_opened(mapping, call.body);
        /* What detach laid there is a guard, so this replaces nobody's memory. */
        return pc__mapping_install(patience->client, mapping, call.fds[0]);
    }
    pc__fds_close(call.fds, &call.n_fds);
    return pc__fail(call.status < 0 ? call.status : PC_ERR_PROTOCOL, "variable %" PRIu64 ": %s",
                    mapping->region, pc_strerror(call.status));
}

/* Its memory is here already: only the lease is asked for. */
static int lease_again(const struct pc__patience *patience, int fd, struct pc__mapping *mapping)
{
    struct pc__ctl_open open;
    struct pc__ctl_opened opened = {0};
    struct pc__call call;
    pc__mapping_describe(mapping, &open);
    int rc = pc__conn_exchange(patience, fd, PC__CTL_OPEN, &open, sizeof open, NULL, 0, &call);
    if (rc)
        return rc;
    mapping->is_leased = call.status == PC_OK;
    if (call.body_bytes >= sizeof opened)
        memcpy(&opened, call.body, sizeof opened);
    pc__fds_close(call.fds, &call.n_fds);
    if (call.status == PC_OK && opened.inode == mapping->inode && !opened.needs_trap)
        return PC_OK;
    return pc__fail(call.status < 0 ? call.status : PC_ERR_NO_GENERATION,
                    "variable %" PRIu64 ", which was built before the fork", mapping->region);
}

/* Under no lock: nobody else is in this client, it is FORKED. */
static int attach(pc_client *client, const struct pc__patience *patience)
{
    int fd = -1;
    pc__conn_number(client); /* the other one is the parent's */
    int rc = pc__trap_open(client->wanted_trap, client->reattach_timeout_ns, &client->trap);
    if (!rc)
        rc = pc__conn_hello(patience, &fd);
    if (rc)
        return rc;
    client->socket = fd;
    for (struct pc__mapping *mapping = client->mappings; mapping && !rc; mapping = mapping->next) {
        bool came_along = mapping->is_built && mapping->error;
        if (!came_along &&
            (pc__is_private(mapping) || mapping->is_building || !mapping->trapped.address))
            continue; /* the parent's alone: its copies, and what it has not sealed */
        int one = came_along ? lease_again(patience, fd, mapping) : open_again(patience, fd, mapping);
        if (one == PC_OK) {
            pc__mapping_goes(mapping, PC__MAPPING_REGAIN);
            mapping->error = PC_OK;
            continue;
        }
        guard(mapping, one, true);
        if (one == PC_ERR_NO_SERVER || one == PC_ERR_TIMEOUT || one == PC_ERR_PROTOCOL)
            rc = one; /* the connection is of no use: nothing more can be had */
    }
    return rc;
}

static int after_fork(pc_client *client)
{
    if (client->state != PC__CONN_FORKED)
        return pc__fail(PC_ERR_EXISTS, "this process is not a child of fork, or it has attached");
    if (client->is_ended)
        return pc__fail(PC_ERR_ENDED, "the page server of this node has said so");
    const struct pc__patience patience = {
        .client = client, .deadline_ns = pc__deadline(client->reattach_timeout_ns)};
    client->nudge_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = client->nudge_fd < 0 ? pc__fail_errno("eventfd") : PC_OK;
    if (!rc)
        rc = attach(client, &patience);
    pthread_mutex_lock(&client->lock);
    if (client->state == PC__CONN_CLOSED) {
        rc = pc__fail(PC_ERR_CLOSED, "the client was closed");
    } else {
        if (!rc) {
            pc__client_goes(client, PC__CLIENT_CONNECT);
            client->epoch++;
            rc = pc__watch_start(client);
        }
        if (rc) {
            pc__client_goes(client, PC__CLIENT_FORK);
            detach(client, false);
        }
    }
    pthread_mutex_unlock(&client->lock);
    return rc;
}

PC_API int pc_client_after_fork(pc_client *client)
{
    pc__enter(client);
    int rc = after_fork(client);
    pc__leave(client);
    return rc;
}
