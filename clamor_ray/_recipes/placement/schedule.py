"""Scheduling functions: `(workers, partitions, leaving) -> moves` (Canary, section 5.5). Pure.

The controller calls them at the start, when a worker has joined, before one leaves, at an interval,
and on request. Each looks at the tables alone and keeps nothing, so what one has moved is no reason
for another to move it back: `round_robin` moves only what has no worker, or to workers that have
nothing; `stragglers` moves only from a worker that is slow; `leaving` only from one that leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker.

    Args:
        worker: Its name.
        cpu: 0 to 1: how much of its node's processors anybody uses.
        seconds: How long its tasks compute in the time between two heartbeats, one second: the mean
            since the call before.

    Example:
        >>> clamor.schedule.WorkerRow("a", seconds=2.0).seconds
        2.0
    """

    worker: str
    cpu: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """One partition. Those of one group with one index move together.

    Args:
        dataset: Its number.
        index: In the dataset.
        group: Datasets that stages access together.
        worker: Who has it, or gets it; None: nobody yet.
        in_migration: It has not come there. To move it has no effect.
        seconds: How long tasks compute with it in that time.

    Example:
        >>> clamor.schedule.PartitionRow(dataset=0, index=3, group=0, worker="a").in_migration
        False
    """

    dataset: int
    index: int
    group: int
    worker: str | None
    in_migration: bool = False
    seconds: float = 0.0


Moves: TypeAlias = Mapping[tuple[int, int], str]  # dataset, index -> worker
Schedule: TypeAlias = Callable[[Sequence[WorkerRow], Sequence[PartitionRow], frozenset[str]], Moves]


def round_robin() -> Schedule:
    """Partitions that have no worker get one, and workers that have nothing get some: as even as
    can be, in as few moves as can be.

    Returns:
        A function for `Program.run(schedule=...)`.

    Example:
        >>> from clamor_ray.schedule import PartitionRow, WorkerRow
        >>> rows = [PartitionRow(0, index, 0, "a") for index in range(4)]
        >>> clamor.schedule.round_robin()([WorkerRow("a"), WorkerRow("b")], rows, frozenset())
        {(0, 3): 'b', (0, 2): 'b'}
    """
    return _round_robin


def stragglers(ratio: float = 1.3) -> Schedule:
    """One partition of the slowest worker goes to the most idle one (Listing 2).

    Args:
        ratio: A worker is slow where its tasks have computed for so many times the mean of the
            others.

    Returns:
        A function for `Program.run(schedule=...)`.

    Raises:
        ValueError: The ratio is not above 1.

    Example:
        >>> from clamor_ray.schedule import PartitionRow, WorkerRow
        >>> rows = [PartitionRow(0, n, 0, "ab"[n // 2], seconds=[3, 3, 1, 1][n]) for n in range(4)]
        >>> workers = [WorkerRow("a", seconds=6), WorkerRow("b", seconds=2)]
        >>> clamor.schedule.stragglers()(workers, rows, frozenset())
        {(0, 0): 'b'}
    """
    if not ratio > 1:
        raise ValueError(f"ratio is {ratio}: every worker would be slow. Give one above 1.")

    def move_one(
        workers: Sequence[WorkerRow], partitions: Sequence[PartitionRow], leaving: frozenset[str]
    ) -> Moves:
        able = [row for row in workers if row.worker not in leaving]
        if len(able) < 2 or any(row.in_migration for row in partitions):
            return {}  # what was moved shows in the seconds of a later interval
        slow = max(able, key=lambda row: row.seconds)
        idle = min(able, key=lambda row: (row.seconds, row.cpu))
        mean = (sum(row.seconds for row in able) - slow.seconds) / (len(able) - 1)
        mine = _slices(row for row in partitions if row.worker == slow.worker)
        if slow.seconds <= ratio * mean:
            return {}
        # The largest that does not only exchange the two.
        fits = [rows for rows in mine if idle.seconds + _seconds(rows) < slow.seconds]
        if not fits:
            return {}
        chosen = max(fits, key=_seconds)
        return {(chosen[0].dataset, chosen[0].index): idle.worker}

    return move_one


