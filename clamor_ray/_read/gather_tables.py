"""`clamor.gather` of Arrow and pandas data: prefetch what the rows lie on, then `take`.

All columns and chunks together are two batches: what the rows' numbers tell, then the letters of
words, whose offsets came with the first. Chunks are taken one by one and the few rows joined
afterwards: `take` of a chunked array would read all of it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clamor_ray._objects.ranges import (
    BLOCK_SHIFT,
    Spans,
    arrow_spans,
    merge,
    object_spans,
    row_spans,
    union,
)

if TYPE_CHECKING:
    from clamor_ray._read.gather import Fetch

Ids = npt.NDArray[np.int64]


def taker_of(obj: Any) -> Callable[[Any, Ids, Fetch], Any] | None:
    """What takes rows of such an object; None where it has none. Imports nothing."""
    pa = sys.modules.get("pyarrow")
    if pa is not None:
        if isinstance(obj, (pa.Array, pa.ChunkedArray)):
            return _take_column
        if isinstance(obj, (pa.Table, pa.RecordBatch)):
            return _take_table
    pd = sys.modules.get("pandas")
    if pd is not None and isinstance(obj, (pd.DataFrame, pd.Series, pd.Index)):
        return _take_pandas
    return None


# ------------------------------------------------------------------ Arrow

# An Arrow array and the numbers of the rows that are taken from it.
Piece = tuple[Any, Ids]


def _values(buffer: Any, offset: int, ids: Ids, bits: int) -> Spans:
    """The blocks of some values of `bits` bits each."""
    if buffer is None or buffer.size == 0 or len(ids) == 0:
        return np.empty((0, 2), np.uint64)
    first = (offset + ids) * bits // 8 + buffer.address
    last = ((offset + ids + 1) * bits - 1) // 8 + buffer.address
    return merge(first >> BLOCK_SHIFT, (last >> BLOCK_SHIFT) + 1)


def _offset_bits(kind: Any) -> int:
    """Of an offset of text and bytes, 0 for other types."""
    import pyarrow as pa

    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return 64
    return 32 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 0


def _has_fixed_width(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(
        types.is_primitive(kind) or types.is_fixed_size_binary(kind) or types.is_decimal(kind)
    )


def _spans_known(pieces: Iterable[Piece]) -> Iterator[Spans]:
    """The blocks that can be told from the rows' numbers: all but the letters of words."""
    import pyarrow as pa

    for array, ids in pieces:
        if isinstance(array, pa.DictionaryArray):
            yield from arrow_spans(array.dictionary)
            yield from _spans_known([(array.indices, ids)])
            continue
        buffers, offset, kind = array.buffers(), array.offset, array.type
        if _has_fixed_width(kind) and len(buffers) == 2:
            yield _values(buffers[0], offset, ids, 1)
            yield _values(buffers[1], offset, ids, kind.bit_width)
        elif bits := _offset_bits(kind):
            yield _values(buffers[0], offset, ids, 1)
            yield _values(buffers[1], offset, np.concatenate([ids, ids + 1]), bits)
        else:  # nested and view types: all of it
            yield from arrow_spans(array)


def _spans_of_letters(pieces: Iterable[Piece]) -> Iterator[Spans]:
    """The blocks of words whose offsets are here."""
    for array, ids in pieces:
        bits, buffers = _offset_bits(array.type), array.buffers()
        if not bits or buffers[1] is None or buffers[2] is None:
            continue
        offsets = np.frombuffer(buffers[1], np.int64 if bits == 64 else np.int32)
        first = offsets[array.offset + ids].astype(np.int64) + buffers[2].address
        end = offsets[array.offset + ids + 1].astype(np.int64) + buffers[2].address
        full = end > first
        yield merge(first[full] >> BLOCK_SHIFT, ((end[full] - 1) >> BLOCK_SHIFT) + 1)


