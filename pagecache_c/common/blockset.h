/* blockset.h - a sparse set of block numbers: one bit a block of each touched extent of 64 MiB (2 KiB
 * for a whole one). Not locked: whoever owns the set owns its lock. Sets of an untouched 1 TiB region cost 128 KiB.
 */
#ifndef PC_BLOCKSET_H
#define PC_BLOCKSET_H

#include "pagecache.h"

#include <stdbool.h>

struct pc__blockset {
    uint64_t n_blocks;
    uint64_t n_set;
    uint64_t **extents; /* [ceil(n_blocks / PC_EXTENT_BLOCKS)], each NULL, or its bits */
};

/* How many blocks extent number `extent` of so many has: the last one is shorter. */
uint64_t pc__extent_blocks(uint64_t n_blocks, uint64_t extent);
int pc__blockset_init(struct pc__blockset *set, uint64_t n_blocks);
void pc__blockset_free(struct pc__blockset *set);
bool pc__blockset_has(const struct pc__blockset *set, uint64_t block);
/* Adds or removes [first, first + n). Returns how many changed, or PC_ERR_NO_MEMORY. */
int64_t pc__blockset_add(struct pc__blockset *set, uint64_t first, uint64_t n);
int64_t pc__blockset_remove(struct pc__blockset *set, uint64_t first, uint64_t n);
/* First block >= from and < limit that is (not) in the set; limit when there is none. */
uint64_t pc__blockset_next(const struct pc__blockset *set, uint64_t from, uint64_t limit);
uint64_t pc__blockset_next_absent(const struct pc__blockset *set, uint64_t from, uint64_t limit);
uint64_t pc__blockset_count(const struct pc__blockset *set, uint64_t first, uint64_t n);

#endif
