/* test_policy.c - each replacement policy against a plain model of it, and against what is known of
 * them. */
#include "engine/cache/policy.h"
#include "tests/support/harness.h"

#define MOST 400 /* kinds of things */

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    return (x ^ x >> 27) * 0x94d049bb133111ebull;
}

/* ------------------------------------------------------------------ models */

/* Written from the papers' words, with arrays: order[] is from the oldest to the newest. */
struct model {
    int kind;
    int order[MOST];
    int n;
    int count[MOST];
    int hand; /* SIEVE: index in order */
};

static void model_remove_at(struct model *m, int i)
{
    memmove(&m->order[i], &m->order[i + 1], (size_t)(m->n - i - 1) * sizeof(int));
    m->n--;
    if (m->hand > i)
        m->hand--;
    if (m->hand >= m->n) /* past the newest: the oldest is next */
        m->hand = 0;
}

static void model_remove(struct model *m, int id)
{
    for (int i = 0; i < m->n; i++)
        if (m->order[i] == id) {
            model_remove_at(m, i);
            return;
        }
    FAIL("the model lost one");
}

static void model_push(struct model *m, int id)
{
    m->order[m->n++] = id;
}

static void model_insert(struct model *m, int id)
{
    m->count[id] = 0;
    model_push(m, id);
}

static void model_use(struct model *m, int id, bool again)
{
    if (m->kind == PC_POLICY_LRU || (m->kind == PC_POLICY_LFU && again)) {
        model_remove(m, id);
        model_push(m, id);
    }
    int most = m->kind == PC_POLICY_LFU ? 63 : 1;
    if (again && m->count[id] < most)
        m->count[id]++;
}

static int model_take(struct model *m, int i)
{
    int id = m->order[i];
    model_remove_at(m, i);
    return id;
}

static int model_victim(struct model *m)
{
    int at = 0;
    if (!m->n)
        return -1;
    if (m->kind == PC_POLICY_LFU)
        for (int i = 1; i < m->n; i++)
            if (m->count[m->order[i]] < m->count[m->order[at]])
                at = i;
    if (m->kind == PC_POLICY_SIEVE) {
        at = m->hand < m->n ? m->hand : 0;
        while (m->count[m->order[at]]) {
            m->count[m->order[at]] = 0;
            at = (at + 1) % m->n;
        }
        m->hand = at; /* which the next newer one has afterwards */
    }
    return model_take(m, at); /* FIFO and LRU: the oldest */
}

/* Random steps; what goes must be the same, in the same order. */
static void test_model(int kind)
{
    for (unsigned seed = 1; seed <= 20; seed++) {
        static struct pc__policy_entry entries[MOST];
        static struct model model;
        struct pc__policy policy;
        memset(entries, 0, sizeof entries);
        memset(&model, 0, sizeof model);
        model.kind = kind;
        OK(pc__policy_open(&policy, kind));
        unsigned state = seed;
        for (int step = 0; step < 4000; step++) {
            int id = rand_r(&state) % (int)(20 * seed), what = rand_r(&state) % 10;
            struct pc__policy_entry *entry = &entries[id];
            entry->key = mixed((uint64_t)id + 1);
            if (what < 5 && !entry->queue) {
                CHECK(pc__policy_inserted(&policy, entry));
                model_insert(&model, id);
            } else if (what < 7 && entry->queue) {
                pc__policy_used(&policy, entry, what == 5);
                model_use(&model, id, what == 5);
            } else if (what == 7 && entry->queue) {
                pc__policy_removed(&policy, entry);
                model_remove(&model, id);
            } else if (what > 7) {
                entry = pc__policy_victim(&policy);
                int other = model_victim(&model);
                CHECK((entry ? (int)(entry - entries) : -1) == other);
            }
            CHECK(policy.n == (size_t)model.n);
        }
        pc__policy_close(&policy);
    }
}

/* ------------------------------------------------------------ a whole cache */

struct cached {
    struct pc__policy policy;
    struct pc__policy_entry entries[MOST];
    size_t room;
    unsigned misses;
};

static struct cached *cached_new(int kind, size_t room)
{
    struct cached *c = calloc(1, sizeof *c);
    OK(pc__policy_open(&c->policy, kind));
    c->room = room;
    return c;
}

static void cached_free(struct cached *c)
{
    pc__policy_close(&c->policy);
    free(c);
}

static bool cached_access(struct cached *c, unsigned id)
{
    struct pc__policy_entry *entry = &c->entries[id];
    if (entry->queue) {
        pc__policy_used(&c->policy, entry, true);
        return true;
    }
    c->misses++;
    if (c->policy.n == c->room) {
        struct pc__policy_entry *victim = pc__policy_victim(&c->policy);
        CHECK(victim && !victim->queue);
    }
    entry->key = mixed(id + 1);
    CHECK(pc__policy_inserted(&c->policy, entry));
    CHECK(c->policy.n <= c->room);
    return false;
}

/* A loop over one more than fits: LRU and FIFO miss every time, random does not. */
static void test_loop(int unused)
{
    (void)unused;
    static const struct {
        int kind;
        unsigned least, most; /* misses of 100 rounds of 101 */
    } want[] = {{PC_POLICY_LRU, 10100, 10100},
                {PC_POLICY_FIFO, 10100, 10100},
                {PC_POLICY_RANDOM, 101, 3000}};
    for (size_t k = 0; k < sizeof want / sizeof want[0]; k++) {
        struct cached *c = cached_new(want[k].kind, 100);
        for (unsigned i = 0; i < 10100; i++)
            (void)cached_access(c, i % 101);
        CHECK(c->misses >= want[k].least && c->misses <= want[k].most);
        cached_free(c);
    }
}

