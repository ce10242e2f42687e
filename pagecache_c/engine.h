/* engine.h - the page server's engine: its parts, who owns them, and which lock covers what.
 *
 *   loop        one thread, one epoll. Owns the clients, peers and served connections that were
 *               given to it; nobody else touches those. n_loops of them.
 *   client      one process of this node: its control socket, its trap, its mappings.
 *   region      what Python told us of a region, its home bytes (if they live here), and its
 *               generation (the memfd that processes of this node map).
 *   peer        this loop's connections to one other server, and the fetches that wait for it.
 *   served      a connection on which another server asks us.
 *
 * Locks, in the order in which they nest:  engine.lock -> region.lock -> leaves.
 *   engine.lock   the region table, the round-robin counters.
 *   region.lock   everything in one region that changes after it was defined: presence, in
 *                 flight, waiters, jobs, leases. Held for arithmetic and for calls that never
 *                 block (UFFDIO_WAKE, a futex wake, a non-blocking send); never over file or
 *                 network I/O (but the first lease of a region makes its memfd under it).
 *   leaves        event_lock, keeper_lock and each loop's mail_lock: nothing is taken under them.
 * A waiter or job in a region belongs to a client of some loop; the client takes all of its own
 * out, under region.lock, before it closes a descriptor. So whoever holds region.lock may use the
 * descriptors of the waiters it finds there.
 */
#ifndef PC_ENGINE_H
#define PC_ENGINE_H

#include "atomics.h"
#include "blockset.h"
#include "error.h"
#include "keeper.h"
#include "pagecache.h"
#include "wire.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

struct pc__loop;
struct pc__client;
struct pc__region;

/* ------------------------------------------------------------------ lists */

