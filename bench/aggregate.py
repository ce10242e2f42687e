"""Sums of one array for each partition: by the driver, by a tree of tasks, and split.

Several raylets on this machine. A partition's task makes an array of the size and adds its one item
to all of it; then, in turn: `aggregate` with a function that is not known (all arrays go to the
driver), `tree_aggregate`, `aggregate` with np.add (merged on their nodes, and around the ring) and
`split_aggregate`. Each result is checked. Seconds are of whole actions, tasks included.

`split_speedup` is the tree's time / split_aggregate's, medians, of the largest size. It says which
way to take on this machine: with links between nodes that are slower than its memory, the driver's
way is dearer than here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.support import common
from bench.support.common import emit, note, now

MIB = 1 << 20


def add(total: Any, item: Any) -> Any:
    """In place: one pass."""
    total += item
    return total


def plus(one: Any, other: Any) -> Any:
    """A function that nobody knows to be np.add."""
    return np.add(one, other)


def segment(value: Any, index: int, n: int) -> Any:
    """One of n even ones."""
    return value[len(value) * index // n : len(value) * (index + 1) // n]


def ways(col: Any, n: int) -> dict[str, Callable[[], Any]]:
    """What is compared."""
    return {
        "driver": lambda: col.aggregate(np.zeros(n), add, plus),
        "tree": lambda: col.tree_aggregate(np.zeros(n), add, plus),
        "aggregate": lambda: col.aggregate(np.zeros(n), add, np.add),
        "split": lambda: col.split_aggregate(np.zeros(n), add, segment, np.add, np.concatenate),
    }


def measure(col: Any, n_partitions: int, n_bytes: int, rounds: int) -> dict[str, float]:
    """One size; medians by way."""
    n = n_bytes // 8
    took: dict[str, list[float]] = {}
    want = float(sum(range(n_partitions)))
    for i in range(rounds + 1):
        for name, way in ways(col, n).items():
            start = now()
            made = way()
            seconds = now() - start
            common.verify(name, made[:: max(1, n // 997)], np.full(n, want)[:: max(1, n // 997)])
            if i:  # the first one warms up
                took.setdefault(name, []).append(seconds)
    emit(
        {
            "bytes": n_bytes,
            "partitions": n_partitions,
            "seconds": {name: common.spread(times) for name, times in took.items()},
        }
    )
    return {name: statistics.median(times) for name, times in took.items()}


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench aggregate", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--mib", default="", help="sizes, as in 1,4,16")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--partitions", type=int, default=8)
    args = parser.parse_args(argv)
    sizes = [float(size) for size in (args.mib or ("1" if args.small else "1,4,16,64")).split(",")]
    rounds = args.rounds or (1 if args.small else 7)

    import clamor_ray as clamor
    from clamor_ray.collection.run import split

    store_bytes = int(max(256, 6 * max(sizes) * args.partitions / args.nodes)) * MIB
    with common.several_nodes(args.nodes, store_bytes, 1):
        emit(common.environment())
        split.LEAST_BYTES = 0  # type: ignore[misc]  # whatever its size: that is what is measured
        items = np.arange(float(args.partitions))
        col = clamor.from_numpy(items, partitions=args.partitions)
        for size in sizes:
            note(f"{size:g} MiB")
            medians = measure(col, args.partitions, int(size * MIB), rounds)
        common.summary({"split_speedup": medians["tree"] / medians["split"]})
