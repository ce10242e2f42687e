/* read_set.c - see read_set.h.
 *
 * Threads: any. Locks: none. Memory: none but the stack.
 * Relies on: after MADV_DONTNEED of a shared mapping, a page-table entry means that the block was
 * touched since (or, with fault-around, a neighbour of it). An entry that the kernel is moving
 * counts too, so the set never misses a block for that.
 * A private mapping's entry is the file's page until the first write, and then anonymous memory,
 * also when that is swapped out.
 * Does not see: blocks of a file (not copies) whose memory was swapped out meanwhile.
 */
#include "trap/read_set.h"

#include "common/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* <linux/fs.h> of 6.7; older headers do not have it. */
struct scan_region {
    uint64_t start, end, categories;
};
struct scan_argument {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define SCAN_IOCTL _IOWR('f', 16, struct scan_argument)
#define SCAN_FILE (1u << 2)
#define SCAN_PRESENT (1u << 3)
#define SCAN_SWAPPED (1u << 4)
#define SCAN_VECTOR 256u

#define ENTRY_PRESENT (1ull << 63)
#define ENTRY_SWAPPED (1ull << 62)
#define ENTRY_FILE (1ull << 61)
#define ENTRIES 4096u

struct collector {
    struct pc_run *runs;
    size_t capacity;
    uint64_t n;
    struct pc_run last; /* n_blocks 0: none yet */
};

static void put_last(struct collector *to)
{
    if (to->last.n_blocks == 0)
        return;
    if (to->n < to->capacity)
        to->runs[to->n] = to->last;
    to->n++;
}

static void add(struct collector *to, uint64_t first_block, uint64_t n_blocks)
{
    if (to->last.n_blocks && to->last.first_block + to->last.n_blocks == first_block) {
        to->last.n_blocks += n_blocks;
        return;
    }
    put_last(to);
    to->last = (struct pc_run){.first_block = first_block, .n_blocks = n_blocks};
}

int64_t pc__read_set_scan(enum pc__scan what, int pagemap, uint64_t address, uint64_t length_bytes,
                          struct pc_run *runs, size_t capacity, bool *is_known)
{
    const uint64_t not_these = what == PC__SCAN_COPIED ? SCAN_FILE : 0;
    struct collector to = {.runs = runs, .capacity = capacity};
    struct scan_region found[SCAN_VECTOR];
    uint64_t at = address, end = address + length_bytes;
    *is_known = true;
    while (at < end) {
        struct scan_argument scan = {.size = sizeof scan, .start = at, .end = end,
                                     .vec = (uint64_t)(uintptr_t)found, .vec_len = SCAN_VECTOR,
                                     .category_inverted = not_these,
                                     .category_mask = not_these,
                                     .category_anyof_mask = SCAN_PRESENT | SCAN_SWAPPED,
                                     .return_mask = SCAN_PRESENT};
        int n = ioctl(pagemap, SCAN_IOCTL, &scan);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            *is_known = !(errno == ENOTTY || errno == EINVAL || errno == ENOSYS);
            return pc__fail_errno("PAGEMAP_SCAN of %#llx", (unsigned long long)address);
        }
        for (int i = 0; i < n; i++)
            add(&to, (found[i].start - address) >> PC_BLOCK_SHIFT,
                (found[i].end - found[i].start) >> PC_BLOCK_SHIFT);
        if (scan.walk_end <= at)
            break;
        at = scan.walk_end;
    }
    put_last(&to);
    return (int64_t)to.n;
}

static bool is_wanted(enum pc__scan what, uint64_t entry)
{
    return entry & (ENTRY_PRESENT | ENTRY_SWAPPED) &&
           !(what == PC__SCAN_COPIED && entry & ENTRY_FILE);
}

int64_t pc__read_set_entries(enum pc__scan what, int pagemap, uint64_t address,
                             uint64_t length_bytes, struct pc_run *runs, size_t capacity)
{
    struct collector to = {.runs = runs, .capacity = capacity};
    uint64_t entries[ENTRIES];
    uint64_t n_blocks = length_bytes >> PC_BLOCK_SHIFT, first = address >> PC_BLOCK_SHIFT;
    for (uint64_t at = 0; at < n_blocks;) {
        uint64_t n = n_blocks - at < ENTRIES ? n_blocks - at : ENTRIES;
        ssize_t got = pread(pagemap, entries, n * sizeof entries[0],
                            (off_t)((first + at) * sizeof entries[0]));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < (ssize_t)sizeof entries[0])
            return pc__fail_errno("reading /proc/self/pagemap");
        n = (uint64_t)got / sizeof entries[0];
        for (uint64_t i = 0; i < n; i++)
            if (is_wanted(what, entries[i]))
                add(&to, at + i, 1);
        at += n;
    }
    put_last(&to);
    return (int64_t)to.n;
}

int64_t pc__read_set(enum pc__scan what, uint64_t address, uint64_t length_bytes,
                     struct pc_run *runs, size_t capacity)
{
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pagemap < 0)
        return pc__fail_errno("/proc/self/pagemap");
    bool is_known;
    int64_t n = pc__read_set_scan(what, pagemap, address, length_bytes, runs, capacity, &is_known);
    if (!is_known)
        n = pc__read_set_entries(what, pagemap, address, length_bytes, runs, capacity);
    close(pagemap);
    return n;
}
