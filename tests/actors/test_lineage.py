"""The lineage without Ray: floors, bounds, the journal after any death, homes that are told."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._protocol.messages import INLINE_BASE
from clamor_ray._protocol.rpc import pack
from clamor_ray.actors.lineage import lineage_service
from clamor_ray.actors.lineage.lineage import Changes, Collection, Lineage, LineageLimits
from clamor_ray.actors.lineage.lineage_journal import LineageJournal
from clamor_ray.actors.lineage.lineage_service import LineageService

BLOCKS = bytes(BitMap([5, 6]).serialize())
BIG = (1 << 63) - 3


def record(run: int = 7, partition: int = 0, attempt: int = 0, **how: Any) -> AttemptRecord:
    fields: dict[str, Any] = {
        "token": bytes([partition % 256]) * 16,
        "stage": "s",
        "function": "f",
        "node_id": "ab",
        "start_ns": 5,
        "reads": ((1, 3, BLOCKS), (2, 0, None)),
        "snapshots": ((1, 3), (2, 0)),
    }
    return AttemptRecord(run_id=run, partition=partition, attempt=attempt, **{**fields, **how})


# ------------------------------------------------------------------ what must stay


def test_the_oldest_pin_of_the_open_is_the_floor() -> None:
    lineage = Lineage()
    assert lineage.open(1, "a", [(9, 4), (9, 6), (8, 1)]) == {8, 9}
    assert lineage.open(2, "b", [(9, 5)]) == set()
    assert lineage.open(3, "c", [(9, 2)]) == {9}
    assert lineage.floors() == {9: 2, 8: 1}
    assert lineage.close([3]) == {9}
    assert lineage.floor(9) == 4
    assert lineage.close([3, 55]) == set()
    assert lineage.close([1]) == {9, 8}
    assert lineage.floors() == {9: 5, 8: None}  # 8: until its homes know
    lineage.released(8)
    assert lineage.floors() == {9: 5}
    lineage.check()


def test_opened_again_it_needs_only_what_it_says_now() -> None:
    lineage = Lineage()
    lineage.open(1, "a", [(9, 4), (8, 1)])
    assert lineage.open(1, "a", [(9, 4), (8, 1)]) == set()
    assert lineage.open(1, "a", [(9, 7)]) == {9, 8}
    assert (lineage.floor(9), lineage.floor(8)) == (7, None)
    assert lineage.open(1, "a", [(8, 3)]) == {9, 8}
    assert lineage.floors() == {8: 3, 9: None}
    lineage.check()


def test_what_is_freed_has_no_floor() -> None:
    lineage = Lineage()
    lineage.open(1, "a", [(9, 4), (8, 1)])
    lineage.open(2, "b", [(9, 4)])
    lineage.forget_region(9)
    lineage.check()
    assert lineage.floors() == {8: 1}
    assert lineage.close([2]) == set()
    assert lineage.close([1]) == {8}


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("open"),
            st.integers(1, 4),
            st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=4),
        ),
        st.tuples(st.just("close"), st.integers(1, 4)),
        st.tuples(st.just("free"), st.integers(1, 3)),
        st.tuples(st.just("note"), st.integers(0, 4), st.integers(0, 3), st.integers(0, 5)),
        st.tuples(st.just("check"), st.integers(0, 9)),
        st.just(("write",)),
        st.just(("full",)),
        st.just(("restart",)),
    ),
    max_size=40,
)


def take_step(lineage: Lineage, pins: dict[int, set[tuple[int, int]]], step: Any) -> None:
    what, *rest = step
    if what == "open":
        lineage.open(rest[0], "d", rest[1])
        pins[rest[0]] = set(rest[1])
    elif what == "close":
        lineage.close(rest)
        pins.pop(rest[0], None)
    elif what == "free":
        lineage.forget_region(rest[0])
        for collection in pins:
            pins[collection] = {pin for pin in pins[collection] if pin[0] != rest[0]}
    elif what == "note":
        lineage.note(record(*rest))
    elif what == "check":
        lineage.check_output(bytes(rest), b"d")


@settings(max_examples=150, deadline=None)
@given(steps)
def test_it_is_what_its_journal_says_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    limits = LineageLimits(per_partition=2, ended=3, bytes=12_000, outputs=4)
    directory = tmp_path_factory.mktemp("lineage")
    journal = LineageJournal(directory)
    lineage = Lineage(limits)
    pins: dict[int, set[tuple[int, int]]] = {}
    for step in [*steps, ("restart",)]:
        take_step(lineage, pins, step)
        lineage.check()
        if step[0] == "full":
            lineage.put_back(lineage.take_changes())
        elif step[0] in ("write", "restart"):
            journal.write(lineage.take_changes())
        if step[0] == "restart":
            journal.close()
            journal = LineageJournal(directory)
            again = Lineage(limits)
            again.restore(journal.load())
            again.check()
            assert again.counters().attempts == lineage.counters().attempts
            assert again.floors() == lineage.floors()
            assert again._records == lineage._records
            assert again._outputs == lineage._outputs
            lineage = again
        floors = {
            region: min(v for s in pins.values() for r, v in s if r == region)
            for region in {r for s in pins.values() for r, _ in s}
        }
        assert {r: f for r, f in lineage.floors().items() if f is not None} == floors
    journal.close()


# ------------------------------------------------------------------ attempts


def test_the_attempts_of_a_run_come_back_as_they_were_said() -> None:
    lineage = Lineage()
    lineage.open(7, "a", [])
    first, second = record(), record(attempt=1, outcome="failed: ValueError")
    again = record(pid=5)  # Ray ran the same one again, elsewhere
    for said in (first, second, again, second, record(run=8)):
        lineage.note(said)
    assert lineage.attempts_of(7) == [first, again, second]
    assert lineage.attempts_of(99) == []
    lineage.check()


def test_a_partition_that_is_computed_for_ever_keeps_its_newest_attempts() -> None:
    lineage = Lineage(LineageLimits(per_partition=3))
    lineage.open(7, "a", [])
    for attempt in range(100):
        lineage.note(record(attempt=attempt))
        lineage.note(record(partition=1, attempt=attempt))
    assert [r.attempt for r in lineage.attempts_of(7) if r.partition == 0] == [97, 98, 99]
    lineage.check()


def test_ended_runs_go_first_and_the_bytes_are_bounded() -> None:
    cost = record().cost_bytes
    lineage = Lineage(LineageLimits(ended=4, bytes=10 * cost))
    lineage.open(7, "a", [])
    for partition in range(6):
        lineage.note(record(8, partition))
        lineage.note(record(7, partition))
    assert [r.partition for r in lineage.attempts_of(8)] == [2, 3, 4, 5]
    assert len(lineage.attempts_of(7)) == 6
    for partition in range(6, 12):
        lineage.note(record(7, partition))
    assert lineage.attempts_of(8) == []
    assert [r.partition for r in lineage.attempts_of(7)] == list(range(2, 12))
    assert lineage.counters().dropped == 2
    lineage.close([7])
    assert len(lineage.attempts_of(7)) == 4
    lineage.check()


def test_calls_of_one_name_are_one_record_of_each_node() -> None:
    lineage = Lineage()
    for _ in range(5):
        for node in ("ab", "cd"):
            lineage.note(record(0, -1, node_id=node))
    assert len(lineage.reads_of(1)) == 2


def test_readers_of_a_region() -> None:
    lineage = Lineage()
    lineage.note(record(partition=1))
    lineage.note(record(partition=2, reads=((2, 0, None),)))
    assert [(r.partition, r.reads) for r in lineage.reads_of(1)] == [(1, ((1, 3, BLOCKS),))]
    assert [(r.partition, r.reads) for r in lineage.reads_of(2)] == [
        (1, ((2, 0, None),)),
        (2, ((2, 0, None),)),
    ]
    assert lineage.reads_of(3) == []


def test_what_is_replayed_is_all_versions_together() -> None:
    both = record(reads=((1, 3, BLOCKS), (1, 4, BitMap([9]).serialize()), (2, 0, None)))
    assert {r: set(BitMap.deserialize(b)) for r, b in both.sets.items()} == {1: {5, 6, 9}}


def test_packed_and_back() -> None:
    said = record(outcome="failed: X", rows=5, output_digest=b"d" * 16, predictor_digest=b"r" * 16)
    assert AttemptRecord.of(said.packed()) == said
    listed = said._replace(reads=[list(read) for read in said.reads])  # type: ignore[arg-type]
    assert AttemptRecord.of(listed.packed()) == said


def test_the_first_output_is_what_the_others_are_compared_with() -> None:
    lineage = Lineage(LineageLimits(outputs=2))
    assert lineage.check_output(b"a", b"1") is None
    assert lineage.check_output(b"a", b"1") == b"1"
    assert lineage.check_output(b"a", b"2") == b"1"
    lineage.note(record(output_digest=b"3"))
    assert lineage.check_output(bytes(16), b"4") == b"3"
    assert lineage.check_output(b"c", b"5") is None  # one too many: the oldest goes
    assert lineage.check_output(b"a", b"6") is None
    lineage.check()


# ------------------------------------------------------------------ the journal


def test_everything_comes_back(tmp_path: Path) -> None:
    journal = LineageJournal(tmp_path)
    said = {
        3: record(BIG, output_digest=b"d", predictor_digest=b"r", rows=8, inputs="a, b"),
        4: record(reads=()),
    }
    changes = Changes(
        {BIG: Collection("near", ((BIG, 3), (1, 0))), 2: Collection("", ())},
        dict(said),
        {b"a": b"1", b"b": b"2"},
        {9: True},
    )
    journal.write(changes)
    journal.close()
    journal.close()
    journal = LineageJournal(tmp_path)
    assert journal.load() == changes
    journal.write(Changes({2: None}, {3: None}, {b"a": None}, {9: False}))
    assert journal.load() == Changes(
        {BIG: Collection("near", ((BIG, 3), (1, 0)))}, {4: said[4]}, {b"b": b"2"}, {}
    )
    assert journal._db.execute("SELECT count(*) FROM reads").fetchone() == (0,)
    journal.close()
    with pytest.raises(errors.ClosedError):
        journal.write(changes)


_WRITER = """
import sys
from pathlib import Path
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray.actors.lineage.lineage import Changes, Collection
from clamor_ray.actors.lineage.lineage_journal import LineageJournal

