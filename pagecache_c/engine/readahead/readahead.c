/* readahead.c - how much a fault fetches. Pure: no lock, no clock, no kernel; the caller has the
 * lock.
 *
 * What can be known. A touch of a present block never leaves the kernel, so all that is seen of a
 * reader while it runs are its faults: at pages of 2^l blocks they say exactly which aligned pages
 * of level l and of every higher level it touches (every first touch of a higher page is a fault),
 * and nothing of what it leaves unread inside a page. Two things say that:
 *
 *   probes     one page in eight is not fetched whole but by pages two levels smaller, where they
 *              are touched. What is touched of it in the end is what is touched of the others.
 *   read sets  an exact one shows each touched block. A coarse one (kernel fault-around maps up to
 *              15 present neighbours around a touch, inside the same aligned 64 KiB) shows all of a
 *              64 KiB page that was touched once: it says nothing below level 4, and is exact
 *              from there on. So coarse sets are counted by 64 KiB groups, and can bring pages
 *              down to 64 KiB; below it only exact sets, or probes, do.
 *
 * What is best. Let n[l] be the number of different aligned pages of level l that are touched.
 * With pages of level l a reader makes n[l] round trips and moves n[l] * 2^l blocks. A round trip
 * costs as much as moving trip_blocks, which is measured (choose.c); so the level to take is that
 * with the least
 *
 *     cost(l) = n[l] * (trip_blocks + 2^l)
 *
 * In words of use: doubling the page pays while the share of pages whose other half is touched too
 * exceeds 2^l / (trip_blocks + 2^l). Where that is 12: 8% for single blocks, 57% for 64 KiB, 96%
 * for 1 MiB.
 * The counts are of all that happened so far, not of the last moments: a tree whose neighbouring
 * leaves are asked for minutes apart still shows that they are asked for. Pages and windows are taken
 * as far as fetch_budget.c has room for them. So pages grow only where what they waste is worth it.
 *
 *   larger     is decided by faults alone, which are exact upwards. (Read sets of a kernel without
 *              write protection look exact and are not: they could only ever ask for too much.)
 *   smaller    by probes, exact sets and coarse sets, each for the levels it is right for. What
 *              faults have counted below is not known then: it is scaled from what showed it.
 *
 * A new region begins with a page of 64 KiB (Clamor's figure 5 puts the least slowdown there) and
 * halves it for each of the first scattered faults: single blocks show everything, soonest.
 *
 * Streams. A fault at the end of what a stream has fetched, or in what is on its way, is
 * sequential: its window doubles, up to 8 MiB; the next window is asked for when the reader is within
 * half a window of the end, or at a block that was left out. Faults of streams do not count for the
 * page, but for the first after a scattered one: until then it may just be a neighbour. How far
 * streams got before is kept too: the next one jumps there with its second fault. Streams that end
 * with it make that jump smaller.
 *
 * A variable in pieces is one to its readers: a stream that is asked beyond the end of a piece goes on in the
 * next one, with its window, and with room of the piece that it leaves.
 *
 * demanded, probed and used belong to the region and not to a version: a commit changes a few blocks,
 * not who wants them. A block that is demanded again (evicted, or changed) begins the record of its
 * 8 MiB anew. Where memory is short for a set, something is not learned; no fetch is ever wrong.
 */
#include "engine/readahead/readahead.h"

#include "common/error.h"

#include <assert.h>

#define FIRST_LEVEL 4u             /* 64 KiB */
#define COARSE_LEVEL 4u            /* what fault-around shows around a touch */
#define TOP_LEVEL (PC__PAGE_LEVELS - 1)
#define TOP_BLOCKS (1ull << TOP_LEVEL)
#define TRIP_STEP 3u / 2u         /* less of a change is noise */
#define LEAST_MARKED_LEVEL 4u      /* of those that are smaller than what was learned */
#define LEAST_WINDOW 4u
#define EAGER_WINDOW 64u
#define MOST_CARRIED 512u          /* 2 MiB: a round trip of 1 ms at 10 Gbit/s. The reader may stop there */
#define PROBE_EVERY 8u
#define PROBE_LEVELS 2u            /* below the page */
#define LEAST_FAULTS 16u           /* before pages grow */
#define LEAST_GAIN 10u             /* a tenth of the cost: for less, pages stay as they are */
#define LEAST_WORTH 3u             /* below, it is waste for next to nothing */
#define LEAST_SHOWN 8u             /* pages, before they shrink */
#define MOST_PATIENCE 128u
#define MOST_COUNTED 65536u        /* faults; then what was counted counts half */
#define MOST_SHOWN 1024u           /* pages; likewise */
#define PROBE_ROUNDS 4u            /* times the patience: then probes begin anew */

