/* test_move.c - a home that lives moves to another server while readers read and writers commit, over both
 * traps. The tests do what the registry does. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"
#include "tests/support/moves.h"

#include <sys/stat.h>

#define N_BLOCKS 256u
enum { GIVER, TAKER, READER, N_SERVERS };

static const struct pc_run all = {0, N_BLOCKS};
static const struct pc_run some[] = {{3, 1}, {100, 50}, {200, 7}}, one[] = {{101, 3}}, two[] = {{7, 2}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])
#if defined(__SANITIZE_THREAD__)
static const bool is_tsan = true;
#else
static const bool is_tsan = false;
#endif

struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info; /* homed at GIVER */
    uint64_t latest;
};

static struct world world_begin(int trap, uint64_t data_from)
{
    struct world w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "move")};
    w.servers = w.c->servers;
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.servers[i], trap);
    w.info = build(w.c, &w.servers[GIVER], w.clients[GIVER], 1, (uint64_t)N_BLOCKS << 12, data_from);
    return w;
}

static void world_end(struct world *w)
{
    clients_close(w->clients, N_SERVERS);
    for (int i = 0; i < N_SERVERS; i++)
        SOON(stats_of(&w->servers[i]).layers == 0);
    cluster_end(w->c, &w->counts);
}

static void commit_at(struct world *w, int node, const struct pc_run *runs, size_t n)
{
    CHECK(commit(w->c, &w->servers[node], w->clients[node], &w->info, w->latest, runs, n) ==
          w->latest + 1);
    w->latest++;
}

static struct move begin(struct world *w, int from, int to)
{
    return move_begin(w->c, &w->servers[from], &w->servers[to], w->info);
}

/* Every version from every node. */
static void check_all(struct world *w)
{
    for (int i = 0; i < N_SERVERS; i++)
        for (uint64_t version = w->latest + 1; version-- > 0;)
            check_at(w->c, w->clients[i], &w->info, version);
}

static bool has_former(struct server *server, uint64_t id)
{
    return region_of(server, id).leaves_home;
}

/* Of homes, in memory or on disk. */
static uint64_t held_bytes(struct server *server)
{
    const struct pc_engine_stats stats = stats_of(server);
    return stats.home_bytes + stats.disk_bytes;
}

/* Commits go on between all steps, and after it. Whoever mapped what reads on. */
static void check_moves_with_commits(int trap, int writer)
{
    struct world w = world_begin(trap, 0);
    struct pc_mapping mine = map_at(w.clients[GIVER], &w.info, 0, 0); /* of the base, without a trap */
    struct pc_mapping theirs = map_at(w.clients[READER], &w.info, 0, 0);
    commit_at(&w, writer, some, N(some));
    commit_at(&w, writer, one, N(one));
    struct move m = begin(&w, GIVER, TAKER);
    commit_at(&w, writer, two, N(two));
    move_bulk(&m);
    commit_at(&w, writer, some, N(some));
    CHECK(move_delta(&m));
    move_records(&m, 0, 2);
    commit_at(&w, writer, one, N(one));
    CHECK(move_delta(&m) && !move_delta(&m));
    move_records(&m, 2, w.latest);
    move_seal(&m);
    CHECK(!region_of(m.to, 1).is_home);
    move_switch(&m);
    SOON(!has_former(m.from, 1));
    CHECK(region_of(m.to, 1).oldest_version == 0);
    check_version(w.c, &mine, &w.info, 0);
    check_all(&w);
    commit_at(&w, GIVER, two, N(two));
    commit_at(&w, TAKER, some, N(some));
    commit_at(&w, READER, one, N(one));
    check_version(w.c, &mine, &w.info, 0);
    check_version(w.c, &theirs, &w.info, 0);
    check_all(&w);
    CHECK(held_bytes(m.from) == (uint64_t)N_BLOCKS << 12);
    CHECK(stats_of(m.from).history_records == 0);
    OK(pc_client_unmap(w.clients[GIVER], mine.id));
    SOON(held_bytes(m.from) == 0);
    OK(pc_client_unmap(w.clients[READER], theirs.id));
    check_all(&w);
    world_end(&w);
}

static void test_moves_with_commits(int trap)
{
    for (int writer = 0; writer < N_SERVERS; writer++)
        check_moves_with_commits(trap, writer);
}

