/* test_retain.c - versions that live collections could need outlive all others, and no longer; what
 * that costs is bounded. The history alone, with restarts and with readers; and whole engines.
 */
#include "tests/support/history_world.h"
#include "tests/support/length.h"

#include <pthread.h>
#include <stdatomic.h>

static char directory[64]; /* below build/ */
static struct kept_segments kept;
static char last_said[1000];
static size_t n_said_retained;

static void hear_last(void *arg, const char *text)
{
    hear(arg, text);
    if (strncmp(text, "variable ", 9) == 0) {
        n_said_retained++;
        snprintf(last_said, sizeof last_said, "%s", text);
    }
}

static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static void keep_locked(void *arg, int fd, uint64_t inode, uint64_t bytes, bool is_disk)
{
    pthread_mutex_lock(&kept_lock);
    keep_segment(arg, fd, inode, bytes, is_disk);
    pthread_mutex_unlock(&kept_lock);
}
static void drop_locked(void *arg, uint64_t inode)
{
    pthread_mutex_lock(&kept_lock);
    drop_segment(arg, inode);
    pthread_mutex_unlock(&kept_lock);
}

struct budget {
    const char *name;
    uint64_t memory_bytes, disk_bytes;
};
static const struct budget budgets[] = {
    {"memory", 1536 * KIB, 0},
    {"memory and disk", 256 * KIB, 1536 * KIB},
    {"a small disk", MIB, 768 * KIB},
};
#define N_BUDGETS (sizeof budgets / sizeof budgets[0])

static struct pc__history_options options_of(const struct budget *is)
{
    struct pc__history_options options =
        options_for(&kept, is->memory_bytes, is->disk_bytes, is->disk_bytes ? directory : NULL);
    options.log = hear_last;
    options.keep = keep_locked;
    options.drop = drop_locked;
    n_said_retained = 0;
    return options;
}

static void check_bounds(struct pc__history *history, const struct budget *is)
{
    const struct pc__history_stats stats = stats_of(history);
    CHECK(stats.memory_bytes <= is->memory_bytes && stats.disk_bytes <= is->disk_bytes,
          "%s: %lu in memory, %lu on disk", is->name, stats.memory_bytes, stats.disk_bytes);
    CHECK(stats.segments == kept.n, "%lu segments, %zu kept", stats.segments, kept.n);
}

static void commit(struct pc__history *history, uint64_t region, uint64_t *applied, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++, ++*applied)
        CHECK(append_pure(history, region, *applied) == PC_OK, "%s", pc_last_message());
}

/* ---------------------------------------------------------------- promises */

/* Region 1 has a few commits among very many of region 2. How late the floor is said: before, or
 * when its records already lie among the others'. */
static void test_outlives(const struct budget *is, bool is_late)
{
    const struct pc__history_options options = options_of(is);
    struct pc__history *history = open_history(&options);
    uint64_t ones = 0, twos = 0;

    if (!is_late)
        CHECK(pc__history_retain(history, 1, 3) == PC_OK, "of a region that is not known yet");
    for (int i = 0; i < 12; i++) { /* less than any budget */
        commit(history, 1, &ones, 1);
        commit(history, 2, &twos, 2);
    }
    if (is_late)
        CHECK(pc__history_retain(history, 1, 3) == PC_OK, "%s", pc_last_message());
    CHECK(stats_of(history).retained_bytes > 0, "counted");
    for (int i = 0; i < 40; i++) {
        commit(history, 2, &twos, 20);
        check_bounds(history, is);
        commit(history, 1, &ones, i % 8 == 0);
    }
    const struct pc__history_stats stats = stats_of(history);
    printf("%s%s: %lu of region 1 from %lu on, %lu of region 2 from %lu on, %lu KiB retained\n",
           is->name, is_late ? ", said late" : "", ones, pc__history_floor(history, 1, ones), twos,
           pc__history_floor(history, 2, twos), stats.retained_bytes >> 10);
    CHECK(pc__history_floor(history, 1, ones) <= 3, "%s: version %lu is the oldest", is->name,
          pc__history_floor(history, 1, ones));
    CHECK(pc__history_floor(history, 2, twos) > 300, "region 2 made room");
    CHECK(stats.retained_expired == 0 && n_said_retained == 0, "nothing that was retained went");
    check_region(history, 1, ones);
    check_region(history, 2, twos);

    /* Restarted, and said again. */
    pc__history_close(history);
    history = reopen_history(&options, &kept, 1);
    CHECK(stats_of(history).retained_bytes == 0, "nothing was said yet");
    CHECK(pc__history_retain(history, 1, 3) == PC_OK, "%s", pc_last_message());
    CHECK(stats_of(history).retained_bytes == stats.retained_bytes, "the same records");
    commit(history, 2, &twos, 400);
    check_bounds(history, is);
    CHECK(pc__history_floor(history, 1, ones) <= 3, "%s", is->name);
    check_region(history, 1, ones);

    /* A floor that rises lets go of what is below it, and of nothing else. */
    CHECK(pc__history_retain(history, 1, 10) == PC_OK, "%s", pc_last_message());
    CHECK(stats_of(history).retained_bytes < stats.retained_bytes, "fewer are");
    CHECK(pc__history_floor(history, 1, ones) <= 3, "it goes with the next pressure");
    commit(history, 2, &twos, 400);
    CHECK(pc__history_floor(history, 1, ones) == 10, "%s: version %lu is the oldest", is->name,
          pc__history_floor(history, 1, ones));
    check_region(history, 1, ones);

    /* Nobody needs any. */
    CHECK(pc__history_retain(history, 1, UINT64_MAX) == PC_OK, "%s", pc_last_message());
    CHECK(stats_of(history).retained_bytes == 0, "none");
    commit(history, 2, &twos, 400);
    CHECK(pc__history_floor(history, 1, ones) == ones, "all of it is gone");
    CHECK(stats_of(history).retained_expired == 0 && n_said_retained == 0, "not as retained ones");
    check_region(history, 2, twos);
    CHECK(pc__history_floor(history, 2, twos) + 3 < twos, "the budget is region 2's");
    pc__history_close(history);
    drop_all_kept(&kept);
}

