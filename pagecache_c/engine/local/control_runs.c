/* control_runs.c - what processes of this node say of runs of blocks: fetch them; I read them.
 *
 * Entered by the loop that owns the client.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/miss/miss.h"

#include <stdlib.h>
#include <string.h>

static int by_first_block(const void *a, const void *b)
{
    const struct pc_run *x = a, *y = b;
    return x->first_block < y->first_block ? -1 : x->first_block > y->first_block;
}

/* Sorts, and merges runs that touch or overlap. Returns how many are left. */
static size_t merge(struct pc_run *runs, size_t n)
{
    size_t kept = 0;
    qsort(runs, n, sizeof *runs, by_first_block);
    for (size_t i = 1; i < n; i++) {
        struct pc_run *last = &runs[kept];
        uint64_t end = last->first_block + last->n_blocks;
        uint64_t other = runs[i].first_block + runs[i].n_blocks;
        if (runs[i].first_block > end)
            runs[++kept] = runs[i];
        else if (other > end)
            last->n_blocks = other - last->first_block;
    }
    return kept + 1;
}

/* Parsed, in range, sorted and disjoint; negative where they are not. *mapping may be NULL. */
static int take_runs(struct pc__session *session, const struct pc__ctl_message *message,
                     struct pc__ctl_runs *head, struct pc_run *runs, struct pc__session_map **mapping)
{
    int n = pc__ctl_parse_runs(message, head, runs, PC__CTL_MAX_RUNS);
    if (n < 0)
        return n;
    *mapping = pc__session_mapping(session, head->mapping_id);
    if (!*mapping)
        return PC_ERR_NO_REGION;
    for (int i = 0; i < n; i++)
        if (!runs[i].n_blocks || runs[i].first_block >= (*mapping)->region->n_blocks ||
            runs[i].n_blocks > (*mapping)->region->n_blocks - runs[i].first_block)
            return PC_ERR_RANGE;
    return n ? (int)merge(runs, (size_t)n) : 0;
}

static void prefetched(struct pc__job *job, int status, uint64_t server_id, const char *text)
{
    (void)server_id;
    pc__session_send(job->session, PC__CTL_REPLY, job->request_id, status, text,
                    text ? strlen(text) + 1 : 0, -1);
}

void pc__session_prefetch(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc__loop *loop = session->loop;
    struct pc_run runs[PC__CTL_MAX_RUNS];
    struct pc__ctl_runs head;
    struct pc__session_map *mapping = NULL;
    int n = take_runs(session, message, &head, runs, &mapping);
    if (n <= 0) {
        pc__session_reply(session, message, n);
        return;
    }
    struct pc__region *region = mapping->region;
    struct pc__generation *generation = mapping->generation;
    struct pc__job *job = NULL;
    pc__count_add(&loop->engine->count.prefetch_requests, 1);
    if (head.wait) {
        job = malloc(sizeof *job + (size_t)n * sizeof runs[0]);
        if (!job) {
            pc__session_reply(session, message, PC_ERR_NO_MEMORY);
            return;
        }
        *job = (struct pc__job){.session = session,
                                .done = prefetched,
                                .mapping_id = mapping->id,
                                .request_id = message->header.request_id,
                                .n_runs = (size_t)n};
        memcpy(job->runs, runs, (size_t)n * sizeof runs[0]);
    }
    struct pc__batch batch;
    pc__batch_init(&batch, false, true);
    uint64_t absent = 0;
    int rc = PC_OK;
    pthread_mutex_lock(&region->lock);
    for (int i = 0; i < n && !generation->complete && !rc; i++) {
        absent += runs[i].n_blocks -
                  pc__blockset_count(&generation->present, runs[i].first_block, runs[i].n_blocks);
        rc = pc__batch_add(&batch, region, generation, runs[i].first_block, runs[i].n_blocks);
    }
    bool waits = job && absent && !rc;
    if (waits) {
        job->remaining_blocks = absent;
        pc__link_push(&generation->jobs, &job->link);
    }
    pthread_mutex_unlock(&region->lock);
    pc__batch_submit(loop, &batch);
    if (!waits) {
        free(job);
        pc__session_reply(session, message, rc);
    }
}

void pc__session_reads(struct pc__session *session, const struct pc__ctl_message *message)
{
    struct pc_run runs[PC__CTL_MAX_RUNS];
    struct pc__ctl_runs head;
    struct pc__session_map *mapping = NULL;
    int n = take_runs(session, message, &head, runs, &mapping);
    if (n <= 0)
        return;
    struct pc__region *region = mapping->region;
    pthread_mutex_lock(&region->lock);
    for (int i = 0; i < n; i++) { /* statistics: what memory is short for is not counted */
        (void)pc__blockset_add(&mapping->generation->touched, runs[i].first_block,
                               runs[i].n_blocks);
        if (region->pages)
            pc__readahead_read(region->pages, runs[i], mapping->exact_reads);
    }
    pc__cache_touched(session->loop->engine, mapping->generation, runs, (size_t)n);
    pthread_mutex_unlock(&region->lock);
}