static_assert(TOP_BLOCKS << PC_BLOCK_SHIFT == 8u << 20, "the largest page is what a request holds");

int pc__readahead_init(struct pc__readahead *pages, uint64_t n_blocks)
{
    *pages = (struct pc__readahead){.level = FIRST_LEVEL,
                                .until_probe = PROBE_EVERY,
                                .patience = LEAST_SHOWN,
                                .window_blocks = 1u << FIRST_LEVEL,
                                .trip_blocks = PC__TRIP_BLOCKS};
    pc__budget_init(&pages->budget);
    int rc = pc__blockset_init(&pages->demanded, n_blocks);
    if (!rc)
        rc = pc__blockset_init(&pages->probed, n_blocks);
    if (!rc)
        rc = pc__blockset_init(&pages->used, n_blocks);
    if (rc)
        pc__readahead_free(pages);
    return rc;
}

void pc__readahead_free(struct pc__readahead *pages)
{
    pc__blockset_free(&pages->demanded);
    pc__blockset_free(&pages->probed);
    pc__blockset_free(&pages->used);
    pc__budget_free(&pages->budget);
}

static uint64_t n_blocks_of(const struct pc__readahead *pages)
{
    return pages->demanded.n_blocks;
}

static struct pc_run inside(uint64_t n_blocks, struct pc_run run)
{
    if (run.first_block >= n_blocks)
        return (struct pc_run){0};
    if (run.n_blocks > n_blocks - run.first_block)
        run.n_blocks = n_blocks - run.first_block;
    return run;
}

/* The aligned page of that level, cut at the region's end. */
static struct pc_run page_of(uint64_t n_blocks, unsigned level, uint64_t block)
{
    const uint64_t page_blocks = 1ull << level;
    return inside(n_blocks, (struct pc_run){block - block % page_blocks, page_blocks});
}

static bool page_has(const struct pc__blockset *set, unsigned level, uint64_t block)
{
    const struct pc_run page = page_of(set->n_blocks, level, block);
    const uint64_t end = page.first_block + page.n_blocks;
    return pc__blockset_next(set, page.first_block, end) < end;
}

/* ------------------------------------------------------------- which level */

void pc__readahead_set_trip(struct pc__readahead *pages, unsigned blocks)
{
    if (blocks > pages->trip_blocks * TRIP_STEP || pages->trip_blocks > blocks * TRIP_STEP)
        pages->trip_blocks = blocks;
}

static uint64_t cost(const struct pc__readahead *pages, const struct pc__page_counts *counts,
                     unsigned level)
{
    return counts->n[level] * (pages->trip_blocks + (1ull << level));
}

/* The cheapest of [from, to], or `level` where none is cheaper by LEAST_GAIN. */
static unsigned cheapest(const struct pc__readahead *pages, const struct pc__page_counts *counts,
                         unsigned from, unsigned to)
{
    const uint64_t now = cost(pages, counts, pages->level);
    unsigned best = pages->level;
    for (unsigned l = from; l <= to; l++)
        if (cost(pages, counts, l) < cost(pages, counts, best))
            best = l;
    return cost(pages, counts, best) + now / LEAST_GAIN < now ? best : pages->level;
}

static void halve(struct pc__page_counts *counts)
{
    for (unsigned l = 0; l < PC__PAGE_LEVELS; l++)
        counts->n[l] -= counts->n[l] / 2; /* what was seen stays seen */
}

static unsigned probe_level(unsigned level)
{
    return level > PROBE_LEVELS ? level - PROBE_LEVELS : 0;
}

static void forget(struct pc__blockset *set)
{
    (void)pc__blockset_remove(set, 0, set->n_blocks);
}

static void probes_begin(struct pc__readahead *pages)
{
    pages->until_probe = PROBE_EVERY;
    pages->probes = (struct pc__page_counts){0};
    forget(&pages->probed);
}

