"""A program on any number of workers, in simulated time, by the very code that runs it.

`ControllerCore`, `WorkerCore`, `Matcher`, `Links` and the scheduling functions are those that a job
has. Simulated are the machines around them: when a message has come, how long a task takes. What
each of these costs is in `Costs`.

    a worker       one process: what Python does there is done one after the other, and each of its
                   executors has one task at a time. It has a node of its own, or all share cores
    the network    a latency, and the bytes of a sender one after the other
    controller     one process: each order, report and heartbeat takes its time

The program is a loop as that of gradient descent: a value goes to all partitions, a task for each
of them takes its time and sends to the value, which changes, and decides whether the loop ends.

Left out: links that are shared, connections that are made, threads that wait for each other, and
losses.

Beside simulated seconds: the processor's, really spent in calls of each kind (`Meter`). Workers
with the same version of the map share its tables (`SharedMap`), else thousands of them would not
fit one process; the first worker has its own, and the seconds of its calls count.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench.support.program_world import Costs, Meter, SharedMap, World, tables_of
from clamor_ray._recipes.matching.matcher import Matcher, ReadyTask
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.messages import (
    Arrived,
    Begin,
    Envelope,
    Heartbeat,
    MapUpdate,
    Order,
    Packet,
    Report,
    Slice,
    SliceCame,
)
from clamor_ray._recipes.placement.schedule import Schedule
from clamor_ray._recipes.placement.worker_core import WorkerCore

# As in actors/recipes: worker.py, run.py, controller.py.
HEARTBEAT_S: Final = 1.0
WORKER_TICK_S: Final = 1.0  # there 0.1 s: nothing depends on it while nothing is lost
CONTROLLER_TICK_S: Final = 0.25
SCHEDULE_S: Final = 2.0
NEVER_S: Final = 1e9  # nobody is lost here
ENVELOPE_BYTES: Final = 200
MOVE_BYTES: Final = 14  # of a slice and its worker, in a step of the map
ADDRESS_BYTES: Final = 40
LAST_MEASURED: Final = "w00031"  # of others the processor time is not asked for
STEP: Final = 2  # the stage that changes the value


class _Worker:
    """One."""

    def __init__(self, name: str, executors: int) -> None:
        self.name = name
        self.core: WorkerCore | None = None
        self.matcher: Matcher | None = None
        self.idle = executors
        self.python_s = 0.0  # until then its Python has something to do
        self.link_s = 0.0
        self.slowed = 1.0
        self.seconds: dict[Slice, float] = {}
        self.early: list[tuple[str, Envelope]] = []  # before it has begun


class Simulation:
    """See the file's head. It begins with `begin`, and goes on with `until`.

    Args:
        world, costs: What is simulated.
        functions: Scheduling functions, beside those of each controller.
    """

    def __init__(self, world: World, costs: Costs, functions: Sequence[Schedule] = ()) -> None:
        self.world, self.costs = world, costs
        self.tables = tables_of(world.workers * world.partitions)
        self.now_s = 0.0
        self.meter = Meter()
        self.rounds: list[float] = []  # when each has ended
        self.sent: Counter[str] = Counter()  # orders, reports, heartbeats, envelopes
        self.controller = ControllerCore(
            self.tables,
            functions,
            every_s=SCHEDULE_S if functions else None,
            lost_after_s=NEVER_S,
        )
        self.workers: dict[str, _Worker] = {}
        self.n_begun = 0
        self.came_s = 0.0  # when the last slice that moved had come
        self._maps = SharedMap.Tables()
        self._controller_s = self._controller_link_s = 0.0
        self._cores = [0.0] * world.cores if world.cores else None
        self._payload = bytes(world.message_bytes)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n = self._n_made = 0

    # -- what a user does

    def begin(self) -> None:
        """The job begins."""
        names = self._new(self.world.workers)
        self.meter.timed("controller: begin", lambda: self.controller.begin(names))
        self._after_controller()
        self._at(CONTROLLER_TICK_S, self._tick_controller)

    def join(self, n: int) -> None:
        """So many workers more, at once."""
        names = self._new(n)
        self.meter.timed("controller: join", lambda: self.controller.join_all(names))
        self._after_controller()

    def leave(self, names: Sequence[str]) -> None:
        """Those are to end, at once."""
        self.meter.timed("controller: leave", lambda: self.controller.leave_all(names))
        self._after_controller()

    def slow(self, name: str, times: float) -> None:
        """Its functions take so many times as long from now on."""
        self.workers[name].slowed = times

    def until(self, holds: Callable[[], bool], most_s: float = NEVER_S) -> bool:
        """Goes on until something holds; False: it does not after so many seconds."""
        end_s = self.now_s + most_s
        while not holds():
            if not self._events or self._events[0][0] > end_s:
                return False
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        return True

    @property
    def is_settled(self) -> bool:
        """Whether all workers have begun, and all slices have come."""
        return not self.controller.n_in_migration and self.n_begun >= len(self.workers)

    # -- machines

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        self._n += 1
        heapq.heappush(self._events, (when_s, self._n, what))

    def _python(self, worker: _Worker, seconds: float) -> float:
        """A worker's process computes. When that has ended."""
        begin_s = max(self.now_s, worker.python_s)
        worker.python_s = self._on_core(begin_s, seconds)
        return worker.python_s

    def _on_core(self, begin_s: float, seconds: float) -> float:
        if self._cores is None:
            return begin_s + seconds
        end_s = max(begin_s, heapq.heappop(self._cores)) + seconds
        heapq.heappush(self._cores, end_s)
        return end_s

    def _controls(self, seconds: float) -> float:
        """The controller's process computes. When that has ended."""
        self._controller_s = self._on_core(max(self.now_s, self._controller_s), seconds)
        return self._controller_s

    # -- the controller

    def _new(self, n: int) -> dict[str, str]:
        names = [f"w{self._n_made + k:05d}" for k in range(n)]
        self._n_made += n
        for name in names:
            self.workers[name] = _Worker(name, self.world.executors)
        return {name: f"address of {name}" for name in names}

    def _after_controller(self) -> None:
        orders = self.meter.timed("controller: take_outgoing", self.controller.take_outgoing)
        for name, order in orders:
            self.sent["orders"] += 1
            sent_s = self._controls(self.costs.order_s)
            n_bytes = ENVELOPE_BYTES + _bytes_of(order)
            self.sent["order bytes"] += n_bytes
            begin_s = max(sent_s, self._controller_link_s)
            self._controller_link_s = begin_s + n_bytes * self.costs.byte_s
            arrives_s = self._controller_link_s + self.costs.latency_s
            self._at(arrives_s, lambda name=name, order=order: self._order(name, order))  # type: ignore[misc]
        for name in self.controller.take_gone():
            self.workers.pop(name)
            self.n_begun -= 1

    def _tick_controller(self) -> None:
        self.meter.timed("controller: tick", lambda: self.controller.tick(self.now_s))
        self._after_controller()
        self._at(self.now_s + CONTROLLER_TICK_S, self._tick_controller)

    def _report(self, reports: Sequence[Report]) -> None:
        def hears() -> None:
            for report in reports:
                self.sent["reports"] += 1
                if isinstance(report, Arrived):
                    self.came_s = self.now_s
                self.meter.timed(
                    "controller: report",
                    lambda report=report: self.controller.on_report(report),  # type: ignore[misc]
                )
            self._after_controller()

        self._at(
            self.now_s + self.costs.latency_s,
            lambda: self._at(self._controls(self.costs.report_s), hears),
        )

    def _beat(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.core is None:
            return
        seconds, worker.seconds = worker.seconds, {}
        said = self._of(worker, "heartbeat", lambda: worker.core.heartbeat(seconds, 0.5))
        come_s = self.now_s + self.costs.latency_s
        self._at(
            come_s, lambda: self._at(self._controls(self.costs.report_s), lambda: self._heard(said))
        )

    def _heard(self, said: Heartbeat) -> None:
        self.sent["heartbeats"] += 1
        controller = self.controller
        floor = self.meter.timed(
            "controller: heartbeat", lambda: controller.on_heartbeat(said, self.now_s)
        )
        self.meter.timed("controller: is_complete", lambda: controller.is_complete)
        self._after_controller()

        def answered() -> None:
            worker = self.workers.get(said.worker)
            if worker is not None and worker.core is not None:
                worker.core.on_floor(floor)
                self._at(self.now_s + HEARTBEAT_S, lambda: self._beat(said.worker))

        self._at(self.now_s + self.costs.latency_s, answered)

    # -- a worker

    def _order(self, name: str, order: Order) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return
        if isinstance(order, Begin):
            self._begin_worker(worker, order)
            return
        core = worker.core
        assert core is not None
        kind = "update" if isinstance(order, MapUpdate) else "order"
        if self._has_own_map(worker):
            self._of(worker, kind, lambda: core.on_order(order))
        else:
            core.on_order(order)
        self._after(worker)

    def _has_own_map(self, worker: _Worker) -> bool:
        return worker.name in ("w00000", "w00001")

    def _begin_worker(self, worker: _Worker, begin: Begin) -> None:
        worker.matcher = Matcher(self.tables)
        core = WorkerCore(
            worker.name,
            self.tables,
            worker.matcher,
            begin.run,
            resend_s=NEVER_S,
            lost_after_s=NEVER_S,
        )
        worker.core = core
        if not self._has_own_map(worker):
            core.map = SharedMap(self._maps)  # type: ignore[assignment]
        given: dict[Slice, SliceState] = {}
        if begin.loads:
            for group, index in self.controller.map.slices_of(worker.name):
                if begin.update.moves.get((group, index)) == worker.name:
                    fresh = {each: PartitionState() for each in self.tables.datasets_of(group)}
                    given[group, index] = SliceState(fresh)
        core.start(begin.update, given)
        self.n_begun += 1
        for sender, envelope in worker.early:
            core.on_message(sender, envelope)
        self._after(worker)
        # Not all at the same time.
        part = int(worker.name[1:]) * 0.618 % 1
        self._at(self.now_s + HEARTBEAT_S * part, lambda: self._beat(worker.name))
        self._at(self.now_s + WORKER_TICK_S * part, lambda: self._tick(worker.name))

    def _tick(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.core is not None:
            core = worker.core
            self._of(worker, "tick", lambda: core.tick(self.now_s))
            self._after(worker)
            self._at(self.now_s + WORKER_TICK_S, lambda: self._tick(name))

    def _come(self, sender: str, to: str, envelope: Envelope) -> None:
        worker = self.workers.get(to)
        if worker is not None:
            ready_s = self._python(worker, self.costs.message_s)
            self._at(ready_s, lambda: self._message(sender, to, envelope))

    def _message(self, sender: str, to: str, envelope: Envelope) -> None:
        worker = self.workers.get(to)
        if worker is None:
            return
        if (core := worker.core) is None:
            worker.early.append((sender, envelope))
            return
        self._of(worker, "message", lambda: core.on_message(sender, envelope))
        self._after(worker)

    def _after(self, worker: _Worker) -> None:
        """What `actors/recipes/run.py` does after each event."""
        core = worker.core
        assert core is not None
        for group, index, _ in core.take_arrivals():
            core.arrived(group, index)
        for group, index, to, state in core.take_departures():
            core.depart(group, index, to, state)
        for to, envelope in self._of(worker, "take_outgoing", core.take_outgoing):
            self.sent["envelopes"] += 1
            sent_s = self._python(worker, self.costs.message_s)
            n_bytes = self._envelope_bytes(envelope)
            worker.link_s = max(sent_s, worker.link_s) + n_bytes * self.costs.byte_s
            arrives_s = worker.link_s + self.costs.latency_s
            self._at(
                arrives_s,
                lambda to=to, envelope=envelope: self._come(worker.name, to, envelope),  # type: ignore[misc]
            )
        reports = core.take_reports()
        if reports:
            self._report(reports)
        self._start_tasks(worker)

    def _envelope_bytes(self, envelope: Envelope) -> int:
        content = envelope.content
        if isinstance(content, Packet):
            return ENVELOPE_BYTES + sum(
                len(each) for messages in content.messages.values() for each in messages
            )
        return ENVELOPE_BYTES + (self.world.slice_bytes if isinstance(content, SliceCame) else 0)

    def _start_tasks(self, worker: _Worker) -> None:
        matcher = worker.matcher
        assert matcher is not None
        while worker.idle and (tasks := matcher.take(1)):
            worker.idle -= 1
            begins_s = self._python(worker, self.costs.task_s)
            function_s = self.world.function_s * worker.slowed if tasks[0].stage == 1 else 0.0
            ends_s = (
                self._on_core(begins_s, function_s)
                if self.world.computes
                else begins_s + function_s
            )
            self._at(ends_s, lambda task=tasks[0], s=function_s: self._ran(worker, task, s))  # type: ignore[misc]

    def _ran(self, worker: _Worker, task: ReadyTask, seconds: float) -> None:
        core = worker.core
        assert core is not None
        worker.idle += 1
        stage = self.tables.stages[task.stage]
        slice = (stage.group, task.index)
        worker.seconds[slice] = worker.seconds.get(slice, 0.0) + seconds
        sent: Mapping[int, list[bytes]] = {}
        if task.stage == 0:
            sent = {n: [self._payload] for n in range(self.tables.stages[1].n_tasks)}
        elif task.stage == 1:
            sent = {0: [self._payload]}
        elif task.stage == STEP:
            self.rounds.append(self.now_s)
        decision = len(self.rounds) >= self.world.rounds if stage.decides else None
        self._of(worker, f"ran {task.stage}", lambda: core.ran(task, sent, decision))
        self._after(worker)

    def _of(self, worker: _Worker, kind: str, call: Callable[[], Any]) -> Any:
        """A call of a worker's core: those of the one with the value apart."""
        if worker.name > LAST_MEASURED:
            return call()
        has_value = worker.name == self.controller.map.worker_of((1, 0))
        return self.meter.timed(f"{'root' if has_value else 'worker'}: {kind}", call)


def _bytes_of(order: Order) -> int:
    update = order.update if isinstance(order, Begin) else order
    if not isinstance(update, MapUpdate):
        return 0
    return MOVE_BYTES * len(update.moves) + ADDRESS_BYTES * len(update.joined)
