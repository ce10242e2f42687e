/* test_xor.c - bytes XORed: of any length, at any alignment, in place or not, and none beside them. */
#include "tests/support/check.h"
#include "kernels/xor.h"

#include <stdint.h>
#include <string.h>

#define MOST 700u

static uint8_t byte_of(size_t i, unsigned seed)
{
    return (uint8_t)(i * 131 + seed * 77 + (i >> 3));
}

static uint8_t *bytes_of(size_t n, unsigned seed)
{
    uint8_t *bytes = malloc(n + 1); /* exactly as long, but for none: a sanitizer sees one too many */
    REQUIRE(bytes);
    for (size_t i = 0; i < n; i++)
        bytes[i] = byte_of(i, seed);
    return bytes;
}

static void check_at(size_t shift_out, size_t shift_a, size_t shift_b, size_t n)
{
    uint8_t *out = bytes_of(shift_out + n, 1), *a = bytes_of(shift_a + n, 2);
    uint8_t *b = bytes_of(shift_b + n, 3);
    pc__xor(out + shift_out, a + shift_a, b + shift_b, n);
    for (size_t i = 0; i < n; i++)
        CHECK(out[shift_out + i] == (byte_of(shift_a + i, 2) ^ byte_of(shift_b + i, 3)),
              "byte %zu of %zu, shifts %zu %zu %zu", i, n, shift_out, shift_a, shift_b);
    for (size_t i = 0; i < shift_out; i++)
        CHECK(out[i] == byte_of(i, 1), "byte %zu before them", i);
    CHECK(pc_xor_into(a + shift_a, b + shift_b, n) == PC_OK, "into");
    CHECK(!memcmp(a + shift_a, out + shift_out, n), "into, of %zu", n);
    CHECK(pc_xor_into(a + shift_a, a + shift_a, n) == PC_OK, "itself");
    for (size_t i = 0; i < n; i++)
        CHECK(a[shift_a + i] == 0, "byte %zu with itself", i);
    free(out);
    free(a);
    free(b);
}

int main(void)
{
    static const size_t lengths[] = {0, 1, 7, 31, 32, 127, 128, 129, 255, 256, 383, 512, MOST};
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++)
        for (size_t shift = 0; shift < 34; shift += shift < 2 ? 1 : 5)
            check_at(shift, shift * 3 % 31, shift * 7 % 33, lengths[k]);
    for (size_t n = 0; n < MOST; n++)
        check_at(1, 0, 2, n);
    return test_result();
}
