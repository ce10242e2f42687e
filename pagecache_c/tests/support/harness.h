/* harness.h - two or more engines in one process, and a thread for each that answers what Python
 * would: who has a region, and connections between the servers over loopback TCP. */
#ifndef PC_TEST_HARNESS_H
#define PC_TEST_HARNESS_H

#include "common/error.h"
#include "pagecache.h"
#include "common/wire.h"
#include "engine/loop.h"
#include "tests/support/length.h"
#include "tests/support/registry.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
/* Children of a process with threads start threads here, on purpose. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "die_after_fork=0";
}
#endif

#define SECOND 1000000000ull
#define CHECK(condition)                                                                         \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "%s:%d: %s: not so: %s (%s)\n", __FILE__, __LINE__, __func__,        \
                    #condition, pc_last_message());                                              \
            _exit(1);                                                                            \
        }                                                                                        \
    } while (0)
#define FAIL(text)                                                                               \
    do {                                                                                         \
        fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, text);                   \
        _exit(1);                                                                                \
    } while (0)
#define OK(call)                                                                                 \
    do {                                                                                         \
        int rc_ = (int)(call);                                                                   \
        if (rc_ < 0) {                                                                           \
            fprintf(stderr, "%s:%d: %s: %s: %s (%s)\n", __FILE__, __LINE__, __func__, #call,     \
                    pc_strerror(rc_), pc_last_message());                                        \
            _exit(1);                                                                            \
        }                                                                                        \
    } while (0)

#define MAX_SERVERS MAX_PORTS
#define MAX_REGIONS 2048

struct known_region {
    struct pc_region_info info;
    uint64_t home;
};
struct server {
    pc_engine *engine;
    uint64_t id;
    char name[64];
    pthread_t thread;
    int stop[2];
    _Atomic int idle_events, log_events, thrashing_events;
    _Atomic int outcomes_asked, changes_asked, published_asked;
    _Atomic int homes_asked, regions_lacking, keepers_lost, settled_asked;
    _Atomic bool hold_home;      /* the test itself answers NEED_HOME */
    _Atomic bool hold_published; /* answers to NEED_PUBLISHED wait while this is set */
    _Atomic bool hold_settled;   /* it is told that the homes have acknowledged nothing */
    _Atomic bool quiet;          /* nobody tells it of commits but itself and its clients */
    _Atomic bool lost; /* nobody can connect to it any more */
    _Atomic bool unreached; /* nobody can connect to it now */
    _Atomic bool undialled; /* with that: who tries has no descriptor for it */
    _Atomic int searched; /* how often somebody has tried that */
    _Atomic bool flaky; /* each connection to it breaks after a while */
    _Atomic bool is_far; /* each request to it takes FAR_US longer */
    _Atomic bool is_relayed; /* or late_us; both are looked at when somebody connects to it */
    _Atomic unsigned *late_us; /* relays look at it, which end when they notice, and outlive the cluster */
    _Atomic int repairs_asked;
    _Atomic bool hold_files; /* the test itself reads ranges of files */
    _Atomic int file_error; /* not 0: no range of a file can be read */
    _Atomic int durables_asked, durable_error; /* of layers that were made whole; and what is answered */
    _Atomic bool hold_durable; /* nothing is */
};
/* What is said of a region, at each version. */
struct known_repair {
    uint64_t region;
    struct pc_repair_member members[8];
    size_t n;
    int is_mirror;
};
struct pulled {
    uint64_t commit_id;
    int error;
};
struct cluster {
    int n;
    struct registry *registry;
    struct pulled pulled[64]; /* the last ones */
    unsigned n_pulled;
    struct server servers[MAX_SERVERS];
    pthread_mutex_t lock;
    pthread_mutex_t serving; /* held while a connection is given to an engine, or one ends */
    struct known_region regions[MAX_REGIONS];
    int n_regions;
    struct known_repair repairs[8]; /* region 0: free; under lock */
    struct pc_event task_ended; /* the last one; under lock */
};

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static inline void tcp_pair(int fds[2])
{
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    CHECK(!bind(listener, (struct sockaddr *)&address, bytes) && !listen(listener, 1) &&
          !getsockname(listener, (struct sockaddr *)&address, &bytes));
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(!connect(fds[0], (struct sockaddr *)&address, bytes));
    fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fds[1] >= 0);
    close(listener);
}

