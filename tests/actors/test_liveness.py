"""What is declared lost, and what is not: sockets of this host, no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray._protocol.messages import ServerInfo, ServerLost, ServerRestarting
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry import liveness as liveness_module
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import Liveness
from clamor_ray.actors.registry.registry_core import RegistryCore

SERVER, NODE = 7, "aa"
WAIT_S = 30.0
LISTEN = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


class Listener:
    """A process that listens on a port."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.address = ("127.0.0.1", int(self._process.stdout.readline()))

    def send(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Rig:
    """A registry's judgement over one page server, with a raylet of two ports."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.server, self.node_manager, self.object_manager = (Listener() for _ in range(3))
        self.is_alive = True  # as Ray says
        self.answers = False
        self.core = RegistryCore()
        self.journal = Journal(directory)
        late = LateWrites(self.core, self.journal, BackgroundTasks(logging.getLogger("test")))
        handle = SimpleNamespace(ping=SimpleNamespace(remote=self._ping))
        self.liveness = Liveness(self.core, CommitLog(), {SERVER: handle}, late)
        info = ServerInfo(SERVER, NODE, *self.server.address, "name", "0.1.0")
        self.info, _ = self.core.server_registered(info)
        self.lost: list[int] = []
        self.liveness.when_lost.append(lambda loss: self.lost.append(loss.server_id))
        patch.setattr(liveness_module, "raylet_addresses", self._raylet)
        patch.setattr(liveness_module, "alive_nodes", lambda: {NODE} if self.is_alive else set())
        patch.setattr(liveness_module, "PING_S", 1.0)
        patch.setattr(liveness_module, "SOON_S", 0.1)
        patch.setattr(liveness_module, "TWICE_S", 0.1)

    async def _ping(self) -> int:
        if not self.answers:
            await asyncio.Event().wait()
        return 1

    def _raylet(self, node_id: str) -> list[tuple[str, int]] | None:
        assert node_id == NODE
        if not self.is_alive:
            return None
        return [self.node_manager.address, self.object_manager.address]

    def close(self) -> None:
        self.journal.close()
        for each in (self.server, self.node_manager, self.object_manager):
            each.kill()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tmp_path / "journal", monkeypatch)
    yield rig
    rig.close()


def of(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def test_a_node_whose_processes_are_gone_is_lost_at_once(rig: Rig) -> None:
    """Ray does not know it yet."""

    async def work() -> None:
        for each in (rig.server, rig.node_manager, rig.object_manager):
            assert await rig.liveness.look(rig.info) is None
            each.kill()
        lost = await rig.liveness.look(rig.info)
        assert lost == ServerLost(SERVER, f"it has ended, and the raylet of its node {NODE} too")
        assert rig.core.locate(SERVER) == lost
        assert rig.lost == [SERVER]

    of(work)


def test_what_refuses_only_for_a_moment_is_not_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that somebody set, and took back."""
    answers = iter([True, True, True, False])

    async def all_refuse(addresses: Any) -> bool:
        return next(answers)

    monkeypatch.setattr(liveness_module, "all_refuse", all_refuse)

    async def work() -> None:
        assert await rig.liveness.look(rig.info) is None
        assert next(answers, None) is None
        assert not rig.lost

    of(work)


def test_who_asks_for_it_hears_that_without_waiting_for_an_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "PING_S", 20.0)

    async def work() -> None:
        for each in (rig.server, rig.node_manager, rig.object_manager):
            each.kill()
        began_s = time.monotonic()
        assert isinstance(await rig.liveness.locate(SERVER, rig.info.epoch), ServerLost)
        assert time.monotonic() - began_s < 5.0
        assert rig.lost == [SERVER]

    of(work)


@pytest.mark.parametrize("left", ["server", "node_manager", "object_manager"])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_still_listens_is_not_lost(left: str, is_stopped: bool, rig: Rig) -> None:
    """Also where its process is stopped: its memory is there."""

    async def work() -> None:
        for name in ("server", "node_manager", "object_manager"):
            if name != left:
                getattr(rig, name).kill()
        if is_stopped:
            getattr(rig, left).send(signal.SIGSTOP)
        for _ in range(3):
            assert await rig.liveness.look(rig.info) is None
        assert await rig.liveness.examine(rig.info) == ServerRestarting(SERVER)
        assert not rig.lost

    of(work)


def test_a_host_that_does_not_answer_is_not_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packets are dropped, say: only Ray knows when that is a death."""

    async def work() -> None:
        rig.server.kill()
        with contextlib.ExitStack() as held:
            silent = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(4):
                one = held.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(silent.getsockname())
            monkeypatch.setattr(rig.node_manager, "address", silent.getsockname())
            rig.object_manager.kill()
            assert await rig.liveness.examine(rig.info) == ServerRestarting(SERVER)
        assert not rig.lost
        rig.is_alive = False
        assert await rig.liveness.look(rig.info) == ServerLost(SERVER, f"its node {NODE} is dead")
        assert rig.lost == [SERVER]

    of(work)


def test_who_answers_is_there_whatever_its_ports_say(rig: Rig) -> None:
    async def work() -> None:
        rig.answers = True
        for each in (rig.server, rig.node_manager, rig.object_manager):
            each.kill()
        assert await rig.liveness.examine(rig.info) == rig.core.locate(SERVER)
        assert not rig.lost

    of(work)


def test_rays_word_is_the_last(rig: Rig) -> None:
    """Everything listens, and it answers."""

    async def work() -> None:
        rig.answers, rig.is_alive = True, False
        assert await rig.liveness.examine(rig.info) == ServerLost(
            SERVER, f"its node {NODE} is dead"
        )
        assert rig.lost == [SERVER]

    of(work)


def test_one_loss_is_said_once(rig: Rig) -> None:
    """Several look at the same time."""

    async def work() -> None:
        for each in (rig.server, rig.node_manager, rig.object_manager):
            each.kill()
        looks = [rig.liveness.look(rig.info), rig.liveness.examine(rig.info)]
        await asyncio.gather(*looks, *(rig.liveness.look(rig.info) for _ in range(5)))
        assert rig.lost == [SERVER]

    of(work)
