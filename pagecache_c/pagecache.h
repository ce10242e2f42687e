/* pagecache.h - the only public header of the page cache.
 *
 * Two halves share one wire (wire.h):
 *   client  lives in every process that reads or builds global variables;
 *   engine  lives in the page server, one per node.
 *
 * Words (docs/design.md has the long form):
 *   block       4 KiB, the unit of presence.
 *   page        a run of blocks fetched by one request; a policy, never a format.
 *   region      a contiguous range of the global address space, the same in every process.
 *   version     a region's state after its n-th commit.
 *   generation  one node's memfd that holds one version of one region; a hole is an absent
 *               block, except at the home, where a hole is a block of zeros.
 *   home        the server that holds the authoritative copy of an extent of a region.
 *   peer        a server that holds cached blocks of extents homed elsewhere.
 *   mapping     one process's map of one generation; it is that process's lease.
 *
 * Every function returns 0 or a count on success and a negative enum pc_err on failure.
 * Every call that waits takes a timeout in nanoseconds. All calls are thread-safe.
 *
 * Lines between the two cdef marks are read by cffi as they stand: declarations only.
 */
#ifndef PAGECACHE_H
#define PAGECACHE_H

#include <stdint.h>
#include <stddef.h>

/* cdef-begin */

enum pc_err {
    PC_OK = 0,
    PC_ERR_SYSTEM = -1,        /* a system call failed; errno and pc_last_message() say which */
    PC_ERR_NO_MEMORY = -2,
    PC_ERR_TIMEOUT = -3,
    PC_ERR_NO_SERVER = -4,     /* the node's page server does not answer */
    PC_ERR_VERSION_MISMATCH = -5, /* client and server are different builds */
    PC_ERR_NO_REGION = -6,     /* never made, or freed */
    PC_ERR_HOME_LOST = -7,     /* the home is gone and nobody else has the block */
    PC_ERR_CLASH = -8,         /* something else is mapped where the region must be */
    PC_ERR_PROTOCOL = -9,      /* the other side sent nonsense */
    PC_ERR_RANGE = -10,        /* blocks outside the region */
    PC_ERR_NO_TRAP = -11,      /* the kernel refuses the trap that was asked for */
    PC_ERR_EXISTS = -12,
    PC_ERR_CLOSED = -13,       /* the handle was shut down */
    PC_ERR_DESCRIPTORS = -14,  /* out of file descriptors */
    PC_ERR_FORKED = -15,       /* this handle belongs to the parent process */
    PC_ERR_NO_GENERATION = -16,/* a restarted server does not hold the memfd this process maps */
    PC_ERR_NO_PEER = -17,      /* no connection to the peer (yet) */
    PC_ERR_DENIED = -18,       /* peer credentials or secret are wrong */
    PC_ERR_HUGE_PAGES = -19,   /* the kernel makes shared memory of huge pages, and has no userfaultfd */
    PC_ERR_LAST = -20
};

/* One line for humans; never NULL, also for codes that do not exist. */
const char *pc_strerror(int err);
/* Detail of this thread's last failure: which call, path or address. Never NULL. */
const char *pc_last_message(void);

/* A run of blocks, relative to the region's start. */
struct pc_run {
    uint64_t first_block;
    uint64_t n_blocks;
};

/* ------------------------------------------------------------------ client */

enum pc_trap {
    PC_TRAP_AUTO = 0,          /* /dev/userfaultfd, userfaultfd(2), USER_MODE_ONLY, SIGSEGV */
    PC_TRAP_UFFD = 1,          /* userfaultfd, whichever form works */
    PC_TRAP_UFFD_FULL = 2,     /* in force: system calls on absent blocks work */
    PC_TRAP_UFFD_USER = 3,     /* in force: system calls on absent blocks give EFAULT */
    PC_TRAP_SIGSEGV = 4        /* in force or asked for: system calls give EFAULT */
};

typedef struct pc_client pc_client;

struct pc_client_options {
    const char *socket_name;   /* abstract Unix socket of the node's page server, no leading NUL */
    const char *library_version;
    int trap;                  /* enum pc_trap */
    uint64_t connect_timeout_ns;
    uint64_t reattach_timeout_ns; /* how long blocked threads wait for a restarted server */
};

/* Connects, says hello, probes the trap, starts the watch thread. *out is NULL on failure. */
int pc_client_open(const struct pc_client_options *options, pc_client **out);
/* Every call from here on, and those that wait, end with PC_ERR_CLOSED. Frees nothing. */
int pc_client_shut(pc_client *client);
/* Shuts it, waits until the threads that are in a call have left, unmaps everything and joins the
 * watch thread. Addresses of its mappings die with it. No call may begin after this has. */
