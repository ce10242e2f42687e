/* pagecache_kernels.h - the part of the public header that needs no handle: functions over memory that the
 * caller has. pagecache.h includes it, and has the words and the conventions.
 */
#ifndef PAGECACHE_KERNELS_H
#define PAGECACHE_KERNELS_H

#ifndef PAGECACHE_H
#error "include pagecache.h"
#endif

/* cdef-begin */

/* ---------------------------------------------------------------- hash map */

/* The table of a hash map, wherever it lies: n_slots (a power of two) packed records of a tag byte
 * (0: the slot is empty), a key and a value. An empty table is all zeros. A key's place is
 * SplitMix64's output function of it (longer keys are folded in, 8 bytes at a time, little-endian,
 * padded with zeros), the same on every machine. */
enum pc_hash_key_kind { PC_HASH_INT64 = 1, PC_HASH_BYTES = 2 };

struct pc_hash_table {
    void *slots;
    uint64_t slots_bytes;      /* n_slots * (1 + key_bytes + value_bytes), or it is refused */
    uint64_t n_slots;
    uint64_t value_bytes;
    uint32_t key_kind;         /* enum pc_hash_key_kind */
    uint32_t key_bytes;        /* 8 for INT64; the width of BYTES, padded with zeros */
};
struct pc_hash_batch {
    const void *keys;          /* n_keys of them, side by side */
    uint64_t keys_bytes;
    void *values;              /* n_keys of them */
    uint64_t values_bytes;
    uint64_t n_keys;
};
/* PC_ERR_RANGE where lengths do not fit each other, PC_ERR_PROTOCOL for a table without an empty
 * slot: neither was made by this library. None of these reads or writes outside the arrays. */

/* found[i] = whether key i is there; its value is copied to values (or NULL) then, and what is not
 * found is left as it was. Returns how many were found. */
int64_t pc_hash_get(const struct pc_hash_table *table, const struct pc_hash_batch *batch,
                    uint8_t *found, uint64_t found_bytes);
/* Sets the keys in order, so that the last of equal ones stays; writes only blocks that change.
 * Returns how many are new; PC_ERR_NO_SPACE where that would be more than room (those before it
 * are set). */
int64_t pc_hash_set(const struct pc_hash_table *table, const struct pc_hash_batch *batch,
                    uint64_t room);
/* Erases those keys that are there. Returns how many were. */
int64_t pc_hash_erase(const struct pc_hash_table *table, const struct pc_hash_batch *batch);
/* offsets[i] = where in the table, in bytes, the search for key i begins. Reads nothing of it. */
int pc_hash_starts(const struct pc_hash_table *table, const struct pc_hash_batch *batch,
                   uint64_t *offsets, uint64_t offsets_bytes);

/* ------------------------------------------------------------------ rows */

/* n rows with their ids (of 4 or 8 bytes each) made one row for each id, ascending: what came first,
 * op what came after it. Ops: sum, max, min; dtypes: f32, f64, i32, i64. The outs have room for n.
 * Returns how many there are, or an error: PC_ERR_RANGE, PC_ERR_NO_MEMORY. */
int64_t pc_rows_combine(int dtype, int op, uint64_t row_elements, const void *ids, int id_bytes,
                        const void *values, uint64_t n, void *out_ids, void *out_values);
/* Lists of rows, each with ascending ids, made one such list, in the order of the lists: as combine of
 * all of them in a row. The outs have room for all. */
int64_t pc_rows_merge(int dtype, int op, uint64_t row_elements, uint64_t n_lists,
                      const void *const *ids, int id_bytes, const void *const *values,
                      const uint64_t *n, void *out_ids, void *out_values);
/* array[ids[i]] op= values[i], in this order. PC_ERR_RANGE: also where an id is none of n_rows;
 * nothing was changed. */
int pc_rows_apply(int dtype, int op, uint64_t row_elements, void *array, uint64_t n_rows,
                  const void *ids, int id_bytes, const void *values, uint64_t n);
/* The blocks that these rows lie on, of an array that begins offset_bytes after a block's start.
 * Writes up to capacity runs; returns how many there are. */
int64_t pc_rows_blocks(uint64_t offset_bytes, uint64_t row_bytes, uint64_t n_rows, const void *ids,
                       int id_bytes, uint64_t n, struct pc_run *runs, uint64_t capacity);
/* Copies blocks of a private mapping that will be written, many in one call, where the kernel can
 * (Linux 5.14, and not under every trap); the others are copied when they are touched. */
int pc_populate(void *mapping, const struct pc_run *runs, uint64_t n_runs);

/* ---------------------------------------------------------------- parity */

/* out[i] ^= a[i], of n_bytes bytes at any alignment. out may be a, and else they lie apart. */
int pc_xor_into(void *out, const void *a, size_t n_bytes);

/* ------------------------------------------------------------- checksums */

/* CRC-32C of what crc is of, followed by these bytes; crc is 0 where they are the first. */
uint32_t pc_crc32c(uint32_t crc, const void *bytes, uint64_t n_bytes);
/* out[i] = the CRC-32C of block i of them. */
void pc_crc32c_blocks(const void *bytes, uint64_t n_blocks, uint32_t *out);
/* Copies blocks to a file on disk, from offset_bytes on, a multiple of the block. Many go past the page cache.
 * sums[i] = the CRC-32C of block i as it was written, XOR that of a block of zeros: the same blocks may be
 * changed meanwhile. */
int pc_copy_to_disk(int fd, uint64_t offset_bytes, const void *source, uint64_t n_blocks, uint32_t *sums);

/* cdef-end */

#endif