/* Of what is not moved of the history, nobody gets anything. */
static void test_history_is_moved_in_part(int trap)
{
    struct world w = world_begin(trap, 0);
    struct pc_mapping mapping;
    for (int i = 0; i < 4; i++)
        commit_at(&w, READER, i % 2 ? one : some, i % 2 ? N(one) : N(some));
    struct move m = begin(&w, GIVER, TAKER);
    move_bulk(&m);
    move_record(&m, 0); /* and a gap: it is of no use */
    move_records(&m, 2, 4);
    CHECK(pc_engine_stage_record(m.from->engine, 1, 4, 5) == PC_ERR_NO_VERSION);
    move_seal(&m);
    move_switch(&m);
    CHECK(region_of(m.to, 1).oldest_version == 2);
    for (int i = 0; i < N_SERVERS; i++) {
        for (uint64_t version = 4; version >= 2; version--)
            check_at(w.c, w.clients[i], &w.info, version);
        int rc = try_map(w.clients[i], &w.info, 1, 0, &mapping);
        if (!rc) {
            rc = pc_client_prefetch(w.clients[i], mapping.id, &all, 1, 1, WAIT);
            OK(pc_client_unmap(w.clients[i], mapping.id));
        }
        CHECK(rc == PC_ERR_EXPIRED);
    }
    world_end(&w);
}

static void commit_zeros(struct world *w, int node, struct pc_run run)
{
    struct transaction t;
    OK(try_begin(w->c, &w->servers[node], w->clients[node], &w->info, w->latest, &t));
    memset((void *)(uintptr_t)block_at(&t.m, run.first_block), 0, run.n_blocks << 12);
    CHECK(pc_client_dirty(t.client, t.m.id, t.runs, 1) == 1);
    t.n_runs = 1;
    OK(try_stage(&t));
    OK(try_pull(&t));
    CHECK(decide(&t) == ++w->latest);
    tell(&t);
    OK(pc_client_unmap(t.client, t.m.id));
}

/* [first, past) of the mapping is zeros, or as it was built. */
static void check_words(const struct pc_mapping *m, uint64_t first, uint64_t past, bool built)
{
    for (uint64_t o = first << 12; o < past << 12; o += 8)
        CHECK(at(m, o) == (built ? pattern(1, o) : 0));
}

/* Half of it was never written: it is nowhere after the move either. What a commit made zeros is zeros. */
static void test_holes_and_zeros(int trap)
{
    struct world w = world_begin(trap, (uint64_t)N_BLOCKS / 2 << 12);
    const struct pc_run zeroed = {200, 20};
    struct pc_run runs[4];
    struct stat st;
    struct move m = begin(&w, GIVER, TAKER);
    CHECK(pc_engine_home_blocks(m.from->engine, 1, 0, runs, 4) == 1 &&
          runs[0].first_block == N_BLOCKS / 2 && runs[0].n_blocks == N_BLOCKS / 2);
    move_bulk(&m);
    commit_zeros(&w, READER, zeroed);
    CHECK(move_delta(&m));
    move_records(&m, 0, 1);
    int fd = dup(m.fd);
    move_seal(&m);
    move_switch(&m);
    OK(fstat(fd, &st));
    close(fd);
    if (MEDIUM == PC_MEDIUM_MEMORY) /* on disk all of the room is taken at once */
        CHECK((uint64_t)st.st_blocks * 512 == (uint64_t)N_BLOCKS / 2 << 12);
    CHECK(pc_engine_home_blocks(m.to->engine, 1, 1, runs, 4) == 1 && runs[0].n_blocks == N_BLOCKS / 2);
    for (int i = 0; i < N_SERVERS; i++)
        for (uint64_t version = 0; version < 2; version++) {
            struct pc_mapping mapping = map_at(w.clients[i], &w.info, version, 0);
            check_words(&mapping, 0, N_BLOCKS / 2, false);
            check_words(&mapping, N_BLOCKS / 2, 200, true);
            check_words(&mapping, 200, 220, version == 0);
            check_words(&mapping, 220, N_BLOCKS, true);
            OK(pc_client_unmap(w.clients[i], mapping.id));
        }
    world_end(&w);
}

