/* mapping.c - map and unmap. See client.h.
 *
 * Addresses: a region has one of its own, the same in every process. Of the maps of a region in
 * this process (versions of it, private copies) the first one gets it, and others go where there
 * is room. So they do where what is looked at of an ended session has the address: another cluster
 * gives out the same ones. With PC_MAP_FIXED there is no elsewhere. Addresses are reserved under
 * the lock, so that who finds them taken also finds by whom. Pieces of one variable, each a region, must
 * lie side by side: who maps those elsewhere reserves addresses for all first, and says where each goes.
 *
 * Order of a map: reserve the addresses with no access; OPEN; lay the memfd over them, still with
 * no access; tell the signal table; arm; let the process in. No thread can read a hole at any
 * point, also one that guesses the address.
 * Order of an unmap: munmap, then CLOSE, so that no fault can come after CLOSE.
 *
 * Relies on: MAP_FIXED over one's own reservation replaces it in one step.
 * Does not keep the memfd: a client holds no descriptor per region.
 */
#include "client/client.h"

#include "os/disk_file.h"
#include "os/huge_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* All maps of the region, one after the other: after NULL the first. */
static struct pc__mapping *next_of(pc_client *client, uint64_t region, struct pc__mapping *after)
{
    struct pc__mapping *mapping =
        after ? after->next_same_region : client->by_region[bucket(region)];
    while (mapping && mapping->region != region)
        mapping = mapping->next_same_region;
    return mapping;
}

struct pc__mapping *pc__mapping_new(uint64_t region)
{
    struct pc__mapping *mapping = calloc(1, sizeof *mapping);
    struct pc__ended *ended = mapping ? malloc(sizeof *ended) : NULL;
    if (!ended) {
        free(mapping);
        return NULL;
    }
    mapping->ended = ended;
    mapping->region = region;
    mapping->users = 1;
    return mapping;
}

void pc__mapping_free(struct pc__mapping *mapping)
{
    pc__seen_free(mapping);
    free(mapping->ended);
    free(mapping);
}

void pc__mapping_add(pc_client *client, struct pc__mapping *mapping)
{
    struct pc__mapping **id = &client->by_id[bucket(mapping->id)];
    mapping->next_same_id = *id;
    *id = mapping;
    struct pc__mapping **region = &client->by_region[bucket(mapping->region)];
    mapping->next_same_region = *region;
    *region = mapping;
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
    at = &client->by_region[bucket(mapping->region)];
    while (*at != mapping)
        at = &(*at)->next_same_region;
    *at = mapping->next_same_region;
    if (mapping->next)
        mapping->next->previous = mapping->previous;
    *(mapping->previous ? &mapping->previous->next : &client->mappings) = mapping->next;
    pc__mapping_free(mapping);
}

void pc__mapping_describe(const struct pc__mapping *mapping, struct pc__ctl_open *out)
{
    *out = (struct pc__ctl_open){.mapping_id = mapping->id,
                                 .region = mapping->region,
                                 .version = mapping->version,
                                 .address = mapping->trapped.address,
                                 .length_bytes = mapping->trapped.length_bytes,
                                 .inode = mapping->inode,
                                 .flags = mapping->trapped.flags,
                                 .follows = mapping->follows};
}

static const char *audit_one(pc_client *client, const struct pc__mapping *mapping)
{
    const struct pc__mapping *same = NULL;
    const bool is_idle = mapping->unused_since_ns != 0;
    if (mapping->next && mapping->next->previous != mapping)
        return "the list of mappings goes both ways";
    if (!mapping->id || mapping->id > client->next_mapping_id ||
        pc__mapping_find(client, mapping->id) != mapping)
        return "a mapping is found by its id, and is the only one of that";
    while ((same = next_of(client, mapping->region, (struct pc__mapping *)(uintptr_t)same)) &&
           same != mapping)
        ;
    if (!same)
        return "a mapping is found by its region";
    if (is_idle != !mapping->users || (is_idle && mapping->state != PC__MAPPING_LIVE))
        return "a mapping that nobody uses is idle, and live";
    return mapping->state == PC__MAPPING_GUARDED && mapping->is_leased ? "a guard has no lease" : NULL;
}

