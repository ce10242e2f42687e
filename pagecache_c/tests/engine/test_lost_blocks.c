/* test_lost_blocks.c - a home that was rebuilt without some blocks, which nobody had: all others are read
 * and changed, those are lost until a commit writes them. Over both traps. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"
#include "tests/support/moves.h"

#define N_BLOCKS 512u
enum { HOME, PEER, READER, N_SERVERS };
#define N(array) (sizeof(array) / sizeof(array)[0])

static const struct pc_run changed[] = {{3, 1}, {100, 50}, {400, 7}};
static const struct pc_run lost[] = {{10, 3}, {200, 1}, {511, 1}};
static const struct pc_run there[] = {{0, 10}, {13, 187}, {201, 310}};

/* HOME is lost; PEER has of version 1 what is `there`. */
struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info;
    int trap, to_keeper;
    struct keeper keeper; /* of PEER; pid 0: none */
};

static struct world world_of(int trap, bool keeps)
{
    struct world w = {.trap = trap, .to_keeper = -1};
    if (keeps)
        w.keeper = keeper_start("lost");
    w.counts = process_counts();
    w.c = cluster_start(N_SERVERS, "lost");
    w.servers = w.c->servers;
    if (keeps) {
        w.to_keeper = keeper_connect(&w.keeper);
        w.counts.descriptors++;
        server_stop(w.c, PEER);
        told.settle_ns = 1 * SECOND;
        server_start(w.c, PEER, "lost", w.to_keeper);
    }
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.servers[i], trap);
    w.info = build(w.c, &w.servers[HOME], w.clients[HOME], 1, (uint64_t)N_BLOCKS << 12, 0);
    CHECK(commit(w.c, &w.servers[HOME], w.clients[HOME], &w.info, 0, changed, N(changed)) == 1);
    struct pc_mapping m = map_at(w.clients[PEER], &w.info, 1, 0);
    OK(pc_client_prefetch(w.clients[PEER], m.id, there, N(there), 1, WAIT));
    OK(pc_client_unmap(w.clients[PEER], m.id));
    struct pc_run has[N(there) + 1];
    CHECK(pc_engine_cached_blocks(w.servers[PEER].engine, w.info.region, 1, has, N(has)) == N(there));
    CHECK(!memcmp(has, there, sizeof there));
    pc_client_close(w.clients[HOME]);
    w.clients[HOME] = NULL;
    w.servers[HOME].lost = true;
    server_stop(w.c, HOME);
    return w;
}

static void world_end(struct world *w)
{
    clients_close(w->clients, N_SERVERS);
    for (int i = PEER; i < N_SERVERS; i++) {
        SOON(stats_of(&w->servers[i]).layers == 0);
        CHECK(stats_of(&w->servers[i]).bad_messages == 0);
    }
    if (w->keeper.pid)
        OK(pc_engine_retire(w->servers[PEER].engine, w->info.region, 1));
    cluster_end(w->c, &w->counts);
    if (w->keeper.pid) {
        keeper_stop(&w->keeper);
        close(w->to_keeper);
    }
}

/* What the registry does; PEER gives what it has. */
static void prepare(struct world *w, struct server *home)
{
    struct pc_region_info info = w->info;
    struct server *peer = &w->servers[PEER];
    int fd;
    info.version = 1;
    OK(pc_engine_rebuild_begin(home->engine, &info, lost, N(lost), &fd));
    if (home == peer) {
        OK(pc_engine_rebuild_copy(home->engine, info.region, fd, 1, there, N(there)));
    } else {
        int64_t bytes = pc_engine_stage_cached(peer->engine, info.region, 1, 7, there, N(there));
        OK(bytes);
        OK(pc_engine_pull(home->engine, info.region, 7, peer->id, (uint64_t)bytes));
        OK(wait_pulled(w->c, 7));
        OK(pc_engine_rebuild_take(home->engine, info.region, fd, 7));
        OK(pc_engine_drop_staged(peer->engine, info.region, 7));
    }
    OK(pc_engine_rebuild_seal(home->engine, info.region, fd));
    close(fd);
}

