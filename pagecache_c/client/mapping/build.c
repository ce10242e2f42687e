/* build.c - building a region in place: its home's memory, mapped read-write at its address. See
 * client.h.
 *
 * Nothing of it can be absent (a hole of a home is a block of zeros), so there is no trap. The
 * server knows of no lease before the seal: unmapping abandons the region, and if the server dies
 * the region is lost while the memory stays.
 *
 * Order of a seal: mprotect, SEAL, OPEN of version 0 for the mapping that is there. The mapping is
 * writable again after a failure, unless the region is sealed by then, or may be (no answer came):
 * then it stays as it is, and another seal asks the server what it is.
 *
 * Kept memory: the allocator's nodes of a library that keeps state for the whole process (pybind11,
 * SWIG, the C++ library) lie among the structure that it built, and are written for as long as the
 * process lives. Where that may be, the seal lays the same memfd over the range once more, privately,
 * in one step: what is written from then on is a copy of this process's own, and nobody sees it.
 *
 * Threads: any. Lock: client.lock around the flags; is_sealing keeps a second sealer out.
 */
#include "client/client.h"

#include "trap/read_set.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Under lock. On success the addresses are taken and *out is known. */
static int add(pc_client *client, uint64_t region, uint64_t base_address, uint64_t length_bytes,
               struct pc__mapping **out)
{
    int rc = pc__call_refused(client);
    if (rc)
        return rc;
    struct pc__mapping *mapping = pc__mapping_new(region);
    if (!mapping)
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping of variable %" PRIu64, region);
    mapping->build_fd = -1;
    mapping->trapped.length_bytes = length_bytes;
    mapping->trapped.flags = PC_MAP_FIXED;
    rc = pc__mapping_reserve(mapping, base_address);
    if (rc) {
        pc__mapping_free(mapping);
        return rc;
    }
    mapping->id = ++client->next_mapping_id;
    pc__mapping_add(client, mapping);
    *out = mapping;
    return PC_OK;
}

/* Owns fd, which stays open until the seal. */
static int lay(pc_client *client, struct pc__mapping *mapping, int fd)
{
    struct stat st;
    int rc = fstat(fd, &st) ? pc__fail_errno("fstat of variable %" PRIu64, mapping->region) : PC_OK;
    if (!rc) {
        mapping->inode = pc__file_id(&st);
        rc = pc__mapping_check_memory(mapping, fd, mapping->inode);
    }
    if (!rc)
        rc = pc__mapping_lay(client, mapping, fd, PROT_READ | PROT_WRITE);
    mapping->build_fd = fd; /* closed with the mapping, or by the seal */
    return rc;
}

static int build(pc_client *client, uint64_t region, uint64_t base_address, uint64_t length_bytes,
                 enum pc_medium medium, uint64_t timeout_ns, struct pc_mapping *out)
{
    memset(out, 0, sizeof *out);
    if (!pc__is_in_window(base_address, length_bytes))
        return pc__fail(PC_ERR_RANGE, "a region of %" PRIu64 " bytes at %#" PRIx64, length_bytes,
                        base_address);
    struct pc__mapping *mapping = NULL;
    pthread_mutex_lock(&client->lock);
    int rc = add(client, region, base_address, length_bytes, &mapping);
    pthread_mutex_unlock(&client->lock);
    if (rc)
        return rc;

    int fd = -1;
    rc = pc__create(client, region, base_address, length_bytes, medium, timeout_ns, &fd);
    bool is_created = !rc;
    if (!rc)
        rc = lay(client, mapping, fd);

    pthread_mutex_lock(&client->lock);
    if (!rc)
        rc = pc__call_refused(client);
    mapping->is_building = true;
    if (is_created)
        pc__mapping_goes(mapping, PC__MAPPING_OPEN); /* so that taking it down abandons the region */
    if (rc)
        pc__mapping_take_down(client, mapping);
    else
        pc__mapping_tell(mapping, out);
    pthread_cond_broadcast(&client->changed);
    pthread_mutex_unlock(&client->lock);
    return rc;
}

