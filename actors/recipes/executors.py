"""Runs the tasks of one worker: takes those that may run, calls their functions, and says so.

Threads of the worker's process, one for each CPU of the program's on this node: NumPy leaves
Python's lock while it computes. What a function raises stops them all: the program cannot go on
without it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.running import Ran, run_task
from clamor_ray._recipes.program.tables import Tables

IDLE_S: Final = 1.0  # a wait for tasks, that is begun again
BATCH: Final = 64  # tasks that one thread takes at once, while there are plenty


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


class Work(Protocol):
    """Where tasks come from, and what is done with what they send. Safe from any thread."""

    def take(self, most: int, timeout_s: float) -> list[tuple[ReadyTask, int | None, list[bytes]]]:
        """Tasks, how many tasks their next stages have, and messages to them."""

    def ran(self, task: ReadyTask, ran: Ran) -> None: ...

    def failed(self, failure: StageFailure) -> None: ...


class Executors:
    """See the file's head.

    Args:
        tables, functions: The program.
        partitions: Of this worker.
        work: Gives tasks.
        n_threads: So many run at once.
    """

    def __init__(
        self,
        tables: Tables,
        functions: Sequence[Callable[..., Any]],
        partitions: MutableMapping[tuple[int, int], Any],
        work: Work,
        n_threads: int,
    ) -> None:
        self._tables = tables
        self._functions = functions
        self._partitions = partitions
        self._work = work
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._n_threads = n_threads
        self.n_ran = 0
        self.busy_ns = 0
        self.slice_ns: dict[tuple[int, int], int] = {}  # by group and index
        self._threads = [
            threading.Thread(target=self._run, name=f"recipes-executor-{n}", daemon=True)
            for n in range(n_threads)
        ]

    def start(self) -> None:
        """From now on tasks run."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """No more tasks begin. A function that runs is not waited for."""
        self._ends.set()

    def _run(self) -> None:
        most = BATCH if self._n_threads == 1 else 1
        while not self._ends.is_set():
            for task, n_next, received in self._work.take(most, IDLE_S):
                if self._ends.is_set() or not self._run_one(task, n_next, received):
                    return

    def _run_one(self, task: ReadyTask, n_next: int | None, received: list[bytes]) -> bool:
        stage = self._tables.stages[task.stage]
        began_ns = time.perf_counter_ns()
        try:
            ran = run_task(
                stage, self._functions[task.stage], task, n_next, received, self._partitions
            )
        except BaseException as failure:  # any, also SystemExit: it is the user's function's
            if self._ends.is_set():
                return False  # of a run that is over
            self._ends.set()
            self._work.failed(
                StageFailure(
                    stage=stage.name,
                    line=stage.line,
                    number=task.number,
                    index=task.index,
                    traceback="".join(traceback.format_exception(failure)),
                    cause=type(failure).__qualname__,
                )
            )
            return False
        took_ns = time.perf_counter_ns() - began_ns
        with self._lock:
            self.n_ran += 1
            self.busy_ns += took_ns
            key = stage.group, task.index
            self.slice_ns[key] = self.slice_ns.get(key, 0) + took_ns
        self._work.ran(task, ran)
        return True
