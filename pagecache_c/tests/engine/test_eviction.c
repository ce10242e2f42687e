/* test_eviction.c - a node's cached blocks under a budget, over both traps: never too many, never
 * wrong, never stuck. Server 0 is the home; server 1 has the budget. */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "tests/support/length.h"
#include "tests/support/pair.h"

#include <sys/mman.h>

#define BUDGET (4 * MIB)
#define WORDS_AT_ONCE 4096u

static uint64_t most_cached; /* bytes, those in windows too */

/* The engines of this process share `told`: the home has no cached blocks, so its budget is idle. */
static struct pair budget_start(const char *tag, int trap, uint64_t budget, int policy, uint64_t length)
{
    told.cache_bytes = budget;
    told.cache_policy = policy;
    most_cached = budget + (trap == PC_TRAP_SIGSEGV ? 64 * (256u << 10) : 0);
    return pair_start(tag, trap, length);
}

static void check_word(const struct pc_mapping *m, uint64_t region, uint64_t offset)
{
    uint64_t found = at(m, offset);
    if (found == pattern(region, offset))
        return;
    fprintf(stderr, "offset %llu: %llx, should be %llx, again %llx\n", (unsigned long long)offset,
            (unsigned long long)found, (unsigned long long)pattern(region, offset),
            (unsigned long long)at(m, offset));
    FAIL("not the bytes that were put");
}

static void check_bytes(const struct pc_mapping *m, uint64_t region, uint64_t from, uint64_t to)
{
    for (uint64_t o = from; o < to; o += 8)
        check_word(m, region, o);
}

/* What is cached, looked at all the time by somebody who does nothing else. */
struct watcher {
    struct pair *w;
    pthread_t thread;
    _Atomic bool stop;
    uint64_t highest;
};

static void *watch(void *arg)
{
    struct watcher *watcher = arg;
    while (!watcher->stop) {
        uint64_t cached = stats_of(watcher->w->s1).cached_bytes;
        watcher->highest = cached > watcher->highest ? cached : watcher->highest;
        usleep(200); /* it is an observer */
    }
    return NULL;
}

static void watch_begin(struct watcher *watcher, struct pair *w)
{
    *watcher = (struct watcher){.w = w};
    CHECK(!pthread_create(&watcher->thread, NULL, watch, watcher));
}

static void watch_end(struct watcher *watcher)
{
    watcher->stop = true;
    pthread_join(watcher->thread, NULL);
    if (watcher->highest > most_cached) {
        fprintf(stderr, "%llu KiB were cached\n", (unsigned long long)watcher->highest >> 10);
        FAIL("over the budget");
    }
    CHECK(watcher->highest > 0);
}

/* ------------------------------------------------------------------- scans */

/* A variable of many times the budget, twice, in order. */
static void test_scan(int trap)
{
    const unsigned times = rounds_of(10, 20);
    struct pair w = budget_start("scan", trap, BUDGET, PC_POLICY_SIEVE, times * BUDGET);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    struct watcher watcher;
    watch_begin(&watcher, &w);
    for (int i = 0; i < 2; i++)
        check_bytes(&m, 1, 0, w.info.length_bytes);
    watch_end(&watcher);
    struct pc_engine_stats stats = stats_of(w.s1);
    CHECK(stats.evicted_blocks >= (2 * times - 8) * (BUDGET >> 12) - (most_cached >> 12));
    CHECK(stats.home_bytes == 0 && stats_of(w.s0).home_bytes == w.info.length_bytes);
    SOON(stats_of(w.s1).fetches_in_flight == 0);
    SOON(stats_of(w.s1).cached_bytes <= most_cached - BUDGET / 128); /* the high mark, at rest */
    CHECK(stats_of(w.s1).cached_bytes == region_of(w.s1, 1).present_blocks << 12);
    pair_stop(&w);
}

