/* test_small_regions.c - what many small regions cost the heap, where they lie and where they are
 * read, and that it is given back. All servers and clients are in this process: it counts all. */
#include "tests/support/harness.h"

#include <malloc.h>

enum { N = 1500, BLOCKS = 3, MOST_BYTES_EACH = 4096 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HEAP_IS_MALLOCS 0 /* the sanitizer's allocator answers mallinfo2 with zeros */
#else
#define HEAP_IS_MALLOCS 1
#endif

static size_t heap_bytes(void)
{
    const struct mallinfo2 now = mallinfo2();
    return now.uordblks + now.hblkhd;
}

/* Of memory that is nobody's file: the heap, as the kernel sees it. */
static size_t anonymous_bytes(void)
{
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long long kib = 0;
    CHECK(status);
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %llu kB", &kib) == 1)
            break;
    fclose(status);
    CHECK(kib);
    return (size_t)kib << 10;
}

static void free_region(struct cluster *c, uint64_t id)
{
    for (int i = 0; i < c->n; i++)
        (void)pc_engine_retire(c->servers[i].engine, id, 1);
}

static void test_many_small(int trap)
{
    struct cluster *c = cluster_start(2, "small");
    pc_client *home = attach(&c->servers[0], trap), *far = attach(&c->servers[1], trap);
    static struct pc_region_info infos[N];
    const uint64_t bytes = BLOCKS * PC_BLOCK_BYTES;
    struct pc_mapping m;
    size_t before = 0, anonymous = 0, used = 0, most = 0;
    for (uint64_t i = 0; i < N; i++) {
        if (i == 100) { /* connections, buffers and the like are there */
            before = heap_bytes();
            anonymous = anonymous_bytes();
        }
        infos[i] = build(c, &c->servers[0], home, i + 1, bytes, 0);
        OK(pc_client_map(far, i + 1, 0, infos[i].base_address, bytes, 0, 30 * SECOND, &m));
        for (uint64_t o = 0; o < bytes; o += PC_BLOCK_BYTES)
            CHECK(at(&m, o) == pattern(i + 1, o));
        OK(pc_client_unmap(far, m.id));
    }
    used = heap_bytes() - before;
    most = anonymous_bytes();
    printf("%d regions of %d blocks, at their home and at a reader: %zu bytes of heap each\n", N,
           BLOCKS, used / (N - 100));
    if (HEAP_IS_MALLOCS)
        CHECK(used / (N - 100) <= 2 * MOST_BYTES_EACH); /* two servers */
    for (uint64_t i = 0; i < N; i++)
        free_region(c, i + 1);
    struct pc_engine_stats stats;
    for (int i = 0; i < 2; i++) {
        uint64_t until = now_ns() + 20 * SECOND;
        do {
            CHECK(now_ns() < until);
            usleep(1000); /* the last replies let go of them in other threads */
            OK(pc_engine_get_stats(c->servers[i].engine, &stats));
        } while (stats.regions);
    }
    printf("anonymous memory: %zu KiB before, %zu KiB with all, %zu KiB after\n", anonymous >> 10,
           most >> 10, anonymous_bytes() >> 10);
    if (HEAP_IS_MALLOCS) {
        CHECK(heap_bytes() < before + used / 8);
        CHECK(anonymous_bytes() < anonymous + (most - anonymous) / 2 + (1u << 20));
    }
    pc_client_close(far);
    pc_client_close(home);
    cluster_stop(c);
}

int main(void)
{
    return run_test("many_small", test_many_small, PC_TRAP_AUTO, 200) != 0;
}
