/* choose.c - what a fault asks for. Pure: no lock, no clock, no kernel; the caller has the lock.
 *
 * A stream's fault asks for its next window, another for the page around it (readahead.c). Where a
 * commit has changed what was here, what changed around it is fetched, and no page. All of them stay
 * within the region's budget (fetch_budget.c), to which they leave blocks out.
 *
 * What a round trip costs is measured: of fetches that had nothing to wait behind, the time is
 * fitted by trip_ns + n * block_ns (least squares, older ones count less), and trip_ns / block_ns
 * is the cost in blocks. 30 us and 2.7 us were seen between servers of one host, 60 us and 5 us are
 * a network of 10 Gbit/s, 1 ms and 35 us a link of 1 Gbit/s to another building.
 *
 * How long an answer may take is another question: not the mean of those that came at once, but what
 * none should exceed, with what lies in front of it in the queue. That is SRTT + 4 RTTVAR of each peer
 * and size of request.
 */
#include "engine/miss/miss.h"

#define CHANGED_BLOCKS 16u /* aligned so: what changed there comes together */
#define WINDOWS_A_MARK 1u  /* each window has a block left out: its fault asks for the next window */
#define PAGES_A_MARK 4u    /* one page in so many, as long as there is room for AMPLE_PAGES more: its */
#define AMPLE_PAGES 8u     /* fault is one more. Each page where there is less, */
#define LARGE_PAGE 128u    /* or where one fault more is little, and one block stands for much */

#define TRIPS_REMEMBERED 64.0
#define LEAST_TRIPS 16u
#define LEAST_VARIANCE 16.0   /* of their numbers of blocks: else the line may be any */
#define LATE 3.0             /* times what was expected: a thread slept, which says nothing */
#define LATE_AT_FIRST 10.0   /* times the best so far, while nothing is known: it waited for a restart, say */
#define LEAST_TRIP_BLOCKS 4u
#define MOST_TRIP_BLOCKS 256u

static bool are_known(const struct pc__trips *trips)
{
    return trips->n >= LEAST_TRIPS &&
           trips->blocks_squared - trips->blocks * trips->blocks >= LEAST_VARIANCE;
}

/* Not above 0 where it is too little to be seen. */
static double block_ns_of(const struct pc__trips *trips)
{
    return (trips->ns_blocks - trips->ns * trips->blocks) /
           (trips->blocks_squared - trips->blocks * trips->blocks);
}

static unsigned as_blocks(const struct pc__trips *trips)
{
    const double block_ns = block_ns_of(trips);
    if (block_ns <= 0)
        return MOST_TRIP_BLOCKS;
    const double blocks = trips->ns / block_ns - trips->blocks;
    return blocks < LEAST_TRIP_BLOCKS  ? LEAST_TRIP_BLOCKS
           : blocks > MOST_TRIP_BLOCKS ? MOST_TRIP_BLOCKS
                                       : (unsigned)blocks;
}

/* While nothing is known. What was late is left out; where all before it were, it is the first. */
static bool is_late_at_first(struct pc__trips *trips, double n, double ns)
{
    const double each = ns / (PC__TRIP_BLOCKS + n);
    if (trips->n && each > LATE_AT_FIRST * trips->best_ns)
        return true;
    if (!trips->n || each * LATE_AT_FIRST < trips->best_ns)
        *trips = (struct pc__trips){.best_ns = each, .known_blocks = trips->known_blocks};
    trips->best_ns = each < trips->best_ns ? each : trips->best_ns;
    return false;
}

void pc__trips_add(struct pc__trips *trips, uint64_t n_blocks, uint64_t ns)
{
    const double n = (double)n_blocks;
    double took = (double)ns;
    if (are_known(trips)) {
        const double more_ns = (n - trips->blocks) * block_ns_of(trips);
        const double most = LATE * (trips->ns + (more_ns > 0 ? more_ns : 0));
        took = took < most ? took : most;
    } else if (is_late_at_first(trips, n, took)) {
        return;
    }
    trips->n++;
    const double share = (double)trips->n < TRIPS_REMEMBERED ? 1.0 / (double)trips->n
                                                             : 1.0 / TRIPS_REMEMBERED;
    trips->blocks += share * (n - trips->blocks);
    trips->blocks_squared += share * (n * n - trips->blocks_squared);
    trips->ns += share * (took - trips->ns);
    trips->ns_blocks += share * (took * n - trips->ns_blocks);
    if (are_known(trips)) /* it stays while all answers have one size, which says nothing */
        trips->known_blocks = as_blocks(trips);
}

/* ------------------------------------------------------- how long an answer takes */

#define RTT_GRANULARITY_NS 1000000u /* of the loops' timers: epoll counts milliseconds */
#define MOST_DOUBLED 8u

unsigned pc__rtt_class(uint64_t n_blocks)
{
    return n_blocks <= 1 ? 0 : n_blocks <= 4 ? 1 : n_blocks <= 16 ? 2 : PC__RTT_CLASSES - 1;
}

