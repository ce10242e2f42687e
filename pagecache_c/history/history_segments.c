/* history_segments.c - segments of the history: making, filling, spilling and reading them back.
 *
 * Owns nothing: stores are reference-counted, records are their caller's. Locks: none; a store does
 * not change after it was made but for the bytes behind its last record, which one thread writes.
 *
 * Kernel facts:
 *   - Storing to a page of a memfd that cannot be had is SIGBUS: pages are allocated by fallocate
 *     before they are stored to, which says ENOMEM or ENOSPC instead.
 */
#include "history/history_segments.h"
#include "common/atomics.h"
#include "common/error.h"
#include "os/disk_file.h"
#include "os/file_id.h"
#include "os/huge_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BOUNCE_BLOCKS 256u

/* ---------------------------------------------------------------- records */

struct pc__record *pc__record_new(uint64_t region, uint64_t version, const struct pc_run *runs,
                                  size_t n_runs, int *error)
{
    struct pc__record *record = NULL;
    uint64_t past = 0, n_blocks = 0;

    *error = PC_OK;
    for (size_t i = 0; i < n_runs; i++) {
        const uint64_t first = runs[i].first_block;
        if (runs[i].n_blocks == 0 || first < past || first > PC_WINDOW_END / PC_BLOCK_BYTES ||
            runs[i].n_blocks > PC_WINDOW_END / PC_BLOCK_BYTES - first) {
            *error = pc__fail(PC_ERR_RANGE, "run %zu of %zu is empty, too large, or not after the "
                                            "one before it", i, n_runs);
            return NULL;
        }
        past = first + runs[i].n_blocks;
        n_blocks += runs[i].n_blocks;
    }
    if (n_runs <= SIZE_MAX / 2 / sizeof record->runs[0])
        record = malloc(sizeof *record + n_runs * sizeof record->runs[0]);
    if (!record) {
        *error = pc__fail(PC_ERR_NO_MEMORY, "a history record of %zu runs", n_runs);
        return NULL;
    }
    *record = (struct pc__record){.region = region, .version = version, .n_blocks = n_blocks,
                                  .min_block = n_runs ? runs[0].first_block : 0,
                                  .past_block = past, .n_runs = n_runs};
    uint64_t position = 0;
    for (size_t i = 0; i < n_runs; i++) {
        record->runs[i] = (struct pc__placed_run){.first_block = runs[i].first_block,
                                                  .n_blocks = runs[i].n_blocks,
                                                  .position = position};
        position += runs[i].n_blocks;
    }
    return record;
}

