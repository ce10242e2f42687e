/* gather.c - rows for a process of this node: which of them are here, and what is asked of the homes
 * for the rest: blocks, or the rows themselves.
 *
 * A part (wire_data.h) is one message of at most PC__GATHER_MAX_ROWS rows, so that a loop is never at
 * one for long. Of the blocks that it touches, one that is absent is fetched where its rows, those
 * of before included, come to as many bytes as the block has: who rents pays twice at most. Else
 * its rows are asked for and go into the part's area; the node keeps nothing of them but the sum
 * (struct pc__rents). What comes from this node itself comes as blocks.
 *
 * Threads: the loop that owns the client, which also owns the connections that its rows come on; and,
 * for blocks that another loop inserts, any loop under region.lock (blocks_done). A part
 * ends on the client's loop, when everything that it waits for has come or failed, also where
 * the client is gone: answers that are on the wire go into its area, which stays as long.
 *
 * The area is memory that the client can write to all the time. The ids are copied out of it before
 * anything is decided, and nothing is read from it afterwards. It cannot shrink (its seals are
 * checked) and is ordinary memory: touching it never gives SIGBUS.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/miss/miss.h"
#include "engine/store/store.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#define AREA_IDLE_NS 200000000ull
#define URGENT_BYTES (64u << 10) /* a gather of so little does not wait behind bulk */

/* A memfd that parts have areas in. Of one loop. A gather that goes on finds it again. */
struct pc__area {
    struct pc__link link;          /* of its client's */
    uint64_t inode, bytes;
    uint64_t used_ns;
    uint8_t *map;
    unsigned refs;                 /* its client's list, each part */
};

struct pc__part {
    struct pc__link link;          /* of its client's, or alone */
    struct pc__session *session;     /* NULL: gone */
    struct pc__loop *loop;
    struct pc__area *area;
    uint64_t region;
    uint32_t request_id;
    uint32_t waits_for;            /* region.lock: requests for rows, the job of its blocks, its maker */
    int status;                    /* region.lock */
    uint64_t server_id;            /* region.lock: who has not given it, where one has not; or 0 */
    bool posted;                   /* region.lock: its end is in the mail */
};

/* ------------------------------------------------------------------- parts */

static void drop_area(struct pc__area *area)
{
    if (!area || --area->refs)
        return;
    munmap(area->map, area->bytes);
    free(area);
}

/* On its loop; nothing refers to it any more. */
static void end(struct pc__part *part)
{
    char why[sizeof((struct pc__ctl_fail *)0)->cause] = "";
    if (part->session) {
        if (part->status == PC_ERR_TIMEOUT || part->status == PC_ERR_HOME_LOST ||
            part->status == PC_ERR_DESCRIPTORS || pc__is_of_file(part->status))
            pc__unreached_error_text(part->loop->engine, part->server_id, part->region, part->status, why,
                              sizeof why);
        pc__session_send(part->session, PC__CTL_REPLY, part->request_id, part->status, why,
                        *why ? strlen(why) + 1 : 0, -1);
    }
    pc__link_remove(&part->link);
    drop_area(part->area);
    free(part);
}

static void end_by_mail(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)loop;
    end(mail->pointer);
}

/* Under region.lock. True: that was the last. */
static bool came(struct pc__part *part, int status, uint64_t server_id)
{
    if (status && !part->status) {
        part->status = status;
        part->server_id = server_id;
    }
    return --part->waits_for == 0;
}

/* On the part's loop. */
static void came_here(struct pc__region *region, struct pc__part *part, int status,
                      uint64_t server_id)
{
    pthread_mutex_lock(&region->lock);
    bool last = came(part, status, server_id);
    pthread_mutex_unlock(&region->lock);
    if (last)
        end(part);
}

static void rows_came(struct pc__region *region, void *part, int status, uint64_t server_id)
{
    came_here(region, part, status, server_id);
}

static void forget_area(struct pc__area *area)
{
    pc__link_remove(&area->link);
    drop_area(area);
}

void pc__session_check_areas(struct pc__session *session, uint64_t now_ns)
{
    if (!session->areas_by_ns || session->areas_by_ns > now_ns)
        return;
    session->areas_by_ns = 0;
    pc__each(link, &session->areas)
    {
        struct pc__area *area = pc__of(link, struct pc__area, link);
        uint64_t by_ns = area->used_ns + AREA_IDLE_NS;
        if (by_ns <= now_ns)
            forget_area(area); /* parts that are under way have it still */
        else if (!session->areas_by_ns || by_ns < session->areas_by_ns)
            session->areas_by_ns = by_ns;
    }
}

