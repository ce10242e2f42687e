"""The cluster that a command asks, and its sessions. It attaches to none of them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import ray

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import await_rpc
from clamor_ray._session.begin.tokens import AUTO, check_token, knock, meant
from clamor_ray._session.named_sessions import SessionInfo, sessions
from clamor_ray.cli.output import ID_DIGITS, NOT_CHECKED, NotAskedError

STARTS_S: Final = 10.0  # that `ray.init` may take beyond the wait for an answer
# A host that is there accepts a connection at once. One that is gone may say nothing, and a drain
# before a container's end would wait for it as long as a drain may take.
ACCEPTS_S: Final = 10.0
LEAST_DIGITS: Final = 4  # of an id, so that it is meant


@dataclass(frozen=True)
class OpenSession:
    """A session that is asked.

    Args:
        info: what `clamor.sessions()` says of it.
        rpc: its registry.
    """

    info: SessionInfo
    rpc: RegistryClient


@contextlib.contextmanager
def watched(timeout_s: float) -> Iterator[None]:
    """Ends the process where the block takes longer: `ray.init` has no time-out.

    Args:
        timeout_s: of the whole block.
    """

    said = os.dup(2)  # also where `_without_warnings` is

    def end() -> None:
        os.write(said, f"clamor: Ray did not answer within {timeout_s:g} s.\n".encode())
        os._exit(NOT_CHECKED)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        os.close(said)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """For what Ray's C++ says on standard error, before it raises the same."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def connected(address: str | None, timeout_s: float) -> Iterator[None]:
    """A cluster, for as long as the block runs.

    Args:
        address: of Ray; None: RAY_ADDRESS, or the cluster of this machine.
        timeout_s: for its first answer: `ray.init` itself waits for minutes where nobody listens.

    Raises:
        NotAskedError: None is there.
        DeniedError: It refuses this process's token.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    asked = address or os.environ.get("RAY_ADDRESS", "")
    if asked == "local" or "://" in asked:
        raise NotAskedError(f"The address is HOST:PORT of a cluster that runs, not {asked!r}.")
    where, is_found = meant(address)
    try:
        listens = knock(where, min(timeout_s, ACCEPTS_S))
        with watched(timeout_s + STARTS_S):
            with _without_warnings():
                check_token(where if listens else "", is_found)
            ray.init(address=asked or AUTO, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        where = asked or "RAY_ADDRESS, or on this machine"
        raise NotAskedError(
            f"No Ray cluster answers at {where}: {cause_of(error)}. Give --address, or start one: "
            "ray start --head."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _client(info: SessionInfo, left_s: Callable[[], float]) -> RegistryClient | None:
    registry = (
        ray_state.find_named_registry(info.name)
        if info.name is not None
        else ray_state.find_registry(info.scope)
    )
    if registry is None:
        return None

    def carry(method: str, *args: object, timeout_s: float | None = None) -> Any:
        wait_s = max(0.1, left_s()) if timeout_s is None else timeout_s
        return await_rpc(getattr(registry, method).remote(*args), wait_s, owner=False)

    return RegistryClient(carry)


def open_sessions(
    wanted: str | None, timeout_s: float, each_answer: bool = False
) -> list[OpenSession]:
    """The sessions that a command is about.

    Args:
        wanted: a name, or the beginning of a scope; None: all.
        timeout_s: for all that is asked of them.
        each_answer: that time is for each answer by itself.

    Raises:
        NoSuchSessionError: None is named so, or its registry does not say that it lives.
    """
    deadline = time.monotonic() + timeout_s
    known = sessions()
    chosen = [
        info
        for info in known
        if wanted is None
        or info.name == wanted
        or (len(wanted) >= LEAST_DIGITS and info.scope.startswith(wanted))
    ]
    if wanted is not None and not chosen:
        there = ", ".join(info.name or info.scope for info in known) or "none"
        raise errors.NoSuchSessionError(
            f"No session of this cluster is named {wanted!r}, or has a scope that begins so.",
            hint=f"There are: {there}.",
        )

    def left_s() -> float:
        return timeout_s if each_answer else deadline - time.monotonic()

    found = [(info, _client(info, left_s)) for info in chosen]
    return [OpenSession(info, rpc) for info, rpc in found if rpc is not None]


def one_session(wanted: str | None, timeout_s: float, each_answer: bool = False) -> OpenSession:
    """The session that a command is about, where that must be one. Args: as `open_sessions`.

    Raises:
        NoSuchSessionError: There is none, or more than one and none was named.
    """
    found = open_sessions(wanted, timeout_s, each_answer)
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
        or (len(text) >= LEAST_DIGITS and node["NodeID"].startswith(text))
    ]
    if len(meant) == 1:
        return str(meant[0])
    of = f"{len(meant)} living nodes are" if meant else "No living node is"
    ids = ", ".join(node["NodeID"][:ID_DIGITS] for node in alive)
    raise errors.NoSuchNodeError(f"{of} meant by {text!r}.", hint=f"The nodes: {ids}.")
