/* peer_selection.c - which of those that have a block is asked for it: a pure function.
 *
 * Power of two choices (Mitzenmacher; Clamor, section 4.2): of two candidates taken at random, the
 * one with less to send. Against the least loaded of all, which everybody would pick at once from
 * the same old figures, two at random spread what the figures do not show yet.
 *
 * A home that has little to send answers: a detour costs more. A busy one is no candidate beside
 * others: it has blocks to send that nobody else has yet, and every copy of one that somebody has
 * delays those (bench/hot_pages, 14 MB wanted by 7 hosts: it sent 43 MB as a candidate, 23 without).
 */
#include "common/error.h"
#include "pagecache.h"

#define IDLE_BYTES (64u << 10)

/* In [0, n), from 32 random bits. */
static uint64_t below(uint32_t random, uint64_t n)
{
    return (uint64_t)random * n >> 32;
}

PC_API int pc_select_peer(int replication, uint64_t home_bytes, const uint64_t *holder_bytes,
                            size_t n_holders, uint64_t random)
{
    if (!n_holders || replication == PC_REPLICATION_OFF)
        return -1;
    if (replication == PC_REPLICATION_RANDOM) {
        uint64_t any = below((uint32_t)random, n_holders + 1); /* the last is the home */
        return any < n_holders ? (int)any : -1;
    }
    if (home_bytes < IDLE_BYTES)
        return -1;
    uint64_t first = below((uint32_t)random, n_holders);
    if (n_holders == 1)
        return (int)first;
    uint64_t second = below((uint32_t)(random >> 32), n_holders - 1);
    second += second >= first;
    return (int)(holder_bytes[second] < holder_bytes[first] ? second : first);
}
