/* keeping.c - the page server's record of what its keeper has, and the thread that tells it.
 *
 * Owns a duplicate of the connection, a record of each memfd that is kept (the descriptor is the
 * engine's, who forgets it here before it closes it), and the messages that were not sent yet.
 * Lock: one, a leaf; held over sends that do not block. Threads: any may call; one of ours.
 *
 * Invariants:
 *   - messages are sent in the order in which they were given, and while one waits nobody adds another
 *     that says the same: who tries again for as long as a shortage lasts makes no queue longer;
 *   - a descriptor is sent under the lock, while its record is there: it is that of its inode;
 *   - after pc__keeping_renew the new keeper hears of every record, then that this is all, and only
 *     then of anything else. A keeper that did not hear that is not whole, and says so when listed.
 */
#include "engine/keeper/keeping.h"

#include "common/error.h"
#include "common/list.h"
#include "engine/keeper/kept_table.h"
#include "os/file_id.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SLOW_NS
#define SLOW_NS 30000000000ull   /* a keeper that takes nothing for so long is ended; so long its successor has */
#endif
#define CLOSE_NS 5000000000ull
#define RETRY_MS 2               /* where the kernel has no room for descriptors in flight */
#define STEP_MS 200
#define ENDS_MS 5000             /* for a process that was killed to be gone */

enum said { SAY_PUT, SAY_DROP, SAY_WHOLE, SAY_NOTHING };

struct message {
    struct pc__link link;
    enum said said;
    struct pc__kept what;
    int fd;                      /* PUT; -1: it was forgotten meanwhile */
    struct pc__kept_record *record; /* PUT: what it says; NULL: it was forgotten meanwhile */
    pc__keeper_heard *heard;     /* NOTHING: only this */
    void *arg;
    int rc;                      /* NOTHING: something before it can never be sent */
};

