"""Which nodes a program runs on: no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.rows import near
from clamor_ray._recipes.program.tables import DatasetInfo, Tables
from clamor_ray.actors.recipes import staffing
from clamor_ray.actors.recipes.nodes import Change, change, check_enough
from clamor_ray.actors.recipes.staffing import Staff, Staffing


@pytest.mark.parametrize(
    ("able", "has", "ending", "draining", "wanted", "expected"),
    [
        ("abc", "", "", "", None, Change(["a", "b", "c"], [])),
        ("abc", "", "", "b", None, Change(["a", "c"], [])),
        ("abc", "a", "", "", 1, Change([], [])),
        ("abc", "a", "b", "", 3, Change(["c"], [])),  # one on its way out is no second one's place
        ("abc", "ab", "", "b", 2, Change(["c"], ["b"])),
        ("ab", "ab", "", "b", 2, Change([], ["b"])),  # others stay
        ("ab", "ab", "", "ab", 2, Change([], [])),  # nobody would
        ("abc", "abc", "", "", 1, Change([], ["b", "c"])),
        ("cba", "abc", "", "", 1, Change([], ["b", "a"])),  # the best stays
        ("abc", "abc", "", "a", 1, Change([], ["a", "c"])),
        ("", "ab", "", "", None, Change([], [])),  # Ray does not know them any more
    ],
)
def test_who_comes_and_who_goes(
    able: str, has: str, ending: str, draining: str, wanted: int | None, expected: Change
) -> None:
    assert change(able, has, ending, draining, wanted) == expected


def test_more_than_there_are_is_refused() -> None:
    check_enough({"a": 1, "b": 1}, 2, ())
    with pytest.raises(errors.ProgramError, match="2 workers were asked for, and 1 nodes"):
        check_enough({"a": 1, "b": 1}, 2, {"b"})
    with pytest.raises(errors.ProgramError, match="No node has a CPU"):
        check_enough({"a": 1}, None, {"a"})


def test_partitions_begin_where_they_are_but_for_the_bound() -> None:
    tables = Tables((DatasetInfo("rows", 5, 0), DatasetInfo("w", 1, 1)), (), (), 0)
    cached = {(0, n): {"a": n, "gone": 100} for n in range(5)} | {(1, 0): {"b": 1}}
    found = near(tables, cached, ["a", "b"])
    assert found == {(0, 4): "a", (0, 3): "a", (0, 2): "a", (1, 0): "b"}
    core = ControllerCore(tables)
    core.begin({"a": None, "b": None}, cached)
    placed = core.map.assigned
    assert placed == found | {(0, 0): "b", (0, 1): "b"}


class World:
    """Nodes, and workers that begin and end at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wanted: int | str | None) -> None:
        self.able = {"a": 4, "b": 2, "c": 1}
        self.drained_by_ray: set[str] = set()
        self.has: set[str] = set()
        self.fails: set[str] = set()
        self.begun: list[str] = []
        monkeypatch.setattr(staffing, "able_nodes", lambda: dict(self.able))
        monkeypatch.setattr(
            staffing.ray_nodes, "draining_nodes", lambda: dict.fromkeys(self.drained_by_ray, 0.0)
        )
        self.staffing = Staffing(wanted, self._staff, self._add, self.has.remove, lambda: ["c"])
        self.has.update(self.staffing.nodes())

    def _staff(self) -> Staff:
        return Staff(frozenset(self.has), frozenset())

    def _add(self, nodes: Mapping[str, int]) -> errors.ClamorError | None:
        failure = None
        for node, n_cpus in nodes.items():
            self.begun.append(node)
            assert n_cpus == self.able[node]
            if node in self.fails:
                failure = errors.WaitTimeoutError("it did not start")
            else:
                self.has.add(node)
        return failure


def test_it_begins_off_drained_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(monkeypatch, None).has == {"a", "b"}
    assert World(monkeypatch, 1).has == {"a"}


@pytest.mark.parametrize(("wanted", "expected"), [("all", "abd"), (None, "ab"), (2, "ab")])
def test_a_node_that_comes(monkeypatch: pytest.MonkeyPatch, wanted: Any, expected: str) -> None:
    world = World(monkeypatch, wanted)
    world.able["d"] = 1
    world.staffing.adjust()
    assert world.has == set(expected)


def test_a_node_that_ray_drains_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2)
    world.drained_by_ray.add("a")
    world.staffing.adjust()
    assert world.has == {"b"}  # c is drained too
    world.staffing.stay("c")
    world.staffing.adjust()
    assert world.has == {"b", "c"}


def test_the_last_one_stays_until_another_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    world.fails.add("b")
    world.staffing.drain("a")
    world.staffing.adjust()
    assert (world.has, world.begun) == ({"a"}, ["b"])
    world.staffing.adjust()  # not again at once
    assert world.begun == ["b"]
    world.staffing.stay("c")
    world.staffing.adjust()
    assert world.has == {"c"}


def test_what_fails_when_it_is_asked_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    world.fails.add("b")
    with pytest.raises(errors.WaitTimeoutError):
        world.staffing.scale(2)
    with pytest.raises(errors.ProgramError):
        world.staffing.scale(3)
    world.fails.clear()
    world.staffing.scale("all")
    assert world.has == {"a", "b"}
    world.staffing.scale(1)
    assert world.has == {"a"}


def test_who_takes_over_keeps_what_was_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 1)
    world.staffing.take_over(2)
    world.staffing.adjust()
    assert world.has == {"a", "b"}
