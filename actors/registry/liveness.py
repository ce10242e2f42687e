"""Where page servers are, and which are lost for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ray.exceptions import ActorDiedError, RayError

from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import (
    LocateAnswer,
    ServerInfo,
    ServerLost,
    ServerRestarting,
    has_left,
)
from clamor_ray._protocol.ray_state import PING_S, alive_nodes, raylet_is_gone, within
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.registry_core import RegistryCore, Retire

logger = logging.getLogger("clamor_ray.registry")

CALL_S: Final = 10.0
WATCH_MOST_S: Final = 30.0

Handles = dict[int, Any]  # the page servers' actors, by id: without those that are lost


@dataclass(frozen=True, kw_only=True)
class ServerLoss:
    """A page server that is gone for good.

    Args:
        server_id: Its id.
        node_id: Its node, where that needs another one; None: it has one, or was never here.
        orders: What follows for regions that are ending.
    """

    server_id: int
    node_id: str | None
    orders: tuple[Retire, ...]


class Liveness:
    """Where page servers are, and which are lost.

    Args:
        core: Knows what was said of them.
        log: Waits for none that is lost.
        handles: Loses those that are lost.
        late: Writes it.

    Attributes:
        when_lost: Are told of each that is lost from then on, in this order.
    """

    def __init__(
        self, core: RegistryCore, log: CommitLog, handles: Handles, late: LateWrites
    ) -> None:
        self._core = core
        self._log = log
        self._handles = handles
        self._late = late
        self.when_lost: list[Callable[[ServerLoss], object]] = []

    async def locate(self, server_id: int, since_epoch: int = 0) -> LocateAnswer:
        """Where a page server is.

        Args:
            server_id: The server.
            since_epoch: The epoch under which the caller could not reach it, or 0. If it has not
                registered again since, Ray is asked what became of it.
        """
        answer = self._core.locate(server_id)
        if not isinstance(answer, ServerInfo) or answer.epoch > since_epoch:
            return answer
        return await self.examine(answer)

    async def examine(self, info: ServerInfo) -> LocateAnswer:
        """Asks Ray what became of it."""
        if info.node_id not in await asyncio.to_thread(alive_nodes):
            return self.lose(info.server_id, f"its node {info.node_id} is dead")
        try:
            await within(PING_S, self._handles[info.server_id].ping.remote())
        except ActorDiedError as failure:
            return self.lose(info.server_id, f"its actor is dead: {cause_of(failure)}")
        except (RayError, asyncio.TimeoutError):
            if await asyncio.to_thread(raylet_is_gone, info.node_id):
                return self.lose(info.server_id, f"the raylet of its node {info.node_id} is gone")
            return ServerRestarting(info.server_id)
        return self._core.locate(info.server_id)

    def lose(self, server_id: int, reason: str, is_there: bool = False) -> LocateAnswer:
        """It is gone for good, with what it held. Its node may join again, under another id.

        Args:
            server_id: The server.
            reason: Why.
            is_there: The node has joined again already, or is about to.
        """
        if has_left(reason):
            logger.info("page server %#x: %s", server_id, reason)
        else:
            logger.error("page server %#x is lost: %s", server_id, reason)
        info = self._core.locate(server_id)
        self._handles.pop(server_id, None)
        orders = self._core.server_lost(server_id, reason)
        self._log.server_lost(server_id)
        lost = ServerLost(server_id, reason)
        self._late.note_server(server_id, lost)
        node_id = info.node_id if isinstance(info, ServerInfo) and not is_there else None
        loss = ServerLoss(server_id=server_id, node_id=node_id, orders=orders)
        for tell in self.when_lost:
            tell(loss)
        return lost

    def actor_died(self, server_id: int, failure: ActorDiedError) -> None:
        """Ray says that its actor is dead for good."""
        self.lose(server_id, f"its actor is dead: {cause_of(failure)}")
