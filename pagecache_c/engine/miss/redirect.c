/* redirect.c - blocks that a home has sent us to others for, and the way back.
 *
 * Entered by the loop that owns the connections. A fetch from a home whose answer says that some of
 * its blocks are elsewhere loses those to new fetches, one for each server and range of versions. Such
 * a fetch asks for what the other has in its cache, and takes it only at a version of that range. What
 * does not come from there (it is not there any more, the server is gone, lies or is too slow) is asked
 * of the home again, which must answer then (PC__DATA_HOME). What the home says to be nowhere is lost:
 * others make it again (repair.h), or who waits for it hears so. So a detour costs time, never a block: in
 * flight is in flight on both ways.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>

static bool has_bit(const uint64_t *bits, uint64_t k)
{
    return bits[k / 64] >> (k % 64) & 1u;
}

/* The same blocks' worth of runs twice: those still to come, and, behind them, all (for HELD). */
static struct pc__fetch *fetch_from(const struct pc__fetch *first, uint32_t most_runs)
{
    struct pc__fetch *fetch = calloc(1, sizeof *fetch + 2u * most_runs * sizeof fetch->runs[0]);
    if (!fetch)
        return NULL;
    fetch->region = first->region;
    fetch->generation = pc__generation_take(first->generation);
    pc__ref_take(&first->region->refs);
    fetch->urgent = first->urgent;
    fetch->prefetch = first->prefetch;
    fetch->final_ns = first->home_id ? first->final_ns : first->give_up_ns;
    fetch->capacity_runs = most_runs;
    return fetch;
}

static void add_block(struct pc__fetch *fetch, uint64_t block)
{
    struct pc_run *last = fetch->n_runs ? &fetch->runs[fetch->n_runs - 1] : NULL;
    if (last && last->first_block + last->n_blocks == block)
        last->n_blocks++;
    else
        fetch->runs[fetch->n_runs++] = (struct pc_run){.first_block = block, .n_blocks = 1};
    fetch->n_blocks++;
}

static struct pc__fetch *of_link(struct pc__link *link)
{
    return pc__of(link, struct pc__fetch, link);
}

static struct pc__fetch *fetch_to(struct pc__link *fetches, const struct pc__fetch *first,
                                  const struct pc__data_elsewhere *to, uint64_t now_ns)
{
    pc__each(link, fetches)
    {
        struct pc__fetch *fetch = of_link(link);
        if (fetch->server_id == to->server_id && fetch->from_version == to->from_version &&
            fetch->to_version == to->to_version)
            return fetch;
    }
    struct pc__fetch *fetch = fetch_from(first, first->n_blocks);
    if (!fetch)
        return NULL;
    fetch->server_id = to->server_id;
    fetch->home_id = first->server_id;
    fetch->from_version = to->from_version;
    fetch->to_version = to->to_version;
    fetch->give_up_ns = now_ns + PC__REDIRECT_PATIENCE_NS < fetch->final_ns ? now_ns + PC__REDIRECT_PATIENCE_NS
                                                               : fetch->final_ns;
    pc__link_push(fetches, &fetch->link);
    return fetch;
}

/* Takes the blocks of the bitmap out of the fetch; n_left are left. */
static struct pc__fetch *take_out(struct pc__fetch *fetch, const uint64_t *bits, uint32_t n_left)
{
    uint32_t position = 0, n_runs = 0;
    struct pc__fetch *left = fetch_from(fetch, n_left ? n_left : 1);
    if (!left)
        return NULL;
    left->server_id = fetch->server_id;
    left->home_id = fetch->home_id;
    left->missed_id = fetch->missed_id;
    left->from_version = fetch->from_version;
    left->to_version = fetch->to_version;
    left->give_up_ns = fetch->give_up_ns;
    left->request_id = fetch->request_id;
    left->on_wire = fetch->on_wire;
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++)
        for (uint64_t b = 0; b < fetch->runs[i].n_blocks; b++, position++)
            if (!has_bit(bits, position))
                add_block(left, fetch->runs[i].first_block + b);
    n_runs = left->n_runs;
    memcpy(left->runs + left->capacity_runs, left->runs, n_runs * sizeof left->runs[0]);
    return left;
}

