/* trap_uffd.c - userfaultfd: one descriptor per process, handed to the page server.
 *
 * Relies on the kernel: a range registered MISSING stops a thread at a hole; with WP registered
 * too, fault-around is off, so that the page table shows exactly what was touched; munmap ends a
 * registration; mprotect keeps it; while any descriptor of the uffd is open nobody reads zeros,
 * which is why the process keeps its own. It takes memory alone: of a file on a disk, which has
 * nothing to trap, the page table shows what lies around, too.
 *
 * Threads: any. Locks: none; the descriptor is set once.
 */
#include "common/error.h"
#include "os/userfaultfd.h"
#include "trap/trap.h"

#include <errno.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef UFFD_FEATURE_WP_HUGETLBFS_SHMEM
#define UFFD_FEATURE_WP_HUGETLBFS_SHMEM (1 << 12)
#endif

#define WP_FEATURES \
    ((uint64_t)UFFD_FEATURE_PAGEFAULT_FLAG_WP | (uint64_t)UFFD_FEATURE_WP_HUGETLBFS_SHMEM)

static int hello_fds(const struct pc__trap *trap, int fds[PC__CTL_MAX_FDS])
{
    fds[0] = trap->uffd;
    return 1;
}

/* Without needs_trap there is nothing to trap, but fault-around must be off for exact reads. */
static int arm(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    uint64_t mode = mapping->needs_trap ? (uint64_t)UFFDIO_REGISTER_MODE_MISSING : 0;
    if (mapping->flags & PC_MAP_EXACT_READS && trap->has_write_protect && !mapping->on_disk)
        mode |= (uint64_t)UFFDIO_REGISTER_MODE_WP;
    if (mode) {
        struct uffdio_register range = {
            .range = {.start = mapping->address, .len = mapping->length_bytes}, .mode = mode};
        if (ioctl(trap->uffd, UFFDIO_REGISTER, &range))
            return pc__fail_errno("UFFDIO_REGISTER of %#llx, %llu bytes",
                                  (unsigned long long)mapping->address,
                                  (unsigned long long)mapping->length_bytes);
    }
    if (mprotect((void *)(uintptr_t)mapping->address, mapping->length_bytes,
                 pc__trap_open_prot(mapping)))
        return pc__fail_errno("mprotect of %#llx, %llu bytes",
                              (unsigned long long)mapping->address,
                              (unsigned long long)mapping->length_bytes);
    return PC_OK;
}

static void forget(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    (void)trap;
    (void)mapping; /* unregistering before munmap would let holes read as zeros */
}

static int opened(struct pc__trap *trap, const struct pc__trapped *mapping,
                  const struct pc_run *runs, size_t n_runs)
{
    (void)trap;
    (void)mapping;
    (void)runs;
    (void)n_runs;
    return PC_OK;
}

static int reads_begin(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    (void)trap;
    (void)mapping;
    return PC_OK;
}

static void lost(struct pc__trap *trap, uint64_t since_ns)
{
    (void)trap;
    (void)since_ns;
}

static void wake(struct pc__trap *trap, const struct pc__trapped *mapping)
{
    struct uffdio_range range = {.start = mapping->address, .len = mapping->length_bytes};
    (void)ioctl(trap->uffd, UFFDIO_WAKE, &range); /* fails only for a range that is no range */
}

static int stuck_fd(const struct pc__trap *trap)
{
    return trap->uffd;
}

static bool stuck_at(struct pc__trap *trap, uint64_t *address)
{
    struct uffd_msg message;
    while (read(trap->uffd, &message, sizeof message) == (ssize_t)sizeof message)
        if (message.event == UFFD_EVENT_PAGEFAULT) {
            *address = message.arg.pagefault.address;
            return true;
        }
    return false;
}

static void close_uffd(struct pc__trap *trap, bool in_child)
{
    (void)in_child;
    close(trap->uffd);
    trap->uffd = -1;
    trap->ops = NULL;
}

