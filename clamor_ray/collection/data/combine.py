"""Values of equal keys put together. Pure.

Where values are numbers and the function is one that NumPy has, nothing is done item by item;
otherwise the user's function is called as often as a plain loop would call it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from clamor_ray.collection.data import blocks, keys
from clamor_ray.collection.data.blocks import Array, Columns, Items
from clamor_ray.collection.data.keys import Groups

How: TypeAlias = str | Callable[[Any, Any], Any]

NAMES: Final = ("sum", "min", "max", "count")
_FUNCTIONS: Final[dict[Any, str]] = {
    operator.add: "sum",
    np.add: "sum",
    min: "min",
    np.minimum: "min",
    max: "max",
    np.maximum: "max",
}
_FOLDS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": operator.add,
    "min": min,
    "max": max,
}
_COLUMNS_ONE_BY_ONE: Final = 64  # of values that are arrays, see _scattered
_UFUNCS: Final[dict[str, np.ufunc]] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def pairs(b: Items, what: str) -> Columns:
    """A block of pairs by its two fields.

    Raises:
        TypeError: An item is no tuple of two: which.
    """
    if isinstance(b, Columns) and len(b.fields) == 2:
        return b
    if not blocks.n_items(b):
        return Columns((blocks.EMPTY, blocks.EMPTY))
    if isinstance(b, np.ndarray) and b.dtype == object and b.ndim == 1:
        wrong = next((item for item in b if type(item) is not tuple or len(item) != 2), None)
        if wrong is None:
            return Columns(tuple(blocks.from_items([pair[i] for pair in b]) for i in (0, 1)))
    else:
        wrong = next(blocks.items(b))
    raise TypeError(f"{what} works on pairs (key, value); {wrong!r:.100} is none.")


def combine_by_key(b: Items, how: How) -> Items:
    """One pair for each key, in the order in which the keys appear.

    Args:
        b: pairs (key, value): `Columns` of two, or tuples.
        how: "sum", "min", "max" (elementwise where values are arrays; NaN propagates; the sum of
            tuples is that of each field), "count" (how many; put counts together by "sum"), or a
            function of two values. A function is called from left to right, in the order of
            the items; `operator.add`, `min`, `max` and NumPy's `add`, `minimum`, `maximum` are
            known, and not called for numbers. Sums of integers are int64, or Python's ints
            where int64 is too small.

    Raises:
        TypeError: An item is no pair, or a key cannot be hashed: which.
        ValueError: `how` is another name.
    """
    if isinstance(how, str) and how not in NAMES:
        raise ValueError(f"Values are combined by {', '.join(NAMES)} or a function, not {how!r}.")
    if not blocks.n_items(b):
        return b
    of, values = pairs(b, "Combining by key").fields
    groups = keys.group(keys.as_key(of))
    if how == "count":
        combined: Items = np.bincount(groups.ids, minlength=len(groups))
    else:
        combined = _combine(values, groups, how)
    return Columns((blocks.take(of, groups.first), combined))


def _combine(values: Items, groups: Groups, how: How) -> Items:
    name = how if isinstance(how, str) else name_of(how)
    if isinstance(values, np.ndarray) and name is not None and _is_vectorised(values, name, how):
        return _reduced(values, groups, name)
    if isinstance(values, Columns) and how == "sum":
        return Columns(tuple(_combine(field, groups, how) for field in values.fields))
    return _folded(values, groups, _FOLDS[how] if isinstance(how, str) else how)


def name_of(how: Callable[[Any, Any], Any]) -> str | None:
    try:
        return _FUNCTIONS.get(how)
    except TypeError:  # a callable that cannot be hashed
        return None


def _is_vectorised(values: Array, name: str, how: How) -> bool:
    kinds = "biufc" if name == "sum" else "biufmM"
    if values.dtype.kind not in kinds or values.dtype.itemsize > 16:
        return False
    if how is min or how is max:  # Python's own keep or lose NaN, as the order has it
        return values.ndim == 1 and not (values != values).any()
    return True


def _reduced(values: Array, groups: Groups, name: str) -> Array:
    if len(groups) == len(values) and values.dtype.kind not in "biu":
        return values
    kind = values.dtype.kind
    if name != "sum":
        found = _scattered(_UFUNCS[name], values[groups.first].copy(), values, groups)
        return _first_zeros(found, values, groups) if kind == "f" else found
    if kind in "biu":
        return _sum_of_ints(values, groups)
    exact = {"f": np.float64, "c": np.complex128}[kind] if values.dtype.itemsize <= 8 else None
    # -0.0 added to any x is x; 0.0 would make 0.0 of -0.0.
    nothing = -0.0 if kind == "f" else complex(-0.0, -0.0)
    wide = np.full((len(groups), *values.shape[1:]), nothing, exact or values.dtype)
    return _scattered(np.add, wide, values, groups).astype(values.dtype, copy=False)


def _first_zeros(found: Array, values: Array, groups: Groups) -> Array:
    """Least or greatest values whose zeros have the sign of their group's first zero: neither is
    less than the other, so a left fold keeps the one that it has. NumPy keeps any."""
    at = np.nonzero(values == 0)
    if not np.signbit(values[at]).any():
        return found
    firsts = found.copy()
    backwards = tuple(axis[::-1] for axis in at)  # of several writes to a place the last stays
    places = (groups.ids[backwards[0]], *backwards[1:])
    firsts[places] = values[backwards]
    return np.where(found == 0, firsts, found)


def _sum_of_ints(values: Array, groups: Groups) -> Array:
    """In int64 where that is certain to hold it, otherwise exactly, in two halves."""
    shape = (len(groups), *values.shape[1:])
    largest = max(abs(int(values.max())), abs(int(values.min()))) if values.size else 0
    if largest * len(values) < 2**63:
        return _scattered(np.add, np.zeros(shape, np.int64), values.astype(np.int64), groups)
    summed = np.zeros(shape, object)
    for shift, half in ((0, values & 0xFFFFFFFF), (32, values >> 32)):
        part = _scattered(np.add, np.zeros(shape, np.int64), half.astype(np.int64), groups)
        summed += part.astype(object) << shift
    try:
        return summed.astype(np.int64)
    except OverflowError:
        return summed


def _scattered(ufunc: np.ufunc, out: Array, values: Array, groups: Groups) -> Array:
    """Each value into its key's place, from left to right."""
    with np.errstate(all="ignore"):  # NaN and infinity come out as from Python's floats
        return _scattered_quietly(ufunc, out, values, groups)


