"""Progress of a program: a stage at a time, on the console."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from clamor_ray._observe.progress import ProgressLines


class Stages:
    """Progress on the console, and how long each stage took.

    On a terminal a live bar; in a log (``ray job submit``) a line every few seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, text: str, total: int | None = None) -> Iterator[Any]:
        """Times a stage; yields a function to call with the amount done so far, and, if there is
        more to say, that.
        """
        text = escape(text)  # it may name a file
        started = time.perf_counter()
        if self.console.is_terminal:
            with Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            ) as progress:
                task = progress.add_task(text, total=total)

                def done(n: int, more: str = "") -> None:
                    below = f"\n[dim]{escape(more)}[/dim]" if more else ""
                    progress.update(task, completed=n, description=text + below)

                yield done
        else:
            yield ProgressLines(self._say, f"  {text}", total).at
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.console.print(f"[green]✓[/green] {text} [dim]{self.seconds[name]:.2f} s[/dim]")

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)
