/* test_client_failure.c - the client's contract, over each trap, when something is wrong: servers
 * that stall, lie, refuse or die, and processes that fork. Never zeros, never a silent hang. */
#include "tests/support/client_world.h"

#include "tests/support/client_main.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define IS_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define IS_TSAN 1
#endif
#ifndef IS_TSAN
#define IS_TSAN 0
#endif

/* ------------------------------------------------------------------- opening */

static void test_no_server(struct world *world)
{
    struct pc_client_options options = world_options(world);
    pc_client *client = (pc_client *)(uintptr_t)1;
    char name[] = "clamor-nobody-listens-here";
    options.socket_name = name;
    options.connect_timeout_ns = 100 * MS;
    uint64_t begun = now_ns();
    FAILS(pc_client_open(&options, &client), PC_ERR_NO_SERVER, name);
    CHECK(client == NULL && now_ns() - begun < 5 * SECOND, "%lu ms", (now_ns() - begun) / MS);
    options.socket_name = "";
    FAILS(pc_client_open(&options, &client), PC_ERR_RANGE, "socket name");
    options.socket_name = name;
    options.library_version = "a version that is longer than forty-seven characters";
    FAILS(pc_client_open(&options, &client), PC_ERR_RANGE, "version");
    options.library_version = "1";
    options.trap = 42;
    FAILS(pc_client_open(&options, &client), PC_ERR_NO_TRAP, "42");
}

static void test_late_server(struct world *world)
{
    world_kill_server(world);
    pid_t pid = fork();
    if (pid == 0) {
        usleep(200 * 1000);
        world_start_spare(world);
        _exit(0);
    }
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 1), "block 1");
    OK(pc_client_close(client));
    waitpid(pid, NULL, 0);
}

static void test_other_version(struct world *world)
{
    struct pc_client_options options = world_options(world);
    pc_client *client;
    world->fake->other_version = 1;
    FAILS(pc_client_open(&options, &client), PC_ERR_VERSION_MISMATCH, "9.9.9");
    CHECK(strstr(pc_last_message(), "1.2.3"), "%s", pc_last_message());
}

static void test_stalled_hello(struct world *world)
{
    struct pc_client_options options = world_options(world);
    pc_client *client;
    world->fake->stall_hello = 1;
    options.connect_timeout_ns = 200 * MS;
    FAILS(pc_client_open(&options, &client), PC_ERR_TIMEOUT, "does not answer");
}

/* ------------------------------------------------------------------- mapping */

static void test_stalled_open(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping;
    world->fake->open_delay_ms = 300;
    FAILS(try_map(world, client, PAGED, 0, 100 * MS, &mapping), PC_ERR_TIMEOUT, "in time");
    CHECK(mapping.address == 0, "an address with a failure");
    world->fake->open_delay_ms = 0;
    /* The lease that it granted too late is given back. */
    EVENTUALLY(world->fake->opens == 1 && world->fake->closes == 1);
    CHECK(world->fake->live_mappings == 0, "%d leases", world->fake->live_mappings);
    mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 1), "afterwards");
    world->fake->stall_prefetch = 1;
    const struct pc_run run = {100, 1};
    FAILS(pc_client_prefetch(client, mapping.id, &run, 1, 1, 100 * MS), PC_ERR_TIMEOUT, "in time");
    OK(pc_client_close(client));
}

struct opener {
    struct world *world;
    pc_client *client;
    int rc;
};

static void *open_slowly(void *arg)
{
    struct opener *opener = arg;
    struct pc_mapping mapping;
    opener->rc = try_map(opener->world, opener->client, PAGED, 0, 30 * SECOND, &mapping);
    return NULL;
}

static void test_close_while_mapping(struct world *world)
{
    struct opener opener = {world, world_client(world), 0};
    pthread_t thread;
    world->fake->stall_open = 1;
    REQUIRE(pthread_create(&thread, NULL, open_slowly, &opener) == 0);
    EVENTUALLY(world->fake->opens == 1);
    usleep(20000); /* the reply is never sent: the thread waits by now, or finds the same state */
    OK(pc_client_close(opener.client));
    pthread_join(thread, NULL);
    CHECK(opener.rc == PC_ERR_CLOSED, "%d", opener.rc);
}

