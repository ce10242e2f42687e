"""Which preconditions a stage may have, over all ways through a program: its recipes. For people.

What runs needs none of this: `sequence.py` knows the one way that is taken. Here both answers of
each decision are followed, and loops for a first round and for later ones, because the first round
has recipes of its own (Canary, section 4.3). Datasets do not depend on each other, nor do the
readers of one, so each is followed alone: programs with many branches cost no more than others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from clamor_ray._recipes.program.tables import END, LineKind, Op, Tables
from clamor_ray._recipes.program.translate import ways_from

_F = TypeVar("_F")

Rounds = tuple[bool, ...]  # of each loop around a stage, from outside: whether this is a later one


class Written(NamedTuple):
    """Who may have written a partition last.

    Args:
        stage: None: nobody, it is as it was at first.
        loop: The outermost loop that has begun a round since; None: none has.
        rounds: How many it has begun: 1, or 2 for more.
    """

    stage: int | None
    loop: int | None = None
    rounds: int = 0


@dataclass(frozen=True)
class StageRecipe:
    """What a stage waits for, in one kind of rounds.

    Args:
        senders: Stages of which one has sent messages; None: no stage that sends came before.
        needs: Of each dataset that it accesses: who may have written it -> how often each stage
            may have read it since: 0, 1, or 2 for more.
    """

    senders: frozenset[int | None]
    needs: Mapping[int, Mapping[Written, Mapping[int, frozenset[int]]]]


def loops_around(tables: Tables) -> list[tuple[int, ...]]:
    """Of each stage, the loops that it is in, from outside."""
    found: list[tuple[int, ...]] = [()] * len(tables.stages)
    open_loops: list[tuple[int, int]] = []  # depth, loop
    for line in tables.outline:
        while open_loops and open_loops[-1][0] >= line.depth:
            open_loops.pop()
        if line.kind is LineKind.LOOP:
            open_loops.append((line.depth, line.number))
        elif line.kind is not LineKind.OTHERWISE:
            found[line.number] = tuple(loop for _, loop in open_loops)
    return found


def recipes_of(tables: Tables, stage: int) -> dict[Rounds, StageRecipe]:
    """The recipes of a stage; none where no way leads to it."""
    return Recipes(tables).of(stage)


class Recipes:
    """The recipes of all stages of a program.

    Args:
        tables: The program.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._around = loops_around(tables)
        # By dataset and reader (None: the writer alone): stage and rounds -> what may be.
        self._facts: dict[tuple[int, int | None], _Found] = {}
        self._senders = self._follow_senders()

    def of(self, stage: int) -> dict[Rounds, StageRecipe]:
        """See `recipes_of`."""
        return {
            rounds: StageRecipe(
                frozenset(senders),
                {
                    access.dataset: self._needs(stage, rounds, access.dataset)
                    for access in self._tables.stages[stage].accesses
                },
            )
            for (at, rounds), senders in sorted(self._senders.items())
            if at == stage
        }

    def _needs(
        self, stage: int, rounds: Rounds, dataset: int
    ) -> dict[Written, dict[int, frozenset[int]]]:
        found: dict[Written, dict[int, frozenset[int]]] = {}
        for written, _ in sorted(self._of(dataset, None)[stage, rounds], key=repr):
            found[written] = {}
        for reader in self._readers(dataset):
            counts: defaultdict[Written, set[int]] = defaultdict(set)
            for written, n in self._of(dataset, reader)[stage, rounds]:
                counts[written].add(n)
            for written, some in counts.items():
                if some != {0}:
                    found[written][reader] = frozenset(some)
        return found

    def _readers(self, dataset: int) -> list[int]:
        return [
            number
            for number, stage in enumerate(self._tables.stages)
            if any(each.dataset == dataset and not each.is_write for each in stage.accesses)
        ]

    def _of(self, dataset: int, reader: int | None) -> _Found:
        key = dataset, reader
        if key not in self._facts:
            self._facts[key] = self._follow(dataset, reader)
        return self._facts[key]

    # -- all ways

    def _follow(self, dataset: int, reader: int | None) -> _Found:
        """Who may have written a dataset, and how often one stage may have read it since."""
        found: _Found = defaultdict(set)
        accesses = {
            number: access.is_write
            for number, stage in enumerate(self._tables.stages)
            for access in stage.accesses
            if access.dataset == dataset
        }

        def run(stage: int, rounds: Rounds, fact: _Fact) -> _Fact:
            found[stage, rounds].add(fact)
            written, n = fact
            if accesses.get(stage):
                return Written(stage), 0
            return written, min(2, n + (stage == reader))

        def begin(loop: int, fact: _Fact) -> _Fact:
            written, n = fact
            inside = written.stage is not None and loop in self._around[written.stage]
            if not inside or (written.loop is not None and written.loop < loop):
                return fact  # of a loop around this one it is a round before anyway
            rounds = min(2, written.rounds + 1) if written.loop == loop else 1
            return Written(written.stage, loop, rounds), n

        self._walk((Written(None), 0), run, begin)
        return found

    def _follow_senders(self) -> dict[tuple[int, Rounds], set[int | None]]:
        found: defaultdict[tuple[int, Rounds], set[int | None]] = defaultdict(set)

        def run(stage: int, rounds: Rounds, before: int | None) -> int | None:
            found[stage, rounds].add(before)
            return stage if self._tables.stages[stage].sends else None

        self._walk(None, run, lambda loop, before: before)
        return found

    def _walk(
        self, fact: _F, run: Callable[[int, Rounds, _F], _F], begin: Callable[[int, _F], _F]
    ) -> None:
        """Follows what is true at the start over all ways.

        Args:
            fact: What is true at the start.
            run: Stage, its rounds, what is true before it -> what is true behind it.
            begin: Loop, what is true before another round of it -> what is true in it.
        """
        first: frozenset[int] = frozenset()  # loops that are in a later round
        seen = {(0, first, fact)}
        todo = [(0, first, fact)]
        while todo:
            at, later, fact = todo.pop()
            step = self._tables.steps[at]
            if step.op in (Op.RUN, Op.DECIDE):
                rounds = tuple(loop in later for loop in self._around[step.arg])
                fact = run(step.arg, rounds, fact)
            for after, then_later, then_fact in self._after(at, later, fact, begin):
                state = (after, then_later, then_fact)
                if after != END and state not in seen:
                    seen.add(state)
                    todo.append(state)

    def _after(
        self, at: int, later: frozenset[int], fact: _F, begin: Callable[[int, _F], _F]
    ) -> Iterator[tuple[int, frozenset[int], _F]]:
        step = self._tables.steps[at]
        if step.op is Op.CLEAR:
            yield ways_from(self._tables, at)[0], later - {step.arg}, fact
        elif step.op is Op.REPEAT:
            ways = ways_from(self._tables, at)
            if step.then in ways:
                yield step.then, later | {step.arg}, begin(step.arg, fact)
            if step.other in ways and (step.limit == 1 or step.arg in later):
                yield step.other, later - {step.arg}, fact
        else:
            for after in dict.fromkeys(ways_from(self._tables, at)):
                yield after, later, fact


_Fact = tuple[Written, int]
_Found = defaultdict[tuple[int, Rounds], set[_Fact]]
