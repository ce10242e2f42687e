"""Hashes of keys: the same in every process, on every machine, for keys that are equal. Pure.

Python's own hash of text differs from process to process, and Arrow shows none. Numbers are
hashed as int64 where they are whole and as bits of a float64 otherwise, so that their type does
not matter; texts by a polynomial of their bytes, all at once; what is no number, text, time or
tuple by its digest. A hash decides only where an item goes, never which items are equal.
"""

from __future__ import annotations

import datetime
import fractions
import numbers
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clamor_ray.collection.data import arrow, keys
from clamor_ray.collection.data.arrow import objects
from clamor_ray.collection.data.blocks import Array
from clamor_ray.collection.data.digests import Digest
from clamor_ray.collection.data.keys import Key, Places

_MASK: Final = 2**64 - 1
_SALT_FLOAT: Final = np.uint64(0x9E3779B97F4A7C15)
_SALT_LARGE: Final = np.uint64(0xD1B54A32D192ED03)
_NULL_CODE: Final = np.uint64(0x6E756C6C6E756C6C)
_NAN_CODE: Final = np.uint64(0x6E616E6E616E6E61)
_STEP: Final = np.uint64(0x100000001B3)  # odd, so it can be divided by, modulo 2**64
_STEP_BACK: Final = np.uint64(pow(int(_STEP), -1, 2**64))
_BYTES_AT_ONCE: Final = 1 << 20


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


_BYTE_CODES: Final = _mix(np.arange(1, 257, dtype=np.uint64) * _SALT_FLOAT)


def codes(key: Key) -> npt.NDArray[np.uint64]:
    """A hash of each key: equal keys have equal ones, in every process and on every machine.

    Raises:
        TypeError: A key cannot be hashed: which.
    """
    if isinstance(key, tuple):
        return _codes_of_tuples(key)
    if isinstance(key, np.ndarray) and key.dtype.kind == "c":
        return np.where(key.imag == 0, codes(key.real), _codes_of_tuples((key.real, key.imag)))
    key = keys.simple(key)
    if isinstance(key, tuple):
        return _codes_of_tuples(key)
    if isinstance(key, np.ndarray):
        return _codes_of_objects(key) if key.dtype == object else _codes_of_numbers(key)
    return _codes_of_column(key)


def _codes_of_tuples(parts: Sequence[Key]) -> npt.NDArray[np.uint64]:
    found = np.full(keys.length(parts[0]), len(parts), np.uint64)
    for part in parts:
        found = _mix(found * _SALT_FLOAT + codes(part))
    return found


def _codes_of_numbers(a: Array) -> npt.NDArray[np.uint64]:
    if a.dtype.kind == "f":
        return _codes_of_floats(a.astype(np.float64))
    if a.dtype != np.uint64:
        return _mix(a.astype(np.int64).view(np.uint64))
    found = _mix(a)
    large = a > np.uint64(2**63 - 1)
    if large.any():
        floats = a[large].astype(np.float64)
        below = floats < 2.0**64
        exact = below & (np.where(below, floats, 0).astype(np.uint64) == a[large])
        found[large] = np.where(exact, _codes_of_floats(floats), _mix(a[large] ^ _SALT_LARGE))
    return found


