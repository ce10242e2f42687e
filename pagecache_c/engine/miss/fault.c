/* fault.c - a thread touched an absent block: decide how much to fetch, and remember who waits.
 *
 * Entered by the loop that owns the client. Takes region.lock. Everything here is arithmetic; the
 * fetch itself goes out after the lock is dropped.
 *
 * How much is fetched (the papers' page) is learned from use: choose.c. Where a size was asked for,
 * of this mapping or of the whole engine, it is that.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <errno.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define FIRST_PAGE_SHIFT 16u /* 64 KiB */
#define FIRST_PAGE_BLOCKS (1u << (FIRST_PAGE_SHIFT - PC_BLOCK_SHIFT))

static_assert(1u << (PC__PAGE_LEVELS - 1) == PC__DATA_MAX_BLOCKS, "a request holds a page");

static struct pc__readahead *pages_of(struct pc__region *region)
{
    if (!region->pages) {
        struct pc__readahead *pages = malloc(sizeof *pages);
        if (pages && pc__readahead_init(pages, region->n_blocks)) {
            free(pages);
            pages = NULL;
        }
        region->pages = pages;
    }
    return region->pages;
}

static struct pc__choice choose(struct pc__loop *loop, struct pc__session_map *mapping,
                                uint64_t block, bool in_flight)
{
    const struct pc_engine *engine = loop->engine;
    const struct pc__generation *generation = mapping->generation;
    const unsigned shift = mapping->page_shift ? mapping->page_shift : engine->page_shift;
    struct pc__readahead *pages = shift ? NULL : pages_of(mapping->region);
    const uint64_t most = pc__cache_most_blocks(engine); /* more would push itself out */
    if (!pages) /* or no memory to learn anything */
        return pc__choose_fixed(mapping->region->n_blocks, shift ? shift : FIRST_PAGE_SHIFT, block,
                                in_flight, most);
    const uint64_t home_id = pc__home_of(mapping->region, block);
    const struct pc__peer *home =
        home_id && home_id != engine->server_id ? pc__peer_of(loop, home_id) : NULL;
    if (home && home->trips.known_blocks && !mapping->region->in_file) /* another loop may know it, and this one not */
        pc__readahead_set_trip(pages, home->trips.known_blocks);
    if (mapping->region->in_file && pc__file_trip_blocks(mapping->region))
        pc__readahead_set_trip(pages, pc__file_trip_blocks(mapping->region));
    const struct pc__choice_sets sets = {.present = &generation->present,
                                         .in_flight = &generation->in_flight,
                                         .changed = &generation->changed_away};
    return pc__choose(pages, &mapping->streams, &sets, block, in_flight, most);
}

static int ask(struct pc__batch *batch, struct pc__region *region, struct pc__generation *generation,
               const struct pc__choice *choice)
{
    uint64_t first = choice->run.first_block;
    const uint64_t end = first + choice->run.n_blocks;
    int rc = PC_OK;
    for (unsigned i = 0; i < choice->n_left_out && !rc; i++) {
        rc = pc__batch_add(batch, region, generation, first, choice->left_out[i] - first);
        first = choice->left_out[i] + 1;
    }
    return rc ? rc : pc__batch_add(batch, region, generation, first, end - first);
}

/* The mapping of the next piece, which begins where this one ends; no other regions are adjacent. */
static struct pc__session_map *next_piece(struct pc__session *session,
                                          const struct pc__session_map *mapping)
{
    struct pc__session_map *next =
        pc__session_mapping_at(session, mapping->address + mapping->length_bytes);
    return next && next->region->id == mapping->region->id + 1 && !next->page_shift ? next : NULL;
}

/* The stream goes on there: nobody has touched it yet, so nobody waits. False: it is there already. */
static bool go_on(struct pc__loop *loop, struct pc__session_map *mapping,
                  const struct pc__carried *carried)
{
    struct pc__region *region = mapping->region;
    struct pc__batch ahead;
    pc__batch_init(&ahead, false, false);
    pthread_mutex_lock(&region->lock);
    struct pc__generation *generation = mapping->generation;
    struct pc__readahead *pages = pages_of(region);
    const bool is_absent = pages && !generation->complete &&
                           !pc__blockset_has(&generation->present, 0) &&
                           !pc__blockset_has(&generation->in_flight, 0);
    if (is_absent) {
        const struct pc__choice_sets sets = {.present = &generation->present,
                                             .in_flight = &generation->in_flight,
                                             .changed = &generation->changed_away};
        const struct pc__choice choice = pc__choose_carried(
            pages, &mapping->streams, &sets, carried, pc__cache_most_blocks(loop->engine));
        (void)ask(&ahead, region, generation, &choice); /* without memory it is asked for when touched */
    }
    pthread_mutex_unlock(&region->lock);
    pc__batch_submit(loop, &ahead);
    return is_absent;
}

