/* evicted_client.c - asks the page server what it evicted while a read set is taken. See client.h and
 * evicted.c.
 *
 * Threads: any. Lock: client.lock around the tables and calls.
 */
#include "client/client.h"

#include <sys/stat.h>
#include <unistd.h>

static int ask(pc_client *client, const struct pc__mapping *mapping, uint32_t what, bool resend,
               uint64_t timeout_ns, struct pc__call *call)
{
    const struct pc__ctl_runs body = {.mapping_id = mapping->id, .wait = what};
    *call = (struct pc__call){0};
    return pc__call(client, PC__CTL_EVICTED, &body, sizeof body, resend, pc__deadline(timeout_ns),
                    call);
}

PC_API int pc_client_evicted_begin(pc_client *client, uint64_t mapping_id, uint64_t timeout_ns)
{
    struct pc__mapping *mapping;
    struct pc__call call;
    int rc = pc__use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    if (mapping->trapped.needs_trap)
        rc = ask(client, mapping, PC__EVICTED_BEGIN, true, timeout_ns, &call);
    pc__unuse(client, mapping);
    return rc;
}

static int64_t take(int fd, struct pc_run *runs, size_t capacity)
{
    struct stat st;
    if (fstat(fd, &st))
        return pc__fail_errno("what was evicted");
    size_t n = (size_t)st.st_size / sizeof *runs, n_bytes = (n < capacity ? n : capacity) * sizeof *runs;
    if (n_bytes && pread(fd, runs, n_bytes, 0) != (ssize_t)n_bytes)
        return pc__fail_errno("what was evicted");
    return (int64_t)n;
}

PC_API int64_t pc_client_evicted(pc_client *client, uint64_t mapping_id, struct pc_run *runs,
                                 size_t capacity, uint64_t timeout_ns)
{
    struct pc__mapping *mapping;
    struct pc__call call;
    int64_t n = pc__use(client, mapping_id, &mapping);
    if (n)
        return n;
    if (mapping->trapped.needs_trap) {
        n = ask(client, mapping, PC__EVICTED_READ, true, timeout_ns, &call);
        if (!n && call.fds_lost)
            n = pc__fail(PC_ERR_DESCRIPTORS, "no descriptor for what was evicted");
        if (!n && call.n_fds)
            n = take(call.fds[0], runs, capacity);
        pc__fds_close(call.fds, &call.n_fds);
    }
    pc__unuse(client, mapping);
    return n;
}

PC_API int pc_client_evicted_end(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping;
    int rc = pc__use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    const struct pc__ctl_runs body = {.mapping_id = mapping_id, .wait = PC__EVICTED_END};
    pthread_mutex_lock(&client->lock);
    if (mapping->trapped.needs_trap)
        rc = pc__outbox_send(client, PC__CTL_EVICTED, &body, sizeof body);
    pthread_mutex_unlock(&client->lock);
    pc__unuse(client, mapping);
    return rc;
}
