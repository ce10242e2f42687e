"""Nodes with less memory than the machine: each in a memory cgroup of its own. Needs root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

TOP = Path("/sys/fs/cgroup/memory")  # version 1
END_S = 20.0


class Group:
    """A memory cgroup.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, pids: Sequence[int]) -> None:
        """Moves processes there; what they have already counts where they were."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self._path / "cgroup.procs").write_text(str(pid))

    def used_bytes(self) -> int:
        return int((self._path / "memory.usage_in_bytes").read_text())

    def leave(self, n_bytes: int) -> None:
        """From now on its processes can have so much more."""
        limit_bytes = self.used_bytes() + n_bytes
        (self._path / "memory.limit_in_bytes").write_text(str(limit_bytes))


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[Group]:
    """A group without a limit; skips the test where there can be none. Goes when its processes
    have ended, or are put back."""
    path = TOP / f"clamorlab-{os.getpid()}-{name}"
    try:
        path.mkdir()
    except OSError as failure:
        pytest.skip(f"no memory cgroups of version 1 can be made: {failure}")
    try:
        yield Group(path)
    finally:
        deadline = time.monotonic() + END_S
        while (pids := (path / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(OSError):
                    (TOP / "cgroup.procs").write_text(pid)
            time.sleep(0.1)
        path.rmdir()
