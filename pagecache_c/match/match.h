/* match.h - the matcher's memory, which processes share, and what its files need of each other.
 *
 * In: partitions, messages and decisions of a node. Out: the tasks that may run there now.
 *
 * Everything lies in one mapping and is named by its offset there, 0 is none: each process has it at another
 * address. One robust mutex covers all of it. What a file here calls `under the lock` may fail, but leaves
 * no half-done change; only the death of a process does, and that breaks the matcher.
 *
 *   create.c    a program -> the mapping           lock.c    the mutex and the waits
 *   heap.c      memory for what comes and goes     order.c   which stages are known
 *   match.c     what a slice may begin             inbox.c   messages and closings
 *   tasks.c     take, finish                       slice.c   slices that come and go
 *   outbox.c    what others must be told           run.c     kernels
 */
#ifndef PC_MATCH_H
#define PC_MATCH_H

#include "common/error.h"
#include "pagecache.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define PC__MATCH_MAGIC 0x316863746d6d6c63ull /* "clmmtch1" */
/* As AHEAD in matcher.py: so many stages of a slice are looked at, and so many of its tasks begin at most
 * before one of them ends. So the ready queue is bounded. */
#define PC__MATCH_AHEAD 8u
#define PC__HEAP_LOGS 48u
#define PC__HEAP_PARTS 8u

struct pc__match_heap {
    uint64_t begin;
    uint64_t n_bytes;
    uint64_t used_bytes;
    uint64_t logs; /* bit i: some list of free[i] has a block */
    uint64_t free[PC__HEAP_LOGS][PC__HEAP_PARTS];
};

struct pc__match_group {
    uint32_t n_slices;
    uint32_t first_slice;
    uint32_t n_datasets;
    uint32_t is_touched; /* has new stages */
    uint64_t head;       /* numbers of its oldest and newest stage that are known; 0: none is */
    uint64_t tail;
};
struct pc__match_dataset {
    uint32_t n_partitions;
    uint32_t group;
    uint32_t place; /* among its group's */
    uint32_t readers_since; /* of the order that is known: since its last writer */
    uint64_t last_writer;
};
struct pc__match_instance {
    uint64_t number;
    uint64_t next; /* of the same group; 0: none is known */
    uint32_t stage;
    uint32_t senders;
    uint32_t answer; /* 0: none has come; 1: False, 2: True */
    uint32_t unused;
};
struct pc__match_need {
    uint64_t writer;
    uint64_t readers;
};
struct pc__match_partition {
    uint64_t writer;
    uint64_t started;
    uint64_t finished;
    uint64_t writing;
};
struct pc__match_memory { /* of a partition; at 0: it has none */
    uint64_t at;
    uint64_t n_bytes;
    uint64_t data_offset;
    uint64_t data_bytes;
};
struct pc__match_slice {
    uint64_t passed; /* all its stages up to this number have begun; 0: unknown */
    uint64_t running[PC__MATCH_AHEAD];
    uint64_t inboxes;
    uint64_t first_partition;
    uint64_t n_ran; /* tasks, here, and how long their functions took */
    uint64_t busy_ns;
    uint32_t group;
    uint32_t index;
    uint32_t n_running;
    uint32_t is_here;
    uint32_t is_held;
    uint32_t unused;
};
struct pc__match_payload {
    uint64_t n_references;
    uint64_t n_bytes; /* which follow */
};
struct pc__match_mail { /* one message */
    uint64_t next;
    uint64_t payload;
    uint64_t sender;
};
struct pc__match_mails {
    uint64_t first;
    uint64_t last;
    uint64_t n;
    uint64_t n_bytes;
};
struct pc__match_inbox {
    uint64_t next;
    uint64_t number;
    uint64_t n_closed;
    uint64_t n_words;
    struct pc__match_mails mails;
    uint64_t closed[]; /* bit i: sender i has closed */
};
struct pc__match_answer { /* one that has come before its stage is known */
    uint64_t next;
    uint64_t number;
    uint64_t value;
};
struct pc__match_post { /* an entry of the outbox */
    uint64_t next;
    uint64_t kind;
    uint64_t number;
    uint64_t group;
    uint64_t index;
    uint64_t sender;
    uint64_t value;
    struct pc__match_mails mails;
};

