/* kernels.c - kernels for bench/recipes.py: one that does nothing, and one that takes its time.
 *
 * The first members of struct pc_match_task, and no more of it, are declared here as a user's own file
 * would: nothing of the library is linked.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct pc_match_message {
    const void *data;
    uint64_t n_bytes;
    uint64_t sender;
};
struct pc_match_task {
    uint64_t number;
    uint32_t stage, index, n_tasks, n_next;
    uint64_t n_messages;
    const struct pc_match_message *messages;
    int (*send)(struct pc_match_task *task, uint32_t index, const void *data, uint64_t n_bytes);
    int (*broadcast)(struct pc_match_task *task, const void *data, uint64_t n_bytes);
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int nothing(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)task, (void)partitions, (void)n_bytes;
    return 0;
}

static uint64_t ns, spent_ns;

void take_ns(uint64_t wanted)
{
    ns = wanted;
    spent_ns = 0;
}
uint64_t spent(void)
{
    return spent_ns;
}

/* What it has taken is added up: it cannot end at the very nanosecond. */
int take_time(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)task, (void)partitions, (void)n_bytes;
    uint64_t began = now_ns(), now = began;
    while (now - began < ns)
        now = now_ns();
    spent_ns += now - began;
    return 0;
}

/* Sums what has come, and sends 8 bytes on: to all from one, else to one. */
int pass_on(struct pc_match_task *task, void **partitions, const size_t *n_bytes)
{
    (void)partitions, (void)n_bytes;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < task->n_messages; i++)
        sum += *(const uint64_t *)task->messages[i].data;
    if (!task->n_next)
        return 0;
    if (task->n_next > 1)
        return task->broadcast(task, &sum, sizeof sum);
    return task->send(task, 0, &sum, sizeof sum);
}
