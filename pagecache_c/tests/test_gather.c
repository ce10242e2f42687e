/* test_gather.c - rows by number: against what each version has, over both traps; and what comes as
 * rows, what as blocks. Two servers in one process; server 0 is the home. */
#include "commit.h"

struct pair {
    struct cluster *c;
    struct server *s0, *s1;
    pc_client *home, *far;
    struct pc_region_info info;
};

static struct pair pair_start(const char *tag, int trap, uint64_t length)
{
    struct pair p = {.c = cluster_start(2, tag)};
    p.s0 = &p.c->servers[0];
    p.s1 = &p.c->servers[1];
    p.home = attach(p.s0, trap);
    p.far = attach(p.s1, trap);
    p.info = build(p.c, p.s0, p.home, 1, length, 0);
    return p;
}

static void pair_stop(struct pair *p)
{
    pc_client_close(p->far);
    pc_client_close(p->home);
    SOON(stats_of(p->s0).mappings == 0 && stats_of(p->s1).mappings == 0);
    cluster_stop(p->c);
}

static const struct pc_run some[] = {{3, 1}, {10, 20}, {100, 1}, {200, 56}};
static const struct pc_run others[] = {{0, 2}, {15, 1}, {99, 3}};
#define N(runs) (sizeof(runs) / sizeof(runs)[0])

static uint64_t random_state = 88172645463325252ull;
static uint64_t random_below(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

static uint64_t rows_in(const struct pc_region_info *info, const struct pc_rows *rows)
{
    return (info->length_bytes - rows->offset_bytes - rows->row_bytes) / rows->stride_bytes + 1;
}

/* What the version has, from the registry: all of it. */
static uint8_t *contents_of(struct cluster *c, const struct pc_region_info *info, uint64_t version)
{
    uint64_t n = info->length_bytes >> 12;
    uint64_t *owners = registry_owners(c->registry, info->region, version, n);
    uint64_t *all = malloc(info->length_bytes);
    for (uint64_t b = 0; b < n; b++)
        for (uint64_t w = 0; w < 512; w++) {
            uint64_t offset = (b << 12) + w * 8;
            all[offset / 8] = owners[b] ? written(info->region, owners[b], offset)
                                        : pattern(info->region, offset);
        }
    free(owners);
    return (uint8_t *)all;
}

static void check_rows(const uint8_t *all, const struct pc_rows *rows, const uint64_t *ids,
                       uint64_t n, const uint8_t *out)
{
    for (uint64_t i = 0; i < n; i++)
        if (memcmp(out + i * rows->row_bytes, all + rows->offset_bytes + ids[i] * rows->stride_bytes,
                   rows->row_bytes)) {
            fprintf(stderr, "row %llu, id %llu, of %llu bytes\n", (unsigned long long)i,
                    (unsigned long long)ids[i], (unsigned long long)rows->row_bytes);
            FAIL("wrong bytes");
        }
}

/* Random ids, some of them repeated. */
static void gather_random(pc_client *client, const struct pc_mapping *m,
                          const struct pc_region_info *info, const uint8_t *all,
                          const struct pc_rows *rows, uint64_t n)
{
    uint64_t *ids = malloc(n * sizeof *ids), most = rows_in(info, rows);
    uint8_t *out = malloc(n * rows->row_bytes);
    for (uint64_t i = 0; i < n; i++)
        ids[i] = i && random_below(4) == 0 ? ids[random_below(i)] : random_below(most);
    OK(pc_client_gather(client, m->id, rows, ids, n, out, WAIT));
    check_rows(all, rows, ids, n, out);
    free(ids);
    free(out);
}

/* Rows of all sizes, that cross blocks, with room between them, at the home and far from it. */
static void test_shapes(int trap)
{
    struct pair p = pair_start("shapes", trap, 4 * MIB);
    uint8_t *all = contents_of(p.c, &p.info, 0);
    static const struct pc_rows shapes[] = {
        {0, 1, 1}, {3, 8, 8}, {0, 256, 256}, {5, 100, 33}, {4000, 300, 256}, {0, 4097, 4095},
        {1, 4096, 4095}, {0, 4096, 4096}, {7, 5003, 5000}, {0, 10000, 2500}, {64, 16, 48},
        {100, 1, 4095}, {8, 70000, 65536}};
    for (size_t i = 0; i < N(shapes); i++) {
        struct pc_mapping far = map_at(p.far, &p.info, 0, 0), home = map_at(p.home, &p.info, 0, 0);
        struct pc_mapping own = map_at(p.far, &p.info, 0, PC_MAP_PRIVATE);
        for (uint64_t n = 1; n < 3000; n = n * 7 + 3) {
            gather_random(p.far, &far, &p.info, all, &shapes[i], n);
            gather_random(p.home, &home, &p.info, all, &shapes[i], n);
        }
        gather_random(p.far, &own, &p.info, all, &shapes[i], 100);
        OK(pc_client_unmap(p.far, far.id));
        OK(pc_client_unmap(p.far, own.id));
        OK(pc_client_unmap(p.home, home.id));
    }
    CHECK(stats_of(p.s0).rows_served > 0 && stats_of(p.s1).rows_fetched == stats_of(p.s0).rows_served);
    free(all);
    pair_stop(&p);
}

int main(int argc, char **argv)
{
    int failed = 0;
    static const int traps[] = {PC_TRAP_UFFD, PC_TRAP_SIGSEGV};
#define RUN(test, seconds)                                                                       \
    if (argc < 2 || !strcmp(argv[1], #test))                                                     \
    failed += run_test(#test, test_##test, trap, seconds)
    (void)some; (void)others;
    for (size_t i = 0; i < 2; i++) {
        int trap = traps[i];
        RUN(shapes, 60);
    }
    return failed != 0;
}
