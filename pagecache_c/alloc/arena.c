/* arena.c - an allocator inside a range of addresses. See arena.h and pagecache.h.
 *
 * The range is cut into spans of whole pages: free, one large block, or a slab of equal small
 * blocks. Spans are described outside the range, so that only what was handed out is touched, and
 * found by page through a sparse table. Free spans lie in bins by size, a few bins to each power
 * of two, and merge with free neighbours; what no bin has comes from the top, which only rises.
 *
 * Relies on: pages above the top, and those punched, read as zeros; an anonymous mapping of the
 * table costs nothing until written.
 */
#include "alloc/arena.h"

#include "common/error.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_BYTES ((size_t)PC_BLOCK_BYTES)
#define MIN_ALIGNMENT ((size_t)16)
#define SMALL_BYTES ((size_t)2048)
#define PUNCH_PAGES ((uint64_t)32) /* 128 KiB: freed runs of so many pages go back at once */
#define BINS_PER_DOUBLING 4u
#define N_BINS (64u * BINS_PER_DOUBLING)

static const uint16_t class_bytes[] = {16,  32,  48,  64,  80,  96,  112, 128,  160,  192,  224,  256,
                                       320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048};
#define N_CLASSES (sizeof class_bytes / sizeof class_bytes[0])
#define MAX_SLOTS (PAGE_BYTES / 16)

enum span_state { SPAN_FREE, SPAN_LARGE, SPAN_SLAB };

struct span {
    uint64_t first_page, n_pages;
    struct span *next, *previous; /* FREE: in its bin; SLAB with room: in its class */
    uint8_t state;
    uint8_t class_index;
    bool zero;      /* FREE: reads as zeros; SLAB: slots that were never given out do */
    bool is_listed;
    uint16_t n_used, n_given; /* SLAB: slots in use; slots that ever were */
    uint64_t used[MAX_SLOTS / 64];
};

struct pc_arena {
    char *base;
    uint64_t n_pages;
    atomic_bool open;
    atomic_bool lost; /* it is the parent's, of which this process is a fork */
    pthread_mutex_t lock;
    struct span **pages; /* first and last page of each span; every page of a slab */
    uint64_t top;        /* pages from here on were never part of a span */
    struct span *bins[N_BINS];
    struct span *slabs[N_CLASSES];
    struct pc_arena *next; /* under the registry's lock */
};

/* ---------------------------------------------------------------- registry */

static pthread_rwlock_t registry_lock = PTHREAD_RWLOCK_INITIALIZER;
static pc_arena *arenas;
/* The ends of all ranges outside the window that were ever arenas: frees of others stop here. */
static atomic_uintptr_t lowest = UINTPTR_MAX, highest = 0;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* The mappings stay with the parent: here frees are nothing and allocations fail. The list is whole
 * at any moment, one store changes it; locks that the parent's threads held are never taken. */
static void after_fork_in_child(void)
{
    (void)pthread_rwlock_init(&registry_lock, NULL);
    for (pc_arena *arena = arenas; arena; arena = arena->next) {
        atomic_store(&arena->open, false);
        atomic_store(&arena->lost, true);
    }
}

static void register_fork(void)
{
    (void)pthread_atfork(NULL, NULL, after_fork_in_child);
}

static bool in_window(uintptr_t address)
{
    return address >= PC_WINDOW_BEGIN && address < PC_WINDOW_END;
}

static bool holds(const pc_arena *arena, const void *pointer)
{
    uintptr_t begin = (uintptr_t)arena->base, address = (uintptr_t)pointer;
    return address >= begin && address - begin < arena->n_pages * PAGE_BYTES;
}

bool pc__arena_is_open(const pc_arena *arena)
{
    return atomic_load_explicit(&arena->open, memory_order_acquire);
}

enum pc__owner pc__arena_hold(const void *pointer, pc_arena **out)
{
    uintptr_t address = (uintptr_t)pointer;
    bool ours = in_window(address);
    if (!ours && (address < atomic_load_explicit(&lowest, memory_order_relaxed) ||
                  address >= atomic_load_explicit(&highest, memory_order_relaxed)))
        return PC__OWNER_REAL;
    pthread_rwlock_rdlock(&registry_lock);
    for (pc_arena *arena = arenas; arena; arena = arena->next)
        if (holds(arena, pointer) && !atomic_load_explicit(&arena->lost, memory_order_relaxed)) {
            *out = arena;
            return PC__OWNER_ARENA;
        }
    for (const pc_arena *arena = arenas; arena && !ours; arena = arena->next)
        ours = holds(arena, pointer);
    pthread_rwlock_unlock(&registry_lock);
    return ours ? PC__OWNER_LOST : PC__OWNER_REAL;
}

