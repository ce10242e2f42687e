"""Where collections come from: items, arrays, tables, Ray Data, and files of four formats.

A source becomes **splits**, one for each partition. The driver lists files and looks at what says
where a split may begin (a Parquet footer, a `.npy` header); the data is read by the worker that
has the partition, and only that split's part of it.

    Parquet   whole row groups, and only the columns that are wanted
    CSV       whole files: whether a newline ends a row is only known from the start
    text      byte ranges. A split has the lines that begin in it, and reads on to the end of the
              last one; so each line is in exactly one split, wherever the borders fall
    .npy      rows

Files stay as they were listed: one that has another size when it is read is an error, since a
partition that is computed again must be the same.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clamor_ray.collection.data import blocks
from clamor_ray.collection.data.blocks import Items
from clamor_ray.collection.io.files import (
    File,
    Paths,
    files,
    in_parallel,
    open_input,
    persistent,
)
from clamor_ray.collection.io.npy import NpyPiece, npy_header
from clamor_ray.collection.io.pieces import (
    CsvPiece,
    ParquetPiece,
    TextPiece,
    ascii_based,
    check_columns,
    codec_of,
    parquet_file,
    row_group_bytes,
)
from clamor_ray.errors import SourceError

SPLIT_BYTES = 64 << 20


class Split(Protocol):
    """What one partition is made from. Small, except where it carries its data; pickles."""

    @property
    def size_bytes(self) -> int | None:
        """About how large the partition becomes; None where nobody knows."""

    def read(self) -> Items:
        """The partition. On a worker; may be called again, and gives the same."""

    def describe(self) -> str:
        """For people: "part-3.parquet, row groups 4-7"."""


# ------------------------------------------------------------------ how many, and where


def _wanted(n: int | None) -> None:
    if n is not None and n < 1:
        raise ValueError(f"a collection has at least one partition, not {n}")


def _groups(weights: Sequence[int], n: int) -> list[tuple[int, int]]:
    """Borders of `min(n, len(weights))` runs of neighbours, none empty, about equally heavy."""
    n = min(n, len(weights))
    sums = list(itertools.accumulate(weights))
    borders = [0]
    for k in range(1, n):
        near = bisect.bisect_left(sums, sums[-1] * k / n) + 1
        borders.append(min(max(near, borders[-1] + 1), len(weights) - n + k))
    return list(itertools.pairwise([*borders, len(weights)]))


def _even(n_units: int, n: int) -> list[tuple[int, int]]:
    """`_groups` of units of one weight, however many."""
    n = max(1, min(n, n_units))
    return [(n_units * k // n, n_units * (k + 1) // n) for k in range(n)]


def _counts(weights: Sequence[int], most: Sequence[int], n: int | None) -> list[int]:
    """Into how many splits each file goes, where there are at most as many files as splits.

    Args:
        weights: bytes of each file.
        most: how often each can be cut, at least 1.
        n: of all; None: splits of about 64 MiB.
    """
    if n is None:
        return [
            max(1, min(units, -(-weight // SPLIT_BYTES)))
            for weight, units in zip(weights, most, strict=True)
        ]
    counts = [1] * len(weights)
    heaviest = [(-weight, i) for i, weight in enumerate(weights) if most[i] > 1]
    heapq.heapify(heaviest)
    for _ in range(n - len(counts)):
        if not heaviest:
            break
        _, i = heapq.heappop(heaviest)
        counts[i] += 1
        if counts[i] < most[i]:
            heapq.heappush(heaviest, (-(weights[i] // counts[i]), i))
    return counts


class _Piece(Protocol):
    """A part of one file."""

    @property
    def size_bytes(self) -> int: ...

    def read(self) -> Items: ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class FileSplit:
    """Parts of files, one after the other: one part, or several small files.

    Args:
        pieces: at least one.
    """

    pieces: tuple[_Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Of the files' parts."""
        return sum(piece.size_bytes for piece in self.pieces)

    def describe(self) -> str:
        """The first part, and how many more."""
        more = len(self.pieces) - 1
        return self.pieces[0].describe() + (f", and {more} more" if more else "")

    def read(self) -> Items:
        """All parts as one block.

        Raises:
            SourceError: a file is not what it should be; which one, and where.
            StorageError: the file system does not answer.
        """
        read = [piece.read() for piece in self.pieces]
        if len(read) == 1:
            return read[0]
        tables = [block for block in read if isinstance(block, pa.Table)]
        if len(tables) < len(read):
            return blocks.concat(read)
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise SourceError(
                f"{self.describe()}: the files' columns do not fit together. {error}",
                hint="Give the columns one type in all files (convert_options=column_types for "
                "CSV), or read them apart.",
            ) from error


