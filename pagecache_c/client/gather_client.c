/* gather_client.c - rows by number, as the process sees it. See client.h and wire_data.h.
 *
 * The ids are sorted with their positions, so that rows that are asked for twice are asked of the
 * page server once, and everybody walks memory upwards. They go out in parts, several at a time: while
 * later ones are on their way, the rows of the first are copied out and its area is used again.
 *
 * Where nothing can be absent the rows are copied straight from the mapping. A private mapping has
 * blocks of its own, and rows of a block and more are fetched as blocks: then the blocks are made
 * resident first.
 *
 * Threads: any. Lock: client.lock around the tables and calls; never while copying or waiting.
 * A part goes out again after a re-attach, in new memory: a page server that lives still writes what
 * it asked the homes for before into the old. No part is sent there any more; what was answered
 * before the connection was lost is copied out of it, and then it goes.
 */
#include "client/client.h"


#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_INDEX_BITS 20u      /* so many ids are sorted at once: 16 MiB of scratch */
#define MOST_DIGIT_BITS 12u      /* whose counters fit the first-level cache */
#define PARTS_AT_ONCE 6u
#define LEAST_PART_ROWS 512u     /* smaller ones cost more in messages than they gain in overlap */
#define AHEAD 12u                /* rows that memory is asked for before they are copied */
#define BLOCKS_AT_ONCE_BYTES (64ull << 20)
#define RUNS_AT_ONCE 16384u

struct part {
    struct pc__call call;
    struct pc__ctl_gather body;
    bool is_out;
    uint8_t *map;                /* of the memfd that its area is in, while it needs that; or NULL */
    size_t begin, end;           /* of sorted */
};

struct gather {
    pc_client *client;
    struct pc__mapping *mapping;
    const struct pc_rows *rows;
    const uint64_t *ids;         /* of this batch */
    uint8_t *out;
    uint64_t deadline_ns;
    unsigned index_bits;
    size_t n;
    uint64_t *sorted, *scratch;  /* id << index_bits | index; n of them */
    int fd;                      /* the memfd of the areas of parts that start, or -1 */
    uint8_t *map;                /* it; or NULL */
    uint64_t area_bytes, memfd_bytes;
    uint64_t part_rows;
    unsigned n_areas;
    struct part parts[PARTS_AT_ONCE];
};

static uint64_t id_of(const struct gather *gather, uint64_t packed)
{
    return packed >> gather->index_bits;
}

static uint8_t *out_of(const struct gather *gather, uint64_t packed)
{
    return gather->out + (packed & ((1ull << gather->index_bits) - 1)) * gather->rows->row_bytes;
}

static const uint8_t *mapped(const struct pc__mapping *mapping, const struct pc_rows *rows,
                             uint64_t id)
{
    return (const uint8_t *)pc__pointer(mapping->trapped.address) + rows->offset_bytes +
           id * rows->stride_bytes;
}

static void fetch_ahead(const uint8_t *at, uint64_t n_bytes)
{
    for (uint64_t i = 0; i < n_bytes && i < 512; i += 64)
        __builtin_prefetch(at + i);
}

static void write_ahead(uint8_t *at, uint64_t n_bytes)
{
    for (uint64_t i = 0; i < n_bytes + 63 && i < 512; i += 64) /* its last line, too */
        __builtin_prefetch(at + i, 1);
}

/* ------------------------------------------------------------------ checking */

static int check(const struct pc__mapping *mapping, const struct pc_rows *rows,
                 const uint64_t *ids, uint64_t n_ids, uint64_t *most)
{
    const uint64_t length = mapping->trapped.length_bytes;
    if (rows->row_bytes == 0 || rows->row_bytes > length ||
        rows->offset_bytes > length - rows->row_bytes)
        return pc__fail(PC_ERR_RANGE, "rows of %" PRIu64 " bytes from %" PRIu64
                        " on, in a variable of %" PRIu64 " bytes",
                        rows->row_bytes, rows->offset_bytes, length);
    const uint64_t last = rows->stride_bytes == 0
                              ? UINT64_MAX
                              : (length - rows->row_bytes - rows->offset_bytes) / rows->stride_bytes;
    *most = 0;
    for (uint64_t i = 0; i < n_ids; i++)
        *most = ids[i] > *most ? ids[i] : *most;
    if (*most <= last)
        return PC_OK;
    uint64_t i = 0;
    while (ids[i] <= last)
        i++;
    return pc__fail(PC_ERR_RANGE, "id %" PRIu64 ", at position %" PRIu64
                    ", is not one of the rows 0 to %" PRIu64, ids[i], i, last);
}

/* ------------------------------------------------------------------- sorting */

