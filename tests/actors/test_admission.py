"""Strangers on the data port: they are bounded, and no peer is kept out by them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time

import pytest

from clamor_ray._protocol.handshake import ClientHandshake, Hello, Refusal
from clamor_ray.actors.page_server.admission import Attended, Strangers, origin_of
from clamor_ray.actors.page_server.engine_like import DEFAULTS, EventKind
from tests.support.server_rig import HASTE, HERE, SECRET, THERE, FakeEvent, Node, until
from tests.support.strangers import strangers

CROWD = 10_000
PATIENT = dataclasses.replace(DEFAULTS, deadline_s=15.0)


# Page servers run on uvloop.
of_uvloop = pytest.mark.parametrize(
    "run_core", ["uvloop", pytest.param("asyncio", marks=pytest.mark.soak)], indirect=True
)


class FakeSocket:
    """Remembers that it was shut down."""

    ended = False

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_RDWR
        self.ended = True


def taken(all_of_them: Strangers, host: str):
    return all_of_them.take(FakeSocket(), host, 0.0)  # type: ignore[arg-type]


def test_the_oldest_goes_first() -> None:
    here = Strangers(3, 3, 0.0)
    first, second, *_ = [taken(here, f"10.0.0.{n}") for n in range(3)]
    newest = taken(here, "10.0.0.9")
    assert first.had_to_go
    assert first.sock.ended
    assert len(here) == 3
    assert not newest.had_to_go
    here.leave(second)
    taken(here, "10.0.0.10")
    assert len(here) == 3
    assert not newest.had_to_go


def test_one_address_does_not_send_off_those_of_another() -> None:
    here = Strangers(8, 2, 0.0)
    peer = taken(here, "10.0.0.1")
    crowd = [taken(here, "10.0.0.66") for _ in range(100)]
    assert not peer.had_to_go
    assert len(here) == 3
    assert [one.had_to_go for one in crowd] == [True] * 98 + [False] * 2


def test_who_named_us_goes_after_who_did_not() -> None:
    here = Strangers(3, 3, 0.0)
    peer = taken(here, "10.0.0.1")
    peer.named_us = True
    for _ in range(50):
        taken(here, "10.0.0.1")
    assert not peer.had_to_go
    for _ in range(3):
        taken(here, "10.0.0.1").named_us = True
    assert peer.had_to_go  # among equals the oldest goes
    assert len(here) == 3


def test_the_last_of_an_address_makes_room_for_the_next_of_it() -> None:
    here = Strangers(1, 1, 0.0)
    for _ in range(5):
        last = taken(here, "10.0.0.1")
    assert len(here) == 1
    assert not last.had_to_go
    here.leave(last)
    here.leave(last)
    assert len(here) == 0
    assert not here._by_origin
    assert not here.make_room()


def test_nobody_goes_in_his_first_moments() -> None:
    here = Strangers(4, 2, 0.5)
    assert here.wait_s("10.0.0.1", 10.0) <= 0
    for at_s in (10.0, 10.1):
        here.take(FakeSocket(), "10.0.0.1", at_s)  # type: ignore[arg-type]
    assert here.wait_s("10.0.0.1", 10.2) == pytest.approx(0.3)
    assert here.wait_s("10.0.0.2", 10.2) <= 0
    assert here.wait_s("10.0.0.1", 10.6) <= 0


def test_moments_without_attention_do_not_count() -> None:
    clock = Attended(0.01)
    assert clock.now_s(100.0) == 0.0
    assert clock.now_s(100.004) == pytest.approx(0.004)
    assert clock.now_s(160.0) == pytest.approx(0.014)
    assert clock.now_s(160.0) == pytest.approx(0.014)


def test_one_network_of_ipv6_is_one_address() -> None:
    assert origin_of("2001:db8::1") == origin_of("2001:db8::ffff:2")
    assert origin_of("2001:db8::1") != origin_of("2001:db8:0:1::1")
    assert origin_of("::ffff:10.0.0.1") == origin_of("10.0.0.1")
    assert origin_of("fe80::1%eth0") == origin_of("fe80::2")


def test_a_crowd_is_bounded_and_a_peer_passes_it(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            there.known.places[HERE] = [here.info()]
            crowd = [await here.connect() for _ in range(HASTE.max_unauthenticated + 6)]
            await until(lambda: here.core.counters().accepted == len(crowd))
            await until(lambda: here.refused().get(Refusal.BUSY.value, 0) >= 6)
            assert here.core.counters().unauthenticated_now <= HASTE.max_unauthenticated
            there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
            await until(lambda: len(here.engine.served) >= 3)
            for sock in crowd:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
                sock.close()
            assert here.core.counters().unauthenticated_now == 0

    run_core(work)


async def slow_passes(seconds: float) -> None:
    """Each pass of the loop takes so long, as where the machine does much else."""
    while True:
        time.sleep(seconds)  # noqa: ASYNC251 - the trouble itself
        await asyncio.sleep(0)


@of_uvloop
def test_a_peer_passes_a_crowd_also_where_a_pass_takes_longer_than_its_first_moments(
    run_core,
) -> None:
    """All have named the server, so the oldest goes. The moments of a newcomer are the server's."""

    async def work() -> None:
        async with Node(HERE, settings=PATIENT) as here, Node(THERE, settings=PATIENT) as there:
            there.known.places[HERE] = [here.info()]
            slow = asyncio.ensure_future(slow_passes(2 * PATIENT.undisturbed_s))
            with strangers("127.0.0.1", here.port, 300, 400, RECORDED) as crowd:
                try:
                    most = PATIENT.max_unauthenticated_of_address
                    await until(lambda: here.core.counters().accepted >= 4 * most, 60)
                    there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
                    await until(lambda: len(there.engine.peers) >= 3, 100)
                    assert crowd.poll() is None
                finally:
                    slow.cancel()

    run_core(work, 200.0)


