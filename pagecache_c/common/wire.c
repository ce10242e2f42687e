/* wire.c - checks what arrives from a socket before anybody looks at it.
 *
 * Owns: the size of every control body (one table) and every rule that a message must keep.
 * Threads: any; nothing here has state. Locks: none.
 *
 * Invariants of what is handed out (fuzz_wire asserts the same ones):
 *   - header + body == the packet, and the body has its type's size;
 *   - every text ends inside its field;
 *   - every run has n_blocks > 0, and the byte address of its end fits 64 bits;
 *   - an address range does not wrap; bits without a meaning are 0;
 *   - a GET has 1 .. PC__DATA_MAX_RUNS runs that sum to n_blocks <= PC__DATA_MAX_BLOCKS;
 *   - rows are 1 .. PC__DATA_MAX_ROWS of 1 .. PC__DATA_MAX_ROW_BYTES, together at most
 *     PC__DATA_MAX_ROWS_BYTES, and those of a GET_ROWS lie in the region;
 *   - a layer has 1 or more runs, sorted and disjoint, that sum to n_blocks, and its size is what
 *     its runs and blocks take: block i of run k lies inside it.
 *
 * Does not: judge what only the receiver can know (is there such a region, is this request due,
 * is this the same build), keep a detail message, or look at a REPLY's body, whose shape depends
 * on the request. On failure *out and *head are untouched and runs[] is undefined.
 */
#include "common/wire.h"

#include <stdbool.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the data protocol is little-endian");
static_assert(sizeof(struct pc__ctl_region) == 32, "wire");
static_assert(sizeof(struct pc__ctl_open) == 56, "wire");
static_assert(sizeof(struct pc__ctl_opened) == 16, "wire");
static_assert(sizeof(struct pc__ctl_let_go) == 16, "wire");
static_assert(sizeof(struct pc__ctl_runs) == 16, "wire");
static_assert(sizeof(struct pc__ctl_stage) == 40, "wire");
static_assert(sizeof(struct pc__ctl_fail) == 256, "wire");
static_assert(sizeof(struct pc_run) == 16, "wire");
static_assert(sizeof(struct pc__ctl_header) + sizeof(struct pc__ctl_runs) +
              PC__CTL_MAX_RUNS * sizeof(struct pc_run) <= PC__CTL_MAX_BYTES, "runs fit a packet");
static_assert(PC__DATA_MAX_BLOCKS <= UINT16_MAX && PC__DATA_MAX_RUNS <= PC__DATA_MAX_BLOCKS,
              "counts fit their fields");

#define MAX_BODY_BYTES (PC__CTL_MAX_BYTES - (uint32_t)sizeof(struct pc__ctl_header))
#define KNOWN_MAP_FLAGS ((uint32_t)(PC_MAP_PRIVATE | PC_MAP_EXACT_READS | PC_MAP_FIXED))
#define PAGE_SHIFT_FLAGS (0xffu << PC_MAP_PAGE_SHIFT)
#define MAX_PAGE_SHIFT 23u /* 8 MiB */
static_assert(PC__DATA_MAX_BLOCKS == 1u << (MAX_PAGE_SHIFT - PC_BLOCK_SHIFT), "a request holds a page");

bool pc__map_flags_fit(uint32_t flags)
{
    const unsigned shift = pc__map_page_shift(flags);
    return !(flags & ~(KNOWN_MAP_FLAGS | PAGE_SHIFT_FLAGS)) &&
           (shift == 0 || (shift >= PC_BLOCK_SHIFT && shift <= MAX_PAGE_SHIFT));
}

