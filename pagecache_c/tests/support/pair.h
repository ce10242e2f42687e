/* pair.h - two servers in this process, of which server 0 is the home of region 1, and a client of each. */
#ifndef PC_TEST_PAIR_H
#define PC_TEST_PAIR_H

#include "tests/support/commit.h"

struct pair {
    struct cluster *c;
    struct server *s0, *s1;
    pc_client *home, *far, *other; /* far and other: of server 1; other: NULL, where a test has none */
    struct pc_region_info info;
    int trap;
};

/* [data_from, length) of the region is filled, the rest are holes. */
static inline struct pair pair_with_holes(const char *tag, int trap, uint64_t length,
                                          uint64_t data_from)
{
    struct pair p = {.c = cluster_start(2, tag), .trap = trap};
    p.s0 = &p.c->servers[0];
    p.s1 = &p.c->servers[1];
    p.home = attach(p.s0, trap);
    p.far = attach(p.s1, trap);
    p.info = build(p.c, p.s0, p.home, 1, length, data_from);
    return p;
}

static inline struct pair pair_start(const char *tag, int trap, uint64_t length)
{
    return pair_with_holes(tag, trap, length, 0);
}

static inline struct pair pair_of_three(const char *tag, int trap, uint64_t length)
{
    struct pair p = pair_start(tag, trap, length);
    p.other = attach(p.s1, trap);
    return p;
}

/* The end of its clients is the end of all that they had. */
static inline void pair_stop(struct pair *p)
{
    if (p->other)
        pc_client_close(p->other);
    pc_client_close(p->far);
    pc_client_close(p->home);
    SOON(stats_of(p->s0).mappings == 0 && stats_of(p->s1).mappings == 0);
    SOON(stats_of(p->s1).fetches_in_flight == 0 && stats_of(p->s1).faults_waiting == 0);
    cluster_stop(p->c);
}

#endif
