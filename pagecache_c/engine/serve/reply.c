/* reply.c - putting together what answers another server: which of the blocks are zeros, the bytes
 * of those that are sent, and who has those that are not.
 *
 * A reply holds a reference to its region, so freeing a region never pulls memory from under a
 * queued reply, and holds its home (home.c), so that blocks of the home stay what they were. Small
 * pieces leave with the header in one gather; runs of 32 KiB and more leave by sendfile, without a
 * copy. Cached blocks are copied, under region.lock: nothing keeps them from being evicted, or moved
 * to another version, once that is dropped.
 *
 * Relies on: sendfile queues the memfd's own pages, so a block of a home is never overwritten in
 * place (punch, then insert). A punch does change what is queued where it zeroes a part of a huge page:
 * once the machine was seen to make such (huge_pages.c), a home's blocks leave by sendmsg, which copies
 * them while the reply holds the epoch. Nobody punches a layer.
 */
#include "engine/cache/cache.h"
#include "engine/core/core.h"
#include "engine/serve/serve.h"
#include "engine/store/store.h"
#include "os/disk_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SENDFILE_FROM_BYTES (32u << 10)
#define COPY_BLOCKS 64u /* copied under one hold of the lock: some 30 us */

struct pc__parts {
    uint64_t holes[PC__DATA_MAX_BLOCKS / 64];     /* a bit for each block of zeros */
    uint64_t elsewhere[PC__DATA_MAX_BLOCKS / 64]; /* and for each that is not sent */
    uint64_t n_holes, n_elsewhere, n_lost, n_sent; /* n_lost of n_elsewhere */
    size_t n_composed;
    uint32_t version;                             /* of a cache: that it is at */
    struct pc__data_elsewhere sources[PC__DATA_MAX_BLOCKS]; /* n_elsewhere of them, from a home */
    struct {
        uint64_t block;
        enum pc__home_kind kind;
    } composed[PC__DATA_MAX_BLOCKS];              /* to be put together once the lock is dropped */
};

static void set_bits(uint64_t *bits, uint64_t first, uint64_t n)
{
    for (uint64_t k = first; k < first + n; k++)
        bits[k / 64] |= 1ull << (k % 64);
}

/* -------------------------------------------------------------------- pieces */

struct pc__reply *pc__reply_new(void)
{
    struct pc__reply *reply = calloc(1, sizeof *reply);
    if (reply && pc__reply_add(reply, NULL, -1, 0, 0)) { /* its head */
        free(reply);
        reply = NULL;
    }
    return reply;
}

void pc__reply_free(struct pc_engine *engine, struct pc__reply *reply)
{
    if (reply->home)
        pc__home_release(engine, reply->region, reply->home, reply->held);
    if (reply->region)
        pc__region_put(engine, reply->region);
    pc__layer_put(reply->layer);
    free(reply->head);
    if (reply->row_loop)
        pc__rows_give_buffer(reply->row_loop, reply->composed);
    else
        free(reply->composed);
    free(reply->pieces);
    free(reply);
}

static bool continues(const struct pc__reply *reply, const uint8_t *bytes, int memfd,
                      uint64_t offset)
{
    const struct pc__piece *last = reply->n_pieces > 1 ? &reply->pieces[reply->n_pieces - 1] : NULL;
    return last && memfd >= 0 && last->memfd == memfd && last->offset + last->length == offset &&
           (!last->bytes || last->bytes + last->length == bytes);
}

int pc__reply_add(struct pc__reply *reply, const uint8_t *bytes, int memfd, uint64_t offset,
                  uint64_t length)
{
    if (continues(reply, bytes, memfd, offset)) {
        struct pc__piece *last = &reply->pieces[reply->n_pieces - 1];
        last->length += length;
        if (last->length >= SENDFILE_FROM_BYTES)
            last->bytes = NULL;
        return PC_OK;
    }
    if (reply->n_pieces == reply->capacity) {
        size_t capacity = reply->capacity ? reply->capacity * 4 : 4;
        struct pc__piece *grown = realloc(reply->pieces, capacity * sizeof *grown);
        if (!grown)
            return PC_ERR_NO_MEMORY;
        reply->pieces = grown;
        reply->capacity = capacity;
    }
    bool file = memfd >= 0 && length >= SENDFILE_FROM_BYTES;
    reply->pieces[reply->n_pieces++] = (struct pc__piece){
        .bytes = file ? NULL : bytes, .offset = offset, .length = length, .memfd = memfd};
    return PC_OK;
}

