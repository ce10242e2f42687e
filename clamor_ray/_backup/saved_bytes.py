"""The bytes of a saved variable: read from a backup, checked, and with other references in them."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._backup.chunks import (
    CHUNK_BLOCKS,
    CHUNK_BYTES,
    BadRecordError,
    blocks_of,
    runs_of,
)
from clamor_ray._backup.directory import Directory
from clamor_ray._backup.manifest import ChunkPlace, SavedVariable
from clamor_ray._labels import capital
from clamor_ray._objects.layout import BLOCK_BYTES

AHEAD: Final = 4  # chunks that are read before they are wanted

_Blocks = tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]


class SavedBytes:
    """The bytes of one variable. Safe from any thread.

    Args:
        directory: the backup.
        number: of the checkpoint.
        saved: the variable, which lies in a region.
        pool: reads ahead.
    """

    def __init__(
        self, directory: Directory, number: int, saved: SavedVariable, pool: ThreadPoolExecutor
    ) -> None:
        self._directory = directory
        self._number = number
        self._saved = saved
        self._pool = pool
        self._patch = b""
        self._patch_at = 0

    @property
    def n_bytes(self) -> int:
        """About how many are no zeros."""
        return sum(place.n_bytes for place in self._saved.chunks.values()) + len(self._patch)

    def put_over(self, at: int, patch: bytes) -> None:
        """From now on these bytes are there."""
        self._patch_at, self._patch = at, patch

    def read(self, begin: int, end: int) -> bytes:
        """Bytes of it.

        Raises:
            As `content`.
        """
        found = bytearray(end - begin)
        for offset, view in self.content(begin, end):
            found[offset - begin : offset - begin + view.nbytes] = view
        return bytes(found)

    def content(self, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of all in between that is not zeros, by offset.

        Raises:
            DamagedBackupError: A data file is missing, or is not what was written.
            NoBackupError: The checkpoint was deleted meanwhile, for newer ones.
            StorageError: A data file cannot be read.
        """
        wanted = collections.deque(self._chunks(begin, end))
        ahead: collections.deque[tuple[int, Future[_Blocks]]] = collections.deque()
        try:
            while wanted or ahead:
                while wanted and len(ahead) < AHEAD:
                    chunk = wanted.popleft()
                    ahead.append((chunk, self._pool.submit(self._blocks, chunk)))
                chunk, blocks = ahead.popleft()
                for offset, view in runs_of(*blocks.result()):
                    at = chunk * CHUNK_BYTES + offset
                    low, high = max(at, begin), min(at + view.nbytes, end)
                    if low < high:
                        yield low, view[low - at : high - at]
        finally:
            for _, blocks in ahead:
                blocks.cancel()

    def _chunks(self, begin: int, end: int) -> list[int]:
        """Those that have some of these bytes, ascending."""
        found = {n for n in self._saved.chunks if begin < (n + 1) * CHUNK_BYTES}
        if self._patch:
            last = (self._patch_at + len(self._patch) - 1) // CHUNK_BYTES
            found.update(range(self._patch_at // CHUNK_BYTES, last + 1))
        return sorted(n for n in found if n * CHUNK_BYTES < end and begin < (n + 1) * CHUNK_BYTES)

    def _blocks(self, chunk: int) -> _Blocks:
        place = self._saved.chunks.get(chunk)
        if place is None:
            blocks = (np.empty(0, np.uint16), np.empty((0, BLOCK_BYTES), np.uint8))
        else:
            blocks = self._blocks_at(chunk, place)
        begin = chunk * CHUNK_BYTES
        low = max(self._patch_at, begin)
        high = min(self._patch_at + len(self._patch), begin + CHUNK_BYTES)
        return (
            _patched(blocks, low - begin, self._patch[low - self._patch_at : high - self._patch_at])
            if low < high
            else blocks
        )

    def _blocks_at(self, chunk: int, place: ChunkPlace) -> _Blocks:
        directory, what = self._directory, self._saved.label
        file = directory.name_of(place.file)
        first = chunk * CHUNK_BLOCKS
        try:
            record = directory.read_range(place.file, place.offset, place.n_bytes)
        except FileNotFoundError:
            directory.manifest(self._number)  # is it there still?
            raise errors.DamagedBackupError(
                f"{file} is missing, which has blocks {first} to {first + CHUNK_BLOCKS - 1} of "
                f"{what}.",
                variable=what,
                block=first,
                file=file,
            ) from None
        try:
            return blocks_of(memoryview(record), place.digest)
        except BadRecordError as bad:
            block = first if bad.block is None else first + bad.block
            which = f"block {block}"
            if bad.block is None:
                which = f"one of the blocks {first} to {first + CHUNK_BLOCKS - 1}"
            raise errors.DamagedBackupError(
                f"{capital(which)} of {what} is damaged in {file}: it is not what was written "
                f"(bytes {place.offset} to {place.offset + place.n_bytes - 1} of the file).",
                variable=what,
                block=block,
                file=file,
            ) from None


def _patched(blocks: _Blocks, at: int, patch: bytes) -> _Blocks:
    """Blocks of a chunk with other bytes from an offset in the chunk on."""
    image = np.zeros((CHUNK_BLOCKS, BLOCK_BYTES), np.uint8)
    is_there = np.zeros(CHUNK_BLOCKS, bool)
    image[blocks[0]] = blocks[1]
    is_there[blocks[0]] = True
    image.reshape(-1)[at : at + len(patch)] = np.frombuffer(patch, np.uint8)
    is_there[at // BLOCK_BYTES : -(-(at + len(patch)) // BLOCK_BYTES)] = True
    places = np.flatnonzero(is_there).astype(np.uint16)
    return places, image[places]
