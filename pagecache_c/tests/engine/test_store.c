/* test_store.c - homes that outlive their session: their files and those of layers are given out, and a server
 * of a later session is given them back. */
#include "engine/core/core.h"
#include "tests/support/deltas.h"
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"

#define N_BLOCKS ((uint64_t)256)
#define BYTES (N_BLOCKS << 12)
#define BASE_OF(id) (PC_WINDOW_BEGIN + ((uint64_t)(id) << 28))

/* A server of a session that has a store, and a client of it. */
struct world {
    struct cluster *c;
    struct keeper keeper;
    int to_keeper;
    struct server *s;
    pc_client *client;
    int trap;
};

static void begin_server(struct world *w)
{
    server_start(w->c, 0, "store", w->to_keeper);
    w->s = &w->c->servers[0];
    w->client = attach(w->s, w->trap);
}

static struct world world_start(int trap)
{
    struct world w = {.c = cluster_new(1), .keeper = keeper_start("store"), .trap = trap};
    told.durable = 1;
    told.settle_ns = 20 * SECOND;
    w.to_keeper = keeper_connect(&w.keeper);
    begin_server(&w);
    return w;
}

static void end_server(struct world *w)
{
    pc_client_close(w->client);
    server_stop(w->c, 0);
    close(w->to_keeper);
    keeper_stop(&w->keeper);
}

static void world_stop(struct world *w)
{
    end_server(w);
    cluster_stop(w->c);
}

/* The end of the session, and another one. Home (fd -1: none) is what the next one is given. */
static void next_session(struct world *w, uint64_t region, const struct pc_home_file *home)
{
    end_server(w);
    w->keeper = keeper_start("store-next");
    w->to_keeper = keeper_connect(&w->keeper);
    if (home->fd >= 0)
        OK(pc_keeper_put_home(w->to_keeper, region, home));
    told.cold = 1;
    begin_server(w);
}

/* As an ordinary variable is made: that it lies on disk is the session's doing. */
static struct pc_region_info variable(struct world *w, uint64_t id, enum pc_medium medium)
{
    const struct pc_region_info info = {
        .region = id, .base_address = BASE_OF(id), .length_bytes = BYTES, .medium = medium};
    uint64_t *words = malloc(BYTES);
    int fd = -1;
    fill_pattern(words, id, 0, BYTES);
    OK(pc_client_create(w->client, id, info.base_address, BYTES, medium, WAIT, &fd));
    if (medium != PC_MEDIUM_FILE)
        OK(pc_copy_in(fd, 0, words, BYTES / 2, 1)); /* the second half: holes */
    close(fd);
    free(words);
    OK(pc_client_seal(w->client, id, WAIT));
    publish(w->c, info, w->s->id);
    return info;
}

static struct pc_home_file file_of(struct world *w, uint64_t id)
{
    struct pc_home_file home;
    OK(pc_engine_home_file(w->s->engine, id, &home));
    return home;
}

static uint64_t word_at(int fd, uint64_t offset)
{
    uint64_t word;
    CHECK(pread(fd, &word, sizeof word, (off_t)offset) == sizeof word);
    return word;
}

static void check_half(struct world *w, const struct pc_region_info *info)
{
    struct pc_mapping m = map_at(w->client, info, 0, 0);
    for (uint64_t offset = 0; offset < BYTES; offset += PC_BLOCK_BYTES)
        CHECK(at(&m, offset) == (offset < BYTES / 2 ? pattern(info->region, offset) : 0));
    OK(pc_client_unmap(w->client, m.id));
}

