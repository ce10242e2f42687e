/* spill.c - layers of homes that are on disk, on disk themselves: what waits until all layers of a commit are
 * there must not be in memory, where its home is on disk for want of that.
 *
 * A process of this node is given a file for a large one, and writes it there. All else comes in memory, and is
 * copied when it is staged. Behind the blocks such a file has their checksums: a session with a store keeps
 * it as it is.
 *
 * Owns nothing. Any thread; region.lock for a look at the home.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "kernels/disk_copy.h"
#include "os/disk_file.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define LEAST_BYTES (256u << 10) /* what is less is applied, and gone, before it is much */

/* Whether its home, now or soon, is on this node's disk. */
static bool home_is_on_disk(struct pc_engine *engine, uint64_t id)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return false;
    pthread_mutex_lock(&region->lock);
    const struct pc__home *home = region->home ? region->home : region->prepared;
    const bool on_disk = home && home->base.on_disk;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return on_disk;
}

/* Of a layer, and of the checksums of so many blocks behind it. */
static uint64_t file_bytes(uint64_t bytes, uint64_t n_blocks)
{
    return bytes + n_blocks * sizeof(uint32_t);
}

static int make_file(const struct pc_engine *engine, uint64_t bytes)
{
    uint64_t inode;
    return pc__store_file_make(engine, file_bytes(bytes, bytes >> PC_BLOCK_SHIFT), true, false, &inode);
}

int pc__layer_file_for(struct pc_engine *engine, uint64_t region, uint64_t bytes, int *fd)
{
    *fd = home_is_on_disk(engine, region) ? make_file(engine, bytes) : -1;
    return *fd < -1 ? *fd : PC_OK;
}

/* That it is one of ours is its writer's word, a process of this user: overlayfs, for one, gives a file another
 * device than its directory. */
bool pc__layer_is_in_file(int fd, uint64_t bytes)
{
    struct stat of;
    struct statfs system;
    struct pc__layer_head head;
    return bytes <= INT64_MAX / 2 && !pc__is_memfd(fd) && !fstat(fd, &of) && S_ISREG(of.st_mode) &&
           of.st_uid == geteuid() && !fstatfs(fd, &system) && !pc__is_in_memory(&system) && !pc__file_read(fd, &head, sizeof head, 0) &&
           head.n_blocks <= bytes >> PC_BLOCK_SHIFT &&
           (uint64_t)of.st_size >= file_bytes(bytes, head.n_blocks);
}

static int copy(int fd, const struct pc__layer *layer)
{
    const struct pc__blocks_at blocks = {layer->map + layer->data_offset, layer->n_blocks};
    const uint64_t sums_bytes = layer->n_blocks * sizeof(uint32_t);
    uint32_t *sums = malloc(sums_bytes);
    int rc = sums ? pc__disk_file_write(fd, layer->head, layer->data_offset, 0)
                  : pc__fail(PC_ERR_NO_MEMORY, "the checksums of a layer");
    if (!rc)
        rc = pc__disk_copy_cached(fd, layer->data_offset, &blocks, 1, sums); /* a loop may be here */
    if (!rc)
        rc = pc__disk_file_write(fd, sums, sums_bytes, layer->bytes);
    free(sums);
    return rc;
}

int pc__layer_spill(struct pc_engine *engine, struct pc__layer **layer)
{
    const struct pc__layer *old = *layer;
    struct pc__layer *new;
    if (old->on_disk || old->bytes < LEAST_BYTES || !home_is_on_disk(engine, old->region))
        return PC_OK;
    const int fd = make_file(engine, old->bytes);
    if (fd < 0)
        return fd;
    int rc = copy(fd, old);
    if (rc)
        close(fd);
    else
        rc = pc__layer_open(fd, old->bytes, old->region, old->commit_id, true, &new);
    if (rc)
        return rc;
    new->owner = old->owner;
    pc__layer_put(*layer);
    *layer = new;
    return PC_OK;
}
