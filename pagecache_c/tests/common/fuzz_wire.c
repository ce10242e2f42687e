/* fuzz_wire.c - the parsers of wire.c against arbitrary bytes.
 *
 * With clang: a libFuzzer target that begins with the same seeds. With -DFUZZ_STANDALONE: a program with its own mutator, the same
 * inputs for the same seed: fuzz_wire_standalone [seconds [count [seed]]].
 *
 * Input: one byte that chooses the parser, then the message. What a parser accepts must keep the
 * promises in wire.c's header; anything else is a trap. Inputs are copied to an allocation of
 * exactly their size, so that ASan sees a read past the end.
 */
#include "common/wire.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t n_bytes);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void must_be_rows(uint64_t row_bytes, uint64_t n_rows)
{
    must(row_bytes >= 1 && row_bytes <= PC__DATA_MAX_ROW_BYTES);
    must(n_rows >= 1 && n_rows <= PC__DATA_MAX_ROWS);
    must(row_bytes * n_rows <= PC__DATA_MAX_ROWS_BYTES);
}

/* What follows the header of a GET_ROWS. */
static void try_rows(const uint8_t *bytes, size_t n_bytes, uint64_t region_bytes)
{
    static const uint64_t untouched = 0xabababababababab;
    uint64_t offsets[33];
    struct pc__data_rows rows;

    if (n_bytes < sizeof rows || pc__data_parse_rows(bytes, &rows) != PC_OK)
        return;
    must_be_rows(rows.row_bytes, rows.n_rows);
    must(rows.reserved == 0);
    offsets[32] = untouched;
    const int n = pc__data_parse_offsets(&rows, bytes + sizeof rows, n_bytes - sizeof rows,
                                         region_bytes, offsets, 32);
    must(offsets[32] == untouched);
    must(n < 0 || (uint32_t)n == rows.n_rows);
    for (int i = 0; i < n; i++)
        must(offsets[i] < region_bytes && rows.row_bytes <= region_bytes - offsets[i]);
}

static void try_control(const uint8_t *packet, size_t n_bytes)
{
    static const struct pc_run untouched = {0xabababababababab, 0xabababababababab};
    struct pc_run runs[33];
    struct pc__ctl_message message;
    struct pc__ctl_runs head;

    if (pc__ctl_parse(packet, n_bytes, &message) != PC_OK)
        return;
    must(n_bytes <= PC__CTL_MAX_BYTES && message.body_bytes + sizeof message.header == n_bytes);
    must(message.body == packet + sizeof message.header);
    must(message.header.type > 0 && message.header.type < PC__CTL_LAST);
    must(message.header.reserved == 0 && message.header.status <= 0);
    if (message.header.type == PC__CTL_HELLO) {
        struct pc__ctl_hello hello;
        must(message.body_bytes == sizeof hello);
        memcpy(&hello, message.body, sizeof hello);
        must(strnlen(hello.library_version, sizeof hello.library_version) <
             sizeof hello.library_version);
    }
    if (message.header.type == PC__CTL_OPEN || message.header.type == PC__CTL_ATTACH) {
        struct pc__ctl_open open;
        must(message.body_bytes == sizeof open);
        memcpy(&open, message.body, sizeof open);
        must(open.follows <= (open.flags & PC_MAP_PRIVATE) &&
             (open.flags & 0xffu) <= (PC_MAP_PRIVATE | PC_MAP_EXACT_READS | PC_MAP_FIXED) &&
             open.flags >> PC_MAP_PAGE_SHIFT <= 23);
        must(open.length_bytes > 0 && open.address + open.length_bytes > open.address);
    }
    if (message.header.type == PC__CTL_STAGE || message.header.type == PC__CTL_RESOLVE ||
        message.header.type == PC__CTL_LAYER_FILE) {
        struct pc__ctl_stage stage;
        must(message.body_bytes == sizeof stage);
        memcpy(&stage, message.body, sizeof stage);
        must(stage.region != 0 && stage.commit_id != 0 &&
             stage.layer_bytes % PC_BLOCK_BYTES == 0);
        must((message.header.type != PC__CTL_RESOLVE) == (stage.layer_bytes > 0));
    }
    if (message.header.type == PC__CTL_GATHER) {
        struct pc__ctl_gather gather;
        must(message.body_bytes == sizeof gather);
        memcpy(&gather, message.body, sizeof gather);
        must(gather.reserved == 0 && gather.at_bytes < gather.memfd_bytes);
        must_be_rows(gather.rows.row_bytes, gather.n_ids);
    }
    if (message.header.type == PC__CTL_FAIL) {
        struct pc__ctl_fail fail;
        must(message.body_bytes == sizeof fail);
        memcpy(&fail, message.body, sizeof fail);
        must(fail.error < 0 && strnlen(fail.cause, sizeof fail.cause) < sizeof fail.cause);
    }
    if (message.header.type == PC__CTL_LAST_WORDS) {
        struct pc__ctl_last_words words;
        must(message.body_bytes == sizeof words);
        memcpy(&words, message.body, sizeof words);
        must(words.error < 0 && words.reserved == 0 && pc__is_task(words.task));
    }
    if (message.header.type == PC__CTL_RETIRE) {
        struct pc__ctl_retire retire;
        uint64_t servers[33];
        servers[32] = untouched.n_blocks;
        const int n = pc__ctl_parse_retire(&message, &retire, servers, 32);
        must(servers[32] == untouched.n_blocks && n <= 32);
        must(n < 0 || (retire.region != 0 && retire.n_servers == (uint32_t)n &&
                       retire.alone <= (n ? 0u : 1u)));
        must(n < 0 || message.body_bytes == sizeof retire + (size_t)n * sizeof servers[0]);
    }
    runs[32] = untouched;
    const int n_runs = pc__ctl_parse_runs(&message, &head, runs, 32);
    must(memcmp(&runs[32], &untouched, sizeof untouched) == 0);
    if (n_runs < 0)
        return;
    must(message.header.type == PC__CTL_PREFETCH || message.header.type == PC__CTL_READS);
    must(n_runs >= 1 && n_runs <= 32 && (uint32_t)n_runs == head.n_runs);
    must(head.wait <= PC__RUNS_LAST_WAIT);
    for (int i = 0; i < n_runs; i++) {
        const uint64_t end = runs[i].first_block + runs[i].n_blocks;
        must(end > runs[i].first_block && end <= UINT64_MAX >> PC_BLOCK_SHIFT);
    }
}

