/* ring_lab.h - rings of threads in one process, for tests. */
#ifndef PC_TESTS_RING_LAB_H
#define PC_TESTS_RING_LAB_H

#include "tests/support/check.h"
#include "pagecache.h"

#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_MEMBERS 9
#define S 1000000000ull
#define MS 1000000ull
#define SMALL 4096

static uint64_t random_state = 88172645463325252ull;

static inline uint64_t random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

struct lab {
    uint32_t n;
    uint32_t ranks[MAX_MEMBERS]; /* by position */
    pc_ring *rings[MAX_MEMBERS]; /* by rank */
};

static inline void pair(bool tcp, int fds[2])
{
    if (!tcp) {
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
        return;
    }
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 1) == 0);
    REQUIRE(getsockname(listener, (struct sockaddr *)&at, &length) == 0);
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(connect(fds[0], (struct sockaddr *)&at, sizeof at) == 0);
    fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    REQUIRE(fds[1] >= 0);
    close(listener);
}

/* Both ends of all connections, by position. */
struct wires {
    int next[MAX_MEMBERS][4];
    int previous[MAX_MEMBERS][4];
    int between[MAX_MEMBERS][MAX_MEMBERS];
};

static inline void wires_make(struct wires *wires, uint32_t n, uint32_t n_lanes, bool tcp)
{
    memset(wires, 0xff, sizeof *wires);
    for (uint32_t i = 0; i < n && n > 1; i++) {
        for (uint32_t lane = 0; lane < n_lanes; lane++) {
            int fds[2];
            pair(tcp, fds);
            wires->next[i][lane] = fds[0];
            wires->previous[(i + 1) % n][lane] = fds[1];
        }
        uint32_t partners[PC_RING_PARTNERS];
        int n_partners = pc_ring_partners(i, n, partners);
        REQUIRE(n_partners > 0);
        for (int p = 0; p < n_partners; p++)
            if (partners[p] > i) {
                int fds[2];
                pair(tcp, fds);
                wires->between[i][partners[p]] = fds[0];
                wires->between[partners[p]][i] = fds[1];
            }
    }
}

static inline void wires_close(const struct wires *wires, uint32_t position)
{
    for (uint32_t i = 0; i < 4; i++) {
        close(wires->next[position][i]);
        close(wires->previous[position][i]);
    }
    for (uint32_t i = 0; i < MAX_MEMBERS; i++)
        close(wires->between[position][i]);
}

static inline pc_ring *wires_open(const struct wires *wires, const uint32_t *ranks, uint32_t position,
                                  uint32_t n, uint32_t n_lanes)
{
    uint32_t partners[PC_RING_PARTNERS];
    int fds[PC_RING_PARTNERS], n_partners = pc_ring_partners(position, n, partners);
    for (int p = 0; p < n_partners; p++)
        fds[p] = wires->between[position][partners[p]];
    struct pc_ring_options options = {.position = position,
                                      .n_members = n,
                                      .ranks = ranks,
                                      .n_lanes = n_lanes,
                                      .small_bytes = SMALL,
                                      .next_fds = n > 1 ? wires->next[position] : NULL,
                                      .previous_fds = n > 1 ? wires->previous[position] : NULL,
                                      .n_partner_fds = (uint32_t)n_partners,
                                      .partner_fds = fds};
    pc_ring *ring = NULL;
    REQUIRE(pc_ring_open(&options, &ring) == 0);
    return ring;
}

static inline void lab_make(struct lab *lab, uint32_t n, uint32_t n_lanes, bool tcp)
{
    struct wires wires;
    wires_make(&wires, n, n_lanes, tcp);
    lab->n = n;
    uint32_t turn = (uint32_t)(random_next() % n), *ranks = lab->ranks;
    for (uint32_t i = 0; i < n; i++)
        ranks[i] = n == 5 || turn % 2 ? (i + turn) % n : n - 1 - i;
    for (uint32_t i = 0; i < n; i++)
        lab->rings[ranks[i]] = wires_open(&wires, ranks, i, n, n_lanes);
}

static inline void lab_end(struct lab *lab)
{
    for (uint32_t i = 0; i < lab->n; i++)
        if (lab->rings[i])
            pc_ring_close(lab->rings[i]);
}

struct member {
    pc_ring *ring;
    struct pc_ring_call call;
    void *in;
    void *out;
    uint64_t n_elements;
    uint64_t timeout_ns;
    uint64_t later_ns;
    int rc;
    struct pc_ring_fault fault;
    char message[256];
    pthread_t thread;
};

static inline void pause_ns(uint64_t ns)
{
    struct timespec time = {(time_t)(ns / S), (long)(ns % S)};
    nanosleep(&time, NULL);
}

static inline void *member_main(void *arg)
{
    struct member *member = arg;
    if (member->later_ns)
        pause_ns(member->later_ns);
    member->rc = pc_ring_run(member->ring, &member->call, member->in, member->out,
                             member->n_elements, member->timeout_ns);
    snprintf(member->message, sizeof member->message, "%s", pc_last_message());
    pc_ring_fault(member->ring, &member->fault);
    return NULL;
}

static inline void all_run(struct member *members, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        REQUIRE(pthread_create(&members[i].thread, NULL, member_main, &members[i]) == 0);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(members[i].thread, NULL);
}

#endif