const char *pc__mappings_audit(pc_client *client)
{
    uint64_t n = 0, n_by_id = 0, n_by_region = 0, n_idle = 0;
    for (const struct pc__mapping *at = client->mappings; at; at = at->next) {
        const char *broken = audit_one(client, at);
        if (broken)
            return broken;
        n++;
        n_idle += at->unused_since_ns != 0;
    }
    for (size_t b = 0; b < PC__MAPPING_BUCKETS; b++) {
        for (const struct pc__mapping *at = client->by_id[b]; at; at = at->next_same_id)
            n_by_id++;
        for (const struct pc__mapping *at = client->by_region[b]; at; at = at->next_same_region)
            n_by_region++;
    }
    if (n_by_id != n || n_by_region != n)
        return "the tables have the mappings of the list, and no others";
    return n_idle == client->n_idle ? NULL : "each idle mapping is counted";
}

/* --------------------------------------------------------------- addresses */

#define MOST_TRIES 100 /* each of which another one has to take away in between */

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

static int clash(const struct pc__mapping *mapping, uint64_t base)
{
    char there[400];
    struct pc__range_view range;
    uint64_t end = base + mapping->trapped.length_bytes;
    what_is_there(base, end, there, sizeof there);
    if (!pc__range_overlaps(base, end, &range) || range.region != mapping->region)
        return pc__fail(PC_ERR_CLASH,
                        "variable %" PRIu64 " must be mapped at %#" PRIx64 "-%#" PRIx64
                        ", where this process has: %s", mapping->region, base, end, there);
    return pc__fail(PC_ERR_CLASH,
                    "variable %" PRIu64 " version %" PRIu64 " must be mapped at %#" PRIx64
                    "-%#" PRIx64 ", where this process has %sversion %" PRIu64 " of it: %s",
                    mapping->region, mapping->version, base, end,
                    range.flags & PC_MAP_PRIVATE ? "a private copy of " : "", range.version, there);
}

/* Under lock. Addresses without access, so that nobody else takes them while the server is asked. */
int pc__mapping_reserve(struct pc__mapping *mapping, uint64_t base_address)
{
    uint64_t length = mapping->trapped.length_bytes;
    const bool is_fixed = mapping->trapped.flags & PC_MAP_FIXED;
    for (int tries = 0;; tries++) { /* another client of this process may unmap it just now */
        int rc = pc__range_reserve(base_address, base_address + length, mapping->region,
                                   mapping->version);
        if (rc == PC_OK)
            mapping->trapped.address = base_address;
        if (rc != PC_ERR_EXISTS)
            return rc;
        struct pc__range_view ours;
        if (!is_fixed && (pc__is_private(mapping) ||
                          pc__range_overlaps(base_address, base_address + length, &ours)))
            break;
        if (is_fixed || tries == MOST_TRIES)
            return clash(mapping, base_address);
    }
    void *at = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return pc__fail_errno("mmap of %" PRIu64 " bytes of addresses", length);
    mapping->trapped.address = (uint64_t)(uintptr_t)at;
    return PC_OK;
}

int pc__mapping_lay(pc_client *client, const struct pc__mapping *mapping, int fd, int prot)
{
    const struct pc__trapped *trapped = &mapping->trapped;
    void *at = pc__pointer(trapped->address);
    int share = pc__is_private(mapping) ? MAP_PRIVATE : MAP_SHARED;
    if (mmap(at, trapped->length_bytes, prot, share | MAP_FIXED | MAP_NORESERVE, fd, 0) ==
        MAP_FAILED)
        return pc__fail_errno("mmap of variable %" PRIu64, mapping->region);
    pc__huge_pages_refuse(at, trapped->length_bytes);
    if (madvise(at, trapped->length_bytes, MADV_DONTFORK))
        return pc__fail_errno("MADV_DONTFORK of variable %" PRIu64, mapping->region);
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
    return pc__range_add(&range);
}

