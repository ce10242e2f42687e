"""What the page server's Python side sees of the engine, and whom it asks.

Protocols only, so that ``server_core`` and ``version_questions`` run in tests against fakes.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clamor_ray._native.client import HomeFile
from clamor_ray._protocol.messages import LocateAnswer, LookupAnswer, RegionRecord, RepairSet
from clamor_ray.actors.lost_homes.task_end_log import TaskEnd


class EventKind(enum.IntEnum):
    """``enum pc_event_kind`` of the header; a test compares them."""

    NONE = 0
    NEED_REGION = 1
    NEED_PEER = 2
    REGION_IDLE = 3
    LOG = 4
    NEED_CHANGES = 5
    NEED_PUBLISHED = 6
    NEED_OUTCOME = 7
    PULLED = 8
    THRASHING = 9
    NEED_HOME = 10
    KEEPER_LOST = 11
    TASK_ENDED = 12
    NEED_SETTLED = 13
    NEED_REPAIR = 14
    NEED_FILE = 15
    NEED_DURABLE = 16


class Answer(enum.IntEnum):
    """The codes of ``enum pc_err`` that are given to the engine; a test compares them."""

    TIMEOUT = -3
    NO_REGION = -6
    HOME_LOST = -7
    DESCRIPTORS = -14
    EXPIRED = -20
    NO_VERSION = -21
    FILE_CHANGED = -27


class EngineEvent(Protocol):
    """What the engine asks or says; see ``struct pc_event``."""

    @property
    def kind(self) -> int: ...
    @property
    def error(self) -> int: ...
    @property
    def region(self) -> int: ...
    @property
    def server_id(self) -> int: ...
    @property
    def from_version(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def commit_id(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def text(self) -> str: ...


class EngineLike(Protocol):
    """The part of the engine that Python uses."""

    def fileno(self) -> int: ...
    def next_event(self) -> EngineEvent | None: ...
    def define_region(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        homes: Sequence[int],
        loss: int,
        term: int,
        has_repair: bool,
        in_file: bool,
    ) -> None: ...
    def refuse_region(self, region: int, error: int) -> None: ...
    @property
    def peer_lanes(self) -> int: ...
    def add_peer(self, server_id: int, lane: int, fd: int) -> None: ...
    def peer_lost(self, server_id: int, error: int) -> None: ...
    def peer_unreached(self, server_id: int, for_s: float, cause: str) -> None: ...
    def serve(self, server_id: int, fd: int) -> None: ...
    def retire(self, region: int, *, force: bool) -> None: ...
    def retain(self, region: int, version: int | None) -> None: ...
    def set_changes(
        self, region: int, from_version: int, to_version: int, runs: Any, *, error: int = 0
    ) -> None: ...
    def publish(self, region: int, version: int, commit_id: int) -> None: ...
    def caught_up(self, region: int, *, error: int = 0) -> None: ...
    def settled(self, region: int, version: int) -> None: ...
    def drop_staged(self, region: int, commit_id: int) -> None: ...
    def pull(self, region: int, commit_id: int, server_id: int, layer_bytes: int) -> None: ...
    def set_homes(self, region: int, homes: Sequence[int], term: int) -> None: ...
    def home_lost(self, region: int, server_id: int, error: int) -> None: ...
    def region_lacks(self, region: int, loss: int) -> None: ...
    def region_lost(self, region: int, error: int) -> None: ...
    def region_has_repair(self, region: int, has_repair: bool) -> None: ...
    def set_repair(
        self,
        region: int,
        version: int,
        members: Sequence[tuple[int, int, int]],
        is_mirror: bool,
    ) -> None: ...
    def home_file(self, region: int) -> HomeFile: ...
    def layer_file(self, region: int, commit_id: int) -> tuple[int, int]: ...
    def layer_durable(self, region: int, commit_id: int, ok: bool) -> None: ...


class Resolver(Protocol):
    """Who knows regions, servers and commits.

    Any exception that is not named means: no answer now, ask again.
    """

    async def lookup(self, region: int) -> LookupAnswer:
        """The region's record, or that it is freed or unknown."""

    async def locate(self, server_id: int, since_epoch: int) -> LocateAnswer:
        """Where the server is; ``since_epoch`` is where it could not be reached (0: not tried)."""

    async def rehomed(self, region: int, server_id: int) -> RegionRecord | None:
        """The region's record once it has a home that serves: another one than this server, which
        is lost or has nothing of it, or this one, if it has it after all; None: ask again.

        Raises:
            HomeLostError, FreedError: There will be none.
        """

    async def regions_idle(self, regions: list[int]) -> None:
        """The last leases on retired regions are gone from this node."""

    async def task_ended(self, task: str, end: TaskEnd) -> None:
        """A process that ran the task (Ray's id, as hex) ends so."""

    async def changes(self, region: int, from_version: int, to_version: int) -> bytes | None:
        """A serialized BitMap of the blocks that differ; None: the log does not reach back.

        Raises:
            FreedError, NoVersionError: There is no such region, or version.
        """

    async def published(self, region: int, since: int) -> list[tuple[int, int]]:
        """(version, commit id) of each commit after a version, in order.

        Raises:
            FreedError, SnapshotExpired: There is no such region; the log does not reach back.
        """

    async def settled(self, region: int) -> int:
        """The newest version that every home of the region has acknowledged.

        Raises:
            FreedError: There is no such region.
        """

    async def repair_of(self, region: int, version: int) -> RepairSet | None:
        """What makes the region's blocks of that version again; None: nothing does now.

        Raises:
            FreedError: There is no such region.
        """

    async def newer(self, known: dict[int, int], wait_s: float) -> dict[int, int]:
        """Which variables have a newer version than is known, or ``NEWS_FREED``; {} after wait_s,
        or where a later call waits."""

    async def outcome(self, commit_id: int) -> dict[int, int]:
        """The versions that a commit made; {}: none, and it never will."""


