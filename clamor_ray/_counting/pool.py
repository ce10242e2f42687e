"""Anchors that the registry has given out before they were asked for, for the next variables."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from clamor_ray._counting.anchors import Anchor

# That one answer brings: Ray keeps a record of each. Many processes make one variable only.
SECOND: Final = 16
MOST: Final = 64


class AnchorPool:
    """Safe from any thread.

    Args:
        ask: gets so many from the registry.
    """

    def __init__(self, ask: Callable[[int], list[Any]]) -> None:
        self._ask = ask
        self._lock = threading.RLock()  # a `__del__` may put wherever memory is taken
        self._anchors: list[Anchor] = []
        self._n_next = 1

    def wanted(self) -> int:
        """How many the next answer is to bring: more of them in a process that makes many
        variables; 0 where some are here."""
        with self._lock:
            return 0 if self._anchors else self._n_next

    def add(self, object_refs: list[Any]) -> None:
        """What an answer has brought."""
        anchors = [Anchor(each) for each in object_refs]
        with self._lock:
            self._anchors += anchors
            self._n_next = SECOND if self._n_next == 1 else MOST

    def take(self) -> Anchor:
        """One that no variable has.

        Raises:
            What asking the registry raises.
        """
        while True:
            with self._lock:
                if self._anchors:
                    return self._anchors.pop()
                n_anchors = self._n_next
            self.add(self._ask(n_anchors))
