/* test_client_versions.c - the client's contract, over each trap: several versions of a region in
 * one process, where they are mapped, and regions that are built in place. */
#include "tests/support/client_main.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define IS_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define IS_TSAN 1
#endif
#ifndef IS_TSAN
#define IS_TSAN 0
#endif

static void check_all(const struct pc_mapping *mapping, uint64_t content)
{
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(block_is_right(mapping, content, block), "block %lu of %lu", block, content);
}

/* ----------------------------------------------------------------- addresses */

static void test_two_versions(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, 0);
    struct pc_mapping two = world_map_newer(world, client, 0);
    struct pc_mapping again = world_map_newer(world, client, 0);
    CHECK(one.address == BASE && two.address != BASE, "%#lx and %#lx", one.address, two.address);
    CHECK(two.id != one.id && again.id == two.id && again.address == two.address, "shared");
    CHECK(world->fake->opens == 2, "%d opens", world->fake->opens);
    check_all(&two, NEWER_CONTENT);
    check_all(&one, PAGED);
    /* The address goes to the next that asks; who is elsewhere stays there. */
    OK(pc_client_unmap(client, one.id));
    one = world_map(world, client, PAGED, 0);
    CHECK(one.address == BASE && block_is_right(&one, PAGED, 77), "%#lx", one.address);
    OK(pc_client_unmap(client, one.id));
    again = world_map_newer(world, client, 0);
    CHECK(again.id == two.id && again.address != BASE, "a second mapping of one version");
    OK(pc_client_unmap(client, again.id));
    OK(pc_client_unmap(client, again.id));
    check_all(&two, NEWER_CONTENT);
    /* Another client of this process: its map of the region is ours too. */
    pc_client *second = world_client(world);
    one = world_map(world, second, PAGED, 0);
    again = world_map(world, client, PAGED, 0);
    CHECK(one.address == BASE && again.address != BASE, "%#lx, %#lx", one.address, again.address);
    OK(pc_client_close(second));
    check_all(&again, PAGED);
    OK(pc_client_unmap(client, again.id));
    OK(pc_client_unmap(client, two.id));
    EVENTUALLY(world->fake->live_mappings == 0);
    OK(pc_client_close(client));
}

static void test_private_at_its_address(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    struct pc_mapping two = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    struct pc_mapping shared = world_map(world, client, PAGED, 0);
    CHECK(one.address == BASE && two.address != BASE && shared.address != BASE, "%#lx %#lx %#lx",
          one.address, two.address, shared.address);
    store(one.address + 9 * 4096, 1);
    store(two.address + 9 * 4096, 2);
    check_all(&shared, PAGED);
    CHECK(load(one.address + 9 * 4096) == 1 && load(two.address + 9 * 4096) == 2, "apart");
    CHECK(block_is_right(&one, PAGED, 10) && block_is_right(&two, PAGED, 11), "what was not written");
    OK(pc_client_unmap(client, one.id));
    check_all(&shared, PAGED);
    CHECK(load(two.address + 9 * 4096) == 2, "unmapping one hurt two");
    OK(pc_client_close(client));
}

static void test_fixed(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, PC_MAP_FIXED), other;
    const uint64_t flags[] = {PC_MAP_FIXED, PC_MAP_FIXED | PC_MAP_PRIVATE};
    CHECK(one.address == BASE, "%#lx", one.address);
    other = world_map(world, client, PAGED, PC_MAP_FIXED);
    CHECK(other.id == one.id, "one version, one mapping");
    OK(pc_client_unmap(client, other.id));
    for (size_t i = 0; i < 2; i++) {
        FAILS(pc_client_map(client, PAGED, NEWER, BASE, LENGTH, (uint32_t)flags[i], 10 * SECOND, &other),
              PC_ERR_CLASH, "variable 1 version 6");
        CHECK(strstr(pc_last_message(), "version 5 of it"), "%s", pc_last_message());
    }
    /* A version that is mapped elsewhere gets its own address as soon as that is free. */
    struct pc_mapping elsewhere = world_map_newer(world, client, 0);
    OK(pc_client_unmap(client, one.id));
    other = world_map_newer(world, client, PC_MAP_FIXED);
    CHECK(other.address == BASE && other.id != elsewhere.id, "%#lx", other.address);
    check_all(&other, NEWER_CONTENT);
    check_all(&elsewhere, NEWER_CONTENT);
    OK(pc_client_unmap(client, other.id));
    other = world_map(world, client, PAGED, PC_MAP_PRIVATE | PC_MAP_FIXED);
    CHECK(other.address == BASE, "%#lx", other.address);
    FAILS(try_map(world, client, PAGED, PC_MAP_FIXED, 10 * SECOND, &one), PC_ERR_CLASH, "private copy");
    EVENTUALLY(world->fake->live_mappings == 2);
    OK(pc_client_close(client));
}