struct pc__keeping {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool has_thread, stopping, closing, lost, told_lost;
    int fd, next_fd;             /* next: of the keeper that takes its place, or -1 */
    int wake_fd;
    pc__keeper_lost *on_lost;
    pc__keeper_refused *on_refused;
    void *arg;
    int refused_rc;              /* what could not be sent last, until it is said */
    struct pc__kept refused;
    struct pc__kept_table table;
    struct pc__link queue;
    uint64_t stuck_since_ns;     /* 0: what was sent last was taken */
    uint64_t full_since_ns;      /* its socket, of these; 0: it has room, and the kernel lacks something */
    int pid_fd;                  /* of the keeper's process, or -1 */
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void wake(struct pc__keeping *keeping)
{
    const uint64_t one = 1;
    (void)!write(keeping->wake_fd, &one, sizeof one); /* full: it is awake */
}

/* Under lock, as all that follows, unless it says otherwise. */
static int note(struct pc__keeping *keeping, const struct pc__kept *what, int fd,
                struct pc__kept_record **out)
{
    struct pc__kept_record *entry = pc__kept_find(&keeping->table, what->inode);
    if (!entry)
        entry = pc__kept_add(&keeping->table, what, fd);
    if (!entry)
        return pc__fail(PC_ERR_NO_MEMORY, "a record of what is kept");
    entry->what = *what;
    entry->fd = fd;
    *out = entry;
    return PC_OK;
}

/* It is out of the queue. */
static void message_free(struct message *message)
{
    if (message->record && message->record->unsent == message)
        message->record->unsent = NULL;
    free(message);
}

static void forget(struct pc__keeping *keeping, struct pc__kept_record *entry)
{
    pc__each(link, &keeping->queue)
    {
        struct message *message = pc__of(link, struct message, link);
        if (message->record == entry) {
            message->fd = -1; /* it may be another file's from now on */
            message->record = NULL;
        }
    }
    pc__kept_remove(&keeping->table, entry);
}

/* PC_OK: sent; PC_ERR_TIMEOUT: no room; PC_ERR_CLOSED: no keeper; else it cannot be sent at all. */
static int send_one(struct pc__keeping *keeping, enum said said, const struct pc__kept *what, int fd)
{
    if (keeping->lost)
        return PC_ERR_CLOSED;
    switch (said) {
    case SAY_PUT:
        return pc__keeper_try_put(keeping->fd, what, fd);
    case SAY_DROP:
        return pc__keeper_try_drop(keeping->fd, what->inode);
    case SAY_WHOLE:
        return pc__keeper_try_whole(keeping->fd);
    case SAY_NOTHING:
        break;
    }
    return PC_OK;
}

static int enqueue(struct pc__keeping *keeping, const struct message *what)
{
    struct message *message = malloc(sizeof *message);
    if (!message)
        return pc__fail(PC_ERR_NO_MEMORY, "a message to the keeper");
    *message = *what;
    pc__link_push(&keeping->queue, &message->link);
    if (message->record)
        message->record->unsent = message;
    wake(keeping);
    return PC_OK;
}

/* At once where nothing is before it, else later. A keeper that is lost is told nothing: the next
 * one hears of what there is then. */
static int say(struct pc__keeping *keeping, enum said said, const struct pc__kept *what, int fd,
               struct pc__kept_record *record)
{
    const struct message *unsent = record ? record->unsent : NULL;
    if (keeping->lost)
        return PC_OK;
    if (unsent && unsent->fd == fd && memcmp(&unsent->what, what, sizeof *what) == 0)
        return PC_OK;
    if (pc__link_empty(&keeping->queue)) {
        const int rc = send_one(keeping, said, what, fd);
        if (rc == PC_ERR_CLOSED) {
            keeping->lost = true;
            wake(keeping);
            return PC_OK;
        }
        if (rc != PC_ERR_TIMEOUT)
            return rc;
    }
    return enqueue(keeping, &(struct message){
                                .said = said, .what = *what, .fd = fd, .record = record});
}

int pc__keeping_adopt(struct pc__keeping *keeping, const struct pc__kept *what, int fd)
{
    struct pc__kept_record *record;
    pthread_mutex_lock(&keeping->lock);
    const int rc = note(keeping, what, fd, &record);
    pthread_mutex_unlock(&keeping->lock);
    return rc;
}

int pc__keeping_put(struct pc__keeping *keeping, const struct pc__kept *what, int fd)
{
    struct pc__kept_record *record;
    pthread_mutex_lock(&keeping->lock);
    int rc = note(keeping, what, fd, &record);
    if (!rc)
        rc = say(keeping, SAY_PUT, what, fd, record);
    pthread_mutex_unlock(&keeping->lock);
    return rc;
}

bool pc__keeping_put_now(struct pc__keeping *keeping, const struct pc__kept *what)
{
    pthread_mutex_lock(&keeping->lock);
    struct pc__kept_record *entry = pc__kept_find(&keeping->table, what->inode);
    bool done = entry && pc__link_empty(&keeping->queue);
    if (done && !keeping->lost) {
        const int rc = send_one(keeping, SAY_PUT, what, entry->fd);
        done = rc == PC_OK;
        if (rc == PC_ERR_CLOSED) {
            keeping->lost = true;
            wake(keeping);
        }
    }
    if (done) /* a keeper that is lost has no label that could be wrong */
        entry->what = *what;
    pthread_mutex_unlock(&keeping->lock);
    return done;
}

void pc__keeping_drop(struct pc__keeping *keeping, uint64_t inode)
{
    const struct pc__kept what = {.inode = inode};
    pthread_mutex_lock(&keeping->lock);
    struct pc__kept_record *entry = pc__kept_find(&keeping->table, inode);
    if (entry)
        forget(keeping, entry);
    /* For want of memory the keeper keeps it until it ends, and the next server drops it. */
    (void)say(keeping, SAY_DROP, &what, -1, NULL);
    pthread_mutex_unlock(&keeping->lock);
}

bool pc__keeping_is_behind(struct pc__keeping *keeping)
{
    pthread_mutex_lock(&keeping->lock);
    const bool is = keeping->lost || !pc__link_empty(&keeping->queue);
    pthread_mutex_unlock(&keeping->lock);
    return is;
}

int pc__keeping_when(struct pc__keeping *keeping, pc__keeper_heard *heard, void *arg)
{
    const struct message waits = {.said = SAY_NOTHING, .fd = -1, .heard = heard, .arg = arg};
    int rc = PC_OK;
    pthread_mutex_lock(&keeping->lock);
    if (keeping->lost || !pc__link_empty(&keeping->queue)) {
        rc = enqueue(keeping, &waits);
        rc = rc ? rc : 1;
    }
    pthread_mutex_unlock(&keeping->lock);
    return rc;
}

void pc__keeping_error_text(struct pc__keeping *keeping, int rc, char *text, size_t text_bytes)
{
    pthread_mutex_lock(&keeping->lock);
    const uint64_t since_ns = keeping->stuck_since_ns;
    const unsigned long long s = since_ns ? (now_ns() - since_ns) / 1000000000u : 0;
    if (rc != PC_ERR_TIMEOUT)
        snprintf(text, text_bytes, "the keeper of this node was not given it: %s", pc_strerror(rc));
    else if (since_ns && !keeping->lost && !keeping->full_since_ns)
        snprintf(text, text_bytes,
                 "the keeper of this node was told nothing for %llu s: the kernel is short of memory "
                 "or of descriptors in flight", s);
    else if (since_ns)
        snprintf(text, text_bytes, "the keeper of this node %s for %llu s",
                 keeping->lost ? "is gone, and no other has come," : "has taken nothing", s);
    else
        snprintf(text, text_bytes, "the keeper of this node did not take it in time");
    pthread_mutex_unlock(&keeping->lock);
}

struct waiter {
    struct pc__keeping *keeping;
    int rc;
    bool done;
};

static void tell_waiter(void *arg, int rc, bool cancelled)
{
    struct waiter *waiter = arg;
    struct pc__keeping *keeping = waiter->keeping;
    pthread_mutex_lock(&keeping->lock);
    waiter->rc = cancelled ? PC_ERR_CLOSED : rc;
    waiter->done = true;
    pthread_cond_broadcast(&keeping->changed);
    pthread_mutex_unlock(&keeping->lock);
}

int pc__keeping_wait(struct pc__keeping *keeping)
{
    struct waiter waiter = {.keeping = keeping};
    const int waits = pc__keeping_when(keeping, tell_waiter, &waiter);
    if (waits != 1)
        return waits;
    pthread_mutex_lock(&keeping->lock);
    while (!waiter.done) /* the thread tells it within SLOW_NS, or when the server stops */
        pthread_cond_wait(&keeping->changed, &keeping->lock);
    pthread_mutex_unlock(&keeping->lock);
    if (!waiter.rc)
        return PC_OK;
    char text[PC__KEEPING_TEXT_BYTES];
    pc__keeping_error_text(keeping, waiter.rc, text, sizeof text);
    return pc__fail(waiter.rc, "%s", text);
}

/* ------------------------------------------------------------------- the thread */

/* Takes the messages off that only wait, up to the first that must be sent, or all of them. */
static void take_waiting(struct pc__keeping *keeping, bool all, struct pc__link *out)
{
    pc__each(link, &keeping->queue)
    {
        const struct message *message = pc__of(link, struct message, link);
        if (message->said == SAY_NOTHING) {
            pc__link_remove(link);
            pc__link_push(out, link);
        } else if (!all) {
            return;
        }
    }
}

static void drop_messages(struct pc__keeping *keeping)
{
    pc__each(link, &keeping->queue)
    {
        struct message *message = pc__of(link, struct message, link);
        if (message->said == SAY_NOTHING)
            continue;
        pc__link_remove(link);
        message_free(message);
    }
}

/* Without the lock. */
static void tell(struct pc__link *waiting, int rc, bool cancelled)
{
    pc__each(link, waiting)
    {
        struct message *message = pc__of(link, struct message, link);
        pc__link_remove(link);
        message->heard(message->arg, message->rc ? message->rc : rc, cancelled);
        free(message);
    }
}

static bool is_that_file(const struct pc__kept_record *entry)
{
    struct stat st;
    return fstat(entry->fd, &st) == 0 && pc__file_id(&st) == entry->what.inode;
}

/* The new keeper hears of all there is before of anything else. */
static void begin_anew(struct pc__keeping *keeping)
{
    struct pc__link waiting;
    int rc = PC_OK;
    pc__link_init(&waiting);
    take_waiting(keeping, true, &waiting);
    drop_messages(keeping);
    keeping->lost = keeping->told_lost = false;
    keeping->stuck_since_ns = keeping->full_since_ns = 0;
    pc__each(link, &keeping->table.records)
    {
        struct pc__kept_record *entry = pc__of(link, struct pc__kept_record, link);
        if (!rc && is_that_file(entry))
            rc = enqueue(keeping, &(struct message){.said = SAY_PUT,
                                                    .what = entry->what,
                                                    .fd = entry->fd,
                                                    .record = entry});
    }
    if (!rc)
        rc = enqueue(keeping, &(struct message){.said = SAY_WHOLE, .fd = -1});
    if (rc) { /* it stays a part, and says so: as if it were lost */
        drop_messages(keeping);
        keeping->lost = true;
    }
    pc__each(at, &waiting)
    {
        pc__link_remove(at);
        pc__link_push(&keeping->queue, at);
    }
}

/* It can never be sent. Who waits for anything before this moment may wait for it. */
static void refuse(struct pc__keeping *keeping, const struct message *message, int rc)
{
    pc__each(link, &keeping->queue)
    {
        struct message *after = pc__of(link, struct message, link);
        if (after->said == SAY_NOTHING && !after->rc)
            after->rc = rc;
    }
    keeping->refused_rc = rc;
    keeping->refused = message->what;
}

/* Where the last packet was not sent: whether that is for the keeper, which leaves its socket full. */
static void note_stuck(struct pc__keeping *keeping)
{
    struct pollfd socket = {.fd = keeping->fd, .events = POLLOUT};
    const uint64_t now = now_ns();
    if (!keeping->stuck_since_ns)
        keeping->stuck_since_ns = now;
    if (poll(&socket, 1, 0) == 1)
        keeping->full_since_ns = 0;
    else if (!keeping->full_since_ns)
        keeping->full_since_ns = now;
}

/* Sends what the socket takes, up to what can never be sent. */
static void send_some(struct pc__keeping *keeping)
{
    while (!keeping->lost && !keeping->refused_rc && !pc__link_empty(&keeping->queue)) {
        struct message *message = pc__of(keeping->queue.next, struct message, link);
        if (message->said == SAY_NOTHING)
            return;
        int rc = PC_OK;
        if (message->said != SAY_PUT || message->fd >= 0)
            rc = send_one(keeping, message->said, &message->what, message->fd);
        if (rc == PC_ERR_TIMEOUT) {
            note_stuck(keeping);
            return;
        }
        keeping->stuck_since_ns = keeping->full_since_ns = 0;
        if (rc == PC_ERR_CLOSED) {
            keeping->lost = true;
            return;
        }
        if (rc) /* the rest still can be */
            refuse(keeping, message, rc);
        pc__link_remove(&message->link);
        message_free(message);
    }
}

/* The process that listened where this connection was made. Without it a keeper that is slow for good is
 * waited for until somebody ends it. */
static int process_of(int keeper_fd)
{
#ifdef SYS_pidfd_open
    struct ucred peer;
    socklen_t n_bytes = sizeof peer;
    if (getsockopt(keeper_fd, SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes) == 0 && peer.pid > 0)
        return (int)syscall(SYS_pidfd_open, peer.pid, 0);
#endif
    return -1;
}

/* Under lock, which it drops: a keeper that takes nothing for so long (it is stopped, as a rule) is worth
 * less than another one, which is given everything. It goes first: two would hold the same memory. */
static void end_slow(struct pc__keeping *keeping)
{
    const int pid_fd = keeping->pid_fd;
    keeping->pid_fd = -1;
    keeping->lost = true;
    keeping->stuck_since_ns = now_ns(); /* the next one has as long */
    keeping->full_since_ns = 0;
    pthread_mutex_unlock(&keeping->lock);
#ifdef SYS_pidfd_send_signal
    struct pollfd ended = {.fd = pid_fd, .events = POLLIN};
    if (syscall(SYS_pidfd_send_signal, pid_fd, SIGKILL, NULL, 0) == 0)
        (void)poll(&ended, 1, ENDS_MS);
#endif
    close(pid_fd);
    pthread_mutex_lock(&keeping->lock);
}

/* Under lock, which it drops around what it calls. */
static void look(struct pc__keeping *keeping)
{
    struct pc__link waiting;
    if (keeping->next_fd >= 0) {
        close(keeping->fd);
        keeping->fd = keeping->next_fd;
        keeping->next_fd = -1;
        if (keeping->pid_fd >= 0)
            close(keeping->pid_fd);
        keeping->pid_fd = process_of(keeping->fd);
        begin_anew(keeping);
    }
    for (;;) {
        int rc = PC_OK;
        pc__link_init(&waiting);
        send_some(keeping);
        if (keeping->lost) {
            drop_messages(keeping);
            if (!keeping->stuck_since_ns)
                keeping->stuck_since_ns = now_ns();
        }
        const uint64_t now = now_ns();
        const bool is_slow = keeping->stuck_since_ns && now - keeping->stuck_since_ns >= SLOW_NS;
        const bool is_full = keeping->full_since_ns && now - keeping->full_since_ns >= SLOW_NS;
        if (is_full && !keeping->lost && !keeping->stopping && keeping->pid_fd >= 0) {
            end_slow(keeping);
            continue;
        }
        if (keeping->stopping)
            rc = PC_ERR_CLOSED;
        else if (is_slow)
            rc = PC_ERR_TIMEOUT;
        if (rc || !keeping->lost) /* else another one may come in a moment */
            take_waiting(keeping, rc != PC_OK, &waiting);
        const bool say_lost = keeping->lost && !keeping->told_lost && !keeping->closing;
        if (say_lost)
            keeping->told_lost = true;
        const int refused_rc = keeping->refused_rc;
        const struct pc__kept refused = keeping->refused;
        keeping->refused_rc = PC_OK;
        if (!say_lost && !refused_rc && pc__link_empty(&waiting))
            return;
        pthread_mutex_unlock(&keeping->lock);
        if (refused_rc)
            keeping->on_refused(keeping->arg, refused_rc, &refused);
        if (say_lost)
            keeping->on_lost(keeping->arg);
        tell(&waiting, rc, false);
        pthread_mutex_lock(&keeping->lock);
    }
}

static void *run(void *arg)
{
    struct pc__keeping *keeping = arg;
    uint64_t close_by_ns = 0;
    pthread_mutex_lock(&keeping->lock);
    for (;;) {
        look(keeping);
        if (keeping->closing) {
            if (!close_by_ns)
                close_by_ns = now_ns() + CLOSE_NS;
            if (keeping->lost || pc__link_empty(&keeping->queue) || now_ns() >= close_by_ns)
                break;
        }
        const bool is_busy = !pc__link_empty(&keeping->queue);
        struct pollfd fds[2] = {
            {.fd = keeping->lost ? -1 : keeping->fd, .events = is_busy ? POLLOUT : 0},
            {.fd = keeping->wake_fd, .events = POLLIN}};
        pthread_mutex_unlock(&keeping->lock);
        const int n = poll(fds, 2, is_busy ? STEP_MS : -1);
        if (n > 0 && fds[1].revents) {
            uint64_t count;
            (void)!read(keeping->wake_fd, &count, sizeof count);
        }
        if (n > 0 && fds[0].revents == POLLOUT) /* room, and it was refused: descriptors in flight */
            (void)poll(NULL, 0, RETRY_MS);
        pthread_mutex_lock(&keeping->lock);
        if (n > 0 && fds[0].revents & (POLLHUP | POLLERR | POLLNVAL) && keeping->next_fd < 0)
            keeping->lost = true;
    }
    pthread_mutex_unlock(&keeping->lock);
    return NULL;
}

int pc__keeping_renew(struct pc__keeping *keeping, int keeper_fd)
{
    const int fd = fcntl(keeper_fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return pc__fail_errno("dup of the keeper's socket");
    pthread_mutex_lock(&keeping->lock);
    if (keeping->next_fd >= 0)
        close(keeping->next_fd);
    keeping->next_fd = fd;
    keeping->lost = true; /* what is said until then is among what there is */
    wake(keeping);
    pthread_mutex_unlock(&keeping->lock);
    return PC_OK;
}

int pc__keeping_open(int keeper_fd, pc__keeper_lost *lost, pc__keeper_refused *refused, void *arg,
                     struct pc__keeping **out)
{
    struct pc__keeping *keeping = calloc(1, sizeof *keeping);
    if (!keeping)
        return pc__fail(PC_ERR_NO_MEMORY, "the keeper's record");
    pthread_mutex_init(&keeping->lock, NULL);
    pthread_cond_init(&keeping->changed, NULL);
    pc__kept_init(&keeping->table);
    pc__link_init(&keeping->queue);
    keeping->next_fd = keeping->pid_fd = -1;
    keeping->on_lost = lost;
    keeping->on_refused = refused;
    keeping->arg = arg;
    keeping->fd = fcntl(keeper_fd, F_DUPFD_CLOEXEC, 0);
    keeping->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = PC_OK;
    if (keeping->fd >= 0)
        keeping->pid_fd = process_of(keeping->fd);
    if (keeping->fd < 0 || keeping->wake_fd < 0) {
        rc = pc__fail_errno("the keeper's socket");
    } else {
        const int error = pthread_create(&keeping->thread, NULL, run, keeping);
        if (error)
            rc = pc__fail(PC_ERR_SYSTEM, "pthread_create: %s", strerror(error));
        keeping->has_thread = !error;
    }
    if (rc) {
        pc__keeping_close(keeping);
        return rc;
    }
    *out = keeping;
    return PC_OK;
}

void pc__keeping_stop(struct pc__keeping *keeping)
{
    pthread_mutex_lock(&keeping->lock);
    keeping->stopping = true;
    wake(keeping);
    pthread_mutex_unlock(&keeping->lock);
}

void pc__keeping_close(struct pc__keeping *keeping)
{
    struct pc__link waiting;
    if (keeping->has_thread) {
        pthread_mutex_lock(&keeping->lock);
        keeping->closing = keeping->stopping = true;
        wake(keeping);
        pthread_mutex_unlock(&keeping->lock);
        pthread_join(keeping->thread, NULL);
    }
    pc__link_init(&waiting);
    take_waiting(keeping, true, &waiting);
    tell(&waiting, PC_ERR_CLOSED, true);
    drop_messages(keeping);
    pc__kept_free(&keeping->table);
    if (keeping->fd >= 0)
        close(keeping->fd);
    if (keeping->next_fd >= 0)
        close(keeping->next_fd);
    if (keeping->wake_fd >= 0)
        close(keeping->wake_fd);
    if (keeping->pid_fd >= 0)
        close(keeping->pid_fd);
    pthread_cond_destroy(&keeping->changed);
    pthread_mutex_destroy(&keeping->lock);
    free(keeping);
}
