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
        pinned: Regions that are served from objects of Ray.
    """
    homes = tuple(
        HomeUse(
            *(each["region"], each["home_bytes"], each["reads"], each["idle_ns"] / 1e9),
            keeps_memory=each["mappings"] > 0 or each["region"] in pinned,
        )
        for each in engine.region_stats()
        if each["is_home"]
    )
    return NodeRoom(available_bytes(), memory_bytes(), homes)
