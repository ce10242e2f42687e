"""The k-means workload: its arithmetic against plain loops, and runs over a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamor_ray.workloads import kmeans as workload
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import clusters
from clamor_ray.workloads.data.clusters import Mixture, WrongCentroids
from clamor_ray.workloads.data.places import InputError
from tests.conftest import ClamorCluster

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plain_sums(points: list[list[float]], centroids: list[list[float]]) -> list[list[float]]:
    """Sums and counts as they are written down, point by point; the first of equals."""
    out = [[0.0] * (len(each) + 1) for each in centroids]
    for point in points:
        squares = [sum((a - b) ** 2 for a, b in zip(point, c, strict=True)) for c in centroids]
        row = out[squares.index(min(squares))]
        for axis, value in enumerate(point):
            row[axis] += value
        row[-1] += 1
    return out


# ---------------------------------------------------------------- generating


def test_partitions_have_all_points_about_evenly() -> None:
    mixture = Mixture(1003, 4)
    sizes = [mixture.size_of(i) for i in range(4)]
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) <= 1
    assert [mixture.partition(i).shape for i in range(4)] == [(n, 10) for n in sizes]


def test_a_partition_is_its_seed_and_number() -> None:
    mixture = Mixture(1000, 4, seed=3)
    np.testing.assert_array_equal(mixture.partition(2), Mixture(1000, 4, seed=3).partition(2))
    assert not np.array_equal(mixture.partition(2), mixture.partition(3))
    assert not np.array_equal(mixture.partition(2), Mixture(1000, 4, seed=4).partition(2))
    both = clusters.generate(np.array([1, 2]), mixture)
    np.testing.assert_array_equal(
        both, np.concatenate([mixture.partition(1), mixture.partition(2)])
    )
    assert clusters.generate(np.empty(0, np.int64), mixture).shape == (0, 10)


def test_points_are_around_the_true_means() -> None:
    mixture = Mixture(50_000, 1, dimensions=3, n_true=5)
    points, means = mixture.partition(0), mixture.means()
    nearest = ((points[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    share = np.bincount(nearest, minlength=5) / len(points)
    assert (share > 0.1).all()
    # About one in each dimension, 3 in all; cut off where another mean is nearer.
    assert 2.0 < clusters.cost([points], means) / len(points) < 3.1


def test_it_begins_at_as_many_different_points_as_asked() -> None:
    for k in (1, 10, 100, 130):
        first = Mixture(1000, 4).first_centroids(k)
        assert first.shape == (k, 10)
        assert len(np.unique(first, axis=0)) == k


def test_what_is_saved_is_what_is_generated(tmp_path: Path) -> None:
    mixture = Mixture(100, 3)
    paths = clusters.save(mixture, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [f"points-0000{i}.npy" for i in range(3)]
    for number, path in enumerate(paths):
        np.testing.assert_array_equal(np.load(path), mixture.partition(number))


# ---------------------------------------------------------------- arithmetic


@PATIENT
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(0, 20))
def test_sums_are_those_of_the_definition(data: st.DataObject, d: int, k: int, n: int) -> None:
    """Small whole numbers: many points are equally near to several centroids, and no rounding."""
    row = st.lists(st.integers(-4, 4).map(float), min_size=d, max_size=d)
    points = data.draw(st.lists(row, min_size=n, max_size=n))
    centroids = data.draw(st.lists(row, min_size=k, max_size=k))
    found = clusters.partial_sums(np.array(points).reshape(n, d), np.array(centroids))
    assert found.shape == (1, k, d + 1)
    assert found[0].tolist() == plain_sums(points, centroids)


def test_sums_of_many_chunks_add_up() -> None:
    mixture = Mixture(10_001, 1)
    points, centroids = mixture.partition(0), mixture.first_centroids(10)
    assert len(points) > 4 * clusters.CHUNK_POINTS
    whole = clusters.partial_sums(points, centroids)
    parts = [clusters.partial_sums(p, centroids) for p in np.array_split(points, 7)]
    np.testing.assert_allclose(whole, sum(parts), rtol=1e-12)
    np.testing.assert_allclose(whole[0, :, :-1].sum(axis=0), points.sum(axis=0))
    assert whole[0, :, -1].sum() == len(points)


def test_a_cluster_without_points_keeps_its_centroid() -> None:
    sums = np.array([[4.0, 6.0, 2.0], [0.0, 0.0, 0.0]])
    new = clusters.new_centroids(sums, np.array([[9.0, 9.0], [7.0, 8.0]]))
    assert new.tolist() == [[2.0, 3.0], [7.0, 8.0]]


def test_iterations_are_those_of_the_reference() -> None:
    mixture = Mixture(5000, 3, n_true=12)
    parts = [mixture.partition(i) for i in range(3)]
    first = centroids = mixture.first_centroids(6)
    costs = []
    for _ in range(8):
        sums = sum(clusters.partial_sums(part, centroids) for part in parts)
        centroids = clusters.new_centroids(sums[0], centroids)
        costs.append(clusters.cost(parts, centroids))
    assert costs == sorted(costs, reverse=True)
    assert clusters.check(centroids, clusters.reference(parts, first, 8)) < 1e-12


@pytest.mark.parametrize("wrong", [1e-5, np.nan])
def test_one_wrong_centroid_is_noticed(wrong: float) -> None:
    centroids = np.arange(12.0).reshape(4, 3)
    assert clusters.check(centroids + 1e-9, centroids) < 1e-8
    found = centroids.copy()
    found[2, 1] += wrong
    with pytest.raises(WrongCentroids, match="1 of 4 centroids; number 2 is"):
        clusters.check(found, centroids)
    with pytest.raises(WrongCentroids, match=r"shape \(3, 3\), not \(4, 3\)"):
        clusters.check(centroids[1:], centroids)


# ------------------------------------------------------------- command line


def test_the_result_says_what_was_found(
    attached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    centroids = np.array([[1.0, 2.0], [3.0, 4.0]])
    lines = [
        workload.LloydIteration(1, 0.5, 0.0123, 0.25, centroids * 0),
        workload.LloydIteration(2, 0.25, 0.01, 1e-7, centroids),
    ]
    outcome = workload.KMeansOutcome(12_345, lines, 3 << 20, 4e-13)
    monkeypatch.setattr(workload, "run", lambda *_: outcome)
    out = tmp_path / "centroids.parquet"
    result = CliRunner().invoke(workload.main, ["x.npy", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 clusters of 12,345 points after 2 iterations" in result.output
    assert "received 3.0 MiB" in result.output
    assert "largest difference 4e-13" in result.output.replace("\n", " ")
    (line,) = (text for text in result.output.splitlines() if text.startswith("         1 "))
    assert line.split() == ["1", "0.500", "12.3", "2.50e-01"]
    assert pq.read_table(out).to_pydict() == {"cluster": [0, 1], "x0": [1.0, 3.0], "x1": [2.0, 4.0]}


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> workload.KMeansJob:
    mixture = Mixture(20_000, 4, n_true=20)
    return workload.KMeansJob(
        **{"mixture": mixture, "k": 7, "iterations": 4, "check": True, **options}
    )


def test_clusters_on_two_nodes(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    outcome = workload.run(job(), stages)
    assert outcome.n_points == 20_000
    assert outcome.error is not None
    assert outcome.error < 1e-9
    assert [line.number for line in outcome.lines] == [1, 2, 3, 4]
    assert outcome.lines[-1].moved < outcome.lines[0].moved


def test_it_ends_when_nothing_moves(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    outcome = workload.run(job(k=1, iterations=10, tolerance=1e-9), stages)
    # To the mean of all, and no further.
    assert len(outcome.lines) == 2
    assert outcome.lines[0].moved > 0.1


def test_saved_points_are_read(
    clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages
) -> None:
    mixture = Mixture(5000, 3)
    files = [str(path) for path in clusters.save(mixture, tmp_path)]
    for data in (files, str(tmp_path / "points-*.npy")):
        outcome = workload.run(job(mixture=None, data=data, n_partitions=2), stages)
        assert outcome.n_points == 5000
        assert outcome.error is not None


def test_a_wrong_sum_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    real = clusters.new_centroids

    def new_centroids(sums: Any, centroids: Any) -> Any:
        out = real(sums, centroids)
        out[3] += 1e-3
        return out

    monkeypatch.setattr(clusters, "new_centroids", new_centroids)
    with pytest.raises(WrongCentroids):
        workload.run(job(), stages)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 2)), "-k 7: there are only 3 points"),
        (np.zeros(20), "not rows of numbers"),
        (np.array(["a"] * 20), "does not hold rows of numbers"),
    ],
)
def test_what_are_no_points_is_said(
    clamor_cluster: ClamorCluster, tmp_path: Path, array: Any, message: str, stages: Stages
) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(InputError, match=message):
        workload.run(job(mixture=None, data=str(tmp_path / "x.npy")), stages)
