"""Rounds that have ended, by stage numbers: against a walk of all steps for random programs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.sequence import Sequence as Order
from clamor_ray._recipes.program.tables import LineKind, Tables
from clamor_ray._recipes.progress.rounds import Done, LoopInfo, RoundCounter, loops_of
from tests.recipes.network import Cluster
from tests.recipes.programs import random_program


def add(t: Any, x: int) -> int:
    return x + 1


def yes(t: Any, x: int) -> bool:
    return True


def nested() -> Builder:
    """Of 3 partitions: 5 rounds of (add, 4 rounds of (add, add)), then add."""
    p = Builder()
    x = p.dataset([1, 2, 3])
    with p.loop(max=5):
        p.stage(add, writes=[x])
        with p.loop(max=4):
            p.stage(add, writes=[x])
            p.stage(add, writes=[x])
    p.stage(add, writes=[x])
    return p


@pytest.mark.parametrize(
    ("number", "rounds"),
    [(0, (0, 0)), (1, (0, 0)), (2, (0, 0)), (3, (0, 1)), (9, (1, 4)), (10, (1, 4)), (12, (1, 5)),
     (44, (4, 19)), (45, (5, 20)), (46, (5, 20)), (99, (5, 20))],
)  # fmt: skip
def test_loops_in_loops(number: int, rounds: tuple[int, ...]) -> None:
    done = RoundCounter(nested().tables()).advance(number, {})
    assert done == Done(min(number, 46), 3 * min(number, 46), rounds)


def test_a_loop_ends_by_its_answer() -> None:
    p = Builder()
    x, parts = p.value(1), p.dataset([1, 2])
    with p.loop(max=9) as loop:
        p.stage(add, writes=[parts])
        loop.until(yes, reads=[x])
    p.stage(add, writes=[x])
    rounds = RoundCounter(p.tables())
    assert rounds.advance(1, {}) == Done(1, 2, (0,))
    assert rounds.advance(2, {}) == Done(2, 3, (0,))  # nobody has said what the answer is
    assert rounds.advance(2, {2: False}) == Done(2, 3, (1,))
    assert rounds.advance(4, {4: True}) == Done(4, 6, (2,))
    assert rounds.advance(9, {}) == Done(5, 7, (2,))
    assert loops_of(p.tables()) == [LoopInfo("add … yes", 0, 9, True)]


def test_what_loops_are_called() -> None:
    p = Builder()
    x = p.value(1)
    with p.branch(yes, reads=[x]), p.loop() as loop:
        with p.loop(max=3):
            p.stage(add, writes=[x])
        loop.until(yes, reads=[x])
    assert loops_of(p.tables()) == [
        LoopInfo("add … yes", 0, None, True),
        LoopInfo("add", 1, 3, False),
    ]


def walked(tables: Tables, answers: dict[int, bool], most: int) -> list[int]:
    """The stage of each number, of a program with these answers."""
    order, stages = Order(tables), []
    while len(stages) < most:
        found = order.extend(most - len(stages))
        stages += [each.stage for each in found]
        if order.decision is not None:
            order.decide(order.decision, answers[order.decision])
        elif not found:
            break
    return stages


def rounds_by_text(tables: Tables, stages: list[int], answers: dict[int, bool]) -> list[int]:
    """Rounds of loops whose body begins and ends with a stage that always runs: how often the last
    one did."""
    found = [-1] * tables.n_counters
    for at, line in enumerate(tables.outline):
        if line.kind is not LineKind.LOOP:
            continue
        body = []
        for each in tables.outline[at + 1 :]:
            if each.depth <= line.depth:
                break
            body.append(each)
        last = body[-1]
        if last.depth == line.depth + 1 and last.kind in (LineKind.STAGE, LineKind.UNTIL):
            found[line.number] = stages.count(last.number)
    return found


def test_random_programs_in_any_steps() -> None:
    n_checked = 0
    for seed in range(300):
        rng = random.Random(seed)
        tables = random_program(rng).tables()
        answers = {n: rng.random() < 0.4 for n in range(2000)}
        stages = walked(tables, answers, 400)
        counter, number, done = RoundCounter(tables), 0, Done()
        while number < len(stages):
            number = min(len(stages), number + rng.randint(1, 60))
            done = counter.advance(number, answers)
        assert done == RoundCounter(tables).advance(len(stages), answers)
        assert done.number == len(stages)
        assert done.tasks == sum(tables.stages[stage].n_tasks for stage in stages)
        for found, expected in zip(
            done.rounds, rounds_by_text(tables, stages, answers), strict=True
        ):
            assert expected in (-1, found), seed
            n_checked += expected > 1
    assert n_checked > 100


def test_rounds_that_are_alike_are_not_walked() -> None:
    p = Builder()
    x = p.value(1)
    with p.loop(max=10**15):
        p.stage(add, writes=[x])
        with p.loop(max=1000):
            p.stage(add, writes=[x])
    # It ends: a walk of them would take years.
    done = RoundCounter(p.tables()).advance(1001 * 10**14 + 500, {})
    assert done.rounds == (10**14, 10**17 + 499)


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_the_controller_says_has_run_has_run_while_slices_move(is_shared: bool) -> None:
    n_looks = 0
    for seed in range(25):
        program = random_program(random.Random(seed))
        cluster = Cluster(program, seed, is_shared=is_shared)
        controller = cluster.controller
        assert controller is not None
        while not controller.is_complete:
            for _ in range(20):
                cluster.step()
            if cluster.rng.random() < 0.1:
                dataset = cluster.rng.randrange(len(program.datasets))
                index = cluster.rng.randrange(program.datasets[dataset].n_partitions)
                controller.move(dataset, index, cluster.rng.choice(sorted(cluster.nodes)))
                cluster.give_orders()
            done = controller.done
            if done is not None:
                n_looks += done.number > 0
                ran = sum(number <= done.number for _, number, _ in cluster.ran)
                assert done.tasks <= ran, (seed, done)
        done = controller.done
        assert done is not None
        assert done.tasks == len(cluster.ran)
        cluster.close()
    assert n_looks > 50
