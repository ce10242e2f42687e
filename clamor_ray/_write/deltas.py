"""What is added to a global array: checked against its shape and dtype before anything is changed.

No Ray, no session. A delta is a whole array of the variable's shape, or rows with their
numbers; several deltas of a variable follow each other in a list, and are applied in that order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native import scatter
from clamor_ray._read.gather import row_ids

Array = npt.NDArray[Any]
Op = Literal["add", "max", "min"]
UFUNCS: Final[dict[Op, np.ufunc]] = {"add": np.add, "max": np.maximum, "min": np.minimum}
Ids = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]
OPS: Final[tuple[Op, ...]] = ("add", "max", "min")
_KINDS: Final = "iufc"


class Delta(NamedTuple):
    """What one call changes.

    Args:
        op: how values meet what is there.
        ids: numbers of rows from 0 on, of one dimension, uint32 or uint64, an array of its own;
            None: all rows.
        values: of the variable's dtype; one row for each id, or the variable's shape. May be the
            caller's array.
    """

    op: Op
    ids: Ids | None
    values: Array

    @property
    def n_bytes(self) -> int:
        """Of ids and values."""
        return self.values.nbytes + (0 if self.ids is None else self.ids.nbytes)


def _check_array(shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> None:
    if dtype.kind not in _KINDS:
        raise TypeError(f"{what} is for arrays of numbers, not of {dtype}")


def _check_not_masked(given: Any, what: str) -> None:
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(f"{what} are a masked array: pass those that are not masked (compressed())")


def _as_dtype(values: Any, dtype: np.dtype[Any]) -> Array:
    """Values as the variable's dtype, where NumPy casts so ("same_kind").

    Raises:
        TypeError: It does not, or they are masked: a mask would be lost.
    """
    _check_not_masked(values, "values")
    if type(values) in (bool, int, float, complex):  # they take the other side's width
        given = np.result_type(dtype, values)
        array = np.asarray(values)
    else:
        array = np.asarray(values)
        if array.size == 0 and not isinstance(values, np.ndarray):
            return array.astype(dtype)
        given = array.dtype
    if not np.can_cast(given, dtype, "same_kind"):
        raise TypeError(
            f"values of {given} cannot be cast to {dtype} by the rule 'same_kind': cast them first"
        )
    if type(values) is int:
        return np.asarray(values, dtype)  # OverflowError where it does not fit
    return array.astype(dtype, copy=False)


def sparse(op: Op, shape: tuple[int, ...], dtype: np.dtype[Any], ids: Any, values: Any) -> Delta:
    """Rows of a variable, as `numpy.ufunc.at` takes them.

    Args:
        shape, dtype: of the variable.
        ids: integers of any shape; negative ones count from the end.
        values: what `ids.shape + shape[1:]` is broadcast from.

    Raises:
        RowIdError: An id is out of bounds or no integer, or the variable has no axis.
        TypeError: No numbers, or values that cannot be cast.
        ValueError: Values of another shape.

    Example:
        >>> sparse("add", (3, 2), np.dtype(np.float32), [-1, 0], 1).ids.tolist()
        [2, 0]
    """
    _check_array(shape, dtype, f"{'add' if op == 'add' else op + 'imum'}_at")
    if not shape:
        raise errors.RowIdError("The array is 0-dimensional, and has no rows.")
    _check_not_masked(ids, "ids")
    try:
        narrow = np.uint32 if shape[0] <= 1 << 32 else np.uint64
        numbers = row_ids(ids, shape[0], narrow, copy=True)
    except IndexError as failure:
        # Ours: out of a stage's task it comes as it is, and is still an IndexError.
        raise errors.RowIdError(f"{failure}.") from None
    rows = _as_dtype(values, dtype)
    wanted = numbers.shape + shape[1:]
    try:
        rows = np.broadcast_to(rows, wanted)
    except ValueError:
        raise ValueError(
            f"values of shape {rows.shape} do not fit ids of shape {numbers.shape} and rows of "
            f"shape {shape[1:]}: a scalar, or shape {wanted}"
        ) from None
    flat: Ids = numbers.reshape(-1)
    return Delta(op, flat, rows.reshape(numbers.size, *shape[1:]))


def dense(shape: tuple[int, ...], dtype: np.dtype[Any], values: Any) -> Delta:
    """A whole array to be added.

    Raises:
        TypeError: No numbers, or values that cannot be cast.
        ValueError: It has not the variable's shape.
    """
    _check_array(shape, dtype, "add")
    array = _as_dtype(values, dtype)
    if array.shape != shape:
        raise ValueError(f"the variable has shape {shape}, and what is added {array.shape}")
    return Delta("add", None, array)


def apply(array: Array, delta: Delta) -> None:
    """Changes an array by a delta that was checked against its shape and dtype."""
    ufunc, flags = UFUNCS[delta.op], array.flags
    plain = flags.c_contiguous and flags.aligned and flags.writeable
    if delta.ids is not None and plain and scatter.can(array.dtype):
        values = np.ascontiguousarray(delta.values)
        scatter.apply(delta.op, array, delta.ids, values)
        return
    with np.errstate(all="ignore"):  # overflow wraps, or is infinite; NaN stays
        if delta.ids is None:
            ufunc(array, delta.values, out=array)
        else:
            ufunc.at(array, delta.ids.astype(np.intp), delta.values)


# ------------------------------------------------------------------ many of them


def _one(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class Rows(NamedTuple):
    """Values for rows, each at most once.

    Args:
        ids: ascending, uint32 or uint64.
        values: a row for each.
    """

    ids: Ids
    values: Array

    @property
    def n_bytes(self) -> int:
        """Of ids and values."""
        return self.ids.nbytes + self.values.nbytes


def combine(op: Op, ids: Ids, values: Array) -> Rows:
    """Rows with each id once: what came first, then what came after it, in this order. The very
    arrays where they are so already.

    Example:
        >>> combine("add", np.array([7, 3, 7], np.uint64), np.array([1.0, 2.0, 4.0]))
        Rows(ids=array([3, 7], dtype=uint64), values=array([2., 5.]))
    """
    if len(ids) and (ids[1:] > ids[:-1]).all():
        return Rows(ids, values)
    if scatter.can(values.dtype) and values.flags.c_contiguous and values.flags.aligned:
        return Rows(*scatter.combine(op, ids, values))
    order = np.argsort(ids, kind="stable")
    ids, values = ids[order], values[order]
    first = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=first[1:])
    if first.all():
        return Rows(ids, values)
    made = values[first]
    where = np.cumsum(first) - 1
    with np.errstate(all="ignore"):
        UFUNCS[op].at(made, where[~first], values[~first])
    return Rows(ids[first], made)


class Sum(NamedTuple):
    """All that is to be done to one variable: see `apply_sums`.

    Args:
        dense: added to the first rows.
        add, max, min: of rows.
    """

    dense: Array | None = None
    add: Rows | None = None
    max: Rows | None = None
    min: Rows | None = None

    @property
    def n_bytes(self) -> int:
        """Of all arrays."""
        rows = sum(rows.n_bytes for rows in self[1:] if rows is not None)
        return rows + (0 if self.dense is None else self.dense.nbytes)

    @property
    def touched(self) -> list[Ids | None]:
        """Ids of rows that are changed; None: all of them."""
        if self.dense is not None:
            return [None]
        return [rows.ids for rows in self[1:] if rows is not None]


def merged(sums: Sequence[Sum]) -> Sum:
    """Several made one, in their order."""
    found: dict[str, Any] = {}
    for op in OPS:
        rows = [getattr(one, op) for one in sums if getattr(one, op) is not None]
        if len(rows) == 1:
            found[op] = rows[0]
        elif rows:
            found[op] = _merged_rows(op, rows)
    dense = [one.dense for one in sums if one.dense is not None]
    if len(dense) == 1:
        found["dense"] = dense[0]
    elif dense:
        found["dense"] = _dense_sum(dense)
    return Sum(**found)


def _merged_rows(op: Op, lists: Sequence[Rows]) -> Rows:
    plain = all(each.values.flags.c_contiguous and each.values.flags.aligned for each in lists)
    if plain and scatter.can(lists[0].values.dtype):
        wide = np.result_type(*(each.ids.dtype for each in lists))  # it may have grown
        ids = [each.ids.astype(wide, copy=False) for each in lists]
        return Rows(*scatter.merge(op, ids, [each.values for each in lists]))
    numbers = np.concatenate([each.ids for each in lists])
    return combine(op, numbers, np.concatenate([each.values for each in lists]))


def _dense_sum(arrays: Sequence[Array]) -> Array:
    """In their order; a variable that has grown between two is as long as the longest."""
    longest = max(arrays, key=lambda array: array.shape[:1])
    total = np.zeros(longest.shape, longest.dtype)
    if arrays[0].ndim == 0 or len(arrays[0]) == len(total):
        total[...] = arrays[0]
        arrays = arrays[1:]
    with np.errstate(all="ignore"):
        for array in arrays:
            part = total[: len(array)] if array.ndim else total
            np.add(part, array, out=part)
    return total


def apply_sums(array: Array, sums: Sequence[Sum]) -> None:
    """Changes an array that is at least as long as the one that each delta was checked against:
    all that is added, in the order of the sums, then the maxima, then the minima."""
    for one in sums:
        if one.dense is not None:
            part = array[: len(one.dense)] if array.ndim else array
            apply(part, Delta("add", None, one.dense))
        _apply_rows(array, "add", one.add)
    for one in sums:
        _apply_rows(array, "max", one.max)
    for one in sums:
        _apply_rows(array, "min", one.min)


def _apply_rows(array: Array, op: Op, rows: Rows | None) -> None:
    if rows is not None:
        apply(array, Delta(op, rows.ids, rows.values))


class ArrayLayout(NamedTuple):
    """How a variable's array lies in memory, in NumPy's words."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]


