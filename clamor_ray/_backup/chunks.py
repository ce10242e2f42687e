"""Chunks: the unit in which a variable's blocks are written, checked and found again. Pure.

A chunk is 1024 blocks of a variable, from a multiple of that on. What is written of it is a record:

    header     magic, number of blocks, CRC-32 of the rest of the head
    places     of each block its number in the chunk, uint16, ascending
    sums       of each block its CRC-32, uint32
    blocks     4096 bytes each

Blocks of zeros are not written, and a chunk of zeros has no record. The manifest has each record's
digest. It says whether the record is what was written, and whether a chunk has changed since: for
that a CRC is too weak. If the digest does not fit, the sums say which block it is.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray._objects.layout import BLOCK_BYTES

CHUNK_BLOCKS: Final = 1024
CHUNK_BYTES: Final = CHUNK_BLOCKS * BLOCK_BYTES
_HEADER: Final = struct.Struct("<4sII")
_MAGIC: Final = b"CLMR"
_PLACE_BYTES: Final = 2
_SUM_BYTES: Final = 4
DIGEST_BYTES: Final = 16


class Record(NamedTuple):
    """A chunk as it is written.

    Args:
        parts: its bytes, in order.
        n_bytes: of all of them.
        digest: of them, hex.
    """

    parts: tuple[memoryview, ...]
    n_bytes: int
    digest: str


class BadRecordError(ValueError):
    """A record is not what was written.

    Args:
        block: number in the chunk of the first block that is wrong; None: the head is.
    """

    def __init__(self, block: int | None) -> None:
        super().__init__(block)
        self.block = block


def _digest_of(parts: Iterable[memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def record_of(places: npt.NDArray[np.uint16], blocks: npt.NDArray[np.uint8]) -> Record | None:
    """What is written of a chunk.

    Args:
        places: number in the chunk of each block, ascending.
        blocks: their bytes, shape (n, 4096), C order.

    Returns:
        None where all of them are zeros.

    Example:
        >>> blocks = np.zeros((2, 4096), np.uint8)
        >>> blocks[1, 7] = 1
        >>> record_of(np.array([3, 9], np.uint16), blocks).n_bytes - 4096  # block 9, and the head
        18
        >>> record_of(np.array([3], np.uint16), blocks[:1]) is None
        True
    """
    has_data = blocks.view(np.uint64).any(axis=1)
    if not has_data.any():
        return None
    if not has_data.all():
        places, blocks = places[has_data], blocks[has_data]
    sums = np.fromiter((zlib.crc32(block) for block in blocks), np.uint32, len(blocks))
    tail = places.astype("<u2").tobytes() + sums.astype("<u4").tobytes()
    head = memoryview(_HEADER.pack(_MAGIC, len(blocks), zlib.crc32(tail)) + tail)
    parts = (head, np.ascontiguousarray(blocks).reshape(-1).data)
    return Record(parts, sum(part.nbytes for part in parts), _digest_of(parts))


def blocks_of(
    record: memoryview, digest: str
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """The blocks that `record_of` was given, but for those of zeros.

    Args:
        record: as it was read.
        digest: that it was written with.

    Returns:
        Their numbers in the chunk, ascending; and their bytes, shape (n, 4096): a view of the
        record, which is not copied.

    Raises:
        BadRecordError: It is something else.
    """
    if _digest_of((record,)) != digest:
        raise BadRecordError(_first_wrong(record))
    n_blocks = _n_blocks(record)
    if n_blocks is None:
        raise BadRecordError(None)
    return _places(record, n_blocks), _blocks(record, n_blocks)


def _n_blocks(record: memoryview) -> int | None:
    """None where the head is no head of a record of this length."""
    if record.nbytes < _HEADER.size:
        return None
    magic, n_blocks, crc = _HEADER.unpack_from(record)
    head_bytes = _HEADER.size + n_blocks * (_PLACE_BYTES + _SUM_BYTES)
    if magic != _MAGIC or record.nbytes != head_bytes + n_blocks * BLOCK_BYTES:
        return None
    is_right = zlib.crc32(record[_HEADER.size : head_bytes]) == crc
    return int(n_blocks) if is_right else None


def _places(record: memoryview, n_blocks: int) -> npt.NDArray[np.uint16]:
    return np.frombuffer(record, "<u2", n_blocks, _HEADER.size)


def _blocks(record: memoryview, n_blocks: int) -> npt.NDArray[np.uint8]:
    begin = _HEADER.size + n_blocks * (_PLACE_BYTES + _SUM_BYTES)
    return np.frombuffer(record, np.uint8, offset=begin).reshape(n_blocks, BLOCK_BYTES)


def _first_wrong(record: memoryview) -> int | None:
    n_blocks = _n_blocks(record)
    if n_blocks is None:
        return None
    sums = np.frombuffer(record, "<u4", n_blocks, _HEADER.size + n_blocks * _PLACE_BYTES)
    blocks = _blocks(record, n_blocks)
    for place, block, crc in zip(_places(record, n_blocks), blocks, sums, strict=True):
        if zlib.crc32(block) != crc:
            return int(place)
    return None


def runs_of(
    places: npt.NDArray[np.uint16], blocks: npt.NDArray[np.uint8]
) -> list[tuple[int, memoryview]]:
    """Blocks as contiguous bytes.

    Args:
        places, blocks: as `blocks_of` returns them.

    Returns:
        (offset in the chunk, bytes), by offset.

    Example:
        >>> places, blocks = np.array([3, 4, 9], np.uint16), np.ones((3, 4096), np.uint8)
        >>> [(offset >> 12, view.nbytes >> 12) for offset, view in runs_of(places, blocks)]
        [(3, 2), (9, 1)]
    """
    if not len(places):
        return []
    numbers = places.astype(np.int64)
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    ends = [*begins[1:], len(numbers)]
    return [
        (int(numbers[begin]) * BLOCK_BYTES, blocks[begin:end].reshape(-1).data)
        for begin, end in zip(begins, ends, strict=True)
    ]
