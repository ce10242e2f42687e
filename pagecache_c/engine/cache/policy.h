/* policy.h - which of a cache's entries goes first. Pure: no lock, no clock, no engine.
 *
 * An entry lies in the memory of the cache; a policy links it, and counts its uses. The
 * owner says that an entry came, was used, or left; pc__policy_victim takes out the one to go, and
 * where its owner cannot let go of it now it comes back with pc__policy_back.
 *
 *   FIFO, LRU, LFU (counts up to 63, the least recently used of equals), random
 *   SIEVE    a hand goes from the oldest to the newest and takes the first that was not used since it
 *            last passed; what stays does not move (Zhang et al., SIEVE is Simpler than LRU, NSDI 2024)
 *
 * A use is one that follows the access for which the entry was brought: that says nothing of a
 * second. Only LRU, which goes by the time of the last, heeds the first (again = false).
 */
#ifndef PC_POLICY_H
#define PC_POLICY_H

#include "pagecache.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>

/* What left a cache not long ago: fingerprints in sets of four, the oldest of a set is evicted. Fixed
 * size, 16 bytes for each of n_slots. */
struct pc__ghost_slot {
    uint64_t key;
    uint32_t stamp;
    uint32_t mask; /* 0: empty */
};
struct pc__ghost {
    struct pc__ghost_slot *slots;
    size_t n_slots; /* a power of two */
    uint32_t clock; /* what was put in, by weight */
};
int pc__ghost_open(struct pc__ghost *ghost, size_t n_slots);
void pc__ghost_close(struct pc__ghost *ghost);
void pc__ghost_put(struct pc__ghost *ghost, uint64_t key, uint32_t mask, uint32_t weight);
/* Takes the bits of mask out, where the key was put in less than max_age ago by weight; returns those
 * that were there. */
uint32_t pc__ghost_take(struct pc__ghost *ghost, uint64_t key, uint32_t mask, uint32_t max_age);

struct pc__policy_entry {
    struct pc__policy_entry *next, *prev; /* next: older */
    uint64_t key;     /* of what it stands for: well mixed, the same when it comes again */
    uint32_t place;   /* random: in the array */
    uint8_t count;    /* uses, up to the policy's most */
    uint8_t queue;    /* 1 + the list it is in; 0: in none */
};

#define PC__POLICY_LISTS 64u

struct pc__policy_list {
    struct pc__policy_entry head;  /* next: the newest; prev: the oldest */
    size_t n;
};

struct pc__policy {
    int kind;                      /* enum pc_policy */
    size_t n;                      /* entries that may be chosen */
    struct pc__policy_list lists[PC__POLICY_LISTS];
    uint64_t not_empty;            /* LFU: bit i: list i has entries */
    struct pc__policy_entry *hand; /* SIEVE: looked at next; NULL: the oldest */
    struct pc__policy_entry **all; /* random */
    size_t capacity;
    uint64_t random;               /* state of it, never 0 */
};

int pc__policy_open(struct pc__policy *policy, int kind);
void pc__policy_close(struct pc__policy *policy);
const char *pc__policy_name(int kind); /* NULL: there is none of that number */

/* False: no memory (random only), and the entry is in no list. */
bool pc__policy_inserted(struct pc__policy *policy, struct pc__policy_entry *entry);
void pc__policy_used(struct pc__policy *policy, struct pc__policy_entry *entry, bool again);
/* It left by itself. Nothing where it is in no list. */
void pc__policy_removed(struct pc__policy *policy, struct pc__policy_entry *entry);
/* Takes out the one to go, or NULL. */
struct pc__policy_entry *pc__policy_victim(struct pc__policy *policy);
/* Takes out this one, as if it were the victim. */
void pc__policy_take(struct pc__policy *policy, struct pc__policy_entry *entry);
/* Victims that were taken out to see those behind them, in the order in which they were: each is the
 * newest again of where it was (SIEVE: the hand has passed it). */
bool pc__policy_restore(struct pc__policy *policy, struct pc__policy_entry *entry);
/* The victim could not go, or not as a whole: it is in use. As restore, but it does not stand
 * before all others again: LFU has it among those with the next count. */
bool pc__policy_back(struct pc__policy *policy, struct pc__policy_entry *entry);

#endif