static void test_the_file_of_a_home(int trap)
{
    struct world w = world_start(trap);
    struct pc_home_file home;
    int fd;
    CHECK(pc_engine_home_file(w.s->engine, 2, &home) == PC_ERR_NO_REGION && home.fd == -1);
    OK(pc_client_create(w.client, 9, BASE_OF(9), BYTES, PC_MEDIUM_MEMORY, WAIT, &fd));
    CHECK(pc_engine_home_file(w.s->engine, 9, &home) == PC_ERR_NO_REGION); /* not sealed */
    close(fd);
    OK(pc_client_abandon(w.client, 9, WAIT));
    const struct pc_region_info info = variable(&w, 2, PC_MEDIUM_MEMORY);
    home = file_of(&w, 2);
    CHECK(home.version == 0 && home.base_address == info.base_address && home.length_bytes == BYTES &&
          !home.in_file);
    CHECK(fcntl(home.fd, F_GETFD) & FD_CLOEXEC);
    CHECK(word_at(home.fd, 5 << 12) == pattern(2, 5 << 12));
    OK(fdatasync(home.fd));
    /* It has what commits write, and is at their version then. */
    const struct pc_run some = {3, 2};
    CHECK(commit(w.c, w.s, w.client, &info, 0, &some, 1) == 1);
    SOON(stats_of(w.s).commits_applied == 1 && file_of(&w, 2).version == 1);
    CHECK(word_at(home.fd, 3 << 12) != pattern(2, 3 << 12));
    close(home.fd);
    world_stop(&w);
}

static void test_of_a_home_in_memory_there_is_none(int trap)
{
    struct world w = world_start(trap);
    struct pc_home_file home;
    uint64_t word = 7;
    int fd = -1;
    const struct pc_region_info info = {.region = 3, .base_address = BASE_OF(3), .length_bytes = BYTES};
    const struct pc_segment segment = {.offset_bytes = 0, .length_bytes = sizeof word,
                                       .address = (uint64_t)(uintptr_t)&word};
    OK(pc_engine_create_shared(w.s->engine, &info, &segment, 1, &fd));
    close(fd);
    OK(pc_engine_seal(w.s->engine, 3));
    CHECK(pc_engine_home_file(w.s->engine, 3, &home) == PC_ERR_NO_REGION && home.fd == -1);
    CHECK(strstr(pc_last_message(), "in memory"));
    world_stop(&w);
}

/* What is prepared is nobody's home yet, and must be in its file before the registry says that it is. */
static void test_the_file_of_what_is_prepared(int trap)
{
    struct world w = world_start(trap);
    const struct pc_region_info info = {
        .region = 4, .base_address = BASE_OF(4), .length_bytes = BYTES, .version = 7};
    struct pc_home_file home;
    int fd = -1;
    OK(pc_engine_rebuild_begin(w.s->engine, &info, NULL, 0, &fd));
    CHECK(pc_engine_home_file(w.s->engine, 4, &home) == PC_ERR_NO_REGION);
    CHECK(pwrite(fd, &info, sizeof info, 0) == sizeof info);
    OK(pc_engine_rebuild_seal(w.s->engine, 4, fd));
    home = file_of(&w, 4);
    CHECK(home.version == 7 && word_at(home.fd, 0) == 4);
    close(home.fd);
    close(fd);
    world_stop(&w);
}

static void test_the_file_of_a_layer(int trap)
{
    struct world w = world_start(trap);
    const struct pc_region_info info = variable(&w, 2, PC_MEDIUM_MEMORY);
    const struct pc_run large = {3, 80}, small = {90, 1};
    const struct pc_mapping old = map_at(w.client, &info, 0, 0); /* so that nobody waits for the base */
    struct standstill still;
    struct pc__layer_head head;
    uint64_t n_bytes;
    int fd;
    hold_worker(&still, w.s);
    for (uint64_t version = 0; version < 2; version++) {
        struct transaction t;
        OK(try_begin(w.c, w.s, w.client, &info, version, &t));
        write_runs(&t, version ? &small : &large, 1);
        CHECK(pc_engine_layer_file(w.s->engine, 2, t.id, &fd, &n_bytes) == PC_ERR_NO_VERSION && fd == -1);
        OK(try_stage(&t));
        for (int published = 0; published < 2; published++) {
            OK(pc_engine_layer_file(w.s->engine, 2, t.id, &fd, &n_bytes));
            CHECK(n_bytes == layer_bytes(&t) && fcntl(fd, F_GETFD) & FD_CLOEXEC);
            CHECK(pread(fd, &head, sizeof head, 0) == sizeof head && head.commit_id == t.id);
            CHECK(word_at(fd, head.data_offset) == written(2, t.id, t.runs[0].first_block << 12));
            close(fd);
            if (!published) {
                CHECK(decide(&t) == version + 1);
                OK(pc_engine_publish(w.s->engine, 2, t.version, t.id));
            }
        }
        tell(&t);
        OK(pc_client_unmap(w.client, t.m.id));
    }
    release_worker(&still);
    OK(pc_client_unmap(w.client, old.id));
    world_stop(&w);
}