journal = LineageJournal(Path(sys.argv[1]))
first = max(journal.load().collections, default=0) + 1
print("ready", flush=True)
for n in range(first, first + 1_000_000):
    record = AttemptRecord(b"t", n, "s", 0, 0, "f", reads=((n, n, bytes(3000)), (1, n, None)))
    gone = dict.fromkeys([n - 50] if n > 50 else [])
    journal.write(Changes({n: Collection("", ((n, n),)), **gone}, {n: record, **gone}))
    print(n, flush=True)
"""


def test_killed_at_any_moment_it_has_what_was_written(tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 0.4))  # any moment of the loop, folding in included
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.stdout.close()
        process.wait()
        answered = int(rest.rpartition("\n")[0].rpartition("\n")[2] or 0)
        assert answered > 0
        journal = LineageJournal(tmp_path)
        found = journal.load()
        journal.close()
        newest = max(found.collections)
        assert newest in (answered, answered + 1)  # one more may be whole
        assert set(found.collections) == set(range(max(1, newest - 49), newest + 1))
        assert found.records.keys() == found.collections.keys()
        assert all(len(r.reads) == 2 for r in found.records.values() if r is not None)


# ------------------------------------------------------------------ the service


class FakeHomes:
    """Page servers 1 and 2; region n is at home at those whose number divides it."""

    def __init__(self) -> None:
        self.floors: dict[int, dict[int, int | None]] = {1: {}, 2: {}}
        self.lost: set[int] = set()
        self.freed: set[int] = set()
        self.stuck: asyncio.Event | None = None  # not answered before it is set
        self.failures = 0
        self.running = 0
        self.calls: list[tuple[int, dict[int, int | None]]] = []

    def of(self, region: int) -> tuple[int, ...]:
        if region >= INLINE_BASE or region in self.freed:
            return ()
        return tuple(home for home in (1, 2) if region % home == 0)

    def why_lost(self, server_id: int) -> str | None:
        return "dead" if server_id in self.lost else None

    async def retain(self, home: int, floors: dict[int, int | None]) -> None:
        self.running += 1
        self.calls.append((home, dict(floors)))
        try:
            if self.stuck is not None:
                await self.stuck.wait()
            await asyncio.sleep(0)
            if self.failures:
                self.failures -= 1
                raise OSError("not now")
            self.floors[home].update(floors)
        finally:
            self.running -= 1

    async def examine(self, home: int) -> None:
        pass

    def floor(self, home: int, region: int) -> int | None:
        return self.floors[home].get(region)


class World:
    """A service, its journal, and what it tells; ``restart`` as after a kill."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.homes = FakeHomes()
        self.noted: list[tuple[bytes, dict[int, bytes]]] = []
        self.timeout_s = 20.0

    def start(self) -> LineageService:
        self.retained: dict[int, int | None] = {}  # in the log of commits
        self.service = LineageService(
            self.directory, self.retained.update, self.homes, self._note, self.timeout_s
        )
        self.service.take_back()
        return self.service

    def _note(self, digest: bytes, sets: Mapping[int, bytes]) -> None:
        self.noted.append((digest, dict(sets)))

    async def restart(self) -> LineageService:
        await self.service.stop()
        return self.start()

    async def open(self, collection: int, *pins: tuple[int, int]) -> None:
        await self.service.open(pack(collection, "d", list(pins)))

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            await asyncio.sleep(0.005)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[World], Awaitable[None]]], None]]:
    monkeypatch.setattr(lineage_service, "AGAIN_S", 0.01)
    monkeypatch.setattr(lineage_service, "LOOK_S", 0.02)

    def runner(work: Callable[[World], Awaitable[None]]) -> None:
        async def whole() -> None:
            world = World(tmp_path)
            world.start()
            try:
                await asyncio.wait_for(work(world), 20)
            finally:
                await world.service.stop()

        asyncio.run(whole())

    return runner


