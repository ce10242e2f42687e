/* history_segments.h - how the history's records lie in a segment: a memfd, or an anonymous file.
 *
 * A segment: its head; record heads, each followed by its runs, growing up from there; blocks,
 * growing down from the end. So heads take no block each, and blocks are aligned. A spilled
 * segment is the same bytes in a file; the middle, unused, is a hole.
 *
 * The state of a record is stored last. Whoever finds it set finds the record whole: the process
 * died, not the machine, so what was stored before is in the file too. The first head without it
 * ends the segment.
 */
#ifndef PC_HISTORY_SEGMENTS_H
#define PC_HISTORY_SEGMENTS_H

#include "pagecache.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>

#define PC__SEGMENT_MAGIC 0x31545349484c43ull /* "CLHIST1" */
#define PC__RECORD_MAGIC 0x44524352u

enum pc__record_state { PC__RECORD_NONE = 0, PC__RECORD_KEPT = 1, PC__RECORD_SKIPPED = 2 };

struct pc__segment_head {
    uint64_t magic;
    uint64_t capacity_bytes; /* of the whole file */
    uint64_t sequence;       /* ascending in the order of appending; a spilled copy has the same */
    uint64_t is_disk;
};
struct pc__record_head {
    uint32_t magic;
    _Atomic uint32_t state;  /* enum pc__record_state */
    uint64_t region;
    uint64_t version;
    uint64_t n_blocks;
    uint64_t n_runs;         /* struct pc_run follow */
    uint64_t data_offset;    /* of the first block, in the file */
};
static_assert(sizeof(struct pc__segment_head) == 32 && sizeof(struct pc__record_head) == 48,
              "no padding: they are read from files");

/* A descriptor and its map, shared by a segment and the readers that copy from it. */
struct pc__segment_store {
    _Atomic uint32_t refs;
    int fd;
    uint64_t inode;
    uint64_t sequence;
    uint64_t capacity_bytes;
    uint8_t *map;            /* memory: the whole memfd; disk: NULL */
    bool is_disk;
};

/* A run and how many blocks of its record come before it. */
struct pc__placed_run {
    uint64_t first_block, n_blocks, position;
};

/* One record, as it is known in memory. */
struct pc__record {
    struct pc__record *segment_next, *segment_prev; /* of the same segment, if indexed */
    struct pc__history_segment *segment;
    uint64_t region, version;
    uint64_t data_offset;
    uint64_t n_blocks;
    uint64_t min_block, past_block; /* none is outside [min, past) */
    bool is_skipped;
    bool is_retained;        /* set by the index: at or above the floor of its region */
    size_t n_runs;
    struct pc__placed_run runs[];
};

/* Where the blocks of a record come from. */
struct pc__old_blocks {
    int (*read)(void *arg, uint64_t block, uint64_t n, uint8_t *out);
    void *arg;
    bool is_failed;          /* read returned something else than 0 */
};

static inline uint64_t pc__record_head_bytes(uint64_t n_runs)
{
    return sizeof(struct pc__record_head) + n_runs * sizeof(struct pc_run);
}
static inline uint64_t pc__round_to_blocks(uint64_t n_bytes)
{
    return (n_bytes + PC_BLOCK_BYTES - 1) / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}

/* Checks the runs: sorted, disjoint, not empty. NULL (and *error) if they are not, or no memory. */
struct pc__record *pc__record_new(uint64_t region, uint64_t version, const struct pc_run *runs,
                                  size_t n_runs, int *error);
/* Where the block lies in the segment; false if the record does not have it. */
bool pc__record_find(const struct pc__record *record, uint64_t block, uint64_t *offset);
/* First block >= from that the record has; UINT64_MAX if none. */
uint64_t pc__record_next(const struct pc__record *record, uint64_t from);

/* An empty segment with one reference: a mapped memfd, or a file in directory without a name. NULL
 * on failure: pc_last_message() says why. Of a file, bytes [0, begin) and [end, capacity) are
 * allocated, so that a full disk shows at once: *error is then PC_ERR_NO_MEMORY. */
struct pc__segment_store *pc__store_memory(uint64_t capacity_bytes, uint64_t sequence);
struct pc__segment_store *pc__store_disk(const char *directory, uint64_t capacity_bytes,
                                 uint64_t sequence, uint64_t begin, uint64_t end, int *error);
/* Takes fd, also on failure. *error is PC_ERR_PROTOCOL if it is no segment. */
struct pc__segment_store *pc__store_adopt(int fd, uint64_t *inode, int *error);
void pc__store_take(struct pc__segment_store *store);
void pc__store_put(struct pc__segment_store *store);
int pc__store_read(const struct pc__segment_store *store, uint64_t offset, void *out, uint64_t n_bytes);
int pc__store_write(const struct pc__segment_store *store, uint64_t offset, const void *bytes,
                    uint64_t n_bytes);

/* Writes the record into a memory segment: head at head_offset, blocks at record->data_offset.
 * PC_ERR_NO_MEMORY, or what read said (is_failed is then set): nothing of it is left. */
int pc__record_write(const struct pc__segment_store *store, uint64_t head_offset,
                     const struct pc__record *record, struct pc__old_blocks *old);
/* The same into a file. */
int pc__record_write_disk(const struct pc__segment_store *store, uint64_t head_offset,
                          const struct pc__record *record, struct pc__old_blocks *old);
/* Copies [0, begin) and [end, capacity) of a memory segment to a new file. NULL on failure. */
struct pc__segment_store *pc__store_spill(const struct pc__segment_store *from, const char *directory,
                                  uint64_t begin, uint64_t end, int *error);
/* The record whose head is at head_offset and whose blocks end at data_end. NULL: none, or not
 * whole (*error = 0), or *error. */
struct pc__record *pc__record_load(const struct pc__segment_store *store, uint64_t head_offset,
                                   uint64_t data_end, int *error);

#endif
