/* wire.h - every message that leaves a process, and the parsers for them.
 *
 * Two protocols:
 *   control  client <-> page server, Unix SOCK_SEQPACKET, one message a packet, descriptors as
 *            SCM_RIGHTS. Both ends are the same build on one node: native structs.
 *   data     page server <-> page server, TCP, little-endian, authenticated before it gets here:
 *            wire_data.h.
 *
 * Parsers are pure: bytes in, checked values or PC_ERR_PROTOCOL out, no allocation, no I/O.
 * They never read past the length they were given (tests put a guard page there; fuzz_wire).
 */
#ifndef PC_WIRE_H
#define PC_WIRE_H

#include "common/wire_data.h"
#include "pagecache.h"

#include <assert.h>
#include <stdbool.h>

#define PC__WIRE_VERSION 1u

/* ---------------------------------------------------------------- control */

#define PC__CTL_MAX_BYTES 65536u
#define PC__CTL_MAX_RUNS 2048u
#define PC__CTL_MAX_FDS 2

enum pc__ctl_type {
    PC__CTL_HELLO = 1,   /* c->s  pc__ctl_hello; fds: [uffd] or [control memfd, eventfd] */
    PC__CTL_CREATE = 2,  /* c->s  pc__ctl_region; reply carries the home memfd */
    PC__CTL_SEAL = 3,    /* c->s  pc__ctl_region; length_bytes: 0, or the caller maps its memory */
    PC__CTL_ABANDON = 4, /* c->s  pc__ctl_region */
    PC__CTL_OPEN = 5,    /* c->s  pc__ctl_open; reply pc__ctl_opened and the memfd */
    PC__CTL_ATTACH = 6,  /* c->s  pc__ctl_open with inode set: the client maps it already */
    PC__CTL_CLOSE = 7,   /* c->s  pc__ctl_open, mapping_id only; no reply */
    PC__CTL_PREFETCH = 8,/* c->s  pc__ctl_runs + runs; reply when resident (or taken) */
    PC__CTL_READS = 9,   /* c->s  pc__ctl_runs + runs; no reply */
    PC__CTL_REPLY = 10,  /* s->c  status and body by request; HELLO's body is a pc__ctl_hello */
    PC__CTL_FAIL = 11,   /* s->c  pc__ctl_fail: a fault cannot be resolved; the process must end */
    PC__CTL_PING = 12,   /* c->s  nothing; replied at once by the loop that owns the client */
    PC__CTL_STAGE = 13,  /* c->s  pc__ctl_stage; fds: [the layer's file]; reply when it is kept:
                                  pc__ctl_staged */
    PC__CTL_RESOLVE = 14,/* c->s  pc__ctl_stage, with version; no reply */
    PC__CTL_GATHER = 15, /* c->s  pc__ctl_gather; fds: [memfd]; reply when it is filled in */
    PC__CTL_LET_GO = 16, /* s->c  pc__ctl_let_go: idle mappings of the region are to be closed */
    PC__CTL_EVICTED = 17,/* c->s  pc__ctl_runs, wait: enum pc__evicted; READ: reply with a file of runs,
                                  if there are any; END: no reply */
    PC__CTL_ENDED = 18,  /* s->c  nothing: the session has ended, and nobody will serve it again */
    PC__CTL_ATTACHED = 19,/* c->s nothing: all that this client maps is attached on this connection; no
                                  reply */
    PC__CTL_LEFT = 20,   /* c->s  nothing: this client maps nothing any more; reply if it has an id */
    PC__CTL_RETIRE = 21, /* c->s  pc__ctl_retire + ids of servers; reply when neither we nor they
                                  give a lease any more */
    PC__CTL_LAST_WORDS = 22, /* c->s pc__ctl_last_words: this process ends because of a FAIL; reply when
                                  it is queued for Python */
    PC__CTL_LAYER_FILE = 23, /* c->s pc__ctl_stage; reply with a file on disk for the layer, or with none: it
                                  is to be in memory */
    PC__CTL_LAST = 24
};

enum pc__evicted { PC__EVICTED_END = 0, PC__EVICTED_BEGIN = 1, PC__EVICTED_READ = 2 };

struct pc__ctl_header {
    uint32_t body_bytes; /* what follows this header in the packet */
    uint16_t type;       /* enum pc__ctl_type */
    uint16_t reserved;   /* 0 */
    uint32_t request_id; /* echoed by the reply; 0 where none is due */
    int32_t status;      /* replies: enum pc_err */
};
static_assert(sizeof(struct pc__ctl_header) == 16, "wire");

/* The first message of a connection, and its reply (with trap = 0). The layout of this one never
 * changes, so that different builds can tell each other so. */
struct pc__ctl_hello {
    uint32_t wire_version;
    uint32_t trap;       /* enum pc_trap in force */
    uint64_t sender_id;  /* reply: of the server. Else a number of the client, the same on all of its
                            connections; 0: it will not come back */
    char library_version[48]; /* NUL-terminated */
};
static_assert(sizeof(struct pc__ctl_hello) == 64, "wire");

