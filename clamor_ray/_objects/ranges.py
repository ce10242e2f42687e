"""Which blocks an array, or anything that holds arrays, lies on. Pure: no Ray, no C.

Ranges are byte addresses; runs are blocks. Nothing here reads the memory it talks about, but for
the two offsets at the ends of a slice of variable-length Arrow data.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

import cloudpickle
import numpy as np
import numpy.typing as npt

BLOCK_SHIFT: Final = 12
BLOCK_BYTES: Final = 1 << BLOCK_SHIFT

Spans = npt.NDArray[np.uint64]
"""Shape (n, 2): first block of the address space, number of blocks; sorted, apart."""


def merge(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Spans:
    """Runs [first, end) as the fewest runs that cover the same blocks.

    Example:
        >>> merge(np.array([5, 1, 2]), np.array([6, 2, 4])).tolist()
        [[1, 3], [5, 1]]
    """
    keep = end > first
    first, end = first[keep], end[keep]
    if len(first) == 0:
        return np.empty((0, 2), np.uint64)
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(end[order])
    starts = np.concatenate(([True], first[1:] > end[:-1]))
    index = np.flatnonzero(starts)
    last = np.append(index[1:], len(first)) - 1
    runs = np.empty((len(index), 2), np.uint64)
    runs[:, 0] = first[index]
    runs[:, 1] = end[last] - first[index]
    return runs


def _pieces(
    shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[npt.NDArray[np.int64], int]:
    """A strided array as pieces of equal length that skip no block that no element lies on.

    Returns:
        Where each piece begins, counted from the first element, and their length.
    """
    lowest = 0
    axes: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1 or stride == 0:
            continue
        if stride < 0:
            lowest += stride * (n - 1)
        axes.append((abs(stride), n))
    axes.sort()
    span = itemsize
    walked: list[tuple[int, int]] = []
    for stride, n in axes:
        if not walked and stride - span < BLOCK_BYTES:
            span += stride * (n - 1)
        else:
            walked.append((stride, n))
    covering = span + sum(stride * (n - 1) for stride, n in walked)
    n_starts = 1
    for _, n in walked:
        n_starts *= n
    if n_starts > (covering >> BLOCK_SHIFT) + 1:  # overlapping windows: walking costs more
        walked, span = [], covering
    starts = np.array([lowest], np.int64)
    for stride, n in reversed(walked):
        steps = np.arange(n, dtype=np.int64) * stride
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts, span


def strided_spans(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> Spans:
    """The blocks that the elements of a strided array lie on: exactly those, and no other.

    Where an axis leaves gaps smaller than a block, no whole block is skipped, so it folds into
    the span; the axes that leave larger gaps are walked.

    Args:
        address: of the first element.
        shape, strides, itemsize: as NumPy's, strides in bytes, of any sign.

    Example:
        >>> strided_spans(0x2000, (3,), (1 << 16,), 8).tolist()
        [[2, 1], [18, 1], [34, 1]]
    """
    if itemsize == 0 or any(n == 0 for n in shape):
        return np.empty((0, 2), np.uint64)
    starts, span = _pieces(shape, strides, itemsize)
    starts += address
    return merge(starts >> BLOCK_SHIFT, ((starts + (span - 1)) >> BLOCK_SHIFT) + 1)


_ROWS_AT_ONCE: Final = 1 << 20


def row_spans(array: npt.NDArray[Any], ids: npt.NDArray[Any]) -> Spans:
    """The blocks of some rows (along axis 0) of a NumPy array.

    Args:
        array: of any strides, with at least one axis.
        ids: of rows, from 0 on, in any order.
    """
    if array.size == 0 or array.itemsize == 0:
        return np.empty((0, 2), np.uint64)
    pieces, span = _pieces(array.shape[1:], array.strides[1:], array.itemsize)
    pieces += int(array.__array_interface__["data"][0])
    flat = ids.reshape(-1)
    step = max(1, _ROWS_AT_ONCE // len(pieces))

    def of(some: npt.NDArray[Any]) -> Spans:
        rows = some.astype(np.int64) * array.strides[0]
        starts = (rows[:, None] + pieces[None, :]).reshape(-1)
        return merge(starts >> BLOCK_SHIFT, ((starts + (span - 1)) >> BLOCK_SHIFT) + 1)

    return union(of(flat[first : first + step]) for first in range(0, len(flat), step))


def extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Lowest address of an array's elements, and the one behind the highest; not empty."""
    low = high = int(array.__array_interface__["data"][0])
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    return low, high + array.itemsize


def array_spans(array: npt.NDArray[Any]) -> Spans:
    """The blocks of a NumPy array."""
    address = int(array.__array_interface__["data"][0])
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return byte_spans(address, array.nbytes)
    return strided_spans(address, array.shape, array.strides, array.itemsize)


def byte_spans(address: int, n_bytes: int) -> Spans:
    """The blocks of a byte range."""
    if n_bytes <= 0:
        return np.empty((0, 2), np.uint64)
    first = address >> BLOCK_SHIFT
    end = ((address + n_bytes - 1) >> BLOCK_SHIFT) + 1
    return np.array([[first, end - first]], np.uint64)


def union(spans: Iterable[Spans]) -> Spans:
    """All of them as one."""
    parts = [part for part in spans if len(part)]
    if not parts:
        return np.empty((0, 2), np.uint64)
    joined = np.concatenate(parts).astype(np.int64)
    return merge(joined[:, 0], joined[:, 0] + joined[:, 1])


