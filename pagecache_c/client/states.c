/* states.c - how the state of a connection and of a mapping changes. Pure; the caller has client.lock, or is
 * the only thread that there is (a client that opens, a child that attaches).
 *
 *   a client      UP        LOST      FORKED    CLOSED
 *   CONNECT                 UP        UP                    a server has heard hello
 *   LOSE          LOST                                      the connection is gone
 *   FORK          FORKED    FORKED    FORKED                a child of fork, or one that could not attach
 *   CLOSE         CLOSED    CLOSED    CLOSED    CLOSED
 *
 *   a mapping     OPENING   LIVE      GUARD
 *   OPEN          LIVE                                      its memory is laid, its lease is there
 *   GUARD                   GUARD     GUARD                 after a fork it cannot be had, or not yet
 *   REGAIN                            LIVE                  the child has a lease of its own
 *
 * What is not there cannot happen: the caller has looked at the state.
 */
#include "client/client.h"

#include <assert.h>

#define NEVER (-1)

static const int next_of_client[PC__CLIENT_CLOSE + 1][PC__CONN_CLOSED + 1] = {
    [PC__CLIENT_CONNECT] = {NEVER, PC__CONN_UP, PC__CONN_UP, NEVER},
    [PC__CLIENT_LOSE] = {PC__CONN_LOST, NEVER, NEVER, NEVER},
    [PC__CLIENT_FORK] = {PC__CONN_FORKED, PC__CONN_FORKED, PC__CONN_FORKED, NEVER},
    [PC__CLIENT_CLOSE] = {PC__CONN_CLOSED, PC__CONN_CLOSED, PC__CONN_CLOSED, PC__CONN_CLOSED},
};

static const int next_of_mapping[PC__MAPPING_REGAIN + 1][PC__MAPPING_GUARDED + 1] = {
    [PC__MAPPING_OPEN] = {PC__MAPPING_LIVE, NEVER, NEVER},
    [PC__MAPPING_GUARD] = {NEVER, PC__MAPPING_GUARDED, PC__MAPPING_GUARDED},
    [PC__MAPPING_REGAIN] = {NEVER, NEVER, PC__MAPPING_LIVE},
};

bool pc__client_may(const pc_client *client, enum pc__client_step step)
{
    return next_of_client[step][client->state] != NEVER;
}

void pc__client_goes(pc_client *client, enum pc__client_step step)
{
    assert(pc__client_may(client, step));
    if (pc__client_may(client, step))
        client->state = (enum pc__conn_state)next_of_client[step][client->state];
}

bool pc__mapping_may(const struct pc__mapping *mapping, enum pc__mapping_step step)
{
    return next_of_mapping[step][mapping->state] != NEVER;
}

void pc__mapping_goes(struct pc__mapping *mapping, enum pc__mapping_step step)
{
    assert(pc__mapping_may(mapping, step));
    if (pc__mapping_may(mapping, step))
        mapping->state = (enum pc__mapping_state)next_of_mapping[step][mapping->state];
}
