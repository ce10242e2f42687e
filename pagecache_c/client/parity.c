/* parity.c - the layer of a parity: what a commit changes in the pieces of a group, XORed. See client.h;
 * stage.c has the other layers.
 *
 * What a block was is read from another mapping of the same version, which is not private, and not from
 * the memory under the private one: a block of that may have been evicted since it was copied, and a hole
 * reads as zeros. A touch of the other mapping brings the block back. Those that are absent are asked for
 * at once, before any is touched.
 *
 * The blocks go through a buffer that fits a core's cache: each byte is read once from either mapping and
 * written once to the file.
 *
 * Threads: any. No lock is held while blocks are read: a touch may fault.
 */
#include "client/client.h"

#include "kernels/xor.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK_BLOCKS 64u /* 256 KiB */

/* One piece of the group. */
struct member {
    struct pc__mapping *mapping;
    struct pc_mapping old;             /* id 0: there is none */
    const struct pc_run *runs;
    size_t n_runs;
    size_t at;                         /* the first run that does not end before what is made now */
};

struct parity {
    struct member *members;
    size_t n_members;
    struct pc_run *runs;               /* of all of them: sorted, disjoint, none beside another */
    size_t n_runs;
};

/* ------------------------------------------------------------- what it is made of */

/* The version that the private mapping is of, not private. It lies elsewhere, and is shared with nobody:
 * what is read here is not in the read set of who reads that version. */
static int map_old(pc_client *client, const struct pc_parity_member *from, struct member *member,
                   uint64_t deadline_ns)
{
    const struct pc__mapping *mapping = member->mapping;
    const uint64_t length_bytes = mapping->trapped.length_bytes, now_ns = pc__clock_ns();
    const uint32_t flags = mapping->trapped.flags & (0xffu << PC_MAP_PAGE_SHIFT);
    uint64_t at = 0;
    int rc = pc_addresses_reserve(length_bytes, 0, &at);
    if (!rc)
        rc = pc_client_map_at(client, from->region ? from->region : mapping->region,
                              from->region ? from->version : mapping->version, PC_WINDOW_BEGIN, length_bytes,
                              flags, at, deadline_ns > now_ns ? deadline_ns - now_ns : 0, &member->old);
    if (rc)
        member->old.id = 0;
    return rc;
}

static int use_member(pc_client *client, const struct pc_parity_member *from, bool is_delta,
                      uint64_t deadline_ns, struct member *member)
{
    member->runs = from->runs;
    member->n_runs = from->n_runs;
    int rc = pc__use_private(client, from->mapping_id, &member->mapping);
    if (rc) {
        member->mapping = NULL;
        return rc;
    }
    rc = pc__layer_check_runs(member->mapping, member->runs, member->n_runs);
    return rc || !is_delta || from->was_lost
               ? rc
               : map_old(client, from, member, deadline_ns);
}

static void unuse_members(pc_client *client, const struct parity *parity)
{
    for (size_t i = 0; i < parity->n_members; i++) {
        if (parity->members[i].old.id)
            (void)pc_client_unmap(client, parity->members[i].old.id); /* it goes with the client else */
        if (parity->members[i].mapping)
            pc__unuse(client, parity->members[i].mapping);
    }
}

static int by_first_block(const void *a, const void *b)
{
    const struct pc_run *x = a, *y = b;
    return (x->first_block > y->first_block) - (x->first_block < y->first_block);
}

/* Sorted runs that may overlap. Returns how many are left. */
static size_t join(struct pc_run *runs, size_t n_runs)
{
    size_t n = 0;
    for (size_t i = 0; i < n_runs; i++) {
        struct pc_run *last = n ? &runs[n - 1] : NULL;
        const uint64_t end = runs[i].first_block + runs[i].n_blocks;
        if (!last || runs[i].first_block > last->first_block + last->n_blocks)
            runs[n++] = runs[i];
        else if (end > last->first_block + last->n_blocks)
            last->n_blocks = end - last->first_block;
    }
    return n;
}

static int join_runs(struct parity *parity)
{
    size_t n = 0;
    for (size_t i = 0; i < parity->n_members; i++)
        n += parity->members[i].n_runs;
    parity->runs = calloc(n, sizeof *parity->runs);
    if (!parity->runs)
        return pc__fail(PC_ERR_NO_MEMORY, "%zu runs of a parity", n);
    for (size_t i = 0, at = 0; i < parity->n_members; at += parity->members[i++].n_runs)
        memcpy(parity->runs + at, parity->members[i].runs,
               parity->members[i].n_runs * sizeof *parity->runs);
    qsort(parity->runs, n, sizeof *parity->runs, by_first_block);
    parity->n_runs = join(parity->runs, n);
    return PC_OK;
}

/* ------------------------------------------------------------- blocks */

static const uint8_t *block_at(uint64_t address, uint64_t block)
{
    return pc__pointer(address + (block << PC_BLOCK_SHIFT));
}

/* XORs what the member has written of these blocks, and what it was, into them. Later blocks only. */
static void add_member(struct member *member, uint64_t first, uint64_t n, uint8_t *blocks)
{
    const uint64_t end = first + n;
    while (member->at < member->n_runs &&
           member->runs[member->at].first_block + member->runs[member->at].n_blocks <= first)
        member->at++;
    for (size_t i = member->at; i < member->n_runs && member->runs[i].first_block < end; i++) {
        const uint64_t past = member->runs[i].first_block + member->runs[i].n_blocks;
        const uint64_t from = member->runs[i].first_block > first ? member->runs[i].first_block : first;
        const uint64_t n_bytes = ((past < end ? past : end) - from) << PC_BLOCK_SHIFT;
        uint8_t *to = blocks + ((from - first) << PC_BLOCK_SHIFT);
        pc__xor(to, to, block_at(member->mapping->trapped.address, from), n_bytes);
        if (member->old.id)
            pc__xor(to, to, block_at(member->old.address, from), n_bytes);
    }
}