# ------------------------------------------------------------------ Arrow


def _bits(buffer: Any, first: int, n: int, width: int) -> Spans:
    """`n` values of `width` bits each, from value `first` on."""
    begin, end = first * width // 8, -(-(first + n) * width // 8)
    return byte_spans(buffer.address + begin, min(end, buffer.size) - begin)


def _offset_at(buffer: Any, index: int, width: int) -> int:
    return int(np.frombuffer(buffer, np.int32 if width == 4 else np.int64, 1, index * width)[0])


def _arrow_slice(kind: Any, buffers: list[Any], offset: int, length: int) -> Iterator[Spans] | None:
    """The blocks of a slice of flat data, or None for kinds whose children decide."""
    import pyarrow as pa

    types = pa.types
    validity = [_bits(buffers[0], offset, length, 1)] if buffers[0] is not None else []
    if (len(buffers) == 2 and types.is_primitive(kind)) or types.is_fixed_size_binary(kind):
        data = [_bits(buffers[1], offset, length, kind.bit_width)] if buffers[1] else []
        return iter(validity + data)
    if len(buffers) == 3 and (
        types.is_string(kind) or types.is_binary(kind)
        or types.is_large_string(kind) or types.is_large_binary(kind)
    ):  # fmt: skip
        if length == 0 or buffers[1] is None or buffers[1].size == 0:
            return iter(validity)
        width = 8 if types.is_large_string(kind) or types.is_large_binary(kind) else 4
        spans = [*validity, _bits(buffers[1], offset, length + 1, width * 8)]
        if buffers[2] is not None:
            begin = _offset_at(buffers[1], offset, width)
            end = _offset_at(buffers[1], offset + length, width)
            spans.append(byte_spans(buffers[2].address + begin, end - begin))
        return iter(spans)
    return None


def arrow_spans(obj: Any) -> Iterator[Spans]:
    """The blocks of Arrow data."""
    import pyarrow as pa

    if isinstance(obj, (pa.Table, pa.RecordBatch)):
        for column in obj.columns:
            yield from arrow_spans(column)
    elif isinstance(obj, pa.ChunkedArray):
        for chunk in obj.chunks:
            yield from arrow_spans(chunk)
    elif isinstance(obj, pa.Buffer):
        yield byte_spans(obj.address, obj.size)
    else:
        buffers = obj.buffers()
        exact = _arrow_slice(obj.type, buffers, obj.offset, len(obj)) if buffers else None
        if exact is not None:
            yield from exact
        else:  # nested, dictionary, view types: the buffers whole
            for buffer in buffers:
                if buffer is not None:
                    yield byte_spans(buffer.address, buffer.size)


# ------------------------------------------------------------------ any object


class _Null(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


def _nothing() -> None:
    return None


class _Collector(cloudpickle.Pickler):
    """Walks an object the way pickle does, notes where its arrays lie, and copies none of them."""

    def __init__(self, found: list[Spans]) -> None:
        super().__init__(_Null(), protocol=5, buffer_callback=self._note_buffer)
        self._found = found

    def _note_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = np.frombuffer(buffer.raw(), np.uint8)
        except (BufferError, ValueError):
            return False  # a strided buffer of a class we do not know, or an empty one
        self._found.append(array_spans(raw))
        return False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            if obj.dtype.hasobject:
                return super().reducer_override(obj)
            self._found.append(array_spans(obj))
            return _nothing, ()
        pa = sys.modules.get("pyarrow")
        if pa is not None and isinstance(
            obj, (pa.Table, pa.RecordBatch, pa.ChunkedArray, pa.Array, pa.Buffer)
        ):
            self._found.extend(arrow_spans(obj))
            return _nothing, ()
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type == "cpu":
            size = obj.element_size()
            strides = [step * size for step in obj.stride()]
            self._found.append(strided_spans(obj.data_ptr(), tuple(obj.shape), strides, size))
            return _nothing, ()
        return super().reducer_override(obj)


def object_spans(obj: object) -> Spans:
    """The blocks of every array that an object holds.

    Raises:
        Exception: whatever pickling the object raises; what has no arrays and no way to be
            pickled has no blocks either.
    """
    if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
        return array_spans(obj)
    if type(obj) in (list, tuple) and all(
        isinstance(item, np.ndarray) and not item.dtype.hasobject
        for item in cast(Sequence[object], obj)
    ):
        arrays = cast("Sequence[npt.NDArray[Any]]", obj)
        return union(_many_arrays(arrays))
    found: list[Spans] = []
    _Collector(found).dump(obj)
    return union(found)


def _many_arrays(arrays: Sequence[npt.NDArray[Any]]) -> Iterator[Spans]:
    """As `array_spans` of each, with the plain ones done at once: lists of thousands are usual."""
    first: list[int] = []
    n_bytes: list[int] = []
    for array in arrays:
        if array.flags.c_contiguous and array.nbytes:
            first.append(array.__array_interface__["data"][0])
            n_bytes.append(array.nbytes)
        else:
            yield array_spans(array)
    begin = np.array(first, np.int64)
    last = begin + np.array(n_bytes, np.int64) - 1
    yield merge(begin >> BLOCK_SHIFT, (last >> BLOCK_SHIFT) + 1)
