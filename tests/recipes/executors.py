"""Executors: processes and threads that take tasks of random programs from one matcher in C."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clamor_ray._recipes.matching.executing import Executor
from clamor_ray._recipes.matching.partitions import SharedPartitions
from clamor_ray._recipes.matching.shared import Answer, SharedMatcher
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import Tables

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0


class Job:
    """A program on a matcher of its own.

    Args:
        builder: The program.
    """

    def __init__(self, builder: Builder) -> None:
        self.builder, self.tables = builder, builder.tables()
        self.matcher = SharedMatcher.create(self.tables, 4 << 20)
        self.partitions = SharedPartitions(self.tables, self.matcher)
        for dataset in builder.datasets:
            for index, value in enumerate(dataset.source):
                self.partitions.put((dataset.number, index), value)

    def begin(self) -> None:
        """All slices are here."""
        for group in range(self.tables.n_groups):
            for index in range(self.tables.n_slices(group)):
                state = {n: PartitionState() for n in self.tables.datasets_of(group)}
                self.matcher.add(group, index, SliceState(state))

    def result(self) -> list[list[int]]:
        """Waits for the end. Only answers went to the outbox, for all slices are here."""
        deadline = time.monotonic() + ANSWER_S
        while not self.matcher.is_complete:
            assert time.monotonic() < deadline, "the program does not end"
            self.matcher.wait_outgoing(0.01)
        assert all(isinstance(each, Answer) for each in self.matcher.take_outgoing())
        return [
            [
                self.partitions.value((dataset.number, index))
                for index in range(dataset.n_partitions)
            ]
            for dataset in self.builder.datasets
        ]

    def left_bytes(self) -> int:
        """Of the memory, without the partitions, which are gone then."""
        for dataset in self.builder.datasets:
            for index in range(dataset.n_partitions):
                self.partitions.remove((dataset.number, index))
        return self.matcher.heap_used_bytes

    def close(self) -> None:
        self.matcher.close_handle()


def execute(executor: Executor, matcher: SharedMatcher) -> None:
    """Until the program has ended."""
    deadline = time.monotonic() + ANSWER_S
    while not matcher.is_complete:
        assert time.monotonic() < deadline, "the program does not end"
        executor.run(0.02)


def executor_of(
    tables: Tables, functions: Sequence[Callable[..., Any]], matcher: SharedMatcher
) -> Executor:
    return Executor(tables, functions, matcher, SharedPartitions(tables, matcher))


def threads(jobs: Sequence[Job], n: int) -> None:
    """Each job by so many threads, which share one handle."""
    for job in jobs:
        job.begin()  # first: what is sent to slices that are not here goes to the outbox
        started = [
            threading.Thread(
                target=execute,
                args=(executor_of(job.tables, job.builder.functions, job.matcher), job.matcher),
                daemon=True,
            )
            for _ in range(n)
        ]
        for each in started:
            each.start()
        for each in started:
            each.join(ANSWER_S)
            assert not each.is_alive(), "an executor does not end"


def processes(jobs: Sequence[Job], n: int) -> None:
    """All jobs, one after the other, by so many processes."""
    told = [(job.matcher.fd, job.tables, job.builder.functions) for job in jobs]
    fds = [job.matcher.fd for job in jobs]
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(n):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.recipes.executors"],
                stdin=subprocess.PIPE,
                pass_fds=fds,
                cwd=ROOT,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        for job in jobs:
            job.begin()
        for process in started:
            process.communicate(pickle.dumps(told), timeout=ANSWER_S)
            assert process.returncode == 0


def main() -> None:
    for matcher_fd, tables, functions in pickle.load(sys.stdin.buffer):
        with SharedMatcher.attach(tables, matcher_fd) as matcher:
            execute(executor_of(tables, functions, matcher), matcher)


if __name__ == "__main__":
    main()
