/* registry.h - what the tests have for a registry: a log of commits in memory that children share,
 * and the contents that each version has by it.
 *
 * Every block that a commit writes is filled with a pattern of (region, commit, block), so a block of
 * another version, of another place, or one that is torn does not pass for what it should be. */
#ifndef PC_TEST_REGISTRY_H
#define PC_TEST_REGISTRY_H

#include "pagecache.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_COMMITS 32768
#define MAX_COMMIT_RUNS 24
#define MAX_ABORTED 4096
#define MAX_PORTS 12

struct commit_record {
    uint64_t id, region, version;
    size_t n_runs;
    struct pc_run runs[MAX_COMMIT_RUNS];
};
/* Asks a home that is in another process for a pull. */
struct pull_request {
    _Atomic int state; /* 0: free; 1: asked; 2: answered */
    uint64_t region, commit_id, from, layer_bytes;
    int error;
};
#define MAX_PULLS 8
struct registry {
    pthread_mutex_t lock; /* of several processes; survives whoever dies with it */
    _Atomic int ports[MAX_PORTS]; /* of servers that are in other processes: where they accept */
    _Atomic bool introduced; /* who connects there says its id first */
    struct pull_request pulls[MAX_PULLS];
    size_t n_commits, n_aborted;
    uint64_t next_commit;
    uint64_t changes_from; /* the log does not reach back before this version */
    uint64_t aborted[MAX_ABORTED];
    struct commit_record log[MAX_COMMITS];
};

static inline struct registry *registry_new(void)
{
    struct registry *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (r == MAP_FAILED)
        abort();
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&r->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return r;
}

static inline void registry_free(struct registry *r)
{
    munmap(r, sizeof *r);
}

