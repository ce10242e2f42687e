/* rehome.c - fetches from a home that is lost, or that does not know the region: NEED_HOME is asked. They
 * go to the new home, or fail, with the answer; or with their own deadline. The queues belong to their loops.
 *
 * Of a lost home they stay in its queue. One that lives and does not know the region may be told of it
 * late, may have been one, or has let go of what was freed: only the registry knows which. What it was
 * to give, and what was to be asked of it next, waits in peer->unsure, and is asked again after a pause.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#define PAUSE_NS 500000000ull /* between two questions about a region, to its home and to the registry */

static uint64_t home_of(const struct pc__fetch *fetch)
{
    uint64_t block = fetch->gather ? pc__gather_first_block(fetch)
                                   : fetch->runs[fetch->at_run].first_block;
    return pc__home_of(fetch->region, block);
}

/* Out of the list of a server that is not their home any more. */
static void take_moved(struct pc__link *fetches, uint64_t server_id, uint64_t id,
                       struct pc__link *moved)
{
    pc__each(link, fetches)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        if (fetch->home_id || fetch->generation->is_layer || (id && fetch->region->id != id) ||
            home_of(fetch) == server_id)
            continue;
        pc__link_remove(link);
        pc__link_push(moved, link);
    }
}

static void go_home(struct pc__loop *loop, struct pc__link *moved)
{
    while (!pc__link_empty(moved)) {
        struct pc__fetch *fetch = pc__of(moved->next, struct pc__fetch, link);
        pc__link_remove(&fetch->link);
        fetch->server_id = home_of(fetch);
        fetch->missed_id = 0;
        pc__count_add(&loop->engine->count.fetch_retries, 1);
        if (fetch->server_id == loop->engine->server_id)
            pc__fetch_fill_here(loop, fetch);
        else
            pc__fetch_queue(loop, fetch);
    }
}

/* It is asked for again after a pause, wherever its home is then. */
static void wait_a_while(struct pc__peer *peer, struct pc__fetch *fetch, uint64_t now_ns)
{
    if (!fetch->give_up_ns)
        fetch->give_up_ns = now_ns + peer->loop->engine->fault_timeout_ns;
    fetch->again_ns = now_ns + PAUSE_NS < fetch->give_up_ns ? now_ns + PAUSE_NS : fetch->give_up_ns;
    pc__link_push(&peer->unsure, &fetch->link);
    peer->loop->engine->observers.fetch_stranded(peer->loop, fetch);
}

/* Not before: of a server that is lost, 0. False: it could not be asked, for want of memory. */
static bool ask_for_home(struct pc_engine *engine, struct pc__region *region, uint64_t server_id,
                         uint64_t not_before_ns)
{
    const uint64_t now_ns = pc__now_ns();
    pthread_mutex_lock(&region->lock);
    bool ask = !region->asked_home && now_ns >= not_before_ns;
    if (ask) {
        region->asked_home = true;
        region->ask_home_ns = now_ns + PAUSE_NS;
    }
    pthread_mutex_unlock(&region->lock);
    if (!ask || pc__engine_event(engine, PC_EVENT_NEED_HOME, 0, region->id, server_id, "%s", ""))
        return true;
    pthread_mutex_lock(&region->lock);
    region->asked_home = false;
    pthread_mutex_unlock(&region->lock);
    return false;
}

void pc__rehome_await(struct pc__loop *loop, struct pc__peer *peer, struct pc__lane *lane,
                       struct pc__link *failed)
{
    struct pc__link moved;
    pc__link_init(&moved);
    take_moved(&lane->queued, peer->server_id, 0, &moved);
    pc__each(link, &lane->queued)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        const bool from_home = !fetch->home_id && !fetch->generation->is_layer;
        if (from_home && ask_for_home(loop->engine, fetch->region, peer->server_id, 0)) {
            loop->engine->observers.fetch_stranded(loop, fetch);
            continue;
        }
        pc__link_remove(link);
        if (from_home) /* a want of memory is no loss */
            wait_a_while(peer, fetch, pc__now_ns());
        else
            pc__link_push(failed, link);
    }
    go_home(loop, &moved);
}

/* ------------------------------------------------------ homes that do not know the region */

/* What was to be asked of it next: it would only say the same. */
static void hold_back(struct pc__peer *peer, const struct pc__region *region, uint64_t now_ns)
{
    for (int i = 0; i < PC__LANES_PER_LOOP; i++)
        pc__each(link, &peer->lanes[i].queued)
        {
            struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
            if (fetch->region != region || fetch->home_id)
                continue;
            pc__link_remove(link);
            wait_a_while(peer, fetch, now_ns);
        }
}

