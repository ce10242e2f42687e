/* engine.h - the page server's engine: its parts, who owns them, and which lock covers what.
 *
 *   loop        one thread, one epoll. Owns the clients, peers and served connections that were
 *               given to it; nobody else touches those. n_loops of them.
 *   client      one process of this node: its control socket, its trap, its mappings.
 *   region      what Python told us of a region, its home (if its blocks live here), and its
 *               generations (the memfds that processes of this node map, one a version).
 *   layer       the blocks of one commit on one region: staged, then published, then applied.
 *   worker      one thread: applies published layers to homes.
 *   peer        this loop's connections to one other server, and the fetches that wait for it.
 *   served      a connection on which another server asks us.
 *
 * Locks, in the order in which they nest:  publish_lock -> engine.lock -> region.lock -> leaves.
 *   engine.lock   the region table, the staged and retained layers, the round-robin counters.
 *   region.lock   everything in one region that changes after it was defined: presence, in
 *                 flight, waiters, jobs, leases. Held for arithmetic and for calls that never
 *                 block (UFFDIO_WAKE, a futex wake, a non-blocking send); never over file or
 *                 network I/O (but a lease that needs a new generation makes its memfd under it,
 *                 and one that advances one punches its holes).
 *   leaves        event_lock, keeping.lock, worker.lock, the cache's, the history's and each loop's
 *                 mail_lock: nothing is taken under them. (The cache's window_lock is between
 *                 region.lock and the leaves.)
 * Who evicts takes a victim under the cache's lock, with references, drops that lock, takes the lock
 * of the victim's region, and looks again.
 * A waiter or job in a region belongs to a client of some loop; the client takes all of its own
 * out, under region.lock, before it closes a descriptor. So whoever holds region.lock may use the
 * descriptors of the waiters it finds there.
 */
#ifndef PC_ENGINE_H
#define PC_ENGINE_H

#include "atomics.h"
#include "blockset.h"
#include "error.h"
#include "history.h"
#include "keeper.h"
#include "keeping.h"
#include "list.h"
#include "pages.h"
#include "pagecache.h"
#include "wire.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

struct pc__loop;
struct pc__client;
struct pc__region;
struct pc__mapping;
struct pc__pull;
struct pc__part;
struct pc__gather;
struct pc__rents;

/* ---------------------------------------------------------------- regions */

/* A memfd of a home, and which of its blocks mean something. */
struct pc__store {
    int memfd;                     /* -1: there is none */
    uint64_t inode;
    const uint8_t *map;            /* the whole memfd, read-only */
    struct pc__blockset data;      /* blocks that were written */
    uint64_t version;
};

/* The authoritative blocks of a region, where this node is its home. Where those of a version are,
 * and how they change: home.c. All of it under region.lock; only the worker changes stores. */
struct pc__home {
    struct pc__store base;         /* version B: what processes of this node map */
    struct pc__store overlay;      /* blocks that changed in (B, applied], while B is leased */
    struct pc__link pending;       /* struct pc__layer, of (applied, latest], by version */
    uint64_t applied, latest;
    uint64_t warm_blocks;          /* of the base: the first are in our page table (worker only) */
    uint64_t history_from;         /* versions below it take what the history has: applied, or one
                                      more from when that record is written until it is applied */
    bool base_changes;             /* the worker is at it, or was when it died: no new leases */
    bool overlay_is_torn;          /* it has, or may have, a part of the layer after `applied` */
    struct pc_segment *segments;   /* sorted; bytes of the base that lie in somebody else's memory */
    size_t n_segments;
    uint64_t epoch;                /* who looks at a store or a layer counts itself in. It goes on */
    uint64_t readers[2];           /* only when the one before has no readers: [epoch % 2], and the last */
    bool held_up;                  /* the worker has waited long for some: nobody waits for it */
    uint64_t replaced_in;          /* the epoch in which history_from rose: until then somebody may
                                      have resolved what the next layer replaces */
    struct pc__layer *leaving;     /* applied, or */
    struct pc__store folded;       /* brought into the base: to go when all have left that may have */
    uint64_t leaving_in;           /* resolved it, up to this epoch */
    struct pc__directory *directory; /* who else has blocks of it (directory.c), or NULL */
};

/* One node's memfd of one version of one region. */
struct pc__generation {
    struct pc__link link;          /* of the region, while it can be leased */
    _Atomic uint32_t refs;         /* the region's list, each mapping, each fetch, each fork */
    int memfd;
    uint8_t *map; /* the whole memfd, registered with the engine's uffd; inserted into, never read */
    uint64_t inode;
    uint64_t version;
    bool complete; /* the base of a home: holes are zeros, no trap is needed */
    bool is_layer;                 /* of a layer that is being pulled: no region's */
    bool has_strays;               /* the file may have blocks that present does not: an insert
                                       failed half-way, or could not be noted */
    uint64_t mappings;             /* leases, and how many of them follow it to version + 1: all that */
    uint64_t followers;            /* changes there they have private copies of */
    uint64_t forks;                /* generations that take blocks from this one */
    struct pc__generation *source; /* +1 ref: of a fork, which takes from it what is the same there */
    struct pc__blockset changed;   /* of a fork: what is not */
    struct pc__blockset present;   /* not kept for a complete one */
    struct pc__blockset in_flight;
    struct pc__blockset fetched;
    struct pc__blockset touched;
    struct pc__blockset changed_away; /* were present before it moved; absent since */
    struct pc__rents *rents;       /* what rows of absent blocks have cost (gather.c), or NULL */
    struct pc__link waiters;       /* struct pc__waiter */
    struct pc__link jobs;          /* struct pc__job */
    struct pc__link cached;        /* cache.c's: what is accounted of it, */
    struct pc__link idle;          /* since when nobody leases it, */
    uint64_t idle_since_ns;
    struct pc__region *cached_for; /* and whose it is, once something is accounted */
    struct pc__link windows;       /* struct pc__window_user (windows.c) */
    struct pc__link recorders;     /* struct pc__recorder (evicted.c) */
    int gone;                      /* its version's home keeps blocks of it no longer: the error of who
                                      opens it from now on; else 0 */
    bool adopted;                  /* from the keeper: until all had the time to attach again, somebody
                                      may map it whom we do not know */
};

