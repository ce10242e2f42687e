"""The table of a hash map over two plain arrays, wherever they lie. Pure: no Ray, no session.

A table is a header (eight uint64) and an array of a power of two of packed records, each a tag
byte, a key and its value; `pagecache_c/kernels/hashmap.c` looks things up in it. Both come from
memory that others may have written: they are checked against each other before C sees them, and C
checks again what it is told.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import PC_ERR_PROTOCOL, PC_ERR_RANGE, c, check
from clamor_ray._objects.hashkeys import check_key_dtype, keys_of

MAGIC: Final = 0x70616D68_726D6C63  # "clmrhmap", little-endian
FORMAT: Final = 1
HEADER_WORDS: Final = 8
# What the words of a header are. Any change of the set of keys counts in CHANGES, so that two
# transactions that both insert or erase always meet in this block, also where N stays the same.
HEAD_MAGIC, HEAD_FORMAT, HEAD_SLOTS, HEAD_N, HEAD_CHANGES = range(5)

MIN_SLOTS: Final = 8
MAX_SLOTS: Final = 1 << 40
KIND_INT64: Final = 1
KIND_BYTES: Final = 2

Array = npt.NDArray[Any]


def slots_for(capacity: int) -> int:
    """The least power of two of slots that `capacity` keys fill to no more than a half.

    Example:
        >>> slots_for(1000)
        2048
    """
    return max(MIN_SLOTS, 1 << (2 * capacity - 1).bit_length())


def default_capacity(n_keys: int) -> int:
    """Room for a quarter more, and a few."""
    return n_keys + n_keys // 4 + 16


def record_dtype(key: np.dtype[Any], value: np.dtype[Any], row: tuple[int, ...]) -> np.dtype[Any]:
    """A slot: packed, because a record that ends earlier crosses fewer cache lines and blocks."""
    return np.dtype([("tag", np.uint8), ("key", key), ("value", value, row)])


def value_dtype_of(values: Array) -> np.dtype[Any]:
    """The dtype of values, if they are plain data.

    Raises:
        TypeError: They hold Python objects, or nothing.
    """
    dtype = values.dtype
    if dtype.hasobject or type(dtype).__name__ == "StringDType":
        raise TypeError(
            f"values are {dtype}: a hash map holds plain data, not Python objects. "
            "Use a number, a fixed-width text or bytes ('U12', 'S12') or a structured dtype."
        )
    if dtype.itemsize == 0 or 0 in values.shape[1:]:
        raise TypeError(f"values of {dtype} with rows of {values.shape[1:]} have no bytes")
    return dtype


class Table:
    """A hash table over its header and its slots; lookups, and changes where they are writable.

    Args:
        header: uint64, shape (8,).
        slots: structured (tag, key, value), shape (a power of two,).

    Raises:
        HashMapCorruptError: They are no table, or do not belong together.

    Lookups are safe from any thread as long as nobody changes the table.
    """

    def __init__(self, header: Array, slots: Array) -> None:
        self.header, self.slots = header, slots
        _check_arrays(header, slots)
        fields = slots.dtype.fields
        assert fields is not None  # checked above
        self.key_dtype: np.dtype[Any] = fields["key"][0]
        value = fields["value"][0]
        self.value_dtype: np.dtype[Any] = value.base
        self.row_shape: tuple[int, ...] = value.shape
        self._value_bytes = value.itemsize

    @classmethod
    def build(cls, keys: Array, values: Array, capacity: int | None) -> Table:
        """As `HashMap.build`, in private memory."""
        check_key_dtype(keys.dtype)
        if keys.ndim != 1:
            raise ValueError(f"keys are one-dimensional, not of shape {keys.shape}")
        if values.ndim == 0 or len(values) != len(keys):
            raise ValueError(f"{len(keys)} keys need as many values, not shape {values.shape}")
        value_dtype = value_dtype_of(values)
        if capacity is None:
            capacity = default_capacity(len(keys))
        n_slots = slots_for(max(1, capacity))
        if capacity < 0 or n_slots > MAX_SLOTS:
            raise ValueError(f"capacity is from 0 to {MAX_SLOTS // 2}, not {capacity}")
        key_dtype = np.dtype(np.int64) if keys.dtype.kind in "iu" else keys.dtype
        slots = np.zeros(n_slots, record_dtype(key_dtype, value_dtype, values.shape[1:]))
        header = np.zeros(HEADER_WORDS, np.uint64)
        header[[HEAD_MAGIC, HEAD_FORMAT, HEAD_SLOTS]] = MAGIC, FORMAT, n_slots
        table = cls(header, slots)
        table.set(keys, values)
        header[HEAD_CHANGES] = 0
        return table

    # -- what it is

    def __len__(self) -> int:
        return int(self.header[HEAD_N])

    @property
    def capacity(self) -> int:
        """How many keys it holds at most: half of its slots."""
        return len(self.slots) // 2

    @property
    def occupied(self) -> npt.NDArray[np.bool_]:
        """Which slots hold a key. Reads all of them."""
        taken: npt.NDArray[np.bool_] = self.slots["tag"] != 0
        if int(np.count_nonzero(taken)) != len(self):
            raise errors.HashMapCorruptError(
                f"The hash map says that it holds {len(self)} keys, but "
                f"{np.count_nonzero(taken)} of its slots are taken."
            )
        return taken

    # -- lookups

    def keys_of(self, keys: Any) -> Array:
        """Keys as an array of the table's own dtype, any shape; see `_objects.hashkeys`."""
        return keys_of(keys, self.key_dtype)

    def contains(self, keys: Array) -> npt.NDArray[np.bool_]:
        """Which of the keys (from `keys_of`) are there; their shape."""
        return self._get(keys, None)

    def get(self, keys: Array, default: Any) -> Array:
        """The keys' values, shape of keys + row.

        Raises:
            MissingKeyError: `default` is None, and a key is not there.
        """
        out: Array = np.empty(keys.shape + self.row_shape, self.value_dtype)
        if default is not None:
            out[...] = default
        found = self._get(keys, out)
        if default is None and not found.all():
            raise self._missing(keys, found)
        return out

    def _get(self, keys: Array, out: Array | None) -> npt.NDArray[np.bool_]:
        found = np.empty(keys.shape, np.bool_)
        pointer = c.ffi.cast("uint8_t *", found.ctypes.data)
        self._call(c.lib.pc_hash_get, keys, out, pointer, found.nbytes)
        return found

    def _missing(self, keys: Array, found: npt.NDArray[np.bool_]) -> errors.MissingKeyError:
        absent = keys.reshape(-1)[int(np.argmin(found.reshape(-1)))]
        n_absent = found.size - int(np.count_nonzero(found))
        more = f" (and {n_absent - 1} more of the {found.size})" if n_absent > 1 else ""
        return errors.MissingKeyError(f"The hash map has no key {absent.item()!r}{more}.")

    def starts(self, keys: Array) -> npt.NDArray[np.uint64]:
        """Offsets in `slots`, in bytes, where the search for each key begins. Reads no slot."""
        out = np.empty(keys.shape, np.uint64)
        pointer = c.ffi.cast("uint64_t *", out.ctypes.data)
        self._call(c.lib.pc_hash_starts, keys, None, pointer, out.nbytes)
        return out

    # -- changes

    def set(self, keys: Any, values: Any) -> None:
        """Sets keys to values, all of them or, where there is no room, none.

        Raises:
            HashMapFullError, KeyTypeError; ValueError where values do not fit.
        """
        keys = self.keys_of(keys)
        self._check_writable()
        shape = keys.shape + self.row_shape
        rows = np.ascontiguousarray(
            np.broadcast_to(np.asarray(values, self.value_dtype), shape)
        ).reshape(shape)
        room = self.capacity - len(self)
        # Counted before anything is written; most of the time without a look.
        if keys.size > room:
            absent = keys[~self.contains(keys)]
            n_new = len(absent) if len(absent) <= room else len(np.unique(absent))
            if n_new > room:
                raise self._full(n_new)
        self._count(self._call(c.lib.pc_hash_set, keys, rows, room), 0)

    def erase(self, keys: Any) -> None:
        """Erases keys, all of them or, where one is not there, none.

        Raises:
            MissingKeyError, KeyTypeError.
        """
        keys = self.keys_of(keys)
        self._check_writable()
        found = self.contains(keys)
        if not found.all():
            raise self._missing(keys, found)
        self._count(0, self._call(c.lib.pc_hash_erase, keys, None))

    def _count(self, n_added: int, n_erased: int) -> None:
        if n_added or n_erased:
            self.header[HEAD_N] = len(self) + n_added - n_erased
            self.header[HEAD_CHANGES] += np.uint64(1)

    def _full(self, n_new: int) -> errors.HashMapFullError:
        return errors.HashMapFullError(
            f"The hash map holds {len(self)} keys and has a capacity of {self.capacity}: "
            f"{n_new} new ones do not fit. Nothing was changed."
        )

    def _check_writable(self) -> None:
        if not (self.slots.flags.writeable and self.header.flags.writeable):
            raise ValueError("this hash map is read-only: change it inside `with clamor.update(m)`")

    # -- C

    def _call(self, function: Any, keys: Array, values: Array | None, *rest: Any) -> int:
        ffi = c.ffi
        table = ffi.new("struct pc_hash_table *")
        table.slots = ffi.cast("void *", self.slots.ctypes.data)
        table.slots_bytes = self.slots.nbytes
        table.n_slots = len(self.slots)
        table.value_bytes = self._value_bytes
        table.key_kind = KIND_INT64 if self.key_dtype.kind == "i" else KIND_BYTES
        table.key_bytes = self.key_dtype.itemsize
        batch = ffi.new("struct pc_hash_batch *")
        batch.keys = ffi.cast("void *", keys.ctypes.data)
        batch.keys_bytes = keys.nbytes
        batch.n_keys = keys.size
        if values is not None:
            batch.values = ffi.cast("void *", values.ctypes.data)
            batch.values_bytes = values.nbytes
        code = int(function(table, batch, *rest))
        if code in (PC_ERR_PROTOCOL, PC_ERR_RANGE):
            detail = ffi.string(c.lib.pc_last_message()).decode("utf-8", "replace")
            raise errors.HashMapCorruptError(f"The hash map cannot be read: {detail}.", code=code)
        return check(code)


