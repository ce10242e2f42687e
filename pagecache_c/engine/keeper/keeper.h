/* keeper.h - the engine's side of the keeper: what is kept of every memfd, and how to say so.
 *
 * The keeper (keeper.c, pc_keeper_run) outlives the page server and holds its memfds. Its
 * messages are private to keeper.c: both ends are the same build on one node.
 */
#ifndef PC_KEEPER_H
#define PC_KEEPER_H

#include "pagecache.h"

#include <assert.h>
#include <stdbool.h>

enum pc__kept_kind {
    PC__KEPT_HOME = 1,   /* this node is the region's home: a hole is a block of zeros */
    PC__KEPT_CACHE = 2,  /* blocks homed elsewhere: a hole is an absent block */
    PC__KEPT_OVERLAY = 3,/* of a home: blocks that changed since its base; a hole is none */
    PC__KEPT_LAYER = 4,  /* of a commit; version 0: staged */
    PC__KEPT_HISTORY = 5,/* replaced blocks; region 0 */
    PC__KEPT_LAST = 6
};

/* One file, of memory or a disk. `inode` is its pc__file_id, and its name: clients say it when they
 * attach again. */
struct pc__kept {
    uint64_t region;
    uint64_t version;
    uint64_t base_address;
    uint64_t length_bytes;
    uint32_t kind;       /* enum pc__kept_kind */
    uint32_t sealed;     /* 0 or 1 */
    uint64_t inode;
    uint64_t commit_id;  /* LAYER */
    uint64_t on_disk;    /* 0 or 1 */
    char reserved[64];   /* the engine's; comes back as it was put */
};
static_assert(sizeof(struct pc__kept) == 128, "no padding: records travel as bytes");

/* Keeps memfd (a duplicate: the caller's stays open) under what->inode, which must be its inode.
 * The same inode again replaces the record. Returns when the keeper's socket has taken it: a
 * server that dies right after loses nothing. Waits a few seconds at most for a slow keeper
 * (PC_ERR_TIMEOUT). PC_ERR_CLOSED: the keeper is gone, or it is full, or it closed the connection
 * upon nonsense; it may then not hold what was put last. Any thread. */
int pc__keeper_put(int keeper_fd, const struct pc__kept *what, int memfd);

/* Forgets a memfd; one that is not kept is no error. Otherwise as pc__keeper_put. */
int pc__keeper_drop(int keeper_fd, uint64_t inode);

/* As put and drop, and at once: PC_ERR_TIMEOUT where the socket has no room. */
int pc__keeper_try_put(int keeper_fd, const struct pc__kept *what, int memfd);
int pc__keeper_try_drop(int keeper_fd, uint64_t inode);
/* It has been given all there is. One that began as a part (pc_keeper_run_part) is whole from then on. */
int pc__keeper_try_whole(int keeper_fd);

/* Calls each() with everything that is kept, oldest first; each() owns fd. A value other than 0
 * from it stops the list and is returned. each() may put and drop on the same connection; what
 * it puts newly may be listed too. PC_ERR_HOME_LOST, after all of it: the keeper is a part, the server that
 * was to give it everything died before. One list at a time per connection; timeout_ns is for each answer
 * of the keeper, not for what each() does. Whatever other connections had put before they died is in the list. */
int pc__keeper_list(int keeper_fd, int (*each)(void *arg, const struct pc__kept *what, int fd),
                    void *arg, uint64_t timeout_ns);

#endif
