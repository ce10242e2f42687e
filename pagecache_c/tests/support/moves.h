/* moves.h - what the registry does to move a home that lives from one server to another, step by step. */
#ifndef PC_TEST_MOVES_H
#define PC_TEST_MOVES_H

#include "tests/support/commit.h"

struct move {
    struct cluster *c;
    struct server *from, *to;
    struct pc_region_info info; /* of its beginning */
    uint64_t version;           /* what was taken is of this one */
    int fd;
};

static _Atomic uint64_t next_move_id = 0x700000; /* of layers that are no commits */

static inline uint64_t move_latest(struct move *m)
{
    return registry_latest(m->c->registry, m->info.region);
}

/* What was decided by now is published there in a moment: a writer of its node says so without an answer. */
static inline uint64_t move_published(struct move *m)
{
    const uint64_t version = move_latest(m);
    SOON(pc_engine_home_blocks(m->from->engine, m->info.region, version, NULL, 0) >= 0);
    return version;
}

/* lost: blocks that the home lacks, and that no commit has written since. */
static inline struct move move_begin_without(struct cluster *c, struct server *from,
                                             struct server *to, struct pc_region_info info,
                                             const struct pc_run *lost, size_t n_lost)
{
    struct move m = {.c = c, .from = from, .to = to, .info = info};
    m.info.version = m.version = move_published(&m);
    pthread_mutex_lock(&c->lock);
    m.info.term = c->regions[0].info.term + 1;
    pthread_mutex_unlock(&c->lock);
    int rc = PC_ERR_TIMEOUT;
    for (uint64_t until = now_ns() + WAIT; rc == PC_ERR_TIMEOUT && now_ns() < until; usleep(1000))
        rc = pc_engine_rebuild_begin(to->engine, &m.info, lost, n_lost, &m.fd);
    OK(rc);
    return m;
}

static inline struct move move_begin(struct cluster *c, struct server *from, struct server *to,
                                     struct pc_region_info info)
{
    return move_begin_without(c, from, to, info, NULL, 0);
}

/* Staged, and pulled: it is at the taker under that id, and at nobody else. */
static inline void move_pull(struct move *m, uint64_t id, int64_t bytes)
{
    OK(bytes);
    OK(pc_engine_pull(m->to->engine, m->info.region, id, m->from->id, (uint64_t)bytes));
    OK(wait_pulled(m->c, id));
    OK(pc_engine_drop_staged(m->from->engine, m->info.region, id));
}

static inline void move_runs(struct move *m, const struct pc_run *runs, size_t n)
{
    const uint64_t id = next_move_id++;
    move_pull(m, id, pc_engine_stage_home(m->from->engine, m->info.region, m->version, id, runs, n));
    OK(pc_engine_rebuild_take(m->to->engine, m->info.region, m->fd, id));
}

#define MOVE_RUNS 16u

/* All of the version that it was begun at, in layers of a few runs. */
static inline void move_bulk(struct move *m)
{
    struct pc_run runs[1024];
    int64_t n = pc_engine_home_blocks(m->from->engine, m->info.region, m->version, runs, 1024);
    OK(n);
    CHECK(n <= 1024);
    for (int64_t i = 0; i < n; i += MOVE_RUNS)
        move_runs(m, runs + i, n - i < MOVE_RUNS ? (size_t)(n - i) : MOVE_RUNS);
}

/* What changed since. True: something did. */
static inline bool move_delta(struct move *m)
{
    struct pc_run *runs;
    size_t n;
    const uint64_t version = move_published(m);
    OK(registry_changes(m->c->registry, m->info.region, m->version, version, &runs, &n));
    m->version = version;
    if (n)
        move_runs(m, runs, n);
    free(runs);
    return n;
}

static inline void move_record(struct move *m, uint64_t version)
{
    const uint64_t id = next_move_id++;
    move_pull(m, id, pc_engine_stage_record(m->from->engine, m->info.region, version, id));
    OK(pc_engine_rebuild_take_record(m->to->engine, m->info.region, m->fd, id));
}

/* Of [from, before). */
static inline void move_records(struct move *m, uint64_t from, uint64_t before)
{
    for (uint64_t version = from; version < before; version++)
        move_record(m, version);
}

static inline void move_seal(struct move *m)
{
    OK(pc_engine_rebuild_seal_at(m->to->engine, m->info.region, m->fd, m->version));
    close(m->fd);
    m->fd = -1;
}

/* The registry's journal has it from now on. */
static inline void move_write_down(struct move *m)
{
    pthread_mutex_lock(&m->c->lock);
    m->c->regions[0].home = m->to->id;
    m->c->regions[0].info.term = m->info.term;
    pthread_mutex_unlock(&m->c->lock);
}

static inline int move_tell(struct move *m, struct server *server)
{
    return pc_engine_set_homes_of(server->engine, m->info.region, m->info.term, &m->to->id, 1);
}

static inline void move_tell_taker(struct move *m)
{
    int rc = move_tell(m, m->to);
    if (rc == PC_ERR_NO_REGION) /* nobody has used it there */
        rc = pc_engine_define_region(m->to->engine, &m->info, &m->to->id, 1);
    OK(rc);
    CHECK(region_of(m->to, m->info.region).is_home);
}

static inline void move_tell_giver(struct move *m)
{
    OK(move_tell(m, m->from));
    CHECK(!region_of(m->from, m->info.region).is_home);
}

static inline void move_switch(struct move *m)
{
    move_write_down(m);
    move_tell_taker(m);
    move_tell_giver(m);
}

/* With all of its history. Nobody commits meanwhile. */
static inline void move_all(struct cluster *c, struct server *from, struct server *to,
                            struct pc_region_info info)
{
    struct move m = move_begin(c, from, to, info);
    move_bulk(&m);
    move_records(&m, region_of(from, info.region).oldest_version, m.version);
    move_seal(&m);
    move_switch(&m);
}

#endif
