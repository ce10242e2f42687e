/* store.h - what this node has of the regions: generations that its processes map, homes, and the layers
 * of commits on their way into those.
 */
#ifndef PC_STORE_H
#define PC_STORE_H

#include "engine/core/core.h"

/* region.c */
/* Nothing refers to it any more: frees what this room has of it. When the engine stops, the keeper keeps
 * what it holds: the caller ends engine->keeping first. */
void pc__region_end(struct pc_engine *engine, struct pc__region *region);
bool pc__region_info_valid(const struct pc_region_info *info);
int pc__region_seal(struct pc_engine *engine, struct pc__region *region, bool built_in_place);
/* Under region.lock: its base is a generation too, if processes may map it as it is. */
int pc__region_home_generation(struct pc_engine *engine, struct pc__region *region);
/* Takes back one memfd after a restart, and, when all are there, what they are to each other. */
int pc__region_adopt(void *engine, const struct pc__kept *kept, int fd);
void pc__regions_adopted(struct pc_engine *engine);
/* The worker, with nothing else to do for the region: looks at some blocks of a base of an earlier session. 1: there
 * is more to do; 0: there is not; negative. */
int pc__region_look(struct pc_engine *engine, struct pc__region *region, struct pc__home *home);
void pc__region_lease_dropped(struct pc_engine *engine, struct pc__region *region);
/* No process maps, unattached, what was adopted: from here on it may move, and go. */
void pc__regions_settled(struct pc_engine *engine);

/* generation.c; under region.lock */
int pc__generation_map(const struct pc_engine *engine, struct pc__generation *generation);
/* The one that holds exactly this version: made, moved or forked if need be. PC__WAIT: it was, or
 * is to be, asked for; *ask says what. */
#define PC__WAIT 1
struct pc__ask {
    enum pc_event_kind kind;       /* NONE: the worker is at it, or the question is out */
    uint64_t from_version, version;
};
int pc__generation_for(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                       bool caught_up, struct pc__generation **out, struct pc__ask *ask);
struct pc__generation *pc__generation_by_inode(struct pc__region *region, uint64_t inode);
/* Whether a lease needs it to stay as it is, if it were to go to that version. */
bool pc__generation_leased(const struct pc__generation *generation, uint64_t to_version);
void pc__generation_is_at(struct pc__generation *generation, uint64_t version);
/* A lease on one of them is gone: drops those that are of no more use. */
void pc__generations_trim(struct pc_engine *engine, struct pc__region *region);
void pc__generation_drop(struct pc_engine *engine, struct pc__region *region,
                         struct pc__generation *generation);

/* home.c */
int pc__home_make(struct pc_engine *engine, struct pc__region *region, enum pc_medium medium,
                  const struct pc_segment *segments, size_t n_segments, int *fd);
struct pc__home *pc__home_new(void);
void pc__home_free(struct pc_engine *engine, struct pc__home *home, uint64_t length_bytes);
/* Owns fd in every case. */
int pc__store_open(struct pc__store *store, int fd, uint64_t inode, uint64_t length_bytes,
                   uint64_t version, bool on_disk);
void pc__store_close(struct pc_engine *engine, struct pc__store *store, uint64_t length_bytes);
/* Of a store on disk, before and after it is written to: PC_OK, or the disk refused some of it. */
int pc__store_check(struct pc__region *region, struct pc__store *store);
/* Whether a lease needs the base to stay as it is, if it were to go to that version. */
bool pc__home_base_leased(const struct pc_engine *engine, const struct pc__region *region,
                          uint64_t to_version);
struct pc__generation *pc__home_base_generation(const struct pc__region *region); /* or NULL */
/* The worker, with nothing else to do for the region: takes the next of a new base's blocks into this
 * process's page table, which else costs the first answer of each 64 KiB a page fault. True: there
 * are more. */
#define PC__WARM_LEAST_BLOCKS 1024u /* a base of less is not worth a turn */
bool pc__home_warm(struct pc__home *home);
/* Blocks that were allocated because a process read holes of the base: how many there are; and the
 * worker gives them back. Both under region.lock. A reader sees zeros before and after. */
uint64_t pc__home_read_holes(const struct pc__home *home);
int pc__home_punch_holes(struct pc__home *home);
/* Around looking at bytes that resolve gave out: from under region.lock until release. The home stays
 * until then, also where it has moved away since. */
