"""What a program has made → a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clamor_ray.collection.collection import DataCollection
from clamor_ray.collection.data.blocks import from_batch
from clamor_ray.collection.options import from_env
from clamor_ray.collection.plan.plan import Node, Scan
from clamor_ray.collection.run.attempts_and_retries import PLACES

__all__ = ["from_batch", "from_references"]


def from_references(kind: str, references: Sequence[Any], nodes: Sequence[str]) -> DataCollection:
    """A collection of partitions that are Ray objects.

    Args:
        kind: For people.
        references: To them.
        nodes: Where each is: the first tasks on it go there.
    """
    node = Node(Scan(kind, tuple(references), objects=True), (), len(references))
    node.results[PLACES] = dict(enumerate(nodes))
    return DataCollection(node, from_env())
