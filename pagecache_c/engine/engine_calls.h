/* engine_calls.h - what the engine's files offer each other, by file.
 *
 * Included by engine.h, which has the records, who owns them, and which lock covers what.
 */
#ifndef PC_ENGINE_CALLS_H
#define PC_ENGINE_CALLS_H

/* engine.c: whether shared memory is made of huge pages now. Notes it for good, and says so the first
 * time. For whoever writes to shared memory by system call, before (huge_pages.h) and afterwards. */
bool pc__engine_makes_huge_pages(struct pc_engine *engine);

/* region.c */
struct pc__region *pc__region_get(struct pc_engine *engine, uint64_t id); /* +1 ref, or NULL */
struct pc__region *pc__region_get_or_add(struct pc_engine *engine, uint64_t id);
/* One that is in no table, with a reference: of a layer that is being pulled. */
struct pc__region *pc__region_alone(uint64_t id, uint64_t n_blocks);
void pc__region_put(struct pc_engine *engine, struct pc__region *region);
void pc__region_forget(struct pc_engine *engine, struct pc__region *region);
bool pc__region_info_valid(const struct pc_region_info *info);
int pc__region_seal(struct pc_engine *engine, struct pc__region *region, bool built_in_place);
/* Under region.lock: its base is a generation too, if processes may map it as it is. */
int pc__region_home_generation(struct pc_engine *engine, struct pc__region *region);
/* Takes back one memfd after a restart, and, when all are there, what they are to each other. */
int pc__region_adopt(void *engine, const struct pc__kept *kept, int fd);
void pc__regions_adopted(struct pc_engine *engine);
void pc__region_lease_dropped(struct pc_engine *engine, struct pc__region *region);
/* Sends OPENs that wait back to their loops: to try again, or, where error and version >= from, to
 * fail. And lets other servers' requests go on. caught_up: every version there is is known now. */
void pc__region_release(struct pc_engine *engine, struct pc__region *region, int error,
                        uint64_t from, bool caught_up);
/* Nobody maps, unattached, what was adopted: from here on it may move, and go. */
void pc__regions_settled(struct pc_engine *engine);

/* After a restart (settle.c): what was adopted stays as it is for settle_ns, and until who still maps it
 * without a connection has ended. */
int pc__settle_begin(struct pc_engine *engine, uint64_t settle_ns);
uint64_t pc__settle_deadline(struct pc__loop *loop);
void pc__settle_check(struct pc__loop *loop, uint64_t now_ns);
void pc__settle_stop(struct pc_engine *engine);
int pc__memfd_make(uint64_t length_bytes, uint64_t *inode);
/* PC_ERR_DESCRIPTORS: only those are left that are kept back for connections, and for finishing what
 * is begun. For what makes a region, a generation or a layer: others must still reach what is here. */
int pc__descriptors_spare(void);
/* Blocks of the file that are not holes, added to data. */
int pc__memfd_blocks(struct pc__blockset *data, int memfd, uint64_t length_bytes);
/* Gives it to the keeper, now or later (pc__keep_wait, pc__keep_when). Negative: it never will have it,
 * and the log says so; nobody may be told that it is safe. */
int pc__keep(struct pc_engine *engine, const struct pc__kept *what, int fd);
void pc__keep_refused(void *engine, int rc, const struct pc__kept *what);
void pc__unkeep(struct pc_engine *engine, uint64_t inode, bool on_disk);
/* Of what is kept: false, and nothing has changed, where the keeper cannot be told at once. */
bool pc__keep_now(struct pc_engine *engine, const struct pc__kept *what);
bool pc__keeper_is_behind(struct pc_engine *engine);
/* Until the keeper has heard all that was said before. Under no lock, and in no loop. */
int pc__keep_wait(struct pc_engine *engine);
/* The same for loops: PC_OK, heard already; 1: heard is called (keeping.h); negative: it cannot be. */
int pc__keep_when(struct pc_engine *engine, pc__keeper_heard *heard, void *arg);
/* Why such a wait ended so: keeping.h. */
void pc__keep_say(struct pc_engine *engine, int rc, char *text, size_t text_bytes);
struct pc__kept pc__kept_of(const struct pc__region *region, enum pc__kept_kind kind,
                            uint64_t inode, uint64_t version);

