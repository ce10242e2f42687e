"""Executors: processes and threads that take tasks of random programs from one matcher in C."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from clamor_ray._recipes.matching.shared import Answer, SharedMatcher
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import Tables
from tests.recipes.programs import Values

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0


class SharedValues(Values):
    """Partitions, numbers of 8 bytes, in memory that processes share."""

    def __init__(self, tables: Tables, functions: Sequence[Callable[..., Any]], fd: int) -> None:
        super().__init__(tables, functions)
        self.at = _Numbers(tables, fd)  # type: ignore[assignment]


class _Numbers:
    def __init__(self, tables: Tables, fd: int) -> None:
        keys = [
            (dataset, index)
            for dataset, info in enumerate(tables.datasets)
            for index in range(info.n_partitions)
        ]
        self._places = {key: 8 * place for place, key in enumerate(keys)}
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, 8 * len(keys))
        self._memory = mmap.mmap(fd, 8 * len(keys))

    def __getitem__(self, key: tuple[int, int]) -> int:
        return int(struct.unpack_from("q", self._memory, self._places[key])[0])

    def __setitem__(self, key: tuple[int, int], value: int) -> None:
        struct.pack_into("q", self._memory, self._places[key], value)


class Job:
    """A program on a matcher of its own.

    Args:
        builder: The program.
    """

    def __init__(self, builder: Builder) -> None:
        self.builder, self.tables = builder, builder.tables()
        self.values_fd = os.memfd_create("values")
        self.matcher = SharedMatcher.create(self.tables, 4 << 20)
        self.values = SharedValues(self.tables, builder.functions, self.values_fd)
        for dataset in builder.datasets:
            for index, value in enumerate(dataset.source):
                self.values.at[dataset.number, index] = value

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
            [self.values.at[dataset.number, index] for index in range(dataset.n_partitions)]
            for dataset in self.builder.datasets
        ]

    def close(self) -> None:
        self.matcher.close_handle()
        os.close(self.values_fd)


def execute(matcher: SharedMatcher, values: Values) -> None:
    """An executor: until the program has ended."""
    tables = values.tables
    deadline = time.monotonic() + ANSWER_S
    while not matcher.is_complete:
        assert time.monotonic() < deadline, "the program does not end"
        tasks = matcher.take(3, 0.02)
        for task in tasks:
            following = matcher.next_stage(task.number)
            n_next = None if following is None else tables.stages[following].n_tasks
            sent, decision, _ = values.run(task, n_next, matcher.messages(task))
            if tables.stages[task.stage].sends:
                matcher.send_all(task, sent)
            if decision is not None:
                matcher.answer(task.number, decision)
        matcher.finish(tasks)


def threads(jobs: Sequence[Job], n: int) -> None:
    """Each job by so many threads, which share one handle."""
    for job in jobs:
        job.begin()  # first: what is sent to slices that are not here goes to the outbox
        started = [
            threading.Thread(target=execute, args=(job.matcher, job.values), daemon=True)
            for _ in range(n)
        ]
        for each in started:
            each.start()
        for each in started:
            each.join(ANSWER_S)
            assert not each.is_alive(), "an executor does not end"


def processes(jobs: Sequence[Job], n: int) -> None:
    """All jobs, one after the other, by so many processes."""
    told = [(job.matcher.fd, job.values_fd, job.tables, job.builder.functions) for job in jobs]
    fds = [fd for job in jobs for fd in (job.matcher.fd, job.values_fd)]
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
    for matcher_fd, values_fd, tables, functions in pickle.load(sys.stdin.buffer):
        with SharedMatcher.attach(tables, matcher_fd) as matcher:
            execute(matcher, SharedValues(tables, functions, values_fd))


if __name__ == "__main__":
    main()