def _assemble(per_file: Sequence[Sequence[_Piece]], n: int | None) -> list[Split]:
    """Splits of the files' pieces; those of whole files together where n is less than the files."""
    if n is None or n >= len(per_file):
        return [FileSplit((piece,)) for pieces in per_file for piece in pieces]
    weights = [sum(piece.size_bytes for piece in pieces) for pieces in per_file]
    return [
        FileSplit(tuple(piece for pieces in per_file[start:stop] for piece in pieces))
        for start, stop in _groups(weights, n)
    ]


# ------------------------------------------------------------------ what is in memory


@dataclass(frozen=True)
class BlockSplit:
    """A partition that is there already.

    Args:
        block: its items.
        first: number of its first item in the whole.
    """

    block: Items = field(repr=False)
    first: int

    @property
    def size_bytes(self) -> int:
        """Of the block."""
        return blocks.n_bytes(self.block)

    def describe(self) -> str:
        """Which items."""
        n = blocks.n_items(self.block)
        if n == 1:
            return f"item {self.first}"
        return f"items {self.first}-{self.first + n - 1}" if n else "no items"

    def read(self) -> Items:
        """The block."""
        return self.block

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if not isinstance(self.block, pa.Table):
            return BlockSplit, (self.block, self.first)
        # A slice of a table pickles as all of it; the stream format cuts it out.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.block.schema) as writer:
            writer.write_table(self.block)
        content = sink.getvalue()
        sent = pickle.PickleBuffer(content) if protocol >= 5 else content.to_pybytes()
        return _block_split, (sent, self.first)


def _block_split(stream: Any, first: int) -> BlockSplit:
    return BlockSplit(pa.ipc.open_stream(pa.py_buffer(stream)).read_all(), first)


