"""The notes that a base has behind its blocks: from which version on a block is there.

The engine's (pagecache_c/engine/store/lost.c): 8 bytes for each block. A base without lost blocks
that is in no file of the user's has none.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray._store import disk
from clamor_ray._store.layer_files import Runs
from clamor_ray._store.sums import SumsHeader, parts_of

LOST_YET: Final = np.uint64(2**64 - 1)
WAS_LOST: Final = np.uint64(1 << 63)
_NOTE_BYTES: Final = 8


def _has_notes(fd: int, header: SumsHeader) -> bool:
    return os.fstat(fd).st_size >= header.length_bytes + _NOTE_BYTES * header.n_blocks


def _read(fd: int, header: SumsHeader, first: int, n_blocks: int) -> npt.NDArray[np.uint64]:
    offset = header.length_bytes + _NOTE_BYTES * first
    return np.frombuffer(disk.read_at(fd, _NOTE_BYTES * n_blocks, offset), "<u8").astype(np.uint64)


def lost_yet(fd: int, header: SumsHeader, blocks: Runs) -> npt.NDArray[np.bool_]:
    """Which of these blocks, ascending, are of no version.

    Raises:
        OSError: As it came.
    """
    out = np.zeros(len(blocks), bool)
    if _has_notes(fd, header):
        for low, high in parts_of(blocks):
            some = blocks[low:high].astype(np.int64)
            first = int(some[0])
            notes = _read(fd, header, first, int(some[-1]) - first + 1)
            out[low:high] = notes[some - first] == LOST_YET
    return out


def note_written(fd: int, header: SumsHeader, blocks: Runs, versions: Runs) -> None:
    """Layers of these versions write these blocks: they are there from then on, if not before.

    Args:
        fd: of the base.
        header: of its checksums.
        blocks: ascending, each once.
        versions: of each, the first that writes it.

    Raises:
        OSError: As it came.
    """
    if not _has_notes(fd, header):
        return
    for low, high in parts_of(blocks):
        some = blocks[low:high].astype(np.int64)
        first = int(some[0])
        notes = _read(fd, header, first, int(some[-1]) - first + 1)
        new = _noted(notes[some - first], versions[low:high], header.in_file)
        if np.any(new != notes[some - first]):
            notes[some - first] = new
            content: Any = notes.astype("<u8", copy=False)
            disk.write_at(fd, content, header.length_bytes + _NOTE_BYTES * first)


def _noted(notes: npt.NDArray[np.uint64], versions: Runs, in_file: bool) -> npt.NDArray[np.uint64]:
    was_lost = notes & WAS_LOST
    noted = np.minimum(notes & ~WAS_LOST, versions) | was_lost
    found = versions | (WAS_LOST if in_file else np.uint64(0))
    unnoted = versions if in_file else np.zeros_like(versions)
    return np.where(notes == LOST_YET, found, np.where(notes == 0, unnoted, noted))
