"""Sparse logistic regression: its arithmetic against plain loops and scikit-learn, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from click.testing import CliRunner
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import clamor_ray as clamor
from clamor_ray.workloads import sparse_lr as workload
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import criteo
from clamor_ray.workloads.models import logistic
from clamor_ray.workloads.models.logistic import ParameterLayout, RowBlock, Synthetic, WrongWeights
from tests.conftest import ClamorCluster

LAYOUTS = [ParameterLayout(10_000, 1), ParameterLayout(10_000, 3), ParameterLayout(2**31 - 1)]


def synthetic(**options: Any) -> Synthetic:
    return Synthetic(**{"n_rows": 3000, "n_partitions": 4, "n_values": 8000, **options})


def encoded(rows: Synthetic, n_parameters: int = 10_000) -> list[tuple[Any, Any]]:
    """Labels and ids of each partition."""
    parts = [rows.partition(i) for i in range(rows.n_partitions)]
    found = [logistic.distinct(part) for part in parts]
    ids, _ = logistic.assign(found, n_parameters)
    return [
        (part.labels, of[np.searchsorted(each.keys, part.keys)])
        for part, each, of in zip(parts, found, ids, strict=True)
    ]


# ------------------------------------------------------------------ generating


def test_partitions_have_all_rows_and_are_their_seed_and_number() -> None:
    rows = synthetic(n_rows=1003)
    sizes = [rows.size_of(i) for i in range(4)]
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) <= 1
    assert [rows.partition(i).keys.shape for i in range(4)] == [(39, n) for n in sizes]
    same, other = synthetic(n_rows=1003).partition(2), synthetic(n_rows=1003, seed=2).partition(2)
    np.testing.assert_array_equal(rows.partition(2).keys, same.keys)
    np.testing.assert_array_equal(rows.partition(2).labels, same.labels)
    assert not np.array_equal(rows.partition(2).keys, other.keys)


def test_values_are_about_as_many_as_asked_and_drawn_by_their_law() -> None:
    for n in (10**5, 10**7, 10**9):
        assert sum(synthetic(n_values=n).values()) == pytest.approx(n, rel=0.01)
    rows = synthetic(n_rows=40_000, n_partitions=1, n_values=10**6)
    ranks, values = rows.ranks(0), rows.values()
    assert all(of.max() < n for of, n in zip(ranks, values, strict=True))
    counts = np.bincount(ranks[15])
    assert counts[0] > 2 * counts[2] > 2 * counts[20]
    even = synthetic(n_rows=40_000, n_partitions=1, n_values=390, skew=0.0, even=True)
    counts = np.array([np.bincount(of, minlength=10) for of in even.ranks(0)])
    assert counts.shape == (39, 10)
    assert counts.min() > 3700


def test_labels_follow_the_true_weights() -> None:
    rows = synthetic(n_rows=50_000, n_partitions=1)
    part = rows.partition(0)
    total = rows.true_weights(part.keys).sum(axis=0) - 1.0
    chance = 1 / (1 + np.exp(-total))
    likely = chance > np.median(chance)
    assert part.labels[likely].mean() == pytest.approx(chance[likely].mean(), abs=0.02)
    assert part.labels[~likely].mean() == pytest.approx(chance[~likely].mean(), abs=0.02)
    assert chance[likely].mean() - chance[~likely].mean() > 0.2


def test_what_is_saved_has_the_features_of_what_is_generated(tmp_path: Path) -> None:
    rows = synthetic(n_rows=500, n_partitions=2)
    paths = rows.save(tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["rows-00000.tsv", "rows-00001.tsv"]
    for number, path in enumerate(paths):
        (split,) = criteo.splits(path, 1)
        read, made = criteo.read(split), rows.partition(number)
        np.testing.assert_array_equal(read.labels, made.labels)
        for of_read, of_made in list(zip(read.keys, made.keys, strict=True))[13:]:
            _, one = np.unique(of_read, return_inverse=True)
            _, other = np.unique(of_made, return_inverse=True)
            pairs = np.unique(np.stack([one, other]), axis=1)  # which value is which
            assert pairs.shape[1] == one.max() + 1 == other.max() + 1


# ------------------------------------------------------------------ ids


def test_the_most_frequent_key_is_the_first() -> None:
    parts = [
        logistic.Distinct(np.array(keys, np.uint64), np.array(counts))
        for keys, counts in [([3, 5, 9], [1, 4, 1]), ([], []), ([1, 3, 8], [1, 2, 1])]
    ]
    ids, keys = logistic.assign(parts, 1000)
    # 5: four times, 3: three; then those of the first partition before those of others.
    assert keys.tolist() == [5, 3, 9, 1, 8]
    assert [each.tolist() for each in ids] == [[1, 0, 2], [], [3, 1, 4]]
    ids, keys = logistic.assign(parts, 4)
    assert keys.tolist() == [5, 3, 9, 1, 8]
    assert [each.tolist() for each in ids] == [[1, 0, 2], [], [3, 1, 2]]
    nothing, keys = logistic.assign(parts[1:2], 4)
    assert [each.tolist() for each in nothing] == [[]]
    assert len(keys) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_id_has_a_place_of_its_own(layout: ParameterLayout) -> None:
    rng = np.random.default_rng(3)
    ids = np.unique(rng.integers(0, layout.n_parameters, 5000)).astype(np.int32)
    places = layout.places(ids)
    assert len(set(places.tolist())) == len(ids)
    assert places.min() >= 0
    assert places.max() < layout.length


def test_neighbours_share_blocks_and_blocks_are_dealt_out() -> None:
    layout = ParameterLayout(10_000, 3)
    assert (layout.stripe_length, layout.length) == (4 * 1024, 12 * 1024)
    places = layout.places(np.array([0, 1023, 1024, 2048, 3072, 3073], np.int32))
    assert places.tolist() == [0, 1023, 4096, 8192, 1024, 1025]
    for too_many in (ParameterLayout, lambda n: ParameterLayout(n - 1, 3)):
        with pytest.raises(ValueError, match="1 to"):
            too_many(2**31)


# ------------------------------------------------------------------ arithmetic


def plain_step(
    weights: dict[int, float], labels: list[int], ids: list[list[int]], n_rows: int
) -> tuple[dict[int, float], float]:
    """The gradient and the sum of losses, as they are written down, row by row."""
    slope: dict[int, float] = {}
    loss = 0.0
    for label, row in zip(labels, ids, strict=True):
        chance = 1 / (1 + np.exp(-sum(weights.get(each, 0.0) for each in row)))
        loss -= np.log(chance if label else 1 - chance)
        for each in row:
            slope[each] = slope.get(each, 0.0) + (chance - label) / n_rows
    return slope, loss


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_is_that_of_the_definition(layout: ParameterLayout) -> None:
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, 50).astype(np.uint8)
    ids = rng.integers(0, 7000, (39, 50)).astype(np.int32)
    ids[3] = ids[4]  # of hashed ids a row may have one twice
    block = logistic.block_of(labels, ids, layout)
    np.testing.assert_array_equal(block.ids[block.which], ids)
    np.testing.assert_array_equal(layout.places(block.ids), block.places)
    weights = rng.standard_normal(len(block.ids)).astype(np.float32)
    slope, loss = logistic.gradient(block, weights, 80)
    known = dict(zip(block.ids.tolist(), weights.tolist(), strict=True))
    expected, expected_loss = plain_step(known, labels.tolist(), ids.T.tolist(), 80)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert set(expected) == set(block.ids.tolist())
    wanted = [expected[each] for each in block.ids.tolist()]
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-8)


def test_blocks_are_read_whole_where_enough_of_them_is_used() -> None:
    full = np.arange(5000, dtype=np.int32)
    assert logistic.runs_of(full) == [(0, 5120)]
    some = np.concatenate([full[:1024:4], full[3072:5000:8]])
    assert logistic.runs_of(some) == [(0, 1024), (3072, 5120)]
    assert logistic.runs_of(full[::16]) is None
    assert logistic.runs_of(full[:0]) == []
    n_runs = logistic.MOST_RUNS + 1
    scattered = (np.arange(2 * n_runs)[::2, None] * 1024 + np.arange(200)).reshape(-1)
    assert logistic.runs_of(scattered.astype(np.int32)) is None


def test_no_rows_have_no_gradient() -> None:
    nothing = logistic.block_of(
        np.empty(0, np.uint8), np.empty((39, 0), np.int32), ParameterLayout(10_000, 2)
    )
    slope, loss = logistic.gradient(nothing, np.empty(0, np.float32), 10)
    assert slope.shape == (0,)
    assert loss == 0.0


def test_scores_far_from_zero_are_no_nan() -> None:
    labels = np.array([0, 1, 0, 1], np.uint8)
    ids = np.repeat(np.arange(4, dtype=np.int32)[None], 39, axis=0)
    block = logistic.block_of(labels, ids, ParameterLayout(10_000, 1))
    weights = np.array([1e3, 1e3, -1e3, -1e3], np.float32)
    with np.errstate(all="raise", over="ignore", under="ignore"):
        slope, loss = logistic.gradient(block, weights, 4)
    np.testing.assert_allclose(slope, np.array([1, 0, 0, -1]) * 39 / 4)
    assert loss == pytest.approx(2 * 39e3)


def trained(
    parts: list[list[RowBlock]], n: int, rate: float, steps: int
) -> tuple[Any, list[float]]:
    weights, losses = np.zeros(n, np.float32), []
    for number in range(steps):
        taken = [blocks[number % len(blocks)] for blocks in parts]
        n_rows = sum(len(block.labels) for block in taken)
        found = [logistic.gradient(block, weights[block.ids], n_rows) for block in taken]
        for block, (slope, _) in zip(taken, found, strict=True):
            weights[block.ids] -= rate * slope
        losses.append(sum(loss for _, loss in found) / n_rows)
    return weights, losses


@pytest.mark.parametrize("batches", [1, 3])
def test_steps_are_those_of_the_reference(batches: int) -> None:
    plain = [
        [(labels[rows], ids[:, rows]) for rows in np.array_split(np.arange(len(labels)), batches)]
        for labels, ids in encoded(synthetic())
    ]
    layout = ParameterLayout(10_000, 3)
    parts = [[logistic.block_of(*each, layout) for each in blocks] for blocks in plain]
    weights, losses = trained(parts, 10_000, 0.2, 7)
    expected, expected_losses = logistic.reference(plain, 10_000, 0.2, 7)
    assert logistic.check(weights, expected) < 1e-6
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def test_it_comes_to_what_scikit_learn_finds() -> None:
    labels, ids = encoded(synthetic(n_rows=2000, n_partitions=1, n_values=2000, skew=2.0))[0]
    used, columns = np.unique(ids, return_inverse=True)
    rows = np.tile(np.arange(len(labels)), 39)
    ones = np.ones(len(rows))
    x = scipy.sparse.csr_matrix((ones, (rows, columns.reshape(-1))), (len(labels), len(used)))
    strength = 20.0
    best = LogisticRegression(C=1 / strength, fit_intercept=False, tol=1e-8, max_iter=5000)
    best.fit(x, labels)

    def penalized(weights: Any) -> float:
        loss = log_loss(labels, 1 / (1 + np.exp(-(x @ weights))), normalize=False)
        return float(loss + strength / 2 * (weights**2).sum())

    block = logistic.block_of(labels, ids, ParameterLayout(10_000, 1))
    weights = np.zeros(len(block.ids), np.float32)
    for _ in range(3000):
        slope, loss = logistic.gradient(block, weights, len(labels))
        # The penalty is scikit-learn's; without one the rarest weights have no bound.
        weights -= np.float32(0.2) * (slope + np.float32(strength / len(labels)) * weights)
    np.testing.assert_array_equal(block.ids, used)
    found, optimum = penalized(weights.astype(np.float64)), penalized(best.coef_[0])
    assert optimum <= found * (1 + 1e-6)
    assert found == pytest.approx(optimum, rel=1e-4)
    assert loss == pytest.approx(
        log_loss(labels, 1 / (1 + np.exp(-(x @ weights))), normalize=False), rel=1e-4
    )


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
def test_one_wrong_weight_is_noticed(wrong: float) -> None:
    weights = np.linspace(-1, 1, 50)
    assert logistic.check((weights + 1e-8).astype(np.float32), weights) < 1e-6
    found = weights.astype(np.float32)
    found[7] += wrong
    with pytest.raises(WrongWeights, match="1 of 50 weights; number 7 is"):
        logistic.check(found, weights)
    with pytest.raises(WrongWeights, match=r"\(49,\) weights, not \(50,\)"):
        logistic.check(found[1:], weights)


# ------------------------------------------------------------------ command line


def test_the_result_says_what_was_found(
    attached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cost = workload.observe.Cost(faults=3, bytes_received=3 << 20, blocks_fetched=700)
    lines = [
        workload.SgdIteration(1, 0.5, 0.693147, cost),
        workload.SgdIteration(2, 0.25, 0.6, cost),
    ]
    weights, keys = np.array([0.5, -1.0, 2.0], np.float32), np.array([9, 8, 7, 6], np.uint64)
    outcome = workload.SparseOutcome(12_345, 3, weights, keys, lines, 4e-9)
    monkeypatch.setattr(workload, "run", lambda *_: outcome)
    picture, out = tmp_path / "loss.png", tmp_path / "weights.parquet"
    arguments = ["x.tsv", "--picture", str(picture), "--out", str(out)]
    monkeypatch.setattr(logistic, "folded", lambda ranks, _: np.minimum(ranks, 2).astype(np.int32))
    result = CliRunner().invoke(workload.main, arguments)
    assert result.exit_code == 0, result.output
    assert "12,345 rows, 3 parameters; log loss 0.6931 before the first" in result.output
    assert "largest difference 4e-09" in result.output.replace("\n", " ")
    (line,) = (text for text in result.output.splitlines() if text.startswith("         1 "))
    assert line.split() == ["1", "0.693147", "0.500", "3", "700", "3.0", "MiB"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert pq.read_table(out).to_pydict() == {
        "key": [9, 8, 7, 6],
        "weight": [0.5, -1.0, 2.0, 2.0],
    }


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> workload.SparseJob:
    return workload.SparseJob(
        **{
            "synthetic": synthetic(),
            "n_parameters": 10_000,
            "iterations": 4,
            "check": True,
            **options,
        }
    )


def test_weights_on_two_nodes(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    outcome = workload.run(job(), stages)
    assert outcome.n_rows == 3000
    assert outcome.error is not None
    assert outcome.error < 1e-6
    losses = [line.loss for line in outcome.lines]
    assert losses[0] == pytest.approx(np.log(2))
    assert losses == sorted(losses, reverse=True)
    assert outcome.keys is not None
    assert len(outcome.keys) == outcome.n_seen == len(outcome.weights)
    assert np.count_nonzero(outcome.weights) == outcome.n_seen


@pytest.mark.parametrize(
    "options",
    [
        {"batches": 3, "iterations": 5},
        {"hashed": True},
        {"n_parameters": 1000},  # fewer than values
        {"n_parameters": 2**31 - 1},
        {"synthetic": synthetic(n_rows=3)},  # a partition has no rows
    ],
)
def test_other_ways_to_train(
    clamor_cluster: ClamorCluster, options: dict[str, Any], stages: Stages
) -> None:
    outcome = workload.run(job(**options), stages)
    assert outcome.error is not None
    assert len(outcome.lines) == options.get("iterations", 4)


def test_saved_rows_are_read(clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages) -> None:
    files = [str(path) for path in synthetic(n_rows=900, n_partitions=3).save(tmp_path)]
    for data in (files, str(tmp_path / "rows-*.tsv")):
        outcome = workload.run(job(synthetic=None, data=data, n_partitions=5), stages)
        assert outcome.n_rows == 900
        assert outcome.error is not None


def test_a_wrong_sum_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    real = logistic.reference

    def reference(*arguments: Any) -> Any:
        weights, losses = real(*arguments)
        weights[3] += 0.01
        return weights, losses

    monkeypatch.setattr(logistic, "reference", reference)
    with pytest.raises(WrongWeights, match="number 3"):
        workload.run(job(), stages)


def test_unusable_rows(clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("0\tbad\n")
    with pytest.raises(clamor.errors.SourceError, match=r"rows\.tsv, line 1: 2 fields"):
        workload.run(job(synthetic=None, data=str(path)), stages)
    path.write_text("\n")
    with pytest.raises(workload.InputError, match="has no rows"):
        workload.run(job(synthetic=None, data=str(path)), stages)
