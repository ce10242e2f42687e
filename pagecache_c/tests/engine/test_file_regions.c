/* test_file_regions.c - regions that are in a file: what no commit has written comes from there, at every
 * server, and what commits have written never does. Over both traps. The file has the pattern. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"
#include "tests/support/moves.h"

#define N_BLOCKS 512u
enum { HOME, PEER, READER, N_SERVERS };
#define N(array) (sizeof(array) / sizeof(array)[0])

static const struct pc_run all[] = {{0, N_BLOCKS}};
static const struct pc_run first_runs[] = {{3, 1}, {100, 50}, {511, 1}};
static const struct pc_run second_runs[] = {{2, 3}, {400, 7}};
static const struct pc_run third_runs[] = {{120, 10}, {300, 1}};

struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info;
    int trap, to_keeper;
    struct keeper keeper; /* of PEER; pid 0: none */
};

/* Its home is at that server, and has nothing. */
static struct pc_region_info make(struct cluster *c, struct server *home, pc_client *client, uint64_t id)
{
    struct pc_region_info info = {.region = id,
                                  .base_address = PC_WINDOW_BEGIN + (id << 28),
                                  .length_bytes = (uint64_t)N_BLOCKS << 12,
                                  .medium = PC_MEDIUM_FILE};
    int fd;
    OK(pc_client_create(client, id, info.base_address, info.length_bytes, PC_MEDIUM_FILE, WAIT, &fd));
    close(fd);
    OK(pc_client_seal(client, id, WAIT));
    publish(c, info, home->id);
    return info;
}

static struct world world_of(int trap, int home, bool keeps)
{
    struct world w = {.trap = trap, .to_keeper = -1};
    if (keeps)
        w.keeper = keeper_start("file");
    w.counts = process_counts();
    w.c = cluster_start(N_SERVERS, "file");
    w.servers = w.c->servers;
    if (keeps) {
        w.to_keeper = keeper_connect(&w.keeper);
        w.counts.descriptors++;
        server_stop(w.c, PEER);
        told.settle_ns = 1 * SECOND;
        server_start(w.c, PEER, "file", w.to_keeper);
    }
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.servers[i], trap);
    w.info = make(w.c, &w.servers[home], w.clients[home], 1);
    return w;
}