/* A type without a row (0) has no sound body either. */
static const struct body_size {
    uint32_t min_bytes;
    uint32_t max_bytes;
} body_sizes[PC__CTL_LAST] = {
#define FIXED(type) {(uint32_t)sizeof(type), (uint32_t)sizeof(type)}
#define AT_LEAST(n_bytes) {(uint32_t)(n_bytes), MAX_BODY_BYTES}
    [PC__CTL_HELLO] = FIXED(struct pc__ctl_hello),
    [PC__CTL_CREATE] = FIXED(struct pc__ctl_region),
    [PC__CTL_SEAL] = FIXED(struct pc__ctl_region),
    [PC__CTL_ABANDON] = FIXED(struct pc__ctl_region),
    [PC__CTL_OPEN] = FIXED(struct pc__ctl_open),
    [PC__CTL_ATTACH] = FIXED(struct pc__ctl_open),
    [PC__CTL_CLOSE] = FIXED(struct pc__ctl_open),
    [PC__CTL_PREFETCH] = AT_LEAST(sizeof(struct pc__ctl_runs) + sizeof(struct pc_run)),
    [PC__CTL_READS] = AT_LEAST(sizeof(struct pc__ctl_runs) + sizeof(struct pc_run)),
    [PC__CTL_REPLY] = AT_LEAST(0),
    [PC__CTL_FAIL] = FIXED(struct pc__ctl_fail),
    [PC__CTL_PING] = AT_LEAST(0),
    [PC__CTL_STAGE] = FIXED(struct pc__ctl_stage),
    [PC__CTL_LAYER_FILE] = FIXED(struct pc__ctl_stage),
    [PC__CTL_RESOLVE] = FIXED(struct pc__ctl_stage),
    [PC__CTL_GATHER] = FIXED(struct pc__ctl_gather),
    [PC__CTL_EVICTED] = FIXED(struct pc__ctl_runs),
    [PC__CTL_LET_GO] = FIXED(struct pc__ctl_let_go),
    [PC__CTL_ENDED] = AT_LEAST(0),
    [PC__CTL_ATTACHED] = AT_LEAST(0),
    [PC__CTL_LEFT] = AT_LEAST(0),
    [PC__CTL_LAST_WORDS] = FIXED(struct pc__ctl_last_words),
    [PC__CTL_RETIRE] = AT_LEAST(sizeof(struct pc__ctl_retire)),
#undef FIXED
#undef AT_LEAST
};

bool pc__is_task(const uint8_t *task)
{
    static const uint8_t none[PC_TASK_BYTES];
    return memcmp(task, none, sizeof none) != 0;
}

static bool ends_inside(const char *text, size_t capacity)
{
    return memchr(text, '\0', capacity) != NULL;
}

static bool is_range(uint64_t address, uint64_t length_bytes)
{
    return length_bytes > 0 && address % PC_BLOCK_BYTES == 0 &&
           length_bytes <= UINT64_MAX - address;
}

/* Blocks whose end has a byte address. */
static bool is_run(struct pc_run run)
{
    const uint64_t n_addressable = UINT64_MAX >> PC_BLOCK_SHIFT;
    return run.n_blocks > 0 && run.n_blocks <= n_addressable &&
           run.first_block <= n_addressable - run.n_blocks;
}

/* The file's exact size is checked with its head (pc__layer_parse). */
static bool is_stage(enum pc__ctl_type type, const struct pc__ctl_stage *stage)
{
    if (stage->region == 0 || stage->commit_id == 0)
        return false;
    if (type == PC__CTL_RESOLVE)
        return stage->layer_bytes == 0;
    return stage->version == 0 && stage->layer_bytes > 0 &&
           stage->layer_bytes % PC_BLOCK_BYTES == 0;
}

/* As many as one answer holds. */
static bool are_rows(uint64_t row_bytes, uint64_t n_rows)
{
    return row_bytes > 0 && row_bytes <= PC__DATA_MAX_ROW_BYTES && n_rows > 0 &&
           n_rows <= PC__DATA_MAX_ROWS && n_rows * row_bytes <= PC__DATA_MAX_ROWS_BYTES;
}