struct pc__link {
    struct pc__link *next, *prev;
};
static inline void pc__link_init(struct pc__link *head)
{
    head->next = head->prev = head;
}
static inline bool pc__link_empty(const struct pc__link *head)
{
    return head->next == head;
}
static inline void pc__link_push(struct pc__link *head, struct pc__link *link)
{
    link->prev = head->prev;
    link->next = head;
    head->prev->next = link;
    head->prev = link;
}
static inline void pc__link_remove(struct pc__link *link)
{
    link->prev->next = link->next;
    link->next->prev = link->prev;
    link->next = link->prev = link;
}
#define pc__of(link, type, member) ((type *)(void *)((char *)(link) - offsetof(type, member)))
#define pc__each(link, head) \
    for (struct pc__link *link = (head)->next, *link##_next = link->next; link != (head); \
         link = link##_next, link##_next = link->next)

/* ---------------------------------------------------------------- regions */

/* The authoritative bytes of a region, where this node is its home. */
struct pc__home {
    int memfd;
    uint64_t inode;
    const uint8_t *map;          /* the whole memfd, read-only */
    struct pc__blockset data;    /* blocks that were written; every other one is zeros */
    struct pc_segment *segments; /* sorted; bytes that lie in somebody else's memory */
    size_t n_segments;
};

/* One node's memfd of one version of one region. */
struct pc__generation {
    int memfd;
    uint8_t *map; /* the whole memfd, registered with the engine's uffd; inserted into, never read */
    uint64_t inode;
    bool complete; /* the memfd of a home: holes are zeros, no trap is needed */
    struct pc__blockset present;   /* not kept for a complete one */
    struct pc__blockset in_flight;
    struct pc__blockset fetched;
    struct pc__blockset touched;
    struct pc__link waiters;       /* struct pc__waiter */
    struct pc__link jobs;          /* struct pc__job */
};

enum pc__region_state {
    PC__REGION_UNKNOWN,  /* asked for; Python was told to look it up */
    PC__REGION_CREATING, /* made here, being filled, not sealed */
    PC__REGION_READY,
    PC__REGION_RETIRED   /* freed: no new leases */
};

struct pc__region {
    struct pc__region *hash_next;
    _Atomic uint32_t refs;         /* the table, each mapping, each fetch, each reply in a queue */
    pthread_mutex_t lock;
    uint64_t id, version, base_address, length_bytes, n_blocks;
    uint64_t *homes;               /* server id of each extent, once READY */
    enum pc__region_state state;
    uint64_t creator;              /* client id, while CREATING */
    struct pc__home *home;
    struct pc__generation *generation;
    uint64_t mappings;
    struct pc__link pending;       /* struct pc__pending: OPENs that wait for the definition */
    bool asked;                    /* NEED_REGION is out */
    bool idle_told;
    bool forgotten;                /* out of the table: whoever finds it so looks it up again */
};

/* A thread that is stopped at an absent block. */
struct pc__waiter {
    struct pc__link link;
    struct pc__client *client;
    uint64_t mapping_id;
    uint64_t mapping_address;
    uint64_t block;
    int slot;                      /* SIGSEGV: its slot; uffd: -1 */
};

/* A prefetch that somebody waits for: done when none of its blocks is absent. */
struct pc__job {
    struct pc__link link;
    struct pc__client *client;
    uint64_t mapping_id;
    uint32_t request_id;
    uint64_t remaining_blocks;
    size_t n_runs;
    struct pc_run runs[];          /* sorted, disjoint */
};

struct pc__pending {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t client_id;
    uint32_t request_id;
    bool attach;
    struct pc__ctl_open open;
};

/* --------------------------------------------------------------- fetching */

/* Blocks that were marked in flight and that one server was, or will be, asked for. */
struct pc__fetch {
    struct pc__link link;
    struct pc__region *region;
    uint64_t server_id;
    uint64_t give_up_ns;           /* 0: it has not been its turn yet */
    uint32_t request_id;
    uint32_t n_blocks;             /* still to come: of runs[at_run] on */
    uint32_t n_runs, capacity_runs;
    uint32_t at_run;               /* the runs before it are dealt with */
    int error;                     /* what comes is thrown away */
    bool urgent;                   /* a thread is stopped: not behind the bulk */
    bool prefetch;
    struct pc_run runs[];          /* [at_run] shrinks from its front as blocks come */
};

#define PC__LANES_PER_LOOP 2 /* one for urgent fetches, one for bulk */
#define PC__URGENT_REQUESTS 16 /* on the wire at once; the rest waits in the lane's queue */
#define PC__BULK_REQUESTS 4    /* of up to 8 MiB: enough for the wire, little to wait behind */
#define PC__RX_BYTES (1u << 20)
#define PC__BOUNCE_BLOCKS 64u

/* One connection to a peer, on which we ask. */
struct pc__lane {
    int fd;                        /* -1: none */
    bool asked;                    /* NEED_PEER is out */
    int low_water;                 /* SO_RCVLOWAT, as it stands */
    struct pc__watch *watch;
    struct pc__link queued;        /* fetches not sent yet */
    struct pc__link sent;          /* fetches on the wire, oldest first */
    uint32_t n_sent;
    uint64_t progress_ns;          /* when bytes last came, or the first of sent was sent */
    uint8_t *tx;                   /* request bytes that the socket did not take yet */
    size_t tx_bytes, tx_capacity;
    uint8_t *rx;                   /* PC__RX_BYTES */
    size_t rx_begin, rx_end;
    bool in_reply;                 /* header and bitmap of sent's first are read */
    uint32_t reply_position;       /* blocks of the reply dealt with */
    uint32_t reply_blocks;
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64];
};

struct pc__peer {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t server_id;
    struct pc__lane lanes[PC__LANES_PER_LOOP];
};

/* ------------------------------------------------------------------ loops */

enum pc__watch_kind {
    PC__WATCH_MAIL,
    PC__WATCH_LISTEN,
    PC__WATCH_CLIENT,
    PC__WATCH_UFFD,
    PC__WATCH_SLOTS,
    PC__WATCH_LANE,
    PC__WATCH_SERVED
};

/* What epoll gives back. Freed only after the batch of events in which it died. */
struct pc__watch {
    enum pc__watch_kind kind;
    bool dead;
    int fd;
    int lane;
    void *owner;
    struct pc__watch *grave_next;
};

/* Work for another thread's loop. */
struct pc__mail {
    struct pc__mail *next;
    void (*run)(struct pc__loop *loop, struct pc__mail *mail);
    uint64_t a, b;
    int fd, lane, error;
    void *pointer;
};

struct pc__loop {
    struct pc_engine *engine;
    int index;
    int epoll;
    int mail_event;
    struct pc__watch *mail_watch, *listen_watch; /* listen: of loop 0 */
    uint64_t accept_again_ns;      /* not 0: no descriptors were left, so it does not listen now */
    bool accept_fails;             /* since the last that was accepted; said once */
    pthread_t thread;
    bool started;
    pthread_mutex_t mail_lock;     /* mail_head, mail_tail; nests inside everything */
    struct pc__mail *mail_head, *mail_tail;
    bool stopping;
    struct pc__link clients, peers, served;
    struct pc__watch *graves;
    uint8_t *bounce;               /* PC__BOUNCE_BLOCKS, once needed */
    uint32_t next_request_id;
};

