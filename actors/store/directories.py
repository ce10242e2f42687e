"""Finds the directories of a store, when it is opened and while some of them are away. No Ray.

When a store is opened:

    page servers  -> every living node gets its own, which takes one directory of those at its path
    taken over    -> directories there that none took, for there are fewer nodes than before: a page
                     server takes all that is in it
    away          -> the homes whose directory is nowhere then are lost, as others are: see
                     ``stored_homes``

It looks again, as long as some are away: new nodes get their page server, and a directory that is
free for a while goes to one that has it at its path. That is so on a disk that nodes share.

A directory is taken over in this order:

    take_directory  -> its files have a second name in the taker's own directory, synced
    journal         -> from here on the taker is the home
    rehome          -> it serves them; who waits for one of them goes on
    drop_directory  -> the old names go

Whatever ends in between, either the one or the other directory has what the journal says of it:
files that it does not name to a page server that starts are dropped by that.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from clamor_ray import errors
from clamor_ray._protocol.messages import RegionRecord, ServerLost, StoreState
from clamor_ray.actors.lost_homes.watched_calls import (
    PAUSE_MOST_S,
    PAUSE_S,
    TELL_S,
    Examined,
    watched,
)
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegistryCore
from clamor_ray.actors.store.stored_homes import StoredHomes

logger = logging.getLogger("clamor_ray.registry")

ASK_S = 10.0
TAKE_S = 900.0  # all that is committed is redone, and checked
LOOK_S = 2.0
LOOK_MOST_S = 20.0  # while nothing changes
FREE_S = 15.0  # its own node may come back, or start another page server
STARTING_S = 60.0  # a page server that has begun registers within that, or is given up
STARTING_LOOK_S = 0.2
NOWHERE = "its directory is at no node"


class DirectoryServers(Examined, Protocol):
    """The page servers, by id, as this wants them. ``ray_homes`` calls them by Ray."""

    async def free_directories(self, server_id: int) -> list[str]:
        """Directories of this store at its node's path that no page server has open."""

    async def take_directory(self, server_id: int, directory: str, state: StoreState) -> list[int]:
        """It brings all that the directory has to the newest version, and gets ready to be the
        home of it. Again: as the first time.

        Args:
            server_id: The server.
            directory: The directory's uuid.
            state: The regions that it has, with the server as their home.

        Returns:
            The regions that it is ready to be the home of; all others stay where they are.
        """

    async def drop_directory(self, server_id: int, directory: str) -> None:
        """It is the home of what it has taken from there, for good: that may go there."""

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        """It learns that it is the home."""


@dataclass(frozen=True)
class AwayDirectory:
    """A directory of the store that is at no node.

    Args:
        directory: Its uuid.
        n_regions: How many regions are homed there.
        reason: What became of its page server; "": it is not here yet.
    """

    directory: str
    n_regions: int
    reason: str


