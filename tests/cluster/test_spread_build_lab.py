"""Objects that are built in place and are larger than what this node keeps of them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.cluster.test_moves_lab import on
from tests.cluster.test_spread_lab import homes_of
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.troubles import server_pid

pytestmark = pytest.mark.lab

N = 6_000_000  # of 8 bytes: 48 MB, 12 pieces of 4 MiB
MIB = 1 << 20


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def own_bytes() -> int:
    """Private memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def regions_there() -> set[int]:
    """What page servers have, and what the registry lists."""
    there = {each.region for node in clamor.stats().nodes for each in node.regions}
    return there | {info.region for info in clamor.variables()}


def nothing_is_left(before: set[int]) -> None:
    until(lambda: regions_there() <= before, 60.0)


def test_random_writes_and_flushes_against_a_plain_array(three: LocalCluster) -> None:
    rng = np.random.default_rng(11)
    expected = np.zeros(N, np.int64)
    with clamor.build(64 * MIB, home="spread") as r:
        array = r.zeros(N, np.int64)
        small = r.zeros(10)
        for step in range(40):
            first = int(rng.integers(0, N))
            n = int(rng.integers(1, N if step % 5 == 0 else 20_000))
            array[first : first + n] = expected[first : first + n] = step
            some = rng.integers(0, N, 50)
            array[some] += some
            expected[some] = array[some]
            if rng.random() < 0.4:
                r.flush()
                at = int(rng.integers(0, N))
                assert np.array_equal(array[at : at + 5000], expected[at : at + 5000])
        small[:] = 7
        ref = r.publish({"array": array, "small": small})
    assert ref.version == 0
    assert homes_of(ref) == set(three.node_ids)
    assert np.array_equal(ref.get()["array"], expected)
    assert np.array_equal(on(2, lambda ref: np.array(ref.get()["array"]), ref), expected)
    assert np.array_equal(array, expected)  # what was made in the block shows version 0
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with clamor.update(ref) as changed:
        changed["array"][5] = -1
    assert int(on(1, lambda ref: int(ref.get()["array"][5]), ref)) == -1
    assert float(ref.get()["small"][9]) == 7.0


def test_little_of_it_is_memory_here(three: LocalCluster) -> None:
    """It is four times as large as what may be here, and is written by `zeros` and `flush`."""
    budget_bytes = N * 8 // 4
    least, most = own_bytes(), 0
    with clamor.build(64 * MIB, home="spread") as r:
        array = r.empty((12, N // 12), np.int64)
        for row in range(12):
            array[row] = row
            most = max(most, own_bytes() - least)
            if row % 3 == 2:
                assert r.flush() > 2 * N // 12 * 8
                assert own_bytes() - least < budget_bytes // 2
        ref = r.publish(array)
        del array
    assert most < budget_bytes + 4 * MIB
    assert ref.get()[:, 5].tolist() == list(range(12))


def test_arrays_that_are_made_send_what_is_beyond_the_budget(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clamor_ray._write import window

    monkeypatch.setattr(window, "write_budget_bytes", lambda config, has_bytes: 8 * MIB)
    with clamor.build(64 * MIB, home="spread") as r:
        arrays = []
        for value in range(6):
            arrays.append(r.empty(MIB, np.int64))
            assert r._window.dirty_bytes() < 9 * MIB  # type: ignore[attr-defined]
            arrays[-1][:] = value
        ref = r.publish(arrays)
    del arrays
    assert [int(each[-1]) for each in ref.get()] == list(range(6))


def test_pointers_and_libraries(three: LocalCluster) -> None:
    with clamor.build(64 * MIB, home="spread") as r:
        array = r.zeros(MIB)
        array[:] = 3
        r.flush()
        with r.numpy_allocator():
            other = np.arange(MIB) * 2.0
        with pytest.raises(errors.MallocShimError, match="spread"), r.malloc():
            pass
        ref = r.publish({"at": r.pointer(array.ctypes.data, array.nbytes), "other": other})
    address = int(ref.get()["at"])
    assert address == array.ctypes.data
    assert address % 4096 == 0

    def last(ref: Any) -> float:
        built = ref.get()  # where it was built
        return float(ctypes.c_double.from_address(int(built["at"])).value + built["other"][-1])

    assert last(ref) == on(1, last, ref) == 3.0 + 2.0 * (MIB - 1)


def test_an_exception_leaves_nothing(three: LocalCluster) -> None:
    before = regions_there()
    region = clamor.build(64 * MIB, home="spread")

    def build(region: Any, error: BaseException | None) -> None:
        with region as r:
            r.zeros(N)[:] = 1
            r.flush()
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        build(region, KeyError())
    r = clamor.build(64 * MIB, home="spread")
    with pytest.warns(errors.ClamorWarning, match="nothing was published"):
        build(r, None)
    nothing_is_left(before)
    with pytest.raises(errors.ClosedError):
        r.flush()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="home is 'spread'"):
        clamor.build(64 * MIB, home="here")  # type: ignore[arg-type]


def build_and_die(n: int) -> None:
    with clamor.build(64 << 20, home="spread") as r:
        r.zeros(n)[:] = 1
        r.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_builder_that_is_killed_leaves_nothing(three: LocalCluster) -> None:
    import ray

    before = regions_there()
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(ray.remote(max_retries=0)(build_and_die).remote(N), timeout=90)
    nothing_is_left(before)


def kill_page_servers(lab: LocalCluster) -> None:
    for node in range(3):
        os.kill(server_pid(lab, node), signal.SIGKILL)


def test_page_servers_are_killed_between_flushes(three: LocalCluster) -> None:
    expected = np.arange(N)
    with clamor.build(64 * MIB, home="spread") as r:
        array = r.zeros(N, np.int64)
        array[:] = -1
        r.flush()
        kill_page_servers(three)
        array[: N // 2] = expected[: N // 2]
        r.flush()
        kill_page_servers(three)
        array[N // 2 :] = expected[N // 2 :]
        ref = r.publish(array)
        del array
    assert np.array_equal(ref.get(), expected)