Run = Callable[[Callable[[World], Awaitable[None]]], None]


def test_when_open_answers_every_home_and_the_log_know(run: Run) -> None:
    async def work(world: World) -> None:
        inline = INLINE_BASE + 1
        await world.open(5, (2, 4), (3, 1), (inline, 8))
        assert world.homes.floors == {1: {2: 4, 3: 1}, 2: {2: 4}}
        assert world.retained == {2: 4, 3: 1, inline: 8}
        await world.open(6, (2, 2))
        assert world.homes.floor(1, 2) == world.homes.floor(2, 2) == 2
        await world.service.close([6])
        await world.until(lambda: world.homes.floors[1][2] == world.homes.floors[2][2] == 4)
        await world.service.close([5, 5, 77])
        await world.until(lambda: world.homes.floors[1] == {2: None, 3: None})
        await world.until(lambda: world.homes.floors[2] == {2: None})
        assert world.retained == {2: None, 3: None, inline: None}
        await world.until(lambda: world.service.lineage.floors() == {})

    run(work)


def test_it_waits_for_the_answer_even_where_nothing_has_changed(run: Run) -> None:
    async def work(world: World) -> None:
        world.homes.stuck = asyncio.Event()
        first = asyncio.ensure_future(world.open(5, (2, 4)))
        await world.until(lambda: world.homes.running == 2)
        second = asyncio.ensure_future(world.open(6, (2, 4)))
        await world.until(lambda: world.service.lineage.counters().collections == 2)
        await asyncio.wait({second}, timeout=0.1)
        assert not first.done()
        assert not second.done()
        world.homes.stuck.set()
        await asyncio.gather(first, second)

    run(work)