static void activate(struct world *w, struct server *home)
{
    pthread_mutex_lock(&w->c->lock);
    w->c->regions[0].home = home->id;
    pthread_mutex_unlock(&w->c->lock);
    struct pc_region_info info = w->info;
    info.version = 1;
    for (int i = PEER; i < N_SERVERS; i++) {
        OK(pc_engine_define_region(w->servers[i].engine, &info, &home->id, 1));
        OK(pc_engine_set_homes(w->servers[i].engine, info.region, &home->id, 1));
    }
    CHECK(region_of(home, info.region).is_home);
}

static bool is_in(const struct pc_run *runs, size_t n_runs, uint64_t block)
{
    for (size_t i = 0; i < n_runs; i++)
        if (block >= runs[i].first_block && block - runs[i].first_block < runs[i].n_blocks)
            return true;
    return false;
}

static int gather(pc_client *client, const struct pc_mapping *m, const uint64_t *blocks, size_t n)
{
    const struct pc_rows rows = {.offset_bytes = 8, .stride_bytes = PC_BLOCK_BYTES, .row_bytes = 8};
    uint64_t out[N_BLOCKS];
    return pc_client_gather(client, m->id, &rows, blocks, n, out, WAIT);
}

static struct pc_event last_task_ended(struct world *w)
{
    pthread_mutex_lock(&w->c->lock);
    struct pc_event event = w->c->task_ended;
    pthread_mutex_unlock(&w->c->lock);
    return event;
}

/* The server of the process has said which task needed what. */
static void check_task_ended(struct world *w, uint64_t version, uint64_t block)
{
    char task[2 * PC_TASK_BYTES + 1];
    snprintf(task, sizeof task, "%02x%02x%044x", (unsigned)version, (unsigned)(block % 256), 0x7fu);
    SOON(!strcmp(last_task_ended(w).text, task) && last_task_ended(w).block == block);
    const struct pc_event event = last_task_ended(w);
    CHECK(event.region == w->info.region && event.version == version);
    CHECK(event.error == PC_ERR_HOME_LOST);
}

