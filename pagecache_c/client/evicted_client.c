/* evicted_client.c - asks the page server what it evicted while a read set is taken. See client.h and
 * evicted.c.
 *
 * A file on a disk is the kernel's to evict. It takes pages that are mapped, too, and tells nobody which.
 * But it counts the pages of files that it looks at (pgscan_file of /proc/vmstat, since Linux 5.8): where
 * that count has moved, all of the mapping counts as evicted.
 *
 * Threads: any. Lock: client.lock around the tables and calls.
 */
#include "client/client.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define VMSTAT_BYTES 32768u /* more than it has */
#define NOT_KNOWN UINT64_MAX

/* Of files, by the kernel, since the machine started. */
static uint64_t scanned_pages(void)
{
    static const char name[] = "\npgscan_file ";
    char text[VMSTAT_BYTES];
    size_t n = 0;
    ssize_t got = 1;
    const int fd = open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && n < sizeof text - 1 && (got = read(fd, text + n, sizeof text - 1 - n)) > 0)
        n += (size_t)got;
    if (fd >= 0)
        close(fd);
    text[n] = 0;
    const char *line = strstr(text, name);
    return fd < 0 || got < 0 || !line ? NOT_KNOWN : strtoull(line + strlen(name), NULL, 10);
}

static void watch(pc_client *client, struct pc__mapping *mapping)
{
    const uint64_t scanned = scanned_pages();
    pthread_mutex_lock(&client->lock);
    if (!mapping->watchers++)
        mapping->scanned_pages = scanned;
    pthread_mutex_unlock(&client->lock);
}

/* What the kernel may have taken: nothing, or any. */
static int64_t taken(pc_client *client, const struct pc__mapping *mapping, struct pc_run *runs,
                     size_t capacity)
{
    const uint64_t scanned = scanned_pages();
    pthread_mutex_lock(&client->lock);
    const bool is_none = mapping->watchers && scanned != NOT_KNOWN && scanned == mapping->scanned_pages;
    pthread_mutex_unlock(&client->lock);
    if (!is_none && capacity)
        runs[0] = (struct pc_run){.n_blocks = mapping->trapped.length_bytes / PC_BLOCK_BYTES};
    return !is_none;
}

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
    if (mapping->trapped.on_disk)
        watch(client, mapping);
    else if (mapping->trapped.needs_trap)
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
    if (mapping->trapped.on_disk) {
        n = taken(client, mapping, runs, capacity);
    } else if (mapping->trapped.needs_trap) {
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
    if (mapping->trapped.on_disk)
        mapping->watchers -= mapping->watchers > 0;
    else if (mapping->trapped.needs_trap)
        rc = pc__outbox_send(client, PC__CTL_EVICTED, &body, sizeof body);
    pthread_mutex_unlock(&client->lock);
    pc__unuse(client, mapping);
    return rc;
}
