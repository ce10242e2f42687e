"""Carries out the core's orders that regions end, and looks for servers that died meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from clamor_ray._protocol.messages import ServerInfo
from clamor_ray._protocol.ray_state import alive_nodes, within
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import (
    CALL_S,
    WATCH_MOST_S,
    Handles,
    Liveness,
    ServerLoss,
)
from clamor_ray.actors.registry.registry_core import RegistryCore, Retire
from clamor_ray.actors.registry.retiring import Retiring, ServerGone

WATCH_FIRST_S: Final = 2.0


class RegionEnds:
    """See the file's head. Coroutines of the registry's loop.

    Args:
        core: Decides what follows from what was carried out.
        handles: The page servers' actors.
        late: Writes the states that follow.
        liveness: Is told of servers that are dead.
        background: Where dead nodes are looked for.
        before_told: As of ``RayHomes``.
    """

    def __init__(
        self,
        core: RegistryCore,
        handles: Handles,
        late: LateWrites,
        liveness: Liveness,
        background: BackgroundTasks,
        before_told: Callable[[], Awaitable[None]],
    ) -> None:
        self._core = core
        self._handles = handles
        self._late = late
        self._liveness = liveness
        self._background = background
        self._before_told = before_told
        self._retiring = Retiring(self._tell, self._retired, liveness.actor_died)
        self._is_watching = False

    def carry_out(self, orders: Iterable[Retire]) -> None:
        """Sends orders to their servers, until they are carried out; writes what has changed."""
        orders = list(orders)
        self._retiring.order(orders)  # first: what fails below takes none of them with it
        if orders and not self._is_watching and not self._background.is_closed:
            self._is_watching = True
            self._background.spawn(self._watch())
        self._late.save_changed()

    def hurry(self, region: int, but: int = 0) -> list[asyncio.Future[None]]:
        """See ``Retiring.hurry``."""
        return self._retiring.hurry(region, but)

    def server_here(self, server_id: int) -> None:
        """It has registered."""
        self._retiring.server_here(server_id)

    def idle(self, regions: list[int], server_id: int) -> None:
        """A page server says that the last leases on its node are gone."""
        self.carry_out(
            order for region in regions for order in self._core.region_idle(region, server_id)
        )

    def close(self) -> None:
        """No order goes out any more."""
        self._retiring.close()

    def server_lost(self, loss: ServerLoss) -> None:
        """Nothing is to be said to it any more."""
        self._retiring.server_lost(loss.server_id)
        self.carry_out(loss.orders)

    async def _tell(self, server_id: int, orders: list[Retire]) -> list[bool | None]:
        """See ``Retiring``."""
        await self._before_told()
        handle = self._handles.get(server_id)
        if handle is None:
            raise ServerGone
        # A server that was restarted may know the region's memory, and not what it is.
        packed = pack(
            *(
                (
                    *(order.region, order.force),
                    None if order.force else self._core.record_of(order.region),
                    order.alone,
                )
                for order in orders
            )
        )
        answer: bytes = await within(CALL_S, handle.retire.remote(packed))
        return list(unpack(answer))

    def _retired(self, server_id: int, told: list[tuple[Retire, bool]]) -> None:
        """They were carried out; of each: whether leases may be left."""
        orders: list[Retire] = []
        try:
            for order, leased in told:
                if order.force:
                    self._core.dropped(order.region, server_id)
                elif not leased and order.alone:  # which it has dropped already
                    self._core.region_idle(order.region, server_id)
                    self._core.dropped(order.region, server_id)
                elif not leased:
                    orders += self._core.region_idle(order.region, server_id)
        finally:  # the core makes these once
            self.carry_out(orders)

    async def _watch(self) -> None:
        """While freed regions wait for servers, looks for nodes that died without a word."""
        pause_s = WATCH_FIRST_S
        try:
            while waited_for := self._core.waited_for():
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, WATCH_MOST_S)
                alive = await asyncio.to_thread(alive_nodes)
                for server_id in waited_for:
                    answer = self._core.locate(server_id)
                    if isinstance(answer, ServerInfo) and answer.node_id not in alive:
                        self._liveness.lose(server_id, f"its node {answer.node_id} is dead")
        finally:
            self._is_watching = False
