/* test_idle_mappings.c - mappings that nobody uses, kept for the next: they are had again without a
 * word, and are in nobody's way. Server 0 is the home. */
#include "tests/support/pair.h"

#define N_BLOCKS 64u
#define FOR_EVER (100 * SECOND) /* of a test; what ends before was ended by a message */

extern uint64_t pc__idle_ns; /* client.h, which has a struct pc__mapping that engine.h has not */

static struct pc_mapping idle_one(struct pair *w, pc_client *client, uint64_t version)
{
    struct pc_mapping m = map_at(client, &w->info, version, 0);
    check_version(w->c, &m, &w->info, version);
    OK(pc_client_unmap_later(client, m.id));
    CHECK(pc_client_unmap(client, m.id) == PC_ERR_NO_REGION);
    CHECK(pc_client_unmap_later(client, m.id) == PC_ERR_NO_REGION);
    CHECK(pc_client_reads_begin(client, m.id) == PC_ERR_NO_REGION);
    return m;
}

static uint64_t leases(struct pair *w)
{
    return stats_of(w->s1).mappings;
}

static void test_again(int trap)
{
    struct pair w = pair_of_three("again", trap, N_BLOCKS << 12);
    struct pc_mapping first = idle_one(&w, w.far, 0), again = map_at(w.far, &w.info, 0, 0);
    CHECK((again.id == first.id) == (trap != PC_TRAP_SIGSEGV));
    check_version(w.c, &again, &w.info, 0);
    OK(pc_client_unmap(w.far, again.id)); /* at once */
    SOON(leases(&w) == 0);
    /* Who wants another one ends it first. */
    first = idle_one(&w, w.far, 0);
    again = map_at(w.far, &w.info, 0, PC_MAP_EXACT_READS);
    CHECK(again.id != first.id && again.address == first.address);
    SOON(leases(&w) == 1);
    OK(pc_client_unmap_later(w.far, again.id));
    again = map_at(w.far, &w.info, 0, PC_MAP_PRIVATE);
    CHECK(again.address == first.address);
    SOON(leases(&w) == 1);
    OK(pc_client_unmap_later(w.far, again.id)); /* a private one never rests */
    SOON(leases(&w) == 0);
    pair_stop(&w);
}

static void test_ends_by_itself(int trap)
{
    pc__idle_ns = SECOND / 5;
    struct pair w = pair_of_three("ends", trap, N_BLOCKS << 12);
    uint64_t begun = now_ns();
    (void)idle_one(&w, w.far, 0);
    SOON(leases(&w) == 0);
    CHECK(trap == PC_TRAP_SIGSEGV || now_ns() - begun >= pc__idle_ns);
    pair_stop(&w);
}

/* Who asks for the next version has what rests at the old one ended: at once, not when it has rested.
 * (Whether it had it in time to move in there is a matter of how long the registry takes to answer.) */
static void test_next_version(int trap)
{
    pc__idle_ns = FOR_EVER;
    struct pair w = pair_of_three("next", trap, N_BLOCKS << 12);
    const struct pc_run changed = {5, 2};
    for (uint64_t v = 0; v < 5; v++) {
        (void)idle_one(&w, w.far, v);
        CHECK(commit(w.c, w.s0, w.home, &w.info, v, &changed, 1) == v + 1);
        struct pc_mapping m = map_at(w.other, &w.info, v + 1, 0);
        check_version(w.c, &m, &w.info, v + 1);
        SOON(leases(&w) == 1);
        OK(pc_client_unmap(w.other, m.id));
    }
    pair_stop(&w);
}

/* At the home: what rests does not keep the new version from becoming its memory. */
static void test_at_home(int trap)
{
    pc__idle_ns = FOR_EVER;
    struct pair w = pair_of_three("home", trap, N_BLOCKS << 12);
    const struct pc_run changed = {5, 2};
    pc_client *reader = attach(w.s0, trap);
    for (uint64_t v = 0; v < 5; v++) {
        (void)idle_one(&w, reader, v);
        CHECK(commit(w.c, w.s0, w.home, &w.info, v, &changed, 1) == v + 1);
        SOON(stats_of(w.s0).mappings == 0);
    }
    struct pc_mapping m = map_at(w.home, &w.info, 5, 0);
    check_version(w.c, &m, &w.info, 5);
    CHECK(stats_of(w.s0).forks == 0);
    pc_client_close(reader);
    pair_stop(&w);
}

static void test_retired(int trap)
{
    pc__idle_ns = FOR_EVER;
    struct pair w = pair_of_three("retired", trap, N_BLOCKS << 12);
    (void)idle_one(&w, w.far, 0);
    OK(pc_engine_retire(w.s1->engine, 1, 0));
    SOON(leases(&w) == 0);
    pair_stop(&w);
}

static void test_many(int trap)
{
    struct pair w = pair_of_three("many", trap, N_BLOCKS << 12);
    struct pc_region_info infos[100];
    for (uint64_t i = 0; i < 100; i++)
        infos[i] = build(w.c, w.s0, w.home, 100 + i, 4096, 0);
    for (int round = 0; round < 2; round++)
        for (uint64_t i = 0; i < 100; i++) {
            struct pc_mapping m = map_at(w.far, &infos[i], 0, 0);
            OK(pc_client_unmap_later(w.far, m.id));
            CHECK(leases(&w) <= 64); /* not as many as it has ever opened */
        }
    SOON(leases(&w) == 0);
    pair_stop(&w);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(int);
    } tests[] = {{"again", test_again},
                 {"ends_by_itself", test_ends_by_itself},
                 {"next_version", test_next_version},
                 {"at_home", test_at_home},
                 {"retired", test_retired},
                 {"many", test_many}};
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    const char *only = argc > 1 ? argv[1] : "";
    int failed = 0;
    for (size_t t = 0; t < 2; t++)
        for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++)
            if (strstr(tests[i].name, only))
                failed += run_test(tests[i].name, tests[i].run, traps[t], 60);
    return failed != 0;
}