/* generation.c; under region.lock, but for put */
struct pc__generation *pc__generation_new(uint64_t n_blocks, bool complete);
int pc__generation_map(const struct pc_engine *engine, struct pc__generation *generation);
struct pc__generation *pc__generation_take(struct pc__generation *generation); /* +1 ref */
void pc__generation_put(struct pc_engine *engine, struct pc__generation *generation);
/* The one that holds exactly this version: made, moved or forked if need be. PC__WAIT: it was, or
 * is to be, asked for; *ask says what. */
#define PC__WAIT 1
struct pc__ask {
    enum pc_event_kind kind;       /* NONE: the worker is at it, or the question is out */
    uint64_t from_version, version;
};
int pc__generation_for(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                       bool caught_up, struct pc__generation **out, struct pc__ask *ask);
int pc__memfd_punch(int memfd, uint64_t first, uint64_t n); /* blocks */
struct pc__generation *pc__generation_by_inode(struct pc__region *region, uint64_t inode);
/* Whether a lease needs it to stay as it is, if it were to go to that version. */
bool pc__generation_leased(const struct pc__generation *generation, uint64_t to_version);
void pc__generation_is_at(struct pc__generation *generation, uint64_t version);
/* A lease on one of them is gone: drops those that nobody will want. */
void pc__generations_trim(struct pc_engine *engine, struct pc__region *region);
void pc__generation_drop(struct pc_engine *engine, struct pc__region *region,
                         struct pc__generation *generation);

/* home.c */
int pc__home_make(struct pc_engine *engine, struct pc__region *region,
                  const struct pc_segment *segments, size_t n_segments, int *fd);
struct pc__home *pc__home_new(void);
void pc__home_free(struct pc_engine *engine, struct pc__home *home, uint64_t length_bytes);
/* Owns fd in every case. */
int pc__store_open(struct pc__store *store, int fd, uint64_t inode, uint64_t length_bytes,
                   uint64_t version);
void pc__store_close(struct pc_engine *engine, struct pc__store *store, uint64_t length_bytes);
/* Whether somebody needs the base to stay as it is, if it were to go to that version. */
bool pc__home_base_leased(const struct pc_engine *engine, const struct pc__region *region,
                          uint64_t to_version);
struct pc__generation *pc__home_base_generation(const struct pc__region *region);
/* The worker, with nothing else to do for the region: takes the next of a new base's blocks into this
 * process's page table, which else costs the first answer of each 64 KiB a page fault. True: there
 * are more. */
#define PC__WARM_LEAST_BLOCKS 1024u /* a base of less is not worth a turn */
bool pc__home_warm(struct pc__home *home);
/* Blocks that were allocated because a process read holes of the base: how many there are; and the
 * worker gives them back. Both under region.lock. A reader sees zeros before and after. */
uint64_t pc__home_read_holes(const struct pc__home *home);
int pc__home_punch_holes(struct pc__home *home);
/* Who will look at bytes that resolve gave out: from under region.lock until release. */
unsigned pc__home_hold(struct pc__home *home);
/* The worker, under region.lock: whether all readers of this epoch and of those before it have left.
 * No epoch begins before the last but one is empty, so there are never readers of more than two. */
bool pc__home_left(struct pc__home *home, uint64_t epoch);
void pc__home_release(struct pc_engine *engine, struct pc__region *region, unsigned held);
/* It has more to apply than it should have: writers wait. */
bool pc__home_is_behind(const struct pc__home *home);
/* Where the blocks of a version are. Describes up to n blocks from block on that are alike. */
enum pc__home_kind {
    PC__HOME_ZEROS, PC__HOME_MEMORY, PC__HOME_MIXED, PC__HOME_HISTORY,
    PC__HOME_LOST                  /* nobody had it when the home was rebuilt, and none of its versions
                                      up to this one wrote it */
};
struct pc__home_part {
    enum pc__home_kind kind;
    uint64_t n_blocks;
    const uint8_t *bytes;          /* MEMORY */
    int memfd;                     /* MEMORY: has it at offset; or -1 */
    uint64_t offset;
};
struct pc__home_part pc__home_resolve(struct pc_engine *engine, struct pc__region *region,
                                      uint64_t version, uint64_t block, uint64_t n);
/* Whether what was resolved is what the version was. To be asked after resolving, still locked:
 * PC_OK, PC_ERR_NO_VERSION (none such, or not heard of yet) or PC_ERR_EXPIRED. */
