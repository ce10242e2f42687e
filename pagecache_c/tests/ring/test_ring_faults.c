/* Rings whose members differ, stand still, or are killed: what the others are told. Members that
 * are killed are processes; the rest are threads. */
#include "tests/support/ring_lab.h"

#include "ring/ring.h"

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

static uint32_t descriptors(void)
{
    uint32_t n = 0;
    DIR *dir = opendir("/proc/self/fd");
    REQUIRE(dir != NULL);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static struct member sums(pc_ring *ring, double *array, uint64_t count, uint64_t timeout_ns)
{
    return (struct member){.ring = ring,
                           .call = {.kind = PC_RING_ALLREDUCE,
                                    .dtype = PC_F64,
                                    .op = PC_OP_SUM,
                                    .n_dims = 1,
                                    .dims = {count}},
                           .in = array,
                           .out = array,
                           .n_elements = count,
                           .timeout_ns = timeout_ns};
}

/* ------------------------------------------------------------ members that are killed */

enum { NEVER_CALLS, DIES_WHEN_ALL_AGREE, DIES_WHEN_ALL_IS_DONE };

static void killed_member(const struct wires *wires, const uint32_t *ranks, uint32_t position,
                          uint32_t n, int when, int ready)
{
    for (uint32_t i = 0; i < n; i++)
        if (i != position)
            wires_close(wires, i);
    pc_ring *ring = wires_open(wires, ranks, position, n, 2);
    static double array[20000];
    struct member me = sums(ring, array, 20000, 20 * S);
    if (when == DIES_WHEN_ALL_AGREE)
        pc__ring_agree(ring, &me.call, PC_F64, ring->scratch, 0, 20 * S);
    if (when == DIES_WHEN_ALL_IS_DONE)
        member_main(&me);
    /* Who does not call is there, and dies when the others wait for it. */
    if (when == NEVER_CALLS)
        (void)!write(ready, "r", 1), pause();
    kill(getpid(), SIGKILL);
}

/* Whether all others name the one that was killed. */
static bool one_is_killed(uint32_t n, uint32_t gone, int when, bool tcp)
{
    struct wires wires;
    uint32_t ranks[MAX_MEMBERS];
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    wires_make(&wires, n, 2, tcp);
    for (uint32_t i = 0; i < n; i++)
        ranks[i] = (i * 2 + (n % 2 ? 0 : i >= n / 2)) % n;
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        killed_member(&wires, ranks, gone, n, when, ready[1]);
        _exit(1);
    }
    wires_close(&wires, gone);
    struct member members[MAX_MEMBERS] = {0};
    uint32_t left = 0;
    for (uint32_t i = 0; i < n; i++)
        if (i != gone)
            members[left++] = sums(wires_open(&wires, ranks, i, n, 2),
                                   calloc(20000, sizeof(double)), 20000, 60 * S);
    for (uint32_t m = 0; m < left; m++)
        REQUIRE(pthread_create(&members[m].thread, NULL, member_main, &members[m]) == 0);
    if (when == NEVER_CALLS) {
        char byte;
        REQUIRE(read(ready[0], &byte, 1) == 1);
        pause_ns(5 * MS); /* so that they do wait; nothing depends on it */
        kill(pid, SIGKILL);
    }
    for (uint32_t m = 0; m < left; m++)
        pthread_join(members[m].thread, NULL);
    REQUIRE(waitpid(pid, NULL, 0) == pid);
    if (when == DIES_WHEN_ALL_IS_DONE) {
        /* It had done its part: they have their results. The next call fails. */
        for (uint32_t m = 0; m < left; m++)
            CHECK(members[m].rc == 0, "of %u, when all was done: %s", n, members[m].message);
        all_run(members, left);
    }
    uint32_t named = 0;
    for (uint32_t m = 0; m < left; m++) {
        const struct pc_ring_fault *fault = &members[m].fault;
        CHECK(members[m].rc == PC_ERR_MEMBER && !fault->is_silent, "of %u, when %d: %d: %s", n,
              when, members[m].rc, members[m].message);
        named += fault->member == ranks[gone];
        pc_ring_close(members[m].ring);
        free(members[m].in);
    }
    /* Whoever noticed first had nobody else to name. */
    CHECK(named > 0, "of %u, when %d: nobody names %u", n, when, ranks[gone]);
    close(ready[0]);
    close(ready[1]);
    return named == left;
}

