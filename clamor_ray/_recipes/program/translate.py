"""Statements → tables: numbers for stages, steps that say what comes next, and checks of the whole.

Which stage may come after which follows from the steps alone: messages go to the next stage that
runs, and that may be the first of the next round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from clamor_ray._recipes.program.statements import (
    Branch,
    Decision,
    Loop,
    Stage,
    Statement,
    refuse,
)
from clamor_ray._recipes.program.tables import (
    END,
    ENDLESS,
    Access,
    DatasetInfo,
    LineKind,
    Op,
    OutlineLine,
    StageInfo,
    Step,
    Tables,
)

_NOT_A_SENDER: Final = (
    "Where its send() or broadcast() is not that of its task, pass sends=False here."
)


class Described(Protocol):
    """What of a dataset this needs."""

    @property
    def name(self) -> str: ...
    @property
    def n_partitions(self) -> int: ...
    @property
    def line(self) -> str: ...
    @property
    def source(self) -> object: ...


def stages_of(body: Sequence[Statement]) -> Iterator[Stage]:
    """The stages of a text, in the order in which they are written."""
    for statement in body:
        if isinstance(statement, Stage):
            yield statement
        elif isinstance(statement, Loop):
            yield from stages_of(statement.body)
            if statement.until is not None:
                yield statement.until
        else:
            yield statement.decision
            yield from stages_of(statement.then)
            yield from stages_of(statement.otherwise)


def translate(datasets: Sequence[Described], body: Sequence[Statement]) -> Tables:
    """
    Args:
        datasets: By number.
        body: The program.

    Raises:
        ProgramError: Messages go where nobody reads them, or are read where none can come; a
            decision sends; a dataset is read that nothing has written.
    """
    stages = list(stages_of(body))
    groups = _groups(len(datasets), stages)
    steps = _Steps({stage: n for n, stage in enumerate(stages)})
    steps.add_all(body)
    tables = Tables(
        datasets=tuple(
            DatasetInfo(info.name, info.n_partitions, group)
            for info, group in zip(datasets, groups, strict=True)
        ),
        stages=tuple(_stage_info(stage, datasets, groups) for stage in stages),
        steps=tuple(steps.done()),
        n_counters=steps.n_counters,
        outline=tuple(_outline(body, 0, itertools.count(), itertools.count())),
    )
    _check_messages(tables)
    _check_reads(tables, {n for n, info in enumerate(datasets) if info.source is not None})
    return tables


def _outline(
    body: Sequence[Statement], depth: int, stages: Iterator[int], loops: Iterator[int]
) -> Iterator[OutlineLine]:
    """Lines of the text. Stages and loops have the numbers that `stages_of` and the steps say."""
    for each in body:
        if isinstance(each, Loop):
            yield OutlineLine(depth, LineKind.LOOP, next(loops))
            yield from _outline(each.body, depth + 1, stages, loops)
            if each.until is not None:
                yield OutlineLine(depth + 1, LineKind.UNTIL, next(stages))
        elif isinstance(each, Branch):
            number = next(stages)
            yield OutlineLine(depth, LineKind.BRANCH, number)
            yield from _outline(each.then, depth + 1, stages, loops)
            if each.otherwise:
                yield OutlineLine(depth, LineKind.OTHERWISE, number)
                yield from _outline(each.otherwise, depth + 1, stages, loops)
        else:
            yield OutlineLine(depth, LineKind.STAGE, next(stages))


def _groups(n_datasets: int, stages: Sequence[Stage]) -> list[int]:
    """Datasets that a stage accesses together are in one group (Canary, section 5.3)."""
    parents = list(range(n_datasets))

    def root(n: int) -> int:
        while parents[n] != n:
            parents[n] = parents[parents[n]]
            n = parents[n]
        return n

    for stage in stages:
        first, *others = (*stage.reads, *stage.writes)
        for other in others:
            parents[root(other)] = root(first)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(n), len(numbers)) for n in range(n_datasets)]


def _stage_info(stage: Stage, datasets: Sequence[Described], groups: Sequence[int]) -> StageInfo:
    numbers = (*stage.reads, *stage.writes)
    return StageInfo(
        name=stage.name,
        line=stage.line,
        n_tasks=datasets[numbers[0]].n_partitions,
        group=groups[numbers[0]],
        accesses=tuple(Access(n, n in stage.writes) for n in numbers),
        sends=stage.sends,
        receives=stage.receives,
        decides=isinstance(stage, Decision),
    )


class _Steps:
    """Steps under construction. A step's `then` is the next one unless it is set."""

    def __init__(self, numbers: dict[Stage, int]) -> None:
        self._numbers = numbers
        self._steps: list[Step] = []
        self.n_counters = 0

    def done(self) -> list[Step]:
        n = len(self._steps)
        return [
            step._replace(
                then=END if step.then == n else step.then,
                other=END if step.other == n else step.other,
            )
            for step in self._steps
        ]

    def add_all(self, body: Sequence[Statement]) -> None:
        for statement in body:
            if isinstance(statement, Loop):
                self._add_loop(statement)
            elif isinstance(statement, Branch):
                self._add_branch(statement)
            else:
                self._add(Op.RUN, self._numbers[statement])

    def _add(self, op: Op, arg: int, limit: int = 0) -> int:
        at = len(self._steps)
        self._steps.append(Step(op=op, arg=arg, then=at + 1, limit=limit))
        return at

    def _set(self, at: int, then: int | None = None, other: int | None = None) -> None:
        step = self._steps[at]
        self._steps[at] = step._replace(
            then=step.then if then is None else then, other=step.other if other is None else other
        )

    def _add_loop(self, loop: Loop) -> None:
        counter = self.n_counters
        self.n_counters += 1
        self._add(Op.CLEAR, counter)
        head = self._add(Op.REPEAT, counter, loop.most)
        self.add_all(loop.body)
        if loop.until is not None:
            ends = self._add(Op.DECIDE, self._numbers[loop.until])
            self._set(ends, then=len(self._steps), other=head)
        else:
            self._set_last_to(head)
        self._set(head, other=len(self._steps))

    def _set_last_to(self, head: int) -> None:
        """A jump has no step of its own: who would go on behind the body goes to its head."""
        end = len(self._steps)
        for at in range(head + 1, end):
            step = self._steps[at]
            self._set(
                at,
                then=head if step.then == end else None,
                other=head if step.other == end else None,
            )

    def _add_branch(self, branch: Branch) -> None:
        at = self._add(Op.DECIDE, self._numbers[branch.decision])
        self.add_all(branch.then)
        if not branch.otherwise:
            self._set(at, other=len(self._steps))
            return
        end_of_then = len(self._steps)
        self._set(at, other=end_of_then)
        if not branch.then:
            self.add_all(branch.otherwise)
            self._set(at, then=len(self._steps))
            return
        self.add_all(branch.otherwise)
        end = len(self._steps)
        for inner in range(at + 1, end_of_then):
            step = self._steps[inner]
            self._set(
                inner,
                then=end if step.then == end_of_then else None,
                other=end if step.other == end_of_then else None,
            )


