"""Variables with redundancy: nodes are lost, and every byte of every version is read after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.cluster.test_moves_lab import on
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.filterwarnings("default::clamor_ray.errors.LostBlocksWarning"),
]

N = 2_500_000  # of 8 bytes: 20 MB, pieces of 2 MiB
REPAIRED_S = 90.0


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        try:
            yield lab
        finally:
            clamor.shutdown()


@pytest.fixture
def victim(lab: LocalCluster) -> int:
    """A node that is there to be killed."""
    return lab.add_node(num_cpus=1, object_store_memory=150 << 20)


def read_all(ref: Any) -> Any:
    return np.array(ref.get())


def change(ref: Any, rows: Any, value: int) -> int:
    with clamor.update(ref) as array:
        array[rows] = value
    return int(ref.version)


class Model:
    """A variable, and what each version of it must be."""

    def __init__(self, seed: int, **level: Any) -> None:
        self.rng = np.random.default_rng(seed)
        content = self.rng.integers(0, 1 << 62, N)
        self.versions = [content]
        self.ref = clamor.put(content, **level)

    def commit(self, on_node: int | None = None) -> None:
        begin = int(self.rng.integers(0, N - 300_000))
        rows = np.unique([*range(begin, begin + 3000), *self.rng.integers(0, N, 40)])
        value = len(self.versions)
        content = self.versions[-1].copy()
        content[rows] = value
        if on_node is None:
            change(self.ref, rows, value)
        else:
            on(on_node, change, self.ref, rows, value)
            self.ref.refresh()
        self.versions.append(content)
        assert self.ref.version == len(self.versions) - 1

    def check(self, on_node: int | None = None) -> None:
        newest = self.ref.at()
        found = read_all(newest) if on_node is None else on(on_node, read_all, newest)
        assert np.array_equal(found, self.versions[-1])

    def check_old(self) -> None:
        for version, content in enumerate(self.versions):
            assert np.array_equal(read_all(self.ref.at(version)), content), version


LEVELS = (
    {"redundancy": "raid1"},
    {"redundancy": "raid1", "copies": 3},
    {"redundancy": "raid4"},
    {"redundancy": "raid5"},
)


def server_of(lab: LocalCluster, index: int) -> str:
    node_id: str = lab.node_ids[index]
    return node_id


def wait_until_repaired() -> float:
    began_s = time.monotonic()
    until(lambda: clamor.stats().degraded == 0, REPAIRED_S)
    return time.monotonic() - began_s


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_a_node_is_lost(lab: LocalCluster, victim: int, level: dict[str, Any]) -> None:
    """With all versions; then another one."""
    model = Model(1, **level)
    for node in (None, 1, victim):
        model.commit(node)
    model.check(1)
    assert clamor.stats().degraded == 0
    spare = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    on(spare, read_all, clamor.put(np.ones(1000)))  # it has a page server
    lab.kill_node(victim)
    model.check()
    model.commit()
    wait_until_repaired()
    model.check_old()
    model.check(2)
    model.commit(1)
    lab.kill_node(spare)
    model.check(2)
    model.commit(2)
    model.check_old()
    model.ref.free()


def test_levels_that_need_more_nodes(lab: LocalCluster) -> None:
    with pytest.raises(errors.TooFewNodesError, match="needs 9 nodes that take variables; there"):
        clamor.put(np.ones(N), redundancy="raid1", copies=9)
    with pytest.raises(ValueError, match="redundancy is one of"):
        clamor.put(np.ones(N), redundancy="raid6")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copies is for"):
        clamor.put(np.ones(N), redundancy="raid5", copies=3)