static void try_data(const uint8_t *bytes, size_t n_bytes, uint64_t region_blocks)
{
    static const struct pc_run untouched = {0xabababababababab, 0xabababababababab};
    struct pc_run runs[33];
    struct pc__data_header header;

    if (n_bytes < sizeof header || pc__data_parse_header(bytes, &header) != PC_OK)
        return;
    must(header.magic == PC__DATA_MAGIC && header.n_blocks <= PC__DATA_MAX_BLOCKS);
    if (header.type == PC__DATA_GET_ROWS || header.type == PC__DATA_ROWS) {
        must(header.flags == 0 && header.n_runs == 0 && header.n_blocks == 0);
        must(header.status <= 0 && (header.type == PC__DATA_ROWS || header.status == 0));
        try_rows(bytes + sizeof header, n_bytes - sizeof header, region_blocks << PC_BLOCK_SHIFT);
        return;
    }
    if (header.type == PC__DATA_RETIRE || header.type == PC__DATA_RETIRED) {
        must(header.flags == 0 && header.n_runs == 0 && header.n_blocks == 0);
        must(header.region != 0 && header.version == 0 && header.status <= 0);
        must(header.type == PC__DATA_RETIRED || header.status == 0);
        return;
    }
    must(header.type == PC__DATA_GET || header.type == PC__DATA_HELD ||
         header.type == PC__DATA_BLOCKS);
    if (header.type != PC__DATA_BLOCKS)
        must(header.n_runs >= 1 && header.n_runs <= PC__DATA_MAX_RUNS && header.status == 0 &&
             (header.flags & (header.flags - 1)) == 0 && /* a GET is of one kind */
             (header.type == PC__DATA_GET || header.flags == 0));
    else
        must(header.status <= 0 &&
             (header.flags & ~(PC__DATA_HOLES | PC__DATA_CACHED | PC__DATA_ELSEWHERE)) == 0);

    runs[32] = untouched;
    const int n_runs = pc__data_parse_runs(&header, bytes + sizeof header,
                                           n_bytes - sizeof header, region_blocks, runs, 32);
    must(memcmp(&runs[32], &untouched, sizeof untouched) == 0);
    if (n_runs < 0)
        return;
    uint64_t n_blocks = 0;
    must(n_runs == header.n_runs);
    for (int i = 0; i < n_runs; i++) {
        must(runs[i].n_blocks > 0 && runs[i].first_block + runs[i].n_blocks <= region_blocks);
        n_blocks += runs[i].n_blocks;
    }
    must(n_blocks == header.n_blocks);
}

