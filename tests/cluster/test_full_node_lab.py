"""Nodes whose memory has a limit of the kernel's: a full one gives homes to the others."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.lab.memory import Group, memory_group

pytestmark = pytest.mark.lab

MIB = 1 << 20
TASK_S = 120.0
SIZES = [40, 60, 80, 60]  # MiB, of the variables that node 1 has
ROOM = 80 * MIB  # that it has left


@pytest.fixture
def cache_bytes() -> str:
    """A quarter of the machine's memory: the nodes have no limits yet."""
    return "0"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, cache_bytes: str) -> Iterator[LocalCluster]:
    require_lab("local")
    monkeypatch.setenv("CLAMOR_CACHE_BYTES", cache_bytes)
    monkeypatch.setenv("CLAMOR_HISTORY_BYTES", "1MiB")  # old blocks would take the node's memory
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


@pytest.fixture
def groups(lab: LocalCluster) -> Iterator[list[Group]]:
    """Of each node. The driver is in none."""
    with memory_group("0") as head, memory_group("1") as first, memory_group("2") as second:
        groups = [head, first, second]
        for index, group in enumerate(groups):
            on(index, warm)  # what a node has by itself does not count
            group.add(lab.processes(index))
        yield groups


def on(index: int, function: Any, *arguments: Any) -> Any:
    import ray

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=TASK_S)


def warm() -> None:
    """The page server is there, and this process has all that it needs."""
    clamor.free(clamor.put(filled(2, 1)))


def filled(mib: int, number: int) -> Any:
    return np.full(mib * MIB // 8, number, np.int64)


def put(mib: int, number: int) -> Any:
    return clamor.put(filled(mib, number))


def put_all() -> list[Any]:
    return [put(mib, number) for number, mib in enumerate(SIZES)]


def homes_of(ref: Any) -> set[str]:
    return {node for node, entry in clamor.stats().region(ref).items() if entry.is_home}


def n_moved() -> int:
    return clamor.stats().moves.for_room


def check(refs: list[Any]) -> None:
    for number, ref in enumerate(refs):
        array = ref.get()
        assert array[0] == array[-1] == number
        assert (array == number).all()
        del array


def test_put_has_what_is_read_least_go_to_a_node_with_room(
    lab: LocalCluster, groups: list[Group]
) -> None:
    """Before, the variable was spread, or refused."""
    refs = on(1, put_all)
    for ref in refs[:2]:
        assert int(ref.get()[7]) == refs.index(ref)  # these are read
    groups[1].leave(ROOM + 120 * MIB)  # the object itself takes the most of it
    new = on(1, put, 120, 9)
    assert homes_of(new) == {lab.node_ids[1]}
    assert new.nbytes == 120 * MIB
    assert n_moved() == 1  # 60 MiB are enough
    assert [homes_of(ref) for ref in refs] == [
        {lab.node_ids[index]} for index in (1, 1, 1, 0)
    ] or homes_of(refs[3]) == {lab.node_ids[2]}
    assert (new.get() == 9).all()
    check(refs)


def change(ref: Any) -> None:
    with clamor.update(ref) as array:
        array[:] = 5


def test_the_home_of_a_commit_has_others_go(lab: LocalCluster, groups: list[Group]) -> None:
    refs = on(1, put_all)
    groups[1].leave(ROOM // 2)
    change(refs[2])  # 80 MiB come here from the driver's node
    assert refs[2].at().version == 1
    assert homes_of(refs[2]) == {lab.node_ids[1]}  # what is being changed stays
    assert n_moved() >= 1
    assert (refs[2].at().get() == 5).all()
    assert (refs[2].at(0).get() == 2).all()
    check([*refs[:2]])
    assert (refs[3].get() == 3).all()


def test_a_commit_has_others_go_from_its_own_node(lab: LocalCluster, groups: list[Group]) -> None:
    refs = on(1, put_all)
    far = put(80, 7)  # at the driver's node
    on(1, warm)
    groups[1].leave(2 * ROOM + 40 * MIB)  # for what it reads, and changes, but not for its layer
    on(1, change, far)
    assert (far.at().get() == 5).all()
    assert n_moved() >= 1
    check(refs)


def refused(mib: int) -> tuple[str, float]:
    array = filled(mib, 1)
    began_s = time.monotonic()
    try:
        clamor.put(array)
    except errors.OutOfMemoryError as failure:
        return str(failure), time.monotonic() - began_s
    return "", 0.0


def test_where_no_node_has_room_the_error_comes_at_once(
    lab: LocalCluster, groups: list[Group]
) -> None:
    refs = on(1, put_all)
    homes = [homes_of(ref) for ref in refs]
    for group in groups:
        group.leave(30 * MIB)  # less than a piece
    groups[1].leave(430 * MIB)  # of which the object takes the most, before it is put
    said, took_s = on(1, refused, 400)
    assert "nor has it room when it is spread" in said
    assert took_s < 10
    assert n_moved() == 0
    assert [homes_of(ref) for ref in refs] == homes


LARGE = 160  # MiB
EACH = 120 * MIB  # that each node has
WRITE_BUDGET = {"env_vars": {"CLAMOR_WRITE_BYTES": "8MiB"}}


class Owner:
    """Has an object that is larger than what its node has from then on."""

    def __init__(self) -> None:
        clamor.free(clamor.put(filled(2, 1)))
        self._array = np.random.default_rng(8).integers(0, 1 << 62, LARGE * MIB // 8)

    def put(self) -> Any:
        return clamor.put(self._array)

    def checksum(self, refs: list[Any]) -> list[int]:
        array = refs[0].get()
        parts = range(0, len(array), MIB)
        return [zlib.crc32(array[first : first + MIB]) for first in parts]

    def expected(self) -> list[int]:
        """As `checksum`, of what it has."""
        parts = range(0, len(self._array), MIB)
        return [zlib.crc32(self._array[first : first + MIB]) for first in parts]

    def change(self, refs: list[Any], most_rows: int) -> int:
        """By chunks, in both."""
        change = clamor.update(refs[0])
        with change as x:
            for rows in change.chunks():
                if rows.start >= most_rows:
                    break
                x[rows] += 7
                self._array[rows] += 7
        return int(refs[0].version)


@pytest.fixture
def owner(lab: LocalCluster) -> Iterator[Any]:
    """On node 1; its object is there before the node has a limit."""
    import ray

    options = {"num_cpus": 0, "resources": {node_resource(1): 0.01}, "runtime_env": WRITE_BUDGET}
    owner = ray.remote(Owner).options(**options).remote()
    ray.get(owner.expected.remote(), timeout=TASK_S)
    yield owner
    ray.kill(owner)


@pytest.mark.parametrize("cache_bytes", ["16MiB"])
def test_what_is_larger_than_any_node_is_spread_read_and_changed(
    lab: LocalCluster, owner: Any, groups: list[Group]
) -> None:
    import ray

    def of(call: Any) -> Any:
        return ray.get(call, timeout=TASK_S)

    for group in groups:
        group.leave(EACH)
    ref = of(owner.put.remote())
    assert ref.nbytes > EACH
    assert homes_of(ref) == set(lab.node_ids)
    expected = of(owner.expected.remote())
    assert of(owner.checksum.remote([ref])) == expected
    assert of(owner.change.remote([ref], LARGE * MIB // 8 // 4)) == 1
    changed = of(owner.expected.remote())
    assert changed != expected
    ref.refresh()
    assert of(owner.checksum.remote([ref])) == changed
