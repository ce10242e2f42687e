"""Regions whose commits wait for a moment: their home moves to another server. No Ray.

What is decided is decided. What is not waits where it would be decided, with its layers staged, and
goes on when the region is released: its layers go to the home that it has then.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class HeldCommits:
    """See the file's head.

    Example:
        >>> held = HeldCommits()
        >>> held.hold(7)
        >>> held.is_held([6, 7])
        True
        >>> held.release(7)
        >>> held.is_held([6, 7])
        False
    """

    def __init__(self) -> None:
        self._released: dict[int, asyncio.Event] = {}

    def hold(self, region: int) -> None:
        """No commit to the region is decided from now on. Who holds it releases it, once."""
        assert region not in self._released, f"variable {region} is held already"
        self._released[region] = asyncio.Event()

    def release(self, region: int) -> None:
        """Its commits go on."""
        self._released.pop(region).set()

    def is_held(self, regions: Iterable[int]) -> bool:
        """Whether commits to one of them wait."""
        return any(region in self._released for region in regions)

    async def until_released(self, regions: Iterable[int], deadline: float) -> bool:
        """Waits until none of them is held, or until then, by the loop's clock.

        Returns:
            Whether none is.
        """
        regions = tuple(regions)
        now_s = asyncio.get_running_loop().time
        while held := [self._released[each] for each in regions if each in self._released]:
            try:
                await asyncio.wait_for(held[0].wait(), max(0.0, deadline - now_s()))
            except asyncio.TimeoutError:
                return not self.is_held(regions)
        return True
