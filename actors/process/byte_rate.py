"""A budget of bytes a second, for all that share it. No Ray.

Who is to read a number of bytes waits until all that was read before is paid for, reads them at
once, and the next one pays: so a request that is larger than a second's bytes need not be cut. Any
time of T seconds has at most T times the rate and one request. What was not read is not saved: an
idle hour gives nobody the right to fill the links for a minute.

They go in the order in which they came.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class ByteRate:
    """See the file's head.

    Args:
        bytes_s: What may be read in a second; 0: there is no limit.
        now_s: The clock.
        sleep: Waits so many seconds, by that clock.

    Example:
        >>> rate = ByteRate(1000, now_s=lambda: 5.0)
        >>> rate.spend(250)
        >>> rate.wait_s(), rate.bytes_in(2.0)
        (0.25, 2000.0)
    """

    def __init__(
        self,
        bytes_s: int,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._now_s = now_s
        self._sleep = sleep
        self._paid_s = 0.0  # when what was read until now is paid for, by the clock
        self._turn = asyncio.Lock()

    def bytes_in(self, seconds: float) -> float:
        """What may be read in that time."""
        return seconds * self._bytes_s if self._bytes_s else float("inf")

    def wait_s(self) -> float:
        """How long the next one waits from now on."""
        return max(0.0, self._paid_s - self._now_s())

    def spend(self, n_bytes: int) -> None:
        """So many bytes are read now."""
        if self._bytes_s:
            self._paid_s = max(self._paid_s, self._now_s()) + n_bytes / self._bytes_s

    async def take(self, n_bytes: int) -> None:
        """Returns when so many bytes may be read. Who is cancelled has taken nothing."""
        async with self._turn:  # asyncio's lock: the first that came is the first
            while (wait_s := self.wait_s()) > 0:
                await self._sleep(wait_s)
            self.spend(n_bytes)
