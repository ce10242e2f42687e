/* records.h - what the rooms hand each other: a region, its home, its generations, layers, and waiters.
 *
 * Which lock covers what: engine.h.
 */
#ifndef PC_RECORDS_H
#define PC_RECORDS_H

#include "engine/core/engine.h"

struct pc__disk_cache;
struct pc__file_trips;
struct pc__lost;
struct pc__rents;
struct pc__repair_sets;
struct pc__session;
struct pc__unchecked;

/* A file of a home, and which of its blocks mean something. */
struct pc__store {
    int memfd;                     /* a memfd, or a file on disk; -1: there is none */
    uint64_t inode;
    const uint8_t *map;            /* the whole memfd, read-only. NULL: it is on disk, where a read that
                                      fails is an error, and one of mapped memory would be our end */
    bool on_disk;
    bool is_broken;                /* the disk refused a part of it: nobody reads it, nor writes to it */
    struct pc__blockset data;      /* blocks that were written */
    uint64_t version;
};

/* The authoritative blocks of a region, where this node is its home. Where those of a version are,
 * and how they change: home.c. All of it under region.lock; only the worker changes stores. */
struct pc__home {
    struct pc__store base;         /* version B: what processes of this node map */
    struct pc__store overlay;      /* blocks that changed in (B, applied], while B is leased */
    struct pc__link pending;       /* struct pc__layer, of (applied, latest], by version */
    uint64_t applied, latest;
    uint64_t warm_blocks;          /* of the base: the first are in our page table (worker only) */
    uint64_t history_from;         /* versions below it take what the history has: applied, or one
                                      more from when that record is written until it is applied */
    bool base_changes;             /* the worker is at it, or was when it died: no new leases */
    bool change_said;              /* to the keeper, which will say that it has heard; then */
    bool change_heard;             /* this: the base may be punched. Until its new version is said */
    bool waits_for_store;          /* the next layer is undurable */
    int change_rc;                 /* why it will not hear that, until the worker has looked */
    bool overlay_is_torn;          /* it has, or may have, a part of the layer after `applied` */
    struct pc__lost *lost;         /* blocks that no server had when the base was rebuilt, or that are in
                                      the region's file; or NULL (lost.c) */
    bool is_unchecked;             /* blocks of the base were not looked at yet, or are damaged: */
    struct pc__unchecked *unchecked; /* which; of a base of an earlier session, or NULL (engine/checks) */
    struct pc_segment *segments;   /* sorted; bytes of the base that lie in another process's memory */
    size_t n_segments;
    uint64_t epoch;                /* readers of a store or a layer count themselves in. It goes on */
    uint64_t readers[2];           /* only when the one before has no readers: [epoch % 2], and the last */
    bool held_up;                  /* the worker has waited long for some: nothing waits for it */
    uint64_t replaced_in;          /* the epoch in which history_from rose: until then a reader may
                                      have resolved what the next layer replaces */
    struct pc__layer *leaving;     /* applied, or */
    struct pc__store folded;       /* brought into the base: to go when all have left that may have */
    uint64_t leaving_in;           /* resolved it, up to this epoch */
    struct pc__directory *directory; /* other servers that have blocks of it (directory.c), or NULL */
    struct pc__generation *base_left_to; /* +1 ref: of a former home, has the base's memfd now; or NULL */
};