struct pc__ctl_region {
    uint64_t region;
    uint64_t base_address;
    uint64_t length_bytes;
    uint32_t medium;     /* CREATE: enum pc_medium */
    uint32_t reserved;   /* 0 */
};

struct pc__ctl_let_go {
    uint64_t region;
    uint64_t loss;       /* as in pc__ctl_opened */
};

struct pc__ctl_open {
    uint64_t mapping_id; /* chosen by the client, unique in the connection */
    uint64_t region;
    uint64_t version;
    uint64_t address;    /* where the client maps it */
    uint64_t length_bytes;
    uint64_t inode;      /* pc__file_id of what it maps: ATTACH; of what it or its parent maps: OPEN */
    uint32_t flags;      /* enum pc_map_flags */
    uint32_t follows;    /* ATTACH, PRIVATE: 1: what it wrote was committed as version + 1 */
};

/* log2 of the bytes that a fault of this mapping fetches; 0: by use. */
static inline unsigned pc__map_page_shift(uint32_t flags)
{
    return flags >> PC_MAP_PAGE_SHIFT & 0xffu;
}
/* None that is not known, and a page of 4 KiB to 8 MiB, if any. */
bool pc__map_flags_fit(uint32_t flags);

struct pc__ctl_opened {
    uint64_t inode;
    uint32_t needs_trap; /* 0: every hole is a block of zeros (this node is the whole home); else with */
#define PC__OPENED_WASTES 2u /* this bit where faults fetch far more of the region than is touched */
    uint32_t loss;       /* of blocks of the region: its number; 0: none is lost */
};

struct pc__ctl_runs {
    uint64_t mapping_id;
    uint32_t n_runs;     /* struct pc_run follow */
    uint32_t wait;       /* of PREFETCH and READS: PC__RUNS_LAST_WAIT at most */
};
#define PC__RUNS_LAST_WAIT 1

struct pc__ctl_stage {
    uint64_t region;
    uint64_t commit_id;
    uint64_t version;    /* RESOLVE: what it became; 0: it was refused */
    uint64_t layer_bytes; /* STAGE, LAYER_FILE: of the layer (pc__layer_parse) */
    uint64_t mapping_id; /* RESOLVE: that the layer was copied from; 0: it is gone */
};

/* Reply to a STAGE. A node that has lost its page server and its keeper joins again under another id:
 * the client may have been told of the one before. */
struct pc__ctl_staged {
    uint64_t server_id;  /* that has the layer */
};

struct pc__ctl_fail {
    uint64_t region;
    uint64_t version;
    uint64_t block;
    uint64_t server_id;  /* that was asked */
    int32_t error;       /* enum pc_err */
    char cause[220];     /* NUL-terminated */
};

struct pc__ctl_last_words {
    uint8_t task[PC_TASK_BYTES]; /* that ran; not all zeros */
    uint64_t region;     /* as in the FAIL */
    uint64_t version;
    uint64_t block;
    int32_t error;
    uint32_t reserved;   /* 0 */
};
static_assert(sizeof(struct pc__ctl_last_words) == 56, "wire");

/* Some of a gather's rows. The memfd cannot change its size (sealed against SHRINK and GROW), and has
 * the ids at at_bytes, ascending; what the page server writes after them: wire_data.h. */
#define PC__GATHER_MAX_ROWS PC__DATA_MAX_ROWS
struct pc__ctl_gather {
    uint64_t mapping_id;
    struct pc_rows rows; /* row_bytes <= PC__DATA_MAX_ROW_BYTES */
    uint64_t memfd_bytes;
    uint64_t at_bytes;   /* a multiple of the block */
    uint32_t n_ids;      /* their rows are PC__DATA_MAX_ROWS_BYTES at most */
    uint32_t reserved;   /* 0 */
};
static_assert(sizeof(struct pc__ctl_gather) == 56, "wire");

/* The region is freed: the registry has told so who sends this. */
#define PC__RETIRE_MOST 64u /* servers */
struct pc__ctl_retire {
    uint64_t region;
    uint32_t alone;      /* 1: no other server has heard of it: it goes, where nobody has a lease */
    uint32_t n_servers;  /* their ids follow, of 8 bytes: others that may give leases on it */
};
static_assert(sizeof(struct pc__ctl_retire) == 16, "wire");

/* Whether these PC_TASK_BYTES name one. */
bool pc__is_task(const uint8_t *task);

