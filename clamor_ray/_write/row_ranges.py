"""Which rows of an array lie in which piece of its variable, and sums that are cut there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from clamor_ray._write.deltas import OPS, ArrayLayout, Rows, Sum

Range = tuple[int, int | None]
"""The first row, and the end; None: whatever comes, also when the array grows."""

ALL_ROWS: Final[tuple[Range, ...]] = ((0, None),)


def rows_of_pieces(
    layout: ArrayLayout, offset_bytes: int, piece_bytes: int, n_pieces: int
) -> tuple[Range, ...] | None:
    """The rows of each piece.

    Args:
        layout: of the array.
        offset_bytes: where its first element lies in the variable.
        piece_bytes: of each piece but the last.
        n_pieces: how many there are.

    Returns:
        None where a row lies in two pieces, or rows do not lie one after the other.

    Example:
        >>> layout = ArrayLayout((1000,), np.dtype(np.float64), (8,))
        >>> rows_of_pieces(layout, 96, 4096, 2)
        ((0, 500), (500, None))
        >>> rows_of_pieces(layout, 100, 4096, 2) is None
        True
    """
    row_bytes = layout.dtype.itemsize
    for n, stride_bytes in zip(layout.shape[:0:-1], layout.strides[:0:-1], strict=True):
        if n > 1 and stride_bytes != row_bytes:
            return None
        row_bytes *= n
    if not layout.shape or not row_bytes:
        return None
    if layout.shape[0] > 1 and layout.strides[0] != row_bytes:
        return None
    borders_bytes = [max(0, k * piece_bytes - offset_bytes) for k in range(1, n_pieces)]
    if any(border_bytes % row_bytes for border_bytes in borders_bytes):
        return None
    borders = [border_bytes // row_bytes for border_bytes in borders_bytes]
    return tuple(zip([0, *borders], [*borders, None], strict=True))


def cut(total: Sum, ranges: Sequence[Range]) -> tuple[Sum | None, ...]:
    """A sum's part of each range, whose rows count from the range's first.

    Args:
        total: of all rows.
        ranges: of the array.

    Returns:
        None where nothing of the range is changed.

    Example:
        >>> rows = Rows(np.array([1, 5, 6], np.uint32), np.array([1.0, 2.0, 3.0]))
        >>> first, second = cut(Sum(add=rows), [(0, 4), (6, None)])
        >>> first.add.ids.tolist(), second.add.ids.tolist(), second.add.values.tolist()
        ([1], [0], [3.0])
    """
    if tuple(ranges) == ALL_ROWS:
        return (total,)
    return tuple(_part(total, *each) for each in ranges)


def _part(total: Sum, begin: int, end: int | None) -> Sum | None:
    found: dict[str, Any] = {}
    if total.dense is not None and len(dense := total.dense[begin:end]):
        found["dense"] = dense
    for op in OPS:
        rows: Rows | None = getattr(total, op)
        if rows is None:
            continue
        low, high = _place(rows, begin), _place(rows, end)
        if low < high:
            ids = rows.ids[low:high] - rows.ids.dtype.type(begin)
            found[op] = Rows(ids, rows.values[low:high])
    return Sum(**found) if found else None


def _place(rows: Rows, row: int | None) -> int:
    """Where ids begin that are no less than this."""
    if row is None or row > np.iinfo(rows.ids.dtype).max:
        return len(rows.ids)
    return int(np.searchsorted(rows.ids, rows.ids.dtype.type(row)))