int pc__home_knows(const struct pc_engine *engine, const struct pc__region *region,
                   uint64_t version);
/* One block of kind MIXED or HISTORY, composed. Needs no lock, while held. */
int pc__home_compose(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                     enum pc__home_kind kind, uint64_t block, uint8_t *out);

/* rebuild.c: a region gets another home. The homes change under region.lock; who reads them without it
 * may see the old one, and is told by the fetch. */
static inline uint64_t pc__home_of(const struct pc__region *region, uint64_t block)
{
    return __atomic_load_n(&region->homes[block / PC_EXTENT_BLOCKS], __ATOMIC_RELAXED);
}
/* region.c: of a base that is adopted, whether blocks of it are lost. */
int pc__region_adopt_notes(struct pc__home *home, const struct pc__kept *kept);
/* Takes back what was prepared; owns fd. */
int pc__rebuild_adopt(struct pc_engine *engine, struct pc__region *region,
                      const struct pc__kept *kept, int fd);
/* Under region.lock, where there is no home: what was prepared is it from now on. */
int pc__rebuild_become_home(struct pc_engine *engine, struct pc__region *region);
/* The peer is lost. What waits in its lane goes to another home, or stays until NEED_HOME is answered;
 * what nobody can have any more goes to failed. */
void pc__rebuild_await(struct pc__loop *loop, struct pc__peer *peer, struct pc__lane *lane,
                       struct pc__link *failed);

/* layer.c */
/* Owns fd. owner: pc__layer_owner of the client, or 0. */
int pc__layer_stage(struct pc_engine *engine, uint64_t region, uint64_t commit_id, uint64_t bytes,
                    int fd, uint64_t owner);
int pc__layer_adopt(struct pc_engine *engine, const struct pc__kept *kept, int fd);
int pc__layer_publish(struct pc_engine *engine, uint64_t region, uint64_t commit_id,
                      uint64_t version);
void pc__layer_drop_staged(struct pc_engine *engine, uint64_t region, uint64_t commit_id);
/* Who staged them has ended: their outcome is asked for. */
void pc__layers_orphan(struct pc_engine *engine, uint64_t owner);
/* Of what a client stages. */
static inline uint64_t pc__layer_owner(const struct pc__session *client)
{
    return client->lessee ? client->lessee->number : client->id;
}
void pc__layers_forget(struct pc_engine *engine, uint64_t region);
struct pc__layer *pc__layer_get(struct pc_engine *engine, uint64_t layer_id); /* +1 ref, or NULL */
void pc__layer_put(struct pc__layer *layer);
void pc__layer_end(struct pc_engine *engine, struct pc__layer *layer); /* unkeeps, and puts */
uint64_t pc__layer_id(uint64_t region, uint64_t commit_id);
/* Position of the block among the layer's data, or UINT64_MAX; and how many blocks follow it. */
uint64_t pc__layer_find(const struct pc__layer *layer, uint64_t block, uint64_t *n);
/* The first block of the layer that is >= from, or limit. */
uint64_t pc__layer_next(const struct pc__layer *layer, uint64_t from, uint64_t limit);
void pc__pull_done(struct pc__pull *pull, int error); /* under the lock of its region */
uint64_t pc__layers_deadline(struct pc__loop *loop);
void pc__layers_check(struct pc__loop *loop, uint64_t now_ns);

/* apply.c */
#define PC__PENDING_MOST_BYTES (256ull << 20) /* published and not applied: writers wait beyond it */
int pc__worker_start(struct pc_engine *engine);
void pc__worker_stop(struct pc_engine *engine);
void pc__worker_free(struct pc_engine *engine);
void pc__worker_queue(struct pc_engine *engine, struct pc__region *region); /* region.lock is held */

/* fill.c: blocks become present, or are known not to come; whoever waits is told. */
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

/* fault.c */
void pc__fault(struct pc__loop *loop, struct pc__session *client, uint64_t address, int slot);
void pc__fault_read_uffd(struct pc__loop *loop, struct pc__session *client);
void pc__fault_read_slots(struct pc__loop *loop, struct pc__session *client);
/* A mapping was attached again: who was stopped in it under the last server is taken up. */
void pc__fault_attached(struct pc__session *client, uint64_t address, uint64_t length_bytes);
void pc__fault_check_stray(struct pc__session *client, uint64_t now_ns);