static bool body_is_sound(enum pc__ctl_type type, const void *body)
{
    switch (type) {
    case PC__CTL_HELLO: {
        /* Nothing else is checked: another build's greeting deserves a polite refusal. */
        struct pc__ctl_hello hello;
        memcpy(&hello, body, sizeof hello);
        return ends_inside(hello.library_version, sizeof hello.library_version);
    }
    case PC__CTL_CREATE: {
        struct pc__ctl_region region;
        memcpy(&region, body, sizeof region);
        return is_range(region.base_address, region.length_bytes) &&
               region.medium <= PC_MEDIUM_FILE && region.reserved == 0;
    }
    case PC__CTL_OPEN:
    case PC__CTL_ATTACH: {
        struct pc__ctl_open open;
        memcpy(&open, body, sizeof open);
        return open.follows <= (open.flags & PC_MAP_PRIVATE ? 1u : 0u) &&
               pc__map_flags_fit(open.flags) &&
               is_range(open.address, open.length_bytes);
    }
    case PC__CTL_FAIL: {
        struct pc__ctl_fail fail;
        memcpy(&fail, body, sizeof fail);
        return fail.error < 0 && ends_inside(fail.cause, sizeof fail.cause);
    }
    case PC__CTL_LAST_WORDS: {
        struct pc__ctl_last_words words;
        memcpy(&words, body, sizeof words);
        return words.error < 0 && words.reserved == 0 && pc__is_task(words.task);
    }
    case PC__CTL_STAGE:
    case PC__CTL_LAYER_FILE:
    case PC__CTL_RESOLVE: {
        struct pc__ctl_stage stage;
        memcpy(&stage, body, sizeof stage);
        return is_stage(type, &stage);
    }
    case PC__CTL_GATHER: {
        struct pc__ctl_gather gather;
        memcpy(&gather, body, sizeof gather);
        return gather.reserved == 0 && gather.at_bytes % PC_BLOCK_BYTES == 0 &&
               gather.at_bytes < gather.memfd_bytes && are_rows(gather.rows.row_bytes, gather.n_ids);
    }
    case PC__CTL_EVICTED: {
        struct pc__ctl_runs runs;
        memcpy(&runs, body, sizeof runs);
        return runs.n_runs == 0 && runs.wait <= PC__EVICTED_READ;
    }
    case PC__CTL_RETIRE: {
        struct pc__ctl_retire retire;
        memcpy(&retire, body, sizeof retire);
        return retire.region != 0 && retire.n_servers <= PC__RETIRE_MOST &&
               retire.alone <= (retire.n_servers ? 0u : 1u);
    }
    case PC__CTL_SEAL:
    case PC__CTL_ABANDON:
    case PC__CTL_CLOSE:    /* only the id counts */
    case PC__CTL_PREFETCH:
    case PC__CTL_READS:    /* pc__ctl_parse_runs */
    case PC__CTL_REPLY:
    case PC__CTL_PING:
    case PC__CTL_ENDED:
    case PC__CTL_ATTACHED:
    case PC__CTL_LEFT:
    case PC__CTL_LET_GO:   /* only the id counts */
        return true;
    case PC__CTL_LAST:
        break;
    }
    return false;
}

int pc__ctl_parse(const void *packet, size_t packet_bytes, struct pc__ctl_message *out)
{
    struct pc__ctl_header header;

    if (packet_bytes < sizeof header)
        return PC_ERR_PROTOCOL;
    memcpy(&header, packet, sizeof header);
    const size_t body_bytes = packet_bytes - sizeof header;
    if (header.body_bytes != body_bytes || header.reserved != 0 || header.type >= PC__CTL_LAST)
        return PC_ERR_PROTOCOL;

    const struct body_size *size = &body_sizes[header.type];
    if (body_bytes < size->min_bytes || body_bytes > size->max_bytes)
        return PC_ERR_PROTOCOL;

    /* Only answers carry a status. Codes below PC_ERR_LAST may come from a newer build's hello. */
    const bool is_answer = header.type == PC__CTL_REPLY || header.type == PC__CTL_FAIL;
    if (is_answer ? header.status > 0 : header.status != 0)
        return PC_ERR_PROTOCOL;

    const void *body = (const char *)packet + sizeof header;
    if (!body_is_sound((enum pc__ctl_type)header.type, body))
        return PC_ERR_PROTOCOL;
    *out = (struct pc__ctl_message){.header = header, .body = body, .body_bytes = body_bytes};
    return PC_OK;
}

int pc__ctl_parse_runs(const struct pc__ctl_message *message, struct pc__ctl_runs *head,
                       struct pc_run *runs, size_t capacity)
{
    struct pc__ctl_runs checked;

    if (message->header.type != PC__CTL_PREFETCH && message->header.type != PC__CTL_READS)
        return PC_ERR_PROTOCOL;
    if (message->body_bytes < sizeof checked)
        return PC_ERR_PROTOCOL;
    memcpy(&checked, message->body, sizeof checked);
    if (checked.n_runs == 0 || checked.n_runs > PC__CTL_MAX_RUNS || checked.n_runs > capacity)
        return PC_ERR_PROTOCOL;
    if (checked.wait > PC__RUNS_LAST_WAIT)
        return PC_ERR_PROTOCOL;
    if (message->body_bytes != sizeof checked + checked.n_runs * sizeof *runs)
        return PC_ERR_PROTOCOL;

