/* events.c - what the engine says to Python: questions, lines of the log, ends of regions. A ring; any
 * thread may enter. Lock: event_lock, a leaf.
 */
#include "engine/core/core.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static bool grow_events(struct pc_engine *engine)
{
    size_t capacity = engine->events_capacity * 2;
    struct pc_event *grown = calloc(capacity, sizeof *grown);
    if (!grown)
        return false;
    for (size_t i = 0; i < engine->n_events; i++)
        grown[i] = engine->events[(engine->events_begin + i) % engine->events_capacity];
    free(engine->events);
    engine->events = grown;
    engine->events_begin = 0;
    engine->events_capacity = capacity;
    return true;
}

static bool put_event(struct pc_engine *engine, const struct pc_event *event)
{
    pthread_mutex_lock(&engine->event_lock);
    /* Lines for people are dropped when Python is behind. Questions never are: there is at most
     * one for each region, lane and layer, and the ring grows to hold them. */
    bool room = event->kind == PC_EVENT_LOG ? engine->n_events < PC__LOG_EVENTS
                                            : engine->n_events < engine->events_capacity ||
                                                  grow_events(engine);
    if (room) {
        engine->events[(engine->events_begin + engine->n_events) % engine->events_capacity] =
            *event;
        engine->n_events++;
    }
    pthread_mutex_unlock(&engine->event_lock);
    uint64_t one = 1;
    (void)!write(engine->event_fd, &one, sizeof one);
    return room;
}

bool pc__engine_event(struct pc_engine *engine, int kind, int error, uint64_t region,
                      uint64_t server_id, const char *format, ...)
{
    struct pc_event event = {.kind = kind, .error = error, .region = region,
                             .server_id = server_id};
    va_list args;
    va_start(args, format);
    vsnprintf(event.text, sizeof event.text, format, args);
    va_end(args);
    return put_event(engine, &event);
}

bool pc__engine_request(struct pc_engine *engine, const struct pc_event *event)
{
    return put_event(engine, event);
}

PC_API int pc_engine_event_fd(pc_engine *engine)
{
    return engine->event_fd;
}

PC_API int pc_engine_next_event(pc_engine *engine, struct pc_event *out)
{
    int found = 0;
    pthread_mutex_lock(&engine->event_lock);
    if (engine->n_events) {
        *out = engine->events[engine->events_begin];
        engine->events_begin = (engine->events_begin + 1) % engine->events_capacity;
        engine->n_events--;
        found = 1;
    } else {
        uint64_t count; /* under the lock: an event posted after this makes it readable again */
        (void)!read(engine->event_fd, &count, sizeof count);
    }
    pthread_mutex_unlock(&engine->event_lock);
    return found;
}

bool pc__engine_makes_huge_pages(struct pc_engine *engine)
{
    char why[PC__HUGE_PAGES_WHY_BYTES];
    /* Each seal looks: by files that are open already, where they could be opened. */
    if (engine->setting.n && !pc__huge_pages_now(&engine->setting))
        return false;
    if (!pc__huge_pages(why))
        return false;
    if (!atomic_exchange(&engine->huge_pages, true))
        pc__engine_event(engine, PC_EVENT_LOG, PC_ERR_HUGE_PAGES, 0, 0,
                         "%s in /sys/kernel/mm/transparent_hugepage: this server copies what it "
                         "sends, and makes single pages before it writes, which takes longer. Set "
                         "it to never or advise", why);
    return true;
}
