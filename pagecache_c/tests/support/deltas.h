/* deltas.h - commits whose layers are deltas, made by hand, and what each version of their region has. */
#ifndef PC_TEST_DELTAS_H
#define PC_TEST_DELTAS_H

#include "tests/support/commit.h"

#include <semaphore.h>

#define MAX_CHANGES 4096

/* In the order of the versions: the first makes version 1. */
struct change {
    uint64_t id;
    bool is_delta;
    size_t n_runs;
    struct pc_run runs[MAX_COMMIT_RUNS];
};
struct changes {
    _Atomic size_t n;
    struct change of[MAX_CHANGES];
};

static inline bool change_has(const struct change *change, uint64_t block)
{
    for (size_t i = 0; i < change->n_runs; i++)
        if (block >= change->runs[i].first_block &&
            block - change->runs[i].first_block < change->runs[i].n_blocks)
            return true;
    return false;
}

/* What version has there, by the bytes that each commit brought. */
static inline uint64_t word_of(const struct changes *changes, uint64_t region, uint64_t version,
                               uint64_t block, size_t w)
{
    const uint64_t offset = (block << 12) + w * 8;
    uint64_t word = pattern(region, offset);
    for (size_t i = 0; i < version; i++) {
        const struct change *change = &changes->of[i];
        if (change_has(change, block))
            word = (change->is_delta ? word : 0) ^ written(region, change->id, offset);
    }
    return word;
}

static inline void check_words(const struct changes *changes, uint64_t region, uint64_t version,
                               uint64_t block, const volatile uint64_t *words)
{
    for (size_t w = 0; w < 512; w += w < 4 || w > 507 ? 1 : 63) { /* each word would take long */
        if (words[w] == word_of(changes, region, version, block, w))
            continue;
        fprintf(stderr, "version %llu, block %llu, word %zu is %llx", (unsigned long long)version,
                (unsigned long long)block, w, (unsigned long long)words[w]);
        for (uint64_t v = 0; v <= changes->n; v++)
            if (words[w] == word_of(changes, region, v, block, w))
                fprintf(stderr, ", as in version %llu", (unsigned long long)v);
        fprintf(stderr, "\n");
        FAIL("wrong bytes");
    }
}

/* Opens the version, looks at all of it, closes it. */
static inline void check_changes(const struct changes *changes, pc_client *client,
                                 const struct pc_region_info *info, uint64_t version)
{
    struct pc_mapping m = map_at(client, info, version, 0);
    for (uint64_t b = 0; b < info->length_bytes >> 12; b++)
        check_words(changes, info->region, version, b, block_at(&m, b));
    OK(pc_client_unmap(client, m.id));
}

/* A layer's file with these flags. */
static inline int layer_file(uint64_t region, uint64_t id, uint32_t flags, const struct pc_run *runs,
                             size_t n_runs, uint64_t *bytes)
{
    struct pc__layer_head head = {.magic = PC__LAYER_MAGIC, .region = region, .commit_id = id,
                                  .data_offset = pc__layer_data_offset(n_runs),
                                  .n_runs = (uint32_t)n_runs, .flags = flags};
    for (size_t i = 0; i < n_runs; i++)
        head.n_blocks += runs[i].n_blocks;
    *bytes = head.data_offset + (head.n_blocks << 12);
    int fd = memfd_create("layer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)*bytes));
    CHECK(pwrite(fd, &head, sizeof head, 0) == (ssize_t)sizeof head);
    CHECK(pwrite(fd, runs, n_runs * sizeof *runs, sizeof head) == (ssize_t)(n_runs * sizeof *runs));
    uint64_t at = head.data_offset, words[512];
    for (size_t i = 0; i < n_runs; i++)
        for (uint64_t k = 0; k < runs[i].n_blocks; k++, at += sizeof words) {
            for (size_t w = 0; w < 512; w++)
                words[w] = written(region, id, ((runs[i].first_block + k) << 12) + w * 8);
            CHECK(pwrite(fd, words, sizeof words, (off_t)at) == (ssize_t)sizeof words);
        }
    CHECK(!fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    return fd;
}

/* Staged at a server: by nobody's process. */
static inline uint64_t stage_change(struct server *server, uint64_t region, struct change *change)
{
    uint64_t bytes;
    int fd = layer_file(region, change->id, change->is_delta ? PC__LAYER_DELTA : 0, change->runs,
                        change->n_runs, &bytes);
    OK(pc__layer_stage(server->engine, region, change->id, bytes, fd, 0));
    return bytes;
}

static inline struct change change_of(struct cluster *c, bool is_delta, const struct pc_run *runs,
                                      size_t n_runs)
{
    struct change change = {.id = registry_commit_id(c->registry), .is_delta = is_delta,
                            .n_runs = n_runs};
    memcpy(change.runs, runs, n_runs * sizeof *runs);
    return change;
}

/* The registry's decision. No conflict: a parity has none. */
static inline uint64_t decide_change(struct cluster *c, struct changes *changes, uint64_t region,
                                     const struct change *change)
{
    changes->of[changes->n] = *change;
    const uint64_t version = registry_commit(c->registry, change->id, region, changes->n,
                                             change->runs, change->n_runs);
    CHECK(version == ++changes->n);
    return version;
}

/* Of a process of `node`; the home pulls it, if that is another. */
static inline uint64_t commit_change(struct cluster *c, struct changes *changes, struct server *node,
                                     uint64_t region, bool is_delta, const struct pc_run *runs,
                                     size_t n_runs)
{
    struct change change = change_of(c, is_delta, runs, n_runs);
    struct server *home = home_of(c, region);
    const uint64_t bytes = stage_change(node, region, &change);
    if (home != node) {
        OK(pc_engine_pull(home->engine, region, change.id, node->id, bytes));
        OK(wait_pulled(c, change.id));
    }
    const uint64_t version = decide_change(c, changes, region, &change);
    OK(pc_engine_publish(home->engine, region, version, change.id));
    if (home != node)
        OK(pc_engine_publish(node->engine, region, version, change.id));
    return version;
}

/* ----------------------------------------------------------- the worker waits */

struct standstill {
    pc_engine *engine;
    pthread_t thread;
    sem_t begun, over;
};

static inline int stand_still(void *arg)
{
    struct standstill *s = arg;
    sem_post(&s->begun);
    while (sem_wait(&s->over))
        ;
    return PC_OK;
}

static inline void *hold_worker_run(void *arg)
{
    struct standstill *s = arg;
    OK(pc__worker_do(s->engine, stand_still, s));
    return NULL;
}

/* Nothing that is published is applied from here on. */
static inline void hold_worker(struct standstill *s, struct server *server)
{
    s->engine = server->engine;
    sem_init(&s->begun, 0, 0);
    sem_init(&s->over, 0, 0);
    CHECK(!pthread_create(&s->thread, NULL, hold_worker_run, s));
    while (sem_wait(&s->begun))
        ;
}

static inline void release_worker(struct standstill *s)
{
    sem_post(&s->over);
    pthread_join(s->thread, NULL);
    sem_destroy(&s->begun);
    sem_destroy(&s->over);
}

#endif
