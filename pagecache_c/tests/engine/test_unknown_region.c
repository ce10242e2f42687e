/* test_unknown_region.c - a home that answers that it does not know the region: only the registry says
 * that something is lost. Over both traps; the tests answer what the registry would. */
#include "engine/core/core.h"
#include "tests/support/engine_main.h"
#include "tests/support/leaks.h"

#define N_BLOCKS 512u
enum { HOME, OTHER, READER, N_SERVERS };
enum { PREFETCH, GATHER, TOUCH, N_KINDS };
#define N(array) (sizeof(array) / sizeof(array)[0])
#define PAUSE_NS (SECOND / 2) /* between two questions about a region */

/* HOME has region 1, and forgets it; READER has it mapped, and nothing of it. */
struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *servers, *reader;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info;
    struct pc_mapping m;
    uint64_t *memory; /* of who has it from create_shared */
    int trap;
};

static struct world world_of(int trap)
{
    struct world w = {.trap = trap, .counts = process_counts(),
                      .c = cluster_start(N_SERVERS, "unknown")};
    w.servers = w.c->servers;
    w.reader = &w.servers[READER];
    w.reader->hold_home = true;
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.servers[i], trap);
    w.info = build(w.c, &w.servers[HOME], w.clients[HOME], 1, (uint64_t)N_BLOCKS << 12, 0);
    w.m = map_at(w.clients[READER], &w.info, 0, 0);
    w.memory = malloc(w.info.length_bytes);
    fill_pattern(w.memory, 1, 0, w.info.length_bytes);
    OK(pc_engine_retire(w.servers[HOME].engine, 1, 1));
    CHECK(region_of(&w.servers[HOME], 1).region == 0);
    return w;
}

static void world_end(struct world *w)
{
    OK(pc_client_unmap(w->clients[READER], w->m.id));
    clients_close(w->clients, N_SERVERS);
    for (int i = 0; i < N_SERVERS; i++) {
        SOON(stats_of(&w->servers[i]).mappings == 0);
        CHECK(stats_of(&w->servers[i]).bad_messages == 0);
    }
    cluster_end(w->c, &w->counts);
    free(w->memory);
}

/* That server is a home of the region from now on, with its bytes. */
static void get_it(struct world *w, struct server *server)
{
    const struct pc_segment all = {0, w->info.length_bytes, (uint64_t)(uintptr_t)w->memory};
    int fd = -1;
    OK(pc_engine_create_shared(server->engine, &w->info, &all, 1, &fd));
    close(fd);
    OK(pc_engine_seal(server->engine, 1));
}

/* What a process of READER's node wants, on a thread of its own. */
struct question {
    struct world *w;
    int kind, rc;
    uint64_t took_ns;
    char text[512];
    pthread_t thread;
    _Atomic bool done;
};

static int gather_some(struct world *w, const struct pc_region_info *info, const struct pc_mapping *m,
                       size_t n)
{
    static const struct pc_rows rows = {8, 8, 104};
    uint64_t ids[N_BLOCKS] = {0}, out[N_BLOCKS * 13];
    for (size_t i = 0; i < n; i++)
        ids[i] = 512 * i + 3;
    int rc = pc_client_gather(w->clients[READER], m->id, &rows, ids, n, out, WAIT);
    for (size_t i = 0; i < 13 * n && !rc; i++)
        CHECK(out[i] == pattern(info->region, 8 + 8 * ids[i / 13] + 8 * (i % 13)));
    return rc;
}

static void *put_question(void *arg)
{
    struct question *q = arg;
    struct world *w = q->w;
    const struct pc_run some[] = {{3, 100}, {200, 1}, {400, 112}};
    const uint64_t began_ns = now_ns();
    if (q->kind == PREFETCH)
        q->rc = pc_client_prefetch(w->clients[READER], w->m.id, some, N(some), 1, WAIT);
    else if (q->kind == GATHER)
        q->rc = gather_some(w, &w->info, &w->m, 50);
    else
        CHECK(at(&w->m, 77 * 4096 + 16) == pattern(1, 77 * 4096 + 16));
    q->took_ns = now_ns() - began_ns;
    snprintf(q->text, sizeof q->text, "%s", pc_last_message());
    for (uint64_t b = 0; !q->rc && q->kind == PREFETCH && b < 100; b++)
        check_block(w->c, &w->m, &w->info, 0, 0, b + 3);
    q->done = true;
    return NULL;
}

static void ask(struct question *q, struct world *w, int kind)
{
    *q = (struct question){.w = w, .kind = kind};
    CHECK(!pthread_create(&q->thread, NULL, put_question, q));
}

static void join(struct question *q)
{
    SOON(q->done);
    pthread_join(q->thread, NULL);
}

/* The registry knows nobody else. */
static void name_it_again(struct world *w, const _Atomic bool *done, uint64_t for_ns)
{
    int answered = -1; /* it may have been asked before */
    for (uint64_t until = now_ns() + for_ns; !*done && now_ns() < until; usleep(1000))
        if (w->reader->homes_asked > answered) {
            answered = w->reader->homes_asked;
            OK(pc_engine_set_homes(w->reader->engine, 1, &w->servers[HOME].id, 1));
        }
}

