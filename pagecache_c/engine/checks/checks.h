/* checks.h - a base on disk that comes from an earlier session: whether its blocks are what they were.
 *
 * Of each block there is a checksum, in a file beside the base (its format:
 * clamor_ray/_store/sums.py). A block is looked at when it is read from the base the first time; the worker looks at
 * those that nobody reads. What does not fit is damaged: it is lost here until a commit writes it anew. Who reads it
 * gets it from others where they can make it again (engine/repair).
 *
 * While a base has blocks that were not looked at, or that are damaged, no process maps it, and it does not change
 * (what commits write goes to the overlay). So the sums stay true, also for a server that is restarted meanwhile.
 *
 * Locks: region.lock for all of it. No I/O but in open and judge, which do not hold it.
 */
#ifndef PC_CHECKS_H
#define PC_CHECKS_H

#include "engine/core/core.h"

#define PC__CHECK_BLOCKS 64u     /* are looked at at once */

struct pc__unchecked {
    uint32_t *sums;              /* of each block; NULL: all were looked at */
    uint64_t sums_bytes;
    struct pc__blockset verified;
    struct pc__blockset damaged;
    uint64_t at;                 /* the worker has looked at all blocks before it */
};

/* Reads the checksums of the base, which is `kept`: <directory>/<region>.sums. Blocks that had data then are added
 * to data, so that what the disk has lost of them is not taken for zeros. A file that cannot be read, or is of
 * another base: all blocks are damaged, and the log says why. Negative: no memory. */
int pc__unchecked_open(struct pc_engine *engine, const struct pc__kept *kept, struct pc__blockset *data,
                       struct pc__unchecked **out);
void pc__unchecked_close(struct pc__unchecked *unchecked); /* NULL is none */

/* Under region.lock, of blocks that are read from the base. 1: they are to be looked at (judge), *n of them, whose
 * sums are these; 0: they need not be, *n of them; PC_ERR_HOME_LOST: the first is damaged. NULL is none. */
int pc__unchecked_expect(const struct pc__unchecked *unchecked, uint64_t block, uint64_t *n,
                         uint32_t sums[PC__CHECK_BLOCKS]);
/* What was read, under no lock; read_rc: or how that failed. A block that does not fit is read once more.
 * PC_ERR_HOME_LOST: some are damaged, and noted as that; the others are right. waits: false: instead of reading
 * once more it returns 1. */
int pc__unchecked_judge(struct pc_engine *engine, struct pc__region *region, struct pc__unchecked *unchecked,
                        int fd, uint64_t block, uint64_t n, const uint32_t *sums, uint8_t *blocks, int read_rc,
                        bool waits);
/* The worker: looks at the next of those that have data. some: PC__CHECK_BLOCKS. True: there may be more. */
bool pc__unchecked_look(struct pc_engine *engine, struct pc__region *region, struct pc__home *home, uint8_t *some);
/* Under region.lock: all were looked at. What says which are damaged stays. */
void pc__unchecked_over(struct pc__unchecked *unchecked);
#endif
