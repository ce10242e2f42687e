/* ended.c - addresses of a client that was closed while the program may still look into them.
 *
 * An array outlives the session that it is of. Its addresses are then nobody's: the kernel would give
 * them to the next map that fits, and the array would show that one's bytes. So where a mapping was
 * still used when its client closed, a guard without access takes its place, for as long as its
 * users say nothing: a touch ends the process with the cause, and no map can have the addresses
 * (MAP_FIXED_NOREPLACE). Each user gives its part back with pc_ended_unmap. Where the kernel gives no
 * guard (this process has all the maps that it may have), the old map stays, without access.
 *
 * Threads: any, finalizers too. Lock: lock, the innermost but for the range table's.
 */
#include "client/client.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>

#define BUCKETS 256u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the table */
static struct pc__ended *table[BUCKETS];

static struct pc__ended **bucket(uint64_t address)
{
    return &table[((address >> PC_BLOCK_SHIFT) * 0x9e3779b97f4a7c15u) >> 56];
}
static_assert(BUCKETS == 1u << 8, "bucket() takes 8 bits");

void pc__ended_keep(struct pc_client *client, struct pc__mapping *mapping)
{
    struct pc__trapped *trapped = &mapping->trapped;
    if (mapping->is_kept && mapping->state == PC__MAPPING_LIVE)
        return; /* libraries look at it: it stays as it is (build.c) */
    if (!mapping->users || !trapped->address)
        return; /* nobody looks at it */
    void *at_it = pc__pointer(trapped->address);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mapping->state != PC__MAPPING_GUARDED) {
        if (client->trap.ops)
            client->trap.ops->forget(&client->trap, trapped);
        pc__range_set(trapped->address, PC__RANGE_GUARD, PC_ERR_ENDED);
        /* Over our own map, in one step: no moment comes in which others could have the addresses. */
        if (mmap(at_it, trapped->length_bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
            (void)mprotect(at_it, trapped->length_bytes, PROT_NONE); /* splits no map, so needs none */
    }
    struct pc__ended *ended = mapping->ended;
    mapping->ended = NULL;
    *ended = (struct pc__ended){.address = trapped->address, .length_bytes = trapped->length_bytes,
                            .users = mapping->users};
    trapped->address = 0; /* it is not the client's any more */
    struct pc__ended **at = bucket(ended->address);
    pthread_mutex_lock(&lock);
    ended->next = *at;
    *at = ended;
    pthread_mutex_unlock(&lock);
}

PC_API int pc_ended_unmap(uint64_t address)
{
    pthread_mutex_lock(&lock);
    struct pc__ended **at = bucket(address);
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    struct pc__ended *ended = *at;
    if (!ended) {
        pthread_mutex_unlock(&lock);
        return pc__fail(PC_ERR_NO_REGION, "nothing of an ended session is at %#" PRIx64, address);
    }
    if (--ended->users == 0) {
        *at = ended->next;
        pc__range_unmap(address, ended->length_bytes, PC_ERR_ENDED);
        free(ended);
    }
    pthread_mutex_unlock(&lock);
    return PC_OK;
}

void pc__ended_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

void pc__ended_after_fork(void)
{
    pthread_mutex_unlock(&lock);
}