static void go_to(struct pc__readahead *pages, unsigned level)
{
    pages->level = level;
    probes_begin(pages);
}

/* The round trips that pages of that level save are worth LEAST_WORTH times what they waste. There is
 * not room for all such pages (fetch_budget.c), and those there are save as much for each block. */
static bool is_worth(const struct pc__readahead *pages, unsigned level)
{
    const uint64_t blocks = pages->faults.n[level] << level, used = pages->faults.n[0];
    return blocks <= used || pages->trip_blocks * used >= LEAST_WORTH * (blocks - used);
}

static void grow(struct pc__readahead *pages)
{
    if (pages->faults.n[pages->level] > MOST_COUNTED)
        halve(&pages->faults);
    if (pages->first_faults <= FIRST_LEVEL || pages->faults.n[pages->level] < LEAST_FAULTS)
        return;
    unsigned level = cheapest(pages, &pages->faults, pages->level, TOP_LEVEL);
    while (level > pages->level && !is_worth(pages, level))
        level--;
    const uint64_t now = cost(pages, &pages->faults, pages->level);
    if (level == pages->level || cost(pages, &pages->faults, level) + now / LEAST_GAIN >= now)
        return;
    if (pages->has_shrunk && pages->patience < MOST_PATIENCE)
        pages->patience *= 2; /* it was too early */
    pages->has_shrunk = false;
    pages->exact = pages->coarse = (struct pc__page_counts){0};
    go_to(pages, level);
}

/* Smaller pages where what was shown, which is right for levels >= lowest, says so. */
static void shrink(struct pc__readahead *pages, struct pc__page_counts *shown, unsigned lowest)
{
    const unsigned level = pages->level;
    if (shown->n[level] > MOST_SHOWN)
        halve(shown);
    if (lowest >= level || shown->n[level] < pages->patience)
        return;
    const unsigned smaller = cheapest(pages, shown, lowest, level);
    if (smaller == level)
        return;
    for (unsigned l = 0; l < level; l++) { /* what faults would have shown */
        uint64_t n = shown->n[l < lowest ? lowest : l] * pages->faults.n[level] / shown->n[level];
        pages->faults.n[l] = n > pages->faults.n[level] ? n : pages->faults.n[level];
    }
    pages->has_shrunk = true;
    go_to(pages, smaller);
}

/* ------------------------------------------------------------------ faults */

/* The block begins a new page on each level whose page nobody has asked for so far. */
static void count_fresh(struct pc__page_counts *counts, const struct pc__blockset *seen,
                        uint64_t block)
{
    for (unsigned l = 0; l < PC__PAGE_LEVELS && !page_has(seen, l, block); l++)
        counts->n[l]++;
}

static void note_demand(struct pc__readahead *pages, uint64_t block, struct pc_run run, bool probes)
{
    if (probes)
        count_fresh(&pages->probes, &pages->demanded, block);
    count_fresh(&pages->faults, &pages->demanded, block);
    (void)pc__blockset_add(&pages->demanded, run.first_block, run.n_blocks);
}

/* It was here and is not: what is known around it is of a time that is over. */
static void begin_anew(struct pc__readahead *pages, uint64_t block)
{
    const struct pc_run page = page_of(n_blocks_of(pages), TOP_LEVEL, block);
    (void)pc__blockset_remove(&pages->demanded, page.first_block, page.n_blocks);
    (void)pc__blockset_remove(&pages->probed, page.first_block, page.n_blocks);
    (void)pc__blockset_remove(&pages->used, page.first_block, page.n_blocks);
}

/* Whether the page that has the block is fetched by smaller ones; the first touch decides. */
static bool is_probe(struct pc__readahead *pages, uint64_t block)
{
    const uint64_t first = page_of(n_blocks_of(pages), pages->level, block).first_block;
    if (pages->level == 0)
        return false;
    if (page_has(&pages->demanded, pages->level, block))
        return pc__blockset_has(&pages->probed, first);
    if (--pages->until_probe)
        return false;
    pages->until_probe = PROBE_EVERY;
    return pc__blockset_add(&pages->probed, first, 1) >= 0;
}

/* The level, where there is room for its pages; else the largest that there is room for. Room for less
 * than LEAST_MARKED_LEVEL adds up instead: the block that is left out would be much of such a page. */
