/* test_wire.c - golden bytes of wire version 1, and every way to break them.
 *
 * Each input is parsed twice: ending at a guard page, and beginning after one. A parser that
 * looks one byte too far dies.
 */
#include "common/wire.h"
#include "tests/support/check.h"
#include "tests/support/guarded.h"

#include <stdbool.h>
#include <string.h>

#define REGION 0x0102030405060708ull
#define COMMIT 0x1122334455667788ull
#define BASE 0x110000200000ull
#define LENGTH 0x30000000ull

/* Header, then runs where the type has them. */
static int parse_control(const void *bytes, size_t n_bytes, struct pc__ctl_message *message,
                         struct pc__ctl_runs *head, struct pc_run *runs, size_t capacity)
{
    int rc[N_PLACES];
    for (enum place place = AT_BEGIN; place < N_PLACES; place++) {
        rc[place] = pc__ctl_parse(guarded(place, bytes, n_bytes), n_bytes, message);
        if (rc[place] != PC_OK)
            continue;
        if (message->header.type == PC__CTL_PREFETCH || message->header.type == PC__CTL_READS)
            rc[place] = pc__ctl_parse_runs(message, head, runs, capacity);
    }
    CHECK(rc[AT_BEGIN] == rc[AT_END], "%d, %d", rc[AT_BEGIN], rc[AT_END]);
    return rc[AT_END];
}

static int control(const void *bytes, size_t n_bytes)
{
    struct pc__ctl_message message;
    struct pc__ctl_runs head;
    struct pc_run runs[PC__CTL_MAX_RUNS];
    return parse_control(bytes, n_bytes, &message, &head, runs, PC__CTL_MAX_RUNS);
}

/* A whole data message as far as it is parsed: header, then the runs of a GET. */
static int data(const void *bytes, size_t n_bytes, uint64_t region_blocks, size_t capacity)
{
    const size_t header_bytes = sizeof(struct pc__data_header);
    int rc[N_PLACES];
    REQUIRE(n_bytes >= header_bytes);
    for (enum place place = AT_BEGIN; place < N_PLACES; place++) {
        struct pc__data_header header;
        struct pc_run runs[PC__DATA_MAX_RUNS];
        rc[place] = pc__data_parse_header(guarded(place, bytes, header_bytes), &header);
        if (rc[place] != PC_OK || header.type != PC__DATA_GET)
            continue;
        const size_t rest_bytes = n_bytes - header_bytes;
        rc[place] = pc__data_parse_runs(
            &header, guarded(place, (const char *)bytes + header_bytes, rest_bytes), rest_bytes,
            region_blocks, runs, capacity);
    }
    CHECK(rc[AT_BEGIN] == rc[AT_END], "%d, %d", rc[AT_BEGIN], rc[AT_END]);
    return rc[AT_END];
}

/* ------------------------------------------------------------------- golden bytes
 *
 * Written from the tables in wire.h with another program (struct.pack), not by this library;
 * zeros at the end are left out. If one of these must change, PC__WIRE_VERSION changes. */
static const struct golden {
    const char *name;
    size_t n_bytes;
    int parsed; /* what control() or data() returns */
    const char *hex;
} goldens[] = {
#define HELLO 0
    {"hello", 80, 0,
     "4000000001000000070000000000000001000000020000000000000000000000302e312e302b616263"},
#define CREATE 1
    {"create", 48, 0,
     "20000000020000000800000000000000080706050403020100002000001100000000003000000000"
     "01"},
#define SEAL 2
    {"seal", 48, 0, "200000000300000009000000000000000807060504030201"},
#define ABANDON 3
    {"abandon", 48, 0, "20000000040000000a000000000000000807060504030201"},
#define OPEN 4
    {"open", 72, 0,
     "38000000050000000b00000000000000050000000000000008070605040302010300000000000000"
     "00002000001100000000003000000000000000000000000002"},
#define ATTACH 5
    {"attach", 72, 0,
     "38000000060000000c00000000000000050000000000000008070605040302010300000000000000"
     "0000200000110000000000300000000034120000000000000100"},
#define CLOSE 6
    {"close", 72, 0, "3800000007000000000000000000000005"},
#define PREFETCH 7
    {"prefetch", 64, 2,
     "30000000080000000d00000000000000050000000000000002000000010000000000000000000000"
     "10000000000000000010000000000000"
     "01"},
#define READS 8
    {"reads", 48, 1,
     "2000000009000000000000000000000005000000000000000100000000000000200000000000000008"},
#define REPLY_OPENED 9
    {"reply to open", 32, 0, "100000000a0000000b00000000000000341200000000000001"},
#define REPLY_EMPTY 10
    {"empty reply", 16, 0, "000000000a0000000c000000faffffff"},
#define FAIL 11
    {"fail", 272, 0,
     "000100000b00000000000000f9ffffff080706050403020103000000000000004d00000000000000"
     "0900000000000000f9ffffff686f6d65206c6f7374"},
#define STAGE 12
    {"stage", 56, 0,
     "280000000d0000000e00000000000000080706050403020188776655443322110000000000000000"
     "0030"},
#define RESOLVE 13
    {"resolve", 56, 0,
     "280000000e00000000000000000000000807060504030201887766554433221107000000000000000000000000000000"
     "09"},
#define LAYER_FILE 14
    {"layer file", 56, 0,
     "28000000170000000f00000000000000080706050403020188776655443322110000000000000000"
     "0030"},
#define N_CONTROL 15
#define GET 15
    {"get", 48, 2,
     "434c5231010000001500000000000000080706050403020103000000020011001000000000000000"
     "0100000010"},
#define BLOCKS 16
    {"blocks", 32, 0, "434c5231020001001500000000000000080706050403020103000000000011"},
#define BLOCKS_FAILED 17
    {"failed blocks", 32, 0, "434c52310200000015000000faffffff080706050403020103000000000011"},
#define N_GOLDEN 18
};
static_assert(sizeof goldens / sizeof goldens[0] == N_GOLDEN, "names and rows agree");
static_assert(PC__WIRE_VERSION == 1, "new golden bytes, please");

