/* create.c - a program becomes a mapping that processes share; handles of it. */
#include "match/match.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_TABLE (1u << 24)
#define MOST_WINDOW (1ull << 28)
#define LEAST_HEAP 4096u
#define MOST_HEAP (1ull << 44)

/* ---------------------------------------------------------------- checks */

static int bad(const char *what, uint64_t at)
{
    return pc__fail(PC_ERR_RANGE, "a program's table: %s %llu", what, (unsigned long long)at);
}

static int check_stages(const struct pc_match_tables *t)
{
    for (uint32_t i = 0; i < t->n_stages; i++) {
        const struct pc_match_stage *stage = &t->stages[i];
        if (!stage->n_accesses || stage->first_access > t->n_accesses ||
            stage->n_accesses > t->n_accesses - stage->first_access)
            return bad("the accesses of stage", i);
        for (uint32_t k = 0; k < stage->n_accesses; k++) {
            const struct pc_match_access *access = &t->accesses[stage->first_access + k];
            if (access->dataset >= t->n_datasets)
                return bad("the datasets of stage", i);
            const struct pc_match_dataset *dataset = &t->datasets[access->dataset];
            if (dataset->group != stage->group || dataset->n_partitions != stage->n_tasks)
                return bad("the group of stage", i);
        }
    }
    return PC_OK;
}

static int check_steps(const struct pc_match_tables *t)
{
    for (uint32_t i = 0; i < t->n_steps; i++) {
        const struct pc_match_step *step = &t->steps[i];
        bool runs = step->op == PC_MATCH_RUN || step->op == PC_MATCH_DECIDE;
        if (step->op < PC_MATCH_RUN || step->op > PC_MATCH_REPEAT)
            return bad("the operation of step", i);
        if (step->arg < 0 || (uint32_t)step->arg >= (runs ? t->n_stages : t->n_counters))
            return bad("the argument of step", i);
        if (step->then < -1 || step->then >= (int32_t)t->n_steps || step->other < -1 ||
            step->other >= (int32_t)t->n_steps)
            return bad("what comes after step", i);
    }
    return PC_OK;
}

/* Groups are numbered from 0, and all datasets of one have as many partitions. */
static int check(const struct pc_match_tables *t, uint64_t window, uint64_t heap_bytes)
{
    if (!t->n_datasets || !t->n_stages || t->n_datasets > MOST_TABLE || t->n_stages > MOST_TABLE ||
        t->n_steps > MOST_TABLE || t->n_counters > MOST_TABLE || t->n_accesses > MOST_TABLE)
        return bad("the number of datasets or stages,", t->n_datasets);
    for (uint32_t i = 0; i < t->n_datasets; i++) {
        if (!t->datasets[i].n_partitions || t->datasets[i].n_partitions > MOST_TABLE ||
            t->datasets[i].group >= t->n_datasets)
            return bad("the partitions of dataset", i);
    }
    if (window < 2 || window > MOST_WINDOW)
        return pc__fail(PC_ERR_RANGE, "a window of %llu stages", (unsigned long long)window);
    if (heap_bytes < LEAST_HEAP || heap_bytes > MOST_HEAP)
        return pc__fail(PC_ERR_RANGE, "a heap of %llu bytes: it has at least %u",
                        (unsigned long long)heap_bytes, LEAST_HEAP);
    int rc = check_stages(t);
    return rc ? rc : check_steps(t);
}

/* ---------------------------------------------------------------- layout */

static uint64_t place(uint64_t *end, uint64_t n, uint64_t each)
{
    uint64_t at = (*end + 63u) & ~(uint64_t)63u;
    *end = at + n * each;
    return at;
}

