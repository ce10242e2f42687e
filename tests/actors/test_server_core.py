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
from pathlib import Path

import pytest

from clamor_ray._protocol.handshake import ClientHandshake, Hello, Refusal
from clamor_ray._protocol.messages import RegionFreed, ServerInfo, ServerLost, ServerRestarting
from clamor_ray.actors.page_server.engine_like import Answer, EventKind
from clamor_ray.errors import FreedError, HomeLostError
from tests.support.server_rig import HASTE, HERE, RECORD, SECRET, THERE, FakeEvent, Node, until

# -- peers find each other


def test_two_servers_meet(run_core) -> None:
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

    run_core(work)


def test_a_question_asked_twice_is_answered_once(run_core) -> None:
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

    run_core(work)


def test_a_lane_that_dies_at_once_is_asked_about(run_core) -> None:
    """The engine asks once. So the question must not come while the last one is being answered."""

    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.known.places[THERE] = [there.info()]
            add_peer = here.engine.add_peer

            def add_one_that_dies(server_id: int, lane: int, fd: int) -> None:
                add_peer(server_id, lane, fd)
                if len(here.engine.peers) == here.engine.peer_lanes:
                    here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))

            here.engine.add_peer = add_one_that_dies
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: len(here.engine.peers) == 2 * here.engine.peer_lanes)

    run_core(work)


def test_lanes_that_the_engine_refuses_are_made_again(run_core) -> None:
    """Also where they came while the registry, which does not answer, was asked about the peer."""

    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.known.places[THERE] = [there.info(), RuntimeError("not now"), there.info()]
            connect, add_peer, refused = here.core._connect, here.engine.add_peer, []
            locate, asked, came = here.known.locate, asyncio.Event(), asyncio.Event()

            async def late(info: ServerInfo) -> list[socket.socket]:
                await asked.wait()
                lanes = await connect(info)
                came.set()
                return lanes

            async def slow(server_id: int, since_epoch: int) -> object:
                if len(here.known.asked) == 1:  # it is asked once more
                    asked.set()
                    await came.wait()
                return await locate(server_id, since_epoch)

            def refuse_once(server_id: int, lane: int, fd: int) -> None:
                if not refused:
                    refused.append(fd)
                    os.close(fd)
                    raise RuntimeError("no")
                add_peer(server_id, lane, fd)

            here.core._connect, here.engine.add_peer = late, refuse_once
            here.known.locate = slow
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: len(here.engine.peers) == here.engine.peer_lanes)
            assert len(refused) == 1

    run_core(work)


def test_a_restarting_peer_is_waited_for(run_core) -> None:
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

    run_core(work)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (ServerLost(THERE, "node died"), Answer.HOME_LOST, "node died"),
        # Only the registry says that one is lost.
        (ServerRestarting(THERE), Answer.TIMEOUT, "it is restarting"),
        (RuntimeError("deaf"), Answer.TIMEOUT, "RuntimeError: deaf"),
        (asyncio.TimeoutError(), Answer.TIMEOUT, "it does not answer"),
        # Ours are short, and that is said.
        (OSError(24, "Too many open files"), Answer.DESCRIPTORS, "Too many open files"),
        (OSError(12, "Cannot allocate memory"), Answer.TIMEOUT, "Cannot allocate memory"),
    ],
)
def test_a_lost_peer_is_lost(run_core, answer, error, text, caplog) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.places[THERE] = [answer]
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("lost", THERE, error)]
            lost = error == Answer.HOME_LOST
            assert here.core.counters().peers_lost == lost
            assert bool(here.engine.unreached) == (not lost)
            assert all(text in cause for _, cause in here.engine.unreached)
            if error == Answer.DESCRIPTORS:  # that is said soon: 5 tries, and not 20
                assert len(here.engine.unreached) < 10

    with caplog.at_level(logging.WARNING):
        run_core(work)
    assert text in caplog.text


