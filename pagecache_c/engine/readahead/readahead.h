/* readahead.h - how much a fault fetches: learned from use, within a budget. Pure. */
#ifndef PC_READAHEAD_H
#define PC_READAHEAD_H

#include "engine/core/core.h"

/* What a fault asks for, beside its block (miss/choose.c). */
#define PC__MOST_LEFT_OUT 4u
struct pc__choice {
    struct pc_run run;             /* n_blocks = 0: nothing more */
    uint64_t left_out[PC__MOST_LEFT_OUT]; /* of the run, these blocks stay absent; in order */
    unsigned n_left_out;
};
/* Of the generation: what is here, on its way, and was here before a commit changed it. */
struct pc__choice_sets {
    const struct pc__blockset *present, *in_flight, *changed;
};

/* fetch_budget.c: how much faults may fetch beyond what is touched. */
#define PC__MOST_MARK_BITS 10u
#define PC__LEAST_MARKED 3u        /* blocks beside the touched one: of fewer none is left out */
/* A block that was left out: touched, it stands for so many. 0: there is none. */
struct pc__mark {
    uint64_t block, stands_for;
};
/* Of a region, under its lock. */
struct pc__budget {
    uint64_t fetched, touched;     /* blocks, so far; touched: as estimated */
    int64_t room;                  /* in quarters of a block */
    uint64_t random;
    struct pc__mark *marks;        /* 1 << mark_bits slots; NULL until a block is left out */
    unsigned mark_bits;
};
void pc__budget_init(struct pc__budget *budget);
void pc__budget_free(struct pc__budget *budget);
/* Blocks that may be asked for beyond those that are touched. */
uint64_t pc__budget_room(const struct pc__budget *budget);
/* What is of no use here is of use in the next piece: the bound is one for both. */
void pc__budget_give(struct pc__budget *budget, uint64_t n_blocks);
void pc__budget_take(struct pc__budget *budget, uint64_t n_blocks);
/* Far more was fetched than touched: so much that readers are told. */
bool pc__budget_wastes(const struct pc__budget *budget);
void pc__budget_touched(struct pc__budget *budget, uint64_t n_blocks);
void pc__budget_fetched(struct pc__budget *budget, uint64_t n_blocks);
/* choice->run is asked for: what of it is absent and not on its way yet, but `block`, which counts by
 * itself. Says which blocks are to be left out of one run in one_in, at random; 0: of none. */
void pc__budget_ask(struct pc__budget *budget, const struct pc__choice_sets *sets, uint64_t block,
                    unsigned one_in, struct pc__choice *choice);
/* The block was touched, and counted as such. True: it had been left out. */
bool pc__budget_take_mark(struct pc__budget *budget, const struct pc__choice_sets *sets, uint64_t block);

/* readahead.c: how much a fault fetches, learned from faults and read sets. */
#define PC__TRIP_BLOCKS 12u /* of a round trip that was not measured */
#define PC__PAGE_LEVELS 12u /* a page of level l has 2^l blocks: 4 KiB to 8 MiB */
struct pc__page_counts { /* of each level: that would have been fetched for the touches that were seen */
    uint64_t n[PC__PAGE_LEVELS];
};

/* What a region has learned, over all its mappings and versions. Under region.lock. */
struct pc__readahead {
    unsigned level;                /* of the page at a new place */
    unsigned first_faults;         /* scattered ones, up to those that find the level */
    unsigned until_probe;          /* scattered pages until one is fetched by smaller ones */
    unsigned patience;             /* pages that must be shown to believe in smaller ones */
    bool has_shrunk;               /* since it last grew */
    uint64_t window_blocks;        /* what a stream asks for once it is one */
    unsigned trip_blocks;          /* a round trip costs as much as moving so many */
    struct pc__budget budget;
    struct pc__page_counts faults; /* right for levels >= level */
    struct pc__page_counts probes; /* for levels >= that of probes */
    struct pc__page_counts exact;  /* for all */
    struct pc__page_counts coarse; /* for levels of 64 KiB and more */
    struct pc__blockset demanded;  /* fetched because a thread touched it, not as part of a stream */
    struct pc__blockset probed;    /* the first block of each page that is fetched by smaller ones */
    struct pc__blockset used;      /* of those in demanded: read sets have shown them */
};

int pc__readahead_init(struct pc__readahead *pages, uint64_t n_blocks);
void pc__readahead_set_trip(struct pc__readahead *pages, unsigned blocks); /* as measured now */
void pc__readahead_free(struct pc__readahead *pages);
/* The block was touched, had been left out, and is not on its way. True: it belongs to a stream, and *run
 * is what to ask for next, beside the block; n_blocks = 0: nothing. */
bool pc__readahead_marked(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                      struct pc_run *run);
/* The block was touched and is absent, in_flight: but on its way. True: it belongs to a stream, and
 * *run is what to ask for next: n_blocks = 0: nothing. */
bool pc__readahead_sequential(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                          bool in_flight, struct pc_run *run);
/* It belongs to none and is not in flight: the page that has it, which may begin a stream. */
struct pc_run pc__readahead_scattered(struct pc__readahead *pages, struct pc__streams *streams,
                                  uint64_t block);
/* Another caller chose the run for that block: it may begin a stream. */
void pc__readahead_begin(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                     struct pc_run run);
/* A stream of a piece goes on in the next one, at adjacent addresses: with what was learned of this one, and
 * with its room. */
struct pc__carried {
    uint64_t rest, window, window_blocks; /* rest: blocks behind this one's end */
    unsigned extensions, level, first_faults, trip_blocks;
};
/* True: a stream has been asked beyond the end, and *carried is what for: once. */
bool pc__readahead_carry(struct pc__readahead *pages, struct pc__streams *streams,
                         struct pc__carried *carried);
/* The run that the stream asks for there, of a region that begins with it. */
struct pc_run pc__readahead_carried(struct pc__readahead *pages, struct pc__streams *streams,
                                    const struct pc__carried *carried);
/* A fixed size: the page of 2^shift bytes that has the block, or nothing where it is in flight. */
struct pc_run pc__readahead_fixed(uint64_t n_blocks, unsigned shift, uint64_t block, bool in_flight);
/* A read set shows the run. exact: each of its blocks was touched. */
void pc__readahead_read(struct pc__readahead *pages, struct pc_run run, bool exact);

#endif
