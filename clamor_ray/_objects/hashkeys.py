"""Which things are keys of a hash map: int64, or bytes up to the map's width. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors

Array = npt.NDArray[Any]

_INT64: Final = np.iinfo(np.int64)
MAX_KEY_BYTES: Final = 65536


def describe(dtype: np.dtype[Any]) -> str:
    """A key dtype for people.

    Example:
        >>> describe(np.dtype("S12"))
        'bytes of at most 12 (S12)'
    """
    return "int64" if dtype.kind in "iu" else f"bytes of at most {dtype.itemsize} ({dtype.str[1:]})"


def check_key_dtype(dtype: np.dtype[Any]) -> None:
    """That a map can be built with keys of this dtype.

    Raises:
        KeyTypeError: It is neither an integer nor bytes.
    """
    if dtype.kind in "iu" or (dtype.kind == "S" and 0 < dtype.itemsize <= MAX_KEY_BYTES):
        return
    raise errors.KeyTypeError(
        f"A hash map has keys of int64 or of fixed-width bytes ('S12'), not of {dtype}."
    )


def is_one(key: Any) -> bool:
    """Whether this is one key rather than an array of them."""
    return np.ndim(key) == 0


def keys_of(keys: Any, dtype: np.dtype[Any]) -> Array:
    """Keys as a contiguous array of the map's key dtype, in their own shape.

    Any integer that fits int64 is a key of an int64 map. Bytes of any width are keys of a map of
    bytes, as long as what is in them fits; trailing NUL bytes are padding, as NumPy has it, so
    that b"ab" and b"ab\\0" are one key.

    Raises:
        KeyTypeError: Anything else: bool, float, str, bytes for an int64 map, ...
    """
    try:
        array = np.asarray(keys)
    except (ValueError, OverflowError) as error:  # ragged, or beyond any integer
        raise errors.KeyTypeError(
            f"The hash map has keys of {describe(dtype)}, not {type(keys).__qualname__}: {error}."
        ) from error
    if array.size == 0 and not isinstance(keys, np.ndarray):
        return np.empty(array.shape, dtype)  # an empty list has no type of its own
    converted = _integers(array) if dtype.kind == "i" else _bytes(array, dtype)
    if converted is None:
        what = f"{type(keys).__qualname__}" if is_one(keys) else f"{array.dtype}"
        raise errors.KeyTypeError(f"The hash map has keys of {describe(dtype)}, not of {what}.")
    return converted


def _integers(array: Array) -> Array | None:
    if array.dtype.kind not in "iu":
        return None
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size:
        largest = int(array.max())
        if largest > _INT64.max:
            raise errors.KeyTypeError(
                f"The hash map has keys of int64; {largest} is more than that holds."
            )
    return np.ascontiguousarray(array, np.int64).reshape(array.shape)


def _bytes(array: Array, dtype: np.dtype[Any]) -> Array | None:
    if array.dtype.kind != "S":
        return None
    narrow = np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(array.shape)
    if array.dtype.itemsize > dtype.itemsize:
        longer = narrow.astype(array.dtype) != array
        if longer.any():
            first = array.reshape(-1)[int(np.argmax(longer.reshape(-1)))]
            raise errors.KeyTypeError(
                f"The hash map has keys of {describe(dtype)}; {first!r} has {len(first)}."
            )
    return narrow