/* The blocks of one commit on one region: a file as wire.h describes, mapped read-only. */
struct pc__layer {
    struct pc__link link;          /* staged: of the engine; published at its home: of that */
    int memfd;
    uint64_t inode, bytes;
    const uint8_t *map;
    uint64_t region, commit_id;
    uint64_t version;              /* 0: staged */
    const struct pc_run *runs;     /* in map */
    uint64_t *positions;           /* of each run's first block among the data */
    uint64_t data_offset, n_blocks;
    uint32_t n_runs;
    _Atomic uint32_t refs;         /* its list, each reply that sends of it */
    uint64_t owner;                /* staged: the client it came from, or 0 */
    uint64_t ask_at_ns;            /* staged: when to ask what became of it */
};

/* What registry said of the blocks that differ between two versions. */
struct pc__changes {
    uint64_t from, to;             /* from < to; both 0: nothing */
    int error;
    size_t n_runs;
    struct pc_run *runs;
};

enum pc__region_state {
    PC__REGION_UNKNOWN,  /* asked for; Python was told to look it up */
    PC__REGION_CREATING, /* made here, being filled, not sealed */
    PC__REGION_READY,
    PC__REGION_RETIRED   /* freed: no new leases */
};

struct pc__region {
    struct pc__region *hash_next;
    _Atomic uint32_t refs;         /* the table, each mapping, each fetch, each reply in a queue */
    pthread_mutex_t lock;
    uint64_t id, base_address, length_bytes, n_blocks;
    uint64_t version;              /* the newest that was heard of here; for statistics */
    uint64_t *homes;               /* server id of each extent, once READY: pc__home_of */
    enum pc__region_state state;
    uint64_t creator;              /* client id, while CREATING */
    struct pc__home *home;
    struct pc__home *prepared;     /* to be the home once the registry has it so (rebuild.c); or NULL */
    bool prepared_sealed;          /* all of it is there */
    struct pc__pages *pages;       /* how much a fault fetches, once there was one; or NULL */
    struct pc__link generations;
    uint64_t mappings;
    struct pc__changes changes;    /* the last answer */
    struct pc__link pending;       /* struct pc__pending: OPENs that wait for Python or the worker */
    int lost;                      /* the registry's verdict: the error of who opens it; else 0 */
    uint64_t parked;               /* connections of other servers that wait for a version */
    bool asked_region, asked_changes, asked_published, asked_home; /* the question is out */
    uint64_t published_questions;  /* put so far: the answer to one says nothing of versions that
                                      somebody began to wait for after it was put */
    bool queued;                   /* for the worker, which has a reference then */
    bool idle_told;
    bool forgotten;                /* out of the table: whoever finds it so looks it up again */
};

/* A thread that is stopped at an absent block. */
struct pc__waiter {
    struct pc__link link;
    struct pc__client *client;
    uint64_t mapping_id;
    uint64_t mapping_address;
    uint64_t block;
    int slot;                      /* SIGSEGV: its slot; uffd: -1 */
};

/* A prefetch that somebody waits for: done when none of its blocks is absent. */
struct pc__job {
    struct pc__link link;
    struct pc__client *client;     /* NULL: a layer is pulled */
    struct pc__pull *pull;         /* then */
    struct pc__part *part;         /* of a gather, that waits for it; or NULL */
    uint64_t mapping_id;
    uint32_t request_id;
    uint64_t remaining_blocks;
    size_t n_runs;
    struct pc_run runs[];          /* sorted, disjoint */
};

struct pc__pending {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t client_id;
    uint32_t request_id;
    bool attach;
    uint64_t question;             /* the first NEED_PUBLISHED whose answer is news to it */
    bool asked_published;          /* that was answered: the home has caught up for it */
    bool stages;                   /* the reply to a STAGE: the home has too much to apply */
    struct pc__ctl_open open;
};

/* --------------------------------------------------------------- fetching */

/* Blocks that were marked in flight and that one server was, or will be, asked for. */
struct pc__fetch {
    struct pc__link link;
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref; its version stays while blocks are in flight */
    struct pc__generation *source; /* +1 ref, and counted among its forks; or NULL */
    uint64_t server_id;            /* this server's own: from its home; 0: from the source */
    uint64_t home_id;              /* not 0: a peer is asked, to which this home sent us */
    uint64_t missed_id;            /* not 0: this peer was, and did not have them: the home must */
    uint32_t from_version, to_version; /* of a peer: the blocks are the same in all of these */
    struct pc__gather *gather;     /* rows are asked for, not blocks (gather.c); or NULL */
    uint64_t give_up_ns;           /* 0: it has not been its turn yet */
    uint64_t sent_ns;              /* its request, the last time */
    uint64_t final_ns;             /* of a peer: give_up_ns of the home, once that is asked again */
    uint32_t request_id;
    uint32_t n_blocks;             /* still to come: of runs[at_run] on */
    uint32_t n_runs, capacity_runs;
    uint32_t at_run;               /* the runs before it are dealt with */
    int error;                     /* what comes is thrown away */
    bool urgent;                   /* a thread is stopped: not behind the bulk */
    bool prefetch;
    struct pc_run runs[];          /* [at_run] shrinks from its front as blocks come. Of a peer: as
                                      they were at first, from capacity_runs on */
};