def _scattered_quietly(ufunc: np.ufunc, out: Array, values: Array, groups: Groups) -> Array:
    if values.ndim == 1:
        ufunc.at(out, groups.ids, values)
        return out
    flat, into = values.reshape(len(values), -1), out.reshape(len(out), -1)
    if flat.shape[1] <= _COLUMNS_ONE_BY_ONE:  # ufunc.at is fast in one dimension only
        for i in range(flat.shape[1]):
            column = np.ascontiguousarray(into[:, i])
            ufunc.at(column, groups.ids, np.ascontiguousarray(flat[:, i]))
            into[:, i] = column
        return into.reshape(out.shape)
    places = np.argsort(groups.ids, kind="stable")
    starts = np.searchsorted(groups.ids[places], np.arange(len(groups)))
    found: Array = ufunc.reduceat(flat[places].astype(out.dtype, copy=False), starts, axis=0)
    return found.reshape(out.shape)


def _folded(values: Items, groups: Groups, how: Callable[[Any, Any], Any]) -> Items:
    out: list[Any] = []
    for key, value in zip(groups.ids.tolist(), blocks.items(values), strict=True):
        if key < len(out):
            out[key] = how(out[key], value)
        else:  # keys are numbered as they appear; a function may write into its first argument
            out.append(value.copy() if isinstance(value, np.ndarray) else value)
    return blocks.from_items(out)