#define MAX_GOLDEN_BYTES 512
#define REGION_BLOCKS (LENGTH >> PC_BLOCK_SHIFT)

static void decode(const struct golden *golden, unsigned char bytes[MAX_GOLDEN_BYTES])
{
    memset(bytes, 0, MAX_GOLDEN_BYTES);
    REQUIRE(golden->n_bytes <= MAX_GOLDEN_BYTES);
    for (size_t i = 0; golden->hex[2 * i] != '\0'; i++) {
        unsigned value;
        REQUIRE(i < golden->n_bytes && sscanf(golden->hex + 2 * i, "%2x", &value) == 1);
        bytes[i] = (unsigned char)value;
    }
}

static int parse_any(int which, const void *bytes, size_t n_bytes)
{
    return which < N_CONTROL ? control(bytes, n_bytes)
                             : data(bytes, n_bytes, REGION_BLOCKS, PC__DATA_MAX_RUNS);
}

/* A packet as this build writes it. */
static size_t pack(unsigned char *to, uint16_t type, uint32_t request_id, int32_t status,
                   const void *body, size_t body_bytes)
{
    const struct pc__ctl_header header = {.body_bytes = (uint32_t)body_bytes, .type = type,
                                          .request_id = request_id, .status = status};
    memcpy(to, &header, sizeof header);
    memcpy(to + sizeof header, body, body_bytes);
    return sizeof header + body_bytes;
}

static void expect_golden(int which, const unsigned char *packed, size_t n_bytes)
{
    unsigned char bytes[MAX_GOLDEN_BYTES];
    decode(&goldens[which], bytes);
    CHECK(n_bytes == goldens[which].n_bytes, "%s: %zu", goldens[which].name, n_bytes);
    for (size_t i = 0; i < n_bytes && i < goldens[which].n_bytes; i++)
        if (packed[i] != bytes[i]) {
            CHECK(packed[i] == bytes[i], "%s: byte %zu is %02x", goldens[which].name, i,
                  packed[i]);
            break;
        }
}

static void test_golden_parse(void)
{
    for (int i = 0; i < N_GOLDEN; i++) {
        unsigned char bytes[MAX_GOLDEN_BYTES];
        decode(&goldens[i], bytes);
        const int rc = parse_any(i, bytes, goldens[i].n_bytes);
        CHECK(rc == goldens[i].parsed, "%s: %d", goldens[i].name, rc);
    }
}

