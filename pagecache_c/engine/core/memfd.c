/* memfd.c - the files that blocks lie in, in memory or on disk: made, punched, and which of their blocks are
 * there.
 *
 * Relies on: SEEK_DATA of a memfd shows only blocks whose write is complete (a folio is marked
 * up to date after the copy), so what a restarted server adopts from the keeper is whole. Of a file on disk
 * it may show more, which are zeros.
 */
#include "engine/core/core.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
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
    *inode = pc__file_id(&st);
    return fd;
}

/* Where a file system gives no room in advance (NFS before 4.2) it gives it to what is written. */
static int write_zeros(int fd, uint64_t length_bytes)
{
    static const uint8_t zeros[1 << 18];
    uint64_t at = 0;
    while (at < length_bytes) {
        const uint64_t left = length_bytes - at;
        const ssize_t n = pwrite(fd, zeros, left < sizeof zeros ? left : sizeof zeros, (off_t)at);
        if (n < 0 && errno != EINTR)
            return -1;
        at += n > 0 ? (uint64_t)n : 0;
    }
    return 0;
}

static int allocate(int fd, uint64_t length_bytes)
{
    while (fallocate(fd, 0, 0, (off_t)length_bytes))
        if (errno != EINTR)
            return errno == EOPNOTSUPP || errno == ENOSYS ? write_zeros(fd, length_bytes) : -1;
    return 0;
}

/* What is left of a disk belongs to others: Ray stops at so much, too. */
#define LEAST_FREE_PERCENT 5u

/* Files of a file system in memory take memory, and no less than memfds do. */
static int check_disk(int fd, const char *directory, uint64_t length_bytes)
{
    struct statfs of;
    if (fstatfs(fd, &of))
        return pc__fail_errno("statfs of %s", directory);
    if (pc__is_in_memory(&of))
        return pc__fail(PC_ERR_NO_SPACE, "%s is in memory, and no disk", directory);
    const uint64_t block_bytes = (uint64_t)of.f_bsize, free_bytes = of.f_bavail * block_bytes;
    const uint64_t kept_bytes = of.f_blocks / 100 * LEAST_FREE_PERCENT * block_bytes;
    if (free_bytes < kept_bytes || free_bytes - kept_bytes < length_bytes)
        return pc__fail(PC_ERR_NO_SPACE, "%s has no room for %llu bytes: %llu are free, of which %llu stay so",
                        directory, (unsigned long long)length_bytes, (unsigned long long)free_bytes,
                        (unsigned long long)kept_bytes);
    return PC_OK;
}

/* Room for all of it: writing to a mapped page that the disk has none for is SIGBUS. */
static int take_room(int fd, const char *directory, uint64_t length_bytes)
{
    const int rc = check_disk(fd, directory, length_bytes);
    return rc || !allocate(fd, length_bytes)
               ? rc
               : pc__fail_disk("%s has no room for %llu bytes", directory, (unsigned long long)length_bytes);
}

static int make_on_disk(const char *directory, uint64_t length_bytes, bool sparse, uint64_t *inode)
{
    struct stat st;
    if (!directory)
        return pc__fail(PC_ERR_NO_SPACE, "this page server has no directory for variables on disk");
    const int fd = pc__disk_file_open(directory);
    if (fd < 0)
        return pc__fail_disk("a file in %s", directory);
    int rc = sparse ? PC_OK : take_room(fd, directory, length_bytes);
    if (!rc && ((sparse && ftruncate(fd, (off_t)length_bytes)) || fstat(fd, &st)))
        rc = pc__fail_disk("a file of %llu bytes in %s", (unsigned long long)length_bytes, directory);
    if (rc) {
        close(fd);
        return rc;
    }
    *inode = pc__file_id(&st);
    return fd;
}

int pc__store_file_make(const struct pc_engine *engine, uint64_t length_bytes, bool on_disk, bool sparse,
                        uint64_t *inode)
{
    return on_disk ? make_on_disk(engine->disk_directory, length_bytes, sparse, inode)
                   : pc__memfd_make(length_bytes, inode);
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
