"""Describes a program: datasets, stages, loops and branches. Pure.

A program is described once, before the job, and whole (Canary, section 6.1): workers start their
own tasks, so there is nobody that could be asked what comes next.

    dataset    N partitions. Stages change them in place
    value      a dataset with one partition
    stage      a function that runs once for each partition index
    loop       stages that run until a stage says that it is enough, or so many times
    branch     stages that run where a stage says so

What cannot be right is refused where it is written, with the line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clamor_ray._recipes.program.dataset import Dataset, checked, n_partitions_of, whole_number
from clamor_ray._recipes.program.functions import uses_of
from clamor_ray._recipes.program.statements import (
    Branch,
    Decision,
    Loop,
    Stage,
    Statement,
    line_of_caller,
    refuse,
)
from clamor_ray._recipes.program.tables import ENDLESS, Tables
from clamor_ray._recipes.program.translate import stages_of, translate

__all__ = ["BranchHandle", "Builder", "Dataset", "LoopHandle"]


class LoopHandle:
    """An open loop. See `Builder.loop`."""

    def __init__(self, builder: Builder, loop: Loop) -> None:
        self._builder = builder
        self._loop = loop

    def until(
        self,
        function: Callable[..., Any],
        reads: Sequence[Dataset] = (),
        writes: Sequence[Dataset] = (),
        name: str | None = None,
        receives: bool | None = None,
    ) -> None:
        """The loop ends after the round in which this stage returns True. The last of the loop.

        Args:
            function: Called like that of a stage; it returns a bool, and changes in place what it
                writes.
            reads, writes: Values: datasets with one partition, so that there is one answer.
            name: For people; that of the function if left out.
            receives: As for `Builder.stage`.

        Raises:
            ProgramError: It is not in its own loop, directly; the loop has such a stage; see
                `Builder.branch`.
        """
        line = line_of_caller()
        builder = self._builder
        if self._loop.until is not None:
            refuse(line, f"The loop has an until() already, at {self._loop.until.line}.")
        if builder._blocks[-1] is not self._loop.body:
            refuse(
                line,
                "until() belongs directly into its own loop: not behind it, and in no loop or "
                "branch inside of it.",
            )
        self._loop.until = builder._decision(function, reads, writes, name, receives, line)
        builder._ended[-1] = line


class BranchHandle:
    """An open branch. See `Builder.branch`."""

    def __init__(self, builder: Builder, branch: Branch) -> None:
        self._builder = builder
        self._branch = branch

    @contextlib.contextmanager
    def otherwise(self) -> Iterator[None]:
        """Stages that run where the answer is False. Directly after the branch.

        Raises:
            ProgramError: It is not, or there is one already.
        """
        line = line_of_caller()
        block = self._builder._blocks[-1]
        if not block or block[-1] is not self._branch or self._branch.otherwise:
            refuse(line, "otherwise() belongs directly behind its branch, outside of it, and once.")
        with self._builder._block(self._branch.otherwise):
            yield


class Builder:
    """See the file's head. Not thread-safe.

    Example:
        >>> p = Builder()
        >>> points = p.dataset([[1, 2], [3, 4]])
        >>> total = p.value(0)
        >>> def send_sum(t, points):
        ...     t.send(0, sum(points))
        >>> def add_up(t, total):
        ...     return total + sum(t.recv())
        >>> p.stage(send_sum, reads=[points])
        >>> p.stage(add_up, writes=[total])
        >>> [stage.name for stage in p.tables().stages]
        ['send_sum', 'add_up']
    """

    def __init__(self) -> None:
        self._datasets: list[Dataset] = []
        self._body: list[Statement] = []
        self._blocks: list[list[Statement]] = [self._body]
        self._ended: list[str] = [""]  # of each open block: the line of its until()
        self._tables: Tables | None = None

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """All, by number."""
        return tuple(self._datasets)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Of the stages, by number."""
        return tuple(stage.function for stage in self._stages())

    def dataset(self, source: Any, n: int | None = None, name: str | None = None) -> Dataset:
        """A dataset with a partition for each item of a sequence.

        Args:
            source: The partitions, or what gives them when the program runs. None: there are none
                until a stage writes them, which finds None in their place.
            n: How many there are, where the source does not say.
            name: For people.

        Returns:
            What stages name in `reads` and `writes`, and `Job.result` is asked for.

        Raises:
            ProgramError: It has no partition, nobody says how many, or two say different numbers.

        Example:
            >>> program = clamor.Program()
            >>> program.dataset([np.zeros(3), np.ones(3)], name="rows").n_partitions
            2
        """
        line = line_of_caller()
        return self._add_dataset(source, n_partitions_of(source, n, line), name, line)

    def value(self, initial: Any, name: str | None = None) -> Dataset:
        """A dataset with one partition.

        Args:
            initial: what it is at first.
            name: for people.

        Returns:
            As `dataset`'s.

        Example:
            >>> clamor.Program().value(0.5, name="rate").n_partitions
            1
        """
        return self._add_dataset([initial], 1, name, line_of_caller(), is_value=True)

    def stage(
        self,
        function: Callable[..., Any],
        reads: Sequence[Dataset] = (),
        writes: Sequence[Dataset] = (),
        name: str | None = None,
        sends: bool | None = None,
        receives: bool | None = None,
    ) -> None:
        """The next stage: `function` runs once for each partition index of these datasets.

        It is called ``function(t, *reads, *writes)``, with the partitions of one index; `t` is a
        `Task`. What it writes it changes in place, or returns: the partition if there is one in
        `writes`, else a tuple of all of them in that order.

        Args:
            function: Picklable by value.
            reads: It does not change these.
            writes: It reads and may change these.
            name: For people; that of the function if left out.
            sends, receives: Whether it calls ``t.send`` or ``t.broadcast``, and ``t.recv``. Left
                out: whether the function's own text does.

        Raises:
            ProgramError: The datasets have different numbers of partitions, are of another
                program, or are named twice; nothing is accessed; the function takes another number
                of arguments; the loop has had its ``until``.

        Example:
            >>> program = clamor.Program()
            >>> parts = program.dataset([1, 2])
            >>> program.stage(lambda t, part: part + t.index, writes=[parts])
        """
        line = line_of_caller()
        given = checked(function, reads, writes, name, self._datasets, line)
        self._add(Stage(**(given | uses_of(function, sends, receives))), line)

    @contextlib.contextmanager
    def loop(self, max: int | None = None) -> Iterator[LoopHandle]:
        """Stages that run again and again: at most `max` times, and until ``until`` says so.

        Args:
            max: At least 1. Left out: the loop must have an ``until``.

        Returns:
            A context manager: what is described in it is the loop. It gives a handle, whose
            ``until(function, reads, writes)`` says when the loop ends.

        Raises:
            ProgramError: It has no stage, or no end.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> with program.loop(max=100) as loop:
            ...     program.stage(lambda t, n: n * 2, writes=[n])
            ...     loop.until(lambda t, n: n > 1000, reads=[n])
        """
        line = line_of_caller()
        most = ENDLESS if max is None else whole_number(max, "max", line)
        if max is not None and not 1 <= most < ENDLESS:
            refuse(line, f"max is {max}: a loop has at least one round, and fewer than 2**62.")
        loop = Loop(line, most)
        with self._block(loop.body):
            yield LoopHandle(self, loop)
        if not loop.body and loop.until is None:
            refuse(line, "The loop has no stage.")
        if max is None and loop.until is None:
            refuse(line, "The loop has no end: pass max, or call until() in it.")
        self._add(loop, line)

    @contextlib.contextmanager
    def branch(
        self,
        function: Callable[..., Any],
        reads: Sequence[Dataset] = (),
        writes: Sequence[Dataset] = (),
        name: str | None = None,
        receives: bool | None = None,
    ) -> Iterator[BranchHandle]:
        """Stages that run where a stage returns True.

        Args:
            function, reads, writes, name, receives: As of `stage`. The function returns a bool.

        Returns:
            A context manager: what is described in it is the branch. It gives a handle, whose
            ``otherwise()`` is one for stages that run where the answer is False.

        Raises:
            ProgramError: A dataset has many partitions; see `stage`.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(7)
            >>> with program.branch(lambda t, n: n % 2 == 0, reads=[n]) as branch:
            ...     program.stage(lambda t, n: n // 2, writes=[n])
            >>> with branch.otherwise():
            ...     program.stage(lambda t, n: 3 * n + 1, writes=[n])
        """
        line = line_of_caller()
        branch = Branch(line, self._decision(function, reads, writes, name, receives, line))
        with self._block(branch.then):
            yield BranchHandle(self, branch)
        self._add(branch, line)

    def tables(self) -> Tables:
        """The program, translated: what workers are told of it.

        Returns:
            Datasets, stages and steps, by number.

        Raises:
            ProgramError: A loop or branch is open; there is no stage; messages go where nobody
                reads them; something is read that nothing has written.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> program.stage(lambda t, n: n + 1, writes=[n], name="add")
            >>> [stage.name for stage in program.tables().stages]
            ['add']
        """
        if self._tables is None:
            if len(self._blocks) > 1:
                refuse(
                    line_of_caller(),
                    "A loop or branch of the program is open here: leave its `with` block first.",
                )
            if not self._body:
                refuse(line_of_caller(), "The program has no stage.")
            self._tables = translate(self._datasets, self._body)
        return self._tables

    # -- of loops and branches

    @contextlib.contextmanager
    def _block(self, block: list[Statement]) -> Iterator[None]:
        self._blocks.append(block)
        self._ended.append("")
        try:
            yield
        finally:
            self._blocks.pop()
            self._ended.pop()

    def _decision(
        self,
        function: Callable[..., Any],
        reads: Sequence[Dataset],
        writes: Sequence[Dataset],
        name: str | None,
        receives: bool | None,
        line: str,
    ) -> Decision:
        given = checked(function, reads, writes, name, self._datasets, line)
        for number in (*given["reads"], *given["writes"]):
            dataset = self._datasets[number]
            if dataset.n_partitions != 1:
                refuse(
                    line,
                    f"Stage {given['name']} decides what comes next, and {dataset.name} has "
                    f"{dataset.n_partitions} partitions, so there would be as many answers: decide "
                    "over values.",
                )
        return Decision(**(given | uses_of(function, None, receives)))

    # -- checks

    def _add(self, statement: Statement, line: str) -> None:
        if self._ended[-1]:
            refuse(
                line,
                f"The until() of the loop, at {self._ended[-1]}, is its last stage: put this "
                "before it, or behind the loop.",
            )
        self._tables = None
        self._blocks[-1].append(statement)

    def _add_dataset(
        self, source: Any, n: int, name: str | None, line: str, is_value: bool = False
    ) -> Dataset:
        number = len(self._datasets)
        made = Dataset(
            number=number,
            name=name or f"dataset {number}",
            n_partitions=n,
            line=line,
            source=source,
            is_value=is_value,
        )
        self._datasets.append(made)
        self._tables = None
        return made

    def _stages(self) -> Iterator[Stage]:
        return stages_of(self._body)