/* The first run that ends after block; n_runs if none. */
static size_t run_at(const struct pc__record *record, uint64_t block)
{
    size_t low = 0, high = record->n_runs;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (record->runs[middle].first_block + record->runs[middle].n_blocks <= block)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

bool pc__record_find(const struct pc__record *record, uint64_t block, uint64_t *offset)
{
    if (block < record->min_block || block >= record->past_block)
        return false;
    const struct pc__placed_run *run = &record->runs[run_at(record, block)];
    if (block < run->first_block)
        return false;
    *offset = record->data_offset + (run->position + block - run->first_block) * PC_BLOCK_BYTES;
    return true;
}

uint64_t pc__record_next(const struct pc__record *record, uint64_t from)
{
    if (from >= record->past_block)
        return UINT64_MAX;
    const uint64_t first = record->runs[run_at(record, from)].first_block;
    return first > from ? first : from;
}

/* ----------------------------------------------------------------- stores */

void pc__store_take(struct pc__segment_store *store)
{
    pc__ref_take(&store->refs);
}

void pc__store_put(struct pc__segment_store *store)
{
    if (!pc__ref_drop(&store->refs))
        return;
    if (store->map)
        munmap(store->map, store->capacity_bytes);
    close(store->fd);
    free(store);
}

/* Takes fd, also on failure. */
static struct pc__segment_store *new_store(int fd, uint64_t capacity_bytes, uint64_t sequence, bool is_disk)
{
    struct pc__segment_store *store = calloc(1, sizeof *store);
    struct stat st;

    if (!store || fstat(fd, &st) != 0) {
        (void)pc__fail_errno("a history segment");
        close(fd);
        free(store);
        return NULL;
    }
    *store = (struct pc__segment_store){.refs = 1, .fd = fd, .inode = pc__file_id(&st), .sequence = sequence,
                                .capacity_bytes = capacity_bytes, .is_disk = is_disk};
    if (is_disk)
        return store;
    void *map = mmap(NULL, capacity_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                     0);
    if (map == MAP_FAILED) {
        (void)pc__fail_errno("mmap of a history segment of %llu bytes",
                             (unsigned long long)capacity_bytes);
        pc__store_put(store);
        return NULL;
    }
    store->map = map;
    pc__huge_pages_refuse(map, capacity_bytes);
    (void)madvise(map, capacity_bytes, MADV_DONTDUMP);
    (void)madvise(map, capacity_bytes, MADV_DONTFORK);
    return store;
}

/* Whole blocks around [begin, end). */
static int allocate(int fd, uint64_t begin, uint64_t end)
{
    begin = begin / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
    end = pc__round_to_blocks(end);
    while (end > begin && fallocate(fd, 0, (off_t)begin, (off_t)(end - begin)) != 0)
        if (errno != EINTR)
            return -1;
    return 0;
}

struct pc__segment_store *pc__store_memory(uint64_t capacity_bytes, uint64_t sequence)
{
    const struct pc__segment_head head = {.magic = PC__SEGMENT_MAGIC,
                                          .capacity_bytes = capacity_bytes, .sequence = sequence};
    const int fd = memfd_create("clamor-history", MFD_CLOEXEC);
    if (fd < 0) {
        (void)pc__fail_errno("memfd_create");
        return NULL;
    }
    if (ftruncate(fd, (off_t)capacity_bytes) != 0 || allocate(fd, 0, sizeof head) != 0) {
        (void)pc__fail_errno("a history segment of %llu bytes", (unsigned long long)capacity_bytes);
        close(fd);
        return NULL;
    }
    struct pc__segment_store *store = new_store(fd, capacity_bytes, sequence, false);
    if (store)
        memcpy(store->map, &head, sizeof head);
    return store;
}

struct pc__segment_store *pc__store_disk(const char *directory, uint64_t capacity_bytes,
                                 uint64_t sequence, uint64_t begin, uint64_t end, int *error)
{
    const struct pc__segment_head head = {.magic = PC__SEGMENT_MAGIC, .is_disk = 1,
                                          .capacity_bytes = capacity_bytes, .sequence = sequence};
    const int fd = pc__disk_file_open(directory);
    if (fd < 0) {
        *error = pc__fail_errno("a file in %s", directory);
        return NULL;
    }
    const bool is_sized = ftruncate(fd, (off_t)capacity_bytes) == 0;
    if (!is_sized || ((allocate(fd, 0, begin) != 0 || allocate(fd, end, capacity_bytes) != 0) &&
                      errno != EOPNOTSUPP && errno != ENOSYS)) {
        *error = pc__fail_errno("%llu bytes of history in %s", (unsigned long long)capacity_bytes,
                                directory);
        close(fd);
        return NULL;
    }
    struct pc__segment_store *store = new_store(fd, capacity_bytes, sequence, true);
    *error = store ? pc__store_write(store, 0, &head, sizeof head) : PC_ERR_SYSTEM;
    if (store && *error != PC_OK) {
        pc__store_put(store);
        return NULL;
    }
    return store;
}

struct pc__segment_store *pc__store_adopt(int fd, uint64_t *inode, int *error)
{
    struct pc__segment_head head;
    struct stat st = {0};

    const bool is_read = fstat(fd, &st) == 0 &&
                         pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head;
    *inode = pc__file_id(&st);
    if (!is_read || head.magic != PC__SEGMENT_MAGIC || head.is_disk > 1 ||
        head.capacity_bytes != (uint64_t)st.st_size ||
        head.capacity_bytes % PC_BLOCK_BYTES != 0) {
        *error = pc__fail(PC_ERR_PROTOCOL, "a kept file is no segment of a history");
        close(fd);
        return NULL;
    }
    struct pc__segment_store *store = new_store(fd, head.capacity_bytes, head.sequence, head.is_disk == 1);
    *error = store ? PC_OK : PC_ERR_NO_MEMORY;
    return store;
}

int pc__store_read(const struct pc__segment_store *store, uint64_t offset, void *out, uint64_t n_bytes)
{
    if (offset > store->capacity_bytes || n_bytes > store->capacity_bytes - offset)
        return pc__fail(PC_ERR_PROTOCOL, "a read behind the end of a history segment");
    if (store->map) {
        memcpy(out, store->map + offset, n_bytes);
        return PC_OK;
    }
    for (uint64_t done = 0; done < n_bytes;) {
        const ssize_t n = pread(store->fd, (uint8_t *)out + done, n_bytes - done,
                                (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            if (n == 0)
                errno = EIO; /* nobody but us has it, and we do not cut it */
            return pc__fail(PC_ERR_SYSTEM, "reading the history's file");
        }
        done += (uint64_t)n;
    }
    return PC_OK;
}

int pc__store_write(const struct pc__segment_store *store, uint64_t offset, const void *bytes,
                    uint64_t n_bytes)
{
    for (uint64_t done = 0; done < n_bytes;) {
        const ssize_t n = pwrite(store->fd, (const uint8_t *)bytes + done, n_bytes - done,
                                 (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            if (n == 0)
                errno = EIO;
            return pc__fail_errno("writing the history's file");
        }
        done += (uint64_t)n;
    }
    return PC_OK;
}

struct pc__segment_store *pc__store_spill(const struct pc__segment_store *from, const char *directory,
                                  uint64_t begin, uint64_t end, int *error)
{
    struct pc__segment_store *to = pc__store_disk(directory, from->capacity_bytes, from->sequence, begin,
                                          end, error);
    const uint64_t after_head = sizeof(struct pc__segment_head);
    if (!to)
        return NULL;
    *error = pc__store_write(to, after_head, from->map + after_head, begin - after_head);
    if (*error == PC_OK)
        *error = pc__store_write(to, end, from->map + end, from->capacity_bytes - end);
    if (*error != PC_OK) {
        pc__store_put(to);
        return NULL;
    }
    return to;
}

/* ------------------------------------------------------ records in a store */

static struct pc__record_head head_of(const struct pc__record *record)
{
    return (struct pc__record_head){.magic = PC__RECORD_MAGIC, .region = record->region,
                                    .version = record->version, .n_blocks = record->n_blocks,
                                    .n_runs = record->n_runs, .data_offset = record->data_offset};
}

static uint32_t state_of(const struct pc__record *record)
{
    return record->is_skipped ? PC__RECORD_SKIPPED : PC__RECORD_KEPT;
}

static void copy_runs(const struct pc__record *record, struct pc_run *out)
{
    for (size_t i = 0; i < record->n_runs; i++)
        out[i] = (struct pc_run){.first_block = record->runs[i].first_block,
                                 .n_blocks = record->runs[i].n_blocks};
}

int pc__record_write(const struct pc__segment_store *store, uint64_t head_offset,
                     const struct pc__record *record, struct pc__old_blocks *old)
{
    const uint64_t head_bytes = pc__record_head_bytes(record->n_runs);
    uint8_t *at = store->map + head_offset;
    int rc = PC_OK;

    if (allocate(store->fd, head_offset, head_offset + head_bytes) != 0 ||
        allocate(store->fd, record->data_offset,
                 record->data_offset + record->n_blocks * PC_BLOCK_BYTES) != 0)
        return pc__fail(PC_ERR_NO_MEMORY, "%llu blocks of history",
                        (unsigned long long)record->n_blocks);
    struct pc__record_head *head = (struct pc__record_head *)(void *)at;
    *head = head_of(record); /* its state is NONE */
    copy_runs(record, (struct pc_run *)(void *)(at + sizeof *head));
    for (size_t i = 0; i < record->n_runs && rc == PC_OK; i++)
        rc = old->read(old->arg, record->runs[i].first_block, record->runs[i].n_blocks,
                       store->map + record->data_offset +
                           record->runs[i].position * PC_BLOCK_BYTES);
    old->is_failed = rc != PC_OK;
    if (rc == PC_OK)
        pc__publish(&head->state, state_of(record)); /* head, runs and blocks, to who adopts it */
    else
        memset(at, 0, head_bytes); /* what comes here next may be shorter: no runs behind it that
                                      read as a head */
    return rc;
}

int pc__record_write_disk(const struct pc__segment_store *store, uint64_t head_offset,
                          const struct pc__record *record, struct pc__old_blocks *old)
{
    const uint64_t head_bytes = pc__record_head_bytes(record->n_runs);
    uint8_t *bounce = malloc(BOUNCE_BLOCKS * PC_BLOCK_BYTES);
    uint8_t *at = malloc(head_bytes);
    int rc = bounce && at ? PC_OK : pc__fail(PC_ERR_NO_MEMORY, "a buffer for the history's file");

    for (size_t i = 0; i < record->n_runs && rc == PC_OK; i++) {
        const struct pc__placed_run *run = &record->runs[i];
        for (uint64_t done = 0; done < run->n_blocks && rc == PC_OK;) {
            const uint64_t left = run->n_blocks - done;
            const uint64_t n = left < BOUNCE_BLOCKS ? left : BOUNCE_BLOCKS;
            rc = old->read(old->arg, run->first_block + done, n, bounce);
            old->is_failed = rc != PC_OK;
            if (rc == PC_OK)
                rc = pc__store_write(store,
                                     record->data_offset + (run->position + done) * PC_BLOCK_BYTES,
                                     bounce, n * PC_BLOCK_BYTES);
            done += n;
        }
    }
    if (rc == PC_OK) {
        struct pc__record_head *head = (struct pc__record_head *)(void *)at;
        const uint32_t state = state_of(record);
        *head = head_of(record); /* its state is NONE */
        copy_runs(record, (struct pc_run *)(void *)(at + sizeof *head));
        rc = pc__store_write(store, head_offset, at, head_bytes);
        if (rc == PC_OK) /* last: who adopts the file finds the record whole, or not at all */
            rc = pc__store_write(store, head_offset + offsetof(struct pc__record_head, state),
                                 &state, sizeof state);
    }
    free(bounce);
    free(at);
    return rc;
}

struct pc__record *pc__record_load(const struct pc__segment_store *store, uint64_t head_offset,
                                   uint64_t data_end, int *error)
{
    struct pc__record_head head;

    *error = PC_OK;
    if (head_offset > data_end || data_end - head_offset < sizeof head)
        return NULL;
    *error = pc__store_read(store, head_offset, &head, sizeof head);
    if (*error)
        return NULL;
    const uint32_t state = pc__observe(&head.state);
    const uint64_t room = data_end - head_offset - sizeof head;
    if (head.magic != PC__RECORD_MAGIC ||
        (state != PC__RECORD_KEPT && state != PC__RECORD_SKIPPED) ||
        head.n_runs > room / sizeof(struct pc_run) || head.n_blocks > room / PC_BLOCK_BYTES ||
        head.data_offset != data_end - head.n_blocks * PC_BLOCK_BYTES ||
        head.data_offset < head_offset + pc__record_head_bytes(head.n_runs))
        return NULL;
    struct pc_run *runs = malloc((head.n_runs ? head.n_runs : 1) * sizeof *runs);
    if (!runs) {
        *error = pc__fail(PC_ERR_NO_MEMORY, "the runs of a history record");
        return NULL;
    }
    *error = pc__store_read(store, head_offset + sizeof head, runs, head.n_runs * sizeof *runs);
    struct pc__record *record =
        *error ? NULL : pc__record_new(head.region, head.version, runs, head.n_runs, error);
    free(runs);
    if (!record) {
        if (*error == PC_ERR_RANGE)
            *error = PC_OK;
        return NULL;
    }
    if (record->n_blocks != head.n_blocks) {
        free(record);
        return NULL;
    }
    record->data_offset = head.data_offset;
    record->is_skipped = state == PC__RECORD_SKIPPED;
    return record;
}
