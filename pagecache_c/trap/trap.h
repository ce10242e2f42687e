/* trap.h - the seam between the client and the two ways of stopping a thread at an absent block.
 *
 * trap_uffd.c     the kernel stops the thread and tells the page server itself.
 * trap_window.c   SIGSEGV, the part that runs in ordinary code: control page, window.
 * trap_sigsegv.c  SIGSEGV, the part that runs in the handler. Async-signal-safe only.
 *
 * One contract suite (tests/client/test_client.c) runs over both. Everything here may be called from
 * any thread; pc__trap_open and close are called when no mapping exists.
 */
#ifndef PC_TRAP_H
#define PC_TRAP_H

#include "trap/ranges.h"
#include "common/wire.h"

#include <stdbool.h>

struct pc__trap;

/* What a trap needs to know of a mapping. */
struct pc__trapped {
    uint64_t address, length_bytes;
    uint32_t flags;  /* enum pc_map_flags */
    bool needs_trap; /* false: a hole is a block of zeros, nothing is absent */
    bool on_disk;    /* a file: no userfaultfd, and the kernel may take what is mapped */
};

struct pc__trap_ops {
    /* Descriptors that HELLO carries; returns their number. */
    int (*hello_fds)(const struct pc__trap *trap, int fds[PC__CTL_MAX_FDS]);
    /* [address, length) is mapped with no access at all. Arms it, then lets the process in:
     * in this order, so that no thread can ever read a hole. */
    int (*arm)(struct pc__trap *trap, const struct pc__trapped *mapping);
    /* Before munmap. The mapping stays armed until it is gone. */
    void (*forget)(struct pc__trap *trap, const struct pc__trapped *mapping);
    /* The server said that these blocks are resident. */
    int (*opened)(struct pc__trap *trap, const struct pc__trapped *mapping,
                  const struct pc_run *runs, size_t n_runs);
    /* Page-table entries are about to be dropped so that a read set can be taken. */
    int (*reads_begin)(struct pc__trap *trap, const struct pc__trapped *mapping);
    /* The server's connection was lost (since_ns: monotonic) or is back (0). */
    void (*lost)(struct pc__trap *trap, uint64_t since_ns);
    /* Nobody will serve: makes threads that are stopped in the range try again, so that
     * stuck_fd tells of them. */
    void (*wake)(struct pc__trap *trap, const struct pc__trapped *mapping);
    /* Readable while a thread is stopped and nobody was told; -1: the trap sees to that itself. */
    int (*stuck_fd)(const struct pc__trap *trap);
    /* The address at which a thread is stopped. */
    bool (*stuck_at)(struct pc__trap *trap, uint64_t *address);
    /* in_child: after a fork, in the child; what the parent uses stays as it is. */
    void (*close)(struct pc__trap *trap, bool in_child);
};

struct pc__trap {
    const struct pc__trap_ops *ops; /* NULL: closed */
    int kind;                       /* enum pc_trap in force */
    char reason[160];               /* why no better one is, where that was not asked for; or "" */
    int uffd;
    bool has_write_protect;         /* uffd: can register WP on shared memory */
    int control_fd;                 /* SIGSEGV: memfd of the control page */
    struct pc__sig *sig;
};

/* Probes in the order of enum pc_trap. patience_ns: how long a stopped thread waits for a lost
 * server. Fails with PC_ERR_NO_TRAP when the kernel refuses what was asked for. */
int pc__trap_open(int wanted, uint64_t patience_ns, struct pc__trap *out);
int pc__trap_open_uffd(int wanted, struct pc__trap *out);
int pc__trap_open_sigsegv(uint64_t patience_ns, struct pc__trap *out);

/* The protection that a mapping has once every block is there. */
int pc__trap_open_prot(const struct pc__trapped *mapping);

/* ---------------------------------------------------- the signal path's share */

/* One per client that traps by SIGSEGV; never freed while a handler is inside. */
struct pc__sig {
    struct pc__control_page *page;
    int event_fd;
    uint64_t patience_ns;
    _Atomic uint64_t lost_since_ns; /* 0: the server is there */
    _Atomic bool ended;             /* no server will be there again */
    _Atomic uint32_t inside;        /* handlers that use this */
    /* A run of the window is replaced, and what it names is opened, by one thread at a time. A
     * busy run is passed over, never waited for. */
    _Atomic uint8_t busy[PC__WINDOW_RUNS];
};

/* Installs the handler, once in a process; again when somebody put theirs over it. */
int pc__sig_install(void);

/* The window of blocks that this process may touch (see struct pc__control_page).
 *   take   names the run in the window; the oldest one is protected again to make room.
 *   narrow keeps less of it; done lets others replace it. */
uint32_t pc__window_take(struct pc__sig *sig, uint64_t address, uint64_t n_bytes);
/* Which chunk was being evicted (the page's word, read after take and before mincore()): its blocks
 * among the n from begin on are struck out of what mincore() found. */
void pc__window_hide(uint64_t evicting, uint64_t mapping_begin, uint64_t begin,
                     unsigned char *resident, size_t n);
void pc__window_narrow(struct pc__sig *sig, uint32_t index, uint64_t address, uint64_t n_bytes);
void pc__window_done(struct pc__sig *sig, uint32_t index);

#endif
