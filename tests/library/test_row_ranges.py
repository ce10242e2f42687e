"""Sums that are cut where pieces begin, against the same without a cut. No Ray."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray._write.deltas import ArrayLayout, Rows, Sum, apply_sums
from clamor_ray._write.row_ranges import ALL_ROWS, cut, rows_of_pieces

N_ROWS, WIDTH = 40, 3


def layout_of(array: Any) -> ArrayLayout:
    return ArrayLayout(array.shape, array.dtype, array.strides)


def test_rows_of_pieces_follow_each_other() -> None:
    array = np.zeros((1000, 4), np.float32)
    found = rows_of_pieces(layout_of(array), 64, 4096, 5)
    assert found == ((0, 252), (252, 508), (508, 764), (764, 1020), (1020, None))
    # The stream and other buffers may fill the first pieces.
    assert rows_of_pieces(layout_of(array), 2 * 4096, 4096, 4) == (
        *((0, 0), (0, 0), (0, 256)),
        (256, None),
    )


@pytest.mark.parametrize(
    ("array", "offset_bytes"),
    [
        (np.zeros((1000, 5), np.float32), 0),  # 20 bytes
        (np.zeros((1000, 4), np.float32), 72),
        (np.zeros((1000, 4), np.float32, order="F"), 0),
        (np.zeros((1000, 8), np.float32)[:, ::2], 0),
        (np.zeros((1000, 0), np.float32), 0),
        (np.float64(1.0), 0),
    ],
)
def test_rows_that_lie_in_two_pieces_are_not_cut(array: Any, offset_bytes: int) -> None:
    assert rows_of_pieces(layout_of(array), offset_bytes, 4096, 3) is None


def some_rows(draw: Any, wide: bool) -> Rows | None:
    ids = sorted(draw(st.sets(st.integers(0, N_ROWS - 1), max_size=12)))
    if not ids:
        return None
    values = np.arange(len(ids) * WIDTH, dtype=np.int64).reshape(-1, WIDTH) * draw(
        st.integers(-3, 3)
    )
    return Rows(np.array(ids, np.uint64 if wide else np.uint32), values)


@st.composite
def sums(draw: Any) -> Sum:
    dense = None
    if draw(st.booleans()):  # it may have grown since
        n = draw(st.integers(1, N_ROWS))
        dense = np.arange(n * WIDTH, dtype=np.int64).reshape(n, WIDTH)
    return Sum(dense, *(some_rows(draw, draw(st.booleans())) for _ in range(3)))


@given(st.lists(sums(), max_size=4), st.sets(st.integers(0, N_ROWS + 5), max_size=5))
def test_parts_are_what_the_whole_is(some: list[Sum], borders: set[int]) -> None:
    expected = np.full((N_ROWS, WIDTH), 5, np.int64)
    found = expected.copy()
    apply_sums(expected, some)
    ends = sorted(borders)
    ranges = list(zip([0, *ends], [*ends, None], strict=True))
    for (begin, end), *parts in zip(ranges, *(cut(one, ranges) for one in some), strict=True):
        apply_sums(found[begin:end], [part for part in parts if part is not None])
    assert np.array_equal(found, expected)


def test_ids_of_four_bytes_meet_rows_beyond_them() -> None:
    rows = Rows(np.array([2, 2**32 - 1], np.uint32), np.array([1.0, 2.0]))
    first, second = cut(Sum(add=rows), [(0, 2**32 + 4096), (2**32 + 4096, None)])
    assert first is not None
    assert first.add is not None
    assert first.add.ids.tolist() == rows.ids.tolist()
    assert second is None
    (whole,) = cut(Sum(add=rows), ALL_ROWS)
    assert whole is not None
    assert whole.add is rows
