/* miss.h - absent blocks: faults, requests for them to other servers, and what comes. */
#ifndef PC_MISS_H
#define PC_MISS_H

#include "engine/core/core.h"
#include "engine/readahead/readahead.h"

struct pc__disk_times;

/* A fetch of blocks that go to who asked for them, and into no generation. Called on its loop. */
struct pc__sink {
    /* The next n blocks; bytes NULL: zeros. */
    void (*took)(struct pc__sink *sink, uint64_t n, const uint8_t *bytes);
    void (*ended)(struct pc__sink *sink, int error); /* PC_OK: all have come */
};

/* Blocks that were marked in flight and that one server was, or will be, asked for. */
struct pc__fetch {
    struct pc__link link;
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref; its version stays while blocks are in flight */
    struct pc__generation *source; /* +1 ref, and counted among its forks; or NULL */
    uint64_t server_id;            /* this server's own: from its home; 0: from the source; or PC__FROM_DISK */
    uint64_t home_id;              /* not 0: a peer is asked, to which this home sent us */
    uint64_t missed_id;            /* not 0: this peer was, and did not have them: the home must */
    uint32_t from_version, to_version; /* of a peer: the blocks are the same in all of these */
    struct pc__gather *gather;     /* rows are asked for, not blocks (gather.c); or NULL */
    uint64_t give_up_ns;           /* 0: it has not been its turn yet */
    uint64_t sent_ns;              /* its request, the last time */
    bool was_alone;                /* nothing to wait behind then */
    uint32_t sent_blocks;          /* that it asked for; 0: it was not sent yet */
    bool resent;                   /* its answer says nothing of how long one takes */
    uint64_t hedge_ns;             /* of a peer: then its home is asked too; 0: it is, or need not be */
    struct pc__fetch *twin;        /* the same blocks, of another server: the first answer is used */
    bool unwanted;                 /* its twin was first: nobody waits for what it brings */
    uint64_t final_ns;             /* of a peer: give_up_ns of the home, once that is asked again */
    uint64_t again_ns;             /* its home did not know the region: when it is asked again */
    uint32_t request_id;
    uint32_t n_blocks;             /* still to come: of runs[at_run] on */
    uint32_t n_runs, capacity_runs;
    uint32_t at_run;               /* the runs before it are dealt with */
    int error;                     /* what comes is thrown away, */
    bool is_filled;                /* as it is where its blocks came from elsewhere meanwhile */
    bool on_wire;                  /* in sent */
    struct pc__repair *repair;     /* may bring its blocks from elsewhere (repair.c); or NULL */
    struct pc__sink *sink;         /* its region and generation are names alone; or NULL */
    bool urgent;                   /* a thread is stopped: not behind the bulk */
    bool prefetch;
    struct pc_run runs[];          /* [at_run] shrinks from its front as blocks come. Of a peer: as
                                      they were at first, from capacity_runs on */
};

#define PC__URGENT_REQUESTS 16 /* on the wire at once; the rest waits in the lane's queue */
#define PC__REQUEST_BLOCKS 64u  /* at once: the home decides for each request which server answers */
#define PC__BULK_REQUESTS 32   /* enough for the wire, little to wait behind */
#define PC__RX_BYTES (1u << 20)

/* One connection to a peer, on which we ask. */
struct pc__lane {
    int fd;                        /* -1: none */
    bool asked;                    /* NEED_PEER is out */
    int low_water;                 /* SO_RCVLOWAT, as it stands */
    struct pc__watch *watch;
    struct pc__link queued;        /* fetches not sent yet */
    struct pc__link sent;          /* fetches on the wire, oldest first */
    uint32_t n_sent;
    uint32_t layer_requests;       /* so many may be on the wire when one of a layer is sent */
    uint64_t progress_ns;          /* when bytes last came, or the first of sent was sent */
    uint64_t hedge_ns;             /* not later than that of any of sent; 0: none has one */
    uint8_t *tx;                   /* request bytes that the socket did not take yet */
    size_t tx_bytes, tx_capacity;
    bool waits_for_room;           /* epoll says when the socket takes more of it */
    uint8_t *rx;                   /* PC__RX_BYTES */
    size_t rx_begin, rx_end;
    bool in_rows;                  /* the head of rows is read: sent's first is of rows, and */
    uint32_t rows_due;             /* so many bytes of them are still to come */
    bool in_reply;                 /* header and bitmap of sent's first are read */
    uint32_t reply_position;       /* blocks of the reply dealt with */
    uint32_t reply_blocks;
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64];
    uint64_t elsewhere[PC__DATA_MAX_BLOCKS / 64];
};

/* What fetches from a peer have taken, lately: means, weighted by age (choose.c). */
struct pc__trips {
    uint64_t n;
    double blocks, blocks_squared, ns, ns_blocks, best_ns;
    unsigned known_blocks; /* a round trip costs as much as so many, when that was last known; or 0 */
};