int pc_client_close(pc_client *client);
/* The trap in force: PC_TRAP_UFFD_FULL, PC_TRAP_UFFD_USER or PC_TRAP_SIGSEGV. */
int pc_client_trap(pc_client *client);
/* In a child of fork: connects anew, maps and arms every mapping of the parent at its address.
 * Mappings that cannot be had are left as guards: touching one ends the process with a message. */
int pc_client_after_fork(pc_client *client);

enum pc_map_flags {
    PC_MAP_PRIVATE = 1,        /* copy-on-write, writable, at any free address */
    PC_MAP_EXACT_READS = 2     /* no kernel fault-around: exact read sets, dearer first touches */
};

struct pc_mapping {
    uint64_t id;               /* for the calls below */
    uint64_t address;
    uint64_t length_bytes;
};

/* Maps a region at its own address (or anywhere, PRIVATE). The lease lasts until pc_client_unmap.
 * Several maps of the same (region, version) share one mapping by count; who asks for EXACT_READS
 * where a mapping without them is shared gets that one, whose read sets are supersets. */
int pc_client_map(pc_client *client, uint64_t region, uint64_t version, uint64_t base_address,
                  uint64_t length_bytes, uint32_t flags, uint64_t timeout_ns,
                  struct pc_mapping *out);
int pc_client_unmap(pc_client *client, uint64_t mapping_id);

/* Makes the home of a new region on this node: *fd is its memfd, to be filled with pc_copy_in
 * and closed by the caller. Nobody can map the region before pc_client_seal. */
int pc_client_create(pc_client *client, uint64_t region, uint64_t base_address,
                     uint64_t length_bytes, uint64_t timeout_ns, int *fd);
int pc_client_seal(pc_client *client, uint64_t region, uint64_t timeout_ns);
/* Drops a region that was created here and not sealed. */
int pc_client_abandon(pc_client *client, uint64_t region, uint64_t timeout_ns);
/* Copies into a memfd with up to n_threads threads. Reads the source straight: no extra copy. */
int pc_copy_in(int fd, uint64_t offset_bytes, const void *source, uint64_t n_bytes, int n_threads);

/* Fetches the absent blocks among the runs in as few round trips as their number allows.
 * wait = 0 returns when the server has taken the request. */
int pc_client_prefetch(pc_client *client, uint64_t mapping_id, const struct pc_run *runs,
                       size_t n_runs, int wait, uint64_t timeout_ns);

/* Read sets: drop this process's page-table entries, run, then list what is mapped again.
 * Returns the number of runs (which may exceed capacity: then call again with room). Each begin
 * that succeeded has one end; runs = NULL ends without a look. Calls may overlap: while another
 * one runs nothing is dropped, so that each set holds at least what its call touched. */
int pc_client_reads_begin(pc_client *client, uint64_t mapping_id);
int64_t pc_client_reads_end(pc_client *client, uint64_t mapping_id, struct pc_run *runs,
                            size_t capacity);
/* Tells the page server what was read, for its statistics. Sends, does not wait. */
int pc_client_report_reads(pc_client *client, uint64_t mapping_id, const struct pc_run *runs,
                           size_t n_runs);

/* ------------------------------------------------------------------ engine */

typedef struct pc_engine pc_engine;

struct pc_engine_options {
    const char *socket_name;   /* abstract Unix socket to listen on */
    const char *library_version;
    uint64_t server_id;        /* this server; never 0; the same after a restart */
    int keeper_fd;             /* the caller's, from pc_keeper_connect, or -1 for none */
    int n_loops;               /* 0: chosen from the number of cores */
    uint64_t fetch_timeout_ns; /* one request to one peer */
    uint64_t fault_timeout_ns; /* all tries of one block */
    uint64_t settle_ns;        /* after a restart: how long clients have to attach again before a
                                  retired region without leases counts as idle */
    int no_userfaultfd;        /* 1: do as where the kernel refuses it (tests) */
    uint64_t page_bytes;       /* fixed size of a demand fetch, 4 KiB to 8 MiB; 0: by access pattern */
};

/* Takes back what the keeper holds, then listens. */
int pc_engine_start(const struct pc_engine_options *options, pc_engine **out);
int pc_engine_stop(pc_engine *engine);

/* Things that only Python can decide. The descriptor is readable while there are events. */
enum pc_event_kind {
    PC_EVENT_NONE = 0,
    PC_EVENT_NEED_REGION = 1,  /* region: look it up; answer with pc_engine_define_region or _refuse_region */
    PC_EVENT_NEED_PEER = 2,    /* server_id: connect; answer with pc_engine_add_peer or pc_engine_peer_lost */
    PC_EVENT_REGION_IDLE = 3,  /* region: retired here, and the last lease on this node is gone */
    PC_EVENT_LOG = 4           /* text: something a person may want to know */
};
struct pc_event {
    int kind;
    int error;                 /* enum pc_err, where it applies */
    uint64_t region;
    uint64_t server_id;
    char text[232];
};
int pc_engine_event_fd(pc_engine *engine);
/* 1 and *out filled, or 0 when there is none. */
int pc_engine_next_event(pc_engine *engine, struct pc_event *out);

