/* test_reduce.c - pc_reduce: two arrays made one, in place or not, of any length and dtype. */
#include "tests/support/check.h"
#include "kernels/reduce.h"

#include <stdint.h>
#include <string.h>

#define MOST 131u

static const int ops[] = {PC_OP_SUM, PC_OP_PROD, PC_OP_MIN, PC_OP_MAX};

static int64_t expected(int op, int64_t x, int64_t y)
{
    return op == PC_OP_SUM ? x + y : op == PC_OP_PROD ? x * y : (op == PC_OP_MIN) == (x < y) ? x : y;
}

/* Small integers, which all these dtypes hold exactly. Blocks of 64 go another way than the rest. */
#define OF_DTYPE(name, type, dtype) \
    static void of_##name(int op, size_t n, int in_place) \
    { \
        type *a = malloc(n * sizeof *a + 1), *b = malloc(n * sizeof *b + 1); \
        type *own = malloc(n * sizeof *own + 1), *out = in_place ? a : own; \
        REQUIRE(a && b && own); \
        for (size_t i = 0; i < n; i++) { \
            a[i] = (type)((int)(i % 11) - 5); \
            b[i] = (type)((int)(i % 7) - 3); \
        } \
        CHECK(pc_reduce(dtype, op, out, a, b, n) == PC_OK, "op %d", op); \
        for (size_t i = 0; i < n; i++) { \
            type one = (type)expected(op, (int)(i % 11) - 5, (int)(i % 7) - 3); \
            CHECK(out[i] == one, #type ", op %d, %zu of %zu", op, i, n); \
        } \
        free(a); \
        free(b); \
        free(own); \
    }

OF_DTYPE(f32, float, PC_F32)
OF_DTYPE(f64, double, PC_F64)
OF_DTYPE(i32, int32_t, PC_I32)
OF_DTYPE(i64, int64_t, PC_I64)

static void test_all_dtypes_and_lengths(void)
{
    static const size_t lengths[] = {0, 1, 63, 64, 65, 128, MOST};
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
        for (size_t o = 0; o < sizeof ops / sizeof *ops; o++)
            for (int in_place = 0; in_place <= 1; in_place++) {
                of_f32(ops[o], lengths[k], in_place);
                of_f64(ops[o], lengths[k], in_place);
                of_i32(ops[o], lengths[k], in_place);
                of_i64(ops[o], lengths[k], in_place);
            }
}

static void test_halves(void)
{
    uint16_t one[] = {0x3c00, 0x3c00}, two[] = {0x4000, 0x7c00}, out[2]; /* 1 + 2, 1 + infinity */
    CHECK(pc_reduce(PC_F16, PC_OP_SUM, out, one, two, 2) == PC_OK, "f16");
    CHECK(out[0] == 0x4200 && out[1] == 0x7c00, "%x %x", out[0], out[1]);
    uint16_t brain[] = {0x3f80}, more[] = {0x4000};
    CHECK(pc_reduce(PC_BF16, PC_OP_SUM, out, brain, more, 1) == PC_OK, "bf16");
    CHECK(out[0] == 0x4040, "%x", out[0]);
}

static void test_what_there_is_not_is_refused(void)
{
    double out = 7, one = 1;
    CHECK(pc_reduce(PC_F64, PC_OP_OR, &out, &one, &one, 1) == PC_ERR_RANGE, "or of floats");
    CHECK(pc_reduce(PC_F64, 77, &out, &one, &one, 1) == PC_ERR_RANGE, "op 77");
    CHECK(pc_reduce(PC_F64, -1, &out, &one, &one, 1) == PC_ERR_RANGE, "op -1");
    CHECK(pc_reduce(-1, PC_OP_SUM, &out, &one, &one, 1) == PC_ERR_RANGE, "dtype -1");
    CHECK(pc_reduce(PC_BYTES + 1, PC_OP_SUM, &out, &one, &one, 1) == PC_ERR_RANGE, "dtype 7");
    CHECK(out == 7, "%g", out);
    CHECK(pc_reduce(PC_F64, PC_OP_SUM, NULL, NULL, NULL, 0) == PC_OK, "of nothing");
}

int main(void)
{
    test_all_dtypes_and_lengths();
    test_halves();
    test_what_there_is_not_is_refused();
    return test_result();
}
