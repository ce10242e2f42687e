/* answer.c - whether an answer is one to what was asked: what a peer says is checked before any of its
 * bytes are used. Pure: no I/O, no lock.
 */
#include "engine/miss/miss.h"

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
