"""What the registry remembers of tasks, and which old versions must stay. Pure: no Ray, clock, I/O.

Two things that live and die with collections:

* **Attempts.** Every attempt of a task leaves one record: what it was, what it read, where, when,
  and how it ended. A record is live while its run's collection is open; then it is one of the
  ended ones, of which the newest stay.
* **Pins.** An open collection names the snapshots that its tasks read, or would read if they were
  run again. The oldest of them is the region's **floor**: every version from the floor on stays
  readable. Without a pin there is no floor, and old versions go as if there were no collections.

What is kept is bounded (``LineageLimits``): records of each partition, ended records, digests of
outputs, and the bytes of all records together, of which the ended go first. Pins are as many as
the open collections name.

What changes is collected for the journal (``take_changes``), by what it is about and not as a list
of events: so it is never larger than what is kept, however long the disk is full.

Thread safety: everything belongs to the registry's loop.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clamor_ray._protocol.attempt_record import PLAIN_RUN, AttemptRecord, Snapshot


@dataclass(frozen=True)
class LineageLimits:
    """How much is kept; see the file's head.

    Args:
        per_partition: The newest attempts of one partition of one stage of a run.
        ended: Records of runs that are not open.
        bytes: Of all records together.
        outputs: Tasks whose output's digest is known.
    """

    per_partition: int = 8
    ended: int = 16384
    bytes: int = 64 << 20
    outputs: int = 65536


@dataclass(frozen=True)
class Collection:
    """An open one: what it is, for people, and the snapshots that must stay readable."""

    description: str
    pins: tuple[Snapshot, ...]


@dataclass
class Changes:
    """What the journal does not know yet; None: it is gone.

    Args:
        collections: By id.
        records: By a number of our own, which grows.
        outputs: By token.
        releasing: Regions whose floor is gone and whose homes may not know that yet; False: they
            all do.
    """

    collections: dict[int, Collection | None] = field(default_factory=dict)
    records: dict[int, AttemptRecord | None] = field(default_factory=dict)
    outputs: dict[bytes, bytes | None] = field(default_factory=dict)
    releasing: dict[int, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.collections or self.records or self.outputs or self.releasing)

    def before(self, newer: Changes) -> Changes:
        """Both together."""
        return Changes(
            {**self.collections, **newer.collections},
            {**self.records, **newer.records},
            {**self.outputs, **newer.outputs},
            {**self.releasing, **newer.releasing},
        )


@dataclass(frozen=True)
class LineageCounters:
    """What is kept now, and how many records of open collections had to go for want of room."""

    collections: int = 0
    pinned_regions: int = 0
    attempts: int = 0
    bytes: int = 0
    dropped: int = 0


_Place = tuple[int, str, int]


class Lineage:
    """See the file's head.

    Args:
        limits: How much is kept.

    Example:
        >>> lineage = Lineage()
        >>> sorted(lineage.open(7, "near", [(1, 3), (1, 5)]))
        [1]
        >>> lineage.floor(1)
        3
        >>> lineage.close([7]), lineage.floor(1)
        ({1}, None)
    """

    def __init__(self, limits: LineageLimits = LineageLimits()) -> None:
        self._limits = limits
        self._collections: dict[int, Collection] = {}
        self._pinned: dict[int, Counter[int]] = {}  # region -> version -> how many pins
        self._releasing: set[int] = set()
        self._records: dict[int, AttemptRecord] = {}  # the oldest first
        self._by_place: dict[_Place, dict[tuple[object, ...], int]] = {}
        self._places_of: dict[int, dict[_Place, None]] = {}  # of each run
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._outputs: dict[bytes, bytes] = {}
        self._next_id = 1
        self._bytes = 0
        self._dropped = 0
        self._changes = Changes()

    # -- collections

    def open(self, collection: int, description: str, pins: Iterable[Snapshot]) -> set[int]:
        """From now on these snapshots stay, for this collection; what it had before counts no more.

        Returns:
            The regions whose floor has changed.
        """
        old = self._collections.get(collection)
        new = Collection(description, tuple(dict.fromkeys((r, v) for r, v in pins)))
        if old == new:
            return set()
        touched = {region for region, _ in new.pins + (old.pins if old else ())}
        before = {region: self.floor(region) for region in touched}
        for region, version in new.pins:
            self._pinned.setdefault(region, Counter())[version] += 1
        if old is None:
            for record_id in self._records_of(collection):
                self._ended.pop(record_id, None)
        else:
            self._unpin(old.pins)
        self._collections[collection] = new
        self._changes.collections[collection] = new
        return self._moved(before)

    def close(self, collections: Iterable[int]) -> set[int]:
        """They are gone. Again, or never opened: changes nothing.

        Returns:
            The regions whose floor has changed.
        """
        before: dict[int, int | None] = {}
        for collection in collections:
            old = self._collections.pop(collection, None)
            if old is None:
                continue
            for region, _ in old.pins:
                before.setdefault(region, self.floor(region))
            self._unpin(old.pins)
            self._changes.collections[collection] = None
            for record_id in self._records_of(collection):
                self._ended[record_id] = None
        self._trim()
        return self._moved(before)

    def _unpin(self, pins: Iterable[Snapshot]) -> None:
        for region, version in pins:
            versions = self._pinned.get(region)
            if versions is None:  # it was freed
                continue
            versions[version] -= 1
            if not versions[version]:
                del versions[version]
            if not versions:
                del self._pinned[region]

    def _moved(self, before: Mapping[int, int | None]) -> set[int]:
        moved = {region for region, floor in before.items() if floor != self.floor(region)}
        for region in moved:
            if self.floor(region) is None:
                self._releasing.add(region)
                self._changes.releasing[region] = True
            else:
                self.released(region)
        return moved

    def floor(self, region: int) -> int | None:
        """The oldest version of it that must stay; None: none."""
        versions = self._pinned.get(region)
        return min(versions) if versions else None

    def floors(self) -> dict[int, int | None]:
        """Of every region with a pin; None: it has none any more, and its homes may not know."""
        found: dict[int, int | None] = dict.fromkeys(self._releasing)
        found.update((region, min(versions)) for region, versions in self._pinned.items())
        return found

    def released(self, region: int) -> None:
        """Every home knows that it has no floor, or that it has one again."""
        if region in self._releasing:
            self._releasing.discard(region)
            self._changes.releasing[region] = False

    def forget_region(self, region: int) -> None:
        """It is freed: nothing of it stays, whoever needs it."""
        self.released(region)
        if self._pinned.pop(region, None) is None:
            return
        for collection, known in list(self._collections.items()):
            kept = tuple(pin for pin in known.pins if pin[0] != region)
            if kept != known.pins:
                new = Collection(known.description, kept)
                self._collections[collection] = self._changes.collections[collection] = new

    # -- attempts

    def note(self, record: AttemptRecord) -> None:
        """An attempt is over. The same one again replaces it."""
        place, identity = _place_of(record)
        attempts = self._by_place.setdefault(place, {})
        self._places_of.setdefault(record.run_id, {})[place] = None
        if (known := attempts.get(identity)) is not None:
            self._drop(known)
            attempts = self._by_place.setdefault(place, {})
            self._places_of.setdefault(record.run_id, {})[place] = None
        self._add(self._next_id, record)
        self._changes.records[self._next_id] = record
        self._next_id += 1
        if len(attempts) > self._limits.per_partition:
            self._drop(next(iter(attempts.values())))
        if record.output_digest is not None:
            self.check_output(record.token, record.output_digest)
        self._trim()

    def _add(self, record_id: int, record: AttemptRecord) -> None:
        place, identity = _place_of(record)
        self._by_place.setdefault(place, {})[identity] = record_id
        self._places_of.setdefault(record.run_id, {})[place] = None
        self._records[record_id] = record
        self._bytes += record.cost_bytes
        if record.run_id not in self._collections:
            self._ended[record_id] = None

    def _drop(self, record_id: int) -> None:
        record = self._records.pop(record_id)
        self._ended.pop(record_id, None)
        self._bytes -= record.cost_bytes
        self._changes.records[record_id] = None
        place, identity = _place_of(record)
        attempts = self._by_place[place]
        del attempts[identity]
        if not attempts:
            del self._by_place[place]
            places = self._places_of[record.run_id]
            del places[place]
            if not places:
                del self._places_of[record.run_id]

    def _records_of(self, run_id: int) -> list[int]:
        places = self._places_of.get(run_id, ())
        return sorted(record_id for place in places for record_id in self._by_place[place].values())

    def _trim(self) -> None:
        while self._ended and (
            len(self._ended) > self._limits.ended or self._bytes > self._limits.bytes
        ):
            self._drop(next(iter(self._ended)))
        while self._bytes > self._limits.bytes and self._records:
            self._drop(next(iter(self._records)))
            self._dropped += 1

    def attempts_of(self, run_id: int) -> list[AttemptRecord]:
        """What is kept of a run, in the order in which it was said."""
        return [self._records[record_id] for record_id in self._records_of(run_id)]

    def reads_of(self, region: int) -> list[AttemptRecord]:
        """All that is kept of those who read a region, in the order in which it was said; of
        their reads only those of it."""
        found = []
        for record in self._records.values():
            reads = tuple(read for read in record.reads if read[0] == region)
            if reads:
                found.append(record._replace(reads=reads))
        return found

    # -- outputs

    def check_output(self, token: bytes, digest: bytes) -> bytes | None:
        """The digest of what an earlier attempt of the task made; None: this is the first one."""
        known = self._outputs.get(token)
        if known is None:
            self._outputs[token] = self._changes.outputs[token] = digest
            if len(self._outputs) > self._limits.outputs:
                oldest = next(iter(self._outputs))
                del self._outputs[oldest]
                self._changes.outputs[oldest] = None
        return known

    # -- the journal

    def take_changes(self) -> Changes:
        """What has changed since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def put_back(self, changes: Changes) -> None:
        """They could not be written: they are among the next ones."""
        self._changes = changes.before(self._changes)

    def restore(self, saved: Changes) -> None:
        """Takes back what the journal held, in the order in which it was written."""
        for collection, known in saved.collections.items():
            if known is not None:
                self._collections[collection] = known
                for region, version in known.pins:
                    self._pinned.setdefault(region, Counter())[version] += 1
        for record_id, record in saved.records.items():
            if record is not None:
                self._add(record_id, record)
                self._next_id = max(self._next_id, record_id + 1)
        self._outputs.update((t, digest) for t, digest in saved.outputs.items() if digest)
        self._releasing.update(region for region, on in saved.releasing.items() if on)
        self._trim()

    def counters(self) -> LineageCounters:
        """What is kept."""
        return LineageCounters(
            collections=len(self._collections),
            pinned_regions=len(self._pinned),
            attempts=len(self._records),
            bytes=self._bytes,
            dropped=self._dropped,
        )

    def check(self) -> None:
        """Raises AssertionError when an invariant of this file does not hold."""
        assert self._bytes == sum(r.cost_bytes for r in self._records.values())
        assert self._bytes <= self._limits.bytes
        assert len(self._ended) <= self._limits.ended
        assert len(self._outputs) <= self._limits.outputs
        pins: dict[int, Counter[int]] = {}
        for known in self._collections.values():
            for region, version in known.pins:
                pins.setdefault(region, Counter())[version] += 1
        assert pins == self._pinned
        assert not self._releasing & self._pinned.keys()
        ids = {i for attempts in self._by_place.values() for i in attempts.values()}
        assert ids == self._records.keys()
        assert all(0 < len(a) <= self._limits.per_partition for a in self._by_place.values())
        places = {place for places in self._places_of.values() for place in places}
        assert places == self._by_place.keys()
        for record_id, record in self._records.items():
            assert (record_id in self._ended) == (record.run_id not in self._collections)


def _place_of(record: AttemptRecord) -> tuple[_Place, tuple[object, ...]]:
    """Where a record belongs, and which one of that place it is."""
    if record.run_id == PLAIN_RUN:
        # Of calls that have one name, the last one of each node: more would say the same.
        return (PLAIN_RUN, f"{record.token.hex()} {record.node_id}", -1), ()
    place = (record.run_id, record.stage, record.partition)
    return place, (record.attempt, record.token, record.node_id, record.pid, record.start_ns)
