/* control_open.c - the leases of this node's processes: open, attach, close.
 *
 * Entered by the loop that owns the client.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------- mappings */

static int add_mapping(struct pc__session *session, const struct pc__ctl_open *open,
                       struct pc__region *region, struct pc__generation *generation)
{
    size_t at = pc__session_mapping_after(session, open->address);
    if (open->address % PC_BLOCK_BYTES || open->length_bytes > UINT64_MAX - open->address ||
        (at < session->n_mappings &&
         session->mappings[at].address < open->address + open->length_bytes) ||
        pc__session_mapping(session, open->mapping_id))
        return pc__fail(PC_ERR_EXISTS, "a mapping overlaps another of the same process");
    if (session->n_mappings == session->mappings_capacity) {
        size_t capacity = session->mappings_capacity ? session->mappings_capacity * 2 : 8;
        struct pc__session_map *grown = realloc(session->mappings, capacity * sizeof *grown);
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "a mapping record");
        session->mappings = grown;
        session->mappings_capacity = capacity;
    }
    struct pc__lease *lease = calloc(1, sizeof *lease);
    if (!lease)
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping record");
    struct pc__window_user *user = NULL;
    if (session->page && !generation->complete &&
        !(user = pc__windows_add(generation, session->window_owner, open->address,
                                 open->length_bytes))) {
        free(lease);
        return pc__fail(PC_ERR_NO_MEMORY, "a mapping record");
    }
    memmove(&session->mappings[at + 1], &session->mappings[at],
            (session->n_mappings - at) * sizeof session->mappings[0]);
    session->mappings[at] = (struct pc__session_map){.id = open->mapping_id,
                                                .address = open->address,
                                                .length_bytes = open->length_bytes,
                                                .version = open->version,
                                                .is_private = open->flags & PC_MAP_PRIVATE,
                                                .exact_reads =
                                                    open->flags & PC_MAP_EXACT_READS &&
                                                    session->trap != PC_TRAP_SIGSEGV,
                                                .page_shift = pc__map_page_shift(open->flags),
                                                .region = region,
                                                .lease = lease,
                                                .window_user = user,
                                                .generation = pc__generation_take(generation)};
    session->n_mappings++;
    pc__ref_take(&region->refs);
    return PC_OK;
}

void pc__session_drop_mapping(struct pc__session *session, struct pc__session_map *mapping,
                              bool was_lost)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__region *region = mapping->region;
    struct pc__generation *generation = mapping->generation;
    uint64_t id = mapping->id;
    size_t at = (size_t)(mapping - session->mappings);
    pthread_mutex_lock(&region->lock);
    pc__each(link, &generation->waiters)
    {
        struct pc__waiter *waiter = pc__of(link, struct pc__waiter, link);
        if (waiter->session == session && waiter->mapping_id == id) {
            pc__waiter_ended(engine, region, waiter);
        }
    }
    pc__each(job_link, &generation->jobs)
    {
        struct pc__job *job = pc__of(job_link, struct pc__job, link);
        if (job->session == session && job->mapping_id == id) {
            if (job->arg || !session->closed) /* else who asked asks the next server, if there is one */
                job->done(job, PC_ERR_CLOSED, 0, NULL);
            pc__link_remove(&job->link);
            free(job);
        }
    }
    pc__recorder_free(mapping->recorder);
    const bool kept = was_lost && pc__lease_keep(engine, session, mapping);
    /* While the engine stops no lease is kept, for nothing moves any more; but blocks are evicted until
     * its last thread has ended. */
    if (kept || (session->closed && (session->loop->stopping || !session->lessee)))
        pc__windows_left(mapping->window_user);
    else
        pc__windows_drop(mapping->window_user);
    if (!kept)
        pc__lease_end(engine, region, generation, mapping->version, mapping->follows);
    pthread_mutex_unlock(&region->lock);
    free(mapping->lease);
    if (session->stray_address >= mapping->address &&
        session->stray_address - mapping->address < mapping->length_bytes)
        session->stray_by_ns = 0;
    memmove(mapping, mapping + 1, (session->n_mappings - at - 1) * sizeof *mapping);
    session->n_mappings--;
    if (!kept)
        pc__lease_put(engine, region, generation);
}