/* One node's memfd of one version of one region. */
struct pc__generation {
    struct pc__link link;          /* of the region, while it can be leased */
    _Atomic uint32_t refs;         /* the region's list, each mapping, each fetch, each fork */
    int memfd;
    uint8_t *map; /* the whole memfd, registered with the engine's uffd; inserted into, never read */
    uint64_t inode;
    bool on_disk;  /* the file: of a base, as of its home */
    uint64_t version;
    bool complete; /* the base of a home: holes are zeros, no trap is needed */
    bool was_base; /* complete, and its home has moved away: it changes no more, is given to nobody new,
                      and goes with its last lease (move.c) */
    bool is_torn;  /* of those: the home left while its base was being changed. Only who follows reads it */
    bool built_in_place;           /* of those, as of the region when it was homed here; */
    uint64_t open_holes;           /* and likewise */
    bool is_layer;                 /* of a layer that is being pulled: no region's */
    bool has_strays;               /* the file may have blocks that present does not: an insert
                                       failed half-way, or could not be noted */
    uint64_t mappings;             /* leases, and how many of them follow it to version + 1: all that */
    uint64_t followers;            /* changes there they have private copies of */
    uint64_t forks;                /* generations that take blocks from this one */
    struct pc__generation *source; /* +1 ref: of a fork, which takes from it what is the same there */
    struct pc__blockset changed;   /* of a fork: what is not */
    struct pc__blockset present;   /* not kept for the base of a home */
    struct pc__blockset in_flight;
    struct pc__blockset fetched;
    struct pc__blockset touched;
    struct pc__blockset changed_away; /* were present before it moved; absent since */
    struct pc__rents *rents;       /* what rows of absent blocks have cost (gather.c), or NULL */
    struct pc__link waiters;       /* struct pc__waiter */
    struct pc__link jobs;          /* struct pc__job */
    struct pc__link cached;        /* cache.c's: what is accounted of it, */
    struct pc__link idle;          /* since when it has no lease, */
    uint64_t idle_since_ns;
    struct pc__region *cached_for; /* and whose it is, once something is accounted */
    struct pc__disk_cache *disk_cache; /* that has, or had, blocks of it (disk_cache.c), or NULL; region.lock */
    struct pc__link on_disk_too;   /* its slots there, under that one's lock */
    struct pc__link windows;       /* struct pc__window_user (windows.c) */
    struct pc__link recorders;     /* struct pc__recorder (evicted.c) */
    int gone;                      /* its version's home keeps blocks of it no longer: the error of each
                                      OPEN from now on; else 0 */
    bool adopted;                  /* from the keeper: until all had the time to attach again, a
                                      process that is not known may map it */
};

/* The blocks of one commit on one region: a file as wire.h describes, mapped read-only. */
struct pc__layer {
    struct pc__link link;          /* staged: of the engine; published at its home: of that */
    int memfd;
    uint64_t inode, bytes;
    bool on_disk;
    const uint8_t *map;            /* all of it; NULL: it is on disk, and read from there */
    const struct pc__layer_head *head; /* in map, or a copy of what comes before the data */
    uint64_t region, commit_id;
    uint64_t version;              /* 0: staged */
    const struct pc_run *runs;     /* behind head */
    uint64_t *positions;           /* of each run's first block among the data */
    uint64_t data_offset, n_blocks;
    uint32_t n_runs;
    uint32_t flags;                /* PC__LAYER_DELTA, ... (wire.h) */
    bool unheard;                  /* made whole here: the keeper has not said that it has it */
    bool undurable;                /* the same, and so who keeps layers beyond the session; */
    uint64_t ask_durable_at_ns;    /* that is asked then */
    _Atomic uint32_t refs;         /* its list, each reply that sends of it */
    uint64_t owner;                /* staged: pc__layer_owner of its session, or 0 */
    uint64_t ask_at_ns;            /* staged: when to ask what became of it */
    bool settled;                  /* retained: its homes have acknowledged it */
    bool followed;                 /* and a newer one of its region is, for a walk of retained.c */
};

/* What registry said of the blocks that differ between two versions. */
struct pc__changes {
    uint64_t from, to;             /* from < to; both 0: nothing */
    int error;
    size_t n_runs;
    struct pc_run *runs;
};