int pc__mapping_check_memory(struct pc__mapping *mapping, int fd, uint64_t inode)
{
    struct stat st;
    if (fstat(fd, &st))
        return pc__fail_errno("fstat of variable %" PRIu64, mapping->region);
    mapping->trapped.on_disk = !pc__is_memfd(fd);
    if (pc__file_id(&st) == inode && (uint64_t)st.st_size == mapping->trapped.length_bytes)
        return PC_OK;
    return pc__fail(PC_ERR_PROTOCOL,
                    "the page server's memory of variable %" PRIu64 " is %" PRIu64
                    " bytes long and should be %" PRIu64,
                    mapping->region, (uint64_t)st.st_size, mapping->trapped.length_bytes);
}

void pc__mapping_opened(struct pc__mapping *mapping, const void *body)
{
    struct pc__ctl_opened opened;
    memcpy(&opened, body, sizeof opened);
    mapping->inode = opened.inode;
    mapping->loss = opened.loss;
    mapping->trapped.needs_trap = opened.needs_trap != 0;
    mapping->wastes = opened.needs_trap & PC__OPENED_WASTES;
}

int pc__mapping_install(pc_client *client, struct pc__mapping *mapping, int fd)
{
    int rc = pc__mapping_check_memory(mapping, fd, mapping->inode);
    if (!rc)
        rc = pc__mapping_lay(client, mapping, fd, PROT_NONE);
    if (!rc)
        rc = client->trap.ops->arm(&client->trap, &mapping->trapped);
    close(fd);
    return rc;
}

/* Under lock. */
void pc__mapping_take_down(pc_client *client, struct pc__mapping *mapping)
{
    pc__idle_ended(client, mapping);
    pc__build_close_fd(mapping);
    if (mapping->is_kept && client->state == PC__CONN_CLOSED && mapping->state == PC__MAPPING_LIVE) {
        pc__range_set(mapping->trapped.address, PC__RANGE_KEPT, 0);
    } else if (mapping->trapped.address) {
        pc__range_set(mapping->trapped.address, PC__RANGE_RESERVED, 0);
        if (client->trap.ops && mapping->state != PC__MAPPING_GUARDED)
            client->trap.ops->forget(&client->trap, &mapping->trapped);
        pc__range_unmap(mapping->trapped.address, mapping->trapped.length_bytes, 0);
    }
    const struct pc__ctl_open close = {.mapping_id = mapping->id};
    const struct pc__ctl_region abandon = {.region = mapping->region};
    if (mapping->is_leased)
        (void)pc__outbox_send(client, PC__CTL_CLOSE, &close, sizeof close);
    else if (mapping->is_building && mapping->state == PC__MAPPING_LIVE)
        (void)pc__outbox_send(client, PC__CTL_ABANDON, &abandon, sizeof abandon);
    pc__mapping_remove(client, mapping);
    pthread_cond_broadcast(&client->changed);
}

void pc__mapping_release(pc_client *client, struct pc__mapping *mapping)
{
    if (--mapping->users == 0)
        pc__mapping_take_down(client, mapping);
}

static int use_found(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    struct pc__mapping *mapping = pc__mapping_find(client, id);
    if (!mapping || mapping->state == PC__MAPPING_OPENING || !mapping->users)
        return pc__fail(PC_ERR_NO_REGION, "no mapping %" PRIu64 " in this process", id);
    if (mapping->state == PC__MAPPING_GUARDED)
        return pc__fail(PC_ERR_FORKED, "variable %" PRIu64 " did not survive fork",
                        mapping->region);
    if (mapping->is_building)
        return pc__fail(PC_ERR_NO_REGION, "variable %" PRIu64 " is being built and is not sealed yet",
                        mapping->region);
    mapping->users++;
    *out = mapping;
    return PC_OK;
}

