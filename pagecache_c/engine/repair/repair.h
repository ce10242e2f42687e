/* repair.h - blocks of a region that other regions can make again: the members of its group, or mirrors.
 *
 * A repair belongs to one fetch, and brings what that has still to bring: where the home is lost, does not
 * know the region or has lost these blocks (a degraded read), where it does not answer in time (a hedge), or
 * where a mirror is asked in its place. Of a fetch and its repair the first that has the blocks fills them in.
 */
#ifndef PC_REPAIR_H
#define PC_REPAIR_H

#include "engine/core/core.h"
#include "engine/miss/miss.h"

#define PC__REPAIR_PAUSE_NS 500000000ull /* between two questions about a region at a version */
#define PC__REPAIR_MEMBERS 255u

/* repair.c: what miss/ tells of fetches, and the loops' turns. */
bool pc__repair_asked(struct pc__loop *loop, struct pc__fetch *fetch);
/* A thread is stopped at a block that is on its way as bulk. */
void pc__repair_hurried(struct pc__loop *loop, const struct pc__generation *generation, uint64_t block);
void pc__repair_stranded(struct pc__loop *loop, struct pc__fetch *fetch);
/* Its home has lost its blocks, on this node or another. True: it is the repair's from here on, which ends it. */
bool pc__repair_lost(struct pc__loop *loop, struct pc__fetch *fetch);
void pc__repair_fetch_ended(struct pc__fetch *fetch);
uint64_t pc__repairs_deadline(const struct pc__loop *loop); /* when to look, or UINT64_MAX */
void pc__repairs_tick(struct pc__loop *loop, uint64_t now_ns);
void pc__repairs_close(struct pc__loop *loop); /* before the peers' end */
void pc__repairs_free(struct pc__loop *loop);  /* after it */
/* A mail: the members of region a at version b were said. */
void pc__repair_said(struct pc__loop *loop, struct pc__mail *mail);

/* repair_sets.c: what Python said of members. Of four versions of a region. */
struct pc__members {
    bool is_mirror;
    uint32_t n;
    struct pc_repair_member of[PC__REPAIR_MEMBERS];
};
enum pc__members_known {
    PC__MEMBERS_KNOWN,
    PC__MEMBERS_NONE,  /* asked in vain, a moment ago */
    PC__MEMBERS_ASKED  /* the answer comes as a mail to each loop */
};
enum pc__members_known pc__members_of(struct pc_engine *engine, struct pc__region *region,
                                      uint64_t version, struct pc__members *out);
/* Whether its members are mirrors, as far as was said of any version; asks where nothing was. */
bool pc__is_mirrored(struct pc_engine *engine, struct pc__region *region, uint64_t version);
/* Some did not answer as such: who needs them next asks again. */
void pc__members_failed(struct pc__region *region, uint64_t version);
void pc__repair_sets_free(struct pc__repair_sets *sets);

/* member.c: blocks of a member that is homed here. took: as of struct pc__sink. */
int pc__member_read(struct pc_engine *engine, const struct pc_repair_member *member, struct pc_run run,
                    struct pc__sink *sink);

/* hedge.c: how long an answer may take, and whom to ask; of one loop. */
struct pc__asked {
    uint64_t server_id;
    uint64_t blocks;   /* that this loop waits for, of regions with mirrors */
    unsigned in_vain;  /* hedges in a row that the server was faster than */
};
#define PC__HEDGE_FLOOR_NS 20000000ull
#define PC__HEDGE_UNKNOWN_NS 100000000ull /* nothing was measured yet */
#define PC__HEDGE_MOST_DOUBLED 6u
#define PC__HEDGE_SILENT_NS 1000000000ull /* without a word to any request: then hedges are not counted */
#define PC__HEDGE_EVERY 10u /* requests; for one of so many another server may be asked besides */
#define PC__HEDGE_MOST_SAVED 10u
uint64_t pc__hedge_after_ns(const struct pc__rtt *rtt, unsigned in_vain);
struct pc__hedge_budget {
    uint64_t saved; /* in tenths of a hedge */
};
void pc__hedge_request(struct pc__hedge_budget *budget);
bool pc__hedge_take(struct pc__hedge_budget *budget);
/* Power of two choices: of n servers, two at random, the one with fewer blocks to come. */
uint32_t pc__choose_mirror(const uint64_t *blocks, uint32_t n, uint64_t random);

#endif
