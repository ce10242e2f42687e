"""One value of all items: sum, min, max, mean, count, in three steps. Pure.

partial   of one partition
merge     of several partials, in any tree
finish    the value itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as given
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from clamor_ray import errors
from clamor_ray.collection.data import arrow, blocks, keys
from clamor_ray.collection.data.blocks import Array, Items


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
    if on is None and (_AGGREGATES[what].counts_only or not isinstance(b, pa.Table)):
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
        if _AGGREGATES[what].counts_only:
            return ColumnState(len(valid))
        return _state(arrow.column_items(valid), what)
    return _state(blocks.column(b, name), what)


def _state(b: Items, what: str) -> ColumnState:
    count = blocks.n_items(b)
    try:
        return ColumnState(count, _AGGREGATES[what].of(b) if count else None)
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


def _extreme(ufunc: np.ufunc, choose: Callable[[list[Any]], Any], b: Items) -> Any:
    if isinstance(b, np.ndarray) and b.dtype.kind in "biufcmM":
        return _python(ufunc.reduce(b, axis=0))
    if isinstance(b, np.ndarray) and b.ndim > 1:
        raise TypeError("arrays of objects")
    if isinstance(b, pa.Table):
        raise TypeError("rows")
    return _choose(choose, list(blocks.items(b)))


def _more_extreme(ufunc: np.ufunc, choose: Callable[[list[Any]], Any], one: Any, other: Any) -> Any:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return ufunc(one, other)
    return _choose(choose, [one, other])


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
    return ColumnState(one.count + other.count, _AGGREGATES[what].merge(one.value, other.value))


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
    aggregate = _AGGREGATES[what]
    if state.count:
        return aggregate.finish(state)
    if aggregate.of_nothing is None:
        raise errors.EmptyCollectionError(f"There is no {what} of no items.")
    return aggregate.of_nothing


class _Aggregate(NamedTuple):
    """One aggregate, by its three steps.

    Args:
        of: the value of a block that has items.
        merge: of two values.
        finish: the result of items that are counted and have a value.
        of_nothing: the result of no items; None: it has none.
        counts_only: the number of items is all that it needs.
    """

    of: Callable[[Items], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[ColumnState], Any] = lambda state: state.value
    of_nothing: int | None = None
    counts_only: bool = False


_AGGREGATES: Final = {
    "sum": _Aggregate(_sum, _added, of_nothing=0),
    "min": _Aggregate(given(_extreme, np.minimum, min), given(_more_extreme, np.minimum, min)),
    "max": _Aggregate(given(_extreme, np.maximum, max), given(_more_extreme, np.maximum, max)),
    "mean": _Aggregate(_sum, _added, lambda state: state.value / state.count),
    "count": _Aggregate(
        of=lambda b: None,
        merge=lambda one, other: None,
        finish=lambda state: state.count,
        of_nothing=0,
        counts_only=True,
    ),
}
NAMES: Final = tuple(_AGGREGATES)