static void blocks_done(struct pc__job *job, int status, uint64_t server_id, const char *text)
{
    (void)text;
    struct pc__part *part = job->arg;
    const struct pc__mail mail = {.run = end_by_mail, .pointer = part};
    if (!came(part, status, server_id))
        return;
    part->posted = true; /* before: whoever reads the mail frees it */
    if (!pc__loop_post(part->loop, &mail))
        return;
    part->posted = false; /* its job was the client's, so that is open: it ends, and this part with it */
    shutdown(part->session->fd, SHUT_RDWR);
}

void pc__session_gathers_end(struct pc__session *session)
{
    pc__each(link, &session->areas) forget_area(pc__of(link, struct pc__area, link));
    pc__each(link, &session->gathers)
    {
        struct pc__part *part = pc__of(link, struct pc__part, link);
        pc__link_remove(&part->link);
        part->session = NULL;
        /* No job of it is left, so nobody else looks at these. Mail is not read at the end. */
        if (!part->waits_for && (!part->posted || session->loop->stopping))
            end(part);
    }
}

/* -------------------------------------------------------------------- area */

static int check_memfd(int fd, uint64_t bytes, uint64_t *inode)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
    struct stat st;
    struct statfs fs;
    int has = fcntl(fd, F_GET_SEALS);
    if (has < 0 || fstat(fd, &st) || fstatfs(fd, &fs))
        return pc__fail(PC_ERR_PROTOCOL, "a gather's descriptor is no memfd");
    /* Huge pages that run out give SIGBUS too. */
    if ((has & seals) != seals || (uint64_t)st.st_size != bytes || fs.f_type != TMPFS_MAGIC)
        return pc__fail(PC_ERR_PROTOCOL, "a gather's memfd that is not sealed, or not as long as it says");
    *inode = pc__file_id(&st);
    return PC_OK;
}

/* +1 ref. */
static int take_area(struct pc__session *session, int fd, uint64_t bytes, struct pc__area **out)
{
    uint64_t inode = 0;
    int rc = check_memfd(fd, bytes, &inode);
    if (rc)
        return rc;
    pc__each(link, &session->areas)
    {
        struct pc__area *area = pc__of(link, struct pc__area, link);
        if (area->inode != inode || area->bytes != bytes)
            continue;
        area->refs++;
        area->used_ns = pc__now_ns();
        *out = area;
        return PC_OK;
    }
    struct pc__area *area = malloc(sizeof *area);
    if (!area)
        return pc__fail(PC_ERR_NO_MEMORY, "a gather");
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        free(area);
        return pc__fail_errno("mmap of a gather's memfd");
    }
    *area = (struct pc__area){.inode = inode, .bytes = bytes, .map = map, .refs = 2,
                              .used_ns = pc__now_ns()};
    pc__link_push(&session->areas, &area->link);
    session->areas_by_ns = area->used_ns + AREA_IDLE_NS;
    *out = area;
    return PC_OK;
}

/* ------------------------------------------------------------------- rents */

#define RENT_UNIT 32u /* bytes */
#define RENT_PRICE (PC_BLOCK_BYTES / RENT_UNIT)

struct pc__rents {
    uint64_t n_extents;
    uint8_t *extents[]; /* each NULL, or a byte for each block: bytes of its rows, in units */
};

void pc__rents_free(struct pc__rents *rents)
{
    for (uint64_t i = 0; rents && i < rents->n_extents; i++)
        free(rents->extents[i]);
    free(rents);
}

