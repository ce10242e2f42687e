/* test_parity.c - layers that are deltas, at the home of their region: read before they are applied, made
 * whole, applied, and applied again after a death between two steps. Server 0 is the home. */
#include "tests/support/deltas.h"
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/length.h"
#include "tests/support/moves.h"
#include "tests/support/pair.h"

#include <signal.h>

#define N(array) (sizeof(array) / sizeof(array)[0])
#define N_BLOCKS 512u

static struct changes changes; /* each test is a process of its own */

static const struct pc_run some[] = {{3, 1}, {10, 20}, {100, 100}, {500, 12}};
static const struct pc_run more[] = {{0, 4}, {15, 1}, {150, 100}, {511, 1}};
static const struct pc_run few[] = {{15, 2}, {199, 2}};

static struct pair parity_start(const char *tag, int trap)
{
    return pair_with_holes(tag, trap, (uint64_t)N_BLOCKS << 12, 0);
}

static uint64_t delta(struct pair *p, struct server *node, const struct pc_run *runs, size_t n)
{
    return commit_change(p->c, &changes, node, 1, true, runs, n);
}

static void check_all(struct pair *p, uint64_t from, uint64_t to)
{
    for (uint64_t version = from; version <= to; version++) {
        check_changes(&changes, p->home, &p->info, version);
        check_changes(&changes, p->far, &p->info, version);
    }
}

/* ------------------------------------------------------------ it is applied */

static void test_applied(int trap)
{
    struct pair p = parity_start("applied", trap);
    check_changes(&changes, p.far, &p.info, 0); /* the region is known there */
    CHECK(delta(&p, p.s0, some, N(some)) == 1);
    CHECK(delta(&p, p.s1, more, N(more)) == 2);
    CHECK(commit_change(p.c, &changes, p.s1, 1, false, few, N(few)) == 3);
    CHECK(delta(&p, p.s0, more, N(more)) == 4);
    CHECK(delta(&p, p.s0, more, N(more)) == 5);
    SOON(stats_of(p.s0).commits_applied == 5);
    check_all(&p, 0, 5); /* the old ones by the history */
    SOON(stats_of(p.s0).layers == 0 && stats_of(p.s1).layers == 0);
    pair_stop(&p);
}

/* Beside a reader of the base: into the overlay, which is folded when the reader has left. */
static void test_applied_to_overlay(int trap)
{
    struct pair p = parity_start("overlay", trap);
    check_changes(&changes, p.far, &p.info, 0);
    struct pc_mapping old = map_at(p.home, &p.info, 0, 0);
    CHECK(delta(&p, p.s0, some, N(some)) == 1);
    CHECK(delta(&p, p.s1, more, N(more)) == 2);
    SOON(stats_of(p.s0).commits_applied == 2);
    check_all(&p, 0, 2);
    for (uint64_t b = 0; b < N_BLOCKS; b++)
        check_words(&changes, 1, 0, b, block_at(&old, b));
    leave_base(p.s0, p.home, 1, &old);
    CHECK(delta(&p, p.s1, few, N(few)) == 3);
    SOON(stats_of(p.s0).commits_applied == 3);
    check_all(&p, 0, 3);
    pair_stop(&p);
}

/* ------------------------------------------------------------ it is pending */

static void check_rows(struct pair *p, uint64_t version)
{
    const struct pc_rows rows = {.stride_bytes = PC_BLOCK_BYTES, .row_bytes = 64};
    uint64_t ids[N_BLOCKS], (*out)[8] = calloc(N_BLOCKS, sizeof *out);
    struct pc_mapping m = map_at(p->far, &p->info, version, 0);
    for (uint64_t b = 0; b < N_BLOCKS; b++)
        ids[b] = N_BLOCKS - 1 - b;
    OK(pc_client_gather(p->far, m.id, &rows, ids, N_BLOCKS, out, WAIT));
    for (uint64_t b = 0; b < N_BLOCKS; b++)
        for (size_t w = 0; w < 8; w++)
            CHECK(out[N_BLOCKS - 1 - b][w] == word_of(&changes, 1, version, b, w));
    free(out);
    OK(pc_client_unmap(p->far, m.id));
}