/* Who cannot be told, since its connection is in the middle of a message, names whoever closed it:
 * so, in one of some rounds. */
static void test_who_was_killed_is_named_by_all(void)
{
    uint32_t before = descriptors();
    for (uint32_t n = 2; n <= 8; n++) /* 3, 5, 6, 7: some are beyond a power of two */
        for (uint32_t gone = 0; gone < n; gone++)
            for (int when = NEVER_CALLS; when <= DIES_WHEN_ALL_IS_DONE; when++) {
                bool is_named = false;
                for (int round = 0; round < 5 && !is_named; round++)
                    is_named = one_is_killed(n, gone, when, (gone + n) % 2);
                CHECK(is_named, "of %u, when %d, another one than %u is named", n, when, gone);
            }
    CHECK(descriptors() == before, "%u descriptors, and %u before", descriptors(), before);
}

/* ------------------------------------------------------------ forks */

/* A member whose process has a child that lives on. */
static void forking_member(const struct wires *wires, const uint32_t *ranks, int said, int until)
{
    wires_close(wires, 0);
    pc_ring *ring = wires_open(wires, ranks, 1, 2, 2);
    double x = 1;
    struct member me = sums(ring, &x, 1, 20 * S);
    member_main(&me);
    uint32_t before = descriptors();
    if (fork() == 0) {
        struct member mine = sums(ring, &x, 1, 20 * S);
        member_main(&mine);
        /* Two lanes each way, and one partner. */
        bool is_well = mine.rc == PC_ERR_FORKED && descriptors() == before - 5 &&
                       pc_ring_close(ring) == PC_OK;
        (void)!write(said, is_well ? "y" : "n", 1);
        char byte;
        (void)!read(until, &byte, 1); /* ends with the test */
        _exit(0);
    }
    pause();
}

static void test_a_fork_does_not_keep_its_parent(void)
{
    struct wires wires;
    uint32_t ranks[] = {0, 1};
    int said[2], until[2];
    REQUIRE(pipe(said) == 0 && pipe(until) == 0);
    wires_make(&wires, 2, 2, true);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        close(until[1]);
        forking_member(&wires, ranks, said[1], until[0]);
        _exit(1);
    }
    wires_close(&wires, 1);
    double x = 1;
    struct member me = sums(wires_open(&wires, ranks, 0, 2, 2), &x, 1, 20 * S);
    member_main(&me);
    CHECK(me.rc == 0 && x == 2, "%s", me.message);
    char byte = 0;
    REQUIRE(read(said[0], &byte, 1) == 1);
    CHECK(byte == 'y', "the child has a ring, or its descriptors");
    kill(pid, SIGKILL);
    REQUIRE(waitpid(pid, NULL, 0) == pid);
    member_main(&me);
    CHECK(me.rc == PC_ERR_MEMBER && !me.fault.is_silent && me.fault.member == 1,
          "its child keeps it: %s", me.message);
    pc_ring_close(me.ring);
    close(said[0]);
    close(said[1]);
    close(until[0]);
    close(until[1]);
}

/* ------------------------------------------------------------ members that stand still */