/* The structs of this build have the layout of the golden bytes. */
static void test_golden_pack(void)
{
    unsigned char packed[MAX_GOLDEN_BYTES];
    size_t n;

    const struct pc__ctl_hello hello = {.wire_version = 1, .trap = PC_TRAP_UFFD_FULL,
                                        .library_version = "0.1.0+abc"};
    n = pack(packed, PC__CTL_HELLO, 7, 0, &hello, sizeof hello);
    expect_golden(HELLO, packed, n);

    struct pc__ctl_region region = {.region = REGION, .base_address = BASE, .length_bytes = LENGTH,
                                    .medium = PC_MEDIUM_DISK};
    n = pack(packed, PC__CTL_CREATE, 8, 0, &region, sizeof region);
    expect_golden(CREATE, packed, n);
    region = (struct pc__ctl_region){.region = REGION};
    n = pack(packed, PC__CTL_SEAL, 9, 0, &region, sizeof region);
    expect_golden(SEAL, packed, n);
    n = pack(packed, PC__CTL_ABANDON, 10, 0, &region, sizeof region);
    expect_golden(ABANDON, packed, n);

    struct pc__ctl_open open = {.mapping_id = 5, .region = REGION, .version = 3, .address = BASE,
                                .length_bytes = LENGTH, .flags = PC_MAP_EXACT_READS};
    n = pack(packed, PC__CTL_OPEN, 11, 0, &open, sizeof open);
    expect_golden(OPEN, packed, n);
    open.inode = 0x1234;
    open.flags = PC_MAP_PRIVATE;
    n = pack(packed, PC__CTL_ATTACH, 12, 0, &open, sizeof open);
    expect_golden(ATTACH, packed, n);
    open = (struct pc__ctl_open){.mapping_id = 5};
    n = pack(packed, PC__CTL_CLOSE, 0, 0, &open, sizeof open);
    expect_golden(CLOSE, packed, n);

    struct { struct pc__ctl_runs head; struct pc_run runs[2]; } runs = {
        {.mapping_id = 5, .n_runs = 2, .wait = 1}, {{0, 16}, {0x1000, 1}}};
    n = pack(packed, PC__CTL_PREFETCH, 13, 0, &runs, sizeof runs);
    expect_golden(PREFETCH, packed, n);
    runs.head = (struct pc__ctl_runs){.mapping_id = 5, .n_runs = 1};
    runs.runs[0] = (struct pc_run){32, 8};
    n = pack(packed, PC__CTL_READS, 0, 0, &runs, sizeof runs - sizeof runs.runs[1]);
    expect_golden(READS, packed, n);

    const struct pc__ctl_opened opened = {.inode = 0x1234, .needs_trap = 1};
    n = pack(packed, PC__CTL_REPLY, 11, 0, &opened, sizeof opened);
    expect_golden(REPLY_OPENED, packed, n);
    n = pack(packed, PC__CTL_REPLY, 12, PC_ERR_NO_REGION, &opened, 0);
    expect_golden(REPLY_EMPTY, packed, n);
    const struct pc__ctl_fail fail = {.region = REGION, .version = 3, .block = 77, .server_id = 9,
                                      .error = PC_ERR_HOME_LOST, .cause = "home lost"};
    n = pack(packed, PC__CTL_FAIL, 0, PC_ERR_HOME_LOST, &fail, sizeof fail);
    expect_golden(FAIL, packed, n);

    struct pc__ctl_stage stage = {.region = REGION, .commit_id = COMMIT,
                                  .layer_bytes = 3 * PC_BLOCK_BYTES};
    n = pack(packed, PC__CTL_STAGE, 14, 0, &stage, sizeof stage);
    expect_golden(STAGE, packed, n);
    n = pack(packed, PC__CTL_LAYER_FILE, 15, 0, &stage, sizeof stage);
    expect_golden(LAYER_FILE, packed, n);
    stage.version = 7;
    stage.layer_bytes = 0;
    stage.mapping_id = 9;
    n = pack(packed, PC__CTL_RESOLVE, 0, 0, &stage, sizeof stage);
    expect_golden(RESOLVE, packed, n);

    struct { struct pc__data_header header; uint64_t runs[2]; } get = {
        {.magic = PC__DATA_MAGIC, .type = PC__DATA_GET, .request_id = 21, .region = REGION,
         .version = 3, .n_runs = 2, .n_blocks = 17},
        {pc__run_pack(0, 16), pc__run_pack(0x1000, 1)}};
    memcpy(packed, &get, sizeof get);
    expect_golden(GET, packed, sizeof get);
    get.header.type = PC__DATA_BLOCKS;
    get.header.flags = PC__DATA_HOLES;
    get.header.n_runs = 0;
    memcpy(packed, &get.header, sizeof get.header);
    expect_golden(BLOCKS, packed, sizeof get.header);
    get.header.flags = 0;
    get.header.status = PC_ERR_NO_REGION;
    memcpy(packed, &get.header, sizeof get.header);
    expect_golden(BLOCKS_FAILED, packed, sizeof get.header);
}

/* What the parsers hand out is what was in the packet. */
static void test_values(void)
{
    unsigned char bytes[MAX_GOLDEN_BYTES];
    struct pc__ctl_message message;
    struct pc__ctl_runs head;
    struct pc_run runs[PC__CTL_MAX_RUNS];

    decode(&goldens[PREFETCH], bytes);
    CHECK(parse_control(bytes, goldens[PREFETCH].n_bytes, &message, &head, runs, 2) == 2, "runs");
    CHECK(message.header.request_id == 13 && message.body_bytes == 48, "%u %zu",
          message.header.request_id, message.body_bytes);
    CHECK(head.mapping_id == 5 && head.n_runs == 2 && head.wait == 1, "head");
    CHECK(runs[0].first_block == 0 && runs[0].n_blocks == 16, "first run");
    CHECK(runs[1].first_block == 0x1000 && runs[1].n_blocks == 1, "second run");
    CHECK(parse_control(bytes, goldens[PREFETCH].n_bytes, &message, &head, runs, 1) ==
              PC_ERR_PROTOCOL, "no room for two runs");

    decode(&goldens[OPEN], bytes);
    CHECK(pc__ctl_parse(bytes, goldens[OPEN].n_bytes, &message) == PC_OK, "open");
    CHECK(message.body == bytes + 16, "the body follows the header");
    CHECK(pc__ctl_parse_runs(&message, &head, runs, 2) == PC_ERR_PROTOCOL, "OPEN has no runs");

    struct pc__data_header header;
    decode(&goldens[GET], bytes);
    CHECK(pc__data_parse_header(bytes, &header) == PC_OK, "get");
    CHECK(header.region == REGION && header.version == 3 && header.n_blocks == 17, "get");
    CHECK(pc__data_parse_runs(&header, bytes + 32, 16, REGION_BLOCKS, runs, 2) == 2, "get runs");
    CHECK(runs[0].first_block == 0 && runs[0].n_blocks == 16, "first run");
    CHECK(runs[1].first_block == 0x1000 && runs[1].n_blocks == 1, "second run");
    CHECK(pc__data_parse_runs(&header, bytes + 32, 16, REGION_BLOCKS, runs, 1) == PC_ERR_PROTOCOL,
          "no room for two runs");
    CHECK(pc__data_parse_runs(&header, bytes + 32, 16, 0x1000, runs, 2) == PC_ERR_PROTOCOL,
          "the last run is outside");
    CHECK(pc__data_parse_runs(&header, bytes + 32, 16, 0x1001, runs, 2) == 2, "just inside");
    CHECK(pc__data_parse_runs(&header, bytes + 32, 8, REGION_BLOCKS, runs, 2) == PC_ERR_PROTOCOL,
          "half of the runs");
    for (unsigned flags = 1; flags < 256; flags++) {
        const unsigned kinds = PC__DATA_LAYER | PC__DATA_CACHED | PC__DATA_HOME | PC__DATA_MEMBER;
        const bool is_one = !(flags & ~kinds) && !(flags & (flags - 1));
        header.flags = (uint16_t)flags;
        for (uint16_t type = PC__DATA_GET; type <= PC__DATA_HELD; type += 2) {
            struct pc__data_header parsed;
            header.type = type;
            CHECK((pc__data_parse_header(&header, &parsed) == PC_OK) ==
                      (is_one && type == PC__DATA_GET),
                  "flags %u of type %u", flags, type);
        }
    }
    decode(&goldens[BLOCKS], bytes);
    CHECK(pc__data_parse_header(bytes, &header) == PC_OK, "blocks");
    CHECK(pc__data_parse_runs(&header, bytes, 0, REGION_BLOCKS, runs, 2) == PC_ERR_PROTOCOL,
          "BLOCKS has no runs");
}

