"""Ascending ids in few bytes, for the way to another node. Pure.

Where one of eight or more in a range is there, a bit for each number of the range is less than a
byte for each id: of weights that are ordered by how often they are used, and of sums of many tasks,
mostly about a quarter of one, where the id itself has four or eight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]


class Bits(NamedTuple):
    """Ids of a range, as bits.

    Args:
        first: the lowest id.
        dtype: of the ids: "uint32" or "uint64".
        bits: uint8; bit 7 of the first byte is `first`.
    """

    first: int
    dtype: str
    bits: npt.NDArray[np.uint8]


def pack(ids: Ids) -> Ids | Bits:
    """Ids as bits, where these are fewer bytes.

    Args:
        ids: uint32 or uint64, ascending, none twice.

    Example:
        >>> pack(np.array([8, 9, 11], np.uint32))
        Bits(first=8, dtype='uint32', bits=array([208], dtype=uint8))
    """
    if len(ids) == 0:
        return ids
    first = ids[0]
    n = int(ids[-1]) - int(first) + 1
    if -(-n // 8) >= ids.nbytes:
        return ids
    there = np.zeros(n, np.uint8)
    there[(ids - first).astype(np.intp)] = 1
    return Bits(int(first), ids.dtype.name, np.packbits(there))


def unpack(packed: Ids | Bits) -> Ids:
    """The ids."""
    if not isinstance(packed, Bits):
        return packed
    found = np.flatnonzero(np.unpackbits(packed.bits)).astype(packed.dtype)
    found += np.asarray(packed.first, packed.dtype)
    return found
