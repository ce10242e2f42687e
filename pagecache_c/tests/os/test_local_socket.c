/* test_local_socket.c - sockets by path: what killed processes left, who is alive, and strangers. */
#include "common/error.h"
#include "os/local_socket.h"
#include "tests/support/check.h"
#include "tests/support/processes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define NOBODY 65534
#define BACKLOG 16

static char directory[64];

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void pause_ms(int ms)
{
    (void)poll(NULL, 0, ms);
}

static const char *path_of(const char *file)
{
    static char paths[4][PC__SOCKET_NAME_BYTES];
    static int n;
    char *path = paths[n++ % 4];
    REQUIRE(snprintf(path, PC__SOCKET_NAME_BYTES, "%s/%s", directory, file) < PC__SOCKET_NAME_BYTES);
    return path;
}

static bool is_there(const char *path)
{
    struct stat found;
    return lstat(path, &found) == 0;
}

static int n_files(void)
{
    DIR *list = opendir(directory);
    REQUIRE(list);
    int n = 0;
    while (readdir(list))
        n++;
    closedir(list);
    return n - 2;
}

/* The process that listens there; 0: none, with errno. */
static pid_t listener_of(const char *path)
{
    struct sockaddr_un address;
    socklen_t n_bytes, who_bytes = sizeof(struct ucred);
    struct ucred who;
    REQUIRE(pc__local_address(path, &address, &n_bytes) == PC_OK);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    REQUIRE(fd >= 0);
    pid_t pid = 0;
    if (connect(fd, (struct sockaddr *)&address, n_bytes) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &who_bytes) == 0)
        pid = who.pid;
    const int why = errno;
    close(fd);
    errno = why;
    return pid;
}

