/* process.c - another process of this node, by /proc. See process.h.
 *
 * The answers decide whether memory may change that the process could look at. So every doubt (no
 * permission, no descriptor, no /proc, or one that hides it) counts as "it may".
 *
 * Any thread may enter; no locks. Each call opens a file or more, and closes it.
 *
 * Relies on: exit gives up the memory (exit_mm) before the descriptors (exit_files), in each thread;
 * statm of a thread without memory begins with "0 ".
 */
#include "os/process.h"
#include "os/file_id.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define START_FIELD 22 /* of /proc/PID/stat, from 1 */
#define STACK_FIELD 28
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

/* Bytes of the file, ended by a NUL; or -errno. */
static ssize_t read_file(const char *path, char *text, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t got = read(fd, text, bytes - 1);
    int error = errno;
    close(fd);
    text[got > 0 ? got : 0] = '\0';
    return got < 0 ? -error : got;
}

/* Of a process, or of one thread of it. A file that is not there says nothing: /proc may hide it
 * (hidepid). */
static bool is_gone(pid_t pid, pid_t thread)
{
    return (thread ? syscall(SYS_tgkill, pid, thread, 0) : kill(pid, 0)) && errno == ESRCH;
}

/* False: there is no such process. */
static bool look_up(pid_t pid, struct pc__process *process)
{
    char path[64], text[1024];
    *process = (struct pc__process){.pid = pid};
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    ssize_t got = read_file(path, text, sizeof text);
    if (got <= 0)
        return !is_gone(pid, 0);
    const char *at = strrchr(text, ')'); /* the end of the second field, a name of any characters */
    for (int field = 3; field <= STACK_FIELD && at && (at = strchr(at + 1, ' ')); field++) {
        if (field == START_FIELD)
            process->start_ticks = strtoull(at + 1, NULL, 10);
        if (field == STACK_FIELD)
            process->stack_address = strtoull(at + 1, NULL, 10);
    }
    return true;
}

static bool differ(uint64_t before, uint64_t now)
{
    return before && now && before != now;
}

struct pc__process pc__process_of_peer(int socket_fd)
{
    struct ucred who = {0};
    socklen_t bytes = sizeof who;
    struct pc__process process = {0};
    if (!getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) && who.pid > 0)
        (void)look_up(who.pid, &process); /* one that has ended is found so, later */
    return process;
}

int pc__process_handle_of_peer(int socket_fd)
{
    int handle = -1;
    socklen_t bytes = sizeof handle;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &handle, &bytes))
        return errno == ESRCH ? -ESRCH : -1;
    return handle;
}

bool pc__process_handle_ended(int handle)
{
    struct pollfd polled = {.fd = handle, .events = POLLIN};
    return handle == -ESRCH || (handle >= 0 && poll(&polled, 1, 0) == 1 && polled.revents & POLLIN);
}

bool pc__process_of(pid_t pid, uid_t user, struct pc__process *process)
{
    char path[64], text[4096];
    unsigned real, effective;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    if (read_file(path, text, sizeof text) <= 0)
        return false;
    const char *at = strstr(text, "\nUid:");
    return at && sscanf(at, "\nUid: %u %u", &real, &effective) == 2 && effective == user &&
           look_up(pid, process);
}

/* Of a line of /proc/PID/status; all ones where there is none. */
static uint64_t status_field(const char *path, const char *format)
{
    char text[4096], label[32];
    uint64_t value;
    if (read_file(path, text, sizeof text) <= 0)
        return UINT64_MAX;
    snprintf(label, sizeof label, "\n%.*s", (int)strcspn(format, ":"), format);
    const char *at = strstr(text, label);
    return at && sscanf(at + 1, format, &value) == 1 ? value : UINT64_MAX;
}

