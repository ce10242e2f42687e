"""Logistic regression: its arithmetic, against scikit-learn, and runs over a cluster."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

import clamor_ray as clamor
from clamor_ray.workloads import lr
from clamor_ray.workloads.cli import learning, linear_job, results
from clamor_ray.workloads.cli.learning import Iteration
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data.places import InputError
from clamor_ray.workloads.data.rows import LabelledRows
from clamor_ray.workloads.models import linear
from clamor_ray.workloads.models.linear import Facts, Sample, WrongWeights
from tests.conftest import ClamorCluster
from tests.support.lab import local_cluster, require_lab

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOWS = ("split", "tree")


def parts_of(sample: Sample) -> list[LabelledRows]:
    return [sample.partition(i) for i in range(sample.n_partitions)]


def text_of(parts: list[LabelledRows]) -> str:
    lines = []
    for rows in parts:
        for i, label in enumerate(rows.labels):
            part = slice(rows.first[i], rows.first[i + 1])
            pairs = zip(rows.columns[part] + 1, rows.values[part], strict=True)
            lines.append(f"{label:g} " + " ".join(f"{c}:{float(v)!r}" for c, v in pairs))
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- rows


def test_a_partition_is_its_seed_and_number() -> None:
    sample = Sample(1003, 200, 4, seed=3)
    parts = parts_of(sample)
    assert sum(map(len, parts)) == 1003
    again = Sample(1003, 200, 4, seed=3).partition(2)
    np.testing.assert_array_equal(again.columns, parts[2].columns)
    np.testing.assert_array_equal(again.labels, parts[2].labels)
    assert not np.array_equal(parts[1].values[:9], parts[2].values[:9])
    for rows in parts:
        assert (rows.columns >= 0).all()
        assert rows.width <= 200
        inside = np.ones(len(rows.columns) - 1, bool)
        inside[rows.first[1:-1] - 1] = False
        assert (np.diff(rows.columns)[inside] > 0).all()
        assert set(rows.labels) == {-1.0, 1.0}


def test_labels_follow_the_weights_that_they_are_drawn_by() -> None:
    sample = Sample(5000, 100, 1)
    rows = sample.partition(0)
    margins = rows.matrix(100) @ sample.weights_of(np.arange(100))
    assert ((margins > 0) == (rows.labels > 0)).mean() > 0.85


def test_facts_of_parts_are_those_of_all() -> None:
    facts = Facts()
    for rows in parts_of(Sample(300, 50, 3)):
        facts = facts.and_of(rows)
    assert (facts.n_rows, facts.labels) == (300, (-1.0, 1.0))
    assert Facts(1, 9, (1.0, 2.0)).and_these(Facts(2, 3, (0.0, 5.0))) == Facts(3, 9, (0, 1, 2))


# ---------------------------------------------------------------- arithmetic


@PATIENT
@given(st.integers(0, 40), st.integers(1, 12), st.sampled_from(["logistic", "hinge"]), st.data())
def test_sums_are_those_of_the_definition(n: int, d: int, loss: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    # Small whole numbers: rows on the margin, empty rows.
    dense = rng.integers(-1, 2, (n, d)) * rng.integers(0, 2, (n, d)).astype(float)
    labels = rng.choice([0.0, 1.0], n)
    weights = rng.integers(-2, 3, d + 1) / 2.0
    first = np.concatenate([[0], np.cumsum((dense != 0).sum(axis=1))]).astype(np.int64)
    rows = LabelledRows(labels, first, np.nonzero(dense)[1].astype(np.int32), dense[dense != 0])
    expected = np.zeros(d + 1 + linear.TAIL)
    for x, label in zip(dense, labels, strict=True):
        sign = 1.0 if label == 1.0 else -1.0
        margin = float(x @ weights[:d] + weights[d])
        if loss == "logistic":
            value = float(np.log1p(np.exp(-sign * margin)))
            slope = -sign / (1.0 + float(np.exp(sign * margin)))
        else:
            value = max(0.0, 1.0 - sign * margin)
            slope = -sign if sign * margin < 1.0 else 0.0
        expected[:d] += slope * x
        expected[d:] += [slope, value, (margin > 0) == (sign > 0), 1]
    found = linear.accumulate(None, rows, weights, loss, 1.0)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    twice = linear.accumulate(found, rows, weights, loss, 1.0)
    np.testing.assert_allclose(twice, 2 * expected, atol=1e-12)


def test_losses_of_very_large_margins_are_finite() -> None:
    margins, signs = np.array([-1e6, 1e6, -1e6, 1e6]), np.array([1.0, 1.0, -1.0, -1.0])
    losses, slopes = linear.logistic(margins, signs)
    assert losses.tolist() == [1e6, 0.0, 0.0, 1e6]
    assert slopes.tolist() == [-1.0, 0.0, 0.0, 1.0]


def test_a_penalty_spares_the_intercept() -> None:
    total = np.array([2.0, 4.0, 6.0, 10.0, 1.0, 2.0])
    weights = np.array([3.0, 1.0, 5.0])
    value, gradient = linear.penalized(total.copy(), weights, 0.1, True)
    assert value == pytest.approx(10 / 2 + 0.05 * 10)
    assert gradient == pytest.approx([1.0 + 0.3, 2.0 + 0.1, 3.0])
    assert linear.penalized(total, weights, 0.1, False)[1][-1] == 0.0


def evaluator(
    parts: list[LabelledRows], d: int, loss: str, penalty: float, intercept: bool = True
) -> Any:
    """By the tasks' arithmetic."""

    def evaluate(weights: Any) -> Any:
        total = None
        for rows in parts:
            total = linear.accumulate(total, rows, weights, loss, 1.0)
        return linear.penalized(total, weights, penalty, intercept)

    return evaluate


