/* lost.c - the blocks of a home that are not there at every version: those of a rebuilt home that nobody
 * had, and those that are in the file that the region was made of. Which they are, and from which version
 * on they are there.
 *
 * They are noted in the base's own memfd, behind the region's blocks: 8 bytes for each block of the
 * region, holes but for the lost ones. So whoever has the base has the notes too: the keeper, and the
 * next server. A lost block is one of no version until a layer writes it (a layer has whole blocks);
 * then it is one of that version, and of those after it.
 *
 * On disk the notes are a copy that is written through: a mapped block that the disk cannot read would be
 * our end.
 *
 * In a region that is in a file, what has no note is in the file, so its notes are holes too. Such a home
 * may be rebuilt, and lack blocks that commits had written: those are noted as lost, and what the file has
 * there is never given in their place.
 *
 * A home that has such blocks is never mapped as it is, and its base never changes: what commits write
 * goes to the overlay.
 *
 * Locks: all under region.lock, but for what is made and freed with its home.
 */
#include "engine/core/core.h"
#include "engine/store/store.h"
#include "os/disk_file.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

uint64_t pc__lost_notes_bytes(uint64_t length_bytes)
{
    uint64_t bytes = (length_bytes >> PC_BLOCK_SHIFT) * sizeof(uint64_t);
    return (bytes + PC_BLOCK_BYTES - 1) / PC_BLOCK_BYTES * PC_BLOCK_BYTES;
}

void pc__lost_close(struct pc__lost *lost)
{
    if (!lost)
        return;
    if (lost->first_versions && lost->fd < 0)
        munmap(lost->first_versions, lost->notes_bytes);
    else
        free(lost->first_versions);
    pc__blockset_free(&lost->blocks);
    free(lost);
}

/* Of n blocks from first on, to the file. */
static int write_through(const struct pc__lost *lost, uint64_t first, uint64_t n)
{
    const uint8_t *at = (const uint8_t *)(lost->first_versions + first);
    uint64_t left = n * sizeof *lost->first_versions;
    uint64_t offset = (lost->blocks.n_blocks << PC_BLOCK_SHIFT) + first * sizeof *lost->first_versions;
    while (lost->fd >= 0 && left) {
        const ssize_t wrote = pwrite(lost->fd, at, left, (off_t)offset);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return pc__fail_disk("writing which blocks are lost");
        at += wrote;
        offset += (uint64_t)wrote;
        left -= (uint64_t)wrote;
    }
    return PC_OK;
}

static int note(struct pc__lost *lost, const struct pc_run *runs, size_t n_runs)
{
    for (size_t i = 0; i < n_runs; i++) {
        if (pc__blockset_add(&lost->blocks, runs[i].first_block, runs[i].n_blocks) < 0)
            return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        for (uint64_t b = 0; b < runs[i].n_blocks; b++)
            lost->first_versions[runs[i].first_block + b] = PC__LOST_YET;
        const int rc = write_through(lost, runs[i].first_block, runs[i].n_blocks);
        if (rc)
            return rc;
    }
    return PC_OK;
}

/* Only what is allocated is looked at: a read of a hole would allocate it. */
static int read_notes(struct pc__lost *lost, int memfd, uint64_t length_bytes)
{
    const uint64_t end = length_bytes + lost->notes_bytes;
    uint64_t at = length_bytes;
    while (at < end) {
        off_t begin = lseek(memfd, (off_t)at, SEEK_DATA);
        if (begin < 0)
            return errno == ENXIO ? PC_OK : pc__fail_errno("SEEK_DATA on a home");
        off_t past = lseek(memfd, begin, SEEK_HOLE);
        if (past < 0)
            return pc__fail_errno("SEEK_HOLE on a home");
        uint64_t block = ((uint64_t)begin - length_bytes) / sizeof(uint64_t);
        uint64_t limit = ((uint64_t)past - length_bytes) / sizeof(uint64_t);
        limit = limit < lost->blocks.n_blocks ? limit : lost->blocks.n_blocks;
        for (; block < limit; block++)
            if (lost->first_versions[block] && pc__blockset_add(&lost->blocks, block, 1) < 0)
                return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        at = (uint64_t)past;
    }
    return PC_OK;
}

static int map_notes(struct pc__lost *lost, int memfd, uint64_t length_bytes)
{
    void *map = mmap(NULL, lost->notes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd,
                     (off_t)length_bytes);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of the notes of lost blocks, %llu bytes",
                              (unsigned long long)lost->notes_bytes);
    lost->fd = -1;
    lost->first_versions = map;
    pc__huge_pages_refuse(map, lost->notes_bytes);
    (void)madvise(map, lost->notes_bytes, MADV_DONTDUMP);
    return PC_OK;
}