int pc__mapping_use(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    int rc = pc__call_refused(client);
    return rc ? rc : use_found(client, id, out);
}

int pc__use(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = pc__mapping_use(client, id, out);
    pthread_mutex_unlock(&client->lock);
    if (rc)
        pc__leave(client);
    return rc;
}

int pc__use_here(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = client->state == PC__CONN_CLOSED ? pc__call_refused(client) : use_found(client, id, out);
    pthread_mutex_unlock(&client->lock);
    if (rc)
        pc__leave(client);
    return rc;
}

void pc__unuse(pc_client *client, struct pc__mapping *mapping)
{
    pthread_mutex_lock(&client->lock);
    pc__mapping_release(client, mapping);
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
}

int pc__runs_check(const struct pc__mapping *mapping, const struct pc_run *runs, size_t n_runs)
{
    uint64_t n_blocks = mapping->trapped.length_bytes >> PC_BLOCK_SHIFT;
    for (size_t i = 0; i < n_runs; i++)
        if (runs[i].n_blocks == 0 || runs[i].first_block >= n_blocks ||
            runs[i].n_blocks > n_blocks - runs[i].first_block)
            return pc__fail(PC_ERR_RANGE, "run %zu, %" PRIu64 " blocks at %" PRIu64
                            ", is not inside the variable's %" PRIu64 " blocks",
                            i, runs[i].n_blocks, runs[i].first_block, n_blocks);
    return PC_OK;
}

/* --------------------------------------------------------------------- map */

int pc__mapping_lease(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns,
                      struct pc__call *call)
{
    for (;;) {
        struct pc__ctl_open open;
        *call = (struct pc__call){0};
        pc__mapping_describe(mapping, &open);
        call->opens = mapping->id;
        int rc = pc__call(client, PC__CTL_OPEN, &open, sizeof open, true, deadline_ns, call);
        if (rc)
            return rc;
        pthread_mutex_lock(&client->lock);
        mapping->is_leased = client->state == PC__CONN_UP && client->epoch == call->epoch;
        const bool is_whole = mapping->is_leased && call->n_fds == 1 &&
                              call->body_bytes >= sizeof(struct pc__ctl_opened);
        if (is_whole && !mapping->is_building) /* in one with is_leased: who attaches reads both */
            pc__mapping_opened(mapping, call->body);
        rc = pc__call_refused(client);
        pthread_mutex_unlock(&client->lock);
        if (is_whole)
            return PC_OK;
        pc__fds_close(call->fds, &call->n_fds);
        if (rc)
            return rc;
        if (mapping->is_leased && call->fds_lost)
            return pc__fail(PC_ERR_DESCRIPTORS, "no descriptor for variable %" PRIu64,
                            mapping->region);
        if (mapping->is_leased)
            return pc__fail(PC_ERR_PROTOCOL, "the page server opened variable %" PRIu64
                            " and sent no memory", mapping->region);
    }
}

static int open_mapping(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns)
{
    struct pc__call call;
    int rc = pc__mapping_lease(client, mapping, deadline_ns, &call);
    if (rc)
        return rc;
    return pc__mapping_install(client, mapping, call.fds[0]);
}

/* Exact reads or coarse ones: who asked for exact ones takes the superset. */
static struct pc__mapping *find_shared(pc_client *client, const struct pc__mapping *wanted,
                                       uint64_t base)
{
    struct pc__mapping *found = next_of(client, wanted->region, NULL);
    while (found && (pc__is_private(found) || found->version != wanted->version ||
                     (wanted->trapped.flags & PC_MAP_FIXED && found->trapped.address != base)))
        found = next_of(client, wanted->region, found);
    return found;
}

