"""One copy of the map: which slice is on which worker, in versions (Canary, sections 5.1 to 5.3).

Partitions that a stage accesses together are one slice, so they are together by construction. All
copies take the same steps in the same order, each at its own time.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from clamor_ray._recipes.placement.messages import MapUpdate, Slice


@dataclass(frozen=True, slots=True)
class Changes:
    """What steps have changed.

    Args:
        moved: Slices that have another worker now.
        joined: Workers that were not known.
        left: Workers that are known to have left, by those steps.
    """

    moved: frozenset[Slice] = frozenset()
    joined: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()


class PartitionMap:
    """See the file's head. Version 0 has nothing.

    Example:
        >>> copy = PartitionMap()
        >>> _ = copy.apply(MapUpdate(1, {(0, 0): "a"}, {"a": None, "b": None}, is_whole=True))
        >>> copy.apply(MapUpdate(2, {(0, 0): "b"})).moved
        frozenset({(0, 0)})
        >>> copy.version, copy.worker_of((0, 0))
        (2, 'b')
    """

    def __init__(self) -> None:
        self.version = 0
        self._worker_of: dict[Slice, str] = {}
        self._slices_of: dict[str, set[Slice]] = {}  # of those that have not left
        # Also of workers that have left: what they have sent is acknowledged still.
        self._addresses: dict[str, Any] = {}
        self._left: set[str] = set()
        self._waiting: dict[int, MapUpdate] = {}

    @property
    def workers(self) -> Set[str]:
        """Those that have not left, in the order in which they came. It changes with the map."""
        return self._slices_of.keys()

    @property
    def addresses(self) -> Mapping[str, Any]:
        """Of all workers, also of those that have left."""
        return self._addresses

    @property
    def assigned(self) -> dict[Slice, str]:
        """Slice -> who has it, or gets it: a copy."""
        return dict(self._worker_of)

    def has_left(self, worker: str) -> bool:
        return worker in self._left

    def worker_of(self, slice: Slice) -> str:
        """Who has it, or gets it."""
        return self._worker_of[slice]

    def slices_of(self, worker: str) -> frozenset[Slice]:
        """Those that a worker has, or gets."""
        return frozenset(self._slices_of.get(worker, ()))

    def n_slices_of(self, worker: str) -> int:
        return len(self._slices_of.get(worker, ()))

    def apply(self, update: MapUpdate) -> Changes:
        """Takes a step, and those behind it that have come before. One that has been taken changes
        nothing; one whose turn it is not yet waits."""
        self._waiting[update.version] = update
        before: dict[Slice, str | None] = {}
        joined: set[str] = set()
        left: set[str] = set()
        while (step := self._next()) is not None:
            for slice in step.moves:
                before.setdefault(slice, self._worker_of.get(slice))
            joined |= step.joined.keys() - self._slices_of.keys()
            self._take(step)
            left |= step.left
        return Changes(
            frozenset(slice for slice, was in before.items() if self._worker_of[slice] != was),
            frozenset(joined & self._slices_of.keys()),
            frozenset(left),
        )

    def whole(self) -> MapUpdate:
        """All of it, as one step."""
        return MapUpdate(
            version=self.version,
            moves=self.assigned,
            joined=dict(self._addresses),
            left=frozenset(self._left),
            is_whole=True,
        )

    def _next(self) -> MapUpdate | None:
        for version in [each for each in self._waiting if each <= self.version]:
            del self._waiting[version]
        whole = [each.version for each in self._waiting.values() if each.is_whole]
        return self._waiting.pop(max(whole) if whole else self.version + 1, None)

    def _take(self, step: MapUpdate) -> None:
        self.version = step.version
        if step.is_whole:
            self._slices_of.clear()
        for worker, address in step.joined.items():
            self._addresses[worker] = address
            self._left.discard(worker)
            self._slices_of.setdefault(worker, set())
        for slice, worker in step.moves.items():
            was = self._worker_of.get(slice)
            if was in self._slices_of:
                self._slices_of[was].discard(slice)
            self._worker_of[slice] = worker
            self._slices_of.setdefault(worker, set()).add(slice)
        for worker in step.left:
            assert not self._slices_of.get(worker), f"{worker} has left, with slices"
            self._slices_of.pop(worker, None)
            self._left.add(worker)
