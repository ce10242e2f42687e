"""A hash map that changes while tasks look things up in it: streaming updates (Clamor 7.1.3).

    python -m clamor_ray.workloads.streaming_updates --demo
    python -m clamor_ray.workloads.streaming_updates --keys 33554432 --rounds 10 --lookups 10000000

The driver builds the map once. In each round it changes a few keys in place, and tasks on all nodes
make Zipf look-ups in the new version: of the map only the changed blocks travel. Every value that a
task found is checked against a plain dict, and at the end so is every version there was.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click
import numpy as np
import ray
from rich.console import Console

import clamor_ray as clamor

from .cli import observe, options
from .cli.attaching import node_names
from .cli.program import CommandRun, program
from .cli.report import human_bytes
from .cli.results import print_rows
from .cli.stages import Stages
from .cli.waiting import TASK_TIMEOUT_S
from .data.stream import Batch, Int64, PlainMap, WrongValue, checksum, first_value, key_of, zipf


@dataclasses.dataclass(frozen=True)
class StreamJob:
    """What the command line asked for.

    Args:
        n_keys: in the map.
        rounds: of one update and look-ups each; round 0, before them, has look-ups only.
        n_changes: keys that an update changes.
        n_lookups: of a round, over all tasks.
        n_tasks: of a round.
        skew: exponent of the Zipf distribution of look-ups and changes.
        seed: of all that is random.
    """

    n_keys: int
    rounds: int
    n_changes: int
    n_lookups: int
    n_tasks: int
    skew: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What a task answers.

    Args:
        node_id: where it ran.
        version: of the map that it read.
        also: values of the keys that were named.
        checksum: of all values, in order.
    """

    node_id: str
    version: int
    also: Int64
    checksum: int


@dataclasses.dataclass(frozen=True)
class Round:
    """One line of the result.

    Args:
        version: of the map, that all its tasks read.
        update_s: from the begin of the update to its commit.
        lookups_s: from the start of the tasks to the last answer.
        dirty_blocks: of 4 KiB, that the commit changed.
        received_bytes: by node id, on the wire, headers and all else included.
        tasks: by node id.
    """

    number: int
    version: int
    update_s: float
    lookups_s: float
    dirty_blocks: int
    received_bytes: dict[str, int]
    tasks: dict[str, int]


def look_up(m: clamor.HashMap, batch: Batch) -> Found:
    """The task: it gets the map as a few hundred bytes, in the version that it was given."""
    values = m.get(batch.keys())
    return Found(
        ray.get_runtime_context().get_node_id(),
        m.version,
        values[: len(batch.also)],
        checksum(values),
    )


def build(n_keys: int) -> clamor.HashMap:
    """The map of all keys with their first values."""
    keys = key_of(np.arange(n_keys))
    return clamor.HashMap.build(keys, first_value(keys))


def run(job: StreamJob, stages: Stages) -> list[Round]:
    """All rounds, on the cluster that this process is attached to.

    Raises:
        WrongValue: A task found something else than the map held.
    """
    with stages.stage("build", f"building a map of {job.n_keys:,} keys"):
        m = build(job.n_keys)
    model = PlainMap(job.n_keys)
    rng = np.random.default_rng(job.seed)
    rounds, history = [], {0: PlainMap(job.n_keys)}
    try:
        total = job.n_lookups * (job.rounds + 1)
        text = f"{job.rounds} rounds of {job.n_changes:,} changes and {job.n_lookups:,} look-ups"
        with stages.stage("rounds", text, total) as done:
            for number in range(job.rounds + 1):
                rounds.append(_round(m, model, job, number, rng))
                history[m.version] = PlainMap(job.n_keys)
                history[m.version].changed = dict(model.changed)
                done(job.n_lookups * (number + 1))
        with stages.stage("check", f"checking {len(history)} versions once more"):
            _check_versions(m, history)
    finally:
        clamor.free(m.ref)
    return rounds


