"""The main job: its pure parts against brute force, its command line, and a run over a cluster."""

from __future__ import annotations

import io
import itertools
import pickle
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from rich.console import Console

from clamor_ray.workloads import knn
from clamor_ray.workloads.cli import observe, report
from clamor_ray.workloads.cli.attaching import node_names
from clamor_ray.workloads.data import places
from clamor_ray.workloads.models import nearest

N = 5000
WIDTH = 32


class World:
    """Places, queries, and the index over them."""

    def __init__(self, n: int = N, seed: int = 5) -> None:
        self.coordinates = places.generate_coordinates(n, seed)
        self.ratings = places.generate_ratings(n, seed)
        self.metadata = np.random.default_rng(seed).integers(0, 256, (n, WIDTH), np.uint8)
        self.queries = places.generate_queries(200, seed)
        self.index = nearest.build(*self.coordinates, self.ratings, WIDTH)
        self.checksums = np.zeros(n, np.uint32)
        list(nearest.fill_metadata(self.index, self.chunks(), self.checksums))

    def chunks(self) -> Iterator[Any]:
        for first in range(0, len(self.metadata), 777):
            yield self.metadata[first : first + 777]

    def answers(self, k: int = 10) -> pa.Table:
        return nearest.query(self.index, 0, *self.queries, k)

    def check(self, result: pa.Table) -> int:
        return nearest.check(
            result, self.coordinates, self.ratings, self.checksums, self.queries, range(200)
        )


@pytest.fixture(scope="module")
def world() -> World:
    return World()


# -------------------------------------------------------------------- query


@pytest.mark.parametrize("k", [1, 2, 10, 33])
def test_answers_equal_brute_force(world: World, k: int) -> None:
    assert world.check(world.answers(k)) == 200


def test_k_of_all_places() -> None:
    small = World(n=1000)
    assert small.check(small.answers(1000)) == 200


def test_batches_answer_as_one(world: World) -> None:
    lat, lon = world.queries
    halves = [
        nearest.query(world.index, first, lat[first : first + 100], lon[first : first + 100], 10)
        for first in (0, 100)
    ]
    assert pa.concat_tables(halves).equals(world.answers().combine_chunks())


def test_distances_are_those_of_the_globe() -> None:
    """San Francisco to Los Angeles, and over the date line, to known lengths."""
    index = nearest.build(np.array([34.0522, 0.0]), np.array([-118.2437, -179.5]), [1, 1])
    got = nearest.query(index, 0, np.array([37.7749, 0.0]), np.array([-122.4194, 179.5]), 1)
    metres = nearest.matrix(got.column("distances_m"))[:, 0]
    assert metres[0] == pytest.approx(559_120, rel=1e-3)
    assert metres[1] == pytest.approx(2 * np.pi * nearest.EARTH_RADIUS_M / 360, rel=1e-9)


def test_best_rated_first_ties_by_distance() -> None:
    lat = np.array([0.0, 0.0, 0.0, 0.0])
    lon = np.array([4.0, 1.0, 2.0, 3.0])
    index = nearest.build(lat, lon, [5, 3, 5, 4])
    got = nearest.query(index, 0, np.zeros(1), np.zeros(1), 4)
    assert got.column("nearest").to_pylist() == [[2, 0, 3, 1]]
    assert got.column("ratings").to_pylist() == [[5, 5, 4, 3]]


def test_metadata_follows_its_place(world: World) -> None:
    np.testing.assert_array_equal(world.index.metadata, world.metadata[world.index.rows])
    assert world.checksums[17] == zlib.crc32(world.metadata[17].tobytes())


def test_too_little_metadata_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="4,000 of 5,000"):
        list(nearest.fill_metadata(world.index, [world.metadata[:4000]], np.zeros(N, np.uint32)))


def test_near_places_share_blocks() -> None:
    """Rows lie along the tree: the nearest of a query are close together in every array."""
    big = World(n=50_000)
    rows = np.argsort(big.index.rows)[nearest.matrix(big.answers().column("nearest"))]
    assert np.median(rows.max(axis=1) - rows.min(axis=1)) < 0.02 * 50_000
    assert np.abs(big.index.tree.indices - np.arange(50_000)).max() < 64


