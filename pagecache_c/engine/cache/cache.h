/* cache.h - the node's budget of cached blocks: what is counted, what is evicted, which processes are told. */
#ifndef PC_CACHE_H
#define PC_CACHE_H

#include "engine/core/core.h"
#include "os/process.h"

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
 * were punched by another room; were used (a fault, a read set; the runs are sorted); the first
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
/* For audits. Takes the cache's lock.
 *   used = the sum of blocks over all entries; n_entries = how many are in the table
 *   of each entry: blocks > 0, awaited within blocks, it is in its bucket, and in its generation's list
 *   generations without a lease are listed in the order in which they lost the last one
 * The second is under region.lock too: of each entry of the generation, blocks within generation.present. */
const char *pc__cache_audit(const struct pc_engine *engine);
const char *pc__cache_audit_generation(const struct pc_engine *engine,
                                       struct pc__generation *generation);
/* It ends. Under no lock but perhaps region.lock. */
void pc__cache_forget(struct pc_engine *engine, struct pc__generation *generation);

/* disk_cache.c: what is evicted may be had again from this node's disk. NULL: there is no such cache. */
#define PC__SIZE_CLASSES 4u         /* of requests (pc__rtt_class) */
struct pc__disk_times {            /* how long a request of each size takes; 0: nothing is known */
    _Atomic uint64_t disk_ns[PC__SIZE_CLASSES], peer_ns[PC__SIZE_CLASSES];
    _Atomic uint64_t n_chosen[PC__SIZE_CLASSES];
};
int pc__disk_cache_open(struct pc_engine *engine, uint64_t bytes, struct pc__disk_cache **out);
/* Nobody asks it any more, which is logged: homes have all of it. error PC_OK: the engine stops. */
void pc__disk_cache_leave(struct pc__disk_cache *disk, int error);
uint64_t pc__disk_cache_reads(const struct pc__disk_cache *disk); /* that are waited for */
void pc__disk_cache_close(struct pc__disk_cache *disk);
uint64_t pc__disk_cache_bytes(struct pc__disk_cache *disk); /* that it has */
/* Under region.lock. These blocks of the chunk are present, and about to be punched. */
void pc__disk_cache_put(struct pc__disk_cache *disk, struct pc__generation *generation, uint64_t chunk,
                        uint32_t blocks);
/* They change: the generation moves to another version. */
void pc__disk_cache_removed(struct pc__generation *generation, uint64_t first, uint64_t n);
/* Whether it has the first block; and up to how many of the n are alike in that, at *n. */
bool pc__disk_cache_has(const struct pc__generation *generation, uint64_t first, uint64_t *n);
/* The rest needs no lock. The generation ends. */
void pc__disk_cache_forget(struct pc__generation *generation);
/* The first of the n blocks, as many as a read brings; 0: it has not got them any more. In flight, so that they
 * are of the generation's version. */
uint64_t pc__disk_cache_get(struct pc__disk_cache *disk, const struct pc__generation *generation,
                            uint64_t first, uint64_t n, uint8_t *out);
struct pc__disk_times *pc__disk_cache_times(struct pc__disk_cache *disk);
/* For audits:
 *   a slot has blocks, or some are coming, just if it is of a generation; none is both, and those that are
 *   coming are being written
 *   each slot that is of a generation is found by generation and chunk, so no two are of the same
 *   n_blocks = the sum of blocks over all slots */
const char *pc__disk_cache_audit(struct pc__disk_cache *disk);

/* windows.c: what SIGSEGV processes have unprotected. Under region.lock. */
#define PC__CHUNK_BLOCKS (PC__CHUNK_BYTES / PC_BLOCK_BYTES) /* are evicted together */
struct pc__window_owner {          /* the control page of one client; unmapped with the last user */
    _Atomic uint32_t refs;
    uint64_t number;               /* of the client, on all of its connections: processes of foreign
                                    * namespaces have the same pid here, 0 */
    struct pc__control_page *page;
    struct pc__process process;
};
struct pc__window_user {
    struct pc__link link;          /* of the generation that it maps */
    struct pc__window_owner *owner; /* +1 ref */
    uint64_t address, length_bytes;
    bool is_orphan;                /* its connection is gone, and it is not */
};
struct pc__window_owner *pc__windows_owner(struct pc__control_page *page, uint64_t number,
                                           struct pc__process process);
void pc__windows_owner_put(struct pc__window_owner *owner); /* or NULL */
struct pc__window_user *pc__windows_add(struct pc__generation *generation,
                                        struct pc__window_owner *owner, uint64_t address,
                                        uint64_t length_bytes);
void pc__windows_drop(struct pc__window_user *user); /* or NULL: it has unmapped it */
/* Its connection ended, and its lease stays: so this does too, unless it cannot read there any more. */
void pc__windows_left(struct pc__window_user *user);
/* Of one whose connection ended: it does not map it any more, or has attached it again. */
void pc__windows_unmapped(struct pc__generation *generation, uint64_t number, uint64_t address);
/* Whether such a one reads there: the generation has to stay as it is. */
bool pc__windows_orphaned(struct pc__generation *generation);
void pc__windows_end(struct pc__generation *generation); /* it ends; needs no lock */
/* Tells them that the chunk goes; returns which of its blocks must stay. From then on until _release
 * no process unprotects one of it without asking. */
uint32_t pc__windows_hold(struct pc__generation *generation, uint64_t chunk);
void pc__windows_release(struct pc__generation *generation);
/* How many runs a process may have unprotected under this budget; 0: no budget. */
uint32_t pc__windows_limit(uint64_t cache_bytes);

/* evicted.c: what goes while processes take read sets. Under region.lock. */
void pc__recorders_note(struct pc__generation *generation, uint64_t chunk, uint32_t mask);
void pc__recorder_free(struct pc__recorder *recorder); /* or NULL */

#endif
