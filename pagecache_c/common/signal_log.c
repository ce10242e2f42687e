/* signal_log.c - see signal_log.h. The nm check of the signal path covers this object too. */
#include "common/signal_log.h"

#include <unistd.h>

void pc__siglog_text(struct pc__siglog *line, const char *text)
{
    while (*text && line->used < sizeof line->text - 1)
        line->text[line->used++] = *text++;
}

static void say_in_base(struct pc__siglog *line, uint64_t number, unsigned base)
{
    char digits[24];
    size_t at = sizeof digits;
    digits[--at] = '\0';
    do {
        digits[--at] = "0123456789abcdef"[number % base];
        number /= base;
    } while (number);
    pc__siglog_text(line, &digits[at]);
}

void pc__siglog_number(struct pc__siglog *line, uint64_t number)
{
    say_in_base(line, number, 10);
}

void pc__siglog_hex(struct pc__siglog *line, uint64_t number)
{
    pc__siglog_text(line, "0x");
    say_in_base(line, number, 16);
}

void pc__siglog_block(struct pc__siglog *line, uint64_t region, uint64_t version, uint64_t block)
{
    pc__siglog_text(line, "variable ");
    pc__siglog_number(line, region);
    pc__siglog_text(line, " version ");
    pc__siglog_number(line, version);
    pc__siglog_text(line, " block ");
    pc__siglog_number(line, block);
}

void pc__siglog_write(struct pc__siglog *line)
{
    line->text[line->used++] = '\n';
    size_t done = 0;
    while (done < line->used) {
        ssize_t n = write(STDERR_FILENO, line->text + done, line->used - done);
        if (n <= 0)
            return; /* nobody listens */
        done += (size_t)n;
    }
}

_Noreturn void pc__siglog_and_exit(struct pc__siglog *line)
{
    pc__siglog_write(line);
    _exit(PC__EXIT_NO_DATA);
}
