/* test_scatter.c - rows by their numbers: combined, applied, and the blocks that they lie on. */
#include "tests/support/harness.h"

#include <math.h>
#include <sys/mman.h>

static uint64_t state = 88172645463325252ull;

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

/* What a loop over the call makes of zeroed memory is what combined rows make of it. */
static void test_combined_is_a_loop(void)
{
    enum { N = 5000, ROWS = 700, WIDTH = 3 };
    static int64_t values[N * WIDTH], made[N * WIDTH], plain[ROWS * WIDTH], combined[ROWS * WIDTH];
    static uint32_t ids[N], out[N];
    for (int op = PC_OP_SUM; op <= PC_OP_MAX; op++) {
        if (op == PC_OP_PROD)
            continue;
        memset(plain, 0, sizeof plain);
        memset(combined, 0, sizeof combined);
        for (int i = 0; i < N; i++) {
            ids[i] = (uint32_t)draw(ROWS);
            for (int j = 0; j < WIDTH; j++)
                values[i * WIDTH + j] = (int64_t)(draw(UINT64_MAX) << 1);
        }
        OK(pc_rows_apply(PC_I64, op, WIDTH, plain, ROWS, ids, 4, values, N));
        int64_t n = pc_rows_combine(PC_I64, op, WIDTH, ids, 4, values, N, out, made);
        CHECK(n > 0 && n <= ROWS);
        for (int64_t i = 1; i < n; i++)
            CHECK(out[i - 1] < out[i]);
        OK(pc_rows_apply(PC_I64, op, WIDTH, combined, ROWS, out, 4, made, (uint64_t)n));
        CHECK(memcmp(plain, combined, sizeof plain) == 0);
    }
}

/* Merged lists are what combining all of their rows at once makes, in this order. */
static void test_merged_is_combined(int width, uint64_t n_ids)
{
    enum { LISTS = 5, N = 4000, WIDTH = 3 };
    static double values[LISTS * N * WIDTH], lists[LISTS][N * WIDTH], merged[LISTS * N * WIDTH],
        combined[LISTS * N * WIDTH];
    static uint64_t ids[LISTS * N], list_ids[LISTS][N], merged_ids[LISTS * N],
        combined_ids[LISTS * N];
    const void *id_lists[LISTS], *value_lists[LISTS];
    uint64_t n[LISTS], total = 0;
    for (int i = 0; i < LISTS; i++) {
        const uint64_t given = i == 3 ? 0 : N;
        for (uint64_t j = 0; j < given; j++) {
            combined_ids[j] = draw(n_ids);
            for (int k = 0; k < width; k++)
                combined[j * (uint64_t)width + (uint64_t)k] =
                    (double)draw(1000) * (draw(2) ? 1e12 : 1e-3);
        }
        int64_t made = pc_rows_combine(PC_F64, PC_OP_SUM, (uint64_t)width, combined_ids, 8,
                                       combined, given, list_ids[i], lists[i]);
        CHECK(made >= 0);
        n[i] = (uint64_t)made;
        id_lists[i] = list_ids[i];
        value_lists[i] = lists[i];
        memcpy(ids + total, list_ids[i], n[i] * sizeof *ids);
        memcpy(values + total * (uint64_t)width, lists[i],
               n[i] * (uint64_t)width * sizeof *values);
        total += n[i];
    }
    int64_t expected = pc_rows_combine(PC_F64, PC_OP_SUM, (uint64_t)width, ids, 8, values, total,
                                       combined_ids, combined);
    int64_t made = pc_rows_merge(PC_F64, PC_OP_SUM, (uint64_t)width, LISTS, id_lists, 8,
                                 value_lists, n, merged_ids, merged);
    CHECK(made == expected && made > 0);
    CHECK(memcmp(merged_ids, combined_ids, (size_t)made * sizeof *ids) == 0);
    CHECK(memcmp(merged, combined, (size_t)made * (size_t)width * sizeof *values) == 0);
}

/* Equal ids in the order of the call: floats tell. Ids with all their digits, too. */
static void test_order_of_equal_ids(void)
{
    const uint64_t big = 0xfedcba9876543210ull;
    const uint64_t ids[] = {big, 5, big, 1ull << 40, 5, big};
    const double values[] = {1e16, 1, 1, 7, 2, -1e16};
    uint64_t out[6];
    double made[6];
    CHECK(pc_rows_combine(PC_F64, PC_OP_SUM, 1, ids, 8, values, 6, out, made) == 3);
    CHECK(out[0] == 5 && out[1] == 1ull << 40 && out[2] == big);
    CHECK(made[0] == 3 && made[1] == 7 && made[2] == (1e16 + 1) - 1e16);
    float few[] = {1e8f, 1, -1e8f}, sum;
    const uint32_t same[] = {9, 9, 9};
    uint32_t id;
    CHECK(pc_rows_combine(PC_F32, PC_OP_SUM, 1, same, 4, few, 3, &id, &sum) == 1);
    CHECK(id == 9 && sum == (1e8f + 1) + -1e8f);
}