void pc__arena_release(void)
{
    pthread_rwlock_unlock(&registry_lock);
}

PC_API pc_arena *pc_arena_find(const void *pointer)
{
    pc_arena *arena = NULL;
    if (pc__arena_hold(pointer, &arena) != PC__OWNER_ARENA)
        return NULL;
    pc__arena_release();
    return arena;
}

/* ------------------------------------------------------------- open, close */

PC_API int pc_arena_open(uint64_t address, uint64_t length_bytes, pc_arena **out)
{
    *out = NULL;
    if (address == 0 || address % PAGE_BYTES || length_bytes < PAGE_BYTES ||
        address + length_bytes < address)
        return pc__fail(PC_ERR_RANGE, "no arena of %" PRIu64 " bytes at %#" PRIx64, length_bytes,
                        address);
    (void)pthread_once(&fork_once, register_fork);
    pc_arena *arena = calloc(1, sizeof *arena);
    if (!arena)
        return pc__fail(PC_ERR_NO_MEMORY, "no memory for an arena");
    arena->base = (char *)(uintptr_t)address;
    arena->n_pages = length_bytes / PAGE_BYTES;
    void *pages = mmap(NULL, arena->n_pages * sizeof *arena->pages, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
        free(arena);
        return pc__fail_errno("mmap of the page table of an arena of %" PRIu64 " bytes",
                              length_bytes);
    }
    arena->pages = pages;
    (void)pthread_mutex_init(&arena->lock, NULL);
    atomic_init(&arena->open, true);

    int rc = PC_OK;
    uintptr_t begin = (uintptr_t)address, end = begin + arena->n_pages * PAGE_BYTES;
    pthread_rwlock_wrlock(&registry_lock);
    for (const pc_arena *other = arenas; other && !rc; other = other->next)
        if (begin < (uintptr_t)other->base + other->n_pages * PAGE_BYTES &&
            (uintptr_t)other->base < end)
            rc = pc__fail(PC_ERR_EXISTS, "an arena at %p overlaps the new one at %#" PRIx64,
                          (void *)other->base, address);
    if (!rc) {
        arena->next = arenas;
        arenas = arena;
        if (!in_window(begin)) {
            if (begin < atomic_load(&lowest))
                atomic_store(&lowest, begin);
            if (end > atomic_load(&highest))
                atomic_store(&highest, end);
        }
    }
    pthread_rwlock_unlock(&registry_lock);
    if (rc) {
        (void)munmap(arena->pages, arena->n_pages * sizeof *arena->pages);
        free(arena);
        return rc;
    }
    *out = arena;
    return PC_OK;
}

static bool punch(const pc_arena *arena, const struct span *span)
{
    return madvise(arena->base + span->first_page * PAGE_BYTES, span->n_pages * PAGE_BYTES,
                   MADV_REMOVE) == 0;
}

PC_API int pc_arena_drop(pc_arena *arena)
{
    atomic_store(&arena->open, false);
    pthread_rwlock_wrlock(&registry_lock);
    pc_arena **at = &arenas;
    while (*at && *at != arena)
        at = &(*at)->next;
    if (*at)
        *at = arena->next;
    pthread_rwlock_unlock(&registry_lock);
    for (uint64_t page = 0; page < arena->top;) {
        struct span *span = arena->pages[page];
        page += span->n_pages;
        free(span);
    }
    (void)munmap(arena->pages, arena->n_pages * sizeof *arena->pages);
    (void)pthread_mutex_destroy(&arena->lock);
    free(arena);
    return PC_OK;
}

PC_API uint64_t pc_arena_used_bytes(pc_arena *arena)
{
    pthread_mutex_lock(&arena->lock);
    uint64_t used = arena->top * PAGE_BYTES;
    pthread_mutex_unlock(&arena->lock);
    return used;
}

/* ------------------------------------------------------------------- spans */

