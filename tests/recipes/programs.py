"""Random programs, and a way to run one on a matcher in this process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clamor_ray._recipes.matching.matcher import Matcher, ReadyTask
from clamor_ray._recipes.matching.running import Ran, run_task
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import END, Op, Tables
from clamor_ray._recipes.program.task import Task
from clamor_ray._recipes.program.translate import next_stages


def mix(*values: int) -> int:
    """A number that depends on each and on their order."""
    mixed = 17
    for value in values:
        mixed = (mixed ^ value) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 29  # else what is constant modulo 3 stays so, and no loop would end
    return mixed >> 3


class Change:
    """Changes what it writes by all that it reads and receives."""

    def __init__(self, salt: int, n_writes: int, sends: str) -> None:
        self.salt, self.n_writes, self.sends = salt, n_writes, sends
        self.__name__ = f"change_{salt}"

    def __call__(self, t: Task, *values: int) -> Any:
        received = t.recv() if t._stage.receives else []
        got = mix(self.salt, t.index, t.number, *values, *received)
        if self.sends == "all":
            t.broadcast(got)
        elif self.sends == "some":
            for _ in range(got % 3):
                t.send(got % (t._n_next or 1), got)
                got = mix(got)
        written = tuple(mix(got, n) for n in range(self.n_writes))
        return None if not written else written if len(written) > 1 else written[0]


class Decide:
    """Whether a value has some bits."""

    def __init__(self, salt: int, of: int) -> None:
        self.salt, self.of = salt, of
        self.__name__ = f"decide_{salt}"

    def __call__(self, t: Task, *values: int) -> bool:
        received = t.recv() if t._stage.receives else []
        return mix(self.salt, t.number, *values, *received) % self.of == 0


class Judge:
    """As `Decide`, and looks at no messages: it may come behind any stage."""

    def __init__(self, salt: int, of: int) -> None:
        self.salt, self.of = salt, of
        self.__name__ = f"judge_{salt}"

    def __call__(self, t: Task, *values: int) -> bool:
        return mix(self.salt, t.number, *values) % self.of == 0


@dataclass(frozen=True)
class _Run:
    """A stage of a random program; datasets are numbers."""

    salt: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sends: str  # "all", "some"; or "", never


@dataclass(frozen=True)
class _Repeat:
    most: int | None
    body: tuple[_Part, ...]
    until: _Choice | None


@dataclass(frozen=True)
class _Choice:
    """A decision, and of a branch what it is about."""

    salt: int
    of: int
    reads: int
    then: tuple[_Part, ...] = ()
    otherwise: tuple[_Part, ...] = ()


_Part = _Run | _Repeat | _Choice


def random_program(
    rng: random.Random, n_most: int = 4, make: Callable[[], Builder] = Builder
) -> Builder:
    """Datasets of one to `n_most` partitions, and stages, loops and branches over them.

    Who may send follows from which stages may come next, and who receives from that: so it is
    described twice, without messages and with them.
    """
    sizes = [rng.randint(1, n_most) for _ in range(rng.randint(1, 4))] + [1]
    sources = [[rng.randrange(1000) for _ in range(n)] for n in sizes]
    body = _random_body(rng, sizes, 0)
    tables = _described(make(), sources, body, set(), set()).tables()
    senders, receivers = set(), set()
    for step in tables.steps:
        after = next_stages(tables, step.then)
        if step.op is Op.RUN and END not in after and rng.random() < 0.5:
            senders.add(step.arg)
            receivers |= after
    return _described(make(), sources, body, senders, receivers)


def _random_body(rng: random.Random, sizes: Sequence[int], depth: int) -> tuple[_Part, ...]:
    values = [n for n, size in enumerate(sizes) if size == 1]
    body: list[_Part] = []
    for _ in range(rng.randint(1, 4) if depth else rng.randint(2, 6)):
        kind = rng.random() if depth < 2 else 1.0
        if kind < 0.2:
            until = None
            if rng.random() < 0.6:
                until = _Choice(rng.randrange(1000), 3, rng.choice(values))
            most = None if until is not None and rng.random() < 0.3 else rng.randint(1, 4)
            body.append(_Repeat(most, _random_body(rng, sizes, depth + 1), until))
        elif kind < 0.4:
            then = _random_body(rng, sizes, depth + 1) if rng.random() < 0.9 else ()
            otherwise = _random_body(rng, sizes, depth + 1) if rng.random() < 0.5 else ()
            salt, reads = rng.randrange(1000), rng.choice(values)
            body.append(_Choice(salt, 2, reads, then, otherwise))
        else:
            size = sizes[rng.randrange(len(sizes))]
            alike = [n for n, each in enumerate(sizes) if each == size]
            chosen = rng.sample(alike, rng.randint(1, len(alike)))
            n_writes = rng.randint(0, len(chosen))
            reads, writes = tuple(chosen[n_writes:]), tuple(chosen[:n_writes])
            body.append(_Run(rng.randrange(1000), reads, writes, rng.choice(["all", "some"])))
    return tuple(body)


def _described(
    p: Builder,
    sources: Sequence[Sequence[int]],
    body: Sequence[_Part],
    senders: set[int],
    receivers: set[int],
) -> Builder:
    """With messages of these stages, by number."""
    datasets = [p.dataset(source) for source in sources]
    numbers = itertools.count()

    def choose(each: _Choice) -> dict[str, Any]:
        receives = next(numbers) in receivers
        function = Decide(each.salt, each.of)
        return {"function": function, "reads": [datasets[each.reads]], "receives": receives}

    def add(body: Sequence[_Part]) -> None:
        for each in body:
            if isinstance(each, _Repeat):
                with p.loop(max=each.most) as loop:
                    add(each.body)
                    if each.until is not None:
                        loop.until(**choose(each.until))
            elif isinstance(each, _Choice):
                with p.branch(**choose(each)) as branch:
                    add(each.then)
                if each.otherwise:
                    with branch.otherwise():
                        add(each.otherwise)
            else:
                number = next(numbers)
                sends = each.sends if number in senders else ""
                p.stage(
                    Change(each.salt, len(each.writes), sends),
                    reads=[datasets[n] for n in each.reads],
                    writes=[datasets[n] for n in each.writes],
                    sends=bool(sends),
                    receives=number in receivers,
                )

    add(body)
    return p


class Values:
    """The partitions of a worker, and what its tasks do to them."""

    def __init__(self, tables: Tables, functions: Sequence[Callable[..., Any]]) -> None:
        self.tables, self.functions = tables, functions
        self.at: dict[tuple[int, int], Any] = {}

    def run(self, task: ReadyTask, n_next: int | None, received: list[bytes]) -> Ran:
        """What it sends, by receiver, and what it decides."""
        stage, function = self.tables.stages[task.stage], self.functions[task.stage]
        values = [self.at[access.dataset, task.index] for access in stage.accesses]
        ran = run_task(stage, function, task, n_next, received, values)
        for dataset, value in ran.results.items():
            self.at[dataset, task.index] = value
        return ran


def run_on_matcher(
    builder: Builder, rng: random.Random, matcher: Any = None, forgets: bool = False
) -> list[list[Any]]:
    """All slices on one matcher; tasks that may run end in any order.

    Args:
        matcher: None: the model.
        forgets: It is told what no slice needs any more.
    """
    tables = builder.tables()
    matcher = Matcher(tables) if matcher is None else matcher
    values = Values(tables, builder.functions)
    for dataset in builder.datasets:
        for index, value in enumerate(dataset.source):
            values.at[dataset.number, index] = value
    for group in range(tables.n_groups):
        for index in range(tables.n_slices(group)):
            state = {n: PartitionState() for n in tables.datasets_of(group)}
            matcher.add(group, index, SliceState(state))
    running: list[ReadyTask] = []
    while not matcher.is_complete:
        if forgets:
            matcher.forget(matcher.floor)
            if matcher.is_complete:  # what was behind the window was no stage
                break
        running += matcher.take(rng.randint(1, 8))
        assert running, "nothing runs, and nothing may"
        task = running.pop(rng.randrange(len(running)))
        following = matcher.next_stage(task.number)
        n_next = None if following is None else tables.stages[following].n_tasks
        ran = values.run(task, n_next, matcher.messages(task))
        if tables.stages[task.stage].sends:
            assert matcher.close_all(task, ran.sent) == []
        if ran.decision is not None:
            matcher.decide(task.number, ran.decision)
        matcher.finish([task])
    return [
        [values.at[dataset.number, index] for index in range(dataset.n_partitions)]
        for dataset in builder.datasets
    ]
