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
 */
#include "engine.h"

#include <stdlib.h>

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

struct pc__window_user *pc__windows_add(struct pc__generation *generation,
                                        struct pc__control_page *page, uint64_t address)
{
    struct pc__window_user *user = malloc(sizeof *user);
    if (!user)
        return NULL;
    *user = (struct pc__window_user){.page = page, .address = address};
    pc__link_push(&generation->windows, &user->link);
    return user;
}

void pc__windows_drop(struct pc__window_user *user)
{
    if (!user)
        return;
    pc__link_remove(&user->link);
    free(user);
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

uint32_t pc__windows_hold(struct pc__generation *generation, uint64_t chunk)
{
    pc__each(link, &generation->windows)
        atomic_store(&pc__of(link, struct pc__window_user, link)->page->evicting, chunk + 1);
    uint32_t held = 0;
    pc__each(each, &generation->windows)
    {
        const struct pc__window_user *user = pc__of(each, struct pc__window_user, link);
        uint32_t limit = atomic_load(&user->page->limit);
        uint32_t n = limit && limit < PC__WINDOW_RUNS ? limit : PC__WINDOW_RUNS;
        for (uint32_t i = 0; i < n && held != WHOLE_CHUNK; i++)
            held |= held_by(&user->page->window[i], user->address + chunk * PC__CHUNK_BYTES);
    }
    return held;
}

void pc__windows_release(struct pc__generation *generation)
{
    pc__each(link, &generation->windows)
        atomic_store(&pc__of(link, struct pc__window_user, link)->page->evicting, 0u);
}