static void *prefetch_for_long(void *arg)
{
    struct opener *opener = arg;
    static const struct pc_run run = {100, 1};
    opener->rc = pc_client_prefetch(opener->client, 1, &run, 1, 1, 30 * SECOND);
    return NULL;
}

/* What a prefetch still does after it was woken, it does before the client is freed. */
static void test_close_while_prefetching(struct world *world)
{
    enum { N = 4, ROUNDS = 10 };
    world->fake->stall_prefetch = 1;
    for (int round = 0; round < ROUNDS; round++) {
        pc_client *client = world_client(world);
        struct opener openers[N];
        pthread_t threads[N];
        int before = world->fake->prefetches;
        CHECK(world_map(world, client, PAGED, 0).id == 1, "the id that the threads use");
        for (size_t i = 0; i < N; i++) {
            openers[i] = (struct opener){world, client, 0};
            REQUIRE(pthread_create(&threads[i], NULL, prefetch_for_long, &openers[i]) == 0);
        }
        EVENTUALLY(world->fake->prefetches == before + N); /* all are inside */
        OK(pc_client_close(client));
        for (size_t i = 0; i < N; i++) {
            pthread_join(threads[i], NULL);
            CHECK(openers[i].rc == PC_ERR_CLOSED, "%d", openers[i].rc);
        }
    }
}

static void *use_until_shut(void *arg)
{
    struct opener *opener = arg;
    static const struct pc_run run = {7, 1};
    struct pc_run runs[16];
    struct pc_mapping mapping;
    for (;;) {
        int rc = try_map(opener->world, opener->client, PAGED, 0, 10 * SECOND, &mapping);
        if (!rc)
            rc = pc_client_reads_begin(opener->client, mapping.id);
        if (!rc)
            rc = (int)pc_client_reads_end(opener->client, mapping.id, runs, 16);
        if (rc >= 0)
            rc = pc_client_report_reads(opener->client, mapping.id, &run, 1);
        if (!rc)
            rc = pc_client_unmap(opener->client, mapping.id);
        if (rc && rc != PC_ERR_TIMEOUT) {
            opener->rc = rc;
            return NULL;
        }
    }
}

static void test_shut(struct world *world)
{
    enum { N = 3 };
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    struct opener openers[N];
    pthread_t threads[N];
    int before = world->fake->reports;
    for (size_t i = 0; i < N; i++) {
        openers[i] = (struct opener){world, client, 0};
        REQUIRE(pthread_create(&threads[i], NULL, use_until_shut, &openers[i]) == 0);
    }
    EVENTUALLY(world->fake->reports > before + 20);
    OK(pc_client_shut(client));
    for (size_t i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        /* A report finds no server where others find the client closed. */
        CHECK(openers[i].rc == PC_ERR_CLOSED || openers[i].rc == PC_ERR_NO_SERVER, "%d",
              openers[i].rc);
    }
    FAILS(pc_client_unmap(client, mapping.id), PC_ERR_CLOSED, "closed");
    FAILS(pc_client_seal(client, MADE, SECOND), PC_ERR_CLOSED, "closed");
    OK(pc_client_shut(client));
    OK(pc_client_close(client));
}

static void test_lies(struct world *world)
{
    pc_client *client = world_client(world);
    _Atomic int *lies[] = {&world->fake->lie_inode, &world->fake->lie_length,
                           &world->fake->lie_no_fd};
    struct pc_mapping mapping;
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        *lies[i] = 1;
        FAILS(try_map(world, client, PAGED, 0, SECOND, &mapping), PC_ERR_PROTOCOL, "variable 1");
        FAILS(try_map(world, client, PAGED, PC_MAP_PRIVATE, SECOND, &mapping), PC_ERR_PROTOCOL, "");
        *lies[i] = 0;
        EVENTUALLY(world->fake->live_mappings == 0);
    }
    /* Nonsense on the wire costs the connection, not the call. */
    world->fake->garbage_reply = 1;
    mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 77), "after nonsense");
    CHECK(world->fake->hellos == 2, "%d hellos", world->fake->hellos);
    OK(pc_client_close(client));
}

