/* engine.h - the page server's engine: its parts, who owns them, and which lock covers what.
 *
 *   loop        one thread, one epoll. Owns the clients, peers and served connections that were
 *               given to it; nobody else touches those. n_loops of them.
 *   client      one process of this node: its control socket, its trap, its mappings.
 *   lessee      the same, over all connections that it makes (leases.c).
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
 *   leaves        event_lock, keeping.lock, worker.lock, leases.lock, the cache's, the history's and
 *                 each loop's mail_lock: nothing is taken under them. (The cache's window_lock is between
 *                 region.lock and the leaves.)
 * Who evicts takes a victim under the cache's lock, with references, drops that lock, takes the lock
 * of the victim's region, and looks again.
 * A waiter or job in a region belongs to a client of some loop; the client takes all of its own
 * out, under region.lock, before it closes a descriptor. So whoever holds region.lock may use the
 * descriptors of the waiters it finds there.
 */
#ifndef PC_ENGINE_H
#define PC_ENGINE_H

#include "common/atomics.h"
#include "common/blockset.h"
#include "common/error.h"
#include "history/history.h"
#include "common/huge_pages.h"
#include "engine/store/keeper.h"
#include "engine/store/keeping.h"
#include "common/list.h"
#include "common/local_socket.h"
#include "engine/miss/readahead.h"
#include "pagecache.h"
#include "engine/local/process.h"
#include "common/wire.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

struct pc__loop;
struct pc__session;
struct pc__region;
struct pc__session_map;
struct pc__pull;
struct pc__part;
struct pc__gather;
struct pc__rents;
struct pc__lease;
struct pc__lost;

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
    struct pc__lost *lost;         /* blocks of a base that was rebuilt that nobody had, or NULL (lost.h) */
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
    uint64_t owner;                /* staged: pc__layer_owner of who it came from, or 0 */
    uint64_t ask_at_ns;            /* staged: when to ask what became of it */
    bool settled;                  /* retained: its homes have acknowledged it */
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
    bool built_in_place;           /* its builder maps the base, as it was when it was sealed */
    bool is_mapped;                /* the base of its home is a generation, also for the next server */
    uint64_t open_holes;           /* of it, that count in the engine's */
    struct pc__home *home;
    struct pc__home *prepared;     /* to be the home once the registry has it so (rebuild.c); or NULL */
    bool prepared_sealed;          /* all of it is there */
    struct pc__readahead *pages;       /* how much a fault fetches, once there was one; or NULL */
    struct pc__link generations;
    uint64_t mappings;
    struct pc__changes changes;    /* the last answer */
    struct pc__link pending;       /* struct pc__pending: OPENs that wait for Python or the worker */
    uint32_t loss;                 /* the number of the loss of some of its blocks; 0: none is lost */
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
    struct pc__session *client;
    uint64_t mapping_id;
    uint64_t mapping_address;
    uint64_t block;
    int slot;                      /* SIGSEGV: its slot; uffd: -1 */
};