struct pc__counters {
    _Atomic uint64_t mappings, clients, served_connections, peer_connections;
    _Atomic uint64_t faults, faults_failed, faults_waiting;
    _Atomic uint64_t fetch_requests, fetch_retries, fetch_failed, fetches_in_flight;
    _Atomic uint64_t blocks_fetched, bytes_received, bytes_sent, blocks_served;
    _Atomic uint64_t zero_blocks, local_blocks, prefetch_requests, prefetched_blocks;
    _Atomic uint64_t bad_messages, reattached;
};

#define PC__REGION_BUCKETS 4096
#define PC__MAX_LOOPS 8
#define PC__LOG_EVENTS 1024

struct pc_engine {
    pthread_mutex_t lock;
    uint64_t server_id;
    char socket_name[100];
    char library_version[48];
    uint64_t fetch_timeout_ns, fault_timeout_ns;
    uint64_t page_blocks;          /* 0: by access pattern */
    int keeper_fd;
    pthread_mutex_t keeper_lock;   /* one message at a time on keeper_fd; nests inside all */
    int listen_fd;
    int event_fd;
    int uffd;                      /* inserts go through it; -1: pwrite */
    _Atomic uint64_t settle_until_ns; /* 0: clients have had the time to attach again */
    int n_loops;
    struct pc__loop loops[PC__MAX_LOOPS];
    struct pc__region *regions[PC__REGION_BUCKETS];
    uint64_t n_regions;
    pthread_mutex_t event_lock;    /* the ring below; nests inside all */
    struct pc_event *events;       /* ring of events_capacity */
    size_t events_capacity, events_begin, n_events;
    uint64_t next_client_id;
    unsigned next_loop;
    struct pc__counters count;
};

/* region.c */
struct pc__region *pc__region_get(struct pc_engine *engine, uint64_t id); /* +1 ref, or NULL */
struct pc__region *pc__region_get_or_add(struct pc_engine *engine, uint64_t id);
void pc__region_put(struct pc_engine *engine, struct pc__region *region);
void pc__region_forget(struct pc_engine *engine, struct pc__region *region);
bool pc__region_info_valid(const struct pc_region_info *info);
int pc__region_make_home(struct pc_engine *engine, struct pc__region *region,
                         const struct pc_segment *segments, size_t n_segments, int *fd);
int pc__region_seal(struct pc_engine *engine, struct pc__region *region);
int pc__region_need_generation(struct pc_engine *engine, struct pc__region *region);
int pc__region_adopt(void *engine, const struct pc__kept *kept, int fd);
void pc__region_lease_dropped(struct pc_engine *engine, struct pc__region *region);
uint64_t pc__regions_deadline(struct pc__loop *loop);
void pc__regions_check(struct pc__loop *loop, uint64_t now_ns);
/* Where the bytes of home blocks are. Describes up to n blocks from block on that are alike. */
enum pc__home_kind { PC__HOME_ZEROS, PC__HOME_MEMORY, PC__HOME_MIXED };
struct pc__home_part {
    enum pc__home_kind kind;
    uint64_t n_blocks;
    const uint8_t *bytes;          /* MEMORY */
    bool in_memfd;                 /* MEMORY, and the memfd has it at the same offset */
};
struct pc__home_part pc__home_describe(const struct pc__home *home, uint64_t block, uint64_t n);
/* One block of kind MIXED, composed. */
void pc__home_compose(const struct pc__home *home, uint64_t block, uint8_t *out);

/* fill.c: blocks become present, or are known not to come; whoever waits is told. */
int pc__fill_insert(struct pc_engine *engine, struct pc__region *region, uint64_t first,
                    uint64_t n, const uint8_t *bytes, bool fetched);
int pc__fill_zeros(struct pc_engine *engine, struct pc__region *region, uint64_t first,
                   uint64_t n);
void pc__fill_failed(struct pc_engine *engine, struct pc__region *region, uint64_t first,
                     uint64_t n, uint64_t server_id, int error);
void pc__fill_answer_slot(struct pc__region *region, const struct pc__waiter *waiter, int status);

/* fault.c */
void pc__fault(struct pc__loop *loop, struct pc__client *client, uint64_t address, int slot);
void pc__fault_read_uffd(struct pc__loop *loop, struct pc__client *client);
void pc__fault_read_slots(struct pc__loop *loop, struct pc__client *client);
/* A mapping was attached again: who was stopped in it under the last server is taken up. */
void pc__fault_attached(struct pc__client *client, uint64_t address, uint64_t length_bytes);
void pc__fault_check_stray(struct pc__client *client, uint64_t now_ns);

