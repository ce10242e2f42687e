"""The map and heartbeats → what scheduling functions see; what they answer → slices. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from clamor_ray import errors
from clamor_ray._recipes.placement.messages import Heartbeat, Slice
from clamor_ray._recipes.placement.schedule import (
    Moves,
    PartitionRow,
    Schedule,
    WorkerRow,
)
from clamor_ray._recipes.program.tables import Tables

NOTHING_MOVED = "Nothing was moved."


def slices_of(tables: Tables) -> list[Slice]:
    """All slices of a program."""
    return [
        (group, index)
        for group in range(tables.n_groups)
        for index in range(tables.n_slices(group))
    ]


def slice_of(tables: Tables, dataset: int, index: int) -> Slice:
    """
    Raises:
        ProgramError: The program has no such partition.
    """
    if not 0 <= dataset < len(tables.datasets):
        raise errors.ProgramError(
            f"The program has {len(tables.datasets)} datasets, and none of number {dataset}.",
            hint=NOTHING_MOVED,
        )
    info = tables.datasets[dataset]
    if not 0 <= index < info.n_partitions:
        raise errors.ProgramError(
            f"{info.name} has {info.n_partitions} partitions, and none of index {index}.",
            hint=NOTHING_MOVED,
        )
    return info.group, index


def worker_rows(workers: Iterable[str], heartbeats: Mapping[str, Heartbeat]) -> list[WorkerRow]:
    """A row for each worker."""
    rows = []
    for worker in sorted(workers):
        said = heartbeats.get(worker)
        if said is None:
            rows.append(WorkerRow(worker))
        else:
            rows.append(WorkerRow(worker, said.cpu, sum(said.seconds.values())))
    return rows


def partition_rows(
    tables: Tables,
    assigned: Mapping[Slice, str],
    moving: Collection[Slice],
    heartbeats: Mapping[str, Heartbeat],
) -> list[PartitionRow]:
    """A row for each partition of each dataset."""
    rows = []
    for dataset, info in enumerate(tables.datasets):
        for index in range(info.n_partitions):
            slice = (info.group, index)
            worker = assigned.get(slice)
            said = None if worker is None else heartbeats.get(worker)
            seconds = 0.0 if said is None else said.seconds.get(slice, 0.0)
            rows.append(
                PartitionRow(
                    dataset=dataset,
                    index=index,
                    group=info.group,
                    worker=worker,
                    in_migration=slice in moving,
                    seconds=seconds,
                )
            )
    return rows


def near(
    tables: Tables, cached: Mapping[Slice, Mapping[str, int]], workers: Collection[str]
) -> dict[Slice, str]:
    """Where slices could be at first so that few bytes are carried. None gets more of a group than
    its share; what is left has no worker.

    Args:
        cached: Slice -> worker -> bytes of it on its node.

    Example:
        >>> from clamor_ray._recipes.program.tables import DatasetInfo
        >>> tables = Tables((DatasetInfo("rows", 4, 0),), (), (), 0)
        >>> near(tables, {(0, 0): {"a": 5}, (0, 1): {"a": 9}, (0, 3): {"a": 7}}, ["a", "b"])
        {(0, 1): 'a', (0, 3): 'a'}
    """
    most = {group: -(-tables.n_slices(group) // len(workers)) for group in range(tables.n_groups)}
    n_placed: Counter[tuple[int, str]] = Counter()
    wishes = sorted(
        (-n_bytes, slice, worker)
        for slice, at in cached.items()
        for worker, n_bytes in at.items()
        if n_bytes and worker in workers
    )
    placed: dict[Slice, str] = {}
    for _, slice, worker in wishes:
        if slice not in placed and n_placed[slice[0], worker] < most[slice[0]]:
            placed[slice] = worker
            n_placed[slice[0], worker] += 1
    return placed


def place(
    tables: Tables,
    functions: Iterable[Schedule],
    assigned: Mapping[Slice, str],
    workers: Collection[str],
    leaving: Collection[str],
) -> dict[Slice, str]:
    """Where slices are at first. Nothing is there yet, so nothing is in migration.

    Args:
        assigned: Where they were before; of those whose worker takes part, that stays.
    """
    placed = {slice: worker for slice, worker in assigned.items() if worker in workers}
    for function in functions:
        partitions = partition_rows(tables, placed, (), {})
        moves = function(worker_rows(workers, {}), partitions, frozenset(leaving))
        placed |= checked(tables, moves, workers)
    return placed


def checked(tables: Tables, moves: Moves, workers: Collection[str]) -> dict[Slice, str]:
    """What a scheduling function answers, as slices.

    Raises:
        ProgramError: It names a partition or a worker that is not there.
    """
    found: dict[Slice, str] = {}
    for (dataset, index), worker in moves.items():
        slice = slice_of(tables, dataset, index)
        if worker not in workers:
            raise errors.ProgramError(
                f"A scheduling function gives a partition of {tables.datasets[dataset].name} to "
                f"{worker}, which takes no part. Those that do: {', '.join(sorted(workers))}.",
                hint=NOTHING_MOVED,
            )
        found.setdefault(slice, worker)  # the first row of those that go together
    return found
