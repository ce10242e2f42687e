"""Arrow arrays of any type, of random items, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

MOST_IN_A_LIST = 4
MOST_LETTERS = 30  # a view holds 12 in itself
TENSOR = pa.fixed_shape_tensor(pa.float32(), (2, 3))

FLAT = [
    pa.null(),
    pa.bool_(),
    pa.int8(),
    pa.uint16(),
    pa.int64(),
    pa.float32(),
    pa.decimal128(25, 2),
    pa.timestamp("us"),
    pa.month_day_nano_interval(),
    pa.binary(7),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.string_view(),
    pa.binary_view(),
    TENSOR,
]
IN_DICTIONARIES = [pa.int64(), pa.string(), pa.large_binary(), pa.string_view(), pa.binary(7)]


def _pair(two: tuple[pa.DataType, pa.DataType]) -> list[pa.Field]:
    return [pa.field("a", two[0]), pa.field("b", two[1])]


def kinds() -> st.SearchStrategy[pa.DataType]:
    """Types, up to three deep."""
    leaf = st.sampled_from(FLAT) | st.builds(
        lambda index, value: pa.dictionary(index, value),
        st.sampled_from([pa.int32(), pa.uint32(), pa.int64()]),
        st.sampled_from(IN_DICTIONARIES),
    )

    def nested(of: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        two = st.tuples(of, of)
        return st.one_of(
            of.map(pa.list_),
            of.map(pa.large_list),
            of.map(pa.list_view),
            of.map(pa.large_list_view),
            of.map(lambda kind: pa.list_(kind, 3)),
            of.map(lambda kind: pa.map_(pa.string(), kind)),
            two.map(lambda pair: pa.struct(_pair(pair))),
            two.map(lambda pair: pa.dense_union(_pair(pair), type_codes=[5, 2])),
            two.map(lambda pair: pa.sparse_union(_pair(pair))),
            st.sampled_from([pa.int64(), pa.string(), pa.string_view()]).map(
                lambda kind: pa.run_end_encoded(pa.int32(), kind)
            ),
        )

    return st.recursive(leaf, nested, max_leaves=3)


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether there is a dictionary anywhere in it."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return True
    return any(has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _offsets(n: int, rng: np.random.Generator, most: int, dtype: Any) -> np.ndarray:
    offsets = np.zeros(n + 1, dtype)
    np.cumsum(rng.integers(0, most + 1, n), out=offsets[1:])
    return offsets


def _bits(nulls: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(~nulls, bitorder="little"))


def _texts(kind: pa.DataType, n: int, rng: np.random.Generator, nulls: np.ndarray) -> pa.Array:
    if kind in (pa.string_view(), pa.binary_view()):
        return _texts(pa.large_string(), n, rng, nulls).cast(kind)
    large = kind in (pa.large_string(), pa.large_binary())
    offsets = _offsets(n, rng, MOST_LETTERS, np.int64 if large else np.int32)
    letters = rng.integers(97, 123, int(offsets[-1]), np.uint8)
    buffers = [_bits(nulls), pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.Array.from_buffers(kind, n, buffers)


def _union(kind: pa.DataType, n: int, rng: np.random.Generator) -> pa.Array:
    codes, names = list(kind.type_codes), [kind.field(i).name for i in range(kind.num_fields)]
    which = rng.integers(0, len(codes), n)
    types = pa.array(np.array(codes, np.int8)[which], pa.int8())
    if kind.mode == "sparse":
        children = [array_of(kind.field(i).type, n, rng) for i in range(kind.num_fields)]
        return pa.UnionArray.from_sparse(types, children, names, codes)
    offsets = np.zeros(n, np.int32)
    children = []
    for i in range(kind.num_fields):
        offsets[which == i] = np.arange((which == i).sum())
        children.append(array_of(kind.field(i).type, int((which == i).sum()), rng))
    return pa.UnionArray.from_dense(types, pa.array(offsets), children, names, codes)


def array_of(kind: pa.DataType, n: int, rng: np.random.Generator) -> pa.Array:
    """An array of n items of a type; a tenth is null where there can be nulls.

    Views of lists overlap, and lie in no order. A dictionary has as many items as the array.
    """
    is_a = pa.types
    nulls = rng.random(n) < 0.1
    if is_a.is_null(kind):
        return pa.nulls(n)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(kind.storage_type, n, rng))
    if is_a.is_dictionary(kind):
        indices = pa.array(rng.integers(0, max(n, 1), n), kind.index_type, mask=nulls)
        return pa.DictionaryArray.from_arrays(indices, array_of(kind.value_type, max(n, 1), rng))
    if is_a.is_run_end_encoded(kind):
        ends = np.cumsum(rng.integers(1, 4, n))
        ends = np.append(ends[ends < n], [n] if n else []).astype(np.int32)
        values = array_of(kind.value_type, len(ends), rng)
        return pa.RunEndEncodedArray.from_arrays(pa.array(ends), values, type=kind)
    if is_a.is_union(kind):
        return _union(kind, n, rng)
    if is_a.is_struct(kind):
        children = [array_of(kind.field(i).type, n, rng) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=pa.array(nulls))
    if is_a.is_map(kind):
        offsets = _offsets(n, rng, MOST_IN_A_LIST, np.int32)
        keys = _texts(kind.key_type, int(offsets[-1]), rng, np.zeros(int(offsets[-1]), bool))
        items = array_of(kind.item_type, int(offsets[-1]), rng)
        return pa.MapArray.from_arrays(pa.array(offsets), keys, items, kind, mask=pa.array(nulls))
    if is_a.is_fixed_size_list(kind):
        values = array_of(kind.value_type, n * kind.list_size, rng)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=pa.array(nulls))
    if is_a.is_list(kind) or is_a.is_large_list(kind):
        cls = pa.ListArray if is_a.is_list(kind) else pa.LargeListArray
        dtype = np.int32 if is_a.is_list(kind) else np.int64
        offsets = _offsets(n, rng, MOST_IN_A_LIST, dtype)
        values = array_of(kind.value_type, int(offsets[-1]), rng)
        return cls.from_arrays(pa.array(offsets), values, type=kind, mask=pa.array(nulls))
    if is_a.is_list_view(kind) or is_a.is_large_list_view(kind):
        cls = pa.ListViewArray if is_a.is_list_view(kind) else pa.LargeListViewArray
        dtype = np.int32 if is_a.is_list_view(kind) else np.int64
        sizes = rng.integers(0, MOST_IN_A_LIST + 1, n).astype(dtype)
        offsets = rng.integers(0, 2 * n + 1, n).astype(dtype)
        values = array_of(kind.value_type, 2 * n + MOST_IN_A_LIST, rng)
        parts = (pa.array(offsets), pa.array(sizes), values)
        return cls.from_arrays(*parts, type=kind, mask=pa.array(nulls))
    width_bytes = 0 if is_a.is_boolean(kind) else _width_bytes(kind)
    if width_bytes == 0 and not is_a.is_boolean(kind):
        return _texts(kind, n, rng, nulls)
    if is_a.is_boolean(kind):
        return pa.array(rng.random(n) < 0.5, mask=nulls)
    if is_a.is_floating(kind) or is_a.is_decimal(kind):
        return pa.array(rng.integers(0, 10**6, n), pa.int64(), mask=nulls).cast(kind)
    raw = rng.integers(0, 100, n * width_bytes, np.uint8)
    if is_a.is_timestamp(kind):
        raw = rng.integers(0, 10**15, n).view(np.uint8)
    return pa.Array.from_buffers(kind, n, [_bits(nulls), pa.py_buffer(raw)])


def _width_bytes(kind: pa.DataType) -> int:
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return 0
