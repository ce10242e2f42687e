"""A registry of its own on a running cluster, and which processes a session has left."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._version import __version__
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster


class Session:
    """A registry, and calls to it with a deadline."""

    def __init__(
        self, lab: LocalCluster, library_version: str = __version__, **settings: Any
    ) -> None:
        from clamor_ray.actors.registry.registry import create_registry

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


@contextlib.contextmanager
def running_session(lab: LocalCluster) -> Iterator[Session]:
    """One that is shut down in the end, and has left when that is over."""
    session = Session(lab)
    yield session
    session("shutdown")
    until(lambda: not keepers(session.scope))


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


def keepers(scope: str) -> list[int]:
    """Processes that were started as a keeper of the session."""
    mark = f"/{scope}-".encode()
    return _processes(lambda words: any(mark in w and w.endswith(b"-keeper") for w in words))


def watchers(directory: Path) -> list[int]:
    """Processes that watch a journal's directory, and are not about to leave."""
    return _processes(lambda words: os.fsencode(directory) in words and b"-S" in words)