static void wake_now(struct pc__session *session, const struct pc__generation *generation,
                     const struct pc__waiter *waiter)
{
    if (waiter->slot >= 0) {
        pc__fill_answer_slot(generation, waiter, PC_OK);
        return;
    }
    struct uffdio_range range = {.start = waiter->mapping_address +
                                          (waiter->block << PC_BLOCK_SHIFT),
                                 .len = PC_BLOCK_BYTES};
    (void)ioctl(session->uffd, UFFDIO_WAKE, &range);
}

void pc__waiter_ended(struct pc_engine *engine, struct pc__region *region, struct pc__waiter *waiter)
{
    const uint64_t took_ns = pc__now_ns() - waiter->since_ns;
    region->faults++;
    region->fault_wait_ns += took_ns;
    pc__count_add(&engine->count.fault_wait_ns, took_ns);
    pc__count_sub(&engine->count.faults_waiting, 1);
    struct pc__waits *waits = waiter->session->waits;
    if (waits) {
        pc__count_add(&waits->faults, 1);
        pc__count_add(&waits->wait_ns, took_ns);
    }
    pc__link_remove(&waiter->link);
    free(waiter);
}

void pc__fault(struct pc__loop *loop, struct pc__session *session, uint64_t address, int slot)
{
    struct pc_engine *engine = loop->engine;
    struct pc__session_map *mapping = pc__session_mapping_at(session, address);
    if (!mapping) {
        /* The faults that the last server left unread come with the hello, before the ATTACH of
         * their mapping: that wakes the thread, or takes its slot up. pc__fault_check_stray ends
         * a client that never does it. */
        if (!session->stray_by_ns || pc__session_mapping_at(session, session->stray_address)) {
            session->stray_address = address;
            session->stray_by_ns = pc__now_ns() + engine->fault_timeout_ns;
        }
        return;
    }
    struct pc__region *region = mapping->region;
    uint64_t block = (address - mapping->address) >> PC_BLOCK_SHIFT;
    struct pc__waiter *waiter = malloc(sizeof *waiter);
    if (!waiter) {
        struct pc__ctl_fail fail = {.region = region->id, .block = block,
                                    .error = PC_ERR_NO_MEMORY,
                                    .cause = "the page server is out of memory"};
        pc__session_send(session, PC__CTL_FAIL, 0, PC_ERR_NO_MEMORY, &fail, sizeof fail, -1);
        return;
    }
    *waiter = (struct pc__waiter){.session = session,
                                  .mapping_id = mapping->id,
                                  .mapping_address = mapping->address,
                                  .block = block,
                                  .slot = slot};
    pc__count_add(&engine->count.faults, 1);
    struct pc__batch urgent, ahead;
    pc__batch_init(&urgent, true, false);
    pc__batch_init(&ahead, false, false);
    pthread_mutex_lock(&region->lock);
    struct pc__generation *generation = mapping->generation;
    if (generation->complete || pc__blockset_has(&generation->present, block)) {
        wake_now(session, generation, waiter); /* became present between the touch and now */
        pthread_mutex_unlock(&region->lock);
        free(waiter);
        return;
    }
    bool in_flight = pc__blockset_has(&generation->in_flight, block);
    waiter->since_ns = pc__now_ns(); /* of those that wait alone */
    pc__link_push(&generation->waiters, &waiter->link);
    pc__count_add(&engine->count.faults_waiting, 1);
    const struct pc_run one = {.first_block = block, .n_blocks = 1};
    pc__cache_touched(engine, generation, &one, 1); /* what is around it is in use */
    const struct pc__choice choice = choose(loop, mapping, block, in_flight);
    const bool is_page = choice.run.n_blocks <= FIRST_PAGE_BLOCKS &&
                         block - choice.run.first_block < choice.run.n_blocks;
    /* The touched block goes first, on the lane that never queues behind bulk: with its page where
     * that is small, else alone. */
    int rc = PC_OK;
    if (!in_flight && !is_page)
        rc = pc__batch_add(&urgent, region, generation, block, 1);
    if (!rc && choice.run.n_blocks)
        rc = ask(!in_flight && is_page ? &urgent : &ahead, region, generation, &choice);
    struct pc__carried carried;
    struct pc__session_map *next = NULL;
    if (region->pages && pc__readahead_carry(region->pages, &mapping->streams, &carried)) {
        next = next_piece(session, mapping); /* looked for at the end of a stream alone */
        if (!next)
            pc__budget_give(&region->pages->budget, carried.rest);
    }
    pthread_mutex_unlock(&region->lock);
    if (in_flight)
        pc__fetch_hurry(loop, region, generation, block);
    pc__batch_submit(loop, &urgent);
    pc__batch_submit(loop, &ahead);
    if (next && !go_on(loop, next, &carried)) {
        pthread_mutex_lock(&region->lock);
        pc__budget_give(&region->pages->budget, carried.rest);
        pthread_mutex_unlock(&region->lock);
    }
    if (rc)
        pc__fill_failed(engine, region, generation, block, 1, engine->server_id, rc);
}

