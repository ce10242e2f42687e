"""Drains the nodes that Ray is to take away: what they have is elsewhere by their deadline. No Ray.

Ray says which nodes it drains, and until when: a machine that its owner takes back, for one. From
then on it starts nothing there, and at the deadline the machine may go at any moment. So each such
node is drained until its deadline. What comes to it later is drained as well. What is there still
when the time is over is said, with the names of the variables: it goes with the node. Until the
node is gone it is tried again.

The page server of such a node ends as after any drain, but not while tasks or actors run there: Ray
would start no other one for them.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._protocol.messages import DrainResult, ServerInfo
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

LOOK_S = 1.0
LOOK_MOST_S = 30.0  # between two looks, where Ray does not answer
LATE_S = 60.0  # after the deadline, or without one, a try takes so long
REGIONS_SAID = 4
PAUSE_S = 5.0  # after a node could not be drained


class RayNodes(Protocol):
    """What Ray says. Blocking; any exception means: ask again."""

    def draining_nodes(self) -> dict[str, float]:
        """See ``ray_nodes``."""

    def nodes_in_use(self) -> set[str]:
        """See ``ray_nodes``."""


class DrainsOne(Protocol):
    """What of ``Drains`` this needs."""

    def is_leaving(self, server_id: int) -> bool: ...
    def is_running(self, server_id: int) -> bool: ...
    async def drain(self, server_id: int, node_id: str, timeout_s: float) -> DrainResult: ...


class AnnouncedDrains:
    """See the file's head.

    Args:
        core: Regions and servers.
        drains: Drains one.
        nodes: What Ray says.
        prepare: Sees to it that there is a server that could take what this one has. It must not
            be on any of these nodes.
        begun: Is told when a drain has been.
        label: A variable for people, by its id.
        now_s: Seconds since the epoch of Unix.
    """

    def __init__(
        self,
        core: RegistryCore,
        drains: DrainsOne,
        nodes: RayNodes,
        prepare: Callable[[int, Collection[str]], Awaitable[object]],
        begun: Callable[[], object] = lambda: None,
        label: Callable[[int], str] = label,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._core = core
        self._drains = drains
        self._nodes = nodes
        self._prepare = prepare
        self._begun = begun
        self._label = label
        self._now_s = now_s
        self._announced: dict[str, float] = {}
        self._has_heard = False  # Ray's first answer
        self._draining: set[str] = set()
        self._background = BackgroundTasks(logger)

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def watch(self) -> None:
        """Looks for such nodes from now on."""
        self._background.spawn(self._watch())

    @property
    def announced(self) -> set[str]:
        """The nodes that Ray drains."""
        return set(self._announced)

    async def keeps(self, node_id: str) -> bool:
        """Whether a node runs something that may need a page server, and could get no other one."""
        if self._has_heard and node_id not in self._announced:
            return False
        try:
            return node_id in await asyncio.to_thread(self._nodes.nodes_in_use)
        except Exception as failure:  # any of Ray's
            logger.info("Ray does not say what runs on node %s: %r", node_id, failure)
            return True

    async def _watch(self) -> None:
        pause_s = LOOK_S
        while True:
            try:
                self._announced = await asyncio.to_thread(self._nodes.draining_nodes)
            except Exception as failure:  # any of Ray's: its GCS may be restarting
                logger.warning("Ray does not say which nodes it drains: %r", failure)
                pause_s = min(2 * pause_s, LOOK_MOST_S)
            else:
                self._has_heard = True
                pause_s = LOOK_S
            for node_id in self._announced:
                if node_id not in self._draining and self._is_to_drain(node_id):
                    self._draining.add(node_id)
                    self._background.spawn(self._drain(node_id))
            await asyncio.sleep(pause_s)

    def _is_to_drain(self, node_id: str) -> bool:
        server_id = self._core.server_id_at(node_id)
        if not isinstance(self._core.locate(server_id), ServerInfo):
            return False
        if self._drains.is_running(server_id):  # somebody has asked for it
            return False
        return bool(self._core.homed_at(server_id)) or not self._drains.is_leaving(server_id)

    async def _drain(self, node_id: str) -> None:
        server_id = self._core.server_id_at(node_id)
        left_s = self._announced[node_id] - self._now_s()
        is_late = left_s <= 0
        try:
            await self._prepare(server_id, set(self._announced))
            timeout_s = LATE_S if is_late or math.isinf(left_s) else left_s
            result = await self._drains.drain(server_id, node_id, timeout_s)
            logger.info("%d variables were moved off node %s", result.moved, node_id)
        except errors.DrainTimeoutError as failure:
            if math.isinf(left_s):
                logger.warning("%s It is tried again.", failure.message)
            else:
                logger.error(
                    "Ray takes node %s away, its deadline is over, and it is not empty. %s What is "
                    "there is lost with the node, but for what other nodes or sources have. Until "
                    "then it is tried again.",
                    *(node_id, failure.message),
                )
        except errors.NodeLostError as failure:  # at Ray's deadline, or before
            logger.error("Ray takes node %s away, and it was not empty. %s", node_id, failure)
        except errors.ClamorError as failure:
            stays = self._core.homed_at(server_id)
            some = ", ".join(map(self._label, stays[:REGIONS_SAID]))
            logger.error(
                "Ray takes node %s away, and the %d variables that it has cannot be moved%s: %s",
                *(node_id, len(stays), some and f" ({some})", failure),
            )
            await asyncio.sleep(PAUSE_S)
        finally:
            self._draining.discard(node_id)
            self._begun()