/* -------------------------------------------------------------- faults fail */

static void touch(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    load(mapping.address + 4096 * 33);
    fprintf(stderr, "it was read\n");
}

static void test_failed_fault(struct world *world)
{
    world->fake->fail_faults = 1;
    expect_end(world, touch, 70, "variable 1 version 5 block 33 cannot be read from server 0x77");
    expect_end(world, touch, 70, "the fake says so");
}

static void touch_in_task(struct world *world)
{
    static const uint8_t other[PC_TASK_BYTES] = {1, 2}, task[PC_TASK_BYTES] = {9, 8, [23] = 7};
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    OK(pc_client_task(client, other));
    OK(pc_client_task(client, task)); /* the newest counts */
    load(mapping.address + 4096 * 33);
}

static void touch_after_task(struct world *world)
{
    static const uint8_t task[PC_TASK_BYTES] = {9}, none[PC_TASK_BYTES];
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    OK(pc_client_task(client, task));
    OK(pc_client_task(client, none));
    load(mapping.address + 4096 * 33);
}

/* Its end is not the task's. */
static void touch_in_child_of_task(struct world *world)
{
    static const uint8_t task[PC_TASK_BYTES] = {9};
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    OK(pc_client_task(client, task));
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        OK(pc_client_after_fork(client));
        load(mapping.address + 4096 * 33);
        _exit(1);
    }
    int how;
    waitpid(pid, &how, 0);
    _exit(WIFEXITED(how) ? WEXITSTATUS(how) : 1);
}

static void test_last_words(struct world *world)
{
    static const char said[] = "variable 1 version 5 block 33 cannot be read from server 0x77";
    const struct pc__ctl_last_words *words = &world->fake->words;
    world->fake->fail_faults = 1;
    expect_end(world, touch, 70, said);
    expect_end(world, touch_after_task, 70, said);
    if (!IS_TSAN) /* it starts no threads in children */
        expect_end(world, touch_in_child_of_task, 70, said);
    CHECK(world->fake->last_words == 0, "%d of processes without a task", world->fake->last_words);
    world->fake->many_fails = 20; /* as of so many threads: what is unread must lose nothing */
    expect_end(world, touch_in_task, 70, said);
    CHECK(world->fake->last_words == 1, "%d times", world->fake->last_words);
    CHECK(words->task[0] == 9 && words->task[1] == 8 && words->task[23] == 7, "another task");
    CHECK(words->region == 1 && words->version == 5 && words->block == 33 &&
              words->error == PC_ERR_HOME_LOST,
          "region %lu version %lu block %lu error %d", words->region, words->version,
          words->block, words->error);
    world->fake->stall_last_words = 1; /* nobody answers: it ends all the same */
    uint64_t begun = now_ns();
    expect_end(world, touch_in_task, 70, said);
    CHECK(now_ns() - begun < 10 * SECOND, "%lu ms", (now_ns() - begun) / MS);
    EVENTUALLY(world->fake->last_words == 2);
}

static void test_lying_slot(struct world *world)
{
    if (world->trap != PC_TRAP_SIGSEGV)
        return; /* with userfaultfd there is no answer to lie in */
    world->fake->lie_slot = 1;
    expect_end(world, touch, 70, "makes no sense");
}

/* ------------------------------------------------------------- server's death */

static void *toucher(void *arg)
{
    const struct pc_mapping *mapping = arg;
    return block_is_right(mapping, PAGED, 1234) ? NULL : arg;
}

