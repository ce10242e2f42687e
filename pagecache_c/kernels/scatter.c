/* scatter.c - rows of an array, by their numbers: many made one of each, and applied to memory.
 *
 * What is done to a row is done in the order of the call, so that floats come out the same each
 * time, and as NumPy's ufunc.at makes them. Ids are of 4 or 8 bytes; every one is checked against
 * the array before anything is written.
 *
 * Sorting is by digits from the lowest up, which keeps the order of equal ids; of an id no more
 * digits are looked at than the largest has. Threads: any; no state.
 */
#include "pagecache.h"
#include "common/error.h"
#include "kernels/reduce.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define MOST_DIGIT_BITS 11
#define CHUNK_BYTES (256u << 10) /* of rows that are merged at a time: they stay in the cache */

/* ------------------------------------------------------------ ids */

struct ids {
    const void *data;
    size_t n;
    int bytes; /* of each: 4 or 8 */
};

static inline uint64_t id_at(const struct ids *ids, size_t i)
{
    return ids->bytes == 4 ? ((const uint32_t *)ids->data)[i] : ((const uint64_t *)ids->data)[i];
}

static inline void put_id(void *out, int bytes, size_t i, uint64_t id)
{
    if (bytes == 4)
        ((uint32_t *)out)[i] = (uint32_t)id;
    else
        ((uint64_t *)out)[i] = id;
}

static int check_ids(const struct ids *ids, uint64_t n_rows)
{
    for (size_t i = 0; i < ids->n; i++)
        if (id_at(ids, i) >= n_rows)
            return pc__fail(PC_ERR_RANGE, "row %llu of %llu", (unsigned long long)id_at(ids, i),
                            (unsigned long long)n_rows);
    return PC_OK;
}

/* ------------------------------------------------------------ sorting */

struct key {
    uint64_t id;
    uint64_t index; /* in the call */
};

static bool is_ascending(const struct key *keys, size_t n)
{
    for (size_t i = 1; i < n; i++)
        if (keys[i].id < keys[i - 1].id)
            return false;
    return true;
}

/* By one digit, in the order that they have. */
static void sort_digit(const struct key *from, struct key *to, size_t n, unsigned shift,
                       unsigned bits)
{
    const uint64_t mask = (1ull << bits) - 1;
    size_t begins[1u << MOST_DIGIT_BITS] = {0};
    for (size_t i = 0; i < n; i++)
        begins[from[i].id >> shift & mask]++;
    size_t at = 0;
    for (size_t digit = 0; digit <= mask; digit++) {
        size_t count = begins[digit];
        begins[digit] = at;
        at += count;
    }
    for (size_t i = 0; i < n; i++)
        to[begins[from[i].id >> shift & mask]++] = from[i];
}

/* Returns which of the two has the result. */
static struct key *sort_keys(struct key *keys, struct key *spare, size_t n)
{
    if (is_ascending(keys, n))
        return keys;
    uint64_t all = 0;
    for (size_t i = 0; i < n; i++)
        all |= keys[i].id;
    unsigned n_bits = 64 - (unsigned)__builtin_clzll(all | 1);
    unsigned n_digits = (n_bits + MOST_DIGIT_BITS - 1) / MOST_DIGIT_BITS;
    unsigned bits = (n_bits + n_digits - 1) / n_digits; /* no larger than they need be */
    for (unsigned shift = 0; shift < n_bits; shift += bits) {
        sort_digit(keys, spare, n, shift, bits);
        struct key *sorted = spare;
        spare = keys;
        keys = sorted;
    }
    return keys;
}

/* ------------------------------------------------------------ rows */

typedef void row_fn(void *row, const void *value, size_t n_elements);

#define ADD(x, y) ((x) + (y))
/* As NumPy's: of a NaN and a number, the NaN; of two that are equal (zeros), the second. */
#define MOST(x, y) ((x) > (y) || (x) != (x) ? (x) : (y))
#define LEAST(x, y) ((x) < (y) || (x) != (x) ? (x) : (y))

#define ROW(name, type, number, op) \
    static void name(void *row_bytes, const void *value_bytes, size_t n_elements) \
    { \
        type *row = row_bytes; \
        const type *value = value_bytes; \
        for (size_t i = 0; i < n_elements; i++) { \
            number x = (number)row[i], y = (number)value[i]; \
            row[i] = (type)op(x, y); \
        } \
    }

