/* heap.c - memory for what comes and goes: two-level segregated fits (Masmano et al., 2004).
 *
 * Each block knows its own length and that of the block before it, so that a free one is joined with free
 * neighbours at once. Free blocks of similar lengths are in one list; a bit says whether a list has any. So
 * both calls take the same time whatever the heap has in it, and what is free is never in pieces that lie
 * side by side.
 */
#include "match/match.h"

#define HEAD 16u
#define LEAST 48u /* a free block has both links */
#define IS_FREE 1u

struct block {
    uint64_t length; /* with the head; bit 0: free */
    uint64_t before; /* length of the block before; 0: this is the first one */
    uint64_t next;   /* of the same list, while it is free; offsets */
    uint64_t previous;
};

static struct block *block_at(const pc_matcher *m, uint64_t at)
{
    return pc__match_at(m, at);
}
static uint64_t length_of(const struct block *block)
{
    return block->length & ~(uint64_t)IS_FREE;
}
static bool is_free(const struct block *block)
{
    return block->length & IS_FREE;
}

static uint32_t log_of(uint64_t length)
{
    return 63u - (uint32_t)__builtin_clzll(length);
}
static uint32_t part_of(uint64_t length, uint32_t log)
{
    return (uint32_t)(length >> (log - 3u)) & (PC__HEAP_PARTS - 1u);
}

static void link_free(pc_matcher *m, uint64_t at, uint64_t length)
{
    struct pc__match_heap *heap = &m->shared->heap;
    uint32_t log = log_of(length), part = part_of(length, log);
    struct block *block = block_at(m, at);
    block->length = length | IS_FREE;
    block->next = heap->free[log][part];
    block->previous = 0;
    if (block->next)
        block_at(m, block->next)->previous = at;
    heap->free[log][part] = at;
    heap->logs |= 1ull << log;
}

static void unlink_free(pc_matcher *m, uint64_t at)
{
    struct pc__match_heap *heap = &m->shared->heap;
    struct block *block = block_at(m, at);
    uint32_t log = log_of(length_of(block)), part = part_of(length_of(block), log);
    if (block->next)
        block_at(m, block->next)->previous = block->previous;
    if (block->previous)
        block_at(m, block->previous)->next = block->next;
    else
        heap->free[log][part] = block->next;
    bool is_empty = true;
    for (uint32_t i = 0; i < PC__HEAP_PARTS; i++)
        is_empty &= !heap->free[log][i];
    if (is_empty)
        heap->logs &= ~(1ull << log);
}

static void tell_next(pc_matcher *m, uint64_t at, uint64_t length)
{
    const struct pc__match_heap *heap = &m->shared->heap;
    if (at + length < heap->begin + heap->n_bytes)
        block_at(m, at + length)->before = length;
}

void pc__heap_init(pc_matcher *m, uint64_t begin, uint64_t n_bytes)
{
    struct pc__match_heap *heap = &m->shared->heap;
    memset(heap, 0, sizeof *heap);
    heap->begin = begin;
    heap->n_bytes = n_bytes;
    block_at(m, begin)->before = 0;
    link_free(m, begin, n_bytes);
}

/* A list whose every block is long enough; 0: there is none. */
static uint64_t find(const struct pc__match_heap *heap, uint64_t length)
{
    length += (1ull << (log_of(length) - 3u)) - 1u; /* up to the next list: any block of it will do */
    uint32_t log = log_of(length);
    if (log >= PC__HEAP_LOGS)
        return 0;
    for (uint32_t part = part_of(length, log); part < PC__HEAP_PARTS; part++)
        if (heap->free[log][part])
            return heap->free[log][part];
    uint64_t above = heap->logs & ~((2ull << log) - 1u);
    if (!above)
        return 0;
    log = (uint32_t)__builtin_ctzll(above);
    for (uint32_t part = 0; part < PC__HEAP_PARTS; part++)
        if (heap->free[log][part])
            return heap->free[log][part];
    return 0;
}

uint64_t pc__heap_take(pc_matcher *m, uint64_t n_bytes)
{
    struct pc__match_heap *heap = &m->shared->heap;
    if (n_bytes > heap->n_bytes)
        return 0;
    uint64_t length = (n_bytes + HEAD + 15u) & ~(uint64_t)15u;
    if (length < LEAST)
        length = LEAST;
    uint64_t at = find(heap, length);
    if (!at)
        return 0;
    unlink_free(m, at);
    uint64_t rest = length_of(block_at(m, at)) - length;
    if (rest < LEAST) {
        length += rest;
    } else {
        block_at(m, at + length)->before = length;
        link_free(m, at + length, rest);
        tell_next(m, at + length, rest);
    }
    block_at(m, at)->length = length;
    heap->used_bytes += length;
    return at + HEAD;
}

void pc__heap_give(pc_matcher *m, uint64_t given)
{
    struct pc__match_heap *heap = &m->shared->heap;
    uint64_t at = given - HEAD, length = length_of(block_at(m, at));
    heap->used_bytes -= length;
    uint64_t after = at + length;
    if (after < heap->begin + heap->n_bytes && is_free(block_at(m, after))) {
        unlink_free(m, after);
        length += length_of(block_at(m, after));
    }
    uint64_t before = block_at(m, at)->before;
    if (before && is_free(block_at(m, at - before))) {
        at -= before;
        unlink_free(m, at);
        length += before;
    }
    link_free(m, at, length);
    tell_next(m, at, length);
}

/* The blocks fill the heap; each knows the length of the one before; no two free ones lie side by side; the
 * sum of those in use is used_bytes. */
const char *pc__heap_audit(const pc_matcher *m)
{
    const struct pc__match_heap *heap = &m->shared->heap;
    uint64_t at = heap->begin, before = 0, used = 0;
    bool was_free = false;
    while (at < heap->begin + heap->n_bytes) {
        const struct block *block = block_at(m, at);
        if (block->before != before)
            return "a block does not know the length of the one before";
        if (is_free(block) && was_free)
            return "two free blocks lie side by side";
        if (length_of(block) < LEAST)
            return "a block is too short";
        was_free = is_free(block);
        used += was_free ? 0 : length_of(block);
        before = length_of(block);
        at += before;
    }
    if (at != heap->begin + heap->n_bytes)
        return "the blocks do not fill the heap";
    return used == heap->used_bytes ? NULL : "the used bytes are not those of the blocks";
}

int pc__match_full(const pc_matcher *m)
{
    const struct pc__match_heap *heap = &m->shared->heap;
    return pc__fail(PC_ERR_NO_SPACE,
                    "the memory of programs on this node is full: partitions and messages have %llu of %llu bytes",
                    (unsigned long long)heap->used_bytes, (unsigned long long)heap->n_bytes);
}