def leaving() -> Schedule:
    """Partitions of workers that leave go to the others, one to each in turn (Listing 3).

    Returns:
        A function for `Program.run(schedule=...)`.

    Example:
        >>> from clamor_ray.schedule import PartitionRow, WorkerRow
        >>> rows = [PartitionRow(0, 0, 0, "a"), PartitionRow(0, 1, 0, "a", in_migration=True)]
        >>> clamor.schedule.leaving()([WorkerRow("a"), WorkerRow("b")], rows, frozenset({"a"}))
        {(0, 0): 'b'}
    """
    return _leaving


def _leaving(
    workers: Sequence[WorkerRow], partitions: Sequence[PartitionRow], leaving: frozenset[str]
) -> Moves:
    able = [row.worker for row in workers if row.worker not in leaving]
    going = [rows[0] for rows in _slices(partitions) if rows[0].worker in leaving]
    if not able:
        return {}
    return {
        (row.dataset, row.index): worker
        for row, worker in zip(
            (row for row in going if not row.in_migration), cycle(able), strict=False
        )
    }


def _round_robin(
    workers: Sequence[WorkerRow], partitions: Sequence[PartitionRow], leaving: frozenset[str]
) -> Moves:
    able = [row.worker for row in workers if row.worker not in leaving]
    of_group: dict[int, list[PartitionRow]] = {}
    total = dict.fromkeys(able, 0)
    for rows in _slices(partitions):
        of_group.setdefault(rows[0].group, []).append(rows[0])
        if rows[0].worker in total:
            total[rows[0].worker] += 1
    is_new = 0 in total.values()
    moves: dict[tuple[int, int], str] = {}
    if able:
        for rows_of in of_group.values():
            _even_out(rows_of, is_new, total, moves)
    return moves


def _even_out(
    rows: Sequence[PartitionRow],
    is_new: bool,
    total: dict[str, int],
    moves: dict[tuple[int, int], str],
) -> None:
    """One group. `total` counts the slices of each worker, of all groups."""
    has = dict.fromkeys(total, 0)
    movable: dict[str, list[PartitionRow]] = {worker: [] for worker in total}
    for row in rows:
        if row.worker in has:
            has[row.worker] += 1
            if not row.in_migration:
                movable[row.worker].append(row)
    # Who has the fewest, and who has the most and may give one: the first of them, in their order.
    # What has changed since it went into a heap is dropped when it comes out.
    order = {worker: n for n, worker in enumerate(total)}
    least = [(has[worker], total[worker], n, worker) for worker, n in order.items()]
    most = [(-has[worker], n, worker) for worker, n in order.items() if movable[worker]]
    heapq.heapify(least)
    heapq.heapify(most)

    def changed(worker: str, by: int) -> None:
        has[worker] += by
        total[worker] += by
        heapq.heappush(least, (has[worker], total[worker], order[worker], worker))
        if movable[worker]:
            heapq.heappush(most, (-has[worker], order[worker], worker))

    def fewest() -> str:
        while least[0][:2] != (has[least[0][3]], total[least[0][3]]):
            heapq.heappop(least)
        return least[0][3]

    for row in rows:
        if row.worker is None:
            to = moves[row.dataset, row.index] = fewest()
            changed(to, +1)
    while is_new:
        to = fewest()
        while most and (-most[0][0] != has[most[0][2]] or not movable[most[0][2]]):
            heapq.heappop(most)
        if not most:
            return
        whence = most[0][2]
        # Of a group with fewer slices than workers, one goes where that evens the whole.
        gap = has[whence] - has[to]
        if gap < 1 or (gap == 1 and total[whence] - total[to] < 2):
            return
        row = movable[whence].pop()
        moves[row.dataset, row.index] = to
        changed(whence, -1)
        changed(to, +1)


def _slices(rows: Iterable[PartitionRow]) -> list[list[PartitionRow]]:
    """Partitions that move together."""
    found: dict[tuple[int, int], list[PartitionRow]] = {}
    for row in rows:
        found.setdefault((row.group, row.index), []).append(row)
    return list(found.values())


def _seconds(rows: Sequence[PartitionRow]) -> float:
    return rows[0].seconds  # each row of a slice says the same
