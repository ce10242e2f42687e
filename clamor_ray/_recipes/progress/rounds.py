"""Which rounds of loops have ended where all stages up to a number have run. Pure.

A worker knows stage numbers and answers of decisions; people think in rounds. The steps are taken
again here, by the numbers alone: a loop whose rounds are all alike is counted by division, so a
hundred thousand rounds a second cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from clamor_ray._recipes.program.tables import END, ENDLESS, LineKind, Op, Step, Tables


@dataclass(frozen=True)
class Done:
    """What has run.

    Args:
        number: All stages up to it, on all slices that are meant.
        tasks: Of those stages.
        rounds: Of each loop, in the order of the text: those that have ended, of all times that the
            loop was entered.
    """

    number: int = 0
    tasks: int = 0
    rounds: tuple[int, ...] = ()


class LoopInfo(NamedTuple):
    """A loop, for people.

    Args:
        name: Its first and its last stage.
        depth: Loops around it.
        most: Rounds each time that it is entered; None: as many as its decision says.
        may_end_before: A decision may end it before.
    """

    name: str
    depth: int
    most: int | None
    may_end_before: bool


@dataclass
class _Round:
    """What one round of a loop has, where each has the same.

    Args:
        stages: Their numbers.
        tasks: Of them.
        inner: Rounds of loops inside, by counter.
    """

    stages: int = 0
    tasks: int = 0
    inner: dict[int, int] = field(default_factory=dict)

    def add(self, other: _Round, times: int) -> None:
        self.stages += times * other.stages
        self.tasks += times * other.tasks
        for loop, n in other.inner.items():
            self.inner[loop] = self.inner.get(loop, 0) + times * n


class RoundCounter:
    """See the file's head. Not thread-safe: one caller at a time.

    Args:
        tables: The program.

    Example:
        >>> from clamor_ray._recipes.program.builder import Builder
        >>> p = Builder()
        >>> x = p.dataset([1, 2])
        >>> with p.loop(max=10**9):
        ...     p.stage(lambda t, x: x + 1, writes=[x])
        ...     p.stage(lambda t, x: x * 2, writes=[x])
        >>> RoundCounter(p.tables()).advance(7, {})
        Done(number=7, tasks=14, rounds=(3,))
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._ends = _loops_that_end_by(tables)
        self._alike = {
            step.arg: _round_of(tables, at)
            for at, step in enumerate(tables.steps)
            if step.op is Op.REPEAT
        }
        self._at = 0 if tables.steps else END
        self._counters = [0] * tables.n_counters
        self._is_open = [False] * tables.n_counters  # a round has begun, and not ended
        self._done = _Round(inner=dict.fromkeys(range(tables.n_counters), 0))
        self._waits = False  # for the answer of the stage with the last number

    def advance(self, number: int, decisions: Mapping[int, bool]) -> Done:
        """All stages up to that number have run. It does not go back; where an answer is missing it
        stays there.

        Args:
            number: Of a stage.
            decisions: Answers by number: of those behind the number of the call before.
        """
        while self._at != END:
            step = self._tables.steps[self._at]
            if step.op is Op.CLEAR:
                self._counters[step.arg] = 0
                self._at = step.then
            elif step.op is Op.REPEAT:
                self._repeat(step, number - self._done.stages)
            elif self._waits:
                answer = decisions.get(self._done.stages)
                if answer is None:
                    break
                self._decide(step, answer)
            elif self._done.stages >= number:
                break
            else:
                self._done.stages += 1
                self._done.tasks += self._tables.stages[step.arg].n_tasks
                if step.op is Op.DECIDE:
                    self._waits = True
                else:
                    self._at = step.then
        done = self._done
        return Done(done.stages, done.tasks, tuple(done.inner.values()))

    def _repeat(self, step: Step, left: int) -> None:
        loop = step.arg
        self._end_round(loop)
        alike = self._alike[loop]
        if alike is not None:
            whole = min(step.limit - self._counters[loop], max(0, left) // alike.stages)
            self._done.add(alike, whole)
            self._done.inner[loop] += whole
            self._counters[loop] += whole
        self._is_open[loop] = self._counters[loop] < step.limit
        self._counters[loop] += 1
        self._at = step.then if self._is_open[loop] else step.other

    def _decide(self, step: Step, answer: bool) -> None:
        self._waits = False
        self._at = step.then if answer else step.other
        if answer and step.arg in self._ends:
            self._end_round(self._ends[step.arg])

    def _end_round(self, loop: int) -> None:
        self._done.inner[loop] += self._is_open[loop]
        self._is_open[loop] = False


def loops_of(tables: Tables) -> list[LoopInfo]:
    """In the order of the text, which is that of their counters."""
    limits = {step.arg: step.limit for step in tables.steps if step.op is Op.REPEAT}
    ends = set(_loops_that_end_by(tables).values())
    stages: dict[int, list[str]] = {}
    depths: dict[int, int] = {}
    open_loops: list[tuple[int, int]] = []  # depth, counter
    for line in tables.outline:
        while open_loops and line.depth <= open_loops[-1][0]:
            open_loops.pop()
        if line.kind is LineKind.LOOP:
            depths[line.number] = len(open_loops)
            open_loops.append((line.depth, line.number))
        elif line.kind is not LineKind.OTHERWISE:
            for _, loop in open_loops:
                stages.setdefault(loop, []).append(tables.stages[line.number].name)
    return [
        LoopInfo(
            name=" … ".join(dict.fromkeys((stages[loop][0], stages[loop][-1]))),
            depth=depth,
            most=None if limits[loop] == ENDLESS else limits[loop],
            may_end_before=loop in ends,
        )
        for loop, depth in depths.items()
    ]


def _loops_that_end_by(tables: Tables) -> dict[int, int]:
    """Stage that is the `until` of a loop -> the loop's counter."""
    found: dict[int, int] = {}
    at: dict[int, int] = {}  # depth -> the loop that is open there
    for line in tables.outline:
        if line.kind is LineKind.LOOP:
            at[line.depth] = line.number
        elif line.kind is LineKind.UNTIL:
            found[line.number] = at[line.depth - 1]
    return found


def _round_of(tables: Tables, head: int) -> _Round | None:
    """One round of the loop whose REPEAT this is; None: a decision says what it has."""
    found = _Round()
    at = tables.steps[head].then
    while at != head:
        step = tables.steps[at]
        if step.op is Op.DECIDE:
            return None
        if step.op is Op.RUN:
            found.add(_Round(1, tables.stages[step.arg].n_tasks), 1)
            at = step.then
        elif step.op is Op.CLEAR:
            at = step.then
        else:
            inner = _round_of(tables, at)
            if inner is None:
                return None
            found.add(inner, step.limit)
            found.add(_Round(inner={step.arg: 1}), step.limit)
            at = step.other
    return found
