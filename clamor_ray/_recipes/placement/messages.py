"""What workers say to each other, and what they and the controller say to each other. Pure.

A version of the map is one number: the controller's term times `TERM`, and a count. So what a new
controller says is newer than all that an old one has said, also where that comes late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from clamor_ray._recipes.matching.state import SliceState
from clamor_ray._recipes.progress.rounds import Done

Slice: TypeAlias = tuple[int, int]  # group, index

TERM: Final = 1 << 32


# -- the map


@dataclass(frozen=True, slots=True)
class MapUpdate:
    """One step of the map.

    Args:
        version: One more than that of the step before, unless it is whole.
        moves: Slice -> its worker from now on.
        joined: New worker -> its address.
        left: Workers that get nothing more. Their slices have gone before.
        is_whole: It has all slices and workers, so no step before it is needed.
    """

    version: int
    moves: Mapping[Slice, str]
    joined: Mapping[str, Any] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    is_whole: bool = False


# -- between workers


@dataclass(frozen=True, slots=True)
class Packet:
    """What one task has sent to tasks whose slices are on one worker, as its sender knows the map.

    Args:
        number: Of the receivers' stage.
        group: Of the receivers' slices.
        sender: The index of the task that has sent.
        version: Of the map by which this was sent here.
        messages: By the receiver's index. Who gets nothing is told so: an empty list.
    """

    number: int
    group: int
    sender: int
    version: int
    messages: Mapping[int, list[bytes]]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a stage has answered."""

    number: int
    value: bool


@dataclass(frozen=True, slots=True)
class Decisions:
    """All answers that one worker knows, for one that is new."""

    log: Mapping[int, bool]


@dataclass(frozen=True, slots=True)
class SliceCame:
    """A slice that moves.

    Args:
        group, index: Which.
        version: Of the map by which it was sent here.
        state: What has run on it, and messages for it.
        data: Its partitions, as the runtime passes them.
    """

    group: int
    index: int
    version: int
    state: SliceState
    data: Any = None


@dataclass(frozen=True, slots=True)
class Ack:
    """These envelopes have come. It is not acknowledged itself."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What goes from one worker to another.

    Args:
        run: The job's, counted: it begins again where a worker is lost. Others are dropped.
        number: From 1, for each pair of workers: what comes twice counts once. 0: an `Ack`, or a
            step of the map.
        content: One of those above; or a step of the map, which the controller sends in advance to
            those that have something to do by it. The same comes as an order.
    """

    run: int
    number: int
    content: Packet | Decision | Decisions | SliceCame | Ack | MapUpdate


# -- from the controller to a worker, in this order and no other


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that all workers have stored.

    Args:
        name: A count.
        number: All stages up to it have run, and no later one.
        decisions: All answers up to it.
        stored_by: Slice -> the worker that has stored it.
    """

    name: int
    number: int
    decisions: Mapping[int, bool]
    stored_by: Mapping[Slice, str]


@dataclass(frozen=True, slots=True)
class Begin:
    """A worker begins with a new core.

    Args:
        run: See `Envelope`.
        update: The whole map.
        loads: Its slices are those of the checkpoint, or as they were given at first; else the job
            runs already, and they come from other workers.
        checkpoint: None: at the program's beginning.
    """

    run: int
    update: MapUpdate
    loads: bool
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing new begins. `Paused` is the answer, when what moves has come.

    Args:
        checkpoint: Its name.
        version: Of the map that the worker must know first.
    """

    checkpoint: int
    version: int


@dataclass(frozen=True, slots=True)
class Complete:
    """All stages up to this one run, and no later one. `Completed` is the answer."""

    checkpoint: int
    number: int


@dataclass(frozen=True, slots=True)
class Store:
    """The slices are stored. `Stored` is the answer."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class Resume:
    """All goes on, whatever became of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody sends to this worker any more: it ends when all that it has sent has come."""


Order: TypeAlias = Begin | MapUpdate | Pause | Complete | Store | Resume | Stop


# -- from a worker to the controller


@dataclass(frozen=True, slots=True)
class Report:
    """What all of them say.

    Args:
        run: See `Envelope`.
        worker: Who says it.
    """

    run: int
    worker: str


@dataclass(frozen=True, slots=True)
class Arrived(Report):
    """A slice that has moved runs here.

    Args:
        group, index: Which.
        version: Of the map that the worker knows.
    """

    group: int
    index: int
    version: int


@dataclass(frozen=True, slots=True)
class Parted(Report):
    """Nothing goes from here to workers that have left, and what went there has come.

    Args:
        version: Of the map: to those that have left by then.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Drained(Report):
    """The worker was to stop, and it has nothing more."""


@dataclass(frozen=True, slots=True)
class Lost(Report):
    """A worker does not acknowledge what this one sends."""

    lost: str


@dataclass(frozen=True, slots=True)
class Paused(Report):
    """Answer to `Pause`.

    Args:
        furthest: The last stage that has begun on a slice of this worker.
    """

    checkpoint: int
    furthest: int


@dataclass(frozen=True, slots=True)
class Completed(Report):
    """Answer to `Complete`."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class Stored(Report):
    """Answer to `Store`.

    Args:
        slices: Which it has stored.
        decisions: All that it knows.
        error: Why it could not; empty: it could.
    """

    checkpoint: int
    slices: frozenset[Slice]
    decisions: Mapping[int, bool]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat(Report):
    """A worker lives.

    Args:
        version: Of its map.
        is_settled: All slices of that version are here, and no others.
        is_complete: Its slices have run the whole program.
        floor: No slice here needs a stage with a lower number.
        seconds: Slice -> how long its tasks have computed since the last heartbeat.
        cpu: 0 to 1: how much of the node's processors anybody uses.
        done: What has run on all slices here; None: there are none. It does not go back: a slice
            may come that is behind it, and `floor` says so.
    """

    version: int
    is_settled: bool
    is_complete: bool
    floor: int
    seconds: Mapping[Slice, float] = field(default_factory=dict)
    cpu: float = 0.0
    done: Done | None = None


@dataclass(frozen=True, slots=True)
class Whereabouts(Report):
    """All that a new controller must know of a worker.

    Args:
        update: The whole map that it knows.
        here: Its slices.
    """

    update: MapUpdate
    here: frozenset[Slice]
