"""Ids in few bytes: they come back as they were, and bits are only taken where they are fewer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray._objects.packed_ids import Bits, pack, unpack

TOP = {"uint32": 2**32 - 1, "uint64": 2**64 - 1}


@pytest.mark.parametrize("dtype", TOP)
@given(st.data())
def test_ids_come_back(dtype: str, data: st.DataObject) -> None:
    first = data.draw(st.sampled_from([0, 5, 2**31, TOP[dtype] - 300]))
    offsets = data.draw(st.sets(st.integers(0, 300), max_size=200))
    ids = np.array(sorted(first + offset for offset in offsets), dtype)
    packed = pack(ids)
    again = unpack(packed)
    assert again.dtype == ids.dtype
    assert again.tolist() == ids.tolist()
    size = packed.bits.nbytes if isinstance(packed, Bits) else packed.nbytes
    assert size <= ids.nbytes


def test_neighbours_are_bits_and_others_stay() -> None:
    ids = np.arange(1000, 9000, dtype=np.uint32)
    packed = pack(ids)
    assert isinstance(packed, Bits)
    assert packed.bits.nbytes == 1000
    far = np.array([0, 10**9], np.uint32)
    assert pack(far) is far
    assert unpack(far) is far