#define FAR_US 3000u
#define FLAKY_BYTES 300000u

/* Between two servers. */
struct relay {
    int fds[2];       /* [0] asks, [1] answers */
    size_t left;      /* bytes, until it breaks */
    bool is_late;
    const _Atomic unsigned *late_us; /* with that: how long a request takes longer; answers come in many
                                        pieces, and do not wait */
};
static inline void *relay_run(void *arg)
{
    struct relay *relay = arg;
    char buffer[65536];
    struct pollfd polls[2] = {{relay->fds[0], POLLIN, 0}, {relay->fds[1], POLLIN, 0}};
    while (relay->left && poll(polls, 2, relay->is_late ? -1 : 5000) > 0) {
        int from = polls[0].revents ? 0 : 1;
        ssize_t got = read(relay->fds[from], buffer,
                           sizeof buffer < relay->left ? sizeof buffer : relay->left);
        if (got > 0 && from == 0 && relay->is_late)
            usleep(*relay->late_us);
        if (got <= 0 || send(relay->fds[1 - from], buffer, (size_t)got, MSG_NOSIGNAL) != got)
            break;
        relay->left -= (size_t)got;
    }
    close(relay->fds[0]);
    close(relay->fds[1]);
    free(relay);
    return NULL;
}

/* To a server in another process, which may be dead at the moment. */
static inline void connect_far(struct cluster *cluster, struct server *from, uint64_t to_id)
{
    uint64_t until = now_ns() + 8 * SECOND;
    for (int lane = 0; lane < pc_engine_peer_lanes(from->engine); lane++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr_in address = {
            .sin_family = AF_INET,
            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
            .sin_port = (in_port_t)cluster->registry->ports[to_id - 0x1000]};
        while (connect(fd, (struct sockaddr *)&address, sizeof address)) {
            close(fd);
            if (now_ns() > until) {
                OK(pc_engine_peer_lost(from->engine, to_id, PC_ERR_HOME_LOST));
                return;
            }
            usleep(2000);
            address.sin_port = (in_port_t)cluster->registry->ports[to_id - 0x1000];
            fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        }
        if (cluster->registry->introduced &&
            send(fd, &from->id, sizeof from->id, MSG_NOSIGNAL) < 0)
            perror("introducing a server"); /* the other side is gone again: it will be noticed */
        OK(pc_engine_add_peer(from->engine, to_id, lane, fd));
    }
}

static inline void connect_servers(struct cluster *cluster, struct server *from, uint64_t to_id)
{
    /* Other ids are of tests that speak the protocol themselves: nobody can connect to those. */
    if (to_id - 0x1000 < MAX_PORTS && cluster->registry->ports[to_id - 0x1000]) {
        connect_far(cluster, from, to_id);
        return;
    }
    struct server *to = NULL;
    for (int i = 0; i < cluster->n; i++)
        if (cluster->servers[i].id == to_id)
            to = &cluster->servers[i];
    if (!to || to->lost) {
        OK(pc_engine_peer_lost(from->engine, to_id, PC_ERR_HOME_LOST));
        return;
    }
    if (to->unreached) {
        to->searched++;
        usleep(50000);
        OK(pc_engine_peer_unreached(from->engine, to_id, 7 * SECOND, "connect: it is stopped"));
        OK(pc_engine_peer_lost(from->engine, to_id,
                               to->undialled ? PC_ERR_DESCRIPTORS : PC_ERR_TIMEOUT));
        return;
    }
    for (int lane = 0; lane < pc_engine_peer_lanes(from->engine); lane++) {
        int fds[2];
        tcp_pair(fds);
        if (to->is_far)
            *to->late_us = FAR_US;
        if (to->flaky || to->is_far || to->is_relayed) {
            struct relay *relay = malloc(sizeof *relay);
            int more[2];
            tcp_pair(more);
            *relay = (struct relay){.fds = {fds[1], more[0]},
                                    .left = to->flaky ? FLAKY_BYTES : SIZE_MAX,
                                    .is_late = to->is_far || to->is_relayed,
                                    .late_us = to->late_us};
            fds[1] = more[1];
            pthread_t thread;
            CHECK(!pthread_create(&thread, NULL, relay_run, relay));
            pthread_detach(thread);
        }
        pthread_mutex_lock(&cluster->serving);
        if (to->engine)
            OK(pc_engine_serve(to->engine, from->id, fds[1]));
        else
            close(fds[1]);
        pthread_mutex_unlock(&cluster->serving);
        OK(pc_engine_add_peer(from->engine, to_id, lane, fds[0]));
    }
}