/* ------------------------------------------------------------------ leases */

/* Under region.lock. Whether the memory is what the client has mapped. A base that is being changed
 * is still that to those who follow it, and the worker has it there in a moment; from others, who
 * come too late, it was taken. */
static int attach_ready(struct pc_engine *engine, struct pc__region *region,
                        const struct pc__generation *generation, const struct pc__ctl_open *open)
{
    const struct pc__home *home =
        generation->complete && !generation->was_base ? region->home : NULL;
    bool fits = generation->version == open->version ||
                generation->version == open->version + open->follows;
    if (generation->is_torn && !open->follows)
        return PC_ERR_EXPIRED;
    if (!fits || !home || !home->base_changes)
        return fits ? PC_OK : PC_ERR_EXPIRED;
    bool comes = open->follows && generation->version == open->version &&
                 (home->overlay.memfd < 0 ? !pc__link_empty(&home->pending)
                                          : home->applied == open->version + 1);
    if (!comes)
        return PC_ERR_EXPIRED;
    if (!pc__home_is_held_up(home))
        pc__worker_queue(engine, region);
    return PC__WAIT;
}

/* Under region.lock. The base, where only who built it has it, and this is who: it says which memory
 * it maps. Else NULL. */
static struct pc__generation *base_of_builder(const struct pc__region *region,
                                              const struct pc__ctl_open *open)
{
    struct pc__generation *base = region->base_is_builders ? pc__home_base_generation(region) : NULL;
    struct pc__generation *left = base || !open->inode
                                      ? NULL
                                      : pc__generation_by_inode((struct pc__region *)(uintptr_t)region,
                                                                open->inode);
    if (left && left->was_base && left->version == open->version && !left->is_torn)
        return left; /* also where its home has moved away since */
    bool is = base && base->inode == open->inode && base->version == open->version &&
              !region->home->base_changes;
    return is ? base : NULL;
}

/* Under region.lock. Whether it names memory that a process maps, as a child of fork does: what its
 * parent has does not go while it has it, also where the region was freed. */
static bool names_leased(const struct pc__region *region, const struct pc__ctl_open *open)
{
    const struct pc__generation *generation =
        open->inode ? pc__generation_by_inode((struct pc__region *)(uintptr_t)region, open->inode)
                    : NULL;
    return generation && generation->mappings;
}

/* Under region.lock. PC__WAIT: *ask says for what. */
static int open_ready(struct pc__session *session, struct pc__region *region,
                      const struct pc__ctl_open *open, bool attach, bool caught_up,
                      struct pc__ctl_opened *opened, int *fd, struct pc__ask *ask)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__generation *generation = NULL;
    *ask = (struct pc__ask){.kind = PC_EVENT_NEED_REGION};
    if (region->state == PC__REGION_UNKNOWN)
        return PC__WAIT;
    attach = attach || (region->state == PC__REGION_RETIRED && names_leased(region, open));
    if (region->state != PC__REGION_READY && !(attach && region->state == PC__REGION_RETIRED))
        return PC_ERR_NO_REGION;
    if (!region->homes) /* retired before it was defined */
        return PC_ERR_NO_REGION;
    if (open->length_bytes != region->length_bytes)
        return PC_ERR_RANGE;
    if (region->lost && !attach) /* who has it reads what is here of it */
        return region->lost;
    int rc = PC_OK;
    if (attach) {
        generation = pc__generation_by_inode(region, open->inode);
        rc = generation ? attach_ready(engine, region, generation, open) : PC_ERR_NO_GENERATION;
        ask->kind = PC_EVENT_NONE;
    } else if (!(generation = base_of_builder(region, open))) {
        rc = pc__generation_for(engine, region, open->version, caught_up, &generation, ask);
    }
    if (!rc)
        rc = add_mapping(session, open, region, generation);
    if (rc)
        return rc;
    region->version = open->version > region->version ? open->version : region->version;
    pc__region_was_read(region);
    region->mappings++;
    generation->mappings++;
    pc__cache_leased(engine, generation);
    if (open->follows)
        (void)pc__mapping_follows(pc__session_mapping(session, open->mapping_id));
    pc__count_add(&engine->count.mappings, 1);
    pc__count_add(&engine->count.opens, 1);
    opened->inode = generation->inode;
    opened->needs_trap = !generation->complete;
    if (opened->needs_trap && region->pages && pc__budget_wastes(&region->pages->budget))
        opened->needs_trap |= PC__OPENED_WASTES;
    opened->loss = region->loss;
    *fd = generation->memfd;
    return PC_OK;
}

