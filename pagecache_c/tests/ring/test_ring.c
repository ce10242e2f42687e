/* Rings of threads over socket pairs and TCP, against sums that one thread makes in a plain way. */
#include "pagecache.h"
#include "kernels/reduce.h"
#include "tests/support/length.h"
#include "tests/support/ring_lab.h"

#include <math.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Small whole numbers: their sums are exact in every dtype, in any order. */
static void set(int dtype, void *array, uint64_t i, double value)
{
    switch (dtype) {
    case PC_F64: ((double *)array)[i] = value; break;
    case PC_F32: ((float *)array)[i] = (float)value; break;
    case PC_I32: ((int32_t *)array)[i] = (int32_t)value; break;
    case PC_I64: ((int64_t *)array)[i] = (int64_t)value; break;
    case PC_F16: { /* whole numbers up to 2048 */
        int e = 0;
        double m = frexp(fabs(value), &e);
        uint32_t bits = 0;
        if (value != 0)
            bits = (uint32_t)(e + 14) << 10 | ((uint32_t)(m * 2048) & 0x3ff);
        ((uint16_t *)array)[i] = (uint16_t)(bits | (value < 0 ? 0x8000u : 0));
        break;
    }
    default: {
        float number = (float)value;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        ((uint16_t *)array)[i] = (uint16_t)(bits >> 16);
    }
    }
}

static double number_of(int op, uint32_t member, uint64_t i)
{
    double number = (double)((member * 7 + i * 13 + i / 5) % 9) - 4;
    return op == PC_OP_PROD ? (number > 0 ? 2 : 1) : number;
}

static double reduced(int op, uint32_t n, uint64_t i)
{
    double found = number_of(op, 0, i);
    for (uint32_t member = 1; member < n; member++) {
        double next = number_of(op, member, i);
        if (op == PC_OP_PROD)
            found *= next;
        else if (op == PC_OP_MIN)
            found = next < found ? next : found;
        else if (op == PC_OP_MAX)
            found = next > found ? next : found;
        else
            found += next;
    }
    return op == PC_OP_MEAN ? found / n : found;
}

static void one_call(struct lab *lab, uint32_t kind, int dtype, int op, uint64_t n_elements,
                     bool in_place)
{
    size_t bytes = pc__dtype_bytes(dtype);
    struct member members[MAX_MEMBERS] = {0};
    uint32_t n = lab->n, root = (uint32_t)(random_next() % n);
    if (kind == PC_RING_ALL_GATHER)
        n_elements = n_elements / n * n;
    if (kind == PC_RING_BARRIER)
        n_elements = 0;
    uint8_t *want = calloc(n_elements + 1, bytes);
    bool reduces = kind == PC_RING_ALLREDUCE || kind == PC_RING_REDUCE_SCATTER;
    for (uint64_t i = 0; i < n_elements; i++)
        set(dtype, want, i,
            reduces                     ? reduced(op, n, i)
            : kind == PC_RING_BROADCAST ? number_of(op, root, i)
                                        : number_of(op, (uint32_t)(i / (n_elements / n)), i));
    for (uint32_t m = 0; m < n; m++) {
        struct member *member = &members[m];
        member->ring = lab->rings[m];
        member->call = (struct pc_ring_call){.kind = kind,
                                             .dtype = (uint32_t)dtype,
                                             .op = (uint32_t)op,
                                             .root = root,
                                             .n_dims = 1,
                                             .dims = {n_elements}};
        member->n_elements = n_elements;
        member->timeout_ns = 20 * S;
        member->in = malloc(n_elements * bytes + 1);
        for (uint64_t i = 0; i < n_elements; i++)
            set(dtype, member->in, i, number_of(op, m, i));
        member->out = in_place ? member->in : malloc(n_elements * bytes + 1);
        if (kind == PC_RING_ALL_GATHER) {
            memset(member->out, 0xee, n_elements * bytes);
            for (uint64_t i = n_elements / n * m; i < n_elements / n * (m + 1); i++)
                set(dtype, member->out, i, number_of(op, m, i));
        }
    }
    all_run(members, n);
    for (uint32_t m = 0; m < n; m++) {
        struct member *member = &members[m];
        CHECK(member->rc == 0, "member %u of %u: %s", m, n, pc_strerror(member->rc));
        uint64_t low = 0, high = n_elements;
        if (kind == PC_RING_REDUCE_SCATTER) {
            low = n_elements / n * m + n_elements % n * m / n;
            high = n_elements / n * (m + 1) + n_elements % n * (m + 1) / n;
        }
        bool is_root = kind == PC_RING_BROADCAST && m == root;
        const uint8_t *found = is_root ? member->in : member->out;
        CHECK(memcmp(found + low * bytes, want + low * bytes, (high - low) * bytes) == 0,
              "kind %u dtype %d op %d: member %u of %u has something else of %llu elements", kind,
              dtype, op, m, n, (unsigned long long)n_elements);
        if (!in_place)
            free(member->out);
        free(member->in);
    }
    free(want);
}