static void test_reattach(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    struct pc_mapping whole = world_map(world, client, WHOLE, 0);
    struct pc_mapping private = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    store(private.address, 5);
    CHECK(block_is_right(&mapping, PAGED, 3), "block 3");
    pthread_t threads[3];
    void *wrong;
    world->fake->stall_faults = 1;
    int faults = world->fake->faults;
    for (size_t i = 0; i < 2; i++)
        REQUIRE(pthread_create(&threads[i], NULL, toucher, i ? &private : &mapping) == 0);
    EVENTUALLY(world->fake->faults >= faults + 2);
    world_kill_server(world);
    REQUIRE(pthread_create(&threads[2], NULL, toucher, &mapping) == 0); /* with nobody there */
    usleep(100 * 1000); /* most likely stopped; if not, it faults later: as good */
    world->fake->stall_faults = 0;
    world_start_spare(world);
    for (size_t i = 0; i < 3; i++) {
        pthread_join(threads[i], &wrong);
        CHECK(wrong == NULL, "thread %zu read something else", i);
    }
    EVENTUALLY(world->fake->attaches == 3); /* two have been touched; the whole one may be last */
    CHECK(world->fake->hellos == 2, "%d greeted", world->fake->hellos);
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block_is_right(&mapping, PAGED, block), "block %lu", block);
    CHECK(load(private.address) == 5, "a private write is gone");
    CHECK(load(whole.address) == pattern(WHOLE, 0), "the whole one");
    OK(pc_client_unmap(client, private.id));
    OK(pc_client_unmap(client, whole.id));
    struct pc_mapping big = world_map(world, client, BIG, 0);
    CHECK(block_is_right(&big, BIG, 1 << 20), "a region mapped at the new server");
    OK(pc_client_close(client));
}

static void test_death_in_requests(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    world->fake->die_at_prefetch = 2;
    pid_t pid = fork();
    if (pid == 0) { /* no use of the client in there */
        EVENTUALLY(world->fake->die_at_prefetch == 0);
        usleep(100 * 1000);
        world_start_spare(world);
        _exit(0);
    }
    enum { N = 2 * PC__CTL_MAX_RUNS };
    static struct pc_run runs[N];
    for (uint64_t i = 0; i < N; i++)
        runs[i] = (struct pc_run){i % BLOCKS, 1};
    OK(pc_client_prefetch(client, mapping.id, runs, N, 1, 20 * 30 * SECOND));
    CHECK(world->fake->prefetches >= 3, "%d", world->fake->prefetches);
    int faults = world->fake->faults;
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block_is_right(&mapping, PAGED, block), "block %lu", block);
    CHECK(world->fake->faults == faults, "it was not resident");
    waitpid(pid, NULL, 0);
    OK(pc_client_close(client));
}

static void test_death_in_open(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping;
    world->fake->die_at_open = 1;
    int fd;
    FAILS(try_map(world, client, PAGED, 0, 500 * MS, &mapping), PC_ERR_NO_SERVER, "gone");
    FAILS(pc_client_create(client, MADE, BASE + ((uint64_t)2 << 30), LENGTH, PC_MEDIUM_MEMORY, 100 * MS, &fd),
          PC_ERR_NO_SERVER, "gone");
    FAILS(pc_client_seal(client, MADE, 100 * MS), PC_ERR_NO_SERVER, "gone");
    world->fake->die_at_open = 0;
    world_start_spare(world);
    mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 9), "block 9");
    OK(pc_client_close(client));
}

static void server_dies_for_good(struct world *world)
{
    world->reattach_ns = 300 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 0), "block 0");
    kill(world->server, SIGKILL);
    load(mapping.address + 4096 * 44);
    fprintf(stderr, "it was read\n");
}

static void test_no_reattach(struct world *world)
{
    expect_end(world, server_dies_for_good, 70, "variable 1 version 5 block 44");
}

static void server_dies_while_stopped(struct world *world)
{
    world->reattach_ns = 300 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    world->fake->die_at_fault = 1; /* after it took the fault */
    load(mapping.address + 4096 * 44);
    fprintf(stderr, "it was read\n");
}

static void test_no_reattach_while_stopped(struct world *world)
{
    expect_end(world, server_dies_while_stopped, 70, "did not come back in time");
}

/* ----------------------------------------------------------- server's silence */

static void *load_block_44(void *arg)
{
    const struct pc_mapping *mapping = arg;
    load(mapping->address + 4096 * 44);
    fprintf(stderr, "it was read\n");
    return NULL;
}