struct pc_region_info {
    uint64_t region;
    uint64_t version;
    uint64_t base_address;
    uint64_t length_bytes;
};
/* homes[i] is the server id of 64 MiB extent i; n_homes = ceil(length / 64 MiB).
 * PC_ERR_HOME_LOST: some are homed here, and a restart could not bring them back. */
int pc_engine_define_region(pc_engine *engine, const struct pc_region_info *info,
                            const uint64_t *homes, size_t n_homes);
int pc_engine_refuse_region(pc_engine *engine, uint64_t region, int error);

/* A region whose home bytes lie in memory that the caller keeps alive (a Ray object):
 * [offset, offset + length) of the region is at address. Everything else of it is what was
 * written to *fd, which the caller fills with pc_copy_in and closes before pc_engine_seal. */
struct pc_segment {
    uint64_t offset_bytes;
    uint64_t length_bytes;
    uint64_t address;
};
int pc_engine_create_shared(pc_engine *engine, const struct pc_region_info *info,
                            const struct pc_segment *segments, size_t n_segments, int *fd);
int pc_engine_seal(pc_engine *engine, uint64_t region);

/* Connections to a peer are made and authenticated by the caller; the engine owns fd from here.
 * One peer needs several: pc_engine_peer_lanes of them, lane 0 .. lanes-1. */
int pc_engine_peer_lanes(pc_engine *engine);
int pc_engine_add_peer(pc_engine *engine, uint64_t server_id, int lane, int fd);
/* Nobody can reach the peer: what waits for it fails with error (PC_ERR_HOME_LOST: for good). */
int pc_engine_peer_lost(pc_engine *engine, uint64_t server_id, int error);
/* A connection that somebody else made to us and that passed authentication. */
int pc_engine_serve(pc_engine *engine, uint64_t server_id, int fd);

/* The region is freed: no new leases; it goes when the last lease does (PC_EVENT_REGION_IDLE).
 * With force = 1 it goes now, also where it is the home. */
int pc_engine_retire(pc_engine *engine, uint64_t region, int force);

struct pc_engine_stats {
    uint64_t regions, generations, mappings, clients, served_connections, peer_connections;
    uint64_t faults, faults_failed, faults_waiting;
    uint64_t fetch_requests, fetch_retries, fetch_failed, fetches_in_flight;
    uint64_t blocks_fetched, bytes_received, bytes_sent, blocks_served;
    uint64_t zero_blocks, local_blocks;
    uint64_t prefetch_requests, prefetched_blocks;
    uint64_t home_bytes, cached_bytes;
    uint64_t bad_messages, reattached;
};
int pc_engine_get_stats(pc_engine *engine, struct pc_engine_stats *out);

struct pc_region_stats {
    uint64_t region, version, length_bytes;
    uint64_t is_home, mappings;
    uint64_t present_blocks, fetched_blocks, touched_blocks;
};
/* Returns the number of regions known here (which may exceed capacity). */
int64_t pc_engine_region_stats(pc_engine *engine, struct pc_region_stats *out, size_t capacity);
enum pc_block_set { PC_BLOCKS_PRESENT = 0, PC_BLOCKS_FETCHED = 1, PC_BLOCKS_TOUCHED = 2 };
/* How many blocks of the set fall in each of n_buckets equal parts of the region. */
int pc_engine_histogram(pc_engine *engine, uint64_t region, int which, uint32_t *buckets,
                        size_t n_buckets);

/* ------------------------------------------------------------------ keeper */

/* Holds descriptors for the page server, and nothing else. listen_name is the abstract socket
 * on which page servers find it; returns when watched_pid (the raylet) ends, when told to quit,
 * or when no page server has been connected for orphan_timeout_ns. */
int pc_keeper_run(const char *listen_name, int watched_pid, uint64_t orphan_timeout_ns);
/* Connects to the keeper; *fd for pc_engine_options.keeper_fd. */
int pc_keeper_connect(const char *listen_name, uint64_t timeout_ns, int *fd);
int pc_keeper_quit(int fd);

/* cdef-end */

#define PC_BLOCK_SHIFT 12
#define PC_BLOCK_BYTES 4096u
#define PC_EXTENT_BYTES (64ull << 20)
#define PC_EXTENT_BLOCKS (PC_EXTENT_BYTES >> PC_BLOCK_SHIFT)
#ifndef PC_WINDOW_BEGIN /* builds under TSan move it: its shadow memory lies there */
#define PC_WINDOW_BEGIN 0x110000000000ull
#define PC_WINDOW_END 0x290000000000ull
#endif

#endif