/* How long answers take, as TCP estimates it (RFC 6298; choose.c). All 0: nothing is known. */
struct pc__rtt {
    uint64_t srtt_ns, rttvar_ns;
    unsigned doubled;              /* so often, since the last sample */
};
#define PC__RTT_CLASSES 4 /* requests of 1 block, up to 4, up to 16, and of more */

struct pc__peer {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t server_id;
    struct pc__trips trips;
    struct pc__rtt rtt[PC__RTT_CLASSES];
    uint64_t avoid_until_ns;       /* it was late: until then, or its next byte, homes are asked */
    struct pc__lane lanes[PC__LANES_PER_LOOP];
    struct pc__link unsure;        /* fetches whose region it did not know: NEED_HOME is asked (rehome.c) */
};

/* fill.c: blocks become present, or are known not to come; waiters are told. */
int pc__fill_insert(struct pc_engine *engine, struct pc__region *region,
                    struct pc__generation *generation, uint64_t first, uint64_t n,
                    const uint8_t *bytes, bool fetched);
int pc__fill_zeros(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t first, uint64_t n);
void pc__fill_failed(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *generation, uint64_t first, uint64_t n,
                     uint64_t server_id, int error);
void pc__fill_answer_slot(const struct pc__generation *generation, const struct pc__waiter *waiter,
                          int status);
/* fault.c: it waits no more, whatever it was told; it is freed. region.lock. */
void pc__waiter_ended(struct pc_engine *engine, struct pc__region *region, struct pc__waiter *waiter);

/* pull.c: how many requests of a layer are on the wire. */
#define PC__LAYER_REQUESTS 8        /* at first */
#define PC__LAYER_REQUESTS_LEAST 2u /* one is on its way while the other is put together */
#define PC__LAYER_TRIP_NS 10000000u
uint32_t pc__layer_requests(uint32_t most, uint32_t n_sent, uint64_t took_ns);
void pc__layer_came(struct pc__lane *lane, uint64_t took_ns);
uint32_t pc__most_sent(const struct pc__peer *peer, const struct pc__lane *lane);

/* choose.c. Of a fetch that had nothing to wait behind; what a round trip costs, in blocks moved. */
void pc__trips_add(struct pc__trips *trips, uint64_t n_blocks, uint64_t ns);
/* choose.c: of an answer to a request that was sent once (Karn's rule). */
void pc__rtt_add(struct pc__rtt *rtt, uint64_t ns);
/* No answer in that time: the next one has twice as long, until there is a sample. */
void pc__rtt_double(struct pc__rtt *rtt);
/* SRTT + 4 RTTVAR, doubled as often as it was; within PC__HEDGE_LEAST_NS and PC__REDIRECT_PATIENCE_NS. */
#define PC__HEDGE_LEAST_NS 50000000u    /* a thread without CPU time is later than any network */
#define PC__HEDGE_FIRST_NS 1000000000u  /* while there is no sample */
uint64_t pc__rtt_timeout_ns(const struct pc__rtt *rtt, uint64_t least_ns);
unsigned pc__rtt_class(uint64_t n_blocks);
/* By use, at most most_blocks of it. The block was touched and is absent; in_flight: on its way. */
struct pc__choice pc__choose(struct pc__readahead *pages, struct pc__streams *streams,
                             const struct pc__choice_sets *sets, uint64_t block, bool in_flight,
                             uint64_t most_blocks);
/* Of a region whose first block nobody has touched yet: a stream comes from the piece before it. */
struct pc__choice pc__choose_carried(struct pc__readahead *pages, struct pc__streams *streams,
                                     const struct pc__choice_sets *sets,
                                     const struct pc__carried *carried, uint64_t most_blocks);
struct pc__choice pc__choose_fixed(uint64_t n_blocks, unsigned shift, uint64_t block, bool in_flight,
                                   uint64_t most_blocks);

/* fault.c */
void pc__fault(struct pc__loop *loop, struct pc__session *session, uint64_t address, int slot);
void pc__fault_read_uffd(struct pc__loop *loop, struct pc__session *session);
void pc__fault_read_slots(struct pc__loop *loop, struct pc__session *session);
/* A mapping was attached again: threads that were stopped in it under the last server are taken up. */
void pc__fault_attached(struct pc__session *session, uint64_t address, uint64_t length_bytes);
void pc__fault_check_stray(struct pc__session *session, uint64_t now_ns);

/* batch.c: takes absent blocks of [first, first + n) that are not being fetched yet, marks them in flight,
 * and asks their homes. Called with region.lock held; the requests go out in _submit, without. */
