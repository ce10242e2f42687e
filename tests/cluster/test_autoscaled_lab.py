"""Ray's autoscaler adds nodes and removes them again, and every byte is read after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray.actors.moves import ray_nodes
from tests.conftest import until
from tests.support.lab import require_lab
from tests.support.lab.autoscaled import autoscaled_cluster

pytestmark = [pytest.mark.lab, pytest.mark.slow]

UP_S = 120.0
DOWN_S = 120.0
IDLE_NODE_S = 2.0
WORDS = 10**5
SPREAD_WORDS = 2 * 10**6  # several pieces, of which this node and the new one have some


@pytest.fixture(
    params=[pytest.param(1, marks=pytest.mark.soak), 2], ids=["autoscaler v1", "autoscaler v2"]
)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require_lab("local")
    monkeypatch.setenv("CLAMOR_IDLE_NODE_S", str(IDLE_NODE_S))
    with (
        tempfile.TemporaryDirectory(prefix="cl-as-", ignore_cleanup_errors=True) as directory,
        autoscaled_cluster(request.param, Path(directory)),
    ):
        clamor.init()
        yield


def alive() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def put_there(n: int) -> tuple[str, list[Any], Any]:
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    made = [clamor.put(np.full(WORDS, i)) for i in range(n)]
    return node_id, made, clamor.put(np.arange(SPREAD_WORDS), home="spread")


def sums(refs: list[Any]) -> tuple[str, list[int]]:
    import ray

    return ray.get_runtime_context().get_node_id(), [int(ref.get().sum()) for ref in refs]


def are_right(spread: list[Any]) -> list[bool]:
    """Every byte of all of them."""
    return [np.array_equal(ref.get(), np.arange(SPREAD_WORDS)) for ref in spread]


def homes_of(ref: Any) -> set[str]:
    return {node_id for node_id, entry in clamor.stats().region(ref).items() if entry.is_home}


def test_nodes_come_and_go_and_nothing_is_lost(cluster: None) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    assert alive() == {here}
    on_cpu = ray.remote(num_cpus=1)
    refs: list[Any] = []
    spread: list[Any] = []
    nodes: set[str] = set()
    for turn in range(2):
        node_id, made, pieces = ray.get(on_cpu(put_there).remote(10), timeout=UP_S)
        refs += made
        spread.append(pieces)
        assert homes_of(pieces) == {here, node_id}
        assert node_id not in nodes
        nodes.add(node_id)
        until(ray_nodes.is_autoscaled, UP_S)  # says Ray, once it has a node
        where, found = ray.get(on_cpu(sums).remote(refs), timeout=UP_S)
        assert where == node_id
        assert found == [i * WORDS for i in range(10)] * (turn + 1)
        assert all(ray.get(on_cpu(are_right).remote(spread), timeout=UP_S))
        with clamor.update(made[3]) as array:
            array[:] = 3
        until(lambda: alive() == {here}, DOWN_S)  # Ray has removed it, not we
        assert [node.node_id for node in clamor.stats().nodes] == [here]
        assert sums(refs)[1] == [i * WORDS for i in range(10)] * (turn + 1)
        assert homes_of(pieces) == {here}
        assert all(are_right(spread))
    assert clamor.stats().moves.finished >= 20
    assert clamor.stats().moves.left == 2
