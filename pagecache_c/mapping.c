/* mapping.c - map, unmap, and the read sets of a mapping. See client.h.
 *
 * Order of a map: reserve the addresses with no access; OPEN; lay the memfd over them, still with
 * no access; tell the signal table; arm; let the process in. No thread can read a hole at any
 * point, also one that guesses the address.
 * Order of an unmap: munmap, then CLOSE, so that no fault can come after CLOSE.
 *
 * Relies on: MAP_FIXED over one's own reservation replaces it in one step.
 * Does not keep the memfd: a client holds no descriptor per region.
 */
#include "client.h"

#include "read_set.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define KNOWN_FLAGS ((uint32_t)(PC_MAP_PRIVATE | PC_MAP_EXACT_READS))

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static bool is_private(const struct pc__mapping *mapping)
{
    return mapping->trapped.flags & PC_MAP_PRIVATE;
}

/* ------------------------------------------------------------------ tables */

static size_t bucket(uint64_t key)
{
    return (size_t)((key * 0x9e3779b97f4a7c15u) >> 54);
}
static_assert(PC__MAPPING_BUCKETS == 1u << 10, "bucket() takes 10 bits");

struct pc__mapping *pc__mapping_find(pc_client *client, uint64_t id)
{
    struct pc__mapping *mapping = client->by_id[bucket(id)];
    while (mapping && mapping->id != id)
        mapping = mapping->next_same_id;
    return mapping;
}

static struct pc__mapping *find_shared(pc_client *client, uint64_t region)
{
    struct pc__mapping *mapping = client->by_region[bucket(region)];
    while (mapping && mapping->region != region)
        mapping = mapping->next_same_region;
    return mapping;
}

void pc__mapping_add(pc_client *client, struct pc__mapping *mapping)
{
    struct pc__mapping **id = &client->by_id[bucket(mapping->id)];
    mapping->next_same_id = *id;
    *id = mapping;
    if (!is_private(mapping)) {
        struct pc__mapping **region = &client->by_region[bucket(mapping->region)];
        mapping->next_same_region = *region;
        *region = mapping;
    }
    mapping->previous = NULL;
    mapping->next = client->mappings;
    if (mapping->next)
        mapping->next->previous = mapping;
    client->mappings = mapping;
}

void pc__mapping_remove(pc_client *client, struct pc__mapping *mapping)
{
    struct pc__mapping **at = &client->by_id[bucket(mapping->id)];
    while (*at != mapping)
        at = &(*at)->next_same_id;
    *at = mapping->next_same_id;
    if (!is_private(mapping)) {
        at = &client->by_region[bucket(mapping->region)];
        while (*at != mapping)
            at = &(*at)->next_same_region;
        *at = mapping->next_same_region;
    }
    if (mapping->next)
        mapping->next->previous = mapping->previous;
    *(mapping->previous ? &mapping->previous->next : &client->mappings) = mapping->next;
    free(mapping);
}

void pc__mapping_describe(const struct pc__mapping *mapping, struct pc__ctl_open *out)
{
    *out = (struct pc__ctl_open){.mapping_id = mapping->id,
                                 .region = mapping->region,
                                 .version = mapping->version,
                                 .address = mapping->trapped.address,
                                 .length_bytes = mapping->trapped.length_bytes,
                                 .inode = mapping->inode,
                                 .flags = mapping->trapped.flags};
}

/* --------------------------------------------------------------- addresses */

/* The line of /proc/self/maps that overlaps the range, or "". */
static void what_is_there(uint64_t begin, uint64_t end, char *out, size_t capacity)
{
    out[0] = '\0';
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[384];
    while (maps && fgets(line, sizeof line, maps)) {
        uint64_t from, to;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64, &from, &to) == 2 && from < end && begin < to) {
            line[strcspn(line, "\n")] = '\0';
            (void)snprintf(out, capacity, "%s", line);
            break;
        }
    }
    if (maps)
        (void)fclose(maps);
}

/* Addresses without access, so that nobody else takes them while the server is asked. */
static int reserve(struct pc__mapping *mapping, uint64_t base_address)
{
    uint64_t length = mapping->trapped.length_bytes;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!is_private(mapping))
        flags |= MAP_FIXED_NOREPLACE;
    void *at = mmap(is_private(mapping) ? NULL : pointer(base_address), length, PROT_NONE, flags,
                    -1, 0);
    bool elsewhere = at != MAP_FAILED && !is_private(mapping) && at != pointer(base_address);
    if (elsewhere) { /* kernels before 4.17 take the address for a hint */
        munmap(at, length);
        errno = EEXIST;
    }
    if (elsewhere || at == MAP_FAILED) {
        if (errno != EEXIST)
            return pc__fail_errno("mmap of %" PRIu64 " bytes of addresses", length);
        char there[400];
        what_is_there(base_address, base_address + length, there, sizeof there);
        return pc__fail(PC_ERR_CLASH,
                        "region %" PRIu64 " must be mapped at %#" PRIx64 "-%#" PRIx64
                        ", where this process has: %s",
                        mapping->region, base_address, base_address + length, there);
    }
    mapping->trapped.address = (uint64_t)(uintptr_t)at;
    return PC_OK;
}

