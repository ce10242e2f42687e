"""Calls of the registry answer nothing that a power cut could take back.

What a call answers, or raises, may rest on anything that was decided before it, by itself or by
another call. So each waits until all that was written before is on the disk. Where nothing was, it
does not wait.

What the registry tells page servers by itself waits in ``RayHomes`` and ``RegionEnds``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

# Those say nothing that is in the journal; some are called for every task.
AT_ONCE: Final = frozenset(
    {
        *("ping", "scope", "secret", "until_end"),  # the process, and what never changes
        "ask",  # what it calls waits
        "nothing",  # anchors are made of it
        *("meet", "leave_meeting", "task_ended", "end_of_task"),  # only in memory
        *("note_reads", "find_reads", "note_attempt", "lineage_counters"),  # end with the cluster
    }
)

_T = TypeVar("_T", bound=type)


def _waits(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await method(self, *args, **kwargs)
        except Exception:  # not CancelledError: nobody hears that
            await _synced(self)
            raise
        await _synced(self)
        return answer

    return call


async def _synced(registry: Any) -> None:
    # One that was refused its store has no journal, and has decided nothing: it says why.
    journal = getattr(registry, "_journal", None)
    if journal is not None:
        await journal.synced()


def durable(cls: _T) -> _T:
    """Decorates a class of registries: each public coroutine waits for the journal.

    Example:
        >>> class Disk:
        ...     async def synced(self): print("is on the disk")
        >>> @durable
        ... class Calls:
        ...     _journal = Disk()
        ...     async def ping(self): return "pong"
        ...     async def commit(self): return "is made"
        >>> import asyncio
        >>> asyncio.run(Calls().commit()), asyncio.run(Calls().ping())
        is on the disk
        ('is made', 'pong')
    """
    for name, method in inspect.getmembers(cls, inspect.iscoroutinefunction):
        if not name.startswith("_") and name not in AT_ONCE:
            setattr(cls, name, _waits(method))
    return cls