def test_a_home_that_does_not_answer_is_said_and_told_for_as_long_as_it_takes(run: Run) -> None:
    async def work(world: World) -> None:
        world.service._timeout_s = 1.0
        world.homes.stuck = asyncio.Event()
        with pytest.raises(errors.WaitTimeoutError, match="2 page servers"):
            await world.open(5, (2, 4))
        with pytest.raises(errors.WaitTimeoutError):
            await world.open(7, (2, 3))
        assert world.homes.running == 2
        assert len(world.homes.calls) == 2  # never a second message beside the first
        world.homes.stuck.set()
        await world.until(lambda: world.homes.floors == {1: {2: 3}, 2: {2: 3}})
        world.homes.failures = 3
        world.service._timeout_s = 20.0
        await world.open(6, (2, 1))
        assert world.homes.floors == {1: {2: 1}, 2: {2: 1}}

    run(work)


def test_a_lost_home_delays_no_caller(run: Run) -> None:
    async def work(world: World) -> None:
        world.homes.stuck = asyncio.Event()
        opened = asyncio.ensure_future(world.open(5, (2, 4)))
        await world.until(lambda: world.homes.running == 2)
        world.homes.lost = {1, 2}
        await opened
        assert world.homes.running == 0
        await world.service.close([5])
        await world.until(lambda: world.service.lineage.floors() == {})

    run(work)