static int room_for_copies(struct pc__reply *reply, uint64_t n_blocks)
{
    if (!reply->composed) /* never moved afterwards: pieces point into it */
        reply->composed = malloc(n_blocks << PC_BLOCK_SHIFT);
    return reply->composed ? PC_OK : PC_ERR_NO_MEMORY;
}

/* ---------------------------------------------------------------- from a home */

static int add_composed(struct pc__reply *reply, const struct pc__request *request,
                        struct pc__parts *parts, enum pc__home_kind kind, uint64_t block)
{
    if (room_for_copies(reply, request->header.n_blocks))
        return PC_ERR_NO_MEMORY;
    parts->composed[parts->n_composed].block = block;
    parts->composed[parts->n_composed].kind = kind;
    return pc__reply_add(reply, reply->composed + (parts->n_composed++ << PC_BLOCK_SHIFT), -1, 0,
                         PC_BLOCK_BYTES);
}

static bool may_send_elsewhere(const struct pc_engine *engine, const struct pc__reply *reply,
                               const struct pc__request *request)
{
    return engine->replication != PC_REPLICATION_OFF && request->number &&
           !(request->header.flags & PC__DATA_HOME) && reply->region->home->directory;
}

/* The blocks of [block, past) that one source has: sent, or said to be elsewhere, in the file, or lost. Who asks
 * is a holder from here on: who is sent there before it has come waits there. */
static int add_part(struct pc_engine *engine, struct pc__reply *reply,
                    const struct pc__request *request, struct pc__parts *parts, uint64_t position,
                    uint64_t block, uint64_t past, uint64_t *n)
{
    struct pc__home_part part = pc__home_resolve(engine, reply->region, reply->region->home,
                                                 request->header.version, block, past - block);
    *n = part.n_blocks;
    if (part.kind == PC__HOME_LOST || part.kind == PC__HOME_FILE) {
        const struct pc__data_elsewhere nobody = {
            .to_version = part.kind == PC__HOME_FILE ? PC__DATA_IN_FILE : 0};
        set_bits(parts->elsewhere, position, *n);
        for (uint64_t i = 0; i < *n; i++)
            parts->sources[parts->n_elsewhere++] = nobody;
        parts->n_lost += *n;
        return PC_OK;
    }
    if (part.kind == PC__HOME_ZEROS) {
        set_bits(parts->holes, position, *n);
        parts->n_holes += *n;
        return PC_OK;
    }
    if (may_send_elsewhere(engine, reply, request)) {
        uint64_t home_bytes =
            atomic_load(&engine->serving_bytes) + (parts->n_sent << PC_BLOCK_SHIFT);
        struct pc__elsewhere to =
            pc__directory_choose(engine, reply->region, request->number, request->header.version,
                                 block, *n, home_bytes);
        *n = to.n_blocks;
        if (to.server_id) {
            set_bits(parts->elsewhere, position, *n);
            for (uint64_t i = 0; i < *n; i++)
                parts->sources[parts->n_elsewhere++] = (struct pc__data_elsewhere){
                    to.server_id, to.from_version, to.to_version};
            pc__directory_add(engine, reply->region, request->number, request->header.version,
                              block, *n, true);
            return PC_OK;
        }
    }
    parts->n_sent += *n;
    pc__directory_add(engine, reply->region, request->number, request->header.version, block, *n,
                      false);
    if (part.kind == PC__HOME_MEMORY)
        return pc__reply_add(reply, part.bytes, engine->huge_pages ? -1 : part.memfd, part.offset,
                             *n << PC_BLOCK_SHIFT);
    return add_composed(reply, request, parts, part.kind, block);
}

static int add_blocks(struct pc_engine *engine, struct pc__reply *reply,
                      const struct pc__request *request, struct pc__parts *parts)
{
    uint64_t position = 0, n;
    const uint64_t end = reply->region->n_blocks;
    for (int i = 0; i < request->n_runs; i++) {
        uint64_t block = request->runs[i].first_block, past = block + request->runs[i].n_blocks;
        uint64_t here = past < end ? past : end;
        for (; block < here; block += n, position += n) {
            int rc = add_part(engine, reply, request, parts, position, block, here, &n);
            if (rc)
                return rc;
        }
        if (block < past) { /* a longer member of its group is made: PC__DATA_MEMBER */
            set_bits(parts->holes, position, past - block);
            parts->n_holes += past - block;
            position += past - block;
        }
    }
    return PC_OK;
}

