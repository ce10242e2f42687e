/* test_crc32c.c - CRC-32C: known answers, the table against the instruction, at any length and alignment,
 * in parts, and many blocks at a time. */
#include "tests/support/check.h"
#include "kernels/crc32c.h"

#include <stdint.h>
#include <string.h>

static uint8_t byte_of(uint64_t i)
{
    return (uint8_t)(i * 131 + (i >> 3) * 7 + (i >> 11));
}

static uint8_t *bytes_of(uint64_t n)
{
    uint8_t *bytes = malloc(n + 1); /* exactly as long, but for none: a sanitizer sees one too many */
    REQUIRE(bytes);
    for (uint64_t i = 0; i < n; i++)
        bytes[i] = byte_of(i);
    return bytes;
}

static void check_known(const void *bytes, uint64_t n, uint32_t expected)
{
    CHECK(pc_crc32c(0, bytes, n) == expected, "%08x of %llu bytes", pc_crc32c(0, bytes, n),
          (unsigned long long)n);
    CHECK(pc__crc32c_by_table(0, bytes, n) == expected, "by table, of %llu bytes", (unsigned long long)n);
}

/* RFC 3720, B.4; the check value of the CRC catalogue. */
static void known_answers(void)
{
    uint8_t bytes[32];
    check_known("", 0, 0);
    check_known("123456789", 9, 0xe3069283u);
    memset(bytes, 0, sizeof bytes);
    check_known(bytes, sizeof bytes, 0x8a9136aau);
    memset(bytes, 0xff, sizeof bytes);
    check_known(bytes, sizeof bytes, 0x62a8ab43u);
    for (uint8_t i = 0; i < sizeof bytes; i++)
        bytes[i] = i;
    check_known(bytes, sizeof bytes, 0x46dd794eu);
    for (uint8_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(31 - i);
    check_known(bytes, sizeof bytes, 0x113fdb5cu);
}

static void any_length(void)
{
    for (uint64_t n = 0; n < 300; n++) {
        const uint64_t shift = n % 9;
        uint8_t *bytes = bytes_of(shift + n);
        const uint32_t whole = pc_crc32c(0, bytes + shift, n);
        CHECK(whole == pc__crc32c_by_table(0, bytes + shift, n), "%llu bytes", (unsigned long long)n);
        const uint32_t part = pc_crc32c(0, bytes + shift, n / 3);
        CHECK(pc_crc32c(part, bytes + shift + n / 3, n - n / 3) == whole, "%llu bytes in two parts",
              (unsigned long long)n);
        free(bytes);
    }
}

static void blocks(void)
{
    for (uint64_t n = 0; n < 9; n++) {
        uint8_t *bytes = bytes_of(n * PC_BLOCK_BYTES);
        uint32_t sums[10];
        memset(sums, 0xee, sizeof sums);
        pc_crc32c_blocks(bytes, n, sums);
        for (uint64_t i = 0; i < n; i++)
            CHECK(sums[i] == pc__crc32c_by_table(0, bytes + i * PC_BLOCK_BYTES, PC_BLOCK_BYTES),
                  "block %llu of %llu", (unsigned long long)i, (unsigned long long)n);
        CHECK(sums[n] == 0xeeeeeeeeu, "one past %llu blocks", (unsigned long long)n);
        free(bytes);
    }
    uint8_t *zeros = calloc(1, PC_BLOCK_BYTES);
    REQUIRE(zeros);
    check_known(zeros, PC_BLOCK_BYTES, PC__CRC32C_ZERO_BLOCK);
    free(zeros);
}

int main(void)
{
    known_answers();
    any_length();
    blocks();
    return test_result();
}
