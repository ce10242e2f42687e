"""A page server's core among fakes: an engine, a registry, and two nodes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections import deque
from collections.abc import Callable

from clamor_ray._native.client import HomeFile
from clamor_ray._protocol.messages import RegionRecord, RegionUnknown, ServerInfo
from clamor_ray.actors.page_server.engine_like import Settings
from clamor_ray.actors.page_server.server_core import ServerCore
from clamor_ray.errors import (
    ExistsError,
    FreedError,
    HomeLostError,
    NoVersionError,
)

SECRET = b"s" * 32
HERE, THERE = 0xAAAA, 0xBBBB
HASTE = Settings(
    handshake_s=0.3,
    max_unauthenticated=4,
    answer_s=1.0,
    deadline_s=1.0,
    descriptors_s=0.1,
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
        block: int = 0,
    ) -> None:
        self.kind, self.error, self.region = kind, error, region
        self.server_id, self.text = server_id, text
        self.from_version, self.version, self.commit_id = from_version, version, commit_id
        self.block = block


class FakeEngine:
    """Asks what a test makes it ask, and remembers the answers."""

    peer_lanes = 3

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: deque[FakeEvent] = deque()
        self.served: list[tuple[int, int]] = []
        self.peers: list[tuple[int, int, int]] = []
        self.answers: list[tuple[object, ...]] = []
        self.unreached: list[tuple[int, str]] = []
        self.retired: list[tuple[int, bool]] = []
        self.serve_fails = False
        self.adopted: set[int] = set()  # homes that came back from the keeper
        self.unknown: set[int] = set()  # regions that are not defined
        self.published: dict[int, int] = {}
        self.losses: dict[int, int] = {}
        self.terms: dict[int, int] = {}
        self.has_repair: dict[int, bool] = {}
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

    def define_region(
        self, region, version, base_address, length_bytes, homes, loss, term, has_repair, in_file
    ) -> None:
        if HERE in homes and region not in self.adopted:
            raise HomeLostError("It is not here.")
        if (region, False) in self.retired:
            raise FreedError("It is retired.")
        self.unknown.discard(region)
        self.losses[region], self.terms[region] = loss, term
        self.has_repair[region] = has_repair
        self.answers.append(("define", region, version, base_address, length_bytes, tuple(homes)))

    def refuse_region(self, region: int, error: int) -> None:
        self.answers.append(("refuse", region, error))

    def add_peer(self, server_id: int, lane: int, fd: int) -> None:
        self.peers.append((server_id, lane, fd))

    def peer_lost(self, server_id: int, error: int) -> None:
        self.answers.append(("lost", server_id, error))

    def peer_unreached(self, server_id: int, for_s: float, cause: str) -> None:
        self.unreached.append((server_id, cause))

    def serve(self, server_id: int, fd: int) -> None:
        if self.serve_fails:
            os.close(fd)
            raise RuntimeError("no")
        self.served.append((server_id, fd))

    def retire(self, region: int, *, force: bool) -> None:
        self.retired.append((region, force))

    def retain(self, region: int, version: int | None) -> None:
        self.answers.append(("retain", region, version))

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

    def set_homes(self, region: int, homes, term: int) -> None:
        if region in self.unknown:
            raise FreedError("It is not known here.")
        self.terms[region] = term
        self.answers.append(("homes", region, tuple(homes)))

    def home_lost(self, region: int, server_id: int, error: int) -> None:
        self.answers.append(("home lost", region, server_id, error))

    def region_lacks(self, region: int, loss: int) -> None:
        if region in self.unknown:
            raise FreedError("It is not known here.")
        self.losses[region] = loss

    def region_has_repair(self, region: int, has_repair: bool) -> None:
        self.has_repair[region] = has_repair

    def set_repair(self, region, version, members, is_mirror) -> None:
        if region in self.unknown:
            raise FreedError("It is not known here.")
        self.answers.append(("repair", region, version, tuple(members), is_mirror))

    def region_lost(self, region: int, error: int) -> None:
        self.answers.append(("region lost", region, error))

    def caught_up(self, region: int, *, error: int = 0) -> None:
        self.answers.append(("caught up", region, error))

    def settled(self, region: int, version: int) -> None:
        self.answers.append(("settled", region, version))

    def drop_staged(self, region: int, commit_id: int) -> None:
        self.answers.append(("drop", region, commit_id))

    def pull(self, region: int, commit_id: int, server_id: int, layer_bytes: int) -> None:
        if region in self.unknown:
            raise FreedError("It is not known here.")
        if commit_id in self.staged:
            raise ExistsError("It is here.")
        self.answers.append(("pull", region, commit_id, server_id, layer_bytes))

    def home_file(self, region: int) -> HomeFile:
        raise FreedError("It is in memory.")

    def layer_file(self, region: int, commit_id: int) -> tuple[int, int]:
        raise NoVersionError("There is none.")

    def layer_durable(self, region: int, commit_id: int, ok: bool) -> None:
        self.answers.append(("durable", region, commit_id, ok))

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
        self.idle_calls = 0
        self.gate: asyncio.Event | None = None
        self.versions: dict[tuple[object, ...], list[object]] = {}
        self.asked_versions: list[tuple[object, ...]] = []

    async def newer(self, known: dict[int, int], wait_s: float) -> dict[int, int]:
        await asyncio.sleep(wait_s)  # there are no commits
        return {}

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

    async def settled(self, region: int):
        return await self._about("settled", region)

    async def repair_of(self, region: int, version: int):
        return await self._about("repair_of", region, version)

    async def outcome(self, commit_id: int):
        return await self._about("outcome", commit_id)

    async def task_ended(self, task: str, end):
        await self._about("task_ended", task, end)

    async def rehomed(self, region: int, server_id: int):
        return await self._about("rehomed", region, server_id)

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

    async def regions_idle(self, regions: list[int]) -> None:
        if self.idle_fails:
            self.idle_fails -= 1
            raise RuntimeError("not now")
        self.idle += regions
        self.idle_calls += 1


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
    """Of this process, by number."""
    gc.collect()  # a loop of an earlier test may still have some
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found
