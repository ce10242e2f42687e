"""What `ray_nodes.py` and `ray_state.py` take from Ray's own tables, asked of a real cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clamor_ray as clamor
from clamor_ray._protocol import ray_state
from clamor_ray.actors.moves import ray_nodes
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

TASK_S = 90.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def on(index: int, actor: Any) -> Any:
    import ray

    return ray.remote(actor).options(num_cpus=0, resources={node_resource(index): 0.01})


def test_the_cluster_that_was_started_last_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import utils

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_state.noted_address() == ""
    (tmp_path / "ray").mkdir()
    utils.write_ray_address("127.0.0.1:6399")  # as `ray start --head` does
    assert ray_state.noted_address() == "127.0.0.1:6399"


def test_a_cluster_that_others_have_started_goes_on(lab: LocalCluster) -> None:
    assert not ray_state.cluster_ends_with_process()


def drain_node(node_id: str, deadline_ms: int) -> bool:
    """As a cluster manager does where a machine is taken away."""
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, _ = gcs.drain_node(node_id, reason, "a test", deadline_ms)
    return bool(accepted)


def test_our_own_actors_are_no_use_of_a_node(lab: LocalCluster) -> None:
    import ray

    refs = [clamor.put(b"x" * 10**6)]
    ray.get(on(1, lambda refs: refs[0].get()[0]).remote(refs), timeout=TASK_S)
    assert lab.page_server(1) is not None
    until(lambda: ray_nodes.nodes_in_use() == set(), TASK_S)


def test_what_others_run_is(lab: LocalCluster) -> None:
    import ray

    class Sleeper:
        def ping(self) -> int:
            return 1

    _, two, three = lab.node_ids
    # Without any resource after its start.
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(two, soft=False)
    actor = ray.remote(Sleeper).options(num_cpus=0, scheduling_strategy=there).remote()
    assert ray.get(actor.ping.remote(), timeout=TASK_S) == 1
    assert two in ray_nodes.nodes_in_use()
    ray.kill(actor)
    until(lambda: two not in ray_nodes.nodes_in_use(), TASK_S)
    task = ray.remote(_sleep).options(num_cpus=1, resources={node_resource(2): 0.01}).remote(60)
    until(lambda: three in ray_nodes.nodes_in_use(), TASK_S)
    ray.cancel(task, force=True)
    until(lambda: ray_nodes.nodes_in_use() == set(), TASK_S)


def test_nobody_scales_this_cluster(lab: LocalCluster) -> None:
    assert not ray_nodes.is_autoscaled()


def test_a_node_that_ray_drains_is_named_with_its_deadline(lab: LocalCluster) -> None:
    """The last test: the nodes go."""
    assert ray_nodes.draining_nodes() == {}
    deadline_s = time.time() + 600.0
    hold = on(1, _Holder).remote()  # else the node goes at once
    import ray

    ray.get(hold.ping.remote(), timeout=TASK_S)
    assert drain_node(lab.node_ids[1], int(deadline_s * 1000))
    until(lambda: lab.node_ids[1] in ray_nodes.draining_nodes(), TASK_S)
    assert abs(ray_nodes.draining_nodes()[lab.node_ids[1]] - deadline_s) < 1.0
    hold_two = on(2, _Holder).remote()
    ray.get(hold_two.ping.remote(), timeout=TASK_S)
    assert drain_node(lab.node_ids[2], 0)
    until(lambda: lab.node_ids[2] in ray_nodes.draining_nodes(), TASK_S)
    assert ray_nodes.draining_nodes()[lab.node_ids[2]] == math.inf


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


class _Holder:
    def ping(self) -> int:
        return 1


def test_nobody_asks_the_autoscaler_for_nodes() -> None:
    """`request_resources` is one demand for the whole cluster: a library's would end the user's."""
    folders = [ROOT / name for name in ("clamor_ray", "actors", "workloads")]
    product = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(product) > 100
    assert [path for path in product if "request_resources" in path.read_text()] == []