/* --------------------------------------------------------------- every length */

static void test_lengths(void)
{
    for (int i = 0; i < N_CONTROL; i++) {
        for (int is_fixed = 0; is_fixed < 2; is_fixed++) { /* header agrees with the cut, or not */
            for (size_t n = 0; n <= goldens[i].n_bytes + 24; n++) {
                unsigned char bytes[MAX_GOLDEN_BYTES];
                decode(&goldens[i], bytes);
                if (n == goldens[i].n_bytes)
                    continue;
                if (is_fixed && n < sizeof(struct pc__ctl_header))
                    continue;
                const uint32_t body_bytes = (uint32_t)(n - sizeof(struct pc__ctl_header));
                if (is_fixed)
                    memcpy(bytes, &body_bytes, sizeof body_bytes);
                const bool is_reply = i == REPLY_OPENED || i == REPLY_EMPTY;
                const int expected = is_fixed && is_reply ? PC_OK : PC_ERR_PROTOCOL;
                CHECK(control(bytes, n) == expected, "%s cut to %zu (%d)", goldens[i].name, n,
                      is_fixed);
            }
        }
    }

    static unsigned char large[PC__CTL_MAX_BYTES + 1];
    pack(large, PC__CTL_REPLY, 1, 0, "", 0);
    uint32_t body_bytes = PC__CTL_MAX_BYTES - 16;
    memcpy(large, &body_bytes, sizeof body_bytes);
    CHECK(control(large, PC__CTL_MAX_BYTES) == PC_OK, "the largest packet");
    body_bytes++;
    memcpy(large, &body_bytes, sizeof body_bytes);
    CHECK(control(large, PC__CTL_MAX_BYTES + 1) == PC_ERR_PROTOCOL, "one byte more");
}

/* Every number of runs at its limit. */
static void test_many_runs(void)
{
    static struct { struct pc__ctl_runs head; struct pc_run runs[PC__CTL_MAX_RUNS + 1]; } body;
    static unsigned char packet[sizeof(struct pc__ctl_header) + sizeof body];
    for (size_t i = 0; i <= PC__CTL_MAX_RUNS; i++)
        body.runs[i] = (struct pc_run){2 * i, 1};
    for (uint32_t n = PC__CTL_MAX_RUNS - 1; n <= PC__CTL_MAX_RUNS + 1; n++) {
        body.head.n_runs = n;
        const size_t n_bytes = pack(packet, PC__CTL_READS, 0, 0, &body,
                                    sizeof body.head + n * sizeof(struct pc_run));
        const int rc = control(packet, n_bytes);
        CHECK(rc == (n <= PC__CTL_MAX_RUNS ? (int)n : PC_ERR_PROTOCOL), "%u: %d", n, rc);
    }

    static struct { struct pc__data_header header; uint64_t runs[PC__DATA_MAX_RUNS + 1]; } get;
    for (size_t i = 0; i <= PC__DATA_MAX_RUNS; i++)
        get.runs[i] = pc__run_pack(2 * i, 1);
    for (uint16_t n = PC__DATA_MAX_RUNS - 1; n <= PC__DATA_MAX_RUNS + 1; n++) {
        get.header = (struct pc__data_header){.magic = PC__DATA_MAGIC, .type = PC__DATA_GET,
                                              .n_runs = n, .n_blocks = n};
        const int rc = data(&get, sizeof get.header + n * sizeof(uint64_t), 4096,
                            PC__DATA_MAX_RUNS);
        CHECK(rc == (n <= PC__DATA_MAX_RUNS ? (int)n : PC_ERR_PROTOCOL), "%u: %d", n, rc);
    }
}