PC_API int pc_client_build(pc_client *client, uint64_t region, uint64_t base_address,
                           uint64_t length_bytes, enum pc_medium medium, uint64_t timeout_ns,
                           struct pc_mapping *out)
{
    pc__enter(client);
    int rc = build(client, region, base_address, length_bytes, medium, timeout_ns, out);
    pc__leave(client);
    return rc;
}

/* -------------------------------------------------------------------- seal */

/* Under lock. The caller is the one that seals it, and one of its users. */
static int seal_begin(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    int rc = pc__call_refused(client);
    if (rc)
        return rc;
    struct pc__mapping *mapping = pc__mapping_find(client, id);
    if (!mapping || mapping->state == PC__MAPPING_OPENING)
        return pc__fail(PC_ERR_NO_REGION, "no mapping %" PRIu64 " in this process", id);
    if (mapping->state == PC__MAPPING_GUARDED)
        return pc__fail(PC_ERR_FORKED, "variable %" PRIu64 " did not survive fork", mapping->region);
    if (!mapping->is_building || mapping->is_sealing)
        return pc__fail(PC_ERR_EXISTS, "variable %" PRIu64 " is sealed, or another thread is at it",
                        mapping->region);
    mapping->is_sealing = true;
    mapping->users++;
    *out = mapping;
    return PC_OK;
}

void pc__build_close_fd(struct pc__mapping *mapping)
{
    if ((mapping->is_building || mapping->is_built) && mapping->build_fd >= 0) {
        close(mapping->build_fd);
        mapping->build_fd = -1;
    }
}

/* From here on what is written is this process's alone. Once: what it has written since stays. */
static int make_private(pc_client *client, struct pc__mapping *mapping)
{
    if (mapping->is_built)
        return PC_OK;
    pthread_mutex_lock(&client->lock);
    mapping->trapped.flags |= PC_MAP_PRIVATE;
    int rc = pc__mapping_lay(client, mapping, mapping->build_fd, PROT_READ | PROT_WRITE);
    if (!rc && madvise(pc__pointer(mapping->trapped.address), mapping->trapped.length_bytes,
                       MADV_DOFORK))
        rc = pc__fail_errno("MADV_DOFORK of variable %" PRIu64, mapping->region);
    mapping->is_built = !rc;
    pthread_mutex_unlock(&client->lock);
    return rc;
}

static int protect(const struct pc__mapping *mapping, int prot)
{
    if (mapping->is_kept)
        return PC_OK;
    if (mprotect(pc__pointer(mapping->trapped.address), mapping->trapped.length_bytes, prot))
        return pc__fail_errno("mprotect of variable %" PRIu64, mapping->region);
    return PC_OK;
}

/* A server that answered for certain that there is no such region has none; one that an earlier
 * SEAL may have reached says so of a region that is sealed already, and OPEN tells. */
static int send_seal(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns)
{
    const struct pc__ctl_region body = {.region = mapping->region,
                                        .length_bytes = mapping->trapped.length_bytes};
    struct pc__call call = {0};
    int rc = pc__call(client, PC__CTL_SEAL, &body, sizeof body, false, deadline_ns, &call);
    bool was_sent = call.request_id != 0, is_lost = rc == PC_ERR_NO_SERVER && call.is_dropped;
    if (!rc)
        pc__fds_close(call.fds, &call.n_fds);
    if (rc == PC_ERR_NO_REGION && mapping->may_be_sealed)
        return PC_OK;
    if (!rc || is_lost || (was_sent && !call.is_done))
        mapping->may_be_sealed = true;
    return is_lost ? PC_OK : rc;
}

/* Another try opens it again. */
static void end_lease(pc_client *client, struct pc__mapping *mapping)
{
    const struct pc__ctl_open close = {.mapping_id = mapping->id};
    pthread_mutex_lock(&client->lock);
    if (mapping->is_leased)
        (void)pc__outbox_send(client, PC__CTL_CLOSE, &close, sizeof close);
    mapping->is_leased = false;
    pthread_mutex_unlock(&client->lock);
}

