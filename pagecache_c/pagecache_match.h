/* pagecache_match.h - the part of the public header that is about programs: which tasks may run on a node
 * now. pagecache.h includes it, and has the words and the conventions.
 *
 * One memfd for each node and program, which the worker's process makes and its executors attach. The model
 * is clamor_ray/_recipes/matching/matcher.py: what it does with one caller, this does with many.
 *
 * A process that dies in a call leaves the matcher broken: every later call of every process ends with
 * PC_ERR_MEMBER. A heap that is full is PC_ERR_NO_SPACE; the call has changed nothing that a second one
 * would not change. A number, index or table that cannot be is PC_ERR_RANGE.
 */
#ifndef PAGECACHE_MATCH_H
#define PAGECACHE_MATCH_H

#ifndef PAGECACHE_H
#error "include pagecache.h"
#endif

/* cdef-begin */

typedef struct pc_matcher pc_matcher;

/* -------------------------------------------------------------- programs */

/* The tables of clamor_ray/_recipes/program/tables.py. END is -1 in place of a step. */
struct pc_match_dataset {
    uint32_t n_partitions;
    uint32_t group;
};
struct pc_match_access {
    uint32_t dataset;
    uint32_t is_write;
};
struct pc_match_stage {
    uint32_t n_tasks;
    uint32_t group;
    uint32_t first_access;     /* in the table of accesses */
    uint32_t n_accesses;
    uint32_t sends;
    uint32_t decides;
};
enum pc_match_op { PC_MATCH_RUN = 0, PC_MATCH_DECIDE = 1, PC_MATCH_CLEAR = 2, PC_MATCH_REPEAT = 3 };
struct pc_match_step {
    int32_t op;                /* enum pc_match_op */
    int32_t arg;
    int32_t then;
    int32_t other;
    int64_t limit;
};
struct pc_match_tables {
    const struct pc_match_dataset *datasets;
    const struct pc_match_access *accesses;
    const struct pc_match_stage *stages;
    const struct pc_match_step *steps;
    uint32_t n_datasets;
    uint32_t n_accesses;
    uint32_t n_stages;
    uint32_t n_steps;
    uint32_t n_counters;
    uint32_t reserved;
};

/* A new matcher in a memfd of its own. window: so many stages are known at once, at least 2.
 * heap_bytes: for messages, closings and decisions that wait. */
int pc_match_create(const struct pc_match_tables *tables, uint64_t window, uint64_t heap_bytes,
                    pc_matcher **out);
/* The matcher in a descriptor, which stays the caller's. Both ends are the same build. */
int pc_match_attach(int fd, pc_matcher **out);
/* This handle's descriptor. */
int pc_match_fd(pc_matcher *matcher);
/* Waits of this handle end with PC_ERR_CLOSED, those that come too. */
int pc_match_shut(pc_matcher *matcher);
/* No call may run, or begin. The matcher lives until all handles and descriptors are closed. */
int pc_match_close_handle(pc_matcher *matcher);
/* As pc_match_close_handle, at the end of a job: the heap's memory goes back to the kernel, whoever has it
 * mapped, and calls of other processes end with PC_ERR_CLOSED. This process's mapping stays, for objects may point into it:
 * they have zeros now. */
int pc_match_discard(pc_matcher *matcher);
/* The waits of all processes end with PC_ERR_CLOSED, those that come too. */
int pc_match_stop(pc_matcher *matcher);

/* ----------------------------------------------------------------- tasks */

struct pc_match_ready {
    uint64_t number;           /* of its stage, in the order of all that run */
    uint64_t stage;
    uint64_t index;
};
struct pc_match_message {
    const void *data;          /* aligned to 16 bytes; stays until the task has finished */
    uint64_t n_bytes;
    uint64_t sender;
};
/* One message among the bytes of a call. */
struct pc_match_sent {
    uint64_t to;               /* index of the receiver */
    uint64_t offset;
    uint64_t n_bytes;
};

/* Up to `most` tasks, which have begun; waits for the first one. Returns how many, 0 after timeout_ns. Where
 * set_takers has said how many callers there are, a call takes at most its share of what is ready. */
int64_t pc_match_take(pc_matcher *matcher, struct pc_match_ready *out, uint64_t most,
                      uint64_t timeout_ns);
int pc_match_set_takers(pc_matcher *matcher, uint32_t n);
/* took_ns: of each one's function, for pc_match_tallies; NULL: nobody has measured. */
int pc_match_finish(pc_matcher *matcher, const struct pc_match_ready *tasks, const uint64_t *took_ns,
                    uint64_t n);
/* Tasks have run: what they have sent goes to the next stage's tasks, as by pc_match_close_all without `away`,
 * and they end, as by pc_match_finish. Messages of the i-th are from first_sent[i] on, up to first_sent[i + 1].
 * *n_done of them are done, also after a failure; the call may be made again with the others. */