/* It is given up before and after the seal: nobody has noticed, and nothing stays of it. */
static void test_given_up(int trap)
{
    struct world w = world_begin(trap, 0);
    commit_at(&w, READER, some, N(some));
    commit_at(&w, READER, one, N(one));
    for (int sealed = 0; sealed < 2; sealed++) {
        struct move m = begin(&w, GIVER, TAKER);
        move_bulk(&m);
        move_records(&m, 0, w.latest);
        CHECK(stats_of(m.to).history_records == w.latest);
        int fd = dup(m.fd);
        if (sealed)
            move_seal(&m);
        else
            close(m.fd);
        OK(pc_engine_rebuild_drop(m.to->engine, 1, fd));
        CHECK(pc_engine_rebuild_take_record(m.to->engine, 1, fd, 5) == PC_ERR_NO_REGION);
        CHECK(pc_engine_rebuild_seal_at(m.to->engine, 1, fd, 9) == PC_ERR_NO_REGION);
        close(fd);
        CHECK(stats_of(m.to).history_records == 0);
        CHECK(stats_of(m.to).layers == 0 && region_of(m.from, 1).is_home);
        commit_at(&w, TAKER, two, N(two));
        check_all(&w);
    }
    move_all(w.c, &w.servers[GIVER], &w.servers[TAKER], w.info);
    check_all(&w);
    world_end(&w);
}

/* What is asked for at the wrong server, or of a version that there is not. */
static void test_what_is_not_there(int trap)
{
    struct world w = world_begin(trap, 0);
    commit_at(&w, READER, some, N(some));
    pc_engine *giver = w.servers[GIVER].engine, *taker = w.servers[TAKER].engine;
    struct pc_run runs[4];
    check_at(w.c, w.clients[TAKER], &w.info, 1);
    CHECK(pc_engine_home_blocks(taker, 1, 1, runs, 4) == PC_ERR_NO_REGION);
    CHECK(pc_engine_home_blocks(giver, 77, 1, runs, 4) == PC_ERR_NO_REGION);
    CHECK(pc_engine_home_blocks(giver, 1, 2, runs, 4) == PC_ERR_NO_VERSION);
    CHECK(pc_engine_stage_home(taker, 1, 1, 5, &all, 1) == PC_ERR_NO_REGION);
    CHECK(pc_engine_stage_home(giver, 1, 2, 5, &all, 1) == PC_ERR_NO_VERSION);
    CHECK(pc_engine_stage_home(giver, 1, 1, 5, NULL, 0) == PC_ERR_RANGE);
    CHECK(pc_engine_stage_record(giver, 1, 1, 5) == PC_ERR_NO_VERSION);
    CHECK(pc_engine_stage_record(taker, 1, 0, 5) == PC_ERR_NO_REGION);
    struct move m = begin(&w, GIVER, TAKER);
    CHECK(pc_engine_rebuild_take_record(taker, 1, m.fd, 5) == PC_ERR_NO_VERSION);
    CHECK(pc_engine_rebuild_seal_at(taker, 1, m.fd, 0) == PC_ERR_RANGE); /* it was begun at 1 */
    move_bulk(&m);
    move_record(&m, 0);
    CHECK(stats_of(&w.servers[GIVER]).layers == 0);
    move_seal(&m);
    move_switch(&m);
    check_all(&w);
    world_end(&w);
}

/* It moves round and round; what was said of an earlier home comes late, and ends none. */
static void test_late_words(int trap)
{
    struct world w = world_begin(trap, 0);
    commit_at(&w, READER, some, N(some));
    struct server *a = &w.servers[GIVER], *b = &w.servers[TAKER];
    check_at(w.c, w.clients[TAKER], &w.info, 1);
    for (int turn = 0; turn < 4; turn++) {
        struct server *from = turn % 2 ? b : a, *to = turn % 2 ? a : b;
        move_all(w.c, from, to, w.info);
        commit_at(&w, turn % N_SERVERS, turn % 2 ? one : some, turn % 2 ? N(one) : N(some));
        const uint64_t term = (uint64_t)turn + 1;
        OK(pc_engine_set_homes_of(to->engine, 1, term - 1, &from->id, 1));
        OK(pc_engine_set_homes(to->engine, 1, &from->id, 1));
        CHECK(pc_engine_set_homes_of(to->engine, 1, term, &from->id, 1) == PC_ERR_EXISTS);
        OK(pc_engine_set_homes_of(to->engine, 1, term, &to->id, 1));
        CHECK(region_of(to, 1).is_home && !region_of(from, 1).is_home);
    }
    struct move m = begin(&w, GIVER, TAKER); /* nor what is prepared for a later term */
    move_bulk(&m);
    OK(pc_engine_set_homes_of(b->engine, 1, 4, &a->id, 1));
    move_seal(&m);
    OK(pc_engine_set_homes(b->engine, 1, &a->id, 1));
    move_switch(&m);
    check_at(w.c, w.clients[READER], &w.info, w.latest);
    world_end(&w);
}

