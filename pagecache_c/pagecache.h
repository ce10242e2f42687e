/* pagecache.h - the public header of the page cache. It includes the other two.
 *
 * Two halves share one wire (wire.h):
 *   client  lives in every process that reads, builds or changes global variables;
 *   engine  lives in the page server, one per node.
 *
 * Words (docs/design.md has the long form):
 *   block       4 KiB, the unit of presence, of dirtiness and of versions.
 *   page        a run of blocks fetched by one request; a policy, never a format.
 *   region      a contiguous range of the global address space, the same in every process.
 *   version     a region's state after its n-th commit.
 *   layer       the dirty blocks of one commit on one region, in one memfd.
 *   generation  one node's memfd that holds one version of one region; a hole is an absent
 *               block, except at the home, where a hole is a block of zeros.
 *   home        the server that holds the authoritative copy of an extent of a region.
 *   peer        a server that holds cached blocks of extents homed elsewhere.
 *   mapping     one process's map of one generation; it is that process's lease.
 *
 * Every function returns 0 or a count on success and a negative enum pc_err on failure.
 * Every call that waits takes a timeout in nanoseconds. All calls are thread-safe.
 *
 * Lines between the two cdef marks, here and there, are read by cffi as they stand: declarations only.
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
    PC_ERR_HOME_LOST = -7,     /* no page server that is known has the blocks */
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
    PC_ERR_EXPIRED = -20,      /* the blocks of that version are kept no longer */
    PC_ERR_NO_VERSION = -21,   /* the region has no such version */
    PC_ERR_NO_SPACE = -22,     /* a file system, or an arena, is full */
    PC_ERR_MEMBER = -23,       /* a member of a ring is gone, or says nothing */
    PC_ERR_MISMATCH = -24,     /* members of a ring do not ask for the same */
    PC_ERR_ENDED = -25,        /* the session has ended */
    PC_ERR_FILE = -26,         /* the file that has the blocks cannot be read */
    PC_ERR_FILE_CHANGED = -27, /* it is not the one any more that the variable was made of */
    PC_ERR_FILE_ACCESS = -28,  /* who reads it is not allowed to */
    PC_ERR_LAST = -29
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
    const char *socket_name;   /* of the node's page server: a path, or an abstract name (tests) */
    const char *library_version;
    int trap;                  /* enum pc_trap */
    uint64_t connect_timeout_ns;
    uint64_t reattach_timeout_ns; /* how long blocked threads wait for a restarted server */
};

/* Connects, says hello, probes the trap, starts the watch thread. *out is NULL on failure. */
int pc_client_open(const struct pc_client_options *options, pc_client **out);
int pc_client_shut(pc_client *client); /* all calls, those that wait too, give PC_ERR_CLOSED. Frees nothing */
/* Shuts it, waits until the threads that are in a call have left, unmaps everything and joins the
 * watch thread. Addresses of its mappings die with it: those that were not unmapped become guards,
 * whose touch ends the process with a message. No call may begin after this has. */
int pc_client_close(pc_client *client);
/* Instead of pc_client_unmap, for a mapping of a client that was closed: with its last one the guard
 * at the address goes. PC_ERR_NO_REGION: there is none. */
int pc_ended_unmap(uint64_t address);
/* 1: its page server has said that the session ended. What is here stays readable; every call but
 * unmap gives PC_ERR_ENDED, and a touch of an absent block ends the process with that cause. */
int pc_client_has_ended(pc_client *client);
int pc_client_is_connected(pc_client *client); /* if not, its server is restarted, or has ended */
/* Which task runs in this process, PC_TASK_BYTES long; all zeros: none, or several at once. Where the
 * page server ends the process because a block cannot be read, it is told of it
 * (PC_EVENT_TASK_ENDED): who runs the task again can say why. Sends nothing now. */
#define PC_TASK_BYTES 24
int pc_client_task(pc_client *client, const uint8_t *task);
/* The trap in force: PC_TRAP_UFFD_FULL, PC_TRAP_UFFD_USER or PC_TRAP_SIGSEGV. */
int pc_client_trap(pc_client *client);
/* Why no better one is in force, where PC_TRAP_AUTO or PC_TRAP_UFFD has chosen it; else "". */
int pc_client_trap_reason(pc_client *client, char *text, size_t text_bytes);
/* What a way to a userfaultfd gives this process: 0: /dev/userfaultfd; 1: userfaultfd(2); 2: the same,
 * USER_MODE_ONLY. 0, or the errno of the refusal; EOPNOTSUPP: it knows no shared memory. */
int pc_userfaultfd_probe(int way, int *has_write_protect);
/* In a child of fork: connects anew, maps and arms every mapping of the parent at its address. Mappings
 * that cannot be had are left as guards: touching one ends the process with a message. */
int pc_client_after_fork(pc_client *client);

enum pc_map_flags {
    PC_MAP_PRIVATE = 1,        /* copy-on-write, writable */
    PC_MAP_EXACT_READS = 2,    /* no kernel fault-around: exact read sets, dearer first touches */
    PC_MAP_FIXED = 4,          /* at the region's own address or not at all: it holds pointers */
    PC_MAP_PAGE_SHIFT = 8      /* bits 8 to 15: log2 of the bytes that a fault fetches, 12 to 23; 0: by
                                  use */
};

struct pc_mapping {
    uint64_t id;               /* for the calls below */
    uint64_t address;
    uint64_t length_bytes;
    uint32_t loss;             /* number of the loss of blocks of the region; 0: none is lost */
    uint32_t wastes;           /* 1: faults on this node have fetched far more of it than was touched */
};

/* Maps a region at its own address; where another map of this region in this process has that
 * (another version of it, or a PRIVATE one), anywhere else, unless FIXED (then PC_ERR_CLASH).
 * The lease lasts until pc_client_unmap.
 * Several maps of the same (region, version) share one mapping by count; who asks for EXACT_READS
 * where a mapping without them is shared gets that one, whose read sets are supersets; and the first
 * one's choice of a page (PC_MAP_PAGE_SHIFT) stands for all. */
int pc_client_map(pc_client *client, uint64_t region, uint64_t version, uint64_t base_address,
                  uint64_t length_bytes, uint32_t flags, uint64_t timeout_ns, struct pc_mapping *out);
/* The same at addresses of pc_addresses_reserve: for pieces of a variable, which lie side by side. Shares
 * no mapping; not with FIXED. The addresses are the mapping's; where the call fails they are given back. */
int pc_client_map_at(pc_client *client, uint64_t region, uint64_t version, uint64_t base_address,
                     uint64_t length_bytes, uint32_t flags, uint64_t reserved, uint64_t timeout_ns,
                     struct pc_mapping *out);
