/* loop.c - one thread, one epoll: hands events to whoever owns the descriptor, in order.
 *
 * Other threads enter only by mail (core/mailbox.c). Sleeps without a timer when nothing is in flight,
 * but loop 0, which looks after the socket's name every two seconds: an idle server costs next to nothing.
 */
#include "engine/core/core.h"
#include "engine/local/local.h"
#include "engine/loop.h"
#include "engine/miss/miss.h"
#include "engine/repair/repair.h"
#include "engine/serve/serve.h"
#include "engine/store/store.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define BATCH 64

static void read_mail(struct pc__loop *loop)
{
    uint64_t count;
    (void)!read(loop->mail_event, &count, sizeof count);
    pthread_mutex_lock(&loop->mail_lock);
    struct pc__mail *mail = loop->mail_head;
    loop->mail_head = loop->mail_tail = NULL;
    pthread_mutex_unlock(&loop->mail_lock);
    while (mail) {
        struct pc__mail *next = mail->next;
        mail->run(loop, mail);
        free(mail);
        mail = next;
    }
}

static void dispatch(struct pc__loop *loop, struct pc__watch *watch, uint32_t events)
{
    switch (watch->kind) {
    case PC__WATCH_MAIL:
        read_mail(loop);
        break;
    case PC__WATCH_LISTEN:
        (void)pc__session_accept(loop, watch->fd);
        break;
    case PC__WATCH_CLIENT:
        pc__session_event(loop, watch->owner, events);
        break;
    case PC__WATCH_UFFD:
        pc__fault_read_uffd(loop, watch->owner);
        break;
    case PC__WATCH_SLOTS:
        pc__fault_read_slots(loop, watch->owner);
        break;
    case PC__WATCH_LANE:
        pc__lane_event(loop, watch->owner, watch->lane, events);
        break;
    case PC__WATCH_SERVED:
        pc__served_event(loop, watch->owner, events);
        break;
    }
}

static int sleep_ms(struct pc__loop *loop)
{
    uint64_t deadline = pc__peers_deadline(loop);
    uint64_t other = pc__repairs_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__served_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__settle_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__layers_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__leases_deadline(loop->engine);
    deadline = other < deadline ? other : deadline;
    other = pc__sessions_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__disk_jobs_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__listening_deadline(loop);
    deadline = other < deadline ? other : deadline;
    other = pc__files_deadline(loop);
    deadline = other < deadline ? other : deadline;
    if (deadline == UINT64_MAX)
        return -1;
    uint64_t now = pc__now_ns();
    uint64_t ms = deadline > now ? (deadline - now) / 1000000u + 1 : 0;
    return ms > 3600000u ? 3600000 : (int)ms;
}

static void bury(struct pc__loop *loop)
{
    while (loop->graves) {
        struct pc__watch *grave = loop->graves;
        loop->graves = grave->grave_next;
        free(grave);
    }
}

static void *run(void *arg)
{
    struct pc__loop *loop = arg;
    struct epoll_event events[BATCH];
    while (!loop->stopping) {
        int n = epoll_wait(loop->epoll, events, BATCH, sleep_ms(loop));
        for (int i = 0; i < n; i++) {
            struct pc__watch *watch = events[i].data.ptr;
            if (!watch->dead)
                dispatch(loop, watch, events[i].events);
        }
        uint64_t now = pc__now_ns();
        pc__peers_tick(loop, now);
        pc__repairs_tick(loop, now);
        pc__served_tick(loop, now);
        pc__sessions_tick(loop, now);
        pc__listening_tick(loop, now);
        pc__leases_tick(loop->engine, now);
        pc__settle_tick(loop, now);
        pc__layers_tick(loop, now);
        pc__disk_jobs_tick(loop, now);
        pc__files_tick(loop, now);
        bury(loop);
    }
    pc__sessions_close(loop);
    pc__repairs_close(loop);
    pc__peers_close(loop);
    pc__repairs_free(loop);
    pc__served_close_all(loop);
    return NULL;
}

static void stop_here(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    loop->stopping = true;
}

int pc__loop_start(struct pc_engine *engine, struct pc__loop *loop, int index)
{
    loop->engine = engine;
    loop->index = index;
    loop->next_request_id = 1;
    pc__link_init(&loop->sessions);
    pc__link_init(&loop->peers);
    pc__link_init(&loop->served);
    pthread_mutex_init(&loop->mail_lock, NULL);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->mail_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->epoll < 0 || loop->mail_event < 0)
        return pc__fail_errno("epoll_create1 or eventfd");
    loop->mail_watch = pc__watch_add(loop, PC__WATCH_MAIL, loop->mail_event, 0, NULL, EPOLLIN);
    if (!loop->mail_watch)
        return PC_ERR_SYSTEM;
    /* Signals belong to Python's main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int rc = pthread_create(&loop->thread, NULL, run, loop);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        errno = rc;
        return pc__fail_errno("pthread_create");
    }
    (void)pthread_setname_np(loop->thread, "clamor-engine"); /* for people, and for tests */
    loop->started = true;
    return PC_OK;
}

void pc__loop_join(struct pc__loop *loop)
{
    if (loop->started) {
        const struct pc__mail mail = {.run = stop_here};
        if (pc__loop_post(loop, &mail))
            return; /* out of memory: the process is going anyway */
        pthread_join(loop->thread, NULL);
        loop->started = false;
    }
}

void pc__loop_stop(struct pc__loop *loop)
{
    if (loop->started)
        return;
    while (loop->mail_head) { /* came after the stop: nobody runs it */
        struct pc__mail *mail = loop->mail_head;
        loop->mail_head = mail->next;
        free(mail);
    }
    pc__watch_remove(loop, loop->mail_watch);
    pc__watch_remove(loop, loop->listen_watch);
    bury(loop);
    if (loop->epoll >= 0)
        close(loop->epoll);
    if (loop->mail_event >= 0)
        close(loop->mail_event);
    pthread_mutex_destroy(&loop->mail_lock);
}
