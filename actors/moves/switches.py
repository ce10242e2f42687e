"""The taker of a region becomes its home: written down, and told to it and to the giver. No Ray.

Commits to the region are held back by whoever begins a switch, and go on when it has ended: when
both have heard, or are lost. So until the giver has heard, it has all there is: a taker that turns
out to have nothing, or is lost before that, gives the region back, in one more term: commits go on
when the giver has heard of that. A switch goes on after a restart of the registry: the journal has
who the giver is.

What fails is tried again, however long it takes. A commit waits for its own deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Protocol

from clamor_ray import errors
from clamor_ray._protocol.messages import RegionRecord
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.unheard_homes import UnheardHomes
from clamor_ray.actors.lost_homes.watched_calls import Examined, watched
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

PAUSE_S = 0.05
PAUSE_MOST_S = 5.0
TELL_S = 10.0


class Told(Examined, Protocol):
    """The page servers, by id, as a switch wants them. See ``MoveServers``."""

    async def rehome(self, server_id: int, record: RegionRecord) -> None: ...


class Switches:
    """See the file's head.

    Args:
        core: Regions and servers.
        log: Versions.
        journal: Where a home is written first.
        servers: The page servers.
        held: Regions whose commits wait.
        losses: What is lost of which regions.
        unheard: Learns who has not heard.
        moved: Is told of each region that has another home, and of that.
        rehomed: Is told the id of a page server that is the home of more than before.
        look_again: Sees whether a region has to be rebuilt.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        journal: Journal,
        servers: Told,
        held: HeldCommits,
        losses: Losses,
        unheard: UnheardHomes,
        moved: Callable[[int, int], object] = lambda region, home: None,
        rehomed: Callable[[int], object] = lambda server_id: None,
        look_again: Callable[[int], Coroutine[Any, Any, object]] | None = None,
    ) -> None:
        self._core = core
        self._log = log
        self._journal = journal
        self._servers = servers
        self._held = held
        self._losses = losses
        self._unheard = unheard
        self._moved = moved
        self._rehomed = rehomed
        self._look_again = look_again
        self._background = BackgroundTasks(logger)

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def begin(self, record: RegionRecord, giver: int) -> asyncio.Future[bool]:
        """The taker has all of a region whose commits are held: it is the home from here on.

        Args:
            record: With the taker as its home, the next term, and the newest version.
            giver: The home until now.

        Returns:
            Whether the taker is the home, once all have heard.

        Raises:
            JournalFullError: Nothing has changed; commits are held still.
        """
        self._write(record, giver)
        return self._spawn(record.region, giver)

    def take_back(self, givers: Iterable[tuple[int, int]]) -> None:
        """After a restart of the registry: (region, giver) of the switches that had not ended."""
        for region, giver in givers:
            record = self._core.record_of(region)
            if record is not None and self._core.state(region) is RegionState.READY:
                self._held.hold(region)
                self._moved(region, record.homes[0])
                self._spawn(region, giver)

    def _write(self, record: RegionRecord, giver: int) -> None:
        """No await in here: what is written is what is true."""
        region, home = record.region, record.homes[0]
        self._journal.rehome(record, record.version, self._losses.of(region), giver)
        self._core.rehome(region, home)
        self._log.rehome(region, home)
        self._moved(region, home)

    def _spawn(self, region: int, giver: int) -> asyncio.Future[bool]:
        self._unheard.add(region)
        self._unheard.moving.add(region)
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            is_home = False
            try:
                is_home = await self._tell_both(region, giver)
            finally:
                self._unheard.discard(region)
                self._unheard.moving.discard(region)
                self._held.release(region)
                if not ended.done():
                    ended.set_result(is_home)
            self._tell_others(region)
            if self._look_again is not None:  # one of them may have been lost meanwhile
                await self._look_again(region)

        self._background.spawn(run())
        return ended

    async def _tell_both(self, region: int, giver: int) -> bool:
        """Whether the taker is the home in the end."""
        (taker,) = self._core.homes_of(region) or (0,)
        if taker == giver:
            return await self._tell_home_again(region, giver)
        if await self._tell(taker, region):
            self._unheard.discard(region)
            self._rehomed(taker)
            has_heard = await self._tell(giver, region, unless_lost=taker)
            if has_heard or self._servers.why_lost(giver) is not None:
                self._heard(region)
                return True
        if self._servers.why_lost(giver) is None:
            await self._give_back(region, taker, giver)
        return False

    async def _tell(self, server_id: int, region: int, unless_lost: int = 0) -> bool:
        """Tells a server until it has heard, or nobody need hear of the region any more.

        Args:
            server_id: The server.
            region: Whose home it is told.
            unless_lost: Another server, after whose loss something else is to be told.

        Returns:
            False: it is lost, or the other one is; or it is the home and has nothing of it.
        """
        pause_s = PAUSE_S
        while (record := self._record(region)) is not None:
            lost = map(self._servers.why_lost, filter(None, (server_id, unless_lost)))
            if any(reason is not None for reason in lost):
                return False
            try:
                call = self._servers.rehome(server_id, record)
                await watched(self._servers, server_id, call, TELL_S)
                return True
            except errors.HomeLostError as failure:
                logger.error("variable %d: %s", region, failure)
                return False
            except Exception as failure:  # any: it may be restarting
                logger.warning("page server %#x cannot be told yet: %r", server_id, failure)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)
        return True

    def _record(self, region: int) -> RegionRecord | None:
        """None where it was freed."""
        record = self._core.record_of(region)
        if record is None or self._core.state(region) is not RegionState.READY:
            return None
        lost = self._losses.number(region)
        return replace(record, version=self._log.newest(region), loss=lost)

    async def _give_back(self, region: int, taker: int, giver: int) -> None:
        """The giver has all of it still: no commit was made meanwhile."""
        logger.warning("variable %d stays at %#x: %#x has nothing of it", region, giver, taker)
        while (now := self._record(region)) is not None:
            homes = (giver,) * len(now.homes)
            try:
                self._write(replace(now, homes=homes, term=now.term + 1), giver)
                break
            except errors.JournalFullError as failure:
                logger.warning("%s", failure)
            await asyncio.sleep(PAUSE_MOST_S)
        await self._tell_home_again(region, giver)

    async def _tell_home_again(self, region: int, home: int) -> bool:
        """Until it has heard, a late word of the term before would still end its home: the journal
        has that it must hear, and commits are held, also after a restart of the registry."""
        is_home = await self._tell(home, region)
        self._heard(region)
        return is_home

    def _heard(self, region: int) -> None:
        """Should it not be written, the next registry says it once more."""
        try:
            self._journal.giver_heard(region)
        except errors.JournalFullError as failure:
            logger.warning("%s", failure)

    def _tell_others(self, region: int) -> None:
        """As a favour: they ask when they need to know."""
        if (record := self._record(region)) is not None:
            for server_id in self._core.known_to(region):
                if server_id not in record.homes:
                    self._background.spawn(self._tell_once(server_id, record))

    async def _tell_once(self, server_id: int, record: RegionRecord) -> None:
        try:
            await asyncio.wait_for(self._servers.rehome(server_id, record), TELL_S)
        except Exception as failure:  # any: it asks when it needs to know
            logger.info("page server %#x was not told of a new home: %r", server_id, failure)
