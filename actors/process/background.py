"""Tasks of an actor's loop that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Keeps them from being collected, logs what they raise, and ends them with the actor.

    Args:
        logger: Gets what a task raises.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begins a task of the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def close(self) -> None:
        """Cancels all of them. ``is_closed`` tells others to begin none."""
        self.is_closed = True
        for task in list(self._tasks):
            task.cancel()

    async def end(self) -> None:
        """Cancels all of them, and waits until they are over."""
        tasks = list(self._tasks)
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._logger.error("a task failed", exc_info=failure)