static void test_all_kinds(void)
{
    for (uint32_t n = 1; n <= MAX_MEMBERS; n++) {
        struct lab lab;
        lab_make(&lab, n, 1 + n % 3, n % 2);
        for (uint32_t kind = 0; kind < PC_RING_LAST; kind++)
            for (int dtype = PC_F16; dtype <= PC_I64; dtype += hunts_races() ? PC_I64 - PC_F16 : 1)
                for (int round = 0; round < 3; round++) {
                    /* Nothing, less than members, small, and large of any length. */
                    const uint64_t most[] = {1 + n, SMALL / 8, 90000};
                    one_call(&lab, kind, dtype, (int)(random_next() % 4),
                             random_next() % most[round], random_next() % 2);
                }
        one_call(&lab, PC_RING_ALLREDUCE, PC_F64, PC_OP_SUM, 0, false);
        lab_end(&lab);
    }
}

static void one_mean_of_halves(struct lab *lab, uint32_t kind, uint64_t count)
{
    struct member members[MAX_MEMBERS] = {0};
    for (uint32_t m = 0; m < lab->n; m++) {
        uint16_t *array = malloc(count * sizeof *array);
        for (uint64_t i = 0; i < count; i++)
            array[i] = 0x7b53; /* 60000 */
        members[m] = (struct member){
            .ring = lab->rings[m],
            .call = {.kind = kind, .dtype = PC_F16, .op = PC_OP_MEAN},
            .in = array,
            .out = array,
            .n_elements = count,
            .timeout_ns = 10 * S};
    }
    all_run(members, lab->n);
    for (uint32_t m = 0; m < lab->n; m++) {
        const uint16_t *out = members[m].out;
        uint64_t low = 0, high = count;
        if (kind == PC_RING_REDUCE_SCATTER)
            low = count * m / lab->n, high = count * (m + 1) / lab->n;
        CHECK(members[m].rc == 0, "%s", members[m].message);
        for (uint64_t i = low; i < high; i++)
            if (out[i] != 0x7b53) {
                CHECK(false, "kind %u: %llu of %llu is %04x", kind, (unsigned long long)i,
                      (unsigned long long)count, out[i]);
                break;
            }
        free(members[m].in);
    }
}

/* Where the one way ends and the other begins. */
static void test_around_the_small_size(void)
{
    for (uint32_t n = 2; n <= 6; n += 1 + n % 2) {
        struct lab lab;
        lab_make(&lab, n, 2, n % 2);
        for (uint32_t kind = 0; kind < PC_RING_BARRIER; kind++)
            for (uint64_t more = 0; more <= 2; more++) {
                one_call(&lab, kind, PC_F64, PC_OP_SUM, SMALL / 8 - 1 + more, more == 1);
                one_call(&lab, kind, PC_F16, PC_OP_MAX, SMALL / 2 - 1 + more, more == 0);
            }
        lab_end(&lab);
    }
}