unsigned pc__home_hold(struct pc__home *home);
bool pc__home_is_read(const struct pc__home *home); /* by anybody; under region.lock */
/* The worker, under region.lock: whether all readers of this epoch and of those before it have left.
 * No epoch begins before the last but one is empty, so there are never readers of more than two. */
bool pc__home_left(struct pc__home *home, uint64_t epoch);
void pc__home_release(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                      unsigned held);
/* The worker waits for readers or for the keeper. They queue the region then; no other thread needs to. */
bool pc__home_is_held_up(const struct pc__home *home);
/* It has more to apply than it should have: writers wait. */
bool pc__home_is_behind(const struct pc__home *home);
/* Where the blocks of a version are. Describes up to n blocks from block on that are alike. */
enum pc__home_kind {
    PC__HOME_ZEROS, PC__HOME_MEMORY, PC__HOME_MIXED, PC__HOME_HISTORY,
    PC__HOME_DISK,                 /* a file on disk has it: one block at a time */
    PC__HOME_DELTA,                /* a pending layer has what it is to be XORed with */
    PC__HOME_LOST,                 /* no server had it when the home was rebuilt, and none of its versions
                                      up to this one wrote it */
    PC__HOME_FILE                  /* the region's file has it: no version up to this one wrote it */
};
struct pc__home_part {
    enum pc__home_kind kind;
    uint64_t n_blocks;
    const uint8_t *bytes;          /* MEMORY */
    int memfd;                     /* MEMORY: has it at offset; or -1 */
    uint64_t offset;
};
struct pc__home_part pc__home_resolve(struct pc_engine *engine, const struct pc__region *region,
                                      const struct pc__home *home, uint64_t version,
                                      uint64_t block, uint64_t n);
/* Whether what was resolved is what the version was. To be asked after resolving, still locked:
 * PC_OK, PC_ERR_NO_VERSION (none such, or not heard of yet) or PC_ERR_EXPIRED. */
int pc__home_knows(const struct pc_engine *engine, const struct pc__region *region,
                   uint64_t version);
/* Under region.lock: the first of these blocks that is LOST because it is damaged (engine/checks), unless pending
 * layers have it; or block + n. The registry does not know of those. */
uint64_t pc__home_damaged(const struct pc__home *home, uint64_t block, uint64_t n);
/* One block of kind MIXED, HISTORY, DISK or DELTA, composed. Needs no lock, while held. */
int pc__home_compose(struct pc_engine *engine, struct pc__region *region,
                     const struct pc__home *home, uint64_t version, enum pc__home_kind kind,
                     uint64_t block, uint8_t *out);

/* Blocks that are each of kind DISK, in one go. Likewise. PC__COLD: it would have to wait for the disk, and
 * is not to. PC_ERR_HOME_LOST: blocks of a base of an earlier session are damaged: they are LOST from then on. */
#define PC__COLD 2
int pc__home_read_disk(struct pc_engine *engine, struct pc__region *region, const struct pc__home *home,
                       uint64_t version, uint64_t block, uint64_t n, uint8_t *out, bool waits);

/* rows.c: at the home. Status, or PC__WAIT: it has not heard of the version yet. */
int pc__rows_copy(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                  const struct pc__data_rows *rows, const uint64_t *offsets, uint8_t *out);

/* lost.c: the blocks of a home that are not there at every version, as they are noted behind its base:
 * those of a rebuilt home that no server had, and those that are in the region's file. */
struct pc__lost {
    struct pc__blockset blocks; /* that have a note */
    uint64_t *first_versions;   /* the notes: of each of `blocks`, the first version that has it, */
    uint64_t notes_bytes;       /* or PC__LOST_YET */
    bool in_file;               /* before that version a block is in the file, unless PC__WAS_LOST says
                                   otherwise, and at all versions where it has no note */
    int fd;                     /* the base's, on disk, which the notes are written to; -1: they are mapped */
};

#define PC__LOST_YET UINT64_MAX
#define PC__WAS_LOST (1ull << 63) /* in the note of a region that is in a file: before it, the block is lost */

/* How much longer the base's memfd is for the notes: whole blocks. */
uint64_t pc__lost_notes_bytes(uint64_t length_bytes);
/* Of a base with notes. With runs, those are noted as lost; else what is noted is read. in_file: as of
 * pc__lost. */
int pc__lost_open(const struct pc__store *base, uint64_t length_bytes, bool in_file,
                  const struct pc_run *runs, size_t n_runs, struct pc__lost **out);