static int open_sealed(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns)
{
    struct pc__ctl_opened opened;
    struct pc__call call;
    int rc = pc__mapping_lease(client, mapping, deadline_ns, &call);
    if (rc)
        return rc;
    memcpy(&opened, call.body, sizeof opened);
    rc = opened.inode == mapping->inode
             ? pc__mapping_check_memory(mapping, call.fds[0], opened.inode)
             : pc__fail(PC_ERR_PROTOCOL, "the page server sealed other memory than variable %" PRIu64
                        " was built in", mapping->region);
    pc__fds_close(call.fds, &call.n_fds);
    if (!rc && opened.needs_trap)
        rc = pc__fail(PC_ERR_PROTOCOL, "the page server says that blocks of variable %" PRIu64
                      " are absent at its home", mapping->region);
    if (rc)
        end_lease(client, mapping);
    return rc;
}

/* Not under lock, and still one of its users. */
static int seal(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns)
{
    int rc = mapping->is_kept ? make_private(client, mapping) : protect(mapping, PROT_READ);
    if (!rc)
        rc = send_seal(client, mapping, deadline_ns);
    if (!rc)
        rc = open_sealed(client, mapping, deadline_ns);
    if (rc == PC_ERR_NO_REGION || rc == PC_ERR_NO_GENERATION)
        mapping->may_be_sealed = false; /* lost with the server that it was made at */
    if (rc && !mapping->may_be_sealed && protect(mapping, PROT_READ | PROT_WRITE))
        return pc__fail_errno("mprotect of variable %" PRIu64 " after a seal that failed",
                              mapping->region);
    return rc;
}

PC_API int pc_client_build_seal(pc_client *client, uint64_t mapping_id, uint64_t timeout_ns)
{
    struct pc__mapping *mapping = NULL;
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = seal_begin(client, mapping_id, &mapping);
    pthread_mutex_unlock(&client->lock);
    if (!rc) {
        rc = seal(client, mapping, pc__deadline(timeout_ns));
        pthread_mutex_lock(&client->lock);
        mapping->is_sealing = false;
        if (!rc && !mapping->is_kept)
            pc__build_close_fd(mapping);
        mapping->is_building = rc != PC_OK;
        pc__mapping_release(client, mapping);
        pthread_mutex_unlock(&client->lock);
    }
    pc__leave(client);
    return rc;
}

/* -------------------------------------------------------------------- kept */

/* Under lock: one that was built here, whatever became of it. */
static int find_built(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    if (client->state == PC__CONN_CLOSED)
        return pc__fail(PC_ERR_CLOSED, "the client was closed");
    struct pc__mapping *mapping = pc__mapping_find(client, id);
    if (!mapping || !mapping->users || mapping->state == PC__MAPPING_OPENING)
        return pc__fail(PC_ERR_NO_REGION, "no mapping %" PRIu64 " in this process", id);
    *out = mapping;
    return PC_OK;
}

PC_API int pc_client_build_keep(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping = NULL;
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = find_built(client, mapping_id, &mapping);
    if (!rc && mapping->state == PC__MAPPING_GUARDED)
        rc = pc__fail(PC_ERR_FORKED, "variable %" PRIu64 " did not survive fork", mapping->region);
    if (!rc && (!mapping->is_building || mapping->is_sealing))
        rc = pc__fail(PC_ERR_EXISTS, "variable %" PRIu64 " is not being built", mapping->region);
    if (!rc)
        mapping->is_kept = true;
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}

static int drop(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping = NULL;
    pthread_mutex_lock(&client->lock);
    int rc = find_built(client, mapping_id, &mapping);
    if (!rc && (!mapping->is_building || mapping->is_sealing || !mapping->is_kept))
        rc = pc__fail(PC_ERR_EXISTS, "variable %" PRIu64 " is not being built, or not to be kept",
                      mapping->region);
    if (!rc)
        mapping->is_sealing = true;
    pthread_mutex_unlock(&client->lock);
    if (rc)
        return rc;
    rc = make_private(client, mapping);
    pthread_mutex_lock(&client->lock);
    mapping->is_sealing = false;
    if (!rc) {
        const struct pc__ctl_region abandon = {.region = mapping->region};
        if (mapping->is_leased) { /* of a seal that went half the way */
            const struct pc__ctl_open close = {.mapping_id = mapping->id};
            (void)pc__outbox_send(client, PC__CTL_CLOSE, &close, sizeof close);
            mapping->is_leased = false;
        }
        (void)pc__outbox_send(client, PC__CTL_ABANDON, &abandon, sizeof abandon);
        mapping->is_building = false;
        pc__build_close_fd(mapping);
    }
    pthread_mutex_unlock(&client->lock);
    return rc;
}

