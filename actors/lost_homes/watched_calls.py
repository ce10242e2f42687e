"""Calls of page servers that may be lost meanwhile. No Ray.

Ray goes on trying to reach a server whose node is gone, so who waits looks after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from clamor_ray import errors
from clamor_ray._labels import capital

LOOK_S = 3.0  # a server that is silent for so long is looked after
HEAR_S = 0.25  # others may have found it lost before

_T = TypeVar("_T")


class Examined(Protocol):
    """The page servers, by id."""

    def why_lost(self, server_id: int) -> str | None:
        """The reason, for one that will not come back."""

    async def examine(self, server_id: int) -> None:
        """Finds out whether a server that does not answer is lost."""


def _lost(what: str) -> Exception:
    return errors.HomeLostError(f"{capital(what)}.")


async def watched(
    servers: Examined,
    server_id: int,
    call: Coroutine[Any, Any, _T],
    timeout_s: float,
    lost: Callable[[str], Exception] = _lost,
) -> _T:
    """Waits for a server's answer, and looks after it meanwhile.

    Args:
        servers: Knows them.
        server_id: Who is called.
        call: The call.
        timeout_s: For its answer.
        lost: Makes what is raised where the server is lost, of a text that says so.

    Raises:
        TimeoutError: It has not answered in time.
        What ``lost`` makes, or the call raises.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    look_at = loop.time() + LOOK_S
    task = asyncio.ensure_future(call)
    try:
        while True:
            next_s = min(look_at, deadline) - loop.time()
            done, _ = await asyncio.wait({task}, timeout=max(0.0, min(HEAR_S, next_s)))
            if done:
                return task.result()
            is_over = loop.time() >= deadline
            if is_over or loop.time() >= look_at:
                await servers.examine(server_id)
                look_at = loop.time() + LOOK_S
            if (reason := servers.why_lost(server_id)) is not None:
                raise lost(f"page server {server_id:#x} is lost: {reason}")
            if is_over:
                raise asyncio.TimeoutError
    finally:
        task.cancel()
