/* copy_in.h - copying memory of this process into a memfd, for parts of this library. */
#ifndef PC_COPY_IN_H
#define PC_COPY_IN_H

#include "pagecache.h"

/* The runs of blocks that begin at base, one after the other, to offset_bytes of the file. What may
 * not be read by a system call (a block behind a trap, a window that is closed) is read by this
 * thread first. 0 or the error, as pc_copy_in. n_threads 0: chosen by size and cores. */
int pc__copy_runs(int fd, uint64_t offset_bytes, uint64_t base, const struct pc_run *runs,
                  size_t n_runs, int n_threads);

#endif