def test_a_server_that_starts_is_told_again(run: Run) -> None:
    async def work(world: World) -> None:
        await world.open(5, (2, 4), (3, 1))
        world.homes.floors[2].clear()
        world.homes.floors[1].clear()
        assert world.service.floors_at(2) == {2: 4}
        assert world.service.floors_at(1) == {2: 4, 3: 1}
        world.service.server_here(2)
        await world.until(lambda: world.homes.floors[2] == {2: 4})
        assert world.homes.floors[1] == {}

    run(work)


def test_a_restarted_registry_knows_and_says_all_of_it(run: Run) -> None:
    async def work(world: World) -> None:
        await world.open(5, (2, 4), (3, 1))
        await world.open(6, (2, 3))
        said = record(5, output_digest=b"1")
        await world.service.note(said.packed())
        assert await world.service.check_output(pack(b"t", b"2")) is None
        world.homes.floors = {1: {}, 2: {}}
        service = await world.restart()
        assert world.retained == {2: 3, 3: 1}
        await world.until(lambda: world.homes.floors == {1: {2: 3, 3: 1}, 2: {2: 3}})
        assert service.lineage.attempts_of(5) == [said]
        assert await service.check_output(pack(said.token, b"9")) == b"1"
        assert await service.check_output(pack(b"t", b"9")) == b"2"

    run(work)


def test_killed_before_the_homes_know_that_nothing_must_stay(run: Run) -> None:
    async def work(world: World) -> None:
        await world.open(5, (2, 4))
        world.homes.stuck = asyncio.Event()
        await world.service.close([5])
        await world.restart()
        world.homes.stuck.set()
        await world.until(lambda: world.homes.floors == {1: {2: None}, 2: {2: None}})
        await world.until(lambda: world.service.lineage.floors() == {})
        world.homes.calls.clear()
        await world.service._saved(world.service._deadline())
        await world.restart()
        assert not world.homes.calls
        assert world.service.lineage.floors() == {}

    run(work)


def test_a_freed_variable_is_refused_and_forgotten(run: Run) -> None:
    async def work(world: World) -> None:
        await world.open(5, (2, 4), (3, 1))
        world.homes.freed.add(2)
        world.service.region_freed(2)
        assert world.retained == {2: None, 3: 1}
        assert world.service.lineage.floors() == {3: 1}
        with pytest.raises(errors.FreedError):
            await world.open(6, (2, 4))
        await world.service.close([5])
        await world.until(lambda: world.service.lineage.floors() == {})

    run(work)


def test_an_answered_note_is_written_and_a_full_disk_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        journal = world.service._journal

        def full(changes: Changes) -> None:
            raise errors.JournalFullError("The disk is full.")

        with monkeypatch.context() as patch:
            patch.setattr(journal, "write", full)
            with pytest.raises(errors.JournalFullError):
                await world.service.note(record(predictor_digest=b"r").packed())
            with pytest.raises(errors.JournalFullError):
                await world.open(5, (2, 4))
        assert journal.load() == Changes()
        await world.service.note(record(partition=1).packed())
        found = journal.load()
        assert [r.partition for r in found.records.values() if r is not None] == [0, 1]
        assert found.collections.keys() == {5}
        assert world.noted == [(b"r", {1: BLOCKS})]

    run(work)


def test_whatever_fails_who_waits_is_told_and_nothing_is_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        journal = world.service._journal

        def broken(changes: Changes) -> None:
            raise TypeError("not this")

        with monkeypatch.context() as patch:
            patch.setattr(journal, "write", broken)
            with pytest.raises(errors.InternalError, match="not this"):
                await world.open(5, (2, 4))
            with pytest.raises(errors.InternalError, match="not this"):
                await world.service.note(record().packed())
        await world.service.note(record(partition=1).packed())
        found = journal.load()
        assert [r.partition for r in found.records.values() if r is not None] == [0, 1]
        assert found.collections.keys() == {5}

    run(work)