/* What was built here, is private since, and lies where it is wanted; with a user more. */
static struct pc__mapping *find_built(pc_client *client, const struct pc__mapping *wanted,
                                      uint64_t base)
{
    struct pc__mapping *found = next_of(client, wanted->region, NULL);
    while (found && !(found->is_built && !found->is_building && found->is_leased &&
                      found->state == PC__MAPPING_LIVE && found->version == wanted->version &&
                      found->trapped.address == base &&
                      found->trapped.length_bytes == wanted->trapped.length_bytes))
        found = next_of(client, wanted->region, found);
    if (found)
        found->users++;
    return found;
}

/* Under lock. 1: *out is the mapping that is there; 0: none is; negative: it is in the way. */
static int share(pc_client *client, const struct pc__mapping *wanted, uint64_t base,
                 uint64_t deadline_ns, struct pc__mapping **out)
{
    for (;;) {
        int rc = pc__call_refused(client);
        if (rc)
            return rc;
        struct pc__mapping *found = find_shared(client, wanted, base);
        if (found && !found->users && found->trapped.flags == wanted->trapped.flags &&
            found->trapped.length_bytes == wanted->trapped.length_bytes)
            pc__idle_ended(client, found);
        pc__idle_end_all(client, wanted->region);
        found = find_shared(client, wanted, base);
        if (!found)
            return 0;
        if (found->state == PC__MAPPING_GUARDED)
            return pc__fail(PC_ERR_FORKED, "variable %" PRIu64 " did not survive fork",
                            found->region);
        if (found->is_building)
            return pc__fail(PC_ERR_NO_REGION, "variable %" PRIu64
                            " is being built here and is not sealed yet", found->region);
        if (found->trapped.length_bytes != wanted->trapped.length_bytes)
            return pc__fail(PC_ERR_EXISTS,
                            "variable %" PRIu64 " is mapped here with %" PRIu64
                            " bytes, and %" PRIu64 " bytes were asked for",
                            found->region, found->trapped.length_bytes,
                            wanted->trapped.length_bytes);
        if (found->state == PC__MAPPING_LIVE) {
            found->users++;
            *out = found;
            return 1;
        }
        if (pc__clock_ns() >= deadline_ns)
            return pc__fail(PC_ERR_TIMEOUT, "another thread is mapping variable %" PRIu64,
                            found->region);
        pc__changed_wait(client, deadline_ns);
    }
}

void pc__mapping_tell(const struct pc__mapping *mapping, struct pc_mapping *out)
{
    *out = (struct pc_mapping){.id = mapping->id,
                               .address = mapping->trapped.address,
                               .length_bytes = mapping->trapped.length_bytes,
                               .loss = mapping->loss,
                               .wastes = mapping->wastes};
}

/* *reserved: addresses that the caller has reserved for it, 0 from when they are the mapping's; NULL: see
 * the file's head. */
static int map(pc_client *client, uint64_t region, uint64_t version, uint64_t base_address,
               uint64_t length_bytes, uint32_t flags, uint64_t *reserved, uint64_t timeout_ns,
               struct pc_mapping *out)
{
    uint64_t deadline_ns = pc__deadline(timeout_ns);
    memset(out, 0, sizeof *out);
    if (!pc__map_flags_fit(flags) || !pc__is_in_window(base_address, length_bytes))
        return pc__fail(PC_ERR_RANGE, "a region of %" PRIu64 " bytes at %#" PRIx64 ", flags %u",
                        length_bytes, base_address, flags);
    if (client->trap.kind == PC_TRAP_SIGSEGV && client->take_signals())
        return pc__fail(PC_ERR_NO_TRAP, "this process's SIGSEGV handler cannot be replaced");
    struct pc__mapping *mapping = pc__mapping_new(region);
    if (!mapping)
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping of variable %" PRIu64, region);
    mapping->version = version;
    mapping->trapped.length_bytes = length_bytes;
    mapping->trapped.flags = flags;

