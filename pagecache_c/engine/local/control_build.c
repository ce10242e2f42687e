/* control_build.c - what processes of this node make: regions, and the layers of their commits.
 *
 * Entered by the loop that owns the client. What a client made and did not seal goes with it; what
 * became of layers that it staged is asked for.
 */
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ----------------------------------------------------------------- regions */

void pc__session_create(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__ctl_region body;
    memcpy(&body, message->body, sizeof body);
    const struct pc_region_info info = {.region = body.region,
                                        .base_address = body.base_address,
                                        .length_bytes = body.length_bytes,
                                        .medium = body.medium};
    if (!pc__region_info_valid(&info)) {
        pc__session_reply(session, message, PC_ERR_RANGE);
        return;
    }
    struct pc__region *region = pc__region_get_or_add(engine, body.region);
    if (!region) {
        pc__session_reply(session, message, PC_ERR_NO_MEMORY);
        return;
    }
    pthread_mutex_lock(&region->lock);
    bool fresh = pc__region_may(region, PC__REGION_CREATE) && !region->home &&
                 pc__link_empty(&region->generations) &&
                 pc__region_sized(region, body.base_address, body.length_bytes);
    if (fresh) {
        region->creator = session->id;
        region->in_file = info.medium == PC_MEDIUM_FILE;
        pc__region_goes(region, PC__REGION_CREATE);
    }
    pthread_mutex_unlock(&region->lock);
    int fd = -1, rc = fresh ? pc__home_make(engine, region, info.medium, NULL, 0, &fd) : PC_ERR_EXISTS;
    if (fresh && rc)
        pc__region_forget(engine, region);
    if (rc) {
        pc__session_reply(session, message, rc);
    } else {
        session->creating++;
        pc__session_send(session, PC__CTL_REPLY, message->header.request_id, PC_OK, NULL, 0, fd);
        close(fd);
    }
    pc__region_put(engine, region);
}

/* The region that this client is making, with a reference, or NULL. */
static struct pc__region *creating(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__ctl_region body;
    memcpy(&body, message->body, sizeof body);
    struct pc__region *region = pc__region_get(session->loop->engine, body.region);
    if (!region)
        return NULL;
    pthread_mutex_lock(&region->lock);
    bool its = region->state == PC__REGION_CREATING && region->creator == session->id;
    pthread_mutex_unlock(&region->lock);
    if (its)
        return region;
    pc__region_put(session->loop->engine, region);
    return NULL;
}

/* A reply that says that something is safe: it is sent when the keeper has heard of it. */
struct kept_reply {
    struct pc__loop *loop;
    uint64_t session_id, region;
    uint32_t request_id;
    bool stages;
};

static void reply_kept(struct pc__loop *loop, struct pc__mail *mail)
{
    struct kept_reply *reply = mail->pointer;
    pc__each(link, &loop->sessions)
    {
        struct pc__session *session = pc__of(link, struct pc__session, link);
        if (session->id != reply->session_id || session->closed)
            continue;
        if (mail->error) {
            char why[PC__KEEPING_TEXT_BYTES];
            pc__keep_error_text(loop->engine, mail->error, why, sizeof why);
            pc__session_send(session, PC__CTL_REPLY, reply->request_id, mail->error, why,
                            strlen(why) + 1, -1);
        }
        else if (reply->stages)
            pc__session_staged(session, reply->request_id, reply->region);
        else
            pc__session_send(session, PC__CTL_REPLY, reply->request_id, PC_OK, NULL, 0, -1);
        break;
    }
    free(reply);
}

/* In the keeper's thread. What the keeper has not heard of is not safe, however slow it is. */
static void heard(void *arg, int rc, bool cancelled)
{
    struct kept_reply *reply = arg;
    const struct pc__mail mail = {.run = reply_kept, .pointer = reply, .error = rc};
    if (cancelled || pc__loop_post(reply->loop, &mail))
        free(reply); /* who waits has a deadline */
}

static void reply_when_kept(struct pc__session *session, uint32_t request_id, uint64_t region,
                            bool stages)
{
    struct kept_reply *reply = malloc(sizeof *reply);
    if (!reply) {
        pc__session_send(session, PC__CTL_REPLY, request_id, PC_ERR_NO_MEMORY, NULL, 0, -1);
        return;
    }
    *reply = (struct kept_reply){.loop = session->loop,
                                 .session_id = session->id,
                                 .region = region,
                                 .request_id = request_id,
                                 .stages = stages};
    const int waits = pc__keep_when(session->loop->engine, heard, reply);
    if (waits == 1)
        return;
    struct pc__mail mail = {.pointer = reply, .error = waits};
    reply_kept(session->loop, &mail);
}

void pc__session_seal(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__region *region = creating(session, message);
    struct pc__ctl_region body;
    memcpy(&body, message->body, sizeof body);
    int rc = region ? pc__region_seal(session->loop->engine, region, body.length_bytes != 0)
                    : PC_ERR_NO_REGION;
    if (region && !rc) {
        session->creating--;
        reply_when_kept(session, message->header.request_id, region->id, false);
    } else {
        pc__session_reply(session, message, rc);
    }
    if (region)
        pc__region_put(session->loop->engine, region);
}

