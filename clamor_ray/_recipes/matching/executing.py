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
KNOWN: Final = 4096  # stages whose next one is remembered
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
        self._longest_ns = 0  # of the tasks of late
        self._done: list[ReadyTask] = []  # have run, and the matcher does not know it
        self._took_ns: list[int] = []
        self._sent: list[dict[int, list[bytes]]] = []  # of each of those
        self._next: dict[int, int] = {}  # see `_n_next`

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
        tasks = self._take(timeout_s)
        ended_ns = began_ns = time.perf_counter_ns()
        for task in tasks:
            self._run_one(task, ends)
            if ends is not None and ends.is_set():
                return
            now_ns = time.perf_counter_ns()
            self._note(now_ns - began_ns)
            self._done.append(task)
            began_ns = now_ns
            if now_ns - ended_ns > BATCH_NS:  # others may wait for these
                self._end(ends)
                ended_ns = began_ns = time.perf_counter_ns()
        if self._done:
            self._end(ends)

    def _note(self, took_ns: int) -> None:
        """As many are taken at once as are short, all of them: what an executor has taken no other
        one can run."""
        self._took_ns.append(took_ns)
        self._longest_ns = max(1, took_ns, self._longest_ns * 63 // 64)
        self._most = max(1, min(MOST, BATCH_NS // self._longest_ns))

    def _take(self, timeout_s: float) -> list[ReadyTask]:
        if not self._has_kernels:
            return self._matcher.take(self._most, timeout_s)
        try:
            return self._matcher.run_kernels(KERNELS, timeout_s)[1]
        except KernelFailed as failure:
            stage = self._tables.stages[failure.task.stage]
            raise TaskFailed(failure_of(stage, failure.task, failure)) from None

    def _end(self, ends: threading.Event | None) -> None:
        """Those that have run end, in one call. Messages that find no room are tried again: what
        has ended may make some."""
        deadline = time.monotonic() + ROOM_S
        while self._done:
            n = self._matcher.end(self._done, self._took_ns, self._sent)
            del self._done[:n], self._took_ns[:n], self._sent[:n]
            if not self._done:
                return
            if ends is not None and ends.is_set():
                return
            if time.monotonic() >= deadline:
                failure = errors.NoSpaceError(
                    f"For {ROOM_S:g} s there was no room for its messages.",
                    hint="Use more nodes (job.scale), or send less at a time.",
                )
                task = self._done[0]
                raise TaskFailed(failure_of(self._tables.stages[task.stage], task, failure))
            time.sleep(PAUSE_S)

    def _run_one(self, task: ReadyTask, ends: threading.Event | None) -> None:
        stage = self._tables.stages[task.stage]
        matcher = self._matcher
        n_next = self._n_next(task.number) if stage.sends else None
        received = matcher.messages(task) if stage.receives else ()
        values = self._partitions.values(stage, task.index)
        try:
            ran = run_task(stage, self._functions[task.stage], task, n_next, received, values)
        except BaseException as failure:  # any, also SystemExit: it is the user's function's
            raise TaskFailed(failure_of(stage, task, failure)) from None
        if ends is not None and ends.is_set():
            return
        try:
            self._partitions.keep(stage, task.index, values, ran.results)
        except (errors.ClosedError, errors.MemberLostError):  # the matcher's
            raise
        except Exception as failure:  # what it has returned cannot be pickled, or finds no room
            raise TaskFailed(failure_of(stage, task, failure)) from None
        self._sent.append(ran.sent)
        if ran.decision is not None:
            matcher.answer(task.number, ran.decision)

    def _n_next(self, number: int) -> int | None:
        """How many tasks the stage behind a number has. That never changes."""
        if number not in self._next:
            following = self._matcher.next_stage(number)
            if following is None:
                return None
            if len(self._next) >= KNOWN:
                self._next.clear()
            self._next[number] = self._tables.stages[following].n_tasks
        return self._next[number]


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