/* fetch.c */
/* Takes absent blocks of [first, first + n) that nobody is fetching yet, marks them in flight,
 * and asks their homes. Called with region.lock held; the requests go out in _submit, without. */
struct pc__batch {
    struct pc__link fetches;
    bool urgent, prefetch;
};
void pc__batch_init(struct pc__batch *batch, bool urgent, bool prefetch);
int pc__batch_add(struct pc__batch *batch, struct pc__region *region, uint64_t first, uint64_t n);
void pc__batch_submit(struct pc__loop *loop, struct pc__batch *batch);
/* A thread is stopped at a block that waits in a bulk queue of this loop: to the urgent one. */
void pc__fetch_hurry(struct pc__loop *loop, struct pc__region *region, uint64_t block);
void pc__lane_event(struct pc__loop *loop, struct pc__peer *peer, int lane, uint32_t events);
void pc__peer_connected(struct pc__loop *loop, struct pc__mail *mail);
void pc__peer_is_lost(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__peers_deadline(struct pc__loop *loop); /* earliest, or UINT64_MAX */
void pc__peers_check(struct pc__loop *loop, uint64_t now_ns);
void pc__peers_close(struct pc__loop *loop);

/* serve.c */
void pc__served_add(struct pc__loop *loop, struct pc__mail *mail);
void pc__served_event(struct pc__loop *loop, void *served, uint32_t events);
uint64_t pc__served_deadline(struct pc__loop *loop);
void pc__served_check(struct pc__loop *loop, uint64_t now_ns);
void pc__served_close_all(struct pc__loop *loop);

/* control.c */
void pc__client_accept(struct pc__loop *loop, int listen_fd);
void pc__client_event(struct pc__loop *loop, struct pc__client *client, uint32_t events);
void pc__client_retry_open(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__clients_deadline(struct pc__loop *loop);
void pc__clients_check(struct pc__loop *loop, uint64_t now_ns);
void pc__clients_close(struct pc__loop *loop);
/* One packet to the client; never blocks. Any thread that knows the client to be open may send. */
void pc__client_send(struct pc__client *client, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd);

/* loop.c */
int pc__loop_start(struct pc_engine *engine, struct pc__loop *loop, int index);
void pc__loop_stop(struct pc__loop *loop);
struct pc__watch *pc__watch_add(struct pc__loop *loop, enum pc__watch_kind kind, int fd, int lane,
                                void *owner, uint32_t events);
void pc__watch_change(struct pc__loop *loop, struct pc__watch *watch, uint32_t events);
void pc__watch_remove(struct pc__loop *loop, struct pc__watch *watch);
int pc__loop_post(struct pc__loop *loop, const struct pc__mail *mail);
uint64_t pc__now_ns(void);

/* engine.c */
/* False: it is lost, for want of memory (questions) or of a reader (log lines). */
bool pc__engine_event(struct pc_engine *engine, int kind, int error, uint64_t region,
                      uint64_t server_id, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* client record, shared by control.c and fault.c */
#define PC__STREAMS 4
struct pc__stream {
    uint64_t begin, end;           /* blocks; end: first one not asked for yet */
    uint64_t window;               /* blocks to ask for next */
    uint64_t used;                 /* for replacing the oldest */
};
struct pc__mapping {
    uint64_t id, address, length_bytes, version;
    struct pc__region *region;     /* +1 ref */
    struct pc__stream streams[PC__STREAMS];
    uint64_t clock;
    uint64_t page_blocks;          /* first fetch at a new place */
};
struct pc__client {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t id;
    int fd;
    struct pc__watch *watch, *trap_watch;
    bool said_hello, closed;
    uint64_t hello_by_ns;          /* until it has said hello */
    uint64_t stray_address;        /* a fault that came before its mapping was attached again, */
    uint64_t stray_by_ns;          /* and until when that must have happened; 0: none */
    unsigned creating;             /* regions it made and has not sealed */
    int trap;                      /* enum pc_trap */
    int uffd;                      /* or -1 */
    int slots_event;               /* or -1 */
    struct pc__control_page *page; /* or NULL */
    struct pc__mapping *mappings;  /* sorted by address */
    size_t n_mappings, mappings_capacity;
    struct pc__client *grave_next;
};
struct pc__mapping *pc__client_mapping_at(struct pc__client *client, uint64_t address);
struct pc__mapping *pc__client_mapping(struct pc__client *client, uint64_t id);

#endif