static void test_mean(void)
{
    struct lab lab;
    lab_make(&lab, 4, 2, false);
    for (int dtype = PC_F32; dtype <= PC_F64; dtype++) {
        one_call(&lab, PC_RING_ALLREDUCE, dtype, PC_OP_MEAN, 100, false);
        one_call(&lab, PC_RING_ALLREDUCE, dtype, PC_OP_MEAN, 50001, true);
        one_call(&lab, PC_RING_REDUCE_SCATTER, dtype, PC_OP_MEAN, 50001, false);
    }
    for (uint64_t count = 3; count < 100000; count += 50000) {
        /* Their sum is more than a half can say; NumPy adds up floats. */
        one_mean_of_halves(&lab, PC_RING_ALLREDUCE, count);
        one_mean_of_halves(&lab, PC_RING_REDUCE_SCATTER, count);
    }
    struct pc_ring_call call = {.kind = PC_RING_ALLREDUCE, .dtype = PC_I32, .op = PC_OP_MEAN};
    int32_t x = 1;
    CHECK(pc_ring_run(lab.rings[0], &call, &x, &x, 1, S) == PC_ERR_RANGE, "a mean of integers");
    lab_end(&lab);
}

/* Halves: every number there and back, and sums against those of the C library's rounding. */
static void test_halves(void)
{
    for (int dtype = PC_F16; dtype <= PC_BF16; dtype++) {
        pc__reduce_fn *add = pc__reducer(dtype, PC_OP_SUM), *most = pc__reducer(dtype, PC_OP_MAX);
        for (uint32_t bits = 0; bits < 65536; bits++) {
            uint16_t x = (uint16_t)bits, zero = 0x8000, out;
            add(&out, &x, &zero, 1);
            bool nan = (bits & 0x7fff) > (dtype == PC_F16 ? 0x7c00u : 0x7f80u);
            CHECK(nan ? (out & 0x7fff) > (dtype == PC_F16 ? 0x7c00 : 0x7f80) : out == x,
                  "dtype %d: %04x became %04x", dtype, bits, out);
            uint16_t one = dtype == PC_F16 ? 0x3c00 : 0x3f80;
            most(&out, &one, &x, 1);
            if (nan)
                CHECK(out == x || (out & 0x7fff) > 0x7c00, "a NaN is lost: %04x", out);
        }
    }
    pc__reduce_fn *add = pc__reducer(PC_F16, PC_OP_SUM);
    /* 2048 + 1 is a tie, to even; 2048 + 3 is one to 2052; 65504 + 16 rounds to infinity. */
    static const uint16_t cases[][3] = {{0x6800, 0x3c00, 0x6800}, {0x6800, 0x4200, 0x6802},
                                        {0x7bff, 0x4c00, 0x7c00}, {0x0001, 0x0001, 0x0002},
                                        {0x03ff, 0x0001, 0x0400}, {0xfc00, 0x3c00, 0xfc00}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint16_t out;
        add(&out, &cases[i][0], &cases[i][1], 1);
        CHECK(out == cases[i][2], "%04x + %04x = %04x", cases[i][0], cases[i][1], out);
    }
}

static void test_numbers_as_numpy_has_them(void)
{
    double nan = NAN, inf = INFINITY, one = 1, out;
    pc__reducer(PC_F64, PC_OP_MIN)(&out, &one, &nan, 1);
    CHECK(isnan(out), "min(1, nan) is %f", out);
    pc__reducer(PC_F64, PC_OP_MAX)(&out, &nan, &one, 1);
    CHECK(isnan(out), "max(nan, 1) is %f", out);
    double minus = -inf;
    pc__reducer(PC_F64, PC_OP_SUM)(&out, &inf, &minus, 1);
    CHECK(isnan(out), "inf - inf is %f", out);
    int32_t most = INT32_MAX, by = 1, wrapped;
    pc__reducer(PC_I32, PC_OP_SUM)(&wrapped, &most, &by, 1);
    CHECK(wrapped == INT32_MIN, "it wrapped to %d", wrapped);
    int64_t large = INT64_MAX, two = 2, product;
    pc__reducer(PC_I64, PC_OP_PROD)(&product, &large, &two, 1);
    CHECK(product == -2, "it wrapped to %lld", (long long)product);
}

