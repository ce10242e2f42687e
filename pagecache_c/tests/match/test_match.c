/* test_match.c - the matcher in C: its heap, its lock when a process dies, its waits, kernels, and what it
 * refuses. That it does what the model does, tests/recipes/test_matcher.py looks at. */
#include "tests/support/check.h"
#include "match/match.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000ull
#define OK(call) CHECK((call) == 0, "%s", pc_last_message())

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

/* A loop of `rounds`: x (n partitions) sends to v (one), v sends to x. */
enum { X = 0, V = 1 };
static int64_t rounds = 3;

static pc_matcher *new_matcher(uint32_t n, uint64_t window, uint64_t heap_bytes)
{
    const struct pc_match_dataset datasets[] = {{n, 0}, {1, 1}};
    const struct pc_match_access accesses[] = {{X, 1}, {V, 1}};
    const struct pc_match_stage stages[] = {{n, 0, 0, 1, 1, 0}, {1, 1, 1, 1, 1, 0}, {n, 0, 0, 1, 0, 0}};
    const struct pc_match_step steps[] = {{PC_MATCH_CLEAR, 0, 1, -1, 0},
                                          {PC_MATCH_REPEAT, 0, 2, 4, rounds},
                                          {PC_MATCH_RUN, 0, 3, -1, 0},
                                          {PC_MATCH_RUN, 1, 1, -1, 0},
                                          {PC_MATCH_RUN, 2, -1, -1, 0}};
    const struct pc_match_tables tables = {.datasets = datasets, .accesses = accesses,
                                           .stages = stages, .steps = steps, .n_datasets = 2,
                                           .n_accesses = 2, .n_stages = 3, .n_steps = 5,
                                           .n_counters = 1};
    pc_matcher *m = NULL;
    OK(pc_match_create(&tables, window, heap_bytes, &m));
    REQUIRE(m);
    return m;
}

static void add_all(pc_matcher *m, uint32_t n)
{
    const uint64_t state[2][7] = {{1, 0, X, 0, 0, 0, 0}, {1, 0, V, 0, 0, 0, 0}};
    for (uint32_t i = 0; i < n; i++)
        OK(pc_match_add(m, 0, i, state[X], sizeof state[X]));
    OK(pc_match_add(m, 1, 0, state[V], sizeof state[V]));
}

/* ------------------------------------------------------------------ heap */

static void test_heap(unsigned seed)
{
    enum { N = 64 };
    pc_matcher *m = new_matcher(2, 4, 64 << 10);
    uint64_t at[N] = {0}, length[N] = {0};
    uint64_t n_full = 0;
    for (int step = 0; step < 20000; step++) {
        unsigned i = (unsigned)rand_r(&seed) % N;
        if (at[i]) {
            const uint8_t *bytes = pc__match_at(m, at[i]);
            for (uint64_t k = 0; k < length[i]; k++)
                CHECK(bytes[k] == (uint8_t)(i * 7), "byte %u of block %u", (unsigned)k, i);
            pc__heap_give(m, at[i]);
            at[i] = 0;
        } else {
            length[i] = (uint64_t)rand_r(&seed) % (rand_r(&seed) % 8 ? 200 : 9000);
            at[i] = pc__heap_take(m, length[i]);
            n_full += !at[i];
            if (at[i])
                memset(pc__match_at(m, at[i]), (int)(uint8_t)(i * 7), length[i]);
        }
        const char *broken = step % 16 ? NULL : pc__heap_audit(m);
        CHECK(!broken, "%s", broken);
    }
    CHECK(n_full > 0, "the heap was never full");
    for (unsigned i = 0; i < N; i++)
        if (at[i])
            pc__heap_give(m, at[i]);
    CHECK(!pc__heap_audit(m), "%s", pc__heap_audit(m));
    CHECK(m->shared->heap.used_bytes == 0, "%u", (unsigned)m->shared->heap.used_bytes);
    uint64_t whole = pc__heap_take(m, (48 << 10)); /* what was in pieces is one again */
    CHECK(whole, "the heap stays in pieces");
    CHECK(!pc__heap_take(m, 1ull << 40), "more than there is");
    CHECK(!pc__heap_take(m, UINT64_MAX), "more than there can be");
    pc_match_close_handle(m);
}