def test_a_peer_with_another_secret_is_not_used(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE, secret=b"?" * 32) as there:
            here.known.places[THERE] = [there.info()]
            here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.peers == there.engine.served == []
            assert there.refused()[Refusal.CLOSED.value] >= 3  # we hung up on it

    run_core(work)


def test_a_peer_that_accepts_and_stalls_is_given_up(run_core) -> None:
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
                assert here.engine.answers == [("lost", THERE, Answer.TIMEOUT)]

    run_core(work)


def test_a_question_after_a_peer_is_given_up_is_heard(run_core) -> None:
    """Blocks that still wait for it are asked for anew in that very moment."""

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as stalled:
            async with Node(HERE) as here:
                port = stalled.getsockname()[1]
                here.known.places[THERE] = [
                    ServerInfo(THERE, "node", "127.0.0.1", port, "name", "0.1.0")
                ]
                given_up = here.engine.peer_lost

                def ask_again(server_id: int, error: int) -> None:
                    given_up(server_id, error)
                    if len(here.engine.answers) == 1:
                        here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))

                here.engine.peer_lost = ask_again
                here.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=THERE))
                await until(lambda: len(here.engine.answers) == 2)

    run_core(work)


def test_closing_in_the_middle_leaves_nothing(run_core) -> None:
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

    run_core(work)


# -- regions


def test_regions_are_defined_or_refused(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.regions = {
                7: RECORD,
                8: RegionFreed(8),
                9: RuntimeError("never"),
                11: dataclasses.replace(RECORD, region=11, homes=(THERE, HERE)),
                13: dataclasses.replace(RECORD, region=13, homes=(HERE,)),
                14: dataclasses.replace(RECORD, region=14, homes=(HERE,)),
                12: dataclasses.replace(RECORD, region=12, homes=(HERE,)),
            }
            here.engine.adopted = {12}
            # What the registry says where we should have it, and do not; None: ask again.
            at = here.known.versions
            at["rehomed", 11, HERE] = [None, RuntimeError("not now"), HomeLostError("Nowhere.")]
            at["rehomed", 13, HERE] = [None]
            at["rehomed", 14, HERE] = [FreedError("It was freed.")]
            for region in (7, 8, 9, 10, 11, 12, 13, 14):
                here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=region))
            await until(lambda: len(here.engine.answers) == 8)
            assert set(here.engine.answers) == {
                ("define", 7, 1, RECORD.base_address, 5000, (THERE,)),
                ("refuse", 8, Answer.NO_REGION),
                ("refuse", 9, Answer.TIMEOUT),
                ("refuse", 10, Answer.NO_REGION),
                ("refuse", 11, Answer.HOME_LOST),
                ("refuse", 13, Answer.TIMEOUT),
                ("refuse", 14, Answer.NO_REGION),
                ("define", 12, 1, RECORD.base_address, 5000, (HERE,)),  # we have it again
            }

    run_core(work)


def test_a_region_freed_while_it_is_looked_up_is_refused(run_core) -> None:
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

    run_core(work)


LOST = 0x77