/* What is staged of the home at that version, or of the record of it (n_runs 0). */
static void check_staged(struct pair *p, uint64_t version, const struct pc_run *runs, size_t n_runs)
{
    const uint64_t id = 0x7001;
    OK(n_runs ? pc_engine_stage_home(p->s0->engine, 1, version, id, runs, n_runs)
              : pc_engine_stage_record(p->s0->engine, 1, version, id));
    struct pc__layer *layer = pc__layer_get(p->s0->engine, pc__layer_id(1, id));
    CHECK(layer && !layer->flags);
    uint64_t words[512];
    for (uint32_t i = 0; i < layer->n_runs; i++)
        for (uint64_t k = 0; k < layer->runs[i].n_blocks; k++) {
            OK(pc__layer_read(layer, layer->positions[i] + k, 1, (uint8_t *)words));
            check_words(&changes, 1, version, layer->runs[i].first_block + k, words);
        }
    pc__layer_put(layer);
    OK(pc_engine_drop_staged(p->s0->engine, 1, id));
}

/* The worker has come to none of them. Every way to read gives each version as it is. */
static void test_pending(int trap)
{
    struct pair p = parity_start("pending", trap);
    struct pc_mapping old = map_at(p.home, &p.info, 0, 0); /* others of the node get a fork */
    check_changes(&changes, p.far, &p.info, 0);
    struct standstill still;
    hold_worker(&still, p.s0);
    CHECK(delta(&p, p.s0, some, N(some)) == 1);
    CHECK(delta(&p, p.s1, more, N(more)) == 2);
    CHECK(commit_change(p.c, &changes, p.s1, 1, false, few, N(few)) == 3);
    CHECK(delta(&p, p.s1, more, N(more)) == 4);
    check_all(&p, 0, 4);
    check_rows(&p, 1);
    check_rows(&p, 4);
    const struct pc_run all = {0, N_BLOCKS};
    for (uint64_t version = 0; version <= 4; version++) {
        struct pc_run found;
        check_staged(&p, version, &all, 1);
        if (version < 4)
            check_staged(&p, version, NULL, 0);
        CHECK(pc_engine_home_blocks(p.s0->engine, 1, version, &found, 1) == 1);
        CHECK(found.first_block == 0 && found.n_blocks == N_BLOCKS);
    }
    CHECK(stats_of(p.s0).commits_applied == 0);
    release_worker(&still);
    SOON(stats_of(p.s0).commits_applied == 4);
    check_all(&p, 0, 4);
    OK(pc_client_unmap(p.home, old.id));
    pair_stop(&p);
}

/* Blocks that were never written are zeros: the delta is what they are then. */
static void test_over_holes(int trap)
{
    struct pair p = pair_with_holes("holes", trap, (uint64_t)N_BLOCKS << 12, 256u << 12);
    struct change change = change_of(p.c, true, some, N(some));
    (void)stage_change(p.s0, 1, &change);
    struct standstill still;
    hold_worker(&still, p.s0);
    (void)decide_change(p.c, &changes, 1, &change);
    OK(pc_engine_publish(p.s0->engine, 1, 1, change.id));
    for (int applied = 0; applied < 2; applied++) {
        struct pc_mapping m = map_at(p.far, &p.info, 1, 0);
        for (uint64_t b = 0; b < N_BLOCKS; b++) {
            const uint64_t was = b < 256 ? 0 : pattern(1, b << 12);
            const uint64_t is = change_has(&change, b) ? written(1, change.id, b << 12) : 0;
            CHECK(*block_at(&m, b) == (was ^ is));
        }
        OK(pc_client_unmap(p.far, m.id));
        if (!applied)
            release_worker(&still);
        SOON(stats_of(p.s0).commits_applied == 1);
    }
    pair_stop(&p);
}