/* --------------------------------------------------------------- kernels */

static int count_and_send(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    uint64_t *value = partitions[0];
    if (n_bytes[0] != sizeof *value)
        return -1000;
    for (uint64_t i = 0; i < task->n_messages; i++)
        *value = *value * 31u + *(const uint64_t *)task->messages[i].data + task->messages[i].sender;
    if (task->n_next == 1)
        return task->send(task, 0, value, sizeof *value);
    return task->n_next ? task->broadcast(task, value, sizeof *value) : 0;
}

static int fail_at_one(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)partitions, (void)n_bytes;
    return task->index == 1 ? -77 : 0;
}

static int send_too_far(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)partitions, (void)n_bytes;
    (void)pc_match_send(task, task->n_next, "x", 1);
    return 0;
}

struct runner {
    pc_matcher *m;
    uint64_t n_ran;
};

static void *run_kernels(void *arg)
{
    struct runner *runner = arg;
    struct pc_match_ready out[4];
    struct pc_match_ran ran;
    while (!pc_match_is_complete(runner->m)) {
        OK(pc_match_run(runner->m, 4, SECOND_NS / 100, out, &ran));
        CHECK(!ran.failed_code && !ran.n_tasks, "failed %d", (int)ran.failed_code);
        runner->n_ran += ran.n_ran;
    }
    return NULL;
}

/* The same values, whatever the number of threads. */
static uint64_t run_with(uint32_t n, int n_threads, int by_fd)
{
    uint64_t values[64] = {0}, value = 0;
    pc_matcher *m = new_matcher(n, 1000, 1 << 20);
    struct runner runners[4];
    pthread_t threads[4];
    for (int t = 0; t < n_threads; t++) {
        runners[t] = (struct runner){.m = m};
        if (by_fd)
            OK(pc_match_attach(pc_match_fd(m), &runners[t].m));
        for (uint32_t i = 0; i < n; i++)
            OK(pc_match_set_partition(runners[t].m, X, i, &values[i], sizeof values[i]));
        OK(pc_match_set_partition(runners[t].m, V, 0, &value, sizeof value));
        for (uint32_t stage = 0; stage < 3; stage++)
            OK(pc_match_set_kernel(runners[t].m, stage, count_and_send));
    }
    for (uint32_t i = 0; i < n; i++)
        values[i] = i + 1u;
    add_all(m, n);
    uint64_t n_ran = 0, sum = 0;
    for (int t = 0; t < n_threads; t++)
        CHECK(!pthread_create(&threads[t], NULL, run_kernels, &runners[t]), "a thread");
    for (int t = 0; t < n_threads; t++) {
        pthread_join(threads[t], NULL);
        n_ran += runners[t].n_ran;
        if (by_fd)
            pc_match_close_handle(runners[t].m);
    }
    CHECK(n_ran == (uint64_t)rounds * (n + 1u) + n, "%u tasks", (unsigned)n_ran);
    CHECK(m->shared->heap.used_bytes == 0, "%u bytes are left", (unsigned)m->shared->heap.used_bytes);
    for (uint32_t i = 0; i < n; i++)
        sum = sum * 1000003u + values[i];
    pc_match_close_handle(m);
    return sum * 1000003u + value;
}

static void test_kernels(void)
{
    rounds = 40;
    for (uint32_t n = 1; n < 40; n += 19) {
        uint64_t one = run_with(n, 1, 0);
        CHECK(one, "it computes nothing");
        CHECK(run_with(n, 4, 0) == one, "4 threads, %u partitions", n);
#ifndef __SANITIZE_THREAD__ /* it takes a mutex at four addresses for four */
        CHECK(run_with(n, 4, 1) == one, "4 handles, %u partitions", n);
#endif
    }
    rounds = 3;
}

