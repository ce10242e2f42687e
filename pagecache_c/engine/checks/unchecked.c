/* unchecked.c - see checks.h. */
#include "engine/checks/checks.h"
#include "kernels/crc32c.h"
#include "os/disk_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------- the file */

#define SLOT_BYTES 4096u         /* two headers, and behind them the sums */
#define SUMS_AT (2u * SLOT_BYTES)
#define FORMAT 1u

struct slot {
    char magic[8];
    uint32_t format, flags;
    uint64_t region, version, base_address, length_bytes, sequence;
    uint32_t crc;                /* of what is before */
    uint32_t reserved;
};
static_assert(offsetof(struct slot, crc) == 56, "as it is on disk");

static bool is_whole(const struct slot *slot)
{
    return memcmp(slot->magic, "CLAMSUMS", 8) == 0 && slot->crc == pc_crc32c(0, slot, offsetof(struct slot, crc));
}

/* Of the two, the last one that was written to its end. */
static int read_slot(int fd, const char *path, struct slot *out)
{
    struct slot slots[2] = {0};
    for (int i = 0; i < 2; i++) {
        const int rc = pc__file_read(fd, &slots[i], sizeof slots[i], (uint64_t)i * SLOT_BYTES);
        if (rc)
            return rc;
    }
    const bool first = is_whole(&slots[0]), second = is_whole(&slots[1]);
    if (!first && !second)
        return pc__fail(PC_ERR_PROTOCOL, "%s has no header that is whole", path);
    *out = slots[second && (!first || slots[1].sequence > slots[0].sequence)];
    return out->format == FORMAT ? PC_OK
                                 : pc__fail(PC_ERR_PROTOCOL, "%s has format %u, and this build reads %u", path,
                                            out->format, FORMAT);
}

static int check_slot(const struct slot *slot, const struct pc__kept *kept, const char *path)
{
    if (slot->region != kept->region || slot->length_bytes != kept->length_bytes ||
        slot->base_address != kept->base_address)
        return pc__fail(PC_ERR_PROTOCOL, "%s is of variable %llu, of %llu bytes", path,
                        (unsigned long long)slot->region, (unsigned long long)slot->length_bytes);
    return slot->version == kept->version
               ? PC_OK
               : pc__fail(PC_ERR_PROTOCOL, "%s is of version %llu, and the variable is at %llu", path,
                          (unsigned long long)slot->version, (unsigned long long)kept->version);
}

/* A sum that is 0 is of a block of zeros: holes of the file. What lies behind its end is, too. */
static int read_sums(struct pc__unchecked *unchecked, int fd, const char *path, struct pc__blockset *data)
{
    struct stat st;
    if (fstat(fd, &st))
        return pc__fail_errno("fstat of %s", path);
    const uint64_t n_bytes = data->n_blocks * sizeof(uint32_t);
    const uint64_t file_bytes = (uint64_t)st.st_size > SUMS_AT ? (uint64_t)st.st_size - SUMS_AT : 0;
    const uint64_t end = file_bytes < n_bytes ? file_bytes / sizeof(uint32_t) * sizeof(uint32_t) : n_bytes;
    for (uint64_t at = 0, past; at < end; at = past) {
        const off_t begin = lseek(fd, (off_t)(SUMS_AT + at), SEEK_DATA);
        if (begin < 0 && errno == ENXIO)
            return PC_OK;
        const off_t hole = begin < 0 ? -1 : lseek(fd, begin, SEEK_HOLE);
        if (hole < 0)
            return pc__fail_errno("SEEK_DATA on %s", path);
        at = ((uint64_t)begin - SUMS_AT) / sizeof(uint32_t) * sizeof(uint32_t);
        past = (uint64_t)hole - SUMS_AT < end ? (uint64_t)hole - SUMS_AT : end;
        if (at >= end)
            return PC_OK;
        const int rc = pc__file_read(fd, (uint8_t *)unchecked->sums + at, past - at, SUMS_AT + at);
        if (rc)
            return rc;
        for (uint64_t block = at / sizeof(uint32_t); block < past / sizeof(uint32_t); block++)
            if (unchecked->sums[block] && pc__blockset_add(data, block, 1) < 0)
                return pc__fail(PC_ERR_NO_MEMORY, "a block set");
    }
    return PC_OK;
}

