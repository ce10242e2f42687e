/* xor.c - bytes XORed. See xor.h.
 *
 * Four words of 32 bytes are loaded before any is stored, at any alignment, so out may be a or b. A
 * processor with AVX2 does each word at once, which is a fifth faster than halves where the bytes are in
 * its cache; and what is in memory only is asked for before it is needed, which is half as much again.
 */
#include "kernels/xor.h"

#include "common/error.h"

#include <stdint.h>
#include <string.h>

#define AHEAD_BYTES 1024
#define LINE_BYTES 64

typedef uint64_t word __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) void xor_all(void *out, const void *a, const void *b,
                                                          size_t n_bytes)
{
    uint8_t *to = out;
    const uint8_t *x = a, *y = b;
    size_t at = 0;
    for (; n_bytes - at >= 4 * sizeof(word); at += 4 * sizeof(word)) {
        word x0, x1, x2, x3, y0, y1, y2, y3;
        for (size_t line = 0; line < 4 * sizeof(word); line += LINE_BYTES) {
            __builtin_prefetch(x + at + AHEAD_BYTES + line); /* past the end: nothing happens */
            __builtin_prefetch(y + at + AHEAD_BYTES + line);
        }
        memcpy(&x0, x + at, sizeof x0);
        memcpy(&x1, x + at + sizeof x0, sizeof x1);
        memcpy(&x2, x + at + 2 * sizeof x0, sizeof x2);
        memcpy(&x3, x + at + 3 * sizeof x0, sizeof x3);
        memcpy(&y0, y + at, sizeof y0);
        memcpy(&y1, y + at + sizeof y0, sizeof y1);
        memcpy(&y2, y + at + 2 * sizeof y0, sizeof y2);
        memcpy(&y3, y + at + 3 * sizeof y0, sizeof y3);
        x0 ^= y0;
        x1 ^= y1;
        x2 ^= y2;
        x3 ^= y3;
        memcpy(to + at, &x0, sizeof x0);
        memcpy(to + at + sizeof x0, &x1, sizeof x1);
        memcpy(to + at + 2 * sizeof x0, &x2, sizeof x2);
        memcpy(to + at + 3 * sizeof x0, &x3, sizeof x3);
    }
    for (; at < n_bytes; at++)
        to[at] = (uint8_t)(x[at] ^ y[at]);
}

#ifdef __x86_64__
static __attribute__((target("avx2"))) void xor_avx2(void *out, const void *a, const void *b,
                                                     size_t n_bytes)
{
    xor_all(out, a, b, n_bytes);
}
#endif

void pc__xor(void *out, const void *a, const void *b, size_t n_bytes)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        xor_avx2(out, a, b, n_bytes);
        return;
    }
#endif
    xor_all(out, a, b, n_bytes);
}

PC_API int pc_xor_into(void *out, const void *a, size_t n_bytes)
{
    pc__xor(out, out, a, n_bytes);
    return PC_OK;
}