/* Pieces of one variable lie side by side wherever there is room for all. */
static void test_side_by_side(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping own = world_map(world, client, PAGED, 0), one, two, third;
    uint64_t at;
    OK(pc_addresses_reserve(3 * LENGTH, 0, &at));
    OK(pc_client_map_at(client, PAGED, ANY, BASE, LENGTH, 0, at, 10 * SECOND, &one));
    OK(pc_client_map_at(client, PAGED, NEWER, BASE, LENGTH, 0, at + LENGTH, 10 * SECOND, &two));
    OK(pc_client_map_at(client, PAGED, ANY, BASE, LENGTH, PC_MAP_PRIVATE, at + 2 * LENGTH,
                        10 * SECOND, &third));
    CHECK(one.address == at && two.address == at + LENGTH && third.address == at + 2 * LENGTH,
          "%#lx %#lx %#lx", one.address, two.address, third.address);
    CHECK(one.id != own.id, "shared with who lies elsewhere");
    check_all(&two, NEWER_CONTENT);
    store(third.address, 17);
    check_all(&one, PAGED);
    check_all(&own, PAGED);
    CHECK(load(third.address) == 17 && block_is_right(&third, PAGED, 3), "the private one");
    /* Who asks for the version has the one at its address, or one of those. */
    OK(pc_client_unmap(client, two.id));
    CHECK(mmap((void *)(uintptr_t)(at + LENGTH), LENGTH, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != MAP_FAILED,
          "its addresses are given back");
    OK(pc_addresses_release(at + LENGTH, LENGTH));
    OK(pc_client_unmap(client, one.id));
    OK(pc_client_unmap(client, third.id));
    /* What fails gives the addresses back, and no others. */
    OK(pc_addresses_reserve(2 * LENGTH, 0, &at));
    FAILS(pc_client_map_at(client, PAGED, ANY, BASE, LENGTH, PC_MAP_FIXED, at, 10 * SECOND, &one),
          PC_ERR_RANGE, "cannot be mapped at");
    FAILS(pc_client_map_at(client, PAGED, ANY + 2, BASE, LENGTH, 0, at + LENGTH, 10 * SECOND, &one),
          PC_ERR_NO_REGION, "");
    for (uint64_t i = 0; i < 2; i++)
        CHECK(mmap((void *)(uintptr_t)(at + i * LENGTH), LENGTH, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != MAP_FAILED,
              "addresses that are still taken: %lu", i);
    OK(pc_addresses_release(at, 2 * LENGTH));
    EVENTUALLY(world->fake->live_mappings == 1);
    OK(pc_client_close(client));
}

static void test_foreign_memory(struct world *world)
{
    void *at = (void *)(uintptr_t)(BASE + LENGTH - 4096);
    REQUIRE(mmap(at, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) ==
            at);
    pc_client *client = world_client(world);
    struct pc_mapping one, two;
    FAILS(try_map(world, client, PAGED, 0, 10 * SECOND, &one), PC_ERR_CLASH, "where this process has");
    FAILS(try_map(world, client, PAGED, PC_MAP_FIXED | PC_MAP_PRIVATE, 10 * SECOND, &one), PC_ERR_CLASH,
          "where this process has");
    one = world_map(world, client, PAGED, PC_MAP_PRIVATE);
    CHECK(one.address != BASE, "over another's memory");
    check_all(&one, PAGED);
    /* A private copy elsewhere does not make the address ours. */
    FAILS(try_map(world, client, PAGED, 0, 10 * SECOND, &two), PC_ERR_CLASH, "where this process has");
    CHECK(load((uint64_t)(uintptr_t)at) == 0, "another's memory");
    munmap(at, 4096);
    two = world_map(world, client, PAGED, 0);
    CHECK(two.address == BASE && block_is_right(&two, PAGED, 2), "%#lx", two.address);
    OK(pc_client_close(client));
}

static void *map_versions(void *arg)
{
    struct {
        struct world *world;
        pc_client *client;
    } *both = arg;
    for (uint64_t i = 0; i < 120; i++) {
        uint64_t block = i * 13 % BLOCKS;
        bool newer = i % 2, private = i % 5 == 0;
        uint32_t flags = private ? PC_MAP_PRIVATE : 0;
        struct pc_mapping mapping = newer ? world_map_newer(both->world, both->client, flags)
                                          : world_map(both->world, both->client, PAGED, flags);
        if (private)
            store(mapping.address + (block + 1) % BLOCKS * 4096, i);
        CHECK(block_is_right(&mapping, newer ? NEWER_CONTENT : PAGED, block), "block %lu", block);
        OK(pc_client_unmap(both->client, mapping.id));
    }
    return NULL;
}

static void test_versions_from_threads(struct world *world)
{
    struct {
        struct world *world;
        pc_client *client;
    } both = {world, world_client(world)};
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, map_versions, &both) == 0);
    for (size_t i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    EVENTUALLY(world->fake->live_mappings == 0);
    OK(pc_client_close(both.client));
}

static void test_versions_reattach(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping one = world_map(world, client, PAGED, 0);
    struct pc_mapping two = world_map_newer(world, client, 0);
    struct pc_mapping three = world_map_newer(world, client, PC_MAP_PRIVATE);
    CHECK(block_is_right(&two, NEWER_CONTENT, 3), "block 3");
    store(three.address, 5);
    world_kill_server(world);
    world_start_spare(world);
    check_all(&two, NEWER_CONTENT);
    check_all(&one, PAGED);
    CHECK(world->fake->attaches == 3, "%d attached", world->fake->attaches);
    CHECK(load(three.address) == 5 && block_is_right(&three, NEWER_CONTENT, 900), "private");
    OK(pc_client_close(client));
}

static struct {
    pc_client *client;
    struct pc_mapping one, two, private, made;
} parent;

static void child_attaches(struct world *world)
{
    (void)world;
    OK(pc_client_after_fork(parent.client));
    check_all(&parent.two, NEWER_CONTENT);
    check_all(&parent.one, PAGED);
    OK(pc_client_close(parent.client));
}

static void child_touches_private(struct world *world)
{
    (void)world;
    OK(pc_client_after_fork(parent.client));
    load(parent.private.address + 4096);
}

static void child_touches_newer(struct world *world)
{
    (void)world;
    load(parent.two.address + 4096 * 12);
}

static void child_maps_over_private(struct world *world)
{
    OK(pc_client_after_fork(parent.client));
    OK(pc_client_unmap(parent.client, parent.one.id));
    struct pc_mapping mapping = world_map(world, parent.client, PAGED, 0);
    CHECK(mapping.address != parent.private.address, "over the guard of the parent's copy");
    check_all(&mapping, PAGED);
    FAILS(try_map(world, parent.client, PAGED, PC_MAP_FIXED, 10 * SECOND, &mapping), PC_ERR_CLASH, "");
    OK(pc_client_close(parent.client));
}

static void test_versions_fork(struct world *world)
{
    if (IS_TSAN) {
        printf("skip versions_fork: not under TSan\n");
        return; /* it does not know children of processes with threads */
    }
    parent.client = world_client(world);
    parent.private = world_map(world, parent.client, PAGED, PC_MAP_PRIVATE); /* at BASE */
    parent.one = world_map(world, parent.client, PAGED, 0);
    parent.two = world_map_newer(world, parent.client, 0);
    CHECK(parent.private.address == BASE && parent.two.address != parent.one.address, "places");
    store(parent.private.address + 4096, 5);
    expect_end(world, child_attaches, 0, "");
    expect_end(world, child_touches_private, 70, "private copy");
    expect_end(world, child_touches_newer, 70, "variable 1 version 6 block 12");
    expect_end(world, child_maps_over_private, 0, "");
    check_all(&parent.two, NEWER_CONTENT);
    CHECK(load(parent.private.address + 4096) == 5, "the parent's");
    OK(pc_client_close(parent.client));
}

/* ------------------------------------------------------------------ building */

static struct pc_mapping build(struct world *world, pc_client *client)
{
    struct pc_mapping mapping;
    (void)world;
    OK(pc_client_build(client, MADE, MADE_BASE, LENGTH, PC_MEDIUM_MEMORY, 30 * SECOND, &mapping));
    return mapping;
}

static void fill(const struct pc_mapping *mapping)
{
    for (uint64_t block = 0; block < BLOCKS; block += 2)
        store(mapping->address + block * 4096, block + 1);
}

static void check_filled(const struct pc_mapping *mapping)
{
    for (uint64_t block = 0; block < BLOCKS; block++)
        CHECK(load(mapping->address + block * 4096) == (block % 2 ? 0 : block + 1), "block %lu",
              block);
}

static uint64_t bytes_in(int memfd)
{
    struct stat st;
    REQUIRE(fstat(memfd, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}

static void test_build(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_run run;
    struct pc_mapping made = build(world, client), other;
    int memfd = world->fake->regions[MADE - 1].memfd;
    CHECK(made.address == MADE_BASE && made.length_bytes == LENGTH, "%#lx", made.address);
    CHECK(load(made.address + LENGTH - 8) == 0, "not zeros at first");
    fill(&made);
    check_filled(&made);
    uint64_t word;
    REQUIRE(pread(memfd, &word, 8, 6 * 4096) == 8);
    CHECK(word == 7 && bytes_in(memfd) <= LENGTH, "it is the home's memory");
    /* What is not sealed is nobody's. */
    FAILS(pc_client_map(client, MADE, 0, MADE_BASE, LENGTH, 0, 10 * SECOND, &other), PC_ERR_NO_REGION,
          "not sealed");
    FAILS(pc_client_dirty(client, made.id, &run, 1), PC_ERR_NO_REGION, "not sealed");
    FAILS(pc_client_reads_begin(client, made.id), PC_ERR_NO_REGION, "not sealed");
    FAILS(pc_client_build(client, MADE, MADE_BASE, LENGTH, PC_MEDIUM_MEMORY, SECOND, &other), PC_ERR_CLASH, "variable 4");
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    CHECK(world->fake->made_state == FAKE_SEALED && world->fake->live_mappings == 1, "%d leases",
          world->fake->live_mappings);
    check_filled(&made);
    FAILS(pc_client_build_seal(client, made.id, SECOND), PC_ERR_EXISTS, "sealed");
    OK(pc_client_map(client, MADE, 0, MADE_BASE, LENGTH, PC_MAP_FIXED, 30 * SECOND, &other));
    CHECK(other.id == made.id, "the same mapping");
    OK(pc_client_reads_begin(client, made.id));
    load(made.address + 4096 * 100);
    CHECK(pc_client_reads_end(client, made.id, &run, 1) >= 1, "its read set");
    OK(pc_client_unmap(client, other.id));
    check_filled(&made);
    world_kill_server(world);
    world_start_spare(world);
    EVENTUALLY(world->fake->live_mappings == 1);
    CHECK(world->fake->attaches == 1, "an ordinary lease");
    check_filled(&made);
    OK(pc_client_unmap(client, made.id));
    EVENTUALLY(world->fake->live_mappings == 0);
    CHECK(world->fake->abandons == 0, "a sealed region was abandoned");
    OK(pc_client_close(client));
}

static void write_after_seal(struct world *world)
{
    signal(SIGSEGV, SIG_DFL);
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    store(made.address, 1);
}

static void test_sealed_is_read_only(struct world *world)
{
    expect_end(world, write_after_seal, -SIGSEGV, "");
}

static void test_abandon(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client), other;
    fill(&made);
    OK(pc_client_unmap(client, made.id));
    EVENTUALLY(world->fake->abandons == 1 && world->fake->made_state == FAKE_ABSENT);
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_NO_REGION, "no mapping");
    made = build(world, client);
    CHECK(made.address == MADE_BASE, "the address is free again");
    FAILS(pc_client_build_seal(client, 999, 10 * SECOND), PC_ERR_NO_REGION, "999");
    OK(pc_client_unmap(client, made.id));
    /* What cannot be made leaves nothing mapped. */
    FAILS(pc_client_build(client, 99, BASE, LENGTH, PC_MEDIUM_MEMORY, 10 * SECOND, &other), PC_ERR_NO_REGION, "");
    CHECK(other.address == 0 && other.id == 0, "something with a failure");
    FAILS(pc_client_build(client, MADE, BASE + 1, LENGTH, PC_MEDIUM_MEMORY, 10 * SECOND, &other), PC_ERR_RANGE, "");
    FAILS(pc_client_build(client, MADE, MADE_BASE, 0, PC_MEDIUM_MEMORY, 10 * SECOND, &other), PC_ERR_RANGE, "");
    FAILS(pc_client_build(client, MADE, 0x1000, LENGTH, PC_MEDIUM_MEMORY, 10 * SECOND, &other), PC_ERR_RANGE, "");
    struct pc_mapping one = world_map(world, client, PAGED, 0);
    CHECK(one.address == BASE, "the failed one kept its address");
    int creates = world->fake->creates;
    void *at = (void *)(uintptr_t)MADE_BASE;
    REQUIRE(mmap(at, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) ==
            at);
    FAILS(pc_client_build(client, MADE, MADE_BASE, LENGTH, PC_MEDIUM_MEMORY, 10 * SECOND, &other), PC_ERR_CLASH,
          "where this process has");
    CHECK(world->fake->creates == creates, "the server was asked for what cannot be mapped");
    OK(pc_client_close(client));
}

static void test_refused_seal(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    world->fake->refuse_seal = PC_ERR_NO_MEMORY;
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_NO_MEMORY, "");
    store(made.address + 4096, 9); /* writable again */
    store(made.address + 4096, 0);
    world->fake->refuse_seal = 0;
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    check_filled(&made);
    OK(pc_client_unmap(client, made.id));
    EVENTUALLY(world->fake->live_mappings == 0);
    CHECK(world->fake->abandons == 0, "abandoned");
    /* A server that says that blocks of a home are absent cannot be believed. */
    world->fake->made_state = FAKE_ABSENT;
    made = build(world, client);
    world->fake->absent_at_home = 1;
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_PROTOCOL, "absent");
    world->fake->absent_at_home = 0;
    world->fake->lie_inode = 1;
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_PROTOCOL, "other memory");
    world->fake->lie_inode = 0;
    OK(pc_client_build_seal(client, made.id, 30 * SECOND)); /* it turned out to be sealed */
    OK(pc_client_unmap(client, made.id));
    EVENTUALLY(world->fake->live_mappings == 0);
    OK(pc_client_close(client));
}

