/* processes.h - children of a test that are stopped, and killed. False: it was not so. */
#ifndef PC_TEST_PROCESSES_H
#define PC_TEST_PROCESSES_H

#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>

static inline bool stop_process(pid_t pid)
{
    int status;
    return !kill(pid, SIGSTOP) && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status);
}

static inline bool end_process(pid_t pid)
{
    return !kill(pid, SIGKILL) && waitpid(pid, NULL, 0) == pid;
}

#endif
