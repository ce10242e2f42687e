/* reduce.c - see reduce.h.
 *
 * Inner loops go over blocks of a fixed length, which compilers turn into vector instructions also
 * where they may not check for overlap at run time; what is left over goes one by one.
 */
#include "kernels/reduce.h"

#include "common/error.h"

#include <string.h>

#define BLOCK 64

/* ------------------------------------------------------------ halves */

static float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* IEEE 754 binary16. The exponent moves from a bias of 15 to one of 127; numbers below the smallest
 * normal one are made so by a multiplication, which is exact. */
static float from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t rest = half & 0x7fff;
    if (rest >= 0x7c00) /* infinities, NaN */
        return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    float scaled = float_of_bits(rest << 13) * 0x1p112f;
    return float_of_bits(sign | bits_of_float(scaled));
}

static uint16_t to_f16(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* below the smallest normal half: the adder rounds, ties to even */
        float shifted = float_of_bits(rest) + 0.5f;
        return (uint16_t)(sign | (bits_of_float(shifted) - 0x3f000000));
    }
    uint32_t odd = rest >> 13 & 1;
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + odd) >> 13));
}

static float from_bf16(uint16_t half)
{
    return float_of_bits((uint32_t)half << 16);
}

static uint16_t to_bf16(float value)
{
    uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ------------------------------------------------------------ operations */

#define ADD(x, y) ((x) + (y))
#define MULTIPLY(x, y) ((x) * (y))
/* Of a NaN and a number, the NaN; of two, the first. */
#define LEAST(x, y) ((x) < (y) || (x) != (x) ? (x) : (y))
#define MOST(x, y) ((x) > (y) || (x) != (x) ? (x) : (y))
#define SAME(x) (x)

/* stored: in memory. number: what is computed with. load, store: between them. */
#define REDUCER(name, stored, number, load, store, op) \
    static void name(void *out_bytes, const void *a_bytes, const void *b_bytes, size_t n) \
    { \
        stored *out = out_bytes; \
        const stored *a = a_bytes, *b = b_bytes; \
        size_t i = 0; \
        for (; i + BLOCK <= n; i += BLOCK) { \
            stored made[BLOCK]; \
            for (size_t j = 0; j < BLOCK; j++) { \
                number x = (number)load(a[i + j]), y = (number)load(b[i + j]); \
                made[j] = (stored)store((number)op(x, y)); \
            } \
            memcpy(out + i, made, sizeof made); \
        } \
        for (; i < n; i++) { \
            number x = (number)load(a[i]), y = (number)load(b[i]); \
            out[i] = (stored)store((number)op(x, y)); \
        } \
    }

/* Signed sums and products wrap around as NumPy's do: computed without a sign. */
#define REDUCERS(name, stored, number, load, store, wrapping) \
    REDUCER(name##_sum, stored, wrapping, load, store, ADD) \
    REDUCER(name##_prod, stored, wrapping, load, store, MULTIPLY) \
    REDUCER(name##_min, stored, number, load, store, LEAST) \
    REDUCER(name##_max, stored, number, load, store, MOST)

REDUCERS(f16, uint16_t, float, from_f16, to_f16, float)
REDUCERS(bf16, uint16_t, float, from_bf16, to_bf16, float)
REDUCERS(f32, float, float, SAME, SAME, float)
REDUCERS(f64, double, double, SAME, SAME, double)
REDUCERS(i32, int32_t, int32_t, SAME, SAME, uint32_t)
REDUCERS(i64, int64_t, int64_t, SAME, SAME, uint64_t)

static void bytes_or(void *out_bytes, const void *a_bytes, const void *b_bytes, size_t n)
{
    uint8_t *out = out_bytes;
    const uint8_t *a = a_bytes, *b = b_bytes;
    for (size_t i = 0; i < n; i++)
        out[i] = (uint8_t)(a[i] | b[i]);
}

pc__reduce_fn *pc__reducer(int dtype, int op)
{
    static pc__reduce_fn *const by_dtype[][4] = {
        [PC_F16] = {f16_sum, f16_prod, f16_min, f16_max},
        [PC_BF16] = {bf16_sum, bf16_prod, bf16_min, bf16_max},
        [PC_F32] = {f32_sum, f32_prod, f32_min, f32_max},
        [PC_F64] = {f64_sum, f64_prod, f64_min, f64_max},
        [PC_I32] = {i32_sum, i32_prod, i32_min, i32_max},
        [PC_I64] = {i64_sum, i64_prod, i64_min, i64_max},
    };
    if (dtype == PC_BYTES)
        return op == PC_OP_OR ? bytes_or : NULL;
    if (dtype < PC_F16 || dtype > PC_I64)
        return NULL;
    if (op == PC_OP_MEAN)
        return pc__dtype_is_float(dtype) ? by_dtype[dtype][0] : NULL;
    return op >= PC_OP_SUM && op <= PC_OP_MAX ? by_dtype[dtype][op] : NULL;
}

PC_API int pc_reduce(int dtype, int op, void *out, const void *a, const void *b,
                     uint64_t n_elements)
{
    pc__reduce_fn *reduce = pc__reducer(dtype, op);
    if (!reduce)
        return pc__fail(PC_ERR_RANGE, "no such operation %d of dtype %d", op, dtype);
    if (n_elements)
        reduce(out, a, b, n_elements);
    return PC_OK;
}

size_t pc__dtype_bytes(int dtype)
{
    static const size_t bytes[] = {[PC_F16] = 2, [PC_BF16] = 2, [PC_F32] = 4, [PC_F64] = 8,
                                   [PC_I32] = 4, [PC_I64] = 8,  [PC_BYTES] = 1};
    return dtype >= PC_F16 && dtype <= PC_BYTES ? bytes[dtype] : 0;
}

int pc__dtype_is_float(int dtype)
{
    return dtype >= PC_F16 && dtype <= PC_F64;
}

void pc__reduce_divide(int dtype, void *data, size_t n_elements, uint32_t by)
{
    if (dtype == PC_F64) {
        double *values = data;
        for (size_t i = 0; i < n_elements; i++)
            values[i] /= by;
    } else if (dtype == PC_F32) {
        float *values = data;
        for (size_t i = 0; i < n_elements; i++)
            values[i] /= (float)by;
    } else {
        uint16_t *values = data;
        for (size_t i = 0; i < n_elements; i++)
            values[i] = dtype == PC_F16 ? to_f16(from_f16(values[i]) / (float)by)
                                        : to_bf16(from_bf16(values[i]) / (float)by);
    }
}

void pc__reduce_widen(float *out, const void *halves, size_t n_elements)
{
    const uint16_t *values = halves;
    for (size_t i = 0; i < n_elements; i++)
        out[i] = from_f16(values[i]);
}

void pc__reduce_narrow(void *halves, const float *from, size_t n_elements)
{
    uint16_t *values = halves;
    for (size_t i = 0; i < n_elements; i++)
        values[i] = to_f16(from[i]);
}
