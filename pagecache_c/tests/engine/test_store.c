/* test_store.c - homes that outlive their session: their files and those of layers are given out, and a server
 * of a later session is given them back. */
#include "engine/checks/checks.h"
#include "engine/core/core.h"
#include "tests/support/deltas.h"
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"

#include <linux/falloc.h>

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
    const struct pc_home_file again = file_of(&w, 2); /* what the disk refuses is said to each description once */
    CHECK(lseek(home.fd, 4096, SEEK_SET) == 4096 && lseek(again.fd, 0, SEEK_CUR) == 0);
    close(again.fd);
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

/* --------------------------------------------------------------- checksums */

#define SUMS_DIRECTORY DISK_DIRECTORY
#define SUMS_AT 8192

static void sums_path(char path[128], uint64_t id)
{
    snprintf(path, 128, "%s/%llu.sums", SUMS_DIRECTORY, (unsigned long long)id);
}

/* As who keeps the home beyond the session writes it. */
static void write_sums(uint64_t id, const struct pc_home_file *home)
{
    struct {
        char magic[8];
        uint32_t format, flags;
        uint64_t region, version, base_address, length_bytes, sequence;
        uint32_t crc, padding;
    } slot = {.magic = "CLAMSUMS", .format = 1, .region = id, .base_address = home->base_address,
              .length_bytes = home->length_bytes};
    char path[128];
    uint8_t block[PC_BLOCK_BYTES];
    sums_path(path, id);
    (void)unlink(path);
    const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    for (uint64_t i = 0; i < 2; i++) { /* the second is the one that counts */
        slot.sequence = 7 + i;
        slot.version = i ? home->version : 99;
        slot.crc = pc_crc32c(0, &slot, 56);
        CHECK(pwrite(fd, &slot, sizeof slot, (off_t)(i * 4096)) == sizeof slot);
    }
    for (uint64_t b = 0; b < N_BLOCKS; b++) {
        uint32_t sum;
        CHECK(pread(home->fd, block, sizeof block, (off_t)(b << 12)) == sizeof block);
        pc_crc32c_blocks(block, 1, &sum);
        sum ^= 0x98f94189u;
        if (sum)
            CHECK(pwrite(fd, &sum, sizeof sum, (off_t)(SUMS_AT + 4 * b)) == sizeof sum);
    }
    close(fd);
}

/* Variable 2 of an earlier session, which was damaged meanwhile, or whose sums were: by `by`. */
static struct pc_home_file earlier(struct world *w, struct pc_region_info *info,
                                   void (*by)(const struct pc_home_file *home))
{
    *info = variable(w, 2, PC_MEDIUM_MEMORY);
    const struct pc_home_file home = file_of(w, 2);
    write_sums(2, &home);
    if (by)
        by(&home);
    told.sums_directory = SUMS_DIRECTORY;
    next_session(w, 2, &home);
    return home;
}

static void world_of_sums_stop(struct world *w, const struct pc_home_file *home)
{
    char path[128];
    sums_path(path, 2);
    close(home->fd);
    world_stop(w);
    (void)unlink(path);
}

static bool is_mapped_as_it_is(struct world *w)
{
    struct pc__region *region = pc__region_get(w->s->engine, 2);
    pthread_mutex_lock(&region->lock);
    const bool is = pc__home_base_generation(region) != NULL && !region->home->is_unchecked;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(w->s->engine, region);
    return is;
}

/* Block 5 has other bytes. */
static void damage(const struct pc_home_file *home)
{
    const uint64_t word = 4711;
    CHECK(pwrite(home->fd, &word, sizeof word, (5 << 12) + 800) == sizeof word);
}

/* The disk does not know any more that it had something there. */
static void punch(const struct pc_home_file *home)
{
    OK(fallocate(home->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 5 << 12, 1 << 12));
}

static int fetch(pc_client *client, const struct pc_mapping *m, uint64_t block)
{
    const struct pc_run run = {block, 1};
    return pc_client_prefetch(client, m->id, &run, 1, 1, WAIT);
}