/* Everything is retained: the oldest go, and that is said. */
static void test_all_retained(const struct budget *is)
{
    const struct pc__history_options options = options_of(is);
    struct pc__history *history = open_history(&options);
    uint64_t applied[2] = {0};

    for (uint64_t r = 0; r < 2; r++)
        CHECK(pc__history_retain(history, r + 5, 0) == PC_OK, "%s", pc_last_message());
    for (uint64_t i = 0; i < 500; i++) {
        commit(history, 5 + i % 2, &applied[i % 2], 1);
        check_bounds(history, is);
    }
    const struct pc__history_stats stats = stats_of(history);
    CHECK(stats.retained_expired > 100 && stats.retained_expired == stats.expired, "%lu of %lu",
          stats.retained_expired, stats.expired);
    CHECK(stats.retained_expired + stats.records == 500, "%lu", stats.records);
    CHECK(n_said_retained == 2, "once for each floor: %zu", n_said_retained);
    CHECK(strstr(last_said, "variable 5") || strstr(last_said, "variable 6"), "%s", last_said);
    CHECK(strstr(last_said, "versions 0 to "), "%s", last_said);
    CHECK(stats.retained_bytes * 2 > is->memory_bytes + is->disk_bytes, "%lu", stats.retained_bytes);
    for (uint64_t r = 0; r < 2; r++) {
        CHECK(pc__history_floor(history, r + 5, applied[r]) + 5 < applied[r], "the newest are there");
        check_region(history, r + 5, applied[r]);
    }
    pc__history_forget(history, 5);
    pc__history_forget(history, 6);
    CHECK(stats_of(history).retained_bytes == 0 && stats_of(history).records == 0, "forgotten");
    CHECK(stats_of(history).retained_expired == stats.retained_expired, "nobody could need them");
    commit(history, 5, &applied[0], 3);
    CHECK(stats_of(history).retained_bytes == 0, "a floor ends with its region");
    pc__history_close(history);
    drop_all_kept(&kept);
}

/* The number of records is a budget, too. */
static void test_few_records(void)
{
    const struct budget is = {"few records", 64 * MIB, 0};
    struct pc__history_options options = options_of(&is);
    options.max_records = 40;
    struct pc__history *history = open_history(&options);
    uint64_t ones = 0, twos = 0;

    CHECK(pc__history_retain(history, 1, 0) == PC_OK, "%s", pc_last_message());
    for (int i = 0; i < 30; i++) {
        commit(history, 1, &ones, 1);
        commit(history, 2, &twos, 2); /* a segment has three: each has one of region 1 */
        CHECK(stats_of(history).records <= 40, "%lu", stats_of(history).records);
    }
    CHECK(pc__history_floor(history, 1, ones) == 0 && stats_of(history).retained_expired == 0,
          "%lu", pc__history_floor(history, 1, ones));
    check_region(history, 1, ones);
    check_region(history, 2, twos);
    commit(history, 1, &ones, 30);
    CHECK(stats_of(history).retained_expired > 0 && stats_of(history).records <= 40, "bounded");
    CHECK(n_said_retained == 1 && strstr(last_said, "too many records"), "%s", last_said);
    check_region(history, 1, ones);
    pc__history_close(history);
    drop_all_kept(&kept);
}

