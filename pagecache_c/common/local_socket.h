/* local_socket.h - the Unix sockets of a node: their addresses, and who may listen on one.
 *
 * A name that begins with '/' is a path; its directory is this user's alone (the page server's
 * actor makes and checks it: actors/process/socket_directory.py), so no other user can take the
 * name. Any other name is abstract, which every local user can take first: for test programs.
 */
#ifndef PC_LOCAL_SOCKET_H
#define PC_LOCAL_SOCKET_H

#include <sys/socket.h>
#include <sys/un.h>

#define PC__SOCKET_NAME_BYTES 108 /* as sun_path */

/* PC_ERR_RANGE: the name is empty, or longer than 107 bytes. */
int pc__local_address(const char *name, struct sockaddr_un *address, socklen_t *n_bytes);

/* Listens (SOCK_SEQPACKET, does not block). A file that a killed process has left under the name
 * is replaced; so are the others of its directory removed.
 * PC_ERR_EXISTS: a living process has the name. PC_ERR_TIMEOUT: others kept the directory locked
 * for seconds. */
int pc__local_listen(const char *name, int backlog, int *fd);

/* Closes what pc__local_listen gave, and removes its file. errno stays. */
void pc__local_close(const char *name, int fd);

/* Whether a connect() that failed with this errno says that nobody listens there, or not yet. */
int pc__local_nobody(int errnum);

#endif