def _check_arrays(header: Any, slots: Any) -> None:
    """That these are the two arrays of one table, before anything is believed of them."""

    def wrong(what: str) -> errors.HashMapCorruptError:
        return errors.HashMapCorruptError(f"This is not a hash map of this library: {what}.")

    if not (
        isinstance(header, np.ndarray)
        and header.dtype == np.uint64
        and header.shape == (HEADER_WORDS,)
    ):
        raise wrong("its header is not eight uint64")
    if int(header[HEAD_MAGIC]) != MAGIC:
        raise wrong("its header does not begin with the mark of one")
    if int(header[HEAD_FORMAT]) != FORMAT:
        raise wrong(f"it has format {int(header[HEAD_FORMAT])}, not {FORMAT}")
    if not isinstance(slots, np.ndarray) or slots.ndim != 1 or not slots.flags.c_contiguous:
        raise wrong("its slots are not an array in one piece")
    fields = slots.dtype.fields
    if fields is None or slots.dtype.names != ("tag", "key", "value"):
        raise wrong(f"its slots are {slots.dtype}, not records of tag, key and value")
    key, value = fields["key"][0], fields["value"][0]
    if (key != np.int64 and key.kind != "S") or key.itemsize == 0 or value.hasobject:
        raise wrong(f"its keys are {key}, its values {value}")
    if slots.dtype != record_dtype(key, value.base, value.shape):
        raise wrong("its records are not packed")
    n_slots = int(header[HEAD_SLOTS])
    if n_slots != len(slots) or n_slots < MIN_SLOTS or n_slots & (n_slots - 1):
        raise wrong(f"its header says {n_slots} slots, and there are {len(slots)}")
    if int(header[HEAD_N]) > n_slots // 2:
        raise wrong(f"its header says {int(header[HEAD_N])} keys in {n_slots} slots")