void pc__fault_check_stray(struct pc__session *session, uint64_t now_ns)
{
    if (!session->stray_by_ns || session->stray_by_ns > now_ns)
        return;
    session->stray_by_ns = 0;
    if (pc__session_mapping_at(session, session->stray_address))
        return;
    struct pc__ctl_fail fail = {.error = PC_ERR_NO_REGION,
                                .cause = "the address belongs to no open mapping"};
    pc__session_send(session, PC__CTL_FAIL, 0, PC_ERR_NO_REGION, &fail, sizeof fail, -1);
}

/* Faults that were taken out of slots, under the turn: once it is another's, a slot may be too. */
struct taken {
    int n, slots[PC__SLOTS];
    uint64_t addresses[PC__SLOTS];
};

static void take(struct taken *taken, struct pc__session *session, int i)
{
    taken->slots[taken->n] = i;
    taken->addresses[taken->n++] = session->page->slots[i].address;
}

static void fault_all(const struct taken *taken, struct pc__session *session)
{
    for (int i = 0; i < taken->n && !session->closed; i++)
        pc__fault(session->loop, session, taken->addresses[i], taken->slots[i]);
}

static void stop_reading(struct pc__loop *loop, struct pc__session *session)
{
    pc__watch_remove(loop, session->trap_watch);
    session->trap_watch = NULL;
}

void pc__fault_attached(struct pc__session *session, uint64_t address, uint64_t length_bytes)
{
    if (session->stray_address >= address && session->stray_address - address < length_bytes)
        session->stray_by_ns = 0;
    if (session->uffd >= 0) {
        struct uffdio_range range = {.start = address, .len = length_bytes};
        (void)ioctl(session->uffd, UFFDIO_WAKE, &range);
    }
    struct taken taken = {.n = 0};
    if (!session->page || !pc__turn_hold(session))
        return;
    for (int i = 0; i < PC__SLOTS; i++) {
        struct pc__slot *slot = &session->page->slots[i];
        uint32_t requested = PC__SLOT_REQUESTED;
        bool waits = atomic_load(&slot->state) == PC__SLOT_SERVING;
        if (waits || atomic_load(&slot->state) == PC__SLOT_REQUESTED) {
            if (slot->address < address || slot->address - address >= length_bytes)
                continue;
            /* Acquire: pairs with the handler's release of REQUESTED, and brings the address. */
            if (waits ||
                atomic_compare_exchange_strong(&slot->state, &requested, PC__SLOT_SERVING))
                take(&taken, session, i);
        }
    }
    pc__turn_release(session);
    fault_all(&taken, session);
}

void pc__fault_read_uffd(struct pc__loop *loop, struct pc__session *session)
{
    struct uffd_msg messages[16];
    while (!session->closed) {
        if (!pc__turn_hold(session)) { /* a newer connection must find what is there */
            stop_reading(loop, session);
            return;
        }
        ssize_t got = read(session->uffd, messages, sizeof messages);
        pc__turn_release(session);
        if (got <= 0) {
            if (got < 0 && (errno == EAGAIN || errno == EINTR))
                return; /* EAGAIN also where another thread's wake took the event back */
            /* EOF or an error: the address space is gone; the socket will say so too. */
            stop_reading(loop, session);
            return;
        }
        size_t n = (size_t)got / sizeof messages[0];
        for (size_t i = 0; i < n; i++)
            if (messages[i].event == UFFD_EVENT_PAGEFAULT)
                pc__fault(loop, session, messages[i].arg.pagefault.address, -1);
        if (n < sizeof messages / sizeof messages[0])
            return; /* level-triggered: what came meanwhile wakes us again */
    }
}

void pc__fault_read_slots(struct pc__loop *loop, struct pc__session *session)
{
    uint64_t count;
    struct taken taken = {.n = 0};
    if (!pc__turn_hold(session)) {
        stop_reading(loop, session);
        return;
    }
    (void)!read(session->slots_event, &count, sizeof count);
    for (int i = 0; i < PC__SLOTS; i++) {
        uint32_t requested = PC__SLOT_REQUESTED;
        /* Acquire: pairs with the handler's release of REQUESTED, and brings the address. */
        if (atomic_compare_exchange_strong(&session->page->slots[i].state, &requested,
                                           PC__SLOT_SERVING))
            take(&taken, session, i);
    }
    pc__turn_release(session);
    fault_all(&taken, session);
}