static void test_kernels_that_fail(void)
{
    struct pc_match_ready out[8];
    struct pc_match_ran ran;
    pc_matcher *m = new_matcher(3, 100, 1 << 16);
    OK(pc_match_set_kernel(m, 0, fail_at_one));
    add_all(m, 3);
    OK(pc_match_run(m, 8, 0, out, &ran));
    CHECK(ran.failed_code == -77 && ran.failed.index == 1 && ran.failed.number == 1, "%d",
          (int)ran.failed_code);
    CHECK(ran.n_ran == 1, "%u have run", (unsigned)ran.n_ran);
    pc_match_close_handle(m);

    m = new_matcher(3, 100, 1 << 16);
    OK(pc_match_set_kernel(m, 0, send_too_far));
    add_all(m, 3);
    OK(pc_match_run(m, 8, 0, out, &ran));
    CHECK(ran.failed_code == PC_ERR_RANGE && ran.failed.index == 0, "%d", (int)ran.failed_code);
    pc_match_close_handle(m);

    m = new_matcher(3, 100, 1 << 16); /* Python has what has no kernel */
    OK(pc_match_set_kernel(m, 1, count_and_send));
    add_all(m, 3);
    OK(pc_match_run(m, 8, 0, out, &ran));
    CHECK(ran.n_tasks == 3 && ran.n_ran == 0 && out[2].index == 2, "%u tasks", (unsigned)ran.n_tasks);
    pc_match_close_handle(m);
}

/* ------------------------------------------------------------- a full heap */

static void test_full_heap(void)
{
    char data[3000] = {0};
    const struct pc_match_sent sent = {0, 0, sizeof data};
    pc_matcher *m = new_matcher(4, 100, 8 << 10);
    add_all(m, 4);
    int rc = PC_OK;
    uint32_t sender = 0;
    for (; sender < 4 && !rc; sender++)
        rc = pc_match_close(m, 2, 1, 0, sender, &sent, 1, data, sizeof data);
    CHECK(rc == PC_ERR_NO_SPACE && sender == 3, "%d at %u", rc, sender);
    CHECK(strstr(pc_last_message(), "is full"), "%s", pc_last_message());
    CHECK(!pc__heap_audit(m), "%s", pc__heap_audit(m));
    uint64_t used = m->shared->heap.used_bytes;
    for (int i = 0; i < 1000; i++)
        CHECK(pc_match_close(m, 2, 1, 0, 2, &sent, 1, data, sizeof data) == PC_ERR_NO_SPACE, "again");
    const struct pc_match_sent two[] = {{0, 0, 10}, {0, 10, sizeof data - 10}};
    CHECK(pc_match_close(m, 2, 1, 0, 2, two, 2, data, sizeof data) == PC_ERR_NO_SPACE, "in part");
    CHECK(m->shared->heap.used_bytes == used, "a refused closing leaves something");
    OK(pc_match_close(m, 2, 1, 0, 2, NULL, 0, NULL, 0)); /* it was not counted before */
    OK(pc_match_close(m, 2, 1, 0, 3, NULL, 0, NULL, 0));
    struct pc_match_ready out[8];
    CHECK(pc_match_take(m, out, 8, 0) == 5, "it may begin now");
    for (uint32_t kind = 0; kind < 100000 && !rc; kind++) /* answers that come early, too */
        rc = pc_match_decide(m, 1000 + kind, 1, kind % 2);
    CHECK(rc == PC_ERR_NO_SPACE, "%d", rc);
    pc_match_close_handle(m);
}

/* ------------------------------------------------------- processes that die */

static void *await_task(void *arg)
{
    struct pc_match_ready out[1];
    int64_t n = pc_match_take(arg, out, 1, 30 * SECOND_NS);
    CHECK(n == PC_ERR_MEMBER || n == PC_ERR_CLOSED, "%d", (int)n);
    return NULL;
}

static void test_killed_in_the_lock(void)
{
    pc_matcher *m = new_matcher(2, 100, 1 << 16);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, await_task, m), "a thread");
    pid_t child = fork();
    if (!child) {
        if (!pc__match_lock(m))
            raise(SIGKILL);
        _exit(1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "the child");
    uint64_t began = now_ns();
    struct pc_match_ready out[8];
    struct pc_match_ran ran;
    struct pc_match_progress progress;
    uint64_t next;
    CHECK(pc_match_take(m, out, 8, 60 * SECOND_NS) == PC_ERR_MEMBER, "%s", pc_last_message());
    pthread_join(thread, NULL);
    CHECK(now_ns() - began < 20 * SECOND_NS, "a wait did not end");
    CHECK(pc_match_finish(m, out, NULL, 0) == PC_ERR_MEMBER, "finish");
    CHECK(pc_match_add(m, 0, 0, "", 0) == PC_ERR_MEMBER, "add");
    CHECK(pc_match_hold(m, 0, 0) == PC_ERR_MEMBER, "hold");
    CHECK(pc_match_decide(m, 1, 1, 1) == PC_ERR_MEMBER, "decide");
    CHECK(pc_match_run(m, 8, SECOND_NS, out, &ran) == PC_ERR_MEMBER, "run");
    CHECK(pc_match_wait_outgoing(m, SECOND_NS) == PC_ERR_MEMBER, "wait_outgoing");
    CHECK(pc_match_take_outgoing(m, out, 8, &next) == PC_ERR_MEMBER, "take_outgoing");
    CHECK(pc_match_progress_of(m, 1, &progress) == PC_ERR_MEMBER, "progress");
    pc_match_close_handle(m);
}

