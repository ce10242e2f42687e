"""Sparse logistic regression on the Criteo schema, by synchronous SGD (Clamor 7.1.2, fig. 7).

    python -m clamor_ray.workloads.sparse_lr --demo
    python -m clamor_ray.workloads.sparse_lr 'day_*.gz' --parameters 1000000000 --picture loss.png

A row has 39 features of the value one, out of up to 10^9 or so. The weights are a global variable
of zeros that is spread over the nodes; it takes memory only for what has been written. In an
iteration a task for each partition fetches the weights that its rows touch (`clamor.gather`;
from the second iteration on they are under way before the function starts, as the blocks that the
partition touched are known), works out its gradient, and adds it to the weights
(`clamor.add_at`): combined on its node with what the others there add, applied by the homes, one
commit for each iteration. Nothing of it goes through the driver.

What makes blocks of 4 KiB fit for this is the order of the weights: see `models/logistic.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import clamor_ray as clamor

from .cli import observe, options
from .cli.program import CommandRun, program, refuse_both
from .cli.report import human_bytes
from .cli.results import WHAT_SERVERS_DID, agreement, draw_curve, print_rows
from .cli.stages import Stages
from .cli.waiting import default_partitions, start_workers
from .data import criteo
from .data.criteo import CriteoRows
from .data.errors import InputError, WrongWeights
from .models import logistic
from .models.logistic import Float32, ParameterLayout, RowBlock, Synthetic

DEMO_ROWS = 120_000
DEMO_PARAMETERS = 10_000_000


@dataclasses.dataclass(frozen=True)
class SparseJob:
    """What the command line asked for.

    Args:
        synthetic: what to generate; None where rows are read.
        data: path or pattern of files, or several.
        n_parameters: in all.
        hashed: a weight's number is its key's remainder, and no dictionary is made.
        iterations: steps.
        rate: of learning.
        batches: parts of each partition; a step takes one of them, in turn.
        n_partitions: None for `default_partitions()`.
        check: whether to do it in this process as well.
    """

    synthetic: Synthetic | None
    data: str | list[str] | None = None
    n_parameters: int = DEMO_PARAMETERS
    hashed: bool = False
    iterations: int = 10
    rate: float = 0.2
    batches: int = 1
    n_partitions: int | None = None
    check: bool = False


@dataclasses.dataclass(frozen=True)
class SgdIteration:
    """One line of the result.

    Args:
        number: from 1.
        seconds: of the stage, with the commit at its end.
        loss: mean log loss of the step's rows, before it.
        cost: what the page servers of all nodes did in it.
    """

    number: int
    seconds: float
    loss: float
    cost: observe.Cost


@dataclasses.dataclass(frozen=True)
class SparseOutcome:
    """Of a run.

    Args:
        n_rows: that there are.
        n_seen: parameters that rows touch.
        weights: of these, by id.
        keys: by their ranks, see `logistic.folded`; None where ids are hashed.
        lines: one an iteration.
        error: largest difference from the check; None where there was none.
    """

    n_rows: int
    n_seen: int
    weights: Float32
    keys: npt.NDArray[np.uint64] | None
    lines: list[SgdIteration]
    error: float | None


# ------------------------------------------------------------------ tasks


def load(numbers: npt.NDArray[np.int64], source: Any) -> list[CriteoRows]:
    """The rows of these partitions: what `map_batches` over their numbers calls.

    Args:
        source: a `Synthetic`, or the splits of files.
    """
    if isinstance(source, Synthetic):
        return [source.partition(int(number)) for number in numbers]
    return [criteo.read(source[int(number)]) for number in numbers]


def keys_of(rows: Any) -> list[Any]:
    """Distinct keys of each partition, and how often each is there."""
    return [logistic.distinct(part) for part in rows]


def encode(batch: Any, layout: ParameterLayout, batches: int) -> list[RowBlock]:
    """Rows with ids, in row blocks.

    Args:
        batch: rows; for each the ids of its keys, in ascending order of these, or None: the ids are
            the keys' remainders.
    """
    out = []
    for rows, ids in zip(*batch, strict=True):
        if ids is None:
            numbers = (rows.keys % np.uint64(layout.n_parameters)).astype(np.int32)
        else:
            keys = np.unique(rows.keys)
            numbers = ids[np.searchsorted(keys, rows.keys)]
        for part in np.array_split(np.arange(len(rows.labels)), batches):
            out.append(logistic.block_of(rows.labels[part], numbers[:, part], layout))
    return out


def pull(block: RowBlock, variable: Float32) -> Float32:
    """The weights of `block.ids`.

    Where blocks are used for a good part, all that are not here come in one batch, and are then
    read as any memory is. Else `clamor.gather` says which rows it wants.
    """
    out = np.empty(len(block.ids), np.float32)
    if block.runs is None:
        clamor.gather(variable, block.places, out=out)
        return out
    if block.runs:
        clamor.prefetch([variable[begin:end] for begin, end in block.runs])
    # "clip": with "raise" NumPy makes a copy of the result first. They are in range.
    np.take(variable, block.places, out=out, mode="clip")
    return out


def step(
    blocks: Any, number: int, rate: float, sizes: Sequence[int], variable: Float32
) -> npt.NDArray[np.float64]:
    """A partition's share of one step of SGD.

    Args:
        blocks: of the partition.
        number: of the step, from 0.
        rate: of learning.
        sizes: rows of the step's blocks in all partitions, for each of the blocks' numbers.
        variable: the weights, see `ParameterLayout`.

    Returns:
        Shape (1,): the sum of its rows' losses before the step.
    """
    if not len(blocks):
        return np.zeros(1)
    which = number % len(blocks)
    block = blocks[which]
    weights = pull(block, variable)
    slope, loss = logistic.gradient(block, weights, sizes[which])
    slope *= -rate
    if len(block.places):
        clamor.add_at(variable, block.places, slope)
    return np.array([loss])


# ------------------------------------------------------------------ the driver


class SparseWeights:
    """Weights in a global variable that is spread over the nodes.

    Args:
        n_parameters: in all.
    """

    def __init__(self, n_parameters: int) -> None:
        self.layout = ParameterLayout(n_parameters)
        self.variable: Any = clamor.zeros(self.layout.length, np.float32, home="spread")

    def newest(self) -> Any:
        """The variable, at its newest version."""
        return self.variable.refresh()

    def of(self, ids: npt.NDArray[np.int32]) -> Float32:
        """The weights of ids."""
        out = np.empty(len(ids), np.float32)
        for first in range(0, len(ids), 1 << 22):
            some = slice(first, first + (1 << 22))
            clamor.gather(self.newest(), self.layout.places(ids[some]), out=out[some])
        return out

    def free(self) -> None:
        """With all its versions."""
        clamor.free(self.variable)


@dataclasses.dataclass(frozen=True)
class PreparedRows:
    """Rows with ids, where they will be used.

    Args:
        blocks: a collection, cached: row blocks, all of a partition side by side.
        sizes: rows of the first blocks of all partitions together, of the second ones, ...
        n_seen: parameters that they touch, from the first on; all where ids are hashed.
        keys: of these, by id; None where ids are hashed.
    """

    blocks: Any
    sizes: list[int]
    n_seen: int
    keys: npt.NDArray[np.uint64] | None

    @property
    def n_rows(self) -> int:
        """In all."""
        return sum(self.sizes)


def prepare(job: SparseJob, layout: ParameterLayout, stages: Stages) -> PreparedRows:
    """Loads the rows, makes the dictionary, and gives every row its ids.

    Raises:
        InputError: There are no rows.
        SourceError: A line is none of the schema.
    """
    n_partitions = job.n_partitions or default_partitions()
    source: Any = job.synthetic
    if job.synthetic is not None:
        n_partitions = job.synthetic.n_partitions
    else:
        source = criteo.splits(job.data, n_partitions)
        n_partitions = len(source)
    numbers = clamor.from_numpy(np.arange(n_partitions), partitions=n_partitions)
    # Where what they add is merged is a matter of their numbers, and so is where they run.
    numbers = numbers.options(scheduling="deterministic")
    rows = numbers.map_batches(load, source).cache()
    ids: list[Any] = [None] * n_partitions
    n_seen, keys = job.n_parameters, None
    text = "generating rows where they stay" if job.synthetic else "reading rows"
    with stages.stage("load", text):
        rows.execute()
    if not job.hashed:
        with stages.stage("dictionary", "counting keys"):
            found = rows.map_batches(keys_of).collect()
            ids, keys = logistic.assign(found, job.n_parameters)
            n_seen = min(len(keys), job.n_parameters)
    with stages.stage("encode", "giving rows their ids"):
        every = clamor.from_items([_Boxed(part) for part in ids], partitions=n_partitions)
        blocks = rows.zip(every).map_batches(_encode_boxed, layout, job.batches).cache()
        lengths = blocks.map_batches(_lengths).collect()
        blocks.execute()
        rows.unpersist()
    sizes = np.array(lengths, np.int64).reshape(-1, job.batches).sum(axis=0).tolist()
    if not sum(sizes):
        raise InputError(f"{job.data} has no rows")
    return PreparedRows(blocks, sizes, n_seen, keys)


@dataclasses.dataclass(frozen=True)
class _Boxed:
    """Of a partition: one item, whatever its length."""

    ids: Any


def _encode_boxed(batch: Any, layout: ParameterLayout, batches: int) -> list[RowBlock]:
    rows, boxes = batch
    return encode((rows, [box.ids for box in boxes]), layout, batches)


def _lengths(blocks: Any) -> npt.NDArray[np.int64]:
    return np.array([len(block.labels) for block in blocks], np.int64)


def labels_and_ids(blocks: Any) -> list[Any]:
    """Row blocks as the plain reference wants them."""
    return [[(block.labels, block.ids[block.which]) for block in blocks]]


def iterate(model: SparseWeights, prepared: PreparedRows, rate: float, iterations: int) -> Any:
    """Steps of SGD, one at a time; yields the mean loss before each."""
    for number in range(iterations):
        sizes = prepared.sizes
        stage = prepared.blocks.map_batches(step, number, rate, sizes, model.newest())
        yield float(np.asarray(stage.sum())) / max(1, sizes[number % len(sizes)])


def run(job: SparseJob, stages: Stages) -> SparseOutcome:
    """Loads, trains and checks, on the cluster that this process is attached to.

    Raises:
        InputError: There are no rows.
        WrongWeights: The weights are not those that one process finds.
    """
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    model = SparseWeights(job.n_parameters)
    try:
        return train(model, job, stages)
    finally:
        model.free()


def train(model: SparseWeights, job: SparseJob, stages: Stages) -> SparseOutcome:
    """As `run`, with a model."""
    prepared = prepare(job, model.layout, stages)
    lines: list[SgdIteration] = []
    text = f"{job.iterations} iterations over {prepared.n_rows:,} rows"
    with stages.stage("iterate", text, job.iterations) as done:
        before, started = observe.cost(), time.perf_counter()
        for loss in iterate(model, prepared, job.rate, job.iterations):
            took = time.perf_counter() - started
            after = observe.cost()
            lines.append(SgdIteration(len(lines) + 1, took, loss, after - before))
            done(len(lines))
            before, started = after, time.perf_counter()
    weights = model.of(np.arange(0 if job.hashed else prepared.n_seen, dtype=np.int32))
    error = None
    if job.check:
        with stages.stage("check", "checking against the same in this process"):
            error = check(model, prepared, job, lines)
    return SparseOutcome(prepared.n_rows, prepared.n_seen, weights, prepared.keys, lines, error)


def check(
    model: SparseWeights, prepared: PreparedRows, job: SparseJob, lines: Sequence[SgdIteration]
) -> float:
    """Weights and losses against the plain reference; the largest difference of a weight.

    Raises:
        WrongWeights: A weight or a loss is another.
    """
    parts = prepared.blocks.map_batches(labels_and_ids).collect()
    touched = np.unique(np.concatenate([ids.reshape(-1) for part in parts for _, ids in part]))
    places = [
        [(labels, np.searchsorted(touched, ids).astype(np.int32)) for labels, ids in part]
        for part in parts
    ]
    expected, losses = logistic.reference(places, len(touched), job.rate, len(lines))
    found = model.of(touched)
    for line, loss in zip(lines, losses, strict=True):
        if not abs(line.loss - loss) <= 1e-5 * max(1.0, abs(loss)):
            raise WrongWeights(f"the loss of iteration {line.number} is {line.loss}, not {loss}")
    return logistic.check(found, expected)


# ------------------------------------------------------------------ for people


def print_outcome(asked: CommandRun, outcome: SparseOutcome) -> None:
    """What a run found, and what it took."""
    asked.say(
        f"\n{outcome.n_rows:,} rows, {outcome.n_seen:,} parameters; log loss "
        f"{outcome.lines[0].loss:.4f} before the first iteration and "
        f"{outcome.lines[-1].loss:.4f} before the last.{agreement('weights', outcome.error)}\n"
    )
    rows = (
        (
            str(line.number),
            f"{line.loss:.6f}",
            f"{line.seconds:.3f}",
            f"{line.cost.faults:,}",
            f"{line.cost.blocks_fetched:,}",
            human_bytes(line.cost.bytes_received),
        )
        for line in outcome.lines
    )
    headings = ("iteration", "log loss", "seconds", "faults", "blocks\nfetched", "received")
    print_rows(asked.console, headings, rows, title=f"Iterations, {WHAT_SERVERS_DID}")


def write(outcome: SparseOutcome, n_parameters: int, out: Path) -> None:
    """Parquet: key, weight; the most frequent keys first."""
    keys = outcome.keys if outcome.keys is not None else np.empty(0, np.uint64)
    ids = logistic.folded(np.arange(len(keys)), n_parameters)
    pq.write_table(pa.table({"key": keys, "weight": outcome.weights[ids]}), out)


@program(f"{DEMO_ROWS:,} rows on a local cluster.")
@click.argument("data", metavar="[ROWS]", required=False)
@options.count("--rows", "n_rows", f"To generate. Default: 1,000,000; {DEMO_ROWS:,} for the demo.")
@click.option(
    "--parameters",
    "n_parameters",
    default=DEMO_PARAMETERS,
    show_default=True,
    type=click.IntRange(1000, logistic.MOST_PARAMETERS),
    help="In all; memory is taken for those that rows touch.",
)
@click.option(
    "--ids",
    type=click.Choice(["dictionary", "hash"]),
    default="dictionary",
    show_default=True,
    help="How a value gets its parameter: by frequency, which counts all values first, or by the "
    "remainder of its hash, which scatters them over all blocks.",
)
@options.number("--iterations", 10)
@options.real(
    "--rate",
    0.2,
    "Of learning. Above about 0.2 it may not converge: a row has 39 features.",
    above=True,
)
@options.number("--batches", 1, "Parts of the rows; each iteration takes one of them, in turn.")
@options.real("--skew", 1.1, "Exponent of the Zipf distribution of generated values.")
@options.partitions()
@options.seed("Of the generated rows.")
@options.new_folder(
    "--save",
    "Write the generated rows to this folder, as Criteo's files, and read them from there.",
)
@options.new_file("--picture", "Loss curve, PNG.")
@options.new_file("--out", "Weights, Parquet.")
@options.check()
def main(
    asked: CommandRun,
    data: str | None,
    n_rows: int | None,
    n_parameters: int,
    ids: str,
    skew: float,
    seed: int,
    save: Path | None,
    picture: Path | None,
    out: Path | None,
    **of_job: Any,
) -> None:
    """Trains on ROWS, files of the Criteo schema by path or pattern, or on rows that it generates.

    Prints for each iteration how long it took, the loss, and what crossed the network.

    Exit status: 0; 1 where the weights are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    refuse_both(data, {"--demo": asked.demo, "--rows": n_rows, "--save": save}, "rows")
    if out is not None and ids == "hash":
        raise click.UsageError("--out writes a weight for each key: it needs --ids dictionary")
    with asked.attached():
        synthetic, files = None, []
        if not data:
            synthetic = Synthetic(
                n_rows or (DEMO_ROWS if asked.demo else 1_000_000),
                of_job["n_partitions"] or default_partitions(),
                *(n_parameters, skew, seed),
            )
            if save:
                with asked.stages.stage("save", f"writing rows to {save}"):
                    files = [str(path) for path in synthetic.save(save)]
                synthetic = None
        job = SparseJob(synthetic, data or files, n_parameters, ids == "hash", **of_job)
        outcome = run(job, asked.stages)
    print_outcome(asked, outcome)
    if picture is not None:
        title = f"{outcome.n_rows:,} rows, {outcome.n_seen:,} parameters"
        draw_curve(outcome.lines, title, "log loss before it", picture)
    if out is not None:
        write(outcome, n_parameters, out)
    asked.wrote(picture=picture, weights=out)


if __name__ == "__main__":
    main()