#define PC__LANES_PER_LOOP 2 /* one for urgent fetches, one for bulk */
#define PC__URGENT_REQUESTS 16 /* on the wire at once; the rest waits in the lane's queue */
#define PC__REQUEST_BLOCKS 64u  /* asked for at once: the home decides for each request who answers */
#define PC__BULK_REQUESTS 32   /* enough for the wire, little to wait behind */
#define PC__RX_BYTES (1u << 20)
#define PC__BOUNCE_BLOCKS 64u

/* One connection to a peer, on which we ask. */
struct pc__lane {
    int fd;                        /* -1: none */
    bool asked;                    /* NEED_PEER is out */
    int low_water;                 /* SO_RCVLOWAT, as it stands */
    struct pc__watch *watch;
    struct pc__link queued;        /* fetches not sent yet */
    struct pc__link sent;          /* fetches on the wire, oldest first */
    uint32_t n_sent;
    uint64_t progress_ns;          /* when bytes last came, or the first of sent was sent */
    uint8_t *tx;                   /* request bytes that the socket did not take yet */
    size_t tx_bytes, tx_capacity;
    uint8_t *rx;                   /* PC__RX_BYTES */
    size_t rx_begin, rx_end;
    bool in_rows;                  /* the head of rows is read: sent's first is of rows, and */
    uint32_t rows_due;             /* so many bytes of them are still to come */
    bool in_reply;                 /* header and bitmap of sent's first are read */
    uint32_t reply_position;       /* blocks of the reply dealt with */
    uint32_t reply_blocks;
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64];
    uint64_t elsewhere[PC__DATA_MAX_BLOCKS / 64];
};

struct pc__peer {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t server_id;
    struct pc__lane lanes[PC__LANES_PER_LOOP];
};

/* ------------------------------------------------------------------ loops */

enum pc__watch_kind {
    PC__WATCH_MAIL,
    PC__WATCH_LISTEN,
    PC__WATCH_CLIENT,
    PC__WATCH_UFFD,
    PC__WATCH_SLOTS,
    PC__WATCH_LANE,
    PC__WATCH_SERVED
};

/* What epoll gives back. Freed only after the batch of events in which it died. */
struct pc__watch {
    enum pc__watch_kind kind;
    bool dead;
    int fd;
    int lane;
    void *owner;
    struct pc__watch *grave_next;
};

/* Work for another thread's loop. */
struct pc__mail {
    struct pc__mail *next;
    void (*run)(struct pc__loop *loop, struct pc__mail *mail);
    uint64_t a, b;
    int fd, lane, error;
    void *pointer;
};

#define PC__ROW_BUFFERS 4
struct pc__loop {
    struct pc_engine *engine;
    int index;
    int epoll;
    int mail_event;
    struct pc__watch *mail_watch, *listen_watch; /* listen: of loop 0 */
    uint64_t accept_again_ns;      /* not 0: no descriptors were left, so it does not listen now */
    bool accept_fails;             /* since the last that was accepted; said once */
    pthread_t thread;
    bool started;
    pthread_mutex_t mail_lock;     /* mail_head, mail_tail; nests inside everything */
    struct pc__mail *mail_head, *mail_tail;
    bool stopping;
    struct pc__link clients, peers, served;
    struct pc__watch *graves;
    uint8_t *bounce;               /* PC__BOUNCE_BLOCKS, once needed */
    struct pc__parts *parts;       /* of the reply that is being put together (reply.c) */
    uint32_t next_request_id;
    void *plan;                    /* scratch of gather.c, once needed */
    uint8_t *row_buffers[PC__ROW_BUFFERS]; /* of answers that were sent (rows.c), or NULL */
};

struct pc__counters {
    _Atomic uint64_t mappings, clients, served_connections, peer_connections;
    _Atomic uint64_t faults, faults_failed, faults_waiting;
    _Atomic uint64_t fetch_requests, fetch_retries, fetch_failed, fetches_in_flight;
    _Atomic uint64_t blocks_fetched, bytes_received, bytes_sent, blocks_served;
    _Atomic uint64_t zero_blocks, local_blocks, prefetch_requests, prefetched_blocks;
    _Atomic uint64_t bad_messages, reattached, advances, forks;
    _Atomic uint64_t layers, layer_bytes, retained_layers, retained_bytes;
    _Atomic uint64_t redirected_blocks, redirect_misses, peer_blocks_served, peer_blocks_fetched;
    _Atomic uint64_t evicted_blocks, refetched_blocks, rows_served, rows_fetched;
    _Atomic uint64_t commits_staged, commits_published, commits_applied, commits_dropped;
};

#define PC__HOLDERS 6 /* of a block, that its home remembers */
struct pc__holder {
    uint64_t id;
    uint64_t sent_to_bytes;        /* that others were sent there for, and did not say that they have */
    uint64_t sent_to_ns;           /* the last time */
    uint64_t reported_bytes;       /* that it had to send, as it said itself */
    uint64_t reported_ns;          /* when */
};
/* Servers that have blocks which are homed here (directory.c). */
struct pc__holders {
    pthread_mutex_t lock;          /* nests inside all */
    _Atomic uint64_t random;
    size_t n, capacity;
    struct pc__holder *servers;
};

