"""What a program is translated to: datasets, stages, and steps that say which stage comes next.

A program is the same for all workers, so these tables are all that a worker is told of it. They
have numbers in place of functions: a matcher in C reads them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NamedTuple

END: Final = -1  # in place of a step
ENDLESS: Final = 2**62  # rounds of a loop that ends by its decision alone


class DatasetInfo(NamedTuple):
    """One dataset.

    Args:
        name: For people.
        n_partitions: How many it has.
        group: Datasets of one group have their partitions of one index on one worker.
    """

    name: str
    n_partitions: int
    group: int


class Access(NamedTuple):
    """What a stage does to one dataset.

    Args:
        dataset: Its number.
        is_write: It may change the partition; else it only reads.
    """

    dataset: int
    is_write: bool


class StageInfo(NamedTuple):
    """One stage of the program's text.

    Args:
        name: For people.
        line: Of the user's program: ``file:line``.
        n_tasks: One for each partition index.
        group: Of its datasets.
        accesses: Of its datasets, each one once.
        sends: Its tasks may send messages to the next stage.
        receives: Its function looks at messages.
        decides: It returns whether a loop ends, or which branch is taken.
    """

    name: str
    line: str
    n_tasks: int
    group: int
    accesses: tuple[Access, ...]
    sends: bool
    receives: bool
    decides: bool


class Op(IntEnum):
    """What a step does."""

    RUN = 0  # a stage; then `then`
    DECIDE = 1  # a stage; then `then` where it returns True, else `other`
    CLEAR = 2  # sets the loop's counter to 0; then `then`
    REPEAT = 3  # adds 1 to the loop's counter; then `then` up to `limit`, else `other`


class Step(NamedTuple):
    """One step.

    Args:
        op: What it does.
        arg: The stage of RUN and DECIDE, the counter of CLEAR and REPEAT.
        then: The next step, or `END`.
        other: See `Op`.
        limit: Of REPEAT: the most rounds.
    """

    op: Op
    arg: int
    then: int
    other: int = END
    limit: int = 0


class LineKind(Enum):
    """What a line of the outline is about."""

    STAGE = "stage"
    UNTIL = "until"  # the stage that ends the loop around it
    BRANCH = "branch"  # the stage that decides; `then` is below it
    OTHERWISE = "otherwise"  # of the branch above it
    LOOP = "loop"


class OutlineLine(NamedTuple):
    """One line of a program's text, for people.

    Args:
        depth: Loops and branches around it.
        kind: What it is about.
        number: Of a stage; of LOOP: its counter, in the order of the text.
    """

    depth: int
    kind: LineKind
    number: int


@dataclass(frozen=True)
class Tables:
    """A program, translated. Picklable.

    Args:
        datasets, stages, steps: By number. Step 0 is the first one.
        n_counters: Of loops.
        outline: The user's text. Nothing runs by it.
    """

    datasets: tuple[DatasetInfo, ...]
    stages: tuple[StageInfo, ...]
    steps: tuple[Step, ...]
    n_counters: int
    outline: tuple[OutlineLine, ...] = ()

    @property
    def n_groups(self) -> int:
        return 1 + max((info.group for info in self.datasets), default=-1)

    def datasets_of(self, group: int) -> tuple[int, ...]:
        """The datasets of a group, in order."""
        return tuple(n for n, info in enumerate(self.datasets) if info.group == group)

    def n_slices(self, group: int) -> int:
        """How many partition indices a group has."""
        return next(info.n_partitions for info in self.datasets if info.group == group)
