/* disk_jobs.c - threads that read and write files on disk, so that no loop waits for one.
 *
 * A job is run once, in its turn: urgent reads first, then other reads, then writes. Several run at once, for
 * disks are faster then. Threads begin with the first jobs: who has none has no threads. When the engine stops,
 * the jobs that are left are run too, and told so (no memory to read into).
 *
 * A disk may hang, and with it a thread. So who waits for a read is told when that is late, and goes elsewhere;
 * what the read brings, if it ever does, is dropped.
 *
 * Locks: lock; no job runs under it. `late` posts mail under it.
 */
#include "engine/core/core.h"

#include <signal.h>
#include <stdlib.h>

#define STUCK_NS 1000000000ull /* the next one waits so long: the disk does not get on */

void pc__disk_jobs_open(struct pc__disk_jobs *jobs)
{
    pthread_mutex_init(&jobs->lock, NULL);
    pthread_cond_init(&jobs->wake, NULL);
    for (int rank = 0; rank < PC__DISK_RANKS; rank++)
        pc__link_init(&jobs->waiting[rank]);
    pc__link_init(&jobs->reads);
}

/* Locked: the next one, or NULL. */
static struct pc__disk_job *next(const struct pc__disk_jobs *jobs)
{
    for (int rank = PC__DISK_RANKS - 1; rank >= 0; rank--)
        if (!pc__link_empty(&jobs->waiting[rank]))
            return pc__of(jobs->waiting[rank].next, struct pc__disk_job, link);
    return NULL;
}

/* Locked. */
static void run_next(struct pc__disk_jobs *jobs, struct pc__disk_job *job, uint8_t *some)
{
    const bool is_read = job->late != NULL;
    uint8_t *into = jobs->stopping ? NULL : some;
    pc__link_remove(&job->link);
    pthread_mutex_unlock(&jobs->lock);
    job->run(job, into);
    pthread_mutex_lock(&jobs->lock);
    pc__count_sub(&jobs->n_reads, is_read);
}

struct thread {
    struct pc__disk_jobs *jobs;
    uint8_t *some;
};

static void *run(void *arg)
{
    const struct thread self = *(struct thread *)arg;
    struct pc__disk_jobs *jobs = self.jobs;
    free(arg);
    pthread_mutex_lock(&jobs->lock);
    for (struct pc__disk_job *job; (job = next(jobs)) || !jobs->stopping;) {
        if (job) {
            run_next(jobs, job, self.some);
            continue;
        }
        jobs->n_idle++;
        pthread_cond_wait(&jobs->wake, &jobs->lock);
        jobs->n_idle--;
    }
    pthread_mutex_unlock(&jobs->lock);
    return NULL;
}

