"""Layers that homes have fetched before their commit was asked for, and for how long. Pure.

A home that has a layer for long asks what became of its commit, and the question gives up a commit
that nobody has made. While its writer is at work, that must not be. The writer says so with each
layer that it brings; if it dies, the time is over soon.
"""

from __future__ import annotations

from clamor_ray import errors


class BroughtLayers:
    """See the file's head. Not thread-safe: one caller at a time.

    Example:
        >>> brought = BroughtLayers()
        >>> brought.hold(99, now_s=0.0, until_s=60.0)
        >>> brought.add(99, home=7, region=1)
        >>> brought.check(99, now_s=61.0)  # its time is over: anybody may give it up
        >>> brought.forget(99)
        {7: {1}}
    """

    def __init__(self) -> None:
        self._until_s: dict[int, float] = {}
        self._layers: dict[int, dict[int, set[int]]] = {}

    def hold(self, commit_id: int, now_s: float, until_s: float) -> None:
        """The commit is not given up until then. Those whose time is long over are forgotten: their
        layers go when their homes ask."""
        for old in [each for each, at_s in self._until_s.items() if at_s < now_s]:
            if old != commit_id:
                self.forget(old)
        self._until_s[commit_id] = max(until_s, self._until_s.get(commit_id, until_s))

    def add(self, commit_id: int, home: int, region: int) -> None:
        """The home has, or is about to have, the layer of that region."""
        self._layers.setdefault(commit_id, {}).setdefault(home, set()).add(region)

    def check(self, commit_id: int, now_s: float) -> None:
        """
        Raises:
            ServerUnavailableError: Its writer is still at work.
        """
        if self._until_s.get(commit_id, now_s) > now_s:
            raise errors.ServerUnavailableError(
                f"The layers of commit {commit_id:#x} are still on their way to their homes.",
                hint="Ask again.",
            )

    def forget(self, commit_id: int) -> dict[int, set[int]]:
        """It is decided. The regions of its layers, by home."""
        self._until_s.pop(commit_id, None)
        return self._layers.pop(commit_id, {})

    def __len__(self) -> int:
        return len(self._until_s)