/* The bin of spans of this size. Spans of a bin are smaller than those of the next one. */
static size_t bin_of(uint64_t n_pages)
{
    unsigned log = 63u - (unsigned)__builtin_clzll(n_pages);
    unsigned part = log < 2 ? (unsigned)(n_pages << (2 - log)) : (unsigned)(n_pages >> (log - 2));
    return log * BINS_PER_DOUBLING + part % BINS_PER_DOUBLING;
}

static void list_add(struct span **head, struct span *span)
{
    span->previous = NULL;
    span->next = *head;
    if (span->next)
        span->next->previous = span;
    *head = span;
    span->is_listed = true;
}

static void list_remove(struct span **head, struct span *span)
{
    if (span->next)
        span->next->previous = span->previous;
    *(span->previous ? &span->previous->next : head) = span->next;
    span->is_listed = false;
}

static void set_ends(pc_arena *arena, const struct span *span, struct span *value)
{
    arena->pages[span->first_page] = value;
    arena->pages[span->first_page + span->n_pages - 1] = value;
}

static void add_free(pc_arena *arena, struct span *span)
{
    span->state = SPAN_FREE;
    set_ends(arena, span, span);
    list_add(&arena->bins[bin_of(span->n_pages)], span);
}

static void remove_free(pc_arena *arena, struct span *span)
{
    list_remove(&arena->bins[bin_of(span->n_pages)], span);
    set_ends(arena, span, NULL);
}

/* The neighbour that owns a page, if it is free. */
static struct span *free_at(const pc_arena *arena, uint64_t page)
{
    struct span *span = page < arena->top ? arena->pages[page] : NULL;
    return span && span->state == SPAN_FREE ? span : NULL;
}

/* Takes a span that is in no list, merges it with free neighbours, and puts it in its bin. */
static void give_back(pc_arena *arena, struct span *span)
{
    set_ends(arena, span, NULL);
    if (!span->zero && span->n_pages >= PUNCH_PAGES)
        span->zero = punch(arena, span);
    struct span *before = span->first_page ? free_at(arena, span->first_page - 1) : NULL;
    struct span *after = free_at(arena, span->first_page + span->n_pages);
    if (before) {
        remove_free(arena, before);
        span->first_page = before->first_page;
        span->n_pages += before->n_pages;
        span->zero = span->zero && before->zero;
        free(before);
    }
    if (after) {
        remove_free(arena, after);
        span->n_pages += after->n_pages;
        span->zero = span->zero && after->zero;
        free(after);
    }
    add_free(arena, span);
}

/* Cuts a span that is in no list: what is behind its first n_pages becomes a span of its own.
 * NULL: there is no memory for its description. */
static struct span *cut(pc_arena *arena, struct span *span, uint64_t n_pages)
{
    struct span *rest = calloc(1, sizeof *rest);
    if (!rest)
        return NULL;
    set_ends(arena, span, NULL);
    rest->first_page = span->first_page + n_pages;
    rest->n_pages = span->n_pages - n_pages;
    rest->zero = span->zero;
    rest->state = SPAN_LARGE;
    span->n_pages = n_pages;
    set_ends(arena, span, span);
    set_ends(arena, rest, rest);
    return rest;
}

static struct span *from_bins(pc_arena *arena, uint64_t n_pages)
{
    size_t own = bin_of(n_pages);
    for (size_t bin = own + 1; bin < N_BINS; bin++)
        if (arena->bins[bin])
            return arena->bins[bin];
    for (struct span *span = arena->bins[own]; span; span = span->next)
        if (span->n_pages >= n_pages)
            return span;
    return NULL;
}

static struct span *from_top(pc_arena *arena, uint64_t n_pages)
{
    if (n_pages > arena->n_pages - arena->top)
        return NULL;
    struct span *span = calloc(1, sizeof *span);
    if (!span)
        return NULL;
    span->first_page = arena->top;
    span->n_pages = n_pages;
    span->zero = true;
    arena->top += n_pages;
    return span;
}