/* Locked. */
static void begin_thread(struct pc__disk_jobs *jobs)
{
    const unsigned n = jobs->n_threads;
    struct thread *self = malloc(sizeof *self);
    sigset_t all, before; /* signals belong to Python's main thread */
    if (!jobs->buffers[n])
        jobs->buffers[n] = aligned_alloc(PC_BLOCK_BYTES, PC__DISK_JOB_BYTES);
    if (!self || !jobs->buffers[n]) {
        free(self);
        return;
    }
    *self = (struct thread){jobs, jobs->buffers[n]};
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    if (pthread_create(&jobs->threads[n], NULL, run, self))
        free(self);
    else
        (void)pthread_setname_np(jobs->threads[jobs->n_threads++], "clamor-disk");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

bool pc__disk_job_run(struct pc_engine *engine, struct pc__disk_job *job, enum pc__disk_rank rank)
{
    struct pc__disk_jobs *jobs = &engine->disk_jobs;
    job->late_ns = job->late ? pc__now_ns() + engine->fetch_timeout_ns : 0;
    pthread_mutex_lock(&jobs->lock);
    if (!jobs->n_idle && jobs->n_threads < PC__DISK_THREADS && !jobs->stopping)
        begin_thread(jobs);
    const bool is_taken = !jobs->stopping && jobs->n_threads;
    if (is_taken) {
        pc__link_push(&jobs->waiting[rank], &job->link);
        if (job->late)
            pc__link_push(&jobs->reads, &job->all);
        pc__count_add(&jobs->n_reads, job->late != NULL);
        pthread_cond_signal(&jobs->wake);
    }
    pthread_mutex_unlock(&jobs->lock);
    return is_taken;
}

void pc__disk_job_ends(struct pc_engine *engine, struct pc__disk_job *job)
{
    pthread_mutex_lock(&engine->disk_jobs.lock);
    pc__link_remove(&job->all);
    pthread_mutex_unlock(&engine->disk_jobs.lock);
}

void pc__disk_job_hurry(struct pc_engine *engine, bool (*is_it)(const struct pc__disk_job *job, void *arg),
                        void *arg)
{
    struct pc__disk_jobs *jobs = &engine->disk_jobs;
    if (!pc__count_get(&jobs->n_reads))
        return;
    pthread_mutex_lock(&jobs->lock);
    pc__each(link, &jobs->waiting[PC__DISK_READ])
    {
        if (!is_it(pc__of(link, struct pc__disk_job, link), arg))
            continue;
        pc__link_remove(link);
        pc__link_push(&jobs->waiting[PC__DISK_URGENT], link);
        break;
    }
    pthread_mutex_unlock(&jobs->lock);
}

/* Locked: the time of the oldest read that is not late yet, or UINT64_MAX. */
static uint64_t next_late_ns(struct pc__disk_jobs *jobs)
{
    pc__each(link, &jobs->reads)
    {
        const struct pc__disk_job *job = pc__of(link, struct pc__disk_job, all);
        if (job->late_ns)
            return job->late_ns;
    }
    return UINT64_MAX;
}

bool pc__disk_jobs_stuck(struct pc_engine *engine)
{
    struct pc__disk_jobs *jobs = &engine->disk_jobs;
    if (!pc__count_get(&jobs->n_reads))
        return false;
    pthread_mutex_lock(&jobs->lock);
    const bool is_empty = pc__link_empty(&jobs->reads);
    const uint64_t late_ns = is_empty ? 0 : pc__of(jobs->reads.next, struct pc__disk_job, all)->late_ns;
    pthread_mutex_unlock(&jobs->lock);
    return !is_empty && (!late_ns || pc__now_ns() + engine->fetch_timeout_ns > late_ns + STUCK_NS);
}

uint64_t pc__disk_jobs_deadline(const struct pc__loop *loop)
{
    struct pc__disk_jobs *jobs = &loop->engine->disk_jobs;
    if (loop->index || !pc__count_get(&jobs->n_reads))
        return UINT64_MAX;
    pthread_mutex_lock(&jobs->lock);
    const uint64_t at_ns = next_late_ns(jobs);
    pthread_mutex_unlock(&jobs->lock);
    return at_ns;
}

void pc__disk_jobs_tick(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc__disk_jobs *jobs = &loop->engine->disk_jobs;
    if (loop->index || !pc__count_get(&jobs->n_reads))
        return;
    pthread_mutex_lock(&jobs->lock);
    pc__each(link, &jobs->reads)
    {
        struct pc__disk_job *job = pc__of(link, struct pc__disk_job, all);
        if (job->late_ns > now_ns)
            break;
        if (job->late_ns && job->late(job))
            job->late_ns = 0;
    }
    pthread_mutex_unlock(&jobs->lock);
}

void pc__disk_jobs_stop(struct pc__disk_jobs *jobs)
{
    pthread_mutex_lock(&jobs->lock);
    jobs->stopping = true;
    const unsigned n = jobs->n_threads; /* no more begin from here on */
    jobs->n_threads = 0;
    pthread_cond_broadcast(&jobs->wake);
    pthread_mutex_unlock(&jobs->lock);
    for (unsigned i = 0; i < n; i++)
        pthread_join(jobs->threads[i], NULL);
}

void pc__disk_jobs_close(struct pc__disk_jobs *jobs)
{
    for (unsigned i = 0; i < PC__DISK_THREADS; i++)
        free(jobs->buffers[i]);
    pthread_cond_destroy(&jobs->wake);
    pthread_mutex_destroy(&jobs->lock);
}