/* batch.c */
/* Takes absent blocks of [first, first + n) that nobody is fetching yet, marks them in flight,
 * and asks their homes. Called with region.lock held; the requests go out in _submit, without. */
struct pc__batch {
    struct pc__link fetches;
    bool urgent, prefetch;
};
void pc__batch_init(struct pc__batch *batch, bool urgent, bool prefetch);
int pc__batch_add(struct pc__batch *batch, struct pc__region *region,
                  struct pc__generation *generation, uint64_t first, uint64_t n);
void pc__fetch_drop(struct pc_engine *engine, struct pc__fetch *fetch);
/* The rest of the fetch will not come. */
void pc__fetch_fail(struct pc_engine *engine, struct pc__fetch *fetch, int error);
/* The first n blocks of what is still to come are dealt with. */
void pc__fetch_advance(struct pc__fetch *fetch, uint64_t n);
/* Fills and drops a fetch whose blocks are on this node. */
void pc__fetch_fill_here(struct pc__loop *loop, struct pc__fetch *fetch);

/* fetch.c */
void pc__batch_submit(struct pc__loop *loop, struct pc__batch *batch);
/* A thread is stopped at a block that waits in a bulk queue of this loop: to the urgent one. */
void pc__fetch_hurry(struct pc__loop *loop, struct pc__region *region,
                     const struct pc__generation *generation, uint64_t block);
void pc__lane_event(struct pc__loop *loop, struct pc__peer *peer, int lane, uint32_t events);
void pc__peer_connected(struct pc__loop *loop, struct pc__mail *mail);
void pc__peer_is_lost(struct pc__loop *loop, struct pc__mail *mail);
uint64_t pc__peers_deadline(struct pc__loop *loop); /* earliest, or UINT64_MAX */
void pc__peers_check(struct pc__loop *loop, uint64_t now_ns);
void pc__peers_close(struct pc__loop *loop);

/* cache.c: the node's budget. A block is accounted from when it becomes present in a generation that
 * is no home until it is punched or its generation ends. All of these do nothing without a budget. */
int pc__cache_open(struct pc_engine *engine, uint64_t cache_bytes, int policy);
int pc__cache_start(struct pc_engine *engine); /* the thread that evicts; stop: no thread evicts */
void pc__cache_stop(struct pc_engine *engine);
void pc__cache_close(struct pc_engine *engine);
uint64_t pc__cache_bytes(const struct pc_engine *engine); /* that are accounted */
/* How many holes a base may have that processes map as it is: the kernel allocates those they read. */
uint64_t pc__cache_most_holes(const struct pc_engine *engine);
/* How many blocks are inserted, or read ahead, at most at once. */
uint64_t pc__cache_most_blocks(const struct pc_engine *engine);
/* Without locks, by a thread that is about to insert n blocks of the region: evicts what is too much.
 * And when it has, or could not. */
void pc__cache_room(struct pc_engine *engine, const struct pc__region *region, uint64_t n);
void pc__cache_balance(struct pc_engine *engine, uint64_t n);
/* Under region.lock: blocks became present; a thread that was stopped at one of them may go on; they
 * were punched by somebody else; were used (a fault, a read set; the runs are sorted); the first
 * lease began, or the last one ended. */
void pc__cache_added(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *generation, uint64_t first, uint64_t n);
void pc__cache_awaited(struct pc_engine *engine, struct pc__generation *generation,
                       uint64_t block);
void pc__cache_removed(struct pc_engine *engine, struct pc__generation *generation, uint64_t first,
                       uint64_t n);
void pc__cache_touched(struct pc_engine *engine, struct pc__generation *generation,
                       const struct pc_run *runs, size_t n_runs);
void pc__cache_leased(struct pc_engine *engine, struct pc__generation *generation);
/* It ends. Under no lock but perhaps region.lock. */
void pc__cache_forget(struct pc_engine *engine, struct pc__generation *generation);

/* windows.c: what SIGSEGV processes have unprotected. Under region.lock. */
#define PC__CHUNK_BLOCKS (PC__CHUNK_BYTES / PC_BLOCK_BYTES) /* are evicted together */
struct pc__window_owner {          /* the control page of one process; unmapped with the last user */
    _Atomic uint32_t refs;
    struct pc__control_page *page;
    struct pc__process process;
};
struct pc__window_user {
    struct pc__link link;          /* of the generation that it maps */
    struct pc__window_owner *owner; /* +1 ref */
    uint64_t address, length_bytes;
    bool is_orphan;                /* its connection is gone, and it is not */
};
struct pc__window_owner *pc__windows_owner(struct pc__control_page *page,
                                           struct pc__process process);
