"""Attempts of a stage's tasks: submitted, waited for, copied where slow.

Ray runs a task again whose node died (`max_retries`); it goes to another node then.

One `Cluster` for each session of this process: what it knows of nodes and their places outlives a
stage, so that what is left of a cancelled copy keeps its place in the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import cloudpickle
import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._observe.progress import Progress
from clamor_ray._protocol.cause import cause_of
from clamor_ray._session import process_sessions
from clamor_ray._tasks.read_predictor import Key, submitted
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan.pins import Pins, drop_keys
from clamor_ray.collection.plan.results import (
    Fed,
    Part,
    Pin,
    StageResult,
    feed,
    made_of,
    new_number,
)
from clamor_ray.collection.plan.stages import FromSource, FromStage, Hashed, Ranged, Stage
from clamor_ray.collection.plan.task_messages import Meta, TaskSpec
from clamor_ray.collection.run import report
from clamor_ray.collection.run.scatter_add_commit import ScatterAddCommit
from clamor_ray.collection.run.schedule import Cancel, Slots, StageSchedule, Start
from clamor_ray.collection.run.task import packed, run_packed

logger = logging.getLogger("clamor_ray")

NODES_S: Final = 1.0  # how often Ray is asked which nodes there are
QUIET_S: Final = 30.0  # after which a stage says what it waits for
INLINE_PROGRAM_BYTES: Final = 64 << 10  # larger ones travel as an object of their own


class _Flight(NamedTuple):
    """A submitted attempt."""

    task: int
    attempt: int
    node: str | None
    outs: tuple[Any, ...]
    spec: TaskSpec


class Cluster:
    """See the file's head. Safe from any thread: one stage runs at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._slots: dict[float, Slots] = {}
        self._nodes: dict[str, float] = {}
        self._asked_s = -NODES_S
        # Cancelled attempts that may still run: report -> (slots, node).
        self._ending: dict[Any, tuple[Slots, str | None]] = {}
        self._function = ray.remote(run_packed)

    @property
    def nodes(self) -> Sequence[str]:
        """Ids of the nodes that were alive when they were last asked for."""
        return sorted(self._nodes)

    # -- places

    def slots(self, num_cpus: float) -> Slots:
        """Places for tasks that need that many CPUs."""
        found = self._slots.setdefault(num_cpus, Slots())
        self.look(now_s=time.monotonic())
        return found

    def look(self, now_s: float) -> None:
        """Which nodes are alive, and which cancelled attempts are over; not too often."""
        if self._ending:
            over, _ = ray.wait(
                list(self._ending), num_returns=len(self._ending), timeout=0, fetch_local=False
            )
            for reference in over:
                slots, node = self._ending.pop(reference)
                slots.give(node)
        if now_s - self._asked_s < NODES_S and self._nodes:
            known = self._nodes
        else:
            self._asked_s = now_s
            known = self._nodes = {
                node["NodeID"]: node["Resources"].get("CPU", 0.0)
                for node in ray.nodes()
                if node["Alive"]
            }
        for num_cpus, slots in self._slots.items():
            # Tasks that need no CPU are still not all started at once.
            places = {node: int(cpus / (num_cpus or 1)) for node, cpus in known.items()}
            slots.set_nodes({node: n for node, n in places.items() if n > 0})

    def ends(self, reference: Any, slots: Slots, node: str | None) -> None:
        """An attempt was cancelled: its place is free when it is over."""
        with contextlib.suppress(RayError, ValueError, TypeError):
            ray.cancel(reference, force=False)
        self._ending[reference] = (slots, node)

    def settle(self, timeout_s: float) -> None:
        """Returns when all cancelled attempts are over, or after a while."""
        with self.lock:
            if self._ending:
                waited_for = list(self._ending)
                ray.wait(
                    waited_for, num_returns=len(waited_for), timeout=timeout_s, fetch_local=False
                )
                self.look(time.monotonic())

    # -- a stage

    def run(
        self,
        stage: Stage,
        tasks: Sequence[int],
        made: Mapping[Stage, StageResult],
        bounds: Any,
        mark: int,
        scope: str,
        options: Options,
        pinned: Callable[[], None],
        took: Callable[[int, Part], None] | None = None,
    ) -> dict[int, Part]:
        """Runs some tasks of a stage, and waits for all of them.

        Args:
            pinned: returns when what the tasks read is sure to stay. That is asked for already,
                and they need it only where they run again: the first ones begin meanwhile.
            took: told of each task's result that counts, as soon as it is there.

        Raises:
            FunctionFailedError: A function raised; the other tasks are cancelled.
            ClamorError: What a task ran into, or Ray could not do.
        """
        with self.lock:
            run = _StageRun(self, stage, made, bounds, mark, scope, options, took)
            return run.run(tasks, pinned)

    def submit(self, program: Any, spec: Any, n_outs: int, fed: Fed, **how: Any) -> list[Any]:
        """Starts an attempt; references to its report and its results."""
        references: list[Any] = self._function.options(**how).remote(
            program, spec, n_outs, *fed.objects
        )
        return references


