/* core.h - the floor that the rooms of the engine stand on: the records, and what changes one of them and
 * needs no other room. Only the keeper is below it.
 */
#ifndef PC_CORE_H
#define PC_CORE_H

#include "engine/core/records.h"
#include "engine/keeper/keeping.h"

struct pc__lease;
struct pc__lessee;
struct pc__recorder;
struct pc__window_owner;
struct pc__window_user;

/* regions.c */
struct pc__region *pc__region_get(struct pc_engine *engine, uint64_t id); /* +1 ref, or NULL */
struct pc__region *pc__region_get_or_add(struct pc_engine *engine, uint64_t id);
/* One that is in no table, with a reference: of a layer that is being pulled. */
struct pc__region *pc__region_alone(uint64_t id, uint64_t n_blocks);
/* Under region.lock: says where a region lies and how long it is, once for its life. False: it was
 * said to be otherwise. */
bool pc__region_sized(struct pc__region *region, uint64_t base_address, uint64_t length_bytes);
/* Its length in blocks, or 0 as long as it is not known. Takes region.lock. */
uint64_t pc__region_blocks(struct pc__region *region);
void pc__region_was_read(struct pc__region *region); /* counts one */
void pc__region_put(struct pc_engine *engine, struct pc__region *region);
void pc__region_forget(struct pc_engine *engine, struct pc__region *region);
/* Sends OPENs that wait back to their loops: to try again, or, where error and version >= from, to
 * fail. And lets other servers' requests go on. caught_up: every version there is is known now. */
void pc__region_release(struct pc_engine *engine, struct pc__region *region, int error,
                        uint64_t from, bool caught_up);
/* The worker looks at it. region.lock is held. */
void pc__worker_queue(struct pc_engine *engine, struct pc__region *region);
/* The same, and now where it waits after a try that failed. */
void pc__worker_hurry(struct pc_engine *engine, struct pc__region *region);
bool pc__worker_push(struct pc__worker *worker, struct pc__region *region); /* worker.lock is held; false: no memory */

/* generations.c */
struct pc__generation *pc__generation_new(uint64_t n_blocks, bool complete);
struct pc__generation *pc__generation_take(struct pc__generation *generation); /* +1 ref */
void pc__generation_put(struct pc_engine *engine, struct pc__generation *generation);

/* region_state.c; under region.lock */
enum pc__region_step {
    PC__REGION_CREATE, PC__REGION_GIVE_UP, PC__REGION_DEFINE, PC__REGION_SEAL, PC__REGION_RETIRE
};
bool pc__region_may(const struct pc__region *region, enum pc__region_step step);
/* Only steps that it may take. */
void pc__region_goes(struct pc__region *region, enum pc__region_step step);
/* While its lock is free:
 *   length_bytes = n_blocks * PC_BLOCK_BYTES
 *   READY  =>  n_blocks > 0, it has homes, and no creator
 *   mappings = the sum of mappings over its generations; of each: followers <= mappings
 *   of each generation: it has room for n_blocks
 *   former  =>  no home, and none that is prepared
 *   of a home: base.version <= applied <= latest; history_from - applied is 0 or 1; its pending layers have
 *   the versions applied + 1, ..., latest, in this order. */
const char *pc__region_audit(const struct pc__region *region);

/* disk_jobs.c */
void pc__disk_jobs_open(struct pc__disk_jobs *jobs);
/* Runs the job in its turn. False: the engine stops, or there is no thread, and it is not run. One that has
 * `late` is called that when it is not run after fetch_timeout: a disk may hang. */
bool pc__disk_job_run(struct pc_engine *engine, struct pc__disk_job *job, enum pc__disk_rank rank);
/* By one that has `late`, in its run, before it is freed. */
void pc__disk_job_ends(struct pc_engine *engine, struct pc__disk_job *job);
/* A read of this kind that waits for a thread goes before those that are not urgent. */
void pc__disk_job_hurry(struct pc_engine *engine, bool (*is_it)(const struct pc__disk_job *job, void *arg),
                        void *arg);
