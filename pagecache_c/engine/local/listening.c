/* listening.c - the name by which the processes of this node find the page server.
 *
 * It is a file in a directory below /tmp, which a cleaner, or a person, may remove while the server
 * lives: no new process would reach it then, nor one whose connection has ended. So loop 0 looks for
 * the file every PC__LOCAL_LOOK_NS, and listens anew where it is gone. Connections stay as they are.
 *
 * Owns engine->listen_fd and loop 0's listen_watch while that loop runs.
 */
#include "engine/core/core.h"
#include "engine/local/local.h"

#include <sys/epoll.h>
#include <unistd.h>

/* By mail: what was written before is seen by the loop. */
static void begin(struct pc__loop *loop, struct pc__mail *mail)
{
    (void)mail;
    loop->engine->look_at_ns = pc__now_ns() + PC__LOCAL_LOOK_NS;
}

int pc__listening_start(struct pc_engine *engine)
{
    const struct pc__mail mail = {.run = begin};
    return pc__loop_post(&engine->loops[0], &mail);
}

uint64_t pc__listening_deadline(const struct pc__loop *loop)
{
    const uint64_t look_at_ns = loop->index == 0 ? loop->engine->look_at_ns : 0;
    return look_at_ns ? look_at_ns : UINT64_MAX;
}

static int renew(struct pc__loop *loop, int fd)
{
    struct pc_engine *engine = loop->engine;
    while (pc__session_accept(loop, engine->listen_fd)) /* who came before the name went */
        ;
    struct pc__watch *watch = pc__watch_add(loop, PC__WATCH_LISTEN, fd, 0, NULL,
                                            loop->accept_again_ns ? 0 : EPOLLIN);
    if (!watch) {
        engine->listen_file = (struct pc__local_file){0};
        close(fd);
        return PC_ERR_SYSTEM;
    }
    pc__watch_remove(loop, loop->listen_watch);
    close(engine->listen_fd);
    loop->listen_watch = watch;
    engine->listen_fd = fd;
    return PC_OK;
}

void pc__listening_tick(struct pc__loop *loop, uint64_t now_ns)
{
    struct pc_engine *engine = loop->engine;
    int fd;
    if (pc__listening_deadline(loop) > now_ns)
        return;
    engine->look_at_ns = now_ns + PC__LOCAL_LOOK_NS;
    int rc = pc__local_look(engine->socket_name, PC__LISTEN_BACKLOG, &engine->listen_file, &fd);
    if (rc == PC_OK && fd >= 0) {
        rc = renew(loop, fd);
        if (rc == PC_OK)
            pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_SYSTEM, 0, 0,
                             "somebody removed the socket %s: it is there again",
                             engine->socket_name);
    }
    if (rc != PC_OK && !engine->look_fails)
        pc__engine_event(engine, PC_EVENT_LOG, rc, 0, 0,
                         "somebody removed the socket %s, and it cannot be made again yet, so no new "
                         "process of this node can attach: %s",
                         engine->socket_name, pc_last_message());
    engine->look_fails = rc != PC_OK;
}