/* The file's size comes first. Its pages are not there: only what says where they are. */
static void try_layer(const uint8_t *bytes, size_t n_bytes, uint64_t region_blocks)
{
    struct pc__layer_head head;
    const struct pc_run *runs;
    uint64_t layer_bytes, n_blocks = 0, end = 0;

    if (n_bytes < sizeof layer_bytes)
        return;
    memcpy(&layer_bytes, bytes, sizeof layer_bytes);
    if (pc__layer_parse(bytes + sizeof layer_bytes, n_bytes - sizeof layer_bytes, layer_bytes,
                        region_blocks, &head, &runs) != PC_OK)
        return;
    must((const uint8_t *)runs == bytes + sizeof layer_bytes + sizeof head);
    must(sizeof head + head.n_runs * sizeof *runs <= n_bytes - sizeof layer_bytes);
    must(head.region != 0 && head.commit_id != 0 && head.flags <= PC__LAYER_MADE_WHOLE);
    must(head.n_runs >= 1 || head.flags == PC__LAYER_MADE_WHOLE);
    must(head.data_offset >= sizeof head + head.n_runs * sizeof *runs);
    for (uint32_t i = 0; i < head.n_runs; i++) {
        must(runs[i].n_blocks > 0 && runs[i].first_block >= end);
        end = runs[i].first_block + runs[i].n_blocks;
        must(end > runs[i].first_block && end <= UINT64_MAX >> PC_BLOCK_SHIFT);
        must(region_blocks == 0 || end <= region_blocks);
        n_blocks += runs[i].n_blocks;
    }
    must(n_blocks == head.n_blocks && head.n_blocks <= UINT64_MAX >> PC_BLOCK_SHIFT);
    must(layer_bytes - head.data_offset == n_blocks << PC_BLOCK_SHIFT);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    uint8_t *exact = malloc(n_bytes - 1);
    must(exact != NULL || n_bytes == 1);
    if (n_bytes > 1)
        memcpy(exact, input + 1, n_bytes - 1);
    const uint64_t region_blocks = input[0] & 2 ? 0x30000 : 1ull << input[0] / 4 % 34;
    if (input[0] & 1)
        try_control(exact, n_bytes - 1);
    else if (input[0] & 0x80)
        try_layer(exact, n_bytes - 1, input[0] & 0x40 ? 0 : region_blocks);
    else
        try_data(exact, n_bytes - 1, region_blocks);
    free(exact);
    return 0;
}

#define MAX_SEED_BYTES 1024

static uint64_t random_state;

static uint64_t next_random(void) /* xorshift64* */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1dull;
}