/* A peer did not have these: it is no holder of them, and whoever was sent there is not on its way. */
static void forget_missed(struct pc_engine *engine, struct pc__region *region,
                          const struct pc__request *request)
{
    uint16_t number = pc__holder_number(engine, request->asker.server_id);
    for (int i = 0; i < request->n_runs; i++)
        pc__directory_remove(region, number, request->runs[i].first_block,
                             request->runs[i].n_blocks);
    pc__holder_relieved(engine, request->asker.server_id,
                        (uint64_t)request->header.n_blocks << PC_BLOCK_SHIFT);
}

/* How many that follow each other on disk come at that one. */
static size_t on_disk_from(const struct pc__parts *parts, size_t i)
{
    size_t n = 0;
    while (i + n < parts->n_composed && parts->composed[i + n].kind == PC__HOME_DISK &&
           parts->composed[i + n].block == parts->composed[i].block + n)
        n++;
    return n;
}

static int compose(struct pc_engine *engine, struct pc__reply *reply, const struct pc__request *request,
                   const struct pc__parts *parts)
{
    const uint64_t version = request->header.version;
    int rc = PC_OK;
    for (size_t i = 0, n; i < parts->n_composed && !rc; i += n) {
        const uint64_t block = parts->composed[i].block;
        uint8_t *out = reply->composed + (i << PC_BLOCK_SHIFT);
        n = on_disk_from(parts, i);
        rc = n ? pc__home_read_disk(engine, reply->region, reply->home, version, block, n, out,
                                    request->waited)
               : pc__home_compose(engine, reply->region, reply->home, version, parts->composed[i].kind,
                                  block, out);
        n += !n;
    }
    return rc;
}

static int add_version(struct pc_engine *engine, struct pc__reply *reply,
                       const struct pc__request *request, struct pc__parts *parts)
{
    struct pc__region *region = reply->region;
    uint64_t version = request->header.version;
    pthread_mutex_lock(&region->lock);
    bool here = region->home && region->home->base.memfd >= 0 &&
                region->state != PC__REGION_CREATING;
    int rc = PC_ERR_NO_REGION;
    if (here && version > region->home->latest)
        rc = PC__WAIT;
    else if (here) {
        if (request->header.flags & PC__DATA_HOME && request->asker.server_id)
            forget_missed(engine, region, request);
        rc = add_blocks(engine, reply, request, parts);
    }
    if (!rc)
        rc = pc__home_knows(engine, region, version);
    if (!rc) {
        reply->home = region->home;
        reply->held = pc__home_hold(reply->home);
    }
    pthread_mutex_unlock(&region->lock);
    return rc ? rc : compose(engine, reply, request, parts);
}

/* --------------------------------------------------------------- from a cache */

static bool in_versions(const struct pc__data_asker *asker, uint64_t version)
{
    return (uint32_t)version - asker->from_version <= asker->to_version - asker->from_version;
}

/* The generation at a version that the asker takes which has most: of the first block at least. */
static struct pc__generation *cache_for(struct pc__region *region, const struct pc__request *request)
{
    struct pc__generation *found = NULL;
    pc__each(link, &region->generations)
    {
        struct pc__generation *g = pc__of(link, struct pc__generation, link);
        if (g->complete || !in_versions(&request->asker, g->version))
            continue;
        if (!found || g->present.n_set > found->present.n_set)
            found = g;
    }
    return found ? pc__generation_take(found) : NULL;
}

/* Copies what is there of the first blocks of a run, and says which is not. */
static int copy_some(struct pc__reply *reply, const struct pc__generation *generation,
                     struct pc__parts *parts,
                     uint64_t position, uint64_t first, uint64_t n)
{
    int rc = PC_OK;
    pthread_mutex_lock(&reply->region->lock);
    bool same = (uint32_t)generation->version == parts->version;
    for (uint64_t i = 0; i < n && !rc; i++) {
        if (!same || !pc__blockset_has(&generation->present, first + i)) {
            set_bits(parts->elsewhere, position + i, 1);
            parts->n_elsewhere++;
            continue;
        }
        uint8_t *at = reply->composed + (parts->n_sent++ << PC_BLOCK_SHIFT);
        rc = pc__file_read(generation->memfd, at, PC_BLOCK_BYTES, (first + i) << PC_BLOCK_SHIFT);
    }
    pthread_mutex_unlock(&reply->region->lock);
    return rc;
}