/* -------------------------------------------------------------- every rule, broken */

static const struct breakage {
    const char *what;
    int golden;
    size_t offset, n_bytes;
    uint64_t value;
    int expected; /* PC_ERR_PROTOCOL, or what it parses to if the value is still fine */
} breakages[] = {
#define BAD PC_ERR_PROTOCOL
    {"type 0", CLOSE, 4, 2, 0, BAD},
    {"type 0 without a body", REPLY_EMPTY, 4, 2, 0, BAD},
    {"type LAST", CLOSE, 4, 2, PC__CTL_LAST, BAD},
    {"type 65535", CLOSE, 4, 2, 65535, BAD},
    {"type with another size", CLOSE, 4, 2, PC__CTL_SEAL, BAD},
    {"reserved", CLOSE, 6, 2, 1, BAD},
    {"body_bytes 4 GiB", CLOSE, 0, 4, UINT32_MAX, BAD},
    {"body_bytes one less", CLOSE, 0, 4, 55, BAD},
    {"request with a status", SEAL, 12, 4, (uint32_t)PC_ERR_SYSTEM, BAD},
    {"request with a positive status", SEAL, 12, 4, 1, BAD},
    {"reply with a positive status", REPLY_EMPTY, 12, 4, 1, BAD},
    {"reply with a newer build's status", REPLY_EMPTY, 12, 4, (uint32_t)(PC_ERR_LAST - 5), 0},
    {"fail with a positive status", FAIL, 12, 4, 7, BAD},
    {"hello of another wire version", HELLO, 16, 4, 99, 0},
    {"hello with another trap", HELLO, 20, 4, 99, 0},
    {"create off block", CREATE, 24, 8, BASE + 1, BAD},
    {"create in a medium that is none", CREATE, 40, 4, PC_MEDIUM_FILE + 1, BAD},
    {"create with a reserved field", CREATE, 44, 4, 1, BAD},
    {"create of nothing", CREATE, 32, 8, 0, BAD},
    {"create that wraps", CREATE, 32, 8, UINT64_MAX, BAD},
    {"create up to the last byte", CREATE, 32, 8, UINT64_MAX - BASE, 0},
    {"create one byte further", CREATE, 32, 8, UINT64_MAX - BASE + 1, BAD},
    {"open off block", OPEN, 40, 8, BASE + 8, BAD},
    {"open anywhere", OPEN, 40, 8, 0, 0},
    {"open of nothing", OPEN, 48, 8, 0, BAD},
    {"open that wraps", OPEN, 40, 8, UINT64_MAX - 4095, BAD},
    {"open with all flags", OPEN, 64, 4, 7, 0},
    {"open with an unknown flag", OPEN, 64, 4, 8, BAD},
    {"open with the smallest page", OPEN, 64, 4, 12u << 8, 0},
    {"open with the largest page", OPEN, 64, 4, 23u << 8 | 7, 0},
    {"open with a page below a block", OPEN, 64, 4, 11u << 8, BAD},
    {"open with a page that no request holds", OPEN, 64, 4, 24u << 8, BAD},
    {"open with a flag above the page", OPEN, 64, 4, 1u << 16, BAD},
    {"open with the highest flag", OPEN, 64, 4, 0x80000000u, BAD},
    {"open that follows, and is not private", OPEN, 68, 4, 1, BAD},
    {"attach that follows twice", ATTACH, 68, 4, 2, BAD},
    {"attach that wraps", ATTACH, 48, 8, UINT64_MAX, BAD},
    {"fail without an error", FAIL, 48, 4, 0, BAD},
    {"fail with a positive error", FAIL, 48, 4, 3, BAD},
    {"stage of no region", STAGE, 16, 8, 0, BAD},
    {"stage of no commit", STAGE, 24, 8, 0, BAD},
    {"stage with a version", STAGE, 32, 8, 1, BAD},
    {"stage of nothing", STAGE, 40, 8, 0, BAD},
    {"stage off block", STAGE, 40, 8, 3 * 4096 + 1, BAD},
    {"file of no region", LAYER_FILE, 16, 8, 0, BAD},
    {"file of no commit", LAYER_FILE, 24, 8, 0, BAD},
    {"file with a version", LAYER_FILE, 32, 8, 1, BAD},
    {"file of nothing", LAYER_FILE, 40, 8, 0, BAD},
    {"file off block", LAYER_FILE, 40, 8, 3 * 4096 + 1, BAD},
    {"resolve of no region", RESOLVE, 16, 8, 0, BAD},
    {"resolve of no commit", RESOLVE, 24, 8, 0, BAD},
    {"resolve: refused", RESOLVE, 32, 8, 0, 0},
    {"resolve of a layer", RESOLVE, 40, 8, 4096, BAD},
    {"no runs", PREFETCH, 24, 4, 0, BAD},
    {"one run fewer", PREFETCH, 24, 4, 1, BAD},
    {"one run more", PREFETCH, 24, 4, 3, BAD},
    {"4 G runs", PREFETCH, 24, 4, UINT32_MAX, BAD},
    {"runs that wrap to the right size", PREFETCH, 24, 4, 0x10000002u, BAD},
    {"wait too large", PREFETCH, 28, 4, PC__RUNS_LAST_WAIT + 1, BAD},
    {"empty run", PREFETCH, 40, 8, 0, BAD},
    {"run that wraps", PREFETCH, 32, 8, UINT64_MAX, BAD},
    {"run whose bytes wrap", PREFETCH, 32, 8, (UINT64_MAX >> 12) - 15, BAD},
    {"run up to the last block", PREFETCH, 32, 8, (UINT64_MAX >> 12) - 16, 2},
    {"run of everything", PREFETCH, 40, 8, UINT64_MAX, BAD},
    {"second run empty", PREFETCH, 56, 8, 0, BAD},
    {"reads: empty run", READS, 40, 8, 0, BAD},
    {"magic", GET, 0, 4, 0x31524c44u, BAD},
    {"magic of the other end", GET, 0, 4, 0x434c5231u, BAD},
    {"data type 0", GET, 4, 2, 0, BAD},
    {"data type LAST", GET, 4, 2, PC__DATA_LAST, BAD},
    {"get with a flag", GET, 6, 2, PC__DATA_HOLES, BAD},
    {"get with a status", GET, 12, 4, (uint32_t)PC_ERR_SYSTEM, BAD},
    {"get of no runs", GET, 28, 2, 0, BAD},
    {"get of one run fewer", GET, 28, 2, 1, BAD},
    {"get of one run more", GET, 28, 2, 3, BAD},
    {"get of 65535 runs", GET, 28, 2, 65535, BAD},
    {"get of no blocks", GET, 30, 2, 0, BAD},
    {"get of fewer blocks than runs", GET, 30, 2, 1, BAD},
    {"get of fewer blocks than the runs have", GET, 30, 2, 16, BAD},
    {"get of more blocks than the runs have", GET, 30, 2, 18, BAD},
    {"get of too many blocks", GET, 30, 2, PC__DATA_MAX_BLOCKS + 1, BAD},
    {"get of an empty run", GET, 32, 8, 0, BAD},
    {"get outside the region", GET, 40, 8, REGION_BLOCKS << 24 | 1, BAD},
    {"get across the end", GET, 32, 8, (REGION_BLOCKS - 15) << 24 | 16, BAD},
    {"get up to the end", GET, 32, 8, (REGION_BLOCKS - 16) << 24 | 16, 2},
    {"get far outside", GET, 40, 8, UINT64_MAX << 24 | 1, BAD},
    {"get whose sum wraps 16 bits", GET, 32, 8, 65536 + 16, BAD},
    {"blocks with an unknown flag", BLOCKS, 6, 2, 2, BAD},
    {"blocks with a positive status", BLOCKS, 12, 4, 1, BAD},
    {"blocks without blocks", BLOCKS, 30, 2, 0, BAD},
    {"blocks: the most", BLOCKS, 30, 2, PC__DATA_MAX_BLOCKS, 0},
    {"blocks: too many", BLOCKS, 30, 2, PC__DATA_MAX_BLOCKS + 1, BAD},
    {"no holes and a positive status", BLOCKS_FAILED, 12, 4, 1, BAD},
    {"failed blocks with holes", BLOCKS_FAILED, 6, 2, PC__DATA_HOLES, BAD},
#undef BAD
};