static int install(pc_client *client, struct pc__mapping *mapping, int fd)
{
    struct pc__trapped *trapped = &mapping->trapped;
    void *at = pointer(trapped->address);
    int share = is_private(mapping) ? MAP_PRIVATE : MAP_SHARED;
    if (mmap(at, trapped->length_bytes, PROT_NONE, share | MAP_FIXED | MAP_NORESERVE, fd, 0) ==
        MAP_FAILED)
        return pc__fail_errno("mmap of region %" PRIu64, mapping->region);
    if (madvise(at, trapped->length_bytes, MADV_DONTFORK))
        return pc__fail_errno("MADV_DONTFORK of region %" PRIu64, mapping->region);
    (void)madvise(at, trapped->length_bytes, MADV_DONTDUMP); /* a dump would fetch all of it */
    const struct pc__range_view range = {
        .begin = trapped->address,
        .end = trapped->address + trapped->length_bytes,
        .region = mapping->region,
        .version = mapping->version,
        .sig = client->trap.sig,
        .flags = trapped->flags,
        .kind = client->trap.kind == PC_TRAP_SIGSEGV && trapped->needs_trap ? PC__RANGE_TRAPPED
                                                                            : PC__RANGE_PLAIN};
    int rc = pc__range_add(&range);
    return rc ? rc : client->trap.ops->arm(&client->trap, trapped);
}

int pc__mapping_install(pc_client *client, struct pc__mapping *mapping, int fd,
                        const struct pc__ctl_opened *opened)
{
    struct stat st;
    int rc;
    mapping->inode = opened->inode;
    mapping->trapped.needs_trap = opened->needs_trap != 0;
    if (fstat(fd, &st))
        rc = pc__fail_errno("fstat of region %" PRIu64, mapping->region);
    else if ((uint64_t)st.st_ino != opened->inode ||
             (uint64_t)st.st_size != mapping->trapped.length_bytes)
        rc = pc__fail(PC_ERR_PROTOCOL,
                      "the page server's memory of region %" PRIu64 " is %" PRIu64
                      " bytes long and should be %" PRIu64,
                      mapping->region, (uint64_t)st.st_size, mapping->trapped.length_bytes);
    else
        rc = install(client, mapping, fd);
    close(fd);
    return rc;
}

/* Under lock. */
void pc__mapping_take_down(pc_client *client, struct pc__mapping *mapping)
{
    if (mapping->trapped.address) {
        pc__range_set(mapping->trapped.address, PC__RANGE_GONE, 0);
        if (client->trap.ops && mapping->state != PC__MAPPING_GUARD)
            client->trap.ops->forget(&client->trap, &mapping->trapped);
        munmap(pointer(mapping->trapped.address), mapping->trapped.length_bytes);
    }
    if (mapping->is_leased)
        pc__outbox_close(client, mapping->id);
    pc__mapping_remove(client, mapping);
    pthread_cond_broadcast(&client->changed);
}

void pc__mapping_release(pc_client *client, struct pc__mapping *mapping)
{
    if (--mapping->users == 0)
        pc__mapping_take_down(client, mapping);
}

int pc__mapping_use(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    int rc = pc__call_refused(client);
    if (rc)
        return rc;
    struct pc__mapping *mapping = pc__mapping_find(client, id);
    if (!mapping || mapping->state == PC__MAPPING_OPENING)
        return pc__fail(PC_ERR_NO_REGION, "no mapping %" PRIu64 " in this process", id);
    if (mapping->state == PC__MAPPING_GUARD)
        return pc__fail(PC_ERR_FORKED, "region %" PRIu64 " did not survive fork", mapping->region);
    mapping->users++;
    *out = mapping;
    return PC_OK;
}

/* --------------------------------------------------------------------- map */

/* OPEN, until the answer and the connection that the lease is on are the same. */
static int lease(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns,
                 struct pc__call *call)
{
    for (;;) {
        struct pc__ctl_open open;
        pc__mapping_describe(mapping, &open);
        call->opens = mapping->id;
        int rc = pc__call(client, PC__CTL_OPEN, &open, sizeof open, true, deadline_ns, call);
        if (rc)
            return rc;
        pthread_mutex_lock(&client->lock);
        mapping->is_leased = client->state == PC__CONN_UP && client->epoch == call->epoch;
        rc = pc__call_refused(client);
        pthread_mutex_unlock(&client->lock);
        if (mapping->is_leased && call->n_fds == 1 &&
            call->body_bytes >= sizeof(struct pc__ctl_opened))
            return PC_OK;
        pc__fds_close(call->fds, &call->n_fds);
        if (rc)
            return rc;
        if (mapping->is_leased && call->fds_lost)
            return pc__fail(PC_ERR_DESCRIPTORS, "no descriptor for region %" PRIu64,
                            mapping->region);
        if (mapping->is_leased)
            return pc__fail(PC_ERR_PROTOCOL, "the page server opened region %" PRIu64
                            " and sent no memory", mapping->region);
    }
}

