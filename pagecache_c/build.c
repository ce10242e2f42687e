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
 * Threads: any. Lock: client.lock around the flags; is_sealing keeps a second sealer out.
 */
#include "client.h"

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
    struct pc__mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping of region %" PRIu64, region);
    *mapping = (struct pc__mapping){.region = region, .users = 1,
                                    .trapped = {.length_bytes = length_bytes,
                                                .flags = PC_MAP_FIXED}};
    rc = pc__mapping_reserve(client, mapping, base_address);
    if (rc) {
        free(mapping);
        return rc;
    }
    mapping->id = ++client->next_mapping_id;
    pc__mapping_add(client, mapping);
    *out = mapping;
    return PC_OK;
}

/* Owns fd. */
static int lay(pc_client *client, struct pc__mapping *mapping, int fd)
{
    struct stat st;
    int rc = fstat(fd, &st) ? pc__fail_errno("fstat of region %" PRIu64, mapping->region) : PC_OK;
    if (!rc) {
        mapping->inode = (uint64_t)st.st_ino;
        rc = pc__mapping_check_memory(mapping, fd, mapping->inode);
    }
    if (!rc)
        rc = pc__mapping_lay(client, mapping, fd, PROT_READ | PROT_WRITE);
    close(fd);
    return rc;
}

static int build(pc_client *client, uint64_t region, uint64_t base_address, uint64_t length_bytes,
                 uint64_t timeout_ns, struct pc_mapping *out)
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
    rc = pc__create(client, region, base_address, length_bytes, timeout_ns, &fd);
    bool is_created = !rc;
    if (!rc)
        rc = lay(client, mapping, fd);

    pthread_mutex_lock(&client->lock);
    if (!rc)
        rc = pc__call_refused(client);
    mapping->is_building = true;
    if (is_created)
        mapping->state = PC__MAPPING_LIVE; /* so that taking it down abandons the region */
    if (rc)
        pc__mapping_take_down(client, mapping);
    else
        pc__mapping_tell(mapping, out);
    pthread_cond_broadcast(&client->changed);
    pthread_mutex_unlock(&client->lock);
    return rc;
}

PC_API int pc_client_build(pc_client *client, uint64_t region, uint64_t base_address,
                           uint64_t length_bytes, uint64_t timeout_ns, struct pc_mapping *out)
{
    pc__enter(client);
    int rc = build(client, region, base_address, length_bytes, timeout_ns, out);
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
    if (mapping->state == PC__MAPPING_GUARD)
        return pc__fail(PC_ERR_FORKED, "region %" PRIu64 " did not survive fork", mapping->region);
    if (!mapping->is_building || mapping->is_sealing)
        return pc__fail(PC_ERR_EXISTS, "region %" PRIu64 " is sealed, or another thread is at it",
                        mapping->region);
    mapping->is_sealing = true;
    mapping->users++;
    *out = mapping;
    return PC_OK;
}

static int protect(const struct pc__mapping *mapping, int prot)
{
    if (mprotect(pc__pointer(mapping->trapped.address), mapping->trapped.length_bytes, prot))
        return pc__fail_errno("mprotect of region %" PRIu64, mapping->region);
    return PC_OK;
}

/* A server that answered for certain that there is no such region has none; one that an earlier
 * SEAL may have reached says so of a region that is sealed already, and OPEN tells. */
static int send_seal(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns)
{
    const struct pc__ctl_region body = {.region = mapping->region};
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
             : pc__fail(PC_ERR_PROTOCOL, "the page server sealed other memory than region %" PRIu64
                        " was built in", mapping->region);
    pc__fds_close(call.fds, &call.n_fds);
    if (!rc && opened.needs_trap)
        rc = pc__fail(PC_ERR_PROTOCOL, "the page server says that blocks of region %" PRIu64
                      " are absent at its home", mapping->region);
    if (rc)
        end_lease(client, mapping);
    return rc;
}

/* Not under lock, and still one of its users. */
static int seal(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns)
{
    int rc = protect(mapping, PROT_READ);
    if (!rc)
        rc = send_seal(client, mapping, deadline_ns);
    if (!rc)
        rc = open_sealed(client, mapping, deadline_ns);
    if (rc == PC_ERR_NO_REGION || rc == PC_ERR_NO_GENERATION)
        mapping->may_be_sealed = false; /* lost with the server that it was made at */
    if (rc && !mapping->may_be_sealed && protect(mapping, PROT_READ | PROT_WRITE))
        return pc__fail_errno("mprotect of region %" PRIu64 " after a seal that failed",
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
        mapping->is_building = rc != PC_OK;
        pc__mapping_release(client, mapping);
        pthread_mutex_unlock(&client->lock);
    }
    pc__leave(client);
    return rc;
}
