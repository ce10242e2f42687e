"""A page server that gives a home, and one that takes it: two engines in this process, no Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import RegionUnknown
from clamor_ray.actors.page_server import moved_homes
from clamor_ray.actors.page_server.moved_homes import MovedHomes
from clamor_ray.actors.page_server.page_server import PageServer
from tests.support.engine_pair import (
    BLOCK,
    DATA,
    GIVER,
    HERE,
    NONE,
    TAKER,
    THERE,
    Server,
    blocks_at,
    content,
    engine_pair,
    prepared,
)


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with engine_pair() as pair:
        yield pair


def carry(giver: Server, taker: Server, blocks: BitMap, commit_id: int, attempt: int = 1) -> None:
    n_bytes = giver.moved.stage_home(7, 0, commit_id, bytes(blocks.serialize()))
    taker.moved.take(7, attempt, GIVER, [(commit_id, n_bytes)])
    giver.moved.drop_layers(7, [commit_id])


def test_a_home_moves(servers: tuple[Server, Server]) -> None:
    giver, taker = servers
    assert BitMap.deserialize(giver.moved.home_blocks(7, 0)) == DATA
    taker.moved.begin(THERE, 1, 7 * BLOCK, NONE)
    carry(giver, taker, DATA & BitMap(range(5)), 1)
    carry(giver, taker, DATA - BitMap(range(5)), 2)
    taker.moved.seal(7, 1, 0)
    assert not taker.is_home
    taker.rehome(THERE)
    giver.rehome(THERE)
    assert (giver.is_home, taker.is_home) == (False, True)
    assert blocks_at(taker) == content(DATA, 1)
    assert giver.engine.stats()["layers"] == taker.engine.stats()["layers"] == 0
    assert prepared() == 1  # at the taker; no descriptor of the attempt is left
    with pytest.raises(errors.ServerUnavailableError, match="does not know this attempt"):
        taker.moved.seal(7, 1, 0)


def test_an_old_word_changes_nothing(servers: tuple[Server, Server]) -> None:
    giver, taker = servers
    taker.moved.begin(THERE, 1, 0, NONE)
    carry(giver, taker, DATA, 1)
    taker.moved.seal(7, 1, 0)
    taker.rehome(THERE)
    giver.rehome(THERE)
    taker.rehome(HERE)  # of the term before; it was on its way
    assert taker.is_home


def test_what_is_prepared_for_a_later_term_is_no_home_in_an_earlier_one(
    servers: tuple[Server, Server],
) -> None:
    """It was the home before, and is to be it again: a word of that time is on its way still."""
    giver, taker = servers
    later = replace(THERE, term=4)
    taker.moved.begin(later, 1, 0, NONE)
    carry(giver, taker, DATA, 1)
    taker.moved.seal(7, 1, 0)
    with pytest.raises(errors.WaitTimeoutError, match="prepared here for a later term"):
        taker.rehome(THERE)
    assert not taker.is_home
    taker.rehome(later)
    assert taker.is_home


def test_who_is_the_home_has_heard_it_when_its_keeper_has() -> None:
    """The registry goes on then: it tells the home before, or lets commits go on."""
    said: list[str] = []

    def wait_for_keeper() -> None:
        said.append("keeper")
        raise errors.WaitTimeoutError("The keeper is stopped.")

    server: Any = PageServer.__new__(PageServer)
    server._engine = SimpleNamespace(server_id=TAKER, wait_for_keeper=wait_for_keeper)
    server._core = SimpleNamespace(rehome=lambda record: said.append("engine"))
    server._moved_homes = SimpleNamespace(told=lambda record: None)
    server._pins = SimpleNamespace(regions={})
    server._on_loop = asyncio.run
    with pytest.raises(errors.WaitTimeoutError, match="stopped"):
        server.rehome(THERE)
    assert said == ["engine", "keeper"]
    server.rehome(HERE)
    assert said == ["engine", "keeper", "engine"]


def test_another_attempt_ends_the_one_before(servers: tuple[Server, Server]) -> None:
    giver, taker = servers
    before = prepared()
    taker.moved.begin(THERE, 1, 0, NONE)
    taker.moved.begin(THERE, 2, 0, NONE)
    taker.moved.drop(7, 1)  # late
    with pytest.raises(errors.ServerUnavailableError):
        carry(giver, taker, DATA, 1, attempt=1)
    carry(giver, taker, DATA, 2, attempt=2)
    taker.moved.drop(7, 2)
    taker.moved.drop(7, 2)
    assert prepared() == before
    with pytest.raises(errors.HomeLostError):
        taker.define(THERE)


def test_what_a_server_before_this_one_had_sealed_is_dropped(
    servers: tuple[Server, Server],
) -> None:
    giver, taker = servers
    taker.moved.begin(THERE, 1, 0, NONE)
    carry(giver, taker, DATA, 1)
    taker.moved.seal(7, 1, 0)
    again = MovedHomes(taker.engine, taker.pull, taker.look_up, taker.rehome, taker.unpinned.append)
    again.drop(7, 1)
    with pytest.raises(errors.HomeLostError):
        taker.define(THERE)


def test_records_that_are_not_kept_are_of_no_use(servers: tuple[Server, Server]) -> None:
    giver, _ = servers
    with pytest.raises(errors.NoVersionError):
        giver.moved.stage_records(7, 0, [1, 2], 1 << 20)

    class Engine:
        def stage_record(self, region: int, version: int, commit_id: int) -> int:
            if version < 5:
                raise errors.SnapshotExpired("It is not kept.")
            return 10 * version

    giver.moved._engine = Engine()  # type: ignore[assignment]
    assert giver.moved.stage_records(7, 3, [1, 2, 3, 4, 5], 100) == [0, 0, 50, 60]


def test_layers_of_one_call_are_pulled_side_by_side(servers: tuple[Server, Server]) -> None:
    giver, taker = servers
    both = threading.Barrier(2, timeout=10.0)

    def pull(commit_id: int, region: int, from_server: int, layer_bytes: int) -> None:
        both.wait()
        taker.pull(commit_id, region, from_server, layer_bytes)

    taker.moved._pull = pull
    taker.moved.begin(THERE, 1, 0, NONE)
    halves = {1: DATA & BitMap(range(5)), 2: DATA - BitMap(range(5))}
    layers = [
        (commit_id, giver.moved.stage_home(7, 0, commit_id, bytes(blocks.serialize())))
        for commit_id, blocks in halves.items()
    ]
    taker.moved.take(7, 1, GIVER, layers)
    giver.moved.drop_layers(7, [1, 2])
    taker.moved.seal(7, 1, 0)
    taker.rehome(THERE)
    giver.rehome(THERE)
    assert blocks_at(taker) == content(DATA, 1)


def test_of_layers_of_which_one_is_gone_none_stays(servers: tuple[Server, Server]) -> None:
    giver, taker = servers
    taker.moved.begin(THERE, 1, 0, NONE)
    n_bytes = giver.moved.stage_home(7, 0, 1, bytes(DATA.serialize()))

    def pull(commit_id: int, region: int, from_server: int, layer_bytes: int) -> None:
        if commit_id == 2:
            raise errors.CommitAbortedError("It is gone.")
        taker.pull(commit_id, region, from_server, layer_bytes)

    taker.moved._pull = pull
    with pytest.raises(errors.CommitAbortedError):
        taker.moved.take(7, 1, GIVER, [(1, n_bytes), (2, n_bytes)])
    giver.moved.drop_layers(7, [1])
    assert taker.engine.stats()["layers"] == 0


def test_a_taker_without_room_says_so(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, taker = servers
    before = prepared()
    monkeypatch.setattr(moved_homes, "check_room", no_room)
    with pytest.raises(errors.OutOfMemoryError, match="Becoming the home of variable 7"):
        taker.moved.begin(THERE, 1, 1 << 30, NONE)
    assert prepared() == before


def no_room(n_bytes: int, what: str, hint: str) -> None:
    raise errors.OutOfMemoryError(f"{what} needs {n_bytes}.", hint=hint)


def silence() -> float:
    return time.monotonic() + moved_homes.SILENCE_S + 1.0


def test_what_nobody_asks_for_is_dropped(servers: tuple[Server, Server]) -> None:
    giver, taker = servers
    before = prepared()
    taker.moved.begin(THERE, 1, 0, NONE)
    carry(giver, taker, DATA, 1)
    taker.moved.look(time.monotonic())
    assert prepared() > before
    taker.moved.look(silence())
    assert prepared() == before


@pytest.mark.parametrize(
    ("answer", "is_home", "stays"),
    [
        (RuntimeError("the registry is being restarted"), False, True),
        (HERE, False, False),
        (RegionUnknown(7), False, False),
        (THERE, True, False),
    ],
    ids=["no answer", "giver", "gone", "taker"],
)
def test_what_is_sealed_is_the_registrys_to_say(
    servers: tuple[Server, Server], answer: Any, is_home: bool, stays: bool
) -> None:
    """Its journal may have it already."""
    giver, taker = servers
    taker.moved.begin(THERE, 1, 0, NONE)
    carry(giver, taker, DATA, 1)
    taker.moved.seal(7, 1, 0)
    taker.answer = answer
    taker.moved.look(silence())
    assert taker.is_home == is_home
    assert bool(taker.moved._attempts) == stays


def test_what_is_taken_at_the_moment_is_not_silent(servers: tuple[Server, Server]) -> None:
    _, taker = servers
    taker.moved.begin(THERE, 1, 0, NONE)
    with taker.moved._attempts[7].busy:
        taker.moved.look(silence())
    assert taker.moved._attempts


def test_an_object_is_let_go_of_when_nobody_reads_it(servers: tuple[Server, Server]) -> None:
    giver, _ = servers
    giver.moved.left(8)  # of which no reply is on its way
    giver.moved.look(time.monotonic())
    assert giver.unpinned == [8]
    giver.moved.look(time.monotonic())
    assert giver.unpinned == [8]


def test_nothing_is_looked_at_for_ever(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_homes, "LOOK_S", 0.01)
    _, taker = servers
    taker.moved.begin(THERE, 1, 0, NONE)
    assert any(each.name == "clamor-moves" for each in threading.enumerate())
    taker.moved.drop(7, 1)
    deadline_s = time.monotonic() + 20.0
    while any(each.name == "clamor-moves" for each in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
