/* client.h - the parts of the client, and the state that they share.
 *
 *   client.c     open, close, the watch thread and what it receives
 *   call.c       requests and their replies
 *   conn.c       one connection: connect, hello, packets; used before the watch thread runs
 *   states.c     how the state of a client and of a mapping changes
 *   mapping.c    map, unmap
 *   idle_mappings.c       mappings that nobody uses, for the next who wants the same
 *   reads.c      read sets
 *   evicted_client.c  what was evicted meanwhile
 *   seen.c       which blocks this process knows to be here
 *   build.c      building a region in place
 *   stage.c      what a private mapping wrote, and handing it to the page server
 *   requests.c   create, seal, abandon, retire, prefetch, the report of a read set
 *   attach.c     after the page server died: attach anew, or end the process
 *   forked.c     in a child of fork; what all clients of the process share
 *   ended.c      addresses that outlive their client
 *   trap.h       how threads stop at absent blocks
 *
 * Threads: any thread of the process may call; one watch thread per client receives. It is the
 * only thread that the client adds.
 *
 * Locks, outermost first:  the list of clients -> client.lock -> ended.c's -> the range
 * table's.
 * client.lock is never held while waiting for a reply or for the socket, and fork happens with
 * all of them held, so that the child's tables are consistent.
 *
 * Invariants:
 *   - a mapping is readable only while armed, or when nothing of it can be absent;
 *   - the server counts a mapping as leased exactly while is_leased is set, or a CLOSE for it is
 *     in the outbox, or an OPEN of this connection is on the way;
 *   - state UP: socket is said hello on, and every leased mapping is attached to that server.
 */
#ifndef PC_CLIENT_H
#define PC_CLIENT_H

#include "client/calls.h"
#include "common/atomics.h"
#include "common/error.h"
#include "common/wire.h"
#include "os/file_id.h"
#include "os/local_socket.h"
#include "pagecache.h"
#include "trap/trap.h"

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#define PC__OUTGOING_BYTES 56 /* no message that waits in the outbox is longer */
static_assert(sizeof(struct pc__ctl_hello) <= PC__REPLY_BYTES, "replies fit");
static_assert(sizeof(struct pc__ctl_open) <= PC__OUTGOING_BYTES &&
              sizeof(struct pc__ctl_stage) <= PC__OUTGOING_BYTES &&
              sizeof(struct pc__ctl_region) <= PC__OUTGOING_BYTES, "outgoing messages fit");

enum pc__conn_state {
    PC__CONN_UP,
    PC__CONN_LOST,   /* the watch thread looks for a new server */
    PC__CONN_FORKED, /* a child that has not attached */
    PC__CONN_CLOSED
};

enum pc__mapping_state {
    PC__MAPPING_OPENING, /* one thread is in pc_client_map; others wait for it */
    PC__MAPPING_LIVE,
    PC__MAPPING_GUARDED    /* a child could not have it */
};

/* What keeps a mapping's addresses when its client is closed (ended.c). It is made with the mapping: at
 * the end there may be no memory for it. */
struct pc__ended {
    struct pc__ended *next;
    uint64_t address, length_bytes, users;
};

struct pc__mapping {
    struct pc__ended *ended;
    struct pc__mapping *next, *previous; /* all of them */
    struct pc__mapping *next_same_id; /* chain of by_id */
    struct pc__mapping *next_same_region; /* chain of by_region */
    struct pc__trapped trapped;      /* address, length, flags */
    uint64_t id, region, version, inode;
    uint32_t loss;                   /* of blocks of the region: its number, as the server said last */
    bool wastes;                     /* as the server said when it was opened: PC__OPENED_WASTES */
    uint64_t users;                  /* maps and running calls; 0: goes away */
    uint64_t unused_since_ns;         /* nobody uses it (idle_mappings.c); 0: somebody does */
    uint64_t readers;                /* read sets being taken: entries are dropped at 0 -> 1 */
    uint64_t watchers, scanned_pages; /* of a file on disk: see evicted_client.c */
    enum pc__mapping_state state;
    int error;                       /* OPENING: why re-attaching it failed */
    bool is_leased;
    bool follows;                    /* what was written to it is version + 1 (pc_client_resolve) */
    bool is_building;                /* made here, read-write, not sealed (build.c) */
    bool is_sealing;                 /* one thread is at it */
    bool may_be_sealed;              /* a SEAL went out and was not refused */
    bool is_built;                   /* made here, private since its seal (pc_client_build_keep) */
    bool is_kept;                    /* so, and others may point into it: it outlives the client */
    int build_fd;                    /* while is_building: its memfd; -1: none */
    bool is_dropping;                /* the first reader is at it; others wait */
    bool lost_reads;                 /* what was evicted while read sets are taken nobody knows */
    _Atomic(_Atomic uint64_t *) seen; /* seen.c; NULL: no block is known to be here */
};

struct pc__outgoing {
    struct pc__outgoing *next;
    size_t body_bytes;
    uint16_t type;
    unsigned char body[PC__OUTGOING_BYTES];
};

