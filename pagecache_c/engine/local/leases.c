/* leases.c - leases of processes whose connection has ended.
 *
 * A connection can end while its process lives: its socket was full, this server closed it after a
 * message that made no sense, the process took a server that was stopped for dead. The process then
 * goes on reading what it maps. So what it leased is kept, as orphans, until
 *   - it has said on a newer connection that all which it maps is attached there (ATTACHED), or that
 *     it maps nothing any more (LEFT);
 *   - it has ended, or is another program;
 *   - its page tables showed the memory once, and do not any more.
 * A process of a foreign namespace has no pid here, and /proc says nothing of it: that it has ended the
 * kernel's handle on it says (SO_PEERPIDFD, Linux 6.5). Without one, only its own word ends its leases.
 * No time that passes is a reason: a process that is stopped goes on one day, and reads at once.
 * What was never seen in its page tables may be about to be mapped: that stays until one of the first
 * two.
 *
 * A client of a process (it has one for each session) has a number of its own that all of its
 * connections carry, and is a lessee here. Its newer connection may be there before the end of the
 * older one is seen: so who has said ATTACHED leaves no orphans on older connections.
 *
 * The layers that it staged wait for its end likewise: to ask for their outcome decides it.
 *
 * Entered by any loop. Lock: engine->leases.lock, a leaf; no file is read under it. Orphans count in
 * their region's and generation's leases, under region.lock.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/store/store.h"

#include <stdlib.h>
#include <unistd.h>

#define LOOK_EVERY_NS 20000000ull       /* whether it lives */
#define MAPS_MOST_NS 1000000000ull      /* what it maps: after 20 ms, then less and less often */

void pc__leases_open(struct pc_engine *engine)
{
    pthread_mutex_init(&engine->leases.lock, NULL);
    pc__link_init(&engine->leases.lessees);
}

/* ----------------------------------------------------------------- lessees */

static void lessee_free(struct pc__lessee *lessee)
{
    if (!lessee)
        return;
    if (lessee->handle >= 0)
        close(lessee->handle);
    pthread_mutex_destroy(&lessee->turn.lock);
    free(lessee);
}

bool pc__lessee_lives(const struct pc__lessee *lessee)
{
    return lessee->process.pid ? pc__process_has_memory(&lessee->process)
                               : !pc__process_handle_ended(lessee->handle);
}

struct pc__lessee *pc__lessee_join(struct pc_engine *engine, uint64_t number, int socket_fd)
{
    const struct pc__process process = pc__process_of_peer(socket_fd);
    struct pc__lessee *made = calloc(1, sizeof *made), *found = NULL;
    if (!made)
        return NULL;
    *made = (struct pc__lessee){.number = number, .process = process};
    made->handle = process.pid ? -1 : pc__process_handle_of_peer(socket_fd);
    pthread_mutex_init(&made->turn.lock, NULL);
    pc__link_init(&made->link);
    pc__link_init(&made->orphans);
    pthread_mutex_lock(&engine->leases.lock);
    pc__each(link, &engine->leases.lessees)
    {
        struct pc__lessee *lessee = pc__of(link, struct pc__lessee, link);
        if (lessee->number == number && lessee->process.pid == process.pid)
            found = lessee;
    }
    if (!found) {
        pc__link_push(&engine->leases.lessees, &made->link);
        found = made;
        made = NULL;
    } else if (found->handle == -1) { /* there was no descriptor left for it */
        found->handle = made->handle;
        made->handle = -1;
    }
    found->connections++;
    pthread_mutex_unlock(&engine->leases.lock);
    lessee_free(made);
    return found;
}

size_t pc__leases_waits(struct pc_engine *engine, struct pc_process_waits *out, size_t capacity)
{
    size_t n = 0;
    pthread_mutex_lock(&engine->leases.lock);
    pc__each(link, &engine->leases.lessees)
    {
        struct pc__lessee *lessee = pc__of(link, struct pc__lessee, link);
        if (n++ < capacity)
            out[n - 1] = (struct pc_process_waits){.client = lessee->number,
                                                   .pid = (uint64_t)lessee->process.pid,
                                                   .faults = pc__count_get(&lessee->waits.faults),
                                                   .fault_wait_ns = pc__count_get(&lessee->waits.wait_ns)};
    }
    pthread_mutex_unlock(&engine->leases.lock);
    return n;
}

