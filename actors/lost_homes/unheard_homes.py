"""Regions whose homes have just changed, and who has not heard of it yet. No Ray.

A new home that has not heard that it is that refuses who asks it. Of a region that moves, the home
before has all there is until it has heard: nothing of it is rebuilt meanwhile.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib


class Waited:
    """A set of regions; others wait until one of them is not in it any more.

    Example:
        >>> some = Waited()
        >>> some.add(7)
        >>> 7 in some
        True
        >>> some.discard(7)
        >>> 7 in some
        False
    """

    def __init__(self) -> None:
        self._over: dict[int, asyncio.Event] = {}

    def __contains__(self, region: object) -> bool:
        return region in self._over

    def add(self, region: int) -> None:
        """Of no effect where it is there."""
        self._over.setdefault(region, asyncio.Event())

    def discard(self, region: int) -> None:
        """Who waits for it goes on. Of no effect where it is not there."""
        if (over := self._over.pop(region, None)) is not None:
            over.set()

    async def until_over(self, region: int, timeout_s: float) -> None:
        """Returns when it is not there any more, or the time is over."""
        if (over := self._over.get(region)) is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), timeout_s)


class UnheardHomes(Waited):
    """Regions whose new home may not have heard that it is that.

    Attributes:
        moving: Regions that have moved, and whose former home, which lives, may not have heard.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moving = Waited()
