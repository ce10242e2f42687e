"""A home's node dies just after it has pulled a commit's blocks: its writer's node has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import OBJECT_STORE_BYTES, node_resource
from tests.support.processes import stop

pytestmark = pytest.mark.lab

CACHE_BYTES = 1 << 20  # a node retains a quarter of it, of what homes have acknowledged
N_WORDS = 1 << 18  # 2 MiB: more than that
TASK_S = 90.0


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init(cache_bytes=CACHE_BYTES)
        yield lab


@pytest.fixture
def node(lab: LocalCluster) -> int:
    """One that is not the driver's, and may be killed."""
    others = lab.alive()[1:]
    return others[0] if others else lab.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)


def make_zeros() -> Any:
    return clamor.zeros(N_WORDS, np.int64)


def put_on(index: int) -> Any:
    import ray

    options = {"num_cpus": 0, "resources": {node_resource(index): 0.01}}
    return ray.get(ray.remote(make_zeros).options(**options).remote(), timeout=TASK_S)


def retained_here() -> int:
    return sum(node.engine.retained_layers for node in clamor.stats().nodes)


def test_an_answered_commit_outlives_its_home(lab: LocalCluster, node: int) -> None:
    expected = np.random.default_rng(7).integers(1, 1 << 62, N_WORDS)
    ref = put_on(node)
    home_pid = lab.page_server_pid(node)
    with clamor.update(ref) as array:
        array[...] = expected
    stop(home_pid)  # before the registry tells it what the commit became
    lab.kill_node(node)
    clamor.prefetch(ref.refresh())  # which raises where blocks are lost; a touch ends the process
    got = ref.get()
    assert np.array_equal(got, expected)
    del got
    # What goes on is on a home of this node: nothing is retained beside it.
    with clamor.update(ref) as array:
        array[0] = 5
    assert int(ref.refresh().get()[0]) == 5
    until(lambda: retained_here() == 0)
    clamor.free(ref)


def test_what_its_home_has_goes_beyond_the_bound(node: int) -> None:
    ref = put_on(node)
    with clamor.update(ref) as array:
        array[...] = 3
    until(lambda: retained_here() == 0)
    assert int(ref.refresh().get()[-1]) == 3
    clamor.free(ref)