def test_lbfgs_finds_what_scikit_learn_finds() -> None:
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression

    n, d, penalty = 3000, 60, 1e-3
    parts = parts_of(Sample(n, d, 3, per_row=10))
    steps = list(
        linear.lbfgs(evaluator(parts, d, "logistic", penalty), np.zeros(d + 1), 200, 1e-12)
    )
    found = steps[-1]
    matrix = sparse.vstack([rows.matrix(d) for rows in parts])
    labels = np.concatenate([rows.labels for rows in parts])
    fitted = LogisticRegression(C=1 / (n * penalty), tol=1e-10, max_iter=10_000)
    fitted.fit(matrix, labels)
    expected = np.append(fitted.coef_[0], fitted.intercept_)
    np.testing.assert_allclose(found.weights, expected, atol=1e-4)
    values = [step.value for step in steps]
    assert values == sorted(values, reverse=True)
    assert len(steps) < 60  # by its tolerance, and not by their number


def test_steps_along_the_gradient_get_there_too() -> None:
    parts = parts_of(Sample(500, 10, 2, per_row=5))
    evaluate = evaluator(parts, 10, "logistic", 0.01)
    best = list(linear.lbfgs(evaluate, np.zeros(11), 100, 1e-12))[-1]
    steps = list(linear.descend(evaluate, np.zeros(11), 5000, 1e-6, step=4.0))
    assert len(steps) < 5000
    assert steps[-1].value == pytest.approx(best.value, rel=1e-3)
    assert steps[0].value == pytest.approx(np.log(2))


def test_lbfgs_ends_where_nothing_is_gained() -> None:
    def flat(weights: Any) -> Any:
        return 1.0, np.zeros(3)

    assert list(linear.lbfgs(flat, np.ones(3), 10, 1e-6)) == []

    def bowl(weights: Any) -> Any:
        return float(weights @ weights), 2 * weights

    steps = list(linear.lbfgs(bowl, np.array([3.0, -4.0]), 50, 0.0))
    np.testing.assert_allclose(steps[-1].weights, 0.0, atol=1e-9)
    assert len(steps) < 10


def test_a_wrong_weight_is_named() -> None:
    expected = np.array([1.0, -2.0, 0.5])
    assert linear.check(expected + 1e-9, expected) == pytest.approx(5e-10)
    with pytest.raises(WrongWeights, match=r"1 of 3 weights; number 2 is 0\.51, not 0\.5"):
        linear.check(np.array([1.0, -2.0, 0.51]), expected)
    with pytest.raises(WrongWeights, match="number 0 is nan"):
        linear.check(np.array([np.nan, -2.0, 0.5]), expected)
    with pytest.raises(WrongWeights, match="2 weights, not 3"):
        linear.check(np.zeros(2), expected)


def test_segments_of_any_number_make_the_array() -> None:
    array = np.arange(10.0)
    for n in (1, 3, 10, 16):
        parts = [learning.segment(array, i, n) for i in range(n)]
        assert np.concatenate(parts).tolist() == array.tolist()


# ---------------------------------------------------------------- command line