/* No answer came: the region may be sealed, and another try finds out. */
static void test_late_seal(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    world->fake->seal_delay_ms = 300;
    FAILS(pc_client_build_seal(client, made.id, 100 * MS), PC_ERR_TIMEOUT, "in time");
    world->fake->seal_delay_ms = 0;
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    CHECK(world->fake->seals == 2 && world->fake->made_state == FAKE_SEALED, "%d",
          world->fake->seals);
    check_filled(&made);
    OK(pc_client_close(client));
}

static void test_death_while_building(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    world_kill_server(world);
    check_filled(&made);
    store(made.address + 8, 3);
    FAILS(pc_client_build_seal(client, made.id, 100 * MS), PC_ERR_NO_SERVER, "gone");
    store(made.address + 8, 4); /* it was not sent, and so is not sealed */
    world_start_spare(world);
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_NO_REGION, "");
    store(made.address + 8, 5);
    check_filled(&made);
    CHECK(load(made.address + 8) == 5, "the memory is there");
    OK(pc_client_unmap(client, made.id));
    OK(pc_client_close(client));
}

static void test_death_in_seal(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    world->fake->die_at_seal = 1;
    pid_t pid = fork();
    if (pid == 0) { /* no use of the client in there */
        alarm(20);
        EVENTUALLY(world->fake->die_at_seal == 0);
        world_start_spare(world);
        _exit(0);
    }
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_NO_REGION, "");
    store(made.address + 8, 5);
    waitpid(pid, NULL, 0);
    OK(pc_client_close(client));
}

