/* test_keeper.c - the keeper as a process, and page servers that die.
 *
 * Every wait has a deadline: a keeper that hangs fails the test, it does not hang it.
 */
#include "engine/keeper/keeper.c" /* for struct message: hostile packets are made from it */
#include "tests/support/check.h"
#include "tests/support/processes.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define SECOND 1000000000ull
#define PATIENCE (20 * SECOND)
#define NEVER UINT64_MAX

static char name[64];

/* A process that does nothing until it is killed: the raylet of these tests. */
static pid_t start_raylet(void)
{
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;)
            pause();
    }
    return pid;
}

enum keeper_flags { PLAIN = 0, WITHOUT_PIDFD = 1, FEW_DESCRIPTORS = 2 };

/* pidfd_open says ENOSYS from here on, as before Linux 5.3. */
static void forget_pidfd_open(void)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {.len = sizeof program / sizeof program[0],
                                      .filter = program};
    REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    REQUIRE(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

/* A keeper process; its exit status is what pc_keeper_run returned, negated. */
static pid_t start_keeper(pid_t watched, uint64_t orphan_timeout_ns, int flags)
{
    static int n_keepers;
    snprintf(name, sizeof name, "pc-test-keeper-%d-%d", (int)getpid(), n_keepers++);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (flags & WITHOUT_PIDFD)
            forget_pidfd_open();
        if (flags & FEW_DESCRIPTORS) {
            const struct rlimit few = {.rlim_cur = 64, .rlim_max = 96};
            REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
        }
        exit(-pc_keeper_run(name, watched, orphan_timeout_ns));
    }
    return pid;
}

