"""Keys of items: which are equal, what their hash is, in which order they come. Pure.

Keys are equal as in Python (1, 1.0, True and np.int32(1) are one key), and so are 0.0 and -0.0,
NaN and NaN, None and None (a null of Arrow's is None). In order, NaN comes after every number
and None after that, also where the order is descending.

Inside, keys are *key columns* (`Key`): an array, an Arrow column, or a tuple of those for keys
that are tuples, rows or structures. Columns of numbers, texts, bytes and times never become one
Python object per item; only what Arrow does not have goes through a dict.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clamor_ray.collection.data import arrow, blocks
from clamor_ray.collection.data.arrow import objects
from clamor_ray.collection.data.blocks import Array, Columns, Items

Key: TypeAlias = Union[Array, pa.ChunkedArray, "tuple[Key, ...]"]
By: TypeAlias = str | int | Sequence[str | int] | Callable[[Any], Any] | None
Places: TypeAlias = npt.NDArray[np.int64]

_NAN: Final = object()  # what NaN is inside a dict: NaN does not equal itself


def key_items(b: Items, key: By) -> Items:
    """The keys of a block's items, as a block.

    Args:
        b: the block.
        key: None (the item itself), the name of a table's column or several, the number of a
            tuple's field, or a function of an item.

    Raises:
        MissingColumnError: No such column or field.
    """
    if key is None:
        return b
    if callable(key):
        return blocks.from_items([key(item) for item in blocks.items(b)])
    if isinstance(key, (str, int)):
        return blocks.column(b, key)
    if not blocks.n_items(b) and not isinstance(b, pa.Table):
        return blocks.EMPTY
    return Columns(tuple(blocks.column(b, name) for name in key))


def key_columns(b: Items, key: By) -> Key:
    """The keys of a block's items, as key columns: `key_items`, but Arrow's stay Arrow's.

    Raises:
        MissingColumnError: No such column or field.
    """
    if isinstance(b, pa.Table) and isinstance(key, str):
        return arrow.column(b, key)
    if isinstance(b, pa.Table) and key is not None and not callable(key):
        if isinstance(key, int):
            return as_key(blocks.column(b, key))
        return tuple(arrow.column(b, name) for name in key)
    return as_key(key_items(b, key))


def as_key(b: Items) -> Key:
    """A block of keys as key columns: rows by their columns (in the order of the names)."""
    if isinstance(b, Columns):
        return tuple(map(as_key, b.fields))
    parts: tuple[Key, ...]
    if isinstance(b, pa.Table):
        parts = tuple(b.column(name) for name in sorted(arrow.unique_names(b)))
    elif b.ndim > 1:
        flat = b.reshape(len(b), math.prod(b.shape[1:]))
        parts = tuple(flat[:, i] for i in range(flat.shape[1]))
    elif b.dtype.names is not None:
        parts = tuple(as_key(b[name]) for name in b.dtype.names)
    else:
        return b
    return parts or (np.zeros(blocks.n_items(b), np.int8),)  # rows of nothing are all equal


def length(key: Key) -> int:
    """How many keys there are."""
    return length(key[0]) if isinstance(key, tuple) else len(key)


def take(key: Key, places: Places) -> Key:
    """The keys at these places."""
    if isinstance(key, tuple):
        return tuple(take(part, places) for part in key)
    return key[places] if isinstance(key, np.ndarray) else key.take(pa.array(places))


# -- what a column really is


def simple(key: Array | pa.ChunkedArray) -> Key:
    """A column in the plainest form: numbers as arrays, texts and bytes as Arrow's, objects only
    where there is no other way. The values stay equal to what they were, and unequal to others.
    """
    if isinstance(key, np.ndarray):
        return _simple_array(key)
    column = arrow.decoded(key)
    type_ = column.type
    if pa.types.is_struct(type_) and not column.null_count and type_.num_fields:
        return tuple(column.flatten())
    if isinstance(type_, pa.BaseExtensionType) or pa.types.is_nested(type_):
        return objects([_frozen(value) for value in arrow.values_of(column)])
    if column.null_count or not arrow.is_plain_number(type_):
        return column
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _frozen(value: Any) -> Any:
    """What Arrow has as a list or struct, as something that can be a key."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(part)) for name, part in sorted(value.items()))
    return value


def _simple_array(a: Array) -> Key:
    if a.dtype.kind in "biuf" and a.dtype.itemsize <= 8:
        return a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))
    if a.dtype.kind == "c":
        return (a.real, a.imag)
    if a.dtype.kind in "USMmV":
        try:
            return arrow.chunked(arrow.column_of(a, "key"))
        except TypeError:
            return objects(a.tolist())
    if a.dtype != object:
        return objects(list(a))  # longdouble
    return _simple_objects(a)


