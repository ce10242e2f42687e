/* commit.h - commits and checks of contents, for tests of versions: what the library does in Python. */
#ifndef PC_TEST_COMMIT_H
#define PC_TEST_COMMIT_H

#include "tests/support/harness.h"

#include "engine/core/core.h"
#include "engine/store/store.h"

#include <dirent.h>
#include <sys/stat.h>

#define MIB ((uint64_t)1 << 20)
#define WAIT (30 * SECOND) /* on a busy machine; nothing is waited for that may not come */

/* Of a region; all zeros if the server does not know it. */
static inline struct pc_region_stats region_of(struct server *server, uint64_t region)
{
    struct pc_region_stats all[64], none = {0};
    int64_t n = pc_engine_region_stats(server->engine, all, 64);
    for (int64_t i = 0; i < n && i < 64; i++)
        if (all[i].region == region)
            return all[i];
    return none;
}

#define SOON(condition) SOON_IN(condition, 30)
#define SOON_IN(condition, seconds)                                                              \
    do {                                                                                         \
        uint64_t until_ = now_ns() + (seconds) * SECOND;                                         \
        bool so_; /* once is enough: it may be otherwise a moment later */                       \
        while (!(so_ = (condition)) && now_ns() < until_)                                        \
            usleep(1000);                                                                        \
        CHECK(so_ || (condition));                                                               \
    } while (0)

static inline int try_map(pc_client *client, const struct pc_region_info *info, uint64_t version,
                          uint32_t flags, struct pc_mapping *m)
{
    return pc_client_map(client, info->region, version, info->base_address, info->length_bytes,
                         flags, WAIT, m);
}

static inline struct pc_mapping map_at(pc_client *client, const struct pc_region_info *info,
                                       uint64_t version, uint32_t flags)
{
    struct pc_mapping m;
    OK(try_map(client, info, version, flags, &m));
    return m;
}

/* Whether a layer of the next version would go to an overlay. */
static inline bool base_is_leased(struct server *server, uint64_t id)
{
    struct pc__region *region = pc__region_get(server->engine, id);
    pthread_mutex_lock(&region->lock);
    bool is = pc__home_base_leased(server->engine, region, region->home->base.version + 1);
    pthread_mutex_unlock(&region->lock);
    pc__region_put(server->engine, region);
    return is;
}

/* Unmaps what was the last lease on the home's base. The server is told of it, and does not answer. */
static inline void leave_base(struct server *server, pc_client *client, uint64_t region,
                              const struct pc_mapping *m)
{
    OK(pc_client_unmap(client, m->id));
    SOON(!base_is_leased(server, region));
}

static inline volatile uint64_t *block_at(const struct pc_mapping *m, uint64_t block)
{
    return (volatile uint64_t *)(uintptr_t)(m->address + (block << 12));
}

/* Of blocks that were never filled. */
static inline uint64_t zeros(uint64_t region, uint64_t offset)
{
    (void)region;
    (void)offset;
    return 0;
}

/* One block of the mapping is what the version has there. */
static inline void check_block(struct cluster *c, const struct pc_mapping *m,
                               const struct pc_region_info *info, uint64_t version, uint64_t owner,
                               uint64_t block)
{
    const volatile uint64_t *words = block_at(m, block);
    size_t wrong = wrong_word(words, info->region, owner, block, pattern);
    if (wrong == 512)
        return;
    fprintf(stderr, "version %llu, block %llu, word %zu is %llx: whole block is of version %lld\n",
            (unsigned long long)version, (unsigned long long)block, wrong,
            (unsigned long long)words[wrong],
            (long long)version_of_words(c->registry, info->region, block, words, pattern));
    FAIL("wrong bytes");
}

/* Every block of the mapping is what the version has there. */
static inline void check_version(struct cluster *c, const struct pc_mapping *m,
                                 const struct pc_region_info *info, uint64_t version)
{
    uint64_t n_blocks = info->length_bytes >> 12;
    uint64_t *owners = registry_owners(c->registry, info->region, version, n_blocks);
    for (uint64_t b = 0; b < n_blocks; b++)
        check_block(c, m, info, version, owners[b], b);
    free(owners);
}

