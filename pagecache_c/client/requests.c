/* requests.c - what a client asks for that maps nothing: the making of a home, prefetch, and the
 * report of a read set; and the word that a region is freed. See client.h.
 *
 * A prefetch goes out again after a re-attach, for asking twice does no harm. Making a home does
 * not: what was not sealed died with its server.
 */
#include "client/client.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* -------------------------------------------------------------------- home */

static int region_call(pc_client *client, uint16_t type, const struct pc__ctl_region *region,
                       uint64_t timeout_ns, struct pc__call *call)
{
    *call = (struct pc__call){.opens = 0};
    return pc__call(client, type, region, sizeof *region, false, pc__deadline(timeout_ns), call);
}

int pc__create(pc_client *client, uint64_t region, uint64_t base_address, uint64_t length_bytes,
               enum pc_medium medium, uint64_t timeout_ns, int *fd)
{
    const struct pc__ctl_region body = {.region = region, .base_address = base_address,
                                        .length_bytes = length_bytes, .medium = medium};
    *fd = -1;
    if (!pc__is_in_window(base_address, length_bytes))
        return pc__fail(PC_ERR_RANGE, "a region of %" PRIu64 " bytes at %#" PRIx64, length_bytes,
                        base_address);
    struct pc__call call;
    int rc = region_call(client, PC__CTL_CREATE, &body, timeout_ns, &call);
    if (rc)
        return rc;
    if (call.n_fds == 1) {
        *fd = call.fds[0];
        return PC_OK;
    }
    pc__fds_close(call.fds, &call.n_fds);
    return call.fds_lost
               ? pc__fail(PC_ERR_DESCRIPTORS, "no descriptor for variable %" PRIu64, region)
               : pc__fail(PC_ERR_PROTOCOL, "the page server made variable %" PRIu64
                                           " and sent no memory", region);
}

PC_API int pc_client_create(pc_client *client, uint64_t region, uint64_t base_address,
                            uint64_t length_bytes, enum pc_medium medium, uint64_t timeout_ns,
                            int *fd)
{
    pc__enter(client);
    int rc = pc__create(client, region, base_address, length_bytes, medium, timeout_ns, fd);
    pc__leave(client);
    return rc;
}

static int finish_home(pc_client *client, uint16_t type, uint64_t region, uint64_t timeout_ns)
{
    const struct pc__ctl_region body = {.region = region};
    struct pc__call call;
    pc__enter(client);
    int rc = region_call(client, type, &body, timeout_ns, &call);
    if (!rc)
        pc__fds_close(call.fds, &call.n_fds);
    pc__leave(client);
    return rc;
}

PC_API int pc_client_seal(pc_client *client, uint64_t region, uint64_t timeout_ns)
{
    return finish_home(client, PC__CTL_SEAL, region, timeout_ns);
}

PC_API int pc_client_abandon(pc_client *client, uint64_t region, uint64_t timeout_ns)
{
    return finish_home(client, PC__CTL_ABANDON, region, timeout_ns);
}

PC_API int pc_client_retire(pc_client *client, uint64_t region, int alone,
                            const uint64_t *servers, size_t n_servers, uint64_t timeout_ns)
{
    const struct pc__ctl_retire body = {.region = region, .alone = alone != 0,
                                        .n_servers = (uint32_t)n_servers};
    const uint64_t deadline_ns = pc__deadline(timeout_ns);
    struct pc__call call = {0};
    if (!region || n_servers > PC__RETIRE_MOST || (alone && n_servers))
        return pc__fail(PC_ERR_RANGE, "variable %" PRIu64 " and %zu servers", region, n_servers);
    pc__enter(client);
    int rc = pc__call_start(client, PC__CTL_RETIRE, &body, sizeof body, servers,
                            n_servers * sizeof *servers, deadline_ns, &call);
    if (!rc)
        rc = pc__call_finish(client, &call, deadline_ns);
    if (!rc)
        pc__fds_close(call.fds, &call.n_fds);
    /* What rests would be mapped again without a word to the server, whose LET_GO is on its way. */
    pthread_mutex_lock(&client->lock);
    pc__idle_end_all(client, region);
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}

/* -------------------------------------------------------------------- runs */

static int use(pc_client *client, uint64_t id, const struct pc_run *runs, size_t n_runs,
               struct pc__mapping **out)
{
    int rc = pc__use(client, id, out);
    if (!rc && (rc = pc__runs_check(*out, runs, n_runs)))
        pc__unuse(client, *out);
    return rc;
}

