"""What Ray computes again it computes from what the task first saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import clamor_ray as clamor
from clamor_ray._session.process_sessions import current
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource

pytestmark = [pytest.mark.lab, pytest.mark.slow]

N = 1 << 18  # float64: 2 MiB, so that a result lives in the object store of its node
TASK_S = 120.0
Array = npt.NDArray[np.float64]


LITTLE = {"CLAMOR_HISTORY_BYTES": str(3 << 20), "CLAMOR_HISTORY_DISK_BYTES": "0"}


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        yield lab


@pytest.fixture(scope="module")
def session(lab: LocalCluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """One of the cluster's sessions, with such settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in request.param.items():
            patch.setenv(name, value)
        clamor.init()
        try:
            yield
        finally:
            clamor.shutdown()


usual = pytest.mark.parametrize("session", [{}], indirect=True, scope="module")
with_little_history = pytest.mark.parametrize("session", [LITTLE], indirect=True, scope="module")


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


@with_little_history
@pytest.mark.usefixtures("session")
def test_a_version_that_is_kept_no_longer(lab: LocalCluster) -> None:
    """The task then fails with that, and never reads a newer one."""
    import ray

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
    clamor.free(ref)


@with_little_history
@pytest.mark.usefixtures("session")
def test_a_held_reference_asks_whether_its_version_is_kept(lab: LocalCluster) -> None:
    import ray

    ref = clamor.put(np.zeros(N))
    held = ref._thawed()
    assert held.at(0).get()[17] == 0
    for value in range(1, 7):
        change(ref, float(value))

    @ray.remote(num_cpus=0)
    def at_its_own(refs: list[clamor.GlobalRef[Array]]) -> str:
        try:
            return repr(refs[0].at(refs[0].version))
        except clamor.errors.SnapshotExpired as error:
            return str(error)

    with pytest.raises(clamor.errors.SnapshotExpired, match="version 0 of variable"):
        held.at(0)
    task = at_its_own.options(resources={node_resource(1): 0.01}).remote([held])
    assert "are kept no longer" in ray.get(task, timeout=TASK_S)
    assert ref.at(6).get()[17] == -6
    clamor.free(ref)


@with_little_history
@pytest.mark.usefixtures("session")
def test_a_version_that_must_stay(lab: LocalCluster) -> None:
    """Others make room for it, and the task gets what it saw first; no longer than it must."""
    import ray

    ref, other = clamor.put(np.zeros(N)), clamor.put(np.zeros(N // 8))
    change(ref, 1.0)
    old = ref.snapshot()
    server = lab.page_server(0, current().scope)

    def engine() -> dict[str, int]:
        found: dict[str, int] = ray.get(server.stats.remote(), timeout=TASK_S).engine
        return found

    before = engine()
    ray.get(server.retain.remote({ref._region: 1}), timeout=TASK_S)
    result = start_and_lose(lab, ref)
    change(ref, 2.0)
    for value in range(1, 30):  # each replaces 256 KiB
        change(other, float(value))
    assert np.array_equal(ray.get(result, timeout=TASK_S)[:-1], of(2, 1.0))
    after = engine()
    assert after["history_retained_bytes"] >= 2 << 20
    assert after["history_expired"] > before["history_expired"] + 10
    assert after["history_retained_expired"] == 0
    ray.get(server.retain.remote({ref._region: None}), timeout=TASK_S)

    def is_gone() -> bool:
        change(other, 1.0)
        try:
            old.get()
        except clamor.errors.SnapshotExpired as error:
            return "kept no longer" in str(error)
        return False

    # The worker that computed it again keeps its mapping for a moment.
    until(is_gone)
    for each in (ref, other):
        clamor.free(each)


@usual
@pytest.mark.usefixtures("session")
def test_a_lost_result_is_computed_from_its_version(lab: LocalCluster) -> None:
    """As an argument, inside one, and through another task."""
    import ray

    ref = clamor.put(np.zeros(N))
    change(ref, 1.0)
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    lost = float(int(lab.node_ids[node][:12], 16))
    # At version 1.
    argument = on(lab, node, clamor.remote(twice)).remote(ref)
    inside = on(lab, node, ray.remote(twice_inside)).remote([ref])
    doubled = on(lab, node, clamor.remote(twice)).remote(ref)
    through = on(lab, node, ray.remote(plus_newest)).remote(doubled, [ref])
    results = {argument: 2.0, inside: 2.0, through: 3.0}
    ray.wait(list(results), num_returns=len(results), timeout=TASK_S, fetch_local=False)
    del doubled
    found = ray.experimental.get_object_locations(list(results))
    # Nowhere else.
    assert [at["node_ids"] for at in found.values()] == [[lab.node_ids[node]]] * len(results)
    change(ref, 2.0)
    lab.kill_node(node)
    change(ref, 3.0)
    assert ref.version == 3
    for result, factor in results.items():
        again = ray.get(result, timeout=TASK_S)
        assert again[-1] != lost  # it ran again, elsewhere
        np.testing.assert_array_equal(again[:-1], of(factor, 1.0))
    # New tasks see the newest.
    newest = ray.get(on(lab, 1, clamor.remote(twice)).remote(ref), timeout=TASK_S)
    np.testing.assert_array_equal(newest[:-1], of(2.0, 3.0))
    clamor.free(ref)