/* A commit that is too large to be kept beside what is retained is not; one of a region that is
 * retained loses what was there, and says so. */
static void test_too_large(void)
{
    const struct budget all[] = {{"memory", 512 * KIB, 0}, {"disk", 256 * KIB, 640 * KIB}};
    for (size_t i = 0; i < 2; i++) {
        const struct pc__history_options options = options_of(&all[i]);
        struct pc__history *history = open_history(&options);
        const struct pc_run large[1] = {{0, i == 0 ? 110 : 140}}, huge[1] = {{0, 300}};
        struct pure_home home = {.region = 2};
        uint64_t ones = 0, twos = 0;

        CHECK(pc__history_retain(history, 1, 0) == PC_OK, "%s", pc_last_message());
        while (stats_of(history).retained_bytes < 200 * KIB)
            commit(history, 1, &ones, 1);
        commit(history, 2, &twos, 2);
        home.version = twos;
        CHECK(pc__history_append(history, 2, twos++, large, 1, read_pure, &home) == PC_OK, "%s",
              pc_last_message());
        CHECK(pc__history_floor(history, 2, twos) == twos, "%s: not in the place of region 1's",
              all[i].name);
        CHECK(pc__history_floor(history, 1, ones) == 0 &&
              stats_of(history).retained_expired == 0, "%s: %s", all[i].name, last_said);
        check_region(history, 1, ones);
        home = (struct pure_home){.region = 1, .version = ones};
        CHECK(pc__history_append(history, 1, ones++, huge, 1, read_pure, &home) == PC_OK, "%s",
              pc_last_message());
        CHECK(pc__history_floor(history, 1, ones) == ones, "it fits nowhere");
        CHECK(stats_of(history).retained_expired == ones - 1 && n_said_retained == 1, "%lu, %zu",
              stats_of(history).retained_expired, n_said_retained);
        CHECK(strstr(last_said, "variable 1: versions 0 to ") &&
              strstr(last_said, "could not be kept"), "%s", last_said);
        check_bounds(history, &all[i]);
        pc__history_close(history);
        drop_all_kept(&kept);
    }
}

/* -------------------------------------------------- random, with readers */

#define N_REGIONS 8u
static struct pc__history *shared;
static _Atomic uint64_t shared_ids[N_REGIONS], shared_applied[N_REGIONS];
static _Atomic bool is_over;
static _Atomic uint64_t n_hits;
static pthread_rwlock_t history_lock = PTHREAD_RWLOCK_INITIALIZER; /* against restarts */

static void *read_all_the_time(void *arg)
{
    for (uint64_t seed = (uint64_t)(uintptr_t)arg << 32; !atomic_load(&is_over); seed++) {
        const uint64_t r = mix(seed) % N_REGIONS, block = mix(seed + 2) % N_BLOCKS;
        uint8_t bytes[PC_BLOCK_BYTES];
        pthread_rwlock_rdlock(&history_lock);
        const uint64_t region = atomic_load(&shared_ids[r]);
        const uint64_t before = atomic_load(&shared_applied[r]);
        const uint64_t floor = pc__history_floor(shared, region, before);
        const uint64_t version = floor + mix(seed + 1) % (before - floor + 1);
        const int got = pc__history_read(shared, region, version, before, block, bytes);
        pthread_rwlock_unlock(&history_lock);
        /* No CHECK off the main thread: its counter is not atomic. */
        REQUIRE(got == 1 || got == 0 || got == PC_ERR_EXPIRED);
        REQUIRE(got != 1 || is_block(region, block, last_writer(region, version, block), bytes));
        n_hits += got == 1;
    }
    return NULL;
}

/* What was promised: versions from promised on, UINT64_MAX: nothing. */
struct owner {
    uint64_t id, applied, promised;
};

static void check_promises(const struct owner *owners, const char *name)
{
    for (size_t r = 0; r < N_REGIONS; r++) {
        const uint64_t floor = pc__history_floor(shared, owners[r].id, owners[r].applied);
        CHECK(owners[r].promised == UINT64_MAX || floor <= owners[r].promised ||
              owners[r].applied <= owners[r].promised,
              "%s: region %lu version %lu was promised; %lu is the oldest", name, owners[r].id,
              owners[r].promised, floor);
    }
}

/* Floors come, rise and go; regions are freed; the server restarts. As long as nothing that was
 * retained expired, all that was promised is there, and right. */
