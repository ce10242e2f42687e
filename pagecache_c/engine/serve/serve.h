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
/* Tells the servers that ask this one, on one connection each: region a is freed; b: the question's id. */
void pc__served_retire(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__served_deadline(struct pc__loop *loop);
void pc__served_tick(struct pc__loop *loop, uint64_t now_ns);
void pc__served_close_all(struct pc__loop *loop);

/* warm.c: the blocks of a request are read, so that they are in the page cache. NULL: they are not. */
struct pc__warm;
struct pc__request;
struct pc__warm *pc__warm_begin(struct pc__loop *loop, struct pc__region *region,
                                const struct pc__request *request);
bool pc__warm_is_done(const struct pc__warm *warm);
void pc__warm_put(struct pc__warm *warm); /* nobody waits for it; or NULL */
void pc__served_look_aside(struct pc__loop *loop, struct pc__mail *mail); /* some is done */

/* retire.c: a region is freed. tells: whether the server is one that is to be told, and was not yet.
 * looked: one loop more has looked for connections to those. take: what a home says to us; the answer
 * is a header, and its bytes are returned. */
void pc__session_retire(struct pc__session *session, const struct pc__ctl_message *message);
bool pc__retire_tells(struct pc_engine *engine, uint32_t id, uint64_t server_id);
void pc__retire_looked(struct pc_engine *engine, uint32_t id);
void pc__retired(struct pc_engine *engine, uint64_t server_id, uint32_t id, int status);
size_t pc__retire_take(struct pc__peer *peer, const struct pc__data_header *header, uint8_t *answer);
void pc__retiring_open(struct pc_engine *engine);
void pc__retiring_close(struct pc_engine *engine);

/* directory.c: which other servers have blocks of a home. */
#define PC__CHOICE_BLOCKS 64u /* that one choice is made for: neighbours come from one server */
#define PC__HOLDER_MEMORY_NS 3000000000ull

/* A server's number, for the records; 0: there is no memory for one more. */
uint16_t pc__holder_number(struct pc_engine *engine, uint64_t server_id);
/* It said how much it has to send to others. */
void pc__holder_reports(struct pc_engine *engine, uint16_t number, uint64_t load_bytes);
/* A server that was sent to it has got what it came for, or has given up. */
void pc__holder_relieved(struct pc_engine *engine, uint64_t server_id, uint64_t n_bytes);

/* Below: under region.lock; the region has a home here. */
void pc__directory_free(struct pc__directory *directory);
/* The server has the blocks, as they are in this version; or they are coming to it from another. */
void pc__directory_add(struct pc_engine *engine, struct pc__region *region, uint16_t number,
                       uint32_t version, uint64_t first, uint64_t n, bool coming);
void pc__directory_remove(struct pc__region *region, uint16_t number, uint64_t first, uint64_t n);
/* A commit changed them; `version` is its. */
void pc__directory_changed(struct pc__region *region, uint32_t version, uint64_t first, uint64_t n);

struct pc__elsewhere {
    uint64_t server_id;            /* 0: the home answers */
    uint64_t n_blocks;             /* for so many */
    uint32_t from_version, to_version; /* in all of which they are the same */
};
/* Where the asker is to get [block, block + n), or the first of these, as in this version.
 * home_bytes: that the home has to send. */
struct pc__elsewhere pc__directory_choose(struct pc_engine *engine, struct pc__region *region,
                                          uint16_t asker, uint32_t version, uint64_t block,
                                          uint64_t n, uint64_t home_bytes);

/* reply.c: an answer to another server, from when it is put together until its last byte has left. */
/* What was asked. */
struct pc__request {
    struct pc__data_header header;
    struct pc__data_asker asker;
    uint16_t number;               /* of the asker, as a holder of blocks; or 0 */
    bool waited;                   /* long enough for what is on its way to a cache, or for the disk */
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
    struct pc__home *home;     /* which it holds, in the epoch `held`; or NULL */
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
 * PC__COLD: a disk has it, and who asks has not waited for it yet. Negative: it is to be refused. */
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
