/* client_main.h - runs a table of tests over every trap, each in a process of its own with an
 * alarm, so that a crash or a hang is one failed test. */
#ifndef PC_TESTS_CLIENT_MAIN_H
#define PC_TESTS_CLIENT_MAIN_H

#include "tests/support/client_world.h"
#include "tests/support/length.h"

#define TEST_SECONDS 240 /* a busy machine, under TSan */

struct test {
    const char *name;
    void (*run)(struct world *world);
};
#define TEST(name) {#name, test_##name}

static inline bool trap_works(int trap)
{
    struct world world;
    pid_t pid = fork();
    if (pid == 0) {
        world_make(&world, trap);
        struct pc_client_options options = world_options(&world);
        pc_client *client;
        int rc = pc_client_open(&options, &client);
        if (rc)
            fprintf(stderr, "trap %d: %s (%s)\n", trap, pc_strerror(rc), pc_last_message());
        _exit(rc == PC_ERR_NO_TRAP ? TEST_SKIPPED : rc != 0);
    }
    int how;
    waitpid(pid, &how, 0);
    return WIFEXITED(how) && WEXITSTATUS(how) == 0;
}

static inline int run_tests(const struct test *tests, size_t n_tests, const char *only)
{
    static const struct {
        int trap;
        const char *name;
    } traps[] = {{PC_TRAP_UFFD_FULL, "uffd-full"},
                 {PC_TRAP_UFFD_USER, "uffd-user"},
                 {PC_TRAP_SIGSEGV, "sigsegv"}};
    int n_failed = 0, n_run = 0;
    for (size_t t = 0; t < sizeof traps / sizeof traps[0]; t++) {
        if (!trap_works(traps[t].trap)) {
            printf("skip %s: the kernel does not give it here\n", traps[t].name);
            continue;
        }
        for (size_t i = 0; i < n_tests; i++) {
            if (only && strcmp(only, tests[i].name) != 0)
                continue;
            fflush(stdout);
            fflush(stderr);
            uint64_t begun = now_ns();
            pid_t pid = fork();
            if (pid == 0) {
                struct world world;
                alarm(TEST_SECONDS);
                world_make(&world, traps[t].trap);
                tests[i].run(&world);
                exit(test_result());
            }
            int how;
            struct rusage used;
            REQUIRE(wait4(pid, &how, 0, &used) == pid);
            bool passed = WIFEXITED(how) && WEXITSTATUS(how) == 0;
            printf("%s %s/%s (%lu ms, %lu of them computing)", passed ? "ok  " : "FAIL",
                   traps[t].name, tests[i].name, (unsigned long)((now_ns() - begun) / MS),
                   computed_ms(&used));
            if (!passed)
                printf(WIFSIGNALED(how) ? ": signal %d" : ": status %d",
                       WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
            printf("\n");
            n_failed += !passed;
            n_run++;
        }
    }
    printf("%d run, %d failed\n", n_run, n_failed);
    return n_run == 0 ? TEST_SKIPPED : n_failed != 0;
}

#endif
