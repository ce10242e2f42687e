"""Parts of Parquet, CSV and text files, as a worker reads them."""

from __future__ import annotations

import codecs
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from clamor_ray.collection.data.blocks import Items
from clamor_ray.collection.io.files import File, open_input, persistent, read_bytes, reading
from clamor_ray.errors import MissingColumnError, SourceError

_LINE_END_BYTES = 64 << 10  # of the first look for the end of a split's last line
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}


# ------------------------------------------------------------------ Parquet


@dataclass(frozen=True)
class ParquetPiece:
    """Row groups of a file.

    Args:
        file: which one.
        start: first row group.
        stop: one past the last; equal to `start` where the file has none.
        columns: the wanted ones, in order; None: all.
        size_bytes: uncompressed, of the wanted columns.
    """

    file: File
    start: int
    stop: int
    columns: tuple[str, ...] | None
    size_bytes: int

    def describe(self) -> str:
        """File and row groups."""
        return f"{self.file.name}, {self._which()}"

    def _which(self) -> str:
        if self.stop <= self.start:
            return "no row groups"
        last = self.stop - 1
        return f"row groups {self.start}-{last}" if last > self.start else f"row group {last}"

    @persistent
    def read(self) -> Items:
        """The rows as a table.

        Raises:
            SourceError: the file or one of its row groups cannot be read as Parquet.
            StorageError: the file system does not answer.
        """
        with open_input(self.file) as source:
            file = parquet_file(self.file, source)
            groups = list(range(self.start, self.stop))
            columns = None if self.columns is None else list(self.columns)
            try:
                with reading(self.file, self._which()):
                    return file.read_row_groups(groups, columns, use_threads=False)
            except SourceError:
                for group in groups:  # which one is it?
                    with reading(self.file, f"row group {group}"):
                        file.read_row_group(group, columns, use_threads=False)
                raise


def parquet_file(file: File, source: Any) -> pq.ParquetFile:
    """An open file's footer, read and checked."""
    with reading(file, "Parquet footer"):
        # Checksums are checked where the writer made some: a page may decode and be wrong.
        return pq.ParquetFile(
            source, pre_buffer=not file.store.is_local, page_checksum_verification=True
        )


def check_columns(
    file: File, there: Sequence[str], columns: Sequence[str] | None, leaves: Sequence[str] = ()
) -> None:
    """Raises MissingColumnError where a file lacks one of the wanted columns.

    Args:
        file: which one.
        there: its columns.
        columns: the wanted ones; None: all.
        leaves: paths of nested columns ("s.x"), which can be wanted too, or what they begin with.
    """
    missing = [
        name
        for name in columns or ()
        if name not in there and not any(f"{leaf}.".startswith(f"{name}.") for leaf in leaves)
    ]
    if missing:
        raise MissingColumnError(
            f"{file.name} has no column {', '.join(map(repr, missing))}: there are "
            f"{', '.join(map(repr, there)) or 'none'}."
        )


def row_group_bytes(group: Any, columns: Sequence[str] | None) -> int:
    """Uncompressed, of the wanted columns; None: of all."""
    if columns is None:
        return int(group.total_byte_size)
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(
        int(chunk.total_uncompressed_size)
        for chunk in chunks
        if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns)
    )


# ------------------------------------------------------------------ CSV


def codec_of(file: File) -> str | None:
    """What it is compressed with, by its name; None: nothing."""
    return _CODECS.get(os.path.splitext(file.path)[1].lower())


def _decompressed(file: File, source: Any) -> Any:
    codec = codec_of(file)
    return source if codec is None else pa.CompressedInputStream(source, codec)


