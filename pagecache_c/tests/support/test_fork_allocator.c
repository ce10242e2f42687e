/* test_fork_allocator.c - children of forks that come beside threads that allocate: each allocates and
 * ends. Under ASan some hang without fork_allocator.c. */
#include "tests/support/harness.h"

#if defined(__SANITIZE_ADDRESS__)
/* What was freed is kept by ASan, 256 MiB: a fork copies the page tables of that. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "quarantine_size_mb=1";
}
#endif

#define ALLOCATING 4
#define FORKS 200

static _Atomic bool stop;

static void allocate(unsigned *seed, int n)
{
    for (int i = 0; i < n; i++) { /* of many sizes, so that each size's own lock is taken */
        char *block = malloc(1 + (size_t)(rand_r(seed) % 2000));
        char *more = realloc(block, 1 + (size_t)(rand_r(seed) % 3000));
        *more = (char)i;
        free(more);
    }
}

static void *allocate_all_the_time(void *arg)
{
    unsigned seed = *(unsigned *)arg;
    while (!stop)
        allocate(&seed, 100);
    return NULL;
}

static void test_children_allocate(int unused)
{
    (void)unused;
    pthread_t threads[ALLOCATING];
    unsigned seeds[ALLOCATING];
    for (unsigned i = 0; i < ALLOCATING; i++) {
        seeds[i] = i + 1;
        CHECK(!pthread_create(&threads[i], NULL, allocate_all_the_time, &seeds[i]));
    }
    for (unsigned round = 0; round < FORKS; round++) {
        int status;
        const pid_t child = fork();
        if (!child) {
            alarm(30); /* it hangs */
            unsigned seed = round;
            allocate(&seed, 50);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    stop = true;
    for (int i = 0; i < ALLOCATING; i++)
        CHECK(!pthread_join(threads[i], NULL));
}

/* Two threads that fork at once, and children that fork again. */
static void *fork_again(void *arg)
{
    (void)arg;
    for (int round = 0; round < 20; round++) {
        int status;
        const pid_t child = fork();
        if (!child) {
            const pid_t grandchild = fork();
            if (!grandchild)
                _exit(0);
            free(malloc(1000));
            _exit(waitpid(grandchild, &status, 0) == grandchild ? status : 1);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    return NULL;
}

static void test_forks_at_once(int unused)
{
    (void)unused;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_create(&threads[i], NULL, fork_again, NULL));
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_join(threads[i], NULL));
}

int main(void)
{
    int failed = run_test("children_allocate", test_children_allocate, 0, 120);
    failed += run_test("forks_at_once", test_forks_at_once, 0, 60);
    return failed != 0;
}