static int nothing(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)task, (void)partitions, (void)n_bytes;
    return 0;
}

/* At any moment: either the others go on, or all are told. */
static void test_killed_anywhere(unsigned seed)
{
    rounds = 1 << 20;
    pc_matcher *m = new_matcher(4, 1000, 1 << 16);
    rounds = 3;
    for (uint32_t stage = 0; stage < 3; stage++)
        OK(pc_match_set_kernel(m, stage, nothing));
    add_all(m, 4);
    pid_t child = fork();
    if (!child) {
        struct pc_match_progress progress;
        struct pc_match_ready out[2];
        struct pc_match_ran ran;
        for (;;) {
            (void)pc_match_run(m, 2, 0, out, &ran);
            (void)pc_match_progress_of(m, 0, &progress);
            (void)pc_match_forget(m, progress.floor);
        }
    }
    struct timespec pause = {0, (long)(rand_r(&seed) % 3000000)};
    nanosleep(&pause, NULL);
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child, "the child");
    struct pc_match_ready out[8];
    int64_t n = pc_match_take(m, out, 8, SECOND_NS / 1000);
    CHECK(n >= 0 || n == PC_ERR_MEMBER, "%d", (int)n);
    CHECK(n < 0 || !pc__heap_audit(m), "%s", pc__heap_audit(m));
    pc_match_close_handle(m);
}

/* ------------------------------------------------------------ waits, refusals */

static void test_waits(void)
{
    pc_matcher *m = new_matcher(2, 100, 1 << 16), *other = NULL;
    struct pc_match_ready out[8];
    uint64_t began = now_ns();
    CHECK(pc_match_take(m, out, 8, SECOND_NS / 50) == 0, "nothing is ready");
    CHECK(pc_match_wait_outgoing(m, SECOND_NS / 50) == 0, "nothing goes out");
    CHECK(now_ns() - began >= SECOND_NS / 25, "a wait was too short");
    OK(pc_match_attach(pc_match_fd(m), &other));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, await_task, other), "a thread");
    OK(pc_match_stop(m));
    pthread_join(thread, NULL);
    CHECK(pc_match_wait_outgoing(other, SECOND_NS) == PC_ERR_CLOSED, "stopped");
    pc_match_close_handle(other);
    pc_match_close_handle(m);
}

/* Two threads hand a slice to each other: each begins when the other's message wakes it. Without wakes a
 * turn takes as long as a sleep, and this ends by its alarm. */
enum { TURNS = 40 };

static void *take_turns(void *arg)
{
    struct pc_match_ready task;
    for (int i = 0; i < TURNS; i++) {
        CHECK(pc_match_take(arg, &task, 1, 20 * SECOND_NS) == 1, "%s", pc_last_message());
        OK(pc_match_decide(arg, task.number, 1, 1));
    }
    return NULL;
}