static unsigned affordable(const struct pc__readahead *pages, unsigned level)
{
    const uint64_t most = pc__budget_room(&pages->budget) + 1;
    while (level > 0 && 1ull << level > most)
        level = level > LEAST_MARKED_LEVEL ? level - 1 : 0;
    return level;
}

struct pc_run pc__readahead_scattered(struct pc__readahead *pages, struct pc__streams *streams,
                                  uint64_t block)
{
    if (pc__blockset_has(&pages->demanded, block))
        begin_anew(pages, block);
    const bool finds_level = pages->first_faults <= FIRST_LEVEL;
    if (finds_level)
        pages->level = FIRST_LEVEL - pages->first_faults++;
    const bool probes = !finds_level && is_probe(pages, block);
    const unsigned level = affordable(pages, probes ? probe_level(pages->level) : pages->level);
    const struct pc_run run = page_of(n_blocks_of(pages), level, block);
    note_demand(pages, block, run, probes);
    pc__readahead_begin(pages, streams, block, run);
    grow(pages);
    shrink(pages, &pages->probes, probe_level(pages->level));
    if (pages->probes.n[pages->level] >= PROBE_ROUNDS * pages->patience)
        probes_begin(pages); /* a change of habits is not to be outvoted by what was before */
    return run;
}

struct pc_run pc__readahead_fixed(uint64_t n_blocks, unsigned shift, uint64_t block, bool in_flight)
{
    return in_flight ? (struct pc_run){0} : page_of(n_blocks, shift - PC_BLOCK_SHIFT, block);
}

/* ----------------------------------------------------------------- streams */

static struct pc__stream *stream_of(struct pc__streams *streams, uint64_t block, bool in_flight)
{
    for (int i = 0; i < PC__STREAMS; i++) {
        struct pc__stream *s = &streams->of[i];
        /* Absent and not on its way, before the end: it was here, and went. */
        if (s->used && (block == s->end || (in_flight && block >= s->begin && block < s->end)))
            return s;
    }
    return NULL;
}

static void ended(struct pc__readahead *pages, const struct pc__stream *stream)
{
    if (stream->extensions == 1 && pages->window_blocks > 1)
        pages->window_blocks /= 2;
}

void pc__readahead_begin(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                     struct pc_run run)
{
    struct pc__stream *oldest = &streams->of[0];
    for (int i = 1; i < PC__STREAMS; i++)
        if (streams->of[i].used < oldest->used)
            oldest = &streams->of[i];
    ended(pages, oldest);
    *oldest = (struct pc__stream){.begin = block,
                                  .end = run.first_block + run.n_blocks,
                                  .window = run.n_blocks,
                                  .used = ++streams->clock};
}

/* The next window of the stream, beside `block`. Where there is no room for one of which a block is left
 * out, there is none: room adds up until there is. */
static struct pc_run extend(struct pc__readahead *pages, struct pc__stream *stream, uint64_t block)
{
    const uint64_t room = pc__budget_room(&pages->budget);
    uint64_t window = stream->window * 2;
    if (window < pages->window_blocks)
        window = pages->window_blocks;
    if (window < LEAST_WINDOW)
        window = LEAST_WINDOW;
    if (window > TOP_BLOCKS)
        window = TOP_BLOCKS;
    if (window > room)
        window = room;
    if (window < LEAST_WINDOW) {
        stream->end += stream->end == block;
        return (struct pc_run){0};
    }
    stream->extensions++;
    stream->window = window;
    if (stream->extensions > 2 && pages->window_blocks < window / 4)
        pages->window_blocks = window / 4;
    const struct pc_run run = inside(n_blocks_of(pages), (struct pc_run){stream->end, window});
    stream->end += window;
    return run;
}

/* Small windows may be the last of a short stream. Of large ones the next is asked for in time. */
static bool is_near_end(const struct pc__stream *stream, uint64_t block)
{
    const uint64_t left = stream->end - block;
    return left <= (stream->window < EAGER_WINDOW ? stream->window / 2 : stream->window);
}

bool pc__readahead_marked(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                          struct pc_run *run)
{
    struct pc__stream *stream = stream_of(streams, block, true);
    *run = (struct pc_run){0};
    if (!stream || !stream->extensions)
        return false; /* inside a page, in any order */
    stream->used = ++streams->clock;
    stream->begin = block;
    if (is_near_end(stream, block))
        *run = extend(pages, stream, block);
    return true;
}