bool pc__leases_know(struct pc_engine *engine, pid_t pid)
{
    bool known = false;
    pthread_mutex_lock(&engine->leases.lock);
    pc__each(link, &engine->leases.lessees)
        known |= pc__of(link, struct pc__lessee, link)->process.pid == pid;
    pthread_mutex_unlock(&engine->leases.lock);
    return known;
}

/* Locked. */
/* For nobody to have its base mapped. */
static bool home_waits(const struct pc__home *home)
{
    return home->overlay.memfd >= 0 || !pc__link_empty(&home->pending) || pc__home_read_holes(home);
}

void pc__lease_end(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t version, bool follows)
{
    region->mappings--;
    if (follows && generation->version == version)
        generation->followers--;
    if (--generation->mappings == generation->followers) {
        pc__generations_trim(engine, region);
        if (generation->complete && region->home && home_waits(region->home))
            pc__worker_queue(engine, region);
    }
    pc__cache_leased(engine, generation);
}

void pc__lease_put(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation)
{
    pc__generation_put(engine, generation);
    pc__count_sub(&engine->count.mappings, 1);
    pc__region_lease_dropped(engine, region);
    pc__region_put(engine, region);
}

static bool waits(const struct pc__lessee *lessee)
{
    return (lessee->stages && !lessee->connections) || !pc__link_empty(&lessee->orphans);
}

/* Locked. True: the caller frees it. */
static bool is_over(struct pc__lessee *lessee)
{
    if (lessee->connections || lessee->looks || waits(lessee))
        return false;
    pc__link_remove(&lessee->link);
    return true;
}

/* ----------------------------------------------------------------- orphans */

bool pc__lease_keep(struct pc_engine *engine, const struct pc__session *session,
                    struct pc__session_map *mapping)
{
    struct pc__lessee *lessee = session->lessee;
    struct pc__lease *lease = mapping->lease;
    *lease = (struct pc__lease){.address = mapping->address,
                                .length_bytes = mapping->length_bytes,
                                .version = mapping->version,
                                .follows = mapping->follows,
                                .session_id = session->id,
                                .region = mapping->region,
                                .generation = mapping->generation};
    pc__link_init(&lease->link);
    pthread_mutex_lock(&engine->leases.lock);
    bool kept = lessee->attached_id <= session->id;
    if (kept) {
        lease->serial = ++engine->leases.next_serial;
        pc__link_push(&lessee->orphans, &lease->link);
        lessee->look_at_ns = lessee->maps_at_ns = pc__now_ns();
        lessee->maps_pause_ns = LOOK_EVERY_NS;
        mapping->lease = NULL;
    }
    pthread_mutex_unlock(&engine->leases.lock);
    return kept;
}

static void end_all(struct pc_engine *engine, const struct pc__lessee *lessee, struct pc__link *gone)
{
    pc__each(link, gone)
    {
        struct pc__lease *lease = pc__of(link, struct pc__lease, link);
        pc__link_remove(link);
        pthread_mutex_lock(&lease->region->lock);
        pc__windows_unmapped(lease->generation, lessee->number, lease->address);
        pc__lease_end(engine, lease->region, lease->generation, lease->version, lease->follows);
        pthread_mutex_unlock(&lease->region->lock);
        pc__lease_put(engine, lease->region, lease->generation);
        free(lease);
    }
}

void pc__lessee_attached(struct pc_engine *engine, struct pc__lessee *lessee, uint64_t session_id)
{
    struct pc__link gone;
    pc__link_init(&gone);
    pthread_mutex_lock(&engine->leases.lock);
    if (lessee->attached_id < session_id)
        lessee->attached_id = session_id;
    pc__each(link, &lessee->orphans)
    {
        if (pc__of(link, struct pc__lease, link)->session_id >= session_id)
            continue;
        pc__link_remove(link);
        pc__link_push(&gone, link);
    }
    pthread_mutex_unlock(&engine->leases.lock);
    end_all(engine, lessee, &gone);
}

