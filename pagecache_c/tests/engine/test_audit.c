/* test_audit.c - what must hold of the cache, the history, the leases and a client's mappings is looked at:
 * each is broken in one place at a time, and mended again.
 */
#include "tests/support/engine_main.h"
#include "tests/support/pair.h"

#include "client/client.h"
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/cache/cache.h"
#include "history/history_index.h"

#define LENGTH (1u << 20)

#define HOLDS(audit) CHECK(!(audit))
#define BROKEN(audit, text)                                                \
    do {                                                                   \
        const char *found_ = (audit);                                      \
        CHECK(found_ && strstr(found_, text));                             \
    } while (0)

/* The client of server 1 has read all of what server 0 is the home of. */
static struct pair read_pair(int trap, struct pc_mapping *m)
{
    told.cache_bytes = 64u << 20;
    struct pair p = pair_start("audit", trap, LENGTH);
    *m = map_at(p.far, &p.info, 0, 0);
    for (uint64_t offset = 0; offset < LENGTH; offset += PC_BLOCK_BYTES)
        CHECK(at(m, offset) == pattern(1, offset));
    return p;
}

static struct pc__generation *generation_of(pc_engine *engine, struct pc__region **region)
{
    CHECK((*region = pc__region_get(engine, 1)));
    return pc__of((*region)->generations.next, struct pc__generation, link);
}

static void test_cache(int trap)
{
    struct pc_mapping m;
    struct pair p = read_pair(trap, &m);
    pc_engine *engine = p.s1->engine;
    struct pc__region *region;
    struct pc__generation *generation = generation_of(engine, &region);
    HOLDS(pc__engine_audit(engine));

    pthread_mutex_lock(&region->lock);
    struct pc__blockset present = generation->present;
    CHECK(!pc__blockset_init(&generation->present, present.n_blocks));
    BROKEN(pc__cache_audit_generation(engine, generation), "counted as cached is present");
    pthread_mutex_unlock(&region->lock);
    BROKEN(pc__engine_audit(engine), "counted as cached is present");
    pthread_mutex_lock(&region->lock);
    pc__blockset_free(&generation->present);
    generation->present = present;
    pthread_mutex_unlock(&region->lock);

    struct pc__link *one = generation->cached.next;
    pc__link_remove(one);
    BROKEN(pc__cache_audit(engine), "in its generation's list");
    pc__link_push(&generation->cached, one);
    HOLDS(pc__engine_audit(engine));
    pc__region_put(engine, region);
    pair_stop(&p);
}

static void test_region(int trap)
{
    struct pc_mapping m;
    struct pair p = read_pair(trap, &m);
    pc_engine *engine = p.s1->engine;
    struct pc__region *region;
    (void)generation_of(engine, &region);
    pthread_mutex_lock(&region->lock);
    region->mappings++;
    pthread_mutex_unlock(&region->lock);
    BROKEN(pc__engine_audit(engine), "each mapping is of one generation");
    pthread_mutex_lock(&region->lock);
    region->mappings--;
    pthread_mutex_unlock(&region->lock);
    pc__region_put(engine, region);
    pair_stop(&p);
}

static void test_leases(int trap)
{
    struct pc_mapping m;
    struct pair p = read_pair(trap, &m);
    pc_engine *engine = p.s1->engine;
    int pair[2];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    struct pc__lessee *lessee = pc__lessee_join(engine, 77, pair[0]);
    CHECK(lessee);
    HOLDS(pc__leases_audit(engine));
    lessee->connections = 0;
    BROKEN(pc__engine_audit(engine), "goes with what it is kept for");
    lessee->connections = 1;
    struct pc__lease lease = {.serial = UINT64_MAX};
    pthread_mutex_lock(&engine->leases.lock);
    lessee->look_at_ns = UINT64_MAX; /* else the page server looks at a lease that is of no memory */
    pc__link_push(&lessee->orphans, &lease.link);
    pthread_mutex_unlock(&engine->leases.lock);
    BROKEN(pc__leases_audit(engine), "in the order");
    lease.serial = engine->leases.next_serial;
    CHECK(!lease.serial);
    lease.serial = engine->leases.next_serial = 1;
    lessee->attached_id = 1;
    BROKEN(pc__leases_audit(engine), "no orphans behind");
    lessee->attached_id = 0;
    BROKEN(pc__leases_audit(engine), "of some memory");
    pthread_mutex_lock(&engine->leases.lock);
    pc__link_remove(&lease.link);
    pthread_mutex_unlock(&engine->leases.lock);
    HOLDS(pc__engine_audit(engine));
    pc__lessee_leave(engine, lessee, false);
    close(pair[0]);
    close(pair[1]);
    pair_stop(&p);
}