static void drop_all(struct pc_engine *engine, struct pc__link *fetches)
{
    while (!pc__link_empty(fetches)) {
        struct pc__fetch *fetch = of_link(fetches->next);
        pc__link_remove(&fetch->link);
        pc__fetch_drop(engine, fetch);
    }
}

static int sort_out(struct pc__loop *loop, struct pc__fetch *fetch, const uint64_t *bits,
                    const uint8_t *sources, struct pc__link *fetches)
{
    uint32_t position = 0;
    uint64_t now_ns = pc__now_ns();
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++)
        for (uint64_t b = 0; b < fetch->runs[i].n_blocks; b++, position++) {
            struct pc__data_elsewhere to = {.server_id = fetch->home_id};
            if (!has_bit(bits, position))
                continue;
            if (!fetch->home_id) {
                memcpy(&to, sources, sizeof to);
                sources += sizeof to;
                if (to.server_id ? to.server_id == fetch->server_id ||
                                       to.server_id == loop->engine->server_id
                                 : to.from_version || to.to_version > PC__DATA_IN_FILE ||
                                       (to.to_version && !fetch->region->in_file))
                    return pc__fail(PC_ERR_PROTOCOL, "we were sent to nobody");
                if (to.server_id && fetch->missed_id)
                    return pc__fail(PC_ERR_PROTOCOL, "we were sent elsewhere again");
            }
            struct pc__fetch *other = fetch_to(fetches, fetch, &to, now_ns);
            if (!other)
                return pc__fail(PC_ERR_NO_MEMORY, "a fetch");
            add_block(other, fetch->runs[i].first_block + b);
        }
    return PC_OK;
}

/* The home is to answer, and to send nobody else there. */
static void ask_home(struct pc__fetch *fetch, uint64_t missed_id, uint64_t home_id)
{
    fetch->missed_id = missed_id;
    fetch->server_id = home_id;
    fetch->home_id = 0;
    fetch->from_version = fetch->to_version = 0;
    fetch->give_up_ns = fetch->final_ns;
    fetch->hedge_ns = 0;
}

/* To the home again: what one of its holders did not give us. */
static void turn_back(struct pc_engine *engine, struct pc__fetch *fetch, uint64_t missed_id,
                      uint64_t home_id)
{
    pc__count_add(&engine->count.redirect_misses, fetch->n_blocks);
    ask_home(fetch, missed_id, home_id);
}

/* It was late, and has not answered since. */
static bool is_avoided(struct pc__loop *loop, uint64_t server_id, uint64_t now_ns)
{
    const struct pc__peer *peer = pc__peer_of(loop, server_id);
    return peer && now_ns < peer->avoid_until_ns;
}

int pc__redirect(struct pc__loop *loop, struct pc__fetch **fetch, const uint64_t *bits,
                 const uint8_t *sources, uint32_t n_left)
{
    struct pc__link fetches;
    pc__link_init(&fetches);
    int rc = sort_out(loop, *fetch, bits, sources, &fetches);
    struct pc__fetch *left = rc ? NULL : take_out(*fetch, bits, n_left);
    if (!left) {
        drop_all(loop->engine, &fetches);
        return rc ? rc : PC_ERR_NO_MEMORY;
    }
    const uint64_t now_ns = pc__now_ns();
    pc__each(link, &fetches)
    {
        struct pc__fetch *other = of_link(link);
        pc__link_remove(link);
        if (!other->server_id && other->to_version == PC__DATA_IN_FILE) {
            pc__file_ask_fetch(loop->engine, other);
            continue;
        }
        if (!other->server_id) { /* it has lost them; what is around them comes all the same */
            ask_home(other, 0, (*fetch)->server_id);
            pc__fetch_lost(loop, other);
            continue;
        }
        if ((*fetch)->home_id)
            turn_back(loop->engine, other, (*fetch)->server_id, (*fetch)->home_id);
        else if (is_avoided(loop, other->server_id, now_ns))
            ask_home(other, other->server_id, (*fetch)->server_id);
        else
            memcpy(other->runs + other->capacity_runs, other->runs,
                   other->n_runs * sizeof other->runs[0]);
        pc__fetch_queue(loop, other);
    }
    left->link = (*fetch)->link; /* in its place in the list */
    left->link.next->prev = left->link.prev->next = &left->link;
    pc__link_init(&(*fetch)->link);
    pc__fetch_drop(loop->engine, *fetch);
    *fetch = left;
    return PC_OK;
}