int pc_match_end(pc_matcher *matcher, const struct pc_match_ready *tasks, const uint64_t *took_ns,
                 uint64_t n, const struct pc_match_sent *sent, const uint64_t *first_sent,
                 const void *data, uint64_t data_bytes, uint64_t *n_done);
/* Group, index, tasks that have run here and nanoseconds in their functions, of each slice that any has run
 * on. Returns how many slices; writes up to capacity of them. */
int64_t pc_match_tallies(pc_matcher *matcher, uint64_t *out, uint64_t capacity);
/* The messages to a task that runs, by sender. Returns how many there are; writes up to capacity. */
int64_t pc_match_messages(pc_matcher *matcher, const struct pc_match_ready *task,
                          struct pc_match_message *out, uint64_t capacity);
/* The stage that comes after a number; the number of stages: it is not known yet. */
int64_t pc_match_next_stage(pc_matcher *matcher, uint64_t number);
/* A sender has closed to one task; `sent` in the order in which it has sent. */
int pc_match_close(pc_matcher *matcher, uint64_t number, uint32_t group, uint32_t index,
                   uint32_t sender, const struct pc_match_sent *sent, uint64_t n_sent,
                   const void *data, uint64_t data_bytes);
/* A task that runs has closed to all of the next stage; `sent` by receiver, ascending. The indices of those
 * whose slices are elsewhere go to `away`, which has room for all; NULL: their closings go to the outbox.
 * Returns how many they are. Messages of the same offset are stored once. */
int64_t pc_match_close_all(pc_matcher *matcher, const struct pc_match_ready *task,
                           const struct pc_match_sent *sent, uint64_t n_sent, const void *data,
                           uint64_t data_bytes, uint32_t *away);

/* --------------------------------------------------------------- kernels */

/* What a kernel gets: a C function (cffi, numba.cfunc, a library's) that runs a task without Python.
 *
 *     int kernel(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
 *
 * partitions[i] and n_bytes[i]: of the i-th dataset that the stage accesses, in its table's order (reads,
 * then writes), as pc_match_set_partition has set them in this process, or else the data of its memory;
 * NULL and 0 where it has none.
 * Returns 0; from a stage that decides, 1 for True and 0 for False; negative: it has failed, and the job
 * stops. It may run in several processes and threads at once, but for one slice never beside a writer.
 * It keeps no pointer that it is given. For numba, _native/matcher.py has this struct as a dtype, and the
 * addresses of both calls. */
struct pc_match_task {
    uint64_t number;
    uint32_t stage;
    uint32_t index;
    uint32_t n_tasks;          /* of its stage */
    uint32_t n_next;           /* of the next stage; 0 where the stage does not send */
    uint64_t n_messages;
    const struct pc_match_message *messages; /* by sender */
    /* Copies a message for the task of that index of the next stage, or for each. 0, PC_ERR_RANGE or
     * PC_ERR_NO_MEMORY; after a failure the task fails, whatever the kernel returns. */
    int (*send)(struct pc_match_task *task, uint32_t index, const void *data, uint64_t n_bytes);
    int (*broadcast)(struct pc_match_task *task, const void *data, uint64_t n_bytes);
    void *internal;
};
typedef int (*pc_match_kernel)(struct pc_match_task *task, void **partitions, const size_t *n_bytes);

/* What `send` and `broadcast` above point to. */
int pc_match_send(struct pc_match_task *task, uint32_t index, const void *data, uint64_t n_bytes);
int pc_match_broadcast(struct pc_match_task *task, const void *data, uint64_t n_bytes);

/* The kernel of a stage in this handle; NULL: Python runs it. */
int pc_match_set_kernel(pc_matcher *matcher, uint32_t stage, pc_match_kernel kernel);
/* Where a partition lies in this process. Nothing may run on it. */
int pc_match_set_partition(pc_matcher *matcher, uint32_t dataset, uint32_t index, void *address,
                           uint64_t n_bytes);

/* ---------------------------------------------------------------- memory */

/* The bytes of partitions, which all processes of the node have mapped. Only the task that writes a partition
 * changes them, or, while nothing runs on it, the worker. */
struct pc_match_memory {
    void *address;             /* in this process; NULL: it has none */
    uint64_t n_bytes;
    uint64_t generation;       /* another one with each call of pc_match_set_memory */
};
/* Memory of nobody, aligned to 64 bytes. */
int pc_match_new_memory(pc_matcher *matcher, uint64_t n_bytes, void **out);
/* A partition's memory is this from now on; what it had is free, unless it is the same. Of it data_bytes from
 * data_offset on are what kernels get. address NULL, and zeros: it has none. */
