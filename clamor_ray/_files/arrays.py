"""Arrays in files: `.npy`, and raw bytes of a dtype. What lies where. Elements are not read."""

from __future__ import annotations

import io
import math
import tokenize
from typing import Any, Final

import numpy as np

from clamor_ray._files.reader import Ranges
from clamor_ray._objects.kind import kind_of_array
from clamor_ray._objects.layout import BLOCK_BYTES, Plan, array_shape, array_stream, round_up
from clamor_ray.errors import FileFormatError

HEADER_BYTES: Final = 4096  # read at first; few headers are longer
MOST_HEADER_BYTES: Final = 1 << 20


def _laid_out(
    size_bytes: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], order: str
) -> tuple[Plan, bytes]:
    stream = array_stream(dtype, shape, order)
    tail_at = round_up(size_bytes, BLOCK_BYTES)
    n_bytes = dtype.itemsize * math.prod(shape)
    return Plan(
        tail_at + len(stream),
        len(stream),
        ((offset, n_bytes),),
        inband_offset=tail_at,
        kind=kind_of_array(dtype, shape),
    ), stream


def lay_out_npy(
    path: str, size_bytes: int, file: Ranges, dtype: Any, shape: Any
) -> tuple[Plan, bytes]:
    """What lies where in a `.npy` file, and the tail: the pickle stream of its array.

    Args:
        path, size_bytes, file: the file.
        dtype, shape: that it must have; None: any.

    Raises:
        FileFormatError: It is no such file, holds Python objects, is too short for what its header
            says, or has another dtype or shape.
        FileReadError and those below it: It cannot be read.
    """
    n_bytes = min(size_bytes, HEADER_BYTES)
    try:
        while True:
            head = io.BytesIO(bytes(file.read(0, n_bytes)) if n_bytes else b"")
            try:
                has_shape, is_fortran, has_dtype = _header(head)
                break
            except (ValueError, tokenize.TokenError):
                if n_bytes >= min(size_bytes, MOST_HEADER_BYTES):
                    raise
                n_bytes = min(size_bytes, MOST_HEADER_BYTES)
    except (ValueError, tokenize.TokenError) as failure:
        raise FileFormatError(
            f"{path} is no .npy file, or is not whole: {failure}.",
            hint="Write it with numpy.save; of other formats say format= and dtype=.",
        ) from failure
    if any(n < 0 for n in has_shape):
        raise FileFormatError(f"{path} has the shape {has_shape}.", hint="Write it again.")
    if has_dtype.hasobject:
        raise FileFormatError(
            f"{path} holds Python objects, which lie nowhere as they are.",
            hint="Save an array of numbers or of fixed-length strings.",
        )
    offset = head.tell()
    need = offset + has_dtype.itemsize * math.prod(has_shape)
    if size_bytes < need:
        raise FileFormatError(
            f"{path} is {size_bytes} bytes long, and its header says {need}: {has_dtype} "
            f"{has_shape}.",
            hint="It was not written to the end: write it again.",
        )
    if dtype is not None and np.dtype(dtype) != has_dtype:
        raise FileFormatError(
            f"{path} has the dtype {has_dtype}, and not {np.dtype(dtype)}.",
            hint="Leave dtype out: a .npy file says what it is.",
        )
    if shape is not None and array_shape(shape, has_dtype)[1] != has_shape:
        raise FileFormatError(
            f"{path} has the shape {has_shape}, and not {shape}.", hint="Leave shape out."
        )
    return _laid_out(size_bytes, offset, has_dtype, has_shape, "F" if is_fortran else "C")


def _header(head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    from numpy.lib import format as npy

    version = npy.read_magic(head)
    if version == (1, 0):
        return npy.read_array_header_1_0(head, max_header_size=MOST_HEADER_BYTES)
    if version == (2, 0):
        return npy.read_array_header_2_0(head, max_header_size=MOST_HEADER_BYTES)
    if version == (3, 0):
        read: Any = npy._read_array_header  # type: ignore[attr-defined]
        found: tuple[tuple[int, ...], bool, np.dtype[Any]] = read(head, version, MOST_HEADER_BYTES)
        return found
    raise ValueError(f"its version {version} is not known")


def lay_out_raw(
    path: str, size_bytes: int, offset_bytes: int, dtype: Any, shape: Any
) -> tuple[Plan, bytes]:
    """The same of raw bytes.

    Args:
        path, size_bytes: the file.
        offset_bytes: of the first element.
        dtype: of the elements.
        shape: of the array, in C order; None: one axis, to the end of the file.

    Raises:
        FileFormatError: The file is too short, or does not end with an element.
        ValueError: A dtype of Python objects, a negative dimension or offset.
    """
    if offset_bytes < 0:
        raise ValueError(f"offset_bytes must not be negative: {offset_bytes}")
    kind = np.dtype(dtype)
    room = size_bytes - offset_bytes
    if shape is None:
        array_shape(0, kind)
        if room < 0 or room % kind.itemsize:
            raise FileFormatError(
                f"{path} has {room} bytes from offset {offset_bytes} on, which are no whole number "
                f"of {kind} ({kind.itemsize} bytes each).",
                hint="Say the shape, or another dtype or offset_bytes.",
            )
        shape = (room // kind.itemsize,)
    kind, dims, n_bytes = array_shape(shape, kind)
    if n_bytes > room:
        raise FileFormatError(
            f"{path} is {size_bytes} bytes long: {kind} {dims} from offset {offset_bytes} on needs "
            f"{offset_bytes + n_bytes}.",
            hint="Say the dtype, shape and offset_bytes that the file has.",
        )
    return _laid_out(size_bytes, offset_bytes, kind, dims, "C")