def test_a_waiting_server_keeps_its_place_in_the_queue(run_core) -> None:
    """A home that takes nobody for longer than a handshake lasts: it is asked about, not dialled
    anew, which would begin at the end of the queue again."""

    async def work() -> None:
        settings = dataclasses.replace(HASTE, deadline_s=30.0)
        async with Node(THERE, settings=settings) as there:
            with socket.create_server(("127.0.0.1", 0)) as home:
                home.setblocking(False)
                info = there.info(port=home.getsockname()[1])
                there.known.places[HERE] = [dataclasses.replace(info, server_id=HERE)]
                there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
                await until(lambda: len(there.known.asked) >= 5, 30)
                assert there.engine.unreached  # who waits is told why, all the same
                lanes = []
                with contextlib.suppress(BlockingIOError):
                    while True:
                        lanes.append(home.accept()[0])
                assert len(lanes) == there.engine.peer_lanes
                for sock in lanes:
                    sock.close()

    run_core(work)


RECORDED = ClientHandshake(SECRET, Hello(THERE, HERE, 0)).hello


@of_uvloop
@pytest.mark.parametrize(
    ("n_strangers", "hello"), [(CROWD, b""), (2000, RECORDED)], ids=["silent", "recorded-hello"]
)
def test_ten_thousand_strangers_keep_no_peer_out(run_core, n_strangers: int, hello: bytes) -> None:
    """They come from the peer's own address, as fast as they can, and renew what is closed."""

    async def work() -> None:
        async with Node(HERE, settings=PATIENT) as here, Node(THERE, settings=PATIENT) as there:
            there.known.places[HERE] = [here.info()]
            with strangers("127.0.0.1", here.port, 1000, n_strangers, hello) as crowd:
                assert crowd.stdout is not None
                said = asyncio.get_running_loop().run_in_executor(None, crowd.stdout.readline)
                await until(lambda: here.core.counters().accepted >= 1000, 60)
                joined = 0
                while not said.done() or joined < 3:  # while they come, and while they stay
                    joined += 1
                    there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
                    await until(lambda n=joined: len(there.engine.peers) >= 3 * n, 100)
                    counters = here.core.counters()
                    assert counters.unauthenticated_now <= PATIENT.max_unauthenticated_of_address
                    await asyncio.sleep(0.1)
                assert await said == "open\n"
                await until(lambda: here.core.counters().accepted >= n_strangers, 60)
                assert there.core.counters().peers_lost == 0
            # Those that were in the queue are still taken first.
            await until(lambda: here.core.counters().unauthenticated_now == 0, 60)

    run_core(work, 200.0)
