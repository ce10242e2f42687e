"""A cluster whose map and messages a test moves one by one: no controller, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clamor_ray._recipes.placement.messages import (
    Arrived,
    Begin,
    MapUpdate,
    Packet,
    Slice,
)
from clamor_ray._recipes.placement.worker_core import WorkerCore
from clamor_ray._recipes.program.builder import Builder, Dataset
from tests.recipes.network import Cluster, Node
from tests.recipes.programs import Change, Judge

POINTS, SUM = 0, 1  # the groups of `reduce_program`
REDUCE = (SUM, 0)  # the slice that receives


def _stage(
    p: Builder,
    salt: int,
    reads: Sequence[Dataset] = (),
    writes: Sequence[Dataset] = (),
    sends: bool = False,
    receives: bool = False,
) -> None:
    change = Change(salt, len(writes), "all" if sends else "")
    p.stage(change, reads, writes, sends=sends, receives=receives)


def reduce_program(rounds: int = 2, n: int = 2) -> Builder:
    """Points send to a sum; the sum sends to all points. Stages 1, 2, 3, 4 are a round."""
    p = Builder()
    points, extra = p.dataset(list(range(n))), p.dataset([5] * n)
    total = p.value(7)
    with p.loop(max=rounds):
        _stage(p, 1, reads=[points, extra], sends=True)
        _stage(p, 2, writes=[total], receives=True)
        _stage(p, 3, reads=[total], sends=True)
        _stage(p, 4, writes=[points], receives=True)
    return p


def branch_program() -> Builder:
    """A loop with a branch in it: what runs depends on the sum of what ran."""
    p = Builder()
    points, total = p.dataset(list(range(3))), p.value(7)
    with p.loop(max=6):
        _stage(p, 1, writes=[points], sends=True)
        _stage(p, 2, writes=[total], receives=True)
        with p.branch(Judge(3, 2), reads=[total]) as branch:
            _stage(p, 4, writes=[points])
            _stage(p, 5, writes=[total])
        with branch.otherwise():
            _stage(p, 6, writes=[points])
    return p


class Placed:
    """A scheduling function: where slices are at first."""

    def __init__(self, where: dict[Slice, str]) -> None:
        self.where = where

    def __call__(self, workers: Any, partitions: Any, leaving: Any) -> dict[tuple[int, int], str]:
        if any(row.worker is not None and row.in_migration for row in partitions):
            return {}
        where, self.where = self.where, {}
        return {
            (row.dataset, row.index): where[row.group, row.index]
            for row in partitions
            if (row.group, row.index) in where
        }


class ByHand(Cluster):
    """See the file's head. Workers `w0`, `w1`, ... have begun, at version 1.

    Args:
        builder: The program.
        where: Slice -> worker.
        workers: So many.
    """

    def __init__(self, builder: Builder, where: dict[Slice, str], workers: int = 3) -> None:
        super().__init__(
            builder, workers=workers, duplicates=0, losses=0, functions=[Placed(where)]
        )
        for node in self.nodes.values():
            self.order(node)
        self.controller = None

    def core(self, name: str) -> WorkerCore:
        core = self.nodes[name].core
        assert core is not None
        return core

    def update(self, version: int, moves: dict[Slice, str], *to: str, **more: Any) -> None:
        """A step of the map comes to some workers."""
        for name in to:
            self.core(name).on_update(MapUpdate(version, moves, **more))
            self.move(self.nodes[name])

    def join_by_hand(self, name: str, update: MapUpdate) -> None:
        """A worker is new, and begins with that map."""
        self.nodes[name] = Node(self, name)
        self.nodes[name].begin(Begin(1, update, loads=False))
        self.move(self.nodes[name])

    def move(self, node: Node) -> None:
        """The runtime does all that it has to do, and what is sent is on its way."""
        node.move_data()
        self.collect(node)

    def run(self, name: str, number: int, index: int = 0) -> None:
        """A worker runs a task, which may run there."""
        node = self.nodes[name]
        node.take_tasks(100)
        found = [each for each in node.running if (each.number, each.index) == (number, index)]
        assert found, f"{name} may not run {number}/{index}: {node.running}"
        node.run_task(found[0])
        self.move(node)

    def may_run(self, name: str, number: int, index: int = 0) -> bool:
        node = self.nodes[name]
        node.take_tasks(100)
        return any((each.number, each.index) == (number, index) for each in node.running)

    def on_the_way(self, to: str, kind: type = Packet, sender: str | None = None) -> list[int]:
        """Places in `flying` of what goes to a worker."""
        return [
            n
            for n, (whence, whither, envelope) in enumerate(self.flying)
            if whither == to and isinstance(envelope.content, kind) and sender in (None, whence)
        ]

    def pass_on(
        self, to: str, kind: type = Packet, sender: str | None = None, twice: bool = False
    ) -> None:
        """The first such thing comes to a worker."""
        which = self.on_the_way(to, kind, sender)
        assert which, f"no {kind.__name__} goes to {to}: {self.flying}"
        if twice:
            self.flying.append(self.flying[which[0]])
            self.deliver(len(self.flying) - 1)
        self.deliver(which[0])
        self.move(self.nodes[to])

    def reported(self, name: str) -> list[Slice]:
        """Slices of which a worker says that they have come."""
        return [
            (each.group, each.index)
            for each in self.nodes[name].reports
            if isinstance(each, Arrived)
        ]

    def pass_all(self) -> None:
        """Everything comes that is on its way, until nothing is."""
        while self.flying:
            to = self.flying[0][1]
            self.deliver(0)
            self.move(self.nodes[to])

    def end(self) -> list[list[Any]]:
        """All goes on, at random, to the end. Each task has run exactly once."""
        self.until(self._has_ended)
        assert set(self.ran.values()) <= {1}, "a task has run twice"
        return self.answer()

    def _has_ended(self) -> bool:
        return all(
            node.core is not None and node.core.is_settled and node.matcher.is_complete
            for node in self.nodes.values()
        )
