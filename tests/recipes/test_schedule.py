"""Scheduling functions: what they move, of tables."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from clamor_ray._recipes.placement.schedule import (
    PartitionRow,
    WorkerRow,
    leaving,
    round_robin,
    stragglers,
)

NOBODY: frozenset[str] = frozenset()


def workers(*names: str) -> list[WorkerRow]:
    return [WorkerRow(name) for name in names]


def test_partitions_are_placed_as_even_as_can_be() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        names = [f"w{n}" for n in range(rng.randint(1, 5))]
        rows = [
            PartitionRow(group, index, group, None)
            for group in range(rng.randint(1, 3))
            for index in range(rng.randint(1, 12))
        ]
        moves = round_robin()(workers(*names), rows, NOBODY)
        assert moves.keys() == {(row.dataset, row.index) for row in rows}
        total = Counter(dict.fromkeys(names, 0))
        total.update(moves.values())
        assert max(total.values()) - min(total.values()) <= 1
        for group in {row.group for row in rows}:
            each = Counter(dict.fromkeys(names, 0))
            each.update(worker for (of, _), worker in moves.items() if of == group)
            assert max(each.values()) - min(each.values()) <= 1


def test_each_group_is_even_whatever_the_others_are() -> None:
    rows = [PartitionRow(0, index, 0, "aaaaab"[index]) for index in range(6)]
    rows += [PartitionRow(1, index, 1, None) for index in range(4)]
    moves = round_robin()(workers("a", "b"), rows, NOBODY)
    assert Counter(moves.values()) == {"a": 2, "b": 2}


def test_groups_of_one_slice_are_spread_too() -> None:
    rows = [PartitionRow(n, 0, n, "a") for n in range(4)]
    moves = round_robin()(workers("a", "b"), rows, NOBODY)
    assert list(moves.values()) == ["b", "b"]


def test_a_new_worker_gets_its_part_in_the_fewest_moves() -> None:
    rows = [PartitionRow(0, index, 0, "abc"[index % 3]) for index in range(12)]
    moves = round_robin()(workers("a", "b", "c", "d"), rows, NOBODY)
    assert set(moves.values()) == {"d"}
    assert len(moves) == 3
    assert Counter(index % 3 for _, index in moves) == {0: 1, 1: 1, 2: 1}


def test_where_all_have_some_nothing_is_evened_out() -> None:
    rows = [PartitionRow(0, index, 0, "a" if index < 5 else "b") for index in range(6)]
    assert round_robin()(workers("a", "b"), rows, NOBODY) == {}


def test_what_moves_already_is_not_given_to_a_new_worker() -> None:
    rows = [PartitionRow(0, index, 0, "a", in_migration=True) for index in range(4)]
    assert round_robin()(workers("a", "b"), rows, NOBODY) == {}


def test_a_worker_that_leaves_gets_nothing() -> None:
    rows = [PartitionRow(0, index, 0, None) for index in range(4)]
    assert set(round_robin()(workers("a", "b"), rows, frozenset("b")).values()) == {"a"}
    assert round_robin()(workers("b"), rows, frozenset("b")) == {}


def test_the_slowest_worker_gives_one_partition_to_the_most_idle_one() -> None:
    rows = [PartitionRow(0, n, 0, "aaabbc"[n], seconds=[3, 2, 1, 2, 1, 1][n]) for n in range(6)]
    table = [WorkerRow("a", seconds=6), WorkerRow("b", seconds=3), WorkerRow("c", seconds=1)]
    assert stragglers()(table, rows, NOBODY) == {(0, 0): "c"}
    assert stragglers()(table, rows, frozenset("c")) == {(0, 1): "b"}  # 3 + 3 would be no gain
    assert stragglers(ratio=4)(table, rows, NOBODY) == {}
    moving = [*rows, PartitionRow(0, 6, 0, "c", in_migration=True)]
    assert stragglers()(table, moving, NOBODY) == {}


def test_a_worker_keeps_its_last_partition() -> None:
    rows = [PartitionRow(0, 0, 0, "a", seconds=9), PartitionRow(0, 1, 0, "b", seconds=1)]
    table = [WorkerRow("a", seconds=9), WorkerRow("b", seconds=1)]
    assert stragglers()(table, rows, NOBODY) == {}


def test_a_ratio_by_which_all_are_slow_is_refused() -> None:
    with pytest.raises(ValueError, match="every worker would be slow"):
        stragglers(ratio=1.0)


def test_partitions_of_workers_that_leave_go_to_each_other_worker_in_turn() -> None:
    rows = [PartitionRow(0, index, 0, "abcd"[index % 4]) for index in range(8)]
    moves = leaving()(workers("a", "b", "c", "d"), rows, frozenset("ab"))
    assert moves == {(0, 0): "c", (0, 1): "d", (0, 4): "c", (0, 5): "d"}
    moving = [PartitionRow(0, 0, 0, "a", in_migration=True), PartitionRow(0, 1, 0, "a")]
    assert leaving()(workers("a", "b"), moving, frozenset("a")) == {(0, 1): "b"}
    assert leaving()(workers("a"), rows, frozenset("a")) == {}
