/* reads.c - which blocks of a mapping this process touched. See client.h.
 *
 * Calls of one process share a mapping and so its page-table entries. Only the first of them to
 * begin drops the entries: another would drop what the first has touched. So each set holds all
 * that its call touched, and perhaps what others did meanwhile.
 *
 * A private mapping's entries are its data and stay: its set is all that was touched since it was
 * mapped.
 *
 * Threads: any. Lock: client.lock, not while the kernel is asked.
 */
#include "client/client.h"

#include "trap/read_set.h"

#include <inttypes.h>
#include <sys/mman.h>

#define DROP_STEP_NS 1000000000ull /* how long is waited for another's drop before looking again */

/* Counts the reader in. True: it is the first, and has to drop the entries. */
static bool reader_enters(pc_client *client, struct pc__mapping *mapping)
{
    pthread_mutex_lock(&client->lock);
    while (mapping->is_dropping && client->state != PC__CONN_CLOSED)
        pc__changed_wait(client, pc__deadline(DROP_STEP_NS));
    bool is_first = mapping->readers++ == 0 && !pc__is_private(mapping);
    mapping->is_dropping = is_first;
    if (mapping->readers == 1)
        mapping->lost_reads = false;
    pthread_mutex_unlock(&client->lock);
    return is_first;
}

static void reader_leaves(pc_client *client, struct pc__mapping *mapping)
{
    pthread_mutex_lock(&client->lock);
    if (mapping->readers) /* one too many is the caller's mistake, and harms only itself */
        mapping->readers--;
    pthread_mutex_unlock(&client->lock);
}

static int drop_entries(pc_client *client, const struct pc__mapping *mapping)
{
    const struct pc__trapped *trapped = &mapping->trapped;
    int rc = client->trap.ops->reads_begin(&client->trap, trapped);
    if (!rc && madvise(pc__pointer(trapped->address), trapped->length_bytes, MADV_DONTNEED))
        rc = pc__fail_errno("MADV_DONTNEED of variable %" PRIu64, mapping->region);
    return rc;
}

PC_API int pc_client_reads_exact(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping;
    int rc = pc__use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    pthread_mutex_lock(&client->lock);
    if (client->trap.kind != PC_TRAP_SIGSEGV && !(mapping->trapped.flags & PC_MAP_EXACT_READS)) {
        mapping->trapped.flags |= PC_MAP_EXACT_READS;
        rc = client->trap.ops->arm(&client->trap, &mapping->trapped); /* what is armed stays so */
        if (rc)
            mapping->trapped.flags &= ~(uint32_t)PC_MAP_EXACT_READS;
    }
    pthread_mutex_unlock(&client->lock);
    pc__unuse(client, mapping);
    return rc;
}

PC_API int pc_client_reads_begin(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping;
    int rc = pc__use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    if (reader_enters(client, mapping)) {
        rc = drop_entries(client, mapping);
        pthread_mutex_lock(&client->lock);
        mapping->is_dropping = false;
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
        if (rc)
            reader_leaves(client, mapping);
    }
    pc__unuse(client, mapping);
    return rc;
}

static int64_t list(pc_client *client, const struct pc__mapping *mapping, struct pc_run *runs,
                    size_t capacity)
{
    int64_t n = pc__read_set(PC__SCAN_MAPPED, mapping->trapped.address,
                             mapping->trapped.length_bytes, runs, capacity);
    pthread_mutex_lock(&client->lock); /* after the look */
    bool is_all = mapping->lost_reads;
    pthread_mutex_unlock(&client->lock);
    if (n < 0 || !is_all)
        return n;
    if (capacity)
        runs[0] = (struct pc_run){0, mapping->trapped.length_bytes >> PC_BLOCK_SHIFT};
    return 1;
}

PC_API int64_t pc_client_reads_end(pc_client *client, uint64_t mapping_id, struct pc_run *runs,
                                   size_t capacity)
{
    struct pc__mapping *mapping;
    int rc = pc__use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    int64_t n = runs ? list(client, mapping, runs, capacity) : 0;
    if (n < 0 || (uint64_t)n <= capacity) /* else it is called again, with room */
        reader_leaves(client, mapping);
    pc__unuse(client, mapping);
    return n;
}
