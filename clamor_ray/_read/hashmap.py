"""`HashMap`: a hash map in the global address space, looked up where it lies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.client import BLOCK_SHIFT
from clamor_ray._objects.global_array import plain_or_same
from clamor_ray._objects.hashkeys import is_one
from clamor_ray._objects.hashtable import Table
from clamor_ray._objects.ranges import merge
from clamor_ray._read import opener
from clamor_ray._read.prefetch import split_by_mapping
from clamor_ray._read.ref import GlobalRef
from clamor_ray._redundancy.levels import LevelName, level_of

Array = npt.NDArray[Any]


def table_of(obj: Any) -> Table:
    """The table in what a map's reference opens to.

    Raises:
        HashMapCorruptError: It is something else.
    """
    if not isinstance(obj, dict) or not {"header", "slots"} <= obj.keys():
        raise errors.HashMapCorruptError(
            "This is not a hash map of this library: its type is "
            f"{type(plain_or_same(obj)).__qualname__}."
        )
    return Table(obj["header"], obj["slots"])


class _Lookups(ABC):
    """What a map and a map under change have in common: lookups, in the table that each opens."""

    @abstractmethod
    def _opened(self) -> Table: ...

    def get(self, keys: Any, default: Any = None) -> Any:
        """The values of keys, or the value of one key.

        Safe from any thread; the GIL is released while it looks.

        Args:
            keys: one key, or an array or a list of them, of any shape.
            default: the value of keys that are not there, anything that NumPy can assign to one;
                None: every key must be there.

        Returns:
            For one key its value (a scalar, or an array of the row's shape), else an array of the
            shape of keys + row; a copy.

        Raises:
            MissingKeyError: A key is not there; also a KeyError. It names the first.
            KeyTypeError: Keys of another type than the map's; also a TypeError.

        Example:
            >>> m = clamor.HashMap.build(np.arange(1000), np.arange(1000) ** 2)
            >>> m.get(np.array([3, 1, 2000]), default=0)
            array([9, 1, 0])
        """
        table = self._opened()
        out = table.get(table.keys_of(keys), default)
        return out[()] if is_one(keys) else out

    def contains(self, keys: Any) -> Any:
        """Tells which of the keys are there.

        Args:
            keys: one key, or an array or a list of them, of any shape.

        Returns:
            Booleans of the shape of keys; a bool for one key.

        Raises:
            KeyTypeError: Keys of another type than the map's.

        Example:
            >>> m = clamor.HashMap.build(np.arange(1000), np.arange(1000) ** 2)
            >>> m.contains([3, 2000])
            array([ True, False])
        """
        table = self._opened()
        found = table.contains(table.keys_of(keys))
        return bool(found) if is_one(keys) else found

    def __contains__(self, keys: Any) -> bool:
        """Whether a key is there; of an array, whether all of them are."""
        return bool(np.all(self.contains(keys)))

    def __getitem__(self, keys: Any) -> Any:
        """As `get` without a default."""
        return self.get(keys)

    def __len__(self) -> int:
        return len(self._opened())

    @property
    def capacity(self) -> int:
        """How many keys it can hold: half the number of its slots."""
        return self._opened().capacity

    @property
    def key_dtype(self) -> np.dtype[Any]:
        """dtype of a key: int64 or bytes of one width."""
        return self._opened().key_dtype

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """dtype of a value, or of the elements of its row."""
        return self._opened().value_dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one value: () for scalars and structured values."""
        return self._opened().row_shape

    def keys(self) -> Array:
        """All keys, in the order of the table. Reads all of it.

        Returns:
            A copy, shape (len,).

        Raises:
            FreedError, HomeLostError, SnapshotExpired, ...: As `GlobalRef.get`.
            HashMapCorruptError: The reference is not of a hash map.

        Example:
            >>> sorted(clamor.HashMap.build([3, 1, 2], [0.3, 0.1, 0.2]).keys().tolist())
            [1, 2, 3]
        """
        table = self._opened()
        found: Array = table.slots["key"][table.occupied]
        return found

    def values(self) -> Array:
        """All values, in the order of `keys`. Reads all of the table.

        Returns:
            A copy, shape (len,) + row.

        Raises:
            FreedError, HomeLostError, SnapshotExpired, ...: As `GlobalRef.get`.
            HashMapCorruptError: The reference is not of a hash map.

        Example:
            >>> sorted(clamor.HashMap.build([3, 1, 2], [0.3, 0.1, 0.2]).values().tolist())
            [0.1, 0.2, 0.3]
        """
        table = self._opened()
        found: Array = table.slots["value"][table.occupied]
        return found

    def items(self) -> tuple[Array, Array]:
        """All keys and their values, index by index. Reads all of the table.

        Returns:
            `keys()` and `values()`.

        Raises:
            FreedError, HomeLostError, SnapshotExpired, ...: As `GlobalRef.get`.
            HashMapCorruptError: The reference is not of a hash map.

        Example:
            >>> keys, values = clamor.HashMap.build([3, 1], [0.3, 0.1]).items()
            >>> dict(zip(keys.tolist(), values.tolist())) == {3: 0.3, 1: 0.1}
            True
        """
        table = self._opened()
        taken = table.occupied
        return table.slots["key"][taken], table.slots["value"][taken]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys().tolist())