static void test_death_after_seal(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    world->fake->die_after_seal = 1; /* the keeper has it, the reply is lost */
    pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        EVENTUALLY(world->fake->die_after_seal == 0);
        world_start_spare(world);
        _exit(0);
    }
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    check_filled(&made);
    CHECK(world->fake->live_mappings == 1, "%d leases", world->fake->live_mappings);
    waitpid(pid, NULL, 0);
    OK(pc_client_close(client));
}

static void child_touches_build(struct world *world)
{
    int opens = world->fake->opens;
    OK(pc_client_after_fork(parent.client));
    CHECK(world->fake->opens == opens, "the server was asked for what is not sealed");
    FAILS(pc_client_build_seal(parent.client, parent.made.id, 10 * SECOND), PC_ERR_FORKED, "fork");
    if (test_result())
        _exit(1);
    load(parent.made.address);
}

static void child_unmaps_build(struct world *world)
{
    OK(pc_client_after_fork(parent.client));
    OK(pc_client_unmap(parent.client, parent.made.id));
    OK(pc_client_close(parent.client));
    CHECK(world->fake->abandons == 0, "it is the parent's");
}

static void test_fork_while_building(struct world *world)
{
    if (IS_TSAN) {
        printf("skip fork_while_building: not under TSan\n");
        return;
    }
    parent.client = world_client(world);
    parent.made = build(world, parent.client);
    fill(&parent.made);
    expect_end(world, child_touches_build, 70, "variable 4 version 0 block 0");
    expect_end(world, child_unmaps_build, 0, "");
    check_filled(&parent.made);
    OK(pc_client_build_seal(parent.client, parent.made.id, 30 * SECOND));
    CHECK(world->fake->abandons == 0 && world->fake->made_state == FAKE_SEALED, "sealed");
    OK(pc_client_close(parent.client));
}

