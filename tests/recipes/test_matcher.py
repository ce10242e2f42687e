"""The contract of a matcher: the model in Python, and the one in C that processes share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from clamor_ray._recipes.matching.matcher import AHEAD, Matcher
from clamor_ray._recipes.matching.shared import SharedMatcher
from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.plain import run_plainly
from clamor_ray._recipes.program.tables import Tables
from tests.recipes.programs import random_program, run_on_matcher
from tests.recipes.workers import Workers

HEAP_BYTES = 4 << 20
Make = Callable[..., Any]


@pytest.fixture(params=["python", "c", "mixed"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes matchers of a kind, or of both in turn."""
    with ExitStack() as stack:
        made = 0

        def one(tables: Tables, window: int = 1 << 10) -> Any:
            nonlocal made
            made += 1
            if request.param == "python" or (request.param == "mixed" and made % 2):
                return Matcher(tables, window)
            return stack.enter_context(SharedMatcher.create(tables, HEAP_BYTES, window))

        yield one


def plain_answer(builder: Builder) -> list[list[Any]]:
    sources = [list(dataset.source) for dataset in builder.datasets]
    return run_plainly(builder.tables(), builder.functions, sources)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_tasks_gives_the_plain_answer(seed: int, make: Make) -> None:
    for n in range(10):
        rng = random.Random(1000 * seed + n)
        builder = random_program(rng)
        expected = plain_answer(builder)
        assert run_on_matcher(builder, rng, make(builder.tables())) == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_small_window_that_moves_gives_the_plain_answer(seed: int, make: Make) -> None:
    for n in range(6):
        rng = random.Random(2000 * seed + n)
        builder = random_program(rng)
        expected = plain_answer(builder)
        matcher = make(builder.tables(), window=rng.randint(2, 6))
        assert run_on_matcher(builder, rng, matcher, forgets=True) == expected


@pytest.mark.parametrize("seed", range(12))
def test_slices_that_move_between_workers_give_the_plain_answer(seed: int, make: Make) -> None:
    """Closings come late, twice, and to workers that the slice has left; so do answers."""
    for n in range(6):
        rng = random.Random(3000 * seed + n)
        builder = random_program(rng)
        expected = plain_answer(builder)
        matchers = [make(builder.tables()) for _ in range(rng.randint(2, 3))]
        assert Workers(builder, rng, matchers).run() == expected


@pytest.mark.parametrize("seed", range(6))
def test_nothing_behind_a_stop_begins(seed: int, make: Make) -> None:
    for n in range(4):
        rng = random.Random(4000 * seed + n)
        builder = random_program(rng)
        expected = plain_answer(builder)
        workers = Workers(builder, rng, [make(builder.tables()) for _ in range(2)])
        for _ in range(rng.randint(0, 10)):
            workers.step()
        workers.land()
        furthest = max(each.furthest for each in workers.matchers)
        for each in workers.matchers:
            each.stop_after(furthest)
        while not all(each.has_reached(furthest) for each in workers.matchers):
            workers.step()
        for each in workers.matchers:
            assert each.take(8) == []
            assert each.furthest <= furthest
            each.stop_after(None)
        assert workers.run() == expected


def two_values() -> Builder:
    p = Builder()
    x = p.dataset([1, 2])
    with p.loop(max=3):
        p.stage(lambda t, x: t.send(0, x), reads=[x], sends=True)
        p.stage(lambda t, x: sum(t.recv()), writes=[x], receives=True)
    return p


def test_a_task_that_was_taken_back_begins_again(make: Make) -> None:
    matcher = make(two_values().tables())
    for index in range(2):
        matcher.add(0, index, SliceState({0: PartitionState()}))
    assert matcher.hold(0, 1)
    (task,) = matcher.take(8)
    assert (task.number, task.index) == (1, 0)
    assert not matcher.hold(0, 0)
    matcher.close_all(task, {0: [b"a"]})
    matcher.finish([task])
    assert matcher.hold(0, 0)
    assert matcher.take(8) == []
    matcher.release(0, 0)
    matcher.release(0, 1)
    assert [(each.number, each.index) for each in matcher.take(8)] == [(1, 1)]
    assert (matcher.furthest, matcher.floor) == (1, 1)


