/* directory.h - which other servers have blocks of a home. See directory.c. */
#ifndef PC_DIRECTORY_H
#define PC_DIRECTORY_H

#include "engine/core/records.h"

#define PC__CHOICE_BLOCKS 64u /* that one choice is made for: neighbours come from one server */
#define PC__HOLDER_MEMORY_NS 3000000000ull

/* A server's number, for the records; 0: there is no memory for one more. */
uint16_t pc__holder_number(struct pc_engine *engine, uint64_t server_id);
/* It said how much it has to send to others. */
void pc__holder_reports(struct pc_engine *engine, uint16_t number, uint64_t load_bytes);
/* Somebody who was sent to it has got what it came for, or has given up. */
void pc__holder_relieved(struct pc_engine *engine, uint64_t server_id, uint64_t n_bytes);

/* Below: under region.lock; the region has a home here. */
void pc__directory_free(struct pc__directory *directory);
/* The server has the blocks, as they are in this version; or they are coming to it from another. */
void pc__directory_add(struct pc_engine *engine, struct pc__region *region, uint16_t number,
                       uint32_t version, uint64_t first, uint64_t n, bool coming);
void pc__directory_remove(struct pc__region *region, uint16_t number, uint64_t first, uint64_t n);
/* A commit changed them; `version` is its. */
void pc__directory_changed(struct pc__region *region, uint32_t version, uint64_t first, uint64_t n);

struct pc__elsewhere {
    uint64_t server_id;            /* 0: the home answers */
    uint64_t n_blocks;             /* for so many */
    uint32_t from_version, to_version; /* in all of which they are the same */
};
/* Where the asker is to get [block, block + n), or the first of these, as in this version.
 * home_bytes: that the home has to send. */
struct pc__elsewhere pc__directory_choose(struct pc_engine *engine, struct pc__region *region,
                                          uint16_t asker, uint32_t version, uint64_t block,
                                          uint64_t n, uint64_t home_bytes);

#endif
