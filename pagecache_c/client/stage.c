/* stage.c - a commit, as far as it is this process's: what a private mapping wrote, the copy of it
 * that the page server keeps (a layer), and what became of that. See client.h; wire.h has a layer's
 * form.
 *
 * The layer is a memfd of its own. It is sealed before it is sent, so that its bytes and its size
 * are fixed: the server maps it without fear. It goes out again after a re-attach, for the commit id
 * tells the server what it has. We close ours whatever happens: a stage that failed leaves nothing.
 *
 * A large one of a region whose home is on this node's disk is a file there, which the server has made: it
 * would have to be written there anyway, and memory would have it once more.
 *
 * Threads: any. Lock: client.lock around the tables; never while copying or waiting.
 */
#include "client/client.h"

#include "kernels/disk_copy.h"
#include "os/disk_file.h"
#include "trap/read_set.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define FILE_FROM_BLOCKS 1024u /* 4 MiB; less is soon copied */

int pc__use_private(pc_client *client, uint64_t id, struct pc__mapping **out)
{
    int rc = pc__use(client, id, out);
    if (!rc && !pc__is_private(*out)) {
        rc = pc__fail(PC_ERR_RANGE, "variable %" PRIu64 " is mapped to be read: only a private "
                      "mapping has blocks of its own", (*out)->region);
        pc__unuse(client, *out);
    }
    return rc;
}

PC_API int64_t pc_client_dirty(pc_client *client, uint64_t mapping_id, struct pc_run *runs,
                               size_t capacity)
{
    struct pc__mapping *mapping;
    int rc = pc__use_private(client, mapping_id, &mapping);
    if (rc)
        return rc;
    int64_t n = pc__read_set(PC__SCAN_COPIED, mapping->trapped.address,
                             mapping->trapped.length_bytes, runs, capacity);
    pc__unuse(client, mapping);
    return n;
}

/* Anonymous memory in place of the file's: nothing there traps any more, and it is private from the
 * first moment. Written, for a page that nobody wrote is not seen as one of ours. */