/* Reads wait too long: who can have it elsewhere is to go there. */
bool pc__disk_jobs_stuck(struct pc_engine *engine);
uint64_t pc__disk_jobs_deadline(const struct pc__loop *loop); /* or UINT64_MAX; of loop 0 */
void pc__disk_jobs_tick(struct pc__loop *loop, uint64_t now_ns);
void pc__disk_jobs_stop(struct pc__disk_jobs *jobs); /* those that wait are run, and no more are taken */
void pc__disk_jobs_close(struct pc__disk_jobs *jobs);

/* memfd.c */
int pc__memfd_make(uint64_t length_bytes, uint64_t *inode);
/* For a store of a home: a memfd, or a file on disk that has all of its room there (else
 * PC_ERR_NO_SPACE). sparse: it takes its room as it is written, which may fail then: nobody maps it. */
int pc__store_file_make(const struct pc_engine *engine, uint64_t length_bytes, bool on_disk, bool sparse,
                        uint64_t *inode);
/* PC_ERR_DESCRIPTORS: only those are left that are kept back for connections, and for finishing what
 * is begun. For what makes a region, a generation or a layer: others must still reach what is here. */
int pc__descriptors_spare(void);
/* Blocks of the file that are not holes, added to data. */
int pc__memfd_blocks(struct pc__blockset *data, int memfd, uint64_t length_bytes);
int pc__memfd_punch(int memfd, uint64_t first, uint64_t n); /* blocks */

/* kept.c */
#define PC__KEPT_HOLES_AT 8 /* in pc__kept.reserved: how many holes of the base count */
#define PC__KEPT_TERM_AT 16 /* and the term of the region's home */
#define PC__KEPT_UNCHECKED_AT 24 /* not 0: of a home that comes from an earlier session (unchecked.c) */
/* Gives it to the keeper, now or later (pc__keep_wait, pc__keep_when). Negative: it never will have it,
 * and the log has a line; no process may be told that it is safe. */
int pc__keep(struct pc_engine *engine, const struct pc__kept *what, int fd);
void pc__keep_refused(void *engine, int rc, const struct pc__kept *what);
void pc__unkeep(struct pc_engine *engine, uint64_t inode);
/* Of what is kept: false, and nothing has changed, where the keeper cannot be told at once. */
bool pc__keep_now(struct pc_engine *engine, const struct pc__kept *what);
bool pc__keeper_is_behind(struct pc_engine *engine);
/* Until the keeper has heard all that was said before. Under no lock, and in no loop. */
int pc__keep_wait(struct pc_engine *engine);
/* The same for loops: PC_OK, heard already; 1: heard is called (keeping.h); negative: it cannot be. */
int pc__keep_when(struct pc_engine *engine, pc__keeper_heard *heard, void *arg);
/* Why such a wait ended so: keeping.h. */
void pc__keep_error_text(struct pc_engine *engine, int rc, char *text, size_t text_bytes);
struct pc__kept pc__kept_of(const struct pc__region *region, enum pc__kept_kind kind,
                            uint64_t inode, uint64_t version);
/* The same of a store of its home. */
struct pc__kept pc__kept_of_store(const struct pc__region *region, enum pc__kept_kind kind,
                                  const struct pc__store *store, uint64_t version);
/* The same of a base that its home has left. */
struct pc__kept pc__kept_of_left(const struct pc__region *region,
                                 const struct pc__generation *generation);

/* layer_file.c: one layer. open: owns fd, in every case. */
/* on_disk: a file of this server alone. Owns fd in every case. */
int pc__layer_open(int fd, uint64_t bytes, uint64_t region, uint64_t commit_id, bool on_disk,
                   struct pc__layer **out);
