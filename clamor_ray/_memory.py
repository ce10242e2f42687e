"""How many bytes this node can still give, by the kernel's and the container's word."""

from __future__ import annotations

from pathlib import Path

from clamor_ray._layout import format_bytes
from clamor_ray.errors import OutOfMemoryError


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _inactive_file_bytes(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that an allocation can have without swapping: the least of MemAvailable and what each
    cgroup above this process leaves. None where the kernel does not say.

    Args:
        root: of the file system that holds /proc and /sys; tests give their own.
    """
    bounds: list[int] = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                bounds.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
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
            limit_bytes, used_bytes = _number(group / limit), _number(group / used)
            if limit_bytes is not None and used_bytes is not None:
                reclaimable = _inactive_file_bytes(group / "memory.stat")
                bounds.append(max(0, limit_bytes - used_bytes + reclaimable))
            if group == top:
                break
    return min(bounds) if bounds else None


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