/* How it changes: region_state.c. */
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
    uint64_t id, base_address, length_bytes, n_blocks;
    uint64_t version;              /* the newest that was heard of here; for statistics */
    uint64_t *homes;               /* server id of each extent, once READY: pc__home_of */
    enum pc__region_state state;
    uint64_t creator;              /* client id, while CREATING */
    bool built_in_place;           /* its builder maps the base, as it was when it was sealed */
    bool base_is_builders;         /* and is given to nobody else: it has too many holes */
    bool is_mapped;                /* the base of its home is a generation, also for the next server */
    uint64_t open_holes;           /* of it, that count in the engine's */
    struct pc__home *home;
    struct pc__home *prepared;     /* to be the home once the registry has it so (rebuild.c); or NULL */
    bool prepared_sealed;          /* all of it is there */
    uint64_t prepared_term;        /* the term in which it would be the home */
    struct pc__home *former;       /* it has moved away; until nobody looks at it any more (move.c); or NULL */
    uint64_t term;                 /* which of the region's homes in turn `homes` are, as was heard last;
                                      0: it was not said */
    struct pc__readahead *pages;       /* how much a fault fetches, once there was one; or NULL */
    struct pc__link generations;
    uint64_t mappings;
    _Atomic bool in_file;          /* blocks that no commit has written are in a file (PC_MEDIUM_FILE) */
    struct pc__file_trips *file_trips; /* what reads of that have taken (file_reads.c), or NULL */
    _Atomic uint64_t reads;        /* opens, and requests of other servers for its blocks or rows */
    _Atomic uint64_t read_ns;      /* when the last of them was; 0: there was none */
    uint64_t faults, fault_wait_ns; /* that had to wait, and how long: those that wait no more */
    struct pc__changes changes;    /* the last answer */
    struct pc__link pending;       /* struct pc__pending: OPENs that wait for Python or the worker */
    uint32_t loss;                 /* the number of the loss of some of its blocks; 0: none is lost */
    int lost;                      /* the registry's verdict: the error of each OPEN; else 0 */
    uint64_t parked;               /* connections of other servers that wait for a version */
    bool asked_region, asked_changes, asked_published, asked_home; /* the question is out */
    uint64_t published_questions;  /* put so far: the answer to one says nothing of versions that
                                      a reader began to wait for after it was put */
    uint64_t ask_home_ns;          /* NEED_HOME about a home that lives: not before */
    bool queued;                   /* for the worker, which has a reference then */
    struct pc__link later;         /* the worker's, where the last try failed: */
    uint64_t retry_at_ns;          /* when it is tried again; worker.lock */
    _Atomic bool has_repair;       /* other regions can make its blocks again: a group, or mirrors */
    struct pc__repair_sets *repair_sets; /* which, of some versions (repair_sets.c); or NULL */
    bool idle_told;
    bool forgotten;                /* out of the table: a thread that finds it so looks it up again */
};

/* A thread that is stopped at an absent block. */
struct pc__waiter {
    struct pc__link link;
    struct pc__session *session;
    uint64_t mapping_id;
    uint64_t mapping_address;
    uint64_t block;
    uint64_t since_ns;             /* when it was asked for */
    int slot;                      /* SIGSEGV: its slot; uffd: -1 */
};

/* Blocks that are waited for: done when none of them is absent. */
struct pc__job {
    struct pc__link link;
    struct pc__session *session;    /* or NULL: no client's */
    /* Under region.lock. Where it failed: for want of that server, and why, for people; or NULL. */
    void (*done)(struct pc__job *job, int status, uint64_t server_id, const char *text);
    void *arg;                     /* of done */
    uint64_t mapping_id;
    uint32_t request_id;
    uint64_t remaining_blocks;
    size_t n_runs;
    struct pc_run runs[];          /* sorted, disjoint */
};

struct pc__pending {
    struct pc__link link;
    struct pc__loop *loop;
    uint64_t session_id;
    uint32_t request_id;
    void (*again)(struct pc__loop *loop, struct pc__mail *mail); /* how its loop goes on with it */
    bool attach;
    uint64_t question;             /* the first NEED_PUBLISHED whose answer is news to it */
    bool asked_published;          /* that was answered: the home has caught up for it */
    bool stages;                   /* the reply to a STAGE: the home has too much to apply */
    struct pc__ctl_open open;
};

/* The home of a block. Homes change under region.lock (homes.c); a reader without it may see
 * the old one, and the fetch finds that out. */
static inline uint64_t pc__home_of(const struct pc__region *region, uint64_t block)
{
    return __atomic_load_n(&region->homes[block / PC_EXTENT_BLOCKS], __ATOMIC_RELAXED);
}

#endif
