"""One run of a program on a worker: from a beginning, or a checkpoint, until a worker is lost.

Ties the core and the matcher, which decide, to the executors that run functions, to connections and
to files. When the program begins again, there is a new one: what a function of the old one still
does touches nothing of it.

Executors take tasks from the matcher, and end them there, without asking here. What others must be
told they leave in its outbox, which a thread of this empties.

`_lock` guards the core. It is never held while a function runs, or a file is written.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._objects.memory import memory_bytes
from clamor_ray._protocol.cause import cause_of
from clamor_ray._recipes.matching.executing import StageFailure
from clamor_ray._recipes.matching.partitions import (
    LocalPartitions,
    Packed,
    Partitions,
    SharedPartitions,
    in_band_bytes,
)
from clamor_ray._recipes.matching.shared import Answer, Closing, SharedMatcher
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
from clamor_ray._recipes.program.kernel import Kernel
from clamor_ray._recipes.program.tables import Tables
from clamor_ray.actors.recipes.checkpoint_files import CheckpointFiles
from clamor_ray.actors.recipes.executors import Executors
from clamor_ray.actors.recipes.peers import Peers
from clamor_ray.actors.recipes.stats import Counters

TICK_S: Final = 0.1
IDLE_S: Final = 1.0
# Connections lose nothing while they last. A slice of some GiB is long on its way, and a function
# may keep a process from answering: neither is a loss. Who dies is found otherwise, and at once.
RESEND_S: Final = 30.0
LOST_S: Final = 300.0
NS_PER_S: Final = 10**9
# What of a partition is no array is pickled again after each task that changes it. With more than
# this, tasks stay in the process that has the objects.
IN_BAND_BYTES: Final = 64 << 10
BUSY_S: Final = 1.0  # in functions, until processes are worth their start
HEAP_BYTES: Final = 64 << 30  # where the node does not say what memory it has

Key = tuple[int, int]  # a slice: group and index; or a partition: dataset and index


@dataclass(frozen=True)
class Owner:
    """What the worker is told, from any thread.

    Args:
        report: For the controller.
        failed: A function has raised.
        broken: Why what ran on this node is lost.
        cannot_go_on: Why nobody can: it would happen again.
    """

    report: Callable[[list[Report]], None]
    failed: Callable[[StageFailure], None]
    broken: Callable[[str], None]
    cannot_go_on: Callable[[str], None]


class Run:
    """See the file's head. Safe from any thread.

    Args:
        me: The worker.
        tables, functions: The program.
        program: The same, pickled.
        begin: What the controller says.
        given: Its partitions at the program's beginning, by dataset and index: gets those of its
            slices.
        place: Where checkpoints go.
        peers: To the other workers.
        owner: The worker.
        n_threads: Tasks that run at once.
        executors: See `Program.run`.

    Raises:
        StorageError: The checkpoint cannot be read.
    """

    def __init__(
        self,
        me: str,
        tables: Tables,
        functions: Sequence[Callable[..., Any]],
        program: bytes,
        begin: Begin,
        given: Callable[[Sequence[Key]], Mapping[Key, Any]],
        place: str | None,
        peers: Peers,
        owner: Owner,
        n_threads: int,
        executors: str | None,
    ) -> None:
        self._tables = tables
        self._place = place
        self._peers = peers
        self._owner = owner
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._matcher = SharedMatcher.create(tables, heap_bytes=memory_bytes() or HEAP_BYTES)
        self._core = WorkerCore(
            me, tables, self._matcher, begin.run, resend_s=RESEND_S, lost_after_s=LOST_S
        )
        self._written = {
            access.dataset
            for stage in tables.stages
            for access in stage.accesses
            if access.is_write
        }
        self._has_kernels = any(isinstance(each, Kernel) for each in functions)
        self._is_complete = False
        self._seconds: dict[Key, float] = {}  # of slices, when they were last said
        mine = [slice for slice, worker in begin.update.moves.items() if worker == me]
        states, values = self._load(mine, begin.checkpoint, given) if begin.loads else ({}, {})
        self._partitions = self._kept(values, n_threads, executors)
        decisions = begin.checkpoint.decisions if begin.loads and begin.checkpoint else {}
        with self._lock:
            self._core.start(begin.update, states, decisions)
            if begin.loads and begin.checkpoint is not None:
                self._core.on_floor(begin.checkpoint.number + 1)  # nobody needs what is before
            reports = self._handle()
        self._executors = Executors(
            tables,
            functions,
            program,
            self._matcher,
            self._partitions,
            self._on_failed,
            self._on_broken,
            n_threads,
        )
        may_have = isinstance(self._partitions, SharedPartitions) and executors != "threads"
        if executors != "processes" and (n_threads == 1 or self._has_kernels):
            may_have = False  # one function at a time, or those that Python's lock does not keep
        after_s = 0.0 if executors == "processes" else BUSY_S
        self._executors.start(after_s if may_have else None)
        self._finish(reports)
        for run in (self._look_after, self._empty_outbox):
            threading.Thread(target=run, name=f"recipes{run.__name__}", daemon=True).start()

    def _kept(self, values: Mapping[Key, Any], n_threads: int, executors: str | None) -> Partitions:
        """The partitions, as other processes can share them, if that is worth it."""
        # A kernel gets the memory that is shared.
        is_shared = executors == "processes" or self._has_kernels
        if not is_shared and executors is None and n_threads > 1:
            is_shared = all(_in_band_bytes(each) <= IN_BAND_BYTES for each in values.values())
        partitions: Partitions = LocalPartitions()
        if is_shared:
            partitions = SharedPartitions(self._tables, self._matcher)
        for key, value in values.items():
            if isinstance(value, Packed):
                partitions.put_packed(key, value)
            else:
                # Arrays in Ray's store are read-only, and stay so in a copy of their bytes.
                partitions.put(key, copy.deepcopy(value) if key[0] in self._written else value)
        return partitions

    def _load(
        self,
        slices: Sequence[Key],
        checkpoint: Checkpoint | None,
        given: Callable[[Sequence[Key]], Mapping[Key, Any]],
    ) -> tuple[dict[Key, SliceState], dict[Key, Any]]:
        """Slices, and partitions: of a checkpoint they are packed."""
        states: dict[Key, SliceState] = {}
        values: dict[Key, Any] = {}
        if checkpoint is not None:
            assert self._place is not None
            files = CheckpointFiles(self._place)
            for group, index in slices:
                states[group, index], data = files.read_slice(checkpoint.name, group, index)
                values.update({(dataset, index): each for dataset, each in data.items()})
            return states, values
        wanted = [
            (dataset, index)
            for group, index in slices
            for dataset in self._tables.datasets_of(group)
        ]
        values.update(given(wanted))
        for group, index in slices:
            fresh = {dataset: PartitionState() for dataset in self._tables.datasets_of(group)}
            states[group, index] = SliceState(fresh)
        return states, values

    def end(self) -> None:
        """Nothing more begins. A function that runs is not waited for: the memory of its partitions
        is empty then, and what it does is lost."""
        with self._lock:
            if self._ends.is_set():
                return
            self._ends.set()
        self._executors.end()
        self._matcher.stop()
        with self._lock:  # whoever comes now sees that it has ended
            self._matcher.discard()

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
        tallies = self._tallies()
        seconds = {key: busy_ns / NS_PER_S for key, (_, busy_ns) in tallies.items()}
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
            with self._lock:
                if self._ends.is_set():
                    raise KeyError(index)
                packed = self._partitions.pack((dataset, index))  # it may move the next moment
        except KeyError:
            raise errors.ProgramError(
                f"Partition {index} of dataset {dataset} is not here: it moves."
            ) from None
        return packed.value()

    def counters(self) -> Counters:
        """What it has done."""
        tallies = self._tallies().values()
        with self._lock:
            furthest = 0 if self._ends.is_set() else self._matcher.furthest
        return Counters(
            n_ran=sum(n for n, _ in tallies),
            busy_ns=sum(busy_ns for _, busy_ns in tallies),
            furthest=furthest,
            processes=self._executors.pids,
        )

    def _tallies(self) -> dict[Key, tuple[int, int]]:
        with self._lock:
            return {} if self._ends.is_set() else self._matcher.tallies()

    # -- what executors say

    def _on_failed(self, failure: StageFailure) -> None:
        """A function has raised."""
        if not self._ends.is_set():
            self._owner.failed(failure)

    def _on_broken(self, why: str) -> None:
        """What a process of the node did is lost."""
        if not self._ends.is_set():
            self._owner.broken(why)

    def _empty_outbox(self) -> None:
        """What executors have left for other workers goes to them."""
        while not self._ends.is_set():
            try:
                if self._matcher.wait_outgoing(IDLE_S):
                    self._do(self._take_outgoing)
            except errors.ClosedError:
                return
            except Exception as failure:  # any: nobody else would empty it
                self._on_broken(cause_of(failure))
                return

    def _take_outgoing(self) -> None:
        while entries := self._matcher.take_outgoing():
            closings: dict[tuple[int, int, int], dict[int, list[bytes]]] = {}
            for entry in entries:
                if isinstance(entry, Answer):
                    self._core.decided(entry.number, entry.value)
                else:
                    assert isinstance(entry, Closing)
                    of = (entry.number, entry.group, entry.sender)
                    closings.setdefault(of, {})[entry.index] = entry.messages
            for (number, group, sender), messages in closings.items():
                self._core.sent_away(number, group, sender, messages)
        self._core.tick(time.monotonic())

    # -- what the core wants done

    def _do(self, what: Callable[[], None]) -> None:
        try:
            with self._lock:
                if self._ends.is_set():
                    return
                what()
                reports = self._handle()
        except errors.MemberLostError as failure:
            self._on_broken(str(failure))
            return
        except Exception as failure:  # any: of the user's objects, or memory that is full
            self._owner.cannot_go_on(f"{type(failure).__name__}: {failure}")
            raise
        self._finish(reports)

    def _handle(self) -> list[Report]:
        """Under the lock."""
        for _, index, data in (came := self._core.take_arrivals()):
            for dataset, packed in data.items():
                self._partitions.put_packed((dataset, index), packed)
        for group, index, _ in came:
            self._core.arrived(group, index)
        for group, index, to, state in self._core.take_departures():
            self._core.depart(group, index, to, state, self._packed(group, index))
            for dataset in self._tables.datasets_of(group):
                self._partitions.remove((dataset, index))
        for worker, envelope in self._core.take_outgoing():
            self._peers.send(worker, self._core.address[worker], envelope)
        return self._core.take_reports()

    def _packed(self, group: int, index: int) -> dict[int, Packed]:
        """What a slice has.

        Raises:
            Exception: Any of the user's objects, which cannot be pickled.
        """
        datasets = self._tables.datasets_of(group)
        return {dataset: self._partitions.pack((dataset, index)) for dataset in datasets}

    def _finish(self, reports: list[Report]) -> None:
        """Without the lock."""
        with self._lock:
            if self._ends.is_set():
                return
            asked = self._core.take_store()
            was_complete, self._is_complete = self._is_complete, self._matcher.is_complete
        if self._is_complete and not was_complete:  # the driver may wait for it
            reports = [*reports, self.heartbeat(0.0)]
        if reports:
            self._owner.report(reports)
        if asked is not None:
            self._write(*asked)

    def _write(self, name: int, slices: Mapping[Key, SliceState]) -> None:
        why = ""
        try:
            if self._place is None:
                raise errors.StorageError("no place for checkpoints was given")
            files = CheckpointFiles(self._place)
            for (group, index), state in slices.items():
                files.write_slice(name, group, index, (state, self._packed(group, index)))
        except Exception as failure:  # any: a partition that cannot be pickled, too
            why = f"{type(failure).__name__}: {failure}"
        self._do(lambda: self._core.stored(name, slices, why))

    def _look_after(self) -> None:
        while not self._ends.wait(TICK_S):
            self._do(self._take_outgoing)


def _in_band_bytes(value: Any) -> int:
    return len(value.stream) if isinstance(value, Packed) else in_band_bytes(value)
