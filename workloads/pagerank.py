"""PageRank over a power-law graph that a node need not have room for (Camelot 4; Page et al. 1999).

    python -m clamor_ray.workloads.pagerank --demo
    python -m clamor_ray.workloads.pagerank --vertices 4194304 --cache-bytes 64MiB

Two global variables: the graph, which never changes, and what each vertex gives along its edges,
which the driver updates in place in every iteration, so that each iteration reads a version of its
own. A task has a range of vertices. It goes over their edges in order, looks up what the sources
give, and returns the new ranks.

Why the ranks are returned and not written by the tasks: either way n numbers travel to the home of
the vector. Returned, they are one commit an iteration and not one a task, the driver has what the
residual needs, and a task that is run again has no effect to repeat.

Every range has its node: the edges that an iteration read are what the next one reads. Every other
iteration goes backwards: where a cache holds less than what is gone over again and again, what
comes next is what was evicted last, in any order by age. Turning round, it is what came last.

With --recipes the iterations are a program of stages (`recipes/pagerank.py`), without any variable:
a partition has a range of vertices and their edges, and what it gives along them goes in messages.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

import clamor_ray as clamor

from .cli import observe, options, running
from .cli import tasks as _tasks
from .cli.program import CommandRun, program
from .cli.report import human_bytes
from .cli.results import TRAFFIC, WHAT_SERVERS_DID, print_rows, traffic
from .cli.stages import Stages
from .cli.waiting import finished, nodes_with_cpus, start_workers
from .data import graphs
from .data.graphs import Float64, Graph
from .recipes.pagerank import cut_graph, describe_pagerank

TASKS_PER_CPU = 4
TOP = 5


@dataclasses.dataclass(frozen=True)
class PageRankJob:
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
        recipes: as a program, without the driver.
        progress_picture: of that program, to write.
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
    recipes: bool = False
    progress_picture: Path | None = None

    @property
    def n_edges(self) -> int:
        """Of the graph."""
        return round(self.n_vertices * self.degree)


@dataclasses.dataclass(frozen=True)
class RankIteration:
    """One line of the result.

    Args:
        number: from 1.
        update_s: of the commit before the tasks.
        tasks_s: from the start of the tasks to the last answer.
        residual: L1 norm of the change of the ranks.
        cost: what the page servers of all nodes did in it; of a program: nobody asks in between.
    """

    number: int
    update_s: float
    tasks_s: float
    residual: float
    cost: observe.Cost | None


@dataclasses.dataclass(frozen=True)
class PageRankOutcome:
    """Of a run.

    Args:
        ranks: of all vertices; they add up to 1.
        lines: one an iteration.
        graph_bytes: of both variables, or of the partitions.
        error: largest relative difference from the check; None where there was none.
        progress: of a program; None where there was none.
    """

    ranks: Float64
    lines: list[RankIteration]
    graph_bytes: int
    error: float | None
    progress: Any = None


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
    job: PageRankJob, done: Callable[[int], None] = lambda edges: None
) -> clamor.GlobalRef[graphs.Graph]:
    """The graph as a global variable, generated where it will be read: there is no second copy."""
    n_bytes = 4 * job.n_edges + 12 * job.n_vertices + (1 << 20)
    with clamor.build(n_bytes) as region:
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


def run(job: PageRankJob, stages: Stages) -> PageRankOutcome:
    """Builds the graph and ranks it, on the cluster that this process is attached to.

    Raises:
        WrongRanks: The ranks are not those that one process finds.
    """
    text = f"building a graph of {job.n_vertices:,} vertices and {job.n_edges:,} edges"
    if job.recipes:
        return run_program(job, stages, text)
    with stages.stage("build", text, job.n_edges) as done:
        graph = build(job, done)
    try:
        with stages.stage("workers", "starting workers"):
            start_workers()
        return rank(graph, job, stages)
    finally:
        clamor.free(graph)


def rank(graph: clamor.GlobalRef[Graph], job: PageRankJob, stages: Stages) -> PageRankOutcome:
    """Ranks a graph that was put already; of the job, what is about ranking counts.

    Raises:
        WrongRanks: The ranks are not those that one process finds.
    """
    here = graph.get()
    nodes = nodes_with_cpus()
    n_tasks = job.n_tasks or TASKS_PER_CPU * sum(n_cpus for _, n_cpus in nodes)
    ranges = graphs.balanced_ranges(here.first_edge, n_tasks)
    vector = clamor.zeros(here.n_vertices, np.float64)
    lines: list[RankIteration] = []
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
                    RankIteration(number, tasks.update_s, tasks.tasks_s, residual, after - before)
                )
                before = after
                done(number)
        error = check_ranks(ranks, here, job, len(lines), stages)
        return PageRankOutcome(ranks, lines, graph.nbytes + vector.nbytes, error)
    finally:
        clamor.free(vector)


def run_program(job: PageRankJob, stages: Stages, text: str) -> PageRankOutcome:
    """All iterations as one program, whose partitions are ranges of the graph.

    Raises:
        WrongRanks: The ranks are not those that one process finds.
    """
    with stages.stage("build", text, job.n_edges) as done:
        graph = graphs.generate(job.n_vertices, job.n_edges, job.exponent, job.seed, done=done)
        n_parts = job.n_tasks or TASKS_PER_CPU * sum(n_cpus for _, n_cpus in nodes_with_cpus())
        parts = cut_graph(graph, n_parts)
    p = clamor.Program()
    of = describe_pagerank(p, parts, job.damping, job.iterations, job.tolerance)
    text = f"up to {job.iterations} iterations of {len(parts)} partitions"
    with running.ended(p, stages, text, job.iterations, job.progress_picture) as (ran, progress):
        ranks = np.concatenate(ran.result(of.ranks))
        lines = [
            RankIteration(number, line.update_s, line.tasks_s, line.moved, None)
            for number, line in enumerate(ran.result(of.lines), 1)
        ]
    n_bytes = sum(part.n_bytes for part in parts) + ranks.nbytes
    error = check_ranks(ranks, graph, job, len(lines), stages)
    return PageRankOutcome(ranks, lines, n_bytes, error, progress)


def check_ranks(
    ranks: Float64, graph: Graph, job: PageRankJob, iterations: int, stages: Stages
) -> float | None:
    """The largest relative difference from SciPy's; None where nobody asked.

    Raises:
        WrongRanks: A rank is not that.
    """
    if not job.check:
        return None
    with stages.stage("check", "checking against SciPy in this process"):
        return graphs.check(ranks, graphs.reference(graph, job.damping, iterations))


def whole_vector(vector_bytes: int, edges_of_task: int, cache_bytes: int) -> bool:
    """Whether a task asks for all of the vector at once.

    It does where it makes about as many look-ups as there are blocks, or more, and where half of a
    node's cache holds all of it: else the end of the vector would push out its beginning.

    Args:
        cache_bytes: the smallest of all nodes; 0 where there is no budget.
    """
    used = edges_of_task >= vector_bytes // 4096
    return used and (cache_bytes == 0 or vector_bytes <= cache_bytes // 2)


def print_iterations(console: Console, lines: list[RankIteration]) -> None:
    """The table of a run: a line per iteration."""
    rows = (
        (
            str(line.number),
            f"{line.residual:.2e}",
            f"{line.update_s * 1e3:.1f}",
            f"{line.tasks_s:.3f}",
            *(traffic(line.cost) if line.cost is not None else ()),
        )
        for line in lines
    )
    headings = ["iteration", "residual", "update\nms", "tasks\ns"]
    title = "Iterations"
    if lines[0].cost is not None:
        headings += TRAFFIC
        title += f", {WHAT_SERVERS_DID}"
    print_rows(console, headings, rows, title=title)


def write(ranks: Float64, out: Path) -> None:
    """Parquet: vertex, rank; the best first."""
    order = np.argsort(-ranks, kind="stable")
    pq.write_table(pa.table({"vertex": order, "rank": ranks[order]}), out)


@program("A graph of a million vertices on a local cluster.")
@click.option(
    "--vertices",
    "n_vertices",
    type=click.IntRange(1000, (1 << 32) - 1),
    help="Of the graph. Default: 4,194,304; 1,048,576 for the demo.",
)
@options.real("--degree", 16.0, "Edges a vertex, on average.", above=True)
@options.exponent("Of the power law of in- and out-degrees.")
@click.option(
    "--damping", default=0.85, show_default=True, type=click.FloatRange(0, 1, max_open=True)
)
@options.number("--iterations", 20)
@options.real("--tolerance", 1e-6, "It ends where the ranks moved by less (L1 norm).")
@options.count("--tasks", "n_tasks", f"Default: {TASKS_PER_CPU} for each CPU.")
@options.seed("Of the graph.")
@options.check("Rank")
@options.new_file("--out", "Ranks, Parquet.")
@running.recipes_options
def main(asked: CommandRun, n_vertices: int | None, out: Path | None, **of_job: Any) -> None:
    """Ranks the vertices of a power-law graph, with a cap on what each node caches of it.

    Prints for each iteration how long it took, how far the ranks moved, and what was fetched,
    evicted, and fetched again for it: with --recipes nothing is, and nobody asks.

    Exit status: 0; 1 where the ranks are wrong; 2 where an option makes no sense; 3 where the
    library cannot work here.
    """
    job = PageRankJob(n_vertices or (1 << 20 if asked.demo else 1 << 22), **of_job)
    running.check_options(job.progress_picture, job.recipes)
    with asked.attached():
        outcome = run(job, asked.stages)
    if out is not None:
        write(outcome.ranks, out)
    print_outcome(asked, job, outcome)
    asked.wrote(ranks=out, progress=job.progress_picture)


def print_outcome(asked: CommandRun, job: PageRankJob, outcome: PageRankOutcome) -> None:
    """What a run found, and what it took."""
    last = outcome.lines[-1]
    ended = "converged" if last.residual < job.tolerance else "stopped"
    checked = ""
    if outcome.error is not None:
        checked = f" All ranks equal SciPy's (largest relative difference {outcome.error:.0e})."
    best = np.argsort(-outcome.ranks)[:TOP].tolist()
    top = ", ".join(f"{v} ({outcome.ranks[v]:.2e})" for v in best)
    asked.say(
        f"\n{ended} after {last.number} iterations over {human_bytes(outcome.graph_bytes)}, "
        f"residual {last.residual:.2e}.{checked}\nhighest ranks: {top}\n"
    )
    print_iterations(asked.console, outcome.lines)
    running.print_progress(asked, outcome.progress)


if __name__ == "__main__":
    main()