static const struct pc__trap_ops ops = {
    .hello_fds = hello_fds, .arm = arm, .forget = forget, .opened = opened,
    .reads_begin = reads_begin, .lost = lost, .wake = wake, .stuck_fd = stuck_fd,
    .stuck_at = stuck_at, .close = close_uffd,
};

static int new_full(void)
{
    return pc__userfaultfd_full(true);
}

static int new_user_mode(void)
{
    return pc__userfaultfd_by(PC__UFFD_BY_USER_CALL, true);
}

/* Its features; -1 with errno. The handshake can be done once per descriptor: one is thrown away to
 * learn what is offered. */
static int features_of(int probe, uint64_t *features)
{
    if (probe < 0)
        return -1;
    struct uffdio_api offered = {.api = UFFD_API};
    int rc = ioctl(probe, UFFDIO_API, &offered);
    int saved = errno;
    close(probe);
    errno = saved;
    *features = offered.features;
    return rc;
}

static bool offers_write_protect(uint64_t features)
{
    return (features & WP_FEATURES) == WP_FEATURES;
}

static int try_open(int (*make)(void), int kind, struct pc__trap *out)
{
    uint64_t features;
    if (features_of(make(), &features))
        return pc__fail_errno("userfaultfd");
    if (!(features & (uint64_t)UFFD_FEATURE_MISSING_SHMEM))
        return pc__fail(PC_ERR_NO_TRAP, "this kernel's userfaultfd does not know shared memory");
    bool has_write_protect = offers_write_protect(features);
    int uffd = make();
    if (uffd < 0)
        return pc__fail_errno("userfaultfd");
    struct uffdio_api chosen = {.api = UFFD_API, .features = has_write_protect ? WP_FEATURES : 0};
    if (ioctl(uffd, UFFDIO_API, &chosen)) {
        int rc = pc__fail_errno("UFFDIO_API");
        close(uffd);
        return rc;
    }
    out->ops = &ops;
    out->kind = kind;
    out->uffd = uffd;
    out->control_fd = -1;
    out->has_write_protect = has_write_protect;
    return PC_OK;
}

int pc__trap_open_uffd(int wanted, struct pc__trap *out)
{
    int rc = PC_ERR_NO_TRAP;
    if (wanted != PC_TRAP_UFFD_USER)
        rc = try_open(new_full, PC_TRAP_UFFD_FULL, out);
    if (rc && rc != PC_ERR_DESCRIPTORS && wanted != PC_TRAP_UFFD_FULL) {
        char why[sizeof out->reason] = "";
        if (wanted != PC_TRAP_UFFD_USER)
            snprintf(why, sizeof why, "faults in system calls cannot be trapped here: %s",
                     pc_last_message());
        rc = try_open(new_user_mode, PC_TRAP_UFFD_USER, out);
        if (!rc)
            memcpy(out->reason, why, sizeof why);
    }
    /* ENOSYS, EPERM and EACCES (sysctl, seccomp, gVisor, device mode) all mean: not here. */
    if (rc == PC_ERR_SYSTEM)
        rc = pc__fail(PC_ERR_NO_TRAP, "userfaultfd is refused here: %s", strerror(errno));
    if (rc)
        snprintf(out->reason, sizeof out->reason, "%s", pc_last_message());
    return rc;
}

int pc_userfaultfd_probe(int way, int *has_write_protect)
{
    uint64_t features = 0;
    *has_write_protect = 0;
    if (way < 0 || way >= PC__UFFD_N_WAYS)
        return EINVAL;
    if (features_of(pc__userfaultfd_by((enum pc__userfaultfd_way)way, true), &features))
        return errno;
    *has_write_protect = offers_write_protect(features);
    return features & (uint64_t)UFFD_FEATURE_MISSING_SHMEM ? 0 : EOPNOTSUPP;
}
