"""The order of stages as it is known so far: the program's steps, taken one after the other.

Every worker takes the same steps, so a stage has the same number everywhere (Canary, section 4.3):
the first one that runs is 1, and a stage that runs in 100 rounds of a loop has 100 numbers. Behind
a decision nothing is known until it comes.

Preconditions come from the order alone. Of each partition that a task reads or writes: the number
of the stage that must have written it last, and how many stages must have read it since. So no
round of a loop needs recipes of its own here: what the first round finds is what the steps before
it left.
"""

from __future__ import annotations

from typing import NamedTuple

from clamor_ray._recipes.program.tables import END, Op, Tables


class Need(NamedTuple):
    """What a task needs of one partition that it accesses.

    Args:
        dataset: Its number.
        is_write: The task may change it.
        writer: The number of the stage that has written it last; 0: it is as it was given.
        readers: How many stages read it after that, and before this one.
    """

    dataset: int
    is_write: bool
    writer: int
    readers: int


class Instance(NamedTuple):
    """A stage that runs, once for each partition index.

    Args:
        number: Its place in the order, from 1.
        stage: Of the tables.
        senders: So many tasks of the stage before must have sent all that they send.
        needs: For each dataset that it accesses.
    """

    number: int
    stage: int
    senders: int
    needs: tuple[Need, ...]


class Sequence:
    """See the file's head. Not thread-safe: one caller at a time.

    Args:
        tables: The program.

    Example:
        >>> from clamor_ray._recipes.program.builder import Builder
        >>> p = Builder()
        >>> x = p.value(1)
        >>> with p.loop(max=2):
        ...     _ = p.stage(lambda t, x: x + 1, writes=[x])
        >>> [(each.number, each.needs[0].writer) for each in Sequence(p.tables()).extend(10)]
        [(1, 0), (2, 1)]
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._step = 0 if tables.steps else END
        self._counters = [0] * tables.n_counters
        self._writers = [0] * len(tables.datasets)
        self._readers = [0] * len(tables.datasets)
        self._last_stage: int | None = None
        self._n = 0
        self._waits = False

    @property
    def n_known(self) -> int:
        """The number of the last stage that is known."""
        return self._n

    @property
    def decision(self) -> int | None:
        """The number of the stage whose answer is waited for."""
        return self._n if self._waits else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing comes after what is known."""
        return self._step == END and not self._waits

    def decide(self, number: int, value: bool) -> bool:
        """A stage has answered. Safe to call again, also early or late.

        Returns:
            Whether that was waited for.
        """
        if number != self.decision:
            return False
        step = self._tables.steps[self._step]
        self._step = step.then if value else step.other
        self._waits = False
        return True

    def extend(self, most: int) -> list[Instance]:
        """The next stages that are known, in their order.

        Args:
            most: So many of them.
        """
        found: list[Instance] = []
        while len(found) < most and self._step != END and not self._waits:
            step = self._tables.steps[self._step]
            if step.op is Op.CLEAR:
                self._counters[step.arg] = 0
                self._step = step.then
            elif step.op is Op.REPEAT:
                self._counters[step.arg] += 1
                goes_on = self._counters[step.arg] <= step.limit
                self._step = step.then if goes_on else step.other
            else:
                found.append(self._next(step.arg))
                if step.op is Op.DECIDE:
                    self._waits = True
                else:
                    self._step = step.then
        return found

    def _next(self, stage: int) -> Instance:
        self._n += 1
        info = self._tables.stages[stage]
        needs = tuple(
            Need(
                access.dataset,
                access.is_write,
                self._writers[access.dataset],
                self._readers[access.dataset],
            )
            for access in info.accesses
        )
        for access in info.accesses:
            if access.is_write:
                self._writers[access.dataset] = self._n
                self._readers[access.dataset] = 0
            else:
                self._readers[access.dataset] += 1
        before = None if self._last_stage is None else self._tables.stages[self._last_stage]
        self._last_stage = stage
        senders = before.n_tasks if before is not None and before.sends else 0
        return Instance(self._n, stage, senders, needs)
