/* test_gather_lost.c - the connection of a process that gathers is lost, and its page server lives: what
 * that had asked the homes for comes all the same, and into no row. Over both traps. */
#include "tests/support/connections.h"
#include "tests/support/engine_main.h"
#include "tests/support/leaks.h"

#define N(array) (sizeof(array) / sizeof(array)[0])
static bool is_row(const struct pc_rows *rows, uint64_t id, const uint64_t *out)
{
    for (uint64_t at = 0; at < rows->row_bytes; at += 8)
        if (out[at / 8] != pattern(1, rows->offset_bytes + id * rows->stride_bytes + at))
            return false;
    return true;
}

static void check_rows(const struct pc_rows *rows, const uint64_t *ids, size_t n, const uint64_t *out)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t *row = out + i * rows->row_bytes / 8;
        if (is_row(rows, ids[i], row))
            continue;
        fprintf(stderr, "row %zu, of id %llu", i, (unsigned long long)ids[i]);
        for (size_t k = 0; k < n; k++)
            if (is_row(rows, ids[k], row))
                fprintf(stderr, ", has the bytes of id %llu", (unsigned long long)ids[k]);
        fprintf(stderr, "\n");
        FAIL("wrong bytes");
    }
}

/* -------------------------------------------------- an answer that comes late */

#define DATA_BYTES (512u << 10) /* on each side of the border between two extents */
#define DATA_FROM (PC_EXTENT_BYTES - DATA_BYTES)
enum { FIRST, LAST, READER, N_SERVERS };

/* A home of the region from now on. */
static void get_it(struct server *server, const struct pc_region_info *info, const uint64_t *data)
{
    const struct pc_segment all = {DATA_FROM, 2 * DATA_BYTES, (uint64_t)(uintptr_t)data};
    int fd = -1;
    OK(pc_engine_create_shared(server->engine, info, &all, 1, &fd));
    close(fd);
    OK(pc_engine_seal(server->engine, 1));
}

/* Of one block three, of the next one, and one of the other extent. Three are so much of their block that
 * who asks again gets the block, and the row of 4 is then the first of the rows that come. */
static const struct pc_rows late_rows = {DATA_FROM, 1024, 1000};
static const uint64_t late_ids[] = {0, 1, 2, 4, DATA_BYTES / 1024};
#define ROWS_BEFORE 4 /* of the first home, as they were asked for before the loss */
#define ROWS_AFTER 1

struct late {
    pc_client *client;
    struct pc_mapping m;
    uint64_t out[N(late_ids) * 125];
};

static void *gather_late(void *arg)
{
    struct late *late = arg;
    OK(pc_client_gather(late->client, late->m.id, &late_rows, late_ids, N(late_ids), late->out, WAIT));
    return NULL;
}

/* The first home knows of the region when it is asked again; the last home only at the end. False: the
 * answer to the first question was the first to come, for the machine is busy. */
static bool answer_late(int trap)
{
    const struct process_counts counts = process_counts();
    struct cluster *c = cluster_start(N_SERVERS, "late");
    struct server *reader = &c->servers[READER];
    reader->hold_home = true;
    const struct pc_region_info info = {.region = 1, .base_address = PC_WINDOW_BEGIN + (1 << 28),
                                        .length_bytes = PC_EXTENT_BYTES + DATA_BYTES};
    uint64_t *data = malloc(2 * DATA_BYTES);
    fill_pattern(data, 1, DATA_FROM, 2 * DATA_BYTES);
    publish(c, info, c->servers[FIRST].id);
    struct late late = {.client = attach(reader, trap)};
    const uint64_t id = newest(reader), homes[] = {c->servers[FIRST].id, c->servers[LAST].id};
    late.m = map_at(late.client, &info, 0, 0);
    OK(pc_engine_set_homes(reader->engine, 1, homes, 2));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, gather_late, &late));
    SOON(reader->homes_asked > 0);
    usleep(50000); /* now what they are to give waits for the end of a pause */
    get_it(&c->servers[FIRST], &info, data);
    lose(reader, id);
    SOON(stats_of(reader).rows_fetched > 0);
    const bool was_late = stats_of(reader).rows_fetched == ROWS_AFTER;
    SOON(stats_of(reader).reattached == 1);
    SOON(stats_of(reader).rows_fetched == ROWS_BEFORE + ROWS_AFTER);
    get_it(&c->servers[LAST], &info, data);
    pthread_join(thread, NULL);
    check_rows(&late_rows, late_ids, N(late_ids), late.out);
    OK(pc_client_unmap(late.client, late.m.id));
    pc_client_close(late.client);
    SOON(stats_of(reader).fetches_in_flight == 0 && stats_of(reader).mappings == 0);
    cluster_stop(c);
    free(data);
    check_process_counts(&counts);
    return was_late;
}