struct pc__match_shared {
    uint64_t magic;
    uint64_t n_bytes;
    uint64_t window;
    uint64_t most_ready;
    uint64_t n_slices;
    uint32_t n_datasets, n_accesses, n_stages, n_steps, n_counters, n_groups;
    uint32_t most_accesses; /* of a stage */
    uint32_t most_senders;
    uint64_t datasets_at, accesses_at, stages_at, steps_at, counters_at, groups_at, slices_at;
    uint64_t partitions_at, instances_at, needs_at, ready_at, memories_at, generations_at;
    uint64_t n_partitions;

    pthread_mutex_t lock;
    _Atomic uint32_t is_broken;
    _Atomic uint32_t is_stopped;
    _Atomic uint32_t ready_word, ready_waiters; /* futexes; who sleeps on them */
    _Atomic uint32_t out_word, out_waiters;
    uint32_t has_ready_news, has_out_news;

    /* The order. */
    int32_t step;
    uint32_t waits; /* for the answer of stage n_known */
    int64_t last_stage;
    uint64_t n_known;
    uint64_t oldest;
    uint64_t limit;
    uint64_t early; /* answers */

    uint64_t ready_first; /* of a ring; both only grow */
    uint64_t ready_end;
    uint64_t out_first, out_last;
    /* Of held slices, and of all when nothing is left to run, that no wait for the outbox was told of. */
    uint64_t n_rests;
    uint64_t unfinished; /* a slice that had not ended when is_complete looked last */
    uint32_t n_takers;   /* processes and threads that take tasks; 0: nobody has said it */
    uint32_t is_discarded; /* the heap has nothing more in it */
    struct pc__match_heap heap;
};

struct pc_matcher {
    struct pc__match_shared *shared;
    char *base;
    int fd;
    _Atomic uint32_t is_shut;
    /* Of this process. */
    pc_match_kernel *kernels;
    void **partitions;
    size_t *partition_bytes;
};

