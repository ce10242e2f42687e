/* keepers.h - keepers in processes of their own, for servers that are to be started again. */
#ifndef PC_TEST_KEEPERS_H
#define PC_TEST_KEEPERS_H

#include "tests/support/harness.h"
#include "tests/support/processes.h"

#include "engine/core/core.h"

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

/* The socket of the stopped keeper takes no more. Returns what is kept there: for unkeep. */
static inline uint64_t fill_socket(struct server *server)
{
    struct pc__kept kept = {.region = 999, .kind = PC__KEPT_CACHE, .length_bytes = PC_BLOCK_BYTES,
                            .base_address = PC_WINDOW_BEGIN, .sealed = 1};
    int fd = pc__memfd_make(PC_BLOCK_BYTES, &kept.inode);
    OK(fd);
    for (int n = 0; !pc__keeper_is_behind(server->engine); n++) {
        CHECK(n < 100000);
        OK(pc__keep(server->engine, &kept, fd));
    }
    return kept.inode; /* its descriptor stays open: it is sent later */
}

#endif