static int read_file(struct pc__unchecked *unchecked, const char *path, const struct pc__kept *kept,
                     struct pc__blockset *data)
{
    struct slot slot = {0};
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return pc__fail_errno("%s", path);
    int rc = read_slot(fd, path, &slot);
    if (!rc)
        rc = check_slot(&slot, kept, path);
    if (!rc)
        rc = read_sums(unchecked, fd, path, data);
    close(fd);
    return rc;
}

/* ------------------------------------------------------------ begin and end */

void pc__unchecked_over(struct pc__unchecked *unchecked)
{
    if (unchecked->sums)
        munmap(unchecked->sums, unchecked->sums_bytes);
    unchecked->sums = NULL;
    pc__blockset_free(&unchecked->verified);
}

void pc__unchecked_close(struct pc__unchecked *unchecked)
{
    if (!unchecked)
        return;
    pc__unchecked_over(unchecked);
    pc__blockset_free(&unchecked->damaged);
    free(unchecked);
}

/* Not mapped: a part that the disk cannot read would be our end. */
static int make(uint64_t n_blocks, struct pc__unchecked **out)
{
    struct pc__unchecked *unchecked = calloc(1, sizeof *unchecked);
    if (!unchecked)
        return pc__fail(PC_ERR_NO_MEMORY, "checksums");
    int rc = pc__blockset_init(&unchecked->damaged, n_blocks);
    if (!rc)
        rc = pc__blockset_init(&unchecked->verified, n_blocks);
    unchecked->sums_bytes = n_blocks * sizeof(uint32_t);
    void *sums = rc ? NULL
                    : mmap(NULL, unchecked->sums_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!rc && sums == MAP_FAILED)
        rc = pc__fail_errno("memory for the checksums of %llu blocks", (unsigned long long)n_blocks);
    else
        unchecked->sums = sums;
    if (rc)
        pc__unchecked_close(unchecked);
    else
        *out = unchecked;
    return rc;
}

int pc__unchecked_open(struct pc_engine *engine, const struct pc__kept *kept, struct pc__blockset *data,
                       struct pc__unchecked **out)
{
    char path[4096];
    const int length = snprintf(path, sizeof path, "%s/%llu.sums", engine->sums_directory,
                                (unsigned long long)kept->region);
    int rc = make(data->n_blocks, out);
    if (rc)
        return rc;
    rc = length < 0 || (size_t)length >= sizeof path ? pc__fail(PC_ERR_RANGE, "a path that is too long: %.64s...", path)
                                                     : read_file(*out, path, kept, data);
    if (!rc)
        return PC_OK;
    pc__engine_event(engine, PC_EVENT_LOG, rc, kept->region, 0,
                     "variable %llu is not given to anybody, for its checksums cannot be had: %s",
                     (unsigned long long)kept->region, pc_last_message());
    pc__unchecked_over(*out);
    if (pc__blockset_add(&(*out)->damaged, 0, data->n_blocks) >= 0 && pc__blockset_add(data, 0, data->n_blocks) >= 0)
        return PC_OK;
    pc__unchecked_close(*out);
    *out = NULL;
    return pc__fail(PC_ERR_NO_MEMORY, "a block set");
}

/* ------------------------------------------------------------------ looking */

int pc__unchecked_expect(const struct pc__unchecked *unchecked, uint64_t block, uint64_t *n,
                         uint32_t sums[PC__CHECK_BLOCKS])
{
    if (!unchecked)
        return 0;
    uint64_t limit = block + *n;
    if (pc__blockset_has(&unchecked->damaged, block))
        return pc__fail(PC_ERR_HOME_LOST, "block %llu is damaged", (unsigned long long)block);
    limit = pc__blockset_next(&unchecked->damaged, block, limit);
    if (unchecked->sums && pc__blockset_has(&unchecked->verified, block)) {
        limit = pc__blockset_next_absent(&unchecked->verified, block, limit);
    } else if (unchecked->sums) {
        limit = pc__blockset_next(&unchecked->verified, block, limit);
        *n = limit - block < PC__CHECK_BLOCKS ? limit - block : PC__CHECK_BLOCKS;
        memcpy(sums, unchecked->sums + block, *n * sizeof *sums);
        return 1;
    }
    *n = limit - block;
    return 0;
}

static bool fits(const uint8_t *block, uint32_t sum)
{
    uint32_t found;
    pc_crc32c_blocks(block, 1, &found);
    return (found ^ PC__CRC32C_ZERO_BLOCK) == sum;
}

