/* test_wire_retire.c - the messages of a free, byte by byte: what parses, and what does not. Bodies lie
 * in memory of exactly their size, which ASan guards. */
#include "common/wire.h"
#include "tests/support/check.h"

#include <stdlib.h>
#include <string.h>

#define ROOM 16u

/* The number of servers, or why it makes no sense. */
static int parse(const struct pc__ctl_retire *body, size_t n_ids, int cut_bytes, size_t capacity)
{
    const size_t body_bytes = sizeof *body + n_ids * 8 - (size_t)cut_bytes;
    const struct pc__ctl_header header = {.type = PC__CTL_RETIRE, .request_id = 3,
                                          .body_bytes = (uint32_t)body_bytes};
    unsigned char whole[sizeof header + sizeof *body + 8 * (PC__RETIRE_MOST + 1)];
    memcpy(whole, &header, sizeof header);
    memcpy(whole + sizeof header, body, sizeof *body);
    for (uint64_t i = 0; i < n_ids; i++) {
        const uint64_t id = 100 + i;
        memcpy(whole + sizeof header + sizeof *body + i * 8, &id, 8);
    }
    unsigned char *packet = malloc(sizeof header + body_bytes);
    CHECK(packet, "no memory");
    memcpy(packet, whole, sizeof header + body_bytes);
    struct pc__ctl_message message;
    struct pc__ctl_retire head = {0};
    uint64_t *servers = malloc(capacity ? capacity * 8 : 1);
    int rc = pc__ctl_parse(packet, sizeof header + body_bytes, &message);
    if (!rc)
        rc = pc__ctl_parse_retire(&message, &head, servers, capacity);
    for (int i = 0; i < rc; i++)
        CHECK(servers[i] == 100 + (uint64_t)i, "server %d", i);
    if (rc >= 0)
        CHECK(head.region == body->region && (int)head.n_servers == rc, "%d servers", rc);
    free(servers);
    free(packet);
    return rc;
}

static void test_control(void)
{
    static const struct {
        const char *what;
        struct pc__ctl_retire body;
        size_t n_ids;
        int cut_bytes;
        int expected;
    } each[] = {
        {"nobody else", {7, 0, 0}, 0, 0, 0},
        {"alone", {7, 1, 0}, 0, 0, 0},
        {"two others", {7, 0, 2}, 2, 0, 2},
        {"as many as fit", {7, 0, ROOM}, ROOM, 0, ROOM},
        {"more than the room", {7, 0, ROOM + 1}, ROOM + 1, 0, PC_ERR_PROTOCOL},
        {"more than there may be", {7, 0, PC__RETIRE_MOST + 1}, PC__RETIRE_MOST + 1, 0,
         PC_ERR_PROTOCOL},
        {"4 billion", {7, 0, UINT32_MAX}, 2, 0, PC_ERR_PROTOCOL},
        {"region 0", {0, 0, 0}, 0, 0, PC_ERR_PROTOCOL},
        {"alone, with another", {7, 1, 1}, 1, 0, PC_ERR_PROTOCOL},
        {"alone is 2", {7, 2, 0}, 0, 0, PC_ERR_PROTOCOL},
        {"an id that is missing", {7, 0, 2}, 1, 0, PC_ERR_PROTOCOL},
        {"an id that is cut", {7, 0, 2}, 2, 1, PC_ERR_PROTOCOL},
        {"an id too many", {7, 0, 1}, 2, 0, PC_ERR_PROTOCOL},
        {"a body that is cut", {7, 0, 0}, 0, 1, PC_ERR_PROTOCOL},
    };
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
        int rc = parse(&each[i].body, each[i].n_ids, each[i].cut_bytes, ROOM);
        CHECK(rc == each[i].expected, "%s: %d", each[i].what, rc);
    }
    const struct pc__ctl_message other = {.header.type = PC__CTL_PING};
    struct pc__ctl_retire head;
    CHECK(pc__ctl_parse_retire(&other, &head, NULL, 0) == PC_ERR_PROTOCOL, "another type");
}

static void test_data(void)
{
    const struct pc__data_header good = {.magic = PC__DATA_MAGIC, .type = PC__DATA_RETIRE,
                                         .request_id = 9, .region = 7};
    struct pc__data_header bad, out;
#define IS(code, what) CHECK(pc__data_parse_header(&bad, &out) == (code), what)
    bad = good;
    IS(PC_OK, "RETIRE");
    CHECK(out.region == 7 && out.request_id == 9, "what was parsed");
    bad.status = PC_ERR_TIMEOUT;
    IS(PC_ERR_PROTOCOL, "RETIRE with a status");
    bad.type = PC__DATA_RETIRED;
    IS(PC_OK, "RETIRED that refuses");
    bad.status = 1;
    IS(PC_ERR_PROTOCOL, "a positive status");
    for (int type = PC__DATA_RETIRE; type <= PC__DATA_RETIRED; type++) {
        bad = good, bad.type = (uint16_t)type;
        IS(PC_OK, "as it is");
        bad.flags = PC__DATA_HOLES;
        IS(PC_ERR_PROTOCOL, "flags");
        bad = good, bad.type = (uint16_t)type, bad.n_runs = 1;
        IS(PC_ERR_PROTOCOL, "runs");
        bad = good, bad.type = (uint16_t)type, bad.n_blocks = 1;
        IS(PC_ERR_PROTOCOL, "blocks");
        bad = good, bad.type = (uint16_t)type, bad.version = 1;
        IS(PC_ERR_PROTOCOL, "a version");
        bad = good, bad.type = (uint16_t)type, bad.region = 0;
        IS(PC_ERR_PROTOCOL, "region 0");
    }
    bad = good, bad.type = PC__DATA_LAST;
    IS(PC_ERR_PROTOCOL, "the type after them");
}

int main(void)
{
    test_control();
    test_data();
    return test_result();
}
