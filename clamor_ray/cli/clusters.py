"""The cluster that a command asks, and its sessions. It attaches to none of them."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import ray

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import await_rpc
from clamor_ray._session.named_sessions import SessionInfo, sessions
from clamor_ray.cli.output import NotAskedError

AUTO: Final = "auto"


@dataclass(frozen=True)
class OpenSession:
    """A session that is asked.

    Args:
        info: what `clamor.sessions()` says of it.
        rpc: its registry.
    """

    info: SessionInfo
    rpc: RegistryClient

    @property
    def label(self) -> str:
        """What people call it."""
        return self.info.name or f"(job {self.info.scope})"


def _knock(address: str | None, timeout_s: float) -> None:
    """An OSError where nobody listens at the address. One in another form is Ray's to read."""
    host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()


@contextlib.contextmanager
def connected(address: str | None, timeout_s: float) -> Iterator[None]:
    """A cluster, for as long as the block runs.

    Args:
        address: of Ray; None: RAY_ADDRESS, or the cluster of this machine.
        timeout_s: for its first answer: `ray.init` itself waits for minutes where nobody listens.

    Raises:
        NotAskedError: None is there.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        _knock(address, timeout_s)
        ray.init(address=address or AUTO, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        where = address or "RAY_ADDRESS, or on this machine"
        raise NotAskedError(
            f"No Ray cluster answers at {where}: {cause_of(error)}. Give --address, or start one: "
            "ray start --head."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _client(info: SessionInfo, deadline: float) -> RegistryClient | None:
    registry = (
        ray_state.find_named_registry(info.name)
        if info.name is not None
        else ray_state.find_registry(info.scope)
    )
    if registry is None:
        return None

    def carry(method: str, *args: object, timeout_s: float | None = None) -> Any:
        left_s = max(0.1, deadline - time.monotonic()) if timeout_s is None else timeout_s
        return await_rpc(getattr(registry, method).remote(*args), left_s, owner=False)

    return RegistryClient(carry)


def open_sessions(wanted: str | None, timeout_s: float) -> list[OpenSession]:
    """The sessions that a command is about.

    Args:
        wanted: a name, or the beginning of a scope; None: all.
        timeout_s: for all that is asked of them.

    Raises:
        NoSuchSessionError: None is named so, or its registry does not say that it lives.
    """
    deadline = time.monotonic() + timeout_s
    known = sessions()
    chosen = [
        info
        for info in known
        if wanted is None or info.name == wanted or info.scope.startswith(wanted)
    ]
    if wanted is not None and not chosen:
        there = ", ".join(info.name or info.scope for info in known) or "none"
        raise errors.NoSuchSessionError(
            f"No session of this cluster is named {wanted!r}, or has a scope that begins so.",
            hint=f"There are: {there}.",
        )
    found = [(info, _client(info, deadline)) for info in chosen]
    return [OpenSession(info, rpc) for info, rpc in found if rpc is not None]


def one_session(wanted: str | None, timeout_s: float) -> OpenSession:
    """The session that a command is about, where that must be one.

    Raises:
        NoSuchSessionError: There is none, or more than one and none was named.
    """
    found = open_sessions(wanted, timeout_s)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(each.info.name or each.info.scope for each in found)
    raise errors.NoSuchSessionError(
        f"{len(found)} sessions could be meant: {listed}." if found else "There is no session.",
        hint="Name one: --session NAME, or the beginning of its scope."
        if found
        else "clamor.init() in a driver begins one.",
    )


def node_of(text: str) -> str:
    """Ray's hex id of a living node.

    Args:
        text: the beginning of its id, its host name, or its address.

    Raises:
        NoSuchNodeError: None is meant, or several are.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    meant = [
        node["NodeID"]
        for node in alive
        if text in (node["NodeManagerHostname"], node["NodeManagerAddress"])
        or node["NodeID"].startswith(text)
    ]
    if len(meant) == 1:
        return str(meant[0])
    of = f"{len(meant)} living nodes are" if meant else "No living node is"
    ids = ", ".join(node["NodeID"][:12] for node in alive)
    raise errors.NoSuchNodeError(f"{of} meant by {text!r}.", hint=f"The nodes: {ids}.")