/* ------------------------------------------------------------ nobody takes it for content */

static void test_never_content(int trap)
{
    struct pair p = parity_start("content", trap);
    check_changes(&changes, p.far, &p.info, 0);
    CHECK(delta(&p, p.s1, some, N(some)) == 1);
    uint64_t versions[4];
    struct pc_run runs[8];
    SOON(stats_of(p.s1).layers == 0); /* the writer's node has it no more, */
    CHECK(stats_of(p.s1).retained_layers == 0);
    CHECK(pc_engine_cached_blocks(p.s1->engine, 1, 1, runs, N(runs)) == 0); /* and says so */
    CHECK(commit_change(p.c, &changes, p.s1, 1, false, few, N(few)) == 2); /* others it retains */
    SOON(stats_of(p.s1).retained_layers == 1);
    const int64_t n = pc_engine_cached_versions(p.s1->engine, 1, versions, N(versions));
    CHECK(n >= 1 && versions[0] == 2);
    /* A rebuild takes none. */
    struct move move = move_begin(p.c, p.s0, p.s1, p.info);
    struct change change = change_of(p.c, true, few, N(few));
    (void)stage_change(p.s1, 1, &change);
    CHECK(pc_engine_rebuild_take(p.s1->engine, 1, move.fd, change.id) == PC_ERR_PROTOCOL);
    CHECK(pc_engine_rebuild_take_record(p.s1->engine, 1, move.fd, change.id) == PC_ERR_PROTOCOL);
    CHECK(pc_engine_has_layer(p.s1->engine, 1, change.id) == 1);
    OK(pc_engine_drop_staged(p.s1->engine, 1, change.id));
    OK(pc_engine_rebuild_drop(p.s1->engine, 1, move.fd));
    close(move.fd);
    /* Nor does anybody but the home say that it has made one whole. */
    uint64_t bytes;
    int fd = layer_file(1, 77, PC__LAYER_MADE_WHOLE, few, N(few), &bytes);
    CHECK(pc__layer_stage(p.s1->engine, 1, 77, bytes, fd, 0) == PC_ERR_PROTOCOL);
    CHECK(!pc_engine_has_layer(p.s1->engine, 1, 77));
    pair_stop(&p);
}

/* ------------------------------------------------------------ a home that moves */

static void test_moves_while_pending(int trap)
{
    struct pair p = parity_start("moves", trap);
    check_changes(&changes, p.far, &p.info, 0);
    CHECK(delta(&p, p.s0, some, N(some)) == 1);
    SOON(stats_of(p.s0).commits_applied == 1);
    struct standstill still;
    hold_worker(&still, p.s0);
    CHECK(delta(&p, p.s1, more, N(more)) == 2);
    struct move m = move_begin(p.c, p.s0, p.s1, p.info);
    move_bulk(&m);
    CHECK(delta(&p, p.s1, few, N(few)) == 3);
    CHECK(delta(&p, p.s0, more, N(more)) == 4);
    (void)move_delta(&m);
    CHECK(m.version == 4);
    move_records(&m, 0, 4);
    move_seal(&m);
    /* Decided after that, and pulled before: it is the taker's to apply. */
    struct change last = change_of(p.c, true, some, N(some));
    const uint64_t bytes = stage_change(p.s0, 1, &last);
    OK(pc_engine_pull(p.s1->engine, 1, last.id, p.s0->id, bytes));
    OK(wait_pulled(p.c, last.id));
    move_write_down(&m);
    move_tell_taker(&m);
    CHECK(decide_change(p.c, &changes, 1, &last) == 5);
    OK(pc_engine_publish(p.s1->engine, 1, 5, last.id));
    move_tell_giver(&m);
    OK(pc_engine_publish(p.s0->engine, 1, 5, last.id));
    check_all(&p, 0, 5);
    release_worker(&still);
    SOON(stats_of(p.s1).commits_applied == 1);
    check_all(&p, 0, 5);
    SOON(stats_of(p.s0).layers == 0 && stats_of(p.s1).layers == 0);
    pair_stop(&p);
}