struct pc__worker {
    pthread_t thread;
    bool started, stopping;
    bool kicked;                   /* a reader left, or there is more to do: a nap ends */
    pthread_mutex_t lock;          /* the queue; nests inside everything */
    pthread_cond_t wake;
    struct pc__region **queue;     /* ring; each with a reference */
    size_t capacity, begin, n;
};

#define PC__REGION_BUCKETS 4096
#define PC__MAX_LOOPS 8
#define PC__LOG_EVENTS 1024

#define PC__UNREACHED 16
struct pc_engine {
    pthread_mutex_t lock;
    uint64_t server_id;
    char socket_name[100];
    char library_version[48];
    uint64_t fetch_timeout_ns, fault_timeout_ns;
    unsigned page_shift;           /* log2 of the bytes that a fault fetches; 0: by use (pages.c) */
    int replication;               /* enum pc_replication */
    _Atomic uint64_t serving_bytes; /* of replies that are queued for other servers */
    struct pc__holders holders;
    struct pc__cache *cache;       /* what counts and evicts cached blocks (cache.c); NULL: no budget */
    uint32_t window_limit;         /* of SIGSEGV processes, in runs; 0: as many as there are */
    struct pc__keeping *keeping;   /* what the keeper has; its lock nests inside all. NULL: none */
    int listen_fd;
    int event_fd;
    int uffd;                      /* inserts go through it; -1: pwrite */
    _Atomic uint64_t settle_until_ns; /* 0: clients have had the time to attach again */
    int n_loops;
    struct pc__loop loops[PC__MAX_LOOPS];
    struct pc__region *regions[PC__REGION_BUCKETS];
    uint64_t n_regions;
    struct pc__unreached {
        uint64_t server_id, since_ns; /* 0: none */
        char cause[120];
    } unreached[PC__UNREACHED];    /* servers (unreached.c) */
    unsigned next_unreached;
    pthread_mutex_t event_lock;    /* unreached, and the ring below; nests inside all */
    struct pc_event *events;       /* ring of events_capacity */
    size_t events_capacity, events_begin, n_events;
    uint64_t next_client_id;
    unsigned next_loop;
    struct pc__link staged;        /* struct pc__layer; engine.lock */
    struct pc__link retained;      /* the same, the oldest first (retained.c) */
    uint64_t retained_most_bytes;
    pthread_mutex_t publish_lock;  /* one publish or drop at a time: the keeper hears of a layer's
                                      version before of its end. Outermost */
    uint64_t stage_timeout_ns;
    struct pc__history *history;
    struct pc__worker worker;
    struct pc__counters count;
};

/* region.c */
struct pc__region *pc__region_get(struct pc_engine *engine, uint64_t id); /* +1 ref, or NULL */
struct pc__region *pc__region_get_or_add(struct pc_engine *engine, uint64_t id);
/* One that is in no table, with a reference: of a layer that is being pulled. */
struct pc__region *pc__region_alone(uint64_t id, uint64_t n_blocks);
void pc__region_put(struct pc_engine *engine, struct pc__region *region);
void pc__region_forget(struct pc_engine *engine, struct pc__region *region);
bool pc__region_info_valid(const struct pc_region_info *info);
int pc__region_seal(struct pc_engine *engine, struct pc__region *region);
/* Under region.lock: its base is a generation too, if processes may map it as it is. */
int pc__region_home_generation(struct pc_engine *engine, struct pc__region *region);
/* Takes back one memfd after a restart, and, when all are there, what they are to each other. */
int pc__region_adopt(void *engine, const struct pc__kept *kept, int fd);
void pc__regions_adopted(struct pc_engine *engine);
void pc__region_lease_dropped(struct pc_engine *engine, struct pc__region *region);
/* Sends OPENs that wait back to their loops: to try again, or, where error and version >= from, to
 * fail. And lets other servers' requests go on. caught_up: every version there is is known now. */
void pc__region_release(struct pc_engine *engine, struct pc__region *region, int error,
                        uint64_t from, bool caught_up);
uint64_t pc__regions_deadline(struct pc__loop *loop);
void pc__regions_check(struct pc__loop *loop, uint64_t now_ns);
int pc__memfd_make(uint64_t length_bytes, uint64_t *inode);
/* PC_ERR_DESCRIPTORS: only those are left that are kept back for connections, and for finishing what
 * is begun. For what makes a region, a generation or a layer: others must still reach what is here. */
int pc__descriptors_spare(void);
/* Blocks of the file that are not holes, added to data. */
int pc__memfd_blocks(struct pc__blockset *data, int memfd, uint64_t length_bytes);
void pc__keep(struct pc_engine *engine, const struct pc__kept *what, int fd);
void pc__unkeep(struct pc_engine *engine, uint64_t inode, bool on_disk);
/* Of what is kept: false, and nothing has changed, where the keeper cannot be told at once. */
bool pc__keep_now(struct pc_engine *engine, const struct pc__kept *what);
bool pc__keeper_is_behind(struct pc_engine *engine);
/* Until the keeper has heard all that was said before. Under no lock, and in no loop. */
int pc__keep_wait(struct pc_engine *engine);
/* The same for loops: false, heard already; else heard is called (keeping.h). */
bool pc__keep_when(struct pc_engine *engine, pc__keeper_heard *heard, void *arg);
struct pc__kept pc__kept_of(const struct pc__region *region, enum pc__kept_kind kind,
                            uint64_t inode, uint64_t version);

