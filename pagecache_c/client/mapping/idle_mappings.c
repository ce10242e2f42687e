/* idle_mappings.c - mappings that nobody uses any more, and that stay for a moment: the next call
 * of this process often wants the same. See client.h.
 *
 * An idle one is a lease like any other to the page server, and nothing to this process: its id
 * is gone, nobody looks into it, and whoever maps the same version again has it without a word to
 * the server. It ends
 *   - when the server says LET_GO: its version is not the newest any more, or its region is freed;
 *   - before another map of its region here, of whatever version;
 *   - after half a second, or when MOST_IDLE others became idle after it;
 *   - in a child of fork, and when the server is lost.
 * So it keeps no memory from moving to the next version for longer than a message takes, and costs
 * nothing where each version is used once.
 *
 * Not where the trap is SIGSEGV: what its window holds cannot be evicted.
 *
 * Threads: any; the watch thread ends those that have been idle long enough. Lock: client.lock, for
 * all of it.
 */
#include "client/client.h"

#include <unistd.h>

uint64_t pc__idle_ns = 500000000u; /* tests change it */
#define MOST_IDLE 32u

static bool is_idle(const struct pc__mapping *mapping)
{
    return mapping->unused_since_ns != 0;
}

static void end_oldest(pc_client *client)
{
    struct pc__mapping *oldest = NULL;
    for (struct pc__mapping *mapping = client->mappings; mapping; mapping = mapping->next)
        if (is_idle(mapping) && (!oldest || mapping->unused_since_ns < oldest->unused_since_ns))
            oldest = mapping;
    if (oldest)
        pc__mapping_take_down(client, oldest);
}

/* Instead of its end. False: it is not one that may. */
static bool make_idle(pc_client *client, struct pc__mapping *mapping)
{
    const uint64_t one = 1;
    if (client->state != PC__CONN_UP || client->trap.kind == PC_TRAP_SIGSEGV ||
        mapping->state != PC__MAPPING_LIVE || !mapping->is_leased || mapping->is_building ||
        pc__is_private(mapping))
        return false;
    if (client->n_idle >= MOST_IDLE)
        end_oldest(client);
    mapping->unused_since_ns = pc__clock_ns();
    mapping->readers = 0;
    if (!client->n_idle++ && !client->looks_at_ns) {
        client->looks_at_ns = mapping->unused_since_ns + pc__idle_ns;
        (void)!write(client->nudge_fd, &one, sizeof one);
    }
    return true;
}

void pc__idle_ended(pc_client *client, struct pc__mapping *mapping)
{
    if (is_idle(mapping))
        client->n_idle--;
    mapping->unused_since_ns = 0;
}

void pc__idle_end_all(pc_client *client, uint64_t region)
{
    struct pc__mapping *next;
    for (struct pc__mapping *mapping = client->mappings; mapping && client->n_idle;
         mapping = next) {
        next = mapping->next;
        if (is_idle(mapping) && (!region || mapping->region == region))
            pc__mapping_take_down(client, mapping);
    }
}

int pc__idle_look(pc_client *client)
{
    uint64_t now = pc__clock_ns();
    if (!client->looks_at_ns)
        return -1;
    if (now >= client->looks_at_ns) {
        struct pc__mapping *next;
        uint64_t oldest = UINT64_MAX;
        for (struct pc__mapping *mapping = client->mappings; mapping; mapping = next) {
            next = mapping->next;
            if (!is_idle(mapping))
                continue;
            if (now - mapping->unused_since_ns >= pc__idle_ns)
                pc__mapping_take_down(client, mapping);
            else if (mapping->unused_since_ns < oldest)
                oldest = mapping->unused_since_ns;
        }
        /* One more look after the last of them: whoever becomes idle meanwhile need not nudge. */
        client->looks_at_ns = oldest != UINT64_MAX ? oldest + pc__idle_ns : 0;
        if (!client->looks_at_ns)
            return -1;
    }
    return (int)((client->looks_at_ns - now) / 1000000u) + 1;
}

PC_API int pc_client_unmap_later(pc_client *client, uint64_t mapping_id)
{
    pc__enter(client);
    pthread_mutex_lock(&client->lock);
    struct pc__mapping *mapping = pc__mapping_find(client, mapping_id);
    int rc = PC_OK;
    if (client->state == PC__CONN_CLOSED)
        rc = pc__fail(PC_ERR_CLOSED, "the client was closed");
    else if (!mapping || mapping->state == PC__MAPPING_OPENING || is_idle(mapping))
        rc = pc__fail(PC_ERR_NO_REGION, "no mapping %llu in this process",
                      (unsigned long long)mapping_id);
    else if (mapping->users > 1 || !make_idle(client, mapping))
        pc__mapping_release(client, mapping);
    else
        mapping->users = 0;
    PC__AUDIT_SOMETIMES(pc__mappings_audit(client));
    pthread_mutex_unlock(&client->lock);
    pc__leave(client);
    return rc;
}