bool pc__process_may_be_client(const struct pc__process *process, bool of_disk)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/status", (int)process->pid);
    const uint64_t theirs = status_field(path, "CapPrm: %" SCNx64);
    const uint64_t ours = status_field("/proc/self/status", "CapPrm: %" SCNx64);
    return pc__process_has_memory(process) && !(theirs != UINT64_MAX && theirs & ~ours) &&
           (of_disk || status_field(path, "RssShmem: %" SCNu64) > 0);
}

uint64_t pc__process_ticks_now(void)
{
    struct timespec now;
    const long ticks_a_s = sysconf(_SC_CLK_TCK);
    if (ticks_a_s <= 0 || clock_gettime(CLOCK_BOOTTIME, &now))
        return 0;
    return (uint64_t)now.tv_sec * (uint64_t)ticks_a_s +
           (uint64_t)now.tv_nsec / (1000000000ull / (uint64_t)ticks_a_s);
}

static bool has_memory(pid_t pid, pid_t thread)
{
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/statm", (int)pid, (int)thread);
    ssize_t got = read_file(path, text, sizeof text);
    return got > 0 ? strncmp(text, "0 ", 2) != 0 : !is_gone(pid, thread);
}

bool pc__process_has_memory(const struct pc__process *process)
{
    char path[64];
    struct pc__process now;
    if (!process->pid)
        return true;
    if (!look_up(process->pid, &now) || differ(process->start_ticks, now.start_ticks))
        return false;
    if (has_memory(process->pid, process->pid)) /* a stack of an ending process reads as 0 */
        return !differ(process->stack_address, now.stack_address);
    /* Its first thread has ended; the others may go on. */
    snprintf(path, sizeof path, "/proc/%d/task", (int)process->pid);
    DIR *threads = opendir(path);
    if (!threads)
        return !is_gone(process->pid, 0);
    bool found = false;
    for (struct dirent *entry; !found && (entry = readdir(threads));) {
        const long thread = strtol(entry->d_name, NULL, 10);
        found = thread > 0 && has_memory(process->pid, (pid_t)thread);
    }
    closedir(threads);
    return found;
}

/* False: no memory. */
static bool add(struct pc__process_map **maps, size_t *n, size_t *capacity,
                struct pc__process_map map)
{
    if (*n == *capacity) {
        *capacity = *capacity ? *capacity * 2 : 64;
        struct pc__process_map *grown = realloc(*maps, *capacity * sizeof *grown);
        if (!grown)
            return false;
        *maps = grown;
    }
    (*maps)[(*n)++] = map;
    return true;
}

bool pc__process_maps(const struct pc__process *process, struct pc__process_map **maps, size_t *n)
{
    char path[64], *line = NULL;
    size_t capacity = 0, line_bytes = 0;
    *maps = NULL;
    *n = 0;
    if (!process->pid)
        return false;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)process->pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    bool whole = true;
    while (whole && (errno = 0, getline(&line, &line_bytes, file)) > 0) {
        struct pc__process_map map = {0};
        unsigned major_of, minor_of;
        char rights[5];
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %x:%x %" SCNu64, &map.begin, &map.end,
                   rights, &major_of, &minor_of, &map.inode) != 6)
            whole = false;
        else if (map.inode) {
            map.device = makedev(major_of, minor_of);
            map.is_private = rights[3] == 'p';
            whole = add(maps, n, &capacity, map);
        }
    }
    whole = whole && !errno && !ferror(file);
    free(line);
    (void)fclose(file);
    if (!whole) {
        free(*maps);
        *maps = NULL;
        *n = 0;
    }
    return whole;
}

bool pc__process_maps_file(const struct pc__process_map *maps, size_t n, uint64_t begin,
                           uint64_t end, uint64_t id)
{
    size_t low = 0, high = n;
    while (low < high) { /* the first that ends after begin */
        size_t mid = low + (high - low) / 2;
        if (maps[mid].end > begin)
            high = mid;
        else
            low = mid + 1;
    }
    for (; low < n && maps[low].begin < end; low++)
        if (pc__file_id_of(maps[low].device, maps[low].inode) == id)
            return true;
    return false;
}
