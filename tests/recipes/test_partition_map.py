"""Copies of the map: steps in one order, and whole ones."""

from __future__ import annotations

import doctest

from clamor_ray._recipes.placement import partition_map
from clamor_ray._recipes.placement.messages import TERM, MapUpdate
from clamor_ray._recipes.placement.partition_map import Changes, PartitionMap

FIRST = MapUpdate(1, {(0, 0): "a", (0, 1): "b"}, {"a": 1, "b": 2}, is_whole=True)


def first() -> PartitionMap:
    copy = PartitionMap()
    copy.apply(FIRST)
    return copy


def test_steps_that_come_early_wait_and_those_that_come_again_change_nothing() -> None:
    copy = first()
    third = MapUpdate(3, {(0, 0): "b"})
    assert copy.apply(third) == Changes()
    assert copy.apply(MapUpdate(2, {(0, 0): "a", (0, 1): "a"})).moved == {(0, 0), (0, 1)}
    assert copy.version == 3
    assert copy.assigned == {(0, 0): "b", (0, 1): "a"}
    for again in (FIRST, MapUpdate(2, {(0, 0): "a"}), third):
        assert copy.apply(again) == Changes()
    assert copy.version == 3
    assert copy.assigned == {(0, 0): "b", (0, 1): "a"}


def test_a_slice_that_moves_and_comes_back_in_one_go_has_not_moved() -> None:
    copy = first()
    copy.apply(MapUpdate(3, {(0, 0): "a"}))
    assert copy.apply(MapUpdate(2, {(0, 0): "b"})).moved == set()


def test_a_whole_map_needs_no_step_before_it_and_has_only_its_workers() -> None:
    copy = first()
    copy.apply(MapUpdate(2, {}, {"c": 3}))  # of a controller that is lost; nobody else has heard
    whole = MapUpdate(TERM, {(0, 0): "a", (0, 1): "a"}, {"a": 1, "b": 2}, is_whole=True)
    assert copy.apply(whole).moved == {(0, 1)}
    assert copy.workers == {"a", "b"}
    assert copy.slices_of("a") == {(0, 0), (0, 1)}
    assert copy.n_slices_of("b") == 0
    copy.apply(MapUpdate(3, {(0, 1): "b"}))  # what the lost one had said last
    assert copy.worker_of((0, 1)) == "a"


def test_the_whole_of_a_map_makes_the_same_map() -> None:
    copy = first()
    copy.apply(MapUpdate(2, {(0, 1): "a"}))
    copy.apply(MapUpdate(3, {}, {"c": 3}, frozenset({"b"})))
    other = PartitionMap()
    changes = other.apply(copy.whole())
    assert other.whole() == copy.whole()
    assert other.workers == {"a", "c"}
    assert other.addresses == {
        "a": 1,
        "b": 2,
        "c": 3,
    }  # also of who left
    assert changes.left == {"b"}


def test_the_example_is_right() -> None:
    found = doctest.testmod(partition_map)
    assert found.attempted > 0
    assert found.failed == 0