/* What went while a read set was taken is told, so that with it the set misses nothing. */
static void test_read_set(int trap)
{
    struct pair w = budget_start("set", trap, BUDGET, PC_POLICY_SIEVE, 8 * BUDGET);
    struct pc_mapping m = map_at(w.far, &w.info, 0, PC_MAP_EXACT_READS);
    static struct pc_run runs[8 * BUDGET >> 12];
    const size_t most = sizeof runs / sizeof runs[0];
    const uint64_t n_blocks = w.info.length_bytes >> 12, half = n_blocks / 2;
    static bool is_in[8 * BUDGET >> 12];
    /* Who began nothing is told the worst. */
    CHECK(pc_client_evicted(w.far, m.id, runs, most, WAIT) == 1);
    CHECK(runs[0].first_block == 0 && runs[0].n_blocks == n_blocks);
    OK(pc_client_evicted_begin(w.far, m.id, WAIT));
    OK(pc_client_reads_begin(w.far, m.id));
    CHECK(pc_client_evicted(w.far, m.id, runs, most, WAIT) == 0);
    check_bytes(&m, 1, 0, half << 12);
    int64_t n = pc_client_reads_end(w.far, m.id, runs, most), alone = 0;
    for (int both = 0; both < 2; both++) {
        CHECK(n > 0 && (size_t)n <= most);
        for (int64_t i = 0; i < n; i++)
            for (uint64_t j = 0; j < runs[i].n_blocks; j++)
                is_in[runs[i].first_block + j] = true;
        if (!both)
            for (uint64_t block = 0; block < half; block++)
                alone += is_in[block];
        if (!both)
            n = pc_client_evicted(w.far, m.id, runs, most, WAIT);
    }
    CHECK((uint64_t)alone < half); /* or this test shows nothing */
    for (uint64_t block = 0; block < half; block++)
        if (!is_in[block])
            FAIL("a block was touched and is not told of");
    uint64_t more = 0;
    for (uint64_t block = half; block < n_blocks; block++)
        more += is_in[block];
    CHECK(more < half / 2); /* what was read ahead, and has gone */
    OK(pc_client_evicted_end(w.far, m.id));
    OK(pc_client_evicted_begin(w.far, m.id, WAIT));
    CHECK(pc_client_evicted(w.far, m.id, runs, most, WAIT) == 0);
    OK(pc_client_unmap(w.far, m.id)); /* ends it, too */
    pair_stop(&w);
}

/* ------------------------------------------------------- threads and clients */

struct reader {
    const struct pc_mapping *m;
    uint64_t length;
    unsigned seed;
    bool in_order;
    unsigned rounds;
};

static void *read_words(void *arg)
{
    struct reader *r = arg;
    uint64_t at_byte = (uint64_t)rand_r(&r->seed) % (r->length / 4096) * 4096;
    for (unsigned i = 0; i < r->rounds; i++) {
        if (r->in_order)
            at_byte = (at_byte + 4096) % r->length;
        else
            at_byte = (uint64_t)rand_r(&r->seed) % (r->length / 4096) * 4096;
        check_bytes(r->m, 1, at_byte, at_byte + 4096);
    }
    return NULL;
}

/* Clients and threads that read in order and at random, each word looked at. */
static void crowd(struct pair *w, unsigned rounds, unsigned n_clients)
{
    enum { MOST = 3, THREADS = 4 };
    pc_client *clients[MOST];
    struct pc_mapping maps[MOST];
    pthread_t threads[MOST][THREADS];
    struct reader readers[MOST][THREADS];
    for (unsigned i = 0; i < n_clients; i++) {
        clients[i] = i ? attach(w->s1, w->trap) : w->far;
        /* One address space: only one of them can have the region's own address. */
        OK(pc_client_map(clients[i], 1, 0, w->info.base_address, w->info.length_bytes,
                         i == 1 ? PC_MAP_PRIVATE : 0, WAIT, &maps[i]));
        for (unsigned t = 0; t < THREADS; t++) {
            readers[i][t] = (struct reader){&maps[i], w->info.length_bytes, i * 10 + t, t == 0,
                                            rounds};
            CHECK(!pthread_create(&threads[i][t], NULL, read_words, &readers[i][t]));
        }
    }
    for (unsigned i = 0; i < n_clients; i++)
        for (unsigned t = 0; t < THREADS; t++)
            pthread_join(threads[i][t], NULL);
    for (unsigned i = 0; i < n_clients; i++) {
        OK(pc_client_unmap(clients[i], maps[i].id));
        if (i)
            pc_client_close(clients[i]);
    }
}

static void test_crowd(int argument)
{
    int trap = argument / 10, policy = argument % 10;
    struct pair w = budget_start("crowd", trap, BUDGET, policy, 32 * MIB);
    most_cached += trap == PC_TRAP_SIGSEGV ? 2 * 64 * (256u << 10) : 0; /* of the other clients */
    struct watcher watcher;
    watch_begin(&watcher, &w);
    crowd(&w, rounds_of(hunts_races() ? 150 : 500, 1500), 3);
    watch_end(&watcher);
    CHECK(stats_of(w.s1).evicted_blocks > 0);
    pair_stop(&w);
}