static struct pc__ctl_runs part_of(const struct pc__mapping *mapping, size_t n_runs, size_t part,
                                   int wait, const struct pc_run *runs,
                                   const struct pc_run **first)
{
    size_t left = n_runs - part * PC__CTL_MAX_RUNS;
    *first = runs + part * PC__CTL_MAX_RUNS;
    return (struct pc__ctl_runs){
        .mapping_id = mapping->id,
        .n_runs = (uint32_t)(left < PC__CTL_MAX_RUNS ? left : PC__CTL_MAX_RUNS),
        .wait = wait != 0};
}

static int send_part(pc_client *client, const struct pc__mapping *mapping,
                     const struct pc_run *runs, size_t n_runs, size_t part, int wait,
                     uint64_t deadline_ns, struct pc__call *call)
{
    const struct pc_run *first;
    struct pc__ctl_runs head = part_of(mapping, n_runs, part, wait, runs, &first);
    return pc__call_start(client, PC__CTL_PREFETCH, &head, sizeof head, first,
                          head.n_runs * sizeof *first, deadline_ns, call);
}

/* All parts go out before the first is waited for. */
static int prefetch(pc_client *client, const struct pc__mapping *mapping,
                    const struct pc_run *runs, size_t n_runs, int wait, uint64_t deadline_ns)
{
    size_t n_parts = (n_runs + PC__CTL_MAX_RUNS - 1) / PC__CTL_MAX_RUNS, n_sent = 0;
    struct pc__call *calls = calloc(n_parts, sizeof *calls);
    if (!calls)
        return pc__fail(PC_ERR_NO_MEMORY, "a prefetch of %zu runs", n_runs);
    int rc = PC_OK;
    while (n_sent < n_parts && !rc) {
        rc = send_part(client, mapping, runs, n_runs, n_sent, wait, deadline_ns, &calls[n_sent]);
        n_sent += !rc;
    }
    for (size_t i = 0; i < n_sent; i++) {
        if (!rc)
            rc = pc__call_finish(client, &calls[i], deadline_ns);
        while (rc == PC_ERR_NO_SERVER && calls[i].is_dropped) {
            rc = send_part(client, mapping, runs, n_runs, i, wait, deadline_ns, &calls[i]);
            if (!rc)
                rc = pc__call_finish(client, &calls[i], deadline_ns);
        }
        pc__call_cancel(client, &calls[i]); /* after a failure the rest is not waited for */
    }
    free(calls);
    return rc;
}

PC_API int pc_client_prefetch(pc_client *client, uint64_t mapping_id, const struct pc_run *runs,
                              size_t n_runs, int wait, uint64_t timeout_ns)
{
    struct pc__mapping *mapping;
    int rc = use(client, mapping_id, runs, n_runs, &mapping);
    if (rc)
        return rc;
    if (n_runs && mapping->trapped.needs_trap) {
        rc = prefetch(client, mapping, runs, n_runs, wait, pc__deadline(timeout_ns));
        if (!rc && wait)
            rc = client->trap.ops->opened(&client->trap, &mapping->trapped, runs, n_runs);
        for (size_t i = 0; i < n_runs && !rc && wait; i++)
            pc__seen_add(mapping, runs[i].first_block, runs[i].n_blocks);
    }
    pc__unuse(client, mapping);
    return rc;
}

PC_API int pc_client_report_reads(pc_client *client, uint64_t mapping_id,
                                  const struct pc_run *runs, size_t n_runs)
{
    struct pc__mapping *mapping;
    int rc = use(client, mapping_id, runs, n_runs, &mapping);
    if (rc)
        return rc;
    for (size_t part = 0; part * PC__CTL_MAX_RUNS < n_runs && !rc; part++) {
        const struct pc_run *first;
        struct pc__ctl_runs head = part_of(mapping, n_runs, part, 0, runs, &first);
        pthread_mutex_lock(&client->lock);
        if (client->state != PC__CONN_UP)
            rc = pc__fail(PC_ERR_NO_SERVER, "the page server is gone");
        else
            rc = pc__conn_send(client->socket, PC__CTL_READS, 0, &head, sizeof head, first,
                               head.n_runs * sizeof *first, NULL, 0);
        pthread_mutex_unlock(&client->lock);
        if (rc == 0)
            rc = pc__fail(PC_ERR_TIMEOUT, "the page server does not read its socket");
        else if (rc == 1)
            rc = PC_OK;
    }
    pc__unuse(client, mapping);
    return rc;
}