/* Signed sums wrap around as NumPy's do: computed without a sign. */
#define ROWS(name, type, wrapping) \
    ROW(name##_sum, type, wrapping, ADD) \
    ROW(name##_max, type, type, MOST) \
    ROW(name##_min, type, type, LEAST)

ROWS(f32, float, float)
ROWS(f64, double, double)
ROWS(i32, int32_t, uint32_t)
ROWS(i64, int64_t, uint64_t)

static row_fn *row_function(int dtype, int op)
{
    static row_fn *const sums[] = {[PC_F32] = f32_sum, [PC_F64] = f64_sum, [PC_I32] = i32_sum,
                                   [PC_I64] = i64_sum};
    static row_fn *const most[] = {[PC_F32] = f32_max, [PC_F64] = f64_max, [PC_I32] = i32_max,
                                   [PC_I64] = i64_max};
    static row_fn *const least[] = {[PC_F32] = f32_min, [PC_F64] = f64_min, [PC_I32] = i32_min,
                                    [PC_I64] = i64_min};
    if (dtype < PC_F32 || dtype > PC_I64)
        return NULL;
    return op == PC_OP_SUM ? sums[dtype] : op == PC_OP_MAX ? most[dtype]
                                         : op == PC_OP_MIN ? least[dtype] : NULL;
}

static int check_call(int dtype, int op, int id_bytes)
{
    if (!row_function(dtype, op))
        return pc__fail(PC_ERR_RANGE, "rows of dtype %d by op %d", dtype, op);
    if (id_bytes != 4 && id_bytes != 8)
        return pc__fail(PC_ERR_RANGE, "ids of %d bytes", id_bytes);
    return PC_OK;
}

/* ------------------------------------------------------------ combining */

/* Rows of one element, the most frequent ones, without a call for each. */
#define COMBINE_ONE(name, type, function) \
    static size_t name(const struct key *keys, size_t n, const void *values, void *out_ids, \
                       int id_bytes, void *out_values) \
    { \
        const type *from = values; \
        type *to = out_values; \
        size_t made = 0; \
        for (size_t i = 0; i < n; made++) { \
            uint64_t id = keys[i].id; \
            type sum = from[keys[i].index]; \
            for (i++; i < n && keys[i].id == id; i++) \
                function(&sum, &from[keys[i].index], 1); \
            put_id(out_ids, id_bytes, made, id); \
            to[made] = sum; \
        } \
        return made; \
    }
COMBINE_ONE(combine_f32, float, f32_sum)
COMBINE_ONE(combine_f64, double, f64_sum)

static size_t combine_rows(const struct key *keys, size_t n, const char *values, size_t row_bytes,
                           size_t row_elements, row_fn *function, void *out_ids, int id_bytes,
                           char *out_values)
{
    size_t made = 0;
    for (size_t i = 0; i < n; made++) {
        uint64_t id = keys[i].id;
        char *row = out_values + made * row_bytes;
        memcpy(row, values + keys[i].index * row_bytes, row_bytes);
        for (i++; i < n && keys[i].id == id; i++)
            function(row, values + keys[i].index * row_bytes, row_elements);
        put_id(out_ids, id_bytes, made, id);
    }
    return made;
}

PC_API int64_t pc_rows_combine(int dtype, int op, uint64_t row_elements, const void *ids,
                               int id_bytes, const void *values, uint64_t n, void *out_ids,
                               void *out_values)
{
    int rc = check_call(dtype, op, id_bytes);
    if (rc)
        return rc;
    if (n == 0)
        return 0;
    struct key *keys = n > SIZE_MAX / 2 / sizeof *keys ? NULL : malloc(2 * n * sizeof *keys);
    if (!keys)
        return pc__fail(PC_ERR_NO_MEMORY, "sorting %llu rows", (unsigned long long)n);
    const struct ids all = {ids, n, id_bytes};
    for (size_t i = 0; i < n; i++)
        keys[i] = (struct key){id_at(&all, i), i};
    const struct key *sorted = sort_keys(keys, keys + n, n);
    size_t made;
    if (row_elements == 1 && op == PC_OP_SUM && dtype == PC_F32)
        made = combine_f32(sorted, n, values, out_ids, id_bytes, out_values);
    else if (row_elements == 1 && op == PC_OP_SUM && dtype == PC_F64)
        made = combine_f64(sorted, n, values, out_ids, id_bytes, out_values);
    else
        made = combine_rows(sorted, n, values, row_elements * pc__dtype_bytes(dtype), row_elements,
                            row_function(dtype, op), out_ids, id_bytes, out_values);
    free(keys);
    return (int64_t)made;
}

/* ------------------------------------------------------------ merging */

struct list {
    struct ids ids;
    const char *values;
    size_t at;
};

/* Rows first to first + n, of all lists, in the order of the lists. */
struct chunk {
    uint64_t first;
    uint64_t n;
    size_t row_bytes, row_elements;
    row_fn *function;
    char *rows;
    uint64_t *there; /* a bit for each */
};

static void take_rows(const struct chunk *chunk, struct list *list)
{
    for (; list->at < list->ids.n; list->at++) {
        const uint64_t row = id_at(&list->ids, list->at) - chunk->first;
        if (row >= chunk->n)
            return;
        char *to = chunk->rows + row * chunk->row_bytes;
        const char *from = list->values + list->at * chunk->row_bytes;
        uint64_t *word = &chunk->there[row / 64], bit = 1ull << row % 64;
        if (*word & bit)
            chunk->function(to, from, chunk->row_elements);
        else
            memcpy(to, from, chunk->row_bytes);
        *word |= bit;
    }
}

#define TAKE_ONE(name, type, op) \
    static void name(const struct chunk *chunk, struct list *list) \
    { \
        type *rows = (type *)(void *)chunk->rows; \
        const type *values = (const type *)(const void *)list->values; \
        for (; list->at < list->ids.n; list->at++) { \
            const uint64_t row = id_at(&list->ids, list->at) - chunk->first; \
            if (row >= chunk->n) \
                return; \
            const type value = values[list->at]; \
            uint64_t *word = &chunk->there[row / 64]; \
            const uint64_t bit = 1ull << row % 64; \
            rows[row] = *word & bit ? op(rows[row], value) : value; \
            *word |= bit; \
        } \
    }
TAKE_ONE(take_f32, float, ADD)
TAKE_ONE(take_f64, double, ADD)

static size_t give_rows(const struct chunk *chunk, void *out_ids, int id_bytes, char *out_values,
                        size_t made)
{
    for (uint64_t word = 0; word * 64 < chunk->n; word++) {
        for (uint64_t bits = chunk->there[word]; bits; bits &= bits - 1, made++) {
            const uint64_t row = word * 64 + (uint64_t)__builtin_ctzll(bits);
            put_id(out_ids, id_bytes, made, chunk->first + row);
            memcpy(out_values + made * chunk->row_bytes, chunk->rows + row * chunk->row_bytes,
                   chunk->row_bytes);
        }
        chunk->there[word] = 0;
    }
    return made;
}

static bool least_id(const struct list *lists, size_t n_lists, uint64_t *out)
{
    bool found = false;
    for (size_t i = 0; i < n_lists; i++) {
        if (lists[i].at == lists[i].ids.n)
            continue;
        const uint64_t id = id_at(&lists[i].ids, lists[i].at);
        *out = found && *out < id ? *out : id;
        found = true;
    }
    return found;
}

static size_t merge_lists(struct list *lists, size_t n_lists, struct chunk *chunk,
                          void (*take)(const struct chunk *, struct list *), void *out_ids,
                          int id_bytes, char *out_values)
{
    size_t made = 0;
    while (least_id(lists, n_lists, &chunk->first)) {
        for (size_t i = 0; i < n_lists; i++)
            take(chunk, &lists[i]);
        made = give_rows(chunk, out_ids, id_bytes, out_values, made);
    }
    return made;
}

PC_API int64_t pc_rows_merge(int dtype, int op, uint64_t row_elements, uint64_t n_lists,
                             const void *const *ids, int id_bytes, const void *const *values,
                             const uint64_t *n, void *out_ids, void *out_values)
{
    int rc = check_call(dtype, op, id_bytes);
    if (rc)
        return rc;
    struct chunk chunk = {.row_elements = row_elements, .function = row_function(dtype, op)};
    chunk.row_bytes = row_elements * pc__dtype_bytes(dtype);
    chunk.n = chunk.row_bytes && chunk.row_bytes < CHUNK_BYTES / 64 ? CHUNK_BYTES / chunk.row_bytes
                                                                    : 64;
    struct list *lists = calloc(n_lists ? n_lists : 1, sizeof *lists);
    chunk.rows = malloc(chunk.n * chunk.row_bytes + 1);
    chunk.there = calloc(chunk.n / 64 + 1, sizeof *chunk.there);
    int64_t made;
    if (lists && chunk.rows && chunk.there) {
        for (size_t i = 0; i < n_lists; i++)
            lists[i] = (struct list){{ids[i], n[i], id_bytes}, values[i], 0};
        const bool plain = row_elements == 1 && op == PC_OP_SUM;
        made = (int64_t)merge_lists(lists, n_lists, &chunk,
                                    plain && dtype == PC_F32   ? take_f32
                                    : plain && dtype == PC_F64 ? take_f64
                                                               : take_rows,
                                    out_ids, id_bytes, out_values);
    } else {
        made = pc__fail(PC_ERR_NO_MEMORY, "merging %llu lists", (unsigned long long)n_lists);
    }
    free(lists);
    free(chunk.rows);
    free(chunk.there);
    return made;
}

/* ------------------------------------------------------------ applying */

#define APPLY_ONE(name, type, function) \
    static void name(void *array, const struct ids *ids, const void *values) \
    { \
        type *row = array; \
        const type *value = values; \
        for (size_t i = 0; i < ids->n; i++) \
            function(row + id_at(ids, i), value + i, 1); \
    }
APPLY_ONE(apply_f32, float, f32_sum)
APPLY_ONE(apply_f64, double, f64_sum)

PC_API int pc_rows_apply(int dtype, int op, uint64_t row_elements, void *array, uint64_t n_rows,
                         const void *ids, int id_bytes, const void *values, uint64_t n)
{
    int rc = check_call(dtype, op, id_bytes);
    const struct ids all = {ids, n, id_bytes};
    if (!rc)
        rc = check_ids(&all, n_rows);
    if (rc)
        return rc;
    if (row_elements == 1 && op == PC_OP_SUM && dtype == PC_F32) {
        apply_f32(array, &all, values);
    } else if (row_elements == 1 && op == PC_OP_SUM && dtype == PC_F64) {
        apply_f64(array, &all, values);
    } else {
        const size_t row_bytes = row_elements * pc__dtype_bytes(dtype);
        row_fn *function = row_function(dtype, op);
        for (size_t i = 0; i < n; i++)
            function((char *)array + id_at(&all, i) * row_bytes,
                     (const char *)values + i * row_bytes, row_elements);
    }
    return PC_OK;
}

/* ------------------------------------------------------------ blocks */

static void mark(uint64_t *bits, uint64_t first, uint64_t last)
{
    for (uint64_t block = first; block <= last; block++)
        bits[block / 64] |= 1ull << block % 64;
}

static bool is_marked(const uint64_t *bits, uint64_t block)
{
    return bits[block / 64] >> block % 64 & 1;
}

/* The first marked block from here on, or n. */
static uint64_t next_marked(const uint64_t *bits, uint64_t block, uint64_t n)
{
    while (block < n && !is_marked(bits, block))
        block += bits[block / 64] >> block % 64 ? 1 : 64 - block % 64;
    return block < n ? block : n;
}

PC_API int64_t pc_rows_blocks(uint64_t offset_bytes, uint64_t row_bytes, uint64_t n_rows,
                              const void *ids, int id_bytes, uint64_t n, struct pc_run *runs,
                              uint64_t capacity)
{
    const struct ids all = {ids, n, id_bytes};
    int rc = id_bytes == 4 || id_bytes == 8 ? check_ids(&all, n_rows)
                                            : pc__fail(PC_ERR_RANGE, "ids of %d bytes", id_bytes);
    uint64_t end_bytes, n_blocks = 0;
    if (!rc && (__builtin_mul_overflow(n_rows, row_bytes, &end_bytes) ||
                __builtin_add_overflow(end_bytes, offset_bytes, &end_bytes)))
        rc = pc__fail(PC_ERR_RANGE, "an array of %llu rows", (unsigned long long)n_rows);
    if (rc)
        return rc;
    if (n == 0 || row_bytes == 0)
        return 0;
    n_blocks = (end_bytes + PC_BLOCK_BYTES - 1) >> PC_BLOCK_SHIFT;
    uint64_t *bits = calloc(n_blocks / 64 + 1, sizeof *bits);
    if (!bits)
        return pc__fail(PC_ERR_NO_MEMORY, "marks for %llu blocks", (unsigned long long)n_blocks);
    for (size_t i = 0; i < n; i++) {
        uint64_t begin = offset_bytes + id_at(&all, i) * row_bytes;
        mark(bits, begin >> PC_BLOCK_SHIFT, (begin + row_bytes - 1) >> PC_BLOCK_SHIFT);
    }
    uint64_t found = 0;
    for (uint64_t block = next_marked(bits, 0, n_blocks); block < n_blocks; found++) {
        uint64_t first = block;
        while (block < n_blocks && is_marked(bits, block))
            block++;
        if (found < capacity)
            runs[found] = (struct pc_run){first, block - first};
        block = next_marked(bits, block, n_blocks);
    }
    free(bits);
    return (int64_t)found;
}

PC_API int pc_populate(void *mapping, const struct pc_run *runs, uint64_t n_runs)
{
    for (uint64_t i = 0; i < n_runs; i++) {
        char *begin = (char *)mapping + (runs[i].first_block << PC_BLOCK_SHIFT);
        if (madvise(begin, runs[i].n_blocks << PC_BLOCK_SHIFT, MADV_POPULATE_WRITE))
            break; /* an old kernel, or a trap that must see the touch */
    }
    return PC_OK;
}