static bool still_one_is_named(uint32_t n, uint64_t count)
{
    struct lab lab;
    lab_make(&lab, n, 2, false);
    struct member members[MAX_MEMBERS] = {0};
    uint32_t left = 0, named = 0, still = lab.ranks[n - 1];
    for (uint32_t m = 0; m < n; m++)
        if (m != still)
            members[left++] =
                sums(lab.rings[m], calloc(20000, sizeof(double)), count, 3 * S);
    all_run(members, left);
    for (uint32_t m = 0; m < left; m++) {
        CHECK(members[m].rc == PC_ERR_MEMBER, "%s", members[m].message);
        named += members[m].fault.member == still && members[m].fault.is_silent;
        free(members[m].in);
    }
    lab_end(&lab);
    return named == left;
}

/* A member that the machine itself keeps still for that long is named as well: so, in one of some
 * rounds. */
static void test_who_stands_still_is_named_by_all(void)
{
    for (uint32_t n = 4; n <= 5; n++)
        for (int large = 0; large < 2; large++) {
            bool is_named = false;
            for (int round = 0; round < 5 && !is_named; round++)
                is_named = still_one_is_named(n, large ? 20000 : 8);
            CHECK(is_named, "of %u, another one is named", n);
        }
}

/* Who is told by a clock that it is late looks once more. */
static void test_what_is_there_at_the_deadline_counts(void)
{
    struct lab lab;
    lab_make(&lab, 2, 1, true);
    pc_ring *ring = lab.rings[0], *other = lab.rings[1];
    struct pc__ring_wait wait = {.out_fd = -1,
                                 .in_fd = ring->lanes[0].previous_fd,
                                 .wants_in = true,
                                 .in_member = 1 - ring->position};
    REQUIRE(send(other->lanes[0].next_fd, "x", 1, 0) == 1);
    CHECK(pc__ring_wait(ring, &wait, 1) == PC_OK, "%s", pc_last_message());
    char byte;
    REQUIRE(recv(ring->lanes[0].previous_fd, &byte, 1, 0) == 1);
    CHECK(pc__ring_wait(ring, &wait, 1) == PC_ERR_MEMBER, "nothing counts as something");
    lab_end(&lab);
}

/* ------------------------------------------------------------ members that differ */

static void test_calls_that_differ(void)
{
    const struct pc_ring_call plain = {.kind = PC_RING_ALLREDUCE,
                                       .dtype = PC_F64,
                                       .op = PC_OP_SUM,
                                       .n_dims = 1,
                                       .dims = {8}};
    const struct pc_ring_call rooted = {
        .kind = PC_RING_BROADCAST, .dtype = PC_F64, .n_dims = 1, .dims = {8}};
    struct pc_ring_call odd[6];
    for (int i = 0; i < 6; i++)
        odd[i] = i == 5 ? rooted : plain;
    odd[0].kind = PC_RING_BARRIER;
    odd[1].kind = PC_RING_REDUCE_SCATTER;
    odd[2].op = PC_OP_MAX;
    odd[3].dtype = PC_I64;
    odd[4].n_dims = 2, odd[4].dims[0] = 2, odd[4].dims[1] = 4;
    odd[5].root = 1;
    for (uint32_t n = 2; n <= 7; n++) {
        struct lab lab;
        lab_make(&lab, n, 1, false);
        for (int what = 0; what < 6; what++)
            for (uint32_t who = 0; who < n; who++) {
                struct member members[MAX_MEMBERS];
                double arrays[MAX_MEMBERS][8], out[MAX_MEMBERS][8];
                for (uint32_t m = 0; m < n; m++) {
                    for (int i = 0; i < 8; i++)
                        arrays[m][i] = m, out[m][i] = -1;
                    members[m] = sums(lab.rings[m], arrays[m], 8, 20 * S);
                    members[m].out = out[m];
                    members[m].call = m == who ? odd[what] : what == 5 ? rooted : plain;
                }
                all_run(members, n);
                for (uint32_t m = 0; m < n; m++) {
                    const struct pc_ring_fault *fault = &members[m].fault;
                    const struct pc_ring_call *said =
                        fault->member == who ? &fault->call : &fault->other_call;
                    CHECK(members[m].rc == PC_ERR_MISMATCH, "%u of %u, what %d: %s", m, n, what,
                          members[m].message);
                    CHECK((fault->member == who) != (fault->other == who), "it is not said who");
                    CHECK(memcmp(said, &odd[what], sizeof *said) == 0, "nor what");
                    CHECK(out[m][0] == -1 && arrays[m][0] == m, "something has moved");
                }
                for (uint32_t m = 0; m < n; m++)
                    members[m].call = plain;
                all_run(members, n);
                for (uint32_t m = 0; m < n; m++)
                    CHECK(members[m].rc == 0 && out[m][7] == n * (n - 1) / 2, "the next call: %s",
                          members[m].message);
            }
        lab_end(&lab);
    }
}