void pc__redirect_failed(struct pc__loop *loop, struct pc__fetch *fetch)
{
    if (pc__hedge_yields(fetch)) {
        pc__fetch_drop(loop->engine, fetch);
        return;
    }
    turn_back(loop->engine, fetch, fetch->server_id, fetch->home_id);
    pc__fetch_queue(loop, fetch);
}

/* ------------------------------------------------------------------ a home that has lost blocks */

int pc__fetch_set_aside(struct pc__fetch *fetch, uint64_t n, struct pc__fetch **lost)
{
    const uint64_t first = fetch->runs[fetch->at_run].first_block;
    if (!*lost) {
        if (!(*lost = fetch_from(fetch, fetch->n_blocks)))
            return pc__fail(PC_ERR_NO_MEMORY, "a fetch");
        pc__link_init(&(*lost)->link);
        ask_home(*lost, 0, fetch->server_id);
    }
    for (uint64_t b = 0; b < n; b++)
        add_block(*lost, first + b);
    pc__fetch_advance(fetch, n);
    return PC_OK;
}

void pc__fetch_lost(struct pc__loop *loop, struct pc__fetch *lost)
{
    if (!lost->give_up_ns)
        lost->give_up_ns = pc__now_ns() + loop->engine->fault_timeout_ns;
    if (lost->region->has_repair && loop->engine->observers.fetch_lost(loop, lost))
        return;
    pc__fetch_fail(loop->engine, lost, PC_ERR_HOME_LOST);
    pc__fetch_drop(loop->engine, lost);
}

/* ------------------------------------------------------------------ a peer that is late */

uint64_t pc__patience_ns(const struct pc__loop *loop, const struct pc__lane *lane)
{
    const uint64_t most = loop->engine->fetch_timeout_ns;
    return of_link(lane->sent.next)->home_id && most > PC__REDIRECT_PATIENCE_NS ? PC__REDIRECT_PATIENCE_NS
                                                                               : most;
}

void pc__hedge_sent(struct pc__peer *peer, struct pc__lane *lane, struct pc__fetch *fetch, uint64_t now_ns)
{
    fetch->resent = fetch->sent_blocks != 0;
    fetch->sent_blocks = fetch->n_blocks;
    if (!fetch->home_id || fetch->twin || fetch->repair) /* which hedges by itself */
        return;
    fetch->hedge_ns = now_ns + pc__rtt_timeout_ns(&peer->rtt[pc__rtt_class(fetch->n_blocks)],
                                                  peer->loop->engine->hedge_least_ns);
    if (!lane->hedge_ns || fetch->hedge_ns < lane->hedge_ns)
        lane->hedge_ns = fetch->hedge_ns;
}

/* Its home is asked for the same. Without memory for that it is waited for, as long as ever. */
static void hedge(struct pc__peer *peer, struct pc__fetch *fetch, uint64_t now_ns)
{
    struct pc__fetch *twin = fetch_from(fetch, fetch->n_runs - fetch->at_run);
    fetch->hedge_ns = 0;
    pc__rtt_double(&peer->rtt[pc__rtt_class(fetch->sent_blocks)]);
    peer->avoid_until_ns = now_ns + PC__REDIRECT_PATIENCE_NS;
    if (!twin)
        return;
    pc__count_add(&peer->loop->engine->count.hedges, 1);
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++)
        twin->runs[twin->n_runs++] = fetch->runs[i];
    twin->n_blocks = fetch->n_blocks;
    ask_home(twin, fetch->server_id, fetch->home_id);
    twin->twin = fetch;
    fetch->twin = twin;
    pc__fetch_queue(peer->loop, twin);
}