bool pc__readahead_sequential(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                          bool in_flight, struct pc_run *run)
{
    struct pc__stream *stream = stream_of(streams, block, in_flight);
    *run = (struct pc_run){0};
    if (!stream)
        return in_flight; /* somebody else's fetch: it will do */
    stream->used = ++streams->clock;
    stream->begin = block;
    if (in_flight && stream->end - block > stream->window / 2)
        return true;
    *run = extend(pages, stream, block);
    if (!in_flight && stream->extensions == 1) {
        note_demand(pages, block, page_of(n_blocks_of(pages), pages->level, block), false);
        grow(pages);
    }
    return true;
}

bool pc__readahead_carry(struct pc__readahead *pages, struct pc__streams *streams,
                         struct pc__carried *carried)
{
    const uint64_t n_blocks = n_blocks_of(pages), room = pc__budget_room(&pages->budget);
    const uint64_t most = room < MOST_CARRIED ? room : MOST_CARRIED;
    struct pc__stream *stream = &streams->of[0];
    for (int i = 1; i < PC__STREAMS; i++)
        if (streams->of[i].used > stream->used)
            stream = &streams->of[i];
    if (!stream->extensions || stream->end <= n_blocks)
        return false;
    const uint64_t rest = stream->end - n_blocks;
    stream->end = n_blocks;
    *carried = (struct pc__carried){.rest = rest < most ? rest : most,
                                    .window = stream->window,
                                    .window_blocks = pages->window_blocks,
                                    .extensions = stream->extensions,
                                    .level = pages->level,
                                    .first_faults = pages->first_faults,
                                    .trip_blocks = pages->trip_blocks};
    pc__budget_take(&pages->budget, carried->rest);
    return carried->rest > 0;
}

struct pc_run pc__readahead_carried(struct pc__readahead *pages, struct pc__streams *streams,
                                    const struct pc__carried *carried)
{
    const bool is_new = !pages->budget.fetched;
    pc__budget_give(&pages->budget, carried->rest);
    if (is_new) {
        pages->level = carried->level;
        pages->first_faults = carried->first_faults;
        pages->trip_blocks = carried->trip_blocks;
        pages->window_blocks = carried->window_blocks;
    }
    const struct pc_run run = inside(n_blocks_of(pages), (struct pc_run){0, carried->rest});
    pc__readahead_begin(pages, streams, 0, run);
    for (int i = 0; i < PC__STREAMS; i++) {
        struct pc__stream *stream = &streams->of[i];
        if (stream->used == streams->clock) {
            stream->window = carried->window;
            stream->extensions = carried->extensions;
        }
    }
    return run;
}

/* --------------------------------------------------------------- read sets */

/* Pages that [first, end) is the first to use. */
static void count_used(struct pc__page_counts *counts, const struct pc__blockset *used,
                       uint64_t first, uint64_t end)
{
    const uint64_t fresh = end - first - pc__blockset_count(used, first, end - first);
    for (unsigned l = 0; fresh && l < PC__PAGE_LEVELS; l++) {
        const uint64_t page_blocks = 1ull << l;
        const uint64_t n_pages = (end - 1) / page_blocks - first / page_blocks + 1;
        uint64_t n = 0;
        if (n_pages > 64) /* a long run: near enough */
            n = (fresh + page_blocks - 1) / page_blocks;
        else
            for (uint64_t page = first / page_blocks; page <= (end - 1) / page_blocks; page++)
                n += !page_has(used, l, page * page_blocks);
        if (!n)
            return; /* nor larger ones */
        counts->n[l] += n;
    }
}

void pc__readahead_read(struct pc__readahead *pages, struct pc_run run, bool exact)
{
    struct pc__page_counts *counts = exact ? &pages->exact : &pages->coarse;
    const uint64_t limit = run.first_block + run.n_blocks;
    uint64_t at = run.first_block;
    while ((at = pc__blockset_next(&pages->demanded, at, limit)) < limit) {
        const uint64_t end = pc__blockset_next_absent(&pages->demanded, at, limit);
        count_used(counts, &pages->used, at, end);
        (void)pc__blockset_add(&pages->used, at, end - at);
        at = end;
    }
    if (exact)
        shrink(pages, &pages->exact, 0);
    else
        shrink(pages, &pages->coarse, COARSE_LEVEL);
}