def test_waiters_for_a_lost_home_are_told_of_the_new_one(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            at = here.known.versions
            # It takes a while; the registry is away for a moment; then it is there.
            at["rehomed", 7, LOST] = [None, None, RuntimeError("not now"), RECORD]
            at["rehomed", 8, LOST] = [HomeLostError("Blocks 3 to 5 are nowhere.")]
            at["rehomed", 9, LOST] = [FreedError("It was freed.")]
            mine = dataclasses.replace(RECORD, region=11, homes=(HERE,))
            # We are named, and have nothing of it: it is asked about us.
            at["rehomed", 10, LOST] = [dataclasses.replace(mine, region=10)]
            at["rehomed", 10, HERE] = [None, HomeLostError("Blocks 3 to 5 are nowhere.")]
            at["rehomed", 12, LOST] = [dataclasses.replace(mine, region=12)]
            at["rehomed", 12, HERE] = [dataclasses.replace(RECORD, region=12)]
            at["rehomed", 11, LOST] = [mine]
            here.engine.adopted = {11}
            for region in (7, 8, 9, 10, 11, 12):
                event = FakeEvent(EventKind.NEED_HOME, region=region, server_id=LOST)
                here.engine.ask(event)
                here.engine.ask(event)
            await until(lambda: len(here.engine.answers) == 7)
            await asyncio.sleep(0)
            assert set(here.engine.answers) == {
                ("homes", 7, (THERE,)),
                ("home lost", 8, LOST, Answer.HOME_LOST),
                ("home lost", 9, LOST, Answer.NO_REGION),
                ("home lost", 10, LOST, Answer.HOME_LOST),
                ("homes", 12, (THERE,)),
                ("define", 11, 1, RECORD.base_address, 5000, (HERE,)),
                ("homes", 11, (HERE,)),
            }
            assert here.known.asked_versions.count(("rehomed", 7, LOST)) == 4
            assert here.engine.terms[7] == here.engine.terms[11] == RECORD.term

    run_core(work)


def test_it_is_not_asked_without_a_pause(run_core) -> None:
    async def work() -> None:
        settings = dataclasses.replace(HASTE, rebuild_s=0.5, backoff_first_s=0.05)
        async with Node(HERE, settings=settings) as here:
            here.known.versions["rehomed", 7, LOST] = [None]
            here.engine.ask(FakeEvent(EventKind.NEED_HOME, region=7, server_id=LOST))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("home lost", 7, LOST, Answer.TIMEOUT)]
            assert 2 <= len(here.known.asked_versions) <= 12

    run_core(work)


def test_a_new_home_that_never_comes_is_given_up(run_core) -> None:
    async def work() -> None:
        settings = dataclasses.replace(HASTE, rebuild_s=0.05, backoff_most_s=0.01)
        async with Node(HERE, settings=settings) as here:
            here.known.versions["rehomed", 7, LOST] = [RuntimeError("not now")]
            here.engine.ask(FakeEvent(EventKind.NEED_HOME, region=7, server_id=LOST))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("home lost", 7, LOST, Answer.TIMEOUT)]

    run_core(work)


DEFINED = ("define", 7, 1, RECORD.base_address, 5000, (THERE,))


def test_old_leases_on_a_freed_region_come_back(run_core) -> None:
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
            here.known.versions["rehomed", 11, HERE] = [FreedError("It was freed.")]
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=11))
            await until(lambda: len(here.engine.answers) == 2)
            assert here.engine.answers[1] == ("refuse", 11, Answer.NO_REGION)

    run_core(work)


def test_an_order_to_retire_says_what_the_region_is(run_core) -> None:
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

    run_core(work)


def test_idle_regions_are_reported_until_it_works(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.idle_fails = 2
            here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=7))
            await until(lambda: here.known.idle == [7])

    run_core(work)


def test_a_region_that_is_idle_at_once_is_reported_by_the_answer_alone(run_core) -> None:
    """A call of its own for each freed variable would cost as much as the free."""

    async def work() -> None:
        async with Node(HERE) as here:
            retired = here.engine.retire

            def retire(region: int, *, force: bool) -> None:
                retired(region, force=force)
                if not force and region == 7:
                    here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=region))

            here.engine.retire = retire
            assert not here.core.retire(7, force=False)
            assert here.core.retire(8, force=False)  # somebody has a lease on it
            await asyncio.sleep(0.05)  # a call that must not come
            assert here.known.idle == []
            here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=8))  # it is gone
            await until(lambda: here.known.idle == [8])

    run_core(work)


def test_idle_regions_of_a_moment_are_one_call(run_core) -> None:
    """A process has told the engine of many frees; the registry's orders say the same of some."""

    async def work() -> None:
        async with Node(HERE) as here:
            for region in range(100, 150):
                here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=region))
            await asyncio.sleep(0.01)
            assert not here.core.retire(120, force=False)  # the answer says it
            await until(lambda: bool(here.known.idle))
            assert here.known.idle == [r for r in range(100, 150) if r != 120]
            assert here.known.idle_calls == 1

    run_core(work)


