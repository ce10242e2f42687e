"""Copies of the partition map that share tables: one for each version, and not for each worker."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from typing import Any

from clamor_ray._recipes.placement.messages import MapUpdate, Slice
from clamor_ray._recipes.placement.partition_map import Changes, PartitionMap


class _Version:
    """A map that does not change any more, and what came of it."""

    def __init__(self, map: PartitionMap) -> None:
        self.map = map
        self.after: dict[int, tuple[MapUpdate, _Version, Changes]] = {}

    def next(self, update: MapUpdate) -> tuple[_Version, Changes]:
        """The first of the copies that takes a step makes the tables for all."""
        if id(update) not in self.after:
            map = PartitionMap()
            if self.map.version:
                map.apply(self.map.whole())
            changes = map.apply(update)
            self.after[id(update)] = (update, _Version(map), changes)
        return self.after[id(update)][1:]


class _Begun:
    """What a copy is that has begun with a whole map."""

    def __init__(self, at: _Version, changes: Changes) -> None:
        self.at, self.changes = at, changes


class SharedMap:
    """In place of a `PartitionMap`, where steps come in their order, once each.

    Args:
        tables: Of all that share.
    """

    class Tables:
        """Where copies that begin find the tables of those that began before."""

        def __init__(self) -> None:
            self.first: weakref.WeakValueDictionary[int, _Begun] = weakref.WeakValueDictionary()

    def __init__(self, tables: SharedMap.Tables) -> None:
        self._tables = tables
        self._at = _Version(PartitionMap())

    def apply(self, update: MapUpdate) -> Changes:
        """See `PartitionMap`."""
        if self.version == 0:
            begun = self._tables.first.get(update.version)
            if begun is None:
                begun = _Begun(*self._at.next(update))
                self._tables.first[update.version] = begun
            self._begun = begun  # while any of those lives, who joins finds it
            self._at = begun.at
            return begun.changes
        assert update.version > self.version
        self._at, changes = self._at.next(update)
        assert self._at.map.version == update.version
        return changes

    @property
    def version(self) -> int:
        return self._at.map.version

    @property
    def workers(self) -> Set[str]:
        return self._at.map.workers

    @property
    def addresses(self) -> Mapping[str, Any]:
        return self._at.map.addresses

    def has_left(self, worker: str) -> bool:
        return self._at.map.has_left(worker)

    def worker_of(self, slice: Slice) -> str:
        return self._at.map.worker_of(slice)

    def slices_of(self, worker: str) -> frozenset[Slice]:
        return self._at.map.slices_of(worker)

    def n_slices_of(self, worker: str) -> int:
        return self._at.map.n_slices_of(worker)

    def whole(self) -> MapUpdate:
        return self._at.map.whole()