/* ------------------------------------------------------------ what is lost */

static const struct pc_run lost[] = {{10, 3}, {200, 1}, {511, 1}};
static const struct pc_run there[] = {{0, 10}, {13, 187}, {201, 310}};

static bool is_lost(uint64_t block)
{
    for (size_t i = 0; i < N(lost); i++)
        if (block >= lost[i].first_block && block - lost[i].first_block < lost[i].n_blocks)
            return true;
    return false;
}

/* healed: that block is there. */
static void check_but_lost(struct pair *p, uint64_t version, uint64_t healed)
{
    struct pc_mapping m = map_at(p->far, &p->info, version, 0);
    const struct pc_run all = {0, N_BLOCKS}; /* what is around them comes all the same */
    CHECK(pc_client_prefetch(p->far, m.id, &all, 1, 1, WAIT) == PC_ERR_HOME_LOST);
    SOON(pc_client_absent(p->far, m.id) == (healed < N_BLOCKS ? 4 : 5));
    for (uint64_t b = 0; b < N_BLOCKS; b++) {
        const struct pc_run one = {b, 1};
        const int rc = pc_client_prefetch(p->far, m.id, &one, 1, 1, WAIT);
        CHECK(rc == (is_lost(b) && b != healed ? PC_ERR_HOME_LOST : PC_OK));
        if (!rc)
            check_words(&changes, 1, version, b, block_at(&m, b));
    }
    OK(pc_client_unmap(p->far, m.id));
}

/* A delta of lost blocks leaves them lost, pending or applied; and of nothing else there is a layer too. */
static void test_lost_stays_lost(int trap)
{
    struct pair p = parity_start("lost", trap);
    check_changes(&changes, p.far, &p.info, 0);
    struct move m = move_begin_without(p.c, p.s0, p.s1, p.info, lost, N(lost));
    move_runs(&m, there, N(there));
    move_seal(&m);
    move_switch(&m);
    SOON(!region_of(p.s0, 1).leaves_home);
    struct server *home = p.s1;
    pc_client *far = p.home; /* who reads from the new home over the network */
    p.home = p.far;
    p.far = far;
    struct standstill still;
    hold_worker(&still, home);
    CHECK(delta(&p, home, some, N(some)) == 1); /* lost and others */
    CHECK(delta(&p, home, lost, N(lost)) == 2); /* nothing but lost ones */
    check_but_lost(&p, 2, N_BLOCKS);
    const struct pc_run heals = {11, 1};
    CHECK(commit_change(p.c, &changes, home, 1, false, &heals, 1) == 3);
    CHECK(delta(&p, home, lost, N(lost)) == 4); /* of one that is there again */
    check_but_lost(&p, 3, 11);
    check_but_lost(&p, 4, 11);
    CHECK(stats_of(home).commits_applied == 0);
    release_worker(&still);
    SOON(stats_of(home).commits_applied == 4);
    check_but_lost(&p, 2, N_BLOCKS);
    check_but_lost(&p, 3, 11);
    check_but_lost(&p, 4, 11);
    SOON(stats_of(home).layers == 0);
    CHECK(stats_of(home).bad_messages == 0);
    pair_stop(&p);
}

/* ------------------------------------------------------------ deaths */

struct alone {
    struct keeper keeper;
    struct cluster *c;
    struct server *server;
    pc_client *client;
    struct pc_region_info info;
    int to_keeper;
};

static struct alone alone_start(const char *tag, int trap)
{
    struct alone a = {.keeper = keeper_start(tag), .c = cluster_new(1)};
    told.settle_ns = SECOND;
    a.to_keeper = keeper_connect(&a.keeper);
    server_start(a.c, 0, tag, a.to_keeper);
    a.server = &a.c->servers[0];
    a.client = attach(a.server, trap);
    a.info = build(a.c, a.server, a.client, 1, (uint64_t)N_BLOCKS << 12, 0);
    return a;
}