static int write_all(int fd, const uint8_t *bytes, uint64_t n_bytes, uint64_t offset)
{
    while (n_bytes) {
        ssize_t n = pwrite(fd, bytes, n_bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return pc__fail_errno("pwrite of %" PRIu64 " bytes of a parity", n_bytes);
        bytes += n;
        offset += (uint64_t)n;
        n_bytes -= (uint64_t)n;
    }
    return PC_OK;
}

static int write_delta(const struct parity *parity, int fd, uint64_t offset)
{
    uint8_t *blocks = malloc(CHUNK_BLOCKS << PC_BLOCK_SHIFT);
    int rc = blocks ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "blocks of a parity");
    for (size_t i = 0; i < parity->n_runs && !rc; i++) {
        uint64_t at = parity->runs[i].first_block, end = at + parity->runs[i].n_blocks, n;
        for (; at < end && !rc; at += n, offset += n << PC_BLOCK_SHIFT) {
            n = end - at < CHUNK_BLOCKS ? end - at : CHUNK_BLOCKS;
            memset(blocks, 0, n << PC_BLOCK_SHIFT);
            for (size_t j = 0; j < parity->n_members; j++)
                add_member(&parity->members[j], at, n, blocks);
            rc = write_all(fd, blocks, n << PC_BLOCK_SHIFT, offset);
        }
    }
    free(blocks);
    return rc;
}

/* ------------------------------------------------------------- the layer */

static int fetch_old(pc_client *client, const struct parity *parity, uint64_t deadline_ns)
{
    int rc = PC_OK;
    for (size_t i = 0; i < parity->n_members && !rc; i++) {
        const struct member *member = &parity->members[i];
        const uint64_t now_ns = pc__clock_ns();
        if (member->old.id)
            rc = pc_client_prefetch(client, member->old.id, member->runs, member->n_runs, 1,
                                    deadline_ns > now_ns ? deadline_ns - now_ns : 0);
    }
    return rc;
}

static int make(pc_client *client, const struct parity *parity, struct pc__layer_head *head,
                int n_threads, uint64_t deadline_ns, uint64_t *server_id)
{
    const bool is_delta = head->flags & PC__LAYER_DELTA;
    int rc = is_delta ? fetch_old(client, parity, deadline_ns) : PC_OK;
    if (rc)
        return rc;
    int fd = pc__layer_begin(head, parity->runs, parity->n_runs);
    if (fd < 0)
        return fd;
    rc = is_delta ? write_delta(parity, fd, head->data_offset)
                  : pc__copy_runs(fd, head->data_offset, parity->members[0].mapping->trapped.address,
                                  parity->runs, parity->n_runs, n_threads);
    if (!rc)
        rc = pc__layer_hand_over(client, fd, head, deadline_ns, server_id);
    close(fd);
    return rc;
}

PC_API int64_t pc_client_stage_parity(pc_client *client, uint64_t region, uint64_t commit_id,
                                      int is_delta, const struct pc_parity_member *members,
                                      size_t n_members, int n_threads,
                                      uint64_t timeout_ns, struct pc_run *runs, size_t capacity,
                                      uint64_t *server_id, uint64_t *layer_bytes)
{
    const uint64_t deadline_ns = pc__deadline(timeout_ns);
    if (region == 0 || commit_id == 0 || n_threads < 0)
        return pc__fail(PC_ERR_RANGE, "commit %" PRIu64 " of variable %" PRIu64 " with %d threads",
                        commit_id, region, n_threads);
    if (n_members == 0 || (n_members > 1 && !is_delta))
        return pc__fail(PC_ERR_RANGE, "a parity of %zu members: a mirror is of one, a delta of one or "
                        "more", n_members);
    int64_t rc = PC_OK;
    struct parity parity = {.members = calloc(n_members, sizeof *parity.members)};
    struct pc__layer_head head = {.region = region, .commit_id = commit_id,
                                  .flags = is_delta ? PC__LAYER_DELTA : 0};
    if (!parity.members)
        return pc__fail(PC_ERR_NO_MEMORY, "%zu members of a parity", n_members);
    while (!rc && parity.n_members < n_members) {
        rc = use_member(client, &members[parity.n_members], is_delta, deadline_ns,
                        &parity.members[parity.n_members]);
        parity.n_members++;
    }
    if (!rc)
        rc = join_runs(&parity);
    if (!rc)
        rc = make(client, &parity, &head, n_threads, deadline_ns, server_id);
    unuse_members(client, &parity);
    if (!rc && layer_bytes)
        *layer_bytes = head.data_offset + (head.n_blocks << PC_BLOCK_SHIFT);
    if (!rc && parity.n_runs && capacity)
        memcpy(runs, parity.runs,
               (parity.n_runs < capacity ? parity.n_runs : capacity) * sizeof *runs);
    rc = rc ? rc : (int64_t)parity.n_runs;
    free(parity.runs);
    free(parity.members);
    return rc;
}