/* Of its data: the block at that position, and those behind it. NULL: it is on disk. */
static inline const uint8_t *pc__layer_at(const struct pc__layer *layer, uint64_t position)
{
    return layer->map ? layer->map + layer->data_offset + (position << PC_BLOCK_SHIFT) : NULL;
}
/* The same, copied. */
int pc__layer_read(const struct pc__layer *layer, uint64_t position, uint64_t n_blocks, uint8_t *out);
void pc__layer_put(struct pc__layer *layer);
void pc__layer_end(struct pc_engine *engine, struct pc__layer *layer); /* unkeeps, and puts */
uint64_t pc__layer_id(uint64_t region, uint64_t commit_id);
/* Position of the block among the layer's data, or UINT64_MAX; and how many blocks follow it. */
uint64_t pc__layer_find(const struct pc__layer *layer, uint64_t block, uint64_t *n);
/* The first block of the layer that is >= from, or limit. */
uint64_t pc__layer_next(const struct pc__layer *layer, uint64_t from, uint64_t limit);

/* mailbox.c */
struct pc__watch *pc__watch_add(struct pc__loop *loop, enum pc__watch_kind kind, int fd, int lane,
                                void *owner, uint32_t events);
void pc__watch_change(struct pc__loop *loop, struct pc__watch *watch, uint32_t events);
void pc__watch_remove(struct pc__loop *loop, struct pc__watch *watch);
int pc__loop_post(struct pc__loop *loop, const struct pc__mail *mail);
uint64_t pc__now_ns(void);

/* events.c */
/* False: it is lost, for want of memory (questions) or of a reader (log lines). */
bool pc__engine_event(struct pc_engine *engine, int kind, int error, uint64_t region,
                      uint64_t server_id, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
/* Questions about versions, and last words. */
bool pc__engine_request(struct pc_engine *engine, const struct pc_event *event);

/* Whether shared memory is made of huge pages now. Notes it for good, and says so the first
 * time. To be called around a write to shared memory by system call: before (huge_pages.h) and afterwards. */
bool pc__engine_makes_huge_pages(struct pc_engine *engine);

/* session.c: what the page server keeps of a client: its connection and its mappings. Of the loop that
 * accepted it. */
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
    uint64_t session_id;
};
/* Of a lessee: its faults that have waited, and do not any more. */
struct pc__waits {
    _Atomic uint64_t faults, wait_ns;
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
    struct pc__waits *waits;       /* likewise */
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
void pc__session_send(struct pc__session *session, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd);
/* A status alone. With a shortage goes what this thread has last said of it: memory, maps, or which limit. */
void pc__session_answer(struct pc__session *session, uint32_t request_id, int status);
void pc__session_reply(struct pc__session *session, const struct pc__ctl_message *message, int status);
/* From here on older connections of the process read no faults and answer none: what they have read, and
 * not answered, is taken up when its mapping is attached. */
void pc__turn_take(struct pc__session *session, struct pc__turn *turn);
/* True: it is the connection's turn, and stays that until it is released. */
bool pc__turn_hold(const struct pc__session *session);
void pc__turn_release(const struct pc__session *session);
/* Index of the first mapping that ends after address. */
size_t pc__session_mapping_after(const struct pc__session *session, uint64_t address);
struct pc__session_map *pc__session_mapping_at(struct pc__session *session, uint64_t address);
struct pc__session_map *pc__session_mapping(struct pc__session *session, uint64_t id);
/* Tells clients that map the region to close what they keep for the next call. Any thread. */
void pc__sessions_let_go(struct pc_engine *engine, uint64_t id); /* takes engine.lock, region.lock */
void pc__sessions_ended(struct pc_engine *engine);

/* overlay_notes.c: of an overlay on disk. */
uint64_t pc__overlay_notes_bytes(uint64_t length_bytes); /* behind its blocks; whole blocks */
/* It has the layer's blocks. */
int pc__overlay_note(const struct pc__store *overlay, const struct pc__layer *layer);
int pc__overlay_read_notes(struct pc__store *overlay);

#endif