/* Whether some of it is on its way here. */
static bool is_coming(const struct pc__generation *generation, const struct pc__request *request)
{
    for (int i = 0; i < request->n_runs; i++) {
        uint64_t first = request->runs[i].first_block, past = first + request->runs[i].n_blocks;
        if (pc__blockset_next(&generation->in_flight, first, past) < past)
            return true;
    }
    return false;
}

static int add_cached(struct pc_engine *engine, struct pc__reply *reply,
                      const struct pc__request *request, struct pc__parts *parts)
{
    struct pc__region *region = reply->region;
    pthread_mutex_lock(&region->lock);
    struct pc__generation *generation = cache_for(region, request);
    bool coming = generation && !request->waited && is_coming(generation, request);
    if (generation)
        parts->version = (uint32_t)generation->version;
    pthread_mutex_unlock(&region->lock);
    if (!generation)
        return PC_ERR_NO_GENERATION;
    if (coming) {
        pc__generation_put(engine, generation);
        return PC__WAIT;
    }
    int rc = room_for_copies(reply, request->header.n_blocks);
    uint64_t position = 0;
    for (int i = 0; i < request->n_runs && !rc; i++) {
        uint64_t first = request->runs[i].first_block, past = first + request->runs[i].n_blocks, n;
        for (; first < past && !rc; first += n, position += n) {
            n = past - first < COPY_BLOCKS ? past - first : COPY_BLOCKS;
            rc = copy_some(reply, generation, parts, position, first, n);
        }
    }
    pthread_mutex_lock(&region->lock); /* what others want is worth keeping */
    pc__cache_touched(engine, generation, request->runs, (size_t)request->n_runs);
    pthread_mutex_unlock(&region->lock);
    pc__generation_put(engine, generation);
    if (!rc && parts->n_sent)
        rc = pc__reply_add(reply, reply->composed, -1, 0, parts->n_sent << PC_BLOCK_SHIFT);
    if (!rc)
        pc__count_add(&engine->count.peer_blocks_served, parts->n_sent);
    return rc;
}

/* -------------------------------------------------------------------- answers */

/* Its file, by blocks of that. */
static int add_layer(struct pc__reply *reply, const struct pc__request *request,
                     struct pc__parts *parts)
{
    const struct pc__layer *layer = reply->layer;
    int rc = layer->on_disk ? room_for_copies(reply, request->header.n_blocks) : PC_OK;
    for (int i = 0; i < request->n_runs && !rc; i++) {
        const uint64_t offset = request->runs[i].first_block << PC_BLOCK_SHIFT;
        const uint64_t n_bytes = request->runs[i].n_blocks << PC_BLOCK_SHIFT;
        uint8_t *copy = layer->on_disk ? reply->composed + (parts->n_sent << PC_BLOCK_SHIFT) : NULL;
        if (copy)
            rc = pc__disk_file_read(layer->memfd, copy, n_bytes, offset);
        if (!rc)
            rc = copy ? pc__reply_add(reply, copy, -1, 0, n_bytes)
                      : pc__reply_add(reply, layer->map + offset, layer->memfd, offset, n_bytes);
        parts->n_sent += request->runs[i].n_blocks;
    }
    return rc;
}

static int write_head(struct pc__reply *reply, const struct pc__request *request,
                      const struct pc__parts *parts)
{
    const struct pc__data_header *asked = &request->header;
    bool cached = asked->flags & PC__DATA_CACHED;
    size_t bitmap = (asked->n_blocks + 63u) / 64u * sizeof(uint64_t);
    size_t sources = cached ? 0 : parts->n_elsewhere * sizeof parts->sources[0];
    struct pc__data_header header = {
        .magic = PC__DATA_MAGIC,
        .type = PC__DATA_BLOCKS,
        .flags = (uint16_t)((cached ? PC__DATA_CACHED : 0) |
                            (parts->n_holes ? PC__DATA_HOLES : 0) |
                            (parts->n_elsewhere ? PC__DATA_ELSEWHERE : 0)),
        .request_id = asked->request_id,
        .region = asked->region,
        .version = cached ? parts->version : asked->version,
        .n_blocks = asked->n_blocks};
    uint8_t *at = reply->head = malloc(sizeof header + 2 * bitmap + sources);
    if (!at)
        return PC_ERR_NO_MEMORY;
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    if (parts->n_holes) {
        memcpy(at, parts->holes, bitmap);
        at += bitmap;
    }
    if (parts->n_elsewhere) {
        memcpy(at, parts->elsewhere, bitmap);
        at += bitmap;
        memcpy(at, parts->sources, sources);
        at += sources;
    }
    reply->pieces[0].bytes = reply->head;
    reply->pieces[0].length = (size_t)(at - reply->head);
    return PC_OK;
}