/* A process that listens there until it is killed. */
static pid_t start_listener(const char *path)
{
    int ready[2];
    char byte;
    REQUIRE(pipe(ready) == 0);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        int fd;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (pc__local_listen(path, BACKLOG, &fd) != PC_OK || write(ready[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(ready[1]);
    REQUIRE(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    return pid;
}

static void test_what_was_left(void)
{
    int fd;
    const char *one = path_of("one"), *other = path_of("other"), *file = path_of("file");
    REQUIRE(end_process(start_listener(one)));
    CHECK(is_there(one), "a kill leaves it");
    CHECK(listener_of(one) == 0 && pc__local_nobody(errno), "%d", errno);
    REQUIRE(close(open(file, O_CREAT | O_WRONLY, 0600)) == 0);

    CHECK(pc__local_listen(other, BACKLOG, &fd) == PC_OK, "%s", pc_last_message());
    CHECK(!is_there(one), "whoever begins removes what others left");
    pc__local_close(other, fd);

    REQUIRE(end_process(start_listener(one)));
    CHECK(pc__local_listen(one, BACKLOG, &fd) == PC_OK, "%s", pc_last_message());
    CHECK(listener_of(one) == getpid(), "it is replaced");
    REQUIRE(end_process(start_listener(other)));
    errno = EXDEV;
    pc__local_close(one, fd);
    CHECK(errno == EXDEV, "%d", errno);
    CHECK(!is_there(one) && !is_there(other), "and whoever ends");
    CHECK(is_there(file) && unlink(file) == 0, "what is no socket is nobody's business");
    CHECK(n_files() == 0, "%d", n_files());
}

static void test_the_living_stay(void)
{
    int fd, theirs, again;
    const char *one = path_of("one"), *other = path_of("other");
    const pid_t living = start_listener(one);
    CHECK(pc__local_listen(one, BACKLOG, &fd) == PC_ERR_EXISTS && fd == -1, "%d", fd);
    CHECK(strstr(pc_last_message(), one), "%s", pc_last_message());
    CHECK(listener_of(one) == living, "%d", (int)listener_of(one));

    REQUIRE(pc__local_listen(other, BACKLOG, &theirs) == PC_OK);
    const char *third = path_of("third");
    REQUIRE(pc__local_listen(third, BACKLOG, &again) == PC_OK);
    pc__local_close(third, again);
    struct pollfd came = {.fd = theirs, .events = POLLIN};
    CHECK(poll(&came, 1, 0) == 0, "who is looked at sees no connection");

    REQUIRE(kill(living, SIGSTOP) == 0); /* nor is one that is stopped, or whose queue is full */
    for (int i = 0; i < 2 * BACKLOG; i++)
        (void)listener_of(one);
    CHECK(pc__local_listen(one, BACKLOG, &fd) == PC_ERR_EXISTS, "%s", pc_last_message());
    pc__local_close(other, theirs);
    CHECK(is_there(one) && !is_there(other), "its own goes");
    REQUIRE(end_process(living));
    REQUIRE(unlink(one) == 0);
}

/* Many processes want one name, and are killed while they have it: who has it is who is reached. */
static void test_one_name(void)
{
    enum { N = 6, SECONDS = 4 };
    struct { _Atomic long had, foreign; } *told =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(told != MAP_FAILED);
    const char *path = path_of("wanted");
    pid_t pids[N] = {0};
    unsigned random = 1;
    const double end_s = now_s() + SECONDS;
    while (now_s() < end_s) {
        const unsigned i = (random = random * 1103515245u + 12345u) >> 16;
        pid_t *one = &pids[i % N];
        if (*one)
            REQUIRE(end_process(*one));
        *one = fork();
        REQUIRE(*one >= 0);
        if (*one == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;) {
                int fd;
                if (pc__local_listen(path, BACKLOG, &fd) != PC_OK)
                    continue;
                told->had++;
                for (unsigned look = 0; look < 4 + i % 8; look++) {
                    const pid_t who = listener_of(path);
                    if (who != getpid() && !(who == 0 && errno == EAGAIN))
                        told->foreign++;
                }
                if (i & 16)
                    _exit(0); /* without a word */
                pc__local_close(path, fd);
            }
        }
        pause_ms((int)(i % 5));
    }
    for (int i = 0; i < N; i++)
        if (pids[i])
            REQUIRE(end_process(pids[i]));
    CHECK(told->had > 50, "%ld", told->had);
    CHECK(told->foreign == 0, "%ld of %ld", told->foreign, told->had);
    munmap(told, 4096);
    int fd;
    CHECK(pc__local_listen(path, BACKLOG, &fd) == PC_OK, "%s", pc_last_message());
    pc__local_close(path, fd);
    CHECK(n_files() == 0, "%d", n_files());
}

static void test_directories(void)
{
    int fd;
    char long_name[200], link_path[80], through[100];
    memset(long_name, 'k', sizeof long_name);
    long_name[0] = '/';
    long_name[sizeof long_name - 1] = '\0';
    CHECK(pc__local_listen(long_name, BACKLOG, &fd) == PC_ERR_RANGE, "%s", pc_last_message());
    long_name[PC__SOCKET_NAME_BYTES] = '\0';
    CHECK(pc__local_listen(long_name, BACKLOG, &fd) == PC_ERR_RANGE, "%s", pc_last_message());
    CHECK(pc__local_listen("", BACKLOG, &fd) == PC_ERR_RANGE, "%s", pc_last_message());
    snprintf(through, sizeof through, "%s/no/one", directory);
    CHECK(pc__local_listen(through, BACKLOG, &fd) == PC_ERR_SYSTEM, "%s", pc_last_message());
    CHECK(listener_of(through) == 0 && pc__local_nobody(errno), "%d", errno);
    snprintf(link_path, sizeof link_path, "%s-link", directory);
    REQUIRE(symlink(directory, link_path) == 0);
    snprintf(through, sizeof through, "%s/one", link_path);
    CHECK(pc__local_listen(through, BACKLOG, &fd) == PC_ERR_SYSTEM, "%s", pc_last_message());
    REQUIRE(unlink(link_path) == 0);

    const int lock = open(directory, O_RDONLY | O_DIRECTORY);
    REQUIRE(lock >= 0 && flock(lock, LOCK_EX) == 0);
    const double begun_s = now_s();
    CHECK(pc__local_listen(path_of("one"), BACKLOG, &fd) == PC_ERR_TIMEOUT, "%s",
          pc_last_message());
    CHECK(now_s() - begun_s < 60, "%g s", now_s() - begun_s);
    close(lock);
    CHECK(pc__local_listen(path_of("one"), BACKLOG, &fd) == PC_OK, "%s", pc_last_message());
    pc__local_close(path_of("one"), fd);
}

/* A directory that was removed, and made again, while somebody waited for its lock. */
static void test_a_directory_that_is_made_again(void)
{
    const int lock = open(directory, O_RDONLY | O_DIRECTORY);
    REQUIRE(lock >= 0 && flock(lock, LOCK_EX) == 0);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        int fd;
        close(lock);
        _exit(pc__local_listen(path_of("one"), BACKLOG, &fd) == PC_OK ? 0 : 1);
    }
    pause_ms(300); /* it waits; if not yet, the test shows less */
    REQUIRE(rmdir(directory) == 0 && mkdir(directory, 0700) == 0);
    const int new_lock = open(directory, O_RDONLY | O_DIRECTORY);
    REQUIRE(new_lock >= 0 && flock(new_lock, LOCK_EX) == 0);
    close(lock);
    pause_ms(300);
    CHECK(!is_there(path_of("one")), "the old one's lock is none of the new one");
    close(new_lock);
    int status, fd;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%d", status);
    CHECK(pc__local_listen(path_of("one"), BACKLOG, &fd) == PC_OK, "%s", pc_last_message());
    pc__local_close(path_of("one"), fd);
}

/* Its file, or the directory, was removed while it listens: it listens anew, under the same name. */
static void test_a_name_that_was_removed(void)
{
    const char *one = path_of("one"), *other = path_of("other");
    struct pc__local_file file;
    int fd, again = -1;
    REQUIRE(pc__local_listen(one, BACKLOG, &fd) == PC_OK);
    pc__local_note_file(one, &file);
    CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_OK && again == -1, "%d", again);

    for (int with_directory = 0; with_directory < 2; with_directory++) {
        REQUIRE(unlink(one) == 0);
        if (with_directory)
            REQUIRE(rmdir(directory) == 0);
        CHECK(listener_of(one) == 0, "nobody finds it");
        CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_OK && again >= 0, "%s",
              pc_last_message());
        REQUIRE(close(fd) == 0);
        fd = again;
        CHECK(listener_of(one) == getpid(), "%d", (int)listener_of(one));
        CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_OK && again == -1, "%d", again);
        struct stat found;
        REQUIRE(stat(directory, &found) == 0);
        CHECK((found.st_mode & 0777) == 0700, "%o", found.st_mode);
    }

    REQUIRE(rename(one, other) == 0); /* and somebody who lives has its name now */
    const pid_t living = start_listener(one);
    CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_ERR_EXISTS && again == -1, "%d", again);
    CHECK(listener_of(one) == living, "%d", (int)listener_of(one));
    REQUIRE(end_process(living));
    CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_OK && again >= 0, "%s",
          pc_last_message());
    REQUIRE(close(fd) == 0);

    REQUIRE(unlink(one) == 0 && chmod(directory, 0755) == 0);
    fd = again;
    CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_ERR_DENIED && again == -1, "%d", again);
    REQUIRE(chmod(directory, 0700) == 0);
    CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_OK && again >= 0, "%d", again);
    close(fd);
    pc__local_close(one, again);
    CHECK(n_files() == 0, "%d", n_files());
}