/* Without terms the last word counts. */
static void test_without_terms(int trap)
{
    struct world w = world_begin(trap, 0);
    commit_at(&w, READER, some, N(some));
    check_at(w.c, w.clients[TAKER], &w.info, 1);
    struct move m = begin(&w, GIVER, TAKER);
    pthread_mutex_lock(&w.c->lock);
    w.c->regions[0].home = m.to->id;
    pthread_mutex_unlock(&w.c->lock);
    close(m.fd);
    m.info.term = 0; /* anew */
    OK(pc_engine_rebuild_begin(m.to->engine, &m.info, NULL, 0, &m.fd));
    move_bulk(&m);
    move_records(&m, 0, 1);
    move_seal(&m);
    OK(pc_engine_set_homes(m.to->engine, 1, &m.to->id, 1));
    OK(pc_engine_set_homes(m.from->engine, 1, &m.to->id, 1));
    CHECK(region_of(m.to, 1).is_home && !region_of(m.from, 1).is_home);
    check_all(&w);
    world_end(&w);
}

struct held_home {
    struct server *server;
    struct pc__region *region;
    struct pc__home *home;
    unsigned held;
};

/* As a reply that does not get on. */
static struct held_home hold(struct server *server)
{
    struct held_home h = {.server = server, .region = pc__region_get(server->engine, 1)};
    pthread_mutex_lock(&h.region->lock);
    h.home = h.region->home;
    h.held = pc__home_hold(h.home);
    pthread_mutex_unlock(&h.region->lock);
    return h;
}

static void release(struct held_home *h)
{
    pc__home_release(h->server->engine, h->region, h->home, h->held);
    pc__region_put(h->server->engine, h->region);
}

static bool worker_waits(const struct held_home *h)
{
    pthread_mutex_lock(&h->region->lock);
    const bool waits = h->home->base_changes && h->home->held_up;
    pthread_mutex_unlock(&h->region->lock);
    return waits;
}

/* A home that leaves in the middle of its worker's work, with replies on their way and a follower. */
static void test_leaves_in_the_middle(int trap)
{
    struct world w = world_begin(trap, 0);
    struct transaction t;
    struct server *giver = &w.servers[GIVER];
    int fd;
    OK(try_begin(w.c, giver, w.clients[GIVER], &w.info, 0, &t));
    write_runs(&t, some, N(some));
    OK(try_stage(&t));
    CHECK(decide(&t) == ++w.latest);
    struct held_home h = hold(giver);
    tell(&t); /* it follows: the base is to change under it */
    SOON(worker_waits(&h));
    struct move m = begin(&w, GIVER, TAKER);
    move_bulk(&m);
    move_records(&m, 0, 1); /* whose commit is not applied */
    move_seal(&m);
    move_switch(&m);
    check_version(w.c, &t.m, &w.info, 1);
    usleep(50000);
    CHECK(has_former(giver, 1));
    const struct pc_region_info info = m.info;
    CHECK(pc_engine_rebuild_begin(giver->engine, &info, NULL, 0, &fd) == PC_ERR_TIMEOUT);
    check_at(w.c, w.clients[GIVER], &w.info, 1);
    release(&h);
    SOON(!has_former(giver, 1));
    check_version(w.c, &t.m, &w.info, 1);
    check_all(&w);
    move_all(w.c, m.to, giver, w.info); /* and back, beside what is still mapped of it */
    check_version(w.c, &t.m, &w.info, 1);
    commit_at(&w, READER, one, N(one));
    check_version(w.c, &t.m, &w.info, 1);
    OK(pc_client_unmap(w.clients[GIVER], t.m.id));
    check_all(&w);
    world_end(&w);
}

struct opener {
    struct world *w;
    int node;
};

static void *open_newest(void *arg)
{
    const struct opener *o = arg;
    check_at(o->w->c, o->w->clients[o->node], &o->w->info, o->w->latest);
    return NULL;
}