/* Blocks go all the time beside threads that open and close windows over the very same blocks: what
 * one reads is never a hole. A region that just does not fit, so that nearly all is there. */
static void test_windows(int trap)
{
    struct pair w = budget_start("windows", trap, MIB, PC_POLICY_RANDOM, 24 * MIB);
    most_cached += trap == PC_TRAP_SIGSEGV ? 2 * 64 * (256u << 10) : 0;
    struct watcher watcher;
    watch_begin(&watcher, &w);
    crowd(&w, rounds_of(hunts_races() ? 400 : 1200, 4000), 3);
    watch_end(&watcher);
    pair_stop(&w);
}

/* The budget is far below what the threads touch at once: slow, never stuck. */
static void test_least_budget(int trap)
{
    struct pair w = budget_start("least", trap, MIB, PC_POLICY_LRU, 16 * MIB);
    crowd(&w, 400, 2);
    pair_stop(&w);
}

/* --------------------------------------------------------------- prefetches */

static void test_prefetch_over_budget(int trap)
{
    struct pair w = budget_start("prefetch", trap, BUDGET, PC_POLICY_SIEVE, 8 * BUDGET);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    struct watcher watcher;
    watch_begin(&watcher, &w);
    struct pc_run all = {0, w.info.length_bytes >> 12};
    OK(pc_client_prefetch(w.far, m.id, &all, 1, 1, 20 * 30 * SECOND));
    CHECK(stats_of(w.s1).prefetched_blocks == all.n_blocks);
    OK(pc_client_prefetch(w.far, m.id, &all, 1, 1, 20 * 30 * SECOND));
    watch_end(&watcher);
    check_bytes(&m, 1, 0, w.info.length_bytes);
    pair_stop(&w);
}

/* What read sets show to be in use stays, though more came since than fits. */
static void test_reads_count(int trap)
{
    struct pair w = budget_start("reads", trap, BUDGET, PC_POLICY_SIEVE, 16 * BUDGET);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    struct pc_run hot = {0, (BUDGET >> 12) / 4};
    OK(pc_client_prefetch(w.far, m.id, &hot, 1, 1, 30 * SECOND));
    for (uint64_t at_block = hot.n_blocks; at_block < w.info.length_bytes >> 12; at_block += 128) {
        /* The first report is of the access that they were brought for. */
        OK(pc_client_report_reads(w.far, m.id, &hot, 1));
        OK(pc_client_report_reads(w.far, m.id, &hot, 1));
        struct pc_run next = {at_block, 128};
        OK(pc_client_prefetch(w.far, m.id, &next, 1, 1, 30 * SECOND));
    }
    uint64_t before = stats_of(w.s1).blocks_fetched;
    OK(pc_client_prefetch(w.far, m.id, &hot, 1, 1, 30 * SECOND));
    CHECK(stats_of(w.s1).blocks_fetched - before <= hot.n_blocks / 4);
    check_bytes(&m, 1, 0, hot.n_blocks << 12);
    pair_stop(&w);
}

/* The block at which a thread was stopped stays until it has run, whatever comes meanwhile. */
static void test_awaited_stay(int trap)
{
    struct pair w = budget_start("awaited", trap, MIB, PC_POLICY_FIFO, 16 * MIB);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    check_word(&m, 1, 5 * MIB);
    struct pc_run much = {0, 5 * MIB >> 12};
    OK(pc_client_prefetch(w.far, m.id, &much, 1, 1, WAIT));
    uint64_t faults = stats_of(w.s1).faults;
    CHECK(faults > 0);
    check_word(&m, 1, 5 * MIB);
    CHECK(stats_of(w.s1).faults == faults);
    /* Not for ever: there is only so much of them. */
    for (uint64_t i = 0; i < 200; i++)
        check_word(&m, 1, 6 * MIB + i * 977 % 2500 * 4096);
    OK(pc_client_prefetch(w.far, m.id, &much, 1, 1, WAIT));
    faults = stats_of(w.s1).faults;
    check_word(&m, 1, 5 * MIB);
    CHECK(stats_of(w.s1).faults > faults);
    pair_stop(&w);
}

static void nobody_hears(struct pc_engine *engine, struct pc__generation *generation)
{
    (void)engine;
    (void)generation;
}

