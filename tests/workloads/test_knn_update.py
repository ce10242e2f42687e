"""The workload of listing 3: a k-d tree that changes in place, and runs over a cluster."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamor_ray.workloads import knn_update as workload
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import places
from clamor_ray.workloads.models import kdtree, nearest
from clamor_ray.workloads.models.kdtree import WrongDistances
from tests.conftest import ClamorCluster

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plain_nearest(points: dict[int, Any], queries: Any) -> tuple[list[float], list[int]]:
    """Each query against each point."""
    distances, ids = [], []
    for query in queries:
        best = min(
            ((float(((point - query) ** 2).sum()), number) for number, point in points.items()),
            default=(np.inf, -1),
        )
        distances.append(best[0] ** 0.5)
        ids.append(best[1])
    return distances, ids


# ---------------------------------------------------------------- the tree


@PATIENT
@given(
    st.integers(0, 1500),
    st.sampled_from([2, 5, 1000]),
    st.integers(0, 2**32),
    st.integers(0, 40),
)
def test_answers_are_brute_force_after_any_changes(
    n: int, grid: int, seed: int, n_changes: int
) -> None:
    """On a coarse grid most points are on a plane or on each other."""
    rng = np.random.default_rng(seed)
    # A leaf has slots for so many in one place.
    points = rng.integers(0, grid, (min(n, 90) if grid == 2 else n, 3)).astype(float)
    tree = kdtree.build(points)
    model = dict(enumerate(points))
    for _ in range(min(n_changes, len(points))):
        number = int(rng.choice(list(model)))
        kdtree.erase(tree, model.pop(number), number)
        if rng.random() < 0.7:
            model[number] = rng.integers(0, grid, 3).astype(float)
            kdtree.insert(tree, model[number], number)
    queries = np.concatenate([rng.random((20, 3)) * grid, rng.integers(0, grid, (20, 3))])
    distances, ids = kdtree.query(tree, queries)
    want_distances, want_ids = plain_nearest(model, queries)
    np.testing.assert_allclose(distances, want_distances)
    assert ids.tolist() == want_ids


def test_it_finds_what_scipy_finds() -> None:
    from scipy.spatial import cKDTree

    points = nearest.unit_vectors(*places.generate_coordinates(30_000, 1))
    queries = nearest.unit_vectors(*places.generate_queries(10_000, 1))
    distances, ids = kdtree.query(kdtree.build(points), queries)
    want, rows = cKDTree(points).query(queries)
    np.testing.assert_allclose(distances, want)
    assert np.array_equal(ids, rows)


def test_a_leaf_is_a_block_and_a_move_changes_two() -> None:
    points = np.random.default_rng(1).random((20_000, 3))
    tree = kdtree.build(points)
    assert tree.leaves[0].nbytes == 4096
    before = tree.leaves.copy()
    kdtree.erase(tree, points[17], 17)
    kdtree.insert(tree, 1.0 - points[17], 17)
    old = dataclasses.replace(tree, leaves=before)
    assert workload.changed(old, tree) == 2
    assert workload.changed(tree, tree) == 0


def test_what_cannot_be_done_is_said() -> None:
    points = np.random.default_rng(1).random((500, 3))
    tree = kdtree.build(points)
    with pytest.raises(kdtree.NoSuchPoint, match="point 4 is not at"):
        kdtree.erase(tree, points[3], 4)
    kdtree.erase(tree, points[3], 3)
    with pytest.raises(kdtree.NoSuchPoint, match="point 3 is not at"):
        kdtree.erase(tree, points[3], 3)

    def fill() -> None:
        for number in range(500, 700):
            kdtree.insert(tree, points[3], number)

    with pytest.raises(kdtree.LeafFull, match="128 points already, there is no slot for point"):
        fill()


def test_an_empty_tree_has_nothing_near() -> None:
    distances, ids = kdtree.query(kdtree.build(np.empty((0, 3))), np.zeros((2, 3)))
    assert distances.tolist() == [np.inf, np.inf]
    assert ids.tolist() == [-1, -1]
    none = kdtree.query(kdtree.build(np.eye(3)), np.empty((0, 3)))
    assert [len(each) for each in none] == [0, 0]


def test_the_nearer_of_two_is_named() -> None:
    old, new = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.5, 4.0])
    assert kdtree.nearer((old, new)).tolist() == [0, 1, 0]


# ---------------------------------------------------------------- generating and checking


def test_places_move_to_queries() -> None:
    job = workload.TreeUpdateJob(5000, 300, n_moved=7)
    world = workload.generate(job)
    assert len(np.unique(world.moved)) == 7
    still = np.setdiff1d(np.arange(5000), world.moved)
    for old, new in zip(world.old, world.new, strict=True):
        assert np.array_equal(old[still], new[still])
    points = nearest.unit_vectors(*(each[world.moved] for each in world.new))
    queries = nearest.unit_vectors(*world.queries)
    gaps = ((points[:, None] - queries) ** 2).sum(axis=2).min(axis=1) ** 0.5
    assert kdtree.metres(gaps).max() < 100


def answers(job: workload.TreeUpdateJob) -> tuple[workload.World, Any, Any, Any]:
    world = workload.generate(job)
    queries = nearest.unit_vectors(*world.queries)
    tree = kdtree.build(nearest.unit_vectors(*world.old))
    old = kdtree.lookup(queries, tree)
    new = kdtree.lookup(queries, kdtree.build(nearest.unit_vectors(*world.new)))
    return world, old, new, kdtree.nearer((old, new))


def test_wrong_answers_are_noticed() -> None:
    job = workload.TreeUpdateJob(3000, 200, n_moved=5, sample=200)
    world, old, new, preferences = answers(job)
    assert preferences.sum() >= 5
    assert workload.check(world, old, new, preferences, job) == 400
    # Answers of the wrong version: right distances, of another tree.
    with pytest.raises(WrongDistances, match="before the move: query"):
        workload.check(world, new, new, preferences, job)
    with pytest.raises(WrongDistances, match="after the move: query"):
        workload.check(world, old, old, preferences, job)
    with pytest.raises(WrongDistances, match="prefers tree 0"):
        workload.check(world, old, new, preferences * 0, job)
    with pytest.raises(WrongDistances, match="199 preferences, 200 queries"):
        workload.check(world, old, new, preferences[1:], job)
    with pytest.raises(WrongDistances, match="199 distances, 200 queries"):
        workload.check(world, old[1:], new, preferences, job)


# ------------------------------------------------------------- command line


def test_only_a_cluster_of_its_own_loses_a_node(
    attached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(workload.main, ["--demo", "--kill"])
    assert result.exit_code == 2, result.output
    assert "starts itself" in result.output


def test_a_full_leaf_asks_for_fewer_moves(attached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise kdtree.LeafFull("leaf 3 is full")

    monkeypatch.setattr(workload, "run", run)
    result = CliRunner().invoke(workload.main, ["--demo"])
    assert result.exit_code == 2, result.output
    assert "error: leaf 3 is full; or take fewer --moved" in result.output


def test_the_result_says_what_was_found(attached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    preferences = np.array([0, 1, 0, 1, 0])
    outcome = workload.TreeUpdateOutcome(
        preferences, 8 << 20, 2, 136, "abcdef0123456789", (4, 3), 15.25
    )
    monkeypatch.setattr(workload, "run", lambda *_: outcome)
    result = CliRunner().invoke(workload.main, ["--demo"])
    assert result.exit_code == 0, result.output
    assert "136 answers equal brute force" in result.output
    assert "changed 2 blocks of 8.0 MiB; 2 of 5 queries have a nearer place" in result.output
    assert "Node abcdef01 was killed after the move: 4 partitions were looked up" in result.output
    assert "as it was and 3 in the tree as it is, within 15.2 s" in result.output


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> workload.TreeUpdateJob:
    return workload.TreeUpdateJob(
        **{"n_places": 20_000, "n_queries": 5000, "n_moved": 3, "n_partitions": 4, **options}
    )


def test_the_listing_on_two_nodes(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    outcome = workload.run(job(), None, stages)
    assert outcome.preferences.sum() >= 3
    assert 1 < outcome.changed_blocks <= 6
    assert outcome.killed is None
    assert outcome.compared >= 128


def test_answers_of_one_version_only_are_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    """As if the second look-up saw the tree as it was before."""
    monkeypatch.setattr(workload, "move", lambda ref, world: None)
    with pytest.raises(WrongDistances, match="after the move: query"):
        workload.run(job(n_queries=1000, sample=1000), None, stages)


@pytest.mark.lab
def test_a_node_that_dies_after_the_move_changes_nothing() -> None:
    """What it had is looked up again in both versions of the tree, and all of it is checked."""
    # Ray is to notice it within seconds.
    health = {f"RAY_health_check_{name}_ms": "500" for name in ("period", "initial_delay")}
    environment = {**os.environ, "COLUMNS": "100", **health}
    environment.pop("RAY_ADDRESS", None)
    command = [
        *(sys.executable, "-m", "clamor_ray.workloads.knn_update", "--demo", "--kill"),
        *("--places", "20000", "--queries", "300000", "--moved", "5", "--partitions", "12"),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers equal brute force" in done.stdout
    found = re.search(r"(\d+) partitions were looked up again .* and (\d+) in", done.stdout)
    assert found, done.stdout
    # Results of 200 KB are objects of the node that made them: some were there, and not all.
    assert 0 < int(found[1]) < 12
    assert 0 < int(found[2]) < 12
