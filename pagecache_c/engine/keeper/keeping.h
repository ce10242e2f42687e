/* keeping.h - what the page server has given to its keeper, and in which order it says so.
 *
 * Whoever keeps or forgets a memfd does not wait: what the keeper's socket does not take at once is
 * sent later, in order, by a thread of ours. Who must know that the keeper has it (a layer's writer,
 * a base that is about to be changed) waits for that, or is called back. A keeper that dies is
 * noticed at once; another one is given all there is (pc__keeping_renew). One that takes nothing for
 * 30 s, so that its socket is full, is killed, and so it is replaced too. That the kernel has no memory
 * for a packet, or too many descriptors in flight, says nothing of the keeper: it is tried again.
 */
#ifndef PC_KEEPING_H
#define PC_KEEPING_H

#include "engine/keeper/keeper.h"

struct pc__keeping;

/* Called without a lock, at most once for each keeper, when it is gone. */
typedef void pc__keeper_lost(void *arg);
/* Called without a lock, for what can never be sent: a crash of this server would lose it. */
typedef void pc__keeper_refused(void *arg, int rc, const struct pc__kept *what);
/* Called without a lock. PC_OK: the keeper has heard all that was said before. Else it has not, and
 * nobody may be told that it is safe: PC_ERR_TIMEOUT, nothing could be sent for too long, or none has
 * come in place of one that died; PC_ERR_CLOSED, the server stops; else what was said before can never be
 * sent. cancelled: the server stops; free what it has. */
typedef void pc__keeper_heard(void *arg, int rc, bool cancelled);

/* Takes a duplicate of keeper_fd. */
int pc__keeping_open(int keeper_fd, pc__keeper_lost *lost, pc__keeper_refused *refused, void *arg,
                     struct pc__keeping **out);
/* From here on waits end with PC_ERR_CLOSED. */
void pc__keeping_stop(struct pc__keeping *keeping);
/* Says what was not said yet, as far as the keeper takes it within a few seconds. */
void pc__keeping_close(struct pc__keeping *keeping);

/* The keeper has it already: what a restarted server takes back. */
int pc__keeping_adopt(struct pc__keeping *keeping, const struct pc__kept *what, int fd);
/* The caller forgets it before it closes fd. */
int pc__keeping_put(struct pc__keeping *keeping, const struct pc__kept *what, int fd);
void pc__keeping_drop(struct pc__keeping *keeping, uint64_t inode);
/* As put, for a record that is there; false: not without waiting, and nothing has changed. */
bool pc__keeping_put_now(struct pc__keeping *keeping, const struct pc__kept *what);

/* Something is still to be said, or there is no keeper. */
bool pc__keeping_is_behind(struct pc__keeping *keeping);
/* PC_OK: all that was said before is heard. */
int pc__keeping_wait(struct pc__keeping *keeping);
/* PC_OK: all is heard, and nobody will be called. 1: heard is called. Negative: no memory to wait. */
int pc__keeping_when(struct pc__keeping *keeping, pc__keeper_heard *heard, void *arg);

/* Why a wait ended with rc, in words for people, which begin with "the keeper". */
#define PC__KEEPING_TEXT_BYTES 128
void pc__keeping_error_text(struct pc__keeping *keeping, int rc, char *text, size_t text_bytes);

/* Another keeper, in place of one that is lost. */
int pc__keeping_renew(struct pc__keeping *keeping, int keeper_fd);

#endif
