/* What a raylet of a lab starts as Python. A worker, or an agent for runtime environments, it leaves to
 * the fork server (worker_server.py), and lives as long as that one does; all else it becomes.
 *
 * LAB_PYTHON   the interpreter
 * LAB_WORKERS  the fork server's socket */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const forked[] = {"/default_worker.py", "/runtime_env/agent/main.py"};

extern char **environ;

static volatile pid_t worker;

static void
forward(int number) {
    if (worker > 0)
        kill(worker, number);
}

static int
is_forked(const char *script) {
    for (size_t i = 0; i < sizeof forked / sizeof forked[0]; i++) {
        size_t n = strlen(script), m = strlen(forked[i]);
        if (n > m && strcmp(script + n - m, forked[i]) == 0)
            return 1;
    }
    return 0;
}

static int
all(int fd, const void *bytes, size_t n, int out) {
    char *at = (char *)bytes;
    while (n > 0) {
        ssize_t got = out ? send(fd, at, n, MSG_NOSIGNAL) : recv(fd, at, n, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return -1;
        at += got;
        n -= (size_t)got;
    }
    return 0;
}

/* The length, with stdin, stdout and stderr beside it. */
static int
send_head(int fd, uint32_t n) {
    int fds[3] = {0, 1, 2};
    char room[CMSG_SPACE(sizeof fds)];
    memset(room, 0, sizeof room);
    struct iovec iov = {&n, sizeof n};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = room,
                             .msg_controllen = sizeof room};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(head), fds, sizeof fds);
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)sizeof n ? 0 : -1;
}

/* Directory, number of arguments, arguments from the script on, variables: each ends with a zero. */
static int
ask(int fd, int n_arguments, char **arguments) {
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    char *directory = getcwd(NULL, 0);
    if (out == NULL || directory == NULL)
        return -1;
    fprintf(out, "%s%c%d%c", directory, 0, n_arguments, 0);
    for (int i = 0; i < n_arguments; i++)
        fprintf(out, "%s%c", arguments[i], 0);
    for (char **each = environ; *each != NULL; each++)
        fprintf(out, "%s%c", *each, 0);
    if (fclose(out) != 0)
        return -1;
    return send_head(fd, (uint32_t)n) == 0 ? all(fd, text, n, 1) : -1;
}

int
main(int argc, char **argv) {
    const char *python = getenv("LAB_PYTHON"), *path = getenv("LAB_WORKERS");
    if (python == NULL) {
        fprintf(stderr, "worker_launcher: LAB_PYTHON is not set\n");
        return 127;
    }
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int32_t pid = 0, status = 0;
    int script = argc > 1 && strcmp(argv[1], "-u") == 0 ? 2 : 1;
    if (path != NULL && strlen(path) < sizeof to.sun_path && argc > script && is_forked(argv[script])) {
        setenv("PYTHONUNBUFFERED", "1", 1); /* as -u, and as a raylet gives it to workers */
        strcpy(to.sun_path, path);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0
            && ask(fd, argc - script, argv + script) == 0 && all(fd, &pid, sizeof pid, 0) == 0 && pid > 0) {
            worker = pid;
            signal(SIGTERM, forward);
            signal(SIGINT, forward);
            if (all(fd, &status, sizeof status, 0) != 0)
                return 1;
            if (WIFSIGNALED(status)) {
                signal(WTERMSIG(status), SIG_DFL);
                raise(WTERMSIG(status));
            }
            return WEXITSTATUS(status);
        }
        if (fd >= 0)
            close(fd);
    }
    argv[0] = (char *)python;
    execv(python, argv);
    perror(python);
    return 127;
}
