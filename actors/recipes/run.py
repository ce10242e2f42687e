"""One run of a program on a worker: from a beginning, or a checkpoint, until a worker is lost.

Ties the core and the matcher, which decide, to the threads that run functions, to connections and
to files. When the program begins again, there is a new one: what a function of the old one still
does touches nothing of it.

`_lock` guards core and matcher. It is never held while a function runs, or a file is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._recipes.matching.matcher import Matcher, ReadyTask
from clamor_ray._recipes.matching.running import Ran
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.placement.messages import (
    Begin,
    Checkpoint,
    Heartbeat,
    Order,
    Report,
    Whereabouts,
)
from clamor_ray._recipes.placement.worker_core import WorkerCore
from clamor_ray._recipes.program.tables import Tables
from clamor_ray.actors.recipes.checkpoint_files import CheckpointFiles
from clamor_ray.actors.recipes.executors import Executors, StageFailure
from clamor_ray.actors.recipes.peers import Peers

TICK_S: Final = 0.1
# Connections lose nothing while they last. A slice of some GiB is long on its way, and a function
# may keep a process from answering: neither is a loss. Who dies is found otherwise, and at once.
RESEND_S: Final = 30.0
LOST_S: Final = 300.0
NS_PER_S: Final = 10**9

Key = tuple[int, int]  # a slice: group and index; or a partition: dataset and index


class Run:
    """See the file's head. Safe from any thread.

    Args:
        me: The worker.
        tables, functions: The program.
        begin: What the controller says.
        given: Its partitions at the program's beginning, by dataset and index: gets those of its
            slices.
        place: Where checkpoints go.
        peers: To the other workers.
        report: To the controller.
        failed: Is told what a function has raised.
        n_threads: Tasks that run at once.

    Raises:
        StorageError: The checkpoint cannot be read.
    """

    def __init__(
        self,
        me: str,
        tables: Tables,
        functions: Sequence[Callable[..., Any]],
        begin: Begin,
        given: Callable[[Sequence[Key]], Mapping[Key, Any]],
        place: str | None,
        peers: Peers,
        report: Callable[[list[Report]], None],
        failed: Callable[[StageFailure], None],
        n_threads: int,
    ) -> None:
        self._tables = tables
        self._place = place
        self._peers = peers
        self._report = report
        self.failed = failed
        self._lock = threading.Lock()
        self._may_run = threading.Condition(self._lock)
        self._ends = threading.Event()
        self._matcher = Matcher(tables)
        self._core = WorkerCore(
            me, tables, self._matcher, begin.run, resend_s=RESEND_S, lost_after_s=LOST_S
        )
        self._partitions: dict[Key, Any] = {}
        self._is_complete = False
        self._seconds: dict[Key, float] = {}  # of slices, when they were last said
        mine = [slice for slice, worker in begin.update.moves.items() if worker == me]
        states = self._load(mine, begin.checkpoint, given) if begin.loads else {}
        decisions = begin.checkpoint.decisions if begin.loads and begin.checkpoint else {}
        with self._lock:
            self._core.start(begin.update, states, decisions)
            if begin.loads and begin.checkpoint is not None:
                self._core.on_floor(begin.checkpoint.number + 1)  # nobody needs what is before
            handle = self._handle()
        self._executors = Executors(tables, functions, self._partitions, self, n_threads)
        self._executors.start()
        self._finish(handle)
        threading.Thread(target=self._look_after, name="recipes-ticks", daemon=True).start()

    def _load(
        self,
        slices: Sequence[Key],
        checkpoint: Checkpoint | None,
        given: Callable[[Sequence[Key]], Mapping[Key, Any]],
    ) -> dict[Key, SliceState]:
        states: dict[Key, SliceState] = {}
        if checkpoint is not None:
            assert self._place is not None
            files = CheckpointFiles(self._place)
            for group, index in slices:
                states[group, index], data = files.read_slice(checkpoint.name, group, index)
                self._take_in(index, data)
            return states
        wanted = [
            (dataset, index)
            for group, index in slices
            for dataset in self._tables.datasets_of(group)
        ]
        self._partitions.update(given(wanted))
        for group, index in slices:
            fresh = {dataset: PartitionState() for dataset in self._tables.datasets_of(group)}
            states[group, index] = SliceState(fresh)
        return states

    def end(self) -> None:
        """Nothing more begins. A function that runs is not waited for."""
        self._ends.set()
        self._executors.end()
        with self._lock:
            self._may_run.notify_all()

    @property
    def number(self) -> int:
        """Of the run."""
        return self._core.run

    # -- what happens

    def on_order(self, order: Order) -> None:
        """The controller says something."""
        self._do(lambda: self._core.on_order(order))

    def on_message(self, worker: str, envelope: Any) -> None:
        """Another worker has sent it."""
        self._do(lambda: self._core.on_message(worker, envelope))

    def on_floor(self, before: int) -> None:
        """No slice anywhere needs a stage with a lower number."""
        self._do(lambda: self._core.on_floor(before))

    def heartbeat(self, cpu: float) -> Heartbeat:
        """For the controller."""
        seconds = {key: ns / NS_PER_S for key, ns in list(self._executors.slice_ns.items())}
        news = {key: s - self._seconds.get(key, 0.0) for key, s in seconds.items()}
        self._seconds = seconds
        with self._lock:
            return self._core.heartbeat(news, cpu)

    def whereabouts(self) -> Whereabouts:
        """For a new controller."""
        with self._lock:
            return self._core.whereabouts()

    def partition(self, dataset: int, index: int) -> Any:
        """One that is here.

        Raises:
            ProgramError: It is not.
        """
        try:
            return self._partitions[dataset, index]
        except KeyError:
            raise errors.ProgramError(
                f"Partition {index} of dataset {dataset} is not here: it moves."
            ) from None

    def counters(self) -> tuple[int, int, int]:
        """Tasks that have run, nanoseconds in functions, and the last stage that has begun."""
        with self._lock:
            furthest = self._matcher.furthest
        return self._executors.n_ran, self._executors.busy_ns, furthest

    # -- what executors ask

    def take(self, most: int, timeout_s: float) -> list[tuple[ReadyTask, int | None, list[bytes]]]:
        """See `Work.take`."""
        with self._lock:
            tasks = self._matcher.take(most)
            if not tasks and not self._ends.is_set():
                self._may_run.wait(timeout_s)
                tasks = self._matcher.take(most)
            return [(task, self._n_next(task), self._matcher.messages(task)) for task in tasks]

    def _n_next(self, task: ReadyTask) -> int | None:
        if not self._tables.stages[task.stage].sends:
            return None
        following = self._matcher.next_stage(task.number)
        return None if following is None else self._tables.stages[following].n_tasks

    def ran(self, task: ReadyTask, ran: Ran) -> None:
        """See `Work.ran`."""
        self._do(lambda: self._core.ran(task, ran.sent, ran.decision))

    # -- what the core wants done

    def _do(self, what: Callable[[], None]) -> None:
        with self._lock:
            if self._ends.is_set():
                return
            what()
            reports = self._handle()
        self._finish(reports)

    def _handle(self) -> list[Report]:
        """Under the lock."""
        for _, index, data in (came := self._core.take_arrivals()):
            self._take_in(index, data)
        for group, index, _ in came:
            self._core.arrived(group, index)
        for group, index, to, state in self._core.take_departures():
            data = {
                dataset: self._partitions.pop((dataset, index))
                for dataset in self._tables.datasets_of(group)
            }
            self._core.depart(group, index, to, state, data)
        for worker, envelope in self._core.take_outgoing():
            self._peers.send(worker, self._core.address[worker], envelope)
        self._may_run.notify_all()
        return self._core.take_reports()

    def _take_in(self, index: int, data: Mapping[int, Any]) -> None:
        self._partitions.update({(dataset, index): value for dataset, value in data.items()})

    def _finish(self, reports: list[Report]) -> None:
        """Without the lock."""
        with self._lock:
            asked = self._core.take_store()
            was_complete, self._is_complete = self._is_complete, self._matcher.is_complete
        if self._is_complete and not was_complete:  # the driver may wait for it
            reports = [*reports, self.heartbeat(0.0)]
        if reports:
            self._report(reports)
        if asked is not None:
            self._write(*asked)

    def _write(self, name: int, slices: Mapping[Key, SliceState]) -> None:
        why = ""
        try:
            if self._place is None:
                raise errors.StorageError("no place for checkpoints was given")
            files = CheckpointFiles(self._place)
            for (group, index), state in slices.items():
                data = {
                    dataset: self._partitions[dataset, index]
                    for dataset in self._tables.datasets_of(group)
                }
                files.write_slice(name, group, index, (state, data))
        except Exception as failure:  # any: a partition that cannot be pickled, too
            why = f"{type(failure).__name__}: {failure}"
        self._do(lambda: self._core.stored(name, slices, why))

    def _look_after(self) -> None:
        while not self._ends.wait(TICK_S):
            self._do(lambda: self._core.tick(time.monotonic()))
