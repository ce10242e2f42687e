"""Records of 100 bytes with keys of 10, as sort benchmarks have them (sortbenchmark.org). No Ray.

Records are rows of an array of bytes, (n, 100); a key is a row's first 10 bytes, compared as bytes.
NumPy compares such keys one at a time, and slowly. As numbers, 8 bytes big-endian and then 2, most
are told apart by the first number alone, and numbers it sorts with vector instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import WrongResult

__all__ = [
    "KEY_BYTES",
    "RECORD_BYTES",
    "Keys",
    "Summary",
    "WrongOrder",
    "batches",
    "check",
    "checksum",
    "cuts",
    "fill",
    "keys_of",
    "order",
    "splitters",
    "summarize",
]

RECORD_BYTES: Final = 100
KEY_BYTES: Final = 10

Records = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

_DRAWN: Final = 1 << 16  # records of one seed of the generator
_SUMMED: Final = 1 << 14  # records at a time: their words stay in the processor's cache
_FACTORS: Final = np.random.default_rng(0x50F7).integers(
    0, 1 << 63, RECORD_BYTES // 4, dtype=np.uint64
) * np.uint64(2) + np.uint64(1)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)


class WrongOrder(WrongResult):
    """What came out is not what went in, sorted; the message says what is wrong."""


class Keys(NamedTuple):
    """Keys as numbers that compare as they do: by `high`, then by `low`."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint16]

    def at(self, i: int) -> tuple[int, int]:
        """One of them."""
        return int(self.high[i]), int(self.low[i])


def fill(out: Records, seed: int, done: Callable[[int], None] = lambda records: None) -> None:
    """Random records, the same for the same seed. `done` is told of those so far."""
    for number, first in enumerate(range(0, len(out), _DRAWN)):
        part = out[first : first + _DRAWN]
        drawn = np.random.default_rng([seed, number]).bytes(part.size)
        part[:] = np.frombuffer(drawn, np.uint8).reshape(part.shape)
        done(first + len(part))


def keys_of(records: Records) -> Keys:
    """The keys, copied out of the records."""
    high = np.ascontiguousarray(records[:, :8]).view(">u8")[:, 0]
    low = np.ascontiguousarray(records[:, 8:KEY_BYTES]).view(">u2")[:, 0]
    return Keys(high.astype(np.uint64), low.astype(np.uint16))


def order(keys: Keys) -> Int64:
    """Positions in the order of the keys; equal keys stay in the order that they are in.

    Example:
        >>> order(Keys(np.array([7, 5, 7], np.uint64), np.array([2, 9, 1], np.uint16)))
        array([1, 2, 0])
    """
    out: Int64 = np.argsort(keys.high).astype(np.int64, copy=False)
    high = keys.high[out]
    same = high[1:] == high[:-1]
    tied = np.zeros(len(out), bool)
    tied[1:] |= same
    tied[:-1] |= same
    at = np.flatnonzero(tied)
    if len(at):
        # Groups of equal numbers lie in order already: sorted all at once, each stays in its place.
        positions = out[at]
        out[at] = positions[np.lexsort((positions, keys.low[positions], keys.high[positions]))]
    return out


def splitters(sample: Keys, n_partitions: int) -> Keys:
    """Keys that cut the sample into equal parts: partition i has those in [i - 1, i).

    Args:
        sample: of all keys, at random; at least n_partitions of them where there are more than one.
        n_partitions: at least 1.

    Returns:
        n_partitions - 1 keys, in order; equal ones where a key is so frequent.
    """
    if n_partitions < 1:
        raise ValueError(f"n_partitions is at least 1, not {n_partitions}")
    n = len(sample.high)
    if n_partitions > 1 and n < n_partitions:
        raise ValueError(f"a sample of {n:,} keys does not make {n_partitions:,} partitions")
    in_order = order(sample)
    at = in_order[[i * n // n_partitions for i in range(1, n_partitions)]]
    return Keys(sample.high[at], sample.low[at])


def cuts(keys: Keys, at: Keys) -> list[int]:
    """Where sorted keys are cut by splitters: partition i is [cuts[i], cuts[i + 1])."""
    lows = np.searchsorted(keys.high, at.high, "left").tolist()
    highs = np.searchsorted(keys.high, at.high, "right").tolist()
    inner = [
        begin + int(np.searchsorted(keys.low[begin:end], low, "left"))
        for begin, end, low in zip(lows, highs, at.low, strict=True)
    ]
    return [0, *inner, len(keys.high)]


def batches(sizes: list[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces of some arrays, in groups of at most so many rows: what is fetched at once.

    Args:
        sizes: rows of each array.
        most: rows of a group, at least 1.

    Yields:
        (array, begin, end) triples that cover every array in order.
    """
    if most < 1:
        raise ValueError(f"most is at least 1, not {most}")
    group: list[tuple[int, int, int]] = []
    room = most
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            group.append((number, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield group
                group, room = [], most
    if group:
        yield group


# ---------------------------------------------------------------- checking


def checksum(records: Records) -> int:
    """Of the records in any order, modulo 2 ** 64: of each a hash of all its bytes, added up."""
    total = 0
    for first in range(0, len(records), _SUMMED):
        part = np.ascontiguousarray(records[first : first + _SUMMED])
        hashes = part.view(np.uint32).astype(np.uint64) @ _FACTORS
        hashes += _MIX  # or a record of zeros would count for nothing
        hashes ^= hashes >> np.uint64(32)
        hashes *= _MIX
        hashes ^= hashes >> np.uint64(29)
        total += int(hashes.sum())
    return total % (1 << 64)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a check needs of some records.

    Args:
        n: how many.
        checksum: of all.
        unsorted: position of the first that is less than the one before it; -1 where there is none.
        first, last: keys; None where there are no records.
    """

    n: int
    checksum: int
    unsorted: int
    first: tuple[int, int] | None
    last: tuple[int, int] | None


def summarize(records: Records) -> Summary:
    """Reads all of them."""
    if not len(records):
        return Summary(0, 0, -1, None, None)
    keys = keys_of(records)
    rises = keys.high[1:] > keys.high[:-1]
    equal = keys.high[1:] == keys.high[:-1]
    wrong = np.flatnonzero(~(rises | (equal & (keys.low[1:] >= keys.low[:-1]))))
    unsorted = int(wrong[0]) + 1 if len(wrong) else -1
    return Summary(len(records), checksum(records), unsorted, keys.at(0), keys.at(-1))


def check(parts: list[Summary], n: int, before: int) -> None:
    """That the parts, one after the other, are sorted, and the records that went in.

    Args:
        parts: in order.
        n: records that went in.
        before: their checksum.

    Raises:
        WrongOrder: They are not.
    """
    last: tuple[int, int] | None = None
    for number, part in enumerate(parts):
        if part.unsorted >= 0:
            raise WrongOrder(f"partition {number}: record {part.unsorted:,} is less than the last")
        if last is not None and part.first is not None and part.first < last:
            raise WrongOrder(f"partition {number} begins with less than what was before it")
        last = part.last if part.last is not None else last
    found = sum(part.n for part in parts)
    if found != n:
        raise WrongOrder(f"{found:,} records came out, and {n:,} went in")
    after = sum(part.checksum for part in parts) % (1 << 64)
    if after != before:
        raise WrongOrder(f"the records have the checksum {after:#x}, and had {before:#x}")
