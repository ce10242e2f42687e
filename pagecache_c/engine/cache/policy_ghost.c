/* policy_ghost.c - what left a cache not long ago; see policy.h. */
#include "common/error.h"
#include "engine/cache/policy.h"

#include <stdlib.h>

#define WAYS 4u

int pc__ghost_open(struct pc__ghost *ghost, size_t n_slots)
{
    size_t n = WAYS;
    while (n < n_slots)
        n *= 2;
    *ghost = (struct pc__ghost){.slots = calloc(n, sizeof *ghost->slots), .n_slots = n};
    return ghost->slots ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "%zu fingerprints", n);
}

void pc__ghost_close(struct pc__ghost *ghost)
{
    free(ghost->slots);
    ghost->slots = NULL;
}

static struct pc__ghost_slot *set_of(const struct pc__ghost *ghost, uint64_t key)
{
    return &ghost->slots[(key >> 20) & (ghost->n_slots - WAYS)];
}

void pc__ghost_put(struct pc__ghost *ghost, uint64_t key, uint32_t mask, uint32_t weight)
{
    struct pc__ghost_slot *set = set_of(ghost, key), *to = NULL;
    ghost->clock += weight;
    for (unsigned i = 0; i < WAYS; i++) {
        struct pc__ghost_slot *slot = &set[i];
        if (slot->mask && slot->key == key) {
            slot->mask |= mask;
            slot->stamp = ghost->clock;
            return;
        }
        /* Ages are differences, so that the clock may go round. */
        if (!to || (to->mask && (!slot->mask || ghost->clock - slot->stamp >
                                                    ghost->clock - to->stamp)))
            to = slot;
    }
    *to = (struct pc__ghost_slot){.key = key, .stamp = ghost->clock, .mask = mask};
}

uint32_t pc__ghost_take(struct pc__ghost *ghost, uint64_t key, uint32_t mask, uint32_t max_age)
{
    struct pc__ghost_slot *set = set_of(ghost, key);
    for (unsigned i = 0; i < WAYS; i++) {
        struct pc__ghost_slot *slot = &set[i];
        if (!slot->mask || slot->key != key)
            continue;
        uint32_t found = ghost->clock - slot->stamp < max_age ? slot->mask & mask : 0;
        slot->mask &= ~mask;
        return found;
    }
    return 0;
}
