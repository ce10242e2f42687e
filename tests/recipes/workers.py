"""Several workers in one process, with a matcher each. Their network keeps no order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from tests.recipes.programs import Values

Packet = tuple[int, int, int, int, list[bytes]]


class Workers:
    """
    Args:
        builder: The program.
        rng: Decides what happens next.
        matchers: One of each worker.
    """

    def __init__(self, builder: Builder, rng: random.Random, matchers: Sequence[Any]) -> None:
        self.builder, self.rng, self.matchers = builder, rng, matchers
        self.tables = builder.tables()
        self.values = Values(self.tables, builder.functions)
        self.running: list[tuple[int, ReadyTask]] = []
        self.packets: list[tuple[int, Packet]] = []
        self.answers: list[tuple[int, int, bool]] = []
        self.home: dict[tuple[int, int], int] = {}
        self.flying: list[tuple[tuple[int, int], SliceState]] = []
        for dataset in builder.datasets:
            for index, value in enumerate(dataset.source):
                self.values.at[dataset.number, index] = value
        for group in range(self.tables.n_groups):
            for index in range(self.tables.n_slices(group)):
                state = {n: PartitionState() for n in self.tables.datasets_of(group)}
                self.home[group, index] = rng.randrange(len(matchers))
                self._of(group, index).add(group, index, SliceState(state))

    def _of(self, group: int, index: int) -> Any:
        return self.matchers[self.home[group, index]]

    def run(self) -> list[list[Any]]:
        """The partitions at the end."""
        for _ in range(100_000):
            if self._is_over():
                break
            self.step()
        assert self._is_over(), "nothing goes on"
        return [
            [self.values.at[dataset.number, index] for index in range(dataset.n_partitions)]
            for dataset in self.builder.datasets
        ]

    def _is_over(self) -> bool:
        return (
            not self.flying
            and not self.answers
            and not self.running
            and all(each.is_complete for each in self.matchers)
        )

    def step(self) -> None:
        """One of what may happen."""
        for at, matcher in enumerate(self.matchers):
            self.running += [(at, task) for task in matcher.take(self.rng.randint(0, 3))]
        what = self.rng.choice([self._end, self._end, self._deliver, self._answer, self._move])
        what()

    def _end(self) -> None:
        if not self.running:
            return
        at, task = self.running.pop(self.rng.randrange(len(self.running)))
        matcher = self.matchers[at]
        following = matcher.next_stage(task.number)
        n_next = None if following is None else self.tables.stages[following].n_tasks
        sent, decision, _ = self.values.run(task, n_next, matcher.messages(task))
        if self.tables.stages[task.stage].sends:
            group = self.tables.stages[following].group
            for index in matcher.close_all(task, sent):
                packet = (task.number + 1, group, index, task.index, sent.get(index, []))
                # The sender's map may be old.
                self.packets += [(self.rng.randrange(len(self.matchers)), packet)]
        if decision is not None:
            matcher.decide(task.number, decision)
            others = [each for each in range(len(self.matchers)) if each != at]
            self.answers += [(other, task.number, decision) for other in others for _ in range(2)]
        matcher.finish([task])

    def _deliver(self) -> None:
        """To where its slice is, or is about to be; the others forward it."""
        if not self.packets:
            return
        place = self.rng.randrange(len(self.packets))
        to, packet = self.packets[place]
        _, group, index, *_ = packet
        if to != self.home[group, index]:
            self.packets[place] = (self.home[group, index], packet)
            return
        self.matchers[to].close(*packet)
        if self.rng.random() < 0.7:  # else it comes again
            del self.packets[place]

    def _answer(self) -> None:
        if self.answers:
            at, number, value = self.answers.pop(self.rng.randrange(len(self.answers)))
            self.matchers[at].decide(number, value)

    def land(self) -> None:
        """What is on its way comes: a pause waits for that."""
        for (group, index), state in self.flying:
            self._of(group, index).add(group, index, state)
        self.flying = []

    def _move(self) -> None:
        if self.flying and self.rng.random() < 0.6:
            (group, index), state = self.flying.pop(self.rng.randrange(len(self.flying)))
            self._of(group, index).add(group, index, state)
            return
        here = [key for key in self.home if key not in [each for each, _ in self.flying]]
        if not here:
            return
        key = self.rng.choice(here)
        matcher = self._of(*key)
        if not matcher.hold(*key) or self.rng.random() < 0.3:
            if self.rng.random() < 0.5:  # else it stays held until it is chosen again
                matcher.release(*key)
            return
        state = matcher.remove(*key)
        self.home[key] = self.rng.randrange(len(self.matchers))
        self.flying.append((key, state))
