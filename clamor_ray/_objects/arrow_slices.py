"""Slices of Arrow arrays, without the rest of what they were cut from. Imports Arrow where it is.

A slice shares the buffers of its parent, and Arrow pickles these whole. Here each kind of array
says which part of its buffers and of its children it uses: fixed widths and texts are cut without
a copy; offsets, sizes and views are written anew; children are cut in turn. Where the items of a
child lie scattered (views, dense unions, dictionaries) they are gathered.

An array that holds little else than its items stays itself. So does a dictionary that is small, or
whose array is no slice: the items that nobody uses are a part of what was put.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

SPARE_BYTES: Final = 4096  # so much more than what is in the slice is not worth a copy
MOST_IN_A_VIEW: Final = 12  # bytes; longer items are in buffers of their own
TEXT_BUFFER_BYTES: Final = 1 << 30  # of gathered texts; a view's offset is an int32
PADDING_BYTES: Final = 64  # a buffer of an array that is no slice may be that much longer

_VIEW: Final = np.dtype(
    [("length", "<i4"), ("prefix", "<u4"), ("buffer", "<i4"), ("offset", "<i4")]
)
_PLACE: Final = ("buffer", "offset", "length")
_Ints = npt.NDArray[Any]
_Trim = Callable[[Any, Any, bool], Any]


def trimmed(array: Any, cut: bool = False) -> Any:
    """An array with the same items whose buffers hold little else; itself where they do already.

    The bytes of numbers and texts are not copied, but for texts that lie scattered.

    Args:
        array: any Arrow array.
        cut: it is a part of another one, also where it does not look like it.
    """
    pa = sys.modules["pyarrow"]
    if isinstance(array, pa.ExtensionArray):
        storage = array.storage
        small = trimmed(storage, cut)
        return array if small is storage else pa.ExtensionArray.from_storage(array.type, small)
    trim = _TRIM.get(type(array).__name__)
    if trim is not None:
        return trim(pa, array, cut)
    try:
        width_bits = array.type.bit_width
    except ValueError:  # of none of the kinds that we know
        return _copied(pa, array)
    return _numbers(pa, array, width_bits)


def _copied(pa: Any, array: Any) -> Any:
    if array.get_total_buffer_size() <= array.nbytes + array.nbytes // 8 + SPARE_BYTES:
        return array
    try:
        return pa.concat_arrays([array])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return array  # a type that Arrow cannot copy: the parent's buffers go, too


# ------------------------------------------------------------------ parts of buffers


def _fits(buffer: Any, needed_bytes: int) -> bool:
    return buffer is None or buffer.size <= needed_bytes + needed_bytes // 8 + SPARE_BYTES


def _bits(array: Any, first: int, end: int) -> Any:
    """Which items are null, from item `first` on, a multiple of 8."""
    bits = array.buffers()[0]
    return None if bits is None else bits.slice(first // 8, (end - first + 7) // 8)


def _valid(array: Any) -> npt.NDArray[np.bool_]:
    """Which items are not null."""
    begin, n = array.offset, len(array)
    first = begin - begin % 8
    bits = _bits(array, first, begin + n)
    if bits is None:
        return np.ones(n, np.bool_)
    raw = np.frombuffer(bits, np.uint8)
    return np.unpackbits(raw, bitorder="little")[begin - first : begin - first + n].astype(np.bool_)


def _bits_from_0(pa: Any, array: Any) -> Any:
    """Which items are null, for an array that begins with its buffers."""
    if array.buffers()[0] is None:
        return None
    if array.offset % 8 == 0:
        return _bits(array, array.offset, array.offset + len(array))
    return pa.py_buffer(np.packbits(_valid(array), bitorder="little"))


def _ints(array: Any, index: int, dtype: Any, n_more: int = 0) -> _Ints:
    """One integer for each item, and `n_more`, from one of the array's buffers."""
    if len(array) == 0:  # there may be no buffer
        return np.zeros(n_more, dtype)
    size_bytes = np.dtype(dtype).itemsize
    buffer = array.buffers()[index]
    return np.frombuffer(buffer, dtype, len(array) + n_more, array.offset * size_bytes)