int pc_addresses_reserve(uint64_t length_bytes, uint64_t wanted, uint64_t *address); /* without access */
int pc_addresses_release(uint64_t address, uint64_t length_bytes);
int pc_client_unmap(pc_client *client, uint64_t mapping_id);
/* As pc_client_unmap, but where nobody else uses the mapping, the next pc_client_map of the same
 * version in this process may still have it, for half a second and until the page server needs it
 * gone. */
int pc_client_unmap_later(pc_client *client, uint64_t mapping_id);

/* Where the blocks of a home lie: in memory, or on disk, in files without names that are gone with their
 * node's page server and keeper. A home on disk may be larger than memory. Processes of its node map it as
 * they map others. FILE: what no commit has written is in a file of the user's, which each node reads by
 * itself (pc_engine_file_next); what commits write is in memory. Nothing is written to such a home when it
 * is made. */
enum pc_medium { PC_MEDIUM_MEMORY = 0, PC_MEDIUM_DISK = 1, PC_MEDIUM_FILE = 2 };

/* Makes the home of a new region on this node: *fd is its file, to be filled with pc_copy_in
 * and closed by the caller. Nobody can map the region before pc_client_seal. PC_ERR_NO_SPACE: the disk has
 * no room for all of it. */
int pc_client_create(pc_client *client, uint64_t region, uint64_t base_address,
                     uint64_t length_bytes, enum pc_medium medium, uint64_t timeout_ns, int *fd);
int pc_client_seal(pc_client *client, uint64_t region, uint64_t timeout_ns);
/* Drops a region that was created here and not sealed. */
int pc_client_abandon(pc_client *client, uint64_t region, uint64_t timeout_ns);
/* The registry has said that the region is freed: when this returns PC_OK, neither this node's page
 * server nor any of `servers`, which ask it for blocks of the region, gives a lease on it any more. alone
 * (without servers): no other has heard of it, and without a lease here its memory is given back.
 * PC_ERR_NO_PEER: one of them has no connection to it; PC_ERR_TIMEOUT, PC_ERR_NO_SERVER, ...: one did
 * not answer, or cannot promise it. Then the registry must tell them. */
int pc_client_retire(pc_client *client, uint64_t region, int alone, const uint64_t *servers,
                     size_t n_servers, uint64_t timeout_ns);
/* The id of the page server that the client is connected to, or was last. */
uint64_t pc_client_server_id(pc_client *client);
/* Makes the home of a new region on this node and maps it read-write at its own address, to build
 * an object in place. Nobody else can map the region before pc_client_build_seal, which makes this
 * mapping read-only, seals the region, and turns the mapping into a lease of version 0. Unmapping
 * it instead abandons the region. In a child of fork such a mapping is a guard. */
int pc_client_build(pc_client *client, uint64_t region, uint64_t base_address,
                    uint64_t length_bytes, enum pc_medium medium, uint64_t timeout_ns,
                    struct pc_mapping *out);
int pc_client_build_seal(pc_client *client, uint64_t mapping_id, uint64_t timeout_ns);
/* While it is built: this process's libraries may point into it for good, and write there. So it does
 * not become read-only with the seal, but a private copy-on-write map of version 0; children of fork
 * have it too; and closing the client leaves it mapped. pc_client_map with FIXED shares it as long as
 * nothing was written to it since, and is PC_ERR_CLASH from then on. */
int pc_client_build_keep(pc_client *client, uint64_t mapping_id);
/* Instead of a seal: the region is abandoned, and what was built is this process's alone. */
int pc_client_build_drop(pc_client *client, uint64_t mapping_id);
/* Nothing points into it any more: from here on it is unmapped as any other mapping. */
int pc_client_build_let_go(pc_client *client, uint64_t mapping_id);
/* Before the client is closed in a process that goes on: nobody leases what is kept from then on, so
 * every block of it becomes a copy of this process's own. */
int pc_client_build_copy(pc_client *client);
/* Unmaps what a client that was closed has left mapped. PC_ERR_NO_REGION: it has not. */
int pc_kept_unmap(uint64_t address, uint64_t length_bytes);

/* Blocks of a PRIVATE mapping begin as zeros that this process has written, whatever the version has
 * there: for blocks that are lost. What was written there before is gone. */
int pc_client_blank(pc_client *client, uint64_t mapping_id, const struct pc_run *runs, size_t n_runs);
/* The blocks of a PRIVATE mapping that this process has written: sorted, disjoint runs. Returns
 * their number (which may exceed capacity: then call again with room). */
int64_t pc_client_dirty(pc_client *client, uint64_t mapping_id, struct pc_run *runs, size_t capacity);
/* Copies the runs of a PRIVATE mapping, with up to n_threads threads, into a layer, and hands it to
 * this node's page server, where it is kept under commit_id until pc_client_resolve. The runs must be
 * sorted and disjoint. The mapping stays as it is: what fails may be tried again, or dropped.
 * *server_id (or NULL): the page server that has it. A node that has lost what it held joins again
 * under another id: the one that this process has attached to may be another. */
int pc_client_stage(pc_client *client, uint64_t mapping_id, uint64_t commit_id,
                    const struct pc_run *runs, size_t n_runs, int n_threads, uint64_t timeout_ns,
                    uint64_t *server_id);
/* What a commit writes of one piece of a group whose parity it changes too. */
struct pc_parity_member {
    uint64_t mapping_id;       /* PRIVATE */
    const struct pc_run *runs; /* sorted and disjoint */
    size_t n_runs;
    uint64_t was_lost;         /* what the blocks were is lost: as if zeros */
    uint64_t region, version;  /* what they were; 0: of the mapping's own */
};
/* Makes the layer of the group's parity, a region that need not be mapped here, and hands it over as
 * pc_client_stage does. It has every block that a member has. is_delta: the XOR of what the blocks were
 * and are, over all members; the parity's home XORs it into what it has. What they were is mapped
 * meanwhile, and fetched where it is absent: PC_ERR_HOME_LOST where nobody has it. Else a mirror, of one
 * member: its blocks as they are. pc_client_resolve without a mapping says what became of it.
 * Returns how many runs it has, and writes up to capacity: as many as the members have are enough. */
int64_t pc_client_stage_parity(pc_client *client, uint64_t region, uint64_t commit_id, int is_delta,
                               const struct pc_parity_member *members, size_t n_members,
                               int n_threads, uint64_t timeout_ns, struct pc_run *runs,
                               size_t capacity, uint64_t *server_id, uint64_t *layer_bytes);
/* The same as a layer of another region, of the same length or longer, at base_version. */
int pc_client_stage_as(pc_client *client, uint64_t mapping_id, uint64_t region, uint64_t base_version,
                       uint64_t commit_id, const struct pc_run *runs, size_t n_runs, int n_threads,
                       uint64_t timeout_ns, uint64_t *server_id);