void pc__session_abandon(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__region *region = creating(session, message);
    if (region) {
        session->creating--;
        pc__region_forget(session->loop->engine, region);
        pc__region_put(session->loop->engine, region);
    }
    pc__session_reply(session, message, region ? PC_OK : PC_ERR_NO_REGION);
}

void pc__session_abandon_all(struct pc__session *session)
{
    struct pc_engine *engine = session->loop->engine;
    while (session->creating) {
        struct pc__region *found = NULL;
        pthread_mutex_lock(&engine->lock);
        for (size_t b = 0; b < PC__REGION_BUCKETS && !found; b++)
            for (struct pc__region *r = engine->regions[b]; r && !found; r = r->hash_next) {
                pthread_mutex_lock(&r->lock);
                if (r->state == PC__REGION_CREATING && r->creator == session->id) {
                    found = r;
                    pc__ref_take(&r->refs);
                }
                pthread_mutex_unlock(&r->lock);
            }
        pthread_mutex_unlock(&engine->lock);
        if (!found)
            return;
        session->creating--;
        pc__region_forget(engine, found);
        pc__region_put(engine, found);
    }
}

/* ------------------------------------------------------------------ commits */

bool pc__mapping_follows(struct pc__session_map *mapping)
{
    struct pc__generation *generation = mapping->generation;
    if (mapping->follows || generation->version != mapping->version)
        return false;
    mapping->follows = true;
    generation->followers++;
    return true;
}

void pc__session_stage(struct pc__session *session, const struct pc__ctl_message *message, int *fds,
                      int n_fds)
{
    struct pc__ctl_stage body;
    memcpy(&body, message->body, sizeof body);
    int rc = n_fds == 1 ? pc__descriptors_spare() : PC_ERR_PROTOCOL;
    if (!rc) {
        rc = pc__layer_stage(session->loop->engine, body.region, body.commit_id, body.layer_bytes,
                             fds[0], pc__layer_owner(session));
        fds[0] = -1;
    }
    session->stages = true;
    if (session->lessee)
        session->lessee->stages = true;
    if (rc)
        pc__session_reply(session, message, rc);
    else
        reply_when_kept(session, message->header.request_id, body.region, true);
}

void pc__session_layer_file(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__ctl_stage body;
    memcpy(&body, message->body, sizeof body);
    int fd = -1, rc = pc__descriptors_spare();
    if (!rc)
        rc = pc__layer_file_for(session->loop->engine, body.region, body.layer_bytes, &fd);
    if (rc)
        pc__session_reply(session, message, rc);
    else
        pc__session_send(session, PC__CTL_REPLY, message->header.request_id, PC_OK, NULL, 0, fd);
    if (fd >= 0)
        close(fd);
}

/* The layer is safe in any case: what is bounded is how many more there can be. */
void pc__session_staged(struct pc__session *session, uint32_t request_id, uint64_t id)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__region *region = pc__region_get(engine, id);
    struct pc__pending *pending = NULL;
    if (region) {
        pthread_mutex_lock(&region->lock);
        if (region->home && pc__home_is_behind(region->home))
            pending = calloc(1, sizeof *pending);
        if (pending) {
            *pending = (struct pc__pending){.loop = session->loop,
                                            .session_id = session->id,
                                            .request_id = request_id,
                                            .again = pc__session_retry_open,
                                            .stages = true,
                                            .open = {.region = id}};
            pc__link_push(&region->pending, &pending->link);
            if (!pc__home_is_held_up(region->home))
                pc__worker_queue(engine, region);
        }
        pthread_mutex_unlock(&region->lock);
        pc__region_put(engine, region);
    }
    const struct pc__ctl_staged staged = {engine->server_id};
    if (!pending)
        pc__session_send(session, PC__CTL_REPLY, request_id, PC_OK, &staged, sizeof staged, -1);
}

void pc__session_resolve(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc_engine *engine = session->loop->engine;
    struct pc__ctl_stage body;
    memcpy(&body, message->body, sizeof body);
    if (!body.version) {
        pc__layer_drop_staged(engine, body.region, body.commit_id);
        return;
    }
    struct pc__session_map *mapping = pc__session_mapping(session, body.mapping_id);
    if (mapping && mapping->region->id == body.region && mapping->is_private) {
        struct pc__region *region = mapping->region;
        pthread_mutex_lock(&region->lock);
        if (body.version == mapping->version + 1 && pc__mapping_follows(mapping))
            pc__worker_queue(engine, region); /* its home may have waited for this very lease */
        pthread_mutex_unlock(&region->lock);
    }
    /* A gap before it, and all else, is made good when somebody asks for the version. */
    (void)pc__layer_publish(engine, body.region, body.commit_id, body.version);
}
