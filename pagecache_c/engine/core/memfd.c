/* memfd.c - the files that blocks lie in: made, punched, and which of their blocks are there.
 *
 * Relies on: SEEK_DATA of a memfd shows only blocks whose write is complete (a folio is marked
 * up to date after the copy), so what a restarted server adopts from the keeper is whole.
 */
#include "engine/core/core.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONNECTIONS_SHARE 8u /* of the limit, one part is kept back */

/* The kernel gives the lowest number that is free: where that is above the rest, so many are open. */
int pc__descriptors_spare(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return PC_OK;
    int next = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
    if (next < 0)
        next = open("/dev/null", O_RDONLY | O_CLOEXEC); /* reads as empty */
    if (next < 0)
        return pc__fail_errno("RLIMIT_NOFILE of the page server is %llu",
                              (unsigned long long)limit.rlim_cur);
    close(next);
    return (rlim_t)next < limit.rlim_cur - limit.rlim_cur / CONNECTIONS_SHARE
               ? PC_OK
               : pc__fail(PC_ERR_DESCRIPTORS,
                          "RLIMIT_NOFILE of the page server is %llu, and it keeps the last eighth "
                          "for connections", (unsigned long long)limit.rlim_cur);
}

int pc__memfd_make(uint64_t length_bytes, uint64_t *inode)
{
    int fd = memfd_create("clamor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return pc__fail_errno("memfd_create");
    struct stat st;
    /* Clients hold it read-write: one that shrank it would kill us with SIGBUS. */
    if (ftruncate(fd, (off_t)length_bytes) || fstat(fd, &st) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
        int rc = pc__fail_errno("ftruncate of a memfd to %llu bytes",
                                (unsigned long long)length_bytes);
        close(fd);
        return rc;
    }
    *inode = st.st_ino;
    return fd;
}

int pc__memfd_blocks(struct pc__blockset *data, int memfd, uint64_t length_bytes)
{
    off_t at = 0;
    while ((uint64_t)at < length_bytes) {
        off_t begin = lseek(memfd, at, SEEK_DATA);
        if (begin < 0)
            return errno == ENXIO ? PC_OK : pc__fail_errno("SEEK_DATA on a memfd");
        off_t end = lseek(memfd, begin, SEEK_HOLE);
        if (end < 0)
            return pc__fail_errno("SEEK_HOLE on a memfd");
        if ((uint64_t)begin >= length_bytes) /* notes behind the blocks (lost.c) */
            return PC_OK;
        end = (uint64_t)end < length_bytes ? end : (off_t)length_bytes;
        uint64_t first = (uint64_t)begin >> PC_BLOCK_SHIFT;
        uint64_t past = ((uint64_t)end + PC_BLOCK_BYTES - 1) >> PC_BLOCK_SHIFT;
        if (pc__blockset_add(data, first, past - first) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        at = end;
    }
    return PC_OK;
}

int pc__memfd_punch(int memfd, uint64_t first, uint64_t n)
{
    while (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     (off_t)(first << PC_BLOCK_SHIFT), (off_t)(n << PC_BLOCK_SHIFT)))
        if (errno != EINTR)
            return pc__fail_errno("punching %llu blocks", (unsigned long long)n);
    return PC_OK;
}
