/* fetch_budget.c - how much faults may fetch beyond what is touched. Pure: no lock, no clock, no
 * kernel; the caller has the lock.
 *
 * The bound. Of a region, over all its mappings and versions,
 *
 *     fetched <= SPARE_BLOCKS + touched * 7/4
 *
 * whatever its readers do. A fault may always have the block that it touches. What it asks for
 * beyond it must have room. Room that was not used adds up, to MOST_SPARE_BLOCKS at most: how much
 * waste a reader who changes its ways can cause, after however long a scan.
 *
 * What is touched. A touch of a present block never leaves the kernel, so of what was fetched
 * around a touched block nothing is known but what is left out: one block, drawn at random, is not
 * fetched with the rest and stays absent. If it is touched, that is a fault, and it stands for all
 * of the rest. Whatever share of the rest is touched, that is the chance of the fault. So the
 * expectation of what is counted is what is touched, for every reader that does not know which
 * block was left out. In streams its fault asks for the next window, and costs nothing. Of pages
 * it is one more: where there is much room only some have a block left out, drawn at random too,
 * which stands for as much of others.
 *
 * A mark that is lost, to another in the same slot, counts as not touched. So does one whose
 * neighbours are gone: they were evicted.
 */
#include "engine/readahead/readahead.h"

#include <assert.h>
#include <stdlib.h>

#define QUARTERS 4              /* of a block: room is counted in these */
#define QUARTERS_A_TOUCH 7      /* 1.75 blocks may be fetched for each that is touched */
#define SPARE_BLOCKS 24
#define MOST_SPARE_BLOCKS 4096  /* two windows of the largest size: what a scan has on its way */
#define TOLD_BLOCKS 4096u       /* fetched in vain; and half as much again as is touched */
#define PART_BLOCKS 512u        /* of longer runs one block of each part is left out: one that stands for
                                   more could bring room for much by chance */

static_assert((1u << (PC__PAGE_LEVELS - 1)) / PART_BLOCKS <= PC__MOST_LEFT_OUT, "all parts of a run");

void pc__budget_init(struct pc__budget *budget)
{
    *budget = (struct pc__budget){.room = QUARTERS * SPARE_BLOCKS, .random = 0x9e3779b97f4a7c15ull};
}

void pc__budget_free(struct pc__budget *budget)
{
    free(budget->marks);
    budget->marks = NULL;
}

uint64_t pc__budget_room(const struct pc__budget *budget)
{
    return budget->room > 0 ? (uint64_t)budget->room / QUARTERS : 0;
}

void pc__budget_give(struct pc__budget *budget, uint64_t n_blocks)
{
    budget->room += (int64_t)(QUARTERS * n_blocks);
}

void pc__budget_take(struct pc__budget *budget, uint64_t n_blocks)
{
    budget->room -= (int64_t)(QUARTERS * n_blocks);
}

bool pc__budget_wastes(const struct pc__budget *budget)
{
    return budget->fetched >= budget->touched + TOLD_BLOCKS &&
           2 * budget->fetched >= 3 * budget->touched;
}

void pc__budget_touched(struct pc__budget *budget, uint64_t n_blocks)
{
    budget->touched += n_blocks;
    budget->room += (int64_t)(QUARTERS_A_TOUCH * n_blocks);
    if (budget->room > QUARTERS * MOST_SPARE_BLOCKS)
        budget->room = QUARTERS * MOST_SPARE_BLOCKS;
}

void pc__budget_fetched(struct pc__budget *budget, uint64_t n_blocks)
{
    budget->fetched += n_blocks;
    budget->room -= (int64_t)(QUARTERS * n_blocks);
}

/* Below n. */
static uint64_t draw(struct pc__budget *budget, uint64_t n)
{
    uint64_t x = budget->random; /* xorshift64* (Vigna 2016) */
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    budget->random = x;
    return (uint64_t)((__uint128_t)(x * 0x2545f4914f6cdd1dull) * n >> 64);
}

static struct pc__mark *slot_of(struct pc__budget *budget, uint64_t block)
{
    return &budget->marks[block * 0x9e3779b97f4a7c15ull >> (64 - budget->mark_bits)];
}

/* Small variables are many, and most of them never need any. False: there is no memory. */
static bool has_marks(struct pc__budget *budget, uint64_t n_blocks)
{
    unsigned bits = 1;
    if (budget->marks)
        return true;
    while (bits < PC__MOST_MARK_BITS && 1ull << bits < n_blocks)
        bits++;
    budget->marks = calloc(1u << bits, sizeof *budget->marks);
    budget->mark_bits = bits;
    return budget->marks;
}

static bool is_fresh(const struct pc__choice_sets *sets, uint64_t block)
{
    return !pc__blockset_has(sets->present, block) && !pc__blockset_has(sets->in_flight, block);
}

/* The next of the run that will come, but `block`. There is one. */
static uint64_t next_fresh(const struct pc__choice_sets *sets, uint64_t at, uint64_t block)
{
    while (at == block || !is_fresh(sets, at))
        at++;
    return at;
}

void pc__budget_ask(struct pc__budget *budget, const struct pc__choice_sets *sets, uint64_t block,
                    unsigned one_in, struct pc__choice *choice)
{
    const struct pc_run *run = &choice->run;
    uint64_t others = 0, at = run->first_block, nth = 0;
    for (uint64_t i = run->first_block; i < run->first_block + run->n_blocks; i++)
        others += i != block && is_fresh(sets, i);
    pc__budget_fetched(budget, others);
    choice->n_left_out = 0;
    if (others < PC__LEAST_MARKED || !one_in || draw(budget, one_in) ||
        !has_marks(budget, sets->present->n_blocks))
        return;
    /* One of each part. */
    const uint64_t parts = (others - 1) / PART_BLOCKS + 1;
    for (uint64_t part = 0; part < parts; part++) {
        const uint64_t first = part * others / parts, end = (part + 1) * others / parts;
        const uint64_t chosen = first + draw(budget, end - first);
        for (at = next_fresh(sets, at, block); nth < chosen; nth++)
            at = next_fresh(sets, at + 1, block);
        *slot_of(budget, at) =
            (struct pc__mark){.block = at, .stands_for = (end - first) * one_in};
        choice->left_out[choice->n_left_out++] = at;
    }
    budget->fetched -= parts;
    budget->room += (int64_t)(QUARTERS * parts);
}

/* Of what came with it, something is still here. */
static bool is_valid(const struct pc__choice_sets *sets, uint64_t block)
{
    return (block > 0 && !is_fresh(sets, block - 1)) ||
           (block + 1 < sets->present->n_blocks && !is_fresh(sets, block + 1));
}

bool pc__budget_take_mark(struct pc__budget *budget, const struct pc__choice_sets *sets,
                          uint64_t block)
{
    struct pc__mark *mark = budget->marks ? slot_of(budget, block) : NULL;
    if (!mark || !mark->stands_for || mark->block != block)
        return false;
    const uint64_t others = mark->stands_for - 1; /* the fault has counted the block itself */
    *mark = (struct pc__mark){0};
    if (!is_valid(sets, block))
        return false;
    pc__budget_touched(budget, others);
    return true;
}