class HashMap(_Lookups):
    r"""A hash map from int64 or fixed-width bytes to plain data, in the global address space.

    The map lies in one region; a lookup touches one block of it, rarely two, and only blocks that
    are touched come to a node. Pickled, it is its reference: a few hundred bytes, so it may be
    passed to tasks and actors, alone or inside other things, and arrives as a `HashMap` of the
    version that was passed. It is changed in transactions (`with clamor.update(m)`), of which only
    changed blocks travel.

    A key's place is SplitMix64's output function of it (bytes are folded in, 8 at a time), the
    same in every process and on every machine. Probing is linear over a power of two of slots, of
    which at most half are taken. Erasing leaves no tombstones.

    Keys of bytes are padded with NULs, as NumPy has it: b"ab" and b"ab\0" are one key.

    Made by `HashMap.build`; `HashMap(ref)` makes another handle of a map that exists.

    Args:
        ref: of a map that `build` made.

    Raises:
        TypeError: It is no `GlobalRef`.

    Example:
        >>> m = clamor.HashMap.build(np.arange(1000), np.ones(1000))
        >>> m.get([17, 4])
        array([1., 1.])
    """

    def __init__(self, ref: GlobalRef[Any]) -> None:
        if not isinstance(ref, GlobalRef):
            raise TypeError(
                f"HashMap takes the GlobalRef of a map, not {type(ref).__qualname__}; "
                "HashMap.build(keys, values) makes a new one"
            )
        self._ref = ref
        self._cached: tuple[int, Table] | None = None

    @classmethod
    def build(
        cls,
        keys: Any,
        values: Any,
        *,
        capacity: int | None = None,
        name: str | None = None,
        home: Literal["spread"] | None = None,
        redundancy: LevelName | None = None,
        copies: int = 2,
        spill: bool = False,
    ) -> HashMap:
        """Makes a map and places it in the global address space.

        Args:
            keys: shape (n,), integers or bytes ("S12"). The width of bytes is the map's: keys
                that are set later may not be longer (`keys.astype("S32")` makes room). Of equal
                keys the last one stays.
            values: shape (n,) + row: any plain data, structured dtypes included.
            capacity: for how many keys there must be room; a quarter more than n where it is
                None. It is rounded up: the map has a power of two of slots, at least twice as
                many, each of 1 byte + key + value, and it never grows.
            name, home, redundancy, copies, spill: as `clamor.put`'s;
                `clamor.HashMap(clamor.open(name))` is the map.

        Returns:
            The map, at version 0.

        Raises:
            KeyTypeError: Keys are neither integers that fit int64 nor bytes.
            TypeError: Values hold Python objects.
            ValueError: Keys and values are not of one length.
            HashMapFullError: There are more keys than `capacity` makes room for.
            NotInitializedError, NameTakenError, OutOfMemoryError, NoSpaceError: As `clamor.put`.

        Example:
            >>> words = np.array([b"page", b"block"], "S16")
            >>> m = clamor.HashMap.build(words, [1, 2], capacity=1000)
            >>> int(m[b"block"])
            2
        """
        opener.current()  # without clamor.init() this is said before a long build
        table = Table.build(np.asarray(keys), np.asarray(values), capacity)
        parts = {"header": table.header, "slots": table.slots}
        level = level_of(home, redundancy, copies, spill=spill)
        ref = opener.given().with_current(
            lambda session: session.named(name, lambda: session.creator.put(parts, level=level))
        )
        return cls(ref)

    @property
    def ref(self) -> GlobalRef[Any]:
        """The reference of the map's region, e.g. for `clamor.free`."""
        return self._ref

    def _opened(self) -> Table:
        self._ref._check_not_freed()
        # The reference moves on with commits of this process; other threads may look meanwhile.
        version, cached = self._ref.version, self._cached
        if cached is not None and cached[0] == version:
            return cached[1]
        # Let go of first: while an older version is held, the node must keep two.
        cached = self._cached = None
        table = table_of(self._ref._open(scattered=True)[0])
        self._cached = (version, table)
        return table

    def prefetch(self, keys: Any, *, wait: bool = True, timeout: float | None = None) -> None:
        """Fetches the blocks where the search for these keys begins, in one request.

        Worth it before many lookups in a map of which little is on this node: `get` fetches its
        blocks one after the other. Of blocks that are here nothing is fetched.

        Args:
            keys: one key or an array of them.
            wait: return when the blocks are here; otherwise when the request is taken, to look up
                one batch while the next is on its way.
            timeout: seconds to wait; CLAMOR_FAULT_TIMEOUT_S where it is None.

        Raises:
            KeyTypeError: Keys of another type than the map's.
            PrefetchTimeoutError: Not all blocks came in time; those that came stay.
            HomeLostError: The node that held them is gone.

        Example:
            >>> m = clamor.HashMap.build(np.arange(1000), np.arange(1000) ** 2)
            >>> m.prefetch(np.arange(100))
            >>> m.get([7])
            array([49])
        """
        table = self._opened()
        wanted = table.keys_of(keys)
        if self._ref._inline or wanted.size == 0:
            return
        session = opener.current(self._ref._scope)
        first = (table.starts(wanted).reshape(-1) + table.slots.ctypes.data).astype(np.int64)
        end = ((first + table.slots.dtype.itemsize - 1) >> BLOCK_SHIFT) + 1
        spans = merge(first >> BLOCK_SHIFT, end)
        timeout_s = session.config.patience_s if timeout is None else timeout
        deadline = time.monotonic() + timeout_s
        for mapping, runs in split_by_mapping(spans, session.leases).items():
            left_s = max(0.0, deadline - time.monotonic())
            session.client.prefetch(mapping.id, runs, wait=wait, timeout_s=left_s)

    # -- versions

    @property
    def version(self) -> int:
        """How many commits the map has behind it."""
        return self._ref.version

    def at(self, version: int) -> HashMap:
        """The map at an old (or the newest) version, which never moves.

        Args:
            version: number of the version, from 0 on.

        Returns:
            A map that is frozen there.

        Raises:
            NoVersionError: There is no such version (yet).
            SnapshotExpired, FreedError: As `GlobalRef.at`.

        Example:
            >>> m = clamor.HashMap.build(np.arange(1000), np.arange(1000) ** 2)
            >>> with clamor.update(m) as t:
            ...     t[3] = 0
            >>> int(m.at(0)[3]), int(m[3])
            (9, 0)
        """
        ref: Any = self._ref
        return HashMap(ref.at(version))

    def snapshot(self) -> HashMap:
        """Freezes the version that this map reads now.

        Returns:
            A map that is frozen there.

        Example:
            >>> m = clamor.HashMap.build(np.arange(1000), np.arange(1000) ** 2)
            >>> before = m.snapshot()
            >>> with clamor.update(m) as t:
            ...     t[3] = 0
            >>> int(before[3]), int(m[3])
            (9, 0)
        """
        ref: Any = self._ref
        return HashMap(ref.snapshot())

    def refresh(self) -> HashMap:
        """Moves this map to the newest version and returns it.

        Returns:
            This map.

        Raises:
            ValueError: It is a snapshot.
            FreedError, NotInitializedError, ...: As `GlobalRef.refresh`.

        Example:
            >>> import copy
            >>> m = clamor.HashMap.build(np.arange(1000), np.arange(1000) ** 2)
            >>> other = clamor.HashMap(copy.copy(m.ref))
            >>> with clamor.update(m) as t:
            ...     t[3] = 0
            >>> int(other[3]), int(other.refresh()[3])
            (9, 0)
        """
        ref: Any = self._ref
        ref.refresh()
        return self

    # -- what transactions ask

    def __clamor_ref__(self) -> GlobalRef[Any]:
        """The reference that a commit moves on."""
        return self._ref

    def __clamor_open__(self, obj: Any) -> MutableHashMap:
        """What `clamor.update` gives its block, over private copy-on-write memory."""
        return MutableHashMap(obj)

    # -- as a value

    def __reduce__(self) -> tuple[Any, ...]:
        return HashMap, (self._ref,)

    def __repr__(self) -> str:
        return f"HashMap({self._ref!r})"


