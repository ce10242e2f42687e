/* error.h - how a function of this library says why it failed.
 *
 * Owns one message per thread, read back with pc_last_message(). Any thread may enter; there is
 * no lock. Not async-signal-safe: the signal path writes its own messages (trap_sigsegv.c).
 */
#ifndef PC_ERROR_H
#define PC_ERROR_H

#include "pagecache.h"

#ifndef PC_API
#define PC_API __attribute__((visibility("default")))
#endif

/* Stores the message for pc_last_message() and returns err. With PC_ERR_SYSTEM the text of the
 * current errno is appended; errno itself is left as it was. */
int pc__fail(int err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The thread's last message is "" from here on. */
void pc__forget_message(void);

/* The code that an errno of a failed system call stands for: EMFILE and ENFILE are
 * PC_ERR_DESCRIPTORS, ENOMEM, ENOSPC and EDQUOT are PC_ERR_NO_MEMORY, the rest PC_ERR_SYSTEM. */
int pc__err_of_errno(int errnum);

/* pc__fail() with the code that the current errno stands for, and the errno's text. */
int pc__fail_errno(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
