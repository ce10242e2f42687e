"""What room a node has, and what its homes are used for."""

from __future__ import annotations

from collections.abc import Collection

from clamor_ray._native.engine import Engine
from clamor_ray._objects.memory import available_bytes, memory_bytes
from clamor_ray._protocol.messages import HomeUse, NodeRoom


def node_room(engine: Engine, pinned: Collection[int]) -> NodeRoom:
    """How much memory the node has, and what is homed there.

    Args:
        engine: Of its page server.
        pinned: Regions that are served from objects of Ray: a move gives back no memory.
    """
    homes = tuple(
        HomeUse(
            *(each["region"], each["home_bytes"], each["reads"], each["idle_ns"] / 1e9),
            is_mapped=each["mappings"] > 0,
        )
        for each in engine.region_stats()
        if each["is_home"] and each["region"] not in pinned
    )
    return NodeRoom(available_bytes(), memory_bytes(), homes)
