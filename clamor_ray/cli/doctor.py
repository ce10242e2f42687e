"""`clamor doctor`: what this machine, or container, gives a session. It asks no cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from clamor_ray._protocol.config import Config
from clamor_ray.cli import ports
from clamor_ray.cli.machine import Finding, findings, look
from clamor_ray.cli.output import FORMATS, NOT_CHECKED, WELL, WRONG, console, exits, say_json

_MARKS: Final = {"ok": "ok", "note": "note", "wrong": "WRONG"}


def _say(found: list[Finding]) -> None:
    out = console()
    width = max(len(each.check) for each in found)
    for each in found:
        out.print(f"{_MARKS[each.level]:<6}{each.check:<{width}}  {each.says}.", soft_wrap=True)
        if each.remedy:
            out.print(f"{'':<6}{'':<{width}}  {each.remedy}", soft_wrap=True, style="dim")


@click.command("doctor")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    ports.OPTION,
    "metrics_port",
    type=click.IntRange(1, 65_535),
    metavar="PORT",
    help="The one that ray start gets: whether a node can have it, and who has it.",
)
@exits
def command(form: str, metrics_port: int | None) -> int:
    """What this machine, or this container, gives a session: run it where page servers run.

    It tries the traps, and looks at seccomp, capabilities, the device, huge pages, the kernel,
    memory against the budgets, limits, the disk and versions. It needs no cluster.

    Exit status: 0, a session works here; 1, it does not, or not as the settings ask for; 2, a
    setting (CLAMOR_*) makes no sense.
    """
    try:
        config = Config.from_env()
    except ValueError as wrong:
        click.echo(f"clamor: {wrong}", err=True)
        return NOT_CHECKED
    machine = look(config)
    found = [*findings(machine, config), *ports.of_last_start()]
    if metrics_port is not None:
        found.append(ports.of_port(metrics_port))
    if form == "json":
        say_json({"trap": machine.trap, "findings": [asdict(each) for each in found]})
    else:
        _say(found)
    return WRONG if any(each.level == "wrong" for each in found) else WELL
