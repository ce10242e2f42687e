"""Which nodes get a worker of a program."""

from __future__ import annotations

from collections.abc import Collection

import ray

from clamor_ray import errors


def nodes_for(workers: int | None, first: Collection[str] = ()) -> list[tuple[str, int]]:
    """
    Args:
        workers: So many nodes; None: all that have CPUs.
        first: Ray's ids of nodes that are taken before others.

    Returns:
        Ray's ids, and the CPUs of each: those with the most come first.

    Raises:
        ProgramError: There are not so many.
    """
    able = [
        (node["NodeID"], int(node["Resources"]["CPU"]))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]
    if not able:
        raise errors.ProgramError("No node has a CPU.")
    if workers is not None and not 1 <= workers <= len(able):
        raise errors.ProgramError(
            f"{workers} workers were asked for, and {len(able)} nodes have CPUs: there is one "
            "worker on a node."
        )
    return sorted(able, key=lambda each: (each[0] not in first, -each[1]))[:workers]