void pc__windows_owner_put(struct pc__window_owner *owner); /* or NULL */
struct pc__window_user *pc__windows_add(struct pc__generation *generation,
                                        struct pc__window_owner *owner, uint64_t address,
                                        uint64_t length_bytes);
void pc__windows_drop(struct pc__window_user *user); /* or NULL: it has unmapped it */
/* Its connection ended: dropped, unless it may still read there. */
void pc__windows_left(struct pc__window_user *user);
/* Of one whose connection ended: it does not map it any more, or has attached it again. */
void pc__windows_unmapped(struct pc__generation *generation, const struct pc__process *process,
                          uint64_t address);
/* Whether such a one reads there: the generation has to stay as it is. */
bool pc__windows_orphaned(struct pc__generation *generation);
void pc__windows_end(struct pc__generation *generation); /* it ends; needs no lock */
/* Tells them that the chunk goes; returns which of its blocks must stay. From then on until _release
 * nobody unprotects one of it without asking. */
uint32_t pc__windows_hold(struct pc__generation *generation, uint64_t chunk);
void pc__windows_release(struct pc__generation *generation);
/* How many runs a process may have unprotected under this budget; 0: no budget. */
uint32_t pc__windows_limit(uint64_t cache_bytes);

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

/* control.c */
void pc__session_accept(struct pc__loop *loop, int listen_fd);
void pc__session_event(struct pc__loop *loop, struct pc__session *client, uint32_t events);
uint64_t pc__sessions_deadline(struct pc__loop *loop);
void pc__sessions_check(struct pc__loop *loop, uint64_t now_ns);
void pc__sessions_close(struct pc__loop *loop);
void pc__session_reply(struct pc__session *client, const struct pc__ctl_message *message, int status);

/* control_open.c: leases, which are mappings. */
void pc__session_open(struct pc__session *client, const struct pc__ctl_message *message, bool attach);
void pc__session_retry_open(struct pc__loop *loop, struct pc__mail *mail);
int pc__session_close_mapping(struct pc__session *client, const struct pc__ctl_message *message);
/* was_lost: with the connection, and its process may go on reading: the lease is kept (leases.c). */
void pc__session_drop_mapping(struct pc__session *client, struct pc__session_map *mapping, bool was_lost);
/* A lease is over. Under region.lock: it counts no more; put: then, without it, its references go. */
void pc__lease_end(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t version, bool follows);
void pc__lease_put(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation);
struct pc__session_map *pc__session_mapping_at(struct pc__session *client, uint64_t address);
struct pc__session_map *pc__session_mapping(struct pc__session *client, uint64_t id);
/* Tells clients that map the region to close what they keep for the next who asks. Any thread. */
void pc__sessions_let_go(struct pc_engine *engine, uint64_t id); /* takes engine.lock, region.lock */
void pc__sessions_ended(struct pc_engine *engine);

/* leases.c: leases of processes whose connection has ended. */
void pc__leases_open(struct pc_engine *engine);
void pc__leases_close(struct pc_engine *engine); /* no loop runs any more */
/* Who says hello with that number: one connection more; NULL: no memory. leave: one less; goes_on: its
 * process may come back, and what it leased and staged waits for that, or for its end. */
struct pc__lessee *pc__lessee_join(struct pc_engine *engine, uint64_t number, int socket_fd);
/* Whether a process has a connection, or leases that outlive one. */
bool pc__leases_know(struct pc_engine *engine, pid_t pid);
void pc__lessee_leave(struct pc_engine *engine, struct pc__lessee *lessee, bool goes_on);
/* Under region.lock, of a connection that ends: its lease, with its references and its count, goes on
 * as an orphan. False: a newer connection has it. */
bool pc__lease_keep(struct pc_engine *engine, const struct pc__session *client,
                    struct pc__session_map *mapping);
/* What it has leased on connections before this one is over. */
void pc__lessee_attached(struct pc_engine *engine, struct pc__lessee *lessee, uint64_t client_id);
uint64_t pc__leases_deadline(struct pc_engine *engine);
void pc__leases_check(struct pc_engine *engine, uint64_t now_ns); /* ends what nobody can read any more */

