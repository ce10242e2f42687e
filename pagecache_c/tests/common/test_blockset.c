/* test_blockset.c - the sparse set against a plain array of flags. */
#include "tests/support/harness.h"

#include "common/blockset.h"

#define BLOCKS (3 * PC_EXTENT_BLOCKS + 77)

static bool plain[BLOCKS];

static void test_random(int seed_number)
{
    struct pc__blockset set;
    OK(pc__blockset_init(&set, BLOCKS));
    memset(plain, 0, sizeof plain);
    unsigned seed = (unsigned)seed_number;
    for (int step = 0; step < 3000; step++) {
        uint64_t first = ((uint64_t)rand_r(&seed) * 31) % BLOCKS;
        uint64_t n = 1 + (uint64_t)rand_r(&seed) % (step % 10 ? 70 : 40000);
        n = n < BLOCKS - first ? n : BLOCKS - first;
        int64_t changed = 0;
        uint64_t count = 0, next = first + n, next_absent = first + n;
        for (uint64_t b = first + n; b-- > first;) {
            count += plain[b];
            if (plain[b])
                next = b;
            else
                next_absent = b;
        }
        CHECK(pc__blockset_count(&set, first, n) == count);
        CHECK(pc__blockset_next(&set, first, first + n) == next);
        CHECK(pc__blockset_next_absent(&set, first, first + n) == next_absent);
        CHECK(pc__blockset_has(&set, first) == plain[first]);
        bool add = rand_r(&seed) % 2;
        for (uint64_t b = first; b < first + n; b++) {
            changed += plain[b] != add;
            plain[b] = add;
        }
        CHECK((add ? pc__blockset_add(&set, first, n) : pc__blockset_remove(&set, first, n)) ==
              changed);
    }
    uint64_t total = 0;
    for (uint64_t b = 0; b < BLOCKS; b++)
        total += plain[b];
    CHECK(set.n_set == total);
    pc__blockset_free(&set);
}

static void test_huge_and_empty(int unused)
{
    (void)unused;
    struct pc__blockset set;
    OK(pc__blockset_init(&set, 1ull << 28)); /* 1 TiB */
    CHECK(pc__blockset_next(&set, 0, 1ull << 28) == 1ull << 28);
    CHECK(pc__blockset_next_absent(&set, 5, 1ull << 28) == 5);
    CHECK(pc__blockset_add(&set, (1ull << 28) - 1, 1) == 1);
    CHECK(pc__blockset_next(&set, 0, 1ull << 28) == (1ull << 28) - 1);
    pc__blockset_free(&set);
}

int main(void)
{
    int failed = 0;
    for (int seed = 1; seed <= 5; seed++)
        failed += run_test("random", test_random, seed, 60);
    failed += run_test("huge_and_empty", test_huge_and_empty, 0, 60);
    return failed != 0;
}