static inline void answer_changes(struct cluster *cluster, struct server *server,
                                  const struct pc_event *event)
{
    struct pc_run *runs;
    size_t n;
    server->changes_asked++;
    int rc = registry_changes(cluster->registry, event->region, event->from_version,
                              event->version, &runs, &n);
    (void)pc_engine_set_changes(server->engine, event->region, event->from_version,
                                event->version, runs, n, rc);
    free(runs);
}

/* As it is at the time of the question, also where the answer is held up. */
static inline void answer_published(struct cluster *cluster, struct server *server,
                                    const struct pc_event *event)
{
    struct registry *r = cluster->registry;
    registry_lock(r);
    size_t n = r->n_commits;
    registry_unlock(r);
    server->published_asked++;
    while (server->hold_published)
        usleep(1000);
    for (size_t i = 0; i < n; i++)
        if (r->log[i].region == event->region && r->log[i].version > event->from_version)
            (void)pc_engine_publish(server->engine, event->region, r->log[i].version,
                                    r->log[i].id);
    (void)pc_engine_caught_up(server->engine, event->region, PC_OK);
}

static inline void answer_outcome(struct cluster *cluster, struct server *server,
                                  const struct pc_event *event)
{
    uint64_t version = registry_outcome(cluster->registry, event->commit_id, event->region);
    server->outcomes_asked++;
    if (version)
        (void)pc_engine_publish(server->engine, event->region, version, event->commit_id);
    else
        (void)pc_engine_drop_staged(server->engine, event->region, event->commit_id);
}

static inline void note_pulled(struct cluster *cluster, const struct pc_event *event)
{
    pthread_mutex_lock(&cluster->lock);
    cluster->pulled[cluster->n_pulled++ % 64] =
        (struct pulled){event->commit_id, event->error};
    pthread_mutex_unlock(&cluster->lock);
}

/* Whether a server that was taken for a region's home is lost, or has nothing of it, as it says itself. */
static inline bool is_no_home(struct cluster *cluster, uint64_t id, uint64_t region)
{
    if (id - 0x1000 < MAX_PORTS && cluster->registry->ports[id - 0x1000])
        return false; /* in another process */
    bool is_none = true;
    for (int i = 0; i < cluster->n; i++) {
        struct server *server = &cluster->servers[i];
        if (server->id != id || server->lost)
            continue;
        pthread_mutex_lock(&cluster->serving);
        is_none = server->engine != NULL; /* else it comes again */
        struct pc_region_stats *all = calloc(MAX_REGIONS, sizeof *all);
        int64_t n = is_none ? pc_engine_region_stats(server->engine, all, MAX_REGIONS) : 0;
        for (int64_t k = 0; k < n && k < MAX_REGIONS; k++)
            is_none &= all[k].region != region || !all[k].is_home;
        free(all);
        pthread_mutex_unlock(&cluster->serving);
    }
    return is_none;
}

