"""What tasks of the workloads run. Every worker process imports this, so it imports little."""

from __future__ import annotations

from typing import Any

import numpy as np

import clamor_ray as clamor

from ..data import graphs, records
from ..data.graphs import Float64, Graph
from ..data.records import Keys, Records, Summary


def nothing() -> None:
    """Has a worker process started, with what it imports."""


def attach() -> None:
    """Has a worker process started, with what tasks of collections import, and attached."""
    import clamor_ray.collection.run.task  # noqa: F401

    clamor.init()


def new_ranks(
    graph: Graph, quotients: Float64, begin: int, end: int, base: float, backward: bool, whole: bool
) -> Float64:
    """PageRank: new ranks of [begin, end). `whole`: it will use most of the quotients."""
    if whole:
        # All of them are new since the commit: one batch instead of a fault a page.
        clamor.prefetch(quotients)
    return graphs.ranks_of(graph, quotients, begin, end, base, backward=backward)


def sort_run(
    everything: Records, begin: int, end: int, splitters: Keys, window: int
) -> tuple[clamor.GlobalRef[Records], list[int]]:
    """Sort, first half: the records [begin, end), sorted, as a variable that is homed here.

    Args:
        window: records that are fetched at once.

    Returns:
        The variable, and where the splitters cut it.
    """
    part = _copy([everything[begin:end]], window)
    keys = records.keys_of(part)
    order = records.order(keys)
    cuts = records.cuts(Keys(keys.high[order], keys.low[order]), splitters)
    del keys
    return _publish(part, order), cuts


def merge(
    cuts: list[tuple[int, int]], window: int, *runs: Records
) -> tuple[clamor.GlobalRef[Records], int]:
    """Sort, second half: these rows of the runs, sorted, as a variable that is homed here.

    Returns:
        The variable, and how many records it has.
    """
    parts = [run[begin:end] for run, (begin, end) in zip(runs, cuts, strict=True)]
    part = _copy(parts, window)
    return _publish(part, records.order(records.keys_of(part))), len(part)


def summarize(part: Records, n: int) -> Summary:
    """Sort, the check: what a partition holds, wherever it is homed."""
    return records.summarize(part[:n])


def _copy(parts: list[Records], window: int) -> Records:
    """Rows of global variables in private memory, each fetched once, some at a time.

    They are used twice, once for their keys and once in the order of these. By then a small cache
    might have thrown them out.
    """
    sizes = [len(part) for part in parts]
    out = np.empty((sum(sizes), records.RECORD_BYTES), np.uint8)
    at = 0
    for group in records.batches(sizes, window):
        views = [parts[number][begin:end] for number, begin, end in group]
        clamor.prefetch(views)  # one batch, from all nodes that have some
        for view in views:
            out[at : at + len(view)] = view
            at += len(view)
    return out


def _publish(part: Records, order: Any) -> clamor.GlobalRef[Records]:
    """The rows in this order, put where they will be read: no second copy."""
    with clamor.build(part.nbytes + (1 << 16)) as region:
        # At least a row: a region holds what has an address.
        out = region.empty((max(1, len(part)), records.RECORD_BYTES), np.uint8)
        # "clip": with "raise" NumPy makes a copy of the result first.
        np.take(part, order, axis=0, out=out[: len(part)], mode="clip")
        if not len(part):
            out[:] = 0
        return region.publish(out)
