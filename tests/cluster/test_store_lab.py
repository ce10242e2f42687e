"""A session with a store is there again in another cluster, however the one before has ended."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import until
from tests.support import store_openings, stored
from tests.support.lab import local_cluster, require_lab
from tests.support.store_openings import SESSION, opening

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def needs() -> None:
    require_lab("local")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s"


def fill(store: Path, n_nodes: int, how: str) -> dict[str, list[int]]:
    """A first opening that ends in that way, after one commit to each variable."""
    if how != "kill -9":
        with opening(store, n_nodes, orderly=how == "shutdown"):
            stored.put_all(n_nodes)
            stored.change(1, n_nodes)
            return stored.places()
    with local_cluster(n_nodes, connect=False) as lab:
        script = f"""
stored.put_all({n_nodes})
stored.change(1, {n_nodes})
print(json.dumps([found.scope, stored.places()]))
"""
        scope, places = store_openings.run(lab, store, script)
        store_openings.crash(lab, scope)
    found: dict[str, list[int]] = places
    return found


@pytest.mark.parametrize(
    ("n_nodes", "how"),
    [
        (1, "left"),
        pytest.param(1, "kill -9", marks=pytest.mark.soak),
        (3, "shutdown"),
        (3, "kill -9"),
    ],
)
def test_everything_is_there_again(store: Path, n_nodes: int, how: str) -> None:
    places = fill(store, n_nodes, how)
    with opening(store, n_nodes):
        stored.check(1, n_nodes)
        assert stored.places() == places
        stored.change(2, n_nodes)
        stored.check(2, n_nodes)
        clamor.put(np.arange(N_LATER), name="later")
    with opening(store, n_nodes):
        stored.check(2, n_nodes)
        found = stored.places()
        assert clamor.open("later").get().sum() == sum(range(N_LATER))
    later = found.pop("later")
    assert found == places
    assert later[1] not in [address for _, address in places.values()]


N_LATER = 10_000


def test_what_no_name_leads_to_ends_with_its_opening(store: Path) -> None:
    with opening(store):
        alone = clamor.put(np.arange(5000))
        freed = clamor.put(np.arange(5000), name="freed")
        dropped = clamor.put(np.arange(5000), name="dropped")
        kept = clamor.put(np.arange(6000))
        inline = clamor.put([clamor.put(np.arange(7000))], name="inline")
        held = clamor.put({"kept": kept, "filling": np.zeros(5000)}, name="outer")
        clamor.free(freed)
        clamor.drop("dropped")
        gone = {alone._region, freed._region, dropped._region}
        del alone, freed, dropped
        stays = {kept._region, held._region, inline.get()[0]._region}
        assert stays <= {info.region for info in clamor.variables()}
    with opening(store):
        found = {info.region for info in clamor.variables()}
        assert not gone & found
        assert stays <= found
        for name in ("freed", "dropped"):
            with pytest.raises(errors.NoSuchNameError):
                clamor.open(name)
        assert clamor.open("outer").get()["kept"].get().sum() == sum(range(6000))
        assert clamor.open("inline").get()[0].get().sum() == sum(range(7000))
        clamor.put(np.arange(10), name="freed")  # its name is free again
    files = {int(path.name.split(".")[0]) for path in store.rglob("*.base")}
    assert not gone & files


def test_a_store_is_opened_once_at_a_time(store: Path) -> None:
    put = 'print(clamor.put(np.arange(5000), name="index").version)'
    change = """
clamor.add_at(clamor.open("index"), [0], 5)
print(int(clamor.open("index").get()[0]))
clamor.shutdown(session="kept")
"""
    with local_cluster(1, connect=False) as first:
        assert store_openings.run(first, store, put) == 0
        with local_cluster(1), pytest.raises(errors.StoreInUseError) as failed:
            store_openings.attach(store)
        assert f"on {os.uname().nodename}" in str(failed.value)
        assert store_openings.run(first, store, change) == 5
    with opening(store):
        assert clamor.open("index").get()[0] == 5


def test_a_process_opens_it_again_and_again_in_one_cluster(store: Path) -> None:
    with local_cluster(1):
        for n in range(3):
            found = store_openings.attach(store)
            assert found.session == SESSION
            if not n:
                clamor.put(np.zeros(5000), name="array")
                clamor.put(np.zeros(5), name="small")
            for name in ("array", "small"):
                with clamor.update(clamor.open(name)) as array:
                    assert int(array[0]) == n
                    array[0] += 1
            clamor.shutdown(session=SESSION)
            assert SESSION not in [info.name for info in clamor.sessions()]


def test_fewer_nodes_and_more(store: Path) -> None:
    with opening(store, 3):
        stored.put_all(3)
        stored.change(1, 3)
        places = stored.places()
    assert len(store_openings.node_directories(store)) == 3
    with opening(store, 1):
        stored.check(1, 3)
        stored.change(2, 3)
        assert stored.places() == places
    with opening(store, 3) as lab:
        stored.check(2, 3)
        stored.change(3, 3)
        assert stored.places() == places
        until(lambda: len(clamor.stats().nodes) == len(lab.node_ids))
    with opening(store, 2):
        stored.check(3, 3)


def test_settings_of_a_store_are_said(store: Path) -> None:
    with local_cluster(1):
        with pytest.raises(ValueError, match="session"):
            clamor.init(store=str(store))
        store_openings.attach(store)
        clamor.shutdown()
        with pytest.raises(ValueError, match=str(store)):
            clamor.init(store=str(store) + "-other", session=SESSION)
        clamor.init(session=SESSION)  # one that lives is found by its name alone
        clamor.shutdown(session=SESSION)
