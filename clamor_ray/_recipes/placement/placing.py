"""The authoritative map: who takes part, which slices move, and the orders that say so. Pure.

The half of the controller that changes the map. The other one, `controller_core.py`, says when.

With n workers a heartbeat or a report costs no more than with one, and a step of the map costs n
orders. So what comes at once is one step: workers that join, and workers that may leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from clamor_ray._recipes.placement.farewells import Farewells
from clamor_ray._recipes.placement.heartbeats import Heartbeats
from clamor_ray._recipes.placement.messages import (
    TERM,
    Begin,
    Envelope,
    MapUpdate,
    Order,
    Slice,
)
from clamor_ray._recipes.placement.migrations import Migrations
from clamor_ray._recipes.placement.partition_map import PartitionMap
from clamor_ray._recipes.placement.rows import checked, partition_rows, worker_rows
from clamor_ray._recipes.placement.schedule import Schedule
from clamor_ray._recipes.program.tables import Tables

HURRIED: Final = 64  # of more workers at once the time is that of what moves


class Placing:
    """See the file's head. Not thread-safe.

    Args:
        tables: The program.
        functions: Scheduling functions, called one after the other.
        lost_after_s: See `Heartbeats`.
    """

    def __init__(self, tables: Tables, functions: Sequence[Schedule], lost_after_s: float) -> None:
        self.run = 0
        self.map = PartitionMap()
        self.leaving: set[str] = set()
        self._tables = tables
        self._functions = tuple(functions)
        self._migrations = Migrations()
        self._farewells = Farewells()
        self._may_leave: set[str] = set()  # of those that leave: without slices
        self._heartbeats = Heartbeats(lost_after_s)
        self._outgoing: list[tuple[str, Order]] = []
        self._hurried: list[tuple[str, Envelope]] = []
        self._members: frozenset[str] = frozenset()
        self._members_of = (0, 0, 0)  # the run, the version, and how many have left

    @property
    def members(self) -> frozenset[str]:
        """Also those that have left, and have something still. The same object until it changes."""
        as_of = self.run, self.map.version, len(self._farewells.workers)
        if as_of != self._members_of:
            self._members_of = as_of
            self._members = frozenset(self.map.workers | self._farewells.workers)
        return self._members

    def _is_member(self, worker: str) -> bool:
        return worker in self.map.workers or worker in self._farewells.workers

    @property
    def in_migration(self) -> frozenset[Slice]:
        """Slices that have not come to their workers."""
        return frozenset(self._migrations.slices)

    @property
    def n_in_migration(self) -> int:
        """How many those are."""
        return len(self._migrations.slices)

    # -- who comes and who goes

    def _join(self, workers: Mapping[str, Any]) -> None:
        joined = {worker: at for worker, at in workers.items() if worker not in self.map.addresses}
        if not joined:
            return  # they were asked for twice
        others = self.members
        self._push({}, joined, to=others)
        begin = Begin(self.run, self.map.whole(), loads=False)
        self._outgoing += [(worker, begin) for worker in joined]
        self._schedule()

    def _has_nothing(self, worker: str) -> bool:
        """No slice is there, or is on its way from or to there."""
        return self.map.n_slices_of(worker) == 0 and not self._migrations.is_origin(worker)

    def _let_leave_without_slices(self) -> None:
        self._may_leave = {worker for worker in self.leaving if self._has_nothing(worker)}
        self._let_leave()

    def _let_leave(self) -> None:
        if not self._may_leave:
            return
        left, self._may_leave = frozenset(self._may_leave), set()
        self.leaving -= left
        self._farewells.begin(left, self._next_version(), self.members)
        self._push({}, left=left)

    # -- the map

    def _schedule(self) -> None:
        for function in self._functions:
            workers = worker_rows(self.map.workers, self._heartbeats.last)
            moving, heartbeats = self._migrations.slices, self._heartbeats.last
            partitions = partition_rows(self._tables, self.map.assigned, moving, heartbeats)
            moves = function(workers, partitions, frozenset(self.leaving))
            self._move(checked(self._tables, moves, self.map.workers))
        self._let_leave_without_slices()

    def _move(self, moves: Mapping[Slice, str]) -> None:
        """One step of the map. What moves already does not."""
        moves = {
            slice: worker
            for slice, worker in moves.items()
            if slice not in self._migrations.slices
            and worker in self.map.workers
            and worker not in self.leaving
            and self.map.worker_of(slice) != worker
        }
        concerned = {self.map.worker_of(slice) for slice in moves} | set(moves.values())
        for slice in moves:
            self._migrations.begin(slice, self.map.worker_of(slice), self.map.version + 1)
        if moves:
            update = self._push(moves)
            if len(concerned) <= HURRIED:
                told = Envelope(self.run, 0, update)
                self._hurried += [(worker, told) for worker in sorted(concerned)]

    def _push(
        self,
        moves: Mapping[Slice, str],
        joined: Mapping[str, Any] | None = None,
        left: frozenset[str] = frozenset(),
        is_whole: bool = False,
        to: Set[str] | None = None,
    ) -> MapUpdate:
        """One step of the map. A whole one begins a term."""
        update = MapUpdate(
            version=self._next_version(is_whole),
            moves=moves,
            joined=joined or {},
            left=left,
            is_whole=is_whole,
        )
        self.map.apply(update)
        self._tell_all(update, to)
        return update

    def _next_version(self, is_whole: bool = False) -> int:
        return (self.map.version // TERM + 1) * TERM if is_whole else self.map.version + 1

    def _tell_all(self, order: Order, workers: Set[str] | None = None) -> None:
        for worker in sorted(self.members if workers is None else workers):
            self._outgoing.append((worker, order))