class Collector:
    """What one task does to variables, until it is over. Safe from any thread.

    Args:
        most_bytes: from here on what has come is combined.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self.layouts: dict[tuple[int, int], ArrayLayout] = {}  # by (region, version)
        self._refs: dict[int, Any] = {}
        self._most_bytes = most_bytes
        self._pid = os.getpid()
        self._taken = False
        self._lock = threading.Lock()
        self._new: dict[int, list[Delta]] = {}
        self._new_bytes: dict[int, int] = {}
        self._sums: dict[int, Sum] = {}

    def add(self, ref: Any, delta: Delta) -> None:
        """Keeps a delta, with a copy of its values.

        Args:
            ref: a frozen `GlobalRef` of the variable.

        Raises:
            ForkedError: This process is a fork of the task's: what it adds would be lost.
            ClosedError: The task is over, and what it has added was taken.
        """
        if os.getpid() != self._pid:
            raise errors.ForkedError(
                "This process is a fork of a stage's task: what it adds would be lost.",
                hint="Call it in the task's own process, with what its children have returned.",
            )
        delta = delta._replace(values=np.array(delta.values, order="C"))
        region = ref._region
        with self._lock:
            if self._taken:
                raise errors.ClosedError(
                    "The task that this thread belongs to is over: what it adds would be lost.",
                    hint="Wait for the function's threads before it returns.",
                )
            self._refs[region] = ref
            self._new.setdefault(region, []).append(delta)
            self._new_bytes[region] = self._new_bytes.get(region, 0) + delta.n_bytes
            known = self._sums.get(region)
            if self._new_bytes[region] > max(self._most_bytes, known.n_bytes if known else 0):
                self._combine(region)

    def _combine(self, region: int) -> None:
        """All of one op in the order of the calls; of sums, whole arrays first."""
        new, self._new_bytes[region] = self._new.pop(region, []), 0
        sums = [self._sums[region]] if region in self._sums else []
        found: dict[str, Any] = {}
        for op in OPS:
            rows = [d for d in new if d.op == op and d.ids is not None]
            if rows:
                ids = [d.ids for d in rows if d.ids is not None]
                found[op] = combine(op, _one(ids), _one([d.values for d in rows]))
        dense = [d.values for d in new if d.ids is None]
        if dense:
            found["dense"] = dense[0] if len(dense) == 1 else _dense_sum(dense)
        self._sums[region] = merged([*sums, Sum(**found)])

    def take(self) -> tuple[tuple[Any, ...], dict[int, Sum]]:
        """References to the variables, and what is to be done to each, by region. What comes
        later is refused."""
        with self._lock:
            self._taken = True
            for region in list(self._new):
                self._combine(region)
            sums, self._sums = self._sums, {}
            return tuple(self._refs.values()), sums
