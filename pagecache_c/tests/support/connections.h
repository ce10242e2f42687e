/* connections.h - what happens to the connections of clients while their page server lives. */
#ifndef PC_TEST_CONNECTIONS_H
#define PC_TEST_CONNECTIONS_H

#include "engine/core/core.h"
#include "engine/local/local.h"
#include "tests/support/commit.h"

#include <sys/epoll.h>

static _Atomic int told_loops;

static inline void run_in_loops(struct server *s, void (*run)(struct pc__loop *, struct pc__mail *), uint64_t a)
{
    int before = told_loops;
    for (int i = 0; i < s->engine->n_loops; i++) {
        const struct pc__mail mail = {.run = run, .a = a};
        OK(pc__loop_post(&s->engine->loops[i], &mail));
    }
    SOON(told_loops == before + s->engine->n_loops);
}

static inline void end_connection(struct pc__loop *loop, struct pc__mail *mail)
{
    pc__each(link, &loop->sessions)
    {
        struct pc__session *client = pc__of(link, struct pc__session, link);
        if (client->id == mail->a || (!mail->a && client->said_hello))
            (void)shutdown(client->fd, SHUT_RDWR);
    }
    told_loops++;
}

/* As the server does where a client's socket is full. id 0: all of them. */
static inline void lose(struct server *s, uint64_t id)
{
    run_in_loops(s, end_connection, id);
}

static inline void stop_listening(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    if (loop->listen_watch)
        pc__watch_change(loop, loop->listen_watch, 0);
    told_loops++;
}

static inline void listen_again(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    if (loop->listen_watch)
        pc__watch_change(loop, loop->listen_watch, EPOLLIN);
    told_loops++;
}

/* Between these, who is lost stays lost: its connection waits to be taken. */
static inline void shut_door(struct server *s)
{
    run_in_loops(s, stop_listening, 0);
}

static inline void open_door(struct server *s)
{
    run_in_loops(s, listen_again, 0);
}

/* The id of the connection that was opened last. */
static inline uint64_t newest(struct server *s)
{
    pthread_mutex_lock(&s->engine->lock);
    uint64_t id = s->engine->next_session_id;
    pthread_mutex_unlock(&s->engine->lock);
    return id;
}

#endif