static void test_wakes(void)
{
    const struct pc_match_dataset dataset = {TURNS, 0};
    const struct pc_match_access access = {0, 1};
    const struct pc_match_stage stage = {TURNS, 0, 0, 1, 0, 0};
    const struct pc_match_step step = {PC_MATCH_RUN, 0, -1, -1, 0};
    const struct pc_match_tables tables = {&dataset, &access, &stage, &step, 1, 1, 1, 1, 0, 0};
    const uint64_t state[] = {1, 0, 0, 0, 0, 0, 0};
    char out[4096];
    uint64_t next;
    pc_matcher *m = NULL;
    pthread_t thread;
    OK(pc_match_create(&tables, 2, 1 << 16, &m));
    alarm(20);
    CHECK(!pthread_create(&thread, NULL, take_turns, m), "a thread");
    for (uint32_t i = 0; i < TURNS; i++) {
        while (!atomic_load(&m->shared->ready_waiters)) /* it sleeps, or is about to */
            sched_yield();
        OK(pc_match_add(m, 0, i, state, sizeof state));
        CHECK(pc_match_wait_outgoing(m, 20 * SECOND_NS) == 1, "%s", pc_last_message());
        CHECK(pc_match_take_outgoing(m, out, sizeof out, &next) > 0, "%s", pc_last_message());
    }
    pthread_join(thread, NULL);
    alarm(0);
    pc_match_close_handle(m);
}

static void test_rest(void)
{
    pc_matcher *m = new_matcher(2, 100, 1 << 16);
    struct pc_match_ready out[8];
    add_all(m, 2);
    CHECK(pc_match_take(m, out, 1, 0) == 1, "one");
    CHECK(pc_match_hold(m, 0, 0) == 0, "it runs");
    CHECK(pc_match_wait_outgoing(m, 0) == 0, "it runs still");
    CHECK(pc_match_close_all(m, out, NULL, 0, NULL, 0, NULL) == 0, "%s", pc_last_message());
    OK(pc_match_finish(m, out, NULL, 1));
    CHECK(pc_match_wait_outgoing(m, 0) == 1, "it has come to rest");
    CHECK(pc_match_finish(m, out, NULL, 1) == PC_ERR_RANGE, "twice");
    pc_match_close_handle(m);
}

static void test_complete_wakes(void)
{
    rounds = 3;
    pc_matcher *m = new_matcher(2, 100, 1 << 16);
    struct pc_match_ready task;
    const uint64_t took_ns = 7;
    uint64_t tallies[2][4] = {{0}};
    add_all(m, 2);
    uint32_t n = 0;
    while (pc_match_take(m, &task, 1, 0) == 1) {
        CHECK(pc_match_wait_outgoing(m, 0) == 0, "a task is left: %u have run", n);
        if (task.stage != 2)
            CHECK(pc_match_close_all(m, &task, NULL, 0, NULL, 0, NULL) == 0, "%s", pc_last_message());
        OK(pc_match_finish(m, &task, &took_ns, 1));
        n++;
    }
    CHECK(n > 2 && pc_match_is_complete(m) == 1, "%u tasks have run", n);
    CHECK(pc_match_wait_outgoing(m, 0) == 1, "nothing is left to run");
    CHECK(pc_match_wait_outgoing(m, 0) == 0, "it is said once");
    CHECK(pc_match_tallies(m, tallies[0], 1) == 3, "of three slices");
    CHECK(pc_match_tallies(m, tallies[0], 2) == 3, "of three slices");
    CHECK(tallies[1][1] == 1 && tallies[1][2] > 1 && tallies[1][3] == 7 * tallies[1][2], "%u tasks, %u ns",
          (unsigned)tallies[1][2], (unsigned)tallies[1][3]);
    pc_match_close_handle(m);
}

/* Who takes leaves as much for each of the others. */
static void test_shares(void)
{
    pc_matcher *m = new_matcher(7, 100, 1 << 16);
    struct pc_match_ready out[8];
    OK(pc_match_set_takers(m, 3));
    add_all(m, 7);
    CHECK(pc_match_take(m, out, 8, 0) == 3, "of 7");
    CHECK(pc_match_take(m, out, 8, 0) == 2, "of 4");
    CHECK(pc_match_take(m, out, 1, 0) == 1, "of 2");
    CHECK(pc_match_take(m, out, 8, 0) == 1, "the last");
    pc_match_close_handle(m);
}

static int add_one(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)task;
    if (n_bytes[0] != 16)
        return -1;
    ((uint64_t *)partitions[0])[1]++;
    return 0;
}