/* -------------------------------------------------------------- what is kept */

static struct pc_mapping build_kept(struct world *world, pc_client *client)
{
    struct pc_mapping made = build(world, client);
    fill(&made);
    OK(pc_client_build_keep(client, made.id));
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    return made;
}

static void test_kept(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build_kept(world, client), other;
    int memfd = world->fake->regions[MADE - 1].memfd;
    check_filled(&made);
    FAILS(pc_client_build_keep(client, made.id), PC_ERR_EXISTS, "not being built");
    FAILS(pc_client_build_drop(client, made.id), PC_ERR_EXISTS, "not being built");
    /* As long as nobody wrote to it, it is version 0, and whoever must lie there shares it. */
    OK(pc_client_map(client, MADE, 0, MADE_BASE, LENGTH, PC_MAP_FIXED, 30 * SECOND, &other));
    CHECK(other.id == made.id && other.address == made.address, "the same mapping");
    OK(pc_client_unmap(client, other.id));
    store(made.address, 99); /* by a library, late */
    store(made.address + 4096, 98);
    uint64_t words[2] = {0};
    REQUIRE(pread(memfd, &words[0], 8, 0) == 8 && pread(memfd, &words[1], 8, 4096) == 8);
    CHECK(words[0] == 1 && words[1] == 0, "version 0 has %lu, %lu", words[0], words[1]);
    FAILS(pc_client_map(client, MADE, 0, MADE_BASE, LENGTH, PC_MAP_FIXED, 10 * SECOND, &other),
          PC_ERR_CLASH, "written to its memory");
    OK(pc_client_map(client, MADE, 0, MADE_BASE, LENGTH, 0, 30 * SECOND, &other));
    CHECK(other.address != made.address && load(other.address) == 1, "version 0, elsewhere");
    OK(pc_client_unmap(client, other.id));
    world_kill_server(world);
    world_start_spare(world);
    EVENTUALLY(world->fake->live_mappings == 1);
    CHECK(load(made.address) == 99 && load(made.address + 8192) == 3, "after a restart");
    OK(pc_client_build_let_go(client, made.id));
    OK(pc_client_unmap(client, made.id));
    EVENTUALLY(world->fake->live_mappings == 0);
    OK(pc_client_map(client, MADE, 0, MADE_BASE, LENGTH, PC_MAP_FIXED, 30 * SECOND, &other));
    CHECK(other.address == MADE_BASE && load(other.address) == 1, "the address is free again");
    OK(pc_client_close(client));
    CHECK(world->fake->abandons == 0, "abandoned");
}