/* All but block 5, which nobody has. */
static void check_but_5(struct world *w, pc_client *client, const struct pc_region_info *info)
{
    struct pc_mapping m = map_at(client, info, 0, 0);
    const struct pc_run all = {0, 16};
    CHECK(pc_client_prefetch(client, m.id, &all, 1, 1, WAIT) == PC_ERR_HOME_LOST);
    CHECK(fetch(client, &m, 5) == PC_ERR_HOME_LOST);
    for (uint64_t offset = 0; offset < BYTES; offset += PC_BLOCK_BYTES)
        if (offset >> 12 != 5)
            CHECK(at(&m, offset) == (offset < BYTES / 2 ? pattern(2, offset) : 0));
    OK(pc_client_unmap(client, m.id));
    CHECK(stats_of(w->s).damaged_blocks == 1);
}

/* Of what has data: the rest are zeros. */
static void check_half_at(struct world *w, const struct pc_region_info *info, uint64_t version)
{
    struct pc_mapping m = map_at(w->client, info, version, 0);
    uint64_t *owners = registry_owners(w->c->registry, info->region, version, N_BLOCKS);
    for (uint64_t b = 0; b < N_BLOCKS / 2; b++)
        check_block(w->c, &m, info, version, owners[b], b);
    free(owners);
    OK(pc_client_unmap(w->client, m.id));
}

static void test_a_home_that_has_its_checksums(int trap)
{
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, NULL);
    check_half(&w, &info);
    SOON(is_mapped_as_it_is(&w));
    check_half(&w, &info);
    const struct pc_run some = {3, 2};
    CHECK(commit(w.c, w.s, w.client, &info, 0, &some, 1) == 1);
    SOON(file_of(&w, 2).version == 1);
    check_half_at(&w, &info, 1);
    CHECK(stats_of(w.s).damaged_blocks == 0);
    world_of_sums_stop(&w, &home);
}

/* As if no block had been looked at yet. The worker stands still. */
static void look_anew(struct world *w, const struct pc_home_file *home)
{
    const struct pc__kept kept = {.region = 2, .version = home->version, .base_address = home->base_address,
                                  .length_bytes = home->length_bytes};
    struct pc__region *region = pc__region_get(w->s->engine, 2);
    pthread_mutex_lock(&region->lock);
    struct pc__generation *base = pc__home_base_generation(region);
    if (base)
        pc__generation_drop(w->s->engine, region, base);
    pc__unchecked_close(region->home->unchecked);
    OK(pc__unchecked_open(w->s->engine, &kept, &region->home->base.data, &region->home->unchecked));
    region->home->is_unchecked = true;
    pc__worker_queue(w->s->engine, region);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(w->s->engine, region);
}

static struct pc_home_file unseen_damage(struct world *w, struct pc_region_info *info, struct standstill *still)
{
    const struct pc_home_file home = earlier(w, info, NULL);
    SOON(is_mapped_as_it_is(w));
    hold_worker(still, w->s);
    look_anew(w, &home);
    damage(&home);
    return home;
}

/* Who is faster than the worker gets nothing that was not looked at. */
static void test_a_block_is_looked_at_when_it_is_read(int trap)
{
    struct pc_region_info info;
    struct standstill still;
    struct world w = world_start(trap);
    const struct pc_home_file home = unseen_damage(&w, &info, &still);
    check_but_5(&w, w.client, &info);
    CHECK(!is_mapped_as_it_is(&w));
    release_worker(&still);
    check_but_5(&w, w.client, &info);
    world_of_sums_stop(&w, &home);
}

/* A server of another node asks for many at once. */
static void test_of_another_node_likewise(int trap)
{
    struct pc_region_info info;
    struct standstill still;
    struct world w = world_start(trap);
    const struct pc_home_file home = unseen_damage(&w, &info, &still);
    w.c->n = 2;
    told.sums_directory = NULL;
    server_start(w.c, 1, "store", -1);
    pc_client *far = attach(&w.c->servers[1], trap);
    OK(fsync(home.fd));
    OK(posix_fadvise(home.fd, 0, 0, POSIX_FADV_DONTNEED));
    check_but_5(&w, far, &info);
    release_worker(&still);
    pc_client_close(far);
    SOON(stats_of(&w.c->servers[1]).mappings == 0);
    world_of_sums_stop(&w, &home);
}

