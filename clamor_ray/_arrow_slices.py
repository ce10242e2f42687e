"""Slices of Arrow arrays, without the rest of what they were cut from. Imports Arrow where it is.

A slice shares the buffers of its parent, and Arrow pickles these whole. What stays whole: the
dictionary of a dictionary array, the texts of `string_view`, the values of a dense union.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

SPARE_BYTES: Final = 4096  # so much more than what is in the slice is not worth a copy


def trimmed(array: Any) -> Any:
    """An array with the same items whose buffers hold little else; itself where they do already.

    The bytes of numbers and texts are not copied. Those of lists, structs and the like are.
    """
    pa = sys.modules["pyarrow"]
    if array.get_total_buffer_size() <= array.nbytes + array.nbytes // 8 + SPARE_BYTES:
        return array
    kind = array.type
    types = pa.types
    if type(array) is pa.DictionaryArray:
        indices = trimmed(array.indices)
        return pa.DictionaryArray.from_arrays(
            indices, array.dictionary, ordered=kind.ordered, safe=False
        )
    if types.is_primitive(kind) and kind.bit_width % 8 == 0:
        return _numbers(pa, array, kind.bit_width // 8)
    if types.is_string(kind) or types.is_binary(kind):
        return _texts(pa, array, np.dtype(np.int32))
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return _texts(pa, array, np.dtype(np.int64))
    try:
        return pa.concat_arrays([array])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return array  # a type that Arrow cannot copy: the parent's buffers go, too


def _bits(array: Any, first: int, end: int) -> Any:
    """Which items are null, from item `first` on, a multiple of 8."""
    bits = array.buffers()[0]
    return None if bits is None else bits.slice(first // 8, (end - first + 7) // 8)


def _numbers(pa: Any, array: Any, width_bytes: int) -> Any:
    begin, end = array.offset, array.offset + len(array)
    first = begin - begin % 8
    data = array.buffers()[1].slice(first * width_bytes, (end - first) * width_bytes)
    buffers = [_bits(array, first, end), data]
    return pa.Array.from_buffers(array.type, len(array), buffers, offset=begin - first)


def _texts(pa: Any, array: Any, offset_type: np.dtype[Any]) -> Any:
    begin, end = array.offset, array.offset + len(array)
    first = begin - begin % 8
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, offset_type)[first : end + 1]
    if data is not None:
        data = data.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    buffers = [_bits(array, first, end), pa.py_buffer(offsets - offsets[0]), data]
    return pa.Array.from_buffers(array.type, len(array), buffers, offset=begin - first)