static int open_mapping(pc_client *client, struct pc__mapping *mapping, uint64_t base_address,
                        uint64_t deadline_ns)
{
    int rc = reserve(mapping, base_address);
    if (rc)
        return rc;
    struct pc__call call;
    rc = lease(client, mapping, deadline_ns, &call);
    if (rc)
        return rc;
    struct pc__ctl_opened opened;
    memcpy(&opened, call.body, sizeof opened);
    return pc__mapping_install(client, mapping, call.fds[0], &opened);
}

/* Under lock. 1: *out is the mapping that is there; 0: none is; negative: it is in the way. */
static int share(pc_client *client, const struct pc__mapping *wanted, uint64_t deadline_ns,
                 struct pc__mapping **out)
{
    for (;;) {
        int rc = pc__call_refused(client);
        if (rc)
            return rc;
        struct pc__mapping *found = find_shared(client, wanted->region);
        if (!found)
            return 0;
        /* Exact reads or coarse ones: who asked for exact ones takes the superset. */
        bool fits = found->version == wanted->version &&
                    found->trapped.length_bytes == wanted->trapped.length_bytes;
        if (found->state == PC__MAPPING_GUARD)
            return pc__fail(PC_ERR_FORKED, "region %" PRIu64 " did not survive fork",
                            found->region);
        if (!fits)
            return pc__fail(PC_ERR_EXISTS,
                            "region %" PRIu64 " is mapped here at version %" PRIu64
                            " (%" PRIu64 " bytes), and version %" PRIu64 " (%" PRIu64
                            " bytes) was asked for",
                            found->region, found->version, found->trapped.length_bytes,
                            wanted->version, wanted->trapped.length_bytes);
        if (found->state == PC__MAPPING_LIVE) {
            found->users++;
            *out = found;
            return 1;
        }
        if (pc__clock_ns() >= deadline_ns)
            return pc__fail(PC_ERR_TIMEOUT, "another thread is mapping region %" PRIu64,
                            found->region);
        pc__changed_wait(client, deadline_ns);
    }
}

static void tell(const struct pc__mapping *mapping, struct pc_mapping *out)
{
    *out = (struct pc_mapping){.id = mapping->id,
                               .address = mapping->trapped.address,
                               .length_bytes = mapping->trapped.length_bytes};
}

static int map(pc_client *client, uint64_t region, uint64_t version, uint64_t base_address,
               uint64_t length_bytes, uint32_t flags, uint64_t timeout_ns, struct pc_mapping *out)
{
    uint64_t deadline_ns = pc__deadline(timeout_ns);
    memset(out, 0, sizeof *out);
    bool in_window = base_address % PC_BLOCK_BYTES == 0 && base_address >= PC_WINDOW_BEGIN &&
                     base_address < PC_WINDOW_END &&
                     length_bytes <= PC_WINDOW_END - base_address;
    if (flags & ~KNOWN_FLAGS || length_bytes == 0 || length_bytes % PC_BLOCK_BYTES ||
        length_bytes > PC_WINDOW_END - PC_WINDOW_BEGIN || !(in_window || flags & PC_MAP_PRIVATE))
        return pc__fail(PC_ERR_RANGE, "a region of %" PRIu64 " bytes at %#" PRIx64 ", flags %u",
                        length_bytes, base_address, flags);
    if (client->trap.kind == PC_TRAP_SIGSEGV && pc__sig_install())
        return pc__fail(PC_ERR_NO_TRAP, "this process's SIGSEGV handler cannot be replaced");
    struct pc__mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping of region %" PRIu64, region);
    mapping->region = region;
    mapping->version = version;
    mapping->users = 1;
    mapping->trapped.length_bytes = length_bytes;
    mapping->trapped.flags = flags;

    struct pc__mapping *shared = NULL;
    pthread_mutex_lock(&client->lock);
    int rc = flags & PC_MAP_PRIVATE ? pc__call_refused(client)
                                    : share(client, mapping, deadline_ns, &shared);
    if (rc == 0) {
        mapping->id = ++client->next_mapping_id;
        pc__mapping_add(client, mapping);
    }
    if (rc == 1)
        tell(shared, out);
    pthread_mutex_unlock(&client->lock);
    if (rc) {
        free(mapping);
        return rc < 0 ? rc : PC_OK;
    }

    rc = open_mapping(client, mapping, base_address, deadline_ns);

    pthread_mutex_lock(&client->lock);
    if (!rc)
        rc = pc__call_refused(client);
    if (!rc && mapping->error)
        rc = pc__fail(mapping->error, "the page server restarted without region %" PRIu64, region);
    if (rc) {
        pc__mapping_take_down(client, mapping);
    } else {
        mapping->state = PC__MAPPING_LIVE;
        tell(mapping, out);
    }
    pthread_cond_broadcast(&client->changed);
    pthread_mutex_unlock(&client->lock);
    return rc;
}