/* For a reader of this node, who is the first to find it. */
static void test_others_make_a_damaged_block_again(int trap)
{
    static uint64_t words[BYTES / 16];
    const struct pc_segment same = {0, sizeof words, (uint64_t)(uintptr_t)words};
    struct pc_region_info info, other = {.region = 3, .base_address = BASE_OF(3), .length_bytes = BYTES};
    struct standstill still;
    struct world w = world_start(trap);
    const struct pc_home_file home = unseen_damage(&w, &info, &still);
    int fd = -1;
    fill_pattern(words, 2, 0, sizeof words);
    OK(pc_engine_create_shared(w.s->engine, &other, &same, 1, &fd));
    close(fd);
    OK(pc_engine_seal(w.s->engine, 3));
    w.c->regions[0].info.has_repair = 1;
    w.c->repairs[0] = (struct known_repair){2, {{3, 0, w.s->id}}, 1, 0};
    check_half(&w, &info);
    CHECK(stats_of(w.s).damaged_blocks == 1 && stats_of(w.s).degraded_blocks == 1);
    release_worker(&still);
    world_of_sums_stop(&w, &home);
}

/* Also where nobody reads it; and the next server does not give it out either. */
static void look_at_damage(int trap, void (*by)(const struct pc_home_file *home))
{
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, by);
    SOON(stats_of(w.s).damaged_blocks == 1);
    SOON(w.s->log_events > 0 && !is_mapped_as_it_is(&w));
    check_but_5(&w, w.client, &info);
    OK(pc_engine_set_homes_of(w.s->engine, 2, 1, &w.s->id, 1)); /* its record is written anew */
    pc_client_close(w.client);
    server_stop(w.c, 0);
    close(w.to_keeper);
    w.to_keeper = keeper_connect(&w.keeper);
    told.cold = 0;
    told.settle_ns = SECOND / 10;
    begin_server(&w);
    SOON(stats_of(w.s).damaged_blocks == 1);
    check_but_5(&w, w.client, &info);
    world_of_sums_stop(&w, &home);
}

static void test_a_damaged_block(int trap)
{
    look_at_damage(trap, damage);
}

static void test_a_block_that_the_disk_has_lost(int trap)
{
    look_at_damage(trap, punch);
}

/* What a commit writes is there from that version on, and what it replaced is nobody's. */
static void test_a_damaged_block_is_written_anew(int trap)
{
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, damage);
    const struct pc_run some = {4, 3}, other = {20, 1};
    struct pc_mapping m;
    SOON(stats_of(w.s).damaged_blocks == 1);
    CHECK(commit(w.c, w.s, w.client, &info, 0, &other, 1) == 1); /* which it does not touch */
    SOON(stats_of(w.s).commits_applied == 1);
    struct transaction t;
    OK(try_begin(w.c, w.s, w.client, &info, 1, &t));
    OK(pc_client_blank(w.client, t.m.id, &some, 1));
    write_runs(&t, &some, 1);
    OK(try_stage(&t));
    CHECK(decide(&t) == 2);
    tell(&t);
    OK(pc_client_unmap(w.client, t.m.id));
    SOON(stats_of(w.s).commits_applied == 2);
    check_half_at(&w, &info, 2);
    CHECK(try_map(w.client, &info, 1, 0, &m) == PC_ERR_EXPIRED);
    /* What is not whole does not move. */
    const struct pc_run five = {5, 1};
    CHECK(pc_engine_stage_home(w.s->engine, 2, 1, 77, &five, 1) < 0);
    OK(pc_engine_stage_home(w.s->engine, 2, 2, 78, &five, 1));
    OK(pc_engine_drop_staged(w.s->engine, 2, 78));
    world_of_sums_stop(&w, &home);
}

/* Another server would take it for zeros. */
static void test_a_home_with_a_damaged_block_does_not_move(int trap)
{
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, damage);
    struct pc_run runs[16];
    SOON(stats_of(w.s).damaged_blocks == 1);
    const int64_t n = pc_engine_home_blocks(w.s->engine, 2, 0, runs, 16);
    CHECK(n == 1 && runs[0].first_block == 0 && runs[0].n_blocks > 5);
    CHECK(pc_engine_stage_home(w.s->engine, 2, 0, 77, runs, 1) == PC_ERR_HOME_LOST);
    world_of_sums_stop(&w, &home);
}

