"""One value of all items: sum, min, max, mean, count, in three steps. Pure.

partial   of one partition
merge     of several partials, in any tree
finish    the value itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from clamor_ray import errors
from clamor_ray.collection.data import arrow, blocks, keys
from clamor_ray.collection.data.blocks import Array, Items

NAMES: Final = ("sum", "min", "max", "mean", "count")


@dataclass(frozen=True)
class ColumnState:
    """What is known of one column.

    Args:
        count: items that are not null.
        value: their sum, min or max; None of no items, and where only the count is asked for.
    """

    count: int
    value: Any = None


@dataclass(frozen=True)
class Partial:
    """An aggregate of some of the items.

    Args:
        what: sum, min, max, mean or count.
        states: by column; one of name None where the items themselves are aggregated.
        named: whether the result is a dict by column.
    """

    what: str
    states: dict[str | int | None, ColumnState]
    named: bool


def partial(b: Items, what: str, on: str | int | Sequence[str] | None = None) -> Partial:
    """The aggregate of one block.

    Args:
        b: the block.
        what: "sum", "min", "max", "mean" or "count". Of N-D items the first four are
            elementwise. NaN propagates, as in NumPy; nulls of tables are skipped, as in Arrow.
        on: a column of a table, a field of tuples (by number), or several columns; None: the
            items themselves, and all columns of a table.

    Raises:
        ValueError: `what` is something else.
        MissingColumnError: No such column.
        TypeError: Items that cannot be added or compared: which type.
    """
    if what not in NAMES:
        raise ValueError(f"An aggregate is one of {', '.join(NAMES)}, not {what!r}.")
    if on is None and (what == "count" or not isinstance(b, pa.Table)):
        return Partial(what, {None: _state(b, what)}, named=False)
    if on is None:
        names = arrow.unique_names(b)
        on = names[0] if len(names) == 1 else names
    if isinstance(on, (str, int)):
        return Partial(what, {on: _state_of_column(b, on, what)}, named=False)
    return Partial(what, {name: _state_of_column(b, name, what) for name in on}, named=True)


def _state_of_column(b: Items, name: str | int, what: str) -> ColumnState:
    if not blocks.n_items(b) and not isinstance(b, pa.Table):
        return ColumnState(0)
    if isinstance(b, pa.Table):
        valid = arrow.decoded(arrow.column(b, name)).drop_null()
        return (
            ColumnState(len(valid)) if what == "count" else _state(arrow.column_items(valid), what)
        )
    return _state(blocks.column(b, name), what)


def _state(b: Items, what: str) -> ColumnState:
    count = blocks.n_items(b)
    if what == "count" or not count:
        return ColumnState(count)
    try:
        if what in ("min", "max"):
            return ColumnState(count, _extreme(b, what))
        return ColumnState(count, _sum(b))
    except TypeError as error:
        raise TypeError(
            f"There is no {what} of items of {blocks.schema_of(b)} ({error}): say which column "
            f"(on=...), or map them to numbers first."
        ) from error


def _sum(b: Items) -> Any:
    if isinstance(b, np.ndarray) and b.dtype.kind in "biu":
        return _sum_of_ints(b)
    if isinstance(b, np.ndarray) and b.dtype.kind in "fcm":
        wide = {"f": np.float64, "c": np.complex128}.get(b.dtype.kind)
        return _python(b.sum(axis=0, dtype=wide if b.dtype.itemsize <= 8 else None))
    if isinstance(b, np.ndarray) and b.dtype.kind in "OM":
        values = list(blocks.items(b))
        if not isinstance(values[0], (str, bytes, tuple, list)):  # + would put those together
            return sum(values[1:], start=values[0])
    raise TypeError("neither numbers nor arrays of one shape")


def _sum_of_ints(a: Array) -> Any:
    """Exact: in int64 where that is certain to hold it, otherwise in two halves."""
    if not a.size:
        return a.sum(axis=0, dtype=np.int64)
    largest = max(abs(int(a.max())), abs(int(a.min())))
    if largest * len(a) < 2**63:
        return _python(a.sum(axis=0, dtype=np.int64))
    low = np.asarray((a & 0xFFFFFFFF).sum(axis=0, dtype=np.int64)).astype(object)
    high = np.asarray((a >> 32).sum(axis=0, dtype=np.int64)).astype(object)
    return _narrow(low + (high << 32))


def _narrow(total: Any) -> Any:
    """An array of Python's ints as int64, if that holds them all."""
    if not isinstance(total, np.ndarray) or total.ndim == 0:
        return int(total)
    try:
        return total.astype(np.int64)
    except OverflowError:
        return total