/* ------------------------------------------------------------------ tests */

/* Nobody is failed before the registry has said what became of it; and then with what it says. */
static void verdict(int trap, int error, const char *says)
{
    struct world w = world_of(trap);
    for (int kind = PREFETCH; kind < TOUCH; kind++) {
        struct question q;
        const int before = w.reader->homes_asked;
        ask(&q, &w, kind);
        SOON(w.reader->homes_asked > before);
        usleep(1200000);
        CHECK(!q.done);
        OK(pc_engine_home_lost(w.reader->engine, 1, w.servers[HOME].id, error));
        join(&q);
        CHECK(q.rc == error);
        CHECK(strstr(q.text, says));
    }
    world_end(&w);
}

static void test_lost_is_the_registrys_word(int trap)
{
    verdict(trap, PC_ERR_HOME_LOST, "server 0x1000 does not have them");
}

static void test_freed_is_freed(int trap)
{
    verdict(trap, PC_ERR_NO_REGION, "");
}

static void test_another_home(int trap)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct world w = world_of(trap);
        struct question q;
        get_it(&w, &w.servers[OTHER]);
        ask(&q, &w, kind);
        SOON(w.reader->homes_asked > 0);
        usleep(50000);
        CHECK(!q.done);
        OK(pc_engine_set_homes(w.reader->engine, 1, &w.servers[OTHER].id, 1));
        join(&q);
        OK(q.rc);
        check_version(w.c, &w.m, &w.info, 0);
        world_end(&w);
    }
}

/* It was told late: who is asked again, and again, has it at last. With pauses. */
static void test_a_home_that_is_told_late(int trap)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct world w = world_of(trap);
        struct question q;
        const uint64_t began_ns = now_ns();
        ask(&q, &w, kind);
        name_it_again(&w, &q.done, 2 * SECOND);
        CHECK(!q.done && w.reader->homes_asked >= 2);
        get_it(&w, &w.servers[HOME]);
        name_it_again(&w, &q.done, WAIT);
        join(&q);
        OK(q.rc);
        CHECK((uint64_t)w.reader->homes_asked <= (now_ns() - began_ns) / PAUSE_NS + 2);
        check_version(w.c, &w.m, &w.info, 0);
        world_end(&w);
    }
}

/* The same one again and again, or no answer: no loss, but a timeout that says what it answers. */
static void until_its_deadline(int trap, bool answers)
{
    told.fault_timeout_ns = 2 * SECOND;
    struct world w = world_of(trap);
    for (int kind = PREFETCH; kind < TOUCH; kind++) {
        struct question q;
        ask(&q, &w, kind);
        if (answers)
            name_it_again(&w, &q.done, WAIT);
        join(&q);
        CHECK(q.rc == PC_ERR_TIMEOUT);
        CHECK(q.took_ns >= 2 * SECOND - SECOND / 10 && q.took_ns < 15 * SECOND);
        CHECK(strstr(q.text, "server 0x1000 answers") && strstr(q.text, "does not know the variable"));
        CHECK(!strstr(q.text, "lost"));
    }
    world_end(&w);
}

static void test_the_same_one_until_the_deadline(int trap)
{
    until_its_deadline(trap, true);
}

static void test_no_answer_until_the_deadline(int trap)
{
    until_its_deadline(trap, false);
}

/* A thread that is stopped at a block ends its process with the same words. */
static void test_who_touches_it_is_told_why(int trap)
{
    told.fault_timeout_ns = 2 * SECOND;
    struct world w = world_of(trap);
    char text[1024] = "";
    int out[2], status;
    fflush(NULL);
    CHECK(!pipe2(out, O_CLOEXEC));
    pid_t child = fork();
    if (!child) {
        dup2(out[1], 2);
        munmap((void *)(uintptr_t)w.m.address, w.m.length_bytes); /* the guard of the parent's map */
        pc_client *client = attach(w.reader, trap);
        struct pc_mapping m = map_at(client, &w.info, 0, 0);
        (void)*block_at(&m, 9);
        _exit(0);
    }
    close(out[1]);
    size_t n = 0;
    for (ssize_t got; n < sizeof text - 1 && (got = read(out[0], text + n, sizeof text - 1 - n)) > 0;)
        n += (size_t)got;
    close(out[0]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 70);
    CHECK(strstr(text, "block 9 cannot be read") && strstr(text, "server 0x1000 answers"));
    world_end(&w);
}

