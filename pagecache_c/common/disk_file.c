/* disk_file.c - see disk_file.h. */
#include "common/disk_file.h"
#include "common/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

int pc__disk_file_read(int fd, void *out, uint64_t n_bytes, uint64_t offset)
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
            return pc__fail(PC_ERR_PROTOCOL, "a file ends at byte %llu, before it should",
                            (unsigned long long)offset);
        at += got;
        offset += (uint64_t)got;
        n_bytes -= (uint64_t)got;
    }
    return PC_OK;
}