/* What a window holds is known also of a process that lost its connection, as long as it lives. */
static void test_orphans(int trap)
{
    (void)trap;
    struct pc__generation *g = pc__generation_new(1024, false);
    fflush(NULL);
    pid_t gone = fork();
    if (!gone)
        _exit(0);
    waitpid(gone, NULL, 0);
    struct pc__window_owner *owners[2];
    struct pc__window_user *users[2];
    for (int i = 0; i < 2; i++) {
        void *page = mmap(NULL, sizeof(struct pc__control_page), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        owners[i] = pc__windows_owner(page, 1 + (uint64_t)i, (struct pc__process){.pid = i ? gone : getpid()});
        users[i] = pc__windows_add(g, owners[i], 1ull << 40, 1024 << 12);
        owners[i]->page->window[5].address = (1ull << 40) + (3 + 8 * (uint64_t)i) * 4096;
        owners[i]->page->window[5].n_bytes = 2 * 4096;
    }
    CHECK(pc__windows_hold(g, 0) == (0x18u | 0x1800u) && pc__windows_hold(g, 1) == 0);
    CHECK(owners[0]->page->evicting == 2);
    pc__windows_release(g);
    CHECK(owners[0]->page->evicting == 0);
    CHECK(!pc__windows_orphaned(g));
    for (int i = 0; i < 2; i++) {
        pc__windows_owner_put(owners[i]); /* as when the client's record goes */
        pc__windows_left(users[i]);
    }
    CHECK(pc__windows_orphaned(g) && pc__windows_hold(g, 0) == 0x18);
    pc__windows_release(g);
    /* It has nothing open, and may open something without a word: until it attaches again, */
    owners[0]->page->window[5].address = (1ull << 40) + 2048 * 4096;
    CHECK(pc__windows_orphaned(g) && pc__windows_hold(g, 0) == 0);
    CHECK(owners[0]->page->evicting == 1);
    pc__windows_release(g);
    struct pc__window_owner *again = pc__windows_owner(
        mmap(NULL, sizeof(struct pc__control_page), PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_ANONYMOUS, -1, 0), 1, (struct pc__process){.pid = getpid()});
    CHECK(again->page != MAP_FAILED);
    struct pc__window_user *other = pc__windows_add(g, again, 1ull << 41, 1024 << 12);
    CHECK(pc__windows_orphaned(g)); /* elsewhere */
    struct pc__window_user *same = pc__windows_add(g, again, 1ull << 40, 1024 << 12);
    CHECK(!pc__windows_orphaned(g));
    pc__windows_drop(other);
    /* or says that it is over. */
    pc__windows_left(same);
    CHECK(pc__windows_orphaned(g));
    again->page->over = 1;
    CHECK(!pc__windows_orphaned(g) && pc__link_empty(&g->windows));
    pc__windows_owner_put(again);
    /* Two of foreign namespaces, which have no pid here, at one address: none is the other. */
    for (int i = 0; i < 2; i++) {
        void *page = mmap(NULL, sizeof(struct pc__control_page), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED);
        owners[i] = pc__windows_owner(page, 8 + (uint64_t)i, (struct pc__process){0});
        users[i] = pc__windows_add(g, owners[i], 1ull << 40, 1024 << 12);
        pc__windows_left(users[i]);
    }
    owners[0]->page->window[5].address = (1ull << 40) + 3 * 4096;
    owners[0]->page->window[5].n_bytes = 2 * 4096;
    CHECK(pc__windows_hold(g, 0) == 0x18);
    pc__windows_release(g);
    pc__windows_unmapped(g, 9, 1ull << 40);
    CHECK(pc__windows_orphaned(g) && pc__windows_hold(g, 0) == 0x18);
    pc__windows_release(g);
    /* What it opens by itself a while later counts too. */
    owners[0]->page->window[5].address = 0;
    CHECK(pc__windows_orphaned(g) && pc__windows_hold(g, 0) == 0);
    pc__windows_release(g);
    owners[0]->page->window[5].address = (1ull << 40) + 3 * 4096;
    CHECK(pc__windows_hold(g, 0) == 0x18);
    pc__windows_release(g);
    pc__windows_unmapped(g, 8, 1ull << 40);
    CHECK(!pc__windows_orphaned(g) && pc__link_empty(&g->windows));
    for (int i = 0; i < 2; i++)
        pc__windows_owner_put(owners[i]);
    struct pc_engine none = {.uffd = -1, .observers = {.generation_ended = nobody_hears}};
    pc__generation_put(&none, g);
}

/* ---------------------------------------------------------------- versions */

struct scanner {
    struct pair *w;
    _Atomic bool stop;
    _Atomic unsigned rounds;
};

static void *read_versions(void *arg)
{
    struct scanner *scanner = arg;
    struct pair *w = scanner->w;
    pc_client *client = attach(w->s1, w->trap);
    while (!scanner->stop) {
        registry_lock(w->c->registry);
        uint64_t latest = 0;
        for (size_t i = 0; i < w->c->registry->n_commits; i++)
            if (w->c->registry->log[i].version > latest)
                latest = w->c->registry->log[i].version;
        registry_unlock(w->c->registry);
        uint64_t version = scanner->rounds % 2 && latest ? latest - 1 : latest;
        struct pc_mapping m;
        int rc = try_map(client, &w->info, version, 0, &m);
        OK(rc);
        check_version(w->c, &m, &w->info, version);
        OK(pc_client_unmap(client, m.id));
        scanner->rounds++;
    }
    pc_client_close(client);
    return NULL;
}

/* Generations advance and fork while their blocks go; the home keeps all of its own. */
static void test_commits(int trap)
{
    struct pair w = budget_start("commits", trap, MIB, PC_POLICY_SIEVE, 6 * MIB);
    struct pc_mapping old = map_at(w.far, &w.info, 0, 0);
    struct scanner scanner = {.w = &w};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, read_versions, &scanner));
    unsigned seed = 5;
    for (uint64_t v = 0; v < 12; v++) {
        struct pc_run runs[8];
        for (uint64_t i = 0; i < 8; i++)
            runs[i] = (struct pc_run){i * 192 + (uint64_t)rand_r(&seed) % 100,
                                      1 + (uint64_t)rand_r(&seed) % 90};
        CHECK(commit(w.c, w.s0, w.home, &w.info, v, runs, 8) == v + 1);
        check_version(w.c, &old, &w.info, 0);
        unsigned rounds = scanner.rounds;
        SOON_IN(scanner.rounds > rounds, 20);
    }
    scanner.stop = true;
    pthread_join(thread, NULL);
    CHECK(stats_of(w.s1).evicted_blocks > 0 && stats_of(w.s1).forks > 0);
    OK(pc_client_unmap(w.far, old.id));
    check_at(w.c, w.home, &w.info, 12);
    check_at(w.c, w.far, &w.info, 12);
    SOON(stats_of(w.s0).layers == 0);
    CHECK(stats_of(w.s0).home_bytes == w.info.length_bytes);
    pair_stop(&w);
}

