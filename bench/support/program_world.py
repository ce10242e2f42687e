"""What a simulation of a program has: machines, program, what measures calls, and copies of the
partition map that share tables: one for each version, and not for each worker."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from clamor_ray._recipes.placement.messages import MapUpdate, Slice
from clamor_ray._recipes.placement.partition_map import Changes, PartitionMap
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import Tables


@dataclass(frozen=True)
class Costs:
    """Seconds. The defaults are rounded from this machine's (2 cores), and a link of 1 GB/s.

    Args:
        task_s: Of a task, beside its function: taken, called, finished.
        message_s: Of an envelope, at its sender and at its receiver each: pickled, on a socket.
        latency_s: Between them.
        byte_s: Of a byte on a link.
        order_s: Of an order, at the controller.
        report_s: Of a report or heartbeat there.
    """

    task_s: float = 12e-6
    message_s: float = 46e-6
    latency_s: float = 185e-6
    byte_s: float = 1e-9
    order_s: float = 150e-6
    report_s: float = 200e-6


@dataclass(frozen=True)
class World:
    """What is simulated.

    Args:
        workers: At first.
        partitions: Of each.
        function_s: Of a task over a partition.
        message_bytes: Of what goes to each partition, and back.
        slice_bytes: Of a partition that moves.
        executors: Tasks of a worker that run at once.
        cores: That all workers share, as on one machine; None: each has a node, with enough.
        computes: Whether functions need a core; else they sleep.
        rounds: Of the loop.
    """

    workers: int
    partitions: int = 4
    function_s: float = 0.25
    message_bytes: int = 1024
    slice_bytes: int = 1 << 20
    executors: int = 1
    cores: int | None = None
    computes: bool = True
    rounds: int = 1 << 30


def tables_of(n_partitions: int) -> Tables:
    """The program. Its functions are never called."""
    p = Builder()
    rows, w = p.dataset([0] * n_partitions), p.value(0)
    with p.loop() as loop:
        p.stage(lambda t, w: t.broadcast(w), reads=[w])
        p.stage(lambda t, rows: t.send(0, t.recv()), reads=[rows])
        p.stage(lambda t, w: t.recv(), writes=[w])
        loop.until(lambda t, w: True, reads=[w])
    return p.tables()


class Meter:
    """Processor time in calls of each kind."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.ns: Counter[str] = Counter()

    def timed(self, kind: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time_ns()
        answer = call()
        self.ns[kind] += time.thread_time_ns() - start
        self.calls[kind] += 1
        return answer

    def us(self) -> dict[str, float]:
        """Microseconds of a call, by kind."""
        return {kind: self.ns[kind] / n / 1e3 for kind, n in sorted(self.calls.items())}


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
