"""Calls of page servers that may be lost meanwhile. No Ray.

Ray goes on trying to reach a server whose node is gone, so who waits looks after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from clamor_ray import errors
from clamor_ray._labels import capital

LOOK_S = 3.0  # a server that is silent for so long is looked after
HEAR_S = 0.25  # others may have found it lost before

logger = logging.getLogger("clamor_ray.registry")

TRIES = 12
PAUSE_S = 0.1
PAUSE_MOST_S = 5.0
TELL_S = 10.0

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


async def told_in_the_end(
    tell: Callable[[], Coroutine[Any, Any, object]], is_over: Callable[[], bool], what: str
) -> None:
    """Makes a call until it succeeds, with pauses, for a minute at most.

    Args:
        tell: Makes it.
        is_over: It need not be made any more.
        what: It was not, for the log.
    """
    pause_s = PAUSE_S
    for _ in range(TRIES):
        if is_over():
            return
        try:
            await asyncio.wait_for(tell(), TELL_S)
            return
        except Exception as failure:  # any: it may be restarting
            logger.info("%s: %r", what, failure)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MOST_S)
