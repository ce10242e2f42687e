/* wire_data.h - the data protocol: what page servers ask each other, and answer; and how rows lie in memory
 * that a process shares with its page server. See wire.h.
 */
#ifndef PC_WIRE_DATA_H
#define PC_WIRE_DATA_H

#include "pagecache.h"

#include <assert.h>

#define PC__DATA_MAGIC 0x31524c43u /* "CLR1" */
#define PC__DATA_MAX_RUNS 1024u
#define PC__DATA_MAX_BLOCKS 2048u  /* 8 MiB a request */

enum pc__data_type {
    PC__DATA_GET = 1,    /* header, a pc__data_asker, then n_runs packed runs of 8 bytes */
    PC__DATA_BLOCKS = 2, /* header, then (HOLES) a bitmap of ceil(n_blocks/64) words, then
                            (ELSEWHERE) another and, from a home, a pc__data_elsewhere for each of
                            its bits, then the blocks that are in neither, in the order they were
                            asked for */
    PC__DATA_HELD = 3,   /* as GET, no answer: the sender, sent elsewhere for them, has them now */
    PC__DATA_GET_ROWS = 4, /* header, a pc__data_rows, then n_rows offsets of 8 bytes */
    PC__DATA_ROWS = 5,   /* header, the same pc__data_rows, then the rows in the order they were
                            asked for; a negative status: the header alone */
    PC__DATA_RETIRE = 6, /* header, from a home to who asks it, unasked: the region is freed */
    PC__DATA_RETIRED = 7, /* header, in answer to it: no lease begins here any more; or why not */
    PC__DATA_LAST = 8
};
enum pc__data_flags {
    PC__DATA_HOLES = 1,  /* BLOCKS: bit i of the bitmap: block i is all zeros, not sent */
    PC__DATA_LAYER = 2,  /* GET: region is the id of a layer that is staged there (layer.c) */
    PC__DATA_CACHED = 4, /* GET: of what the receiver holds of another home's blocks, at a version
                            that the asker takes. BLOCKS: in answer to it; version: that it has */
    PC__DATA_HOME = 8,   /* GET: the home must answer: a peer did not have them. It sends nobody
                            elsewhere then, but says what is lost */
    PC__DATA_MEMBER = 32, /* GET: to make blocks of another region of its group: the home must answer,
                            as for HOME; what lies behind its end is zeros; the asker does not keep them */
    PC__DATA_ELSEWHERE = 16 /* BLOCKS: some are not sent: ask there (from a home), or not here (from
                            a cache) */
};

struct pc__data_header {
    uint32_t magic;
    uint16_t type;
    uint16_t flags;
    uint32_t request_id;
    int32_t status;      /* BLOCKS, ROWS, RETIRED: enum pc_err; negative: nothing follows */
    uint64_t region;
    uint32_t version;    /* low half of it: a stamp against mix-ups */
    uint16_t n_runs;     /* GET, HELD */
    uint16_t n_blocks;   /* GET, HELD: sum over the runs; BLOCKS: the same number */
};
static_assert(sizeof(struct pc__data_header) == 32, "wire");

struct pc__data_asker {
    uint64_t server_id;  /* HOME: that did not have them; HELD: that they came from; else 0 */
    uint32_t from_version, to_version; /* CACHED: the blocks are the same in all of these */
    uint64_t load_bytes; /* that the asker has to send to others */
};
static_assert(sizeof(struct pc__data_asker) == 24, "wire");

struct pc__data_elsewhere {
    uint64_t server_id;  /* 0: nobody has the block, and from_version is 0: it is lost (to_version is 0), */
    uint32_t from_version, to_version; /* or in the region's file (PC__DATA_IN_FILE) */
};
#define PC__DATA_IN_FILE 1u
static_assert(sizeof(struct pc__data_elsewhere) == 16, "wire");

#define PC__DATA_MAX_ROWS 8192u
#define PC__DATA_MAX_ROW_BYTES (PC_BLOCK_BYTES - 1) /* of more, blocks are fetched */
#define PC__DATA_MAX_ROWS_BYTES (4u << 20) /* of an answer */
struct pc__data_rows {
    uint64_t row_bytes;
    uint32_t n_rows;
    uint32_t reserved;   /* 0 */
};
static_assert(sizeof(struct pc__data_rows) == 16, "wire");

/* Rows by number, as a process and its page server share them (PC__CTL_GATHER). Of one part, n_ids rows, in
 * a memfd that the process made:
 *   n_ids ids of 8 bytes, in ascending order of the rows' places        written by the process
 *   a bit for each id, in whole words                                    written by the page server
 *   at the next block boundary, rows of row_bytes, side by side          written by the page server
 * Bit i is set: the row of id i is the next of the rows there (the first set bit's is the first).
 * Not set: its blocks are resident, and the process reads it from its mapping.
 *
 * Such an area is the page server's until it has answered. Where the connection is lost before, it writes
 * there for as long as answers of homes are to come: the process asks again in another memfd. */
static inline uint64_t pc__gather_bits_at(uint64_t n_ids)
{
    return n_ids * sizeof(uint64_t);
}
static inline uint64_t pc__gather_rows_at(uint64_t n_ids)
{
    return (pc__gather_bits_at(n_ids) + (n_ids + 63) / 64 * sizeof(uint64_t) + PC_BLOCK_BYTES - 1) /
           PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}
static inline uint64_t pc__gather_area_bytes(uint64_t n_ids, uint64_t row_bytes)
{
    return pc__gather_rows_at(n_ids) +
           (n_ids * row_bytes + PC_BLOCK_BYTES - 1) / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}
/* How many rows a part has at most. */
static inline uint64_t pc__gather_part_rows(uint64_t row_bytes)
{
    uint64_t most = PC__DATA_MAX_ROWS_BYTES / row_bytes;
    return most < PC__DATA_MAX_ROWS ? most : PC__DATA_MAX_ROWS;
}

/* A packed run: first block << 24 | number of blocks. */
static inline uint64_t pc__run_pack(uint64_t first_block, uint64_t n_blocks)
{
    return first_block << 24 | n_blocks;
}
static inline struct pc_run pc__run_unpack(uint64_t packed)
{
    return (struct pc_run){.first_block = packed >> 24, .n_blocks = packed & 0xffffffu};
}

/* Checks a header that has wholly arrived. */
int pc__data_parse_header(const void *bytes, struct pc__data_header *out);
/* Unpacks and checks the runs of a GET: not empty, inside region_blocks, summing to n_blocks. */
int pc__data_parse_runs(const struct pc__data_header *header, const void *packed,
                        size_t packed_bytes, uint64_t region_blocks, struct pc_run *runs,
                        size_t capacity);
/* What follows the header of a GET_ROWS, and of a ROWS without an error. */
int pc__data_parse_rows(const void *bytes, struct pc__data_rows *out);
/* Copies out the offsets of a GET_ROWS: each row inside region_bytes. Returns their number. */
int pc__data_parse_offsets(const struct pc__data_rows *rows, const void *packed,
                           size_t packed_bytes, uint64_t region_bytes, uint64_t *offsets,
                           size_t capacity);

#endif
