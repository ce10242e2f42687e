"""Where a session's registry writes, and who holds it."""

from __future__ import annotations

from pathlib import Path

import ray

from clamor_ray._protocol import names
from clamor_ray._protocol.ray_state import find_registry
from clamor_ray.actors.process import keeper_process


def session_directory() -> Path:
    """Ray's directory for this cluster's files on this node; it goes with the cluster."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def journal_directory(job_scope: str) -> Path:
    """Where the session's registry writes, on the driver's node."""
    return session_directory() / names.journal_directory(job_scope)


def hold_journal(job_scope: str) -> int | None:
    """For the session's driver. See ``keeper_process.hold_for_driver``."""
    return keeper_process.hold_for_driver(journal_directory(job_scope))


def has_ended(job_scope: str) -> bool:
    """Whether a session of the cluster has: its registry is no actor any more."""
    return find_registry(job_scope) is None
