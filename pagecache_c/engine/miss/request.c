/* request.c - a request for blocks, or rows, as bytes that a lane sends. Of the loop that owns the lane. */
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <stdlib.h>
#include <string.h>

int pc__lane_room(struct pc__lane *lane, size_t more)
{
    if (lane->tx_bytes + more <= lane->tx_capacity)
        return PC_OK;
    size_t capacity = (lane->tx_bytes + more) * 2;
    uint8_t *grown = realloc(lane->tx, capacity);
    if (!grown)
        return pc__fail(PC_ERR_NO_MEMORY, "a request");
    lane->tx = grown;
    lane->tx_capacity = capacity;
    return PC_OK;
}

static uint16_t flags_of(const struct pc__fetch *fetch)
{
    return fetch->sink                   ? PC__DATA_MEMBER
           : fetch->generation->is_layer ? PC__DATA_LAYER
           : fetch->home_id            ? PC__DATA_CACHED
           : fetch->missed_id          ? PC__DATA_HOME
                                       : 0;
}

int pc__request_put(struct pc__loop *loop, struct pc__lane *lane, struct pc__fetch *fetch)
{
    uint32_t n_runs = fetch->n_runs - fetch->at_run;
    size_t bytes = fetch->gather ? pc__gather_request_bytes(fetch)
                                 : sizeof(struct pc__data_header) + sizeof(struct pc__data_asker) +
                                       n_runs * sizeof(uint64_t);
    int rc = pc__lane_room(lane, bytes);
    if (rc)
        return rc;
    fetch->request_id = loop->next_request_id++;
    if (fetch->gather) {
        pc__gather_encode(fetch, lane->tx + lane->tx_bytes);
        lane->tx_bytes += bytes;
        return PC_OK;
    }
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                           .type = PC__DATA_GET,
                                           .flags = flags_of(fetch),
                                           .request_id = fetch->request_id,
                                           .region = fetch->region->id,
                                           .version = (uint32_t)fetch->generation->version,
                                           .n_runs = (uint16_t)n_runs,
                                           .n_blocks = (uint16_t)fetch->n_blocks};
    const struct pc__data_asker asker = {.server_id = fetch->missed_id,
                                         .from_version = fetch->from_version,
                                         .to_version = fetch->to_version,
                                         .load_bytes = atomic_load(&loop->engine->serving_bytes)};
    uint8_t *at = lane->tx + lane->tx_bytes;
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    memcpy(at, &asker, sizeof asker);
    at += sizeof asker;
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++, at += sizeof(uint64_t)) {
        uint64_t packed = pc__run_pack(fetch->runs[i].first_block, fetch->runs[i].n_blocks);
        memcpy(at, &packed, sizeof packed);
    }
    lane->tx_bytes += bytes;
    return PC_OK;
}
