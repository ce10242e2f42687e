/* causes.c - why blocks do not come, in words: of servers that live, as far as anybody knows, and cannot be
 * reached, or do not know a region that is asked for, and of files that could not be read.
 *
 * Only the registry knows that a server is lost. Until it says so, whoever waits for a block of it
 * waits until its own deadline, and is then told this. Of one that is lost it is told that; blocks may
 * be lost while the server lives that was asked for them, and then nobody says that it is gone.
 *
 * Owns engine.unreached and engine.file_causes, under engine.event_lock. They are small: of more servers, or
 * files, than there is room for the ones that were noted first are forgotten.
 */
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

/* Under event_lock. Region: what of it alone is noted; 0: what of the server. */
static struct pc__unreached *find(struct pc_engine *engine, uint64_t server_id, uint64_t region)
{
    for (int i = 0; i < PC__UNREACHED; i++)
        if (engine->unreached[i].server_id == server_id && engine->unreached[i].region == region)
            return &engine->unreached[i];
    return NULL;
}

/* Under event_lock. */
static struct pc__unreached *find_or_add(struct pc_engine *engine, uint64_t server_id,
                                         uint64_t region)
{
    struct pc__unreached *at = find(engine, server_id, region);
    if (!at) {
        at = &engine->unreached[engine->next_unreached++ % PC__UNREACHED];
        *at = (struct pc__unreached){
            .server_id = server_id, .region = region, .since_ns = pc__now_ns()};
    }
    return at;
}

PC_API int pc_engine_peer_unreached(pc_engine *engine, uint64_t server_id, uint64_t for_ns,
                                    const char *cause)
{
    if (!server_id)
        return pc__fail(PC_ERR_RANGE, "server 0");
    pthread_mutex_lock(&engine->event_lock);
    const bool is_new = !find(engine, server_id, 0);
    struct pc__unreached *at = find_or_add(engine, server_id, 0);
    if (is_new)
        at->since_ns -= for_ns < at->since_ns ? for_ns : 0;
    snprintf(at->cause, sizeof at->cause, "%s", cause);
    pthread_mutex_unlock(&engine->event_lock);
    return PC_OK;
}

void pc__unreached_lost(struct pc_engine *engine, uint64_t server_id)
{
    pthread_mutex_lock(&engine->event_lock);
    find_or_add(engine, server_id, 0)->is_lost = true;
    pthread_mutex_unlock(&engine->event_lock);
}

void pc__unreached_forget(struct pc_engine *engine, uint64_t server_id)
{
    pthread_mutex_lock(&engine->event_lock);
    struct pc__unreached *at = find(engine, server_id, 0);
    if (at)
        *at = (struct pc__unreached){0};
    pthread_mutex_unlock(&engine->event_lock);
}

/* What was said in the time of who gives up now; else it says nothing of why. */
static bool is_recent(const struct pc_engine *engine, const struct pc__unreached *at, uint64_t now_ns)
{
    return now_ns - at->said_ns <= engine->fault_timeout_ns;
}

void pc__unreached_unknown(struct pc_engine *engine, uint64_t server_id, uint64_t region)
{
    pthread_mutex_lock(&engine->event_lock);
    const uint64_t now_ns = pc__now_ns(); /* not before what others have noted */
    struct pc__unreached *at = find_or_add(engine, server_id, region);
    if (at->said_ns && !is_recent(engine, at, now_ns))
        at->since_ns = now_ns;
    at->said_ns = now_ns;
    pthread_mutex_unlock(&engine->event_lock);
}

void pc__file_note_cause(struct pc_engine *engine, uint64_t region, const char *text)
{
    struct pc__file_cause *at = NULL;
    pthread_mutex_lock(&engine->event_lock);
    for (unsigned i = 0; i < PC__FILE_CAUSES && !at; i++)
        if (engine->file_causes[i].region == region)
            at = &engine->file_causes[i];
    if (!at)
        at = &engine->file_causes[engine->next_file_cause++ % PC__FILE_CAUSES];
    at->region = region;
    snprintf(at->text, sizeof at->text, "%s", text);
    pthread_mutex_unlock(&engine->event_lock);
}

/* What was noted of the last range that failed; else the text stays. */
static void file_error_text(struct pc_engine *engine, uint64_t region, char *text, size_t text_bytes)
{
    pthread_mutex_lock(&engine->event_lock);
    for (unsigned i = 0; i < PC__FILE_CAUSES; i++)
        if (engine->file_causes[i].region == region)
            snprintf(text, text_bytes, "%s", engine->file_causes[i].text);
    pthread_mutex_unlock(&engine->event_lock);
}

bool pc__is_of_file(int error)
{
    return error == PC_ERR_FILE || error == PC_ERR_FILE_CHANGED || error == PC_ERR_FILE_ACCESS;
}

static unsigned long long seconds_since(uint64_t since_ns, uint64_t now_ns)
{
    return (now_ns - since_ns) / 1000000000u;
}

/* Not even those are left that are kept back for connections. */
static void say_undialled(uint64_t server_id, char *text, size_t text_bytes)
{
    struct rlimit limit = {0};
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    snprintf(text, text_bytes,
             "server 0x%llx is not reached: the page server of this node has no descriptor for a "
             "connection to it: all that its limit (RLIMIT_NOFILE, %llu) allows are in use",
             (unsigned long long)server_id, (unsigned long long)limit.rlim_cur);
}

void pc__unreached_error_text(struct pc_engine *engine, uint64_t server_id, uint64_t region, int error,
                       char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "%s", pc_strerror(error));
    if (pc__is_of_file(error))
        file_error_text(engine, region, text, text_bytes);
    if (error == PC_ERR_DESCRIPTORS && server_id && server_id != engine->server_id)
        say_undialled(server_id, text, text_bytes);
    if ((error != PC_ERR_TIMEOUT && error != PC_ERR_HOME_LOST) || !server_id)
        return;
    pthread_mutex_lock(&engine->event_lock);
    const uint64_t now_ns = pc__now_ns();
    const struct pc__unreached *at = find(engine, server_id, 0);
    const struct pc__unreached *unknown = find(engine, server_id, region);
    if (error == PC_ERR_HOME_LOST)
        snprintf(text, text_bytes, "server 0x%llx %s, and no other is known to have them",
                 (unsigned long long)server_id,
                 at && at->is_lost ? "is lost" : "does not have them");
    else if (at)
        snprintf(text, text_bytes, "server 0x%llx is not reached for %llu s: %s",
                 (unsigned long long)server_id, seconds_since(at->since_ns, now_ns), at->cause);
    else if (unknown && is_recent(engine, unknown, now_ns))
        snprintf(text, text_bytes,
                 "server 0x%llx answers, for %llu s, that it does not know the variable; no other is "
                 "known to have it",
                 (unsigned long long)server_id, seconds_since(unknown->since_ns, now_ns));
    else
        snprintf(text, text_bytes, "server 0x%llx did not answer in time",
                 (unsigned long long)server_id);
    pthread_mutex_unlock(&engine->event_lock);
}
