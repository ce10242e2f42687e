"""What the driver tells a task of a stage, and what the task reports."""

from __future__ import annotations

from typing import Any, NamedTuple

from clamor_ray._protocol.attempt_record import Failure
from clamor_ray._read.ref import GlobalRef
from clamor_ray._tasks.task_context import Read


class Piece(NamedTuple):
    """A part of one of the task's Ray objects: items start to stop; stop None: all of it."""

    place: int
    start: int = 0
    stop: int | None = None


class TaskSpec(NamedTuple):
    """One attempt at one partition.

    Args:
        token: names the task, whichever attempt of it; 16 bytes.
        run_id: names the collection to the lineage registry.
        stage: its name.
        partition: its number.
        attempt: counts from 0; more are speculative copies.
        scope: of the session.
        snapshots: of the stage's variables.
        slots: a split, or the pieces that a slot is made of.
        inputs: of each slot, for people.
        bounds: of a `Ranged` out.
        check: compare the output with an earlier attempt's.
        predictor_key: names tasks that are likely to read the same, and whether there was one
            before; None: there is nothing to read.
        moves: of each snapshot, whether it stands for a reference which moves.
        scatter_adds: what the task adds to variables is collected, and is one more result.
    """

    token: bytes
    run_id: int
    stage: str
    partition: int
    attempt: int
    scope: str
    snapshots: tuple[GlobalRef[Any], ...]
    slots: tuple[Any, ...]
    inputs: tuple[str, ...]
    bounds: Any = None
    check: bool = False
    predictor_key: tuple[bytes, bool] | None = None
    moves: tuple[bool, ...] = ()
    scatter_adds: bool = False


class Meta(NamedTuple):
    """A task's report.

    Args:
        partition, attempt: as it was told.
        node_id: Ray's hex id of the node where it ran.
        start_ns, end_ns: wall clock.
        n_items, n_bytes: of the result.
        reads: blocks of variables that it touched.
        failure: or None.
        sample: of keys, for a sort.
        digest: of the result, where checking is on.
        commits: transactions that it made.
        array: of a fold's result that is an array: its dtype's name and its shape.
        scatter_added: packed references to the variables that it has added to,
        scatter_added_bytes: and the size of that.
    """

    partition: int
    attempt: int
    node_id: str
    start_ns: int
    end_ns: int
    n_items: int
    n_bytes: int
    reads: tuple[Read, ...]
    failure: Failure | None = None
    sample: Any = None
    digest: bytes | None = None
    commits: int = 0
    array: tuple[str, tuple[int, ...]] | None = None
    scatter_added: tuple[bytes, ...] = ()
    scatter_added_bytes: int = 0
