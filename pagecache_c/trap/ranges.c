/* ranges.c - the writers' half of ranges.h. Never called from a signal handler. */
#include "trap/ranges.h"

#include "common/error.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

_Atomic(struct pc__range_table *) pc__range_current;
_Atomic uint32_t pc__range_readers;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* everything below, and all writes */
static struct pc__range_table *retired;

/* The addresses are there already. */
static void put_contents(struct pc__range *to, const struct pc__range_view *from)
{
    pc__publish(&to->region, from->region);
    pc__publish(&to->version, from->version);
    pc__publish(&to->sig, from->sig);
    pc__publish(&to->flags, from->flags);
    pc__publish(&to->why, from->why);
    pc__publish(&to->kind, from->kind); /* last: carries the rest */
}

static void fill(struct pc__range *to, const struct pc__range_view *from)
{
    to->begin = from->begin;
    to->end = from->end;
    put_contents(to, from);
}

/* The first entry that begins there or later; n: none does. */
static size_t first_from(struct pc__range_table *table, size_t n, uint64_t begin)
{
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->at[middle].begin < begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The entry that begins there, or NULL. */
static struct pc__range *find(struct pc__range_table *table, uint64_t begin)
{
    size_t n = table ? pc__observe(&table->n) : 0, i = first_from(table, n, begin);
    return i < n && table->at[i].begin == begin ? &table->at[i] : NULL;
}

static void free_retired(void)
{
    if (atomic_load(&pc__range_readers) != 0)
        return; /* next time */
    while (retired) {
        struct pc__range_table *next = retired->next_retired;
        free(retired);
        retired = next;
    }
}

static void copy_live(struct pc__range_table *to, const struct pc__range *from)
{
    uint32_t kind = pc__observe(&from->kind);
    if (kind == PC__RANGE_GONE)
        return;
    const struct pc__range_view view = {.begin = from->begin, .end = from->end,
                                        .region = pc__observe(&from->region),
                                        .version = pc__observe(&from->version),
                                        .sig = pc__observe(&from->sig),
                                        .flags = pc__observe(&from->flags), .kind = kind,
                                        .why = pc__observe(&from->why)};
    size_t n = pc__observe(&to->n);
    fill(&to->at[n], &view);
    pc__publish(&to->n, n + 1);
}

/* A new table: the live entries of the old one, and range, in order. */
static struct pc__range_table *rebuild(const struct pc__range_table *old,
                                       const struct pc__range_view *range)
{
    size_t n_old = old ? pc__observe(&old->n) : 0, n_live = 0;
    for (size_t i = 0; i < n_old; i++)
        n_live += pc__observe(&old->at[i].kind) != PC__RANGE_GONE;
    size_t capacity = 2 * (n_live + 1) < 64 ? 64 : 2 * (n_live + 1);
    struct pc__range_table *table = calloc(1, sizeof *table + capacity * sizeof table->at[0]);
    if (!table)
        return NULL;
    table->capacity = capacity;
    size_t i = 0;
    while (i < n_old && old->at[i].begin < range->begin)
        copy_live(table, &old->at[i++]);
    size_t n = pc__observe(&table->n);
    fill(&table->at[n], range);
    pc__publish(&table->n, n + 1);
    while (i < n_old)
        copy_live(table, &old->at[i++]);
    return table;
}

/* Locked. */
static int add(const struct pc__range_view *range)
{
    struct pc__range_table *table = atomic_load(&pc__range_current);
    size_t n = table ? pc__observe(&table->n) : 0;
    struct pc__range *same = find(table, range->begin);
    if (same && same->end == range->end) {
        put_contents(same, range);
    } else if (table && n < table->capacity && (n == 0 || table->at[n - 1].end <= range->begin)) {
        fill(&table->at[n], range);
        pc__publish(&table->n, n + 1); /* pairs with pc__range_find: carries the entry */
    } else {
        struct pc__range_table *fresh = rebuild(table, range);
        if (!fresh)
            return pc__fail(PC_ERR_NO_MEMORY, "the table of mappings");
        atomic_store(&pc__range_current, fresh);
        if (table) {
            table->next_retired = retired;
            retired = table;
        }
    }
    free_retired();
    return PC_OK;
}

int pc__range_add(const struct pc__range_view *range)
{
    pthread_mutex_lock(&lock);
    int rc = add(range);
    pthread_mutex_unlock(&lock);
    return rc;
}

/* MAP_FAILED and EEXIST: something is there. */
static void *map_nothing(uint64_t begin, uint64_t length_bytes)
{
    void *at = mmap((void *)(uintptr_t)begin, length_bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == MAP_FAILED || at == (void *)(uintptr_t)begin)
        return at;
    munmap(at, length_bytes); /* kernels before 4.17 take the address for a hint */
    errno = EEXIST;
    return MAP_FAILED;
}

int pc__range_reserve(uint64_t begin, uint64_t end, uint64_t region, uint64_t version)
{
    const struct pc__range_view range = {.begin = begin, .end = end, .region = region,
                                         .version = version, .kind = PC__RANGE_RESERVED};
    int rc;
    pthread_mutex_lock(&lock);
    if (map_nothing(begin, end - begin) == MAP_FAILED)
        rc = errno == EEXIST ? PC_ERR_EXISTS
                             : pc__fail_errno("mmap of %" PRIu64 " bytes of addresses", end - begin);
    else if ((rc = add(&range)))
        munmap((void *)(uintptr_t)begin, end - begin);
    pthread_mutex_unlock(&lock);
    return rc;
}

bool pc__range_overlaps(uint64_t begin, uint64_t end, struct pc__range_view *out)
{
    bool is_found = false;
    pthread_mutex_lock(&lock);
    struct pc__range_table *table = atomic_load(&pc__range_current);
    size_t n = table ? pc__observe(&table->n) : 0, i = first_from(table, n, end);
    while (!is_found && i-- > 0 && table->at[i].end > begin) {
        pc__range_copy(&table->at[i], out);
        is_found = out->kind != PC__RANGE_GONE;
    }
    pthread_mutex_unlock(&lock);
    return is_found;
}

/* Locked. */
static void set(uint64_t begin, enum pc__range_kind kind, int why)
{
    struct pc__range_table *table = atomic_load(&pc__range_current);
    struct pc__range *range = find(table, begin);
    if (range) {
        pc__publish(&range->why, why);
        pc__publish(&range->kind, (uint32_t)kind); /* carries why */
    }
    free_retired();
}

void pc__range_set(uint64_t begin, enum pc__range_kind kind, int why)
{
    pthread_mutex_lock(&lock);
    set(begin, kind, why);
    pthread_mutex_unlock(&lock);
}

/* The lock delays nobody: who reserves waits for the kernel's lock of the address space meanwhile. */
void pc__range_unmap(uint64_t begin, uint64_t length_bytes, int why)
{
    pthread_mutex_lock(&lock);
    set(begin, PC__RANGE_GONE, why);
    munmap((void *)(uintptr_t)begin, length_bytes);
    pthread_mutex_unlock(&lock);
}

void pc__range_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

void pc__range_after_fork(bool in_child)
{
    if (in_child)
        atomic_store(&pc__range_readers, 0u); /* the other threads stayed behind */
    pthread_mutex_unlock(&lock);
}