/* A task that touches the block: its process's exit status; the message names region and block. */
static int status_of_touch(struct world *w, int node, uint64_t version, uint64_t block)
{
    char text[1024] = "", named[64];
    int out[2], status;
    fflush(NULL);
    CHECK(!pipe2(out, O_CLOEXEC));
    pid_t child = fork();
    if (!child) {
        dup2(out[1], 2);
        const uint8_t task[PC_TASK_BYTES] = {(uint8_t)version, (uint8_t)block,
                                             [PC_TASK_BYTES - 1] = 0x7f};
        pc_client *client = attach(&w->servers[node], w->trap);
        struct pc_mapping m = map_at(client, &w->info, version, 0);
        OK(pc_client_task(client, task));
        (void)*block_at(&m, block);
        _exit(0);
    }
    close(out[1]);
    size_t n = 0;
    for (ssize_t got; n < sizeof text - 1 && (got = read(out[0], text + n, sizeof text - 1 - n)) > 0;)
        n += (size_t)got;
    close(out[0]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    snprintf(named, sizeof named, "variable %llu version %llu block %llu cannot be read",
             (unsigned long long)w->info.region, (unsigned long long)version,
             (unsigned long long)block);
    if (WEXITSTATUS(status) == 70 && !strstr(text, named)) {
        fprintf(stderr, "%s\n", text);
        FAIL("a message that does not say what is lost");
    }
    if (WEXITSTATUS(status) == 70)
        check_task_ended(w, version, block);
    return WEXITSTATUS(status);
}

/* On that node a version has these blocks not, and all others, though a fault fetches all at once. */
static void check_lost(struct world *w, int node, uint64_t version, const struct pc_run *runs,
                       size_t n_runs)
{
    pc_client *client = w->clients[node];
    struct pc_mapping m = map_at(client, &w->info, version, 21u << PC_MAP_PAGE_SHIFT);
    uint64_t *owners = registry_owners(w->c->registry, w->info.region, version, N_BLOCKS);
    uint64_t good[N_BLOCKS], n_good = 0;
    for (uint64_t b = 0; b < N_BLOCKS; b++) {
        if (!is_in(runs, n_runs, b)) {
            good[n_good++] = b;
            continue;
        }
        const struct pc_run one = {b, 1};
        CHECK(pc_client_prefetch(client, m.id, &one, 1, 1, WAIT) == PC_ERR_HOME_LOST);
        CHECK(gather(client, &m, &b, 1) == PC_ERR_HOME_LOST);
    }
    const struct pc_run all = {0, N_BLOCKS}; /* what is around them comes all the same */
    CHECK(pc_client_prefetch(client, m.id, &all, 1, 1, WAIT) == (n_runs ? PC_ERR_HOME_LOST : PC_OK));
    int64_t n_around = 0;
    for (uint64_t i = 0; i < n_good; i++)
        n_around += !i || good[i] != good[i - 1] + 1;
    SOON(pc_engine_cached_blocks(w->servers[node].engine, w->info.region, version, NULL, 0) == n_around);
    OK(gather(client, &m, good, n_good));
    for (uint64_t i = 0; i < n_good; i++)
        check_block(w->c, &m, &w->info, version, owners[good[i]], good[i]);
    for (size_t i = 0; i < n_runs; i++)
        CHECK(status_of_touch(w, node, version, runs[i].first_block) == 70);
    free(owners);
    OK(pc_client_unmap(client, m.id));
}

static void check_lost_everywhere(struct world *w, uint64_t version, const struct pc_run *runs,
                                  size_t n_runs)
{
    for (int i = PEER; i < N_SERVERS; i++)
        check_lost(w, i, version, runs, n_runs);
}

/* Writes the runs, all of each block. */
static void write_all_of(struct world *w, int node, uint64_t base, const struct pc_run *runs,
                         size_t n_runs)
{
    struct transaction t;
    OK(try_begin(w->c, &w->servers[node], w->clients[node], &w->info, base, &t));
    OK(pc_client_blank(t.client, t.m.id, runs, n_runs));
    for (size_t i = 0; i < n_runs; i++)
        CHECK(*block_at(&t.m, runs[i].first_block) == 0);
    write_runs(&t, runs, n_runs);
    OK(try_stage(&t));
    OK(try_pull(&t));
    CHECK(decide(&t) == base + 1);
    tell(&t);
    OK(pc_client_unmap(t.client, t.m.id));
}

static const struct pc_run one_of_three[] = {{11, 1}};
static const struct pc_run after_one[] = {{10, 1}, {12, 1}, {200, 1}, {511, 1}};
static const struct pc_run three_and_more[] = {{9, 4}, {511, 1}};
static const struct pc_run after_more[] = {{200, 1}};

/* Each version has what was written up to it; a block before the first that wrote it stays lost. */
static void check_versions(struct world *w, uint64_t newest)
{
    check_lost_everywhere(w, 1, lost, N(lost));
    if (newest > 1)
        check_lost_everywhere(w, 2, after_one, N(after_one));
    if (newest > 2)
        check_lost_everywhere(w, 3, after_more, N(after_more));
    if (newest > 3)
        check_lost_everywhere(w, 4, NULL, 0);
}

static void check_all_the_way(struct world *w, struct server *home)
{
    check_versions(w, 1);
    struct pc_mapping m = map_at(w->clients[READER], &w->info, 1, 0); /* version 1 stays in use */
    write_all_of(w, READER, 1, one_of_three, N(one_of_three));
    check_versions(w, 2);
    write_all_of(w, PEER, 2, three_and_more, N(three_and_more));
    SOON(stats_of(home).commits_applied == 2);
    check_versions(w, 3);
    OK(pc_client_unmap(w->clients[READER], m.id));
    write_all_of(w, READER, 3, after_more, N(after_more));
    check_versions(w, 4);
}

static void test_only_those_are_lost_at_a_peer(int trap)
{
    struct world w = world_of(trap, false);
    prepare(&w, &w.servers[PEER]);
    activate(&w, &w.servers[PEER]);
    check_all_the_way(&w, &w.servers[PEER]);
    world_end(&w);
}

static void test_only_those_are_lost_at_a_reader(int trap)
{
    struct world w = world_of(trap, false);
    prepare(&w, &w.servers[READER]);
    activate(&w, &w.servers[READER]);
    check_all_the_way(&w, &w.servers[READER]);
    world_end(&w);
}

static void restart_peer(struct world *w)
{
    pc_client_close(w->clients[PEER]);
    server_stop(w->c, PEER);
    close(w->to_keeper);
    w->to_keeper = keeper_connect(&w->keeper);
    server_start(w->c, PEER, "lost", w->to_keeper);
    w->clients[PEER] = attach(&w->servers[PEER], w->trap);
}

/* It moves while commits write what is lost. Versions in which more was lost stay behind. */
static void test_it_moves(int trap)
{
    struct world w = world_of(trap, true);
    prepare(&w, &w.servers[PEER]);
    activate(&w, &w.servers[PEER]);
    write_all_of(&w, READER, 1, one_of_three, N(one_of_three));
    struct move m = move_begin_without(w.c, &w.servers[PEER], &w.servers[READER], w.info, after_one,
                                       N(after_one));
    CHECK(pc_engine_stage_home(m.from->engine, 1, 2, 5, lost, 1) == PC_ERR_HOME_LOST);
    move_bulk(&m);
    write_all_of(&w, PEER, 2, three_and_more, N(three_and_more));
    CHECK(move_delta(&m));
    for (uint64_t version = 1; version < 3; version++)
        CHECK(pc_engine_stage_record(m.from->engine, 1, version, 5) == PC_ERR_HOME_LOST);
    move_seal(&m);
    move_switch(&m);
    CHECK(region_of(m.to, 1).oldest_version == 3);
    check_lost_everywhere(&w, 3, after_more, N(after_more));
    /* And back, where records of versions with more lost blocks lie about, which a restart finds. */
    CHECK(commit(w.c, &w.servers[READER], w.clients[READER], &w.info, 3, changed, 1) == 4);
    m = move_begin_without(w.c, m.to, m.from, w.info, after_more, N(after_more));
    move_bulk(&m);
    move_record(&m, 3);
    move_seal(&m);
    move_switch(&m);
    restart_peer(&w);
    OK(pc_engine_define_region(m.to->engine, &m.info, &m.to->id, 1));
    CHECK(region_of(m.to, 1).is_home && region_of(m.to, 1).oldest_version == 3);
    check_lost_everywhere(&w, 3, after_more, N(after_more));
    check_lost_everywhere(&w, 4, after_more, N(after_more));
    write_all_of(&w, READER, 4, after_more, N(after_more));
    check_lost_everywhere(&w, 5, NULL, 0);
    world_end(&w);
}

/* The keeper has the notes: while it is prepared, as a home, and once blocks were written. */
static void test_restarts(int trap)
{
    struct world w = world_of(trap, true);
    struct server *home = &w.servers[PEER];
    prepare(&w, home);
    restart_peer(&w);
    CHECK(!region_of(home, w.info.region).is_home);
    activate(&w, home);
    restart_peer(&w);
    activate(&w, home);
    check_versions(&w, 1);
    write_all_of(&w, READER, 1, one_of_three, N(one_of_three));
    restart_peer(&w);
    activate(&w, home);
    check_versions(&w, 2);
    write_all_of(&w, READER, 2, three_and_more, N(three_and_more));
    SOON(stats_of(home).commits_applied >= 1);
    restart_peer(&w);
    activate(&w, home);
    check_versions(&w, 3);
    world_end(&w);
}

/* Who opens a region is told the number of its loss, also who has it mapped already: both at once. */
static void test_who_opens_it_is_told(int trap)
{
    struct world w = world_of(trap, false);
    struct server *home = &w.servers[PEER], *reader = &w.servers[READER];
    pc_client *client = w.clients[READER];
    struct pc_mapping before = map_at(client, &w.info, 1, 0), m = {0}, private = {0};
    CHECK(before.loss == 0);
    prepare(&w, home);
    activate(&w, home);
    OK(pc_engine_region_lacks(reader->engine, w.info.region, 77));
    for (uint64_t until = now_ns() + WAIT; m.loss != 77 && now_ns() < until; usleep(1000)) {
        if (m.id)
            OK(pc_client_unmap(client, m.id));
        m = map_at(client, &w.info, 1, 0);
        CHECK(m.id == before.id);
    }
    CHECK(m.loss == 77);
    private = map_at(client, &w.info, 1, PC_MAP_PRIVATE);
    CHECK(private.loss == 77);
    OK(pc_client_unmap(client, private.id));
    OK(pc_client_unmap(client, m.id));
    OK(pc_client_unmap(client, before.id));
    OK(pc_engine_region_lacks(reader->engine, w.info.region, 0));
    m = map_at(client, &w.info, 1, 0);
    CHECK(m.loss == 0);
    OK(pc_client_unmap(client, m.id));
    struct pc_region_info info = w.info; /* a definition says it, too */
    info.version = 1;
    info.loss = 78;
    OK(pc_engine_define_region(home->engine, &info, &home->id, 1));
    m = map_at(w.clients[PEER], &w.info, 1, 0);
    CHECK(m.loss == 78);
    OK(pc_client_unmap(w.clients[PEER], m.id));
    CHECK(pc_engine_region_lacks(home->engine, 99, 1) == PC_ERR_NO_REGION);
    world_end(&w);
}

/* What makes no sense is refused, and nothing of it stays. */
static void test_runs_that_make_no_sense(int trap)
{
    struct world w = world_of(trap, false);
    static const struct pc_run bad[][2] = {
        {{5, 2}, {6, 1}}, {{9, 1}, {2, 1}}, {{N_BLOCKS, 1}, {0, 0}}, {{0, N_BLOCKS}, {N_BLOCKS, 1}},
        {{1, UINT64_MAX}, {3, 1}}, {{4, 0}, {5, 1}}};
    pc_engine *peer = w.servers[PEER].engine;
    int fd;
    for (size_t i = 0; i < N(bad); i++) {
        CHECK(pc_engine_rebuild_begin(peer, &w.info, bad[i], 2, &fd) == PC_ERR_RANGE);
        CHECK(fd == -1);
    }
    struct transaction t;
    prepare(&w, &w.servers[PEER]);
    activate(&w, &w.servers[PEER]);
    OK(try_begin(w.c, &w.servers[READER], w.clients[READER], &w.info, 1, &t));
    CHECK(pc_client_blank(t.client, t.m.id, bad[2], 1) == PC_ERR_RANGE);
    OK(pc_client_unmap(t.client, t.m.id));
    struct pc_mapping m = map_at(w.clients[READER], &w.info, 1, 0);
    CHECK(pc_client_blank(w.clients[READER], m.id, lost, 1) == PC_ERR_RANGE); /* not private */
    OK(pc_client_unmap(w.clients[READER], m.id));
    world_end(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(only_those_are_lost_at_a_peer),
        TEST(only_those_are_lost_at_a_reader),
        TEST(restarts),
        TEST(it_moves),
        TEST(who_opens_it_is_told),
        TEST(runs_that_make_no_sense),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
