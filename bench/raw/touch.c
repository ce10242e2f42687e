/* touch.c - reads one byte at each address and times each read, or all of them.
 *
 * Called through ctypes, which drops the GIL: no Python between two touches. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <time.h>

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* bytes[i] = *base[offsets[i]]; ns[i] = how long that took, clock included. */
void touch_each(const uint8_t *base, const uint64_t *offsets, size_t n, uint8_t *bytes,
                uint64_t *ns)
{
    uint64_t before = now_ns();
    for (size_t i = 0; i < n; i++) {
        bytes[i] = *(const volatile uint8_t *)(base + offsets[i]);
        uint64_t after = now_ns();
        ns[i] = after - before;
        before = after;
    }
}

/* The same with one clock reading before all and one after; returns the nanoseconds between. */
uint64_t touch_all(const uint8_t *base, const uint64_t *offsets, size_t n, uint8_t *bytes)
{
    uint64_t before = now_ns();
    for (size_t i = 0; i < n; i++)
        bytes[i] = *(const volatile uint8_t *)(base + offsets[i]);
    return now_ns() - before;
}
