/* repair.c - a fetch whose blocks come from the other members of its region's group, or from a mirror.
 *
 * All of a repair belongs to the loop of its fetch, and nothing happens to it but in pc__repairs_tick:
 * who tells of a fetch, or of a member's blocks, only notes it. So no list changes under who walks it.
 *
 * The blocks of a fetch stay in flight until it has them, and nobody else writes them then. What members
 * send goes to memory. When all of them have answered, what the fetch has not got yet is filled in, and
 * it ends; one that is on the wire stays there until its answer has come, which is thrown away.
 */
#include "engine/repair/repair.h"

#include "kernels/xor.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define AT_ONCE 32u /* repairs of a loop by XOR, or the memory for what has come could be any */
#define BULK_AT_ONCE 24u /* of them, of fetches that no thread waits for */
#define NO_ROOM_PAUSE_NS 5000000u
#define BULK_PAUSE_NS 50000000u
#define LOST_PATIENCE_NS 3000000000ull /* with others that have lost a block too: it may be others in a moment */
#define NEVER UINT64_MAX
static_assert(PC__REQUEST_BLOCKS <= 64, "a bit for each block of a fetch");

enum state {
    WATCHES, /* its home is asked; at_ns: when another server is, too */
    WANTS,   /* the others are to be asked, at at_ns */
    RUNS     /* they are asked, and n_parts have not answered; at_ns: of a mirror: when the home is asked */
};

struct pc__repair {
    struct pc__link link;          /* ready, or timed */
    struct pc__loop *loop;
    struct pc__fetch *fetch;       /* or NULL: it has ended */
    enum state state;
    bool is_hedge;                 /* who was asked first was late, and is asked still */
    bool holds;                    /* the fetch is in no list: a mirror is asked in its home's place */
    bool had_mirror;               /* so it was; and is not any more */
    bool is_stranded;              /* its home is lost, or does not know the region */
    bool is_alone;                 /* the fetch is in no list: its home has lost its blocks */
    bool is_hurried;               /* a thread waits for a block of it, though it was asked for as bulk */
    uint64_t at_ns, began_ns;      /* began: the others were asked */
    uint64_t vain_ns;              /* of one that is alone: until then, others that have lost them are asked again */
    uint32_t n_failed;
    uint64_t server_id;            /* that is asked first, and counted in: */
    uint64_t counted_blocks;
    int error;
    uint32_t n_parts, n_blocks;    /* n_blocks: of the fetch, when the others were asked */
    bool is_xor;                   /* counted among those at once */
    uint64_t has_bytes;            /* bit i: block i is not zeros, or not known to be */
    uint8_t *bytes;                /* n_blocks, once there are some */
};

struct part {
    struct pc__sink hears;
    struct pc__repair *repair;
    uint32_t n_taken;
    uint64_t server_id, counted_blocks;
};

struct pc__repairs {
    struct pc__link ready, timed;
    uint64_t next_ns;              /* when to look at timed */
    uint32_t n_xor;
    uint64_t random;
    struct pc__hedge_budget hedges;
    struct pc__asked *asked;
    size_t n_asked, capacity;
};

/* ------------------------------------------------------------------ of a loop */

static struct pc__repairs *repairs_of(struct pc__loop *loop)
{
    struct pc__repairs *repairs = loop->repairs;
    if (!repairs) {
        repairs = loop->repairs = calloc(1, sizeof *repairs);
        if (!repairs)
            return NULL;
        pc__link_init(&repairs->ready);
        pc__link_init(&repairs->timed);
        repairs->next_ns = NEVER;
        repairs->random = pc__now_ns() | 1u;
        repairs->hedges.saved = PC__HEDGE_EVERY; /* the first one */
    }
    return repairs;
}

