/* retained.h - layers that this node keeps for the case that their home is lost. See retained.c. */
#ifndef PC_RETAINED_H
#define PC_RETAINED_H

#include "engine/core/records.h"

/* retained.c: layers of this node's commits whose homes are elsewhere. */
#define PC__RETAINED_BYTES (256ull << 20) /* at most; a quarter of the cache's budget, where that is less */
/* Of them only those count that the region's homes have acknowledged (pc_engine_settled); others stay.
 * Takes over the caller's reference to what was staged, and the keeper's. publish_lock is held. */
void pc__retained_add(struct pc_engine *engine, struct pc__layer *layer, uint64_t version);
/* Asks what the homes have acknowledged, where that is due: engine.ask_settled_at_ns. engine.lock is held. */
void pc__retained_ask(struct pc_engine *engine, uint64_t now_ns);
void pc__retained_forget(struct pc_engine *engine, uint64_t region);
/* What the version's commit wrote: +1 ref, or NULL. */
struct pc__layer *pc__retained_at(struct pc_engine *engine, uint64_t region, uint64_t version);
/* Returns how many there are, which may exceed capacity. */
size_t pc__retained_versions(struct pc_engine *engine, uint64_t region, uint64_t *versions,
                             size_t capacity);
void pc__retained_close(struct pc_engine *engine);

#endif