/* Opens, checks all of it, closes. */
static inline void check_at(struct cluster *c, pc_client *client,
                            const struct pc_region_info *info, uint64_t version)
{
    struct pc_mapping m = map_at(client, info, version, 0);
    check_version(c, &m, info, version);
    OK(pc_client_unmap(client, m.id));
}

/* ----------------------------------------------------------------- commits */

struct transaction {
    struct cluster *cluster;
    struct server *node;
    pc_client *client;
    struct pc_region_info info;
    struct pc_mapping m;
    uint64_t base, id, version;
    size_t n_runs;
    struct pc_run runs[MAX_COMMIT_RUNS];
};

static inline int try_begin(struct cluster *c, struct server *node, pc_client *client,
                            const struct pc_region_info *info, uint64_t base,
                            struct transaction *t)
{
    *t = (struct transaction){.cluster = c, .node = node, .client = client, .info = *info,
                              .base = base, .id = registry_commit_id(c->registry)};
    return try_map(client, info, base, PC_MAP_PRIVATE, &t->m);
}

static inline void write_runs(struct transaction *t, const struct pc_run *runs, size_t n_runs)
{
    for (size_t i = 0; i < n_runs; i++)
        for (uint64_t b = runs[i].first_block; b < runs[i].first_block + runs[i].n_blocks; b++)
            for (size_t w = 0; w < 512; w++)
                block_at(&t->m, b)[w] = written(t->info.region, t->id, (b << 12) + w * 8);
    int64_t n = pc_client_dirty(t->client, t->m.id, t->runs, MAX_COMMIT_RUNS);
    OK(n);
    CHECK((size_t)n == n_runs && !memcmp(t->runs, runs, n_runs * sizeof *runs));
    t->n_runs = n_runs;
}

static inline int try_stage(struct transaction *t)
{
    return pc_client_stage(t->client, t->m.id, t->id, t->runs, t->n_runs, 1, WAIT, NULL);
}

static inline struct server *home_of(struct cluster *c, uint64_t region)
{
    uint64_t home = 0;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < c->n_regions; i++)
        if (c->regions[i].info.region == region)
            home = c->regions[i].home;
    pthread_mutex_unlock(&c->lock);
    for (int i = 0; i < c->n; i++)
        if (c->servers[i].id == home)
            return &c->servers[i];
    FAIL("a region without a home");
}

static inline int wait_pulled(struct cluster *c, uint64_t commit_id)
{
    for (uint64_t until = now_ns() + WAIT; now_ns() < until; usleep(200)) {
        pthread_mutex_lock(&c->lock);
        for (unsigned i = 0; i < 64; i++)
            if (c->pulled[i].commit_id == commit_id) {
                int error = c->pulled[i].error;
                c->pulled[i] = (struct pulled){0};
                pthread_mutex_unlock(&c->lock);
                return error;
            }
        pthread_mutex_unlock(&c->lock);
    }
    for (int i = 0; i < c->n; i++) { /* what the servers are at */
        struct pc_engine_stats s = {0};
        (void)pc_engine_get_stats(c->servers[i].engine, &s);
        fprintf(stderr,
                "server %d: %llu in flight, %llu requests, %llu retries, %llu failed, %llu waiting, "
                "%llu layers, %llu staged, %llu bad, %llu sent, %llu received\n", i,
                (unsigned long long)s.fetches_in_flight, (unsigned long long)s.fetch_requests,
                (unsigned long long)s.fetch_retries, (unsigned long long)s.fetch_failed,
                (unsigned long long)s.faults_waiting, (unsigned long long)s.layers,
                (unsigned long long)s.commits_staged, (unsigned long long)s.bad_messages,
                (unsigned long long)s.bytes_sent, (unsigned long long)s.bytes_received);
    }
    FAIL("nothing was heard of a pull");
}

static inline uint64_t layer_bytes(const struct transaction *t)
{
    uint64_t blocks = 0;
    for (size_t i = 0; i < t->n_runs; i++)
        blocks += t->runs[i].n_blocks;
    return pc__layer_data_offset(t->n_runs) + (blocks << 12);
}

