"""Slices of Arrow arrays of any type, against Arrow itself: the same items, and few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from tests.library.test_arrow_slices import stored  # noqa: E402
from tests.support.arrow_arrays import array_of, has_dictionary, kinds  # noqa: E402

N = 10_000
SPARE_BYTES = 2 * 4096  # of a buffer: to the next block, and what is not worth a copy


def is_small(obj: Any, like: Any) -> bool:
    """Whether `obj` is stored in about as many bytes as `like`."""
    n_bytes, again = stored(obj)
    return n_bytes <= 2 * stored(like)[0] + SPARE_BYTES * (6 + n_buffers(again))


def n_buffers(obj: Any) -> int:
    if isinstance(obj, pa.Array):
        return n_buffers_of(obj.type)
    return sum(n_buffers_of(field.type) for field in obj.schema)


def n_buffers_of(kind: Any) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return 3 + n_buffers_of(kind.value_type)
    return 3 + sum(n_buffers_of(kind.field(i).type) for i in range(kind.num_fields))


def are_equal(again: Any, part: Any) -> bool:
    """A dictionary may have lost what no item uses; Arrow calls such arrays different."""
    if again.type != part.type or len(again) != len(part):
        return False
    return again.to_pylist() == part.to_pylist() and (
        has_dictionary(part.type) or again.equals(part)
    )


@settings(max_examples=150, deadline=None)
@given(
    kinds(),
    st.integers(0, 2**32 - 1),
    st.integers(0, N),
    st.one_of(st.integers(0, 300), st.integers(0, N)),
    st.integers(0, 9),
)
def test_any_slice_of_any_type(kind: Any, seed: int, first: int, n: int, again_at: int) -> None:
    rng = np.random.default_rng(seed)
    part = array_of(kind, N, rng).slice(first, n)
    for slice_of_it in (part, part.slice(again_at)):
        _, again = stored(slice_of_it)
        again.validate(full=True)
        assert are_equal(again, slice_of_it)
        assert is_small(slice_of_it, array_of(kind, len(slice_of_it), rng))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(kinds(), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.integers(0, N),
    st.integers(0, 300),
    st.sampled_from(["table", "batch", "chunks"]),
)
def test_any_slice_of_what_holds_arrays(
    columns: list[Any], seed: int, first: int, n: int, holder: str
) -> None:
    rng = np.random.default_rng(seed)
    names = [f"column {i}" for i in range(len(columns))]

    def made(n_rows: int) -> Any:
        batch = pa.record_batch([array_of(kind, n_rows, rng) for kind in columns], names)
        return batch if holder == "batch" else pa.Table.from_batches([batch])

    whole = made(N)
    if holder == "chunks":
        whole = pa.concat_tables([whole, made(N)])
        first += N // 2
    part = whole.slice(first, n)
    _, again = stored(part)
    again.validate(full=True)
    assert again.schema == part.schema
    for mine, theirs in zip(again.columns, part.columns, strict=True):
        assert are_equal(mine, theirs)
    assert is_small(part, made(part.num_rows))