struct pc__batch {
    struct pc__link fetches;
    bool urgent, prefetch;
};
void pc__batch_init(struct pc__batch *batch, bool urgent, bool prefetch);
int pc__batch_add(struct pc__batch *batch, struct pc__region *region,
                  struct pc__generation *generation, uint64_t first, uint64_t n);
/* The rest of the fetch will not come. */
void pc__fetch_fail(struct pc_engine *engine, struct pc__fetch *fetch, int error);
/* The first n blocks of what is still to come are dealt with. */
void pc__fetch_advance(struct pc__fetch *fetch, uint64_t n);
/* Fills and drops a fetch whose blocks are on this node. */
void pc__fetch_fill_here(struct pc__loop *loop, struct pc__fetch *fetch);

/* The fetch's next n blocks, which are not to be had where it was to bring them from, are asked for elsewhere.
 * Under region.lock. */
int pc__fetch_ask_elsewhere(struct pc__fetch *fetch, struct pc__batch *again, uint64_t n);

/* from_disk.c */
#define PC__FROM_DISK (UINT64_MAX - 1) /* as a server_id: this node's disk */
/* Than a peer; n_waiting: reads of the disk that are waited for. */
bool pc__disk_is_faster(struct pc__disk_times *times, uint64_t n_blocks, uint64_t n_waiting);
void pc__peer_took(struct pc_engine *engine, uint64_t n_blocks, uint64_t ns);
void pc__fetch_from_disk(struct pc__loop *loop, struct pc__fetch *fetch);
/* A thread is stopped at a block that may wait for the disk as bulk. */
void pc__from_disk_hurry(struct pc_engine *engine, const struct pc__generation *generation, uint64_t block);

/* request.c: more bytes fit into what the lane sends; the fetch's request is put there. */
int pc__lane_room(struct pc__lane *lane, size_t more);
int pc__request_put(struct pc__loop *loop, struct pc__lane *lane, struct pc__fetch *fetch);
/* PC_OK, or why what a peer says is no answer to this fetch. */
int pc__answer_fits(const struct pc__data_header *header, const struct pc__fetch *fetch);
void pc__fetch_drop(struct pc_engine *engine, struct pc__fetch *fetch); /* it is in no list any more */

/* fetch.c */
void pc__batch_submit(struct pc__loop *loop, struct pc__batch *batch);
bool pc__fetch_covers(const struct pc__fetch *fetch, uint64_t block); /* of what is still to come */
/* A thread is stopped at a block that waits in a bulk queue of this loop: to the urgent one. */
void pc__fetch_hurry(struct pc__loop *loop, struct pc__region *region,
                     const struct pc__generation *generation, uint64_t block);