/* Its CLOSE came while it waited. */
static bool was_given_up(struct pc__session *session, uint64_t mapping_id)
{
    for (size_t i = 0; i < session->n_given_up; i++)
        if (session->given_up[i] == mapping_id) {
            session->given_up[i] = session->given_up[--session->n_given_up];
            return true;
        }
    return false;
}

static int note_given_up(struct pc__session *session, uint64_t mapping_id)
{
    if (session->n_given_up == session->given_up_capacity) {
        size_t capacity = session->given_up_capacity ? session->given_up_capacity * 2 : 8;
        uint64_t *grown = realloc(session->given_up, capacity * sizeof *grown);
        if (!grown)
            return pc__fail(PC_ERR_NO_MEMORY, "a mapping that was given up");
        session->given_up = grown;
        session->given_up_capacity = capacity;
    }
    session->given_up[session->n_given_up++] = mapping_id;
    return PC_OK;
}

/* Under region.lock: the open waits. False: for want of memory it cannot. */
static bool wait_for(struct pc__session *session, struct pc__region *region, uint32_t request_id,
                     const struct pc__ctl_open *open, bool attach)
{
    struct pc__pending *pending = calloc(1, sizeof *pending);
    if (!pending)
        return false;
    *pending = (struct pc__pending){.loop = session->loop,
                                    .session_id = session->id,
                                    .request_id = request_id,
                                    .again = pc__session_retry_open,
                                    .attach = attach,
                                    .question = region->published_questions + 1,
                                    .open = *open};
    pc__link_push(&region->pending, &pending->link);
    session->n_opening++;
    return true;
}

/* Under region.lock: whether the question is to be put; it is not if it is out. */
static bool to_ask(struct pc__region *region, const struct pc__ask *ask)
{
    bool *out = ask->kind == PC_EVENT_NEED_REGION      ? &region->asked_region
                : ask->kind == PC_EVENT_NEED_CHANGES   ? &region->asked_changes
                : ask->kind == PC_EVENT_NEED_PUBLISHED ? &region->asked_published
                                                       : NULL;
    bool put = out && !*out;
    if (put)
        *out = true;
    if (put && ask->kind == PC_EVENT_NEED_PUBLISHED)
        region->published_questions++;
    return put;
}

static void put_question(struct pc_engine *engine, uint64_t region, const struct pc__ask *ask)
{
    /* Somebody wants a newer version: by the time of the answer they have closed the older ones. */
    if (ask->kind != PC_EVENT_NEED_REGION)
        pc__sessions_let_go(engine, region);
    const struct pc_event event = {.kind = (int)ask->kind,
                                   .region = region,
                                   .from_version = ask->from_version,
                                   .version = ask->version};
    if (pc__engine_request(engine, &event))
        return;
    if (ask->kind == PC_EVENT_NEED_REGION)
        (void)pc_engine_refuse_region(engine, region, PC_ERR_NO_MEMORY);
    else if (ask->kind == PC_EVENT_NEED_PUBLISHED)
        (void)pc_engine_caught_up(engine, region, PC_ERR_NO_MEMORY);
    else
        (void)pc_engine_set_changes(engine, region, ask->from_version, ask->version, NULL, 0,
                                    PC_ERR_NO_MEMORY);
}

