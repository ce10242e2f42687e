"""Rows of arrays, by their numbers, in C and without the GIL. No Ray here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray._native.base import Runs, c, check, collect_runs, runs_pointer

Array = npt.NDArray[Any]
OPS: Final = {"add": 0, "max": 3, "min": 2}
DTYPES: Final = {"float32": 2, "float64": 3, "int32": 4, "int64": 5}


def can(dtype: np.dtype[Any]) -> bool:
    """Whether rows of this dtype are computed in C."""
    return dtype.isnative and dtype.name in DTYPES


def _pointer(array: Array) -> Any:
    return c.ffi.cast("void *", array.__array_interface__["data"][0])


def _row_elements(array: Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64))


def combine(op: str, ids: Array, values: Array) -> tuple[Array, Array]:
    """Rows with each id once, ascending: what came first, then what came after it, in this order.

    Args:
        op: of `OPS`.
        ids: uint32 or uint64, contiguous, of one dimension.
        values: of a dtype that `can` be, contiguous, a row for each.

    Raises:
        OutOfMemoryError.
    """
    made, rows = np.empty_like(ids), np.empty_like(values)
    n = check(
        c.lib.pc_rows_combine(
            DTYPES[values.dtype.name],
            OPS[op],
            _row_elements(values),
            _pointer(ids),
            ids.itemsize,
            _pointer(values),
            len(ids),
            _pointer(made),
            _pointer(rows),
        )
    )
    return _fitting(made, rows, n)


def merge(op: str, ids: Sequence[Array], values: Sequence[Array]) -> tuple[Array, Array]:
    """Lists of rows made one, as `combine` of all of them in a row.

    Args:
        ids: ascending in each list, and as of `combine`; all of one dtype.
        values: likewise, all of one shape but for the first axis.

    Raises:
        OutOfMemoryError.
    """
    total = sum(map(len, ids))
    made = np.empty(total, ids[0].dtype)
    rows = np.empty((total, *values[0].shape[1:]), values[0].dtype)
    n = check(
        c.lib.pc_rows_merge(
            DTYPES[rows.dtype.name],
            OPS[op],
            _row_elements(rows),
            len(ids),
            c.ffi.new("void *[]", [_pointer(each) for each in ids]),
            made.itemsize,
            c.ffi.new("void *[]", [_pointer(each) for each in values]),
            c.ffi.new("uint64_t[]", [len(each) for each in ids]),
            _pointer(made),
            _pointer(rows),
        )
    )
    return _fitting(made, rows, n)


def _fitting(ids: Array, rows: Array, n: int) -> tuple[Array, Array]:
    """The first n; not in the room of all where they are few."""
    if n < len(ids) // 2:
        return ids[:n].copy(), rows[:n].copy()
    return ids[:n], rows[:n]


def apply(op: str, array: Array, ids: Array, values: Array) -> None:
    """array[ids[i]] op= values[i], in this order.

    Args:
        array: contiguous; the others as of `combine`, of its dtype.

    Raises:
        RangeError: An id is none of the array's rows. Nothing was changed.
    """
    check(
        c.lib.pc_rows_apply(
            DTYPES[values.dtype.name],
            OPS[op],
            _row_elements(array),
            _pointer(array),
            len(array),
            _pointer(ids),
            ids.itemsize,
            _pointer(values),
            len(ids),
        )
    )


def blocks(offset_bytes: int, row_bytes: int, n_rows: int, ids: Array) -> Runs:
    """The blocks that rows lie on.

    Args:
        offset_bytes: where the array begins, from the start of a block.
        ids: as of `combine`.

    Raises:
        RangeError: An id is none of the rows.
    """
    return collect_runs(
        lambda pointer, capacity: check(
            c.lib.pc_rows_blocks(
                offset_bytes,
                row_bytes,
                n_rows,
                _pointer(ids),
                ids.itemsize,
                len(ids),
                pointer,
                capacity,
            )
        )
    )


def populate(address: int, runs: Runs) -> None:
    """Copies blocks of a private mapping that will be written, where the kernel can."""
    pointer, n_runs, _keep = runs_pointer(runs)
    if n_runs:
        check(c.lib.pc_populate(c.ffi.cast("void *", address), pointer, n_runs))
