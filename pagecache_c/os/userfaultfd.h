/* userfaultfd.h - a new userfaultfd, by whichever way the kernel, a container's seccomp profile and the
 * rights of this process leave open. See userfaultfd.c. */
#ifndef PC_USERFAULTFD_H
#define PC_USERFAULTFD_H

#include <stdbool.h>

#define PC__USERFAULTFD_DEVICE "/dev/userfaultfd"

/* The ways; each gives a descriptor, or -1 with errno. */
enum pc__userfaultfd_way {
    PC__UFFD_BY_DEVICE,    /* faults of the kernel, too: who may open the device may do all */
    PC__UFFD_BY_CALL,      /* faults of the kernel, too */
    PC__UFFD_BY_USER_CALL, /* faults of user mode alone: what every user may ask for */
};
#define PC__UFFD_N_WAYS 3

/* nonblocking: of reads. */
int pc__userfaultfd_by(enum pc__userfaultfd_way way, bool nonblocking);
/* One that traps the faults of system calls, too. */
int pc__userfaultfd_full(bool nonblocking);
/* One that fills pages: any will do. errno is the call's, where none is to be had. */
int pc__userfaultfd_any(bool nonblocking);

#endif
