"""Circles in graphs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, the largest first (Tarjan 1972).

    Args:
        edges: what each node leads to; a node that leads nowhere need not be a key.

    >>> circles({"a": ["b"], "b": ["a", "c"], "c": ["c"]})
    [['a', 'b']]
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for start in edges:
        if start in order:
            continue
        work = [(start, iter(sorted(edges.get(start, ()))))]
        order[start] = lowest[start] = len(order)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, following = work[-1]
            for other in following:
                if other not in order:
                    order[other] = lowest[other] = len(order)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(sorted(edges.get(other, ())))))
                    break
                if other in on_stack:
                    lowest[node] = min(lowest[node], order[other])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    lowest[above] = min(lowest[above], lowest[node])
                if lowest[node] == order[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    if len(component) > 1:
                        found.append(sorted(component))
    return sorted(found, key=lambda circle: (-len(circle), circle))
