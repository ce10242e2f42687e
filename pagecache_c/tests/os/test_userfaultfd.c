/* test_userfaultfd.c - each way to a userfaultfd, where a seccomp profile and the rights of a process
 * leave it open: as in containers. */
#include "engine/core/engine.h"
#include "os/userfaultfd.h"
#include "tests/support/commit.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define NOBODY 65534

/* As the default profile of containers: EPERM for the system call, whatever it asks for. */
static void refuse_the_call(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof rules / sizeof rules[0], rules};
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
}

static void skip(const char *why)
{
    printf("skip: %s\n", why);
    exit(77);
}

static void need_the_device(void)
{
    if (geteuid())
        skip("only root may open the device here");
    if (access(PC__USERFAULTFD_DEVICE, R_OK | W_OK))
        skip("this kernel has no " PC__USERFAULTFD_DEVICE);
}

static int probe(int way)
{
    int has_write_protect;
    return pc_userfaultfd_probe(way, &has_write_protect);
}

static bool is_uffd(int fd)
{
    struct uffdio_api api = {.api = UFFD_API};
    bool is = fd >= 0 && !ioctl(fd, UFFDIO_API, &api);
    if (fd >= 0)
        close(fd);
    return is;
}

static void test_an_ordinary_user(int unused)
{
    (void)unused;
    if (geteuid())
        skip("it takes root to become another user");
    CHECK(!setgid(NOBODY) && !setuid(NOBODY));
    CHECK(probe(PC__UFFD_BY_DEVICE) == (access(PC__USERFAULTFD_DEVICE, F_OK) ? ENOENT : EACCES));
    CHECK(probe(PC__UFFD_BY_USER_CALL) == 0);
    CHECK(is_uffd(pc__userfaultfd_any(false)) && is_uffd(pc__userfaultfd_any(true)));
    refuse_the_call();
    CHECK(probe(PC__UFFD_BY_CALL) == EPERM && probe(PC__UFFD_BY_USER_CALL) == EPERM);
    errno = 0;
    CHECK(pc__userfaultfd_any(false) == -1 && errno == EPERM); /* the call's, not the device's */
    CHECK(pc__userfaultfd_full(false) == -1 && errno == EPERM);
}

static void test_the_device_alone(int unused)
{
    (void)unused;
    need_the_device();
    refuse_the_call();
    CHECK(probe(PC__UFFD_BY_DEVICE) == 0);
    CHECK(probe(PC__UFFD_BY_CALL) == EPERM && probe(PC__UFFD_BY_USER_CALL) == EPERM);
    CHECK(is_uffd(pc__userfaultfd_any(false)) && is_uffd(pc__userfaultfd_full(true)));
    CHECK(probe(-1) == EINVAL && probe(PC__UFFD_N_WAYS) == EINVAL);
}

/* Page server, trap and copies, by the device: what they do is what they do by the call. */
static void test_a_session_by_the_device(int unused)
{
    (void)unused;
    need_the_device();
    refuse_the_call();
    struct cluster *c = cluster_start(2, "device");
    CHECK(c->servers[0].engine->uffd >= 0);
    pc_client *home = attach(&c->servers[0], PC_TRAP_AUTO);
    pc_client *far = attach(&c->servers[1], PC_TRAP_AUTO);
    CHECK(pc_client_trap(home) == PC_TRAP_UFFD_FULL && pc_client_trap(far) == PC_TRAP_UFFD_FULL);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 16 * MIB, 0);
    struct pc_mapping m = map_at(far, &info, 0, 0);
    for (uint64_t i = 0; i < 16 * MIB; i += 4096 * 17 + 8)
        CHECK(at(&m, i) == pattern(1, i));
    pc_client_close(home);
    pc_client_close(far);
    cluster_stop(c);
}

int main(void)
{
    int failed = run_test("an_ordinary_user", test_an_ordinary_user, 0, 60);
    failed += run_test("the_device_alone", test_the_device_alone, 0, 60);
    failed += run_test("a_session_by_the_device", test_a_session_by_the_device, 0, 120);
    return failed != 0;
}
