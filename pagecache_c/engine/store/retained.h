/* retained.h - what the engine has for the case that a home is lost, or not reached: retained.c,
 * unreached.c.
 */
#ifndef PC_RETAINED_H
#define PC_RETAINED_H

#include "engine/engine.h"

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

/* fetch.c: a peer's lanes that have no connection are asked for again, where something waits for one. */
void pc__peer_ask_again(struct pc__peer *peer);

/* unreached.c */
void pc__unreached_forget(struct pc_engine *engine, uint64_t server_id);
/* It is lost: not reached any more, for good. */
void pc__unreached_lost(struct pc_engine *engine, uint64_t server_id);
/* Why there is nothing from that server, for people. */
void pc__unreached_say(struct pc_engine *engine, uint64_t server_id, int error, char *text,
                       size_t text_bytes);

#endif
