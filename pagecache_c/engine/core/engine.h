/* engine.h - the page server's engine: its parts, their owners, and which lock covers what.
 *
 * Here is what all rooms share. Calls and includes go down this list, and within a room, never up
 * (tests/support/house/c_rooms.py): where a room has to tell a higher one, it is handed a function
 * (struct pc__observers). A room of the engine has one header for the others; core has besides it this
 * one, records.h and process.h, and cache has policy.h, of a part that is pure.
 *   engine.c, loop.c   start and stop; hands each event to the owner of its descriptor
 *   local/    local.h  processes of this node: their sessions, mappings and leases
 *   serve/    serve.h  other servers that ask us
 *   repair/   repair.h blocks from others of a region's group, where its home is lost or late
 *   readahead/ readahead.h  how much a fault fetches: pure
 *   miss/     miss.h   absent blocks: faults, readahead, fetches from other servers
 *   store/    store.h  generations, homes, layers, and how a version becomes the base
 *   cache/    cache.h  the budget, and what is evicted
 *   checks/   checks.h checksums of homes that come from an earlier session
 *   core/     core.h   the records, and what changes one of them and needs no other room
 *   keeper/            what outlives this process: told by core/kept.c, knows nothing of the engine
 *
 *   loop        one thread, one epoll. Owns the sessions, peers and served connections that were
 *               given to it; no other thread touches those. n_loops of them.
 *   session     one client of a process of this node: its control socket, its trap, its mappings.
 *   lessee      the same, over all connections that it makes (leases.c).
 *   region      what Python told us of a region, its home (if its blocks live here), and its
 *               generations (the memfds that processes of this node map, one a version).
 *   layer       the blocks of one commit on one region: staged, then published, then applied.
 *   worker      one thread: applies published layers to homes.
 *   peer        this loop's connections to one other server, and the fetches that wait for it.
 *   served      a connection on which another server asks us.
 *
 * Locks: ARCHITECTURE.md ("Locks") has their order and what each covers. Under region.lock there is
 * never file or network I/O, with two exceptions: a lease that needs a new generation makes its
 * memfd, and a lease that advances a generation punches its holes.
 * An eviction takes a victim under the cache's lock, with references, drops that lock, takes the lock
 * of the victim's region, and looks again.
 * A waiter or job in a region belongs to a session of some loop; the session takes all of its own
 * out, under region.lock, before it closes a descriptor. So a thread that holds region.lock may use the
 * descriptors of the waiters that it finds there.
 */
#ifndef PC_ENGINE_H
#define PC_ENGINE_H

#include "common/atomics.h"
#include "common/blockset.h"
#include "common/error.h"
#include "common/file_id.h"
#include "common/huge_pages.h"
#include "common/list.h"
#include "common/local_socket.h"
#include "common/wire.h"
#include "history/history.h"
#include "pagecache.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

struct pc__cache;
struct pc__disk_cache;
struct pc__fetch;
struct pc__generation;
struct pc__history;
struct pc__home;
struct pc__keeping;
struct pc__loop;
struct pc__noted;
struct pc__parts;
struct pc__peer;
struct pc__region;
struct pc__repairs;

#define PC__LANES_PER_LOOP 2 /* connections to a peer: one for urgent fetches, one for bulk */

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
#define PC__BOUNCE_BLOCKS 64u /* of a loop: are on their way through its memory at once */
struct pc__loop {
    struct pc_engine *engine;
    int index;
    int epoll;
    int mail_event;
    struct pc__watch *mail_watch, *listen_watch; /* listen: of loop 0 */
    uint64_t accept_again_ns;      /* not 0: no descriptors were left, so it does not listen now */
    bool accept_fails;             /* since the last that was accepted; logged once */
    pthread_t thread;
    bool started;
    pthread_mutex_t mail_lock;     /* mail_head, mail_tail; nests inside everything */
    struct pc__mail *mail_head, *mail_tail;
    bool stopping;
    struct pc__link sessions, peers, served;
    struct pc__watch *graves;
    uint8_t *bounce;               /* PC__BOUNCE_BLOCKS, once needed */
    struct pc__parts *parts;       /* of the reply that is being put together (reply.c) */
    uint32_t next_request_id;
    struct pc__repairs *repairs;   /* fetches that others may help (repair.c); NULL: none yet */
    void *plan;                    /* scratch of gather.c, once needed */
    uint8_t *row_buffers[PC__ROW_BUFFERS]; /* of answers that were sent (rows.c), or NULL */
};