def test_what_is_idle_already_is_not_made_again_to_be_retired(run_core) -> None:
    """The process that freed it has told the engine, and the order comes with the others later: of
    thousands of small variables that would be most of what a free costs here."""

    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=7))  # not heard of yet
            assert not here.core.retire(7, force=False, record=RECORD)
            assert not here.core.retire(7, force=False, record=RECORD)  # after a lost answer
            assert (here.engine.answers, here.engine.retired) == ([], [])
            here.core.retire(7, force=True)  # its memory may be here still
            assert here.engine.retired == [(7, True)]
            await asyncio.sleep(0.05)  # a call that must not come
            assert here.known.idle == []

    run_core(work)


@pytest.mark.parametrize("how", ["idle", "dropped"])
def test_what_has_ended_here_is_not_lost(run_core, how: str) -> None:
    """The registry still waits to hear that it is idle, and says so to who asks meanwhile."""

    async def work() -> None:
        async with Node(HERE) as here:
            if how == "idle":
                here.engine.ask(FakeEvent(EventKind.REGION_IDLE, region=7))
                await until(lambda: 7 in here.core._told_idle)
            else:
                here.core.retire(7, force=True)
            freed = dataclasses.replace(RECORD, homes=(HERE,), freed=True)
            here.known.regions = {7: freed, 8: dataclasses.replace(freed, region=8)}
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=7))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("refuse", 7, Answer.NO_REGION)]
            assert here.known.asked_versions == []
            here.known.versions["rehomed", 8, HERE] = [HomeLostError("Nowhere.")]
            here.engine.ask(FakeEvent(EventKind.NEED_REGION, region=8))
            await until(lambda: len(here.engine.answers) == 2)
            assert here.engine.answers[1] == ("refuse", 8, Answer.HOME_LOST)

    run_core(work)


def test_the_engine_may_speak(run_core, caplog) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.ask(FakeEvent(EventKind.LOG, text="a client sent nonsense"))
            here.engine.ask(FakeEvent(99))
            await until(lambda: "unknown event 99" in caplog.text)

    with caplog.at_level(logging.WARNING):
        run_core(work)
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
def test_a_failed_handshake_is_closed_and_counted(run_core, said: bytes, refusal: Refusal) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            sock = await here.connect()
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(sock, said)
            await closed_by_peer(sock)
            await until(lambda: here.refused() == {refusal.value: 1})
            assert here.core.counters().unauthenticated_now == 0
            assert here.engine.served == []

    run_core(work)


def test_a_peer_that_hangs_up_is_counted(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            (await here.connect()).close()
            await until(lambda: here.refused() == {Refusal.CLOSED.value: 1})

    run_core(work)


def test_an_engine_that_refuses_does_not_end_the_server(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here, Node(THERE) as there:
            here.engine.serve_fails = True
            there.known.places[HERE] = [here.info()]
            there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
            await until(lambda: here.refused() == {Refusal.ENGINE.value: 3})
            # By then it looks for it no more.
            await until(lambda: len(there.engine.peers) == there.engine.peer_lanes)
            here.engine.serve_fails = False
            there.engine.ask(FakeEvent(EventKind.NEED_PEER, server_id=HERE))
            await until(lambda: len(here.engine.served) == 3)

    run_core(work)


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
    header = Path(__file__).parents[2] / "pagecache_c" / "pagecache.h"
    values = dict(re.findall(r"\b(PC_(?:EVENT|ERR)_\w+) = (-?\d+)", header.read_text()))
    assert {f"PC_EVENT_{kind.name}": str(kind.value) for kind in EventKind}.items() <= (
        values.items()
    )
    assert len(EventKind) == sum(name.startswith("PC_EVENT_") for name in values)
    for answer in Answer:
        assert values[f"PC_ERR_{answer.name}"] == str(answer.value)
