"""Ascending ids in few bytes, for the way to another node. Pure.

Where one of eight or more in a range is there, a bit for each number of the range is less than a
byte for each id: of weights that are ordered by how often they are used, and of sums of many tasks,
mostly about a quarter of one, where the id itself has four or eight. Ids may lie in several such
ranges, far from each other: weights that are dealt out to the parts of an array.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]

GAP: Final = 512  # numbers without an id, from which on another range costs less


class Bits(NamedTuple):
    """Ids of some ranges, as bits.

    Args:
        firsts: the lowest id of each range.
        begins: the first bit of each range.
        dtype: of the ids: "uint32" or "uint64".
        bits: uint8; bit 7 of the first byte is the first range's first id.
    """

    firsts: npt.NDArray[np.uint64]
    begins: npt.NDArray[np.uint64]
    dtype: str
    bits: npt.NDArray[np.uint8]


def pack(ids: Ids) -> Ids | Bits:
    """Ids as bits, where these are fewer bytes.

    Args:
        ids: uint32 or uint64, ascending, none twice.

    Example:
        >>> packed = pack(np.array([8, 9, 11, 5000, 5001, 5003], np.uint64))
        >>> packed.firsts.tolist(), packed.begins.tolist(), packed.bits.tolist()
        ([8, 5000], [0, 4], [221])
    """
    if len(ids) == 0:
        return ids
    places = np.flatnonzero(np.diff(ids) > GAP) + 1
    ranges_bytes = 16 * (1 + len(places)) if len(places) else 0
    if ranges_bytes >= ids.nbytes:
        return ids
    starts, ends = np.append(0, places), np.append(places, len(ids)) - 1
    firsts = ids[starts].astype(np.uint64)
    lengths = ids[ends].astype(np.uint64) - firsts + np.uint64(1)
    begins = np.cumsum(lengths) - lengths
    n = int(lengths.sum())
    if -(-n // 8) + ranges_bytes >= ids.nbytes:
        return ids
    there = np.zeros(n, np.uint8)
    there[(ids - np.repeat(firsts - begins, ends - starts + 1)).astype(np.intp)] = 1
    return Bits(firsts, begins, ids.dtype.name, np.packbits(there))


def unpack(packed: Ids | Bits) -> Ids:
    """The ids."""
    if not isinstance(packed, Bits):
        return packed
    found = np.flatnonzero(np.unpackbits(packed.bits)).view(np.uint64)
    ends = np.append(np.searchsorted(found, packed.begins[1:]), len(found)).tolist()
    for begin, end, shift in zip([0, *ends], ends, packed.firsts - packed.begins, strict=False):
        found[begin:end] += shift
    return found.astype(packed.dtype)
