"""`clamor.init(store=...)`: what a session has in the next cluster, and what is not opened.

Each cluster is one raylet, and goes as a crash takes it: nobody ends the session.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import driver_script

pytestmark = pytest.mark.lab

COMMON = """
import os
import shutil
import sys
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab.cluster import bare_cluster

STORE = os.environ["STORE"]


def opened(**more):
    return clamor.init(store=STORE, session="features", **more)


def refusal(kind, **more):
    try:
        opened(**more)
    except kind as refused:
        return str(refused)
    raise AssertionError("it was opened")
"""

FIRST = (
    COMMON
    + """
with bare_cluster():
    found = opened()
    assert found.session == "features"
    assert opened(lifetime="detached").scope == found.scope
    array = clamor.put(np.arange(10**5), name="array")
    inner = clamor.put(np.ones(10**4))
    outer = clamor.put({"inner": inner, "old": inner.snapshot()}, name="outer")
    clamor.put(np.zeros(10**5))  # nobody will know it
    spread = clamor.put(np.arange(6 << 20), home="spread", name="spread")
    small = clamor.put(np.arange(3), name="small")  # travels inside its references
    kept = clamor.HashMap.build(np.arange(1000), np.arange(1000) * 2, name="map")
    with clamor.transaction(array, spread, inner) as (a, s, i):
        a[7] = s[7] = i[7] = -7
    clamor.add_at(array, [8], 1)
    with clamor.update(small) as values:
        values[0] = 5
    print(found.scope, *(ref._region for ref in (array, inner, outer, spread)),
          *(ref._base_address for ref in (array, inner, outer, spread)))
"""
)

NEXT = (
    COMMON
    + """
with bare_cluster():
    print(opened().scope, end=" ")
    array, outer, spread = (clamor.open(name) for name in ("array", "outer", "spread"))
    inner, old = outer.get()["inner"], outer.get()["old"]
    print(*(ref._region for ref in (array, inner, outer, spread)),
          *(ref._base_address for ref in (array, inner, outer, spread)))
    n = int(os.environ["N"])
    assert array.version == 2 + n, array
    assert array.get()[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, -7, 9 + n]
    assert spread.get()[7] == -7 and spread.get()[8] == 8
    # Both are to version 0, of which nothing is kept.
    assert inner.get()[7] == -7 and inner.version == 1
    assert old.get()[7] == -7
    assert clamor.open("small").get().tolist() == [5, 1, 2]
    assert len(clamor.variables()) == 6, clamor.variables()
    clamor.add_at(array, [8], 1)
    total = clamor.remote(lambda x, inside: float(x.sum()) + float(inside["inner"].get()[7]))
    assert ray.get(total.remote(spread, outer), timeout=60) == sum(range(6 << 20)) - 7 - 7 - 7
"""
)


def test_the_next_cluster_has_the_newest_versions(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    first = driver_script.run(FIRST, STORE=store)
    for n in range(2):
        said = driver_script.run(NEXT, STORE=store, N=str(n))
        assert driver_script.lines_of(said)[-1].split() == driver_script.lines_of(first)[-1].split()


AGAIN = (
    COMMON
    + """
ray.init(address="local", num_cpus=2, include_dashboard=False)


@ray.remote(num_cpus=0)
class Reader:  # one process throughout
    def total(self, refs):
        return float(refs[0].get().sum())


reader = Reader.remote()
scopes, regions = set(), set()
for n in range(3):
    scopes.add(opened().scope)
    if n == 0:
        clamor.put(np.zeros(10**4), name="array")
    ref = clamor.open("array")
    regions.add((ref._region, ref._base_address))
    clamor.add_at(ref, [0], 1)
    assert ref.version == n + 1
    assert ray.get(reader.total.remote([ref]), timeout=60) == n + 1
    held = ref.get()
    clamor.shutdown(session="features")
    assert held[0] == n + 1  # as of any session that has ended
    assert "holds objects of a session that has ended" in refusal(errors.AddressClashError)
    del held
assert len(scopes) == len(regions) == 1, (scopes, regions)
print("three times")
"""
)


def test_in_one_cluster_it_is_opened_again(tmp_path: Path) -> None:
    assert "three times" in driver_script.run(AGAIN, STORE=str(tmp_path / "store"))


REFUSED = (
    COMMON
    + """
import pathlib
from clamor_ray._store.directories import open_registry

root = pathlib.Path(STORE, "features")
with bare_cluster():
    try:
        clamor.init(store=STORE + "/no/such/parent", session="features")
        raise AssertionError("it was made")
    except errors.StoreAccessError as error:
        assert "is no directory" in str(error), error
    opened()
    clamor.put(np.ones(1000), name="ones")
    try:
        clamor.init(store=STORE + "2", session="features")
        raise AssertionError("it was attached to")
    except ValueError as error:
        assert "has the store" in str(error), error
    clamor.shutdown(session="features")

    other = open_registry(root)
    assert f"process {os.getpid()}" in refusal(errors.StoreInUseError)
    other.close()

    os.chmod(root, 0o755)
    assert "may be used by others" in refusal(errors.StoreAccessError)
    os.chmod(root, 0o700)

    description = (root / "registry" / "description.json").read_text()
    newer = description.replace('"format": 1', '"format": 2')
    assert newer != description
    (root / "registry" / "description.json").write_text(newer)
    refusal(errors.StoreFormatError)
    (root / "registry" / "description.json").write_text(description)

    shutil.move(root / "registry", STORE + "-registry")
    said = refusal(errors.StoreIncompleteError)
    assert "is on no node that lives" in said and "parts of the store" in said, said
    assert not (root / "registry").exists()
    shutil.move(STORE + "-registry", root / "registry")

    clamor.init(session="another", lifetime="detached")  # after it was refused all is as before
    opened()
    assert clamor.open("ones").get().sum() == 1000
    clamor.shutdown(session="features")
    try:
        clamor.init(session="features")
        raise AssertionError("there is none")
    except errors.NoSuchSessionError:
        print("refused")
"""
)


def test_what_cannot_be_opened_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    assert "refused" in driver_script.run(REFUSED, STORE=str(tmp_path / "store"))
