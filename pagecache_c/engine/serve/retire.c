/* retire.c - a region is freed: what a process of this node says, and what a home says to those who
 * ask it for blocks. The registry tells every server too, but later and in batches; this is so that
 * `get` fails on every node as soon as `free` has returned.
 *
 *   process ── RETIRE ──► its page server: no lease begins here any more
 *                         │ if it is the home: RETIRE on connections on which others ask it
 *                         ◄── RETIRED, each
 *           ◄── reply ────┘ after the last of them; an error: the process asks the registry to see to it
 *
 * Why it is believed: a process of this node may free whatever it likes. Of another server, only the
 * home of the region is believed, and only on a connection that we made to it: it is the one whose word
 * its blocks are anyway, and could end the region as well by not answering. What is not looked up here
 * yet is not touched: whoever opens it asks the registry, which knows. A look-up that is under way may
 * bring an answer from before: then we say so, and are told by the registry.
 *
 * Entered by the loops. Lock: retiring.lock, a leaf, around the list. No wait: who asked has a
 * deadline, and what is older than ANSWER_NS is forgotten when the next one comes.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"
#include "engine/serve/serve.h"

#include <stdlib.h>
#include <string.h>

#define ANSWER_NS 5000000000ull /* longer than who asks waits */
#define MOST_RETIRING 1024u

/* One RETIRE of a process, while it waits for other servers. */
struct retiring {
    struct pc__link link;
    struct pc__loop *loop;       /* of the client */
    uint64_t session_id, until_ns;
    uint32_t request_id;         /* the client's */
    uint32_t id;                 /* ours, in what is said to the others */
    uint32_t n, n_done, n_told;
    int loops_left;              /* that have not looked for connections yet */
    uint64_t told, done;         /* a bit for each of the servers */
    uint64_t servers[PC__RETIRE_MOST];
};
static_assert(PC__RETIRE_MOST <= 64, "a bit each");

/* ------------------------------------------------------------------- here */

static bool is_home(const struct pc__region *region, uint64_t server_id)
{
    size_t n = (region->length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
    for (size_t i = 0; region->homes && i < n; i++)
        if (region->homes[i] == server_id)
            return true;
    return false;
}

/* Under region.lock. 1: it is to be retired; 0: no lease can begin anyway; negative: why not.
 * from: the server that says so; 0: a process of this node. */
static int judge(const struct pc__region *region, uint64_t from)
{
    switch (region->state) {
    case PC__REGION_RETIRED:
        return 0;
    case PC__REGION_READY:
        if (!from || is_home(region, from))
            return 1;
        return pc__fail(PC_ERR_DENIED, "server %016llx is not the home of variable %llu",
                        (unsigned long long)from, (unsigned long long)region->id);
    case PC__REGION_CREATING:
        return pc__fail(PC_ERR_NO_REGION, "variable %llu is not sealed yet",
                        (unsigned long long)region->id);
    default:
        if (!region->asked_region)
            return 0;
        return pc__fail(PC_ERR_TIMEOUT, "variable %llu is being looked up",
                        (unsigned long long)region->id);
    }
}

/* From now on no lease on the region begins here; or why that cannot be promised. */
static int retire_here(struct pc_engine *engine, uint64_t id, uint64_t from)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return PC_OK; /* who opens it asks the registry */
    pthread_mutex_lock(&region->lock);
    int rc = judge(region, from);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    return rc > 0 ? pc_engine_retire(engine, id, 0) : rc;
}

/* Nobody else has heard of it: without a lease here it is idle everywhere. */
static void drop_if_idle(struct pc_engine *engine, uint64_t id)
{
    struct pc__region *region = pc__region_get(engine, id);
    if (!region)
        return;
    pthread_mutex_lock(&region->lock);
    bool idle = region->state == PC__REGION_RETIRED && region->idle_told;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    if (idle)
        (void)pc_engine_retire(engine, id, 1);
}

/* ------------------------------------------------ what the others answered */

static void reply(struct pc__loop *loop, struct pc__mail *mail)
{
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        if (session->id != mail->a || session->closed)
            continue;
        pc__session_send(session, PC__CTL_REPLY, (uint32_t)mail->b, mail->error, NULL, 0, -1);
        break;
    }
}

/* Not under the lock any more, and in no list. */
static void finish(struct retiring *retiring, int error)
{
    const struct pc__mail mail = {.run = reply, .a = retiring->session_id,
                                  .b = retiring->request_id, .error = error};
    (void)pc__loop_post(retiring->loop, &mail); /* who asked has a deadline */
    free(retiring);
}

/* Under retiring.lock. */
static struct retiring *find(struct pc_engine *engine, uint32_t id)
{
    pc__each(link, &engine->retiring.waiting)
    {
        struct retiring *retiring = pc__of(link, struct retiring, link);
        if (retiring->id == id)
            return retiring;
    }
    return NULL;
}

/* Under retiring.lock: its bit, or 0. */
static uint64_t bit_of(const struct retiring *retiring, uint64_t server_id)
{
    for (uint32_t i = 0; i < retiring->n; i++)
        if (retiring->servers[i] == server_id)
            return 1ull << i;
    return 0;
}

/* Under retiring.lock: takes it out of the list. */
static void take_out(struct pc_engine *engine, struct retiring *retiring)
{
    pc__link_remove(&retiring->link);
    engine->retiring.n--;
}

