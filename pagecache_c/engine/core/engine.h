/* engine.h - the page server's engine: its parts, their owners, and which lock covers what.
 *
 * Here is what all rooms share. Calls and includes go down this list, and within a room, never up
 * (tests/support/house/c_rooms.py): where a room has to tell a higher one, it is handed a function
 * (struct pc__observers). A room of the engine has one header for the others; core has besides it this
 * one, threads.h and records.h, and cache has policy.h, of a part that is pure.
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
#include "common/list.h"
#include "common/wire.h"
#include "engine/core/threads.h"
#include "history/history.h"
#include "os/file_id.h"
#include "os/huge_pages.h"
#include "os/local_socket.h"
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
struct pc__noted;
struct pc__peer;
struct pc__region;

struct pc__counters {
    _Atomic uint64_t mappings, clients, served_connections, peer_connections;
    _Atomic uint64_t leases_at_stop; /* that connections had when their loop ended */
    _Atomic uint64_t faults, faults_failed, faults_waiting;
    _Atomic uint64_t fault_wait_ns; /* of those that wait no more */
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

/* file_reads.c: ranges of files that are to be read. All of it under lock, which nests inside all. */
struct pc__files {
    pthread_mutex_t lock;
    struct pc__link urgent, bulk, taken;
    uint64_t last_id, n_taken;
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
#define PC__FILE_CAUSES 16
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
    } unreached[PC__UNREACHED];    /* servers (causes.c) */
    unsigned next_unreached;
    struct pc__file_cause {
        uint64_t region;           /* 0: none */
        char text[232];            /* why the last range that failed of its file did */
    } file_causes[PC__FILE_CAUSES]; /* causes.c */
    unsigned next_file_cause;
    pthread_mutex_t event_lock;    /* unreached, file_causes, and the ring below; nests inside all */
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
