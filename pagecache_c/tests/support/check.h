/* check.h - what a test program needs: CHECK that says what was wrong and goes on, and an end. */
#ifndef PC_TESTS_CHECK_H
#define PC_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

static int n_check_failures;

#define CHECK(condition, ...) \
    do { \
        if (!(condition)) { \
            n_check_failures++; \
            fprintf(stderr, "%s:%d: not so: %s; ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__); \
            fputc('\n', stderr); \
        } \
    } while (0)

/* For what everything after it needs. */
#define REQUIRE(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: cannot go on without: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

#define TEST_SKIPPED 77

static inline int test_result(void)
{
    if (n_check_failures > 0)
        fprintf(stderr, "%d checks failed\n", n_check_failures);
    return n_check_failures > 0 ? 1 : 0;
}

#endif
