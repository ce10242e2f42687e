/* local_socket.c - the Unix sockets of a node: their addresses, and who may listen on one.
 *
 * Owns: the files of sockets in a directory that is this user's alone. All of them are made and
 * removed under a lock on that directory (flock), which is held for a moment and never for a wait.
 * Threads: any. Locks: that one.
 *
 * Invariants: a file is removed only where no process has its socket, and nobody can bind between
 * that look and the removal. So a new server never removes the socket of a living one. And a name
 * appears when its process listens: who finds it and is refused knows that its process has ended.
 *
 * Kernel facts:
 *   - connect() of another type of socket says EPROTOTYPE where a process has the socket, listening
 *     or not, and ECONNREFUSED where none has: a look that the other side never sees.
 *   - gVisor says ECONNREFUSED there in both cases. So a second look, of the same type, must say it
 *     too; a process that listens sees a connection that ends.
 *   - A socket's file outlives its process, and bind() never replaces one.
 *
 * Does not: make or check the directory, but where one that was there has been removed.
 */
#include "os/local_socket.h"
#include "common/error.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOCK_MS 10000
#define LOCK_RETRY_MS 2
#define MARK_S 3600

int pc__local_address(const char *name, struct sockaddr_un *address, socklen_t *n_bytes)
{
    const size_t length = strlen(name);

    if (length == 0 || length >= PC__SOCKET_NAME_BYTES)
        return pc__fail(PC_ERR_RANGE, "a socket name of %zu bytes; 1 to %d fit: %s", length,
                        PC__SOCKET_NAME_BYTES - 1, name);
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    /* An abstract name begins with a NUL, a path ends with one: a byte more than the name. */
    memcpy(address->sun_path + (name[0] == '/' ? 0 : 1), name, length);
    *n_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    return PC_OK;
}

int pc__local_nobody(int errnum)
{
    return errnum == ECONNREFUSED || errnum == ENOENT || errnum == ENOTDIR || errnum == EACCES;
}

/* ------------------------------------------------------- the directory's lock */

static int try_lock(const char *directory)
{
    const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return pc__fail_errno("open the sockets' directory %s", directory);
    for (int waited_ms = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; waited_ms += LOCK_RETRY_MS) {
        int rc = PC_OK;
        if (errno != EWOULDBLOCK && errno != EINTR)
            rc = pc__fail_errno("lock the sockets' directory %s", directory);
        else if (waited_ms >= LOCK_MS)
            rc = pc__fail(PC_ERR_TIMEOUT, "another process has kept the sockets' directory %s "
                          "locked for %d ms", directory, waited_ms);
        if (rc != PC_OK) {
            close(fd);
            return rc;
        }
        nanosleep(&(struct timespec){.tv_nsec = LOCK_RETRY_MS * 1000000L}, NULL);
    }
    return fd;
}

/* A descriptor whose closing unlocks it. One that was removed meanwhile guards nothing. */
static int lock_directory(const char *directory)
{
    for (;;) {
        const int fd = try_lock(directory);
        struct stat found;
        if (fd < 0 || (fstat(fd, &found) == 0 && found.st_nlink != 0))
            return fd;
        close(fd);
    }
}

/* The directory of a path, without the slash; "/" has none of ours. */
static void directory_of(const char *path, char *directory)
{
    const size_t length = (size_t)(strrchr(path, '/') - path);
    memcpy(directory, path, length);
    directory[length] = '\0';
}

/* ------------------------------------------------------------ what was left */

/* Whether connect() by a socket of this type says that no process has the socket at the path. */
static bool is_refused(int type, const char *path)
{
    struct sockaddr_un address;
    socklen_t n_bytes;
    if (pc__local_address(path, &address, &n_bytes) != PC_OK)
        return false;
    const int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false; /* short of descriptors: the next one sees to it */
    const bool refused = connect(fd, (const struct sockaddr *)&address, n_bytes) != 0 &&
                         errno == ECONNREFUSED;
    close(fd);
    return refused;
}

