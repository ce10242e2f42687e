"""The registry's orders to page servers that a region is freed: in batches, until carried out.

An order waits for others, at most ``BATCH_S``, so that thousands of frees are a few calls. Who must
know that it was carried out hurries it. One call at a time goes to a server; what it does not
answer is said again, after a pause that grows, and at once when the server registers or somebody
hurries.

Nothing here is written down: a registry that restarts makes the orders anew
(``RegistryCore.restore``).

Safety: coroutines of one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from ray.exceptions import ActorDiedError, ActorUnschedulableError

from clamor_ray.actors.registry.registry_core import Retire

logger = logging.getLogger("clamor_ray.registry")

BATCH_S: Final = 0.05
BATCH_MOST: Final = 64  # orders a call
AGAIN_FIRST_S: Final = 0.5
AGAIN_MOST_S: Final = 5.0

Tell = Callable[[int, list[Retire]], Awaitable[list[bool | None]]]


@dataclass
class _Queue:
    """Of one server."""

    orders: dict[int, Retire] = field(default_factory=dict)  # by region, the oldest first
    answered: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # by region
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    hurries: bool = False
    fails: bool = False  # the last call did
    attempt: asyncio.Task[list[bool | None]] | None = None
    task: asyncio.Task[None] | None = None

    def hurry(self) -> None:
        self.hurries = True
        self.wake.set()

    def is_due(self) -> bool:
        return self.hurries or (not self.fails and len(self.orders) >= BATCH_MOST)

    def take(self, order: Retire) -> None:
        """It was carried out; one that came meanwhile for its region was not."""
        if self.orders.get(order.region) is order:
            del self.orders[order.region]
            self.answered.pop(order.region).set_result(None)


class Retiring:
    """See the file's head.

    Args:
        tell: Makes one call: (server, orders) to what is left of each, as ``PageServer.retire``
            answers: whether leases may be left; None: it was not carried out. Raises what Ray
            raises, ``asyncio.TimeoutError``, or ``LookupError`` where the server is lost.
        done: Is told what was carried out: (server, [(order, whether leases may be left)]).
        lose: A server's actor is dead for good.
    """

    def __init__(
        self,
        tell: Tell,
        done: Callable[[int, list[tuple[Retire, bool]]], None],
        lose: Callable[[int, ActorDiedError], None],
    ) -> None:
        self._tell, self._done, self._lose = tell, done, lose
        self._queues: dict[int, _Queue] = {}

    def order(self, orders: Iterable[Retire]) -> None:
        """They are carried out within about ``BATCH_S``, where their servers answer."""
        for order in orders:
            queue = self._queues.setdefault(order.server_id, _Queue())
            queue.orders[order.region] = order
            if order.region not in queue.answered:
                queue.answered[order.region] = asyncio.get_running_loop().create_future()
            if queue.task is None:
                work = self._carry_out(order.server_id, queue)
                queue.task = asyncio.get_running_loop().create_task(work)
                queue.task.add_done_callback(_say_failure)
            elif queue.is_due():
                queue.wake.set()

    def hurry(self, region: int, but: int = 0) -> list[asyncio.Future[None]]:
        """The region's orders go out now.

        Args:
            region: Its id.
            but: A server whose order has time.

        Returns:
            What ends when they are carried out, or their server is lost.
        """
        waiting = []
        for server_id, queue in self._queues.items():
            if server_id != but and region in queue.answered:
                queue.hurry()
                waiting.append(queue.answered[region])
        return waiting

    def server_here(self, server_id: int) -> None:
        """It has registered: what it did not answer is said again at once."""
        queue = self._queues.get(server_id)
        if queue is None:
            return
        if queue.attempt is not None:  # its process before may have got that
            queue.attempt.cancel()
        queue.hurry()

    def server_lost(self, server_id: int) -> None:
        """Nothing is to be said to it any more."""
        queue = self._queues.pop(server_id, None)
        if queue is None:
            return
        if queue.task is not None:
            queue.task.cancel()
        if queue.attempt is not None:
            queue.attempt.cancel()
        for waiting in queue.answered.values():
            waiting.set_result(None)

    def close(self) -> None:
        """No order goes out any more."""
        for server_id in list(self._queues):
            self.server_lost(server_id)

    async def _carry_out(self, server_id: int, queue: _Queue) -> None:
        try:
            await self._until_all_told(server_id, queue)
        finally:  # with an exception: the next order begins anew
            if self._queues.get(server_id) is queue:
                self.server_lost(server_id)

    async def _until_all_told(self, server_id: int, queue: _Queue) -> None:
        pause_s = BATCH_S
        while queue.orders:
            queue.wake.clear()
            if not queue.is_due():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(queue.wake.wait(), pause_s)
            queue.hurries = False
            batch = list(itertools.islice(queue.orders.values(), BATCH_MOST))
            failure = await self._try(server_id, queue, batch)
            if self._queues.get(server_id) is not queue:
                return
            queue.fails = failure is not None
            if failure is None:
                pause_s = BATCH_S
                continue
            pause_s = min(max(2 * pause_s, AGAIN_FIRST_S), AGAIN_MOST_S)
            # Where the node is gone its page server is called dead soon.
            expected = isinstance(failure, ActorUnschedulableError)
            level = logging.INFO if expected else logging.WARNING
            regions = ", ".join(str(order.region) for order in batch[:6])
            more = ", ..." if len(batch) > 6 else ""
            logger.log(
                level,
                "cannot retire %d regions (%s%s) at server %#x yet: %r",
                *(len(batch), regions, more, server_id, failure),
            )

    async def _try(
        self, server_id: int, queue: _Queue, batch: list[Retire]
    ) -> BaseException | None:
        """Why it is to be tried again; None where it need not be."""

        async def tell() -> list[bool | None]:
            return await self._tell(server_id, batch)

        queue.attempt = asyncio.get_running_loop().create_task(tell())
        await asyncio.wait({queue.attempt})
        attempt, queue.attempt = queue.attempt, None
        if attempt.cancelled():
            return RuntimeError("its page server has started again")
        failure = attempt.exception()
        if isinstance(failure, LookupError):
            self.server_lost(server_id)
            return None
        if isinstance(failure, ActorDiedError):
            self._lose(server_id, failure)
            self.server_lost(server_id)
            return None
        if failure is not None:
            return failure
        answers = zip(batch, attempt.result(), strict=True)
        told = [(order, left) for order, left in answers if left is not None]
        for order, _ in told:
            queue.take(order)
        self._done(server_id, told)
        if len(told) < len(batch):
            return RuntimeError("it could not carry out all; its log says why")
        return None


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (failure := task.exception()) is not None:
        logger.error("a task of the registry failed", exc_info=failure)
