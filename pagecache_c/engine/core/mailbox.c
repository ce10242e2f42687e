/* mailbox.c - how others reach a loop: what its epoll watches, and the mail that any thread may post.
 *
 * A watch that is removed while a batch of events is being worked through is freed after the batch
 * (loop.c): a later event of the same batch may still point at it.
 */
#include "engine/core/core.h"

#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

uint64_t pc__now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct pc__watch *pc__watch_add(struct pc__loop *loop, enum pc__watch_kind kind, int fd, int lane,
                                void *owner, uint32_t events)
{
    struct pc__watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        return NULL;
    *watch = (struct pc__watch){.kind = kind, .fd = fd, .lane = lane, .owner = owner};
    struct epoll_event event = {.events = events, .data.ptr = watch};
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, fd, &event)) {
        (void)pc__fail_errno("epoll_ctl");
        free(watch);
        return NULL;
    }
    return watch;
}

void pc__watch_change(struct pc__loop *loop, struct pc__watch *watch, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = watch};
    (void)epoll_ctl(loop->epoll, EPOLL_CTL_MOD, watch->fd, &event);
}

void pc__watch_remove(struct pc__loop *loop, struct pc__watch *watch)
{
    if (!watch || watch->dead)
        return;
    (void)epoll_ctl(loop->epoll, EPOLL_CTL_DEL, watch->fd, NULL);
    watch->dead = true;
    watch->grave_next = loop->graves;
    loop->graves = watch;
}

int pc__loop_post(struct pc__loop *loop, const struct pc__mail *mail)
{
    struct pc__mail *copy = malloc(sizeof *copy);
    if (!copy)
        return pc__fail(PC_ERR_NO_MEMORY, "a message between threads");
    *copy = *mail;
    copy->next = NULL;
    pthread_mutex_lock(&loop->mail_lock);
    if (loop->mail_tail)
        loop->mail_tail->next = copy;
    else
        loop->mail_head = copy;
    loop->mail_tail = copy;
    pthread_mutex_unlock(&loop->mail_lock);
    uint64_t one = 1;
    (void)!write(loop->mail_event, &one, sizeof one); /* fails only when it is readable already */
    return PC_OK;
}
