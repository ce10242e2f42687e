"""The order of stages, and what each needs: by hand for the paper's example, and against a walk
of the statements for random programs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.plain import run_plainly
from clamor_ray._recipes.program.sequence import Instance, Need
from clamor_ray._recipes.program.sequence import Sequence as Order
from clamor_ray._recipes.program.statements import Branch, Decision, Loop, Stage, Statement
from clamor_ray._recipes.program.tables import Op, Tables
from clamor_ray._recipes.program.task import Task
from tests.recipes.programs import random_program


def change(t: Task, x: Any) -> Any:
    return x


def look(t: Task, x: Any) -> None:
    pass


def yes(t: Task, x: Any) -> bool:
    return True


def send(t: Task, x: Any) -> None:
    t.broadcast(x)


def receive(t: Task, x: Any) -> Any:
    return sum(t.recv())


def run_all(tables: Tables, decide: Callable[[int, int], bool], most: int = 1000) -> list[Instance]:
    """All stages that run, with these decisions: (number, stage) -> answer."""
    order, found = Order(tables), []
    while len(found) < most:
        more = order.extend(7)
        found += more
        if order.decision is not None:
            assert not order.is_complete
            assert order.decide(order.decision, decide(order.decision, found[-1].stage))
        elif not more:
            assert order.is_complete
            return found
    return found


def names_of(p: Builder, decide: Callable[[int, int], bool]) -> list[str]:
    tables = p.tables()
    return [tables.stages[each.stage].name for each in run_all(tables, decide)]


# -- the paper's figure 3


def figure_3() -> Builder:
    """Logistic regression on two partitions."""
    p = Builder()
    td, g, w = p.dataset([1, 2], name="TD"), p.value(0, name="G"), p.value(0, name="W")
    with p.loop() as loop:
        p.stage(send, reads=[w], name="Broadcast")
        p.stage(lambda t, td: t.send(0, t.recv()), reads=[td], name="Compute")
        p.stage(receive, writes=[g], name="Reduce")
        p.stage(lambda t, g, w: w, reads=[g], writes=[w], name="Update")
        loop.until(yes, reads=[g], name="Again")  # ends, where the paper's goes on
    return p


def test_preconditions_of_the_papers_figure_3() -> None:
    td, g, w = range(3)
    tables = figure_3().tables()
    found = run_all(tables, lambda number, stage: number == 20)
    assert len(found) == 20
    for n in range(1, 4):  # rounds after the first
        broadcast, compute, reduce, update, again = found[5 * n : 5 * n + 5]
        assert broadcast == (5 * n + 1, 0, 0, (Need(w, False, 5 * n - 1, 0),))
        assert compute == (5 * n + 2, 1, 1, (Need(td, False, 0, n),))
        assert reduce == (5 * n + 3, 2, 2, (Need(g, True, 5 * n - 2, 2),))
        needs = (Need(g, False, 5 * n + 3, 0), Need(w, True, 5 * n - 1, 1))
        assert update == (5 * n + 4, 3, 0, needs)
        assert again == (5 * n + 5, 4, 0, (Need(g, False, 5 * n + 3, 1),))


def test_the_first_round_of_a_loop_has_preconditions_of_its_own() -> None:
    td, g, w = range(3)
    first = run_all(figure_3().tables(), lambda number, stage: True)
    assert first == [
        (1, 0, 0, (Need(w, False, 0, 0),)),
        (2, 1, 1, (Need(td, False, 0, 0),)),
        (3, 2, 2, (Need(g, True, 0, 0),)),
        (4, 3, 0, (Need(g, False, 3, 0), Need(w, True, 0, 1))),
        (5, 4, 0, (Need(g, False, 3, 1),)),
    ]


def test_datasets_that_a_stage_accesses_together_move_together() -> None:
    p = Builder()
    a, b, c, d, e = (p.dataset([0, 0], name=name) for name in "abcde")
    p.stage(lambda t, a, b: None, reads=[a, b])
    p.stage(lambda t, c, d: None, reads=[c], writes=[d])
    p.stage(lambda t, d, a: None, reads=[d, a])
    p.stage(look, reads=[e])
    tables = p.tables()
    assert [info.group for info in tables.datasets] == [0, 0, 0, 0, 1]
    assert tables.datasets_of(0) == (0, 1, 2, 3)
    assert tables.n_slices(1) == 2


# -- loops and branches in each other


def test_a_loop_in_a_loop_begins_anew_in_each_round() -> None:
    p = Builder()
    w = p.value(1)
    with p.loop(max=2):
        p.stage(change, writes=[w], name="a")
        with p.loop(max=3):
            p.stage(change, writes=[w], name="b")
    p.stage(change, writes=[w], name="c")
    assert names_of(p, lambda number, stage: True) == [*"abbbabbb", "c"]


def test_a_branch_that_ends_a_loop_goes_back_to_its_begin_on_both_ways() -> None:
    p = Builder()
    w = p.value(1)
    with p.loop(max=2):
        with p.branch(yes, reads=[w], name="d") as branch:
            p.stage(change, writes=[w], name="a")
        with branch.otherwise():
            p.stage(change, writes=[w], name="b")
    assert names_of(p, lambda number, stage: number == 1) == [*"dadb"]


def test_branches_without_stages() -> None:
    p = Builder()
    w = p.value(1)
    with p.branch(yes, reads=[w], name="d"):
        pass
    with p.branch(yes, reads=[w], name="e") as branch:
        pass
    with branch.otherwise():
        p.stage(change, writes=[w], name="a")
    p.stage(change, writes=[w], name="b")
    assert names_of(p, lambda number, stage: True) == [*"deb"]
    assert names_of(p, lambda number, stage: False) == [*"deab"]


def test_a_loop_may_have_its_end_alone() -> None:
    p = Builder()
    w = p.value(1)
    with p.loop(max=4) as loop:
        loop.until(yes, writes=[w], name="u")
    assert names_of(p, lambda number, stage: number == 3) == [*"uuu"]
    assert names_of(p, lambda number, stage: False) == [*"uuuu"]


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    order = Order(figure_3().tables())
    assert not order.decide(5, True)  # early
    assert len(order.extend(10)) == 5
    assert not order.decide(4, True)
    assert order.decide(5, False)
    assert not order.decide(5, False)  # again
    assert not order.is_complete


def test_messages_come_from_before_a_loop_and_from_its_own_end() -> None:
    p = Builder()
    w, rows = p.value(1), p.dataset([1, 2, 3])
    p.stage(send, reads=[w])
    with p.loop(max=2):
        p.stage(lambda t, rows: t.send(0, t.recv()), reads=[rows], name="b", sends=False)
        p.stage(change, writes=[w], name="c")
        p.stage(send, reads=[w], name="d")
    p.stage(receive, writes=[w], name="e")
    found = run_all(p.tables(), lambda number, stage: True)
    senders = [(p.tables().stages[each.stage].name, each.senders) for each in found]
    assert senders == [("send", 0), *[("b", 1), ("c", 0), ("d", 0)] * 2, ("e", 1)]


def test_a_loop_has_a_first_round() -> None:
    """So nothing goes past it: not its messages, and not what it writes."""
    p = Builder()
    w, later = p.value(1), p.dataset(None, n=1)
    p.stage(send, reads=[w])
    with p.loop(max=2):
        p.stage(receive, writes=[later])
    p.stage(look, reads=[later])
    assert [each.senders for each in run_all(p.tables(), lambda number, stage: True)] == [
        0,
        1,
        0,
        0,
    ]


@pytest.mark.parametrize("read", ["a", "b", "c"])
def test_what_both_paths_of_a_branch_write_is_written(read: str) -> None:
    p = Builder()
    w = p.value(1)
    later = {name: p.dataset(None, n=2, name=name) for name in "abc"}
    with p.branch(yes, reads=[w]) as branch:
        p.stage(lambda t, a, b: (1, 2), writes=[later["a"], later["b"]])
    with branch.otherwise():
        p.stage(lambda t, a, c: (3, 4), writes=[later["a"], later["c"]])
    p.stage(look, reads=[later[read]])
    if read == "a":
        p.tables()
    else:
        with pytest.raises(errors.ProgramError, match=f"look reads {read}, which nothing may"):
            p.tables()


def test_paths_of_a_branch_that_write_different_datasets() -> None:
    p = Builder()
    w, a, b = p.value(1), p.dataset([0, 0]), p.dataset([0, 0])
    with p.loop(max=2):
        with p.branch(yes, reads=[w]) as branch:
            p.stage(change, writes=[a])
        with branch.otherwise():
            p.stage(change, writes=[b])
        p.stage(lambda t, a, b: None, reads=[a, b])
    found = run_all(p.tables(), lambda number, stage: number == 1)
    # Round 1 writes a: number 2. Round 2 writes b: number 5, which one stage has read before.
    assert found[2].needs == (Need(1, False, 2, 0), Need(2, False, 0, 0))
    assert found[4].needs == (Need(2, True, 0, 1),)
    assert found[5].needs == (Need(1, False, 2, 1), Need(2, False, 5, 0))


# -- random programs


def walk(body: Sequence[Statement], decide: Callable[[int, Stage], bool]) -> list[Stage]:
    """What runs, by the statements alone: what a reader of the program would do."""
    ran: list[Stage] = []

    def one(stage: Stage) -> bool:
        ran.append(stage)
        return decide(len(ran), stage) if isinstance(stage, Decision) else True

    def some(body: Sequence[Statement]) -> None:
        for each in body:
            if isinstance(each, Stage):
                one(each)
            elif isinstance(each, Branch):
                some(each.then if one(each.decision) else each.otherwise)
            else:
                for _ in range(each.most):
                    some(each.body)
                    if each.until is not None and one(each.until):
                        break

    some(body)
    return ran


def needs_of(ran: Sequence[Stage], at: int) -> dict[int, tuple[bool, int, int]]:
    """By looking back through all that ran before: dataset -> (writes, last writer, readers)."""
    found = {}
    for dataset in (*ran[at].reads, *ran[at].writes):
        writer = max((n + 1 for n in range(at) if dataset in ran[n].writes), default=0)
        readers = sum(dataset in ran[n].reads for n in range(writer, at))
        found[dataset] = (dataset in ran[at].writes, writer, readers)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_run_as_they_read(seed: int) -> None:
    for n in range(25):
        p = random_program(random.Random(1000 * seed + n))
        tables, stages = p.tables(), list(p._stages())

        def decide(number: int, _: object, salt: int = n) -> bool:
            return hash((number, salt)) % 3 == 0

        ran = walk(p._body, decide)
        found = run_all(tables, decide, most=10**6)
        assert [each.number for each in found] == list(range(1, len(ran) + 1))
        assert [stages[each.stage] for each in found] == ran
        for at, each in enumerate(found):
            assert {need[0]: need[1:] for need in each.needs} == needs_of(ran, at)
            before = ran[at - 1] if at else None
            n_tasks = tables.stages[found[at - 1].stage].n_tasks
            assert each.senders == (n_tasks if before is not None and before.sends else 0)
            if each.senders:
                assert ran[at].receives


def features_of(p: Builder) -> Iterator[str]:
    """What a random program has, in words."""
    tables = p.tables()
    for step in tables.steps:
        if step.op is Op.RUN and tables.stages[step.arg].sends:
            yield "messages"
    yield from _features(p, p._body, ())
    sizes = {tables.datasets[access.dataset].n_partitions for access in _accesses(tables)}
    if len(sizes) > 2:
        yield "three partition counts"
    if any(len(stage.accesses) > 1 for stage in tables.stages):
        yield "stages over many datasets"


def _accesses(tables: Tables) -> Iterator[Any]:
    for stage in tables.stages:
        yield from stage.accesses


def _features(p: Builder, body: Sequence[Statement], inside: tuple[str, ...]) -> Iterator[str]:
    for n, each in enumerate(body):
        if isinstance(each, Loop):
            yield "loop"
            yield from (f"loop in {kind}" for kind in inside)
            if each.until is not None:
                yield "until"
                if each.until.receives:
                    yield "until that receives"
            last = each.body[-1] if each.until is None and each.body else None
            if isinstance(last, Stage) and last.sends:
                yield "messages into the next round"
            yield from _features(p, each.body, (*inside, "loop"))
        elif isinstance(each, Branch):
            yield "branch with otherwise" if each.otherwise else "branch"
            yield from (f"branch in {kind}" for kind in inside)
            if n and isinstance(body[n - 1], Stage) and body[n - 1].sends:  # type: ignore[union-attr]
                yield "messages to a branch"
            yield from _features(p, each.then, (*inside, "branch"))
            yield from _features(p, each.otherwise, (*inside, "branch"))
        elif each.sends:
            yield f"messages in {inside[-1]}" if inside else "messages outside"
            if not each.writes:
                yield "messages of a reader"


OFTEN = (
    *("messages", "loop", "until", "branch", "branch with otherwise", "three partition counts"),
    *("loop in loop", "loop in branch", "branch in loop", "branch in branch"),
    *("messages in loop", "messages in branch", "messages outside", "messages of a reader"),
    *("messages into the next round", "messages to a branch", "until that receives"),
    "stages over many datasets",
)


def test_random_programs_have_all_kinds_of_everything_often() -> None:
    n = 400  # as many as test_matcher.py runs, from its seeds
    seen = Counter(
        feature
        for seed in range(n)
        for feature in set(
            features_of(random_program(random.Random(1000 * (seed // 10) + seed % 10)))
        )
    )
    rare = {feature: seen[feature] for feature in OFTEN if seen[feature] < n // 20}
    assert not rare, seen


# -- the plain answer


def run(p: Builder) -> list[list[Any]]:
    return run_plainly(p.tables(), p.functions, [list(each.source) for each in p.datasets])


def test_partitions_that_are_one_object_at_first_are_several() -> None:
    p = Builder()
    sums = p.dataset([np.zeros(1)] * 3)

    def add_index(t: Task, x: Any) -> None:
        x += t.index

    p.stage(add_index, writes=[sums])
    assert np.concatenate(run(p)[0]).tolist() == [0, 1, 2]


def test_a_partition_that_is_returned_as_another_is_a_copy() -> None:
    p = Builder()
    a, b = p.value([1]), p.value([2])
    p.stage(lambda t, a, b: a, reads=[a], writes=[b], name="copy")
    p.stage(lambda t, b: b.append(3), writes=[b], name="append")
    assert run(p) == [[[1]], [[1, 3]]]


def test_what_is_sent_is_as_it_is_when_the_task_ends() -> None:
    p = Builder()
    a, b = p.value([1]), p.dataset([[], []])

    def send_then_change(t: Task, a: Any) -> None:
        t.broadcast(a)
        a.append(2)

    p.stage(send_then_change, writes=[a])
    p.stage(lambda t, b: b.extend(*t.recv()), writes=[b])
    p.stage(lambda t, b: b.append(t.index), writes=[b])
    assert run(p) == [[[1, 2]], [[1, 2, 0], [1, 2, 1]]]


def test_messages_come_in_the_order_of_their_senders() -> None:
    p = Builder()
    rows, out = p.dataset([3, 1, 2]), p.dataset([None, None])

    def send_twice(t: Task, x: int) -> None:
        t.send(1, (t.index, x))
        t.send(np.int64(1), (t.index, -x))  # type: ignore[arg-type]

    p.stage(send_twice, reads=[rows])
    p.stage(lambda t, out: t.recv(), writes=[out])
    assert run(p)[1] == [[], [(0, 3), (0, -3), (1, 1), (1, -1), (2, 2), (2, -2)]]


def test_what_is_returned_goes_to_the_datasets_in_the_order_of_writes() -> None:
    p = Builder()
    a, b, c = p.value(1), p.value(2), p.value(3)
    p.stage(lambda t, a, c, b: (a + c, a + b), reads=[a], writes=[c, b])
    assert run(p) == [[1], [3], [4]]