/* Two mappings of the same bytes. */
static void test_memory(void)
{
    pc_matcher *m = new_matcher(2, 100, 4 << 20), *other = NULL;
    struct pc_match_memory first, second;
    struct pc_match_ready out[8];
    struct pc_match_ran ran;
    void *address = NULL, *large = NULL;
    uint64_t n = 0;
    OK(pc_match_attach(pc_match_fd(m), &other));
    OK(pc_match_memory_of(m, X, 1, &first));
    CHECK(!first.address && first.generation == 0, "it has one");
    OK(pc_match_new_memory(m, 64, &address));
    CHECK(!((uintptr_t)address % 64), "it is not aligned");
    memset(address, 0, 64);
    OK(pc_match_set_memory(m, X, 1, address, 64, 32, 16));
    OK(pc_match_memory_of(other, X, 1, &second));
    CHECK(second.address && second.address != address && second.n_bytes == 64, "the other's");
    CHECK(pc_match_generations(other, &n)[1] == 1 && n == 3, "%u generations", (unsigned)n);
    /* A kernel of the one changes what the other reads. */
    const uint64_t state[] = {1, 0, X, 0, 0, 0, 0};
    OK(pc_match_set_kernel(m, 0, add_one));
    OK(pc_match_add(m, 0, 1, state, sizeof state));
    OK(pc_match_run(m, 8, 0, out, &ran));
    CHECK(ran.n_ran == 1 && !ran.failed_code, "%u", (unsigned)ran.n_ran);
    CHECK(((uint64_t *)second.address)[5] == 1, "the kernel has not changed it");
    /* The same in place, another one, none: each time it is another generation, and nothing leaks. */
    OK(pc_match_set_memory(m, X, 1, address, 64, 0, 64));
    OK(pc_match_new_memory(other, 1 << 20, &large));
    memset(large, 7, 1 << 20);
    OK(pc_match_set_memory(other, X, 1, large, 1 << 20, 0, 1 << 20));
    CHECK(pc_match_generations(m, &n)[1] == 3, "the third");
    CHECK(!pc__heap_audit(m), "%s", pc__heap_audit(m));
    OK(pc_match_set_memory(m, X, 1, NULL, 0, 0, 0));
    CHECK(!pc__heap_audit(m), "%s", pc__heap_audit(m));
    OK(pc_match_new_memory(m, 1 << 20, &large));
    uint64_t zeros = 0;
    for (uint64_t i = 0; i < 1 << 20; i++)
        zeros += !((uint8_t *)large)[i];
    CHECK(zeros > (1 << 20) - 8192, "its pages were not given back: %u zeros", (unsigned)zeros);
    CHECK(pc_match_new_memory(m, 4 << 20, &large) == PC_ERR_NO_SPACE, "it is full");
    CHECK(pc_match_new_memory(m, 0, &large) == PC_ERR_RANGE, "of nothing");
    CHECK(pc_match_set_memory(m, X, 2, NULL, 0, 0, 0) == PC_ERR_RANGE, "no such partition");
    CHECK(pc_match_set_memory(m, X, 1, &n, 8, 0, 8) == PC_ERR_RANGE, "not of the matcher");
    CHECK(pc_match_set_memory(m, X, 1, NULL, 8, 4, 8) == PC_ERR_RANGE, "data that is not in it");
    CHECK(pc_match_memory_of(m, 2, 0, &first) == PC_ERR_RANGE, "no such dataset");
    /* At the end of a job its memory goes, and what points into it reads zeros. */
    OK(pc_match_new_memory(m, 1 << 20, &large));
    memset(large, 7, 1 << 20);
    pc_match_close_handle(other);
    OK(pc_match_discard(m));
    CHECK(((uint8_t *)large)[8192] == 0, "it has something still");
}

