"""Ids in few bytes: they come back as they were, and bits are only taken where they are fewer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray._objects.packed_ids import Bits, pack, unpack

TOP = {"uint32": 2**32 - 1, "uint64": 2**64 - 1}


@pytest.mark.parametrize("dtype", TOP)
@given(st.data())
def test_ids_come_back(dtype: str, data: st.DataObject) -> None:
    firsts = data.draw(
        st.lists(st.sampled_from([0, 5, 2000, 2**20, 2**31, TOP[dtype] - 1300]), max_size=4)
    )
    steps = st.integers(0, 1300) | st.integers(0, 60)
    offsets = data.draw(st.sets(steps, max_size=200))
    ids = np.array(sorted({first + offset for first in firsts for offset in offsets}), dtype)
    packed = pack(ids)
    again = unpack(packed)
    assert again.dtype == ids.dtype
    assert again.tolist() == ids.tolist()
    assert size_of(packed) <= ids.nbytes


def size_of(packed: Any) -> int:
    if not isinstance(packed, Bits):
        return int(packed.nbytes)
    ranges = packed.firsts.nbytes + packed.begins.nbytes
    return packed.bits.nbytes + (ranges if len(packed.firsts) > 1 else 0)


def test_ranges_far_from_each_other_are_bits() -> None:
    ids = (np.arange(64)[:, None] * 10**7 + np.arange(1000)).reshape(-1).astype(np.uint32)
    packed = pack(ids)
    assert isinstance(packed, Bits)
    assert len(packed.firsts) == 64
    assert size_of(packed) < 16 * 64 + 64 * 1000 / 8 + 64
    assert unpack(packed).tolist() == ids.tolist()


def test_neighbours_are_bits_and_others_stay() -> None:
    ids = np.arange(1000, 9000, dtype=np.uint32)
    packed = pack(ids)
    assert isinstance(packed, Bits)
    assert packed.bits.nbytes == 1000
    far = np.array([0, 10**9], np.uint32)
    assert pack(far) is far
    assert unpack(far) is far