/* A span of n_pages as a large block, or NULL. */
static struct span *take_pages(pc_arena *arena, uint64_t n_pages)
{
    struct span *span = from_bins(arena, n_pages);
    struct span *last = span || !arena->top ? NULL : free_at(arena, arena->top - 1);
    if (span) {
        remove_free(arena, span);
    } else if (last && n_pages - last->n_pages <= arena->n_pages - arena->top) {
        remove_free(arena, last);
        arena->top += n_pages - last->n_pages;
        last->n_pages = n_pages;
        span = last;
    } else {
        span = from_top(arena, n_pages);
    }
    if (!span)
        return NULL;
    span->state = SPAN_LARGE;
    set_ends(arena, span, span);
    if (span->n_pages > n_pages) {
        struct span *rest = cut(arena, span, n_pages);
        if (rest)
            give_back(arena, rest);
    }
    return span;
}

static struct span *take_aligned(pc_arena *arena, uint64_t n_pages, uint64_t align_pages)
{
    uint64_t most = n_pages + align_pages - 1;
    struct span *span = take_pages(arena, most);
    if (!span)
        return NULL;
    uint64_t first = (uint64_t)((uintptr_t)arena->base / PAGE_BYTES) + span->first_page;
    uint64_t skip = (align_pages - first % align_pages) % align_pages;
    if (skip) {
        struct span *rest = cut(arena, span, skip);
        give_back(arena, span);
        span = rest;
    }
    if (span && span->n_pages > n_pages) {
        struct span *rest = cut(arena, span, n_pages);
        if (rest)
            give_back(arena, rest);
    }
    return span;
}

static void *address_of(const pc_arena *arena, const struct span *span)
{
    return arena->base + span->first_page * PAGE_BYTES;
}

/* ------------------------------------------------------------------- slabs */

static uint64_t slab_pages(size_t class_index)
{
    return class_bytes[class_index] > 512 ? 4 : 1;
}

static unsigned slots_of(const struct span *slab)
{
    return (unsigned)(slab->n_pages * PAGE_BYTES / class_bytes[slab->class_index]);
}

/* The smallest class of blocks of n_bytes that all lie on this boundary, or N_CLASSES. */
static size_t class_for(size_t n_bytes, size_t alignment)
{
    size_t index = 0;
    while (index < N_CLASSES && (class_bytes[index] < n_bytes || class_bytes[index] % alignment))
        index++;
    return index;
}

static struct span *new_slab(pc_arena *arena, size_t index)
{
    struct span *slab = take_pages(arena, slab_pages(index));
    if (slab && slab->n_pages != slab_pages(index)) { /* no memory to describe the rest of it */
        give_back(arena, slab);
        return NULL;
    }
    if (!slab)
        return NULL;
    slab->state = SPAN_SLAB;
    slab->class_index = (uint8_t)index;
    slab->n_used = slab->n_given = 0;
    memset(slab->used, 0, sizeof slab->used);
    for (uint64_t page = 0; page < slab->n_pages; page++)
        arena->pages[slab->first_page + page] = slab;
    list_add(&arena->slabs[index], slab);
    return slab;
}

static void *take_slot(pc_arena *arena, size_t index, bool *zero)
{
    struct span *slab = arena->slabs[index];
    if (!slab)
        slab = new_slab(arena, index);
    if (!slab)
        return NULL;
    unsigned slot = 0;
    while (slab->used[slot / 64] == UINT64_MAX)
        slot += 64;
    slot += (unsigned)__builtin_ctzll(~slab->used[slot / 64]);
    slab->used[slot / 64] |= 1ull << slot % 64;
    slab->n_used++;
    *zero = slot >= slab->n_given && slab->zero;
    if (slot >= slab->n_given)
        slab->n_given = (uint16_t)(slot + 1);
    if (slab->n_used == slots_of(slab))
        list_remove(&arena->slabs[index], slab);
    return (char *)address_of(arena, slab) + (size_t)slot * class_bytes[index];
}

static void give_slab(pc_arena *arena, struct span *slab)
{
    list_remove(&arena->slabs[slab->class_index], slab);
    for (uint64_t page = 0; page < slab->n_pages; page++)
        arena->pages[slab->first_page + page] = NULL;
    slab->zero = false;
    give_back(arena, slab);
}

static void give_slot(pc_arena *arena, struct span *slab, unsigned slot)
{
    slab->used[slot / 64] &= ~(1ull << slot % 64);
    slab->n_used--;
    if (!slab->is_listed)
        list_add(&arena->slabs[slab->class_index], slab);
    else if (slab->n_used == 0 && (slab->previous || slab->next)) /* the last one stays */
        give_slab(arena, slab);
}

