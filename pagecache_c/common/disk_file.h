/* disk_file.h - files without names on a file system: they are gone with their last descriptor.
 *
 * Owns nothing: descriptors are their caller's. Any thread, no lock.
 *
 * Kernel facts:
 *   - ext4, xfs, btrfs and tmpfs make files without names (O_TMPFILE); overlayfs before Linux 6.x
 *     and NFS do not: there a file is made and unlinked.
 */
#ifndef PC_DISK_FILE_H
#define PC_DISK_FILE_H

#include <stdint.h>

/* Of this user alone. The descriptor, or -1 with errno. */
int pc__disk_file_open(const char *directory);

/* All of it, from offset on. PC_OK, or an error: the file ends before it, or the disk fails. */
int pc__disk_file_read(int fd, void *out, uint64_t n_bytes, uint64_t offset);

#endif
