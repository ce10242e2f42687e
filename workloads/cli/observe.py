"""What the library knows about one variable, node by node: the only place here that asks it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

import clamor_ray as clamor
from clamor_ray._objects import layout
from clamor_ray._session import process_sessions

from .report import Section

__all__ = [
    "Cost",
    "NodeCounters",
    "block_map",
    "cache_bytes",
    "cost",
    "dirty_blocks",
    "node_counters",
    "sections",
]

LABELS = {"tree": "k-d tree"}


@dataclass(frozen=True)
class NodeCounters:
    """One page server's counters; differences of two make a run's share."""

    bytes_received: int
    blocks_fetched: int  # of the variable
    is_home: bool


@dataclass(frozen=True)
class Cost:
    """What the page servers of all nodes did so far; differences of two make a run's share.

    Args:
        faults: threads that were stopped at an absent block.
        bytes_received: on the wire, headers and all else included.
        blocks_fetched: of other servers.
        evicted_blocks: to stay inside the budget.
        refetched_blocks: fetched soon after they were evicted.
    """

    faults: int = 0
    bytes_received: int = 0
    blocks_fetched: int = 0
    evicted_blocks: int = 0
    refetched_blocks: int = 0

    def __sub__(self, before: Cost) -> Cost:
        names = [field.name for field in fields(self)]
        return Cost(*(getattr(self, name) - getattr(before, name) for name in names))


def cost() -> Cost:
    """What it was so far.

    Raises:
        RuntimeError: A page server does not answer.
    """
    names = [field.name for field in fields(Cost)]
    engines = []
    for node in clamor.stats().nodes:
        if node.error:
            raise RuntimeError(f"the page server of node {node.node_id} is silent: {node.error}")
        engines.append(node.engine)
    return Cost(*(sum(engine[name] for engine in engines) for name in names))


def cache_bytes() -> int:
    """The smallest cache budget of all nodes that have a page server; 0 where there is none."""
    budgets = [node.cache_bytes for node in clamor.stats().nodes]
    return min((budget for budget in budgets if budget), default=0)


def node_counters(ref: clamor.GlobalRef[Any]) -> dict[str, NodeCounters]:
    """Counters of every page server, by Ray node id."""
    counters = {}
    for node in clamor.stats().nodes:
        if node.error:
            raise RuntimeError(f"the page server of node {node.node_id} is silent: {node.error}")
        region = node.region(ref._region)
        counters[node.node_id] = NodeCounters(
            bytes_received=node.engine.bytes_received,
            blocks_fetched=region.fetched_blocks if region else 0,
            is_home=bool(region and region.is_home),
        )
    return counters


def dirty_blocks(ref: clamor.GlobalRef[Any], old_version: int, new_version: int) -> int:
    """How many blocks differ between two versions; 1 where the variable travels inside."""
    if old_version == new_version:
        return 0
    if ref._inline:
        return 1
    session = process_sessions.current(ref._scope)
    blocks = session.rpc.changes(ref._region, old_version, new_version)
    if blocks is None:
        raise RuntimeError(f"the commit log of {ref!r} does not reach back to {old_version}")
    return len(BitMap.deserialize(blocks))


def block_map(
    ref: clamor.GlobalRef[Any], which: Literal["touched", "fetched"], buckets: int
) -> dict[str, npt.NDArray[np.uint32]]:
    """Blocks in equal parts of the variable, by Ray node id."""
    return {
        node_id: np.asarray(counts, np.uint32)
        for node_id, counts in clamor.block_map(ref, which, buckets).items()
    }


def sections(value: Any, plan: layout.Plan) -> tuple[Section, ...]:
    """Names the parts of a dataclass's layout by its fields.

    Out-of-band buffers leave in the order of the fields, so the plan's buffers are theirs in turn.
    Where that does not add up, one nameless part is better than wrong names.
    """
    counts = {
        name: len(layout.take_apart(field).plan.buffers) for name, field in vars(value).items()
    }
    if sum(counts.values()) != len(plan.buffers):
        return (Section("variable", 0, plan.total_bytes),)
    parts = []
    buffers = iter(plan.buffers)
    for name, count in counts.items():
        spans = [next(buffers) for _ in range(count)]
        begin = min((offset for offset, _ in spans), default=0)
        end = max((offset + length for offset, length in spans), default=0)
        if end > begin:
            parts.append(Section(LABELS.get(name, name), begin, end - begin))
    return tuple(parts)