int pc_match_set_memory(pc_matcher *matcher, uint32_t dataset, uint32_t index, void *address,
                        uint64_t n_bytes, uint64_t data_offset, uint64_t data_bytes);
int pc_match_memory_of(pc_matcher *matcher, uint32_t dataset, uint32_t index,
                       struct pc_match_memory *out);
/* The generations of all partitions: by group, index, and dataset within the group. *n: how many. */
const uint64_t *pc_match_generations(pc_matcher *matcher, uint64_t *n);

struct pc_match_ran {
    uint64_t n_ran;            /* tasks whose kernels have run */
    uint64_t n_tasks;          /* tasks for Python, taken */
    struct pc_match_ready failed; /* whose kernel returned failed_code, if that is negative */
    int64_t failed_code;
};
/* Takes tasks, up to `most` at a time, and runs their kernels until one has none, one fails, nothing has been
 * ready for timeout_ns, or a second has passed. Tasks of stages without a kernel go to out, which has room for `most`. What
 * kernels send elsewhere, and decide, goes to the outbox too. */
int pc_match_run(pc_matcher *matcher, uint64_t most, uint64_t timeout_ns, struct pc_match_ready *out,
                 struct pc_match_ran *ran);

/* ---------------------------------------------------------------- slices */

/* A slice as bytes, all of them uint64_t: the number of partitions, of inboxes; for each partition its
 * dataset, writer, started, finished, writing; for each inbox its number, the number of senders, of
 * messages, then the senders, then sender and length of each message; and after all of these the messages'
 * bytes, one behind the other. */
int pc_match_add(pc_matcher *matcher, uint32_t group, uint32_t index, const void *state,
                 uint64_t n_bytes);
/* 1: nothing runs on it. 0: something does; when that ends, waits for the outbox end too. */
int pc_match_hold(pc_matcher *matcher, uint32_t group, uint32_t index);
int pc_match_release(pc_matcher *matcher, uint32_t group, uint32_t index);
/* A held slice on which nothing runs goes. Returns its length in bytes; if that is more than capacity,
 * nothing was done. */
int64_t pc_match_remove(pc_matcher *matcher, uint32_t group, uint32_t index, void *out,
                        uint64_t capacity);
/* Pairs of group and index of those that are here. Returns how many there are; writes up to capacity. */
int64_t pc_match_slices(pc_matcher *matcher, uint32_t *out, uint64_t capacity);

/* ----------------------------------------------------------------- order */

/* to_outbox: the answer was given here, and others must be told. */
int pc_match_decide(pc_matcher *matcher, uint64_t number, uint32_t value, uint32_t to_outbox);
/* Pairs of number and value. Returns how many there are; writes up to capacity of them. */
int64_t pc_match_decisions(pc_matcher *matcher, uint64_t *out, uint64_t capacity);
int pc_match_forget(pc_matcher *matcher, uint64_t before);
int pc_match_stop_after(pc_matcher *matcher, uint64_t number); /* UINT64_MAX: everything may begin */
struct pc_match_progress {
    uint64_t furthest;
    uint64_t floor;
    uint64_t n_known;
    uint64_t n_ready;
    uint64_t heap_used_bytes;
    uint32_t is_complete;
    uint32_t has_reached;      /* the number of the call */
};
/* What is asked of the order, at one moment. number: see has_reached. */
int pc_match_progress_of(pc_matcher *matcher, uint64_t number, struct pc_match_progress *out);
int pc_match_is_complete(pc_matcher *matcher);

/* ---------------------------------------------------------------- outbox */

enum pc_match_kind { PC_MATCH_CLOSING = 1, PC_MATCH_ANSWER = 2 };
/* One entry; after a closing come n_messages lengths (uint64_t), then their bytes, then zeros up to a
 * multiple of 8. */
struct pc_match_outgoing {
    uint64_t kind;             /* enum pc_match_kind */
    uint64_t number;           /* the receiver's stage; the stage that has decided */
    uint64_t group;
    uint64_t index;
    uint64_t sender;
    uint64_t value;            /* of an answer */
    uint64_t n_messages;
    uint64_t n_bytes;          /* of messages */
};
/* 1: something is there, a held slice has come to rest, or nothing is left to run here. 0: after
 * timeout_ns. */
int pc_match_wait_outgoing(pc_matcher *matcher, uint64_t timeout_ns);
/* As many whole entries as fit, oldest first; they are gone from the outbox. Returns the bytes written;
 * *next_bytes = of the next entry, 0: there is none. */
int64_t pc_match_take_outgoing(pc_matcher *matcher, void *out, uint64_t capacity,
                               uint64_t *next_bytes);

/* cdef-end */

#endif