/* RFC 6298, 2.2 and 2.3: alpha is 1/8, beta 1/4; RTTVAR takes the old SRTT. */
void pc__rtt_add(struct pc__rtt *rtt, uint64_t ns)
{
    rtt->doubled = 0;
    if (!rtt->srtt_ns) {
        rtt->srtt_ns = ns ? ns : 1;
        rtt->rttvar_ns = ns / 2;
        return;
    }
    const uint64_t off_ns = ns > rtt->srtt_ns ? ns - rtt->srtt_ns : rtt->srtt_ns - ns;
    rtt->rttvar_ns = rtt->rttvar_ns - rtt->rttvar_ns / 4 + off_ns / 4;
    rtt->srtt_ns = rtt->srtt_ns - rtt->srtt_ns / 8 + ns / 8;
    rtt->srtt_ns += !rtt->srtt_ns; /* 0 stands for nothing */
}

void pc__rtt_double(struct pc__rtt *rtt)
{
    rtt->doubled += rtt->doubled < MOST_DOUBLED;
}

uint64_t pc__rtt_timeout_ns(const struct pc__rtt *rtt, uint64_t least_ns)
{
    const uint64_t spread_ns = 4 * rtt->rttvar_ns;
    uint64_t ns = rtt->srtt_ns + (spread_ns > RTT_GRANULARITY_NS ? spread_ns : RTT_GRANULARITY_NS);
    if (!rtt->srtt_ns)
        ns = PC__HEDGE_FIRST_NS;
    ns = (ns < least_ns ? least_ns : ns) << rtt->doubled;
    return ns < PC__REDIRECT_PATIENCE_NS ? ns : PC__REDIRECT_PATIENCE_NS;
}

/* ------------------------------------------------------------ what is asked for */

/* After a commit: what was here before it, and nothing that was never asked for. */
static struct pc_run changed_around(const struct pc__blockset *changed, uint64_t block)
{
    uint64_t first = block, low = block - block % CHANGED_BLOCKS;
    uint64_t limit = low + CHANGED_BLOCKS < changed->n_blocks ? low + CHANGED_BLOCKS
                                                              : changed->n_blocks;
    while (first > low && pc__blockset_has(changed, first - 1))
        first--;
    return (struct pc_run){.first_block = first,
                           .n_blocks = pc__blockset_next_absent(changed, block, limit) - first};
}

static struct pc_run changed_or_page(struct pc__readahead *pages, struct pc__streams *streams,
                                     const struct pc__choice_sets *sets, uint64_t block)
{
    if (!pc__blockset_has(sets->changed, block))
        return pc__readahead_scattered(pages, streams, block);
    struct pc_run run = changed_around(sets->changed, block);
    if (run.n_blocks > pc__budget_room(&pages->budget) + 1)
        run = (struct pc_run){.first_block = block, .n_blocks = 1};
    pc__readahead_begin(pages, streams, block, run);
    return run;
}

struct pc__choice pc__choose(struct pc__readahead *pages, struct pc__streams *streams,
                             const struct pc__choice_sets *sets, uint64_t block, bool in_flight,
                             uint64_t most_blocks)
{
    struct pc__budget *budget = &pages->budget;
    struct pc__choice choice = {.n_left_out = 0};
    const bool is_first = !budget->fetched; /* of a small variable, one that brings all of it */
    unsigned one_in = WINDOWS_A_MARK;
    bool was_left_out = false;
    if (!in_flight) {
        pc__budget_touched(budget, 1);
        pc__budget_fetched(budget, 1);
        was_left_out = pc__budget_take_mark(budget, sets, block);
    }
    if (was_left_out) {
        (void)pc__readahead_marked(pages, streams, block, &choice.run);
    } else if (!pc__readahead_sequential(pages, streams, block, in_flight, &choice.run)) {
        choice.run = changed_or_page(pages, streams, sets, block);
        const bool is_ample = pc__budget_room(budget) >= AMPLE_PAGES * choice.run.n_blocks;
        one_in = is_first ? 0 : is_ample && choice.run.n_blocks < LARGE_PAGE ? PAGES_A_MARK : 1;
    }
    if (choice.run.n_blocks > most_blocks)
        choice.run.n_blocks = most_blocks;
    if (choice.run.n_blocks)
        pc__budget_ask(budget, sets, block, one_in, &choice);
    return choice;
}

struct pc__choice pc__choose_carried(struct pc__readahead *pages, struct pc__streams *streams,
                                     const struct pc__choice_sets *sets,
                                     const struct pc__carried *carried, uint64_t most_blocks)
{
    struct pc__choice choice = {.run = pc__readahead_carried(pages, streams, carried)};
    if (choice.run.n_blocks > most_blocks)
        choice.run.n_blocks = most_blocks;
    if (choice.run.n_blocks)
        pc__budget_ask(&pages->budget, sets, UINT64_MAX, WINDOWS_A_MARK, &choice);
    return choice;
}

struct pc__choice pc__choose_fixed(uint64_t n_blocks, unsigned shift, uint64_t block, bool in_flight,
                                   uint64_t most_blocks)
{
    struct pc__choice choice = {.n_left_out = 0};
    choice.run = pc__readahead_fixed(n_blocks, shift, block, in_flight);
    if (choice.run.n_blocks > most_blocks)
        choice.run.n_blocks = most_blocks;
    return choice;
}
