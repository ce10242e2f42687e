"""What a program that runs says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Counters(NamedTuple):
    """What a worker says of itself.

    Args:
        n_ran: Tasks that have run.
        busy_ns: In their functions.
        furthest: The number of the last stage that has begun.
        processes: Of its executors; empty: they are threads.
    """

    n_ran: int = 0
    busy_ns: int = 0
    furthest: int = 0
    processes: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerStats:
    """One worker.

    Args:
        node_id: Ray's hex id of its node.
        pid: Its process there.
        n_slices: That it has, or gets.
        stage: The number of the last stage that has begun there.
        tasks: That have run.
        tasks_per_s: Since the call of `stats` before.
        busy_s: In functions.
        processes: That run its tasks; empty: threads of `pid` do.
    """

    node_id: str
    pid: int
    n_slices: int
    stage: int
    tasks: int
    tasks_per_s: float
    busy_s: float
    processes: tuple[int, ...]


@dataclass(frozen=True)
class ProgramStats:
    """A program.

    Args:
        state: ``starting``, ``running``, ``ended`` or ``failed``.
        workers: One for each node.
        rounds: Of its outermost loops, that have ended on all nodes: about a second late.
        restarts: How often it has begun again, at a checkpoint or its beginning.
        checkpoint: The number of the newest; None: there is none.
        checkpoint_error: Why the last attempt at one has failed; empty: it has not.
        moves: Slices that have moved.
        messages: Orders of the controller to workers.
        by_kind: Those, and what workers have said to it, by the name of the message. Its answer to
            a heartbeat is in none.
    """

    state: str
    workers: tuple[WorkerStats, ...]
    rounds: int
    restarts: int
    checkpoint: int | None
    checkpoint_error: str
    moves: int
    messages: int
    by_kind: Mapping[str, int] = field(default_factory=dict)
