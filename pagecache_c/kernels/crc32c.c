/* crc32c.c - CRC-32C. See crc32c.h and pagecache_kernels.h.
 *
 * The processor's instruction takes 8 bytes and gives its answer three cycles later, so three blocks are
 * summed side by side: they need nothing of each other. A processor without it takes eight tables of 256
 * words, one for each byte of a word.
 */
#include "kernels/crc32c.h"

#include "common/error.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define REVERSED_POLYNOMIAL 0x82f63b78u

static uint32_t tables[8][256];
static pthread_once_t tables_made = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ REVERSED_POLYNOMIAL : crc >> 1;
        tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int k = 1; k < 8; k++)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
}

uint32_t pc__crc32c_by_table(uint32_t crc, const void *bytes, uint64_t n_bytes)
{
    const uint8_t *at = bytes;
    (void)pthread_once(&tables_made, make_tables);
    crc = ~crc;
    for (; n_bytes >= 8; n_bytes -= 8, at += 8) {
        const uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                                    (uint32_t)at[3] << 24);
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^
              tables[4][low >> 24] ^ tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^
              tables[0][at[7]];
    }
    for (; n_bytes; n_bytes--, at++)
        crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return ~crc;
}

/* By assembler, which each compiler takes without an option. Of the intrinsics, some versions of clang want
 * another target attribute than gcc, or a build that is only for processors with the instruction. */
#if defined(__x86_64__)
static inline uint32_t step_8(uint32_t crc, uint64_t word)
{
    uint64_t wide = crc;
    __asm__("crc32q %1, %0" : "+r"(wide) : "r"(word));
    return (uint32_t)wide;
}
static inline uint32_t step_1(uint32_t crc, uint8_t byte)
{
    __asm__("crc32b %1, %0" : "+r"(crc) : "q"(byte));
    return crc;
}
#define HAS_INSTRUCTION() __builtin_cpu_supports("sse4.2")
#elif defined(__aarch64__)
/* An option of ARMv8.0, which builds are for. */
static inline uint32_t step_8(uint32_t crc, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
static inline uint32_t step_1(uint32_t crc, uint8_t byte)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
    return crc;
}
#define HAS_INSTRUCTION() (getauxval(AT_HWCAP) & HWCAP_CRC32)
#endif

#ifdef HAS_INSTRUCTION
static inline uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static uint32_t by_instruction(uint32_t crc, const uint8_t *at, uint64_t n_bytes)
{
    crc = ~crc;
    for (; n_bytes >= 8; n_bytes -= 8, at += 8)
        crc = step_8(crc, word_at(at));
    for (; n_bytes; n_bytes--, at++)
        crc = step_1(crc, *at);
    return ~crc;
}

static void three_blocks(const uint8_t *at, uint32_t *out)
{
    uint32_t a = ~0u, b = ~0u, c = ~0u;
    for (uint64_t i = 0; i < PC_BLOCK_BYTES; i += 8) {
        a = step_8(a, word_at(at + i));
        b = step_8(b, word_at(at + PC_BLOCK_BYTES + i));
        c = step_8(c, word_at(at + 2 * PC_BLOCK_BYTES + i));
    }
    out[0] = ~a;
    out[1] = ~b;
    out[2] = ~c;
}
#endif

PC_API uint32_t pc_crc32c(uint32_t crc, const void *bytes, uint64_t n_bytes)
{
#ifdef HAS_INSTRUCTION
    if (HAS_INSTRUCTION())
        return by_instruction(crc, bytes, n_bytes);
#endif
    return pc__crc32c_by_table(crc, bytes, n_bytes);
}

PC_API void pc_crc32c_blocks(const void *bytes, uint64_t n_blocks, uint32_t *out)
{
    const uint8_t *at = bytes;
    uint64_t block = 0;
#ifdef HAS_INSTRUCTION
    for (; HAS_INSTRUCTION() && n_blocks - block >= 3; block += 3)
        three_blocks(at + (block << PC_BLOCK_SHIFT), out + block);
#endif
    for (; block < n_blocks; block++)
        out[block] = pc_crc32c(0, at + (block << PC_BLOCK_SHIFT), PC_BLOCK_BYTES);
}