/* Who waits at the giver for a version that came after it gets that from the taker. */
static void check_who_waits(int trap, int node)
{
    told.fetch_timeout_ns = told.fault_timeout_ns = WAIT; /* else a connection that waits too long helps */
    struct world w = world_begin(trap, 0);
    struct server *giver = &w.servers[GIVER];
    struct opener opener = {&w, node};
    pthread_t thread;
    commit_at(&w, READER, some, N(some));
    for (int i = 0; i < N_SERVERS; i++)
        check_at(w.c, w.clients[i], &w.info, 1);
    giver->quiet = giver->hold_published = true; /* it hears of no more commits */
    struct transaction t;
    OK(try_begin(w.c, &w.servers[TAKER], w.clients[TAKER], &w.info, 1, &t));
    write_runs(&t, one, N(one));
    struct move m = begin(&w, GIVER, TAKER);
    move_bulk(&m);
    move_records(&m, 0, 1);
    move_seal(&m);
    move_write_down(&m);
    move_tell_taker(&m);
    OK(try_stage(&t));
    OK(try_pull(&t));
    CHECK(decide(&t) == ++w.latest);
    tell(&t);
    OK(pc_client_unmap(w.clients[TAKER], t.m.id));
    CHECK(!pthread_create(&thread, NULL, open_newest, &opener));
    SOON(giver->published_asked == 1);
    move_tell_giver(&m);
    if (node == GIVER)
        giver->hold_published = false; /* it asks which blocks changed, in its turn */
    pthread_join(thread, NULL);
    giver->hold_published = false;
    check_all(&w);
    world_end(&w);
}

static void test_who_waits_elsewhere(int trap)
{
    check_who_waits(trap, READER);
}

static void test_who_waits_there(int trap)
{
    check_who_waits(trap, GIVER);
}

/* A layer that was pulled for a commit which is not decided before the move. */
static void test_a_commit_begins_before(int trap)
{
    struct world w = world_begin(trap, 0);
    struct transaction t;
    OK(try_begin(w.c, &w.servers[READER], w.clients[READER], &w.info, 0, &t));
    write_runs(&t, some, N(some));
    OK(try_stage(&t));
    OK(try_pull(&t));
    move_all(w.c, &w.servers[GIVER], &w.servers[TAKER], w.info);
    CHECK(pc_engine_has_layer(w.servers[GIVER].engine, 1, t.id));
    OK(try_pull(&t)); /* anew */
    CHECK(decide(&t) == ++w.latest);
    tell(&t);
    OK(pc_engine_drop_staged(w.servers[GIVER].engine, 1, t.id));
    OK(pc_client_unmap(w.clients[READER], t.m.id));
    check_all(&w);
    world_end(&w);
}

/* Who has built a region in place keeps it, and so do its children, at the version that it is at. */
static void test_built_in_place(int trap)
{
    struct world w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "move")};
    struct pc_mapping built;
    int status;
    w.servers = w.c->servers;
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.servers[i], trap);
    w.info = (struct pc_region_info){.region = 1,
                                     .base_address = PC_WINDOW_BEGIN + (1ull << 28),
                                     .length_bytes = (uint64_t)N_BLOCKS << 12};
    pc_client *builder = w.clients[GIVER];
    OK(pc_client_build(builder, 1, w.info.base_address, w.info.length_bytes, MEDIUM, WAIT, &built));
    fill_pattern((uint64_t *)(uintptr_t)built.address, 1, 0, w.info.length_bytes);
    OK(pc_client_build_keep(builder, built.id)); /* a library goes on with it: children have it too */
    OK(pc_client_build_seal(builder, built.id, WAIT));
    publish(w.c, w.info, w.servers[GIVER].id);
    move_all(w.c, &w.servers[GIVER], &w.servers[TAKER], w.info);
    commit_at(&w, READER, some, N(some));
    check_words(&built, 0, N_BLOCKS, true);
    fflush(NULL);
    pid_t child = is_tsan ? 0 : fork(); /* the child starts a thread */
    if (!child && !is_tsan) {
        OK(pc_client_after_fork(builder));
        check_words(&built, 0, N_BLOCKS, true);
        _exit(0);
    }
    if (child)
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(pc_client_unmap(builder, built.id));
    check_all(&w);
    world_end(&w);
}

/* ------------------------------------------------------------------ restarts */

struct kept {
    struct world w;
    struct keeper keeper;
    int server, to_keeper, trap;
};

