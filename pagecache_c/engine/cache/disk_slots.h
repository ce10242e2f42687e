/* disk_slots.h - which blocks the slots of the cache's file have. Pure: no I/O, and its caller locks. */
#ifndef PC_DISK_SLOTS_H
#define PC_DISK_SLOTS_H

#include "engine/cache/cache.h"

#define PC__NO_SLOT UINT32_MAX

/* What a slot has is named by a generation, which is compared and never looked into, and a chunk of it. */
struct pc__disk_slots {
    struct pc__disk_slot *slots;
    uint32_t n_slots, n_buckets, next;
    uint32_t *buckets;
    uint64_t n_blocks; /* that slots have */
};

int pc__disk_slots_open(struct pc__disk_slots *slots, uint32_t n_slots);
void pc__disk_slots_close(struct pc__disk_slots *slots);
uint32_t pc__disk_slots_find(const struct pc__disk_slots *slots, const struct pc__generation *generation,
                             uint64_t chunk); /* or PC__NO_SLOT */
/* Those of a chunk's blocks that are to be written, *blocks, and where: a slot that has others of them, or else
 * the next of the ring, in the place of what it had. PC__NO_SLOT: none are, or some of that chunk are being
 * written. At most half of the slots may be written at once. */
uint32_t pc__disk_slots_begin(struct pc__disk_slots *slots, struct pc__generation *generation, uint64_t chunk,
                              uint32_t *blocks);
/* They are written, or not. How many it has now of them: some may have changed meanwhile. */
unsigned pc__disk_slots_end(struct pc__disk_slots *slots, uint32_t index, bool is_written);
/* Those of [first, first + n) change. */
void pc__disk_slots_remove(struct pc__disk_slots *slots, struct pc__generation *generation, uint64_t first,
                           uint64_t n);
/* Drops up to most of the generation's slots. True: there are more. */
bool pc__disk_slots_forget(struct pc__disk_slots *slots, struct pc__generation *generation, unsigned most);
/* Blocks from that one on that the slot has; 0: it has not got it, or there is no slot. */
unsigned pc__disk_slots_from(const struct pc__disk_slots *slots, uint32_t index, uint64_t block);
/* Another number with each content of the slot. */
uint64_t pc__disk_slots_sequence(const struct pc__disk_slots *slots, uint32_t index);
/* How many bits of a chunk's are alike, from that one on. */
unsigned pc__disk_slots_alike(uint32_t bits, unsigned from);
const char *pc__disk_slots_audit(const struct pc__disk_slots *slots);

#endif