void pc__fetch_queue(struct pc__loop *loop, struct pc__fetch *fetch); /* to the lane of its server */
/* This loop's record of a server, made where there is none; NULL: no memory. */
struct pc__peer *pc__peer_of(struct pc__loop *loop, uint64_t server_id);
/* A peer's lanes that have no connection are asked for again, where something waits for one. */
void pc__peer_ask_again(struct pc__peer *peer);
void pc__lane_event(struct pc__loop *loop, struct pc__peer *peer, int lane, uint32_t events);
void pc__peer_connected(struct pc__loop *loop, struct pc__mail *mail);
void pc__peer_is_lost(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__peers_deadline(struct pc__loop *loop); /* earliest, or UINT64_MAX */
void pc__peers_tick(struct pc__loop *loop, uint64_t now_ns);
void pc__peers_close(struct pc__loop *loop);

/* fetch_rows.c: rows that one home is asked for. */
struct pc__gather {
    /* On the loop that asked: all are there, or why not, for want of that server. */
    void (*came)(struct pc__region *region, void *arg, int status, uint64_t server_id);
    void *arg;
    uint8_t *into;
    struct pc__data_rows rows;
    uint64_t offsets[];
};
/* A fetch of rows: its request; its answer, as lane->rx has it (1: dealt with, 0: more is to come,
 * negative: nonsense), and where the next of it goes; its end without one. */
size_t pc__gather_request_bytes(const struct pc__fetch *fetch);
void pc__gather_encode(const struct pc__fetch *fetch, uint8_t *at);
int pc__gather_take(struct pc_engine *engine, struct pc__lane *lane, struct pc__fetch *fetch);
uint8_t *pc__gather_into(const struct pc__lane *lane, const struct pc__fetch *fetch);
void pc__gather_failed(struct pc_engine *engine, struct pc__fetch *fetch, int error);
/* Its home is here since they were asked for. */
int pc__gather_here(struct pc_engine *engine, struct pc__fetch *fetch);
uint64_t pc__gather_first_block(const struct pc__fetch *fetch);

/* redirect.c: fetches that a home has sent to others. */
#define PC__REDIRECT_PATIENCE_NS 3000000000ull /* with a server that is not the home */
/* The first of a lane's sent fetches: the blocks of the bitmap do not come with its answer. From a
 * home, sources has a pc__data_elsewhere for each; from a peer, the home is asked for them. *fetch is
 * replaced, in its list, by one of the n_left others. Negative: nothing has changed. */
int pc__redirect(struct pc__loop *loop, struct pc__fetch **fetch, const uint64_t *bits,
                 const uint8_t *sources, uint32_t n_left);
/* Of a home that lives, and has lost some of the blocks. The fetch's next n blocks are: they go to *lost, which
 * is in no list, and is made where it is NULL. */
int pc__fetch_set_aside(struct pc__fetch *fetch, uint64_t n, struct pc__fetch **lost);
/* Others make them again where its region has_repair (repair.h); else who waits for them hears that they are lost. */
void pc__fetch_lost(struct pc__loop *loop, struct pc__fetch *lost);
/* One that asks a peer (home_id is set), and is in no list: its home is to answer. */
void pc__redirect_failed(struct pc__loop *loop, struct pc__fetch *fetch);
/* So long a connection on which something is asked may bring no byte: less where somebody else has what
 * a redirect was to bring. */
uint64_t pc__patience_ns(const struct pc__loop *loop, const struct pc__lane *lane);
/* A peer that is late: its home is asked for the same. The first whole answer is used; where one of
 * the two fails, or does not have all, the other goes on alone. */
void pc__hedge_sent(struct pc__peer *peer, struct pc__lane *lane, struct pc__fetch *fetch, uint64_t now_ns);
void pc__hedge_tick(struct pc__peer *peer, struct pc__lane *lane, uint64_t now_ns);
/* Its answer has come whole. */
void pc__hedge_came(struct pc__peer *peer, const struct pc__fetch *fetch);
/* Its answer begins: with all of it, or not. */
void pc__hedge_answered(struct pc__loop *loop, struct pc__fetch *fetch, bool has_all);
/* It fails. True: its twin goes on, so nobody is told. */
bool pc__hedge_yields(struct pc__fetch *fetch);
/* What tells the home that all of it has come. Returns its length, at most PC__HELD_BYTES. */
#define PC__HELD_BYTES                                                \
    (sizeof(struct pc__data_header) + sizeof(struct pc__data_asker) + \
     PC__DATA_MAX_RUNS * sizeof(uint64_t))
size_t pc__redirect_held(const struct pc_engine *engine, const struct pc__fetch *fetch, uint8_t *out);

/* rehome.c: the peer is lost. What waits in its lane goes to another home, or stays until NEED_HOME is answered;
 * what cannot be had any more goes to failed. */
void pc__rehome_await(struct pc__loop *loop, struct pc__peer *peer, struct pc__lane *lane,
                      struct pc__link *failed);
void pc__homes_changed(struct pc__loop *loop, struct pc__mail *mail);
/* The home says, with an answer to this fetch, which is in no list, that it does not know the region. */
void pc__rehome_unknown(struct pc__peer *peer, struct pc__fetch *fetch);
uint64_t pc__rehome_deadline(const struct pc__peer *peer); /* when to look, or UINT64_MAX */
void pc__rehome_tick(struct pc__peer *peer, uint64_t now_ns);
void pc__rehome_close(struct pc__peer *peer);

/* file_reads.c: blocks that are in the region's file. They are in flight, and their bytes come from Python.
 * Without region.lock. */
#define PC__FROM_FILE UINT64_MAX /* in place of a server's id, of a fetch */
void pc__files_open(struct pc_engine *engine);
void pc__files_close(struct pc_engine *engine);
void pc__file_ask(struct pc_engine *engine, struct pc__region *region,
                  struct pc__generation *generation, struct pc_run run, bool urgent);
void pc__file_ask_fetch(struct pc_engine *engine, struct pc__fetch *fetch); /* all that it has still to bring */
void pc__file_hurry(struct pc_engine *engine, const struct pc__generation *generation, uint64_t block);
unsigned pc__file_trip_blocks(const struct pc__region *region); /* as known_blocks; under region.lock */
uint64_t pc__files_deadline(struct pc__loop *loop);
void pc__files_tick(struct pc__loop *loop, uint64_t now_ns);

/* causes.c. Lost: it is not reached any more, for good. Unknown: it answers that it does not know the region. */
void pc__unreached_forget(struct pc_engine *engine, uint64_t server_id);
void pc__unreached_lost(struct pc_engine *engine, uint64_t server_id);
void pc__unreached_unknown(struct pc_engine *engine, uint64_t server_id, uint64_t region);
bool pc__is_of_file(int error);
void pc__file_note_cause(struct pc_engine *engine, uint64_t region, const char *text); /* of a range */
/* Why there is nothing of the region from that server, for people. */
void pc__unreached_error_text(struct pc_engine *engine, uint64_t server_id, uint64_t region, int error,
                              char *text, size_t text_bytes);

#endif