static void test_refusals(void)
{
    pc_matcher *m = new_matcher(2, 100, 1 << 16);
    const uint64_t good[] = {1, 1, X, 0, 0, 0, 0, 1, 1, 1, 0, 0, 3};
    uint64_t state[14];
    const struct pc_match_ready wild = {UINT64_MAX, 7, UINT64_MAX};
    const struct pc_match_sent far = {0, 5, UINT64_MAX};
    for (size_t i = 0; i < sizeof good / 8; i++) { /* each number wrong in turn */
        for (int how = 0; how < 2; how++) {
            memset(state, 0, sizeof state);
            memcpy(state, good, sizeof good);
            state[i] = how ? UINT64_MAX : 9;
            bool may = i == 3 || i == 7; /* a writer, a number */
            int rc = pc_match_add(m, 0, 0, state, sizeof good + 3);
            CHECK(rc == PC_ERR_RANGE || may, "%d: number %u", rc, (unsigned)i);
            if (!rc) {
                (void)pc_match_hold(m, 0, 0);
                CHECK(pc_match_remove(m, 0, 0, state, sizeof state) > 0, "%s", pc_last_message());
            }
        }
    }
    for (size_t n = 0; n < sizeof good + 3; n++)
        CHECK(pc_match_add(m, 0, 0, good, n) == PC_ERR_RANGE, "cut to %u", (unsigned)n);
    CHECK(pc_match_add(m, 2, 0, good, sizeof good) == PC_ERR_RANGE, "group");
    CHECK(pc_match_add(m, 0, 2, good, sizeof good) == PC_ERR_RANGE, "index");
    CHECK(pc_match_hold(m, 0, 0) == PC_ERR_RANGE, "hold");
    CHECK(pc_match_remove(m, 0, 0, NULL, 0) == PC_ERR_RANGE, "remove");
    CHECK(pc_match_finish(m, &wild, NULL, 1) == PC_ERR_RANGE, "finish");
    CHECK(pc_match_messages(m, &wild, NULL, 0) == PC_ERR_RANGE, "messages");
    CHECK(pc_match_close_all(m, &wild, NULL, 0, NULL, 0, NULL) == PC_ERR_RANGE, "close_all");
    CHECK(pc_match_close(m, 2, 1, 0, 0, &far, 1, "abcdef", 6) == PC_ERR_RANGE, "far");
    CHECK(pc_match_close(m, 2, 1, 0, 2, NULL, 0, NULL, 0) == PC_ERR_RANGE, "sender");
    CHECK(pc_match_close(m, 2, 1, 1, 0, NULL, 0, NULL, 0) == PC_ERR_RANGE, "receiver");
    CHECK(pc_match_next_stage(m, UINT64_MAX) == 3, "the next of the last");
    CHECK(pc_match_set_kernel(m, 3, nothing) == PC_ERR_RANGE, "kernel");
    CHECK(pc_match_set_partition(m, 1, 1, NULL, 0) == PC_ERR_RANGE, "partition");
    OK(pc_match_forget(m, UINT64_MAX));
    CHECK(!pc__heap_audit(m), "%s", pc__heap_audit(m));
    CHECK(m->shared->heap.used_bytes == 0, "%u bytes are left", (unsigned)m->shared->heap.used_bytes);
    pc_match_close_handle(m);
    pc_matcher *none = NULL;
    CHECK(pc_match_attach(-1, &none) < 0, "no descriptor");
    CHECK(pc_match_attach(0, &none) < 0 && !none, "no matcher");
    const struct pc_match_dataset dataset = {1, 0};
    const struct pc_match_access access = {0, 1};
    const struct pc_match_stage stage = {1, 0, 0, 1, 0, 0};
    struct pc_match_step step = {PC_MATCH_CLEAR, 0, 0, -1, 0}; /* a circle without a stage */
    struct pc_match_tables tables = {&dataset, &access, &stage, &step, 1, 1, 1, 1, 1, 0};
    OK(pc_match_create(&tables, 2, 4096, &none));
    pc_match_close_handle(none);
    step.arg = 1;
    CHECK(pc_match_create(&tables, 2, 4096, &none) == PC_ERR_RANGE, "counter");
    step = (struct pc_match_step){PC_MATCH_RUN, 0, 1, -1, 0};
    CHECK(pc_match_create(&tables, 2, 4096, &none) == PC_ERR_RANGE, "step");
    step.then = -1;
    CHECK(pc_match_create(&tables, 1, 4096, &none) == PC_ERR_RANGE, "window");
    CHECK(pc_match_create(&tables, 2, 4095, &none) == PC_ERR_RANGE, "heap");
}

int main(void)
{
    for (unsigned seed = 1; seed < 5; seed++)
        test_heap(seed);
    test_kernels();
    test_kernels_that_fail();
    test_full_heap();
    test_waits();
    test_wakes();
    test_rest();
    test_complete_wakes();
    test_shares();
    test_memory();
    test_refusals();
    test_killed_in_the_lock();
    for (unsigned seed = 1; seed < 20; seed++)
        test_killed_anywhere(seed);
    return test_result();
}