/* Whether rows of n_bytes make it the block's turn to be fetched. Under region.lock. */
static bool is_bought(struct pc__generation *generation, uint64_t block, uint64_t n_bytes)
{
    if (n_bytes >= PC_BLOCK_BYTES)
        return true;
    struct pc__rents *rents = generation->rents;
    if (!rents) {
        uint64_t n = (generation->present.n_blocks + PC_EXTENT_BLOCKS - 1) / PC_EXTENT_BLOCKS;
        rents = calloc(1, sizeof *rents + n * sizeof rents->extents[0]);
        if (!rents)
            return false; /* for want of memory no sum is kept */
        rents->n_extents = n;
        generation->rents = rents;
    }
    uint64_t number = block / PC_EXTENT_BLOCKS;
    uint8_t **extent = &rents->extents[number];
    if (!*extent &&
        !(*extent = calloc(pc__extent_blocks(generation->present.n_blocks, number), 1)))
        return false;
    uint8_t *paid = *extent + block % PC_EXTENT_BLOCKS;
    uint64_t sum = *paid + (n_bytes + RENT_UNIT - 1) / RENT_UNIT;
    *paid = sum >= RENT_PRICE ? 0 : (uint8_t)sum;
    return sum >= RENT_PRICE;
}
static_assert(RENT_PRICE <= UINT8_MAX, "sums below the price fit");

/* ---------------------------------------------------------------- deciding */

struct touched {
    uint64_t block;
    uint32_t n_bytes;              /* of the rows there */
    bool whole;                    /* rows in it cannot be asked for as rows */
    bool as_rows;
};

/* What a part is made of, while it is taken apart. */
struct plan {
    uint32_t row_bytes;
    size_t n_rows, n_touched, n_runs;
    uint64_t offsets[PC__GATHER_MAX_ROWS];
    struct touched touched[2 * PC__GATHER_MAX_ROWS];
    struct pc_run runs[2 * PC__GATHER_MAX_ROWS]; /* blocks to wait for */
    struct pc_run here[2 * PC__GATHER_MAX_ROWS];
};

static int take_offsets(struct plan *plan, const struct pc__ctl_gather *body, const uint8_t *ids,
                        uint64_t length)
{
    const struct pc_rows *rows = &body->rows;
    plan->row_bytes = (uint32_t)rows->row_bytes;
    plan->n_rows = body->n_ids;
    if (rows->row_bytes > length || rows->offset_bytes > length - rows->row_bytes)
        return PC_ERR_RANGE;
    const uint64_t room = length - rows->row_bytes - rows->offset_bytes;
    const uint64_t last = rows->stride_bytes ? room / rows->stride_bytes : UINT64_MAX;
    memcpy(plan->offsets, ids, plan->n_rows * sizeof plan->offsets[0]);
    uint64_t before = 0;
    for (size_t i = 0; i < plan->n_rows; i++) {
        if (plan->offsets[i] > last)
            return PC_ERR_RANGE;
        plan->offsets[i] = rows->offset_bytes + plan->offsets[i] * rows->stride_bytes;
        if (plan->offsets[i] < before)
            return PC_ERR_PROTOCOL; /* not in order */
        before = plan->offsets[i];
    }
    return PC_OK;
}

static void touch(struct plan *plan, uint64_t block, uint64_t n_bytes, bool whole)
{
    struct touched *past = &plan->touched[plan->n_touched], *at = past;
    if (plan->n_touched && past[-1].block == block)
        at = past - 1;
    else if (plan->n_touched > 1 && past[-2].block == block) /* a row before it ended in the next */
        at = past - 2;
    if (at == past) {
        *at = (struct touched){.block = block};
        plan->n_touched++;
    }
    at->n_bytes += (uint32_t)n_bytes;
    at->whole |= whole;
}

/* A row that two homes have parts of comes as blocks. */
static void touch_all(struct plan *plan)
{
    for (size_t i = 0; i < plan->n_rows; i++) {
        uint64_t first = plan->offsets[i] / PC_BLOCK_BYTES;
        uint64_t into = plan->offsets[i] % PC_BLOCK_BYTES;
        uint64_t left = PC_BLOCK_BYTES - into;
        bool crosses = plan->row_bytes > left;
        bool whole = crosses && (first + 1) % PC_EXTENT_BLOCKS == 0;
        touch(plan, first, crosses ? left : plan->row_bytes, whole);
        if (crosses)
            touch(plan, first + 1, plan->row_bytes - left, whole);
    }
}

static bool comes_from_here(const struct pc_engine *engine, const struct pc__region *region,
                            const struct pc__generation *generation, uint64_t block)
{
    return region->in_file || pc__home_of(region, block) == engine->server_id ||
           (generation->source && pc__blockset_has(&generation->source->present, block) &&
            !pc__blockset_has(&generation->changed, block));
}