    struct pc__mapping *shared = NULL, *built = NULL;
    pthread_mutex_lock(&client->lock);
    if (flags & PC_MAP_PRIVATE)
        pc__idle_end_all(client, region);
    int rc = flags & PC_MAP_PRIVATE || reserved
                 ? pc__call_refused(client)
                 : share(client, mapping, base_address, deadline_ns, &shared);
    if (rc == 0 && !reserved && (flags & (PC_MAP_FIXED | PC_MAP_PRIVATE)) == PC_MAP_FIXED)
        built = find_built(client, mapping, base_address);
    if (built) {
        pc__mapping_tell(built, out);
        pthread_mutex_unlock(&client->lock);
        pc__mapping_free(mapping);
        rc = pc__build_share(client, built);
        if (rc)
            memset(out, 0, sizeof *out);
        return rc;
    }
    if (rc == 0 && !reserved)
        rc = pc__mapping_reserve(mapping, base_address);
    if (rc == 0 && reserved) {
        mapping->trapped.address = *reserved;
        *reserved = 0;
    }
    if (rc == 0) {
        mapping->id = ++client->next_mapping_id;
        pc__mapping_add(client, mapping);
    }
    if (rc == 1)
        pc__mapping_tell(shared, out);
    pthread_mutex_unlock(&client->lock);
    if (rc) {
        pc__mapping_free(mapping);
        return rc < 0 ? rc : PC_OK;
    }

    rc = open_mapping(client, mapping, deadline_ns);

    pthread_mutex_lock(&client->lock);
    if (!rc)
        rc = pc__call_refused(client);
    if (!rc && mapping->error)
        rc = pc__fail(mapping->error, "the page server restarted without variable %" PRIu64,
                      region);
    if (rc) {
        pc__mapping_take_down(client, mapping);
    } else {
        pc__mapping_goes(mapping, PC__MAPPING_OPEN);
        pc__mapping_tell(mapping, out);
    }
    PC__AUDIT_SOMETIMES(pc__mappings_audit(client));
    pthread_cond_broadcast(&client->changed);
    pthread_mutex_unlock(&client->lock);
    return rc;
}

PC_API int pc_client_map(pc_client *client, uint64_t region, uint64_t version,
                         uint64_t base_address, uint64_t length_bytes, uint32_t flags,
                         uint64_t timeout_ns, struct pc_mapping *out)
{
    pc__enter(client);
    int rc = map(client, region, version, base_address, length_bytes, flags, NULL, timeout_ns, out);
    pc__leave(client);
    return rc;
}

PC_API int pc_client_map_at(pc_client *client, uint64_t region, uint64_t version,
                            uint64_t base_address, uint64_t length_bytes, uint32_t flags,
                            uint64_t reserved, uint64_t timeout_ns, struct pc_mapping *out)
{
    pc__enter(client);
    int rc = reserved && !(flags & PC_MAP_FIXED)
                 ? map(client, region, version, base_address, length_bytes, flags, &reserved,
                       timeout_ns, out)
                 : pc__fail(PC_ERR_RANGE, "variable %" PRIu64 " cannot be mapped at %#" PRIx64
                            " with flags %u", region, reserved, flags);
    pc__leave(client);
    if (rc && reserved)
        (void)munmap(pc__pointer(reserved), length_bytes);
    return rc;
}