struct pc__counters {
    _Atomic uint64_t mappings, clients, served_connections, peer_connections;
    _Atomic uint64_t leases_at_stop; /* that connections had when their loop ended */
    _Atomic uint64_t faults, faults_failed, faults_waiting;
    _Atomic uint64_t fetch_requests, fetch_retries, fetch_failed, fetches_in_flight;
    _Atomic uint64_t blocks_fetched, bytes_received, bytes_sent, blocks_served;
    _Atomic uint64_t zero_blocks, local_blocks, prefetch_requests, prefetched_blocks;
    _Atomic uint64_t bad_messages, reattached, advances, forks;
    _Atomic uint64_t layers, layer_bytes, retained_layers, retained_bytes;
    _Atomic uint64_t redirected_blocks, redirect_misses, peer_blocks_served, peer_blocks_fetched;
    _Atomic uint64_t evicted_blocks, refetched_blocks, rows_served, rows_fetched, opens;
    _Atomic uint64_t disk_cache_writes, disk_cache_reads; /* blocks */
    _Atomic uint64_t file_reads, file_blocks;
    _Atomic uint64_t damaged_blocks; /* that did not have their checksum */
    _Atomic uint64_t degraded_blocks, mirror_blocks, hedges, hedges_won;
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
    struct pc__link later;         /* regions that failed, by retry_at_ns; each with a reference */
    struct pc__link errands;       /* struct pc__errand: what only this thread may do, for others; */
    pthread_cond_t ran;            /* they wait for that */
};

/* disk_jobs.c: what is read from files on disk, and written to them, in threads of their own. */
enum pc__disk_rank { PC__DISK_WRITE, PC__DISK_READ, PC__DISK_URGENT, PC__DISK_RANKS };
#define PC__DISK_THREADS 4u
#define PC__DISK_JOB_BYTES (64u << 10)
struct pc__disk_job {
    struct pc__link link;          /* of those that wait for a thread */
    struct pc__link all;           /* of those that somebody waits for, until they have been run */
    uint64_t late_ns;              /* then `late` is called; 0: it is not, or was */
    /* Once. some: PC__DISK_JOB_BYTES, for direct reads too; NULL: the engine stops. */
    void (*run)(struct pc__disk_job *job, uint8_t *some);
    /* Or NULL. Under the lock, perhaps while it runs: nobody is to wait for it any more. False: it gets on. */
    bool (*late)(struct pc__disk_job *job);
};
struct pc__disk_jobs {
    pthread_mutex_t lock;          /* all of it; posts mail, and else is a leaf */
    pthread_cond_t wake;
    pthread_t threads[PC__DISK_THREADS];
    uint8_t *buffers[PC__DISK_THREADS];
    unsigned n_threads, n_idle;
    bool stopping;
    struct pc__link waiting[PC__DISK_RANKS]; /* struct pc__disk_job, the oldest first */
    struct pc__link reads;         /* all that are not run yet and have `late`, the oldest first */
    _Atomic uint64_t n_reads;      /* of those */
};

#define PC__FILE_CAUSES 16
/* file_reads.c: ranges of files that are to be read. All of it under lock, which nests inside all. */
struct pc__files {
    pthread_mutex_t lock;
    struct pc__link urgent, bulk, taken;
    uint64_t last_id, n_taken;
    struct pc__file_cause {
        uint64_t region;           /* 0: none */
        char text[232];            /* why its last range that failed did */
    } causes[PC__FILE_CAUSES];
    unsigned next_cause;
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
    bool of_disk;                    /* some of it lies on disk */
    bool logged_left;                /* that some could not be looked at, or ended */
    _Atomic bool stopping;
};