static uint64_t next_random(struct pc__repairs *repairs)
{
    uint64_t z = repairs->random += 0x9e3779b97f4a7c15ull; /* SplitMix64, as in directory.c */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* NULL: no memory; it counts for nothing then. */
static struct pc__asked *asked_of(struct pc__repairs *repairs, uint64_t server_id)
{
    for (size_t i = 0; i < repairs->n_asked; i++)
        if (repairs->asked[i].server_id == server_id)
            return &repairs->asked[i];
    if (repairs->n_asked == repairs->capacity) {
        size_t capacity = repairs->capacity ? 2 * repairs->capacity : 16;
        struct pc__asked *grown = realloc(repairs->asked, capacity * sizeof *grown);
        if (!grown)
            return NULL;
        repairs->asked = grown;
        repairs->capacity = capacity;
    }
    repairs->asked[repairs->n_asked] = (struct pc__asked){.server_id = server_id};
    return &repairs->asked[repairs->n_asked++];
}

static void count_in(struct pc__repairs *repairs, uint64_t server_id, uint64_t n_blocks,
                     uint64_t *counted)
{
    struct pc__asked *asked = asked_of(repairs, server_id);
    *counted = asked ? n_blocks : 0;
    if (asked)
        asked->blocks += n_blocks;
}

static void count_out(struct pc__repairs *repairs, uint64_t server_id, uint64_t *counted)
{
    struct pc__asked *asked = *counted ? asked_of(repairs, server_id) : NULL;
    if (asked)
        asked->blocks -= *counted;
    *counted = 0;
}

static void put_at(struct pc__repair *repair, uint64_t at_ns)
{
    struct pc__repairs *repairs = repair->loop->repairs;
    pc__link_remove(&repair->link);
    repair->at_ns = at_ns;
    pc__link_push(at_ns ? &repairs->timed : &repairs->ready, &repair->link);
    if (at_ns && at_ns < repairs->next_ns)
        repairs->next_ns = at_ns;
}

/* Nobody refers to it any more. */
static void free_repair(struct pc__repair *repair)
{
    struct pc__repairs *repairs = repair->loop->repairs;
    pc__link_remove(&repair->link);
    count_out(repairs, repair->server_id, &repair->counted_blocks);
    repairs->n_xor -= repair->is_xor;
    free(repair->bytes);
    free(repair);
}

/* NULL: no memory; the fetch goes on without. */
static struct pc__repair *repair_of(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc__repair *repair = fetch->repair;
    if (repair || !repairs_of(loop) || !(repair = calloc(1, sizeof *repair)))
        return repair;
    repair->loop = loop;
    repair->fetch = fetch;
    pc__link_init(&repair->link);
    put_at(repair, NEVER);
    return fetch->repair = repair;
}

static bool may_be_repaired(const struct pc__fetch *fetch)
{
    return fetch->region->has_repair && !fetch->gather && !fetch->source && !fetch->sink &&
           !fetch->generation->is_layer && !fetch->is_filled && !fetch->twin && !fetch->unwanted;
}

/* ------------------------------------------------------------- what members send */

static void part_took(struct pc__sink *hears, uint64_t n, const uint8_t *bytes)
{
    struct part *part = pc__of(hears, struct part, hears);
    struct pc__repair *repair = part->repair;
    const uint32_t first = part->n_taken;
    part->n_taken += (uint32_t)n;
    if (!bytes || repair->error || !repair->fetch)
        return;
    if (!repair->bytes)
        repair->bytes = malloc((size_t)repair->n_blocks << PC_BLOCK_SHIFT);
    if (!repair->bytes) {
        repair->error = PC_ERR_NO_MEMORY;
        return;
    }
    for (uint64_t i = 0; i < n; i++, bytes += PC_BLOCK_BYTES) {
        uint8_t *at = repair->bytes + ((first + i) << PC_BLOCK_SHIFT);
        if (repair->has_bytes >> (first + i) & 1u)
            pc__xor(at, at, bytes, PC_BLOCK_BYTES);
        else
            memcpy(at, bytes, PC_BLOCK_BYTES);
        repair->has_bytes |= 1ull << (first + i);
    }
}

static void part_ended(struct pc__sink *hears, int error)
{
    struct part *part = pc__of(hears, struct part, hears);
    struct pc__repair *repair = part->repair;
    count_out(repair->loop->repairs, part->server_id, &part->counted_blocks);
    free(part);
    repair->n_parts--;
    if (error && !repair->error)
        repair->error = error;
    if (!repair->fetch && !repair->n_parts)
        free_repair(repair);
    else if (repair->fetch && (error || !repair->n_parts))
        put_at(repair, 0);
}

/* ------------------------------------------------------------- asking members */

static uint64_t first_block(const struct pc__fetch *fetch)
{
    return fetch->runs[fetch->at_run].first_block;
}

/* What asks one of them. */
static struct pc__fetch *fetch_from(struct pc_engine *engine, const struct pc__fetch *fetch,
                                    const struct pc_repair_member *member)
{
    const uint32_t n_runs = fetch->n_runs - fetch->at_run;
    struct pc__fetch *asks = calloc(1, sizeof *asks + n_runs * sizeof asks->runs[0]);
    if (!asks)
        return NULL;
    asks->region = pc__region_alone(member->region, 1); /* a name: nothing is kept of it */
    asks->generation = pc__generation_new(1, false);
    if (!asks->region || !asks->generation) {
        pc__generation_put(engine, asks->generation);
        if (asks->region)
            pc__region_put(engine, asks->region);
        free(asks);
        return NULL;
    }
    asks->generation->is_layer = true; /* no region's */
    asks->generation->version = member->version;
    asks->server_id = member->server_id;
    asks->urgent = fetch->urgent;
    asks->n_blocks = fetch->n_blocks;
    asks->n_runs = asks->capacity_runs = n_runs;
    memcpy(asks->runs, fetch->runs + fetch->at_run, n_runs * sizeof asks->runs[0]);
    return asks;
}

static void ask_member(struct pc__repair *repair, const struct pc_repair_member *member)
{
    struct pc__loop *loop = repair->loop;
    const struct pc__fetch *fetch = repair->fetch;
    struct part *part = calloc(1, sizeof *part);
    repair->n_parts++;
    if (!part) {
        repair->n_parts--;
        repair->error = PC_ERR_NO_MEMORY;
        return;
    }
    part->hears = (struct pc__sink){.took = part_took, .ended = part_ended};
    part->repair = repair;
    part->server_id = member->server_id;
    if (member->server_id == loop->engine->server_id) {
        int rc = PC_OK;
        for (uint32_t i = fetch->at_run; i < fetch->n_runs && !rc; i++)
            rc = pc__member_read(loop->engine, member, fetch->runs[i], &part->hears);
        part_ended(&part->hears, rc);
        return;
    }
    struct pc__fetch *asks = fetch_from(loop->engine, fetch, member);
    if (!asks) {
        part_ended(&part->hears, PC_ERR_NO_MEMORY);
        return;
    }
    asks->sink = &part->hears;
    count_in(loop->repairs, part->server_id, asks->n_blocks, &part->counted_blocks);
    pc__fetch_queue(loop, asks);
}

/* While others are asked nothing is looked at before. */
static uint64_t deadline_ns(const struct pc__repair *repair)
{
    return repair->is_alone ? repair->fetch->give_up_ns : NEVER;
}

/* All of a group; of mirrors the one. */
static void begin(struct pc__repair *repair, const struct pc__members *members, uint32_t mirror)
{
    repair->state = RUNS;
    repair->began_ns = pc__now_ns();
    repair->error = 0;
    repair->n_blocks = repair->fetch->n_blocks;
    repair->has_bytes = 0;
    free(repair->bytes);
    repair->bytes = NULL;
    if (!members->is_mirror && !repair->is_xor) {
        repair->is_xor = true;
        repair->loop->repairs->n_xor++;
    }
    put_at(repair, deadline_ns(repair));
    repair->n_parts++; /* so that it does not end before all are asked */
    for (uint32_t i = 0; i < members->n; i++)
        if (!members->is_mirror || i == mirror)
            ask_member(repair, &members->of[i]);
    if (!--repair->n_parts || repair->error)
        put_at(repair, 0);
}

/* Of home and mirrors, the server that is to be asked: 0: the home, else mirror number i - 1. */
static uint32_t choose(struct pc__loop *loop, const struct pc__members *members, uint64_t home_id)
{
    uint64_t blocks[PC__REPAIR_MEMBERS + 1];
    for (uint32_t i = 0; i <= members->n; i++) {
        const uint64_t server_id = i ? members->of[i - 1].server_id : home_id;
        const struct pc__asked *asked = asked_of(loop->repairs, server_id);
        if (server_id == loop->engine->server_id)
            return i;
        blocks[i] = asked ? asked->blocks : 0;
    }
    return pc__choose_mirror(blocks, members->n + 1, next_random(loop->repairs));
}

/* A mirror that is asked because the home does not answer. */
static uint32_t other_mirror(struct pc__loop *loop, const struct pc__members *members, uint64_t not_id)
{
    uint64_t blocks[PC__REPAIR_MEMBERS];
    for (uint32_t i = 0; i < members->n; i++) {
        const struct pc__asked *asked = asked_of(loop->repairs, members->of[i].server_id);
        if (members->of[i].server_id == loop->engine->server_id)
            return i;
        blocks[i] = asked ? asked->blocks : 0;
        if (members->of[i].server_id == not_id)
            blocks[i] = NEVER;
    }
    return pc__choose_mirror(blocks, members->n, next_random(loop->repairs));
}

/* ------------------------------------------------------------- steps of a repair */

static uint64_t hedge_after_ns(struct pc__loop *loop, uint64_t server_id, uint64_t n_blocks)
{
    const struct pc__peer *peer = pc__peer_of(loop, server_id);
    const struct pc__asked *asked = asked_of(loop->repairs, server_id);
    const struct pc__rtt unknown = {0};
    return pc__hedge_after_ns(peer ? &peer->rtt[pc__rtt_class(n_blocks)] : &unknown,
                              asked ? asked->in_vain : 0);
}

/* Nobody is burdened twice where there is no connection: that needs nothing of the budget. */
static bool is_reached(struct pc__loop *loop, const struct pc__fetch *fetch, uint64_t server_id)
{
    const struct pc__peer *peer = pc__peer_of(loop, server_id);
    return peer && peer->lanes[fetch->urgent ? 0 : 1].fd >= 0;
}

/* It is asked, and says nothing to anybody here: what is stopped has not too much to do. */
static bool is_silent(struct pc__loop *loop, uint64_t server_id, uint64_t now_ns)
{
    const struct pc__peer *peer = pc__peer_of(loop, server_id);
    uint64_t heard_ns = 0;
    bool is_asked = false;
    for (int i = 0; peer && i < PC__LANES_PER_LOOP; i++) {
        const struct pc__lane *lane = &peer->lanes[i];
        is_asked |= lane->n_sent > 0;
        heard_ns = lane->progress_ns > heard_ns ? lane->progress_ns : heard_ns;
    }
    return is_asked && now_ns > heard_ns + PC__HEDGE_SILENT_NS;
}

/* Whether one more request may go out while that server is asked. */
static bool may_hedge(struct pc__loop *loop, uint64_t server_id, uint64_t now_ns)
{
    return is_silent(loop, server_id, now_ns) || pc__hedge_take(&loop->repairs->hedges);
}

/* A thread is stopped for the one, and nobody, or a prefetch, waits for the other. */
static uint64_t patience_ns(struct pc__loop *loop, const struct pc__fetch *fetch, uint64_t server_id)
{
    const uint64_t after_ns = hedge_after_ns(loop, server_id, fetch->n_blocks);
    return fetch->urgent || after_ns > PC__REDIRECT_PATIENCE_NS ? after_ns : PC__REDIRECT_PATIENCE_NS;
}

/* A mirror was asked in place of the home, and has nothing, or takes too long. */
static void turn_home(struct pc__repair *repair, uint64_t now_ns)
{
    struct pc__loop *loop = repair->loop;
    struct pc__fetch *fetch = repair->fetch;
    repair->holds = false;
    repair->had_mirror = repair->n_parts > 0;
    if (!repair->n_parts)
        repair->state = WATCHES;
    fetch->server_id = pc__home_of(fetch->region, first_block(fetch));
    put_at(repair, repair->state == WATCHES ? now_ns + patience_ns(loop, fetch, fetch->server_id) : NEVER);
    pc__count_add(&loop->engine->count.fetch_retries, 1);
    if (fetch->server_id == loop->engine->server_id)
        pc__fetch_fill_here(loop, fetch);
    else
        pc__fetch_queue(loop, fetch);
}

/* won: who was asked besides was faster. */
static void hedge_ended(struct pc__repair *repair, bool won)
{
    struct pc__asked *asked = asked_of(repair->loop->repairs, repair->server_id);
    if (!repair->is_hedge)
        return;
    if (won)
        pc__count_add(&repair->loop->engine->count.hedges_won, 1);
    if (asked)
        asked->in_vain = won ? 0 : asked->in_vain + 1;
}

/* Fills in what the fetch has not got yet. */
static int fill(struct pc__repair *repair)
{
    struct pc__fetch *fetch = repair->fetch;
    struct pc_engine *engine = repair->loop->engine;
    uint32_t position = repair->n_blocks - fetch->n_blocks; /* it goes on from its front alone */
    int rc = PC_OK;
    for (uint32_t i = fetch->at_run; i < fetch->n_runs; i++) {
        uint64_t first = fetch->runs[i].first_block;
        for (uint64_t left = fetch->runs[i].n_blocks, n; left; left -= n, first += n) {
            const bool is_hole = !(repair->has_bytes >> position & 1u);
            for (n = 1; n < left && !(repair->has_bytes >> (position + n) & 1u) == is_hole;)
                n++;
            if (!rc)
                rc = is_hole ? pc__fill_zeros(engine, fetch->region, fetch->generation, first, n)
                             : pc__fill_insert(engine, fetch->region, fetch->generation, first, n,
                                               repair->bytes + ((size_t)position << PC_BLOCK_SHIFT),
                                               true);
            if (rc)
                pc__fill_failed(engine, fetch->region, fetch->generation, first, n,
                                fetch->server_id, rc);
            position += (uint32_t)n;
        }
    }
    return rc;
}

static void succeed(struct pc__repair *repair)
{
    struct pc__fetch *fetch = repair->fetch;
    struct pc__counters *count = &repair->loop->engine->count;
    /* Before the fill, which answers who then asks for counters. */
    pc__count_add(repair->holds || repair->had_mirror ? &count->mirror_blocks
                                                      : &count->degraded_blocks,
                  fetch->n_blocks);
    if (fetch->prefetch)
        pc__count_add(&count->prefetched_blocks, fetch->n_blocks);
    hedge_ended(repair, !repair->had_mirror);
    (void)fill(repair); /* who waited has been told */
    fetch->repair = NULL;
    fetch->is_filled = true;
    if (!fetch->on_wire) {
        pc__link_remove(&fetch->link);
        pc__fetch_drop(repair->loop->engine, fetch);
    }
    free_repair(repair);
}

/* Nobody makes them again. */
static void give_up(struct pc__repair *repair)
{
    struct pc_engine *engine = repair->loop->engine;
    struct pc__fetch *fetch = repair->fetch;
    pc__fetch_fail(engine, fetch, PC_ERR_HOME_LOST);
    pc__fetch_drop(engine, fetch);
}

/* Some of them are lost elsewhere too: that is no harm to the others. */
static void try_each(struct pc__repair *repair)
{
    struct pc__fetch *fetch = repair->fetch, *one = NULL;
    while (fetch->n_blocks && !pc__fetch_set_aside(fetch, 1, &one)) {
        pc__fetch_lost(repair->loop, one);
        one = NULL;
    }
    give_up(repair); /* what there was no memory for */
}

/* What others still send is thrown away; then it may begin again. */
static void fail(struct pc__repair *repair, uint64_t now_ns)
{
    struct pc__fetch *fetch = repair->fetch;
    pc__members_failed(fetch->region, fetch->generation->version);
    if (repair->holds) {
        turn_home(repair, now_ns);
        return;
    }
    if (repair->n_parts) { /* each that is out names it */
        put_at(repair, deadline_ns(repair));
        return;
    }
    repair->n_failed++;
    repair->loop->repairs->n_xor -= repair->is_xor; /* while it waits for its next try others may begin */
    repair->is_xor = false;
    if (repair->is_alone && repair->error == PC_ERR_HOME_LOST) {
        if (fetch->n_blocks > 1) {
            try_each(repair);
            return;
        }
        if (now_ns >= repair->vain_ns) {
            give_up(repair);
            return;
        }
    }
    repair->state = repair->is_stranded ? WANTS : WATCHES;
    put_at(repair, now_ns + (repair->state == WATCHES ? patience_ns(repair->loop, fetch, fetch->server_id)
                                                      : PC__REPAIR_PAUSE_NS));
    repair->is_hedge = repair->had_mirror = false;
}

static void try_to_begin(struct pc__repair *repair, uint64_t now_ns)
{
    struct pc__fetch *fetch = repair->fetch;
    struct pc__loop *loop = repair->loop;
    struct pc__members members;
    const enum pc__members_known known =
        pc__members_of(loop->engine, fetch->region, fetch->generation->version, &members);
    if (known == PC__MEMBERS_NONE && repair->is_alone && now_ns >= repair->vain_ns) {
        give_up(repair);
        return;
    }
    if (known != PC__MEMBERS_KNOWN) {
        put_at(repair, now_ns + PC__REPAIR_PAUSE_NS);
        return;
    }
    const bool is_bulk = !fetch->urgent && !repair->is_hurried;
    if (!members.is_mirror && !repair->is_xor &&
        loop->repairs->n_xor >= (is_bulk ? BULK_AT_ONCE : AT_ONCE)) {
        put_at(repair, now_ns + (is_bulk ? BULK_PAUSE_NS : NO_ROOM_PAUSE_NS));
        return;
    }
    if (repair->is_hedge)
        pc__count_add(&loop->engine->count.hedges, 1);
    begin(repair, &members,
          repair->is_alone && repair->n_failed ? repair->n_failed % members.n /* each in its turn */
                                               : other_mirror(loop, &members, fetch->server_id));
}

/* It is late. The home is asked besides, and the first that answers has it. */
static void look_at_mirror(struct pc__repair *repair, uint64_t now_ns)
{
    const bool is_asked = is_reached(repair->loop, repair->fetch, repair->server_id);
    const uint64_t until_ns = repair->began_ns + PC__REDIRECT_PATIENCE_NS;
    const uint64_t again_ns = now_ns + hedge_after_ns(repair->loop, repair->server_id, repair->n_blocks);
    if (is_asked && now_ns < until_ns && !may_hedge(repair->loop, repair->server_id, now_ns)) {
        put_at(repair, again_ns < until_ns ? again_ns : until_ns);
        return;
    }
    if (is_asked && now_ns < until_ns) {
        repair->is_hedge = true;
        pc__count_add(&repair->loop->engine->count.hedges, 1);
    }
    turn_home(repair, now_ns);
}

static void look(struct pc__repair *repair, uint64_t now_ns)
{
    struct pc__loop *loop = repair->loop;
    struct pc__fetch *fetch = repair->fetch;
    if (fetch->error) { /* it was told to who waited, and its blocks are in flight no more: others may */
        pc__repair_fetch_ended(fetch); /* write them. What the home still sends is thrown away */
        return;
    }
    if (repair->is_alone && now_ns >= fetch->give_up_ns) {
        give_up(repair);
        return;
    }
    switch (repair->state) {
    case WATCHES:
        repair->is_hedge = is_reached(loop, fetch, fetch->server_id);
        if (repair->is_hedge && !fetch->urgent && !fetch->on_wire &&
            !is_silent(loop, fetch->server_id, now_ns)) { /* it waits for others of ours, not for the home */
            repair->is_hedge = false;
            put_at(repair, now_ns + PC__REDIRECT_PATIENCE_NS);
            return;
        }
        if (repair->is_hedge && !may_hedge(loop, fetch->server_id, now_ns)) {
            repair->is_hedge = false;
            put_at(repair, now_ns + hedge_after_ns(loop, fetch->server_id, fetch->n_blocks));
            return;
        }
        repair->is_stranded |= !repair->is_hedge; /* for now: it is tried again */
        repair->state = WANTS;
        try_to_begin(repair, now_ns);
        return;
    case WANTS:
        try_to_begin(repair, now_ns);
        return;
    case RUNS:
        if (repair->error)
            fail(repair, now_ns);
        else if (!repair->n_parts)
            succeed(repair);
        else if (repair->holds)
            look_at_mirror(repair, now_ns);
        else
            put_at(repair, deadline_ns(repair));
        return;
    }
}

/* ------------------------------------------------------------- what is told of fetches */

/* True: a mirror is asked. */
static bool ask_mirror(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc__members members;
    uint32_t chosen = 0;
    if (pc__members_of(loop->engine, fetch->region, fetch->generation->version, &members) ==
            PC__MEMBERS_KNOWN &&
        members.is_mirror && repairs_of(loop))
        chosen = choose(loop, &members, fetch->server_id);
    struct pc__repair *repair = repair_of(loop, fetch);
    if (!repair)
        return false;
    repair->server_id = chosen ? members.of[chosen - 1].server_id : fetch->server_id;
    if (!chosen) {
        count_in(loop->repairs, repair->server_id, fetch->n_blocks, &repair->counted_blocks);
        return false;
    }
    repair->holds = true;
    begin(repair, &members, chosen - 1);
    if (repair->n_parts) {
        put_at(repair, pc__now_ns() + patience_ns(loop, fetch, repair->server_id));
    }
    return true;
}

bool pc__repair_asked(struct pc__loop *loop, struct pc__fetch *fetch)
{
    if (!may_be_repaired(fetch) || !repairs_of(loop))
        return false;
    if (fetch->urgent)
        pc__hedge_request(&loop->repairs->hedges);
    if (pc__is_mirrored(loop->engine, fetch->region, fetch->generation->version) &&
        ask_mirror(loop, fetch))
        return true;
    struct pc__repair *repair = repair_of(loop, fetch);
    if (repair) {
        repair->server_id = fetch->server_id;
        put_at(repair, pc__now_ns() + patience_ns(loop, fetch, fetch->server_id));
    }
    return false;
}

void pc__repair_hurried(struct pc__loop *loop, const struct pc__generation *generation, uint64_t block)
{
    const uint64_t now_ns = pc__now_ns();
    if (!loop->repairs)
        return;
    pc__each(link, &loop->repairs->timed)
    {
        struct pc__repair *repair = pc__of(link, struct pc__repair, link);
        const struct pc__fetch *fetch = repair->fetch;
        if (!fetch || fetch->generation != generation || !pc__fetch_covers(fetch, block))
            continue;
        repair->is_hurried = true;
        if (repair->state == WANTS)
            put_at(repair, now_ns); /* it need not wait as bulk does */
        if (repair->state != WATCHES && !repair->holds)
            return; /* others are asked, or are to be */
        const uint64_t at_ns = now_ns + hedge_after_ns(loop, repair->server_id, fetch->n_blocks);
        if (at_ns < repair->at_ns) {
            pc__hedge_request(&loop->repairs->hedges); /* as if it were one */
            put_at(repair, at_ns);
        }
        return;
    }
}

void pc__repair_stranded(struct pc__loop *loop, struct pc__fetch *fetch)
{
    if (!may_be_repaired(fetch))
        return;
    struct pc__repair *repair = repair_of(loop, fetch);
    if (!repair)
        return;
    repair->is_stranded = true;
    if (repair->state != WATCHES)
        return; /* it is asked for elsewhere already, or is to be */
    repair->state = WANTS;
    repair->had_mirror = false;
    put_at(repair, 0);
}

bool pc__repair_lost(struct pc__loop *loop, struct pc__fetch *fetch)
{
    struct pc__repair *repair = may_be_repaired(fetch) ? repair_of(loop, fetch) : NULL;
    if (!repair)
        return false;
    repair->is_alone = repair->is_stranded = true;
    repair->vain_ns = pc__now_ns() + LOST_PATIENCE_NS;
    repair->state = WANTS;
    put_at(repair, 0);
    return true;
}

void pc__repair_fetch_ended(struct pc__fetch *fetch)
{
    struct pc__repair *repair = fetch->repair;
    if (repair->state == RUNS && !fetch->n_blocks)
        hedge_ended(repair, repair->had_mirror);
    fetch->repair = NULL;
    repair->fetch = NULL;
    if (repair->n_parts)
        put_at(repair, NEVER); /* until those have ended */
    else
        free_repair(repair);
}

void pc__repair_said(struct pc__loop *loop, struct pc__mail *mail)
{
    if (!loop->repairs)
        return;
    pc__each(link, &loop->repairs->timed)
    {
        struct pc__repair *repair = pc__of(link, struct pc__repair, link);
        if (repair->state == WANTS && repair->fetch->region->id == mail->a &&
            repair->fetch->generation->version == mail->b)
            put_at(repair, 0);
    }
}

/* ------------------------------------------------------------------- the loop's turns */

uint64_t pc__repairs_deadline(const struct pc__loop *loop)
{
    const struct pc__repairs *repairs = loop->repairs;
    if (!repairs)
        return NEVER;
    return pc__link_empty(&repairs->ready) ? repairs->next_ns : 0;
}

static void look_at_all(struct pc__repairs *repairs, uint64_t now_ns)
{
    struct pc__link due;
    pc__link_init(&due);
    repairs->next_ns = NEVER;
    pc__each(link, &repairs->timed)
    {
        const uint64_t at_ns = pc__of(link, struct pc__repair, link)->at_ns;
        if (at_ns <= now_ns) {
            pc__link_remove(link);
            pc__link_push(&due, link);
        } else if (at_ns < repairs->next_ns) {
            repairs->next_ns = at_ns;
        }
    }
    while (!pc__link_empty(&due)) /* each leaves the list: it is put elsewhere, or freed */
        look(pc__of(due.next, struct pc__repair, link), now_ns);
}

void pc__repairs_tick(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc__repairs *repairs = loop->repairs;
    if (!repairs)
        return;
    if (repairs->next_ns <= now_ns)
        look_at_all(repairs, now_ns);
    while (!pc__link_empty(&repairs->ready))
        look(pc__of(repairs->ready.next, struct pc__repair, link), now_ns);
}

static void close_all(struct pc__loop *loop, struct pc__link *repairs)
{
    pc__each(link, repairs)
    {
        struct pc__repair *repair = pc__of(link, struct pc__repair, link);
        if (!(repair->holds || repair->is_alone) || !repair->fetch)
            continue; /* the peers' lists have it */
        pc__fetch_fail(loop->engine, repair->fetch, PC_ERR_CLOSED);
        pc__fetch_drop(loop->engine, repair->fetch);
    }
}

void pc__repairs_close(struct pc__loop *loop)
{
    if (!loop->repairs)
        return;
    close_all(loop, &loop->repairs->ready);
    close_all(loop, &loop->repairs->timed);
}

void pc__repairs_free(struct pc__loop *loop)
{
    if (!loop->repairs)
        return;
    free(loop->repairs->asked);
    free(loop->repairs);
    loop->repairs = NULL;
}
