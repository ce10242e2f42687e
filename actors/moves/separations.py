"""Moves pieces of one group to different servers, where two of them share one. No Ray.

That is so after a node was lost and no other was free of the group: what is made again has to go
somewhere. Then the loss of that node would be the loss of two. As soon as there is a server without
a piece of the group, one of the two moves there. Pieces of a variable that is being made share a
server until each has been moved to the home that was chosen for it (``placements``): they are left
alone.

Where no server is free of the group, nodes that have no page server yet get theirs: one that has
just joined is the spare. It looks when something has changed, and, as long as pieces share a
server, now and then.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

from clamor_ray._labels import label
from clamor_ray.actors.moves.choices import least_loaded
from clamor_ray.actors.moves.drains import Drains, MovesOne
from clamor_ray.actors.moves.moves import MoveFailed
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

PAUSE_S = 1.0  # before what could not be moved is tried again
LOOK_S = 10.0  # while there is no other server, or none that takes a piece
TRIES = 5  # so soon, in a row


async def nothing() -> None:
    """No page server can be started."""


class Separations:
    """See the file's head.

    Args:
        core: Regions and servers.
        moves: Moves one.
        drains: Which servers take nothing.
        label: A variable for people, by its id.
        start_spares: Has the page servers of more nodes started, if there are any.
    """

    def __init__(
        self,
        core: RegistryCore,
        moves: MovesOne,
        drains: Drains,
        label: Callable[[int], str] = label,
        start_spares: Callable[[], Awaitable[None]] = nothing,
    ) -> None:
        self._core = core
        self._moves = moves
        self._drains = drains
        self._label = label
        self._start_spares = start_spares
        self._background = BackgroundTasks(logger)
        self._is_looking = False
        self._changed = asyncio.Event()
        drains.stayed = self.look

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def look(self) -> None:
        """Something has changed: separates what can be."""
        self._changed.set()
        if not self._is_looking and not self._background.is_closed:
            self._is_looking = True
            self._background.spawn(self._separate_all())

    async def _separate_all(self) -> None:
        failed = 0
        try:
            while True:
                self._changed.clear()
                failed = failed + 1 if await self._separate_some() else 0
                if next(self.shared(), None) is None:
                    return
                if not failed:  # no server is free of the group
                    await self._try_to_start()
                with contextlib.suppress(asyncio.TimeoutError):
                    pause_s = PAUSE_S if 0 < failed < TRIES else LOOK_S
                    await asyncio.wait_for(self._changed.wait(), pause_s)
        finally:
            self._is_looking = False

    async def _separate_some(self) -> bool:
        """Moves each that can be, once. Whether one could not be moved."""
        refused: set[int] = set()
        has_failed = False
        while (found := self.next(refused)) is not None:
            region, taker = found
            refused.add(region)
            try:
                await self._moves.move(region, taker)
            except MoveFailed as failure:
                has_failed = True
                logger.warning("%s is not separated: %s", self._label(region), failure)
        return has_failed

    async def _try_to_start(self) -> None:
        try:
            await self._start_spares()
        except Exception as failure:  # any of Ray's, and of ours: it looks again
            logger.warning("no page server was started that pieces could move to: %r", failure)

    def shared(self) -> Iterator[int]:
        """The pieces that share a server with another one of their group."""
        for record in self._core.ready_regions():
            is_made = self._core.state(record.piece_of or record.region) is RegionState.READY
            if record.has_repair and is_made:
                others = self._core.others_of(record.region)
                taken = {home for each in others for home in self._core.homes_of(each)}
                if taken & set(self._core.homes_of(record.region)):
                    yield record.region

    def next(self, refused: set[int]) -> tuple[int, int] | None:
        """A piece that shares a server with another one of its group, and where it can go.

        Args:
            refused: Pieces that are not looked at.
        """
        servers = self._drains.takers(0)
        for region in self.shared():
            if region in refused:
                continue
            apart = self._core.apart(region, servers)
            if (taker := least_loaded(apart, self._drains.load_bytes())) is not None:
                return region, taker
        return None
