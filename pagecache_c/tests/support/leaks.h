/* leaks.h - what a test that starts and stops whole servers must leave as it was. */
#ifndef PC_TEST_LEAKS_H
#define PC_TEST_LEAKS_H

#include "tests/support/commit.h"

struct process_counts {
    int descriptors, threads;
};

static inline void *tell_id(void *arg)
{
    *(pid_t *)arg = gettid();
    return NULL;
}

static inline bool is_listed(pid_t thread)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d", (int)thread);
    return access(path, F_OK) == 0;
}

static inline struct process_counts process_counts(void)
{
    pthread_t thread; /* with the first one, sanitizers start one of their own */
    pid_t id = 0;
    CHECK(!pthread_create(&thread, NULL, tell_id, &id));
    pthread_join(thread, NULL);
    SOON(!is_listed(id)); /* one that was joined is for a moment more: it must not be counted */
    return (struct process_counts){.descriptors = open_descriptors(), .threads = threads_now()};
}

/* Mappings of the address window, and of memfds anywhere: of regions, generations and layers. */
static inline int region_mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    char line[512];
    int n = 0;
    while (fgets(line, sizeof line, maps)) {
        uint64_t begin = strtoull(line, NULL, 16);
        n += (begin >= PC_WINDOW_BEGIN && begin < PC_WINDOW_END) ||
             strstr(line, "/memfd:");
    }
    fclose(maps);
    return n;
}

static inline void check_process_counts(const struct process_counts *before)
{
    SOON(threads_now() == before->threads);
    SOON(open_descriptors() == before->descriptors); /* and one that is detached closes its own */
    CHECK(region_mappings() == 0);
}

/* Nothing is under way any more; then the servers stop, and leave the process as it was. */
static inline void cluster_end(struct cluster *c, const struct process_counts *before)
{
    for (int i = 0; i < c->n; i++) {
        if (!c->servers[i].engine)
            continue;
        SOON(stats_of(&c->servers[i]).fetches_in_flight == 0);
        SOON(stats_of(&c->servers[i]).faults_waiting == 0);
    }
    cluster_stop(c);
    check_process_counts(before);
}

static inline void clients_close(pc_client **clients, int n) /* of those that are NULL: none */
{
    for (int i = 0; i < n; i++)
        if (clients[i])
            pc_client_close(clients[i]);
}

#endif
