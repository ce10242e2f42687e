/* test_process.c - what the kernel says of another process: whether it lives, and what it maps. */
#include "engine/core/engine.h"
#include "os/process.h"
#include "tests/support/commit.h"

#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>

#define NOBODY 65534

static void *wait_here(void *arg)
{
    char byte;
    (void)!read(*(int *)arg, &byte, 1);
    _exit(0);
}

/* Whose first thread has ended, and that goes on; then one that nobody has waited for. */
static void test_processes(int trap)
{
    int go[2], pair[2], ready[2];
    char byte;
    (void)trap;
    CHECK(!pipe(go) && !pipe(ready) && !socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    pid_t child = fork();
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, wait_here, &go[0]));
        CHECK(write(ready[1], "x", 1) == 1);
        pthread_exit(NULL);
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    struct pc__process me = pc__process_of_peer(pair[0]);
    CHECK(me.pid == getpid() && me.start_ticks && me.stack_address && pc__process_has_memory(&me));
    char path[64], text[64] = "";
    snprintf(path, sizeof path, "/proc/%d/statm", (int)child);
    for (uint64_t until = now_ns() + WAIT; now_ns() < until && strncmp(text, "0 ", 2); usleep(1000)) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0 && read(fd, text, sizeof text - 1) > 0);
        close(fd);
    }
    const struct pc__process it = {.pid = child}, later = {.pid = getpid(), .start_ticks = 1},
                             program = {.pid = getpid(), .stack_address = 1}, foreign = {0};
    CHECK(pc__process_has_memory(&it));
    CHECK(write(go[1], "x", 1) == 1);
    SOON(!pc__process_has_memory(&it)); /* not waited for yet */
    CHECK(waitpid(child, NULL, 0) == child && !pc__process_has_memory(&it));
    CHECK(!pc__process_has_memory(&later) && !pc__process_has_memory(&program));
    CHECK(pc__process_has_memory(&foreign)); /* nobody knows */
    struct pc__process_map *maps;
    size_t n;
    CHECK(!pc__process_maps(&foreign, &maps, &n) && pc__process_maps(&me, &maps, &n) && n > 0);
    const uint64_t id = pc__file_id_of(maps[0].device, maps[0].inode);
    CHECK(pc__process_maps_file(maps, n, maps[0].begin, maps[0].end, id));
    CHECK(pc__process_maps_file(maps, n, maps[0].begin - 4096, maps[0].begin + 1, id));
    CHECK(!pc__process_maps_file(maps, n, maps[0].begin - 4096, maps[0].begin, id));
    CHECK(!pc__process_maps_file(maps, n, maps[0].begin, maps[0].end, UINT64_MAX));
    free(maps);
}

/* /proc does not show a process (hidepid), which lives: nobody has said that it has ended. */
static void test_hidden(int trap)
{
    (void)trap;
    if (geteuid() != 0 || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("proc", "/proc", "proc", 0, "hidepid=2"))
        _exit(77);
    int ready[2];
    char byte, path[64];
    CHECK(!pipe(ready));
    CHECK(!setgroups(0, NULL) && !setgid(NOBODY) && !setuid(NOBODY));
    pid_t child = fork();
    if (!child) {
        CHECK(!prctl(PR_SET_PDEATHSIG, SIGKILL) && !prctl(PR_SET_DUMPABLE, 0));
        CHECK(write(ready[1], "x", 1) == 1);
        for (;;)
            pause();
    }
    CHECK(read(ready[0], &byte, 1) == 1);
    snprintf(path, sizeof path, "/proc/%d/stat", (int)child);
    if (access(path, F_OK) == 0)
        _exit(77);
    const struct pc__process it = {.pid = child}, known = {.pid = child, .start_ticks = 1};
    CHECK(pc__process_has_memory(&it) && pc__process_has_memory(&known));
    CHECK(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
    CHECK(!pc__process_has_memory(&it) && !pc__process_has_memory(&known));
}

int main(void)
{
    int failed = run_test("processes", test_processes, 0, 120);
    failed += run_test("hidden", test_hidden, 0, 120);
    return failed != 0;
}