/* What else is asked on the same connections goes on, and answers stay in step. */
static void test_others_go_on(int trap)
{
    struct world w = world_of(trap);
    struct question q[2];
    struct pc_region_info good =
        build(w.c, &w.servers[HOME], w.clients[HOME], 2, (uint64_t)N_BLOCKS << 12, 0);
    struct pc_mapping m = map_at(w.clients[READER], &good, 0, 0);
    ask(&q[0], &w, GATHER);
    ask(&q[1], &w, PREFETCH);
    SOON(w.reader->homes_asked > 0);
    uint64_t until = now_ns() + 3 * SECOND; /* over some pauses */
    for (uint64_t i = 0; now_ns() < until; i++) {
        const struct pc_run run = {i * 7 % N_BLOCKS, 1};
        OK(gather_some(&w, &good, &m, 3));
        OK(pc_client_prefetch(w.clients[READER], m.id, &run, 1, 1, WAIT));
        check_block(w.c, &m, &good, 0, 0, run.first_block);
    }
    CHECK(!q[0].done && !q[1].done);
    get_it(&w, &w.servers[HOME]);
    for (int i = 0; i < 2; i++) {
        join(&q[i]);
        OK(q[i].rc);
    }
    OK(pc_client_unmap(w.clients[READER], m.id));
    world_end(&w);
}

/* Who waits goes, and then the server: nothing stays. */
static void test_stops_meanwhile(int trap)
{
    told.fault_timeout_ns = 600 * SECOND;
    struct world w = world_of(trap);
    pid_t children[N_KINDS];
    int status;
    for (int kind = 0; kind < N_KINDS; kind++) {
        fflush(NULL);
        children[kind] = fork();
        if (!children[kind]) {
            munmap((void *)(uintptr_t)w.m.address, w.m.length_bytes);
            w.clients[READER] = attach(w.reader, trap);
            w.m = map_at(w.clients[READER], &w.info, 0, 0);
            struct question q = {.w = &w, .kind = kind};
            (void)put_question(&q);
            _exit(0);
        }
    }
    SOON(w.reader->homes_asked > 0);
    usleep(300000);
    for (int kind = 0; kind < N_KINDS; kind++) {
        CHECK(!kill(children[kind], SIGKILL));
        waitpid(children[kind], &status, 0);
        CHECK(WIFSIGNALED(status));
    }
    SOON(stats_of(w.reader).faults_waiting == 0 && stats_of(w.reader).clients == 1);
    world_end(&w);
}

/* A server that is named as the home, and has nothing of it, asks as well. */
static void test_named_here(int trap)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct world w = world_of(trap);
        struct question q;
        struct pc__region *region = pc__region_get(w.reader->engine, 1);
        pthread_mutex_lock(&region->lock);
        region->homes[0] = w.reader->id;
        pthread_mutex_unlock(&region->lock);
        pc__region_put(w.reader->engine, region);
        ask(&q, &w, kind);
        SOON(w.reader->homes_asked > 0);
        usleep(1200000);
        CHECK(!q.done);
        get_it(&w, &w.servers[OTHER]);
        OK(pc_engine_set_homes(w.reader->engine, 1, &w.servers[OTHER].id, 1));
        join(&q);
        OK(q.rc);
        check_version(w.c, &w.m, &w.info, 0);
        world_end(&w);
    }
}

/* A base that is half of the next version, and whose layer is not here: who opens it waits for what the
 * registry has published, and is not told of a loss that it has not heard of. */
static void test_half_changed(int trap)
{
    struct world w = world_of(trap);
    struct server *home = &w.servers[HOME];
    struct pc_region_info info = build(w.c, home, w.clients[HOME], 2, 8 << 12, 0);
    struct pc_mapping m;
    struct pc__region *region = pc__region_get(home->engine, 2);
    pthread_mutex_lock(&region->lock);
    region->home->base_changes = true;
    pthread_mutex_unlock(&region->lock);
    CHECK(try_map(w.clients[HOME], &info, 0, 0, &m) == PC_ERR_TIMEOUT);
    CHECK(home->published_asked == 1);
    pthread_mutex_lock(&region->lock);
    region->home->base_changes = false;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(home->engine, region);
    check_at(w.c, w.clients[HOME], &info, 0);
    world_end(&w);
}

static void *open_at_home(void *arg)
{
    struct question *q = arg;
    struct pc_mapping m;
    q->rc = try_map(q->w->clients[HOME], &q->w->info, 0, 0, &m);
    q->done = true;
    return NULL;
}

/* A server that is told that it is the home itself, and has nothing: who opens the region there waits
 * for what became of it, as the registry says. */
static void test_opened_where_it_should_be(int trap)
{
    struct world w = world_of(trap);
    struct server *home = &w.servers[HOME];
    struct question q = {.w = &w};
    CHECK(!pthread_create(&q.thread, NULL, open_at_home, &q));
    SOON(home->regions_lacking == 1);
    usleep(300000);
    CHECK(!q.done);
    OK(pc_engine_refuse_region(home->engine, 1, PC_ERR_TIMEOUT));
    join(&q);
    CHECK(q.rc == PC_ERR_TIMEOUT);
    world_end(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(lost_is_the_registrys_word),
        TEST(freed_is_freed),
        TEST(another_home),
        TEST(a_home_that_is_told_late),
        TEST(the_same_one_until_the_deadline),
        TEST(no_answer_until_the_deadline),
        TEST(who_touches_it_is_told_why),
        TEST(others_go_on),
        TEST(stops_meanwhile),
        TEST(named_here),
        TEST(half_changed),
        TEST(opened_where_it_should_be),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
