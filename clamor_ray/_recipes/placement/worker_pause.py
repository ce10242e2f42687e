"""What a worker does for a checkpoint: it pauses, completes stages, and gives its slices. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from clamor_ray._recipes.matching.state import SliceState
from clamor_ray._recipes.placement.local_matcher import LocalMatcher
from clamor_ray._recipes.placement.messages import (
    Complete,
    Completed,
    Pause,
    Paused,
    Report,
    Resume,
    Slice,
    Store,
    Stored,
)


class WorkerPause:
    """See the file's head. Each order is answered once, when what it asks for is so.

    Args:
        run, me: Of the reports.
        matcher: Of the node.
    """

    def __init__(self, run: int, me: str, matcher: LocalMatcher) -> None:
        self._run, self._me = run, me
        self._matcher = matcher
        self._order: Pause | Complete | Store | None = None  # not answered yet
        self._store: tuple[int, dict[Slice, SliceState]] | None = None

    def on_order(self, order: Pause | Complete | Store | Resume) -> None:
        """The controller says so."""
        self._order = self._store = None
        if isinstance(order, Resume):
            self._matcher.stop_after(None)
            return
        if isinstance(order, Pause):
            self._matcher.stop_after(0)
        elif isinstance(order, Complete):
            self._matcher.stop_after(order.number)
        self._order = order

    def look(self, version: int, is_settled: bool, here: Iterable[Slice]) -> Report | None:
        """The answer, if it is time for it.

        Args:
            version: Of the map that the worker knows.
            is_settled: All its slices are here, and no others.
            here: Those.
        """
        order = self._order
        if isinstance(order, Pause):
            # A slice that is on its way may have run further than all others.
            if version >= order.version and is_settled:
                self._order = None
                return Paused(self._run, self._me, order.checkpoint, self._matcher.furthest)
        elif isinstance(order, Complete):
            if self._matcher.has_reached(order.number):
                self._order = None
                return Completed(self._run, self._me, order.checkpoint)
        elif isinstance(order, Store):
            self._order = None
            self._store = (order.checkpoint, {each: self._copy(each) for each in here})
        return None

    def take_store(self) -> tuple[int, dict[Slice, SliceState]] | None:
        """See `WorkerCore`."""
        asked, self._store = self._store, None
        return asked

    def stored(
        self, checkpoint: int, slices: Iterable[Slice], decisions: Mapping[int, bool], error: str
    ) -> Report:
        """The answer to `Store`."""
        return Stored(
            run=self._run,
            worker=self._me,
            checkpoint=checkpoint,
            slices=frozenset(slices),
            decisions=dict(decisions),
            error=error,
        )

    def _copy(self, slice: Slice) -> SliceState:
        is_idle = self._matcher.hold(*slice)
        assert is_idle, "a checkpoint is stored when nothing runs"
        state = self._matcher.remove(*slice)
        self._matcher.add(*slice, copy.deepcopy(state))
        return state