static void give_empty_slabs(pc_arena *arena)
{
    for (size_t index = 0; index < N_CLASSES; index++)
        for (struct span *slab = arena->slabs[index], *next; slab; slab = next) {
            next = slab->next;
            if (slab->n_used == 0)
                give_slab(arena, slab);
        }
}

/* ------------------------------------------------------------------ blocks */

/* The span of a block that is in use, and its slot; ends the process for anything else, as
 * malloc does: the heap is not what the program takes it for. Under lock. */
static struct span *block_at(const pc_arena *arena, const void *pointer, unsigned *slot)
{
    size_t offset = (size_t)((uintptr_t)pointer - (uintptr_t)arena->base);
    struct span *span = offset / PAGE_BYTES < arena->top ? arena->pages[offset / PAGE_BYTES] : NULL;
    if (span && span->state == SPAN_SLAB) {
        size_t inside = offset - (size_t)span->first_page * PAGE_BYTES;
        size_t size = class_bytes[span->class_index];
        *slot = (unsigned)(inside / size);
        if (inside % size == 0 && *slot < slots_of(span) &&
            span->used[*slot / 64] >> *slot % 64 & 1)
            return span;
    } else if (span && span->state == SPAN_LARGE && offset == span->first_page * PAGE_BYTES) {
        *slot = 0;
        return span;
    }
    static const char text[] = "clamor: free() of an address in a region that is not a block in "
                               "use (freed twice, or not from malloc)\n";
    ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
    (void)ignored;
    abort();
}

static size_t block_bytes(const struct span *span)
{
    return span->state == SPAN_SLAB ? class_bytes[span->class_index]
                                    : (size_t)(span->n_pages * PAGE_BYTES);
}

static void free_block(pc_arena *arena, void *pointer)
{
    unsigned slot;
    struct span *span = block_at(arena, pointer, &slot);
    if (span->state == SPAN_SLAB) {
        give_slot(arena, span, slot);
    } else {
        span->zero = false;
        give_back(arena, span);
    }
}

static void *take_block(pc_arena *arena, size_t alignment, size_t n_bytes, bool *zero)
{
    size_t index = n_bytes <= SMALL_BYTES ? class_for(n_bytes, alignment) : N_CLASSES;
    if (index < N_CLASSES)
        return take_slot(arena, index, zero);
    uint64_t n_pages = n_bytes ? (n_bytes + PAGE_BYTES - 1) / PAGE_BYTES : 1;
    struct span *span = alignment <= PAGE_BYTES
                            ? take_pages(arena, n_pages)
                            : take_aligned(arena, n_pages, alignment / PAGE_BYTES);
    if (!span)
        return NULL;
    *zero = span->zero;
    return address_of(arena, span);
}

/* Under lock. NULL with ENOMEM. */
static void *allocate(pc_arena *arena, size_t alignment, size_t n_bytes, bool *zero)
{
    void *block = NULL;
    if (pc__arena_is_open(arena) && n_bytes <= arena->n_pages * PAGE_BYTES) {
        block = take_block(arena, alignment, n_bytes, zero);
        if (!block) {
            give_empty_slabs(arena);
            block = take_block(arena, alignment, n_bytes, zero);
        }
    }
    if (!block)
        errno = ENOMEM;
    return block;
}

static void *locked_allocate(pc_arena *arena, size_t alignment, size_t n_bytes, bool *zero)
{
    *zero = false;
    if (!pc__arena_is_open(arena)) { /* before the lock: see after_fork_in_child */
        errno = ENOMEM;
        return NULL;
    }
    pthread_mutex_lock(&arena->lock);
    void *block = allocate(arena, alignment, n_bytes, zero);
    pthread_mutex_unlock(&arena->lock);
    return block;
}

PC_API void *pc_malloc(pc_arena *arena, size_t n_bytes)
{
    bool zero;
    return locked_allocate(arena, MIN_ALIGNMENT, n_bytes, &zero);
}

