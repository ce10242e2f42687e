/* test_client_states.c - which steps the states of a client and of a mapping take, and no others. */
#include "tests/support/check.h"

#include "client/client.h"

static void steps_of_a_client(void)
{
    static const struct {
        enum pc__client_step step;
        enum pc__conn_state from, to;
    } all[] = {{PC__CLIENT_CONNECT, PC__CONN_LOST, PC__CONN_UP},
               {PC__CLIENT_CONNECT, PC__CONN_FORKED, PC__CONN_UP},
               {PC__CLIENT_LOSE, PC__CONN_UP, PC__CONN_LOST},
               {PC__CLIENT_FORK, PC__CONN_UP, PC__CONN_FORKED},
               {PC__CLIENT_FORK, PC__CONN_LOST, PC__CONN_FORKED},
               {PC__CLIENT_FORK, PC__CONN_FORKED, PC__CONN_FORKED}, /* a child's child */
               {PC__CLIENT_CLOSE, PC__CONN_UP, PC__CONN_CLOSED},
               {PC__CLIENT_CLOSE, PC__CONN_LOST, PC__CONN_CLOSED},
               {PC__CLIENT_CLOSE, PC__CONN_FORKED, PC__CONN_CLOSED},
               {PC__CLIENT_CLOSE, PC__CONN_CLOSED, PC__CONN_CLOSED}}; /* shut, then close */
    const size_t n = sizeof all / sizeof all[0];
    static pc_client client;
    size_t n_may = 0;
    for (int step = 0; step <= PC__CLIENT_CLOSE; step++)
        for (int from = 0; from <= PC__CONN_CLOSED; from++) {
            client.state = (enum pc__conn_state)from;
            n_may += pc__client_may(&client, (enum pc__client_step)step);
        }
    REQUIRE(n_may == n);
    for (size_t i = 0; i < n; i++) {
        client.state = all[i].from;
        REQUIRE(pc__client_may(&client, all[i].step));
        pc__client_goes(&client, all[i].step);
        REQUIRE(client.state == all[i].to);
    }
}

static void steps_of_a_mapping(void)
{
    static const struct {
        enum pc__mapping_step step;
        enum pc__mapping_state from, to;
    } all[] = {{PC__MAPPING_OPEN, PC__MAPPING_OPENING, PC__MAPPING_LIVE},
               {PC__MAPPING_GUARD, PC__MAPPING_LIVE, PC__MAPPING_GUARDED},
               {PC__MAPPING_GUARD, PC__MAPPING_GUARDED, PC__MAPPING_GUARDED}, /* not to be had again */
               {PC__MAPPING_REGAIN, PC__MAPPING_GUARDED, PC__MAPPING_LIVE}};
    const size_t n = sizeof all / sizeof all[0];
    struct pc__mapping mapping = {0};
    size_t n_may = 0;
    for (int step = 0; step <= PC__MAPPING_REGAIN; step++)
        for (int from = 0; from <= PC__MAPPING_GUARDED; from++) {
            mapping.state = (enum pc__mapping_state)from;
            n_may += pc__mapping_may(&mapping, (enum pc__mapping_step)step);
        }
    REQUIRE(n_may == n);
    for (size_t i = 0; i < n; i++) {
        mapping.state = all[i].from;
        REQUIRE(pc__mapping_may(&mapping, all[i].step));
        pc__mapping_goes(&mapping, all[i].step);
        REQUIRE(mapping.state == all[i].to);
    }
}

int main(void)
{
    steps_of_a_client();
    steps_of_a_mapping();
    return 0;
}
