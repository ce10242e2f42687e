"""Rows of the Criteo schema: files of them in, labels and 64-bit keys out. No Ray here.

A line is a label (0 or 1), 13 whole numbers and 26 words, separated by tabs; a field may be
empty. One-hot, a row has 39 features of the value one: which of a feature's values it is becomes a
*key*, a hash of the feature and the value. Numbers are put into buckets first (`buckets_of`). A
missing value is a value of its own.

Files are cut at line ends, so that one large file is read by many tasks; compressed ones are not.
Arrow parses, with every word as a number of its dictionary, so that each distinct word is hashed
once for each MiB or so of text. What it cannot parse is looked at line by line, for an error that
says where.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv

from clamor_ray.collection.io.pieces import TextPiece
from clamor_ray.collection.io.sources import FileSplit, text_splits
from clamor_ray.errors import SourceError

from .libsvm import lines_before

__all__ = [
    "N_CATEGORICAL",
    "N_FEATURES",
    "N_NUMERIC",
    "CriteoRows",
    "buckets_of",
    "hashed",
    "keys_of",
    "parse",
    "read",
    "splits",
]

N_NUMERIC: Final = 13
N_CATEGORICAL: Final = 26
N_FEATURES: Final = N_NUMERIC + N_CATEGORICAL

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

_NAMES: Final = [
    "label",
    *(f"I{number}" for number in range(1, N_NUMERIC + 1)),
    *(f"C{number}" for number in range(1, N_CATEGORICAL + 1)),
]
_WORD: Final = pa.dictionary(pa.int32(), pa.string())
_TYPES: Final = {name: _WORD if name[0] == "C" else pa.int64() for name in _NAMES}
_BLOCK_BYTES: Final = 4 << 20  # of text that has a dictionary
_NUMBER: Final = re.compile(rb"-?[0-9]{1,18}")


class CriteoRows(NamedTuple):
    """Some rows.

    Args:
        labels: shape (n,), 0 or 1.
        keys: shape (39, n), feature by feature.
    """

    labels: npt.NDArray[np.uint8]
    keys: UInt64


# ------------------------------------------------------------------ keys


def hashed(numbers: UInt64) -> UInt64:
    """SplitMix64's finalizer: a bijection of 64-bit numbers that looks like chance."""
    out = numbers + np.uint64(0x9E3779B97F4A7C15)
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: UInt64 = out ^ (out >> np.uint64(31))
    return found


def keys_of(feature: int, values: UInt64) -> UInt64:
    """Keys of one feature's values; values of other features have others.

    Args:
        feature: 0 to 38.
        values: 64-bit numbers that tell the feature's values apart.
    """
    return hashed(values ^ hashed(np.array([feature], np.uint64)))


def buckets_of(numbers: Int64) -> UInt64:
    """What whole numbers count as: each up to 2 alone, above that the squares of their logarithms,
    rounded down, as is customary for these data (they span ten orders of magnitude). From 1 on: 0
    is for what is missing.

    Example:
        >>> buckets_of(np.array([-9, 0, 2, 3, 1000])).tolist()
        [1, 4, 6, 8, 54]
    """
    small = np.clip(numbers, -3, 2) + 4
    large = np.log(np.maximum(numbers, 3).astype(np.float64))
    found: UInt64 = np.where(numbers > 2, 7 + (large * large).astype(np.int64), small).astype(
        np.uint64
    )
    return found


def _hashes_of_words(words: pa.StringArray) -> UInt64:
    """A 64-bit number for each word, from its letters alone; none is 0.

    Letters are taken by eight. One that is shorter than others beside it is hashed as if it were
    alone: what comes after its end changes nothing.
    """
    out = np.full(len(words), 0xCBF29CE484222325, np.uint64)
    _, bounds, letters = words.buffers()
    ends = np.frombuffer(bounds, np.int32)[words.offset : words.offset + len(words) + 1]
    text = np.frombuffer(letters, np.uint8) if letters is not None else np.empty(0, np.uint8)
    lengths = np.diff(ends)
    for at in range(0, int(lengths.max(initial=0)), 8):
        longer = np.flatnonzero(lengths > at)
        places = ends[longer, None] + np.arange(at, at + 8)
        group = text.take(places, mode="clip")
        group[places >= ends[longer + 1, None]] = 0
        out[longer] = hashed(out[longer] ^ group.view(np.uint64)[:, 0])
    found: UInt64 = np.maximum(out ^ lengths.astype(np.uint64), np.uint64(1))
    return found


# ------------------------------------------------------------------ files


def splits(paths: Any, n: int | None = None) -> list[FileSplit]:
    """Parts of files, of lines.

    Args:
        paths: files, directories, patterns, or a list of them; local, `s3://`, `.gz` and others.
        n: wanted number; None: of about 64 MiB.

    Raises:
        SourceError: No file matches.
        StorageError: The file system does not answer.
    """
    found: list[Any] = text_splits(paths, n=n)
    return found