@dataclass(frozen=True)
class Settings:
    """Deadlines and bounds.

    Args:
        handshake_s: From accept to the last message; for who connects, from the challenge. Until
            that comes it keeps its place in the queue, and asks so often what became of the peer.
        max_unauthenticated: Connections that have not passed; for one more, an old one goes.
        max_unauthenticated_of_address: Of these, from one address. No fewer than a peer has lanes:
            it opens all of them at once.
        undisturbed_s: So long a connection may stay, however many come after it.
        answer_s: One question to the resolver, or one TCP connect.
        deadline_s: All tries to find a peer or a region, or to learn of commits.
        descriptors_s: Tries to reach a peer for which this process has no descriptor.
        pull_s: One layer's way here.
        rebuild_s: Until a region whose home is lost has another one. (Who waits for its blocks
            gives up by the engine's deadlines.)
        backoff_first_s: Pause after the first failure; doubles.
        backoff_most_s: The longest pause.
    """

    handshake_s: float = 5.0
    max_unauthenticated: int = 256
    max_unauthenticated_of_address: int = 64
    undisturbed_s: float = 0.02
    answer_s: float = 10.0
    deadline_s: float = 40.0
    descriptors_s: float = 2.0
    pull_s: float = 600.0
    rebuild_s: float = 900.0
    backoff_first_s: float = 0.05
    backoff_most_s: float = 1.0


DEFAULTS = Settings()


class Tries:
    """Pauses that double, until the deadline is over."""

    def __init__(self, settings: Settings) -> None:
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + settings.deadline_s
        self._next_s = settings.backoff_first_s
        self._most_s = settings.backoff_most_s

    async def pause(self) -> bool:
        """False when there is no time for another try."""
        if self._now() + self._next_s >= self._deadline:
            return False
        await asyncio.sleep(self._next_s)
        self._next_s = min(self._next_s * 2, self._most_s)
        return True