/* What is to be XORed with it is of no use; what lies around it is. */
static void test_a_delta_of_a_damaged_block(int trap)
{
    static struct changes changes;
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, damage);
    const struct pc_run some = {4, 3};
    SOON(stats_of(w.s).damaged_blocks == 1);
    commit_delta(&w, &changes, &some);
    struct pc_mapping m = map_at(w.client, &info, 1, 0);
    CHECK(at(&m, 4 << 12) == word_of(&changes, 2, 1, 4, 0) && fetch(w.client, &m, 5) == PC_ERR_HOME_LOST);
    OK(pc_client_unmap(w.client, m.id));
    SOON(stats_of(w.s).commits_applied == 1);
    m = map_at(w.client, &info, 1, 0);
    CHECK(at(&m, 6 << 12) == word_of(&changes, 2, 1, 6, 0) && fetch(w.client, &m, 5) == PC_ERR_HOME_LOST);
    OK(pc_client_unmap(w.client, m.id));
    world_of_sums_stop(&w, &home);
}

static void cut_sums(const struct pc_home_file *home)
{
    char path[128];
    (void)home;
    sums_path(path, 2);
    OK(truncate(path, 4100));
}

static void remove_sums(const struct pc_home_file *home)
{
    char path[128];
    (void)home;
    sums_path(path, 2);
    OK(unlink(path));
}

static void write_sums_of_another(const struct pc_home_file *home)
{
    struct pc_home_file later = *home;
    later.version = 3;
    write_sums(2, &later);
}

/* Nobody is given what cannot be looked at, and nothing of it is lost for that. */
static void test_checksums_that_are_not_to_be_had(int trap)
{
    static void (*const by[])(const struct pc_home_file *) = {cut_sums, remove_sums, write_sums_of_another};
    struct pc_region_info info;
    struct stat st;
    for (size_t i = 0; i < sizeof by / sizeof by[0]; i++) {
        struct world w = world_start(trap);
        const struct pc_home_file home = earlier(&w, &info, by[i]);
        SOON(w.s->log_events > 0);
        struct pc_mapping m;
        const int rc = try_map(w.client, &info, 0, 0, &m);
        CHECK(rc == PC_ERR_HOME_LOST || (!rc && fetch(w.client, &m, 200) == PC_ERR_HOME_LOST));
        CHECK(!fstat(home.fd, &st) && st.st_size == (off_t)BYTES && word_at(home.fd, 0) == pattern(2, 0));
        close(home.fd);
        world_stop(&w);
        told.cold = 0;
        told.sums_directory = NULL;
    }
    remove_sums(NULL);
}

/* The sums are of what the base was: a server that is restarted later does not look at them. */
static void test_what_was_looked_at_once(int trap)
{
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, NULL);
    SOON(is_mapped_as_it_is(&w));
    remove_sums(&home);
    pc_client_close(w.client);
    server_stop(w.c, 0);
    close(w.to_keeper);
    w.to_keeper = keeper_connect(&w.keeper);
    told.cold = 0;
    told.settle_ns = SECOND / 10;
    begin_server(&w);
    check_half(&w, &info);
    CHECK(is_mapped_as_it_is(&w));
    world_of_sums_stop(&w, &home);
}

/* A base that was looked at in part is not changed before it was looked at in full. */
static void test_commits_meanwhile(int trap)
{
    struct pc_region_info info;
    struct world w = world_start(trap);
    const struct pc_home_file home = earlier(&w, &info, NULL);
    const struct pc_run some = {3, 2};
    struct standstill still;
    SOON(is_mapped_as_it_is(&w));
    hold_worker(&still, w.s);
    look_anew(&w, &home);
    for (uint64_t version = 0; version < 3; version++)
        CHECK(commit(w.c, w.s, w.client, &info, version, &some, 1) == version + 1);
    check_half_at(&w, &info, 3);
    release_worker(&still);
    SOON(stats_of(w.s).commits_applied == 3 && is_mapped_as_it_is(&w) && file_of(&w, 2).version == 3);
    for (uint64_t version = 0; version <= 3; version++)
        check_half_at(&w, &info, version);
    world_of_sums_stop(&w, &home);
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
                                               TEST(a_delta_of_a_session_that_ends),
                                               TEST(a_home_that_has_its_checksums),
                                               TEST(a_block_is_looked_at_when_it_is_read),
                                               TEST(of_another_node_likewise),
                                               TEST(others_make_a_damaged_block_again),
                                               TEST(a_damaged_block), TEST(a_block_that_the_disk_has_lost),
                                               TEST(a_damaged_block_is_written_anew),
                                               TEST(a_home_with_a_damaged_block_does_not_move),
                                               TEST(a_delta_of_a_damaged_block),
                                               TEST(checksums_that_are_not_to_be_had),
                                               TEST(what_was_looked_at_once),
                                               TEST(commits_meanwhile)};
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