/* What a session has left in a file is a home of the next one, at the version that it is at. */
static void test_another_session(int trap)
{
    struct world w = world_start(trap);
    const struct pc_region_info info = variable(&w, 2, PC_MEDIUM_MEMORY);
    check_half(&w, &info);
    struct pc_home_file home = file_of(&w, 2);
    home.version = 5; /* as if commits had made that many */
    for (int i = 0; i < 5; i++) {
        const struct pc_run none = {0, 1};
        (void)registry_commit(w.c->registry, registry_commit_id(w.c->registry), 2, (uint64_t)i, &none, 1);
    }
    next_session(&w, 2, &home);
    CHECK(!w.s->engine->settle_until_ns);
    struct pc_mapping m;
    CHECK(try_map(w.client, &info, 4, 0, &m) == PC_ERR_EXPIRED);
    m = map_at(w.client, &info, 5, PC_MAP_PRIVATE);
    for (uint64_t offset = 0; offset < BYTES; offset += PC_BLOCK_BYTES)
        CHECK(at(&m, offset) == (offset < BYTES / 2 ? pattern(2, offset) : 0));
    OK(pc_client_unmap(w.client, m.id));
    /* It goes on from there, and into that file. */
    const struct pc_run some = {200, 2};
    CHECK(commit(w.c, w.s, w.client, &info, 5, &some, 1) == 6);
    SOON(file_of(&w, 2).version == 6);
    CHECK(word_at(home.fd, 200 << 12));
    close(home.fd);
    world_stop(&w);
}

/* What no commit has written is in the user's file, and what commits have written lies on disk, with the notes
 * that say which it is. */
static void test_another_session_of_a_file(int trap)
{
    struct world w = world_start(trap);
    const struct pc_region_info info = variable(&w, 2, PC_MEDIUM_FILE);
    struct pc_home_file home = file_of(&w, 2);
    CHECK(home.in_file);
    const struct pc_run some = {7, 1};
    CHECK(commit(w.c, w.s, w.client, &info, 0, &some, 1) == 1);
    SOON(stats_of(w.s).commits_applied == 1);
    /* As the next session does with a layer that was committed: its blocks, and since when they are there. */
    const uint64_t word = 4711, since = 1;
    CHECK(pwrite(home.fd, &word, sizeof word, 7 << 12) == sizeof word);
    CHECK(pwrite(home.fd, &since, sizeof since, (off_t)(BYTES + 7 * 8)) == sizeof since);
    home.version = 1;
    next_session(&w, 2, &home);
    struct pc_mapping m = map_at(w.client, &info, 1, 0);
    CHECK(at(&m, 7 << 12) == word && at(&m, 8 << 12) == pattern(2, 8 << 12));
    close(home.fd);
    world_stop(&w);
}

/* ------------------------------------------------------------------ deltas */

/* A delta of the variable, at its home. Its words: commit_change. */
static void commit_delta(struct world *w, struct changes *changes, const struct pc_run *run)
{
    (void)commit_change(w->c, changes, w->s, 2, true, run, 1);
}

/* All of the region has the pattern. */
static struct pc_region_info parity(struct world *w)
{
    struct pc_region_info info = {
        .region = 2, .base_address = BASE_OF(2), .length_bytes = BYTES, .medium = PC_MEDIUM_MEMORY};
    return build(w->c, w->s, w->client, 2, info.length_bytes, 0);
}

static bool is_unchanged(const struct pc_home_file *home, uint64_t block)
{
    return word_at(home->fd, block << 12) == pattern(2, block << 12);
}