/* generation.c; under region.lock, but for put */
struct pc__generation *pc__generation_new(uint64_t n_blocks, bool complete);
int pc__generation_map(const struct pc_engine *engine, struct pc__generation *generation);
struct pc__generation *pc__generation_take(struct pc__generation *generation); /* +1 ref */
void pc__generation_put(struct pc_engine *engine, struct pc__generation *generation);
/* The one that holds exactly this version: made, moved or forked if need be. PC__WAIT: it was, or
 * is to be, asked for; *ask says what. */
#define PC__WAIT 1
struct pc__ask {
    enum pc_event_kind kind;       /* NONE: the worker is at it, or the question is out */
    uint64_t from_version, version;
};
int pc__generation_for(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                       bool caught_up, struct pc__generation **out, struct pc__ask *ask);
int pc__memfd_punch(int memfd, uint64_t first, uint64_t n); /* blocks */
struct pc__generation *pc__generation_by_inode(struct pc__region *region, uint64_t inode);
/* Whether a lease needs it to stay as it is, if it were to go to that version. */
bool pc__generation_leased(const struct pc__generation *generation, uint64_t to_version);
void pc__generation_is_at(struct pc__generation *generation, uint64_t version);
/* A lease on one of them is gone: drops those that nobody will want. */
void pc__generations_trim(struct pc_engine *engine, struct pc__region *region);
void pc__generation_drop(struct pc_engine *engine, struct pc__region *region,
                         struct pc__generation *generation);

/* home.c */
int pc__home_make(struct pc_engine *engine, struct pc__region *region,
                  const struct pc_segment *segments, size_t n_segments, int *fd);
struct pc__home *pc__home_new(void);
void pc__home_free(struct pc_engine *engine, struct pc__home *home, uint64_t length_bytes);
/* Owns fd in every case. */
int pc__store_open(struct pc__store *store, int fd, uint64_t inode, uint64_t length_bytes,
                   uint64_t version);
void pc__store_close(struct pc_engine *engine, struct pc__store *store, uint64_t length_bytes);
/* Whether somebody needs the base to stay as it is, if it were to go to that version. */
bool pc__home_base_leased(const struct pc_engine *engine, const struct pc__region *region,
                          uint64_t to_version);
struct pc__generation *pc__home_base_generation(const struct pc__region *region);
/* The worker, with nothing else to do for the region: takes the next of a new base's blocks into this
 * process's page table, which else costs the first answer of each 64 KiB a page fault. True: there
 * are more. */
#define PC__WARM_LEAST_BLOCKS 1024u /* a base of less is not worth a turn */
bool pc__home_warm(struct pc__home *home);
/* Blocks that were allocated because a process read holes of the base: how many there are; and the
 * worker gives them back. Both under region.lock. A reader sees zeros before and after. */
uint64_t pc__home_read_holes(const struct pc__home *home);
int pc__home_punch_holes(struct pc__home *home);
/* Who will look at bytes that resolve gave out: from under region.lock until release. */
unsigned pc__home_hold(struct pc__home *home);
/* The worker, under region.lock: whether all readers of this epoch and of those before it have left.
 * No epoch begins before the last but one is empty, so there are never readers of more than two. */
bool pc__home_left(struct pc__home *home, uint64_t epoch);
void pc__home_release(struct pc_engine *engine, struct pc__region *region, unsigned held);
/* It has more to apply than it should have: writers wait. */
bool pc__home_is_behind(const struct pc__home *home);
/* Where the blocks of a version are. Describes up to n blocks from block on that are alike. */
enum pc__home_kind { PC__HOME_ZEROS, PC__HOME_MEMORY, PC__HOME_MIXED, PC__HOME_HISTORY };
struct pc__home_part {
    enum pc__home_kind kind;
    uint64_t n_blocks;
    const uint8_t *bytes;          /* MEMORY */
    int memfd;                     /* MEMORY: has it at offset; or -1 */
    uint64_t offset;
};
struct pc__home_part pc__home_resolve(struct pc_engine *engine, struct pc__region *region,
                                      uint64_t version, uint64_t block, uint64_t n);
/* Whether what was resolved is what the version was. To be asked after resolving, still locked:
 * PC_OK, PC_ERR_NO_VERSION (none such, or not heard of yet) or PC_ERR_EXPIRED. */
int pc__home_knows(const struct pc_engine *engine, const struct pc__region *region,
                   uint64_t version);
/* One block of kind MIXED or HISTORY, composed. Needs no lock, while held. */
int pc__home_compose(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                     enum pc__home_kind kind, uint64_t block, uint8_t *out);

/* rebuild.c: a region gets another home. The homes change under region.lock; who reads them without it
 * may see the old one, and is told by the fetch. */
static inline uint64_t pc__home_of(const struct pc__region *region, uint64_t block)
{
    return __atomic_load_n(&region->homes[block / PC_EXTENT_BLOCKS], __ATOMIC_RELAXED);
}
/* Takes back what was prepared; owns fd. */
int pc__rebuild_adopt(struct pc_engine *engine, struct pc__region *region,
                      const struct pc__kept *kept, int fd);
/* Under region.lock, where there is no home: what was prepared is it from now on. */
int pc__rebuild_become_home(struct pc_engine *engine, struct pc__region *region);
/* The peer is lost. What waits in its lane goes to another home, or stays until NEED_HOME is answered;
 * what nobody can have any more goes to failed. */
