"""What a command says: a table for people, or JSON for scripts, and its exit status."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from clamor_ray import errors

WELL: Final = 0
WRONG: Final = 1  # something is lost, late or not as it should be
NOT_CHECKED: Final = 2  # a wrong argument, no cluster, no answer


class NotAskedError(Exception):
    """What was asked for is not there: the text says what is, and what to do."""


ID_DIGITS: Final = 12  # of a node's id: so many name it
FORMATS: Final = ("text", "json")


def say_json(what: Any) -> None:
    """On standard output, one document."""
    click.echo(json.dumps(what, indent=2, sort_keys=True))


def console() -> Console:
    """Standard output. As wide as the terminal; where it is none, as wide as the text."""
    wide = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()
) -> Table:
    """One with few lines.

    Args:
        columns: their heads.
        rows: of cells.
        numbers: the columns that are aligned to the right.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        right = name in numbers
        made.add_column(name, justify="right" if right else "left", no_wrap=right)
    for row in rows:
        made.add_row(*row)
    return made


def _finite(ctx: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("a number of seconds")
    return value


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--address, --session, --timeout and --format, for a command that asks a cluster."""
    for option in (
        click.option(
            "--format", "form", type=click.Choice(FORMATS), default="text", show_default=True
        ),
        click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(0.1, 86_400.0),
            callback=_finite,
            default=30.0,
            show_default=True,
            metavar="SECONDS",
            help="For all answers together.",
        ),
        click.option("--session", metavar="NAME", help="Its name, or the beginning of its scope."),
        click.option(
            "--address", metavar="HOST:PORT", help="Of Ray. Else RAY_ADDRESS, or this machine's."
        ),
    ):
        command = option(command)
    return command


def exits(command: Callable[..., int]) -> Callable[..., None]:
    """The command's result is the exit status; 2 where it could not be asked, with the reason."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            code = command(*args, **options)
        except (errors.ClamorError, NotAskedError) as error:
            click.echo(f"clamor: {error}", err=True)
            code = NOT_CHECKED
        except OSError as error:
            click.echo(f"clamor: {type(error).__name__}: {error}", err=True)
            code = NOT_CHECKED
        sys.exit(code)

    return run
