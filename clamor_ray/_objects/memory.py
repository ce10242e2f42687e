"""How many bytes this node can still give, by the kernel's and the container's word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol.config import LEAST_CACHE_BYTES
from clamor_ray.errors import CacheBudgetError, OutOfMemoryError


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _file_bytes(path: Path) -> int:
    """Of files on disk, which the kernel takes out of memory where that is wanted."""
    total_bytes = 0
    names = ("inactive_file", "active_file")
    try:
        # Version 1 has two of each: of the group, and of those below it too.
        found = dict(line.partition(" ")[::2] for line in path.read_text().splitlines())
        for name in names:
            total_bytes += int(found.get(f"total_{name}", found.get(name, 0)))
    except (OSError, ValueError):
        return 0
    return total_bytes


def _meminfo_bytes(root: Path, name: str) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each cgroup above this process: its folder, and its files of limit and use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":  # version 2
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        # Inside a container the path may name groups that are not mounted; its own is the top.
        for group in (folder, *folder.parents):
            yield group, limit, used
            if group == top:
                break


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that an allocation can have without swapping: the least of MemAvailable and what each
    cgroup above this process leaves. None where the kernel does not say.

    Args:
        root: of the file system that holds /proc and /sys; tests give their own.
    """
    available = _meminfo_bytes(root, "MemAvailable")
    bounds = [] if available is None else [available]
    for group, limit, used in _groups(root):
        limit_bytes, used_bytes = _number(group / limit), _number(group / used)
        if limit_bytes is not None and used_bytes is not None:
            reclaimable_bytes = _file_bytes(group / "memory.stat")
            bounds.append(max(0, limit_bytes - used_bytes + reclaimable_bytes))
    return min(bounds) if bounds else None


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this node has, used or not: the least of MemTotal and of the limits of the
    cgroups above this process. None where the kernel does not say.

    Args:
        root: as `available_bytes`'s.
    """
    total = _meminfo_bytes(root, "MemTotal")
    bounds = [] if total is None else [total]
    limits = (_number(group / limit) for group, limit, _ in _groups(root))
    bounds += [limit_bytes for limit_bytes in limits if limit_bytes is not None]
    return min(bounds) if bounds else None


CACHE_SHARE: Final = 4  # a node's cache has this part of its memory, where nothing is said
UNKNOWN_CACHE_BYTES: Final = 1 << 30  # where the kernel does not say what there is


def cache_budget(asked_bytes: int, has_bytes: int | None, node_id: str) -> int:
    """How many bytes of blocks a node's page server caches.

    It depends on nothing that changes while a node lives: a page server that is restarted has the
    same budget, with its cache in memory already.

    Args:
        asked_bytes: by the user; 0: a quarter of what the node has.
        has_bytes: `memory_bytes`.
        node_id: Ray's, for people.

    Raises:
        CacheBudgetError: The node has less than was asked for.
    """
    if asked_bytes == 0:
        found = UNKNOWN_CACHE_BYTES if has_bytes is None else has_bytes // CACHE_SHARE
        return max(LEAST_CACHE_BYTES, found)
    if has_bytes is not None and asked_bytes > has_bytes:
        raise CacheBudgetError(
            f"A cache of {format_bytes(asked_bytes)} ({asked_bytes} bytes) was asked for, and node "
            f"{node_id} has {format_bytes(has_bytes)} ({has_bytes} bytes) of memory."
        )
    return asked_bytes


FULL_SHARE: Final = 0.9  # of a limit: homes, cache, history, object store and heaps are below


def budget_trouble(has_bytes: int | None, cache_bytes: int, history_bytes: int) -> str | None:
    """What is to be said of a node whose page server may take all of its memory; None: nothing.

    Args:
        has_bytes: `memory_bytes`.
        cache_bytes, history_bytes: that it may take.
    """
    if has_bytes is None or cache_bytes + history_bytes < FULL_SHARE * has_bytes:
        return None
    return (
        f"This node has {format_bytes(has_bytes)} of memory, and its page server may take "
        f"{format_bytes(cache_bytes + history_bytes)}: cache {format_bytes(cache_bytes)}, history "
        f"{format_bytes(history_bytes)}. Nothing is left for variables and heaps. Give the "
        "container more memory, or lower CLAMOR_CACHE_BYTES or CLAMOR_HISTORY_BYTES."
    )


# Asking the kernel takes half a millisecond: more than a small commit, for less than its noise.
LOOK_FROM_BYTES = 1 << 20

COMMIT_HINT = (
    "Nothing was committed and the transaction is still open: free other global variables and "
    "call error.transaction.commit(), or drop it with error.transaction.abort()."
)


def check_room(
    needed_bytes: int, what: str, hint: str | None = None, *, available: int | None = None
) -> None:
    """Refuses what would not fit, before anything is allocated. Less than 1 MiB always fits.

    Args:
        needed_bytes: of memory.
        what: needs it; begins the message.
        hint: what to do about it; None for the error's own.
        available: instead of asking the kernel.

    Raises:
        OutOfMemoryError: With both numbers.
    """
    if available is None:
        if needed_bytes < LOOK_FROM_BYTES:
            return
        available = available_bytes()
    if available is not None and needed_bytes > available:
        raise OutOfMemoryError(
            f"{what} needs {format_bytes(needed_bytes)} ({needed_bytes} bytes), and the node "
            f"has {format_bytes(available)} ({available} bytes) of memory left.",
            hint=hint,
        )
