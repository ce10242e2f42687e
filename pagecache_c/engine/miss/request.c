/* request.c - a request for blocks, or rows: as bytes that a lane sends, whether an answer is one to it,
 * and the end of its record. Of the loop that owns the lane.
 */
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

/* ------------------------------------------------------------------ its answer */

static bool version_fits(const struct pc__fetch *fetch, uint32_t version)
{
    if (fetch->home_id)
        return version - fetch->from_version <= fetch->to_version - fetch->from_version;
    return version == (uint32_t)fetch->generation->version;
}

int pc__answer_fits(const struct pc__data_header *header, const struct pc__fetch *fetch)
{
    bool cached = header->flags & PC__DATA_CACHED;
    if (header->type != PC__DATA_BLOCKS || header->request_id != fetch->request_id ||
        header->region != fetch->region->id || cached != (fetch->home_id != 0))
        return pc__fail(PC_ERR_PROTOCOL, "an answer to another question");
    if (header->status < 0)
        return PC_OK;
    const bool is_late = fetch->is_filled || fetch->unwanted; /* its generation may have moved on */
    if (!is_late && !version_fits(fetch, header->version))
        return pc__fail(PC_ERR_PROTOCOL, "blocks of version %u", header->version);
    if (header->n_blocks != fetch->n_blocks)
        return pc__fail(PC_ERR_PROTOCOL, "%u blocks in answer to %u", header->n_blocks,
                        fetch->n_blocks);
    if (header->flags & PC__DATA_ELSEWHERE && fetch->generation->is_layer && !fetch->sink)
        return pc__fail(PC_ERR_PROTOCOL, "we were sent elsewhere again");
    return PC_OK;
}

/* ------------------------------------------------------------------ its end */

void pc__fetch_drop(struct pc_engine *engine, struct pc__fetch *fetch)
{
    if (fetch->repair)
        engine->observers.fetch_ended(fetch);
    if (fetch->sink)
        fetch->sink->ended(fetch->sink, fetch->error);
    if (fetch->source) {
        pthread_mutex_lock(&fetch->region->lock);
        fetch->source->forks--;
        pthread_mutex_unlock(&fetch->region->lock);
        pc__generation_put(engine, fetch->source);
    }
    if (fetch->twin)
        fetch->twin->twin = NULL;
    pc__generation_put(engine, fetch->generation);
    pc__region_put(engine, fetch->region);
    free(fetch);
}
