"""When the tasks of a program began and ended, written by the tasks themselves.

A record is appended to a file by a single write, so that processes of this machine may do it at
once; all of them have one clock. It costs a task some microseconds.
"""

from __future__ import annotations

import functools
import os
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import clamor_ray as clamor

_RECORD = struct.Struct("<5q")
_open: dict[str, int] = {}  # of this process: descriptors, by path


class Ran(NamedTuple):
    """A task.

    Args:
        number: of its stage, in the order of all that run.
        stage: of the program.
        index: of its partitions.
        began_ns, ended_ns: on the machine's monotonic clock.
    """

    number: int
    stage: int
    index: int
    began_ns: int
    ended_ns: int


class TimedProgram(clamor.Program):
    """A program that leaves a `Ran` of each task in a file, decisions included."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = str(path)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Of the stages, by number."""
        given = enumerate(super().functions)
        return tuple(functools.partial(_timed, self._path, n, each) for n, each in given)


def _timed(path: str, stage: int, function: Callable[..., Any], t: Any, *values: Any) -> Any:
    began_ns = time.perf_counter_ns()
    answer = function(t, *values)
    ended_ns = time.perf_counter_ns()
    if path not in _open:
        _open[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(_open[path], _RECORD.pack(t.number, stage, t.index, began_ns, ended_ns))
    return answer


def read(path: Path) -> list[Ran]:
    """The tasks of a program that has ended."""
    return [Ran(*each) for each in _RECORD.iter_unpack(path.read_bytes())]


class Rounds(NamedTuple):
    """Of a program that is one loop.

    Args:
        seconds: of each round: from the end of the one before it, and of the first from the first
            task's begin.
        longest_s: of each round: the longest task of each of its stages, added up. The rest of a
            round nobody computes, or waits for a core.
        stages_s: the median seconds of the longest task of a stage, by stage.
    """

    seconds: list[float]
    longest_s: list[float]
    stages_s: list[float]


def rounds_of(tasks: Sequence[Ran]) -> Rounds:
    """
    Args:
        tasks: of all rounds of one loop that has no branch.

    Raises:
        ValueError: A round has other stages than the first.
    """
    n_stages = 1 + max(task.stage for task in tasks)
    ends: dict[int, int] = {}
    longest: dict[tuple[int, int], int] = {}
    for task in tasks:
        number = (task.number - 1) // n_stages
        if (task.number - 1) % n_stages != task.stage:
            raise ValueError(f"stage {task.stage} has number {task.number}: that is not one loop")
        ends[number] = max(ends.get(number, 0), task.ended_ns)
        key = number, task.stage
        longest[key] = max(longest.get(key, 0), task.ended_ns - task.began_ns)
    before = min(task.began_ns for task in tasks)
    seconds, longest_s = [], []
    for number in range(len(ends)):
        seconds.append((ends[number] - before) / 1e9)
        before = ends[number]
        longest_s.append(sum(longest[number, stage] for stage in range(n_stages)) / 1e9)
    stages_s = [
        statistics.median(longest[number, stage] for number in range(len(ends))) / 1e9
        for stage in range(n_stages)
    ]
    return Rounds(seconds, longest_s, stages_s)