static void alone_again(struct alone *a, const char *tag)
{
    server_stop(a->c, 0);
    close(a->to_keeper);
    a->to_keeper = keeper_connect(&a->keeper);
    server_start(a->c, 0, tag, a->to_keeper);
}

static void alone_stop(struct alone *a)
{
    pc_client_close(a->client);
    SOON(stats_of(a->server).layers == 0);
    cluster_stop(a->c);
    close(a->to_keeper);
    keeper_stop(&a->keeper);
}

static uint64_t delta_alone(struct alone *a, const struct pc_run *runs, size_t n)
{
    return commit_change(a->c, &changes, a->server, 1, true, runs, n);
}

/* What the worker does last before it dies: it has written some of the runs of the next layer. */
static void write_half(struct pc__home *home)
{
    const struct pc__layer *layer = pc__of(home->pending.next, struct pc__layer, link);
    CHECK(layer->flags == PC__LAYER_MADE_WHOLE && !layer->unheard);
    for (uint32_t i = 0; i < layer->n_runs; i += 2) {
        const uint64_t n_bytes = layer->runs[i].n_blocks << 12;
        uint8_t *bytes = malloc(n_bytes);
        OK(pc__layer_read(layer, layer->positions[i], layer->runs[i].n_blocks, bytes));
        CHECK(pwrite(home->overlay.memfd, bytes, n_bytes, (off_t)(layer->runs[i].first_block << 12)) > 0);
        free(bytes);
    }
}

static bool is_held_up(struct pc__region *region)
{
    pthread_mutex_lock(&region->lock);
    const bool is = region->home->held_up;
    pthread_mutex_unlock(&region->lock);
    return is;
}

/* It dies with half of a layer in the overlay. history_bytes 0: the old blocks are nowhere. */
static void dies_in_the_middle(const char *tag, int trap, uint64_t history_bytes)
{
    told.history_bytes = history_bytes;
    struct alone a = alone_start(tag, trap);
    struct pc_mapping old = map_at(a.client, &a.info, 0, 0);
    CHECK(delta_alone(&a, some, N(some)) == 1);
    SOON(stats_of(a.server).commits_applied == 1);
    for (uint64_t version = 2; version <= 3; version++) { /* and it happens again */
        struct pc__region *region = pc__region_get(a.server->engine, 1);
        pthread_mutex_lock(&region->lock); /* a reply that does not get on */
        (void)pc__home_hold(region->home);
        pthread_mutex_unlock(&region->lock);
        CHECK(delta_alone(&a, some, N(some)) == version);
        SOON(is_held_up(region));
        pthread_mutex_lock(&region->lock);
        write_half(region->home);
        pthread_mutex_unlock(&region->lock);
        pc__region_put(a.server->engine, region);
        alone_again(&a, tag);
        SOON(stats_of(a.server).commits_applied == 1);
        check_changes(&changes, a.client, &a.info, version);
    }
    for (uint64_t version = 1; version <= 3 && history_bytes; version++)
        check_changes(&changes, a.client, &a.info, version);
    OK(pc_client_unmap(a.client, old.id));
    CHECK(delta_alone(&a, more, N(more)) == 4);
    SOON(stats_of(a.server).commits_applied == 2);
    check_changes(&changes, a.client, &a.info, 4);
    alone_stop(&a);
}
static void test_dies_in_the_middle(int trap)
{
    dies_in_the_middle("middle", trap, told.history_bytes);
}
static void test_dies_without_history(int trap)
{
    dies_in_the_middle("nohistory", trap, 0);
}

/* A layer that only the keeper has. */
static void keep_by_hand(struct alone *a, uint64_t id, uint32_t flags)
{
    struct pc__layer *layer;
    uint64_t bytes;
    int fd = layer_file(1, id, flags, some, N(some), &bytes);
    OK(pc__layer_open(fd, bytes, 1, id, false, &layer));
    layer->version = 1;
    OK(pc__layer_keep(a->server->engine, layer));
    pc__layer_put(layer);
}