/* A control packet, checked: header, and a body of at least the type's fixed size. */
struct pc__ctl_message {
    struct pc__ctl_header header;
    const void *body;    /* unaligned: memcpy out of it */
    size_t body_bytes;
};
int pc__ctl_parse(const void *packet, size_t packet_bytes, struct pc__ctl_message *out);
/* Body of PREFETCH or READS; runs are copied out to runs[capacity]. Returns their number. */
int pc__ctl_parse_runs(const struct pc__ctl_message *message, struct pc__ctl_runs *head,
                       struct pc_run *runs, size_t capacity);
/* Body of RETIRE; ids are copied out to servers[capacity]. Returns their number. */
int pc__ctl_parse_retire(const struct pc__ctl_message *message, struct pc__ctl_retire *head,
                         uint64_t *servers, size_t capacity);

/* The page that a SIGSEGV client shares with its server (a memfd of exactly this size).
 * A slot: client CASes FREE->CLAIMED, fills address, stores REQUESTED, writes the eventfd, waits
 * on the futex; server stores SERVING, later fills the run and status, stores DONE, wakes;
 * the client takes the answer and stores FREE. After a reconnect the server takes up every slot
 * that is REQUESTED or SERVING.
 * The window: runs that the client has unprotected, oldest first from head; a server never
 * evicts a block inside one. A run is narrowed by two stores: who reads it reads the address, the
 * length and the address again, and starts over if the address changed.
 * Eviction: the server stores evicting, then reads the window, and punches what is in no run of it;
 * the client stores its run, then reads evicting, and takes blocks of that chunk for absent: it asks.
 * All of these are sequentially consistent, so that one of the two sees the other. */
#define PC__SLOTS 64
#define PC__WINDOW_RUNS 8192
#define PC__CHUNK_BYTES 65536u
enum pc__slot_state { PC__SLOT_FREE, PC__SLOT_CLAIMED, PC__SLOT_REQUESTED, PC__SLOT_SERVING, PC__SLOT_DONE };
struct pc__slot {
    _Atomic uint32_t state;   /* futex */
    int32_t status;           /* enum pc_err */
    uint64_t address;         /* faulting address */
    uint64_t first_address;   /* answer: resident range around it, block-aligned, not empty */
    uint64_t n_bytes;
};
struct pc__window_run {
    _Atomic uint64_t address; /* 0: empty */
    _Atomic uint64_t n_bytes;
};
struct pc__control_page {
    uint32_t magic;
    _Atomic uint32_t limit;   /* server: the client uses the first so many runs; 0: all */
    _Atomic uint64_t evicting; /* server: 1 + the number, in any mapping, of the chunk of
                                  PC__CHUNK_BYTES that is being evicted; 0: none */
    struct pc__slot slots[PC__SLOTS];
    _Atomic uint64_t over;    /* client: not 0: it opens nothing any more */
    _Atomic uint64_t head;    /* counts up; the next window run to be replaced is head % RUNS */
    struct pc__window_run window[PC__WINDOW_RUNS];
};
#define PC__CONTROL_MAGIC 0x43504331u

/* ------------------------------------------------------------------ layers */

/* The dirty blocks of one commit on one region: this head, then n_runs struct pc_run (sorted,
 * disjoint), zeros up to the next block boundary, then the blocks in the order of the runs. A file
 * of exactly data_offset + n_blocks * 4 KiB, fixed once it is staged. On disk there may be more behind them:
 * the checksum of each block (pc_copy_to_disk), so the page server need not read them for that. */
#define PC__LAYER_MAGIC 0x3152594c43ull
/* The blocks are a delta: what they were XOR what they are. They are no version's content, and nothing may
 * take them for that; the home XORs them with the version before. */
#define PC__LAYER_DELTA 1u
/* Made of a delta by the home: content as any other's, but for blocks that are lost, which it lacks. So it
 * may have no block at all. It never leaves its home and its keeper. */
#define PC__LAYER_MADE_WHOLE 2u
struct pc__layer_head {
    uint64_t magic;
    uint64_t region;
    uint64_t commit_id;
    uint64_t base_version; /* that the writer saw */
    uint64_t n_blocks;
    uint64_t data_offset;  /* in bytes; a multiple of the block */
    uint32_t n_runs;
    uint32_t flags;        /* PC__LAYER_DELTA or PC__LAYER_MADE_WHOLE, or 0 */
};
static_assert(sizeof(struct pc__layer_head) == 56, "layer");
static inline uint64_t pc__layer_data_offset(uint64_t n_runs)
{
    return (sizeof(struct pc__layer_head) + n_runs * sizeof(struct pc_run) + PC_BLOCK_BYTES - 1) /
           PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}
/* Checks the first bytes of a layer: all of head and runs must be there, aligned as a mapped file is
 * (to 8 bytes). region_blocks: 0 if it is not known. *runs points into bytes: in memory that its
 * writer can still change, what was checked may change too. Runs may touch, never overlap. */
int pc__layer_parse(const void *bytes, size_t n_bytes, uint64_t layer_bytes, uint64_t region_blocks,
                    struct pc__layer_head *head, const struct pc_run **runs);

#endif