PC_API int pc_client_build_drop(pc_client *client, uint64_t mapping_id)
{
    pc__enter(client);
    int rc = drop(client, mapping_id);
    pc__leave(client);
    return rc;
}

PC_API int pc_client_build_let_go(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping = NULL;
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = find_built(client, mapping_id, &mapping);
    if (!rc && mapping->is_building)
        rc = pc__fail(PC_ERR_EXISTS, "variable %" PRIu64 " is still being built", mapping->region);
    if (!rc) {
        mapping->is_kept = false;
        pc__build_close_fd(mapping);
    }
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}

/* A block becomes private by being written: an atomic no-op, for other threads may write there. Holes
 * are zeros, and stay holes. */
static int copy_blocks(const struct pc__mapping *mapping)
{
    char *base = pc__pointer(mapping->trapped.address);
    for (off_t end = 0;;) {
        off_t begin = lseek(mapping->build_fd, end, SEEK_DATA);
        if (begin < 0 && errno == ENXIO)
            return PC_OK;
        end = begin < 0 ? begin : lseek(mapping->build_fd, begin, SEEK_HOLE);
        if (end < 0)
            return pc__fail_errno("looking for the blocks of variable %" PRIu64, mapping->region);
        for (off_t at = begin; at < end; at += PC_BLOCK_BYTES)
            (void)__atomic_fetch_or(base + at, 0, __ATOMIC_RELAXED);
    }
}

/* Under lock: the next one to copy, with a user more; NULL: none. */
static struct pc__mapping *next_to_copy(pc_client *client)
{
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next)
        if (mapping->is_kept && mapping->is_built && mapping->is_leased &&
            mapping->state == PC__MAPPING_LIVE) {
            mapping->users++;
            return mapping;
        }
    return NULL;
}

PC_API int pc_client_build_copy(pc_client *client)
{
    int rc = PC_OK;
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    for (struct pc__mapping *mapping; !rc && (mapping = next_to_copy(client));) {
        pthread_mutex_unlock(&client->lock);
        rc = copy_blocks(mapping);
        pthread_mutex_lock(&client->lock);
        const struct pc__ctl_open close = {.mapping_id = mapping->id};
        if (!rc && mapping->is_leased) {
            (void)pc__outbox_send(client, PC__CTL_CLOSE, &close, sizeof close);
            mapping->is_leased = false;
        }
        pc__mapping_release(client, mapping);
    }
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}

PC_API int pc_kept_unmap(uint64_t address, uint64_t length_bytes)
{
    struct pc__range_view range;
    if (!pc__range_find(address, &range) || range.kind != PC__RANGE_KEPT || range.begin != address ||
        range.end - range.begin != length_bytes)
        return pc__fail(PC_ERR_NO_REGION, "nothing is kept at %#" PRIx64, address);
    pc__range_unmap(address, length_bytes, 0);
    return PC_OK;
}

int pc__build_share(pc_client *client, struct pc__mapping *mapping)
{
    int64_t n = pc__read_set(PC__SCAN_COPIED, mapping->trapped.address,
                             mapping->trapped.length_bytes, NULL, 0);
    if (n == 0)
        return PC_OK;
    uint64_t region = mapping->region;
    pthread_mutex_lock(&client->lock);
    pc__mapping_release(client, mapping);
    pthread_mutex_unlock(&client->lock);
    return n < 0 ? (int)n
                 : pc__fail(PC_ERR_CLASH, "variable %" PRIu64 " was built in this process, and libraries "
                            "have written to its memory since; their copy is at its address", region);
}
