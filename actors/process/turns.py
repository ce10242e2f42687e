"""A few at a time; of those that wait, the one that was asked for most is next. No Ray.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator


class Turns:
    """See the file's head. Of those that were asked for equally often, the first that came.

    Args:
        at_once: How many.

    Example:
        >>> async def show():
        ...     turns, begun = Turns(1), []
        ...     async def one(number):
        ...         async with turns.of(number):
        ...             begun.append(number)
        ...             await asyncio.sleep(0)
        ...     work = asyncio.gather(*map(one, range(4)))
        ...     await asyncio.sleep(0)  # the first has begun
        ...     turns.ask(2)
        ...     await work
        ...     return begun
        >>> asyncio.run(show())
        [0, 2, 1, 3]
    """

    def __init__(self, at_once: int) -> None:
        self._n_free = at_once
        self._asked: Counter[int] = Counter()
        self._waiting: dict[asyncio.Future[None], int] = {}  # in the order in which they came

    def ask(self, number: int) -> None:
        """Somebody waits for this one."""
        self._asked[number] += 1

    def forget(self, number: int) -> None:
        """It is done: nobody waits for it any more."""
        self._asked.pop(number, None)

    @contextlib.asynccontextmanager
    async def of(self, number: int) -> AsyncIterator[None]:
        """The turn of this one, as long as the block runs."""
        await self._take(number)
        try:
            yield
        finally:
            self._give()

    async def _take(self, number: int) -> None:
        if self._n_free:
            self._n_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = number
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if not turn.cancelled():  # it had just got it
                self._give()
            raise

    def _give(self) -> None:
        waiting = [turn for turn in self._waiting if not turn.done()]  # none that was cancelled
        if not waiting:
            self._n_free += 1
            return
        turn = max(waiting, key=lambda each: self._asked[self._waiting[each]])
        del self._waiting[turn]
        turn.set_result(None)
