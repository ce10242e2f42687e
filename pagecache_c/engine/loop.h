/* loop.h - one thread and one epoll: begins, hands each event to whoever owns the descriptor, and ends. */
#ifndef PC_LOOP_H
#define PC_LOOP_H

#include "engine/core/core.h"

int pc__loop_start(struct pc_engine *engine, struct pc__loop *loop, int index);
void pc__loop_join(struct pc__loop *loop); /* its thread ends; mail is taken, and not read */
void pc__loop_stop(struct pc__loop *loop); /* what is left of it */

#endif
