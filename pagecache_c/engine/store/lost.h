/* lost.h - the blocks of a rebuilt home that nobody had: which they are, and from which version on they
 * are there again.
 *
 * They are noted in the base's own memfd, behind the region's blocks: 8 bytes for each block of the
 * region, holes but for the lost ones. So whoever has the base has the notes too: the keeper, and the
 * next server. A lost block is one of no version until a layer writes it (a layer has whole blocks);
 * then it is one of that version, and of those after it.
 *
 * A home that has such blocks is never mapped as it is, and its base never changes: what commits write
 * goes to the overlay.
 *
 * Locks: all under region.lock, but for what is made and freed with its home.
 */
#ifndef PC_LOST_H
#define PC_LOST_H

#include "common/blockset.h"

struct pc__layer;

struct pc__lost {
    struct pc__blockset blocks; /* nobody had them when the home was rebuilt; stays as it is */
    uint64_t *first_versions;   /* the notes, mapped: of each of `blocks`, the first version that has it, */
    uint64_t notes_bytes;       /* or PC__LOST_YET */
};

#define PC__LOST_YET UINT64_MAX

/* How much longer the base's memfd is for the notes: whole blocks. */
uint64_t pc__lost_notes_bytes(uint64_t length_bytes);
/* memfd is of a base with notes. With runs, those are noted as lost; else what is noted is read.
 * NULL: no memory (pc_last_message). */
struct pc__lost *pc__lost_open(int memfd, uint64_t length_bytes, const struct pc_run *runs,
                               size_t n_runs);
void pc__lost_close(struct pc__lost *lost); /* NULL is none */
/* Whether the version has no such block, and for how many from there on, *n at most, that is alike. */
bool pc__lost_at(const struct pc__lost *lost, uint64_t version, uint64_t block, uint64_t *n);
/* From its version on the layer's blocks are there. As often as one likes. */
void pc__lost_written(struct pc__lost *lost, const struct pc__layer *layer);

#endif
