"""Functions that move the partitions of a program while it runs: for `Program.run(schedule=...)`.

A function gets the workers, the partitions and the workers that leave, and says which partition
goes to which worker: ``(workers, partitions, leaving) -> {(dataset, index): worker}`` (Canary,
section 5.5). It is called at the start, when a worker joins or leaves, and every two seconds.

Example:
    >>> def all_to_the_first(workers, partitions, leaving):
    ...     first = min(row.worker for row in workers)
    ...     return {(row.dataset, row.index): first for row in partitions}
    >>> program = clamor.Program()
    >>> n = program.value(20)
    >>> program.stage(lambda t, n: n + 1, writes=[n])
    >>> program.run(schedule=[clamor.schedule.stragglers(), all_to_the_first]).result(n)
    21
"""

from __future__ import annotations

from clamor_ray._recipes.placement.schedule import (
    PartitionRow,
    WorkerRow,
    leaving,
    round_robin,
    stragglers,
)

__all__ = ["PartitionRow", "WorkerRow", "leaving", "round_robin", "stragglers"]