/* Sizes and offsets; *end is the length without the heap. */
static int lay_out(const struct pc_match_tables *t, uint64_t window, struct pc__match_shared *s,
                   uint64_t *end)
{
    uint64_t n_partitions = 0;
    s->n_datasets = t->n_datasets;
    s->n_accesses = t->n_accesses;
    s->n_stages = t->n_stages;
    s->n_steps = t->n_steps;
    s->n_counters = t->n_counters;
    s->window = window;
    uint32_t *sizes = calloc(t->n_datasets, sizeof *sizes); /* of groups */
    if (!sizes)
        return pc__fail(PC_ERR_NO_MEMORY, "the program's groups");
    bool fits = true;
    for (uint32_t i = 0; i < t->n_datasets; i++) {
        uint32_t group = t->datasets[i].group, n = t->datasets[i].n_partitions;
        fits &= !sizes[group] || sizes[group] == n;
        sizes[group] = n;
        n_partitions += n;
        s->n_groups = group >= s->n_groups ? group + 1u : s->n_groups;
    }
    for (uint32_t i = 0; i < s->n_groups; i++) {
        fits &= sizes[i] != 0;
        s->n_slices += sizes[i];
    }
    free(sizes);
    if (!fits || s->n_slices > MOST_TABLE || n_partitions > MOST_TABLE)
        return bad("the sizes of its groups, of", s->n_groups);
    for (uint32_t i = 0; i < t->n_stages; i++) {
        if (t->stages[i].n_accesses > s->most_accesses)
            s->most_accesses = t->stages[i].n_accesses;
        if (t->stages[i].sends && t->stages[i].n_tasks > s->most_senders)
            s->most_senders = t->stages[i].n_tasks;
    }
    s->most_ready = s->n_slices * PC__MATCH_AHEAD;
    *end = sizeof *s;
    s->datasets_at = place(end, s->n_datasets, sizeof(struct pc__match_dataset));
    s->accesses_at = place(end, s->n_accesses, sizeof(struct pc_match_access));
    s->stages_at = place(end, s->n_stages, sizeof(struct pc_match_stage));
    s->steps_at = place(end, s->n_steps, sizeof(struct pc_match_step));
    s->counters_at = place(end, s->n_counters, sizeof(int64_t));
    s->groups_at = place(end, s->n_groups, sizeof(struct pc__match_group));
    s->slices_at = place(end, s->n_slices, sizeof(struct pc__match_slice));
    s->partitions_at = place(end, n_partitions, sizeof(struct pc__match_partition));
    s->instances_at = place(end, window, sizeof(struct pc__match_instance));
    s->needs_at = place(end, window * s->most_accesses, sizeof(struct pc__match_need));
    s->ready_at = place(end, s->most_ready, sizeof(struct pc_match_ready));
    s->n_partitions = n_partitions;
    s->memories_at = place(end, n_partitions, sizeof(struct pc__match_memory));
    s->generations_at = place(end, n_partitions, sizeof(uint64_t));
    *end = (*end + 63u) & ~(uint64_t)63u;
    return PC_OK;
}

static void fill_tables(pc_matcher *m, const struct pc_match_tables *t)
{
    struct pc__match_shared *s = m->shared;
    memcpy(pc__match_at(m, s->accesses_at), t->accesses, t->n_accesses * sizeof *t->accesses);
    memcpy(pc__match_stage(m, 0), t->stages, t->n_stages * sizeof *t->stages);
    if (t->n_steps)
        memcpy(pc__match_step(m, 0), t->steps, t->n_steps * sizeof *t->steps);
    for (uint32_t i = 0; i < t->n_datasets; i++) {
        struct pc__match_group *group = pc__match_group(m, t->datasets[i].group);
        struct pc__match_dataset *dataset = pc__match_dataset(m, i);
        dataset->n_partitions = t->datasets[i].n_partitions;
        dataset->group = t->datasets[i].group;
        dataset->place = group->n_datasets++;
        group->n_slices = dataset->n_partitions;
    }
    uint32_t n = 0;
    uint64_t n_partitions = 0;
    for (uint32_t g = 0; g < s->n_groups; g++) {
        struct pc__match_group *group = pc__match_group(m, g);
        group->first_slice = n;
        for (uint32_t i = 0; i < group->n_slices; i++) {
            struct pc__match_slice *slice = pc__match_slice(m, n++);
            slice->group = g;
            slice->index = i;
            slice->first_partition = n_partitions;
            n_partitions += group->n_datasets;
        }
    }
}

