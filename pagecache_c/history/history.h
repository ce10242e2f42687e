/* history.h - what commits replaced: the old blocks of every region of which this node is the home.
 *
 * When a home applies commit n + 1 to region R, the old content (that of version n) of the blocks
 * that the commit replaces is appended as record (R, n). Block b of version v, at a home whose base
 * is version A > v, is in the first record n of [v, A) that has b; if none has it, in the base.
 *
 * What can be read. Version v can be read against a base of version A if every one of the records
 * v, v + 1, .. A - 1 is there. So nothing has to remember what was dropped, and no crash can bring
 * back a version of which a part is gone: the records that are there are the proof themselves.
 * Hence every commit on a region must leave a record: also one that keeps nothing (skip).
 *
 * Crash. Once append or skip has returned, the record is in a memfd or file that the keeper holds.
 * A home may touch its base only then, and the base must be whole (or be made whole again after a
 * restart, from the layer that the keeper holds) before the next record of any region is appended.
 * Then, after a kill at any moment: a record that is there makes append do nothing, and the old
 * blocks in it are the true ones; one that is not there means that the base was not touched.
 *
 * Threads: append and skip by one thread at a time; everything else by any. One mutex, a leaf: no
 * callback is called under it, and no file is read or written under it.
 */
#ifndef PC_HISTORY_H
#define PC_HISTORY_H

#include "pagecache.h"

#include <stdbool.h>

#define PC__HISTORY_MAX_RECORDS 65536u

struct pc__history;

struct pc__history_options {
    uint64_t memory_bytes;     /* of memfds; at least 64 KiB are taken */
    uint64_t disk_bytes;       /* of anonymous files; 0: none */
    const char *directory;     /* for them; NULL: none */
    uint64_t max_records;      /* 0: PC__HISTORY_MAX_RECORDS */
    void *arg;                 /* of the callbacks. They are called by the thread in append, skip,
                                  forget, adopt or adopted, with no lock held; each may be NULL */
    /* A segment is to outlive this process; fd stays the history's. inode: its pc__file_id. */
    void (*keep)(void *arg, int fd, uint64_t inode, uint64_t bytes, bool is_disk);
    void (*drop)(void *arg, uint64_t inode);
    void (*log)(void *arg, const char *text); /* one line, for the log */
};

struct pc__history_stats {
    uint64_t records;
    uint64_t segments;         /* descriptors in use */
    uint64_t memory_bytes, disk_bytes;
    uint64_t expired;          /* records dropped for lack of room since open */
    uint64_t skipped;          /* commits of which nothing was kept since open */
    uint64_t retained_bytes;   /* old blocks of records that are retained */
    uint64_t retained_expired; /* such records, of expired */
};

int pc__history_open(const struct pc__history_options *options, struct pc__history **out);
/* Closes its own descriptors; what the keeper holds stays there. No call may be under way. */
void pc__history_close(struct pc__history *history);

/* After a restart: once for each kept segment, in any order, before anything else. Owns fd.
 * PC_ERR_PROTOCOL: it is none of ours; drop() was called for it, and the rest goes on. */
int pc__history_adopt(struct pc__history *history, int fd);
/* All were adopted: finds the records. What a crash left in part is dropped. */
int pc__history_adopted(struct pc__history *history);
/* The regions that have records. Returns their number, which may exceed capacity: for a restarted
 * server, to forget those that it does not know. */
size_t pc__history_regions(struct pc__history *history, uint64_t *regions, size_t capacity);

/* Appends record (region, version): the old blocks of the runs (sorted, disjoint; none at all is
 * fine). read copies n old blocks from block on to out; a value other than 0 from it is returned,
 * and nothing was appended. A version that is not above the region's newest record changes nothing.
 * What is too large for the budgets, or meets a full disk, is skipped: PC_OK too.
 * PC_ERR_NO_MEMORY: not even that could be noted. The base must stay as it is; try again later.
 * PC_ERR_RANGE: the runs are not sorted, or overlap, or are empty. */
int pc__history_append(struct pc__history *history, uint64_t region, uint64_t version,
                       const struct pc_run *runs, size_t n_runs,
                       int (*read)(void *arg, uint64_t block, uint64_t n, uint8_t *out), void *arg);
/* Notes that the old blocks of this version are not kept: it and older ones cannot be read any
 * more. Otherwise as append. */
int pc__history_skip(struct pc__history *history, uint64_t region, uint64_t version);

/* From now on the records of versions >= version of the region are retained: what version, or a newer
 * one, needs. UINT64_MAX: none are; that is how it begins. They spill as others do, and are dropped
 * when the budgets hold nothing else that could go; then oldest first. So memory is bounded, and log()
 * is called once for each call of this whose records go all the same. Ends with forget. It is not
 * noted in the segments. PC_ERR_NO_MEMORY: it is as it was before. */
int pc__history_retain(struct pc__history *history, uint64_t region, uint64_t version);

/* Is record (region, version) there, with its blocks? */
bool pc__history_has(struct pc__history *history, uint64_t region, uint64_t version);
/* Is it, or a newer one of the region, there, with its blocks or skipped? */
bool pc__history_noted(struct pc__history *history, uint64_t region, uint64_t version);
/* The runs of the record, for another home of the region. Returns their number, which may exceed capacity.
 * PC_ERR_EXPIRED: it is not there, or keeps nothing. */
int64_t pc__history_runs(struct pc__history *history, uint64_t region, uint64_t version,
                         struct pc_run *runs, size_t capacity);
/* The oldest version that can be read against a base of version before; before if none older. */
uint64_t pc__history_floor(struct pc__history *history, uint64_t region, uint64_t before);

/* *block: the first one >= from and < limit that a record n of [version, before) has; limit if
 * there is none. PC_ERR_EXPIRED: version is below the floor. */
int pc__history_next(struct pc__history *history, uint64_t region, uint64_t version,
                     uint64_t before, uint64_t from, uint64_t limit, uint64_t *block);
/* 1: copied the block (4 KiB) to out. 0: no record of [version, before) has it (also when version
 * >= before). PC_ERR_EXPIRED: version is below the floor. PC_ERR_SYSTEM: the disk failed. */
int pc__history_read(struct pc__history *history, uint64_t region, uint64_t version,
                     uint64_t before, uint64_t block, uint8_t *out);
/* The same for the blocks [first, first + n), n >= 1, in one pass over the records: block first + i
 * goes to out + i * 4 KiB. found: ceil(n / 64) words; bit i: it was copied (elsewhere out is left as
 * it was). Returns how many were copied, or an error as above (found and out then mean nothing),
 * or PC_ERR_NO_MEMORY. */
int64_t pc__history_read_many(struct pc__history *history, uint64_t region, uint64_t version,
                              uint64_t before, uint64_t first, uint64_t n, uint8_t *out,
                              uint64_t *found);

/* The region is gone. Segments of which nothing is left go at once, others when they age out. Not
 * noted in the segments: after a restart its records may be there again (pc__history_regions). */
void pc__history_forget(struct pc__history *history, uint64_t region);
/* The same, but the region is not gone: what is retained of it from now on stays as it was said. */
void pc__history_drop(struct pc__history *history, uint64_t region);

void pc__history_stats(struct pc__history *history, struct pc__history_stats *out);
/* For audits: what must hold, and does not; or NULL. Takes the lock. */
const char *pc__history_audit(struct pc__history *history);

#endif
