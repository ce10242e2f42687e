"""Replayed read sets on two nodes: by counters of the node that reads, never by time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from tests.conftest import ANSWER_S, ClamorCluster, until
from tests.lab.cluster import node_resource

pytestmark = pytest.mark.lab

OTHER_NODE: dict[str, Any] = {"num_cpus": 0, "resources": {node_resource(1): 0.001}}
N_BLOCKS, PARTS = 8192, 4
PER_BLOCK = 512


def answer(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=ANSWER_S)


@pytest.fixture(scope="module", autouse=True)
def page_servers(clamor_cluster: ClamorCluster) -> None:
    clamor_cluster.run(lambda: clamor.init().trap)


@pytest.fixture
def ref(clamor_cluster: ClamorCluster) -> Iterator[Any]:
    ref = clamor.put(np.arange(N_BLOCKS * PER_BLOCK).reshape(N_BLOCKS, PER_BLOCK))
    yield ref
    clamor.free(ref)


def change_all(ref: Any) -> None:
    with clamor.update(ref) as x:
        x[:, 0] += 1


def places(part: int) -> Any:
    """60 blocks that no other part touches, far from each other."""
    return np.random.default_rng(0).permutation(N_BLOCKS // 16)[60 * part : 60 * (part + 1)] * 16


def total(ref: Any) -> int:
    table = ref.get()
    return sum(int(table[places(part), 0].sum()) for part in range(PARTS))


@clamor.remote(**OTHER_NODE)
def step(table: Any, part: int) -> int:
    return int(table[places(part), 0].sum())


def stage(task: Any, *arguments: Any) -> int:
    """All parts, one after the other: what each of them found depends on nothing else."""
    return sum(answer(task.remote(*arguments, part)) for part in range(PARTS))


def test_the_second_stage_does_not_fault(clamor_cluster: ClamorCluster, ref: Any) -> None:
    begin, noted = clamor_cluster.engine(1), clamor.stats().replay.noted
    assert stage(step, ref) == total(ref)
    first = clamor_cluster.engine(1)
    faults = first.faults - begin.faults
    assert faults >= 0.9 * PARTS * 60
    assert clamor.stats().replay.asked == 0 or not ref.version
    until(lambda: clamor.stats().replay.noted >= noted + PARTS)  # nobody has waited for that
    change_all(ref)
    before = clamor_cluster.engine(1)
    assert stage(step, ref) == total(ref)
    second = clamor_cluster.engine(1)
    assert second.faults - before.faults < 0.1 * faults
    # All that it needed came, and little else.
    fetched = second.blocks_fetched - before.blocks_fetched
    assert 0.9 * PARTS * 60 <= fetched <= 1.3 * PARTS * 60
