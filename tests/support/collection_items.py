"""Items for the tests of blocks and shuffles: what a user may put into a collection, and how two
of them are compared with their types."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

INT64 = st.integers(-(2**63), 2**63 - 1)
WIDE = st.one_of(st.integers(-3, 3), INT64, st.integers(-(2**70), 2**70), st.just(2**63))
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 2.5, math.nan, math.inf, 2.0**63]), st.floats())
TEXT = st.one_of(st.sampled_from(["", "a", "b", "a\0", "é", "\ud800"]), st.text(max_size=5))
SCALARS = st.one_of(
    st.none(), st.booleans(), WIDE, FLOATS, TEXT, st.binary(max_size=4), st.dates(), st.datetimes()
)
NUMPY = st.one_of(
    st.integers(-100, 100).map(np.int32),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=32).map(np.float32),
    st.sampled_from([np.datetime64("2020-01-01"), np.datetime64("NaT"), np.timedelta64(3, "s")]),
)
SMALL_KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, 0.5, "a", "b", b"a", 2**63, 2.0**63, np.int32(1)]),
    st.tuples(st.integers(0, 1), st.sampled_from(["a", None, math.nan, 1.0])),
)


def lists_of_one_kind(elements: Any = None, max_size: int = 20) -> Any:
    """Lists whose items have one kind: what the vectorised paths are for; and mixed ones."""
    kinds = [
        st.booleans(),
        st.integers(-3, 3),
        INT64,
        st.sampled_from([0.0, -0.0, 1.0, math.nan, -2.5, math.inf]),
        st.sampled_from(["", "a", "b", "ab", "a\0", "é"]),
        st.one_of(st.none(), st.sampled_from(["a", "b"])),
        st.sampled_from([b"", b"a", b"b"]),
        st.sampled_from([datetime.date(2020, 1, 1), datetime.date(1969, 1, 2)]),
        st.tuples(st.integers(0, 2), st.sampled_from(["a", "b"])),
        st.tuples(st.sampled_from([math.nan, 1.0, 0.0]), st.integers(0, 1)),
        st.integers(-3, 3).map(np.int32),
        st.sampled_from([np.float32(0.5), np.float32(math.nan), np.float32(-0.0)]),
    ]
    if elements is not None:
        kinds.append(elements)
    return st.one_of(*(st.lists(kind, max_size=max_size) for kind in kinds))


def for_all(*strategies: Any) -> Callable[[Any], Any]:
    """A property of all such values. No time limit for one: this is no test of speed."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type, all the way down; NaN is itself.

    Only where the other is a dict with NumPy's scalars may the one have Python's.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[key], other[key]) or same(one[key], plain(other[key])) for key in one
        )
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and same(one.tolist(), other.tolist())
    if one != one:
        return bool(other != other)
    return (
        bool(one == other) and math.copysign(1, one) == math.copysign(1, other)
        if isinstance(one, float)
        else bool(one == other)
    )


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, (np.number, np.bool_)) else value


def norm(key: Any) -> Any:
    """A key as Python's dict has it, but with NaN equal to itself."""
    if isinstance(key, tuple):
        return tuple(map(norm, key))
    return "not a number" if key != key else key
