/* test_client_sessions.c - clients of several sessions in one process, over each trap: no session's
 * memory ever takes the place of another's, also after the end of one. */
#include "tests/support/client_world.h"

#include <errno.h>
#include <sys/syscall.h>

/* The library's, too: the kernel refuses a guard while this is set, as where a process has all the maps
 * that it may have. */
static volatile bool no_guards;
void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset)
{
    if (no_guards && prot == PROT_NONE && flags & MAP_FIXED && flags & MAP_ANONYMOUS) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, address, length, prot, flags, fd, offset);
}

#define OTHER_CONTENT 77
#define OTHER_BASE (BASE + ((uint64_t)512 << 20)) /* of the other session's region */

/* A second session: a server of its own, whose PAGED is another region of other bytes. */
static void other_make(struct world *other, const struct world *first, uint64_t base)
{
    world_make(other, first->trap);
    other->fake->regions[0].base = base;
    other->fake->regions[0].content = OTHER_CONTENT;
}

static bool shows(const struct pc_mapping *mapping, uint64_t content)
{
    bool is_right = true;
    for (uint64_t block = 0; block < BLOCKS; block += 37)
        is_right = is_right && block_is_right(mapping, content, block);
    return is_right;
}

/* Whether nobody else could map a block there. */
static bool is_taken(uint64_t address)
{
    void *at = mmap((void *)(uintptr_t)address, 4096, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != MAP_FAILED)
        munmap(at, 4096);
    return at == MAP_FAILED && errno == EEXIST;
}

static void test_at_once(struct world *world)
{
    struct world other;
    other_make(&other, world, OTHER_BASE);
    pc_client *a = world_client(world), *b = world_client(&other);
    struct pc_mapping of_a = world_map(world, a, PAGED, 0), of_b = world_map(&other, b, PAGED, 0);
    CHECK(of_a.address == BASE && of_b.address == OTHER_BASE, "%#lx", of_b.address);
    CHECK(shows(&of_a, PAGED) && shows(&of_b, OTHER_CONTENT), "each its own bytes");
    OK(pc_client_close(a));
    CHECK(shows(&of_b, OTHER_CONTENT), "after the end of the first");
    CHECK(is_taken(of_a.address), "what is still looked at is free for others");
    OK(pc_ended_unmap(of_a.address));
    CHECK(!is_taken(of_a.address), "nobody looks at it any more");
    FAILS(pc_ended_unmap(of_a.address), PC_ERR_NO_REGION, "nothing of an ended session");
    a = world_client(world); /* the first again */
    of_a = world_map(world, a, PAGED, 0);
    CHECK(shows(&of_a, PAGED) && shows(&of_b, OTHER_CONTENT), "both again");
    OK(pc_client_close(b));
    CHECK(shows(&of_a, PAGED), "after the end of the other");
    OK(pc_client_close(a));
}

static void test_same_addresses(struct world *world)
{
    struct world other;
    other_make(&other, world, BASE); /* as if its addresses were given out twice */
    other.fake->regions[WHOLE - 1].base = BASE + 4096;
    pc_client *a = world_client(world), *b = world_client(&other);
    struct pc_mapping of_a = world_map(world, a, PAGED, 0), of_b;
    struct pc_mapping again = world_map(world, a, PAGED, 0); /* two users of one mapping */
    CHECK(again.id == of_a.id && shows(&of_a, PAGED), "one mapping");
    OK(pc_client_close(a));
    for (int users = 2; users > 0; users--) {
        FAILS(try_map(&other, b, PAGED, PC_MAP_FIXED, SECOND, &of_b), PC_ERR_CLASH, "must be mapped at");
        FAILS(try_map(&other, b, WHOLE, PC_MAP_FIXED, SECOND, &of_b), PC_ERR_CLASH, "must be mapped at");
        of_b = world_map(&other, b, WHOLE, 0); /* need not lie there: it gets another place */
        CHECK(of_b.address != BASE + 4096 && block_is_right(&of_b, WHOLE, 0), "%#lx", of_b.address);
        OK(pc_client_unmap(b, of_b.id));
        OK(pc_ended_unmap(of_a.address));
    }
    of_b = world_map(&other, b, PAGED, PC_MAP_FIXED);
    CHECK(of_b.address == BASE && shows(&of_b, OTHER_CONTENT), "%#lx", of_b.address);
    OK(pc_client_close(b));
}

