"""Takes tasks from the matcher of a node, runs their functions, and tells it what they have done.

Any number of processes and threads do that side by side, each with an `Executor` of its own. What a
function raises ends the program: it cannot go on without that task.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.partitions import Partitions
from clamor_ray._recipes.matching.running import run_task
from clamor_ray._recipes.matching.shared import KernelFailed, SharedMatcher
from clamor_ray._recipes.program.kernel import Kernel
from clamor_ray._recipes.program.tables import StageInfo, Tables

BATCH_NS: Final = 1_000_000  # of tasks that are taken at once: others wait for them so long
MOST: Final = 256
KERNELS: Final = 64  # that are run at once
ROOM_S: Final = 60.0  # a task waits so long for room for its messages
PAUSE_S: Final = 0.005


@dataclass(frozen=True)
class StageFailure:
    """What a function has raised.

    Args:
        stage, line: Of the program.
        number, index: Of the task.
        traceback: The function's own, as text.
        cause: The exception's type.
    """

    stage: str
    line: str
    number: int
    index: int
    traceback: str
    cause: str


class TaskFailed(Exception):
    """A task's function has raised. Its task has begun, and will not end.

    Args:
        failure: What is known of it.
    """

    def __init__(self, failure: StageFailure) -> None:
        super().__init__(failure.traceback)
        self.failure = failure


class Executor:
    """See the file's head. For one thread.

    Args:
        tables, functions: The program.
        matcher: Of the node.
        partitions: Of the node.
    """

    def __init__(
        self,
        tables: Tables,
        functions: Sequence[Callable[..., Any]],
        matcher: SharedMatcher,
        partitions: Partitions,
    ) -> None:
        self._tables = tables
        self._functions = functions
        self._matcher = matcher
        self._partitions = partitions
        self._has_kernels = False
        for stage, function in enumerate(functions):
            if isinstance(function, Kernel):
                matcher.set_kernel(stage, function.address())
                self._has_kernels = True
        self._most = 1
        self._done: list[ReadyTask] = []  # have run, and the matcher does not know it
        self._took_ns: list[int] = []
        self.runs: ReadyTask | None = None  # for who asks what hangs

    def run(self, timeout_s: float, ends: threading.Event | None = None) -> None:
        """Some tasks, if any may run within a time.

        Args:
            timeout_s: At most a second in a main thread: signals wait for it.
            ends: Nothing more begins when it is set, and nothing is told of what runs then.

        Raises:
            TaskFailed: A function has raised.
            ClosedError: The matcher was stopped.
            MemberLostError: A process of the node has died in the matcher.
        """
        try:
            for task in self._take(timeout_s):
                began_ns = time.perf_counter_ns()
                self.runs = task
                self._run_one(task, ends)
                if ends is not None and ends.is_set():
                    return
                self._took_ns.append(time.perf_counter_ns() - began_ns)
                self._done.append(task)
        finally:
            self.runs = None
        if self._done:
            each_ns = max(1, sum(self._took_ns) // len(self._done))
            self._most = max(1, min(MOST, BATCH_NS // each_ns))
            self._finish()

    def _take(self, timeout_s: float) -> list[ReadyTask]:
        if not self._has_kernels:
            return self._matcher.take(self._most, timeout_s)
        try:
            return self._matcher.run_kernels(KERNELS, timeout_s)[1]
        except KernelFailed as failure:
            stage = self._tables.stages[failure.task.stage]
            raise TaskFailed(failure_of(stage, failure.task, failure)) from None

    def _finish(self) -> None:
        done, took_ns = self._done, self._took_ns
        self._done, self._took_ns = [], []
        self._matcher.finish(done, took_ns)

    def _run_one(self, task: ReadyTask, ends: threading.Event | None) -> None:
        stage = self._tables.stages[task.stage]
        matcher = self._matcher
        n_next = None
        if stage.sends and (following := matcher.next_stage(task.number)) is not None:
            n_next = self._tables.stages[following].n_tasks
        received = matcher.messages(task) if stage.receives else ()
        try:
            values = self._partitions.values(stage, task.index)
            ran = run_task(stage, self._functions[task.stage], task, n_next, received, values)
            if ends is not None and ends.is_set():
                return
            self._partitions.keep(stage, task.index, values, ran.results)
        except (errors.ClosedError, errors.MemberLostError):
            if ends is not None and ends.is_set():
                return
            raise
        except BaseException as failure:  # any, also SystemExit: it is the user's function's
            raise TaskFailed(failure_of(stage, task, failure)) from None
        if stage.sends:
            self._send(task, ran.sent)
        if ran.decision is not None:
            matcher.answer(task.number, ran.decision)

    def _send(self, task: ReadyTask, sent: dict[int, list[bytes]]) -> None:
        deadline = time.monotonic() + ROOM_S
        while True:
            try:
                self._matcher.send_all(task, sent)
                return
            except errors.NoSpaceError:
                if time.monotonic() >= deadline:
                    raise
                self._finish()  # what waits for those may make room
                time.sleep(PAUSE_S)


def failure_of(stage: StageInfo, task: ReadyTask, failure: BaseException) -> StageFailure:
    """What is said of a task that has failed."""
    return StageFailure(
        stage=stage.name,
        line=stage.line,
        number=task.number,
        index=task.index,
        traceback="".join(traceback.format_exception(failure)),
        cause=type(failure).__qualname__,
    )
