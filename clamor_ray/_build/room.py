"""Sees to it that this node has memory for what is made: what can go elsewhere goes first."""

from __future__ import annotations

from collections.abc import Iterator

from clamor_ray import errors
from clamor_ray._objects.memory import check_room
from clamor_ray._protocol.registry_client import RegistryClient

_NO_MORE = object()


def homes_give_room(rpc: RegistryClient, node_id: str, needed_bytes: int) -> Iterator[None]:
    """Has homes of this node moved to others. Yields once, where that has made room.

    Args:
        rpc: calls the registry.
        node_id: Ray's hex id of this node.
        needed_bytes: of memory.
    """
    try:
        has_room = rpc.make_room(node_id, needed_bytes)
    except (errors.ServerUnavailableError, errors.WaitTimeoutError):
        return  # nobody makes room now: the caller says how much is wanting
    if has_room:
        yield


def ensure_room(
    needed_bytes: int, what: str, gives: Iterator[None], hint: str | None = None
) -> None:
    """As ``check_room``, but where there is too little, something gives room first.

    Args:
        needed_bytes: of memory.
        what: needs it; begins the message.
        gives: each step gives some room; its end says that there is no more.
        hint: what to do about it; None for the error's own.

    Raises:
        OutOfMemoryError: With both numbers, as there is no more room.
        What ``gives`` raises.
    """
    while True:
        try:
            check_room(needed_bytes, what, hint)
            return
        except errors.OutOfMemoryError:
            if next(gives, _NO_MORE) is _NO_MORE:
                raise