/* A message that parses, more or less. */
static size_t make_seed(uint8_t *to)
{
    const uint16_t type = (uint16_t)(next_random() % (PC__CTL_LAST + 1));
    static const size_t sizes[] = {0, sizeof(struct pc__ctl_hello), sizeof(struct pc__ctl_region),
                                   sizeof(struct pc__ctl_open), sizeof(struct pc__ctl_fail),
                                   sizeof(struct pc__ctl_stage), sizeof(struct pc__ctl_gather)};
    const size_t n_sizes = sizeof sizes / sizeof sizes[0];

    if (next_random() % 4 == 0) {
        struct pc__layer_head head = {.magic = PC__LAYER_MAGIC, .region = next_random(),
                                      .commit_id = next_random(),
                                      .n_runs = (uint32_t)(1 + next_random() % 33)};
        uint64_t at = 0;
        for (uint32_t i = 0; i < head.n_runs; i++) {
            const struct pc_run run = {at + next_random() % 64, 1 + next_random() % 64};
            memcpy(to + 9 + sizeof head + i * sizeof run, &run, sizeof run);
            at = run.first_block + run.n_blocks;
            head.n_blocks += run.n_blocks;
        }
        head.data_offset = pc__layer_data_offset(head.n_runs);
        const uint64_t layer_bytes = head.data_offset + (head.n_blocks << PC_BLOCK_SHIFT);
        to[0] = (uint8_t)((next_random() & ~1ull) | 0x80);
        memcpy(to + 1, &layer_bytes, sizeof layer_bytes);
        memcpy(to + 9, &head, sizeof head);
        return 9 + sizeof head + head.n_runs * sizeof(struct pc_run);
    }
    if (next_random() % 8 == 0) {
        const struct pc__data_header header = {
            .magic = PC__DATA_MAGIC,
            .type = next_random() % 4 ? PC__DATA_GET_ROWS : PC__DATA_ROWS};
        const struct pc__data_rows rows = {.row_bytes = 1 + next_random() % 4096,
                                           .n_rows = (uint32_t)(1 + next_random() % 33)};
        for (uint32_t i = 0; i < rows.n_rows; i++) {
            const uint64_t offset = next_random() % 0x40000000 >> next_random() % 30;
            memcpy(to + 1 + sizeof header + sizeof rows + i * sizeof offset, &offset,
                   sizeof offset);
        }
        to[0] = (uint8_t)(next_random() & 0x7eull);
        memcpy(to + 1, &header, sizeof header);
        memcpy(to + 1 + sizeof header, &rows, sizeof rows);
        return 1 + sizeof header + sizeof rows + rows.n_rows * sizeof(uint64_t);
    }
    if (next_random() % 16 == 0) {
        const struct pc__data_header header = {
            .magic = PC__DATA_MAGIC, .region = next_random(),
            .type = next_random() % 2 ? PC__DATA_RETIRE : PC__DATA_RETIRED};
        to[0] = (uint8_t)(next_random() & 0x7eull);
        memcpy(to + 1, &header, sizeof header);
        return 1 + sizeof header;
    }
    if (next_random() % 16 == 0) {
        const struct pc__ctl_retire retire = {.region = next_random(),
                                              .n_servers = (uint32_t)(next_random() % 35)};
        const struct pc__ctl_header header = {
            .type = PC__CTL_RETIRE,
            .body_bytes = (uint32_t)(sizeof retire + retire.n_servers * sizeof(uint64_t))};
        to[0] = 1;
        memcpy(to + 1, &header, sizeof header);
        memcpy(to + 1 + sizeof header, &retire, sizeof retire);
        return 1 + sizeof header + header.body_bytes;
    }
    if (next_random() % 16 == 0) {
        const struct pc__ctl_header header = {.type = PC__CTL_LAST_WORDS,
                                              .body_bytes = sizeof(struct pc__ctl_last_words)};
        const struct pc__ctl_last_words words = {.task = {[5] = (uint8_t)(next_random() % 4)},
                                                 .region = next_random(),
                                                 .error = (int32_t)(next_random() % 40) - 30};
        to[0] = 1;
        memcpy(to + 1, &header, sizeof header);
        memcpy(to + 1 + sizeof header, &words, sizeof words);
        return 1 + sizeof header + sizeof words;
    }
    if (next_random() % 8 == 0) {
        const struct pc__ctl_header header = {.type = PC__CTL_GATHER,
                                              .body_bytes = sizeof(struct pc__ctl_gather)};
        const struct pc__ctl_gather gather = {
            .rows = {.row_bytes = 1 + next_random() % 4096, .stride_bytes = next_random()},
            .memfd_bytes = next_random(), .at_bytes = next_random() % 64 * PC_BLOCK_BYTES,
            .n_ids = (uint32_t)(next_random() >> next_random() % 63) % 9000};
        to[0] = 1;
        memcpy(to + 1, &header, sizeof header);
        memcpy(to + 1 + sizeof header, &gather, sizeof gather);
        return 1 + sizeof header + sizeof gather;
    }
    if (next_random() % 2) {
        const uint16_t n_runs = (uint16_t)(1 + next_random() % 33);
        struct pc__data_header header = {.magic = PC__DATA_MAGIC,
                                         .type = (uint16_t)(next_random() % 4), .n_runs = n_runs};
        for (uint16_t i = 0; i < n_runs; i++) {
            const uint64_t run = pc__run_pack(next_random() % 0x40000, 1 + next_random() % 64);
            memcpy(to + 1 + sizeof header + i * sizeof run, &run, sizeof run);
            header.n_blocks = (uint16_t)(header.n_blocks + (run & 0xffffff));
        }
        to[0] = (uint8_t)(next_random() & 0x7eull);
        memcpy(to + 1, &header, sizeof header);
        return 1 + sizeof header + n_runs * sizeof(uint64_t);
    }
    struct pc__ctl_header header = {.type = type};
    uint8_t *body = to + 1 + sizeof header;
    if (type == PC__CTL_PREFETCH || type == PC__CTL_READS) {
        const struct pc__ctl_runs head = {.n_runs = (uint32_t)(1 + next_random() % 33),
                                          .wait = (uint32_t)(next_random() % (PC__RUNS_LAST_WAIT + 2))};
        memcpy(body, &head, sizeof head);
        for (uint32_t i = 0; i < head.n_runs; i++) {
            const struct pc_run run = {next_random() >> next_random() % 64,
                                       1 + next_random() % 64};
            memcpy(body + sizeof head + i * sizeof run, &run, sizeof run);
        }
        header.body_bytes = (uint32_t)(sizeof head + head.n_runs * sizeof(struct pc_run));
    } else {
        header.body_bytes = (uint32_t)sizes[next_random() % n_sizes];
        memset(body, next_random() % 4 ? 0 : 0xff, header.body_bytes);
        for (int i = 0; i < 4 && header.body_bytes >= 8; i++) {
            const uint64_t value = next_random() >> next_random() % 64 & ~0xfffull;
            memcpy(body + next_random() % (header.body_bytes / 8) * 8, &value, sizeof value);
        }
    }
    to[0] = 1;
    memcpy(to + 1, &header, sizeof header);
    return 1 + sizeof header + header.body_bytes;
}

