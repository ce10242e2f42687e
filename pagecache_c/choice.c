/* choice.c - which of those that have a block is asked for it: a pure function.
 *
 * Power of two choices (Mitzenmacher; Clamor, section 4.2): of two candidates taken at random, the
 * one with less to send. Against the least loaded of all, which everybody would pick at once from
 * the same old figures, two at random spread what the figures do not show yet.
 */
#include "error.h"
#include "pagecache.h"

#define IDLE_BYTES (256u << 10) /* a home with less to send answers: a detour costs more */

/* In [0, n), from 32 random bits. */
static uint64_t below(uint32_t random, uint64_t n)
{
    return (uint64_t)random * n >> 32;
}

PC_API int pc_choose_source(int replication, uint64_t home_bytes, const uint64_t *holder_bytes,
                            size_t n_holders, uint64_t random)
{
    const uint64_t n = n_holders + 1; /* the last candidate is the home */
    uint64_t first = below((uint32_t)random, n);

    if (!n_holders || replication == PC_REPLICATION_OFF)
        return -1;
    if (replication == PC_REPLICATION_P2C) {
        if (home_bytes < IDLE_BYTES)
            return -1;
        uint64_t second = below((uint32_t)(random >> 32), n - 1);
        second += second >= first;
        uint64_t first_bytes = first < n_holders ? holder_bytes[first] : home_bytes;
        uint64_t second_bytes = second < n_holders ? holder_bytes[second] : home_bytes;
        if (second_bytes < first_bytes)
            first = second;
    }
    return first < n_holders ? (int)first : -1;
}