def _fetch_pieces(pieces: list[Piece], fetch: Fetch, *others: Spans) -> None:
    """Two batches at most, however many columns and chunks there are.

    Args:
        others: blocks that come with the first.
    """
    fetch.any(union([*_spans_known(pieces), *others]))
    letters = union(_spans_of_letters(pieces))
    if len(letters):
        fetch.any(letters)


def _indices(ids: Ids) -> Any:
    import pyarrow as pa

    return pa.array(ids)


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column with the rows that are taken from it: chunk by chunk, then put in order."""

    kind: Any
    pieces: list[Piece]
    back: Ids | None  # where each row is when all pieces are joined; None: it has no chunks

    @staticmethod
    def of(column: Any, ids: Ids) -> _Column:
        if not hasattr(column, "chunks"):
            return _Column(column.type, [(column, ids)], None)
        ends = np.cumsum([len(chunk) for chunk in column.chunks], dtype=np.int64)
        which = np.searchsorted(ends, ids, side="right")
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(len(ends) + 1))
        pieces = []
        for number, chunk in enumerate(column.chunks):
            places = order[bounds[number] : bounds[number + 1]]
            if len(places):
                pieces.append((chunk, ids[places] - (ends[number] - len(chunk))))
        back = np.empty(len(ids), np.int64)
        back[order] = np.arange(len(ids))
        return _Column(column.type, pieces, back)

    def take(self) -> Any:
        import pyarrow as pa

        parts = [array.take(_indices(ids)) for array, ids in self.pieces]
        if self.back is None:
            return parts[0]
        together = pa.chunked_array(parts, self.kind).combine_chunks()
        return pa.chunked_array([together.take(_indices(self.back))], self.kind)


def _take_column(column: Any, ids: Ids, fetch: Fetch) -> Any:
    """Of an array, or of a chunked one."""
    plan = _Column.of(column, ids)
    _fetch_pieces(plan.pieces, fetch)
    return plan.take()


def _take_table(table: Any, ids: Ids, fetch: Fetch) -> Any:
    columns = [_Column.of(column, ids) for column in table.columns]
    if not columns:
        return table.take(_indices(ids))
    _fetch_pieces([piece for column in columns for piece in column.pieces], fetch)
    return type(table).from_arrays([column.take() for column in columns], schema=table.schema)


# ------------------------------------------------------------------ pandas


def _arrays_of(obj: Any) -> Iterator[Any]:
    """What holds the values of a frame, a series or an index, its own index included."""
    import pandas as pd

    if isinstance(obj, pd.DataFrame):
        yield from (obj.iloc[:, place].array for place in range(obj.shape[1]))
    elif isinstance(obj, pd.MultiIndex):
        yield from obj.codes  # its levels are not touched
    else:
        yield obj.array
    if isinstance(obj, (pd.DataFrame, pd.Series)) and not isinstance(obj.index, pd.RangeIndex):
        yield from _arrays_of(obj.index)


def _pandas_spans(array: Any, ids: Ids) -> Iterator[Spans]:
    """The blocks of some values of an array that pandas has, which is none of Arrow's."""
    parts = [getattr(array, name, None) for name in ("_ndarray", "_data", "_mask")]
    plain = [part for part in parts if isinstance(part, np.ndarray) and part.ndim == 1]
    if isinstance(array, np.ndarray):
        plain = [array]
    if not plain:
        yield object_spans(array)
    for part in plain:
        if not part.dtype.hasobject:
            yield row_spans(part, ids)


def _take_pandas(obj: Any, ids: Ids, fetch: Fetch) -> Any:
    pieces: list[Piece] = []
    spans: list[Spans] = []
    for array in _arrays_of(obj):
        values = getattr(array, "_pa_array", None)  # an Arrow-backed column
        if values is not None:
            pieces += _Column.of(values, ids).pieces
        else:
            spans += _pandas_spans(array, ids)
    _fetch_pieces(pieces, fetch, *spans)
    return obj.take(ids)