class _StageRun:
    def __init__(
        self,
        cluster: Cluster,
        stage: Stage,
        made: Mapping[Stage, StageResult],
        bounds: Any,
        mark: int,
        scope: str,
        options: Options,
        took: Callable[[int, Part], None] | None = None,
    ) -> None:
        self._took = took
        self._cluster = cluster
        self._stage = stage
        self._made = made
        self._bounds = bounds
        self._mark = mark
        self._scope = scope
        self._options = options
        self._run_id = secrets.randbits(63)
        variables = stage.variables
        self._snapshots = tuple(variable.ref for variable in variables)
        self._task_pins = [(Pin(v.region, v.ref.version), v.moves) for v in variables]
        self._made_by = f"{os.getpid()}/{scope}"  # numbers of nodes are a process's own
        self._fed: dict[int, Fed] = {}
        self._flights: dict[Any, _Flight] = {}
        self._parts: dict[int, Part] = {}
        self._moves = tuple(variable.moves for variable in variables)
        self._scatter_adds = bool(variables)  # a stage without variables has one result less
        out = stage.program.out
        self._n_outs = out.n if isinstance(out, (Hashed, Ranged)) else 1
        # A key may be of a class of the user's script: text or a number all the same.
        self._program: Any = cloudpickle.dumps(stage.program, protocol=5)
        if len(self._program) > INLINE_PROGRAM_BYTES:  # then it is fetched once for each node
            self._program = ray.put(self._program)
        self._slots = cluster.slots(options.num_cpus)
        n_places = len(self._slots.total)  # the nodes among which "deterministic" chooses
        self._scatter_add = (
            ScatterAddCommit(scope, cluster.nodes, n_places) if self._scatter_adds else None
        )

    def run(self, tasks: Sequence[int], pinned: Callable[[], None]) -> dict[int, Part]:
        if not tasks:
            return {}
        preferred = {task: _place(self._stage, task) for task in tasks}
        now_s = time.monotonic()
        schedule = StageSchedule(tasks, preferred, self._slots, self._options.policy, now_s)
        bar = Progress(self._stage.name, len(tasks), self._options.progress is not False)
        heard_s = now_s
        try:
            self._submit_all(schedule, schedule.start(now_s))
            pinned()
            while not schedule.is_over:
                now_s = time.monotonic()
                self._cluster.look(now_s)
                self._submit_all(schedule, schedule.start(now_s))
                wait_s = min(schedule.wake_s(now_s) or NODES_S, NODES_S)
                over = self._wait(max(wait_s, 0.001))
                bar.look()
                for reference in over:
                    if self._take(schedule, reference):
                        bar.done()
                if over:
                    heard_s = time.monotonic()
                elif time.monotonic() - heard_s > QUIET_S:
                    heard_s = time.monotonic()
                    self._say_waiting(schedule)
            if self._scatter_add is not None:
                self._scatter_add.commit()
        except BaseException:
            self._cancel(self._flights)
            if self._snapshots:
                # None of them begins again, and one that still runs commits nothing.
                with contextlib.suppress(errors.ClamorError):
                    drop_keys(process_sessions.current(self._scope), map(self._token, tasks))
            raise
        finally:
            bar.close()
        return self._parts

    def _wait(self, timeout_s: float) -> list[Any]:
        running = list(self._flights)
        if not running:  # all places are taken by what was cancelled
            time.sleep(min(timeout_s, 0.05))
            return []
        over, _ = ray.wait(running, num_returns=1, timeout=timeout_s, fetch_local=False)
        if over:
            over, _ = ray.wait(running, num_returns=len(running), timeout=0, fetch_local=False)
        return list(over)

    def _say_waiting(self, schedule: StageSchedule) -> None:
        if not schedule.n_running and self._slots.total:
            logger.warning(
                "stage %r waits: all places are held by cancelled tasks that have not ended",
                self._stage.name,
            )
        if schedule.n_running:
            logger.info("stage %r: %d tasks run", self._stage.name, schedule.n_running)
        if not self._slots.total:
            logger.warning(
                "stage %r waits for a node with %g CPUs: no node of the cluster has them",
                self._stage.name,
                self._options.num_cpus,
            )

    # -- submitting

    def _submit_all(self, schedule: StageSchedule, starts: Sequence[Start]) -> None:
        submitted = 0
        try:
            for start in starts:
                self._submit(start)
                submitted += 1
        except BaseException as failure:
            for start in starts[submitted:]:  # their places were taken for them
                schedule.failed(start.task, start.attempt)
            if isinstance(failure, (TypeError, pickle.PicklingError, AttributeError)):
                raise errors.UnpicklableError(
                    f"The input of partition {starts[submitted].task} of stage "
                    f"{self._stage.name!r} cannot go to a task: {cause_of(failure)}"
                ) from failure
            raise

    def _submit(self, start: Start) -> None:
        task = start.task
        if task not in self._fed:
            self._fed[task] = feed(self._stage, task, self._made)
        fed = self._fed[task]
        spec = TaskSpec(
            token=self._token(task),
            run_id=Pins.of(self._stage.owner).number,
            stage=self._stage.name,
            partition=task,
            attempt=start.attempt,
            scope=self._scope,
            snapshots=self._snapshots,
            slots=fed.slots,
            inputs=fed.texts,
            bounds=self._bounds,
            check=self._options.check,
            predictor_key=self._predictor_key(task),
            moves=self._moves,
            scatter_adds=self._scatter_adds,
        )
        how: dict[str, Any] = {
            "num_cpus": self._options.num_cpus,
            "max_retries": self._options.max_retries,
            "name": self._stage.name,
        }
        if start.node is not None:
            how["scheduling_strategy"] = NodeAffinitySchedulingStrategy(start.node, soft=True)
        how["num_returns"] = 1 + self._n_outs + self._scatter_adds
        report, *outs = self._cluster.submit(self._program, packed(spec), self._n_outs, fed, **how)
        self._flights[report] = _Flight(
            task=task, attempt=start.attempt, node=start.node, outs=tuple(outs), spec=spec
        )

    def _predictor_key(self, task: int) -> tuple[bytes, bool] | None:
        """Names tasks of these functions on this partition of these inputs, whenever they run."""
        if not self._snapshots:
            return None
        inputs = [
            slot.node.number if isinstance(slot, FromSource) else slot.stage.owner.number
            for slot in self._stage.slots
        ]
        functions = [captured.name for captured, _ in self._stage.program.functions]
        regions = [ref._region for ref in self._snapshots]
        name = repr((functions, inputs, regions, self._made_by, task)).encode()
        key = Key(hashlib.blake2b(name, digest_size=16).digest(), True)
        return key.digest, submitted.again(key)

    def _token(self, task: int) -> bytes:
        name = self._run_id.to_bytes(8, "little") + task.to_bytes(8, "little")
        return hashlib.blake2b(name, digest_size=16).digest()

    # -- what comes back

    def _take(self, schedule: StageSchedule, reference: Any) -> bool:
        """Whether a task is done now."""
        flight = self._flights.pop(reference, None)
        if flight is None:  # its rival came with the same batch
            return False
        try:
            answer = ray.get(reference)
            meta: Meta = pickle.loads(answer) if isinstance(answer, bytes) else answer
        except RayError as failure:
            report.ended(
                flight.spec, flight.node, self._stage.program, f"lost: {type(failure).__name__}"
            )
            if schedule.failed(flight.task, flight.attempt):
                raise self._lost(flight, failure) from failure
            return False
        if meta.failure is not None:
            if schedule.failed(flight.task, flight.attempt):
                raise meta.failure.error
            return False  # the other attempt may do better, where it is
        took_s = (meta.end_ns - meta.start_ns) / 1e9
        for loser in schedule.finished(flight.task, flight.attempt, took_s, time.monotonic()):
            self._cancel_one(loser)
        fed = self._fed.pop(flight.task)
        committed = {self._token(flight.task)} if meta.commits else set()
        if self._scatter_add is not None and meta.scatter_added:
            self._scatter_add.add(flight.task, meta, flight.outs[-1])
        self._parts[flight.task] = Part(
            number=new_number(),
            outs=flight.outs[: self._n_outs],
            meta=meta,
            made_of=made_of(self._stage, flight.task, self._made, self._mark),
            pins=fed.pins | {pin for pin, _ in self._task_pins},
            key_tokens=fed.key_tokens | committed,
            task_pins=frozenset(pin for pin, _ in self._task_pins),
            moved=frozenset(pin for pin, moves in self._task_pins if moves),
        )
        _note_place(self._stage, flight.task, meta.node_id)
        if self._took is not None:
            self._took(flight.task, self._parts[flight.task])
        return True

    def _lost(self, flight: _Flight, failure: RayError) -> errors.ClamorError:
        cause = getattr(failure, "cause", None)
        if isinstance(cause, errors.ClamorError):
            return cause
        where = f"Partition {flight.task} of stage {self._stage.name!r}"
        if isinstance(failure, RayTaskError):
            return errors.FunctionFailedError(
                f"{where} was computed, but what it made could not be returned: "
                f"{cause_of(failure)}",
                stage=self._stage.name,
                partition=flight.task,
                cause=type(cause).__name__,
                hint="What functions return must be something that pickle or cloudpickle can "
                "pickle.",
            )
        if isinstance(failure, TaskCancelledError):
            return errors.FunctionFailedError(
                f"{where} was cancelled from outside.", stage=self._stage.name, hint=""
            )
        return errors.FunctionFailedError(
            f"{where} could not be computed: {cause_of(failure)}",
            stage=self._stage.name,
            partition=flight.task,
            cause=type(failure).__name__,
            hint=f"Ray tried {self._options.max_retries + 1} times. A process that ends without a "
            "word was often killed for its memory: use more partitions, or give tasks more CPUs.",
        )

    def _cancel_one(self, loser: Cancel) -> None:
        for reference, flight in list(self._flights.items()):
            if (flight.task, flight.attempt) == loser:
                del self._flights[reference]
                report.ended(flight.spec, flight.node, self._stage.program, "cancelled")
                self._cluster.ends(reference, self._slots, flight.node)

    def _cancel(self, flights: Iterable[Any]) -> None:
        for reference in list(flights):
            flight = self._flights.pop(reference)
            report.ended(flight.spec, flight.node, self._stage.program, "cancelled")
            self._cluster.ends(reference, self._slots, flight.node)


# ------------------------------------------------------------------ where things are

PLACES: Final = "places"  # in `Node.results`: partition -> node where it was read last


def _place(stage: Stage, task: int) -> str | None:
    for slot in stage.slots:
        if isinstance(slot, FromSource):
            node = slot.node
        elif isinstance(slot, FromStage):
            node = slot.stage.owner
        else:
            continue
        place: str | None = node.results.get(PLACES, {}).get(task)
        if place is not None:
            return place
    return None


def _note_place(stage: Stage, task: int, node_id: str) -> None:
    for slot in stage.slots:
        if isinstance(slot, FromSource):
            slot.node.results.setdefault(PLACES, {})[task] = node_id
        elif isinstance(slot, FromStage):
            slot.stage.owner.results.setdefault(PLACES, {})[task] = node_id
    if stage.node is stage.owner:
        stage.owner.results.setdefault(PLACES, {})[task] = node_id