static inline void registry_lock(struct registry *r)
{
    if (pthread_mutex_lock(&r->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&r->lock); /* each change is one store: nothing is in the middle */
}

static inline void registry_unlock(struct registry *r)
{
    pthread_mutex_unlock(&r->lock);
}

static inline uint64_t registry_commit_id(struct registry *r)
{
    registry_lock(r);
    uint64_t n = ++r->next_commit;
    registry_unlock(r);
    return (n << 20 ^ 0x5bd1e995u) * 0x9e3779b97f4a7c15ull | 1u;
}

/* The lock is held. */
static inline uint64_t latest_of(const struct registry *r, uint64_t region)
{
    for (size_t i = r->n_commits; i-- > 0;)
        if (r->log[i].region == region)
            return r->log[i].version;
    return 0;
}

static inline uint64_t registry_latest(struct registry *r, uint64_t region)
{
    registry_lock(r);
    uint64_t version = latest_of(r, region);
    registry_unlock(r);
    return version;
}

static inline bool overlap(const struct pc_run *a, size_t n_a, const struct pc_run *b, size_t n_b)
{
    for (size_t i = 0; i < n_a; i++)
        for (size_t k = 0; k < n_b; k++)
            if (a[i].first_block < b[k].first_block + b[k].n_blocks &&
                b[k].first_block < a[i].first_block + a[i].n_blocks)
                return true;
    return false;
}

/* The version that the commit is, or 0: another wrote the same blocks since base, or it was said to
 * be aborted. */
static inline uint64_t registry_commit(struct registry *r, uint64_t id, uint64_t region,
                                       uint64_t base, const struct pc_run *runs, size_t n_runs)
{
    bool refused = false;
    registry_lock(r);
    uint64_t version = latest_of(r, region) + 1;
    for (size_t i = 0; i < r->n_aborted; i++)
        refused |= r->aborted[i] == id;
    for (size_t i = r->n_commits; i-- > 0 && !refused;) {
        const struct commit_record *c = &r->log[i];
        if (c->region != region)
            continue;
        if (c->version <= base)
            break;
        refused = overlap(c->runs, c->n_runs, runs, n_runs);
    }
    if (n_runs > MAX_COMMIT_RUNS || r->n_commits == MAX_COMMITS)
        abort();
    if (!refused) {
        struct commit_record *c = &r->log[r->n_commits];
        *c = (struct commit_record){.id = id, .region = region, .version = version,
                                    .n_runs = n_runs};
        memcpy(c->runs, runs, n_runs * sizeof *runs);
        r->n_commits++;
    }
    registry_unlock(r);
    return refused ? 0 : version;
}

/* The version, or 0: aborted, from now on for good. */
static inline uint64_t registry_outcome(struct registry *r, uint64_t id, uint64_t region)
{
    uint64_t version = 0;
    registry_lock(r);
    for (size_t i = 0; i < r->n_commits; i++)
        if (r->log[i].id == id && r->log[i].region == region)
            version = r->log[i].version;
    if (!version && r->n_aborted < MAX_ABORTED)
        r->aborted[r->n_aborted++] = id;
    registry_unlock(r);
    return version;
}

static inline int by_first(const void *a, const void *b)
{
    const struct pc_run *x = a, *y = b;
    return x->first_block < y->first_block ? -1 : x->first_block > y->first_block;
}

/* Sorted, disjoint runs of what changed in (from, to]; the caller frees them. */
static inline int registry_changes(struct registry *r, uint64_t region, uint64_t from, uint64_t to,
                                   struct pc_run **runs, size_t *n)
{
    size_t capacity = 64;
    *runs = malloc(capacity * sizeof **runs);
    *n = 0;
    registry_lock(r);
    int rc = to > latest_of(r, region) ? PC_ERR_NO_VERSION
             : from < r->changes_from  ? PC_ERR_EXPIRED
                                       : PC_OK;
    for (size_t i = 0; i < r->n_commits && !rc; i++) {
        const struct commit_record *c = &r->log[i];
        if (c->region != region || c->version <= from || c->version > to)
            continue;
        if (*n + c->n_runs > capacity) {
            capacity = (*n + c->n_runs) * 2;
            *runs = realloc(*runs, capacity * sizeof **runs);
        }
        memcpy(*runs + *n, c->runs, c->n_runs * sizeof **runs);
        *n += c->n_runs;
    }
    registry_unlock(r);
    qsort(*runs, *n, sizeof **runs, by_first);
    size_t kept = 0;
    for (size_t i = 0; i < *n; i++) {
        struct pc_run *last = kept ? &(*runs)[kept - 1] : NULL, next = (*runs)[i];
        if (last && next.first_block <= last->first_block + last->n_blocks) {
            uint64_t past = next.first_block + next.n_blocks;
            if (past > last->first_block + last->n_blocks)
                last->n_blocks = past - last->first_block;
        } else {
            (*runs)[kept++] = next;
        }
    }
    *n = kept;
    return rc;
}

/* ---------------------------------------------------------------- contents */

/* Who wrote each block of the version last: a commit's id, or 0: it is as it was built. */
static inline uint64_t *registry_owners(struct registry *r, uint64_t region, uint64_t version,
                                        uint64_t n_blocks)
{
    uint64_t *owners = calloc(n_blocks, sizeof *owners);
    registry_lock(r);
    for (size_t i = 0; i < r->n_commits; i++) {
        const struct commit_record *c = &r->log[i];
        if (c->region != region || c->version > version)
            continue;
        for (size_t k = 0; k < c->n_runs; k++)
            for (uint64_t b = 0; b < c->runs[k].n_blocks; b++)
                owners[c->runs[k].first_block + b] = c->id;
    }
    registry_unlock(r);
    return owners;
}

/* The value of the 8 bytes at offset of a block that the commit wrote. */
static inline uint64_t written(uint64_t region, uint64_t commit_id, uint64_t offset)
{
    uint64_t x = (offset >> 3) * 0x9e3779b97f4a7c15ull + region * 0x2545f4914f6cdd1dull +
                 commit_id * 0xff51afd7ed558ccdull;
    return x ^ x >> 31;
}

/* The first word of the block that is not as it should be, or 512. owner 0: built(region, offset). */
static inline size_t wrong_word(const volatile uint64_t *words, uint64_t region, uint64_t owner,
                                uint64_t block, uint64_t (*built)(uint64_t, uint64_t))
{
    for (size_t w = 0; w < 512; w++) {
        uint64_t offset = (block << 12) + w * 8;
        if (words[w] != (owner ? written(region, owner, offset) : built(region, offset)))
            return w;
    }
    return 512;
}

/* For messages: which version of the block these words are of, or -1. */
static inline int64_t version_of_words(struct registry *r, uint64_t region, uint64_t block,
                                       const volatile uint64_t *words,
                                       uint64_t (*built)(uint64_t, uint64_t))
{
    int64_t found = wrong_word(words, region, 0, block, built) == 512 ? 0 : -1;
    registry_lock(r);
    for (size_t i = 0; i < r->n_commits && found < 0; i++)
        if (r->log[i].region == region &&
            wrong_word(words, region, r->log[i].id, block, built) == 512)
            found = (int64_t)r->log[i].version;
    registry_unlock(r);
    return found;
}

#endif