static int make_lock(struct pc__match_shared *s)
{
    pthread_mutexattr_t how;
    int error = pthread_mutexattr_init(&how);
    if (!error)
        error = pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    if (!error)
        error = pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    if (!error)
        error = pthread_mutex_init(&s->lock, &how);
    (void)pthread_mutexattr_destroy(&how);
    errno = error;
    return error ? pc__fail(PC_ERR_SYSTEM, "the matcher's mutex") : PC_OK;
}

/* --------------------------------------------------------------- handles */

static int end_of_half_made(pc_matcher *m, int rc)
{
    (void)pc_match_close_handle(m);
    return rc;
}

/* Maps m->fd. */
static int map(pc_matcher *m, uint64_t n_bytes)
{
    m->base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m->fd, 0);
    if (m->base == MAP_FAILED) {
        m->base = NULL;
        return pc__fail_errno("mmap of the matcher, %llu bytes", (unsigned long long)n_bytes);
    }
    m->shared = (struct pc__match_shared *)m->base;
    return PC_OK;
}

/* What a process has of its own. */
static int make_local(pc_matcher *m)
{
    const struct pc__match_shared *s = m->shared;
    const uint64_t n_partitions = s->n_partitions;
    m->kernels = calloc(s->n_stages, sizeof *m->kernels);
    m->partitions = calloc(n_partitions, sizeof *m->partitions);
    m->partition_bytes = calloc(n_partitions, sizeof *m->partition_bytes);
    if (!m->kernels || !m->partitions || !m->partition_bytes)
        return pc__fail(PC_ERR_NO_MEMORY, "the matcher's partitions");
    return PC_OK;
}

PC_API int pc_match_create(const struct pc_match_tables *tables, uint64_t window,
                           uint64_t heap_bytes, pc_matcher **out)
{
    struct pc__match_shared layout = {.magic = PC__MATCH_MAGIC, .oldest = 1, .limit = UINT64_MAX};
    uint64_t heap_at = 0;
    int rc = check(tables, window, heap_bytes);
    if (!rc)
        rc = lay_out(tables, window, &layout, &heap_at);
    if (rc)
        return rc;
    heap_bytes &= ~(uint64_t)63u;
    layout.n_bytes = heap_at + heap_bytes;
    layout.step = tables->n_steps ? 0 : -1;
    layout.last_stage = -1;
    pc_matcher *m = calloc(1, sizeof *m);
    if (!m)
        return pc__fail(PC_ERR_NO_MEMORY, "a matcher");
    m->fd = memfd_create("clamor-matcher", MFD_CLOEXEC);
    if (m->fd < 0)
        return end_of_half_made(m, pc__fail_errno("memfd_create of the matcher"));
    if (ftruncate(m->fd, (off_t)layout.n_bytes))
        return end_of_half_made(m, pc__fail_errno("ftruncate of the matcher"));
    rc = map(m, layout.n_bytes);
    if (rc)
        return end_of_half_made(m, rc);
    *m->shared = layout;
    rc = make_lock(m->shared);
    if (rc)
        return end_of_half_made(m, rc);
    fill_tables(m, tables);
    pc__heap_init(m, heap_at, heap_bytes);
    rc = make_local(m);
    if (rc)
        return end_of_half_made(m, rc);
    pc__match_extend(m);
    *out = m;
    return PC_OK;
}