/* A fork takes what its source still has, and the rest from the home. Here what it takes first pushes
 * out of the source what it was to take last. */
static void test_fork_of_evicted(int trap)
{
    struct pair w = budget_start("fork", trap, MIB, PC_POLICY_FIFO, 8 * MIB);
    struct pc_mapping old = map_at(w.far, &w.info, 0, 0);
    static const struct pc_run some[] = {{40, 40}, {1700, 3}};
    struct pc_run all = {0, 208};
    for (uint64_t at_block = all.n_blocks; at_block > 0; at_block -= 16) {
        struct pc_run chunk = {at_block - 16, 16}; /* the last is the oldest */
        OK(pc_client_prefetch(w.far, old.id, &chunk, 1, 1, WAIT));
    }
    CHECK(commit(w.c, w.s0, w.home, &w.info, 0, some, 2) == 1);
    struct pc_mapping fresh = map_at(w.far, &w.info, 1, 0);
    CHECK(stats_of(w.s1).forks == 1);
    uint64_t fetched = stats_of(w.s1).blocks_fetched, here = stats_of(w.s1).local_blocks;
    OK(pc_client_prefetch(w.far, fresh.id, &all, 1, 1, WAIT));
    fetched = stats_of(w.s1).blocks_fetched - fetched;
    here = stats_of(w.s1).local_blocks - here;
    CHECK(here > 0 && fetched >= 40 && here + fetched == all.n_blocks);
    for (int i = 0; i < 2; i++) {
        check_version(w.c, &fresh, &w.info, 1);
        check_version(w.c, &old, &w.info, 0);
    }
    pair_stop(&w);
}

/* ------------------------------------------------------------ ends of things */

