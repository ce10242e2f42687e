/* test_leave.c - a server whose node needs it no more ends: what counts as a need, and what its clients do
 * then. */
#include "tests/support/engine_main.h"
#include "tests/support/keepers.h"
#include "tests/support/leaks.h"

#define N_BLOCKS 64u
enum { HOME, LEAVER, N_SERVERS };

static const struct pc_run one = {7, 1};

struct world {
    struct process_counts counts;
    struct cluster *c;
    struct server *home, *leaver;
    pc_client *clients[N_SERVERS];
    struct pc_region_info info;
};

static struct world world_of(int trap)
{
    reattach_ns = 100 * SECOND;
    struct world w = {.counts = process_counts(), .c = cluster_start(N_SERVERS, "leave")};
    w.home = &w.c->servers[HOME];
    w.leaver = &w.c->servers[LEAVER];
    for (int i = 0; i < N_SERVERS; i++)
        w.clients[i] = attach(&w.c->servers[i], trap);
    w.info = build(w.c, w.home, w.clients[HOME], 1, (uint64_t)N_BLOCKS << 12, 0);
    return w;
}

static void world_end(struct world *w)
{
    clients_close(w->clients, N_SERVERS);
    cluster_end(w->c, &w->counts);
}

static int64_t in_use(const struct server *server)
{
    return pc_engine_in_use(server->engine, 0);
}

static void test_what_is_in_use(int trap)
{
    struct world w = world_of(trap);
    CHECK(in_use(w.leaver) == 0); /* a client that maps nothing is nobody's need */
    CHECK(in_use(w.home) == 1);
    CHECK(pc_engine_in_use(w.home->engine, 1) == 0); /* of its own node nothing */
    struct pc_mapping shared = map_at(w.clients[LEAVER], &w.info, 0, 0);
    CHECK(in_use(w.leaver) == 1);
    check_version(w.c, &shared, &w.info, 0);
    OK(pc_client_unmap(w.clients[LEAVER], shared.id));
    SOON(in_use(w.leaver) == 0);
    struct transaction t;
    CHECK(try_begin(w.c, w.leaver, w.clients[LEAVER], &w.info, 0, &t) == PC_OK);
    write_runs(&t, &one, 1);
    OK(try_stage(&t));
    CHECK(in_use(w.leaver) == 2); /* the private mapping, and the layer */
    CHECK(pc_engine_in_use(w.leaver->engine, 1) == 2);
    OK(try_pull(&t));
    CHECK(in_use(w.home) == 2 && pc_engine_in_use(w.home->engine, 1) == 0); /* another node's layer */
    CHECK(decide(&t) == 1);
    tell(&t);
    OK(pc_client_unmap(w.clients[LEAVER], t.m.id));
    SOON(in_use(w.leaver) == 0); /* what is retained for a rebuild is no need of this node */
    world_end(&w);
}

/* Its clients live on, and find the next server of the node. */
static void test_it_leaves_and_another_one_comes(int trap)
{
    struct world w = world_of(trap);
    check_at(w.c, w.clients[LEAVER], &w.info, 0);
    SOON(in_use(w.leaver) == 0);
    CHECK(pc_client_is_connected(w.clients[LEAVER]) == 1);
    CHECK(pc_engine_leave(server_let_go(w.c, LEAVER)) == 0);
    SOON(pc_client_is_connected(w.clients[LEAVER]) == 0);
    CHECK(pc_client_has_ended(w.clients[LEAVER]) == 0);
    struct pc_mapping none;
    CHECK(pc_client_map(w.clients[LEAVER], 1, 0, w.info.base_address, w.info.length_bytes, 0, SECOND,
                        &none) == PC_ERR_NO_SERVER);
    w.leaver->id = 0x2000u; /* it is not the same one */
    server_start(w.c, LEAVER, "leave", -1);
    SOON(pc_client_is_connected(w.clients[LEAVER]) == 1);
    check_at(w.c, w.clients[LEAVER], &w.info, 0);
    world_end(&w);
}

/* Somebody came at the last moment: it is a restart, and whoever maps reads on. */
static void test_a_lease_at_the_last_moment(int trap)
{
    struct keeper keeper = keeper_start("leave");
    struct world w = world_of(trap);
    int to_keeper = keeper_connect(&keeper);
    w.counts.descriptors++; /* that */
    pc_client_close(w.clients[LEAVER]);
    server_stop(w.c, LEAVER); /* which had none */
    server_start(w.c, LEAVER, "leave", to_keeper);
    w.clients[LEAVER] = attach(w.leaver, trap);
    struct pc_mapping mapping = map_at(w.clients[LEAVER], &w.info, 0, 0);
    check_version(w.c, &mapping, &w.info, 0);
    CHECK(pc_engine_leave(server_let_go(w.c, LEAVER)) == 1);
    close(to_keeper);
    to_keeper = keeper_connect(&keeper);
    server_start(w.c, LEAVER, "leave", to_keeper);
    check_version(w.c, &mapping, &w.info, 0);
    SOON(stats_of(w.leaver).mappings == 1); /* it attaches again */
    CHECK(in_use(w.leaver) >= 1); /* one more while others may come back, too */
    OK(pc_client_unmap(w.clients[LEAVER], mapping.id));
    world_end(&w);
    keeper_stop(&keeper);
    close(to_keeper);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(what_is_in_use),
        TEST(it_leaves_and_another_one_comes),
        TEST(a_lease_at_the_last_moment),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
