/* threads.h - the threads of the engine: its loops and what they watch and are sent, the worker that applies
 * layers, and those that read and write files on disk. engine.h says which owns what.
 */
#ifndef PC_THREADS_H
#define PC_THREADS_H

#include "common/list.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct pc__parts;
struct pc__region;
struct pc__repairs;
struct pc_engine;

#define PC__LANES_PER_LOOP 2 /* connections to a peer: one for urgent fetches, one for bulk */

/* ------------------------------------------------------------------ loops */

struct pc__loop;

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

#define PC__ROW_BUFFERS 4
#define PC__BOUNCE_BLOCKS 64u /* of a loop: are on their way through its memory at once */
struct pc__loop {
    struct pc_engine *engine;
    int index;
    int epoll;
    int mail_event;
    struct pc__watch *mail_watch, *listen_watch; /* listen: of loop 0 */
    uint64_t accept_again_ns;      /* not 0: no descriptors were left, so it does not listen now */
    bool accept_fails;             /* since the last that was accepted; logged once */
    pthread_t thread;
    bool started;
    pthread_mutex_t mail_lock;     /* mail_head, mail_tail; nests inside everything */
    struct pc__mail *mail_head, *mail_tail;
    bool stopping;
    struct pc__link sessions, peers, served;
    struct pc__watch *graves;
    uint8_t *bounce;               /* PC__BOUNCE_BLOCKS, once needed */
    struct pc__parts *parts;       /* of the reply that is being put together (reply.c) */
    uint32_t next_request_id;
    struct pc__repairs *repairs;   /* fetches that others may help (repair.c); NULL: none yet */
    void *plan;                    /* scratch of gather.c, once needed */
    uint8_t *row_buffers[PC__ROW_BUFFERS]; /* of answers that were sent (rows.c), or NULL */
};

/* ------------------------------------------------------------------ the worker */

struct pc__worker {
    pthread_t thread;
    bool started, stopping;
    bool kicked;                   /* a reader left, or there is more to do: a nap ends */
    pthread_mutex_t lock;          /* the queue; nests inside everything */
    pthread_cond_t wake;
    struct pc__region **queue;     /* ring; each with a reference */
    size_t capacity, begin, n;
    struct pc__link later;         /* regions that failed, by retry_at_ns; each with a reference */
    struct pc__link errands;       /* struct pc__errand: what only this thread may do, for others; */
    pthread_cond_t ran;            /* they wait for that */
};

/* ------------------------------------------------------------------ disk */

/* disk_jobs.c: what is read from files on disk, and written to them, in threads of their own. */
enum pc__disk_rank { PC__DISK_WRITE, PC__DISK_READ, PC__DISK_URGENT, PC__DISK_RANKS };
#define PC__DISK_THREADS 4u
#define PC__DISK_JOB_BYTES (64u << 10)
struct pc__disk_job {
    struct pc__link link;          /* of those that wait for a thread */
    struct pc__link all;           /* of those that somebody waits for, until they have been run */
    uint64_t late_ns;              /* then `late` is called; 0: it is not, or was */
    /* Once. some: PC__DISK_JOB_BYTES, for direct reads too; NULL: the engine stops. */
    void (*run)(struct pc__disk_job *job, uint8_t *some);
    /* Or NULL. Under the lock, perhaps while it runs: nobody is to wait for it any more. False: it gets on. */
    bool (*late)(struct pc__disk_job *job);
};
struct pc__disk_jobs {
    pthread_mutex_t lock;          /* all of it; posts mail, and else is a leaf */
    pthread_cond_t wake;
    pthread_t threads[PC__DISK_THREADS];
    uint8_t *buffers[PC__DISK_THREADS];
    unsigned n_threads, n_idle;
    bool stopping;
    struct pc__link waiting[PC__DISK_RANKS]; /* struct pc__disk_job, the oldest first */
    struct pc__link reads;         /* all that are not run yet and have `late`, the oldest first */
    _Atomic uint64_t n_reads;      /* of those */
};

#endif
