/* serve.h - other servers that ask this one: their connections, and what they are answered. */
#ifndef PC_SERVE_H
#define PC_SERVE_H

#include "engine/core/core.h"

struct pc__peer;

/* serve.c */
void pc__served_add(struct pc__loop *loop, struct pc__mail *mail);
void pc__served_event(struct pc__loop *loop, void *served, uint32_t events);
/* A version that requests waited for may be there. */
void pc__served_unpark(struct pc__loop *loop, struct pc__mail *mail);
/* Tells those who ask us, on one connection each: region a is freed, says question b. */
void pc__served_retire(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__served_deadline(struct pc__loop *loop);
void pc__served_check(struct pc__loop *loop, uint64_t now_ns);
void pc__served_close_all(struct pc__loop *loop);

/* retire.c: a region is freed. tells: whether the server is one that is to be told, and was not yet.
 * looked: one loop more has looked for connections to those. take: what a home says to us; the answer
 * is a header, and its bytes are returned. */
void pc__session_retire(struct pc__session *client, const struct pc__ctl_message *message);
bool pc__retire_tells(struct pc_engine *engine, uint32_t id, uint64_t server_id);
void pc__retire_looked(struct pc_engine *engine, uint32_t id);
void pc__retired(struct pc_engine *engine, uint64_t server_id, uint32_t id, int status);
size_t pc__retire_take(struct pc__peer *peer, const struct pc__data_header *header, uint8_t *answer);
void pc__retiring_open(struct pc_engine *engine);
void pc__retiring_close(struct pc_engine *engine);

#endif