static_assert(1 + sizeof(struct pc__ctl_header) + sizeof(struct pc__ctl_runs) +
              33 * sizeof(struct pc_run) <= MAX_SEED_BYTES, "the largest seed");

#ifdef FUZZ_STANDALONE
#include <stdio.h>
#include <time.h>

int main(int argc, char **argv)
{
    const double seconds = argc > 1 ? strtod(argv[1], NULL) : 20;
    const uint64_t max_count = argc > 2 ? strtoull(argv[2], NULL, 0) : UINT64_MAX;
    const uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1;
    const time_t began = time(NULL);
    static uint8_t input[4096];
    uint64_t n = 0;

    for (; n < max_count; n++) {
        if (n % 4096 == 0 && (double)(time(NULL) - began) >= seconds)
            break;
        random_state = (seed << 40) + n + 1; /* each input can be made again by its number */
        for (int i = 0; i < 4; i++)
            next_random();
        memset(input, 0, sizeof input);
        size_t n_bytes = make_seed(input);
        for (uint64_t k = next_random() % 4; k > 0; k--) {
            const uint64_t which = next_random() % 4, at = next_random() % n_bytes;
            if (which == 0)
                input[at] ^= (uint8_t)(1u << next_random() % 8);
            else if (which == 1)
                input[at] = (uint8_t)next_random();
            else if (which == 2)
                n_bytes = 1 + at;
            else
                n_bytes += next_random() % 9;
        }
        LLVMFuzzerTestOneInput(input, n_bytes);
    }
    printf("%llu inputs, seed %llu\n", (unsigned long long)n, (unsigned long long)seed);
    return 0;
}
#else
size_t LLVMFuzzerMutate(uint8_t *input, size_t n_bytes, size_t max_bytes);
size_t LLVMFuzzerCustomMutator(uint8_t *input, size_t n_bytes, size_t max_bytes, unsigned seed);

/* Mutations alone never get past the length and the magic: some inputs begin as a sound message,
 * and some get their length set right again. */
size_t LLVMFuzzerCustomMutator(uint8_t *input, size_t n_bytes, size_t max_bytes, unsigned seed)
{
    random_state = ((uint64_t)seed << 20) + 1;
    for (int i = 0; i < 4; i++)
        next_random();
    if (max_bytes >= MAX_SEED_BYTES && next_random() % 8 == 0) {
        memset(input, 0, MAX_SEED_BYTES);
        n_bytes = make_seed(input);
        if (next_random() % 2 == 0)
            return n_bytes;
    }
    n_bytes = LLVMFuzzerMutate(input, n_bytes, max_bytes);
    if (n_bytes > sizeof(struct pc__ctl_header) && (input[0] & 1) && next_random() % 2 == 0) {
        const uint32_t body_bytes = (uint32_t)(n_bytes - 1 - sizeof(struct pc__ctl_header));
        memcpy(input + 1, &body_bytes, sizeof body_bytes);
    }
    return n_bytes;
}
#endif