def _round(
    m: clamor.HashMap, model: PlainMap, job: StreamJob, number: int, rng: np.random.Generator
) -> Round:
    before = observe.node_counters(m.ref)
    old_version = m.version
    changed: Int64 = np.empty(0, np.int64)
    start = time.perf_counter()
    if number:
        changed = key_of(zipf(rng, job.n_keys, job.n_changes, job.skew))
        values = rng.integers(0, 1 << 62, len(changed))
        with clamor.update(m) as t:
            t.set(changed, values)
        model.change(changed, values)
    updated = time.perf_counter()
    edges = np.linspace(0, job.n_lookups, job.n_tasks + 1).astype(int).tolist()
    batches = [
        Batch(
            job.seed * 1_000_003 + number * 10_007 + task,
            job.n_keys,
            edges[task + 1] - edges[task],
            job.skew,
            tuple(changed[:100].tolist()),
        )
        for task in range(job.n_tasks)
    ]
    task = ray.remote(look_up).options(num_cpus=1, scheduling_strategy="SPREAD")
    found: list[Found] = ray.get(
        [task.remote(m, batch) for batch in batches], timeout=TASK_TIMEOUT_S
    )
    end = time.perf_counter()
    after = observe.node_counters(m.ref)
    by_node: dict[str, int] = {}
    for batch, answer in zip(batches, found, strict=True):
        by_node[answer.node_id] = by_node.get(answer.node_id, 0) + 1
        if answer.version != m.version:
            raise WrongValue(f"round {number}: a task read version {answer.version}")
        model.check(f"round {number}", batch, answer.also, answer.checksum)
    none = observe.NodeCounters(0, 0, False)
    return Round(
        number,
        m.version,
        updated - start if number else 0.0,
        end - updated,
        observe.dirty_blocks(m.ref, old_version, m.version),
        {
            node: counters.bytes_received - before.get(node, none).bytes_received
            for node, counters in after.items()
        },
        by_node,
    )


def _check_versions(m: clamor.HashMap, history: dict[int, PlainMap]) -> None:
    """Every version still says what it said: of all keys that ever changed."""
    last = history[max(history)]
    keys = np.array(sorted(last.changed), np.int64)
    for version, model in history.items():
        if not np.array_equal(m.at(version).get(keys), model.values(keys)):
            raise WrongValue(f"version {version} does not hold what it held")


def print_rounds(console: Console, rounds: list[Round], names: list[tuple[str, str]]) -> None:
    """The table of a run: a line per round, a column of received bytes per node."""
    rows = (
        (
            str(line.number),
            str(line.version),
            f"{line.update_s * 1e3:.1f}" if line.number else "",
            f"{line.lookups_s:.3f}",
            f"{line.dirty_blocks:,}" if line.number else "",
            *(human_bytes(line.received_bytes.get(node_id, 0)) for node_id, _ in names),
        )
        for line in rounds
    )
    headings = ["round", "version", "update\nms", "look-ups\ns", "dirty\nblocks"]
    headings += [name for _, name in names]
    print_rows(console, headings, rows, title="Rounds, and what each node received")


@program("A map of a million keys on a local cluster.")
@options.count(
    "--keys",
    "n_keys",
    "Keys in the map. Default: 33,554,432 (1 GiB); 1,048,576 for the demo.",
    least=1000,
)
@options.number("--rounds", 10)
@options.number("--changes", 1, "Keys that the driver changes in each round.")
@options.count(
    "--lookups", "n_lookups", "Look-ups of a round. Default: 10,000,000; 300,000 for the demo."
)
@click.option("--skew", default=0.99, show_default=True, type=click.FloatRange(0, 4))
@options.count("--tasks", "n_tasks", "Of a round. Default: one for each CPU.")
@options.seed()
def main(
    asked: CommandRun,
    n_keys: int | None,
    changes: int,
    n_lookups: int | None,
    n_tasks: int | None,
    **of_job: Any,
) -> None:
    """Changes a hash map in place, round by round, while tasks on all nodes look keys up.

    Prints for each round how long the update and the look-ups took, how many blocks the update
    changed, and what each node received.

    Exit status: 0; 1 where a task found a wrong value; 3 where the library cannot work here.
    """
    with asked.attached():
        job = StreamJob(
            n_keys=n_keys or (1 << 20 if asked.demo else 1 << 25),
            n_changes=changes,
            n_lookups=n_lookups or (300_000 if asked.demo else 10_000_000),
            n_tasks=n_tasks or max(1, int(ray.cluster_resources().get("CPU", 1))),
            **of_job,
        )
        lines = run(job, asked.stages)
        names = node_names(ray.nodes(), ray.get_runtime_context().get_node_id())
    asked.say(
        f"\n{(job.rounds + 1) * job.n_lookups:,} look-ups found what a plain dict holds, "
        f"in {len(lines)} versions.\n"
    )
    print_rounds(asked.console, lines, names)


if __name__ == "__main__":
    main()