/* What lower rooms tell higher ones. Set by engine.c before any thread begins. */
struct pc__observers {
    void (*region_ended)(struct pc_engine *engine, struct pc__region *region); /* its last reference */
    void (*home_ended)(struct pc__home *home);
    void (*generation_ended)(struct pc_engine *engine, struct pc__generation *generation);
    /* Under region.lock, where its home is here: a commit, which is `version`, changes them. */
    void (*blocks_changed)(struct pc__region *region, uint32_t version, uint64_t first, uint64_t n);
    /* A version that requests of other servers wait for may be there: a mail to each loop. */
    void (*version_came)(struct pc__loop *loop, struct pc__mail *mail);
    /* Regions have other homes: a mail to each loop. a: the region; b: where error is meant, the server
     * that was its home. */
    void (*homes_changed)(struct pc__loop *loop, struct pc__mail *mail);
    /* Fetches of regions that have_repair, on their loop (repair.h). True: another server is asked. */
    bool (*fetch_asked)(struct pc__loop *loop, struct pc__fetch *fetch);
    void (*block_hurried)(struct pc__loop *loop, const struct pc__generation *generation, uint64_t block);
    void (*fetch_stranded)(struct pc__loop *loop, struct pc__fetch *fetch); /* it has no home for now */
    bool (*fetch_lost)(struct pc__loop *loop, struct pc__fetch *fetch); /* its home lives, and has lost its blocks */
    void (*fetch_ended)(struct pc__fetch *fetch);
    /* A home frees a region; what is answered is put at answer, and its bytes are returned. */
    size_t (*home_retires)(struct pc__peer *peer, const struct pc__data_header *header, uint8_t *answer);
};

#define PC__REGION_BUCKETS 4096
#define PC__MAX_LOOPS 8
#define PC__LOG_EVENTS 1024
#define PC__LISTEN_BACKLOG 512

#define PC__UNREACHED 32
struct pc_engine {
    struct pc__observers observers;
    pthread_mutex_t lock;
    uint64_t server_id;
    char socket_name[PC__SOCKET_NAME_BYTES];
    char library_version[48];
    char *disk_directory;          /* for homes on disk; NULL: none are made here */
    bool durable;                  /* homes outlive the session: on disk, and deltas wait (parity.c) */
    bool cold;                     /* nobody maps what is adopted */
    char *sums_directory;          /* of the checksums of homes of an earlier session; NULL: there are none */
    uint64_t fetch_timeout_ns, fault_timeout_ns;
    _Atomic uint64_t hedge_least_ns; /* PC__HEDGE_LEAST_NS; tests set it */
    unsigned page_shift;           /* log2 of the bytes that a fault fetches; 0: by use (readahead.c) */
    int replication;               /* enum pc_replication */
    _Atomic uint64_t serving_bytes; /* of replies that are queued for other servers */
    struct pc__holders holders;
    struct pc__cache *cache;       /* what counts and evicts cached blocks (cache.c); NULL: no budget */
    struct pc__disk_cache *disk_cache; /* what has blocks that were evicted (disk_cache.c); NULL: none */
    uint32_t window_limit;         /* of SIGSEGV processes, in runs; 0: as many as there are */
    struct pc__keeping *keeping;   /* what the keeper has; its lock nests inside all. NULL: none */
    int listen_fd;                 /* these four: of loop 0, once it runs (listening.c) */
    struct pc__local_file listen_file;
    uint64_t look_at_ns;           /* 0: not yet */
    bool look_fails;               /* since it was found last; logged once */
    int event_fd;
    int uffd;                      /* inserts go through it; -1: pwrite, */
    struct pc__huge_pages_files setting; /* what makes huge pages; none where it cannot be held open */
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
        uint64_t region;              /* not 0: of this alone: it answers that it does not know it, */
        uint64_t said_ns;             /* the last time */
        bool is_lost;                 /* for good, as the registry says */
        char cause[120];
    } unreached[PC__UNREACHED];    /* servers (unreached.c) */
    unsigned next_unreached;
    pthread_mutex_t event_lock;    /* unreached, and the ring below; nests inside all */
    struct pc_event *events;       /* ring of events_capacity */
    size_t events_capacity, events_begin, n_events;
    uint64_t next_session_id;
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
    pthread_mutex_t publish_lock;  /* one publish, drop or repeated stage at a time: the keeper
                                      hears of a layer's version before of its end. Outermost */
    uint64_t stage_timeout_ns;
    struct pc__history *history;
    struct pc__worker worker;
    struct pc__disk_jobs disk_jobs;
    struct pc__files files;
    struct pc__leases leases;
    struct pc__counters count;
};

#endif
