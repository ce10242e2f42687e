"""What the controller of a program is told when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramSettings:
    """One program.

    Args:
        name: Of its controller, in our namespace; those of its workers begin with it.
        secret: Of the connections of its workers.
        program: Pickled tables and functions.
        nodes: Ray's ids of the nodes that get a worker -> tasks that run there at once.
        place: Where checkpoints go; None: there are none.
        every_s: Between two of them; None: only when asked for.
        schedule: Pickled scheduling functions.
        cpus: Tasks that run at once on a node that has so many CPUs; None: as many as it has.
        readers: Pickled: dataset -> what makes a partition of what it is given as.
        executors: See `Program.run`.
        is_detached: It outlives its driver.
    """

    name: str
    secret: bytes
    program: bytes
    nodes: Mapping[str, int]
    place: str | None
    every_s: float | None
    schedule: bytes
    readers: bytes
    cpus: int | None
    executors: str | None
    is_detached: bool