void pc__hedge_tick(struct pc__peer *peer, struct pc__lane *lane, uint64_t now_ns)
{
    uint64_t next_ns = 0;
    if (!lane->hedge_ns || lane->hedge_ns > now_ns)
        return;
    pc__each(link, &lane->sent)
    {
        struct pc__fetch *fetch = of_link(link);
        const bool has_begun = lane->in_reply && link == lane->sent.next;
        if (!fetch->hedge_ns || has_begun)
            continue;
        if (fetch->hedge_ns <= now_ns)
            hedge(peer, fetch, now_ns);
        else if (!next_ns || fetch->hedge_ns < next_ns)
            next_ns = fetch->hedge_ns;
    }
    lane->hedge_ns = next_ns;
}

void pc__hedge_came(struct pc__peer *peer, const struct pc__fetch *fetch)
{
    const uint64_t took_ns = pc__now_ns() - fetch->sent_ns;
    if (fetch->resent || !fetch->sent_blocks)
        return;
    pc__rtt_add(&peer->rtt[pc__rtt_class(fetch->sent_blocks)], took_ns);
    pc__peer_took(peer->loop->engine, fetch->sent_blocks, took_ns);
}

static bool is_on_the_wire(struct pc__loop *loop, const struct pc__fetch *fetch)
{
    struct pc__peer *peer = pc__peer_of(loop, fetch->server_id);
    for (int i = 0; peer && i < PC__LANES_PER_LOOP; i++)
        pc__each(link, &peer->lanes[i].sent)
            if (of_link(link) == fetch)
                return true;
    return false;
}

void pc__hedge_answered(struct pc__loop *loop, struct pc__fetch *fetch, bool has_all)
{
    struct pc__fetch *twin = fetch->twin, *other = has_all ? twin : fetch;
    if (!twin)
        return;
    fetch->twin = twin->twin = NULL;
    if (has_all && !fetch->home_id) /* the home, which was asked besides */
        pc__count_add(&loop->engine->count.hedges_won, 1);
    if (is_on_the_wire(loop, other)) { /* its answer is read, and thrown away */
        other->unwanted = true;
        other->error = PC_ERR_TIMEOUT;
        other->hedge_ns = 0;
        return;
    }
    pc__link_remove(&other->link);
    pc__fetch_drop(loop->engine, other);
}

bool pc__hedge_yields(struct pc__fetch *fetch)
{
    if (fetch->twin) {
        fetch->twin->twin = NULL;
        fetch->twin = NULL;
    } else if (!fetch->unwanted)
        return false;
    fetch->unwanted = true;
    return true;
}

size_t pc__redirect_held(const struct pc_engine *engine, const struct pc__fetch *fetch, uint8_t *out)
{
    const struct pc_run *runs = fetch->runs + fetch->capacity_runs;
    uint64_t n_blocks = 0;
    for (uint32_t i = 0; i < fetch->n_runs; i++)
        n_blocks += runs[i].n_blocks;
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                           .type = PC__DATA_HELD,
                                           .region = fetch->region->id,
                                           .version = fetch->from_version,
                                           .n_runs = (uint16_t)fetch->n_runs,
                                           .n_blocks = (uint16_t)n_blocks};
    const struct pc__data_asker asker = {.server_id = fetch->server_id,
                                         .load_bytes = atomic_load(&engine->serving_bytes)};
    uint8_t *at = out;
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    memcpy(at, &asker, sizeof asker);
    at += sizeof asker;
    for (uint32_t i = 0; i < fetch->n_runs; i++, at += sizeof(uint64_t)) {
        uint64_t packed = pc__run_pack(runs[i].first_block, runs[i].n_blocks);
        memcpy(at, &packed, sizeof packed);
    }
    return (size_t)(at - out);
}