/* ------------------------------------------------------------ what fails here */

/* The first lane to fail is not the caller's: the caller gets what that one has to say. */
static void test_a_lane_says_why(void)
{
    struct lab lab;
    uint32_t bytes = 8 << 20;
    lab_make(&lab, 2, 2, false);
    uint32_t who = lab.ranks[0], other = lab.ranks[1];
    struct member members[MAX_MEMBERS] = {0};
    for (uint32_t m = 0; m < 2; m++) {
        void *array = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(array != MAP_FAILED);
        members[m] = sums(lab.rings[m], array, bytes / 8, 20 * S);
        members[m].call.dims[0] = 0;
    }
    /* It sends the other's half first, and of that the second lane the second half. */
    char *gone = (char *)members[who].in + bytes / 2 * other + bytes / 4;
    REQUIRE(mprotect(gone, bytes / 4, PROT_NONE) == 0);
    all_run(members, 2);
    const char *said = members[who].message;
    CHECK(members[who].rc == PC_ERR_SYSTEM, "%d: %s", members[who].rc, said);
    CHECK(strstr(said, "not there for the kernel: Bad address"), "%s", said);
    CHECK(!strstr(said, "address:"), "%s", said);
    CHECK(members[other].rc == PC_ERR_MEMBER && members[other].fault.member == who, "%d: %s",
          members[other].rc, members[other].message);
    for (uint32_t m = 0; m < 2; m++)
        munmap(members[m].in, bytes);
    lab_end(&lab);
}

static void test_descriptors_of_rings_that_do_not_open(void)
{
    uint32_t before = descriptors();
    for (int what = 0; what < 6; what++) {
        struct wires wires;
        wires_make(&wires, 3, 2, false);
        uint32_t ranks[] = {0, 1, what == 3 ? 1 : 2};
        int beside[2] = {wires.between[0][1], wires.between[0][2]};
        struct pc_ring_options options = {.position = what == 0 ? 3 : 0,
                                          .n_members = what == 1 ? 0 : 3,
                                          .ranks = ranks,
                                          .n_lanes = 2,
                                          .small_bytes = what == 2 ? 1ull << 40 : SMALL,
                                          .next_fds = wires.next[0],
                                          .previous_fds = wires.previous[0],
                                          .n_partner_fds = what == 4 ? 1 : 2,
                                          .partner_fds = beside};
        if (what == 4)
            close(beside[1]);
        if (what == 5) { /* connections to nobody */
            options.n_members = 1;
        }
        pc_ring *ring = (pc_ring *)&options;
        CHECK(pc_ring_open(&options, &ring) == PC_ERR_RANGE && !ring, "what %d", what);
        wires_close(&wires, 1);
        wires_close(&wires, 2);
        CHECK(descriptors() == before, "what %d: %u descriptors, and %u before", what,
              descriptors(), before);
    }
}

int main(void)
{
    alarm(240);
    test_descriptors_of_rings_that_do_not_open();
    test_who_was_killed_is_named_by_all();
    test_a_fork_does_not_keep_its_parent();
    test_what_is_there_at_the_deadline_counts();
    test_calls_that_differ();
    test_a_lane_says_why();
    test_who_stands_still_is_named_by_all();
    return test_result();
}