/* Another region of the same length, PRIVATE too or not (flags), for a PRIVATE mapping of one user. What that has
 * written is gone, and no thread may touch it meanwhile. If it fails and out->address is not 0, the mapping
 * is gone, and those are its addresses, as pc_addresses_reserve gives them; if it is 0, nothing has changed. */
int pc_client_remap(pc_client *client, uint64_t mapping_id, uint64_t region, uint64_t version,
                    uint64_t base_address, uint32_t flags, uint64_t timeout_ns, struct pc_mapping *out);
/* What became of a layer that this client staged: its version, or 0: it is to be dropped. Sends,
 * does not wait. mapping_id: that it was copied from, or 0. Where the version is the next after the
 * mapping's, the mapping shows that one from now on, for what differs is private to it: it does not
 * keep the page server from moving its memory there. */
int pc_client_resolve(pc_client *client, uint64_t mapping_id, uint64_t commit_id, uint64_t region,
                      uint64_t version);
/* Copies into a memfd with up to n_threads threads. Reads the source straight: no extra copy. */
int pc_copy_in(int fd, uint64_t offset_bytes, const void *source, uint64_t n_bytes, int n_threads);

/* Fetches the absent blocks among the runs in few round trips. wait = 0: until the server has the request. */
int pc_client_prefetch(pc_client *client, uint64_t mapping_id, const struct pc_run *runs,
                       size_t n_runs, int wait, uint64_t timeout_ns);

/* Rows by number: row i is the row_bytes bytes at offset_bytes + ids[i] * stride_bytes of the region.
 * Copies them to out, in the order of the ids. What this node does not hold comes in few round
 * trips: a block where that moves fewer bytes, else the rows themselves, which this node does not
 * keep. Rows must lie in the region: PC_ERR_RANGE, and then nothing has moved. */
struct pc_rows {
    uint64_t offset_bytes;
    uint64_t stride_bytes;
    uint64_t row_bytes;
};
int pc_client_gather(pc_client *client, uint64_t mapping_id, const struct pc_rows *rows,
                     const uint64_t *ids, uint64_t n_ids, void *out, uint64_t timeout_ns);

/* Whether no row need come, as far as this process or the kernel knows: 1 or 0. Asks no server. Where it
 * is 1, a touch of them is a fault only if they were evicted meanwhile.
 * ids: of n_rows rows; negative ones count from the end. PC_ERR_RANGE: one is no row. */
int pc_client_rows_here(pc_client *client, uint64_t mapping_id, const struct pc_rows *rows,
                        const int64_t *ids, uint64_t n_ids, uint64_t n_rows);

/* How many blocks of the mapping are not here, as the kernel says (0 at its home; all, where it is too
 * large to look). Asks no server. */
int64_t pc_client_absent(pc_client *client, uint64_t mapping_id);

/* Read sets: drop this process's page-table entries, run, then list what is mapped again.
 * Returns the number of runs (which may exceed capacity: then call again with room). Each begin
 * that succeeded has one end; runs = NULL ends without a look. Calls may overlap: while another
 * one runs nothing is dropped, so that each set holds at least what its call touched. Of a PRIVATE
 * mapping nothing is ever dropped: its set is what was touched since it was mapped. */
/* exact: from the next begin on as if it had been mapped with EXACT_READS, for all who share it. The
 * SIGSEGV trap does not change: its sets are supersets as before. */
int pc_client_reads_exact(pc_client *client, uint64_t mapping_id);
int pc_client_reads_begin(pc_client *client, uint64_t mapping_id);
int64_t pc_client_reads_end(pc_client *client, uint64_t mapping_id, struct pc_run *runs, size_t capacity);
/* What the page server took from this mapping's memory between begin and end: such blocks are not in
 * a read set any more, though they may have been touched. Ask after pc_client_reads_end; the number
 * of runs as there. After the page server was restarted it is all of them. */
int pc_client_evicted_begin(pc_client *client, uint64_t mapping_id, uint64_t timeout_ns);
int64_t pc_client_evicted(pc_client *client, uint64_t mapping_id, struct pc_run *runs,
                          size_t capacity, uint64_t timeout_ns);
int pc_client_evicted_end(pc_client *client, uint64_t mapping_id);
/* Tells the page server what was read, for its statistics. Sends, does not wait. */
int pc_client_report_reads(pc_client *client, uint64_t mapping_id, const struct pc_run *runs, size_t n_runs);

/* ------------------------------------------------------------------ engine */

/* Which server a miss is sent to. P2C: a home with little to send answers; a busy one picks two of those that
 * have the block, and sends the asker to the one with less to send. RANDOM: any of those and the home. */
enum pc_replication { PC_REPLICATION_P2C = 0, PC_REPLICATION_RANDOM = 1, PC_REPLICATION_OFF = 2 };
/* The choice itself, as the home makes it: -1: the home answers; else an index of holder_bytes.
 * home_bytes, holder_bytes: what each has to send; random: 64 random bits. No state, no clock. */
int pc_select_peer(int replication, uint64_t home_bytes, const uint64_t *holder_bytes,
                     size_t n_holders, uint64_t random);

/* Which cached blocks go first when the node's budget is full. */
enum pc_policy {
    PC_POLICY_SIEVE = 0, PC_POLICY_FIFO = 1, PC_POLICY_LRU = 2, PC_POLICY_LFU = 3, PC_POLICY_RANDOM = 4
};

typedef struct pc_engine pc_engine;

struct pc_floor {
    uint64_t region;
    uint64_t version;          /* as pc_engine_retain takes it */
};
struct pc_engine_options {
    const char *socket_name;   /* to listen on: a path in a directory of this user alone, or an
                                * abstract name (tests); at most 107 bytes */
    const char *library_version;
    uint64_t server_id;        /* this server; never 0; the same after a restart */
    int keeper_fd;             /* the caller's, from pc_keeper_connect, or -1 for none */
    int n_loops;               /* 0: chosen from the number of cores */
    uint64_t fetch_timeout_ns; /* one request to one peer */
    uint64_t fault_timeout_ns; /* all tries of one block */
    uint64_t settle_ns;        /* after a restart: how long clients have to attach again before a
                                  retired region without leases counts as idle */
    int no_userfaultfd;        /* 1: do as where the kernel refuses it (tests) */
    uint64_t page_bytes;       /* fixed size of a demand fetch, 4 KiB to 8 MiB; 0: by use */
    uint64_t stage_timeout_ns; /* a layer whose writer says nothing for so long: NEED_OUTCOME */
    uint64_t history_bytes;    /* replaced blocks kept in memory, then */
    uint64_t history_disk_bytes; /* in anonymous files in */
    const char *history_directory; /* or NULL: memory only */
    uint64_t cache_bytes;      /* cached blocks are kept below it; 0: no budget */
    int cache_policy;          /* enum pc_policy */
    uint64_t cache_disk_bytes; /* of blocks that were evicted, in disk_directory; 0: none are kept */
    int replication;           /* enum pc_replication; of the regions that are homed here */
    const char *disk_directory; /* for homes on disk (PC_MEDIUM_DISK), or NULL: none are made */
    const struct pc_floor *floors; /* said before anything is taken back, which may need room for */
    size_t n_floors;               /* the history of what was published meanwhile */
    int durable;               /* 1: homes lie on disk, and a layer that is made whole is to be in a synced
                                  file before it changes a base: NEED_DURABLE */
    int cold;                  /* 1: no process of before maps anything: nobody is waited for (settle_ns) */
    const char *sums_directory; /* of the checksums of homes that pc_keeper_put_home gave; NULL: unchecked */
};

