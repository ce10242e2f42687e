"""Workers and a controller in this process, with a network that does its worst, by a seed.

Envelopes overtake each other, come twice, and are lost. Orders and reports of the controller keep
their order, each at its own time. Nothing here waits: a test says how many steps it may take.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from clamor_ray._recipes.matching.matcher import Matcher, ReadyTask
from clamor_ray._recipes.matching.shared import Answer, SharedMatcher
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.messages import (
    Begin,
    Checkpoint,
    Envelope,
    Order,
    Report,
    Slice,
)
from clamor_ray._recipes.placement.worker_core import WorkerCore
from clamor_ray._recipes.program.builder import Builder
from tests.recipes.programs import Values

STEPS = 60_000  # more than any of these needs


class Node:
    """One worker: its core, its matcher, its partitions, tasks that run."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.core: WorkerCore | None = None
        self.orders: deque[Order] = deque()
        self.reports: deque[Report] = deque()
        self.running: list[ReadyTask] = []
        self.outbox: list[Callable[[], None]] = []  # of executors that finish tasks themselves
        self.values: Values = cluster.values()
        self.matcher: Any = None
        self.is_paused = False  # no task begins; the test runs them
        self.stores: Callable[[], str] = lambda: ""  # the error of a disk

    def end(self) -> None:
        """Its memory goes."""
        if isinstance(self.matcher, SharedMatcher):
            self.matcher.close_handle()

    def begin(self, order: Begin) -> None:
        cluster = self.cluster
        self.running, self.outbox = [], []
        self.values = cluster.values()
        self.end()
        self.matcher = (
            SharedMatcher.create(cluster.tables, 4 << 20, cluster.window)
            if cluster.is_shared
            else Matcher(cluster.tables, cluster.window)
        )
        self.core = WorkerCore(
            self.name,
            cluster.tables,
            self.matcher,
            order.run,
            lost_after_s=cluster.unacknowledged_s,
        )
        given: dict[Slice, SliceState] = {}
        decisions: Any = {}
        if order.loads:
            for slice, worker in order.update.moves.items():
                if worker == self.name:
                    given[slice] = self.load(slice, order.checkpoint)
            if order.checkpoint is not None:
                decisions = order.checkpoint.decisions
        self.core.start(order.update, given, decisions)

    def load(self, slice: Slice, checkpoint: Checkpoint | None) -> SliceState:
        group, index = slice
        datasets = self.cluster.tables.datasets_of(group)
        if checkpoint is None:
            for dataset in datasets:
                source = self.cluster.builder.datasets[dataset].source
                self.values.at[dataset, index] = source[index]
            return SliceState({dataset: PartitionState() for dataset in datasets})
        assert checkpoint.stored_by.keys() == set(self.cluster.slices)
        disk = self.cluster.disk[checkpoint.name, checkpoint.stored_by[slice]]
        state, data = copy.deepcopy(disk[slice])
        for dataset in datasets:
            self.values.at[dataset, index] = data[dataset]
        return state

    def take_tasks(self, most: int = 2) -> list[ReadyTask]:
        taken = self.matcher.take(most)
        self.running += taken
        return taken

    def run_task(self, task: ReadyTask, finishes_itself: bool = False) -> None:
        """A task that runs ends."""
        cluster, core = self.cluster, self.core
        assert core is not None
        self.running.remove(task)
        following = self.matcher.next_stage(task.number)
        n_next = None if following is None else cluster.tables.stages[following].n_tasks
        received = self.matcher.messages(task)
        sent, decision, _ = self.values.run(task, n_next, received)
        cluster.ran[core.run, task.number, task.index] += 1
        if not finishes_itself:
            core.ran(task, sent, decision)
            return
        if isinstance(self.matcher, SharedMatcher):
            if cluster.tables.stages[task.stage].sends:
                self.matcher.send_all(task, sent)
            if decision is not None:
                self.matcher.answer(task.number, decision)
            self.matcher.finish([task])
            return
        if cluster.tables.stages[task.stage].sends:
            assert following is not None
            group = cluster.tables.stages[following].group
            away = {i: sent.get(i, []) for i in self.matcher.close_all(task, sent)}
            if away:
                args = (task.number + 1, group, task.index, away)
                self.outbox.append(lambda: core.sent_away(*args))
        if decision is not None:
            self.matcher.decide(task.number, decision)
            self.outbox.append(lambda: core.decided(task.number, decision))
        self.matcher.finish([task])

    def empty_outbox(self) -> None:
        """The core hears what executors have sent and decided."""
        core = self.core
        assert core is not None
        outbox, self.outbox = self.outbox, []
        for say in outbox:
            say()
        if isinstance(self.matcher, SharedMatcher):
            for each in self.matcher.take_outgoing():
                if isinstance(each, Answer):
                    core.decided(each.number, each.value)
                else:
                    messages = {each.index: each.messages}
                    core.sent_away(each.number, each.group, each.sender, messages)

    def move_data(self) -> None:
        """What the runtime does with slices that go, come, or are stored."""
        core = self.core
        assert core is not None
        for group, index, to, state in core.take_departures():
            datasets = self.cluster.tables.datasets_of(group)
            data = {dataset: self.values.at.pop((dataset, index)) for dataset in datasets}
            core.depart(group, index, to, copy.deepcopy(state), data)
        for group, index, data in core.take_arrivals():
            for dataset, value in data.items():
                self.values.at[dataset, index] = value
            core.arrived(group, index)
        asked = core.take_store()
        if asked is not None:
            name, slices = asked
            error = self.stores()
            if not error:
                self.cluster.disk[name, self.name] = {
                    slice: (state, copy.deepcopy(self.data(slice)))
                    for slice, state in slices.items()
                }
            core.stored(name, slices, error)
        self.reports.extend(core.take_reports())

    def data(self, slice: Slice) -> dict[int, Any]:
        datasets = self.cluster.tables.datasets_of(slice[0])
        return {dataset: self.values.at[dataset, slice[1]] for dataset in datasets}


