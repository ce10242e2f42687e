"""What has changed since partitions were made: the registry is asked, `changes.py` decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.ray_state import WITH_OWNER_BYTES
from clamor_ray._read.ref import newest_states
from clamor_ray.collection.plan.changes import Targets
from clamor_ray.collection.plan.plan import Node
from clamor_ray.collection.plan.results import Part, StageResult


def newest_of(session: Any, nodes: Iterable[Node]) -> dict[int, Any]:
    """The newest snapshots of all variables that move, by region.

    Raises:
        FreedError, ServerUnavailableError, WaitTimeoutError: It cannot be said.
    """
    refs = {v.region: v.ref for node in nodes for v in node.variables if v.moves}
    states = newest_states(session, list(refs.values()))
    return {
        region: ref._with(state, frozen=True)
        for (region, ref), state in zip(refs.items(), states, strict=True)
    }


def targets(session: Any, nodes: Sequence[Node], newest: Mapping[int, Any]) -> Targets:
    """What the results of nodes are to be compared with.

    Args:
        newest: see `newest_of`.
    """
    variables = [variable for node in nodes for variable in node.variables]
    still = {(v.region, v.ref.version) for v in variables if not v.moves}
    # A read at the version that a moving variable had cannot be told from a frozen one's.
    still -= {
        (pin.region, pin.version)
        for node in nodes
        for result in node.results.values()
        if isinstance(result, StageResult)
        for part in result.parts
        if part is not None
        for pin in part.moved
    }
    still -= {(v.region, v.ref.version) for v in variables if v.moves}
    layouts: dict[tuple[int, int], bool] = {}

    def changed(region: int, low: int, high: int) -> BitMap | None:
        packed = session.rpc.changes(region, low, high)
        return None if packed is None else BitMap.deserialize(packed)

    def other_layout(region: int, version: int) -> bool:
        key = (region, version)
        if key not in layouts:
            try:
                layouts[key] = newest[region].at(version)._plan != newest[region]._plan
            except errors.SnapshotExpired:
                layouts[key] = True
        return layouts[key]

    versions = {region: ref.version for region, ref in newest.items()}
    return Targets(
        newest=versions, still=frozenset(still), changed=changed, other_layout=other_layout
    )


def lost(parts: Iterable[Part]) -> set[int]:
    """Numbers of the parts that no node has any more, as far as Ray knows."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    suspects = [
        part
        for part in parts
        if part.meta.node_id not in alive
        and part.outs
        and part.meta.n_bytes > WITH_OWNER_BYTES * len(part.outs)  # else the driver has it
    ]
    where = ray.experimental.get_object_locations([part.outs[0] for part in suspects])
    return {part.number for part in suspects if not alive & set(where[part.outs[0]]["node_ids"])}
