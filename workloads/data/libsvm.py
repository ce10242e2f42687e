r"""Text in libsvm's format: `label index:value index:value ...`, a row a line.

Indices begin at 1 and ascend within a row. A `#` begins a comment, `qid:n` is left out (it groups
rows for ranking, which nothing here does), empty lines are none. Labels and values are finite
decimal numbers.

A partition has the lines that begin in a range of bytes of a file, wherever that is. Text is read
some MiB at a time: what is a label, an index and a value is told by the bytes around each token,
for all tokens at once, and all of them are converted by Arrow's CSV reader as one column. Whatever
that finds odd goes to a reader of one line after the other, which decides, and which can say where.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from clamor_ray.collection.collection import DataCollection
from clamor_ray.collection.io import read
from clamor_ray.collection.io.sources import FileSplit, text_splits
from clamor_ray.errors import SourceError

from .rows import LabelledRows

__all__ = ["LibsvmPiece", "Malformed", "libsvm_splits", "parse", "read_libsvm"]

CHUNK_BYTES: Final = 4 << 20  # of text, as one item
MOST_COLUMNS: Final = 1 << 31

_COMMENT = re.compile(rb"#[^\n]*")
_QID = re.compile(rb"(?<=[ \t])qid:[^\s:]*(?=[\s]|$)")
_PLUS = re.compile(rb"(?<![^\s:])\+(?=[0-9.])")  # which Arrow does not take
_SPACES: Final = b" \t\r\n\v\f"
_IS_SEPARATOR: Final = np.isin(np.arange(256), list(_SPACES + b":"))
_TO_LINES: Final = bytes.maketrans(b" \t\r\v\f:", b"\n" * 6)


class Malformed(ValueError):
    """A line that is no row; says why.

    Args:
        line: from 0, in what was parsed.
        why: what is wrong with it.
    """

    def __init__(self, line: int, why: str) -> None:
        super().__init__(line, why)
        self.line, self.why = line, why


# ---------------------------------------------------------------- text to rows


def parse(text: bytes, *, zero_based: bool = False, n_features: int | None = None) -> LabelledRows:
    r"""The rows of some whole lines.

    Args:
        text: the last line need not end with a newline.
        zero_based: indices begin at 0.
        n_features: no index is beyond that; None: up to 2 ** 31.

    Raises:
        Malformed: A line is no row.

    Example:
        >>> parse(b"+1 1:0.5 4:2\n-1 2:1  # nothing else\n").columns.tolist()
        [0, 3, 1]
    """
    cleaned = _cleaned(text)
    rows = _parse_at_once(cleaned, 0 if zero_based else 1, n_features or MOST_COLUMNS)
    if rows is None:
        rows = _parse_lines(cleaned, 0 if zero_based else 1, n_features or MOST_COLUMNS)
    return rows


def _cleaned(text: bytes) -> bytes:
    """Without comments, qid, and signs that say nothing; lines stay where they are."""
    if b"#" in text:
        text = _COMMENT.sub(b"", text)
    if b"qid:" in text:
        text = _QID.sub(b"", text)
    if b"+" in text:
        text = _PLUS.sub(b"", text)
    return text if text.endswith(b"\n") else text + b"\n"


def _parse_at_once(text: bytes, base: int, most: int) -> LabelledRows | None:
    """None where anything is odd."""
    letters = np.frombuffer(text, np.uint8)
    separates = _IS_SEPARATOR[letters]
    borders = np.flatnonzero(separates[1:] != separates[:-1]) + 1
    if not separates[0]:
        borders = np.concatenate([[0], borders])
    starts, ends = borders[0::2], borders[1::2]  # the last letter is a newline
    if not len(starts):
        return None if b":" in text else _made([], [], np.zeros(1, np.int64), [])
    is_index = letters[ends] == ord(":")
    is_value = np.zeros(len(starts), bool)
    is_value[1:] = letters[starts[1:] - 1] == ord(":")
    newlines = np.flatnonzero(letters == ord("\n"))
    line = np.searchsorted(newlines, starts)
    begins = np.ones(len(starts), bool)
    begins[1:] = line[1:] != line[:-1]
    in_order = (
        letters[max(0, starts[0] - 1)] != ord(":")
        and not is_index[-1]
        and not (is_index & is_value).any()
        and np.array_equal(is_value[1:], is_index[:-1])
        and np.array_equal(begins, ~(is_index | is_value))
        and bool((starts[1:][is_index[:-1]] == ends[:-1][is_index[:-1]] + 1).all())
        and text.count(b":") == int(is_index.sum())
    )
    tokens = text.translate(_TO_LINES)
    columns = columns_of(tokens, ["number"], pa.float64(), "\v") if in_order else None
    if columns is None:
        return None
    (numbers,) = columns
    if len(numbers) != len(starts) or not np.isfinite(numbers).all():
        return None
    indices = numbers[is_index] - base
    row_of = np.cumsum(begins) - 1
    rows = row_of[is_index]
    n_rows = int(row_of[-1]) + 1
    ascends = (indices[1:] > indices[:-1]) | (rows[1:] != rows[:-1])
    within = (indices >= 0) & (indices < most) & (indices == np.floor(indices))
    if not (ascends.all() and within.all()):
        return None
    first = np.zeros(n_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=n_rows), out=first[1:])
    return _made(numbers[begins], indices, first, numbers[is_value])


def columns_of(
    text: bytes, names: list[str], kind: pa.DataType, delimiter: str
) -> list[npt.NDArray[Any]] | None:
    """Columns of numbers, none missing; None where Arrow does not take one for such."""
    try:
        table = pacsv.read_csv(
            pa.BufferReader(text),
            read_options=pacsv.ReadOptions(
                use_threads=False, column_names=names, block_size=len(text) + 1
            ),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, quote_char=False),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, kind), null_values=[]
            ),
        )
    except pa.ArrowInvalid:
        return None
    return [column.to_numpy() for column in table.columns]


def _made(labels: Any, columns: Any, first: npt.NDArray[np.int64], values: Any) -> LabelledRows:
    return LabelledRows(
        np.asarray(labels, np.float64),
        first,
        np.asarray(columns).astype(np.int32),
        np.asarray(values, np.float64),
    )


def _parse_lines(text: bytes, base: int, most: int) -> LabelledRows:
    """One line after the other.

    Raises:
        Malformed: A line is no row.
    """
    labels: list[float] = []
    columns: list[int] = []
    values: list[float] = []
    first = [0]
    for number, line in enumerate(text.split(b"\n")):
        label, *entries = line.split() or [b""]
        if not label:
            continue
        labels.append(_number(number, label, "the label"))
        last = -1
        for entry in entries:
            index, colon, value = entry.partition(b":")
            if not colon:
                raise Malformed(number, f"{shown(entry)} is not index:value")
            column = _number(number, index, "an index") - base
            if column != math.floor(column):
                raise Malformed(number, f"an index is a whole number, not {shown(index)}")
            if column < 0:
                raise Malformed(number, f"indices begin at {base}, and this one is {shown(index)}")
            if column >= most:
                raise Malformed(number, f"index {shown(index)} is beyond {most:,} features")
            if column <= last:
                raise Malformed(number, f"index {shown(index)} does not ascend in its row")
            last = int(column)
            columns.append(last)
            values.append(_number(number, value, f"the value of index {shown(index)}"))
        first.append(len(columns))
    return _made(labels, columns, np.array(first, np.int64), values)


def _number(line: int, token: bytes, what: str) -> float:
    try:
        found = float(token) if b"_" not in token else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise Malformed(line, f"{what} is a number, not {shown(token)}")
    return found


def shown(token: bytes) -> str:
    text = token[:40].decode("ascii", "backslashreplace").rstrip("\r")
    return repr(text + ("..." if len(token) > 40 else ""))


# ---------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class LibsvmPiece:
    """The rows of a file whose lines begin in a range of bytes.

    Args:
        text: the range.
        zero_based, n_features: see `parse`.
    """

    text: Any
    zero_based: bool = False
    n_features: int | None = None

    @property
    def size_bytes(self) -> int:
        """Of the range."""
        return int(self.text.size_bytes)

    def describe(self) -> str:
        """File and byte range."""
        return str(self.text.describe())

    def read(self) -> npt.NDArray[Any]:
        """The rows, as items of about CHUNK_BYTES of text each; at least one.

        Raises:
            SourceError: a line is no row; names file and line.
            StorageError: the file system does not answer.
        """
        data, begin = self.text.lines()
        found = []
        at = 0
        for chunk in chunks(data):
            try:
                rows = parse(chunk, zero_based=self.zero_based, n_features=self.n_features)
            except Malformed as error:
                line = lines_before(self.text, begin) + data.count(b"\n", 0, at) + error.line
                self._refuse(line + 1, error.why)
            found.append(rows)
            at += len(chunk)
        out = np.empty(len(found), object)
        out[:] = found
        return out

    def _refuse(self, line: int, why: str) -> NoReturn:
        hint = None
        if "indices begin at 1" in why:
            hint = "Where a file's indices begin at 0, say so: zero_based=True, --zero-based."
        raise SourceError(f"{self.text.file.name}, line {line}: {why}.", hint=hint) from None


def chunks(data: bytearray) -> Iterator[bytes]:
    """Whole lines, about CHUNK_BYTES at a time; at least one, which may be empty."""
    at = 0
    while True:
        end = data.find(b"\n", at + CHUNK_BYTES)
        stop = len(data) if end < 0 else end + 1
        yield bytes(data[at:stop])
        at = stop
        if at >= len(data):
            return


def lines_before(text: Any, begin: int) -> int:
    """Newlines of a file before a byte. Reads all of that: for error messages.

    Args:
        text: a `TextPiece` of the file.
        begin: from its start; 0 of a compressed file, which is in one piece.
    """
    if begin == 0:
        return 0
    before, _ = dataclasses.replace(text, start=0, stop=begin).lines()
    return int(before[:begin].count(b"\n"))


def libsvm_splits(
    paths: Any,
    filesystem: Any = None,
    n: int | None = None,
    *,
    zero_based: bool = False,
    n_features: int | None = None,
) -> list[FileSplit]:
    """What partitions are made of; see `read_libsvm`."""
    return [
        FileSplit(tuple(LibsvmPiece(piece, zero_based, n_features) for piece in split.pieces))
        for split in text_splits(paths, filesystem, n, encoding="latin-1")
        if isinstance(split, FileSplit)
    ]


def read_libsvm(
    paths: Any, *, filesystem: Any = None, partitions: int | None = None, **options: Any
) -> DataCollection:
    """Rows of libsvm files: items are `LabelledRows`, several a partition, and at least one.

    Args:
        paths: files, directories, patterns, or a list of them; local or `s3://`, also compressed
            (`.gz`, `.bz2`, `.zst`, `.lz4`), which makes one partition each.
        filesystem, partitions: as `clamor.read_text`'s.
        options: `zero_based`: indices begin at 0. `n_features`: no index is beyond that.

    Raises:
        SourceError: No such file; from reading: a line is no row, which names file and line.
        StorageError: The store does not answer, after retries.
    """
    return read._made("libsvm", libsvm_splits(paths, filesystem, partitions, **options))
