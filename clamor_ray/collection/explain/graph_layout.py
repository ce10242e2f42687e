"""Where the boxes of a layered graph go: few crossings, short lines, no box on another. Pure.

Each node has a layer below its inputs'. A line that passes through a layer gets a place of its own
there, so that it is led between the boxes. Within layers nodes are ordered by the middle of their
neighbours (the barycenter method of Sugiyama, Tagawa and Toda, 1981), and then moved towards them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

SWEEPS: Final = 12
LINE_WIDTH: Final = 0.35  # what a line that passes needs

Node = Hashable
Edge = tuple[Node, Node]


@dataclass(frozen=True)
class Layout:
    """Args:
    x: middle of each node.
    layer: 0 for those at the top.
    ways: of each line, the points (x, layer) that it passes, its ends too.
    """

    x: dict[Node, float]
    layer: dict[Node, int]
    ways: dict[Edge, tuple[tuple[float, int], ...]]


def layers_of(nodes: Sequence[Node], edges: Sequence[Edge]) -> dict[Node, int]:
    """Each one layer below the lowest of its inputs; one without inputs just above its users.

    Args:
        nodes: inputs before those who take them.
        edges: (input, who takes it).
    """
    inputs: dict[Node, list[Node]] = {node: [] for node in nodes}
    users: dict[Node, list[Node]] = {node: [] for node in nodes}
    for tail, head in edges:
        inputs[head].append(tail)
        users[tail].append(head)
    layer: dict[Node, int] = {}
    for node in nodes:
        layer[node] = max((layer[tail] + 1 for tail in inputs[node]), default=0)
    for node in nodes:
        if not inputs[node] and users[node]:
            layer[node] = min(layer[head] for head in users[node]) - 1
    return layer


def place(nodes: Sequence[Node], edges: Sequence[Edge], width: Mapping[Node, float]) -> Layout:
    """Places for all nodes and lines.

    Args:
        nodes: inputs before those who take them.
        edges: (input, who takes it).
        width: of each node, with the gap beside it.

    Example:
        >>> place(["a", "b"], [("a", "b")], {"a": 2.0, "b": 1.0}).layer
        {'a': 0, 'b': 1}
    """
    layer = layers_of(nodes, edges)
    widths = dict(width)
    ways: dict[Edge, list[Node]] = {}
    places: dict[Node, int] = dict(layer)
    for edge in dict.fromkeys(edges):
        tail, head = edge
        passed: list[Node] = [("passes", edge, at) for at in range(layer[tail] + 1, layer[head])]
        for node in passed:
            widths[node] = LINE_WIDTH
            places[node] = node[2]  # type: ignore[index]
        ways[edge] = [tail, *passed, head]
    rows: list[list[Node]] = [[] for _ in range(max(places.values(), default=-1) + 1)]
    for node, at in places.items():
        rows[at].append(node)
    near: dict[Node, list[Node]] = {node: [] for node in places}
    for way in ways.values():
        for one, other in itertools.pairwise(way):
            near[one].append(other)
            near[other].append(one)
    x = _settle(rows, near, widths, places)
    return Layout(
        {node: x[node] for node in nodes},
        layer,
        {edge: tuple((x[node], places[node]) for node in way) for edge, way in ways.items()},
    )


def _settle(
    rows: list[list[Node]],
    near: Mapping[Node, list[Node]],
    width: Mapping[Node, float],
    places: Mapping[Node, int],
) -> dict[Node, float]:
    x: dict[Node, float] = {}
    for row in rows:
        _spread(row, dict.fromkeys(row, 0.0), width, x)
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = {}
            for node in row:
                others = near[node]
                if sweep < SWEEPS:  # first the order, from one side at a time
                    side = [n for n in others if (places[n] < places[node]) == down]
                    others = side or others
                wanted[node] = sum(x[n] for n in others) / len(others) if others else x[node]
            row.sort(key=lambda node: wanted[node])
            _spread(row, wanted, width, x)
    return x


def _spread(
    row: Sequence[Node],
    wanted: Mapping[Node, float],
    width: Mapping[Node, float],
    x: dict[Node, float],
) -> None:
    """Nearest to where they want to be, in this order, none on another: those that would be
    move as one (pool adjacent violators)."""
    groups: list[tuple[list[Node], float, float]] = []  # nodes, sum of wishes, width
    for node in row:
        nodes, wish, wide = [node], wanted[node] - width[node] / 2, width[node]
        # `wish` is where the left edge of the group wants to be, times its nodes.
        while groups and groups[-1][1] / len(groups[-1][0]) + groups[-1][2] > wish / len(nodes):
            before, before_wish, before_wide = groups.pop()
            wish += before_wish - len(nodes) * before_wide
            nodes = before + nodes
            wide += before_wide
        groups.append((nodes, wish, wide))
    for nodes, wish, _ in groups:
        left = wish / len(nodes)
        for node in nodes:
            x[node] = left + width[node] / 2
            left += width[node]