/* That server has a keeper. */
static struct kept kept_world(int trap, int server)
{
    struct kept k = {.keeper = keeper_start("move"), .server = server, .trap = trap};
    struct world *w = &k.w;
    *w = (struct world){.counts = process_counts(), .c = cluster_new(N_SERVERS)};
    w->servers = w->c->servers;
    told.settle_ns = 2 * SECOND;
    k.to_keeper = keeper_connect(&k.keeper);
    for (int i = 0; i < N_SERVERS; i++) {
        server_start(w->c, i, "move", i == server ? k.to_keeper : -1);
        w->clients[i] = attach(&w->servers[i], trap);
    }
    w->info = build(w->c, &w->servers[GIVER], w->clients[GIVER], 1, (uint64_t)N_BLOCKS << 12, 0);
    w->counts.descriptors++; /* to the keeper */
    return k;
}

static void restart(struct kept *k)
{
    server_stop(k->w.c, k->server);
    close(k->to_keeper);
    k->to_keeper = keeper_connect(&k->keeper);
    server_start(k->w.c, k->server, "move", k->to_keeper);
}

static void kept_end(struct kept *k)
{
    for (int i = 0; i < N_SERVERS; i++)
        (void)pc_engine_retire(k->w.servers[i].engine, 1, 1);
    world_end(&k->w);
    keeper_stop(&k->keeper);
    close(k->to_keeper);
}

/* The taker dies before the seal: it begins again. After it, the taker has all of it, also old versions. */
static void test_the_taker_restarts(int trap)
{
    struct kept k = kept_world(trap, TAKER);
    struct world *w = &k.w;
    for (int i = 0; i < 3; i++)
        commit_at(w, READER, i % 2 ? one : some, i % 2 ? N(one) : N(some));
    struct pc_mapping mapping = map_at(w->clients[TAKER], &w->info, 1, 0);
    struct move m = begin(w, GIVER, TAKER);
    move_bulk(&m);
    move_records(&m, 0, 3);
    restart(&k);
    CHECK(pc_engine_rebuild_seal_at(m.to->engine, 1, m.fd, 3) == PC_ERR_NO_REGION);
    close(m.fd);
    CHECK(stats_of(m.to).history_records == 0);
    m = begin(w, GIVER, TAKER);
    move_bulk(&m);
    commit_at(w, READER, two, N(two));
    CHECK(move_delta(&m));
    move_records(&m, 0, 4);
    move_seal(&m);
    restart(&k);
    CHECK(!region_of(m.to, 1).is_home && stats_of(m.to).history_records == 4);
    move_switch(&m);
    check_all(w);
    restart(&k);
    CHECK(region_of(m.to, 1).is_home);
    OK(pc_engine_set_homes_of(m.to->engine, 1, m.info.term - 1, &m.from->id, 1)); /* a late word */
    CHECK(region_of(m.to, 1).is_home);
    check_all(w);
    check_version(w->c, &mapping, &w->info, 1);
    commit_at(w, GIVER, two, N(two));
    check_all(w);
    OK(pc_client_unmap(w->clients[TAKER], mapping.id));
    kept_end(&k);
}

/* The giver dies before it hears of it, and again afterwards. Who maps its base reads on. */
static void check_giver_restarts(int trap, bool defined)
{
    struct kept k = kept_world(trap, GIVER);
    struct world *w = &k.w;
    struct pc_mapping mapping = map_at(w->clients[GIVER], &w->info, 0, 0);
    for (int i = 0; i < 3; i++) /* to an overlay */
        commit_at(w, READER, i % 2 ? one : some, i % 2 ? N(one) : N(some));
    struct move m = begin(w, GIVER, TAKER);
    move_bulk(&m);
    move_records(&m, 0, w->latest);
    move_seal(&m);
    move_write_down(&m);
    move_tell_taker(&m);
    if (defined) { /* by whoever opens it, or attaches */
        restart(&k);
        SOON(stats_of(m.from).reattached == 1);
    } else { /* or with the registry's word, which may come first */
        OK(pc_client_unmap(w->clients[GIVER], mapping.id));
        pc_client_close(w->clients[GIVER]);
        restart(&k);
        CHECK(region_of(m.from, 1).is_home);
        OK(move_tell(&m, m.from));
        w->clients[GIVER] = attach(m.from, trap);
    }
    CHECK(!region_of(m.from, 1).is_home && region_of(m.to, 1).is_home);
    for (int turn = 0; turn < 3; turn++) {
        commit_at(w, turn, turn % 2 ? one : some, turn % 2 ? N(one) : N(some));
        if (defined)
            check_version(w->c, &mapping, &w->info, 0);
        check_all(w);
        restart(&k);
        CHECK(!region_of(m.from, 1).is_home);
    }
    SOON(stats_of(m.from).reattached == (defined ? 1 : 0));
    if (defined) {
        check_version(w->c, &mapping, &w->info, 0);
        OK(pc_client_unmap(w->clients[GIVER], mapping.id));
    }
    check_all(w);
    SOON(!has_former(m.from, 1));
    move_all(w->c, m.to, m.from, w->info); /* and back */
    check_all(w);
    restart(&k);
    check_all(w);
    kept_end(&k);
}