static void world_end(struct world *w)
{
    clients_close(w->clients, N_SERVERS);
    for (int i = 0; i < N_SERVERS; i++)
        if (w->servers[i].engine) {
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

static void check_everywhere(struct world *w, uint64_t newest)
{
    for (int i = 0; i < N_SERVERS; i++)
        for (uint64_t version = 0; w->clients[i] && version <= newest; version++)
            check_at(w->c, w->clients[i], &w->info, version);
}

static uint64_t commit_from(struct world *w, int node, uint64_t base, const struct pc_run *runs, size_t n)
{
    return commit(w->c, &w->servers[node], w->clients[node], &w->info, base, runs, n);
}

/* Each server reads the file by itself, also the home's. */
static void test_every_node_reads_it(int trap)
{
    struct world w = world_of(trap, HOME, false);
    check_everywhere(&w, 0);
    for (int i = 0; i < N_SERVERS; i++) {
        const struct pc_engine_stats s = stats_of(&w.servers[i]);
        CHECK(s.file_blocks == N_BLOCKS && s.file_reads > 0);
        CHECK(s.blocks_served == 0 && s.rows_served == 0);
        CHECK(s.home_bytes == 0);
    }
    world_end(&w);
}

/* Where a version has it from: its commits, or the file. While layers are pending, too. */
static void test_commits_are_kept_and_the_rest_is_the_files(int trap)
{
    struct world w = world_of(trap, HOME, false);
    CHECK(commit_from(&w, READER, 0, first_runs, N(first_runs)) == 1);
    check_everywhere(&w, 1);
    CHECK(commit_from(&w, HOME, 1, second_runs, N(second_runs)) == 2);
    CHECK(commit_from(&w, PEER, 2, third_runs, N(third_runs)) == 3);
    check_everywhere(&w, 3);
    SOON(stats_of(&w.servers[HOME]).commits_applied == 3);
    check_everywhere(&w, 3);
    /* By one who has nothing of it yet, rows too: those of a file come as blocks. */
    pc_client *client = attach(&w.servers[PEER], trap);
    struct pc_mapping m = map_at(client, &w.info, 3, 0);
    const struct pc_rows rows = {.stride_bytes = PC_BLOCK_BYTES, .row_bytes = 8};
    uint64_t ids[N_BLOCKS], out[N_BLOCKS];
    for (uint64_t b = 0; b < N_BLOCKS; b++)
        ids[b] = N_BLOCKS - 1 - b;
    OK(pc_client_gather(client, m.id, &rows, ids, N_BLOCKS, out, WAIT));
    for (uint64_t b = 0; b < N_BLOCKS; b++)
        CHECK(out[b] == *block_at(&m, N_BLOCKS - 1 - b));
    OK(pc_client_unmap(client, m.id));
    pc_client_close(client);
    world_end(&w);
}

static int status_of_touch(struct world *w, int node, const char *says)
{
    char text[1024] = "";
    int out[2], status;
    fflush(NULL);
    CHECK(!pipe2(out, O_CLOEXEC));
    pid_t child = fork();
    if (!child) {
        dup2(out[1], 2);
        pc_client *client = attach(&w->servers[node], w->trap);
        struct pc_mapping m = map_at(client, &w->info, 0, 0);
        (void)*block_at(&m, 7);
        _exit(0);
    }
    close(out[1]);
    size_t n = 0;
    for (ssize_t got; n < sizeof text - 1 && (got = read(out[0], text + n, sizeof text - 1 - n)) > 0;)
        n += (size_t)got;
    close(out[0]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0 || strstr(text, says));
    return WEXITSTATUS(status);
}

/* Who waits is told why; and goes on when it can be read again. */
static void test_a_file_that_cannot_be_read(int trap)
{
    struct world w = world_of(trap, HOME, false);
    pc_client *client = w.clients[READER];
    struct pc_mapping m = map_at(client, &w.info, 0, 0);
    w.servers[READER].file_error = PC_ERR_FILE_CHANGED;
    CHECK(pc_client_prefetch(client, m.id, all, 1, 1, WAIT) == PC_ERR_FILE_CHANGED);
    CHECK(strstr(pc_last_message(), "the test says so"));
    const struct pc_rows rows = {.stride_bytes = PC_BLOCK_BYTES, .row_bytes = 8};
    uint64_t id = 9, out;
    CHECK(pc_client_gather(client, m.id, &rows, &id, 1, &out, WAIT) == PC_ERR_FILE_CHANGED);
    CHECK(strstr(pc_last_message(), "the test says so"));
    CHECK(status_of_touch(&w, READER, "the test says so") == 70);
    w.servers[READER].file_error = 0;
    OK(pc_client_prefetch(client, m.id, all, 1, 1, WAIT));
    CHECK(status_of_touch(&w, READER, "") == 0);
    OK(pc_client_unmap(client, m.id));
    check_everywhere(&w, 0);
    world_end(&w);
}

/* What comes too late is not taken: by then the memory may be of another version. */
static void test_a_reader_of_files_that_does_nothing(int trap)
{
    told.fault_timeout_ns = 1 * SECOND;
    struct world w = world_of(trap, HOME, false);
    struct server *reader = &w.servers[READER];
    pc_client *client = w.clients[READER];
    struct pc_mapping m = map_at(client, &w.info, 0, 0);
    reader->hold_files = true;
    struct pc_file_read read;
    CHECK(status_of_touch(&w, READER, "") == 70); /* not taken */
    CHECK(!pc_engine_file_next(reader->engine, 1, &read));
    while (pc_engine_file_next(reader->engine, 0, &read)) /* what was read ahead for it */
        OK(pc_engine_file_end(reader->engine, read.id, 0, ""));
    OK(pc_client_prefetch(client, m.id, all, 1, 0, WAIT));
    usleep(1500000); /* its time begins when it is taken: others may be before it */
    CHECK(!pc_engine_file_next(reader->engine, 1, &read));
    CHECK(pc_engine_file_next(reader->engine, 0, &read) == 1);
    CHECK(read.region == 1 && read.n_blocks > 1 && !read.urgent);
    uint8_t *bytes = calloc(read.n_blocks, PC_BLOCK_BYTES);
    CHECK(pc_engine_file_fill(reader->engine, read.id, bytes, 100) == PC_ERR_RANGE);
    CHECK(pc_engine_file_fill(reader->engine, read.id, bytes, (read.n_blocks + 1) << 12) == PC_ERR_RANGE);
    SOON(pc_engine_file_fill(reader->engine, read.id, bytes, 0) == PC_ERR_NO_REGION);
    CHECK(pc_engine_file_fill(reader->engine, read.id, bytes, read.n_blocks << 12) == PC_ERR_NO_REGION);
    CHECK(pc_engine_file_end(reader->engine, read.id, 0, "") == PC_ERR_NO_REGION);
    free(bytes);
    while (pc_engine_file_next(reader->engine, 0, &read))
        OK(pc_engine_file_end(reader->engine, read.id, 0, "")); /* without bytes: that is a failure too */
    reader->hold_files = false;
    OK(pc_client_unmap(client, m.id));
    check_everywhere(&w, 0);
    world_end(&w);
    told.fault_timeout_ns = 10 * SECOND;
}

static void restart_peer(struct world *w)
{
    pc_client_close(w->clients[PEER]);
    server_stop(w->c, PEER);
    close(w->to_keeper);
    w->to_keeper = keeper_connect(&w->keeper);
    server_start(w->c, PEER, "file", w->to_keeper);
    w->clients[PEER] = attach(&w->servers[PEER], w->trap);
}

/* The keeper has what commits have written, and which blocks those are. */
static void test_a_home_is_restarted(int trap)
{
    struct world w = world_of(trap, PEER, true);
    restart_peer(&w);
    check_everywhere(&w, 0);
    CHECK(commit_from(&w, READER, 0, first_runs, N(first_runs)) == 1);
    restart_peer(&w);
    check_everywhere(&w, 1);
    SOON(stats_of(&w.servers[PEER]).layers == 0);
    CHECK(commit_from(&w, PEER, 1, second_runs, N(second_runs)) == 2);
    SOON(stats_of(&w.servers[PEER]).layers == 0);
    restart_peer(&w);
    check_everywhere(&w, 2);
    CHECK(commit_from(&w, READER, 2, third_runs, N(third_runs)) == 3);
    check_everywhere(&w, 3);
    world_end(&w);
}

static int try_version(struct world *w, int node, uint64_t version)
{
    struct pc_mapping m;
    int rc = try_map(w->clients[node], &w->info, version, 0, &m);
    if (rc)
        return rc;
    rc = pc_client_prefetch(w->clients[node], m.id, all, 1, 1, WAIT);
    if (!rc)
        check_version(w->c, &m, &w->info, version);
    OK(pc_client_unmap(w->clients[node], m.id));
    return rc;
}

/* Every version is right, or is kept no longer; version 0 and the newest are right. */
static void check_kept(struct world *w, uint64_t newest, uint64_t oldest)
{
    for (int i = 0; i < N_SERVERS; i++)
        for (uint64_t version = 0; w->clients[i] && version <= newest; version++) {
            const int rc = try_version(w, i, version);
            CHECK(rc == PC_OK || rc == PC_ERR_EXPIRED);
            CHECK(rc == PC_OK || (version && version < oldest));
        }
}

/* It moves with what was written, and with the history of that; and back. */
static void test_a_home_moves(int trap)
{
    struct world w = world_of(trap, HOME, false);
    CHECK(commit_from(&w, READER, 0, first_runs, N(first_runs)) == 1);
    CHECK(commit_from(&w, HOME, 1, first_runs, 2) == 2); /* what the file has no part in */
    SOON(stats_of(&w.servers[HOME]).commits_applied == 2);
    struct move m = move_begin(w.c, &w.servers[HOME], &w.servers[PEER], w.info);
    CHECK(pc_engine_home_blocks(m.from->engine, 1, 2, NULL, 0) == (int64_t)N(first_runs));
    move_bulk(&m);
    CHECK(pc_engine_stage_record(m.from->engine, 1, 0, 5) == PC_ERR_HOME_LOST); /* in the file, in part */
    move_record(&m, 1);
    CHECK(commit_from(&w, READER, 2, third_runs, N(third_runs)) == 3);
    CHECK(move_delta(&m));
    CHECK(pc_engine_stage_record(m.from->engine, 1, 2, 5) == PC_ERR_HOME_LOST);
    move_seal(&m);
    move_switch(&m);
    check_kept(&w, 3, 3);
    CHECK(commit_from(&w, READER, 3, second_runs, N(second_runs)) == 4);
    check_kept(&w, 4, 3);
    SOON(stats_of(&w.servers[PEER]).layers == 0);
    m = move_begin(w.c, &w.servers[PEER], &w.servers[HOME], w.info);
    move_bulk(&m);
    move_seal(&m);
    move_switch(&m);
    check_kept(&w, 4, 4);
    CHECK(commit_from(&w, PEER, 4, third_runs, N(third_runs)) == 5);
    check_kept(&w, 5, 4);
    world_end(&w);
}

/* A rebuilt home lacks a part of what was written: that is lost, and not what the file has there. */
static void test_what_was_written_is_lost_and_never_the_files(int trap)
{
    struct world w = world_of(trap, HOME, false);
    static const struct pc_run there[] = {{3, 1}, {100, 20}}, lost[] = {{120, 30}, {511, 1}};
    static const struct pc_run healed[] = {{120, 10}};
    CHECK(commit_from(&w, HOME, 0, first_runs, N(first_runs)) == 1);
    struct pc_mapping m = map_at(w.clients[PEER], &w.info, 1, 0);
    OK(pc_client_prefetch(w.clients[PEER], m.id, there, N(there), 1, WAIT));
    OK(pc_client_unmap(w.clients[PEER], m.id));
    pc_client_close(w.clients[HOME]);
    w.clients[HOME] = NULL;
    w.servers[HOME].lost = true;
    server_stop(w.c, HOME);
    struct pc_region_info info = w.info;
    struct server *home = &w.servers[PEER];
    int fd;
    info.version = 1;
    OK(pc_engine_rebuild_begin(home->engine, &info, lost, N(lost), &fd));
    OK(pc_engine_rebuild_copy(home->engine, 1, fd, 1, there, N(there)));
    OK(pc_engine_rebuild_seal(home->engine, 1, fd));
    close(fd);
    pthread_mutex_lock(&w.c->lock);
    w.c->regions[0].home = home->id;
    pthread_mutex_unlock(&w.c->lock);
    for (int i = PEER; i < N_SERVERS; i++) {
        OK(pc_engine_define_region(w.servers[i].engine, &info, &home->id, 1));
        OK(pc_engine_set_homes(w.servers[i].engine, 1, &home->id, 1));
    }
    for (uint64_t newest = 1; newest <= 2; newest++) {
        uint64_t *owners = registry_owners(w.c->registry, 1, newest, N_BLOCKS);
        for (int i = PEER; i < N_SERVERS; i++) {
            check_at(w.c, w.clients[i], &w.info, 0); /* that is the file's */
            m = map_at(w.clients[i], &w.info, newest, 0);
            for (uint64_t b = 0; b < N_BLOCKS; b++) {
                const struct pc_run one = {b, 1};
                const bool is_lost = (b >= (newest == 2 ? 130 : 120) && b < 150) || b == 511;
                const int rc = pc_client_prefetch(w.clients[i], m.id, &one, 1, 1, WAIT);
                CHECK(rc == (is_lost ? PC_ERR_HOME_LOST : PC_OK));
                if (!rc)
                    check_block(w.c, &m, &w.info, newest, owners[b], b);
            }
            OK(pc_client_unmap(w.clients[i], m.id));
        }
        free(owners);
        if (newest == 2)
            break;
        struct transaction t; /* a commit writes some of it */
        OK(try_begin(w.c, &w.servers[READER], w.clients[READER], &w.info, 1, &t));
        OK(pc_client_blank(t.client, t.m.id, healed, 1));
        write_runs(&t, healed, 1);
        OK(try_stage(&t));
        OK(try_pull(&t));
        CHECK(decide(&t) == 2);
        tell(&t);
        OK(pc_client_unmap(t.client, t.m.id));
        SOON(stats_of(home).layers == 0);
    }
    world_end(&w);
}

/* ------------------------------------------------------------------ many at once */

static _Atomic bool over;

static void *read_files(void *server)
{
    while (!over)
        if (!read_a_file(server))
            usleep(100);
    return NULL;
}

static void *read_rows(void *arg)
{
    struct world *w = arg;
    pc_client *client = attach(&w->servers[READER], w->trap);
    unsigned seed = (unsigned)(uintptr_t)&seed;
    for (int i = 0; i < 60; i++) {
        const uint64_t version = registry_latest(w->c->registry, 1);
        struct pc_mapping m = map_at(client, &w->info, version, 0);
        uint64_t *owners = registry_owners(w->c->registry, 1, version, N_BLOCKS);
        for (int k = 0; k < 20; k++) {
            const uint64_t block = (uint64_t)rand_r(&seed) % N_BLOCKS;
            check_block(w->c, &m, &w->info, version, owners[block], block);
        }
        free(owners);
        OK(pc_client_unmap(client, m.id));
    }
    pc_client_close(client);
    return NULL;
}

/* Threads fill ranges side by side, while versions come, memory moves to them, and blocks are evicted. */
static void test_many_at_once(int trap)
{
    told.cache_bytes = 1 << 20;
    struct world w = world_of(trap, HOME, false);
    pthread_t readers[3], fillers[3];
    w.servers[READER].hold_files = true;
    over = false;
    for (int i = 0; i < 3; i++) {
        CHECK(!pthread_create(&fillers[i], NULL, read_files, &w.servers[READER]));
        CHECK(!pthread_create(&readers[i], NULL, read_rows, &w));
    }
    for (uint64_t version = 0; version < 20; version++) {
        const struct pc_run runs[] = {{version * 7, 3}, {version * 11 + 200, 5}};
        CHECK(commit_from(&w, version % 2 ? HOME : PEER, version, runs, 2) == version + 1);
        usleep(5000);
    }
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_join(readers[i], NULL));
    over = true;
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_join(fillers[i], NULL));
    w.servers[READER].hold_files = false;
    check_everywhere(&w, 20);
    CHECK(stats_of(&w.servers[READER]).evicted_blocks > 0);
    world_end(&w);
    told.cache_bytes = 0;
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(every_node_reads_it),
        TEST(commits_are_kept_and_the_rest_is_the_files),
        TEST(a_file_that_cannot_be_read),
        TEST(a_reader_of_files_that_does_nothing),
        TEST(a_home_is_restarted),
        TEST(a_home_moves),
        TEST(what_was_written_is_lost_and_never_the_files),
        TEST(many_at_once),
    };
    return run_over_traps(tests, N(tests), argc > 1 ? argv[1] : NULL) != 0;
}
