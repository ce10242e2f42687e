/* loop.h - the engine as a whole: its loops, and what must hold of all its parts. */
#ifndef PC_LOOP_H
#define PC_LOOP_H

#include "engine/core/core.h"

/* loop.c: one thread and one epoll, which hands each event to its descriptor's owner. */
int pc__loop_start(struct pc_engine *engine, struct pc__loop *loop, int index);
void pc__loop_join(struct pc__loop *loop); /* its thread ends; mail is taken, and not read */
void pc__loop_stop(struct pc__loop *loop); /* what is left of it */

/* stats.c: the first that an audit of a region, the cache, the history or the leases finds; NULL: all is well.
 * Any thread, under no lock. */
const char *pc__engine_audit(struct pc_engine *engine);

#endif
