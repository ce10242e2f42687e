"""Which nodes get a worker of a program, and which of its workers leave. Asks Ray, and decides."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import ray

from clamor_ray import errors
from clamor_ray.actors.moves import ray_nodes


class Change(NamedTuple):
    """What is to be done, in this order.

    Args:
        come: Nodes that get a worker.
        go: Nodes whose worker leaves.
    """

    come: list[str]
    go: list[str]


def able_nodes() -> dict[str, int]:
    """The living nodes that have CPUs -> how many. Those where most of them are free come first.

    Raises:
        Exception: Ray does not say.
    """
    free = ray_nodes.free_cpus()
    found = {
        node["NodeID"]: int(node["Resources"]["CPU"])
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    }
    return dict(sorted(found.items(), key=lambda each: (-free.get(each[0], 0.0), -each[1])))


def change(
    able: Collection[str],
    has: Collection[str],
    ending: Collection[str],
    draining: Collection[str],
    wanted: int | None,
) -> Change:
    """
    Args:
        able: Nodes that could have a worker; the best come first.
        has: Nodes whose worker stays, as far as is known.
        ending: Nodes whose worker is about to end: they get no second one.
        draining: Nodes that are to go.
        wanted: So many workers; None: one on each node.

    Example:
        >>> change(["a", "b", "c"], has=["a"], ending=[], draining=["a"], wanted=1)
        Change(come=['b'], go=['a'])
        >>> change(["a"], has=["a"], ending=[], draining=["a"], wanted=1)  # nobody else is there
        Change(come=[], go=[])
    """
    staying = sorted(set(has) - set(draining))
    no_more = {*has, *ending, *draining}
    free = [node for node in able if node not in no_more]
    most = math.inf if wanted is None else max(0, wanted - len(staying))
    come = [node for n, node in enumerate(free) if n < most]
    go = sorted(set(has) & set(draining)) if staying or come else []
    if wanted is not None and len(staying) > wanted:
        order = {node: n for n, node in enumerate(able)}
        staying.sort(key=lambda node: order.get(node, len(order)))
        go += staying[wanted:]
    return Change(come, go)


def check_enough(able: Mapping[str, int], wanted: int | None, draining: Collection[str]) -> None:
    """
    Raises:
        ProgramError: The cluster has not so many nodes.
    """
    n = len(set(able) - set(draining))
    if not n:
        raise errors.ProgramError("No node has a CPU, or all that have are drained.")
    if wanted is not None and not 1 <= wanted <= n:
        raise errors.ProgramError(
            f"{wanted} workers were asked for, and {n} nodes have CPUs and are not drained: there "
            "is one worker on a node.",
            hint='workers="all" uses those that are there, and those that come.',
        )