static void test_breakages(void)
{
    for (size_t i = 0; i < sizeof breakages / sizeof breakages[0]; i++) {
        const struct breakage *breakage = &breakages[i];
        unsigned char bytes[MAX_GOLDEN_BYTES];
        decode(&goldens[breakage->golden], bytes);
        memcpy(bytes + breakage->offset, &breakage->value, breakage->n_bytes);
        const int rc = parse_any(breakage->golden, bytes, goldens[breakage->golden].n_bytes);
        CHECK(rc == breakage->expected, "%s: %d", breakage->what, rc);
    }
}

/* Header and rows as they go out, by struct.pack too; then what breaks them. */
static int rows_message(const unsigned char *bytes, size_t n_bytes, uint64_t region_bytes,
                        size_t capacity)
{
    const size_t header_bytes = sizeof(struct pc__data_header);
    int rc[N_PLACES];
    REQUIRE(n_bytes >= header_bytes + sizeof(struct pc__data_rows));
    for (enum place place = AT_BEGIN; place < N_PLACES; place++) {
        struct pc__data_header header;
        struct pc__data_rows rows;
        uint64_t offsets[4];
        rc[place] = pc__data_parse_header(guarded(place, bytes, header_bytes), &header);
        if (rc[place] == PC_OK)
            rc[place] = pc__data_parse_rows(guarded(place, bytes + header_bytes, sizeof rows),
                                            &rows);
        if (rc[place] != PC_OK || header.type != PC__DATA_GET_ROWS)
            continue;
        const size_t rest_bytes = n_bytes - header_bytes - sizeof rows;
        rc[place] = pc__data_parse_offsets(
            &rows, guarded(place, bytes + header_bytes + sizeof rows, rest_bytes), rest_bytes,
            region_bytes, offsets, capacity);
    }
    CHECK(rc[AT_BEGIN] == rc[AT_END], "%d, %d", rc[AT_BEGIN], rc[AT_END]);
    return rc[AT_END];
}

