/* local.h - processes of this node: their sessions, their mappings, and the leases that outlive a
 * connection.
 */
#ifndef PC_LOCAL_H
#define PC_LOCAL_H

#include "engine/core/core.h"
#include "os/process.h"

/* A client of a process over all of its connections. leases.lock; number and process never change. */
struct pc__lessee {
    struct pc__link link;          /* of the engine */
    uint64_t number;
    struct pc__process process;
    _Atomic int handle;            /* of a process without a pid here; -1: none, -ESRCH: it has ended */
    unsigned connections, looks;   /* that are open; threads that are at it */
    struct pc__turn turn;
    struct pc__waits waits;
    uint64_t attached_id;          /* the newest connection that has all of its leases */
    _Atomic bool stages;           /* layers, on one of its connections */
    struct pc__link orphans;       /* struct pc__lease, by serial */
    uint64_t look_at_ns, maps_at_ns, maps_pause_ns;
};

/* Of a connection that has ended, while its process may still read the memory. */
struct pc__lease {
    struct pc__link link;          /* of the lessee */
    uint64_t serial, session_id;
    uint64_t address, length_bytes, version;
    bool follows;                  /* as of the mapping */
    bool was_mapped;               /* the process's page tables showed it */
    struct pc__region *region;     /* +1 ref */
    struct pc__generation *generation; /* +1 ref */
};

/* listening.c: the name by which the processes of the node find us. Loop 0. */
int pc__listening_start(struct pc_engine *engine);
uint64_t pc__listening_deadline(const struct pc__loop *loop);
void pc__listening_tick(struct pc__loop *loop, uint64_t now_ns);

/* control.c */
/* Takes one connection; whether there was one. */
bool pc__session_accept(struct pc__loop *loop, int listen_fd);
void pc__session_event(struct pc__loop *loop, struct pc__session *session, uint32_t events);
uint64_t pc__sessions_deadline(struct pc__loop *loop);
void pc__sessions_tick(struct pc__loop *loop, uint64_t now_ns);
void pc__sessions_close(struct pc__loop *loop);

/* control_open.c: leases, which are mappings. */
void pc__session_open(struct pc__session *session, const struct pc__ctl_message *message, bool attach);
void pc__session_retry_open(struct pc__loop *loop, struct pc__mail *mail);
int pc__session_close_mapping(struct pc__session *session, const struct pc__ctl_message *message);
/* was_lost: with the connection, and its process may go on reading: the lease is kept (leases.c). */
void pc__session_drop_mapping(struct pc__session *session, struct pc__session_map *mapping,
                              bool was_lost);
/* A lease is over. Under region.lock: it counts no more; put: then, without it, its references go. */
void pc__lease_end(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t version, bool follows);
void pc__lease_put(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation);

/* leases.c: leases of processes whose connection has ended. */
void pc__leases_open(struct pc_engine *engine);
void pc__leases_close(struct pc_engine *engine); /* no loop runs any more */
/* Whether its process may still read what it mapped; true where that cannot be known. */
bool pc__lessee_lives(const struct pc__lessee *lessee);
/* join: a hello with that number, one connection more; NULL: no memory. leave: one less; goes_on: its
 * process may come back, and what it leased and staged waits for that, or for its end. */
struct pc__lessee *pc__lessee_join(struct pc_engine *engine, uint64_t number, int socket_fd);
/* Returns how many there are, which may exceed capacity. */
size_t pc__leases_waits(struct pc_engine *engine, struct pc_process_waits *out, size_t capacity);
/* Whether a process has a connection, or leases that outlive one. */
bool pc__leases_know(struct pc_engine *engine, pid_t pid);
void pc__lessee_leave(struct pc_engine *engine, struct pc__lessee *lessee, bool goes_on);
/* Under region.lock, of a connection that ends: its lease, with its references and its count, goes on
 * as an orphan. False: a newer connection has it. */
bool pc__lease_keep(struct pc_engine *engine, const struct pc__session *session,
                    struct pc__session_map *mapping);
/* What it has leased on connections before this one is over. */
void pc__lessee_attached(struct pc_engine *engine, struct pc__lessee *lessee, uint64_t session_id);
/* For audits. Takes leases.lock.
 *   two lessees differ in number or pid; each has connections, or looks, or orphans, or layers to wait for
 *   its orphans have ascending serials, at most next_serial, and client_id >= attached_id
 *   an orphan has a region, a generation, and length_bytes > 0 */
const char *pc__leases_audit(struct pc_engine *engine);
uint64_t pc__leases_deadline(struct pc_engine *engine);
void pc__leases_tick(struct pc_engine *engine, uint64_t now_ns); /* ends what no process can read any more */

/* control_build.c: regions that are made here, and layers. */
void pc__session_create(struct pc__session *session, const struct pc__ctl_message *message);
void pc__session_seal(struct pc__session *session, const struct pc__ctl_message *message);
void pc__session_abandon(struct pc__session *session, const struct pc__ctl_message *message);
void pc__session_abandon_all(struct pc__session *session);
void pc__session_layer_file(struct pc__session *session, const struct pc__ctl_message *message);
/* Takes fds[0] (sets it to -1). */
void pc__session_stage(struct pc__session *session, const struct pc__ctl_message *message, int *fds,
                      int n_fds);
void pc__session_resolve(struct pc__session *session, const struct pc__ctl_message *message);
/* Replies to a STAGE, or waits until the region's home, if it is here, has applied enough. */
void pc__session_staged(struct pc__session *session, uint32_t request_id, uint64_t region);
/* What the mapping wrote is the next version. Under region.lock. */
bool pc__mapping_follows(struct pc__session_map *mapping);

/* Of what a client stages. */
static inline uint64_t pc__layer_owner(const struct pc__session *session)
{
    return session->lessee ? session->lessee->number : session->id;
}

/* control_runs.c: prefetches and read sets. */
void pc__session_prefetch(struct pc__session *session, const struct pc__ctl_message *message);
void pc__session_reads(struct pc__session *session, const struct pc__ctl_message *message);

void pc__session_evicted(struct pc__session *session, const struct pc__ctl_message *message);

/* gather.c */
void pc__session_gather(struct pc__session *session, const struct pc__ctl_message *message, int n_fds,
                       const int *fds);
/* The client is being closed, and its mappings are gone. */
void pc__session_gathers_end(struct pc__session *session);
/* Unmaps what no gather has used for a while. */
void pc__session_check_areas(struct pc__session *session, uint64_t now_ns);
void pc__rents_free(struct pc__rents *rents);

/* After a restart (settle.c): what was adopted stays as it is for settle_ns, and until each process that
 * still maps it without a connection has ended. */
int pc__settle_begin(struct pc_engine *engine, uint64_t settle_ns);
uint64_t pc__settle_deadline(struct pc__loop *loop);
void pc__settle_tick(struct pc__loop *loop, uint64_t now_ns);
void pc__settle_stop(struct pc_engine *engine);

#endif