    const char *packed = (const char *)message->body + sizeof checked;
    for (uint32_t i = 0; i < checked.n_runs; i++) {
        struct pc_run run;
        memcpy(&run, packed + i * sizeof run, sizeof run);
        if (!is_run(run))
            return PC_ERR_PROTOCOL;
        runs[i] = run;
    }
    *head = checked;
    return (int)checked.n_runs;
}

int pc__ctl_parse_retire(const struct pc__ctl_message *message, struct pc__ctl_retire *head,
                         uint64_t *servers, size_t capacity)
{
    struct pc__ctl_retire checked;

    if (message->header.type != PC__CTL_RETIRE || message->body_bytes < sizeof checked)
        return PC_ERR_PROTOCOL;
    memcpy(&checked, message->body, sizeof checked);
    const size_t ids_bytes = checked.n_servers * sizeof *servers;
    if (checked.n_servers > PC__RETIRE_MOST || checked.n_servers > capacity ||
        message->body_bytes != sizeof checked + ids_bytes)
        return PC_ERR_PROTOCOL;
    if (ids_bytes)
        memcpy(servers, (const char *)message->body + sizeof checked, ids_bytes);
    *head = checked;
    return (int)checked.n_servers;
}

int pc__layer_parse(const void *bytes, size_t n_bytes, uint64_t layer_bytes, uint64_t region_blocks,
                    struct pc__layer_head *head, const struct pc_run **runs)
{
    struct pc__layer_head checked;

    if (n_bytes < sizeof checked || (uintptr_t)bytes % _Alignof(struct pc_run) != 0)
        return PC_ERR_PROTOCOL;
    memcpy(&checked, bytes, sizeof checked);
    const bool may_be_empty = checked.flags == PC__LAYER_MADE_WHOLE;
    if (checked.magic != PC__LAYER_MAGIC || checked.flags > PC__LAYER_MADE_WHOLE ||
        checked.region == 0 || checked.commit_id == 0 ||
        (!may_be_empty && (checked.n_blocks == 0 || checked.n_runs == 0)))
        return PC_ERR_PROTOCOL;
    if ((n_bytes - sizeof checked) / sizeof(struct pc_run) < checked.n_runs)
        return PC_ERR_PROTOCOL;
    if (checked.data_offset != pc__layer_data_offset(checked.n_runs) ||
        layer_bytes < checked.data_offset)
        return PC_ERR_PROTOCOL;
    const uint64_t data_bytes = layer_bytes - checked.data_offset;
    if (data_bytes % PC_BLOCK_BYTES != 0 || data_bytes / PC_BLOCK_BYTES != checked.n_blocks)
        return PC_ERR_PROTOCOL;

    const struct pc_run *at = (const struct pc_run *)((const char *)bytes + sizeof checked);
    uint64_t end = 0, n_blocks = 0; /* disjoint and addressable, so that the sum fits */
    for (uint32_t i = 0; i < checked.n_runs; i++) {
        if (!is_run(at[i]) || at[i].first_block < end)
            return PC_ERR_PROTOCOL;
        end = at[i].first_block + at[i].n_blocks;
        n_blocks += at[i].n_blocks;
    }
    if (n_blocks != checked.n_blocks || (region_blocks != 0 && end > region_blocks))
        return PC_ERR_PROTOCOL;
    *head = checked;
    *runs = at;
    return PC_OK;
}

static bool flags_fit(const struct pc__data_header *header)
{
    switch (header->type) {
    case PC__DATA_GET: /* of one kind */
        return header->flags == 0 || header->flags == PC__DATA_LAYER ||
               header->flags == PC__DATA_CACHED || header->flags == PC__DATA_HOME ||
               header->flags == PC__DATA_MEMBER;
    case PC__DATA_BLOCKS:
        return !(header->flags & ~(PC__DATA_HOLES | PC__DATA_CACHED | PC__DATA_ELSEWHERE));
    default:
        return header->flags == 0;
    }
}

