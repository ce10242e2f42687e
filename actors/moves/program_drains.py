"""A node that is drained is left by the session's programs, too; and they end with the session.

Each program has a controller of its own, an actor that is found by its name. It is asked again and
again until nothing of the program is on the node, so one that is killed meanwhile is told again.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from ray.exceptions import RayError

from clamor_ray import errors
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.messages import DrainResult

logger = logging.getLogger("clamor_ray.registry")

ASK_S = 5.0
PAUSE_S = 0.2


class ProgramDrains:
    """See the file's head.

    Args:
        scope: Of the session.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self.drained: set[str] = set()  # nodes: no program begins there
        self._running: dict[str, set[asyncio.Future[None]]] = {}

    async def drain_with(
        self, variables: Coroutine[Any, Any, DrainResult], node_id: str, timeout_s: float
    ) -> DrainResult:
        """Programs leave a node, and variables beside them.

        Args:
            variables: Moves them.
            node_id: Ray's hex id of the node.
            timeout_s: For all of it.

        Returns:
            What `variables` gives.

        Raises:
            DrainTimeoutError: A program is there still.
            DrainCancelledError: See `cancel`.
            ClamorError: What `variables` raises.
        """
        self.drained.add(node_id)
        programs = asyncio.ensure_future(self._leave(node_id, timeout_s))
        running = self._running.setdefault(node_id, set())
        running.add(programs)
        try:
            result = await variables
            await programs
            return result
        except asyncio.CancelledError:
            if programs in running:
                raise  # it is who asked that goes
            raise errors.DrainCancelledError(
                f"The drain of node {node_id} was cancelled. What its programs have moved stays "
                "moved."
            ) from None
        finally:
            running.discard(programs)
            programs.cancel()
            await asyncio.gather(programs, return_exceptions=True)

    async def cancel(self, node_id: str) -> bool:
        """The node does not go: programs may come to it again. Drains of it that wait for programs
        raise `DrainCancelledError`.

        Returns:
            Whether it was drained.
        """
        was_drained = node_id in self.drained
        self.drained.discard(node_id)
        for programs in (running := self._running.pop(node_id, set())):
            programs.cancel()
        running.clear()
        await self._ask("cancel_drain", node_id)
        return was_drained

    async def stop_all(self) -> None:
        """The session ends, and its programs with it. Where Ray does not answer they find that out
        by themselves."""
        try:
            await asyncio.wait_for(self._ask("stop"), 2 * ASK_S)
        except Exception as failure:  # any of Ray's: its GCS may be away
            logger.warning("the session's programs are not told of its end: %r", failure)

    async def _leave(self, node_id: str, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while there := [said for said in await self._ask("drain", node_id) if said]:
            if time.monotonic() >= until_s:
                raise errors.DrainTimeoutError(
                    f"Node {node_id} was not left within {timeout_s:g} s by: {', '.join(there)}.",
                    hint="Their partitions move to other nodes that have CPUs: add one, or stop "
                    "the program (job.stop()). Then call clamor.drain again.",
                )
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, method: str, *args: str) -> list[str]:
        """What each program's controller answers."""
        found = names.programs_of(await asyncio.to_thread(ray_state.actor_names), self._scope)
        return [
            said
            for said in await asyncio.gather(
                *(self._ask_one(name, method, *args) for name in found)
            )
            if said
        ]

    async def _ask_one(self, name: str, method: str, *args: str) -> str | None:
        try:
            controller = await asyncio.to_thread(
                ray_state.get_actor, name, namespace=names.NAMESPACE
            )
            said = await ray_state.within(ASK_S, getattr(controller, method).remote(*args))
        except (ValueError, *ray_state.GONE):
            return None  # it has ended
        except (RayError, asyncio.TimeoutError) as failure:
            logger.info("program %s does not answer: %r", name, failure)
            return f"program {name} (its controller does not answer)"
        return str(said or "")
