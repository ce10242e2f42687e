/* seen.c - which blocks of a mapping are here, as far as this process can tell without a question.
 *
 * A bit for each block, set when the page server has said that the block is resident (a prefetch that
 * was waited for, a row of a gather that did not have to come), or when the kernel has (mincore), which
 * also knows what came by faults, and answers when the page server is gone. Bits are hints: nothing is
 * wrong where one is missing (the kernel is asked), nor where one is stale (a touch of an evicted block
 * is a fault as any other). Stale ones are found by samples: each look asks the kernel about SAMPLES of
 * the rows; if one is not here, the bits are forgotten. So where a share s of the rows was evicted, a
 * look finds it out with probability 1 - (1 - s)^SAMPLES.
 *
 * mincore(2) says "resident" of everything to who may not ask it (another owner of the memfd): then
 * absent rows are faulted in, as they are without all this.
 *
 * Memory: one bit a block, made when the first is set; with none there, nothing is known.
 * Threads: any. No lock: words are atomic; bits that are set while others forget may stay.
 */
#include "client/client.h"

#include <stdlib.h>
#include <sys/mman.h>

#define SAMPLES 4u
#define LOOK_BLOCKS 4096u                   /* that one call of mincore is asked about */
#define MOST_LOOKED_AT (1ull << 24)         /* blocks, 64 GiB: of more none is looked at */

typedef _Atomic uint64_t word;

static uint64_t n_words(const struct pc__mapping *mapping)
{
    return mapping->trapped.length_bytes / PC_BLOCK_BYTES / 64 + 1;
}

/* NULL: there is no memory for it, and nothing is noted. */
static word *words_of(struct pc__mapping *mapping)
{
    word *words = atomic_load_explicit(&mapping->seen, memory_order_acquire);
    if (words)
        return words;
    word *made = calloc(n_words(mapping), sizeof *made);
    /* Pairs with the acquire above: who sees the pointer sees zeros. */
    if (made && !atomic_compare_exchange_strong_explicit(&mapping->seen, &words, made,
                                                         memory_order_acq_rel, memory_order_acquire))
        free(made);
    else
        words = made;
    return words;
}

void pc__seen_add(struct pc__mapping *mapping, uint64_t first_block, uint64_t n_blocks)
{
    word *words = words_of(mapping);
    if (!words)
        return;
    for (uint64_t block = first_block; block < first_block + n_blocks;) {
        const uint64_t bit = block % 64;
        const uint64_t left = first_block + n_blocks - block, n = left < 64 - bit ? left : 64 - bit;
        const uint64_t mask = (n == 64 ? UINT64_MAX : (1ull << n) - 1) << bit;
        if ((atomic_load_explicit(&words[block / 64], memory_order_relaxed) & mask) != mask)
            atomic_fetch_or_explicit(&words[block / 64], mask, memory_order_relaxed);
        block += n;
    }
}

void pc__seen_free(struct pc__mapping *mapping)
{
    free((void *)atomic_load_explicit(&mapping->seen, memory_order_relaxed));
}

static void forget(struct pc__mapping *mapping, word *words)
{
    for (uint64_t i = 0; i < n_words(mapping); i++)
        if (atomic_load_explicit(&words[i], memory_order_relaxed))
            atomic_store_explicit(&words[i], 0, memory_order_relaxed);
}

static bool is_seen(const word *words, uint64_t block)
{
    return atomic_load_explicit(&words[block / 64], memory_order_relaxed) >> (block % 64) & 1u;
}

/* Of row i, counted from the array's start. */
static uint64_t begin_of(const struct pc_rows *rows, int64_t id, uint64_t n_rows)
{
    const uint64_t row = (uint64_t)(id < 0 ? id + (int64_t)n_rows : id);
    return rows->offset_bytes + row * rows->stride_bytes;
}

static bool is_resident(const struct pc__mapping *mapping, uint64_t offset_bytes)
{
    unsigned char here = 0;
    void *at = pc__pointer(mapping->trapped.address +
                           offset_bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES);
    return mincore(at, PC_BLOCK_BYTES, &here) || (here & 1u); /* what cannot be asked is believed */
}

