"""How partitions become a collection: its code stands higher, and is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Collections(Protocol):
    """What programs need of collections."""

    def from_batch(self, value: Any) -> Any:
        """A partition, of what a function of batches may return.

        Raises:
            TypeError, ValueError: It may not.
        """

    def from_references(self, kind: str, references: Sequence[Any], nodes: Sequence[str]) -> Any:
        """A collection of partitions that are Ray objects, and where those are."""


_load: Callable[[], Any] | None = None


def load_by(load: Callable[[], Any]) -> None:
    """Who gives a module that is `Collections`."""
    global _load
    _load = load


def module() -> Collections:
    """The code of collections."""
    assert _load is not None, "clamor_ray/__init__.py says it"
    found: Collections = _load()
    return found
