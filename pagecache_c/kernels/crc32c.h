/* crc32c.h - CRC-32C (Castagnoli): the checksums of what lies on a disk. Owns nothing. */
#ifndef PC_CRC32C_H
#define PC_CRC32C_H

#include "pagecache.h"

/* Of a block of zeros. Sums are kept XORed with it, so that a hole of their file says a hole of the data. */
#define PC__CRC32C_ZERO_BLOCK 0x98f94189u

/* As pc_crc32c, by the table: what a processor without the instruction takes. */
uint32_t pc__crc32c_by_table(uint32_t crc, const void *bytes, uint64_t n_bytes);

#endif
