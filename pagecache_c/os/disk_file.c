/* disk_file.c - see disk_file.h. */
#include "os/disk_file.h"
#include "common/error.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

int pc__fail_disk(const char *fmt, ...)
{
    const int saved = errno;
    char text[256];
    va_list args;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    errno = saved;
    const int rc = pc__fail_errno("%s", text);
    return saved == ENOSPC || saved == EDQUOT || saved == EFBIG ? PC_ERR_NO_SPACE : rc;
}

int pc__disk_file_open(const char *directory)
{
    char path[4096];
    int fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0)
        return fd;
    const int length = snprintf(path, sizeof path, "%s/clamor-XXXXXX", directory);
    if (length < 0 || (size_t)length >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        (void)unlink(path);
    return fd;
}

int pc__file_read(int fd, void *out, uint64_t n_bytes, uint64_t offset)
{
    uint8_t *at = out;
    while (n_bytes) {
        const ssize_t got = pread(fd, at, n_bytes, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return pc__fail_errno("reading %llu bytes at %llu", (unsigned long long)n_bytes,
                                  (unsigned long long)offset);
        if (got == 0)
            return pc__fail(PC_ERR_PROTOCOL, "a file ends at byte %llu, before it should: maybe the disk "
                            "refused what was written to it", (unsigned long long)offset);
        at += got;
        offset += (uint64_t)got;
        n_bytes -= (uint64_t)got;
    }
    return PC_OK;
}

int pc__disk_file_read(int fd, void *out, uint64_t n_bytes, uint64_t offset)
{
    const int rc = pc__file_read(fd, out, n_bytes, offset);
    return rc ? rc : pc__disk_file_check(fd);
}

int pc__disk_file_write(int fd, const void *bytes, uint64_t n_bytes, uint64_t offset)
{
    const uint8_t *at = bytes;
    while (n_bytes) {
        const ssize_t n = pwrite(fd, at, n_bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return pc__fail_disk("writing %llu bytes at %llu", (unsigned long long)n_bytes,
                                 (unsigned long long)offset);
        at += n;
        offset += (uint64_t)n;
        n_bytes -= (uint64_t)n;
    }
    return PC_OK;
}

bool pc__is_memfd(int fd)
{
    return fcntl(fd, F_GET_SEALS) >= 0;
}

bool pc__is_in_memory(const struct statfs *system)
{
    return system->f_type == TMPFS_MAGIC || system->f_type == RAMFS_MAGIC;
}

bool pc__disk_file_try(int fd, void *out, uint64_t n_bytes, uint64_t offset)
{
    const struct iovec into = {.iov_base = out, .iov_len = n_bytes};
    const ssize_t got = preadv2(fd, &into, 1, (off_t)offset, RWF_NOWAIT);
    return got == (ssize_t)n_bytes;
}

bool pc__disk_file_has_name(int fd)
{
    struct stat st;
    return !fstat(fd, &st) && st.st_nlink;
}

#define NOWHERE ((off64_t)1 << 62) /* no page is there to wait for */

int pc__disk_file_check(int fd)
{
    int waited;
    while ((waited = sync_file_range(fd, NOWHERE, 1, SYNC_FILE_RANGE_WAIT_BEFORE)) && errno == EINTR)
        ;
    if (!waited || (errno != EIO && errno != ENOSPC && errno != EDQUOT))
        return PC_OK;
    const int refused = errno;
    if (!pc__disk_file_has_name(fd) && ftruncate(fd, 0))
        return pc__fail_errno("cutting a file that the disk has refused to write");
    errno = refused;
    return pc__fail_errno("the disk refused to write what was written to a file: nobody reads it any more");
}

bool pc__disk_file_is_cut(int fd)
{
    struct stat st;
    return !fstat(fd, &st) && !st.st_size;
}
