"""Sort of records that a node need not have room for (Clamor 7; sortbenchmark.org).

    python -m clamor_ray.workloads.sort --demo
    python -m clamor_ray.workloads.sort --records 10000000 --cache-bytes 64MiB

The records are a global variable. A sample of their keys gives splitters, which cut all keys into
ranges of about equal size. A first task for each part of the input sorts it into a run; a second
one for each range takes its rows out of all runs and sorts them into a partition. The partitions
one after the other are the result. Each record crosses the network at most twice.

Why runs, and not a task for each range that looks for its records in the input: they are everywhere
in it, some in every block, so that each such task would fetch all of it. In sorted runs its records
lie together.

Why runs and partitions are variables of their own, built by the tasks, and not ranges of one large
variable that tasks change in transactions: such a variable has one home, to which all that is
sorted would travel, to be written there a second time; each task would make a version of it, of
which nobody wants but the last; and its first write to a block would ask for zeros. A variable that
a task builds lies on the task's own node from the first byte. What is lost is one address for all;
the partitions are in order, and each is an array of rows.

What a node has in memory: the homes of what was built on it, its cache within its budget, and for
each task that runs one partition, with about 30 bytes of keys and order a record.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

import clamor_ray as clamor

from .cli import observe, options
from .cli import tasks as _tasks
from .cli.program import CommandRun, program
from .cli.report import human_bytes
from .cli.results import TRAFFIC, WHAT_SERVERS_DID, print_rows, traffic
from .cli.stages import Stages
from .cli.waiting import finished, nodes_with_cpus, start_workers
from .data import records
from .data.records import RECORD_BYTES, Keys, Records

WINDOW_BYTES = 16 << 20
SAMPLES = 256  # a partition: its size is within a fifth of the mean, nearly always


@dataclasses.dataclass(frozen=True)
class SortJob:
    """What the command line asked for.

    Args:
        n_records: to generate.
        partition_bytes: of a run and, about, of a partition.
        seed: of the records and of the sample.
    """

    n_records: int
    partition_bytes: int
    seed: int = 1

    @property
    def n_partitions(self) -> int:
        """Of the result; and as many runs."""
        return max(1, -(-self.n_records * RECORD_BYTES // self.partition_bytes))


@dataclasses.dataclass(frozen=True)
class SortStep:
    """One line of the result.

    Args:
        name: what was done.
        seconds: from the start of its first task to the end of its last.
        tasks: how many.
        cost: what the page servers of all nodes did in it.
    """

    name: str
    seconds: float
    tasks: int
    cost: observe.Cost


@dataclasses.dataclass(frozen=True)
class Partition:
    """A part of the result.

    Args:
        ref: an array of rows; homed where it was built.
        n: how many of its rows are records: all, but where there are none.
    """

    ref: clamor.GlobalRef[Records]
    n: int


def build(
    job: SortJob, done: Callable[[int], None] = lambda records: None
) -> tuple[clamor.GlobalRef[Records], int]:
    """The records as a global variable, generated in place, and their checksum."""
    with clamor.build(job.n_records * RECORD_BYTES + (1 << 16)) as region:
        rows = region.empty((job.n_records, RECORD_BYTES), np.uint8)
        records.fill(rows, job.seed, done)
        return region.publish(rows), records.checksum(rows)


class Steps:
    """Runs a step's tasks over the cluster and notes what they cost."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.lines: list[SortStep] = []

    def run(self, name: str, text: str, task: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """What a task for each of the arguments returns, in their order."""
        remote = clamor.remote(num_cpus=1, scheduling_strategy="SPREAD")(task)
        out: list[Any] = [None] * len(arguments)
        with self.stages.stage(name, f"{text} in {len(out):,} tasks", len(out)) as done:
            before, start = observe.cost(), time.perf_counter()
            pending = {remote.remote(*these): number for number, these in enumerate(arguments)}
            for count, (number, value) in enumerate(finished(pending), 1):
                out[number] = value
                done(count)
            seconds = time.perf_counter() - start
            self.lines.append(SortStep(name, seconds, len(out), observe.cost() - before))
        return out


def sort(
    ref: clamor.GlobalRef[Records], n_partitions: int, seed: int, steps: Steps
) -> list[Partition]:
    """Sorts the rows of a variable into partitions, which are variables as well; free them.

    Where a task is run again what it had built before stays until the end of the session.

    Args:
        ref: an array of rows of 100 bytes, at least n_partitions of them.
        n_partitions: of the result, of about equal size unless keys repeat very often.
        seed: of the sample.
        steps: where costs are noted.
    """
    rows = ref.get()
    n = len(rows)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.integers(0, n, min(n, SAMPLES * n_partitions)))
    splitters = records.splitters(_keys_at(rows, chosen), n_partitions)
    window = window_records(observe.cache_bytes(), max(n for _, n in nodes_with_cpus()))
    edges = np.linspace(0, n, n_partitions + 1).astype(int).tolist()
    runs: list[tuple[clamor.GlobalRef[Records], list[int]]] = []
    try:
        runs = steps.run(
            "runs",
            "sorting runs",
            _tasks.sort_run,
            [(ref, a, b, splitters, window) for a, b in itertools.pairwise(edges)],
        )
        parts = steps.run(
            "merge",
            "merging",
            _tasks.merge,
            [
                ([(cuts[i], cuts[i + 1]) for _, cuts in runs], window, *(run for run, _ in runs))
                for i in range(n_partitions)
            ],
        )
    finally:
        for run, _ in runs:
            clamor.free(run)
    return [Partition(part, n_rows) for part, n_rows in parts]


