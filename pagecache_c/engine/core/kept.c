/* kept.c - what the engine gives to the keeper, for the next server. Without a keeper there is nothing
 * to give, and nothing to wait for.
 */
#include "engine/core/core.h"

#include <string.h>
#include <sys/stat.h>

struct pc__kept pc__kept_of(const struct pc__region *region, enum pc__kept_kind kind,
                            uint64_t inode, uint64_t version)
{
    struct pc__kept kept = {.region = region->id,
                            .version = version,
                            .base_address = region->base_address,
                            .length_bytes = region->length_bytes,
                            .kind = kind,
                            .sealed = 1,
                            .inode = inode,
                            .reserved = {[2] = region->built_in_place,
                                         [3] = region->is_mapped,
                                         [4] = region->base_is_builders,
                                         [7] = region->in_file}};
    memcpy(kept.reserved + PC__KEPT_HOLES_AT, &region->open_holes, sizeof region->open_holes);
    memcpy(kept.reserved + PC__KEPT_TERM_AT, &region->term, sizeof region->term);
    return kept;
}

struct pc__kept pc__kept_of_store(const struct pc__region *region, enum pc__kept_kind kind,
                                  const struct pc__store *store, uint64_t version)
{
    struct pc__kept kept = pc__kept_of(region, kind, store->inode, version);
    kept.on_disk = store->on_disk;
    if (kind == PC__KEPT_HOME && region->home && store == &region->home->base)
        kept.reserved[PC__KEPT_UNCHECKED_AT] = region->home->is_unchecked;
    return kept;
}

struct pc__kept pc__kept_of_left(const struct pc__region *region,
                                 const struct pc__generation *generation)
{
    struct pc__kept kept =
        pc__kept_of(region, PC__KEPT_CACHE, generation->inode, generation->version);
    kept.on_disk = generation->on_disk;
    kept.reserved[2] = generation->built_in_place;
    kept.reserved[3] = kept.reserved[4] = false;
    kept.reserved[5] = true;
    kept.reserved[6] = generation->is_torn;
    memcpy(kept.reserved + PC__KEPT_HOLES_AT, &generation->open_holes,
           sizeof generation->open_holes);
    return kept;
}

PC_API int pc_keeper_put_home(int keeper_fd, uint64_t region, const struct pc_home_file *home)
{
    struct stat st;
    if (fstat(home->fd, &st))
        return pc__fail_errno("the file of variable %llu", (unsigned long long)region);
    struct pc__kept kept = {.region = region,
                            .version = home->version,
                            .base_address = home->base_address,
                            .length_bytes = home->length_bytes,
                            .kind = PC__KEPT_HOME,
                            .sealed = 1,
                            .inode = pc__file_id(&st),
                            .on_disk = 1,
                            .reserved = {[3] = !home->in_file,
                                         [7] = home->in_file != 0,
                                         [PC__KEPT_UNCHECKED_AT] = 1}};
    memcpy(kept.reserved + PC__KEPT_TERM_AT, &home->term, sizeof home->term);
    return pc__keeper_put(keeper_fd, &kept, home->fd);
}

void pc__keep_refused(void *engine, int rc, const struct pc__kept *what)
{
    pc__engine_event(engine, PC_EVENT_LOG, rc, what->region, 0,
                     "the keeper was not given a part of variable %llu: a crash of this server would "
                     "lose it: %s",
                     (unsigned long long)what->region, pc_strerror(rc));
}

int pc__keep(struct pc_engine *engine, const struct pc__kept *what, int fd)
{
    int rc = engine->keeping ? pc__keeping_put(engine->keeping, what, fd) : PC_OK;
    if (rc)
        pc__keep_refused(engine, rc, what);
    return rc;
}

void pc__unkeep(struct pc_engine *engine, uint64_t inode)
{
    if (engine->keeping)
        pc__keeping_drop(engine->keeping, inode);
}

bool pc__keep_now(struct pc_engine *engine, const struct pc__kept *what)
{
    return !engine->keeping || pc__keeping_put_now(engine->keeping, what);
}

bool pc__keeper_is_behind(struct pc_engine *engine)
{
    return engine->keeping && pc__keeping_is_behind(engine->keeping);
}

int pc__keep_wait(struct pc_engine *engine)
{
    return engine->keeping ? pc__keeping_wait(engine->keeping) : PC_OK;
}

void pc__keep_error_text(struct pc_engine *engine, int rc, char *text, size_t text_bytes)
{
    pc__keeping_error_text(engine->keeping, rc, text, text_bytes);
}

int pc__keep_when(struct pc_engine *engine, pc__keeper_heard *heard, void *arg)
{
    return engine->keeping ? pc__keeping_when(engine->keeping, heard, arg) : PC_OK;
}
