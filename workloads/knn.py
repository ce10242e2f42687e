"""Nearest places, best rated first: the main job (Clamor 7.1.1).

    python -m clamor_ray.workloads.knn PLACES QUERIES -k 10 --out RESULT.parquet
    python -m clamor_ray.workloads.knn --demo

The driver builds a k-d tree over the places and puts it once, with ratings and metadata. Tasks on
all nodes answer batches of queries from it as from their own memory. The job ends with what each
node had to fetch for that, and with a check of the answers against brute force.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

import clamor_ray as clamor

from .cli import observe, options, report
from .cli.attaching import node_names
from .cli.program import CommandRun, program
from .cli.stages import Stages
from .cli.waiting import finished
from .data import places
from .data.errors import InputError
from .models import nearest

BATCHES_PER_CPU = 4
HISTOGRAM_BUCKETS = 1 << 16

Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class NearestJob:
    """What the command line asked for, checked."""

    places: Path | str
    queries: Path | str
    k: int
    tasks: int | None
    sample: int
    seed: int
    out: Path
    picture: Path


def answer(index: nearest.PlaceIndex, first: int, lat: Float64, lon: Float64, k: int) -> Any:
    """The task: answers, and the node that gave them."""
    return nearest.query(index, first, lat, lon, k), ray.get_runtime_context().get_node_id()


@dataclasses.dataclass
class Prepared:
    """The user's data, read and checked, and the variable made of it. No cluster yet."""

    table: places.PlacesTable
    query_table: places.PlacesTable
    coordinates: tuple[Float64, Float64]
    ratings: npt.NDArray[np.float32]
    queries: tuple[Float64, Float64]
    checksums: npt.NDArray[np.uint32] | None
    index: nearest.PlaceIndex | None

    def take_index(self) -> nearest.PlaceIndex:
        """Gives the index away: it may be gigabytes, and has one holder."""
        index, self.index = self.index, None
        if index is None:
            raise RuntimeError("the index was taken already")
        return index


def prepare(job: NearestJob, stages: Stages) -> Prepared:
    """Reads and builds.

    Raises:
        InputError: the data cannot be used.
    """
    table = places.PlacesTable.open(job.places, ["lat", "lon", "rating"])
    query_table = places.PlacesTable.open(job.queries, ["lat", "lon"])
    if job.k > table.rows:
        raise InputError(
            f"-k {job.k}: {table.path} has only {table.rows:,} places; take k up to that"
        )
    with stages.stage("read", f"reading coordinates of {table.rows:,} places"):
        coordinates = table.coordinates()
        ratings = table.numbers("rating").astype(np.float32)
        width = table.metadata_width()
        queries = query_table.coordinates()
    with stages.stage("build", "building the k-d tree"):
        index = nearest.build(*coordinates, ratings, width)
    checksums = None
    if width:
        text = f"laying out metadata of {width:,} bytes a place along the tree"
        with stages.stage("build", text, table.rows) as done:
            checksums = np.empty(table.rows, np.uint32)
            for rows in nearest.fill_metadata(index, table.metadata(width), checksums):
                done(rows)
    return Prepared(table, query_table, coordinates, ratings, queries, checksums, index)


