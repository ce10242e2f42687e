"""Where tasks go, when they are copied, and who has won: decisions without a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray.collection.run.schedule import Cancel, Policy, Slots, StageSchedule, Start


def schedule(
    n: int, preferred: dict[int, str | None], nodes: dict[str, int], **policy: object
) -> tuple[StageSchedule, Slots]:
    slots = Slots(dict(nodes), warm={*nodes})
    return StageSchedule(range(n), preferred, slots, Policy(**policy), 0.0), slots  # type: ignore[arg-type]


def test_tasks_go_where_they_like() -> None:
    stage, _ = schedule(2, {0: "b", 1: "a"}, {"a": 1, "b": 1})
    assert stage.start(0.0) == [Start(0, 0, "b"), Start(1, 0, "a")]


TWO_EACH = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_a_task_waits_for_its_node_and_then_takes_another() -> None:
    stage, _ = schedule(4, TWO_EACH, {"a": 1, "b": 1}, locality_wait_s=3.0)
    assert stage.start(0.0) == [Start(0, 0, "a"), Start(2, 0, "b")]
    assert stage.wake_s(1.0) == 2.0
    stage.finished(2, 0, 0.1, 0.1)
    assert stage.start(0.1) == [Start(3, 0, "b")]
    stage.finished(3, 0, 0.1, 0.2)
    assert stage.start(2.9) == []
    assert stage.start(3.0) == [Start(1, 0, "b")]


def test_a_node_that_is_free_in_time_gets_its_task() -> None:
    stage, _ = schedule(4, TWO_EACH, {"a": 1, "b": 1}, locality_wait_s=3.0)
    stage.start(0.0)
    stage.finished(0, 0, 1.0, 1.0)
    assert stage.start(1.0) == [Start(1, 0, "a")]


def test_a_lost_node_is_not_waited_for() -> None:
    stage, _ = schedule(1, {0: "gone"}, {"b": 1})
    assert stage.start(0.0) == [Start(0, 0, "b")]


def test_tasks_without_a_wish_fill_the_freest_nodes() -> None:
    stage, _ = schedule(3, {}, {"a": 2, "b": 1})
    assert sorted(str(start.node) for start in stage.start(0.0)) == ["a", "a", "b"]


def test_no_node_gets_more_than_its_share() -> None:
    """All would like node a: it has what they read."""
    stage, _ = schedule(9, dict.fromkeys(range(9), "a"), {"a": 1, "b": 1, "c": 1})
    assert {start.node for start in stage.start(0.0)} == {"a", "b", "c"}
    stage, _ = schedule(4, TWO_EACH, {"a": 2, "b": 2})
    assert [start.node for start in stage.start(0.0)] == ["a", "a", "b", "b"]


def test_a_node_that_lost_to_a_copy_is_avoided_for_a_while() -> None:
    stage, slots = schedule(3, {0: "a", 1: "b", 2: "b"}, {"a": 2, "b": 2}, least_s=0.0)
    stage.start(0.0)
    stage.finished(1, 0, 0.1, 0.1)
    stage.finished(2, 0, 0.1, 0.1)
    assert stage.start(5.0) == [Start(0, 1, "b")]
    assert stage.finished(0, 1, 0.1, 6.0) == [Cancel(0, 0)]
    slots.give("a")
    again = StageSchedule(range(2), {0: "a", 1: "a"}, slots, Policy(), 7.0)
    assert {start.node for start in again.start(7.0)} == {"b"}
    later = StageSchedule(range(2), {0: "a", 1: "a"}, Slots({"a": 2, "b": 2}), Policy(), 99.0)
    assert {start.node for start in later.start(99.0)} >= {"a"}


def test_tasks_that_all_waited_to_be_started_are_not_slow() -> None:
    """Ray starts their processes, or they share a processor: each ran for a moment only."""
    stage, _ = schedule(4, TWO_EACH, {"a": 2, "b": 2}, least_s=1.0)
    stage.start(0.0)
    for task in (0, 1, 2):
        stage.finished(task, 0, 0.1, 3.0)
    assert stage.start(3.1) == []
    (copy,) = stage.start(4.5)
    assert (copy.task, copy.attempt) == (3, 1)


def test_a_copy_goes_to_a_slow_node_where_there_is_no_other() -> None:
    stage, slots = schedule(2, {0: "a", 1: "b"}, {"a": 1, "b": 1}, least_s=0.0)
    stage.start(0.0)
    slots.slow["b"] = 60.0
    stage.finished(1, 0, 0.1, 0.1)
    assert stage.start(5.0) == [Start(0, 1, "b")]


def test_deterministic_is_the_same_every_time_and_waits() -> None:
    nodes = {"a": 8, "b": 8, "c": 8}
    first, _ = schedule(8, {}, nodes, scheduling="deterministic")
    second, _ = schedule(8, {0: "a"}, nodes, scheduling="deterministic")
    starts = first.start(0.0)
    assert starts == second.start(5.0)
    assert len({start.node for start in starts}) > 1
    narrow, _ = schedule(8, {}, {"a": 1, "b": 1, "c": 1}, scheduling="deterministic")
    begun = {start.task: start.node for start in narrow.start(0.0)}
    assert begun.items() <= {start.task: start.node for start in starts}.items()
    assert narrow.start(1000.0) == []


def test_ray_places_tasks_itself() -> None:
    stage, slots = schedule(5, {0: "a"}, {"a": 2, "b": 1}, scheduling="ray")
    assert stage.start(0.0) == [Start(task, 0, None) for task in range(3)]  # what can run
    assert slots.free("a") == 2


def test_a_slow_node_is_better_than_to_wait_for_ever() -> None:
    slots = Slots({"a": 1, "b": 1})
    slots.slow["b"] = 60.0
    stage = StageSchedule(range(4), {}, slots, Policy(locality_wait_s=0.0), 0.0)
    assert stage.start(0.0) == [Start(0, 0, "a")]
    assert stage.start(9.5) == []
    assert stage.wake_s(9.5) == 0.5
    assert stage.start(10.0) == [Start(1, 0, "b")]
    assert stage.start(10.0) == []  # and that is full
    stage.finished(1, 0, 2.0, now_s=12.0)
    assert stage.start(12.0) == []  # now it is known how long a task takes
    assert stage.start(15.0) == [Start(2, 0, "b")]
    stage.finished(0, 0, 15.0, now_s=15.0)
    assert stage.start(15.0) == [Start(3, 0, "a")]


def test_a_slow_task_gets_one_copy_on_another_node() -> None:
    stage, slots = schedule(4, {}, {"a": 2, "b": 2}, multiplier=2.0, least_s=0.1)
    starts = stage.start(0.0)
    slow = starts[0]
    for start in starts[1:]:
        stage.finished(start.task, 0, 1.0, now_s=0.0)
    assert stage.wake_s(1.0) == pytest.approx(1.0)
    assert stage.start(1.9) == []
    (copy,) = stage.start(2.0)
    assert (copy.task, copy.attempt) == (slow.task, 1)
    assert copy.node not in (slow.node, None)
    assert stage.start(10.0) == []  # one is enough
    assert stage.finished(slow.task, 1, 1.0, now_s=0.0) == [Cancel(slow.task, 0)]
    assert stage.is_over
    assert slots.free(slow.node or "") == 1  # what was cancelled may still run
    slots.give(slow.node)
    assert slots.free(slow.node or "") == 2


def test_the_first_attempt_may_win_all_the_same() -> None:
    stage, _ = schedule(2, {}, {"a": 1, "b": 1}, least_s=0.0)
    first, second = stage.start(0.0)
    stage.finished(second.task, 0, 0.1, now_s=0.0)
    assert len(stage.start(5.0)) == 1
    assert stage.finished(first.task, 0, 5.0, now_s=0.0) == [Cancel(first.task, 1)]


@pytest.mark.parametrize(
    ("done", "policy"),
    [(1, {}), (3, {"speculation": False}), (3, {"least_s": 60.0})],
    ids=["too few are done", "switched off", "too short"],
)
def test_no_copy(done: int, policy: dict[str, object]) -> None:
    stage, _ = schedule(4, {}, {"a": 4, "b": 4}, **policy)
    for start in stage.start(0.0)[:done]:
        stage.finished(start.task, 0, 1.0, now_s=0.0)
    assert stage.start(30.0) == []


def test_a_node_that_has_to_start_a_process_is_given_time() -> None:
    stage, slots = schedule(2, {0: "a", 1: "b"}, {"a": 1, "b": 1}, least_s=1.0, cold_s=5.0)
    slots.warm.discard("a")
    stage.start(0.0)
    stage.finished(1, 0, 0.1, now_s=0.0)
    assert stage.start(5.9) == []
    assert stage.wake_s(5.0) == 1.0
    assert stage.start(6.0) == [Start(0, 1, "b")]


def test_a_copy_waits_for_a_place_on_another_node() -> None:
    stage, slots = schedule(2, {0: "a", 1: "b"}, {"a": 1, "b": 1}, least_s=0.0)
    stage.start(0.0)
    stage.finished(1, 0, 0.1, now_s=0.0)
    slots.take("b")  # somebody else's
    assert stage.start(5.0) == []
    slots.give("b")
    assert stage.start(5.0) == [Start(0, 1, "b")]


def test_an_attempt_that_fails_leaves_the_other() -> None:
    stage, _ = schedule(2, {0: "a", 1: "b"}, {"a": 1, "b": 1}, least_s=0.0)
    stage.start(0.0)
    stage.finished(1, 0, 0.1, now_s=0.0)
    stage.start(5.0)
    assert not stage.failed(0, 0)
    assert stage.finished(0, 1, 1.0, now_s=0.0) == []
    assert stage.is_over


def test_the_last_attempt_that_fails_is_said() -> None:
    stage, slots = schedule(1, {}, {"a": 1})
    stage.start(0.0)
    assert stage.failed(0, 0)
    assert slots.free("a") == 1


@settings(deadline=None)
@given(data=st.data())
def test_every_task_wins_once_and_no_node_is_overfull(data: st.DataObject) -> None:
    nodes = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1))
    n = data.draw(st.integers(1, 12))
    scheduling = data.draw(st.sampled_from(["locality", "deterministic"]))
    likes = {task: data.draw(st.sampled_from([None, "a", "b", "z"])) for task in range(n)}
    stage, slots = schedule(n, likes, nodes, scheduling=scheduling, least_s=0.0)
    now_s = 0.0
    running: set[tuple[int, int, str | None]] = set()
    losers: set[tuple[int, int, str | None]] = set()
    won: list[int] = []
    for _ in range(40 * n):
        if stage.is_over:
            break
        now_s += data.draw(st.floats(0.0, 2.0))
        for start in stage.start(now_s):
            assert start.node in nodes
            running.add((start.task, start.attempt, start.node))
        for node, places in nodes.items():
            taken = sum(1 for _, _, at in running | losers if at == node)
            assert taken <= places
        for task in {task for task, _, _ in running}:
            at = [node for each, _, node in running if each == task]
            assert len(at) == len(set(at)) <= 2
        if losers and data.draw(st.booleans()):
            over = losers.pop()
            slots.give(over[2])
        if running:
            task, attempt, node = data.draw(st.sampled_from(sorted(running)))
            running.discard((task, attempt, node))
            won.append(task)
            for loser in stage.finished(task, attempt, 1.0, now_s):
                (found,) = (each for each in running if each[:2] == tuple(loser))
                running.discard(found)
                losers.add(found)
    assert stage.is_over
    assert sorted(won) == list(range(n))