static void test_the_same_bits_everywhere(void)
{
    for (int large = 0; large < 2; large++) {
        uint64_t count = large ? 60000 : 300;
        double *first = malloc(count * sizeof *first);
        for (int run = 0; run < 2; run++) {
            struct lab lab;
            random_state = 17; /* the same numbers, and the same places in the ring */
            lab_make(&lab, 5, 2, run == 1);
            struct member members[MAX_MEMBERS] = {0};
            for (uint32_t m = 0; m < 5; m++) {
                double *in = malloc(count * sizeof *in);
                for (uint64_t i = 0; i < count; i++)
                    in[i] = (double)random_next() / 1e10 * (random_next() % 2 ? 1 : -1e-9);
                members[m] = (struct member){
                    .ring = lab.rings[m],
                    .call = {.kind = PC_RING_ALLREDUCE, .dtype = PC_F64, .op = PC_OP_SUM},
                    .in = in,
                    .out = malloc(count * sizeof(double)),
                    .n_elements = count,
                    .timeout_ns = 10 * S,
                    .later_ns = run ? (5 - m) * MS : 0};
            }
            all_run(members, 5);
            if (!run)
                memcpy(first, members[0].out, count * sizeof *first);
            for (uint32_t m = 0; m < 5; m++) {
                CHECK(memcmp(members[m].out, first, count * sizeof *first) == 0,
                      "run %d, member %u: other bits", run, m);
                free(members[m].in);
                free(members[m].out);
            }
            lab_end(&lab);
        }
        free(first);
    }
}

/* One asks for something else: all hear of it, nothing has moved, and the next call works. */
static void test_mismatch(void)
{
    for (uint32_t n = 2; n <= MAX_MEMBERS; n++)
        for (uint32_t odd = 0; odd < n; odd++)
            for (int large = 0; large < 2; large++) {
                struct lab lab;
                lab_make(&lab, n, 2, false);
                struct member members[MAX_MEMBERS] = {0};
                static double in[MAX_MEMBERS][20000], out[MAX_MEMBERS][20000];
                for (uint32_t m = 0; m < n; m++) {
                    uint64_t count = large ? 20000 : 8;
                    if (m == odd)
                        count = odd % 2 ? 9 : 19999;
                    in[m][0] = 3;
                    out[m][0] = 7;
                    members[m] = (struct member){.ring = lab.rings[m],
                                                 .call = {.kind = PC_RING_ALLREDUCE,
                                                          .dtype = PC_F64,
                                                          .op = PC_OP_SUM,
                                                          .n_dims = 1,
                                                          .dims = {count}},
                                                 .in = in[m],
                                                 .out = out[m],
                                                 .n_elements = count,
                                                 .timeout_ns = 10 * S};
                }
                all_run(members, n);
                for (uint32_t m = 0; m < n; m++) {
                    struct pc_ring_fault *fault = &members[m].fault;
                    CHECK(members[m].rc == PC_ERR_MISMATCH, "member %u: %s", m,
                          pc_strerror(members[m].rc));
                    CHECK(fault->member == odd || fault->other == odd, "it is not said who");
                    CHECK(fault->call.dims[0] != fault->other_call.dims[0], "nor what");
                    CHECK(out[m][0] == 7 && in[m][0] == 3, "something has moved");
                }
                one_call(&lab, PC_RING_ALLREDUCE, PC_I64, PC_OP_SUM, 5000, false);
                lab_end(&lab);
            }
}

/* One goes away at some moment of a large call; the others must not wait for the deadline. */
static void test_a_member_goes(void)
{
    for (uint32_t n = 2; n <= 6; n++)
        for (int how = 0; how < 2; how++) {
            struct lab lab;
            lab_make(&lab, n, 2, how == 1);
            struct member members[MAX_MEMBERS] = {0};
            uint64_t count = 3 << 20;
            uint32_t gone = n / 2;
            for (uint32_t m = 0; m < n; m++) {
                members[m] = (struct member){
                    .ring = lab.rings[m],
                    .call = {.kind = PC_RING_ALLREDUCE, .dtype = PC_F64, .op = PC_OP_SUM},
                    .in = calloc(count, sizeof(double)),
                    .out = malloc(count * sizeof(double)),
                    .n_elements = count,
                    .timeout_ns = 30 * S};
                REQUIRE(pthread_create(&members[m].thread, NULL, member_main, &members[m]) == 0);
            }
            pause_ns(how ? 3 * MS : 0);
            pc_ring_shut(lab.rings[gone]);
            struct timespec begun, over;
            clock_gettime(CLOCK_MONOTONIC, &begun);
            for (uint32_t m = 0; m < n; m++)
                pthread_join(members[m].thread, NULL);
            clock_gettime(CLOCK_MONOTONIC, &over);
            CHECK(over.tv_sec - begun.tv_sec < 20, "they waited for %lld s",
                  (long long)(over.tv_sec - begun.tv_sec));
            bool done = members[gone].rc == PC_OK; /* it may have been over by then */
            for (uint32_t m = 0; m < n; m++) {
                int want = m == gone ? PC_ERR_CLOSED : PC_ERR_MEMBER;
                CHECK(done || members[m].rc == want || members[m].rc == PC_OK, "member %u: %s", m,
                      pc_strerror(members[m].rc));
                if (m != gone && members[m].rc) {
                    CHECK(!members[m].fault.is_silent, "an end is no silence");
                    double x = 0;
                    CHECK(pc_ring_run(members[m].ring, &members[m].call, &x, &x, 1, S) ==
                              members[m].rc,
                          "a broken ring does not say so");
                }
                free(members[m].in);
                free(members[m].out);
            }
            lab_end(&lab);
        }
}