bool pc__retire_tells(struct pc_engine *engine, uint32_t id, uint64_t server_id)
{
    pthread_mutex_lock(&engine->retiring.lock);
    struct retiring *retiring = find(engine, id);
    uint64_t bit = retiring ? bit_of(retiring, server_id) & ~retiring->told : 0;
    if (bit) {
        retiring->told |= bit;
        retiring->n_told++;
    }
    pthread_mutex_unlock(&engine->retiring.lock);
    return bit != 0;
}

void pc__retire_looked(struct pc_engine *engine, uint32_t id)
{
    pthread_mutex_lock(&engine->retiring.lock);
    struct retiring *retiring = find(engine, id);
    bool fails = retiring && --retiring->loops_left == 0 && retiring->n_told < retiring->n;
    if (fails)
        take_out(engine, retiring);
    pthread_mutex_unlock(&engine->retiring.lock);
    if (fails)
        finish(retiring, PC_ERR_NO_PEER);
}

void pc__retired(struct pc_engine *engine, uint64_t server_id, uint32_t id, int status)
{
    pthread_mutex_lock(&engine->retiring.lock);
    struct retiring *retiring = find(engine, id);
    uint64_t bit = retiring ? bit_of(retiring, server_id) & retiring->told & ~retiring->done : 0;
    if (bit) {
        retiring->done |= bit;
        retiring->n_done++;
    }
    bool ends = bit && (status || retiring->n_done == retiring->n);
    if (ends)
        take_out(engine, retiring);
    pthread_mutex_unlock(&engine->retiring.lock);
    if (ends)
        finish(retiring, status);
}

/* ------------------------------------------------------- what is asked of us */

/* Those that nobody waits for any more: a server has not answered. */
static void forget_old(struct pc_engine *engine)
{
    uint64_t now_ns = pc__now_ns();
    pc__each(link, &engine->retiring.waiting)
    {
        struct retiring *retiring = pc__of(link, struct retiring, link);
        if (retiring->until_ns > now_ns)
            break; /* the oldest come first */
        take_out(engine, retiring);
        free(retiring);
    }
}

/* The answer comes later. Negative: it does not. */
static int tell_others(struct pc__session *session, const struct pc__ctl_message *message,
                       const struct pc__ctl_retire *head, const uint64_t *servers)
{
    struct pc_engine *engine = session->loop->engine;
    struct retiring *retiring = calloc(1, sizeof *retiring);
    if (!retiring)
        return pc__fail(PC_ERR_NO_MEMORY, "a variable that is freed");
    *retiring = (struct retiring){.loop = session->loop,
                                  .session_id = session->id,
                                  .until_ns = pc__now_ns() + ANSWER_NS,
                                  .request_id = message->header.request_id,
                                  .n = head->n_servers,
                                  .loops_left = engine->n_loops};
    memcpy(retiring->servers, servers, head->n_servers * sizeof *servers);
    pthread_mutex_lock(&engine->retiring.lock);
    forget_old(engine);
    bool full = engine->retiring.n >= MOST_RETIRING;
    const uint32_t id = retiring->id = ++engine->retiring.last_id;
    if (!full) {
        pc__link_push(&engine->retiring.waiting, &retiring->link);
        engine->retiring.n++;
    }
    pthread_mutex_unlock(&engine->retiring.lock);
    if (full) {
        free(retiring);
        return pc__fail(PC_ERR_NO_MEMORY, "%u variables that are freed", MOST_RETIRING);
    }
    for (int i = 0; i < engine->n_loops; i++) {
        const struct pc__mail mail = {.run = pc__served_retire, .a = head->region, .b = id};
        if (pc__loop_post(&engine->loops[i], &mail))
            pc__retire_looked(engine, id); /* where it has a connection, that is not found */
    }
    return PC_OK;
}

void pc__session_retire(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__ctl_retire head = {0};
    uint64_t servers[PC__RETIRE_MOST];
    int rc = pc__ctl_parse_retire(message, &head, servers, PC__RETIRE_MOST);
    const bool others = rc > 0;
    if (rc >= 0)
        rc = retire_here(engine, head.region, 0);
    if (!rc && head.alone)
        drop_if_idle(engine, head.region);
    if (!rc && others)
        rc = tell_others(session, message, &head, servers);
    if (rc || !others)
        pc__session_reply(session, message, rc);
}

size_t pc__retire_take(struct pc__peer *peer, const struct pc__data_header *header, uint8_t *answer)
{
    const struct pc__data_header said = {
        .magic = PC__DATA_MAGIC,
        .type = PC__DATA_RETIRED,
        .request_id = header->request_id,
        .status = retire_here(peer->loop->engine, header->region, peer->server_id),
        .region = header->region};
    memcpy(answer, &said, sizeof said);
    return sizeof said;
}

/* ----------------------------------------------------------- start and stop */

void pc__retiring_open(struct pc_engine *engine)
{
    pthread_mutex_init(&engine->retiring.lock, NULL);
    pc__link_init(&engine->retiring.waiting);
}

void pc__retiring_close(struct pc_engine *engine)
{
    while (!pc__link_empty(&engine->retiring.waiting)) {
        struct retiring *retiring = pc__of(engine->retiring.waiting.next, struct retiring, link);
        take_out(engine, retiring);
        free(retiring);
    }
    pthread_mutex_destroy(&engine->retiring.lock);
}