/* By the process that the home is in, which may die meanwhile: then its next one is asked. */
static inline int pull_elsewhere(struct transaction *t)
{
    struct registry *r = t->cluster->registry;
    struct pull_request *at = NULL;
    while (!at)
        for (size_t i = 0; i < MAX_PULLS && !at; i++) {
            int is_free = 0;
            if (atomic_compare_exchange_strong(&r->pulls[i].state, &is_free, 3))
                at = &r->pulls[i];
        }
    at->region = t->info.region;
    at->commit_id = t->id;
    at->from = t->node->id;
    at->layer_bytes = layer_bytes(t);
    at->state = 1;
    uint64_t until = now_ns() + 20 * SECOND;
    while (at->state != 2) {
        CHECK(now_ns() < until);
        usleep(500);
    }
    int error = at->error;
    at->state = 0;
    return error;
}

/* The home fetches the layer, if it is another. */
static inline int try_pull(struct transaction *t)
{
    struct server *home = home_of(t->cluster, t->info.region);
    if (home == t->node)
        return PC_OK;
    if (!home->engine)
        return pull_elsewhere(t);
    int rc = pc_engine_pull(home->engine, t->info.region, t->id, t->node->id, layer_bytes(t));
    return rc ? rc : wait_pulled(t->cluster, t->id);
}

/* What the registry says: its version, or 0. */
static inline uint64_t decide(struct transaction *t)
{
    t->version = registry_commit(t->cluster->registry, t->id, t->info.region, t->base, t->runs,
                                 t->n_runs);
    return t->version;
}

/* The registry tells the home, and the writer its own server. */
static inline void tell(struct transaction *t)
{
    struct server *home = home_of(t->cluster, t->info.region);
    if (home != t->node && home->engine && !home->quiet) {
        if (t->version)
            (void)pc_engine_publish(home->engine, t->info.region, t->version, t->id);
        else
            OK(pc_engine_drop_staged(home->engine, t->info.region, t->id));
    }
    OK(pc_client_resolve(t->client, t->m.id, t->id, t->info.region, t->version));
}

static inline uint64_t commit(struct cluster *c, struct server *node, pc_client *client,
                              const struct pc_region_info *info, uint64_t base,
                              const struct pc_run *runs, size_t n_runs)
{
    struct transaction t;
    OK(try_begin(c, node, client, info, base, &t));
    write_runs(&t, runs, n_runs);
    OK(try_stage(&t));
    OK(try_pull(&t));
    (void)decide(&t);
    tell(&t);
    OK(pc_client_unmap(client, t.m.id));
    return t.version;
}

/* ---------------------------------------------------------------- counting */

static inline int open_descriptors(void)
{
    DIR *all = opendir("/proc/self/fd");
    CHECK(all);
    int n = 0;
    while (readdir(all))
        n++;
    closedir(all);
    return n;
}

/* Bytes of the memfds that this process has open; each file once. */
static inline uint64_t memfd_bytes(void)
{
    uint64_t bytes = 0;
    ino_t seen[4096];
    size_t n_seen = 0;
    for (int fd = 0; fd < 4096; fd++) {
        char path[64], name[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, name, sizeof name - 1);
        struct stat st;
        if (n <= 0 || stat(path, &st)) /* not fstat: others may be about to close it */
            continue;
        name[n] = 0;
        if (strncmp(name, "/memfd:", 7) != 0)
            continue;
        bool again = false;
        for (size_t i = 0; i < n_seen; i++)
            again |= seen[i] == st.st_ino;
        if (again || n_seen == 4096)
            continue;
        seen[n_seen++] = st.st_ino;
        bytes += (uint64_t)st.st_blocks * 512;
    }
    return bytes;
}

static inline int threads_now(void)
{
    DIR *all = opendir("/proc/self/task");
    CHECK(all);
    int n = 0;
    while (readdir(all))
        n++;
    closedir(all);
    return n;
}

#endif