int pc__data_parse_header(const void *bytes, struct pc__data_header *out)
{
    struct pc__data_header header;

    memcpy(&header, bytes, sizeof header);
    if (header.magic != PC__DATA_MAGIC || header.n_blocks > PC__DATA_MAX_BLOCKS ||
        header.n_runs > PC__DATA_MAX_RUNS)
        return PC_ERR_PROTOCOL;

    switch (header.type) {
    case PC__DATA_GET:
    case PC__DATA_HELD:
        if (!flags_fit(&header) || header.status != 0)
            return PC_ERR_PROTOCOL;
        if (header.n_runs == 0 || header.n_blocks < header.n_runs) /* a run is never empty */
            return PC_ERR_PROTOCOL;
        break;
    case PC__DATA_BLOCKS:
        if (!flags_fit(&header) || header.status > 0)
            return PC_ERR_PROTOCOL;
        if (header.status == 0 ? header.n_blocks == 0
                               : (header.flags & ~PC__DATA_CACHED) != 0)
            return PC_ERR_PROTOCOL;
        break;
    case PC__DATA_GET_ROWS:
    case PC__DATA_ROWS: /* how many follows the header */
        if (header.flags != 0 || header.n_runs != 0 || header.n_blocks != 0)
            return PC_ERR_PROTOCOL;
        if (header.type == PC__DATA_GET_ROWS ? header.status != 0 : header.status > 0)
            return PC_ERR_PROTOCOL;
        break;
    case PC__DATA_RETIRE:
    case PC__DATA_RETIRED: /* nothing follows */
        if (header.flags != 0 || header.n_runs != 0 || header.n_blocks != 0 ||
            header.version != 0 || header.region == 0)
            return PC_ERR_PROTOCOL;
        if (header.type == PC__DATA_RETIRE ? header.status != 0 : header.status > 0)
            return PC_ERR_PROTOCOL;
        break;
    default:
        return PC_ERR_PROTOCOL;
    }
    *out = header;
    return PC_OK;
}

int pc__data_parse_runs(const struct pc__data_header *header, const void *packed,
                        size_t packed_bytes, uint64_t region_blocks, struct pc_run *runs,
                        size_t capacity)
{
    const size_t n_runs = header->n_runs;
    uint64_t n_blocks = 0;

    if ((header->type != PC__DATA_GET && header->type != PC__DATA_HELD) || n_runs == 0 ||
        n_runs > PC__DATA_MAX_RUNS ||
        n_runs > capacity || packed_bytes != n_runs * sizeof(uint64_t))
        return PC_ERR_PROTOCOL;

    for (size_t i = 0; i < n_runs; i++) {
        uint64_t word;
        memcpy(&word, (const char *)packed + i * sizeof word, sizeof word);
        const struct pc_run run = pc__run_unpack(word);
        if (run.n_blocks == 0 || run.n_blocks > region_blocks ||
            run.first_block > region_blocks - run.n_blocks)
            return PC_ERR_PROTOCOL;
        n_blocks += run.n_blocks; /* 1024 * 2^24 at most */
        runs[i] = run;
    }
    if (n_blocks != header->n_blocks)
        return PC_ERR_PROTOCOL;
    return (int)n_runs;
}

int pc__data_parse_rows(const void *bytes, struct pc__data_rows *out)
{
    struct pc__data_rows rows;

    memcpy(&rows, bytes, sizeof rows);
    if (rows.reserved != 0 || !are_rows(rows.row_bytes, rows.n_rows))
        return PC_ERR_PROTOCOL;
    *out = rows;
    return PC_OK;
}

int pc__data_parse_offsets(const struct pc__data_rows *rows, const void *packed,
                           size_t packed_bytes, uint64_t region_bytes, uint64_t *offsets,
                           size_t capacity)
{
    if (!are_rows(rows->row_bytes, rows->n_rows) || rows->n_rows > capacity ||
        packed_bytes != rows->n_rows * sizeof(uint64_t) || rows->row_bytes > region_bytes)
        return PC_ERR_PROTOCOL;
    memcpy(offsets, packed, packed_bytes);
    uint64_t most = 0;
    for (uint32_t i = 0; i < rows->n_rows; i++)
        most = offsets[i] > most ? offsets[i] : most;
    return most <= region_bytes - rows->row_bytes ? (int)rows->n_rows : PC_ERR_PROTOCOL;
}
