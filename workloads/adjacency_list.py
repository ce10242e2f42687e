"""From edges to who leads where, and who is led to from where: forward and reverse adjacency.

    python -m clamor_ray.workloads.adjacency_list --demo
    python -m clamor_ray.workloads.adjacency_list 'edges-*.parquet' --out lists

The edges are sorted over the cluster, once by source and once by target, so that a partition has
all edges of its vertices; each then makes its lists. Degrees follow a power law: a hub's list is
in one piece, and the partition that has it is larger than the others.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

import clamor_ray as clamor

from .cli import options
from .cli.program import CommandRun, program, refuse_both
from .cli.results import print_rows
from .cli.stages import Stages
from .cli.waiting import default_partitions, start_workers
from .data import adjacency
from .data.adjacency import Edges, WrongLists
from .data.errors import InputError

DIRECTIONS = {"forward": ("source", "target"), "reverse": ("target", "source")}


@dataclasses.dataclass(frozen=True)
class AdjacencyJob:
    """What the command line asked for.

    Args:
        edges: what to generate; None where edges are read.
        data: path or glob of Parquet files with integer columns source and target.
        n_partitions: of edges that are read; None for `default_partitions()`.
        out: folder for the lists, as Parquet; None for nowhere.
        check: whether to make them in this process as well.
    """

    edges: Edges | None
    data: str | None = None
    n_partitions: int | None = None
    out: str | None = None
    check: bool = False


@dataclasses.dataclass(frozen=True)
class Direction:
    """One line of the result.

    Args:
        name: "forward" or "reverse".
        seconds: to sort and to make the lists.
        n_vertices: that have a list.
        n_edges: in all of them.
        longest: how many neighbours the vertex with most of them has.
        hub: that vertex.
    """

    name: str
    seconds: float
    n_vertices: int
    n_edges: int
    longest: int
    hub: int


def load(job: AdjacencyJob) -> Any:
    """The edges as a collection of rows with source and target; nothing runs yet."""
    if job.edges is None:
        n = job.n_partitions or default_partitions()
        return clamor.read_parquet(job.data, columns=["source", "target"], partitions=n)
    n = job.edges.n_partitions
    return clamor.from_numpy(np.arange(n), partitions=n).map_batches(adjacency.generate, job.edges)


def lists(edges: Any, by: str, other: str) -> Any:
    """Rows of vertex and neighbours, in order; nothing runs yet."""
    return edges.sort(by).map_batches(adjacency.lists_of, by, other)


def run(job: AdjacencyJob, stages: Stages) -> list[Direction]:
    """Makes both lists and checks them, on the cluster that this process is attached to.

    Raises:
        InputError: There are no edges.
        WrongLists: They are not those that one process makes.
    """
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    with stages.stage("load", "loading edges"):
        edges = load(job).cache()
        n_edges = edges.count()
    if not n_edges:
        raise InputError(f"{job.data} has no edges")
    lines, tables = [], {}
    for name, (by, other) in DIRECTIONS.items():
        with stages.stage(name, f"{name} lists of {n_edges:,} edges"):
            start = time.perf_counter()
            made = lists(edges, by, other).cache()
            made.execute()
            seconds = time.perf_counter() - start
        with stages.stage("collect", f"collecting {name} lists"):
            if job.out is not None:
                made.write_parquet(f"{job.out.rstrip('/')}/{name}")
            tables[name] = made.to_arrow()
        lines.append(describe(name, seconds, tables[name]))
        if lines[-1].n_edges != n_edges:
            raise WrongLists(f"{name}: {lines[-1].n_edges:,} neighbours of {n_edges:,} edges")
    if job.check:
        with stages.stage("check", "checking against the same in this process"):
            batches = parts(job, edges)
            for name, (by, other) in DIRECTIONS.items():
                adjacency.check(name, tables[name], adjacency.reference(batches, by, other))
    return lines


def describe(name: str, seconds: float, table: pa.Table) -> Direction:
    """What there is to say of a table of lists."""
    lengths = pc.list_value_length(table.column("neighbours"))
    longest = pc.max(lengths).as_py()
    hub = table.column("vertex")[pc.index(lengths, longest).as_py()].as_py()
    return Direction(name, seconds, table.num_rows, pc.sum(lengths).as_py(), longest, hub)


def parts(job: AdjacencyJob, edges: Any) -> list[adjacency.Batch]:
    """The edges in this process, for the check."""
    if job.edges is not None:
        return [job.edges.partition(i) for i in range(job.edges.n_partitions)]
    table = edges.to_arrow()
    return [{name: table.column(name).to_numpy() for name in ("source", "target")}]


@program("A million edges on a local cluster.")
@click.argument("data", metavar="[EDGES]", required=False)
@click.option(
    "--vertices",
    "n_vertices",
    default=1 << 17,
    show_default=True,
    type=click.IntRange(2, (1 << 31) - 1),
    help="Of generated edges.",
)
@options.count("--edges", "n_edges", "To generate. Default: 1,000,000.")
@options.exponent("Of the power law of in- and out-degrees.")
@options.seed("Of the edges.")
@options.partitions()
@click.option("--out", help="Folder for forward and reverse lists, Parquet; also s3://.")
@options.check("Make the lists")
def main(
    asked: CommandRun,
    data: str | None,
    n_vertices: int,
    n_edges: int | None,
    exponent: float,
    seed: int,
    n_partitions: int | None,
    out: str | None,
    check: bool,
) -> None:
    """Makes lists of neighbours of EDGES, Parquet files with integer columns source and target.

    The lists have a row a vertex, in order: vertex, and neighbours, sorted. An edge that repeats is
    there as often. Vertices without an edge in that direction have no list.

    Exit status: 0; 1 where a list is wrong; 2 where the input cannot be used; 3 where the library
    cannot work here.
    """
    refuse_both(data, {"--demo": asked.demo, "--edges": n_edges}, "edges")
    if not data and not (asked.demo or n_edges):
        raise click.UsageError("give EDGES, or --demo")
    with asked.attached():
        edges = None
        if not data:
            n = n_partitions or default_partitions()
            edges = Edges(n_vertices, n_edges or 1_000_000, n, exponent, seed)
        lines = run(AdjacencyJob(edges, data, n_partitions, out, check), asked.stages)
    same = " All lists equal those of one process." if check else ""
    asked.say(f"\n{lines[0].n_edges:,} edges.{same}\n")
    print_lines(asked.console, lines)
    asked.wrote(lists=out)


def print_lines(console: Console, lines: list[Direction]) -> None:
    """The table of a run: a line per direction."""
    rows = (
        (
            line.name,
            f"{line.seconds:.2f}",
            f"{line.n_edges / line.seconds:,.0f}",
            f"{line.n_vertices:,}",
            f"{line.longest:,}",
            f"{line.hub:,}",
        )
        for line in lines
    )
    headings = ("lists", "s", "edges/s", "vertices", "longest", "of vertex")
    print_rows(console, headings, rows, names=True)


if __name__ == "__main__":
    main()