def read(split: FileSplit) -> CriteoRows:
    """The rows of a part.

    Raises:
        SourceError: A line is none of the schema; says which, of which file, and why.
        StorageError: The file system does not answer.
    """
    parts = []
    for piece in split.pieces:
        assert isinstance(piece, TextPiece)
        data, begin = piece.lines()
        parts.append(parse(data, piece.file.name, functools.partial(lines_before, piece, begin)))
    if len(parts) == 1:
        return parts[0]
    return CriteoRows(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.keys for part in parts], axis=1),
    )


def parse(data: Any, name: str, before: Callable[[], int] = lambda: 0) -> CriteoRows:
    """The rows of a text.

    Args:
        data: bytes of whole lines. Empty lines are no rows.
        name: of the file, for errors.
        before: gives how many lines of the file come before; only asked where one is bad.

    Raises:
        SourceError: A line is none of the schema.
    """
    if not bytes(data[: 1 << 16]).strip() and not bytes(data).strip():
        return CriteoRows(np.empty(0, np.uint8), np.empty((N_FEATURES, 0), np.uint64))
    try:
        table = pacsv.read_csv(
            pa.BufferReader(data),
            read_options=pacsv.ReadOptions(
                column_names=_NAMES, use_threads=False, block_size=_BLOCK_BYTES
            ),
            parse_options=pacsv.ParseOptions(
                delimiter="\t", quote_char=False, double_quote=False, escape_char=False
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=_TYPES, null_values=[""], strings_can_be_null=True
            ),
        )
    except (pa.ArrowException, ValueError, OSError) as failure:
        raise _malformed(data, name, before(), str(failure)) from None
    labels = table.column(0)
    if labels.null_count or not np.isin(labels.to_numpy(), (0, 1)).all():
        raise _malformed(data, name, before(), "a label is neither 0 nor 1")
    keys = np.empty((N_FEATURES, len(table)), np.uint64)
    for feature in range(N_FEATURES):
        values = _numbers if feature < N_NUMERIC else _words
        at = 0
        for chunk in table.column(1 + feature).chunks:
            keys[feature, at : at + len(chunk)] = keys_of(feature, values(chunk))
            at += len(chunk)
    return CriteoRows(labels.to_numpy().astype(np.uint8), keys)


def _numbers(chunk: pa.Int64Array) -> UInt64:
    missing = chunk.is_null().to_numpy(zero_copy_only=False)
    buckets = buckets_of(chunk.fill_null(0).to_numpy())
    buckets[missing] = 0
    return buckets


def _words(chunk: pa.DictionaryArray) -> UInt64:
    """Each distinct word is hashed once; the last entry is what is missing."""
    hashes = np.append(_hashes_of_words(chunk.dictionary), np.uint64(0))
    places = chunk.indices.fill_null(len(hashes) - 1).to_numpy()
    found: UInt64 = hashes[places]
    return found


# ------------------------------------------------------------------ what is wrong


def _malformed(data: Any, name: str, before: int, otherwise: str) -> SourceError:
    """The error of the first bad line; `otherwise`: what was said, where each looks well."""
    for number, line in enumerate(io.BytesIO(bytes(data)), before + 1):
        if why := _fault_of(line.rstrip(b"\r\n")):
            return SourceError(
                f"{name}, line {number}: {why}.",
                hint="A line has a label (0 or 1), 13 whole numbers and 26 words, separated by "
                "tabs; a number or word may be empty. Leave the line out, or mend it.",
            )
    return SourceError(f"{name}: {otherwise.strip().rstrip('.')}.")


def _fault_of(line: bytes) -> str:
    """Why a line is none of the schema; empty: it is one, or empty."""
    if not line:
        return ""
    fields = line.split(b"\t")
    if len(fields) != 1 + N_FEATURES:
        return f"{len(fields)} fields instead of {1 + N_FEATURES}"
    if fields[0] not in (b"0", b"1"):
        return f"the label is {_shown(fields[0])}, not 0 or 1"
    for at in range(1, 1 + N_NUMERIC):
        if fields[at] and not _NUMBER.fullmatch(fields[at]):
            return f"field {at + 1} ({_NAMES[at]}) is {_shown(fields[at])}, not a whole number"
    for at in range(1 + N_NUMERIC, 1 + N_FEATURES):
        try:
            fields[at].decode()
        except UnicodeDecodeError:
            return f"field {at + 1} ({_NAMES[at]}) is {_shown(fields[at])}, not UTF-8"
    return ""


def _shown(field: bytes) -> str:
    return repr(field[:40])[1:] + ("..." if len(field) > 40 else "")
