/* userfaultfd.c - the ways to a userfaultfd, in one place.
 *
 * Who may what (Linux 5.11 and later): the system call without UFFD_USER_MODE_ONLY wants CAP_SYS_PTRACE
 * or vm.unprivileged_userfaultfd=1; with it, nobody is refused, but for seccomp, whose default profile
 * in containers allows neither. The device (Linux 6.1) asks no more than its own permissions, and the
 * device rules of the container's cgroup.
 *
 * Threads: any. Locks: none.
 */
#include "os/userfaultfd.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

static int by_device(int flags)
{
    int device = open(PC__USERFAULTFD_DEVICE, O_RDWR | O_CLOEXEC);
    if (device < 0)
        return -1;
    int fd = ioctl(device, USERFAULTFD_IOC_NEW, flags);
    int saved = errno;
    close(device);
    errno = saved;
    return fd;
}

int pc__userfaultfd_by(enum pc__userfaultfd_way way, bool nonblocking)
{
    int flags = O_CLOEXEC | (nonblocking ? O_NONBLOCK : 0);
    if (way == PC__UFFD_BY_DEVICE)
        return by_device(flags);
    return (int)syscall(SYS_userfaultfd,
                        flags | (way == PC__UFFD_BY_USER_CALL ? UFFD_USER_MODE_ONLY : 0));
}

int pc__userfaultfd_full(bool nonblocking)
{
    int fd = pc__userfaultfd_by(PC__UFFD_BY_DEVICE, nonblocking);
    return fd >= 0 ? fd : pc__userfaultfd_by(PC__UFFD_BY_CALL, nonblocking);
}

int pc__userfaultfd_any(bool nonblocking)
{
    int fd = pc__userfaultfd_by(PC__UFFD_BY_USER_CALL, nonblocking);
    if (fd >= 0)
        return fd;
    int why = errno;
    fd = pc__userfaultfd_by(PC__UFFD_BY_DEVICE, nonblocking);
    if (fd < 0)
        errno = why;
    return fd;
}
