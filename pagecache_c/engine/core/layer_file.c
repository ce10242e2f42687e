/* layer_file.c - one layer: its file, and where the blocks are that it has.
 *
 * In memory a layer is a file that cannot change size: mapping it is safe. On disk it is a file that nobody
 * else has, and is read block by block. No locks: once open, it changes in nothing that is looked at here.
 */
#include "engine/core/core.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

uint64_t pc__layer_id(uint64_t region, uint64_t commit_id)
{
    uint64_t id = (commit_id ^ (region * 0x9e3779b97f4a7c15ull)) * 0xff51afd7ed558ccdull;
    return id ? id : 1;
}

static void unmap(struct pc__layer *layer)
{
    if (layer->map)
        munmap((void *)(uintptr_t)layer->map, layer->bytes);
    else
        free((void *)(uintptr_t)layer->head);
    if (layer->memfd >= 0)
        close(layer->memfd);
    free(layer->positions);
    free(layer);
}

void pc__layer_put(struct pc__layer *layer)
{
    if (layer && pc__ref_drop(&layer->refs))
        unmap(layer);
}

void pc__layer_end(struct pc_engine *engine, struct pc__layer *layer)
{
    pc__unkeep(engine, layer->inode);
    pc__count_sub(&engine->count.layers, 1);
    pc__count_sub(&engine->count.layer_bytes, layer->bytes);
    pc__layer_put(layer);
}

static int check_file(const struct pc__layer *layer, uint64_t *inode)
{
    struct stat st;
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
    int has = layer->on_disk ? seals : fcntl(layer->memfd, F_GET_SEALS);
    if (fstat(layer->memfd, &st) || has < 0)
        return pc__fail_errno("a layer's file");
    /* One that could shrink could kill us with SIGBUS. */
    const uint64_t file_bytes = (uint64_t)st.st_size;
    const bool is_long = layer->on_disk ? file_bytes >= layer->bytes : file_bytes == layer->bytes;
    if ((has & seals) != seals || layer->bytes < PC_BLOCK_BYTES || !is_long)
        return pc__fail(PC_ERR_PROTOCOL, "a layer that is not sealed, or not as long as it says");
    *inode = pc__file_id(&st);
    return PC_OK;
}

static int map_all(struct pc__layer *layer)
{
    void *map = mmap(NULL, layer->bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, layer->memfd, 0);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of a layer of %llu bytes", (unsigned long long)layer->bytes);
    pc__huge_pages_refuse(map, layer->bytes);
    layer->map = map;
    layer->head = map;
    return PC_OK;
}

/* Mapped, a block that the disk cannot read would be SIGBUS. */
static int read_index(struct pc__layer *layer, uint64_t *n_bytes)
{
    struct pc__layer_head head;
    int rc = pc__disk_file_read(layer->memfd, &head, sizeof head, 0);
    if (!rc && (head.data_offset < sizeof head || head.data_offset > layer->bytes))
        rc = pc__fail(PC_ERR_PROTOCOL, "a layer whose data begins at %llu",
                      (unsigned long long)head.data_offset);
    if (rc)
        return rc;
    void *index = malloc(head.data_offset);
    if (!index)
        return pc__fail(PC_ERR_NO_MEMORY, "a layer's index");
    layer->head = index;
    *n_bytes = head.data_offset; /* and not what it says the second time */
    return pc__disk_file_read(layer->memfd, index, head.data_offset, 0);
}

int pc__layer_open(int fd, uint64_t bytes, uint64_t region, uint64_t commit_id, bool on_disk,
                   struct pc__layer **out)
{
    struct pc__layer *layer = calloc(1, sizeof *layer);
    if (!layer) {
        close(fd);
        return pc__fail(PC_ERR_NO_MEMORY, "a layer");
    }
    layer->memfd = fd;
    layer->bytes = bytes;
    layer->on_disk = on_disk;
    layer->region = region;
    layer->commit_id = commit_id;
    atomic_init(&layer->refs, 1u);
    int rc = check_file(layer, &layer->inode);
    uint64_t index_bytes = bytes;
    if (!rc)
        rc = on_disk ? read_index(layer, &index_bytes) : map_all(layer);
    struct pc__layer_head head;
    if (!rc)
        rc = pc__layer_parse(layer->head, index_bytes, bytes, 0, &head, &layer->runs);
    if (!rc && (head.region != region || head.commit_id != commit_id))
        rc = pc__fail(PC_ERR_PROTOCOL, "a layer of another commit");
    if (!rc && !(layer->positions = calloc(head.n_runs + 1u, sizeof *layer->positions)))
        rc = pc__fail(PC_ERR_NO_MEMORY, "a layer's index");
    if (rc) {
        unmap(layer);
        return rc;
    }
    layer->data_offset = head.data_offset;
    layer->n_blocks = head.n_blocks;
    layer->n_runs = head.n_runs;
    layer->flags = head.flags;
    for (uint32_t i = 1; i < head.n_runs; i++)
        layer->positions[i] = layer->positions[i - 1] + layer->runs[i - 1].n_blocks;
    *out = layer;
    return PC_OK;
}

int pc__layer_read(const struct pc__layer *layer, uint64_t position, uint64_t n_blocks, uint8_t *out)
{
    const uint64_t n_bytes = n_blocks << PC_BLOCK_SHIFT;
    if (!layer->map)
        return pc__disk_file_read(layer->memfd, out, n_bytes,
                                  layer->data_offset + (position << PC_BLOCK_SHIFT));
    memcpy(out, pc__layer_at(layer, position), n_bytes);
    return PC_OK;
}

/* The first run that ends after block, or n_runs. */
static uint32_t run_after(const struct pc__layer *layer, uint64_t block)
{
    uint32_t low = 0, high = layer->n_runs;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (layer->runs[mid].first_block + layer->runs[mid].n_blocks > block)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

uint64_t pc__layer_find(const struct pc__layer *layer, uint64_t block, uint64_t *n)
{
    uint32_t i = run_after(layer, block);
    if (i == layer->n_runs || layer->runs[i].first_block > block)
        return UINT64_MAX;
    uint64_t into = block - layer->runs[i].first_block;
    *n = layer->runs[i].n_blocks - into;
    return layer->positions[i] + into;
}

uint64_t pc__layer_next(const struct pc__layer *layer, uint64_t from, uint64_t limit)
{
    uint32_t i = run_after(layer, from);
    if (i == layer->n_runs)
        return limit;
    uint64_t first = layer->runs[i].first_block;
    return first < from ? from : first < limit ? first : limit;
}