/* A prefetch that somebody waits for: done when none of its blocks is absent. */
struct pc__job {
    struct pc__link link;
    struct pc__session *client;     /* NULL: a layer is pulled */
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
    bool waits_for_room;           /* epoll says when the socket takes more of it */
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

/* leases.c: what outlives its connection. All of it under lock, which nests inside all. */
struct pc__leases {
    pthread_mutex_t lock;
    struct pc__link lessees;
    uint64_t next_serial;
};

/* settle.c: after a restart. Written before the loops begin; then `started` by loop 0, the rest by the
 * thread that it starts. */
struct pc__settling {
    struct pc__noted *noted;       /* what was adopted and processes may map, by inode */
    size_t n_noted, capacity;
    uint64_t settle_ns, began_ns, began_ticks;
    uint64_t try_again_ns;         /* no thread could be had: loop 0 */
    pthread_t thread;
    bool started;
    bool said_left;                /* that some could not be looked at, or ended */
    _Atomic bool stopping;
};

#define PC__REGION_BUCKETS 4096
#define PC__MAX_LOOPS 8
#define PC__LOG_EVENTS 1024

#define PC__UNREACHED 16
struct pc_engine {
    pthread_mutex_t lock;
    uint64_t server_id;
    char socket_name[PC__SOCKET_NAME_BYTES];
    char library_version[48];
    uint64_t fetch_timeout_ns, fault_timeout_ns;
    unsigned page_shift;           /* log2 of the bytes that a fault fetches; 0: by use (readahead.c) */
    int replication;               /* enum pc_replication */
    _Atomic uint64_t serving_bytes; /* of replies that are queued for other servers */
    struct pc__holders holders;
    struct pc__cache *cache;       /* what counts and evicts cached blocks (cache.c); NULL: no budget */
    uint32_t window_limit;         /* of SIGSEGV processes, in runs; 0: as many as there are */
    struct pc__keeping *keeping;   /* what the keeper has; its lock nests inside all. NULL: none */
    int listen_fd;
    int event_fd;
    int uffd;                      /* inserts go through it; -1: pwrite, */
    struct pc__huge_pages_files setting; /* after a look at these */
    _Atomic uint64_t open_holes;   /* of bases that processes map, where reading allocates them: blocks */
    _Atomic bool huge_pages;       /* shared memory was made of them once: replies are copied */
    _Atomic uint64_t settle_until_ns; /* 0: clients have had the time to attach again */
    struct pc__settling settling;
    int n_loops;
    struct pc__loop loops[PC__MAX_LOOPS];
    struct pc__region *regions[PC__REGION_BUCKETS];
    uint64_t n_regions;
    struct pc__unreached {
        uint64_t server_id, since_ns; /* 0: none */
        bool is_lost;                 /* for good, as the registry says */
        char cause[120];
    } unreached[PC__UNREACHED];    /* servers (unreached.c) */
    unsigned next_unreached;
    pthread_mutex_t event_lock;    /* unreached, and the ring below; nests inside all */
    struct pc_event *events;       /* ring of events_capacity */
    size_t events_capacity, events_begin, n_events;
    uint64_t next_client_id;
    unsigned next_loop;
    struct pc__retiring {
        pthread_mutex_t lock;      /* a leaf */
        struct pc__link waiting;   /* frees that wait for other servers, the oldest first (retire.c) */
        unsigned n;
        uint32_t last_id;
    } retiring;
    struct pc__link staged;        /* struct pc__layer; engine.lock */
    struct pc__link retained;      /* the same, the oldest first (retained.c) */
    uint64_t retained_most_bytes, settled_layers, settled_bytes; /* of retained; engine.lock */
    uint64_t ask_settled_at_ns;    /* or UINT64_MAX; engine.lock */
    pthread_mutex_t publish_lock;  /* one publish or drop at a time: the keeper hears of a layer's
                                      version before of its end. Outermost */
    uint64_t stage_timeout_ns;
    struct pc__history *history;
    struct pc__worker worker;
    struct pc__leases leases;
    struct pc__counters count;
};

/* --------------------------------------------------------------- clients */

struct pc__session_map {
    uint64_t id, address, length_bytes, version;
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref */
    struct pc__lease *lease;       /* room for it as an orphan, should it become one */
    struct pc__window_user *window_user; /* SIGSEGV, where blocks can be evicted; or NULL */
    bool is_private;
    bool follows;                  /* counted among its followers, while that is at version */
    bool exact_reads;              /* its read sets show what was touched, and not what lies around */
    unsigned page_shift;           /* asked for: log2 of the bytes that a fault fetches; 0: by use */
    struct pc__recorder *recorder; /* of what is evicted while it takes a read set, or NULL */
    struct pc__streams streams;
};
struct pc__session {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t id;
    int fd;
    struct pc__watch *watch, *trap_watch;
    bool said_hello, closed;
    bool left;                     /* it has said that it maps nothing any more */
    struct pc__lessee *lessee;     /* or NULL: it will not come back */
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
    struct pc__session_map *mappings;  /* sorted by address */
    size_t n_mappings, mappings_capacity;
    unsigned n_opening;            /* OPENs that wait for Python or the worker, at most */
    uint64_t *given_up;            /* mappings among those whose CLOSE has come already */
    size_t n_given_up, given_up_capacity;
    struct pc__session *grave_next;
};

/* A client of a process over all of its connections. leases.lock; number and process never change. */
struct pc__lessee {
    struct pc__link link;          /* of the engine */
    uint64_t number;
    struct pc__process process;
    unsigned connections, looks;   /* that are open; threads that are at it */
    uint64_t attached_id;          /* the newest connection that has all of its leases */
    _Atomic bool stages;           /* layers, on one of its connections */
    struct pc__link orphans;       /* struct pc__lease, by serial */
    uint64_t look_at_ns, maps_at_ns, maps_pause_ns;
};

/* Of a connection that has ended, while its process may still read the memory. */
struct pc__lease {
    struct pc__link link;          /* of the lessee */
    uint64_t serial, client_id;
    uint64_t address, length_bytes, version;
    bool follows;                  /* as of the mapping */
    bool was_mapped;               /* the process's page tables showed it */
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref */
};

#include "engine/engine_calls.h"

#endif
