/* windows.c - what SIGSEGV processes of this node have unprotected, and eviction beside it.
 *
 * Where a process reads without a fault is in the window of its control page (wire.h). A block in a
 * window is never punched: its reader would see zeros. Looking before punching is not enough, for a
 * process may open the block between the look and the punch. So the server first says, in each of
 * their pages, which chunk goes; then it looks; then it punches. A process first says what it will
 * open; then it looks whether that is going. Whichever comes second sees the other: the server leaves
 * the block, or the process asks the server, who answers after the punch, for both are under
 * region.lock.
 *
 * A chunk is named by its number in the mapping, of whichever region: one word, stored at once. That
 * the same chunk of another region then looks as if it went costs a question, and nothing else.
 *
 * A process may lose its connection and live on: until it has attached again, is gone, or says that it
 * is over, its page is looked at all the same (pc__windows_left), also where it has nothing open: it
 * opens what is resident without a request.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"

#include <stdlib.h>
#include <sys/mman.h>

#define RUN_BYTES (256ull << 10) /* that a run of the window has at most under a limit */
#define LEAST_RUNS 64u              /* each thread that is stopped holds one */
#define LOOKS 64                   /* at a run that keeps changing: then it is taken for held */
#define WHOLE_CHUNK ((1u << PC__CHUNK_BLOCKS) - 1)

uint32_t pc__windows_limit(uint64_t cache_bytes)
{
    if (!cache_bytes)
        return 0;
    uint64_t runs = cache_bytes / 8 / RUN_BYTES;
    return runs < LEAST_RUNS ? LEAST_RUNS : runs > PC__WINDOW_RUNS ? PC__WINDOW_RUNS : (uint32_t)runs;
}

struct pc__window_owner *pc__windows_owner(struct pc__control_page *page, uint64_t number,
                                           struct pc__process process)
{
    struct pc__window_owner *owner = malloc(sizeof *owner);
    if (!owner)
        return NULL;
    owner->page = page;
    owner->number = number;
    owner->process = process;
    atomic_init(&owner->refs, 1u);
    return owner;
}

void pc__windows_owner_put(struct pc__window_owner *owner)
{
    if (!owner || !pc__ref_drop(&owner->refs))
        return;
    munmap(owner->page, sizeof *owner->page);
    free(owner);
}

/* Which blocks of [begin, begin + 64 KiB) the run holds. */
static uint32_t held_by(const struct pc__window_run *run, uint64_t begin)
{
    uint64_t address, n_bytes;
    int looks = 0;
    do {
        if (looks++ == LOOKS)
            return WHOLE_CHUNK;
        address = atomic_load(&run->address);
        n_bytes = atomic_load(&run->n_bytes);
    } while (atomic_load(&run->address) != address);
    if (!address || address >= begin + PC__CHUNK_BYTES || n_bytes > UINT64_MAX - address ||
        address + n_bytes <= begin)
        return 0;
    uint64_t low = address > begin ? (address - begin) >> PC_BLOCK_SHIFT : 0;
    uint64_t high = (address + n_bytes - begin + PC_BLOCK_BYTES - 1) >> PC_BLOCK_SHIFT;
    high = high < PC__CHUNK_BLOCKS ? high : PC__CHUNK_BLOCKS;
    return ((1u << high) - 1) & ~((1u << low) - 1);
}

/* ---------------------------------------------------------- users */

static uint32_t n_runs(const struct pc__control_page *page)
{
    uint32_t limit = atomic_load(&page->limit);
    return limit && limit < PC__WINDOW_RUNS ? limit : PC__WINDOW_RUNS;
}

/* Whether a process that has lost its connection may still open blocks: it does so by itself, at any
 * time. One of a foreign namespace of processes may, until its lease ends (leases.c). */
static bool may_read(const struct pc__window_user *user)
{
    if (atomic_load(&user->owner->page->over))
        return false;
    return pc__process_has_memory(&user->owner->process);
}

void pc__windows_drop(struct pc__window_user *user)
{
    if (!user)
        return;
    pc__link_remove(&user->link);
    pc__windows_owner_put(user->owner);
    free(user);
}

bool pc__windows_orphaned(struct pc__generation *generation)
{
    bool any = false;
    pc__each(link, &generation->windows)
    {
        struct pc__window_user *user = pc__of(link, struct pc__window_user, link);
        if (user->is_orphan && !may_read(user))
            pc__windows_drop(user);
        else
            any |= user->is_orphan;
    }
    return any;
}

struct pc__window_user *pc__windows_add(struct pc__generation *generation,
                                        struct pc__window_owner *owner, uint64_t address,
                                        uint64_t length_bytes)
{
    (void)pc__windows_orphaned(generation); /* so that there are never many */
    pc__each(link, &generation->windows)
    {
        struct pc__window_user *user = pc__of(link, struct pc__window_user, link);
        /* The same client, attached again: its page is the same. */
        if (user->is_orphan && user->owner->number == owner->number && user->address == address)
            pc__windows_drop(user);
    }
    struct pc__window_user *user = malloc(sizeof *user);
    if (!user)
        return NULL;
    *user = (struct pc__window_user){
        .owner = owner, .address = address, .length_bytes = length_bytes};
    pc__ref_take(&owner->refs);
    pc__link_push(&generation->windows, &user->link);
    return user;
}

void pc__windows_left(struct pc__window_user *user)
{
    if (user && may_read(user))
        user->is_orphan = true;
    else
        pc__windows_drop(user);
}

void pc__windows_unmapped(struct pc__generation *generation, uint64_t number, uint64_t address)
{
    pc__each(link, &generation->windows)
    {
        struct pc__window_user *user = pc__of(link, struct pc__window_user, link);
        if (user->is_orphan && user->owner->number == number && user->address == address)
            pc__windows_drop(user);
    }
}

void pc__windows_end(struct pc__generation *generation)
{
    pc__each(link, &generation->windows)
        pc__windows_drop(pc__of(link, struct pc__window_user, link));
}

/* ---------------------------------------------------------------- eviction */

uint32_t pc__windows_hold(struct pc__generation *generation, uint64_t chunk)
{
    (void)pc__windows_orphaned(generation);
    pc__each(link, &generation->windows)
        atomic_store(&pc__of(link, struct pc__window_user, link)->owner->page->evicting, chunk + 1);
    uint32_t held = 0;
    pc__each(each, &generation->windows)
    {
        const struct pc__window_user *user = pc__of(each, struct pc__window_user, link);
        const struct pc__control_page *page = user->owner->page;
        for (uint32_t i = 0; i < n_runs(page) && held != WHOLE_CHUNK; i++)
            held |= held_by(&page->window[i], user->address + chunk * PC__CHUNK_BYTES);
    }
    return held;
}

void pc__windows_release(struct pc__generation *generation)
{
    pc__each(link, &generation->windows)
        atomic_store(&pc__of(link, struct pc__window_user, link)->owner->page->evicting, 0u);
}