static void test_the_giver_restarts(int trap)
{
    check_giver_restarts(trap, true);
}

static void test_the_giver_restarts_and_is_told(int trap)
{
    check_giver_restarts(trap, false);
}

/* It gives its home, is the home again before it has heard, and dies: what was said of the taker comes late. */
static void test_the_home_again_restarts(int trap)
{
    struct kept k = kept_world(trap, GIVER);
    struct world *w = &k.w;
    commit_at(w, READER, some, N(some));
    struct move m = begin(w, GIVER, TAKER);
    move_bulk(&m);
    move_seal(&m);
    OK(pc_engine_set_homes_of(m.from->engine, 1, m.info.term + 1, &m.from->id, 1));
    OK(pc_engine_wait_for_keeper(m.from->engine));
    restart(&k);
    OK(pc_engine_set_homes_of(m.from->engine, 1, m.info.term, &m.to->id, 1));
    CHECK(region_of(m.from, 1).is_home);
    OK(pc_engine_rebuild_drop(m.to->engine, 1, -1));
    commit_at(w, READER, one, N(one));
    check_all(w);
    kept_end(&k);
}

/* It dies when the keeper has heard of the base alone: what is left there of the home answers nobody. */
static void test_the_giver_dies_while_it_leaves(int trap)
{
    struct kept k = kept_world(trap, GIVER);
    struct world *w = &k.w;
    struct pc_mapping mapping = map_at(w->clients[GIVER], &w->info, 0, 0);
    commit_at(w, READER, some, N(some)); /* to an overlay */
    SOON(stats_of(&w->servers[GIVER]).commits_applied == 1);
    struct move m = begin(w, GIVER, TAKER);
    move_bulk(&m);
    move_records(&m, 0, w->latest);
    move_seal(&m);
    move_write_down(&m);
    move_tell_taker(&m);
    struct pc__region *region = pc__region_get(m.from->engine, 1);
    pthread_mutex_lock(&region->lock);
    const struct pc__generation *base = pc__home_base_generation(region);
    const struct pc__kept kept = pc__kept_of_left(region, base);
    OK(pc__keep(m.from->engine, &kept, base->memfd));
    pthread_mutex_unlock(&region->lock);
    pc__region_put(m.from->engine, region);
    restart(&k);
    CHECK(pc_engine_home_blocks(m.from->engine, 1, 0, NULL, 0) == PC_ERR_NO_REGION);
    SOON(stats_of(m.from).reattached == 1); /* with the definition */
    CHECK(!region_of(m.from, 1).is_home);
    SOON(!has_former(m.from, 1));
    CHECK(held_bytes(m.from) == (uint64_t)N_BLOCKS << 12); /* it is not one that is evicted */
    check_version(w->c, &mapping, &w->info, 0);
    commit_at(w, READER, one, N(one));
    check_version(w->c, &mapping, &w->info, 0);
    check_all(w);
    OK(pc_client_unmap(w->clients[GIVER], mapping.id));
    kept_end(&k);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(moves_with_commits),
        TEST(history_is_moved_in_part),
        TEST(holes_and_zeros),
        TEST(given_up),
        TEST(what_is_not_there),
        TEST(late_words),
        TEST(without_terms),
        TEST(leaves_in_the_middle),
        TEST(who_waits_elsewhere),
        TEST(who_waits_there),
        TEST(a_commit_begins_before),
        TEST(built_in_place),
        TEST(the_taker_restarts),
        TEST(the_giver_restarts),
        TEST(the_giver_restarts_and_is_told),
        TEST(the_home_again_restarts),
        TEST(the_giver_dies_while_it_leaves),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