PC_API int pc_client_map(pc_client *client, uint64_t region, uint64_t version,
                         uint64_t base_address, uint64_t length_bytes, uint32_t flags,
                         uint64_t timeout_ns, struct pc_mapping *out)
{
    pc__enter(client);
    int rc = map(client, region, version, base_address, length_bytes, flags, timeout_ns, out);
    pc__leave(client);
    return rc;
}

PC_API int pc_client_unmap(pc_client *client, uint64_t mapping_id)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    struct pc__mapping *mapping = pc__mapping_find(client, mapping_id);
    int rc = PC_OK;
    if (client->state == PC__CONN_CLOSED)
        rc = pc__fail(PC_ERR_CLOSED, "the client was closed");
    else if (!mapping || mapping->state == PC__MAPPING_OPENING)
        rc = pc__fail(PC_ERR_NO_REGION, "no mapping %" PRIu64 " in this process", mapping_id);
    else
        pc__mapping_release(client, mapping);
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}

/* --------------------------------------------------------------- read sets
 *
 * Calls of one process share a mapping and so its page-table entries. Only the first of them to
 * begin drops the entries: another would drop what the first has touched. So each set holds all
 * that its call touched, and perhaps what others did meanwhile.
 */

#define DROP_STEP_NS 1000000000ull /* how long is waited for another's drop before looking again */

/* On success unuse ends what this begins: the client and the mapping stay until then. */
static int use(pc_client *client, uint64_t id, struct pc__mapping **mapping)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = pc__mapping_use(client, id, mapping);
    if (!rc && is_private(*mapping)) {
        pc__mapping_release(client, *mapping);
        rc = pc__fail(PC_ERR_RANGE, "a private mapping has no read set: its entries are its data");
    }
    pthread_mutex_unlock(&client->lock);
    if (rc)
        pc__leave(client);
    return rc;
}

static void unuse(pc_client *client, struct pc__mapping *mapping)
{
    pthread_mutex_lock(&client->lock);
    pc__mapping_release(client, mapping);
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
}

/* Counts the reader in. True: it is the first, and has to drop the entries. */
static bool reader_enters(pc_client *client, struct pc__mapping *mapping)
{
    pthread_mutex_lock(&client->lock);
    while (mapping->is_dropping && client->state != PC__CONN_CLOSED)
        pc__changed_wait(client, pc__deadline(DROP_STEP_NS));
    bool is_first = mapping->readers++ == 0;
    mapping->is_dropping = is_first;
    pthread_mutex_unlock(&client->lock);
    return is_first;
}

static void reader_leaves(pc_client *client, struct pc__mapping *mapping)
{
    pthread_mutex_lock(&client->lock);
    if (mapping->readers) /* one too many is the caller's mistake, and harms only itself */
        mapping->readers--;
    pthread_mutex_unlock(&client->lock);
}

static int drop_entries(pc_client *client, const struct pc__mapping *mapping)
{
    const struct pc__trapped *trapped = &mapping->trapped;
    int rc = client->trap.ops->reads_begin(&client->trap, trapped);
    if (!rc && madvise(pointer(trapped->address), trapped->length_bytes, MADV_DONTNEED))
        rc = pc__fail_errno("MADV_DONTNEED of region %" PRIu64, mapping->region);
    return rc;
}

PC_API int pc_client_reads_begin(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping;
    int rc = use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    if (reader_enters(client, mapping)) {
        rc = drop_entries(client, mapping);
        pthread_mutex_lock(&client->lock);
        mapping->is_dropping = false;
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
        if (rc)
            reader_leaves(client, mapping);
    }
    unuse(client, mapping);
    return rc;
}

PC_API int64_t pc_client_reads_end(pc_client *client, uint64_t mapping_id, struct pc_run *runs,
                                   size_t capacity)
{
    struct pc__mapping *mapping;
    int rc = use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    int64_t n = runs ? pc__read_set(mapping->trapped.address, mapping->trapped.length_bytes, runs,
                                    capacity)
                     : 0;
    if (n < 0 || (uint64_t)n <= capacity) /* else it is called again, with room */
        reader_leaves(client, mapping);
    unuse(client, mapping);
    return n;
}