/* These blocks were just here. */
void pc__seen_add(struct pc__mapping *mapping, uint64_t first_block, uint64_t n_blocks);
void pc__seen_free(struct pc__mapping *mapping);

#define PC__MAPPING_BUCKETS 1024u

struct pc_client {
    pc_client *next;                /* list of clients */
    struct pc__packet *packet;      /* used by whoever receives: open, then the watch thread */
    char socket_name[PC__SOCKET_NAME_BYTES];
    char library_version[48];
    _Atomic uint64_t server_id;     /* of the page server that hello was said to last */
    int wanted_trap;
    uint64_t reattach_timeout_ns;
    int (*take_signals)(void);      /* installs the process's SIGSEGV handler; constant */
    uint64_t number;                /* of all of its connections (wire.h); a child of fork has another */
    int nudge_fd;                   /* eventfd: the watch thread looks up */
    pthread_t watch;
    bool has_watch;
    uint64_t heard_ns, pinged_ns;   /* watch thread only; pinged 0: no ping is unanswered */
    _Atomic uint64_t n_inside;      /* threads in a public call; close waits for them */

    pthread_mutex_t lock;           /* everything below */
    pthread_cond_t changed;         /* CLOCK_MONOTONIC: state, a call or a mapping */
    enum pc__conn_state state;
    int socket;                     /* sent on under lock, received on by the watch thread */
    uint64_t epoch;                 /* counts connections */
    uint32_t next_request_id;
    uint64_t next_mapping_id;
    struct pc__trap trap;
    struct pc__call *calls;
    struct pc__outgoing *outbox, **outbox_end; /* what the socket had no room for */
    struct pc__mapping *mappings;
    uint64_t n_idle, looks_at_ns; /* idle_mappings.c; 0: there is nothing to look at */
    struct pc__mapping *by_id[PC__MAPPING_BUCKETS];
    struct pc__mapping *by_region[PC__MAPPING_BUCKETS];
    uint8_t task[PC_TASK_BYTES];    /* that runs; zeros: none */
    char outage[160];               /* why the last try to re-attach failed */
    bool is_ended;                  /* so is the session: no server will come again */
};

/* Around the whole of a public call, so that close frees nothing that the call still looks at:
 * whoever waits inside is told PC_ERR_CLOSED and leaves. */
static inline void pc__enter(pc_client *client)
{
    pc__count_add(&client->n_inside, 1);
}
static inline void pc__leave(pc_client *client)
{
    /* Under lock to the end, so that close cannot free it under this thread's feet. */
    pthread_mutex_lock(&client->lock);
    pc__count_sub(&client->n_inside, 1);
    if (client->state == PC__CONN_CLOSED)
        pthread_cond_broadcast(&client->changed);
    pthread_mutex_unlock(&client->lock);
}

static inline uint64_t pc__clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t pc__deadline(uint64_t timeout_ns)
{
    uint64_t now = pc__clock_ns(), most = (uint64_t)INT64_MAX;
    return timeout_ns > most - now ? most : now + timeout_ns;
}

static inline void *pc__pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static inline bool pc__is_private(const struct pc__mapping *mapping)
{
    return mapping->trapped.flags & PC_MAP_PRIVATE;
}

/* Whole blocks, not none, inside the global address space. */
static inline bool pc__is_in_window(uint64_t base_address, uint64_t length_bytes)
{
    return length_bytes > 0 && length_bytes % PC_BLOCK_BYTES == 0 &&
           base_address % PC_BLOCK_BYTES == 0 && base_address >= PC_WINDOW_BEGIN &&
           base_address < PC_WINDOW_END && length_bytes <= PC_WINDOW_END - base_address;
}

/* states.c: the steps of a client's connection, and of a mapping; under lock. Nobody else writes a state, but
 * the first. goes: only steps that it may take. */
enum pc__client_step { PC__CLIENT_CONNECT, PC__CLIENT_LOSE, PC__CLIENT_FORK, PC__CLIENT_CLOSE };
bool pc__client_may(const pc_client *client, enum pc__client_step step);
void pc__client_goes(pc_client *client, enum pc__client_step step);
enum pc__mapping_step { PC__MAPPING_OPEN, PC__MAPPING_GUARD, PC__MAPPING_REGAIN };
bool pc__mapping_may(const struct pc__mapping *mapping, enum pc__mapping_step step);
void pc__mapping_goes(struct pc__mapping *mapping, enum pc__mapping_step step);

/* mapping.c; all under lock */
struct pc__mapping *pc__mapping_find(pc_client *client, uint64_t id);
/* With one user, and nothing at its addresses; NULL: there is no memory. */
struct pc__mapping *pc__mapping_new(uint64_t region);
void pc__mapping_free(struct pc__mapping *mapping);
void pc__mapping_add(pc_client *client, struct pc__mapping *mapping);
void pc__mapping_remove(pc_client *client, struct pc__mapping *mapping); /* and frees it */
/* One user less; the last one takes the mapping down. */
void pc__mapping_release(pc_client *client, struct pc__mapping *mapping);
/* Finds a live one and counts the caller in: 0 or the error. */
int pc__mapping_use(pc_client *client, uint64_t id, struct pc__mapping **out);
/* For audits; under lock.
 *   the list of all, by_id and by_region have the same mappings, each once; list: next->previous is itself
 *   of each mapping: id is no other's, 0 < id <= next_mapping_id; users = 0  <=>  it is idle, and then it is LIVE
 *   n_idle = how many are idle; a GUARD is not leased */
