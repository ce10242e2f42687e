"""Which tasks ended because they touched a block that nobody has any more. No Ray, no I/O.

A touch of such a block ends the process (exit code 70). Ray runs the task again, and knows no
cause. So the process tells its page server which task it ran, that tells the registry, and what
runs the task again asks (`clamor_ray/_tasks/task_ends.py`). Only in memory: after a restart of the
registry such a task ends once more, and says so again.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

MOST: Final = 1000
WAIT_MOST_S: Final = 5.0


@dataclass(frozen=True)
class TaskEnd:
    """The touch that ended a task's process.

    Args:
        region: Of the block.
        version: That was read.
        block: Counted from the region's start.
        error: Why it cannot be read (`enum pc_err`): no later attempt can, either.
    """

    region: int
    version: int
    block: int
    error: int


class TaskEndLog:
    """The newest of them, by task.

    Example:
        >>> ends = TaskEndLog()
        >>> ends.note("0a", TaskEnd(7, 1, 20, -7))
        >>> asyncio.run(ends.find("0a", 0)), asyncio.run(ends.find("0b", 0))
        (TaskEnd(region=7, version=1, block=20, error=-7), None)
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ends: dict[str, TaskEnd] = {}  # the oldest first
        self._noted = asyncio.Event()  # another one for each note

    def note(self, task: str, end: TaskEnd) -> None:
        """A process that ran the task ended so."""
        self._ends.pop(task, None)
        self._ends[task] = end
        if len(self._ends) > self._most:
            del self._ends[next(iter(self._ends))]
        self._noted.set()
        self._noted = asyncio.Event()

    async def find(self, task: str, wait_s: float) -> TaskEnd | None:
        """How the task's last such attempt ended; None: none did.

        Args:
            task: Ray's id of it, as hex.
            wait_s: So long it may still be on its way: Ray may be quicker.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + min(wait_s, WAIT_MOST_S)
        while (end := self._ends.get(task)) is None and (left_s := deadline - now()) > 0:
            try:
                await asyncio.wait_for(self._noted.wait(), left_s)
            except asyncio.TimeoutError:
                break
        return end if end is not None else self._ends.get(task)
