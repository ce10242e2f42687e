/* test_seen.c - which blocks a process knows to be here without a question (client/seen.c). */
#include "tests/support/engine_main.h"
#include "tests/support/pair.h"

/* What a process knows to be here: the blocks of rows that did not have to come, or that it has
 * fetched, for as long as the samples find them. */
static void test_here(int trap)
{
    struct pair p = pair_start("here", trap, 4 * MIB);
    uint64_t out[16][256 / 8];
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0), own = map_at(p.far, &p.info, 0, PC_MAP_PRIVATE);
    const struct pc_rows rows = {128, 256, 256}; /* one in 16 lies on two blocks */
    const uint64_t n_rows = (p.info.length_bytes - 128) / 256;
    uint64_t ids[16];
    int64_t signed_ids[16];
    for (uint64_t i = 0; i < 16; i++) {
        ids[i] = 9 * 16 + i;
        signed_ids[i] = (int64_t)ids[i] - (i % 2 ? (int64_t)n_rows : 0); /* from the end */
    }
    CHECK(pc_client_rows_here(p.far, m.id, &rows, signed_ids, 16, n_rows) == 0);
    const struct pc_run blocks = {9, 1};
    OK(pc_client_prefetch(p.far, m.id, &blocks, 1, 1, WAIT));
    CHECK(pc_client_rows_here(p.far, m.id, &rows, signed_ids, 15, n_rows) == 1);
    CHECK(pc_client_rows_here(p.far, m.id, &rows, signed_ids, 16, n_rows) == 0); /* on block 10, too */
    CHECK(pc_client_absent(p.far, m.id) == 1023 && pc_client_absent(p.far, 77) == PC_ERR_NO_REGION);
    for (int i = 0; i < 40; i++)
        OK(pc_client_gather(p.far, m.id, &rows, ids, 16, out, WAIT)); /* until block 10 is worth it */
    for (uint64_t i = 0; i < 16; i++)
        CHECK(out[i][0] == pattern(1, 128 + ids[i] * 256));
    CHECK(pc_client_rows_here(p.far, m.id, &rows, signed_ids, 16, n_rows) == 1);
    CHECK(pc_client_rows_here(p.far, own.id, &rows, signed_ids, 16, n_rows) == 1); /* the same memory */
    const uint64_t far = (uint64_t)n_rows - 2;
    const int64_t touched = (int64_t)far;
    CHECK(pc_client_rows_here(p.far, m.id, &rows, &touched, 1, n_rows) == 0);
    CHECK(at(&m, 128 + far * 256) == pattern(1, 128 + far * 256)); /* by a fault */
    CHECK(pc_client_rows_here(p.far, m.id, &rows, &touched, 1, n_rows) == 1);
    struct pc_mapping whole = map_at(p.home, &p.info, 0, 0);
    CHECK(pc_client_absent(p.home, whole.id) == 0);
    CHECK(pc_client_rows_here(p.home, whole.id, &rows, signed_ids, 16, n_rows) == 1);
    const int64_t wrong[][1] = {{(int64_t)n_rows}, {-(int64_t)n_rows - 1}, {INT64_MAX}, {INT64_MIN}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK(pc_client_rows_here(p.far, m.id, &rows, wrong[i], 1, n_rows) == PC_ERR_RANGE);
    CHECK(pc_client_rows_here(p.far, m.id, &rows, signed_ids, 1, n_rows + 1) == PC_ERR_RANGE);
    CHECK(pc_client_rows_here(p.far, m.id, &(struct pc_rows){0, 0, 0}, signed_ids, 1, 1) ==
          PC_ERR_RANGE);
    CHECK(pc_client_rows_here(p.far, 77, &rows, signed_ids, 1, n_rows) == PC_ERR_NO_REGION);
    pair_stop(&p);
}

/* Once they are evicted, the samples say so. What a SIGSEGV process has open is not evicted. */
static void test_here_no_more(int trap)
{
    if (trap == PC_TRAP_SIGSEGV)
        return;
    told.cache_bytes = 1 * MIB;
    struct pair p = pair_start("no_more", trap, 16 * MIB);
    struct pc_mapping m = map_at(p.far, &p.info, 0, 0);
    const struct pc_rows rows = {0, 4096, 4096};
    const struct pc_run first = {0, 64}, rest = {64, 2048};
    int64_t ids[64];
    for (int64_t i = 0; i < 64; i++)
        ids[i] = i;
    OK(pc_client_prefetch(p.far, m.id, &first, 1, 1, WAIT));
    CHECK(pc_client_rows_here(p.far, m.id, &rows, ids, 64, 4096) == 1);
    const uint64_t evicted = stats_of(p.s1).evicted_blocks;
    for (int i = 0; i < 20 && stats_of(p.s1).evicted_blocks < evicted + 2048; i++)
        OK(pc_client_prefetch(p.far, m.id, &rest, 1, 1, WAIT));
    SOON(pc_client_rows_here(p.far, m.id, &rows, ids, 64, 4096) == 0);
    pair_stop(&p);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(here),
        TEST(here_no_more),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