/* Once more, and not from memory: what went wrong may have been the way here. */
static bool fits_at_last(int fd, uint64_t block, uint32_t sum, uint8_t *out)
{
    const uint64_t offset = block << PC_BLOCK_SHIFT;
    (void)posix_fadvise(fd, (off_t)offset, PC_BLOCK_BYTES, POSIX_FADV_DONTNEED);
    return !pc__file_read(fd, out, PC_BLOCK_BYTES, offset) && fits(out, sum);
}

static void say_damaged(struct pc_engine *engine, const struct pc__region *region, int fd, uint64_t block)
{
    char link[64], path[160];
    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    (void)pc__fail(PC_ERR_HOME_LOST, "block %llu of variable %llu does not have its checksum: %s",
                   (unsigned long long)block, (unsigned long long)region->id, path);
    pc__count_add(&engine->count.damaged_blocks, 1);
    pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_HOME_LOST, region->id, 0, "%s", pc_last_message());
}

/* Without memory to note it, it is found again with the next read. */
static void note(struct pc_engine *engine, struct pc__region *region, struct pc__unchecked *unchecked, int fd,
                 uint64_t block, bool is_damaged)
{
    pthread_mutex_lock(&region->lock);
    const int64_t n = is_damaged        ? pc__blockset_add(&unchecked->damaged, block, 1)
                      : unchecked->sums ? pc__blockset_add(&unchecked->verified, block, 1)
                                        : 0;
    pthread_mutex_unlock(&region->lock);
    if (is_damaged && n != 0)
        say_damaged(engine, region, fd, block);
}

int pc__unchecked_judge(struct pc_engine *engine, struct pc__region *region, struct pc__unchecked *unchecked,
                        int fd, uint64_t block, uint64_t n, const uint32_t *sums, uint8_t *blocks, int read_rc,
                        bool waits)
{
    uint32_t found[PC__CHECK_BLOCKS];
    bool all_fit = !read_rc;
    int rc = PC_OK;
    pc_crc32c_blocks(blocks, read_rc ? 0 : n, found);
    for (uint64_t i = 0; i < n && all_fit; i++)
        all_fit = (found[i] ^ PC__CRC32C_ZERO_BLOCK) == sums[i];
    if (all_fit) {
        pthread_mutex_lock(&region->lock);
        if (unchecked->sums)
            (void)pc__blockset_add(&unchecked->verified, block, n); /* else they are looked at again */
        pthread_mutex_unlock(&region->lock);
        return PC_OK;
    }
    if (!waits)
        return 1;
    for (uint64_t i = 0; i < n; i++) {
        uint8_t *at = blocks + (i << PC_BLOCK_SHIFT);
        const bool fit = (!read_rc && (found[i] ^ PC__CRC32C_ZERO_BLOCK) == sums[i]) ||
                         fits_at_last(fd, block + i, sums[i], at);
        if (!fit) {
            memset(at, 0, PC_BLOCK_BYTES);
            rc = PC_ERR_HOME_LOST;
        }
        note(engine, region, unchecked, fd, block + i, !fit);
    }
    return rc;
}

/* ---------------------------------------------------------------- the worker */

bool pc__unchecked_look(struct pc_engine *engine, struct pc__region *region, struct pc__home *home, uint8_t *some)
{
    uint32_t sums[PC__CHECK_BLOCKS];
    pthread_mutex_lock(&region->lock);
    struct pc__unchecked *unchecked = home->unchecked;
    const struct pc__blockset *data = &home->base.data;
    const uint64_t block = pc__blockset_next(data, unchecked->at, data->n_blocks);
    uint64_t n = pc__blockset_next_absent(data, block, data->n_blocks) - block;
    const int looks = n ? pc__unchecked_expect(unchecked, block, &n, sums) : 0;
    unchecked->at = !n ? data->n_blocks : looks < 0 ? block + 1 : block + n;
    pthread_mutex_unlock(&region->lock);
    if (looks == 1) { /* the worker alone closes the base, and changes it */
        const int rc = pc__file_read(home->base.memfd, some, n << PC_BLOCK_SHIFT, block << PC_BLOCK_SHIFT);
        (void)pc__unchecked_judge(engine, region, unchecked, home->base.memfd, block, n, sums, some, rc, true);
    }
    return n != 0;
}