def test_text_that_is_no_unicode_is_written(run: Run) -> None:
    async def work(world: World) -> None:
        name = b"caf\xe9".decode(errors="surrogateescape")
        await world.service.open(pack(5, name, []))
        await world.service.note(record(5, stage=name, outcome=f"failed: {name}").packed())
        service = await world.restart()
        (found,) = service.lineage.attempts_of(5)
        assert (found.stage, found.outcome) == ("caf\\udce9", "failed: caf\\udce9")
        await service.note(record(5).packed())

    run(work)


def test_a_disk_that_hangs_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        goes_on = threading.Event()
        write = world.service._journal.write

        def hanging(changes: Changes) -> None:
            assert goes_on.wait(20)
            write(changes)

        monkeypatch.setattr(world.service._journal, "write", hanging)
        world.service._timeout_s = 0.1
        try:
            with pytest.raises(errors.WaitTimeoutError, match="written"):
                await world.service.note(record().packed())
            with pytest.raises(errors.WaitTimeoutError, match="written"):
                await world.service.check_output(pack(b"t", b"1"))
        finally:
            goes_on.set()
        world.service._timeout_s = 20.0
        await world.service.note(record(partition=1).packed())
        assert len(world.service._journal.load().records) == 2

    run(work)


def test_at_the_end_notes_are_answered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait, those that are being written, and those that come later."""

    async def work(world: World) -> None:
        begun, goes_on = threading.Event(), threading.Event()
        write = world.service._journal.write

        def slow(changes: Changes) -> None:
            begun.set()
            assert goes_on.wait(20)
            write(changes)

        monkeypatch.setattr(world.service._journal, "write", slow)
        first = asyncio.ensure_future(world.service.note(record().packed()))
        opened = asyncio.ensure_future(world.open(5))
        await world.until(begun.is_set)
        second = asyncio.ensure_future(world.service.note(record(partition=1).packed()))
        await asyncio.sleep(0)
        goes_on.set()
        await world.service.stop()
        await asyncio.wait_for(asyncio.gather(first, second), 10)
        with pytest.raises(errors.ClosedError):
            await opened
        await asyncio.wait_for(world.service.note(record().packed()), 10)
        await asyncio.wait_for(world.service.close([5]), 10)

    run(work)


def test_what_is_inherited_may_be_gone(run: Run) -> None:
    async def work(world: World) -> None:
        world.homes.freed.add(3)
        await world.service.open(pack(5, "d", [(2, 4)], [(3, 1), (2, 3), (4, 0), (2, 4)]))
        assert world.retained == {2: 3, 4: 0}
        assert world.homes.floors[2] == {2: 3, 4: 0}
        with pytest.raises(errors.FreedError):
            await world.service.open(pack(5, "d", [(3, 1)], [(2, 0)]))
        with pytest.raises(ValueError, match="count from 0"):
            await world.service.open(pack(5, "d", [], [(2, -1)]))
        assert world.service.lineage.floors() == {2: 3, 4: 0}
        await world.service.open(pack(5, "d", [(2, 4)]))
        assert world.service.lineage.floor(2) == 4
        world.service.lineage.check()

    run(work)


def test_many_notes_are_few_transactions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        batches: list[int] = []
        write = world.service._journal.write

        def counted(changes: Changes) -> None:
            batches.append(len(changes.records))
            write(changes)

        monkeypatch.setattr(world.service._journal, "write", counted)
        await asyncio.gather(*(world.service.note(record(7, n).packed()) for n in range(500)))
        assert sum(batches) == 500
        assert len(batches) <= 2

    run(work)


def test_a_plain_task_shows_too(run: Run) -> None:
    async def work(world: World) -> None:
        world.service.note_plain(b"n", {4: BLOCKS}, ("mod.f", "cd", {4: 2}))
        (found,) = world.service.lineage.reads_of(4)
        assert (found.function, found.node_id, found.reads) == ("mod.f", "cd", ((4, 2, BLOCKS),))
        await world.service._saved(world.service._deadline())
        service = await world.restart()
        assert service.lineage.reads_of(4) == [found]

    run(work)