def run(job: NearestJob, data: Prepared, stages: Stages) -> report.RunReport:
    """Runs the job on the cluster that this process is attached to.

    Raises:
        nearest.Mismatch: the answers are wrong.
    """
    index = data.take_index()
    table, query_table = data.table, data.query_table
    with stages.stage("put", "putting the variable"):
        ref = clamor.put(index)
    try:
        sections = observe.sections(index, ref._plan)
        del index  # the variable has it now; what is left of the table checks the answers
        before = observe.node_counters(ref)
        result, tasks_by_node = _query(ref, data.queries, job, stages)
        after = observe.node_counters(ref)
        touched = observe.block_map(ref, "touched", HISTOGRAM_BUCKETS)
        fetched = observe.block_map(ref, "fetched", HISTOGRAM_BUCKETS)
        variable_bytes = ref._plan.total_bytes  # what the report cuts in parts
    finally:
        clamor.free(ref)

    with stages.stage("check", "checking against brute force", job.sample) as done:
        rng = np.random.default_rng(job.seed)
        chosen = rng.permutation(query_table.rows)[: job.sample].tolist()
        compared = nearest.check(
            result,
            data.coordinates,
            data.ratings,
            data.checksums,
            data.queries,
            _counted(chosen, done),
        )
    with stages.stage("write", f"writing {job.out}"):
        pq.write_table(with_ids(result, table.ids(), query_table.ids()), job.out)

    best = nearest.matrix(result.column("distances_m"))[:, 0]
    checked = f"{compared:,} answers equal brute force"
    if data.checksums is not None:
        checked += f", and all {query_table.rows:,} metadata checksums are right"
    stages.console.print(
        f"\n{checked}. Mean distance to the best rated of the {job.k} nearest: "
        f"[bold]{float(best.mean()):,.1f} m[/bold]\n"
    )
    empty = np.zeros(HISTOGRAM_BUCKETS, np.uint32)
    none = observe.NodeCounters(0, 0, False)
    own = ray.get_runtime_context().get_node_id()
    if not any(counters.is_home for counters in after.values()):
        # It was so small that it travelled inside its reference.
        after[own] = dataclasses.replace(after.get(own, none), is_home=True)
    nodes = tuple(
        report.NodeReport(
            name=name,
            is_home=after.get(node_id, none).is_home,
            tasks=tasks_by_node[node_id],
            blocks_fetched=after.get(node_id, none).blocks_fetched,
            bytes_received=after.get(node_id, none).bytes_received
            - before.get(node_id, none).bytes_received,
            touched=touched.get(node_id, empty),
            fetched=fetched.get(node_id, empty),
        )
        for node_id, name in node_names(ray.nodes(), own)
    )
    return report.RunReport(
        variable_bytes=variable_bytes,
        sections=sections,
        nodes=nodes,
        queries=query_table.rows,
        places=table.rows,
        k=job.k,
        seconds=tuple(stages.seconds.items()),
    )


def _query(
    ref: clamor.GlobalRef[nearest.PlaceIndex],
    queries: tuple[Float64, Float64],
    job: NearestJob,
    stages: Stages,
) -> tuple[pa.Table, Counter[str]]:
    """Spreads batches of queries over the cluster; answers in the order of the queries."""
    n = len(queries[0])
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    n_tasks = min(n, job.tasks or BATCHES_PER_CPU * cpus)
    edges = np.linspace(0, n, n_tasks + 1).astype(int).tolist()
    task = clamor.remote(num_cpus=1, scheduling_strategy="SPREAD")(answer)
    parts: dict[int, pa.Table] = {}
    by_node: Counter[str] = Counter()
    with stages.stage("query", f"answering {n:,} queries in {n_tasks:,} tasks", n) as done:
        pending = {
            task.remote(ref, begin, queries[0][begin:end], queries[1][begin:end], job.k): begin
            for begin, end in itertools.pairwise(edges)
        }
        answered = 0
        for begin, (part, node_id) in finished(pending):
            parts[begin] = part
            by_node[node_id] += 1
            answered += part.num_rows
            done(answered)
    return pa.concat_tables([parts[begin] for begin in sorted(parts)]), by_node


def _counted(items: list[int], done: Any) -> Iterator[int]:
    for number, item in enumerate(items, 1):
        yield item
        done(number)


def with_ids(result: pa.Table, place_ids: Any, query_ids: Any) -> pa.Table:
    """The result as a user wants it: their own ids, and the best place beside the list."""
    rows = nearest.matrix(result.column("nearest"))
    k = rows.shape[1]
    ids = _take(place_ids, rows.reshape(-1))
    best = pa.array(np.arange(0, rows.size, k))
    return pa.table(
        {
            "query": _take(query_ids, result.column("query").to_numpy()),
            "nearest": pa.FixedSizeListArray.from_arrays(ids, k),
            "distances_m": result.column("distances_m"),
            "ratings": result.column("ratings"),
            "best": ids.take(best),
            "best_distance_m": nearest.matrix(result.column("distances_m"))[:, 0],
            "best_rating": nearest.matrix(result.column("ratings"))[:, 0],
            "best_metadata_crc32": result.column("best_metadata_crc32"),
        }
    )