struct writer {
    uint64_t address;
    _Atomic bool stop;
};

static void *write_on(void *arg)
{
    struct writer *writer = arg;
    for (uint64_t i = 0; !writer->stop; i++)
        store(writer->address + 8 * (i % 64), i);
    return NULL;
}

/* Others write while it is sealed, and no signal ends them. */
static void test_kept_while_others_write(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    struct writer writer = {.address = made.address};
    pthread_t thread;
    OK(pc_client_build_keep(client, made.id));
    REQUIRE(pthread_create(&thread, NULL, write_on, &writer) == 0);
    usleep(2000);
    world->fake->refuse_seal = PC_ERR_NO_MEMORY;
    FAILS(pc_client_build_seal(client, made.id, 10 * SECOND), PC_ERR_NO_MEMORY, "");
    world->fake->refuse_seal = 0;
    OK(pc_client_build_seal(client, made.id, 30 * SECOND));
    usleep(2000);
    writer.stop = true;
    pthread_join(thread, NULL);
    OK(pc_client_close(client));
}

/* After the end of the client its blocks are this process's own, whatever becomes of the home. */
static void test_kept_outlives_the_client(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build_kept(world, client);
    store(made.address, 99);
    FAILS(pc_kept_unmap(made.address, LENGTH), PC_ERR_NO_REGION, "kept");
    OK(pc_client_build_copy(client));
    EVENTUALLY(world->fake->live_mappings == 0);
    OK(pc_client_close(client));
    REQUIRE(fallocate(world->fake->regions[MADE - 1].memfd,
                      FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)LENGTH) == 0);
    CHECK(load(made.address) == 99, "what was written");
    for (uint64_t block = 1; block < BLOCKS; block++)
        CHECK(load(made.address + block * 4096) == (block % 2 ? 0 : block + 1), "block %lu", block);
    FAILS(pc_kept_unmap(made.address, LENGTH - 4096), PC_ERR_NO_REGION, "kept");
    OK(pc_kept_unmap(made.address, LENGTH));
    FAILS(pc_kept_unmap(made.address, LENGTH), PC_ERR_NO_REGION, "kept");
}