void pc__lost_close(struct pc__lost *lost); /* NULL is none */
/* Whether the version has no such block, and for how many from there on, *n at most, that is alike. Kind
 * (or NULL): PC__HOME_LOST or PC__HOME_FILE, where it has none. */
bool pc__lost_at(const struct pc__lost *lost, uint64_t version, uint64_t block, uint64_t *n,
                 enum pc__home_kind *kind);
/* From this version on these blocks, or the layer's, are there. As often as one likes. */
int pc__lost_found(struct pc__lost *lost, const struct pc_run *runs, size_t n_runs, uint64_t version);
int pc__lost_written(struct pc__lost *lost, const struct pc__layer *layer, uint64_t version);

/* rebuild.c: a region gets another home. */
/* Takes back what was prepared; owns fd. */
int pc__rebuild_adopt(struct pc_engine *engine, struct pc__region *region,
                      const struct pc__kept *kept, int fd);
/* Under region.lock, where there is no home: what was prepared is it from now on. */
int pc__rebuild_become_home(struct pc_engine *engine, struct pc__region *region, uint64_t term);
/* Of what is prepared, whose home was not taken over: it goes, with the history that came for it. NULL: none. */
void pc__rebuild_end(struct pc_engine *engine, struct pc__region *region, struct pc__home *prepared);
/* Under region.lock: fd is of what is being prepared, and not of an attempt before this one, whose
 * caller does not know yet that nobody waits for it. */
int pc__rebuild_is_filled_by(const struct pc__region *region, int fd);
/* How many blocks, or negative: they must be sorted, disjoint, and lie in the region. */
int64_t pc__rebuild_check_runs(const struct pc_run *runs, size_t n_runs, uint64_t n_blocks);
/* Returns the number of runs, which may exceed capacity. */
int64_t pc__rebuild_runs_of(const struct pc__blockset *blocks, struct pc_run *runs, size_t capacity);
int pc__rebuild_write(int fd, const void *bytes, uint64_t n_bytes, uint64_t offset);
/* Stages a layer of these blocks of a version; write puts them into the file, one after the other from
 * offset on. Returns the layer's bytes. */
typedef int pc__blocks_write(void *arg, const struct pc_run *runs, size_t n_runs, int fd,
                             uint64_t offset);
int64_t pc__rebuild_stage(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                          uint64_t commit_id, const struct pc_run *runs, size_t n_runs,
                          pc__blocks_write *write, void *arg);

/* move.c: a home that lives moves to another server. */
/* Under publish_lock and region.lock, which has a home: it is not the home any more. What its node has
 * mapped of it stays. The caller releases who waits for it. */
void pc__move_leave(struct pc_engine *engine, struct pc__region *region);
/* After that, under no lock: who waits for the home tries elsewhere. */
void pc__move_left(struct pc_engine *engine, struct pc__region *region);
/* Under region.lock: the home here is the home in that term, a later one, and the keeper is told so. */
void pc__move_stays(struct pc_engine *engine, struct pc__region *region, uint64_t term);
/* The worker: frees a home that has moved away, if nobody looks at it any more. */
void pc__move_end_former(struct pc_engine *engine, struct pc__region *region);
/* The worker, under region.lock: the base of a home that has moved away meanwhile is at one version. */
void pc__move_base_is_whole(struct pc_engine *engine, struct pc__region *region,
                            struct pc__home *home, uint64_t version);
/* The history of what is prepared through fd ends before this version, or has nothing. Waits for the
 * worker. */
int pc__move_end_history(struct pc_engine *engine, struct pc__region *region, int fd, uint64_t version);
/* Takes back a base that a home had left before a restart; owns fd. */
int pc__move_adopt_base(struct pc_engine *engine, struct pc__region *region,
                        const struct pc__kept *kept, int fd);

/* region.c: of a base that is adopted, whether blocks of it are lost. */
int pc__region_adopt_notes(struct pc_engine *engine, struct pc__region *region, struct pc__home *home,
                           const struct pc__kept *kept);
/* And whether it comes from an earlier session, and was not looked at in full. */
int pc__region_adopt_unchecked(struct pc_engine *engine, struct pc__home *home, const struct pc__kept *kept);

/* parity.c: layers that are deltas, or are made of several. */
/* A step of the worker: 1: the next layer of the home, if there is one, is no delta, and the keeper has it.
 * 0: the home has moved away. PC__BUSY: the keeper has not said so yet, or nobody that it is in a synced file.
 * Negative: to be tried again. */
