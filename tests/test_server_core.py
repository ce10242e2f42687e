"""The page server's sockets and questions, over real loopback connections, without Ray or C.

Hostile twins of a peer each pin what then happens: closed, counted, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from pyroaring import BitMap

from clamor_ray.actors.engine_like import Answer, EventKind, Settings
from clamor_ray.actors.handshake import ClientHandshake, Hello, Refusal
from clamor_ray.actors.messages import (
    Publication,
    RegionFreed,
    RegionRecord,
    RegionUnknown,
    ServerInfo,
    ServerLost,
    ServerRestarting,
)
from clamor_ray.actors.server_core import ServerCore
from clamor_ray.errors import (
    ExistsError,
    FreedError,
    HomeLostError,
    NoVersionError,
    OutOfMemoryError,
    SnapshotExpired,
)

SECRET = b"s" * 32
HERE, THERE = 0xAAAA, 0xBBBB
HASTE = Settings(
    handshake_s=0.3,
    max_unauthenticated=4,
    answer_s=1.0,
    deadline_s=1.0,
    backoff_first_s=0.01,
    backoff_most_s=0.05,
)
RECORD = RegionRecord(7, 1, 0x1100_0000_0000, 5000, (THERE,))


class FakeEvent:
    def __init__(
        self,
        kind: int,
        region: int = 0,
        server_id: int = 0,
        text: str = "",
        *,
        error: int = 0,
        from_version: int = 0,
        version: int = 0,
        commit_id: int = 0,
    ) -> None:
        self.kind, self.error, self.region = kind, error, region
        self.server_id, self.text = server_id, text
        self.from_version, self.version, self.commit_id = from_version, version, commit_id


class FakeEngine:
    """Asks what a test makes it ask, and remembers the answers."""

    peer_lanes = 3

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: deque[FakeEvent] = deque()
        self.served: list[tuple[int, int]] = []
        self.peers: list[tuple[int, int, int]] = []
        self.answers: list[tuple[object, ...]] = []
        self.retired: list[tuple[int, bool]] = []
        self.serve_fails = False
        self.adopted: set[int] = set()  # homes that came back from the keeper
        self.unknown: set[int] = set()  # regions that are not defined
        self.published: dict[int, int] = {}
        self.staged: set[int] = set()

    def ask(self, event: FakeEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def next_event(self) -> FakeEvent | None:
        if self._events:
            return self._events.popleft()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        return None

    def define_region(self, region, version, base_address, length_bytes, homes) -> None:
        if HERE in homes and region not in self.adopted:
            raise HomeLostError("It is not here.")
        if (region, False) in self.retired:
            raise FreedError("It is retired.")
        self.unknown.discard(region)
        self.answers.append(("define", region, version, base_address, length_bytes, tuple(homes)))

    def refuse_region(self, region: int, error: int) -> None:
        self.answers.append(("refuse", region, error))

    def add_peer(self, server_id: int, lane: int, fd: int) -> None:
        self.peers.append((server_id, lane, fd))

    def peer_lost(self, server_id: int, error: int) -> None:
        self.answers.append(("lost", server_id, error))

    def serve(self, server_id: int, fd: int) -> None:
        if self.serve_fails:
            os.close(fd)
            raise RuntimeError("no")
        self.served.append((server_id, fd))

    def retire(self, region: int, *, force: bool) -> None:
        self.retired.append((region, force))

    def set_changes(self, region, from_version, to_version, runs, *, error=0) -> None:
        said = error if error else runs.tolist()
        self.answers.append(("changes", region, from_version, to_version, said))

    def publish(self, region: int, version: int, commit_id: int) -> None:
        if region in self.unknown:
            raise FreedError("It is not known here.")
        if version > self.published.get(region, 0) + 1:
            raise NoVersionError("A version before it is missing.")
        self.published[region] = max(version, self.published.get(region, 0))
        self.answers.append(("publish", region, version, commit_id))

    def caught_up(self, region: int, *, error: int = 0) -> None:
        self.answers.append(("caught up", region, error))

    def drop_staged(self, region: int, commit_id: int) -> None:
        self.answers.append(("drop", region, commit_id))

    def pull(self, region: int, commit_id: int, server_id: int, layer_bytes: int) -> None:
        if region in self.unknown:
            raise FreedError("It is not known here.")
        if commit_id in self.staged:
            raise ExistsError("It is here.")
        self.answers.append(("pull", region, commit_id, server_id, layer_bytes))

    def close(self) -> None:
        os.close(self._fd)
        for *_, fd in self.served + self.peers:
            os.close(fd)


class Known:
    """A resolver that is a few dictionaries; an exception among the values is raised."""

    def __init__(self) -> None:
        self.regions: dict[int, object] = {}
        self.places: dict[int, list[object]] = {}
        self.asked: list[tuple[int, int]] = []
        self.idle: list[int] = []
        self.idle_fails = 0
        self.gate: asyncio.Event | None = None
        self.versions: dict[tuple[object, ...], list[object]] = {}
        self.asked_versions: list[tuple[object, ...]] = []

    async def _about(self, *question: object):
        self.asked_versions.append(question)
        if self.gate is not None:
            await self.gate.wait()
        answers = self.versions[question]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def changes(self, region: int, from_version: int, to_version: int):
        return await self._about("changes", region, from_version, to_version)

    async def published(self, region: int, since: int):
        return await self._about("published", region, since)

    async def outcome(self, commit_id: int):
        return await self._about("outcome", commit_id)

    async def lookup(self, region: int):
        if self.gate is not None:
            await self.gate.wait()
        answer = self.regions.get(region, RegionUnknown(region))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def locate(self, server_id: int, since_epoch: int):
        self.asked.append((server_id, since_epoch))
        answers = self.places[server_id]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def region_idle(self, region: int) -> None:
        if self.idle_fails:
            self.idle_fails -= 1
            raise RuntimeError("not now")
        self.idle.append(region)


class Node:
    """A ServerCore with its fakes."""

    def __init__(self, server_id: int, secret: bytes = SECRET, settings: Settings = HASTE) -> None:
        self.server_id = server_id
        self.engine, self.known = FakeEngine(), Known()
        self.core = ServerCore(
            self.engine, self.known, server_id=server_id, secret=secret, settings=settings
        )
        self.port = 0

    async def __aenter__(self) -> Node:
        self.port = await self.core.start("127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.core.close()
        self.engine.close()

    def info(self, epoch: int = 1, port: int = 0) -> ServerInfo:
        return ServerInfo(
            self.server_id, "node", "127.0.0.1", port or self.port, "name", "0.1.0", 0, epoch
        )

    def refused(self) -> dict[str, int]:
        return dict(self.core.counters().refused)

    async def connect(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        return sock


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, "it never came true"
        await asyncio.sleep(0.005)  # the other side has no way to tell us


def descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest):
    """Runs a coroutine on a fresh loop of each kind, and looks for leaked descriptors."""
    new = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def runner(work: Callable[[], Awaitable[None]]) -> None:
        new().close()  # a first loop of a process opens descriptors that it keeps
        before = descriptors()
        loop = new()
        try:
            loop.run_until_complete(asyncio.wait_for(work(), 20))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        assert descriptors() == before

    return runner


# -- peers find each other


def test_two_servers_meet(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.known.places[THERE] = [there.info()]
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: len(here.engine.peers) == 3 and len(there.engine.served) == 3)
            assert [(s, lane) for s, lane, _ in here.engine.peers] == [(THERE, n) for n in range(3)]
            assert {s for s, _ in there.engine.served} == {HERE}
            # Nothing is buffered in Python: the first byte after the handshake is the engine's.
            ours, theirs = here.engine.peers[0][2], [fd for _, fd in there.engine.served]
            os.write(ours, b"x")
            seen = []

            def arrived() -> bool:
                for fd in theirs:
                    with contextlib.suppress(BlockingIOError):
                        seen.append(os.read(fd, 10))
                return bool(seen)

            await until(arrived)
            assert seen == [b"x"]
            assert here.core.counters().peers_connected == 1
            assert there.core.counters().accepted == 3

    run(work)


def test_a_question_asked_twice_is_answered_once(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.known.places[THERE] = [there.info()]
            for _ in range(5):
                here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: len(here.engine.peers) == 3)
            assert here.known.asked == [(THERE, 0)]
            # Once it is answered, the same question is a new one: the connections broke.
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: len(here.engine.peers) == 6)

    run(work)


def test_a_restarting_peer_is_waited_for(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                old = there.info(epoch=4, port=closed.getsockname()[1])
                here.known.places[THERE] = [
                    old,
                    ServerRestarting(THERE),
                    RuntimeError("the registry hiccups"),
                    there.info(epoch=5),
                ]
                here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
                await until(lambda: len(here.engine.peers) == 3)
            assert here.known.asked == [(THERE, 0), (THERE, 4), (THERE, 4), (THERE, 4)]
            assert here.engine.answers == []

    run(work)


@pytest.mark.parametrize("answer", [ServerLost(THERE, "node died"), ServerRestarting(THERE)])
def test_a_lost_peer_is_lost(run, answer, caplog) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.places[THERE] = [answer]
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("lost", THERE, Answer.HOME_LOST)]
            assert here.core.counters().peers_lost == 1

    with caplog.at_level(logging.ERROR):
        run(work)
    assert "node died" in caplog.text or "it is restarting" in caplog.text


def test_a_peer_with_another_secret_is_not_used(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE, secret=b"?" * 32) as there:
            here.known.places[THERE] = [there.info()]
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.peers == there.engine.served == []
            assert there.refused()[Refusal.CLOSED.value] >= 3  # we hung up on it

    run(work)


def test_a_peer_that_accepts_and_stalls_is_given_up(run) -> None:
    async def work() -> None:
        with socket.socket() as stalled:
            stalled.bind(("127.0.0.1", 0))
            stalled.listen(64)
            async with Node(HERE) as here:
                port = stalled.getsockname()[1]
                here.known.places[THERE] = [
                    ServerInfo(THERE, "node", "127.0.0.1", port, "name", "0.1.0")
                ]
                here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
                await until(lambda: bool(here.engine.answers))
                assert here.engine.answers == [("lost", THERE, Answer.HOME_LOST)]

    run(work)


def test_closing_in_the_middle_leaves_nothing(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.known.gate = asyncio.Event()
            here.known.places[THERE] = [ServerRestarting(THERE)]
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=1))
            await until(lambda: bool(here.known.asked))
            with await there.connect():
                await until(lambda: there.core.counters().unauthenticated_now == 1)
                await there.core.close()
                await there.core.close()

    run(work)


# -- regions


def test_regions_are_defined_or_refused(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.regions = {
                7: RECORD,
                8: RegionFreed(8),
                9: RuntimeError("never"),
                11: dataclasses.replace(RECORD, region=11, homes=(THERE, HERE)),
                12: dataclasses.replace(RECORD, region=12, homes=(HERE,)),
            }
            here.engine.adopted = {12}
            for region in (7, 8, 9, 10, 11, 12):
                here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=region))
            await until(lambda: len(here.engine.answers) == 6)
            assert set(here.engine.answers) == {
                ("define", 7, 1, RECORD.base_address, 5000, (THERE,)),
                ("refuse", 8, Answer.NO_REGION),
                ("refuse", 9, Answer.TIMEOUT),
                ("refuse", 10, Answer.NO_REGION),
                ("refuse", 11, Answer.HOME_LOST),  # we should have it, and do not
                ("define", 12, 1, RECORD.base_address, 5000, (HERE,)),  # we have it again
            }

    run(work)


def test_a_region_freed_while_it_is_looked_up_is_refused(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.regions = {7: RECORD}
            here.known.gate = asyncio.Event()
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=7))
            await asyncio.sleep(0.02)  # the question is on its way, and must stay there
            here.core.retire(7, force=False)
            here.known.gate.set()
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("refuse", 7, Answer.NO_REGION)]
            assert here.engine.retired == [(7, False)]

    run(work)


DEFINED = ("define", 7, 1, RECORD.base_address, 5000, (THERE,))


def test_old_leases_on_a_freed_region_come_back(run) -> None:
    """After a restart: defined, so that they can, and retired at once, so that no others can."""

    async def work() -> None:
        async with Node(HERE) as here:
            here.known.regions = {
                7: dataclasses.replace(RECORD, freed=True),
                11: dataclasses.replace(RECORD, region=11, homes=(HERE,), freed=True),
            }
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=7))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [DEFINED]
            assert here.engine.retired == [(7, False)]
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=11))
            await until(lambda: len(here.engine.answers) == 2)
            assert here.engine.answers[1] == ("refuse", 11, Answer.HOME_LOST)

    run(work)


def test_an_order_to_retire_says_what_the_region_is(run) -> None:
    """A restarted server may get it before, while and after it asks what it has taken back."""

    async def work() -> None:
        async with Node(HERE) as here:
            here.core.retire(7, force=False, record=RECORD)
            assert here.engine.answers == [DEFINED]
            here.core.retire(7, force=False, record=RECORD)  # again, as after a lost answer
            assert here.engine.answers == [DEFINED]
            assert here.engine.retired == [(7, False)] * 2

        async with Node(HERE) as here:
            here.known.regions = {7: dataclasses.replace(RECORD, freed=True)}
            here.known.gate = asyncio.Event()
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=7))
            await asyncio.sleep(0.02)  # the question is on its way, and must stay there
            here.core.retire(7, force=False, record=RECORD)
            assert here.engine.answers == [DEFINED]  # before it is retired: attaching goes on
            assert here.engine.retired == [(7, False)]

        async with Node(HERE) as here:  # its home, and the memory is gone: it ends all the same
            here.core.retire(7, force=False, record=dataclasses.replace(RECORD, homes=(HERE,)))
            assert here.engine.answers == []
            assert here.engine.retired == [(7, False)]

    run(work)


def test_idle_regions_are_reported_until_it_works(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.idle_fails = 2
            here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=7))
            await until(lambda: here.known.idle == [7])

    run(work)


def test_the_engine_may_speak(run, caplog) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.ask(FakeEvent(EventKind.LOG, text="a client sent nonsense"))
            here.engine.ask(FakeEvent(99))
            await until(lambda: "unknown event 99" in caplog.text)

    with caplog.at_level(logging.WARNING):
        run(work)
    assert "a client sent nonsense" in caplog.text


# -- hostile connections


async def closed_by_peer(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4096), 5):
            pass
    sock.close()


def hello_for(server_id: int, secret: bytes = SECRET) -> ClientHandshake:
    return ClientHandshake(secret, Hello(client_id=THERE, server_id=server_id, lane=0))


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64), Refusal.GARBAGE),
        (os.urandom(1 << 20), Refusal.GARBAGE),
        (hello_for(0x1234).hello, Refusal.WRONG_SERVER),
        (hello_for(HERE).hello[:8] + b"\xff" * 4 + hello_for(HERE).hello[12:], Refusal.VERSION),
        (hello_for(HERE).hello + bytes(32), Refusal.DENIED),
        (hello_for(HERE).hello, Refusal.TIMEOUT),
        (hello_for(HERE).hello[:63], Refusal.TIMEOUT),
        (b"", Refusal.TIMEOUT),
    ],
    ids=["http", "megabyte", "other-server", "version", "bad-proof", "stall", "short", "silent"],
)
def test_who_does_not_pass_is_closed_and_counted(run, said: bytes, refusal: Refusal) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            sock = await here.connect()
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(sock, said)
            await closed_by_peer(sock)
            await until(lambda: here.refused() == {refusal.value: 1})
            assert here.core.counters().unauthenticated_now == 0
            assert here.engine.served == []

    run(work)


def test_a_peer_that_hangs_up_is_counted(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            (await here.connect()).close()
            await until(lambda: here.refused() == {Refusal.CLOSED.value: 1})

    run(work)


def test_a_crowd_of_strangers_is_bounded_and_passes_by(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            there.known.places[HERE] = [here.info()]
            crowd = [await here.connect() for _ in range(HASTE.max_unauthenticated + 6)]
            await until(lambda: here.core.counters().accepted == len(crowd))
            assert here.core.counters().unauthenticated_now <= HASTE.max_unauthenticated
            # A real peer comes through as soon as the strangers' time is over.
            there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
            await until(lambda: len(here.engine.served) >= 3)
            for sock in crowd:
                await closed_by_peer(sock)
            assert here.refused()[Refusal.TIMEOUT.value] == HASTE.max_unauthenticated
            assert here.refused()[Refusal.BUSY.value] >= 6

    run(work)


def test_an_engine_that_refuses_does_not_end_the_server(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.engine.serve_fails = True
            there.known.places[HERE] = [here.info()]
            there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
            await until(lambda: here.refused() == {Refusal.ENGINE.value: 3})
            here.engine.serve_fails = False
            there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
            await until(lambda: len(here.engine.served) == 3)

    run(work)


def test_an_idle_server_never_wakes_up() -> None:
    """Counted by the loop itself: no timer is pending and no descriptor is ready."""

    async def work() -> None:
        async with Node(HERE):
            loop = asyncio.get_running_loop()
            for _ in range(3):
                await asyncio.sleep(0)  # lets the accept task reach its wait
            assert not loop._scheduled  # type: ignore[attr-defined]
            assert not loop._ready  # type: ignore[attr-defined]

    asyncio.run(work())


# -- the header is the truth


def test_constants_are_those_of_the_header() -> None:
    header = Path(__file__).parents[1] / "pagecache_c" / "pagecache.h"
    values = dict(re.findall(r"\b(PC_(?:EVENT|ERR)_\w+) = (-?\d+)", header.read_text()))
    assert {f"PC_EVENT_{kind.name}": str(kind.value) for kind in EventKind}.items() <= (
        values.items()
    )
    assert len(EventKind) == sum(name.startswith("PC_EVENT_") for name in values)
    for answer in Answer:
        assert values[f"PC_ERR_{answer.name}"] == str(answer.value)


# -- versions


CHANGES = BitMap([0, 1, 2, 7, 9, 10, 70_000]).serialize()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([CHANGES], [[0, 3], [7, 1], [9, 2], [70_000, 1]]),
        ([BitMap().serialize()], []),
        ([None], Answer.EXPIRED),
        ([NoVersionError("No.")], Answer.NO_VERSION),
        ([FreedError("No.")], Answer.NO_REGION),
        ([RuntimeError("hiccup"), CHANGES], [[0, 3], [7, 1], [9, 2], [70_000, 1]]),
        ([RuntimeError("deaf")], Answer.TIMEOUT),
    ],
)
def test_what_changed_between_two_versions(run, answers, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["changes", 7, 2, 5] = list(answers)
            here.engine.ask(FakeEvent(EventKind.NEED_CHANGES, 7, from_version=2, version=5))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("changes", 7, 2, 5, said)]

    run(work)


def test_a_question_about_versions_is_answered_once(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.gate = asyncio.Event()
            here.known.versions = {
                ("changes", 7, 2, 5): [CHANGES],
                ("changes", 7, 2, 6): [CHANGES],
                ("published", 7, 2): [[]],
                ("outcome", 99): [{}],
            }
            for _ in range(3):
                for to_version in (5, 6):
                    here.engine.ask(
                        FakeEvent(EventKind.NEED_CHANGES, 7, from_version=2, version=to_version)
                    )
                here.engine.ask(FakeEvent(EventKind.NEED_PUBLISHED, 7, from_version=2))
                here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: len(here.known.asked_versions) == 4)
            here.known.gate.set()
            await until(lambda: len(here.engine.answers) == 4)
            assert len(here.known.asked_versions) == 4
            here.engine.ask(FakeEvent(EventKind.NEED_PUBLISHED, 7, from_version=2))
            await until(lambda: len(here.engine.answers) == 5)  # a new question

    run(work)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[(1, 10), (2, 11)]], [("publish", 7, 1, 10), ("publish", 7, 2, 11), ("caught up", 7, 0)]),
        ([[]], [("caught up", 7, 0)]),
        ([SnapshotExpired("No.")], [("caught up", 7, Answer.EXPIRED)]),
        ([FreedError("No.")], [("caught up", 7, Answer.NO_REGION)]),
        ([RuntimeError("deaf")], [("caught up", 7, Answer.TIMEOUT)]),
        ([[(2, 11)]], [("caught up", 7, Answer.HOME_LOST)]),  # what is missing is not here
    ],
)
def test_a_home_catches_up(run, answers, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["published", 7, 0] = list(answers)
            here.engine.ask(FakeEvent(EventKind.NEED_PUBLISHED, 7))
            await until(lambda: "caught up" in [answer[0] for answer in here.engine.answers])
            assert here.engine.answers == said

    run(work)


@pytest.mark.parametrize(
    ("versions", "homes", "said"),
    [
        ({7: 1, 8: 4}, (HERE,), ("publish", 7, 1, 99)),
        ({7: 1}, (THERE,), ("drop", 7, 99)),  # it was only staged here
        ({}, (HERE,), ("drop", 7, 99)),
    ],
)
def test_what_became_of_a_staged_layer(run, versions, homes, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            # However long it takes: nothing is dropped that may have been published.
            here.known.versions["outcome", 99] = [RuntimeError("deaf")] * 30 + [versions]
            here.known.regions[7] = dataclasses.replace(RECORD, homes=homes)
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: bool(here.engine.answers), 15)
            assert here.engine.answers == [said]

    run(work)


def test_a_layer_of_a_variable_that_is_gone_is_dropped(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["outcome", 99] = [{7: 1}]
            here.known.regions[7] = RegionFreed(7)
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: bool(here.engine.answers), 15)
            assert here.engine.answers == [("drop", 7, 99)]

    run(work)


def test_a_version_before_its_predecessor_waits_for_it(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["outcome", 99] = [{7: 2}]
            here.known.regions[7] = dataclasses.replace(RECORD, homes=(HERE,))
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await asyncio.sleep(0.1)
            assert here.engine.answers == []
            assert await here.core.versions.publish([Publication(7, 1, 98)]) == [(7, 1)]
            await until(lambda: here.engine.published[7] == 2)

    run(work)


def test_what_the_registry_publishes(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.unknown = {8, 9}  # not heard of since a restart; freed
            here.known.regions = {
                8: dataclasses.replace(RECORD, region=8),
                9: RegionFreed(9),
            }
            items = [
                Publication(7, 1, 11),
                Publication(7, 2, 12),
                Publication(8, 1, 11),
                Publication(9, 1, 11),
                Publication(10, 2, 12),  # a gap
                Publication(10, 1, 11),
            ]
            assert await here.core.versions.publish(items) == [(7, 2), (8, 1), (9, 1)]
            assert here.engine.published == {7: 2, 8: 1}

    run(work)


def test_a_layer_is_fetched(run) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.unknown = {7}
            here.known.regions[7] = RECORD
            pulls = [
                asyncio.ensure_future(here.core.versions.pull(7, 99, THERE, 8192)) for _ in range(2)
            ]
            wanted = ("pull", 7, 99, THERE, 8192)
            await until(lambda: wanted in here.engine.answers)
            here.engine.ask(FakeEvent(EventKind.PULLED, 8, commit_id=99))  # another one
            await asyncio.sleep(0.02)
            assert not any(pull.done() for pull in pulls)
            here.engine.ask(FakeEvent(EventKind.PULLED, 7, commit_id=99, error=-7))
            assert [await pull for pull in pulls] == [-7, -7]
            assert here.engine.answers.count(wanted) == 1
            here.engine.staged.add(99)
            assert await here.core.versions.pull(7, 99, THERE, 8192) == 0  # it is here by now

    run(work)


def test_a_fetch_that_never_ends_and_one_that_is_refused(run) -> None:
    async def work() -> None:
        async with Node(HERE, settings=dataclasses.replace(HASTE, pull_s=0.05)) as here:
            assert await here.core.versions.pull(7, 99, THERE, 8192) == Answer.TIMEOUT
            here.engine.unknown = {7}
            here.known.regions[7] = RegionFreed(7)
            with pytest.raises(FreedError):
                await here.core.versions.pull(7, 99, THERE, 8192)

            def full(*_: object) -> None:
                raise OutOfMemoryError("No room.")

            here.engine.pull = full
            with pytest.raises(OutOfMemoryError):
                await here.core.versions.pull(7, 99, THERE, 8192)

    run(work)


def test_a_region_that_was_idle_says_so_again(run) -> None:
    """A registry that was restarted asks once more, and the engine says it only once."""

    async def work() -> None:
        async with Node(HERE) as here:
            assert here.core.retire(7, force=False)
            here.engine.ask(FakeEvent(EventKind.REGION_IDLE, 7))
            await until(lambda: here.known.idle == [7])
            assert not here.core.retire(7, force=False)
            here.core.retire(7, force=True)
            assert here.core._told_idle == {}

    run(work)