def _take(ids: Any, rows: npt.NDArray[Any]) -> pa.Array:
    if not isinstance(ids, pa.ChunkedArray):
        return pa.array(ids[rows])
    taken = pc.take(ids, pa.array(rows))
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


# ------------------------------------------------------------- command line


def generate(folder: Path, n_places: int, n_queries: int, seed: int, stages: Stages) -> Path:
    """Writes places.parquet and queries.parquet into the folder."""
    with stages.stage("generate", f"generating {n_places:,} places", n_places) as done:
        for rows in places.write_places(folder / "places.parquet", n_places, seed):
            done(rows)
        places.write_queries(folder / "queries.parquet", n_queries, seed)
    return folder


@program("Generate places and queries instead of reading them.")
@click.argument("places_path", metavar="[PLACES]", required=False)
@click.argument("queries_path", metavar="[QUERIES]", required=False)
@options.number("-k", 10, "Nearest to find.")
@options.new_file("--out", "Result, Parquet.")
@options.new_folder(
    "--dir",
    "Where the demo's data, the result and the picture go. Default: beside --out, or a new "
    "temporary folder, which is named.",
    "folder",
)
@options.new_file("--picture", "PNG to write.")
@click.option(
    "--places",
    "n_places",
    default=1 << 19,
    show_default=True,
    type=click.IntRange(1000),
    help="Places to generate; 2 KiB of metadata each.",
)
@click.option(
    "--queries",
    "n_queries",
    default=100_000,
    show_default=True,
    type=click.IntRange(1),
    help="Queries to generate.",
)
@options.seed("Of the generator and of the check.")
@options.count("--tasks", None, f"Default: {BATCHES_PER_CPU} for each CPU.")
@options.sample()
def main(
    asked: CommandRun,
    places_path: str | None,
    queries_path: str | None,
    k: int,
    out: Path | None,
    folder: Path | None,
    picture: Path | None,
    n_places: int,
    n_queries: int,
    seed: int,
    tasks: int | None,
    sample: int,
) -> None:
    """Finds the K nearest PLACES of each of the QUERIES, best rated first.

    PLACES: Parquet or CSV with lat, lon (degrees), rating, and optionally metadata (bytes or
    text) and id. QUERIES: lat, lon, and optionally id. The result lists for each query the
    nearest places with distances in metres, the best of them, and a checksum of its metadata.

    Exit status: 0; 1 where answers differ from brute force; 2 where the input cannot be used;
    3 where the library cannot work here.
    """
    if asked.demo and places_path:
        raise click.UsageError("--demo makes its own data: leave out PLACES and QUERIES")
    if not asked.demo and not (places_path and queries_path):
        raise click.UsageError("give PLACES and QUERIES, or --demo")
    if folder is None:
        folder = out.parent if out else Path(tempfile.mkdtemp(prefix="clamor-knn-"))
    folder.mkdir(parents=True, exist_ok=True)
    out = out or folder / "result.parquet"
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = picture or out.with_suffix(".png")
    if asked.demo:
        if k > n_places:
            raise InputError(f"-k {k}: there are only {n_places:,} places")
        generate(folder, n_places, n_queries, seed, asked.stages)
        places_path = str(folder / "places.parquet")
        queries_path = str(folder / "queries.parquet")
    assert places_path
    assert queries_path
    job = NearestJob(places_path, queries_path, k, tasks, sample, seed, out, picture)
    data = prepare(job, asked.stages)  # bad input is refused before a cluster starts for it
    with asked.attached():
        outcome = run(job, data, asked.stages)
    report.print_report(asked.console, outcome)
    report.draw_touched(outcome, picture)
    asked.wrote(result=out, picture=picture)


if __name__ == "__main__":
    main()
