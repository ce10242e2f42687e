/* file_id.h - what names a file, of memory or of a disk, among all of a machine.
 *
 * Each file system numbers its files by itself, and memory is one of them. Two files of one file system
 * have different ids. Of two file systems they have, unless their numbers are apart by what the ids of
 * the systems make of it, which no numbers that are given out in turn are.
 */
#ifndef PC_FILE_ID_H
#define PC_FILE_ID_H

#include <stdint.h>
#include <sys/stat.h>

static inline uint64_t pc__file_id_of(uint64_t device, uint64_t number)
{
    return number + device * 0x9e3779b97f4a7c15ull;
}

static inline uint64_t pc__file_id(const struct stat *st)
{
    return pc__file_id_of(st->st_dev, st->st_ino);
}

#endif
