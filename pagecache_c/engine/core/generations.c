/* generations.c - the records of generations, and their references. What becomes of them: store/generation.c.
 *
 * A reference is taken and put by any thread, under any lock. The last put frees the record.
 */
#include "engine/core/core.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void free_sets(struct pc__generation *generation)
{
    pc__blockset_free(&generation->changed);
    pc__blockset_free(&generation->present);
    pc__blockset_free(&generation->in_flight);
    pc__blockset_free(&generation->fetched);
    pc__blockset_free(&generation->touched);
    pc__blockset_free(&generation->changed_away);
}

struct pc__generation *pc__generation_new(uint64_t n_blocks, bool complete)
{
    struct pc__generation *generation = calloc(1, sizeof *generation);
    if (!generation)
        return NULL;
    generation->memfd = -1;
    generation->complete = complete;
    atomic_init(&generation->refs, 1u);
    pc__link_init(&generation->link);
    pc__link_init(&generation->waiters);
    pc__link_init(&generation->jobs);
    pc__link_init(&generation->cached);
    pc__link_init(&generation->on_disk_too);
    pc__link_init(&generation->idle);
    pc__link_init(&generation->windows);
    pc__link_init(&generation->recorders);
    if (pc__blockset_init(&generation->present, n_blocks) ||
        pc__blockset_init(&generation->in_flight, n_blocks) ||
        pc__blockset_init(&generation->fetched, n_blocks) ||
        pc__blockset_init(&generation->touched, n_blocks) ||
        pc__blockset_init(&generation->changed_away, n_blocks)) {
        free_sets(generation);
        free(generation);
        return NULL;
    }
    return generation;
}

struct pc__generation *pc__generation_take(struct pc__generation *generation)
{
    pc__ref_take(&generation->refs);
    return generation;
}

void pc__generation_put(struct pc_engine *engine, struct pc__generation *generation)
{
    if (!generation || !pc__ref_drop(&generation->refs))
        return;
    engine->observers.generation_ended(engine, generation);
    pc__generation_put(engine, generation->source);
    if (generation->map)
        munmap(generation->map, generation->present.n_blocks << PC_BLOCK_SHIFT);
    pc__count_sub(&engine->open_holes, generation->open_holes);
    if ((!generation->complete || generation->was_base) && generation->memfd >= 0) {
        if (!generation->is_layer)
            pc__unkeep(engine, generation->inode);
        close(generation->memfd);
    }
    free_sets(generation);
    free(generation);
}