void pc__rebuild_await(struct pc__loop *loop, struct pc__peer *peer, struct pc__lane *lane,
                       struct pc__link *failed);

/* layer.c */
/* Owns fd. owner: the client's id, or 0. */
int pc__layer_stage(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes,
                    int fd, uint64_t owner);
int pc__layer_adopt(struct pc_engine *engine, const struct pc__kept *kept, int fd);
int pc__layer_publish(struct pc_engine *engine, uint64_t region, uint64_t commit_id,
                      uint64_t version);
void pc__layer_drop_staged(struct pc_engine *engine, uint64_t region, uint64_t commit_id);
void pc__layers_orphan(struct pc_engine *engine, uint64_t client_id);
void pc__layers_forget(struct pc_engine *engine, uint64_t region);
struct pc__layer *pc__layer_get(struct pc_engine *engine, uint64_t layer_id); /* +1 ref, or NULL */
void pc__layer_put(struct pc__layer *layer);
void pc__layer_end(struct pc_engine *engine, struct pc__layer *layer); /* unkeeps, and puts */
uint64_t pc__layer_id(uint64_t region, uint64_t commit_id);
/* Position of the block among the layer's data, or UINT64_MAX; and how many blocks follow it. */
uint64_t pc__layer_find(const struct pc__layer *layer, uint64_t block, uint64_t *n);
/* The first block of the layer that is >= from, or limit. */
uint64_t pc__layer_next(const struct pc__layer *layer, uint64_t from, uint64_t limit);
void pc__pull_done(struct pc__pull *pull, int error); /* under the lock of its region */
uint64_t pc__layers_deadline(struct pc__loop *loop);
void pc__layers_check(struct pc__loop *loop, uint64_t now_ns);

/* apply.c */
#define PC__PENDING_MOST_BYTES (256ull << 20) /* published and not applied: writers wait beyond it */
int pc__worker_start(struct pc_engine *engine);
void pc__worker_stop(struct pc_engine *engine);
void pc__worker_free(struct pc_engine *engine);
void pc__worker_queue(struct pc_engine *engine, struct pc__region *region); /* region.lock is held */

/* fill.c: blocks become present, or are known not to come; whoever waits is told. */
int pc__fill_insert(struct pc_engine *engine, struct pc__region *region,
                    struct pc__generation *generation, uint64_t first, uint64_t n,
                    const uint8_t *bytes, bool fetched);
int pc__fill_zeros(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t first, uint64_t n);
void pc__fill_failed(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *generation, uint64_t first, uint64_t n,
                     uint64_t server_id, int error);
void pc__fill_answer_slot(const struct pc__generation *generation, const struct pc__waiter *waiter,
                          int status);

/* fault.c */
void pc__fault(struct pc__loop *loop, struct pc__client *client, uint64_t address, int slot);
void pc__fault_read_uffd(struct pc__loop *loop, struct pc__client *client);
void pc__fault_read_slots(struct pc__loop *loop, struct pc__client *client);
/* A mapping was attached again: who was stopped in it under the last server is taken up. */
void pc__fault_attached(struct pc__client *client, uint64_t address, uint64_t length_bytes);
void pc__fault_check_stray(struct pc__client *client, uint64_t now_ns);

/* batch.c */
/* Takes absent blocks of [first, first + n) that nobody is fetching yet, marks them in flight,
 * and asks their homes. Called with region.lock held; the requests go out in _submit, without. */
struct pc__batch {
    struct pc__link fetches;
    bool urgent, prefetch;
};
void pc__batch_init(struct pc__batch *batch, bool urgent, bool prefetch);
int pc__batch_add(struct pc__batch *batch, struct pc__region *region,
                  struct pc__generation *generation, uint64_t first, uint64_t n);
void pc__fetch_drop(struct pc_engine *engine, struct pc__fetch *fetch);
/* The rest of the fetch will not come. */
void pc__fetch_fail(struct pc_engine *engine, struct pc__fetch *fetch, int error);
/* The first n blocks of what is still to come are dealt with. */
void pc__fetch_advance(struct pc__fetch *fetch, uint64_t n);
/* Fills and drops a fetch whose blocks are on this node. */
void pc__fetch_fill_here(struct pc__loop *loop, struct pc__fetch *fetch);

/* fetch.c */
void pc__batch_submit(struct pc__loop *loop, struct pc__batch *batch);
/* A thread is stopped at a block that waits in a bulk queue of this loop: to the urgent one. */
void pc__fetch_hurry(struct pc__loop *loop, struct pc__region *region,
                     const struct pc__generation *generation, uint64_t block);
