"""What a page server does to become a region's home, where it is not the engine's. No Ray, no C."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from clamor_ray._objects.block_sets import runs
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._protocol.messages import RebuildOrder
from clamor_ray._protocol.source import NOT_EQUAL_HINT
from clamor_ray.errors import SourceError, SystemCallError

COMPARED_BYTES = 8 << 20  # at once
NOTE_BYTES = 8  # of a lost block, behind the region's blocks: pagecache_c/engine/store/lost.c


def blocks_of(found: npt.NDArray[np.uint64]) -> BitMap:
    """The blocks of runs: shape (n, 2), first block and number of blocks.

    Example:
        >>> blocks_of(np.array([[3, 2], [9, 1]], np.uint64))
        BitMap([3, 4, 9])
    """
    blocks = BitMap()
    for first, n in found.tolist():
        blocks.add_range(first, first + n)
    return blocks


def written_bytes(order: RebuildOrder) -> int:
    """The memory that an order takes: of what is written, and of the notes of what is lost. All
    else is a hole, and reads as zeros.

    Example:
        >>> from clamor_ray._protocol.messages import RegionRecord
        >>> record = RegionRecord(1, 0, 0, 1 << 40, (2,))
        >>> everything = BitMap(range(1000)).serialize()
        >>> written_bytes(RebuildOrder(record, (), (), everything, pieces=((4090, b"12345678"),)))
        8192
    """
    n_bytes = sum(len(BitMap.deserialize(blocks)) * BLOCK_BYTES for _, blocks in order.cached)
    n_bytes += sum(layer_bytes for _, _, layer_bytes in order.takes)
    n_bytes += _notes_bytes(order.lost)
    if not order.pieces:
        source = order.from_source
        return n_bytes + (len(BitMap.deserialize(source)) * BLOCK_BYTES if source else 0)
    touched = BitMap()
    for offset, piece in order.pieces:
        for begin, end in _parts(order.from_source, offset - order.before_bytes, len(piece)):
            touched.add_range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
    return n_bytes + len(touched) * BLOCK_BYTES


def _notes_bytes(lost: bytes) -> int:
    """Of the pages that have a note of a lost block."""
    a_page = BLOCK_BYTES // NOTE_BYTES
    pages = BitMap()
    for first, n in runs(BitMap.deserialize(lost)) if lost else ():
        pages.add_range(first // a_page, -(-(first + n) // a_page))
    return len(pages) * BLOCK_BYTES


def _parts(blocks: bytes, offset: int, n_bytes: int) -> Iterable[tuple[int, int]]:
    """(begin, end) in the region of what of a piece lies in these blocks."""
    for first, n in runs(BitMap.deserialize(blocks)) if blocks else ():
        begin = max(offset, first * BLOCK_BYTES)
        end = min(offset + n_bytes, (first + n) * BLOCK_BYTES)
        if begin < end:
            yield begin, end


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        wrote = os.pwrite(fd, view, offset)
        if not wrote:
            raise SystemCallError("pwrite into a region that is rebuilt wrote nothing.")
        view = view[wrote:]
        offset += wrote


def _check_equal(fd: int, view: memoryview, begin: int) -> None:
    for at in range(0, view.nbytes, COMPARED_BYTES):
        part = view[at : at + COMPARED_BYTES]
        mine = np.frombuffer(part, np.uint8)
        other = np.frombuffer(os.pread(fd, part.nbytes, begin + at), np.uint8)
        if not np.array_equal(mine, other):
            same = min(len(mine), len(other))
            differs = mine[:same] != other[:same]
            first = int(np.argmax(differs)) if differs.any() else same
            block = (begin + at + first) // BLOCK_BYTES
            raise SourceError(
                f"It made other content than before: block {block} differs from what another "
                "node has of it.",
                hint=NOT_EQUAL_HINT,
            )


def fill_from_source(fd: int, order: RebuildOrder, pieces: Iterable[tuple[int, Any]]) -> None:
    """Writes what the source has made, after a look at what is known of it already.

    Args:
        fd: The memfd, with all that came from other servers.
        order: Which blocks are wanted, and which are compared.
        pieces: (offset, bytes) of all that the source makes; the rest is zeros. Offsets count from
            the first byte of the region, or, of a piece, of its variable.

    Raises:
        SourceError: It made something else than before. Nothing was written.
    """
    views = [(offset - order.before_bytes, memoryview(piece).cast("B")) for offset, piece in pieces]
    for offset, view in views:
        for begin, end in _parts(order.compared, offset, view.nbytes):
            _check_equal(fd, view[begin - offset : end - offset], begin)
    for offset, view in views:
        for begin, end in _parts(order.from_source, offset, view.nbytes):
            _write(fd, view[begin - offset : end - offset], begin)
