/* fill.c - the last step of every fetch: a block becomes present, and who waits is told.
 *
 * Any loop thread may enter, without locks. The bytes are written first, outside the lock:
 * in_flight keeps everybody else from writing the same blocks. Then, under region.lock, the blocks
 * become present and the waiters are woken.
 *
 * How they are written: by UFFDIO_COPY and UFFDIO_ZEROPAGE through a map of the generation that is
 * registered with the engine's own uffd and that nobody reads. The kernel makes a single page,
 * fills it, and only then puts it into the file: no reader ever sees a part of it. Where the kernel
 * refuses userfaultfd it is pwrite, from memory that this thread has just written. That is weaker:
 * pwrite locks the folio over its copy, but where the source turns out not to be resident in the
 * middle of it (swapped or migrated in that microsecond), the kernel shows the folio with zeros for
 * the rest and then tries again (seen on Linux 6.18 with a source in Ray's store).
 *
 * Relies on: a thread that was woken touches again and takes an ordinary minor fault.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/miss/miss.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A SIGSEGV client unprotects what the answer names: at most this much around the fault. */
#define SLOT_ANSWER_BLOCKS 64u
#define ZEROS_AT_ONCE 16u /* by pwrite, from the stack */

void pc__fill_answer_slot(const struct pc__generation *generation, const struct pc__waiter *waiter,
                          int status)
{
    struct pc__slot *slot = &waiter->session->page->slots[waiter->slot];
    if (!pc__turn_hold(waiter->session))
        return; /* its newer connection answers, and then it may be another thread's */
    slot->status = status;
    if (!status) {
        uint64_t n_blocks = generation->present.n_blocks;
        uint64_t first = waiter->block, past = waiter->block + 1;
        uint64_t low = first - first % SLOT_ANSWER_BLOCKS;
        uint64_t high = low + SLOT_ANSWER_BLOCKS < n_blocks ? low + SLOT_ANSWER_BLOCKS : n_blocks;
        while (first > low && pc__blockset_has(&generation->present, first - 1))
            first--;
        past = pc__blockset_next_absent(&generation->present, past, high);
        slot->first_address = waiter->mapping_address + (first << PC_BLOCK_SHIFT);
        slot->n_bytes = (past - first) << PC_BLOCK_SHIFT;
    }
    pc__publish(&slot->state, PC__SLOT_DONE); /* with status and range; pairs with the handler */
    pc__turn_release(waiter->session);
    syscall(SYS_futex, &slot->state, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void wake(struct pc_engine *engine, struct pc__region *region,
                 const struct pc__generation *generation, struct pc__waiter *waiter)
{
    if (waiter->slot >= 0) {
        pc__fill_answer_slot(generation, waiter, PC_OK);
    } else {
        struct uffdio_range range = {
            .start = waiter->mapping_address + (waiter->block << PC_BLOCK_SHIFT),
            .len = PC_BLOCK_BYTES};
        /* ENOENT, EINVAL: the mapping went away meanwhile; ESRCH: the process did. */
        (void)ioctl(waiter->session->uffd, UFFDIO_WAKE, &range);
    }
    pc__waiter_ended(engine, region, waiter);
}

/* How many blocks of [first, first + n) the job asked for. */
static uint64_t overlap(const struct pc__job *job, uint64_t first, uint64_t n)
{
    size_t low = 0, high = job->n_runs;
    while (low < high) { /* the first run that ends after first */
        size_t mid = low + (high - low) / 2;
        if (job->runs[mid].first_block + job->runs[mid].n_blocks > first)
            high = mid;
        else
            low = mid + 1;
    }
    uint64_t blocks = 0;
    for (; low < job->n_runs && job->runs[low].first_block < first + n; low++) {
        uint64_t begin = job->runs[low].first_block, end = begin + job->runs[low].n_blocks;
        begin = begin > first ? begin : first;
        end = end < first + n ? end : first + n;
        blocks += end - begin;
    }
    return blocks;
}

/* text: for people, where it failed; or NULL. */
static void finish_job(struct pc__job *job, int status, uint64_t server_id, const char *text)
{
    job->done(job, status, server_id, text);
    pc__link_remove(&job->link);
    free(job);
}

static void now_present(struct pc_engine *engine, struct pc__region *region,
                        struct pc__generation *generation, uint64_t first, uint64_t n, bool fetched)
{
    pthread_mutex_lock(&region->lock);
    /* in_flight had bits in the same words, so these sets' extents exist or are made here. */
    int64_t added = pc__blockset_add(&generation->present, first, n);
    if (added < 0) /* not remembered as present: fetched again when asked for, never wrong */
        generation->has_strays = true;
    else if (!generation->is_layer)
        pc__cache_added(engine, region, generation, first, n);
    if (fetched)
        (void)pc__blockset_add(&generation->fetched, first, n);
    pc__blockset_remove(&generation->in_flight, first, n);
    pc__blockset_remove(&generation->changed_away, first, n);
    pc__each(link, &generation->waiters)
    {
        struct pc__waiter *waiter = pc__of(link, struct pc__waiter, link);
        if (waiter->block < first || waiter->block - first >= n)
            continue;
        pc__cache_awaited(engine, generation, waiter->block);
        wake(engine, region, generation, waiter);
    }
    pc__each(link, &generation->jobs)
    {
        struct pc__job *job = pc__of(link, struct pc__job, link);
        uint64_t done = overlap(job, first, n);
        job->remaining_blocks -= done < job->remaining_blocks ? done : job->remaining_blocks;
        if (!job->remaining_blocks)
            finish_job(job, PC_OK, 0, NULL);
    }
    pthread_mutex_unlock(&region->lock);
}

/* Makes [first, first + n) present; bytes NULL: blocks of zeros. */
static int insert(const struct pc_engine *engine, const struct pc__generation *generation,
                  uint64_t first, uint64_t n, const uint8_t *bytes)
{
    uint64_t at = (uint64_t)(uintptr_t)generation->map + (first << PC_BLOCK_SHIFT);
    uint64_t end = at + (n << PC_BLOCK_SHIFT);
    while (at < end) {
        int64_t done;
        int rc;
        if (bytes) {
            struct uffdio_copy copy = {.dst = at,
                                       .src = (uint64_t)(uintptr_t)bytes,
                                       .len = end - at,
                                       .mode = UFFDIO_COPY_MODE_DONTWAKE};
            rc = ioctl(engine->uffd, UFFDIO_COPY, &copy);
            done = rc ? copy.copy : (int64_t)copy.len;
        } else {
            struct uffdio_zeropage zero = {.range = {.start = at, .len = end - at},
                                           .mode = UFFDIO_ZEROPAGE_MODE_DONTWAKE};
            rc = ioctl(engine->uffd, UFFDIO_ZEROPAGE, &zero);
            done = rc ? zero.zeropage : (int64_t)zero.range.len;
        }
        if (done <= 0) {
            if (errno == EAGAIN || errno == EINTR)
                continue; /* the address space was being changed */
            if (errno != EEXIST)
                return pc__fail_errno("inserting into a generation of version %llu",
                                      (unsigned long long)generation->version);
            done = PC_BLOCK_BYTES; /* there already, and so with this very content */
        }
        at += (uint64_t)done;
        if (bytes)
            bytes += done;
    }
    return PC_OK;
}

/* bytes must be resident: memory that this thread has just written. Where one block brings others
 * along, as zeros, nothing is written: the setting was another when this server began. */
static int insert_by_pwrite(struct pc_engine *engine, const struct pc__generation *generation,
                            uint64_t first, uint64_t n, const uint8_t *bytes)
{
    uint64_t left = n << PC_BLOCK_SHIFT, offset = first << PC_BLOCK_SHIFT;
    if (pc__huge_pages_now(&engine->setting)) {
        (void)pc__engine_makes_huge_pages(engine); /* which says so */
        return pc__fail(PC_ERR_HUGE_PAGES, "since this page server started");
    }
    while (left) {
        ssize_t wrote = pwrite(generation->memfd, bytes, left, (off_t)offset);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return pc__fail_errno("pwrite into a generation of version %llu",
                                  (unsigned long long)generation->version);
        bytes += wrote;
        offset += (uint64_t)wrote;
        left -= (uint64_t)wrote;
    }
    return PC_OK;
}

/* bytes NULL: blocks of zeros. */
static int write_blocks(struct pc_engine *engine, const struct pc__generation *generation,
                        uint64_t first, uint64_t n, const uint8_t *bytes)
{
    if (engine->uffd >= 0)
        return insert(engine, generation, first, n, bytes);
    if (bytes)
        return insert_by_pwrite(engine, generation, first, n, bytes);
    uint8_t zeros[ZEROS_AT_ONCE * PC_BLOCK_BYTES];
    memset(zeros, 0, sizeof zeros);
    int rc = PC_OK;
    for (uint64_t done = 0, now; done < n && !rc; done += now) {
        now = n - done < ZEROS_AT_ONCE ? n - done : ZEROS_AT_ONCE;
        rc = insert_by_pwrite(engine, generation, first + done, now, zeros);
    }
    return rc;
}

/* In parts that the budget has room for: what is over it is evicted first. */
static int fill(struct pc_engine *engine, struct pc__region *region,
                struct pc__generation *generation, struct pc_run run, const uint8_t *bytes,
                bool fetched)
{
    uint64_t most = pc__cache_most_blocks(engine);
    int rc = PC_OK;
    while (run.n_blocks && !rc) {
        uint64_t n = run.n_blocks < most ? run.n_blocks : most;
        if (!generation->is_layer)
            pc__cache_room(engine, region, n);
        rc = write_blocks(engine, generation, run.first_block, n, bytes);
        if (!rc) {
            pc__count_add(!bytes    ? &engine->count.zero_blocks
                          : fetched ? &engine->count.blocks_fetched
                                    : &engine->count.local_blocks,
                          n);
            now_present(engine, region, generation, run.first_block, n, fetched);
            run.first_block += n;
            run.n_blocks -= n;
            bytes = bytes ? bytes + (n << PC_BLOCK_SHIFT) : NULL;
        }
        if (!generation->is_layer)
            pc__cache_balance(engine, n);
    }
    return rc;
}

int pc__fill_insert(struct pc_engine *engine, struct pc__region *region,
                    struct pc__generation *generation, uint64_t first, uint64_t n,
                    const uint8_t *bytes, bool fetched)
{
    const struct pc_run run = {.first_block = first, .n_blocks = n};
    return fill(engine, region, generation, run, bytes, fetched);
}

int pc__fill_zeros(struct pc_engine *engine, struct pc__region *region,
                   struct pc__generation *generation, uint64_t first, uint64_t n)
{
    const struct pc_run run = {.first_block = first, .n_blocks = n};
    return fill(engine, region, generation, run, NULL, false);
}

void pc__fill_failed(struct pc_engine *engine, struct pc__region *region,
                     struct pc__generation *generation, uint64_t first, uint64_t n,
                     uint64_t server_id, int error)
{
    struct pc__ctl_fail fail = {
        .region = region->id, .server_id = server_id, .error = error};
    pc__count_add(&engine->count.fetch_failed, 1);
    pc__unreached_error_text(engine, server_id, region->id, error, fail.cause, sizeof fail.cause);
    pthread_mutex_lock(&region->lock);
    fail.version = generation->version;
    pc__blockset_remove(&generation->in_flight, first, n);
    generation->has_strays = true; /* it may have been in the middle of an insert */
    pc__each(link, &generation->waiters)
    {
        struct pc__waiter *waiter = pc__of(link, struct pc__waiter, link);
        if (waiter->block < first || waiter->block - first >= n)
            continue;
        pc__count_add(&engine->count.faults_failed, 1);
        fail.block = waiter->block;
        /* The process ends on this message; its waiters go when its socket closes. */
        pc__session_send(waiter->session, PC__CTL_FAIL, 0, error, &fail, sizeof fail, -1);
        pc__waiter_ended(engine, region, waiter);
    }
    pc__each(link, &generation->jobs)
    {
        struct pc__job *job = pc__of(link, struct pc__job, link);
        if (overlap(job, first, n))
            finish_job(job, error, server_id, fail.cause);
    }
    pthread_mutex_unlock(&region->lock);
}