/* A second version and a private copy lie where the kernel found room: that too stays theirs. */
static void test_elsewhere(struct world *world)
{
    enum { N = 64 };
    struct world other;
    other_make(&other, world, OTHER_BASE);
    pc_client *a = world_client(world), *b = world_client(&other);
    struct pc_mapping kept[3];
    kept[0] = world_map(world, a, PAGED, 0);
    kept[1] = world_map_newer(world, a, 0);
    kept[2] = world_map(world, a, PAGED, PC_MAP_PRIVATE);
    OK(pc_client_close(a));
    for (int i = 0; i < N; i++) {
        struct pc_mapping copy = world_map(&other, b, PAGED, PC_MAP_PRIVATE);
        for (int k = 0; k < 3; k++)
            CHECK(copy.address + LENGTH <= kept[k].address || kept[k].address + LENGTH <= copy.address,
                  "copy %d lies over mapping %d of the ended session", i, k);
    }
    for (int k = 0; k < 3; k++)
        OK(pc_ended_unmap(kept[k].address));
    OK(pc_client_close(b));
}

static void touch_after_the_end(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 3), "it is there");
    OK(pc_client_close(client));
    load(mapping.address + 4096 * 3);
}

static void touch_a_copy_after_the_end(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping first = world_map(world, client, PAGED, 0);
    struct pc_mapping mapping = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    CHECK(mapping.address != first.address, "elsewhere");
    OK(pc_client_close(client));
    store(mapping.address + 4096 * 7, 1);
}

static void touch_after_the_end_without_a_guard(struct world *world)
{
    no_guards = true;
    touch_after_the_end(world);
}

/* Its addresses are nobody else's all the same, and are given back by its users. */
static void test_no_guard(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    struct pc_mapping again = world_map(world, client, PAGED, 0);
    CHECK(again.id == mapping.id && block_is_right(&mapping, PAGED, 3), "it is there");
    no_guards = true;
    OK(pc_client_close(client));
    no_guards = false;
    for (int users = 2; users > 0; users--) {
        CHECK(is_taken(mapping.address), "what is still looked at is free for others");
        OK(pc_ended_unmap(mapping.address));
    }
    CHECK(!is_taken(mapping.address), "nobody looks at it any more");
    expect_end(world, touch_after_the_end_without_a_guard, 70, "its session has ended");
}

static void touch_when_nobody_kept_it(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    OK(pc_client_close(client));
    OK(pc_ended_unmap(mapping.address));
    load(mapping.address);
}

static void test_touches(struct world *world)
{
    expect_end(world, touch_after_the_end, 70, "variable 1 version 5 block 3");
    expect_end(world, touch_after_the_end, 70, "its session has ended (clamor.shutdown()");
    expect_end(world, touch_a_copy_after_the_end, 70, "its session has ended (clamor.shutdown()");
    expect_end(world, touch_when_nobody_kept_it, 70, "its session has ended");
}

struct opener {
    pthread_t thread;
    struct world *world;
    uint64_t content;
    int n_wrong;
};

static void *open_and_read(void *arg)
{
    struct opener *opener = arg;
    for (int i = 0; i < 5; i++) {
        pc_client *client = world_client(opener->world);
        struct pc_mapping mapping = world_map(opener->world, client, PAGED, 0);
        opener->n_wrong += !shows(&mapping, opener->content);
        OK(pc_client_unmap(client, mapping.id));
        OK(pc_client_close(client));
    }
    return NULL;
}

/* Sessions begin and end in several threads, while a child is forked. */
static void test_threads(struct world *world)
{
    struct world other;
    other_make(&other, world, OTHER_BASE);
    struct opener openers[2] = {{.world = world, .content = PAGED},
                                {.world = &other, .content = OTHER_CONTENT}};
    for (int i = 0; i < 2; i++)
        REQUIRE(pthread_create(&openers[i].thread, NULL, open_and_read, &openers[i]) == 0);
    for (int i = 0; i < 5; i++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            alarm(20);
            _exit(pc_ended_unmap(BASE) == PC_ERR_NO_REGION ? 0 : 1); /* takes the lock */
        }
        int how;
        waitpid(pid, &how, 0);
        CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0, "the child: %#x", (unsigned)how);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(openers[i].thread, NULL);
        CHECK(openers[i].n_wrong == 0, "%d wrong reads", openers[i].n_wrong);
    }
}

