"""Scheduling functions: `(workers, partitions, leaving) -> moves` (Canary, section 5.5). Pure.

The controller calls them at the start, when a worker has joined, before one leaves, at an interval,
and on request. Each looks at the tables alone and keeps nothing, so what one has moved is no reason
for another to move it back: `round_robin` moves only what has no worker, or to workers that have
nothing; `stragglers` moves only from a worker that is slow; `leaving` only from one that leaves.
"""

from __future__ import annotations

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
        seconds: How long its tasks have computed since its last heartbeat.

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
        seconds: How long tasks have computed with it since the last heartbeat.

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
    slices = _slices(partitions)
    has_some = {rows[0].worker for rows in slices}
    is_new = any(worker not in has_some for worker in able)
    total = {worker: sum(rows[0].worker == worker for rows in slices) for worker in able}
    moves: dict[tuple[int, int], str] = {}
    if not able:
        return moves
    for group in dict.fromkeys(rows[0].group for rows in slices):
        rows_of = [rows[0] for rows in slices if rows[0].group == group]
        homeless = [row for row in rows_of if row.worker is None]
        _even_out(rows_of, homeless, is_new, total, moves)
    return moves


def _even_out(
    rows: Sequence[PartitionRow],
    homeless: Sequence[PartitionRow],
    is_new: bool,
    total: dict[str, int],
    moves: dict[tuple[int, int], str],
) -> None:
    """One group. `total` counts the slices of each worker, of all groups."""
    has: dict[str, list[PartitionRow]] = {worker: [] for worker in total}
    for row in rows:
        if row.worker in has:
            has[row.worker].append(row)
    for row in homeless:
        to = min(has, key=lambda worker: (len(has[worker]), total[worker]))
        moves[row.dataset, row.index] = to
        has[to].append(row)
        total[to] += 1
    while is_new:
        to = min(has, key=lambda worker: (len(has[worker]), total[worker]))
        movable = {
            worker: [row for row in mine if not row.in_migration and row.worker == worker]
            for worker, mine in has.items()
        }
        most = max(has, key=lambda worker: len(has[worker]) if movable[worker] else 0)
        # Of a group with fewer slices than workers, one goes where that evens the whole.
        gap = len(has[most]) - len(has[to])
        if not movable[most] or gap < 1 or (gap == 1 and total[most] - total[to] < 2):
            return
        row = movable[most][-1]
        moves[row.dataset, row.index] = to
        has[most].remove(row)
        has[to].append(row)
        total[most] -= 1
        total[to] += 1


def _slices(rows: Iterable[PartitionRow]) -> list[list[PartitionRow]]:
    """Partitions that move together."""
    found: dict[tuple[int, int], list[PartitionRow]] = {}
    for row in rows:
        found.setdefault((row.group, row.index), []).append(row)
    return list(found.values())


def _seconds(rows: Sequence[PartitionRow]) -> float:
    return rows[0].seconds  # each row of a slice says the same
