"""What Ray knows of nodes, and waiting for its answers with a deadline."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import ray

PING_S = 2.0


async def within(seconds: float, reference: Any) -> Any:
    async def wait() -> Any:
        return await reference

    return await asyncio.wait_for(wait(), seconds)


def alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def raylet_is_gone(node_id: str) -> bool:
    """Whether a node's host answers, and nothing listens where its raylet did.

    A raylet never comes back under its node's id. Ray itself counts missed heartbeats, for up to
    half a minute, before it calls such a node dead.
    """
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            where = (node["NodeManagerAddress"], node["NodeManagerPort"])
            try:
                socket.create_connection(where, PING_S).close()
            except ConnectionRefusedError:
                return True
            except OSError:  # no answer is no news
                return False
    return False
