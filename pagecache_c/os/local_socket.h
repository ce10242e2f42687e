/* local_socket.h - the Unix sockets of a node: their addresses, and who may listen on one.
 *
 * A name that begins with '/' is a path; its directory is this user's alone (the page server's
 * actor makes and checks it: actors/process/socket_directory.py), so no other user can take the
 * name. Any other name is abstract, which every local user can take first: for test programs.
 */
#ifndef PC_LOCAL_SOCKET_H
#define PC_LOCAL_SOCKET_H

#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#define PC__SOCKET_NAME_BYTES 108 /* as sun_path */

/* PC_ERR_RANGE: the name is empty, or longer than 107 bytes. */
int pc__local_address(const char *name, struct sockaddr_un *address, socklen_t *n_bytes);

/* Listens (SOCK_SEQPACKET, does not block). A file that a killed process has left under the name
 * is replaced; so are the others of its directory removed.
 * PC_ERR_EXISTS: a living process has the name. PC_ERR_TIMEOUT: others kept the directory locked
 * for seconds. */
int pc__local_listen(const char *name, int backlog, int *fd);

/* The file under a name that somebody listens on: which one it is. */
struct pc__local_file {
    dev_t device;
    ino_t inode; /* 0: it is not there */
};

/* Who listens on a path looks so often whether its file is there. Who looks for a living process by
 * its path, and finds no file, waits twice as long before it believes that there is none
 * (page_server.py). */
#define PC__LOCAL_LOOK_NS 2000000000ull

void pc__local_note_file(const char *name, struct pc__local_file *file);

/* Sees to it that a path leads to who listens there: its directory, or the file, may have been removed
 * (a cleaner of /tmp, a person). *fd: -1: it does, and both are marked as used once an hour. Else a
 * new socket that listens under the name: the caller takes what waits at the old one, and closes it
 * with close(). An error: it does not, and cannot now. */
int pc__local_look(const char *name, int backlog, struct pc__local_file *file, int *fd);

/* Closes what pc__local_listen gave, and removes its file. errno stays. */
void pc__local_close(const char *name, int fd);

/* Whether a connect() that failed with this errno says that nobody listens there, or not yet. */
int pc__local_nobody(int errnum);

#endif