@dataclass(frozen=True)
class CsvPiece:
    """A file.

    Args:
        file: which one.
        columns: the wanted ones, in order; None: all.
        options: `read_options`, `parse_options`, `convert_options` of `pyarrow.csv.read_csv`.
    """

    file: File
    columns: tuple[str, ...] | None
    options: dict[str, Any] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.file.size_bytes

    def describe(self) -> str:
        """The file."""
        return self.file.name

    def _options(self, use_threads: bool | None = None) -> dict[str, Any]:
        read = self.options.get("read_options")
        if read is None:
            # A task has one core, and without threads an error names the row.
            read, use_threads = pacsv.ReadOptions(), False
        if use_threads is not None:
            read = _copied(read)
            read.use_threads = use_threads
        convert = self.options.get("convert_options")
        if self.columns is not None:
            convert = pacsv.ConvertOptions() if convert is None else _copied(convert)
            convert.include_columns = list(self.columns)
        return {
            "read_options": read,
            "parse_options": self.options.get("parse_options"),
            "convert_options": convert,
        }

    @persistent
    def column_names(self) -> list[str]:
        """As the file's first block says."""
        with reading(self.file, "first rows"), open_input(self.file) as source:
            options = {**CsvPiece(self.file, None, self.options)._options()}
            options["convert_options"] = None
            with pacsv.open_csv(_decompressed(self.file, source), **options) as rows:
                return [str(name) for name in rows.schema.names]

    @persistent
    def _read(self, options: dict[str, Any]) -> pa.Table:
        with reading(self.file, ""), open_input(self.file) as source:
            return pacsv.read_csv(_decompressed(self.file, source), **options)

    def read(self) -> Items:
        """The rows as a table.

        Raises:
            SourceError: the file cannot be read as CSV; names the row where it can.
            MissingColumnError: it lacks one of the wanted columns.
            StorageError: the file system does not answer.
        """
        names = getattr(self.options.get("read_options"), "column_names", None)
        if self.file.size_bytes == 0 and names:
            return pa.table({name: pa.nulls(0) for name in self.columns or names})
        options = self._options()
        try:
            return self._read(options)
        except SourceError as error:
            if isinstance(error.__cause__, KeyError):
                check_columns(self.file, self.column_names(), self.columns)
            if options["read_options"].use_threads and "Row #" not in str(error):
                self._read(self._options(use_threads=False))  # says which row
            raise


def _copied(options: Any) -> Any:
    return pickle.loads(pickle.dumps(options))


# ------------------------------------------------------------------ text


@dataclass(frozen=True)
class TextPiece:
    """The lines of a file that begin in a range of bytes.

    Args:
        file: which one.
        start: first byte of the range.
        stop: one past its last.
        encoding: of the text.
        drop_empty_lines: whether lines without a letter are left out.
    """

    file: File
    start: int
    stop: int
    encoding: str
    drop_empty_lines: bool

    @property
    def size_bytes(self) -> int:
        """Of the range."""
        return self.stop - self.start

    def describe(self) -> str:
        """File and byte range."""
        if self.stop - self.start == self.file.size_bytes:
            return self.file.name
        return f"{self.file.name}, bytes {self.start}-{self.stop - 1}"

    def lines(self) -> tuple[bytearray, int]:
        """The lines as they are in the file, and the byte where they begin."""
        with open_input(self.file) as source:
            if codec_of(self.file) is not None:
                packed = pa.py_buffer(read_bytes(self.file, source, 0, self.file.size_bytes))
                with reading(self.file, "decompressing it"):
                    return bytearray(_decompressed(self.file, pa.BufferReader(packed)).read()), 0
            begin = max(0, self.start - 1)  # the byte before tells whether a line begins at start
            data = read_bytes(self.file, source, begin, self.stop)
            if self.start:
                newline = data.find(b"\n")
                cut = len(data) if newline < 0 else newline + 1
                del data[:cut]
                begin += cut
            at, step = self.stop, _LINE_END_BYTES
            while data and data[-1] != 0x0A and at < self.file.size_bytes:
                more = read_bytes(self.file, source, at, min(at + step, self.file.size_bytes))
                newline = more.find(b"\n")
                data += more if newline < 0 else more[: newline + 1]
                at, step = at + len(more), 2 * step
            return data, begin

    def read(self) -> Items:
        """The lines as an array of str.

        Raises:
            SourceError: a byte that is not of the encoding; which one.
            StorageError: the file system does not answer.
        """
        data, begin = self.lines()
        if begin == 0 and self.encoding == "utf-8" and data.startswith(codecs.BOM_UTF8):
            del data[: len(codecs.BOM_UTF8)]
            begin = len(codecs.BOM_UTF8)
        try:
            text = data.decode(self.encoding)
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self.file.name}, byte {begin + error.start}: not {self.encoding}: "
                f"{error.reason} ({bytes(data[error.start : error.start + 4]).hex(' ')}).",
                hint="Give encoding= as the file was written ('latin-1' reads any bytes).",
            ) from error
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()  # what follows the last newline is no line
        if self.drop_empty_lines:
            lines = [line for line in lines if line]
        found = np.empty(len(lines), object)
        found[:] = lines
        return found


def ascii_based(encoding: str) -> str:
    """An encoding's own name, where a newline is one byte that is nothing else."""
    try:
        name = codecs.lookup(encoding).name.replace("utf-8-sig", "utf-8")  # taken off anyway
        newline = "\n".encode(name)
    except LookupError as error:
        raise ValueError(f"Python knows no encoding {encoding!r}") from error
    if newline != b"\n" or name == "utf-7":
        raise ValueError(
            f"lines of {encoding} text cannot be told by their bytes: convert the files to utf-8"
        )
    return name
