/* test_gather_loops.c - processes of two loops gather the same blocks at once: what one loop fetches
 * ends the parts of the other's client. */
#include "tests/support/commit.h"

#include <sys/mman.h>

#define ASKERS 4

struct shared { /* with the processes that ask, which are begun before there are threads */
    char server_name[sizeof((struct server){0}.name)]; /* no more of its record: its thread counts in that */
    struct pc_region_info info;
    _Atomic bool built, go;
    _Atomic int ready;
};

static void ask_for_all(struct shared *s, int trap)
{
    const struct pc_rows rows = {0, 2048, 2048}; /* two of each block, so it comes as a block */
    uint64_t ids[512], *out = malloc(MIB);
    for (uint64_t i = 0; i < 512; i++)
        ids[i] = i;
    SOON_IN(s->built, 20);
    struct server server = {0};
    memcpy(server.name, s->server_name, sizeof server.name);
    pc_client *client = attach(&server, trap);
    struct pc_mapping m = map_at(client, &s->info, 0, 0);
    s->ready++;
    SOON_IN(s->go, 20);
    OK(pc_client_gather(client, m.id, &rows, ids, 512, out, WAIT));
    for (uint64_t k = 0; k < MIB / 8; k++)
        CHECK(out[k] == pattern(1, k * 8));
    pc_client_close(client);
    _exit(0);
}

static void test_same_blocks(int trap)
{
    struct shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s != MAP_FAILED);
    pid_t askers[ASKERS];
    fflush(NULL);
    for (int i = 0; i < ASKERS; i++)
        if (!(askers[i] = fork()))
            ask_for_all(s, trap);
    struct cluster *c = cluster_start(2, "loops");
    pc_client *home = attach(&c->servers[0], trap);
    s->info = build(c, &c->servers[0], home, 1, MIB, 0);
    memcpy(s->server_name, c->servers[1].name, sizeof s->server_name);
    s->built = true;
    SOON_IN(s->ready == ASKERS, 20);
    pthread_mutex_lock(&c->serving); /* no connection to the home before all have asked */
    s->go = true;
    usleep(100000);
    pthread_mutex_unlock(&c->serving);
    for (int i = 0; i < ASKERS; i++) {
        int status;
        CHECK(waitpid(askers[i], &status, 0) == askers[i] && status == 0);
    }
    CHECK(stats_of(&c->servers[1]).blocks_fetched == 256); /* once for all */
    pc_client_close(home);
    cluster_stop(c);
    munmap(s, sizeof *s);
}

int main(int argc, char **argv)
{
    int failed = 0;
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < 2; i++)
            if (argc < 2 || !strcmp(argv[1], "same_blocks"))
                failed += run_test("same_blocks", test_same_blocks, traps[i], 60);
    return failed != 0;
}
