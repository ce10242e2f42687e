/* disk_copy.h - blocks from memory to a file on disk, with their checksums.
 *
 * Owns nothing. Any thread, no lock. Much of it goes past the page cache: that would hold as many bytes once
 * more, and the kernel slows down who writes more than it wants to hold (vm.dirty_ratio). What is read of the
 * file afterwards comes from the disk.
 */
#ifndef PC_DISK_COPY_H
#define PC_DISK_COPY_H

#include "pagecache.h"

#include <stddef.h>
#include <stdint.h>

/* Blocks that lie in a row in memory, anywhere. They may be changed meanwhile: the checksums are of what is
 * written. */
struct pc__blocks_at {
    const void *at;
    uint64_t n_blocks;
};

/* Pieces one after the other to the file, from `offset` on, a multiple of the block. sums: one for each block;
 * see pc_copy_to_disk. PC_OK, or an error: PC_ERR_NO_SPACE where the disk is full. */
int pc__disk_copy(int fd, uint64_t offset, const struct pc__blocks_at *pieces, size_t n_pieces, uint32_t *sums);
/* The same through the page cache, for who must not wait for a disk. */
int pc__disk_copy_cached(int fd, uint64_t offset, const struct pc__blocks_at *pieces, size_t n_pieces,
                         uint32_t *sums);

#endif
