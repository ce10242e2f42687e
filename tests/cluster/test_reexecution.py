"""What Ray computes again it computes from what the task first saw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import clamor_ray as clamor
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

N = 1 << 18  # float64: 2 MiB, so that a result lives in the object store of its node
TASK_S = 120.0
Array = npt.NDArray[np.float64]


@contextlib.contextmanager
def attached() -> Iterator[None]:
    clamor.init()
    try:
        yield
    finally:
        clamor.shutdown()


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab, attached():
        yield lab


def here() -> float:
    """A number for this node."""
    import ray

    return float(int(ray.get_runtime_context().get_node_id()[:12], 16))


def twice(x: Array) -> Array:
    """Of an array that arrived as one."""
    return np.append(x * 2, here())


def twice_inside(refs: list[Any]) -> Array:
    """Of a reference that arrived as one."""
    (ref,) = refs
    return np.append(ref.get() * 2, here())


def plus_newest(doubled: Array, refs: list[Any]) -> Array:
    """Of another task's result, and of a variable at the version that it was passed at."""
    return np.append(doubled[:-1] + refs[0].get(), here())


def on(lab: LocalCluster, node: int, task: Any) -> Any:
    """Runs on this node, or, when that is gone, on any other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(lab.node_ids[node], soft=True)
    return task.options(num_cpus=0, max_retries=5, scheduling_strategy=there)


def change(ref: Any, value: float) -> None:
    with clamor.update(ref) as x:
        x[:] = value
        x[17] = -value


def of(factor: float, value: float) -> Array:
    array = np.full(N, factor * value)
    array[17] = -factor * value
    return array


def start_and_lose(lab: LocalCluster, ref: Any) -> Any:
    """A result of this version, which is lost with its node."""
    import ray

    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    result = on(lab, node, clamor.remote(twice)).remote(ref)
    assert ray.wait([result], timeout=TASK_S, fetch_local=False)[0]
    lab.kill_node(node)
    return result


# Before the others: it has a cluster of its own.
def test_a_version_that_is_kept_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task then fails with that, and never reads a newer one."""
    import ray

    require_lab("local")
    monkeypatch.setenv("CLAMOR_HISTORY_BYTES", str(3 << 20))
    monkeypatch.setenv("CLAMOR_HISTORY_DISK_BYTES", "0")
    with local_cluster(1) as lab, attached():
        ref = clamor.put(np.zeros(N))
        change(ref, 1.0)
        old = ref.snapshot()
        result = start_and_lose(lab, ref)
        change(ref, 2.0)
        assert old.get()[17] == -1  # the budget holds one
        for value in range(3, 9):
            change(ref, float(value))
        with pytest.raises(clamor.errors.SnapshotExpired, match="kept no longer"):
            ray.get(result, timeout=TASK_S)
        assert ref.get()[17] == -8


def test_a_version_that_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others make room for it, and the task gets what it saw first; no longer than it must."""
    import ray

    require_lab("local")
    monkeypatch.setenv("CLAMOR_HISTORY_BYTES", str(3 << 20))
    monkeypatch.setenv("CLAMOR_HISTORY_DISK_BYTES", "0")
    with local_cluster(1) as lab, attached():
        ref, other = clamor.put(np.zeros(N)), clamor.put(np.zeros(N // 8))
        change(ref, 1.0)
        old = ref.snapshot()
        server = lab.page_server(0)
        ray.get(server.retain.remote({ref.region: 1}), timeout=TASK_S)
        result = start_and_lose(lab, ref)
        change(ref, 2.0)
        for value in range(1, 30):  # each replaces 256 KiB
            change(other, float(value))
        assert np.array_equal(ray.get(result, timeout=TASK_S)[:-1], of(2, 1.0))
        engine = ray.get(server.stats.remote(), timeout=TASK_S).engine
        assert engine["history_retained_bytes"] >= 2 << 20
        assert engine["history_expired"] > 10
        assert engine["history_retained_expired"] == 0
        ray.get(server.retain.remote({ref.region: None}), timeout=TASK_S)

        def is_gone() -> bool:
            change(other, 1.0)
            try:
                old.get()
            except clamor.errors.SnapshotExpired as error:
                return "kept no longer" in str(error)
            return False

        # The worker that computed it again keeps its mapping for a moment.
        until(is_gone)


@pytest.mark.parametrize("passed", ["as an argument", "inside an argument", "through another task"])
def test_a_lost_result_is_computed_from_its_version(passed: str, lab: LocalCluster) -> None:
    import ray

    ref = clamor.put(np.zeros(N))
    change(ref, 1.0)
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    lost = float(int(lab.node_ids[node][:12], 16))
    # At version 1.
    if passed == "as an argument":
        result, factor = on(lab, node, clamor.remote(twice)).remote(ref), 2.0
    elif passed == "inside an argument":
        result, factor = on(lab, node, ray.remote(twice_inside)).remote([ref]), 2.0
    else:
        doubled = on(lab, node, clamor.remote(twice)).remote(ref)
        result = on(lab, node, ray.remote(plus_newest)).remote(doubled, [ref])
        factor = 3.0
        del doubled
    ready, _ = ray.wait([result], timeout=TASK_S, fetch_local=False)
    assert ready
    where = ray.experimental.get_object_locations([result])[result]["node_ids"]
    assert where == [lab.node_ids[node]]  # nowhere else
    change(ref, 2.0)
    lab.kill_node(node)
    change(ref, 3.0)
    assert ref.version == 3
    again = ray.get(result, timeout=TASK_S)
    assert again[-1] != lost  # it ran again, elsewhere
    np.testing.assert_array_equal(again[:-1], of(factor, 1.0))
    # New tasks see the newest.
    newest = ray.get(on(lab, 1, clamor.remote(twice)).remote(ref), timeout=TASK_S)
    np.testing.assert_array_equal(newest[:-1], of(2.0, 3.0))
    clamor.free(ref)
