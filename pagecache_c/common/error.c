/* error.c - texts of the error codes, and each thread's last message. See error.h. */
#include "common/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char last_message[512];

static const char *const texts[] = {
    [0] = "no error",
    [-PC_ERR_SYSTEM] = "a system call failed",
    [-PC_ERR_NO_MEMORY] = "no memory left",
    [-PC_ERR_TIMEOUT] = "timed out",
    [-PC_ERR_NO_SERVER] = "the page server of this node does not answer",
    [-PC_ERR_VERSION_MISMATCH] = "the page server and this process run different versions",
    [-PC_ERR_NO_REGION] = "no such variable: it was never made, or it was freed",
    [-PC_ERR_HOME_LOST] = "no page server that is known has the blocks",
    [-PC_ERR_CLASH] = "something else is mapped where the variable must be",
    [-PC_ERR_PROTOCOL] = "the other side sent a malformed message",
    [-PC_ERR_RANGE] = "outside the variable",
    [-PC_ERR_NO_TRAP] = "the kernel refuses the trap that was asked for",
    [-PC_ERR_EXISTS] = "it exists already",
    [-PC_ERR_CLOSED] = "the handle was shut down",
    [-PC_ERR_DESCRIPTORS] = "out of file descriptors",
    [-PC_ERR_FORKED] = "the handle belongs to the parent process",
    [-PC_ERR_NO_GENERATION] = "the restarted page server does not hold the memory mapped here",
    [-PC_ERR_NO_PEER] = "no connection to the peer",
    [-PC_ERR_HUGE_PAGES] = ("shared memory is made of huge pages here, so that absent blocks would "
                            "read as zeros"),
    [-PC_ERR_EXPIRED] = "the blocks of that version are kept no longer",
    [-PC_ERR_NO_VERSION] = "the variable has no such version",
    [-PC_ERR_NO_SPACE] = "a file system or an arena is full",
    [-PC_ERR_MEMBER] = "a member of the ring is gone, or says nothing",
    [-PC_ERR_MISMATCH] = "members of the ring do not ask for the same",
    [-PC_ERR_ENDED] = ("its session has ended (clamor.shutdown() was called, or the driver that made it "
                       "ended); put the object again in the session that there is now"),
    [-PC_ERR_DENIED] = "peer credentials or secret are wrong",
    [-PC_ERR_FILE] = "the file that has the blocks cannot be read",
    [-PC_ERR_FILE_CHANGED] = "the file has changed since the variable was made of it",
    [-PC_ERR_FILE_ACCESS] = "the file may not be read with these credentials",
};
_Static_assert(sizeof texts / sizeof texts[0] == -PC_ERR_LAST, "every code has a text");

PC_API const char *pc_strerror(int err)
{
    if (err > 0 || err <= PC_ERR_LAST)
        return "unknown error";
    return texts[-err];
}

PC_API const char *pc_last_message(void)
{
    return last_message;
}

void pc__forget_message(void)
{
    last_message[0] = '\0';
}

static void store(const char *fmt, va_list args, int errnum, int with_errno)
{
    int length = vsnprintf(last_message, sizeof last_message, fmt, args);
    if (length < 0)
        last_message[0] = '\0';
    if (!with_errno || length < 0 || (size_t)length >= sizeof last_message)
        return;
    char text[128];
    const char *said = strerror_r(errnum, text, sizeof text);
    size_t used = (size_t)length;
    /* Truncation is fine: the text is for humans. */
    (void)snprintf(last_message + used, sizeof last_message - used, ": %s", said);
}

int pc__fail(int err, const char *fmt, ...)
{
    int saved = errno;
    va_list args;
    va_start(args, fmt);
    store(fmt, args, saved, err == PC_ERR_SYSTEM);
    va_end(args);
    errno = saved;
    return err;
}

int pc__err_of_errno(int errnum)
{
    switch (errnum) {
    case EMFILE:
    case ENFILE:
        return PC_ERR_DESCRIPTORS;
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
        return PC_ERR_NO_MEMORY;
    default:
        return PC_ERR_SYSTEM;
    }
}

int pc__fail_errno(const char *fmt, ...)
{
    int saved = errno;
    va_list args;
    va_start(args, fmt);
    store(fmt, args, saved, 1);
    va_end(args);
    errno = saved;
    return pc__err_of_errno(saved);
}

void pc__audited(const char *broken, const char *file, int line)
{
    if (!broken)
        return;
    (void)fprintf(stderr, "%s:%d: this must hold and does not: %s\n", file, line, broken);
    abort();
}
