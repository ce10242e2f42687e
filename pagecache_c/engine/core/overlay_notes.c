/* overlay_notes.c - which blocks an overlay on disk has, as it says so itself.
 *
 * An overlay has the blocks that changed and no others: what it has not is the base's. In memory the file's
 * holes say which. On disk they do not: file systems fill holes around what is written, with zeros. So behind
 * its blocks the file has a byte for each of them: 1 for those that it has. They are written after the blocks,
 * and before the keeper hears of the layer: a server that dies in between leaves notes of blocks that the same
 * layer, applied again, writes again.
 *
 * Locks: the worker alone writes.
 */
#include "engine/core/core.h"
#include "os/disk_file.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define SOME_BLOCKS 4096u /* notes at once */

uint64_t pc__overlay_notes_bytes(uint64_t length_bytes)
{
    return ((length_bytes >> PC_BLOCK_SHIFT) + PC_BLOCK_BYTES - 1) / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}

static int note(int fd, uint64_t at_byte, uint64_t n)
{
    uint8_t ones[SOME_BLOCKS];
    memset(ones, 1, sizeof ones);
    while (n) {
        const ssize_t wrote = pwrite(fd, ones, n < sizeof ones ? n : sizeof ones, (off_t)at_byte);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return pc__fail_errno("writing which blocks an overlay has");
        at_byte += (uint64_t)wrote;
        n -= (uint64_t)wrote;
    }
    return PC_OK;
}

int pc__overlay_note(const struct pc__store *overlay, const struct pc__layer *layer)
{
    const uint64_t notes_at = overlay->data.n_blocks << PC_BLOCK_SHIFT;
    int rc = PC_OK;
    for (uint32_t i = 0; i < layer->n_runs && !rc; i++)
        rc = note(overlay->memfd, notes_at + layer->runs[i].first_block, layer->runs[i].n_blocks);
    return rc;
}

int pc__overlay_read_notes(struct pc__store *overlay)
{
    const uint64_t n_blocks = overlay->data.n_blocks, notes_at = n_blocks << PC_BLOCK_SHIFT;
    uint8_t notes[SOME_BLOCKS];
    for (uint64_t first = 0, n; first < n_blocks; first += n) {
        n = n_blocks - first < SOME_BLOCKS ? n_blocks - first : SOME_BLOCKS;
        const int rc = pc__disk_file_read(overlay->memfd, notes, n, notes_at + first);
        if (rc)
            return rc;
        for (uint64_t i = 0; i < n; i++)
            if (notes[i] && pc__blockset_add(&overlay->data, first + i, 1) < 0)
                return pc__fail(PC_ERR_NO_MEMORY, "a block set");
    }
    return PC_OK;
}