static void test_a_member_says_nothing(void)
{
    for (int large = 0; large < 2; large++) {
        struct lab lab;
        lab_make(&lab, 3, 1, false);
        struct member members[MAX_MEMBERS] = {0};
        double *array = calloc(20000, sizeof *array);
        for (uint32_t m = 0; m < 2; m++)
            members[m] = (struct member){
                .ring = lab.rings[m],
                .call = {.kind = PC_RING_ALLREDUCE, .dtype = PC_F64, .op = PC_OP_SUM},
                .in = array,
                .out = calloc(20000, sizeof *array),
                .n_elements = large ? 20000 : 8,
                .timeout_ns = 200 * MS};
        all_run(members, 2);
        CHECK(members[0].rc == PC_ERR_MEMBER && members[1].rc == PC_ERR_MEMBER, "%d %d",
              members[0].rc, members[1].rc);
        CHECK(members[0].fault.is_silent || members[1].fault.is_silent, "nobody was silent");
        for (uint32_t m = 0; m < 2; m++)
            free(members[m].out);
        free(array);
        lab_end(&lab);
    }
}

struct swapper {
    pc_ring *ring;
    uint32_t rank;
    uint32_t before;           /* rank of the member */
    pthread_t thread;
};

static void *swapper_main(void *arg)
{
    struct swapper *me = arg;
    for (uint32_t round = 0; round < 4; round++) {
        uint64_t mine = round == 2 ? 0 : (uint64_t)(me->rank + 1) * 30000 * round, theirs = 0;
        uint32_t before = me->before;
        uint8_t *out = malloc(mine + 1);
        memset(out, (int)me->rank + 1, mine);
        CHECK(pc_ring_swap_sizes(me->ring, mine, &theirs, 10 * S) == 0, "%s", pc_last_message());
        CHECK(theirs == (round == 2 ? 0 : (uint64_t)(before + 1) * 30000 * round), "other size");
        uint8_t *in = malloc(theirs + 1);
        CHECK(pc_ring_swap(me->ring, out, mine, in, theirs, 10 * S) == 0, "%s",
              pc_last_message());
        for (uint64_t i = 0; i < theirs; i++)
            if (in[i] != before + 1) {
                CHECK(false, "byte %llu is %u", (unsigned long long)i, in[i]);
                break;
            }
        free(in);
        free(out);
    }
    return NULL;
}

static void test_swap(void)
{
    for (uint32_t n = 2; n <= 4; n++) {
        struct lab lab;
        struct swapper swappers[4];
        lab_make(&lab, n, 1, true);
        for (uint32_t m = 0; m < n; m++) {
            swappers[m] = (struct swapper){lab.rings[lab.ranks[m]], lab.ranks[m],
                                           lab.ranks[(m + n - 1) % n], 0};
            pthread_create(&swappers[m].thread, NULL, swapper_main, &swappers[m]);
        }
        for (uint32_t m = 0; m < n; m++)
            pthread_join(swappers[m].thread, NULL);
        lab_end(&lab);
    }
}