/* ------------------------------------------------------------------- looks */

/* Of the orphans as they are now, in their order; NULL: for want of memory, or there are none. */
struct seen {
    uint64_t serial, address, length_bytes, inode;
    bool is_mapped;
};

static struct seen *orphans_now(struct pc_engine *engine, const struct pc__lessee *lessee, size_t *n)
{
    size_t capacity = 0;
    *n = 0;
    pthread_mutex_lock(&engine->leases.lock);
    pc__each(link, (struct pc__link *)(uintptr_t)&lessee->orphans)
        capacity++;
    struct seen *all = capacity ? calloc(capacity, sizeof *all) : NULL;
    pc__each(each, (struct pc__link *)(uintptr_t)&lessee->orphans)
    {
        const struct pc__lease *lease = pc__of(each, struct pc__lease, link);
        if (all)
            all[(*n)++] = (struct seen){.serial = lease->serial,
                                        .address = lease->address,
                                        .length_bytes = lease->length_bytes,
                                        .inode = lease->generation->inode};
    }
    pthread_mutex_unlock(&engine->leases.lock);
    return all;
}

/* Locked. Those that were mapped once and are not now go to gone. */
static void judge(struct pc__lessee *lessee, const struct seen *all, size_t n, struct pc__link *gone)
{
    size_t i = 0;
    pc__each(link, &lessee->orphans)
    {
        struct pc__lease *lease = pc__of(link, struct pc__lease, link);
        while (i < n && all[i].serial < lease->serial)
            i++;
        if (i == n || all[i].serial != lease->serial)
            continue; /* it came meanwhile */
        if (all[i].is_mapped) {
            lease->was_mapped = true;
        } else if (lease->was_mapped) {
            pc__link_remove(link);
            pc__link_push(gone, link);
        }
    }
}

static void look_at_maps(struct pc_engine *engine, struct pc__lessee *lessee, struct pc__link *gone)
{
    struct pc__process_map *maps;
    size_t n, n_maps;
    struct seen *all = orphans_now(engine, lessee, &n);
    bool knows = all && pc__process_maps(&lessee->process, &maps, &n_maps);
    for (size_t i = 0; knows && i < n; i++)
        all[i].is_mapped = pc__process_maps_file(maps, n_maps, all[i].address,
                                                 all[i].address + all[i].length_bytes, all[i].inode);
    if (knows) {
        pthread_mutex_lock(&engine->leases.lock);
        judge(lessee, all, n, gone);
        pthread_mutex_unlock(&engine->leases.lock);
        free(maps);
    }
    free(all);
}

/* Without locks; the lessee is counted in. */
static void look(struct pc_engine *engine, struct pc__lessee *lessee)
{
    const uint64_t now = pc__now_ns();
    struct pc__link gone;
    pc__link_init(&gone);
    bool lives = pc__lessee_lives(lessee), staged = false;
    pthread_mutex_lock(&engine->leases.lock);
    bool maps_too = lives && lessee->maps_at_ns <= now && !pc__link_empty(&lessee->orphans);
    if (maps_too) {
        lessee->maps_at_ns = now + lessee->maps_pause_ns;
        lessee->maps_pause_ns = lessee->maps_pause_ns * 2 < MAPS_MOST_NS ? lessee->maps_pause_ns * 2
                                                                         : MAPS_MOST_NS;
    }
    if (!lives) {
        pc__each(link, &lessee->orphans)
        {
            pc__link_remove(link);
            pc__link_push(&gone, link);
        }
        staged = atomic_exchange(&lessee->stages, false);
    }
    lessee->look_at_ns = now + LOOK_EVERY_NS;
    pthread_mutex_unlock(&engine->leases.lock);
    if (maps_too)
        look_at_maps(engine, lessee, &gone);
    if (staged)
        pc__layers_orphan(engine, lessee->number);
    end_all(engine, lessee, &gone);
}