def test_the_result_says_what_was_found(
    attached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [
        Iteration(1, 3, 0.5, 0.0123, 0.693147, 1.5),
        Iteration(2, 1, 0.25, 0.01, 0.25, 1e-3),
    ]
    weights = np.array([0.0, 2.5, 0.0, -1.0])
    outcome = linear_job.LinearOutcome(weights, Facts(12_345, 3), 0.875, lines, 3 << 20, 4e-13)
    monkeypatch.setattr(linear_job, "run", lambda *_: outcome)
    out, picture = tmp_path / "weights.parquet", tmp_path / "loss.png"
    result = CliRunner().invoke(lr.main, ["x.svm", "--out", str(out), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    text = result.output.replace("\n", " ")
    assert "ended after 2 iterations over 12,345 rows with 3 features" in text
    assert "least loss 0.250000, 87.50% of the rows on the right side" in text
    assert "largest difference 4e-13" in text
    (line,) = (text for text in result.output.splitlines() if text.strip().startswith("1 "))
    assert line.split() == ["1", "0.693147", "1.50e+00", "3", "0.500", "12.3"]
    assert pq.read_table(out).to_pydict() == {"feature": [1, -1], "weight": [2.5, -1.0]}
    assert imread(picture).shape[:2] == (675, 1200)


def test_the_curve_is_that_of_the_losses(tmp_path: Path) -> None:
    flat = [Iteration(i, 1, 0.1, 0.1, 0.5, 0.1) for i in range(1, 9)]
    falls = [Iteration(i, 1, 0.1, 0.1, 1.0 / i, 0.1) for i in range(1, 9)]
    images = []
    for name, lines in (("flat", flat), ("falls", falls), ("again", falls)):
        results.draw_curve(lines, "8 rows", "loss", tmp_path / f"{name}.png")
        images.append(imread(tmp_path / f"{name}.png"))
    assert not np.array_equal(images[0], images[1])
    assert np.array_equal(images[1], images[2])


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> linear_job.LinearJob:
    sample = Sample(2000, 300, 4, per_row=10)
    return lr.make_job(**{"sample": sample, "iterations": 8, "check": True, **options})


@pytest.mark.parametrize(("how", "solver"), [("split", "lbfgs"), ("tree", "gd")])
def test_it_learns_on_two_nodes(
    clamor_cluster: ClamorCluster, how: str, solver: str, stages: Stages
) -> None:
    outcome = lr.run(job(how=how, solver=solver, penalty=1e-3), stages)
    assert outcome.error is not None
    assert outcome.error < 1e-9
    assert outcome.facts.n_rows == 2000
    assert [line.number for line in outcome.lines] == list(range(1, 9))
    assert outcome.lines[-1].loss < outcome.lines[0].loss
    assert outcome.accuracy > 0.65


def test_both_ways_to_add_up_and_two_runs_agree(
    clamor_cluster: ClamorCluster, stages: Stages
) -> None:
    one, two, tree = (
        lr.run(job(how=how, check=False), stages).weights for how in ("split", "split", "tree")
    )
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(one, tree, rtol=1e-9, atol=1e-12)


def test_it_ends_by_its_tolerance(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    outcome = lr.run(job(iterations=200, tolerance=0.02, check=False), stages)
    assert len(outcome.lines) < 200
    *_, before, last = outcome.lines
    assert before.loss - last.loss <= 0.02 * abs(last.loss) + 0.02 * abs(before.loss)


def test_files_are_read(clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages) -> None:
    sample = Sample(900, 50, 3, per_row=6)
    for number, rows in enumerate(parts_of(sample)):
        (tmp_path / f"part-{number}.svm").write_text(text_of([rows]))
    text = text_of(parts_of(sample))
    (tmp_path / "all.svm.gz").write_bytes(gzip.compress(text.encode()))
    drawn = lr.run(job(sample=sample), stages)
    for data in (str(tmp_path / "part-*.svm"), str(tmp_path / "all.svm.gz")):
        found = lr.run(job(sample=None, data=data, n_partitions=4), stages)
        width = len(found.weights) - 1
        assert found.facts.n_rows == 900
        np.testing.assert_allclose(found.weights[:width], drawn.weights[:width], rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "has no rows"),
        ("1 1:1\n1 2:1\n", {}, "two labels are needed; there are 1$"),
        ("1 1:1\n2 2:1\n3 1:1\n4 1:1\n", {}, "there are 1, 2, 3 and more"),
        ("1 1:1\n0 2:0x\n", {}, "line 2: the value of index '2'"),
        ("1 1:1\n0 9:1\n", {"n_features": 8}, "line 2: index '9' is beyond 8"),
    ],
)
def test_what_cannot_be_learned_from_is_said(
    clamor_cluster: ClamorCluster,
    tmp_path: Path,
    text: str,
    options: Any,
    message: str,
    stages: Stages,
) -> None:
    (tmp_path / "x.svm").write_text(text)
    with pytest.raises((InputError, clamor.errors.SourceError), match=message):
        lr.run(job(sample=None, data=str(tmp_path / "x.svm"), **options), stages)


def test_a_wrong_sum_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    real = learning.add_up

    def add_up(*arguments: Any) -> Any:
        total = real(*arguments)
        total[3] *= 1.001
        return total

    monkeypatch.setattr(learning, "add_up", add_up)
    with pytest.raises(WrongWeights):
        lr.run(job(), stages)


@pytest.mark.lab
def test_a_node_that_dies_changes_no_weight(stages: Stages) -> None:
    """One while segments are added up by all nodes, then one of those left while a tree does it."""
    require_lab("local")
    sample = Sample(4000, 20_000, 6)
    with local_cluster(4, log_to_driver=False) as lab:
        clamor.init()
        for how, victim in zip(HOWS, (3, 2), strict=True):

            def kill(number: int, victim: int = victim) -> None:
                if number == 2:
                    lab.kill_node(victim)

            outcome = lr.run(job(sample=sample, how=how, iterations=6), stages, kill)
            assert len(outcome.lines) == 6
            assert outcome.error is not None  # they are those of one process
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            assert alive == set(lab.node_ids[:victim])
        clamor.shutdown()
