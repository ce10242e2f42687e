"""Workers that have left and are there still: who may send to them, and when they may end. Pure."""

from __future__ import annotations


class Farewells:
    """A worker without slices ends in three steps: all know that it has left, and what they sent
    there has come (`on_parted`); it is told to stop; what it has sent has come (`on_drained`)."""

    def __init__(self) -> None:
        self._may_send: dict[str, set[str]] = {}  # to who has left
        self._gone: list[str] = []

    @property
    def workers(self) -> set[str]:
        """Those that have left and may have something still."""
        return set(self._may_send)

    def begin(self, worker: str, others: set[str]) -> None:
        """It has left; those may send to it."""
        self._may_send[worker] = others - {worker}

    def on_parted(self, worker: str, left: str) -> list[str]:
        """One sends nothing more there. Who is to stop now."""
        others = self._may_send.get(left)
        if others is None or worker not in others:
            return []
        others.discard(worker)
        return [] if others else [left]

    def on_drained(self, worker: str) -> list[str]:
        """It has nothing more. Who else is to stop now."""
        if self._may_send.pop(worker, None) is None:
            return []
        self._gone.append(worker)
        return [left for each in list(self._may_send) for left in self.on_parted(worker, each)]

    def end(self) -> None:
        """The run is over, for all of them."""
        self._gone += sorted(self._may_send)
        self._may_send = {}

    def take_gone(self) -> list[str]:
        """Those that may end."""
        gone, self._gone = self._gone, []
        return gone