static void test_regions_end(int trap)
{
    told.fault_timeout_ns = 300 * SECOND; /* what still comes is given up with its region, not then */
    struct pair w = budget_start("ends", trap, MIB, PC_POLICY_LRU, 2 * MIB);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    struct watcher watcher;
    watch_begin(&watcher, &w);
    for (uint64_t id = 2; id < 30; id++) {
        struct pc_region_info info = build(w.c, w.s0, w.home, id, 2 * MIB, 0);
        struct pc_mapping other = map_at(w.far, &info, 0, 0);
        struct pc_run all = {0, info.length_bytes >> 12};
        OK(pc_client_prefetch(w.far, other.id, &all, 1, 0, WAIT)); /* still coming, when */
        check_bytes(&other, id, 0, MIB / 4);
        OK(pc_engine_retire(w.s1->engine, id, id % 2)); /* it goes */
        OK(pc_client_unmap(w.far, other.id));
        OK(pc_engine_retire(w.s0->engine, id, 1));
        check_bytes(&m, 1, 0, MIB / 2);
    }
    watch_end(&watcher);
    OK(pc_client_unmap(w.far, m.id));
    OK(pc_engine_retire(w.s1->engine, 1, 1));
    SOON(stats_of(w.s1).regions == 0 && stats_of(w.s1).cached_bytes == 0);
    pair_stop(&w);
}

/* What nobody leases any more goes before what is in use. */
static void test_unleased_go_first(int trap)
{
    struct pair w = budget_start("unleased", trap, BUDGET, PC_POLICY_LRU, BUDGET / 2);
    struct pc_region_info info = build(w.c, w.s0, w.home, 2, 8 * MIB, 0);
    struct pc_mapping used = map_at(w.far, &info, 0, 0), left = map_at(w.far, &w.info, 0, 0);
    struct pc_run first = {0, BUDGET / 4 >> 12}, whole = {0, w.info.length_bytes >> 12};
    OK(pc_client_prefetch(w.far, used.id, &first, 1, 1, WAIT));
    OK(pc_client_prefetch(w.far, left.id, &whole, 1, 1, WAIT));
    OK(pc_client_unmap(w.far, left.id));
    usleep(1200000); /* unleased for so long that it is left */
    struct pc_run more = {BUDGET / 2 >> 12, BUDGET / 2 >> 12};
    OK(pc_client_prefetch(w.far, used.id, &more, 1, 1, WAIT));
    uint64_t fetched = stats_of(w.s1).blocks_fetched;
    OK(pc_client_prefetch(w.far, used.id, &first, 1, 1, WAIT)); /* the oldest, and all there */
    CHECK(stats_of(w.s1).blocks_fetched == fetched);
    check_bytes(&used, 2, 0, BUDGET / 4);
    CHECK(region_of(w.s1, 1).present_blocks < w.info.length_bytes >> 12);
    pair_stop(&w);
}

/* ------------------------------------------------------------ thrash, refusal */

static void test_thrash_is_told_once(int trap)
{
    struct pair w = budget_start("thrash", trap, MIB, PC_POLICY_FIFO, 3 * MIB / 2);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    struct pc_run all = {0, w.info.length_bytes >> 12};
    SOON_IN((pc_client_prefetch(w.far, m.id, &all, 1, 1, WAIT), w.s1->thrashing_events), 20);
    for (uint64_t until = now_ns() + 4 * SECOND; now_ns() < until;) /* past another period */
        OK(pc_client_prefetch(w.far, m.id, &all, 1, 1, WAIT));
    CHECK(w.s1->thrashing_events == 1 && w.s0->thrashing_events == 0);
    struct pc_engine_stats stats = stats_of(w.s1);
    CHECK(stats.refetched_blocks > 0 && stats.refetched_blocks <= stats.evicted_blocks);
    pair_stop(&w);
}

/* A scan of what does not fit by far is none: nothing is fetched again soon after it went. */
static void test_scan_is_no_thrash(int trap)
{
    struct pair w = budget_start("nothrash", trap, MIB, PC_POLICY_FIFO, 4 * MIB);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    struct pc_run all = {0, w.info.length_bytes >> 12};
    for (uint64_t until = now_ns() + 4 * SECOND; now_ns() < until;)
        OK(pc_client_prefetch(w.far, m.id, &all, 1, 1, WAIT));
    CHECK(w.s1->thrashing_events == 0);
    CHECK(stats_of(w.s1).refetched_blocks * 10 < stats_of(w.s1).evicted_blocks);
    pair_stop(&w);
}

/* What is read again and again, and fits, is fetched once, under whatever policy. */
static void test_scan_that_fits(int policy)
{
    const uint64_t budget = 16 * MIB, length = budget * 98 / 100 / 4096 * 4096;
    struct pair w = budget_start("fits", PC_TRAP_UFFD, budget, policy, length);
    struct pc_mapping m = map_at(w.far, &w.info, 0, 0);
    for (int i = 0; i < 6; i++) {
        check_bytes(&m, 1, 0, length);
        usleep(100000); /* the evictor may have something to do */
    }
    struct pc_engine_stats stats = stats_of(w.s1);
    CHECK(stats.blocks_fetched >= length >> 12);
    CHECK(stats.blocks_fetched - (length >> 12) <= (length >> 12) / 20);
    pair_stop(&w);
}

