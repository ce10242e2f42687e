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


@pytest.fixture(params=[1, 2], ids=["autoscaler v1", "autoscaler v2"])
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


def put_there(n: int) -> tuple[str, list[Any]]:
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    return node_id, [clamor.put(np.full(WORDS, i)) for i in range(n)]


def sums(refs: list[Any]) -> tuple[str, list[int]]:
    import ray

    return ray.get_runtime_context().get_node_id(), [int(ref.get().sum()) for ref in refs]


def test_nodes_come_and_go_and_nothing_is_lost(cluster: None) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    assert alive() == {here}
    on_cpu = ray.remote(num_cpus=1)
    refs: list[Any] = []
    nodes: set[str] = set()
    for turn in range(2):
        node_id, made = ray.get(on_cpu(put_there).remote(10), timeout=UP_S)
        refs += made
        assert node_id not in nodes
        nodes.add(node_id)
        until(ray_nodes.is_autoscaled, UP_S)  # says Ray, once it has a node
        where, found = ray.get(on_cpu(sums).remote(refs), timeout=UP_S)
        assert where == node_id
        assert found == [i * WORDS for i in range(10)] * (turn + 1)
        with clamor.update(made[3]) as array:
            array[:] = 3
        until(lambda: alive() == {here}, DOWN_S)  # Ray has removed it, not we
        assert [node.node_id for node in clamor.stats().nodes] == [here]
        assert sums(refs)[1] == [i * WORDS for i in range(10)] * (turn + 1)
    assert clamor.stats().moves.finished >= 20
    assert clamor.stats().moves.left == 2