static void server_hangs_while_stopped(struct world *world)
{
    world->reattach_ns = 1500 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    pthread_t thread;
    world->fake->stall_faults = 1;
    int faults = world->fake->faults;
    REQUIRE(pthread_create(&thread, NULL, load_block_44, &mapping) == 0);
    EVENTUALLY(world->fake->faults > faults);
    kill(world->server, SIGSTOP);
    pthread_join(thread, NULL);
}

static void server_hangs_before_fault(struct world *world)
{
    world->reattach_ns = 1500 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    kill(world->server, SIGSTOP);
    load_block_44(&mapping);
}

static void test_hung_server(struct world *world)
{
    uint64_t begun = now_ns();
    expect_end(world, server_hangs_while_stopped, 70, "did not come back in time");
    kill(world->server, SIGCONT);
    world->fake->stall_faults = 0;
    expect_end(world, server_hangs_before_fault, 70, "did not come back in time");
    CHECK(now_ns() - begun < 20 * SECOND, "%lu ms", (now_ns() - begun) / MS);
}

/* Nobody is stopped: the process lives, and goes on with the server once that does. */
static void test_hung_server_comes_back(struct world *world)
{
    world->reattach_ns = 500 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0), other;
    CHECK(block_is_right(&mapping, PAGED, 0), "block 0");
    kill(world->server, SIGSTOP);
    EVENTUALLY(try_map(world, client, WHOLE, 0, 20 * MS, &other) == PC_ERR_NO_SERVER);
    CHECK(block_is_right(&mapping, PAGED, 0), "a present block");
    kill(world->server, SIGCONT);
    other = world_map(world, client, WHOLE, 0);
    CHECK(world->fake->hellos >= 2 && world->fake->attaches >= 1, "%d hellos",
          world->fake->hellos);
    CHECK(block_is_right(&other, WHOLE, 2), "a new mapping");
    for (uint64_t block = 0; block < BLOCKS; block += 3)
        CHECK(block_is_right(&mapping, PAGED, block), "block %lu", block);
    OK(pc_client_close(client));
}

static void test_pings(struct world *world)
{
    world->reattach_ns = 300 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping whole = world_map(world, client, WHOLE, 0);
    usleep(400 * 1000); /* four pings, if this needed any */
    CHECK(world->fake->pings == 0, "%d, and nothing can be absent", world->fake->pings);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    EVENTUALLY(world->fake->pings >= 4);
    CHECK(world->fake->hellos == 1, "a server that answers was left");
    OK(pc_client_unmap(client, mapping.id));
    OK(pc_client_unmap(client, whole.id));
    OK(pc_client_abandon(client, MADE, 30 * SECOND)); /* after the unmaps, and after a ping on its way */
    int pings = world->fake->pings;
    usleep(400 * 1000);
    CHECK(world->fake->pings == pings, "nothing is mapped");
    OK(pc_client_close(client));
}

/* Nobody is stopped: the process lives, and finds a server that comes very late. */
static void test_late_reattach(struct world *world)
{
    world->reattach_ns = 200 * MS;
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0), other;
    CHECK(block_is_right(&mapping, PAGED, 0), "block 0");
    world_kill_server(world);
    FAILS(try_map(world, client, WHOLE, 0, 600 * MS, &other), PC_ERR_NO_SERVER, "");
    CHECK(block_is_right(&mapping, PAGED, 0), "a present block");
    OK(pc_client_unmap(client, mapping.id)); /* does not wait */
    world_start_spare(world);
    mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 1000), "block 1000");
    OK(pc_client_close(client));
}

static void server_forgets(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 0), "block 0");
    world->fake->refuse_attach = 1;
    kill(world->server, SIGKILL);
    world_start_spare(world);
    sleep(10);
}

static void test_refused_attach(struct world *world)
{
    expect_end(world, server_forgets, 70, pc_strerror(PC_ERR_NO_GENERATION));
}