def _python(value: Any) -> Any:
    """Python's scalar where it says all that NumPy's does."""
    if isinstance(value, np.ndarray):
        return value
    exact = isinstance(value, (np.bool_, np.int64, np.float64, np.complex128))
    return value.item() if exact else value


def _extreme(b: Items, what: str) -> Any:
    if isinstance(b, np.ndarray) and b.dtype.kind in "biufcmM":
        return _python(b.min(axis=0) if what == "min" else b.max(axis=0))
    if isinstance(b, np.ndarray) and b.ndim > 1:
        raise TypeError("arrays of objects")
    if isinstance(b, pa.Table):
        raise TypeError("rows")
    choose = min if what == "min" else max
    return _choose(choose, list(blocks.items(b)))


def _choose(choose: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    for value in values:
        if keys.is_nan(value):
            return value
    return choose(values)


def merge(partials: Sequence[Partial]) -> Partial:
    """The aggregate of what several partials are of, from left to right.

    Raises:
        ValueError: There is none, or they are not of the same aggregate and columns.
        TypeError: Values of two partitions that cannot be added or compared.
    """
    if not partials:
        raise ValueError("There is nothing to merge.")
    first = max(partials, key=lambda p: any(state.count for state in p.states.values()))
    states: dict[str | int | None, ColumnState] = {}
    for part in partials:
        if part.what != first.what:
            raise ValueError(f"A {part.what} cannot be merged with a {first.what}.")
        for name, state in part.states.items():
            states[name] = _merged(states.get(name, ColumnState(0)), state, first.what)
    if not first.named and len(states) > 1:
        states.pop(None, None)  # of empty partitions of no known columns
    return Partial(first.what, states, any(part.named for part in partials))


def _merged(one: ColumnState, other: ColumnState, what: str) -> ColumnState:
    if not one.count or not other.count:
        return one if one.count else other
    count = one.count + other.count
    if what == "count":
        return ColumnState(count)
    if what in ("sum", "mean"):
        return ColumnState(count, _added(one.value, other.value))
    if isinstance(one.value, np.ndarray) or isinstance(other.value, np.ndarray):
        extreme = np.minimum if what == "min" else np.maximum
        return ColumnState(count, extreme(one.value, other.value))
    return ColumnState(count, _choose(min if what == "min" else max, [one.value, other.value]))


def _added(one: Any, other: Any) -> Any:
    arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    if arrays and one.shape != other.shape:
        raise TypeError(f"Items of shape {one.shape} and {other.shape} cannot be added.")
    if arrays and one.dtype.kind in "iO" and other.dtype.kind in "iO":
        return _narrow(one.astype(object) + other.astype(object))
    return _python(one + other)


def finish(p: Partial) -> Any:
    """The value: of one column, or a dict "sum(a)" -> value of several, as Ray Data names them.

    Raises:
        EmptyCollectionError: min, max or mean of no items, or of nulls only.
    """
    if p.named:
        named = {n: s for n, s in p.states.items() if n is not None}
        return {f"{p.what}({name})": _value(p.what, state) for name, state in named.items()}
    (state,) = p.states.values()
    return _value(p.what, state)


def _value(what: str, state: ColumnState) -> Any:
    if what == "count":
        return state.count
    if not state.count:
        if what == "sum":
            return 0
        raise errors.EmptyCollectionError(f"There is no {what} of no items.")
    return state.value / state.count if what == "mean" else state.value
