/* rows.c - at the home: rows of a version, copied.
 *
 * Entered by the loop of who wants them. Rows are looked up under region.lock, some hundred at
 * a time, and copied into the answer without it, held as blocks of a reply are (pc__home_hold). The
 * memory of rows that come next is asked for while one is copied: they lie anywhere.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>

#define ROWS_AT_ONCE 512u
#define AHEAD 8u             /* pieces */
#define LOOKED_UP_BLOCKS 256u

/* Of a row, inside one block. */
struct piece {
    const uint8_t *bytes;    /* MEMORY */
    uint64_t block;          /* MIXED, HISTORY */
    uint32_t into, n_bytes;  /* of the block */
    enum pc__home_kind kind;
};

struct look_up {
    struct pc_engine *engine;
    struct pc__region *region;
    struct pc__home *home;   /* of these rows: the region's may be another server by now */
    uint64_t version;
    uint64_t first, past;    /* the blocks of part; first == past: none yet */
    struct pc__home_part part;
    size_t n;
    struct piece pieces[2 * ROWS_AT_ONCE + PC__DATA_MAX_ROWS_BYTES / PC_BLOCK_BYTES]; /* of whole
                                answers: each block's worth of bytes, and two ends of each row */
};

static void look_up(struct look_up *at, uint64_t offset, uint64_t row_bytes)
{
    for (uint64_t left = row_bytes, n; left; offset += n, left -= n) {
        uint64_t block = offset / PC_BLOCK_BYTES, into = offset % PC_BLOCK_BYTES;
        n = PC_BLOCK_BYTES - into < left ? PC_BLOCK_BYTES - into : left;
        if (block < at->first || block >= at->past) {
            uint64_t most = at->region->n_blocks - block;
            at->part = pc__home_resolve(at->engine, at->region, at->home, at->version, block,
                                        most < LOOKED_UP_BLOCKS ? most : LOOKED_UP_BLOCKS);
            at->first = block;
            at->past = block + at->part.n_blocks;
        }
        at->pieces[at->n++] = (struct piece){
            .bytes = at->part.kind == PC__HOME_MEMORY
                         ? at->part.bytes + ((block - at->first) << PC_BLOCK_SHIFT) + into
                         : NULL,
            .block = block, .into = (uint32_t)into, .n_bytes = (uint32_t)n, .kind = at->part.kind};
    }
}

/* Status; PC__WAIT: the home has not heard of the version yet. PC_OK: *held is to be released. */
static int look_up_all(struct look_up *at, const uint64_t *offsets, size_t n, uint64_t row_bytes,
                       unsigned *held)
{
    struct pc__region *region = at->region;
    at->n = 0;
    at->first = at->past = 0;
    pthread_mutex_lock(&region->lock);
    at->home = region->home;
    bool here = region->home && region->home->base.memfd >= 0 &&
                region->state != PC__REGION_CREATING;
    int rc = PC_ERR_NO_REGION;
    if (here && at->version > region->home->latest) {
        rc = PC__WAIT;
    } else if (here) {
        for (size_t i = 0; i < n; i++)
            look_up(at, offsets[i], row_bytes);
        rc = pc__home_knows(at->engine, region, at->version);
    }
    if (!rc)
        *held = pc__home_hold(region->home);
    pthread_mutex_unlock(&region->lock);
    return rc;
}

static void fetch_ahead(const struct piece *piece)
{
    for (uint32_t i = 0; piece->bytes && i < piece->n_bytes + 63 && i < 512; i += 64)
        __builtin_prefetch(piece->bytes + i);
}

static int copy_all(const struct look_up *at, uint8_t *out)
{
    uint8_t composed[PC_BLOCK_BYTES];
    uint64_t block = UINT64_MAX; /* that composed holds */
    for (size_t i = 0; i < at->n; out += at->pieces[i++].n_bytes) {
        const struct piece *piece = &at->pieces[i];
        if (i + AHEAD < at->n)
            fetch_ahead(piece + AHEAD);
        if (piece->kind == PC__HOME_MEMORY) {
            memcpy(out, piece->bytes, piece->n_bytes);
            continue;
        }
        if (piece->kind == PC__HOME_LOST)
            return PC_ERR_HOME_LOST;
        if (piece->kind == PC__HOME_FILE)
            return PC_ERR_RANGE; /* rows of such a region are asked for as blocks */
        if (piece->kind == PC__HOME_ZEROS) {
            memset(out, 0, piece->n_bytes);
            continue;
        }
        int rc = block == piece->block
                     ? PC_OK
                     : pc__home_compose(at->engine, at->region, at->home, at->version,
                                        piece->kind, piece->block, composed);
        if (rc)
            return rc;
        block = piece->block;
        memcpy(out, composed + piece->into, piece->n_bytes);
    }
    return PC_OK;
}

int pc__rows_copy(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                  const struct pc__data_rows *rows, const uint64_t *offsets, uint8_t *out)
{
    struct look_up at = {.engine = engine, .region = region, .version = version};
    for (size_t done = 0; done < rows->n_rows; done += ROWS_AT_ONCE) {
        size_t n = rows->n_rows - done < ROWS_AT_ONCE ? rows->n_rows - done : ROWS_AT_ONCE;
        unsigned held;
        int rc = look_up_all(&at, offsets + done, n, rows->row_bytes, &held);
        if (rc)
            return rc;
        rc = copy_all(&at, out + done * rows->row_bytes);
        pc__home_release(engine, region, at.home, held);
        if (rc)
            return rc;
    }
    pc__count_add(&engine->count.rows_served, rows->n_rows);
    pc__region_was_read(region);
    return PC_OK;
}
