"""Sets of blocks of a region, as runs and as text. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
from pyroaring import BitMap

RUNS_SAID: Final = 6


def runs(blocks: BitMap) -> list[tuple[int, int]]:
    """(first block, number of blocks) of each run, in order.

    Example:
        >>> runs(BitMap([3, 4, 5, 9]))
        [(3, 3), (9, 1)]
    """
    numbers = np.frombuffer(blocks.to_array(), np.uint32).astype(np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    counts = np.diff(starts, append=len(numbers))
    return list(zip(numbers[starts].tolist(), counts.tolist(), strict=True))


def said(blocks: BitMap, n_blocks: int) -> str:
    """For people: how many, and the first of them.

    Example:
        >>> said(BitMap([3, 4, 5, 9]), 100)
        '4 of 100 blocks (3-5, 9)'
    """
    return f"{len(blocks)} of {n_blocks} blocks ({_first(blocks, ', ...')})"


def of_variable(label: str, blocks: bytes) -> str:
    """For people: the first of the blocks, and of which variable.

    Args:
        label: The variable for people.
        blocks: A serialized BitMap; b"": none are known.

    Example:
        >>> of_variable("variable 7", BitMap([3, 4, 5, 9]).serialize())
        'blocks 3-5, 9 of variable 7'
    """
    known = BitMap.deserialize(blocks) if blocks else BitMap()
    if not known:
        return label
    return f"blocks {_first(known, f', ... ({len(known)} in all)')} of {label}"


def _first(blocks: BitMap, more: str) -> str:
    found = runs(blocks)
    parts = [str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in found[:RUNS_SAID]]
    return ", ".join(parts) + (more if len(found) > RUNS_SAID else "")