int pc_engine_start(const struct pc_engine_options *options, pc_engine **out);
int pc_engine_stop(pc_engine *engine); /* start takes back what the keeper holds, then listens */
/* How much here would be missed: homes, leases (also of connections that have ended, and after a restart
 * those that may come back), staged layers. but_homes: neither homes nor layers of other nodes. */
int64_t pc_engine_in_use(pc_engine *engine, int but_homes);
/* pc_engine_stop for a server whose node needs it no more. Returns what pc_engine_in_use says at the very
 * end. Above 0, somebody came at the last moment: the keeper has all that the next server needs. */
int64_t pc_engine_leave(pc_engine *engine);
/* Answers KEEPER_LOST: the new keeper is given everything. keeper_fd stays the caller's. */
int pc_engine_renew_keeper(pc_engine *engine, int keeper_fd);
/* Tells all clients that the session has ended. pc_engine_stop follows. */
int pc_engine_end(pc_engine *engine);

/* Things that only Python can decide. The descriptor is readable while there are events. */
enum pc_event_kind {
    PC_EVENT_NONE = 0,
    PC_EVENT_NEED_REGION = 1,  /* region: look it up; answer with pc_engine_define_region or _refuse_region */
    PC_EVENT_NEED_PEER = 2,    /* server_id: connect; answer with pc_engine_add_peer or pc_engine_peer_lost */
    PC_EVENT_REGION_IDLE = 3,  /* region: retired here, and the last lease on this node is gone */
    PC_EVENT_LOG = 4,          /* text: something a person may want to know */
    PC_EVENT_NEED_CHANGES = 5, /* region, from_version, version: which blocks changed in between?
                                  answer with pc_engine_set_changes */
    PC_EVENT_NEED_PUBLISHED = 6, /* region, from_version: which commits came after it? answer with
                                  pc_engine_publish for each, in order, then pc_engine_caught_up */
    PC_EVENT_NEED_OUTCOME = 7, /* commit_id, region: whoever staged it is gone, or silent; answer
                                  with pc_engine_publish or pc_engine_drop_staged */
    PC_EVENT_PULLED = 8,       /* commit_id, region, error: pc_engine_pull ended */
    PC_EVENT_THRASHING = 9,    /* text: blocks are evicted that are fetched again soon; at most one
                                  in ten seconds */
    PC_EVENT_NEED_HOME = 10,   /* region, server_id: its home is lost, or does not know it; who is it
                                  now? answer with pc_engine_set_homes, maybe with the same one, which
                                  is asked again, or pc_engine_home_lost */
    PC_EVENT_KEEPER_LOST = 11, /* start another (pc_keeper_run_part); answer with pc_engine_renew_keeper */
    PC_EVENT_TASK_ENDED = 12,  /* region, version, block, error, text (the task, as hex): its process ends,
                                  for it needs a block that cannot be read */
    PC_EVENT_NEED_SETTLED = 13, /* region: the newest version that all of its homes have acknowledged?
                                  answer with pc_engine_settled; no answer: it is asked again */
    PC_EVENT_NEED_REPAIR = 14, /* region, version: which others make its blocks again? answer with
                                  pc_engine_set_repair, always */
    PC_EVENT_NEED_FILE = 15,   /* ranges of files are to be read: pc_engine_file_next, until there is none */
    PC_EVENT_NEED_DURABLE = 16 /* region, commit_id, version: a delta was made whole, and waits until the whole
                                  layer (pc_engine_layer_file) is in a file that outlives this node's power;
                                  answer with pc_engine_layer_durable; no answer: it is asked again */
};
struct pc_event {
    int kind;
    int error;                 /* enum pc_err, where it applies */
    uint64_t region;
    uint64_t server_id;
    uint64_t from_version;
    uint64_t version;
    uint64_t commit_id;
    uint64_t block;
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
    uint32_t loss;             /* as in pc_mapping; of a definition only, as is */
    uint32_t has_repair;       /* 1: others can make its blocks again: pc_engine_set_repair */
    uint64_t term;             /* which of its homes in turn: pc_engine_set_homes_of */
    uint32_t medium;           /* enum pc_medium: of a home that is made here; FILE also of a definition */
    uint32_t reserved;         /* 0 */
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

/* The blocks that changed in (from, to]; anything else is the same in both. error PC_ERR_EXPIRED: the
 * log does not reach back so far; PC_ERR_NO_VERSION: there is no version `to`. */
int pc_engine_set_changes(pc_engine *engine, uint64_t region, uint64_t from_version,
                          uint64_t to_version, const struct pc_run *runs, size_t n_runs, int error);
/* At the home: the layer staged under commit_id is this version. A version that is known already
 * changes nothing; one that leaves a gap is refused with PC_ERR_NO_VERSION. At another server, which
 * uses the region: the layer is retained for a rebuild (retained.c), until its homes have it at least. */
int pc_engine_publish(pc_engine *engine, uint64_t region, uint64_t version, uint64_t commit_id);
/* Answers NEED_PUBLISHED: every commit there is has been published here; or error. */
int pc_engine_caught_up(pc_engine *engine, uint64_t region, int error);
/* Answers NEED_SETTLED: every home of the region has acknowledged the versions up to this one. A layer
 * that this server retains goes before that for nothing but the end of its region. */
int pc_engine_settled(pc_engine *engine, uint64_t region, uint64_t version);
/* The commit was refused, or is at another home by now. Unknown ids are no error. */
int pc_engine_drop_staged(pc_engine *engine, uint64_t region, uint64_t commit_id);
/* 1 or 0: whether a layer is staged here, by a process of this node or pulled. */
int pc_engine_has_layer(pc_engine *engine, uint64_t region, uint64_t commit_id);

/* The file of a home that is here, on disk, or is prepared to be here: for who keeps it beyond this session.
 * The base is at a version; blocks of later ones may be there, in part. fd is the caller's, and a description
 * of its own: what the disk refused to write, fdatasync says to each. PC_ERR_NO_REGION: it is not here, or in
 * memory, or not sealed yet. PC_ERR_SYSTEM: the disk has refused a part of it. */
struct pc_home_file {
    uint64_t version, base_address, length_bytes;
    uint64_t term;             /* of which this server is, or is to be, the home; 0: it was not said */
    uint32_t in_file;          /* 1: what no commit has written is in a file (PC_MEDIUM_FILE) */
    int fd;
};
int pc_engine_home_file(pc_engine *engine, uint64_t region, struct pc_home_file *out);
/* The file of a layer that is staged here, or is published and not applied yet; of a delta that was made
 * whole, of that one. fd is the caller's. PC_ERR_NO_VERSION: there is none. */
int pc_engine_layer_file(pc_engine *engine, uint64_t region, uint64_t commit_id, int *fd, uint64_t *bytes);
/* Answers NEED_DURABLE. rc: PC_OK, or it could not be written: then it is asked again. */
int pc_engine_layer_durable(pc_engine *engine, uint64_t region, uint64_t commit_id, int rc);
/* At the home: fetches the layer that server_id holds under commit_id. Ends with PC_EVENT_PULLED; with
 * this server's own id it only says whether the layer is here: PC_ERR_HOME_LOST if not.
 * PC_ERR_TIMEOUT: it has commits to apply first; ask again. */
int pc_engine_pull(pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t server_id,
                   uint64_t layer_bytes);

/* A region whose home is lost gets another one: rebuild.c. What other servers have of it:
 * the versions of which blocks are here, cached or in the layer of a commit of this node (returns their
 * number, which may exceed capacity; a region that is not known here has none), */
int64_t pc_engine_cached_versions(pc_engine *engine, uint64_t region, uint64_t *versions,
                                  size_t capacity);
/* the blocks of one of them (returns the number of runs, which may exceed capacity), */
int64_t pc_engine_cached_blocks(pc_engine *engine, uint64_t region, uint64_t version,
                                struct pc_run *runs, size_t capacity);
/* and a layer of those, staged under commit_id, for another server to pull. The runs must be sorted
 * and disjoint. Returns the layer's bytes. PC_ERR_NO_GENERATION: some are not here any more. */
int64_t pc_engine_stage_cached(pc_engine *engine, uint64_t region, uint64_t version,
                               uint64_t commit_id, const struct pc_run *runs, size_t n_runs);
/* At the server that is to be the home: *fd is the memfd of info->version of it, to be filled by the
 * caller, who closes it, and with layers that are staged here. When all is there it is sealed: from
 * then on it outlives this process. Nobody is served from it until the region's homes are said to be
 * this server, by a definition or by pc_engine_set_homes. Beginning anew drops what there was: _take
 * and _seal with the descriptor of an attempt before are refused with PC_ERR_NO_REGION. */
/* The blocks of `lost`, sorted and disjoint runs, nobody has: who needs one of them gets PC_ERR_HOME_LOST,
 * at versions before the first that writes it. */
int pc_engine_rebuild_begin(pc_engine *engine, const struct pc_region_info *info,
                            const struct pc_run *lost, size_t n_lost, int *fd);
/* As that, and sealed: of a file on disk that has the region at info->version. fd stays the caller's. */
int pc_engine_rebuild_from_file(pc_engine *engine, const struct pc_region_info *info, int fd);
int pc_engine_rebuild_take(pc_engine *engine, uint64_t region, int fd, uint64_t commit_id);
/* Makes one layer of the region, staged under commit_id, of layers that are staged here: the XOR of their
 * blocks, where one that lacks a block counts as zeros. So a block comes back from the other members of a
 * group, and a mirror from one. The parts are dropped then. version: that the blocks are of. Returns the
 * layer's bytes. PC_ERR_NO_VERSION: a part is not staged here; PC_ERR_PROTOCOL: one is a delta;
 * PC_ERR_RANGE: one is the layer that is to be made, or has blocks outside of the region. */
struct pc_layer_part {
    uint64_t region;
    uint64_t commit_id;
};
int64_t pc_engine_stage_xor(pc_engine *engine, uint64_t region, uint64_t version, uint64_t commit_id,
                            const struct pc_layer_part *parts, size_t n_parts);
/* Copies blocks that are here at a version into it: what it has itself need be no layer. */
int pc_engine_rebuild_copy(pc_engine *engine, uint64_t region, int fd, uint64_t version,
                           const struct pc_run *runs, size_t n_runs);
int pc_engine_rebuild_seal(pc_engine *engine, uint64_t region, int fd);
/* The same at another version than the one that it was begun with, a later one: commits have gone on. */
int pc_engine_rebuild_seal_at(pc_engine *engine, uint64_t region, int fd, uint64_t version);
/* Lets go of what that attempt has prepared, sealed or not; of what any has, where fd is -1. What is
 * not there, and a home, stays as it is: PC_OK. */
int pc_engine_rebuild_drop(pc_engine *engine, uint64_t region, int fd);
/* The homes of a region that is known here are others now; who waits for its blocks turns to them. A
 * server that was the home, and is not named, is that no longer (move.c). PC_ERR_HOME_LOST: this server is
 * one, and nothing was prepared. PC_ERR_NO_REGION: it is not used here. */
int pc_engine_set_homes(pc_engine *engine, uint64_t region, const uint64_t *homes, size_t n_homes);
/* The same, in order: these are the region's homes since its term-th one (from 1 on) is the home; it is
 * also said with a definition, and with the beginning of a rebuild or a move: of what would be the home.
 * An earlier term than was heard last changes nothing: PC_OK. 0: the order is not known; a home that has a
 * term does not end with it, so who numbers them once does so always. PC_ERR_EXISTS: this server is not
 * named, and became the home in this very term. With pc_engine_wait_for_keeper it outlives a restart. */
int pc_engine_set_homes_of(pc_engine *engine, uint64_t region, uint64_t term, const uint64_t *homes,
                           size_t n_homes);
/* Waits until the keeper has what it was given until now. PC_ERR_TIMEOUT: none takes it. Of no event loop. */
int pc_engine_wait_for_keeper(pc_engine *engine);

/* A home that lives moves to another server, the taker, while readers read and writers commit: the steps are
 * in engine/store/move.c.
 * Given up before 7.: pc_engine_rebuild_drop, and what is staged; the giver has noticed nothing.
 *
 * The runs of blocks that hold data at a version; the others are zeros (or lost: the registry knows those).
 * It may be more, never less. Returns their number, which may exceed capacity. PC_ERR_NO_REGION: this
 * is not the home; PC_ERR_NO_VERSION: it does not know the version (yet); PC_ERR_EXPIRED: any more. */
int64_t pc_engine_home_blocks(pc_engine *engine, uint64_t region, uint64_t version, struct pc_run *runs,
                              size_t capacity);
/* Stages blocks that the home has at a version, for another server to pull: sorted, disjoint runs; zeros
 * travel too. Returns the layer's bytes. Errors as above, and PC_ERR_HOME_LOST: a block is lost. */
int64_t pc_engine_stage_home(pc_engine *engine, uint64_t region, uint64_t version,
                             uint64_t commit_id, const struct pc_run *runs, size_t n_runs);
/* Stages a record of the home's history: what this version had in the blocks that the next commit, which
 * must be published here, replaced. PC_ERR_EXPIRED: it is not kept. PC_ERR_HOME_LOST: blocks of it were lost
 * then. In both cases older ones are of no use. Else as above. */
int64_t pc_engine_stage_record(pc_engine *engine, uint64_t region, uint64_t version, uint64_t commit_id);
/* At the taker: takes such a record into the history of what is prepared. Those before a gap are dropped; one
 * that is not above the last changes nothing. Of no event loop. Errors as of pc_engine_rebuild_take. */
int pc_engine_rebuild_take_record(pc_engine *engine, uint64_t region, int fd, uint64_t commit_id);
/* Answers NEED_HOME: server_id was its home, and there will be no other. Who waits fails with error. */
int pc_engine_home_lost(pc_engine *engine, uint64_t region, uint64_t server_id, int error);
/* Blocks of the region are lost: the number of that loss, or 0 where none is. Who opens it is told so
 * with the mapping, and who has it mapped already with the next pc_client_map of it. */
int pc_engine_region_lacks(pc_engine *engine, uint64_t region, uint32_t loss);
/* The registry's verdict: blocks of it are nowhere. Who opens it from now on gets error, until it has a
 * home again (pc_engine_set_homes). */
int pc_engine_region_lost(pc_engine *engine, uint64_t region, int error);

/* Answers NEED_REPAIR: the region's blocks at this version are those of each member (mirrors), or the XOR
 * of those of all: a member that is shorter has zeros there. Where its home is lost or late they are
 * asked; mirrors, in turn with it. None: it is asked again after a pause. */
struct pc_repair_member {
    uint64_t region, version, server_id;
};
int pc_engine_set_repair(pc_engine *engine, uint64_t region, uint64_t version,
                         const struct pc_repair_member *members, size_t n_members, int is_mirror);
/* As pc_region_info.has_repair, of a region that is known here already. */
int pc_engine_region_has_repair(pc_engine *engine, uint64_t region, int has_repair);

/* A range of the file of a region (PC_MEDIUM_FILE) whose blocks are waited for. Each that was taken is ended
 * once. What is not ended give_up_ns after it was asked for is given up: its id is not known any more. */
struct pc_file_read {
    uint64_t id;
    uint64_t region;
    uint64_t first_block, n_blocks;
    uint32_t urgent;           /* 1: a thread is stopped there */
    uint32_t reserved;
};
/* Takes the next one, those that are urgent first; adjacent ones are one, up to PC_FILE_READ_BLOCKS. 1, or 0
 * where there is none. Any thread. */
int pc_engine_file_next(pc_engine *engine, int only_urgent, struct pc_file_read *out);
/* The next bytes of it: whole blocks. They are present from here on, and who waits for them goes on.
 * PC_ERR_NO_REGION: it was given up. */
int pc_engine_file_fill(pc_engine *engine, uint64_t id, const void *bytes, uint64_t n_bytes);
/* No more of it comes. What is missing fails with error; text says why, for people. */
int pc_engine_file_end(pc_engine *engine, uint64_t id, int error, const char *text);

/* Connections to a peer are made and authenticated by the caller; the engine owns fd from here.
 * One peer needs several: pc_engine_peer_lanes of them, lane 0 .. lanes-1. */
int pc_engine_peer_lanes(pc_engine *engine);
int pc_engine_add_peer(pc_engine *engine, uint64_t server_id, int lane, int fd);
/* Ends a search for the peer. PC_ERR_HOME_LOST: it is lost for good, as the registry says; what waits
 * for it goes elsewhere, or fails. PC_ERR_TIMEOUT: it lives, and is not reached; what waits for it goes
 * on waiting, until its own deadline, and it is searched anew. Another error: what waits fails with it. */
int pc_engine_peer_lost(pc_engine *engine, uint64_t server_id, int error);
/* The peer is not reached for so long, and why: for the messages of those who wait for it in vain. */
int pc_engine_peer_unreached(pc_engine *engine, uint64_t server_id, uint64_t for_ns,
                             const char *cause);
/* A connection that somebody else made to us and that passed authentication. */
int pc_engine_serve(pc_engine *engine, uint64_t server_id, int fd);

/* The region is freed: no new leases; it goes when the last lease does (PC_EVENT_REGION_IDLE).
 * With force = 1 it goes now, also where it is the home. */
int pc_engine_retire(pc_engine *engine, uint64_t region, int force);

/* Old blocks that a reader of this version of the region, or of a newer one, needs are dropped last:
 * when the budgets for the history are full and hold nothing else. UINT64_MAX: none are. One floor for
 * each region, the last one said; it may come before the region does. It ends with the region, and
 * with the engine: who wants it after a restart says it again, among the options. */
int pc_engine_retain(pc_engine *engine, uint64_t region, uint64_t version);

struct pc_engine_stats {
    uint64_t regions, generations, mappings, clients, served_connections, peer_connections;
    uint64_t faults, faults_failed, faults_waiting;
    uint64_t fault_wait_ns;            /* of all faults together, those that wait now too */
    uint64_t fetch_requests, fetch_retries, fetch_failed, fetches_in_flight;
    uint64_t blocks_fetched, bytes_received, bytes_sent, blocks_served;
    uint64_t zero_blocks, local_blocks;
    uint64_t prefetch_requests, prefetched_blocks;
    uint64_t home_bytes, cached_bytes; /* memory. home: also of bases that are mapped here still */
    uint64_t disk_bytes;               /* the same of homes on disk */
    uint64_t bad_messages, reattached;
    uint64_t advances, forks;          /* generations moved to a newer version in place; beside it */
    uint64_t layers, layer_bytes;      /* staged or published, not applied yet */
    uint64_t retained_layers, retained_bytes; /* of this node's commits, beside the home's copy */
    uint64_t commits_staged, commits_published, commits_applied, commits_dropped;
    uint64_t history_records, history_bytes, history_disk_bytes, history_expired;
    uint64_t history_retained_bytes;   /* old blocks that pc_engine_retain holds */
    uint64_t history_retained_expired; /* such records that had to go all the same */
    uint64_t redirected_blocks;        /* as home: that others were sent elsewhere for */
    uint64_t redirect_misses;          /* blocks that a peer was asked for and did not have */
    uint64_t peer_blocks_served, peer_blocks_fetched; /* by, from, servers that are not their home */
    uint64_t evicted_blocks, refetched_blocks; /* refetched: soon after they were evicted */
    uint64_t degraded_blocks, mirror_blocks; /* made by others of a group; of a mirror, by choice */
    uint64_t hedges, hedges_won;       /* another was asked besides, who was late; and was faster */
    uint64_t rows_served, rows_fetched, opens; /* opens: by processes of this node */
    uint64_t disk_cached_bytes;        /* blocks that were evicted, and are on disk */
    uint64_t disk_cache_reads, disk_cache_writes; /* blocks that came from there, and went there */
    uint64_t file_reads, file_blocks;  /* ranges of files that were read, and blocks that came from them */
    uint64_t damaged_blocks;           /* of homes of an earlier session: that do not have their checksum */
};
/* Whether a page server could have a cache of so many bytes in that directory; else why not. */
int pc_disk_cache_check(const char *directory, uint64_t bytes);
int pc_engine_get_stats(pc_engine *engine, struct pc_engine_stats *out);

struct pc_region_stats {
    uint64_t region, version, length_bytes; /* version: the newest that is known here */
    uint64_t is_home, mappings, generations, oldest_version; /* oldest: that the home can serve */
    uint64_t leaves_home; /* 1: it was the home; replies on their way still read from it */
    uint64_t present_blocks, fetched_blocks, touched_blocks;
    /* By faults whose page is chosen by use: blocks that they asked for, and how many of these were
     * touched, as estimated. trip_blocks: how many blocks a round trip to the home costs, as faults
     * weigh it; 0: there were none. reads: opens, and others' requests; idle_ns: since the last. */
    uint64_t fault_fetched_blocks, fault_touched_blocks, fault_trip_blocks, home_bytes, reads, idle_ns;
    uint64_t disk_bytes; /* of a home on disk, as home_bytes */
    uint64_t faults, fault_wait_ns; /* that had to wait for blocks; how long, those that wait now too */
};
/* Returns the number of regions known here (which may exceed capacity). */
int64_t pc_engine_region_stats(pc_engine *engine, struct pc_region_stats *out, size_t capacity);
/* A client of a process of this node. pid 0: of a foreign namespace. faults: that had to wait for blocks, and
 * wait no more; how long they have waited, together. */
struct pc_process_waits {
    uint64_t client, pid, faults, fault_wait_ns;
};
/* Returns the number of clients (which may exceed capacity). One whose process has ended is none. */
int64_t pc_engine_process_waits(pc_engine *engine, struct pc_process_waits *out, size_t capacity);
enum pc_block_set { PC_BLOCKS_PRESENT = 0, PC_BLOCKS_FETCHED = 1, PC_BLOCKS_TOUCHED = 2 };
/* How many blocks of the set fall in each of n_buckets equal parts of the region. */
int pc_engine_histogram(pc_engine *engine, uint64_t region, int which, uint32_t *buckets,
                        size_t n_buckets);

/* ------------------------------------------------------------------ keeper */

/* Holds descriptors for the page server, and nothing else. listen_name is the socket (as
 * pc_engine_options.socket_name) on which page servers find it. Returns when watched_pid (the
 * raylet) ends, after 3 s at most in which connected page servers may end, when told to quit, or
 * when no page server has been connected for orphan_timeout_ns. */
int pc_keeper_run(const char *listen_name, int watched_pid, uint64_t orphan_timeout_ns);
/* The same, in place of one that died while its page server lives: until that has given it all there
 * is, a server that lists it is told that it is only a part (PC_ERR_HOME_LOST). */
int pc_keeper_run_part(const char *listen_name, int watched_pid, uint64_t orphan_timeout_ns);
/* Connects to the keeper; *fd for pc_engine_options.keeper_fd. PC_ERR_NO_SERVER: nobody has listened
 * there within the time. PC_ERR_TIMEOUT: one lives, and took no connection. */
int pc_keeper_connect(const char *listen_name, uint64_t timeout_ns, int *fd);
/* The same, and where nobody listens PC_ERR_NO_SERVER at once. */
int pc_keeper_find(const char *listen_name, uint64_t timeout_ns, int *fd);
int pc_keeper_quit(int fd);
/* Gives a keeper, before any engine has it, the file of a home of an earlier session: as a page server would
 * have, for the next one. Its versions before `version` are not kept. home->fd stays the caller's. */
int pc_keeper_put_home(int keeper_fd, uint64_t region, const struct pc_home_file *home);

/* ------------------------------------------------------- building in place */

/* An allocator inside [address, address + length), which somebody has mapped read-write: blocks on
 * 16-byte boundaries, those of 4 KiB and more on block boundaries. It grows upwards and touches
 * nothing that it has not handed out; what it knows about its blocks lies elsewhere. */
typedef struct pc_arena pc_arena;
int pc_arena_open(uint64_t address, uint64_t length_bytes, pc_arena **out);
/* From here on allocations fail and frees do nothing; the memory of freed blocks goes back. Its
 * range stays known, so that late frees are recognised. Call it while the range is writable. */
int pc_arena_close(pc_arena *arena);
/* Forgets the range, and frees the arena: no other call may have it. Later frees of its blocks are
 * still nothing where the range lies in the global address space. */
int pc_arena_drop(pc_arena *arena);
/* The arena, open or closed, that holds the address, or NULL. */
pc_arena *pc_arena_find(const void *pointer);
/* Bytes from the range's start to the end of what was ever handed out. */
uint64_t pc_arena_used_bytes(pc_arena *arena);

/* As those of the C library: NULL with ENOMEM where the arena is full or closed. Freeing what is not
 * a block in use ends the process. */
void *pc_malloc(pc_arena *arena, size_t n_bytes);
void *pc_calloc(pc_arena *arena, size_t n_items, size_t item_bytes);
void *pc_realloc(pc_arena *arena, void *pointer, size_t n_bytes);
void *pc_aligned_alloc(pc_arena *arena, size_t alignment, size_t n_bytes);
void pc_free(pc_arena *arena, void *pointer);
size_t pc_usable_size(pc_arena *arena, const void *pointer);

/* Sets this thread's current arena, NULL for none, and returns the previous one. */
pc_arena *pc_arena_enter(pc_arena *arena);
/* For libraries that take an allocator: the current arena, or the process's malloc where there is
 * none. Blocks of either kind may be freed on any thread at any time. */
void *pc_current_malloc(size_t n_bytes);
void *pc_current_calloc(size_t n_items, size_t item_bytes);
void *pc_current_realloc(void *pointer, size_t n_bytes);
void *pc_current_aligned_alloc(size_t alignment, size_t n_bytes);
void pc_current_free(void *pointer);

/* For those that take none: points the imports of a loaded library (malloc and its kin; those of
 * the C++ library too where it needs that) at the functions above, for as long as it is loaded.
 * Returns how many there are; *path is the library's. PC_ERR_RANGE: it is not loaded; PC_ERR_DENIED:
 * it must not be, and the message says why. */
int pc_shim_patch(const char *name, char *path, size_t path_capacity);

/* A PyDataMem_Handler (NEP 49) over an arena. It, and the arena, must live until the last array made
 * with it is gone. NULL: no memory. */
void *pc_numpy_handler_new(pc_arena *arena);
void pc_numpy_handler_free(void *handler);

/* ------------------------------------------------------------------ rings */

enum pc_dtype {
    PC_F16 = 0, PC_BF16 = 1, PC_F32 = 2, PC_F64 = 3, PC_I32 = 4, PC_I64 = 5, PC_BYTES = 6
};
/* MEAN is of floats. OR is of PC_BYTES. */
enum pc_op {
    PC_OP_SUM = 0, PC_OP_PROD = 1, PC_OP_MIN = 2, PC_OP_MAX = 3, PC_OP_MEAN = 4, PC_OP_OR = 5
};
enum pc_ring_kind {
    PC_RING_ALLREDUCE = 0,     /* in, out: n elements */
    PC_RING_REDUCE_SCATTER = 1,/* in: n elements; out: room for n, of which this member's segment is
                                  the result, elements n * rank / members to n * (rank + 1) / members */
    PC_RING_ALL_GATHER = 2,    /* out: n elements, of which this member's segment (as above; n is a
                                  multiple of the members) is there; in is not looked at */
    PC_RING_BROADCAST = 3,     /* in, of the root: n elements; out, of the others */
    PC_RING_BARRIER = 4,
    PC_RING_LAST = 5
};
enum { PC_RING_DIMS = 8, PC_RING_PARTNERS = 34 };

/* What a member asks for: all must ask for the same, before anything moves. */
struct pc_ring_call {
    uint32_t kind;             /* enum pc_ring_kind */
    uint32_t dtype;
    uint32_t op;
    uint32_t root;             /* of a broadcast */
    uint32_t n_dims;           /* of the array; elements are counted by the caller */
    uint32_t reserved;
    uint64_t dims[PC_RING_DIMS];
};
/* Why the last call failed. PC_ERR_MEMBER: `member` did not answer, or its connection ended: of those
 * around the ring the first one, as far as partners said so before they closed.
 * PC_ERR_MISMATCH: `member` asked for `call`, and `other` for `other_call`. */
struct pc_ring_fault {
    int32_t err;
    uint32_t member;
    uint32_t other;
    uint32_t is_silent;        /* the connection was there, and nothing came */
    struct pc_ring_call call;
    struct pc_ring_call other_call;
};
struct pc_ring_options {
    uint32_t position;         /* in the ring; the next one's is one more */
    uint32_t n_members;
    uint32_t n_lanes;          /* connections to each neighbour; each has a thread */
    uint32_t n_partner_fds;
    const uint32_t *ranks;     /* by position: the numbers that callers know members by */
    uint64_t small_bytes;      /* arrays up to that go by recursive doubling */
    const int *next_fds;       /* connected sockets to the next member, by lane; NULL: none */
    const int *previous_fds;   /* from the one before, by lane; NULL: none */
    const int *partner_fds;    /* to pc_ring_partners, in its order */
};

typedef struct pc_ring pc_ring;

/* Positions with which a position exchanges small arrays and notices, its neighbours among them,
 * ascending; room for PC_RING_PARTNERS. */
int pc_ring_partners(uint32_t position, uint32_t n_members, uint32_t *out);
/* Takes the sockets: they are closed with the ring, and also where this fails, whatever the reason.
 * A ring of one member has none. A child of fork has none of the ring: they are closed there at
 * once, and calls are PC_ERR_FORKED. */
int pc_ring_open(const struct pc_ring_options *options, pc_ring **out);
/* One collective operation; all members make the same calls in the same order. timeout_ns: without
 * any progress. A float's sum is added up in an order that depends on positions, ranks and the size
 * alone: every member has the same bits, on every run.
 * After PC_ERR_MISMATCH nothing has moved, at no member, and the ring can go on. After any other
 * failure the ring is broken, and so are the others' when they notice. */
int pc_ring_run(pc_ring *ring, const struct pc_ring_call *call, const void *in, void *out,
                uint64_t n_elements, uint64_t timeout_ns);
/* Sends bytes to the next member while as many as it said come from the one before. First the
 * lengths: *in_bytes gets that of the one before. */
int pc_ring_swap_sizes(pc_ring *ring, uint64_t out_bytes, uint64_t *in_bytes, uint64_t timeout_ns);
int pc_ring_swap(pc_ring *ring, const void *out, uint64_t out_bytes, void *in, uint64_t in_bytes,
                 uint64_t timeout_ns);
/* What the last failed call of this ring ran into. */
int pc_ring_fault(pc_ring *ring, struct pc_ring_fault *out);
/* Calls that run, and those that come, end with PC_ERR_CLOSED. Frees nothing. Any thread. */
int pc_ring_shut(pc_ring *ring);
/* No call may run, or begin. */
int pc_ring_close(pc_ring *ring);
/* out[i] = a[i] op b[i], in this process; out may be a or b. Aligned to their elements. A mean is a
 * sum. PC_ERR_RANGE: no such dtype or op. */
int pc_reduce(int dtype, int op, void *out, const void *a, const void *b, uint64_t n_elements);

/* cdef-end */
#include "pagecache_kernels.h"
#include "pagecache_match.h"

#define PC_BLOCK_SHIFT 12
#define PC_BLOCK_BYTES 4096u
#define PC_EXTENT_BYTES (64ull << 20)
#define PC_FILE_READ_BLOCKS 2048u /* 8 MiB */
#define PC_EXTENT_BLOCKS (PC_EXTENT_BYTES >> PC_BLOCK_SHIFT)
#ifndef PC_WINDOW_BEGIN /* builds under TSan move it: its shadow memory lies there */
#define PC_WINDOW_BEGIN 0x110000000000ull
#define PC_WINDOW_END 0x290000000000ull
#endif

#endif
