/* gather.h - rows by number: what the two ends of PC__CTL_GATHER share, and the page server's parts.
 *
 *   gather_client.c  the process: sorts, asks in parts, copies out
 *   gather.c         its page server: what is here, what to fetch, rows or blocks
 *   rows.c           the home: answers GET_ROWS
 *
 * A part is n_ids rows in an area of a memfd that the process made:
 *   n_ids ids of 8 bytes, in ascending order of the rows' places        written by the process
 *   a bit for each id, in whole words                                    written by the page server
 *   at the next block boundary, rows of row_bytes, side by side          written by the page server
 * Bit i is set: the row of id i is the next of the rows there (the first set bit's is the first).
 * Not set: its blocks are resident, and the process reads it from its mapping.
 *
 * An area is the page server's until it has answered. Where the connection is lost before, it writes
 * there for as long as answers of homes are to come: the process asks again in another memfd.
 */
#ifndef PC_GATHER_H
#define PC_GATHER_H

#include "common/wire.h"

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
    return most < PC__GATHER_MAX_ROWS ? most : PC__GATHER_MAX_ROWS;
}

#endif
