"""The checker of histories: it accepts a store that keeps the rules and catches each one broken."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.lab import isolation
from tests.support.lab.isolation import INITIAL, KINDS, Recorder, Violation, check


def kinds(*recorders: Recorder) -> set[str]:
    return {violation.kind for recorder in [recorders] for violation in checked(*recorder)}


def checked(*recorders: Recorder) -> list[Violation]:
    return check(event for recorder in recorders for event in recorder.events)


def wrote(
    recorder: Recorder, begun: dict[str, int], made: dict[str, int], *blocks: int
) -> list[int]:
    """A transaction that writes the same blocks of all its variables; the values, in order."""
    txn = recorder.begin(begun)
    values = []
    for variable in made:
        for block in blocks:
            values.append(recorder.new_value())
            recorder.write(txn, variable, block, values[-1])
    recorder.commit(txn, made)
    return values


# ------------------------------------------------------- hand-made histories


def test_a_good_history() -> None:
    one, two = Recorder(1), Recorder(2)
    a, b = wrote(one, {"x": 0}, {"x": 1}, 0, 1)
    txn = two.begin({"x": 0})  # overlaps, other blocks
    two.read(txn, "x", 0, INITIAL)
    mine = two.new_value()
    two.write(txn, "x", 2, mine)
    two.read(txn, "x", 2, mine)
    two.commit(txn, {"x": 2})
    refused = one.begin({"x": 1})
    one.write(refused, "x", 0, one.new_value())
    one.abort(refused)
    for version, values in enumerate([(0, 0, 0), (a, b, 0), (a, b, mine)]):
        for block, value in enumerate(values):
            two.plain("x", version, block, value)
    looked = one.begin({"x": 2})
    one.read(looked, "x", 1, b)
    one.commit(looked, {})
    assert checked(one, two) == []


def lost_update(one: Recorder, two: Recorder) -> None:
    wrote(one, {"x": 0}, {"x": 1}, 4)
    wrote(two, {"x": 0}, {"x": 2}, 4)


def torn_read(one: Recorder, two: Recorder) -> None:
    a, _ = wrote(one, {"x": 0}, {"x": 1}, 0, 1)
    two.plain("x", 1, 0, a)
    two.plain("x", 1, 1, INITIAL)


def torn_across_variables(one: Recorder, two: Recorder) -> None:
    wrote(one, {"x": 0, "y": 0}, {"x": 1, "y": 1}, 0)
    two.commit(two.begin({"x": 1, "y": 0}, before_ns=5), {})


def future_read(one: Recorder, two: Recorder) -> None:
    (a,) = wrote(one, {"x": 0}, {"x": 1}, 0)
    two.plain("x", 0, 0, a)


def stale_read(one: Recorder, two: Recorder) -> None:
    (a,) = wrote(one, {"x": 0}, {"x": 1}, 0)
    wrote(one, {"x": 1}, {"x": 2}, 0)
    txn = two.begin({"x": 2})
    two.read(txn, "x", 0, a)
    two.commit(txn, {})


def aborted_read(one: Recorder, two: Recorder) -> None:
    txn = one.begin({"x": 0})
    value = one.new_value()
    one.write(txn, "x", 0, value)
    one.abort(txn)
    two.plain("x", 0, 0, value)


def half_way_read(one: Recorder, two: Recorder) -> None:
    txn = one.begin({"x": 0})
    first, last = one.new_value(), one.new_value()
    one.write(txn, "x", 0, first)
    one.write(txn, "x", 0, last)
    one.commit(txn, {"x": 1})
    two.plain("x", 1, 0, first)


def unknown_value(one: Recorder, two: Recorder) -> None:
    (a,) = wrote(one, {"x": 0}, {"x": 1}, 0)
    two.plain("x", 1, 1, a)  # of another block


def own_write(one: Recorder, two: Recorder) -> None:
    txn = one.begin({"x": 0})
    one.write(txn, "x", 0, one.new_value())
    one.read(txn, "x", 0, INITIAL)
    one.commit(txn, {"x": 1})


def unstable_version(one: Recorder, two: Recorder) -> None:
    (a,) = wrote(one, {"x": 0}, {"x": 1}, 0)
    one.plain("x", 1, 0, a)
    two.plain("x", 1, 0, INITIAL)


def version_gap(one: Recorder, two: Recorder) -> None:
    wrote(one, {"x": 0}, {"x": 2}, 0)


def version_clash(one: Recorder, two: Recorder) -> None:
    wrote(one, {"x": 0}, {"x": 1}, 0)
    wrote(two, {"x": 0}, {"x": 1}, 1)


def version_goes_back(one: Recorder, two: Recorder) -> None:
    wrote(one, {"x": 0}, {"x": 1}, 0)
    wrote(two, {"x": 1}, {"x": 1}, 0)


def stale_begin(one: Recorder, two: Recorder) -> None:
    txn = one.begin({"x": 0}, before_ns=10)
    one.write(txn, "x", 0, one.new_value())
    one.commit(txn, {"x": 1}, after_ns=20)
    two.commit(two.begin({"x": 0}, before_ns=21), {})


def bad_record(one: Recorder, two: Recorder) -> None:
    txn = one.begin({"x": 0})
    one.commit(txn, {})
    one.read(txn, "x", 0, INITIAL)


BROKEN = {
    lost_update: "lost update",
    torn_read: "torn read",
    torn_across_variables: "torn read",
    future_read: "future read",
    stale_read: "stale read",
    aborted_read: "aborted read",
    half_way_read: "aborted read",
    unknown_value: "unknown value",
    own_write: "own write",
    unstable_version: "unstable version",
    version_gap: "version gap",
    version_clash: "version clash",
    version_goes_back: "version clash",
    stale_begin: "stale begin",
    bad_record: "bad record",
}


@pytest.mark.parametrize("history", BROKEN, ids=lambda history: history.__name__)
def test_a_broken_history(history: Callable[[Recorder, Recorder], None]) -> None:
    one, two = Recorder(1), Recorder(2)
    history(one, two)
    assert BROKEN[history] in kinds(one, two)


def test_every_kind_is_tried() -> None:
    assert set(BROKEN.values()) == set(KINDS)


def test_what_is_no_violation() -> None:
    one, two = Recorder(1), Recorder(2)
    txn = one.begin({"x": 0}, before_ns=10)
    one.write(txn, "x", 0, one.new_value())
    one.commit(txn, {"x": 1}, after_ns=20)
    two.commit(two.begin({"x": 0}, before_ns=19), {})  # it had not returned
    two.commit(two.begin({"x": 0}), {})  # on a frozen snapshot
    wrote(one, {"x": 1, "y": 0}, {"x": 2, "y": 1}, 0)
    two.commit(two.begin({"x": 2, "y": 0}), {})  # of two frozen snapshots
    assert checked(one, two) == []


def test_unknown_outcomes() -> None:
    one, two, three = Recorder(1), Recorder(2), Recorder(3)

    def unknown(recorder: Recorder, block: int) -> int:
        txn = recorder.begin({"x": 0, "y": 0})
        value = recorder.new_value()
        recorder.write(txn, "x", block, value)
        recorder.write(txn, "y", block, recorder.new_value())
        return value

    committed, _ = unknown(one, 0), unknown(two, 1)
    wrote(three, {"x": 0}, {"x": 1}, 2)
    assert checked(one, two, three) == []  # nobody saw either
    three.plain("x", 2, 0, committed)
    three.plain("x", 2, 1, INITIAL)
    assert checked(one, two, three) == []  # the first one is version 2, the second one is nothing
    wrote(three, {"x": 2}, {"x": 3}, 5)
    wrote(three, {"y": 1}, {"y": 2}, 5)
    assert checked(one, two, three) == []
    three.plain("x", 1, 0, committed)
    assert "unstable version" not in kinds(one, two, three)
    assert "future read" in kinds(one, two, three)


def test_an_unknown_outcome_is_no_excuse_for_a_lost_update() -> None:
    one, two = Recorder(1), Recorder(2)
    txn = one.begin({"x": 0})
    value = one.new_value()
    one.write(txn, "x", 0, value)
    wrote(two, {"x": 0}, {"x": 2}, 0)
    assert kinds(one, two) == {"lost update"}  # only it can have made version 1


# --------------------------------------------------------------- simulation


@dataclass
class Store:
    """A store of versions; `rule` is the one that it breaks, now and then."""

    rng: random.Random
    rule: str = ""
    n_blocks: int = 6
    versions: dict[str, list[dict[int, int]]] = field(
        default_factory=lambda: {"x": [{}], "y": [{}]}
    )
    writers: dict[str, list[set[int]]] = field(default_factory=lambda: {"x": [set()], "y": [set()]})
    dropped: list[tuple[str, int, int]] = field(default_factory=list)

    def breaks(self, rule: str) -> bool:
        return rule == self.rule and self.rng.random() < 0.2

    def newest(self) -> dict[str, int]:
        newest = {name: len(versions) - 1 for name, versions in self.versions.items()}
        for name in newest:
            if newest[name] and self.breaks("stale begin"):
                newest[name] -= 1
        return newest

    def read(self, name: str, version: int, block: int) -> int:
        versions = self.versions[name]
        if self.breaks("future read"):
            version = len(versions) - 1
        if version and self.breaks("stale read"):
            version -= 1
        if self.dropped and self.breaks("aborted read"):
            name_, block_, value = self.rng.choice(self.dropped)
            if (name_, block_) == (name, block):
                return value
        if self.breaks("unknown value"):
            block = (block + 1) % self.n_blocks
        return versions[version].get(block, INITIAL)

    def commit(
        self, begun: dict[str, int], writes: dict[tuple[str, int], int]
    ) -> dict[str, int] | None:
        names = sorted({name for name, _ in writes})
        for name in names:
            mine = {block for of, block in writes if of == name}
            since = set().union(*self.writers[name][begun[name] + 1 :])
            if since & mine and not self.breaks("lost update"):
                self.dropped += [(of, block, value) for (of, block), value in writes.items()]
                return None
        made = {}
        for name in names:
            mine = {block: value for (of, block), value in writes.items() if of == name}
            if len(mine) > 1 and self.breaks("torn read"):
                mine.pop(min(mine))
            self.versions[name].append({**self.versions[name][-1], **mine})
            self.writers[name].append(set(mine))
            made[name] = len(self.versions[name]) - 1
            if self.breaks("version gap"):
                self.versions[name].append(self.versions[name][-1])
                self.writers[name].append(set())
                made[name] += 1
            if made[name] > 1 and self.breaks("version clash"):
                made[name] -= 1
        return made


@dataclass
class Process:
    store: Store
    recorder: Recorder
    mortal: bool
    txn: tuple[int, int] | None = None
    begun: dict[str, int] = field(default_factory=dict)
    writes: dict[tuple[str, int], int] = field(default_factory=dict)

    def step(self, now_ns: int) -> None:
        rng, recorder, store = self.store.rng, self.recorder, self.store
        name, block = rng.choice("xy"), rng.randrange(store.n_blocks)
        if self.txn is None:
            if rng.random() < 0.4:
                version = rng.randrange(len(store.versions[name]))
                recorder.plain(name, version, block, store.read(name, version, block))
                return
            self.begun, self.writes = store.newest(), {}
            self.txn = recorder.begin(self.begun, before_ns=now_ns)
        elif (kind := rng.random()) < 0.3:
            if (name, block) in self.writes and not store.breaks("own write"):
                value = self.writes[name, block]
            else:
                value = store.read(name, self.begun[name], block)
            recorder.read(self.txn, name, block, value)
        elif kind < 0.7:
            self.writes[name, block] = recorder.new_value()
            recorder.write(self.txn, name, block, self.writes[name, block])
        else:
            self._end(now_ns, rng.random() < 0.1)

    def _end(self, now_ns: int, gives_up: bool) -> None:
        assert self.txn is not None
        made = None if gives_up else self.store.commit(self.begun, self.writes)
        if self.mortal and self.store.rng.random() < 0.05:
            pass  # it dies before it can tell
        elif made is None:
            self.recorder.abort(self.txn)
        else:
            self.recorder.commit(self.txn, made, after_ns=now_ns)
        self.txn = None


def simulate(rule: str, seed: int, mortal: bool = False, steps: int = 1500) -> list[Violation]:
    rng = random.Random(seed)
    store = Store(rng, rule)
    processes = [Process(store, Recorder(number), mortal) for number in range(1, 5)]
    for now_ns in range(steps):
        rng.choice(processes).step(now_ns)
    # As the tests do: in the end somebody looks at everything.
    last = Recorder(9)
    for name, versions in store.versions.items():
        for version, blocks in enumerate(versions):
            for block in range(store.n_blocks):
                last.plain(name, version, block, blocks.get(block, INITIAL))
    return checked(*(process.recorder for process in processes), last)


@pytest.mark.parametrize("mortal", [False, True])
def test_a_correct_store_is_found_correct(mortal: bool) -> None:
    for seed in range(30):
        assert simulate("", seed, mortal, steps=250 if mortal else 1500) == [], seed


RULES = sorted(
    set(KINDS) - {"unstable version", "bad record"}  # those follow from others, or from the test
)


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_store_is_caught(rule: str) -> None:
    caught = [simulate(rule, seed) for seed in range(20)]
    assert all(caught), [seed for seed, found in enumerate(caught) if not found]
    assert any(rule in {violation.kind for violation in found} for found in caught)


def test_a_history_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "history"
    recorder = Recorder(1, path)
    wrote(recorder, {"x": 0}, {"x": 1}, 0, 1)
    recorder.plain("x", 1, 0, 7)
    assert isolation.load(path) == recorder.events
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    assert isolation.load(path) == recorder.events[:-1]


def test_the_example_in_the_docs() -> None:
    assert doctest.testmod(isolation).failed == 0
