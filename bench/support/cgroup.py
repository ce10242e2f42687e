"""Machines of a part of a core each: control groups of this one (root).

A group has a quota of CPU time, which all its processes share, so that who computes beside a node's
workers takes time from them and from nobody else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 20_000
_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")


def unavailable() -> str | None:
    """Why there are none here, or None."""
    try:
        with groups(1, 0.5):
            return None
    except OSError as error:
        return f"control groups with a quota of CPU time cannot be made here (root?): {error}"


class Group:
    """One of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int) -> None:
        """Moves a process there; what it starts from then on is there as well."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        """Who is there."""
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def groups(n: int, cores: float) -> Iterator[list[Group]]:
    """So many groups, each with a quota of so many cores; removed at the end.

    Raises:
        OSError: The kernel or its set-up does not give any.
    """
    quota_us = int(cores * PERIOD_US)
    name = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    parent = _V1 if (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "tasks").exists() else _V2
    made: list[Path] = []
    try:
        for number in range(n):
            path = parent / f"{name}-{number}"
            path.mkdir()
            made.append(path)
            if parent == _V1:
                (path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (path / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (path / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        yield [Group(path) for path in made]
    finally:
        deadline = time.monotonic() + 30.0
        for path in made:
            while True:
                try:
                    path.rmdir()
                    break
                except OSError:  # somebody has not quite ended
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
