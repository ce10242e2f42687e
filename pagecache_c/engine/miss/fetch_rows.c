/* fetch_rows.c - a fetch of rows, not blocks, on the wire: its request, and its answer, which goes to
 * where who asked wants it. Of the loop that owns the connection.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>

size_t pc__gather_request_bytes(const struct pc__fetch *fetch)
{
    return sizeof(struct pc__data_header) + sizeof(struct pc__data_rows) +
           fetch->gather->rows.n_rows * sizeof(uint64_t);
}

void pc__gather_encode(const struct pc__fetch *fetch, uint8_t *at)
{
    const struct pc__gather *gather = fetch->gather;
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                           .type = PC__DATA_GET_ROWS,
                                           .request_id = fetch->request_id,
                                           .region = fetch->region->id,
                                           .version = (uint32_t)fetch->generation->version};
    memcpy(at, &header, sizeof header);
    memcpy(at + sizeof header, &gather->rows, sizeof gather->rows);
    memcpy(at + sizeof header + sizeof gather->rows, gather->offsets,
           gather->rows.n_rows * sizeof gather->offsets[0]);
}

/* The fetch has no more to wait for. */
static void finish(struct pc__fetch *fetch, int status)
{
    struct pc__gather *gather = fetch->gather;
    fetch->gather = NULL;
    gather->came(fetch->region, gather->arg, status, fetch->server_id);
    free(gather);
}

void pc__gather_failed(struct pc_engine *engine, struct pc__fetch *fetch, int error)
{
    pc__count_add(&engine->count.fetch_failed, 1);
    finish(fetch, error);
}

uint64_t pc__gather_first_block(const struct pc__fetch *fetch)
{
    return fetch->gather->offsets[0] >> PC_BLOCK_SHIFT;
}

int pc__gather_here(struct pc_engine *engine, struct pc__fetch *fetch)
{
    const struct pc__gather *gather = fetch->gather;
    int rc = pc__rows_copy(engine, fetch->region, fetch->generation->version, &gather->rows,
                           gather->offsets, gather->into);
    if (rc == PC_ERR_NO_REGION)
        return rc;
    finish(fetch, rc == PC__WAIT ? PC_ERR_NO_VERSION : rc);
    return PC_OK;
}

/* 1: the answer is not to be read any further; 0: more bytes are needed. */
static int take_head(struct pc_engine *engine, struct pc__lane *lane, struct pc__fetch *fetch)
{
    const struct pc__gather *gather = fetch->gather;
    const uint8_t *at = lane->rx + lane->rx_begin;
    const size_t have = lane->rx_end - lane->rx_begin;
    struct pc__data_header header;
    struct pc__data_rows rows;
    if (have < sizeof header)
        return 0;
    int rc = pc__data_parse_header(at, &header);
    if (rc)
        return rc;
    if (header.type != PC__DATA_ROWS || header.request_id != fetch->request_id ||
        header.region != fetch->region->id ||
        header.version != (uint32_t)fetch->generation->version)
        return pc__fail(PC_ERR_PROTOCOL, "an answer to another question");
    if (header.status == PC_ERR_NO_REGION) { /* not the last word: it is asked on, and has its rows to come */
        lane->rx_begin += sizeof header;
        fetch->error = header.status;
        return 1;
    }
    if (header.status < 0) {
        lane->rx_begin += sizeof header;
        pc__gather_failed(engine, fetch, header.status);
        lane->in_rows = true; /* and none are due */
        return 1;
    }
    if (have < sizeof header + sizeof rows)
        return 0;
    rc = pc__data_parse_rows(at + sizeof header, &rows);
    if (rc)
        return rc;
    if (memcmp(&rows, &gather->rows, sizeof rows) != 0)
        return pc__fail(PC_ERR_PROTOCOL, "%u rows of %llu bytes in answer to %u", rows.n_rows,
                        (unsigned long long)rows.row_bytes, gather->rows.n_rows);
    lane->rx_begin += sizeof header + sizeof rows;
    lane->in_rows = true;
    lane->rows_due = (uint32_t)(rows.row_bytes * rows.n_rows);
    return 0;
}

uint8_t *pc__gather_into(const struct pc__lane *lane, const struct pc__fetch *fetch)
{
    const struct pc__gather *gather = fetch->gather;
    return gather->into + gather->rows.row_bytes * gather->rows.n_rows - lane->rows_due;
}

int pc__gather_take(struct pc_engine *engine, struct pc__lane *lane, struct pc__fetch *fetch)
{
    if (!lane->in_rows) {
        int rc = take_head(engine, lane, fetch);
        if (rc || !lane->in_rows)
            return rc;
    }
    const struct pc__gather *gather = fetch->gather;
    size_t have = lane->rx_end - lane->rx_begin;
    size_t n = have < lane->rows_due ? have : lane->rows_due;
    memcpy(pc__gather_into(lane, fetch), lane->rx + lane->rx_begin, n);
    lane->rx_begin += n;
    lane->rows_due -= (uint32_t)n;
    if (lane->rows_due)
        return 0;
    pc__count_add(&engine->count.rows_fetched, gather->rows.n_rows);
    finish(fetch, PC_OK);
    return 1;
}
