/* test_region_state.c - which steps a region's state takes, and that what cannot be is seen. */
#include "tests/support/harness.h"

#include "engine/core/core.h"

#define BLOCKS 8u

static struct pc__region *make(enum pc__region_state state, uint64_t *homes)
{
    struct pc__region *region = pc__region_alone(7, BLOCKS);
    CHECK(region);
    region->state = state;
    region->homes = homes;
    return region;
}

static void drop(struct pc__region *region)
{
    pthread_mutex_destroy(&region->lock);
    free(region);
}

static void test_steps(int unused)
{
    (void)unused;
    static const struct {
        enum pc__region_step step;
        enum pc__region_state from, to;
    } all[] = {{PC__REGION_CREATE, PC__REGION_UNKNOWN, PC__REGION_CREATING},
               {PC__REGION_GIVE_UP, PC__REGION_CREATING, PC__REGION_UNKNOWN},
               {PC__REGION_GIVE_UP, PC__REGION_RETIRED, PC__REGION_RETIRED}, /* freed meanwhile */
               {PC__REGION_DEFINE, PC__REGION_UNKNOWN, PC__REGION_READY},
               {PC__REGION_SEAL, PC__REGION_CREATING, PC__REGION_READY},
               {PC__REGION_RETIRE, PC__REGION_UNKNOWN, PC__REGION_RETIRED},
               {PC__REGION_RETIRE, PC__REGION_CREATING, PC__REGION_RETIRED},
               {PC__REGION_RETIRE, PC__REGION_READY, PC__REGION_RETIRED},
               {PC__REGION_RETIRE, PC__REGION_RETIRED, PC__REGION_RETIRED}};
    const size_t n = sizeof all / sizeof all[0];
    size_t n_may = 0;
    uint64_t homes[1] = {1};
    for (int step = 0; step <= PC__REGION_RETIRE; step++)
        for (int from = 0; from <= PC__REGION_RETIRED; from++) {
            struct pc__region *region = make((enum pc__region_state)from, homes);
            n_may += pc__region_may(region, (enum pc__region_step)step);
            drop(region);
        }
    CHECK(n_may == n);
    for (size_t i = 0; i < n; i++) {
        struct pc__region *region = make(all[i].from, homes);
        CHECK(pc__region_may(region, all[i].step));
        pc__region_goes(region, all[i].step);
        CHECK(region->state == all[i].to);
        drop(region);
    }
}

static void test_what_cannot_be(int unused)
{
    (void)unused;
    uint64_t homes[1] = {1};
    struct pc__region *region = make(PC__REGION_READY, homes);
    CHECK(!pc__region_audit(region));
    region->mappings = 1;
    CHECK(pc__region_audit(region));
    region->mappings = 0;
    region->creator = 3;
    CHECK(pc__region_audit(region));
    region->creator = 0;
    region->homes = NULL;
    CHECK(pc__region_audit(region));
    region->homes = homes;
    region->length_bytes++;
    CHECK(pc__region_audit(region));
    region->length_bytes--;

    struct pc__home home = {.base = {.version = 4}, .applied = 5, .latest = 6, .history_from = 5};
    struct pc__layer first = {.version = 6}, second = {.version = 8};
    pc__link_init(&home.pending);
    region->home = &home;
    CHECK(pc__region_audit(region)); /* nothing waits for 6 */
    pc__link_push(&home.pending, &first.link);
    CHECK(!pc__region_audit(region));
    pc__link_push(&home.pending, &second.link);
    CHECK(pc__region_audit(region)); /* 7 is not there */
    second.version = home.latest = 7;
    CHECK(!pc__region_audit(region));
    home.history_from = 7;
    CHECK(pc__region_audit(region));
    home.history_from = 6;
    CHECK(!pc__region_audit(region));
    home.applied = 3;
    CHECK(pc__region_audit(region));
    region->home = NULL;
    drop(region);
}

int main(void)
{
    int failed = run_test("steps", test_steps, 0, 60);
    failed += run_test("what_cannot_be", test_what_cannot_be, 0, 60);
    return failed != 0;
}