/* 1: none of the rows need come. */
static int are_here(struct pc__mapping *mapping, const struct pc_rows *rows, const int64_t *ids,
                    uint64_t n_ids, uint64_t n_rows)
{
    word *words = words_of(mapping);
    if (!words)
        return 0;
    bool asked = false;
    for (uint64_t i = 0; i < n_ids; i++) {
        const uint64_t begin = begin_of(rows, ids[i], n_rows);
        const uint64_t last = (begin + rows->row_bytes - 1) / PC_BLOCK_BYTES;
        for (uint64_t block = begin / PC_BLOCK_BYTES; block <= last; block++) {
            if (is_seen(words, block))
                continue;
            if (!is_resident(mapping, block * PC_BLOCK_BYTES))
                return 0;
            pc__seen_add(mapping, block, 1);
            asked = true;
        }
    }
    if (asked)
        return 1;
    for (uint64_t i = 0; i < SAMPLES && i < n_ids; i++)
        if (!is_resident(mapping, begin_of(rows, ids[i * n_ids / SAMPLES % n_ids], n_rows))) {
            forget(mapping, words);
            return 0;
        }
    return 1;
}

PC_API int pc_client_rows_here(pc_client *client, uint64_t mapping_id, const struct pc_rows *rows,
                               const int64_t *ids, uint64_t n_ids, uint64_t n_rows)
{
    struct pc__mapping *mapping;
    int rc = pc__use_here(client, mapping_id, &mapping);
    if (rc)
        return rc;
    const uint64_t length = mapping->trapped.length_bytes;
    if (rows->row_bytes == 0 || n_rows == 0 || rows->row_bytes > length ||
        rows->offset_bytes > length - rows->row_bytes ||
        (n_rows - 1) > (length - rows->row_bytes - rows->offset_bytes) /
                           (rows->stride_bytes ? rows->stride_bytes : 1)) {
        rc = pc__fail(PC_ERR_RANGE, "rows that do not lie in the variable");
    } else {
        rc = 1;
        for (uint64_t i = 0; i < n_ids && rc == 1; i++)
            if (ids[i] >= (int64_t)n_rows || ids[i] < -(int64_t)n_rows)
                rc = pc__fail(PC_ERR_RANGE, "an id that is no row");
        if (rc == 1 && mapping->trapped.needs_trap)
            rc = are_here(mapping, rows, ids, n_ids, n_rows);
    }
    pc__unuse(client, mapping);
    return rc;
}

/* Absent blocks of a range; -1: the kernel does not say. */
static int64_t absent_in(uint64_t address, uint64_t n_blocks)
{
    unsigned char here[LOOK_BLOCKS];
    int64_t absent = 0;
    for (uint64_t done = 0; done < n_blocks; done += LOOK_BLOCKS) {
        const uint64_t n = n_blocks - done < LOOK_BLOCKS ? n_blocks - done : LOOK_BLOCKS;
        if (mincore(pc__pointer(address + done * PC_BLOCK_BYTES), n * PC_BLOCK_BYTES, here))
            return -1;
        for (uint64_t i = 0; i < n; i++)
            absent += !(here[i] & 1u);
    }
    return absent;
}

PC_API int64_t pc_client_absent(pc_client *client, uint64_t mapping_id)
{
    struct pc__mapping *mapping;
    int rc = pc__use_here(client, mapping_id, &mapping);
    if (rc)
        return rc;
    const uint64_t n_blocks = mapping->trapped.length_bytes / PC_BLOCK_BYTES;
    int64_t absent = 0;
    if (mapping->trapped.needs_trap && n_blocks > MOST_LOOKED_AT)
        absent = (int64_t)n_blocks;
    else if (mapping->trapped.needs_trap)
        absent = absent_in(mapping->trapped.address, n_blocks);
    pc__unuse(client, mapping);
    return absent < 0 ? (int64_t)n_blocks : absent;
}
