/* engine_main.h - runs a table of tests over both traps, each in a process of its own with an alarm. */
#ifndef PC_TEST_ENGINE_MAIN_H
#define PC_TEST_ENGINE_MAIN_H

#include "tests/support/harness.h"

#define TEST_SECONDS 120 /* a net for what hangs, on a busy machine and under TSan */

struct engine_test {
    const char *name;
    void (*run)(int trap);
    unsigned seconds;
};
#define TEST(name) TEST_IN(name, TEST_SECONDS)
#define TEST_IN(name, seconds) {#name, test_##name, seconds}

static inline int run_with(int trap, const struct engine_test *tests, size_t n_tests,
                           const char *only)
{
    int failed = 0;
    for (size_t i = 0; i < n_tests; i++)
        if (!only || !strcmp(only, tests[i].name))
            failed += run_test(tests[i].name, tests[i].run, trap, tests[i].seconds);
    return failed;
}

/* Returns how many failed. Only: the name of one, or NULL. */
static inline int run_over_traps(const struct engine_test *tests, size_t n_tests, const char *only)
{
    return run_with(PC_TRAP_UFFD, tests, n_tests, only) +
           run_with(PC_TRAP_SIGSEGV, tests, n_tests, only);
}

#endif
