"""One checkpoint after the other (Canary, section 6.2), as the controller sees them. Pure.

    PAUSING      nothing begins; what moves comes; each worker says the last stage that has begun
    COMPLETING   all stages up to the furthest of those run everywhere, and no later one
    STORING      each worker stores its slices
    RESTS        all goes on; the checkpoint counts if all have stored

What fails, or takes too long, leaves the last checkpoint as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from clamor_ray._recipes.placement.messages import (
    Checkpoint,
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


class Phase(Enum):
    """See the file's head."""

    RESTS = auto()
    PAUSING = auto()
    COMPLETING = auto()
    STORING = auto()


class Checkpoints:
    """See the file's head.

    Args:
        last: The last one that all workers have stored.
        first_name: No earlier checkpoint has this name, also none that has failed.
        deadline_s: One that takes longer has failed.
    """

    def __init__(self, last: Checkpoint | None, first_name: int, deadline_s: float) -> None:
        self.last = last
        self.error = ""  # why the last attempt has failed
        self.phase = Phase.RESTS
        self._name = first_name - 1
        self._deadline_s = deadline_s
        self._ends_s = 0.0
        self._number = 0
        self._workers: frozenset[str] = frozenset()
        self._missing: set[str] = set()
        self._decisions: dict[int, bool] = {}
        self._stored_by: dict[Slice, str] = {}

    def begin(self, workers: Iterable[str], version: int, now_s: float) -> Pause:
        """One begins. Until it has ended the map does not change.

        Args:
            workers: All.
            version: Of the map.
            now_s: The time.

        Returns:
            What all are told.
        """
        assert self.phase is Phase.RESTS
        self._name += 1
        self._workers = frozenset(workers)
        self._ends_s = now_s + self._deadline_s
        self._number = 0
        self._decisions, self._stored_by = {}, {}
        self._go_to(Phase.PAUSING)
        return Pause(self._name, version)

    def on_report(self, report: Report) -> Complete | Store | Resume | None:
        """A worker has answered. What all are told now."""
        if (
            not isinstance(report, Paused | Completed | Stored)
            or report.checkpoint != self._name
            or report.worker not in self._missing
        ):
            return None
        if isinstance(report, Paused) and self.phase is Phase.PAUSING:
            self._number = max(self._number, report.furthest)
        elif isinstance(report, Stored) and self.phase is Phase.STORING:
            if report.error:
                return self.fail(f"{report.worker}: {report.error}")
            self._decisions.update(report.decisions)
            self._stored_by.update(dict.fromkeys(report.slices, report.worker))
        elif not (isinstance(report, Completed) and self.phase is Phase.COMPLETING):
            return None  # of an earlier phase, again
        self._missing.discard(report.worker)
        return None if self._missing else self._next()

    def tick(self, now_s: float) -> Resume | None:
        """Time goes on."""
        if self.phase is Phase.RESTS or now_s < self._ends_s:
            return None
        late = ", ".join(sorted(self._missing))
        return self.fail(f"{late} took longer than {self._deadline_s:g} s ({self.phase.name}).")

    def fail(self, error: str) -> Resume:
        """The one that runs has failed."""
        self.error = error
        self.phase = Phase.RESTS
        self._missing = set()
        return Resume()

    def _next(self) -> Complete | Store | Resume:
        if self.phase is Phase.PAUSING:
            self._go_to(Phase.COMPLETING)
            return Complete(self._name, self._number)
        if self.phase is Phase.COMPLETING:
            self._go_to(Phase.STORING)
            return Store(self._name)
        self.last = Checkpoint(self._name, self._number, self._decisions, self._stored_by)
        self.error = ""
        self.phase = Phase.RESTS
        return Resume()

    def _go_to(self, phase: Phase) -> None:
        self.phase = phase
        self._missing = set(self._workers)