/* Misses of a hot set of 50 that is used twice between scans of things that are used once. */
static unsigned hot_misses(int kind)
{
    struct cached *c = cached_new(kind, 100);
    unsigned misses = 0, cold = 0;
    for (unsigned round = 0; round < 60; round++) {
        for (unsigned i = 0; i < 100; i++)
            misses += !cached_access(c, i % 50) && round > 10;
        for (unsigned i = 0; i < 80; i++)
            (void)cached_access(c, 50 + cold++ % 300);
    }
    cached_free(c);
    return misses;
}

/* One scan after the other pushes the hot ones out of LRU and FIFO; LFU and SIEVE keep them. */
static void test_scans(int unused)
{
    (void)unused;
    CHECK(hot_misses(PC_POLICY_LFU) == 0);
    CHECK(hot_misses(PC_POLICY_SIEVE) == 0);
    CHECK(hot_misses(PC_POLICY_LRU) >= 49 * 29);
    CHECK(hot_misses(PC_POLICY_FIFO) >= 49 * 25);
}

/* Victims that come back do not hide the others: each of the rest is chosen in the end. */
static void test_back(int kind)
{
    static struct pc__policy_entry entries[100];
    struct pc__policy policy;
    OK(pc__policy_open(&policy, kind));
    memset(entries, 0, sizeof entries);
    for (unsigned i = 0; i < 100; i++) {
        entries[i].key = mixed(i + 1);
        CHECK(pc__policy_inserted(&policy, &entries[i]));
        for (unsigned uses = 0; uses < i / 10; uses++)
            pc__policy_used(&policy, &entries[i], true);
    }
    unsigned gone = 0;
    for (unsigned tries = 0; gone < 50; tries++) { /* every second one has to stay */
        CHECK(tries < 5000);
        struct pc__policy_entry *victim = pc__policy_victim(&policy);
        CHECK(victim);
        if ((victim - entries) % 2) {
            CHECK(pc__policy_back(&policy, victim));
            continue;
        }
        gone++;
    }
    CHECK(policy.n == 50);
    for (unsigned i = 1; i < 100; i += 2)
        pc__policy_removed(&policy, &entries[i]);
    CHECK(policy.n == 0 && !pc__policy_victim(&policy));
    pc__policy_close(&policy);
}

/* Restored ones are all there, and the policy goes on as before. */
static void test_restore(int kind)
{
    static struct pc__policy_entry entries[100];
    struct pc__policy policy;
    OK(pc__policy_open(&policy, kind));
    memset(entries, 0, sizeof entries);
    for (unsigned i = 0; i < 100; i++)
        CHECK(pc__policy_inserted(&policy, &entries[i]));
    for (unsigned round = 0; round < 30; round++) {
        struct pc__policy_entry *aside[40];
        for (unsigned i = 0; i < 40; i++)
            CHECK((aside[i] = pc__policy_victim(&policy)) && !aside[i]->queue);
        struct pc__policy_entry *victim = pc__policy_victim(&policy);
        for (unsigned i = 0; i < 40; i++)
            CHECK(aside[i] != victim && pc__policy_restore(&policy, aside[i]));
        CHECK(policy.n == 99 - round);
    }
    unsigned n = 0;
    while (pc__policy_victim(&policy))
        n++;
    CHECK(n == 70);
    pc__policy_close(&policy);
}

static void test_ghost(int unused)
{
    (void)unused;
    struct pc__ghost ghost;
    OK(pc__ghost_open(&ghost, 1024));
    ghost.clock = UINT32_MAX - 10; /* it goes round */
    pc__ghost_put(&ghost, mixed(1), 0xf0, 5);
    pc__ghost_put(&ghost, mixed(2), 0x0f, 20);
    CHECK(pc__ghost_take(&ghost, mixed(1), 0x18, 20) == 0); /* 20 ago is not less than 20 */
    CHECK(pc__ghost_take(&ghost, mixed(1), 0x30, 21) == 0x20); /* 0x10 was taken out */
    CHECK(pc__ghost_take(&ghost, mixed(1), 0x30, 21) == 0);
    CHECK(pc__ghost_take(&ghost, mixed(2), 0xff, 1) == 0x0f);
    CHECK(pc__ghost_take(&ghost, mixed(3), 0xff, 1000) == 0);
    for (uint64_t i = 10; i < 5000; i++)
        pc__ghost_put(&ghost, mixed(i), 1, 1);
    unsigned found = 0;
    for (uint64_t i = 4990; i < 5000; i++)
        found += pc__ghost_take(&ghost, mixed(i), 1, 5000);
    CHECK(found == 10); /* the last are there: the oldest of a set give way */
    pc__ghost_close(&ghost);
}

int main(void)
{
    int failed = 0;
    for (int kind = 0; kind <= PC_POLICY_RANDOM; kind++) {
        CHECK(pc__policy_name(kind));
        if (kind != PC_POLICY_RANDOM)
            failed += run_test("model", test_model, kind, 60);
        failed += run_test("back", test_back, kind, 60);
        failed += run_test("restore", test_restore, kind, 60);
    }
    struct pc__policy policy;
    CHECK(!pc__policy_name(PC_POLICY_RANDOM + 1) && !pc__policy_name(-1));
    CHECK(pc__policy_open(&policy, PC_POLICY_RANDOM + 1) == PC_ERR_RANGE);
    failed += run_test("loop", test_loop, 0, 60);
    failed += run_test("scans", test_scans, 0, 60);
    failed += run_test("ghost", test_ghost, 0, 60);
    return failed != 0;
}
