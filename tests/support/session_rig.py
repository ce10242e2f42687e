"""A registry of its own on a running cluster, and which processes a session has left."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._version import __version__
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster

LEFT_S = 5.0  # what a test has freed may take so long to go


class Session:
    """A registry, and calls to it with a deadline."""

    def __init__(
        self, lab: LocalCluster, library_version: str = __version__, **settings: Any
    ) -> None:
        from clamor_ray.actors.create_registry import create_registry

        self.lab = lab
        self.scope = secrets.token_hex(6)
        self.config = ServerConfig(self.scope, library_version, **settings)
        self.registry = create_registry(self.scope, lab.node_ids[0], self.config)

    def __call__(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self.registry, method).remote(*arguments), timeout=ANSWER_S)

    def server(self, index: int) -> Any:
        import ray

        name = f"page-server-{self.scope}-{self.lab.node_ids[index][:16]}"
        return ray.get_actor(name, namespace="clamor")

    def of_server(self, index: int, method: str, *arguments: Any) -> Any:
        import ray

        handle = self.server(index)
        return ray.get(getattr(handle, method).remote(*arguments), timeout=ANSWER_S)

    def states(self) -> dict[str, int]:
        return self("stats").regions_by_state

    def end(self) -> None:
        """Shuts it down, and returns when its page servers' keepers have left."""
        self("shutdown")
        until(lambda: not keepers(self.scope))


class Sessions:
    """One for many tests, as long as each leaves nothing in it: after one that does, another.

    Args:
        lab: where.
        settings: of their page servers.
    """

    def __init__(self, lab: LocalCluster, **settings: Any) -> None:
        self._lab, self._settings = lab, settings
        self._free: Session | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[Session]:
        """For one test. It may have been used: its servers run, and it has no region."""
        session, self._free = self._free or Session(self._lab, **self._settings), None
        yield session
        deadline = time.monotonic() + LEFT_S
        while left := sum(session.states().values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if left:
            session.end()
        else:
            self._free = session

    def end(self) -> None:
        if self._free is not None:
            self._free.end()


@contextlib.contextmanager
def running_session(lab: LocalCluster) -> Iterator[Session]:
    """One that is shut down in the end, and has left when that is over."""
    session = Session(lab)
    yield session
    session.end()


def _processes(whether: Callable[[list[bytes]], bool]) -> list[int]:
    """Those whose command line is so."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if whether(words):
            found.append(int(entry.name))
    return found


def keepers(scope: str, node_id: str = "") -> list[int]:
    """Processes that were started as a keeper of the session: all, or those of one node."""
    mark = f"/{scope}-{node_id[:16]}".encode()
    return _processes(lambda words: any(mark in w and w.endswith(b"-keeper") for w in words))


def watchers(directory: Path) -> list[int]:
    """Processes that watch a journal's directory, and are not about to leave."""
    return _processes(lambda words: os.fsencode(directory) in words and b"-S" in words)
