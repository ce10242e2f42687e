"""Options that several programs have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from clamor_ray._protocol.config import Config

from .waiting import PARTITIONS_PER_CPU

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _checked(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """As the library reads it, before a cluster is started for it."""
    if value is not None:
        try:
            Config.from_env({}, **{str(option.name): value})
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which --help has them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


cluster_options: Decorator = together(
    click.option(
        "--cache-bytes",
        callback=_checked,
        help="Most that each node caches of what is homed elsewhere, as in 64MiB. "
        "Default: CLAMOR_CACHE_BYTES, or a quarter of its memory.",
    ),
    click.option(
        "--cache-policy",
        callback=_checked,
        help="Which cached blocks go first: sieve, fifo, lru, lfu or random. "
        "Default: CLAMOR_CACHE_POLICY, or sieve.",
    ),
    click.option(
        "--nodes",
        type=click.IntRange(1, 64),
        help="Start a local cluster of so many nodes, unless RAY_ADDRESS names one. "
        "Default: 3 for the demo, else whatever ray.init() finds.",
    ),
)


def count(flag: str, name: str | None, text: str, *, least: int = 1) -> Decorator:
    """A whole number that has no default of its own."""
    return click.option(flag, *filter(None, [name]), type=click.IntRange(least), help=text)


def number(flag: str, default: int, text: str | None = None, *, least: int = 1) -> Decorator:
    """A whole number with a default."""
    return click.option(
        flag, default=default, show_default=True, type=click.IntRange(least), help=text
    )


def real(
    flag: str, default: float | None, text: str, *, least: float = 0, above: bool = False
) -> Decorator:
    """A number from `least` on, or above it where `above`."""
    return click.option(
        flag, default=default, show_default=default is not None,
        type=click.FloatRange(least, min_open=above), help=text,
    )  # fmt: skip


def new_file(flag: str, text: str) -> Decorator:
    """Path of a file to write."""
    return click.option(flag, type=click.Path(path_type=Path, dir_okay=False), help=text)


def new_folder(flag: str, text: str, *names: str) -> Decorator:
    """Path of a folder to write to."""
    return click.option(flag, *names, type=click.Path(path_type=Path, file_okay=False), help=text)


def partitions(more: str = "") -> Decorator:
    """--partitions."""
    return count(
        "--partitions", "n_partitions", f"Default: {PARTITIONS_PER_CPU} for each CPU{more}."
    )


def seed(text: str | None = None) -> Decorator:
    """--seed."""
    return click.option("--seed", default=1, show_default=True, help=text)


def check(work: str = "Do it") -> Decorator:
    """--check: None where it was not given; `program` makes a yes or no of it."""
    return click.option(
        "--check/--no-check",
        default=None,
        help=f"{work} in this process too, and compare. Default: for the demo.",
    )


def sample(text: str = "Queries to answer by brute force too.") -> Decorator:
    """--check, of programs that check some answers."""
    return click.option(
        "--check", "sample", default=64, show_default=True, type=click.IntRange(0), help=text
    )


def exponent(text: str) -> Decorator:
    """--exponent of a power law."""
    return real("--exponent", 2.1, text, least=1, above=True)


def penalty(default: float) -> Decorator:
    """--penalty of a linear model."""
    text = "Half of it times the squared length of the weights is added to the mean loss."
    return real("--penalty", default, text)