static void test_numbers_are_numpys(void)
{
    int32_t whole[1] = {INT32_MAX};
    const int32_t one[1] = {1};
    const uint64_t zero[1] = {0};
    OK(pc_rows_apply(PC_I32, PC_OP_SUM, 1, whole, 1, zero, 8, one, 1));
    CHECK(whole[0] == INT32_MIN);
    float row[2] = {1, NAN};
    const float values[2] = {NAN, 1};
    OK(pc_rows_apply(PC_F32, PC_OP_MAX, 2, row, 1, zero, 8, values, 1));
    CHECK(isnan(row[0]) && isnan(row[1]));
    double inf[1] = {INFINITY};
    const double other[1] = {-INFINITY};
    OK(pc_rows_apply(PC_F64, PC_OP_SUM, 1, inf, 1, zero, 8, other, 1));
    CHECK(isnan(inf[0]));
}

static void test_what_is_refused(void)
{
    double array[4] = {0}, values[2] = {1, 1};
    const uint64_t ids[2] = {0, 4};
    struct pc_run runs[1];
    CHECK(pc_rows_apply(PC_F64, PC_OP_SUM, 1, array, 4, ids, 8, values, 2) == PC_ERR_RANGE);
    CHECK(array[0] == 0);
    CHECK(pc_rows_apply(PC_F16, PC_OP_SUM, 1, array, 4, ids, 8, values, 1) == PC_ERR_RANGE);
    CHECK(pc_rows_apply(PC_F64, PC_OP_PROD, 1, array, 4, ids, 8, values, 1) == PC_ERR_RANGE);
    CHECK(pc_rows_apply(PC_F64, PC_OP_SUM, 1, array, 4, ids, 2, values, 1) == PC_ERR_RANGE);
    CHECK((int)pc_rows_blocks(0, 8, 4, ids, 8, 2, runs, 1) == PC_ERR_RANGE);
    CHECK((int)pc_rows_blocks(0, UINT64_MAX, 2, ids, 8, 1, runs, 1) == PC_ERR_RANGE);
    CHECK(pc_rows_combine(PC_F64, PC_OP_SUM, 1, ids, 8, values, 0, NULL, NULL) == 0);
}

static void test_blocks(void)
{
    enum { CAPACITY = 8 };
    struct pc_run runs[CAPACITY];
    const uint32_t ids[] = {1000, 0, 1, 511, 512, 200000};
    CHECK(pc_rows_blocks(0, 8, 200001, ids, 4, 6, runs, CAPACITY) == 2);
    CHECK(runs[0].first_block == 0 && runs[0].n_blocks == 2);
    CHECK(runs[1].first_block == 200000 * 8 / 4096 && runs[1].n_blocks == 1);
    const uint32_t wide[] = {2}; /* from 100 + 2 * 6000 to 6000 after that */
    CHECK(pc_rows_blocks(100, 6000, 3, wide, 4, 1, runs, CAPACITY) == 1);
    CHECK(runs[0].first_block == 12100 / 4096 && runs[0].n_blocks == 18099 / 4096 - 2 + 1);
    const uint32_t apart[] = {0, 1024, 2048};
    CHECK(pc_rows_blocks(0, 8, 4096, apart, 4, 3, runs, 1) == 3); /* and writes no more than one */
}

static void test_populated_blocks_keep_their_bytes(void)
{
    int fd = memfd_create("rows", 0);
    CHECK(fd >= 0 && ftruncate(fd, 16 * 4096) == 0 && pwrite(fd, "there", 5, 3 * 4096) == 5);
    char *map = mmap(NULL, 16 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(map != MAP_FAILED);
    const struct pc_run runs[] = {{3, 2}, {9, 1}};
    OK(pc_populate(map, runs, 2));
    CHECK(memcmp(map + 3 * 4096, "there", 5) == 0);
    munmap(map, 16 * 4096);
    close(fd);
}

int main(void)
{
    test_combined_is_a_loop();
    for (int width = 1; width <= 3; width += 2) {
        test_merged_is_combined(width, 3000);
        test_merged_is_combined(width, 1ull << 40);
        test_merged_is_combined(width, UINT64_MAX);
    }
    test_order_of_equal_ids();
    test_numbers_are_numpys();
    test_what_is_refused();
    test_blocks();
    test_populated_blocks_keep_their_bytes();
    return 0;
}