/* ------------------------------------------------- the page server says that it has ended */

static void test_told(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0), other;
    CHECK(block_is_right(&mapping, PAGED, 3) && !pc_client_has_ended(client), "as always");
    uint64_t begun = now_ns();
    world->fake->end_session = 1;
    EVENTUALLY(pc_client_has_ended(client));
    FAILS(try_map(world, client, WHOLE, 0, 30 * SECOND, &other), PC_ERR_ENDED, "page server");
    const struct pc_run all = {0, BLOCKS};
    FAILS(pc_client_prefetch(client, mapping.id, &all, 1, 1, 30 * SECOND), PC_ERR_ENDED, "page server");
    CHECK(now_ns() - begun < 10 * SECOND, "at once, not after a wait");
    CHECK(block_is_right(&mapping, PAGED, 3), "what is here stays");
    OK(pc_client_unmap(client, mapping.id));
    OK(pc_client_close(client));
    CHECK(!is_taken(mapping.address), "unmapped");
}

/* It ends with words of this process unread: what it said last is heard all the same. */
static void test_told_with_words_unread(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    kill(world->server, SIGSTOP);
    OK(pc_client_unmap(client, mapping.id));
    world->fake->end_session = 1;
    kill(world->server, SIGCONT);
    EVENTUALLY(pc_client_has_ended(client));
    OK(pc_client_close(client));
}

static void *map_stalled(void *arg)
{
    struct world *world = arg;
    pc_client *client = world_client(world);
    struct pc_mapping mapping;
    FAILS(try_map(world, client, PAGED, 0, 50 * SECOND, &mapping), PC_ERR_ENDED, "page server");
    OK(pc_client_close(client));
    return NULL;
}

/* Who waits for an answer has one. */
static void test_told_while_it_waits(struct world *world)
{
    pthread_t thread;
    world->fake->stall_open = 1;
    uint64_t begun = now_ns();
    REQUIRE(pthread_create(&thread, NULL, map_stalled, world) == 0);
    EVENTUALLY(world->fake->opens > 0);
    world->fake->end_session = 1;
    pthread_join(thread, NULL);
    CHECK(now_ns() - begun < 30 * SECOND, "at once, not after a wait");
}

static void touch_what_is_absent(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    CHECK(block_is_right(&mapping, PAGED, 3), "it is there");
    world->fake->end_session = 1;
    EVENTUALLY(pc_client_has_ended(client));
    load(mapping.address + 4096 * 777);
}

/* A thread is stopped there when the session ends; the old server took the fault. */
static void wait_for_what_is_absent(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    world->fake->end_at_fault = 1;
    load(mapping.address + 4096 * 777);
}

static void test_told_and_touched(struct world *world)
{
    struct world other;
    world->reattach_ns = 60 * SECOND; /* nobody waits for that */
    other_make(&other, world, BASE);
    other.reattach_ns = 60 * SECOND;
    expect_end(world, touch_what_is_absent, 70, "block 777 (address 0x");
    CHECK(world->fake->end_session == 1, "ended");
    expect_end(&other, wait_for_what_is_absent, 70, "its session has ended (clamor.shutdown()");
}

static void test_told_and_forked(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping mapping = world_map(world, client, PAGED, 0);
    world->fake->end_session = 1;
    EVENTUALLY(pc_client_has_ended(client));
    uint64_t begun = now_ns();
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0)
        _exit(pc_client_after_fork(client) == PC_ERR_ENDED ? 0 : 1);
    int how;
    waitpid(pid, &how, 0);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0, "the child: %#x", (unsigned)how);
    CHECK(now_ns() - begun < 5 * SECOND, "it did not look for a server");
    OK(pc_client_close(client));
    OK(pc_ended_unmap(mapping.address));
}

#include "tests/support/client_main.h"

int main(int argc, char **argv)
{
    static const struct test tests[] = {TEST(at_once), TEST(same_addresses), TEST(elsewhere), TEST(no_guard),
                                        TEST(touches), TEST(threads), TEST(told),
                                        TEST(told_with_words_unread),
                                        TEST(told_while_it_waits), TEST(told_and_touched),
                                        TEST(told_and_forked)};
    return run_tests(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
}