/* It dies when the keeper has the layer that was made whole, and still the delta: the whole one is it. */
static void dies_with_both(const char *tag, int trap, bool whole_first)
{
    struct alone a = alone_start(tag, trap);
    struct change change = change_of(a.c, false, some, N(some)); /* the whole one's content */
    keep_by_hand(&a, change.id, whole_first ? PC__LAYER_MADE_WHOLE : PC__LAYER_DELTA);
    keep_by_hand(&a, change.id, whole_first ? PC__LAYER_DELTA : PC__LAYER_MADE_WHOLE);
    CHECK(decide_change(a.c, &changes, 1, &change) == 1);
    OK(pc_engine_wait_for_keeper(a.server->engine));
    alone_again(&a, tag);
    check_changes(&changes, a.client, &a.info, 1);
    SOON(stats_of(a.server).commits_applied == 1);
    check_changes(&changes, a.client, &a.info, 1);
    SOON(stats_of(a.server).layers == 0);
    alone_again(&a, tag); /* nothing of either is left */
    check_changes(&changes, a.client, &a.info, 1);
    CHECK(stats_of(a.server).layers == 0);
    alone_stop(&a);
}
static void test_dies_with_both(int trap)
{
    dies_with_both("both", trap, false);
}
static void test_dies_with_both_turned(int trap)
{
    dies_with_both("turned", trap, true);
}

static uint64_t overlay_word(struct server *server, uint64_t block)
{
    struct pc__region *region = pc__region_get(server->engine, 1);
    pthread_mutex_lock(&region->lock);
    CHECK(region->home->overlay.memfd >= 0);
    uint64_t word;
    CHECK(pread(region->home->overlay.memfd, &word, sizeof word, (off_t)(block << 12)) == sizeof word);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return word;
}

static bool is_made_whole(struct server *server)
{
    struct pc__region *region = pc__region_get(server->engine, 1);
    pthread_mutex_lock(&region->lock);
    const struct pc__link *next = region->home->pending.next;
    const bool is = next != &region->home->pending &&
                    pc__of((struct pc__link *)(uintptr_t)next, struct pc__layer, link)->flags ==
                        PC__LAYER_MADE_WHOLE;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return is;
}

/* As long as the keeper has not heard of the whole layer, nothing changes that the delta is of: neither
 * the overlay, nor what is read. */
static void test_waits_for_the_keeper(int trap)
{
    struct alone a = alone_start("unheard", trap);
    struct pc_mapping old = map_at(a.client, &a.info, 0, 0);
    CHECK(delta_alone(&a, some, N(some)) == 1);
    SOON(stats_of(a.server).commits_applied == 1);
    struct pc_mapping first = map_at(a.client, &a.info, 1, 0);
    struct change change = change_of(a.c, true, some, N(some));
    (void)stage_change(a.server, 1, &change);
    OK(pc_engine_wait_for_keeper(a.server->engine));
    CHECK(stop_process(a.keeper.pid));
    const uint64_t filling = fill_socket(a.server);
    CHECK(decide_change(a.c, &changes, 1, &change) == 2);
    OK(pc_engine_publish(a.server->engine, 1, 2, change.id));
    SOON(is_made_whole(a.server));
    usleep(200000); /* it would be applied */
    CHECK(stats_of(a.server).commits_applied == 1);
    for (uint64_t b = 10; b < 30; b++) {
        CHECK(overlay_word(a.server, b) == word_of(&changes, 1, 1, b, 0));
        check_words(&changes, 1, 1, b, block_at(&first, b));
    }
    kill(a.keeper.pid, SIGCONT);
    SOON(stats_of(a.server).commits_applied == 2);
    CHECK(overlay_word(a.server, 10) == word_of(&changes, 1, 2, 10, 0));
    pc__unkeep(a.server->engine, filling);
    OK(pc_client_unmap(a.client, first.id));
    OK(pc_client_unmap(a.client, old.id));
    for (uint64_t version = 0; version <= 2; version++)
        check_changes(&changes, a.client, &a.info, version);
    alone_stop(&a);
}