int pc__delta_make_whole(struct pc_engine *engine, struct pc__region *region, struct pc__home *home);
/* Under region.lock: it was BUSY for want of an answer to NEED_DURABLE, which may have to be asked for again. */
bool pc__delta_waits(const struct pc__region *region);

/* spill.c: layers of homes that are on disk. */
/* A file for one that a process of this node stages, or -1 in *fd: its home is not on this node's disk. */
int pc__layer_file_for(struct pc_engine *engine, uint64_t region, uint64_t bytes, int *fd);
/* Whether a layer that was staged is in such a file, which has checksums behind the layer. */
bool pc__layer_is_in_file(int fd, uint64_t bytes);
/* A copy on disk takes the place of one that is not staged yet. */
int pc__layer_spill(struct pc_engine *engine, struct pc__layer **layer);

/* layer.c */
int pc__layer_keep(struct pc_engine *engine, const struct pc__layer *layer);
/* Owns fd, as the next one. owner: pc__layer_owner of the client, or 0. */
int pc__layer_stage(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes,
                    int fd, uint64_t owner);
/* One that this server has made of its own blocks, and so not large: a disk that is full keeps it in memory.
 * What makes room there, a home that moves away, needs it. */
int pc__layer_stage_made(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes,
                         int fd);
/* It is staged already. Should the keeper not have been given it then, it is now. It leaves the staged ones
 * under publish_lock only, so its record does not come after its end. */
int pc__layer_keep_again(struct pc_engine *engine, uint64_t region, uint64_t commit_id);
int pc__layer_adopt(struct pc_engine *engine, const struct pc__kept *kept, int fd);
int pc__layer_publish(struct pc_engine *engine, uint64_t region, uint64_t commit_id,
                      uint64_t version);
void pc__layer_drop_staged(struct pc_engine *engine, uint64_t region, uint64_t commit_id);
/* Their writer has ended: their outcome is asked for. */
void pc__layers_orphan(struct pc_engine *engine, uint64_t owner);
/* The region is gone: nobody will ask for them, nor say what becomes of them. */
void pc__layers_forget(struct pc_engine *engine, uint64_t region);
void pc__layers_drop_published(struct pc_engine *engine, uint64_t region);
struct pc__layer *pc__layer_get(struct pc_engine *engine, uint64_t layer_id); /* +1 ref, or NULL */
uint64_t pc__layers_deadline(struct pc__loop *loop);
void pc__layers_tick(struct pc__loop *loop, uint64_t now_ns);

/* retained.c: layers of this node's commits whose homes are elsewhere. */
#define PC__RETAINED_BYTES (256ull << 20) /* at most; a quarter of the cache's budget, where that is less */
/* Of them only those count that the region's homes have acknowledged (pc_engine_settled); others stay.
 * Takes over the caller's reference to what was staged, and the keeper's. publish_lock is held. */
void pc__retained_add(struct pc_engine *engine, struct pc__layer *layer, uint64_t version);
/* Asks what the homes have acknowledged, where that is due: engine.ask_settled_at_ns. engine.lock is held. */
void pc__retained_request(struct pc_engine *engine, uint64_t now_ns);
void pc__retained_forget(struct pc_engine *engine, uint64_t region);
/* What the version's commit wrote: +1 ref, or NULL. */
struct pc__layer *pc__retained_at(struct pc_engine *engine, uint64_t region, uint64_t version);
/* Returns how many there are, which may exceed capacity. */
size_t pc__retained_versions(struct pc_engine *engine, uint64_t region, uint64_t *versions,
                             size_t capacity);
void pc__retained_close(struct pc_engine *engine);

/* apply.c */
/* 1 and less are a step's results; BUSY: readers or the keeper hold it up, and the last of those, or
 * what the keeper heard, queues the region again. */
#define PC__BUSY 2
#define PC__PENDING_MOST_BYTES (256ull << 20) /* published and not applied: writers wait beyond it */
int pc__worker_start(struct pc_engine *engine);
void pc__worker_stop(struct pc_engine *engine);
void pc__worker_free(struct pc_engine *engine);
/* Has the worker run it, between two regions, and waits for that: what it returned, or PC_ERR_CLOSED. Of
 * no loop, under no lock. */
int pc__worker_do(struct pc_engine *engine, int (*run)(void *arg), void *arg);

#endif
