"""Checks recorded histories for snapshot isolation with first committer wins per block.

Workers record what they did and saw; `check` says where no store that keeps the rules could have
shown it. Plain Python: it knows nothing of the library.

Words: a value is a tag that no two writes share (`INITIAL` is what every block has at version 0).
A transaction that was begun and neither committed nor aborted may have committed: its process died,
or the answer was lost. `check` finds out from the versions and values that others saw.
"""

from __future__ import annotations

import itertools
import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INITIAL = 0
MAX_GUESSES = 20_000

Txn = tuple[int, int]  # process, number
Place = tuple[str, int]  # variable, block


@dataclass(frozen=True)
class Begin:
    """A transaction sees `versions`. `before_ns`: a moment before it was begun, or None: then it
    may begin at old versions, and at versions of several variables that never were together."""

    txn: Txn
    versions: Mapping[str, int]
    before_ns: int | None = None


@dataclass(frozen=True)
class Read:
    """Inside a transaction: its snapshot, or what it wrote itself before."""

    txn: Txn
    variable: str
    block: int
    value: int


@dataclass(frozen=True)
class Write:
    txn: Txn
    variable: str
    block: int
    value: int


@dataclass(frozen=True)
class Commit:
    """It committed; `versions` of the variables it wrote. `after_ns`: a moment after that."""

    txn: Txn
    versions: Mapping[str, int]
    after_ns: int | None = None


@dataclass(frozen=True)
class Abort:
    """It was refused, or gave up: nothing of it may be seen."""

    txn: Txn


@dataclass(frozen=True)
class Plain:
    """A read at a version, outside of any transaction."""

    process: int
    variable: str
    version: int
    block: int
    value: int


Event = Begin | Read | Write | Commit | Abort | Plain


@dataclass(frozen=True)
class Violation:
    """A rule that was broken: `kind` is one of `KINDS`."""

    kind: str
    text: str


KINDS = (
    "lost update",  # two that overlapped wrote the same block
    "torn read",  # part of a commit, in one variable or across several
    "future read",  # a value of a later version
    "stale read",  # a value that a commit before this version had replaced
    "aborted read",  # a value of a transaction that did not commit
    "unknown value",  # nobody wrote it there
    "own write",  # a transaction does not see what it wrote
    "unstable version",  # the same block of the same version, two values
    "version gap",  # nobody made this version
    "version clash",  # two made it; or a commit did not get past what it began at
    "stale begin",  # older than a commit that had returned
    "bad record",  # the history contradicts itself: a bug of the test
)


class Recorder:
    """What one process did, in order. Tags its writes so that no two values are the same.

    Args:
        process: its number, from 1 on; below 2**30.
        path: also write every event to this file at once, so that it outlives the process.
    """

    def __init__(self, process: int, path: Path | None = None) -> None:
        if not 0 < process < 1 << 30:
            raise ValueError("processes count from 1")
        self.process = process
        self.events: list[Event] = []
        self._file = None if path is None else path.open("xb", buffering=0)
        self._txns = itertools.count(1)
        self._values = itertools.count(1)

    def _record(self, event: Event) -> None:
        self.events.append(event)
        if self._file is not None:
            self._file.write(pickle.dumps(event))

    def begin(self, versions: Mapping[str, int], before_ns: int | None = None) -> Txn:
        txn = (self.process, next(self._txns))
        self._record(Begin(txn, dict(versions), before_ns))
        return txn

    def read(self, txn: Txn, variable: str, block: int, value: int) -> None:
        self._record(Read(txn, variable, block, int(value)))

    def new_value(self) -> int:
        """A value that is nobody else's, for a write."""
        return self.process << 32 | next(self._values)

    def write(self, txn: Txn, variable: str, block: int, value: int) -> None:
        self._record(Write(txn, variable, block, int(value)))

    def commit(self, txn: Txn, versions: Mapping[str, int], after_ns: int | None = None) -> None:
        self._record(Commit(txn, dict(versions), after_ns))

    def abort(self, txn: Txn) -> None:
        self._record(Abort(txn))

    def plain(self, variable: str, version: int, block: int, value: int) -> None:
        self._record(Plain(self.process, variable, version, block, int(value)))