class Cluster:
    """See the file's head.

    Args:
        builder: The program.
        seed: Of all that is random.
        workers: So many, or their names.
        duplicates, losses: The part of envelopes that come twice, and that are lost.
        window: See `Matcher`.
        unacknowledged_s: A worker that does not acknowledge for so long is lost.
        is_shared: The matchers are those in C.
        controller: Its settings.
    """

    def __init__(
        self,
        builder: Builder,
        seed: int = 0,
        workers: int = 3,
        duplicates: float = 0.1,
        losses: float = 0.1,
        window: int = 1 << 16,
        unacknowledged_s: float = 1e9,
        is_shared: bool = False,
        **controller: Any,
    ) -> None:
        self.builder, self.tables = builder, builder.tables()
        self.slices = [
            (g, i) for g in range(self.tables.n_groups) for i in range(self.tables.n_slices(g))
        ]
        self.rng = random.Random(seed)
        self.duplicates, self.losses, self.window = duplicates, losses, window
        self.unacknowledged_s = unacknowledged_s
        self.is_shared = is_shared
        self.blocks: Callable[[Envelope], bool] = lambda envelope: False  # it does not come yet
        self.now_s = 1000.0
        self.ran: Counter[tuple[int, int, int]] = Counter()
        self.disk: dict[tuple[int, str], dict[Slice, tuple[SliceState, Any]]] = {}
        self.flying: list[tuple[str, str, Envelope]] = []  # from, to
        self.nodes: dict[str, Node] = {}
        self.gone: list[str] = []
        self.settings = {"lost_after_s": 1e9, **controller}
        self.controller: ControllerCore | None = ControllerCore(self.tables, **self.settings)
        for n in range(workers):
            self.nodes[f"w{n}"] = Node(self, f"w{n}")
        self.controller.begin({name: f"at {name}" for name in self.nodes})
        self.give_orders()

    def values(self) -> Values:
        return Values(self.tables, self.builder.functions)

    def join(self, *names: str) -> None:
        """At once."""
        assert self.controller is not None
        for name in names:
            self.nodes[name] = Node(self, name)
        self.controller.join_all({name: f"at {name}" for name in names})
        self.give_orders()

    def kill(self, name: str) -> None:
        """A worker dies. Nobody is told."""
        self.nodes.pop(name).end()

    def close(self) -> None:
        """All memory goes."""
        for node in self.nodes.values():
            node.end()

    def give_orders(self) -> None:
        if self.controller is None:
            return
        for worker, order in self.controller.take_outgoing():
            if worker in self.nodes:
                self.nodes[worker].orders.append(order)
        for worker, envelope in self.controller.take_hurried():
            self.fly("controller", worker, envelope)
        for worker in self.controller.take_gone():
            self.gone.append(worker)
            node = self.nodes.pop(worker)
            assert not node.running or node.core.run < self.controller.run
            node.end()

    # -- single steps

    def collect(self, node: Node) -> None:
        """What a worker sends is on its way."""
        assert node.core is not None
        for to, envelope in node.core.take_outgoing():
            self.fly(node.name, to, envelope)

    def fly(self, sender: str, to: str, envelope: Envelope) -> None:
        if self.rng.random() < self.duplicates:
            self.flying.append((sender, to, copy.deepcopy(envelope)))
        if self.rng.random() >= self.losses:
            self.flying.append((sender, to, copy.deepcopy(envelope)))

    def deliver(self, which: int) -> None:
        sender, to, envelope = self.flying.pop(which)
        node = self.nodes.get(to)
        if node is not None and node.core is not None:
            node.core.on_message(sender, envelope)

    def order(self, node: Node) -> bool:
        """A worker gets the next order of the controller."""
        if not node.orders:
            return False
        order = node.orders.popleft()
        if isinstance(order, Begin):
            node.begin(order)
        else:
            assert node.core is not None
            node.core.on_order(order)
        return True

    def report(self, node: Node) -> None:
        if self.controller is not None and node.reports:
            self.controller.on_report(node.reports.popleft())
            self.give_orders()

    def heartbeat(self, node: Node) -> None:
        if self.controller is not None and node.core is not None:
            seconds = {slice: self.rng.random() for slice in self.slices}
            said = node.core.heartbeat(seconds, 0.5)
            node.core.on_floor(self.controller.on_heartbeat(said, self.now_s))
            self.give_orders()

    def tick(self, by_s: float = 0.3) -> None:
        self.now_s += by_s
        for node in self.nodes.values():
            if node.core is not None:
                node.empty_outbox()
                node.core.tick(self.now_s)
        if self.controller is not None:
            self.controller.tick(self.now_s)
            self.give_orders()

    # -- at random

    def step(self) -> None:
        """Anything that may happen next."""
        rng = self.rng
        if rng.random() < 0.02:
            self.tick()
        node = rng.choice(list(self.nodes.values()))
        kind = rng.random()
        if kind < 0.1:
            self.order(node)
        if node.core is None:
            return
        if kind < 0.1:
            pass
        elif kind < 0.2:
            self.report(node)
        elif kind < 0.22:
            self.heartbeat(node)
        elif kind < 0.35:
            node.move_data()
        elif kind < 0.4:
            node.empty_outbox()
        elif kind < 0.55 and not node.is_paused:
            node.take_tasks(rng.randint(1, 3))
        elif kind < 0.75 and node.running:
            node.run_task(rng.choice(node.running), rng.random() < 0.3)
        elif self.flying:
            which = rng.randrange(len(self.flying))
            if not self.blocks(self.flying[which][2]):
                self.deliver(which)
        self.collect(node)

    def until(self, holds: Callable[[], bool], most: int = STEPS) -> None:
        """Random steps until something holds."""
        for _ in range(most):
            if holds():
                return
            self.step()
        raise AssertionError(f"not after {most} steps: {self.describe()}")

    def settle(self) -> None:
        """Until the map is the same everywhere, and nothing moves."""
        self.until(lambda: self.is_settled)

    @property
    def is_settled(self) -> bool:
        controller = self.controller
        assert controller is not None
        return not controller.in_migration and all(
            node.core is not None
            and node.core.run == controller.run
            and node.core.map.version == controller.map.version
            and node.core.is_settled
            for node in self.nodes.values()
        )

    def run_to_end(self, most: int = STEPS) -> list[list[Any]]:
        """The partitions of all datasets at the end. Each task has run exactly once."""
        self.until(lambda: self.controller is not None and self.controller.is_complete, most)
        assert set(self.ran.values()) <= {1}, "a task has run twice"
        return self.answer()

    def answer(self) -> list[list[Any]]:
        found: dict[tuple[int, int], Any] = {}
        for node in self.nodes.values():
            assert not found.keys() & node.values.at.keys(), "a partition is in two places"
            found |= node.values.at
        return [
            [found[dataset.number, index] for index in range(dataset.n_partitions)]
            for dataset in self.builder.datasets
        ]

    def describe(self) -> str:
        return str(
            {
                name: node.core
                and (
                    node.core.map.version,
                    node.core.is_settled,
                    node.core._matcher.floor,
                    len(node.running),
                    [type(each).__name__ for each in node.orders],
                )
                for name, node in self.nodes.items()
            }
        )
