"""The partitions of a node: objects of one process, or bytes that all its processes share. Pure.

A partition goes to another worker, or to a checkpoint, as a `Packed`: its pickle, and the large
buffers of it apart.

`SharedPartitions` keeps these bytes in the matcher's memory. Each process makes the object over
them once, and arrays are views of them: so a task changes an array in place, and the next one, in
any process, finds that. What a function returns, and what else of an object it has changed, is
packed again when its task ends. A process knows by a generation, a number that changes with each
packing, whether its object is the newest.
"""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import cloudpickle
import numpy as np

from clamor_ray._recipes.matching.shared import SharedMatcher
from clamor_ray._recipes.program.tables import StageInfo, Tables

Key = tuple[int, int]  # dataset and index

ALIGN: Final = 64
SMALL_BYTES: Final = 4096  # is copied rather than given new memory
HEAD: Final = struct.Struct("=QQ")  # bytes of the pickle, and buffers
BUFFER: Final = struct.Struct("=QQ")  # offset and bytes
# Nobody can change them in place.
UNCHANGING: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})


@dataclass(frozen=True)
class Packed:
    """A partition as bytes.

    Args:
        stream: Its pickle.
        buffers: Of arrays, in the order in which the pickle names them.
    """

    stream: bytes
    buffers: tuple[bytes | memoryview, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """So that buffers are sent from where they are (`actors/recipes/frames.py`)."""
        buffers = tuple(map(pickle.PickleBuffer, self.buffers)) if protocol >= 5 else self.buffers
        return Packed, (self.stream, buffers)

    def value(self) -> Any:
        """The object. Its arrays may be changed."""
        return pickle.loads(self.stream, buffers=[bytearray(each) for each in self.buffers])


class Partitions(Protocol):
    """Of one worker, by dataset and index. While a task runs nobody else touches its partitions."""

    def put(self, key: Key, value: Any) -> None:
        """It is here from now on."""

    def put_packed(self, key: Key, packed: Packed) -> None:
        """As `put`."""

    def pack(self, key: Key) -> Packed:
        """What it is now."""

    def value(self, key: Key) -> Any:
        """The object; KeyError: it is not here."""

    def remove(self, key: Key) -> None:
        """It is not here any more."""

    def values(self, stage: StageInfo, index: int) -> list[Any]:
        """What a task of the stage gets."""

    def keep(
        self, stage: StageInfo, index: int, values: Sequence[Any], results: Mapping[int, Any]
    ) -> None:
        """A task has run: what it was given, and what its function has returned, by dataset."""


def packed(value: Any) -> tuple[bytes, list[memoryview]]:
    """Its pickle, and the buffers of it, which are the object's own memory.

    Raises:
        Exception: Any of the value's.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError):
        # A class of the user's script is not importable in a worker. By value takes longer.
        buffers.clear()
        stream = bytes(cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append))
    return stream, [each.raw() for each in buffers]


class LocalPartitions:
    """Objects of this process, as they are. See `Partitions`."""

    def __init__(self) -> None:
        self._values: dict[Key, Any] = {}

    def put(self, key: Key, value: Any) -> None:
        self._values[key] = value

    def put_packed(self, key: Key, packed: Packed) -> None:
        self._values[key] = packed.value()

    def pack(self, key: Key) -> Packed:
        stream, buffers = packed(self._values[key])
        return Packed(stream, tuple(map(bytes, buffers)))

    def value(self, key: Key) -> Any:
        return self._values[key]

    def remove(self, key: Key) -> None:
        del self._values[key]

    def values(self, stage: StageInfo, index: int) -> list[Any]:
        return [self._values[access.dataset, index] for access in stage.accesses]

    def keep(
        self, stage: StageInfo, index: int, values: Sequence[Any], results: Mapping[int, Any]
    ) -> None:
        for dataset, value in _apart(stage, values, results).items():
            self._values[dataset, index] = value


class _Seen(NamedTuple):
    """What this process has made of a partition.

    Args:
        generation: Of its bytes.
        value: The object.
        stream: Its pickle.
        buffers: Addresses and lengths of its buffers.
        array: Shape, type and strides of an array, which is all of it.
    """

    generation: int
    value: Any
    stream: bytes
    buffers: tuple[tuple[int, int], ...]
    array: tuple[Any, ...] | None


class SharedPartitions:
    """Bytes that all processes of the node share. See the file's head, and `Partitions`.

    Args:
        tables: The program.
        matcher: Of the node.
    """

    def __init__(self, tables: Tables, matcher: SharedMatcher) -> None:
        self._memory = matcher.memory
        self._generations = self._memory.generations()
        self._seen: dict[Key, _Seen] = {}
        groups = [tables.datasets_of(group) for group in range(tables.n_groups)]
        self._first: dict[int, int] = {}  # slots: where the generations of a dataset begin
        self._step: dict[int, int] = {}
        first = 0
        for group, datasets in enumerate(groups):
            for place, dataset in enumerate(datasets):
                self._first[dataset] = first + place
                self._step[dataset] = len(datasets)
            first += tables.n_slices(group) * len(datasets)

    def put(self, key: Key, value: Any) -> None:
        stream, buffers = packed(value)
        self._write(key, stream, buffers)

    def put_packed(self, key: Key, packed: Packed) -> None:
        self._write(key, packed.stream, packed.buffers)

    def pack(self, key: Key) -> Packed:
        _, _, memory = self._bytes(key)
        stream, places = _layout(memory)
        return Packed(stream, tuple(bytes(memory[at : at + n]) for at, n in places))

    def value(self, key: Key) -> Any:
        generation = self._generations[self._first[key[0]] + key[1] * self._step[key[0]]]
        seen = self._seen.get(key)
        if seen is not None and seen.generation == generation:
            return seen.value
        return self._read(key).value

    def remove(self, key: Key) -> None:
        self._seen.pop(key, None)
        self._memory.set_memory(*key, 0, 0, 0, 0)

    def values(self, stage: StageInfo, index: int) -> list[Any]:
        return [self.value((access.dataset, index)) for access in stage.accesses]

    def keep(
        self, stage: StageInfo, index: int, values: Sequence[Any], results: Mapping[int, Any]
    ) -> None:
        results = _apart(stage, values, results)  # all of them, before any is written
        for access, given in zip(stage.accesses, values, strict=True):
            if access.is_write:
                dataset = access.dataset
                value = results.get(dataset, given)
                if value is not given or type(value) not in UNCHANGING:
                    self._keep((dataset, index), value)

    # -- inside

    def _keep(self, key: Key, value: Any) -> None:
        seen = self._seen[key]
        if seen.array is not None and type(value) is np.ndarray and _kind(value) == seen.array:
            if value is seen.value:
                return
            if seen.value.flags.writeable:  # not what came from a read-only buffer
                np.copyto(seen.value, value)
                return
        stream, buffers = packed(value)
        addresses = tuple((_address(each), each.nbytes) for each in buffers)
        if stream == seen.stream and addresses == seen.buffers:
            return
        self._seen.pop(key, None)
        self._write(key, stream, buffers)

    def _bytes(self, key: Key) -> tuple[int, int, memoryview]:
        found = self._memory.memory_of(*key)
        if found is None:
            raise KeyError(key)
        return found

    def _read(self, key: Key) -> _Seen:
        generation, address, memory = self._bytes(key)
        stream, places = _layout(memory)
        value = pickle.loads(stream, buffers=[memory[at : at + n] for at, n in places])
        seen = _Seen(
            generation=generation,
            value=value,
            stream=stream,
            buffers=tuple((address + at, n) for at, n in places),
            array=_kind(value) if type(value) is np.ndarray and len(places) == 1 else None,
        )
        self._seen[key] = seen
        return seen

    def _write(self, key: Key, stream: bytes, buffers: Iterable[Any]) -> None:
        views = [memoryview(each).cast("B") for each in buffers]
        end = HEAD.size + BUFFER.size * len(views) + len(stream)
        places = []
        for view in views:
            at = end + -end % ALIGN
            places.append((at, view.nbytes))
            end = at + view.nbytes
        if end <= SMALL_BYTES:
            views = [memoryview(bytes(view)) for view in views]  # they may be of the old memory
        found = self._memory.memory_of(*key) if end <= SMALL_BYTES else None
        if found is not None and end <= found[2].nbytes <= SMALL_BYTES:
            _, address, memory = found
        else:
            address, memory = self._memory.new_memory(end)
        HEAD.pack_into(memory, 0, len(stream), len(views))
        at = HEAD.size
        for place in places:
            BUFFER.pack_into(memory, at, *place)
            at += BUFFER.size
        memory[at : at + len(stream)] = stream
        for (at, n), view in zip(places, views, strict=True):
            memory[at : at + n] = view
        # What kernels get of it is the first array.
        self._memory.set_memory(*key, address, memory.nbytes, *(places[0] if places else (0, 0)))


def _apart(stage: StageInfo, values: Sequence[Any], results: Mapping[int, Any]) -> dict[int, Any]:
    """What a function has returned, without memory of other partitions than its own: two partitions
    that are one object would change together."""
    if len(values) == 1 or not results:
        return dict(results)
    given = {access.dataset: value for access, value in zip(stage.accesses, values, strict=True)}
    found = {}
    for dataset, value in results.items():
        others = [each for number, each in given.items() if number != dataset]
        others += [each for number, each in results.items() if number < dataset]
        if value is given[dataset] or type(value) in UNCHANGING:
            found[dataset] = value
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            arrays = [each for each in others if isinstance(each, np.ndarray)]
            shares = any(np.may_share_memory(value, each) for each in arrays)
            has_objects = any(
                not isinstance(each, np.ndarray) and type(each) not in UNCHANGING for each in others
            )
            found[dataset] = value.copy() if shares or has_objects else value
        else:
            found[dataset] = copy.deepcopy(value)
    return found


def _layout(memory: memoryview) -> tuple[bytes, list[tuple[int, int]]]:
    """The pickle in a partition's memory, and offsets and lengths of its buffers."""
    n_stream, n_buffers = HEAD.unpack_from(memory, 0)
    at = HEAD.size
    places = [BUFFER.unpack_from(memory, at + BUFFER.size * n) for n in range(n_buffers)]
    at += BUFFER.size * n_buffers
    return bytes(memory[at : at + n_stream]), places


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def _kind(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.strides


def in_band_bytes(value: Any) -> int:
    """What of a partition is no array: it is packed again with each change."""
    return len(packed(value)[0])