static unsigned bits_of(uint64_t value)
{
    return value ? 64u - (unsigned)__builtin_clzll(value) : 0;
}

/* By id; of equal ones the order stays. Radix sort from the lowest digit; digits are of one size. */
static void sort(struct gather *gather, uint64_t most)
{
    uint64_t *from = gather->sorted, *to = gather->scratch;
    const bool one = gather->rows->stride_bytes == 0; /* every id is the same row */
    const unsigned n_bits = one ? 0 : bits_of(most);
    const unsigned n_passes = (n_bits + MOST_DIGIT_BITS - 1) / MOST_DIGIT_BITS;
    const unsigned digit_bits = n_passes ? (n_bits + n_passes - 1) / n_passes : 0;
    const uint64_t mask = (1ull << digit_bits) - 1;
    size_t at[1u << MOST_DIGIT_BITS];
    for (size_t i = 0; i < gather->n; i++)
        from[i] = (one ? 0 : gather->ids[i] << gather->index_bits) | i;
    for (unsigned pass = 0; pass < n_passes; pass++) {
        const unsigned shift = gather->index_bits + pass * digit_bits;
        size_t sum = 0;
        memset(at, 0, (mask + 1) * sizeof at[0]);
        for (size_t i = 0; i < gather->n; i++)
            at[from[i] >> shift & mask]++;
        for (size_t digit = 0; digit <= mask; digit++) {
            size_t n = at[digit];
            at[digit] = sum;
            sum += n;
        }
        for (size_t i = 0; i < gather->n; i++)
            to[at[from[i] >> shift & mask]++] = from[i];
        uint64_t *sorted = to;
        to = from;
        from = sorted;
    }
    gather->sorted = from;
    gather->scratch = to;
}

/* --------------------------------------------------------------------- parts */

static uint8_t *area_of(const struct gather *gather, const struct part *part)
{
    return part->map + (size_t)(part - gather->parts) * gather->area_bytes;
}

static int send_part(struct gather *gather, struct part *part)
{
    part->call = (struct pc__call){.gives = &gather->fd};
    int rc = pc__call_start(gather->client, PC__CTL_GATHER, &part->body, sizeof part->body, NULL,
                            0, gather->deadline_ns, &part->call);
    part->is_out = !rc;
    return rc;
}

/* The next rows from sorted[begin] on. */
static int start_part(struct gather *gather, struct part *part, size_t begin)
{
    part->map = gather->map;
    uint64_t *ids = (uint64_t *)(void *)area_of(gather, part);
    uint32_t n = 0;
    size_t at = begin;
    for (; at < gather->n; at++) {
        uint64_t id = id_of(gather, gather->sorted[at]);
        if (n && ids[n - 1] == id)
            continue;
        if (n == gather->part_rows)
            break;
        ids[n++] = id;
    }
    part->begin = begin;
    part->end = at;
    part->body = (struct pc__ctl_gather){
        .mapping_id = gather->mapping->id, .rows = *gather->rows,
        .memfd_bytes = gather->memfd_bytes,
        .at_bytes = (uint64_t)(area_of(gather, part) - part->map), .n_ids = n};
    return send_part(gather, part);
}

static void note_here(const struct gather *gather, uint64_t id)
{
    const uint64_t begin = gather->rows->offset_bytes + id * gather->rows->stride_bytes;
    const uint64_t past = (begin + gather->rows->row_bytes - 1) / PC_BLOCK_BYTES + 1;
    pc__seen_add(gather->mapping, begin / PC_BLOCK_BYTES, past - begin / PC_BLOCK_BYTES);
}

/* What the page server filled in, or what is resident, to where it was asked for. */
static void copy_part(const struct gather *gather, const struct part *part)
{
    const uint64_t row_bytes = gather->rows->row_bytes;
    const uint8_t *area = area_of(gather, part);
    const uint64_t *bits = (const uint64_t *)(const void *)(area + pc__gather_bits_at(part->body.n_ids));
    const uint8_t *next = area + pc__gather_rows_at(part->body.n_ids), *row = next;
    uint64_t last = 0, unique = 0;
    for (size_t i = part->begin; i < part->end; i++) {
        const uint64_t id = id_of(gather, gather->sorted[i]);
        if (i + AHEAD < part->end) {
            const uint64_t later = gather->sorted[i + AHEAD];
            write_ahead(out_of(gather, later), row_bytes);
            __builtin_prefetch(mapped(gather->mapping, gather->rows, id_of(gather, later)));
        }
        if (i == part->begin || id != last) {
            bool comes = bits[unique / 64] >> (unique % 64) & 1u;
            row = comes ? next : mapped(gather->mapping, gather->rows, id);
            if (!comes)
                note_here(gather, id);
            next += comes ? row_bytes : 0;
            unique++;
            last = id;
        }
        memcpy(out_of(gather, gather->sorted[i]), row, row_bytes);
    }
}

