"""Drains nodes on which nothing but our page server runs, so that an autoscaler can remove them.
No Ray.

Ray removes no node that has an actor, and a page server is one, also where nobody has used its node
for hours. So a node on which Ray runs nothing else, and whose page server nothing uses, is drained
after ``idle_s``: what it has moves to nodes that stay, and its page server ends. Ray does the rest,
or keeps the node, and then its next task gets another page server there.

Only where an autoscaler runs: elsewhere a node stays anyway, and moving what it has is for nothing.
All nodes that are idle at a time leave together, so that nothing moves from one to the next. Where
something begins on such a node again, or others have no room for what it has, it stays. The journal
has which servers leave because of this: after a restart of the registry it goes on.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from clamor_ray import errors
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

LOOK_S = 5.0
DRAIN_S = 600.0
AGAIN = 10  # times idle_s, until a node is tried again that could not be drained


class ScaledNodes(Protocol):
    """What Ray says. Blocking; any exception means: ask again."""

    def is_autoscaled(self) -> bool:
        """See ``ray_nodes``."""

    def nodes_in_use(self) -> set[str]:
        """See ``ray_nodes``."""


class IdleNodes:
    """See the file's head.

    Args:
        core: Regions and servers.
        drains: Drains one.
        nodes: What Ray says.
        used: How much of a server its node uses, homes not counted; None: it does not answer.
        stays: Whether a server never ends: the one of the session's own node.
        idle_s: How long nothing must have used a node; 0: no node is drained.
        begun: Is told when a drain has been.
    """

    def __init__(
        self,
        core: RegistryCore,
        drains: Drains,
        nodes: ScaledNodes,
        used: Callable[[int], Awaitable[int | None]],
        stays: Callable[[int], bool],
        idle_s: float,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._core = core
        self._drains = drains
        self._nodes = nodes
        self._used = used
        self._stays = stays
        self._idle_s = idle_s
        self._begun = begun
        self._since_s: dict[int, float] = {}
        self._not_before_s: dict[int, float] = {}
        self._ours: set[int] = set()  # servers that leave because of this
        self._background = BackgroundTasks(logger)

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    def watch(self, ours: Iterable[int] = ()) -> None:
        """Looks for such nodes from now on.

        Args:
            ours: Servers that the registry before has drained for this.
        """
        self._ours.update(ours)
        if self._idle_s > 0:
            self._background.spawn(self._watch())

    def forget(self, server_id: int) -> None:
        """It is lost, or has left."""
        self._since_s.pop(server_id, None)
        self._not_before_s.pop(server_id, None)
        self._ours.discard(server_id)

    async def _watch(self) -> None:
        pause_s = min(LOOK_S, self._idle_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            try:
                if await asyncio.to_thread(self._nodes.is_autoscaled):
                    await self._look(await asyncio.to_thread(self._nodes.nodes_in_use))
            except Exception as failure:  # any of Ray's, and of ours: it is looked again
                logger.warning("it is not known which nodes are idle: %r", failure)

    async def _look(self, in_use: set[str]) -> None:
        now_s = time.monotonic()
        idle = []
        for info in self._core.servers():
            server_id = info.server_id
            if self._stays(server_id):
                continue
            is_used = info.node_id in in_use or await self._used(server_id) != 0
            if self._drains.is_leaving(server_id):
                if server_id not in self._ours:
                    continue
                if is_used:
                    self._keep(server_id, "something uses it again")
                elif self._core.homed_at(server_id) and not self._drains.is_running(server_id):
                    self._begin(server_id, info.node_id)
            elif server_id in self._ours:
                self._keep(server_id, "its drain was cancelled")
            elif is_used:
                self._since_s.pop(server_id, None)
            else:
                since_s = self._since_s.setdefault(server_id, now_s)
                if now_s >= max(since_s + self._idle_s, self._not_before_s.get(server_id, 0.0)):
                    idle.append((server_id, info.node_id))
        stay = {info.server_id for info in self._core.servers()} - {each for each, _ in idle}
        if not any(not self._drains.is_leaving(each) for each in stay):
            return  # nobody could take what they have
        for server_id, node_id in idle:
            self._begin(server_id, node_id)

    def _begin(self, server_id: int, node_id: str) -> None:
        self._ours.add(server_id)
        self._background.spawn(self._drain(server_id, node_id))

    async def _drain(self, server_id: int, node_id: str) -> None:
        logger.info("nothing uses node %s: what it has is moved, and Ray may remove it", node_id)
        try:
            await self._drains.drain(server_id, node_id, DRAIN_S, is_idle=True)
        except errors.ClamorError as failure:
            if server_id in self._ours:  # else it is said already
                self._keep(server_id, str(failure))
        finally:
            self._begun()

    def _keep(self, server_id: int, why: str) -> None:
        """It takes homes again."""
        logger.info("page server %#x stays: %s", server_id, why)
        self._drains.cancel(server_id)
        self._ours.discard(server_id)
        self._since_s.pop(server_id, None)
        self._not_before_s[server_id] = time.monotonic() + AGAIN * self._idle_s
