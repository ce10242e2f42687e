"""Ends page servers that were drained, as soon as nothing uses them. No Ray.

One server:

    leaving  -> it takes no homes of others (``drains``). It is looked at once a second
    unused   -> no region has its home there, or is being made there, and none anywhere waits for a
                new home; no drain of it runs; and it says that nothing there is in use. This holds
                for ``QUIET_S``, and by then the homes have acknowledged what was committed before
                that: the commits of its own node are at the homes for good, so nobody needs its
                copies of them
    left     -> it ends, with its keeper. It is as lost, but nobody misses it: a process of its node
                that needs a page server later gets another one, which does not leave

The server itself decides last: it says no where it is in use after all.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from clamor_ray import errors
from clamor_ray._protocol.messages import ServerInfo, ServerLost
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

LOOK_S = 1.0
# From a region's record to its memory, which is in use. One that was made in advance, and is not
# needed, is no reason to stay: who needs it later is refused, and makes another one.
MAKING_S = 5.0
QUIET_S = 3.0  # a process of the node that has just let go of a variable may open the next one


class EndsServers(Protocol):
    """The page servers, by id."""

    def asked_to_leave(self) -> set[int]:
        """Those whose answer is not known: they may have ended."""

    async def in_use(self, server_id: int) -> int | None:
        """How much is in use there; None: it does not answer."""

    async def leave(self, server_id: int, may_leave: Callable[[], bool]) -> bool:
        """Ends it, with its keeper, where it has nothing in use.

        Args:
            server_id: The server.
            may_leave: Asked when nobody can get a page server on its node until this is over.

        Returns:
            Whether it has ended.
        """


@dataclass
class _Unused:
    """One that nothing uses.

    Args:
        since_s: When that was first seen.
        newest: The versions that there were then.
    """

    since_s: float
    newest: dict[int, int]


class Departures:
    """See the file's head.

    Args:
        core: Regions and servers.
        log: What the homes have acknowledged.
        drains: Who leaves.
        servers: The page servers.
        stays: Whether a server never ends: the one of the session's own node.
        is_lost_for_good: Whether a region whose home is lost will have no other.
        keeps: Whether the node of a server runs what may need it, and could get no other one.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        drains: Drains,
        servers: EndsServers,
        stays: Callable[[int], bool],
        is_lost_for_good: Callable[[int], bool] = lambda region: False,
        keeps: Callable[[int], Awaitable[bool]] | None = None,
    ) -> None:
        self._core = core
        self._log = log
        self._drains = drains
        self._servers = servers
        self._stays = stays
        self._is_lost_for_good = is_lost_for_good
        self._keeps = keeps
        self._unused: dict[int, _Unused] = {}
        self._background = BackgroundTasks(logger)
        self._is_watching = False
        self.n_left = 0  # since the registry began

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def leaves(self, server_id: int) -> bool:
        """Whether the server ends once nothing uses it."""
        return self._drains.is_leaving(server_id) and not self._stays(server_id)

    def watch(self) -> None:
        """Looks at the servers that leave, until there is none."""
        if not self._is_watching and not self._background.is_closed and self._to_watch():
            self._is_watching = True
            self._background.spawn(self._watch())

    def _to_watch(self) -> list[int]:
        leaving = set(self._drains.leaving) | self._servers.asked_to_leave()
        return [each for each in sorted(leaving) if not self._stays(each)]

    async def _watch(self) -> None:
        try:
            while watched := self._to_watch():
                for gone in self._unused.keys() - set(watched):  # its drain was cancelled
                    del self._unused[gone]
                for server_id in watched:
                    if not isinstance(self._core.locate(server_id), ServerInfo):
                        continue  # it has not registered again yet
                    try:
                        await self._look(server_id)
                    except Exception:  # any: it is looked at again
                        logger.exception("page server %#x cannot be ended yet", server_id)
                await asyncio.sleep(LOOK_S)
        finally:
            self._is_watching = False

    async def _look(self, server_id: int) -> None:
        if server_id in self._servers.asked_to_leave():  # also where its drain was cancelled since
            self.n_left += await self._servers.leave(server_id, lambda: False)
            return
        if not self._may_leave(server_id) or await self._servers.in_use(server_id) != 0:
            self._unused.pop(server_id, None)
            return
        now_s = time.monotonic()
        unused = self._unused.get(server_id)
        if unused is None:
            unused = self._unused[server_id] = _Unused(now_s, self._newest())
        if now_s < unused.since_s + QUIET_S or not self._are_settled(unused.newest):
            return
        if self._keeps is not None and await self._keeps(server_id):
            return
        del self._unused[server_id]
        if await self._servers.leave(server_id, lambda: self._may_leave(server_id)):
            self.n_left += 1

    def _may_leave(self, server_id: int) -> bool:
        return not (
            not self.leaves(server_id)
            or self._drains.is_running(server_id)
            or self._core.homed_at(server_id)
            or self._core.is_maker(server_id, time.monotonic() - MAKING_S)
            or self._waits_for_a_home()
        )

    def _waits_for_a_home(self) -> bool:
        """Whether a region is rebuilt, or will be: any server may have what that needs."""
        return any(
            isinstance(self._core.locate(home), ServerLost)
            and not self._is_lost_for_good(record.region)
            for record in self._core.ready_regions()
            for home in record.homes[:1]
        )

    def _newest(self) -> dict[int, int]:
        regions = [record.region for record in self._core.ready_regions()]
        return {region: self._log.newest(region) for region in regions}

    def _are_settled(self, newest: dict[int, int]) -> bool:
        return all(self._is_settled(region, version) for region, version in newest.items())

    def _is_settled(self, region: int, version: int) -> bool:
        try:
            return self._log.settled(region) >= version
        except errors.FreedError:
            return True