def _codes_of_floats(x: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    whole = (np.floor(x) == x) & (x >= -(2.0**63)) & (x < 2.0**63)
    as_ints = np.where(whole, x, 0).astype(np.int64).view(np.uint64)
    found = _mix(np.where(whole, as_ints, x.view(np.uint64) ^ _SALT_FLOAT))
    found[np.isnan(x)] = _NAN_CODE
    return found


def _codes_of_column(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    type_ = column.type
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_null(type_):
        found = np.empty(len(column), np.uint64)
    elif arrow.is_text(type_):
        parts = [_codes_of_texts(chunk) for chunk in column.chunks]
        found = np.concatenate([np.empty(0, np.uint64), *parts])
    elif arrow.is_plain_number(type_):
        filled = column.fill_null(False if pa.types.is_boolean(type_) else 0)
        found = _codes_of_numbers(filled.to_numpy(zero_copy_only=False))
    elif pa.types.is_timestamp(type_) or pa.types.is_date(type_) or pa.types.is_duration(type_):
        found = _codes_of_times(column)
    else:
        found = _codes_of_objects(objects(column.to_pylist()))
    found[nulls] = _NULL_CODE
    return found


_MICROSECONDS: Final = {"s": 10**6, "ms": 10**3, "us": 1}


def _codes_of_times(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """By microseconds, modulo 2**64: the same time has one code in whichever unit."""
    type_ = column.type
    width = pa.int32() if pa.types.is_date32(type_) else pa.int64()
    counts = column.cast(width).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_date32(type_):
        return _mix((counts * (86400 * 10**6)).view(np.uint64))
    unit = "ms" if pa.types.is_date64(type_) else type_.unit
    counts = counts // 1000 if unit == "ns" else counts * _MICROSECONDS[unit]
    return _mix(counts.view(np.uint64))


def _codes_of_texts(chunk: pa.Array) -> npt.NDArray[np.uint64]:
    """A polynomial of each text's bytes, from one running sum over all of them."""
    chunk = chunk.cast(pa.large_binary())
    found = np.zeros(len(chunk), np.uint64)
    _, offsets, content = chunk.buffers()
    if content is None or not len(chunk):
        return _mix(found)
    ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
    data = np.frombuffer(content, np.uint8)
    start = 0
    while start < len(chunk):
        limit = ends[start] + _BYTES_AT_ONCE
        stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")) - 1)
        found[start:stop] = _polynomials(data, ends[start : stop + 1])
        start = stop
    return _mix(found)


def _polynomials(data: npt.NDArray[np.uint8], ends: Places) -> npt.NDArray[np.uint64]:
    content = _BYTE_CODES[data[ends[0] : ends[-1]]]
    powers = np.full(len(content) + 1, _STEP, np.uint64)
    powers[0] = 1
    back = np.full(len(content) + 1, _STEP_BACK, np.uint64)
    back[0] = 1
    sums = np.zeros(len(content) + 1, np.uint64)
    np.cumsum(content * np.cumprod(powers[:-1]), out=sums[1:])
    at = ends - ends[0]
    found: npt.NDArray[np.uint64] = sums[at[1:]] - sums[at[:-1]]
    found *= np.cumprod(back)[at[:-1]]
    return found


def _codes_of_objects(a: Array) -> npt.NDArray[np.uint64]:
    """Mixed objects: those of each type together, and one by one what is of no common type."""
    found = np.empty(len(a), np.uint64)
    places: dict[Any, list[int]] = {}
    for place, item in enumerate(a):
        places.setdefault(_family(item), []).append(place)
    for family, at in places.items():
        if family is type(None):
            found[at] = _NULL_CODE
        elif isinstance(family, int) and family:  # tuples of this length
            fields = [objects([a[place][field] for place in at]) for field in range(family)]
            found[at] = _codes_of_tuples(fields)
        elif family in _TOGETHER:
            found[at] = _codes_of_family(family, a[at].tolist())
        else:
            found[at] = [_code_of(item) for item in a[at]]
    return found


_TOGETHER: Final = (bool, int, float, str, bytes, datetime.datetime, datetime.date)


def _family(item: Any) -> Any:
    """Which items are hashed together: those of one type, tuples of one length, all others."""
    if item is None:
        return type(None)
    if isinstance(item, tuple) and type(item).__hash__ is tuple.__hash__:
        return len(item)
    return next((family for family in _TOGETHER if isinstance(item, family)), object)


def _codes_of_family(family: type, values: list[Any]) -> npt.NDArray[np.uint64] | list[int]:
    if family in (str, bytes):
        return _codes_of_column(keys.texts_column(objects(list(map(family, values)))))
    if family in (float, bool):
        return _codes_of_numbers(np.array(values, family))
    if family is int:
        try:
            return _codes_of_numbers(np.array(values, np.int64))
        except OverflowError:
            return list(map(_code_of_number, values))
    times = np.array(list(map(_in_utc, values)), "M8[us]")
    return _mix(times.view(np.int64).view(np.uint64))


def _in_utc(item: Any) -> Any:
    if isinstance(item, datetime.datetime) and item.tzinfo is not None:
        return item.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    return item


def _code_of(item: Any) -> int:
    """The hash of one key of any type."""
    try:
        hash(item)
    except TypeError as error:
        keys.refuse(item, error)
    if isinstance(item, (np.datetime64, np.timedelta64)):
        return int(codes(np.array([item]))[0])
    if isinstance(item, datetime.timedelta):
        return int(codes(np.array([item], "m8[us]"))[0])
    if isinstance(item, (numbers.Number, np.bool_)):
        return _code_of_number(item)
    if isinstance(item, frozenset):
        return int(_mix(np.array([sum(_code_of(part) for part in item) & _MASK], np.uint64))[0])
    if item != () and _family(item) is not object:  # inside a set
        return int(_codes_of_objects(objects([item]))[0])
    return _digest_code(item)


def _digest_code(item: Any) -> int:
    return int.from_bytes(Digest.of(item)[:8], "little")


def _code_of_number(item: Any) -> int:
    if isinstance(item, (complex, np.complexfloating)):
        if item.imag:
            parts = (np.array([item.real]), np.array([item.imag]))
            return int(_codes_of_tuples(parts)[0])
        item = item.real
    if item != item:
        return int(_NAN_CODE)
    try:
        whole = int(item)
    except (OverflowError, ValueError):  # an infinity
        return int(_codes_of_floats(np.array([float(item)]))[0])
    if whole != item:
        near = float(item)
        if near == item:
            return int(_codes_of_floats(np.array([near]))[0])
        return _digest_code(str(fractions.Fraction(*item.as_integer_ratio())))
    if -(2**63) <= whole < 2**63:
        return int(_codes_of_numbers(np.array([whole], np.int64))[0])
    if 0 <= whole < 2**64:
        return int(_codes_of_numbers(np.array([whole], np.uint64))[0])
    try:
        near = float(whole)
    except OverflowError:
        near = 0.0
    if near == whole:
        return int(_codes_of_floats(np.array([near]))[0])
    return _digest_code(whole)
