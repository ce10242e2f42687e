/* length.h - how long a run is: in the gate as long as it needs to be, in `make soak` all of it; and
 * whether it computed or waited. */
#ifndef PC_TESTS_LENGTH_H
#define PC_TESTS_LENGTH_H

#include "pagecache.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

/* TEST_WHOLE=1 makes it so, as the soak does. */
static inline bool is_whole(void)
{
    const char *said = getenv("TEST_WHOLE");
    return said && said[0] == '1';
}

/* Where homes lie in this run: TEST_MEDIUM=disk, or in memory. */
#define DISK_DIRECTORY "/var/tmp"
#define MEDIUM medium_of_run()
static inline enum pc_medium medium_of_run(void)
{
    const char *said = getenv("TEST_MEDIUM");
    return said && !strcmp(said, "disk") ? PC_MEDIUM_DISK : PC_MEDIUM_MEMORY;
}

/* Rounds, seeds, steps: as many as the gate has, or all. */
static inline unsigned rounds_of(unsigned in_gate, unsigned in_soak)
{
    return is_whole() ? in_soak : in_gate;
}

/* In the gate, TSan looks at what threads do to each other: what has one thread, or many contents
 * for the same steps, is ASan's. */
static inline bool hunts_races(void)
{
#if defined(__SANITIZE_THREAD__)
    return !is_whole();
#else
    return false;
#endif
}

/* The processors' time of a process and those that it waited for. The rest of its time it waited. */
static inline unsigned long computed_ms(const struct rusage *used)
{
    const struct timeval *user = &used->ru_utime, *kernel = &used->ru_stime;
    return (unsigned long)(user->tv_sec + kernel->tv_sec) * 1000 +
           (unsigned long)(user->tv_usec + kernel->tv_usec) / 1000;
}

#endif