static void test_a_delta_waits_until_it_is_durable(int trap)
{
    static struct changes changes;
    struct world w = world_start(trap);
    const struct pc_region_info info = parity(&w);
    const struct pc_home_file home = file_of(&w, 2);
    const struct pc_run first = {3, 2}, second = {4, 1};
    struct pc__layer_head head;
    uint64_t n_bytes;
    int fd;
    w.s->hold_durable = true;
    commit_delta(&w, &changes, &first);
    commit_delta(&w, &changes, &second);
    SOON(w.s->durables_asked == 1);
    OK(pc_engine_layer_file(w.s->engine, 2, changes.of[0].id, &fd, &n_bytes));
    CHECK(pread(fd, &head, sizeof head, 0) == sizeof head && head.flags == PC__LAYER_MADE_WHOLE);
    CHECK(word_at(fd, head.data_offset) == word_of(&changes, 2, 1, 3, 0));
    close(fd);
    for (uint64_t version = 0; version <= 2; version++) /* nobody waits for it but the base */
        check_changes(&changes, w.client, &info, version);
    CHECK(stats_of(w.s).commits_applied == 0 && is_unchanged(&home, 3));
    w.s->durable_error = PC_ERR_NO_SPACE;
    w.s->hold_durable = false;
    OK(pc_engine_layer_durable(w.s->engine, 2, changes.of[0].id, PC_ERR_NO_SPACE));
    OK(pc_engine_layer_durable(w.s->engine, 2, changes.of[1].id, PC_OK)); /* not what is asked for */
    SOON(w.s->durables_asked >= 3); /* and again */
    CHECK(stats_of(w.s).commits_applied == 0 && is_unchanged(&home, 3));
    w.s->durable_error = PC_OK;
    SOON(stats_of(w.s).commits_applied == 2);
    check_changes(&changes, w.client, &info, 2);
    SOON(file_of(&w, 2).version == 2 && !is_unchanged(&home, 3));
    close(home.fd);
    world_stop(&w);
}

/* The answer of a moment ago is not waited for until the next look. */
static void test_an_answer_is_heard_at_once(int trap)
{
    static struct changes changes;
    struct world w = world_start(trap);
    (void)parity(&w);
    const struct pc_run some = {3, 2};
    const uint64_t began_ns = now_ns();
    for (int i = 0; i < 20; i++) {
        commit_delta(&w, &changes, &some);
        SOON(stats_of(w.s).commits_applied == (uint64_t)i + 1);
    }
    CHECK(now_ns() - began_ns < 10 * SECOND); /* 20 looks, else */
    world_stop(&w);
}

/* The next server does not know what this one was told, and asks. */
static void test_a_server_that_waits_is_started_again(int trap)
{
    static struct changes changes;
    struct world w = world_start(trap);
    const struct pc_region_info info = parity(&w);
    const struct pc_home_file home = file_of(&w, 2);
    const struct pc_run some = {3, 2};
    w.s->hold_durable = true;
    commit_delta(&w, &changes, &some);
    SOON(w.s->durables_asked == 1);
    pc_client_close(w.client);
    server_stop(w.c, 0);
    close(w.to_keeper);
    w.to_keeper = keeper_connect(&w.keeper);
    told.settle_ns = SECOND / 10;
    begin_server(&w);
    SOON(w.s->durables_asked == 2);
    CHECK(is_unchanged(&home, 3) && stats_of(w.s).commits_applied == 0);
    OK(pc_engine_layer_durable(w.s->engine, 2, changes.of[0].id, PC_OK));
    SOON(stats_of(w.s).commits_applied == 1);
    check_changes(&changes, w.client, &info, 1);
    close(home.fd);
    world_stop(&w);
}

/* Elsewhere nobody is asked. */
static void test_a_delta_of_a_session_that_ends(int trap)
{
    static struct changes changes;
    struct world w = {.c = cluster_new(1), .keeper = keeper_start("store"), .trap = trap};
    w.to_keeper = keeper_connect(&w.keeper);
    begin_server(&w);
    (void)parity(&w);
    const struct pc_run some = {3, 2};
    commit_delta(&w, &changes, &some);
    SOON(stats_of(w.s).commits_applied == 1);
    CHECK(w.s->durables_asked == 0);
    world_stop(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {TEST(the_file_of_a_home),
                                               TEST(of_a_home_in_memory_there_is_none),
                                               TEST(the_file_of_what_is_prepared),
                                               TEST(the_file_of_a_layer),
                                               TEST(another_session),
                                               TEST(another_session_of_a_file),
                                               TEST(a_delta_waits_until_it_is_durable),
                                               TEST(an_answer_is_heard_at_once),
                                               TEST(a_server_that_waits_is_started_again),
                                               TEST(a_delta_of_a_session_that_ends)};
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
