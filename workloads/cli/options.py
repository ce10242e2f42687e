"""Options that several programs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from clamor_ray._protocol.config import Config


def _checked(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """As the library reads it, before a cluster is started for it."""
    if value is not None:
        try:
            Config.from_env({}, **{str(option.name): value})
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return value


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--cache-bytes, --cache-policy and --nodes."""
    for option in (
        click.option(
            "--nodes",
            type=click.IntRange(1, 64),
            help="Start a local cluster of so many nodes, unless RAY_ADDRESS names one. "
            "Default: 3 for the demo, else whatever ray.init() finds.",
        ),
        click.option(
            "--cache-policy",
            callback=_checked,
            help="Which cached blocks go first: sieve, s3fifo, fifo, lru, lfu, random or clock. "
            "Default: CLAMOR_CACHE_POLICY, or sieve.",
        ),
        click.option(
            "--cache-bytes",
            callback=_checked,
            help="Most that each node caches of what is homed elsewhere, as in 64MiB. "
            "Default: CLAMOR_CACHE_BYTES, or a quarter of its memory.",
        ),
    ):
        command = option(command)
    return command