def load(path: Path) -> list[Event]:
    """What a recorder wrote to its file; a last event that was cut off is left out."""
    events: list[Event] = []
    with path.open("rb") as file:
        while True:
            try:
                events.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return events


@dataclass
class _Txn:
    begin: Begin
    commit: Commit | None = None
    aborted: bool = False
    writes: dict[Place, int] = field(default_factory=dict)  # the last of each block

    @property
    def variables(self) -> set[str]:
        return {variable for variable, _ in self.writes}

    @property
    def unknown(self) -> bool:
        return self.commit is None and not self.aborted and bool(self.writes)


@dataclass(frozen=True)
class _Seen:
    who: str
    variable: str
    version: int
    block: int
    value: int


def _name(txn: Txn) -> str:
    return f"transaction {txn[1]} of process {txn[0]}"


class _History:
    """The events, sorted out; what is wrong with any commit order is in `violations`."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.txns: dict[Txn, _Txn] = {}
        self.seen: list[_Seen] = []
        self.writers: dict[int, tuple[Txn, Place]] = {}  # of every value ever written
        self.violations: list[Violation] = []
        for event in events:
            self._take(event)

    def _bad(self, text: str) -> None:
        self.violations.append(Violation("bad record", text))

    def _take(self, event: Event) -> None:
        if isinstance(event, Plain):
            who = f"process {event.process}"
            self.seen.append(_Seen(who, event.variable, event.version, event.block, event.value))
            return
        name = _name(event.txn)
        if isinstance(event, Begin):
            if event.txn in self.txns:
                self._bad(f"{name} begins twice")
            self.txns[event.txn] = _Txn(event)
            return
        txn = self.txns.get(event.txn)
        if txn is None or txn.commit is not None or txn.aborted:
            self._bad(f"{name} is not under way: {event}")
            return
        if isinstance(event, Commit):
            txn.commit = event
            if not txn.variables <= set(event.versions):
                self._bad(f"{name} wrote {sorted(txn.variables)}, and committed {event.versions}")
            return
        if isinstance(event, Abort):
            txn.aborted = True
            return
        if event.variable not in txn.begin.versions:
            self._bad(f"{name} did not begin with {event.variable}")
            return
        place = event.variable, event.block
        if isinstance(event, Write):
            if event.value == INITIAL or event.value in self.writers:
                self._bad(f"{name} writes a value that is not its own: {event.value:#x}")
            self.writers[event.value] = event.txn, place
            txn.writes[place] = event.value
        elif place not in txn.writes:
            version = txn.begin.versions[event.variable]
            self.seen.append(_Seen(name, event.variable, version, event.block, event.value))
        elif txn.writes[place] != event.value:
            text = (
                f"{name} wrote {txn.writes[place]:#x} to block {event.block} of {event.variable} "
                f"and read {event.value:#x}"
            )
            self.violations.append(Violation("own write", text))

    def versions_seen(self) -> dict[str, int]:
        """The newest version of each variable that anybody mentions."""
        newest: dict[str, int] = defaultdict(int)
        for seen in self.seen:
            newest[seen.variable] = max(newest[seen.variable], seen.version)
        for txn in self.txns.values():
            for versions in (txn.begin.versions, txn.commit.versions if txn.commit else {}):
                for variable, version in versions.items():
                    newest[variable] = max(newest[variable], version)
        return newest

    def outcomes(self) -> Iterator[dict[Txn, dict[str, int]]]:
        """What the transactions of unknown outcome may have become: those that commit, and as
        which versions. Only what fills gaps in the versions is tried."""
        taken = {
            (variable, version)
            for txn in self.txns.values()
            if txn.commit is not None
            for variable, version in txn.commit.versions.items()
            if variable in txn.variables
        }
        newest = self.versions_seen()
        gaps = {
            variable: [v for v in range(1, last + 1) if (variable, v) not in taken]
            for variable, last in newest.items()
        }
        unknown = [txn for txn, what in self.txns.items() if what.unknown]
        seen_at: dict[tuple[str, int, int], set[int]] = defaultdict(set)  # -> values
        first_seen: dict[int, int] = {}  # value -> version
        for seen in self.seen:
            seen_at[seen.variable, seen.version, seen.block].add(seen.value)
            first = first_seen.get(seen.value, seen.version)
            first_seen[seen.value] = min(first, seen.version)

        def may_be(what: _Txn, variable: str, version: int) -> bool:
            return version > what.begin.versions[variable] and all(
                first_seen.get(value, version) >= version
                and seen_at.get((variable, version, block), {value}) == {value}
                for (name, block), value in what.writes.items()
                if name == variable
            )

        def choose(index: int, used: set[tuple[str, int]]) -> Iterator[dict[Txn, dict[str, int]]]:
            if index == len(unknown):
                yield {}
                return
            txn = unknown[index]
            what = self.txns[txn]
            options = []
            for variable in sorted(what.variables):
                fits = [(variable, v) for v in gaps[variable] if may_be(what, variable, v)]
                # Or, of this variable, a version that nobody has looked at yet.
                options.append([*fits, (variable, newest[variable] + 1 + index)])
            for versions in itertools.product(*options):
                became = set(versions)
                if not became & used and any(v <= newest[name] for name, v in versions):
                    for rest in choose(index + 1, used | became):
                        yield {txn: dict(versions), **rest}
            yield from choose(index + 1, used)  # nothing that anybody saw

        return choose(0, set())


class _Order:
    """What every version holds, if these are the commits."""

    def __init__(self, history: _History, unknown: Mapping[Txn, Mapping[str, int]]) -> None:
        self.history = history
        self.committed: dict[Txn, Mapping[str, int]] = dict(unknown)
        for txn, what in history.txns.items():
            if what.commit is not None and what.writes:
                self.committed[txn] = what.commit.versions
        self.makers: dict[tuple[str, int], list[Txn]] = defaultdict(list)
        self.changes: dict[Place, list[tuple[int, int]]] = defaultdict(list)  # version, value
        for txn, versions in self.committed.items():
            for variable in history.txns[txn].variables:
                if variable in versions:
                    self.makers[variable, versions[variable]].append(txn)
            for place, value in history.txns[txn].writes.items():
                if place[0] in versions:
                    self.changes[place].append((versions[place[0]], value))
        for changes in self.changes.values():
            changes.sort()

    def expected(self, variable: str, version: int, block: int) -> tuple[int, int]:
        """The value, and the version that wrote it."""
        changes = self.changes.get((variable, block), [])
        at = bisect_right(changes, (version, 1 << 62))
        return (changes[at - 1][1], changes[at - 1][0]) if at else (INITIAL, 0)

    def violations(self) -> Iterator[Violation]:
        yield from self._versions()
        yield from self._lost_updates()
        yield from self._snapshots()
        yield from self._reads()
        yield from self._freshness()

    def _versions(self) -> Iterator[Violation]:
        for variable, newest in self.history.versions_seen().items():
            for version in range(1, newest + 1):
                makers = self.makers.get((variable, version), [])
                if not makers:
                    yield Violation("version gap", f"nobody made version {version} of {variable}")
                elif len(makers) > 1:
                    names = " and ".join(map(_name, makers))
                    yield Violation(
                        "version clash", f"{names} made version {version} of {variable}"
                    )
        for txn, versions in self.committed.items():
            begun = self.history.txns[txn].begin.versions
            for variable in self.history.txns[txn].variables:
                if versions.get(variable, 0) <= begun.get(variable, -1):
                    yield Violation(
                        "version clash",
                        f"{_name(txn)} began at version {begun[variable]} of {variable} and made "
                        f"version {versions.get(variable)}",
                    )

    def _lost_updates(self) -> Iterator[Violation]:
        for txn, versions in self.committed.items():
            what = self.history.txns[txn]
            for variable, block in what.writes:
                begun, made = what.begin.versions[variable], versions.get(variable, 0)
                for version, value in self.changes[variable, block]:
                    if begun < version < made:
                        other = self.history.writers[value][0]
                        yield Violation(
                            "lost update",
                            f"{_name(txn)} began at version {begun} of {variable} and made {made}, "
                            f"over block {block} as {_name(other)} left it in {version}",
                        )

    def _snapshots(self) -> Iterator[Violation]:
        """Across variables: all of a commit, or nothing."""
        several = [versions for versions in self.committed.values() if len(versions) > 1]
        for txn, what in self.history.txns.items():
            begun = what.begin.versions
            if len(begun) < 2 or what.begin.before_ns is None:
                continue
            for versions in several:
                inside = {name: v <= begun[name] for name, v in versions.items() if name in begun}
                if len(set(inside.values())) > 1:
                    yield Violation(
                        "torn read", f"{_name(txn)} began at {dict(begun)}: part of {versions}"
                    )

    def _reads(self) -> Iterator[Violation]:
        values: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # block -> value
        for seen in self.history.seen:
            blocks = values[seen.variable, seen.version]
            if blocks.setdefault(seen.block, seen.value) != seen.value:
                yield Violation(
                    "unstable version",
                    f"block {seen.block} of {seen.variable} at version {seen.version} is "
                    f"{blocks[seen.block]:#x} and, to {seen.who}, {seen.value:#x}",
                )
        for seen in self.history.seen:
            value, made = self.expected(seen.variable, seen.version, seen.block)
            if seen.value != value:
                shown = set(values[seen.variable, seen.version].values())
                yield Violation(
                    self._kind_of(seen, made, shown),
                    f"{seen.who} saw {seen.value:#x} in block {seen.block} of {seen.variable} at "
                    f"version {seen.version}, not {value:#x} of version {made}",
                )

    def _kind_of(self, seen: _Seen, made: int, shown: set[int]) -> str:
        """Why this value is wrong. `made`: the version whose value it should be."""
        if seen.value == INITIAL:
            was = 0
        else:
            txn, place = self.history.writers.get(seen.value, (None, None))
            if txn is None or place != (seen.variable, seen.block):
                return "unknown value"
            if txn not in self.committed:
                return "aborted read"
            was = self.committed[txn].get(seen.variable, 0)
            if self.history.txns[txn].writes[place] != seen.value:
                return "aborted read"  # it wrote the block again before it committed
        if was > seen.version:
            return "future read"
        for maker in self.makers.get((seen.variable, made), ()):
            others = self.history.txns[maker].writes.items()
            if any(value in shown for place, value in others if place[0] == seen.variable):
                return "torn read"
        return "stale read"

    def _freshness(self) -> Iterator[Violation]:
        returned: dict[str, list[tuple[int, int]]] = defaultdict(list)  # after_ns, version
        for txn, versions in self.committed.items():
            commit = self.history.txns[txn].commit
            if commit is not None and commit.after_ns is not None:
                for variable, version in versions.items():
                    returned[variable].append((commit.after_ns, version))
        newest: dict[str, list[int]] = {}
        for variable, pairs in returned.items():
            pairs.sort()
            newest[variable] = list(itertools.accumulate((v for _, v in pairs), max))
        for txn, what in self.history.txns.items():
            if what.begin.before_ns is None:
                continue
            for variable, version in what.begin.versions.items():
                at = bisect_right(returned.get(variable, []), (what.begin.before_ns, -1))
                if at and newest[variable][at - 1] > version:
                    yield Violation(
                        "stale begin",
                        f"{_name(txn)} began at version {version} of {variable}, after a commit "
                        f"had returned version {newest[variable][at - 1]}",
                    )


def check(events: Iterable[Event]) -> list[Violation]:
    """What is wrong with a history; nothing where snapshot isolation explains it.

    Args:
        events: of all processes; those of one transaction in their order.

    Returns:
        One entry per rule broken and place; where some outcomes are unknown, those of the guess
        that explains most.

    Example:
        >>> one = Recorder(1)
        >>> txn = one.begin({"x": 0})
        >>> one.write(txn, "x", 5, one.new_value())
        >>> one.commit(txn, {"x": 1})
        >>> one.plain("x", 1, 5, INITIAL)
        >>> [violation.kind for violation in check(one.events)]
        ['stale read']
    """
    history = _History(events)
    best: list[Violation] | None = None
    for unknown in itertools.islice(history.outcomes(), MAX_GUESSES):
        found = list(_Order(history, unknown).violations())
        if best is None or len(found) < len(best):
            best = found
        if not found:
            break
    assert best is not None
    return history.violations + best