const char *pc__mappings_audit(pc_client *client);
/* idle_mappings.c, all under lock. ended: of one that is used again, or taken down. end_all: of a
 * region, or of all (0). look: ends those that have rested; returns how long poll() may wait, -1
 * for ever. */
void pc__idle_ended(pc_client *client, struct pc__mapping *mapping);
void pc__idle_end_all(pc_client *client, uint64_t region);
int pc__idle_look(pc_client *client);
extern uint64_t pc__idle_ns;
void pc__mapping_take_down(pc_client *client, struct pc__mapping *mapping);
void pc__mapping_describe(const struct pc__mapping *mapping, struct pc__ctl_open *out);
/* Addresses without access: the region's own, or others where mapping.c says so. */
int pc__mapping_reserve(struct pc__mapping *mapping, uint64_t base_address);
void pc__mapping_tell(const struct pc__mapping *mapping, struct pc_mapping *out);
/* The rest of them not under lock. */

/* Around a call that uses a mapping; unuse only after a use that succeeded. Both the client and the
 * mapping stay meanwhile. */
int pc__use(pc_client *client, uint64_t id, struct pc__mapping **out);
/* For what asks no server: also where that is gone, or the session has ended. */
int pc__use_here(pc_client *client, uint64_t id, struct pc__mapping **out);
void pc__unuse(pc_client *client, struct pc__mapping *mapping);
/* PC_ERR_RANGE: one is empty, or not inside the region. */
int pc__runs_check(const struct pc__mapping *mapping, const struct pc_run *runs, size_t n_runs);
/* OPEN, until the answer and the connection that the lease is on are the same. call: a struct
 * pc__ctl_opened and one descriptor, the caller's. The mapping knows what was opened, but for one
 * that is being built. */
int pc__mapping_lease(pc_client *client, struct pc__mapping *mapping, uint64_t deadline_ns,
                      struct pc__call *call);
/* Lays the memfd over what is reserved, and tells the signal table. */
int pc__mapping_lay(pc_client *client, const struct pc__mapping *mapping, int fd, int prot);
/* PC_ERR_PROTOCOL: the descriptor is not this memory, or not as long as the mapping. */
int pc__mapping_check_memory(struct pc__mapping *mapping, int fd, uint64_t inode);
/* Takes over what the server said of its memory. Under lock: attaching anew says it to the next one. */
void pc__mapping_opened(struct pc__mapping *mapping, const void *body);
/* Maps the memfd over what is reserved there, arms, opens. Owns fd. */
int pc__mapping_install(pc_client *client, struct pc__mapping *mapping, int fd);

/* build.c. close_fd: of one that is or was built. share: of one that is private since its seal, and
 * that the caller uses; what cannot be shared any more is released: PC_ERR_CLASH. */
void pc__build_close_fd(struct pc__mapping *mapping);
int pc__build_share(pc_client *client, struct pc__mapping *mapping);

/* requests.c: CREATE; *fd is the new home. */
int pc__create(pc_client *client, uint64_t region, uint64_t base_address, uint64_t length_bytes,
               enum pc_medium medium, uint64_t timeout_ns, int *fd);

/* stage.c: a commit's layer. */
/* As pc__use, of a private mapping. */
int pc__use_private(pc_client *client, uint64_t id, struct pc__mapping **out);
/* PC_ERR_RANGE: they are not inside the region, not sorted, or overlap; or there are none. */
int pc__layer_check_runs(const struct pc__mapping *mapping, const struct pc_run *runs, size_t n_runs);

/* copy_in.c: bytes of this process into a memfd. */
/* The runs of blocks that begin at base, one after the other, to offset_bytes of the file. What may
 * not be read by a system call (a block behind a trap, a window that is closed) is read by this
 * thread first. 0 or the error, as pc_copy_in. n_threads 0: chosen by size and cores. */
int pc__copy_runs(int fd, uint64_t offset_bytes, uint64_t base, const struct pc_run *runs,
                  size_t n_runs, int n_threads);

/* client.c */
int pc__watch_start(pc_client *client);

/* attach.c; on the watch thread, state LOST since then. 0: attached; PC_ERR_CLOSED: the client
 * closes. */
int pc__reattach(pc_client *client, uint64_t since_ns);

/* forked.c */
void pc__sessions_add(pc_client *client);
void pc__sessions_remove(pc_client *client);
/* The signal handler; several clients may be opened at once. */
int pc__sessions_install(void);

/* ended.c. keep: under lock, in close: what is still used stays as a guard; take_down follows. */
void pc__ended_keep(struct pc_client *client, struct pc__mapping *mapping);
void pc__ended_before_fork(void);
void pc__ended_after_fork(void);

#endif