def test_the_index_is_read_from_read_only_buffers(world: World) -> None:
    """As a task has it: nothing of it may need to be written."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(world.index, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 4096
    held = pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert nearest.query(held, 0, *world.queries, 10).equals(world.answers())


# -------------------------------------------------------------------- check


def altered(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value
    field = table.schema.field(column)
    return table.set_column(
        table.schema.get_field_index(column), field, pa.array(values, field.type)
    )


def test_check_sees_a_wrong_distance(world: World) -> None:
    result = world.answers()
    distances = result.column("distances_m")[3].as_py()
    distances[9] += 1.0
    with pytest.raises(nearest.WrongAnswer, match="query 3: distances"):
        world.check(altered(result, "distances_m", 3, distances))


def test_check_sees_another_place(world: World) -> None:
    result = world.answers()
    rows = result.column("nearest")[4].as_py()
    same = np.flatnonzero(world.ratings == world.ratings[rows[9]])
    rows[9] = int(next(row for row in same if row not in rows))
    with pytest.raises(nearest.WrongAnswer, match=r"query 4: places .* not at those distances"):
        world.check(altered(result, "nearest", 4, rows))


def test_check_sees_a_rating_that_the_place_does_not_have(world: World) -> None:
    result = world.answers()
    with pytest.raises(nearest.WrongAnswer, match="query 5: ratings"):
        world.check(altered(result, "ratings", 5, [0.0] * 10))


def test_check_sees_zeros_for_metadata(world: World) -> None:
    wrong = zlib.crc32(bytes(WIDTH))
    with pytest.raises(nearest.WrongAnswer, match=r"query 6: metadata .* \(1 such"):
        world.check(altered(world.answers(), "best_metadata_crc32", 6, wrong))


def test_check_sees_a_lost_batch(world: World) -> None:
    with pytest.raises(nearest.WrongAnswer, match="150 answers to 200 queries"):
        world.check(world.answers().slice(50))


def test_check_sees_wrong_order(world: World) -> None:
    result = world.answers()
    wrong = {
        name: result.column(name)[7].as_py()[::-1] for name in ("nearest", "distances_m", "ratings")
    }
    for name, value in wrong.items():
        result = altered(result, name, 7, value)
    with pytest.raises(nearest.WrongAnswer, match=r"query 7: (metadata|places are not sorted)"):
        world.check(result)


# ------------------------------------------------------------------- result


def test_result_carries_the_users_ids(world: World) -> None:
    place_ids = pa.chunked_array([[f"p{i}" for i in range(N)]])
    result = knn.with_ids(world.answers(3), place_ids, np.arange(200))
    rows = nearest.matrix(world.answers(3).column("nearest"))
    assert result.column("nearest")[9].as_py() == [f"p{row}" for row in rows[9]]
    assert result.column("best")[9].as_py() == f"p{rows[9, 0]}"
    assert result.column("best_distance_m")[9].as_py() == result.column("distances_m")[9][0].as_py()
    assert result.column("query").to_pylist() == list(range(200))


def test_node_names() -> None:
    def node(name: str, host: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerHostname": host, "Alive": alive}

    here = [node("a", "h"), node("b", "h"), node("dead", "h", alive=False)]
    assert node_names(here, own="b") == [("b", "node 1"), ("a", "node 2")]
    assert node_names([node("a", "x"), node("b", "y")], own="a") == [("a", "x"), ("b", "y")]


# ------------------------------------------------------------------- report


def a_report(n_nodes: int = 3, moved: int = 20 << 20) -> report.RunReport:
    buckets = 4096
    nodes = []
    for number in range(n_nodes):
        touched = np.zeros(buckets, np.uint32)
        touched[100 * (number + 1) : 100 * (number + 1) + 50] = 64
        fetched = np.zeros_like(touched) if number == 0 else touched
        nodes.append(
            report.NodeReport(
                name=f"node {number + 1}",
                is_home=number == 0,
                tasks=4,
                blocks_fetched=int(fetched.sum()),
                bytes_received=0 if number == 0 else moved,
                touched=touched,
                fetched=fetched,
            )
        )
    sections = (
        report.Section("k-d tree", 4096, 20 << 20),
        report.Section("ratings", 4096 + (20 << 20), 2 << 20),
        report.Section("metadata", 4096 + (22 << 20), 1 << 30),
    )
    size = 4096 + (22 << 20) + (1 << 30)
    return report.RunReport(size, sections, tuple(nodes), 1000, 500, 10, (("query", 2.0),))


def test_report_says_what_moved_and_what_would_have() -> None:
    out = io.StringIO()
    report.print_report(Console(file=out, width=120), a_report())
    text = out.getvalue()
    for part in ("node 1 (home)", "20.0 MiB", "3,200", "40.0 MiB", "2.04 GiB", "52 times less"):
        assert part in text, part
    assert "1,000 (500/s)" in text


def test_report_of_one_node_divides_by_nothing() -> None:
    out = io.StringIO()
    report.print_report(Console(file=out, width=120), a_report(n_nodes=1))
    assert "nothing has to move" in out.getvalue()


def test_report_where_nothing_moved() -> None:
    out = io.StringIO()
    report.print_report(Console(file=out, width=120), a_report(moved=0))
    assert "0 B, 0.00% of that" in out.getvalue()


@pytest.mark.parametrize("n_nodes", [1, 3, 12])
def test_picture_shows_what_was_touched_where_it_was(tmp_path: Path, n_nodes: int) -> None:
    path = tmp_path / "touched.png"
    report.draw_touched(a_report(n_nodes), path)
    pixels = matplotlib.image.imread(path)[..., :3]
    blue = np.abs(pixels - np.array([0x1D, 0x5F, 0xA8]) / 255).sum(axis=-1) < 0.1
    legend = int(pixels.shape[0] - 0.45 * 160)
    columns = np.flatnonzero(blue[:legend].any(axis=0))
    assert len(columns)
    # Node i touched 50 of 4096 parts from 100 (i + 1) on: the strips move right one by one.
    rows = np.flatnonzero(blue[:legend].any(axis=1))
    strips = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    assert len(strips) == n_nodes
    starts = [np.flatnonzero(blue[strip[len(strip) // 2]])[0] for strip in strips]
    assert starts == sorted(starts)


def test_coverage_keeps_a_single_block_of_a_large_section() -> None:
    counts = np.zeros(65536, np.uint32)
    counts[40_000] = 1
    share = report._coverage(counts, 1 << 30, 0, 1 << 30)
    assert (share > 0).sum() in (1, 2)


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.00 GiB")]
)
def test_human_bytes(n: int, text: str) -> None:
    assert report.human_bytes(n) == text


def test_sections_are_the_fields(world: World) -> None:
    from clamor_ray._objects import layout

    plan = layout.take_apart(world.index).plan
    parts = observe.sections(world.index, plan)
    assert [part.name for part in parts] == ["k-d tree", "rows", "ratings", "metadata"]
    assert parts[-1].length_bytes == N * WIDTH
    assert parts[-1].offset_bytes + parts[-1].length_bytes == plan.total_bytes
    for one, two in itertools.pairwise(parts):
        assert one.offset_bytes + one.length_bytes <= two.offset_bytes


# ------------------------------------------------------------- command line


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    list(places.write_places(tmp_path / "p.parquet", 1000, 1, 16))
    places.write_queries(tmp_path / "q.parquet", 20, 1)
    return str(tmp_path / "p.parquet"), str(tmp_path / "q.parquet")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.parquet", "{q}"], "none.parquet: no such file"),
        (["{p}", "none.csv"], "none.csv: no such file"),
        (["{q}", "{q}"], "no column 'rating'"),
        (["{p}", "{q}", "-k", "1001"], "-k 1001: .* only 1,000 places"),
        (["--demo", "--places", "1000", "-k", "1001"], "-k 1001: .* only 1,000 places"),
    ],
)
def test_bad_input_is_refused_before_a_cluster_starts(
    no_cluster: None,
    files: tuple[str, str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    filled = [argument.format(p=files[0], q=files[1]) for argument in arguments]
    result = CliRunner().invoke(knn.main, [*filled, "--dir", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output), result.output


# ------------------------------------------------------------------ cluster
