/* error.h - how a function of this library says why it failed.
 *
 * Owns one message per thread, read back with pc_last_message(). Any thread may enter; there is
 * no lock. Not async-signal-safe: the signal path writes its own messages (trap_sigsegv.c).
 */
#ifndef PC_ERROR_H
#define PC_ERROR_H

#include "pagecache.h"

#include <stdatomic.h>

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

/* An audit looks at one part's state, under that part's lock, and says what must hold and does not; NULL:
 * all does. Its header comment has the equations. In builds with asserts these end the process where it finds
 * something; the second looks at one call of 16, where a look takes as long as the part is large. */
void pc__audited(const char *broken, const char *file, int line);
#ifdef NDEBUG
#define PC__AUDIT(audit) ((void)0)
#define PC__AUDIT_SOMETIMES(audit) ((void)0)
#else
#define PC__AUDIT(audit) pc__audited((audit), __FILE__, __LINE__)
#define PC__AUDIT_SOMETIMES(audit)                                         \
    do {                                                                   \
        static _Atomic unsigned calls_;                                    \
        if (atomic_fetch_add_explicit(&calls_, 1u, memory_order_relaxed) % 16u == 0) \
            PC__AUDIT(audit);                                              \
    } while (0)
#endif

#endif
