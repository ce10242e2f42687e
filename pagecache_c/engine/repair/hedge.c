/* hedge.c - after which time another server is asked besides, how often, and which of several. Pure.
 *
 * A hedge is worth its cost where one answer is late (Dean, Barroso: The Tail at Scale, 2013). Where all
 * are late, the servers have too much to do, and hedges would make that worse: so one request of ten
 * at most is hedged over time, and less soon where the home was faster the last times.
 */
#include "engine/repair/repair.h"

uint64_t pc__hedge_after_ns(const struct pc__rtt *rtt, unsigned in_vain)
{
    const uint64_t after_ns =
        rtt->srtt_ns ? pc__rtt_timeout_ns(rtt, PC__HEDGE_FLOOR_NS) : PC__HEDGE_UNKNOWN_NS;
    return after_ns << (in_vain < PC__HEDGE_MOST_DOUBLED ? in_vain : PC__HEDGE_MOST_DOUBLED);
}

void pc__hedge_request(struct pc__hedge_budget *budget)
{
    if (budget->saved < PC__HEDGE_MOST_SAVED * PC__HEDGE_EVERY)
        budget->saved++;
}

bool pc__hedge_take(struct pc__hedge_budget *budget)
{
    if (budget->saved < PC__HEDGE_EVERY)
        return false;
    budget->saved -= PC__HEDGE_EVERY;
    return true;
}

uint32_t pc__choose_mirror(const uint64_t *blocks, uint32_t n, uint64_t random)
{
    const uint32_t first = (uint32_t)((random & 0xffffffffu) * n >> 32);
    if (n < 2)
        return first;
    uint32_t second = (uint32_t)((random >> 32) * (n - 1) >> 32);
    second += second >= first;
    return blocks[second] < blocks[first] ? second : first; /* alike: the first of a random pair */
}
