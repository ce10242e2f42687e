"""A bar for each stage, in Ray's way; nothing where the output is no terminal."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """Counts a stage's tasks.

    Args:
        name: of the stage.
        total: of its tasks.
        wanted: None: where stderr is a terminal.
    """

    def __init__(self, name: str, total: int, wanted: bool | None) -> None:
        self._bar: Any = None
        if wanted if wanted is not None else sys.stderr.isatty():
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(total=total, desc=name, unit="tasks")

    def done(self) -> None:
        """One more task is done."""
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
