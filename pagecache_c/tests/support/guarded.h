/* guarded.h - bytes between two pages that may not be touched: a parser that looks one byte too far dies. */
#ifndef PC_TEST_GUARDED_H
#define PC_TEST_GUARDED_H

#include "common/wire.h"
#include "tests/support/check.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Room between two guard pages. */
static struct {
    unsigned char *begin;
    size_t n_bytes;
} arena;

static inline void make_arena(void)
{
    const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    arena.n_bytes = 2 * PC__CTL_MAX_BYTES;
    unsigned char *all = mmap(NULL, arena.n_bytes + 2 * page_bytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(all != MAP_FAILED);
    arena.begin = all + page_bytes;
    REQUIRE(mprotect(arena.begin, arena.n_bytes, PROT_READ | PROT_WRITE) == 0);
}

enum place { AT_BEGIN, AT_END, N_PLACES };

static inline const unsigned char *guarded(enum place place, const void *bytes, size_t n_bytes)
{
    REQUIRE(n_bytes <= arena.n_bytes);
    unsigned char *to = place == AT_BEGIN ? arena.begin : arena.begin + arena.n_bytes - n_bytes;
    memcpy(to, bytes, n_bytes);
    return to;
}

#endif