/* Whoever is said to be the home by now; nobody else becomes it by himself. */
static inline void answer_home(struct cluster *cluster, struct server *server,
                               const struct pc_event *event)
{
    struct known_region found = {0};
    server->homes_asked++;
    if (server->hold_home)
        return;
    pthread_mutex_lock(&cluster->lock);
    for (int i = 0; i < cluster->n_regions; i++)
        if (cluster->regions[i].info.region == event->region)
            found = cluster->regions[i];
    pthread_mutex_unlock(&cluster->lock);
    if (!found.home ||
        (found.home == event->server_id && is_no_home(cluster, found.home, event->region))) {
        int rc = pc_engine_home_lost(server->engine, event->region, event->server_id,
                                     PC_ERR_HOME_LOST);
        CHECK(rc == PC_OK || rc == PC_ERR_NO_REGION); /* freed meanwhile, and so is who waits */
        return;
    }
    size_t n = (found.info.length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
    uint64_t *homes = malloc(n * sizeof *homes);
    for (size_t i = 0; i < n; i++)
        homes[i] = found.home;
    int rc = pc_engine_set_homes_of(server->engine, event->region, found.info.term, homes, n);
    CHECK(rc == PC_OK || rc == PC_ERR_NO_REGION);
    free(homes);
}

static inline void answer_repair(struct cluster *cluster, struct server *server,
                                 const struct pc_event *event)
{
    struct known_repair found = {0};
    pthread_mutex_lock(&cluster->lock);
    for (size_t i = 0; i < sizeof cluster->repairs / sizeof cluster->repairs[0]; i++)
        if (cluster->repairs[i].region == event->region)
            found = cluster->repairs[i];
    pthread_mutex_unlock(&cluster->lock);
    server->repairs_asked++;
    int rc = pc_engine_set_repair(server->engine, event->region, event->version, found.members,
                                  found.n, found.is_mirror);
    CHECK(rc == PC_OK || rc == PC_ERR_NO_REGION); /* freed meanwhile */
}

static inline void fill_pattern(uint64_t *out, uint64_t region, uint64_t offset, uint64_t bytes);

/* A file's region has the pattern in it. In two parts, as a reader of files may. */
static inline bool read_a_file(struct server *server)
{
    struct pc_file_read read;
    if (!pc_engine_file_next(server->engine, 0, &read))
        return false;
    CHECK(read.n_blocks && read.n_blocks <= PC_FILE_READ_BLOCKS);
    const int error = server->file_error;
    uint64_t *bytes = malloc(read.n_blocks << 12);
    fill_pattern(bytes, read.region, read.first_block << 12, read.n_blocks << 12);
    const uint64_t half = read.n_blocks / 2 << 12;
    int rc = error ? PC_OK : pc_engine_file_fill(server->engine, read.id, bytes, half);
    if (!rc && !error)
        rc = pc_engine_file_fill(server->engine, read.id, (char *)bytes + half,
                                 (read.n_blocks << 12) - half);
    free(bytes);
    CHECK(rc == PC_OK || rc == PC_ERR_NO_REGION); /* given up */
    rc = pc_engine_file_end(server->engine, read.id, error, error ? "the test says so" : "");
    CHECK(rc == PC_OK || rc == PC_ERR_NO_REGION);
    return true;
}

static inline void *play_python(void *arg)
{
    struct cluster *cluster = ((void **)arg)[0];
    struct server *server = ((void **)arg)[1];
    free(arg);
    struct pollfd polls[2] = {{pc_engine_event_fd(server->engine), POLLIN, 0},
                              {server->stop[0], POLLIN, 0}};
    for (;;) {
        poll(polls, 2, -1);
        if (polls[1].revents)
            return NULL;
        struct pc_event event;
        while (pc_engine_next_event(server->engine, &event)) {
            struct known_region found = {0};
            switch (event.kind) {
            case PC_EVENT_NEED_PEER:
                connect_servers(cluster, server, event.server_id);
                break;
            case PC_EVENT_NEED_REGION:
                pthread_mutex_lock(&cluster->lock);
                for (int i = 0; i < cluster->n_regions; i++)
                    if (cluster->regions[i].info.region == event.region)
                        found = cluster->regions[i];
                pthread_mutex_unlock(&cluster->lock);
                if (found.home) {
                    size_t n = (found.info.length_bytes + PC_EXTENT_BYTES - 1) / PC_EXTENT_BYTES;
                    uint64_t *homes = malloc(n * sizeof *homes);
                    for (size_t i = 0; i < n; i++)
                        homes[i] = found.home;
                    int rc = pc_engine_define_region(server->engine, &found.info, homes, n);
                    CHECK(rc == PC_OK || rc == PC_ERR_HOME_LOST); /* the tests say what became of it */
                    server->regions_lacking += rc == PC_ERR_HOME_LOST;
                    free(homes);
                } else {
                    (void)pc_engine_refuse_region(server->engine, event.region, PC_ERR_NO_REGION);
                }
                break;
            case PC_EVENT_REGION_IDLE:
                server->idle_events++;
                break;
            case PC_EVENT_LOG:
                if (getenv("SAY_LOG"))
                    fprintf(stderr, "log of %llx: %s (%d)\n", (unsigned long long)server->id,
                            event.text, event.error);
                server->log_events++;
                break;
            case PC_EVENT_THRASHING:
                CHECK(strlen(event.text) > 0);
                server->thrashing_events++;
                break;
            case PC_EVENT_NEED_CHANGES:
                answer_changes(cluster, server, &event);
                break;
            case PC_EVENT_NEED_PUBLISHED:
                answer_published(cluster, server, &event);
                break;
            case PC_EVENT_NEED_OUTCOME:
                answer_outcome(cluster, server, &event);
                break;
            case PC_EVENT_NEED_SETTLED:
                server->settled_asked++;
                OK(pc_engine_settled(server->engine, event.region,
                                     server->hold_settled
                                         ? 0
                                         : registry_latest(cluster->registry, event.region)));
                break;
            case PC_EVENT_NEED_HOME:
                answer_home(cluster, server, &event);
                break;
            case PC_EVENT_NEED_REPAIR:
                answer_repair(cluster, server, &event);
                break;
            case PC_EVENT_NEED_FILE:
                while (!server->hold_files && read_a_file(server))
                    ;
                break;
            case PC_EVENT_NEED_DURABLE:
                server->durables_asked++;
                if (!server->hold_durable)
                    OK(pc_engine_layer_durable(server->engine, event.region, event.commit_id,
                                               server->durable_error));
                break;
            case PC_EVENT_KEEPER_LOST: /* the tests that end one look at this */
                server->keepers_lost++;
                break;
            case PC_EVENT_TASK_ENDED:
                pthread_mutex_lock(&cluster->lock);
                cluster->task_ended = event;
                pthread_mutex_unlock(&cluster->lock);
                break;
            case PC_EVENT_PULLED:
                note_pulled(cluster, &event);
                break;
            default:
                FAIL("an event of an unknown kind");
            }
        }
    }
}

/* What servers that are started from now on are told. */
static int no_userfaultfd;
static bool no_disk_directory;
static pid_t named_after; /* not 0: instead of this process */
static struct pc_engine_options told = {.fetch_timeout_ns = 3 * SECOND,
                                        .fault_timeout_ns = 6 * SECOND,
                                        .history_bytes = 256u << 20};

static inline void server_start(struct cluster *cluster, int i, const char *tag, int keeper_fd)
{
    struct server *server = &cluster->servers[i];
    if (!server->id) /* one that is started again has it, and is named by others meanwhile */
        server->id = 0x1000u + (uint64_t)i;
    snprintf(server->name, sizeof server->name, "clamor-test-%d-%s-%d",
             (int)(named_after ? named_after : getpid()), tag, i);
    struct pc_engine_options options = told;
    options.socket_name = server->name;
    options.disk_directory = no_disk_directory ? NULL : DISK_DIRECTORY;
    options.library_version = "test";
    options.server_id = server->id;
    options.keeper_fd = keeper_fd;
    options.no_userfaultfd = no_userfaultfd;
    options.n_loops = 2;
    pc_engine *engine;
    OK(pc_engine_start(&options, &engine));
    pthread_mutex_lock(&cluster->serving);
    server->engine = engine;
    pthread_mutex_unlock(&cluster->serving);
    CHECK(!pipe2(server->stop, O_CLOEXEC));
    void **args = malloc(2 * sizeof *args);
    args[0] = cluster;
    args[1] = server;
    CHECK(!pthread_create(&server->thread, NULL, play_python, args));
}

static inline pc_engine *server_let_go(struct cluster *cluster, int i)
{
    struct server *server = &cluster->servers[i];
    CHECK(write(server->stop[1], "x", 1) == 1);
    pthread_join(server->thread, NULL);
    pthread_mutex_lock(&cluster->serving);
    pc_engine *engine = server->engine;
    server->engine = NULL;
    pthread_mutex_unlock(&cluster->serving);
    const char *broken = pc__engine_audit(engine);
    if (broken)
        FAIL(broken);
    close(server->stop[0]);
    close(server->stop[1]);
    return engine;
}

static inline void server_stop(struct cluster *cluster, int i)
{
    OK(pc_engine_stop(server_let_go(cluster, i)));
}

static _Atomic unsigned late_us_of[MAX_SERVERS];

static inline struct cluster *cluster_new(int n)
{
    struct cluster *cluster = calloc(1, sizeof *cluster);
    for (int i = 0; i < MAX_SERVERS; i++) {
        late_us_of[i] = 0;
        cluster->servers[i].late_us = &late_us_of[i];
    }
    pthread_mutex_init(&cluster->lock, NULL);
    pthread_mutex_init(&cluster->serving, NULL);
    cluster->n = n;
    cluster->registry = registry_new();
    return cluster;
}

static inline struct cluster *cluster_start(int n, const char *tag)
{
    struct cluster *cluster = cluster_new(n);
    for (int i = 0; i < n; i++)
        server_start(cluster, i, tag, -1);
    return cluster;
}

static inline void cluster_stop(struct cluster *cluster)
{
    for (int i = 0; i < cluster->n; i++)
        if (cluster->servers[i].engine)
            server_stop(cluster, i);
    registry_free(cluster->registry);
    free(cluster);
}

static inline struct pc_engine_stats stats_of(struct server *server)
{
    struct pc_engine_stats stats;
    OK(pc_engine_get_stats(server->engine, &stats));
    return stats;
}

static uint64_t reattach_ns = 5 * SECOND; /* of clients that attach from now on */

static inline pc_client *attach(struct server *server, int trap)
{
    const struct pc_client_options options = {.socket_name = server->name,
                                              .library_version = "test",
                                              .trap = trap,
                                              .connect_timeout_ns = 5 * SECOND,
                                              .reattach_timeout_ns = reattach_ns};
    pc_client *client = NULL;
    OK(pc_client_open(&options, &client));
    return client;
}

/* The value of the 8 bytes at offset, everywhere in the tests. */
static inline uint64_t pattern(uint64_t region, uint64_t offset)
{
    uint64_t x = (offset >> 3) * 0x9e3779b97f4a7c15ull + region * 0x2545f4914f6cdd1dull;
    return x ^ x >> 29;
}
static inline void fill_pattern(uint64_t *out, uint64_t region, uint64_t offset, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 8)
        out[i / 8] = pattern(region, offset + i);
}