static int make_memory(struct gather *gather)
{
    gather->fd = memfd_create("clamor-gather", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (gather->fd < 0)
        return pc__fail_errno("memfd of a gather");
    /* The page server maps it: it must not shrink. */
    if (ftruncate(gather->fd, (off_t)gather->memfd_bytes) ||
        fcntl(gather->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
        return pc__fail_errno("a gather's memfd of %" PRIu64 " bytes", gather->memfd_bytes);
    void *map = mmap(NULL, gather->memfd_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, gather->fd, 0);
    if (map == MAP_FAILED)
        return pc__fail_errno("mmap of a gather's %" PRIu64 " bytes", gather->memfd_bytes);
    gather->map = map;
    return PC_OK;
}

/* The part needs its area no more. Memory that no part starts in goes with the last one that does. */
static void leave_area(struct gather *gather, struct part *part)
{
    uint8_t *map = part->map;
    part->map = NULL;
    part->is_out = false;
    bool is_used = !map || map == gather->map;
    for (unsigned i = 0; i < gather->n_areas; i++)
        is_used |= gather->parts[i].map == map;
    if (!is_used)
        munmap(map, gather->memfd_bytes);
}

/* After its connection was lost. Parts that were lost with it find the new memory made. */
static int ask_again(struct gather *gather, struct part *part)
{
    int rc = PC_OK;
    const bool is_first = part->map == gather->map;
    if (is_first) {
        close(gather->fd); /* before another is made: no more are open than before */
        gather->fd = -1;
        gather->map = NULL;
    }
    leave_area(gather, part);
    if (is_first)
        rc = make_memory(gather);
    return rc ? rc : start_part(gather, part, part->begin);
}

static int finish_part(struct gather *gather, struct part *part)
{
    int rc = pc__call_finish(gather->client, &part->call, gather->deadline_ns);
    while (rc == PC_ERR_NO_SERVER && part->call.is_dropped) {
        rc = ask_again(gather, part);
        if (!rc)
            rc = pc__call_finish(gather->client, &part->call, gather->deadline_ns);
    }
    if (!rc) {
        pc__fds_close(part->call.fds, &part->call.n_fds);
        copy_part(gather, part);
        leave_area(gather, part);
    }
    return rc;
}

static int run_parts(struct gather *gather)
{
    size_t begin = 0;
    unsigned first = 0, next = 0; /* parts are sent and finished in turn */
    int rc = PC_OK;
    while (!rc && (begin < gather->n || first != next)) {
        if (begin < gather->n && next - first < gather->n_areas) {
            struct part *part = &gather->parts[next % gather->n_areas];
            rc = start_part(gather, part, begin);
            begin = part->end;
            next += !rc;
            continue;
        }
        rc = finish_part(gather, &gather->parts[first % gather->n_areas]);
        first += !rc;
    }
    for (unsigned i = 0; i < gather->n_areas; i++) { /* after a failure */
        if (gather->parts[i].is_out)
            pc__call_cancel(gather->client, &gather->parts[i].call);
        leave_area(gather, &gather->parts[i]);
    }
    return rc;
}

/* --------------------------------------------------------------------- setup */

static int make_areas(struct gather *gather)
{
    const uint64_t row_bytes = gather->rows->row_bytes, most = pc__gather_part_rows(row_bytes);
    uint64_t share = gather->n / (2 * PARTS_AT_ONCE) + 1;
    share = share < LEAST_PART_ROWS ? LEAST_PART_ROWS : share;
    gather->part_rows = share < most ? share : most;
    gather->part_rows = gather->part_rows < gather->n ? gather->part_rows : gather->n;
    gather->n_areas = gather->part_rows < gather->n ? PARTS_AT_ONCE : 1;
    gather->area_bytes = pc__gather_area_bytes(gather->part_rows, row_bytes);
    gather->memfd_bytes = gather->area_bytes * gather->n_areas;
    return make_memory(gather);
}

static void free_gather(struct gather *gather)
{
    if (gather->map)
        munmap(gather->map, gather->memfd_bytes);
    if (gather->fd >= 0)
        close(gather->fd);
    free(gather->sorted < gather->scratch ? gather->sorted : gather->scratch); /* one allocation */
}

/* How many ids fit beside their positions. Ids have 45 bits at most: rows lie in the window. */
static int make_scratch(struct gather *gather, uint64_t most, uint64_t n_ids)
{
    unsigned left = 64u - (gather->rows->stride_bytes ? bits_of(most) : 0);
    gather->index_bits = left < MOST_INDEX_BITS ? left : MOST_INDEX_BITS;
    uint64_t n = 1ull << gather->index_bits;
    n = n < n_ids ? n : n_ids;
    gather->n = n;
    gather->sorted = malloc(2 * n * sizeof *gather->sorted);
    if (!gather->sorted)
        return pc__fail(PC_ERR_NO_MEMORY, "a gather of %" PRIu64 " rows", n_ids);
    gather->scratch = gather->sorted + n;
    return PC_OK;
}

static int gather_parts(struct gather *gather, const uint64_t *ids, uint64_t n_ids, uint64_t most)
{
    int rc = make_scratch(gather, most, n_ids);
    if (!rc)
        rc = make_areas(gather);
    const uint64_t at_once = gather->n;
    for (uint64_t done = 0; done < n_ids && !rc; done += at_once) {
        gather->ids = ids + done;
        gather->n = n_ids - done < at_once ? n_ids - done : at_once;
        sort(gather, most);
        rc = run_parts(gather);
        gather->out += gather->n * gather->rows->row_bytes;
    }
    return rc;
}

/* ------------------------------------------------------- straight, and by blocks */

static void copy_rows(const struct pc__mapping *mapping, const struct pc_rows *rows,
                      const uint64_t *ids, uint64_t n_ids, uint8_t *out)
{
    for (uint64_t i = 0; i < n_ids; i++, out += rows->row_bytes) {
        if (i + AHEAD < n_ids)
            fetch_ahead(mapped(mapping, rows, ids[i + AHEAD]), rows->row_bytes);
        memcpy(out, mapped(mapping, rows, ids[i]), rows->row_bytes);
    }
}

static int by_blocks(pc_client *client, const struct pc__mapping *mapping,
                     const struct pc_rows *rows, const uint64_t *ids, uint64_t n_ids, uint8_t *out,
                     uint64_t deadline_ns)
{
    uint64_t at_once = BLOCKS_AT_ONCE_BYTES / rows->row_bytes;
    at_once = at_once < 1 ? 1 : at_once < RUNS_AT_ONCE ? at_once : RUNS_AT_ONCE;
    at_once = at_once < n_ids ? at_once : n_ids;
    struct pc_run *runs = calloc(at_once, sizeof *runs);
    if (!runs)
        return pc__fail(PC_ERR_NO_MEMORY, "a gather of %" PRIu64 " rows", n_ids);
    int rc = PC_OK;
    for (uint64_t done = 0; done < n_ids && !rc; done += at_once) {
        uint64_t n = n_ids - done < at_once ? n_ids - done : at_once;
        for (uint64_t i = 0; i < n; i++) { /* the server merges them */
            uint64_t begin = rows->offset_bytes + ids[done + i] * rows->stride_bytes;
            uint64_t past = (begin + rows->row_bytes - 1) / PC_BLOCK_BYTES + 1;
            runs[i] = (struct pc_run){begin / PC_BLOCK_BYTES, past - begin / PC_BLOCK_BYTES};
        }
        uint64_t now = pc__clock_ns();
        rc = pc_client_prefetch(client, mapping->id, runs, n, 1,
                                deadline_ns > now ? deadline_ns - now : 0);
        if (!rc)
            copy_rows(mapping, rows, ids + done, n, out + done * rows->row_bytes);
    }
    free(runs);
    return rc;
}

PC_API int pc_client_gather(pc_client *client, uint64_t mapping_id, const struct pc_rows *rows,
                            const uint64_t *ids, uint64_t n_ids, void *out, uint64_t timeout_ns)
{
    struct pc__mapping *mapping;
    uint64_t most = 0;
    const uint64_t deadline_ns = pc__deadline(timeout_ns);
    int rc = pc__use(client, mapping_id, &mapping);
    if (rc)
        return rc;
    rc = check(mapping, rows, ids, n_ids, &most);
    if (rc || n_ids == 0) {
        pc__unuse(client, mapping);
        return rc;
    }
    if (!mapping->trapped.needs_trap) {
        copy_rows(mapping, rows, ids, n_ids, out);
    } else if (pc__is_private(mapping) || rows->row_bytes > PC__DATA_MAX_ROW_BYTES) {
        rc = by_blocks(client, mapping, rows, ids, n_ids, out, deadline_ns);
    } else {
        struct gather gather = {.client = client, .mapping = mapping, .rows = rows, .out = out,
                                .deadline_ns = deadline_ns, .fd = -1};
        rc = gather_parts(&gather, ids, n_ids, most);
        free_gather(&gather);
    }
    pc__unuse(client, mapping);
    return rc;
}
