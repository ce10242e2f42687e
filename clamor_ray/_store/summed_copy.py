"""A base that is too large for the page cache is filled past it, and its checksums are noted.

Who fills it leaves the sum of each block beside it, in `.new-<region>.known`, for the page server
that is to keep it: that would have to read all of it from the disk again. The note says of which
file it is, and has nothing of blocks that were filled in part. Without a note nothing is wrong.

    0       magic, device, inode, length in bytes: <8s3Q
    32      u64 for each block: its sum (`checksums.block_sums`) + 2**32; 0, or behind the end:
            unknown
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import copy_to_disk
from clamor_ray._native.client import copy_in
from clamor_ray._objects.memory import available_bytes
from clamor_ray._store import disk
from clamor_ray._store.layout import NEW, REGIONS

Known = npt.NDArray[np.uint64]
"""Of each block: its sum + 2**32; 0: unknown."""

# Linux slows down who has written a tenth of the memory, and the disk does not have it yet
# (vm.dirty_background_ratio, vm.dirty_ratio); and what is in the page cache makes room for it.
_MEMORY_SHARE: Final = 16
_HEAD: Final = struct.Struct("<8s3Q")
_MAGIC: Final = b"CLAMKNOW"
_IS_KNOWN: Final = np.uint64(1 << 32)


def is_too_large(n_bytes: int) -> bool:
    """Whether so much is better not written to the page cache."""
    has_bytes = available_bytes()
    return has_bytes is not None and n_bytes > has_bytes // _MEMORY_SHARE


class SummedCopy:
    """Fills a base.

    Args:
        fd: of its file, on disk, which nobody else writes.
        length_bytes: of the region, whole blocks.
    """

    def __init__(self, fd: int, length_bytes: int) -> None:
        self._fd = fd
        self._known: Known = np.zeros(length_bytes // BLOCK_BYTES, np.uint64)

    def write(self, offset: int, source: Any) -> None:
        """
        Args:
            offset: in bytes, where in the base.
            source: anything contiguous with the buffer protocol.

        Raises:
            NoSpaceError: The disk is full.
            SystemCallError: It refuses it.
        """
        view = memoryview(source).cast("B")
        first, end = -(-offset // BLOCK_BYTES), (offset + view.nbytes) // BLOCK_BYTES
        if first >= end:
            self._write_parts(offset, view)
            return
        begin_bytes, end_bytes = first * BLOCK_BYTES - offset, end * BLOCK_BYTES - offset
        sums = np.empty(end - first, np.uint32)
        copy_to_disk(self._fd, first * BLOCK_BYTES, view[begin_bytes:end_bytes], sums)
        self._known[first:end] = sums.astype(np.uint64) + _IS_KNOWN
        self._write_parts(offset, view[:begin_bytes])
        self._write_parts(end * BLOCK_BYTES, view[end_bytes:])

    def _write_parts(self, offset: int, view: memoryview) -> None:
        if view.nbytes:
            copy_in(self._fd, offset, view)
            self._known[offset // BLOCK_BYTES : -(-(offset + view.nbytes) // BLOCK_BYTES)] = 0

    def note(self, region: int) -> None:
        """Leaves the sums for the page server, in the directory that the base is in. Not where this
        process cannot find that, or it is of no store."""
        path = _note_of(self._fd, region)
        which = np.flatnonzero(self._known)
        if path is None or not len(which):
            return
        known = self._known[: int(which[-1]) + 1]  # of a region with room to grow the rest is long
        head = _HEAD.pack(_MAGIC, *disk.file_id(self._fd), len(self._known) * BLOCK_BYTES)
        try:
            with disk.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
                disk.write_at(fd, head, 0)
                disk.write_at(fd, known.astype("<u8", copy=False), _HEAD.size)
        except OSError:  # the page server reads the base instead
            path.unlink(missing_ok=True)


def _note_of(fd: int, region: int) -> Path | None:
    """The kernel says where a file without a name was made."""
    path = _note_path(Path(os.readlink(f"/proc/self/fd/{fd}")).parent, region)
    return path if path.parent.is_dir() else None


def _note_path(directory: Path, region: int) -> Path:
    return directory / REGIONS / f"{NEW}{region}.known"


def known_of(directory: Path, region: int, fd: int, length_bytes: int) -> Known | None:
    """What who filled a base has left of it; None: nothing.

    Args:
        directory: the page server's.
        region: its id.
        fd: of its base.
        length_bytes: of the region.
    """
    n_blocks = length_bytes // BLOCK_BYTES
    try:
        content = _note_path(directory, region).read_bytes()
    except OSError:
        return None
    if (len(content) - _HEAD.size) % 8 or not 0 < len(content) - _HEAD.size <= 8 * n_blocks:
        return None
    if _HEAD.unpack_from(content) != (_MAGIC, *disk.file_id(fd), length_bytes):
        return None
    return np.frombuffer(content, "<u8", offset=_HEAD.size)


def drop_known(directory: Path, region: int) -> None:
    """The sums are where they belong.

    Raises:
        StoreError: It cannot be deleted.
    """
    disk.unlink(_note_path(directory, region))
