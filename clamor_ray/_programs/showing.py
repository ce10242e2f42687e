"""Shows how far a program is while somebody waits for it: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from clamor_ray._observe.progress import ProgressLines, to_stderr

NAME = "program"


class Showing:
    """Rounds, where the program has loops, else tasks; rate; how even the work is.

    Args:
        wanted: whether anything is shown.
        ask: how far it is, a `ProgramProgress`. It is asked only where something is shown.
    """

    def __init__(self, wanted: bool, ask: Callable[[], Any]) -> None:
        self._wanted = wanted
        self._ask = ask
        self._bar: Any = None
        self._lines: ProgressLines | None = None

    def look(self) -> None:
        """Called about once a second."""
        if not self._wanted:
            return
        now = self._ask()
        done, unit = (now.rounds, "rounds") if now.loops else (now.tasks, "tasks")
        if not sys.stderr.isatty():
            if self._lines is None:
                self._lines = ProgressLines(to_stderr, f"{NAME}, {unit}", now.most_rounds)
            self._lines.at(done, ", ".join(filter(None, (now.rate, now.skew))))
            return
        if self._bar is None:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(total=now.most_rounds, unit=unit, flush_interval_s=0.0)
        self._bar.n = done
        # Without its first word, a bar with rates fits in 80 columns.
        self._bar.set_description(now.skew.removeprefix("busiest ") or NAME)

    def ended(self) -> None:
        """The program has ended: a bar that is there shows all of it."""
        if self._bar is not None:
            self.look()

    def close(self) -> None:
        """It is waited for no more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
