/* redirect.h - fetches that a home has sent to others. See redirect.c. */
#ifndef PC_REDIRECT_H
#define PC_REDIRECT_H

#include "engine/core/records.h"

#define PC__REDIRECT_PATIENCE_NS 3000000000ull /* with a server that is not the home */

/* The first of a lane's sent fetches: the blocks of the bitmap do not come with its answer. From a
 * home, sources has a pc__data_elsewhere for each; from a peer, the home is asked for them. *fetch is
 * replaced, in its list, by one of the n_left others. Negative: nothing has changed. */
int pc__redirect(struct pc__loop *loop, struct pc__fetch **fetch, const uint64_t *bits,
                 const uint8_t *sources, uint32_t n_left);
/* One that asks a peer (home_id is set), and is in no list: its home is to answer. */
void pc__redirect_failed(struct pc__loop *loop, struct pc__fetch *fetch);
/* What tells the home that all of it has come. Returns its length, at most PC__HELD_BYTES. */
#define PC__HELD_BYTES                                                     \
    (sizeof(struct pc__data_header) + sizeof(struct pc__data_asker) +      \
     PC__DATA_MAX_RUNS * sizeof(uint64_t))
size_t pc__redirect_held(const struct pc_engine *engine, const struct pc__fetch *fetch, uint8_t *out);

/* fetch.c: to the lane of its server. */
void pc__fetch_queue(struct pc__loop *loop, struct pc__fetch *fetch);

/* answer.c: PC_OK, or why what a peer says is no answer to this fetch. */
int pc__answer_fits(const struct pc__data_header *header, const struct pc__fetch *fetch);

#endif
