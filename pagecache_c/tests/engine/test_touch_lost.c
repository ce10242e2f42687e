/* test_touch_lost.c - threads are stopped at absent blocks while the connection of their process is lost,
 * and its page server lives: each goes on, with the bytes of its own block. Over both traps. */
#include "engine/miss/miss.h"
#include "tests/support/connections.h"
#include "tests/support/engine_main.h"
#include "tests/support/leaks.h"

#define N(array) (sizeof(array) / sizeof(array)[0])

struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *home, *reader;
    pc_client *builder, *other, *client;
    struct pc_region_info info;
    struct pc_mapping m;
};

static struct world world_start(const char *tag, int trap, uint64_t length)
{
    struct world w = {.counts = process_counts(), .c = cluster_start(2, tag)};
    w.home = &w.c->servers[0];
    w.reader = &w.c->servers[1];
    w.builder = attach(w.home, trap);
    w.other = attach(w.reader, trap); /* at the loop that listens */
    w.client = attach(w.reader, trap);
    w.info = build(w.c, w.home, w.builder, 1, length, 0);
    w.m = map_at(w.client, &w.info, 0, 0);
    return w;
}

static void world_stop(struct world *w)
{
    OK(pc_client_unmap(w->client, w->m.id));
    pc_client_close(w->client);
    pc_client_close(w->other);
    pc_client_close(w->builder);
    SOON(stats_of(w->reader).mappings == 0);
    cluster_end(w->c, &w->counts);
}

struct toucher {
    const struct pc_mapping *m;
    uint64_t seed;
    const _Atomic bool *enough;
    _Atomic int *ended;
};

static void *touch_some(void *arg)
{
    struct toucher *t = arg;
    uint64_t x = t->seed;
    while (!*t->enough) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        const uint64_t offset = x % t->m->length_bytes & ~7ull;
        CHECK(at(t->m, offset) == pattern(1, offset));
    }
    (*t->ended)++;
    return NULL;
}

static void test_again_and_again(int trap)
{
    told.cache_bytes = MIB; /* so that blocks are absent to the end */
    struct world w = world_start("again", trap, 32 * MIB);
    struct toucher all[8];
    pthread_t threads[N(all)];
    _Atomic bool enough = false;
    _Atomic int ended = 0;
    for (size_t i = 0; i < N(all); i++) {
        all[i] = (struct toucher){&w.m, 7 + i, &enough, &ended};
        CHECK(!pthread_create(&threads[i], NULL, touch_some, &all[i]));
    }
    for (unsigned i = 0; i < rounds_of(300, 3000); i++) {
        lose(w.reader, 0);
        usleep(i * 7919 % 5000);
    }
    enough = true; /* each ends with a block that it has got */
    SOON(ended == (int)N(all));
    for (size_t i = 0; i < N(all); i++)
        pthread_join(threads[i], NULL);
    CHECK(stats_of(w.reader).reattached > 3);
    world_stop(&w);
}

/* ---------------------------------------- the old connection's loop is late */

static struct late {
    uint64_t client_id;
    _Atomic bool touched, is_read;
    _Atomic int in;              /* loops that stand still */
} late;

/* In all loops. That of the client loses its connection, and sees that when all this is over: before
 * it, it reads of a thread that is stopped since the client is attached again. Others read nothing. */
static void stand_still(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    struct pc__session *old = NULL;
    pc__each(link, &loop->sessions)
    {
        struct pc__session *client = pc__of(link, struct pc__session, link);
        if (client->id == late.client_id)
            old = client;
    }
    if (!old)
        return;
    (void)shutdown(old->fd, SHUT_RDWR);
    while (!late.touched)
        usleep(1000);
    if (old->uffd >= 0)
        pc__fault_read_uffd(loop, old);
    else
        pc__fault_read_slots(loop, old);
    late.is_read = true;
}

static void wait_until_read(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    bool is_olds = false;
    pc__each(link, &loop->sessions)
        is_olds |= pc__of(link, struct pc__session, link)->id == late.client_id;
    late.in++;
    while (!is_olds && !late.is_read)
        usleep(1000);
}

struct touch {
    const struct pc_mapping *m;
    _Atomic bool done;
};

static void *touch_one(void *arg)
{
    struct touch *t = arg;
    CHECK(at(t->m, 77 << 12) == pattern(1, 77 << 12));
    t->done = true;
    return NULL;
}

static void post_to_all(struct server *s, void (*run)(struct pc__loop *, struct pc__mail *))
{
    for (int i = 0; i < s->engine->n_loops; i++) {
        const struct pc__mail mail = {.run = run};
        OK(pc__loop_post(&s->engine->loops[i], &mail));
    }
}

static void test_read_by_the_old(int trap)
{
    struct world w = world_start("old", trap, MIB);
    late = (struct late){.client_id = newest(w.reader)};
    pthread_mutex_lock(&w.c->serving); /* nothing comes from the home */
    post_to_all(w.reader, stand_still);
    SOON(stats_of(w.reader).reattached == 1);
    usleep(50000); /* and the rest of what a client says then */
    post_to_all(w.reader, wait_until_read);
    SOON(late.in >= 1);
    struct touch touch = {.m = &w.m};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, touch_one, &touch));
    usleep(100000);
    late.touched = true;
    SOON(late.is_read && stats_of(w.reader).clients == 2);
    pthread_mutex_unlock(&w.c->serving);
    SOON_IN(touch.done, 10);
    pthread_join(thread, NULL);
    world_stop(&w);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(read_by_the_old),
        TEST(again_and_again),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
