/* policy.c - see policy.h. */
#include "engine/cache/policy.h"

#include "common/error.h"

#include <stdlib.h>
#include <string.h>

#define LFU_MOST 63u

static_assert(LFU_MOST < PC__POLICY_LISTS, "a list for each count of LFU; the others have list 0");

const char *pc__policy_name(int kind)
{
    static const char *const names[] = {
        [PC_POLICY_SIEVE] = "sieve", [PC_POLICY_FIFO] = "fifo", [PC_POLICY_LRU] = "lru",
        [PC_POLICY_LFU] = "lfu", [PC_POLICY_RANDOM] = "random"};
    return kind >= 0 && (size_t)kind < sizeof names / sizeof names[0] ? names[kind] : NULL;
}

int pc__policy_open(struct pc__policy *policy, int kind)
{
    memset(policy, 0, sizeof *policy);
    if (!pc__policy_name(kind))
        return pc__fail(PC_ERR_RANGE, "%d is no replacement policy", kind);
    policy->kind = kind;
    policy->random = 0x9e3779b97f4a7c15ull;
    for (size_t i = 0; i < PC__POLICY_LISTS; i++) {
        struct pc__policy_entry *head = &policy->lists[i].head;
        head->next = head->prev = head;
    }
    return PC_OK;
}

void pc__policy_close(struct pc__policy *policy)
{
    free(policy->all);
    policy->all = NULL;
}

/* ------------------------------------------------------------------- lists */

static void push(struct pc__policy *policy, unsigned list, struct pc__policy_entry *entry)
{
    struct pc__policy_entry *head = &policy->lists[list].head;
    entry->prev = head;
    entry->next = head->next;
    head->next->prev = entry;
    head->next = entry;
    entry->queue = (uint8_t)(list + 1);
    policy->lists[list].n++;
    policy->not_empty |= 1ull << list;
    policy->n++;
}

static void take_out(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    unsigned list = entry->queue - 1u;
    if (policy->hand == entry)
        policy->hand = entry->prev;
    entry->prev->next = entry->next;
    entry->next->prev = entry->prev;
    entry->queue = 0;
    if (!--policy->lists[list].n)
        policy->not_empty &= ~(1ull << list);
    policy->n--;
}

static struct pc__policy_entry *oldest(struct pc__policy *policy, unsigned list)
{
    return policy->lists[list].n ? policy->lists[list].head.prev : NULL;
}

static void move_to_front(struct pc__policy *policy, unsigned list, struct pc__policy_entry *entry)
{
    take_out(policy, entry);
    push(policy, list, entry);
}

/* ------------------------------------------------------------------ random */

static bool random_insert(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    if (policy->n == policy->capacity) {
        size_t capacity = policy->capacity ? policy->capacity * 2 : 256;
        struct pc__policy_entry **grown = realloc(policy->all, capacity * sizeof *grown);
        if (!grown)
            return false;
        policy->all = grown;
        policy->capacity = capacity;
    }
    entry->place = (uint32_t)policy->n;
    entry->queue = 1;
    policy->all[policy->n++] = entry;
    return true;
}

static void random_take_out(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    struct pc__policy_entry *last = policy->all[--policy->n];
    policy->all[entry->place] = last;
    last->place = entry->place;
    entry->queue = 0;
}

static uint64_t next_random(struct pc__policy *policy)
{
    uint64_t x = policy->random; /* xorshift64* (Vigna 2016) */
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    policy->random = x;
    return x * 0x2545f4914f6cdd1dull;
}

/* ----------------------------------------------------------------- victims */

static struct pc__policy_entry *sieve_victim(struct pc__policy *policy)
{
    struct pc__policy_entry *head = &policy->lists[0].head;
    struct pc__policy_entry *at = policy->hand && policy->hand != head ? policy->hand : head->prev;
    while (at != head && at->count) {
        at->count = 0;
        at = at->prev != head ? at->prev : head->prev;
    }
    policy->hand = at; /* take_out moves it on, towards the newest */
    return at != head ? at : NULL;
}

struct pc__policy_entry *pc__policy_victim(struct pc__policy *policy)
{
    struct pc__policy_entry *entry = NULL;
    if (!policy->n)
        return NULL;
    switch ((enum pc_policy)policy->kind) {
    case PC_POLICY_SIEVE:
        entry = sieve_victim(policy);
        break;
    case PC_POLICY_FIFO:
    case PC_POLICY_LRU:
        entry = oldest(policy, 0);
        break;
    case PC_POLICY_LFU:
        entry = oldest(policy, (unsigned)__builtin_ctzll(policy->not_empty));
        break;
    case PC_POLICY_RANDOM:
        entry = policy->all[(uint64_t)((__uint128_t)next_random(policy) * policy->n >> 64)];
        break;
    }
    if (entry)
        pc__policy_take(policy, entry);
    return entry;
}

void pc__policy_take(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    unsigned list = entry->queue - 1u;
    pc__policy_removed(policy, entry);
    entry->place = list; /* for back */
}

/* ------------------------------------------------------------------ events */

bool pc__policy_inserted(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    entry->count = 0;
    if (policy->kind == PC_POLICY_RANDOM)
        return random_insert(policy, entry);
    push(policy, 0, entry);
    return true;
}

void pc__policy_used(struct pc__policy *policy, struct pc__policy_entry *entry, bool again)
{
    if (!entry->queue)
        return;
    switch ((enum pc_policy)policy->kind) {
    case PC_POLICY_LRU:
        move_to_front(policy, 0, entry);
        break;
    case PC_POLICY_LFU:
        if (again) {
            entry->count = (uint8_t)(entry->count + (entry->count < LFU_MOST));
            move_to_front(policy, entry->count, entry);
        }
        break;
    case PC_POLICY_SIEVE:
        entry->count |= again;
        break;
    case PC_POLICY_FIFO:
    case PC_POLICY_RANDOM:
        break;
    }
}

void pc__policy_removed(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    if (!entry->queue)
        return;
    if (policy->kind == PC_POLICY_RANDOM)
        random_take_out(policy, entry);
    else
        take_out(policy, entry);
}

/* SIEVE: where it was, behind the hand: in front of it the hand would find it again and again. */
static void back_behind_hand(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    struct pc__policy_entry *at = policy->hand;
    push(policy, 0, entry);
    if (!at || at == &policy->lists[0].head) /* it was the newest */
        return;
    entry->prev->next = entry->next;
    entry->next->prev = entry->prev;
    entry->prev = at;
    entry->next = at->next;
    at->next->prev = entry;
    at->next = entry;
}

bool pc__policy_restore(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    if (policy->kind == PC_POLICY_RANDOM)
        return random_insert(policy, entry);
    if (policy->kind == PC_POLICY_SIEVE)
        back_behind_hand(policy, entry);
    else
        push(policy, entry->place, entry);
    return true;
}

bool pc__policy_back(struct pc__policy *policy, struct pc__policy_entry *entry)
{
    /* A count whose entries all have to stay would hide the others. */
    uint64_t above = 0;
    if (policy->kind == PC_POLICY_LFU && entry->place < LFU_MOST)
        above = policy->not_empty & (~0ull << (entry->place + 1));
    if (above)
        entry->place = entry->count = (uint8_t)__builtin_ctzll(above);
    return pc__policy_restore(policy, entry);
}
