"""The executors of one worker: threads of its process, or processes of their own.

A worker begins with threads, for they are there at once. Where functions have been busy for a
while, processes take over, one for each CPU: Python's lock then keeps no function from another,
and none from the worker's connections. They are actors of Ray on the worker's node, so functions
find there what they find in any actor: packages, logs, global variables.

A process reaches the matcher, and with it the partitions, by the worker's own descriptor of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import cloudpickle
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._recipes.matching.executing import Executor, StageFailure, TaskFailed
from clamor_ray._recipes.matching.partitions import Partitions, SharedPartitions
from clamor_ray._recipes.matching.shared import SharedMatcher
from clamor_ray._recipes.program.tables import Tables

logger = logging.getLogger("clamor_ray.recipes")

IDLE_S: Final = 1.0  # a wait for tasks, that is begun again
LOOK_S: Final = 0.1
START_S: Final = 120.0
CONCURRENCY: Final = {"tasks": 1, "rest": 1}


class RecipeExecutor:
    """A process that runs tasks of one worker.

    Args:
        program: Pickled tables and functions.
        pid, fd: The worker's process, and its descriptor of the matcher.
    """

    def __init__(self, program: bytes, pid: int, fd: int) -> None:
        tables, functions = cloudpickle.loads(program)
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._matcher = SharedMatcher.attach(tables, own)
        finally:
            os.close(own)
        partitions = SharedPartitions(tables, self._matcher)
        self._executor = Executor(tables, functions, self._matcher, partitions)

    @ray.method(concurrency_group="rest")
    def ready(self) -> int:
        """Its process."""
        return os.getpid()

    @ray.method(concurrency_group="tasks")
    def run(self) -> StageFailure | None:
        """Returns when a function has raised, or (None) when the matcher was stopped."""
        while True:
            try:
                self._executor.run(IDLE_S)
            except TaskFailed as failed:
                return failed.failure
            except errors.ClosedError:
                return None


class Executors:
    """See the file's head. Safe from any thread.

    Args:
        tables, functions: The program.
        program: The same, pickled.
        matcher, partitions: Of the node.
        failed: Is told what a function has raised.
        broken: Is told why what ran here is lost: a process has died.
        n: Tasks that run at once.
    """

    def __init__(
        self,
        tables: Tables,
        functions: Sequence[Callable[..., Any]],
        program: bytes,
        matcher: SharedMatcher,
        partitions: Partitions,
        failed: Callable[[StageFailure], None],
        broken: Callable[[str], None],
        n: int,
    ) -> None:
        self._program = program
        self._matcher = matcher
        self._failed = failed
        self._broken = broken
        self._n = n
        self._ends = threading.Event()
        self._threads_end = threading.Event()
        self._lock = threading.Lock()
        self._processes: list[Any] = []
        self._pids: tuple[int, ...] = ()
        matcher.set_takers(n)
        made = [Executor(tables, functions, matcher, partitions) for _ in range(n)]
        self._threads = [
            threading.Thread(
                target=self._run, args=(each,), name=f"recipes-executor-{number}", daemon=True
            )
            for number, each in enumerate(made)
        ]

    def start(self, after_s: float | None) -> None:
        """From now on tasks run.

        Args:
            after_s: Functions have been busy for so long when processes are started; None: there
                are none, and partitions need not be shared.
        """
        for thread in self._threads:
            thread.start()
        if after_s is not None:
            threading.Thread(
                target=self._begin_processes,
                args=(after_s,),
                name="recipes-processes",
                daemon=True,
            ).start()

    def end(self) -> None:
        """Nothing more begins. A function that runs in a thread is not waited for; a process ends
        with its function."""
        self._ends.set()
        with self._lock:
            processes, self._processes = self._processes, []
        for each in processes:
            ray.kill(each)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its processes, when they run tasks."""
        return self._pids

    # -- threads

    def _run(self, executor: Executor) -> None:
        while not (self._ends.is_set() or self._threads_end.is_set()):
            try:
                executor.run(IDLE_S, self._ends)
            except TaskFailed as failed:
                if not self._ends.is_set():
                    self._ends.set()
                    self._failed(failed.failure)
            except errors.ClosedError:
                return
            except Exception as failure:  # any: its tasks have begun, and will not end
                if not self._ends.is_set():
                    self._ends.set()
                    self._broken(cause_of(failure))

    # -- processes

    def _begin_processes(self, after_s: float) -> None:
        while sum(busy_ns for _, busy_ns in self._tallies()) < after_s * 1e9:
            if self._ends.wait(LOOK_S):
                return
        node_id = ray_state.runtime_context().get_node_id()
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        made = [
            ray.remote(concurrency_groups=CONCURRENCY)(RecipeExecutor)
            .options(
                num_cpus=0, max_restarts=0, enable_task_events=False, scheduling_strategy=where
            )
            .remote(self._program, os.getpid(), self._matcher.fd)
            for _ in range(self._n)
        ]
        try:
            pids = ray_state.get([each.ready.remote() for each in made], timeout=START_S)
        except Exception as failure:  # any of Ray's, or of /proc's: threads go on
            logger.warning("no executor processes: %s", cause_of(failure))
            for each in made:
                ray.kill(each)
            return
        with self._lock:
            if self._ends.is_set():
                for each in made:
                    ray.kill(each)
                return
            self._processes, self._pids = made, tuple(pids)
        for each in made:
            threading.Thread(
                target=self._watch, args=(each,), name="recipes-process", daemon=True
            ).start()
        self._threads_end.set()

    def _tallies(self) -> list[tuple[int, int]]:
        try:
            return list(self._matcher.tallies().values())
        except errors.ClamorError:  # it is over
            return []

    def _watch(self, process: Any) -> None:
        try:
            failed = ray_state.get(process.run.remote())
        except Exception as failure:  # any of Ray's: its process was killed, or has exited
            if not self._ends.is_set():
                self._ends.set()
                self._broken(f"an executor process has ended: {cause_of(failure)}")
            return
        if failed is not None and not self._ends.is_set():
            self._ends.set()
            self._failed(failed)