/* ------------------------------------------------------------ SIGKILL at any moment */

struct shared {
    struct changes changes;
    struct registry *registry;
    struct pc_region_info info;
    _Atomic uint64_t rounds, begun;
};

static size_t random_runs(uint64_t seed, struct pc_run *runs)
{
    size_t n = 0;
    for (uint64_t at = seed * 37 % 20; at < N_BLOCKS - 50 && n < 8; n++) {
        const uint64_t length = 1 + (seed >> n & 31);
        runs[n] = (struct pc_run){at, length};
        at += length + 1 + seed * 101 % 60;
    }
    return n;
}

/* Takes back what there was, looks whether it is right, and commits until it is killed. */
static void serve_until_killed(struct shared *shared, const struct keeper *keeper, const char *tag,
                               int trap)
{
    struct cluster *c = cluster_new(1);
    registry_free(c->registry);
    c->registry = shared->registry;
    told.settle_ns = SECOND / 10;
    if (shared->info.region)
        publish(c, shared->info, 0x1000);
    server_start(c, 0, tag, keeper_connect(keeper));
    pc_client *client = attach(&c->servers[0], trap);
    if (!shared->info.region)
        shared->info = build(c, &c->servers[0], client, 1, (uint64_t)N_BLOCKS << 12, 0);
    check_changes(&shared->changes, client, &shared->info, shared->changes.n);
    shared->rounds++;
    struct pc_mapping old = {0};
    for (shared->begun++; shared->changes.n < MAX_CHANGES - 1;) {
        struct pc_run runs[8];
        const uint64_t n = shared->changes.n;
        const size_t n_runs = random_runs(n, runs);
        struct change change = change_of(c, n % 7 != 0, runs, n_runs);
        (void)stage_change(&c->servers[0], 1, &change);
        OK(pc_engine_wait_for_keeper(c->servers[0].engine)); /* as a writer does before it commits */
        (void)decide_change(c, &shared->changes, 1, &change);
        OK(pc_engine_publish(c->servers[0].engine, 1, n + 1, change.id));
        if (n % 16 == 3 && !old.id)
            old = map_at(client, &shared->info, n + 1, 0); /* the next ones go to the overlay */
        if (n % 16 == 11 && old.id) {
            OK(pc_client_unmap(client, old.id));
            old.id = 0;
        }
    }
    _exit(0);
}

static void test_killed_at_any_moment(int trap)
{
    struct keeper keeper = keeper_start("killed");
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    shared->registry = registry_new();
    named_after = getpid();
    const int rounds = (int)rounds_of(12, 80);
    for (int round = 0; round < rounds; round++) {
        const uint64_t begun = shared->begun;
        fflush(NULL);
        pid_t child = fork();
        if (!child)
            serve_until_killed(shared, &keeper, "killed", trap);
        SOON(shared->begun > begun || waitpid(child, NULL, WNOHANG));
        CHECK(shared->begun > begun);
        usleep(1000 + (useconds_t)(round * 7919 % 60000));
        kill(child, SIGKILL);
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    }
    CHECK(shared->rounds == (uint64_t)rounds && shared->changes.n > (uint64_t)rounds);
    registry_free(shared->registry);
    munmap(shared, sizeof *shared);
    keeper_stop(&keeper);
}

static const struct engine_test tests[] = {
    TEST(applied),
    TEST(applied_to_overlay),
    TEST(pending),
    TEST(over_holes),
    TEST(never_content),
    TEST(moves_while_pending),
    TEST(lost_stays_lost),
    TEST(dies_in_the_middle),
    TEST(dies_without_history),
    TEST(dies_with_both),
    TEST(dies_with_both_turned),
    TEST(waits_for_the_keeper),
    TEST(killed_at_any_moment),
};

int main(int argc, char **argv)
{
    const int failed = run_over_traps(tests, N(tests), argc > 1 ? argv[1] : NULL);
    return failed != 0;
}
