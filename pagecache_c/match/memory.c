/* memory.c - the partitions' own bytes: in the matcher's mapping, so that any process runs any task on them,
 * in place.
 *
 * A block begins where its taker says; what the heap must be given back is before it. Large blocks give their
 * pages back to the kernel: a slice that has moved away costs nothing any more.
 */
#include "match/match.h"

#include <sys/mman.h>
#include <unistd.h>

#define ALIGN 64u
#define MOST_BYTES (1ull << 44)
#define PUNCHED_BYTES (256u << 10) /* below that a page fault costs more than the memory */

/* Where the heap's block of a memory is. */
static uint64_t *owner_of(pc_matcher *m, uint64_t at)
{
    return (uint64_t *)pc__match_at(m, at) - 1;
}

static void give(pc_matcher *m, uint64_t at, uint64_t n_bytes)
{
    if (n_bytes >= PUNCHED_BYTES) {
        const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        uint64_t first = (at + page - 1u) & ~(page - 1u), end = (at + n_bytes) & ~(page - 1u);
        /* It may fail: then the pages stay until they are used again. */
        if (end > first)
            (void)madvise(pc__match_at(m, first), end - first, MADV_REMOVE);
    }
    pc__heap_give(m, *owner_of(m, at));
}

static struct pc__match_memory *find(pc_matcher *m, uint32_t dataset, uint32_t index, uint64_t *slot)
{
    if (dataset < m->shared->n_datasets && index < pc__match_dataset(m, dataset)->n_partitions) {
        const struct pc__match_dataset *info = pc__match_dataset(m, dataset);
        const struct pc__match_group *group = pc__match_group(m, info->group);
        *slot = pc__match_slice(m, group->first_slice + index)->first_partition + info->place;
        return pc__match_memory(m, *slot);
    }
    (void)pc__fail(PC_ERR_RANGE, "the memory of partition %u of dataset %u", index, dataset);
    return NULL;
}

PC_API int pc_match_new_memory(pc_matcher *m, uint64_t n_bytes, void **out)
{
    if (!n_bytes || n_bytes > MOST_BYTES)
        return pc__fail(PC_ERR_RANGE, "a memory of %llu bytes", (unsigned long long)n_bytes);
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    uint64_t block = pc__heap_take(m, n_bytes + 2u * ALIGN);
    if (block) {
        uint64_t at = (block + sizeof block + ALIGN - 1u) & ~(uint64_t)(ALIGN - 1u);
        *owner_of(m, at) = block;
        *out = pc__match_at(m, at);
    } else {
        rc = pc__match_full(m);
    }
    pc__match_unlock(m);
    return rc;
}

static int is_ours(const pc_matcher *m, const char *address, uint64_t n_bytes)
{
    const struct pc__match_heap *heap = &m->shared->heap;
    const char *first = m->base + heap->begin, *end = first + heap->n_bytes;
    if (address >= first && address < end && n_bytes <= (uint64_t)(end - address))
        return PC_OK;
    return pc__fail(PC_ERR_RANGE, "%llu bytes that are not of this matcher", (unsigned long long)n_bytes);
}

PC_API int pc_match_set_memory(pc_matcher *m, uint32_t dataset, uint32_t index, void *address,
                               uint64_t n_bytes, uint64_t data_offset, uint64_t data_bytes)
{
    uint64_t slot = 0;
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    struct pc__match_memory *memory = find(m, dataset, index, &slot);
    if (!memory)
        rc = PC_ERR_RANGE;
    else if (address)
        rc = is_ours(m, address, n_bytes);
    if (!rc && (data_offset > n_bytes || data_bytes > n_bytes - data_offset))
        rc = pc__fail(PC_ERR_RANGE, "the data of partition %u of dataset %u is not in its memory", index,
                      dataset);
    if (!rc) {
        uint64_t at = address ? (uint64_t)((char *)address - m->base) : 0;
        if (memory->at && memory->at != at)
            give(m, memory->at, memory->n_bytes);
        *memory = (struct pc__match_memory){at, n_bytes, data_offset, data_bytes};
        *pc__match_generation(m, slot) += 1u;
    }
    pc__match_unlock(m);
    return rc;
}

PC_API int pc_match_memory_of(pc_matcher *m, uint32_t dataset, uint32_t index,
                              struct pc_match_memory *out)
{
    uint64_t slot = 0;
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_memory *memory = find(m, dataset, index, &slot);
    if (memory)
        *out = (struct pc_match_memory){.address = memory->at ? pc__match_at(m, memory->at) : NULL,
                                        .n_bytes = memory->n_bytes,
                                        .generation = *pc__match_generation(m, slot)};
    pc__match_unlock(m);
    return memory ? PC_OK : PC_ERR_RANGE;
}

PC_API const uint64_t *pc_match_generations(pc_matcher *m, uint64_t *n)
{
    *n = m->shared->n_partitions;
    return pc__match_generation(m, 0);
}
