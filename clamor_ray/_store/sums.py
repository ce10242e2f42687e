"""The checksums of a region's base: `<region>.sums`.

    0       a header (see `SumsHeader`), 4096 bytes
    4096    another one; of those that are right, the one with the higher sequence counts
    8192    u32 for each block, `checksums.block_sums` of it: a hole says that the base has zeros

The header says at which version of the region the sums are right. It goes into the slot of the
older one, after all else is synced, so one of both is always whole. The sums of blocks that layers
of later versions write mean nothing: a redo writes those blocks, and their sums, anew.
"""

from __future__ import annotations

import itertools
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import Sums, block_sums, crc32c
from clamor_ray._store import disk
from clamor_ray._store.layer_files import Runs

SUMS_OFFSET: Final = 8192
IN_FILE: Final = 1

_SLOT_BYTES: Final = 4096
_HEADER: Final = struct.Struct("<8s2I5Q")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"CLAMSUMS"
_FORMAT: Final = 1
_AT_A_TIME: Final = 4096
"""Sums that are read, changed and written at a time: 16 KiB of the file."""
_THREADS: Final = 4


class SumsHeader(NamedTuple):
    """What a file of checksums is of.

    Args:
        flags: IN_FILE: the region is in a file of the user's, and behind its blocks the base has
            notes of which are not (pagecache_c/engine/store/lost.c).
        region: its id.
        version: that the sums are right at.
        base_address, length_bytes: of the region.
        sequence: one more than of the header before.
    """

    flags: int
    region: int
    version: int
    base_address: int
    length_bytes: int
    sequence: int

    @property
    def in_file(self) -> bool:
        return bool(self.flags & IN_FILE)

    @property
    def n_blocks(self) -> int:
        return -(-self.length_bytes // BLOCK_BYTES)

    def packed(self) -> bytes:
        content = _HEADER.pack(_MAGIC, _FORMAT, *self)
        return content + _CRC.pack(crc32c(content))


def _header_of(slot: bytes | bytearray, path: Path) -> SumsHeader | None:
    """None: it is none.

    Raises:
        StoreFormatError: A newer version of the library has written it.
    """
    content = slot[: _HEADER.size]
    (crc,) = _CRC.unpack_from(slot, _HEADER.size)
    magic, form, *fields = _HEADER.unpack(content)
    if magic != _MAGIC or crc32c(content) != crc:
        return None
    if form > _FORMAT:
        raise errors.StoreFormatError(f"{path} has the format {form} of a newer clamor-ray.")
    return SumsHeader(*fields)


class SumsFile:
    """A file of checksums, open.

    Example:
        with SumsFile.open(path) as sums:
            sums.update(blocks, new)
            sums.set_version(7)
    """

    def __init__(self, path: Path, fd: int, header: SumsHeader) -> None:
        self.path = path
        self.fd = fd
        self.header = header

    @staticmethod
    def create(
        path: Path,
        *,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        flags: int,
        sums: list[tuple[int, Sums]],
    ) -> None:
        """A new one, synced, but not its name.

        Args:
            path: nothing of value is there.
            region, version, base_address, length_bytes, flags: see `SumsHeader`.
            sums: the first block, and sums from there on, as `sums_of` has them.

        Raises:
            NoSpaceError, StoreError: It cannot be written.
        """
        header = SumsHeader(
            flags=flags,
            region=region,
            version=version,
            base_address=base_address,
            length_bytes=length_bytes,
            sequence=1,
        )
        with (
            disk.asking(path, "writing it"),
            disk.open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd,
        ):
            os.ftruncate(fd, SUMS_OFFSET + 4 * header.n_blocks)
            for first, some in sums:
                disk.write_at(fd, some.astype("<u4", copy=False), SUMS_OFFSET + 4 * first)
            disk.write_at(fd, header.packed(), 0)
            os.fdatasync(fd)

    @staticmethod
    def open(path: Path, *, writes: bool = True) -> SumsFile:
        """
        Raises:
            StoreDamagedError: It is missing, or has no header that is right.
            StoreFormatError: A newer version of the library has written it.
            StoreError: It cannot be read.
        """
        flags = (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        with disk.asking(path, "opening it"):
            fd = os.open(path, flags)
        try:
            with disk.asking(path, "reading it"):
                size = os.fstat(fd).st_size
                slots = (
                    disk.read_at(fd, SUMS_OFFSET, 0)
                    if size >= SUMS_OFFSET
                    else bytearray(SUMS_OFFSET)
                )
            found = [_header_of(slots[at:], path) for at in (0, _SLOT_BYTES)]
            header = max((each for each in found if each), key=_sequence, default=None)
            if header is None or size < SUMS_OFFSET + 4 * header.n_blocks:
                raise errors.StoreDamagedError(
                    f"{path} has no header that is right, or is too short: {size} bytes.",
                    region=header.region if header else 0,
                    file=str(path),
                )
        except BaseException:
            os.close(fd)
            raise
        return SumsFile(path, fd, header)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> SumsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, first: int, n_blocks: int) -> Sums:
        """The sums of some blocks.

        Raises:
            StoreError: They cannot be read.
        """
        with disk.asking(self.path, "reading it"):
            return np.frombuffer(
                disk.read_at(self.fd, 4 * n_blocks, SUMS_OFFSET + 4 * first), "<u4"
            )

    def of(self, blocks: Runs) -> Sums:
        """The sums of these blocks, ascending.

        Raises:
            StoreError: They cannot be read.
        """
        out = np.empty(len(blocks), np.uint32)
        for low, high in parts_of(blocks):
            some = blocks[low:high].astype(np.int64)
            first = int(some[0])
            out[low:high] = self.read(first, int(some[-1]) - first + 1)[some - first]
        return out

    def update(self, blocks: Runs, sums: Sums) -> None:
        """Writes sums of blocks, without a sync.

        Args:
            blocks: ascending, each once.
            sums: of them.

        Raises:
            RangeError: A block is behind the region's end.
            NoSpaceError, StoreError: They cannot be written.
        """
        if len(blocks) and int(blocks[-1]) >= self.header.n_blocks:
            raise errors.RangeError(
                f"block {int(blocks[-1])} of variable {self.header.region}, which has "
                f"{self.header.n_blocks} ({self.path})"
            )
        for low, high in parts_of(blocks):
            some = blocks[low:high].astype(np.int64)
            first = int(some[0])
            n_blocks = int(some[-1]) - first + 1
            changed = sums[low:high].astype("<u4", copy=False)
            if n_blocks != len(some):
                before = self.read(first, n_blocks).copy()
                before[some - first] = changed
                changed = before
            with disk.asking(self.path, "writing it"):
                disk.write_at(self.fd, np.ascontiguousarray(changed), SUMS_OFFSET + 4 * first)

    def set_version(self, version: int) -> None:
        """All sums are right at this version from now on: they are synced, then the header.

        Raises:
            NoSpaceError, StoreError: They cannot be written. One of both headers is right.
        """
        header = self.header._replace(version=version, sequence=self.header.sequence + 1)
        with disk.asking(self.path, "writing it"):
            os.fdatasync(self.fd)
            slot = (header.sequence + 1) % 2 * _SLOT_BYTES
            disk.write_at(self.fd, header.packed(), slot)
            os.fdatasync(self.fd)
        self.header = header


def _sequence(header: SumsHeader) -> int:
    return header.sequence


def parts_of(blocks: Runs) -> list[tuple[int, int]]:
    """Where ascending blocks go from one part of the file to the next, by their index."""
    if not len(blocks):
        return []
    part = blocks // np.uint64(_AT_A_TIME)
    cuts = np.flatnonzero(part[1:] != part[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(blocks)]
    return list(itertools.pairwise(bounds))


def sums_of(
    fd: int, length_bytes: int, known: npt.NDArray[np.uint64] | None = None
) -> list[tuple[int, Sums]]:
    """Of a base: the first block, and sums from there on, where it has data. Else they are 0.

    Args:
        fd: of the base.
        length_bytes: of the region, whole blocks.
        known: sums that need not be computed (`summed_copy.Known`).

    Raises:
        OSError: As it came.
    """
    parts = [
        (at, min(at + disk.CHUNK_BYTES, end))
        for begin, end in disk.data_ranges(fd, 0, length_bytes)
        for at in range(begin // BLOCK_BYTES * BLOCK_BYTES, end, disk.CHUNK_BYTES)
    ]

    def summed(part: tuple[int, int]) -> tuple[int, Sums]:
        begin, end = part
        first = begin // BLOCK_BYTES
        n_blocks = _whole(end) // BLOCK_BYTES - first
        some = None if known is None else known[first : first + n_blocks]
        if some is not None and len(some) == n_blocks and some.all():
            return first, some.astype(np.uint32)
        return first, block_sums(disk.read_at(fd, _whole(end) - begin, begin))

    if len(parts) <= 1:
        return [summed(part) for part in parts]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="clamor-sums") as pool:
        return list(pool.map(summed, parts))


def _whole(end: int) -> int:
    return -(-end // BLOCK_BYTES) * BLOCK_BYTES


def wrong_blocks(fd: int, sums: SumsFile) -> Runs:
    """The blocks of a base that have not their checksums, ascending.

    Args:
        fd: of the base.
        sums: of it.

    Raises:
        OSError: As it came, of the base; what cannot be read (EIO) counts as wrong.
        StoreError: The sums cannot be read.
    """
    found: list[Runs] = []
    n_blocks = sums.header.n_blocks
    at_a_time = disk.CHUNK_BYTES // BLOCK_BYTES
    for first in sorted(_parts_with_data(fd, sums)):
        n = min(at_a_time, n_blocks - first)
        right = sums.read(first, n)
        found.append(
            np.flatnonzero(_sums_at(fd, first, n) != right).astype(np.uint64) + np.uint64(first)
        )
    return np.concatenate(found) if found else np.empty(0, np.uint64)


def _parts_with_data(fd: int, sums: SumsFile) -> set[int]:
    """First blocks of the parts of a base where it, or its sums, have data."""
    at_a_time = disk.CHUNK_BYTES // BLOCK_BYTES
    length = sums.header.length_bytes
    parts: set[int] = set()
    for begin, end in disk.data_ranges(fd, 0, length):
        first, last = begin // BLOCK_BYTES // at_a_time, (end - 1) // BLOCK_BYTES // at_a_time
        parts.update(part * at_a_time for part in range(first, last + 1))
    limit = SUMS_OFFSET + 4 * sums.header.n_blocks
    for begin, end in disk.data_ranges(sums.fd, SUMS_OFFSET, limit):
        first, last = ((each - SUMS_OFFSET) // 4 // at_a_time for each in (begin, end - 1))
        parts.update(part * at_a_time for part in range(first, last + 1))
    return parts


def _sums_at(fd: int, first: int, n_blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Sums of blocks; -1 for those that the disk cannot read."""
    try:
        content = disk.read_at(fd, n_blocks * BLOCK_BYTES, first * BLOCK_BYTES)
    except OSError:
        if n_blocks == 1:
            return np.array([-1], np.int64)
        half = n_blocks // 2
        return np.concatenate(
            [_sums_at(fd, first, half), _sums_at(fd, first + half, n_blocks - half)]
        )
    return block_sums(content).astype(np.int64)
