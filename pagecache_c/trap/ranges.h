/* ranges.h - which address belongs to which mapping, for a signal handler.
 *
 * Process-wide, because a SIGSEGV handler is. Readers are lock-free and async-signal-safe: a
 * sorted array behind an atomic pointer. Writers serialise on a lock of their own (the innermost
 * of the client's locks), append in place where the address is the highest so far, and publish a
 * new array otherwise; the old one is freed once no reader is inside.
 *
 * Invariants: entries are sorted by begin and do not overlap; an entry's addresses never change
 * once published. What lies there may be replaced by something of the same addresses while the
 * entry is GONE or a GUARD: kind is written last and read first, so a TRAPPED entry's sig is its
 * own; a reader that raced may name the former region in a message, never use its trap.
 */
#ifndef PC_RANGES_H
#define PC_RANGES_H

#include "common/atomics.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pc__sig;

enum pc__range_kind {
    PC__RANGE_GONE,    /* was unmapped */
    PC__RANGE_RESERVED,/* addresses of ours without access: nothing is there yet, or any more */
    PC__RANGE_PLAIN,   /* no SIGSEGV of ours: userfaultfd, or nothing can be absent */
    PC__RANGE_TRAPPED, /* PROT_NONE until the SIGSEGV trap opens a part */
    PC__RANGE_GUARD,   /* cannot be had in this process; `why` says why */
    PC__RANGE_KEPT     /* what was built here; its client was closed */
};

struct pc__range {
    uint64_t begin, end;
    _Atomic uint64_t region, version;
    _Atomic(struct pc__sig *) sig; /* TRAPPED */
    _Atomic uint32_t flags; /* enum pc_map_flags */
    _Atomic uint32_t kind;  /* enum pc__range_kind */
    _Atomic int32_t why;    /* GUARD: enum pc_err */
};

struct pc__range_table {
    _Atomic size_t n; /* published after at[n - 1] is filled */
    size_t capacity;
    struct pc__range_table *next_retired;
    struct pc__range at[];
};

extern _Atomic(struct pc__range_table *) pc__range_current;
extern _Atomic uint32_t pc__range_readers;

/* What a reader takes away: a copy, for the table may go. */
struct pc__range_view {
    uint64_t begin, end, region, version;
    struct pc__sig *sig;
    uint32_t flags, kind;
    int32_t why;
};

static inline void pc__range_copy(struct pc__range *range, struct pc__range_view *out)
{
    out->begin = range->begin;
    out->end = range->end;
    out->kind = pc__observe(&range->kind); /* carries the rest */
    out->region = pc__observe(&range->region);
    out->version = pc__observe(&range->version);
    out->sig = pc__observe(&range->sig);
    out->flags = pc__observe(&range->flags);
    out->why = pc__observe(&range->why);
}

/* The readers' count and the table pointer are sequentially consistent: a writer that swaps the
 * pointer and then reads a count of 0 knows that every later reader sees the new table. */
static inline bool pc__range_find(uint64_t address, struct pc__range_view *out)
{
    atomic_fetch_add(&pc__range_readers, 1u);
    struct pc__range_table *table = atomic_load(&pc__range_current);
    size_t low = 0, high = table ? pc__observe(&table->n) : 0; /* pairs with the append */
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->at[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low > 0 && address < table->at[low - 1].end;
    if (found)
        pc__range_copy(&table->at[low - 1], out);
    atomic_fetch_sub(&pc__range_readers, 1u);
    return found;
}

/* 0 or PC_ERR_NO_MEMORY. A GONE entry in the way is dropped. */
int pc__range_add(const struct pc__range_view *range);
/* Takes the addresses, and adds them as RESERVED, in one: who finds them taken also finds by whom.
 * PC_ERR_EXISTS: something is mapped there. */
int pc__range_reserve(uint64_t begin, uint64_t end, uint64_t region, uint64_t version);
/* What of ours is there, in any part of the addresses; false: nothing is. */
bool pc__range_overlaps(uint64_t begin, uint64_t end, struct pc__range_view *out);
/* Unmaps, and the entry that begins there, if there is one, is GONE, in one. why: enum pc_err. */
void pc__range_unmap(uint64_t begin, uint64_t length_bytes, int why);
/* Changes the kind of the entry that begins at address, if there is one. */
void pc__range_set(uint64_t begin, enum pc__range_kind kind, int why);

/* Around fork: the lock is held across it, and the child has no readers. */
void pc__range_before_fork(void);
void pc__range_after_fork(bool in_child);

#endif
