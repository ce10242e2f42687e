/* huge_pages.c - keeps our shared memory made of single pages, and notices where the machine makes
 * it of huge ones.
 *
 * Huge pages break three things:
 *   - a punch of one block zeroes a part of a page that cannot be split, for a socket still holds it:
 *     what sendfile has queued changes (reply.c);
 *   - a write of one block makes its neighbours present, as zeros: SEEK_DATA takes them for blocks
 *     that somebody wrote;
 *   - before Linux 6.4, khugepaged may fill the holes of a file that is mapped.
 *
 * So every map of memory with holes, or that is punched, refuses them, which goes for touches,
 * UFFDIO_COPY and khugepaged. A write by system call asks no map: where the setting makes huge
 * pages, single ones are made first. Whoever has written to a home looks (pc__engine_look_for_huge_pages):
 * from the first time on that the setting was seen, replies are copied under the epoch, also where
 * something slipped through while the setting changed. Memory of layers, of the history's segments
 * and of gathers is never punched under a reader.
 *
 * Memfds lie on a mount of the kernel's own, which no option of a mount reaches (huge= of /dev/shm, for
 * one): shmem_enabled and the settings of single sizes alone say what they are made of.
 *
 * Relies on: a map with MADV_NOHUGEPAGE gives single pages whatever the setting, "force" too. No
 * lock; any thread may enter.
 */
#include "os/huge_pages.h"

#include "common/error.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* The setting of a file's text that makes huge pages, or NULL. "advise" is for maps that ask for huge
 * pages: ours refuse them. "inherit" is the directory's. */
static const char *huge_setting(const char *text)
{
    static const char *const settings[] = {"[always]", "[within_size]", "[force]"};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        if (strstr(text, settings[i]))
            return settings[i];
    return NULL;
}

static bool makes_huge_pages(int directory, const char *name, char why[PC__HUGE_PAGES_WHY_BYTES])
{
    char text[128];
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (got <= 0)
        return false; /* a kernel without huge pages in shared memory, or without this size */
    text[got] = '\0';
    const char *setting = huge_setting(text);
    if (setting)
        snprintf(why, PC__HUGE_PAGES_WHY_BYTES, "%s is %s", name, setting);
    return setting != NULL;
}

bool pc__huge_pages_in(const char *directory, char why[PC__HUGE_PAGES_WHY_BYTES])
{
    char name[300];
    DIR *sizes = opendir(directory);
    bool found = sizes && makes_huge_pages(dirfd(sizes), "shmem_enabled", why);
    for (struct dirent *entry; sizes && !found && (entry = readdir(sizes));) {
        if (strncmp(entry->d_name, "hugepages-", 10) != 0)
            continue;
        snprintf(name, sizeof name, "%s/shmem_enabled", entry->d_name);
        found = makes_huge_pages(dirfd(sizes), name, why);
    }
    if (sizes)
        closedir(sizes);
    return found;
}

bool pc__huge_pages(char why[PC__HUGE_PAGES_WHY_BYTES])
{
    return pc__huge_pages_in(PC__HUGE_PAGES_DIRECTORY, why);
}

static int hold(struct pc__huge_pages_files *files, int directory, const char *name)
{
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? PC_OK : pc__fail_errno("%s", name); /* a kernel without this size */
    if (files->n == PC__HUGE_PAGES_FILES) {
        close(fd);
        return pc__fail(PC_ERR_SYSTEM, "more than %d sizes of huge pages", PC__HUGE_PAGES_FILES);
    }
    files->fds[files->n++] = fd;
    return PC_OK;
}

int pc__huge_pages_open(struct pc__huge_pages_files *files, const char *directory)
{
    char name[300];
    files->n = 0;
    DIR *sizes = opendir(directory);
    if (!sizes)
        return errno == ENOENT ? PC_OK : pc__fail_errno("%s", directory);
    int rc = hold(files, dirfd(sizes), "shmem_enabled");
    for (struct dirent *entry; !rc && (entry = readdir(sizes));) {
        if (strncmp(entry->d_name, "hugepages-", 10) != 0)
            continue;
        snprintf(name, sizeof name, "%s/shmem_enabled", entry->d_name);
        rc = hold(files, dirfd(sizes), name);
    }
    closedir(sizes);
    if (rc)
        pc__huge_pages_close(files);
    return rc;
}

void pc__huge_pages_close(struct pc__huge_pages_files *files)
{
    while (files->n)
        close(files->fds[--files->n]);
}

bool pc__huge_pages_now(const struct pc__huge_pages_files *files)
{
    for (int i = 0; i < files->n; i++) {
        char text[128];
        ssize_t got = pread(files->fds[i], text, sizeof text - 1, 0);
        text[got > 0 ? got : 0] = '\0';
        if (got <= 0 || huge_setting(text))
            return true;
    }
    return false;
}

void pc__huge_pages_refuse(void *map, uint64_t length_bytes)
{
    (void)madvise(map, length_bytes, MADV_NOHUGEPAGE); /* fails where the kernel has none at all */
}

int pc__huge_pages_prevent(int memfd, uint64_t offset_bytes, uint64_t n_bytes)
{
    const uint64_t begin = offset_bytes / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    const uint64_t end = (offset_bytes + n_bytes + PC_BLOCK_BYTES - 1) / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    if (begin == end)
        return PC_OK;
    void *map = mmap(NULL, end - begin, PROT_READ, MAP_SHARED | MAP_NORESERVE, memfd, (off_t)begin);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of %llu bytes of shared memory",
                              (unsigned long long)(end - begin));
    pc__huge_pages_refuse(map, end - begin);
    int rc = PC_OK;
    while (!rc && madvise(map, end - begin, MADV_POPULATE_READ)) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        if (errno != EINVAL) {
            rc = pc__fail_errno("%llu bytes of single pages", (unsigned long long)(end - begin));
            continue;
        }
        for (uint64_t at = 0; at < end - begin; at += PC_BLOCK_BYTES) /* before Linux 5.14 */
            (void)*((const volatile uint8_t *)map + at);
        break;
    }
    munmap(map, end - begin);
    return rc;
}