static void test_random(const struct budget *is, uint64_t n_steps)
{
    const struct pc__history_options options = options_of(is);
    struct owner owners[N_REGIONS];
    pthread_t reader;
    uint64_t next_id = 100, n_raised = 0, n_restarts = 0, n_expired = 0;

    shared = open_history(&options);
    for (size_t r = 0; r < N_REGIONS; r++) {
        owners[r] = (struct owner){.id = next_id++, .promised = UINT64_MAX};
        atomic_store(&shared_ids[r], owners[r].id);
        atomic_store(&shared_applied[r], 0);
    }
    atomic_store(&is_over, false);
    n_hits = 0;
    REQUIRE(pthread_create(&reader, NULL, read_all_the_time, NULL) == 0);
    for (uint64_t seed = 0; seed < n_steps; seed++) {
        const uint64_t dice = mix(seed * 5 + is->memory_bytes) % 1000, r = mix(seed * 3) % N_REGIONS;
        struct owner *owner = &owners[r];
        if (dice < 3) {
            pthread_rwlock_wrlock(&history_lock);
            n_expired += stats_of(shared).expired;
            pc__history_close(shared);
            shared = reopen_history(&options, &kept, mix(seed));
            for (uint64_t id = 100; id < next_id; id++) {
                bool is_known = false;
                for (size_t k = 0; k < N_REGIONS; k++)
                    is_known |= owners[k].id == id;
                if (!is_known)
                    pc__history_forget(shared, id);
            }
            for (size_t k = 0; k < N_REGIONS; k++)
                CHECK(pc__history_retain(shared, owners[k].id, owners[k].promised) == PC_OK, "%s",
                      pc_last_message());
            pthread_rwlock_unlock(&history_lock);
            n_restarts++;
        } else if (dice < 6) {
            pthread_rwlock_wrlock(&history_lock);
            pc__history_forget(shared, owner->id);
            *owner = (struct owner){.id = next_id++, .promised = UINT64_MAX};
            atomic_store(&shared_ids[r], owner->id);
            atomic_store(&shared_applied[r], 0);
            pthread_rwlock_unlock(&history_lock);
        } else if (dice < 60) { /* at most the three last versions, so that they all fit */
            const uint64_t floor = pc__history_floor(shared, owner->id, owner->applied);
            const uint64_t wish = owner->applied - (owner->applied < 3 ? 0 : mix(seed) % 3);
            owner->promised = r % 2 == 0 ? UINT64_MAX : wish > floor ? wish : floor;
            CHECK(pc__history_retain(shared, owner->id, owner->promised) == PC_OK, "%s",
                  pc_last_message());
            n_raised++;
        } else if (r % 2 == 0 || owner->promised == UINT64_MAX ||
                   owner->applied < owner->promised + 3) {
            commit(shared, owner->id, &owner->applied, 1);
            atomic_store(&shared_applied[r], owner->applied);
        }
        check_bounds(shared, is);
        CHECK(stats_of(shared).retained_expired == 0, "%lu KiB are retained; %s",
              stats_of(shared).retained_bytes >> 10, last_said);
        check_promises(owners, is->name);
        if (seed % 400 == 0)
            for (size_t k = 0; k < N_REGIONS; k++)
                check_region(shared, owners[k].id, owners[k].applied);
    }
    atomic_store(&is_over, true);
    pthread_join(reader, NULL);
    n_expired += stats_of(shared).expired;
    printf("%s: %lu floors, %lu restarts, %lu records expired, %lu blocks read meanwhile\n",
           is->name, n_raised, n_restarts, n_expired, n_hits);
    CHECK(n_expired > n_steps / 8 && n_restarts > 0 && n_hits > 100, "too little to say anything");
    for (size_t k = 0; k < N_REGIONS; k++)
        check_region(shared, owners[k].id, owners[k].applied);
    pc__history_close(shared);
    drop_all_kept(&kept);
}

int main(void)
{
    snprintf(directory, sizeof directory, "build/retain-%d", (int)getpid());
    REQUIRE(mkdir(directory, 0700) == 0);
    const size_t n_before = count_descriptors();
    for (size_t i = 0; i < N_BUDGETS; i++) {
        if (!hunts_races()) { /* one thread each */
            test_outlives(&budgets[i], false);
            test_outlives(&budgets[i], true);
            test_all_retained(&budgets[i]);
        }
        test_random(&budgets[i], hunts_races() ? 1200 : 4000);
    }
    if (!hunts_races()) {
        test_few_records();
        test_too_large();
    }
    CHECK(count_descriptors() == n_before, "%zu descriptors, %zu before", count_descriptors(),
          n_before);
    CHECK(rmdir(directory) == 0, "nothing is left in it: %s", strerror(errno));
    return test_result();
}