PC_API int pc_match_attach(int fd, pc_matcher **out)
{
    struct stat file;
    pc_matcher *m = calloc(1, sizeof *m);
    if (!m)
        return pc__fail(PC_ERR_NO_MEMORY, "a matcher");
    m->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (m->fd < 0 || fstat(m->fd, &file))
        return end_of_half_made(m, pc__fail_errno("the matcher's descriptor %d", fd));
    if ((uint64_t)file.st_size < sizeof(struct pc__match_shared))
        return end_of_half_made(m, pc__fail(PC_ERR_PROTOCOL, "descriptor %d has no matcher", fd));
    int rc = map(m, (uint64_t)file.st_size);
    if (rc)
        return end_of_half_made(m, rc);
    if (m->shared->magic != PC__MATCH_MAGIC || m->shared->n_bytes != (uint64_t)file.st_size) {
        munmap(m->base, (size_t)file.st_size);
        m->base = NULL;
        return end_of_half_made(m, pc__fail(PC_ERR_PROTOCOL, "descriptor %d has no matcher", fd));
    }
    rc = make_local(m);
    if (rc)
        return end_of_half_made(m, rc);
    *out = m;
    return PC_OK;
}

PC_API int pc_match_fd(pc_matcher *m)
{
    return m->fd;
}

PC_API int pc_match_shut(pc_matcher *m)
{
    atomic_store(&m->is_shut, 1u);
    pc__match_wake_all(m);
    return PC_OK;
}

static void free_handle(pc_matcher *m)
{
    if (m->fd >= 0)
        close(m->fd);
    free(m->kernels);
    free(m->partitions);
    free(m->partition_bytes);
    free(m);
}

PC_API int pc_match_close_handle(pc_matcher *m)
{
    if (m->base)
        munmap(m->base, m->shared->n_bytes);
    free_handle(m);
    return PC_OK;
}

PC_API int pc_match_discard(pc_matcher *m)
{
    const struct pc__match_heap *heap = &m->shared->heap;
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = (heap->begin + page - 1u) & ~(page - 1u);
    uint64_t end = (heap->begin + heap->n_bytes) & ~(page - 1u);
    int rc = pc__match_lock(m);
    const bool is_locked = !rc;
    m->shared->is_discarded = 1; /* where the lock cannot be had nobody goes on anyhow */
    if (end > first && madvise(m->base + first, end - first, MADV_REMOVE))
        rc = pc__fail_errno("madvise of the matcher's memory");
    else
        rc = PC_OK;
    if (is_locked)
        pc__match_unlock(m);
    free_handle(m);
    return rc;
}

PC_API int pc_match_stop(pc_matcher *m)
{
    atomic_store(&m->shared->is_stopped, 1u);
    pc__match_wake_all(m);
    return PC_OK;
}

PC_API int pc_match_set_kernel(pc_matcher *m, uint32_t stage, pc_match_kernel kernel)
{
    if (stage >= m->shared->n_stages)
        return pc__fail(PC_ERR_RANGE, "a kernel for stage %u of %u", stage, m->shared->n_stages);
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    m->kernels[stage] = kernel;
    pc__match_unlock(m);
    return PC_OK;
}

PC_API int pc_match_set_partition(pc_matcher *m, uint32_t dataset, uint32_t index, void *address,
                                  uint64_t n_bytes)
{
    if (dataset >= m->shared->n_datasets || index >= pc__match_dataset(m, dataset)->n_partitions)
        return pc__fail(PC_ERR_RANGE, "the address of partition %u of dataset %u", index, dataset);
    const struct pc__match_dataset *info = pc__match_dataset(m, dataset);
    int rc = pc__match_lock(m);
    if (rc)
        return rc;
    const struct pc__match_group *group = pc__match_group(m, info->group);
    uint64_t at = pc__match_slice(m, group->first_slice + index)->first_partition + info->place;
    m->partitions[at] = address;
    m->partition_bytes[at] = n_bytes;
    pc__match_unlock(m);
    return PC_OK;
}