static void test_history(int trap)
{
    (void)trap;
    static struct pc__history_index index;
    struct pc__history_segment segment = {0};
    const struct pc_run run = {.first_block = 3, .n_blocks = 2};
    struct pc__record *records[3];
    uint64_t n_dropped;
    int error = 0;
    OK(pc__index_retain(&index, 9, 2));
    for (uint64_t version = 1; version <= 3; version++) {
        struct pc__record *record = pc__record_new(9, version, &run, 1, &error);
        CHECK(record);
        OK(pc__index_push(&index, &segment, record, &n_dropped));
        records[version - 1] = record;
    }
    HOLDS(pc__index_audit(&index));
    records[1]->version = 4;
    BROKEN(pc__index_audit(&index), "consecutive");
    records[1]->version = 2;
    records[2]->is_retained = false;
    BROKEN(pc__index_audit(&index), "from the floor on");
    records[2]->is_retained = true;
    index.retained_blocks++;
    BROKEN(pc__index_audit(&index), "retained block is counted");
    index.retained_blocks--;
    index.n_records--;
    BROKEN(pc__index_audit(&index), "each record is counted");
    index.n_records++;
    HOLDS(pc__index_audit(&index));
    pc__index_free(&index);
}

static void test_mappings(int trap)
{
    struct pc_mapping m;
    struct pair p = read_pair(trap, &m);
    pc_client *client = p.far;
    pthread_mutex_lock(&client->lock);
    struct pc__mapping *mapping = pc__mapping_find(client, m.id);
    CHECK(mapping);
    HOLDS(pc__mappings_audit(client));
    mapping->id += 1024;
    BROKEN(pc__mappings_audit(client), "found by its id");
    mapping->id -= 1024;
    mapping->region++;
    BROKEN(pc__mappings_audit(client), "found by its region");
    mapping->region--;
    mapping->users = 0;
    BROKEN(pc__mappings_audit(client), "nobody uses");
    mapping->users = 1;
    client->n_idle++;
    BROKEN(pc__mappings_audit(client), "idle mapping is counted");
    client->n_idle--;
    HOLDS(pc__mappings_audit(client));
    pthread_mutex_unlock(&client->lock);
    pair_stop(&p);
}

/* In a build with asserts, which those of the tests are. */
static void break_a_region(int trap)
{
    struct pc_mapping m;
    struct pair p = read_pair(trap, &m);
    struct pc__region *region;
    (void)generation_of(p.s0->engine, &region);
    pthread_mutex_lock(&region->lock);
    region->mappings = 1000;
    PC__AUDIT(pc__region_audit(region));
    pthread_mutex_unlock(&region->lock);
}

static void test_what_is_broken_ends_the_process(int trap)
{
    int how;
    pid_t child = fork();
    if (!child) {
        break_a_region(trap);
        _exit(0);
    }
    CHECK(waitpid(child, &how, 0) == child);
    CHECK(WIFSIGNALED(how) && WTERMSIG(how) == SIGABRT);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {TEST(cache),   TEST(region),   TEST(leases),
                                               TEST(history), TEST(mappings),
                                               TEST(what_is_broken_ends_the_process)};
    const char *only = argc > 1 ? argv[1] : NULL;
    return run_over_traps(tests, sizeof tests / sizeof tests[0], only) != 0;
}
