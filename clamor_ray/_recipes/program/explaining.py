"""A program as text for people: its datasets, its stages, and what each of them waits for."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Final

from clamor_ray._recipes.program.recipes import Recipes, Rounds, StageRecipe, Written, loops_around
from clamor_ray._recipes.program.tables import ENDLESS, LineKind, Op, OutlineLine, Tables

WIDTH: Final = 96
INDENT: Final = 2


def explain_text(tables: Tables) -> str:
    """What a program does, and what each stage waits for.

    Args:
        tables: The program.

    Returns:
        Lines of at most 96 columns, where names allow it.

    Example:
        >>> from clamor_ray._recipes.program.builder import Builder
        >>> p = Builder()
        >>> x = p.dataset([1, 2, 3], name="x")
        >>> def double(t, x):
        ...     return 2 * x
        >>> with p.loop(max=10):
        ...     p.stage(double, writes=[x])
        >>> print(explain_text(p.tables()))  # doctest: +ELLIPSIS
        program: 1 stage, 1 dataset, 3 partitions
        <BLANKLINE>
        datasets; those of one group move together
          group 0   x (3 partitions)
        <BLANKLINE>
        loop, 10 rounds
          0 double, 3 tasks  (...)
              writes x: first round: as it is at first, read by nobody since
                        later rounds: written by double in the round before, read by nobody since
    """
    return "\n".join([*_head(tables), "", *_Explained(tables).lines()])


def _head(tables: Tables) -> list[str]:
    counts = [info.n_partitions for info in tables.datasets]
    lines = [
        f"program: {_count(len(tables.stages), 'stage')}, {_count(len(counts), 'dataset')}, "
        f"{_count(sum(counts), 'partition')}",
        "",
        "datasets; those of one group move together",
    ]
    for group in range(tables.n_groups):
        names = [tables.datasets[n].name for n in tables.datasets_of(group)]
        each = " each" if len(names) > 1 else ""
        size = _count(tables.n_slices(group), "partition")
        lines += _wrapped(f"  group {group}   ", f"{', '.join(names)} ({size}{each})")
    return lines


class _Explained:
    """The stages, in the order of the user's text."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._recipes = Recipes(tables)
        self._around = loops_around(tables)
        self._limits = {step.arg: step.limit for step in tables.steps if step.op is Op.REPEAT}
        self._untils: dict[int, str] = {}  # of a loop
        for line in tables.outline:
            if line.kind is LineKind.UNTIL:
                loop = self._around[line.number][-1]
                self._untils[loop] = tables.stages[line.number].name

    def lines(self) -> list[str]:
        found: list[str] = []
        for line in self._tables.outline:
            margin = " " * (INDENT * line.depth)
            if line.kind is LineKind.LOOP:
                found.append(f"{margin}{self._loop(line.number)}")
            elif line.kind is LineKind.OTHERWISE:
                info = self._tables.stages[line.number]
                found.append(f"{margin}where {line.number} {info.name} says False:")
            else:
                found += [f"{margin}{each}" for each in self._stage(line)]
        return found

    def _loop(self, loop: int) -> str:
        name = "loop" if len(self._limits) == 1 else f"loop {loop}"
        limit, until = self._limits[loop], self._untils.get(loop)
        if until is None:
            return f"{name}, {_count(limit, 'round')}"
        most = "" if limit == ENDLESS else f", at most {_count(limit, 'round')}"
        return f"{name}, until {until} says True{most}"

    def _stage(self, line: OutlineLine) -> list[str]:
        info = self._tables.stages[line.number]
        head = f"{line.number} {info.name}, {_count(info.n_tasks, 'task')}"
        if info.sends:
            head += ", sends to the next stage"
        head += f"  ({PurePath(info.line).name})"
        recipes = self._recipes.of(line.number)
        lines = [head]
        said = self._by_rounds(line.number, recipes, self._senders)
        if said != ["none"]:
            lines += _entry("messages", said)
        for access in info.accesses:

            def needs(
                recipe: StageRecipe, n: int = access.dataset, w: bool = access.is_write
            ) -> str:
                return self._needs(line.number, recipe.needs[n], w)

            name = self._tables.datasets[access.dataset].name
            does = "writes" if access.is_write else "reads"
            lines += _entry(f"{does} {name}", self._by_rounds(line.number, recipes, needs))
        if line.kind is LineKind.BRANCH:
            lines.append(f"where {line.number} {info.name} says True:")
        return lines

    # -- first rounds and later ones

    def _by_rounds(
        self, stage: int, recipes: Mapping[Rounds, StageRecipe], say: Callable[[StageRecipe], str]
    ) -> list[str]:
        """What is said of each kind of rounds, once where that is the same in all."""
        said: dict[str, set[Rounds]] = {}
        for rounds, recipe in recipes.items():
            said.setdefault(say(recipe), set()).add(rounds)
        if len(said) == 1:
            return list(said)
        lines = [
            (
                sorted(some),
                f"{self._rounds(self._around[stage], some, set(recipes) - some)}: {text}",
            )
            for text, some in said.items()
        ]
        return [line for _, line in sorted(lines)]

    def _rounds(self, loops: Sequence[int], some: set[Rounds], others: set[Rounds]) -> str:
        """Words for kinds of rounds; a loop of which all rounds are alike is not named."""
        matters = [
            n
            for n in range(len(loops))
            if any((*each[:n], not each[n], *each[n + 1 :]) in others for each in some)
        ] or range(len(loops))
        kinds = sorted({tuple((loops[n], each[n]) for n in matters) for each in some})
        return " or ".join(", ".join(self._round(*part) for part in kind) for kind in kinds)

    def _round(self, loop: int, is_later: bool) -> str:
        of = "" if len(self._limits) == 1 else f" of loop {loop}"
        return ("later rounds" if is_later else "first round") + of

    # -- preconditions

    def _senders(self, recipe: StageRecipe) -> str:
        said = []
        for sender in sorted(recipe.senders, key=lambda each: -1 if each is None else each):
            if sender is None:
                said.append("none")
            else:
                info = self._tables.stages[sender]
                said.append(f"from {_count(info.n_tasks, 'task')} of {info.name}")
        return " or ".join(said)

    def _needs(
        self, stage: int, needs: Mapping[Written, Mapping[int, frozenset[int]]], is_write: bool
    ) -> str:
        merged: dict[int | None, list[Written]] = {}
        for written in needs:
            merged.setdefault(written.stage, []).append(written)
        said = []
        for writer, ways in merged.items():
            text = self._writer(writer, ways)
            readers: dict[int, set[int]] = {}
            for way in ways:
                for reader in {each for other in ways for each in needs[other]}:
                    readers.setdefault(reader, set()).update(needs[way].get(reader, {0}))
            if not is_write:
                readers.pop(stage, None)  # its own earlier rounds
            said.append(text + self._readers(readers, is_write))
        return "; or ".join(said)

    def _writer(self, stage: int | None, ways: Sequence[Written]) -> str:
        if stage is None:
            return "as it is at first"
        text = f"written by {self._tables.stages[stage].name}"
        whens = {(way.loop, way.rounds) for way in ways}
        if (None, 0) in whens:
            return text if len(whens) == 1 else f"{text} in this round or an earlier one"
        if whens == {(loop, 1) for loop, _ in whens} and len(whens) == 1:
            loop = next(iter(whens))[0]
            of = "" if len(self._limits) == 1 else f" (loop {loop})"
            return f"{text} in the round before{of}"
        return f"{text} in an earlier round"

    def _readers(self, readers: Mapping[int, set[int]], is_write: bool) -> str:
        """A writer waits for the ends of all readers; a reader begins after those before it."""
        if not readers:
            return ", read by nobody since" if is_write else ""
        names = []
        for reader in sorted(readers):
            name, counts = self._tables.stages[reader].name, readers[reader]
            if counts == {0, 1}:
                name += " or not"
            elif counts == {2}:
                name += " in several rounds"
            elif counts != {1}:
                name += " once or more" if 0 not in counts else " or not, once or more"
            names.append(name)
        return f", read since by {_list(names)}" if is_write else f", after {_list(names)}"


def _entry(name: str, values: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for value in values:
        margin = f"    {name}: " if not lines else " " * (len(name) + 6)
        lines += _wrapped(margin, value)
    return lines


def _wrapped(margin: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=margin,
        subsequent_indent=" " * (len(margin) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
