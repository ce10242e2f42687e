"""What wide operators do with blocks: cut them by key, sort them, and put them together. Pure.

`partition_by_hash` and `partition_by_range` give each task's items to the partitions of the next
stage; `combine_by_key` (combine.py), `join_items` (joins.py), `sort_items` and `distinct_items`
then work within one partition, since equal keys have come to the same one. `partial`, `merge`
and `finish` (aggregates.py) make one value of all partitions.

keys.py says which keys are equal, hashes.py where they go, ordering.py in which order they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from clamor_ray.collection.data import blocks, hashes, keys, ordering
from clamor_ray.collection.data.aggregates import Partial, finish, merge, partial
from clamor_ray.collection.data.blocks import Items
from clamor_ray.collection.data.combine import combine_by_key
from clamor_ray.collection.data.joins import join_items
from clamor_ray.collection.data.keys import By, Places

__all__ = [
    "By",
    "Partial",
    "boundaries",
    "combine_by_key",
    "distinct_items",
    "finish",
    "hash_codes",
    "join_items",
    "merge",
    "partial",
    "partition_by_hash",
    "partition_by_range",
    "sample_keys",
    "sort_items",
]


def hash_codes(of: Items) -> npt.NDArray[np.uint64]:
    """A hash of each key of a block, the same in every process and on every machine.

    Equal keys have equal hashes, also of different types: 1, 1.0 and True, 0.0 and -0.0, NaN
    and NaN, text in an array and in a table.

    Raises:
        TypeError: A key cannot be hashed: which.
    """
    return hashes.codes(keys.as_key(of))


def partition_by_hash(b: Items, key: By, n: int) -> list[Items]:
    """A block cut into n, by the hash of each item's key. Items of a part keep their order.

    Args:
        b: the block.
        key: None (the item itself), column name or names of a table, a tuple's field number, or
            a function of an item.
        n: how many parts.

    Raises:
        MissingColumnError: No such column.
        TypeError: A key cannot be hashed: which.
    """
    if n == 1 or not blocks.n_items(b):
        return [b, *(blocks.slice_of(b, 0, 0) for _ in range(n - 1))]
    codes = hashes.codes(keys.key_columns(b, key))
    return _scatter(b, (codes % np.uint64(n)).astype(np.int64), n)


def _scatter(b: Items, part: Places, n: int) -> list[Items]:
    """The items of each part, copied: a part never keeps the memory of the whole block alive."""
    narrow = part.astype(np.uint16) if n <= 2**16 else part  # 16 bits are sorted by radix
    places = np.argsort(narrow, kind="stable")
    ends = np.cumsum(np.bincount(part, minlength=n))
    starts = ends - np.bincount(part, minlength=n)
    return [blocks.take(b, places[i:j]) for i, j in zip(starts, ends, strict=True)]


def sample_keys(b: Items, key: By, n: int, seed: int) -> Items:
    """Keys of at most n items that a generator with this seed has drawn, in the block's order."""
    count = blocks.n_items(b)
    if count > n:
        drawn = np.random.default_rng(seed).choice(count, n, replace=False)
        b = blocks.take(b, np.sort(drawn))
    return keys.key_items(b, key)


def boundaries(
    samples: Sequence[Items], n: int, descending: bool | Sequence[bool] = False
) -> Items:
    """Keys that cut what was sampled into n about equal ranges.

    Returns:
        n - 1 keys, sorted, perhaps some of them equal; none where nothing was sampled (then
        there is one range).

    Raises:
        TypeError: Keys that cannot be compared: which types.
    """
    sampled = blocks.concat(list(samples))
    count = blocks.n_items(sampled)
    if not count or n < 2:
        return blocks.slice_of(sampled, 0, 0)
    places = ordering.order(keys.as_key(sampled), descending)
    return blocks.take(sampled, places[np.arange(1, n) * count // n])


def partition_by_range(
    b: Items, key: By, bounds: Items, descending: bool | Sequence[bool] = False
) -> list[Items]:
    """A block cut into one more part than there are bounds; equal keys come to the same part.

    Every key of a part comes before every key of the next one in the order. Within a part items
    keep their order: they are not sorted yet.

    Raises:
        MissingColumnError: No such column.
        TypeError: Keys that cannot be compared: which types.
    """
    n = blocks.n_items(bounds) + 1
    if n == 1 or not blocks.n_items(b):
        return [b, *(blocks.slice_of(b, 0, 0) for _ in range(n - 1))]
    of = keys.key_items(b, key)
    joined = blocks.concat([bounds, of])
    part = ordering.ranges(keys.as_key(of), keys.as_key(bounds), keys.as_key(joined), descending)
    return _scatter(b, part, n)


def sort_items(b: Items, key: By = None, descending: bool | Sequence[bool] = False) -> Items:
    """The items in the order of their keys; equal ones stay as they are.

    NaN comes after every number and None after that, also where the order is descending. Rows
    and tuples are compared field by field.

    Args:
        b: the block.
        key: as for `partition_by_hash`.
        descending: the other way round; for a key of several columns also one for each.

    Raises:
        MissingColumnError: No such column.
        TypeError: Keys that cannot be compared: which types.
    """
    if blocks.n_items(b) < 2:
        return b
    return blocks.take(b, ordering.order(keys.key_columns(b, key), descending))


def distinct_items(b: Items) -> Items:
    """The first of all items that are equal, in the block's order.

    Raises:
        TypeError: An item that cannot be hashed: which.
    """
    if not blocks.n_items(b):
        return b
    groups = keys.group(keys.as_key(b))
    return b if len(groups) == blocks.n_items(b) else blocks.take(b, groups.first)
