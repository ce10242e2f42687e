"""Regions that were given out in advance, for a ``put`` that may never come.

``seal_and_create`` makes the next region of a row of puts before it is asked for. The process that
has it keeps it for some seconds (``_build/spares.py``: ``KEEP_S``), or ends without a message.
The home of a region knows whether a ``put`` fills it; so after a while the homes are asked, and
regions that they do not know are given back. A put that comes even later, of a process that was
stopped, is refused at its seal, and begins anew with another region.

A registry that restarts forgets them: they end with other regions that nobody sealed, after 10
minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final

from ray.exceptions import RayError

from clamor_ray.errors import ServerUnavailableError

logger = logging.getLogger("clamor_ray.registry")

UNUSED_S: Final = 30.0  # longer than one is kept, and than a home takes to hear of a put

Knows = Callable[[int, list[int]], Awaitable[list[bool] | None]]


class SpareRegions:
    """See the file's head. Coroutines of one loop.

    Args:
        knows: Asks a page server which regions it has heard of; None: it is lost. Raises what Ray
            raises, ``asyncio.TimeoutError``, or ``ServerUnavailableError``: no answer now.
        give_back: A region that nobody will fill.
    """

    def __init__(self, knows: Knows, give_back: Callable[[int], None]) -> None:
        self._knows, self._give_back = knows, give_back
        self._made: dict[int, tuple[int, float]] = {}  # by region, the oldest first: home, when
        self.is_looking = False

    def made(self, region: int, home: int) -> None:
        """It was given out in advance."""
        self._made[region] = (home, time.monotonic())

    def sealed(self, region: int) -> None:
        """It was filled."""
        self._made.pop(region, None)

    async def look(self) -> None:
        """Gives back what nobody has begun to fill. Ends when there is none left; one at a time."""
        if self.is_looking:
            return
        self.is_looking = True
        try:
            while self._made:
                _, made_s = next(iter(self._made.values()))
                await asyncio.sleep(max(0.0, made_s + UNUSED_S - time.monotonic()))
                await self._look_once()
        finally:
            self.is_looking = False

    async def _look_once(self) -> None:
        until_s = time.monotonic() - UNUSED_S
        by_home: dict[int, list[int]] = defaultdict(list)
        for region, (home, made_s) in self._made.items():
            if made_s <= until_s:
                by_home[home].append(region)
        for home, regions in by_home.items():
            try:
                known = await self._knows(home, regions)
            except (RayError, asyncio.TimeoutError, ServerUnavailableError) as failure:
                logger.info("page server %#x does not say what it has yet: %r", home, failure)
                for region in regions:
                    if self._made.pop(region, None) is not None:
                        self.made(region, home)
                continue
            if known is None:  # with what was filled there
                known = [False] * len(regions)
            for region, is_known in zip(regions, known, strict=True):
                if self._made.pop(region, None) is not None and not is_known:
                    self._give_back(region)