class MutableHashMap(_Lookups):
    """A hash map inside `with clamor.update(m)`: private until the block ends, then committed.

    Its own lookups see at once what is set or erased. Two transactions that insert or erase always
    conflict; those that only give new values to keys that are there conflict where they write the
    same block. Not safe to change from several threads at once.

    Args:
        obj: what the map's reference opens to; `clamor.update` passes it.

    Example:
        >>> m = clamor.HashMap.build([4, 5], [0.4, 0.5], capacity=100)
        >>> with clamor.update(m) as t:
        ...     t[17] = 0.5
        ...     t.erase(4)
        >>> sorted(m)
        [5, 17]
    """

    def __init__(self, obj: Any) -> None:
        self._table = table_of(obj)

    def _opened(self) -> Table:
        return self._table

    def __setitem__(self, keys: Any, values: Any) -> None:
        """As `set`."""
        self._table.set(keys, values)

    def set(self, keys: Any, values: Any) -> None:
        """Sets keys to values; those that are new are inserted, of equal ones the last stays.

        A value that is there already is not written again.

        Args:
            keys: one key or an array of them.
            values: shape of keys + row, or what NumPy can broadcast to that.

        Raises:
            HashMapFullError: There is no room for all of the new keys. Nothing was set.
            KeyTypeError: Keys of another type than the map's.
            ValueError: Values do not fit.

        Example:
            >>> m = clamor.HashMap.build([4, 5], [0.4, 0.5], capacity=100)
            >>> with clamor.update(m) as t:
            ...     t.set([5, 6], [5.5, 6.5])
            >>> m.get([4, 5, 6])
            array([0.4, 5.5, 6.5])
        """
        self._table.set(keys, values)

    def update(self, keys: Any, values: Any) -> None:
        """Sets keys to values: another name of `set`.

        Args:
            keys: one key or an array of them.
            values: shape of keys + row, or what NumPy can broadcast to that.

        Raises:
            HashMapFullError, KeyTypeError, ValueError: As `set`.

        Example:
            >>> m = clamor.HashMap.build([4, 5], [0.4, 0.5], capacity=100)
            >>> with clamor.update(m) as t:
            ...     t.update([5, 6], 0.0)
            >>> m.get([4, 5, 6])
            array([0.4, 0. , 0. ])
        """
        self._table.set(keys, values)

    def erase(self, keys: Any) -> None:
        """Erases a key, or all keys of an array.

        Args:
            keys: one key or an array of them.

        Raises:
            MissingKeyError: One is not there; also a KeyError. Nothing was erased.
            KeyTypeError: Keys of another type than the map's.

        Example:
            >>> m = clamor.HashMap.build([4, 5], [0.4, 0.5], capacity=100)
            >>> with clamor.update(m) as t:
            ...     t.erase([4])
            >>> 4 in m, len(m)
            (False, 1)
        """
        self._table.erase(keys)

    def __delitem__(self, keys: Any) -> None:
        """As `erase`."""
        self._table.erase(keys)

    def __repr__(self) -> str:
        return f"MutableHashMap({len(self)} of {self.capacity} keys)"
