/* process.h - another process of this node, as the kernel describes it: whether it lives, and what it
 * maps. See process.c. */
#ifndef PC_PROCESS_H
#define PC_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* A number is given again, but not with the same start. A process that becomes another program keeps
 * both, and has its stack elsewhere. */
struct pc__process {
    pid_t pid;              /* 0: it is of a foreign namespace, and has no number here */
    uint64_t start_ticks;   /* since the machine's start; 0: the kernel did not say */
    uint64_t stack_address; /* where it begins; 0 likewise */
};

struct pc__process_map {
    uint64_t begin, end, inode;
    uint64_t device; /* as st_dev */
    bool is_private; /* what is written there is the process's alone */
};

/* The process that made the connection. */
struct pc__process pc__process_of_peer(int socket_fd);
/* A handle on the process that made the connection, also where it has no number here; never on a
 * later process of that number. -1: the kernel gives none (before Linux 6.5, or no descriptor is left).
 * -ESRCH: it has ended. */
int pc__process_handle_of_peer(int socket_fd);
/* Whether all its threads have ended, with their memory. False where that cannot be known. */
bool pc__process_handle_ended(int handle);
/* A process of that user, not of others. False: there is none. */
bool pc__process_of(pid_t pid, uid_t user, struct pc__process *process);
/* Of one whose maps the kernel does not show: whether it has shared memory, and no rights that we lack (as
 * the machine's own first process may have). of_disk: what is looked for is no shared memory, so that is not
 * asked. True where that cannot be known. */
bool pc__process_may_be_client(const struct pc__process *process, bool of_disk);
/* A process that has not begun yet will have a start_ticks of this or more. 0: unknown. */
uint64_t pc__process_ticks_now(void);
/* Whether it may still read what it mapped: it has not ended, and is the same program. A process that ends
 * gives up its memory before its sockets. True where that cannot be known. */
bool pc__process_has_memory(const struct pc__process *process);
/* What it maps of files, by address; the caller frees it. False: the kernel does not show it. */
bool pc__process_maps(const struct pc__process *process, struct pc__process_map **maps, size_t *n);
/* Whether one of these overlaps the range and is of that file (its pc__file_id). Some file systems of disks
 * (btrfs) say another device here than in fstat: of those it says no. */
bool pc__process_maps_file(const struct pc__process_map *maps, size_t n, uint64_t begin,
                           uint64_t end, uint64_t id);

#endif
