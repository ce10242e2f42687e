/* signal_log.h - last words: one line on stderr from any context, also from a signal handler.
 *
 * Async-signal-safe: no allocation, no stdio, no lock. A line that is too long is cut.
 */
#ifndef PC_SIGNAL_LOG_H
#define PC_SIGNAL_LOG_H

#include <stddef.h>
#include <stdint.h>

/* The exit status of a process that could not be given its data; the caller's supervisor sees it
 * and runs the work again elsewhere. */
#define PC__EXIT_NO_DATA 70

struct pc__siglog {
    size_t used;
    char text[640];
};

void pc__siglog_text(struct pc__siglog *line, const char *text);
void pc__siglog_number(struct pc__siglog *line, uint64_t number);
void pc__siglog_hex(struct pc__siglog *line, uint64_t number);
/* "variable R version V block B" */
void pc__siglog_block(struct pc__siglog *line, uint64_t region, uint64_t version, uint64_t block);
/* Writes the line to stderr with one write(2). */
void pc__siglog_write(struct pc__siglog *line);
_Noreturn void pc__siglog_and_exit(struct pc__siglog *line);

#endif
