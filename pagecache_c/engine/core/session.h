/* session.h - what the page server keeps of a client: its connection and its mappings. Of the loop that
 * accepted it.
 */
#ifndef PC_SESSION_H
#define PC_SESSION_H

#include "engine/core/records.h"

struct pc__lease;
struct pc__lessee;
struct pc__recorder;
struct pc__window_owner;
struct pc__window_user;

#define PC__STREAMS 4
/* One reader that goes forward (readahead.c). */
struct pc__stream {
    uint64_t begin, end;           /* blocks; end: first one not asked for yet */
    uint64_t window;               /* blocks that were asked for last */
    uint64_t used;                 /* for replacing the oldest; 0: free */
    unsigned extensions;
};
/* Of one mapping. */
struct pc__streams {
    struct pc__stream of[PC__STREAMS];
    uint64_t clock;
};

struct pc__session_map {
    uint64_t id, address, length_bytes, version;
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref */
    struct pc__lease *lease;       /* room for it as an orphan, should it become one */
    struct pc__window_user *window_user; /* SIGSEGV, where blocks can be evicted; or NULL */
    bool is_private;
    bool follows;                  /* counted among its followers, while that is at version */
    bool exact_reads;              /* its read sets show what was touched, and not what lies around */
    unsigned page_shift;           /* asked for: log2 of the bytes that a fault fetches; 0: by use */
    struct pc__recorder *recorder; /* of what is evicted while it takes a read set, or NULL */
    struct pc__streams streams;
};
/* Of a lessee: which of its connections serves the threads that are stopped. It is the newest that has
 * said hello: the end of an older one may be seen later. Lock: its own, a leaf. */
struct pc__turn {
    pthread_mutex_t lock;
    uint64_t client_id;
};
struct pc__session {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t id;
    int fd;
    struct pc__watch *watch, *trap_watch;
    bool said_hello, closed;
    bool left;                     /* it has said that it maps nothing any more */
    struct pc__lessee *lessee;     /* or NULL: it will not come back */
    struct pc__turn *turn;         /* of the lessee, or NULL */
    uint64_t hello_by_ns;          /* until it has said hello */
    uint64_t stray_address;        /* a fault that came before its mapping was attached again, */
    uint64_t stray_by_ns;          /* and until when that must have happened; 0: none */
    unsigned creating;             /* regions it made and has not sealed */
    bool stages;                   /* layers */
    int trap;                      /* enum pc_trap */
    int uffd;                      /* or -1 */
    int slots_event;               /* or -1 */
    struct pc__control_page *page; /* or NULL */
    struct pc__link gathers, areas; /* struct pc__part, pc__area (gather.c) */
    uint64_t areas_by_ns;          /* when to look for areas that are not used; 0: there are none */
    struct pc__window_owner *window_owner; /* of the page */
    struct pc__session_map *mappings;  /* sorted by address */
    size_t n_mappings, mappings_capacity;
    unsigned n_opening;            /* OPENs that wait for Python or the worker, at most */
    uint64_t *given_up;            /* mappings among those whose CLOSE has come already */
    size_t n_given_up, given_up_capacity;
    struct pc__session *grave_next;
};

/* One packet to the client; never blocks. Any thread that knows the client to be open may send. */
void pc__session_send(struct pc__session *client, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd);
/* A status alone. With a shortage goes what this thread has last said of it: memory, maps, or which limit. */
void pc__session_answer(struct pc__session *client, uint32_t request_id, int status);
void pc__session_reply(struct pc__session *client, const struct pc__ctl_message *message, int status);
/* From here on older connections of the process read no faults and answer none: what they have read, and
 * not answered, is taken up when its mapping is attached. */
void pc__turn_take(struct pc__session *client, struct pc__turn *turn);
/* True: it is the connection's turn, and stays that until it is released. */
bool pc__turn_hold(const struct pc__session *client);
void pc__turn_release(const struct pc__session *client);
/* Index of the first mapping that ends after address. */
size_t pc__session_mapping_after(const struct pc__session *client, uint64_t address);
struct pc__session_map *pc__session_mapping_at(struct pc__session *client, uint64_t address);
struct pc__session_map *pc__session_mapping(struct pc__session *client, uint64_t id);
/* Tells clients that map the region to close what they keep for the next who asks. Any thread. */
void pc__sessions_let_go(struct pc_engine *engine, uint64_t id); /* takes engine.lock, region.lock */
void pc__sessions_ended(struct pc_engine *engine);

#endif
