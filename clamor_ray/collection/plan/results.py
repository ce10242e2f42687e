"""What a stage has made: a part for each task, and what each part was made of. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clamor_ray.collection.plan.stages import FromSource, FromStage, SlicesOf, Stage
from clamor_ray.collection.plan.task_messages import Meta, Piece

_numbers = itertools.count(1)


def new_number() -> int:
    """Names a part, or a set of parts."""
    return next(_numbers)


class Pin(NamedTuple):
    """A version that a re-run would read."""

    region: int
    version: int


@dataclass(frozen=True)
class Part:
    """What one task made.

    Args:
        number: another one each time that the task runs.
        outs: references to Ray objects.
        meta: the task's report.
        made_of: numbers of the parts that it was made of.
        pins: what its task would read again, and those before it.
        key_tokens: of tasks among those that have committed: their idempotency keys must stay.
        task_pins: what its own task was given.
        moved: which of those are of variables that `refresh` moves.
        as_of: by region, a newer version at which it would be the same.
    """

    number: int
    outs: tuple[Any, ...]
    meta: Meta
    made_of: tuple[int, ...]
    pins: frozenset[Pin]
    key_tokens: frozenset[bytes] = frozenset()
    task_pins: frozenset[Pin] = frozenset()
    moved: frozenset[Pin] = frozenset()
    as_of: dict[int, int] = field(default_factory=dict)

    def is_at(self, region: int, version: int) -> bool:
        """Whether it is what its task would make of this version of a variable."""
        return Pin(region, version) in self.task_pins or self.as_of.get(region, -1) >= version


@dataclass(frozen=True)
class StageResult:
    """All parts of a stage; None: not asked for (`take`).

    Args:
        parts: by partition.
        number: another one whenever a part is.
        signature: of the stage.
        n_attempts: that were started for it, also for parts that were made anew since.
    """

    parts: tuple[Part | None, ...]
    number: int
    signature: Any
    n_attempts: int = 0

    def has(self, wanted: Sequence[int]) -> bool:
        """Whether these parts are there."""
        return all(self.parts[index] is not None for index in wanted)

    @property
    def is_whole(self) -> bool:
        return self.has(range(len(self.parts)))

    @property
    def pins(self) -> frozenset[Pin]:
        return frozenset().union(*(part.pins for part in self.parts if part is not None))

    @property
    def key_tokens(self) -> frozenset[bytes]:
        return frozenset().union(*(part.key_tokens for part in self.parts if part is not None))


class Fed(NamedTuple):
    """What a task is given.

    Args:
        slots: as in `TaskSpec`.
        objects: the Ray objects that pieces point into.
        pins, key_tokens: of those.
        texts: of each slot, for people.
    """

    slots: tuple[Any, ...]
    objects: tuple[Any, ...]
    pins: frozenset[Pin]
    key_tokens: frozenset[bytes]
    texts: tuple[str, ...]


def even_bounds(n_items: int, n: int) -> list[int]:
    """Where n parts of as equal sizes as can be begin, and the last one ends.

    Example:
        >>> even_bounds(7, 3)
        [0, 3, 5, 7]
    """
    size, larger = divmod(n_items, n)
    return [size * i + min(i, larger) for i in range(n + 1)]


def slices(counts: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(partition, start, stop) of the items start to stop of all partitions in a row.

    Example:
        >>> slices([2, 0, 3], 1, 4)
        [(0, 1, 2), (2, 0, 2)]
    """
    found = []
    first = 0
    for partition, count in enumerate(counts):
        low, high = max(start - first, 0), min(stop - first, count)
        if low < high:
            found.append((partition, low, high))
        first += count
    return found


def made_of(
    stage: Stage, partition: int, made: Mapping[Stage, StageResult], mark: int
) -> tuple[int, ...]:
    """Names what the task of a partition is given: the same names, the same things.

    Args:
        made: by the stages before.
        mark: names the bounds of a ranged stage.
    """
    numbers = [mark]
    for slot in stage.slots:
        if isinstance(slot, FromStage):
            part = made[slot.stage].parts[partition]
            assert part is not None
            numbers.append(part.number)
        elif not isinstance(slot, FromSource):
            numbers.append(made[slot.stage].number)
    return tuple(numbers)


def feed(stage: Stage, partition: int, made: Mapping[Stage, StageResult]) -> Fed:
    """What the task of a partition is given.

    Args:
        made: by the stages before.
    """
    slots: list[Any] = []
    objects: list[Any] = []
    pins: set[Pin] = set()
    key_tokens: set[bytes] = set()
    texts: list[str] = []

    def piece(reference: Any, start: int = 0, stop: int | None = None) -> Piece:
        objects.append(reference)
        return Piece(len(objects) - 1, start, stop)

    for slot in stage.slots:
        if isinstance(slot, FromSource):
            source: Any = slot.node.operator
            split = source.splits[partition]
            texts.append(f"partition {partition} of {source.kind}")
            if source.objects:
                slots.append((piece(split),))
            else:
                slots.append(split)
                texts[-1] = split.describe()
            continue
        result = made[slot.stage]
        if isinstance(slot, FromStage):
            part = result.parts[partition]
            assert part is not None
            slots.append((piece(part.outs[0]),))
            pins |= part.pins
            key_tokens |= part.key_tokens
            texts.append(f"partition {partition} of {slot.stage.node.name}")
            continue
        parts = [part for part in result.parts if part is not None]
        pins |= result.pins
        key_tokens |= result.key_tokens
        if isinstance(slot, SlicesOf):
            counts = [part.meta.n_items for part in parts]
            edges = even_bounds(sum(counts), slot.n)
            found = slices(counts, edges[partition], edges[partition + 1])
            slots.append(tuple(piece(parts[p].outs[0], low, high) for p, low, high in found))
            texts.append(f"items {edges[partition]} to {edges[partition + 1]}")
        else:
            slots.append(tuple(piece(part.outs[partition]) for part in parts))
            texts.append(f"pieces of {len(parts)} partitions of {slot.stage.node.name}")
    if stage.sampled is not None:
        pins |= made[stage.sampled].pins
        key_tokens |= made[stage.sampled].key_tokens
    return Fed(
        slots=tuple(slots),
        objects=tuple(objects),
        pins=frozenset(pins),
        key_tokens=frozenset(key_tokens),
        texts=tuple(texts),
    )
