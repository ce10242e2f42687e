/* keepers.h - keepers in processes of their own, for servers that are to be started again. */
#ifndef PC_TEST_KEEPERS_H
#define PC_TEST_KEEPERS_H

#include "tests/support/harness.h"
#include "tests/support/processes.h"

struct keeper {
    char name[64];
    pid_t pid;
};

static inline struct keeper keeper_start(const char *tag)
{
    struct keeper k;
    snprintf(k.name, sizeof k.name, "clamor-test-keeper-%s-%d", tag, (int)getpid());
    pid_t watched = getpid();
    k.pid = fork();
    if (!k.pid)
        _exit(pc_keeper_run(k.name, watched, 100 * SECOND) ? 1 : 0);
    return k;
}

static inline int keeper_connect(const struct keeper *k)
{
    int fd;
    OK(pc_keeper_connect(k->name, 30 * SECOND, &fd));
    return fd;
}

static inline void keeper_stop(const struct keeper *k)
{
    int fd = keeper_connect(k), status;
    OK(pc_keeper_quit(fd));
    waitpid(k->pid, &status, 0);
    CHECK(status == 0);
    close(fd);
}

#endif
