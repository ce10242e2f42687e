/* attach.c - after the page server died, or fell silent. Runs on the watch thread while the state is LOST.
 *
 * The keeper hands a restarted server the memfds of the old one, so what is mapped here stays
 * mapped; the new server only has to learn of it (ATTACH, with the inode) and to wake whoever is
 * stopped. A mapping that it does not have, and that can have absent blocks, cannot go on: the
 * process ends, and its supervisor runs the work again. Never zeros, never a silent hang. Nor can
 * one of memory that the server has, and does not lease to us: it may change it from now on.
 *
 * Until reattach_timeout has passed, stopped threads wait. After it they are made to fault again,
 * so that their faults queue on our own descriptor, which tells us that there is one: the process
 * ends with its name. A process in which nobody is stopped lives on and keeps looking for a server.
 *
 * Lock: client.lock around the tables; never while waiting.
 */
#include "client/client.h"

#include "common/signal_log.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXCHANGE_MIN_NS 1000000000ull /* what one answer may take, however little is left */
#define HOPELESS_STEP_NS 1000000000ull
#define ENDED_STEP_NS 200000000ull /* between two looks for threads that are stopped for good */

static void note_outage(pc_client *client)
{
    pthread_mutex_lock(&client->lock);
    strncpy(client->outage, pc_last_message(), sizeof client->outage - 1);
    pthread_mutex_unlock(&client->lock);
}

static _Noreturn void die(const struct pc__ctl_open *mapping, uint64_t address, const char *cause,
                          const char *detail)
{
    struct pc__siglog line = {.used = 0};
    pc__siglog_text(&line, "clamor: ");
    pc__siglog_block(&line, mapping->region, mapping->version,
                  (address - mapping->address) >> PC_BLOCK_SHIFT);
    pc__siglog_text(&line, " (address ");
    pc__siglog_hex(&line, address);
    pc__siglog_text(&line, ") cannot be read: ");
    pc__siglog_text(&line, cause);
    pc__siglog_text(&line, detail);
    pc__siglog_text(&line, "; this process ends");
    pc__siglog_and_exit(&line);
}

/* A thread is stopped and nobody serves: ends the process if it is so. */
static void check_stuck(pc_client *client)
{
    uint64_t address;
    if (!client->trap.ops->stuck_at(&client->trap, &address))
        return;
    struct pc__ctl_open found = {.address = address & ~(uint64_t)(PC_BLOCK_BYTES - 1)};
    pthread_mutex_lock(&client->lock);
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next)
        if (address >= mapping->trapped.address &&
            address - mapping->trapped.address < mapping->trapped.length_bytes)
            pc__mapping_describe(mapping, &found);
    bool is_ended = client->is_ended;
    pthread_mutex_unlock(&client->lock);
    if (is_ended)
        die(&found, address, pc_strerror(PC_ERR_ENDED), "");
    die(&found, address, "the page server of this node is gone and did not come back in time: ",
        client->outage);
}

static void wake_all(pc_client *client)
{
    pthread_mutex_lock(&client->lock);
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next)
        if (mapping->trapped.needs_trap)
            client->trap.ops->wake(&client->trap, &mapping->trapped);
    pthread_mutex_unlock(&client->lock);
}

/* What is mapped stays so until its users unmap it; whoever stops at an absent block ends the
 * process. Threads whose fault the old server still took are woken again and again. */
static int wait_for_close(pc_client *client)
{
    struct pc__patience patience = {.client = client, .stuck = check_stuck};
    do {
        wake_all(client);
        patience.deadline_ns = pc__deadline(ENDED_STEP_NS);
    } while (pc__patient_wait(&patience, -1, 0) != PC_ERR_CLOSED);
    return PC_ERR_CLOSED;
}

/* What has to be attached. CLOSEs that were not sent died with the old connection. */
static int snapshot(pc_client *client, struct pc__ctl_open **out, size_t *n_out)
{
    size_t n = 0;
    pthread_mutex_lock(&client->lock);
    pc__idle_end_all(client, 0); /* else one that is refused would end the process */
    pc__outbox_clear(client);
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next) {
        n += mapping->is_leased;
        mapping->lost_reads |= mapping->readers && mapping->trapped.needs_trap;
    }
    struct pc__ctl_open *opens = calloc(n + 1, sizeof *opens);
    n = 0;
    for (struct pc__mapping *mapping = client->mappings; mapping && opens; mapping = mapping->next)
        if (mapping->is_leased)
            pc__mapping_describe(mapping, &opens[n++]);
    pthread_mutex_unlock(&client->lock);
    *out = opens;
    *n_out = n;
    return opens ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "re-attaching");
}

