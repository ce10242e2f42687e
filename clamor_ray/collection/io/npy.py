"""`.npy` files by rows: the header is read once, by the driver, and each part by its worker."""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from clamor_ray.collection.data.blocks import Items
from clamor_ray.collection.io.files import File, open_input, read_bytes, read_into
from clamor_ray.errors import SourceError

_HEADER_BYTES = 4096  # of the first look; NumPy pads to 64, few are longer than 128
_HEADER_MOST_BYTES = 10_000  # NumPy's own limit: literal_eval is not safe beyond
# Headers are read on several threads. Up to Python 3.11 a thread that parses may spoil another's
# count of recursion, where a collection of garbage comes between: SystemError.
_parsing = threading.Lock()


@dataclass(frozen=True)
class NpyHeader:
    """What a `.npy` file says of itself.

    Args:
        dtype: of the elements.
        shape: at least one axis.
        offset: byte where the data begins.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Of one item."""
        size = self.dtype.itemsize
        for length in self.shape[1:]:
            size *= length
        return size


@dataclass(frozen=True)
class NpyPiece:
    """Rows of a `.npy` file.

    Args:
        file: which one.
        header: what it says.
        start: first row.
        stop: one past the last.
    """

    file: File
    header: NpyHeader
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Of the rows."""
        return (self.stop - self.start) * self.header.row_bytes

    def describe(self) -> str:
        """File and rows."""
        return f"{self.file.name}, rows {self.start}-{self.stop - 1}"

    def read(self) -> Items:
        """The rows, as an array of its own; nothing else of the file is read.

        Raises:
            SourceError: the file has changed, or is gone.
            StorageError: the file system does not answer.
        """
        found = np.empty((self.stop - self.start, *self.header.shape[1:]), self.header.dtype)
        if found.nbytes:
            at = self.header.offset + self.start * self.header.row_bytes
            into = memoryview(found.reshape(-1).view(np.uint8).data)
            with open_input(self.file) as source:
                read_into(self.file, source, at, into)
        return found


def npy_header(file: File) -> NpyHeader:
    """Reads and checks the header (format of NEP 1, versions 1.0 to 3.0)."""

    def bad(why: str, hint: str | None = None) -> SourceError:
        return SourceError(f"{file.name}: {why}.", hint=hint)

    with open_input(file) as source:
        first = min(_HEADER_BYTES, file.size_bytes)
        head = read_bytes(file, source, 0, first)
        if head[:6] != b"\x93NUMPY":
            raise bad("not a .npy file: it does not begin with the magic bytes")
        wide = len(head) > 6 and head[6] in (2, 3)
        start = 12 if wide else 10
        if len(head) < start:
            raise bad(f"the .npy header is truncated: the file has {file.size_bytes} bytes")
        if head[6] not in (1, 2, 3):
            raise bad(f"version {head[6]}.{head[7]} of the .npy format is not known")
        n_bytes = int.from_bytes(head[8:start], "little")
        if n_bytes > _HEADER_MOST_BYTES:
            raise bad(f"a .npy header of {n_bytes} bytes; {_HEADER_MOST_BYTES} is the most")
        if start + n_bytes > file.size_bytes:
            raise bad(
                f"the .npy header is truncated: it needs {start + n_bytes} bytes and the file has "
                f"{file.size_bytes}"
            )
        if start + n_bytes > len(head):
            head = read_bytes(file, source, 0, start + n_bytes)
    try:
        text = head[start : start + n_bytes].decode("utf-8" if head[6] == 3 else "latin-1")
        with _parsing:
            said = ast.literal_eval(text)
        shape = tuple(said["shape"])
        fortran = bool(said["fortran_order"])
        dtype = np.lib.format.descr_to_dtype(said["descr"])
    except (SyntaxError, ValueError, TypeError, KeyError, IndexError) as error:
        raise bad(f"the .npy header makes no sense: {error}") from error
    if not all(type(length) is int and length >= 0 for length in shape):
        raise bad(f"the .npy header says a shape of {shape}")
    return _usable(file, NpyHeader(dtype, shape, start + n_bytes), fortran)


def _usable(file: File, header: NpyHeader, fortran: bool) -> NpyHeader:
    if header.dtype.hasobject:
        raise SourceError(
            f"{file.name}: an array of Python objects is a pickle, which is not read.",
            hint="Save numbers or fixed-width text, or Parquet.",
        )
    if not header.shape:
        raise SourceError(
            f"{file.name}: an array without axes has no items.",
            hint="Save it with at least one axis: np.save(file, np.atleast_1d(a)).",
        )
    if fortran and len(header.shape) > 1:
        raise SourceError(
            f"{file.name}: in Fortran order an item's numbers are all over the file.",
            hint="Save it by rows: np.save(file, np.ascontiguousarray(a)).",
        )
    needed = header.offset + header.shape[0] * header.row_bytes
    if needed > file.size_bytes:
        raise SourceError(
            f"{file.name}: the header says {header.shape[0]} items of {header.row_bytes} bytes, "
            f"which is {needed} bytes with the header, and the file has {file.size_bytes}."
        )
    return header