/* Once the worker has done what it has to do: it takes and gives room of homes in its own time. */
static uint64_t settled_home_bytes(struct server *server)
{
    uint64_t seen = stats_of(server).home_bytes;
    for (int still = 0; still < 10; still++) {
        usleep(50000);
        uint64_t now = stats_of(server).home_bytes;
        still = now == seen ? still : -1;
        seen = now;
    }
    return seen;
}

/* Reading what was never written, at the home: through the trap where there is much of it, so that the
 * budget bounds it; as it is where there is little, and then it is counted and given back. */
static void test_holes_of_a_home(int trap)
{
    struct pair w = budget_start("holes", trap, BUDGET, PC_POLICY_SIEVE, MIB);
    const uint64_t data = 2 * MIB, many = 64 * MIB, few = data + BUDGET / 4;
    struct pc_region_info sparse = build(w.c, w.s0, w.home, 2, many, many - data);
    struct pc_region_info dense = build(w.c, w.s0, w.home, 3, few, few - data);
    const uint64_t at_first = MIB + 2 * data;
    CHECK(stats_of(w.s0).home_bytes == at_first);
    uint64_t before = memfd_bytes();
    struct pc_mapping m = map_at(w.home, &sparse, 0, 0);
    for (int i = 0; i < 2; i++)
        for (uint64_t o = 0; o < many; o += 512)
            CHECK(at(&m, o) == (o < many - data ? 0 : pattern(2, o)));
    SOON(memfd_bytes() <= before + most_cached + MIB);
    CHECK(stats_of(w.s0).home_bytes == at_first && stats_of(w.s0).cached_bytes > 0);
    CHECK(stats_of(w.s0).evicted_blocks > 0 || trap == PC_TRAP_SIGSEGV);
    /* It is changed like any other, also in its holes. */
    const struct pc_run runs[] = {{5, 3}, {(many - data) >> 12, 2}};
    CHECK(commit(w.c, w.s0, w.home, &sparse, 0, runs, 2) == 1);
    struct pc_mapping m1 = map_at(w.home, &sparse, 1, 0);
    CHECK(at(&m, 5 << 12) == 0 && at(&m1, 4 << 12) == 0);
    CHECK(at(&m1, 5 << 12) == written(2, w.c->registry->log[0].id, 5 << 12));
    CHECK(at(&m1, many - 4096) == pattern(2, many - 4096));
    OK(pc_client_unmap(w.home, m1.id));
    OK(pc_client_unmap(w.home, m.id));
    uint64_t home_bytes = settled_home_bytes(w.s0), faults = stats_of(w.s0).faults;
    m = map_at(w.home, &dense, 0, 0);
    for (uint64_t o = 0; o < few; o += 512)
        CHECK(at(&m, o) == (o < few - data ? 0 : pattern(3, o)));
    CHECK(stats_of(w.s0).faults == faults);
    CHECK(stats_of(w.s0).home_bytes == home_bytes + BUDGET / 4);
    OK(pc_client_unmap(w.home, m.id));
    SOON(stats_of(w.s0).home_bytes <= home_bytes);
    pair_stop(&w);
}

static int try_start(uint64_t cache_bytes, int policy)
{
    struct pc_engine_options options = told;
    options.socket_name = "clamor-test-refused";
    options.library_version = "test";
    options.server_id = 7;
    options.keeper_fd = -1;
    options.cache_bytes = cache_bytes;
    options.cache_policy = policy;
    pc_engine *engine = NULL;
    int rc = pc_engine_start(&options, &engine);
    CHECK(!rc == (engine != NULL));
    if (engine)
        OK(pc_engine_stop(engine));
    return rc;
}

static void test_refused(int trap)
{
    (void)trap;
    CHECK(try_start(MIB - 4096, 0) == PC_ERR_RANGE && strstr(pc_last_message(), "1048576"));
    CHECK(try_start(1ull << 60, 0) == PC_ERR_RANGE && strstr(pc_last_message(), "memory"));
    CHECK(try_start(MIB, 7) == PC_ERR_RANGE && try_start(MIB, -1) == PC_ERR_RANGE);
    for (int policy = 0; policy <= PC_POLICY_RANDOM; policy++)
        CHECK(try_start(MIB, policy) == PC_OK);
    CHECK(try_start(0, 0) == PC_OK);
}

