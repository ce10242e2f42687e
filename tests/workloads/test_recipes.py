"""Workloads as programs of stages: their answers against those of one process, in any order of
tasks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from clamor_ray._recipes.program.builder import Builder, Dataset
from clamor_ray._recipes.program.explaining import explain_text
from clamor_ray._recipes.program.plain import run_plainly
from clamor_ray.workloads.data import clusters, graphs
from clamor_ray.workloads.data.clusters import Float64, Mixture
from clamor_ray.workloads.models import linear, particles
from clamor_ray.workloads.models.linear import Sample
from clamor_ray.workloads.models.particles import ParticleBox, Particles, WrongParticles
from clamor_ray.workloads.recipes.kmeans import describe_kmeans
from clamor_ray.workloads.recipes.lr import Descent, describe_lr
from clamor_ray.workloads.recipes.pagerank import cut_graph, describe_pagerank
from clamor_ray.workloads.recipes.particles import describe_particles
from tests.recipes.programs import run_on_matcher

WAYS = pytest.mark.parametrize("way", ["plain", "any order"])


def run(p: Builder, way: str) -> list[list[Any]]:
    """The partitions of all datasets at the end."""
    if way == "plain":
        return run_plainly(p.tables(), p.functions, [list(each.source) for each in p.datasets])
    return run_on_matcher(p, random.Random(7))


def value_of(found: list[list[Any]], dataset: Dataset) -> Any:
    (value,) = found[dataset.number]
    return value


# ---------------------------------------------------------------- k-means


def plain_kmeans(
    parts: list[Float64], centroids: Float64, iterations: int, tolerance: float
) -> tuple[Float64, int]:
    """The iterations of the workload, over these partitions in this order."""
    number, moved = 0, np.inf
    while number < iterations and not moved < tolerance:
        number += 1
        sums = np.zeros((len(centroids), centroids.shape[1] + 1))
        for points in parts:
            sums = sums + clusters.partial_sums(points, centroids)[0]
        new = clusters.new_centroids(sums, centroids)
        moved = np.sqrt(((new - centroids) ** 2).sum(axis=1)).max()
        centroids = new
    return centroids, number


@WAYS
@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_kmeans(way: str, tolerance: float) -> None:
    mixture = Mixture(3000, 5, dimensions=3, n_true=12)
    parts = [mixture.partition(n) for n in range(5)]
    first = mixture.first_centroids(6)
    p = Builder()
    datasets = describe_kmeans(p, parts, first, 9, tolerance)
    found = run(p, way)
    expected, rounds = plain_kmeans(parts, first, 9, tolerance)
    centroids = value_of(found, datasets.centroids)
    assert centroids.tobytes() == expected.tobytes()
    assert value_of(found, datasets.rounds) == rounds
    assert (rounds < 9) == (tolerance > 0.0)
    clusters.check(centroids, clusters.reference(parts, first, rounds))


# ---------------------------------------------------------------- logistic regression


@WAYS
@pytest.mark.parametrize(
    "how",
    [
        Descent(1.0, iterations=8, tolerance=0.0),
        Descent(1.0, iterations=30, tolerance=0.02, step=2.0, penalty=0.1),
        Descent(-1.0, iterations=5, intercept=False),
    ],
)
def test_lr(way: str, how: Descent) -> None:
    sample = Sample(600, 40, 4, per_row=8)
    parts = [sample.partition(n) for n in range(4)]
    p = Builder()
    datasets = describe_lr(p, parts, 40, how)
    found = run(p, way)

    def evaluate(weights: Float64) -> tuple[float, Float64]:
        total = np.zeros(len(weights) + linear.TAIL)
        for rows in parts:
            total = total + linear.accumulate(None, rows, weights, "logistic", how.positive)
        return linear.penalized(total, weights, how.penalty, how.intercept)

    walk = (np.zeros(41), how.iterations, how.tolerance, how.step)
    steps = list(linear.descend(evaluate, *walk))
    best, last = value_of(found, datasets.best), value_of(found, datasets.last)
    expected = min(steps, key=lambda step: step.value)
    assert (last.number, last.value, last.moved) == (
        steps[-1].number,
        steps[-1].value,
        steps[-1].moved,
    )
    assert (best.number, best.value) == (expected.number, expected.value)
    assert best.weights.tobytes() == expected.weights.tobytes()
    assert (last.number < how.iterations) == (how.tolerance > 0.01)
    plain = linear.plain_evaluate(parts, 40, "logistic", how.positive, how.penalty, how.intercept)
    other = min(linear.descend(plain, *walk), key=lambda step: step.value)
    linear.check(best.weights, other.weights)


# ---------------------------------------------------------------- PageRank


@WAYS
@pytest.mark.parametrize("n_parts", [1, 2, 7])
def test_pagerank(way: str, n_parts: int) -> None:
    graph = graphs.generate(300, 2000, 2.1, seed=3)
    parts = cut_graph(graph, n_parts)
    p = Builder()
    datasets = describe_pagerank(p, parts, 0.85, 40, 1e-5)
    found = run(p, way)
    ranks = np.concatenate(found[datasets.ranks.number])
    ran = list(
        graphs.iterate(
            graph,
            lambda number, quotients, base: graphs.ranks_of(graph, quotients, 0, 300, base),
            0.85,
            40,
            1e-5,
        )
    )
    assert value_of(found, datasets.rounds) == len(ran) < 40
    assert value_of(found, datasets.residual) == pytest.approx(ran[-1][1], rel=1e-6)
    graphs.check(ranks, graphs.reference(graph, 0.85, len(ran)))
    if n_parts == 1:  # what dangles is added up in the same order
        assert ranks.tobytes() == ran[-1][0].tobytes()


def test_a_part_of_a_graph_gives_what_others_have_edges_from_once() -> None:
    graph = graphs.generate(100, 900, 2.1, seed=5)
    parts = cut_graph(graph, 4)
    begins = np.cumsum([0] + [len(part.out_degrees) for part in parts])
    assert begins[-1] == 100
    assert sum(part.edges.n_edges for part in parts) == 900
    for number, part in enumerate(parts):
        given = np.concatenate([other.gives[number] + begins[n] for n, other in enumerate(parts)])
        assert np.array_equal(given, np.unique(given))
        sources = given[part.edges.sources]
        first, last = graph.first_edge[begins[number]], graph.first_edge[begins[number + 1]]
        assert np.array_equal(sources, graph.sources[first:last])


# ---------------------------------------------------------------- particles

BOX = ParticleBox(width=32.0, step_s=2.0**-4)


@WAYS
@pytest.mark.parametrize("n_slabs", [1, 4, 16])
def test_particles_move_the_same_in_any_number_of_slabs(way: str, n_slabs: int) -> None:
    first = particles.generate(400, BOX, 3.0, seed=1)
    p = Builder()
    datasets = describe_particles(p, first, BOX, n_slabs, 20)
    found = run(p, way)
    slabs = found[datasets.slabs.number]
    expected = particles.reference(first, BOX, 20)
    particles.check(particles.merged(slabs), expected)
    assert np.abs(expected.at - first.at).max() > 0.1
    for number, slab in enumerate(slabs):  # each is where it belongs
        assert (particles.slab_of(slab, BOX, n_slabs) == number).all()
    if n_slabs > 1:
        before = particles.slab_of(first, BOX, n_slabs)
        assert (before != particles.slab_of(expected, BOX, n_slabs)).any()  # some went over
        sizes = [len(slab) for slab in slabs]
        assert max(sizes) > 1.5 * 400 / n_slabs  # and the work is skewed


def test_particles_bounce_off_the_walls() -> None:
    box = ParticleBox(width=4.0, step_s=0.5)
    at, speed = np.array([[0.1, 2.0], [2.0, 3.9]]), np.array([[-1.0, 0.0], [0.0, 1.0]])
    moved = particles.pushed(Particles(np.arange(2), at, speed), Particles(*_nobody()), box)
    assert moved.at.tolist() == [[0.0, 2.0], [2.0, 4.0]]
    assert moved.speed.tolist() == [[1.0, 0.0], [0.0, -1.0]]


def _nobody() -> tuple[Any, Any, Any]:
    return np.empty(0, np.int64), np.empty((0, 2)), np.empty((0, 2))


def test_pairs_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    first = particles.generate(300, BOX, 4.0, seed=2)
    whole = particles.pushed(first, Particles(*_nobody()), BOX)
    monkeypatch.setattr(particles, "MOST_PAIRS", 7)
    particles.check(particles.pushed(first, Particles(*_nobody()), BOX), whole)


def test_slabs_that_are_too_thin_are_refused() -> None:
    first = particles.generate(10, BOX, 1.0, seed=1)
    with pytest.raises(ValueError, match="17 slabs are too thin for that radius: take up to 16"):
        describe_particles(Builder(), first, BOX, 17, 3)


def test_wrong_particles_are_named() -> None:
    first = particles.generate(10, BOX, 1.0, seed=1)
    at = first.at.copy()
    at[3, 1] = np.nextafter(at[3, 1], 100.0)
    with pytest.raises(WrongParticles, match="1 of 10 particles; number 3 is at"):
        particles.check(Particles(first.numbers, at, first.speed), first)
    with pytest.raises(WrongParticles, match="there are 9 particles, not 10"):
        particles.check(first.of(slice(1, None)), first)


# ---------------------------------------------------------------- as a user sees them


def test_what_a_program_is_made_of() -> None:
    p = Builder()
    sample = Sample(20, 5, 3)
    rows = [sample.partition(n) for n in range(3)]
    describe_lr(p, rows, 5, Descent(1.0, iterations=50))
    text = explain_text(p.tables())
    assert "loop, until is_short says True, at most 50 rounds" in text
    assert "  0 send_weights, 1 task, sends to the next stage  (lr.py:" in text
    assert "      messages: from 3 tasks of losses_and_gradient\n" in text
    assert "group 1   weights, last step, best step, lines (1 partition each)" in text
