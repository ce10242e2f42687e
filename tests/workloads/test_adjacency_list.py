"""The adjacency list workload: the generator, the lists, the checker, and runs over a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clamor_ray as clamor
from clamor_ray.workloads import adjacency_list as workload
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import adjacency
from clamor_ray.workloads.data.adjacency import Edges, WrongLists
from clamor_ray.workloads.data.places import InputError
from tests.conftest import ClamorCluster


def batch_of(edges: list[tuple[int, int]]) -> adjacency.Batch:
    ends = np.array(edges, np.int64).reshape(-1, 2)
    return {"source": ends[:, 0], "target": ends[:, 1]}


# ---------------------------------------------------------------- generating


def test_partitions_have_all_edges() -> None:
    edges = Edges(1000, 10_001, 4)
    parts = [edges.partition(i) for i in range(4)]
    assert sum(len(part["source"]) for part in parts) == 10_001
    for part in parts:
        for ends in part.values():
            assert ends.dtype == np.int64
            assert ends.min() >= 0
            assert ends.max() < 1000
    both = adjacency.generate(np.array([2, 3]), edges)
    np.testing.assert_array_equal(
        both["target"], np.concatenate([parts[2]["target"], parts[3]["target"]])
    )
    assert len(adjacency.generate(np.empty(0, np.int64), edges)["source"]) == 0


def test_a_partition_is_its_seed_and_number() -> None:
    one, two = (Edges(1000, 1000, 2).partition(0)["source"] for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, Edges(1000, 1000, 2).partition(1)["source"])
    assert not np.array_equal(one, Edges(1000, 1000, 2, seed=2).partition(0)["source"])


@pytest.mark.parametrize("exponent", [2.1, 3.0])
def test_degrees_follow_the_power_law(exponent: float) -> None:
    """The number of vertices of at least degree k falls as k ** (1 - exponent)."""
    part = Edges(1 << 17, 1 << 21, 1, exponent).partition(0)
    for ends in part.values():
        degrees = np.bincount(ends)
        k = np.array([60, 120, 240, 480])
        slope = np.polyfit(np.log(k), np.log([(degrees >= each).sum() for each in k]), 1)[0]
        assert slope == pytest.approx(1.0 - exponent, rel=0.1)


def hubs_first(batch: adjacency.Batch, end: str) -> int:
    return int(np.bincount(batch[end]).argmax())


def test_hubs_of_the_two_ends_are_others() -> None:
    part = Edges(10_000, 100_000, 1).partition(0)
    hubs = [set(np.argsort(-np.bincount(ends))[:20].tolist()) for ends in part.values()]
    assert len(hubs[0] & hubs[1]) <= 2
    assert hubs_first(part, "source") != hubs_first(part, "target")


# ---------------------------------------------------------------- lists


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_lists_are_those_of_the_reference(edges: list[tuple[int, int]]) -> None:
    batch = batch_of(edges)
    for by, other in workload.DIRECTIONS.values():
        table = adjacency.lists_of(batch, by, other)
        expected = adjacency.reference([batch], by, other)
        adjacency.check(by, table, expected)
        assert sum(map(len, expected.values())) == len(edges)
    forward = adjacency.reference([batch], "source", "target")
    assert all((v, w) in edges for v, neighbours in forward.items() for w in neighbours)


@pytest.mark.parametrize(
    ("vertices", "lists", "message"),
    [
        ([1, 2], [[5, 5], [7]], "vertex 1 has 2 neighbours"),
        ([1, 2], [[6, 5], [7]], "vertex 1 has 2 neighbours"),
        ([2, 1], [[7], [5, 6]], "not in the order"),
        ([1], [[5, 6]], "vertex 2 has edges but no list"),
        ([1, 2, 3], [[5, 6], [7], [8]], "vertex 3 has a list but no edge"),
        ([1, 1, 2], [[5], [6], [7]], "more than one list"),
    ],
)
def test_wrong_lists_are_noticed(vertices: Any, lists: Any, message: str) -> None:
    expected = {1: [5, 6], 2: [7]}
    right = pa.table({"vertex": [1, 2], "neighbours": [[5, 6], [7]]})
    adjacency.check("forward", right, expected)
    with pytest.raises(WrongLists, match=f"forward: .*{message}"):
        adjacency.check("forward", pa.table({"vertex": vertices, "neighbours": lists}), expected)


def test_what_is_said_of_lists() -> None:
    table = adjacency.lists_of(batch_of([(4, 1), (9, 2), (9, 1)]), "source", "target")
    line = workload.describe("forward", 0.5, table)
    assert line == workload.Direction("forward", 0.5, 2, 3, 2, 9)


# ------------------------------------------------------------- command line


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> workload.AdjacencyJob:
    edges = Edges(2000, 20_000, 4)
    return workload.AdjacencyJob(**{"edges": edges, "check": True, **options})


def test_lists_on_two_nodes(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    forward, reverse = workload.run(job(), stages)
    assert (forward.name, reverse.name) == ("forward", "reverse")
    assert forward.n_edges == reverse.n_edges == 20_000
    assert forward.hub != reverse.hub
    assert forward.longest > 100


@pytest.mark.parametrize(
    "edges",
    [[(5, 5)], [(1, n) for n in range(50)], [(n, 1) for n in range(50)], [(2, 3)] * 40],
)
def test_lists_of_edges_that_are_read(
    clamor_cluster: ClamorCluster, tmp_path: Path, edges: list[tuple[int, int]], stages: Stages
) -> None:
    """One hub, one edge many times: fewer vertices than partitions."""
    batch = batch_of(edges)
    pq.write_table(pa.table({**batch, "weight": batch["source"]}), tmp_path / "edges.parquet")
    out = tmp_path / "lists"
    read = job(edges=None, data=str(tmp_path / "edges.parquet"), n_partitions=3, out=str(out))
    workload.run(read, stages)
    for name, (by, other) in workload.DIRECTIONS.items():
        table = pq.read_table(out / name)
        adjacency.check(name, table, adjacency.reference([batch], by, other))


def test_a_wrong_list_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    """Reverse lists made of sources."""
    real = workload.lists
    monkeypatch.setattr(workload, "lists", lambda edges, by, other: real(edges, "source", "target"))
    with pytest.raises(WrongLists, match="reverse: "):
        workload.run(job(), stages)


def test_no_edges_and_no_columns_are_errors(
    clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages
) -> None:
    path = tmp_path / "edges.parquet"
    pq.write_table(pa.table(batch_of([])), path)
    with pytest.raises(InputError, match="has no edges"):
        workload.run(job(edges=None, data=str(path)), stages)
    pq.write_table(pa.table({"source": [1], "destination": [2]}), path)
    with pytest.raises(clamor.errors.MissingColumnError, match="target"):
        workload.run(job(edges=None, data=str(path)), stages)