def _keys_at(rows: Records, chosen: Any) -> Keys:
    # A row here and there: the blocks are fetched in a few batches, not by a fault each.
    parts = []
    for first in range(0, len(chosen), 4096):
        some = chosen[first : first + 4096]
        clamor.prefetch([rows[i] for i in some.tolist()])
        parts.append(rows[some])
    return records.keys_of(np.concatenate(parts))


def window_records(cache_bytes: int, n_tasks: int) -> int:
    """How many records a task fetches at once: no more than all tasks of a node have room for.

    Args:
        cache_bytes: the budget of a node; 0 where there is none.
        n_tasks: that run on it at a time.
    """
    window = WINDOW_BYTES
    if cache_bytes:
        window = min(window, cache_bytes // (2 * max(1, n_tasks)))
    return max(1, window // RECORD_BYTES)


def run(job: SortJob, stages: Stages) -> list[SortStep]:
    """Generates, sorts and checks, on the cluster that this process is attached to.

    Raises:
        WrongOrder: What came out is not what went in, sorted.
    """
    with stages.stage("build", f"generating {job.n_records:,} records", job.n_records) as done:
        ref, before = build(job, done)
    with stages.stage("workers", "starting workers"):
        start_workers()
    steps = Steps(stages)
    parts: list[Partition] = []
    try:
        parts = sort(ref, job.n_partitions, job.seed, steps)
        found = steps.run(
            "check", "checking", _tasks.summarize, [(part.ref, part.n) for part in parts]
        )
        records.check(found, job.n_records, before)
    finally:
        clamor.free(ref)
        for part in parts:
            clamor.free(part.ref)
    return steps.lines


def print_steps(console: Console, n_bytes: int, lines: list[SortStep]) -> None:
    """The table of a run: a line per step."""
    rows = (
        (
            line.name,
            f"{line.tasks:,}",
            f"{line.seconds:.2f}",
            f"{n_bytes / 1e6 / line.seconds:,.0f}",
            *traffic(line.cost),
        )
        for line in lines
    )
    headings = ("step", "tasks", "s", "MB/s", *TRAFFIC)
    print_rows(console, headings, rows, title=f"Steps, {WHAT_SERVERS_DID}", names=True)


@program("A million records on a local cluster.")
@options.count(
    "--records",
    "n_records",
    "Of 100 bytes. Default: 10,000,000; 1,000,000 for the demo.",
    least=1000,
)
@options.real(
    "--partition-mib",
    None,
    "Of a partition, in MiB: what a task has in private memory. Default: 64; 8 for the demo.",
    above=True,
)
@options.seed("Of the records.")
def main(
    asked: CommandRun,
    n_records: int | None,
    partition_mib: float | None,
    seed: int,
) -> None:
    """Generates records of 100 bytes, sorts them by their keys of 10, and checks the result.

    Prints for each step how long it took, and what was fetched, evicted, and fetched again.

    Exit status: 0; 1 where the result is wrong; 2 where an option makes no sense; 3 where the
    library cannot work here.
    """
    n_records = n_records or (1_000_000 if asked.demo else 10_000_000)
    mib = partition_mib or (8 if asked.demo else 64)
    job = SortJob(n_records, max(RECORD_BYTES, int(mib * (1 << 20))), seed)
    with asked.attached():
        lines = run(job, asked.stages)
    n_bytes = job.n_records * RECORD_BYTES
    asked.say(
        f"\n{job.n_records:,} records, {human_bytes(n_bytes)}, in order in {job.n_partitions:,} "
        "partitions, and the same that went in.\n"
    )
    print_steps(asked.console, n_bytes, lines)


if __name__ == "__main__":
    main()