/* Its exit status, or -1 if it had to be killed. */
static int wait_exit(pid_t pid, uint64_t patience_ns)
{
    const uint64_t deadline = now_ns() + patience_ns;
    int status;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (now_ns() > deadline) {
            (void)end_process(pid);
            return -1;
        }
        pause_ns(2000000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int connect_keeper(void)
{
    int fd;
    const int rc = pc_keeper_connect(name, PATIENCE, &fd);
    CHECK(rc == PC_OK, "%d: %s", rc, pc_last_message());
    REQUIRE(rc == PC_OK);
    return fd;
}

static void quit_keeper(pid_t keeper, int fd)
{
    CHECK(pc_keeper_quit(fd) == PC_OK, "%s", pc_last_message());
    const int status = wait_exit(keeper, PATIENCE);
    CHECK(status == 0, "the keeper ended with %d", status);
    close(fd);
}

/* A memfd whose first words say which one it is. */
static int make_memfd(uint64_t region, struct pc__kept *what)
{
    struct stat status;
    const int fd = memfd_create("kept", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && ftruncate(fd, 1 << 20) == 0);
    REQUIRE(pwrite(fd, &region, sizeof region, 8192) == (ssize_t)sizeof region);
    REQUIRE(fstat(fd, &status) == 0);
    *what = (struct pc__kept){.region = region, .version = 1, .base_address = region << 21,
                              .length_bytes = 1 << 20, .kind = PC__KEPT_HOME,
                              .inode = pc__file_id(&status)};
    memset(what->reserved, (int)(region & 0x7f), sizeof what->reserved);
    return fd;
}

#define MAX_LISTED 6000
struct listed {
    size_t n;
    size_t stop_after; /* 0: never */
    int drop_on;       /* connection on which each record is dropped as it comes, or -1 */
    struct pc__kept kept[MAX_LISTED];
};
static struct listed listed;

static int note(void *arg, const struct pc__kept *what, int fd)
{
    struct listed *to = arg;
    uint64_t content = 0;
    struct stat status;
    REQUIRE(to->n < MAX_LISTED);
    CHECK(fstat(fd, &status) == 0 && pc__file_id(&status) == what->inode, "%lu", what->inode);
    CHECK(pread(fd, &content, sizeof content, 8192) == (ssize_t)sizeof content &&
              content == what->region, "region %lu holds %lu", what->region, content);
    CHECK(what->reserved[0] == (char)(what->region & 0x7f) &&
              what->reserved[sizeof what->reserved - 1] == what->reserved[0], "reserved");
    close(fd);
    to->kept[to->n++] = *what;
    if (to->drop_on >= 0)
        CHECK(pc__keeper_drop(to->drop_on, what->inode) == PC_OK, "%s", pc_last_message());
    return to->stop_after > 0 && to->n == to->stop_after ? 42 : 0;
}

static int list(int fd)
{
    listed.n = 0;
    listed.stop_after = 0;
    listed.drop_on = -1;
    const int rc = pc__keeper_list(fd, note, &listed, PATIENCE);
    CHECK(rc == PC_OK, "%d: %s", rc, pc_last_message());
    return rc;
}

static size_t n_descriptors(void)
{
    size_t n = 0;
    for (int fd = 0; fd < 8192; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Of another process. */
static size_t n_descriptors_of(pid_t pid)
{
    size_t n = 0;
    for (int fd = 0; fd < 512; fd++) {
        char path[64];
        struct stat status;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
        n += lstat(path, &status) == 0;
    }
    return n;
}

/* ----------------------------------------------------------------------- tests */

/* The page server is killed right after its last put, with answers unread. */
static void test_server_killed(pid_t raylet)
{
    enum { N = 200 };
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    const pid_t server = fork();
    REQUIRE(server >= 0);
    if (server == 0) {
        const int fd = connect_keeper();
        struct pc__kept what;
        for (uint64_t region = 1; region <= N; region++) {
            const int memfd = make_memfd(region, &what);
            REQUIRE(pc__keeper_put(fd, &what, memfd) == PC_OK);
            if (region == N / 2) { /* leaves most of its answer unread */
                listed.stop_after = 1;
                listed.drop_on = -1;
                REQUIRE(pc__keeper_list(fd, note, &listed, PATIENCE) == 42);
            }
            close(memfd);
        }
        kill(getpid(), SIGKILL);
    }
    int status;
    REQUIRE(waitpid(server, &status, 0) == server);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the server ended by itself");

    const int fd = connect_keeper();
    list(fd);
    CHECK(listed.n == N, "%zu", listed.n);
    for (size_t i = 0; i < listed.n; i++)
        CHECK(listed.kept[i].region == i + 1, "oldest first: %lu at %zu", listed.kept[i].region, i);
    quit_keeper(keeper, fd);
}


/* Unread answers make the keeper's next recvmsg say ECONNRESET; the put behind it must count. */
static void test_put_behind_a_reset(pid_t raylet)
{
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    const struct message request = {.magic = MAGIC, .op = OP_LIST};
    struct pc__kept what;
    int status;

    int fd = connect_keeper();
    CHECK(send_packet(fd, &request, -1) == 0, "list");
    struct pollfd answer = {.fd = fd, .events = POLLIN};
    REQUIRE(poll(&answer, 1, 20000) == 1);
    REQUIRE(kill(keeper, SIGSTOP) == 0);
    REQUIRE(waitpid(keeper, &status, WUNTRACED) == keeper && WIFSTOPPED(status));
    const int memfd = make_memfd(1, &what);
    CHECK(pc__keeper_put(fd, &what, memfd) == PC_OK, "put to a stopped keeper");
    close(memfd);
    close(fd);
    REQUIRE(kill(keeper, SIGCONT) == 0);

    fd = connect_keeper();
    list(fd);
    CHECK(listed.n == 1, "%zu", listed.n);
    quit_keeper(keeper, fd);
}

static void test_update_and_drop(pid_t raylet)
{
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    const int fd = connect_keeper();
    struct pc__kept what[3];
    int memfds[3];

    list(fd);
    CHECK(listed.n == 0, "%zu", listed.n);
    const size_t n_before = n_descriptors_of(keeper);
    for (uint64_t i = 0; i < 3; i++) {
        memfds[i] = make_memfd(i, &what[i]);
        CHECK(pc__keeper_put(fd, &what[i], memfds[i]) == PC_OK, "%s", pc_last_message());
    }
    what[0].sealed = 1;
    what[0].version = 7;
    what[0].kind = PC__KEPT_CACHE;
    CHECK(pc__keeper_put(fd, &what[0], memfds[0]) == PC_OK, "%s", pc_last_message());
    list(fd);
    CHECK(listed.n == 3, "%zu", listed.n);
    CHECK(memcmp(&listed.kept[0], &what[0], sizeof what[0]) == 0, "the update, in its old place");
    CHECK(memcmp(&listed.kept[1], &what[1], sizeof what[1]) == 0, "the others are as they were");

    CHECK(pc__keeper_drop(fd, what[1].inode) == PC_OK, "%s", pc_last_message());
    CHECK(pc__keeper_drop(fd, what[1].inode) == PC_OK, "twice is no error");
    list(fd);
    CHECK(listed.n == 2 && listed.kept[0].region == 0 && listed.kept[1].region == 2, "%zu",
          listed.n);
    CHECK(n_descriptors_of(keeper) == n_before + 2, "%zu descriptors, %zu before",
          n_descriptors_of(keeper), n_before);

    /* each() may stop the list; the connection stays usable. */
    listed = (struct listed){.stop_after = 1, .drop_on = -1};
    CHECK(pc__keeper_list(fd, note, &listed, PATIENCE) == 42 && listed.n == 1, "%zu", listed.n);
    list(fd);
    CHECK(listed.n == 2, "%zu", listed.n);
    for (int i = 0; i < 3; i++)
        close(memfds[i]);
    quit_keeper(keeper, fd);
}

/* Also that a second keeper of the same name is told so, and that the name is free afterwards. */
static void test_names(pid_t raylet)
{
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    char long_name[200];
    int fd = connect_keeper();

    CHECK(pc_keeper_run(name, raylet, NEVER) == PC_ERR_EXISTS, "%s", pc_last_message());
    quit_keeper(keeper, fd);
    CHECK(pc_keeper_connect(name, SECOND / 20, &fd) == PC_ERR_NO_SERVER && fd == -1, "%d", fd);
    memset(long_name, 'k', sizeof long_name);
    long_name[sizeof long_name - 1] = '\0';
    CHECK(pc_keeper_connect(long_name, 0, &fd) == PC_ERR_RANGE, "%s", pc_last_message());
    CHECK(pc_keeper_run(long_name, raylet, 0) == PC_ERR_RANGE, "%s", pc_last_message());
    CHECK(pc_keeper_run("", raylet, 0) == PC_ERR_RANGE, "%s", pc_last_message());
    CHECK(pc_keeper_run(name, 0, 0) == PC_ERR_RANGE, "%s", pc_last_message());
}

static void test_orphaned(pid_t raylet)
{
    const uint64_t timeout_ns = SECOND / 2;
    uint64_t began = now_ns();
    pid_t keeper = start_keeper(raylet, timeout_ns, PLAIN);
    CHECK(wait_exit(keeper, PATIENCE) == 0, "nobody came");
    CHECK(now_ns() - began >= timeout_ns, "left early: %lu ns", now_ns() - began);

    keeper = start_keeper(raylet, timeout_ns, PLAIN);
    const int fd = connect_keeper();
    pause_ns(2 * timeout_ns); /* longer than alone would do; a connection keeps it */
    list(fd);
    began = now_ns();
    close(fd);
    CHECK(wait_exit(keeper, PATIENCE) == 0, "the last one left");
    CHECK(now_ns() - began >= timeout_ns - SECOND / 100, "left early");

    /* A second one, which says nothing, keeps it, too; what the first one does is not disturbed. */
    keeper = start_keeper(raylet, timeout_ns, PLAIN);
    const int holds = connect_keeper();
    int serves = connect_keeper();
    struct pc__kept what;
    const int memfd = make_memfd(1, &what);
    CHECK(pc__keeper_put(serves, &what, memfd) == PC_OK, "%s", pc_last_message());
    close(memfd);
    list(serves);
    close(serves);
    pause_ns(2 * timeout_ns);
    serves = connect_keeper();
    close(holds);
    list(serves);
    pause_ns(2 * timeout_ns);
    list(serves);
    close(serves);
    CHECK(wait_exit(keeper, PATIENCE) == 0, "the last one left");

    /* Who came while it was stopped has come, though it has not looked. */
    keeper = start_keeper(raylet, timeout_ns, PLAIN);
    close(connect_keeper());
    pause_ns(timeout_ns / 5);
    kill(keeper, SIGSTOP);
    serves = connect_keeper();
    pause_ns(2 * timeout_ns);
    kill(keeper, SIGCONT);
    list(serves);
    close(serves);
    CHECK(wait_exit(keeper, PATIENCE) == 0, "the last one left");
}

static void test_raylet_ends(int flags)
{
    pid_t raylet = start_raylet();
    pid_t keeper = start_keeper(raylet, NEVER, flags);
    const int fd = connect_keeper();
    list(fd);
    (void)end_process(raylet); /* reaped: kill(2) does not find it either */
    CHECK(wait_exit(keeper, PATIENCE) == 0, "flags %d", flags);
    struct pc__kept what;
    const int memfd = make_memfd(1, &what);
    CHECK(pc__keeper_put(fd, &what, memfd) == PC_ERR_CLOSED, "%s", pc_last_message());
    CHECK(pc__keeper_list(fd, note, &listed, SECOND) == PC_ERR_CLOSED, "%s", pc_last_message());
    close(memfd);
    close(fd);

    keeper = start_keeper(raylet, NEVER, flags); /* gone before it began */
    CHECK(wait_exit(keeper, PATIENCE) == 0, "flags %d", flags);
}

static void test_many(pid_t raylet)
{
    enum { N = 5000 };
    const size_t n_before = n_descriptors();
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    int fd = connect_keeper();
    struct pc__kept what;

    for (uint64_t region = 1; region <= N; region++) {
        const int memfd = make_memfd(region, &what);
        const int rc = pc__keeper_put(fd, &what, memfd);
        close(memfd);
        CHECK(rc == PC_OK, "%lu: %s", region, pc_last_message());
        if (rc != PC_OK)
            break;
    }
    close(fd);
    fd = connect_keeper();
    list(fd);
    CHECK(listed.n == N, "%zu", listed.n);
    listed = (struct listed){.drop_on = fd};
    CHECK(pc__keeper_list(fd, note, &listed, PATIENCE) == PC_OK && listed.n == N,
          "dropping each as it comes skips none: %zu", listed.n);
    list(fd);
    CHECK(listed.n == 0, "%zu", listed.n);
    quit_keeper(keeper, fd);
    CHECK(n_descriptors() == n_before, "%zu, %zu", n_descriptors(), n_before);
}

/* What a variable costs the keeper does not grow with those that it holds: as many records are looked at
 * for each of thousands as for each of a few. */
static void test_no_search_walks_over_all(void)
{
    enum { N = 2000 };
    struct keeper keeper = {.max_fd = INT_MAX};
    static struct pc__kept all[N];
    pc__kept_init(&keeper.kept);
    for (uint64_t i = 0; i < N; i++) {
        const int memfd = make_memfd(i + 1, &all[i]);
        REQUIRE(keep(&keeper, &all[i], memfd));
        REQUIRE(keep(&keeper, &all[i], dup(memfd))); /* its label, once it is sealed */
    }
    CHECK(keeper.kept.n == N, "%zu", keeper.kept.n);
    CHECK(keeper.kept.n_compared < 5 * N, "%lu of %d puts", keeper.kept.n_compared, 2 * N);
    keeper.kept.n_compared = 0;
    for (size_t i = 0; i < N; i++) /* neither by age nor against it */
        drop(&keeper, all[i * 7 % N].inode);
    CHECK(keeper.kept.n == 0 && pc__link_empty(&keeper.kept.records), "%zu", keeper.kept.n);
    CHECK(keeper.kept.n_compared < 3 * N, "%lu of %d drops", keeper.kept.n_compared, N);
    pc__kept_free(&keeper.kept);
}

/* A connection of a keeper in this process. Returns our end. */
static int connect_within(struct keeper *keeper)
{
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
    keeper->connections[keeper->n_connections++] = (struct connection){.fd = pair[1]};
    return pair[0];
}

static void ask_list(int fd, uint64_t after)
{
    const struct message request = {.magic = MAGIC, .op = OP_LIST, .sequence = after};
    REQUIRE(send_packet(fd, &request, -1) == 0);
}

/* One answer. Returns how many records it has; *last is the sequence of the last, *more its flags. */
static size_t hear_list(int fd, uint64_t *last, int *more)
{
    struct message message;
    size_t n = 0;
    for (int memfd;; n++) {
        REQUIRE(hear_keeper(fd, &message, &memfd, deadline_after(SECOND)) == PC_OK);
        if (message.op == OP_END)
            break;
        close(memfd);
        CHECK(message.sequence > *last, "%lu after %lu", message.sequence, *last);
        *last = message.sequence;
    }
    *more = message.more;
    return n;
}

/* A list of thousands comes in many answers: they look at each record once, whichever is dropped. */
static void test_no_answer_walks_over_all(void)
{
    enum { N = 1000 };
    struct keeper keeper = {.max_fd = INT_MAX};
    static struct pc__kept all[N];
    uint64_t last = 0;
    size_t n = 0;
    int more = END_MORE;
    pc__kept_init(&keeper.kept);
    for (uint64_t i = 0; i < N; i++)
        REQUIRE(keep(&keeper, &all[i], make_memfd(i + 1, &all[i])));
    const int fd = connect_within(&keeper);
    keeper.kept.n_compared = 0;
    while (more & END_MORE) {
        ask_list(fd, last);
        REQUIRE(drain(&keeper, &keeper.connections[0]));
        answer_lists(&keeper);
        n += hear_list(fd, &last, &more);
        drop(&keeper, all[last - 1].inode);
    }
    CHECK(n == N, "%zu", n);
    CHECK(keeper.kept.n_compared < 2 * N, "%lu of %d records", keeper.kept.n_compared, N);
    last = 0;
    ask_list(fd, last); /* from the first one again */
    REQUIRE(drain(&keeper, &keeper.connections[0]));
    answer_lists(&keeper);
    CHECK(hear_list(fd, &last, &more) == LIST_BATCH && last == LIST_BATCH + 1, "%lu", last);
    close(fd);
    close_connection(&keeper, 0);
    pc__each(link, &keeper.kept.records)
        close(pc__of(link, struct pc__kept_record, link)->fd);
    pc__kept_free(&keeper.kept);
}

/* Its name is gone, and somebody waits at the old one while all connections are taken: what it reads to
 * find room is answered. */
static void test_list_while_it_looks(void)
{
    char directory[] = "/tmp/pc-test-keeper-XXXXXX", path[64];
    struct keeper keeper = {.name = path, .pid_fd = -1, .max_fd = INT_MAX};
    uint64_t last = 0;
    int ends[MAX_CONNECTIONS], late, more = 0;
    REQUIRE(mkdtemp(directory) != NULL);
    snprintf(path, sizeof path, "%s/keeper", directory);
    REQUIRE(pc__local_listen(path, 4, &keeper.listener_fd) == PC_OK);
    pc__local_note_file(path, &keeper.file);
    pc__kept_init(&keeper.kept);
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        ends[i] = connect_within(&keeper);
    REQUIRE(pc_keeper_connect(path, 0, &late) == PC_OK);
    REQUIRE(unlink(path) == 0);
    ask_list(ends[1], 0);
    close(ends[0]);
    look_after_name(&keeper, now_ns());
    CHECK(keeper.n_connections == MAX_CONNECTIONS, "%zu", keeper.n_connections);
    CHECK(hear_list(ends[1], &last, &more) == 0 && more == 0, "%d", more);
    while (keeper.n_connections > 0)
        close_connection(&keeper, keeper.n_connections - 1);
    for (int i = 1; i < MAX_CONNECTIONS; i++)
        close(ends[i]);
    close(late);
    pc__kept_free(&keeper.kept);
    pc__local_close(path, keeper.listener_fd);
    CHECK(rmdir(directory) == 0, "%d", errno);
}

/* A full keeper says so by closing, still gives back what it has, and says that this is not all. */
static void test_full(pid_t raylet)
{
    const pid_t keeper = start_keeper(raylet, NEVER, FEW_DESCRIPTORS);
    int fd = connect_keeper();
    struct pc__kept what;
    int rc = PC_OK;
    uint64_t region = 0;

    while (rc == PC_OK && region < 10000) {
        const int memfd = make_memfd(++region, &what);
        rc = pc__keeper_put(fd, &what, memfd);
        close(memfd);
    }
    CHECK(rc == PC_ERR_CLOSED, "%d after %lu", rc, region);
    close(fd);
    fd = connect_keeper();
    listed.n = listed.stop_after = 0;
    listed.drop_on = -1;
    rc = pc__keeper_list(fd, note, &listed, PATIENCE);
    CHECK(rc == PC_ERR_HOME_LOST, "%d: %s", rc, pc_last_message());
    CHECK(listed.n >= 40 && listed.n <= 96 - SPARE_DESCRIPTORS,
          "the raised limit less the spare ones: %zu", listed.n);
    quit_keeper(keeper, fd);
}

/* True if the keeper closes the connection, which it must within PATIENCE. */
static bool is_closed(int fd)
{
    struct pollfd end = {.fd = fd, .events = 0};
    return poll(&end, 1, 20000) == 1 && (end.revents & POLLHUP) != 0;
}

static void send_two_descriptors(int fd, const struct message *message, int memfd)
{
    union { struct cmsghdr align; char bytes[CMSG_SPACE(2 * sizeof(int))]; } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)message, .iov_len = sizeof *message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&packet);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(2 * sizeof(int));
    memcpy(CMSG_DATA(rights), (int[]){memfd, memfd}, 2 * sizeof(int));
    REQUIRE(sendmsg(fd, &packet, MSG_NOSIGNAL) == (ssize_t)sizeof *message);
}

/* Each kind of nonsense ends its own connection and nothing else, and leaks no descriptor. */
static void test_garbage(pid_t raylet)
{
    enum { SHORT, LONG, MAGICAL, UNKNOWN_OP, ANSWER_OP, PUT_WITHOUT, DROP_WITH, TWO, WRONG_INODE,
           BAD_KIND, BAD_SEALED, NOT_A_FILE, TWO_LISTS, N_KINDS };
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    const int good_fd = connect_keeper();
    struct pc__kept what;
    const int memfd = make_memfd(1, &what);
    int pipes[2];

    REQUIRE(pipe2(pipes, O_CLOEXEC) == 0);
    CHECK(pc__keeper_put(good_fd, &what, memfd) == PC_OK, "%s", pc_last_message());
    list(good_fd);
    const size_t n_before = n_descriptors_of(keeper);
    for (int round = 0; round < 20; round++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            const int fd = connect_keeper();
            struct message message = {.magic = MAGIC, .op = OP_PUT, .what = what};
            char large[4096];
            memset(large, round, sizeof large);
            message.op = OP_DROP; /* LONG: would be fine if it ended here */
            memcpy(large, &message, sizeof message);
            message.op = OP_PUT;
            switch (kind) {
            case SHORT: REQUIRE(send(fd, &message, 5, MSG_NOSIGNAL) == 5); break;
            case LONG: REQUIRE(send(fd, large, sizeof large, MSG_NOSIGNAL) > 0); break;
            case MAGICAL: message.magic++; send_packet(fd, &message, memfd); break;
            case UNKNOWN_OP: message.op = 77; send_packet(fd, &message, -1); break;
            case ANSWER_OP: message.op = OP_RECORD; send_packet(fd, &message, memfd); break;
            case PUT_WITHOUT: send_packet(fd, &message, -1); break;
            case DROP_WITH: message.op = OP_DROP; send_packet(fd, &message, memfd); break;
            case TWO: send_two_descriptors(fd, &message, memfd); break;
            case WRONG_INODE: message.what.inode++; send_packet(fd, &message, memfd); break;
            case BAD_KIND: message.what.kind = PC__KEPT_LAST; send_packet(fd, &message, memfd); break;
            case BAD_SEALED: message.what.sealed = 2; send_packet(fd, &message, memfd); break;
            case NOT_A_FILE: {
                struct stat status;
                REQUIRE(fstat(pipes[0], &status) == 0);
                message.what.inode = pc__file_id(&status);
                send_packet(fd, &message, pipes[0]);
                break;
            }
            case TWO_LISTS: { /* in one pass: the keeper is stopped meanwhile */
                int status;
                REQUIRE(kill(keeper, SIGSTOP) == 0);
                REQUIRE(waitpid(keeper, &status, WUNTRACED) == keeper && WIFSTOPPED(status));
                message.op = OP_LIST;
                send_packet(fd, &message, -1);
                send_packet(fd, &message, -1);
                REQUIRE(kill(keeper, SIGCONT) == 0);
                break;
            }
            default: break;
            }
            CHECK(is_closed(fd), "kind %d", kind);
            close(fd);
        }
    }
    list(good_fd);
    CHECK(listed.n == 1 && memcmp(&listed.kept[0], &what, sizeof what) == 0, "%zu", listed.n);

    CHECK(n_descriptors_of(keeper) == n_before, "%zu descriptors, %zu before",
          n_descriptors_of(keeper), n_before);

    /* A crowd: more connections than it takes. The rest is refused, the first stay. */
    int crowd[2 * MAX_CONNECTIONS];
    for (int i = 0; i < 2 * MAX_CONNECTIONS; i++)
        crowd[i] = connect_keeper();
    CHECK(is_closed(crowd[2 * MAX_CONNECTIONS - 1]), "the last of the crowd");
    list(good_fd);
    for (int i = 0; i < 2 * MAX_CONNECTIONS; i++)
        close(crowd[i]);
    close(pipes[0]);
    close(pipes[1]);
    close(memfd);
    quit_keeper(keeper, good_fd);
}

/* A keeper that does not run: calls end at their deadline. */
static void test_stalled(pid_t raylet)
{
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    const int fd = connect_keeper();
    int status;

    list(fd);
    REQUIRE(kill(keeper, SIGSTOP) == 0);
    REQUIRE(waitpid(keeper, &status, WUNTRACED) == keeper && WIFSTOPPED(status));
    CHECK(pc__keeper_list(fd, note, &listed, SECOND / 10) == PC_ERR_TIMEOUT, "%s",
          pc_last_message());
    int rc = PC_OK;
    const uint64_t began = now_ns();
    for (int i = 0; rc == PC_OK && i < 100000; i++)
        rc = pc__keeper_drop(fd, 1);
    CHECK(rc == PC_ERR_TIMEOUT, "%d: %s", rc, pc_last_message());
    CHECK(now_ns() - began < 4 * SEND_TIMEOUT_NS, "%lu", now_ns() - began);
    (void)end_process(keeper);
    close(fd);
}

static int note_slowly(void *arg, const struct pc__kept *what, int fd)
{
    pause_ns(SECOND / 50);
    return note(arg, what, fd);
}

/* A server that has much to look at after a restart: the deadline is for the keeper's answers. */
static void test_slow_server(pid_t raylet)
{
    enum { N = 3 * LIST_BATCH };
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    const int fd = connect_keeper();
    struct pc__kept what;
    for (uint64_t region = 1; region <= N; region++) {
        const int memfd = make_memfd(region, &what);
        REQUIRE(pc__keeper_put(fd, &what, memfd) == PC_OK);
        close(memfd);
    }
    listed.n = listed.stop_after = 0;
    listed.drop_on = -1;
    const int rc = pc__keeper_list(fd, note_slowly, &listed, SECOND);
    CHECK(rc == PC_OK && listed.n == N, "%d after %zu: %s", rc, listed.n, pc_last_message());
    quit_keeper(keeper, fd);
}

/* One that is stopped, and whose queue is full of connections that have ended, is not called absent; it
 * is found again when it goes on. */
static void test_full_queue(pid_t raylet)
{
    enum { MOST = 1000 };
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    struct pc__kept what;
    const int memfd = make_memfd(1, &what);
    int fd = connect_keeper(), status, n = 0, rc = PC_OK;
    CHECK(pc__keeper_put(fd, &what, memfd) == PC_OK, "%s", pc_last_message());
    list(fd);
    REQUIRE(kill(keeper, SIGSTOP) == 0);
    REQUIRE(waitpid(keeper, &status, WUNTRACED) == keeper && WIFSTOPPED(status));
    close(fd);
    for (; rc == PC_OK && n < MOST; n++) {
        rc = pc_keeper_connect(name, SECOND / 10, &fd);
        if (rc == PC_OK)
            close(fd);
    }
    CHECK(n > MAX_CONNECTIONS && n < MOST, "%d", n);
    CHECK(rc == PC_ERR_TIMEOUT, "it lives: %d: %s", rc, pc_last_message());
    REQUIRE(kill(keeper, SIGCONT) == 0);
    fd = connect_keeper();
    list(fd);
    CHECK(listed.n == 1, "%zu", listed.n);
    close(memfd);
    quit_keeper(keeper, fd);
    CHECK(pc_keeper_connect(name, 0, &fd) == PC_ERR_NO_SERVER, "%s", pc_last_message());
    const uint64_t began = now_ns();
    CHECK(pc_keeper_find(name, PATIENCE, &fd) == PC_ERR_NO_SERVER, "%s", pc_last_message());
    CHECK(now_ns() - began < PATIENCE / 2, "%lu", now_ns() - began);
}

/* A record that it refuses, of a server that it keeps for: it has only a part from then on, until it is
 * told that it has all. What was put after that, in the same breath, is lost too. */
static void test_refused_is_part(pid_t raylet)
{
    const pid_t keeper = start_keeper(raylet, NEVER, PLAIN);
    struct pc__kept what;
    const int memfd = make_memfd(1, &what);
    int fd = connect_keeper();
    list(fd);
    CHECK(pc__keeper_put(fd, &what, memfd) == PC_OK, "%s", pc_last_message());
    struct pc__kept wrong = what;
    wrong.inode++;
    CHECK(pc__keeper_put(fd, &wrong, memfd) == PC_OK, "%s", pc_last_message());
    CHECK(is_closed(fd), "the record was taken");
    close(fd);
    fd = connect_keeper();
    listed.n = listed.stop_after = 0;
    listed.drop_on = -1;
    int rc = pc__keeper_list(fd, note, &listed, PATIENCE);
    CHECK(rc == PC_ERR_HOME_LOST && listed.n == 1, "%d, %zu: %s", rc, listed.n, pc_last_message());
    CHECK(pc__keeper_try_whole(fd) == PC_OK, "%s", pc_last_message());
    list(fd);
    close(memfd);
    quit_keeper(keeper, fd);
}

/* Each file system has a first file. */
static void test_ids_of_two_disks(void)
{
    const struct stat one = {.st_dev = 0xfe00, .st_ino = 13}, other = {.st_dev = 0xfe01, .st_ino = 13},
                      next = {.st_dev = 0xfe00, .st_ino = 14};
    CHECK(pc__file_id(&one) != pc__file_id(&other), "two disks");
    CHECK(pc__file_id(&one) != pc__file_id(&next), "two files");
}

int main(void)
{
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    if (limit.rlim_max < 5200) {
        printf("the hard limit of descriptors is %lu; 5200 are needed\n",
               (unsigned long)limit.rlim_max);
        return TEST_SKIPPED;
    }
    const pid_t raylet = start_raylet();
    test_ids_of_two_disks();
    test_server_killed(raylet);
    test_put_behind_a_reset(raylet);
    test_update_and_drop(raylet);
    test_names(raylet);
    test_orphaned(raylet);
    test_raylet_ends(PLAIN);
    test_raylet_ends(WITHOUT_PIDFD);
    test_many(raylet);
    test_no_search_walks_over_all();
    test_no_answer_walks_over_all();
    test_list_while_it_looks();
    test_full(raylet);
    test_full_queue(raylet);
    test_refused_is_part(raylet);
    test_garbage(raylet);
    test_stalled(raylet);
    test_slow_server(raylet);
    (void)end_process(raylet);
    return test_result();
}
