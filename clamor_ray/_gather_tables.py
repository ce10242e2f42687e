"""`clamor.gather` of Arrow and pandas data: prefetch what the rows lie on, then `take`.

Chunks are taken one by one and the few rows joined afterwards: `take` of a chunked array would
read all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clamor_ray._ranges import (
    BLOCK_SHIFT,
    Spans,
    arrow_spans,
    merge,
    object_spans,
    row_spans,
    union,
)

if TYPE_CHECKING:
    from clamor_ray._gather import Fetch

Ids = npt.NDArray[np.int64]


def taker_of(obj: Any) -> Callable[[Any, Ids, Fetch], Any] | None:
    """What takes rows of such an object; None where it has none. Imports nothing."""
    pa = sys.modules.get("pyarrow")
    if pa is not None:
        if isinstance(obj, pa.Array):
            return _take_array
        if isinstance(obj, pa.ChunkedArray):
            return _take_chunked
        if isinstance(obj, (pa.Table, pa.RecordBatch)):
            return _take_table
    pd = sys.modules.get("pandas")
    if pd is not None and isinstance(obj, (pd.DataFrame, pd.Series, pd.Index)):
        return _take_pandas
    return None


# ------------------------------------------------------------------ Arrow


def _values(buffer: Any, offset: int, ids: Ids, bits: int) -> Spans:
    """The blocks of some values of `bits` bits each."""
    if buffer is None or buffer.size == 0 or len(ids) == 0:
        return np.empty((0, 2), np.uint64)
    first = (offset + ids) * bits // 8 + buffer.address
    last = ((offset + ids + 1) * bits - 1) // 8 + buffer.address
    return merge(first >> BLOCK_SHIFT, (last >> BLOCK_SHIFT) + 1)


def _fetch_array(array: Any, ids: Ids, fetch: Fetch) -> None:
    import pyarrow as pa

    types, kind = pa.types, array.type
    buffers, offset = array.buffers(), array.offset
    if len(buffers) == 2 and (types.is_primitive(kind) or types.is_fixed_size_binary(kind)):
        data = _values(buffers[1], offset, ids, kind.bit_width)
        fetch.any(union([_values(buffers[0], offset, ids, 1), data]))
        return
    large = types.is_large_string(kind) or types.is_large_binary(kind)
    if large or types.is_string(kind) or types.is_binary(kind):
        width = 8 if large else 4
        ends = np.concatenate([ids, ids + 1])
        wanted = [_values(buffers[0], offset, ids, 1), _values(buffers[1], offset, ends, 8 * width)]
        fetch.any(union(wanted))
        if buffers[1] is None or buffers[2] is None:
            return
        offsets = np.frombuffer(buffers[1], np.int64 if large else np.int32)
        first = offsets[offset + ids].astype(np.int64) + buffers[2].address
        end = offsets[offset + ids + 1].astype(np.int64) + buffers[2].address
        full = end > first
        fetch.any(merge(first[full] >> BLOCK_SHIFT, ((end[full] - 1) >> BLOCK_SHIFT) + 1))
        return
    fetch.any(union(arrow_spans(array)))  # nested, dictionary, view types


def _take_array(array: Any, ids: Ids, fetch: Fetch) -> Any:
    _fetch_array(array, ids, fetch)
    return array.take(_indices(ids))


def _indices(ids: Ids) -> Any:
    import pyarrow as pa

    return pa.array(ids)


def _take_chunked(column: Any, ids: Ids, fetch: Fetch) -> Any:
    import pyarrow as pa

    ends = np.cumsum([len(chunk) for chunk in column.chunks], dtype=np.int64)
    which = np.searchsorted(ends, ids, side="right")
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(len(ends) + 1))
    parts = []
    for number, chunk in enumerate(column.chunks):
        places = order[bounds[number] : bounds[number + 1]]
        if len(places):
            parts.append(_take_array(chunk, ids[places] - (ends[number] - len(chunk)), fetch))
    back = np.empty(len(ids), np.int64)
    back[order] = np.arange(len(ids))
    together = pa.chunked_array(parts, column.type).combine_chunks()
    return pa.chunked_array([together.take(_indices(back))], column.type)


def _take_table(table: Any, ids: Ids, fetch: Fetch) -> Any:
    columns = []
    for column in table.columns:
        take = _take_chunked if hasattr(column, "chunks") else _take_array
        columns.append(take(column, ids, fetch))
    if not columns:
        return table.take(_indices(ids))
    return type(table).from_arrays(columns, schema=table.schema)


# ------------------------------------------------------------------ pandas


def _arrays_of(obj: Any) -> Iterator[Any]:
    """What holds the values of a frame, a series or an index, its own index included."""
    import pandas as pd

    if isinstance(obj, pd.DataFrame):
        yield from (obj.iloc[:, place].array for place in range(obj.shape[1]))
    elif not isinstance(obj, pd.MultiIndex):
        yield obj.array
    if isinstance(obj, (pd.DataFrame, pd.Series)) and not isinstance(obj.index, pd.RangeIndex):
        yield from _arrays_of(obj.index)


def _pandas_spans(arrays: Iterable[Any], ids: Ids, fetch: Fetch) -> Iterator[Spans]:
    for array in arrays:
        values = getattr(array, "_pa_array", None)  # an Arrow-backed column
        if values is not None:
            _take_chunked(values, ids, fetch)
            continue
        plain = getattr(array, "_ndarray", None)
        if plain is None or plain.ndim != 1:
            yield object_spans(array)
        elif not plain.dtype.hasobject:
            yield row_spans(plain, ids)


def _take_pandas(obj: Any, ids: Ids, fetch: Fetch) -> Any:
    fetch.any(union(_pandas_spans(_arrays_of(obj), ids, fetch)))
    return obj.take(ids)