def _block_splits(block: Items, n: int | None) -> list[Split]:
    _wanted(n)
    if n is None:
        n = max(1, -(-blocks.n_bytes(block) // SPLIT_BYTES))
    return [
        BlockSplit(blocks.slice_of(block, start, stop), start)
        for start, stop in _even(blocks.n_items(block), n)
    ]


def items_splits(items: Iterable[Any], n: int | None = None) -> list[Split]:
    """Splits of Python objects; see `read.from_items`. No more than items, at least one.

    All items together decide what they become (`blocks.from_items`), so that partitions agree.
    """
    if isinstance(items, (str, bytes, bytearray)):
        raise TypeError(f"a {type(items).__name__} is one item: write [it]")
    values = items if isinstance(items, (list, range)) else list(items)
    return _block_splits(blocks.from_items(values), n)


def numpy_splits(array: npt.ArrayLike, n: int | None = None) -> list[Split]:
    """Splits of an array along axis 0, without a copy; see `read.from_numpy`. At least one."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array has no place in a collection: fill it, or give its parts")
    block = np.asarray(array)
    if block.ndim == 0:
        raise ValueError("an array without axes has no items: give at least one axis")
    return _block_splits(block, n)


def arrow_splits(table: Any, n: int | None = None) -> list[Split]:
    """Splits of a table's (or a `RecordBatch`'s) rows, without a copy. At least one."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if not isinstance(table, pa.Table):
        raise TypeError(f"a pyarrow.Table is needed, not {type(table).__name__}")
    return _block_splits(table, n)


def ray_dataset_refs(ds: Any) -> list[Any]:
    """The blocks of a Ray Dataset as references to Arrow tables; executes it, once.

    Args:
        ds: a `ray.data.Dataset`.

    Returns:
        One reference for each of its blocks, in Ray Data's order: as they became ready, unless
        `ds.context.execution_options.preserve_order` is set. Blocks that are Arrow already are
        not copied.

    Raises:
        TypeError: not a Dataset.
    """
    from ray.data import Dataset

    if not isinstance(ds, Dataset):
        raise TypeError(f"a ray.data.Dataset is needed, not {type(ds).__name__}")
    return list(ds.to_arrow_refs())


# ------------------------------------------------------------------ Parquet


def _names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not columns:
        raise ValueError(f"columns= takes a list of at least one name, not {columns!r}")
    return tuple(columns)


def parquet_splits(
    paths: Paths,
    columns: Sequence[str] | None = None,
    filesystem: Any = None,
    n: int | None = None,
) -> list[Split]:
    """Splits of Parquet files; see `read.read_parquet`. Reads the footers, and nothing else, here.

    Args:
        n: wanted number, never more than there are row groups; None: of about 64 MiB uncompressed,
            at least one for each file.
    """
    _wanted(n)
    names = _names(columns)
    found = files(paths, filesystem, suffixes=(".parquet", ".pq", ".parq"))

    @persistent
    def row_groups(file: File) -> list[int]:
        with open_input(file) as source:
            parquet = parquet_file(file, source)
            footer = parquet.metadata
            leaves = [
                footer.schema.column(i).path for i in range(footer.num_columns if names else 0)
            ]
            check_columns(file, parquet.schema_arrow.names, names, leaves)
            return [
                row_group_bytes(footer.row_group(i), names) for i in range(footer.num_row_groups)
            ]

    sizes = in_parallel(row_groups, found)
    counts = _counts([sum(of) for of in sizes], [max(1, len(of)) for of in sizes], n)
    return _assemble(
        [
            [
                ParquetPiece(
                    file=file, start=start, stop=stop, columns=names, size_bytes=sum(of[start:stop])
                )
                for start, stop in (_groups(of, count) if of else [(0, 0)])
            ]
            for file, of, count in zip(found, sizes, counts, strict=True)
        ],
        n,
    )


# ------------------------------------------------------------------ CSV


def csv_splits(
    paths: Paths,
    columns: Sequence[str] | None = None,
    filesystem: Any = None,
    n: int | None = None,
    *,
    read_options: Any = None,
    parse_options: Any = None,
    convert_options: Any = None,
) -> list[Split]:
    """Splits of CSV files, whole ones; see `read.read_csv`. Looks at the first rows where `columns`
    are wanted.

    Args:
        n: wanted number, never more than files.
    """
    _wanted(n)
    names = _names(columns)
    options = {
        "read_options": read_options,
        "parse_options": parse_options,
        "convert_options": convert_options,
    }
    pieces = [CsvPiece(file, names, options) for file in files(paths, filesystem)]
    if names is not None and not getattr(convert_options, "include_missing_columns", False):

        def check(piece: CsvPiece) -> None:
            check_columns(piece.file, piece.column_names(), names)

        in_parallel(check, [piece for piece in pieces if piece.size_bytes])
    return _assemble([[piece] for piece in pieces], n)


# ------------------------------------------------------------------ text


def text_splits(
    paths: Paths,
    filesystem: Any = None,
    n: int | None = None,
    *,
    encoding: str = "utf-8",
    drop_empty_lines: bool = False,
) -> list[Split]:
    """Splits of text files into lines; see `read.read_text`.

    Args:
        n: wanted number; None: of about 64 MiB, at least one for each file.
    """
    _wanted(n)
    encoding = ascii_based(encoding)
    found = files(paths, filesystem)
    sizes = [file.size_bytes for file in found]
    most = [1 if codec_of(file) else max(1, file.size_bytes) for file in found]
    return _assemble(
        [
            [
                TextPiece(
                    file=file,
                    start=start,
                    stop=stop,
                    encoding=encoding,
                    drop_empty_lines=drop_empty_lines,
                )
                for start, stop in _even(file.size_bytes, count)
            ]
            for file, count in zip(found, _counts(sizes, most, n), strict=True)
        ],
        n,
    )


# ------------------------------------------------------------------ .npy


def npy_splits(
    paths: Paths,
    filesystem: Any = None,
    n: int | None = None,
) -> list[Split]:
    """Splits of `.npy` files by rows; see `read.read_npy`. Reads the headers here.

    Args:
        n: wanted number, never more than there are rows; None: of about 64 MiB, at least one for
            each file.
    """
    _wanted(n)
    found = files(paths, filesystem, suffixes=(".npy",))
    headers = in_parallel(npy_header, found)
    counts = _counts(
        [header.shape[0] * header.row_bytes for header in headers],
        [max(1, header.shape[0]) for header in headers],
        n,
    )
    return _assemble(
        [
            [NpyPiece(file, header, start, stop) for start, stop in _even(header.shape[0], count)]
            for file, header, count in zip(found, headers, counts, strict=True)
        ],
        n,
    )
