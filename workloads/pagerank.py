"""PageRank over a power-law graph that a node need not have room for (Camelot 4; Page et al. 1999).

    python -m clamor_ray.workloads.pagerank --demo
    python -m clamor_ray.workloads.pagerank --vertices 4194304 --cache-bytes 64MiB

Two global variables: the graph, which never changes, and what each vertex gives along its edges,
which the driver updates in place in every iteration, so that each iteration reads a version of its
own. A task has a range of vertices. It goes over their edges in order, looks up what the sources
give, and returns the new ranks.

Why the ranks are returned and not written by the tasks: either way n numbers travel to the node
where the vector is homed. Returned, they are one commit an iteration and not one a task, the
driver has what the residual needs, and a task that is run again has no effect to repeat.

Why every range has its node: the edges that an iteration read are what the next one reads. Why
every other iteration goes backwards: where a cache holds less than what is gone over again and
again, what comes next is what was thrown out last, in any order of throwing out by age. Turning
round, it is what came last.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich import box
from rich.console import Console
from rich.table import Table

import clamor_ray as clamor

from .cli import observe
from .cli import tasks as _tasks
from .cli.options import cluster_options
from .cli.report import human_bytes
from .cli.waiting import finished, nodes_with_cpus, start_workers
from .data import graphs
from .data.graphs import Float64, Graph, WrongRanks
from .knn import Stages, attached

TASKS_PER_CPU = 4
TOP = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """What the command line asked for.

    Args:
        n_vertices: of the graph.
        degree: edges a vertex, on average.
        exponent: of the power law of degrees.
        damping: chance of following an edge.
        iterations: at the most.
        tolerance: L1 norm of the change of the ranks, below which it ends.
        n_tasks: of an iteration; None for TASKS_PER_CPU for each CPU.
        seed: of the graph.
        check: whether to compute the ranks in this process as well.
        zigzag: every other iteration goes backwards.
    """

    n_vertices: int
    degree: float = 16.0
    exponent: float = 2.1
    damping: float = 0.85
    iterations: int = 20
    tolerance: float = 1e-6
    n_tasks: int | None = None
    seed: int = 1
    check: bool = False
    zigzag: bool = True

    @property
    def n_edges(self) -> int:
        """Of the graph."""
        return round(self.n_vertices * self.degree)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One line of the result.

    Args:
        number: from 1.
        update_s: of the commit before the tasks.
        tasks_s: from the start of the tasks to the last answer.
        residual: L1 norm of the change of the ranks.
        cost: what the page servers of all nodes did in it.
    """

    number: int
    update_s: float
    tasks_s: float
    residual: float
    cost: observe.Cost


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a run.

    Args:
        ranks: of all vertices; they add up to 1.
        lines: one an iteration.
        graph_bytes: of both variables.
        error: largest relative difference from the check; None where there was none.
    """

    ranks: Float64
    lines: list[Iteration]
    graph_bytes: int
    error: float | None


@dataclasses.dataclass(frozen=True)
class Slot:
    """A range of vertices, and the task function of the node that has it in every iteration."""

    begin: int
    end: int
    task: Any


def place(ranges: list[tuple[int, int]], nodes: list[tuple[str, int]]) -> list[Slot]:
    """Contiguous ranges to nodes, as many as each has CPUs for.

    Args:
        ranges: (begin, end) of vertices.
        nodes: (Ray node id, CPUs).
    """
    cpus = [node_id for node_id, n_cpus in nodes for _ in range(n_cpus)]
    tasks = {
        node_id: clamor.remote(
            num_cpus=1,
            # Soft: where the node is lost another one takes its part.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
        )(_tasks.new_ranks)
        for node_id in dict.fromkeys(cpus)
    }
    return [
        Slot(begin, end, tasks[cpus[number * len(cpus) // len(ranges)]])
        for number, (begin, end) in enumerate(ranges)
    ]


def build(
    job: Job, done: Callable[[int], None] = lambda edges: None
) -> clamor.GlobalRef[graphs.Graph]:
    """The graph as a global variable, generated where it will be read: there is no second copy."""
    n_bytes = 4 * job.n_edges + 12 * job.n_vertices + (1 << 20)
    with clamor.region(n_bytes) as region:
        graph = graphs.generate(
            job.n_vertices, job.n_edges, job.exponent, job.seed, region.empty, done
        )
        return region.publish(graph)


class Tasks:
    """The iteration's step: an update in place, then a task for each range.

    Args:
        graph: the variable.
        vector: of n numbers, that every iteration changes.
        slots: who does what.
        zigzag: every other iteration goes backwards.
        whole: a task uses most of the vector, and a node's cache has room for it.
    """

    def __init__(
        self,
        graph: clamor.GlobalRef[Graph],
        vector: clamor.GlobalRef[Float64],
        slots: list[Slot],
        *,
        zigzag: bool,
        whole: bool,
    ) -> None:
        self.graph, self.vector, self.slots = graph, vector, slots
        self.zigzag, self.whole = zigzag, whole
        self.update_s = self.tasks_s = 0.0

    def step(self, number: int, quotients: Float64, base: float) -> Float64:
        """New ranks, and the seconds that this took in `update_s` and `tasks_s`."""
        start = time.perf_counter()
        with clamor.update(self.vector) as vector:
            vector[:] = quotients
        self.update_s = time.perf_counter() - start
        backward = self.zigzag and number % 2 == 1
        pending = {
            slot.task.remote(
                self.graph, self.vector, slot.begin, slot.end, base, backward, self.whole
            ): slot
            for slot in (reversed(self.slots) if backward else self.slots)
        }
        out = np.empty(len(quotients))
        for slot, ranks in finished(pending):
            out[slot.begin : slot.end] = ranks
        self.tasks_s = time.perf_counter() - start - self.update_s
        return out


def run(job: Job, stages: Stages) -> Outcome:
    """Builds the graph and ranks it, on the cluster that this process is attached to.

    Raises:
        WrongRanks: The ranks are not those that one process finds.
    """
    text = f"building a graph of {job.n_vertices:,} vertices and {job.n_edges:,} edges"
    with stages.stage("build", text, job.n_edges) as done:
        graph = build(job, done)
    try:
        with stages.stage("workers", "starting workers"):
            start_workers()
        return rank(graph, job, stages)
    finally:
        clamor.free(graph)


def rank(graph: clamor.GlobalRef[Graph], job: Job, stages: Stages) -> Outcome:
    """Ranks a graph that was put already; of the job, what is about ranking counts.

    Raises:
        WrongRanks: The ranks are not those that one process finds.
    """
    here = graph.get()
    nodes = nodes_with_cpus()
    n_tasks = job.n_tasks or TASKS_PER_CPU * sum(n_cpus for _, n_cpus in nodes)
    ranges = graphs.balanced_ranges(here.first_edge, n_tasks)
    vector = clamor.zeros(here.n_vertices, np.float64)
    lines: list[Iteration] = []
    try:
        whole = whole_vector(vector.nbytes, here.n_edges // len(ranges), observe.cache_bytes())
        tasks = Tasks(graph, vector, place(ranges, nodes), zigzag=job.zigzag, whole=whole)
        text = f"up to {job.iterations} iterations of {len(ranges)} tasks"
        with stages.stage("iterate", text, job.iterations) as done:
            before = observe.cost()
            ranks = np.empty(0)
            for new in graphs.iterate(here, tasks.step, job.damping, job.iterations, job.tolerance):
                ranks, residual = new
                after = observe.cost()
                number = len(lines) + 1
                lines.append(
                    Iteration(number, tasks.update_s, tasks.tasks_s, residual, after - before)
                )
                before = after
                done(number)
        error = None
        if job.check:
            with stages.stage("check", "checking against SciPy in this process"):
                expected = graphs.reference(here, job.damping, len(lines))
                error = graphs.check(ranks, expected)
        return Outcome(ranks, lines, graph.nbytes + vector.nbytes, error)
    finally:
        clamor.free(vector)


def whole_vector(vector_bytes: int, edges_of_task: int, cache_bytes: int) -> bool:
    """Whether a task asks for all of the vector at once.

    It does where it makes about as many look-ups as there are blocks, or more, and where half of a
    node's cache holds all of it: else the end of the vector would push out its beginning.

    Args:
        cache_bytes: the smallest of all nodes; 0 where there is no budget.
    """
    used = edges_of_task >= vector_bytes // 4096
    return used and (cache_bytes == 0 or vector_bytes <= cache_bytes // 2)


def print_iterations(console: Console, lines: list[Iteration]) -> None:
    """The table of a run: a line per iteration."""
    table = Table(
        title="Iterations, and what the page servers of all nodes did in them",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    headings = (
        *("iteration", "residual", "update\nms", "tasks\ns"),
        *("faults", "received", "evicted", "fetched\nagain"),
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            str(line.number),
            f"{line.residual:.2e}",
            f"{line.update_s * 1e3:.1f}",
            f"{line.tasks_s:.3f}",
            f"{line.cost.faults:,}",
            human_bytes(line.cost.bytes_received),
            human_bytes(line.cost.evicted_blocks * 4096),
            human_bytes(line.cost.refetched_blocks * 4096),
        )
    console.print(table)


def write(ranks: Float64, out: Path) -> None:
    """Parquet: vertex, rank; the best first."""
    order = np.argsort(-ranks, kind="stable")
    pq.write_table(pa.table({"vertex": order, "rank": ranks[order]}), out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--demo", is_flag=True, help="A graph of a million vertices on a local cluster.")
@click.option(
    "--vertices",
    "n_vertices",
    type=click.IntRange(1000, (1 << 32) - 1),
    help="Of the graph. Default: 4,194,304; 1,048,576 for the demo.",
)
@click.option(
    "--degree",
    default=16.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Edges a vertex, on average.",
)
@click.option(
    "--exponent",
    default=2.1,
    show_default=True,
    type=click.FloatRange(1, min_open=True),
    help="Of the power law of in- and out-degrees.",
)
@click.option(
    "--damping", default=0.85, show_default=True, type=click.FloatRange(0, 1, max_open=True)
)
@click.option("--iterations", default=20, show_default=True, type=click.IntRange(1))
@click.option(
    "--tolerance",
    default=1e-6,
    show_default=True,
    type=click.FloatRange(0),
    help="It ends where the ranks moved by less (L1 norm).",
)
@click.option("--tasks", type=click.IntRange(1), help=f"Default: {TASKS_PER_CPU} for each CPU.")
@click.option("--seed", default=1, show_default=True, help="Of the graph.")
@cluster_options
@click.option(
    "--check/--no-check",
    default=None,
    help="Rank in this process too, and compare. Default: for the demo.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Ranks, Parquet.")
def main(
    demo: bool,
    n_vertices: int | None,
    degree: float,
    exponent: float,
    damping: float,
    iterations: int,
    tolerance: float,
    tasks: int | None,
    seed: int,
    cache_bytes: str | None,
    cache_policy: str | None,
    nodes: int | None,
    check: bool | None,
    out: Path | None,
) -> None:
    """Ranks the vertices of a power-law graph, with a cap on what each node caches of it.

    Prints for each iteration how long it took, how far the ranks moved, and what was fetched,
    evicted, and fetched again for it.

    Exit status: 0; 1 where the ranks are wrong; 2 where an option makes no sense; 3 where the
    library cannot work here.
    """
    console = Console(highlight=False)
    stages = Stages(console)
    job = Job(
        n_vertices or (1 << 20 if demo else 1 << 22),
        *(degree, exponent, damping, iterations, tolerance, tasks, seed),
        check=demo if check is None else check,
    )
    try:
        with attached(
            nodes or (3 if demo else None),
            stages,
            cache_bytes=cache_bytes,
            cache_policy=cache_policy,
        ):
            outcome = run(job, stages)
    except WrongRanks as error:
        console.print(f"[red]WRONG RANKS:[/red] {error}", soft_wrap=True)
        sys.exit(1)
    except clamor.errors.ClamorError as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(3)
    if out is not None:
        write(outcome.ranks, out)
    print_outcome(console, job, outcome)
    if out is not None:
        console.print(f"\nranks  {out}", soft_wrap=True)


def print_outcome(console: Console, job: Job, outcome: Outcome) -> None:
    """What a run found, and what it took."""
    last = outcome.lines[-1]
    ended = "converged" if last.residual < job.tolerance else "stopped"
    checked = ""
    if outcome.error is not None:
        checked = f" All ranks equal SciPy's (largest relative difference {outcome.error:.0e})."
    best = np.argsort(-outcome.ranks)[:TOP].tolist()
    top = ", ".join(f"{v} ({outcome.ranks[v]:.2e})" for v in best)
    console.print(
        f"\n{ended} after {last.number} iterations over {human_bytes(outcome.graph_bytes)}, "
        f"residual {last.residual:.2e}.{checked}\nhighest ranks: {top}\n",
        soft_wrap=True,
    )
    print_iterations(console, outcome.lines)


if __name__ == "__main__":
    main()
