"""Moves pieces of one group to different servers, where two of them share one. No Ray.

That is so after a node was lost and no other was free of the group: what is made again has to go
somewhere. Then the loss of that node would be the loss of two. As soon as there is a server without
a piece of the group, one of the two moves there. Pieces of a variable that is being made share a
server until each has been moved to the home that was chosen for it (``placements``): they are left
alone.

It looks when a page server has come or a region has got a new home, and does nothing else.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from clamor_ray._labels import label
from clamor_ray.actors.moves.choices import least_loaded
from clamor_ray.actors.moves.drains import Drains, MovesOne
from clamor_ray.actors.moves.moves import MoveFailed
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

PAUSE_S = 1.0  # before what could not be moved is tried again
TRIES = 5  # in a row; then it waits for the next server


class Separations:
    """See the file's head.

    Args:
        core: Regions and servers.
        moves: Moves one.
        drains: Which servers take nothing.
        label: A variable for people, by its id.
    """

    def __init__(
        self,
        core: RegistryCore,
        moves: MovesOne,
        drains: Drains,
        label: Callable[[int], str] = label,
    ) -> None:
        self._core = core
        self._moves = moves
        self._drains = drains
        self._label = label
        self._background = BackgroundTasks(logger)
        self._is_looking = False
        self._look_again = False

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def look(self) -> None:
        """Something has changed: separates what can be."""
        self._look_again = True
        if not self._is_looking and not self._background.is_closed:
            self._is_looking = True
            self._background.spawn(self._separate_all())

    async def _separate_all(self) -> None:
        failed = 0
        try:
            while self._look_again and failed < TRIES:
                self._look_again = False
                refused: set[int] = set()  # regions, in this round
                while (found := self.next(refused)) is not None:
                    region, taker = found
                    refused.add(region)
                    try:
                        await self._moves.move(region, taker)
                        failed = 0
                    except MoveFailed as failure:
                        failed += 1
                        self._look_again = failed < TRIES
                        logger.warning("%s is not separated: %s", self._label(region), failure)
                if self._look_again:
                    await asyncio.sleep(PAUSE_S)
        finally:
            self._is_looking = False

    def next(self, refused: set[int]) -> tuple[int, int] | None:
        """A piece that shares a server with another one of its group, and where it can go.

        Args:
            refused: Pieces that are not looked at.
        """
        servers = self._drains.takers(0)
        for record in self._core.ready_regions():
            if not record.has_repair or record.region in refused:
                continue
            if self._core.state(self._core.whole_of(record.region)) is not RegionState.READY:
                continue
            others = self._core.others_of(record.region)
            taken = {home for each in others for home in self._core.homes_of(each)}
            if not taken & set(self._core.homes_of(record.region)):
                continue
            free = [server for server in servers if server not in taken]
            taker = least_loaded(free, self._drains.load_bytes())
            if taker is not None:
                return record.region, taker
        return None