def _bits_fit(array: Any) -> bool:
    return _fits(array.buffers()[0], len(array) // 8)


# ------------------------------------------------------------------ flat kinds


def _numbers(pa: Any, array: Any, width_bits: int) -> Any:
    bits, data = array.buffers()
    n = len(array)
    if _fits(bits, n // 8) and _fits(data, n * width_bits // 8):
        return array
    begin, end = array.offset, array.offset + n
    first = begin - begin % 8
    data = data.slice(first // 8 * width_bits, ((end - first) * width_bits + 7) // 8)
    buffers = [_bits(array, first, end), data]
    return pa.Array.from_buffers(array.type, n, buffers, offset=begin - first)


def _texts(offset_type: Any) -> _Trim:
    def trim(pa: Any, array: Any, cut: bool) -> Any:
        _, offsets_buffer, data = array.buffers()
        n = len(array)
        offsets = _ints(array, 1, offset_type, 1)
        n_bytes = int(offsets[-1] - offsets[0])
        if _bits_fit(array) and _fits(offsets_buffer, offsets.nbytes) and _fits(data, n_bytes):
            return array
        if data is not None:
            data = data.slice(int(offsets[0]), n_bytes)
        buffers = [_bits_from_0(pa, array), pa.py_buffer(offsets - offsets[0]), data]
        return pa.Array.from_buffers(array.type, n, buffers)

    return trim


def _views(pa: Any, array: Any, cut: bool) -> Any:
    _, views_buffer, *texts = array.buffers()
    n = len(array)
    views = _ints(array, 1, _VIEW)
    outside = _valid(array) & (views["length"] > MOST_IN_A_VIEW)
    chosen = views[outside]
    text_bytes = int(chosen["length"].sum(dtype=np.int64))
    begins = chosen["offset"].astype(np.int64)
    ends = begins + chosen["length"]
    which, of = np.unique(chosen["buffer"], return_inverse=True)
    lows, highs = np.full(len(which), np.iinfo(np.int64).max), np.zeros(len(which), np.int64)
    np.minimum.at(lows, of, begins)
    np.maximum.at(highs, of, ends)
    span_bytes = int((highs - lows).sum())
    least_bytes = min(text_bytes, span_bytes)
    texts_fit = sum(text.size for text in texts) <= least_bytes + least_bytes // 8 + SPARE_BYTES
    if _bits_fit(array) and _fits(views_buffer, views.nbytes) and texts_fit:
        return array
    if span_bytes <= 2 * text_bytes + SPARE_BYTES:
        chosen["buffer"], chosen["offset"] = of, begins - lows[of]
        spans = zip(which.tolist(), lows.tolist(), (highs - lows).tolist(), strict=True)
        texts = [texts[i].slice(low, n_bytes) for i, low, n_bytes in spans]
    else:
        texts = _gathered_texts(pa, texts, chosen)
    views = views.copy()
    views[outside] = chosen
    views[~_valid(array)] = 0
    buffers = [_bits_from_0(pa, array), pa.py_buffer(views.view(np.uint8)), *texts]
    return pa.Array.from_buffers(array.type, n, buffers)


def _gathered_texts(pa: Any, texts: list[Any], views: _Ints) -> list[Any]:
    """Buffers with the texts of these views one behind the other; the views lead there then."""
    memories = [memoryview(text) for text in texts]
    ends = np.cumsum(views["length"], dtype=np.int64)
    begins = ends - views["length"]
    buffers = []
    groups = begins // TEXT_BUFFER_BYTES
    for new, group in enumerate(np.unique(groups).tolist()):
        of_it = np.flatnonzero(groups == group)
        spans = zip(*(views[name][of_it].tolist() for name in _PLACE), strict=True)
        buffers.append(pa.py_buffer(b"".join(memories[i][at : at + n] for i, at, n in spans)))
        views["buffer"][of_it] = new
        views["offset"][of_it] = begins[of_it] - begins[of_it[0]]
    return buffers


# ------------------------------------------------------------------ kinds with children


def _struct(pa: Any, array: Any, cut: bool, always: bool = False) -> Any:
    children = [array.field(i) for i in range(array.type.num_fields)]
    small = [trimmed(child, cut) for child in children]
    same = all(new is old for new, old in zip(small, children, strict=True))
    if same and not always and _bits_fit(array):
        return array
    buffers = [_bits_from_0(pa, array)]
    return pa.Array.from_buffers(array.type, len(array), buffers, children=small)


def _lists(offset_type: Any) -> _Trim:
    def trim(pa: Any, array: Any, cut: bool) -> Any:
        offsets = _ints(array, 1, offset_type, 1)
        child = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        small = trimmed(child, cut)
        if small is child and _bits_fit(array) and _fits(array.buffers()[1], offsets.nbytes):
            return array
        if pa.types.is_map(array.type):  # its keys are taken without the offset of the pairs
            small = _struct(pa, child, cut, always=True)
        buffers = [_bits_from_0(pa, array), pa.py_buffer(offsets - offsets[0])]
        return pa.Array.from_buffers(array.type, len(array), buffers, children=[small])

    return trim


def _fixed_lists(pa: Any, array: Any, cut: bool) -> Any:
    size = array.type.list_size
    child = array.values.slice(array.offset * size, len(array) * size)
    small = trimmed(child, cut)
    if small is child and _bits_fit(array):
        return array
    buffers = [_bits_from_0(pa, array)]
    return pa.Array.from_buffers(array.type, len(array), buffers, children=[small])


def _list_views(offset_type: Any) -> _Trim:
    def trim(pa: Any, array: Any, cut: bool) -> Any:
        _, offsets_buffer, sizes_buffer = array.buffers()[:3]
        sizes = np.where(_valid(array), _ints(array, 2, offset_type), 0)
        offsets = np.where(sizes > 0, _ints(array, 1, offset_type), 0)
        used = sizes > 0
        begins, lengths = offsets[used].astype(np.int64), sizes[used].astype(np.int64)
        child, begins = _gathered(pa, array.values, begins, lengths, cut)
        fit = _bits_fit(array) and _fits(offsets_buffer, sizes.nbytes)
        if child is None and fit and _fits(sizes_buffer, sizes.nbytes):
            return array
        offsets[used] = begins
        buffers = [_bits_from_0(pa, array), pa.py_buffer(offsets), pa.py_buffer(sizes)]
        child = array.values if child is None else child
        return pa.Array.from_buffers(array.type, len(array), buffers, children=[child])

    return trim


def _union(pa: Any, array: Any, cut: bool) -> Any:
    n, kind = len(array), array.type
    codes = _ints(array, 1, np.int8)
    children = [array.field(i) for i in range(kind.num_fields)]
    offsets = None
    small: list[Any] = []
    if kind.mode == "sparse":
        small = [trimmed(child, cut) for child in children]
        same = all(new is old for new, old in zip(small, children, strict=True))
    else:
        offsets = _ints(array, 2, np.int32).copy()
        same = _fits(array.buffers()[2], offsets.nbytes)
        for code, child in zip(kind.type_codes, children, strict=True):
            of_it = codes == code
            new, at = _gathered(pa, child, offsets[of_it].astype(np.int64), None, cut)
            offsets[of_it] = at
            same = same and new is None
            small.append(child if new is None else new)
    if same and _fits(array.buffers()[1], n):
        return array
    buffers = [None, pa.py_buffer(codes.copy())]
    if offsets is not None:
        buffers.append(pa.py_buffer(offsets))
    return pa.Array.from_buffers(kind, n, buffers, children=small)


def _run_ends(pa: Any, array: Any, cut: bool) -> Any:
    first, n_runs = array.find_physical_offset(), array.find_physical_length()
    child = array.values.slice(first, n_runs)
    small = trimmed(child, cut)
    run_ends = array.run_ends.slice(first, n_runs)
    if small is child and trimmed(run_ends) is run_ends:
        return array
    ends = run_ends.to_numpy().astype(np.int64) - array.offset
    ends = pa.array(np.minimum(ends, len(array)), run_ends.type)
    return pa.RunEndEncodedArray.from_arrays(ends, small, type=array.type)


def _dictionary(pa: Any, array: Any, cut: bool) -> Any:
    indices, dictionary = array.indices, array.dictionary
    small, items = trimmed(indices), trimmed(dictionary, cut)
    width_bytes = array.type.index_type.bit_width // 8
    n, data = len(indices), indices.buffers()[1]
    needed_bytes = n * width_bytes + PADDING_BYTES
    cut = cut or indices.offset > 0 or (data is not None and data.size > needed_bytes)
    if cut and items.get_total_buffer_size() > n * width_bytes + SPARE_BYTES:
        valid = _valid(indices)
        at = _ints(indices, 1, array.type.index_type.to_pandas_dtype())
        used = np.unique(at[valid])
        taken = _taken(pa, items, used.astype(np.int64)) if 2 * len(used) < len(items) else None
        if taken is not None:
            items = taken
            at = np.where(valid, np.searchsorted(used, at), 0).astype(at.dtype)
            buffers = [_bits_from_0(pa, indices), pa.py_buffer(at)]
            small = pa.Array.from_buffers(indices.type, n, buffers)
    if small is indices and items is dictionary:
        return array
    return pa.DictionaryArray.from_arrays(small, items, ordered=array.type.ordered, safe=False)


# ------------------------------------------------------------------ items that lie anywhere


def _taken(pa: Any, array: Any, positions: _Ints) -> Any:
    """These items, in this order; None where Arrow cannot take of this kind."""
    if len(positions) == 0:
        return trimmed(array.slice(0, 0), cut=True)
    try:
        return trimmed(_chosen(pa, array, positions), cut=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _chosen(pa: Any, array: Any, positions: _Ints) -> Any:
    kind = array.type
    try:
        return array.take(pa.array(positions, pa.int64()))
    except pa.ArrowNotImplementedError:
        if type(array).__name__ not in ("StringViewArray", "BinaryViewArray", "StructArray"):
            # One part for each run of items that follow each other.
            ends = np.flatnonzero(np.diff(positions) != 1) + 1
            runs = np.split(positions, ends)
            return pa.concat_arrays([array.slice(int(run[0]), len(run)) for run in runs])
    bits, views, *texts = array.buffers()
    if pa.types.is_struct(kind):
        children = [_chosen(pa, array.field(i), positions) for i in range(kind.num_fields)]
        valid = pa.array(_valid(array)[positions])
        return pa.Array.from_buffers(kind, len(valid), [valid.buffers()[1]], children=children)
    width = pa.binary(_VIEW.itemsize)
    rows = pa.Array.from_buffers(width, len(array), [bits, views], offset=array.offset)
    rows = rows.take(pa.array(positions, pa.int64()))
    return pa.Array.from_buffers(kind, len(rows), [*rows.buffers(), *texts], offset=rows.offset)


def _gathered(
    pa: Any, child: Any, begins: _Ints, lengths: _Ints | None, cut: bool
) -> tuple[Any, _Ints]:
    """What is used of a child, and where each of its ranges begins there.

    Args:
        child: the array that the ranges are of.
        begins, lengths: the ranges, which may overlap; without lengths they are of one item.
        cut: as of `trimmed`.

    Returns:
        An array without the rest (None: the child is that), and the beginnings in it.
    """
    if len(begins) == 0:
        return (None if len(child) == 0 else trimmed(child.slice(0, 0), cut=True)), begins
    low = int(begins.min())
    high = int((begins + (1 if lengths is None else lengths)).max())
    n = len(begins) if lengths is None else int(lengths.sum())
    if high - low > 2 * n:
        new_begins = np.arange(n) if lengths is None else np.cumsum(lengths) - lengths
        if lengths is None:
            positions = begins
        else:
            positions = np.arange(n) + np.repeat(begins - new_begins, lengths)
        taken = _taken(pa, child, positions)
        if taken is not None:
            return taken, new_begins
    part = child.slice(low, high - low)
    small = trimmed(part, cut=cut or len(part) < len(child))
    return (None, begins) if small is part else (small, begins - low)


_TRIM: Final[dict[str, _Trim]] = {
    "NullArray": lambda pa, array, cut: array,
    "StringArray": _texts(np.int32),
    "BinaryArray": _texts(np.int32),
    "LargeStringArray": _texts(np.int64),
    "LargeBinaryArray": _texts(np.int64),
    "StringViewArray": _views,
    "BinaryViewArray": _views,
    "ListArray": _lists(np.int32),
    "MapArray": _lists(np.int32),
    "LargeListArray": _lists(np.int64),
    "FixedSizeListArray": _fixed_lists,
    "ListViewArray": _list_views(np.int32),
    "LargeListViewArray": _list_views(np.int64),
    "StructArray": _struct,
    "UnionArray": _union,
    "RunEndEncodedArray": _run_ends,
    "DictionaryArray": _dictionary,
}
