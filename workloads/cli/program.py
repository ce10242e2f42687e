"""The command line that all programs have: a function with its options becomes a command.

Options come in; what goes out is a text, an exit status, and the files that were asked for.
Exit status: 0; 1 where a result is wrong; 2 where options or input cannot be used; 3 where the
library cannot work here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape

import clamor_ray as clamor

from ..data.errors import InputError, WrongResult
from .attaching import attached
from .options import cluster_options
from .stages import Stages

DEMO_NODES: Final = 3

UNUSABLE: Final = (InputError, clamor.errors.SourceError, clamor.errors.MissingColumnError)


@dataclasses.dataclass(frozen=True)
class CommandRun:
    """A run of a program: what has nothing to do with its work.

    Args:
        console: for people.
        stages: progress on it.
        demo: whether it shows what it does, on a local cluster.
        nodes: of a cluster to start; None for whatever `ray.init()` finds.
        settings: of `clamor.init`; None where nothing was asked for.
    """

    console: Console
    stages: Stages
    demo: bool
    nodes: int | None
    settings: dict[str, Any]

    def attached(self, **more: Any) -> contextlib.AbstractContextManager[Any]:
        """See `attaching.attached`; `more` are the program's own settings of `clamor.init`."""
        return attached(self.nodes, self.stages, **self.settings, **more)

    def say(self, text: str) -> None:
        """A line of its own, that the terminal wraps; brackets in it are brackets."""
        self.console.print(text, soft_wrap=True, markup=False)

    def wrote(self, **files: Path | str | None) -> None:
        """Says where files are; nothing of those that were not asked for."""
        found = {name: path for name, path in files.items() if path is not None}
        width = max(map(len, found), default=0)
        lines = [f"{name:{width}}  {path}" for name, path in found.items()]
        if lines:
            self.say("\n" + "\n".join(lines))


def program(demo_help: str) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function that takes a `CommandRun` and the options below it.

    The command has --demo, --nodes, --cache-bytes and --cache-policy as well. An option `check`
    that was not given is whether it is the demo.

    Args:
        demo_help: what the demo does.
    """

    def decorate(body: Callable[..., None]) -> click.Command:
        @functools.wraps(body)
        def command(
            *,
            demo: bool,
            nodes: int | None,
            cache_bytes: str | None,
            cache_policy: str | None,
            **options: Any,
        ) -> None:
            console = Console(highlight=False)
            settings = {"cache_bytes": cache_bytes, "cache_policy": cache_policy}
            nodes = nodes or (DEMO_NODES if demo else None)
            if "check" in options and options["check"] is None:
                options["check"] = demo
            with exit_status(console):
                body(CommandRun(console, Stages(console), demo, nodes, settings), **options)

        # Click lists what was added last first.
        own = vars(command).pop("__click_params__", [])
        cluster_options(command)
        vars(command)["__click_params__"] += own
        click.option("--demo", is_flag=True, help=demo_help)(command)
        return click.command(context_settings={"help_option_names": ["-h", "--help"]})(command)

    return decorate


@contextlib.contextmanager
def exit_status(console: Console) -> Iterator[None]:
    """Ends the process where the work fails, as the top of this file says."""
    try:
        yield
    except WrongResult as error:
        status, heading, text = 1, error.heading(), str(error)
    except UNUSABLE as error:
        status, heading, text = 2, "error", str(error)
    except clamor.errors.ClamorError as error:
        status, heading, text = 3, "error", str(error)
    else:
        return
    console.print(f"[red]{heading}:[/red] {escape(text)}", soft_wrap=True)
    sys.exit(status)


def refuse_both(data: object, generated: Mapping[str, object], what: str) -> None:
    """Options of generated data make no sense where data is given.

    Args:
        data: what was given.
        generated: such options by their names, in order.
        what: is generated.

    Raises:
        click.UsageError: There is both.
    """
    if data and any(generated.values()):
        *names, last = generated
        raise click.UsageError(
            f"{', '.join(names)} and {last} are of generated {what}: give no file"
        )
