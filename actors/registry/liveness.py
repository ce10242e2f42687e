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
from clamor_ray._protocol.ray_state import PING_S, alive_nodes, raylet_addresses, within
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.lost_homes.evidence import TWICE_S, all_refuse
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.registry_core import RegistryCore, Retire

logger = logging.getLogger("clamor_ray.registry")

CALL_S: Final = 10.0
WATCH_MOST_S: Final = 30.0
SOON_S: Final = 0.3  # a server that lives answers within this, mostly

Handles = dict[int, Any]  # the page servers' actors, by id: without those that are lost


@dataclass(frozen=True, kw_only=True)
class ServerLoss:
    """A page server that is gone for good.

    Args:
        server_id: Its id.
        node_id: Its node, where that needs another one; None: it has one, or was never here.
        orders: What follows for regions that are ending.
        is_there: Another one has come in its place already, or is about to.
    """

    server_id: int
    node_id: str | None
    orders: tuple[Retire, ...]
    is_there: bool = False


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

    async def look(self, info: ServerInfo) -> ServerLost | None:
        """Declares it lost where that is certain, without a question to itself.

        It is where Ray says that its node is dead. And where its host answers that nothing listens
        any more where the page server did, nor where the node's raylet did: then both processes
        have ended, the raylet never comes back under its node's id, and nobody else starts the page
        server again. Ray itself counts missed health checks before it calls such a node dead, for
        15 s. A host that does not answer is no evidence, and a process that is stopped still
        listens: of those Ray has the only word.

        Returns:
            None: it is not known to be lost.
        """
        raylet = await asyncio.to_thread(raylet_addresses, info.node_id)
        if not isinstance(self._core.locate(info.server_id), ServerInfo):
            return None  # others were quicker
        if raylet is None:
            return self.lose(info.server_id, f"its node {info.node_id} is dead")
        # The page server last: of one that is stopped, each look stays in its port's queue.
        for pause_s in (TWICE_S, 0.0):
            if not (await all_refuse(raylet) and await all_refuse([(info.host, info.port)])):
                return None
            await asyncio.sleep(pause_s)
        if not isinstance(self._core.locate(info.server_id), ServerInfo):
            return None
        return self.lose(
            info.server_id, f"it has ended, and the raylet of its node {info.node_id} too"
        )

    async def examine(self, info: ServerInfo) -> LocateAnswer:
        """Asks Ray and itself what became of it, and looks where it does not answer at once."""
        server_id = info.server_id
        if info.node_id not in await asyncio.to_thread(alive_nodes):
            return self.lose(server_id, f"its node {info.node_id} is dead")
        if (handle := self._handles.get(server_id)) is None:  # others were quicker
            return self._core.locate(server_id)
        ping = asyncio.ensure_future(within(PING_S, handle.ping.remote()))
        try:
            if not (await asyncio.wait({ping}, timeout=SOON_S))[0]:
                await self.look(info)
            if isinstance(self._core.locate(server_id), ServerInfo):
                await ping
        except ActorDiedError as failure:
            return self.lose(server_id, f"its actor is dead: {cause_of(failure)}")
        except (RayError, asyncio.TimeoutError):
            await self.look(info)
            if isinstance(answer := self._core.locate(server_id), ServerInfo):
                return ServerRestarting(server_id)
            return answer
        finally:
            ping.cancel()
        return self._core.locate(server_id)

    def lose(self, server_id: int, reason: str, is_there: bool = False) -> ServerLost:
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
        loss = ServerLoss(server_id=server_id, node_id=node_id, orders=orders, is_there=is_there)
        for tell in self.when_lost:
            tell(loss)
        return lost

    def actor_died(self, server_id: int, failure: ActorDiedError) -> None:
        """Ray says that its actor is dead for good."""
        self.lose(server_id, f"its actor is dead: {cause_of(failure)}")
