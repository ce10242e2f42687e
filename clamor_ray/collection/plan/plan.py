"""What a collection stands for: a graph of operators over partitions. Nothing here runs anything.

A node is made once and not changed, but for three things: whether its partitions are kept, the
partitions that are, and the snapshots that its function reads (`refresh` moves them).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from clamor_ray.collection.plan.functions import Captured, Variable

_numbers = itertools.count(1)

NarrowKind = Literal["map", "map_batches", "filter", "flat_map"]
WideKind = Literal["reduce_by_key", "join", "sort", "repartition", "distinct"]


@dataclass(frozen=True)
class Scan:
    """Partitions from outside: one split, or one Ray object, each.

    Args:
        kind: for people: "parquet", "items", ...
        splits: what a task reads; or references to Ray objects that are partitions.
        objects: the splits are such references.
    """

    kind: str
    splits: tuple[Any, ...]
    objects: bool = False

    @property
    def name(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Narrow:
    """One partition in, one partition out.

    Args:
        kind: the operator.
        function: with its further arguments.
        batch_format: of `map_batches`.
        label: for people, where the function's name says little.
    """

    kind: NarrowKind
    function: Captured
    batch_format: str = "numpy"
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or f"{self.kind}({self.function.name})"


@dataclass(frozen=True)
class Zip:
    """Items of equal places as tuples."""

    @property
    def name(self) -> str:
        return "zip"


@dataclass(frozen=True)
class Wide:
    """Every partition in may matter to every partition out.

    Args:
        kind: the operator.
        key: column name(s), a Captured function, or None: the item, or the first of a pair.
        how: how two values become one (a name, or a Captured function); the kind of join.
        descending: of `sort`.
    """

    kind: WideKind
    key: Any = None
    how: Any = None
    descending: bool = False

    @property
    def name(self) -> str:
        how = self.how.name if isinstance(self.how, Captured) else self.how
        key = self.key.name if isinstance(self.key, Captured) else self.key
        inside = ", ".join(str(part) for part in (key, how) if part is not None)
        return f"{self.kind}({inside})" if inside else self.kind

    def functions(self) -> tuple[Captured, ...]:
        return tuple(part for part in (self.key, self.how) if isinstance(part, Captured))


Operator = Scan | Narrow | Zip | Wide


@dataclass(eq=False)
class Node:
    """An operator with its inputs.

    Args:
        operator: what is done.
        parents: to what.
        n_partitions: of the result.
        variables: of all functions of the operator, in their order; `refresh` replaces them.
        keep: partitions are kept once they are there.
        results: of stages that end here, by the stage's signature; see `results.py`.
    """

    operator: Operator
    parents: tuple[Node, ...]
    n_partitions: int
    variables: tuple[Variable, ...] = ()
    keep: bool = False
    results: dict[Any, Any] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def name(self) -> str:
        return f"{self.operator.name}"

    def __repr__(self) -> str:
        return f"Node({self.number}: {self.name}, {self.n_partitions} partitions)"


def functions_of(operator: Operator) -> tuple[Captured, ...]:
    """The functions that tasks of an operator call."""
    if isinstance(operator, Narrow):
        return (operator.function,)
    return operator.functions() if isinstance(operator, Wide) else ()


def node(operator: Operator, parents: tuple[Node, ...], n_partitions: int) -> Node:
    """A new node, with the variables that its functions have now."""
    variables = tuple(v for function in functions_of(operator) for v in function.variables)
    return Node(operator=operator, parents=parents, n_partitions=n_partitions, variables=variables)


def upstream(target: Node) -> Iterator[Node]:
    """A node and all that it is made of, each once, inputs first."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(target, False)]
    while stack:
        each, done = stack.pop()
        if done:
            yield each
        elif each.number not in seen:
            seen.add(each.number)
            stack.append((each, True))
            stack.extend((parent, False) for parent in reversed(each.parents))