/* Under lock. Its addresses stay, with no access and nothing behind them. */
static int empty(pc_client *client, struct pc__mapping *mapping)
{
    const struct pc__trapped *trapped = &mapping->trapped;
    pc__range_set(trapped->address, PC__RANGE_RESERVED, 0);
    client->trap.ops->forget(&client->trap, trapped);
    int rc = mmap(pc__pointer(trapped->address), trapped->length_bytes, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED
                 ? pc__fail_errno("mmap of %" PRIu64 " bytes of addresses", trapped->length_bytes)
                 : PC_OK;
    pc__range_set(trapped->address, PC__RANGE_GONE, 0); /* whoever maps there next says what it is */
    mapping->trapped.address = 0;                       /* they are no longer its to unmap */
    pc__mapping_release(client, mapping);
    return rc;
}

/* Under lock. */
static int may_remap(pc_client *client, const struct pc__mapping *mapping)
{
    int rc = pc__call_refused(client);
    if (!rc && (!mapping || mapping->state != PC__MAPPING_LIVE || mapping->is_building))
        rc = pc__fail(PC_ERR_NO_REGION, "no mapping in this process that could be replaced");
    if (!rc && (!pc__is_private(mapping) || mapping->users != 1))
        rc = pc__fail(PC_ERR_RANGE, "variable %" PRIu64 " is mapped to be read, or in use: only a "
                      "private mapping of one user is replaced", mapping->region);
    return rc;
}

PC_API int pc_client_remap(pc_client *client, uint64_t mapping_id, uint64_t region, uint64_t version,
                           uint64_t base_address, uint32_t flags, uint64_t timeout_ns,
                           struct pc_mapping *out)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    struct pc__mapping *mapping = pc__mapping_find(client, mapping_id);
    struct pc__trapped at = {0};
    int rc = may_remap(client, mapping);
    if (!rc) {
        at = mapping->trapped;
        if (!pc__is_in_window(base_address, at.length_bytes) || flags & ~(uint32_t)PC_MAP_PRIVATE)
            rc = pc__fail(PC_ERR_RANGE, "a region of %" PRIu64 " bytes at %#" PRIx64 ", flags %u",
                          at.length_bytes, base_address, flags);
    }
    const bool is_gone = !rc;
    if (!rc)
        rc = empty(client, mapping);
    pthread_mutex_unlock(&client->lock);
    uint64_t reserved = at.address;
    if (!rc)
        rc = map(client, region, version, base_address, at.length_bytes,
                 (at.flags & ~(uint32_t)(PC_MAP_FIXED | PC_MAP_PRIVATE)) | flags, &reserved, timeout_ns, out);
    /* A map that failed has given them back. Who takes them first is in our way for good: the caller's
     * memory, which it still points into, would be another's. */
    if (rc && is_gone && !reserved &&
        mmap(pc__pointer(at.address), at.length_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0) == MAP_FAILED)
        rc = pc__fail_errno("mmap of %" PRIu64 " bytes of addresses", at.length_bytes);
    if (rc)
        *out = (struct pc_mapping){.address = is_gone ? at.address : 0};
    pc__leave(client);
    return rc;
}

PC_API int pc_addresses_reserve(uint64_t length_bytes, uint64_t wanted, uint64_t *address)
{
    void *at = mmap(pc__pointer(wanted), length_bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (wanted ? MAP_FIXED_NOREPLACE : 0), -1, 0);
    if (at == MAP_FAILED && wanted && errno == EEXIST)
        return pc__fail(PC_ERR_CLASH, "something is mapped at %#" PRIx64 " already", wanted);
    if (at == MAP_FAILED)
        return pc__fail_errno("mmap of %" PRIu64 " bytes of addresses", length_bytes);
    *address = (uint64_t)(uintptr_t)at;
    return PC_OK;
}

PC_API int pc_addresses_release(uint64_t address, uint64_t length_bytes)
{
    if (munmap(pc__pointer(address), length_bytes))
        return pc__fail_errno("munmap of %" PRIu64 " bytes of addresses", length_bytes);
    return PC_OK;
}

PC_API int pc_client_unmap(pc_client *client, uint64_t mapping_id)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    struct pc__mapping *mapping = pc__mapping_find(client, mapping_id);
    int rc = PC_OK;
    if (client->state == PC__CONN_CLOSED)
        rc = pc__fail(PC_ERR_CLOSED, "the client was closed");
    else if (!mapping || mapping->state == PC__MAPPING_OPENING || !mapping->users)
        rc = pc__fail(PC_ERR_NO_REGION, "no mapping %" PRIu64 " in this process", mapping_id);
    else
        pc__mapping_release(client, mapping);
    PC__AUDIT_SOMETIMES(pc__mappings_audit(client));
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}