static inline void *pc__match_at(const pc_matcher *m, uint64_t offset)
{
    return m->base + offset;
}
#define PC__MATCH_TABLE(name, type)                                                  \
    static inline struct type *pc__match_##name(const pc_matcher *m, uint64_t i)     \
    {                                                                                \
        return (struct type *)pc__match_at(m, m->shared->name##s_at) + i;            \
    }
PC__MATCH_TABLE(dataset, pc__match_dataset)
PC__MATCH_TABLE(stage, pc_match_stage)
PC__MATCH_TABLE(step, pc_match_step)
PC__MATCH_TABLE(group, pc__match_group)
PC__MATCH_TABLE(slice, pc__match_slice)
PC__MATCH_TABLE(partition, pc__match_partition)

static inline struct pc__match_memory *pc__match_memory(const pc_matcher *m, uint64_t slot)
{
    return (struct pc__match_memory *)pc__match_at(m, m->shared->memories_at) + slot;
}
static inline uint64_t *pc__match_generation(const pc_matcher *m, uint64_t slot)
{
    return (uint64_t *)pc__match_at(m, m->shared->generations_at) + slot;
}
static inline const struct pc_match_access *pc__match_access(const pc_matcher *m, uint64_t i)
{
    return (struct pc_match_access *)pc__match_at(m, m->shared->accesses_at) + i;
}

/* The stage of a number; NULL: it is not known, or not any more. */
static inline struct pc__match_instance *pc__match_instance(const pc_matcher *m, uint64_t number)
{
    const struct pc__match_shared *s = m->shared;
    if (number < s->oldest || number > s->n_known)
        return NULL;
    return (struct pc__match_instance *)pc__match_at(m, s->instances_at) + number % s->window;
}
static inline struct pc__match_need *pc__match_needs(const pc_matcher *m, uint64_t number)
{
    const struct pc__match_shared *s = m->shared;
    return (struct pc__match_need *)pc__match_at(m, s->needs_at) + number % s->window * s->most_accesses;
}
static inline struct pc_match_ready *pc__match_ready(const pc_matcher *m, uint64_t place)
{
    const struct pc__match_shared *s = m->shared;
    return (struct pc_match_ready *)pc__match_at(m, s->ready_at) + place % s->most_ready;
}

/* lock.c. Both fail with PC_ERR_MEMBER or PC_ERR_TIMEOUT; the lock is not held then. Unlocking wakes those
 * who wait for what has come meanwhile. */
int pc__match_lock(pc_matcher *m);
void pc__match_unlock(pc_matcher *m);
/* Under the lock, which it gives up: sleeps until something may have come, and does not take it again. After
 * the deadline (PC_ERR_TIMEOUT) it keeps it, and has not slept. */
int pc__match_sleep(pc_matcher *m, _Atomic uint32_t *word, _Atomic uint32_t *waiters,
                    uint64_t deadline_ns);
uint64_t pc__match_deadline(uint64_t timeout_ns);
void pc__match_wake_all(pc_matcher *m);

/* Everything below: under the lock. */

/* heap.c. 0: it is full. Blocks are aligned to 16 bytes. */
void pc__heap_init(pc_matcher *m, uint64_t begin, uint64_t n_bytes);
uint64_t pc__heap_take(pc_matcher *m, uint64_t n_bytes);
void pc__heap_give(pc_matcher *m, uint64_t at);
const char *pc__heap_audit(const pc_matcher *m);
int pc__match_full(const pc_matcher *m); /* PC_ERR_NO_SPACE, and its message */

/* order.c */
void pc__match_extend(pc_matcher *m);
int pc__match_answered(pc_matcher *m, uint64_t number, bool value);
bool pc__match_is_complete(pc_matcher *m);

/* match.c */
void pc__match_slice_now(pc_matcher *m, struct pc__match_slice *slice);
/* The first stage that has not begun on the slice; NULL: all that are known have. */
struct pc__match_instance *pc__match_first(pc_matcher *m, struct pc__match_slice *slice);
bool pc__match_has_begun(const pc_matcher *m, const struct pc__match_slice *slice,
                         const struct pc__match_instance *instance);
/* Whether the slice needs no message for that stage any more. */
bool pc__match_is_late(const pc_matcher *m, const struct pc__match_slice *slice, uint64_t number);
/* Takes what is ready back, of one slice, or (NULL) of all later than the limit. */
void pc__match_take_back(pc_matcher *m, const struct pc__match_slice *of);
int pc__match_ended(pc_matcher *m, const struct pc_match_ready *task, uint64_t took_ns);
/* NULL, and a message: there is no such slice, or it is not here. */
struct pc__match_slice *pc__match_find(pc_matcher *m, uint64_t group, uint64_t index);
struct pc__match_slice *pc__match_find_here(pc_matcher *m, uint64_t group, uint64_t index);
/* The slice of a task that runs; NULL, and a message: it does not run. */
struct pc__match_slice *pc__match_running(pc_matcher *m, const struct pc_match_ready *task);

/* inbox.c */
struct pc__match_inbox *pc__match_inbox(const pc_matcher *m, const struct pc__match_slice *slice,
                                        uint64_t number);
void pc__match_drop_inbox(pc_matcher *m, struct pc__match_slice *slice, uint64_t number);
/* Of numbers that are late, all of them. */
void pc__match_drop_late(pc_matcher *m, struct pc__match_slice *slice);
/* Messages that were copied into the heap in this call: those of the same offset are once there. */
struct pc__match_copies {
    const struct pc_match_sent *sent;
    uint64_t n_sent;
    const char *data;
    uint64_t n_recent;
    struct {
        uint64_t offset, n_bytes, payload;
    } recent[8];
};
int pc__match_copy(pc_matcher *m, struct pc__match_copies *from, uint64_t first, uint64_t n,
                   uint64_t sender, struct pc__match_mails *out);
void pc__match_drop_mails(pc_matcher *m, struct pc__match_mails *mails);
int pc__match_deliver(pc_matcher *m, struct pc__match_slice *slice, uint64_t number, uint64_t sender,
                      struct pc__match_copies *from, uint64_t first, uint64_t n);
int pc__match_check_sent(const struct pc_match_sent *sent, uint64_t n, const void *data,
                         uint64_t data_bytes, uint64_t n_receivers);
int64_t pc__match_send_all(pc_matcher *m, const struct pc_match_ready *task,
                           const struct pc_match_sent *sent, uint64_t n_sent, const void *data,
                           uint32_t *away);
/* By sender, in the order in which each has sent. */
void pc__match_sort(const pc_matcher *m, struct pc__match_mails *mails);
/* The same; writes up to capacity, returns how many there are. */
int64_t pc__match_list_messages(const pc_matcher *m, const struct pc__match_slice *slice,
                                uint64_t number, struct pc_match_message *out, uint64_t capacity);

/* outbox.c: takes the messages over. */
int pc__match_post(pc_matcher *m, const struct pc__match_post *post);

/* tasks.c. Takes what is ready. */
uint64_t pc__match_take_ready(pc_matcher *m, struct pc_match_ready *out, uint64_t most);
/* Takes the lock, and waits until something is ready. After a failure the lock is not held:
 * PC_ERR_TIMEOUT, PC_ERR_CLOSED, or as pc__match_lock. */
int pc__match_lock_ready(pc_matcher *m, uint64_t timeout_ns);

#endif
