"""The controller of a program: an actor that says where its slices are, and when it has ended.

What it decides is in `_recipes/placement/controller_core.py`. This file starts and ends workers,
carries orders and reports, and answers the driver. While nothing moves it sends nothing: workers
start their tasks themselves.

Threads: Ray calls methods on many; reports come one after the other. `_lock` guards the core; it is
never held over a call that waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import cloudpickle
import ray

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.messages import Checkpoint, Heartbeat, Report
from clamor_ray._recipes.program.tables import Tables
from clamor_ray.actors.recipes.checkpoint_files import CheckpointFiles
from clamor_ray.actors.recipes.executors import StageFailure
from clamor_ray.actors.recipes.settings import ProgramSettings
from clamor_ray.actors.recipes.stats import ProgramStats, WorkerStats
from clamor_ray.actors.recipes.workers import Workers

logger = logging.getLogger("clamor_ray.recipes")

CONCURRENCY: Final = {"calls": 64, "reports": 1, "ends": 1000}
TICK_S: Final = 0.25
ANSWER_S: Final = 30.0
CHECKPOINT_S: Final = 3600.0
LOST_S: Final = 120.0  # without a heartbeat: who dies is found otherwise, and at once
LINGERS_S: Final = 1.0
LEAST_S: Final = 1e-3
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
        self._finished: Checkpoint | None = None
        self._rates: dict[str, tuple[float, int]] = {}
        self._workers = Workers(settings, self._on_end_of)
        self._over = threading.Event()
        if ray_state.runtime_context().was_current_actor_reconstructed:
            self._take_over()

    def _take_over(self) -> None:
        """The process before was killed. The workers go on, and know where everything is."""
        if not self._workers.find(ray_state.runtime_context().current_actor):
            return  # it had started none: `start` is called again
        last, name = self._last_checkpoint()
        with self._lock:
            self._core = self._new_core(last, name)
            try:
                self._core.learn(self._workers.whereabouts())
            except errors.ProgramError as failure:
                self._state = "running"
                self._fail(errors.ProgramLostError(f"Controller and workers are lost: {failure}"))
                return
            self._finished = last
            self._state = "running"
            self._send()
        threading.Thread(target=self._look_after, name="recipes-controller", daemon=True).start()

    @ray.method(concurrency_group="calls")
    def start(self, given: Sequence[Sequence[Any]]) -> None:
        """Starts the workers, and the program.

        Args:
            given: References to the partitions of each dataset at its beginning.

        Raises:
            ProgramError: The checkpoints are of another program; a scheduling function answers
                what cannot be.
            StorageError: They cannot be read.
        """
        if self._state != "starting":
            return  # it was called before, by the process before
        partitions = {
            (dataset, index): part
            for dataset, parts in enumerate(given)
            for index, part in enumerate(parts)
        }
        me = ray_state.runtime_context().current_actor
        last, name = self._last_checkpoint()
        started = self._workers.start(me, partitions)
        with self._lock:
            self._core = self._new_core(last, name)
            self._core.begin({each.name: each.address for each in started})
            self._finished = last
            self._state = "running"
            orders = self._send()
        ray_state.get(orders, timeout=ANSWER_S)  # its partitions are there
        threading.Thread(target=self._look_after, name="recipes-controller", daemon=True).start()

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
        with self._lock:
            for report in reports:
                if isinstance(report, Heartbeat):
                    self._on_heartbeat(report)
                elif self._core is not None:
                    moving = len(self._core.in_migration)
                    self._core.on_report(report)
                    self._moves += max(0, moving - len(self._core.in_migration))
            self._send()

    @ray.method(concurrency_group="reports")
    def heartbeat(self, heartbeat: Heartbeat) -> int:
        """A worker lives. The number below which nobody needs stages."""
        with self._lock:
            floor = self._on_heartbeat(heartbeat)
            self._send()
            return floor

    def _on_heartbeat(self, heartbeat: Heartbeat) -> int:
        if self._core is None:
            return 0
        floor = self._core.on_heartbeat(heartbeat, time.monotonic())
        if self._core.is_complete and self._state == "running":
            self._end("ended")
        return floor

    @ray.method(concurrency_group="calls")
    def suspect(self, worker: str, why: str) -> None:
        """Its connection to another worker has ended: it, or that one, is lost."""
        if self._workers.is_lost(worker):
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

    def _on_end_of(self, worker: str, why: str) -> None:
        """A worker is lost: begins again at the last checkpoint, with those that are left, and one
        in its place."""
        with self._lock:
            if self._state != "running" or self._core is None:
                return
            if self._settings.place is None and self._workers.handle(worker) is not None:
                self._fail(
                    errors.ProgramLostError(
                        f"Worker {worker} is lost ({why}), and the program has no checkpoints."
                    )
                )
                return
            run = self._core.run
            self._core.on_lost(worker)
            if self._core.run == run and not self._core.failure:
                return  # others have said so before
            logger.warning(
                "worker %s is lost (%s): the program begins again at %s",
                *(worker, why, self._said(self._core.checkpoints.last)),
            )
            self._restarts += 1
            self._send()
        threading.Thread(
            target=self._replace, args=(worker,), name="recipes-replace", daemon=True
        ).start()

    @staticmethod
    def _said(checkpoint: Checkpoint | None) -> str:
        return "its beginning" if checkpoint is None else f"stage {checkpoint.number}"

    def _replace(self, worker: str) -> None:
        started = self._workers.replace(worker)
        with self._lock:
            if self._state != "running" or self._core is None:
                return
            if self._core.failure:  # it was the last one
                if started is None:
                    self._fail(errors.ProgramLostError(self._core.failure))
                    return
                run, last = self._core.run, self._core.checkpoints.last
                self._core = self._new_core(last, self._next_name())
                self._core.run = run
                self._core.begin({started.name: started.address})
            elif started is not None:
                self._core.join(started.name, started.address)
            self._send()

    def _next_name(self) -> int:
        return 1 if self._files is None else self._files.next_number()

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
        """References to the partitions of a dataset, by index."""
        with self._lock:
            assert self._core is not None
            info = self._tables.datasets[dataset]
            at = [
                self._core.map.worker_of((info.group, index)) for index in range(info.n_partitions)
            ]
        return [
            self._workers.handle(worker).partition.remote(dataset, index)
            for index, worker in enumerate(at)
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
    def scale(self, nodes: Sequence[tuple[str, int]]) -> None:
        """The program runs on these nodes from now on. Returns when workers have begun there; those
        on other nodes end when their slices have gone.

        Args:
            nodes: Ray's ids, and the tasks that run there at once.
        """
        wanted = dict(nodes)
        started = [self._workers.add(node, n) for node, n in nodes if not self._workers.is_at(node)]
        with self._lock:
            assert self._core is not None
            for each in started:
                self._core.join(each.name, each.address)
            for name, node in self._workers.nodes().items():
                if node not in wanted:
                    self._core.leave(name)
            self._send()

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
                n_ran, busy_ns, furthest = counters.get(each.name, (0, 0, 0))
                before_s, before = self._rates.get(each.name, (now_s, n_ran))
                self._rates[each.name] = now_s, n_ran
                rows.append(
                    WorkerStats(
                        node_id=each.node_id,
                        pid=each.pid,
                        n_slices=core.map.n_slices_of(each.name),
                        stage=furthest,
                        tasks=n_ran,
                        tasks_per_s=(n_ran - before) / max(now_s - before_s, LEAST_S),
                        busy_s=busy_ns / NS_PER_S,
                    )
                )
            return ProgramStats(
                state=self._state,
                workers=tuple(rows),
                restarts=self._restarts,
                checkpoint=self._finished.name if self._finished else None,
                checkpoint_error=core.checkpoints.error,
                moves=self._moves,
                messages=self._messages,
            )

    @ray.method(concurrency_group="calls")
    def stop(self) -> None:
        """See `Job.stop`. The workers end, and so does this process."""
        with self._lock:
            if self._state in ("starting", "running"):
                self._fail(errors.ProgramLostError("The program was stopped."))
        if not self._over.is_set():
            self._over.set()
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

    def _end(self, state: str) -> None:
        self._state = state
        self._changed.notify_all()

    def _send(self) -> list[Any]:
        """Orders of the core, under the lock: each worker gets its own in their order."""
        assert self._core is not None
        sent = []
        for worker, order in self._core.take_outgoing():
            self._messages += 1
            handle = self._workers.handle(worker)
            if handle is not None:
                sent.append(handle.order.remote(order))
        for worker in self._core.take_gone():
            self._workers.let_go(worker)
        return sent

    def _look_after(self) -> None:
        while not self._over.wait(TICK_S):
            with self._lock:
                core = self._core
                if core is None or self._state != "running":
                    continue
                try:
                    core.tick(time.monotonic())
                except Exception as failure:  # any of the user's scheduling functions
                    logger.exception("the program's scheduling functions failed")
                    self._fail(
                        errors.ProgramLostError(f"A scheduling function failed: {failure!r}")
                    )
                self._send()
                last = core.checkpoints.last
            if last is not None and last is not self._finished:
                self._finish_checkpoint(last)

    def _finish_checkpoint(self, last: Checkpoint) -> None:
        assert self._files is not None
        try:
            self._files.finish(last.name, (self._tables, last))
            self._finished = last
        except errors.StorageError as failure:
            logger.warning("checkpoint %d does not count: %s", last.name, failure)


def _without_lines(tables: Tables) -> Any:
    stages = tuple(stage._replace(line="") for stage in tables.stages)
    return tables.datasets, stages, tables.steps