/* Whoever finds the name of a living process reaches it, from the first moment. */
static void test_a_name_is_there_when_its_process_listens(void)
{
    enum { TURNS = 3000 };
    const char *one = path_of("one");
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        struct pc__local_file file = {0};
        int fd = -1, again;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (pc__local_look(one, BACKLOG, &file, &again) == PC_OK) {
            if (again < 0)
                continue;
            close(fd);
            fd = again;
        }
        _exit(1);
    }
    int n_refused = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        const double end_s = now_s() + 20;
        while (!is_there(one))
            REQUIRE(now_s() < end_s);
        n_refused += listener_of(one) != pid;
        REQUIRE(unlink(one) == 0);
    }
    CHECK(n_refused == 0, "%d of %d", n_refused, TURNS);
    REQUIRE(end_process(pid));
    int fd;
    REQUIRE(pc__local_listen(one, BACKLOG, &fd) == PC_OK);
    pc__local_close(one, fd);
    CHECK(n_files() == 0, "what it had begun goes too: %d", n_files());
}

/* Cleaners of /tmp take what nobody has used for days. */
static void test_what_is_in_use_looks_like_it(void)
{
    const char *one = path_of("one");
    const struct timespec old[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    struct pc__local_file file;
    struct stat found;
    int fd, again;
    REQUIRE(pc__local_listen(one, BACKLOG, &fd) == PC_OK);
    pc__local_note_file(one, &file);
    REQUIRE(utimensat(AT_FDCWD, one, old, 0) == 0 && utimensat(AT_FDCWD, directory, old, 0) == 0);
    CHECK(pc__local_look(one, BACKLOG, &file, &again) == PC_OK && again == -1, "%d", again);
    for (int i = 0; i < 2; i++) {
        REQUIRE(stat(i ? directory : one, &found) == 0);
        CHECK(time(NULL) - found.st_mtime < 60, "%ld", (long)found.st_mtime);
        CHECK(time(NULL) - found.st_atime < 60, "%ld", (long)found.st_atime);
    }
    pc__local_close(one, fd);
}

static void test_no_descriptors(void)
{
    struct rlimit before;
    int fds[64], n = 0, fd;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const struct rlimit few = {.rlim_cur = 40, .rlim_max = before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
    while (n < 64 && (fds[n] = dup(0)) >= 0)
        n++;
    for (int left = 0; left < 2; left++) { /* for the socket, and for the directory */
        CHECK(pc__local_listen(path_of("one"), BACKLOG, &fd) == PC_ERR_DESCRIPTORS, "%s",
              pc_last_message());
        close(fds[--n]);
    }
    /* Enough to listen, and none to look at what was left. */
    CHECK(pc__local_listen(path_of("one"), BACKLOG, &fd) == PC_OK, "%s", pc_last_message());
    while (n)
        close(fds[--n]);
    REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
    pc__local_close(path_of("one"), fd);
    CHECK(n_files() == 0, "%d", n_files());
}

/* What another user can do: nothing. */
static void test_a_stranger(void)
{
    if (geteuid() != 0) {
        printf("skip a_stranger: only root can become somebody else\n");
        return;
    }
    int fd;
    const char *one = path_of("one"), *free_name = path_of("free");
    REQUIRE(pc__local_listen(one, BACKLOG, &fd) == PC_OK);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        int mine, failed = 0;
        REQUIRE(setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
        failed |= pc__local_listen(free_name, BACKLOG, &mine) == PC_OK ? 1 : 0;
        struct sockaddr_un address;
        socklen_t n_bytes;
        REQUIRE(pc__local_address(free_name, &address, &n_bytes) == PC_OK);
        mine = socket(AF_UNIX, SOCK_SEQPACKET, 0);
        failed |= bind(mine, (struct sockaddr *)&address, n_bytes) == 0 ? 2 : 0;
        failed |= unlink(one) == 0 ? 4 : 0;
        failed |= listener_of(one) != 0 || errno != EACCES ? 8 : 0;
        failed |= rename(directory, "/tmp/clamor-test-taken") == 0 ? 16 : 0;
        failed |= rmdir(directory) == 0 ? 32 : 0;
        _exit(failed);
    }
    int status;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%#x", (unsigned)WEXITSTATUS(status));
    CHECK(listener_of(one) == getpid(), "%d", (int)listener_of(one));
    pc__local_close(one, fd);
}

int main(void)
{
    snprintf(directory, sizeof directory, "/tmp/clamor-test-XXXXXX");
    REQUIRE(mkdtemp(directory));
    test_what_was_left();
    test_the_living_stay();
    test_one_name();
    test_directories();
    test_a_directory_that_is_made_again();
    test_a_name_that_was_removed();
    test_a_name_is_there_when_its_process_listens();
    test_what_is_in_use_looks_like_it();
    test_no_descriptors();
    test_a_stranger();
    CHECK(n_files() == 0, "%d", n_files());
    CHECK(rmdir(directory) == 0, "%d", errno);
    return test_result();
}