void pc__lane_event(struct pc__loop *loop, struct pc__peer *peer, int lane, uint32_t events);
void pc__peer_connected(struct pc__loop *loop, struct pc__mail *mail);
void pc__peer_is_lost(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__peers_deadline(struct pc__loop *loop); /* earliest, or UINT64_MAX */
void pc__peers_check(struct pc__loop *loop, uint64_t now_ns);
void pc__peers_close(struct pc__loop *loop);

/* cache.c: the node's budget. A block is accounted from when it becomes present in a generation that
 * is no home until it is punched or its generation ends. All of these do nothing without a budget. */
int pc__cache_open(struct pc_engine *engine, uint64_t cache_bytes, int policy);
int pc__cache_start(struct pc_engine *engine); /* the thread that evicts; stop: no thread evicts */
void pc__cache_stop(struct pc_engine *engine);
void pc__cache_close(struct pc_engine *engine);
uint64_t pc__cache_bytes(const struct pc_engine *engine); /* that are accounted */
/* How many holes a base may have that processes map as it is: the kernel allocates those they read. */
uint64_t pc__cache_most_holes(const struct pc_engine *engine);
/* How many blocks are inserted, or read ahead, at most at once. */
uint64_t pc__cache_most_blocks(const struct pc_engine *engine);
/* Without locks, by a thread that is about to insert n blocks of the region: evicts what is too much.
 * And when it has, or could not. */
void pc__cache_room(struct pc_engine *engine, const struct pc__region *region, uint64_t n);
void pc__cache_balance(struct pc_engine *engine, uint64_t n);
/* Under region.lock: blocks became present; a thread that was stopped at one of them may go on; they
 * were punched by somebody else; were used (a fault, a read set; the runs are sorted); the first
 * lease began, or the last one ended. */
void pc__cache_added(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *generation, uint64_t first, uint64_t n);
void pc__cache_awaited(struct pc_engine *engine, struct pc__generation *generation,
                       uint64_t block);
void pc__cache_removed(struct pc_engine *engine, struct pc__generation *generation, uint64_t first,
                       uint64_t n);
void pc__cache_touched(struct pc_engine *engine, struct pc__generation *generation,
                       const struct pc_run *runs, size_t n_runs);
void pc__cache_leased(struct pc_engine *engine, struct pc__generation *generation);
/* It ends. Under no lock but perhaps region.lock. */
void pc__cache_forget(struct pc_engine *engine, struct pc__generation *generation);

/* windows.c: what SIGSEGV processes have unprotected. Under region.lock. */
#define PC__CHUNK_BLOCKS (PC__CHUNK_BYTES / PC_BLOCK_BYTES) /* are evicted together */
struct pc__window_owner {          /* the control page of one process; unmapped with the last user */
    _Atomic uint32_t refs;
    struct pc__control_page *page;
    pid_t pid;
};
struct pc__window_user {
    struct pc__link link;          /* of the generation that it maps */
    struct pc__window_owner *owner; /* +1 ref */
    uint64_t address, length_bytes;
    bool is_orphan;                /* its connection is gone, and it is not */
};
struct pc__window_owner *pc__windows_owner(struct pc__control_page *page, pid_t pid);
void pc__windows_owner_put(struct pc__window_owner *owner); /* or NULL */
struct pc__window_user *pc__windows_add(struct pc__generation *generation,
                                        struct pc__window_owner *owner, uint64_t address,
                                        uint64_t length_bytes);
void pc__windows_drop(struct pc__window_user *user); /* or NULL: it has unmapped it */
/* Its connection ended: dropped, unless it may still read there. */
void pc__windows_left(struct pc__window_user *user);
/* Whether such a one reads there: the generation has to stay as it is. */
bool pc__windows_orphaned(struct pc__generation *generation);
void pc__windows_end(struct pc__generation *generation); /* it ends; needs no lock */
/* Tells them that the chunk goes; returns which of its blocks must stay. From then on until _release
 * nobody unprotects one of it without asking. */
uint32_t pc__windows_hold(struct pc__generation *generation, uint64_t chunk);
void pc__windows_release(struct pc__generation *generation);
/* How many runs a process may have unprotected under this budget; 0: no budget. */
uint32_t pc__windows_limit(uint64_t cache_bytes);

/* serve.c */
void pc__served_add(struct pc__loop *loop, struct pc__mail *mail);
void pc__served_event(struct pc__loop *loop, void *served, uint32_t events);
/* A version that requests waited for may be there. */
void pc__served_unpark(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__served_deadline(struct pc__loop *loop);
void pc__served_check(struct pc__loop *loop, uint64_t now_ns);
void pc__served_close_all(struct pc__loop *loop);

/* control.c */
void pc__client_accept(struct pc__loop *loop, int listen_fd);
void pc__client_event(struct pc__loop *loop, struct pc__client *client, uint32_t events);
void pc__client_retry_open(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__clients_deadline(struct pc__loop *loop);
void pc__clients_check(struct pc__loop *loop, uint64_t now_ns);
void pc__clients_close(struct pc__loop *loop);
/* Tells clients that map the region to close what they keep for the next who asks. Any thread. */
void pc__clients_let_go(struct pc_engine *engine, uint64_t region);
void pc__clients_ended(struct pc_engine *engine);
void pc__client_reply(struct pc__client *client, const struct pc__ctl_message *message, int status);

/* control_build.c: regions that are made here, and layers. */
void pc__client_create(struct pc__client *client, const struct pc__ctl_message *message);
void pc__client_seal(struct pc__client *client, const struct pc__ctl_message *message);
void pc__client_abandon(struct pc__client *client, const struct pc__ctl_message *message);
void pc__client_abandon_all(struct pc__client *client);
/* Takes fds[0] (sets it to -1). */
void pc__client_stage(struct pc__client *client, const struct pc__ctl_message *message, int *fds,
                      int n_fds);
void pc__client_resolve(struct pc__client *client, const struct pc__ctl_message *message);
/* Replies to a STAGE, or waits until the region's home, if it is here, has applied enough. */
void pc__client_staged(struct pc__client *client, uint32_t request_id, uint64_t region);
/* What the mapping wrote is the next version. Under region.lock. */
bool pc__mapping_follows(struct pc__mapping *mapping);
/* control_runs.c: prefetches and read sets. */
void pc__client_prefetch(struct pc__client *client, const struct pc__ctl_message *message);
void pc__client_reads(struct pc__client *client, const struct pc__ctl_message *message);
/* evicted.c: what goes while processes take read sets. note, free: under region.lock. */
struct pc__recorder;
void pc__recorders_note(struct pc__generation *generation, uint64_t chunk, uint32_t mask);
void pc__recorder_free(struct pc__recorder *recorder); /* or NULL */
void pc__client_evicted(struct pc__client *client, const struct pc__ctl_message *message);
/* gather.c */
void pc__client_gather(struct pc__client *client, const struct pc__ctl_message *message, int n_fds,
                       const int *fds);
/* The client is being closed, and its mappings are gone. */
void pc__client_gathers_end(struct pc__client *client);
/* Unmaps what no gather has used for a while. */
void pc__client_check_areas(struct pc__client *client, uint64_t now_ns);
/* The job of its blocks is done. Under region.lock. */
void pc__part_blocks_done(struct pc__part *part, int status);
void pc__rents_free(struct pc__rents *rents);
/* A fetch of rows: its request; its answer, as lane->rx has it (1: dealt with, 0: more is to come,
 * negative: nonsense), and where the next of it goes; its end without one. */
size_t pc__gather_request_bytes(const struct pc__fetch *fetch);
void pc__gather_encode(const struct pc__fetch *fetch, uint8_t *at);
int pc__gather_take(struct pc_engine *engine, struct pc__lane *lane, struct pc__fetch *fetch);
uint8_t *pc__gather_into(const struct pc__lane *lane, const struct pc__fetch *fetch);
void pc__gather_failed(struct pc_engine *engine, struct pc__fetch *fetch, int error);
/* Rows of a region that has its home here since they were asked for. */
void pc__gather_here(struct pc_engine *engine, struct pc__fetch *fetch);
uint64_t pc__gather_first_block(const struct pc__fetch *fetch);
/* rows.c: at the home. Status, or PC__WAIT: it has not heard of the version yet. */
int pc__rows_copy(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                  const struct pc__data_rows *rows, const uint64_t *offsets, uint8_t *out);
/* Room for an answer: memory that was used before costs no page faults. free: of all that is kept. */
uint8_t *pc__rows_take_buffer(struct pc__loop *loop);
void pc__rows_give_buffer(struct pc__loop *loop, uint8_t *buffer);
void pc__rows_free_buffers(struct pc__loop *loop);
/* One packet to the client; never blocks. Any thread that knows the client to be open may send. */
void pc__client_send(struct pc__client *client, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd);

/* loop.c */
int pc__loop_start(struct pc_engine *engine, struct pc__loop *loop, int index);
void pc__loop_join(struct pc__loop *loop); /* its thread ends; mail is taken, and not read */
void pc__loop_stop(struct pc__loop *loop); /* what is left of it */
struct pc__watch *pc__watch_add(struct pc__loop *loop, enum pc__watch_kind kind, int fd, int lane,
                                void *owner, uint32_t events);
void pc__watch_change(struct pc__loop *loop, struct pc__watch *watch, uint32_t events);
void pc__watch_remove(struct pc__loop *loop, struct pc__watch *watch);
int pc__loop_post(struct pc__loop *loop, const struct pc__mail *mail);
uint64_t pc__now_ns(void);

/* engine.c */
/* False: it is lost, for want of memory (questions) or of a reader (log lines). */
bool pc__engine_event(struct pc_engine *engine, int kind, int error, uint64_t region,
                      uint64_t server_id, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
/* Questions about versions. */
bool pc__engine_ask(struct pc_engine *engine, const struct pc_event *event);

/* client record, shared by control.c and fault.c */
struct pc__mapping {
    uint64_t id, address, length_bytes, version;
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref */
    struct pc__window_user *window_user; /* SIGSEGV, where blocks can be evicted; or NULL */
    bool is_private;
    bool follows;                  /* counted among its followers, while that is at version */
    bool exact_reads;              /* its read sets show what was touched, and not what lies around */
    unsigned page_shift;           /* asked for: log2 of the bytes that a fault fetches; 0: by use */
    struct pc__recorder *recorder; /* of what is evicted while it takes a read set, or NULL */
    struct pc__streams streams;
};
struct pc__client {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t id;
    int fd;
    struct pc__watch *watch, *trap_watch;
    bool said_hello, closed;
    uint64_t hello_by_ns;          /* until it has said hello */
    uint64_t stray_address;        /* a fault that came before its mapping was attached again, */
    uint64_t stray_by_ns;          /* and until when that must have happened; 0: none */
    unsigned creating;             /* regions it made and has not sealed */
    bool stages;                   /* layers */
    int trap;                      /* enum pc_trap */
    int uffd;                      /* or -1 */
    int slots_event;               /* or -1 */
    struct pc__control_page *page; /* or NULL */
    struct pc__link gathers, areas; /* struct pc__part, pc__area (gather.c) */
    uint64_t areas_by_ns;          /* when to look for areas that are not used; 0: there are none */
    struct pc__window_owner *window_owner; /* of the page */
    struct pc__mapping *mappings;  /* sorted by address */
    size_t n_mappings, mappings_capacity;
    unsigned n_opening;            /* OPENs that wait for Python or the worker, at most */
    uint64_t *given_up;            /* mappings among those whose CLOSE has come already */
    size_t n_given_up, given_up_capacity;
    struct pc__client *grave_next;
};
struct pc__mapping *pc__client_mapping_at(struct pc__client *client, uint64_t address);
struct pc__mapping *pc__client_mapping(struct pc__client *client, uint64_t id);

#endif