static void test_refused_attach_of_whole(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping whole = world_map(world, client, WHOLE, 0);
    world->fake->refuse_attach = 1;
    world_kill_server(world);
    world_start_spare(world);
    EVENTUALLY(world->fake->attaches == 1);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 1), "a new mapping");
    CHECK(block_is_right(&whole, WHOLE, 2), "all of it is here");
    OK(pc_client_unmap(client, whole.id));
    OK(pc_client_close(client));
}

static _Atomic bool stop_reading;

static void *read_all_the_time(void *arg)
{
    const struct pc_mapping *mapping = arg;
    uint64_t at = 1;
    while (!stop_reading) {
        at = at * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t block = (at >> 20) % (BIG_LENGTH >> 12);
        if (!block_is_right(mapping, BIG, block))
            return arg;
    }
    return NULL;
}

/* Killed at a random moment under load; the spare takes over and every byte is right. */
static void test_death_under_load(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, BIG, 0);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, read_all_the_time, &mapping) == 0);
    EVENTUALLY(world->fake->faults > 200);
    usleep((useconds_t)(now_ns() % 20000));
    world_kill_server(world);
    world_start_spare(world);
    int faults = world->fake->faults;
    EVENTUALLY(world->fake->faults > faults + 200);
    stop_reading = true;
    for (size_t i = 0; i < 4; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        CHECK(wrong == NULL, "thread %zu read something else", i);
    }
    OK(pc_client_close(client));
}

/* ---------------------------------------------------------------------- fork */

static struct {
    pc_client *client;
    struct pc_mapping mapping, private, whole;
} parent;

static void make_parent(struct world *world)
{
    parent.client = world_client(world);
    parent.mapping = world_map(world, parent.client, PAGED, 0);
    parent.whole = world_map(world, parent.client, WHOLE, 0);
    parent.private = world_map(world, parent.client, PAGED, PC_MAP_PRIVATE);
    CHECK(block_is_right(&parent.mapping, PAGED, 0), "block 0");
    store(parent.private.address, 5);
}

static void child_attaches(struct world *world)
{
    struct pc_mapping other;
    FAILS(try_map(world, parent.client, BIG, 0, SECOND, &other), PC_ERR_FORKED, "fork");
    OK(pc_client_after_fork(parent.client));
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block_is_right(&parent.mapping, PAGED, block), "block %lu in the child", block);
    CHECK(block_is_right(&parent.whole, WHOLE, 4), "the whole one");
    other = world_map(world, parent.client, BIG, 0);
    CHECK(block_is_right(&other, BIG, 4), "a mapping of its own");
    FAILS(pc_client_after_fork(parent.client), PC_ERR_EXISTS, "attached");
    pid_t pid = fork();
    if (pid == 0) {
        OK(pc_client_after_fork(parent.client));
        CHECK(block_is_right(&parent.mapping, PAGED, 9) && block_is_right(&other, BIG, 1 << 22),
              "in the grandchild");
        OK(pc_client_close(parent.client));
        exit(test_result());
    }
    int how;
    waitpid(pid, &how, 0);
    CHECK(how == 0, "the grandchild ended with %#x", (unsigned)how);
    OK(pc_client_unmap(parent.client, parent.private.id));
    OK(pc_client_unmap(parent.client, parent.mapping.id));
    OK(pc_client_close(parent.client));
}

static void child_touches_private(struct world *world)
{
    (void)world;
    OK(pc_client_after_fork(parent.client));
    load(parent.private.address);
}

static void child_without_hook(struct world *world)
{
    (void)world;
    load(parent.mapping.address + 4096 * 12);
}

static void child_without_atfork(struct world *world)
{
    (void)world; /* expect_end forked us; a raw fork runs no handler at all */
    pid_t pid = (pid_t)syscall(SYS_fork);
    if (pid == 0) {
        load(parent.whole.address);
        _exit(0);
    }
    int how;
    waitpid(pid, &how, 0);
    _exit(WIFEXITED(how) ? WEXITSTATUS(how) : 1);
}

static void child_without_server(struct world *world)
{
    world_kill_server(world);
    int rc = pc_client_after_fork(parent.client);
    CHECK(rc == PC_ERR_NO_SERVER, "%d", rc);
    rc = pc_client_after_fork(parent.client); /* may be tried again */
    CHECK(rc == PC_ERR_NO_SERVER, "%d", rc);
    if (test_result())
        _exit(1);
    load(parent.mapping.address);
}