/* At the end of the runs. */
static void append(struct pc_run *runs, size_t *n, uint64_t block)
{
    if (*n && runs[*n - 1].first_block + runs[*n - 1].n_blocks == block)
        runs[*n - 1].n_blocks++;
    else
        runs[(*n)++] = (struct pc_run){.first_block = block, .n_blocks = 1};
}

/* Of each block: is it here, is it to come, or are its rows. Under region.lock. */
static void decide(struct pc_engine *engine, const struct pc__region *region,
                   struct pc__generation *generation, struct plan *plan)
{
    size_t n_here = 0;
    for (size_t i = 0; i < plan->n_touched; i++) {
        struct touched *t = &plan->touched[i];
        if (pc__blockset_has(&generation->present, t->block)) {
            append(plan->here, &n_here, t->block);
            continue;
        }
        t->as_rows = !t->whole && !pc__blockset_has(&generation->in_flight, t->block) &&
                     !comes_from_here(engine, region, generation, t->block) &&
                     !is_bought(generation, t->block, t->n_bytes);
        if (!t->as_rows)
            append(plan->runs, &plan->n_runs, t->block);
    }
    pc__cache_touched(engine, generation, plan->here, n_here);
}

/* ------------------------------------------------------------------ asking */

static int add_rows(struct pc__batch *batch, struct pc__part *part, struct pc__region *region,
                    struct pc__generation *generation, const struct plan *plan,
                    const uint32_t *which, size_t n, uint8_t *into)
{
    struct pc__fetch *fetch = malloc(sizeof *fetch);
    struct pc__gather *gather = malloc(sizeof *gather + n * sizeof gather->offsets[0]);
    if (!fetch || !gather) {
        free(fetch);
        free(gather);
        return pc__fail(PC_ERR_NO_MEMORY, "a gather");
    }
    gather->came = rows_came;
    gather->arg = part;
    gather->into = into;
    gather->rows = (struct pc__data_rows){.row_bytes = plan->row_bytes, .n_rows = (uint32_t)n};
    for (size_t i = 0; i < n; i++)
        gather->offsets[i] = plan->offsets[which[i]];
    uint64_t home = pc__home_of(region, gather->offsets[0] >> PC_BLOCK_SHIFT);
    *fetch = (struct pc__fetch){.region = region,
                                .generation = pc__generation_take(generation),
                                .server_id = home,
                                .urgent = n * plan->row_bytes <= URGENT_BYTES,
                                .gather = gather};
    pc__ref_take(&region->refs);
    pc__link_push(&batch->fetches, &fetch->link);
    pthread_mutex_lock(&region->lock);
    part->waits_for++;
    pthread_mutex_unlock(&region->lock);
    return PC_OK;
}

/* Sets the bits, and makes a request for each run of rows that have one home. */
static int ask_for_rows(struct pc__batch *batch, struct pc__part *part, struct pc__region *region,
                        struct pc__generation *generation, const struct plan *plan, uint8_t *area)
{
    uint32_t which[PC__GATHER_MAX_ROWS];
    uint64_t *bits = (uint64_t *)(void *)(area + pc__gather_bits_at(plan->n_rows));
    uint8_t *into = area + pc__gather_rows_at(plan->n_rows);
    uint64_t home = 0;
    size_t n = 0, t = 0;
    int rc = PC_OK;
    memset(bits, 0, (plan->n_rows + 63) / 64 * sizeof *bits);
    for (size_t i = 0; i < plan->n_rows && !rc; i++) {
        uint64_t begin = plan->offsets[i], last = begin + plan->row_bytes - 1;
        while (plan->touched[t].block < begin / PC_BLOCK_BYTES)
            t++;
        bool crosses = last / PC_BLOCK_BYTES != begin / PC_BLOCK_BYTES;
        if (!plan->touched[t].as_rows && !(crosses && plan->touched[t + 1].as_rows))
            continue;
        bits[i / 64] |= 1ull << (i % 64);
        uint64_t next = pc__home_of(region, begin >> PC_BLOCK_SHIFT);
        if (n && next != home) {
            rc = add_rows(batch, part, region, generation, plan, which, n, into);
            into += n * plan->row_bytes;
            n = 0;
        }
        home = next;
        which[n++] = (uint32_t)i;
    }
    if (n && !rc)
        rc = add_rows(batch, part, region, generation, plan, which, n, into);
    return rc;
}

