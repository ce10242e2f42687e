/* reply.h - an answer to another server, from when it is put together until its last byte has left.
 * See reply.c. */
#ifndef PC_REPLY_H
#define PC_REPLY_H

#include "engine/serve/directory.h"
#include "engine/core/records.h"

/* What was asked. */
struct pc__request {
    struct pc__data_header header;
    struct pc__data_asker asker;
    uint16_t number;               /* of the asker, as a holder of blocks; or 0 */
    bool waited;                   /* long enough for what is on its way to a cache */
    int n_runs;
    struct pc_run runs[PC__DATA_MAX_RUNS];
};

struct pc__piece {
    const uint8_t *bytes; /* NULL: sendfile from memfd */
    uint64_t offset, length;
    int memfd;
};

struct pc__reply {
    struct pc__reply *next;
    struct pc__region *region; /* or NULL */
    bool holds;                /* the region's home, in the epoch `held` */
    unsigned held;
    struct pc__layer *layer;   /* or NULL */
    uint8_t *head;             /* the first piece */
    uint8_t *composed;         /* blocks put together from several sources, or copied; or NULL */
    struct pc__loop *row_loop; /* composed is for rows, and goes back to this loop; or NULL */
    uint64_t n_bytes;          /* still to leave */
    size_t n_pieces, at_piece, capacity;
    struct pc__piece *pieces;
};

struct pc__reply *pc__reply_new(void); /* or NULL */
void pc__reply_free(struct pc_engine *engine, struct pc__reply *reply);
int pc__reply_add(struct pc__reply *reply, const uint8_t *bytes, int memfd, uint64_t offset,
                  uint64_t length);
/* Fills in the reply to a GET, from a home, a cache or a layer; the reply has its region or layer.
 * PC__WAIT: the home has not heard of the version yet, or what is asked of a cache is on its way there.
 * Negative: it is to be refused. */
int pc__reply_fill(struct pc__loop *loop, struct pc__reply *reply,
                   const struct pc__request *request);
/* Only a head: this one; or one that says so. */
int pc__reply_head(struct pc__reply *reply, const struct pc__data_header *header);
int pc__reply_refuse(struct pc__reply *reply, const struct pc__data_header *request, int status);
/* Rows, that are in `composed`; or, where status is negative, a head that says so. */
int pc__reply_rows(struct pc__reply *reply, const struct pc__data_header *request,
                   const struct pc__data_rows *rows, int status);
/* Room for an answer: memory that was used before costs no page faults. free: of all that is kept. */
uint8_t *pc__rows_take_buffer(struct pc__loop *loop);
void pc__rows_give_buffer(struct pc__loop *loop, uint8_t *buffer);
void pc__rows_free_buffers(struct pc__loop *loop);

#endif
