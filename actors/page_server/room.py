"""What room a node has, in memory and on its disk, and what its homes are used for."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._native.engine import Engine
from clamor_ray._objects.memory import (
    available_bytes,
    budget_trouble,
    cache_budget,
    memory_bytes,
)
from clamor_ray._protocol.messages import HomeUse, NodeRoom, ServerConfig
from clamor_ray._protocol.ray_state import was_restarted
from clamor_ray.actors.process.journals import session_directory

logger = logging.getLogger("clamor_ray.page_server")


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


def cache_bytes(config: ServerConfig, node_id: str) -> int:
    """What its page server may cache. Says so where that and history leave nothing of the node.

    Raises:
        CacheBudgetError: As `cache_budget`.
    """
    has_bytes = memory_bytes()
    found = cache_budget(config.cache_bytes, has_bytes, node_id)
    trouble = budget_trouble(has_bytes, found, config.history_bytes)
    if trouble is not None:
        logger.warning("node %s: %s", node_id, trouble)
    return found


class NoDirectory(errors.ServerUnavailableError):
    """What does not fit into memory has no place to go."""


def disk_directory(setting: str, said: str) -> str:
    """A directory for files without names: nothing is left of them whatever happens.

    A server that was restarted goes on without: what is on the disk it can still read (a disk that
    fails is often mounted read-only), and what would be written there is refused.

    Args:
        setting: The variable that says which, for people.
        said: What it says; "" for Ray's directory of the cluster.

    Raises:
        NoDirectory: It cannot be written.
    """
    directory = said or str(session_directory())
    if not os.access(directory, os.W_OK | os.X_OK):
        if was_restarted():
            logger.error("the directory of %s, %s, cannot be written any more", setting, directory)
            return directory
        raise NoDirectory(
            f"The directory of {setting}, {directory}, does not exist or cannot be written.",
            hint=f"Set {setting} to one that every node has.",
        )
    return directory


def cache_disk_bytes(n_bytes: int, directory: str) -> int:
    """What the cache on disk may have. A server that was restarted goes on without.

    Args:
        n_bytes: That it is to have.
        directory: Where.

    Raises:
        NoDirectory: There can be none.
    """
    if not n_bytes:
        return 0
    try:
        _native.check_cache_disk(directory, n_bytes)
    except errors.ClamorError as error:
        if was_restarted():
            logger.error("there is no cache on disk any more: %s", error)
            return 0
        raise NoDirectory(
            f"This node can have no cache of {n_bytes} bytes on disk: {error}",
            hint="Set CLAMOR_SPILL_DIR to a directory on a disk that every node has, or "
            "cache_disk_bytes (CLAMOR_CACHE_DISK_BYTES) to another number; 0 is none.",
        ) from error
    return n_bytes
