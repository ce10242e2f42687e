"""The controller of a program: an actor that says where its slices are, and when it has ended.

What it decides is in `_recipes/placement/controller_core.py`. This file starts and ends workers,
carries orders and reports, and answers the driver. While nothing moves it sends nothing: workers
start their tasks themselves.

Threads: Ray calls methods on many; reports come one after the other. `_lock` guards the core; it is
never held over a call that waits.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import cloudpickle
import ray
from ray.exceptions import RayActorError

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._recipes.matching.executing import StageFailure
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.messages import Checkpoint, Heartbeat, Order, Report
from clamor_ray._recipes.program.tables import Tables
from clamor_ray._recipes.progress.history import History
from clamor_ray._recipes.progress.progress import ProgramProgress
from clamor_ray._recipes.progress.rounds import RoundCounter
from clamor_ray.actors.recipes.checkpoint_files import CheckpointFiles
from clamor_ray.actors.recipes.peers import Peers
from clamor_ray.actors.recipes.reservations import Reservations
from clamor_ray.actors.recipes.settings import CONTROLLER, ProgramSettings
from clamor_ray.actors.recipes.staffing import Staff, Staffing
from clamor_ray.actors.recipes.stats import Counters, ProgramStats, WorkerStats
from clamor_ray.actors.recipes.workers import Key, Started, Workers

logger = logging.getLogger("clamor_ray.recipes")

CONCURRENCY: Final = {"calls": 64, "reports": 1, "ends": 1000}
TICK_S: Final = 0.25
CHECKPOINT_S: Final = 3600.0
LOST_S: Final = 120.0  # without a heartbeat: who dies is found otherwise, and at once
LINGERS_S: Final = 1.0
LEAST_S: Final = 1e-3
ANSWER_S: Final = 10.0
SESSION_S: Final = 10.0  # between two looks whether the session is there
NS_PER_S: Final = 10**9
SCHEDULE_S: Final = 2.0  # between two calls of the user's scheduling functions


class RecipeController:
    """See the file's head.

    Args:
        settings: The program.
    """

    def __init__(self, settings: ProgramSettings) -> None:
        self._settings = settings
        tables, _ = cloudpickle.loads(settings.program)
        self._tables: Tables = tables
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._files = CheckpointFiles(settings.place) if settings.place else None
        self._core: ControllerCore | None = None
        self._state = "starting"
        self._failure: errors.ClamorError | None = None
        self._restarts = self._moves = self._messages = 0
        self._by_kind: Counter[str] = Counter()
        self._run = 0  # of the core, when it was last looked at
        self._known: frozenset[str] = frozenset()  # who took part in it
        self._why: dict[str, str] = {}  # of workers that are lost
        self._finished: Checkpoint | None = None
        self._rates: dict[str, tuple[float, int]] = {}
        self._history = History(tables, None, time.monotonic())
        self._reservations = Reservations(settings.name, settings.reserves)
        self._workers = Workers(settings, self._on_end_of, self._reservations)
        self._staffing = Staffing(
            settings.workers, self._staff, self._add, self._leave, self._drained
        )
        self._starts = threading.Lock()
        self._session_s = time.monotonic()  # when it was last looked for
        self._asked_s = time.monotonic()  # when somebody last asked for partitions
        self._fresh: list[Started] = []  # they began when all others were lost
        # Nothing depends on it: what goes there comes as an order, too.
        self._peers = Peers(CONTROLLER, None, settings.secret, _unheard, _missed, logger.error)
        self._over = threading.Event()
        self._stops = False
        if ray_state.was_restarted():
            self._take_over()

    def _take_over(self) -> None:
        """The process before was killed. The workers go on, and know where everything is."""
        found = self._workers.find(ray_state.runtime_context().current_actor)
        with self._guarded():
            if not found:
                raise errors.ProgramLostError("Its controller and all its workers were lost.")
            last, name = self._last_checkpoint()
            self._core = self._new_core(last, name)
            self._core.learn(self._workers.whereabouts())
            self._finished = last
            self._state = "running"
            self._run, self._known = self._core.run, self._core.members
            self._send()
        try:
            self._staffing.take_over(len(found))
            self._reservations.take_over()
            self._reservations.resume(self._cpus())
        except Exception as failure:  # any of Ray's: an actor that raises here is not made again
            logger.warning("what was reserved and drained before is not known: %r", failure)
        self._look_on()

    @ray.method(concurrency_group="calls")
    def start(
        self, given: Sequence[Sequence[Any]], places: Mapping[Key, tuple[list[str], int]]
    ) -> None:
        """Starts the workers, and the program.

        Args:
            given: References to the partitions of each dataset at its beginning.
            places: The nodes that have one in their stores, and its bytes, by dataset and index.

        Raises:
            ProgramError: The checkpoints are of another program; a scheduling function answers
                what cannot be; there are not so many nodes.
            StorageError: They cannot be read.
            WaitTimeoutError, ProgramLostError: A worker has not started, or cannot begin.
        """
        with self._starts:
            if self._state == "starting":  # else somebody else has called it
                self._start(given, places)

    def _start(
        self, given: Sequence[Sequence[Any]], places: Mapping[Key, tuple[list[str], int]]
    ) -> None:
        partitions = {
            (dataset, index): part
            for dataset, parts in enumerate(given)
            for index, part in enumerate(parts)
        }
        me = ray_state.runtime_context().current_actor
        last, name = self._last_checkpoint()
        started = self._workers.start(me, partitions, self._staffing.nodes())
        with self._lock:
            self._core = self._new_core(last, name)
            cached = self._cached(places, {each.node_id: each.name for each in started})
            self._core.begin({each.name: each.address for each in started}, cached)
            begun = RoundCounter(self._tables).advance(
                last.number if last else 0, last.decisions if last else {}
            )
            self._history = History(self._tables, begun, time.monotonic())
            self._finished = last
            self._state = "running"
            self._run, self._known = self._core.run, self._core.members
            orders = self._send()
        try:
            ray_state.get(orders)  # its partitions are there: no deadline, while their workers live
        except RayActorError:
            with self._lock:
                failure = self._failure
            if failure is None:
                raise
            # All workers end where one has found that the program cannot go on.
            if not isinstance(failure, errors.StageFailedError):
                raise failure from None
        with self._lock:
            self._history.loaded(time.monotonic())
        self._look_on()

    def _look_on(self) -> None:
        threading.Thread(target=self._look_after, name="recipes-controller", daemon=True).start()
        self._staffing.watch()

    def _cached(
        self, places: Mapping[Key, tuple[list[str], int]], workers: Mapping[str, str]
    ) -> dict[Key, dict[str, int]]:
        """Slice -> worker -> bytes of it on its node."""
        found: dict[Key, dict[str, int]] = {}
        for (dataset, index), (nodes, n_bytes) in places.items():
            at = found.setdefault((self._tables.datasets[dataset].group, index), {})
            for worker in (workers[node] for node in nodes if node in workers):
                at[worker] = at.get(worker, 0) + n_bytes
        return found

    def _new_core(self, last: Checkpoint | None, name: int) -> ControllerCore:
        functions = cloudpickle.loads(self._settings.schedule)
        return ControllerCore(
            self._tables,
            functions,
            every_s=SCHEDULE_S if functions else None,
            checkpoint_every_s=self._settings.every_s,
            checkpoint_deadline_s=CHECKPOINT_S,
            lost_after_s=LOST_S,
            last=last,
            first_name=name,
        )

    def _last_checkpoint(self) -> tuple[Checkpoint | None, int]:
        if self._files is None:
            return None, 1
        found = self._files.newest()
        name = self._files.next_number()
        if found is None:
            return None, name
        tables, checkpoint = found[1]
        if _without_lines(tables) != _without_lines(self._tables):
            raise errors.ProgramError(
                f"The checkpoints in {self._settings.place} are of another program.",
                hint="Give another directory, or delete them.",
            )
        return checkpoint, name

    # -- workers say

    @ray.method(concurrency_group="reports")
    def reports(self, reports: Sequence[Report]) -> None:
        """What has happened, in the order of each worker."""
        with self._guarded():
            for report in reports:
                self._by_kind[type(report).__name__] += 1
                if isinstance(report, Heartbeat):
                    self._on_heartbeat(report)
                elif self._core is not None:
                    moving = self._core.n_in_migration
                    self._core.on_report(report)
                    self._moves += max(0, moving - self._core.n_in_migration)
            self._send()

    @ray.method(concurrency_group="reports")
    def heartbeat(self, heartbeat: Heartbeat) -> int:
        """A worker lives. The number below which nobody needs stages."""
        floor = 0
        with self._guarded():
            self._by_kind[type(heartbeat).__name__] += 1
            floor = self._on_heartbeat(heartbeat)
            self._send()
        return floor

    def _on_heartbeat(self, heartbeat: Heartbeat) -> int:
        if self._core is None:
            return 0
        core, now_s = self._core, time.monotonic()
        floor = core.on_heartbeat(heartbeat, now_s)
        if self._state == "running":
            node_id = self._workers.node_of(heartbeat.worker)
            if node_id is not None:
                self._history.heard(node_id, heartbeat.seconds, now_s)
            self._history.sample(lambda: core.done, now_s)
        if core.is_complete and not core.failure and self._state == "running":
            self._end("ended")
        return floor

    @ray.method(concurrency_group="calls")
    def suspect(self, worker: str, why: str) -> None:
        """Its connection to another worker has ended: it, or that one, is lost."""
        if self._workers.is_lost(worker):
            self._on_end_of(worker, why)

    @ray.method(concurrency_group="calls")
    def broken(self, worker: str, why: str) -> None:
        """A process of a worker has died: what ran there is lost, and another worker comes. What a
        program that has ended made is there still."""
        if self._state == "running":
            self._on_end_of(worker, why)

    @ray.method(concurrency_group="calls")
    def failed(self, failure: StageFailure) -> None:
        """A function has raised: the program has ended."""
        with self._lock:
            self._fail(
                errors.StageFailedError(
                    f"{failure.line}: stage {failure.stage} raised {failure.cause} in task "
                    f"{failure.index} (stage number {failure.number}).\n{failure.traceback}",
                    stage=failure.stage,
                    index=failure.index,
                    number=failure.number,
                    cause=failure.cause,
                )
            )

    @ray.method(concurrency_group="calls")
    def cannot_go_on(self, why: str) -> None:
        """A worker has something that it can neither load, nor send."""
        with self._lock:
            self._fail(errors.ProgramLostError(f"The program cannot go on: {why}."))

    def _on_end_of(self, worker: str, why: str) -> None:
        """A worker is lost."""
        with self._guarded():
            self._why[worker] = why
            has_some = self._core is not None and self._core.map.n_slices_of(worker) > 0
            if self._state == "ended" and has_some and self._failure is None:
                self._failure = errors.ProgramLostError(
                    f"Worker {worker} is lost ({why}), and what it had of the result."
                )
            elif self._state == "running" and self._core is not None:
                self._core.on_lost(worker)
                self._send()

    def _look_for_losses(self, core: ControllerCore) -> None:
        """The core begins again where a worker is lost, whoever has found that: others come in its
        place."""
        if core.failure:
            lost = self._known
        elif core.run != self._run:
            lost = self._known - core.members
        else:
            self._known = core.members
            return
        if core.failure and not lost:
            return  # others are on their way already
        self._run, self._known = core.run, core.members - lost
        said = ", ".join(f"{each} ({self._why.get(each, 'it is silent')})" for each in sorted(lost))
        if self._settings.place is None:
            self._fail(errors.ProgramLostError(f"Lost: {said}. The program has no checkpoints."))
            return
        last = core.checkpoints.last
        at = "its beginning" if last is None else f"stage {last.number}"
        logger.warning("lost: %s; the program begins again at %s", said, at)
        self._restarts += 1
        threading.Thread(
            target=self._replace, args=(sorted(lost),), name="recipes-replace", daemon=True
        ).start()

    def _replace(self, lost: Sequence[str]) -> None:
        """Others begin in their place, on the same nodes where those live."""
        with self._staffing.turn:
            if self._core is not None and self._core.checkpoints.last is None:
                self._reservations.pause()
            for worker in lost:
                self._workers.drop(worker)
                self._peers.drop(worker)
            try:
                self._staffing.adjust()
                self._reservations.keep(self._workers.nodes().values())
            except Exception as failure:  # any of Ray's: its GCS may be restarting
                logger.warning("no worker has begun in place of %s: %r", list(lost), failure)
            with self._guarded():
                if self._state == "running" and self._core is not None and self._core.failure:
                    self._begin_again(self._core)
                    self._send()

    def _begin_again(self, core: ControllerCore) -> None:
        """All workers were lost, and others have started."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            raise errors.ProgramLostError(f"All workers are lost: {core.failure}")
        name = 1 if self._files is None else self._files.next_number()
        self._core = self._new_core(core.checkpoints.last, name)
        self._core.run = core.run
        self._core.begin({each.name: each.address for each in fresh})
        self._run, self._known = self._core.run, frozenset(self._core.members)

    # -- who takes part

    def _staff(self) -> Staff | None:
        with self._lock:
            core = self._core
            if core is None or self._state not in ("running", "ended"):
                return None
            fresh = {each.name for each in self._fresh}
            staying = fresh if core.failure else core.map.workers - core.leaving
        nodes = self._workers.nodes()
        has = frozenset(node for worker, node in nodes.items() if worker in staying)
        return Staff(has, frozenset(nodes.values()) - has)

    def _cpus(self) -> dict[str, int]:
        return {each.node_id: each.n_threads for each in self._workers.all()}

    def _add(self, nodes: Mapping[str, int]) -> errors.ClamorError | None:
        try:
            started, failure = self._workers.add(list(nodes.items()))
        except errors.ClamorError as refused:  # others have the CPUs
            return refused
        with self._guarded():
            core = self._core
            assert core is not None
            if core.failure:  # see `_begin_again`
                self._fresh += started
            else:
                core.join_all({each.name: each.address for each in started})
            self._send()
        return failure

    def _leave(self, node_id: str) -> None:
        with self._guarded():
            core = self._core
            assert core is not None
            staying = core.map.workers - core.leaving
            for worker, node in self._workers.nodes().items():
                if node == node_id and worker in staying and len(staying) > 1:
                    core.leave(worker)
            self._send()

    def _drained(self) -> set[str]:
        registry = ray_state.find_registry(self._settings.scope)
        if registry is None:
            return set()
        return set(ray_state.get(registry.drained_nodes.remote(), timeout=ANSWER_S))

    @ray.method(concurrency_group="calls")
    def drain(self, node_id: str) -> str:
        """A node is to go: the program leaves it. To be called until nothing is there.

        Returns:
            What of it is there still, for people; empty: nothing.
        """
        self._staffing.drain(node_id)
        with self._lock:
            core = self._core
            if self._state == "starting":
                return f"program {self._settings.name} (it begins)"  # it may have chosen the node
            if self._state == "failed" or core is None:
                return ""  # its workers end
            there = [name for name, node in self._workers.nodes().items() if node == node_id]
            n_slices = sum(core.map.n_slices_of(name) for name in there)
        return f"program {self._settings.name} ({n_slices} slices)" if there else ""

    @ray.method(concurrency_group="calls")
    def cancel_drain(self, node_id: str) -> None:
        """The node does not go."""
        self._staffing.stay(node_id)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Under the lock. Whatever goes wrong in it ends the program: nobody else would hear."""
        with self._lock:
            try:
                yield
            except Exception as failure:  # any: of a user's scheduling function, of files
                logger.exception("the program cannot go on")
                if self._state == "starting":
                    self._state = "running"
                self._fail(
                    failure
                    if isinstance(failure, errors.ProgramLostError)
                    else errors.ProgramLostError(f"The controller failed: {cause_of(failure)}.")
                )

    # -- the driver asks

    @ray.method(concurrency_group="calls")
    def wait(self, timeout_s: float) -> bool:
        """Whether the program has ended, by then.

        Raises:
            StageFailedError, ProgramLostError: Before its end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state not in ("starting", "running"), timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._state == "ended"

    @ray.method(concurrency_group="calls")
    def partitions(self, dataset: int) -> list[Any]:
        """References to the partitions of a dataset, by index.

        Raises:
            ProgramError: One moves.
        """
        found = []
        for index, worker in enumerate(self._workers_of(dataset)):
            handle = self._workers.handle(worker)
            if handle is None:
                raise errors.ProgramError(f"Partition {index} of dataset {dataset} moves.")
            found.append(handle.partition.remote(dataset, index))
        return found

    @ray.method(concurrency_group="calls")
    def where(self, dataset: int) -> list[tuple[str, str]]:
        """The actor that has a partition, and its node, by index."""
        nodes = self._workers.nodes()
        return [
            (f"{self._settings.name}-{worker}", nodes.get(worker, ""))
            for worker in self._workers_of(dataset)
        ]

    def _workers_of(self, dataset: int) -> list[str]:
        with self._lock:
            self._asked_s = time.monotonic()
            assert self._core is not None
            info = self._tables.datasets[dataset]
            return [
                self._core.map.worker_of((info.group, index)) for index in range(info.n_partitions)
            ]

    @ray.method(concurrency_group="calls")
    def move(self, dataset: int, index: int, node_id: str) -> bool:
        """See `Job.move`."""
        with self._lock:
            assert self._core is not None
            moves = self._core.move(dataset, index, self._workers.at(node_id))
            self._send()
            return moves

    @ray.method(concurrency_group="calls")
    def scale(self, workers: int | str) -> None:
        """See `Job.scale`.

        Raises:
            ProgramError: There are not so many nodes.
            WaitTimeoutError, ProgramLostError: A worker has not started.
        """
        self._staffing.scale(workers)

    @ray.method(concurrency_group="calls")
    def checkpoint(self) -> bool:
        """Begins a checkpoint. Whether none was running."""
        with self._lock:
            assert self._core is not None
            if self._files is None:
                raise errors.ProgramError(
                    "The program was given no place for checkpoints.",
                    hint="Run it with checkpoint=DIRECTORY.",
                )
            begins = self._core.checkpoint(time.monotonic())
            self._send()
            return begins

    @ray.method(concurrency_group="calls")
    def stats(self) -> ProgramStats:
        """See `Job.stats`."""
        counters = self._workers.counters()
        now_s = time.monotonic()
        rows = []
        with self._lock:
            core = self._core
            assert core is not None
            for each in self._workers.all():
                said = counters.get(each.name, Counters())
                n_ran = said.n_ran
                before_s, before = self._rates.get(each.name, (now_s, n_ran))
                self._rates[each.name] = now_s, n_ran
                rows.append(
                    WorkerStats(
                        node_id=each.node_id,
                        pid=each.pid,
                        n_slices=core.map.n_slices_of(each.name),
                        stage=said.furthest,
                        tasks=n_ran,
                        tasks_per_s=(n_ran - before) / max(now_s - before_s, LEAST_S),
                        busy_s=said.busy_ns / NS_PER_S,
                        processes=said.processes,
                    )
                )
            return ProgramStats(
                state=self._state,
                workers=tuple(rows),
                rounds=self._history.rounds,
                restarts=self._restarts,
                checkpoint=self._finished.name if self._finished else None,
                checkpoint_error=core.checkpoints.error,
                moves=self._moves,
                messages=self._messages,
                by_kind=dict(self._by_kind),
            )

    @ray.method(concurrency_group="calls")
    def progress(self) -> ProgramProgress:
        """See `Job.progress`. It asks no worker: heartbeats have said it."""
        nodes = self._workers.nodes()
        with self._lock:
            assigned = {} if self._core is None else self._core.map.assigned
            at = {slice: nodes[worker] for slice, worker in assigned.items() if worker in nodes}
            return self._history.progress(self._state, at, time.monotonic())

    @ray.method(concurrency_group="calls")
    def stop(self) -> None:
        """See `Job.stop`. The workers end, and so does this process."""
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            if self._state in ("starting", "running"):
                self._fail(errors.ProgramLostError("The program was stopped."))
        self._staffing.end()
        self._over.set()
        if not self._stops:
            self._stops = True
            me = ray_state.runtime_context().current_actor
            # When who asked has its answer, and the workers have theirs.
            threading.Timer(LINGERS_S, ray.kill, [me]).start()

    @ray.method(concurrency_group="ends")
    def until_end(self) -> None:
        """Returns when the workers are to end."""
        self._over.wait()

    # -- inside

    def _fail(self, failure: errors.ClamorError) -> None:
        if self._failure is None and self._state in ("starting", "running"):
            self._failure = failure
            self._end("failed")
            self._staffing.end()
            self._over.set()  # nobody needs its workers any more

    def _end(self, state: str) -> None:
        done = None if self._core is None else self._core.done
        self._history.sample(lambda: done, time.monotonic(), is_last=True)
        self._state = state
        # Beside: what asks Ray waits, and the lock is held.
        threading.Thread(target=self._reservations.end, name="recipes-cpus", daemon=True).start()
        self._changed.notify_all()

    def _send(self) -> list[Any]:
        """Orders of the core, under the lock: each worker gets its own in their order."""
        assert self._core is not None
        if self._state == "running":
            self._look_for_losses(self._core)
        if self._state == "failed":
            return []
        for worker, envelope in self._core.take_hurried():
            self._by_kind["hurried MapUpdate"] += 1
            self._peers.send(worker, self._core.map.addresses[worker], envelope)
        sent = []
        packed: dict[int, _Packed] = {}  # one order goes to all
        for worker, order in self._core.take_outgoing():
            self._messages += 1
            self._by_kind[type(order).__name__] += 1
            handle = self._workers.handle(worker)
            if handle is not None:
                same = packed.setdefault(id(order), _Packed(order))
                sent.append(handle.order.remote(same))
        for worker in self._core.take_gone():
            self._workers.let_go(worker)
            self._peers.drop(worker)
        return sent

    def _has_expired(self) -> bool:
        lasts_s = self._settings.expires_s
        with self._lock:
            if self._state == "running":
                self._asked_s = time.monotonic()
            return lasts_s is not None and time.monotonic() - self._asked_s > lasts_s

    def _session_has_ended(self) -> bool:
        """Its registry says so, too; but not where it was lost."""
        if time.monotonic() - self._session_s < SESSION_S:
            return False
        self._session_s = time.monotonic()
        try:
            return ray_state.find_registry(self._settings.scope) is None
        except Exception as failure:  # any of Ray's: its GCS may be restarting
            logger.info("Ray does not say whether the session is there: %r", failure)
            return False

    def _look_after(self) -> None:
        while not self._over.wait(TICK_S):
            if self._has_expired() or self._session_has_ended():
                self._stop()
            last = None
            with self._guarded():
                core = self._core
                if core is None or self._state != "running":
                    continue
                core.tick(time.monotonic())
                self._send()
                last = core.checkpoints.last
                resumes = self._reservations.is_paused and core.is_settled and not core.failure
            if resumes:
                try:
                    self._reservations.resume(self._cpus())
                except Exception as failure:  # any of Ray's: its GCS may be restarting
                    logger.warning("no CPUs are reserved: %r", failure)
            if last is not None and last is not self._finished:
                self._finish_checkpoint(last)

    def _finish_checkpoint(self, last: Checkpoint) -> None:
        assert self._files is not None
        try:
            self._files.finish(last.name, (self._tables, last))
            self._finished = last
        except errors.StorageError as failure:
            logger.warning("checkpoint %d does not count: %s", last.name, failure)
            with self._lock:
                if self._core is not None:
                    self._core.checkpoints.error = str(failure)


class _Packed:
    """An order that many workers get: it is pickled once. Each gets the order, and not this."""

    def __init__(self, order: Order) -> None:
        self._order = order  # so no other one has its id meanwhile
        self._pickled: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pickled is None:
            self._pickled = pickle.dumps(self._order, protocol=5)
        return pickle.loads, (self._pickled,)


def _unheard(worker: str, message: Any) -> None:
    raise AssertionError(f"nobody connects to the controller, but {worker}: {message!r}")


def _missed(worker: str, why: str) -> None:
    logger.info("worker %s hears of moves by orders alone: %s", worker, why)


def _without_lines(tables: Tables) -> Any:
    stages = tuple(stage._replace(line="") for stage in tables.stages)
    return tables.datasets, stages, tables.steps