/* Removes the files of sockets that no process has. Under the lock. */
static void remove_left(int directory_fd, const char *directory)
{
    const int copy = openat(directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = copy < 0 ? NULL : fdopendir(copy);
    if (!list) {
        if (copy >= 0)
            close(copy);
        return;
    }
    const struct dirent *entry;
    while ((entry = readdir(list)) != NULL) {
        char path[PC__SOCKET_NAME_BYTES];
        struct stat found;
        const int length = snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        if (length < 0 || (size_t)length >= sizeof path ||
            fstatat(directory_fd, entry->d_name, &found, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISSOCK(found.st_mode))
            continue;
        if (is_refused(SOCK_DGRAM, path) && is_refused(SOCK_SEQPACKET, path))
            (void)unlinkat(directory_fd, entry->d_name, 0);
    }
    closedir(list);
}

/* ----------------------------------------------------------- listen, and end */

static int taken(const char *name)
{
    return pc__fail(PC_ERR_EXISTS, "another process listens on %s", name);
}

static int bind_and_listen(int fd, const struct sockaddr_un *address, socklen_t n_bytes,
                           const char *name, int backlog)
{
    if (bind(fd, (const struct sockaddr *)address, n_bytes) != 0)
        return errno == EADDRINUSE ? taken(name) : pc__fail_errno("bind %s", name);
    if (listen(fd, backlog) != 0)
        return pc__fail_errno("listen on %s", name);
    return PC_OK;
}

/* Under the lock. bind() makes the file before listen() can be called: so it begins under a name
 * that nobody asks for, which is no longer than its own. A kill leaves it for the next one. */
static int listen_at_path(int fd, struct sockaddr_un *address, socklen_t n_bytes, const char *path,
                          int backlog)
{
    struct stat found;

    if (lstat(path, &found) == 0)
        return taken(path);
    address->sun_path[strlen(path) - 1] = '~';
    const int rc = bind_and_listen(fd, address, n_bytes, path, backlog);
    if (rc != PC_OK)
        return rc;
    if (rename(address->sun_path, path) == 0)
        return PC_OK;
    const int failed = pc__fail_errno("listen on %s", path);
    (void)unlink(address->sun_path);
    return failed;
}

int pc__local_listen(const char *name, int backlog, int *fd)
{
    struct sockaddr_un address;
    socklen_t n_bytes;

    *fd = -1;
    int rc = pc__local_address(name, &address, &n_bytes);
    if (rc != PC_OK)
        return rc;
    const int socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_fd < 0)
        return pc__fail_errno("socket %s", name);
    if (name[0] == '/') {
        char directory[PC__SOCKET_NAME_BYTES];
        directory_of(name, directory);
        const int directory_fd = lock_directory(directory);
        rc = directory_fd;
        if (directory_fd >= 0) {
            remove_left(directory_fd, directory);
            rc = listen_at_path(socket_fd, &address, n_bytes, name, backlog);
            close(directory_fd);
        }
    } else {
        rc = bind_and_listen(socket_fd, &address, n_bytes, name, backlog);
    }
    if (rc == PC_OK)
        *fd = socket_fd;
    else
        close(socket_fd);
    return rc;
}

/* ------------------------------------------------------- what others removed */

void pc__local_note_file(const char *name, struct pc__local_file *file)
{
    struct stat found;
    *file = (struct pc__local_file){0};
    if (name[0] == '/' && lstat(name, &found) == 0)
        *file = (struct pc__local_file){.device = found.st_dev, .inode = found.st_ino};
}

/* Cleaners remove what nobody has used for days. */
static void mark_as_used(const char *path, const struct stat *found)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec - found->st_mtime > -MARK_S && now.tv_sec - found->st_mtime < MARK_S)
        return;
    char directory[PC__SOCKET_NAME_BYTES];
    directory_of(path, directory);
    (void)utimensat(AT_FDCWD, path, NULL, AT_SYMLINK_NOFOLLOW);
    (void)utimensat(AT_FDCWD, directory, NULL, AT_SYMLINK_NOFOLLOW);
}

/* As the page server's actor makes it: this user's alone. Another user may have taken its name. */
static int make_directory(const char *path)
{
    char directory[PC__SOCKET_NAME_BYTES];
    struct stat found;
    directory_of(path, directory);
    if (mkdir(directory, 0700) != 0 && errno != EEXIST)
        return pc__fail_errno("make the sockets' directory %s", directory);
    if (lstat(directory, &found) != 0)
        return pc__fail_errno("look at the sockets' directory %s", directory);
    if (!S_ISDIR(found.st_mode) || found.st_uid != geteuid() || (found.st_mode & 077) != 0)
        return pc__fail(PC_ERR_DENIED, "the sockets' directory %s is not this user's alone any more: "
                        "it has the mode %o and belongs to user %u", directory,
                        (unsigned)found.st_mode, (unsigned)found.st_uid);
    return PC_OK;
}

int pc__local_look(const char *name, int backlog, struct pc__local_file *file, int *fd)
{
    struct stat found;

    *fd = -1;
    if (name[0] != '/')
        return PC_OK;
    if (file->inode != 0 && lstat(name, &found) == 0 && found.st_dev == file->device &&
        found.st_ino == file->inode) {
        mark_as_used(name, &found);
        return PC_OK;
    }
    int rc = make_directory(name);
    if (rc == PC_OK)
        rc = pc__local_listen(name, backlog, fd);
    if (rc == PC_OK)
        pc__local_note_file(name, file);
    return rc;
}

void pc__local_close(const char *name, int fd)
{
    const int saved = errno;
    close(fd); /* first: a file that no process has goes, whoever had it */
    if (name[0] == '/') {
        char directory[PC__SOCKET_NAME_BYTES];
        directory_of(name, directory);
        const int directory_fd = lock_directory(directory);
        if (directory_fd >= 0) { /* else the next one that begins or ends removes it */
            remove_left(directory_fd, directory);
            close(directory_fd);
        }
    }
    errno = saved;
}
