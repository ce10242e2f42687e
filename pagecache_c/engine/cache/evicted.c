/* evicted.c - what was evicted while a process takes a read set.
 *
 * A read set is what the page table shows at its end (reads.c), and eviction takes entries out of
 * it. So while a process watches a mapping, the blocks that go of its generation are noted for it; it
 * counts them as read. Nothing else takes blocks from a generation that is leased at its version.
 *
 * Entered by the loop that owns the session, and by evictions. Under region.lock.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <string.h>

struct pc__recorder {
    struct pc__link link;          /* of the generation */
    struct pc__blockset evicted;
    bool is_all;                   /* not known, for want of memory */
    uint64_t users;                /* begins without their ends */
};

void pc__recorders_note(struct pc__generation *generation, uint64_t chunk, uint32_t mask)
{
    pc__each(link, &generation->recorders)
    {
        struct pc__recorder *recorder = pc__of(link, struct pc__recorder, link);
        for (uint32_t left = mask; left; left &= left - 1)
            recorder->is_all |= pc__blockset_add(&recorder->evicted,
                                                 chunk * PC__CHUNK_BLOCKS +
                                                     (unsigned)__builtin_ctz(left), 1) < 0;
    }
}

void pc__recorder_free(struct pc__recorder *recorder)
{
    if (!recorder)
        return;
    pc__link_remove(&recorder->link);
    pc__blockset_free(&recorder->evicted);
    free(recorder);
}

static int begin(struct pc__session_map *mapping)
{
    struct pc__recorder *recorder = mapping->recorder;
    if (!recorder) {
        recorder = calloc(1, sizeof *recorder);
        if (!recorder || pc__blockset_init(&recorder->evicted, mapping->region->n_blocks)) {
            free(recorder);
            return pc__fail(PC_ERR_NO_MEMORY, "a record of what is evicted");
        }
        pc__link_push(&mapping->generation->recorders, &recorder->link);
        mapping->recorder = recorder;
    }
    recorder->users++;
    return PC_OK;
}

static void end(struct pc__session_map *mapping)
{
    if (mapping->recorder && !--mapping->recorder->users) {
        pc__recorder_free(mapping->recorder);
        mapping->recorder = NULL;
    }
}

/* Descriptor of a file of runs, -1 where there are none, or negative error below that. */
static int file_of(const struct pc__session_map *mapping)
{
    const struct pc__recorder *recorder = mapping->recorder;
    const uint64_t n_blocks = mapping->region->n_blocks;
    const bool is_all = !recorder || recorder->is_all; /* or of a server before this one */
    if (!is_all && !recorder->evicted.n_set)
        return -1;
    int fd = memfd_create("clamor-evicted", MFD_CLOEXEC);
    uint64_t at = 0;
    bool failed = fd < 0;
    while (at < n_blocks && !failed) {
        struct pc_run runs[256];
        size_t n = 0;
        for (; n < 256 && at < n_blocks; n++) {
            uint64_t first = is_all ? 0 : pc__blockset_next(&recorder->evicted, at, n_blocks);
            if (first == n_blocks)
                at = n_blocks;
            if (first == n_blocks)
                break;
            at = is_all ? n_blocks : pc__blockset_next_absent(&recorder->evicted, first, n_blocks);
            runs[n] = (struct pc_run){.first_block = first, .n_blocks = at - first};
        }
        failed = write(fd, runs, n * sizeof runs[0]) != (ssize_t)(n * sizeof runs[0]);
    }
    if (!failed)
        return fd;
    if (fd >= 0)
        close(fd);
    return PC_ERR_NO_MEMORY;
}

void pc__session_evicted(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__ctl_runs head;
    memcpy(&head, message->body, sizeof head);
    struct pc__session_map *mapping = pc__session_mapping(session, head.mapping_id);
    int rc = mapping ? PC_OK : PC_ERR_NO_REGION, fd = -1;
    if (mapping) {
        struct pc__region *region = mapping->region;
        pthread_mutex_lock(&region->lock);
        if (head.wait == PC__EVICTED_BEGIN)
            rc = begin(mapping);
        else if (head.wait == PC__EVICTED_END)
            end(mapping);
        else
            fd = file_of(mapping);
        pthread_mutex_unlock(&region->lock);
    }
    if (fd < -1)
        rc = fd;
    if (message->header.request_id)
        pc__session_send(session, PC__CTL_REPLY, message->header.request_id, rc, NULL, 0,
                        fd >= 0 ? fd : -1);
    if (fd >= 0)
        close(fd);
}