static void *late_main(void *arg)
{
    struct swapper *me = arg;
    uint64_t theirs;
    static uint8_t out[100000];
    pause_ns(20 * MS);
    CHECK(pc_ring_swap_sizes(me->ring, sizeof out, &theirs, 10 * S) == 0, "%s", pc_last_message());
    CHECK(pc_ring_swap(me->ring, out, sizeof out, NULL, 0, 10 * S) == 0, "%s", pc_last_message());
    pc_ring_close(me->ring);
    return NULL;
}

/* One sends, is done, and goes; who still waits for it gets all of it. */
static void test_gone_when_all_is_said(void)
{
    for (int round = 0; round < 5; round++) {
        struct lab lab;
        lab_make(&lab, 2, 1, round % 2);
        struct swapper late = {lab.rings[0], 0, 1, 0};
        lab.rings[0] = NULL;
        pthread_create(&late.thread, NULL, late_main, &late);
        uint64_t theirs = 0;
        static uint8_t in[100000];
        CHECK(pc_ring_swap_sizes(lab.rings[1], 0, &theirs, 10 * S) == 0, "%s", pc_last_message());
        CHECK(theirs == sizeof in, "%llu bytes", (unsigned long long)theirs);
        CHECK(pc_ring_swap(lab.rings[1], NULL, 0, in, sizeof in, 10 * S) == 0, "%s",
              pc_last_message());
        pthread_join(late.thread, NULL);
        lab_end(&lab);
    }
}

/* What a stranger could send on a partner's connection. */
static void test_nonsense(void)
{
    for (int what = 0; what < 3; what++) {
        int next[2], previous[2], partner[2];
        pair(false, next);
        pair(false, previous);
        pair(false, partner);
        uint32_t ranks[] = {0, 1};
        struct pc_ring_options options = {.position = 0,
                                          .n_members = 2,
                                          .ranks = ranks,
                                          .n_lanes = 1,
                                          .small_bytes = SMALL,
                                          .next_fds = next,
                                          .previous_fds = previous,
                                          .n_partner_fds = 1,
                                          .partner_fds = partner};
        pc_ring *ring;
        REQUIRE(pc_ring_open(&options, &ring) == 0);
        uint64_t words[64];
        memset(words, what == 0 ? 0xff : 0, sizeof words);
        if (what == 1)
            words[0] = 0x52676e69u, words[2] = 1ull << 60; /* a payload without end */
        if (what == 2)
            words[0] = 0x52676e69u, words[3] = 77; /* member 77 */
        REQUIRE(write(partner[1], words, sizeof words) == sizeof words);
        struct pc_ring_call call = {.kind = PC_RING_BARRIER, .dtype = PC_BYTES};
        CHECK(pc_ring_run(ring, &call, NULL, NULL, 0, S) == PC_ERR_PROTOCOL, "it was believed");
        pc_ring_close(ring);
        close(next[1]);
        close(previous[1]);
        close(partner[1]);
    }
}

static void test_partners(void)
{
    for (uint32_t n = 1; n <= 300; n++)
        for (uint32_t i = 0; i < n; i++) {
            uint32_t mine[PC_RING_PARTNERS], theirs[PC_RING_PARTNERS];
            int count = pc_ring_partners(i, n, mine);
            CHECK(count >= (n > 1) && count <= PC_RING_PARTNERS, "%d partners", count);
            for (int p = 0; p < count; p++) {
                int back = pc_ring_partners(mine[p], n, theirs), found = 0;
                for (int q = 0; q < back; q++)
                    found += theirs[q] == i;
                CHECK(found == 1 && mine[p] != i, "member %u of %u and %u", i, n, mine[p]);
            }
        }
    uint32_t out[PC_RING_PARTNERS];
    CHECK(pc_ring_partners(3, 3, out) == PC_ERR_RANGE, "member 3 of 3");
}

int main(void)
{
    alarm(240);
    if (!hunts_races()) { /* one thread each */
        test_partners();
        test_halves();
        test_numbers_as_numpy_has_them();
    }
    test_nonsense();
    test_swap();
    test_gone_when_all_is_said();
    test_mean();
    test_around_the_small_size();
    test_all_kinds();
    test_the_same_bits_everywhere();
    test_mismatch();
    test_a_member_says_nothing();
    test_a_member_goes();
    return test_result();
}