static int blank_run(const struct pc__mapping *mapping, const struct pc_run *run)
{
    void *at = pc__pointer(mapping->trapped.address + (run->first_block << PC_BLOCK_SHIFT));
    const size_t n_bytes = run->n_blocks << PC_BLOCK_SHIFT;
    if (mmap(at, n_bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
        return pc__fail_errno("mmap of %" PRIu64 " blocks of variable %" PRIu64
                              " (ENOMEM: see vm.max_map_count)", run->n_blocks, mapping->region);
    if (madvise(at, n_bytes, MADV_DONTFORK))
        return pc__fail_errno("MADV_DONTFORK of variable %" PRIu64, mapping->region);
    (void)madvise(at, n_bytes, MADV_DONTDUMP);
    memset(at, 0, n_bytes);
    return PC_OK;
}

PC_API int pc_client_blank(pc_client *client, uint64_t mapping_id, const struct pc_run *runs,
                           size_t n_runs)
{
    struct pc__mapping *mapping;
    int rc = pc__use_private(client, mapping_id, &mapping);
    if (rc)
        return rc;
    rc = pc__runs_check(mapping, runs, n_runs);
    for (size_t i = 0; i < n_runs && !rc; i++)
        rc = blank_run(mapping, &runs[i]);
    pc__unuse(client, mapping);
    return rc;
}

/* ------------------------------------------------------------------- layer */

int pc__layer_check_runs(const struct pc__mapping *mapping, const struct pc_run *runs, size_t n_runs)
{
    if (n_runs == 0 || n_runs > UINT32_MAX)
        return pc__fail(PC_ERR_RANGE, "a layer of %zu runs", n_runs);
    int rc = pc__runs_check(mapping, runs, n_runs);
    for (size_t i = 1; i < n_runs && !rc; i++)
        if (runs[i].first_block < runs[i - 1].first_block + runs[i - 1].n_blocks)
            rc = pc__fail(PC_ERR_RANGE, "run %zu begins at block %" PRIu64
                          ", before the end of the one before it", i, runs[i].first_block);
    return rc;
}

static int write_head(int fd, const struct pc__layer_head *head, const struct pc_run *runs)
{
    const size_t runs_bytes = head->n_runs * sizeof *runs, all = sizeof *head + runs_bytes;
    for (size_t done = 0; done < all;) {
        const size_t in_head = done < sizeof *head ? sizeof *head - done : 0;
        const size_t in_runs = done < sizeof *head ? 0 : done - sizeof *head;
        const struct iovec from[2] = {
            {(char *)(uintptr_t)head + (sizeof *head - in_head), in_head},
            {(char *)(uintptr_t)runs + in_runs, runs_bytes - in_runs}};
        ssize_t n = pwritev(fd, from, 2, (off_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return pc__fail_errno("pwrite of a layer's %zu bytes of runs", all);
        done += (size_t)n;
    }
    return PC_OK;
}

/* Nobody can write to it or change its size any more. FUTURE_WRITE does that without the wait for
 * other users of the pages that WRITE may need; nobody maps it yet. Kernels before 5.1 have WRITE
 * only. */
static int fix(int fd)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
    if (!fcntl(fd, F_ADD_SEALS, seals | F_SEAL_WRITE) ||
        !fcntl(fd, F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE) || !fcntl(fd, F_ADD_SEALS, seals))
        return PC_OK;
    return pc__fail_errno("sealing a layer");
}

static uint64_t layer_bytes_of(const struct pc__layer_head *head)
{
    return head->data_offset + (head->n_blocks << PC_BLOCK_SHIFT);
}

static void fill_in_head(struct pc__layer_head *head, const struct pc_run *runs, size_t n_runs)
{
    head->magic = PC__LAYER_MAGIC;
    head->n_runs = (uint32_t)n_runs;
    head->data_offset = pc__layer_data_offset(n_runs);
    head->n_blocks = 0;
    for (size_t i = 0; i < n_runs; i++)
        head->n_blocks += runs[i].n_blocks;
}

int pc__layer_begin(struct pc__layer_head *head, const struct pc_run *runs, size_t n_runs)
{
    fill_in_head(head, runs, n_runs);
    int fd = memfd_create("clamor-layer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return pc__fail_errno("memfd of a layer");
    int rc = PC_OK;
    if (ftruncate(fd, (off_t)layer_bytes_of(head)))
        rc = pc__fail_errno("a layer of %" PRIu64 " bytes", layer_bytes_of(head));
    if (!rc)
        rc = write_head(fd, head, runs);
    if (!rc)
        return fd;
    close(fd);
    return rc;
}

int pc__layer_hand_over(pc_client *client, int fd, const struct pc__layer_head *head,
                        uint64_t deadline_ns, uint64_t *server_id)
{
    const struct pc__ctl_stage message = {.region = head->region, .commit_id = head->commit_id,
                                          .layer_bytes = layer_bytes_of(head)};
    struct pc__call call = {.gives = &fd};
    struct pc__ctl_staged staged;
    int rc = pc__is_memfd(fd) ? fix(fd) : PC_OK;
    if (!rc)
        rc = pc__call(client, PC__CTL_STAGE, &message, sizeof message, true, deadline_ns, &call);
    if (rc)
        return rc;
    pc__fds_close(call.fds, &call.n_fds);
    if (call.body_bytes != sizeof staged)
        return pc__fail(PC_ERR_PROTOCOL, "the page server does not say who has the layer");
    memcpy(&staged, call.body, sizeof staged);
    if (server_id)
        *server_id = staged.server_id;
    return PC_OK;
}

/* The file of a large layer whose home is on this node's disk, or -1 in *fd. */
static int ask_for_file(pc_client *client, const struct pc__layer_head *head, uint64_t deadline_ns, int *fd)
{
    const struct pc__ctl_stage message = {.region = head->region, .commit_id = head->commit_id,
                                          .layer_bytes = layer_bytes_of(head)};
    struct pc__call call = {0};
    *fd = -1;
    const int rc = pc__call(client, PC__CTL_LAYER_FILE, &message, sizeof message, true, deadline_ns, &call);
    if (!rc && call.n_fds == 1)
        *fd = call.fds[0];
    else
        pc__fds_close(call.fds, &call.n_fds);
    return rc;
}

/* Head, runs, blocks, and checksums of the blocks. */
static int fill_file(int fd, const struct pc__mapping *mapping, const struct pc__layer_head *head,
                     const struct pc_run *runs)
{
    const uint64_t sums_bytes = head->n_blocks * sizeof(uint32_t);
    struct pc__blocks_at *pieces = calloc(head->n_runs, sizeof *pieces);
    uint32_t *sums = malloc(sums_bytes);
    int rc = pieces && sums ? write_head(fd, head, runs)
                            : pc__fail(PC_ERR_NO_MEMORY, "a layer of %" PRIu64 " blocks", head->n_blocks);
    for (size_t i = 0; i < head->n_runs && !rc; i++)
        pieces[i] = (struct pc__blocks_at){
            pc__pointer(mapping->trapped.address + (runs[i].first_block << PC_BLOCK_SHIFT)), runs[i].n_blocks};
    if (!rc)
        rc = pc__disk_copy(fd, head->data_offset, pieces, head->n_runs, sums);
    if (!rc)
        rc = pc__disk_file_write(fd, sums, sums_bytes, layer_bytes_of(head));
    free(sums);
    free(pieces);
    return rc;
}

/* head: whose layer it is. */
static int stage(pc_client *client, const struct pc__mapping *mapping, struct pc__layer_head head,
                 const struct pc_run *runs, size_t n_runs, int n_threads, uint64_t deadline_ns,
                 uint64_t *server_id)
{
    int rc = pc__layer_check_runs(mapping, runs, n_runs);
    if (rc)
        return rc;
    int fd = -1;
    fill_in_head(&head, runs, n_runs);
    if (head.n_blocks >= FILE_FROM_BLOCKS && (rc = ask_for_file(client, &head, deadline_ns, &fd)))
        return rc;
    if (fd >= 0) {
        rc = fill_file(fd, mapping, &head, runs);
    } else {
        fd = pc__layer_begin(&head, runs, n_runs);
        if (fd < 0)
            return fd;
        rc = pc__copy_runs(fd, head.data_offset, mapping->trapped.address, runs, n_runs, n_threads);
    }
    if (!rc)
        rc = pc__layer_hand_over(client, fd, &head, deadline_ns, server_id);
    close(fd);
    return rc;
}

static int stage_as(pc_client *client, uint64_t mapping_id, struct pc__layer_head head,
                    const struct pc_run *runs, size_t n_runs, int n_threads, uint64_t timeout_ns,
                    uint64_t *server_id)
{
    struct pc__mapping *mapping;
    if (head.commit_id == 0 || n_threads < 0)
        return pc__fail(PC_ERR_RANGE, "commit %" PRIu64 " with %d threads", head.commit_id, n_threads);
    int rc = pc__use_private(client, mapping_id, &mapping);
    if (rc)
        return rc;
    if (head.region == 0) {
        head.region = mapping->region;
        head.base_version = mapping->version;
    }
    rc = stage(client, mapping, head, runs, n_runs, n_threads, pc__deadline(timeout_ns), server_id);
    pc__unuse(client, mapping);
    return rc;
}

PC_API int pc_client_stage(pc_client *client, uint64_t mapping_id, uint64_t commit_id,
                           const struct pc_run *runs, size_t n_runs, int n_threads,
                           uint64_t timeout_ns, uint64_t *server_id)
{
    const struct pc__layer_head head = {.commit_id = commit_id};
    return stage_as(client, mapping_id, head, runs, n_runs, n_threads, timeout_ns, server_id);
}

PC_API int pc_client_stage_as(pc_client *client, uint64_t mapping_id, uint64_t region,
                              uint64_t base_version, uint64_t commit_id, const struct pc_run *runs,
                              size_t n_runs, int n_threads, uint64_t timeout_ns, uint64_t *server_id)
{
    const struct pc__layer_head head = {
        .region = region, .base_version = base_version, .commit_id = commit_id};
    if (region == 0)
        return pc__fail(PC_ERR_RANGE, "a layer of no variable");
    return stage_as(client, mapping_id, head, runs, n_runs, n_threads, timeout_ns, server_id);
}

PC_API int pc_client_resolve(pc_client *client, uint64_t mapping_id, uint64_t commit_id,
                             uint64_t region, uint64_t version)
{
    const struct pc__ctl_stage message = {.region = region, .commit_id = commit_id,
                                          .version = version, .mapping_id = mapping_id};
    if (commit_id == 0 || region == 0)
        return pc__fail(PC_ERR_RANGE, "commit %" PRIu64 " of variable %" PRIu64, commit_id, region);
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    int rc = pc__call_refused(client);
    struct pc__mapping *mapping = rc ? NULL : pc__mapping_find(client, mapping_id);
    if (mapping && mapping->region == region && version == mapping->version + 1)
        mapping->follows = true;
    if (!rc)
        rc = pc__outbox_send(client, PC__CTL_RESOLVE, &message, sizeof message);
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}