/* control_build.c: regions that are made here, and layers. */
void pc__session_create(struct pc__session *client, const struct pc__ctl_message *message);
void pc__session_seal(struct pc__session *client, const struct pc__ctl_message *message);
void pc__session_abandon(struct pc__session *client, const struct pc__ctl_message *message);
void pc__session_abandon_all(struct pc__session *client);
/* Takes fds[0] (sets it to -1). */
void pc__session_stage(struct pc__session *client, const struct pc__ctl_message *message, int *fds,
                      int n_fds);
void pc__session_resolve(struct pc__session *client, const struct pc__ctl_message *message);
/* Replies to a STAGE, or waits until the region's home, if it is here, has applied enough. */
void pc__session_staged(struct pc__session *client, uint32_t request_id, uint64_t region);
/* What the mapping wrote is the next version. Under region.lock. */
bool pc__mapping_follows(struct pc__session_map *mapping);
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
/* control_runs.c: prefetches and read sets. */
void pc__session_prefetch(struct pc__session *client, const struct pc__ctl_message *message);
void pc__session_reads(struct pc__session *client, const struct pc__ctl_message *message);
/* evicted.c: what goes while processes take read sets. note, free: under region.lock. */
struct pc__recorder;
void pc__recorders_note(struct pc__generation *generation, uint64_t chunk, uint32_t mask);
void pc__recorder_free(struct pc__recorder *recorder); /* or NULL */
void pc__session_evicted(struct pc__session *client, const struct pc__ctl_message *message);
/* gather.c */
void pc__session_gather(struct pc__session *client, const struct pc__ctl_message *message, int n_fds,
                       const int *fds);
/* The client is being closed, and its mappings are gone. */
void pc__session_gathers_end(struct pc__session *client);
/* Unmaps what no gather has used for a while. */
void pc__session_check_areas(struct pc__session *client, uint64_t now_ns);
/* The job of its blocks is done, or failed for want of that server. Under region.lock. */
void pc__part_blocks_done(struct pc__part *part, int status, uint64_t server_id);
void pc__rents_free(struct pc__rents *rents);
/* A fetch of rows: its request; its answer, as lane->rx has it (1: dealt with, 0: more is to come,
 * negative: nonsense), and where the next of it goes; its end without one. */
size_t pc__gather_request_bytes(const struct pc__fetch *fetch);
void pc__gather_encode(const struct pc__fetch *fetch, uint8_t *at);
int pc__gather_take(struct pc_engine *engine, struct pc__lane *lane, struct pc__fetch *fetch);
uint8_t *pc__gather_into(const struct pc__lane *lane, const struct pc__fetch *fetch);
void pc__gather_failed(struct pc_engine *engine, struct pc__fetch *fetch, int error);
/* Rows of a region that has its home here since they were asked for. */
void pc__gather_here(struct pc_engine *engine, struct pc__fetch *fetch);
uint64_t pc__gather_first_block(const struct pc__fetch *fetch);
/* rows.c: at the home. Status, or PC__WAIT: it has not heard of the version yet. */
int pc__rows_copy(struct pc_engine *engine, struct pc__region *region, uint64_t version,
                  const struct pc__data_rows *rows, const uint64_t *offsets, uint8_t *out);
/* Room for an answer: memory that was used before costs no page faults. free: of all that is kept. */
uint8_t *pc__rows_take_buffer(struct pc__loop *loop);
void pc__rows_give_buffer(struct pc__loop *loop, uint8_t *buffer);
void pc__rows_free_buffers(struct pc__loop *loop);
/* One packet to the client; never blocks. Any thread that knows the client to be open may send. */
void pc__session_send(struct pc__session *client, enum pc__ctl_type type, uint32_t request_id,
                     int status, const void *body, size_t body_bytes, int fd);

/* loop.c */
int pc__loop_start(struct pc_engine *engine, struct pc__loop *loop, int index);
void pc__loop_join(struct pc__loop *loop); /* its thread ends; mail is taken, and not read */
void pc__loop_stop(struct pc__loop *loop); /* what is left of it */
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
/* Questions about versions, and last words. */
bool pc__engine_ask(struct pc_engine *engine, const struct pc_event *event);

#endif