/* Under region.lock. The part waits for the blocks of the plan, which are asked for. */
static int ask_for_blocks(struct pc__batch *batch, struct pc__part *part, uint64_t mapping_id,
                          struct pc__region *region, struct pc__generation *generation,
                          const struct plan *plan)
{
    if (!plan->n_runs)
        return PC_OK;
    struct pc__job *job = malloc(sizeof *job + plan->n_runs * sizeof job->runs[0]);
    if (!job)
        return pc__fail(PC_ERR_NO_MEMORY, "a gather");
    *job = (struct pc__job){.session = part->session, .done = blocks_done, .arg = part,
                            .mapping_id = mapping_id,
                            .n_runs = plan->n_runs};
    memcpy(job->runs, plan->runs, plan->n_runs * sizeof job->runs[0]);
    int rc = PC_OK;
    for (size_t i = 0; i < plan->n_runs && !rc; i++) {
        job->remaining_blocks += plan->runs[i].n_blocks;
        rc = pc__batch_add(batch, region, generation, plan->runs[i].first_block,
                           plan->runs[i].n_blocks);
    }
    if (rc) { /* what was added comes, and nobody waits for it */
        free(job);
        return rc;
    }
    part->waits_for++;
    pc__link_push(&generation->jobs, &job->link);
    return PC_OK;
}

static void ask(struct pc__part *part, const struct pc__session_map *mapping, struct plan *plan,
                uint8_t *area)
{
    struct pc__loop *loop = part->loop;
    struct pc__region *region = mapping->region;
    struct pc__generation *generation = mapping->generation;
    const uint64_t mapping_id = mapping->id;
    struct pc__batch rows, blocks;
    pc__batch_init(&rows, false, true);
    pc__batch_init(&blocks, false, true);
    touch_all(plan);
    pc__ref_take(&region->refs); /* the mapping is not looked at again */
    pthread_mutex_lock(&region->lock);
    if (!generation->complete)
        decide(loop->engine, region, generation, plan);
    int rc = ask_for_blocks(&blocks, part, mapping_id, region, generation, plan);
    pthread_mutex_unlock(&region->lock);
    if (!rc)
        rc = ask_for_rows(&rows, part, region, generation, plan, area);
    pc__batch_submit(loop, &rows);
    pc__batch_submit(loop, &blocks);
    came_here(region, part, rc, 0); /* it may be gone now */
    pc__region_put(loop->engine, region);
}

static int start(struct pc__session *session, const struct pc__ctl_message *message, int fd)
{
    struct pc__ctl_gather body;
    memcpy(&body, message->body, sizeof body);
    const struct pc__session_map *mapping = pc__session_mapping(session, body.mapping_id);
    if (!mapping)
        return PC_ERR_NO_REGION;
    uint64_t needs = pc__gather_area_bytes(body.n_ids, body.rows.row_bytes);
    if (needs > body.memfd_bytes || body.at_bytes > body.memfd_bytes - needs)
        return PC_ERR_PROTOCOL;
    struct pc__part *part = malloc(sizeof *part);
    struct plan *plan = session->loop->plan;
    if (!plan)
        plan = session->loop->plan = malloc(sizeof *plan);
    struct pc__area *area = NULL;
    int rc = part && plan ? take_area(session, fd, body.memfd_bytes, &area) : PC_ERR_NO_MEMORY;
    if (!rc) {
        plan->n_touched = plan->n_runs = 0;
        rc = take_offsets(plan, &body, area->map + body.at_bytes, mapping->region->length_bytes);
    }
    if (rc) {
        drop_area(area);
        free(part);
    } else {
        *part = (struct pc__part){.session = session, .loop = session->loop, .area = area,
                                  .region = mapping->region->id,
                                  .request_id = message->header.request_id, .waits_for = 1};
        pc__link_push(&session->gathers, &part->link);
        ask(part, mapping, plan, area->map + body.at_bytes);
    }
    return rc;
}

void pc__session_gather(struct pc__session *session, const struct pc__ctl_message *message, int n_fds,
                       const int *fds)
{
    int rc = n_fds == 1 ? start(session, message, fds[0]) : PC_ERR_PROTOCOL;
    if (rc)
        pc__session_reply(session, message, rc);
}
