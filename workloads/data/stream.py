"""The streaming-updates workload's data: keys, values, Zipf look-ups, and what they must find.

Pure: no Ray. Whoever knows the number of keys knows every key and its first value; what was
changed since is in a plain dict.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import WrongResult

Int64 = npt.NDArray[np.int64]

_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # odd: distinct indices make distinct keys
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)


def key_of(index: Any) -> Int64:
    """The keys with these indices: all over int64, no two alike."""
    keys: Int64 = (np.asarray(index, np.int64).view(np.uint64) * _SPREAD).view(np.int64)
    return keys


def first_value(keys: Int64) -> Int64:
    """What the map holds for these keys before any change."""
    bits = keys.view(np.uint64) * _MIX
    values: Int64 = (bits ^ (bits >> np.uint64(32))).view(np.int64)
    return values


def zipf(rng: np.random.Generator, n_keys: int, n: int, skew: float) -> Int64:
    """`n` indices in [0, n_keys), index i about as often as 1 / (i + 1) ** skew.

    Example:
        >>> zipf(np.random.default_rng(1), 1000, 10**5, 1.0).max() < 1000
        True
    """
    # The inverse of the continuous distribution function between a half and n + a half, rounded:
    # the first few indices are a little more frequent than that, by up to a fifth.
    low, high, u = 0.5, n_keys + 0.5, rng.random(n)
    power = 1.0 - skew
    if abs(power) < 1e-9:
        ranks = low * (high / low) ** u
    else:
        ranks = (low**power + u * (high**power - low**power)) ** (1.0 / power)
    indices: Int64 = np.clip(np.rint(ranks).astype(np.int64) - 1, 0, n_keys - 1)
    return indices


@dataclasses.dataclass(frozen=True)
class Batch:
    """Look-ups of one task, as it is told of them: it draws the keys itself.

    Args:
        seed: of the draw.
        n_keys: in the map.
        n_lookups: to draw.
        skew: exponent of the Zipf distribution.
        also: keys to look up besides, before the others.
    """

    seed: int
    n_keys: int
    n_lookups: int
    skew: float
    also: tuple[int, ...] = ()

    def keys(self) -> Int64:
        """All keys of the batch, in order; `also` comes first."""
        rng = np.random.default_rng(self.seed)
        drawn = key_of(zipf(rng, self.n_keys, self.n_lookups, self.skew))
        return np.concatenate([np.array(self.also, np.int64), drawn])


def checksum(values: Int64) -> int:
    """Of values in their order."""
    return zlib.crc32(np.ascontiguousarray(values).data)


class WrongValue(WrongResult):
    """A look-up did not find what the map held at that version."""


class PlainMap:
    """What the map holds: first values, and a dict of what was changed since."""

    def __init__(self, n_keys: int) -> None:
        self.n_keys = n_keys
        self.changed: dict[int, int] = {}

    def change(self, keys: Int64, values: Int64) -> None:
        """Sets keys to values; of equal ones the last."""
        self.changed.update(zip(keys.tolist(), values.tolist(), strict=True))

    def values(self, keys: Int64) -> Int64:
        """What a look-up of these keys must find."""
        out = first_value(keys)
        others = np.array(sorted(self.changed), np.int64)
        for at in np.flatnonzero(np.isin(keys, others)).tolist():
            out[at] = self.changed[int(keys[at])]
        return out

    def check(self, what: str, batch: Batch, also: Int64, found_checksum: int) -> None:
        """That a task found what it must.

        Raises:
            WrongValue: It did not.
        """
        keys = batch.keys()
        expected = self.values(keys)
        for key, value, right in zip(batch.also, also.tolist(), expected.tolist(), strict=False):
            if value != right:
                raise WrongValue(f"{what}: key {key} was {value}, not {right}")
        if checksum(expected) != found_checksum:
            raise WrongValue(f"{what}: {len(keys):,} values have another checksum")