static void test_rows(void)
{
    static const struct golden get = {
        "get rows", 64, 2,
        "434c523104000000150000000000000008070605040302010300000000000000"
        "00010000000000000200000000000000"
        "0010000000000000" "00ff000000000000"};
    static const struct golden gather = {
        "gather", 72, 0,
        "380000000f0000000d0000000000000005000000000000004000000000000000"
        "00020000000000000001000000000000008000000000000000100000000000000300000000000000"};
    static const struct { const char *what; size_t offset, n_bytes; uint64_t value; int expected; }
        each[] = {{"as it is", 0, 1, 'C', 2},
                  {"with a flag", 6, 2, 1, PC_ERR_PROTOCOL},
                  {"with a status", 12, 4, (uint32_t)PC_ERR_SYSTEM, PC_ERR_PROTOCOL},
                  {"with runs", 28, 2, 1, PC_ERR_PROTOCOL},
                  {"with blocks", 30, 2, 1, PC_ERR_PROTOCOL},
                  {"rows of nothing", 32, 8, 0, PC_ERR_PROTOCOL},
                  {"rows of a block", 32, 8, 4096, PC_ERR_PROTOCOL},
                  {"rows that are longer than what is left", 32, 8, 4095, PC_ERR_PROTOCOL},
                  {"rows of 16 EiB", 32, 8, UINT64_MAX, PC_ERR_PROTOCOL},
                  {"no rows", 40, 4, 0, PC_ERR_PROTOCOL},
                  {"one row fewer", 40, 4, 1, PC_ERR_PROTOCOL},
                  {"one row more", 40, 4, 3, PC_ERR_PROTOCOL},
                  {"too many rows", 40, 4, 8193, PC_ERR_PROTOCOL},
                  {"something reserved", 44, 4, 1, PC_ERR_PROTOCOL},
                  {"the last row", 48, 8, 0x10000 - 256, 2},
                  {"past the end", 48, 8, 0x10000 - 255, PC_ERR_PROTOCOL},
                  {"far past the end", 56, 8, UINT64_MAX, PC_ERR_PROTOCOL},
                  {"an answer", 4, 2, PC__DATA_ROWS, 0}},
        asked[] = {{"as it is", 0, 1, 56, 0},
                   {"no ids", 64, 4, 0, PC_ERR_PROTOCOL},
                   {"the most ids", 64, 4, 8192, 0},
                   {"too many ids", 64, 4, 8193, PC_ERR_PROTOCOL},
                   {"too many bytes", 40, 8, 4000, 0},
                   {"something reserved", 68, 4, 1, PC_ERR_PROTOCOL},
                   {"rows of nothing", 40, 8, 0, PC_ERR_PROTOCOL},
                   {"rows of a block", 40, 8, 4096, PC_ERR_PROTOCOL},
                   {"not at a block", 56, 8, 4097, PC_ERR_PROTOCOL},
                   {"past the memfd", 56, 8, 0x8000, PC_ERR_PROTOCOL}};
    unsigned char bytes[MAX_GOLDEN_BYTES];
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
        decode(&get, bytes);
        memcpy(bytes + each[i].offset, &each[i].value, each[i].n_bytes);
        const int rc = rows_message(bytes, get.n_bytes, 0x10000, 4);
        CHECK(rc == each[i].expected, "%s: %d", each[i].what, rc);
    }
    decode(&get, bytes);
    CHECK(rows_message(bytes, get.n_bytes, 255, 4) == PC_ERR_PROTOCOL, "a region of less than a row");
    CHECK(rows_message(bytes, get.n_bytes, 0x10000, 1) == PC_ERR_PROTOCOL, "no room");
    bytes[32] = 0xff, bytes[33] = 0x0f;
    CHECK(rows_message(bytes, get.n_bytes, 0xff00 + 4095, 4) == 2, "the longest rows");
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        decode(&gather, bytes);
        memcpy(bytes + asked[i].offset, &asked[i].value, asked[i].n_bytes);
        const int rc = control(bytes, gather.n_bytes);
        CHECK(rc == asked[i].expected, "%s: %d", asked[i].what, rc);
    }
    /* 4 MiB and no more, whatever the rows are. */
    decode(&gather, bytes);
    bytes[64] = 0, bytes[65] = 8; /* 2048 of 2048 bytes, and one more */
    bytes[40] = 0, bytes[41] = 8;
    CHECK(control(bytes, gather.n_bytes) == 0, "4 MiB");
    bytes[64] = 1;
    CHECK(control(bytes, gather.n_bytes) == PC_ERR_PROTOCOL, "more than 4 MiB");
    /* A ROWS that failed is its header. */
    decode(&get, bytes);
    struct pc__data_header header;
    bytes[4] = PC__DATA_ROWS, bytes[12] = 0xfa, bytes[13] = bytes[14] = bytes[15] = 0xff;
    CHECK(pc__data_parse_header(bytes, &header) == 0 && header.status == PC_ERR_NO_REGION, "failed");
    bytes[15] = 0x7f;
    CHECK(pc__data_parse_header(bytes, &header) == PC_ERR_PROTOCOL, "a positive status");
}