/* --------------------------------------------------------------- a restart */

/* What the keeper held is accounted, and goes like the rest once clients had time to attach. */
static void test_restart(int trap)
{
    char name[64];
    snprintf(name, sizeof name, "clamor-test-evict-keeper-%d", (int)getpid());
    pid_t watched = getpid(), keeper = fork();
    if (!keeper)
        _exit(pc_keeper_run(name, watched, 60 * SECOND) ? 1 : 0);
    told.cache_bytes = BUDGET;
    told.settle_ns = SECOND / 2;
    struct cluster *c = cluster_new(2);
    int to_keeper = -1;
    OK(pc_keeper_connect(name, 30 * SECOND, &to_keeper));
    server_start(c, 0, "evict", -1);
    server_start(c, 1, "evict", to_keeper);
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    struct pc_region_info info = build(c, &c->servers[0], home, 1, 8 * BUDGET, 0);
    struct pc_mapping m = map_at(far, &info, 0, 0);
    check_bytes(&m, 1, 0, BUDGET / 2);
    SOON(stats_of(&c->servers[1]).fetches_in_flight == 0);
    uint64_t cached = stats_of(&c->servers[1]).cached_bytes;
    server_stop(c, 1);
    close(to_keeper);
    OK(pc_keeper_connect(name, 30 * SECOND, &to_keeper));
    server_start(c, 1, "evict", to_keeper);
    CHECK(cached > 0 && stats_of(&c->servers[1]).cached_bytes == cached);
    SOON(stats_of(&c->servers[1]).reattached == 1);
    SOON(!c->servers[1].engine->settle_until_ns); /* until then nothing adopted is evicted */
    check_bytes(&m, 1, 0, info.length_bytes);
    check_bytes(&m, 1, 0, BUDGET / 2);
    CHECK(stats_of(&c->servers[1]).evicted_blocks > (6 * BUDGET) >> 12);
    SOON(stats_of(&c->servers[1]).cached_bytes <= BUDGET + 64 * (256u << 10));
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
    OK(pc_keeper_quit(to_keeper));
    int status;
    waitpid(keeper, &status, 0);
    CHECK(status == 0);
    close(to_keeper);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(int);
    } tests[] = {{"scan", test_scan},
                 {"read_set", test_read_set},
                 {"windows", test_windows},
                 {"least_budget", test_least_budget},
                 {"prefetch_over_budget", test_prefetch_over_budget},
                 {"commits", test_commits},
                 {"fork_of_evicted", test_fork_of_evicted},
                 {"regions_end", test_regions_end},
                 {"holes_of_a_home", test_holes_of_a_home},
                 {"unleased_go_first", test_unleased_go_first},
                 {"restart", test_restart}};
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    const char *only = argc > 1 ? argv[1] : "";
    int failed = 0;
    for (size_t t = 0; t < 2; t++) {
        for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
            if (strstr(tests[i].name, only))
                failed += run_test(tests[i].name, tests[i].run, traps[t], 100);
        for (int policy = 0; policy <= PC_POLICY_RANDOM && strstr("crowd", only); policy++)
            failed += run_test("crowd", test_crowd, traps[t] * 10 + policy, 100);
    }
    if (strstr("reads_count", only)) /* a SIGSEGV process has all of it in its window */
        failed += run_test("reads_count", test_reads_count, PC_TRAP_UFFD, 60);
    if (strstr("awaited_stay", only)) /* likewise */
        failed += run_test("awaited_stay", test_awaited_stay, PC_TRAP_UFFD, 60);
    if (strstr("orphans", only))
        failed += run_test("orphans", test_orphans, 0, 60);
    if (strstr("thrash_is_told_once", only))
        failed += run_test("thrash_is_told_once", test_thrash_is_told_once, PC_TRAP_UFFD, 60);
    if (strstr("scan_is_no_thrash", only))
        failed += run_test("scan_is_no_thrash", test_scan_is_no_thrash, PC_TRAP_UFFD, 60);
    for (int policy = 0; policy <= PC_POLICY_RANDOM && strstr("scan_that_fits", only); policy++)
        failed += run_test("scan_that_fits", test_scan_that_fits, policy, 60);
    if (strstr("refused", only))
        failed += run_test("refused", test_refused, 0, 60);
    return failed != 0;
}
