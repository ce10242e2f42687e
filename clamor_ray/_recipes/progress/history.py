"""What a program has done so far, from the heartbeats of its workers. Pure.

Each heartbeat says how long each slice has computed since the one before. Those of workers come at
different times, so a node's cores are of the time between its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from clamor_ray._recipes.program.tables import Tables
from clamor_ray._recipes.progress.progress import (
    GroupProgress,
    LoopProgress,
    NodeProgress,
    ProgramProgress,
    ProgressSample,
)
from clamor_ray._recipes.progress.rounds import Done, loops_of

SAMPLE_S: Final = 1.0
LATELY: Final = 6  # samples, or heartbeats of a node, that rates are of
MOST_SAMPLES: Final = 240
LEAST_S: Final = 1e-3

Slice = tuple[int, int]  # group, index


class History:
    """See the file's head. Not thread-safe: one caller at a time.

    Args:
        tables: The program.
        begun: What had run when it began; None: nobody knows yet.
        now_s: Of a clock that only grows.
    """

    def __init__(self, tables: Tables, begun: Done | None, now_s: float) -> None:
        self._tables = tables
        self._loops = loops_of(tables)
        self._begun_s = now_s
        self._ended_s: float | None = None
        self._done = begun or Done(rounds=(0,) * len(self._loops))
        self._slices: dict[Slice, float] = {}
        self._nodes: dict[str, float] = {}
        # Of each node: when it was heard of, and what it had computed then.
        self._heard: dict[str, deque[tuple[float, float]]] = {}
        self._samples: list[ProgressSample] = []
        self._lately: deque[ProgressSample] = deque(maxlen=LATELY)
        self._every_s = SAMPLE_S
        if begun is not None:
            self._add(now_s)

    def loaded(self, now_s: float) -> None:
        """All partitions are at their workers: what was before does not count, if nobody has
        computed yet."""
        if self._ended_s is None and not any(self._nodes.values()):
            self._begun_s = now_s

    @property
    def rounds(self) -> int:
        """Of the outermost loops, that have ended."""
        return sum(
            n for loop, n in zip(self._loops, self._done.rounds, strict=True) if not loop.depth
        )

    def heard(self, node_id: str, seconds: Mapping[Slice, float], now_s: float) -> None:
        """A heartbeat has come from a node.

        Args:
            seconds: How long its slices have computed since the last one.
        """
        for slice, each in seconds.items():
            self._slices[slice] = self._slices.get(slice, 0.0) + each
        busy_s = self._nodes.get(node_id, 0.0) + sum(seconds.values())
        self._nodes[node_id] = busy_s
        if node_id not in self._heard:
            self._heard[node_id] = deque([(self._begun_s, 0.0)], maxlen=LATELY)
        self._heard[node_id].append((now_s, busy_s))

    def sample(self, done: Callable[[], Done | None], now_s: float, is_last: bool = False) -> None:
        """Time goes on. Calls `done` about once a second: what has run everywhere.

        Args:
            is_last: The program has ended.
        """
        if self._ended_s is not None:
            return
        at_s = now_s - self._begun_s
        if not is_last and self._lately and at_s - self._lately[-1].at_s < SAMPLE_S:
            return
        self._done = done() or self._done
        if is_last:
            self._ended_s = now_s
        self._add(now_s, is_last)

    def _add(self, now_s: float, is_last: bool = False) -> None:
        at_s = now_s - self._begun_s
        now = ProgressSample(at_s, self.rounds, self._done.tasks, dict(self._nodes))
        self._lately.append(now)
        if is_last or not self._samples or at_s - self._samples[-1].at_s >= self._every_s:
            self._samples.append(now)
        if len(self._samples) > MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._every_s *= 2

    def progress(self, state: str, at: Mapping[Slice, str], now_s: float) -> ProgramProgress:
        """
        Args:
            state: Of the program.
            at: Slice -> Ray's hex id of its node.
        """
        elapsed_s = (now_s if self._ended_s is None else self._ended_s) - self._begun_s
        seen = self._samples if self._ended_s is not None else self._lately
        first, last = (seen[0], seen[-1]) if seen else (None, None)
        rounds_per_s = tasks_per_s = 0.0
        if first is not None and last is not None:
            between_s = max(LEAST_S, last.at_s - first.at_s)
            # After a loss both go back.
            rounds_per_s = max(0, last.rounds - first.rounds) / between_s
            tasks_per_s = max(0, last.tasks - first.tasks) / between_s
        return ProgramProgress(
            state=state,
            elapsed_s=elapsed_s,
            loops=tuple(
                LoopProgress(
                    name=loop.name,
                    depth=loop.depth,
                    rounds=rounds,
                    most=loop.most,
                    may_end_before=loop.may_end_before,
                )
                for loop, rounds in zip(self._loops, self._done.rounds, strict=True)
            ),
            tasks=self._done.tasks,
            rounds_per_s=rounds_per_s,
            tasks_per_s=tasks_per_s,
            nodes=self._node_rows(at),
            groups=tuple(self._group(group, at) for group in range(self._tables.n_groups)),
            samples=tuple(self._samples),
        )

    def _node_rows(self, at: Mapping[Slice, str]) -> tuple[NodeProgress, ...]:
        has: dict[str, int] = {}
        for node_id in at.values():
            has[node_id] = has.get(node_id, 0) + 1
        return tuple(
            NodeProgress(node_id, has.get(node_id, 0), self._nodes.get(node_id, 0.0), cores)
            for node_id in sorted({*has, *self._nodes})
            for cores in (self._cores(node_id),)
        )

    def _cores(self, node_id: str) -> float:
        if node_id not in self._heard:
            return 0.0
        (first_s, before_s), (last_s, busy_s) = self._heard[node_id][0], self._heard[node_id][-1]
        return (busy_s - before_s) / max(LEAST_S, last_s - first_s)

    def _group(self, group: int, at: Mapping[Slice, str]) -> GroupProgress:
        slices = [(group, index) for index in range(self._tables.n_slices(group))]
        return GroupProgress(
            datasets=tuple(self._tables.datasets[n].name for n in self._tables.datasets_of(group)),
            busy_s=tuple(self._slices.get(slice, 0.0) for slice in slices),
            node_ids=tuple(at.get(slice, "") for slice in slices),
        )