/* The new server does not have it. */
static void refused(pc_client *client, const struct pc__ctl_open *open, int error)
{
    pthread_mutex_lock(&client->lock);
    struct pc__mapping *mapping = pc__mapping_find(client, open->mapping_id);
    bool is_fatal = false;
    if (mapping) {
        mapping->is_leased = false;
        if (mapping->state == PC__MAPPING_OPENING)
            mapping->error = error; /* its thread is told, and nobody has the address */
        else
            /* else every block of it is here, and a server that does not have it changes none */
            is_fatal = mapping->trapped.needs_trap ||
                       (error != PC_ERR_NO_REGION && error != PC_ERR_NO_GENERATION);
    }
    pthread_mutex_unlock(&client->lock);
    if (is_fatal)
        die(open, open->address, "the restarted page server refused to attach it: ",
            pc_strerror(error));
}

static int attach_all(const struct pc__patience *patience, int fd)
{
    struct pc__ctl_open *opens;
    size_t n;
    int rc = snapshot(patience->client, &opens, &n);
    for (size_t i = 0; i < n && !rc; i++) {
        struct pc__patience one = *patience;
        uint64_t least = pc__deadline(EXCHANGE_MIN_NS);
        if (one.deadline_ns < least)
            one.deadline_ns = least;
        struct pc__call call;
        rc = pc__conn_exchange(&one, fd, PC__CTL_ATTACH, &opens[i], sizeof opens[i], NULL, 0,
                               &call);
        if (rc)
            break;
        pc__fds_close(call.fds, &call.n_fds);
        if (call.status < 0)
            refused(patience->client, &opens[i], call.status);
    }
    free(opens);
    return rc;
}

/* Under no lock; from here on callers send. */
static int go_up(pc_client *client, int fd)
{
    pthread_mutex_lock(&client->lock);
    int rc = client->state == PC__CONN_CLOSED ? PC_ERR_CLOSED : PC_OK;
    if (!rc) {
        client->socket = fd;
        client->epoch++;
        pc__client_goes(client, PC__CLIENT_CONNECT);
        client->outage[0] = '\0';
        client->trap.ops->lost(&client->trap, 0);
        pthread_cond_broadcast(&client->changed);
    }
    pthread_mutex_unlock(&client->lock);
    return rc;
}

static int try_attach(const struct pc__patience *patience)
{
    int fd = -1;
    int rc = pc__conn_hello(patience, &fd);
    if (!rc)
        rc = attach_all(patience, fd);
    if (!rc) /* what is unmapped by now was on the old connection only */
        rc = pc__conn_tell(patience, fd, PC__CTL_ATTACHED);
    if (!rc)
        rc = go_up(patience->client, fd);
    if (rc && fd >= 0)
        close(fd);
    return rc;
}

int pc__reattach(pc_client *client, uint64_t since_ns)
{
    const uint64_t most = (uint64_t)INT64_MAX - since_ns;
    const uint64_t give_up_ns =
        since_ns + (client->reattach_timeout_ns < most ? client->reattach_timeout_ns : most);
    struct pc__patience patience = {.client = client, .deadline_ns = give_up_ns};
    for (;;) {
        if (client->is_ended) /* only this thread sets it */
            return wait_for_close(client);
        int rc = try_attach(&patience);
        if (rc == PC_OK || rc == PC_ERR_CLOSED)
            return rc;
        note_outage(client);
        /* A server that is there and refuses us is not asked again at once. */
        struct pc__patience pause = patience;
        uint64_t step_ns = pc__deadline(patience.stuck ? HOPELESS_STEP_NS : HOPELESS_STEP_NS / 20);
        if (pause.deadline_ns > step_ns || patience.stuck)
            pause.deadline_ns = step_ns;
        if (pc__clock_ns() >= give_up_ns) {
            patience.stuck = pause.stuck = check_stuck;
            wake_all(client); /* also those whose faults a half-attached server took */
        }
        if (pc__patient_wait(&pause, -1, 0) == PC_ERR_CLOSED)
            return PC_ERR_CLOSED;
        if (patience.stuck)
            patience.deadline_ns = pc__deadline(HOPELESS_STEP_NS);
    }
}