def _simple_objects(a: Array) -> Key:
    kinds = set(map(type, a))
    if len(kinds - {type(None)}) != 1:
        return a
    kind = next(iter(kinds - {type(None)}))
    if kind in (str, bytes):
        return texts_column(a)
    if type(None) in kinds:
        return a
    if kind in (int, float, bool):
        found = blocks.from_items(a.tolist())
        return found if isinstance(found, np.ndarray) else a
    if kind is tuple and len(a[0]) and len(set(map(len, a))) == 1:
        found = blocks.from_items(a.tolist())
        if isinstance(found, Columns) and not any(map(_is_frozen_by_block, found.fields)):
            return as_key(found)
    return a


def _is_frozen_by_block(b: Items) -> bool:
    """Dicts and arrays in tuples are no keys in Python, although their blocks could be."""
    if isinstance(b, Columns):
        return any(map(_is_frozen_by_block, b.fields))
    return isinstance(b, pa.Table) or b.ndim > 1


def texts_column(a: Array) -> pa.ChunkedArray:
    """An array of texts, or of bytes, and None as a column of Arrow's."""
    values = a.tolist()
    try:
        kind = pa.large_string() if any(type(v) is str for v in values) else pa.large_binary()
        return pa.chunked_array([pa.array(values, kind)])
    except UnicodeError:  # lone surrogates: no text of Arrow's, but bytes
        encoded = [None if v is None else v.encode("utf-8", "surrogatepass") for v in values]
        return pa.chunked_array([pa.array(encoded, pa.large_binary())])


# -- which are equal


@dataclass(frozen=True, eq=False)
class Groups:
    """Equal keys.

    Args:
        ids: for each item the number of its key, numbered from 0 as they appear.
        first: for each key the place of its first item.
    """

    ids: Places
    first: Places

    def __len__(self) -> int:
        return len(self.first)


def group(key: Key) -> Groups:
    """Which keys are equal.

    Raises:
        TypeError: A key cannot be hashed: which.
    """
    ids = _ids(key)
    first = np.empty(int(ids.max()) + 1 if len(ids) else 0, np.int64)
    first[ids[::-1]] = np.arange(len(ids) - 1, -1, -1)  # the last that is written is the first
    return Groups(ids, first)


def _ids(key: Key) -> Places:
    if not isinstance(key, tuple):
        found = simple(key)
        return _ids(found) if isinstance(found, tuple) else _ids_of_one(found)
    ids = _ids(key[0])
    for part in key[1:]:
        more = _ids(part)
        if len(ids):
            ids = _ids_of_one(ids * (int(more.max()) + 1) + more)
    return ids


def _ids_of_one(key: Array | pa.ChunkedArray) -> Places:
    if isinstance(key, np.ndarray):
        if key.dtype == object:
            return _ids_of_objects(key)
        column = pa.array(_one_zero(key))
    else:
        column = _one_zero_column(key).combine_chunks()
    encoded = column.dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices, np.int64)


def _one_zero(a: Array) -> Array:
    """Floats with one zero and one NaN, whatever their sign and bits."""
    if a.dtype.kind != "f":
        return a
    a = a + 0.0
    a[np.isnan(a)] = np.nan
    return a


def _one_zero_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_floating(column.type):
        return column
    floats = _one_zero(column.to_numpy(zero_copy_only=False).astype(np.float64))
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    return pa.chunked_array([pa.array(floats, mask=nulls)])


def _ids_of_objects(a: Array) -> Places:
    seen: dict[Hashable, int] = {}
    ids = np.empty(len(a), np.int64)
    for place, item in enumerate(a):
        try:
            ids[place] = seen.setdefault(_comparable(item), len(seen))
        except TypeError as error:
            refuse(item, error)
    return ids


def _comparable(item: Any) -> Hashable:
    if isinstance(item, tuple) and type(item).__hash__ is tuple.__hash__:
        return tuple(map(_comparable, item))
    if is_nan(item):
        return _NAN
    return item  # type: ignore[no-any-return]


def is_nan(item: Any) -> bool:
    """Whether it is a number, or a time, that does not equal itself."""
    if isinstance(item, (float, np.floating, np.datetime64, np.timedelta64, decimal.Decimal)):
        return bool(item != item)
    return False


def refuse(item: Any, error: TypeError) -> NoReturn:
    """Raises a TypeError that names the item."""
    raise TypeError(
        f"{item!r:.100} is {type(item).__qualname__} and cannot be a key ({error}): make it a "
        f"number, text, bytes or a tuple of those first."
    ) from error