def next_stages(tables: Tables, step: int) -> set[int]:
    """The stages that may run next, from a step on; `END` where the program may end."""
    found: set[int] = set()
    seen: set[int] = set()
    todo = [step]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at == END:
            found.add(END)
            continue
        each = tables.steps[at]
        if each.op in (Op.RUN, Op.DECIDE):
            found.add(each.arg)
        else:
            todo += ways_from(tables, at)
    return found


def ways_from(tables: Tables, at: int) -> tuple[int, ...]:
    """The steps that may follow one. A loop has a first round: who comes from before it does not
    go past it."""
    step = tables.steps[at]
    if step.op is Op.CLEAR:
        return (tables.steps[step.then].then,)
    if step.op is Op.REPEAT and step.limit in (1, ENDLESS):
        return (step.other,) if step.limit == 1 else (step.then,)
    return (step.then, step.other) if step.op in (Op.DECIDE, Op.REPEAT) else (step.then,)


def _check_messages(tables: Tables) -> None:
    for step in tables.steps:
        if step.op not in (Op.RUN, Op.DECIDE):
            continue
        stage = tables.stages[step.arg]
        if not stage.sends:
            continue
        if step.op is Op.DECIDE:
            refuse(
                stage.line,
                f"Stage {stage.name} decides what comes next, so it cannot send there. Send from "
                "a stage of its own. Where its send() or broadcast() is not that of its task, "
                "call it in another function.",
            )
        for after in next_stages(tables, step.then):
            if after == END:
                refuse(
                    stage.line,
                    f"Stage {stage.name} sends, and the program may end there: add a stage "
                    f"behind it that calls recv(). {_NOT_A_SENDER}",
                )
            if not tables.stages[after].receives:
                refuse(
                    stage.line,
                    f"Stage {stage.name} sends, and the next stage may be "
                    f"{tables.stages[after].name} ({tables.stages[after].line}), which does not "
                    "call recv(). Messages go only to the next stage. Where a function that it "
                    f"calls receives them, pass receives=True there. {_NOT_A_SENDER}",
                )
    _check_receivers(tables)


def _check_receivers(tables: Tables) -> None:
    has_senders = {
        after
        for step in tables.steps
        if step.op is Op.RUN and tables.stages[step.arg].sends
        for after in next_stages(tables, step.then)
    }
    for number, stage in enumerate(tables.stages):
        if stage.receives and number not in has_senders:
            refuse(
                stage.line,
                f"Stage {stage.name} calls recv(), and no stage directly before it sends. Where a "
                "function that the one before calls does, pass sends=True there.",
            )


def _check_reads(tables: Tables, given: set[int]) -> None:
    """Each dataset that is read was given, or written on each way that leads there."""
    written: dict[int, set[int]] = {0: given}
    todo = [0]
    while todo:
        at = todo.pop()
        step, known = tables.steps[at], set(written[at])
        if step.op in (Op.RUN, Op.DECIDE):
            stage = tables.stages[step.arg]
            for access in stage.accesses:
                if not access.is_write and access.dataset not in known:
                    name = tables.datasets[access.dataset].name
                    refuse(
                        stage.line,
                        f"Stage {stage.name} reads {name}, which nothing may have written: on some "
                        "path to this stage no stage writes it. Write it before, give it "
                        "partitions where it is described, or name it in writes.",
                    )
            known |= {access.dataset for access in stage.accesses if access.is_write}
        for each in ways_from(tables, at):
            before = written.get(each)
            if each != END and (before is None or not before <= known):
                written[each] = known if before is None else before & known
                todo.append(each)