/* False: the region left the table between the look-up and the lock: it is a new one now. */
static bool finish_open(struct pc__session *session, struct pc__region *region, uint32_t request_id,
                        const struct pc__ctl_open *open, bool attach, bool caught_up)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__ctl_opened opened = {0};
    struct pc__ask ask;
    int fd = -1;
    bool put = false;
    pthread_mutex_lock(&region->lock);
    if (region->forgotten) {
        pthread_mutex_unlock(&region->lock);
        return false;
    }
    int rc = open_ready(session, region, open, attach, caught_up, &opened, &fd, &ask);
    if (rc == PC__WAIT) {
        if (!wait_for(session, region, request_id, open, attach))
            rc = PC_ERR_NO_MEMORY;
        else
            put = to_ask(region, &ask);
    }
    pthread_mutex_unlock(&region->lock);
    if (put)
        put_question(engine, open->region, &ask);
    if (rc == PC__WAIT)
        return true;
    if (attach && !rc) {
        pc__count_add(&engine->count.reattached, 1);
        /* Threads that the last server left waiting ask us. */
        pc__fault_attached(session, open->address, open->length_bytes);
    }
    if (rc)
        pc__session_answer(session, request_id, rc);
    else
        pc__session_send(session, PC__CTL_REPLY, request_id, PC_OK, &opened, sizeof opened,
                         attach ? -1 : fd);
    return true;
}

void pc__session_retry_open(struct pc__loop *loop, struct pc__mail *mail)
{
    struct pc__pending *pending = mail->pointer;
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        if (session->id != pending->session_id || session->closed)
            continue;
        if (pending->stages) {
            pc__session_staged(session, pending->request_id, pending->open.region);
            break;
        }
        session->n_opening -= session->n_opening > 0;
        const bool given_up = was_given_up(session, pending->open.mapping_id);
        if (!session->n_opening)
            session->n_given_up = 0;
        if (given_up)
            break; /* who asked has said that it does not wait, and may have asked anew since */
        pc__forget_message(); /* what is said of this question is of this question */
        struct pc__region *region = pc__region_get(loop->engine, pending->open.region);
        bool done = region && !mail->error &&
                    finish_open(session, region, pending->request_id, &pending->open,
                                pending->attach, pending->asked_published);
        if (!done)
            pc__session_send(session, PC__CTL_REPLY, pending->request_id,
                            mail->error ? mail->error : PC_ERR_NO_REGION, NULL, 0, -1);
        if (region)
            pc__region_put(loop->engine, region);
        break;
    }
    free(pending);
}

void pc__session_open(struct pc__session *session, const struct pc__ctl_message *message, bool attach)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__ctl_open open;
    memcpy(&open, message->body, sizeof open);
    bool done = false;
    while (!done) {
        struct pc__region *region = pc__region_get_or_add(engine, open.region);
        if (!region) {
            pc__session_reply(session, message, PC_ERR_NO_MEMORY);
            return;
        }
        done = finish_open(session, region, message->header.request_id, &open, attach, false);
        pc__region_put(engine, region);
    }
}

int pc__session_close_mapping(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__ctl_open open;
    memcpy(&open, message->body, sizeof open);
    struct pc__session_map *mapping = pc__session_mapping(session, open.mapping_id);
    if (mapping)
        pc__session_drop_mapping(session, mapping, false);
    else if (session->n_opening)
        return note_given_up(session, open.mapping_id); /* else it would be open for ever */
    return PC_OK;
}