static void give_up(struct pc_engine *engine, struct pc__fetch *fetch, int error)
{
    pc__fetch_fail(engine, fetch, error);
    pc__fetch_drop(engine, fetch);
}

/* It was freed, and nobody here has a lease: nobody waits for its blocks, and no answer about it comes. */
static bool is_forgotten(struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    const bool forgotten = region->forgotten;
    pthread_mutex_unlock(&region->lock);
    return forgotten;
}

void pc__rehome_unknown(struct pc__peer *peer, struct pc__fetch *fetch)
{
    struct pc__loop *loop = peer->loop;
    struct pc__region *region = fetch->region;
    const uint64_t now_ns = pc__now_ns();
    if (home_of(fetch) != peer->server_id) { /* it was one when it was asked */
        struct pc__link moved;
        pc__link_init(&moved);
        pc__link_push(&moved, &fetch->link);
        go_home(loop, &moved);
        return;
    }
    if (is_forgotten(region)) {
        give_up(loop->engine, fetch, PC_ERR_NO_REGION);
        return;
    }
    pc__unreached_unknown(loop->engine, peer->server_id, region->id);
    if (fetch->give_up_ns && fetch->give_up_ns <= now_ns) {
        give_up(loop->engine, fetch, PC_ERR_TIMEOUT);
        return;
    }
    wait_a_while(peer, fetch, now_ns);
    hold_back(peer, region, now_ns);
    pthread_mutex_lock(&region->lock);
    const uint64_t not_before_ns = region->ask_home_ns;
    pthread_mutex_unlock(&region->lock);
    (void)ask_for_home(loop->engine, region, peer->server_id, not_before_ns); /* else after the pause */
}

uint64_t pc__rehome_deadline(const struct pc__peer *peer)
{
    return pc__link_empty(&peer->unsure)
               ? UINT64_MAX
               : pc__of(peer->unsure.next, struct pc__fetch, link)->again_ns;
}

/* They came with the same pause: the first of them is due first, but for deadlines, which can wait for it. */
void pc__rehome_tick(struct pc__peer *peer, uint64_t now_ns)
{
    struct pc__link due;
    pc__link_init(&due);
    while (pc__rehome_deadline(peer) <= now_ns) {
        struct pc__fetch *fetch = pc__of(peer->unsure.next, struct pc__fetch, link);
        pc__link_remove(&fetch->link);
        if (is_forgotten(fetch->region))
            give_up(peer->loop->engine, fetch, PC_ERR_NO_REGION);
        else if (fetch->give_up_ns <= now_ns)
            give_up(peer->loop->engine, fetch, PC_ERR_TIMEOUT);
        else
            pc__link_push(&due, &fetch->link);
    }
    go_home(peer->loop, &due);
}

void pc__rehome_close(struct pc__peer *peer)
{
    while (!pc__link_empty(&peer->unsure)) {
        struct pc__fetch *fetch = pc__of(peer->unsure.next, struct pc__fetch, link);
        pc__link_remove(&fetch->link);
        give_up(peer->loop->engine, fetch, PC_ERR_CLOSED);
    }
}

/* ------------------------------------------------------------------- answers */

static void fail_those(struct pc__loop *loop, struct pc__link *fetches, uint64_t id, int error)
{
    pc__each(link, fetches)
    {
        struct pc__fetch *fetch = pc__of(link, struct pc__fetch, link);
        if (fetch->home_id || fetch->generation->is_layer || fetch->region->id != id)
            continue;
        pc__link_remove(link);
        give_up(loop->engine, fetch, error);
    }
}

void pc__homes_changed(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__link moved;
    pc__link_init(&moved);
    pc__each(link, &loop->peers)
    {
        struct pc__peer *peer = pc__of(link, struct pc__peer, link);
        for (int i = 0; i < PC__LANES_PER_LOOP; i++) {
            take_moved(&peer->lanes[i].queued, peer->server_id, mail->a, &moved);
            if (mail->error && peer->server_id == mail->b)
                fail_those(loop, &peer->lanes[i].queued, mail->a, mail->error);
        }
        take_moved(&peer->unsure, peer->server_id, mail->a, &moved);
        if (mail->error && peer->server_id == mail->b)
            fail_those(loop, &peer->unsure, mail->a, mail->error);
        pc__peer_ask_again(peer); /* it was taken for lost, and is the home all the same */
    }
    go_home(loop, &moved);
}