/* Rules that another rule covers in a whole message: callers may come by another way. */
static void test_rules_alone(void)
{
    static struct { struct pc__ctl_runs head; struct pc_run runs[PC__CTL_MAX_RUNS + 1]; } body;
    static struct pc_run runs[PC__CTL_MAX_RUNS + 1];
    struct pc__ctl_runs head;

    for (size_t i = 0; i <= PC__CTL_MAX_RUNS; i++)
        body.runs[i] = (struct pc_run){i, 1};
    struct pc__ctl_message message = {.header.type = PC__CTL_READS, .body = &body,
                                      .body_bytes = sizeof body};
    body.head.n_runs = PC__CTL_MAX_RUNS + 1;
    CHECK(pc__ctl_parse_runs(&message, &head, runs, PC__CTL_MAX_RUNS + 1) == PC_ERR_PROTOCOL,
          "room for more runs than there may be");
    body.head.n_runs = 1;
    message.body_bytes = sizeof body.head + sizeof body.runs[0];
    CHECK(pc__ctl_parse_runs(&message, &head, runs, 1) == 1, "one run");
    message.header.type = PC__CTL_REPLY;
    CHECK(pc__ctl_parse_runs(&message, &head, runs, 1) == PC_ERR_PROTOCOL, "runs of a REPLY");

    const uint64_t packed[2] = {pc__run_pack(0, 17), pc__run_pack(0x1000, 0)};
    struct pc__data_header header = {.type = PC__DATA_GET, .n_runs = 2, .n_blocks = 17};
    CHECK(pc__data_parse_runs(&header, packed, sizeof packed, REGION_BLOCKS, runs, 2) ==
              PC_ERR_PROTOCOL, "an empty run and the right sum");
    header.n_runs = 1;
    CHECK(pc__data_parse_runs(&header, packed, sizeof packed[0], REGION_BLOCKS, runs, 2) == 1,
          "one run");
    header.type = PC__DATA_BLOCKS;
    CHECK(pc__data_parse_runs(&header, packed, sizeof packed[0], REGION_BLOCKS, runs, 2) ==
              PC_ERR_PROTOCOL, "runs of BLOCKS");

    header = (struct pc__data_header){.magic = PC__DATA_MAGIC, .type = PC__DATA_GET};
    CHECK(pc__data_parse_header(&header, &header) == PC_ERR_PROTOCOL, "get of nothing");
    header.n_runs = 2;
    header.n_blocks = 1;
    CHECK(pc__data_parse_header(&header, &header) == PC_ERR_PROTOCOL, "fewer blocks than runs");
}

static void test_last_words(void)
{
    unsigned char bytes[MAX_GOLDEN_BYTES];
    const struct pc__ctl_last_words sound = {.task = {[23] = 1}, .region = REGION, .version = 3,
                                             .block = 77, .error = PC_ERR_HOME_LOST};
    size_t n = pack(bytes, PC__CTL_LAST_WORDS, 9, 0, &sound, sizeof sound);
    CHECK(n == 72 && control(bytes, n) == PC_OK, "%zu bytes", n);
    struct pc__ctl_last_words bad = sound;
    bad.task[23] = 0;
    n = pack(bytes, PC__CTL_LAST_WORDS, 9, 0, &bad, sizeof bad);
    CHECK(control(bytes, n) == PC_ERR_PROTOCOL, "of no task");
    bad = sound;
    bad.error = 0;
    n = pack(bytes, PC__CTL_LAST_WORDS, 9, 0, &bad, sizeof bad);
    CHECK(control(bytes, n) == PC_ERR_PROTOCOL, "without a cause");
    bad = sound;
    bad.reserved = 1;
    n = pack(bytes, PC__CTL_LAST_WORDS, 9, 0, &bad, sizeof bad);
    CHECK(control(bytes, n) == PC_ERR_PROTOCOL, "with what nobody knows");
    for (size_t cut = 1; cut <= sizeof sound; cut++) {
        n = pack(bytes, PC__CTL_LAST_WORDS, 9, 0, &sound, sizeof sound - cut);
        CHECK(control(bytes, n) == PC_ERR_PROTOCOL, "%zu bytes less", cut);
    }
}

static void test_texts_end(void)
{
    unsigned char bytes[MAX_GOLDEN_BYTES];

    decode(&goldens[HELLO], bytes);
    memset(bytes + 32, 'v', 48);
    CHECK(control(bytes, 80) == PC_ERR_PROTOCOL, "hello without an end");
    bytes[79] = '\0';
    CHECK(control(bytes, 80) == PC_OK, "hello that ends at its last byte");
    decode(&goldens[FAIL], bytes);
    memset(bytes + 52, 'v', 220);
    CHECK(control(bytes, 272) == PC_ERR_PROTOCOL, "fail without an end");
    bytes[271] = '\0';
    CHECK(control(bytes, 272) == PC_OK, "fail that ends at its last byte");
}

int main(void)
{
    make_arena();
    test_golden_parse();
    test_golden_pack();
    test_values();
    test_lengths();
    test_many_runs();
    test_breakages();
    test_rows();
    test_rules_alone();
    test_last_words();
    test_texts_end();
    return test_result();
}