class StoreDirectories:
    """See the file's head.

    Args:
        core: Regions and servers.
        stored: What is homed in which directory.
        servers: The page servers.
        lose: Declares a page server lost.
        start_all: Has the page servers of all living nodes started, as far as that takes no
            longer than a minute.
        start_new: The same of nodes that never had one.
        is_starting: Whether a page server with this id is about to register.
        is_leaving: Whether a page server takes no homes.
    """

    def __init__(
        self,
        core: RegistryCore,
        stored: StoredHomes,
        servers: DirectoryServers,
        *,
        lose: Callable[[int, str], object],
        start_all: Callable[[], Awaitable[None]],
        start_new: Callable[[], Awaitable[None]],
        is_starting: Callable[[int], bool] = lambda server_id: False,
        is_leaving: Callable[[int], bool] = lambda server_id: False,
    ) -> None:
        self._core = core
        self._stored = stored
        self._servers = servers
        self._lose = lose
        self._start_all, self._start_new = start_all, start_new
        self._is_starting, self._is_leaving = is_starting, is_leaving
        self._background = BackgroundTasks(logger)
        self._opened = asyncio.Event()
        self._is_watching = False
        self._away_since_s: dict[str, float] = {}

    def open(self) -> None:
        """Begins to look for the directories."""
        self._is_watching = True
        self._background.spawn(self._open())

    async def until_open(self, timeout_s: float) -> bool:
        """Waits until it is known which directories are here, and which are away.

        Returns:
            Whether it is.
        """
        try:
            await asyncio.wait_for(self._opened.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def away(self) -> tuple[AwayDirectory, ...]:
        """Directories with homes that no page server has."""
        found = []
        for directory, homes in self._homes_away().items():
            n_regions = sum(len(self._core.homed_at(home)) for home in homes)
            lost = (self._core.locate(home) for home in sorted(homes))
            reasons = [each.reason for each in lost if isinstance(each, ServerLost)]
            found.append(AwayDirectory(directory, n_regions, "; ".join(reasons)))
        return tuple(found)

    def server_lost(self) -> None:
        """Looks for its directory, from time to time."""
        if not self._is_watching and not self._background.is_closed:
            self._is_watching = True
            self._background.spawn(self._watch())

    # -- an opening

    async def _open(self) -> None:
        try:
            if self._homes_away():
                await self._try("page servers cannot be started", self._start_all())
                await self._take_free(0.0)
                await self._until_started()
            for server_id in self._core.awaited():
                self._lose(server_id, NOWHERE)
            for each in self.away():
                logger.error("the directory node-%s of the store is away: %s", *_said(each))
        finally:
            self._opened.set()
        await self._watch()

    async def _until_started(self) -> None:
        """Those that have begun already register by and by."""
        for _ in range(int(STARTING_S / STARTING_LOOK_S)):
            if not any(map(self._is_starting, self._core.awaited())):
                return
            await asyncio.sleep(STARTING_LOOK_S)

    async def _watch(self) -> None:
        pause_s, before = LOOK_S, self._homes_away()
        try:
            while away := self._homes_away():
                pause_s = min(2 * pause_s, LOOK_MOST_S) if away == before else LOOK_S
                before = away
                await asyncio.sleep(pause_s)
                await self._try("page servers cannot be started", self._start_new())
                await self._take_free(FREE_S)
        finally:
            self._is_watching = False

    async def _try(self, what: str, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as failure:  # any of Ray's, and of ours: it looks again
            logger.warning("%s: %r", what, failure)

    def _homes_away(self) -> dict[str, set[int]]:
        """By directory: the ids of page servers that are homes, and are not here."""
        found: dict[str, set[int]] = {}
        homes = {home for record in self._core.ready_regions() for home in record.homes[:1]}
        for home in homes:
            directory = self._core.lives.directory_of(home)
            if directory and self._core.node_of(home) is None and not self._is_here(directory):
                found.setdefault(directory, set()).add(home)
        now_s = asyncio.get_running_loop().time()
        self._away_since_s = {
            directory: self._away_since_s.get(directory, now_s) for directory in found
        }
        return found

    def _is_here(self, directory: str) -> bool:
        """Its page server has registered: what it does not have it will never have."""
        lives = self._core.lives.of_directory(directory)
        return any(self._core.node_of(each) is not None for each in lives)

    # -- directories that are taken over

    async def _take_free(self, free_s: float) -> None:
        """Each that is free, and was away for so long, goes to one that has it at its path."""
        servers = [info.server_id for info in self._core.servers()]
        servers = [each for each in servers if not self._is_leaving(each)]
        free_at = await asyncio.gather(*map(self._free_at, servers))
        now_s = asyncio.get_running_loop().time()
        takes: dict[int, list[str]] = {server_id: [] for server_id in servers}
        for directory in self._homes_away():
            takers = [
                server_id
                for server_id, free in zip(servers, free_at, strict=True)
                if directory in free and now_s - self._away_since_s[directory] >= free_s
            ]
            if takers:
                taker = min(takers, key=lambda server_id: len(takes[server_id]))
                takes[taker].append(directory)
        await asyncio.gather(*(self._take_all(*each) for each in takes.items()))

    async def _free_at(self, server_id: int) -> Iterable[str]:
        try:
            call = self._servers.free_directories(server_id)
            return await watched(self._servers, server_id, call, ASK_S)
        except Exception as failure:  # any: it may be restarting
            logger.warning("page server %#x does not say what is free: %r", server_id, failure)
            return ()

    async def _take_all(self, server_id: int, directories: list[str]) -> None:
        for directory in directories:
            what = f"page server {server_id:#x} does not take node-{directory} over"
            await self._try(what, self._take(server_id, directory))

    async def _take(self, server_id: int, directory: str) -> None:
        """
        Raises:
            JournalFullError: It is home of a part of it.
            What the call raises: Nothing has changed.
        """
        state = self._stored.state_of(directory, server_id)
        for stored in state.regions:  # it is told when one of them is freed
            self._core.lookup(stored.record.region, server_id)
        call = self._servers.take_directory(server_id, directory, state)
        ready = set(await watched(self._servers, server_id, call, TAKE_S))
        if self._core.node_of(server_id) is None:
            raise errors.ServerUnavailableError("It was lost meanwhile.")
        # No await until all of it is written: what has another home by now stays there.
        lives = self._core.lives.of_directory(directory)
        there = {region for each in lives for region in self._core.homed_at(each)}
        full: errors.JournalFullError | None = None
        try:
            self._stored.give(sorted(ready & there), server_id)
        except errors.JournalFullError as failure:
            full = failure
        taken = self._stored.given_to(server_id)
        for region in taken:
            self._stored.unheard.add(region)
        await asyncio.gather(*(self._tell(region, server_id) for region in taken))
        logger.info(
            "page server %#x has taken %d variables of node-%s over",
            *(server_id, len(taken), directory),
        )
        if full is not None:
            raise full
        for region in ready - there:
            await self._try("what has another home", self._tell_other(region, server_id))
        if there <= ready:
            for each in lives & set(self._core.awaited()):
                self._lose(each, f"its directory was taken over by page server {server_id:#x}")
            drop = self._servers.drop_directory(server_id, directory)
            await watched(self._servers, server_id, drop, TAKE_S)

    async def _tell(self, region: int, home: int) -> None:
        """Until it has heard that it is the home, it answers nobody."""
        pause_s = PAUSE_S
        try:
            while (record := self._stored.record_at(region, home)) is not None:
                try:
                    call = self._servers.rehome(home, record)
                    await watched(self._servers, home, call, TELL_S)
                    break
                except errors.HomeLostError as failure:  # it is lost, or it has nothing of it:
                    logger.error("%s", failure)  # who asks finds that out
                    break
                except Exception as failure:  # any: it may be restarting
                    logger.warning("page server %#x cannot be told yet: %r", home, failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MOST_S)
        finally:
            self._stored.unheard.discard(region)
            self._stored.is_back(region, home)

    async def _tell_other(self, region: int, server_id: int) -> None:
        """It is ready to be the home, and is not: it lets go of that."""
        for home in self._core.homes_of(region):
            if home != server_id and (record := self._stored.record_at(region, home)) is not None:
                call = self._servers.rehome(server_id, record)
                await watched(self._servers, server_id, call, TELL_S)


def _said(away: AwayDirectory) -> tuple[str, str]:
    return away.directory, f"{away.n_regions} variables are there ({away.reason})"
