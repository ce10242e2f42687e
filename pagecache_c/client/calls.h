/* calls.h - how the client talks with its page server: packets on a connection, and requests whose
 * replies threads wait for. The locks: client.h.
 */
#ifndef PC_CLIENT_CALLS_H
#define PC_CLIENT_CALLS_H

#include "common/wire.h"
#include "pagecache.h"

#include <stdbool.h>

#define PC__REPLY_BYTES 220 /* no reply is longer; of a refusal: why, NUL-terminated, or nothing */

/* A request on its way, and its reply. On its requester's stack or heap. */
struct pc__call {
    struct pc__call *next;
    uint64_t opens;        /* id of the mapping that an OPEN leases; set before it starts */
    const int *gives;      /* a descriptor that goes along, or NULL; set before it starts */
    uint64_t epoch;        /* the connection that it went out on */
    uint32_t request_id;   /* 0: it never went out */
    bool is_done, is_dropped; /* dropped: the connection died first */
    int status;
    size_t body_bytes;
    unsigned char body[PC__REPLY_BYTES];
    int n_fds;
    bool fds_lost;         /* there were more than we could take */
    int fds[PC__CTL_MAX_FDS];
};

/* conn.c */

/* A packet as it arrived. */
struct pc__packet {
    struct pc__ctl_message message;
    int fds[PC__CTL_MAX_FDS];
    int n_fds;
    bool fds_lost;
    unsigned char bytes[PC__CTL_MAX_BYTES];
};
void pc__fds_close(int *fds, int *n_fds);
/* MSG_DONTWAIT. 1: one packet; 0: none now; PC_ERR_NO_SERVER: the end; PC_ERR_PROTOCOL. */
int pc__conn_receive(int fd, struct pc__packet *packet);
/* MSG_DONTWAIT. 1: sent; 0: no room now; negative: pc_err. tail may be NULL. */
int pc__conn_send(int fd, uint16_t type, uint32_t request_id, const void *body, size_t body_bytes,
                  const void *tail, size_t tail_bytes, const int *fds, int n_fds);

/* The id of requests whose reply call.c is not to hand over: it never counts that far up. */
#define PC__REQUEST_ALONE UINT32_MAX

/* How long a thread that talks on a connection alone waits, and what it looks at meanwhile. */
struct pc__patience {
    pc_client *client;               /* PC_ERR_CLOSED when it closes */
    uint64_t deadline_ns;
    void (*stuck)(pc_client *client); /* nobody serves: looks whether a thread is stopped; or NULL */
};
/* 1: fd (or nothing, if -1) is ready; else PC_ERR_TIMEOUT or PC_ERR_CLOSED. */
int pc__patient_wait(const struct pc__patience *patience, int fd, short events);
/* One try, no wait. */
int pc__conn_connect(const char *name, int *fd);
/* Sends, and waits for the reply. The status in it is returned in call->status. */
int pc__conn_exchange(const struct pc__patience *patience, int fd, uint16_t type,
                      const void *body, size_t body_bytes, const int *fds, int n_fds,
                      struct pc__call *call);
/* A message that nobody answers: waits for room. */
int pc__conn_tell(const struct pc__patience *patience, int fd, uint16_t type);
/* Another number for the client. */
void pc__conn_number(pc_client *client);
/* Connects until it works, and says hello with the client's trap. */
int pc__conn_hello(const struct pc__patience *patience, int *fd);
/* Says hello, and waits for nothing. */
int pc__conn_greet(pc_client *client, int fd);
/* Takes the reply's body and descriptors out of the packet. */
void pc__call_take(struct pc__call *call, struct pc__packet *packet);
/* A FAIL message: ends the process. */
_Noreturn void pc__conn_failed(pc_client *client, int fd, const struct pc__ctl_message *message);

/* call.c */

/* Sends a request and waits for its reply. With resend it goes out again after each re-attach,
 * else a lost connection is PC_ERR_NO_SERVER. Returns the status of the reply. */
int pc__call(pc_client *client, uint16_t type, const void *body, size_t body_bytes, bool resend,
             uint64_t deadline_ns, struct pc__call *call);
/* The two halves of it. start waits for a connection and for room; takes and drops the lock. */
int pc__call_start(pc_client *client, uint16_t type, const void *body, size_t body_bytes,
                   const void *tail, size_t tail_bytes, uint64_t deadline_ns,
                   struct pc__call *call);
int pc__call_finish(pc_client *client, struct pc__call *call, uint64_t deadline_ns);
/* After start, instead of finish or after it: nobody will look at the reply. */
void pc__call_cancel(pc_client *client, struct pc__call *call);
/* Under lock: 0, or why no call can be made. */
int pc__call_refused(const pc_client *client);
/* Under lock: hands a reply over, or closes what nobody waits for. */
void pc__call_reply(pc_client *client, struct pc__packet *packet);
/* Under lock: nothing that was sent will be answered. */
void pc__call_drop_all(pc_client *client);
/* The server has said that the session ended. Returns PC_ERR_ENDED. */
int pc__call_ended(pc_client *client);
/* Under lock: returns 0 after PC_ERR_TIMEOUT. */
bool pc__changed_wait(pc_client *client, uint64_t deadline_ns);
/* Under lock: a message that nobody waits for the answer of, now or when there is room. Lost with
 * the connection. PC_ERR_NO_MEMORY: not sent. */
int pc__outbox_send(pc_client *client, uint16_t type, const void *body, size_t body_bytes);
void pc__outbox_flush(pc_client *client);
void pc__outbox_clear(pc_client *client);

/* stage.c */
/* The layer's file, with its head and runs; the caller has said whose it is, fills in the blocks, hands it
 * over, and closes it. */
int pc__layer_begin(struct pc__layer_head *head, const struct pc_run *runs, size_t n_runs);
int pc__layer_hand_over(pc_client *client, int fd, const struct pc__layer_head *head,
                        uint64_t deadline_ns, uint64_t *server_id);

#endif
