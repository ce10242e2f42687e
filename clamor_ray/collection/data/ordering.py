"""The order of keys: places sorted, stable, NaN and None last in either direction. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clamor_ray.collection.data import keys
from clamor_ray.collection.data.arrow import objects
from clamor_ray.collection.data.blocks import Array
from clamor_ray.collection.data.keys import Key, Places


def order(key: Key, descending: bool | Sequence[bool] = False) -> Places:
    """The places of the keys, sorted; equal keys stay as they are.

    Args:
        key: key columns.
        descending: the other way round; for keys of several columns also one for each.

    Raises:
        TypeError: Keys that cannot be compared: which types.
        ValueError: Not as many directions as columns.
    """
    if not isinstance(key, tuple):
        found = keys.simple(key)
        if not isinstance(found, tuple):
            if not isinstance(descending, bool):
                (descending,) = _directions(descending, 1)
            return _order_of_one(found, descending)
        key = found
    directions = _directions(descending, len(key))
    places = np.arange(keys.length(key), dtype=np.int64)
    for part, direction in zip(reversed(key), reversed(directions), strict=True):
        places = places[order(keys.take(part, places), direction)]
    return places


def _directions(descending: bool | Sequence[bool], columns: int) -> list[bool]:
    if isinstance(descending, bool):
        return [descending] * columns
    if len(descending) != columns:
        raise ValueError(
            f"There are {len(descending)} values of descending for a key of {columns} columns."
        )
    return list(descending)


def _order_of_one(key: Array | pa.ChunkedArray, descending: bool) -> Places:
    if isinstance(key, np.ndarray):
        if key.dtype == object:
            return _order_of_objects(key, descending)
        return order_of_numbers(key, descending)
    if pa.types.is_null(key.type):
        return np.arange(len(key), dtype=np.int64)
    direction = "descending" if descending else "ascending"
    table = pa.table({"key": key})
    try:
        found = pc.sort_indices(table, sort_keys=[("key", direction)])
    except pa.ArrowNotImplementedError:
        return _order_of_objects(objects(key.to_pylist()), descending)
    return np.asarray(found, np.int64)


def order_of_numbers(a: Array, descending: bool) -> Places:
    """The places of an array of numbers, sorted; NaN last."""
    if not descending:
        return np.argsort(a, kind="stable")
    last = np.isnan(a) if a.dtype.kind == "f" else np.zeros(len(a), bool)
    places = np.flatnonzero(~last)
    backwards = np.argsort(a[places][::-1], kind="stable")[::-1]
    return np.concatenate([places[len(places) - 1 - backwards], np.flatnonzero(last)])


def _order_of_objects(a: Array, descending: bool) -> Places:
    values: list[Any] = a.tolist()
    none = [place for place, value in enumerate(values) if value is None]
    nan = [place for place, value in enumerate(values) if keys.is_nan(value)]
    others: Any = range(len(values))
    if none or nan:
        last = {*none, *nan}
        others = (place for place in others if place not in last)
    try:
        places = sorted(others, key=values.__getitem__, reverse=descending)
    except TypeError as error:
        kinds = ", ".join(sorted({type(value).__qualname__ for value in values}))
        raise TypeError(
            f"Keys of {kinds} cannot be sorted ({error}): give a key function that makes them "
            f"comparable."
        ) from error
    return np.array([*places, *nan, *none], np.int64)


def ranges(key: Key, bounds: Key, joined: Key, descending: bool | Sequence[bool]) -> Places:
    """For each key, how many of the bounds it does not come before.

    Args:
        key: key columns.
        bounds: sorted, in the same order.
        joined: the bounds and after them the keys, as one.
        descending: as in `order`.
    """
    bounds_count, simple = keys.length(bounds), isinstance(descending, bool)
    if simple and _is_number(key) and _is_number(bounds) and _is_number(joined):
        return _ranges_of_numbers(np.asarray(key), np.asarray(bounds), bool(descending))
    places = order(joined, descending)
    is_bound = places < bounds_count
    found = np.empty(len(places), np.int64)
    found[places] = np.cumsum(is_bound)
    return found[bounds_count:]


def _is_number(key: Key) -> bool:
    return isinstance(key, np.ndarray) and key.dtype.kind in "biuf" and key.ndim == 1


def _ranges_of_numbers(a: Array, bounds: Array, descending: bool) -> Places:
    if not descending:
        return np.searchsorted(bounds, a, side="right").astype(np.int64)
    numbers = bounds[~_nan_mask(bounds)]
    found = len(numbers) - np.searchsorted(numbers[::-1], a, side="left")
    found[_nan_mask(a)] = len(bounds)
    return found.astype(np.int64)


def _nan_mask(a: Array) -> npt.NDArray[np.bool_]:
    return np.isnan(a) if a.dtype.kind == "f" else np.zeros(len(a), bool)