PC_API void *pc_calloc(pc_arena *arena, size_t n_items, size_t item_bytes)
{
    size_t n_bytes;
    if (__builtin_mul_overflow(n_items, item_bytes, &n_bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    bool zero;
    void *block = locked_allocate(arena, MIN_ALIGNMENT, n_bytes, &zero);
    if (block && !zero)
        memset(block, 0, n_bytes);
    return block;
}

PC_API void *pc_aligned_alloc(pc_arena *arena, size_t alignment, size_t n_bytes)
{
    if (alignment == 0 || alignment & (alignment - 1)) {
        errno = EINVAL;
        return NULL;
    }
    bool zero;
    if (alignment > arena->n_pages * PAGE_BYTES) {
        errno = ENOMEM;
        return NULL;
    }
    return locked_allocate(arena, alignment < MIN_ALIGNMENT ? MIN_ALIGNMENT : alignment, n_bytes,
                           &zero);
}

PC_API void pc_free(pc_arena *arena, void *pointer)
{
    if (!pointer || !pc__arena_is_open(arena))
        return;
    int saved = errno;
    pthread_mutex_lock(&arena->lock);
    if (pc__arena_is_open(arena))
        free_block(arena, pointer);
    pthread_mutex_unlock(&arena->lock);
    errno = saved;
}

PC_API size_t pc_usable_size(pc_arena *arena, const void *pointer)
{
    if (!pointer)
        return 0;
    unsigned slot;
    pthread_mutex_lock(&arena->lock);
    size_t n_bytes = block_bytes(block_at(arena, pointer, &slot));
    pthread_mutex_unlock(&arena->lock);
    return n_bytes;
}

/* Makes a large block n_pages long where it lies. Under lock. */
static bool resize_large(pc_arena *arena, struct span *span, uint64_t n_pages)
{
    uint64_t end = span->first_page + span->n_pages;
    bool rest_zero = false;
    if (n_pages > span->n_pages) {
        uint64_t more = n_pages - span->n_pages;
        struct span *after = free_at(arena, end);
        if (after && after->n_pages >= more)
            remove_free(arena, after);
        else if (end == arena->top)
            after = from_top(arena, more);
        else
            after = NULL;
        if (!after)
            return false;
        set_ends(arena, span, NULL);
        span->n_pages += after->n_pages;
        set_ends(arena, span, span);
        rest_zero = after->zero;
        free(after);
    }
    if (n_pages < span->n_pages) {
        span->zero = rest_zero; /* for the part that is cut off */
        struct span *rest = cut(arena, span, n_pages);
        if (rest)
            give_back(arena, rest);
    }
    return true;
}

PC_API void *pc_realloc(pc_arena *arena, void *pointer, size_t n_bytes)
{
    if (!pointer)
        return pc_malloc(arena, n_bytes);
    if (!pc__arena_is_open(arena)) {
        errno = ENOMEM;
        return NULL;
    }
    bool zero;
    unsigned slot;
    pthread_mutex_lock(&arena->lock);
    void *result = NULL;
    struct span *span = block_at(arena, pointer, &slot);
    size_t old_bytes = block_bytes(span);
    uint64_t n_pages = n_bytes / PAGE_BYTES + (n_bytes % PAGE_BYTES != 0);
    bool stays = span->state == SPAN_SLAB
                     ? n_bytes <= old_bytes && n_bytes > old_bytes / 2
                     : n_bytes > SMALL_BYTES && n_pages <= arena->n_pages &&
                           resize_large(arena, span, n_pages);
    if (stays) {
        result = pointer;
    } else {
        result = allocate(arena, MIN_ALIGNMENT, n_bytes, &zero);
        if (result) {
            memcpy(result, pointer, n_bytes < old_bytes ? n_bytes : old_bytes);
            free_block(arena, pointer);
        } else if (n_bytes <= old_bytes) {
            result = pointer; /* shrinking never fails */
        }
    }
    pthread_mutex_unlock(&arena->lock);
    return result;
}

PC_API int pc_arena_close(pc_arena *arena)
{
    pthread_mutex_lock(&arena->lock);
    if (atomic_exchange(&arena->open, false)) {
        give_empty_slabs(arena);
        for (size_t bin = 0; bin < N_BINS; bin++)
            for (struct span *span = arena->bins[bin]; span; span = span->next)
                if (!span->zero) /* what was freed is not part of what was built */
                    span->zero = punch(arena, span);
    }
    pthread_mutex_unlock(&arena->lock);
    return PC_OK;
}