static int copy_notes(struct pc__lost *lost, int fd, uint64_t length_bytes)
{
    lost->fd = fd;
    lost->first_versions = calloc(1, lost->notes_bytes);
    return lost->first_versions
               ? pc__disk_file_read(fd, lost->first_versions, lost->notes_bytes, length_bytes)
               : pc__fail(PC_ERR_NO_MEMORY, "notes of lost blocks, %llu bytes",
                          (unsigned long long)lost->notes_bytes);
}

int pc__lost_open(const struct pc__store *base, uint64_t length_bytes, bool in_file,
                  const struct pc_run *runs, size_t n_runs, struct pc__lost **out)
{
    struct pc__lost *lost = calloc(1, sizeof *lost);
    int rc = lost ? pc__blockset_init(&lost->blocks, length_bytes >> PC_BLOCK_SHIFT)
                  : pc__fail(PC_ERR_NO_MEMORY, "notes of lost blocks");
    if (!rc) {
        lost->notes_bytes = pc__lost_notes_bytes(length_bytes);
        lost->in_file = in_file;
        rc = base->on_disk ? copy_notes(lost, base->memfd, length_bytes)
                           : map_notes(lost, base->memfd, length_bytes);
    }
    if (!rc)
        rc = n_runs ? note(lost, runs, n_runs) : read_notes(lost, base->memfd, length_bytes);
    if (rc)
        pc__lost_close(lost);
    else
        *out = lost;
    return rc;
}

/* PC__HOME_MEMORY: the version has it. */
static enum pc__home_kind kind_of(const struct pc__lost *lost, uint64_t version, uint64_t block)
{
    if (!pc__blockset_has(&lost->blocks, block))
        return lost->in_file ? PC__HOME_FILE : PC__HOME_MEMORY;
    const uint64_t note = lost->first_versions[block];
    const bool was_lost = !lost->in_file || note & PC__WAS_LOST;
    const uint64_t first = note == PC__LOST_YET ? UINT64_MAX : note & ~PC__WAS_LOST;
    return first <= version ? PC__HOME_MEMORY : was_lost ? PC__HOME_LOST : PC__HOME_FILE;
}

bool pc__lost_at(const struct pc__lost *lost, uint64_t version, uint64_t block, uint64_t *n,
                 enum pc__home_kind *kind)
{
    const enum pc__home_kind first = kind_of(lost, version, block);
    const enum pc__home_kind unnoted = lost->in_file ? PC__HOME_FILE : PC__HOME_MEMORY;
    const uint64_t limit = block + *n;
    uint64_t at = block + 1;
    while (at < limit) { /* from one that has a note to the next: between them all are alike */
        const uint64_t noted = pc__blockset_next(&lost->blocks, at, limit);
        if (noted > at && first != unnoted)
            break;
        at = noted;
        if (at < limit && kind_of(lost, version, at) != first)
            break;
        at += at < limit;
    }
    *n = at - block;
    if (kind)
        *kind = first;
    return first != PC__HOME_MEMORY;
}

int pc__lost_found(struct pc__lost *lost, const struct pc_run *runs, size_t n_runs, uint64_t version)
{
    for (size_t i = 0; i < n_runs; i++) {
        uint64_t at = runs[i].first_block, limit = at + runs[i].n_blocks;
        for (; lost->in_file && at < limit; at++) { /* the note first: who sees the block looks at it */
            if (pc__blockset_has(&lost->blocks, at))
                continue;
            lost->first_versions[at] = version;
            if (pc__blockset_add(&lost->blocks, at, 1) < 0)
                return pc__fail(PC_ERR_NO_MEMORY, "a block set");
        }
        at = runs[i].first_block;
        for (; (at = pc__blockset_next(&lost->blocks, at, limit)) < limit; at++)
            if (lost->first_versions[at] == PC__LOST_YET)
                lost->first_versions[at] = version | (lost->in_file ? PC__WAS_LOST : 0);
        (void)write_through(lost, runs[i].first_block, runs[i].n_blocks);
    }
    return PC_OK;
}

int pc__lost_written(struct pc__lost *lost, const struct pc__layer *layer, uint64_t version)
{
    return pc__lost_found(lost, layer->runs, layer->n_runs, version);
}
