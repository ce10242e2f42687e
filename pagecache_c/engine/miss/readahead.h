/* readahead.h - how much a fault fetches: learned from faults and read sets. See readahead.c. */
#ifndef PC_READAHEAD_H
#define PC_READAHEAD_H

#include "common/blockset.h"
#include "engine/core/session.h"

#include <stdbool.h>
#include <stdint.h>

#define PC__PAGE_LEVELS 12u /* a page of level l has 2^l blocks: 4 KiB to 8 MiB */

/* How many aligned pages of each level would have been fetched for the touches that were seen. */
struct pc__page_counts {
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
    struct pc__page_counts faults; /* right for levels >= level */
    struct pc__page_counts probes; /* for levels >= that of probes */
    struct pc__page_counts exact;  /* for all */
    struct pc__page_counts coarse; /* for levels of 64 KiB and more */
    struct pc__blockset demanded;  /* fetched because a thread touched it, not as part of a stream */
    struct pc__blockset probed;    /* the first block of each page that is fetched by smaller ones */
    struct pc__blockset used;      /* of those in demanded: read sets have shown them */
};

int pc__readahead_init(struct pc__readahead *pages, uint64_t n_blocks);
void pc__readahead_free(struct pc__readahead *pages);
/* The block was touched and is absent, in_flight: but on its way. True: it belongs to a stream, and
 * *run is what to ask for next: n_blocks = 0: nothing. */
bool pc__readahead_sequential(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                          bool in_flight, struct pc_run *run);
/* It belongs to none and is not in flight: the page that has it, which may begin a stream. */
struct pc_run pc__readahead_scattered(struct pc__readahead *pages, struct pc__streams *streams,
                                  uint64_t block);
/* Somebody else chose the run for that block: it may begin a stream. */
void pc__readahead_begin(struct pc__readahead *pages, struct pc__streams *streams, uint64_t block,
                     struct pc_run run);
/* A fixed size: the page of 2^shift bytes that has the block, or nothing where it is in flight. */
struct pc_run pc__readahead_fixed(uint64_t n_blocks, unsigned shift, uint64_t block, bool in_flight);
/* A read set shows the run. exact: each of its blocks was touched. */
void pc__readahead_read(struct pc__readahead *pages, struct pc_run run, bool exact);

#endif