int pc__reply_head(struct pc__reply *reply, const struct pc__data_header *header)
{
    free(reply->head);
    reply->head = malloc(sizeof *header);
    if (!reply->head)
        return PC_ERR_NO_MEMORY;
    memcpy(reply->head, header, sizeof *header);
    reply->pieces[0].bytes = reply->head;
    reply->pieces[0].length = sizeof *header;
    reply->n_pieces = 1;
    return PC_OK;
}

int pc__reply_refuse(struct pc__reply *reply, const struct pc__data_header *request, int status)
{
    const struct pc__data_header header = {
        .magic = PC__DATA_MAGIC,
        .type = PC__DATA_BLOCKS,
        .flags = request->flags & PC__DATA_CACHED,
        .request_id = request->request_id,
        .status = status,
        .region = request->region,
        .version = request->version,
        .n_blocks = request->n_blocks};
    return pc__reply_head(reply, &header);
}

int pc__reply_rows(struct pc__reply *reply, const struct pc__data_header *request,
                   const struct pc__data_rows *rows, int status)
{
    const struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                           .type = PC__DATA_ROWS,
                                           .request_id = request->request_id,
                                           .status = status,
                                           .region = request->region,
                                           .version = request->version};
    reply->head = malloc(sizeof header + sizeof *rows);
    if (!reply->head)
        return pc__fail(PC_ERR_NO_MEMORY, "a reply");
    memcpy(reply->head, &header, sizeof header);
    memcpy(reply->head + sizeof header, rows, sizeof *rows);
    reply->pieces[0].bytes = reply->head;
    reply->pieces[0].length = sizeof header + (status ? 0 : sizeof *rows);
    return status ? PC_OK
                  : pc__reply_add(reply, reply->composed, -1, 0, rows->n_rows * rows->row_bytes);
}

/* Blocks were found to be damaged: they are lost from here on, and those around them are not. */
static void begin_again(struct pc_engine *engine, struct pc__reply *reply, struct pc__parts *parts)
{
    pc__home_release(engine, reply->region, reply->home, reply->held);
    reply->home = NULL;
    reply->n_pieces = 1;
    memset(parts, 0, offsetof(struct pc__parts, sources));
}

int pc__reply_fill(struct pc__loop *loop, struct pc__reply *reply,
                   const struct pc__request *request)
{
    struct pc_engine *engine = loop->engine;
    if (!loop->parts)
        loop->parts = malloc(sizeof *loop->parts);
    struct pc__parts *parts = loop->parts;
    if (!parts)
        return PC_ERR_NO_MEMORY;
    memset(parts, 0, offsetof(struct pc__parts, sources));
    int rc = reply->layer ? add_layer(reply, request, parts)
             : request->header.flags & PC__DATA_CACHED
                 ? add_cached(engine, reply, request, parts)
                 : add_version(engine, reply, request, parts);
    for (unsigned n = 0; rc == PC_ERR_HOME_LOST && reply->home && n < request->header.n_blocks; n++) {
        begin_again(engine, reply, parts);
        rc = add_version(engine, reply, request, parts);
    }
    if (!rc)
        rc = write_head(reply, request, parts);
    if (!rc) {
        if (!reply->layer)
            pc__region_was_read(reply->region);
        pc__count_add(&engine->count.blocks_served, parts->n_sent);
        if (!(request->header.flags & PC__DATA_CACHED))
            pc__count_add(&engine->count.redirected_blocks, parts->n_elsewhere - parts->n_lost);
    }
    return rc;
}

/* ------------------------------------------------------------- room for rows */

uint8_t *pc__rows_take_buffer(struct pc__loop *loop)
{
    for (size_t i = 0; i < PC__ROW_BUFFERS; i++) {
        uint8_t *buffer = loop->row_buffers[i];
        loop->row_buffers[i] = NULL;
        if (buffer)
            return buffer;
    }
    return malloc(PC__DATA_MAX_ROWS_BYTES);
}

void pc__rows_give_buffer(struct pc__loop *loop, uint8_t *buffer)
{
    for (size_t i = 0; i < PC__ROW_BUFFERS && buffer; i++)
        if (!loop->row_buffers[i]) {
            loop->row_buffers[i] = buffer;
            return;
        }
    free(buffer);
}

void pc__rows_free_buffers(struct pc__loop *loop)
{
    for (size_t i = 0; i < PC__ROW_BUFFERS; i++)
        free(loop->row_buffers[i]);
}
