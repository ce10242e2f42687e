"""Variables by name: from any process, through updates, frees and the registry's death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from tests.conftest import ClamorCluster

pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def nothing_is_left(clamor_cluster: ClamorCluster) -> Iterator[None]:
    yield
    for info in clamor.variables():
        if info.name is not None:
            clamor.free(clamor.open(info.name))


def ready() -> set[int]:
    """Not how many: what others have dropped goes meanwhile."""
    return {info.region for info in clamor.variables()}


@pytest.mark.parametrize("obj", [np.arange(10_000.0), np.arange(3.0)], ids=["region", "inline"])
def test_a_task_opens_what_the_driver_named(clamor_cluster: ClamorCluster, obj: np.ndarray) -> None:
    ref = clamor.put(obj, name="index")
    assert ref.name == "index"
    assert repr(ref).startswith("GlobalRef('index', ndarray float64 (")
    with clamor.update(ref) as x:
        x[1] = 7.0

    def opened() -> tuple[float, int, str | None]:
        found = clamor.open("index")
        return float(found.get()[1]), found.version, found.name

    assert clamor_cluster.run(opened) == (7.0, 1, "index")
    assert clamor.open("index") == ref


def test_a_task_names_and_the_driver_opens(clamor_cluster: ClamorCluster) -> None:
    def make() -> None:
        clamor.zeros((1000, 10), name="made in a task")
        clamor.share(ray.put(np.arange(10**5)), name="shared")

    clamor_cluster.run(make)
    assert clamor.open("made in a task").get().shape == (1000, 10)
    assert int(clamor.open("shared").get()[7]) == 7


def test_a_name_that_is_taken_makes_nothing(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.zeros(10_000), name="taken")
    before = ready()
    for make in (
        lambda: clamor.put(np.ones(10_000), name="taken"),
        lambda: clamor.zeros(10_000, name="taken"),
    ):
        with pytest.raises(errors.NameTakenError, match="'taken'"):
            make()
    assert ready() <= before
    assert clamor.open("taken") == ref


def test_who_loses_a_race_for_a_name_keeps_nothing(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = process_sessions.current()
    first = clamor.put(np.zeros(10_000))

    def give_later(name: str, region: int, packed: bytes) -> None:
        monkeypatch.undo()
        session.rpc.give_name(name, first._region, first._packed())  # somebody is faster
        session.rpc.give_name(name, region, packed)

    before = ready()
    monkeypatch.setattr(session.rpc, "give_name", give_later)
    with pytest.raises(errors.NameTakenError):
        clamor.put(np.ones(10_000), name="raced")
    assert ready() <= before
    assert clamor.open("raced") == first


def test_many_get_or_create_one(clamor_cluster: ClamorCluster) -> None:
    def one(value: int) -> tuple[int, float]:
        ref = clamor.get_or_create("table", lambda: np.full(10_000, float(value)))
        return ref._region, float(ref.get()[5])

    tasks = [clamor_cluster.remote(one, node=i % 2).remote(i) for i in range(8)]
    found = ray.get(tasks, timeout=120)
    assert len(set(found)) == 1
    named = [info for info in clamor.variables() if info.name == "table"]
    assert [info.region for info in named] == [found[0][0]]


def test_a_free_frees_the_name(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.zeros(10_000), name="freed")
    clamor.free(ref)
    with pytest.raises(errors.NoSuchNameError, match="'freed'"):
        clamor.open("freed")
    assert float(clamor.put(np.ones(10_000), name="freed").get()[0]) == 1.0


def test_a_dropped_name_is_free_and_its_variable_stays(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.zeros(10_000), name="dropped")
    clamor.drop("dropped")
    clamor.drop("dropped")
    other = clamor.put(np.ones(10_000), name="dropped")
    assert clamor.open("dropped") == other != ref
    assert float(ref.get()[3]) == 0.0
    clamor.free(ref)
    assert clamor.open("dropped") == other


def test_variables_are_listed(clamor_cluster: ClamorCluster) -> None:
    nameless = clamor.put(np.zeros(10_000))
    small = clamor.put(np.zeros(3), name="small")
    ref = clamor.put(np.zeros(10_000), name="listed")
    clamor.add_at(ref, [0], 1.0)
    listed = clamor.variables()
    here = clamor_cluster.attached.node_id
    assert [info.name for info in listed[:2]] == ["listed", "small"]
    assert listed[0] == clamor.VariableInfo(
        "listed", ref._region, 1, "ndarray float64 (10000,)", 80_000, (here,)
    )
    assert listed[1] == clamor.VariableInfo(
        "small", small._region, 0, "ndarray float64 (3,)", 24, ()
    )
    assert [i.name for i in listed if i.region == nameless._region] == [None]
    stats = clamor.stats()
    assert stats.names == {ref._region: "listed", small._region: "small"}
    assert f"variable {ref._region} is 'listed'" in str(stats)
    assert str(clamor.read_report(ref)).startswith("variable 'listed', version 1")
    assert repr(clamor.read_report(small)).startswith("Reads(variable 'small', ")
    clamor.free(nameless)


@pytest.mark.parametrize("obj", [np.zeros(10_000), np.zeros(3)], ids=["region", "inline"])
def test_errors_say_the_name(clamor_cluster: ClamorCluster, obj: np.ndarray) -> None:
    ref = clamor.put(obj, name="contended")
    old = ref.snapshot()
    clamor.add_at(ref, [0], 1.0)
    with (
        pytest.raises(errors.CommitConflict, match="ariable 'contended'"),
        clamor.update(old) as x,
    ):
        x[0] = 2.0
    with pytest.raises(errors.NoVersionError, match="version 9 of variable 'contended'"):
        ref.at(9)


def test_names_outlive_the_registry(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.arange(10_000), name="kept")
    clamor.put(np.arange(3), name="kept, small")
    with clamor.update(clamor.open("kept, small")) as x:
        x[0] = 9
    gone = clamor.put(np.arange(10_000), name="gone")
    clamor.free(gone)
    os.kill(process_sessions.current().rpc.ping(), signal.SIGKILL)
    assert clamor.open("kept") == ref
    assert list(clamor.open("kept, small").get()) == [9, 1, 2]
    with pytest.raises(errors.NoSuchNameError):
        clamor.open("gone")


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 201])
def test_a_bad_name_says_what_a_name_is(clamor_cluster: ClamorCluster, name: str) -> None:
    before = ready()
    with pytest.raises(ValueError, match="1 to 200 characters"):
        clamor.put(np.zeros(10_000), name=name)
    with pytest.raises(ValueError, match="1 to 200 characters"):
        clamor.open(name)
    with pytest.raises(TypeError, match="is a string, not int"):
        clamor.open(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="make is a callable"):
        clamor.get_or_create("name", 7)  # type: ignore[arg-type]
    assert ready() <= before


def test_a_hash_map_has_a_name(clamor_cluster: ClamorCluster) -> None:
    ages = clamor.HashMap.build(np.arange(1000), np.full(1000, 30), name="ages")
    with clamor.update(ages) as m:
        m[5] = 55
    assert clamor.HashMap(clamor.open("ages")).get(5) == 55
    for obj in (ages, ages.ref):
        with pytest.raises(TypeError, match="is a variable already"):
            clamor.put(obj, name="a wrapper")


def test_what_has_grown_is_listed_as_it_is(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.zeros(1000, capacity=5000, name="grows")
    with clamor.update(ref, grow_to=5000) as x:
        x[4999] = 1
    (info,) = [info for info in clamor.variables() if info.name == "grows"]
    assert (info.version, info.kind, info.nbytes) == (1, "ndarray float64 (5000,)", 40_000)
