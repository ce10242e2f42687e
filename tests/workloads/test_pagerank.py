"""The PageRank workload: its pure parts against plain sums, and runs over a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamor_ray.workloads import pagerank as workload
from clamor_ray.workloads.cli import observe
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import graphs
from tests.conftest import ClamorCluster

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def graph_of(n: int, edges: list[tuple[int, int]]) -> graphs.Graph:
    """From (source, target) pairs."""
    by_target = sorted(edges, key=lambda edge: edge[1])
    counts = np.bincount([target for _, target in by_target], minlength=n)
    sources = np.array([source for source, _ in by_target], np.uint32)
    return graphs.Graph(
        np.concatenate([[0], np.cumsum(counts)]),
        sources,
        np.bincount(sources.astype(np.int64), minlength=n).astype(np.uint32),
    )


@st.composite
def some_graph(draw: st.DrawFn) -> graphs.Graph:
    """Up to 12 vertices; hubs, loops, repeated edges, and vertices without any."""
    n = draw(st.integers(1, 12))
    vertex = st.integers(0, n - 1) | st.just(0)
    return graph_of(n, draw(st.lists(st.tuples(vertex, vertex), max_size=60)))


def plain_ranks(
    graph: graphs.Graph, damping: float, iterations: int
) -> tuple[list[float], list[float]]:
    """PageRank as it is written down, edge by edge; and how far each iteration moved."""
    n = graph.n_vertices
    bounds, sources = graph.first_edge.tolist(), graph.sources.tolist()
    ranks, moved = [1.0 / n] * n, []
    for _ in range(iterations):
        dangling = sum(ranks[v] for v in range(n) if v not in sources)
        new = [(1.0 - damping + damping * dangling) / n] * n
        for v in range(n):
            for u in sources[bounds[v] : bounds[v + 1]]:
                new[v] += damping * ranks[u] / sources.count(u)
        moved.append(sum(abs(a - b) for a, b in zip(ranks, new, strict=True)))
        ranks = new
    return ranks, moved


# ---------------------------------------------------------------- generating


def test_the_generated_graph_is_one() -> None:
    graph = graphs.generate(10_000, 160_000, 2.1, seed=3)
    assert graph.n_vertices == 10_000
    assert graph.n_edges == 160_000
    assert graph.first_edge[0] == 0
    assert graph.first_edge[-1] == 160_000
    assert (np.diff(graph.first_edge) >= 0).all()
    assert graph.sources.max() < 10_000
    counted = np.bincount(graph.sources.astype(np.int64), minlength=10_000)
    assert np.array_equal(graph.out_degrees, counted)


def test_the_same_arguments_make_the_same_graph() -> None:
    one, two, other = (graphs.generate(500, 4000, 2.1, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.sources, two.sources)
    assert not np.array_equal(one.sources, other.sources)


@pytest.mark.parametrize("exponent", [2.1, 2.5, 3.0])
def test_degrees_follow_the_power_law(exponent: float) -> None:
    """The number of vertices of at least degree k falls as k ** (1 - exponent)."""
    graph = graphs.generate(1 << 18, 1 << 22, exponent, seed=3)
    for degrees in (np.diff(graph.first_edge), graph.out_degrees):
        k = np.array([60, 120, 240, 480])
        at_least = np.array([(degrees >= each).sum() for each in k])
        slope = np.polyfit(np.log(k), np.log(at_least), 1)[0]
        assert slope == pytest.approx(1.0 - exponent, rel=0.1)


def test_hubs_are_first_as_sources_and_scattered_as_targets() -> None:
    graph = graphs.generate(1 << 16, 1 << 20, 2.1, seed=3)
    assert (np.diff(graph.out_degrees[:8].astype(int)) < 0).all()
    hubs = np.argsort(-np.diff(graph.first_edge))[:64]
    assert len(np.unique(hubs >> 12)) > 8  # in most sixteenths
    assert 0.2 < (graph.out_degrees[: 1 << 10].sum() / graph.n_edges) < 0.8
    assert (graph.out_degrees == 0).any()  # some dangle


@pytest.mark.parametrize(("n", "m"), [(1, 0), (1, 5), (2, 1), (7, 0), (0x9E3779B1 % 1000, 3000)])
def test_small_graphs(n: int, m: int) -> None:
    graph = graphs.generate(n, m, 2.1, seed=1)
    assert (graph.n_vertices, graph.n_edges) == (n, m)
    assert graph.first_edge[-1] == m
    assert graph.out_degrees.sum() == m


def test_every_vertex_has_its_place_among_the_popular() -> None:
    for n in (1, 2, 3, 1000, 4096):
        assert np.array_equal(np.sort(graphs._scattered(n)), np.arange(n))


def test_arrays_are_made_by_who_is_asked_and_draws_are_told() -> None:
    made: list[Any] = []
    seen: list[int] = []

    def empty(shape: Any, dtype: Any) -> Any:
        made.append(np.full(shape, 77, dtype))  # as memory that was used before
        return made[-1]

    n_edges = graphs.DRAWN_EDGES + 5
    graph = graphs.generate(1000, n_edges, 2.1, 1, empty, seen.append)
    assert [id(array) for array in made] == [id(field) for field in vars(graph).values()]
    assert seen == [graphs.DRAWN_EDGES, n_edges]
    assert graph.out_degrees.sum() == n_edges


@pytest.mark.parametrize("wrong", [(0, 5, 2.1), (1 << 32, 5, 2.1), (5, -1, 2.1), (5, 5, 1.0)])
def test_graphs_that_there_cannot_be(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="not"):
        graphs.generate(*wrong, seed=1)


# ---------------------------------------------------------------- ranks


@PATIENT
@given(some_graph(), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_slices_add_up_to_the_sums_edge_by_edge(
    graph: graphs.Graph, n_ranges: int, chunk: int, backward: bool
) -> None:
    quotients = np.random.default_rng(1).random(graph.n_vertices)
    expected = np.full(graph.n_vertices, 0.25)
    targets = np.repeat(np.arange(graph.n_vertices), np.diff(graph.first_edge))
    np.add.at(expected, targets, quotients[graph.sources])
    got = [
        graphs.ranks_of(graph, quotients, a, b, 0.25, backward=backward, chunk_edges=chunk)
        for a, b in graphs.balanced_ranges(graph.first_edge, n_ranges)
    ]
    np.testing.assert_allclose(np.concatenate(got), expected, rtol=1e-12)


def test_chunks_are_read_in_the_order_that_was_asked_for() -> None:
    graph = graphs.generate(100, 1000, 2.1, seed=1)
    read: list[int] = []

    class Noted(np.ndarray[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            read.append(key.start)
            return np.asarray(self)[key]

    noted = graphs.Graph(graph.first_edge, graph.sources.view(Noted), graph.out_degrees)
    for backward in (False, True):
        graphs.ranks_of(noted, np.zeros(100), 0, 100, 0.0, backward=backward, chunk_edges=300)
    assert read == [0, 300, 600, 900, 900, 600, 300, 0]


@PATIENT
@given(some_graph(), st.integers(1, 20))
def test_ranges_cover_all_vertices(graph: graphs.Graph, n_ranges: int) -> None:
    ranges = graphs.balanced_ranges(graph.first_edge, n_ranges)
    assert [v for a, b in ranges for v in range(a, b)] == list(range(graph.n_vertices))
    assert len(ranges) <= n_ranges
    assert all(a < b for a, b in ranges)


def test_ranges_have_about_equal_work() -> None:
    """Work is edges, and vertices where there are no edges."""
    counts = np.where(np.arange(2000) < 100, 50, 0)
    first_edge = np.concatenate([[0], np.cumsum(counts)])
    ranges = graphs.balanced_ranges(first_edge, 7)
    work = [first_edge[b] - first_edge[a] + b - a for a, b in ranges]
    assert len(ranges) == 7
    assert max(work) - min(work) <= 2 * 51
    with pytest.raises(ValueError, match="at least 1"):
        graphs.balanced_ranges(first_edge, 0)


def test_who_has_no_edges_gives_nothing_along_them() -> None:
    quotients = graphs.shares(np.array([0.5, 0.25, 0.25]), np.array([2, 0, 1], np.uint32), 0.8)
    np.testing.assert_allclose(quotients, [0.2, 0.0, 0.2])


def in_one_process(graph: graphs.Graph) -> Any:
    def step(number: int, quotients: Any, base: float) -> Any:
        n = graph.n_vertices
        return graphs.ranks_of(graph, quotients, 0, n, base, backward=number % 2 == 1)

    return step


@PATIENT
@given(some_graph(), st.sampled_from([0.0, 0.5, 0.85]))
def test_ranks_are_those_of_the_definition(graph: graphs.Graph, damping: float) -> None:
    steps = list(graphs.iterate(graph, in_one_process(graph), damping, 4, 0.0))
    expected, moved = plain_ranks(graph, damping, len(steps))
    np.testing.assert_allclose(steps[-1][0], expected, rtol=1e-12)
    np.testing.assert_allclose([residual for _, residual in steps], moved, atol=1e-14)
    assert steps[-1][0].sum() == pytest.approx(1.0)
    np.testing.assert_allclose(graphs.reference(graph, damping, len(steps)), expected, rtol=1e-12)


def test_it_ends_when_ranks_move_less_than_the_tolerance() -> None:
    graph = graphs.generate(1000, 16_000, 2.1, seed=1)
    steps = list(graphs.iterate(graph, in_one_process(graph), 0.85, 100, 1e-4))
    residuals = [residual for _, residual in steps]
    assert residuals[-1] < 1e-4 <= residuals[-2]
    graphs.check(steps[-1][0], graphs.reference(graph, 0.85, 100, 1e-4))


def test_a_star_by_hand() -> None:
    """Two vertices link to a third, which dangles: r = c + d(2c), c = (1 - d + d r) / 3."""
    graph = graph_of(3, [(0, 2), (1, 2)])
    (*_, (ranks, _)) = graphs.iterate(graph, in_one_process(graph), 0.5, 200, 1e-15)
    c = 0.5 / (3 - 0.5 * 2)
    np.testing.assert_allclose(ranks, [c, c, 2 * c], rtol=1e-12)


@pytest.mark.parametrize("wrong", [1e-6, np.nan])
def test_one_wrong_rank_is_noticed(wrong: float) -> None:
    ranks = np.full(10, 0.1)
    assert graphs.check(ranks * (1 + 1e-12), ranks) < 1e-11
    found = ranks.copy()
    found[3] += wrong
    with pytest.raises(graphs.WrongRanks, match="1 of 10 ranks; vertex 3"):
        graphs.check(found, ranks)
    with pytest.raises(graphs.WrongRanks, match="9 ranks"):
        graphs.check(ranks[1:], ranks)


# ---------------------------------------------------------------- where things go


def test_ranges_go_to_nodes_by_their_cpus() -> None:
    ranges = [(i, i + 1) for i in range(12)]
    slots = workload.place(ranges, [("a" * 56, 1), ("b" * 56, 2)])
    assert [(slot.begin, slot.end) for slot in slots] == ranges
    tasks = [slot.task for slot in slots]
    assert [tasks.count(task) for task in dict.fromkeys(tasks)] == [4, 8]
    assert tasks == sorted(tasks, key=tasks.index)  # each node's are neighbours


def test_the_vector_is_asked_for_at_once_where_that_pays() -> None:
    whole = workload.whole_vector
    assert whole(1 << 20, 1000, 0)
    assert whole(1 << 20, 1000, 2 << 20)
    assert not whole(1 << 20, 1000, (2 << 20) - 1)  # it would push itself out
    assert not whole(1 << 20, 100, 0)  # fewer look-ups than blocks


# ------------------------------------------------------------- command line


def test_the_result_says_what_was_found(
    attached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = np.array([0.1, 0.4, 0.2, 0.3])
    lines = [
        workload.RankIteration(1, 0.0123, 0.5, 0.25, observe.Cost(12, 5 << 20, 1280, 256, 2)),
        workload.RankIteration(2, 0.0100, 0.25, 1e-7, observe.Cost()),
    ]
    outcome = workload.PageRankOutcome(ranks, lines, 3 << 20, 4e-13)
    monkeypatch.setattr(workload, "run", lambda *_: outcome)
    out = tmp_path / "ranks.parquet"
    result = CliRunner().invoke(workload.main, ["--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "converged after 2 iterations over 3.0 MiB, residual 1.00e-07" in result.output
    assert "largest relative difference 4e-13" in result.output
    assert "highest ranks: 1 (4.00e-01), 3 (3.00e-01)" in result.output
    (line,) = (text for text in result.output.splitlines() if text.startswith("         1 "))
    text = re.sub(" +", " ", line).strip()
    assert text == "1 2.50e-01 12.3 0.500 12 5.0 MiB 1.0 MiB 8.0 KiB"
    assert pq.read_table(out).to_pydict() == {
        "vertex": [1, 3, 2, 0],
        "rank": [0.4, 0.3, 0.2, 0.1],
    }


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> workload.PageRankJob:
    return workload.PageRankJob(**{"n_vertices": 20_000, "iterations": 4, "n_tasks": 4, **options})


@pytest.mark.parametrize("zigzag", [False, True])
def test_ranks_on_two_nodes(clamor_cluster: ClamorCluster, zigzag: bool, stages: Stages) -> None:
    outcome = workload.run(job(check=True, zigzag=zigzag, tolerance=0.0), stages)
    assert outcome.error is not None
    assert outcome.error < 1e-9
    assert [line.number for line in outcome.lines] == [1, 2, 3, 4]
    residuals = [line.residual for line in outcome.lines]
    assert residuals == sorted(residuals, reverse=True)
    assert outcome.ranks.sum() == pytest.approx(1.0)
    # The other node fetched its part of the graph in the first iteration, and keeps it.
    vector_blocks = 20_000 * 8 // 4096 + 2
    assert outcome.lines[0].cost.blocks_fetched > vector_blocks
    assert all(0 < line.cost.blocks_fetched <= vector_blocks for line in outcome.lines[1:])


def test_a_wrong_rank_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    real = graphs.shares

    def shares(ranks: Any, *arguments: Any) -> Any:
        out = real(ranks, *arguments)
        out[17] *= 1.01
        return out

    monkeypatch.setattr(graphs, "shares", shares)
    with pytest.raises(graphs.WrongRanks):
        workload.run(job(check=True), stages)