static inline void publish(struct cluster *cluster, struct pc_region_info info, uint64_t home)
{
    pthread_mutex_lock(&cluster->lock);
    CHECK(cluster->n_regions < MAX_REGIONS);
    cluster->regions[cluster->n_regions++] = (struct known_region){info, home};
    pthread_mutex_unlock(&cluster->lock);
}

/* Builds region `id` at the home of `client`; [data_from, length) is filled, the rest are holes. */
static inline struct pc_region_info build(struct cluster *cluster, struct server *home,
                                          pc_client *client, uint64_t id, uint64_t length,
                                          uint64_t data_from)
{
    struct pc_region_info info = {.region = id,
                                  .base_address = PC_WINDOW_BEGIN + (id << 28),
                                  .length_bytes = length,
                                  .medium = MEDIUM};
    int fd = -1;
    OK(pc_client_create(client, id, info.base_address, length, MEDIUM, 30 * SECOND, &fd));
    uint64_t bytes = length - data_from;
    uint64_t *data = malloc(bytes);
    fill_pattern(data, id, data_from, bytes);
    OK(pc_copy_in(fd, data_from, data, bytes, 2));
    free(data);
    close(fd);
    OK(pc_client_seal(client, id, 30 * SECOND));
    publish(cluster, info, home->id);
    return info;
}

static inline uint64_t at(const struct pc_mapping *m, uint64_t offset)
{
    return *(volatile const uint64_t *)(uintptr_t)(m->address + offset);
}

/* Each test runs in a child of its own, so that a crash or a hang is one failure. */
static inline int run_test(const char *name, void (*test)(int), int argument, unsigned seconds)
{
    fflush(NULL);
    struct rusage used;
    const uint64_t began = now_ns();
    pid_t child = fork();
    if (!child) {
        alarm(seconds);
        test(argument);
        exit(0);
    }
    int status = 0;
    CHECK(wait4(child, &status, 0, &used) == child);
    bool passed = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
        printf("skip %s/%d\n", name, argument);
        return 0;
    }
    printf("%s %s/%d (%lu ms, %lu of them computing)", passed ? "ok  " : "FAIL", name, argument,
           (unsigned long)((now_ns() - began) / 1000000), computed_ms(&used));
    if (!passed)
        printf(" (%s %d)", WIFSIGNALED(status) ? "signal" : "exit",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    printf("\n");
    return !passed;
}

#endif
