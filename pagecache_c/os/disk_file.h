/* disk_file.h - files without names on a file system: they are gone with their last descriptor.
 *
 * Owns nothing: descriptors are their caller's. Any thread, no lock.
 *
 * Kernel facts:
 *   - ext4, xfs, btrfs and tmpfs make files without names (O_TMPFILE); overlayfs before Linux 6.x
 *     and NFS do not: there a file is made and unlinked.
 *   - preadv2 with RWF_NOWAIT gives what is in the page cache. NFS and some others refuse it.
 *   - What a disk refuses after write() has returned is dropped: the page is clean then, and once it is
 *     reclaimed the block reads as what the disk has. The file notes that it happened, and says it once to
 *     each descriptor, to fsync and to sync_file_range that waits.
 */
#ifndef PC_DISK_FILE_H
#define PC_DISK_FILE_H

#include <stdbool.h>
#include <stdint.h>

/* Of this user alone. The descriptor, or -1 with errno. */
int pc__disk_file_open(const char *directory);

/* All of it, from offset on. PC_OK, or an error: the file ends before it, or the disk fails. */
int pc__file_read(int fd, void *out, uint64_t n_bytes, uint64_t offset);

/* Likewise, of a file on disk: it is an error, too, that the disk has
 * failed to write what was to be there (pc__disk_file_check). */
int pc__disk_file_read(int fd, void *out, uint64_t n_bytes, uint64_t offset);

/* All of it, from offset on. PC_OK, or an error; PC_ERR_NO_SPACE where the disk is full. */
int pc__disk_file_write(int fd, const void *bytes, uint64_t n_bytes, uint64_t offset);

/* Whether it is a memfd, or a file that is as good as one: only such files can be sealed. */
bool pc__is_memfd(int fd);
/* Whether files of this file system are in memory, sealed or not. */
struct statfs;
bool pc__is_in_memory(const struct statfs *system);

/* As pc__file_read, without a wait for the disk: false where it would have to wait, or where nobody knows. */
bool pc__disk_file_try(int fd, void *out, uint64_t n_bytes, uint64_t offset);

/* PC_OK, or an error: the disk refused to write some of what was written to the file. Such a file is cut to
 * nothing, so that nobody reads it any more: here, after a restart, or mapped (SIGBUS). Nobody may write to it
 * from then on: that would make zeros of what it had. One that has a name is a home that outlives its session: it
 * stays as it is, for the next one has what was written, in files that were synced. */
int pc__disk_file_check(int fd);
bool pc__disk_file_has_name(int fd);
bool pc__disk_file_is_cut(int fd);

/* errno as an error: PC_ERR_NO_SPACE where the disk is full. Its message is as pc__fail_errno's. */
__attribute__((format(printf, 1, 2))) int pc__fail_disk(const char *fmt, ...);

#endif
