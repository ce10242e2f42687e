/* blockset.c - see blockset.h. */
#include "common/blockset.h"

#include <stdlib.h>

#define WORD_BITS 64u

uint64_t pc__extent_blocks(uint64_t n_blocks, uint64_t extent)
{
    uint64_t left = n_blocks - extent * PC_EXTENT_BLOCKS;
    return left < PC_EXTENT_BLOCKS ? left : PC_EXTENT_BLOCKS;
}

static uint64_t n_extents(const struct pc__blockset *set)
{
    return (set->n_blocks + PC_EXTENT_BLOCKS - 1) / PC_EXTENT_BLOCKS;
}

int pc__blockset_init(struct pc__blockset *set, uint64_t n_blocks)
{
    set->n_blocks = n_blocks;
    set->n_set = 0;
    set->extents = calloc(n_extents(set) ? n_extents(set) : 1, sizeof *set->extents);
    return set->extents ? PC_OK : PC_ERR_NO_MEMORY;
}

void pc__blockset_free(struct pc__blockset *set)
{
    if (!set->extents)
        return;
    for (uint64_t i = 0; i < n_extents(set); i++)
        free(set->extents[i]);
    free(set->extents);
    set->extents = NULL;
    set->n_set = 0;
}

/* Bits [first, first + n) of one word; 1 <= n <= 64. */
static uint64_t word_mask(uint64_t first, uint64_t n)
{
    return (n == WORD_BITS ? ~0ull : (1ull << n) - 1) << first;
}

bool pc__blockset_has(const struct pc__blockset *set, uint64_t block)
{
    const uint64_t *extent = set->extents[block / PC_EXTENT_BLOCKS];
    uint64_t bit = block % PC_EXTENT_BLOCKS;
    return extent && (extent[bit / WORD_BITS] >> (bit % WORD_BITS) & 1u);
}

/* Walks [first, first + n) word by word: the part of the walk that fits one word. */
struct step {
    uint64_t extent, word, mask, n;
};
static struct step step_at(uint64_t first, uint64_t n)
{
    uint64_t bit = first % PC_EXTENT_BLOCKS;
    uint64_t shift = bit % WORD_BITS;
    uint64_t take = WORD_BITS - shift < n ? WORD_BITS - shift : n;
    return (struct step){.extent = first / PC_EXTENT_BLOCKS,
                         .word = bit / WORD_BITS,
                         .mask = word_mask(shift, take),
                         .n = take};
}

int64_t pc__blockset_add(struct pc__blockset *set, uint64_t first, uint64_t n)
{
    int64_t added = 0;
    while (n) {
        struct step at = step_at(first, n);
        uint64_t **extent = &set->extents[at.extent];
        uint64_t words = (pc__extent_blocks(set->n_blocks, at.extent) + WORD_BITS - 1) / WORD_BITS;
        if (!*extent && !(*extent = calloc(words, sizeof **extent))) {
            set->n_set += (uint64_t)added;
            return PC_ERR_NO_MEMORY;
        }
        added += __builtin_popcountll(at.mask & ~(*extent)[at.word]);
        (*extent)[at.word] |= at.mask;
        first += at.n;
        n -= at.n;
    }
    set->n_set += (uint64_t)added;
    return added;
}

int64_t pc__blockset_remove(struct pc__blockset *set, uint64_t first, uint64_t n)
{
    int64_t removed = 0;
    while (n) {
        struct step at = step_at(first, n);
        uint64_t *extent = set->extents[at.extent];
        if (extent) {
            removed += __builtin_popcountll(at.mask & extent[at.word]);
            extent[at.word] &= ~at.mask;
        }
        first += at.n;
        n -= at.n;
    }
    set->n_set -= (uint64_t)removed;
    return removed;
}

static uint64_t next_where(const struct pc__blockset *set, uint64_t from, uint64_t limit,
                           bool present)
{
    while (from < limit) {
        struct step at = step_at(from, limit - from);
        const uint64_t *extent = set->extents[at.extent];
        if (!extent) {
            if (!present)
                return from;
            from = (at.extent + 1) * PC_EXTENT_BLOCKS; /* a whole extent without a bit */
            continue;
        }
        uint64_t found = (present ? extent[at.word] : ~extent[at.word]) & at.mask;
        if (found)
            return from - from % WORD_BITS + (uint64_t)__builtin_ctzll(found);
        from += at.n;
    }
    return limit;
}

uint64_t pc__blockset_next(const struct pc__blockset *set, uint64_t from, uint64_t limit)
{
    return next_where(set, from, limit, true);
}

uint64_t pc__blockset_next_absent(const struct pc__blockset *set, uint64_t from, uint64_t limit)
{
    return next_where(set, from, limit, false);
}

uint64_t pc__blockset_count(const struct pc__blockset *set, uint64_t first, uint64_t n)
{
    uint64_t count = 0;
    while (n) {
        struct step at = step_at(first, n);
        const uint64_t *extent = set->extents[at.extent];
        if (extent)
            count += (uint64_t)__builtin_popcountll(extent[at.word] & at.mask);
        first += at.n;
        n -= at.n;
    }
    return count;
}
