"""The registry's orders to page servers that a region is freed: in batches, until carried out.

An order waits for others, at most ``BATCH_S``, so that thousands of frees are a few calls. Who must
know that it was carried out hurries it. One call at a time goes to a server; what it does not
answer is said again, after a pause that grows, and at once when the server registers or somebody
hurries. What a server could not do goes behind what has not been tried. Of a call that failed as a
whole half is in the next one: should one order be the cause, it holds up no other for long. An
order is dropped only when its server is lost.

Nothing here is written down: a registry that restarts makes the orders anew
(``RegistryCore.restore``).

Safety: coroutines of one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from ray.exceptions import ActorDiedError, ActorUnschedulableError

from clamor_ray._protocol.cause import cause_of
from clamor_ray.actors.registry.registry_core import Retire

logger = logging.getLogger("clamor_ray.registry")

BATCH_S: Final = 0.05
BATCH_MOST: Final = 64  # orders a call
AGAIN_FIRST_S: Final = 0.5
AGAIN_MOST_S: Final = 5.0

Tell = Callable[[int, list[Retire]], Awaitable[list[bool | None]]]


class ServerGone(Exception):
    """The server is lost: nothing is to be said to it any more."""


@dataclass
class _Queue:
    """Of one server. An order is in one of the two dicts."""

    fresh: dict[int, Retire] = field(default_factory=dict)  # by region, the oldest first
    failed: dict[int, Retire] = field(default_factory=dict)  # tried before, the last one last
    answered: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # by region
    hurried: set[int] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_silent: bool = False  # the last call failed: nothing is known of the server
    fresh_s: float = 0.0  # when fresh orders go out, by the loop's clock
    again_s: float = 0.0  # when those that failed do
    pause_s: float = 0.0
    most: int = BATCH_MOST
    attempt: asyncio.Task[list[bool | None]] | None = None
    task: asyncio.Task[None] | None = None

    def add(self, order: Retire, now_s: float) -> None:
        if not self.fresh:
            self.fresh_s = now_s + BATCH_S
        self.failed.pop(order.region, None)
        self.fresh[order.region] = order
        if order.region not in self.answered:
            self.answered[order.region] = asyncio.get_running_loop().create_future()
        self.wake.set()

    def hurry(self, regions: Iterable[int]) -> None:
        self.hurried.update(regions)
        self.wake.set()

    def due_s(self) -> float:
        """When the next call is made."""
        if self.hurried:
            return 0.0
        if self.is_silent:
            return self.again_s
        fresh_s = 0.0 if len(self.fresh) >= BATCH_MOST else self.fresh_s
        return min(
            fresh_s if self.fresh else math.inf,
            self.again_s if self.failed else math.inf,
        )

    def batch(self, now_s: float) -> list[Retire]:
        """The orders of the next call: hurried ones, fresh ones, those that have failed."""
        both = {**self.fresh, **self.failed}
        first = [both[region] for region in both if region in self.hurried]
        rest = [*self.fresh.values()]
        if self.hurried or now_s >= self.again_s:
            rest += self.failed.values()
        rest = [order for order in rest if order.region not in self.hurried]
        return [*first, *rest][: self.most]

    def take(self, order: Retire) -> None:
        """It was carried out; one that came meanwhile for its region was not."""
        for orders in (self.fresh, self.failed):
            if orders.get(order.region) is order:
                del orders[order.region]
                self.hurried.discard(order.region)
                self.answered.pop(order.region).set_result(None)

    def put_off(self, orders: Iterable[Retire], now_s: float) -> None:
        """They failed: others go first. Not those that another one has replaced."""
        for order in orders:
            if self.fresh.get(order.region, order) is order:
                self.fresh.pop(order.region, None)
                self.failed.pop(order.region, None)
                self.failed[order.region] = order
                if order.region not in self.answered:
                    self.answered[order.region] = asyncio.get_running_loop().create_future()
        self.pause_s = min(max(2 * self.pause_s, AGAIN_FIRST_S), AGAIN_MOST_S)
        self.again_s = now_s + self.pause_s


class Retiring:
    """See the file's head.

    Args:
        tell: Makes one call: (server, orders) to what is left of each, as ``PageServer.retire``
            answers: whether leases may be left; None: it was not carried out. Raises what Ray
            raises, ``asyncio.TimeoutError``, or ``ServerGone``.
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
            queue.add(order, asyncio.get_running_loop().time())
            if queue.task is None:
                work = self._until_all_told(order.server_id, queue)
                queue.task = asyncio.get_running_loop().create_task(work)

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
                queue.hurry([region])
                waiting.append(queue.answered[region])
        return waiting

    def server_here(self, server_id: int) -> None:
        """It has registered: what it did not answer is said again at once."""
        queue = self._queues.get(server_id)
        if queue is None:
            return
        if queue.attempt is not None:  # its process before may have got that
            queue.attempt.cancel()
        queue.is_silent, queue.most = False, BATCH_MOST
        queue.hurry(queue.answered)

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

    async def _until_all_told(self, server_id: int, queue: _Queue) -> None:
        now_s = asyncio.get_running_loop().time
        while queue.answered:
            queue.wake.clear()
            left_s = queue.due_s() - now_s()
            if left_s > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(queue.wake.wait(), left_s)
                continue
            batch = queue.batch(now_s())
            queue.hurried.difference_update(order.region for order in batch)
            try:
                failed = await self._try(server_id, queue, batch)
            except Exception as failure:  # any, of ours: who is asked again answers the same
                logger.error("what server %#x answered was not noted", server_id, exc_info=failure)
                queue.most = len(batch) // 2 or BATCH_MOST  # should one of them be the cause
                failed = batch
            if self._queues.get(server_id) is not queue:
                return
            queue.fresh_s = now_s() + BATCH_S
            if failed:
                queue.put_off(failed, now_s())
            elif not queue.failed:
                queue.pause_s = 0.0
        del self._queues[server_id]

    async def _try(self, server_id: int, queue: _Queue, batch: list[Retire]) -> list[Retire]:
        """Those that are to be tried again; why is in the log."""

        async def tell() -> list[bool | None]:
            return await self._tell(server_id, batch)

        again = queue.pause_s > 0
        queue.attempt = asyncio.get_running_loop().create_task(tell())
        await asyncio.wait({queue.attempt})
        attempt, queue.attempt = queue.attempt, None
        try:
            answers = list(zip(batch, attempt.result(), strict=True))
        except ServerGone:
            self.server_lost(server_id)
            return []
        except ActorDiedError as failure:
            self._lose(server_id, failure)
            self.server_lost(server_id)
            return []
        except asyncio.CancelledError:
            _log_unanswered(server_id, batch, "it has started again", again)
            return batch
        except Exception as failure:  # any: the server may not be reached
            # Should one of the orders be the cause, it is alone in the end.
            queue.is_silent, queue.most = True, len(batch) // 2 or BATCH_MOST
            _log_unanswered(server_id, batch, failure, again)
            return batch
        queue.is_silent, queue.most = False, min(2 * queue.most, BATCH_MOST)
        told = [(order, left) for order, left in answers if left is not None]
        for order, _ in told:
            queue.take(order)
        self._done(server_id, told)
        failed = [order for order, left in answers if left is None]
        if failed:
            _log_unanswered(server_id, failed, "it could not let go; its log says why", again)
        return failed


def _log_unanswered(
    server_id: int, orders: list[Retire], why: Exception | str, again: bool
) -> None:
    # Once is nothing that anybody must know: it is said again, and mostly answered then. Where the
    # node is gone its page server is called dead soon.
    is_news = again and not isinstance(why, ActorUnschedulableError)
    regions = ", ".join(str(order.region) for order in orders[:6])
    more = ", ..." if len(orders) > 6 else ""
    logger.log(
        logging.WARNING if is_news else logging.INFO,
        "page server %#x holds memory of %d freed variable(s) (id %s%s) still: %s. It is asked "
        "again until it answers or is lost; there is nothing to do",
        *(server_id, len(orders), regions, more, why if isinstance(why, str) else cause_of(why)),
    )