void pc__lessee_leave(struct pc_engine *engine, struct pc__lessee *lessee, bool goes_on)
{
    if (goes_on) /* at once, for it may unmap what it has mapped by now: see judge() */
        look(engine, lessee);
    pthread_mutex_lock(&engine->leases.lock);
    lessee->connections--;
    if (!goes_on)
        lessee->stages = false;
    bool over = is_over(lessee);
    pthread_mutex_unlock(&engine->leases.lock);
    if (over)
        lessee_free(lessee);
}

uint64_t pc__leases_deadline(struct pc_engine *engine)
{
    uint64_t earliest = UINT64_MAX;
    pthread_mutex_lock(&engine->leases.lock);
    pc__each(link, &engine->leases.lessees)
    {
        const struct pc__lessee *lessee = pc__of(link, struct pc__lessee, link);
        if (waits(lessee) && lessee->look_at_ns < earliest)
            earliest = lessee->look_at_ns;
    }
    pthread_mutex_unlock(&engine->leases.lock);
    return earliest;
}

/* Locked: one that is due, counted in. Others find it not due any more. */
static struct pc__lessee *next_due(struct pc_engine *engine, uint64_t now_ns)
{
    pc__each(link, &engine->leases.lessees)
    {
        struct pc__lessee *lessee = pc__of(link, struct pc__lessee, link);
        if (!waits(lessee) || lessee->look_at_ns > now_ns)
            continue;
        lessee->look_at_ns = now_ns + LOOK_EVERY_NS;
        lessee->looks++;
        return lessee;
    }
    return NULL;
}

void pc__leases_tick(struct pc_engine *engine, uint64_t now_ns)
{
    for (;;) {
        pthread_mutex_lock(&engine->leases.lock);
        struct pc__lessee *lessee = next_due(engine, now_ns);
        pthread_mutex_unlock(&engine->leases.lock);
        if (!lessee)
            return;
        look(engine, lessee);
        pthread_mutex_lock(&engine->leases.lock);
        lessee->looks--;
        bool over = is_over(lessee);
        pthread_mutex_unlock(&engine->leases.lock);
        if (over)
            lessee_free(lessee);
    }
}

/* Locked. */
static const char *audit_lessee(const struct pc__leases *leases, struct pc__lessee *lessee)
{
    uint64_t serial = 0;
    if (!lessee->connections && !lessee->looks && !waits(lessee))
        return "a lessee goes with what it is kept for";
    for (struct pc__link *at = lessee->link.next; at != &leases->lessees; at = at->next) {
        const struct pc__lessee *other = pc__of(at, struct pc__lessee, link);
        if (other->number == lessee->number && other->process.pid == lessee->process.pid)
            return "a client of a process is one lessee";
    }
    pc__each(link, &lessee->orphans)
    {
        const struct pc__lease *lease = pc__of(link, struct pc__lease, link);
        if (lease->serial <= serial || lease->serial > leases->next_serial)
            return "orphans are in the order in which they became that";
        serial = lease->serial;
        if (lease->session_id < lessee->attached_id)
            return "who has attached anew leaves no orphans behind";
        if (!lease->region || !lease->generation || !lease->length_bytes)
            return "an orphan is of some memory";
    }
    return NULL;
}

const char *pc__leases_audit(struct pc_engine *engine)
{
    const char *broken = NULL;
    pthread_mutex_lock(&engine->leases.lock);
    pc__each(link, &engine->leases.lessees)
    {
        const char *one = audit_lessee(&engine->leases, pc__of(link, struct pc__lessee, link));
        broken = broken ? broken : one;
    }
    pthread_mutex_unlock(&engine->leases.lock);
    return broken;
}

/* No loop runs any more. */
void pc__leases_close(struct pc_engine *engine)
{
    pc__each(link, &engine->leases.lessees)
    {
        struct pc__lessee *lessee = pc__of(link, struct pc__lessee, link);
        end_all(engine, lessee, &lessee->orphans);
        pc__link_remove(link);
        lessee_free(lessee);
    }
    pthread_mutex_destroy(&engine->leases.lock);
}