def test_what_moves_has_its_messages_in_the_order_of_their_senders(make: Make) -> None:
    tables = two_values().tables()
    first, second = make(tables), make(tables)
    first.add(0, 0, SliceState({0: PartitionState()}))
    first.close(2, 0, 0, 1, [b"c", b"", b"d"])
    assert first.hold(0, 0)
    state = first.remove(0, 0)
    assert first.slices == []
    assert state.partitions == {0: PartitionState()}
    assert state.inboxes[2].closed == {1}
    assert state.inboxes[2].messages == {1: [b"c", b"", b"d"]}
    second.close(2, 0, 0, 1, [b"c", b"", b"d"])
    second.add(0, 0, state)
    assert second.slices == [(0, 0)]
    (task,) = second.take(8)
    assert second.close_all(task, {1: [b"x"], 0: [b"a", b"b"]}) == [1]
    second.finish([task])
    (task,) = second.take(8)
    assert task.number == 2
    assert second.messages(task) == [b"a", b"b", b"c", b"", b"d"]
    second.close(2, 0, 0, 0, [b"again"])
    second.finish([task])
    second.close(2, 0, 0, 1, [b"again"])
    assert second.hold(0, 0)
    assert second.remove(0, 0) == SliceState({0: PartitionState(writer=2)})


def test_a_slice_has_a_bounded_number_of_tasks_that_are_ready(make: Make) -> None:
    p = Builder()
    x = p.dataset([1])
    with p.loop(max=100):
        p.stage(lambda t, x: None, reads=[x])
    matcher = make(p.tables())
    matcher.add(0, 0, SliceState({0: PartitionState()}))
    tasks = matcher.take(1000)
    assert [each.number for each in tasks] == list(range(1, 1 + AHEAD))
    matcher.finish(tasks[1:3])
    assert matcher.floor == 1
    matcher.finish(tasks[:1])
    assert matcher.floor == 4
    assert [each.number for each in matcher.take(1000)] == [9, 10, 11]


def test_answers_may_come_early_twice_and_late(make: Make) -> None:
    p = Builder()
    x = p.value(1)
    with p.loop(max=3) as loop:
        p.stage(lambda t, x: x, writes=[x])
        loop.until(lambda t, x: False, reads=[x])
    matcher = make(p.tables())
    matcher.decide(4, True)
    matcher.decide(2, False)
    matcher.decide(2, False)
    assert matcher.decisions == {2: False, 4: True}
    assert matcher.next_stage(2) == 0
    assert matcher.next_stage(4) is None
    assert matcher.is_complete  # no slice is here
    matcher.forget(3)
    matcher.decide(2, False)
    assert matcher.decisions == {4: True}
    assert matcher.floor == 5


def test_a_stage_whose_answer_is_awaited_is_not_forgotten(make: Make) -> None:
    p = Builder()
    x = p.value(1)
    with p.branch(lambda t, x: True, reads=[x]):
        p.stage(lambda t, x: x, writes=[x])
    matcher = make(p.tables(), window=2)
    matcher.forget(2)
    assert not matcher.is_complete
    matcher.decide(1, True)
    assert matcher.decisions == {1: True}
    assert matcher.floor == 3
    matcher.forget(3)
    assert matcher.decisions == {}
    assert matcher.is_complete


def test_a_sender_at_the_end_of_the_window_waits_for_its_next_stage(make: Make) -> None:
    p = Builder()
    x, y = p.dataset([1, 2]), p.value(0)
    with p.loop(max=3):
        p.stage(lambda t, x: t.send(0, x), reads=[x], sends=True)
        p.stage(lambda t, y: sum(t.recv()), writes=[y], receives=True)
    matcher = make(p.tables(), window=3)
    matcher.add(0, 0, SliceState({0: PartitionState()}))
    (task,) = matcher.take(8)
    matcher.close_all(task, {})
    matcher.finish([task])
    assert matcher.take(8) == []  # number 3 is known, and 4 is not
    matcher.forget(2)
    assert [each.number for each in matcher.take(8)] == [3]