static void child_whose_server_refuses(struct world *world)
{
    world->fake->regions[0].id = 0; /* it was freed meanwhile */
    OK(pc_client_after_fork(parent.client));
    CHECK(block_is_right(&parent.whole, WHOLE, 4), "what it did not refuse");
    if (test_result())
        _exit(1);
    load(parent.mapping.address);
}

static void test_fork(struct world *world)
{
    if (IS_TSAN) {
        printf("skip fork: not under TSan\n");
        return; /* it does not know children of processes with threads */
    }
    make_parent(world);
    expect_end(world, child_attaches, 0, "");
    expect_end(world, child_touches_private, 70, "private copy");
    expect_end(world, child_without_hook, 70, "child of fork");
    expect_end(world, child_without_atfork, 70, "child of fork");
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block_is_right(&parent.mapping, PAGED, block), "block %lu in the parent", block);
    CHECK(load(parent.private.address) == 5, "the parent's private copy");
    expect_end(world, child_whose_server_refuses, 70, "variable 1 version 5 block 0");
    OK(pc_client_close(parent.client));
}

static void test_fork_without_server(struct world *world)
{
    if (IS_TSAN) {
        printf("skip fork_without_server: not under TSan\n");
        return;
    }
    world->reattach_ns = 200 * MS;
    make_parent(world);
    expect_end(world, child_without_server, 70, "variable 1 version 5 block 0");
    OK(pc_client_close(parent.client)); /* while it looks for a server */
}

static void *map_all_the_time(void *arg)
{
    struct world *world = arg;
    while (!stop_reading) {
        struct pc_mapping mapping;
        if (try_map(world, parent.client, PAGED, PC_MAP_PRIVATE, 10 * SECOND, &mapping) ||
            !block_is_right(&mapping, PAGED, 100) ||
            pc_client_unmap(parent.client, mapping.id))
            return arg;
    }
    return NULL;
}

/* The child's tables are sound also when other threads were inside the client. */
static void test_fork_under_load(struct world *world)
{
    if (IS_TSAN) {
        printf("skip fork_under_load: not under TSan\n");
        return;
    }
    make_parent(world);
    pthread_t threads[3];
    for (size_t i = 0; i < 3; i++)
        REQUIRE(pthread_create(&threads[i], NULL, map_all_the_time, world) == 0);
    for (int i = 0; i < 30; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            n_check_failures = 0;
            alarm(20);
            OK(pc_client_after_fork(parent.client));
            struct pc_mapping mapping = world_map(world, parent.client, PAGED, PC_MAP_PRIVATE);
            CHECK(block_is_right(&parent.mapping, PAGED, 50) &&
                  block_is_right(&mapping, PAGED, 60), "in child %d", i);
            OK(pc_client_close(parent.client));
            _exit(test_result()); /* what the other threads had allocated is not its to free */
        }
        int how;
        waitpid(pid, &how, 0);
        CHECK(how == 0, "child %d ended with %#x", i, (unsigned)how);
    }
    stop_reading = true;
    for (size_t i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        CHECK(wrong == NULL, "thread %zu", i);
    }
    OK(pc_client_close(parent.client));
    EVENTUALLY(world->fake->live_mappings == 0);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(no_server), TEST(late_server), TEST(other_version), TEST(stalled_hello),
        TEST(stalled_open), TEST(close_while_mapping), TEST(close_while_prefetching),
        TEST(shut), TEST(lies), TEST(failed_fault), TEST(last_words),
        TEST(lying_slot), TEST(reattach), TEST(death_in_requests), TEST(death_in_open),
        TEST(no_reattach), TEST(no_reattach_while_stopped), TEST(late_reattach),
        TEST(hung_server), TEST(hung_server_comes_back), TEST(pings),
        TEST(refused_attach), TEST(refused_attach_of_whole), TEST(death_under_load), TEST(fork),
        TEST(fork_without_server), TEST(fork_under_load),
    };
    return run_tests(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
}