static void test_late_answer(int trap)
{
    told.fault_timeout_ns = 30 * SECOND;
    for (int i = 0; !answer_late(trap); i++)
        CHECK(i < 10);
}

/* ------------------------------------------------------- lost again and again */

#define N_IDS 4000u

struct gatherer {
    pc_client *client;
    const struct pc_mapping *m;
    uint64_t seed;
    _Atomic int *ended;
};

/* In all areas, and more than once. */
static void *gather_some(void *arg)
{
    struct gatherer *g = arg;
    const struct pc_rows rows = {0, 304, 280};
    const uint64_t most = (g->m->length_bytes - rows.row_bytes) / rows.stride_bytes + 1;
    uint64_t ids[N_IDS], x = g->seed, *out = malloc(N_IDS * rows.row_bytes);
    for (unsigned round = 0; round < rounds_of(20, 100); round++) {
        for (size_t i = 0; i < N_IDS; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ids[i] = x % most;
        }
        OK(pc_client_gather(g->client, g->m->id, &rows, ids, N_IDS, out, WAIT));
        check_rows(&rows, ids, N_IDS, out);
    }
    free(out);
    (*g->ended)++;
    return NULL;
}

/* Threads of a process whose connection is lost again and again; one that is lost leaves nothing. */
static void test_again_and_again(int trap)
{
    const struct process_counts counts = process_counts();
    struct cluster *c = cluster_start(2, "again");
    struct server *home = &c->servers[0], *reader = &c->servers[1];
    pc_client *builder = attach(home, trap), *client = attach(reader, trap);
    const struct pc_region_info info = build(c, home, builder, 1, 64 * MIB, 0);
    struct pc_mapping m = map_at(client, &info, 0, 0);
    struct gatherer all[3];
    pthread_t threads[N(all)];
    _Atomic int ended = 0;
    for (size_t i = 0; i < N(all); i++) {
        all[i] = (struct gatherer){client, &m, 7 + i, &ended};
        CHECK(!pthread_create(&threads[i], NULL, gather_some, &all[i]));
    }
    for (unsigned i = 0; i < rounds_of(100, 1000) && ended < (int)N(all); i++) {
        lose(reader, 0);
        usleep(i * 7919 % 20000);
    }
    for (size_t i = 0; i < N(all); i++)
        pthread_join(threads[i], NULL);
    CHECK(stats_of(reader).reattached > 3 && stats_of(reader).rows_fetched > 0);
    OK(pc_client_unmap(client, m.id));
    pc_client_close(client);
    pc_client_close(builder);
    SOON(stats_of(reader).fetches_in_flight == 0 && stats_of(reader).mappings == 0);
    cluster_stop(c);
    check_process_counts(&counts);
}

int main(int argc, char **argv)
{
    static const struct engine_test tests[] = {
        TEST(late_answer),
        TEST(again_and_again),
    };
    return run_over_traps(tests, sizeof tests / sizeof tests[0], argc > 1 ? argv[1] : NULL) != 0;
}
