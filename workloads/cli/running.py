"""A program of stages (`clamor.Program`) on the cluster: its run, what is shown of it, its options.

What the stages are is in `workloads/recipes/`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

import clamor_ray as clamor

from . import options
from .program import CommandRun
from .stages import Stages
from .waiting import TASK_TIMEOUT_S

__all__ = ["check_options", "ended", "print_progress", "progress_option", "recipes_options"]

LOOK_S: Final = 1.0
ENDINGS: Final = (".png", ".svg", ".pdf")


@contextlib.contextmanager
def ended(
    p: Any, stages: Stages, text: str, most: int, picture: Path | None
) -> Iterator[tuple[Any, Any]]:
    """Runs a program until it ends. Yields its job, which has the results, and its progress.

    Args:
        p: a `clamor.Program`.
        text: what it does.
        most: its rounds.
        picture: of its progress, to write.

    Raises:
        TimeoutError: For TASK_TIMEOUT_S nothing has run.
    """
    with stages.stage("place", "placing partitions at their workers"):
        job = p.run()
    try:
        with stages.stage("iterate", text, most) as done:
            _wait(job, done)
        yield job, job.progress(picture=picture)
    finally:
        job.stop()


def _wait(job: Any, done: Callable[..., object]) -> None:
    tasks, moved_s = -1, time.monotonic()
    while True:
        try:
            job.wait(LOOK_S, progress=False)
            return
        except clamor.errors.WaitTimeoutError:  # it runs still
            now = job.progress()
        done(now.rounds, ", ".join(filter(None, (now.rate, now.skew))))
        if now.tasks != tasks:
            tasks, moved_s = now.tasks, time.monotonic()
        elif time.monotonic() - moved_s > TASK_TIMEOUT_S:
            raise TimeoutError(f"no stage of the program has ended for {TASK_TIMEOUT_S:.0f} s")


def print_progress(asked: CommandRun, progress: Any) -> None:
    """The table of a program that has ended; None: there was none."""
    if progress is not None:
        asked.say(f"Program\n{progress}")


progress_option = options.new_file(
    "--progress-picture",
    "Picture to write (.png, .svg or .pdf): rounds, tasks a second and cores of each node by time, "
    "and the seconds of partitions.",
)

recipes_options = options.together(
    click.option(
        "--recipes",
        is_flag=True,
        help="As a program whose tasks start each other (clamor.Program): the driver takes no part "
        "in an iteration.",
    ),
    progress_option,
)


def check_options(picture: str | os.PathLike[str] | None, recipes: bool = True) -> None:
    """Refuses those that make no sense.

    Args:
        picture: of --progress-picture.
        recipes: whether a program runs.

    Raises:
        click.UsageError: There is no program, or no such format.
    """
    if picture is None:
        return
    if not recipes:
        raise click.UsageError("--progress-picture is of a program: add --recipes")
    if not os.fspath(picture).lower().endswith(ENDINGS):
        raise click.UsageError(f"--progress-picture ends with {', '.join(ENDINGS)}")