static void test_kept_is_dropped(struct world *world)
{
    pc_client *client = world_client(world);
    struct pc_mapping made = build(world, client);
    fill(&made);
    FAILS(pc_client_build_drop(client, made.id), PC_ERR_EXISTS, "not to be kept");
    OK(pc_client_build_keep(client, made.id));
    FAILS(pc_client_build_let_go(client, made.id), PC_ERR_EXISTS, "still being built");
    OK(pc_client_build_drop(client, made.id));
    EVENTUALLY(world->fake->abandons == 1 && world->fake->made_state == FAKE_ABSENT);
    check_filled(&made);
    store(made.address, 1);
    world_kill_server(world);
    world_start_spare(world); /* it has no such region, and needs none */
    OK(pc_client_build_let_go(client, made.id));
    check_filled(&made);
    OK(pc_client_unmap(client, made.id));
    CHECK(world->fake->abandons == 1, "twice");
    OK(pc_client_close(client));
}

static void child_of_kept(struct world *world)
{
    CHECK(load(parent.made.address) == 99, "before it has attached");
    OK(pc_client_after_fork(parent.client));
    CHECK(world->fake->live_mappings == 2, "a lease of its own: %d", world->fake->live_mappings);
    CHECK(load(parent.made.address) == 99 && load(parent.made.address + 8192) == 3, "its memory");
    store(parent.made.address, 100);
    OK(pc_client_build_copy(parent.client));
    OK(pc_client_close(parent.client));
    CHECK(load(parent.made.address) == 100, "kept there too");
}

static void child_without_a_server(struct world *world)
{
    world_kill_server(world);
    CHECK(pc_client_after_fork(parent.client) < 0, "attached to nobody");
    load(parent.made.address);
}

static void test_kept_in_a_fork(struct world *world)
{
    if (IS_TSAN)
        return;
    parent.client = world_client(world);
    parent.made = build_kept(world, parent.client);
    store(parent.made.address, 99);
    expect_end(world, child_of_kept, 0, "");
    CHECK(load(parent.made.address) == 99, "the parent's");
    expect_end(world, child_without_a_server, 70, "variable 4 version 0 block 0");
    OK(pc_client_close(parent.client));
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        TEST(two_versions), TEST(private_at_its_address), TEST(fixed), TEST(side_by_side),
        TEST(foreign_memory),
        TEST(versions_from_threads), TEST(versions_reattach), TEST(versions_fork), TEST(build),
        TEST(sealed_is_read_only), TEST(abandon), TEST(refused_seal), TEST(late_seal),
        TEST(death_while_building), TEST(death_in_seal), TEST(death_after_seal),
        TEST(fork_while_building), TEST(kept), TEST(kept_while_others_write),
        TEST(kept_outlives_the_client), TEST(kept_is_dropped), TEST(kept_in_a_fork),
    };
    return run_tests(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL);
}
