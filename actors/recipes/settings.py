"""What the controller of a program is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CONTROLLER: Final = "controller"  # its name, to its workers


@dataclass(frozen=True)
class ProgramSettings:
    """One program.

    Args:
        name: Of its controller, in our namespace; those of its workers begin with it.
        scope: Of its session.
        secret: Of the connections of its workers.
        program: Pickled tables and functions.
        workers: How many, each on a node of its own; None: as many as nodes have CPUs when it
            begins; ``"all"``: one on each, also on those that come.
        place: Where checkpoints go; None: there are none.
        every_s: Between two of them; None: only when asked for.
        schedule: Pickled scheduling functions.
        cpus: Tasks that run at once on a node that has so many CPUs; None: as many as it has.
        readers: Pickled: dataset -> what makes a partition of what it is given as.
        executors: See `Program.run`.
        is_detached: It outlives its driver.
        reserves: It has CPUs that others do not get.
        expires_s: It ends when it has run, and nobody has asked for partitions for so long; None:
            when somebody stops it.
    """

    name: str
    scope: str
    secret: bytes
    program: bytes
    workers: int | str | None
    place: str | None
    every_s: float | None
    schedule: bytes
    readers: bytes
    cpus: int | None
    executors: str | None
    is_detached: bool
    reserves: bool
    expires_s: float | None = None
